"""Sums of products, as lists of terms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from .lemmas import factors_of, product
from .solver import z3

Terms = list[tuple[int, list[Any]]]  # (number, factors) of each


def terms_of(e: Any) -> Terms:
    """The terms of an expression that is written as a sum of products."""
    found = []
    for term in e.children() if z3.is_add(e) else [e]:
        number = 1
        for part in term.children() if z3.is_mul(term) else [term]:
            number *= part.as_long() if z3.is_int_value(part) else 1
        found.append((number, factors_of(term)))
    return found


def sum_of(terms: Iterable[tuple[int, list[Any]]]) -> Any:
    """The expression with these terms."""
    return z3.simplify(
        z3.Sum([z3.IntVal(0), *(number * product(factors) for number, factors in terms)]), som=True
    )


def is_same(one: Any, other: Any) -> bool:
    """Whether two sums have the same terms. z3 does not always write the factors of a product in one order."""
    kept, total = [z3.simplify(e, som=True) for e in (one, other)], Counter[tuple[int, ...]]()
    for sign, e in zip((1, -1), kept, strict=True):
        for number, factors in terms_of(e):
            total[tuple(sorted(factor.get_id() for factor in factors))] += sign * number
    return not any(total.values())
