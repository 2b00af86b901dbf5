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
from pathlib import Path
from typing import Any, Literal

import mpmath
import numpy as np
import torch
import triton
from hypothesis import strategies as st
from numpy.typing import NDArray

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
    row: Var | None = None  # a scalar that selects one of ROWS parts
    offsets: Var | None = None  # a tile of integers, in place of strides
    mask: Var | None = None

    @property
    def unique(self) -> bool:
        """Whether no two elements share an address."""
        return self.offsets is None and self.row is None and 0 not in self.strides


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
    low, high = (np.asarray(s.params[bound], x.dtype) for bound in ("low", "high"))
    return _smaller(_greater(x, low), high).astype(x.dtype)


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


@operation("gather", "tl.gather({0}, ({1} & {last}).to(tl.int32), {axis})")
def _gather(s: Step, x: Array, index: Array) -> Array:
    wrapped = (index & np.asarray(x.shape[s.axis] - 1, index.dtype)).astype(np.int64)
    return np.take_along_axis(x, wrapped, s.axis)


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
                self.values[step.params["counter"]] = np.asarray(trip, np.int32)
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
            yield f"{indent}{names} = {args}\n"
            yield f"{indent}for {step.params['counter']} in range({step.params['trips']}):\n"
            yield from _written(step.blocks[0], indent + "    ")
            yield f"{indent}    {names} = {', '.join(v.name for v in step.params['next'])}\n"
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

LIMIT = 2048  # elements of a tile
EXACT_MATH = {"floor": WIDE_FLOATS, "ceil": WIDE_FLOATS, "sqrt": WIDE_FLOATS, "sqrt_rn": (F32,)}
INEXACT_MATH = ("exp", "exp2", "log", "log2", "sin", "cos", "erf", "rsqrt", "sigmoid")
ORDERING = ("minimum", "maximum", "least", "most")  # bf16 is compared as f32


class Author:
    """Writes one program, every decision drawn from `draw`; the first choice of each is the simplest."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw
        self.steps: list[Step] = []
        self.visible: list[Var] = []  # values that the next step may use
        self.buffers: list[Buffer] = []
        self.numbers: dict[str, tuple[int, ...]] = {}
        self.reals: dict[str, tuple[float, ...]] = {}
        self.count = 0
        self.depth = 0  # of loops and conditionals

    # -- choices --

    def choose(self, options: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(options))

    def chance(self, percent: int) -> bool:
        return bool(self.draw(st.integers(0, 99)) >= 100 - percent)

    def integer(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def extent(self) -> int:
        return int(self.choose([16, 4, 1, 2, 8, 32, 64]))

    def shape(self) -> Shape:
        rank = self.choose([1, 2, 2, 3])
        shape: Shape = ()
        for _ in range(rank):
            room = LIMIT // max(1, math.prod(shape))
            shape += (min(self.extent(), room),)
        return shape

    def find(self, dtypes: Sequence[DType], fits: Callable[[Var], bool]) -> Var | None:
        """A visible value of one of these types, the latest first, or else one that is cast to it."""
        found = [v for v in reversed(self.visible) if fits(v)]
        typed = [v for v in found if v.dtype in dtypes]
        if typed and (len(typed) == len(found) or not self.chance(15)):
            return self.choose(typed)  # type: ignore[no-any-return]
        return self.cast(self.choose(found), self.choose(dtypes)) if found else None

    def get(self, dtypes: Sequence[DType], tile: bool = False) -> Var:
        """Like `find`; the program begins with a tile, so there always is one."""
        found = self.find(dtypes, lambda v: not tile or v.shape != ())
        assert found
        return found

    # -- steps --

    def name(self, stem: str = "v") -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def number(self, values: Sequence[int]) -> str:
        name = self.name("n")
        self.numbers[name] = tuple(values)
        return name

    def do(self, op: str, args: Sequence[Var], shape: Shape, dtype: DType, **params: Any) -> Var:
        var = Var(self.name(), shape, dtype)
        step = Step(op, (var,), tuple(args), params)
        self.steps.append(step)
        self.visible.append(var)
        return var

    def near(self, op: str, args: Sequence[Var], shape: Shape, dtype: DType, **params: Any) -> Var:
        """A step with an inexact result, which is stored at once."""
        var = self.do(op, args, shape, dtype, **params)
        access = self.write(shape, dtype, masked=False)
        self.steps[-1] = replace(self.steps[-1], access=access)
        self.steps.append(Step("store", (), (var,), access=access))
        return var

    def cast(self, x: Var, dtype: DType) -> Var:
        return x if x.dtype is dtype else self.do("cast", [x], x.shape, dtype)

    def match(self, shape: Shape, dtypes: Sequence[DType]) -> tuple[Var, Shape]:
        """A value that broadcasts against this shape, made to fit by new dimensions if need be, and the shape
        that the two have together. There always is one for the shape of a visible value."""
        found = self.find(dtypes, lambda v: _broadcast(_inserted(v.shape, shape), shape) is not None)
        assert found
        inserted = _inserted(found.shape, shape)
        if inserted != found.shape:
            index = ", ".join("None" if new else ":" for new in _new_dims(found.shape, shape))
            found = self.do("index", [found], inserted, found.dtype, index=index)
        joint = _broadcast(inserted, shape)
        assert joint is not None
        return found, joint

    def literal(self, dtype: DType) -> Var:
        """A Python number as an operand."""
        if dtype.kind == "f":
            value: float = self.choose([1.0, 0.5, 2.0, 3.0, -1.5, 0.1])
        else:
            value = self.choose([1, 2, 3, 7, 5, 100]) * (-1 if dtype.kind == "i" and self.chance(30) else 1)
        return Var(f"({value!r})", (), dtype, value)

    # -- leaves --

    def strides(self, shape: Shape, unique: bool, launches: int) -> list[list[int]]:
        """Strides for each launch: the elements of the tile in some order, at some distance."""
        order = self.choose(
            [tuple(range(len(shape))), tuple(reversed(range(len(shape)))), *_permutations(len(shape))]
        )
        signs = [-1 if self.chance(8) else 1 for _ in shape]
        zero = self.integer(0, len(shape) - 1) if shape and not unique and self.chance(10) else None
        found = []
        for _ in range(launches):
            step, strides = self.choose([1, 1, 1, 2, 3]), [0] * len(shape)
            for dim in reversed(order):
                strides[dim] = step * signs[dim] * (dim != zero)
                step = step * shape[dim] + self.choose([0, 0, 1, 5])
            found.append(strides)
        return found

    def place(self, buffer: Buffer, shape: Shape, unique: bool) -> Access:
        """An access to a buffer that is as large as the access needs."""
        passed = bool(shape) and self.chance(30)
        launches = self.strides(shape, unique, LAUNCHES if passed else 1)
        spans = [[s * (e - 1) for s, e in zip(strides, shape, strict=True)] for strides in launches]
        base = max(-sum(min(s, 0) for s in span) for span in spans)
        extent = base + max(sum(max(s, 0) for s in span) for span in spans) + 1
        strides: tuple[Number, ...] = tuple(launches[0])
        if passed:
            strides = tuple(self.number([s[d] for s in launches]) for d in range(len(shape)))
        wide = self.chance(20)
        return Access(replace(buffer, extent=extent), shape, base, strides, wide)

    def masked(self, access: Access) -> Access:
        if not access.shape:
            return access
        if self.chance(60):
            bounds = tuple(
                self.number([self.integer(0, e + 1) for _ in range(LAUNCHES)]) if self.chance(60) else None
                for e in access.shape
            )
            return replace(access, bounds=bounds)
        mask = self.find((BOOL,), lambda v: v.shape == access.shape)
        return replace(access, mask=mask)

    def write(self, shape: Shape, dtype: DType, masked: bool) -> Access:
        access = self.place(Buffer(self.name("p"), dtype, 0), shape, unique=True)
        self.buffers.append(access.buffer)
        return self.masked(access) if masked else access

    def load(self) -> Var:
        dtype = self.choose(DTYPES)
        shape = () if self.visible and self.chance(10) else self.shape()
        access = self.place(Buffer(self.name("p"), dtype, 0), shape, unique=False)
        scalars = [v for v in reversed(self.visible) if v.dtype in INTS and not v.shape]
        if scalars and (self.depth or self.chance(20)):
            buffer = replace(access.buffer, extent=access.buffer.extent * ROWS)
            access = replace(access, buffer=buffer, row=self.choose(scalars))
        self.buffers.append(access.buffer)
        return self.load_from(access)

    def load_from(self, access: Access) -> Var:
        args = []
        if self.chance(35):
            access = self.masked(access)
        if access.mask is not None or any(b is not None for b in access.bounds):
            other = self.constant(access.buffer.dtype, ())
            args = [other]
        var = Var(self.name(), access.shape, access.buffer.dtype)
        self.steps.append(Step("load", (var,), tuple(args), access=access))
        self.visible.append(var)
        return var

    def load_scattered(self) -> Var:
        offsets = self.get(INTS, tile=True)
        extent = self.choose([16, 64])
        buffer = Buffer(self.name("p"), self.choose(DTYPES), extent)
        self.buffers.append(buffer)
        return self.load_from(Access(buffer, offsets.shape, offsets=offsets))

    def load_again(self) -> Var | None:
        accesses = [s.access for s in self.steps if s.op == "load" and s.access]
        if not accesses:
            return None
        access = self.choose(accesses)
        return self.load_from(replace(access, mask=None, bounds=()))

    def store_in_place(self) -> None:
        """Over an input, each element where it was loaded from."""
        accesses = [s.access for s in self.steps if s.op == "load" and s.access and s.access.unique]
        if self.depth or not accesses:
            return
        access = self.choose(accesses)
        value = self.find((access.buffer.dtype,), lambda v: v.shape == access.shape)
        if value:
            self.steps.append(Step("store", (), (value,), access=access))

    def range(self) -> Var:
        extent, start = self.extent(), self.choose([0, 0, 16, 7])
        return self.do("range", [], (extent,), I32, start=start, end=start + extent)

    def constant(self, dtype: DType, shape: Shape) -> Var:
        if dtype is BOOL:
            value: float = self.chance(50)
        elif dtype.kind == "f":
            value = self.choose([0.0, 1.0, -2.5, -0.0, math.inf, -math.inf, math.nan, 1e-3])
            value = float(dtype.round(np.asarray(value)))
        else:
            value = self.choose([0, 1, 3, np.iinfo(dtype.array).max, np.iinfo(dtype.array).min])
        return self.full(value, dtype, shape)

    def full(self, value: float, dtype: DType, shape: Shape) -> Var:
        text = repr(value) if math.isfinite(value) else f'float("{value}")'
        return self.do("full", [], shape, dtype, value=value, text=text)

    def scalar(self) -> Var:
        kind = self.choose(["int", "real", "pid"])
        if kind == "pid":
            var = Var("pid", (), I32)
        elif kind == "int":
            var = Var(self.number([self.integer(-100, 100) for _ in range(LAUNCHES)]), (), I32)
        else:
            var = Var(self.name("x"), (), F32)
            self.reals[var.name] = tuple(self.integer(-64, 64) / 8 for _ in range(LAUNCHES))
        self.visible.append(var)
        return var

    # -- elementwise --

    def binary(self) -> Var:
        op = self.choose(["add", "sub", "mul", "minimum", "maximum", "and", "or", "xor", "least", "most"])
        dtypes: Sequence[DType] = {"and": (*INTS, BOOL), "or": (*INTS, BOOL), "xor": (*INTS, BOOL)}.get(
            op, DTYPES
        )
        a = self.get(FLOATS if op in ("least", "most") else dtypes)
        return self.pair(op, a, F32 if op in ORDERING and a.dtype is BF16 else a.dtype)

    def pair(self, op: str, a: Var, result: DType, literal: bool = True, **params: Any) -> Var:
        """A binary step; now and then with a Python number on the right, or with the operands swapped."""
        if literal and a.dtype is not BOOL and self.chance(15):
            # next to a Python number, 16-bit floats are divided as f32 all the same
            in_type = result if a.dtype.kind == "f" and result is not BOOL else a.dtype
            return self.do(op, [a, self.literal(in_type)], a.shape, result, **params)
        b, shape = self.match(a.shape, (a.dtype,))
        return self.do(op, [b, a] if self.chance(20) else [a, b], shape, result, **params)

    def division(self) -> Var:
        op = self.choose(["divide", "quotient", "remainder", "fmod", "div_rn"])
        if op == "div_rn":
            return self.pair(op, self.get((F32,)), F32, literal=False)
        if op in ("quotient", "remainder"):
            a = self.get(INTS)
            return self.pair(op, a, a.dtype, literal=False)
        a = self.get(NUMBERS if op == "divide" else FLOATS)
        return self.pair(op, a, F64 if a.dtype is F64 else F32)

    def shift(self) -> Var:
        op = self.choose(["shl_some", "shr_some", "shl", "shr"])
        a = self.get(INTS)
        return self.pair(
            op, a, a.dtype, literal=False, **({"last": a.dtype.bits - 1} if "some" in op else {})
        )

    def high_product(self) -> Var:
        a = self.get((I32, U32, I64, U64))
        return self.pair("umulhi", a, a.dtype, literal=False)

    def comparison(self) -> Var:
        return self.pair("compare", self.get(DTYPES), BOOL, sign=self.choose([*COMPARISONS]))

    def unary(self) -> Var:
        op = self.choose(["neg", "abs", "not", *EXACT_MATH])
        dtypes = {"neg": NUMBERS, "abs": NUMBERS, "not": (*INTS, BOOL), **EXACT_MATH}[op]
        x = self.get(dtypes)
        return self.do(op, [x], x.shape, x.dtype)

    def any_cast(self) -> Var:
        x = self.get(DTYPES)
        if self.chance(25) and x.dtype is not BOOL:
            same = [d for d in NUMBERS if d.bits == x.dtype.bits and d is not x.dtype]
            target = self.choose(same)
            if x.dtype.kind == "f":
                x = self.numbers_of(x)
            cast = self.do("bits", [x], x.shape, target)
            if target.kind != "f":
                return cast
            self.visible.remove(cast)
            return self.numbers_of(cast)
        return self.cast(x, self.choose(DTYPES))

    def numbers_of(self, x: Var) -> Var:
        """x without NaNs: their bits, and which of them come first, are nobody's promise."""
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
        low = self.choose([-1.0, 0.0, -8.5])
        target = F32 if x.dtype is BF16 else x.dtype
        return self.do("clamp", [x], x.shape, target, low=low, high=low + self.choose([2.0, 0.0, 16.0]))

    def function(self) -> Var | None:
        if self.depth:
            return None
        x = self.get(WIDE_FLOATS)
        return self.near(self.choose(INEXACT_MATH), [x], x.shape, x.dtype)

    # -- shapes --

    def view(self) -> Var | None:
        x = self.get(DTYPES, tile=True)
        kind = self.choose(["expand", "broadcast", "permute", "reshape", "join", "split", "gather"])
        rank = len(x.shape)
        if kind == "expand" and rank < 3:
            axis = self.integer(0, rank)
            return self.do(kind, [x], (*x.shape[:axis], 1, *x.shape[axis:]), x.dtype, axis=axis)
        if kind == "broadcast" and 1 in x.shape:
            room = LIMIT // math.prod(x.shape)
            shape = tuple(
                min(self.extent(), room) if e == 1 and d == x.shape.index(1) else e
                for d, e in enumerate(x.shape)
            )
            return self.do(kind, [x], shape, x.dtype)
        if kind == "permute" and rank > 1:
            order = self.choose(_permutations(rank))
            return self.do(kind, [x], tuple(x.shape[d] for d in order), x.dtype, order=order)
        if kind == "reshape":
            return self.do(kind, [x], self.factors(math.prod(x.shape)), x.dtype)
        if kind == "join" and rank < 3 and math.prod(x.shape) < LIMIT:
            b = self.find((x.dtype,), lambda v: v.shape == x.shape)
            assert b
            return self.do(kind, [x, b], (*x.shape, 2), x.dtype)
        if kind == "split" and rank > 1 and x.shape[-1] == 2:
            return self.do(kind, [x], x.shape[:-1], x.dtype, half=self.choose([0, 1]))
        if kind == "gather":
            axis = self.integer(0, rank - 1)
            others = _without(x.shape, axis)
            index = self.find(INTS, lambda v: len(v.shape) == rank and _without(v.shape, axis) == others)
            assert index
            if x.shape[axis] <= 64:
                return self.do(kind, [x, index], index.shape, x.dtype, axis=axis, last=x.shape[axis] - 1)
        return None

    def factors(self, size: int) -> Shape:
        first = self.choose([2**i for i in range(size.bit_length())])
        second = self.choose([2**i for i in range((size // first).bit_length())])
        shape = (first, second, size // first // second)
        return self.choose([(size,), (first, size // first), shape])  # type: ignore[no-any-return]

    # -- along an axis --

    def reduction(self) -> Var:
        op = self.choose(["sum", "max", "min", "argmax", "argmin", "xor_sum", "all_bits"])
        dtypes = {"sum": DTYPES, "xor_sum": (*INTS, BOOL), "all_bits": (*INTS, BOOL)}.get(op, DTYPES)
        if self.depth and op == "sum":
            dtypes = (*INTS, BOOL)
        x = self.get(dtypes, tile=True)
        target = x.dtype
        if op == "sum" and x.dtype.kind != "f" and x.dtype.bits < 32:
            target = I32 if x.dtype.kind == "i" else U32
        if op in ("max", "min") and x.dtype.bits < 32:
            target = F32 if x.dtype.kind == "f" else I32
        if op in ("argmax", "argmin"):
            target = I32
            x = self.numbers_of(x) if x.dtype.kind == "f" else x
        axis = self.integer(0, len(x.shape) - 1)
        everything = op in ("sum", "max", "min", "xor_sum") and self.chance(10)
        keep = not everything and self.chance(25)
        shape = (
            tuple(1 if d == axis else e for d, e in enumerate(x.shape)) if keep else _without(x.shape, axis)
        )
        params = {"axis": None if everything else axis, "keep": keep}
        make = self.near if op == "sum" and target.kind == "f" else self.do
        return make(op, [x], () if everything else shape, target, **params)

    def scan(self) -> Var:
        op = self.choose(["cumsum", "cumprod"])
        x = self.get(INTS if op == "cumprod" or self.depth else NUMBERS, tile=True)
        target = x.dtype
        if op == "cumsum" and x.dtype.kind != "f" and x.dtype.bits < 32:
            target = I32 if x.dtype.kind == "i" else U32
        if x.dtype is BF16:
            target = F32
        make = self.near if target.kind == "f" else self.do
        params = {"axis": self.integer(0, len(x.shape) - 1), "reverse": self.chance(30)}
        return make(op, [x], x.shape, target, **params)

    # -- control flow --

    def block(self, seeds: list[Var], size: int) -> list[Step]:
        """Steps of an inner block, which see the values outside and these."""
        outer, seen = self.steps, len(self.visible)
        self.steps, self.depth = [], self.depth + 1
        self.visible += seeds
        for _ in range(size):
            self.step()
        steps, self.steps = self.steps, outer
        self.inner = self.visible[seen:]
        del self.visible[seen:]
        self.depth -= 1
        return steps

    inner: list[Var]

    def loop(self) -> Var | None:
        if self.depth > 1:
            return None
        # distinct ones: of two variables that start as one value, Triton 3.7 carries only the first
        inits = list(dict.fromkeys(self.get(DTYPES) for _ in range(self.integer(1, 3))))
        results = [Var(self.name(), v.shape, v.dtype) for v in inits]
        counter = Var(self.name(), (), I32)
        trips: Number = self.integer(0, 3)
        if self.chance(50):
            trips = self.number([self.integer(0, 3) for _ in range(LAUNCHES)])
        steps = self.block([*results, counter], self.integer(1, 5))
        ends = []
        for result in results:
            same = [v for v in reversed(self.inner) if (v.shape, v.dtype) == (result.shape, result.dtype)]
            ends.append(self.choose(same))
        params = {"trips": trips, "counter": counter.name, "next": ends}
        self.steps.append(Step("loop", tuple(results), tuple(inits), params, blocks=(tuple(steps),)))
        self.visible += results
        return results[0]

    def conditional(self) -> Var | None:
        if self.depth > 1:
            return None
        condition = self.find((BOOL,), lambda v: not v.shape)
        if not condition:
            return None
        model = self.get(DTYPES)
        blocks, ends = [], []
        for _ in range(2):
            blocks.append(tuple(self.block([model], self.integer(0, 3))))
            same = [v for v in reversed(self.inner) if (v.shape, v.dtype) == (model.shape, model.dtype)]
            ends.append(self.choose(same))
        var = Var(self.name(), model.shape, model.dtype)
        self.steps.append(Step("if", (var,), (condition,), {"ends": ends}, blocks=tuple(blocks)))
        self.visible.append(var)
        return var

    # -- the whole --

    def step(self) -> None:
        kinds = [
            self.binary, self.binary, self.binary, self.load, self.unary, self.any_cast, self.comparison, self.selection,
            self.division, self.shift, self.fused, self.clamp, self.reduction, self.reduction, self.scan, self.view,
            self.view, self.view, self.function, self.load_scattered, self.load_again, self.range, self.scalar,
            self.high_product, self.loop, self.conditional, self.store_in_place,
        ]  # fmt: skip
        var = self.choose(kinds)()
        if var is not None and not self.depth and self.chance(10):
            self.output(var)

    def output(self, var: Var) -> None:
        masked = self.chance(30)
        access = self.write(var.shape, var.dtype, masked)
        self.steps.append(Step("store", (), (var,), access=access))

    def program(self) -> Program:
        self.load()
        for _ in range(self.integer(6, 24)):
            self.step()
        used = {v for step in _walk(self.steps) for v in (*step.args, *step.params.get("next", ()))}
        for var in [v for v in self.visible if v not in used]:
            self.output(var)
        return Program(
            tuple(self.steps), tuple(self.buffers), self.numbers, self.reals, self.integer(0, 2**32 - 1)
        )


def _permutations(rank: int) -> list[tuple[int, ...]]:
    return {
        0: [()],
        1: [(0,)],
        2: [(1, 0), (0, 1)],
        3: [(0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)],
    }[rank]


def _without(shape: Shape, axis: int) -> Shape:
    return shape[:axis] + shape[axis + 1 :]


def _broadcast(a: Shape, b: Shape) -> Shape | None:
    """The shape of a result of two operands of the same rank, or of one of them and a scalar."""
    if not a or not b:
        return a or b
    if len(a) != len(b) or any(x != y and 1 not in (x, y) for x, y in zip(a, b, strict=True)):
        return None
    shape = tuple(map(max, a, b))
    return shape if math.prod(shape) <= LIMIT else None


def _new_dims(shape: Shape, like: Shape) -> list[bool]:
    """Which dimensions of `like` a smaller shape lacks: the first ones whose extent is not its next one."""
    new, rest = [], list(shape)
    for left, extent in enumerate(like):
        take = bool(rest) and (rest[0] in (extent, 1) or len(like) - left == len(rest))
        new.append(not take)
        if take:
            rest.pop(0)
    return new


def _inserted(shape: Shape, like: Shape) -> Shape:
    """The shape with a new dimension of 1 for each that it lacks; scalars go with everything as they are."""
    if not shape or len(shape) >= len(like):
        return shape
    rest = list(shape)
    return tuple(1 if new else rest.pop(0) for new in _new_dims(shape, like))


@st.composite
def programs(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Program:
    return Author(draw).program()
