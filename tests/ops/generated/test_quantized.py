"""Results of generated ops that leave as QTensors: the codes are those of the fp32 result, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import triton.language as tl
import triton_loom
from torch import Tensor

import weft
from weft.lab.calls import assert_same
from weft.lab.copies import assert_copies
from weft.lab.problem import Call, Inputs, Workload
from weft.lab.traffic import count_traffic
from weft.ops.generated.pointwise import Pointwise
from weft.runtime.sharding import Sharding


@weft.pointwise
def gated(x, gate):
    return x * gate * tl.sigmoid(gate) + 0.25  # not zero where no element is


@weft.rowwise
def softmax(x, scale):
    e = tl.exp(x - tl.max(x))
    return e / tl.sum(e) * scale


BOTH = {"columnwise": True}
COLUMNS = {"columnwise": True, "rowwise": False}
FORMATS: dict[str, tuple[str, dict[str, bool]]] = {
    "1x128": ("1x128", BOTH),
    "squares": ("128x128", BOTH),
    "mx": ("mx", COLUMNS),
    "nvfp4": ("nvfp4", BOTH),
    "nvfp4, one copy": ("nvfp4", {}),
    "row": ("row", {}),
    "tensor": ("tensor", {}),
    "tensor, both copies": ("tensor", BOTH),
    "integers": ("int8:row", {}),
    "deepgemm": ("e4m3:1x128:deepgemm", {}),
}

_X = torch.randn(4, 131, 2, 160, generator=torch.Generator().manual_seed(0))
LAYOUTS: dict[str, tuple[Tensor, Tensor]] = {
    "contiguous": (_X[0, :, 0].contiguous(), _X[1, :, 0].contiguous()),
    "odd sizes": (_X[0, :37, 0, :33], _X[1, :37, 0, 3:36]),
    "a row": (_X[:, :3, 0, :150], _X[0, 0, 0, :150]),
    "a column": (_X[0, :, 0], _X[1, :, :1, 0]),
    "transposed": (_X[0, :, 0].t(), _X[1, :, 0].t()),
    "two orders": (_X[:3, :, 1].transpose(0, 1), _X[:3, :, 0].transpose(0, 1).contiguous()),
    "outer": (_X[0, :, 0, :1], _X[0, 0, 0]),
    "steps": (_X[0, ::2, 0, ::2], _X[1, ::2, 1, 1::2]),
    "one dimension": (_X[0, 0, 0], _X[1, 0, 0]),
    "one element": (_X[0, 0, 0, :1], _X[1, 0, 0, :1]),
    "more than a tile": (_X.view(-1)[:7800].view(3, 2600), _X.view(-1)[100:2700]),
}


def assert_codes(op: Pointwise, spec: str, *values: Any, **copies: bool) -> None:
    """Compare a quantized result with the quantized fp32 result, and with an independent oracle."""
    with triton_loom.sanitize():
        got = op(*values, quantize=spec, **copies)
    wide = op(*values, out_dtype=torch.float32).contiguous()
    assert_same({"y": got}, {"y": weft.quantize(wide, spec, **copies)}, f"{op.name} in {spec}")
    assert_copies(got, wide)
    plain = op(*values)
    assert (got.shape, got.dtype) == (plain.shape, plain.dtype)


def cases(others: Iterable[Any], *by_day: tuple[str, Any]) -> list[Any]:
    """Return all formats with all of the others; those that are not named run by night."""
    pairs = [(f, each) for each in others for f in FORMATS]
    return [pytest.param(*pair, marks=[] if pair in by_day else pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(
    ("format", "layout"),
    cases(
        LAYOUTS,
        *[("1x128", each) for each in ("contiguous", "a row", "transposed", "two orders")],
        *[(f, "odd sizes") for f in ("squares", "nvfp4", "row")],
    ),
)
def test_codes_of_elements(format: str, layout: str) -> None:
    spec, copies = FORMATS[format]
    x, gate = LAYOUTS[layout]
    assert_codes(gated, spec, x.bfloat16() if layout == "contiguous" else x, gate, **copies)


@pytest.mark.parametrize(
    ("format", "length"), cases((33, 1024, 8200), ("1x128", 33), ("tensor", 8200), ("squares", 33))
)
def test_codes_of_rows(format: str, length: int) -> None:
    """Rows of one tile and longer ones; column-wise copies and squares go through the result in fp32."""
    spec, copies = FORMATS[format]
    assert_codes(softmax, spec, torch.randn(2, 5, length).transpose(0, 1), float(length), **copies)


def test_rows_of_two_dimensions() -> None:
    standardized = weft.rowwise(dims=2)(lambda x, weight: x / tl.max(tl.abs(x)) * weight)
    assert_codes(standardized, "1x128", torch.randn(3, 8, 130), torch.randn(8, 1))


def test_functions_of_no_tensor() -> None:
    assert_codes(weft.pointwise(lambda x: 2.5), "tensor", torch.randn(3, 40))


@pytest.mark.parametrize("spec", ["1x128", "tensor", "nvfp4", "128x128"])
def test_empty_tensors(spec: str) -> None:
    for shape in ((0, 200), (5, 0), (2, 0, 3)):
        got = gated(torch.empty(shape), 1.0, quantize=spec, columnwise=True)
        assert_same({"y": got}, {"y": weft.quantize(torch.empty(shape), spec, columnwise=True)}, str(shape))


def test_float64_and_the_reference() -> None:
    x = torch.randn(130, 200)
    maximum = weft.pointwise(lambda x, y: tl.maximum(x, y))
    wanted = weft.quantize(x.relu(), "1x128", columnwise=True)
    assert_same({"y": maximum(x, 0.0, quantize="1x128", columnwise=True)}, {"y": wanted}, "fp32")
    with weft.backend("reference"):
        got = maximum(x, 0.0, quantize="1x128", columnwise=True)
    assert_same({"y": got}, {"y": wanted}, "reference")
    got = maximum(x.double(), 0.0, quantize="1x128", columnwise=True)
    assert_same({"y": got}, {"y": wanted}, "float64")
    assert got.dtype is torch.float64


# ---- gradients and compilers --------------------------------------------------------------------------------


def test_gradients_are_those_of_a_plain_result() -> None:
    x, gate = torch.randn(7, 33, requires_grad=True), torch.randn(33, requires_grad=True)
    dy = torch.randn(7, 33)
    for op, values in ((gated, (x, gate)), (softmax, (x, gate))):
        wanted = torch.autograd.grad(op(*values), values, dy)
        got = op(*values, quantize="1x128")
        assert got.requires_grad
        for a, b in zip(torch.autograd.grad(got, values, dy), wanted, strict=True):
            assert torch.equal(a, b)
        with torch.no_grad():
            assert not op(*values, quantize="1x128").requires_grad


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiled_is_eager(dynamic: bool) -> None:
    def function(x: Tensor, gate: Tensor) -> Tensor:
        return gated(x, gate, quantize="1x128", columnwise=True)

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (5, 7):
        x, gate = torch.randn(rows, 33, requires_grad=True), torch.randn(33, requires_grad=True)
        got, wanted = compiled(x, gate), function(x, gate)
        assert_same({"y": got}, {"y": wanted}, "compiled")
        dy = torch.randn(rows, 33)
        for a, b in zip(*(torch.autograd.grad(y, (x, gate), dy) for y in (got, wanted)), strict=True):
            assert torch.equal(a, b)


# ---- bytes and shards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "copies"),
    [(gated, {}), (softmax, {}), pytest.param(gated, BOTH, marks=pytest.mark.slow)],
)
def test_no_byte_is_moved_twice(op: Pointwise, copies: dict[str, bool]) -> None:
    """A result that went through memory would move more."""

    def build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
        tensors = dict(zip(op.parameters, (inputs.normal(*shape), inputs.normal(*shape[1:])), strict=True))
        return Call(op, {**tensors, "quantize": "1x128", **copies})

    workload = Workload(op.op.name, "own", "all", ("rows", 1024), 256, build)
    moved = count_traffic(workload)
    assert moved.launches == 1
    assert moved.as_promised, f"{moved.total.modelled} bytes are moved; {moved.least} would do"


def sharding(*tensors: Tensor | None, spec: str | None, columnwise: bool = False) -> Sharding:
    rule: Sharding = gated.op.shard(
        gated.op.arguments.cls(*tensors, None, None, None, spec, True, columnwise)
    )
    return rule


def test_shards_do_not_cut_blocks() -> None:
    x, gate = torch.randn(2, 256, 128), torch.randn(128)
    assert sharding(x, gate, spec=None) == Sharding({"x": "0 1 2", "gate": "2"}, {"y": "0 1 2"})
    by_row = sharding(gate, x, spec="1x128")
    assert list(by_row.inputs) == ["gate", "x"]  # the first has all rows
    assert (list(by_row.whole), by_row.block) == (["2"], 1)
    assert sharding(x, gate, spec="1x128", columnwise=True).block == 128
    assert sharding(x, gate, spec="128x128").block == 128
    assert "largest element of all ranks" in sharding(x, gate, spec="tensor").whole["..."]
    outer = sharding(x[:1], x[:, :1], spec="1x128", columnwise=True)
    assert outer.whole["..."] == "no argument has all rows of the quantized result"


# ---- what is refused ----------------------------------------------------------------------------------------


def test_mistakes_are_named() -> None:
    x = torch.randn(4, 128)
    two, greater = weft.pointwise(lambda x: (x, x + 1)), weft.pointwise(lambda x: x > 0)
    total = weft.rowwise(lambda x: tl.sum(x))
    for call, message in (
        (lambda: two(x, quantize="1x128"), "one result with a last dimension, and scalar has 2 results"),
        (lambda: total(x, quantize="1x128"), "has a result with one value for each row"),
        (lambda: greater(x, quantize="1x128"), "the result of scalar is torch.bool"),
        (lambda: gated(x[0, 0], 2.0, quantize="1x128"), "the result of gated has no dimension"),
        (lambda: gated(x, 2.0, quantize="1x128", out=x), "out= is for a plain result"),
        (lambda: gated(x, 2.0, columnwise=True), "go with quantize="),
        (lambda: gated(x, 2.0, quantize="1x128", out_dtype=torch.float32), "out_dtype is for a plain result"),
        (lambda: gated(x, 2.0, quantize="1x128", rowwise=False), "rowwise=False needs columnwise=True"),
        (lambda: gated(x, 2.0, quantize="row", columnwise=True), "one scale per whole column"),
        (lambda: gated(x, 2.0, quantize="nvfp4_16x16"), "only weft.quantize produces it"),
        (lambda: gated(x, x[:3], quantize="1x128"), "cannot be broadcast together"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="rename the parameter quantize"):
        weft.pointwise(lambda x, quantize: x)
