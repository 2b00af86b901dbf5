"""Options of gated linear units, as PyTorch or a model defines them; experts; quantized gradients; and regression tests
for bugs of other libraries. The catalogue also tests their workloads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_loom.testing import assert_not_worse, words

import weft
from tests.catalogue.calls import arguments_of, opcheck
from tests.catalogue.layouts import LAYOUTS, far_apart
from weft import QTensor
from weft.lab.calls import assert_same, backward, own_numbers, results, run, upstreams
from weft.lab.checks import assert_accurate
from weft.lab.copies import assert_copies, regions
from weft.lab.families import Call
from weft.lab.families.glu import glu_truth
from weft.lab.truth import near
from weft.ops.common.activations import ACTIVATIONS, WITH_ALPHA
from weft.ops.common.groups import real_rows_reference
from weft.runtime import choosing_for, recording

BF16 = torch.bfloat16
# Ends of experts in 300 rows: one expert is empty, none has a round number of rows. With align 128, the last 44 rows
# belong to no expert; with 256, the 128 before expert 2.
ENDS = {1: [37, 37, 101, 130, 291], 16: [37, 48, 101, 130, 291], 128: [37, 37, 200], 256: [37, 37, 290]}


def draw(*shape: int, dtype: torch.dtype = BF16, std: float = 1.5) -> Tensor:
    return (torch.randn(shape) * std).to(dtype)


def experts(align: int, dtype: torch.dtype = torch.int32) -> dict[str, Any]:
    return {"ends": torch.tensor(ENDS[align], dtype=dtype), "align": align}


def call_of(rows: int = 6, cols: int = 96, lead: int | None = None, **options: Any) -> Call:
    """Build a call with gate and up in x, and with probs."""
    shape = (rows,) if lead is None else (lead, rows)
    return Call(weft.glu, {"x": draw(*shape, 2 * cols), "probs": torch.rand(*shape), **options})


def backward_of(call: Call, dy: Tensor, **options: Any) -> Call:
    dropped = ("quantize", "columnwise", "quant_scale", "return_amax", "quantize_grad", "grad_columnwise")
    return Call(
        weft.glu_backward, {"dy": dy, **{k: v for k, v in call.kwargs.items() if k not in dropped}, **options}
    )


# ---- equal to PyTorch and to the definitions of models -------------------------------------------------


@pytest.mark.compat
def test_swiglu_in_bf16_is_rounded_once() -> None:
    """Rounding after each step instead would change a third of the elements."""
    x = draw(64, 192)
    gate, up = x.chunk(2, -1)
    exact = F.silu(gate.double()) * up.double()
    assert (weft.glu(x) != exact.to(BF16)).float().mean() < 1e-3
    assert (F.silu(gate) * up != exact.to(BF16)).float().mean() > 0.1


def test_matches_gpt_oss() -> None:
    """The modeling code has alternating gate and up, limits, a steeper sigmoid, and up + 1."""

    def experts_of_gpt_oss(x: Tensor) -> Tensor:
        gate, up = x[..., ::2], x[..., 1::2]
        gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))

    x, dy = draw(40, 192, std=5.0), draw(40, 96)
    outcomes = []
    for dtype in (torch.float64, BF16):
        leaf = x.to(dtype).requires_grad_()
        y = experts_of_gpt_oss(leaf)
        outcomes.append([y, *torch.autograd.grad(y, leaf, dy.to(dtype))])
    leaf = x.clone().requires_grad_()
    y = weft.glu(leaf, layout="interleaved", limit=7.0, alpha=1.702, up_offset=1.0)
    for got, truth, eager in zip([y, *torch.autograd.grad(y, leaf, dy)], *outcomes, strict=True):
        assert_not_worse(got, truth, eager)


def test_layouts_give_equal_results() -> None:
    gate, up, dy = draw(6, 96), draw(6, 96), draw(6, 96)
    forms: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = [
        ((gate, up), {}),
        ((torch.cat([gate, up], -1),), {}),
        ((torch.stack([gate, up], -1).flatten(-2),), {"layout": "interleaved"}),
    ]
    outcomes = []
    for inputs, options in forms:
        leaves = [t.clone().requires_grad_() for t in inputs]
        y = weft.glu(*leaves, **options)
        grads = torch.autograd.grad(y, leaves, dy)
        if len(grads) == 1:
            halves = grads[0].chunk(2, -1) if not options else (grads[0][..., ::2], grads[0][..., 1::2])
            grads = tuple(half.contiguous() for half in halves)
        outcomes.append({"y": y, "dgate": grads[0], "dup": grads[1]})
    for other in outcomes[1:]:
        assert_same(other, outcomes[0], "layouts")


@pytest.mark.parametrize(
    ("gate_dtype", "up_dtype", "promoted"),
    [
        (BF16, torch.float32, torch.float32),
        pytest.param(torch.float32, BF16, torch.float32, marks=pytest.mark.slow),
        pytest.param(BF16, torch.float16, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_gate_and_up_of_two_dtypes(
    gate_dtype: torch.dtype, up_dtype: torch.dtype, promoted: torch.dtype
) -> None:
    """The result has the dtype of PyTorch's product, as under autocast, and each gradient that of its tensor."""
    call = Call(weft.glu, {"x": draw(6, 96, dtype=gate_dtype), "up": draw(6, 96, dtype=up_dtype)})
    assert_accurate("glu", call)
    outcomes = run(call)
    assert (outcomes["y"].dtype, outcomes["dx"].dtype, outcomes["dup"].dtype) == (
        promoted,
        gate_dtype,
        up_dtype,
    )
    assert weft.glu(call["x"], call["up"], out_dtype=BF16).dtype == BF16
    with weft.backend("reference"):
        reference = run(call)
    assert {name: t.dtype for name, t in outcomes.items()} == {name: t.dtype for name, t in reference.items()}


def test_codes_of_gate_and_up_of_two_dtypes() -> None:
    """Codes encode the fp32 result and gradients; their nominal dtypes are those of the plain tensors."""
    gate, up = draw(130, 96), draw(130, 96, dtype=torch.float32)
    q = weft.glu(gate, up, quantize="1x128", columnwise=True)
    assert q.dtype == torch.float32
    assert_copies(q, weft.glu(gate, up))
    dy = draw(130, 96, dtype=torch.float32)
    gradients = weft.glu_backward(dy, gate, up, quantize="1x128", columnwise=True)
    wide = weft.glu_backward(dy, gate.float(), up)
    assert gradients.x.dtype == BF16
    assert gradients.up.dtype == torch.float32
    assert_copies(gradients.x, wide.x)
    assert_copies(gradients.up, wide.up)


@pytest.mark.parametrize("layout", ["concat", "interleaved"])
def test_limits_include_their_ends(layout: str) -> None:
    """The gradient still flows at exactly ±limit, and stops beyond it; NaN stays NaN."""
    limit = 1.5
    special = torch.tensor([1.5, 1.5078125, 1.4921875, -1.5, -1.5078125, -30.0, torch.nan, 0.0]).to(BF16)
    gate, up = special.repeat_interleave(8), special.repeat(8)
    pair = torch.stack([gate, up])
    x = (pair.flatten() if layout == "concat" else pair.t().flatten()).view(1, -1).clone().requires_grad_()
    y = weft.glu(x, layout=layout, limit=limit)  # type: ignore[arg-type]
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    dx = dx.view(2, -1) if layout == "concat" else dx.view(-1, 2).t()
    missing = gate.isnan() | up.isnan()
    assert y.view(-1).isnan().equal(missing)
    bound = gate.clamp(max=limit)
    value = up.clamp(-limit, limit)
    wanted = (F.silu(bound.double()) * value.double()).to(BF16)
    assert torch.equal(y.view(-1)[~missing], wanted[~missing])
    assert (dx[0] == 0)[(gate > limit) & ~missing].all()
    assert (dx[1] == 0)[(up.abs() > limit) & ~missing].all()
    inside = (gate == limit) & (value != 0) & ~missing
    assert inside.any()
    assert (dx[0] != 0)[inside].all()
    edge = (up.abs() == limit) & (gate != 0) & ~missing
    assert edge.any()
    assert (dx[1] != 0)[edge].all()


@pytest.mark.parametrize("special", [torch.nan, torch.inf])
def test_a_special_value_stays_where_it_is(special: float) -> None:
    call = call_of(rows=6)
    x = call["x"].clone()
    x[4, 3] = special
    y, wanted = results(call.with_(x=x))["y"], results(call)["y"]
    assert not y[4, 3].isfinite()
    y[4, 3] = wanted[4, 3]
    assert torch.equal(y, wanted)


def test_probabilities() -> None:
    """The result is linear in probs, including 0 and 1, and the gradient of probs does not divide by it."""
    call = call_of(rows=7)
    probs = torch.tensor([0.0, 1.0, 0.5, 2.0, -1.0, 0.25, 1e-6])
    call = call.with_(probs=probs)
    assert_accurate("glu", call)
    y, plain = results(call)["y"], weft.glu(call["x"])
    assert not y[0].count_nonzero()
    assert torch.equal(y[1:5], plain[1:5] * probs[1:5, None].to(BF16))
    column = call.with_(probs=probs[:, None])
    got = run(column)
    assert got["dprobs"].shape == (7, 1)
    assert_same({"d": got["dprobs"].view(-1)}, {"d": run(call)["dprobs"]}, "a column of probabilities")
    half = run(call.with_(probs=probs.to(BF16)))["dprobs"]
    assert half.dtype == BF16


# ---- experts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("align", "dtype"), [(1, torch.int64), (16, torch.int32)])
def test_experts_one_by_one(align: int, dtype: torch.dtype) -> None:
    """Each expert's rows match a call of its own; padding, full of NaN, is not read, and its results are zero."""
    call = call_of(300, **experts(align, dtype))
    real = torch.zeros(300, dtype=torch.bool)
    spans = [(s, e) for s, e, _ in regions(300, call["ends"], align) if e > s]
    assert len(spans) == 4
    for start, end in spans:
        real[start:end] = True
    assert torch.equal(real_rows_reference(call["ends"], 300, align), real)
    x, probs, dy = call["x"], call["probs"], draw(300, 96)
    for t in (x, probs, dy):
        t[~real] = torch.nan
    got = run(call, {"y": dy})
    for start, end in spans:
        rows = slice(start, end)
        alone = Call(weft.glu, {"x": x[rows], "probs": probs[rows]})
        wanted = run(alone, {"y": dy[rows]})
        assert_same({k: got[k][rows] for k in wanted}, wanted, f"rows {start} to {end}")
    for name in ("y", "dx", "dprobs"):
        assert not words(got[name][~real]).count_nonzero(), name


@pytest.mark.parametrize(
    "ends",
    [[0, 0, 0], [0, 0, 300], [300, 300, 300], [300], [17], [0], [], [5, 5, 5, 11, 300], list(range(1, 301))],
    ids=str,
)
def test_experts_of_any_number_and_size(ends: list[int]) -> None:
    """No expert, one, more than a program loads at a time, and a buffer longer than its experts."""
    call = call_of(300, ends=torch.tensor(ends, dtype=torch.int64))
    x = call["x"].clone()
    last = ends[-1] if ends else 0
    x[last:] = torch.nan
    y = weft.glu(x, probs=call["probs"], ends=call["ends"])
    assert torch.equal(y[:last], weft.glu(x[:last].contiguous(), probs=call["probs"][:last].contiguous()))
    assert not words(y[last:]).count_nonzero()


@pytest.mark.parametrize(
    ("target", "align", "format"),
    [
        ("cpu", 16, "1x128"),
        ("cpu", 128, "nvfp4"),
        ("cpu", 1, "tensor"),
        ("sm_90", 16, "1x128"),
        pytest.param("cpu", 256, "1x128", marks=pytest.mark.slow),
        pytest.param("cpu", 16, "mx", marks=pytest.mark.slow),
        pytest.param("sm_90", 128, "1x128", marks=pytest.mark.slow),
    ],
)
def test_blocks_never_mix_experts(target: str, align: int, format: str) -> None:
    """Bytes of both copies are right, forward and backward, with CPU and GPU tiles and NaN in the padding."""
    call = call_of(300, 128, **experts(align), quantize=format, columnwise=True, return_amax=True)
    real = real_rows_reference(call["ends"], 300, align)
    call["x"][~real] = torch.nan
    dy = draw(300, 128)
    dy[~real] = torch.nan
    gradients = backward_of(call, dy, quantize=format, columnwise=True)
    values, wanted = own_numbers(call.with_(return_amax=False)), own_numbers(gradients)
    with choosing_for(target):
        q, amax = call()
        got = gradients()
    assert_copies(q, values["y"], call["ends"], align)
    assert amax == values["y"].abs().max()
    assert_copies(got.x, wanted["dx"], call["ends"], align)
    near(got.probs, glu_truth(call.with_(return_amax=False), dy)["dprobs"])
    assert not q.rowwise.data.view(torch.uint8)[~real].count_nonzero()
    assert not got.x.rowwise.data.view(torch.uint8)[~real].count_nonzero()


def test_many_experts_in_slots() -> None:
    """There are more experts than a program loads at a time, most of them with few rows or none."""
    counts = torch.arange(301) % 3 * (torch.arange(301) % 7)
    ends, start = [], 0
    for count in counts.tolist():
        ends.append(start + count)
        start = -(-ends[-1] // 16) * 16
    rows = start + 50
    call = call_of(rows, 128, ends=torch.tensor(ends), align=16, quantize="1x128", columnwise=True)
    call["x"][~real_rows_reference(call["ends"], rows, 16)] = torch.nan
    assert_copies(call(), own_numbers(call)["y"], call["ends"], 16)


# ---- quantized results and gradients -------------------------------------------------------------------


@pytest.mark.parametrize(
    "format", ["1x128", "nvfp4", *(pytest.param(f, marks=pytest.mark.slow) for f in ("row", "128x128"))]
)
def test_quantized_gradients(format: str) -> None:
    """Includes two inputs, halves that share blocks (96 columns), and formats that need the whole gradient first."""
    dy = draw(130, 96)
    for call in (call_of(130), Call(weft.glu, {"x": draw(130, 96), "up": draw(130, 96)})):
        options = {"quantize": format, "columnwise": True}
        gradients = backward_of(call, dy, **options)
        values = own_numbers(gradients)
        for name, got in results(gradients).items():
            if isinstance(got, QTensor):
                assert_copies(got, values[name])
        alone = gradients.with_(rowwise=False)()
        assert alone.x.rowwise is None
        assert torch.equal(
            alone.x.columnwise.data.view(torch.uint8), gradients().x.columnwise.data.view(torch.uint8)
        )


def test_quantized_gradients_of_autograd() -> None:
    """The engine passes quantized gradients on to a leaf, and dequantizes them for ops that cannot read them."""
    call = call_of(130, 128, quantize_grad="1x128")
    dy = draw(130, 128)
    wanted = backward_of(call, dy, quantize="1x128", columnwise=True)()
    call = call.requiring_grad()
    call().backward(dy)
    grad = call["x"].grad
    assert isinstance(grad, QTensor)
    assert_same(
        {"dx": grad, "dprobs": call["probs"].grad}, {"dx": wanted.x, "dprobs": wanted.probs}, "autograd"
    )
    leaf = call["x"].detach().requires_grad_()
    weft.glu(leaf * 1.0, probs=call["probs"].detach(), quantize_grad="1x128").backward(dy)
    assert not isinstance(leaf.grad, QTensor)
    assert torch.equal(leaf.grad, wanted.x.dequantize())


@pytest.mark.parametrize("format", ["tensor", "nvfp4"])
def test_amax_is_the_largest_y(format: str) -> None:
    x = draw(130, 192)
    y = weft.glu(x, out_dtype=torch.float32)
    q, amax = weft.glu(x, quantize=format, columnwise=True, return_amax=True)
    assert amax == y.abs().max()
    assert_copies(q, y)
    if format == "tensor":
        q, amax = weft.glu(x, quantize=format, quant_scale=torch.tensor(0.01), return_amax=True)
        assert amax == y.abs().max()
        assert q.rowwise.scale == torch.tensor(0.01)


def test_codes_do_not_depend_on_the_copies() -> None:
    """Row-wise only, column-wise only, and both have the same bytes, encoded from fp32 and not from a rounded y."""
    x = draw(130, 2 * 128)
    both = weft.glu(x, quantize="1x128", columnwise=True)
    rows, cols = weft.glu(x, quantize="1x128"), weft.glu(x, quantize="1x128", rowwise=False, columnwise=True)
    assert_same({"q": rows.rowwise.data}, {"q": both.rowwise.data}, "row-wise alone")
    assert_same({"q": cols.columnwise.data}, {"q": both.columnwise.data}, "column-wise alone")
    rounded = weft.quantize(weft.glu(x), "1x128")
    assert (words(rounded.rowwise.data) != words(both.rowwise.data)).any()


# ---- layouts, sizes, offsets ---------------------------------------------------------------------------


def two_inputs() -> Call:
    return Call(
        weft.glu,
        {"x": draw(2, 65, 96), "up": draw(2, 65, 96), "probs": torch.rand(2, 65), "act": "gelu_tanh"},
    )


def one_input() -> Call:
    return call_of(6, lead=3)


def both_copies() -> Call:
    return call_of(65, lead=2, quantize="mx", columnwise=True)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("make", [two_inputs, one_input, both_copies], ids=lambda f: f.__name__)
def test_layout(make: Callable[[], Call], layout: Callable[[Tensor], Tensor]) -> None:
    """Any strides of inputs and of gradients give the bits of contiguous tensors."""
    call = make()
    for name, tensor in call.tensors().items():
        strided = layout(tensor)
        wanted = run(call.with_(**{name: strided.contiguous().clone()}))
        assert_same(run(call.with_(**{name: strided})), wanted, f"{layout.__name__} {name}")
    gradient = upstreams(results(call.requiring_grad()))["y"]
    strided = layout(gradient)
    wanted = run(call, {"y": strided.contiguous().clone()})
    assert_same(run(call, {"y": strided}), wanted, f"{layout.__name__} gradient")


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (7, 3), (129, 16), (3, 1025), (2, 2049)])
def test_sizes(rows: int, cols: int) -> None:
    assert_accurate("glu", call_of(rows, cols))
    if rows * cols < 4000:
        call = call_of(rows, cols, quantize="mx", columnwise=True)
        assert_copies(call(), own_numbers(call)["y"])


def test_no_columns_and_no_rows() -> None:
    for shape in ((4, 0), (0, 8), (0, 3, 8)):
        x = torch.randn(shape, requires_grad=True)
        y = weft.glu(x)
        assert y.shape == (*shape[:-1], shape[-1] // 2)
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == shape
    q = weft.glu(torch.randn(0, 256), ends=torch.tensor([0, 0]), align=16, quantize="1x128", columnwise=True)
    assert q.columnwise.data.shape == (128, 0)


@pytest.mark.parametrize("copies", [False, True])
def test_offsets_have_64_bits(copies: bool) -> None:
    """Rows past 2^31 elements are right, forward and backward."""
    x, up, dy = far_apart(4, 96), far_apart(4, 96), far_apart(4, 96)
    options = {"quantize": "1x128", "columnwise": True} if copies else {}
    call = Call(weft.glu, {"x": x, "up": up, **options})
    near_by = call.with_(x=x.contiguous(), up=up.contiguous())
    assert_same(run(call, {"y": dy}), run(near_by, {"y": dy.contiguous()}), "far apart")


# ---- configurations of GPUs, run on the CPU ------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "cols", "options"),
    [
        ("sm_90", 200, {}),
        ("gfx942", 1100, {"layout": "interleaved"}),
        ("sm_80", 256, {"quantize": "1x128"}),
        ("sm_90", 256, {"quantize": "1x128", "columnwise": True}),
        pytest.param("gfx942", 256, {"quantize": "128x128", "columnwise": True}, marks=pytest.mark.slow),
        pytest.param("sm_100", 96, {"quantize": "mx", "columnwise": True}, marks=pytest.mark.slow),
    ],
)
def test_configuration_of(target: str, cols: int, options: dict[str, Any]) -> None:
    """Several rows per program and several programs per row give the bits of the CPU's tiles, except for dprobs, whose
    sum has another order."""
    call = call_of(37, cols, **options)
    gradients = backward_of(call, draw(37, cols), **{k: v for k, v in options.items() if k != "layout"})
    wanted, wanted_gradients = results(call), results(gradients)
    with choosing_for(target):
        got, got_gradients = results(call), results(gradients)
    assert_same(got, wanted, target)
    expected = glu_truth(Call(weft.glu, {**call.kwargs}), gradients["dy"])["dprobs"]
    near(got_gradients.pop("dprobs"), expected)
    del wanted_gradients["dprobs"]
    assert_same(got_gradients, wanted_gradients, target)


# ---- PyTorch's own machinery ---------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["glu", "glu_backward"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"quantize": "int8:1x128:te:pow2", "columnwise": True},
    ],
    ids=["plain", "int8"],
)
def test_opcheck(op: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned = torch.empty_strided

    def zeroed(*args: Any, **kwargs: Any) -> Tensor:
        """Zero new memory: the stand-in for a quantized result is never written, and poison does not equal itself."""
        tensor = poisoned(*args, **kwargs)
        if type(tensor) is Tensor and tensor.device.type == "cpu":
            torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).zero_()
        return tensor

    monkeypatch.setattr(torch, "empty_strided", zeroed)
    call = call_of(300, 96, **experts(16), **options)
    calls = {"glu": call.requiring_grad(), "glu_backward": backward_of(call, draw(300, 96), **options)}
    opcheck(op, arguments_of(calls[op], op, results)[0])


def grouped(x: Tensor, probs: Tensor, up: Tensor) -> Any:
    ends = torch.tensor([5, 5, 40])
    return weft.glu(x, up, probs=probs, ends=ends, align=16, limit=2.0)


def quantized(x: Tensor, probs: Tensor) -> Any:
    q = weft.glu(x * 2, probs=probs, quantize="1x128", columnwise=True, quantize_grad="1x128")
    return q.dequantize()


def grad_of_input(x: Tensor) -> Any:
    return weft.glu(x, quantize_grad="1x128")


COMPILED: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "grouped": (grouped, ((48, 96), (48,), (48, 96))),
    "quantized": (quantized, ((130, 256), (130,))),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_is_eager(name: str) -> None:
    """Fullgraph with dynamic sizes: forward and backward match eager bit for bit."""
    function, shapes = COMPILED[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for more in (0, 7):
        inputs = [draw(s[0] + more, *s[1:]) for s in shapes]
        outcomes = []
        for f in (function, compiled):
            leaves = [t.clone().requires_grad_() for t in inputs]
            y = f(*leaves)
            torch.manual_seed(5)
            gradients = torch.autograd.grad(y, leaves, torch.randn_like(y))
            outcomes.append({str(i): t for i, t in enumerate((y, *gradients))})
        assert_same(outcomes[1], outcomes[0], f"compiled {name}")


def test_quantized_gradient_of_a_compiled_graphs_input() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(grad_of_input, fullgraph=True, backend="aot_eager")
    x, dy = draw(130, 256), draw(130, 128)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    grad_of_input(leaves[0]).backward(dy)
    compiled(leaves[1]).backward(dy)
    assert isinstance(leaves[0].grad, QTensor)
    assert torch.equal(leaves[0].grad.dequantize(), leaves[1].grad)


def test_checkpoint_is_eager() -> None:
    from torch.utils.checkpoint import checkpoint

    inputs = [draw(130, 256), draw(130)]
    outcomes = []
    for f in (quantized, lambda *a: checkpoint(quantized, *a, use_reentrant=False)):
        leaves = [t.clone().requires_grad_() for t in inputs]
        y = f(*leaves)
        outcomes.append({str(i): t for i, t in enumerate((y, *torch.autograd.grad(y, leaves, y.detach())))})
    assert_same(outcomes[1], outcomes[0], "checkpoint")


@pytest.mark.parametrize("layout", ["concat", "interleaved", "pair", "none"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_gradcheck_of_the_reference(act: str, layout: str) -> None:
    alone = layout in ("pair", "none")
    inputs = [torch.randn(6, 5 if alone else 10, dtype=torch.float64), torch.rand(6, dtype=torch.float64)]
    inputs += [torch.randn(6, 5, dtype=torch.float64)] if layout == "pair" else []
    ends = torch.tensor([2, 5])

    def f(x: Tensor, probs: Tensor, up: Tensor | None = None) -> Any:
        return weft.glu(
            x, up, act=act, layout="concat" if layout == "pair" else layout, probs=probs, limit=1.0, up_offset=0.5,
            alpha=1.3 if act in WITH_ALPHA else 1.0, ends=ends,
        )  # fmt: skip

    assert torch.autograd.gradcheck(f, [t.requires_grad_() for t in inputs])


@pytest.mark.parametrize(
    "names", [("x",), ("up",), ("probs",), ("x", "probs"), ("up", "probs"), ("x", "up")], ids=str
)
def test_gradients_of_a_subset(names: tuple[str, ...]) -> None:
    """Any subset of the gradients has the same bits as all of them together."""
    call = two_inputs()
    full = run(call)
    leaves = {name: call[name].clone().requires_grad_() for name in names}
    outputs = results(call.with_(**leaves))
    gradients = upstreams(results(call.requiring_grad()))
    got = backward(call.with_(**leaves), outputs, gradients)
    assert set(got) == {f"d{name}" for name in names}
    assert_same(got, {name: full[name] for name in got}, "a subset")


def test_second_derivatives_raise() -> None:
    x = torch.randn(3, 64, requires_grad=True)
    (first,) = torch.autograd.grad(weft.glu(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        first.sum().backward()


# ---- out= ----------------------------------------------------------------------------------------------


def test_out() -> None:
    """Kernels and reference write the same result to the caller's memory as they return without `out`."""
    x, probs = draw(6, 96), torch.rand(6)
    for backend in ("triton", "reference"):
        with weft.backend(backend):  # type: ignore[arg-type]
            out = torch.empty(6, 48, dtype=BF16)
            assert weft.glu(x, probs=probs, out=out).data_ptr() == out.data_ptr()
            assert torch.equal(out, weft.glu(x, probs=probs))


@pytest.mark.parametrize("columnwise", [False, True])
def test_out_is_a_qtensor(columnwise: bool) -> None:
    x = draw(130, 512)
    out = weft.quantize(torch.zeros(130, 256, dtype=BF16), "1x128", columnwise=columnwise)
    got = weft.glu(x, quantize="1x128", columnwise=columnwise, out=out)
    wanted = weft.glu(x, quantize="1x128", columnwise=columnwise)
    assert_same({"y": out}, {"y": wanted}, "out")
    assert got.rowwise is not None
    assert out.rowwise is not None
    assert got.rowwise.data.data_ptr() == out.rowwise.data.data_ptr()


def test_wrong_outputs_raise() -> None:
    x = draw(6, 96)
    for wrong in (torch.empty(6, 96, dtype=BF16), torch.empty(6, 48), torch.empty(48, 6, dtype=BF16).t()):
        with pytest.raises(
            ValueError, match=r"^out must (be bfloat16 like|be contiguous|have the shape \(6, 48\))"
        ):
            weft.glu(x, out=wrong)
    with pytest.raises(ValueError, match="no_grad"):
        weft.glu(x.clone().requires_grad_(), out=torch.empty(6, 48, dtype=BF16))


# ---- invalid arguments ---------------------------------------------------------------------------------

SOME_ENDS = torch.tensor([3, 6])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"x": torch.ones(6, 95)}, "is 95, which is odd"),
        ({"x": torch.ones(6, 96, dtype=torch.int32)}, "x must be bfloat16"),
        ({"x": torch.tensor(1.0)}, "at least one dimension"),
        ({"act": "swish"}, "act must be one of silu, gelu"),
        ({"layout": "block"}, "layout must be"),
        ({"up": torch.ones(6, 95)}, r"up must have the shape \(6, 96\)"),
        ({"up": torch.ones(6, 96), "layout": "interleaved"}, "has no layout"),
        ({"probs": torch.ones(5)}, r"probs must have the shape \(6,\) or \(6, 1\)"),
        ({"probs": torch.ones(6, dtype=torch.int32)}, "probs must be bfloat16, .* got torch.int32"),
        ({"limit": 0.0}, "limit must be positive"),
        ({"limit": -1.0}, "limit must be positive"),
        ({"act": "relu", "alpha": 2.0}, "alpha is for silu, sigmoid, elu; got alpha=2.0"),
        ({"align": 16}, "goes with ends"),
        ({"ends": SOME_ENDS, "align": 0}, "at least 1"),
        ({"ends": SOME_ENDS.float()}, "ends must be int32 or int64"),
        ({"ends": SOME_ENDS[None]}, r"ends must be \[experts\]"),
        ({"columnwise": True}, "go with quantize"),
        ({"quantize": "1x128", "rowwise": False}, "at least one copy"),
        ({"quantize": "row", "columnwise": True}, "1x128"),
        ({"quantize": "1x128", "quant_scale": torch.ones(1)}, "for block 'tensor'"),
        ({"quantize": "1x128", "out_dtype": torch.float32}, "out_dtype is for a plain result"),
        ({"ends": SOME_ENDS, "align": 8, "quantize": "1x128", "columnwise": True}, "multiples of 16"),
        ({"ends": SOME_ENDS, "align": 16, "quantize": "nvfp4", "columnwise": True}, "multiples of 32"),
        ({"ends": SOME_ENDS, "align": 64, "quantize": "128x128"}, "pad them to align=128"),
        (
            {"ends": SOME_ENDS, "align": 16, "quantize": "1x128", "columnwise": True, "rowwise": False},
            "need the row-wise copy",
        ),
        ({"ends": SOME_ENDS, "align": 32, "quantize_grad": "nvfp4"}, "would mix experts"),
        ({"ends": SOME_ENDS, "align": 128, "quantize_grad": "row"}, "would mix experts"),
    ],
)
def test_invalid_arguments_raise(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weft.glu(**{"x": torch.ones(6, 96), **kwargs})


def test_backward_rejects_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"dy must have the shape \(6, 48\)"):
        weft.glu_backward(torch.ones(6, 96), torch.ones(6, 96))
    with pytest.raises(ValueError, match="columnwise goes with quantize"):
        weft.glu_backward(torch.ones(6, 48), torch.ones(6, 96), columnwise=True)


@pytest.mark.parametrize("layout", ["concat", "interleaved", "pair"])
def test_rows_too_long_for_both_gradients_raise(layout: str) -> None:
    """Offsets within a stripe would overflow if gate and up together have 2**24 columns, even if each has fewer."""
    hidden = 2**23
    dy, x = (torch.empty(256, n, dtype=torch.bfloat16, device="meta") for n in (hidden, 2 * hidden))
    options: dict[str, Any] = {"up": dy} if layout == "pair" else {"layout": layout}
    too_long: Any = contextlib.nullcontext()
    if layout != "pair":
        too_long = pytest.raises(
            ValueError, match=r"rows of 2\*\*24 elements or more have no column-wise copy"
        )
    with recording("sm_90"), too_long:
        weft.glu_backward(dy, dy if layout == "pair" else x, quantize="1x128", columnwise=True, **options)
