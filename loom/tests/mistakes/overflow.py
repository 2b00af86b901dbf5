"""Offsets computed in 32 bits that need more. The tensors are too large to allocate: only addresses are evaluated."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mistakes.catalogue import Outcome, mistake

OVERFLOW = "offset overflow"
WRAPPED = {
    "out-of-bounds load": "the wrapped offset is negative",
    "out-of-bounds store": "the wrapped offset is negative",
}


@triton.jit
def double_rows(x_ptr, y_ptr, x_stride, y_stride, FIXED: tl.constexpr, COLS: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, COLS)  # [COLS]
    if FIXED:
        row = row.to(tl.int64)
    x_off = row * x_stride + cols  # <- caught
    y_off = row.to(tl.int64) * y_stride + cols
    tl.store(y_ptr + y_off, 2 * tl.load(x_ptr + x_off))  # <- follows


@mistake("A1", double_rows, OVERFLOW, also=WRAPPED, sizes=(2**23 + 16, 40))
def rows_past_two_to_the_31(fixed: bool, rows: int, device: str) -> Outcome:
    x = torch.randn(rows, 256, device=device)
    y = torch.empty_like(x)
    double_rows[(rows,)](x, y, 256, 256, FIXED=fixed, COLS=256)
    return y, 2 * x


@mistake("A5", double_rows, OVERFLOW, also=WRAPPED, sizes=(2**25, 48))
def few_rows_far_apart(fixed: bool, stride: int, device: str) -> Outcome:
    x = torch.randn(70 * stride, device=device).as_strided((70, 16), (stride, 1))
    y = torch.empty(70, 16, device=device)
    double_rows[(70,)](x, y, stride, 16, FIXED=fixed, COLS=16)
    return y, 2 * x


@triton.jit
def double_tiles(x_ptr, y_ptr, M, FIXED: tl.constexpr, ROWS: tl.constexpr = 16, COLS: tl.constexpr = 256):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    cols = tl.arange(0, COLS)[None, :]  # [1, COLS]
    wide = rows.to(tl.int64) if FIXED else rows
    off = wide * COLS + cols  # <- caught
    x = tl.load(x_ptr + off, mask=rows < M)  # <- follows
    tl.store(y_ptr + off, 2 * x, mask=rows < M)  # <- follows


@mistake("A1", double_tiles, OVERFLOW, also=WRAPPED, sizes=(2**23 + 3, 40))
def last_rows_of_the_last_tile(fixed: bool, rows: int, device: str) -> Outcome:
    x = torch.randn(rows, 256, device=device)
    y = torch.empty_like(x)
    double_tiles[(triton.cdiv(rows, 16),)](x, y, rows, FIXED=fixed)
    return y, 2 * x


@triton.jit
def weight_gradient(dy_ptr, part_ptr, FIXED: tl.constexpr, PER: tl.constexpr = 4, COLS: tl.constexpr = 256):
    program, cols = tl.program_id(0), tl.arange(0, COLS)  # [COLS]
    acc = tl.zeros([COLS], tl.float32)
    first_ptr = dy_ptr + program.to(tl.int64) * PER * COLS + cols
    for i in range(PER):
        if FIXED:
            acc += tl.load(first_ptr)
            first_ptr += COLS
        else:
            off = (program * PER + i) * COLS + cols  # <- caught
            acc += tl.load(dy_ptr + off)  # <- follows
    tl.store(part_ptr + program.to(tl.int64) * COLS + cols, acc)


@mistake("A2", weight_gradient, OVERFLOW, also=WRAPPED, sizes=(2**23 + 16, 40))
def backward_in_32_bits(fixed: bool, rows: int, device: str) -> Outcome:
    dy, part = torch.randn(rows, 256, device=device), torch.empty(rows // 4, 256, device=device)
    weight_gradient[(rows // 4,)](dy, part, FIXED=fixed)
    return part, dy.view(-1, 4, 256).sum(1)


@triton.jit
def last_tokens(x_ptr, y_ptr, HEADS, T, FIXED: tl.constexpr, DIM: tl.constexpr = 128):
    head = tl.program_id(1) * HEADS + tl.program_id(0)
    cols = tl.arange(0, DIM)  # [DIM]
    if FIXED:
        head = head.to(tl.int64)
    head_off = head * T * DIM  # <- caught
    x = tl.load(x_ptr + head_off + (T - 1) * DIM + cols)  # <- follows
    tl.store(y_ptr + head * DIM + cols, x)


@mistake("A3", last_tokens, OVERFLOW, also=WRAPPED, sizes=(2**16, 8))
def heads_of_long_sequences(fixed: bool, tokens: int, device: str) -> Outcome:
    x = torch.randn(5, 64, tokens, 128, device=device)
    y = torch.empty(5, 64, 128, device=device)
    last_tokens[(64, 5)](x, y, 64, tokens, FIXED=fixed)
    return y, x[:, :, -1].clone()


@triton.jit
def double_flat(x_ptr, y_ptr, n, FIXED: tl.constexpr, BLOCK: tl.constexpr = 1024):
    program = tl.program_id(0).to(tl.int64) if FIXED else tl.program_id(0)
    off = program * BLOCK + tl.arange(0, BLOCK)  # <- caught
    x = tl.load(x_ptr + off, mask=off < n)  # <- follows
    tl.store(y_ptr + off, 2 * x, mask=off < n)  # <- follows


@mistake("A4", double_flat, OVERFLOW, also=WRAPPED, sizes=(2**31 + 5000, 5000))
def flattened_index(fixed: bool, n: int, device: str) -> Outcome:
    x = torch.randint(-60, 60, (n,), dtype=torch.int8, device=device)
    y = torch.empty_like(x)
    double_flat[(triton.cdiv(n, 1024),)](x, y, n, FIXED=fixed)
    return y, 2 * x


@triton.jit
def first_rows(weight_ptr, y_ptr, stride, FIXED: tl.constexpr, COLS: tl.constexpr = 64):
    expert, cols = tl.program_id(0), tl.arange(0, COLS)  # [COLS]
    expert_off = expert.to(tl.int64) * stride if FIXED else expert * stride  # <- caught
    tl.store(y_ptr + expert * COLS + cols, tl.load(weight_ptr + expert_off + cols))  # <- follows


@mistake("A4", first_rows, OVERFLOW, also=WRAPPED, sizes=(7168 * 32, 4))
def weights_of_many_experts(fixed: bool, rows: int, device: str) -> Outcome:
    weight = torch.randn(256, rows, 64, device=device)  # as many elements as 256 experts of 7168 x 2048
    y = torch.empty(256, 64, device=device)
    first_rows[(256,)](weight, y, weight.stride(0), FIXED=fixed)
    return y, weight[:, 0].clone()


@triton.jit
def double_in_turn(x_ptr, y_ptr, n, FIXED: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr = 1024):
    """Double tiles, distributed over programs in turn; n is a multiple of BLOCK, so no tile needs a mask."""
    first, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    if FIXED:
        first = first.to(tl.int64)
    for start in range(first, n, step):  # <- caught
        off = start + tl.arange(0, BLOCK)
        mask = off >= 0 if MASKED else None
        tl.store(y_ptr + off, 2 * tl.load(x_ptr + off, mask=mask), mask=mask)


@mistake("A12", double_in_turn, OVERFLOW, sizes=(1_200_000_000, 5 * 1024))
def a_loop_that_goes_on(fixed: bool, n: int, device: str) -> Outcome:
    x = torch.randint(-60, 60, (n,), dtype=torch.int8, device=device)
    y = torch.empty_like(x)
    double_in_turn[(n // 1024,)](x, y, n, FIXED=fixed, MASKED=False)
    return y, 2 * x


@mistake("A12", double_in_turn, OVERFLOW, sizes=(1_200_000_000, 5 * 1024))
def a_loop_that_goes_on_within_bounds(fixed: bool, n: int, device: str) -> Outcome:
    """A mask disables negative offsets: no access is out of bounds, but several programs compute the same tiles."""
    x = torch.randint(-60, 60, (n,), dtype=torch.int8, device=device)
    y = torch.empty_like(x)
    double_in_turn[(n // 1024,)](x, y, n, FIXED=fixed, MASKED=True)
    return y, 2 * x


@mistake("A12", double_in_turn, OVERFLOW, sizes=(2**31 - 1024, 5 * 1024))
def a_loop_that_hardly_ends(fixed: bool, n: int, device: str) -> Outcome:
    """Two steps are 2048 short of 2^32: the wrapped counter comes back two million times."""
    x = torch.randint(-60, 60, (n,), dtype=torch.int8, device=device)
    y = torch.empty_like(x)
    double_in_turn[(n // 1024,)](x, y, n, FIXED=fixed, MASKED=True)
    return y, 2 * x


@triton.jit
def sum_rows(x_ptr, y_ptr, stride, FIXED: tl.constexpr, COLS: tl.constexpr = 256, BLOCK: tl.constexpr = 64):
    row = tl.program_id(0).to(tl.int64) if FIXED else tl.program_id(0)
    first = row * stride  # <- caught
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(first, first + COLS, BLOCK):
        total += tl.load(x_ptr + start + tl.arange(0, BLOCK))  # <- follows
    tl.store(y_ptr + row, tl.sum(total))


@mistake("A5", sum_rows, OVERFLOW, also=WRAPPED, sizes=(2**25, 512))
def a_loop_that_begins_at_a_row(fixed: bool, stride: int, device: str) -> Outcome:
    x = torch.randint(-60, 60, (70 * stride,), dtype=torch.int32, device=device)
    x = x.as_strided((70, 256), (stride, 1))
    y = torch.empty(70, dtype=torch.int32, device=device)
    sum_rows[(70,)](x, y, stride, FIXED=fixed)
    return y, x.sum(1, dtype=torch.int32)
