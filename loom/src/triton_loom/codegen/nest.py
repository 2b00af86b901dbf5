"""Loop nest over a tile: evaluates values for the current chunk and collects the C++ statements.

A nest runs over a shape in chunks of W lanes along one dimension. Evaluating a value at an index gives a
`Form`: the same in every lane (uniform), counting up by a fixed step from lane to lane (affine: addresses,
ranges), or a vector. Each statement is placed in the outermost loop that it varies in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Literal, Protocol

from ..ir.ttir import I1, I32, I64, Op, Pointer, Scalar, Tensor, Value, element_of, shape_of
from .accesses import Accesses, Chunk
from .cpp import c_type, declare_const, literal, stored_type, vector_of
from .dimensions import merged
from .forms import Form, Index, Step, add_steps, as_step, constant_index, multiply_steps, pointee_size
from .operations import ELEMENTWISE, Unsupported, predicate
from .schedule import CHUNK, Plan, is_virtual, lane_dimension, strides
from .wrapping import Wrapping

_CACHE_LINE = 64
_LONG_ROW = 2048  # bytes


@dataclass(eq=False)
class Buffer:
    """A tile in scratch memory, row-major."""

    name: str
    element: Scalar | Pointer
    shape: tuple[int, ...]
    filled: bool = False

    @property
    def size(self) -> int:
        return prod(self.shape)


class Storage(Protocol):
    """Interface of the enclosing function that a nest needs: names of scalars, and stored tiles."""

    plan: Plan
    accesses: Accesses
    scalar_names: set[str]
    buffers: dict[Value, Buffer]

    def identifier(self, name: str) -> str: ...
    def scalar(self, value: Value) -> str: ...
    def is_filled(self, value: Value) -> bool: ...
    def buffer_for(self, value: Value) -> Buffer: ...
    def table(self, op: Op) -> Buffer: ...


class LoopNest(Wrapping):
    """Loops over `shape`. The dimension `innermost`, if given, is the innermost loop instead of the loop over chunks.

    `values` will be evaluated at the nest's own index: dimensions that they don't distinguish become one loop.
    """

    def __init__(
        self,
        storage: Storage,
        shape: tuple[int, ...],
        *,
        innermost: int | None = None,
        lanes: int | None = None,
        lane_dim: int | None = None,
        values: list[Value] | None = None,
    ) -> None:
        super().__init__()
        self.storage = storage
        self.accesses = storage.accesses
        if values is not None and len(shape) > 1:
            shape = merged(shape, values, alone=innermost, is_stored=self._is_stored)
        self.shape = shape
        self.lane_dim = lane_dimension(shape) if lane_dim is None else lane_dim
        extent = shape[self.lane_dim] if shape else 1
        self.lanes = lanes or min(CHUNK, extent)
        loops = [d for d, e in enumerate(shape) if e > 1 and d not in (self.lane_dim, innermost)]
        if extent > 1 and self.lane_dim != innermost:
            loops.append(self.lane_dim)
        if innermost is not None:
            loops.append(innermost)
        self.loops = loops
        # i8, i16, i32 and i64 are types
        self.variables = {d: f"ii{d}" if d in (8, 16, 32, 64) else f"i{d}" for d in loops}
        self.lane_level = loops.index(self.lane_dim) + 1 if self.lane_dim in loops else 0
        self.code: list[list[str]] = [[] for _ in range(len(loops) + 1)]
        self.after: list[list[str]] = [[] for _ in range(len(loops) + 1)]
        self.memo: dict[object, Form] = {}
        self.positions: dict[tuple[Index, tuple[int, ...]], Form] = {}
        self.name_counts: dict[str, int] = {}
        self.teed: list[Value] = []
        self.looks_ahead = False  # only evaluates what another nest will report
        self.index: Index = tuple(self._own_index(d) for d in range(len(shape)))

    def _own_index(self, dim: int) -> Form:
        if dim not in self.loops:
            return constant_index(0)
        level, variable = self.loops.index(dim) + 1, self.variables[dim]
        if dim == self.lane_dim and self.lanes > 1:
            return Form("affine", I32, variable, level, 1, multiple=self.lanes)
        return Form("uniform", I32, variable, level)

    def _is_stored(self, value: Value) -> bool:
        return value.producer is None or self.storage.is_filled(value) or not is_virtual(value)

    @property
    def depth(self) -> int:
        return len(self.loops)

    def step_of(self, dim: int) -> int:
        return self.lanes if dim == self.lane_dim else 1

    def render(self, innermost: list[str] | None = None) -> list[str]:
        """Return the lines of the nest; `innermost` replaces the innermost loop if the caller writes it itself."""
        out: list[str] = ["{"]
        bodies = len(self.loops) - (1 if innermost is not None else 0)
        for level, dim in enumerate(self.loops[:bodies]):
            out += self.code[level]
            variable = self.variables[dim]
            step = self.step_of(dim)
            move = f"++{variable}" if step == 1 else f"{variable} += {step}"
            out.append(f"for (i32 {variable} = 0; {variable} < {self.shape[dim]}; {move}) {{")
        out += self.code[bodies]
        if innermost is not None:
            out += innermost
        for level in range(bodies, 0, -1):
            out += self.after[level]
            out.append("}")
        return self.settled([*out, *self.after[0], "}"])

    # -- statements --

    def name(self, stem: str) -> str:
        stem = self.storage.identifier(stem)
        count = self.name_counts.get(stem, 0)
        self.name_counts[stem] = count + 1
        if count or stem in self.storage.scalar_names:
            return self.name(f"{stem}_{count + 1}")
        return stem

    def let(self, name: str, type_: str, expr: str, level: int) -> str:
        name = self.name(name)
        self.code[level].append(declare_const(type_, name, expr))
        return name

    def do(self, statement: str, level: int) -> None:
        self.code[level].append(statement)

    # -- forms --

    def uniform(self, name: str, element: Scalar | Pointer, expr: str, level: int) -> Form:
        return Form("uniform", element, self.let(name, c_type(element), expr, level), level)

    def vector(self, name: str, element: Scalar | Pointer, expr: str, level: int) -> Form:
        level = max(level, self.lane_level)
        return Form("vector", element, self.let(name, c_type(element, self.lanes), expr, level), level)

    def vec(self, form: Form) -> str:
        """Return the form as a vector expression (a scalar one in a nest without lanes)."""
        return form.vec(self.lanes)

    def wide(self, form: Form) -> str:
        """Return an integer form as i64 lanes (sign-extended)."""
        return form.wide(self.lanes)

    # -- index arithmetic --

    def plus(self, a: Form, b: Form) -> Form:
        """Return the sum of two i32 index forms."""
        if b.expr == "0" and b.kind == "uniform":
            return a
        if a.expr == "0" and a.kind == "uniform":
            return b
        level = max(a.level, b.level)
        if "vector" in (a.kind, b.kind):
            return Form("vector", I32, f"({self.vec(a)} + {self.vec(b)})", max(level, self.lane_level))
        both = a.expr.isdigit() and b.expr.isdigit()
        expr = str(int(a.expr) + int(b.expr)) if both else f"({a.expr} + {b.expr})"
        step = add_steps(a.step, b.step)
        kind: Literal["affine", "uniform"] = "uniform" if step == 0 else "affine"
        return Form(kind, I32, expr, level, step, multiple=gcd(a.multiple, b.multiple))

    def times(self, a: Form, factor: int) -> Form:
        if factor == 1:
            return a
        if factor == 0:
            return constant_index(0)
        if a.kind == "vector":
            return replace(a, expr=f"({a.expr} * {factor})")
        expr = str(int(a.expr) * factor) if a.expr.isdigit() else f"{a.expr} * {factor}"
        return replace(a, expr=expr, step=multiply_steps(a.step, factor), multiple=a.multiple * factor)

    def linear(self, index: Index, shape: tuple[int, ...]) -> Form:
        """Return the row-major position of an index; an index that `delinear` made gives its original position."""
        if (index, shape) in self.positions:
            return self.positions[index, shape]
        total, stride = constant_index(0), 1
        for form, extent in zip(reversed(index), reversed(shape), strict=True):
            if extent > 1:
                total = self.plus(self.times(form, stride), total)
            stride *= extent
        return total

    def delinear(self, linear: Form, shape: tuple[int, ...]) -> Index:
        """Return the index into `shape` of a row-major position; extents are powers of two."""
        index: list[Form] = []
        stride = 1
        is_affine = linear.kind == "affine"
        for dim, extent in reversed(list(enumerate(shape))):
            if extent == 1:
                index.append(constant_index(0))
                continue
            first = stride == 1
            outermost = all(e == 1 for e in shape[:dim])
            shift = f" >> {stride.bit_length() - 1}" if stride > 1 else ""
            if is_affine and not (
                linear.step == 1 and linear.multiple % self.lanes == 0 and (not first or extent >= self.lanes)
            ):
                linear = Form("vector", I32, self.vec(linear), max(linear.level, self.lane_level))
                is_affine = False
            text = f"({linear.expr}{shift})" if shift else linear.expr
            wrapped = text if outermost else f"({text} & {extent - 1})"
            if linear.kind == "vector":
                index.append(Form("vector", I32, wrapped, linear.level))
            elif is_affine and first:
                index.append(
                    Form("affine", I32, wrapped, linear.level, 1, multiple=gcd(linear.multiple, extent))
                )
            else:
                index.append(
                    Form("uniform", I32, wrapped, linear.level, multiple=max(1, linear.multiple // stride))
                )
            stride *= extent
        self.positions[tuple(reversed(index)), shape] = linear
        return tuple(reversed(index))

    def view_index(self, op: Op, index: Index) -> Index:
        """Return the index into the operand of a view for this index into its result."""
        source = shape_of(op.operands[0].type)
        if op.name == "tt.expand_dims":
            axis = op.attrs["axis"]
            return index[:axis] + index[axis + 1 :]
        if op.name == "tt.broadcast":
            return tuple(constant_index(0) if e == 1 else i for i, e in zip(index, source, strict=True))
        if op.name == "tt.trans":
            inner: list[Form] = [constant_index(0)] * len(source)
            for form, dim in zip(index, op.attrs["order"], strict=True):
                inner[dim] = form
            return tuple(inner)
        assert op.name == "tt.reshape"
        return self.delinear(self.linear(index, shape_of(op.result.type)), source)

    # -- values --

    def at_own_index(self, value: Value) -> Form:
        return self.eval(value, self.index)

    def eval(self, value: Value, index: Index) -> Form:
        if not isinstance(value.type, Tensor):
            return Form("uniform", element_of(value.type), self.storage.scalar(value), 0)
        key = (value, tuple((f.kind, f.expr, str(f.step)) for f in index))
        if key not in self.memo:
            self.memo[key] = self.compute(value, index)
        return self.memo[key]

    def compute(self, value: Value, index: Index) -> Form:
        if self.storage.is_filled(value):
            buffer = self.storage.buffers[value]
            return self.read(buffer, self.linear(index, buffer.shape), value.name)
        op = value.producer
        if op is None:
            raise AssertionError(f"{value} has no storage")
        form = self.define(op, value, index)
        if value in self.storage.plan.buffered:
            form = self.tee(value, form, index)
        return form

    def tee(self, value: Value, form: Form, index: Index) -> Form:
        buffer = self.storage.buffer_for(value)
        if form.kind != "vector" and self.lanes > 1:
            form = self.vector(value.name, form.element, self.vec(form), form.level)
        self.write(buffer, self.linear(index, buffer.shape), form)
        self.teed.append(value)
        return form

    def define(self, op: Op, value: Value, index: Index) -> Form:
        name = op.name
        element = element_of(value.type)
        if name == "arith.constant":
            number = op.attrs["value"]
            if isinstance(number, list | bytes):
                return self.read(self.storage.table(op), self.linear(index, shape_of(value.type)), value.name)
            return Form("uniform", element, literal(element, number), 0)
        if name == "ub.poison":
            return Form("uniform", element, literal(element, 0), 0)
        if name == "tt.splat":
            return self.eval(op.operands[0], ())
        if name == "tt.make_range":
            return self.plus(index[0], constant_index(op.attrs["start"]))
        if name == "tt.reshape" and self.storage.is_filled(op.operands[0]):
            source = self.storage.buffers[op.operands[0]]
            return self.read(source, self.linear(index, shape_of(value.type)), value.name)
        if name in ("tt.expand_dims", "tt.broadcast", "tt.trans", "tt.reshape"):
            return self.eval(op.operands[0], self.view_index(op, index))
        if name == "tt.split":
            side = constant_index(op.results.index(value))
            return self.eval(op.operands[0], (*index, side))
        if name == "tt.gather":
            axis = op.attrs["axis"]
            position = self.eval(op.operands[1], index)
            if position.kind != "uniform":
                lanes = vector_of("i32", self.lanes)
                text = self.vec(position)
                text = text if position.element == I32 else f"convert<{lanes}>({text})"
                position = Form("vector", I32, text, max(position.level, self.lane_level))
            return self.eval(op.operands[0], (*index[:axis], position, *index[axis + 1 :]))
        if name == "tt.addptr":
            return self.addptr(op, value, index)
        if name == "tt.load":
            return self.load(op, value, index)
        if name in ELEMENTWISE:
            return self.elementwise(op, value, index)
        raise Unsupported(op)

    def elementwise(self, op: Op, value: Value, index: Index) -> Form:
        forms = [self.eval(v, index) for v in op.operands]
        element = element_of(value.type)
        write = ELEMENTWISE[op.name].write
        level = max(f.level for f in forms)
        if not self.looks_ahead and (integer := self.accesses.watched(op)):
            self.watch(op, forms, level, integer)
        if all(f.kind == "uniform" for f in forms):
            return self.uniform(value.name, element, write(op, [f.expr for f in forms], 1), level)
        if affine := self.affine(op, value, forms):
            return affine
        text = write(op, [self.vec(f) for f in forms], self.lanes)
        return self.vector(value.name, element, text, level)

    def affine(self, op: Op, value: Value, forms: list[Form]) -> Form | None:
        """Return the affine form of integer arithmetic that keeps lanes equally spaced, else None.

        Sums and products are exact modulo 2^n. Widening assumes that lanes of one chunk don't wrap around, as
        vector loads on a GPU do; it is therefore used for addresses and their masks only (`exact` undoes it).
        """
        element = element_of(value.type)
        if any(f.kind not in ("uniform", "affine") for f in forms) or not isinstance(element, Scalar):
            return None
        # narrow integers wrap around within a tile; 32-bit and wider element counts do not
        if element.is_float or any(f.element.bits < 32 for f in (*forms, Form("uniform", element, "", 0))):
            return None
        name = op.name
        step: Step
        if name == "arith.addi":
            step = add_steps(forms[0].step, forms[1].step)
        elif name == "arith.subi":
            step = add_steps(forms[0].step, multiply_steps(forms[1].step, -1))
        elif name == "arith.muli" and forms[1].kind == "uniform":
            step = multiply_steps(forms[0].step, as_step(forms[1].expr))
        elif name == "arith.muli" and forms[0].kind == "uniform":
            step = multiply_steps(forms[1].step, as_step(forms[0].expr))
        elif name in ("arith.extsi", "arith.trunci", "arith.index_cast"):
            step = forms[0].step
        else:
            return None
        level = max(f.level for f in forms)
        write = ELEMENTWISE[name].write
        expr = self.let(value.name, c_type(element), write(op, [f.expr for f in forms], 1), level)
        exact = None
        if name == "arith.extsi" or any(f.exact for f in forms):

            def exact() -> str:
                return self.vector(
                    f"{value.name}_lanes", element, write(op, [self.vec(f) for f in forms], self.lanes), level
                ).expr

        return Form("affine", element, expr, level, step, exact=exact)

    # -- memory --

    def addptr(self, op: Op, value: Value, index: Index) -> Form:
        pointer, offset = (self.eval(v, index) for v in op.operands)
        element = element_of(value.type)
        assert isinstance(element, Pointer)
        level = max(pointer.level, offset.level)
        if pointer.kind == "vector":
            size = pointee_size(element)
            return self.vector(value.name, element, f"{pointer.expr} + {self.wide(offset)} * {size}ll", level)
        if offset.kind in ("uniform", "affine"):
            base = self.let(value.name, c_type(element), f"{pointer.expr} + {offset.expr}", level)
            step = add_steps(pointer.step, offset.step)
            if pointer.kind == "offsets":
                return replace(
                    pointer, expr=base, level=level, offset=self.shifted(pointer.offset, offset.step)
                )
            return Form("affine" if step != 0 else "uniform", element, base, level, step)
        if pointer.kind == "offsets":
            assert pointer.offset
            total = f"{self.wide(pointer.offset)} + {self.wide(offset)}"
            summed = self.vector(f"{value.name}_offsets", I64, total, level)
            return replace(pointer, level=level, offset=summed)
        return Form("offsets", element, pointer.expr, level, offset=self.shifted(offset, pointer.step))

    def shifted(self, offset: Form | None, step: Step) -> Form:
        """Return vector offsets with another lane step added."""
        assert offset
        if step == 0:
            return offset
        wide = vector_of("i64", self.lanes)
        return self.vector("offsets", I64, f"{self.wide(offset)} + ramp<{wide}>(0, {step})", offset.level)

    def first_lanes(self, mask: Value, index: Index) -> tuple[str, int] | None:
        """Return n, as an i64 expression, and its level if the mask holds for exactly the first n lanes, else None."""
        op = mask.producer
        if op is None or mask in self.storage.buffers or not self.accesses.counts_lanes():
            return None
        if op.name in ("tt.expand_dims", "tt.broadcast", "tt.trans"):
            return self.first_lanes(op.operands[0], self.view_index(op, index))
        if op.name == "arith.andi":
            sides = []
            for side in op.operands:
                count = self.first_lanes(side, index)
                if count is None:
                    form = self.eval(side, index)
                    if form.kind != "uniform":
                        return None
                    count = (f"({form.expr} ? {self.lanes}ll : 0ll)", form.level)
                sides.append(count)
            (a, level_a), (b, level_b) = sides
            return f"least({a}, {b})", max(level_a, level_b)
        if op.name == "arith.cmpi" and predicate(op) in ("slt", "sle", "sgt", "sge"):
            left, right = (self.eval(v, index) for v in op.operands)
            if predicate(op) in ("sgt", "sge"):
                left, right = right, left
            if left.kind == "affine" and left.step == 1 and right.kind == "uniform":
                counting = op.operands[1 if predicate(op) in ("sgt", "sge") else 0]
                self.refuse_wrapping(op, counting, index)
                extra = " + 1" if predicate(op) in ("sle", "sge") else ""
                return f"((i64){right.expr} - {left.expr}{extra})", max(left.level, right.level)
        return None

    def load(self, op: Op, value: Value, index: Index) -> Form:
        pointer = self.eval(op.operands[0], index)
        element = element_of(value.type)
        mask = op.operands[1] if len(op.operands) > 1 else None
        other = self.eval(op.operands[2], index) if len(op.operands) > 2 else None
        count = self.first_lanes(mask, index) if mask is not None and self.lanes > 1 else None
        masked = self.eval(mask, index) if mask is not None and count is None else None
        level = max(f.level for f in (pointer, masked, other) if f is not None)
        level = max(level, count[1] if count else 0)
        uniform = masked is None or masked.kind == "uniform"
        self.settle(op, (masked.expr if uniform else self.vec(masked)) if masked else None, index, level)
        if (
            pointer.kind == "uniform"
            and count is None
            and uniform
            and (other is None or other.kind == "uniform")
        ):
            text = self.accesses.load_one(
                op, pointer.expr, masked.expr if masked else None, other.expr if other else None
            )
            return self.uniform(value.name, element, text, level)

        type_ = vector_of(stored_type(element), self.lanes)
        rest = self.vec(other) if other else f"{type_}{{}}"
        if other and element == I1:
            rest = f"convert<{type_}>({rest})"
        if index == self.index:
            self.prefetch(op, pointer)
        chunk = Chunk(pointer, self.lanes, count[0] if count else None, masked)
        text = self.accesses.load_chunk(op, chunk, rest)
        if element == I1:
            text = f"mask({text} != 0)"
        return self.vector(value.name, element, text, level)

    def prefetch(self, op: Op, pointer: Form) -> None:
        """Prefetch the next rows of a tile whose rows are short and not adjacent: the processor predicts where a long
        row continues, but not where the next one begins."""
        pointers, level = op.operands[0], self.depth - 1
        if not self.accesses.prefetches or level < 1 or self.lane_level != self.depth:
            return
        if self.lanes > CHUNK and self.lanes == self.shape[self.lane_dim]:
            return  # a row is one access: the processor itself looks that many rows ahead
        if (pointer.kind, pointer.step) != ("affine", 1) or pointers in self.storage.plan.reads_memory:
            return
        assert isinstance(pointer.element, Pointer)
        row, size = self.loops[-2], self.shape[self.lane_dim] * pointee_size(pointer.element)
        ahead = max(2, _LONG_ROW // size)
        if not _CACHE_LINE <= size <= _LONG_ROW or ahead >= self.shape[row] or strides(pointers)[row] == 0:
            return
        index = list(self.index)
        later = f"({self.variables[row]} + {ahead})"
        index[row] = Form("uniform", I32, later, level)
        index[self.lane_dim] = constant_index(0)
        begin = self.eval(pointers, tuple(index))
        purpose = "WRITE" if op.name == "tt.store" else "READ"
        self.do(f"if ({later} < {self.shape[row]}) prefetch<{purpose}, {size}>({begin.expr});", level)

    def store(self, op: Op) -> None:
        pointer_value, stored_value = op.operands[:2]
        mask = op.operands[2] if len(op.operands) > 2 else None
        pointer, form = self.at_own_index(pointer_value), self.at_own_index(stored_value)
        element = element_of(stored_value.type)
        count = self.first_lanes(mask, self.index) if mask is not None and self.lanes > 1 else None
        masked = self.at_own_index(mask) if mask is not None and count is None else None
        self.settle(op, self.vec(masked) if masked else None, self.index, self.depth)
        text = self.vec(form)
        if self.lanes == 1:
            text = self.accesses.store_one(op, pointer.expr, masked.expr if masked else None, text)
        else:
            if element == I1:
                text = f"convert<{vector_of(stored_type(element), self.lanes)}>({text} & 1)"
            self.prefetch(op, pointer)
            chunk = Chunk(pointer, self.lanes, count[0] if count else None, masked)
            text = self.accesses.store_chunk(op, chunk, text)
        self.do(text, self.depth)

    # -- buffers --

    def read(self, buffer: Buffer, linear: Form, name: str) -> Form:
        element = buffer.element
        is_bit = element == I1
        if linear.kind == "uniform":
            text = f"{buffer.name}[{linear.expr}]"
            return self.uniform(name, element, f"{text} != 0" if is_bit else text, linear.level)
        stored = stored_type(element)
        type_ = vector_of(stored, self.lanes)
        base = f"(const i64 *){buffer.name}" if isinstance(element, Pointer) else buffer.name
        if linear.kind == "vector":
            text = f"gather<{type_}>({base}, {linear.expr})"
        elif linear.step == 1:
            text = f"load<{type_}>({base} + {linear.expr})"
        else:
            text = f"load_strided<{type_}>({base} + {linear.expr}, {linear.step})"
        if is_bit:
            text = f"mask({text})"
        return self.vector(name, element, text, linear.level)

    def write(self, buffer: Buffer, linear: Form, form: Form, text: str | None = None) -> None:
        """Write buffer[linear] = form, in the innermost loop. Masks are stored as bytes of 0 / -1."""
        text = text or self.vec(form)
        is_bit = buffer.element == I1
        if self.lanes == 1:
            text = f"-(i8){text}" if is_bit else text
            self.do(f"{buffer.name}[{linear.expr}] = {text};", self.depth)
            return
        stored = stored_type(buffer.element)
        type_ = vector_of(stored, self.lanes)
        base = f"(i64 *){buffer.name}" if isinstance(buffer.element, Pointer) else buffer.name
        text = f"convert<{type_}>({text})" if is_bit else text
        if linear.kind == "affine" and linear.step == 1:
            self.do(f"store<{type_}>({base} + {linear.expr}, {text});", self.depth)
        elif linear.kind == "affine":
            self.do(f"store_strided<{type_}>({base} + {linear.expr}, {linear.step}, {text});", self.depth)
        else:
            raise AssertionError("a buffer is written at an index of its nest")
