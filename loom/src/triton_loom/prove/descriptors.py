"""Tensor descriptors: a GPU clips accesses through one, so only the descriptor itself has to be correct."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..ir.provenance import MAKES_DESCRIPTOR, described
from ..ir.ttir import Op
from .contract import Bool, Buffer
from .evaluate import Evaluator
from .scope import integer
from .solver import z3
from .values import Target

LOADS = ("tt.descriptor_load", "tt.descriptor_gather")
STORES = ("tt.descriptor_store", "tt.descriptor_scatter", "tt.descriptor_reduce")


def maker_of(op: Op) -> Op | None:
    """Return the operation that created the used descriptor; None if it comes from elsewhere."""
    maker = op.operands[0].producer
    if maker is None or maker.name != MAKES_DESCRIPTOR:
        maker = next(
            (o.producer for o in op.operands if o.producer and o.producer.name == MAKES_DESCRIPTOR), None
        )
    return maker


def truths(evaluator: Evaluator, op: Op, target: Target) -> Iterator[tuple[str, Bool]]:
    """Yield the conditions on a descriptor: it describes elements of its buffer, and a GPU accepts it."""
    assert target.argument is not None
    buffer: Buffer = evaluator.contract.arguments[target.argument]
    _, shape, strides = described(op)
    sizes, steps = ([evaluator.ev(value) for value in values] for values in (shape, strides))
    nonempty = z3.And(*(size >= 1 for size in sizes))
    last = target.offset
    for size, step in zip(sizes, steps, strict=True):
        last = last + (size - 1) * step
    extent = evaluator.extents[target.argument]
    inside = [target.offset >= 0, last < extent, *(step >= 0 for step in steps)]
    if buffer.dims is not None:
        dims = [tuple(evaluator.scope.without_division(integer(p)) for p in dim) for dim in buffer.dims]
        if len(dims) == len(sizes):
            inside.append(target.offset == 0)
            for (max_size, stride), size, step in zip(dims, sizes, steps, strict=True):
                inside += [size <= max_size, z3.Or(step == stride, size == 1)]
        else:
            inside.append(z3.BoolVal(False))
    yield "memory", z3.Implies(nonempty, z3.And(*inside))
    aligned = [z3.BoolVal(buffer.align % 16 == 0), target.offset * buffer.itemsize % 16 == 0, steps[-1] == 1]
    yield "alignment", z3.And(*aligned, *(step * buffer.itemsize % 16 == 0 for step in steps[:-1]))


def stored(ops: Iterable[Op]) -> Iterator[Any]:
    """Yield the base pointers of the descriptors that are stored through; None where one is unknown."""
    for op in ops:
        if op.name in STORES:
            maker = maker_of(op)
            yield None if maker is None else described(maker)[0]
