"""Recognition of sorting networks, the TTIR form of `tl.sort`, `tl.topk` and `tl.bitonic_merge`.

A compare-and-swap along an axis of two elements has the form

    y = x ^ broadcast(xor over the axis of x)            the other element of the pair
      select((x > y) != t, y, x)                           t: whether this position receives the larger element

where t depends on the position alone. 55 of them sort 1024 elements. Each chain of them becomes one operation,
`loom.bitonic`, whose attribute `merges` lists its steps as `Merge`; the attribute `unsigned` selects unsigned
comparison of integers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from .ttir import I1, Function, Op, Tensor, Value, element_of, shape_of

BITONIC = "loom.bitonic"


@dataclass(frozen=True)
class Merge:
    """Compare-and-swaps of elements whose row-major positions differ by `first`, then half of it, ... `last`.

    The higher position of each pair receives the larger element, or the smaller one where `position & flip` is
    nonzero; `descending` reverses both. All distances and flip are powers of two; flip is the largest of them, or
    zero.
    """

    first: int
    last: int
    flip: int
    descending: bool


@dataclass(frozen=True)
class _Exchange:
    """A single compare-and-swap."""

    source: Value
    unsigned: bool
    merge: Merge


def recognize_sorting(function: Function) -> None:
    """Replace the sorting networks of a function in place."""
    replaced = False
    for op in list(function.body.walk()):
        if op.name == "arith.select" and (exchange := _exchange(op)):
            op.name, op.operands = BITONIC, [exchange.source]
            op.attrs = {"merges": [exchange.merge], "unsigned": exchange.unsigned}
            replaced = True
    if replaced:
        _remove_unused(function)
        _chain(function)


# ---- one compare-and-swap ----------------------------------------------------------------------------

_GREATER = {"arith.cmpf": ("ogt",), "arith.cmpi": ("sgt", "ugt")}


def _exchange(select: Op) -> _Exchange | None:
    condition, other, source = select.operands
    if not isinstance(source.type, Tensor) or element_of(source.type) == I1:
        return None
    shape, axis = source.type.shape, _swapped_axis(other, source)
    if axis is None:
        return None
    for compared, position in _unequal(condition):
        comparison = _strip(compared, "arith.extui").producer
        larger = _parity(position)
        if comparison is None or larger is None or comparison.operands != [source, other]:
            continue
        kind = comparison.attrs.get("flags", [""])[0]
        if kind not in _GREATER.get(comparison.name, ()):
            continue
        flips = [_distance(shape, dim) for dim in larger.dims - {axis}]
        distance = _distance(shape, axis)
        if axis in larger.dims and len(flips) < 2 and all(flip > distance for flip in flips):
            merge = Merge(distance, distance, sum(flips), larger.odd)
            return _Exchange(source, kind == "ugt", merge)
    return None


def _distance(shape: tuple[int, ...], dim: int) -> int:
    """Return the row-major distance between neighbors along a dimension."""
    return prod(shape[dim + 1 :])


def _strip(value: Value, *names: str) -> Value:
    """Strip these operations from a value."""
    while value.producer and value.producer.name in names:
        value = value.producer.operands[0]
    return value


def _bits(value: Value) -> Value:
    return _strip(value, "tt.bitcast", "arith.bitcast")


def _swapped_axis(other: Value, source: Value) -> int | None:
    """Return the axis of two elements along which `other` is `source` with the two swapped."""
    xor = _bits(other).producer
    if xor is None or xor.name != "arith.xori":
        return None
    for own, spread in (xor.operands, xor.operands[::-1]):
        expand = _strip(spread, "tt.broadcast").producer
        if expand is None or expand.name != "tt.expand_dims" or _bits(own) is not _bits(source):
            continue
        reduce = expand.operands[0].producer
        if reduce is None or reduce.name != "tt.reduce" or not _is_xor(reduce):
            continue
        axis = int(reduce.attrs["axis"])
        matches = expand.attrs["axis"] == axis and shape_of(source.type)[axis] == 2
        if matches and [_bits(v) for v in reduce.operands] == [_bits(source)]:
            return axis
    return None


def _is_xor(reduce: Op) -> bool:
    block = reduce.regions[0].block
    return (
        [op.name for op in block.ops] == ["arith.xori", "tt.reduce.return"]
        and set(block.ops[0].operands) == set(block.args)
        and block.ops[1].operands == block.ops[0].results
    )


def _unequal(condition: Value) -> list[tuple[Value, Value]]:
    """Return the two sides of `a != b`, in either order."""
    op = condition.producer
    if op is None or not (
        (op.name == "arith.cmpi" and op.attrs["flags"][0] == "ne") or op.name == "arith.xori"
    ):
        return []
    left, right = op.operands
    return [(left, right), (right, left)]


# ---- tiles of zeros and ones that depend on the position only -----------------------------------------


@dataclass(frozen=True)
class _Parity:
    """Parity of the sum of indices along some dimensions of two elements: 1 where it is odd (even, if `odd`)."""

    dims: frozenset[int]
    odd: bool = False

    def __xor__(self, other: _Parity) -> _Parity:
        return _Parity(self.dims ^ other.dims, self.odd != other.odd)


def _parity(value: Value) -> _Parity | None:
    op = value.producer
    if op is None:
        return None
    if op.name == "arith.constant":
        number = op.attrs["value"]
        return _Parity(frozenset(), number == 1) if number in (0, 1) else None
    if op.name == "tt.make_range":
        return _Parity(frozenset({0})) if (op.attrs["start"], shape_of(value.type)) == (0, (2,)) else None
    if op.name == "arith.xori" or (op.name == "arith.cmpi" and op.attrs["flags"][0] in ("eq", "ne")):
        left, right = (_parity(v) for v in op.operands)
        if left is None or right is None:
            return None
        return left ^ right ^ _Parity(frozenset(), op.attrs.get("flags", ["ne"])[0] == "eq")
    if op.name in ("tt.broadcast", "arith.extui", "arith.trunci"):
        return _parity(op.operands[0])
    if op.name in ("tt.reshape", "tt.expand_dims"):
        inner = _parity(op.operands[0])
        source, result = (
            [d for d, extent in enumerate(shape_of(v.type)) if extent > 1]
            for v in (op.operands[0], op.result)
        )
        if inner is None or [shape_of(op.operands[0].type)[d] for d in source] != [
            shape_of(op.result.type)[d] for d in result
        ]:
            return None
        target = dict(zip(source, result, strict=True))
        return replace(inner, dims=frozenset(target[d] for d in inner.dims))
    return None


# ---- chains of compare-and-swaps ---------------------------------------------------------------------

_PURE = {
    *("tt.bitcast", "tt.reduce", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.make_range"),
    *("arith.bitcast", "arith.xori", "arith.cmpi", "arith.cmpf", "arith.extui", "arith.trunci"),
}


def _remove_unused(function: Function) -> None:
    """Remove the operations that only the compare-and-swaps needed."""
    uses = _count_uses(function)
    for op in reversed(list(function.body.walk())):
        if op.name in _PURE and not any(uses.get(result) for result in op.results):
            assert op.block
            op.block.ops.remove(op)
            for inner in op.walk():
                for value in inner.operands:
                    uses[value] -= 1


def _chain(function: Function) -> None:
    """Merge a network with its predecessor if it is the only user of its result."""
    uses = _count_uses(function)
    for op in list(function.body.walk()):
        before = op.operands[0].producer if op.name == BITONIC else None
        if before is None or before.name != BITONIC or before.block is not op.block:
            continue
        if uses[before.result] == 1 and before.attrs["unsigned"] == op.attrs["unsigned"]:
            op.operands = before.operands
            op.attrs["merges"] = _join_merges([*before.attrs["merges"], *op.attrs["merges"]])
            assert before.block
            before.block.ops.remove(before)


def _join_merges(merges: list[Merge]) -> list[Merge]:
    """Join merges that continue one another."""
    out: list[Merge] = []
    for merge in merges:
        if out and merge == replace(out[-1], first=out[-1].last // 2, last=merge.last):
            out[-1] = replace(out[-1], last=merge.last)
        else:
            out.append(merge)
    return out


def _count_uses(function: Function) -> dict[Value, int]:
    uses: dict[Value, int] = {}
    for op in function.body.walk():
        for value in [*op.operands, *(v for _, passed in op.successors for v in passed)]:
            uses[value] = uses.get(value, 0) + 1
    return uses
