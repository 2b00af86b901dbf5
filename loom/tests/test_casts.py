"""Conversions between number types, over every input of the small types and every rounding boundary.

Expected codes come from tables of the formats (`formats.py`), not from any library's cast. Values that are too
large become infinite in fp16 and bf16 and saturate in the FP8 types, infinity included, as on NVIDIA's GPUs.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton_loom
from formats import BF16, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, F16, FORMATS, exact, rounded
from support import FLOAT8, FLOATS, INTEGERS, SIGNED, compat, numpy_dtype, short
from triton_loom.testing import assert_same

EVERY_FLOAT = [*FLOATS, *FLOAT8]


@triton.jit
def cast_each(x_ptr, out, n, ROUNDING: tl.constexpr, BLOCK: tl.constexpr):
    """Store x in the type of each output."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, offs < n)
    for i in tl.static_range(len(out)):
        y = tl.cast(x, out[i].dtype.element_ty, fp_downcast_rounding=ROUNDING)
        tl.store(out[i] + offs, y, offs < n)


def cast_to(
    x: torch.Tensor, dtypes: list[torch.dtype], rounding: str | None = None, block: int = 1024
) -> list[torch.Tensor]:
    out = tuple(torch.zeros(x.shape).to(dtype) for dtype in dtypes)
    cast_each[(triton.cdiv(len(x), block),)](x, out, len(x), ROUNDING=rounding, BLOCK=block)
    return list(out)


def check_casts(
    x: torch.Tensor, dtypes: list[torch.dtype], rounding: str | None = None, block: int = 1024
) -> None:
    numbers = exact(x)
    for dtype, got in zip(dtypes, cast_to(x, dtypes, rounding, block), strict=True):
        assert_same(got, rounded(numbers, dtype, rounding == "rtz"), f"{x.dtype} to {dtype}")


def every_code(dtype: torch.dtype) -> torch.Tensor:
    return FORMATS[dtype].tensor(np.arange(2 * FORMATS[dtype].sign))


def boundaries(dtypes: list[torch.dtype]) -> torch.Tensor:
    """Return all float32 numbers at which rounding to one of these types changes."""
    return torch.from_numpy(np.concatenate([FORMATS[dtype].boundaries() for dtype in dtypes]))


def narrower(dtype: torch.dtype) -> list[torch.dtype]:
    return [other for other in EVERY_FLOAT if other.itemsize < dtype.itemsize]


def test_tables_agree_with_the_definitions() -> None:
    """The tables have the landmark values that the formats' specifications print."""
    assert (E4M3.largest, E5M2.largest, E4M3FNUZ.largest, E5M2FNUZ.largest) == (448, 57344, 240, 57344)
    assert (F16.largest, BF16.largest) == (65504, (2 - 2**-7) * 2.0**127)
    smallest = [f.magnitudes[1] for f in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, F16)]
    assert smallest == [2.0**-9, 2.0**-16, 2.0**-10, 2.0**-17, 2.0**-24]
    numbers = np.array([1.0625, 1.1875, 17, 19, 2.0**-10, 3 * 2.0**-10, 500, -np.inf, -0.0])
    assert E4M3.values[E4M3.encode(numbers)].tolist() == [1, 1.25, 16, 20, 0, 2.0**-8, 448, -448, 0]
    assert E5M2.encode(np.array([61440, 1e9, np.inf, -np.inf])).tolist() == [0x7B, 0x7B, 0x7B, 0xFB]
    assert E4M3FNUZ.encode(np.array([-0.0, -1e-9, np.nan])).tolist() == [0, 0, 0x80]
    assert F16.encode(np.array([65519.0, 65520.0, np.inf])).tolist() == [0x7BFF, 0x7C00, 0x7C00]
    assert F16.encode(np.array([65520.0, np.inf, -1.9]), True).tolist() == [0x7BFF, 0x7C00, 0xBF99]


@pytest.mark.parametrize(
    "dtype", compat([*FLOAT8, torch.float16, torch.bfloat16], torch.float8_e4m3fn, torch.bfloat16), ids=short
)
def test_every_input_of_a_small_type(dtype: torch.dtype) -> None:
    check_casts(every_code(dtype), [other for other in EVERY_FLOAT if other != dtype])


@pytest.mark.compat
def test_every_rounding_boundary_of_fp8() -> None:
    check_casts(boundaries(FLOAT8), FLOAT8)


@pytest.mark.parametrize("block", [1, 2, 4, 8, 16])
def test_every_vector_width(block: int) -> None:
    x = boundaries(FLOAT8)
    check_casts(x, narrower(torch.float32), block=block)
    codes = torch.arange(256, dtype=torch.uint8)
    for dtype in FLOAT8 if block in (1, 8) else FLOAT8[:1]:
        check_casts(codes.view(dtype), [torch.float32, torch.float16], block=block)


def test_every_rounding_boundary_of_the_16_bit_types() -> None:
    check_casts(boundaries([torch.float16, torch.bfloat16]), [torch.float16, torch.bfloat16, torch.float64])


def test_float64_is_rounded_once() -> None:
    """Two roundings go wrong for numbers that are closer to a boundary than float32 resolves."""
    base = boundaries(FLOAT8).double()
    base = torch.cat([base, boundaries([torch.float16, torch.bfloat16]).double()[::7]])
    nudged = torch.cat([base, base * (1 + 2.0**-50), base * (1 - 2.0**-50), base + 2.0**-60])
    nudged = torch.cat([nudged, torch.tensor([1e-320, 1e300, -1e300, 2.0**-1074, 3.4028235677973366e38])])
    check_casts(nudged, narrower(torch.float64))
    check_casts(nudged[::5].contiguous(), narrower(torch.float64), block=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=short)
def test_rounding_toward_zero(dtype: torch.dtype) -> None:
    if dtype.itemsize == 2:
        x = every_code(dtype)
    else:
        x = torch.cat([boundaries(FLOAT8), boundaries([torch.float16, torch.bfloat16])[::5]]).to(dtype)
    if dtype == torch.float64:
        x = torch.cat([x, x * (1 + 2.0**-50), x * (1 - 2.0**-50)])
    check_casts(x, narrower(dtype), "rtz")


# ---- integers and floats ---------------------------------------------------------------------------------


def integers_of(dtype: torch.dtype) -> np.ndarray:
    """Return numbers near powers of two and near ties of each float type, the extremes, and random bits."""
    kind = numpy_dtype(dtype)
    info = np.iinfo(kind)
    near = [(1 << k) + d for k in range(65) for d in (-2, -1, 0, 1, 2)]
    ties = [
        (1 << k) + (1 << (k - bits)) + d
        for bits in (8, 9, 11, 12, 24, 25, 53, 54)
        for k in range(bits, 65)
        for d in (-1, 0, 1)
    ]
    numbers = {sign * n for n in near + ties for sign in (1, -1)} | {info.min, info.max, info.max - 63}
    fitting = [n for n in sorted(numbers) if info.min <= n <= info.max]
    noise = np.frombuffer(np.random.bytes(512 * kind.itemsize), kind)
    return np.concatenate([np.array(fitting, kind), noise])


@pytest.mark.parametrize("block", [256, 1], ids=["tiles", "scalars"])
@pytest.mark.parametrize("dtype", INTEGERS, ids=short)
def test_integers_to_floats(dtype: torch.dtype, block: int) -> None:
    x = integers_of(dtype)
    out = cast_to(torch.from_numpy(x), FLOATS, block=block)
    for kind, got in zip(FLOATS, out, strict=True):
        assert_same(got, rounded(x.astype(np.longdouble), kind), f"{dtype} to {kind}")


def floats_of(dtype: torch.dtype) -> torch.Tensor:
    """Return numbers around the limits of every integer type, fractions, and special values."""
    limits = [
        2.0**k + d
        for k in (0, 1, 7, 8, 15, 16, 23, 24, 31, 32, 52, 53, 62, 63, 64)
        for d in (-1, -0.5, 0, 0.5, 1)
    ]
    specials = [0.0, 0.49999997, 0.5, 0.99999994, 1e-30, 1e5, 1e19, 1e30, np.inf, np.nan]
    x = torch.tensor([sign * n for n in limits + specials for sign in (1, -1)], dtype=torch.float64).to(dtype)
    spread = torch.randn(500, dtype=torch.float64) * 2.0 ** torch.randint(0, 70, (500,))
    neighbors = (
        torch.cat([x, torch.nextafter(x, x * 0), torch.nextafter(x, x * 2)]) if x.element_size() > 2 else x
    )
    return torch.cat([neighbors, spread.to(dtype)])


def converted_by_ptx(number: float, source: torch.dtype, kind: torch.dtype) -> int:
    """Return PTX's `cvt.rzi`: toward zero, saturated; 8 bits are the low half of 16. NaN gives only the highest bit if
    either side has 64 bits, else 0."""
    bits = max(8 * kind.itemsize, 16)
    low, high = (-1 << (bits - 1), (1 << (bits - 1)) - 1) if kind in SIGNED else (0, (1 << bits) - 1)
    if np.isnan(number):
        of_nan = 1 << (bits - 1) if 64 in (bits, 8 * source.itemsize) else 0
    else:
        of_nan = high if number >= high else low if number <= low else int(number)
    return of_nan % (1 << 8 * kind.itemsize)


@pytest.mark.parametrize("block", [256, 1], ids=["tiles", "scalars"])
@pytest.mark.parametrize("dtype", compat(FLOATS, torch.float32), ids=short)
def test_floats_to_integers(dtype: torch.dtype, block: int) -> None:
    x = floats_of(dtype)
    for kind, got in zip(INTEGERS, cast_to(x, INTEGERS, block=block), strict=True):
        want = [converted_by_ptx(number, dtype, kind) for number in exact(x)]
        unsigned = np.dtype(f"u{kind.itemsize}")
        assert_same(got.numpy().view(unsigned), np.array(want, unsigned), f"{dtype} to {kind}")


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(d, marks=() if d == torch.float64 else pytest.mark.slow) for d in FLOATS],
    ids=short,
)
def test_floats_to_integers_agree_with_the_emulated_gpu(dtype: torch.dtype) -> None:
    """Both give the same integers, except for values that 8 bits can't hold: LLVM assumes that there are none, and one
    corrupts neighboring bytes."""
    numbers = floats_of(dtype)[:256]
    for kind in INTEGERS:  # a kernel each: LLVM computes narrow conversions from wide ones where it has both
        x = numbers
        if kind.itemsize == 1:
            inside = (x.trunc() >= torch.iinfo(kind).min) & (x.trunc() <= torch.iinfo(kind).max)
            x = torch.where(inside, x, 0)
        (native,) = cast_to(x, [kind], block=256)
        with triton_loom.emulate("sm_90"):
            (emulated,) = cast_to(x, [kind], block=256)
        assert_same(native, emulated, f"{dtype} to {kind}")


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool], ids=short)
def test_integers_to_integers(dtype: torch.dtype) -> None:
    x = np.array([True, False] * 32) if dtype == torch.bool else integers_of(dtype)
    for block in (256, 1):
        out = cast_to(torch.from_numpy(x), [*INTEGERS, torch.bool], block=block)
        for kind, got in zip([*INTEGERS, torch.bool], out, strict=True):
            assert_same(
                got, x != 0 if kind == torch.bool else x.astype(numpy_dtype(kind)), f"{dtype} to {kind}"
            )


@pytest.mark.parametrize("block", [64, 1], ids=["tiles", "scalars"])
def test_floats_and_bools(block: int) -> None:
    for dtype in FLOATS:
        x = torch.tensor([0.0, -0.0, 1.0, -3.5, 1e-7, torch.inf, torch.nan, 0.25] * 8, dtype=dtype)
        (got,) = cast_to(x, [torch.bool], block=block)
        assert_same(got, x != 0, str(dtype))
    flags = torch.rand(64) < 0.5
    for dtype, got in zip(FLOATS, cast_to(flags, FLOATS, block=block), strict=True):
        assert_same(got, flags.to(dtype), str(dtype))


# ---- bits ------------------------------------------------------------------------------------------------


@triton.jit
def bitcast_to_type_of(x_ptr, out, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, offs < n)
    for i in tl.static_range(len(out)):
        tl.store(out[i] + offs, x.to(out[i].dtype.element_ty, bitcast=True), offs < n)
    # there and back, with arithmetic on the bits in between
    signed = x.to(out[0].dtype.element_ty, bitcast=True)
    tl.store(x_ptr + offs, (signed ^ -1).to(x.dtype, bitcast=True), offs < n)


@pytest.mark.parametrize("dtype", EVERY_FLOAT, ids=short)
def test_bitcasts(dtype: torch.dtype) -> None:
    size = dtype.itemsize
    signed = SIGNED[size.bit_length() - 1]
    same_size = [other for other in [*INTEGERS, *EVERY_FLOAT] if other.itemsize == size and other != signed]
    noise = torch.from_numpy(np.frombuffer(np.random.bytes(300 * size), np.uint8).copy())
    for block in (128, 1):
        x = noise.clone().view(dtype)
        out = [torch.zeros(300 * size, dtype=torch.uint8).view(other) for other in [signed, *same_size]]
        bitcast_to_type_of[(triton.cdiv(300, block),)](x, tuple(out), 300, BLOCK=block)
        for got in out:
            assert_same(got.view(torch.uint8), noise, f"{dtype} to {got.dtype}")
        assert_same(x.view(torch.uint8), ~noise)


# ---- literals --------------------------------------------------------------------------------------------


@triton.jit
def store_literals(out_ptr, DTYPE: tl.constexpr):
    numbers: tl.constexpr = (0.1, 1e-5, 65519.0, 65520.0, 3.3e38, -1.0009765625, 0.33333334)
    at = tl.arange(0, 2)
    for i in tl.static_range(len(numbers)):
        tl.store(out_ptr + 2 * i + at, tl.full([2], numbers[i], DTYPE))
    tl.store(out_ptr + 2 * len(numbers) + at, tl.full([2], float("inf"), DTYPE))
    tl.store(out_ptr + 2 * len(numbers) + 2 + at, tl.full([2], float("nan"), DTYPE))


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_literals(dtype: torch.dtype) -> None:
    numbers = [0.1, 1e-5, 65519.0, 65520.0, 3.3e38, -1.0009765625, 0.33333334, np.inf, np.nan]
    out = torch.zeros(2 * len(numbers), dtype=dtype)
    name = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
    store_literals[(1,)](out, DTYPE=name.get(dtype, tl.float64))
    assert_same(out, rounded(np.repeat(numbers, 2), dtype))
