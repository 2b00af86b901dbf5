"""Building blocks of evaluated values: targets of pointers, loops, and dependencies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir.ttir import Block, Op, Value
from .contract import Bool, Buffer, Contract, Int
from .scope import Loaded, conjunction
from .solver import z3

Index = tuple[Any, ...]


@dataclass(frozen=True)
class Target:
    """Target of a pointer under a condition: an element of an argument, or unknown."""

    when: Bool
    argument: str | None
    offset: Int
    why: str = ""  # why it is unknown


@dataclass(frozen=True)
class Dependency:
    """Value at an index that another value depends on."""

    value: Value
    index: Index
    strict: bool  # required in every lane, not only in active ones

    @property
    def key(self) -> tuple[Any, ...]:
        return self.value, tuple(i.get_id() for i in self.index), self.strict


Dependencies = dict[tuple[Any, ...], Dependency]


@dataclass(frozen=True)
class Loop:
    """Counted loop in an arbitrary iteration."""

    op: Op
    count: Int  # iterations before this one
    counter: Int
    lower: Int
    upper: Int
    step: Int

    @property
    def inside(self) -> list[Bool]:
        """Return the conditions for such an iteration to exist."""
        return [self.count >= 0, self.lower <= self.counter, self.counter < self.upper]


def blocks_inside(op: Op) -> Iterator[Block]:
    """Yield all blocks of an operation's regions, at any depth."""
    for region in op.regions:
        for block in region.blocks:
            yield block
            for inner in block.ops:
                yield from blocks_inside(inner)


def storage_of(contract: Contract, argument: str | None) -> str | None:
    """Return the memory that an argument lies in."""
    buffer = contract.arguments.get(argument) if argument is not None else None
    return buffer.storage or argument if isinstance(buffer, Buffer) else None


def relations(contract: Contract, one: Loaded, other: Loaded) -> Iterator[Bool]:
    """Yield facts about two integers loaded from memory that nobody writes meanwhile, given their places."""
    buffer, theirs = contract.arguments[one.argument], contract.arguments[other.argument]
    both = z3.And(one.happens, other.happens)
    for forward, back, inverse in ((one, other, buffer.inverse), (other, one, theirs.inverse)):
        if inverse == back.argument:
            linked = z3.And(both, forward.constant >= 0, forward.constant == back.offset)
            yield z3.Implies(linked, back.constant == forward.offset)
    if one.argument != other.argument:
        return
    different_places = z3.And(both, one.offset != other.offset)
    yield z3.Implies(z3.And(both, one.offset == other.offset), one.constant == other.constant)
    if buffer.distinct:
        both_distinct = z3.And(*(buffer.differs(loaded.constant, loaded.offset) for loaded in (one, other)))
        yield z3.Implies(z3.And(different_places, both_distinct), one.constant != other.constant)
    if buffer.inverse is not None:
        # The inverse of two equal elements would have to be both places.
        yield z3.Implies(z3.And(different_places, one.constant >= 0), one.constant != other.constant)
    if buffer.ascending:
        yield z3.Implies(z3.And(both, one.offset <= other.offset), one.constant <= other.constant)
        yield z3.Implies(z3.And(both, other.offset <= one.offset), other.constant <= one.constant)


def in_type(value: Int, bits: int) -> Bool:
    """Return the condition that a signed integer of `bits` bits can hold a value."""
    return z3.And(-(2 ** (bits - 1)) <= value, value < 2 ** (bits - 1))


def linear(shape: Sequence[int], index: Index) -> Int:
    """Return the row-major position of an element."""
    position: Int = z3.IntVal(0)
    for size, i in zip(shape, index, strict=True):
        position = position * size + i
    return z3.simplify(position)


def select(condition: Bool, first: Any, second: Any) -> Any:
    """Return one of two values, by a condition."""
    if first is None or second is None:
        return None
    if isinstance(first, tuple):
        one, other = first[0], second[0]
        alike = len(first) == len(second) == 1 and one.argument == other.argument is not None
        if alike and z3.is_true(one.when) and z3.is_true(other.when):
            return (Target(one.when, one.argument, z3.If(condition, one.offset, other.offset)),)
        yes = [Target(conjunction([condition, p.when]), p.argument, p.offset, p.why) for p in first]
        no = [Target(conjunction([z3.Not(condition), p.when]), p.argument, p.offset, p.why) for p in second]
        return (*yes, *no)
    return z3.If(condition, first, second)


def advance(start: Any, distance: Int) -> Any:
    """Add a distance to an integer or pointer."""
    if isinstance(start, tuple):
        return tuple(Target(p.when, p.argument, p.offset + distance, p.why) for p in start)
    return start + distance
