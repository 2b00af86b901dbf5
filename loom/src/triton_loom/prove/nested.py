"""Bounds proven digit by digit, as a tensor is rows of rows.

    0 <= low < s  and  0 <= high < n  imply  0 <= high * s + low < n * s

An offset that is a sum of products is split by one factor of the extent after another. The remaining questions are
about single indices, which are easier than one about their product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

from .solver import z3
from .sums import Terms, sum_of, terms_of, undivided, without

Shown = Callable[[Any], bool]
Term = tuple[int, list[Any]]


def inside(offset: Any, extent: Any, shown: Shown) -> bool:
    """Return whether an offset is shown to be at least 0 and below the extent."""
    simplified = z3.simplify(extent)
    if z3.is_add(simplified):  # nothing to split
        return False
    ((number, factors),) = terms_of(simplified)
    return _inside(terms_of(undivided(offset, shown)), number, factors, shown)


def _inside(offset: Terms, number: int, factors: list[Any], shown: Shown) -> bool:
    for size, rest in _sizes(number, factors):
        for high, low in _split(offset, size):
            below = sum_of(low)
            if shown(z3.And(below >= 0, below < sum_of([size]))):
                return _inside(high, *rest, shown)
    index, limit = sum_of(offset), sum_of([(number, factors)])
    return shown(z3.And(index >= 0, index < limit))


def _sizes(number: int, factors: list[Any]) -> Iterator[tuple[Term, Term]]:
    """Yield proper divisors of a product with their cofactors: its number, single factors, then products of factors."""
    if number > 1 and factors:
        yield (number, []), (1, factors)
    for count in range(1, len(factors)):
        for chosen in combinations(range(len(factors)), count):
            yield (
                (1, [factors[i] for i in chosen]),
                (number, [factor for i, factor in enumerate(factors) if i not in chosen]),
            )


def _split(offset: Terms, size: Term) -> Iterator[tuple[Terms, Terms]]:
    """Yield the terms that are multiples of a size, divided by it, and the remaining terms.

    Terms that are a number times the size may belong to either.
    """
    high: Terms = []
    low: Terms = []
    alone: Terms = []
    number, factors = size
    for times, own in offset:
        rest = without(own, factors)
        if not own and number > 1:  # a number
            high.append((times // number, []))
            low.append((times % number, []))
        elif rest is None or times % number:
            low.append((times, own))
        else:
            (high if rest else alone).append((times // number, rest))
    if high or alone:
        yield [*high, *alone], low
    if high and alone:
        yield high, [*low, *((times * number, factors) for times, _ in alone)]
