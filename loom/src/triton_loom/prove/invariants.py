"""Invariants of loop-carried integers: guessed here, and kept if proven.

A guess is proven by induction. It holds of the initial value, and if it holds of any value before any iteration, it
holds of that iteration's update. Guesses may use each other: all remaining guesses are assumed before an iteration,
those that do not follow after it are dropped, and this repeats until none is dropped.

The arithmetic of the loop's body is mathematical, as everywhere; users of an invariant must prove that the value
fits its type (see `evaluate`). This is not circular: an iteration is proven to fit from what holds before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from .contract import Bool, Int
from .solver import z3
from .values import Loop


@dataclass(frozen=True)
class Moment:
    """State of a loop-carried value before an iteration or after the last."""

    value: Int
    start: Int  # before the first iteration
    loop: Loop
    count: Int  # iterations so far
    counter: Int  # lower + count * step
    others: Sequence[Int]  # initial values of the loop's other values

    @property
    def first(self) -> Moment:
        """Return the state before the first iteration."""
        return replace(self, value=self.start, count=z3.IntVal(0), counter=self.loop.lower)

    def then(self, value: Int) -> Moment:
        """Return the state one iteration later."""
        return replace(self, value=value, count=self.count + 1, counter=self.counter + self.loop.step)


Invariant = Callable[[Moment], Bool]


def _at_least_its_start(m: Moment) -> Bool:
    return m.value >= m.start


def _at_most_its_start(m: Moment) -> Bool:
    return m.value <= m.start


def _one_for_each_iteration(m: Moment) -> Bool:
    """Bound the growth by one per iteration: the value counts iterations in which something was found."""
    return m.value - m.start <= m.count


def _one_for_each_number(m: Moment) -> Bool:
    """Bound the growth by one per step of the counter: the value counts matches among the numbers it has passed."""
    return m.value - m.start <= m.counter - m.loop.lower


def _one_for_each_number_below(m: Moment) -> Bool:
    """Like `_one_for_each_number` for numbers below the loop's upper bound, which the last step may exceed."""
    upper = m.loop.upper
    return m.value - m.start <= z3.If(m.counter <= upper, m.counter, upper) - m.loop.lower


def _at_least(position: int) -> Invariant:
    return lambda m: m.value >= m.others[position]


def _at_most(position: int) -> Invariant:
    return lambda m: m.value <= m.others[position]


def guesses(others: int) -> Iterator[Invariant]:
    """Yield all candidate invariants of a value beside `others` other values."""
    yield from (_at_least_its_start, _at_most_its_start)
    yield from (_one_for_each_iteration, _one_for_each_number, _one_for_each_number_below)
    for position in range(others):
        yield _at_least(position)
        yield _at_most(position)


def inductive(
    before: Moment, left: Int, begins: Callable[[Bool], bool], follows: Callable[[Sequence[Bool], Bool], bool]
) -> list[Invariant]:
    """Return the guesses that are invariants.

    `left` is an iteration's update of the value `before` it. `begins` proves a goal before the first iteration, given
    that there is one; `follows` proves a goal in any iteration, from more facts that hold in it. In both, the value of
    `before` is any number of the value's type.
    """
    after = before.then(left)
    invariants = [guess for guess in guesses(len(before.others)) if begins(guess(before.first))]
    while True:
        assumed = [guess(before) for guess in invariants]
        proven = [guess for guess in invariants if follows(assumed, guess(after))]
        if len(proven) == len(invariants):
            return invariants
        invariants = proven
