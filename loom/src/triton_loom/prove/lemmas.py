"""Facts about products and quotients that z3 does not find by itself. Each is true of all integers.

    a < c * b  implies  a // b < c                    for b > 0
    x + 1 <= c implies  x * s + s <= c * s            for s >= 0
    q * s + r = q' * s + r' implies q = q', r = r'    for 0 <= r, r' < s

The last follows from the second, stated for the two quotients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

from .contract import parts_of
from .scope import Division
from .solver import z3

Monomial = tuple[Any, ...]
_MOST = 400  # pairs of factors; more would not help


def monomials(expression: Any) -> list[Monomial]:
    """The products of two or more factors that are not numbers in an expression written as a sum of products."""
    found = []
    for part in parts_of(z3.simplify(expression, som=True)):
        factors = factors_of(part) if z3.is_mul(part) else []
        if len(factors) > 1:
            found.append(tuple(sorted(factors, key=str)))
    return found


def factors_of(part: Any) -> list[Any]:
    """The factors of a product that are not numbers."""
    if z3.is_mul(part):
        return [factor for child in part.children() for factor in factors_of(child)]
    if part.decl().kind() == z3.Z3_OP_POWER and z3.is_int_value(part.arg(1)):
        return [part.arg(0)] * part.arg(1).as_long()
    return [] if z3.is_int_value(part) else [part]


def product(factors: Sequence[Any]) -> Any:
    """Of any number of factors."""
    result = z3.IntVal(1) if not factors else factors[0]
    for factor in factors[1:]:
        result = result * factor
    return result


def without(factors: Sequence[Any], factor: Any) -> list[Any]:
    """The factors but one."""
    at = next(i for i, other in enumerate(factors) if other.eq(factor))
    return [*factors[:at], *factors[at + 1 :]]


def _all_monomials(expressions: Iterable[Any]) -> list[Monomial]:
    found = {}
    for expression in expressions:
        for factors in monomials(expression):
            found[tuple(map(str, factors))] = factors
    return [found[key] for key in sorted(found)]


def about_quotients(expressions: Iterable[Any], divisions: Iterable[Division]) -> list[Any]:
    """How large quotients are, and products with them."""
    everything = list(expressions)
    products = _all_monomials(everything)
    lemmas, limits = [], []
    for d in divisions:
        divisor = z3.simplify(d.b, som=True)
        parts = factors_of(divisor) if z3.is_mul(divisor) else [divisor]
        others: dict[str, Any] = {}
        for factors in products:
            rest: list[Any] | None = list(factors)
            for part in parts:
                rest = without(rest, part) if rest is not None and any(f.eq(part) for f in rest) else None
            if rest and not any(f.eq(d.quotient) for f in rest):
                others[str(rest)] = product(rest)
        for limit in others.values():
            lemmas.append(z3.Implies(z3.And(d.b > 0, d.a < limit * d.b), d.quotient + 1 <= limit))
            limits.append((d.quotient, limit))
        lemmas += range_of(d)
    for factors in products:
        for quotient, limit in limits:
            if any(f.eq(quotient) for f in factors):
                rest_ = product(without(factors, quotient))
                lemmas += [
                    z3.Implies(
                        z3.And(quotient + 1 <= limit, rest_ >= 0), quotient * rest_ + rest_ <= limit * rest_
                    ),
                    z3.Implies(z3.And(quotient >= 0, rest_ >= 0), quotient * rest_ >= 0),
                ]
    return lemmas


def range_of(division: Division) -> list[Any]:
    """Of a quotient of what is not negative."""
    natural = z3.And(division.b > 0, division.a >= 0)
    return [z3.Implies(natural, division.quotient >= 0), z3.Implies(natural, division.quotient <= division.a)]


def about_products(expressions: Iterable[Any]) -> list[Any]:
    """Products with a common factor are in the order of their other factors."""
    by_factor: dict[str, tuple[Any, dict[str, Any]]] = {}
    for factors in _all_monomials(expressions):
        for factor in factors:
            other = product(without(factors, factor))
            by_factor.setdefault(str(factor), (factor, {}))[1][str(other)] = other
    lemmas = []
    for factor, others in by_factor.values():
        for other in others.values():
            lemmas += [
                z3.Implies(z3.And(other >= 0, factor >= 0), other * factor >= 0),
                z3.Implies(z3.And(other >= 1, factor >= 0), other * factor >= factor),
            ]
        for a, b in list(combinations(others.values(), 2))[:_MOST]:
            lemmas += [*ordered(a, b, factor), *ordered(b, a, factor)]
    return lemmas


def ordered(a: Any, b: Any, factor: Any) -> list[Any]:
    """a <= b and a < b, both sides multiplied."""
    return [
        z3.Implies(z3.And(a <= b, factor >= 0), a * factor <= b * factor),
        z3.Implies(z3.And(a + 1 <= b, factor >= 0), a * factor + factor <= b * factor),
    ]
