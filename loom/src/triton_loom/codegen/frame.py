"""Frame of one C++ function: its names, its scalars and its tiles in scratch memory.

Scalars become C++ variables where they are computed. Tiles are evaluated inside loop nests (`nest`) according to the
plan of `schedule`; the few that are stored get a buffer here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Protocol

from ..ir.ttir import F64, I1, Op, Pointer, Region, Scalar, Tensor, Type, Value, element_of, shape_of
from .accesses import Accesses
from .cpp import c_type, declare_const, literal, memory_type, size_of, vector_of, widen
from .dimensions import Dims, operand_dims
from .explanation import Explanation
from .forms import Form, constant_index
from .nest import Buffer, LoopNest
from .operations import ELEMENTWISE, Unsupported
from .schedule import (
    CHUNK,
    OWN,
    Nest,
    Plan,
    contiguous_dim,
    holds_up_to,
    is_virtual,
    is_write,
    strides,
    turns,
)

_RESERVED = frozenset(
    re.findall(
        r"\w+",
        """alignas alignof and asm auto bool break case catch char class const constexpr continue decltype
        default delete do double else enum explicit export extern false float for friend goto if
        inline int long mutable namespace new not nullptr operator or private protected public
        register return short signed sizeof static struct switch template this throw true try
        typedef typeid typename union unsigned using virtual void volatile while xor args p program
        total chunk running next main printf W Args Program Status load store mask select invert
        bits convert splat ramp iota low_half high_half vec lane like all any least gather scatter dot
        dot_i8 dot_bf16 reduce launch work fail take shl shr sar divs rems divu remu i8 i16 i32 i64
        u8 u16 u32 u64 f32 f64 lesser greater by_registers Merge sort_network loom explained
        READ WRITE prefetch transpose Tiles tiles fits lanes_outside lanes_on overflows seen_load load_each
        seen_store store_each seen_atomic begin_atomic keeps_promise uses_undefined Spin never_ends
        print_line print_value Interrupts FAILED TOO_LONG INTERRUPTED timespec sigaction SIGINT""",
    )
)

_REGISTER = 64  # bytes: copies of this width suit narrower registers too


@dataclass
class Target:
    """Destination of an assignment: a C++ variable or a buffer."""

    variable: str | None = None
    buffer: Buffer | None = None


class Unit(Protocol):
    """Interface of the C++ file that a function needs."""

    top: list[str]  # text above the functions: tables, combiners
    accesses: Accesses
    hardware_dot: bool  # bf16 dots use the processor's native instructions
    explanation: Explanation | None  # record of the nests, if requested

    def unique(self, stem: str) -> str: ...
    def allocate(self, size: int) -> int: ...
    def called(self, name: str) -> str: ...
    def define(self, name: str, args: list[Value], results: list[Type], body: Region) -> None: ...


class Frame:
    """State of a function under construction: lines, names, storage of values. Its loop nests see it as `Storage`."""

    def __init__(self, unit: Unit, plan: Plan) -> None:
        self.unit = unit
        self.accesses = unit.accesses
        self.plan = plan
        self.declarations: list[str] = []
        self.lines: list[str] = []
        self.scalars: dict[Value, str] = {}
        self.scalar_names: set[str] = set()
        self.declared: set[Value] = set()  # scalars that are declared at the top of the function
        self.buffers: dict[Value, Buffer] = {}
        self.aliases: dict[Buffer, Buffer] = {}  # a new value's buffer -> the older buffer that it shares
        self.buffer_count = 0
        self.pending: list[Value] = []  # buffered values that were met but are not computed yet
        self.lapped: tuple[Op, str] | None = None  # the nest that is being timed

    # -- names and scalars --

    def identifier(self, name: str) -> str:
        name = re.sub(r"\W", "_", name)
        if name[0].isdigit():
            name = f"v{name}"
        return (
            f"{name}_" if name in _RESERVED or re.fullmatch(r"(i|ii|result|a)\d+|kept\d+_.*", name) else name
        )

    def bind(self, value: Value, name: str) -> str:
        name = self.identifier(name)
        while name in self.scalar_names:
            name = self.unit.unique(name)
        self.scalar_names.add(name)
        self.scalars[value] = name
        return name

    def scalar(self, value: Value) -> str:
        if value not in self.scalars and value.producer and value.producer.name == "arith.constant":
            return literal(value.type, value.producer.attrs["value"])
        return self.scalars[value]

    def let(self, value: Value, expr: str) -> None:
        if value in self.declared:
            self.lines.append(f"{self.scalars[value]} = {expr};")
        else:
            self.lines.append(declare_const(c_type(value.type), self.bind(value, value.name), expr))

    def variable(self, value: Value) -> str:
        """Return the variable of a scalar that is assigned to, not defined once."""
        if value not in self.declared:
            self.lines.append(f"{c_type(value.type)} {self.bind(value, value.name)};")
        return self.scalars[value]

    def comment(self, op: Op) -> None:
        if op.location:
            self.lines.append(f"// {op.location.rsplit('/', 1)[-1]}")

    def lap(self, op: Op, does: str = "") -> None:
        """Attribute the time of the statements that follow to this operation's nest, if times are requested."""
        if self.unit.explanation and (lap := self.unit.explanation.lap(op, does)):
            if self.lines and self.lines[-1].startswith("loom::lap("):
                self.lines.pop()  # an empty nest
            self.lines += lap
            self.lapped = op, does

    # -- buffers --

    def new_buffer(
        self, name: str, element: Scalar | Pointer, shape: tuple[int, ...], of: Value | None = None
    ) -> Buffer:
        self.buffer_count += 1
        buffer = Buffer(f"kept{self.buffer_count}_{self.identifier(name)}", element, shape)
        offset = self.unit.allocate(buffer.size * size_of(element))
        type_ = memory_type(element)
        if self.unit.explanation:
            tile = f"{'x'.join(map(str, shape))} {element}"
            self.unit.explanation.keep(name, tile, buffer.size * size_of(element), of)
        self.declarations.append(
            f"{type_} *const {buffer.name} = ({type_} *)(p.scratch + {offset});"
            f"  // {'x'.join(map(str, shape))} {element}"
        )
        return buffer

    def buffer_for(self, value: Value) -> Buffer:
        if value not in self.buffers:
            self.buffers[value] = self.new_buffer(
                value.name, element_of(value.type), shape_of(value.type), value
            )
        return self.buffers[value]

    def is_filled(self, value: Value) -> bool:
        buffer = self.buffers.get(value)
        return buffer is not None and buffer.filled

    def table(self, op: Op) -> Buffer:
        """Return the static array of a constant tile whose elements differ."""
        value = op.result
        if value not in self.buffers:
            element, numbers = element_of(value.type), op.attrs["value"]
            if isinstance(numbers, bytes):
                raise Unsupported(op, "a constant tile that is printed as raw bytes")
            name = self.unit.unique("table")
            items = ", ".join("-1" if n is True else literal(element, n) for n in numbers)
            self.unit.top.append(f"static const {memory_type(element)} {name}[] = {{{items}}};")
            self.buffers[value] = Buffer(name, element, shape_of(value.type), filled=True)
        return self.buffers[value]

    # -- filling them --

    def prepare(self, values: list[Value], nest: Nest | None) -> None:
        """Fill every buffered value that evaluating these needs, except those that this nest tees itself."""
        seen: set[Value] = set()

        def visit(value: Value) -> None:
            if value in seen or not isinstance(value.type, Tensor) or not is_virtual(value):
                return
            seen.add(value)
            if self.is_filled(value):
                return
            if value in self.plan.buffered and (nest is None or self.plan.tee.get(value) is not nest):
                self.fill(value)
                return
            assert value.producer
            for operand in value.producer.operands:
                visit(operand)

        for value in values:
            visit(value)

    def run_nest(self, nest: LoopNest, innermost: list[str] | None = None) -> None:
        """Write the nest out, and mark the values that it teed as filled."""
        self.lines += nest.render(innermost)
        for value in nest.teed:
            self.mark_filled(value)

    def mark_filled(self, value: Value) -> None:
        self.buffers[value].filled = True
        if value in self.pending:
            self.pending.remove(value)

    def fill(self, value: Value) -> None:
        """Compute a buffered value in a nest of its own, or in that of another value that tees it."""
        op, home = (
            value.producer,
            self.plan.fills.get(value),
        )  # a store may ask for a value that has no buffer
        assert op
        if home and home.slot == OWN and home.op is not op:
            for other in home.op.results:
                if self.plan.fills.get(other) is home and other in self.pending:
                    self.fill(other)
        if self.is_filled(value):
            return
        buffer = self.buffer_for(value)
        self.prepare(op.operands, home if home and home.op is op else None)
        self.comment(op)
        outer_lap = self.lapped
        self.lap(op, "load, kept" if op.name == "tt.load" else "computed, kept")
        if op.name == "tt.trans" and turns(op) and self.is_filled(op.operands[0]):
            *batch, columns, rows = buffer.shape
            self.lines.append(
                f"transpose<{prod(batch)}, {rows}, {columns}>({buffer.name}, {self.buffers[op.operands[0]].name});"
            )
        elif (dim := self.transposed(value)) is not None:
            self.write_columns(buffer, dim, value, lambda nest: nest.define(op, value, nest.index))
        else:
            nest = LoopNest(self, buffer.shape, lanes=self.lanes_to_copy(value), values=[value])
            form = nest.define(op, value, nest.index)
            nest.write(buffer, nest.linear(nest.index, buffer.shape), form)
            self.run_nest(nest)
        self.mark_filled(value)
        if outer_lap:
            self.lap(*outer_lap)

    def transposed(self, value: Value) -> int | None:
        """Return the dimension along which this tile is contiguous in its source; None if that is the last one."""
        shape = shape_of(value.type)
        last = len(shape) - 1
        if last < 1 or element_of(value.type) == I1 or shape[last] < CHUNK:
            return None
        directions = {contiguous_dim(leaf, dims) for leaf, dims in self.sources(value)}
        if last in directions or len(directions - {None}) != 1:
            return None
        (dim,) = directions - {None}
        return dim if dim is not None and shape[dim] >= CHUNK else None

    def sources(self, value: Value) -> set[tuple[Value, Dims]]:
        """Return the loads and stored tiles that a tile is read from, with the tile's dimension for each of theirs."""
        result: set[tuple[Value, Dims]] = set()
        seen: set[tuple[Value, Dims]] = set()

        def visit(value: Value, dims: Dims) -> None:
            if not isinstance(value.type, Tensor) or (value, dims) in seen:
                return
            seen.add((value, dims))
            op = value.producer
            if op is None or not is_virtual(value) or self.is_filled(value) or op.name == "tt.load":
                result.add((value, dims))
            elif op.name in ELEMENTWISE or op.name in ("tt.broadcast", "tt.expand_dims", "tt.trans"):
                for operand in op.operands:
                    visit(operand, operand_dims(op, operand, dims))

        visit(value, tuple(range(len(shape_of(value.type)))))
        return result

    def write_columns(
        self, buffer: Buffer, dim: int, value: Value, evaluate: Callable[[LoopNest], Form]
    ) -> None:
        """Write buffer = value, read in chunks along `dim` and transposed in 16 x 16 blocks."""
        last = len(buffer.shape) - 1
        nest = LoopNest(self, buffer.shape, innermost=last, lanes=CHUNK, lane_dim=dim, values=[value])
        text = self.converted(nest.vec(evaluate(nest)), element_of(value.type), buffer.element, CHUNK)
        corner = nest.linear((*nest.index[:-1], constant_index(0)), buffer.shape)
        body = [
            f"auto column = [&](i32 {nest.variables[last]}) LOOM_ALWAYS {{",
            *nest.code[-1],
            f"return {text};",
            "};",
            f"store_columns<{buffer.shape[last]}>({buffer.name} + {corner.expr}, {corner.step}, column);",
        ]
        nest.code[-1] = []
        self.run_nest(nest, body)

    def converted(self, text: str, source: Scalar | Pointer, target: Scalar | Pointer, lanes: int) -> str:
        """Return an operand of a dot converted to the type that the dot computes in."""
        if source == target or not isinstance(source, Scalar):
            return text
        text = widen(source.name, text)
        return f"convert<{vector_of('f64', lanes)}>({text})" if target == F64 else text

    def write_to(self, moves: list[tuple[Buffer, Value]], home: Nest | None = None) -> None:
        """Write buffer = value for tiles of one shape; each chunk reads all of them before it writes any."""
        values = [value for _, value in moves]
        self.prepare(values, home)
        if len(moves) == 1 and (dim := self.transposed(values[0])) is not None:
            self.write_columns(moves[0][0], dim, values[0], lambda nest: nest.at_own_index(values[0]))
            return
        unchanged = len(moves) == 1 and moves[0][0].element == element_of(values[0].type)
        lanes = self.lanes_to_copy(values[0]) if unchanged else None
        nest = LoopNest(self, moves[0][0].shape, lanes=lanes, values=values)
        forms = [nest.at_own_index(value) for value in values]
        for (buffer, value), form in zip(moves, forms, strict=True):
            text = self.converted(nest.vec(form), element_of(value.type), buffer.element, nest.lanes)
            nest.write(buffer, nest.linear(nest.index, buffer.shape), form, text)
        self.run_nest(nest)

    def lanes_to_copy(self, value: Value, along: int = -1) -> int | None:
        """Return a full register of lanes for a load that is contiguous along this dimension and stored unchanged."""
        op, element, shape = value.producer, element_of(value.type), shape_of(value.type)
        if op is None or op.name != "tt.load" or not shape or element == I1:
            return None
        lanes, dim = min(_REGISTER // size_of(element), shape[along]), len(shape) + along
        pointers, *masks = op.operands[:2]
        contiguous = strides(pointers)[dim] == 1 and all(holds_up_to(mask, dim) for mask in masks)
        return lanes if contiguous and lanes > CHUNK else None

    def stored(self, value: Value, home: Nest | None = None, element: Scalar | None = None) -> Buffer:
        """Return a buffer that holds the value (as `element`, if given); make one if necessary."""
        target_element = element or element_of(value.type)
        if value in self.plan.buffered:
            self.prepare([value], None)
        buffer = self.buffers.get(value)
        if buffer is not None and buffer.filled and buffer.element == target_element:
            return buffer
        copy = self.new_buffer(value.name, target_element, shape_of(value.type))
        self.write_to([(copy, value)], home)
        copy.filled = True
        return copy

    def stored_transposed(self, value: Value) -> Buffer | None:
        """Return a buffer of [.., N, K] for a value of [.., K, N] if its source has that layout, else None."""
        self.prepare([value], None)
        op, rank = value.producer, len(shape_of(value.type))
        if op is None or self.is_filled(value):
            return None
        if op.name == "tt.trans" and list(op.attrs["order"]) == [*range(rank - 2), rank - 1, rank - 2]:
            return self.stored(op.operands[0])
        if self.transposed(value) != rank - 2:
            return None
        *batch, k, n = shape_of(value.type)
        copy = self.new_buffer(value.name, element_of(value.type), (*batch, n, k))
        nest = LoopNest(self, copy.shape, lanes=self.lanes_to_copy(value, along=-2))
        *outer, i, j = nest.index
        nest.write(copy, nest.linear(nest.index, copy.shape), nest.eval(value, (*outer, j, i)))
        self.run_nest(nest)
        copy.filled = True
        return copy

    def flush(self, op: Op, needed_inside: set[Value]) -> None:
        """Fill the pending values that an operation which writes memory or runs regions must not delay."""
        writes = is_write(op)
        for value in list(self.pending):
            home = self.plan.tee.get(value)
            if value not in self.pending or (home is not None and home.op is op and not op.regions):
                continue
            if value in needed_inside or (writes and value in self.plan.reads_memory):
                self.fill(value)

    def leads_to(self, values: list[Value]) -> set[Value]:
        """Return the buffered values that these are computed from, directly or through virtual ones."""
        result: set[Value] = set()
        seen: set[Value] = set()

        def visit(value: Value) -> None:
            if value in seen or not isinstance(value.type, Tensor) or not is_virtual(value):
                return
            seen.add(value)
            if value in self.plan.buffered:
                result.add(value)
            assert value.producer
            for operand in value.producer.operands:
                visit(operand)

        for value in values:
            visit(value)
        return result

    def reads(self, value: Value) -> dict[Buffer, bool]:
        """Return the buffers that evaluating `value` reads; True for those read only at the nest's own index."""
        result: dict[Buffer, bool] = {}
        seen: set[tuple[Value, bool]] = set()

        def visit(value: Value, direct: bool) -> None:
            if not isinstance(value.type, Tensor) or (value, direct) in seen:
                return
            seen.add((value, direct))
            op = value.producer
            if op is None or self.is_filled(value) or not is_virtual(value):
                buffer = self.buffers[value]
                result[buffer] = result.get(buffer, True) and direct
                return
            direct = direct and (op.name in ELEMENTWISE or op.name in ("tt.load", "tt.addptr"))
            for operand in op.operands:
                visit(operand, direct)

        visit(value, True)
        return result

    # -- assignment --

    def target(self, value: Value) -> Target:
        """Return storage for a value that control flow assigns to."""
        if isinstance(value.type, Tensor):
            buffer = self.buffer_for(value)
            buffer.filled = True
            return Target(buffer=buffer)
        return Target(variable=self.variable(value))

    def same_storage(self, value: Value, target: Target) -> None:
        if target.buffer:
            self.buffers[value] = target.buffer
        else:
            assert target.variable
            self.scalars[value] = target.variable

    def assign(self, targets: list[Target], values: list[Value], op: Op, first_slot: int = 0) -> None:
        """Assign all values at once: no target sees another target's new value."""
        target_buffers = {t.buffer for t in targets if t.buffer}
        if target_buffers:
            self.lap(op, "assignment of tiles")
        copies: list[tuple[Buffer, Buffer]] = []
        groups: dict[Nest | None, list[tuple[Buffer, Value]]] = {}
        for slot, (target, value) in enumerate(zip(targets, values, strict=True)):
            if not target.buffer:
                continue
            home = self.plan.nest(op, first_slot + slot)
            self.prepare([value], home)
            current = self.buffers.get(value)
            if current is not None and self.aliases.get(current, current) is target.buffer:
                continue
            if any(buffer in target_buffers and not direct for buffer, direct in self.reads(value).items()):
                copy = self.new_buffer("next", target.buffer.element, target.buffer.shape)
                self.write_to([(copy, value)], home)
                copies.append((target.buffer, copy))
            else:
                groups.setdefault(home, []).append((target.buffer, value))
        for home, moves in groups.items():
            self.write_to(moves, home)
        for buffer, copy in copies:
            self.lines.append(
                f"__builtin_memcpy({buffer.name}, {copy.name}, {copy.size * size_of(copy.element)});"
            )
        self.assign_scalars(targets, values)

    def assign_scalars(self, targets: list[Target], values: list[Value]) -> None:
        """Assign the scalars, after the tiles, which may still be computed from the old scalars."""
        variables = {t.variable for t in targets if t.variable}
        moves = []
        for target, value in zip(targets, values, strict=True):
            if target.variable and target.variable != self.scalars.get(value):
                text = self.scalar(value)
                if text in variables:
                    copy = self.unit.unique("next")
                    self.lines.append(declare_const(c_type(value.type), copy, text))
                    text = copy
                moves.append(f"{target.variable} = {text};")
        self.lines += moves
