"""Products as lists of factors, and sums of products as lists of terms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

from .solver import z3

Terms = list[tuple[int, list[Any]]]  # (number, factors) of each


def factors_of(part: Any) -> list[Any]:
    """The factors of a product that are not numbers."""
    if z3.is_mul(part):
        return [factor for child in part.children() for factor in factors_of(child)]
    if part.decl().kind() == z3.Z3_OP_POWER and z3.is_int_value(part.arg(1)):
        return [part.arg(0)] * part.arg(1).as_long()
    return [] if z3.is_int_value(part) else [part]


def number_of(part: Any) -> int:
    """The product of the factors that are numbers."""
    if z3.is_mul(part):
        return prod(map(number_of, part.children()))
    return int(part.as_long()) if z3.is_int_value(part) else 1


def product(factors: Sequence[Any]) -> Any:
    """Of any number of factors."""
    result = z3.IntVal(1) if not factors else factors[0]
    for factor in factors[1:]:
        result = result * factor
    return result


def without(factors: Sequence[Any], parts: Sequence[Any]) -> list[Any] | None:
    """The factors that are left if some are taken away; None if one of these is not there."""
    rest = list(factors)
    for part in parts:
        at = next((i for i, factor in enumerate(rest) if factor.eq(part)), None)
        if at is None:
            return None
        del rest[at]
    return rest


def quotient_of(whole: Any, divisor: Any) -> Any:
    """What a product has beside the factors of a divisor; None where it is not a multiple of them term by term."""
    (number, factors), *more = terms_of(z3.simplify(whole, som=True))
    (by, parts), *others = terms_of(z3.simplify(divisor, som=True))
    rest = without(factors, parts)
    if more or others or rest is None or by <= 0 or number % by:
        return None
    return number // by * product(rest)


def terms_of(e: Any) -> Terms:
    """The terms of an expression that is written as a sum of products."""
    return [(number_of(term), factors_of(term)) for term in (e.children() if z3.is_add(e) else [e])]


def sum_of(terms: Iterable[tuple[int, list[Any]]]) -> Any:
    """The expression with these terms."""
    return z3.simplify(
        z3.Sum([z3.IntVal(0), *(number * product(factors) for number, factors in terms)]), som=True
    )


def undivided(e: Any, shown: Callable[[Any], bool]) -> Any:
    """A sum in which 16 * (stride // 16) is written as the stride, where that is shown to be a multiple of 16."""
    whole: Terms = []
    for number, factors in terms_of(z3.simplify(e, som=True)):
        for factor in factors:
            part, by = factor.children() if z3.is_idiv(factor) else (factor, z3.IntVal(0))
            n = by.as_long() if z3.is_int_value(by) else 0
            if n > 0 and number % n == 0 and shown(part % n == 0):
                rest = without(factors, [factor]) or []
                whole += terms_of(z3.simplify(number // n * part * product(rest), som=True))
                break
        else:
            whole.append((number, factors))
    return sum_of(whole)


def is_same(one: Any, other: Any) -> bool:
    """Whether two sums have the same terms. z3 does not always write the factors of a product in one order."""
    kept, total = [z3.simplify(e, som=True) for e in (one, other)], Counter[tuple[int, ...]]()
    for sign, e in zip((1, -1), kept, strict=True):
        for number, factors in terms_of(e):
            total[tuple(sorted(factor.get_id() for factor in factors))] += sign * number
    return not any(total.values())
