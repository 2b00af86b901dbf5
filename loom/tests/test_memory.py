"""Loads and stores: masks, strides, gathers, wide offsets, pointers in memory, descriptors."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from support import FLOAT8, FLOATS, INTEGERS, compat, needs_block_pointers, random_values, short
from triton.tools.tensor_descriptor import TensorDescriptor
from triton_loom.testing import Fenced, Guarded, assert_same, words

EVERY_DTYPE = [*INTEGERS, torch.bool, *FLOATS, *FLOAT8]


# ---- masks -----------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["low", "high"])
def copy_by_masks(x_ptr, mask_ptr, y_ptr, low, high, BLOCK: tl.constexpr):
    """Copy x to row r of y where the r-th kind of mask holds; inactive lanes read as the first element of x."""
    offs = tl.arange(0, BLOCK)
    other = tl.load(x_ptr)
    prefix = offs < high
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, prefix, other), prefix)
    suffix = offs >= low
    tl.store(y_ptr + BLOCK + offs, tl.load(x_ptr + offs, suffix, other), suffix)
    window = (offs >= low) & (offs < high)
    tl.store(y_ptr + 2 * BLOCK + offs, tl.load(x_ptr + offs, window, other), window)
    stripes = offs % 3 == 0
    tl.store(y_ptr + 3 * BLOCK + offs, tl.load(x_ptr + offs, stripes, other), stripes)
    loaded = tl.load(mask_ptr + offs)
    tl.store(y_ptr + 4 * BLOCK + offs, tl.load(x_ptr + offs, loaded, other), loaded)
    uniform = low < high
    tl.store(y_ptr + 5 * BLOCK + offs, tl.load(x_ptr + offs, uniform, other), uniform)
    # loads masked, stores whole: the value of `other` shows
    tl.store(y_ptr + 6 * BLOCK + offs, tl.load(x_ptr + offs, prefix, other))
    tl.store(y_ptr + 7 * BLOCK + offs, tl.load(x_ptr + offs, loaded, other))
    tl.store(y_ptr + 8 * BLOCK + offs, tl.load(x_ptr + offs, uniform, other))
    tl.store(y_ptr + 9 * BLOCK + offs, tl.load(x_ptr + BLOCK - 1 - offs, window, other))


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=short)
def test_masked_copies_leave_other_memory_alone(dtype: torch.dtype) -> None:
    block = 64
    offs = torch.arange(block)
    x = random_values(block, dtype)
    chosen = torch.rand(block) < 0.5
    for low, high in [(0, 64), (0, 0), (5, 37), (16, 48), (63, 64), (40, 20), (-3, 1), (1, 2**31 - 1)]:
        y = Guarded((10, block), dtype)
        before = words(y.tensor).clone()
        copy_by_masks[(1,)](x, chosen, y.tensor, low, high, BLOCK=block)
        prefix, suffix = offs < high, offs >= low
        uniform = torch.full((block,), low < high)
        masks = [prefix, suffix, prefix & suffix, offs % 3 == 0, chosen, uniform]
        got = words(y.check())
        for row, mask in enumerate(masks):
            assert_same(got[row], torch.where(mask, words(x), before[row]), f"mask {row} of {low}..{high}")
        sources = [(x, prefix), (x, chosen), (x, uniform), (words(x).flip(0), prefix & suffix)]
        for row, (source, mask) in enumerate(sources, 6):
            assert_same(
                got[row], torch.where(mask, words(source), words(x)[0]), f"row {row} of {low}..{high}"
            )


@triton.jit
def copy_between_fences(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, offs < n), offs < n)


@triton.jit
def copy_backwards_between_fences(x_ptr, y_ptr, index_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK) - BLOCK + n
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, offs >= 0, 0), offs >= 0)
    index = tl.load(index_ptr + offs, offs >= 0, 123_456_789)
    tl.store(y_ptr + index, tl.load(x_ptr + index, index < n, 0), index < n)
    on = (offs >= 0) & (offs % 2 == 0)
    tl.store(y_ptr + offs * 3, tl.load(x_ptr + offs * 3, on & (offs * 3 < n), 0), on & (offs * 3 < n))


@pytest.mark.parametrize(
    "dtype", compat([torch.int8, torch.float16, torch.float32, torch.float64], torch.float16), ids=short
)
def test_inactive_lanes_touch_no_memory(dtype: torch.dtype) -> None:
    source, target, indices = Fenced(), Fenced(), Fenced()
    for n in (1, 7, 16, 23, 64, 100):
        x, y = source.last(n, dtype), target.last(n, dtype)
        x.copy_(random_values(n, dtype))
        y.zero_()
        copy_between_fences[(1,)](x, y, n, BLOCK=128)
        assert_same(y, x)
        x, y, index = source.first(n, dtype), target.first(n, dtype), indices.first(n, torch.int32)
        x.copy_(random_values(n, dtype))
        y.zero_()
        index.copy_(torch.randperm(n))
        copy_backwards_between_fences[(1,)](x, y, index, n, BLOCK=128)
        assert_same(y, x)


@triton.jit
def copy_by_masks_that_wrap(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    mask = (offs + 5).to(tl.int8) < 100  # 128 .. 255 are -128 .. -1, and 256 is 0
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask, -1))
    unsigned = (offs - 8).to(tl.uint32) < 100  # 0 .. 7 are huge
    tl.store(y_ptr + BLOCK + offs, tl.load(x_ptr + offs, unsigned, -1))


def test_masks_of_wrapping_integers() -> None:
    x = torch.arange(256, dtype=torch.int32)
    y = torch.empty(2, 256, dtype=torch.int32)
    copy_by_masks_that_wrap[(1,)](x, y, BLOCK=256)
    masks = [(x < 95) | (x >= 123), (x >= 8) & (x < 108)]
    for row, mask in enumerate(masks):
        assert_same(y[row], torch.where(mask, x, -1), f"mask {row}")


# ---- scalars ---------------------------------------------------------------------------------------------


@triton.jit
def copy_scalars(x_ptr, y_ptr, n, other):
    i = tl.program_id(0)
    tl.store(y_ptr + i, tl.load(x_ptr + i))
    value = tl.load(x_ptr + i, mask=i < n, other=other)
    tl.store(y_ptr + tl.num_programs(0) + i, value)
    tl.store(y_ptr + 2 * tl.num_programs(0) + i, value, mask=i >= n)
    absent = tl.load(x_ptr + i, mask=i < n)
    tl.store(y_ptr + 3 * tl.num_programs(0) + i, absent, mask=i < n)


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool, *FLOATS], ids=short)
def test_scalar_loads_and_stores(dtype: torch.dtype) -> None:
    count, n = 12, 7
    x = random_values(count, dtype)
    y = Guarded((4, count), dtype)
    before = words(y.tensor).clone()
    copy_scalars[(count,)](x, y.tensor, n, 1)
    got, low = y.check(), torch.arange(count) < n
    one = torch.ones(1, dtype=dtype)
    assert_same(got[0], x)
    assert_same(got[1], torch.where(low, x, one))
    assert_same(words(got[2]), torch.where(low, before[2], words(one)))
    assert_same(words(got[3]), torch.where(low, words(x), before[3]))


@triton.jit
def store_bools(x_ptr, y_ptr, flags_ptr, counts_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + offs), tl.load(y_ptr + offs)
    tl.store(flags_ptr + offs, x & y)
    tl.store(flags_ptr + BLOCK + offs, x | ~y)
    tl.store(flags_ptr + 2 * BLOCK + offs, x != y)
    tl.store(flags_ptr + 3 * BLOCK + offs, tl.load(x_ptr + offs, offs < 5, True))
    tl.store(flags_ptr + 4 * BLOCK + offs, offs % 2 == 0)
    tl.store(counts_ptr, tl.sum(x.to(tl.int32)))
    tl.store(counts_ptr + 1, tl.sum(tl.where(y, 3, 0)))


def test_bool_tensors() -> None:
    x, y = random_values((2, 64), torch.bool)
    flags, counts = Guarded((5, 64), torch.bool), torch.empty(2, dtype=torch.int64)
    store_bools[(1,)](x, y, flags.tensor, counts, BLOCK=64)
    offs = torch.arange(64)
    want = torch.stack([x & y, x | ~y, x != y, x | (offs >= 5), offs % 2 == 0])
    assert_same(words(flags.check()), words(want))  # 0 and 1, no other byte
    assert counts.tolist() == [int(x.sum()), 3 * int(y.sum())]


# ---- strides ---------------------------------------------------------------------------------------------


def _copy_2d(x_ptr, y_ptr, m, n, x0, x1, y0, y1, M: tl.constexpr, N: tl.constexpr):
    rows = tl.program_id(0) * M + tl.arange(0, M)[:, None]
    cols = tl.program_id(1) * N + tl.arange(0, N)[None, :]
    mask = (rows < m) & (cols < n)
    tl.store(y_ptr + rows * y0 + cols * y1, tl.load(x_ptr + rows * x0 + cols * x1, mask, 0), mask)


def _copy_3d(x_ptr, y_ptr, x0, x1, x2, y0, y1, y2, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    i = tl.arange(0, A)[:, None, None]
    j = tl.arange(0, B)[None, :, None]
    k = tl.arange(0, C)[None, None, :]
    tl.store(y_ptr + i * y0 + j * y1 + k * y2, tl.load(x_ptr + i * x0 + j * x1 + k * x2))


STRIDES = ["x0", "x1", "x2", "y0", "y1", "y2"]
# Strides of 1 become literals in the first of each pair, and stay unknown in the second.
COPY_2D = triton.jit(_copy_2d), triton.jit(_copy_2d, do_not_specialize=["m", "n", *STRIDES])
COPY_3D = triton.jit(_copy_3d), triton.jit(_copy_3d, do_not_specialize=STRIDES)

LAYOUTS_2D = {
    "contiguous": lambda m, n: (n, 1),
    "transposed": lambda m, n: (1, m),
    "step 2": lambda m, n: (2 * n, 2),
    "padded rows": lambda m, n: (n + 3, 1),
}


@pytest.mark.compat
@pytest.mark.parametrize("copy_2d", COPY_2D, ids=["specialized", "generic"])
@pytest.mark.parametrize("layout", LAYOUTS_2D)
def test_strided_tiles(layout: str, copy_2d: triton.JITFunction) -> None:
    m, n = 21, 45
    for other in LAYOUTS_2D if copy_2d is COPY_2D[1] else ["contiguous"]:
        x = Guarded((m, n), torch.float32, LAYOUTS_2D[layout](m, n))
        y = Guarded((m, n), torch.float32, LAYOUTS_2D[other](m, n))
        x.tensor.copy_(torch.randn(m, n))
        copy_2d[(3, 2)](x.tensor, y.tensor, m, n, *x.tensor.stride(), *y.tensor.stride(), M=8, N=32)
        assert_same(y.check(), x.check(), f"{layout} to {other}")


def test_negative_and_zero_strides() -> None:
    copy_2d = COPY_2D[1]
    x = torch.randn(16, 32)
    y = Guarded((16, 32), torch.float32)
    copy_2d[(2, 1)](x[-1, -1:], y.tensor, 16, 32, -32, -1, 32, 1, M=8, N=32)
    assert_same(y.check(), x.flip(0, 1), "backwards")
    copy_2d[(2, 1)](x, y.tensor[:, -1:], 16, 32, 32, 1, 32, -1, M=8, N=32)
    assert_same(y.check(), x.flip(1), "stored backwards")
    for rows, cols in [(0, 1), (32, 0), (0, 0)]:
        copy_2d[(2, 1)](x, y.tensor, 16, 32, rows, cols, 32, 1, M=8, N=32)
        assert_same(y.check(), x.as_strided((16, 32), (rows, cols)).contiguous(), f"strides {rows}, {cols}")


@pytest.mark.parametrize("copy_3d", COPY_3D, ids=["specialized", "generic"])
def test_permuted_three_dimensional_tiles(copy_3d: triton.JITFunction) -> None:
    orders = [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1)]
    for order in orders if copy_3d is COPY_3D[1] else orders[:2]:
        back = [order.index(d) for d in range(3)]
        x = torch.randn([(4, 8, 16)[d] for d in order]).permute(back)
        y = Guarded((4, 8, 16), torch.float32)
        copy_3d[(1,)](x, y.tensor, *x.stride(), *y.tensor.stride(), A=4, B=8, C=16)
        assert_same(y.check(), x.contiguous(), f"order {order}")


# ---- indices that are loaded or wrapped ------------------------------------------------------------------


@triton.jit
def gather_and_scatter(x_ptr, index_ptr, y_ptr, n, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    cols = tl.arange(0, WIDTH)
    index = tl.load(index_ptr + offs)
    row = index.to(tl.int64) * WIDTH
    # single elements, whole rows, rows by columns, scattered rows, offsets that wrap around
    tl.store(y_ptr + offs, tl.load(x_ptr + row))
    y_ptr += BLOCK
    tile = offs[:, None] * WIDTH + cols[None, :]
    tl.store(y_ptr + tile, tl.load(x_ptr + row[:, None] + cols[None, :]))
    y_ptr += BLOCK * WIDTH
    flipped = (index[:, None] + cols[None, :]) % WIDTH
    tl.store(y_ptr + tile, tl.load(x_ptr + row[:, None] + flipped))
    y_ptr += BLOCK * WIDTH
    tl.store(y_ptr + row[:, None] + cols[None, :], tl.load(x_ptr + tile))
    y_ptr += BLOCK * WIDTH
    wrapped = (offs * 5 + 3) % n
    tl.store(y_ptr + offs, tl.load(x_ptr + wrapped))
    y_ptr += BLOCK
    tl.store(y_ptr + offs, tl.load(x_ptr + (offs + n - 2) % n))
    y_ptr += BLOCK
    masked = tl.load(x_ptr + row, mask=index > 5, other=-7)
    tl.store(y_ptr + offs, masked)
    y_ptr += BLOCK
    tl.store(y_ptr + index, masked, mask=index % 3 != 0)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64, torch.uint8, torch.int16], ids=short)
def test_gathered_and_scattered_elements(index_dtype: torch.dtype) -> None:
    block, width, n = 32, 16, 37
    x = torch.randint(0, 2**30, (block, width), dtype=torch.int32)
    index = torch.randperm(block)
    y = Guarded((4 * block + 3 * block * width + block,), torch.int32)
    before = y.tensor.clone()
    gather_and_scatter[(1,)](x, index.to(index_dtype), y.tensor, n, BLOCK=block, WIDTH=width)

    offs, cols = torch.arange(block), torch.arange(width)
    masked = torch.where(index > 5, x[index, 0], -7).int()
    last = before[-block:].clone()
    last[index] = torch.where(index % 3 != 0, masked, last[index])
    want = [
        x[index, 0],
        x[index],
        x[index[:, None], (index[:, None] + cols) % width],
        torch.empty_like(x).index_copy_(0, index, x),
        x.flatten()[(offs * 5 + 3) % n],
        x.flatten()[(offs + n - 2) % n],
        masked,
        last,
    ]
    assert_same(y.check(), torch.cat([part.flatten() for part in want]))


@triton.jit
def gather_some(x_ptr, index_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    index = tl.load(index_ptr + offs)
    tl.store(y_ptr + offs, tl.load(x_ptr + index, (index >= 0) & (index < n), -1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.float64], ids=short)
@pytest.mark.parametrize("first", [-40, 0, 5])
def test_inactive_gathered_lanes_with_consecutive_indices(first: int, dtype: torch.dtype) -> None:
    x, index = Fenced().last(37, dtype), torch.arange(first, first + 64)
    x.copy_(torch.randint(0, 100, x.shape))
    y = Guarded((64,), dtype)
    gather_some[(1,)](x, index, y.tensor, 37, BLOCK=64)
    valid = (index >= 0) & (index < 37)
    assert_same(y.check(), x[index.where(valid, 0)].where(valid, torch.tensor(-1).to(dtype)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64], ids=short)
def test_gathered_elements_may_be_far_apart(dtype: torch.dtype) -> None:
    """Gather from 2**32 elements and more, of which only the pages in use exist."""
    n = 2**32 + 64
    reserved = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.10 has no name for it
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserved
    x = torch.frombuffer(mmap.mmap(-1, n * dtype.itemsize, flags=flags), dtype=dtype)
    index = torch.randperm(64) + torch.randint(0, 2, (64,)) * 2**32
    x[:64], x[-64:] = 1, 2
    y = Guarded((64,), dtype)
    gather_some[(1,)](x, index, y.tensor, n, BLOCK=64)
    assert_same(y.check(), x[index])


@triton.jit(do_not_specialize=["rows", "cols", "row_step", "col_step"])
def select_by_index(
    x_ptr, index_ptr, y_ptr, n, rows, cols, row_step, col_step,
    BY_ROW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Store row index[r] of x as row r of y [rows, cols], or column index[c] as column c; -1 where x has none."""
    row, col = tl.arange(0, ROWS), tl.arange(0, COLS)
    exists = (row < rows)[:, None] & (col < cols)[None, :]
    if BY_ROW:
        index = tl.load(index_ptr + row, row < rows, 0)
        valid = ((index >= 0) & (index < n))[:, None]
        source = x_ptr + index[:, None] * row_step + col[None, :] * col_step
    else:
        index = tl.load(index_ptr + col, col < cols, 0)
        valid = ((index >= 0) & (index < n))[None, :]
        source = x_ptr + row[:, None] * row_step + index[None, :] * col_step
    x = tl.load(source, exists & valid, -1)
    tl.store(y_ptr + row[:, None] * cols + col[None, :], x, exists)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.float64], ids=short)
@pytest.mark.parametrize("by_row", [True, False], ids=["rows", "columns"])
def test_rows_and_columns_by_index(by_row: bool, dtype: torch.dtype) -> None:
    """Indices repeat, and some are far outside; x has inaccessible memory on both sides."""
    memory = Fenced()
    for x_rows, x_cols in [(8, 16), (7, 61), (29, 17), (3, 3)]:
        for order in ("rows", "columns", "rows backwards"):
            flat = memory.first(x_rows * x_cols, dtype) if x_rows % 2 else memory.last(x_rows * x_cols, dtype)
            flat.copy_(torch.randint(0, 100, flat.shape))
            x = flat.view(x_cols, x_rows).T if order == "columns" else flat.view(x_rows, x_cols)
            row_step, col_step = x.stride()
            if order == "rows backwards":
                x, start, row_step = x.flip(0), x[-1:], -row_step
            else:
                start = x
            n, count = x.shape[0 if by_row else 1], 50
            index = torch.randint(0, n, (count,))
            index[torch.rand(count) < 0.1] = 2**40
            index[torch.rand(count) < 0.1] = -1
            valid = (index >= 0) & (index < n)
            chosen = x.index_select(0 if by_row else 1, index.where(valid, 0))
            missing = torch.tensor(-1).to(dtype)
            want = chosen.where(valid[:, None] if by_row else valid, missing)
            y = Guarded(tuple(want.shape), dtype)
            rows, cols = want.shape
            arguments = (start, index, y.tensor, n, rows, cols, row_step, col_step)
            select_by_index[(1,)](*arguments, BY_ROW=by_row, ROWS=64, COLS=64)
            assert_same(y.check(), want, f"{tuple(x.shape)} in {order}")


@triton.jit(do_not_specialize=["step", "n"])
def copy_by_step(x_ptr, y_ptr, step, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    odd = (offs < n) & (offs % 2 == 1)
    tl.store(y_ptr + offs * step, tl.load(x_ptr + offs * step, odd, 0), odd)


@pytest.mark.parametrize("step", [1, 3, -1, -2])
def test_masked_lanes_a_step_apart(step: int) -> None:
    n, reach = 37, 37 * abs(step)
    for dtype in (torch.uint8, torch.float16, torch.int32, torch.float64):
        x = random_values(reach, dtype)
        y = Guarded((reach,), dtype)
        want = words(y.tensor).clone()
        chosen = torch.arange(1, n, 2) * step + (reach - 1 if step < 0 else 0)
        want[chosen] = words(x)[chosen]
        begin = [t[-1:] if step < 0 else t for t in (x, y.tensor)]
        copy_by_step[(1,)](*begin, step, n, BLOCK=64)
        assert_same(words(y.check()), want, short(dtype) or "")


@triton.jit
def copy_far(x_ptr, y_ptr, stride, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, COLS)
    tl.store(y_ptr + row * COLS + cols, tl.load(x_ptr + row * stride + cols))
    tl.store(x_ptr + row * stride + COLS + cols, tl.load(x_ptr + row * stride + cols))


@triton.jit
def copy_far_2d(x_ptr, y_ptr, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = tl.arange(0, ROWS)[:, None].to(tl.int64)
    cols = tl.arange(0, COLS)[None, :]
    mask = rows < 3
    tl.store(y_ptr + rows * COLS + cols, tl.load(x_ptr + rows * stride + cols, mask), mask)
    # a lane stride beyond 32 bits, too
    transposed_offs = tl.arange(0, COLS)[:, None] + tl.arange(0, ROWS)[None, :].to(tl.int64) * stride
    y_turned = y_ptr + 3 * COLS + tl.arange(0, COLS)[:, None] * 3 + tl.arange(0, ROWS)[None, :]
    small = tl.arange(0, ROWS)[None, :] < 3
    tl.store(y_turned, tl.load(x_ptr + transposed_offs, small), small)


@triton.jit
def copy_far_backwards(x_ptr, y_ptr, offset, COLS: tl.constexpr):
    cols = tl.arange(0, COLS)
    tl.store(y_ptr + cols, tl.load(x_ptr - offset + cols))


@pytest.mark.compat
def test_offsets_beyond_32_bits() -> None:
    stride, cols = 2**30, 64
    far = torch.from_numpy(np.empty(2**31 + 2**20, np.int16))  # never touched as a whole, so never in memory
    x = far.as_strided((3, cols), (stride, 1))
    x.copy_(random_values((3, cols), torch.int16))
    y = torch.empty(3, cols, dtype=torch.int16)
    copy_far[(3,)](far, y, stride, COLS=cols)
    assert_same(y, x.contiguous())
    assert_same(far[cols:].as_strided((3, cols), (stride, 1), cols).contiguous(), x.contiguous())
    y = Guarded((2, 3 * cols), torch.int16)
    copy_far_2d[(1,)](far, y.tensor, stride, ROWS=4, COLS=cols)
    got = y.check()
    assert_same(got[0].view(3, cols), x.contiguous())
    assert_same(got[1].view(cols, 3), x.T.contiguous())
    copy_far_backwards[(1,)](x[2], got, 2**31, COLS=cols)
    assert_same(got[0, :cols], x[0])


# ---- pointers in memory ----------------------------------------------------------------------------------


@triton.jit
def follow_scalar_pointers(table_ptr, lengths_ptr, y_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    source = tl.load(table_ptr + row).to(tl.pointer_type(tl.float32))
    offs = tl.arange(0, BLOCK)
    mask = offs < tl.load(lengths_ptr + row)
    tl.store(y_ptr + row * BLOCK + offs, tl.load(source + offs, mask, -1.0))


@triton.jit
def follow_tiles_of_pointers(table_ptr, y_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    pointers = tl.load(table_ptr + rows).to(tl.pointer_type(tl.float32))
    tl.store(y_ptr + rows, tl.load(pointers))
    tl.store(y_ptr + ROWS + rows, tl.load(pointers + rows, rows % 2 == 0, 0.5))
    tile = tl.load(pointers[:, None] + cols[None, :])
    tl.store(y_ptr + 2 * ROWS + rows[:, None] * COLS + cols[None, :], tile)
    tl.store(pointers + COLS, rows.to(tl.float32), rows != 3)
    distance = (pointers + COLS).to(tl.int64) - pointers.to(tl.int64)
    tl.store(y_ptr + 2 * ROWS + ROWS * COLS + rows, distance.to(tl.float32))


def test_tables_of_pointers() -> None:
    rows, cols = 8, 16
    tensors = [torch.randn(cols + 1 + 3 * i) for i in range(rows)]
    originals = [t.clone() for t in tensors]
    table = torch.tensor([t.data_ptr() for t in tensors])
    lengths = torch.tensor([len(t) for t in tensors])
    y = torch.empty(rows, 64)
    follow_scalar_pointers[(rows,)](table, lengths, y, BLOCK=64)
    for row, tensor in zip(y, tensors, strict=True):
        assert_same(row, torch.cat([tensor, torch.full((64 - len(tensor),), -1.0)]))

    y = torch.empty(3 * rows + rows * cols)
    follow_tiles_of_pointers[(1,)](table, y, ROWS=rows, COLS=cols)
    starts = torch.stack([t[:cols] for t in originals])
    diagonal = torch.where(torch.arange(rows) % 2 == 0, starts.diagonal(), 0.5)
    distances = torch.full((rows,), 4.0 * cols)
    assert_same(y, torch.cat([starts[:, 0], diagonal, starts.flatten(), distances]))
    for i, (tensor, original) in enumerate(zip(tensors, originals, strict=True)):
        if i != 3:
            original[cols] = i
        assert_same(tensor, original, f"tensor {i}")


# ---- one program loads and stores the same memory --------------------------------------------------------


@triton.jit
def shift_in_place(x_ptr, distance, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs + distance, tl.load(x_ptr + offs) + 1)


@triton.jit
def reverse_in_place(x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + BLOCK - 1 - offs, tl.load(x_ptr + offs))


@triton.jit
def permute_in_place(x_ptr, index_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, tl.load(x_ptr + tl.load(index_ptr + offs)))


@triton.jit
def transpose_in_place(x_ptr, stride, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(x_ptr + j * stride + i, tl.load(x_ptr + i * stride + j))


@triton.jit
def swap_halves(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + offs), tl.load(y_ptr + offs)
    tl.store(x_ptr + offs, y)
    tl.store(y_ptr + offs, x)


@triton.jit
def rotate_halves(x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    low, high = tl.load(x_ptr + offs), tl.load(x_ptr + BLOCK + offs)
    tl.store(x_ptr + offs, low * 3 - high)
    tl.store(x_ptr + BLOCK + offs, high * 3 + low)


@triton.jit
def shift_views(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs) + 1)


@triton.jit
def reload_after_store(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    before = tl.load(x_ptr + offs)
    tl.store(x_ptr + offs, before + 10)
    after = tl.load(x_ptr + BLOCK - 1 - offs)
    tl.store(x_ptr + offs, after * 100)
    tl.store(y_ptr + offs, before)
    tl.store(y_ptr + BLOCK + offs, after)
    tl.store(y_ptr + 2 * BLOCK + offs, tl.load(x_ptr + offs))


@triton.jit
def prefix_in_place(x_ptr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute a prefix sum by doubling: each round reads what the last one wrote, at another distance."""
    offs = tl.arange(0, BLOCK)
    for step in tl.static_range(STEPS):
        x = tl.load(x_ptr + offs)
        tl.store(x_ptr + offs, x + tl.load(x_ptr + offs - (1 << step), offs >= 1 << step, 0))


@pytest.mark.compat
def test_a_program_loads_all_before_it_stores() -> None:
    block = 128
    numbers = torch.arange(3 * block, dtype=torch.int32)
    for distance in (1, -1, 16, 5, -37, 128):
        x = Guarded.of(numbers)
        shift_in_place[(1,)](x.tensor[block:], distance, BLOCK=block)
        want = numbers.clone()
        want[block + distance : 2 * block + distance] = numbers[block : 2 * block] + 1
        assert_same(x.check(), want, f"shifted by {distance}")

    x = numbers[:block].clone()
    reverse_in_place[(1,)](x, BLOCK=block)
    assert_same(x, numbers[:block].flip(0), "reversed")
    permutation = torch.randperm(block)
    permute_in_place[(1,)](x, permutation, BLOCK=block)
    assert_same(x, numbers[:block].flip(0)[permutation], "permuted")

    for n, stride in [(16, 16), (32, 40), (4, 4)]:
        square = torch.randint(0, 2**30, (n, stride), dtype=torch.int32)
        x = square.clone()
        transpose_in_place[(1,)](x, stride, N=n)
        square[:, :n] = square[:, :n].T.clone()
        assert_same(x, square, f"transposed {n}")

    x = numbers.clone()
    swap_halves[(1,)](x, x[block:], BLOCK=block)
    assert_same(x, torch.cat([numbers[block : 2 * block], numbers[:block], numbers[2 * block :]]), "swapped")
    rotate_halves[(1,)](x, BLOCK=block)
    high, low = numbers[:block], numbers[block : 2 * block]
    assert_same(x[: 2 * block], torch.cat([low * 3 - high, high * 3 + low]), "rotated")

    x = numbers[:block].clone()
    y = torch.empty(3 * block, dtype=torch.int32)
    reload_after_store[(1,)](x, y, BLOCK=block)
    after = (numbers[:block] + 10).flip(0)
    assert_same(y, torch.cat([numbers[:block], after, after * 100]), "reloaded")

    x = numbers[:block].clone()
    prefix_in_place[(1,)](x, STEPS=7, BLOCK=block)
    assert_same(x, numbers[:block].cumsum(0, dtype=torch.int32), "prefix sums")


@triton.jit
def load_early_use_late(x_ptr, index_ptr, out_ptr, n, flag, BLOCK: tl.constexpr):
    """Load each value before its memory is overwritten, and use it after that."""
    offs = tl.arange(0, BLOCK)
    # overwritten in one branch
    a = tl.load(x_ptr + offs) * 2
    if flag > 0:
        tl.store(x_ptr + offs, offs)
    tl.store(out_ptr + offs, a)
    # overwritten in each round of a loop, which reads it too
    b = tl.load(x_ptr + offs)
    total = b * 0
    for i in range(n):
        c = tl.load(x_ptr + offs)
        tl.store(x_ptr + offs, c + b + i)
        total += c
    tl.store(out_ptr + BLOCK + offs, b)
    tl.store(out_ptr + 2 * BLOCK + offs, total)
    # carried to the next round, while its memory already holds another value
    ahead = tl.load(x_ptr + offs)
    sums = ahead * 0
    for i in range(n):
        now, ahead = ahead, tl.load(x_ptr + BLOCK - 1 - offs)
        tl.store(x_ptr + offs, now - i)
        sums += tl.where(offs % 2 == 0, now, ahead)
    tl.store(out_ptr + 3 * BLOCK + offs, sums)
    # an index and a mask, and the `other` of a masked load
    index = tl.load(index_ptr + offs)
    other = tl.load(x_ptr + offs)
    tl.store(index_ptr + offs, BLOCK - 1 - offs)
    tl.store(x_ptr + offs, offs * 3)
    picked = tl.load(x_ptr + index, index % 3 != 0, other)
    tl.store(x_ptr + offs, -offs)
    tl.store(out_ptr + 4 * BLOCK + offs, picked)
    # a sum over values that an atomic has changed since, and over others
    d = tl.load(x_ptr + offs)
    tl.atomic_add(x_ptr + offs, index)
    tl.store(out_ptr + 5 * BLOCK + offs, d - tl.sum(d, 0))
    tl.store(out_ptr + 6 * BLOCK + offs, tl.load(x_ptr + offs) - tl.sum(tl.load(x_ptr + offs), 0))
    # a reduction of the old, a scan of the new
    e = tl.load(x_ptr + offs)
    high = tl.max(e, 0)
    tl.store(x_ptr + offs, e * e)
    tl.store(out_ptr + 7 * BLOCK + offs, tl.cumsum(tl.load(x_ptr + offs), 0) + high - e)
    # a gather from a tile whose memory was overwritten
    f = tl.load(x_ptr + offs)
    tl.store(x_ptr + offs, f * 0)
    tl.store(out_ptr + 8 * BLOCK + offs, tl.gather(f, index, 0))


@pytest.mark.compat
@pytest.mark.parametrize(("n", "flag"), [(0, 0), (1, 5), (4, 0), (3, 5)])
def test_loaded_values_survive_later_stores(n: int, flag: int) -> None:
    block = 64
    start = torch.randint(-99, 99, (block,), dtype=torch.int32)
    permutation = torch.randperm(block)
    offs = torch.arange(block, dtype=torch.int32)
    x, want = start.clone(), []
    want.append(x * 2)
    x = offs if flag > 0 else x
    b, total = x, torch.zeros_like(x)
    for i in range(n):
        total, x = total + x, x + b + i
    want += [b, total]
    ahead, sums = x, torch.zeros_like(x)
    for i in range(n):
        now, ahead = ahead, x.flip(0)
        x = now - i
        sums = sums + torch.where(offs % 2 == 0, now, ahead)
    want.append(sums)
    want.append(torch.where(permutation % 3 != 0, permutation.int() * 3, x))
    x = -offs
    want.append(x - x.sum())
    x = x + permutation.int()
    want.append(x - x.sum())
    want.append((x * x).cumsum(0) + x.max() - x)
    want.append((x * x)[permutation])

    source, index = start.clone(), permutation.clone()
    out = torch.empty(9, block, dtype=torch.int32)
    load_early_use_late[(1,)](source, index, out, n, flag, BLOCK=block)
    assert_same(out, torch.stack([part.int() for part in want]))
    assert not source.any()
    assert_same(index, torch.arange(block).flip(0))


@pytest.mark.parametrize("distance", [1, 16, 17])
def test_arguments_may_be_overlapping_views(distance: int) -> None:
    numbers = torch.arange(200, dtype=torch.int32)
    for source, target in [(0, distance), (distance, 0)]:
        x = numbers.clone()
        shift_views[(1,)](x[source:], x[target:], BLOCK=128)
        want = numbers.clone()
        want[target : target + 128] = numbers[source : source + 128] + 1
        assert_same(x, want, f"from {source} to {target}")


@triton.jit
def two_outputs(x_ptr, a_ptr, b_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    mask = offs < n
    x = tl.load(x_ptr + offs, mask=mask, other=0.0)
    y = tl.exp2(x)  # expensive enough to be stored for the second use
    tl.store(a_ptr + offs, y * 2.0, mask=mask)
    tl.store(b_ptr + offs, y * (1.0 - y), mask=mask)


@pytest.mark.compat
def test_masked_lanes_may_reach_into_a_neighbor() -> None:
    """Tiles overlap only where nothing is loaded or stored; both stores use the value kept for the first."""
    pool = torch.zeros(1024)
    x, a, b = pool[:100], pool[112:212], pool[512:612]
    x.copy_(torch.randint(-3, 4, (100,)))
    two_outputs[(1,)](x, a, b, 100, BLOCK=256)
    y = torch.exp2(x)
    assert_same(a, y * 2)
    assert_same(b, y * (1 - y))


# ---- hints -----------------------------------------------------------------------------------------------


@triton.jit
def copy_with_hints(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.max_contiguous(tl.multiple_of(tl.arange(0, BLOCK), BLOCK), BLOCK)
    a = tl.load(x_ptr + offs, cache_modifier=".ca", eviction_policy="evict_last")
    b = tl.load(x_ptr + offs, offs < 40, 0, cache_modifier=".cg", eviction_policy="evict_first")
    c = tl.load(x_ptr + offs, volatile=True)
    d = tl.load(x_ptr + offs, cache_modifier=".cv")
    tl.store(y_ptr + offs, a, cache_modifier=".wb")
    tl.store(y_ptr + BLOCK + offs, b, cache_modifier=".cs", eviction_policy="evict_first")
    tl.store(y_ptr + 2 * BLOCK + offs, c, cache_modifier=".wt")
    tl.store(y_ptr + 3 * BLOCK + offs, d, offs < BLOCK, eviction_policy="evict_last")
    tl.store(y_ptr + 4 * BLOCK, tl.load(x_ptr + 1, volatile=True), cache_modifier=".cg")


@pytest.mark.compat
def test_cache_hints_change_nothing() -> None:
    x, y = torch.randn(64), torch.empty(4 * 64 + 1)
    copy_with_hints[(1,)](x, y, BLOCK=64)
    assert_same(y, torch.cat([x, x[:40], torch.zeros(24), x, x, x[1:2]]))


# ---- block pointers --------------------------------------------------------------------------------------


@triton.jit
def copy_blocks(x_ptr, y_ptr, z_ptr, m, n, x0, x1, M: tl.constexpr, N: tl.constexpr, PADDING: tl.constexpr):
    """Walk along a row of blocks; y gets the elements inside, z the padded blocks one after another."""
    source = tl.make_block_ptr(x_ptr, (m, n), (x0, x1), (tl.program_id(0) * M, 0), (M, N), (1, 0))
    target = tl.make_block_ptr(y_ptr, (m, n), (n, 1), (tl.program_id(0) * M, 0), (M, N), (1, 0))
    z_ptr += tl.program_id(0) * M * tl.cdiv(n, N) * N
    tile = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    for _ in range(0, n, N):
        x = tl.load(source, boundary_check=(0, 1), padding_option=PADDING)
        tl.store(target, x, boundary_check=(0, 1))
        tl.store(z_ptr + tile, x)
        source = tl.advance(source, (0, N))
        target = tl.advance(target, (0, N))
        z_ptr += M * N


@triton.jit
def sum_blocks(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    block = tl.make_block_ptr(x_ptr, (n,), (1,), (0,), (BLOCK,), (0,))
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(0, n - BLOCK + 1, BLOCK):
        total += tl.load(block)
        block = tl.advance(block, (BLOCK,))
    total += tl.load(block, boundary_check=(0,), padding_option="zero")
    tl.store(tl.make_block_ptr(y_ptr, (BLOCK,), (1,), (0,), (BLOCK,), (0,)), total)


@needs_block_pointers
@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
@pytest.mark.parametrize("padding", ["zero", "nan"])
@pytest.mark.parametrize("transposed", [False, True])
def test_block_pointers(transposed: bool, padding: str) -> None:
    m, n, rows, cols = 37, 45, 16, 32
    x = torch.randn(n, m).T if transposed else torch.randn(m, n)
    y = Guarded((m, n), torch.float32)
    padded = torch.full((48, 64), 0.0 if padding == "zero" else torch.nan)
    padded[:m, :n] = x
    z = Guarded((3, 2, rows, cols), torch.float32)
    copy_blocks[(3,)](x, y.tensor, z.tensor, m, n, *x.stride(), M=rows, N=cols, PADDING=padding)
    assert_same(y.check(), x.contiguous())
    assert_same(z.check(), padded.view(3, rows, 2, cols).permute(0, 2, 1, 3).contiguous())


@needs_block_pointers
@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
def test_block_pointer_in_a_loop() -> None:
    x, y = torch.randint(-99, 99, (1000,)).float(), torch.empty(64)
    sum_blocks[(1,)](x, y, len(x), BLOCK=64)
    assert_same(y, torch.nn.functional.pad(x, (0, 24)).view(16, 64).sum(0))


# ---- tensor descriptors ----------------------------------------------------------------------------------


@triton.jit
def copy_described(x, y, z_ptr, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.program_id(0), tl.program_id(1)
    tile = x.load([i * M - 2, j * N + 3])
    y.store([i * M, j * N], tile)
    offs = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(z_ptr + (i * tl.num_programs(1) + j) * M * N + offs, tile)


@triton.jit
def copy_described_here(x_ptr, y_ptr, z_ptr, m, n, stride, M: tl.constexpr, N: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [m, n], [stride, 1], [M, N])
    y = tl.make_tensor_descriptor(y_ptr, [m, n], [stride, 1], [M, N])
    copy_described(x, y, z_ptr, M, N)


def described_copy(x: torch.Tensor, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the expected y and z of the kernels above: blocks shifted by (-2, +3), zero beyond the edges."""
    m, n = x.shape
    down, along = -(-m // rows), -(-n // cols)
    padded = torch.zeros(down * rows + 2, along * cols + 3, dtype=x.dtype)
    padded[2 : m + 2, :n] = x
    shifted = padded[: down * rows, 3:]
    blocks = shifted.reshape(down, rows, along, cols).permute(0, 2, 1, 3)
    return shifted[:m, :n].contiguous(), blocks.contiguous()


@pytest.mark.compat
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float16], ids=short)
@pytest.mark.parametrize("made", ["host", "kernel"])
def test_descriptors_load_and_store(made: str, dtype: torch.dtype) -> None:
    m, n, stride, rows, cols = 21, 45, 64, 8, 32
    x = Guarded((m, n), dtype, (stride, 1))
    x.tensor.copy_(random_values((m, n), dtype))
    y = Guarded((m, n), dtype, (stride, 1))
    z = Guarded((3, 2, rows, cols), dtype)
    if made == "host":
        described = [TensorDescriptor(t.tensor, [m, n], [stride, 1], [rows, cols]) for t in (x, y)]
        copy_described[(3, 2)](*described, z.tensor, M=rows, N=cols)
    else:
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8))
        copy_described_here[(3, 2)](x.tensor, y.tensor, z.tensor, m, n, stride, M=rows, N=cols)
    want_y, want_z = described_copy(x.check(), rows, cols)
    assert_same(y.check(), want_y)
    assert_same(z.check(), want_z)


@triton.jit
def gather_described(x, y, index_ptr, z_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    index = tl.load(index_ptr + tl.arange(0, ROWS))
    tile = x.gather(index, 5)
    tl.store(z_ptr + tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :], tile)
    y.scatter(tile, index, 3)


@pytest.mark.compat
def test_descriptors_gather_and_scatter() -> None:
    m, n, rows, cols = 50, 28, 16, 16
    x, y = torch.randn(m, n), Guarded((m, n), torch.float32)
    before = y.tensor.clone()
    index = torch.randperm(60)[:rows].int()  # some beyond the last row: read as zero, written nowhere
    assert (index >= m).any()
    z = torch.empty(rows, cols)
    described = [TensorDescriptor(t, [m, n], [n, 1], [1, cols]) for t in (x, y.tensor)]
    gather_described[(1,)](*described, index, z, ROWS=rows, COLS=cols)
    padded = torch.zeros(60, n + 16)
    padded[:m, :n] = x
    assert_same(z, padded[index.long(), 5 : 5 + cols])
    for row, i in zip(z, index.tolist(), strict=True):
        if i < m:
            before[i, 3 : 3 + cols] = row
    assert_same(words(y.check()), words(before))


@triton.jit
def update_described(add, low, high, both, either, odd, x, M: tl.constexpr, N: tl.constexpr):
    at = [tl.program_id(0) * M, tl.program_id(1) * N]
    tile = x.load(at)
    add.atomic_add(at, tile)
    low.atomic_min(at, tile)
    high.atomic_max(at, tile)
    both.atomic_and(at, tile)
    either.atomic_or(at, tile)
    odd.atomic_xor(at, tile)


@pytest.mark.compat
def test_descriptors_update_atomically() -> None:
    m, n = 20, 40
    x = torch.randint(-1000, 1000, (m, n), dtype=torch.int32)
    start = torch.randint(-1000, 1000, (m, n), dtype=torch.int32)
    targets = [Guarded.of(start) for _ in range(6)]
    described = [TensorDescriptor(t, [m, n], [n, 1], [8, 32]) for t in [*(g.tensor for g in targets), x]]
    update_described[(3, 2)](*described, M=8, N=32)
    want = [start + x, start.minimum(x), start.maximum(x), start & x, start | x, start ^ x]
    for name, target, value in zip(["add", "min", "max", "and", "or", "xor"], targets, want, strict=True):
        assert_same(target.check(), value, name)


@triton.jit
def add_described(x, total, N: tl.constexpr):
    total.atomic_add([0, 0], x.load([tl.program_id(0), 0]))


@triton.jit
def copy_described_3d(x, y):
    at = [0, tl.program_id(0) * 4, 3]
    y.store([0, tl.program_id(0) * 4, 0], x.load(at) * 2)


@triton.jit
def pad_described_with_nan(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [n], [1], [BLOCK], padding_option="nan")
    tl.store(y_ptr + tl.arange(0, BLOCK), x.load([16]))


@pytest.mark.compat
def test_descriptors_of_other_ranks_and_paddings() -> None:
    x, total = torch.randint(-50, 50, (9, 32)).float(), torch.zeros(1, 32)
    add_described[(9,)](*(TensorDescriptor(t, t.shape, t.stride(), [1, 32]) for t in (x, total)), N=32)
    assert_same(total[0], x.sum(0))

    x, y = torch.randn(3, 10, 12), Guarded((3, 10, 12), torch.float32)
    copy_described_3d[(3,)](*(TensorDescriptor(t, t.shape, t.stride(), [4, 4, 16]) for t in (x, y.tensor)))
    assert_same(y.check(), torch.nn.functional.pad(x[:, :, 3:] * 2, (0, 3)))

    x, y = torch.randn(40), torch.empty(64)
    pad_described_with_nan[(1,)](x, y, 40, BLOCK=64)
    assert_same(y, torch.cat([x[16:], torch.full((40,), torch.nan)]))
