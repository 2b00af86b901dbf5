"""The kernels of Triton's tutorials against PyTorch. A tutorial's functions are read from its file; what it does with
them, which is to print and to measure, is left out.
"""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from conformance.cases.support import allow

ON_GPU = triton.runtime.driver.active.get_current_target().backend == "cuda"
HOPPER = ON_GPU and torch.cuda.get_device_capability()[0] == 9
FP16, BF16 = torch.float16, torch.bfloat16
FP8 = torch.float8_e5m2

on_hopper = pytest.mark.skipif(not HOPPER, reason="copies of tiles (TMA) that are sized for sm_90")


@functools.cache
def tutorial(name: str, *values: str) -> SimpleNamespace:
    """Load a tutorial's imports, functions and classes, and of its other statements those that define these values."""
    file = next(file for entry in sys.path for file in Path(entry).glob(f"{name}*.py"))

    def wanted(statement: ast.stmt) -> bool:
        if isinstance(statement, ast.FunctionDef):
            return not any("perf_report" in ast.unparse(each) for each in statement.decorator_list)
        assigned = [
            n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        ]
        kinds = ast.Import | ast.ImportFrom | ast.ClassDef
        return isinstance(statement, kinds) or any(value in assigned for value in values)

    sys.modules.setdefault("tabulate", ModuleType("tabulate"))  # one of them prints with it
    text = ast.parse(file.read_text(), str(file))
    text.body = [statement for statement in text.body if wanted(statement)]
    names: dict[str, Any] = {"__name__": f"tutorial_{name}", "__file__": str(file)}
    exec(compile(text, str(file), "exec"), names)
    return SimpleNamespace(**names)


def close(got: torch.Tensor, expected: torch.Tensor, atol: float = 1e-2, rtol: float = 1e-2) -> None:
    torch.testing.assert_close(got.float(), expected.float(), atol=atol, rtol=rtol)


def test_vector_add() -> None:
    x, y = torch.rand(2, 5000)
    close(tutorial("01", "DEVICE").add(x, y), x + y, 0, 0)


def test_softmax() -> None:
    x = torch.randn(37, 781)
    y = torch.empty_like(x)
    sizes = *x.stride()[:1], *y.stride()[:1], *x.shape
    tutorial("02", "DEVICE").softmax_kernel[(8,)](y, x, *sizes, BLOCK_SIZE=1024, num_stages=4, num_warps=8)
    close(y, x.softmax(1), 1e-6, 1e-5)


@pytest.mark.parametrize("activation", ["", "leaky_relu"])
def test_matmul(activation: str) -> None:
    a, b = torch.rand(200, 136).half() - 0.5, torch.rand(136, 264).half() - 0.5
    expected = a.float() @ b.float()
    if activation:
        expected = torch.nn.functional.leaky_relu(expected)
    close(tutorial("03", "DEVICE").matmul(a, b, activation), expected)


def test_matmul_fp8() -> None:
    a, b = (torch.randn(128, 128).half().to(FP8) for _ in range(2))
    close(tutorial("03", "DEVICE").matmul(a, b), a.float() @ b.float(), 0.125)


def test_dropout() -> None:
    x, kept = torch.randn(3000), torch.rand(3000) > 0.5
    close(tutorial("04", "DEVICE").dropout(x, x_keep=kept.int(), p=0.5), torch.where(kept, 2 * x, 0))


def test_seeded_dropout() -> None:
    x = torch.randn(3000)
    first, again, other = (tutorial("04", "DEVICE").seeded_dropout(x, 0.5, seed) for seed in (123, 123, 512))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(first, torch.where(first != 0, 2 * x, 0))
    assert 0.4 < (first != 0).float().mean() < 0.6


def test_layer_norm() -> None:
    x = (torch.randn(151, 1000) * 0.5 - 2.3).half().requires_grad_()
    weight, bias = (torch.rand(1000).half().requires_grad_() for _ in range(2))
    dy = 0.1 * torch.randn(151, 1000).half()
    got = tutorial("05", "DEVICE", "layer_norm").layer_norm(x, (1000,), weight, bias, 1e-5)
    expected = torch.nn.functional.layer_norm(x, (1000,), weight, bias, 1e-5)
    close(got, expected)
    leaves = x, weight, bias
    for one, other in zip(
        torch.autograd.grad(got, leaves, dy), torch.autograd.grad(expected, leaves, dy), strict=True
    ):
        close(one, other)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("mode", "provider"), [("bwd", "triton-fp16"), ("fwd", "triton-fp8")])
def test_attention(causal: bool, mode: str, provider: str) -> None:
    attention = tutorial("06", "DEVICE", "NUM_STAGES_OPTIONS", "configs", "attention", "TORCH_HAS_FP8")
    attention.test_op(1, 2, 256, 64, causal, False, mode, provider)


def test_libdevice() -> None:
    x = torch.rand(5000)
    y = torch.empty_like(x)
    tutorial("07", "DEVICE").asin_kernel[(5,)](x, y, 5000, BLOCK_SIZE=1024)
    close(y, x.asin(), 1e-6, 1e-6)


def grouped(transposed: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    shapes = (256, 128, 128), (128, 256, 64), (128, 128, 192)  # whole tiles: the kernels have no masks
    a = [torch.rand(m, k).half() for m, n, k in shapes]
    b = [torch.rand(n, k).half() if transposed else torch.rand(k, n).half() for m, n, k in shapes]
    return a, b, [torch.empty(m, n).half() for m, n, k in shapes]


@pytest.mark.parametrize("tma", [False, pytest.param(True, marks=on_hopper)])
def test_grouped_gemm(tma: bool) -> None:
    """The kernel finds the addresses of its operands in memory."""
    groups = grouped(transposed=tma)
    a, b, c = groups
    allow(*a, *b, *c)
    addresses = [torch.tensor([each.data_ptr() for each in group]) for group in groups]
    shapes = [size for x, y in zip(a, c, strict=True) for size in (*y.shape, x.shape[1])]
    strides = [each.stride(0) for one in zip(*groups, strict=True) for each in one]
    sizes = [torch.tensor(list(each), dtype=torch.int32) for each in (shapes, strides)]
    kernels = tutorial("08", "DEVICE", "tma_configs")
    if tma:
        kernels.grouped_matmul_tma_kernel[lambda meta: (meta["NUM_SM"],)](
            *addresses, *sizes, len(a), FP8=False, NUM_SM=8
        )
    else:
        kernels.grouped_matmul_kernel[lambda meta: (meta["NUM_SM"],)](*addresses, *sizes, len(a))
    for x, y, z in zip(*groups, strict=True):
        close(z, x.float() @ (y.T if tma else y).float(), 0.1)


PERSISTENT = ("HAS_TENSOR_DESC", "HAS_HOST_TENSOR_DESC", "HAS_WARP_SPECIALIZE")


@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("matmul", ()),
        ("matmul_persistent", ()),
        pytest.param("matmul_tma", (False,), marks=on_hopper),
        pytest.param("matmul_tma_persistent", (False,), marks=on_hopper),
        pytest.param("matmul_descriptor_persistent", (False,), marks=on_hopper),
        pytest.param("matmul_descriptor_persistent", (True,), marks=on_hopper),
    ],
)
@pytest.mark.parametrize("dtype", [FP16, pytest.param(torch.float8_e4m3fn, marks=on_hopper)])
def test_persistent_matmul(function: str, options: tuple[bool, ...], dtype: torch.dtype) -> None:
    a, b = torch.randn(300, 192).half().to(dtype), torch.randn(400, 192).half().to(dtype)
    tiles = "tma" in function or "descriptor" in function
    got = getattr(tutorial("09", *PERSISTENT), function)(a, b if tiles else b.T, *options)
    close(got.half(), (a.float() @ b.float().T).to(got.dtype).half(), 0.1, 0.13 if dtype != FP16 else 1e-2)


@on_hopper
def test_dependent_launches() -> None:
    x, y = torch.rand(2, 5000)
    close(tutorial("11").add(x, y), x + y, 0, 0)
