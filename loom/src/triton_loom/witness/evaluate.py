"""Integers, pointers and masks of one program of a launch, recomputed after the launch.

    program = Program(function, arguments={...}, position=(3, 0, 0), grid=(4, 1, 1), load=...)
    for frame in program.frames(block, [pointer]):     each run of the block, in order
        program.value(pointer, frame)                  a tile of 64-bit integers

Values that cannot be known raise `Unknown`: floats, calls, results of atomics, and whatever takes too long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from ..ir.ttir import I1, I32, Block, Op, Pointer, Scalar, Tensor, Type, Value, element_of, shape_of

Tile = torch.Tensor  # int64: signed integers, booleans as 0 and 1, addresses
_MAX_STEPS = 20_000  # about a quarter of a second


class Unknown(Exception):
    """A value that cannot be recomputed."""


class Frame:
    """Run of a block, with the values known in it."""

    def __init__(self, block: Block, outer: Frame | None = None, values: Mapping[Value, Tile] | None = None):
        self.block, self.outer, self.values = block, outer, dict(values or {})


Load = Callable[[Op, Tile, Tile | None, Tile | None], Tile]


class Program:
    """Program of a launch, whose values are computed on demand."""

    def __init__(
        self,
        *,
        arguments: Mapping[Value, int],
        position: tuple[int, int, int],
        grid: tuple[int, int, int],
        load: Load,
    ) -> None:
        """`load` returns the loaded tile of an operation, given its addresses, mask and `other`."""
        self.arguments, self.position, self.grid, self.load = arguments, position, grid, load
        self.steps = 0

    # -- runs of a block --

    def frames(self, block: Block, wanted: Iterable[Value]) -> Iterator[Frame]:
        """Yield each run of the block, with the values that the wanted ones depend on."""
        assert block.region
        wanted = list(wanted)
        parent = block.region.parent
        if parent is None:
            yield self.reached(block)
            return
        assert parent.block
        for outer in self.frames(parent.block, [*wanted, *parent.operands]):
            if parent.name == "scf.if":
                if self.branch(parent, outer) is block:
                    yield Frame(block, outer)
            elif parent.name == "scf.for":
                yield from (frame for frame, _ in self.iterations(parent, outer, wanted) if frame is not None)
            else:
                raise Unknown(parent.name)

    def reached(self, block: Block) -> Frame:
        """Return the run of a block of the function itself, following the branches that lead to it."""
        assert block.region
        frame = Frame(block.region.blocks[0])
        while frame.block is not block:
            self.count_step()
            end = frame.block.ops[-1]
            if end.name == "cf.cond_br":
                target, passed = end.successors[0 if self.number(end.operands[0], frame) else 1]
            elif end.name == "cf.br":
                target, passed = end.successors[0]
            else:
                raise Unknown("the block was not reached")
            values = {
                arg: self.value(v, frame)
                for arg, v in zip(target.args, passed, strict=True)
                if _is_integral(v.type)
            }
            frame = Frame(target, frame, values)
        return frame

    def branch(self, op: Op, frame: Frame) -> Block | None:
        """Return the block of an `scf.if` that is taken; None if it does not exist."""
        side = 0 if self.number(op.operands[0], frame) else 1
        return op.regions[side].block if side < len(op.regions) and op.regions[side].blocks else None

    def iterations(
        self, loop: Op, outer: Frame, wanted: Iterable[Value]
    ) -> Iterator[tuple[Frame | None, dict[int, Tile]]]:
        """Yield each run of a loop's body with its carried values; finally None with the loop's results."""
        if loop.attrs.get("unsigned"):
            raise Unknown("an unsigned loop")
        body = loop.regions[0].block
        slots = _carried_slots(loop, wanted)
        counter, last, step = (self.number(v, outer) for v in loop.operands[:3])
        carried = {slot: self.value(loop.operands[3 + slot], outer) for slot in slots}
        while counter < last:
            self.count_step()
            arguments = {body.args[1 + slot]: tile for slot, tile in carried.items()}
            frame = Frame(body, outer, {body.args[0]: torch.tensor(counter), **arguments})
            yield frame, carried
            carried = {slot: self.value(body.ops[-1].operands[slot], frame) for slot in slots}
            counter += step
            if step <= 0 or (loop.operands[0].type == I32 and counter >= 2**31):
                break  # the sanitizer exits a loop whose counter wraps around
        yield None, carried

    # -- values --

    def number(self, value: Value, frame: Frame) -> int:
        return int(self.value(value, frame))

    def value(self, value: Value, frame: Frame) -> Tile:
        """Return a value as it was in a run of a block or of an enclosing one."""
        if value in self.arguments:
            return torch.tensor(self.arguments[value])
        op = value.producer
        owner: Frame | None = frame
        block = op.block if op else value.owner
        while owner is not None and owner.block is not block:
            owner = owner.outer
        if owner is None:
            raise Unknown(f"{value} is defined elsewhere")
        if value not in owner.values:
            if op is None or not _is_integral(value.type):
                raise Unknown(str(value))
            self.count_step()
            owner.values[value] = self.result(op, op.results.index(value), owner)
        return owner.values[value]

    def count_step(self) -> None:
        self.steps += 1
        if self.steps > _MAX_STEPS:
            raise Unknown("it takes too long")

    def result(self, op: Op, slot: int, frame: Frame) -> Tile:
        """Return a result of an operation."""
        if op.name == "scf.if":
            block = self.branch(op, frame)
            if block is None:
                raise Unknown("an scf.if without a side")
            return self.value(block.ops[-1].operands[slot], Frame(block, frame))
        if op.name == "scf.for":
            *_, (_, carried) = self.iterations(op, frame, [op.regions[0].block.args[1 + slot]])
            return carried[slot]
        if op.name == "tt.load":
            return self.load(op, *self.load_operands(op, frame))
        tile = self.leaf(op)
        if tile is None:
            if op.name not in _OPERATIONS:
                raise Unknown(op.name)
            tiles = [self.value(operand, frame) for operand in op.operands]
            tile = _OPERATIONS[op.name](op, *tiles)
        return wrapped(tile, element_of(op.result.type)).expand(shape_of(op.result.type))

    def load_operands(self, op: Op, frame: Frame) -> tuple[Tile, Tile | None, Tile | None]:
        pointer, mask, other = (*op.operands, None, None)[:3]
        assert pointer is not None
        return (
            self.value(pointer, frame),
            self.value(mask, frame) if mask is not None else None,
            self.value(other, frame) if other is not None else None,
        )

    def leaf(self, op: Op) -> Tile | None:
        """Return the result of an operation without operands; None if it has operands."""
        if op.name == "arith.constant":
            value = op.attrs["value"]
            values = value if isinstance(value, list) else [value]
            if not all(isinstance(n, int) for n in values):
                raise Unknown("a float")
            tile = torch.tensor([int(n) for n in values])
            return tile.reshape(shape_of(op.result.type) if isinstance(value, list) else ())
        if op.name == "tt.get_program_id":
            return torch.tensor(self.position[axis_of(op)])
        if op.name == "tt.get_num_programs":
            return torch.tensor(self.grid[axis_of(op)])
        if op.name == "tt.make_range":
            return torch.arange(op.attrs["start"], op.attrs["end"])
        return None


def axis_of(op: Op) -> int:
    """Return the grid axis that an operation reads."""
    return "xyz".index(op.attrs["flags"][0])


def _is_integral(type_: Type) -> bool:
    element = type_.element if isinstance(type_, Tensor) else type_
    return isinstance(element, Pointer) or (isinstance(element, Scalar) and not element.is_float)


def _carried_slots(loop: Op, wanted: Iterable[Value]) -> set[int]:
    """Return the positions of the loop-carried values on which the wanted values depend."""
    body = loop.regions[0].block
    slots: set[int] = set()
    seen: set[Value] = set()
    pending = list(wanted)
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.producer is not None:
            pending += value.producer.operands
            pending += (
                operand
                for region in value.producer.regions
                for op in region.walk()
                for operand in op.operands
            )
        elif value.owner is body and value is not body.args[0]:
            slot = body.args.index(value) - 1
            slots.add(slot)
            pending.append(body.ops[-1].operands[slot])
    return slots


# ---- arithmetic ------------------------------------------------------------------------------------------------


def wrapped(tile: Tile, element: Scalar | Pointer) -> Tile:
    """Wrap integers to the width of a type."""
    if element == I1:
        return tile & 1
    if element.bits >= 64:
        return tile
    half = 1 << (element.bits - 1)
    return (tile + half & 2 * half - 1) - half


def _unsigned(op: Op, tile: Tile, operand: int = 0) -> Tile:
    """Reinterpret signed integers as unsigned."""
    bits = element_of(op.operands[operand].type).bits
    if bits >= 64:
        if bool((tile < 0).any()):
            raise Unknown("an unsigned integer of 64 bits")
        return tile
    return tile & (1 << bits) - 1


def _on_unsigned(apply: Callable[[Tile, Tile], Tile]) -> Callable[..., Tile]:
    return lambda op, a, b: apply(_unsigned(op, a, 0), _unsigned(op, b, 1))


def _on_signed(apply: Callable[[Tile, Tile], Tile]) -> Callable[..., Tile]:
    return lambda op, a, b: apply(a, b)


def _quotient(a: Tile, b: Tile) -> Tile:
    if bool((b == 0).any()):
        raise Unknown("a division by zero")
    return torch.div(a, b, rounding_mode="trunc")


def _shift(apply: Callable[[Tile, Tile], Tile]) -> Callable[[Tile, Tile], Tile]:
    def shift(a: Tile, b: Tile) -> Tile:
        if bool(((b < 0) | (b > 63)).any()):
            raise Unknown("a shift by too much")
        return apply(a, b)

    return shift


_COMPARISONS: dict[str, Callable[[Tile, Tile], Tile]] = {
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
}


def _compare(op: Op, a: Tile, b: Tile) -> Tile:
    predicate = op.attrs["flags"][0]
    if predicate[0] == "u":
        a, b = _unsigned(op, a, 0), _unsigned(op, b, 1)
    name = predicate if predicate in ("eq", "ne") else predicate[1:]
    return _COMPARISONS[name](a, b).long()


def _add_pointer(op: Op, pointer: Tile, offset: Tile) -> Tile:
    element = element_of(op.result.type)
    assert isinstance(element, Pointer)
    size = max(1, element_of(element.pointee).bits // 8)
    return pointer + size * offset


def _reshaped(op: Op, tile: Tile) -> Tile:
    if "allow_reorder" in op.attrs.get("flags", ()):
        raise Unknown("lanes in any order")
    return tile.reshape(shape_of(op.result.type))


def _unchanged(op: Op, tile: Tile) -> Tile:
    return tile


_OPERATIONS: dict[str, Callable[..., Tile]] = {
    "arith.addi": _on_signed(torch.add),
    "arith.subi": _on_signed(torch.sub),
    "arith.muli": _on_signed(torch.mul),
    "arith.divsi": _on_signed(_quotient),
    "arith.divui": _on_unsigned(_quotient),
    "arith.remsi": _on_signed(lambda a, b: a - b * _quotient(a, b)),
    "arith.remui": _on_unsigned(lambda a, b: a - b * _quotient(a, b)),
    "arith.minsi": _on_signed(torch.minimum),
    "arith.maxsi": _on_signed(torch.maximum),
    "arith.minui": _on_unsigned(torch.minimum),
    "arith.maxui": _on_unsigned(torch.maximum),
    "arith.andi": _on_signed(torch.bitwise_and),
    "arith.ori": _on_signed(torch.bitwise_or),
    "arith.xori": _on_signed(torch.bitwise_xor),
    "arith.shli": _on_signed(_shift(torch.bitwise_left_shift)),
    "arith.shrsi": _on_signed(_shift(torch.bitwise_right_shift)),
    "arith.shrui": _on_unsigned(_shift(torch.bitwise_right_shift)),
    "arith.cmpi": _compare,
    "arith.select": lambda op, which, a, b: torch.where(which != 0, a, b),
    "arith.extsi": lambda op, a: -a if element_of(op.operands[0].type) == I1 else a,
    "arith.extui": lambda op, a: _unsigned(op, a),
    "arith.trunci": _unchanged,
    "arith.index_cast": _unchanged,
    "tt.addptr": _add_pointer,
    "tt.bitcast": _unchanged,
    "tt.ptr_to_int": _unchanged,
    "tt.int_to_ptr": _unchanged,
    "tt.splat": _unchanged,
    "tt.broadcast": _unchanged,
    "tt.expand_dims": lambda op, a: a.unsqueeze(op.attrs["axis"]),
    "tt.reshape": _reshaped,
    "tt.trans": lambda op, a: a.permute(list(op.attrs["order"])),
}
