"""Two programs at one element are one program: their offsets have the same digits, so the same made the digits.

An offset is a sum such as (program // n * 64 + lane) * columns + column. If the sums of two programs are equal and
column < columns for both, then what is multiplied by `columns` is equal too, and so on down to the programs. Each step
is a question of its own, with nothing about products but what the step needs. Steps that fail are left out: what was
shown so far is all that the next ones may use.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

from .contract import constants_of
from .lemmas import ordered, product, without
from .linear import Linear
from .solver import z3
from .sums import Terms, is_same, sum_of, terms_of

Twins = Sequence[tuple[Any, Any]]  # of the first program and of the second one


def same(facts: Sequence[Any], offsets: tuple[Any, Any], programs: Twins, twins: Twins) -> bool:
    """Whether it follows from the facts, if both offsets are equal, that the programs are."""
    steps = _Steps(facts, twins)
    steps.peel(*offsets)
    return steps.shown(z3.And(*(one == z3.substitute(other, *steps.found) for one, other in programs)))


class _Steps:
    """What is known of two programs at one element. Where something is the same in both, the second one's name for it
    is replaced by the first one's."""

    def __init__(self, facts: Sequence[Any], twins: Twins) -> None:
        self.facts, self.twins = list(facts), list(twins)
        self.found: list[tuple[Any, Any]] = []  # what is replaced, and by what
        self._local = {constant.get_id() for pair in twins for constant in pair}
        self._linear = Linear()

    def shown(self, goal: Any, lemmas: Sequence[Any] = ()) -> bool:
        """Whether a goal follows from what is known."""
        return self._linear.follows([*self.facts, *lemmas], goal)

    def peel(self, one: Any, other: Any) -> None:
        """All that follows from the equality of two expressions, one after the other of what they have multiples of."""
        one, other = self._learn(one, other)
        for size in self._sizes(one):
            parts = [self._multiple(size, e) for e in (one, other)]
            if not all(parts) or is_same(*map(sum_of, parts)):
                continue
            common = gcd(*(number for part in parts for number, _ in part))
            high, high_2 = (sum_of((number // common, factors) for number, factors in part) for part in parts)
            whole = common * size
            if self.shown(high == high_2, [*ordered(high, high_2, whole), *ordered(high_2, high, whole)]):
                self.peel(high, high_2)
                self.peel(one - high * whole, other - high_2 * whole)
                return

    def _learn(self, one: Any, other: Any) -> tuple[Any, Any]:
        """Add that two expressions are equal, and replace what is the same in both by that."""
        one, other = (z3.substitute(e, *self.found) if self.found else e for e in (one, other))
        self.facts.append(one == other)
        names = constants_of([one, other])
        again = True
        while again:
            again = False
            for mine, theirs in list(self.twins):
                if theirs.get_id() in names and z3.is_int(mine) and self.shown(mine == theirs):
                    self.twins.remove((mine, theirs))
                    self.found.append((theirs, mine))
                    self.facts = [z3.substitute(fact, (theirs, mine)) for fact in self.facts]
                    other = z3.substitute(other, (theirs, mine))
                    again = True
        return z3.simplify(one, som=True), z3.simplify(other, som=True)

    def _is_shared(self, e: Any) -> bool:
        return self._local.isdisjoint(constants_of([e]))

    def _coefficients(self, e: Any) -> list[tuple[list[Any], Terms]]:
        """A sum as products of what belongs to one program, and what each of them is multiplied by."""
        found: dict[tuple[int, ...], tuple[list[Any], Terms]] = {}
        for number, factors in terms_of(e):
            own = [f for f in factors if not self._is_shared(f)]
            key = tuple(sorted(f.get_id() for f in own))
            found.setdefault(key, (own, []))[1].append((number, [f for f in factors if self._is_shared(f)]))
        return [item for item in found.values() if item[0]]

    def _sizes(self, e: Any) -> list[Any]:
        """What products in a sum are multiples of and both programs have, that of most products first: factors, and
        sums such as cols + cols % 2."""
        found: dict[str, Any] = {}
        for _, terms in self._coefficients(e):
            if len(terms) > 1:
                common = gcd(*(number for number, _ in terms))
                size = sum_of((number // common, factors) for number, factors in terms)
                found[str(size)] = size
            for _, factors in terms:
                found |= {str(factor): factor for factor in factors}
        counted = [(len(self._multiple(size, e)), text) for text, size in found.items()]
        return [found[text] for _, text in sorted(counted, key=lambda item: (-item[0], item[1]))]

    def _multiple(self, size: Any, e: Any) -> Terms:
        """What a size is multiplied by in a sum of products."""
        found = []
        for own, terms in self._coefficients(e):
            if z3.is_add(size):
                ratio = _ratio(terms, size)
                found += [] if ratio is None else [(ratio[0], [*own, *ratio[1]])]
            else:
                having = [(n, factors) for n, factors in terms if any(f.eq(size) for f in factors)]
                found += [(n, [*own, *without(factors, size)]) for n, factors in having]
        return found


def _ratio(terms: Terms, size: Any) -> tuple[int, list[Any]] | None:
    """The term that a sum has to be multiplied by to give another sum, if there is one."""
    whole = sum_of(terms)
    first, least = terms_of(size)[0]
    for number, factors in terms:
        rest: list[Any] | None = list(factors)
        for factor in least:
            rest = without(rest, factor) if rest is not None and any(f.eq(factor) for f in rest) else None
        if (
            rest is not None
            and number % first == 0
            and is_same(number // first * product(rest) * size, whole)
        ):
            return number // first, rest
    return None
