"""Cross entropy of logits, read once, with everything that losses of language models add to it.

    u = softcap * tanh(x / softcap)            x itself without a softcap, and where x is minus infinity
    z = scale * u                              scale = 1 / temperature
    m = max(z)    d = sum(exp(z - m))          lse = m + log(d)      p = exp(z - m) / d
    nll = (m - z_y) + log(d)
    loss = (1 - a) * w_y * nll + a / V * sum_c(w_c * (lse - z_c)) + z_loss * lse^2
    entropy = log(d) - sum(exp(z - m) * (z - m)) / d

a is the label smoothing and w the class weights, 1 without. V counts the columns that are not minus infinity: columns
that pad a vocabulary take no part in the smoothing either. The sum over them is one of z_c - z_y, so that nothing of a
common offset of all logits is left in it. A mean divides the sum of the losses by that of w_y over the tokens with a
target. With g the gradient of a token's loss (divided likewise), h that of its lse and e that of its entropy H:

    dz_j = p_j * (g * (A + 2 * z_loss * lse) + h - e * (log(p_j) + H)) - g * (1 - a) * w_y * [j = y] - g * a / V * w_j
    dx_j = dz_j * scale * (1 - (u_j / softcap)^2)          A = (1 - a) * w_y + a / V * sum_c(w_c)

Of a rank's shard of the vocabulary a row's statistics are an op of their own (`vocabulary`), which reads the shard
once; those of all ranks are joined into log-probabilities, of which the loss is made. Backward is the same kernel, on
the shard.

Everything in fp32; losses and statistics stay fp32, and dx is rounded once, the target's column like the others. Sums
over tokens are made in one order: the same bits every run. Rows without a target are not read: their results and their
gradient are zero.

A row is read from its first multiple of 16 bytes on, so that accesses are wide for any V; what lies before and after
whole tiles comes last. Where V is not a multiple of 8 the order of adding up a row, and with it the last bit of its
lse, depends on where the row begins.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...language import tl, triton
from ...runtime import Launch, capabilities_of, define_flat_op, is_distributed, kernel
from ...tiles.softmax import LOWEST, add_exponentials, add_moments, cap, join_exponentials, join_moments
from ..common.checks import check_input
from ..common.rows import align_of, compute_dtype, count_rows, load_tile, row_offset, row_strides
from .losses import (
    CrossEntropy,
    check_ignore_index,
    check_loss,
    check_shard,
    check_softcap,
    check_target,
    reduced_loss,
    scale_of,
    told,
)
from .mesh import localize, loss_over_mesh
from .vocabulary import (
    CAPPED,
    FEW,
    PLAIN,
    Joined,
    VocabShard,
    allocate_joined,
    capped_reference,
    count_statistics,
    joined_reference,
    kind_of,
    launch_join,
    split_targets,
    statistics_reference,
)

# ---- reference ------------------------------------------------------------------------------------------


def cross_entropy_reference(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    softcap: float | None, scale: float, reduction: str, zero_if_none: bool, entropy: bool, accuracy: bool,
    inplace: bool,
) -> list[Tensor]:  # fmt: skip
    """The definition. logits [..., V], target [...], weight [V]."""
    rows, cols, dtype = count_rows(logits), logits.shape[-1], compute_dtype(logits)
    z, _ = capped_reference(logits.reshape(rows, cols).to(dtype), softcap, scale)
    y, valid, wrong = split_targets(target, cols, ignore_index)

    def told(value: Tensor) -> Tensor:
        """0 where there is no target, NaN where it is none of the columns."""
        return torch.where(valid, value, torch.where(wrong, torch.nan, 0.0))

    largest = z.amax(1).clamp(min=torch.finfo(dtype).min)
    t = z - largest[:, None]
    e = torch.exp(t)
    total = e.sum(1)
    log_total = torch.log(total)
    picked = z.gather(1, y[:, None])[:, 0]
    nll = (largest - picked) + log_total
    share = torch.ones_like(nll) if weight is None else weight.to(dtype)[y]
    lse = largest + log_total
    loss = share * nll
    smooth = None
    if label_smoothing:
        there = z > -torch.inf
        weights = torch.ones_like(z) if weight is None else weight.to(dtype).expand(z.shape)
        weights = torch.where(there, weights, 0.0)
        part = label_smoothing / there.sum(1).to(dtype)
        origin = torch.where(picked > -torch.inf, picked, 0.0)
        below = torch.where(there, weights * (z - origin[:, None]), 0.0).sum(1)
        mass = weights.sum(1)
        loss = (1.0 - label_smoothing) * loss + part * (mass * ((largest - origin) + log_total) - below)
        smooth = torch.stack([part * mass, part])
    loss = told(loss + z_loss * lse.square())
    share = torch.where(valid, share, 0.0)
    outputs = []
    inverse = None
    if reduction == "none":
        outputs.append(loss.view(target.shape))
    elif reduction == "sum":
        outputs.append(loss.sum())
    else:
        total_share = share.sum()
        inverse = 1.0 / total_share
        mean = loss.sum() / total_share
        if zero_if_none:
            inverse = torch.where(total_share == 0, 0.0, inverse)
            mean = torch.where((total_share == 0) & ~loss.sum().isnan(), 0.0, mean)
        outputs.append(mean)
    outputs.append(told(lse).view(target.shape))
    if entropy:
        moment = torch.where(e > 0, e * t, 0.0).sum(1)
        outputs.append(told(log_total - moment / total).view(target.shape))
    if accuracy:
        col = torch.arange(cols, device=z.device)
        before = (z > picked[:, None]) | ((z == picked[:, None]) & (col < y[:, None]))
        hit = torch.where(valid, (~before.any(1)).to(dtype), 0.0)
        if reduction == "none":
            outputs.append(hit.view(target.shape))
        elif reduction == "sum":
            outputs.append(hit.sum())
        else:
            count = valid.sum()
            right = hit.sum() / count
            outputs.append(torch.where(count == 0, 0.0, right) if zero_if_none else right)
    outputs += [torch.where(valid, largest, 0.0), torch.where(valid, total, 1.0)]
    if inverse is not None:
        outputs.append(inverse)
    if smooth is not None:
        outputs.append(torch.where(valid, smooth, 0.0))
    return outputs


def cross_entropy_statistics_reference(
    logits: Tensor, target: Tensor, weight: Tensor | None, start: int, vocab: int, ignore_index: int,
    softcap: float | None, scale: float, entropy: bool, spread: bool, accuracy: bool,
) -> list[Tensor]:  # fmt: skip
    """Statistics [STATS, T] over the part of a vocabulary that begins at `start`: logits [..., part], weight [part];
    target [...] is of all `vocab` columns."""
    z = logits.reshape(target.numel(), logits.shape[-1]).to(compute_dtype(logits))
    z, _ = capped_reference(z, softcap, scale)
    y, valid, _ = split_targets(target, vocab, ignore_index)
    return [statistics_reference(z, y, valid, weight, start, entropy, spread, accuracy)]


def sharded_logprobs_reference(
    stats: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, start: int, vocab: int, ignore_index: int,
    softcap: float | None, scale: float, entropy: bool, spread: bool, accuracy: bool, inplace: bool,
) -> list[Tensor]:  # fmt: skip
    """What the statistics of all ranks, [ranks, STATS, T], come to: functions of the ranks' logits, of which those
    given are a shard."""
    return joined_reference(stats, target, vocab, ignore_index, entropy, spread, accuracy)


def cross_entropy_backward_reference(
    logits: Tensor, target: Tensor, weight: Tensor | None, largest: Tensor, total: Tensor, inverse: Tensor | None,
    smooth: Tensor | None, entropy: Tensor | None, dloss: Tensor | None, dlse: Tensor | None,
    dentropy: Tensor | None, dspread: Tensor | None, start: int, vocab: int, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float | None, scale: float,
) -> list[Tensor]:  # fmt: skip
    """dlogits, from the gradients that there are: dloss of a token or of all, dlse and dentropy of a token. With
    dspread the loss is the negative log-probability alone, and class weights count in the spread alone. logits and
    weight may be the shard of a vocabulary that begins at `start`."""
    rows, cols, dtype = count_rows(logits), logits.shape[-1], compute_dtype(logits)
    z, slope = capped_reference(logits.reshape(rows, cols).to(dtype), softcap, scale)
    y, valid, _ = split_targets(target, vocab, ignore_index)
    t = z - largest.to(dtype)[:, None]
    log_total = torch.log(total.to(dtype))
    p = torch.exp(t) / total.to(dtype)[:, None]
    factor = torch.zeros_like(log_total)
    dz = torch.zeros_like(z)
    if dloss is not None:
        g = dloss.reshape(-1).to(dtype).expand(rows) * (1.0 if inverse is None else inverse.to(dtype))
        at_target = g * (1.0 - label_smoothing)
        if weight is not None and dspread is None:
            at_target = at_target * weight.to(dtype)[y]
        factor = at_target + g * 2.0 * z_loss * (largest.to(dtype) + log_total)
        here = torch.arange(start, start + cols, device=z.device) == y[:, None]
        dz = dz - torch.where(here, at_target[:, None], 0.0)
    of_spread = dloss if dspread is None else dspread
    if smooth is not None and of_spread is not None:
        g = g if dspread is None else dspread.reshape(-1).to(dtype)
        factor = factor + g * smooth[0].to(dtype)
        part = (g * smooth[1].to(dtype))[:, None].expand(z.shape)
        part = part if weight is None else part * weight.to(dtype)
        dz = dz - torch.where(z > -torch.inf, part, 0.0)
    if dlse is not None:
        factor = factor + dlse.reshape(-1).to(dtype)
    by_row = factor[:, None]
    if dentropy is not None:
        assert entropy is not None
        e = dentropy.reshape(-1, 1).to(dtype)
        by_row = by_row - e * (t - log_total[:, None] + entropy.reshape(-1, 1).to(dtype))
    dz = dz + torch.where(p > 0, p * by_row, p)
    dx = torch.where(valid[:, None], dz * slope, 0.0)
    return [dx.to(logits.dtype).view(logits.shape)]


# ---- kernels --------------------------------------------------------------------------------------------


@triton.jit
def _number(x, softcap, scale, KIND: tl.constexpr):
    """z of logits as they are stored."""
    z = x.to(tl.float32)
    if KIND == CAPPED:
        z, _ = cap(z, softcap)
    if KIND != PLAIN:
        z = z * scale
    return z


@triton.jit
def _cut(offset, cols, ALIGN: tl.constexpr, TILE: tl.constexpr, ELEMENT: tl.constexpr):
    """How a row of `cols` logits at `offset` is read: (head, body), a head of a few elements up to the next multiple
    of 16 bytes, a body of whole tiles, and the rest."""
    if ALIGN > 1:
        head = 0
    else:
        head = ((16 // ELEMENT - offset % (16 // ELEMENT)) % (16 // ELEMENT)).to(tl.int32)
    return head, tl.maximum(cols - head, 0) // TILE * TILE


@triton.jit
def _edge(start, lane, head, body, cols, ALIGN: tl.constexpr):
    """(columns, which of them exist) of a piece of what is not in the body: the head, then what follows the body."""
    if ALIGN > 1:
        col = body + start + lane
        return col, col < (cols // ALIGN) * ALIGN
    else:
        at = start + lane
        col = tl.where(at < head, at, at + body)
        return col, col < cols


@triton.jit
def _smoothed(below, mass, count, z, origin, weight_ptr, col, mask):
    """Sums over columns: of weight * (z - origin), of weights, of ones; without columns of minus infinity."""
    there = z > -float("inf")
    if mask is not None:
        there = there & mask
    if weight_ptr is not None:
        w = load_tile(weight_ptr + col, mask)
        mass += tl.sum(tl.where(there, w, 0.0), axis=0)
        below += tl.sum(tl.where(there, w * (z - origin), 0.0), axis=0)
    else:
        below += tl.sum(tl.where(there, z - origin, 0.0), axis=0)
    count += tl.sum(tl.where(there, 1.0, 0.0), axis=0)
    return below, mass, count


@triton.jit
def _target_of(target_ptr, row, start_col, cols, vocab, ignore_index):
    """(the target's column of this shard, or -1; whether it is one of the vocabulary; whether it is none though it is
    not ignored)."""
    y = tl.load(target_ptr + row)
    given = y != ignore_index
    inside = (y >= 0) & (y < vocab)
    here = given & inside & (y >= start_col) & (y < start_col + cols)
    return tl.where(here, y - start_col, -1).to(tl.int32), given & inside, given & (inside == 0)


@triton.jit
def _first_largest(best, largest, z, col):
    """The first columns with the largest z of each lane [LANES], with z [STEPS, LANES] joined to those before."""
    top = tl.max(z, axis=0)
    at = tl.min(tl.where(z == tl.expand_dims(top, 0), col.to(tl.int32), 2147483647), axis=0)
    # The head of a row comes after its body.
    return tl.where(top > largest, at, tl.where(top == largest, tl.minimum(best, at), best))


@kernel
def _cross_entropy_kernel(
    logits_ptr,  # [rows, cols]
    target_ptr,  # [rows]
    weight_ptr,  # [cols], or None
    stats_ptr,  # fp32 [STATS, rows] of a shard of the vocabulary; then the following are None
    loss_ptr,  # fp32 [rows], and so the following
    lse_ptr,
    entropy_ptr,  # or None
    hit_ptr,  # or None: 1 if the target comes first, else 0
    largest_ptr,
    total_ptr,
    share_ptr,  # or None: w_y, 0 without a target
    smooth_ptr,  # [2, rows], or None: a / V * sum(w), and a / V
    rows,
    cols,
    inner,
    outer_stride,
    inner_stride,
    start_col,  # of the whole vocabulary: the first column
    vocab,
    ignore_index,
    softcap,
    scale,
    label_smoothing,
    z_loss,
    KIND: tl.constexpr,
    ENTROPY: tl.constexpr,
    SPREAD: tl.constexpr,  # the sums that label smoothing takes
    ACCURACY: tl.constexpr,
    TOLD: tl.constexpr,  # hit is -1 without a target
    TILE: tl.constexpr,  # logits at a time, in rows of LANES
    LANES: tl.constexpr,  # each of which has statistics of its own
    NESTED: tl.constexpr,  # logits have two row strides
    ALIGN: tl.constexpr,  # cols and all row strides are multiples of it
):
    """One row: statistics of LANES interleaved parts, joined at the end."""
    row = tl.program_id(0).to(tl.int64)
    y, valid, wrong = _target_of(target_ptr, row, start_col, cols, vocab, ignore_index)
    cols = tl.where(valid, cols, 0)  # without a target nothing is read
    offset = row_offset(row, inner, outer_stride, inner_stride, NESTED, ALIGN)
    ELEMENT: tl.constexpr = logits_ptr.dtype.element_ty.primitive_bitwidth // 8
    STEPS: tl.constexpr = TILE // LANES
    head, body = _cut(offset, cols, ALIGN, TILE, ELEMENT)
    picked = tl.load(logits_ptr + offset + y, mask=y >= 0, other=0.0)
    picked = _number(picked, softcap, scale, KIND)
    origin = tl.where(picked > -float("inf"), picked, 0.0)
    if stats_ptr is not None and SPREAD:
        # Some number of the row, where the target is elsewhere.
        first = _number(tl.load(logits_ptr + offset, mask=valid, other=0.0), softcap, scale, KIND)
        origin = tl.where((y < 0) & (first > -float("inf")), first, origin)

    lane = tl.arange(0, LANES)
    piece = (tl.arange(0, STEPS) * LANES)[:, None] + lane[None, :]  # [STEPS, LANES]
    largest = tl.full((LANES,), LOWEST, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    moment = tl.zeros((LANES,), tl.float32)
    below = tl.zeros((LANES,), tl.float32)
    mass = tl.zeros((LANES,), tl.float32)
    count = tl.zeros((LANES,), tl.float32)
    ahead = tl.zeros((LANES,), tl.int32)  # columns before the target: larger, or as large and to the left
    best = tl.full((LANES,), 2147483647, tl.int32)  # the first column with the largest z
    BEST: tl.constexpr = ACCURACY and stats_ptr is not None
    body_ptr = logits_ptr + tl.multiple_of(offset + head, 16 // ELEMENT)
    for start in range(0, body, TILE):
        z = _number(tl.load(body_ptr + start + piece), softcap, scale, KIND)
        col = head + start + piece
        if BEST:
            best = _first_largest(best, largest, z, col)
        if ENTROPY:
            largest, total, moment = add_moments(largest, total, moment, z, 0)
        else:
            largest, total = add_exponentials(largest, total, z, 0)
        if SPREAD:
            below, mass, count = _smoothed(below, mass, count, z, origin, weight_ptr, col, None)
        if ACCURACY and stats_ptr is None:
            ahead += tl.sum(((z > picked) | ((z == picked) & (col < y))).to(tl.int32), axis=0)
    for start in range(0, cols - body, LANES):
        col, exists = _edge(start, lane[None, :], head, body, cols, ALIGN)  # [1, LANES]
        x = tl.load(logits_ptr + offset + col, mask=exists, other=-float("inf"))
        z = tl.where(exists, _number(x, softcap, scale, KIND), -float("inf"))
        if BEST:
            best = _first_largest(best, largest, z, col)
        if ENTROPY:
            largest, total, moment = add_moments(largest, total, moment, z, 0)
        else:
            largest, total = add_exponentials(largest, total, z, 0)
        if SPREAD:
            below, mass, count = _smoothed(below, mass, count, z, origin, weight_ptr, col, exists)
        if ACCURACY and stats_ptr is None:
            ahead += tl.sum((exists & ((z > picked) | ((z == picked) & (col < y)))).to(tl.int32), axis=0)

    row_moment = 0.0
    if ENTROPY:
        row_largest, row_total, row_moment = join_moments(largest, total, moment, 0)
    else:
        row_largest, row_total = join_exponentials(largest, total, 0)
    row_count = tl.sum(count, axis=0)
    row_mass = tl.sum(mass, axis=0) if weight_ptr is not None else row_count
    row_below = tl.sum(below, axis=0)
    if stats_ptr is not None:
        STATS: tl.constexpr = FEW + ENTROPY + 3 * SPREAD + ACCURACY
        out_ptr = stats_ptr + row
        tl.store(out_ptr, row_largest)
        tl.store(out_ptr + rows, row_total)
        tl.store(out_ptr + 2 * rows, picked)
        if ENTROPY:
            tl.store(out_ptr + FEW * rows, row_moment)
        if SPREAD:
            row_below = tl.where(row_count > 0.0, row_below + row_mass * (origin - row_largest), 0.0)
            tl.store(out_ptr + (FEW + ENTROPY) * rows, row_below)
            tl.store(out_ptr + (FEW + ENTROPY + 1) * rows, row_mass)
            tl.store(out_ptr + (FEW + ENTROPY + 2) * rows, row_count)
        if ACCURACY:
            at = tl.min(tl.where(largest == row_largest, best, 2147483647), axis=0)
            at = tl.where(at == 2147483647, -1, at + start_col)
            tl.store(out_ptr + (STATS - 1) * rows, at.to(tl.int32).to(tl.float32, bitcast=True))
    else:
        nothing = tl.where(wrong, float("nan"), 0.0)
        log_total = tl.log(row_total)
        if ENTROPY:
            entropy = log_total - row_moment / row_total
            tl.store(entropy_ptr + row, tl.where(valid, entropy, nothing))
        lse = row_largest + log_total
        share = 1.0
        if weight_ptr is not None:
            share = tl.load(weight_ptr + y, mask=valid, other=0.0).to(tl.float32)
        loss = share * ((row_largest - picked) + log_total)
        if SPREAD:
            part = label_smoothing / row_count
            spread = row_mass * ((row_largest - origin) + log_total) - row_below
            loss = (1.0 - label_smoothing) * loss + part * spread
            tl.store(smooth_ptr + row, tl.where(valid, part * row_mass, 0.0))
            tl.store(smooth_ptr + rows + row, tl.where(valid, part, 0.0))
        loss += z_loss * lse * lse
        tl.store(loss_ptr + row, tl.where(valid, loss, nothing))
        tl.store(lse_ptr + row, tl.where(valid, lse, nothing))
        tl.store(largest_ptr + row, tl.where(valid, row_largest, 0.0))
        tl.store(total_ptr + row, tl.where(valid, row_total, 1.0))
        if share_ptr is not None:
            tl.store(share_ptr + row, tl.where(valid, share, 0.0))
        if ACCURACY:
            leads = tl.where(tl.sum(ahead, axis=0) == 0, 1.0, 0.0)
            tl.store(hit_ptr + row, tl.where(valid, leads, -1.0 if TOLD else 0.0))


@kernel
def _cross_entropy_totals_kernel(
    loss_ptr,  # fp32 [rows]
    share_ptr,  # so too, or None: then sums are asked for, not means
    hit_ptr,  # or None
    total_loss_ptr,  # a scalar
    inverse_ptr,  # a scalar, or None: 1 / sum(share)
    accuracy_ptr,  # a scalar, or None
    rows,
    ZERO_IF_NONE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sums over all rows, TILE at a time, in order."""
    piece = tl.arange(0, TILE)
    losses = tl.zeros((TILE,), tl.float32)
    shares = tl.zeros((TILE,), tl.float32)
    hits = tl.zeros((TILE,), tl.float32)
    told = tl.zeros((TILE,), tl.float32)
    for start in range(0, rows, TILE):
        row = tl.cast(start, tl.int64) + piece
        there = row < rows
        losses += tl.load(loss_ptr + row, mask=there, other=0.0)
        if share_ptr is not None:
            shares += tl.load(share_ptr + row, mask=there, other=0.0)
        if hit_ptr is not None:
            hit = tl.load(hit_ptr + row, mask=there, other=-1.0)
            hits += tl.maximum(hit, 0.0)
            told += tl.where(hit >= 0.0, 1.0, 0.0)
    loss = tl.sum(losses, axis=0)
    hit_sum = tl.sum(hits, axis=0)
    if share_ptr is not None:
        share = tl.sum(shares, axis=0)
        inverse = 1.0 / share
        mean = loss / share
        told_sum = tl.sum(told, axis=0)
        accuracy = hit_sum / told_sum
        if ZERO_IF_NONE:
            inverse = tl.where(share == 0.0, 0.0, inverse)
            mean = tl.where((share == 0.0) & (loss == loss), 0.0, mean)
            accuracy = tl.where(told_sum == 0.0, 0.0, accuracy)
        tl.store(total_loss_ptr, mean)
        tl.store(inverse_ptr, inverse)
        if hit_ptr is not None:
            tl.store(accuracy_ptr, accuracy)
    else:
        tl.store(total_loss_ptr, loss)
        if hit_ptr is not None:
            tl.store(accuracy_ptr, hit_sum)


@triton.jit
def _gradient(
    x, col, largest, factor, bend, at_target, part, y, weight_ptr, mask, softcap, scale,
    KIND: tl.constexpr, SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """dx of a tile of logits: z - largest = t gives exp(t) * (factor - bend * t), less what the target takes."""
    z = x.to(tl.float32)
    slope = scale
    if KIND == CAPPED:
        z, bent = cap(z, softcap)
        slope = scale * bent
    if KIND != PLAIN:
        z = z * scale
    t = z - largest
    e = tl.exp(t)
    if ENTROPY:
        dz = tl.where(e == 0.0, 0.0, e * (factor - bend * t))
    else:
        dz = e * factor
    if SMOOTHED:
        if weight_ptr is not None:
            w = part * load_tile(weight_ptr + col, mask)
            dz -= tl.where(z > -float("inf"), w, 0.0)
        else:
            dz -= tl.where(z > -float("inf"), part, 0.0)
    dz = tl.where(col == y, dz - at_target, dz)
    if KIND != PLAIN:
        dz = dz * slope
    return dz


@kernel
def _cross_entropy_backward_kernel(
    logits_ptr,  # [rows, cols]
    target_ptr,  # [rows]
    weight_ptr,  # [cols], or None
    largest_ptr,  # fp32 [rows]
    total_ptr,  # fp32 [rows]
    inverse_ptr,  # a scalar, or None
    smooth_ptr,  # fp32 [2, rows], or None
    entropy_ptr,  # fp32 [rows], or None
    dloss_ptr,  # [rows], or None
    dlse_ptr,  # [rows], or None
    dentropy_ptr,  # [rows], or None
    dspread_ptr,  # [rows], or None: then it is that of the loss, and so are class weights
    dlogits_ptr,  # [rows, cols]; logits themselves if INPLACE
    rows,
    cols,
    inner,
    outer_stride,
    inner_stride,
    start_col,  # of the whole vocabulary: the first column
    vocab,
    ignore_index,
    dloss_stride,
    dlse_stride,
    dentropy_stride,
    dspread_stride,
    span,  # columns of a program, a multiple of TILE
    softcap,
    scale,
    label_smoothing,
    z_loss,
    KIND: tl.constexpr,
    INPLACE: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,  # elements at a time where rows begin and end
    NESTED: tl.constexpr,
    ALIGN: tl.constexpr,
    ALIKE: tl.constexpr,  # rows of dlogits begin where those of logits do, modulo 16 bytes
):
    """A span of one row's gradient. Rows without a target are zeros, and their logits are not read."""
    row = tl.program_id(0).to(tl.int64)
    y, valid, _ = _target_of(target_ptr, row, start_col, cols, vocab, ignore_index)
    offset = row_offset(row, inner, outer_stride, inner_stride, NESTED, ALIGN)
    ELEMENT: tl.constexpr = logits_ptr.dtype.element_ty.primitive_bitwidth // 8
    DTYPE: tl.constexpr = dlogits_ptr.dtype.element_ty
    head, body = _cut(offset, cols, ALIGN, TILE, ELEMENT)
    if INPLACE:
        out_offset = offset
    else:
        out_offset = tl.multiple_of(row * cols, ALIGN)
    x_ptr = logits_ptr + tl.multiple_of(offset + head, 16 // ELEMENT)
    out_off = out_offset + head
    if ALIKE:
        out_off = tl.multiple_of(out_off, 16 // ELEMENT)
    dx_ptr = dlogits_ptr + out_off

    largest = tl.load(largest_ptr + row)
    total = tl.load(total_ptr + row)
    log_total = tl.log(total)
    factor = 0.0
    at_target = 0.0
    part = 0.0
    bend = 0.0
    if dloss_ptr is not None:
        g = tl.load(dloss_ptr + row * dloss_stride).to(tl.float32)
        if inverse_ptr is not None:
            g *= tl.load(inverse_ptr)
        at_target = g * (1.0 - label_smoothing)
        if weight_ptr is not None and dspread_ptr is None:
            at_target *= tl.load(weight_ptr + y, mask=valid, other=0.0).to(tl.float32)
        factor = at_target + g * 2.0 * z_loss * (largest + log_total)
        if smooth_ptr is not None and dspread_ptr is None:
            factor += g * tl.load(smooth_ptr + row)
            part = g * tl.load(smooth_ptr + rows + row)
    if dspread_ptr is not None:
        g = tl.load(dspread_ptr + row * dspread_stride).to(tl.float32)
        factor += g * tl.load(smooth_ptr + row)
        part = g * tl.load(smooth_ptr + rows + row)
    if dlse_ptr is not None:
        factor += tl.load(dlse_ptr + row * dlse_stride).to(tl.float32)
    if dentropy_ptr is not None:
        bend = tl.load(dentropy_ptr + row * dentropy_stride).to(tl.float32)
        factor -= bend * (tl.load(entropy_ptr + row) - log_total)
        bend = bend / total
    factor = factor / total
    SMOOTHED: tl.constexpr = dspread_ptr is not None or (smooth_ptr is not None and dloss_ptr is not None)
    ENTROPY: tl.constexpr = dentropy_ptr is not None

    first = tl.multiple_of(tl.program_id(1) * span, TILE)
    last = tl.minimum(first + span, body)
    piece = tl.arange(0, TILE)
    read = tl.multiple_of(tl.where(valid, last, first), TILE)
    for start in range(first, read, TILE):
        x = tl.load(x_ptr + start + piece)
        dz = _gradient(
            x, head + start + piece, largest, factor, bend, at_target, part, y, weight_ptr, None, softcap, scale,
            KIND, SMOOTHED, ENTROPY,
        )  # fmt: skip
        tl.store(dx_ptr + start + piece, dz.to(DTYPE))
    for start in range(read, last, TILE):
        tl.store(dx_ptr + start + piece, tl.zeros((TILE,), DTYPE))
    if tl.program_id(1) == tl.num_programs(1) - 1:
        lane = tl.arange(0, LANES)
        for start in range(0, cols - body, LANES):
            col, exists = _edge(start, lane, head, body, cols, ALIGN)
            x = tl.load(logits_ptr + offset + col, mask=exists & valid, other=0.0)
            dz = _gradient(
                x, col, largest, factor, bend, at_target, part, y, weight_ptr, exists, softcap, scale,
                KIND, SMOOTHED, ENTROPY,
            )  # fmt: skip
            dz = tl.where(valid, dz, 0.0)
            tl.store(dlogits_ptr + out_offset + col, dz.to(DTYPE), mask=exists)


# ---- launch ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowConfig:
    """How a row is read: `tile` logits at a time, by `lanes` of them that have statistics of their own."""

    tile: int
    lanes: int
    num_warps: int

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def choose(cols: int, element: int, steps: int, target: str) -> RowConfig:
        """For `steps` reads of 128 bits by each thread before anything is done with them."""
        if target == "cpu":
            # Measured at 128 x 157184 in bf16: from 512 to 2048 at a time and from 64 to 256 lanes make no difference.
            long = cols >= 2048
            return RowConfig(1024 if long else 64, 128 if long else 64, 4)
        wave = 64 if target.startswith("gfx") else 32
        num_warps = (4 if wave == 64 else 8) if cols >= 4096 else 4 if cols >= 1024 else 1
        lanes = num_warps * wave * (16 // element)
        return RowConfig((steps if cols >= 4096 else 1) * lanes, lanes, num_warps)


def _steps(capped: bool, more: bool) -> int:
    """Forward. Compiled for sm_90: 64 registers with four steps; with more to add up they would be above 100, and with
    a softcap some spill from two on. Backward takes half as many: with four it would spill on sm_80."""
    return 1 if capped else 2 if more else 4


def _allocate_cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    softcap: float | None, scale: float, reduction: str, zero_if_none: bool, entropy: bool, accuracy: bool,
    inplace: bool,
) -> list[Tensor]:  # fmt: skip
    dtype, device = compute_dtype(logits), logits.device
    rows = target.numel()
    reduced = target.shape if reduction == "none" else ()
    outputs = [
        torch.empty(reduced, dtype=dtype, device=device),
        torch.empty(target.shape, dtype=dtype, device=device),
    ]
    if entropy:
        outputs.append(torch.empty(target.shape, dtype=dtype, device=device))
    if accuracy:
        outputs.append(torch.empty(reduced, dtype=dtype, device=device))
    outputs += [torch.empty((rows,), dtype=dtype, device=device) for _ in range(2)]
    if reduction == "mean":
        outputs.append(torch.empty((), dtype=dtype, device=device))
    if label_smoothing:
        outputs.append(torch.empty((2, rows), dtype=dtype, device=device))
    return outputs


def _launch_cross_entropy(
    outputs: list[Tensor], logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float | None, scale: float, reduction: str, zero_if_none: bool,
    entropy: bool, accuracy: bool, inplace: bool,
) -> None:  # fmt: skip
    target = target.contiguous()
    rows, cols = target.numel(), logits.shape[-1]
    results = iter(outputs)
    loss, lse = next(results), next(results)
    entropies = next(results) if entropy else None
    accuracies = next(results) if accuracy else None
    largest, total = next(results), next(results)
    inverse = next(results) if reduction == "mean" else None
    smooth = next(results) if label_smoothing else None
    losses, hits, shares = loss, accuracies, None
    if reduction != "none":
        device = logits.device
        losses = torch.empty((rows,), dtype=torch.float32, device=device)
        hits = torch.empty((rows,), dtype=torch.float32, device=device) if accuracy else None
        if inverse is not None:
            shares = torch.empty((rows,), dtype=torch.float32, device=device)
    pointers = (logits, target, weight, None, losses, lse, entropies, hits, largest, total, shares, smooth)
    _launch_rows(
        pointers, target.numel(), 0, cols, ignore_index, softcap, scale, label_smoothing, z_loss, entropy,
        label_smoothing > 0.0, accuracy, reduction != "none",
    )  # fmt: skip
    if reduction != "none":
        launch = Launch.of(_cross_entropy_totals_kernel, num_warps=8, ZERO_IF_NONE=zero_if_none, TILE=1024)
        launch((1, 1, 1), (losses, shares, hits, loss, inverse, accuracies), (rows,))


def _align(element: int, *sizes: int) -> int:
    """A common divisor of sizes that makes 16 bytes, or 1."""
    return align_of(*sizes, least=16 // element if element >= 4 else 8)


def _launch_rows(
    pointers: tuple[Tensor | None, ...], rows: int, start: int, vocab: int, ignore_index: int, softcap: float | None,
    scale: float, label_smoothing: float, z_loss: float, entropy: bool, spread: bool, accuracy: bool, told: bool,
) -> None:  # fmt: skip
    """Read logits, the first of the pointers, once: for results or for statistics."""
    logits, target, weight, *rest = pointers
    assert logits is not None
    logits, inner, outer_stride, inner_stride = row_strides(logits)
    weight = None if weight is None else weight.contiguous()
    cols, element = logits.shape[-1], logits.element_size()
    steps = _steps(softcap is not None, entropy or accuracy or spread)
    config = RowConfig.choose(cols, element, steps, capabilities_of(logits.device).target)
    align = _align(element, cols, outer_stride, inner_stride)
    launch = _forward_launch(
        config, kind_of(softcap, scale), entropy, spread, accuracy, told, inner > 1, align
    )
    launch(
        (rows, 1, 1),
        (logits, target, weight, *rest),
        (rows, cols, inner, outer_stride, inner_stride, start, vocab, ignore_index),
        (softcap or 0.0, scale, label_smoothing, z_loss),
    )


@functools.cache
def _forward_launch(
    config: RowConfig,
    kind: int,
    entropy: bool,
    spread: bool,
    accuracy: bool,
    told: bool,
    nested: bool,
    align: int,
) -> Launch:
    return Launch.of(
        _cross_entropy_kernel, num_warps=config.num_warps, KIND=kind, ENTROPY=entropy, SPREAD=spread,
        ACCURACY=accuracy, TOLD=told, TILE=config.tile, LANES=config.lanes, NESTED=nested, ALIGN=align,
    )  # fmt: skip


def _allocate_cross_entropy_statistics(
    logits: Tensor, target: Tensor, weight: Tensor | None, start: int, vocab: int, ignore_index: int,
    softcap: float | None, scale: float, entropy: bool, spread: bool, accuracy: bool,
) -> list[Tensor]:  # fmt: skip
    shape = count_statistics(entropy, spread, accuracy), target.numel()
    return [torch.empty(shape, dtype=compute_dtype(logits), device=logits.device)]


def _launch_cross_entropy_statistics(
    outputs: list[Tensor], logits: Tensor, target: Tensor, weight: Tensor | None, start: int, vocab: int,
    ignore_index: int, softcap: float | None, scale: float, entropy: bool, spread: bool, accuracy: bool,
) -> None:  # fmt: skip
    pointers = (logits, target.contiguous(), weight, outputs[0], *(None,) * 8)
    _launch_rows(
        pointers, target.numel(), start, vocab, ignore_index, softcap, scale, 0.0, 0.0, entropy, spread, accuracy,
        False,
    )  # fmt: skip


def _allocate_sharded_logprobs(
    stats: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, start: int, vocab: int, ignore_index: int,
    softcap: float | None, scale: float, entropy: bool, spread: bool, accuracy: bool, inplace: bool,
) -> list[Tensor]:  # fmt: skip
    return allocate_joined(target, compute_dtype(logits), entropy, spread, accuracy)


def _launch_sharded_logprobs(
    outputs: list[Tensor], stats: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, start: int,
    vocab: int, ignore_index: int, softcap: float | None, scale: float, entropy: bool, spread: bool, accuracy: bool,
    inplace: bool,
) -> None:  # fmt: skip
    target, stats = target.contiguous(), stats.contiguous()
    launch_join(target, None, stats, outputs, vocab, ignore_index, entropy, spread, accuracy)


def _allocate_cross_entropy_backward(
    logits: Tensor, target: Tensor, weight: Tensor | None, largest: Tensor, total: Tensor, inverse: Tensor | None,
    smooth: Tensor | None, entropy: Tensor | None, dloss: Tensor | None, dlse: Tensor | None,
    dentropy: Tensor | None, dspread: Tensor | None, start: int, vocab: int, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float | None, scale: float,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)]


def _launch_cross_entropy_backward(outputs: list[Tensor], *args: Any) -> None:
    _differentiate(outputs[0], *args)


def _differentiate(
    dlogits: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, largest: Tensor, total: Tensor,
    inverse: Tensor | None, smooth: Tensor | None, entropy: Tensor | None, dloss: Tensor | None, dlse: Tensor | None,
    dentropy: Tensor | None, dspread: Tensor | None, start: int, vocab: int, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float | None, scale: float,
) -> None:  # fmt: skip
    """Write dlogits, which may be logits."""
    capabilities = capabilities_of(logits.device)
    inplace = dlogits is logits
    logits, inner, outer_stride, inner_stride = row_strides(logits)
    if inplace:
        dlogits = logits
    target = target.contiguous()
    weight = None if weight is None else weight.contiguous()
    entropy = None if entropy is None else entropy.contiguous()
    rows, cols = target.numel(), logits.shape[-1]
    upstream: list[Tensor | None] = []
    strides: list[int] = []
    for gradient in (dloss, dlse, dentropy, dspread):
        # One for all rows has the stride 0.
        flat = None if gradient is None else gradient.reshape(-1)
        upstream.append(flat)
        strides.append(0 if flat is None or flat.numel() == 1 else flat.stride(0))
    element = logits.element_size()
    config = RowConfig.choose(cols, element, 1 if softcap is not None else 2, capabilities.target)
    align = _align(element, cols, outer_stride, inner_stride)
    alike = inplace or align > 1 or (inner == 1 and (outer_stride - cols) % (16 // element) == 0)
    tiles = max(1, cols // config.tile)
    spans = 1
    if capabilities.target != "cpu":  # enough programs to even out, of a few tiles each
        spans = max(1, min(tiles // 4, 16 * capabilities.multiprocessors // rows))
    span = -(-tiles // spans) * config.tile
    spans = -(-tiles * config.tile // span)
    launch = _backward_launch(config, kind_of(softcap, scale), inplace, inner > 1, align, alike)
    launch(
        (rows, spans, 1),
        (logits, target, weight, largest, total, inverse, smooth, entropy, *upstream, dlogits),
        (rows, cols, inner, outer_stride, inner_stride, start, vocab, ignore_index, *strides, span),
        (softcap or 0.0, scale, label_smoothing, z_loss),
    )


@functools.cache
def _backward_launch(
    config: RowConfig, kind: int, inplace: bool, nested: bool, align: int, alike: bool
) -> Launch:
    return Launch.of(
        _cross_entropy_backward_kernel, num_warps=config.num_warps, KIND=kind, INPLACE=inplace, TILE=config.tile,
        LANES=config.lanes, NESTED=nested, ALIGN=align, ALIKE=alike,
    )  # fmt: skip


# ---- registration ---------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    logits, target, weight, ignore_index, label_smoothing, z_loss, softcap, scale, reduction = inputs[:9]
    entropy, accuracy = inputs[10], inputs[11]
    results = iter(output[2:])
    entropies = next(results) if entropy else None
    accuracies = next(results) if accuracy else None
    largest, total = next(results), next(results)
    inverse = next(results) if reduction == "mean" else None
    smooth = next(results) if label_smoothing else None
    ctx.save_for_backward(logits, target, weight, largest, total, inverse, smooth, entropies)
    ctx.options = (0, logits.shape[-1], ignore_index, label_smoothing, z_loss, softcap, scale)
    ctx.entropy, ctx.inplace, ctx.inputs = entropy, inputs[12], len(inputs)
    ctx.set_materialize_grads(False)
    others = (accuracies, largest, total, inverse, smooth)
    ctx.mark_non_differentiable(*(t for t in others if t is not None))


def _gradients(ctx: Any, grads: Any) -> Any:
    dloss, dlse = grads[:2]
    dentropy = grads[2] if ctx.entropy else None
    nothing = (None,) * (ctx.inputs - 1)
    if not ctx.needs_input_grad[0] or (dloss is None and dlse is None and dentropy is None):
        return (None, *nothing)
    return (_dlogits(ctx, dloss, dlse, dentropy, None), *nothing)


def _dlogits(ctx: Any, *upstream: Tensor | None) -> Tensor:
    args = (*ctx.saved_tensors, *upstream, *ctx.options)
    if ctx.inplace and not cross_entropy_backward_op.is_traced(*args):
        return _overwrite(*args)
    return cross_entropy_backward_op(*args)[0]


def _setup_sharded(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, logits, target, weight, start, vocab, ignore_index, softcap, scale = inputs[:9]
    entropy, spread, accuracy = inputs[9:12]
    found = Joined.of(output, entropy, spread, accuracy)
    kept = (found.largest, found.total, None, found.shares, found.entropy)
    ctx.save_for_backward(logits, target, weight, *kept)
    ctx.options = (start, vocab, ignore_index, 0.0, 0.0, softcap, scale)
    ctx.entropy, ctx.spread, ctx.inplace, ctx.inputs = entropy, spread, inputs[12], len(inputs)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*found.constants())


def _gradients_sharded(ctx: Any, grads: Any) -> Any:
    results = iter(grads)
    dlogprob, dlse = next(results), next(results)
    dentropy = next(results) if ctx.entropy else None
    dspread = next(results) if ctx.spread else None
    nothing = (None,) * (ctx.inputs - 2)
    if not ctx.needs_input_grad[1] or all(g is None for g in (dlogprob, dlse, dentropy, dspread)):
        return (None, None, *nothing)
    dloss = None if dlogprob is None else -dlogprob
    return (None, _dlogits(ctx, dloss, dlse, dentropy, dspread), *nothing)


def _overwrite(logits: Tensor, *args: Any) -> Tensor:
    """The gradient in the memory of the logits. Autograd is told: whoever saved them for a later backward gets its
    error about an in-place operation, not wrong numbers."""
    logits = logits.detach()
    if cross_entropy_backward_op.serves(logits):
        _differentiate(logits, logits, *args)
    else:
        logits.copy_(cross_entropy_backward_reference(logits, *args)[0])
    torch.autograd.graph.increment_version(logits)
    return logits


cross_entropy_backward_op = define_flat_op(
    "cross_entropy_backward(Tensor logits, Tensor target, Tensor? weight, Tensor largest, Tensor total, "
    "Tensor? inverse, Tensor? smooth, Tensor? entropy, Tensor? dloss, Tensor? dlse, Tensor? dentropy, "
    "Tensor? dspread, int start, int vocab, int ignore_index, float label_smoothing, float z_loss, float? softcap, "
    "float scale) -> Tensor[]",
    allocate=_allocate_cross_entropy_backward,
    launch=_launch_cross_entropy_backward,
    reference=cross_entropy_backward_reference,
    variants=32,
)

cross_entropy_op = define_flat_op(
    "cross_entropy(Tensor logits, Tensor target, Tensor? weight, int ignore_index, float label_smoothing, "
    "float z_loss, float? softcap, float scale, str reduction, bool zero_if_none, bool entropy, bool accuracy, "
    "bool inplace) -> Tensor[]",
    allocate=_allocate_cross_entropy,
    launch=_launch_cross_entropy,
    reference=cross_entropy_reference,
    setup_context=_setup,
    backward=_gradients,
    variants=32,
)

cross_entropy_statistics_op = define_flat_op(
    "cross_entropy_statistics(Tensor logits, Tensor target, Tensor? weight, int start, int vocab, int ignore_index, "
    "float? softcap, float scale, bool entropy, bool spread, bool accuracy) -> Tensor[]",
    allocate=_allocate_cross_entropy_statistics,
    launch=_launch_cross_entropy_statistics,
    reference=cross_entropy_statistics_reference,
    variants=32,
)

sharded_logprobs_op = define_flat_op(
    "sharded_logprobs(Tensor stats, Tensor logits, Tensor target, Tensor? weight, int start, int vocab, "
    "int ignore_index, float? softcap, float scale, bool entropy, bool spread, bool accuracy, bool inplace) "
    "-> Tensor[]",
    allocate=_allocate_sharded_logprobs,
    launch=_launch_sharded_logprobs,
    reference=sharded_logprobs_reference,
    setup_context=_setup_sharded,
    backward=_gradients_sharded,
    variants=32,
)


# ---- public function ------------------------------------------------------------------------------------


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    all_ignored: Literal["zero", "nan"] = "zero",
    return_lse: bool = False,
    return_entropy: bool = False,
    return_accuracy: bool = False,
    inplace: bool = False,
    shard: VocabShard | None = None,
) -> Any:
    """Cross entropy of logits [..., V] in bf16, fp16 or fp32, of any strides, and targets [...] in int32 or int64.

    The logits are read once forward; backward reads them once and writes their gradient. Losses are fp32 whatever the
    logits are. Returns the loss, or a `CrossEntropy` with it if more is asked for.

    - `class_weight` [V]: a weight for each class; a mean divides by the sum of the targets'. It has no gradient.
    - `ignore_index`: a token with this target has no part in anything: its loss, lse, entropy and gradient are 0, and
      its logits are not read. Any other target that is no column makes the token's results NaN and its gradient 0;
      nothing outside of the row is ever read, and nothing waits for the device to find out.
    - `label_smoothing`: the share of the target that goes to all columns alike. Columns of minus infinity pad the
      vocabulary and get none of it, where PyTorch's loss would be infinite.
    - `z_loss`: times the square of lse = log(sum(exp(z))) is added to each token's loss.
    - `softcap`: logits become softcap * tanh(logits / softcap) first; then they are divided by `temperature`.
    - `reduction`: "mean" over the tokens that have a target, "sum", or "none".
    - `all_ignored`: what the mean is if no token has a target: "zero", with gradients of zero, or "nan" as in PyTorch.
    - `return_lse`, `return_entropy`: lse and the entropy of the softmax for each token, both with gradients: any loss
      that is a function of them is autograd's business. `return_accuracy`: whether the target has the largest logit,
      the lowest column among equals; reduced like the loss, but without class weights.
    - `inplace`: backward may overwrite the logits with their gradient. Autograd notices if anyone else still needs
      them; a leaf that requires grad, or a view of one, is refused, as PyTorch refuses to change it. Under
      torch.compile, which plans memory itself, the gradient is a new tensor.
    - `shard`: logits are this rank's columns of a vocabulary that is sharded over ranks; target and class_weight are
      of the whole vocabulary and the same on all ranks, and so are the results, in every bit. One small all-gather.

    Logits that are a DTensor may be sharded along tokens, along the vocabulary, or both; the results are DTensors,
    those of tokens sharded as the tokens are.

    >>> import torch, weft
    >>> logits = torch.randn(6, 1000, dtype=torch.bfloat16, requires_grad=True)
    >>> target = torch.tensor([1, 2, 3, -100, 5, 999])
    >>> weft.cross_entropy(logits, target, label_smoothing=0.1).backward()
    >>> loss, lse, _, accuracy = weft.cross_entropy(
    ...     logits, target, reduction="none", return_lse=True, return_accuracy=True
    ... )
    >>> loss.dtype, loss[3], lse.shape
    (torch.float32, tensor(0., grad_fn=<SelectBackward0>), torch.Size([6]))
    """
    if inplace:
        _check_not_a_leaf(logits)
    if is_distributed(logits, target, class_weight):
        given = {"logits": logits, "class_weight": class_weight}
        return loss_over_mesh(
            cross_entropy, localize(given, target, {"logits": logits.dim() - 1}, "logits"), logits.shape[-1],
            ignore_index, reduction, all_ignored, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap,
            temperature=temperature, return_lse=return_lse, return_entropy=return_entropy,
            return_accuracy=return_accuracy, inplace=inplace,
        )  # fmt: skip
    check_input("logits", logits)
    cols = logits.shape[-1]
    if cols == 0 and shard is None:
        raise ValueError(f"logits must be [..., V] with at least one column; got {tuple(logits.shape)}")
    check_target(target, logits, "logits")
    check_shard(shard, cols)
    vocab = cols if shard is None else shard.size
    check_loss(class_weight, vocab, logits, label_smoothing, z_loss, reduction, all_ignored)
    weight = None if class_weight is None else class_weight.detach()
    softcap, scale = check_softcap(softcap), scale_of(temperature)
    check_ignore_index(ignore_index)
    if inplace:
        _check_inplace(logits)
    if shard is not None:
        found = _sharded(
            shard, logits, target, weight, ignore_index, label_smoothing, z_loss, softcap, scale, reduction,
            all_ignored, return_entropy, return_accuracy, inplace,
        )  # fmt: skip
        return told(found, return_lse, return_entropy, return_accuracy)
    outputs = cross_entropy_op(
        logits, target, weight, ignore_index, float(label_smoothing), float(z_loss), softcap, scale,
        reduction, all_ignored == "zero", return_entropy, return_accuracy, inplace,
    )  # fmt: skip
    found = CrossEntropy(
        outputs[0],
        outputs[1],
        outputs[2] if return_entropy else None,
        outputs[2 + return_entropy] if return_accuracy else None,
    )
    return told(found, return_lse, return_entropy, return_accuracy)


def _sharded(
    shard: VocabShard, logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float | None, scale: float, reduction: str, all_ignored: str,
    entropy: bool, accuracy: bool, inplace: bool,
) -> CrossEntropy:  # fmt: skip
    spread = label_smoothing > 0.0
    start, vocab = shard.start, shard.size
    classes = weight[start : start + logits.shape[-1]] if weight is not None and spread else None
    kind = (start, vocab, ignore_index, softcap, scale, entropy, spread, accuracy)
    with torch.no_grad():
        stats = shard.gather(cross_entropy_statistics_op(logits, target, classes, *kind)[0])
    outputs = sharded_logprobs_op(stats, logits, target, classes, *kind, inplace)
    found = Joined.of(outputs, entropy, spread, accuracy)
    return reduced_loss(
        found, target, weight, vocab, ignore_index, label_smoothing, z_loss, reduction, all_ignored
    )


def _check_not_a_leaf(logits: Tensor) -> None:
    """Backward may write to a result of the graph, but not to what the user holds as its input."""
    if torch.compiler.is_compiling() or not (logits.requires_grad and torch.is_grad_enabled()):
        return
    base = logits._base
    if logits.is_leaf or (base is not None and base.is_leaf and base.requires_grad):
        raise RuntimeError(
            f"inplace=True would overwrite {'a leaf' if logits.is_leaf else 'a view of a leaf'} that requires grad "
            "with its gradient: give it logits that a layer computed, or leaf.clone(), or leave inplace=False"
        )


def _check_inplace(logits: Tensor) -> None:
    """Whether every logit has a place of its own that a kernel can reach."""
    rows, inner, outer_stride, inner_stride = row_strides(logits)
    apart = outer_stride >= (inner - 1) * inner_stride + logits.shape[-1]
    if rows is not logits or not apart or (inner > 1 and inner_stride < logits.shape[-1]):
        raise ValueError(
            "inplace=True needs logits whose rows are contiguous and do not overlap, at one or two strides; "
            f"got the shape {tuple(logits.shape)} with the strides {logits.stride()}"
        )
