"""Two programs at one element are one program: their offsets have the same digits, so the same made the digits.

An offset is a sum such as (program // n * 64 + lane) * columns + column. If the sums of two programs are equal and
column < columns for both, then what is multiplied by `columns` is equal too, and so on down to the programs. Each step
is a question of its own, with nothing about products but what the step needs. Steps that fail are left out: what was
shown so far is all that the next ones may use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .contract import constants_of
from .lemmas import factors_of, ordered
from .linear import follows
from .solver import z3

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

    def shown(self, goal: Any, lemmas: Sequence[Any] = ()) -> bool:
        """Whether a goal follows from what is known."""
        return follows([*self.facts, *lemmas], goal)

    def peel(self, one: Any, other: Any) -> None:
        """All that follows from the equality of two expressions, factor after factor of their products."""
        one, other = self._learn(one, other)
        for size in self._sizes(one):
            high, high_2 = (_multiplied_by(size, e) for e in (one, other))
            if high is None or high_2 is None or self._is_same(high, high_2):
                continue
            lemmas = [z3.simplify(lemma, som=True) for lemma in _in_order(high, high_2, size)]
            if self.shown(high == high_2, lemmas):
                self.peel(high, high_2)
                low, low_2 = (z3.simplify(e - h * size, som=True) for e, h in ((one, high), (other, high_2)))
                self.peel(low, low_2)
                return

    def _learn(self, one: Any, other: Any) -> tuple[Any, Any]:
        """Add that two expressions are equal, and replace what is the same in both by that."""
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

    def _sizes(self, e: Any) -> list[Any]:
        """What products in a sum are made of and both programs have, the factor of most products first."""
        local = {constant.get_id() for pair in self.twins for constant in pair}
        found: dict[int, tuple[int, Any]] = {}
        for term in e.children() if z3.is_add(e) else [e]:
            for factor in factors_of(term) if z3.is_mul(term) else ():
                if local.isdisjoint(constants_of([factor])):
                    count, _ = found.get(factor.get_id(), (0, factor))
                    found[factor.get_id()] = count + 1, factor
        return [factor for count, factor in sorted(found.values(), key=lambda item: (-item[0], str(item[1])))]

    def _is_same(self, one: Any, other: Any) -> bool:
        return z3.is_true(z3.simplify(one == other, som=True))


def _multiplied_by(size: Any, e: Any) -> Any:
    """What a factor is multiplied by in a sum of products; None if it is there twice."""
    parts = []
    for term in e.children() if z3.is_add(e) else [e]:
        own = [f for f in factors_of(term) if f.eq(size)] if z3.is_mul(term) or term.eq(size) else []
        if len(own) > 1:
            return None
        if own:
            parts.append(z3.substitute(term, (size, z3.IntVal(1))))
    return z3.simplify(z3.Sum(parts), som=True) if parts else None


def _in_order(high: Any, high_2: Any, size: Any) -> list[Any]:
    return [*ordered(high, high_2, size), *ordered(high_2, high, size)]
