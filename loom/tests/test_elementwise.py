"""Arithmetic, element by element: every operator on every type, in each vector width and on scalars."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from formats import FORMATS, exact, rounded
from support import FLOATS, INTEGERS, TRITON, compat, numpy_dtype, random_values, short
from triton_loom.testing import assert_same

# NumPy's overflows and NaN are intended here.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

SCALARS = 0  # as a block size: one program per element, and no tile anywhere
WIDTHS = [1, 2, 4, 8, 16]


@triton.jit
def offsets_of(BLOCK: tl.constexpr):
    """Return the offsets of a program's elements: a tile of them, or a scalar index."""
    if BLOCK == 0:
        return tl.program_id(0)
    else:
        return tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)


def launch(kernel: triton.JITFunction, n: int, block: int, *args: object, **constants: object) -> None:
    kernel[(triton.cdiv(n, block) if block else n,)](*args, n, BLOCK=block, **constants)


# ---- integers --------------------------------------------------------------------------------------------


@triton.jit
def integer_arithmetic(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = offsets_of(BLOCK)
    on = at < n
    x, y = tl.load(x_ptr + at, on, 0), tl.load(y_ptr + at, on, 0)
    out_ptr += at
    tl.store(out_ptr, x + y, on)
    tl.store(out_ptr + n, x - y, on)
    tl.store(out_ptr + 2 * n, x * y, on)
    tl.store(out_ptr + 3 * n, x & y, on)
    tl.store(out_ptr + 4 * n, x | y, on)
    tl.store(out_ptr + 5 * n, x ^ y, on)
    tl.store(out_ptr + 6 * n, ~x, on)
    tl.store(out_ptr + 7 * n, -x, on)
    tl.store(out_ptr + 8 * n, tl.abs(x), on)
    tl.store(out_ptr + 9 * n, tl.minimum(x, y), on)
    tl.store(out_ptr + 10 * n, tl.maximum(x, y), on)
    tl.store(out_ptr + 11 * n, tl.where(x > y, x, y - 1), on)
    tl.store(out_ptr + 12 * n, x * 7 - 3, on)
    tl.store(out_ptr + 13 * n, 100 - x, on)
    width: tl.constexpr = x.dtype.primitive_bitwidth
    distance = y & (width - 1)
    tl.store(out_ptr + 14 * n, x << distance, on)
    tl.store(out_ptr + 15 * n, x >> distance, on)
    tl.store(out_ptr + 16 * n, x // y, on)
    tl.store(out_ptr + 17 * n, x % y, on)
    if width >= 32:
        tl.store(out_ptr + 18 * n, tl.umulhi(x, y), on)


@triton.jit
def compare(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = offsets_of(BLOCK)
    on = at < n
    x, y = tl.load(x_ptr + at, on, 0), tl.load(y_ptr + at, on, 0)
    out_ptr += at
    tl.store(out_ptr, x == y, on)
    tl.store(out_ptr + n, x != y, on)
    tl.store(out_ptr + 2 * n, x < y, on)
    tl.store(out_ptr + 3 * n, x <= y, on)
    tl.store(out_ptr + 4 * n, x > y, on)
    tl.store(out_ptr + 5 * n, x >= y, on)


def compared(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.stack([x == y, x != y, x < y, x <= y, x > y, x >= y])


def truncated_division(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    quotient = x // y
    rest = x - quotient * y
    low = (rest != 0) & ((rest < 0) != (x < 0))  # floored to below zero
    return quotient + low, rest - low * y


def pairs(dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return all pairs of the 8-bit types; for other types, extremes, and multiples of divisors of any size."""
    kind = numpy_dtype(dtype)
    info = np.iinfo(kind)
    if kind.itemsize == 1:
        every = np.arange(info.min, info.max + 1).astype(kind)
        return np.repeat(every, 256), np.tile(every, 256)
    edges = {
        info.min,
        info.min + 1,
        info.max - 1,
        info.max,
        info.max // 2,
        info.max // 3,
        0,
        1,
        2,
        3,
        7,
        10,
        16,
    }
    edges |= {1 << k for k in range(0, kind.itemsize * 8 - 1, 5)} | {-e for e in edges if -e >= info.min}
    edge = np.array(sorted(edges)).astype(kind)
    noise = np.frombuffer(np.random.bytes(8192 * kind.itemsize), kind)
    sizes = np.random.randint(0, kind.itemsize * 8, 8192).astype(kind)
    x, y = noise[:4096], noise[4096:] >> sizes[4096:]
    near = (x - x % np.where(y == 0, 1, y)) + sizes[:4096] % 3 - 1  # a multiple of y, and one off
    return (
        np.concatenate([np.repeat(edge, len(edge)), x, near.astype(kind)]),
        np.concatenate([np.tile(edge, len(edge)), y, y]),
    )


@pytest.mark.parametrize("dtype", compat(INTEGERS, torch.int32, torch.uint8), ids=short)
def test_integers(dtype: torch.dtype) -> None:
    check_integers(dtype, [SCALARS, 256])


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint64], ids=short)
def test_integers_in_every_width(dtype: torch.dtype) -> None:
    check_integers(dtype, WIDTHS)


def check_integers(dtype: torch.dtype, blocks: list[int]) -> None:
    x, y = pairs(dtype)
    kind = x.dtype.type
    distance = y & kind(x.dtype.itemsize * 8 - 1)
    quotient, rest = truncated_division(x, np.where(y == 0, kind(1), y))
    want = [x + y, x - y, x * y, x & y, x | y, x ^ y, ~x, kind(0) - x, np.abs(x)]
    want += [np.minimum(x, y), np.maximum(x, y), np.where(x > y, x, y - kind(1)), x * kind(7) - kind(3)]
    want += [kind(100) - x, x << distance, x >> distance, quotient, rest]
    if x.dtype.itemsize >= 4:
        bits = x.dtype.itemsize * 8
        word = np.dtype(f"u{x.dtype.itemsize}")
        high = [int(a) * int(b) >> bits for a, b in zip(x.view(word), y.view(word), strict=True)]
        want.append(np.array(high, word).view(x.dtype))
    defined = np.ones((len(want), len(x)), bool)
    defined[16:18] = (y != 0) & ~((y == kind(-1 if x.dtype.kind == "i" else 0)) & (x == np.iinfo(kind).min))
    for block in blocks:
        out = np.zeros((len(want), len(x)), x.dtype)
        launch(integer_arithmetic, len(x), block, *map(torch.from_numpy, (x, y, out)))
        for row, (got, expected, fine) in enumerate(zip(out, want, defined, strict=True)):
            assert_same(got[fine], expected[fine], f"row {row} in blocks of {block}")
        flags = np.zeros((6, len(x)), bool)
        launch(compare, len(x), block, *map(torch.from_numpy, (x, y, flags)))
        assert_same(flags, compared(x, y), f"comparisons in blocks of {block}")


@triton.jit
def boolean_logic(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = offsets_of(BLOCK)
    on = at < n
    x, y = tl.load(x_ptr + at, on, False), tl.load(y_ptr + at, on, False)
    out_ptr += at
    tl.store(out_ptr, x & y, on)
    tl.store(out_ptr + n, x | y, on)
    tl.store(out_ptr + 2 * n, x ^ y, on)
    tl.store(out_ptr + 3 * n, ~x, on)
    tl.store(out_ptr + 4 * n, x == y, on)
    tl.store(out_ptr + 5 * n, x != y, on)
    tl.store(out_ptr + 6 * n, tl.where(x, y, ~y), on)
    tl.store(out_ptr + 7 * n, x.logical_and(y), on)
    tl.store(out_ptr + 8 * n, x.logical_or(~y), on)
    tl.store(out_ptr + 9 * n, (x.to(tl.int32) + y.to(tl.int32)) == 1, on)
    tl.store(out_ptr + 10 * n, tl.where(x & y, 1.5, -2.5) > 0, on)
    tl.store(out_ptr + 11 * n, x < y, on)
    tl.store(out_ptr + 12 * n, x >= y, on)


@pytest.mark.compat
@pytest.mark.parametrize("block", [SCALARS, 1, 8, 64])
def test_booleans(block: int) -> None:
    x = np.array([False, False, True, True] * 32)
    y = np.array([False, True] * 64)
    want = [
        x & y,
        x | y,
        x ^ y,
        ~x,
        x == y,
        x != y,
        np.where(x, y, ~y),
        x & y,
        x | ~y,
        x ^ y,
        x & y,
        x < y,
        x >= y,
    ]
    out = np.zeros((len(want), len(x)), bool)
    launch(boolean_logic, len(x), block, *map(torch.from_numpy, (x, y, out)))
    assert_same(out, np.stack(want))


@triton.jit
def decide(x_ptr, y_ptr, out_ptr):
    i = tl.program_id(0)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    result = 0
    if x > 0 and y > 0:
        result += 1
    if x > 0 or y > 0:
        result += 2
    if not x > 0:
        result += 4
    if not (x > 0 and not y > 0):
        result += 8
    tl.store(out_ptr + i, result)


def test_conditions_of_scalars() -> None:
    numbers = [-1, 0, 1, 2, 5]
    x, y = (np.repeat(numbers, 5).astype(np.int32), np.tile(numbers, 5).astype(np.int32))
    want = [
        (a > 0 and b > 0) + 2 * (a > 0 or b > 0) + 4 * (not a > 0) + 8 * (not (a > 0 and not b > 0))
        for a, b in zip(x, y, strict=True)
    ]
    out = np.zeros(25, np.int32)
    decide[(25,)](*map(torch.from_numpy, (x, y, out)))
    assert out.tolist() == want


# ---- floats: exact operations ----------------------------------------------------------------------------


@triton.jit
def float_arithmetic(x_ptr, y_ptr, z_ptr, out_ptr, wide_ptr, n, BLOCK: tl.constexpr):
    at = offsets_of(BLOCK)
    on = at < n
    x, y, z = tl.load(x_ptr + at, on, 0), tl.load(y_ptr + at, on, 0), tl.load(z_ptr + at, on, 0)
    out_ptr += at
    wide_ptr += at
    tl.store(out_ptr, x + y, on)
    tl.store(out_ptr + n, x - y, on)
    tl.store(out_ptr + 2 * n, x * y, on)
    tl.store(out_ptr + 3 * n, -x, on)
    tl.store(out_ptr + 4 * n, tl.abs(x), on)
    tl.store(out_ptr + 5 * n, tl.minimum(x, y), on)
    tl.store(out_ptr + 6 * n, tl.maximum(x, y), on)
    tl.store(out_ptr + 7 * n, tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL), on)
    tl.store(out_ptr + 8 * n, tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL), on)
    tl.store(out_ptr + 9 * n, tl.clamp(x, -1.5, 2.5), on)
    tl.store(out_ptr + 10 * n, tl.clamp(x, -1.5, 2.5, propagate_nan=tl.PropagateNan.ALL), on)
    tl.store(out_ptr + 11 * n, tl.where(x < y, x, z), on)
    tl.store(out_ptr + 12 * n, tl.fma(x, y, z), on)
    tl.store(wide_ptr, x / y, on)
    tl.store(wide_ptr + n, x % y, on)
    if x.dtype.primitive_bitwidth >= 32:
        tl.store(wide_ptr + 2 * n, tl.fdiv(x, y), on)
        tl.store(wide_ptr + 3 * n, tl.sqrt(x), on)
        tl.store(wide_ptr + 4 * n, tl.floor(x), on)
        tl.store(wide_ptr + 5 * n, tl.ceil(x), on)
    if x.dtype == tl.float32:
        tl.store(wide_ptr + 6 * n, tl.div_rn(x, y), on)
        tl.store(wide_ptr + 7 * n, tl.sqrt_rn(x), on)


def numbers_of(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Return special values in all pairs, random bit patterns (so every exponent occurs), and ordinary numbers."""
    info = torch.finfo(dtype)
    specials = [0.0, 1.0, 1.5, 2.5, 3.0, info.max, info.tiny, info.tiny / 2, info.smallest_normal * info.eps]
    specials = [*specials, 1 + info.eps, 1 - info.eps / 2, torch.inf, torch.nan]
    special = torch.tensor([s * v for v in specials for s in (1, -1)], dtype=torch.float64).to(dtype)
    count -= len(special) ** 2
    every = torch.from_numpy(
        np.frombuffer(np.random.bytes(count // 2 * dtype.itemsize), np.uint8).copy()
    ).view(dtype)
    return torch.cat([special.repeat(len(special)), every, random_values(count - count // 2, dtype)])


def lesser(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the smaller one; NaN only where both are NaN, and -0 below +0."""
    minimum = np.fmin(x, y)
    return np.where((x == 0) & (y == 0), np.where(np.signbit(x), x, y), minimum)


def fused(x: np.ndarray, y: np.ndarray, z: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Return x * y + z, rounded once. Exact rationals decide on which side of the float64 the truth lies."""
    with np.errstate(all="ignore"):
        result = np.where(np.isfinite(x * 0 + y * 0) & np.isinf(z), z, x * y + z)
    if dtype == torch.float64:
        bits, smallest = 53, -1074
    elif dtype == torch.float32:
        bits, smallest = 24, -149
    else:
        bits, smallest = FORMATS[dtype].mantissa + 1, 1 - FORMATS[dtype].bias - FORMATS[dtype].mantissa
    for i in np.flatnonzero(np.isfinite(x) & np.isfinite(y) & np.isfinite(z)):
        truth = Fraction(x[i]) * Fraction(y[i]) + Fraction(z[i])
        if truth == 0:
            continue  # float64 has the sign right
        top = truth.numerator.bit_length() - truth.denominator.bit_length()
        top -= abs(truth) < Fraction(2) ** top
        unit = Fraction(2) ** max(top - bits + 1, smallest)
        nearest = round(truth / unit) * unit  # Python rounds halves to even
        try:
            size = float(abs(nearest))
        except OverflowError:
            size = math.inf
        result[i] = size if truth > 0 else -size
    return rounded(result, dtype)


@pytest.mark.compat
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_exact_float_operations(dtype: torch.dtype) -> None:
    check_floats(dtype, [SCALARS, 128])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_exact_float_operations_in_every_width(dtype: torch.dtype) -> None:
    check_floats(dtype, WIDTHS)


def check_floats(dtype: torch.dtype, blocks: list[int]) -> None:
    count = 4096
    x, z = numbers_of(dtype, count), numbers_of(dtype, count)[torch.randperm(count)]
    y = numbers_of(dtype, count)
    specials = math.isqrt(26 * 26)
    y[: specials**2] = y[:specials].repeat_interleave(specials)
    a, b, c = exact(x), exact(y), exact(z)
    larger = -lesser(-a, -b)
    both = ~np.isnan(a) & ~np.isnan(b)
    inside = np.where(np.isnan(a), np.nan, np.clip(a, -1.5, 2.5))
    rows = [a + b, a - b, a * b, 0.0 - a if TRITON < (3, 8) else -a, np.abs(a), lesser(a, b), larger]
    rows += [np.where(both, lesser(a, b), np.nan), np.where(both, larger, np.nan)]
    rows += [np.where(np.isnan(a), -1.5, inside), inside, np.where(a < b, a, c)]
    want = [*(rounded(row, dtype) for row in rows), fused(a, b, c, dtype)]
    wide = torch.promote_types(dtype, torch.float32)
    quotient = rounded(a / b, wide)
    wanted_wide = [quotient, rounded(np.fmod(a, b), wide), quotient]
    wanted_wide += [rounded(f(a), wide) for f in (np.sqrt, np.floor, np.ceil)]
    wanted_wide += [quotient, wanted_wide[3]]
    wanted_wide = wanted_wide[: {torch.float32: 8, torch.float64: 6}.get(dtype, 2)]

    for block in blocks:
        out = torch.zeros(len(want), count, dtype=dtype)
        wide_out = torch.zeros(len(wanted_wide), count, dtype=wide)
        launch(float_arithmetic, count, block, x, y, z, out, wide_out)
        for row, (got, expected) in enumerate(zip([*out, *wide_out], want + wanted_wide, strict=True)):
            assert_same(got, expected, f"row {row} in blocks of {block}")
        flags = np.zeros((6, count), bool)
        launch(compare, count, block, x, y, torch.from_numpy(flags))
        assert_same(flags, compared(a, b), f"comparisons in blocks of {block}")


PREDICATES = ["false", "oeq", "ogt", "oge", "olt", "ole", "one", "ord"]
PREDICATES += ["ueq", "ugt", "uge", "ult", "ule", "une", "uno", "true"]


def test_every_float_predicate(tmp_path: Path) -> None:
    """Triton's language yields only some of them, its optimizer may yield any: so this kernel is TTIR."""
    stores = "".join(
        f"""
    %c{i} = arith.cmpf {name}, %x, %y : tensor<64xf32>
    %p{i} = tt.splat %out : !tt.ptr<i32> -> tensor<64x!tt.ptr<i32>>
    %s{i} = arith.constant dense<{64 * i}> : tensor<64xi32>
    %o{i} = arith.addi %offs, %s{i} : tensor<64xi32>
    %q{i} = tt.addptr %p{i}, %o{i} : tensor<64x!tt.ptr<i32>>, tensor<64xi32>
    %v{i} = arith.extui %c{i} : tensor<64xi1> to tensor<64xi32>
    tt.store %q{i}, %v{i} : tensor<64x!tt.ptr<i32>>"""
        for i, name in enumerate(PREDICATES)
        if name not in ("false", "true")
    )
    text = f"""module {{
  tt.func public @predicates(%a: !tt.ptr<f32>, %b: !tt.ptr<f32>, %out: !tt.ptr<i32>) {{
    %offs = tt.make_range {{end = 64 : i32, start = 0 : i32}} : tensor<64xi32>
    %a1 = tt.splat %a : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>>
    %a2 = tt.addptr %a1, %offs : tensor<64x!tt.ptr<f32>>, tensor<64xi32>
    %b1 = tt.splat %b : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>>
    %b2 = tt.addptr %b1, %offs : tensor<64x!tt.ptr<f32>>, tensor<64xi32>
    %x = tt.load %a2 : tensor<64x!tt.ptr<f32>>
    %y = tt.load %b2 : tensor<64x!tt.ptr<f32>>{stores}
    tt.return
  }}
}}
"""
    path = tmp_path / "predicates.ttir"
    path.write_text(text)
    kernel = triton.compile(str(path))
    numbers = np.array([1.0, 2.0, -0.0, 0.0, np.inf, -np.inf, np.nan, -np.nan], np.float32)
    x, y = np.repeat(numbers, 8), np.tile(numbers, 8)
    out = torch.zeros(16, 64, dtype=torch.int32)
    kernel[(1, 1, 1)](torch.from_numpy(x), torch.from_numpy(y), out)
    unordered = np.isnan(x) | np.isnan(y)
    basic = {"eq": x == y, "gt": x > y, "ge": x >= y, "lt": x < y, "le": x <= y, "ne": (x < y) | (x > y)}
    for i, name in enumerate(PREDICATES):
        if name[1:] in basic:
            want = basic[name[1:]] | unordered if name[0] == "u" else basic[name[1:]]
        else:
            want = {"ord": ~unordered, "uno": unordered}.get(name, np.zeros(64, bool))
        assert_same(out[i], want.astype(np.int32), name)


# ---- floats: functions -----------------------------------------------------------------------------------


@triton.jit
def functions(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = offsets_of(BLOCK)
    on = at < n
    x = tl.load(x_ptr + at, on, 0)
    out_ptr += at
    tl.store(out_ptr, tl.exp(x), on)
    tl.store(out_ptr + n, tl.exp2(x), on)
    tl.store(out_ptr + 2 * n, tl.log(x), on)
    tl.store(out_ptr + 3 * n, tl.log2(x), on)
    tl.store(out_ptr + 4 * n, tl.sin(x), on)
    tl.store(out_ptr + 5 * n, tl.cos(x), on)
    tl.store(out_ptr + 6 * n, tl.erf(x), on)
    tl.store(out_ptr + 7 * n, tl.rsqrt(x), on)


def by_mpmath(function: Callable) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function to 30 digits, as the nearest float64 and the rest."""

    def apply(x: np.ndarray) -> np.ndarray:
        with mpmath.workdps(40 + 310 if np.abs(x[np.isfinite(x)]).max() > 1e20 else 40):
            values = [function(mpmath.mpf(float(v))) for v in x]
            return np.array(
                [[float(v), float(v - float(v)) if np.isfinite(float(v)) else 0.0] for v in values]
            ).T

    return apply


def rsqrt(x):
    return 1 / mpmath.sqrt(x)


MATH = {
    "exp": (np.exp, mpmath.exp),
    "exp2": (np.exp2, lambda x: mpmath.power(2, x)),
    "log": (np.log, mpmath.log),
    "log2": (np.log2, lambda x: mpmath.log(x, 2)),
    "sin": (np.sin, mpmath.sin),
    "cos": (np.cos, mpmath.cos),
    "erf": (np.vectorize(math.erf), mpmath.erf),
    "rsqrt": (lambda x: 1 / np.sqrt(x), rsqrt),
}


def spread(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Return ordinary numbers, both ends of every function's range, and each exponent of the type."""
    info = torch.finfo(dtype)
    kind = {"dtype": torch.float64}
    edge = math.log(info.max)
    parts = [
        torch.randn(count, **kind) * 3,
        torch.rand(count, **kind) * 2.1 * edge - 1.05 * edge,
        torch.rand(count, **kind) * 3 * edge - 1.55 * edge,
        torch.exp(torch.randn(count, **kind) * 0.05),
        torch.exp((torch.rand(count, **kind) * 2 - 1) * edge) * torch.randn(count, **kind).sign(),
        torch.arange(-200, 200, **kind) * (math.pi / 4),
        torch.arange(-1080, 1080, 3, **kind) / 2,
    ]
    return torch.cat(parts).to(dtype)


def last_place(truth: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the distance between neighboring numbers of the type at this size."""
    info = np.finfo(dtype)
    size = np.maximum(np.abs(truth), float(info.smallest_normal))
    return np.ldexp(1.0, np.frexp(size)[1] - 1 - info.nmant)


@pytest.mark.compat
@pytest.mark.parametrize("block", [SCALARS, 128, 4])
def test_float32_functions_within_one_ulp(block: int) -> None:
    x = spread(torch.float32, 20_000 if block == 128 else 2_000)
    out = torch.zeros(len(MATH), len(x))
    launch(functions, len(x), block, x, out)
    a = exact(x)
    for (name, (reference, _)), got in zip(MATH.items(), exact(out), strict=True):
        check_ulps(name, a, got, reference(a), 0.0, np.dtype(np.float32))


def test_float64_functions_within_one_ulp() -> None:
    x = spread(torch.float64, 60)
    x = x[x.abs() < 1e20][::4].contiguous()
    out = torch.zeros(len(MATH), len(x), dtype=torch.float64)
    launch(functions, len(x), 64, x, out)
    for (name, (_, reference)), got in zip(MATH.items(), out.numpy(), strict=True):
        keep = x.numpy() > 0 if name in ("log", "log2", "rsqrt") else np.ones(len(x), bool)
        a = x.numpy()[keep]
        head, rest = by_mpmath(reference)(a)
        check_ulps(name, a, got[keep], head, rest, np.dtype(np.float64))


def check_ulps(
    name: str, x: np.ndarray, got: np.ndarray, head: np.ndarray, rest: np.ndarray | float, dtype: np.dtype
) -> None:
    """Assert that `got` is within one ulp of head + rest, and equal to it if that is not finite."""
    largest = float(np.finfo(dtype).max)
    overflow = np.abs(head) > largest + last_place(np.array(largest), dtype) / 2
    special = ~np.isfinite(head) | overflow
    want = np.where(overflow, np.copysign(np.inf, head), head)
    assert_same(got[special], want[special], f"{name} of special values")
    error = np.abs((got - head) - rest)[~special] / last_place(head[~special], dtype)
    worst = np.argmax(np.nan_to_num(error, nan=np.inf))
    message = f"{name}({x[~special][worst]!r}) = {got[~special][worst]!r}, not {head[~special][worst]!r}"
    assert error[worst] <= 1, f"{error[worst]:.3g} ulp: {message}"


def test_functions_of_special_values() -> None:
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0]
    nan, inf = math.nan, math.inf
    want = {
        "exp": [1, 1, inf, 0, nan, math.e, 1 / math.e],
        "exp2": [1, 1, inf, 0, nan, 2, 0.5],
        "log": [-inf, -inf, inf, nan, nan, 0, nan],
        "log2": [-inf, -inf, inf, nan, nan, 0, nan],
        "sin": [0.0, -0.0, nan, nan, nan, math.sin(1), -math.sin(1)],
        "cos": [1, 1, nan, nan, nan, math.cos(1), math.cos(1)],
        "erf": [0.0, -0.0, 1, -1, nan, math.erf(1), -math.erf(1)],
        "rsqrt": [inf, -inf, 0, nan, nan, 1, nan],
    }
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor(special, dtype=dtype)
        for block in (SCALARS, 8):
            out = torch.zeros(len(MATH), len(x), dtype=dtype)
            launch(functions, len(x), block, x, out)
            for (name, expected), got in zip(want.items(), out, strict=True):
                assert_same(got[:5], torch.tensor(expected[:5], dtype=dtype), name)
                torch.testing.assert_close(got, torch.tensor(expected, dtype=dtype), equal_nan=True)


@triton.jit
def composed(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = offsets_of(BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, tl.sigmoid(x))
    tl.store(out_ptr + n + at, tl.softmax(x))
    tl.store(out_ptr + 2 * n + at, tl.exp(x) / (1.0 + tl.exp(x)))
    tl.store(out_ptr + 3 * n + at, 0.5 * x * (1 + tl.erf(x * 0.7071067811865476)))


def test_composed_functions() -> None:
    x = torch.randn(512)
    out = torch.zeros(4, 512)
    launch(composed, 512, 512, x, out)
    wide = x.double()
    want = [wide.sigmoid(), wide.softmax(0), wide.sigmoid(), torch.nn.functional.gelu(wide)]
    torch.testing.assert_close(out.double(), torch.stack(want), rtol=1e-6, atol=3e-7)


# ---- types that meet -------------------------------------------------------------------------------------


@triton.jit
def mix(i8, u8, i32, i64, f16, bf16, f32, out_ptr, n, BLOCK: tl.constexpr):
    at = offsets_of(BLOCK)
    a, b, c, d = tl.load(i8 + at), tl.load(u8 + at), tl.load(i32 + at), tl.load(i64 + at)
    h, k, f = tl.load(f16 + at), tl.load(bf16 + at), tl.load(f32 + at)
    out_ptr += at
    tl.store(out_ptr, a + c)
    tl.store(out_ptr + n, b + c)
    tl.store(out_ptr + 2 * n, c * d)
    tl.store(out_ptr + 3 * n, a + b)
    tl.store(out_ptr + 4 * n, c / (a.to(tl.int32) | 1))
    tl.store(out_ptr + 5 * n, c + 0.5)
    tl.store(out_ptr + 6 * n, h + f)
    tl.store(out_ptr + 7 * n, h + k)
    tl.store(out_ptr + 8 * n, k * 2)
    tl.store(out_ptr + 9 * n, h / 3)
    tl.store(out_ptr + 10 * n, a * h)
    tl.store(out_ptr + 11 * n, (a > b).to(tl.int32))
    tl.store(out_ptr + 12 * n, c // 7 + c % 7)
    tl.store(out_ptr + 13 * n, tl.cdiv(c, 5))
    tl.store(out_ptr + 14 * n, b >> 3)
    tl.store(out_ptr + 15 * n, f * d)


@pytest.mark.compat
@pytest.mark.parametrize("block", [SCALARS, 64])
def test_mixed_types_are_promoted(block: int) -> None:
    n = 64
    a, b = random_values(n, torch.int8), random_values(n, torch.uint8)
    c = torch.randint(-10_000, 10_000, (n,), dtype=torch.int32)
    d = torch.randint(-(2**40), 2**40, (n,))
    h, k, f = (random_values(n, dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32))
    i8, u8, i32, i64 = (t.numpy().astype(np.int64) for t in (a, b, c, d))
    f16, bf16, f32 = exact(h), exact(k), exact(f)
    byte = np.uint8

    def single(x: np.ndarray) -> np.ndarray:
        return x.astype(np.float32).astype(np.float64)

    def half(x: np.ndarray) -> np.ndarray:
        return exact(rounded(x, torch.float16))

    quotient = np.trunc(i32 / 7)
    want = [
        i8 + i32,
        u8 + i32,
        (i32 * i64).astype(np.float64),
        (i8.astype(byte) + u8.astype(byte)).astype(byte),  # of one width, unsigned wins
        single(i32 / (i8 | 1)),
        single(i32 + 0.5),
        single(f16 + f32),
        half(f16 + half(bf16)),
        exact(rounded(bf16 * 2, torch.bfloat16)),
        single(f16 / 3),
        half(i8 * f16),
        i8.astype(byte) > u8.astype(byte),
        quotient + (i32 - quotient * 7),
        np.trunc((i32 + 4) / 5),
        u8 >> 3,
        single(f32 * single(i64)),
    ]
    out = torch.zeros(len(want), n, dtype=torch.float64)
    launch(mix, n, block, a, b, c, d, h, k, f, out)
    for row, (got, expected) in enumerate(zip(out, want, strict=True)):
        assert_same(got + 0.0, np.asarray(expected).astype(np.float64) + 0.0, f"row {row}")
