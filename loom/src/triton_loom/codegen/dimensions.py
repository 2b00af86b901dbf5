"""Which dimensions of a loop nest a value follows, and which of them one loop can run through."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from ..ir.ttir import Op, Tensor, Value, shape_of

Dims = tuple[int | None, ...]  # for each dimension of a value, that of the nest; None: it has one element
_INDEX_LEAVES = ("tt.make_range", "tt.reshape", "tt.gather", "tt.split")


def operand_dims(op: Op, operand: Value, dims: Dims) -> Dims:
    """Which dimension of the nest each dimension of the operand follows, from those of the result."""
    shape = shape_of(operand.type)
    if op.name == "tt.expand_dims":
        return dims[: op.attrs["axis"]] + dims[op.attrs["axis"] + 1 :]
    if op.name == "tt.broadcast":
        return tuple(None if extent == 1 else d for extent, d in zip(shape, dims, strict=True))
    if op.name == "tt.trans":
        inner: list[int | None] = [None] * len(shape)
        for d, source in zip(dims, op.attrs["order"], strict=True):
            inner[source] = d
        return tuple(inner)
    return dims


def merged(
    shape: tuple[int, ...],
    values: list[Value],
    *,
    alone: int | None,
    is_stored: Callable[[Value], bool],
) -> tuple[int, ...]:
    """The shape with neighbouring dimensions rolled into one wherever no value tells them apart.

    A rolled-up group keeps its last dimension, with the extent of the whole group; the others become 1.
    Row-major positions stay what they were, because the index of that last dimension runs through the group.
    The dimension `alone` (the axis of a reduction) keeps to itself.
    """
    joined = [alone not in (d, d + 1) and a > 1 and b > 1 for d, (a, b) in enumerate(pairwise(shape))]
    seen: set[object] = set()

    def visit(value: Value, dims: Dims) -> None:
        if not isinstance(value.type, Tensor) or (value, dims) in seen:
            return
        seen.add((value, dims))
        op = value.producer
        stored = is_stored(value)
        if op is None or stored or op.name in _INDEX_LEAVES:
            present = [d for d in dims if d is not None]
            neighbours = set(pairwise(present))
            for d in range(len(joined)):
                if (d in present or d + 1 in present) and (d, d + 1) not in neighbours:
                    joined[d] = False
            if op is not None and not stored and op.name == "tt.gather":
                joined[:] = [False] * len(joined)
                visit(op.operands[1], dims)
            return
        for operand in op.operands:
            visit(operand, operand_dims(op, operand, dims))

    whole = tuple(d if extent > 1 else None for d, extent in enumerate(shape))
    for value in values:
        visit(value, whole)
    rolled = list(shape)
    for d, together in enumerate(joined):
        if together:
            rolled[d + 1] *= rolled[d]
            rolled[d] = 1
    return tuple(rolled)
