"""Semantics of Triton's operations in NumPy: the reference for generated programs.

It shares no code with the compiler under test. Most operations have exactly one right result; that of the
others (transcendental functions, sums of floats in an order of the compiler's choice) lies `Within` an
interval.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import mpmath  # type: ignore[import-untyped]
import numpy as np
import torch
import triton
from numpy.typing import NDArray

Array = NDArray[Any]
Shape = tuple[int, ...]
Wide = np.longdouble  # 64 bits of precision: holds every number of every type here

# ---- number types ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DType:
    """A dtype, and the representation of its values while a program is evaluated."""

    name: str  # as in `tl.NAME`
    kind: Literal["b", "i", "u", "f"]
    bits: int
    array: type[Any]  # NumPy's type for its values; bf16 is held as float32
    precision: int = 0  # bits of a float's significand, the leading one counted
    least: int = 0  # the smallest normal number is 2 ** least

    def __repr__(self) -> str:
        return f"tl.{self.name}"

    @property
    def torch(self) -> torch.dtype:
        dtype = getattr(torch, "bool" if self is BOOL else self.name)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def word(self) -> str:
        """Unsigned integer of the size of one value."""
        return f"u{max(self.bits, 8) // 8}"

    def encode(self, values: Array) -> Array:
        """Return values as they are in memory."""
        if self is BF16:
            return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return values.view(self.word)

    def decode(self, memory: Array) -> Array:
        if self is BF16:
            return (memory.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return memory != 0 if self is BOOL else memory.view(self.array)

    @property
    def overflow(self) -> np.longdouble:
        """Smallest power of two above the largest finite number."""
        return Wide(2) ** (2 - self.least)

    @property
    def largest(self) -> np.longdouble:
        return self.overflow * (1 - Wide(2) ** -self.precision)

    def ulp(self, x: Array) -> Array:
        """Return the distance between neighboring numbers of this type around x."""
        _, exponent = np.frexp(np.where(np.isfinite(x), x, 1))
        return np.asarray(np.ldexp(Wide(1), np.maximum(exponent - 1, self.least) - self.precision + 1))

    def round(self, x: Array) -> Array:
        """Return the nearest number of this float type, ties to even."""
        x = x.astype(Wide)
        unit = self.ulp(x)
        nearest = np.where(np.isfinite(x), np.rint(x / unit) * unit, x)
        nearest = np.where(np.abs(nearest) >= self.overflow, np.copysign(np.inf, nearest), nearest)
        return nearest.astype(self.array)

    def apply(self, f: Callable[..., Any], *args: Array) -> Array:
        """Return f of values of this type, rounded once. 16-bit floats are computed in float64, whose precision is
        more than twice theirs, so that rounding the result again is harmless."""
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
INTS = (I8, I16, I32, I64, U8, U16, U32, U64)
FLOATS, WIDE_FLOATS = (F16, BF16, F32, F64), (F32, F64)
NUMBERS, BITS, DTYPES = (*INTS, *FLOATS), (*INTS, BOOL), (*INTS, *FLOATS, BOOL)


@dataclass(frozen=True)
class Within:
    """A result known up to an interval. It is NaN where the ends are NaN, and anything where `open` is set."""

    low: Array
    high: Array
    open: Array | bool = False

    @staticmethod
    def around(exact: Array, margin: Array, open: Array | bool = False) -> Within:
        margin = np.where(np.isfinite(exact), margin, 0)
        return Within(exact - margin, exact + margin, open)

    def holds(self, dtype: DType, values: Array) -> Array:
        """Return whether each value is inside; infinity stands for the first number that is too large."""
        low, value, high = (
            np.clip(x, -dtype.overflow, dtype.overflow) for x in (self.low, values.astype(Wide), self.high)
        )
        inside = np.where(np.isnan(low), np.isnan(values), (low <= value) & (value <= high))
        return np.asarray(inside | self.open)


# ---- operations ------------------------------------------------------------------------------------------


class Applied(Protocol):
    """Properties of an applied operation that its evaluation needs besides the operands."""

    @property
    def source(self) -> DType: ...  # of the first operand
    @property
    def target(self) -> DType: ...  # of the result
    @property
    def shape(self) -> Shape: ...  # of the result
    @property
    def axis(self) -> Any: ...  # a number, or None for all axes
    @property
    def params(self) -> dict[str, Any]: ...


Evaluation = Callable[..., Array | Within]  # of the operation as applied, and of its operands


@dataclass(frozen=True)
class Operation:
    text: str  # a Triton expression in which {0}, {1}, ... are operands, and other names are parameters
    evaluate: Evaluation


OPERATIONS: dict[str, Operation] = {}


def operation(name: str, text: str) -> Callable[[Evaluation], Evaluation]:
    def define(evaluate: Evaluation) -> Evaluation:
        OPERATIONS[name] = Operation(text, evaluate)
        return evaluate

    return define


def elementwise(name: str, text: str, f: Callable[..., Any]) -> None:
    """Define an operation within one type."""
    operation(name, text)(lambda s, *args: s.target.apply(f, *args))


# -- exact, and within one type --


def smaller(a: Array, b: Array) -> Array:
    """Return the minimum. A NaN loses to a number, and +0 to -0."""
    if a.dtype.kind != "f":
        return np.asarray(np.minimum(a, b))
    return np.where((a < b) | np.isnan(b) | ((a == b) & np.signbit(a)), a, b)


def greater(a: Array, b: Array) -> Array:
    if a.dtype.kind != "f":
        return np.asarray(np.maximum(a, b))
    return np.where((a > b) | np.isnan(b) | ((a == b) & np.signbit(b)), a, b)


def _or_nan(f: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda a, b: np.where(np.isnan(a) | np.isnan(b), np.nan, f(a, b))


def _negative(x: Array) -> Array:
    """Return -x. Triton had no negation before 3.8: -x was 0 - x, which is +0 for +0."""
    has_negation = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)
    return np.asarray(-x if has_negation or x.dtype.kind != "f" else 0 - x)


def _quotient(a: Array, b: Array) -> Array:
    """Return the quotient rounded toward zero. Division by zero sets all bits; its remainder is the dividend."""
    return np.where(b == 0, ~np.zeros_like(b), (a - np.fmod(a, b)) // b)


def _high_half(a: Array, b: Array) -> Array:
    word = f"u{a.itemsize}"
    product = a.view(word).astype(object) * b.view(word).astype(object)
    return np.asarray(product >> (8 * a.itemsize), word).view(a.dtype)


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
elementwise("minimum", "tl.minimum({0}, {1})", smaller)
elementwise("maximum", "tl.maximum({0}, {1})", greater)
elementwise("least", "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", _or_nan(smaller))
elementwise("most", "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", _or_nan(greater))
elementwise("floor", "tl.floor({0})", np.floor)
elementwise("ceil", "tl.ceil({0})", np.ceil)
elementwise("sqrt", "tl.sqrt({0})", np.sqrt)
elementwise("sqrt_rn", "tl.sqrt_rn({0})", np.sqrt)
elementwise("div_rn", "tl.div_rn({0}, {1})", np.divide)
elementwise("quotient", "{0} // {1}", _quotient)
elementwise("remainder", "{0} % {1}", lambda a, b: np.where(b == 0, a, np.fmod(a, b)))
elementwise("umulhi", "tl.umulhi({0}, {1})", _high_half)


def _shift(f: Callable[[Array, Array], Array], in_range: bool) -> Evaluation:
    """Return a shift; a distance of the width or more shifts everything out."""

    def evaluate(s: Applied, a: Array, b: Array) -> Array:
        last = s.source.bits - 1
        distance = b.view(s.source.word)
        distance = distance & last if in_range else distance
        most = np.minimum(distance, last).astype(b.dtype)
        return np.asarray(f(f(a, most), (distance > last).astype(b.dtype)))

    return evaluate


operation("shl", "{0} << {1}")(_shift(np.left_shift, in_range=False))
operation("shr", "{0} >> {1}")(_shift(np.right_shift, in_range=False))
operation("shl_some", "{0} << ({1} & {last})")(_shift(np.left_shift, in_range=True))
operation("shr_some", "{0} >> ({1} & {last})")(_shift(np.right_shift, in_range=True))


def _odd_sum(a: Array, b: Array) -> Array:
    """Return a + b in float64, rounded to odd, so that rounding to half the precision rounds the exact sum."""
    total = a + b
    rest = total - a
    error = (a - (total - rest)) + (b - rest)
    even = np.isfinite(total) & (error != 0) & (total.view(np.int64) & 1 == 0)
    return np.where(even, np.nextafter(total, np.copysign(np.inf, error)), total)


_libm = ctypes.CDLL("libm.so.6")
_libm.fma.restype, _libm.fma.argtypes = ctypes.c_double, [ctypes.c_double] * 3
_fma_of_doubles = np.frompyfunc(_libm.fma, 3, 1)


@operation("fma", "tl.fma({0}, {1}, {2})")
def _fma(s: Applied, a: Array, b: Array, c: Array) -> Array:
    if s.target is F64:
        return np.asarray(_fma_of_doubles(a, b, c), np.float64)
    product = np.multiply(a, b, dtype=np.float64)  # exact
    return s.target.round(_odd_sum(*np.broadcast_arrays(product, c.astype(np.float64))))


@operation("where", "tl.where({0}, {1}, {2})")
def _where(s: Applied, condition: Array, a: Array, b: Array) -> Array:
    return np.where(condition, a, b)


# -- exact, from one type to another --


def cast(x: Array, source: DType, target: DType) -> Array:
    if target is BOOL:
        return np.asarray(x != 0)
    if target.kind == "f":
        return x.astype(np.float64) if target is F64 else target.round(x)
    if source.kind != "f":
        return x.astype(target.array)
    # PTX's cvt: toward zero; saturates at 16, 32 or 64 bits (8 bits are the lowest of 16); NaN is 0 or the highest bit
    word = np.dtype(f"{target.kind}{max(target.bits // 8, 2)}")
    low, high = np.iinfo(word).min, np.iinfo(word).max
    of_nan = (
        low + (1 << 8 * word.itemsize - 1) * (target.kind == "u") if 64 in (source.bits, target.bits) else 0
    )
    integral = np.trunc(np.where(np.isnan(x), of_nan, x).astype(Wide))
    return np.clip(integral, low, high).astype(word).astype(target.array)


@operation("cast", "{0}.to({dtype})")
def _cast(s: Applied, x: Array) -> Array:
    return cast(x, s.source, s.target)


@operation("bits", "{0}.to({dtype}, bitcast=True)")
def _bits(s: Applied, x: Array) -> Array:
    return s.target.decode(s.source.encode(x))


@operation("divide", "{0} / {1}")
def _divide(s: Applied, a: Array, b: Array) -> Array:
    """Return the quotient; integers and 16-bit floats are divided as f32."""
    return np.asarray(np.divide(cast(a, s.source, s.target), cast(b, s.source, s.target)))


@operation("fmod", "{0} % {1}")
def _fmod(s: Applied, a: Array, b: Array) -> Array:
    return np.asarray(np.fmod(cast(a, s.source, s.target), cast(b, s.source, s.target)))


@operation("clamp", "tl.clamp({0}, {low}, {high})")
def _clamp(s: Applied, x: Array) -> Array:
    low, high = (np.asarray(s.params[bound]) for bound in ("low", "high"))
    return smaller(greater(x, low), high)


COMPARISONS: dict[str, Callable[[Array, Array], Any]] = {
    "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal, "==": np.equal,
    "!=": np.not_equal,
}  # fmt: skip


@operation("compare", "{0} {sign} {1}")
def _compare(s: Applied, a: Array, b: Array) -> Array:
    return np.asarray(COMPARISONS[s.params["sign"]](a, b))


# -- within an ulp --


def _erf(x: Array) -> Array:
    def precise(value: float) -> np.longdouble:
        with mpmath.workprec(80):
            exact = mpmath.erf(value)
            return Wide(float(exact)) + Wide(float(exact - float(exact)))

    bounded = np.nan_to_num(x, nan=0, posinf=99, neginf=-99).astype(np.float64)
    exact = np.asarray(np.frompyfunc(precise, 1, 1)(bounded), Wide)
    return np.where(np.isnan(x), x, exact)


def transcendental(name: str, f: Callable[[Array], Any]) -> None:
    """Define a function that is evaluated here with 64 bits of precision."""

    def evaluate(s: Applied, x: Array) -> Within:
        exact = np.asarray(f(x.astype(Wide)))
        return Within.around(exact, s.target.ulp(exact))

    operation(name, f"tl.{name}({{0}})")(evaluate)


transcendental("exp", np.exp)
transcendental("exp2", np.exp2)
transcendental("log", np.log)
transcendental("log2", np.log2)
transcendental("sin", np.sin)
transcendental("cos", np.cos)
transcendental("erf", _erf)
transcendental("rsqrt", lambda x: 1 / np.sqrt(x))


@operation("sigmoid", "tl.sigmoid({0})")
def _sigmoid(s: Applied, x: Array) -> Within:
    """Return the sigmoid within four ulps: exp may be off by one, then come a sum and a quotient. It is 0 where exp
    overflows."""
    exact = 1 / (1 + np.exp(-x.astype(Wide)))
    return Within.around(exact, 4 * s.target.ulp(exact) + np.ldexp(Wide(1), s.target.least))


# -- shapes --


def shaping(name: str, text: str, f: Callable[..., Any]) -> None:
    operation(name, text)(lambda s, *args: np.asarray(f(s, *args)))


shaping("expand", "tl.expand_dims({0}, {axis})", lambda s, x: np.expand_dims(x, s.axis))
shaping("index", "{0}[{index}]", lambda s, x: x.reshape(s.shape))
shaping("broadcast", "tl.broadcast_to({0}, {shape})", lambda s, x: np.broadcast_to(x, s.shape))
shaping("reshape", "tl.reshape({0}, {shape})", lambda s, x: x.reshape(s.shape))
shaping("permute", "tl.permute({0}, {order})", lambda s, x: x.transpose(s.params["order"]))
shaping("join", "tl.join({0}, {1})", lambda s, a, b: np.stack([a, b], -1))
shaping("split", "tl.split({0})[{half}]", lambda s, x: x[..., s.params["half"]])
shaping(
    "gather",
    "tl.gather({0}, {1} & {last}, {axis})",
    lambda s, x, index: np.take_along_axis(x, index & s.params["last"], s.axis),
)
shaping(
    "range",
    "tl.arange({start}, {end})",
    lambda s: np.arange(s.params["start"], s.params["end"], dtype=np.int32),
)
shaping(
    "full", "tl.full({shape}, {text}, {dtype})", lambda s: np.full(s.shape, s.params["value"], s.target.array)
)

# -- along an axis --


def reduction(name: str, text: str, f: Callable[[Array, Array], Any]) -> None:
    """Define a reduction that is exact in any order."""

    def evaluate(s: Applied, x: Array) -> Array:
        x = cast(x, s.source, s.target)
        first, *rest = x.reshape(-1) if s.axis is None else np.moveaxis(x, s.axis, 0)
        for part in rest:
            first = f(first, part)
        return np.asarray(first).reshape(s.shape)

    operation(name, text)(evaluate)


reduction("max", "tl.max({0}, axis={axis}, keep_dims={keep})", greater)
reduction("min", "tl.min({0}, axis={axis}, keep_dims={keep})", smaller)
reduction("xor_sum", "tl.xor_sum({0}, axis={axis}, keep_dims={keep})", np.bitwise_xor)
reduction("all_bits", "tl.reduce({0}, {axis}, both, keep_dims={keep})", np.bitwise_and)
shaping(
    "argmax",
    "tl.argmax({0}, {axis}, keep_dims={keep})",
    lambda s, x: np.argmax(x, s.axis, keepdims=s.params["keep"]).astype(np.int32),
)
shaping(
    "argmin",
    "tl.argmin({0}, {axis}, keep_dims={keep})",
    lambda s, x: np.argmin(x, s.axis, keepdims=s.params["keep"]).astype(np.int32),
)
shaping(
    "top",
    "tl.max({0}, {axis}, return_indices=True, keep_dims={keep})[0]",
    lambda s, x: np.take_along_axis(x, np.argmax(x, s.axis, keepdims=True), s.axis).reshape(s.shape),
)


def _total(s: Applied, x: Array, add: Callable[[Array], Any], terms: int) -> Array | Within:
    """Return a sum of so many terms, by `add`. The error of a float sum in any order is at most terms - 1 roundings
    of the sum of magnitudes; it is 0 if all terms and sums are representable multiples of one unit."""
    if s.target.kind != "f":
        return np.asarray(add(x.astype(s.target.array)))
    finite = np.where(np.isfinite(x), x, 0).astype(Wide)
    magnitude = np.asarray(add(np.abs(finite)))
    unit = Wide(2) ** -8
    broken = add((finite % unit != 0).astype(Wide)) > 0
    inexact = broken | (magnitude > unit * Wide(2) ** s.target.precision)
    margin = np.where(inexact, (terms - 1) * magnitude * Wide(2) ** -s.target.precision * Wide(1.001), 0)
    return Within.around(np.asarray(add(x.astype(Wide))), margin, open=magnitude > s.target.largest)


@operation("sum", "tl.sum({0}, axis={axis}, keep_dims={keep})")
def _sum(s: Applied, x: Array) -> Array | Within:
    terms = x.size if s.axis is None else x.shape[s.axis]
    return _total(s, x, lambda t: np.sum(t, s.axis, dtype=t.dtype, keepdims=s.params["keep"]), terms)


def _scan(s: Applied, f: np.ufunc) -> Callable[[Array], Any]:
    oriented: Callable[[Array], Array] = (lambda x: np.flip(x, s.axis)) if s.params["reverse"] else np.asarray
    return lambda x: oriented(f.accumulate(oriented(x), s.axis, dtype=x.dtype))


@operation("cumsum", "tl.cumsum({0}, axis={axis}, reverse={reverse})")
def _cumsum(s: Applied, x: Array) -> Array | Within:
    return _total(s, x, _scan(s, np.add), x.shape[s.axis])


@operation("cumprod", "tl.cumprod({0}, axis={axis}, reverse={reverse})")
def _cumprod(s: Applied, x: Array) -> Array:
    return np.asarray(_scan(s, np.multiply)(x))


# ---- data ------------------------------------------------------------------------------------------------


def sample(dtype: DType, size: int, random: np.random.Generator) -> Array:
    """Return numbers of every kind: small, extreme, around powers of two, random bits; for floats also halves, NaN,
    infinities and subnormals. Often only mild ones, so that not everything becomes NaN or overflows."""
    if dtype is BOOL:
        return random.random(size) < random.random()
    with np.errstate(all="ignore"):
        return _floats(dtype, size, random) if dtype.kind == "f" else _integers(dtype, size, random)


def _integers(dtype: DType, size: int, random: np.random.Generator) -> Array:
    low, high = np.iinfo(dtype.array).min, np.iinfo(dtype.array).max
    powers = 2 ** random.integers(0, dtype.bits, (2, size)).astype(object)
    kinds = [
        random.integers(-9, 10, size).astype(object),
        (powers[0] + powers[1] + random.integers(-1, 2, size)) * random.choice([1, -1], size),
        random.choice(np.array([low, low + 1, 0, 1, high - 1, high], object), size),
        random.integers(low, high, size, dtype.array, endpoint=True).astype(object),
    ]
    weights = [0.97, 0.01, 0.01, 0.01] if random.random() < 0.3 else [0.3, 0.3, 0.1, 0.3]
    return np.asarray(_mixed(kinds, weights, random) & (2**dtype.bits - 1), dtype.word).view(dtype.array)


def _floats(dtype: DType, size: int, random: np.random.Generator) -> Array:
    tiny, huge = 2.0**dtype.least, float(dtype.largest)
    specials = [0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, tiny, -tiny, tiny / 4, huge, -huge]
    anything = random.integers(0, 2**dtype.bits - 1, size, np.uint64, endpoint=True).astype(dtype.word)
    kinds = [
        np.copysign(random.integers(0, 5, size), random.choice([1, -1], size)),
        random.standard_normal(size) * 2.0 ** random.integers(-3, 12),
        random.integers(-(2**12), 2**12, size) / 2,
        dtype.decode(anything).astype(np.float64),
        random.choice(specials, size),
    ]
    weights = [0.4, 0.3, 0.3, 0, 0] if random.random() < 0.5 else [0.15, 0.25, 0.1, 0.3, 0.2]
    return dtype.round(_mixed(kinds, weights, random))


def _mixed(kinds: list[Array], weights: list[float], random: np.random.Generator) -> Array:
    return np.choose(random.choice(len(kinds), kinds[0].size, p=weights), kinds)
