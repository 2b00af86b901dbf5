"""`torch.autocast`: which operands it converts, that gradients have the parameters' dtype, and that nothing inside an
op is converted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import weft
from weft.lab.calls import assert_same

BF16 = torch.bfloat16
ENDS = torch.tensor([3, 3, 9])
TARGET = torch.tensor([0, 5, -100, 17, 3, 2, 9, 1, 4])
ROUTING = weft.route(torch.randn(9, 4, generator=torch.Generator().manual_seed(5)), 2)

# Per function: a call with fp32 operands, their shapes, the number of operands that the call itself needs in the dtype
# of the product (the others follow), and PyTorch's counterpart.
CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], int, Callable[..., Tensor] | None]] = {
    "linear": (weft.linear, ((9, 32), (24, 32), (24,)), 1, F.linear),
    "linear, fp8": (lambda x, w: weft.linear(x, w, recipe="fp8_block"), ((9, 128), (128, 128)), 1, None),
    "matmul": (weft.matmul, ((9, 32), (32, 24)), 2, torch.matmul),
    "grouped_matmul": (lambda x, w: weft.grouped_matmul(x, w, ENDS), ((9, 32), (3, 24, 32)), 2, None),
    "experts": (
        lambda x, up, down: weft.experts(x, up, down, ROUTING),
        ((9, 32), (4, 48, 32), (4, 32, 24)),
        1,
        None,
    ),
    "linear_logprobs": (lambda x, w: weft.linear_logprobs(x, w, TARGET), ((9, 32), (24, 32)), 2, None),
    "linear_cross_entropy": (
        lambda x, w, b: weft.linear_cross_entropy(x, w, TARGET, bias=b, z_loss=1e-3),
        ((9, 32), (24, 32), (24,)),
        2,
        None,
    ),
    "attention": (weft.attention, ((2, 4, 9, 32),) * 3, 3, F.scaled_dot_product_attention),
}  # fmt: skip


def operands(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def run(call: Callable[..., Any], inputs: list[Tensor]) -> dict[str, Tensor]:
    """Return the result and all gradients."""
    y = call(*inputs)
    dy = torch.linspace(0.5, 1.5, y.numel()).view(y.shape).to(y.dtype)
    return {"y": y.detach(), **{f"d{i}": g for i, g in enumerate(torch.autograd.grad(y, inputs, dy))}}


def autocast(dtype: torch.dtype = BF16, enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


def within(call: Callable[..., Any], dtype: torch.dtype = BF16) -> Callable[..., Any]:
    def inside(*inputs: Tensor) -> Any:
        with autocast(dtype):
            return call(*inputs)

    return inside


@pytest.fixture(autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Most tests use the reference: which operands are converted does not depend on the backend."""
    name = getattr(request, "param", "reference")
    with weft.backend(name):
        yield name


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(
    "backend", ["reference", pytest.param("auto", marks=pytest.mark.slow)], indirect=True
)
def test_operands_are_converted(name: str, dtype: torch.dtype) -> None:
    """Autocast gives the bits of a call with converted operands, fp32 gradients for fp32 operands, and the result dtype
    of PyTorch's counterpart."""
    call, shapes, count, counterpart = CASES[name]
    got = run(within(call, dtype), operands(shapes))
    wanted = run(
        lambda *inputs: call(*(t.to(dtype) for t in inputs[:count]), *inputs[count:]), operands(shapes)
    )
    assert_same(got, wanted, name)
    assert {got[f"d{i}"].dtype for i in range(len(shapes))} == {torch.float32}
    assert got["y"].dtype == (torch.float32 if "linear_" in name else dtype)
    if counterpart is not None:
        reference = run(within(counterpart, dtype), operands(shapes))
        for key, value in reference.items():
            assert got[key].dtype == value.dtype, key
            torch.testing.assert_close(got[key], value, rtol=0.02, atol=0.06)


@pytest.mark.parametrize("name", CASES)
def test_autocast_leaves_other_dtypes_devices_and_disabled_blocks_alone(name: str) -> None:
    """Unaffected: float64, a disabled block, another device's block, and operands that already have the dtype."""
    call, shapes, _, _ = CASES[name]
    if "fp8" not in name:
        wanted = run(call, operands(shapes, torch.float64))
        assert_same(run(within(call), operands(shapes, torch.float64)), wanted, "float64")
    wanted = run(call, operands(shapes))
    with autocast(enabled=False):
        assert_same(run(call, operands(shapes)), wanted, "not enabled")
    with torch.autocast("xpu", dtype=BF16):
        assert_same(run(call, operands(shapes)), wanted, "of another device")
    wanted = run(call, operands(shapes, BF16))
    assert_same(run(within(call), operands(shapes, BF16)), wanted, "bf16")


@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "linear_cross_entropy",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("linear, fp8", "experts", "attention")),
    ],
)
def test_compiled_and_checkpointed_calls_are_converted_alike(name: str) -> None:
    call, shapes, _, _ = CASES[name]
    wanted = run(within(call), operands(shapes))

    def again(*inputs: Tensor) -> Any:
        return checkpoint(call, *inputs, use_reentrant=False)

    assert_same(run(within(again), operands(shapes)), wanted, "checkpointed")
    torch._dynamo.reset()
    outer = torch.compile(within(call), fullgraph=True, backend="aot_eager")
    assert_same(run(outer, operands(shapes)), wanted, "compiled with the block")
    inner = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_same(run(within(inner), operands(shapes)), wanted, "compiled inside the block")
    plain = run(call, operands(shapes))
    assert_same(run(inner, operands(shapes)), plain, "compiled anew outside of it")


@pytest.mark.parametrize("name", ["linear", "matmul", "linear_cross_entropy"])
def test_a_weight_is_converted_once(name: str) -> None:
    call, shapes, _, _ = CASES[name]
    inputs = operands(shapes)
    weight = inputs[1]
    converted = 0

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal converted
            if func is torch.ops.aten._to_copy.default and args[0].shape == weight.shape:
                converted += (args[0].dtype, kwargs["dtype"]) == (torch.float32, BF16)
            return func(*args, **(kwargs or {}))

    with Counting():
        run(within(call), inputs)
    assert converted == 1


def test_explicit_precision_and_out_override_autocast() -> None:
    """fp32 operands stay fp32 given `precision` or `out`, which PyTorch's autocast also leaves alone."""
    a, b = torch.randn(9, 32), torch.randn(32, 24)
    wanted = weft.matmul(a, b)
    with autocast():
        assert torch.equal(weft.matmul(a, b, precision="ieee"), wanted)
        assert torch.equal(weft.matmul(a, b, out=torch.empty(9, 24)), wanted)
        assert weft.matmul(a, b, out_dtype=torch.float32).dtype is torch.float32


def test_quantized_operands_state_the_dtype() -> None:
    """The quantized fp32 result of a norm is an operand like any other."""
    x, w = operands(((9, 128), (128, 128)))
    with autocast():
        q = weft.quantize(x, "1x128", columnwise=True)
        y = weft.linear(q, w, recipe="fp8_block")
        assert weft.matmul(q, weft.quantize(w.detach(), "128x128").T).dtype is BF16
    wanted = weft.linear(weft.quantize(x, "1x128", columnwise=True).bfloat16(), w, recipe="fp8_block")
    assert q.dtype is torch.float32
    gradients = [torch.autograd.grad(t, (x, w), torch.ones_like(t)) for t in (y, wanted)]
    assert_same({"y": y, "x": gradients[0][0]}, {"y": wanted, "x": gradients[1][0]}, "quantized")
    assert gradients[0][0].dtype is torch.float32


@pytest.mark.parametrize("backend", ["reference", "auto"], indirect=True)
def test_nothing_inside_an_op_is_converted() -> None:
    """Neither the PyTorch products of the reference nor a backward inside the block are converted."""
    x, w = operands(((9, 32), (4, 32)))
    wanted = run(weft.router_linear, [x, w])
    with autocast():
        assert_same(run(weft.router_linear, [x, w]), wanted, "router")
    call, shapes, _, _ = CASES["linear_cross_entropy"]
    wanted = run(within(call), operands(shapes))
    with autocast():
        assert_same(run(call, operands(shapes)), wanted, "backward inside the block")
