"""Data-flow analysis of the results of tcgen05.ld: which may be used before the wait.

Until a tcgen05.wait::ld, a load may still be filling its registers. LLVM moves them to pairs before that, which does
not count as a use: the pair is as unready as its parts. The analysis finds the instructions that might use one; the
machine checks those, and no others, when they are executed.
"""

from __future__ import annotations

from collections.abc import Sequence

from .operations import Operation


def is_load(operation: Operation) -> bool:
    """Return whether an operation is a tcgen05.ld."""
    return operation.handler.startswith("tcgen05.ld.")


def _is_move(operation: Operation) -> bool:
    return operation.handler.startswith(("mov.", "pack.", "unpack."))


def _results(operation: Operation) -> tuple[str, ...]:
    """Return the registers that a load or a move writes."""
    parts = is_load(operation) or operation.handler.startswith("unpack.")
    return tuple(use.text for use in (operation.uses[:-1] if parts else operation.uses[:1]))


def doubtful(operations: Sequence[Operation], ways: Sequence[Sequence[int]]) -> frozenset[int]:
    """Return the numbers of the instructions that must be checked; `ways` are the possible successors of each."""
    if not any(map(is_load, operations)):
        return frozenset()
    open_at: dict[int, frozenset[str]] = {0: frozenset()}  # registers that may not be ready there
    touching: set[int] = set()
    worklist = [0]
    while worklist:
        number = worklist.pop()
        unready = set(open_at[number])
        while True:  # to the end of the straight-line code
            operation = operations[number]
            if operation.handler == "tcgen05.wait::ld":
                unready.clear()
            elif is_load(operation):
                unready.update(_results(operation))
            elif unready and any(use.text in unready for use in operation.uses):
                if _is_move(operation):
                    unready.update(_results(operation))
                else:
                    touching.add(number)
            after = [to for to in ways[number] if to < len(operations)]
            if after != [number + 1]:
                break
            number += 1
        for to in after:
            if to not in open_at or not unready <= open_at[to]:
                open_at[to] = open_at.get(to, frozenset()) | unready
                worklist.append(to)
    return frozenset(touching)
