"""Registers that a wgmma may still be working on, and where a wgmma.fence is missing: by the ways through a program.

A wgmma uses its registers (the accumulators, and A if that lies in registers) until its group has been waited for;
nothing else may touch them. Before it, a wgmma.fence must stand between it and whatever touched them. Which
instructions might do it wrong is seen from the text; the machine looks at those, and at no others, when they are
executed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .operations import Operation

_GROUPS = 8  # that are told apart; those before them count as one


class Doubtful(NamedTuple):
    """Numbers of instructions."""

    touching: frozenset[int]  # may touch registers of a product that is under way
    unfenced: frozenset[
        int
    ]  # products to which a way without a wgmma.fence leads from a use of their registers


@dataclass
class _State:
    """What may hold at a place of the program, over all ways to it. Registers are bits."""

    touched: int = 0  # since the last wgmma.fence
    open: list[int] = field(default_factory=lambda: [0] * (_GROUPS + 1))  # by groups committed since

    def copy(self) -> _State:
        return _State(self.touched, list(self.open))

    def absorb(self, other: _State) -> bool:
        """Whatever may hold there may hold here; says whether that is new."""
        before = (self.touched, *self.open)
        self.touched |= other.touched
        self.open = [mine | its for mine, its in zip(self.open, other.open, strict=True)]
        return before != (self.touched, *self.open)


def is_product(operation: Operation) -> bool:
    """Whether it is a wgmma.mma_async."""
    return operation.handler.startswith("wgmma.") and bool(operation.uses)


def doubtful(operations: Sequence[Operation], ways: Sequence[Sequence[int]]) -> Doubtful:
    """The instructions that have to be looked at; `ways` are the numbers that may follow each."""
    products = [operation for operation in operations if is_product(operation)]
    bits: dict[str, int] = {}
    for product in products:
        for use in product.uses:
            if use.type == "b32":
                bits.setdefault(use.text, 1 << len(bits))
    if not products:
        return Doubtful(frozenset(), frozenset())
    used = [sum({bits[use.text] for use in o.uses if use.text in bits}) for o in operations]
    states: dict[int, _State] = {0: _State(touched=(1 << len(bits)) - 1)}
    touching: set[int] = set()
    unfenced: set[int] = set()
    entered_by_jumps = {to for number, after in enumerate(ways) for to in after if to != number + 1}
    to_do = [0]
    while to_do:
        number = to_do.pop()
        state = states[number].copy()
        while True:  # to the end of what is executed in a row
            _step(operations[number], used[number], number, state, touching, unfenced)
            after = [to for to in ways[number] if to < len(operations)]
            if len(after) != 1 or after[0] in entered_by_jumps:
                break
            number = after[0]
        for to in after:
            if to not in states:
                states[to] = state.copy()
                to_do.append(to)
            elif states[to].absorb(state):
                to_do.append(to)
    return Doubtful(frozenset(touching), frozenset(unfenced))


def _step(
    operation: Operation, used: int, number: int, state: _State, touching: set[int], unfenced: set[int]
) -> None:
    if operation.handler == "wgmma.fence":
        state.touched = 0
    elif operation.handler == "wgmma.commit_group":
        state.open = [0, *state.open[: _GROUPS - 1], state.open[_GROUPS - 1] | state.open[_GROUPS]]
    elif operation.handler == "wgmma.wait_group":
        kept = operation.immediate + 1
        state.open[kept:] = [0] * max(len(state.open) - kept, 0)
    elif is_product(operation):
        if used & state.touched:
            unfenced.add(number)
        state.open[0] |= used
    elif used:
        if any(used & group for group in state.open):
            touching.add(number)
        state.touched |= used
