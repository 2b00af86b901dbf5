"""Triton kernels on sm_100: products in tensor memory of every type, with scales, attention, warp specialization.

Results are compared with f64, and there must be no findings, whether commits and copies arrive late or early.
"""

from __future__ import annotations

import re
from typing import Literal

import pytest
import torch
import triton_loom
from gpu.blackwell_kernels import scaled_by_tiles, scaled_products, twice, twice_from_zero
from gpu.hopper_kernels import MATMULS, Case, attend, matmul, products

F8, F8B, BF16, F16, F32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32
DELIVERIES: tuple[Literal["late", "early"], ...] = ("late", "early")


def check(case: Case, *uses: str) -> str:
    """Run a case; return its PTX, in which all of `uses` occur."""
    for delivery in DELIVERIES:
        result, expected, launch = case.make()
        with triton_loom.emulate("sm_100", delivery=delivery) as gpu:
            kernel = launch()
        assert not gpu.findings
        error = (result.double() - expected).abs().max().item()
        assert error <= case.tolerance * expected.abs().max().item()
        text: str = kernel.asm["ptx"]
        assert all(part in text for part in uses)
    return text


@pytest.mark.parametrize("name", MATMULS)
def test_matmul(name: str) -> None:
    ptx = check(MATMULS[name], "cp.async.bulk.tensor.2d", "tcgen05.mma.cta_group::1.kind::f16")
    assert ("setmaxnreg" in ptx) == (name == "warp specialization")


def test_attention() -> None:
    """The probabilities are A of the second product, in tensor memory."""
    ptx = check(
        attend(128, causal=True), "tcgen05.st.sync.aligned.16x32bx2", "tcgen05.ld.sync.aligned.16x32bx2"
    )
    assert re.search(r"kind::f16 \[ %r\d+ \+ 0 \], \[ %r", ptx)


def test_attention_by_pointers() -> None:
    check(attend(192, causal=False, by_pointers=True), "cp.async.cg.shared.global", "tcgen05.mma")


# By type, by transposed operands, by tile: together every swizzle and both majors.
PRODUCTS = {
    "bf16": products(BF16, BF16, F32, "", bm=128),
    "bf16, both transposed": products(BF16, BF16, F32, "ab", bm=128),
    "f16, rows of 64 bytes": products(F16, F16, F32, "b", bm=128, bk=32),
    "f16, rows of 32 bytes": products(F16, F16, F32, "b", bm=128, bk=16),
    "f16 in f16": products(F16, F16, F16, "ab", bm=128),
    "tf32": products(F32, F32, F32, "b", bm=128, bk=32),
    "tf32, B transposed by the kernel": products(F32, F32, F32, "", bm=128, bk=32),
    "e4m3": products(F8, F8, F32, "b", bm=128, bk=128, k=256),
    "e5m2 by e4m3, both transposed": products(F8B, F8, F32, "a", bm=128, bk=128, k=256),
    "64 rows": products(BF16, BF16, F32, "a", bm=64),
    "eight warps, 256 columns": products(BF16, BF16, F32, "a", bm=128, bn=256, n=256, num_warps=8),
    "256 rows": products(BF16, BF16, F32, "", bm=256, m=256, num_warps=8),
}
QUICK = ("f16, rows of 32 bytes", "f16 in f16", "tf32", "e5m2 by e4m3, both transposed", "64 rows")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in PRODUCTS]
)
def test_products(name: str) -> None:
    check(PRODUCTS[name], "tcgen05.mma", "tcgen05.commit")


def test_integers_are_multiplied_by_warps() -> None:
    """Triton does not use tcgen05 for integers or for 32 rows."""
    assert "tcgen05" not in check(products(torch.int8, torch.int8, torch.int32, "b", bm=128), "mma.sync")
    assert "tcgen05" not in check(products(BF16, BF16, F32, "a", bm=32), "mma.sync")


MX8, MX4, NV4 = "kind::mxf8f6f4.block_scale", "kind::mxf4.block_scale", "kind::mxf4nvf4.block_scale"
SCALED = {
    "mxfp8": (MX8, scaled_products("e4m3", "e4m3")),
    "mxfp8, 64 columns": (MX8, scaled_products("e5m2", "e4m3", bn=64, n=64)),
    "mxfp8, 256 columns": (MX8, scaled_products("e4m3", "e5m2", bn=256, n=256)),
    "mxfp4": (MX4, scaled_products("e2m1", "e2m1")),
    "nvfp4": (NV4, scaled_products("e2m1", "e2m1", 16)),
    "mxfp8 by mxfp4": (MX8, scaled_products("e4m3", "e2m1")),
    "mxfp4 by mxfp8": (MX8, scaled_products("e2m1", "e5m2")),
}
SCALED_TILES = {
    "mxfp8": (MX8, scaled_by_tiles("e4m3")),
    "mxfp4": (MX4, scaled_by_tiles("e2m1", bk=256)),
    "nvfp4": (NV4, scaled_by_tiles("e2m1", 16, bk=256)),
    "mxfp8, warp specialization": (MX8, scaled_by_tiles("e4m3", 32, True, m=256, n=256)),
    "nvfp4, warp specialization": (NV4, scaled_by_tiles("e2m1", 16, True, m=256, n=256, bk=256)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if "columns" in n else []) for n in SCALED]
)
def test_scales_from_registers(name: str) -> None:
    kind, case = SCALED[name]
    check(case, kind, "tcgen05.st")


@pytest.mark.parametrize("name", SCALED_TILES)
def test_scales_from_shared_memory(name: str) -> None:
    kind, case = SCALED_TILES[name]
    check(case, kind, "tcgen05.cp.cta_group::1.warpx4.32x128b")


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
        check(matmul(kernel, 128, 128, 320, bm=128, bn=64, num_stages=stages))


def test_two_products_into_one_accumulator() -> None:
    """Triton 3.6 to 3.8 wait for the second product an iteration too late (triton-lang/triton#10821): the sums are read
    while it adds to them, and the result is wrong. With one stage it is right."""
    check(twice(num_stages=1), "tcgen05.mma")
    for delivery in DELIVERIES:
        result, expected, launch = twice(num_stages=3).make()
        with triton_loom.emulate("sm_100", raises=False, delivery=delivery) as gpu:
            launch()
        assert "tensor memory race" in {finding.kind for finding in gpu.findings}
        assert (result - expected).abs().max() > 1
        assert all("…" in str(finding) for finding in gpu.findings if "race" in finding.kind)


def test_two_products_with_two_stages() -> None:
    """The result may happen to be right. As on sm_90 (test_hopper_kernels.py), cp.async's data is fenced when the copy
    is issued."""
    result, expected, launch = twice(num_stages=2).make()
    with triton_loom.emulate("sm_100", raises=False) as gpu:
        launch()
    assert (result - expected).abs().max() < 1e-3
    kinds = {finding.kind for finding in gpu.findings}
    assert kinds == {"proxy fence missing after cp.async", "tensor memory race"}


def test_two_products_from_zero() -> None:
    """Triton 3.7.1 issues the first product of the next iteration when the issuing thread has loaded the last sums:
    other warps may not have. With a barrier in the loop it is right."""
    check(twice_from_zero(meets=True), "tcgen05.mma")
    for delivery in DELIVERIES:
        result, expected, launch = twice_from_zero(meets=False).make()
        with triton_loom.emulate("sm_100", raises=False, delivery=delivery) as gpu:
            launch()
        assert {finding.kind for finding in gpu.findings} == {"tensor memory race"}
        assert all(
            "tcgen05.mma" in f.by.instruction and "tcgen05.ld" in f.other.instruction
            for f in gpu.findings
            if f.other is not None
        )
        assert (result - expected).abs().max() > 1


def test_counters() -> None:
    """FLOPs of products are known from their descriptors."""
    _, _, launch = MATMULS["edges"].make()
    with triton_loom.emulate("sm_100", counters=True) as gpu:
        launch()
    (kernel,) = gpu.counters.values()
    assert kernel.total.tensor_flops == 2 * 128 * 128 * 256  # 100 x 72 x 200 in tiles of 64
