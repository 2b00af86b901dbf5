"""Mapping between the dimensions of a value and of a loop nest, and merging of dimensions into one loop."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from ..ir.ttir import Op, Tensor, Value, shape_of

Dims = tuple[int | None, ...]  # the nest's dimension for each dimension of a value; None: it has one element
_INDEX_LEAVES = ("tt.make_range", "tt.reshape", "tt.gather", "tt.split")


def operand_dims(op: Op, operand: Value, dims: Dims) -> Dims:
    """Return the nest's dimension for each dimension of the operand, from those of the result."""
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
    """Return the shape with neighboring dimensions merged into one wherever no value distinguishes them.

    A merged group keeps its last dimension, with the extent of the whole group; the others become 1.
    Row-major positions do not change, because the index of that last dimension runs through the group.
    The dimension `alone` (the axis of a reduction) is never merged.
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
            neighbors = set(pairwise(present))
            for d in range(len(joined)):
                if (d in present or d + 1 in present) and (d, d + 1) not in neighbors:
                    joined[d] = False
            if op is not None and not stored and op.name == "tt.gather":
                joined[:] = [False] * len(joined)
                visit(op.operands[1], dims)
            return
        for operand in op.operands:
            visit(operand, operand_dims(op, operand, dims))

    own_dims = tuple(d if extent > 1 else None for d, extent in enumerate(shape))
    for value in values:
        visit(value, own_dims)
    extents = list(shape)
    for d, is_joined in enumerate(joined):
        if is_joined:
            extents[d + 1] *= extents[d]
            extents[d] = 1
    return tuple(extents)
