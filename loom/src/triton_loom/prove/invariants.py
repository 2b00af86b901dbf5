"""What stays true of an integer that a loop carries, however often the loop runs: guessed here, and kept if proven.

A guess is proven by induction. It holds of what the loop begins with, and if it holds of any value before any
iteration, it holds of what that iteration leaves. Guesses that are proven together may use each other: all of them are
assumed before an iteration, those that do not follow after it are dropped, and this is repeated until none is dropped.

The arithmetic of the loop's body is that of mathematics, as everywhere; who uses an invariant has to prove that it fits
its types (see `evaluate`). That is no circle: an iteration is proven to fit from what holds before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from .contract import Bool, Int
from .solver import z3
from .values import Loop


@dataclass(frozen=True)
class Moment:
    """A value that a loop carries, before one of its iterations or after the last."""

    value: Int
    start: Int  # before the first iteration
    loop: Loop
    count: Int  # iterations until now
    counter: Int  # lower + count * step
    others: Sequence[Int]  # what the loop's other values are before the first iteration

    @property
    def first(self) -> Moment:
        """Before the first iteration."""
        return replace(self, value=self.start, count=z3.IntVal(0), counter=self.loop.lower)

    def then(self, value: Int) -> Moment:
        """One iteration later."""
        return replace(self, value=value, count=self.count + 1, counter=self.counter + self.loop.step)


Invariant = Callable[[Moment], Bool]


def _at_least_its_start(m: Moment) -> Bool:
    return m.value >= m.start


def _at_most_its_start(m: Moment) -> Bool:
    return m.value <= m.start


def _one_for_each_iteration(m: Moment) -> Bool:
    """At most: the value counts iterations in which something was found."""
    return m.value - m.start <= m.count


def _one_for_each_number(m: Moment) -> Bool:
    """At most, of those that the counter has passed: the value counts what was found among them."""
    return m.value - m.start <= m.counter - m.loop.lower


def _one_for_each_number_below(m: Moment) -> Bool:
    """The same of numbers below the loop's upper end, which the last step may go past."""
    upper = m.loop.upper
    return m.value - m.start <= z3.If(m.counter <= upper, m.counter, upper) - m.loop.lower


def _at_least(place: int) -> Invariant:
    return lambda m: m.value >= m.others[place]


def _at_most(place: int) -> Invariant:
    return lambda m: m.value <= m.others[place]


def guesses(others: int) -> Iterator[Invariant]:
    """All that is tried, for a value beside so many others."""
    yield from (_at_least_its_start, _at_most_its_start)
    yield from (_one_for_each_iteration, _one_for_each_number, _one_for_each_number_below)
    for place in range(others):
        yield _at_least(place)
        yield _at_most(place)


def inductive(
    before: Moment, left: Int, begins: Callable[[Bool], bool], follows: Callable[[Sequence[Bool], Bool], bool]
) -> list[Invariant]:
    """The guesses that are invariants. `left` is what an iteration makes of the value `before` it. `begins` proves what
    holds before the first iteration, given that there is one; `follows` proves what holds in any iteration, from
    more that holds in it. In both, the value of `before` is any number that the value's type can hold."""
    after = before.then(left)
    kept = [guess for guess in guesses(len(before.others)) if begins(guess(before.first))]
    while True:
        assumed = [guess(before) for guess in kept]
        proven = [guess for guess in kept if follows(assumed, guess(after))]
        if len(proven) == len(kept):
            return kept
        kept = proven
