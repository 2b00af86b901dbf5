"""Data-flow analysis of the registers of wgmma: which may be in use, and where a wgmma.fence may be missing.

A wgmma uses its registers (the accumulators, and A if that is in registers) until its group has been waited for;
nothing else may touch them. A wgmma.fence must stand between the wgmma and any earlier access to them. The analysis
finds the instructions that might violate this; the machine checks those, and no others, when they are executed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .operations import Operation

_GROUPS = 8  # distinguished groups; older ones count as one


class Doubtful(NamedTuple):
    """Numbers of the instructions that the machine must check."""

    touching: frozenset[int]  # may touch registers of a product in flight
    unfenced: frozenset[
        int
    ]  # products that some path without a wgmma.fence reaches from a use of their registers


@dataclass
class _State:
    """State that may hold at a point of the program, over all paths to it. Registers are bits."""

    touched: int = 0  # since the last wgmma.fence
    open: list[int] = field(
        default_factory=lambda: [0] * (_GROUPS + 1)
    )  # by number of groups committed since

    def copy(self) -> _State:
        return _State(self.touched, list(self.open))

    def absorb(self, other: _State) -> bool:
        """Merge another state into this one; return whether that changed it."""
        before = (self.touched, *self.open)
        self.touched |= other.touched
        self.open = [own | others for own, others in zip(self.open, other.open, strict=True)]
        return before != (self.touched, *self.open)


def is_product(operation: Operation) -> bool:
    """Return whether an operation is a wgmma.mma_async."""
    return operation.handler.startswith("wgmma.") and bool(operation.uses)


def doubtful(operations: Sequence[Operation], ways: Sequence[Sequence[int]]) -> Doubtful:
    """Return the instructions that must be checked; `ways` are the possible successors of each."""
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
    worklist = [0]
    while worklist:
        number = worklist.pop()
        state = states[number].copy()
        while True:  # to the end of the straight-line code
            _step(operations[number], used[number], number, state, touching, unfenced)
            after = [to for to in ways[number] if to < len(operations)]
            if len(after) != 1 or after[0] in entered_by_jumps:
                break
            number = after[0]
        for to in after:
            if to not in states:
                states[to] = state.copy()
                worklist.append(to)
            elif states[to].absorb(state):
                worklist.append(to)
    return Doubtful(frozenset(touching), frozenset(unfenced))


def _step(
    operation: Operation, used: int, number: int, state: _State, touching: set[int], unfenced: set[int]
) -> None:
    if operation.handler == "wgmma.fence":
        state.touched = 0
    elif operation.handler == "wgmma.commit_group":
        state.open = [0, *state.open[: _GROUPS - 1], state.open[_GROUPS - 1] | state.open[_GROUPS]]
    elif operation.handler == "wgmma.wait_group":
        first_waited = operation.immediate + 1
        state.open[first_waited:] = [0] * max(len(state.open) - first_waited, 0)
    elif is_product(operation):
        if used & state.touched:
            unfenced.add(number)
        state.open[0] |= used
    elif used:
        if any(used & group for group in state.open):
            touching.add(number)
        state.touched |= used
