"""Brute-force interpreter of TTIR: executes a launch program by program, in machine integers.

It shares only the TTIR reader with the prover, so that the two can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from triton_loom.ir.ttir import Block, Dense, Function, Op, Pointer, Value, element_of, shape_of

MOST_STEPS = 5_000


class Access(NamedTuple):
    """Lane of a load, store or atomic."""

    kind: str  # "load", "store" or "atomic"
    argument: str
    element: int
    program: int
    line: str
    wrote: bool
    orders: bool  # whether it is atomic for other programs


class Undefined(Exception):
    """A division by zero or a loop whose step is not positive: the launch is meaningless."""


class Endless(Exception):
    """The launch takes more steps than a test has time for."""


@dataclass
class Pointers:
    """Tile of pointers into one argument."""

    argument: str
    offset: Any


def wrapped(value: Any, bits: int) -> Any:
    """Wrap to two's complement."""
    if bits >= 64:
        return value
    return ((np.asarray(value) + 2 ** (bits - 1)) % 2**bits) - 2 ** (bits - 1)


def as_unsigned(value: Any, bits: int) -> Any:
    """Reinterpret the bits as unsigned."""
    return np.asarray(value) % 2**bits


def truncated(a: Any, b: Any) -> Any:
    if np.any(np.asarray(b) == 0):
        raise Undefined("a division by zero")
    quotient = np.abs(a) // np.abs(b)
    return np.where((np.asarray(a) < 0) == (np.asarray(b) < 0), quotient, -quotient)


COMPARISONS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
SUMS = {"arith.addi": np.add, "arith.subi": np.subtract, "arith.muli": np.multiply}
BITS = {"arith.andi": np.bitwise_and, "arith.ori": np.bitwise_or, "arith.xori": np.bitwise_xor}
SHAPES = {"tt.splat", "tt.broadcast", "tt.expand_dims", "tt.unsplat"}


@dataclass
class Launch:
    """Launch of a kernel, which records its `accesses`."""

    function: Function
    names: Sequence[str]  # of the arguments, by position
    arguments: Mapping[str, int]
    memory: Mapping[str, np.ndarray]  # contents behind every pointer argument
    accesses: list[Access] = field(default_factory=list)
    program: int = 0
    steps: int = 0

    def run(self, programs: int) -> list[Access]:
        """Run all programs, one after another."""
        for self.program in range(programs):
            values: dict[Value, Any] = {}
            for arg, name in zip(self.function.args, self.names, strict=True):
                values[arg] = (
                    Pointers(name, 0) if isinstance(element_of(arg.type), Pointer) else self.arguments[name]
                )
            self.block(self.function.body.blocks[0], values)
        return self.accesses

    def block(self, block: Block, values: dict[Value, Any]) -> list[Any]:
        """Run a block; return the operands of its last operation."""
        for op in block.ops:
            self.steps += 1
            if self.steps > MOST_STEPS:
                raise Endless
            if op.name in ("scf.yield", "scf.condition", "tt.return", "tt.reduce.return"):
                return [values[o] for o in op.operands]
            results = self.op(op, values)
            values.update(zip(op.results, results, strict=True))
        return []

    def op(self, op: Op, values: dict[Value, Any]) -> list[Any]:
        """Evaluate an operation's results."""
        operands = [values[o] for o in op.operands]
        if op.name == "scf.if":
            region = op.regions[0] if bool(operands[0]) else op.regions[1] if len(op.regions) > 1 else None
            return self.block(region.block, values) if region is not None and region.blocks else []
        if op.name == "scf.for":
            return self.counted(op, values, operands)
        if op.name == "scf.while":
            return self.repeated(op, values, operands)
        if op.name == "tt.reduce":
            return self.reduced(op, values, operands)
        if op.name in ("tt.load", "tt.store", "tt.atomic_rmw", "tt.atomic_cas"):
            return self.access(op, operands)
        return [self.plain(op, operands)] if op.results else []

    def counted(self, op: Op, values: dict[Value, Any], operands: list[Any]) -> list[Any]:
        lower, upper, step, *carried = operands
        if step <= 0:
            raise Undefined("a step that is not positive")
        body = op.regions[0].block
        i = int(lower)
        while i < int(upper):
            values.update(zip(body.args, [i, *carried], strict=True))
            carried = self.block(body, values)
            i += int(step)
        return carried

    def repeated(self, op: Op, values: dict[Value, Any], carried: list[Any]) -> list[Any]:
        before, body = (region.block for region in op.regions)
        while True:
            values.update(zip(before.args, carried, strict=True))
            condition, *passed = self.block(before, values)
            if not bool(condition):
                return passed
            values.update(zip(body.args, passed, strict=True))
            carried = self.block(body, values)

    def reduced(self, op: Op, values: dict[Value, Any], operands: list[Any]) -> list[Any]:
        (tile,) = operands
        block = op.regions[0].block
        axis = int(op.attrs["axis"])
        parts = list(np.moveaxis(np.asarray(tile), axis, 0))
        total = parts[0]
        for part in parts[1:]:
            values.update(zip(block.args, [total, part], strict=True))
            (total,) = self.block(block, values)
        return [total]

    def access(self, op: Op, operands: list[Any]) -> list[Any]:
        pointers, shape = operands[0], shape_of(op.operands[0].type)
        kind = "atomic" if "atomic" in op.name else op.name.removeprefix("tt.")
        position = {"tt.load": 1, "tt.store": 2, "tt.atomic_rmw": 2}.get(op.name, 9)
        active = np.broadcast_to(operands[position] if len(operands) > position else True, shape)
        offsets = np.broadcast_to(pointers.offset, shape)
        other = operands[2] if kind == "load" and len(operands) > 2 else 0
        result = np.array(np.broadcast_to(0 if other is None else other, shape))
        memory = self.memory[pointers.argument]
        for lane in np.ndindex(*shape):
            if not active[lane]:
                continue
            element = int(offsets[lane])
            inside = 0 <= element < len(memory)
            old = memory[element] if inside else 0
            new = _stored(op, operands, lane, shape, old)
            orders = kind == "atomic" and "cta" not in op.attrs["flags"]
            self.accesses.append(
                Access(kind, pointers.argument, element, self.program, op.location, new is not None, orders)
            )
            result[lane] = old
            if new is not None and inside:
                memory[element] = new
        return [result if shape else result[()]] if op.results else []

    def plain(self, op: Op, operands: list[Any]) -> Any:
        """Evaluate an operation on integers; None for floats."""
        element, shape = element_of(op.result.type), shape_of(op.result.type)
        if op.name == "tt.addptr":
            return Pointers(operands[0].argument, np.asarray(operands[0].offset) + operands[1])
        if op.name in SHAPES and isinstance(operands[0], Pointers):
            return Pointers(operands[0].argument, self.shaped(op, operands[0].offset, shape))
        if not isinstance(element, Pointer) and element.is_float:
            return None
        if op.name in SHAPES:
            return self.shaped(op, operands[0], shape)
        if op.name == "tt.get_program_id":
            return self.program if op.attrs["flags"][0] == "x" else 0
        if op.name == "tt.make_range":
            return np.arange(int(op.attrs["start"]), int(op.attrs["end"]))
        if op.name == "arith.constant":
            value = op.attrs["value"]
            value = value.values if isinstance(value, Dense) else value
            return np.broadcast_to(np.asarray(value, np.int64 if element.bits > 1 else bool), shape)
        if op.name == "arith.select":
            return np.where(operands[0], operands[1], operands[2])
        return self.arithmetic(op, operands, element.bits)

    def shaped(self, op: Op, value: Any, shape: tuple[int, ...]) -> Any:
        if op.name == "tt.expand_dims":
            return np.expand_dims(np.asarray(value), int(op.attrs["axis"]))
        return np.asarray(value).reshape(()) if op.name == "tt.unsplat" else np.broadcast_to(value, shape)

    def arithmetic(self, op: Op, operands: list[Any], bits: int) -> Any:
        width = element_of(op.operands[0].type).bits
        if op.name == "arith.cmpi":
            predicate, (a, b) = op.attrs["flags"][0], operands
            if predicate in ("eq", "ne"):
                return np.equal(a, b) if predicate == "eq" else np.not_equal(a, b)
            if predicate[0] == "u":
                a, b = as_unsigned(a, width), as_unsigned(b, width)
            return COMPARISONS[predicate[1:]](a, b)
        if op.name in SUMS:
            return wrapped(SUMS[op.name](np.asarray(operands[0], np.int64), operands[1]), bits)
        if op.name in BITS:
            return BITS[op.name](operands[0], operands[1])
        if op.name in ("arith.divsi", "arith.remsi"):
            quotient = truncated(*operands)
            return quotient if op.name == "arith.divsi" else operands[0] - quotient * operands[1]
        if op.name in ("arith.divui", "arith.remui"):
            a, b = (as_unsigned(o, width) for o in operands)
            quotient = truncated(a, b)
            return wrapped(quotient if op.name == "arith.divui" else a - quotient * b, bits)
        if op.name in ("arith.minsi", "arith.maxsi"):
            return (np.minimum if "min" in op.name else np.maximum)(*operands)
        if op.name in ("arith.minui", "arith.maxui"):
            less = as_unsigned(operands[0], width) <= as_unsigned(operands[1], width)
            return np.where(less if "min" in op.name else ~less, operands[0], operands[1])
        if op.name == "arith.extui":
            return as_unsigned(np.asarray(operands[0], np.int64), width)
        if op.name == "arith.extsi":
            return -np.asarray(operands[0], np.int64) if width == 1 else operands[0]
        if op.name == "arith.trunci":
            return np.asarray(operands[0]) % 2 == 1 if bits == 1 else wrapped(operands[0], bits)
        raise NotImplementedError(op.name)


def _stored(op: Op, operands: list[Any], lane: tuple[int, ...], shape: tuple[int, ...], old: Any) -> Any:
    """Return the value that an access stores; None if it writes nothing."""
    if op.name == "tt.load":
        return None
    written = operands[-1] if op.name == "tt.atomic_cas" else operands[1]
    value = 1 if written is None else int(np.broadcast_to(written, shape)[lane])
    if op.name == "tt.atomic_cas":
        return value if old == int(np.broadcast_to(operands[1], shape)[lane]) else None
    if op.name == "tt.atomic_rmw" and "add" in op.attrs["flags"]:
        return int(old) + value
    return value
