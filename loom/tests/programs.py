"""Random Triton programs: how they are drawn, written as source, and evaluated by NumPy alone.

A program is a list of steps. Each applies one operation to earlier values and names its result; loads and stores
are steps too, and loops and conditionals are steps that contain steps. The same list is written out as a Triton
kernel (`Program.source`) and executed step by step on NumPy arrays (`Machine`), which shares no code with the
compiler under test.

Most operations have exactly one right result, and all that follows from them is compared bit for bit. The result
of the others (transcendental functions, sums of floats in an order of the compiler's choice) lies in an interval,
`Within`. Such a result is always stored; the evaluation checks what was stored against the interval and goes on
from that, so that the error allowed to one operation never blurs the check of the next.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeVar

import mpmath
import numpy as np
import torch
import triton
from hypothesis import strategies as st
from numpy.typing import NDArray

T = TypeVar("T")
Array = NDArray[Any]
Shape = tuple[int, ...]

# ---- number types --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DType:
    """A number type, and how its values are held while a program is evaluated."""

    name: str  # as in `tl.NAME`
    kind: Literal["b", "i", "u", "f"]
    bits: int
    array: type[Any]  # NumPy's type for its values: bf16 is held as float32
    precision: int = 0  # bits of a float's significand, the leading one counted
    least: int = 0  # the smallest normal number is 2 ** least

    def __repr__(self) -> str:
        return f"tl.{self.name}"

    @property
    def torch(self) -> torch.dtype:
        found = getattr(torch, "bool" if self is BOOL else self.name)
        assert isinstance(found, torch.dtype)
        return found

    def encode(self, values: Array) -> Array:
        """Values as they lie in memory, as unsigned integers."""
        if self is BF16:
            return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return values.view(f"u{max(self.bits, 8) // 8}")

    def decode(self, memory: Array) -> Array:
        if self is BF16:
            return (memory.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return memory != 0 if self is BOOL else memory.view(self.array)

    @property
    def overflow(self) -> np.longdouble:
        """The power of two that the largest finite number falls short of."""
        return np.longdouble(2) ** (2 - self.least)

    def ulp(self, x: Array) -> Array:
        """The distance between neighbouring numbers of this type around x."""
        _, exponent = np.frexp(np.where(np.isfinite(x), x, 1))
        return np.ldexp(np.longdouble(1), np.maximum(exponent - 1, self.least) - self.precision + 1)

    def round(self, x: Array) -> Array:
        """The nearest number of this float type, ties to even."""
        x = x.astype(np.longdouble)
        unit = self.ulp(x)
        nearest = np.where(np.isfinite(x), np.rint(x / unit) * unit, x)
        nearest = np.where(np.abs(nearest) >= self.overflow, np.copysign(np.inf, nearest), nearest)
        return nearest.astype(self.array)

    def apply(self, f: Callable[..., Array], *args: Array) -> Array:
        """f on values of this type, rounded once. 16-bit floats are worked on in float64, whose precision is
        more than twice theirs, so that rounding its result again is harmless."""
        if self in (F16, BF16):
            return self.round(np.asarray(f(*(a.astype(np.float64) for a in args))))
        return np.asarray(f(*args)).astype(self.array, copy=False)


BOOL = DType("int1", "b", 1, np.bool_)
I8, I16, I32, I64 = (DType(f"int{n}", "i", n, getattr(np, f"int{n}")) for n in (8, 16, 32, 64))
U8, U16, U32, U64 = (DType(f"uint{n}", "u", n, getattr(np, f"uint{n}")) for n in (8, 16, 32, 64))
F16 = DType("float16", "f", 16, np.float16, 11, -14)
BF16 = DType("bfloat16", "f", 16, np.float32, 8, -126)
F32 = DType("float32", "f", 32, np.float32, 24, -126)
F64 = DType("float64", "f", 64, np.float64, 53, -1022)
INTS, FLOATS, WIDE_FLOATS = (I32, I64, I8, I16, U8, U16, U32, U64), (F32, F16, BF16, F64), (F32, F64)
NUMBERS = (*FLOATS, *INTS)
DTYPES = (*NUMBERS, BOOL)


@dataclass(frozen=True)
class Within:
    """A result known up to an interval. Where its ends are NaN it is NaN; where `open` is set, anything."""

    low: Array
    high: Array
    open: Array | bool = False

    @staticmethod
    def around(exact: Array, margin: Array) -> Within:
        margin = np.where(np.isfinite(exact), margin, 0)
        return Within(exact - margin, exact + margin)

    def holds(self, dtype: DType, values: Array) -> Array:
        """Whether each value is as it should be; infinity stands for the first number that is too large."""
        low, value, high = (
            np.clip(x, -dtype.overflow, dtype.overflow)
            for x in (self.low, values.astype(np.longdouble), self.high)
        )
        return np.where(np.isnan(low), np.isnan(values), (low <= value) & (value <= high)) | self.open


# ---- steps -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Var:
    """A value of the program, under its name in the source."""

    name: str
    shape: Shape
    dtype: DType
    literal: float | None = None  # set if the name is a Python number


@dataclass(frozen=True)
class Buffer:
    """An argument that points to memory: a stretch of `extent` elements for each instance of the program."""

    name: str
    dtype: DType
    extent: int


Number = int | str  # a literal, or the name of an argument


@dataclass(frozen=True)
class Access:
    """Which element of a buffer belongs to each element of a tile, and which of them are touched."""

    buffer: Buffer
    shape: Shape
    base: int = 0
    strides: tuple[Number, ...] = ()
    wide: bool = False  # 64-bit offsets
    bounds: tuple[Number | None, ...] = ()  # touched where index < bound, per dimension
    row: Var | None = None  # a scalar that selects one of ROWS parts of the buffer
    offsets: Var | None = None  # a tile of integers, in place of strides
    mask: Var | None = None
    pointer: str = ""  # the variable of a loop that holds the address and moves by `pace` in each turn
    pace: Number = 0
    turn: Var | None = None

    @property
    def unique(self) -> bool:
        """Whether no two elements of a tile share an address."""
        return self.offsets is None and 0 not in self.strides


@dataclass(frozen=True)
class Step:
    op: str
    results: tuple[Var, ...] = ()
    args: tuple[Var, ...] = ()
    params: dict[str, Any] = field(default_factory=dict)
    access: Access | None = None
    blocks: tuple[tuple[Step, ...], ...] = ()

    @property
    def result(self) -> Var:
        return self.results[0]

    @property
    def source(self) -> DType:
        return self.args[0].dtype

    @property
    def target(self) -> DType:
        return self.results[0].dtype

    @property
    def axis(self) -> int:
        axis = self.params["axis"]
        assert isinstance(axis, int)
        return axis


ROWS = 4
GUARD = 16  # untouched elements on both sides of a buffer

# ---- operations --------------------------------------------------------------------------------------------

Evaluation = Callable[..., "Array | Within"]  # of the step and the values of its operands


@dataclass(frozen=True)
class Operation:
    text: str  # a Triton expression, in which {0}, {1}, ... are operands, and other names parameters
    evaluate: Evaluation


OPERATIONS: dict[str, Operation] = {}


def operation(name: str, text: str) -> Callable[[Evaluation], Evaluation]:
    def define(evaluate: Evaluation) -> Evaluation:
        OPERATIONS[name] = Operation(text, evaluate)
        return evaluate

    return define


def elementwise(name: str, text: str, f: Callable[..., Array]) -> None:
    """Operands and result are of one type."""
    operation(name, text)(lambda s, *args: s.target.apply(f, *args))


def _smaller(a: Array, b: Array) -> Array:
    """The minimum. A NaN loses to a number, and +0 to -0."""
    return np.where((a < b) | np.isnan(b) | ((a == b) & np.signbit(a)), a, b)


def _greater(a: Array, b: Array) -> Array:
    return np.where((a > b) | np.isnan(b) | ((a == b) & np.signbit(b)), a, b)


def _or_nan(f: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda a, b: np.where(np.isnan(a) | np.isnan(b), np.nan, f(a, b))


def _minimum(a: Array, b: Array) -> Array:
    return _smaller(a, b) if a.dtype.kind == "f" else np.minimum(a, b)


def _maximum(a: Array, b: Array) -> Array:
    return _greater(a, b) if a.dtype.kind == "f" else np.maximum(a, b)


def _negative(x: Array) -> Array:
    """Triton had no negation before 3.9: -x was 0 - x, which makes +0 of +0."""
    return -x if triton.__version__ >= "3.9" or x.dtype.kind != "f" else 0 - x


# i1 is an integer modulo 2
elementwise("add", "{0} + {1}", lambda a, b: a ^ b if a.dtype == bool else a + b)
elementwise("sub", "{0} - {1}", lambda a, b: a ^ b if a.dtype == bool else a - b)
elementwise("mul", "{0} * {1}", lambda a, b: a & b if a.dtype == bool else a * b)
elementwise("and", "{0} & {1}", np.bitwise_and)
elementwise("or", "{0} | {1}", np.bitwise_or)
elementwise("xor", "{0} ^ {1}", np.bitwise_xor)
elementwise("not", "~{0}", np.invert)
elementwise("neg", "-{0}", _negative)
elementwise("abs", "tl.abs({0})", np.abs)
elementwise("minimum", "tl.minimum({0}, {1})", _minimum)
elementwise("maximum", "tl.maximum({0}, {1})", _maximum)
elementwise("least", "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", _or_nan(_smaller))
elementwise("most", "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", _or_nan(_greater))
elementwise("floor", "tl.floor({0})", np.floor)
elementwise("ceil", "tl.ceil({0})", np.ceil)
elementwise("sqrt", "tl.sqrt({0})", np.sqrt)
elementwise("sqrt_rn", "tl.sqrt_rn({0})", np.sqrt)
elementwise("div_rn", "tl.div_rn({0}, {1})", np.divide)
elementwise("umulhi", "tl.umulhi({0}, {1})", lambda a, b: _high_half(a, b))
elementwise("quotient", "{0} // {1}", lambda a, b: _quotient(a, b))
elementwise("remainder", "{0} % {1}", lambda a, b: np.where(b == 0, a, np.fmod(a, b)))


def _quotient(a: Array, b: Array) -> Array:
    """Rounded toward zero; of a division by zero, all bits are set."""
    return np.where(b == 0, ~np.zeros_like(b), (a - np.fmod(a, b)) // b)


def _high_half(a: Array, b: Array) -> Array:
    width = a.dtype.itemsize * 8
    product = a.view(f"u{width // 8}").astype(object) * b.view(f"u{width // 8}").astype(object)
    return np.asarray(product >> width, f"u{width // 8}").view(a.dtype)


def _shift(f: Callable[[Array, Array], Array], in_range: bool) -> Evaluation:
    """After a shift by the width or more, all bits are gone."""

    def evaluate(s: Step, a: Array, b: Array) -> Array:
        last = s.source.bits - 1
        amount = b.view(f"u{s.source.bits // 8}")
        amount = amount & last if in_range else amount
        part = np.minimum(amount, last).astype(b.dtype)
        return np.asarray(f(f(a, part), (amount > last).astype(b.dtype)))

    return evaluate


operation("shl", "{0} << {1}")(_shift(np.left_shift, in_range=False))
operation("shr", "{0} >> {1}")(_shift(np.right_shift, in_range=False))
operation("shl_some", "{0} << ({1} & {last})")(_shift(np.left_shift, in_range=True))
operation("shr_some", "{0} >> ({1} & {last})")(_shift(np.right_shift, in_range=True))


@operation("clamp", "tl.clamp({0}, {low}, {high})")
def _clamp(s: Step, x: Array) -> Array:
    low, high = (np.asarray(s.params[bound]) for bound in ("low", "high"))
    return _smaller(_greater(x, low), high)


@operation("divide", "{0} / {1}")
def _divide(s: Step, a: Array, b: Array) -> Array:
    """Integers and 16-bit floats are divided as f32."""
    return np.divide(*(_cast(x, arg.dtype, s.target) for x, arg in zip((a, b), s.args, strict=True)))


@operation("fmod", "{0} % {1}")
def _fmod(s: Step, a: Array, b: Array) -> Array:
    return np.fmod(a.astype(s.target.array), b.astype(s.target.array))


def _odd_sum(a: Array, b: Array) -> Array:
    """a + b in float64, rounded to odd: when it is rounded again to less precision, the sum is rounded once."""
    total = a + b
    rest = total - a
    error = (a - (total - rest)) + (b - rest)
    inexact = np.isfinite(total) & (error != 0) & (total.view(np.int64) & 1 == 0)
    return np.where(inexact, np.nextafter(total, np.copysign(np.inf, error)), total)


_libm = ctypes.CDLL("libm.so.6")
_libm.fma.restype, _libm.fma.argtypes = ctypes.c_double, [ctypes.c_double] * 3
_fma64 = np.frompyfunc(_libm.fma, 3, 1)


@operation("fma", "tl.fma({0}, {1}, {2})")
def _fma(s: Step, a: Array, b: Array, c: Array) -> Array:
    if s.target is F64:
        return np.asarray(_fma64(a, b, c), np.float64)
    product = np.multiply(a, b, dtype=np.float64)  # exact
    total = _odd_sum(*np.broadcast_arrays(product, c.astype(np.float64)))
    return total.astype(np.float32) if s.target is F32 else s.target.round(total)


COMPARISONS = {
    "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal, "==": np.equal, "!=": np.not_equal,
}  # fmt: skip


@operation("compare", "{0} {sign} {1}")
def _compare(s: Step, a: Array, b: Array) -> Array:
    return np.asarray(COMPARISONS[s.params["sign"]](a, b))


@operation("where", "tl.where({0}, {1}, {2})")
def _where(s: Step, condition: Array, a: Array, b: Array) -> Array:
    return np.where(condition, a, b)


def _cast(x: Array, source: DType, target: DType) -> Array:
    if target is BOOL:
        return np.asarray(x != 0)
    if target.kind == "f":
        return x.astype(target.array) if target is F64 else target.round(x)
    if source.kind == "f":
        # toward zero; saturates at 32 or 64 bits, of which narrower integers take the low ones; NaN gives 0
        wide = np.dtype(f"{target.kind}{8 if target.bits == 64 else 4}")
        whole = np.trunc(np.nan_to_num(x.astype(np.longdouble), nan=0, posinf=np.inf, neginf=-np.inf))
        return np.clip(whole, np.iinfo(wide).min, np.iinfo(wide).max).astype(wide).astype(target.array)
    return x.astype(target.array)


@operation("cast", "{0}.to({dtype})")
def _cast_step(s: Step, x: Array) -> Array:
    return _cast(x, s.source, s.target)


@operation("bits", "{0}.to({dtype}, bitcast=True)")
def _bits(s: Step, x: Array) -> Array:
    return s.target.decode(s.source.encode(x))


# -- functions that are not exact --


def _erf(x: Array) -> Array:
    def precise(value: float) -> np.longdouble:
        with mpmath.workprec(80):
            exact = mpmath.erf(value)
            return np.longdouble(float(exact)) + np.longdouble(float(exact - float(exact)))

    finite = np.nan_to_num(x, nan=0, posinf=99, neginf=-99).astype(np.float64)
    exact = np.frompyfunc(precise, 1, 1)(finite)
    return np.where(np.isnan(x), np.nan, np.asarray(exact, np.longdouble))


def _transcendental(name: str, f: Callable[[Array], Array]) -> None:
    """Correct to one unit in the last place, as an evaluation in 80-bit floats sees it."""

    def evaluate(s: Step, x: Array) -> Within:
        exact = np.asarray(f(x.astype(np.longdouble)))
        return Within.around(exact, s.target.ulp(exact))

    operation(name, f"tl.{name}({{0}})")(evaluate)


_transcendental("exp", np.exp)
_transcendental("exp2", np.exp2)
_transcendental("log", np.log)
_transcendental("log2", np.log2)
_transcendental("sin", np.sin)
_transcendental("cos", np.cos)
_transcendental("erf", _erf)
_transcendental("rsqrt", lambda x: 1 / np.sqrt(x))


@operation("sigmoid", "tl.sigmoid({0})")
def _sigmoid(s: Step, x: Array) -> Within:
    """exp within an ulp, a sum and a quotient: four ulps. Where exp overflows, nothing is left of it."""
    exact = 1 / (1 + np.exp(-x.astype(np.longdouble)))
    return Within.around(exact, 4 * s.target.ulp(exact) + np.ldexp(np.longdouble(1), s.target.least))


# -- shapes --

operation("expand", "tl.expand_dims({0}, {axis})")(lambda s, x: np.expand_dims(x, s.axis))
operation("index", "{0}[{index}]")(lambda s, x: x.reshape(s.result.shape))
operation("broadcast", "tl.broadcast_to({0}, {shape})")(lambda s, x: np.broadcast_to(x, s.result.shape))
operation("reshape", "tl.reshape({0}, {shape})")(lambda s, x: x.reshape(s.result.shape))
operation("permute", "tl.permute({0}, {order})")(lambda s, x: x.transpose(s.params["order"]))
operation("join", "tl.join({0}, {1})")(lambda s, a, b: np.stack(np.broadcast_arrays(a, b), -1))
operation("split", "tl.split({0})[{half}]")(lambda s, x: x[..., s.params["half"]])


operation("gather", "tl.gather({0}, {1} & {last}, {axis})")(
    lambda s, x, index: np.take_along_axis(x, index & (x.shape[s.axis] - 1), s.axis)
)


# -- reductions and scans --


def _total(s: Step, x: Array, add: Callable[[Array], Array], terms: int) -> Array | Within:
    """A sum over `terms` terms, which `add` carries out. Integers wrap. The error of a float sum in any order is
    bounded by (terms - 1) roundings of the sum of magnitudes; multiples of one unit that fit are exact."""
    if s.target.kind != "f":
        return add(x.astype(s.target.array))
    finite = np.where(np.isfinite(x), x, 0).astype(np.longdouble)
    magnitude = add(np.abs(finite))
    unit = np.longdouble(2) ** -8
    whole = add((finite / unit != np.rint(finite / unit)).astype(np.longdouble)) == 0
    exact = whole & (magnitude < unit * 2 ** (s.target.precision))
    margin = np.where(
        exact, 0, (terms - 1) * magnitude * np.ldexp(np.longdouble(1), -s.target.precision) * 1.001
    )
    result = Within.around(add(x.astype(np.longdouble)), margin)
    return replace(
        result, open=magnitude >= s.target.overflow * (1 - np.longdouble(2) ** -s.target.precision)
    )


def _axes(s: Step) -> dict[str, Any]:
    return {"axis": s.params["axis"], "keepdims": s.params["keep"]}


@operation("sum", "tl.sum({0}, axis={axis}, keep_dims={keep})")
def _sum(s: Step, x: Array) -> Array | Within:
    terms = x.size if s.params["axis"] is None else x.shape[s.axis]
    return _total(s, x, lambda terms: np.add.reduce(terms, dtype=terms.dtype, **_axes(s)), terms)


@operation("cumsum", "tl.cumsum({0}, axis={axis}, reverse={reverse})")
def _cumsum(s: Step, x: Array) -> Array | Within:
    return _total(s, x, _scan(s, np.add), x.shape[s.axis])


def _scan(s: Step, f: np.ufunc) -> Callable[[Array], Array]:
    def run(x: Array) -> Array:
        x = np.flip(x, s.axis) if s.params["reverse"] else x
        scanned: Array = f.accumulate(x, s.axis, dtype=x.dtype)
        return np.flip(scanned, s.axis) if s.params["reverse"] else scanned

    return run


@operation("cumprod", "tl.cumprod({0}, axis={axis}, reverse={reverse})")
def _cumprod(s: Step, x: Array) -> Array:
    return _scan(s, np.multiply)(x)


def _reduction(name: str, text: str, f: Callable[[Array, Array], Array]) -> None:
    def evaluate(s: Step, x: Array) -> Array:
        x = _cast(x, s.source, s.target)
        flat = x.reshape(-1) if s.params["axis"] is None else np.moveaxis(x, s.axis, 0)
        result = flat[0]
        for part in flat[1:]:
            result = f(result, part)
        return np.asarray(result).reshape(s.result.shape)

    operation(name, text)(evaluate)


_reduction("max", "tl.max({0}, axis={axis}, keep_dims={keep})", _maximum)
_reduction("min", "tl.min({0}, axis={axis}, keep_dims={keep})", _minimum)
_reduction("xor_sum", "tl.xor_sum({0}, axis={axis}, keep_dims={keep})", np.bitwise_xor)
_reduction("all_bits", "tl.reduce({0}, {axis}, both, keep_dims={keep})", np.bitwise_and)


@operation("top", "tl.max({0}, {axis}, return_indices=True, keep_dims={keep})[0]")
def _top(s: Step, x: Array) -> Array:
    where = np.expand_dims(np.argmax(x, s.axis), s.axis)
    return np.take_along_axis(x, where, s.axis).reshape(s.result.shape)


@operation("argmax", "tl.argmax({0}, {axis}, keep_dims={keep})")
def _argmax(s: Step, x: Array) -> Array:
    return np.argmax(x, **_axes(s)).astype(np.int32)


@operation("argmin", "tl.argmin({0}, {axis}, keep_dims={keep})")
def _argmin(s: Step, x: Array) -> Array:
    return np.argmin(x, **_axes(s)).astype(np.int32)


# -- values from nowhere --

operation("range", "tl.arange({start}, {end})")(
    lambda s: np.arange(s.params["start"], s.params["end"], dtype=np.int32)
)
operation("full", "tl.full({shape}, {text}, {dtype})")(
    lambda s: np.full(s.result.shape, s.params["value"], s.target.array)
)

# ---- evaluation ----------------------------------------------------------------------------------------------


class Mismatch(AssertionError):
    """The kernel's result is not what it should be."""


@dataclass
class Machine:
    """One instance of a program: executes its steps on `memory` (buffers by name, encoded), next to what the
    kernel made of the same memory."""

    memory: dict[str, Array]
    observed: dict[str, Array]
    values: dict[str, Array]
    pid: int

    def run(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self.step(step)

    def number(self, number: Number) -> int:
        return number if isinstance(number, int) else int(self.values[number])

    def value(self, var: Var) -> Array:
        if var.literal is not None:
            return var.dtype.apply(np.asarray, np.asarray(var.literal))
        return self.values[var.name]

    def addresses(self, access: Access) -> Array:
        where = np.full(access.shape, GUARD + access.base + self.pid * access.buffer.extent, np.int64)
        if access.row is not None:
            where = where + int(self.value(access.row) & (ROWS - 1)) * (access.buffer.extent // ROWS)
        if access.offsets is not None:
            offsets = self.value(access.offsets)
            return where + (offsets & np.asarray(access.buffer.extent - 1, offsets.dtype)).astype(np.int64)
        for index, stride in zip(np.indices(access.shape), access.strides, strict=True):
            where = where + index * self.number(stride)
        if access.turn is not None:
            where = where + int(self.value(access.turn)) * self.number(access.pace)
        return where

    def touched(self, access: Access) -> Array:
        touched = np.ones(access.shape, bool)
        for index, bound in zip(np.indices(access.shape), access.bounds, strict=False):
            if bound is not None:
                touched &= index < self.number(bound)
        return touched & self.value(access.mask) if access.mask is not None else touched

    def step(self, step: Step) -> None:
        if step.op == "load":
            assert step.access
            touched, where = self.touched(step.access), self.addresses(step.access)
            read = step.target.decode(self.memory[step.access.buffer.name][np.where(touched, where, 0)])
            self.values[step.result.name] = (
                np.where(touched, read, self.value(step.args[0])) if step.args else read
            )
        elif step.op == "store":
            assert step.access
            touched, where = self.touched(step.access), self.addresses(step.access)
            encoded = step.source.encode(self.value(step.args[0]))
            self.memory[step.access.buffer.name][where[touched]] = encoded[touched]
        elif step.op == "loop":
            carried = [self.value(v) for v in step.args]
            for trip in range(self.number(step.params["trips"])):
                self.values |= {v.name: x for v, x in zip(step.results, carried, strict=True)}
                self.values[step.params["turn"].name] = np.asarray(trip, np.int32)
                self.run(step.blocks[0])
                carried = [self.value(v) for v in step.params["next"]]
            self.values |= {v.name: x for v, x in zip(step.results, carried, strict=True)}
        elif step.op == "if":
            taken = 0 if self.value(step.args[0]) else 1
            self.run(step.blocks[taken])
            self.values[step.result.name] = self.value(step.params["ends"][taken])
        else:
            self.values[step.result.name] = self.apply(step)

    def apply(self, step: Step) -> Array:
        result = OPERATIONS[step.op].evaluate(step, *(self.value(v) for v in step.args))
        var = step.result
        if isinstance(result, Within):
            stored = (
                self.observed[step.access.buffer.name][self.addresses(step.access)] if step.access else None
            )
            assert stored is not None
            kernel = var.dtype.decode(stored)
            bad = ~result.holds(var.dtype, kernel)
            if bad.any():
                at = tuple(int(i[0]) for i in np.nonzero(np.atleast_1d(bad)))
                at = at if var.shape else ()
                low, high = (np.broadcast_to(x, var.shape)[at] for x in (result.low, result.high))
                operands = [
                    np.broadcast_to(self.value(v), var.shape)[at] for v in step.args if v.shape == var.shape
                ]
                raise Mismatch(
                    f"{var.name} = {step.op}: {int(bad.sum())} of {bad.size} elements; {kernel[at]!r} at {at} is not "
                    f"within {low!r} .. {high!r}, operands {operands}"
                )
            return kernel
        assert result.shape == var.shape, (step, result.shape)
        return result.astype(var.dtype.array, copy=False)


# ---- programs --------------------------------------------------------------------------------------------------

GRID = 2  # instances in one launch
LAUNCHES = 2  # with other data, strides, bounds and trip counts
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


@dataclass(frozen=True)
class Program:
    steps: tuple[Step, ...]
    buffers: tuple[Buffer, ...]
    numbers: dict[str, tuple[int, ...]]  # i32 arguments: their values in each launch
    reals: dict[str, tuple[float, ...]]  # f32 arguments
    seed: int  # of the data

    @property
    def source(self) -> str:
        numbers = ", ".join(f'"{name}"' for name in self.numbers)
        arguments = ", ".join([*(b.name for b in self.buffers), *self.numbers, *self.reals])
        return HEAD.format(numbers=numbers, arguments=arguments) + "".join(_written(self.steps, "    "))

    @property
    def stores(self) -> int:
        return sum(step.op == "store" for step in self.steps)

    def load(self, directory: Path) -> Any:
        """The kernel, compiled from a file as Triton wants it."""
        path = directory / f"program_{zlib.crc32(self.source.encode()):08x}.py"
        path.write_text(self.source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.kernel

    def memory(self, launch: int) -> dict[str, Array]:
        """Buffers before a launch: inputs hold numbers of all sizes, and what is there to be overwritten, 0xA5."""
        random = np.random.default_rng([self.seed, launch])
        loaded = {step.access.buffer.name for step in _walk(self.steps) if step.op == "load" and step.access}
        memory = {}
        for buffer in self.buffers:
            size = buffer.extent * GRID
            raw = np.full(size + 2 * GUARD, 0xA5A5A5A5A5A5A5A5, np.uint64).astype(
                f"u{max(buffer.dtype.bits, 8) // 8}"
            )
            if buffer.name in loaded:
                raw[GUARD : GUARD + size] = buffer.dtype.encode(sample(buffer.dtype, size, random))
            memory[buffer.name] = raw
        return memory

    def run(self, kernel: Any, launch: int) -> dict[str, Array]:
        """Memory after a launch of the kernel."""
        memory = self.memory(launch)
        tensors = [torch.from_numpy(memory[b.name])[GUARD:].view(b.dtype.torch) for b in self.buffers]
        scalars = [values[launch] for values in [*self.numbers.values(), *self.reals.values()]]
        kernel[(GRID,)](*tensors, *scalars)
        return memory

    def evaluate(self, launch: int, observed: dict[str, Array]) -> dict[str, Array]:
        """Memory after a launch, as it should be."""
        memory = self.memory(launch)
        for pid in range(GRID):
            values: dict[str, Array] = {"pid": np.asarray(pid, np.int32)}
            values |= {name: np.asarray(v[launch], np.int32) for name, v in self.numbers.items()}
            values |= {name: np.asarray(v[launch], np.float32) for name, v in self.reals.items()}
            with np.errstate(all="ignore"):
                Machine(memory, observed, values, pid).run(self.steps)
        return memory

    def check(self, launch: int, observed: dict[str, Array]) -> None:
        """Every byte of every buffer is as it should be, but for the bits of NaNs."""
        expected = self.evaluate(launch, observed)
        last = {s.access.buffer.name: s for s in self.steps if s.op == "store" and s.access}
        for buffer in sorted(self.buffers, key=lambda b: [*last].index(b.name) if b.name in last else -1):
            kernel, right = observed[buffer.name], expected[buffer.name]
            a, b = buffer.dtype.decode(kernel), buffer.dtype.decode(right)
            both_nan = np.isnan(a) & np.isnan(b) if buffer.dtype.kind == "f" else False
            bad = np.flatnonzero((kernel != right) & ~both_nan)
            if bad.size:
                at = int(bad[0])
                what = last[buffer.name].args[0].name if buffer.name in last else "an input"
                raise Mismatch(
                    f"launch {launch}, {buffer.name} ({what}, {buffer.dtype}): {bad.size} elements, the first at "
                    f"{at - GUARD} of {GRID} x {buffer.extent}: {a[at]!r} is not {b[at]!r}"
                )


def _walk(steps: Sequence[Step]) -> Iterator[Step]:
    for step in steps:
        yield step
        for block in step.blocks:
            yield from _walk(block)


# -- as source --


def _written(steps: Sequence[Step], indent: str) -> Iterator[str]:
    for step in steps:
        names = ", ".join(v.name for v in step.results)
        args = ", ".join(v.name for v in step.args)
        if step.op == "loop":
            turn, trips, walks = (step.params[key] for key in ("turn", "trips", "walks"))
            for access in walks:
                yield f"{indent}{access.pointer} = {_address(replace(access, pointer=''))}\n"
            yield f"{indent}{names} = {args}\n"
            if step.params["while"]:
                yield f"{indent}{turn.name} = tl.full((), 0, tl.int32)\n"
                yield f"{indent}while {turn.name} < {trips}:\n"
            else:
                yield f"{indent}for {turn.name} in range({trips}):\n"
            yield from _written(step.blocks[0], indent + "    ")
            yield from (f"{indent}    {access.pointer} += {access.pace}\n" for access in walks)
            yield f"{indent}    {names} = {', '.join(v.name for v in step.params['next'])}\n"
            if step.params["while"]:
                yield f"{indent}    {turn.name} += 1\n"
        elif step.op == "if":
            for head, block, end in zip(
                (f"if {args}:", "else:"), step.blocks, step.params["ends"], strict=True
            ):
                yield f"{indent}{head}\n"
                yield from _written(block, indent + "    ")
                yield f"{indent}    {names} = {end.name}\n"
        elif step.op == "store":
            assert step.access
            yield f"{indent}tl.store({_address(step.access)}, {args}{_mask(step.access)})\n"
        elif step.op == "load":
            assert step.access
            other = f", other={args}" if args else ""
            yield f"{indent}{names} = tl.load({_address(step.access)}{_mask(step.access)}{other})\n"
        else:
            params = {"dtype": repr(step.target), "shape": step.result.shape, **step.params}
            yield f"{indent}{names} = {OPERATIONS[step.op].text.format(*(v.name for v in step.args), **params)}\n"


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
    terms = [f"({_index(access, d)} < {bound})" for d, bound in enumerate(access.bounds) if bound is not None]
    terms += [access.mask.name] if access.mask is not None else []
    return f", mask={' & '.join(terms)}" if terms else ""


# -- data --


def sample(dtype: DType, size: int, random: np.random.Generator) -> Array:
    """Numbers of every kind: small, large, on and beside powers of two, extreme; and for floats, halves, NaN,
    infinities and subnormals. Mild in half of the cases, so that not everything drowns in NaN and overflow."""
    if dtype is BOOL:
        return random.random(size) < random.random()
    small = random.integers(-9, 10, size)
    if dtype.kind != "f":
        low, high = np.iinfo(dtype.array).min, np.iinfo(dtype.array).max
        power = 2 ** random.integers(0, dtype.bits, size).astype(object)
        near = power + 2 ** random.integers(0, dtype.bits, size).astype(object) + random.integers(-1, 2, size)
        near *= random.choice([1, -1], size)
        extreme = random.choice(np.array([low, low + 1, 0, 1, 2, high - 1, high], object), size)
        anything = random.integers(low, high, size, dtype.array, endpoint=True).astype(object)
        kinds = [small.astype(object), near, extreme, anything]
        chosen = _mixed(
            kinds, [0.97, 0.01, 0.01, 0.01] if random.random() < 0.3 else [0.3, 0.3, 0.1, 0.3], random
        )
        return np.asarray(chosen & ((1 << dtype.bits) - 1), f"u{dtype.bits // 8}").view(dtype.array)
    with np.errstate(all="ignore"):
        normal = random.standard_normal(size) * 2.0 ** random.integers(-3, 12)
        halves = random.integers(-(2**12), 2**12, size) / 2
        anything = random.integers(0, 2**dtype.bits - 1, size, np.uint64, endpoint=True)
        patterns = dtype.decode(anything.astype(f"u{dtype.bits // 8}")).astype(np.float64)
        tiny, huge = 2.0**dtype.least, float(dtype.overflow * (1 - np.longdouble(2) ** -dtype.precision))
        extreme = random.choice(
            [0.0, -0.0, np.inf, -np.inf, np.nan, tiny, tiny / 4, -tiny, huge, -huge, 1.0], size
        )
        mild = random.random() < 0.5
        weights = [0.4, 0.3, 0.3, 0, 0] if mild else [0.15, 0.25, 0.1, 0.3, 0.2]
        return dtype.round(_mixed([small.astype(float), normal, halves, patterns, extreme], weights, random))


def _mixed(kinds: list[Array], weights: list[float], random: np.random.Generator) -> Array:
    size = kinds[0].size
    return np.choose(random.choice(len(kinds), size, p=weights), kinds)


# ---- how a program is drawn --------------------------------------------------------------------------------------

STEPS = 40  # of a program, at most, not counting those in loops
LIMIT = 2048  # elements of a tile
EXTENTS = (1, 2, 4, 8, 16, 32, 64)
BITS = (*INTS, BOOL)
TRIPS = 3  # of a loop, at most
INEXACT = ("exp", "exp2", "log", "log2", "sin", "cos", "erf", "rsqrt", "sigmoid")
ORDERING = ("minimum", "maximum", "least", "most")


class Author:
    """Writes one program. What a step does depends on its own source of random numbers and on what is there to
    work on, so that a program with some steps left out is still much like the whole one."""

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
        """A visible value of one of these types, rather a late one, or else one that is cast to such a type."""
        found = [v for v in self.visible if fits(v)]
        typed = [v for v in found if v.dtype in dtypes]
        if typed and (len(typed) == len(found) or not self.chance(20)):
            return typed[-1 - int(len(typed) * self.random.random() ** 2)]
        return self.cast(self.choose(found), self.choose(dtypes)) if found else None

    def get(self, dtypes: Sequence[DType], tile: bool = False) -> Var:
        """Like `find`; a program begins with a tile, so that there always is something."""
        found = self.find(dtypes, lambda v: not tile or v.shape != ())
        assert found
        return found

    def name(self, stem: str = "v") -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def number(self, values: Sequence[int]) -> str:
        """The name of an argument with these values in the launches."""
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
        """A step with an inexact result, which is stored at once."""
        var = self.do(op, args, shape, dtype, **params)
        access = self.place(dtype, shape, unique=True)
        self.steps[-1] = replace(self.steps[-1], access=access)
        self.steps.append(Step("store", (), (var,), access=access))
        return var

    def cast(self, x: Var, dtype: DType) -> Var:
        return x if x.dtype is dtype else self.do("cast", [x], x.shape, dtype)

    def match(self, shape: Shape, dtypes: Sequence[DType]) -> tuple[Var, Shape]:
        """A value that broadcasts against this shape, made to fit by new dimensions if need be, and the shape
        that the two have together. There always is one if the shape is that of visible values."""
        found = self.find(dtypes, lambda v: _broadcast(_expanded(v.shape, shape), shape) is not None)
        assert found
        expanded = _expanded(found.shape, shape)
        if expanded != found.shape:
            index = ", ".join("None" if new else ":" for new in _new_dims(found.shape, shape))
            found = self.do("index", [found], expanded, found.dtype, index=index)
        joint = _broadcast(expanded, shape)
        assert joint is not None
        return found, joint

    def pair(self, op: str, a: Var, result: DType, literal: bool = False, **params: Any) -> Var:
        """A binary step; now and then with a Python number on the right, or with the operands swapped."""
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
        """An access to a new buffer: the elements in any order, at any distance, backwards or all the same."""
        order = self.choose([tuple(range(len(shape))), *_permutations(len(shape))])
        factors = [-1 if self.chance(8) else 0 if not unique and self.chance(8) else 1 for _ in shape]
        passed = self.chance(30)
        layouts = []
        for _ in range(LAUNCHES if passed else 1):
            step, strides = self.choose((1, 1, 1, 2, 3)), [0] * len(shape)
            for dim in reversed(order):
                strides[dim] = step * factors[dim]
                step = step * shape[dim] + self.choose((0, 0, 1, 5))
            layouts.append(strides)
        spans = [[s * (e - 1) for s, e in zip(strides, shape, strict=True)] for strides in layouts]
        base = max(-sum(min(s, 0) for s in span) for span in spans)
        extent = base + max(sum(max(s, 0) for s in span) for span in spans) + 1
        strides: tuple[Number, ...] = tuple(layouts[0])
        if passed:
            strides = tuple(self.number([layout[d] for layout in layouts]) for d in range(len(shape)))
        return self.into(Buffer(self.name("p"), dtype, extent), shape, base, strides)

    def into(self, buffer: Buffer, *place: Any, **how: Any) -> Access:
        self.buffers.append(buffer)
        return Access(buffer, *place, wide=self.chance(20), **how)

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
        buffer = Buffer(self.name("p"), self.choose(DTYPES), self.choose((16, 64)))
        return self.load_from(self.into(buffer, offsets.shape, offsets=offsets))

    def load_again(self) -> Var | None:
        return self.load_from(self.choose(self.accesses)) if self.accesses else None

    def store(self, var: Var) -> None:
        access = self.place(var.dtype, var.shape, unique=True)
        if self.turns:
            access = self.in_row(access, self.turns[-1])
        access = self.masked(access) if self.chance(30) else access
        self.steps.append(Step("store", (), (var,), access=access))

    def store_in_place(self) -> None:
        """Over an input, each element where it was loaded from."""
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
        """A scalar, or a tile of this shape."""
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
        """x without NaNs: their bits, and which of them comes first, are nobody's promise."""
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
            "reshape": True, "gather": True, "permute": rank > 1, "expand": rank < 3, "broadcast": 1 in x.shape,
            "join": rank < 3 and size < LIMIT, "split": rank > 1 and x.shape[-1] == 2,
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
        exact = (*INTS, BOOL) if self.depth or self.chance(30) else DTYPES
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
        """The steps of an inner block, and the values that they end with."""
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
        """An access whose address moves along from turn to turn."""
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
            self.comparison: 3, self.unary: 3, self.conversion: 3, self.reinterpretation: 1, self.selection: 3,
            self.fused: 2, self.clamp: 1, self.function: 3, self.view: 8, self.reduction: 5, self.scan: 2,
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
        used = {v for step in _walk(self.steps) for v in (*step.args, *step.params.get("next", ()))}
        for var in self.visible:
            if var not in used:
                self.store(var)
        return Program(tuple(self.steps), tuple(self.buffers), self.numbers, self.reals, self.salt)


def _permutations(rank: int) -> list[tuple[int, ...]]:
    """Orders of dimensions, but for the one that changes nothing."""
    return list(permutations(range(rank)))[1:]


def _summed(dtype: DType) -> DType:
    """The type that values of this one are added up in."""
    if dtype.kind == "f" or dtype.bits >= 32:
        return dtype
    return I32 if dtype.kind == "i" else U32


def _with(shape: Shape, axis: int, *extents: int) -> Shape:
    """The shape with these extents in place of one of its own."""
    return (*shape[:axis], *extents, *shape[axis + 1 :])


def _broadcast(a: Shape, b: Shape) -> Shape | None:
    """The shape of two operands together, if they have the same rank or one is a scalar."""
    if not a or not b:
        return a or b
    if len(a) != len(b) or any(x != y and 1 not in (x, y) for x, y in zip(a, b, strict=True)):
        return None
    shape = tuple(map(max, a, b))
    return shape if math.prod(shape) <= LIMIT else None


def _new_dims(shape: Shape, like: Shape) -> list[bool]:
    """Which dimensions of `like` a smaller shape lacks: those whose extent is not that of its next one."""
    new, rest = [], list(shape)
    for dim, extent in enumerate(like):
        fits = bool(rest) and (rest[0] in (extent, 1) or len(like) - dim == len(rest))
        new.append(not fits)
        if fits:
            rest.pop(0)
    return new


def _expanded(shape: Shape, like: Shape) -> Shape:
    """The shape with a new dimension of 1 for each that it lacks; scalars go with everything as they are."""
    if not shape or len(shape) >= len(like):
        return shape
    rest = list(shape)
    return tuple(1 if new else rest.pop(0) for new in _new_dims(shape, like))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Hypothesis chooses the seeds of a program's steps, and tries to do without some of them when it fails.
    They are unique because it otherwise spends most of its examples on programs that differ in one step."""
    salt, size = draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, STEPS))
    seeds = st.lists(st.integers(0, 2**32 - 1), min_size=size, max_size=size, unique=True)
    return Author(salt).program(draw(seeds))
