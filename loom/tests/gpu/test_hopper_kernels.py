"""Triton kernels on sm_90: tensor descriptors, wgmma of every type and layout that it generates, warp specialization.

Results are compared with f64, and there must be no findings, whether copies arrive late or early.
"""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import triton_loom
from gpu import hopper_kernels
from gpu.hopper_kernels import MATMULS, Case, attend, matmul, products
from triton.tools.tensor_descriptor import TensorDescriptor

F8, F8B, BF16, F16, F32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32
DELIVERIES: tuple[Literal["late", "early"], ...] = ("late", "early")


def check(case: Case, uses: str = "wgmma", known: frozenset[str] = frozenset()) -> str:
    """Run a case; return its PTX. `known` are its expected findings."""
    for delivery in DELIVERIES:
        result, expected, launch = case.make()
        with triton_loom.emulate("sm_90", raises=False, delivery=delivery) as gpu:
            kernel = launch()
        assert {finding.kind for finding in gpu.findings} == known
        error = (result.double() - expected).abs().max().item()
        assert error <= case.tolerance * expected.abs().max().item()
        text: str = kernel.asm["ptx"]
        assert uses in text
    return text


def test_mbarriers_that_triton_does_not_fence() -> None:
    """There is no fence between the inits and the copies. Triton generally omits it, so it is reported on request."""
    _, _, launch = MATMULS["host-made descriptors"].make()
    with triton_loom.emulate("sm_90", raises=False, strict=True) as gpu:
        ptx = launch().asm["ptx"]
    assert {finding.kind for finding in gpu.findings} == {"mbarrier fence missing"}
    before_copies = ptx[ptx.index("mbarrier.init") : ptx.index("cp.async.bulk.tensor")]
    assert "fence" not in before_copies


@pytest.mark.parametrize("name", MATMULS)
def test_matmul(name: str) -> None:
    ptx = check(MATMULS[name], "cp.async.bulk.tensor.2d.shared::cta.global")
    assert ("tensormap.replace" in ptx) == (name in ("device-made descriptors", "warp specialization"))
    assert ("setmaxnreg" in ptx) == (name == "warp specialization")


def test_attention() -> None:
    ptx = check(attend(128, causal=True), "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16")
    assert "cp.async.bulk.tensor" in ptx


def test_attention_by_pointers() -> None:
    """Triton 3.7.1 fences cp.async's data when the copy is issued, not when it has arrived: the fence before the
    product with K stands between the copy of V and the wait for it, and there is none before the product with V."""
    known = frozenset({"proxy fence missing after cp.async"})
    ptx = check(attend(192, causal=False, by_pointers=True, num_stages=3), "cp.async.cg.shared.global", known)
    assert "fence.proxy.async" in ptx


# By type, by transposed operands, by tile: together every swizzle and both majors.
PRODUCTS = {
    "bf16": products(BF16, BF16, F32, ""),
    "bf16, both transposed": products(BF16, BF16, F32, "ab"),
    "f16, rows of 64 bytes": products(F16, F16, F32, "b", bk=32),
    "f16, rows of 32 bytes": products(F16, F16, F32, "b", bk=16),
    "f16 in f16": products(F16, F16, F16, "a", bn=32),
    "tf32": products(F32, F32, F32, "b", bk=32),
    "e4m3": products(F8, F8, F32, "b", bk=128, k=256),
    "e5m2 by e4m3": products(F8B, F8, F32, "b"),
    "int8": products(torch.int8, torch.int8, torch.int32, "b"),
    "bf16, eight warps": products(BF16, BF16, F32, "a", bm=128, bn=64, num_warps=8),
    "bf16, 256 columns": products(BF16, BF16, F32, "", bn=256, n=256, k=64),
    "bf16, 16 columns": products(BF16, BF16, F32, "", bn=16),
}
QUICK = ("bf16, both transposed", "f16, rows of 32 bytes", "e5m2 by e4m3")


# Triton 3.7.1 unpacks 16-bit accumulators before it waits for the product. ptxas detects it and waits for it there
# ("C7517: warpgroup.wait is injected ... to allow use of registers defined by GMMA").
KNOWN = {"f16 in f16": frozenset({"product under way"})}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in PRODUCTS]
)
def test_products(name: str) -> None:
    check(PRODUCTS[name], known=KNOWN.get(name, frozenset()))


def test_findings_that_ptxas_mends_are_listed_and_not_raised() -> None:
    _, _, launch = PRODUCTS["f16 in f16"].make()
    with triton_loom.emulate("sm_90") as gpu:
        launch()
    assert {finding.kind for finding in gpu.findings} == {"product under way"}
    assert "ptxas" in gpu.report()


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_attention_of_more_rows(causal: bool, dtype: torch.dtype) -> None:
    check(attend(256, causal, dtype, num_stages=3))


@pytest.mark.slow
def test_attention_with_warp_specialization() -> None:
    assert "setmaxnreg" in check(attend(256, causal=False, SPECIALIZED=True))


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_depths_of_the_pipeline(stages: int) -> None:
    for kernel in ("host", "device"):
        check(matmul(kernel, 128, 128, 320, bm=64, bn=64, num_stages=stages))


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_reductions(delivery: Literal["late", "early"]) -> None:
    x = torch.randn(6, 32, 64, generator=torch.Generator().manual_seed(0)) * 100
    total, least = torch.zeros(32, 64), torch.full((32, 64), 2**30, dtype=torch.int32)
    with triton_loom.emulate("sm_90", delivery=delivery):
        hopper_kernels.reductions[(6,)](
            x,
            TensorDescriptor.from_tensor(total, [32, 64]),
            TensorDescriptor.from_tensor(least, [32, 64]),
            BM=32,
            BN=64,
        )
    assert (total.double() - x.double().sum(0)).abs().max() < 1e-3
    assert torch.equal(least, x.to(torch.int32).amin(0))


def test_three_dimensions_with_nan_outside() -> None:
    x = torch.randn(5, 6, 40).to(BF16)
    y = torch.zeros(4, 4, 16, dtype=BF16)
    with triton_loom.emulate("sm_90"):
        hopper_kernels.rearrange[(1,)](
            TensorDescriptor(x, list(x.shape), list(x.stride()), [4, 4, 16], padding="nan"),
            TensorDescriptor.from_tensor(y, [4, 4, 16]),
            *(3, 4, 32),
            *(4, 4, 16),
        )
    assert torch.equal(y[:2, :2, :8], x[3:, 4:, 32:])
    assert all(outside.isnan().all() for outside in (y[2:], y[:, 2:], y[:, :, 8:]))


def test_gather_and_scatter() -> None:
    """These copies of individually listed rows are sm_100's."""
    x, y = torch.randn(40, 64).to(BF16), torch.zeros(40, 64, dtype=BF16)
    rows = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:16].to(torch.int32)
    with triton_loom.emulate("sm_100"):
        kernel = hopper_kernels.gather_and_scatter[(1,)](
            TensorDescriptor.from_tensor(x, [1, 64]), TensorDescriptor.from_tensor(y, [1, 64]), rows, 16, 64
        )
    assert all(name in kernel.asm["ptx"] for name in ("gather4", "scatter4"))
    expected = torch.zeros_like(x)
    expected[rows.long()] = x[rows.long()]
    assert torch.equal(y, expected)
