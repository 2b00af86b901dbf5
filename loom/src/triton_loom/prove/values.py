"""What values are made of while a kernel is evaluated: places of pointers, loops, and what depends on what."""

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
class Place:
    """Where a pointer leads to under a condition: an element of an argument, or nowhere known."""

    when: Bool
    argument: str | None
    offset: Int
    why: str = ""  # it is not known


@dataclass(frozen=True)
class Dependency:
    """A value at an index that another was made from."""

    value: Value
    index: Index
    strict: bool  # it matters in every lane, not just in those that are on

    @property
    def key(self) -> tuple[Any, ...]:
        return self.value, tuple(i.get_id() for i in self.index), self.strict


Dependencies = dict[tuple[Any, ...], Dependency]


@dataclass(frozen=True)
class Loop:
    """A counted loop in any one of its iterations."""

    op: Op
    count: Int  # iterations before this one
    counter: Int
    lower: Int
    upper: Int
    step: Int

    @property
    def inside(self) -> list[Bool]:
        """That there is such an iteration."""
        return [self.count >= 0, self.lower <= self.counter, self.counter < self.upper]


def blocks_inside(op: Op) -> Iterator[Block]:
    """All blocks of an operation's regions, at any depth."""
    for region in op.regions:
        for block in region.blocks:
            yield block
            for inner in block.ops:
                yield from blocks_inside(inner)


def storage_of(contract: Contract, argument: str | None) -> str | None:
    """The memory that an argument lies in."""
    given = contract.arguments.get(argument) if argument is not None else None
    return given.storage or argument if isinstance(given, Buffer) else None


def relations(contract: Contract, one: Loaded, other: Loaded) -> Iterator[Bool]:
    """What follows from where two integers were loaded from, of memory that nobody writes meanwhile."""
    buffer, theirs = contract.arguments[one.argument], contract.arguments[other.argument]
    both = z3.And(one.happens, other.happens)
    for there, back, leads in ((one, other, buffer.inverse), (other, one, theirs.inverse)):
        if leads == back.argument:
            met = z3.And(both, there.constant >= 0, there.constant == back.offset)
            yield z3.Implies(met, back.constant == there.offset)
    if one.argument != other.argument:
        return
    apart = z3.And(both, one.offset != other.offset)
    yield z3.Implies(z3.And(both, one.offset == other.offset), one.constant == other.constant)
    if buffer.distinct:
        those = z3.And(*(buffer.differs(loaded.constant, loaded.offset) for loaded in (one, other)))
        yield z3.Implies(z3.And(apart, those), one.constant != other.constant)
    if buffer.inverse is not None:
        # The way back from two elements that are the same would have to lead to both places.
        yield z3.Implies(z3.And(apart, one.constant >= 0), one.constant != other.constant)
    if buffer.ascending:
        yield z3.Implies(z3.And(both, one.offset <= other.offset), one.constant <= other.constant)
        yield z3.Implies(z3.And(both, other.offset <= one.offset), other.constant <= one.constant)


def in_type(value: Int, bits: int) -> Bool:
    """That a signed integer of so many bits can hold it."""
    return z3.And(-(2 ** (bits - 1)) <= value, value < 2 ** (bits - 1))


def linear(shape: Sequence[int], index: Index) -> Int:
    """The position of an element in row-major order."""
    position: Int = z3.IntVal(0)
    for size, i in zip(shape, index, strict=True):
        position = position * size + i
    return z3.simplify(position)


def chosen(condition: Bool, first: Any, second: Any) -> Any:
    """One of two values."""
    if first is None or second is None:
        return None
    if isinstance(first, tuple):
        one, other = first[0], second[0]
        alike = len(first) == len(second) == 1 and one.argument == other.argument is not None
        if alike and z3.is_true(one.when) and z3.is_true(other.when):
            return (Place(one.when, one.argument, z3.If(condition, one.offset, other.offset)),)
        yes = [Place(conjunction([condition, p.when]), p.argument, p.offset, p.why) for p in first]
        no = [Place(conjunction([z3.Not(condition), p.when]), p.argument, p.offset, p.why) for p in second]
        return (*yes, *no)
    return z3.If(condition, first, second)


def moved(start: Any, distance: Int) -> Any:
    """An integer or pointer, and something added to it."""
    if isinstance(start, tuple):
        return tuple(Place(p.when, p.argument, p.offset + distance, p.why) for p in start)
    return start + distance
