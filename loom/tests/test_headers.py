"""include/casts.h, math.h and convert<> of simd.h against references that share no code with them.

Number formats are defined here by tables of their values, and rounding by a search in these; functions are
compared with libm, numpy and mpmath in more precision than they claim. Each must give the same bits at every
vector width, and all compilers and instruction sets must agree.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import compilers
import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
from compilers import COMPILERS, TARGETS
from numpy.typing import NDArray

Array = NDArray[Any]

# ---- the functions, by signature -----------------------------------------------------------------------

FAST = "exp exp2 log log2 sin cos tanh erf"
LIBM = """
    tan asin acos atan sinh cosh asinh acosh atanh sinpi cospi log10 log1p expm1 exp10 cbrt rcbrt erfc erfcx
    erfinv erfcinv normcdf normcdfinv tgamma lgamma j0 j1 y0 y1 cyl_bessel_i0 cyl_bessel_i1
"""
EXACT = "sqrt rint nearbyint floor ceil trunc round abs rcp_rn"
BINARY = "add_rn sub_rn mul_rn div_rn pow atan2 hypot rhypot fmod remainder fdim nextafter"
EXTREME = "maxnum minnum maximum minimum"
SHIFTS, DIVISIONS = "shl shr sar", "divs divu rems remu"
FP8 = "e4m3 e5m2 e4m3fnuz e5m2fnuz"

CASTS = {
    "f32>u16": "bf16_from_f32 bf16_from_f32_rtz f16_from_f32 f16_from_f32_rtz u16_from_f32",
    "f32>u8": " ".join(f"{name}_from_f32 {name}_from_f32_rtz" for name in FP8.split()),
    "u16>f32": "f32_from_bf16 f32_from_f16",
    "u8>f32": "f32_from_e2m1 f32_from_e8m0 " + " ".join(f"f32_from_{name}" for name in FP8.split()),
    "f64>f32": "f32_odd_from_f64 f32_from_f64_rtz",
    "i64>f64 u64>f64": "f64_odd_from_i64",
    "f32>i16": "i16_from_f32",
    "f32>i32": "i32_from_f32",
    "f32>u32": "u32_from_f32",
    "f32>i64": "i64_from_f32",
    "f32>u64": "u64_from_f32",
    "f64>i16": "i16_from_f64",
    "f64>u16": "u16_from_f64",
    "f64>i32": "i32_from_f64",
    "f64>u32": "u32_from_f64",
    "f64>i64": "i64_from_f64",
    "f64>u64": "u64_from_f64",
}
INTEGERS = {
    "i8,i8>i8 i16,i16>i16 i32,i32>i32 i64,i64>i64 u32,u32>u32": f"{SHIFTS} {DIVISIONS}",
    "u32,u32>u32 i32,i32>i32": "mulhi_i32 mulhi_u32",
    "u64,u64>u64 i64,i64>i64": "mulhi_i64 mulhi_u64",
}
MATHS = {
    "f32>f32": f"{FAST} saturatef",
    "f32>f32 f64>f64": f"{EXACT} rsqrt",
    "f32,f32>f32 f64,f64>f64": f"{EXTREME} copysign",
    "f32,f32,f32>f32 f64,f64,f64>f64": "fma",
    "f64,f64,f64>f64": "fma_to_odd",
}
MORE_MATHS = {
    "f64>f64": FAST,
    "f32>f32 f64>f64": "logb",
    "f32,f32>f32 f64,f64>f64": BINARY,
}
RARE_MATHS = {
    "f32>f32 f64>f64": LIBM,
    "f32,f32,f32>f32 f64,f64,f64>f64": "norm3d rnorm3d",
    "f32,f32,f32,f32>f32 f64,f64,f64,f64>f64": "norm4d rnorm4d",
    "f32,i32>f32 f64,i32>f64": "powi ldexp",
    "i32,f32>f32 i32,f64>f64": "jn yn",
    "f32>i32 f64>i32": "isnan isinf isfinite signbit ilogb",
    "f32>i64 f64>i64": "llrint llround",
    "f32>i32": "float_as_int float2int_* float2uint_*",
    "f32>i64": "float2ll_* float2ull_*",
    "f64>i32": "double2int_* double2uint_* double2hiint double2loint",
    "f64>i64": "double2ll_* double2ull_* double_as_longlong",
    "f64>f32": "double2float_rn",
    "i32>f32": "int2float_rn uint2float_rn int_as_float",
    "i64>f32": "ll2float_rn ull2float_rn",
    "i32>f64": "int2double_rn uint2double_rn",
    "i64>f64": "ll2double_rn ull2double_rn longlong_as_double",
    "i32,i32>f64": "hiloint2double",
    "i32>i32 i64>i64": "abs brev",
    "i32>i32 i64>i32": "popc clz ffs",
    "i32,i32>i32 i64,i64>i64": "mulhi umulhi",
    "i32,i32>i32": "mul24 umul24 hadd rhadd uhadd urhadd",
    "i32,i32,i32>i32": "sad usad byte_perm",
}
DTYPES = {
    f"{kind}{bits}": np.dtype(f"{kind}{bits // 8}")
    for kind, bits in [*itertools.product("iu", (8, 16, 32, 64)), ("f", 32), ("f", 64)]
}


@dataclass(frozen=True)
class Function:
    name: str
    call: str
    inputs: tuple[str, ...]
    output: str

    def source(self, width: int) -> str:
        parameters = "".join(f"const {type_} *a{i}, " for i, type_ in enumerate(self.inputs))
        loads = ", ".join(f"load<vec<{type_}, {width}>>(a{i} + n)" for i, type_ in enumerate(self.inputs))
        call = self.call.replace("WIDTH", str(width))
        return (
            f"void {self.name}_{width}({parameters}{self.output} *r, i64 count) {{\n"
            f"  for (i64 n = 0; n < count; n += {width}) store(r + n, {call}({loads}));\n}}"
        )


def functions(table: dict[str, str], namespace: str = "") -> list[Function]:
    result = []
    for signatures, names in table.items():
        names = re.sub(r"(\w+)_\*", r"\1_rn \1_rz \1_rd \1_ru", names)
        for name, signature in itertools.product(names.split(), signatures.split()):
            inputs, output = signature.split(">")
            symbol = "_".join((name, *inputs.split(",")))
            result.append(Function(symbol, namespace + name, tuple(inputs.split(",")), output))
    return result


PORTABLE = functions(CASTS) + functions(INTEGERS) + functions(MATHS, "loom_math::")
COMMON = PORTABLE + functions(MORE_MATHS, "loom_math::")
RARE = functions(RARE_MATHS, "loom_math::")
CONVERSIONS = [
    Function(f"{to}_of_{of}", f"convert<vec<{to}, WIDTH>>", (of,), to)
    for of, to in itertools.permutations(DTYPES, 2)
]

# ---- building and calling them -------------------------------------------------------------------------


class Library:
    """Some functions, compiled for some vector widths."""

    def __init__(self, compiler: str, target: str, chosen: list[Function], widths: tuple[int, ...]) -> None:
        self.functions = {function.name: function for function in chosen}
        self.widths = widths
        bodies = [function.source(width) for function in chosen for width in widths]
        source = "\n".join(['#include "casts.h"', '#include "math.h"', 'extern "C" {', *bodies, "}"])
        self.loaded = compilers.library(source, compiler, f"-march={target}")

    def __call__(self, name: str, *inputs: Array, width: int | None = None) -> Array:
        """Return the result at `width`, or at all widths, which must agree in every bit."""
        if width is None:
            first, *others = (self(name, *inputs, width=w) for w in self.widths)
            for other, w in zip(others, self.widths[1:], strict=True):
                assert same(first, other).all(), f"{name} at width {w}: {differences(first, other, *inputs)}"
            return first
        function, count = self.functions[name], len(inputs[0])
        room = -(-count // 64) * 64
        padded = [
            np.resize(x.astype(DTYPES[t], copy=False), room)
            for x, t in zip(inputs, function.inputs, strict=True)
        ]
        result = np.empty(room, DTYPES[function.output])
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*padded, result)]
        self.loaded[f"{name}_{width}"](*pointers, ctypes.c_int64(room))
        return result[:count]


@functools.cache
def common(compiler: str, target: str) -> Library:
    if target == "x86-64-v3" and " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this machine has no AVX2")
    if (compiler, target) == (COMPILERS[0], TARGETS[0]):
        return Library(compiler, target, COMMON, (1, 4, 8, 16))
    return Library(compiler, target, PORTABLE, (1, 8 if target == "x86-64" else 16))


@functools.cache
def rare() -> Library:
    return Library(COMPILERS[0], "native", RARE, (1, 4, 8, 16))


def is_rare(compiler: str, target: str) -> bool:
    """Return whether neither the compiler nor the instruction set is the usual one of users."""
    return compiler != COMPILERS[0] and target != TARGETS[0]


@pytest.fixture(
    params=[
        pytest.param(f"{c} {t}", marks=[pytest.mark.slow] if is_rare(c, t) else [])
        for c in COMPILERS
        for t in TARGETS
    ]
)
def library(request: pytest.FixtureRequest) -> Library:
    return common(*request.param.split())


@pytest.fixture
def native() -> Library:
    return common(COMPILERS[0], TARGETS[0])


def same(x: Array, y: Array) -> Array:
    """Return where the bits are equal; all NaNs count as equal."""
    equal: Array = x.view(f"u{x.itemsize}") == y.view(f"u{y.itemsize}")
    return equal | (np.isnan(x) & np.isnan(y)) if x.dtype.kind == "f" else equal


def differences(got: Array, expected: Array, *inputs: Array) -> str:
    indices = np.flatnonzero(~same(got, expected))
    cases = (
        f"({', '.join(shown(x[i]) for x in inputs)}) gives {shown(got[i])}, not {shown(expected[i])}"
        for i in indices[:5]
    )
    return f"{len(indices)} of {len(got)} differ: " + "; ".join(cases)


def shown(x: Any) -> str:
    return float(x).hex() if x.dtype.kind == "f" else hex(x)


def assert_same(got: Array, expected: Array, *inputs: Array) -> None:
    expected = expected.astype(got.dtype, copy=False)
    assert same(got, expected).all(), differences(got, expected, *inputs)


# ---- numbers worth trying ------------------------------------------------------------------------------

RNG = np.random.default_rng(2)
SEEDED = RNG.bit_generator.state


@pytest.fixture(autouse=True)
def same_numbers_in_any_order_of_tests() -> Iterator[None]:
    RNG.bit_generator.state = SEEDED
    with np.errstate(all="ignore"):
        yield


def cases(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return inputs with their expected results, computed once for all compilers."""

    @functools.cache
    def once(*key: Any) -> Any:
        RNG.bit_generator.state = SEEDED
        return generate(*key)

    return once


def bit_patterns(type_: str, count: int) -> Array:
    """Return random bits, which as floats cover all exponents, NaNs and subnormals included."""
    dtype = DTYPES[type_]
    return np.frombuffer(RNG.bytes(count * dtype.itemsize), dtype)


def special(type_: str) -> Array:
    dtype = DTYPES[type_]
    if dtype.kind != "f":
        info = np.iinfo(dtype)
        sizes = [0, 1, 2, 3, 5, 7, 8, 15, 16, 31, 32, 33, 63, 64, 100, info.max, info.max - 1, info.max // 2]
        integers = {x for size in sizes for x in (size, -size, -size - 1) if info.min <= x <= info.max}
        return np.array(sorted(integers), dtype)
    limits = np.finfo(dtype)
    around = [0.0, 0.5, 1, 1.5, 2, 2.5, 3, 10, 100, 1e4, limits.max, limits.tiny, limits.smallest_subnormal]
    around += [x for power in (8, 16, 23, 24, 31, 32, 52, 53, 63, 64) for x in (2.0**power, 2.0**power - 0.5)]
    positive = np.array(around, dtype)
    neighbors = [np.nextafter(positive, dtype.type(end)) for end in (0, math.inf)]
    numbers = np.concatenate([positive, *neighbors, np.array([math.inf, math.nan], dtype)])
    return np.concatenate([numbers, -numbers])


def samples(type_: str, count: int = 4096) -> Array:
    return np.concatenate([special(type_), bit_patterns(type_, count)])


# ---- number formats ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """A format of sign, exponent and mantissa. "ieee" has infinities and NaNs at the top exponent, "fn" a NaN only
    at the top code, "fnuz" a NaN in place of negative zero."""

    mantissa: int
    bias: int
    kind: str
    bits: int = 8
    saturates: bool = True

    @functools.cached_property
    def finite(self) -> Array:
        """Return the value of each non-negative finite code."""
        codes = np.arange(1 << (self.bits - 1))
        exponent, fraction = codes >> self.mantissa, codes % (1 << self.mantissa) / (1 << self.mantissa)
        values = np.where(
            exponent > 0, (1 + fraction) * 2.0 ** (exponent - self.bias), fraction * 2.0 ** (1 - self.bias)
        )
        infinity = (
            (exponent.max() << self.mantissa) if self.kind == "ieee" else len(codes) - (self.kind == "fn")
        )
        return values[:infinity]

    @functools.cached_property
    def ladder(self) -> Array:
        """Return the finite values, and the value that would follow."""
        return np.append(self.finite, 2 * self.finite[-1] - self.finite[-2])

    @functools.cached_property
    def midpoints(self) -> Array:
        return (self.ladder[1:] + self.ladder[:-1]) / 2

    @property
    def nan(self) -> int:
        return 0x80 if self.kind == "fnuz" else 0x7F if self.bits == 8 else 0x7FFF

    def encode(self, x: Array, toward_zero: bool = False) -> Array:
        """Return the codes of float64 values."""
        size, last = np.abs(x), len(self.finite) - 1
        if toward_zero:
            code = np.searchsorted(self.ladder, size, "right") - 1
            code = np.where(np.isinf(x), last + 1, np.minimum(code, last))
        else:
            code = np.searchsorted(self.midpoints, size, "left")
            tied = (code <= last) & (self.midpoints[np.minimum(code, last)] == size)
            code += tied & (code % 2 == 1)
        if self.saturates:
            code = np.minimum(code, last)
        signed = np.signbit(x) & ((code != 0) | (self.kind != "fnuz"))
        code = code | signed.astype(int) << (self.bits - 1)
        return np.where(np.isnan(x), self.nan, code).astype(f"u{self.bits // 8}")

    def decode(self, codes: Array) -> Array:
        magnitude = codes % (1 << (self.bits - 1))
        table = np.full(1 << (self.bits - 1), np.nan)
        table[: len(self.finite)] = self.finite
        if self.kind == "ieee":
            table[len(self.finite)] = np.inf
        values = np.copysign(table[magnitude], np.where(codes >> (self.bits - 1), -1.0, 1.0))
        return np.where((self.kind == "fnuz") & (codes == self.nan), np.nan, values)


FORMATS = {
    "bf16": Format(7, 127, "ieee", bits=16, saturates=False),
    "f16": Format(10, 15, "ieee", bits=16, saturates=False),
    "e4m3": Format(3, 7, "fn"),
    "e5m2": Format(2, 15, "ieee"),
    "e4m3fnuz": Format(3, 8, "fnuz"),
    "e5m2fnuz": Format(2, 16, "fnuz"),
}
by_format = pytest.mark.parametrize("name", FORMATS)


@cases
def boundaries(name: str, type_: str) -> Array:
    """Return every value and midpoint with its two neighbors on each side, and random bits."""
    dtype = DTYPES[type_]
    edges = np.concatenate([FORMATS[name].ladder, FORMATS[name].midpoints])
    steps = (
        edges[edges < np.finfo(dtype).max].astype(dtype).view(f"i{dtype.itemsize}")
        + np.arange(-2, 3)[:, None]
    )
    near = np.unique(np.maximum(steps, 0)).view(dtype)
    return np.concatenate([near, -near, samples(type_, 1 << 14)])


@cases
def encoded_boundaries(name: str, type_: str, toward_zero: bool) -> Array:
    return FORMATS[name].encode(boundaries(name, type_).astype(np.float64), toward_zero)


def assert_encodes(name: str, got: Array, x: Array, expected: Array) -> None:
    form = FORMATS[name]
    if form.bits == 16:  # which of its many NaNs is left open
        assert (np.isnan(form.decode(got)) == np.isnan(x)).all()
        expected = np.where(np.isnan(x), got, expected)
    assert_same(got, expected, x)


@by_format
def test_narrow_casts_round_correctly(library: Library, name: str) -> None:
    x = boundaries(name, "f32")
    for toward_zero, suffix in ((False, ""), (True, "_rtz")):
        got = library(f"{name}_from_f32{suffix}_f32", x)
        assert_encodes(name, got, x, encoded_boundaries(name, "f32", toward_zero))


@by_format
def test_narrow_casts_of_f64_round_once(library: Library, name: str) -> None:
    x = boundaries(name, "f64")
    got = library(f"{name}_from_f32_f32", library("f32_odd_from_f64_f64", x))
    assert_encodes(name, got, x, encoded_boundaries(name, "f64", False))


@by_format
def test_narrow_casts_of_all_16_bit_floats(native: Library, name: str) -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    for source, (toward_zero, suffix) in itertools.product(("bf16", "f16"), ((False, ""), (True, "_rtz"))):
        x = native(f"f32_from_{source}_u16", codes)
        expected = FORMATS[name].encode(x.astype(np.float64), toward_zero)
        assert_encodes(name, native(f"{name}_from_f32{suffix}_f32", x), x, expected)


def test_rounding_to_odd(library: Library) -> None:
    single = bit_patterns("f32", 1 << 14).astype(np.float64)
    x = np.concatenate([samples("f64"), single, np.nextafter(single, np.inf), np.nextafter(single, -np.inf)])
    got = library("f32_odd_from_f64_f64", x)
    near = x.astype(np.float32)
    away = np.abs(near.astype(np.float64)) > np.abs(x)
    below = np.where(away, near.view(np.int32) - 1, near.view(np.int32))
    assert_same(library("f32_from_f64_rtz_f64", x), below.astype(np.int32).view(np.float32), x)
    inexact = ~np.isnan(x) & (near.astype(np.float64) != x)
    assert_same(got, np.where(inexact, below | 1, near.view(np.int32)).astype(np.int32).view(np.float32), x)


@cases
def integers_at_boundaries(name: str, of: str) -> tuple[Array, Array, Array]:
    """Return integers, float64s that are equal or on the same side of every midpoint, and the codes."""
    form, info = FORMATS[name], np.iinfo(DTYPES[of])
    edges = [int(v) for v in np.concatenate([form.ladder, form.midpoints]) if 1 <= v < 2**64]
    near = {sign * (v + step) for v in edges for step in (-1, 0, 1) for sign in (1, -1)}
    x = np.concatenate([samples(of), np.array([v for v in near if info.min <= v <= info.max], DTYPES[of])])
    as_floats = [v if abs(v) < 2**53 else math.ldexp(v >> 11 | (v % 2048 > 0), 11) for v in x.tolist()]
    y = np.array(as_floats, np.float64)
    return x, y, form.encode(y)


@by_format
@pytest.mark.parametrize("of", ["i64", "u64"])
def test_narrow_casts_of_64_bit_integers_round_once(library: Library, of: str, name: str) -> None:
    x, y, expected = integers_at_boundaries(name, of)
    odd = library("f32_odd_from_f64_f64", library(f"f64_odd_from_i64_{of}", x))
    assert_encodes(name, library(f"{name}_from_f32_f32", odd), y, expected)


@by_format
def test_narrow_floats_decode_exactly(library: Library, name: str) -> None:
    form = FORMATS[name]
    codes = np.arange(1 << form.bits, dtype=f"u{form.bits // 8}")
    assert_same(library(f"f32_from_{name}_u{form.bits}", codes), form.decode(codes), codes)


def test_operands_of_scaled_dots_decode_exactly(library: Library) -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert_same(library("f32_from_e2m1_u8", codes[:16]), np.concatenate([values, -values]), codes[:16])
    scales = np.where(codes == 255, np.nan, 2.0 ** (codes.astype(float) - 127))
    assert_same(library("f32_from_e8m0_u8", codes), scales, codes)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("bf16", "bfloat16"),
        ("e4m3", "float8_e4m3fn"),
        ("e5m2", "float8_e5m2"),
        ("e4m3fnuz", "float8_e4m3fnuz"),
        ("e5m2fnuz", "float8_e5m2fnuz"),
    ],
)
def test_the_reference_agrees_with_ml_dtypes(name: str, other: str) -> None:
    dtype = getattr(pytest.importorskip("ml_dtypes"), other)
    form = FORMATS[name]
    x = boundaries(name, "f32")
    x = x[np.abs(x) <= form.finite[-1]]  # ml_dtypes does not saturate
    assert_same(form.encode(x.astype(np.float64)), x.astype(dtype).view(f"u{form.bits // 8}"), x)


# ---- floats to integers, and convert<> -----------------------------------------------------------------


def saturated(x: Array, type_: str) -> Array:
    """Return saturated integers; NaN gives 0, or only the highest bit set if 64 bits are involved."""
    info = np.iinfo(DTYPES[type_])
    highest_bit = info.min if info.min else 1 << (info.bits - 1)
    of_nan = highest_bit if 64 in (info.bits, 8 * x.itemsize) else 0
    truncated = [of_nan if math.isnan(v) else v if math.isinf(v) else math.trunc(v) for v in x.tolist()]
    return np.array([int(min(max(v, info.min), info.max)) for v in truncated], DTYPES[type_])


@cases
def floats_to_integers(of: str, to: str) -> tuple[Array, Array]:
    scaled = RNG.uniform(-1, 1, 2000) * 2.0 ** RNG.integers(0, 66, 2000)
    x = np.concatenate([samples(of), scaled.astype(DTYPES[of])])
    return x, saturated(x, to)


@pytest.mark.parametrize("to", ["i16", "u16", "i32", "u32", "i64", "u64"])
@pytest.mark.parametrize("of", ["f32", "f64"])
def test_integers_from_floats_saturate(library: Library, of: str, to: str) -> None:
    x, expected = floats_to_integers(of, to)
    assert_same(library(f"{to}_from_{of}_{of}", x), expected, x)


@pytest.mark.parametrize("target", TARGETS)
def test_conversions_between_all_element_types(target: str) -> None:
    converting = Library(COMPILERS[0], target, CONVERSIONS, (1, 2, 16, 32) if target == "native" else (1, 16))
    for function in CONVERSIONS:
        of, to = DTYPES[function.inputs[0]], DTYPES[function.output]
        x = samples(function.inputs[0], 1024)
        if of.kind == "f" and to.kind != "f":  # C++ leaves open what does not fit
            x = RNG.uniform(0 if to.kind == "u" else -100, 100, 1024).astype(of)
        assert_same(converting(function.name, x), x.astype(to), x)


# ---- floating point functions --------------------------------------------------------------------------

TRUTH: dict[str, Any] = {name: getattr(np, name) for name in FAST.split() if name != "erf"} | {
    "erf": lambda x: np.array([math.erf(v) for v in x.tolist()])
}


def ulps(got: Array, truth: Array) -> Array:
    """Return the error in ulps of `truth` in `got`'s type; infinite where one of the two is NaN, infinite or zero
    (with its sign) and the other is not."""
    limits = np.finfo(got.dtype)
    top = 2.0**limits.maxexp if got.dtype == np.float32 else math.inf
    _, exponent = np.frexp(truth)
    unit = np.ldexp(1.0, np.maximum(exponent - 1, limits.minexp) - limits.nmant)
    error = np.abs(np.clip(got.astype(np.float64), -top, top) - np.clip(truth, -top, top)) / unit
    exact = (np.isnan(got) & np.isnan(truth)) | ((got == truth) & (np.signbit(got) == np.signbit(truth)))
    must_be_exact = ~np.isfinite(truth) | np.isnan(got) | (truth == 0)
    return np.where(exact, 0, np.where(must_be_exact, np.inf, error))


def assert_within(got: Array, truth: Array, limit: float, *inputs: Array) -> None:
    error = ulps(got, truth)
    worst = int(np.argmax(error))
    arguments = ", ".join(shown(x[worst]) for x in inputs)
    assert error[worst] < limit, f"f({arguments}) is {got[worst]}, {error[worst]:.3f} ulp off {truth[worst]}"


@cases
def inputs_of_fast_functions() -> Array:
    """Return all exponents, the usual range, numbers around 1, and next to the multiples of pi / 2."""
    usual = [RNG.uniform(-110, 100, 1 << 15), RNG.normal(0, 2, 1 << 16), 1 + RNG.normal(0, 0.3, 1 << 16)]
    turns = np.arange(1, 20000) * (math.pi / 2)
    return np.concatenate([samples("f32", 1 << 17), *(x.astype(np.float32) for x in (*usual, turns))])


@cases
def truth_of(name: str) -> Any:
    return TRUTH[name](inputs_of_fast_functions().astype(np.float64))


@pytest.mark.parametrize("name", FAST.split())
def test_fast_functions_are_within_one_ulp(library: Library, name: str) -> None:
    x = inputs_of_fast_functions()
    assert_within(library(f"{name}_f32", x), truth_of(name), 1, x)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST.split())
def test_fast_functions_are_within_one_ulp_everywhere(native: Library, name: str) -> None:
    for start in range(0, 1 << 32, 1 << 22):
        x = np.arange(start, start + (1 << 22), dtype=np.uint32).view(np.float32)
        # libm's erf takes over from Python's, which is 20 times slower
        truth = native("erf_f64", x, width=1) if name == "erf" else TRUTH[name](x.astype(np.float64))
        assert_within(native(f"{name}_f32", x), truth, 1, x)


@pytest.mark.slow
@pytest.mark.parametrize("name", FP8.split())
def test_fp8_casts_of_all_f32(native: Library, name: str) -> None:
    for start in range(0, 1 << 32, 1 << 22):
        x = np.arange(start, start + (1 << 22), dtype=np.uint32).view(np.float32)
        expected = FORMATS[name].encode(x.astype(np.float64))
        assert_encodes(name, native(f"{name}_from_f32_f32", x, width=16), x, expected)


by_float = pytest.mark.parametrize("type_", ["f32", "f64"])


def half_away(x: float) -> float:
    if not math.isfinite(x):
        return x
    return math.copysign(math.floor(abs(Fraction(x)) + Fraction(1, 2)), x)


@cases
def wholes_and_halves(type_: str) -> tuple[Array, Array]:
    """Return numbers, and the same rounded with halves away from zero."""
    x = samples(type_, 1 << 12)
    x = np.concatenate([x, (RNG.integers(-99, 99, 1000) / 2).astype(x.dtype)])
    return x, np.array([half_away(v) for v in x.tolist()])


@by_float
def test_exact_functions(library: Library, type_: str) -> None:
    x, rounded = wholes_and_halves(type_)
    expected = {name: getattr(np, name)(x) for name in ("sqrt", "rint", "floor", "ceil", "trunc", "abs")}
    expected |= {"nearbyint": np.rint(x), "round": rounded, "rcp_rn": 1 / x}
    if type_ == "f32":
        expected["saturatef"] = np.where(np.isnan(x), 0, np.clip(x, 0, 1) + 0)
    for name, values in expected.items():
        assert_same(library(f"{name}_{type_}", x), values, x)
    y = RNG.permutation(x)
    assert_same(library(f"copysign_{type_}_{type_}", x, y), np.copysign(x, y), x, y)


def logb(x: float) -> float:
    return math.frexp(x)[1] - 1 if x and math.isfinite(x) else -math.inf if x == 0 else abs(x)


@by_float
def test_reciprocal_square_root(library: Library, type_: str) -> None:
    x = samples(type_, 1 << 16 if type_ == "f32" else 500)
    truth = 1 / np.sqrt(x.astype(np.float64))
    got = library(f"rsqrt_{type_}", x)
    assert_within(got, truth, 1 if type_ == "f32" else 3, x)
    if type_ == "f64":
        with mpmath.workdps(40):
            pairs = [(v, r) for v, r in zip(x.tolist(), got.tolist(), strict=True) if 0 < v < math.inf]
            assert all(abs(mpmath.mpf(r) * mpmath.sqrt(v) - 1) < 2**-52 for v, r in pairs)


def nearest(exact: Fraction, dtype: np.dtype[Any]) -> Any:
    """Return the number of `dtype` nearest to `exact`, ties to even: the best of three candidates."""
    guess = dtype.type(float(exact))
    around = [np.nextafter(guess, dtype.type(-np.inf)), guess, np.nextafter(guess, dtype.type(np.inf))]
    integer = f"i{dtype.itemsize}"
    return min(
        (x for x in around if np.isfinite(x)),
        key=lambda x: (abs(Fraction(float(x)) - exact), x.view(integer) & 1),
    )


@cases
def sums_of_products(type_: str) -> tuple[Array, ...]:
    dtype = DTYPES[type_]
    a, b = (RNG.normal(0, 1, 1000).astype(dtype) for _ in range(2))
    noise = (1 + RNG.integers(-2, 3, 1000) * np.finfo(dtype).eps).astype(dtype)
    c = np.where(RNG.random(1000) < 0.7, -a * b * noise, RNG.normal(0, 1, 1000)).astype(dtype)
    x, y, z = ([Fraction(v) for v in operand.tolist()] for operand in (a, b, c))
    return a, b, c, np.array([nearest(p * q + r, dtype) for p, q, r in zip(x, y, z, strict=True)])


@by_float
def test_fused_multiply_add_rounds_once(library: Library, type_: str) -> None:
    a, b, c, expected = sums_of_products(type_)
    assert_same(library(f"fma_{type_}_{type_}_{type_}", a, b, c), expected, a, b, c)


@cases
def sums_of_narrow_products(name: str) -> tuple[Array, ...]:
    """Return cases where a b is a midpoint of the format and c only breaks the tie."""
    form = FORMATS[name]
    low, high = 2 << form.mantissa, 4 << form.mantissa
    factors = [
        (p, q) for p in range(3, 64, 2) for q in range(low // p, high // p) if q % 2 and low < p * q < high
    ]
    p, q = np.array([factors[i] for i in RNG.integers(0, len(factors), 1000)], np.float64).T
    a, b = p * np.where(RNG.random(1000) < 0.5, -1, 1), q / low
    c = RNG.choice([0, 1, -1], 1000) * 2.0 ** RNG.integers(-23 if name == "f16" else -90, -12, 1000)
    exact = [
        Fraction(x) * Fraction(y) + Fraction(z)
        for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    guess = form.encode(np.array([float(value) for value in exact])) % (1 << 15)
    around = (
        (abs(Fraction(float(form.finite[code])) - abs(value)), code % 2, code)
        for g, value in zip(guess.tolist(), exact, strict=True)
        for code in (g - 1, g, g + 1)
    )
    codes = [min(three)[2] for three in zip(around, around, around, strict=True)]
    signs = [int(value < 0) << 15 for value in exact]
    return a, b, c, np.array(codes) | np.array(signs)


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_fused_multiply_add_of_16_bit_floats_rounds_once(library: Library, name: str) -> None:
    a, b, c, expected = sums_of_narrow_products(name)
    odd = library("f32_odd_from_f64_f64", library("fma_to_odd_f64_f64_f64", a, b, c))
    assert_same(library(f"{name}_from_f32_f32", odd), expected, a, b, c)


@by_float
def test_maximum_and_minimum(library: Library, type_: str) -> None:
    numbers = np.array([np.nan, -np.nan, 0.0, -0.0, 1, -1, np.inf, -np.inf, 1e-40, -1e-40, 2], DTYPES[type_])
    x, y = (grid.ravel() for grid in np.meshgrid(numbers, numbers))
    x, y = (np.concatenate([grid, bit_patterns(type_, 4096)]) for grid in (x, y))
    for name, better in (("max", operator.gt), ("min", operator.lt)):

        def dropping(a: float, b: float, better: Callable[[Any, Any], bool] = better) -> float:
            if math.isnan(a) or math.isnan(b):
                return b if math.isnan(a) else a
            return (
                a if better((a, math.copysign(1, a)), (b, math.copysign(1, b))) else b
            )  # -0 is less than +0

        number = np.array(list(map(dropping, x.tolist(), y.tolist())))
        assert_same(library(f"{name}num_{type_}_{type_}", x, y), number, x, y)
        propagating = np.where(np.isnan(x) | np.isnan(y), np.nan, number)
        assert_same(library(f"{name}imum_{type_}_{type_}", x, y), propagating, x, y)


BINARY_TRUTH: dict[str, Callable[..., Any]] = {
    "add_rn": operator.add,
    "sub_rn": operator.sub,
    "mul_rn": operator.mul,
    "div_rn": operator.truediv,
    "pow": np.power,
    "atan2": np.arctan2,
    "hypot": np.hypot,
    "rhypot": lambda x, y: 1 / np.hypot(x, y),
    "fmod": np.fmod,
    "remainder": np.vectorize(lambda x, y: math.remainder(x, y) if math.isfinite(x) and y else math.nan),
    "fdim": lambda x, y: np.where(np.isnan(x) | np.isnan(y), np.nan, np.where(x > y, x - y, 0.0)),
}


@by_float
def test_functions_of_two_numbers(native: Library, type_: str) -> None:
    x = np.concatenate([samples(type_, 2000), RNG.normal(0, 3, 4000).astype(DTYPES[type_])])
    y = np.concatenate([RNG.permutation(samples(type_, 2000)), RNG.normal(0, 3, 4000).astype(DTYPES[type_])])
    for name, truth in BINARY_TRUTH.items():
        expected = truth(x.astype(np.float64), y.astype(np.float64))
        limit = 0.51 if type_ == "f32" else 2
        assert_within(native(f"{name}_{type_}_{type_}", x, y), expected, limit, x, y)
    assert_same(native(f"nextafter_{type_}_{type_}", x, y), np.nextafter(x, y), x, y)


PRECISE: dict[str, tuple[Callable[[Any], Any], float, float]] = {
    "tan": (mpmath.tan, -20, 20),
    "asin": (mpmath.asin, -1, 1),
    "acos": (mpmath.acos, -1, 1),
    "atan": (mpmath.atan, -30, 30),
    "sinh": (mpmath.sinh, -50, 50),
    "cosh": (mpmath.cosh, -50, 50),
    "asinh": (mpmath.asinh, -50, 50),
    "acosh": (mpmath.acosh, 1, 50),
    "atanh": (mpmath.atanh, -1, 1),
    "sinpi": (mpmath.sinpi, -40, 40),
    "cospi": (mpmath.cospi, -40, 40),
    "log10": (mpmath.log10, 0, 100),
    "log1p": (mpmath.log1p, -1, 3),
    "expm1": (mpmath.expm1, -3, 30),
    "exp10": (lambda x: mpmath.mpf(10) ** x, -30, 30),
    "cbrt": (lambda x: mpmath.sign(x) * mpmath.cbrt(abs(x)), -100, 100),
    "rcbrt": (lambda x: mpmath.sign(x) / mpmath.cbrt(abs(x)), -100, 100),
    "erfc": (mpmath.erfc, -5, 9),
    "erfcx": (lambda x: mpmath.exp(x * x) * mpmath.erfc(x), -5, 60),
    "erfinv": (mpmath.erfinv, -1, 1),
    "erfcinv": (lambda x: mpmath.erfinv(1 - x), 0, 2),
    "normcdf": (mpmath.ncdf, -10, 10),
    "normcdfinv": (lambda x: mpmath.sqrt(2) * mpmath.erfinv(2 * x - 1), 0, 1),
    "tgamma": (mpmath.gamma, 0, 30),
    "lgamma": (lambda x: mpmath.log(abs(mpmath.gamma(x))), -20, 30),
    "j0": (mpmath.j0, -40, 40),
    "j1": (mpmath.j1, -40, 40),
    "y0": (lambda x: mpmath.bessely(0, x), 0, 40),
    "y1": (lambda x: mpmath.bessely(1, x), 0, 40),
    "cyl_bessel_i0": (lambda x: mpmath.besseli(0, x), -30, 30),
    "cyl_bessel_i1": (lambda x: mpmath.besseli(1, x), -30, 30),
}


@by_float
@pytest.mark.parametrize("name", PRECISE)
def test_rare_functions(name: str, type_: str) -> None:
    function, low, high = PRECISE[name]
    x = np.concatenate([RNG.uniform(low, high, 40), RNG.uniform(low, high, 20) * 1e-3]).astype(DTYPES[type_])
    x = x[(x > low) & (x < high)]
    with mpmath.workdps(60):
        truth = np.array([float(function(mpmath.mpf(v))) for v in x.tolist()])
    got = rare()(f"{name}_{type_}", x)
    if re.match("[jy][01]|lgamma", name):  # near its zeros, libm bounds but the absolute error
        assert (np.abs(got - truth) <= np.finfo(x.dtype).eps * np.maximum(np.abs(truth), 1) * 4).all()
    else:
        assert_within(got, truth, 0.51 if type_ == "f32" else 20 if "bessel" in name else 8, x)


@by_float
def test_rare_functions_at_their_ends(native: Library, type_: str) -> None:
    inf, nan = math.inf, math.nan
    ends = {
        "erfinv": [(0.0, 0.0), (-0.0, -0.0), (1, inf), (-1, -inf), (2, nan)],
        "erfcinv": [(0, inf), (1, 0), (2, -inf), (3, nan), (-1, nan)],
        "normcdf": [(inf, 1), (-inf, 0), (0, 0.5), (nan, nan)],
        "normcdfinv": [(0, -inf), (1, inf), (2, nan)],
        "erfcx": [(inf, 0), (-inf, inf), (0, 1), (-30, inf)],
        "sinpi": [(0.0, 0.0), (-0.0, -0.0), (1, 0), (0.5, 1), (1e30, 0), (inf, nan)],
        "cospi": [(0, 1), (0.5, 0), (1, -1), (1e30, 1), (inf, nan)],
        "cyl_bessel_i0": [(0, 1), (inf, inf), (1e30, inf), (nan, nan)],
        "cyl_bessel_i1": [(0, 0), (inf, inf), (-inf, -inf), (nan, nan)],
        "lgamma": [(0, inf), (1, 0), (2, 0), (-1, inf), (inf, inf)],
    }
    for name, cases in ends.items():
        x, expected = np.array(cases, DTYPES[type_]).T.copy()
        assert_same(rare()(f"{name}_{type_}", x), expected, x)
    x = samples(type_)
    assert_same(native(f"logb_{type_}", x), np.array([logb(v) for v in x.tolist()]), x)


# ---- integers ------------------------------------------------------------------------------------------


def quotient(a: int, b: int) -> int:
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def unsigned(x: int, bits: int) -> int:
    return x % (1 << bits)


INTEGER_TRUTH: dict[str, Callable[[int, int, int], int]] = {
    "divs": lambda a, b, n: quotient(a, b),
    "rems": lambda a, b, n: a - quotient(a, b) * b,
    "divu": lambda a, b, n: quotient(unsigned(a, n), unsigned(b, n)),
    "remu": lambda a, b, n: unsigned(a, n) - quotient(unsigned(a, n), unsigned(b, n)) * unsigned(b, n),
    "shl": lambda a, b, n: a << unsigned(b, n) if unsigned(b, n) < n else 0,
    "shr": lambda a, b, n: unsigned(a, n) >> unsigned(b, n) if unsigned(b, n) < n else 0,
    "sar": lambda a, b, n: a >> min(unsigned(b, n), n - 1),
    "mulhi_i": lambda a, b, n: a * b >> n,
    "mulhi_u": lambda a, b, n: unsigned(a, n) * unsigned(b, n) >> n,
}


def pairs_of(type_: str) -> tuple[Array, Array]:
    """Return every pair of edge cases, random pairs of all sizes, and products with a remainder of 0 or 1."""
    dtype = DTYPES[type_]
    x, y = (grid.ravel() for grid in np.meshgrid(special(type_), special(type_)))
    sizes = RNG.integers(0, dtype.itemsize * 8, (2, 3000)).astype(dtype)
    a, b = (bit_patterns(type_, 3000) >> size for size in sizes)
    products = [a * b, a * b + 1, a * b - 1]
    return np.concatenate([x, a, *products]), np.concatenate([y, b, b, b, b])


def wrapped(numbers: list[int], type_: str) -> Array:
    bits = DTYPES[type_].itemsize * 8
    return np.array([unsigned(x, bits) for x in numbers], f"u{bits // 8}").view(DTYPES[type_])


@cases
def integer_cases(function: Function) -> tuple[Array, Array, Array]:
    type_, name = function.output, re.sub(r"\d+", "", function.call)
    bits = DTYPES[type_].itemsize * 8
    a, b = pairs_of(type_)
    # an operation knows by its name whether its operands have a sign
    signed = ([unsigned(v + (1 << bits - 1), bits) - (1 << bits - 1) for v in x.tolist()] for x in (a, b))
    truth = [INTEGER_TRUTH[name](v, w, bits) for v, w in zip(*signed, strict=True)]
    return a, b, wrapped(truth, type_)


@pytest.mark.parametrize("function", functions(INTEGERS), ids=lambda function: function.name)
def test_integer_operations(library: Library, function: Function) -> None:
    a, b, expected = integer_cases(function)
    assert_same(library(function.name, a, b), expected, a, b)


@pytest.mark.parametrize("type_", ["i32", "i64"])
def test_integer_functions_of_libdevice(type_: str) -> None:
    bits = DTYPES[type_].itemsize * 8
    x, y = pairs_of(type_)
    values = x.tolist()
    truth = {
        "abs": wrapped([abs(v) for v in values], type_),
        "brev": wrapped([int(f"{unsigned(v, bits):0{bits}b}"[::-1], 2) for v in values], type_),
        "popc": np.array([unsigned(v, bits).bit_count() for v in values]),
        "clz": np.array([bits - unsigned(v, bits).bit_length() for v in values]),
        "ffs": np.array([(v & -v).bit_length() for v in values]),
    }
    for name, expected in truth.items():
        assert_same(rare()(f"{name}_{type_}", x), expected, x)
    for name, signed in (("mulhi", "mulhi_i"), ("umulhi", "mulhi_u")):
        product = [INTEGER_TRUTH[signed](v, w, bits) for v, w in zip(values, y.tolist(), strict=True)]
        assert_same(rare()(f"{name}_{type_}_{type_}", x, y), wrapped(product, type_), x, y)


def low_24(x: int) -> int:
    return unsigned(x + (1 << 23), 24) - (1 << 23)


def permuted(x: int, y: int, selectors: int) -> int:
    data = (unsigned(y, 32) << 32 | unsigned(x, 32)).to_bytes(8, "little")
    return int.from_bytes([data[selectors >> shift & 7] for shift in (0, 4, 8, 12)], "little")


def test_integer_oddities_of_libdevice() -> None:
    x, y = pairs_of("i32")
    z = RNG.permutation(x)
    values = list(zip(x.tolist(), y.tolist(), z.tolist(), strict=True))
    positive = [tuple(unsigned(v, 32) for v in row) for row in values]
    truth = {
        "mul24": [low_24(a) * low_24(b) for a, b, _ in values],
        "umul24": [a % (1 << 24) * (b % (1 << 24)) for a, b, _ in positive],
        "hadd": [a + b >> 1 for a, b, _ in values],
        "rhadd": [a + b + 1 >> 1 for a, b, _ in values],
        "uhadd": [a + b >> 1 for a, b, _ in positive],
        "urhadd": [a + b + 1 >> 1 for a, b, _ in positive],
        "sad": [abs(a - b) + c for a, b, c in values],
        "usad": [abs(a - b) + c for a, b, c in positive],
        "byte_perm": [permuted(a, b, c) for a, b, c in values],
    }
    for name, expected in truth.items():
        inputs = (x, y, z) if name in ("sad", "usad", "byte_perm") else (x, y)
        symbol = "_".join([name] + ["i32"] * len(inputs))
        assert_same(rare()(symbol, *inputs), wrapped(expected, "i32"), *inputs)


# ---- the rest of libdevice -----------------------------------------------------------------------------

ROUNDINGS: dict[str, Any] = {"rn": np.rint, "rz": np.trunc, "rd": np.floor, "ru": np.ceil}
TESTS = {"isnan": np.isnan, "isinf": np.isinf, "isfinite": np.isfinite, "signbit": np.signbit}


@pytest.mark.parametrize("mode", ROUNDINGS)
def test_rounding_conversions_of_libdevice(mode: str) -> None:
    for of, prefix in (("f32", "float"), ("f64", "double")):
        x = np.concatenate([samples(of), (RNG.integers(-99, 99, 500) / 2).astype(DTYPES[of])])
        for name, to in (("int", "i32"), ("uint", "u32"), ("ll", "i64"), ("ull", "u64")):
            expected = saturated(ROUNDINGS[mode](x), to)
            got = rare()(f"{prefix}2{name}_{mode}_{of}", x)
            assert_same(got.view(expected.dtype), expected, x)


def test_conversions_and_tests_of_libdevice() -> None:
    for of in ("f32", "f64"):
        x = np.concatenate([samples(of), (RNG.integers(-99, 99, 500) / 2).astype(DTYPES[of])])
        for name, test in TESTS.items():
            assert_same(rare()(f"{name}_{of}", x), test(x), x)
        assert_same(rare()(f"llrint_{of}", x), saturated(np.rint(x), "i64"), x)
        away = np.array([half_away(v) for v in x.tolist()])
        assert_same(rare()(f"llround_{of}", x), saturated(away, "i64"), x)
        exponents = [logb(v) for v in x.tolist()]
        expected = [-(2**31) if math.isnan(e) or e == -math.inf else min(e, 2**31 - 1) for e in exponents]
        assert_same(rare()(f"ilogb_{of}", x), np.array(expected, np.int64), x)
    for bits, name in ((32, "int"), (64, "ll")):
        x = samples(f"i{bits}")
        for to in ("float", "double"):
            dtype = np.float32 if to == "float" else np.float64
            assert_same(rare()(f"{name}2{to}_rn_i{bits}", x), x.astype(dtype), x)
            assert_same(rare()(f"u{name}2{to}_rn_i{bits}", x), x.view(f"u{bits // 8}").astype(dtype), x)
    single, double = samples("f32"), samples("f64")
    assert_same(rare()("double2float_rn_f64", double), double.astype(np.float32), double)
    assert_same(rare()("float_as_int_f32", single), single.view(np.int32), single)
    assert_same(rare()("int_as_float_i32", single.view(np.int32)), single, single)
    assert_same(rare()("double_as_longlong_f64", double), double.view(np.int64), double)
    assert_same(rare()("longlong_as_double_i64", double.view(np.int64)), double, double)
    low, high = double.view(np.int32).reshape(-1, 2).T.copy()
    assert_same(rare()("double2loint_f64", double), low, double)
    assert_same(rare()("double2hiint_f64", double), high, double)
    assert_same(rare()("hiloint2double_i32_i32", high, low), double, high, low)


@by_float
def test_functions_with_integer_arguments(type_: str) -> None:
    x = np.concatenate([special(type_), RNG.normal(0, 2, 500).astype(DTYPES[type_])])
    n = RNG.integers(-40, 40, len(x)).astype(np.int32)
    wide = x.astype(np.float64)
    expected = np.ldexp(x, n) if type_ == "f64" else np.ldexp(wide, n).astype(np.float32)
    assert_same(rare()(f"ldexp_{type_}_i32", x, n), expected, x, n)
    assert_within(rare()(f"powi_{type_}_i32", x, n), np.power(wide, n), 0.51 if type_ == "f32" else 2, x, n)
    order = RNG.integers(0, 6, 60).astype(np.int32)
    y = RNG.uniform(0.5, 20, 60).astype(DTYPES[type_])
    for name, bessel in (("jn", mpmath.besselj), ("yn", mpmath.bessely)):
        truth = np.array([float(bessel(k, v)) for k, v in zip(order.tolist(), y.tolist(), strict=True)])
        got = rare()(f"{name}_i32_{type_}", order, y)
        assert (np.abs(got - truth) <= np.finfo(y.dtype).eps * np.maximum(np.abs(truth), 1) * 8).all()


@by_float
def test_norms(type_: str) -> None:
    a, b, c, d = (RNG.normal(0, 10, 500).astype(DTYPES[type_]) for _ in range(4))
    wide = [v.astype(np.float64) for v in (a, b, c, d)]
    limit = 2.1 if type_ == "f32" else 4
    for count, inputs in ((3, (a, b, c)), (4, (a, b, c, d))):
        truth = np.sqrt(sum(v * v for v in wide[:count]))
        symbol = "_".join(["", *[type_] * count])
        assert_within(rare()(f"norm{count}d{symbol}", *inputs), truth, limit, *inputs)
        assert_within(rare()(f"rnorm{count}d{symbol}", *inputs), 1 / truth, limit, *inputs)


@pytest.mark.parametrize("function", COMMON + RARE, ids=lambda function: function.name)
def test_vectors_give_what_their_lanes_give(native: Library, function: Function) -> None:
    inputs = [RNG.permutation(samples(type_, 900)[:1000]) for type_ in function.inputs]
    count = min(len(x) for x in inputs)
    if re.match("[jy]n_", function.name):
        inputs[0] = RNG.integers(0, 6, count)
    chosen = rare() if function in RARE else native
    chosen(function.name, *(x[:count] for x in inputs))
