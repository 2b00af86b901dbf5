"""Wrong promises to the compiler about a value, by a hint or by specialization."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mistakes.catalogue import Outcome, mistake

PROMISE = "broken promise"


@triton.jit
def double_rows(x_ptr, y_ptr, stride, COLS: tl.constexpr = 32):
    row, cols = tl.program_id(0), tl.arange(0, COLS)  # [COLS]
    row_off = tl.multiple_of(row * stride, 16)  # <- caught
    tl.store(y_ptr + row * COLS + cols, 2 * tl.load(x_ptr + row_off + cols))


@mistake("E3", double_rows, PROMISE)
def rows_of_odd_stride_called_aligned(fixed: bool) -> Outcome:
    x, y = torch.randn(4, 48 if fixed else 33)[:, :32], torch.zeros(4, 32)
    double_rows[(4,)](x, y, x.stride(0))
    return y, 2 * x


@triton.jit
def matmul_wrapping(a_ptr, b_ptr, c_ptr, M, TILE: tl.constexpr = 16):
    """Multiply tiles whose rows past the end wrap around to the first ones; the mask of the store drops them."""
    inner = tl.arange(0, TILE)
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)  # [TILE]
    wrapped = tl.max_contiguous(tl.multiple_of(rows % M, TILE), TILE)  # <- caught
    a = tl.load(a_ptr + inner[None, :] * M + wrapped[:, None])  # [TILE, TILE], of a transposed A
    b = tl.load(b_ptr + inner[:, None] * TILE + inner[None, :])
    c = tl.dot(a, b, input_precision="ieee")
    tl.store(c_ptr + rows[:, None] * TILE + inner[None, :], c, mask=rows[:, None] < M)


@mistake("B4", matmul_wrapping, PROMISE)
def rows_that_wrap_called_contiguous(fixed: bool) -> Outcome:
    m = 32 if fixed else 23
    a, b, c = torch.randn(16, m), torch.randn(16, 16), torch.zeros(m, 16)
    matmul_wrapping[(2,)](a, b, c, m)
    return c, a.t() @ b


@triton.jit
def gather(x_ptr, index_ptr, y_ptr, BLOCK: tl.constexpr = 16):
    off = tl.arange(0, BLOCK)  # [BLOCK]
    index = tl.max_contiguous(tl.load(index_ptr + off), BLOCK)  # <- caught
    tl.store(y_ptr + off, tl.load(x_ptr + index))


@mistake("E4", gather, PROMISE)
def gathered_pages_called_contiguous(fixed: bool) -> Outcome:
    x, y = torch.randn(64), torch.zeros(16)
    index = torch.arange(24, 40) if fixed else torch.randperm(64)[:16]
    gather[(1,)](x, index, y)
    return y, x[index]


@triton.jit
def dequantize(x_ptr, scale_ptr, y_ptr, GROUP, COLS: tl.constexpr = 64):
    cols = tl.arange(0, COLS)  # [COLS]
    group = tl.max_constancy(cols // GROUP, 16)  # <- caught
    tl.store(y_ptr + cols, tl.load(x_ptr + cols) * tl.load(scale_ptr + group))


@mistake("H12", dequantize, PROMISE)
def groups_called_longer_than_they_are(fixed: bool) -> Outcome:
    x, y, group = torch.randn(64), torch.zeros(64), 16 if fixed else 12
    scale = torch.rand(triton.cdiv(64, group))
    dequantize[(1,)](x, scale, y, group)
    return y, x * scale.repeat_interleave(group)[:64]


# ---- one compiled kernel, other arguments ----------------------------------------------------------------


@triton.jit
def double(x_ptr, y_ptr, n, stride, BLOCK: tl.constexpr):  # <- caught
    off = tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(y_ptr + off, 2 * tl.load(x_ptr + off * stride, mask=off < n), mask=off < n)


def doubled(x: torch.Tensor, n: int, stride: int = 1) -> Outcome:
    """Launch a kernel compiled for an aligned pointer, a length divisible by 16 and stride 1, with other values."""
    y = torch.zeros(64)
    compiled = double.warmup(torch.zeros(64), y, 64, 1, BLOCK=64, grid=(1,))
    compiled[(1, 1, 1)](x, y, n, stride, 64)
    return y[:n], 2 * x[: n * stride : stride]


@mistake("J4", double, PROMISE, "x_ptr")
def pointer_of_another_alignment(fixed: bool) -> Outcome:
    x = torch.randn(65)
    return doubled(x[1:].clone() if fixed else x[1:], 64)


@mistake("J5", double, PROMISE, "n")
def length_of_another_divisibility(fixed: bool) -> Outcome:
    return doubled(torch.randn(64), 48 if fixed else 50)


@mistake("J5", double, PROMISE, "stride")
def stride_of_another_value(fixed: bool) -> Outcome:
    return doubled(torch.randn(128), 64, stride=1 if fixed else 2)
