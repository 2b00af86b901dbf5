"""Ops defined by their arguments and outputs: schemas, mistakes in definitions, results in given memory."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import weft
from weft.ops.common.results import Result, ResultOptions
from weft.ops.quantize.arguments import QuantizeArgs, QuantizeOutputs
from weft.runtime import Backward, Fields, Gradients, Maybe, MaybeStr, Nothing, Op, Written, catalogue


class Scaling(NamedTuple):
    factor: float
    offset: Tensor | None


class ScaleArgs(NamedTuple):
    x: Tensor
    by: Scaling
    wants_sign: bool


class ScaleOutputs(NamedTuple):
    y: Tensor
    sign: Tensor | None


class NoOutputs(NamedTuple):
    names: str


def reference(a: ScaleArgs) -> ScaleOutputs:
    y = a.x * a.by.factor if a.by.offset is None else a.x * a.by.factor + a.by.offset
    return ScaleOutputs(y, y.sign() if a.wants_sign else None)


def allocate(a: ScaleArgs) -> ScaleOutputs:
    return ScaleOutputs(torch.empty_like(a.x), torch.empty_like(a.x) if a.wants_sign else None)


def launch(o: ScaleOutputs, a: ScaleArgs) -> None:
    raise AssertionError("the op has no kernel")


def defined(
    name: str, outputs: Any = ScaleOutputs, differentiable: tuple[str, ...] = (), **changed: Any
) -> Op[Any, Any]:
    functions: dict[str, Any] = {
        "allocate": allocate,
        "launch": launch,
        "reference": reference,
        "present": lambda a: ScaleOutputs(True, a.wants_sign),  # type: ignore[arg-type]
    } | changed
    methods = {method: staticmethod(f) for method, f in functions.items() if f is not None}
    options = {"name": name, "variants": 1, "differentiable": differentiable}
    cls = types.new_class("ScaleOp", (Op[ScaleArgs, outputs],), options, lambda body: body.update(methods))
    return cls()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def scale() -> Iterator[Op[Any, Any]]:
    def gradients(b: Backward) -> Gradients:
        misnamed = {"offset": b.grads.y}  # no argument has this name
        named = {"x": b.grads.y * b.kept.by.factor, "by_offset": b.grads.y}
        return misnamed if b.kept.by.factor == 0.0 else named

    op = defined("test_scale", keep=lambda a, o: a, backward=gradients)
    with weft.backend("reference"):
        yield op
    del catalogue["test_scale"]


def test_a_schema_follows_from_annotations() -> None:
    assert Fields(ScaleArgs).schema == "Tensor x, float by_factor, Tensor? by_offset, bool wants_sign"

    class Every(NamedTuple):
        lists: Written
        others: list[Tensor]
        maybe: Maybe
        spec: MaybeStr
        sizes: list[int]
        flags: list[bool]
        dtype: torch.dtype
        name: str | None
        count: int | None

    assert Fields(Every).schema == (
        "Tensor(lists!)[] lists, Tensor[] others, Tensor? maybe, str? spec, SymInt[] sizes, bool[] flags, "
        "ScalarType dtype, str? name, SymInt? count"
    )


def test_flattening_and_building_are_inverse() -> None:
    fields = Fields(ScaleArgs)
    x, offset = torch.ones(2), torch.zeros(2)
    a = ScaleArgs(x, Scaling(2.0, offset), True)
    assert fields.flatten(a) == (x, 2.0, offset, True)
    assert fields.build(*fields.flatten(a)) == a
    assert fields.tensors(a) == (x, offset)
    assert fields.join(fields.tensors(a), fields.others(a)) == a
    present = ScaleArgs(True, Scaling(True, False), True)  # type: ignore[arg-type]
    assert fields.from_present(present, [x, 2.0, False]) == ScaleArgs(x, Scaling(2.0, None), False)


def test_types_without_a_schema_are_refused() -> None:
    class Strange(NamedTuple):
        x: Tensor
        kind: dict[str, int]

    class Twice(NamedTuple):
        by_factor: float
        by: Scaling

    with pytest.raises(
        TypeError, match=r"Strange\.kind: an op cannot have an argument or output of type dict"
    ):
        Fields(Strange)
    with pytest.raises(TypeError, match="two leaves with the same name: by_factor, by_factor"):
        Fields(Twice)
    with pytest.raises(TypeError, match="are NamedTuples; got <class 'int'>"):
        Fields(int)


def test_a_class_without_types_or_a_name_is_refused() -> None:
    class Bare(Op, name="test_mistake", variants=1):  # type: ignore[type-arg]
        pass

    with pytest.raises(TypeError, match=r"test_mistake: derive the class from Op\[Arguments, Outputs\]"):
        Bare()
    with pytest.raises(TypeError, match="missing 2 required keyword-only arguments: 'name' and 'variants'"):
        type("Nameless", (Op,), {})
    assert "test_mistake" not in catalogue


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "norm"}, "'norm' is already defined"),
        ({"present": None}, "has optional outputs: define `present`"),
        ({"outputs": NoOutputs}, "None; names is not"),
        (
            {"outputs": Nothing, "present": None},
            "an op that writes to its arguments must have the outputs Nothing",
        ),
        ({"backward": lambda b: {}}, "keep and backward go together"),
        ({"differentiable": ("z",)}, "has no outputs z to differentiate; its outputs are y, sign"),
    ],
)
def test_mistakes_in_a_definition_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        defined(**({"name": "test_mistake"} | changed))
    assert "test_mistake" not in catalogue


@pytest.mark.parametrize("wants_sign", [False, True])
def test_gradients_are_returned_by_name(scale: Op[Any, Any], wants_sign: bool) -> None:
    """Eager mode, the dispatcher and a compiled graph agree."""
    x, offset = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)

    def call(x: Tensor, offset: Tensor) -> Tensor:
        y, sign = scale(ScaleArgs(x, Scaling(3.0, offset), wants_sign))
        assert (sign is not None) == wants_sign
        assert sign is None or not sign.requires_grad
        return y  # type: ignore[no-any-return]

    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        gradients = torch.autograd.grad(function(x, offset).sum(), (x, offset))
        assert torch.equal(gradients[0], torch.full((3,), 3.0))
        assert torch.equal(gradients[1], torch.ones(3))


def test_a_gradient_of_an_unknown_argument_is_refused(scale: Op[Any, Any]) -> None:
    y = scale(ScaleArgs(torch.ones(2, requires_grad=True), Scaling(0.0, None), False)).y
    with pytest.raises(TypeError, match="weft::test_scale has no arguments offset that could have gradients"):
        y.sum().backward()


def test_ops_write_into_given_memory() -> None:
    """Every op can; outputs that are passed as None are allocated."""
    x = torch.randn(4, 256).bfloat16()
    op = catalogue["quantize"]
    expected, q = weft.quantize(x, "1x128").rowwise, weft.quantize(torch.zeros_like(x), "1x128")
    a = QuantizeArgs(x, ResultOptions(x.dtype, q.format.spec, True, False, None, True), None)
    destinations = QuantizeOutputs(Result.of(None, (q.rowwise, None), None))  # type: ignore[arg-type]
    for backend in ("auto", "reference"):
        q.rowwise.data.view(torch.uint8).zero_()
        with weft.backend(backend):
            outputs = op.into(destinations, a)
        assert outputs.result.data is q.rowwise.data
        assert torch.equal(q.rowwise.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(q.rowwise.scale, expected.scale)
        assert outputs.result.amax == x.abs().max().float()
