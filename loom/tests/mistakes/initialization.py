"""Reads of memory from `torch.empty` that was never written.

Usually the mistake is in the kernel that leaves memory unwritten, and shows in the next one, which reads it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from mistakes.catalogue import Outcome, mistake

UNINITIALIZED = "uninitialized read"
IGNORED = -100


@triton.jit
def sum_all(x_ptr, total_ptr, n, BLOCK: tl.constexpr = 512):
    off = tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(total_ptr, tl.sum(tl.load(x_ptr + off, mask=off < n, other=0.0)))  # <- caught


def summed(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(())
    sum_all[(1,)](x, total, x.numel())
    return total


# ---- left unwritten by one kernel, read by the next ------------------------------------------------------


@triton.jit
def double_rows(x_ptr, y_ptr, M, ROWS: tl.constexpr = 4, COLS: tl.constexpr = 16):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    off = rows * COLS + tl.arange(0, COLS)[None, :]  # [ROWS, COLS]
    tl.store(y_ptr + off, 2 * tl.load(x_ptr + off, mask=rows < M), mask=rows < M)


@mistake("C5", sum_all, UNINITIALIZED, "x_ptr")
def floored_grid_drops_rows(fixed: bool) -> Outcome:
    x, y = torch.randn(10, 16), torch.empty(10, 16)
    double_rows[(triton.cdiv(10, 4) if fixed else 10 // 4,)](x, y, 10)
    return summed(y), 2 * x.sum()


@triton.jit
def double_row(x_ptr, y_ptr, N, FIXED: tl.constexpr, STEP: tl.constexpr = 16):
    for step in range(tl.cdiv(N, STEP) if FIXED else N // STEP):
        cols = step * STEP + tl.arange(0, STEP)  # [STEP]
        tl.store(y_ptr + cols, 2 * tl.load(x_ptr + cols, mask=cols < N), mask=cols < N)


@mistake("C7", sum_all, UNINITIALIZED, "x_ptr")
def floored_steps_drop_columns(fixed: bool) -> Outcome:
    x, y = torch.randn(40), torch.empty(40)
    double_row[(1,)](x, y, 40, FIXED=fixed)
    return summed(y), 2 * x.sum()


@triton.jit
def double_narrow_rows(x_ptr, y_ptr, ROWS_PER_STEP: tl.constexpr, COLS: tl.constexpr = 32):
    cols = tl.arange(0, COLS)  # [COLS]
    for i in range(ROWS_PER_STEP):
        off = (tl.program_id(0) * ROWS_PER_STEP + i) * COLS + cols
        tl.store(y_ptr + off, 2 * tl.load(x_ptr + off))


@mistake("C4", sum_all, UNINITIALIZED, "x_ptr")
def no_rows_per_step(fixed: bool) -> Outcome:
    x, y = torch.randn(4, 32), torch.empty(4, 32)
    warps = 32
    double_narrow_rows[(4,)](x, y, ROWS_PER_STEP=max(16 // warps, 1) if fixed else 16 // warps)
    return summed(y), 2 * x.sum()


@triton.jit
def cross_entropy(logits_ptr, label_ptr, loss_ptr, FIXED: tl.constexpr, VOCAB: tl.constexpr = 32):
    row = tl.program_id(0)
    label = tl.load(label_ptr + row)
    if label == -100:
        if FIXED:
            tl.store(loss_ptr + row, 0.0)
        return
    logits = tl.load(logits_ptr + row * VOCAB + tl.arange(0, VOCAB))  # [VOCAB]
    peak = tl.max(logits)
    target = tl.load(logits_ptr + row * VOCAB + label)
    tl.store(loss_ptr + row, peak + tl.log(tl.sum(tl.exp(logits - peak))) - target)


@mistake("C8", sum_all, UNINITIALIZED, "x_ptr")
def early_return_leaves_the_loss(fixed: bool) -> Outcome:
    logits, label, loss = torch.randn(4, 32), torch.tensor([3, IGNORED, 31, IGNORED]), torch.empty(4)
    cross_entropy[(4,)](logits, label, loss, FIXED=fixed)
    return summed(loss), F.cross_entropy(logits, label, reduction="sum", ignore_index=IGNORED)


@triton.jit
def scale_groups(x_ptr, weight_ptr, end_ptr, y_ptr, groups, FIXED: tl.constexpr, COLS: tl.constexpr = 16):
    row, cols = tl.program_id(0), tl.arange(0, COLS)  # [COLS]
    group = 0
    while (group < groups) & (row >= tl.load(end_ptr + group, mask=group < groups, other=0)):
        group += 1
    weight = tl.load(weight_ptr + group, mask=group < groups, other=0.0)
    x = tl.load(x_ptr + row * COLS + cols, mask=group < groups, other=0.0)
    tl.store(y_ptr + row * COLS + cols, weight * x, mask=(group < groups) | FIXED)


@mistake("C1", sum_all, UNINITIALIZED, "x_ptr")
def rows_past_the_last_group(fixed: bool) -> Outcome:
    x, y = torch.randn(12, 16), torch.empty(12, 16)
    weight, ends = torch.randn(3), torch.tensor([4, 4, 9])
    scale_groups[(12,)](x, weight, ends, y, 3, FIXED=fixed)
    return summed(y), weight[0] * x[:4].sum() + weight[2] * x[4:9].sum()


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, K, FIXED: tl.constexpr, TILE: tl.constexpr = 16):
    rows, cols = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    if (K == 0) & (not FIXED):
        return
    a = tl.load(a_ptr + rows * K + cols, mask=cols < K, other=0.0)  # [TILE, TILE]
    b = tl.load(b_ptr + rows * TILE + cols, mask=rows < K, other=0.0)
    tl.store(c_ptr + rows * TILE + cols, tl.dot(a, b, input_precision="ieee"))


@mistake("C3", sum_all, UNINITIALIZED, "x_ptr")
def product_of_nothing(fixed: bool) -> Outcome:
    totals, wants = [], []
    for k in (8, 0):
        a, b, c = torch.randn(16, k), torch.randn(k, 16), torch.empty(16, 16)
        matmul[(1,)](a, b, c, k, FIXED=fixed)
        totals.append(summed(c))
        wants.append((a @ b).sum())
    return torch.stack(totals), torch.stack(wants)


@triton.jit
def row_scales(x_ptr, scale_ptr, M, FIXED: tl.constexpr, PADDED: tl.constexpr = 16, COLS: tl.constexpr = 8):
    rows = tl.arange(0, PADDED)  # [PADDED]
    off = rows[:, None] * COLS + tl.arange(0, COLS)[None, :]  # [PADDED, COLS]
    x = tl.load(x_ptr + off, mask=rows[:, None] < M, other=0.0)
    tl.store(scale_ptr + rows, tl.max(tl.abs(x), axis=1), mask=(rows < M) | FIXED)


@mistake("A9", sum_all, UNINITIALIZED, "x_ptr")
def padding_of_the_scales(fixed: bool) -> Outcome:
    x, scale = torch.randn(10, 8), torch.empty(16)
    row_scales[(1,)](x, scale, 10, FIXED=fixed)
    return summed(scale), x.abs().amax(1).sum()


@triton.jit
def softmax(x_ptr, y_ptr, peak_ptr, SAVE_PEAK: tl.constexpr, COLS: tl.constexpr = 32):
    row = tl.program_id(0)
    off = row * COLS + tl.arange(0, COLS)  # [COLS]
    x = tl.load(x_ptr + off)
    peak = tl.max(x)
    weight = tl.exp(x - peak)
    tl.store(y_ptr + off, weight / tl.sum(weight))
    if SAVE_PEAK:
        tl.store(peak_ptr + row, peak)


@triton.jit
def softmax_backward(x_ptr, peak_ptr, dy_ptr, dx_ptr, COLS: tl.constexpr = 32):
    row = tl.program_id(0)
    off = row * COLS + tl.arange(0, COLS)  # [COLS]
    weight = tl.exp(tl.load(x_ptr + off) - tl.load(peak_ptr + row))  # <- caught
    y, dy = weight / tl.sum(weight), tl.load(dy_ptr + off)
    tl.store(dx_ptr + off, y * (dy - tl.sum(y * dy)))


@mistake("C6", softmax_backward, UNINITIALIZED, "peak_ptr")
def statistic_never_saved(fixed: bool) -> Outcome:
    x, dy = torch.randn(4, 32, requires_grad=True), torch.randn(4, 32)
    y, peak, dx = torch.empty(4, 32), torch.empty(4), torch.empty(4, 32)
    softmax[(4,)](x.detach(), y, peak, SAVE_PEAK=fixed)
    softmax_backward[(4,)](x.detach(), peak, dy, dx)
    return dx, torch.autograd.grad(x.softmax(1), x, dy)[0]


# ---- accumulated into ------------------------------------------------------------------------------------


@triton.jit
def add_up_rows(x_ptr, total_ptr, M, COLS: tl.constexpr = 16):
    cols = tl.arange(0, COLS)  # [COLS]
    for row in range(M):
        x = tl.load(x_ptr + row * COLS + cols)
        tl.store(total_ptr + cols, tl.load(total_ptr + cols) + x)  # <- caught


@mistake("C7", add_up_rows, UNINITIALIZED, "total_ptr")
def sum_that_starts_anywhere(fixed: bool) -> Outcome:
    x = torch.randn(5, 16)
    total = torch.zeros(16) if fixed else torch.empty(16)
    add_up_rows[(1,)](x, total, 5)
    return total, x.sum(0)


@triton.jit
def add_up_rows_atomically(x_ptr, total_ptr, COLS: tl.constexpr = 16):
    cols = tl.arange(0, COLS)  # [COLS]
    x = tl.load(x_ptr + tl.program_id(0) * COLS + cols)
    tl.atomic_add(total_ptr + cols, x, sem="relaxed")  # <- caught


@mistake("C7", add_up_rows_atomically, UNINITIALIZED, "total_ptr")
def atomic_sum_that_starts_anywhere(fixed: bool) -> Outcome:
    x = torch.randn(5, 16)
    total = x.new_zeros(16) if fixed else x.new_empty(16)
    add_up_rows_atomically[(5,)](x, total)
    return total, x.sum(0)
