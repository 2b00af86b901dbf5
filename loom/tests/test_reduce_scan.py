"""Reductions and scans: every axis, any combining function, several operands, ties, NaN and rounding."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from support import FLOATS, INTEGERS, TRITON, compat, load_tile, put, random_values, short
from triton_loom.testing import assert_same

SHAPES = [(1,), (2,), (16,), (256,), (4096,), (1, 32), (32, 1), (8, 64), (64, 8), (2, 2)]
SHAPES += [(4, 8, 16), (16, 4, 2), (2, 4, 8, 16), (4, 2, 2, 4), (1, 16, 1, 2)]


# ---- the named reductions --------------------------------------------------------------------------------


@triton.jit
def reduce_along(x_ptr, out_ptr, SHAPE: tl.constexpr, SIZE: tl.constexpr, INTEGER: tl.constexpr):
    x = load_tile(x_ptr, SHAPE, SIZE)
    for axis in tl.static_range(len(SHAPE)):
        out_ptr = put(out_ptr, tl.sum(x, axis))
        out_ptr = put(out_ptr, tl.max(x, axis))
        out_ptr = put(out_ptr, tl.min(x, axis, keep_dims=True))
        out_ptr = put(out_ptr, tl.argmax(x, axis))
        out_ptr = put(out_ptr, tl.argmin(x, axis, keep_dims=True))
        if INTEGER:
            out_ptr = put(out_ptr, tl.xor_sum(x, axis))
            out_ptr = put(out_ptr, tl.reduce_or(x, axis))
    out_ptr = put(out_ptr, tl.sum(x))
    out_ptr = put(out_ptr, tl.max(x))
    out_ptr = put(out_ptr, tl.min(x))
    if INTEGER:
        out_ptr = put(out_ptr, tl.xor_sum(x))


def reduced_along(x: np.ndarray) -> list[np.ndarray]:
    """Return the reduction in NumPy, with sums in Triton's type for them."""
    integer = x.dtype.kind in "iu"
    wide = x.dtype if x.dtype.itemsize >= 4 or not integer else np.dtype(f"{x.dtype.kind}4")
    parts: list[np.ndarray] = []
    with np.errstate(over="ignore"):
        for axis in range(x.ndim):
            parts += [x.sum(axis, dtype=wide), x.max(axis), x.min(axis), x.argmax(axis), x.argmin(axis)]
            if integer:
                parts += [np.bitwise_xor.reduce(x, axis), np.bitwise_or.reduce(x, axis)]
        parts += [x.sum(dtype=wide), x.max(), x.min()]
        if integer:
            parts += [np.bitwise_xor.reduce(x, None)]
    return parts


def check_reductions(x: np.ndarray, tensor: torch.Tensor) -> None:
    parts = reduced_along(x)
    wide = np.float64 if x.dtype.kind == "f" else np.uint64 if x.dtype.kind == "u" else np.int64
    want = np.concatenate([np.asarray(part).astype(wide).ravel() for part in parts])
    out = torch.from_numpy(np.zeros_like(want))
    reduce_along[(1,)](tensor, out, SHAPE=x.shape, SIZE=x.size, INTEGER=x.dtype.kind in "iu")
    assert_same(out, want, str(x.shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32], ids=short)
def test_every_axis(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randint(-40, 40, shape).to(dtype)
    check_reductions(x.numpy(), x)


@pytest.mark.parametrize("dtype", compat([*INTEGERS, *FLOATS], torch.int16, torch.bfloat16), ids=short)
def test_every_dtype(dtype: torch.dtype) -> None:
    if dtype in FLOATS:
        x = torch.randint(-8, 8, (8, 32)).to(dtype)  # sums up to 256 are exact in bf16 too
        check_reductions(x.double().numpy(), x)
    else:
        x = random_values((8, 32), dtype)
        check_reductions(x.numpy(), x)


@triton.jit
def sum_as(x_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.static_assert(tl.sum(x, 0).dtype == tl.int32)
    tl.static_assert(tl.sum(x, 0, dtype=tl.int64).dtype == tl.int64)
    tl.store(out_ptr, tl.sum(x, 0, dtype=tl.int64))
    tl.store(out_ptr + 1, tl.sum(x, 0, dtype=tl.float32))
    tl.store(out_ptr + 2, tl.sum(x > 0))
    tl.store(out_ptr + 3, tl.sum((x > 0).to(tl.int1), 0))


def test_sum_in_a_chosen_dtype() -> None:
    x = torch.full((128,), 2**30, dtype=torch.int32)
    out = torch.empty(4, dtype=torch.int64)
    sum_as[(1,)](x, out, BLOCK=128)
    assert out.tolist() == [2**37, 2**37, 128, 128]


# ---- ties, NaN and infinities ----------------------------------------------------------------------------


@triton.jit
def extremes(x_ptr, value_ptr, index_ptr, ROWS: tl.constexpr, COLS: tl.constexpr, LEFT: tl.constexpr):
    rows = tl.arange(0, ROWS)
    x = tl.load(x_ptr + rows[:, None] * COLS + tl.arange(0, COLS)[None, :])
    high, high_at = tl.max(x, 1, return_indices=True, return_indices_tie_break_left=LEFT)
    low, low_at = tl.min(x, 1, return_indices=True, return_indices_tie_break_left=LEFT)
    tl.store(value_ptr + rows, high)
    tl.store(value_ptr + ROWS + rows, low)
    tl.store(value_ptr + 2 * ROWS + rows, tl.max(x, 1))
    tl.store(value_ptr + 3 * ROWS + rows, tl.min(x, 1))
    tl.store(index_ptr + rows, high_at)
    tl.store(index_ptr + ROWS + rows, low_at)
    tl.store(index_ptr + 2 * ROWS + rows, tl.argmax(x, 1, tie_break_left=LEFT))
    tl.store(index_ptr + 3 * ROWS + rows, tl.argmin(x, 1, tie_break_left=LEFT))


def extremes_of(x: torch.Tensor, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = x.shape
    values, indices = torch.empty(4, rows, dtype=x.dtype), torch.empty(4, rows, dtype=torch.int64)
    extremes[(1,)](x, values, indices, ROWS=rows, COLS=cols, LEFT=left)
    return values, indices


@pytest.mark.parametrize("cols", [4, 16, 64, 512])
def test_ties_go_to_the_left(cols: int) -> None:
    x = torch.randint(-3, 3, (32, cols)).float()
    x[0] = 7
    x[1] = -torch.inf
    x[2, ::2] = torch.inf
    values, indices = extremes_of(x, True)
    table = x.double().numpy()
    want_high, want_low = torch.from_numpy(table.argmax(1)), torch.from_numpy(table.argmin(1))
    assert_same(indices, torch.stack([want_high, want_low, want_high, want_low]))
    assert_same(values, torch.stack([x.amax(1), x.amin(1), x.amax(1), x.amin(1)]))
    fast_values, fast_indices = extremes_of(x, False)
    assert_same(fast_values, values)
    assert_same(x.gather(1, fast_indices.T).T.contiguous(), values)


def test_extremes_drop_nan() -> None:
    x = torch.randn(64, 64)
    x[torch.rand(64, 64) < 0.3] = torch.nan
    x[5] = torch.nan
    x[6, 1:] = torch.nan
    x[7] = -torch.inf
    x[7, 3] = torch.nan
    values, indices = extremes_of(x, True)
    assert_same(values[2], torch.from_numpy(np.fmax.reduce(x.numpy(), 1)))
    assert_same(values[3], torch.from_numpy(np.fmin.reduce(x.numpy(), 1)))
    # with indices the comparison is false both ways, so NaN may win; value and index still belong together
    assert ((indices >= 0) & (indices < 64)).all()
    assert_same(x.gather(1, indices[:2].T).T.contiguous(), values[:2])


@triton.jit
def sum_specials(x_ptr, out_ptr, BLOCK: tl.constexpr):
    rows = tl.arange(0, 4)
    x = tl.load(x_ptr + rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])
    tl.store(out_ptr + rows, tl.sum(x, 1))


def test_sums_of_special_values() -> None:
    x = torch.ones(4, 64)
    x[0, 40] = torch.inf
    x[1, 3], x[1, 60] = torch.inf, -torch.inf
    x[2, 63] = torch.nan
    x[3] = -0.0
    out = torch.empty(4)
    sum_specials[(1,)](x, out, BLOCK=64)
    assert_same(out, torch.tensor([torch.inf, torch.nan, torch.nan, -0.0]))


# ---- combining functions of one's own --------------------------------------------------------------------


@triton.jit
def multiply(a, b):
    return a * b


@triton.jit
def both(a, b):
    return a & b


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def larger_magnitude(a, b):
    return tl.where(tl.abs(a) >= tl.abs(b), a, b)


@triton.jit
def merge_moments(mean_a, m2_a, count_a, mean_b, m2_b, count_b):
    count = count_a + count_b
    delta = mean_b - mean_a
    share = tl.where(count == 0.0, 0.0, count_b / count)
    return mean_a + delta * share, m2_a + m2_b + delta * delta * count_a * share, count


@triton.jit
def merge_extremes(low_a, high_a, count_a, sum_a, low_b, high_b, count_b, sum_b):
    return tl.minimum(low_a, low_b), tl.maximum(high_a, high_b), count_a + count_b, sum_a + sum_b


@triton.jit
def reduce_by_functions(x_ptr, out_ptr, flag_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    x = load_tile(x_ptr, [ROWS, COLS], ROWS * COLS)
    for axis in tl.static_range(2):
        flag_ptr = put(flag_ptr, tl.reduce(x != 0, axis, both))
        flag_ptr = put(flag_ptr, tl.reduce(x > 3, axis, either))
        out_ptr = put(out_ptr, tl.reduce(tl.where(x == 0, 1, x), axis, multiply))
        out_ptr = put(out_ptr, tl.reduce(x, axis, larger_magnitude, keep_dims=True))
        low, high, count, total = tl.reduce(
            (x, x.to(tl.float32), (x > 0).to(tl.int8), x.to(tl.int64) << 33), axis, merge_extremes
        )
        tl.static_assert(high.dtype == tl.float32 and count.dtype == tl.int8)
        out_ptr = put(out_ptr, low)
        out_ptr = put(out_ptr, high)
        out_ptr = put(out_ptr, count)
        out_ptr = put(out_ptr, total)


@pytest.mark.parametrize("shape", [(8, 32), (32, 4)], ids=str)
def test_combining_functions(shape: tuple[int, int]) -> None:
    numbers = torch.tensor([-4, -3, 0, 1, 2, 5], dtype=torch.int32)  # no two of one magnitude
    x = numbers[torch.randint(0, len(numbers), shape)]
    x[1], x[:, 2], x[2, 3:] = 1, 2, -3
    a = x.numpy().astype(np.int64)
    parts, flags = [], []
    for axis in range(2):
        flags += [(a != 0).all(axis), (a > 3).any(axis)]
        product = np.where(a == 0, 1, x.numpy()).astype(np.int32).prod(axis, dtype=np.int32)
        largest = np.take_along_axis(a, np.abs(a).argmax(axis, keepdims=True), axis)
        parts += [product, largest, a.min(axis), a.max(axis), (a > 0).sum(axis), a.sum(axis) << 33]
    want = np.concatenate([part.astype(np.int64).ravel() for part in parts])
    out, flags_out = torch.empty(len(want), dtype=torch.int64), torch.empty(2 * sum(shape), dtype=torch.bool)
    reduce_by_functions[(1,)](x, out, flags_out, ROWS=shape[0], COLS=shape[1])
    assert_same(out, want)
    assert_same(flags_out, np.concatenate(flags))


@triton.jit
def moments(x_ptr, out_ptr, n, ROWS: tl.constexpr, COLS: tl.constexpr, AXIS: tl.constexpr):
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    mask = (cols < n) & (rows >= 0)
    x = tl.load(x_ptr + rows * COLS + cols, mask, 0.0)
    zero = tl.zeros([ROWS, COLS], tl.float32)
    mean, m2, count = tl.reduce((x, zero, mask.to(tl.float32)), AXIS, merge_moments)
    out_ptr = put(out_ptr, mean)
    out_ptr = put(out_ptr, m2)
    put(out_ptr, count)


@pytest.mark.compat
@pytest.mark.parametrize("axis", [0, 1])
def test_welford(axis: int) -> None:
    rows, cols, n = 64, 128, 100
    x = torch.randn(rows, cols) * 3 + 10_000
    valid = x[:, :n].double()
    out = torch.empty(3, cols if axis == 0 else rows)
    moments[(1,)](x, out, n, ROWS=rows, COLS=cols, AXIS=axis)
    mean, m2, count = (row[:n].double() for row in out)
    assert (count == valid.shape[axis]).all()
    torch.testing.assert_close(mean, valid.mean(axis), rtol=3e-7, atol=0)
    torch.testing.assert_close(m2, valid.var(axis, unbiased=False) * valid.shape[axis], rtol=2e-3, atol=0)
    assert axis == 1 or (out[2, n:] == 0).all()


# ---- rounding --------------------------------------------------------------------------------------------


@triton.jit
def sum_long(x_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(out_ptr, tl.sum(x))
    tl.store(out_ptr + 1, tl.sum(x * x))


def test_long_sums_are_better_than_naive() -> None:
    block = 1 << 16
    for offset in (0.1, 1.7, 1234.5):
        x = torch.rand(block) * 0.01 + offset
        out = torch.empty(2)
        sum_long[(1,)](x, out, BLOCK=block)
        for got, terms in zip(out.tolist(), (x.numpy(), x.numpy() ** 2), strict=True):
            truth = math.fsum(terms.tolist())
            naive = float(np.cumsum(terms)[-1])  # one term after another, in float32
            assert abs(got - truth) < abs(naive - truth) / 8, f"{got} against {naive}; the sum is {truth}"


# ---- scans -----------------------------------------------------------------------------------------------


@triton.jit
def scan_along(x_ptr, out_ptr, SHAPE: tl.constexpr, SIZE: tl.constexpr):
    x = load_tile(x_ptr, SHAPE, SIZE)
    for axis in tl.static_range(len(SHAPE)):
        for reverse in tl.static_range(2):
            out_ptr = put(out_ptr, tl.cumsum(x, axis, reverse=reverse == 1))
            out_ptr = put(out_ptr, tl.cumprod(x, axis, reverse=reverse == 1))


def scanned_along(x: np.ndarray) -> list[np.ndarray]:
    wide = x.dtype if x.dtype.itemsize >= 4 or x.dtype.kind == "f" else np.dtype(f"{x.dtype.kind}4")
    parts = []
    with np.errstate(over="ignore"):
        for axis in range(x.ndim):
            for flip in (lambda a: a, lambda a, axis=axis: np.flip(a, axis)):
                parts.append(flip(np.cumsum(flip(x), axis, dtype=wide)))
                # before 3.9 products, unlike sums, stay in a narrow type
                parts.append(flip(np.cumprod(flip(x), axis, dtype=wide if TRITON >= (3, 9) else x.dtype)))
    return parts


def check_scans(x: np.ndarray, tensor: torch.Tensor) -> None:
    parts = scanned_along(x)
    wide = np.float64 if x.dtype.kind == "f" else np.uint64 if x.dtype.kind == "u" else np.int64
    want = np.concatenate([part.astype(wide).ravel() for part in parts])
    out = torch.from_numpy(np.zeros_like(want))
    scan_along[(1,)](tensor, out, SHAPE=x.shape, SIZE=x.size)
    assert_same(out, want, str(x.shape))


@pytest.mark.parametrize("shape", [s for s in SHAPES if math.prod(s) <= 1024], ids=str)
def test_scans_of_every_axis(shape: tuple[int, ...]) -> None:
    x = torch.randint(-40, 40, shape, dtype=torch.int32)
    check_scans(x.numpy(), x)


@pytest.mark.parametrize("dtype", compat([*INTEGERS, *FLOATS], torch.int8, torch.bfloat16), ids=short)
def test_scans_of_every_dtype(dtype: torch.dtype) -> None:
    if dtype in FLOATS:
        x = torch.randint(-3, 4, (4, 16)).to(dtype)
        x[x == 0] = 1
        x[x.abs() == 3] = -1  # every product is a power of two
        check_scans(x.double().numpy(), x)
    else:
        x = random_values((4, 16), dtype)
        check_scans(x.numpy(), x)


@triton.jit
def compose(a1, b1, a2, b2):
    """Return the composition of x -> a1 x + b1 and x -> a2 x + b2: associative, not commutative."""
    return a1 * a2, a2 * b1 + b2


@triton.jit
def running_argmax(value1, index1, value2, index2):
    later = value2 > value1
    return tl.where(later, value2, value1), tl.where(later, index2, index1)


@triton.jit
def last_set(flag1, value1, flag2, value2):
    return flag1 | flag2, tl.where(flag2, value2, value1)


@triton.jit
def scan_tuples(a_ptr, b_ptr, out_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    a, b = load_tile(a_ptr, [ROWS, COLS], ROWS * COLS), load_tile(b_ptr, [ROWS, COLS], ROWS * COLS)
    column = tl.arange(0, COLS)[None, :] + tl.zeros([ROWS, COLS], tl.int32)
    for axis in tl.static_range(2):
        for reverse in tl.static_range(2):
            slope, start = tl.associative_scan((a, b), axis, compose, reverse=reverse == 1)
            out_ptr = put(out_ptr, slope)
            out_ptr = put(out_ptr, start)
            value, index = tl.associative_scan((b, column), axis, running_argmax, reverse=reverse == 1)
            out_ptr = put(out_ptr, value)
            out_ptr = put(out_ptr, index)
            flag, value = tl.associative_scan((b > 0, a), axis, last_set, reverse=reverse == 1)
            out_ptr = put(out_ptr, flag.to(tl.int32))
            out_ptr = put(out_ptr, value)


def sequential_scan(function, operands: list[np.ndarray], axis: int, reverse: bool) -> list[np.ndarray]:
    rows = [np.moveaxis(operand, axis, 0).copy() for operand in operands]
    steps = range(len(rows[0]))
    order = list(reversed(steps)) if reverse else list(steps)
    for before, now in itertools.pairwise(order):
        for row, value in zip(
            rows, function(*(r[before] for r in rows), *(r[now] for r in rows)), strict=True
        ):
            row[now] = value
    return [np.moveaxis(row, 0, axis) for row in rows]


@pytest.mark.parametrize("shape", [(4, 32), (32, 2), (1, 16)], ids=str)
def test_scans_of_tuples(shape: tuple[int, int]) -> None:
    a = torch.randint(-9, 9, shape, dtype=torch.int32)
    b = torch.randint(-9, 9, shape, dtype=torch.int32)
    functions = [
        lambda a1, b1, a2, b2: (a1 * a2, a2 * b1 + b2),
        lambda v1, i1, v2, i2: (np.where(v2 > v1, v2, v1), np.where(v2 > v1, i2, i1)),
        lambda f1, v1, f2, v2: (f1 | f2, np.where(f2, v2, v1)),
    ]
    column = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    x, y = a.numpy(), b.numpy()
    operands = [[x, y], [y, column], [y > 0, x]]
    want = []
    for axis in range(2):
        for reverse in (False, True):
            for function, inputs in zip(functions, operands, strict=True):
                with np.errstate(over="ignore"):
                    want += sequential_scan(function, inputs, axis, reverse)
    flat = np.concatenate([part.astype(np.int32).ravel() for part in want])
    out = torch.empty(len(flat), dtype=torch.int32)
    scan_tuples[(1,)](a, b, out, ROWS=shape[0], COLS=shape[1])
    assert_same(out, flat)


@triton.jit
def recur(a_ptr, b_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    _, x = tl.associative_scan((tl.load(a_ptr + offs), tl.load(b_ptr + offs)), 0, compose)
    tl.store(out_ptr + offs, x)


@pytest.mark.compat
def test_linear_recurrence() -> None:
    a, b = torch.rand(1024), torch.randn(1024)
    out = torch.empty(1024)
    recur[(1,)](a, b, out, BLOCK=1024)
    x, want = 0.0, []
    for slope, start in zip(a.tolist(), b.tolist(), strict=True):
        x = slope * x + start
        want.append(x)
    torch.testing.assert_close(out.double(), torch.tensor(want, dtype=torch.float64), rtol=1e-5, atol=1e-6)


# ---- reductions within larger programs -------------------------------------------------------------------


@triton.jit
def standardize(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x_ptr += tl.program_id(0) * n
    x = tl.load(x_ptr + offs, offs < n, 0.0)
    centered = tl.where(offs < n, x - tl.sum(x) / n, 0.0)
    spread = tl.sum(centered * centered) / n
    high = tl.max(tl.where(offs < n, x, -float("inf")))
    tl.store(y_ptr + tl.program_id(0) * n + offs, centered / (spread + 1.0) + high, offs < n)


@triton.jit
def pairwise_and_both_axes(x_ptr, out_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    x = load_tile(x_ptr, [ROWS, COLS], ROWS * COLS)
    by_row, by_col = tl.sum(x, 1), tl.sum(x, 0)
    table = by_row[:, None] * 3 + by_col[None, :] - x
    out_ptr = put(out_ptr, table)
    out_ptr = put(out_ptr, tl.sum(tl.max(table, 1), 0))
    out_ptr = put(out_ptr, tl.max(tl.sum(table, 0), 0))
    out_ptr = put(out_ptr, tl.sum(tl.cumsum(by_row, 0), 0))
    put(out_ptr, tl.cumsum(tl.cumsum(x, 0), 1))


def test_reductions_that_feed_each_other() -> None:
    x, y = torch.randn(5, 300), torch.empty(5, 300)
    standardize[(5,)](x, y, 300, BLOCK=512)
    wide = x.double()
    centered = wide - wide.mean(1, keepdim=True)
    want = centered / (centered.square().mean(1, keepdim=True) + 1) + wide.amax(1, keepdim=True)
    torch.testing.assert_close(y.double(), want, rtol=1e-6, atol=1e-6)

    rows, cols = 16, 32
    x = torch.randint(-99, 99, (rows, cols), dtype=torch.int32)
    out = torch.empty(2 * rows * cols + 3, dtype=torch.int32)
    pairwise_and_both_axes[(1,)](x, out, ROWS=rows, COLS=cols)
    table = x.sum(1)[:, None] * 3 + x.sum(0)[None, :] - x
    sums = [table.amax(1).sum(), table.sum(0).amax(), x.sum(1).cumsum(0).sum()]
    want = [table.flatten(), torch.stack(sums), x.cumsum(0).cumsum(1).flatten()]
    assert_same(out, torch.cat(want).int())
