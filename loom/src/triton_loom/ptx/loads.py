"""Results of a tcgen05.ld that may be used before its wait: by the ways through a program.

A load fills its registers until a tcgen05.wait::ld. LLVM moves them to pairs before that, which is no use yet: the pair
is as unready as its parts. Which instructions might use one is seen from the text; the machine looks at those, and at
no others, when they are executed.
"""

from __future__ import annotations

from collections.abc import Sequence

from .operations import Operation


def is_load(operation: Operation) -> bool:
    """Whether it is a tcgen05.ld."""
    return operation.handler.startswith("tcgen05.ld.")


def _is_move(operation: Operation) -> bool:
    return operation.handler.startswith(("mov.", "pack.", "unpack."))


def _results(operation: Operation) -> tuple[str, ...]:
    """What a load or a move writes."""
    parts = is_load(operation) or operation.handler.startswith("unpack.")
    return tuple(use.text for use in (operation.uses[:-1] if parts else operation.uses[:1]))


def doubtful(operations: Sequence[Operation], ways: Sequence[Sequence[int]]) -> frozenset[int]:
    """Numbers of the instructions that have to be looked at; `ways` are the numbers that may follow each."""
    if not any(map(is_load, operations)):
        return frozenset()
    open_at: dict[int, frozenset[str]] = {0: frozenset()}  # registers that may not be ready there
    touching: set[int] = set()
    to_do = [0]
    while to_do:
        number = to_do.pop()
        unready = set(open_at[number])
        while True:  # to the end of what is executed in a row
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
                to_do.append(to)
    return frozenset(touching)
