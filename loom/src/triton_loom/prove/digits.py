"""Proof that two programs at one element are one program: their offsets have equal digits, hence equal programs.

An offset is a sum such as (program // n * 64 + lane) * columns + column. If the sums of two programs are equal and
column < columns in both, then the factors of `columns` are equal too, and so on down to the programs. Each step is
a separate question with only the lemmas about products that it needs. Steps that fail are skipped: later steps may
only use what was shown so far.
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

Twins = Sequence[tuple[Any, Any]]  # (constant of the first program, of the second)


def same(
    facts: Sequence[Any], offsets: tuple[Any, Any], programs: Twins, twins: Twins, linear: Linear
) -> bool:
    """Return whether the facts and the equality of both offsets imply that the programs are equal."""
    steps = _Steps(facts, twins, linear)
    one, other = (undivided(offset, steps.shown) for offset in offsets)
    steps.peel(one, other)
    goal = z3.And(*(mine == theirs for mine, theirs in programs))
    if steps.shown(steps.rewritten(goal)):
        return True
    # All digits are equal. Only then is it worthwhile to resolve the constants they consist of.
    resolved = is_same(steps.rewritten(one), steps.rewritten(other))
    return resolved and steps.settle(steps.multiplied()) and steps.shown(steps.rewritten(goal))


class _Steps:
    """Facts about two programs at one element. Constants proven equal are replaced by the first program's."""

    def __init__(self, facts: Sequence[Any], twins: Twins, linear: Linear) -> None:
        self.facts, self.twins = list(facts), list(twins)
        self.replacements: list[tuple[Any, Any]] = []  # (old, new)
        self._local = {constant.get_id() for pair in twins for constant in pair}
        self._linear = linear

    def shown(self, goal: Any, lemmas: Sequence[Any] = ()) -> bool:
        """Return whether a goal follows from the facts."""
        return self._asked(goal, lemmas).verdict == "proven"

    def _asked(self, goal: Any, lemmas: Sequence[Any] = ()) -> Solution:
        return self._linear.asked([*self.facts, *lemmas], goal)

    def peel(self, one: Any, other: Any) -> None:
        """Learn that two expressions are equal and derive equalities of their parts, one common multiple at a time."""
        one, other = self._learn(one, other)
        for size in self._sizes(one):
            parts = [self._multiple(size, e) for e in (one, other)]
            if not all(parts) or is_same(*map(sum_of, parts)):
                continue
            common = gcd(*(number for part in parts for number, _ in part))
            high, high_2 = (sum_of((number // common, factors) for number, factors in part) for part in parts)
            step = common * size
            if self.shown(high == high_2, [*ordered(high, high_2, step), *ordered(high_2, high, step)]):
                self.peel(high, high_2)
                self.peel(one - high * step, other - high_2 * step)
                return

    def rewritten(self, e: Any) -> Any:
        """Return an expression with all replacements applied."""
        return z3.substitute(e, *self.replacements) if self.replacements else e

    def multiplied(self) -> dict[int, Any]:
        """Return the constants in products, which cannot be compared before equal factors are replaced."""
        return constants_of(
            [factor for fact in self.facts for factors in monomials(fact).values() for factor in factors]
        )

    def settle(self, among: Mapping[int, Any]) -> bool:
        """Replace constants that are equal in both programs until none is left; return whether there were any."""
        pairs = [pair for pair in self.twins if z3.is_int(pair[0]) and pair[1].get_id() in among]
        equal = self._equal(pairs)
        if not equal:
            return False
        self.twins = [pair for pair in self.twins if not any(pair[1].eq(theirs) for _, theirs in equal)]
        replacements = [(theirs, mine) for mine, theirs in equal]
        self.replacements += replacements
        self.facts = [z3.substitute(fact, *replacements) for fact in self.facts]
        self.settle(among)  # products that differed may be equal now
        return True

    def _equal(self, pairs: Twins) -> Twins:
        """Return the pairs that are proven equal.

        A counterexample eliminates all pairs that differ in it, so there are fewer questions than pairs.
        """
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
        """Assume that two expressions are equal, and replace the constants that this makes equal."""
        one, other = self.rewritten(one), self.rewritten(other)
        self.facts += [one == other, *about_digits([one, other])]
        self.settle(constants_of([one, other]))
        return z3.simplify(one, som=True), z3.simplify(self.rewritten(other), som=True)

    def _is_shared(self, e: Any) -> bool:
        return self._local.isdisjoint(constants_of([e]))

    def _coefficients(self, e: Any) -> list[tuple[list[Any], Terms]]:
        """Group a sum by the factors that belong to one program; return each group with its shared coefficients."""
        groups: dict[tuple[int, ...], tuple[list[Any], Terms]] = {}
        for number, factors in terms_of(e):
            own = [f for f in factors if not self._is_shared(f)]
            key = tuple(sorted(f.get_id() for f in own))
            groups.setdefault(key, (own, []))[1].append((number, [f for f in factors if self._is_shared(f)]))
        return [item for item in groups.values() if item[0]]

    def _sizes(self, e: Any) -> list[Any]:
        """Return the shared coefficients in a sum, most frequent first.

        They are factors, their products, and sums such as cols + cols % 2.
        """
        candidates: dict[str, Any] = {}
        for _, terms in self._coefficients(e):
            if len(terms) > 1:
                common = gcd(*(number for number, _ in terms))
                size = sum_of((number // common, factors) for number, factors in terms)
                candidates[str(size)] = size
            for _, factors in terms:
                sizes = [*factors, product(factors)] if factors else []
                candidates |= {str(size): size for size in sizes}
        ranked = [
            (-len(self._multiple(size, e)), -len(factors_of(size)), text) for text, size in candidates.items()
        ]
        return [candidates[text] for _, _, text in sorted(ranked)]

    def _multiple(self, size: Any, e: Any) -> Terms:
        """Return the terms that a size is multiplied by in a sum of products."""
        result = []
        for own, terms in self._coefficients(e):
            if z3.is_add(size):
                ratio = _ratio(terms, size)
                result += [] if ratio is None else [(ratio[0], [*own, *ratio[1]])]
            else:
                quotients = [(n, without(factors, factors_of(size))) for n, factors in terms]
                result += [(n, [*own, *rest]) for n, rest in quotients if rest is not None]
        return result


def _ratio(terms: Terms, size: Any) -> tuple[int, list[Any]] | None:
    """Return the term by which a sum has to be multiplied to give another sum, if there is one."""
    target = sum_of(terms)
    first, smallest = terms_of(size)[0]
    for number, factors in terms:
        rest = without(factors, smallest)
        if (
            rest is not None
            and number % first == 0
            and is_same(number // first * product(rest) * size, target)
        ):
            return number // first, rest
    return None
