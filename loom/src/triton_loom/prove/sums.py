"""Products as lists of factors, and sums of products as lists of terms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

from .solver import z3

Terms = list[tuple[int, list[Any]]]  # (number, factors) of each term


def factors_of(part: Any) -> list[Any]:
    """Return the nonnumeric factors of a product."""
    if z3.is_mul(part):
        return [factor for child in part.children() for factor in factors_of(child)]
    if part.decl().kind() == z3.Z3_OP_POWER and z3.is_int_value(part.arg(1)):
        return [part.arg(0)] * part.arg(1).as_long()
    return [] if z3.is_int_value(part) else [part]


def number_of(part: Any) -> int:
    """Return the product of the numeric factors."""
    if z3.is_mul(part):
        return prod(map(number_of, part.children()))
    return int(part.as_long()) if z3.is_int_value(part) else 1


def product(factors: Sequence[Any]) -> Any:
    """Multiply any number of factors."""
    result = z3.IntVal(1) if not factors else factors[0]
    for factor in factors[1:]:
        result = result * factor
    return result


def without(factors: Sequence[Any], parts: Sequence[Any]) -> list[Any] | None:
    """Remove some factors from others; None if one of them is missing."""
    rest = list(factors)
    for part in parts:
        at = next((i for i, factor in enumerate(rest) if factor.eq(part)), None)
        if at is None:
            return None
        del rest[at]
    return rest


def quotient_of(dividend: Any, divisor: Any) -> Any:
    """Divide a product by the factors of a divisor; None where a term is not a multiple of them."""
    (number, factors), *more = terms_of(z3.simplify(dividend, som=True))
    (by, parts), *others = terms_of(z3.simplify(divisor, som=True))
    rest = without(factors, parts)
    if more or others or rest is None or by <= 0 or number % by:
        return None
    return number // by * product(rest)


def terms_of(e: Any) -> Terms:
    """Return the terms of a sum of products."""
    return [(number_of(term), factors_of(term)) for term in (e.children() if z3.is_add(e) else [e])]


def sum_of(terms: Iterable[tuple[int, list[Any]]]) -> Any:
    """Return the expression with these terms."""
    return z3.simplify(
        z3.Sum([z3.IntVal(0), *(number * product(factors) for number, factors in terms)]), som=True
    )


def undivided(e: Any, shown: Callable[[Any], bool]) -> Any:
    """Replace 16 * (stride // 16) by stride in a sum, where the stride is shown to be a multiple of 16."""
    terms: Terms = []
    for number, factors in terms_of(z3.simplify(e, som=True)):
        for factor in factors:
            part, divisor = factor.children() if z3.is_idiv(factor) else (factor, z3.IntVal(0))
            n = divisor.as_long() if z3.is_int_value(divisor) else 0
            if n > 0 and number % n == 0 and shown(part % n == 0):
                rest = without(factors, [factor]) or []
                terms += terms_of(z3.simplify(number // n * part * product(rest), som=True))
                break
        else:
            terms.append((number, factors))
    return sum_of(terms)


def is_same(one: Any, other: Any) -> bool:
    """Return whether two sums have the same terms; z3 does not always order the factors of a product alike."""
    expanded, total = [z3.simplify(e, som=True) for e in (one, other)], Counter[tuple[int, ...]]()
    for sign, e in zip((1, -1), expanded, strict=True):
        for number, factors in terms_of(e):
            total[tuple(sorted(factor.get_id() for factor in factors))] += sign * number
    return not any(total.values())
