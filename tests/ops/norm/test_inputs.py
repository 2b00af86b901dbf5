"""Norms of any size, layout, value and dtype, in the configuration of every kind of device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_loom.testing import EPS32, words

import weft
from tests.catalogue.layouts import far_apart
from tests.ops.norm.cases import both_copies, everything
from weft import QTensor
from weft.lab.calls import assert_same, backward, results, run, small, upstreams
from weft.lab.families import Call, Inputs, for_op
from weft.lab.families.norm import norm_truth, own_value
from weft.lab.truth import near
from weft.runtime import Capabilities, choosing_for, launch

NORMS = (weft.rms_norm, weft.layer_norm)


def test_minimum_bytes_of_a_norm() -> None:
    plain = next(w for w in for_op("norm") if w.options == "plain")
    assert plain.least_bytes(7) == 2 * (2 * 7 * plain.cols + plain.cols)


def test_two_different_nestings_of_rows() -> None:
    """The forward reads heads of a packed projection, the backward a gradient with heads before tokens."""
    packed = torch.randn(2, 3, 8 * 32).bfloat16()
    x = packed[..., : 5 * 32].view(2, 3, 5, 32)
    call = Call(weft.rms_norm, {"x": x, "weight": torch.randn(32)})
    gradient = torch.randn(2, 5, 3, 32).bfloat16().transpose(1, 2)
    wanted = run(call.with_(x=x.contiguous()), {"y": gradient.contiguous()})
    assert_same(run(call, {"y": gradient}), wanted, "two nestings")


# ---- sizes ------------------------------------------------------------------------------------------

# 1, primes, one past a tile (from 64 to 1024 columns on a CPU), multiples of 16 and others.
SIZES = [(1, 1), (7, 1), (2, 3), (13, 16), (1, 97), (127, 129), (129, 128), (3, 1023), (2, 1025), (17, 2049)]


@pytest.mark.parametrize(("rows", "cols"), SIZES)
def test_size_of_a_norm(rows: int, cols: int) -> None:
    call = everything(rows, cols).requiring_grad()
    outputs = results(call)
    gradients = upstreams(outputs)
    got = {**outputs, **backward(call, outputs, gradients)}
    for name, wanted in norm_truth(call, gradients["y"], gradients["residual"]).items():
        near(got[name], wanted)


@pytest.mark.parametrize(("rows", "cols"), [pytest.param(3, 97, marks=pytest.mark.slow), (5, 1100)])
def test_size_of_an_unrounded_sum(rows: int, cols: int) -> None:
    """Includes a gate, and an x in another dtype than the residual."""
    call = everything(rows, cols).with_(unrounded_sum=True)
    call = call.with_(x=call["x"].float(), casting="llama").requiring_grad()
    outputs = results(call)
    gradients = upstreams(outputs)
    got = {**outputs, **backward(call, outputs, gradients)}
    for name, wanted in norm_truth(call, gradients["y"], gradients["residual"]).items():
        near(got[name], wanted)


@pytest.mark.parametrize(
    ("rows", "cols", "format"), [(1, 1, "1x128"), (2, 3, "mx"), (127, 129, "1x128"), (257, 128, "mx")]
)
def test_size_of_a_quantizer(rows: int, cols: int, format: str) -> None:
    """Norm and quantizer, fused and separate, give the same copies; a column-wise copy is that of the transpose."""
    x = torch.randn(rows, cols).bfloat16()
    call = Call(weft.rms_norm, {"x": x, "quantize": format, "columnwise": True})
    fused, y = call(), own_value(call, results)
    together = weft.quantize(y, format, columnwise=True)
    transposed = weft.quantize(y.t().contiguous(), format)
    assert_same({"q": fused}, {"q": together}, "fused and separate")
    assert_same(
        {"q": together.columnwise.data}, {"q": transposed.rowwise.data}, "column-wise and of the transpose"
    )
    assert_same(
        {"q": together.columnwise.scale}, {"q": transposed.rowwise.scale}, "column-wise and of the transpose"
    )


@pytest.mark.parametrize("function", [weft.rms_norm, weft.layer_norm, weft.quantize])
def test_no_columns(function: Any) -> None:
    x = torch.randn(4, 0, requires_grad=True)
    result = function(x)
    assert result.shape == (4, 0)
    with weft.backend("reference"):
        assert function(x.detach()).shape == (4, 0)


# ---- rows past 2^31 elements ------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["plain", "1x128-both", "row", "quantize"])
def test_offsets_have_64_bits(options: str) -> None:
    x = far_apart(4, 96)
    calls = {
        "plain": Call(weft.layer_norm, {"x": x, "residual": x}),
        "1x128-both": Call(weft.rms_norm, {"x": x, "quantize": "1x128", "columnwise": True}),
        "row": Call(weft.rms_norm, {"x": x, "quantize": "row"}),
        "quantize": Call(weft.quantize, {"x": x, "format": "1x128", "columnwise": True}),
    }
    call = calls[options]
    near_by = call.with_(**{name: x.contiguous() for name in call.tensors()})
    assert_same(results(call), results(near_by), "far apart")
    outputs = results(call.requiring_grad())
    gradients = {name: far_apart(4, 96).copy_(g) for name, g in upstreams(outputs).items()}
    wanted = run(near_by, {name: g.contiguous() for name, g in gradients.items()})
    assert_same(run(call, gradients), wanted, "far apart")


@pytest.mark.slow
@pytest.mark.parametrize("function", [weft.rms_norm, weft.layer_norm])
def test_more_than_2_to_the_31_elements(function: Any) -> None:
    """The last rows are right, forward and backward. Takes 14 GB."""
    x = torch.empty(2**23 + 16, 256, dtype=torch.bfloat16)
    x[:-32], x[-32:] = 1.0, torch.randn(32, 256).bfloat16()
    last = x[-32:].clone().requires_grad_()
    y = function(x.requires_grad_())
    wanted = function(last)
    assert torch.equal(y[-32:], wanted)
    gradient = torch.randn(32, 256).bfloat16()
    (dx,) = torch.autograd.grad(y, x, gradient[:1].expand(y.shape))
    (wanted,) = torch.autograd.grad(wanted, last, gradient[:1].expand(32, 256))
    assert torch.equal(dx[-32:], wanted)


# ---- values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("make", [everything, both_copies], ids=lambda f: f.__name__)
def test_a_special_value_stays_in_its_row(make: Callable[[], Call], special: float) -> None:
    """No maximum or mask swallows a NaN: it reaches the whole row, and no other."""
    call = make()
    x = call["x"].clone()
    x.view(-1, x.shape[-1])[4, 3] = special
    named = results(call.with_(x=x))
    y = (named["y"].dequantize() if isinstance(named["y"], QTensor) else named["y"]).view(-1, x.shape[-1])
    wanted = results(call)["y"]
    wanted = (wanted.dequantize() if isinstance(wanted, QTensor) else wanted).view(-1, x.shape[-1])
    others = torch.arange(len(y)) != 4
    assert torch.equal(y[others], wanted[others])
    if make is everything:
        assert y[4].isnan().all() or (special != special) is False
        assert y[4].isnan().any()


@pytest.mark.parametrize(
    "values",
    [
        lambda n: torch.zeros(n),
        lambda n: torch.full((n,), 3.0),
        lambda n: torch.randn(n) * 1e-40,
        lambda n: torch.randn(n) * 1e-20,
        lambda n: torch.randn(n) * 1e15,
        lambda n: torch.randn(n) * 1e-3 + 1.0,
    ],
    ids=["zeros", "constant", "denormal", "tiny", "large", "near_one"],
)
@pytest.mark.parametrize("function", NORMS)
def test_values(function: Any, values: Callable[[int], Tensor]) -> None:
    x = torch.cat([values(200), torch.randn(200)]).view(2, 200)
    call = Call(function, {"x": x, "weight": torch.randn(200)}).requiring_grad()
    outputs = results(call)
    gradients = upstreams(outputs)
    expected = norm_truth(call, gradients["y"])
    got = {**outputs, **backward(call, outputs, gradients)}
    for name, value in expected.items():
        near(got[name], value)


@pytest.mark.parametrize("shift", [1e4, -1e4, 1e6])
@pytest.mark.parametrize("cols", [200, 1025, 4096])
def test_variance_of_rows_far_from_zero(shift: float, cols: int) -> None:
    """LayerNorm is invariant to a shift: mean of squares minus square of mean would cancel completely here, and a
    masked lane would add the square of the mean."""
    x = (torch.randn(5, cols) * 4 + shift).requires_grad_()
    y = weft.layer_norm(x)
    expected = norm_truth(Call(weft.layer_norm, {"x": x.detach()}))
    near(y, expected["y"])
    assert (y.double() - expected["y"].truth).abs().max() < 32 * EPS32 * abs(shift)


# ---- dtypes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float16, "residual"),
        (torch.float16, "1x128-both"),
        (torch.float32, "layer"),
        (torch.float32, "llama"),
    ],
)
def test_dtype(options: str, dtype: torch.dtype) -> None:
    workload = next(w for w in for_op("norm") if w.options == options and "odd" in w.name)
    call = small(workload, dtype=dtype).requiring_grad()
    outputs = results(call)
    gradients = upstreams(outputs)
    assert outputs["y"].dtype == dtype
    got = {**outputs, **backward(call, outputs, gradients)}
    for name, wanted in norm_truth(call, gradients["y"], gradients.get("residual")).items():
        if not isinstance(got[name], QTensor):
            near(got[name], wanted)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_weight_of_another_dtype(weight_dtype: torch.dtype) -> None:
    """The weight's gradient has the weight's dtype, from fp32 sums."""
    call = everything(dtype=torch.bfloat16)
    call = call.with_(weight=call["weight"].to(weight_dtype), bias=call["bias"].to(weight_dtype))
    got = run(call)
    assert (got["y"].dtype, got["dweight"].dtype, got["dbias"].dtype) == (
        torch.bfloat16,
        weight_dtype,
        weight_dtype,
    )
    gradients = upstreams(results(call.requiring_grad()))
    expected = norm_truth(call, gradients["y"], gradients["residual"])
    for name in ("y", "dweight", "dbias", "dx"):
        near(got[name], expected[name])


# ---- configurations of GPUs, run on the CPU ---------------------------------------------------------

CONFIGURED = [
    ("sm_90", 200, "1x128-both"),
    ("sm_80", 1025, "layer"),
    ("sm_80", 1025, "row-fp8"),
    ("gfx942", 20000, "residual"),
    ("gfx942", 20000, "nvfp4"),
]
SLOWLY_CONFIGURED = [
    (target, cols, options)
    for target, cols in (("sm_90", 200), ("sm_80", 1025), ("gfx942", 20000), ("sm_89", 4096))
    for options in ("residual", "layer", "adaln-row", "1x128-both", "mx-both", "row-fp8", "nvfp4")
    if (target, cols, options) not in CONFIGURED
]


@pytest.mark.parametrize(
    ("target", "cols", "options"),
    [*CONFIGURED, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOWLY_CONFIGURED)],
)
def test_configuration_of(target: str, cols: int, options: str) -> None:
    """Several rows per program, long rows in a loop, codes by integer arithmetic."""
    source = next(w for w in for_op("norm") if w.options == options)
    call = source.build(source, Inputs("cpu", torch.bfloat16, 0), (21, cols))
    with choosing_for(target):
        assert (
            Capabilities.of(target).multiprocessors
            == launch.capabilities_of(torch.device("cpu")).multiprocessors
        )
        got = run(call)
    gradients = upstreams(results(call.requiring_grad()))
    expected = norm_truth(call, gradients["y"], gradients.get("residual"))
    if isinstance(got["y"], QTensor):
        del expected["y"]
        # Another order of addition moves a value by an ulp, and rarely its code by a step.
        wanted = results(call)["y"]
        for side in ("rowwise", "columnwise"):
            if getattr(wanted, side) is not None:
                same = words(getattr(got["y"], side).data) == words(getattr(wanted, side).data)
                assert same.float().mean() > 0.999
    for name, value in expected.items():
        near(got[name], value)
