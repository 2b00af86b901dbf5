"""Threads that hold a copy of an element that another thread stores.

Where a tile has fewer elements than a block has threads, Triton gives an element to several threads. All of them load
it, and one of them stores the result. If that is stored where it was loaded from, a copy may be loaded before or after:
two threads race, and nobody can tell, because what a copy becomes is stored by nobody. Such a race is no finding. It is
one where a copy is used for anything else: for an address or a branch, through shared memory, or by a store that the
thread makes itself, or a lane of its warp that it is handed to (a warp can have copies of all that it sums up).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from . import opcodes
from .program import ALL_LANES
from .text import Statement

_LOAD = re.compile(r"ld(\.weak)?\.global\b")
_STORE = re.compile(r"st(\.weak)?\.global\b")
_REGISTER = re.compile(r"[%A-Za-z_][\w$@%. ]*")


class Reached(NamedTuple):
    """Where a value goes."""

    stores: frozenset[int]
    other_lanes: bool  # of the warp


class Copies:
    """What becomes of the values that a kernel loads."""

    def __init__(self, statements: Sequence[Statement]) -> None:
        self.statements = statements
        self._readers: dict[str, list[int]] | None = None
        self._stored: dict[int, Reached | None] = {}

    def is_unused(self, load: int, store: int, reader: int, storing: np.ndarray) -> bool:
        """Whether the value that a thread has loaded is a copy that nobody uses, although the element that it is of is
        stored by another thread. `storing` has the threads that executed each store, in a bit each."""
        one, other = self.statements[load], self.statements[store]
        if not (_LOAD.match(one.opcode) and _STORE.match(other.opcode)):
            return False
        if (
            one.operands[1] != other.operands[0]
        ):  # else the thread that stores the element has loaded it itself
            return False
        if load not in self._stored:
            self._stored[load] = self._stores_of(load)
        reached = self._stored[load]
        if reached is None:
            return False
        own = ALL_LANES if reached.other_lanes else 1 << reader % 32
        users = [storing[number] for number in reached.stores | {store}]
        return not any(threads[reader // 32] & own or (threads & ~storing[store]).any() for threads in users)

    def _stores_of(self, load: int) -> Reached | None:
        """The stores that a loaded value goes into, after any arithmetic; None if it goes anywhere else."""
        found: set[int] = set()
        other_lanes = False
        new = list(_registers(self.statements[load].operands[0]))
        known = set(new)
        while new:
            register = new.pop()
            for number in self._uses(register):
                statement = self.statements[number]
                if _STORE.match(statement.opcode):
                    if statement.guard == register or register in _registers(statement.operands[0]):
                        return None
                    found.add(number)
                    continue
                operation = opcodes.decode(statement)
                handed = operation.handler.startswith(("shfl.", "redux."))
                plain = operation.arithmetic or operation.handler.startswith(("pack.", "unpack.", "pred."))
                if not (plain or handed) or statement.guard == register:
                    return None
                other_lanes |= handed
                results = _registers(statement.operands[0]) - known
                known |= results
                new += results
        return Reached(frozenset(found), other_lanes)

    def _uses(self, register: str) -> list[int]:
        """The statements that read a register, or are guarded by it."""
        if self._readers is None:
            self._readers = {}
            for number, statement in enumerate(self.statements):
                read = statement.operands[1:] if _writes_first(statement) else statement.operands
                for name in {statement.guard, *(name for text in read for name in _registers(text))}:
                    self._readers.setdefault(name, []).append(number)
        return self._readers.get(register, [])


def _writes_first(statement: Statement) -> bool:
    """Whether the first operand is what a statement writes: of stores, barriers and branches it is not."""
    return not statement.opcode.startswith(
        ("st.", "red.", "cp.", "bar", "mbarrier", "bra", "brx", "stmatrix", "fence")
    )


def _registers(operand: str) -> set[str]:
    """The names in an operand.

    >>> sorted(_registers("{ %r1, %r2 }"))
    ['%r1', '%r2']
    """
    return {name.strip() for part in re.split(r"[{}\[\],|+]", operand) for name in _REGISTER.findall(part)}
