"""Facts about products and quotients that z3 does not find by itself. Each is true of all integers.

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

Monomials = dict[tuple[str, ...], list[Any]]  # factors in the order of their texts, and these texts
_MOST = 400  # pairs of factors; more would not help

text_of = remembered(str)


@remembered
def monomials(expression: Any) -> Monomials:
    """The products of two or more factors that are not numbers in an expression written as a sum of products."""
    found = {}
    for part in parts_of(z3.simplify(expression, som=True)):
        factors = sorted(factors_of(part), key=text_of) if z3.is_mul(part) else []
        if len(factors) > 1:
            found[tuple(map(text_of, factors))] = factors
    return found


def _all_monomials(expressions: Iterable[Any]) -> Monomials:
    found: Monomials = {}
    for expression in expressions:
        found |= monomials(expression)
    return {key: found[key] for key in sorted(found)}


def about_quotients(expressions: Iterable[Any], divisions: Iterable[Division]) -> list[Any]:
    """How large quotients are, and products with them."""
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
    """Of a quotient of what is not negative."""
    natural = z3.And(division.b > 0, division.a >= 0)
    return [z3.Implies(natural, division.quotient >= 0), z3.Implies(natural, division.quotient <= division.a)]


def below(limits: Iterable[tuple[Any, Any]], divisions: Sequence[Division]) -> list[Any]:
    """What quotients are below, from what is divided by factors of its limit, and from one quotient to the next: as
    the number of a program in a grid of rows * heads * parts is taken apart by parts, then by heads. A divisor that is
    itself the quotient of a product and some of its factors is what these leave."""
    lemmas = []
    exact: dict[int, Any] = {}
    for d in divisions:
        known = quotient_of(d.a, d.b)
        if known is not None:
            exact[d.quotient.get_id()] = known
            lemmas.append(z3.Implies(d.b > 0, z3.And(d.quotient == known, d.remainder == 0)))
    waiting = list(limits)
    while waiting:
        value, limit = waiting.pop()
        for d in divisions:
            if not d.a.eq(value):
                continue
            by: Any = exact.get(d.b.get_id(), d.b)
            rest = quotient_of(limit, by)
            if rest is not None:
                lemmas.append(
                    z3.Implies(z3.And(d.b == by, by > 0, value < rest * by), d.quotient + 1 <= rest)
                )
                waiting.append((d.quotient, rest))
    return lemmas


def natural(expressions: Iterable[Any]) -> list[Any]:
    """Products of what is not negative are not."""
    return [
        z3.Implies(z3.And(*(factor >= 0 for factor in factors)), product(factors) >= 0)
        for factors in _all_monomials(expressions).values()
    ]


def about_digits(expressions: Iterable[Any]) -> list[Any]:
    """How large products with a remainder by a number are: those of head % 8 and a size are 0 to 7 times the size."""
    lemmas = []
    for factors in _all_monomials(expressions).values():
        for factor in factors:
            if z3.is_mod(factor) and z3.is_int_value(factor.arg(1)) and factor.arg(1).as_long() > 0:
                times = product(without(factors, [factor]) or [])
                most = (factor.arg(1).as_long() - 1) * times
                lemmas.append(z3.Implies(times >= 0, z3.And(factor * times >= 0, factor * times <= most)))
    return lemmas


def about_products(expressions: Iterable[Any]) -> list[Any]:
    """Products with a common factor are in the order of their other factors."""
    by_factor: dict[str, tuple[Any, dict[tuple[str, ...], Any]]] = {}
    for texts, factors in _all_monomials(expressions).items():
        for at, factor in enumerate(factors):
            others = factors[:at] + factors[at + 1 :]
            key = texts[:at] + texts[at + 1 :]
            by_factor.setdefault(texts[at], (factor, {}))[1][key] = product(others)
    lemmas = []
    for factor, multiplied in by_factor.values():
        for other in multiplied.values():
            lemmas += [
                z3.Implies(z3.And(other >= 0, factor >= 0), other * factor >= 0),
                z3.Implies(z3.And(other >= 1, factor >= 0), other * factor >= factor),
            ]
        for a, b in islice(combinations(multiplied.values(), 2), _MOST):
            lemmas += [*ordered(a, b, factor), *ordered(b, a, factor)]
    return lemmas


def ordered(a: Any, b: Any, factor: Any) -> list[Any]:
    """a <= b and a < b, both sides multiplied."""
    return [
        z3.Implies(z3.And(a <= b, factor >= 0), a * factor <= b * factor),
        z3.Implies(z3.And(a + 1 <= b, factor >= 0), a * factor + factor <= b * factor),
    ]
