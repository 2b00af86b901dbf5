"""Bias of the projection of gate and up, for a layer and for each expert, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton_loom
from torch import Tensor
from triton_loom.testing import assert_not_worse, words

import weft
from tests.catalogue.calls import arguments_of, opcheck
from tests.catalogue.layouts import constant, expanded, off_by_one, stepped, transposed
from tests.ops.glu.test import BF16, ENDS, backward_of, call_of, draw, experts
from weft.lab.calls import assert_same, backward, own_numbers, results, run, upstreams
from weft.lab.checks import assert_accurate
from weft.lab.copies import assert_copies, regions
from weft.lab.families import Call
from weft.lab.families.glu import glu_truth
from weft.lab.truth import near
from weft.ops.common.groups import real_rows_reference
from weft.runtime import choosing_for

GPT_OSS = {"layout": "interleaved", "limit": 1.5, "alpha": 1.702, "up_offset": 1.0}


def biased(call: Call, dtype: torch.dtype = BF16) -> Call:
    lead = () if call["ends"] is None else call["ends"].shape
    return call.with_(bias=draw(*lead, call["x"].shape[-1], dtype=dtype))


# ---- numbers -------------------------------------------------------------------------------------------


OPTIONS: dict[str, dict[str, Any]] = {
    "concat": {},
    "interleaved": GPT_OSS,
    "none": {"layout": "none", "act": "gelu"},
    "1": experts(1),
    "16": {**experts(16), **GPT_OSS},
    "128": experts(128, torch.int64),
    "256": experts(256),
}
OFTEN = {("cpu", name) for name in OPTIONS if name != "128"} | {("sm_90", "1"), ("sm_90", "16")}


@pytest.mark.parametrize(
    ("target", "options"),
    [
        pytest.param(target, options, marks=() if (target, options) in OFTEN else pytest.mark.slow)
        for target in ("cpu", "sm_90", "gfx942")
        for options in OPTIONS
    ],
)
def test_bias(target: str, options: str) -> None:
    """There are several stripes of rows, none of them shared by experts, with CPU and GPU tiles."""
    with choosing_for(target):
        assert_accurate("glu", biased(call_of(300, **OPTIONS[options])))


def test_rows_past_the_end_do_not_enter_sums() -> None:
    """Rows past the end still get a bias, whose activation need not be finite."""
    x, bias = torch.full((37, 192), -1e30), torch.full((192,), 1e30, requires_grad=True)
    with choosing_for("sm_90"):
        weft.glu(x, bias=bias, act="relu2").sum().backward()
    assert bias.grad is not None
    assert not bias.grad.count_nonzero()


def test_sizes() -> None:
    for rows, cols in ((1, 1), (129, 3), (3, 1025)):
        assert_accurate("glu", biased(call_of(rows, cols), torch.float32))
    assert_accurate("glu", biased(call_of(6, lead=25)))


def test_bias_is_added_in_fp32() -> None:
    """Every result has the bits of the fp32 sum, rounded once; a bf16 sum would change a third of the elements."""
    for options in ({}, GPT_OSS, experts(16)):
        call = biased(call_of(300, **options))
        bias = call["bias"].float()
        if call["ends"] is not None:
            bias = torch.cat([bias, bias[:1]])[
                torch.searchsorted(call["ends"], torch.arange(300), right=True)
            ]
        dy = draw(300, 96)
        got = run(call, {"y": dy})
        plain = {name: value for name, value in call.kwargs.items() if name != "bias"}
        wide = Call(weft.glu, {**plain, "x": call["x"].float() + bias})
        wanted = run(wide, {"y": dy.float()})
        for name in ("y", "dx"):
            assert_same({name: got[name]}, {name: wanted[name].to(BF16)}, str(options))
        rounded = wide.with_(x=(call["x"].float() + bias).to(BF16))()
        assert (rounded != got["y"]).float().mean() > 0.1


def test_matches_gpt_oss() -> None:
    """The modeling code runs the experts one after the other."""
    ends = [5, 5, 40]
    x, bias, dy = draw(40, 192, std=4.0), draw(3, 192), draw(40, 96)

    def experts_of_gpt_oss(x: Tensor, bias: Tensor) -> Tensor:
        outcomes = []
        for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            gate_up = x[start:end] + bias[expert]
            gate, up = gate_up[..., ::2], gate_up[..., 1::2]
            gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
            outcomes.append((up + 1) * (gate * torch.sigmoid(gate * 1.702)))
        return torch.cat(outcomes)

    eager = []
    for dtype in (torch.float64, BF16):
        leaves = [x.to(dtype).requires_grad_(), bias.to(dtype).requires_grad_()]
        y = experts_of_gpt_oss(*leaves)
        eager.append([y, *torch.autograd.grad(y, leaves, dy.to(dtype))])
    leaves = [x.clone().requires_grad_(), bias.clone().requires_grad_()]
    options = {"layout": "interleaved", "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}
    y = weft.glu(leaves[0], bias=leaves[1], ends=torch.tensor(ends), **options)  # type: ignore[arg-type]
    for got, truth, other in zip([y, *torch.autograd.grad(y, leaves, dy)], *eager, strict=True):
        assert_not_worse(got, truth, other)


# ---- experts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "align"), [pytest.param("cpu", 16, marks=pytest.mark.slow), ("sm_90", 1), ("cpu", 128)]
)
def test_experts_one_by_one(target: str, align: int) -> None:
    """Each expert's results and gradients match a call of its own; neither padding, which is full of NaN, nor a large
    bias on it enters a sum."""
    call = biased(call_of(300, **experts(align)), torch.float32)
    real = real_rows_reference(call["ends"], 300, align)
    dy = draw(300, 96)
    for t in (call["x"], call["probs"], dy):
        t[~real] = torch.nan
    with choosing_for(target):
        got = run(call, {"y": dy})
        for expert, (start, end, _) in enumerate(regions(300, call["ends"], align)[:-1]):
            rows = slice(start, end)
            if start == end:
                assert not words(got["dbias"][expert]).count_nonzero()
                continue
            alone = Call(
                weft.glu, {"x": call["x"][rows], "probs": call["probs"][rows], "bias": call["bias"][expert]}
            )
            wanted = run(alone, {"y": dy[rows]})
            # Stripes restart at every expert, so that the sums have one order.
            assert_same({"d": got["dbias"][expert]}, {"d": wanted["dbias"]}, f"expert {expert}")
            assert_same({k: got[k][rows] for k in ("y", "dx")}, {k: wanted[k] for k in ("y", "dx")}, "rows")
        huge = call.with_(bias=torch.full_like(call["bias"], 1e30), act="relu2")
        zero = run(huge, {"y": dy})
    for outcomes in (got, zero):
        for name in ("y", "dx", "dprobs"):
            assert not words(outcomes[name][~real]).count_nonzero(), name
    assert got["dbias"].isfinite().all()


@pytest.mark.parametrize(
    "ends", [[0, 0, 0], [300], [17], [0], [], [5, 5, 5, 11, 300], list(range(1, 301))], ids=str
)
def test_experts_of_any_number_and_size(ends: list[int]) -> None:
    """No expert, one, more than a program loads at a time, and a buffer longer than its experts."""
    call = biased(call_of(300, ends=torch.tensor(ends, dtype=torch.int64)))
    dy = draw(300, 96)
    got = run(call, {"y": dy})
    assert got["dbias"].shape == (len(ends), 192)
    with weft.backend("reference"):
        wanted = run(call, {"y": dy})
    for name, budget in (("y", 1e-2), ("dx", 1e-2), ("dbias", 0.1)):  # one rounding to bf16 each
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-2, atol=budget)
    if ends:
        near(got["dbias"], glu_truth(call, dy)["dbias"])


@pytest.mark.parametrize(
    ("target", "align", "format"),
    [
        ("cpu", 16, "1x128"),
        ("sm_90", 16, "1x128"),
        pytest.param("cpu", 256, "1x128", marks=pytest.mark.slow),
        ("cpu", 128, "nvfp4"),
        pytest.param("sm_90", 128, "128x128", marks=pytest.mark.slow),
        pytest.param("cpu", 16, "mx", marks=pytest.mark.slow),
    ],
)
def test_quantized(target: str, align: int, format: str) -> None:
    """Both copies of results and gradients are right, and the sums are those without quantization."""
    call = biased(call_of(300, 128, **experts(align), quantize=format, columnwise=True))
    real = real_rows_reference(call["ends"], 300, align)
    dy = draw(300, 128)
    call["x"][~real], dy[~real] = torch.nan, torch.nan
    gradients = backward_of(call, dy, quantize=format, columnwise=True)
    values, wanted = own_numbers(call), own_numbers(gradients)
    with choosing_for(target):
        q, got = call(), gradients()
    assert_copies(q, values["y"], call["ends"], align)
    assert_copies(got.x, wanted["dx"], call["ends"], align)
    near(got.bias, glu_truth(call, dy)["dbias"])


def test_quantized_a_few_rows_at_a_time() -> None:
    """Row-wise copies are stored a few rows at a time, without touching rows of the next expert."""
    call, dy = biased(call_of(300, 128, **experts(1))), draw(300, 128)
    gradients = backward_of(call, dy, quantize="1x128")
    with choosing_for("sm_90"), triton_loom.sanitize():
        got = gradients()
    assert_copies(got.x, own_numbers(gradients)["dx"])
    near(got.bias, glu_truth(call, dy)["dbias"])


def test_quantized_gradients_of_autograd() -> None:
    call = biased(call_of(130, 128, quantize_grad="1x128")).requiring_grad()
    dy = draw(130, 128)
    call().backward(dy)
    wanted = backward_of(call, dy, quantize="1x128", columnwise=True)()
    got = {"dx": call["x"].grad, "dbias": call["bias"].grad}
    assert_same(got, {"dx": wanted.x, "dbias": wanted.bias}, "autograd")


# ---- PyTorch's own machinery ---------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [transposed, stepped, off_by_one, constant], ids=lambda f: f.__name__)
def test_layouts(layout: Callable[[Tensor], Tensor]) -> None:
    """Any strides of the bias and of upstream gradients give the bits of contiguous tensors."""
    for call in (biased(call_of(140)), biased(call_of(300, **experts(16)))):
        bias = layout(call["bias"])
        wanted = run(call.with_(bias=bias.contiguous().clone()))
        assert_same(run(call.with_(bias=bias)), wanted, "the bias")
        gradient = upstreams(results(call.requiring_grad()))["y"]
        for change in (layout, expanded):
            strided = change(gradient)
            wanted = run(call, {"y": strided.contiguous().clone()})
            assert_same(run(call, {"y": strided}), wanted, "gradients")


def test_gradients_of_a_subset() -> None:
    for call in (biased(call_of(140)), biased(call_of(300, **experts(16)))):
        full = run(call)
        gradients = upstreams(results(call.requiring_grad()))
        for names in (("bias",), ("x",), ("probs",), ("x", "bias"), ("probs", "bias")):
            leaves = {name: call[name].clone().requires_grad_() for name in names}
            got = backward(call.with_(**leaves), results(call.with_(**leaves)), gradients)
            assert set(got) == {f"d{name}" for name in names}
            for name, gradient in got.items():
                if name == "dprobs":  # a program without sums over rows adds in another order
                    near(gradient, glu_truth(call, gradients["y"])["dprobs"])
                else:
                    assert_same({name: gradient}, {name: full[name]}, str(names))


def test_no_columns_and_no_rows() -> None:
    for shape in ((4, 0), (0, 8), (0, 3, 8)):
        x, bias = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
        weft.glu(x, bias=bias).sum().backward()
        assert bias.grad is not None
        assert not bias.grad.count_nonzero()
    bias = torch.randn(2, 8, requires_grad=True)
    weft.glu(torch.randn(0, 8), bias=bias, ends=torch.tensor([0, 0])).sum().backward()
    assert bias.grad is not None
    assert not bias.grad.count_nonzero()


def grouped(x: Tensor, bias: Tensor, probs: Tensor) -> Any:
    return weft.glu(x, bias=bias, probs=probs, ends=torch.tensor([5, 5, 40]), align=16, limit=2.0)


def quantized(x: Tensor, bias: Tensor) -> Any:
    return weft.glu(x * 2, bias=bias, quantize="1x128", columnwise=True, quantize_grad="1x128").dequantize()


@pytest.mark.parametrize(
    ("function", "fixed"),
    [(grouped, [(48, 192), (3, 192), (48,)]), (quantized, [(130, 256), (256,)])],
    ids=["grouped", "quantized"],
)
def test_compiled_is_eager(function: Callable[..., Any], fixed: list[tuple[int, ...]]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for more in (0, 7):
        shapes = [(s[0] + more, *s[1:]) if s[0] == fixed[0][0] else s for s in fixed]
        inputs = [draw(*s) for s in shapes]
        outcomes = []
        for f in (function, compiled):
            leaves = [t.clone().requires_grad_() for t in inputs]
            y = f(*leaves)
            torch.manual_seed(5)
            gradients = torch.autograd.grad(y, leaves, torch.randn_like(y))
            outcomes.append({str(i): t for i, t in enumerate((y, *gradients))})
        assert_same(outcomes[1], outcomes[0], "compiled")


def test_opcheck() -> None:
    call = biased(call_of(300, 96, **experts(16)))
    opcheck("glu", arguments_of(call, "glu")[0])
    gradients = backward_of(call, draw(300, 96))
    opcheck("glu_backward", arguments_of(gradients, "glu_backward", results)[0])


@pytest.mark.parametrize("layout", ["concat", "interleaved", "none"])
def test_gradcheck_of_the_reference(layout: str) -> None:
    x, bias = torch.randn(6, 10, dtype=torch.float64), torch.randn(2, 10, dtype=torch.float64)
    ends = torch.tensor([2, 5])

    def f(x: Tensor, bias: Tensor) -> Any:
        return weft.glu(x, bias=bias, layout=layout, ends=ends)  # type: ignore[arg-type]

    def one_group(x: Tensor, bias: Tensor) -> Any:
        return weft.glu(x, bias=bias, layout=layout)  # type: ignore[arg-type]

    assert torch.autograd.gradcheck(f, [x.requires_grad_(), bias.requires_grad_()])
    assert torch.autograd.gradcheck(one_group, [x, bias[0].detach().requires_grad_()])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"bias": torch.ones(48)}, r"bias must have the shape \(96,\)"),
        ({"bias": torch.ones(5, 96)}, r"bias must have the shape \(96,\)"),
        ({"bias": torch.ones(96), "ends": torch.tensor([3, 6])}, r"bias must have the shape \(2, 96\)"),
        ({"bias": torch.ones(96).long()}, "bias must be bfloat16"),
        ({"bias": torch.ones(96, device="meta")}, "bias must be on cpu"),
        ({"bias": torch.ones(96), "up": torch.ones(6, 96)}, "add each bias in its own"),
    ],
)
def test_invalid_biases_raise(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weft.glu(**{"x": torch.ones(6, 96), **kwargs})
    dy = torch.ones(6, 96 if "up" in kwargs else 48)
    with pytest.raises(ValueError, match=message):
        weft.glu_backward(**{"dy": dy, "x": torch.ones(6, 96), **kwargs})


def test_ends_of_the_tests_have_several_stripes() -> None:
    assert any(end - start > 128 for start, end, _ in regions(300, torch.tensor(ENDS[16]), 16))
