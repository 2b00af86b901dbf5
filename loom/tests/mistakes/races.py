"""Programs of one launch that access one address without an order between them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from mistakes.bounds import double_batches
from mistakes.catalogue import Outcome, mistake

RACE = "race"


# ---- two programs store one row --------------------------------------------------------------------------


@triton.jit
def scatter_rows(x_ptr, to_ptr, y_ptr, M, NOWHERE: tl.constexpr = -1, COLS: tl.constexpr = 16):
    row, cols = tl.program_id(0), tl.arange(0, COLS)  # [COLS]
    to = tl.load(to_ptr + row)
    to = tl.where(to < 0, NOWHERE, to)
    x = tl.load(x_ptr + row * COLS + cols)
    tl.store(y_ptr + to * COLS + cols, x, mask=(to >= 0) & (to < M))  # <- caught


@mistake("A6", scatter_rows, RACE, "y_ptr")
def nowhere_is_a_row(fixed: bool) -> Outcome:
    x, to = torch.randint(100, (20, 2), dtype=torch.uint8), torch.randperm(20)
    y = torch.zeros_like(x)
    to[to == 7] = -1  # this one goes nowhere: to row 16, which a buffer of at most 16 rows does not have
    scatter_rows[(20,)](x, to, y, 20, NOWHERE=-1 if fixed else 16, COLS=2)
    return y, torch.zeros_like(y).index_copy(0, to[to >= 0], x[to >= 0])


@mistake("G2", scatter_rows, RACE, "y_ptr")
def one_slot_for_equal_scores(fixed: bool) -> Outcome:
    x, y, score = torch.randn(6, 16), torch.zeros(6, 16), torch.tensor([3.0, 1, 1, 0, 5, 2])
    order = score.argsort(descending=True, stable=True)
    rank = (score > score[:, None]).sum(1)  # how many are better: 3 for two rows, 4 for none
    scatter_rows[(6,)](x, order.argsort() if fixed else rank, y, 6)
    return y, x[order]


@triton.jit
def double_rows(x_ptr, y_ptr, y_stride, COLS: tl.constexpr = 32):
    row, cols = tl.program_id(0), tl.arange(0, COLS)  # [COLS]
    tl.store(y_ptr + row * y_stride + cols, 2 * tl.load(x_ptr + row * COLS + cols))  # <- caught


@mistake("H11", double_rows, RACE, "y_ptr")
def stride_shorter_than_the_row(fixed: bool) -> Outcome:
    x, y = torch.randn(4, 32), torch.zeros(4, 32)
    double_rows[(4,)](x, y, y.stride(0) if fixed else 24)
    return y, 2 * x


@mistake("E2", double_rows, RACE, "y_ptr")
def output_is_one_expanded_row(fixed: bool) -> Outcome:
    x, like = torch.randn(4, 32), torch.randn(32).expand(4, 32)
    y = torch.empty(4, 32) if fixed else torch.empty_strided(like.shape, like.stride())
    double_rows[(4,)](x, y, y.stride(0))
    return y, 2 * x


@triton.jit
def block_scales(x_ptr, scale_ptr, FIXED: tl.constexpr, ROWS: tl.constexpr = 8, COLS: tl.constexpr = 16):
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    x = tl.load(x_ptr + rows[:, None] * COLS + cols[None, :])  # [ROWS, COLS]
    block_ptr = scale_ptr + tl.program_id(0) * COLS if FIXED else scale_ptr
    tl.store(block_ptr + cols, tl.max(tl.abs(x), axis=0))  # <- caught


@mistake("H12", block_scales, RACE, "scale_ptr")
def scales_without_their_program(fixed: bool) -> Outcome:
    x, scale = torch.randn(24, 16), torch.zeros(3, 16)
    block_scales[(3,)](x, scale, FIXED=fixed)
    return scale, x.view(3, 8, 16).abs().amax(1)


@mistake("C5", double_batches, RACE, "y_ptr")
def batch_tail_in_the_next_batch(fixed: bool) -> Outcome:
    x, y = torch.randn(2, 12, 4), torch.zeros(2, 12, 4)
    double_batches[(2, 2)](x, y, 12, 24, y.stride(0), FIXED=fixed)
    return y, 2 * x


@triton.jit
def scale_groups(
    x_ptr, weight_ptr, start_ptr, y_ptr, M, FIXED: tl.constexpr, TILE: tl.constexpr = 16, COLS: tl.constexpr = 4
):  # fmt: skip
    group = tl.program_id(0)
    rows = tl.load(start_ptr + group) + tl.arange(0, TILE)[:, None]  # [TILE, 1]
    end = tl.load(start_ptr + group + 1) if FIXED else M
    off = rows * COLS + tl.arange(0, COLS)[None, :]  # [TILE, COLS]
    x = tl.load(x_ptr + off, mask=rows < end)
    tl.store(y_ptr + off, tl.load(weight_ptr + group) * x, mask=rows < end)  # <- caught


@mistake("C11", scale_groups, RACE, "y_ptr")
def tile_longer_than_its_group(fixed: bool) -> Outcome:
    x, y, weight = torch.randn(32, 4), torch.zeros(32, 4), torch.randn(3)
    starts = torch.tensor([0, 8, 24, 32])  # groups of 8, 16 and 8 rows under tiles of 16
    scale_groups[(3,)](x, weight, starts, y, 32, FIXED=fixed)
    return y, x * weight.repeat_interleave(starts.diff())[:, None]


# ---- in place --------------------------------------------------------------------------------------------


@triton.jit
def rotate_in_place(x_ptr, angle_ptr, FIXED: tl.constexpr, HALF: tl.constexpr = 8):
    row, half, cols = tl.program_id(0), tl.program_id(1), tl.arange(0, HALF)  # [HALF]
    first_ptr, second_ptr = x_ptr + row * 2 * HALF + cols, x_ptr + row * 2 * HALF + HALF + cols
    angle = tl.load(angle_ptr + row * HALF + cols)
    cos, sin = tl.cos(angle), tl.sin(angle)
    first = tl.load(first_ptr)  # <- caught
    second = tl.load(second_ptr)  # <- caught
    tl.store(first_ptr, first * cos - second * sin, mask=(half == 0) | FIXED)  # <- caught
    tl.store(second_ptr, second * cos + first * sin, mask=(half == 1) | FIXED)  # <- caught


@mistake("D6", rotate_in_place, RACE, "x_ptr")
def rotation_by_a_program_per_half(fixed: bool) -> Outcome:
    x, angle = torch.randn(3, 16), torch.rand(3, 8)
    (first, second), cos, sin = x.clone().split(8, 1), angle.cos(), angle.sin()
    rotate_in_place[(3, 1 if fixed else 2)](x, angle, FIXED=fixed)
    return x, torch.cat([first * cos - second * sin, second * cos + first * sin], 1)


@triton.jit
def transpose_in_place(x_ptr, FIXED: tl.constexpr, TILE: tl.constexpr = 8, N: tl.constexpr = 16):
    i, j = tl.program_id(0), tl.program_id(1)
    rows, cols = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    upper_ptr = x_ptr + (i * TILE + rows) * N + j * TILE + cols  # [TILE, TILE]
    lower_ptr = x_ptr + (j * TILE + rows) * N + i * TILE + cols
    pair = (i <= j) | (not FIXED)  # when right, one program swaps both tiles of a pair
    upper = tl.load(upper_ptr, mask=pair)  # <- caught
    if FIXED:
        lower = tl.load(lower_ptr, mask=pair)
        tl.store(upper_ptr, tl.trans(lower), mask=pair)
    tl.store(lower_ptr, tl.trans(upper), mask=pair)  # <- caught


@mistake("D6", transpose_in_place, RACE, "x_ptr")
def transpose_tile_by_tile(fixed: bool) -> Outcome:
    x = torch.randn(16, 16)
    want = x.t().clone()
    transpose_in_place[(2, 2)](x, FIXED=fixed)
    return x, want


@triton.jit
def add_previous_row(x_ptr, y_ptr, COLS: tl.constexpr = 16):
    row, cols = tl.program_id(0), tl.arange(0, COLS)  # [COLS]
    previous = tl.load(x_ptr + (row - 1) * COLS + cols, mask=row > 0, other=0.0)  # <- caught
    x = tl.load(x_ptr + row * COLS + cols)
    tl.store(y_ptr + row * COLS + cols, x + previous)  # <- caught


@mistake("D7", add_previous_row, RACE)
def output_is_the_input(fixed: bool) -> Outcome:
    x = torch.randn(5, 16)
    want = x + F.pad(x, (0, 0, 1, 0))[:5]
    y = torch.empty_like(x) if fixed else x
    add_previous_row[(5,)](x, y)
    return y, want


@triton.jit
def norm_backward_in_place(dy_ptr, x_ptr, rstd_ptr, BLOCK: tl.constexpr, COLS: tl.constexpr = 32):
    row, cols = tl.program_id(0), tl.arange(0, COLS)  # [COLS], the whole row
    own = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK], what this program writes
    rstd = tl.load(rstd_ptr + row)
    dy = tl.load(dy_ptr + row * COLS + cols)  # <- caught
    projection = rstd * tl.sum(dy * tl.load(x_ptr + row * COLS + cols)) / COLS
    normed = rstd * tl.load(x_ptr + row * COLS + own)
    dx = rstd * (tl.load(dy_ptr + row * COLS + own) - normed * projection)
    tl.store(dy_ptr + row * COLS + own, dx)  # <- caught


@mistake("D2", norm_backward_in_place, RACE, "dy_ptr")
def gradient_overwritten_while_it_is_read(fixed: bool) -> Outcome:
    x, dy, block = torch.randn(3, 32, requires_grad=True), torch.randn(3, 32), 32 if fixed else 16
    rstd = x.detach().square().mean(1).rsqrt()
    want = torch.autograd.grad(F.rms_norm(x, (32,), eps=0.0), x, dy)[0]
    norm_backward_in_place[(3, 32 // block)](dy, x.detach(), rstd, BLOCK=block)
    return dy, want


@triton.jit
def cross_entropy_in_place(x_ptr, label_ptr, lse_ptr, loss_ptr, BLOCK: tl.constexpr, COLS: tl.constexpr = 32):
    """Replace logits by their gradient, block by block; the first block's program also writes the loss."""
    row, block = tl.program_id(0), tl.program_id(1)
    cols = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    label, lse = tl.load(label_ptr + row), tl.load(lse_ptr + row)
    target = tl.load(x_ptr + row * COLS + label, mask=block == 0)  # <- caught
    tl.store(loss_ptr + row, lse - target, mask=block == 0)
    probability = tl.exp(tl.load(x_ptr + row * COLS + cols) - lse)
    tl.store(x_ptr + row * COLS + cols, probability - (cols == label))  # <- caught


@mistake("D3", cross_entropy_in_place, RACE, "x_ptr")
def target_logit_read_from_the_gradient(fixed: bool) -> Outcome:
    logits, label, loss = torch.randn(3, 32), torch.tensor([17, 31, 20]), torch.zeros(3)
    want = F.cross_entropy(logits, label, reduction="none")
    block = 32 if fixed else 16
    cross_entropy_in_place[(3, 32 // block)](logits, label, logits.logsumexp(1), loss, BLOCK=block)
    return loss, want


# ---- sums ------------------------------------------------------------------------------------------------


@triton.jit
def embedding_backward(dy_ptr, id_ptr, dweight_ptr, FIXED: tl.constexpr, COLS: tl.constexpr = 16):
    token, cols = tl.program_id(0), tl.arange(0, COLS)  # [COLS]
    dy = tl.load(dy_ptr + token * COLS + cols)
    row_ptr = dweight_ptr + tl.load(id_ptr + token) * COLS + cols
    if FIXED:
        tl.atomic_add(row_ptr, dy, sem="relaxed")
    else:
        tl.store(row_ptr, tl.load(row_ptr) + dy)  # <- caught


@mistake("D13", embedding_backward, RACE, "dweight_ptr")
def gradients_of_one_word_added_plainly(fixed: bool) -> Outcome:
    dy, words, dweight = torch.randn(6, 16), torch.tensor([2, 0, 2, 3, 3, 3]), torch.zeros(4, 16)
    embedding_backward[(6,)](dy, words, dweight, FIXED=fixed)
    return dweight, torch.zeros_like(dweight).index_add(0, words, dy)


@triton.jit
def sum_with_reset(x_ptr, total_ptr, FIXED: tl.constexpr, BLOCK: tl.constexpr = 16):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(total_ptr, 0.0, mask=(tl.program_id(0) == 0) & (not FIXED))  # <- caught
    tl.atomic_add(total_ptr, tl.sum(tl.load(x_ptr + off)), sem="relaxed")  # <- caught


@mistake("F14", sum_with_reset, RACE, "total_ptr")
def first_program_resets_the_sum(fixed: bool) -> Outcome:
    x, total = torch.randn(64), torch.zeros(())
    sum_with_reset[(4,)](x, total, FIXED=fixed)
    return total, x.sum()


@triton.jit
def mean_by_the_last(x_ptr, total_ptr, ticket_ptr, mean_ptr, FIXED: tl.constexpr, BLOCK: tl.constexpr = 16):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    tl.atomic_add(total_ptr, tl.sum(tl.load(x_ptr + off)), sem="relaxed")  # <- caught
    last = tl.program_id(0) == tl.num_programs(0) - 1
    if FIXED:  # the last to finish, whoever that is, and after all the others
        last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1
    if last:
        tl.store(mean_ptr, tl.load(total_ptr) / (tl.num_programs(0) * BLOCK))  # <- caught


@mistake("F14", mean_by_the_last, RACE, "total_ptr")
def sum_read_before_all_have_added(fixed: bool) -> Outcome:
    x, total, mean = torch.randn(64), torch.zeros(()), torch.zeros(())
    mean_by_the_last[(4,)](x, total, torch.zeros(1, dtype=torch.int32), mean, FIXED=fixed)
    return mean, x.mean()


@triton.jit
def sum_under_lock(x_ptr, total_ptr, lock_ptr, FIXED: tl.constexpr, COLS: tl.constexpr = 16):
    cols = tl.arange(0, COLS)  # [COLS]
    x = tl.load(x_ptr + tl.program_id(0) * COLS + cols)
    while tl.atomic_cas(lock_ptr, 0, 1, sem="acquire" if FIXED else "relaxed") == 1:
        pass
    total = tl.load(total_ptr + cols)  # <- caught
    tl.store(total_ptr + cols, total + x)  # <- caught
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0, sem="release" if FIXED else "relaxed")


@mistake("F14", sum_under_lock, RACE, "total_ptr")
def lock_without_an_order(fixed: bool) -> Outcome:
    x, total, lock = torch.randn(4, 16), torch.zeros(16), torch.zeros(1, dtype=torch.int32)
    sum_under_lock[(4,)](x, total, lock, FIXED=fixed)
    return total, x.sum(0)
