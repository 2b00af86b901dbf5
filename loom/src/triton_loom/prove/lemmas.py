"""Lemmas about products and quotients that z3 does not find by itself. Each is true of all integers.

    a < c * b  implies  a // b < c                    for b > 0
    x + 1 <= c implies  x * s + s <= c * s            for s >= 0
    q * s + r = q' * s + r' implies q = q', r = r'    for 0 <= r, r' < s

The last follows from the second, stated for the two quotients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, islice
from typing import Any

from .contract import parts_of, remembered
from .scope import Division
from .solver import z3
from .sums import factors_of, product, quotient_of, without

Monomials = dict[tuple[str, ...], list[Any]]  # factors sorted by their texts, by these texts
_MAX_PAIRS = 400  # pairs of factors; more would not help

text_of = remembered(str)


@remembered
def monomials(expression: Any) -> Monomials:
    """Return the products of two or more nonnumeric factors in an expression, expanded as a sum of products."""
    result = {}
    for part in parts_of(z3.simplify(expression, som=True)):
        factors = sorted(factors_of(part), key=text_of) if z3.is_mul(part) else []
        if len(factors) > 1:
            result[tuple(map(text_of, factors))] = factors
    return result


def _all_monomials(expressions: Iterable[Any]) -> Monomials:
    result: Monomials = {}
    for expression in expressions:
        result |= monomials(expression)
    return {key: result[key] for key in sorted(result)}


def about_quotients(expressions: Iterable[Any], divisions: Iterable[Division]) -> list[Any]:
    """Return lemmas that bound quotients and products with them."""
    everything = list(expressions)
    products = list(_all_monomials(everything).values())
    lemmas, limits = [], []
    for d in divisions:
        divisor = z3.simplify(d.b, som=True)
        parts = factors_of(divisor) if z3.is_mul(divisor) else [divisor]
        others: dict[tuple[str, ...], Any] = {}
        for factors in products:
            rest = without(factors, parts)
            if rest and not any(f.eq(d.quotient) for f in rest):
                others[tuple(map(text_of, rest))] = product(rest)
        for limit in others.values():
            lemmas.append(z3.Implies(z3.And(d.b > 0, d.a < limit * d.b), d.quotient + 1 <= limit))
            limits.append((d.quotient, limit))
        lemmas += range_of(d)
    for factors in products:
        for quotient, limit in limits:
            beside = without(factors, [quotient])
            if beside is not None:
                times = product(beside)
                lemmas += [
                    z3.Implies(
                        z3.And(quotient + 1 <= limit, times >= 0), quotient * times + times <= limit * times
                    ),
                    z3.Implies(z3.And(quotient >= 0, times >= 0), quotient * times >= 0),
                ]
    return lemmas


def range_of(division: Division) -> list[Any]:
    """Return bounds of the quotient of a nonnegative dividend."""
    natural = z3.And(division.b > 0, division.a >= 0)
    return [z3.Implies(natural, division.quotient >= 0), z3.Implies(natural, division.quotient <= division.a)]


def below(limits: Iterable[tuple[Any, Any]], divisions: Sequence[Division]) -> list[Any]:
    """Return lemmas that bound quotients by a limit divided by factors, from one quotient to the next.

    This is how a program number in a grid of rows * heads * parts is split by parts, then by heads. A divisor that
    is itself the quotient of a product by some of its factors equals the remaining factors.
    """
    lemmas = []
    exact: dict[int, Any] = {}
    for d in divisions:
        quotient = quotient_of(d.a, d.b)
        if quotient is not None:
            exact[d.quotient.get_id()] = quotient
            lemmas.append(z3.Implies(d.b > 0, z3.And(d.quotient == quotient, d.remainder == 0)))
    pending = list(limits)
    while pending:
        value, limit = pending.pop()
        for d in divisions:
            if not d.a.eq(value):
                continue
            divisor: Any = exact.get(d.b.get_id(), d.b)
            rest = quotient_of(limit, divisor)
            if rest is not None:
                lemmas.append(
                    z3.Implies(
                        z3.And(d.b == divisor, divisor > 0, value < rest * divisor), d.quotient + 1 <= rest
                    )
                )
                pending.append((d.quotient, rest))
    return lemmas


def natural(expressions: Iterable[Any]) -> list[Any]:
    """Return lemmas that products of nonnegative factors are nonnegative."""
    return [
        z3.Implies(z3.And(*(factor >= 0 for factor in factors)), product(factors) >= 0)
        for factors in _all_monomials(expressions).values()
    ]


def about_digits(expressions: Iterable[Any]) -> list[Any]:
    """Return bounds of products with a remainder by a number: head % 8 times a size is 0 to 7 times the size."""
    lemmas = []
    for factors in _all_monomials(expressions).values():
        for factor in factors:
            if z3.is_mod(factor) and z3.is_int_value(factor.arg(1)) and factor.arg(1).as_long() > 0:
                times = product(without(factors, [factor]) or [])
                largest = (factor.arg(1).as_long() - 1) * times
                lemmas.append(z3.Implies(times >= 0, z3.And(factor * times >= 0, factor * times <= largest)))
    return lemmas


def about_products(expressions: Iterable[Any]) -> list[Any]:
    """Return lemmas that order products with a common factor by their other factors."""
    by_factor: dict[str, tuple[Any, dict[tuple[str, ...], Any]]] = {}
    for texts, factors in _all_monomials(expressions).items():
        for at, factor in enumerate(factors):
            others = factors[:at] + factors[at + 1 :]
            key = texts[:at] + texts[at + 1 :]
            by_factor.setdefault(texts[at], (factor, {}))[1][key] = product(others)
    lemmas = []
    for factor, cofactors in by_factor.values():
        for other in cofactors.values():
            lemmas += [
                z3.Implies(z3.And(other >= 0, factor >= 0), other * factor >= 0),
                z3.Implies(z3.And(other >= 1, factor >= 0), other * factor >= factor),
            ]
        for a, b in islice(combinations(cofactors.values(), 2), _MAX_PAIRS):
            lemmas += [*ordered(a, b, factor), *ordered(b, a, factor)]
    return lemmas


def ordered(a: Any, b: Any, factor: Any) -> list[Any]:
    """Return lemmas that multiply both sides of a <= b and a < b by a factor."""
    return [
        z3.Implies(z3.And(a <= b, factor >= 0), a * factor <= b * factor),
        z3.Implies(z3.And(a + 1 <= b, factor >= 0), a * factor + factor <= b * factor),
    ]
