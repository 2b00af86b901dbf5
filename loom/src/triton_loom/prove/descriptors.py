"""Tensor descriptors: a GPU clips what goes through one, so what matters is whether the descriptor tells the truth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..ir.provenance import MAKES_DESCRIPTOR, described
from ..ir.ttir import Op
from .contract import Bool, Buffer
from .evaluate import Evaluator
from .scope import integer
from .solver import z3
from .values import Place

LOADS = ("tt.descriptor_load", "tt.descriptor_gather")
STORES = ("tt.descriptor_store", "tt.descriptor_scatter", "tt.descriptor_reduce")


def made(op: Op) -> Op | None:
    """The operation that made the descriptor that is used; None if it comes from elsewhere."""
    maker = op.operands[0].producer
    if maker is None or maker.name != MAKES_DESCRIPTOR:
        maker = next(
            (o.producer for o in op.operands if o.producer and o.producer.name == MAKES_DESCRIPTOR), None
        )
    return maker


def truths(evaluator: Evaluator, op: Op, place: Place) -> Iterator[tuple[str, Bool]]:
    """What has to hold of a descriptor: it describes elements of its buffer, and a GPU takes it."""
    assert place.argument is not None
    buffer: Buffer = evaluator.contract.arguments[place.argument]
    _, shape, strides = described(op)
    sizes, steps = ([evaluator.ev(value) for value in values] for values in (shape, strides))
    some = z3.And(*(size >= 1 for size in sizes))
    last = place.offset
    for size, step in zip(sizes, steps, strict=True):
        last = last + (size - 1) * step
    extent = evaluator.extents[place.argument]
    inside = [place.offset >= 0, last < extent, *(step >= 0 for step in steps)]
    if buffer.dims is not None:
        dims = [tuple(evaluator.scope.without_division(integer(p)) for p in dim) for dim in buffer.dims]
        if len(dims) == len(sizes):
            inside.append(place.offset == 0)
            for (most, stride), size, step in zip(dims, sizes, steps, strict=True):
                inside += [size <= most, z3.Or(step == stride, size == 1)]
        else:
            inside.append(z3.BoolVal(False))
    yield "memory", z3.Implies(some, z3.And(*inside))
    aligned = [z3.BoolVal(buffer.align % 16 == 0), place.offset * buffer.itemsize % 16 == 0, steps[-1] == 1]
    yield "alignment", z3.And(*aligned, *(step * buffer.itemsize % 16 == 0 for step in steps[:-1]))


def stored(ops: Iterable[Op]) -> Iterator[Any]:
    """The pointers that tiles are stored through descriptors of; None where that is not known."""
    for op in ops:
        if op.name in STORES:
            maker = made(op)
            yield None if maker is None else described(maker)[0]
