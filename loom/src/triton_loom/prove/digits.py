"""Two programs at one element are one program: their offsets have the same digits, so the same made the digits.

An offset is a sum such as (program // n * 64 + lane) * columns + column. If the sums of two programs are equal and
column < columns for both, then what is multiplied by `columns` is equal too, and so on down to the programs. Each step
is a question of its own, with nothing about products but what the step needs. Steps that fail are left out: what was
shown so far is all that the next ones may use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

from .contract import constants_of
from .lemmas import about_digits, monomials, ordered
from .linear import Linear
from .solver import Solution, z3
from .sums import Terms, factors_of, is_same, product, sum_of, terms_of, undivided, without

Twins = Sequence[tuple[Any, Any]]  # of the first program and of the second one


def same(
    facts: Sequence[Any], offsets: tuple[Any, Any], programs: Twins, twins: Twins, linear: Linear
) -> bool:
    """Whether it follows from the facts, if both offsets are equal, that the programs are."""
    steps = _Steps(facts, twins, linear)
    one, other = (undivided(offset, steps.shown) for offset in offsets)
    steps.peel(one, other)
    goal = z3.And(*(mine == theirs for mine, theirs in programs))
    if steps.shown(steps.now(goal)):
        return True
    # All digits are the same. What they were made of is then to be found, which is in vain where they are not.
    resolved = is_same(steps.now(one), steps.now(other))
    return resolved and steps.settle(steps.multiplied()) and steps.shown(steps.now(goal))


class _Steps:
    """What is known of two programs at one element. Where something is the same in both, the second one's name for it
    is replaced by the first one's."""

    def __init__(self, facts: Sequence[Any], twins: Twins, linear: Linear) -> None:
        self.facts, self.twins = list(facts), list(twins)
        self.found: list[tuple[Any, Any]] = []  # what is replaced, and by what
        self._local = {constant.get_id() for pair in twins for constant in pair}
        self._linear = linear

    def shown(self, goal: Any, lemmas: Sequence[Any] = ()) -> bool:
        """Whether a goal follows from what is known."""
        return self._asked(goal, lemmas).verdict == "proven"

    def _asked(self, goal: Any, lemmas: Sequence[Any] = ()) -> Solution:
        return self._linear.asked([*self.facts, *lemmas], goal)

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

    def now(self, e: Any) -> Any:
        """An expression with what is the same in both programs replaced."""
        return z3.substitute(e, *self.found) if self.found else e

    def multiplied(self) -> dict[int, Any]:
        """The constants in products, which are not known to be equal before what is equal in them is replaced."""
        return constants_of(
            [factor for fact in self.facts for factors in monomials(fact).values() for factor in factors]
        )

    def settle(self, among: Mapping[int, Any]) -> bool:
        """Replace those of some constants that are the same in both programs, until none is left; whether one was."""
        pairs = [pair for pair in self.twins if z3.is_int(pair[0]) and pair[1].get_id() in among]
        same = self._equal(pairs)
        if not same:
            return False
        self.twins = [pair for pair in self.twins if not any(pair[1].eq(theirs) for _, theirs in same)]
        renamed = [(theirs, mine) for mine, theirs in same]
        self.found += renamed
        self.facts = [z3.substitute(fact, *renamed) for fact in self.facts]
        self.settle(among)  # products that were different are the same now
        return True

    def _equal(self, pairs: Twins) -> Twins:
        """The pairs whose constants are shown to be equal. An example in which some are not takes these away together:
        there are fewer questions than pairs."""
        open_ = list(pairs)
        if (
            not open_
            or self._asked(z3.Or(*(one == other for one, other in open_))).verdict == "counterexample"
        ):
            return []
        while open_:
            solution = self._asked(z3.And(*(one == other for one, other in open_)))
            if solution.verdict == "proven":
                return open_
            if solution.verdict == "unknown":
                return [(one, other) for one, other in open_ if self.shown(one == other)]
            open_ = [(one, other) for one, other in open_ if solution.value(one) == solution.value(other)]
        return []

    def _learn(self, one: Any, other: Any) -> tuple[Any, Any]:
        """Add that two expressions are equal, and replace what is the same in both by that."""
        one, other = self.now(one), self.now(other)
        self.facts += [one == other, *about_digits([one, other])]
        self.settle(constants_of([one, other]))
        return z3.simplify(one, som=True), z3.simplify(self.now(other), som=True)

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
        """What products in a sum are multiples of and both programs have, that of most products first: factors, their
        products, and sums such as cols + cols % 2."""
        found: dict[str, Any] = {}
        for _, terms in self._coefficients(e):
            if len(terms) > 1:
                common = gcd(*(number for number, _ in terms))
                size = sum_of((number // common, factors) for number, factors in terms)
                found[str(size)] = size
            for _, factors in terms:
                sizes = [*factors, product(factors)] if factors else []
                found |= {str(size): size for size in sizes}
        counted = [
            (-len(self._multiple(size, e)), -len(factors_of(size)), text) for text, size in found.items()
        ]
        return [found[text] for _, _, text in sorted(counted)]

    def _multiple(self, size: Any, e: Any) -> Terms:
        """What a size is multiplied by in a sum of products."""
        found = []
        for own, terms in self._coefficients(e):
            if z3.is_add(size):
                ratio = _ratio(terms, size)
                found += [] if ratio is None else [(ratio[0], [*own, *ratio[1]])]
            else:
                having = [(n, without(factors, factors_of(size))) for n, factors in terms]
                found += [(n, [*own, *rest]) for n, rest in having if rest is not None]
        return found


def _ratio(terms: Terms, size: Any) -> tuple[int, list[Any]] | None:
    """The term that a sum has to be multiplied by to give another sum, if there is one."""
    whole = sum_of(terms)
    first, least = terms_of(size)[0]
    for number, factors in terms:
        rest = without(factors, least)
        if (
            rest is not None
            and number % first == 0
            and is_same(number // first * product(rest) * size, whole)
        ):
            return number // first, rest
    return None
