"""What an instruction is to the machine: a handler and its operands. The tables of opcodes are made of these."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .text import Statement, split


class UnknownInstruction(ValueError):
    """A kernel has an instruction, or a modifier of one, that the machine does not execute."""

    def __init__(self, statement: Statement, why: str = "the emulated GPU does not know it") -> None:
        super().__init__(f"`{statement}` (PTX line {statement.line}, {statement.place}): {why}")
        self.opcode = statement.opcode


class Use(NamedTuple):
    """An operand: a register, number or symbol, and the type that the instruction has it in."""

    text: str
    type: str
    offset: int = 0  # of a symbol or number


@dataclass(frozen=True)
class Operation:
    """What a statement does: a handler, and what it is called with."""

    handler: str  # by name
    uses: tuple[Use, ...] = ()
    immediate: int = 0
    arithmetic: bool = (
        False  # the handler is a name of codegen/ptx.py; which one depends on the registers as well
    )
    targets: tuple[str, ...] = ()  # labels
    ends: bool = False  # no instruction follows this one unless a guard holds it back
    serial: bool = False  # its result depends on the order of blocks


@dataclass(frozen=True)
class Row:
    """Instructions that one function understands."""

    pattern: str
    operation: Callable[[Statement], Operation]

    @cached_property
    def names(self) -> re.Pattern[str]:
        return re.compile(self.pattern.replace(".", r"\.").replace("{", "(?:").replace("}", ")?"))


# ---- operands --------------------------------------------------------------------------------------------


def words(statement: Statement) -> list[str]:
    """The opcode and its modifiers."""
    return statement.opcode.split(".")


def elements(text: str) -> list[str]:
    """`{a, b}` or a single operand."""
    inner = text.strip()
    return list(split(inner[1:-1])) if inner.startswith("{") else [inner]


def pair(text: str) -> tuple[str, str]:
    """`d|p`, of which either may be left out."""
    first, _, second = text.partition("|")
    return first.strip(), second.strip() or "_"


def address(text: str) -> tuple[str, int]:
    """`[base+offset]`: a register or symbol, and a number of bytes."""
    found = re.fullmatch(r"\[\s*([%$\w.@]+)\s*(?:\+\s*(-?\w+))?\s*\]", text)
    if found is None:
        raise ValueError(text)
    if re.fullmatch(r"-?\d\w*", found[1]):
        return "0", int(found[1], 0) + (int(found[2], 0) if found[2] else 0)
    return found[1], int(found[2], 0) if found[2] else 0
