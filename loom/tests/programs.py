"""Random Triton programs: generated, written as source, and evaluated step by step by the reference.

A program is a list of steps. Each applies one operation to earlier values and names its result; loads and
stores are steps too, and loops and conditionals are steps that contain steps. One such list is both a Triton
kernel (`Program.source`) and a computation on NumPy arrays (`Machine`).

Results of exact operations are compared bit for bit. The result of any other operation is always stored; the
evaluation checks the stored value against the reference's interval, and continues from the stored value. So the
error of one operation never weakens the check of the next.
"""

from __future__ import annotations

import importlib.util
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import numpy as np
import torch
from hypothesis import strategies as st
from reference import (
    BF16,
    BITS,
    BOOL,
    COMPARISONS,
    DTYPES,
    F32,
    F64,
    FLOATS,
    I32,
    I64,
    INTS,
    NUMBERS,
    OPERATIONS,
    U32,
    U64,
    WIDE_FLOATS,
    Array,
    DType,
    Shape,
    Within,
    sample,
)

T = TypeVar("T")
GRID = 2  # instances of a program in one launch
LAUNCHES = 2  # with other data, strides, bounds and trip counts
ROWS = 4  # parts of a buffer that an index selects from
GUARD = 16  # elements on both sides of a buffer that nobody may touch

# ---- steps -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Var:
    """A value of the program, with its name in the source."""

    name: str
    shape: Shape
    dtype: DType
    literal: float | None = None  # set if the name is a Python number


@dataclass(frozen=True)
class Buffer:
    """An argument that points to memory: `extent` elements for each instance of the program."""

    name: str
    dtype: DType
    extent: int


Number = int | str  # a literal, or the name of an argument


@dataclass(frozen=True)
class Access:
    """Mapping of a tile's elements to a buffer's elements, and the subset that is touched."""

    buffer: Buffer
    shape: Shape
    base: int = 0
    strides: tuple[Number, ...] = ()
    wide: bool = False  # 64-bit offsets
    bounds: tuple[Number | None, ...] = ()  # touched where index < bound, per dimension
    mask: Var | None = None  # touched where it is set
    row: Var | None = None  # a scalar that selects one of ROWS parts of the buffer
    offsets: Var | None = None  # a tile of integers, in place of strides
    pointer: str = ""  # a loop variable with the addresses, which advance by `pace` in each iteration
    pace: Number = 0
    turn: Var | None = None

    @property
    def unique(self) -> bool:
        """Return whether no two elements of a tile share an address."""
        return self.offsets is None and 0 not in self.strides


@dataclass(frozen=True)
class Step:
    op: str
    results: tuple[Var, ...] = ()
    args: tuple[Var, ...] = ()
    params: dict[str, Any] = field(default_factory=dict)
    access: Access | None = None  # of a load or store; of an inexact result, where it is stored
    blocks: tuple[tuple[Step, ...], ...] = ()

    @property
    def source(self) -> DType:
        return self.args[0].dtype

    @property
    def target(self) -> DType:
        return self.results[0].dtype

    @property
    def shape(self) -> Shape:
        return self.results[0].shape

    @property
    def axis(self) -> Any:
        return self.params["axis"]

    @property
    def place(self) -> Access:
        assert self.access
        return self.access


def walk(steps: Sequence[Step]) -> Iterator[Step]:
    for step in steps:
        yield step
        for block in step.blocks:
            yield from walk(block)


# ---- evaluation ------------------------------------------------------------------------------------------

Memory = dict[str, Array]  # buffers by name, with what guards them


class Mismatch(AssertionError):
    """Error: the kernel's result differs from the reference."""


@dataclass
class Machine:
    """Interpreter of an instance of a program on `memory`, next to the memory that the kernel left behind."""

    memory: Memory
    observed: Memory
    values: dict[str, Array]

    def run(self, steps: Sequence[Step]) -> None:
        for step in steps:
            match step.op:
                case "load":
                    self.load(step)
                case "store":
                    self.store(step)
                case "loop":
                    self.loop(step)
                case "if":
                    self.branch(step)
                case _:
                    self.values[step.results[0].name] = self.result(step)

    def value(self, var: Var) -> Array:
        if var.literal is not None:
            return var.dtype.apply(np.asarray, np.asarray(var.literal))
        return self.values[var.name]

    def number(self, number: Number) -> int:
        return number if isinstance(number, int) else int(self.values[number])

    def addresses(self, access: Access) -> Array:
        start = GUARD + access.base + int(self.values["pid"]) * access.buffer.extent
        if access.row is not None:
            start += int(self.value(access.row) & (ROWS - 1)) * (access.buffer.extent // ROWS)
        if access.turn is not None:
            start += int(self.value(access.turn)) * self.number(access.pace)
        if access.offsets is not None:
            offsets = self.value(access.offsets)
            return np.asarray(
                start + (offsets & offsets.dtype.type(access.buffer.extent - 1)).astype(np.int64)
            )
        where = np.full(access.shape, start)
        for index, stride in zip(np.indices(access.shape), access.strides, strict=True):
            where = where + index * self.number(stride)
        return where

    def touched(self, access: Access) -> Array:
        touched = np.ones(access.shape, bool)
        for index, bound in zip(np.indices(access.shape), access.bounds, strict=False):
            touched &= index < self.number(bound) if bound is not None else True
        return touched & self.value(access.mask) if access.mask is not None else touched

    def load(self, step: Step) -> None:
        touched, addresses = self.touched(step.place), self.addresses(step.place)
        value = step.target.decode(self.memory[step.place.buffer.name][np.where(touched, addresses, 0)])
        if step.args:
            value = np.where(touched, value, self.value(step.args[0]))
        self.values[step.results[0].name] = value

    def store(self, step: Step) -> None:
        touched, addresses = self.touched(step.place), self.addresses(step.place)
        encoded = step.source.encode(self.value(step.args[0]))
        self.memory[step.place.buffer.name][addresses[touched]] = encoded[touched]

    def loop(self, step: Step) -> None:
        carried = [self.value(v) for v in step.args]
        names = [v.name for v in step.results]
        for trip in range(self.number(step.params["trips"])):
            self.values |= dict(zip(names, carried, strict=True))
            self.values[step.params["turn"].name] = np.asarray(trip, np.int32)
            self.run(step.blocks[0])
            carried = [self.value(v) for v in step.params["next"]]
        self.values |= dict(zip(names, carried, strict=True))

    def branch(self, step: Step) -> None:
        chosen_block = 0 if self.value(step.args[0]) else 1
        self.run(step.blocks[chosen_block])
        self.values[step.results[0].name] = self.value(step.params["ends"][chosen_block])

    def result(self, step: Step) -> Array:
        result = OPERATIONS[step.op].evaluate(step, *(self.value(v) for v in step.args))
        if isinstance(result, Within):
            return self.confirmed(step, result)
        assert result.shape == step.shape, (step, result.shape)
        return result.astype(step.target.array, copy=False)

    def confirmed(self, step: Step, right: Within) -> Array:
        """Return the value that the kernel stored, after checking it."""
        stored = self.observed[step.place.buffer.name][self.addresses(step.place)]
        kernel = step.target.decode(stored)
        wrong = ~right.holds(step.target, kernel)
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            low, high = (np.broadcast_to(end, step.shape).flat[first] for end in (right.low, right.high))
            operands = [self.value(v).flat[first] for v in step.args if v.shape == step.shape]
            raise Mismatch(
                f"{step.results[0].name} = {step.op}: {int(wrong.sum())} elements are wrong, first "
                f"number {first}: {kernel.flat[first]!r} is not within {low!r} and {high!r} for {operands}"
            )
        return kernel


# ---- programs --------------------------------------------------------------------------------------------

HEAD = """\
import triton
import triton.language as tl


@triton.jit
def both(a, b):
    return a & b


@triton.jit(do_not_specialize=[{numbers}])
def kernel({arguments}):
    pid = tl.program_id(0)
"""


@dataclass(frozen=True, repr=False)
class Program:
    steps: tuple[Step, ...]
    buffers: tuple[Buffer, ...]
    numbers: dict[str, tuple[int, ...]]  # i32 arguments: their values in each launch
    reals: dict[str, tuple[float, ...]]  # f32 arguments
    seed: int  # of the data

    def __repr__(self) -> str:
        return f"\n{self.source}    # launched with {self.numbers | self.reals}"

    @property
    def source(self) -> str:
        numbers = ", ".join(f'"{name}"' for name in self.numbers)
        arguments = ", ".join([*(b.name for b in self.buffers), *self.numbers, *self.reals])
        return HEAD.format(numbers=numbers, arguments=arguments) + "".join(_written(self.steps, "    "))

    @property
    def operations(self) -> set[str]:
        return {step.op for step in walk(self.steps)}

    @property
    def stores(self) -> int:
        return sum(step.op == "store" for step in walk(self.steps))

    def kernel(self, directory: Path) -> Any:
        """Return the kernel, from a file of its own: Triton reads a function's source from its file."""
        path = directory / f"program_{zlib.crc32(self.source.encode()):08x}.py"
        path.write_text(self.source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.kernel

    def memory(self, launch: int) -> Memory:
        """Return memory for a launch: numbers where it is loaded, and 0xA5 everywhere else."""
        random = np.random.default_rng([self.seed, launch])
        loaded = {step.place.buffer for step in walk(self.steps) if step.op == "load"}
        memory = {}
        for buffer in self.buffers:
            size = buffer.extent * GRID
            content = np.full(size + 2 * GUARD, 0xA5A5A5A5A5A5A5A5, np.uint64).astype(buffer.dtype.word)
            if buffer in loaded:
                content[GUARD:-GUARD] = buffer.dtype.encode(sample(buffer.dtype, size, random))
            memory[buffer.name] = content
        return memory

    def launched(self, kernel: Any, launch: int) -> Memory:
        """Return the memory after a launch of the kernel."""
        memory = self.memory(launch)
        tensors = [torch.from_numpy(memory[b.name])[GUARD:].view(b.dtype.torch) for b in self.buffers]
        scalars = [values[launch] for values in (self.numbers | self.reals).values()]
        kernel[(GRID,)](*tensors, *scalars)
        return memory

    def evaluated(self, launch: int, observed: Memory) -> Memory:
        """Return the memory after a launch, by the reference."""
        memory = self.memory(launch)
        for pid in range(GRID):
            values: dict[str, Array] = {"pid": np.asarray(pid, np.int32)}
            values |= {name: np.asarray(v[launch], np.int32) for name, v in self.numbers.items()}
            values |= {name: np.asarray(v[launch], np.float32) for name, v in self.reals.items()}
            Machine(memory, observed, values).run(self.steps)
        return memory

    def check(self, launch: int, observed: Memory) -> None:
        """Assert that every byte of memory is right, except those of NaNs."""
        with np.errstate(all="ignore"):
            expected = self.evaluated(launch, observed)
        stored = {step.place.buffer: step.args[0].name for step in walk(self.steps) if step.op == "store"}
        for buffer in [*stored, *(b for b in self.buffers if b not in stored)]:
            kernel, right = observed[buffer.name], expected[buffer.name]
            a, b = buffer.dtype.decode(kernel), buffer.dtype.decode(right)
            nan = np.isnan(a) & np.isnan(b) if buffer.dtype.kind == "f" else False
            wrong = np.flatnonzero((kernel != right) & ~np.asarray(nan))
            if wrong.size:
                first = int(wrong[0])
                raise Mismatch(
                    f"launch {launch}, {buffer} with {stored.get(buffer)}: {wrong.size} elements are wrong, "
                    f"first number {first - GUARD}: {a[first]!r} is not {b[first]!r}"
                )


# -- as source --


def _written(steps: Sequence[Step], indent: str) -> Iterator[str]:
    inner = indent + "    "
    for step in steps:
        names = ", ".join(v.name for v in step.results)
        args = ", ".join(v.name for v in step.args)
        match step.op:
            case "load":
                other = f", other={args}" if args else ""
                yield f"{indent}{names} = tl.load({_address(step.place)}{_mask(step.place)}{other})\n"
            case "store":
                yield f"{indent}tl.store({_address(step.place)}, {args}{_mask(step.place)})\n"
            case "loop":
                turn, trips, walks = (step.params[key] for key in ("turn", "trips", "walks"))
                for access in walks:
                    yield f"{indent}{access.pointer} = {_address(replace(access, pointer=''))}\n"
                yield f"{indent}{names} = {args}\n"
                if step.params["while"]:
                    yield f"{indent}{turn.name} = tl.full((), 0, tl.int32)\n"
                    yield f"{indent}while {turn.name} < {trips}:\n"
                else:
                    yield f"{indent}for {turn.name} in range({trips}):\n"
                yield from _written(step.blocks[0], inner)
                yield f"{inner}{names} = {', '.join(v.name for v in step.params['next'])}\n"
                for access in walks:
                    yield f"{inner}{access.pointer} += {access.pace}\n"
                if step.params["while"]:
                    yield f"{inner}{turn.name} += 1\n"
            case "if":
                heads = (f"if {args}:", "else:")
                for head, block, end in zip(heads, step.blocks, step.params["ends"], strict=True):
                    yield f"{indent}{head}\n"
                    yield from _written(block, inner)
                    yield f"{inner}{names} = {end.name}\n"
            case _:
                params = {"dtype": step.target, "shape": step.shape, **step.params}
                text = OPERATIONS[step.op].text.format(*(v.name for v in step.args), **params)
                yield f"{indent}{names} = {text}\n"


def _index(access: Access, dim: int) -> str:
    rank = len(access.shape)
    index = f"[{', '.join(':' if d == dim else 'None' for d in range(rank))}]" if rank > 1 else ""
    return f"tl.arange(0, {access.shape[dim]}){'.to(tl.int64)' if access.wide else ''}{index}"


def _address(access: Access) -> str:
    if access.pointer:
        return access.pointer
    terms = [access.buffer.name, f"(pid * {access.buffer.extent} + {access.base})"]
    if access.row is not None:
        terms.append(f"({access.row.name} & {ROWS - 1}).to(tl.int32) * {access.buffer.extent // ROWS}")
    if access.offsets is not None:
        terms.append(f"({access.offsets.name} & {access.buffer.extent - 1})")
    for dim, stride in enumerate(access.strides):
        terms.append(_index(access, dim) if stride == 1 else f"{_index(access, dim)} * {stride}")
    return " + ".join(terms)


def _mask(access: Access) -> str:
    terms = [f"({_index(access, dim)} < {n})" for dim, n in enumerate(access.bounds) if n is not None]
    terms += [access.mask.name] if access.mask is not None else []
    return f", mask={' & '.join(terms)}" if terms else ""


# ---- how a program is drawn ------------------------------------------------------------------------------

STEPS = 32  # of a program, at most, not counting those in loops
LIMIT = 2048  # elements of a tile
EXTENTS = (1, 2, 4, 8, 16, 32, 64)
TRIPS = 3  # of a loop, at most
INEXACT = ("exp", "exp2", "log", "log2", "sin", "cos", "erf", "rsqrt", "sigmoid")
ORDERING = ("minimum", "maximum", "least", "most")


class Author:
    """Generator of one program. A step depends on random numbers of its own and on the values available, so that
    a program with some steps left out is still much like the complete one."""

    def __init__(self, salt: int) -> None:
        self.salt = salt
        self.random = Random(salt)
        self.steps: list[Step] = []  # of the block being written
        self.visible: list[Var] = []  # values that the next step may use
        self.accesses: list[Access] = []  # loads that the next step may repeat, or store over
        self.turns: list[Var] = []  # the counters of the loops around the next step
        self.buffers: list[Buffer] = []
        self.numbers: dict[str, tuple[int, ...]] = {}
        self.reals: dict[str, tuple[float, ...]] = {}
        self.depth = 0  # of loops and conditionals
        self.count = 0

    # -- choices --

    def choose(self, options: Sequence[T]) -> T:
        return self.random.choice(options)

    def chance(self, percent: int) -> bool:
        return self.random.random() * 100 < percent

    def shape(self) -> Shape:
        shape: Shape = ()
        for _ in range(self.choose((1, 2, 2, 3))):
            shape += (min(self.choose(EXTENTS), LIMIT // math.prod(shape)),)
        return shape

    def find(self, dtypes: Sequence[DType], fits: Callable[[Var], bool]) -> Var | None:
        """Return a visible value of one of these types, preferably a late one, or one cast to such a type."""
        matches = [v for v in self.visible if fits(v)]
        typed = [v for v in matches if v.dtype in dtypes]
        if typed and (len(typed) == len(matches) or not self.chance(20)):
            return typed[-1 - int(len(typed) * self.random.random() ** 2)]
        return self.cast(self.choose(matches), self.choose(dtypes)) if matches else None

    def get(self, dtypes: Sequence[DType], tile: bool = False) -> Var:
        """Return a value like `find`; there always is one, because a program begins with a tile."""
        value = self.find(dtypes, lambda v: not tile or v.shape != ())
        assert value
        return value

    def name(self, stem: str = "v") -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def number(self, values: Sequence[int]) -> str:
        """Return the name of an argument with these values in the launches."""
        name = self.name("n")
        self.numbers[name] = tuple(values)
        return name

    def number_each(self, low: int, high: int) -> str:
        return self.number([self.random.randint(low, high) for _ in range(LAUNCHES)])

    # -- steps --

    def do(self, op: str, args: Sequence[Var], shape: Shape, dtype: DType, **params: Any) -> Var:
        var = Var(self.name(), shape, dtype)
        self.steps.append(Step(op, (var,), tuple(args), params))
        self.visible.append(var)
        return var

    def near(self, op: str, args: Sequence[Var], shape: Shape, dtype: DType, **params: Any) -> Var:
        """Add a step with an inexact result, which is stored at once."""
        var = self.do(op, args, shape, dtype, **params)
        access = self.place(dtype, shape, unique=True)
        self.steps[-1] = replace(self.steps[-1], access=access)
        self.steps.append(Step("store", (), (var,), access=access))
        return var

    def cast(self, x: Var, dtype: DType) -> Var:
        return x if x.dtype is dtype else self.do("cast", [x], x.shape, dtype)

    def match(self, shape: Shape, dtypes: Sequence[DType]) -> tuple[Var, Shape]:
        """Return a value that broadcasts against this shape, with new dimensions if necessary, and their common
        shape. There always is one if the shape is that of visible values."""
        value = self.find(dtypes, lambda v: _broadcast(_expanded(v.shape, shape), shape) is not None)
        assert value
        expanded = _expanded(value.shape, shape)
        if expanded != value.shape:
            index = ", ".join("None" if new else ":" for new in _new_dims(value.shape, shape))
            value = self.do("index", [value], expanded, value.dtype, index=index)
        joint = _broadcast(expanded, shape)
        assert joint is not None
        return value, joint

    def pair(self, op: str, a: Var, result: DType, literal: bool = False, **params: Any) -> Var:
        """Add a binary step; occasionally with a Python number on the right, or with the operands swapped."""
        if literal and a.dtype is not BOOL and self.chance(15):
            # a number next to a 16-bit float has the type that the two are divided in
            number = self.literal(result if a.dtype.kind == "f" and result is not BOOL else a.dtype)
            return self.do(op, [a, number], a.shape, result, **params)
        b, shape = self.match(a.shape, (a.dtype,))
        return self.do(op, [b, a] if self.chance(30) else [a, b], shape, result, **params)

    def literal(self, dtype: DType) -> Var:
        if dtype.kind == "f":
            value: float = self.choose([1.0, 0.5, 2.0, 3.0, -1.5, 0.1])
        else:
            value = self.choose([1, 2, 3, 7, 5, 100]) * (-1 if dtype.kind == "i" and self.chance(30) else 1)
        return Var(f"({value!r})", (), dtype, value)

    # -- memory --

    def place(self, dtype: DType, shape: Shape, unique: bool) -> Access:
        """Return an access to a new buffer: elements in any order, with any stride, backward, or all the same."""
        order = self.choose([tuple(range(len(shape))), *_permutations(len(shape))])
        factors = [-1 if self.chance(8) else 0 if not unique and self.chance(8) else 1 for _ in shape]
        passed = self.chance(30)
        layouts = []
        for _ in range(LAUNCHES if passed else 1):
            step, layout = self.choose((1, 1, 1, 2, 3)), [0] * len(shape)
            for dim in reversed(order):
                layout[dim] = step * factors[dim]
                step = step * shape[dim] + self.choose((0, 0, 1, 5))
            layouts.append(layout)
        spans = [[s * (e - 1) for s, e in zip(layout, shape, strict=True)] for layout in layouts]
        base = max(-sum(min(s, 0) for s in span) for span in spans)
        extent = base + max(sum(max(s, 0) for s in span) for span in spans) + 1
        strides: tuple[Number, ...] = tuple(layouts[0])
        if passed:
            strides = tuple(self.number([layout[d] for layout in layouts]) for d in range(len(shape)))
        self.buffers.append(Buffer(self.name("p"), dtype, extent))
        return Access(self.buffers[-1], shape, base, strides, wide=self.chance(20))

    def enlarged(self, access: Access, extent: int) -> Access:
        buffer = replace(access.buffer, extent=extent)
        self.buffers[self.buffers.index(access.buffer)] = buffer
        return replace(access, buffer=buffer)

    def in_row(self, access: Access, row: Var) -> Access:
        return replace(self.enlarged(access, access.buffer.extent * ROWS), row=row)

    def masked(self, access: Access) -> Access:
        if access.shape and access.offsets is None and self.chance(60):
            bounds = [self.number_each(0, e + 1) if self.chance(60) else None for e in access.shape]
            return replace(access, bounds=tuple(bounds))
        return replace(access, mask=self.find((BOOL,), lambda v: v.shape == access.shape))

    def load(self) -> Var:
        shape = () if self.visible and self.chance(10) else self.shape()
        access = self.place(self.choose(DTYPES), shape, unique=False)
        rows = self.turns or [v for v in self.visible if v.dtype in INTS and not v.shape]
        if rows and self.chance(70 if self.depth else 20):
            access = self.in_row(access, self.choose(rows))
        return self.load_from(access)

    def load_from(self, access: Access) -> Var:
        self.accesses.append(access)
        masked = self.masked(access) if self.chance(35) else access
        off = masked.mask is not None or any(bound is not None for bound in masked.bounds)
        other = (self.constant(access.buffer.dtype, access.shape),) if off else ()
        var = Var(self.name(), access.shape, access.buffer.dtype)
        self.steps.append(Step("load", (var,), other, access=masked))
        self.visible.append(var)
        return var

    def load_scattered(self) -> Var:
        offsets = self.get(INTS, tile=True)
        self.buffers.append(Buffer(self.name("p"), self.choose(DTYPES), self.choose((16, 64))))
        return self.load_from(Access(self.buffers[-1], offsets.shape, offsets=offsets))

    def load_again(self) -> Var | None:
        return self.load_from(self.choose(self.accesses)) if self.accesses else None

    def store(self, var: Var) -> None:
        access = self.place(var.dtype, var.shape, unique=True)
        if self.turns:
            access = self.in_row(access, self.turns[-1])
        access = self.masked(access) if self.chance(30) else access
        self.steps.append(Step("store", (), (var,), access=access))

    def store_in_place(self) -> None:
        """Store over an input, each element where it was loaded from."""
        accesses = [access for access in self.accesses if access.unique]
        if accesses:
            access = self.choose(accesses)
            var = self.find((access.buffer.dtype,), lambda v: v.shape == access.shape)
            if var:
                self.steps.append(Step("store", (), (var,), access=access))

    # -- values from nowhere --

    def range(self) -> Var:
        extent, start = self.choose(EXTENTS), self.choose((0, 0, 16, 7))
        return self.do("range", [], (extent,), I32, start=start, end=start + extent)

    def constant(self, dtype: DType, shape: Shape) -> Var:
        """Return a scalar, or a tile of this shape."""
        if dtype is BOOL:
            value: float = self.chance(50)
        elif dtype.kind == "f":
            value = self.choose([0.0, 1.0, -2.5, math.inf, -math.inf, math.nan, 1e-3])
            value = float(dtype.round(np.asarray(value)))
        else:
            value = self.choose([0, 1, 3, int(np.iinfo(dtype.array).max), int(np.iinfo(dtype.array).min)])
        return self.full(value, dtype, () if self.chance(50) else shape)

    def full(self, value: float, dtype: DType, shape: Shape) -> Var:
        text = repr(value) if math.isfinite(value) else f'float("{value}")'
        return self.do("full", [], shape, dtype, value=value, text=text)

    def scalar(self) -> Var:
        var = Var("pid", (), I32)
        if self.chance(40):
            var = Var(self.number_each(-100, 100), (), I32)
        elif self.chance(70):
            var = Var(self.name("x"), (), F32)
            self.reals[var.name] = tuple(self.random.randint(-64, 64) / 8 for _ in range(LAUNCHES))
        self.visible.append(var)
        return var

    # -- elementwise --

    def arithmetic(self) -> Var:
        op = self.choose(("add", "sub", "mul", *ORDERING))
        a = self.get(FLOATS if op in ("least", "most") else DTYPES)
        compared = F32 if op in ORDERING and a.dtype is BF16 else a.dtype
        return self.pair(op, a, compared, literal=op not in ORDERING)

    def bitwise(self) -> Var:
        a = self.get(BITS)
        return self.pair(self.choose(("and", "or", "xor")), a, a.dtype, literal=True)

    def integer(self) -> Var:
        a = self.get(INTS)
        op = self.choose(("quotient", "remainder", "shl", "shr", "shl_some", "shr_some"))
        return self.pair(op, a, a.dtype, last=a.dtype.bits - 1)

    def high_product(self) -> Var:
        a = self.get((I32, U32, I64, U64))
        return self.pair("umulhi", a, a.dtype)

    def division(self) -> Var:
        op = self.choose(("divide", "fmod", "div_rn"))
        if op == "div_rn":
            return self.pair(op, self.get((F32,)), F32)
        a = self.get(NUMBERS if op == "divide" else FLOATS)
        return self.pair(op, a, F64 if a.dtype is F64 else F32, literal=True)

    def comparison(self) -> Var:
        return self.pair("compare", self.get(DTYPES), BOOL, literal=True, sign=self.choose([*COMPARISONS]))

    def unary(self) -> Var:
        dtypes = {
            "neg": NUMBERS, "abs": NUMBERS, "not": BITS, "floor": WIDE_FLOATS, "ceil": WIDE_FLOATS,
            "sqrt": WIDE_FLOATS, "sqrt_rn": (F32,),
        }  # fmt: skip
        op = self.choose([*dtypes])
        x = self.get(dtypes[op])
        return self.do(op, [x], x.shape, x.dtype)

    def conversion(self) -> Var:
        return self.cast(self.get(DTYPES), self.choose(DTYPES))

    def reinterpretation(self) -> Var:
        x = self.get(NUMBERS)
        target = self.choose([d for d in NUMBERS if d.bits == x.dtype.bits and d is not x.dtype])
        cast = self.do("bits", [self.numbers_of(x)], x.shape, target)
        if target.kind == "f":  # a signalling NaN may count as a number or not
            self.visible.remove(cast)
        return self.numbers_of(cast)

    def numbers_of(self, x: Var) -> Var:
        """Return x without NaNs, whose bits and order are unspecified."""
        if x.dtype.kind != "f":
            return x
        number = self.do("compare", [x, x], x.shape, BOOL, sign="==")
        return self.do("where", [number, x, self.full(0.5, x.dtype, ())], x.shape, x.dtype)

    def selection(self) -> Var:
        condition = self.get((BOOL,))
        a, joint = self.match(condition.shape, DTYPES)
        b, shape = self.match(joint, (a.dtype,))
        return self.do("where", [condition, a, b], shape, a.dtype)

    def fused(self) -> Var:
        a = self.get(FLOATS)
        b, joint = self.match(a.shape, (a.dtype,))
        c, shape = self.match(joint, (a.dtype,))
        return self.do("fma", [a, b, c], shape, a.dtype)

    def clamp(self) -> Var:
        x = self.get(FLOATS)
        low = self.choose((-1.0, 0.0, -8.5))
        compared = F64 if x.dtype is F64 else F32
        return self.do("clamp", [x], x.shape, compared, low=low, high=low + self.choose((2.0, 0.0, 16.0)))

    def function(self) -> Var | None:
        if self.depth:
            return None
        x = self.get(WIDE_FLOATS)
        return self.near(self.choose(INEXACT), [x], x.shape, x.dtype)

    # -- shapes --

    def view(self) -> Var:
        x = self.get(DTYPES, tile=True)
        rank, size = len(x.shape), math.prod(x.shape)
        options = {
            "reshape": True, "gather": True, "permute": rank > 1, "expand": rank < 3,
            "broadcast": 1 in x.shape, "join": rank < 3 and size < LIMIT,
            "split": rank > 1 and x.shape[-1] == 2,
        }  # fmt: skip
        op = self.choose([op for op, possible in options.items() if possible])
        if op == "expand":
            axis = self.random.randint(0, rank)
            return self.do(op, [x], (*x.shape[:axis], 1, *x.shape[axis:]), x.dtype, axis=axis)
        if op == "broadcast":
            extent = min(self.choose(EXTENTS), LIMIT // size)
            return self.do(op, [x], _with(x.shape, x.shape.index(1), extent), x.dtype)
        if op == "permute":
            order = self.choose(_permutations(rank))
            return self.do(op, [x], tuple(x.shape[d] for d in order), x.dtype, order=order)
        if op == "join":
            other = self.find((x.dtype,), lambda v: v.shape == x.shape)
            assert other
            return self.do(op, [x, other], (*x.shape, 2), x.dtype)
        if op == "split":
            return self.do(op, [x], x.shape[:-1], x.dtype, half=self.choose((0, 1)))
        if op == "gather":
            axis = self.random.randrange(rank)
            index = self.find(
                INTS, lambda v: len(v.shape) == rank and _with(v.shape, axis) == _with(x.shape, axis)
            )
            assert index
            return self.do(
                op, [x, self.cast(index, I32)], index.shape, x.dtype, axis=axis, last=x.shape[axis] - 1
            )
        first = 2 ** self.random.randint(0, size.bit_length() - 1)
        second = 2 ** self.random.randint(0, (size // first).bit_length() - 1)
        shapes = [(size,), (first, size // first), (first, second, size // first // second)]
        return self.do(op, [x], self.choose(shapes), x.dtype)

    # -- along an axis --

    def reduction(self) -> Var:
        op = self.choose(("sum", "max", "min", "top", "argmax", "argmin", "xor_sum", "all_bits"))
        exact = BITS if self.depth or self.chance(30) else DTYPES
        x = self.get({"sum": exact, "xor_sum": BITS, "all_bits": BITS}.get(op, DTYPES), tile=True)
        target = x.dtype
        if op == "sum":
            target = _summed(x.dtype)
        elif op in ("max", "min") and x.dtype.bits < 32:
            target = F32 if x.dtype.kind == "f" else I32
        elif op in ("top", "argmax", "argmin"):
            target = I32 if op != "top" else F32 if x.dtype is BF16 else x.dtype
            x = self.numbers_of(x)
        axis = self.random.randrange(len(x.shape))
        everything = op in ("sum", "max", "min", "xor_sum") and self.chance(15)
        keep = not everything and self.chance(25)
        shape = _with(x.shape, axis, 1) if keep else _with(x.shape, axis)
        make = self.near if op == "sum" and target.kind == "f" else self.do
        params = {"axis": None if everything else axis, "keep": keep}
        return make(op, [x], () if everything else shape, target, **params)

    def scan(self) -> Var:
        op = self.choose(("cumsum", "cumprod"))
        x = self.get(INTS if op == "cumprod" or self.depth else NUMBERS, tile=True)
        target = x.dtype if op == "cumprod" else F32 if x.dtype is BF16 else _summed(x.dtype)
        make = self.near if target.kind == "f" else self.do
        axis = self.random.randrange(len(x.shape))
        return make(op, [x], x.shape, target, axis=axis, reverse=self.chance(30))

    # -- control flow --

    def block(
        self, given: Sequence[Var], turns: Sequence[Var], walks: Sequence[Access]
    ) -> tuple[list[Step], list[Var]]:
        """Return the steps of an inner block, and their final values."""
        outer = self.steps, len(self.visible), len(self.accesses), len(self.turns)
        self.steps, self.depth = [], self.depth + 1
        self.visible += [*given, *turns]
        self.turns += turns
        for access in walks:
            self.load_from(access)
        for _ in range(self.random.randint(0, 4)):
            self.step()
        ends = []
        for var in given:
            same = [v for v in self.visible[outer[1] :] if (v.shape, v.dtype) == (var.shape, var.dtype)]
            ends.append(same[-1] if self.chance(70) else self.choose(same))
        steps, self.steps = self.steps, outer[0]
        del self.visible[outer[1] :], self.accesses[outer[2] :], self.turns[outer[3] :]
        self.depth -= 1
        return steps, ends

    def loop(self) -> Var | None:
        if self.depth > 1:
            return None
        # distinct ones: of two variables that start as one value, Triton 3.7 carries only the first
        inits = list(dict.fromkeys(self.get(DTYPES) for _ in range(self.random.randint(1, 3))))
        results = [Var(self.name(), v.shape, v.dtype) for v in inits]
        turn = Var(self.name(), (), I32)
        walks = [self.walk(turn)] if self.chance(40) else []
        steps, ends = self.block(results, [turn], walks)
        trips: Number = self.number_each(0, TRIPS) if self.chance(60) else self.random.randint(0, TRIPS)
        params = {"trips": trips, "turn": turn, "next": ends, "walks": walks, "while": self.chance(25)}
        self.steps.append(Step("loop", tuple(results), tuple(inits), params, blocks=(tuple(steps),)))
        self.visible += results
        return results[0]

    def walk(self, turn: Var) -> Access:
        """Return an access whose address advances with each iteration."""
        access = self.place(self.choose(DTYPES), self.shape(), unique=False)
        paces = [self.random.randint(0, 40) for _ in range(LAUNCHES)]
        pace: Number = self.number(paces) if self.chance(50) else paces[0]
        access = self.enlarged(access, access.buffer.extent + (TRIPS - 1) * max(paces))
        return replace(access, pointer=self.name("q"), pace=pace, turn=turn)

    def conditional(self) -> Var | None:
        condition = self.find((BOOL,), lambda v: not v.shape)
        if self.depth > 1 or not condition:
            return None
        model = self.get(DTYPES)
        branches = [self.block([model], [], []) for _ in range(2)]
        var = Var(self.name(), model.shape, model.dtype)
        params = {"ends": [ends[0] for _, ends in branches]}
        blocks = tuple(tuple(steps) for steps, _ in branches)
        self.steps.append(Step("if", (var,), (condition,), params, blocks=blocks))
        self.visible.append(var)
        return var

    # -- the whole --

    def step(self) -> None:
        kinds = {
            self.arithmetic: 8, self.bitwise: 3, self.integer: 4, self.high_product: 1, self.division: 3,
            self.comparison: 3, self.unary: 3, self.conversion: 3, self.reinterpretation: 1, self.fused: 2,
            self.selection: 3, self.clamp: 1, self.function: 3, self.view: 8, self.reduction: 5, self.scan: 2,
            self.load: 3, self.load_scattered: 1, self.load_again: 1, self.store_in_place: 1, self.range: 1,
            self.scalar: 1, self.loop: 3, self.conditional: 2,
        }  # fmt: skip
        var = self.random.choices([*kinds], [*kinds.values()])[0]()
        if var is not None and self.chance(10):
            self.store(var)

    def program(self, seeds: Sequence[int]) -> Program:
        self.load()
        for seed in seeds:
            self.random = Random(f"{self.salt} {seed}")
            self.step()
        used = {v for step in walk(self.steps) for v in (*step.args, *step.params.get("next", ()))}
        for var in self.visible:
            if var not in used:
                self.store(var)
        return Program(tuple(self.steps), tuple(self.buffers), self.numbers, self.reals, self.salt)


def _permutations(rank: int) -> list[tuple[int, ...]]:
    """Return the orders of dimensions except the identity."""
    return list(permutations(range(rank)))[1:]


def _summed(dtype: DType) -> DType:
    """Return the type in which values of this type are summed."""
    if dtype.kind == "f" or dtype.bits >= 32:
        return dtype
    return I32 if dtype.kind == "i" else U32


def _with(shape: Shape, axis: int, *extents: int) -> Shape:
    """Return the shape with one of its extents replaced by these."""
    return (*shape[:axis], *extents, *shape[axis + 1 :])


def _broadcast(a: Shape, b: Shape) -> Shape | None:
    """Return the broadcast shape of two operands of the same rank, or of which one is a scalar."""
    if not a or not b:
        return a or b
    if len(a) != len(b) or any(x != y and 1 not in (x, y) for x, y in zip(a, b, strict=True)):
        return None
    shape = tuple(map(max, a, b))
    return shape if math.prod(shape) <= LIMIT else None


def _new_dims(shape: Shape, like: Shape) -> list[bool]:
    """Return the dimensions of `like` that a smaller shape lacks: those whose extent is not that of its next one."""
    new, rest = [], list(shape)
    for dim, extent in enumerate(like):
        fits = bool(rest) and (rest[0] in (extent, 1) or len(like) - dim == len(rest))
        new.append(not fits)
        if fits:
            rest.pop(0)
    return new


def _expanded(shape: Shape, like: Shape) -> Shape:
    """Return the shape with a new dimension of 1 for each that it lacks; scalars fit everything unchanged."""
    if not shape or len(shape) >= len(like):
        return shape
    rest = list(shape)
    return tuple(1 if new else rest.pop(0) for new in _new_dims(shape, like))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Return a strategy for programs: Hypothesis chooses a seed for each step, and a small one for no step, which
    it tries when it simplifies a failing program. Seeds are unique; otherwise it repeats parts of programs."""
    salt = draw(st.integers(0, 2**32 - 1))
    seeds = draw(st.lists(st.integers(0, 2**32 - 1), min_size=STEPS, max_size=STEPS, unique=True))
    return Author(salt).program([seed for seed in seeds if seed >= STEPS])
