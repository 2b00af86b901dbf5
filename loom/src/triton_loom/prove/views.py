"""Elements of strided views: which offsets into their storage they have."""

from __future__ import annotations

from collections.abc import Sequence

from .contract import Bool, Buffer, Int
from .evaluate import Evaluator
from .scope import Scope, integer
from .solver import QUICK, Solution, ask, z3
from .sums import is_same

Dim = tuple[Int, Int]  # size and stride


def within_view(evaluator: Evaluator, offset: Int, buffer: Buffer) -> tuple[list[Bool], Bool]:
    """Return conditions for an offset to be an element of a view: sufficient ones, and one that may also be necessary.

    That is the one by digits with larger strides first. It is necessary where each stride exceeds what smaller ones add
    up to; `is_element` decides at given sizes.
    """
    scope = evaluator.scope
    dims = [
        (scope.without_division(integer(size)), scope.without_division(integer(stride)))
        for size, stride in buffer.dims or ()
    ]
    by_form, by_digits = _conditions(scope, offset, dims)
    ordered = _descending(evaluator, dims)
    if all(a is b for a, b in zip(ordered, dims, strict=True)):
        return by_form, by_digits
    sorted_by_form, sorted_by_digits = _conditions(scope, offset, ordered)
    return [*by_form, by_digits, *sorted_by_form], sorted_by_digits


def _conditions(scope: Scope, offset: Int, dims: Sequence[Dim]) -> tuple[list[Bool], Bool]:
    """Return two sufficient conditions with the dimensions in this order: by the form in which the offset is written,
    if it has one, and by its digits with respect to the strides."""
    by_form: list[Bool] | None = []
    digits: list[Bool] = []
    remaining = by_digits = offset
    for size, stride in dims:
        if z3.is_int_value(stride) and stride.as_long() == 0:
            continue
        division = scope.divide(by_digits, stride)
        digits.append(z3.And(division.quotient >= 0, division.quotient < size))
        by_digits = division.remainder
        if by_form is not None:
            parts = _split(remaining, stride, scope)
            by_form = None if parts is None else [*by_form, z3.And(parts[0] >= 0, parts[0] < size)]
            remaining = remaining if parts is None else parts[1]
    exact = z3.And(*digits, by_digits == 0, offset >= 0) if digits else offset == 0
    return ([] if by_form is None else [z3.And(*by_form, remaining == 0)]), exact


def _descending(evaluator: Evaluator, dims: Sequence[Dim]) -> list[Dim]:
    """Return the dimensions with larger strides first, as far as the contract decides it."""
    ordered: list[Dim] = []
    for dim in dims:
        at = len(ordered)
        while at and _is_larger(evaluator, dim[1], ordered[at - 1][1]):
            at -= 1
        ordered.insert(at, dim)
    return ordered


def _is_larger(evaluator: Evaluator, stride: Int, other: Int) -> bool:
    """Return whether one stride is at least as large as another for all sizes, but not the other way round."""
    facts = evaluator.contract_facts

    def at_least(a: Int, b: Int) -> bool:
        return bool(ask(facts, a >= b, QUICK // 8).verdict == "proven")

    return not at_least(other, stride) and at_least(stride, other)


def _split(offset: Int, stride: Int, scope: Scope) -> Dim | None:
    """Return digit and rest of an offset that is written as digit * stride + rest."""
    if z3.is_int_value(stride):
        division = scope.divide(offset, stride)
        return division.quotient, division.remainder
    if not z3.is_const(stride):
        return None
    rest, one = (z3.simplify(z3.substitute(offset, (stride, z3.IntVal(n))), som=True) for n in (0, 1))
    digit = z3.simplify(one - rest, som=True)
    whole = digit * stride + rest
    same = is_same(offset, whole) or ask([], offset == whole, QUICK // 8).verdict == "proven"
    return (digit, rest) if same else None


_MAX_DIGITS = 2**12  # tried per dimension; views that overlap themselves would need many more


def is_element(sizes: Solution, offset: Int, buffer: Buffer) -> bool:
    """Return whether an offset is an element of a view at the sizes of a solution, or may be: see `_MAX_DIGITS`."""
    dims = [(sizes.value(size), sizes.value(stride)) for size, stride in buffer.dims or ()]
    return _reaches(sizes.value(offset), sorted(dims, key=lambda dim: -dim[1]))


def _reaches(offset: int, dims: Sequence[tuple[int, int]]) -> bool:
    """Return whether an offset is a sum of one multiple of each stride, below the size."""
    if not dims or min(size for size, _ in dims) < 1:
        return not dims and offset == 0
    (size, stride), *smaller = dims
    if stride == 0:
        return _reaches(offset, smaller)
    most = sum((size - 1) * stride for size, stride in smaller)
    first, last = max(0, -((most - offset) // stride)), min(size - 1, offset // stride)
    return last - first >= _MAX_DIGITS or any(
        _reaches(offset - digit * stride, smaller) for digit in range(first, last + 1)
    )
