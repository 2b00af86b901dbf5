"""Loads and stores outside their tensor."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from mistakes.catalogue import Outcome, mistake

LOAD, STORE = "out-of-bounds load", "out-of-bounds store"
IGNORED = -100


# ---- masks -----------------------------------------------------------------------------------------------


@triton.jit
def double_tile(x_ptr, y_ptr, M, N, FIXED: tl.constexpr, ROWS: tl.constexpr = 16, COLS: tl.constexpr = 32):
    rows = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    cols = tl.arange(0, COLS)[None, :]  # [1, COLS]
    off = rows * N + cols  # [ROWS, COLS]
    mask = (rows < M) & (cols < N)
    x = tl.load(x_ptr + off, mask=mask)
    store_mask = mask if FIXED else (rows < N) & (cols < M)
    tl.store(y_ptr + off, 2 * x, mask=store_mask)  # <- caught


@mistake(
    "B1",
    double_tile,
    STORE,
    "y_ptr",
    also={"undefined value": "the store goes beyond what the load has loaded"},
)
def store_mask_transposed(fixed: bool) -> Outcome:
    x, y = torch.randn(10, 30), torch.zeros(10, 30)
    double_tile[(1,)](x, y, 10, 30, FIXED=fixed)
    return y, 2 * x


@triton.jit
def count_experts(expert_ptr, count_ptr, FIXED: tl.constexpr, TOKENS: tl.constexpr = 16):
    expert = tl.load(expert_ptr + tl.arange(0, TOKENS))  # [TOKENS]
    routed = expert >= 0 if FIXED else expert >= -1
    tl.atomic_add(count_ptr + expert, 1, mask=routed)  # <- caught


@mistake("B1", count_experts, STORE, "count_ptr")
def dropped_tokens_counted(fixed: bool) -> Outcome:
    expert, count = torch.arange(16, dtype=torch.int32) % 5 - 1, torch.zeros(4, dtype=torch.int32)
    count_experts[(1,)](expert, count, FIXED=fixed)
    return count, torch.bincount(expert[expert >= 0], minlength=4).int()


@triton.jit
def matmul(
    a_ptr, b_ptr, c_ptr, M, N, K,
    A_MASKED: tl.constexpr = True, B_MASKED: tl.constexpr = True, C_MASKED: tl.constexpr = True,
    TILE: tl.constexpr = 16,
):  # fmt: skip
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]  # [TILE, 1]
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]  # [1, TILE]
    acc = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, K, TILE):
        inner = start + tl.arange(0, TILE)
        a_mask = (rows < M if A_MASKED else rows >= 0) & (inner < K)[None, :]
        b_mask = (inner < K if B_MASKED else inner >= 0)[:, None] & (cols < N)
        a = tl.load(a_ptr + rows * K + inner[None, :], mask=a_mask, other=0.0)  # <- caught: a_ptr
        b = tl.load(b_ptr + inner[:, None] * N + cols, mask=b_mask, other=0.0)  # <- caught: b_ptr
        acc += tl.dot(a, b, input_precision="ieee")
    c_mask = (rows < M if C_MASKED else rows >= 0) & (cols < N)
    tl.store(c_ptr + rows * N + cols, acc, mask=c_mask)  # <- caught: c_ptr


def multiply(**masked: bool) -> Outcome:
    a, b, c = torch.randn(40, 20), torch.randn(20, 32), torch.zeros(40, 32)
    matmul[(3, 2)](a, b, c, 40, 32, 20, **masked)
    return c, a @ b


@mistake("B4", matmul, LOAD, "a_ptr")
def gemm_reads_rows_past_a(fixed: bool) -> Outcome:
    return multiply(A_MASKED=fixed)


@mistake("B4", matmul, LOAD, "b_ptr")
def gemm_reads_past_k_of_b(fixed: bool) -> Outcome:
    return multiply(B_MASKED=fixed)


@mistake("B4", matmul, STORE, "c_ptr")
def gemm_stores_rows_past_c(fixed: bool) -> Outcome:
    return multiply(C_MASKED=fixed)


@triton.jit
def double_by_descriptor(x_ptr, y_ptr, x_rows, y_rows, ROWS: tl.constexpr = 16, COLS: tl.constexpr = 16):
    x = tl.make_tensor_descriptor(x_ptr, shape=[x_rows, COLS], strides=[COLS, 1], block_shape=[ROWS, COLS])
    y = tl.make_tensor_descriptor(y_ptr, shape=[y_rows, COLS], strides=[COLS, 1], block_shape=[ROWS, COLS])
    tile = x.load([0, 0])  # [ROWS, COLS]  # <- caught
    y.store([0, 0], 2 * tile)


@mistake("B4", double_by_descriptor, LOAD, "x_ptr")
def descriptor_of_the_padded_shape(fixed: bool) -> Outcome:
    x, y = torch.randn(10, 16), torch.zeros(10, 16)
    double_by_descriptor[(1,)](x, y, 10 if fixed else 16, 10)
    return y, 2 * x


@triton.jit
def load_row(x_ptr, N, FIXED: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)  # [BLOCK]
    return tl.load(x_ptr + cols, mask=cols < (N if FIXED else BLOCK), other=0.0)  # <- caught


@triton.jit
def sum_rows(x_ptr, total_ptr, N, FIXED: tl.constexpr, BLOCK: tl.constexpr = 32):
    row = tl.program_id(0)
    tl.store(total_ptr + row, tl.sum(load_row(x_ptr + row * N, N, FIXED, BLOCK)))


@mistake("B7", sum_rows, LOAD, "x_ptr", helper=load_row)
def lanes_past_the_row_are_summed(fixed: bool) -> Outcome:
    x, total = torch.randn(4, 24), torch.zeros(4)
    sum_rows[(4,)](x, total, 24, FIXED=fixed)
    return total, x.sum(1)


@triton.jit
def layer_norm(x_ptr, weight_ptr, y_ptr, N, FIXED: tl.constexpr, BLOCK: tl.constexpr = 1024):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)  # [BLOCK]
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0)
    centered = tl.where(mask, x - tl.sum(x) / N, 0.0)
    normed = centered * tl.rsqrt(tl.sum(centered * centered) / N + 1e-5)
    weight = tl.load(weight_ptr + cols, mask=mask if FIXED else cols < BLOCK)  # <- caught
    tl.store(y_ptr + row * N + cols, normed * weight, mask=mask)


@mistake("B9", layer_norm, LOAD, "weight_ptr")
def weight_read_to_the_power_of_two(fixed: bool) -> Outcome:
    x, weight, y = torch.randn(2, 760), torch.randn(760), torch.zeros(2, 760)
    layer_norm[(2,)](x, weight, y, 760, FIXED=fixed)
    return y, F.layer_norm(x, (760,), weight)


# ---- indices that come from data -------------------------------------------------------------------------


@triton.jit
def cross_entropy(logits_ptr, label_ptr, loss_ptr, VOCAB, CHECK: tl.constexpr, BLOCK: tl.constexpr = 64):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)  # [BLOCK]
    label = tl.load(label_ptr + row)
    logits = tl.load(logits_ptr + row * VOCAB + cols, mask=cols < VOCAB, other=-float("inf"))
    peak = tl.max(logits)
    lse = peak + tl.log(tl.sum(tl.exp(logits - peak)))
    counts = (label >= 0) & (label < VOCAB)
    valid = counts if CHECK == "range" else ((label != -100) | (CHECK == "nothing"))
    target = tl.load(logits_ptr + row * VOCAB + label, mask=valid, other=0.0)  # <- caught
    tl.store(loss_ptr + row, tl.where(counts, lse - target, 0.0))


def losses(labels: list[int], check: str) -> Outcome:
    logits, label, loss = torch.randn(4, 50), torch.tensor(labels), torch.zeros(4)
    cross_entropy[(4,)](logits, label, loss, 50, CHECK=check)
    valid_label = torch.where(label < 50, label, IGNORED)
    return loss, F.cross_entropy(logits, valid_label, reduction="none", ignore_index=IGNORED)


@mistake("B5", cross_entropy, LOAD, "logits_ptr")
def ignored_label_as_an_index(fixed: bool) -> Outcome:
    return losses([IGNORED, 3, 49, 0], "range" if fixed else "nothing")


@mistake("B5", cross_entropy, LOAD, "logits_ptr")
def label_past_the_vocabulary(fixed: bool) -> Outcome:
    return losses([3, IGNORED, 49, 57], "range" if fixed else "ignored")


@triton.jit
def sum_sequences(x_ptr, start_ptr, total_ptr, BLOCK: tl.constexpr = 16):
    sequence = tl.program_id(0)
    start = tl.load(start_ptr + sequence)
    end = tl.load(start_ptr + sequence + 1)  # <- caught
    rows = start + tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(total_ptr + sequence, tl.sum(tl.load(x_ptr + rows, mask=rows < end, other=0.0)))


@mistake("A7", sum_sequences, LOAD, "start_ptr")
def starts_without_the_last_end(fixed: bool) -> Outcome:
    x, starts, total = torch.randn(20), torch.tensor([0, 7, 7, 15, 20]), torch.zeros(4)
    sum_sequences[(4,)](x, starts if fixed else starts[:4].clone(), total)
    return total, torch.stack([x[a:b].sum() for a, b in pairwise(starts)])


@triton.jit
def sum_groups(x_ptr, end_ptr, total_ptr, FIXED: tl.constexpr, BLOCK: tl.constexpr = 16):
    group = tl.program_id(0)
    start = tl.load(end_ptr + group - 1, mask=group > 0 if FIXED else group >= 0, other=0)  # <- caught
    rows = start + tl.arange(0, BLOCK)  # [BLOCK]
    mask = rows < tl.load(end_ptr + group)
    tl.store(total_ptr + group, tl.sum(tl.load(x_ptr + rows, mask=mask, other=0.0)))


@mistake("C2", sum_groups, LOAD, "end_ptr")
def first_group_after_the_one_before(fixed: bool) -> Outcome:
    x, ends, total = torch.randn(20), torch.tensor([0, 9, 9, 20]), torch.zeros(4)
    sum_groups[(4,)](x, ends, total, FIXED=fixed)
    return total, torch.stack([x[a:b].sum() for a, b in pairwise([0, *ends])])


@triton.jit
def gather_rows(x_ptr, order_ptr, y_ptr, tokens, FIXED: tl.constexpr, COLS: tl.constexpr = 16):
    """Gather all tokens in one program, with the source of the next token loaded ahead."""
    cols = tl.arange(0, COLS)  # [COLS]
    source = tl.load(order_ptr, mask=tokens > 0 if FIXED else tokens >= 0, other=0)  # <- caught
    for token in range(tokens):
        tl.store(y_ptr + token * COLS + cols, tl.load(x_ptr + source * COLS + cols))
        source = tl.load(order_ptr + token + 1, mask=token + 1 < tokens, other=0)


@mistake("C9", gather_rows, LOAD, "order_ptr")
def no_tokens_at_all(fixed: bool) -> Outcome:
    for tokens in (0, 5):
        x, order = torch.randn(tokens, 16), torch.randperm(tokens)
        y = torch.zeros_like(x)
        gather_rows[(1,)](x, order, y, tokens, FIXED=fixed)
    return y, x[order]


# ---- grids, steps and buffers that do not fit each other -------------------------------------------------


@triton.jit
def double_rows(x_ptr, y_ptr, M, FIXED: tl.constexpr, ROWS: tl.constexpr = 4, COLS: tl.constexpr = 16):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    off = rows * COLS + tl.arange(0, COLS)[None, :]  # [ROWS, COLS]
    x = tl.load(x_ptr + off, mask=rows < M)
    tl.store(y_ptr + off, 2 * x, mask=rows < M if FIXED else rows >= 0)  # <- caught


@mistake(
    "A11",
    double_rows,
    STORE,
    "y_ptr",
    also={"undefined value": "the store goes beyond what the load has loaded"},
)
def grid_past_the_rows(fixed: bool) -> Outcome:
    x, y = torch.randn(10, 16), torch.zeros(10, 16)
    double_rows[(triton.cdiv(10, 4),)](x, y, 10, FIXED=fixed)
    return y, 2 * x


@triton.jit
def partial_sums(x_ptr, part_ptr, M, PER_PROGRAM, FIXED: tl.constexpr, COLS: tl.constexpr = 16):
    cols = tl.arange(0, COLS)  # [COLS]
    acc = tl.zeros([COLS], tl.float32)
    first = tl.program_id(0) * PER_PROGRAM
    last = tl.minimum(first + PER_PROGRAM, M) if FIXED else first + PER_PROGRAM
    for row in range(first, last):
        acc += tl.load(x_ptr + row * COLS + cols)  # <- caught
    tl.store(part_ptr + tl.program_id(0) * COLS + cols, acc)


@mistake("A11", partial_sums, LOAD, "x_ptr")
def more_programs_than_rows(fixed: bool) -> Outcome:
    programs, x = 4, torch.randn(3, 16)
    part = torch.zeros(programs, 16)
    partial_sums[(programs,)](x, part, 3, triton.cdiv(3, programs), FIXED=fixed)
    return part.sum(0), x.sum(0)


@triton.jit
def block_amax(x_ptr, scale_ptr, M, ROWS: tl.constexpr = 16, COLS: tl.constexpr = 16):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    x = tl.load(x_ptr + rows * COLS + tl.arange(0, COLS)[None, :], mask=rows < M, other=0.0)  # [ROWS, COLS]
    tl.store(scale_ptr + tl.program_id(0), tl.max(tl.abs(x)) / 448)  # <- caught


@mistake("B2", block_amax, STORE, "scale_ptr")
def floored_scales_under_a_ceiled_grid(fixed: bool) -> Outcome:
    x = torch.randn(33, 16)
    scale = torch.zeros(triton.cdiv(33, 16) if fixed else 33 // 16)
    block_amax[(triton.cdiv(33, 16),)](x, scale, 33)
    return scale, torch.stack([block.abs().amax() for block in x.split(16)]) / 448


@triton.jit
def double_row(x_ptr, y_ptr, N, FIXED: tl.constexpr, STEP: tl.constexpr = 1024):
    for start in range(0, N, STEP):
        cols = start + tl.arange(0, STEP)  # [STEP]
        x = tl.load(x_ptr + cols, mask=cols < N)
        tl.store(y_ptr + cols, 2 * x, mask=cols < N if FIXED else cols >= 0)  # <- caught


@mistake(
    "B3",
    double_row,
    STORE,
    "y_ptr",
    also={"undefined value": "the store goes beyond what the load has loaded"},
)
def unmasked_step_over_the_row(fixed: bool) -> Outcome:
    x, y = torch.randn(1536), torch.zeros(1536)
    double_row[(1,)](x, y, 1536, FIXED=fixed)
    return y, 2 * x


# ---- views: inside the storage, outside the tensor -------------------------------------------------------


@triton.jit
def double_batches(
    x_ptr, y_ptr, L, rows, y_batch_stride, FIXED: tl.constexpr, BLOCK: tl.constexpr = 8, COLS: tl.constexpr = 4
):  # fmt: skip
    batch = tl.program_id(1)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]  # [BLOCK, 1], of this batch
    off = row * COLS + tl.arange(0, COLS)[None, :]  # [BLOCK, COLS]
    mask = row < L if FIXED else batch * L + row < rows
    x = tl.load(x_ptr + batch * L * COLS + off, mask=mask)
    tl.store(y_ptr + batch * y_batch_stride + off, 2 * x, mask=mask)  # <- caught


@mistake("C5", double_batches, STORE, "y_ptr")
def batch_tail_between_batches(fixed: bool) -> Outcome:
    x, y = torch.randn(2, 12, 4), torch.zeros(2, 16, 4)[:, :12]
    double_batches[(2, 2)](x, y, 12, 24, y.stride(0), FIXED=fixed)
    return y, 2 * x


@triton.jit
def rotate(x_ptr, cos_ptr, sin_ptr, y_ptr, x_stride, HALF: tl.constexpr, HEAD: tl.constexpr = 16):
    row, cols = tl.program_id(0), tl.arange(0, HALF)  # [HALF]
    cos = tl.load(cos_ptr + row * HEAD // 2 + cols)
    sin = tl.load(sin_ptr + row * HEAD // 2 + cols)
    first = tl.load(x_ptr + row * x_stride + cols)
    second = tl.load(x_ptr + row * x_stride + HALF + cols)  # <- caught
    tl.store(y_ptr + row * HEAD + cols, first * cos - second * sin)
    tl.store(y_ptr + row * HEAD + HALF + cols, second * cos + first * sin)


@mistake("B8", rotate, LOAD, "x_ptr")
def partial_rotation_of_the_whole_head(fixed: bool) -> Outcome:
    head, rotary = 16, 8
    query, angle, y = torch.randn(5, head), torch.rand(5, head // 2), torch.zeros(5, head)
    x, cos, sin = query[:, :rotary], angle.cos(), angle.sin()
    rotate[(5,)](x, cos, sin, y, x.stride(0), HALF=(rotary if fixed else head) // 2)
    first, second, cos, sin = x[:, :4], x[:, 4:], cos[:, :4], sin[:, :4]
    return y[:, :rotary], torch.cat([first * cos - second * sin, second * cos + first * sin], 1)


@triton.jit
def sum_columns(x_ptr, total_ptr, M, FIXED: tl.constexpr, ROWS: tl.constexpr = 8, COLS: tl.constexpr = 16):
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    mask = rows < M if FIXED else rows < ROWS
    x = tl.load(x_ptr + rows * COLS + cols, mask=mask, other=0.0)  # [ROWS, COLS]  # <- caught
    tl.store(total_ptr + tl.arange(0, COLS), tl.sum(x, axis=0))


@mistake("E4", sum_columns, LOAD, "x_ptr")
def rows_beside_a_narrowed_view(fixed: bool) -> Outcome:
    x, total = torch.randn(12, 16)[2:7], torch.zeros(16)
    sum_columns[(1,)](x, total, 5, FIXED=fixed)
    return total, x.sum(0)


@triton.jit
def sum_strided_rows(x_ptr, total_ptr, N, stride, FIXED: tl.constexpr, BLOCK: tl.constexpr = 32):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)  # [BLOCK]
    x = tl.load(x_ptr + row * stride + cols, mask=cols < (N if FIXED else BLOCK), other=0.0)  # <- caught
    tl.store(total_ptr + row, tl.sum(x))


@mistake("E3", sum_strided_rows, LOAD, "x_ptr")
def gap_between_padded_rows(fixed: bool) -> Outcome:
    x, total = torch.randn(4, 32)[:, :24], torch.zeros(4)
    sum_strided_rows[(4,)](x, total, 24, x.stride(0), FIXED=fixed)
    return total, x.sum(1)


@triton.jit
def halve_gradient(dy_ptr, dx_ptr, N, row_stride, col_stride, BLOCK: tl.constexpr = 32):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)  # [BLOCK]
    dy = tl.load(dy_ptr + row * row_stride + cols * col_stride, mask=cols < N)  # <- caught
    tl.store(dx_ptr + row * N + cols, dy / 2, mask=cols < N)


@mistake("E3", halve_gradient, LOAD, "dy_ptr")
def padded_gradient_read_as_dense(fixed: bool) -> Outcome:
    dy, dx = torch.randn(4, 32)[:, :24], torch.zeros(4, 24)
    halve_gradient[(4,)](dy, dx, 24, *(dy.stride() if fixed else (24, 1)))
    return dx, dy / 2


@mistake("E2", halve_gradient, LOAD, "dy_ptr")
def expanded_gradient_read_as_dense(fixed: bool) -> Outcome:
    dy, dx = torch.randn(()).expand(4, 24), torch.zeros(4, 24)  # what sum().backward() passes on
    halve_gradient[(4,)](dy, dx, 24, *(dy.stride() if fixed else (24, 1)))
    return dx, dy / 2
