"""Detection of benign races: threads that load a redundant copy of an element that another thread stores.

If a tile has fewer elements than a block has threads, Triton assigns an element to several threads. All of them load
it, and one of them stores the result. If the result goes to where the element was loaded from, another thread may load
its copy before or after the store. The two threads race, but nobody can tell, because no thread stores a result of the
copy. Such a race is not a finding. It is a finding if the copy is used for anything else: for an address or a branch,
through shared memory, or by a store of the thread itself, or of a lane of its warp that receives the value (a warp can
have copies of all that it sums up).
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
    """Destinations of a value."""

    stores: frozenset[int]
    other_lanes: bool  # other lanes of the warp receive it


class Copies:
    """Analysis of the use of the values that a kernel loads."""

    def __init__(self, statements: Sequence[Statement]) -> None:
        self.statements = statements
        self._readers: dict[str, list[int]] | None = None
        self._stored: dict[int, Reached | None] = {}

    def is_unused(self, load: int, store: int, reader: int, storing: np.ndarray) -> bool:
        """Return whether the value that a thread loaded is an unused copy of an element that another thread stores.

        `storing` has a bit for each thread that executed a store, by store and warp."""
        loading, stored = self.statements[load], self.statements[store]
        if not (_LOAD.match(loading.opcode) and _STORE.match(stored.opcode)):
            return False
        if (
            loading.operands[1] != stored.operands[0]
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
        """Return the stores that a loaded value reaches through arithmetic; None if it is used in any other way."""
        stores: set[int] = set()
        other_lanes = False
        worklist = list(_registers(self.statements[load].operands[0]))
        seen = set(worklist)
        while worklist:
            register = worklist.pop()
            for number in self._uses(register):
                statement = self.statements[number]
                if _STORE.match(statement.opcode):
                    if statement.guard == register or register in _registers(statement.operands[0]):
                        return None
                    stores.add(number)
                    continue
                operation = opcodes.decode(statement)
                exchanged = operation.handler.startswith(("shfl.", "redux."))
                plain = operation.arithmetic or operation.handler.startswith(("pack.", "unpack.", "pred."))
                if not (plain or exchanged) or statement.guard == register:
                    return None
                other_lanes |= exchanged
                results = _registers(statement.operands[0]) - seen
                seen |= results
                worklist += results
        return Reached(frozenset(stores), other_lanes)

    def _uses(self, register: str) -> list[int]:
        """Return the statements that read a register, or are guarded by it."""
        if self._readers is None:
            self._readers = {}
            for number, statement in enumerate(self.statements):
                read = statement.operands[1:] if _writes_first(statement) else statement.operands
                for name in {statement.guard, *(name for text in read for name in _registers(text))}:
                    self._readers.setdefault(name, []).append(number)
        return self._readers.get(register, [])


def _writes_first(statement: Statement) -> bool:
    """Return whether the first operand is a result: not so for stores, barriers and branches."""
    return not statement.opcode.startswith(
        ("st.", "red.", "cp.", "bar", "mbarrier", "bra", "brx", "stmatrix", "fence")
    )


def _registers(operand: str) -> set[str]:
    """Return the names in an operand.

    >>> sorted(_registers("{ %r1, %r2 }"))
    ['%r1', '%r2']
    """
    return {name.strip() for part in re.split(r"[{}\[\],|+]", operand) for name in _REGISTER.findall(part)}
