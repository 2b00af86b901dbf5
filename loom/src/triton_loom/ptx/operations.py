"""Operations of the machine, a handler and its operands; the tables of opcodes consist of these."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .text import Statement, split


class UnknownInstruction(ValueError):
    """Error: a kernel has an instruction, or a modifier of one, that the machine does not execute."""

    def __init__(self, statement: Statement, why: str = "the emulated GPU does not support it") -> None:
        super().__init__(f"`{statement}` (PTX line {statement.line}, {statement.place}): {why}")
        self.opcode = statement.opcode


class Use(NamedTuple):
    """An operand: a register, number or symbol, and the type in which the instruction uses it."""

    text: str
    type: str
    offset: int = 0  # of a symbol or number


@dataclass(frozen=True)
class Operation:
    """The effect of a statement: a handler, and its arguments."""

    handler: str  # by name
    uses: tuple[Use, ...] = ()
    immediate: int = 0
    arithmetic: bool = (
        False  # the handler is a name of codegen/ptx.py; which one depends on the registers as well
    )
    targets: tuple[str, ...] = ()  # labels
    ends: bool = False  # execution does not fall through unless a guard disables it
    serial: bool = False  # its result depends on the order of blocks


@dataclass(frozen=True)
class Row:
    """Instructions that one function decodes."""

    pattern: str
    operation: Callable[[Statement], Operation]

    @cached_property
    def names(self) -> re.Pattern[str]:
        return re.compile(self.pattern.replace(".", r"\.").replace("{", "(?:").replace("}", ")?"))


# ---- operands --------------------------------------------------------------------------------------------


def words(statement: Statement) -> list[str]:
    """Return the opcode and its modifiers."""
    return statement.opcode.split(".")


def elements(text: str) -> list[str]:
    """Return the elements of `{a, b}`, or the single operand."""
    inner = text.strip()
    return list(split(inner[1:-1])) if inner.startswith("{") else [inner]


def pair(text: str) -> tuple[str, str]:
    """Split `d|p`; p may be left out."""
    first, _, second = text.partition("|")
    return first.strip(), second.strip() or "_"


def address(text: str) -> tuple[str, int]:
    """Parse `[base+offset]` into a register or symbol, and a number of bytes."""
    match = re.fullmatch(r"\[\s*([%$\w.@]+)\s*(?:\+\s*(-?\w+))?\s*\]", text)
    if match is None:
        raise ValueError(text)
    if re.fullmatch(r"-?\d\w*", match[1]):
        return "0", int(match[1], 0) + (int(match[2], 0) if match[2] else 0)
    return match[1], int(match[2], 0) if match[2] else 0
