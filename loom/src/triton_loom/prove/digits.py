"""Two programs at one element are one program: their offsets have the same digits, so the same made the digits.

An offset is a sum such as (program // n * 64 + lane) * columns + column. If the sums of two programs are equal and
column < columns for both, then what is multiplied by `columns` is equal too, and so on down to the programs. Each step
is a question of its own, with nothing about products but what the step needs. Steps that fail are left out: what was
shown so far is all that the next ones may use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd
from typing import Any

from .contract import constants_of
from .lemmas import factors_of, ordered, product, without
from .linear import follows
from .solver import z3

_MOST_NAMES = 4  # of strides that are sums
Twins = Sequence[tuple[Any, Any]]  # of the first program and of the second one


def same(facts: Sequence[Any], offsets: tuple[Any, Any], programs: Twins, twins: Twins) -> bool:
    """Whether it follows from the facts, if both offsets are equal, that the programs are."""
    steps = _Steps(facts, twins)
    steps.peel(*steps.named(*offsets))
    return steps.shown(z3.And(*(one == z3.substitute(other, *steps.found) for one, other in programs)))


class _Steps:
    """What is known of two programs at one element. Where something is the same in both, the second one's name for it
    is replaced by the first one's."""

    def __init__(self, facts: Sequence[Any], twins: Twins) -> None:
        self.facts, self.twins = list(facts), list(twins)
        self.found: list[tuple[Any, Any]] = []  # what is replaced, and by what
        self._names = 0

    def shown(self, goal: Any, lemmas: Sequence[Any] = ()) -> bool:
        """Whether a goal follows from what is known."""
        return follows([*self.facts, *lemmas], goal)

    def peel(self, one: Any, other: Any) -> None:
        """All that follows from the equality of two expressions, factor after factor of their products."""
        one, other = self._learn(one, other)
        for size in self._sizes(one):
            parts = [_multiplied_by(size, e) for e in (one, other)]
            if None in parts or _is_same(*parts):
                continue
            common = gcd(*(number for part in parts for number, _ in _terms(part)))
            high, high_2 = (_sum((number // common, f) for number, f in _terms(part)) for part in parts)
            whole = common * size
            if self.shown(high == high_2, [*ordered(high, high_2, whole), *ordered(high_2, high, whole)]):
                self.peel(high, high_2)
                self.peel(*(z3.simplify(e - h * whole, som=True) for e, h in ((one, high), (other, high_2))))
                return

    def named(self, one: Any, other: Any) -> tuple[Any, Any]:
        """The same with names for what is multiplied in both: a stride may be a sum, such as cols + cols % 2, of which
        products would have a term for each part of it."""
        one, other = (z3.simplify(e, som=True) for e in (one, other))
        for factor in self._sizes(one):
            if not z3.is_const(factor):
                one, other = self._with_name(factor, factor, factor, one, other)
        for _ in range(_MOST_NAMES):
            strides = [stride for stride in self._strides(one) if len(_terms(stride)) > 1]
            plain = [
                (s, f[0])
                for s in strides
                for n, f in _terms(s)
                if n == 1 and len(f) == 1 and z3.is_const(f[0])
            ]
            if not plain:
                break
            stride, part = plain[0]
            one, other = self._with_name(stride, part, stride - part, one, other)
        return one, other

    def _with_name(self, stride: Any, part: Any, rest: Any, *expressions: Any) -> tuple[Any, ...]:
        """Expressions with a name for the stride: the part of it is the name without the rest."""
        self._names += 1
        name = z3.Int(f"stride!{self._names}")
        self.facts.append(name == stride)
        to = name if part.eq(stride) else name - rest
        return tuple(z3.simplify(z3.substitute(e, (part, to)), som=True) for e in expressions)

    def _strides(self, e: Any) -> list[Any]:
        """What a sum has beside each product of what belongs to one program, without a number that all of it has."""
        local = {constant.get_id() for pair in self.twins for constant in pair}
        found: dict[str, list[tuple[int, list[Any]]]] = {}
        for number, factors in _terms(e):
            own = [f for f in factors if not local.isdisjoint(constants_of([f]))]
            if own:
                shared = [f for f in factors if local.isdisjoint(constants_of([f]))]
                found.setdefault(str(sorted(map(str, own))), []).append((number, shared))
        strides = []
        for terms in found.values():
            common = gcd(*(number for number, _ in terms))
            strides.append(_sum((number // common, factors) for number, factors in terms))
        return sorted(strides, key=str)

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
        for _, factors in _terms(e):
            for factor in factors if len(factors) > 1 else ():
                if local.isdisjoint(constants_of([factor])):
                    count, _ = found.get(factor.get_id(), (0, factor))
                    found[factor.get_id()] = count + 1, factor
        return [factor for count, factor in sorted(found.values(), key=lambda item: (-item[0], str(item[1])))]


def _is_same(one: Any, other: Any) -> bool:
    return z3.is_true(z3.simplify(one == other, som=True))


def _terms(e: Any) -> list[tuple[int, list[Any]]]:
    """(number, factors) of each term of a sum of products."""
    found = []
    for term in e.children() if z3.is_add(e) else [e]:
        number = 1
        for part in term.children() if z3.is_mul(term) else [term]:
            number *= part.as_long() if z3.is_int_value(part) else 1
        found.append((number, factors_of(term)))
    return found


def _sum(terms: Iterable[tuple[int, list[Any]]]) -> Any:
    return z3.simplify(z3.Sum([number * product(factors) for number, factors in terms]), som=True)


def _multiplied_by(size: Any, e: Any) -> Any:
    """What a factor is multiplied by in a sum of products; None if it is there twice, or not at all."""
    parts = []
    for number, factors in _terms(e):
        times = sum(factor.eq(size) for factor in factors)
        if times > 1:
            return None
        if times:
            parts.append((number, without(factors, size)))
    return _sum(parts) if parts else None
