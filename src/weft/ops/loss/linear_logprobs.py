"""The loss head: log-probabilities of tokens from hidden states, without their logits ever being in memory.

    x = hidden @ weight^T + bias               [T, V], fp32 sums, a tile at a time
    z = scale * cap(x)                         cap(x) = softcap * tanh(x / softcap), or x; scale = 1 / temperature
    m = max(z)    d = sum(exp(z - m))          lse = m + log(d)      p = exp(z - m) / d
    logprob = (z_y - m) - log(d)
    entropy = log(d) - sum(exp(z - m) * (z - m)) / d
    spread = sum_c(w_c * (lse - z_c)) / V      what label smoothing adds, with class weights w (1 without)

V counts the columns that are not minus infinity (a bias of minus infinity pads a vocabulary). What is kept of a token
is m and d. With a, h, e, s the gradients of a token's logprob, lse, entropy H and spread:

    dz_j = p_j * (h - a + s * sum(w) / V - e * (log(p_j) + H)) + a * [j = y] - s * w_j / V
    dx_j = dz_j * scale * (1 - (cap(x_j) / softcap)^2)
    dhidden = dx @ weight        dweight = dx^T @ hidden        dbias = sum_t dx

Forward, a program multiplies a tile of tokens with the tiles of one split of the vocabulary and joins each product's
statistics to those before it; a second kernel joins the splits in order (`vocabulary`). Of a rank's shard of the
vocabulary the statistics are an op of their own, and those of all ranks are joined by the same kernel. Backward goes
through the vocabulary in blocks: it computes a block's logits again, writes their gradient dx [T, block] once, rounded
to the dtype of the operands, and multiplies that: into the block's rows of dweight, complete and rounded once, and into
dhidden, which is added up in fp32 over the blocks and rounded once. So no memory is taken that grows with V, but for
dweight itself. dbias adds up the rounded dx. Sums have one order: the same bits every run.

dx is rounded like that of any chain that stores logits in the operands' dtype: to 2^-9 of itself in bf16. In fp16,
where small numbers would be lost, all of dx is multiplied by a power of two that brings the largest gradient of a token
to about 1, and the products are divided by it.

Tokens without a target are skipped: the tokens with one are numbered first (`order`), and kernels take tokens by that
number. Nothing of the others is read or multiplied; their results and their gradient are zeros.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...language import tl, triton
from ...runtime import Capabilities, Launch, capabilities_of, define_flat_op, is_distributed, kernel
from ...tiles.softmax import LOWEST, add_exponentials, add_moments, cap
from ...tiles.split import dot_fp32
from ..common.checks import FLOATS, check_input, check_tensor, check_tensors, real
from ..common.rows import align_of, compute_dtype, count_rows, flat_rows
from .losses import check_ignore_index, check_shard, check_softcap, check_target, scale_of
from .mesh import Local, localize, logprobs_over_mesh
from .vocabulary import (
    CAPPED,
    FEW,
    JOIN_ROWS,
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


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, scale: float
) -> tuple[Tensor, Tensor | float]:
    """(z, dz/dx) [T, V]."""
    dtype = compute_dtype(hidden)
    x = hidden.reshape(count_rows(hidden), hidden.shape[-1]).to(dtype) @ weight.to(dtype).t()
    if bias is not None:
        x = x + bias.to(dtype)
    return capped_reference(x, softcap, scale)


def linear_statistics_reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, classes: Tensor | None, start: int,
    vocab: int, ignore_index: int, softcap: float | None, scale: float, entropy: bool, spread: bool, accuracy: bool,
) -> list[Tensor]:  # fmt: skip
    """Statistics [STATS, T] over the part of a vocabulary that begins at `start`: weight [part, H], bias [part],
    classes [part]; target [...] is of all `vocab` columns."""
    y, valid, _ = split_targets(target, vocab, ignore_index)
    hidden = torch.where(valid.view(target.shape)[..., None], hidden, 0.0)
    z, _ = _logits(hidden, weight, bias, softcap, scale)
    return [statistics_reference(z, y, valid, classes, start, entropy, spread, accuracy)]


def linear_logprobs_reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, classes: Tensor | None, stats: Tensor | None,
    start: int, vocab: int, ignore_index: int, softcap: float | None, scale: float, entropy: bool, spread: bool,
    accuracy: bool, skip_below: float | None,
) -> list[Tensor]:  # fmt: skip
    """The definition. hidden [..., H], weight [V, H], bias [V], target [...], classes [V]. With the statistics of all
    ranks, stats [ranks, STATS, T], they are joined, and the others are those of a shard that begins at `start`."""
    if stats is None:
        shard = linear_statistics_reference(
            hidden, weight, bias, target, classes, start, vocab, ignore_index, softcap, scale, entropy, spread,
            accuracy,
        )  # fmt: skip
        stats = shard[0][None]
    outputs = joined_reference(stats, target, vocab, ignore_index, entropy, spread, accuracy)
    _, valid, _ = split_targets(target, vocab, ignore_index)
    order = torch.argsort((~valid).int(), stable=True).int()
    return [*outputs, torch.cat([order, valid.sum(dtype=torch.int32)[None]])]


def linear_logprobs_backward_reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, classes: Tensor | None, largest: Tensor,
    total: Tensor, entropy: Tensor | None, parts: Tensor | None, order: Tensor, dlogprob: Tensor | None,
    dlse: Tensor | None, dentropy: Tensor | None, dspread: Tensor | None, start: int, vocab: int, ignore_index: int,
    softcap: float | None, scale: float, skip_below: float | None, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Of dhidden, dweight and dbias those that are needed. The reference skips no tile."""
    y, valid, _ = split_targets(target, vocab, ignore_index)
    hidden = torch.where(valid.view(target.shape)[..., None], hidden, 0.0)
    z, slope = _logits(hidden, weight, bias, softcap, scale)
    dtype = z.dtype
    t = z - largest.to(dtype)[:, None]
    log_total = torch.log(total.to(dtype))
    p = torch.exp(t) / total.to(dtype)[:, None]

    def column(gradient: Tensor) -> Tensor:
        return gradient.reshape(-1, 1).to(dtype)

    factor = torch.zeros_like(z[:, :1])
    dz = torch.zeros_like(z)
    if dlogprob is not None:
        factor = factor - column(dlogprob)
        at_target = torch.arange(start, start + len(weight), device=z.device) == y[:, None]
        dz = dz + torch.where(at_target, column(dlogprob), 0.0)
    if dlse is not None:
        factor = factor + column(dlse)
    if dspread is not None:
        assert parts is not None
        factor = factor + column(dspread) * column(parts[0])
        w = torch.ones_like(z) if classes is None else classes.to(dtype)
        dz = dz - torch.where(z > -torch.inf, column(dspread) * column(parts[1]) * w, 0.0)
    if dentropy is not None:
        assert entropy is not None
        factor = factor - column(dentropy) * (t - log_total[:, None] + column(entropy))
    dz = dz + torch.where(p > 0, p * factor, p)
    dx = torch.where(valid[:, None], dz * slope, 0.0)
    gradients = []
    if needs[0]:
        gradients.append((dx @ weight.to(dtype)).to(hidden.dtype).view(hidden.shape))
    if needs[1]:
        gradients.append((dx.t() @ hidden.reshape(len(dx), weight.shape[1]).to(dtype)).to(weight.dtype))
    if needs[2]:
        assert bias is not None
        gradients.append(dx.sum(0).to(bias.dtype))
    return gradients


# ---- kernels --------------------------------------------------------------------------------------------


@triton.jit
def _dot(a, b, total, SPLIT: tl.constexpr):
    """total + a @ b: on matrix units as they are if both are of one 16-bit type, else with the accuracy of fp32."""
    if a.dtype == b.dtype and a.dtype.primitive_bitwidth == 16:
        return tl.dot(a, b, total)
    else:
        return total + dot_fp32(a, b, SPLIT)


@kernel
def _linear_order_kernel(
    target_ptr,  # [rows]
    order_ptr,  # int32 [rows + 1]
    rows,
    vocab,
    ignore_index,
    TILE: tl.constexpr,
):
    """Tokens with a target first, then the others, each in their order; and how many have one."""
    piece = tl.arange(0, TILE)
    count = tl.zeros((), tl.int32)
    for start in range(0, rows, TILE):
        row = tl.cast(start, tl.int64) + piece
        y = tl.load(target_ptr + row, mask=row < rows, other=-1)
        valid = (row < rows) & (y >= 0) & (y < vocab) & (y != ignore_index)
        count += tl.sum(valid.to(tl.int32), axis=0)
    tl.store(order_ptr + rows, count)
    found = tl.zeros((), tl.int32)
    for start in range(0, rows, TILE):
        row = tl.cast(start, tl.int64) + piece
        y = tl.load(target_ptr + row, mask=row < rows, other=-1)
        valid = (row < rows) & (y >= 0) & (y < vocab) & (y != ignore_index)
        upto = found + tl.cumsum(valid.to(tl.int32), axis=0)  # of this token and those before it
        place = tl.where(valid, upto - 1, count + row.to(tl.int32) - upto)
        tl.store(order_ptr + place, row.to(tl.int32), mask=row < rows)
        found += tl.sum(valid.to(tl.int32), axis=0)


@triton.jit
def _product(
    hidden_ptr, weight_ptr, hidden_off, live, first, vocab, cols, weight_stride,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, VOCAB: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """hidden @ weight^T of a tile, [ROWS, VOCAB]: the tokens at hidden_off, the vocabulary from `first` on."""
    col_vocab = first + tl.arange(0, VOCAB)  # [VOCAB]
    cols = (cols // ALIGN) * ALIGN
    weight_off = tl.multiple_of(col_vocab.to(tl.int64) * weight_stride, ALIGN)
    if TMA:
        descriptor = tl.make_tensor_descriptor(weight_ptr, [vocab, cols], [weight_stride, 1], [VOCAB, TILE])
    x = tl.zeros((ROWS, VOCAB), tl.float32)
    for start in range(0, cols, TILE):
        col = start + tl.arange(0, TILE)  # [TILE]
        exists = live[:, None] & (col >= 0)[None, :]
        if COLS_MASKED:
            exists = live[:, None] & (col < cols)[None, :]
        hidden = tl.load(hidden_ptr + hidden_off[:, None] + col[None, :], mask=exists, other=0.0)
        if TMA:
            # [VOCAB, TILE], zeros past the ends. A descriptor takes coordinates of 32 bits.
            weight = descriptor.load([tl.cast(first, tl.int32), tl.cast(start, tl.int32)])
        else:
            exists = (col_vocab < vocab)[:, None] & (col >= 0)[None, :]
            if COLS_MASKED:
                exists = exists & (col < cols)[None, :]
            weight = tl.load(weight_ptr + weight_off[:, None] + col[None, :], mask=exists, other=0.0)
        x = _dot(hidden, tl.trans(weight), x, SPLIT)
    return x


@triton.jit
def _capped(x, bias_ptr, col, vocab, softcap, scale, KIND: tl.constexpr):
    """(z, its slope) of products [ROWS, VOCAB]; minus infinity past the vocabulary."""
    if bias_ptr is not None:
        x += tl.load(bias_ptr + col, mask=col < vocab, other=0.0).to(tl.float32)[None, :]
    slope = scale
    z = x
    if KIND == CAPPED:
        z, bent = cap(x, softcap)
        slope = scale * bent
    if KIND != PLAIN:
        z = z * scale
    return tl.where((col < vocab)[None, :], z, -float("inf")), slope


@triton.jit
def _column(y, start_col, vocab):
    """The row of weight that a target is, or -1."""
    inside = (y >= start_col) & (y < start_col + vocab)
    return tl.where(inside, y - start_col, -1).to(tl.int32)


@kernel
def _linear_logprobs_kernel(
    hidden_ptr,  # [rows, cols]
    weight_ptr,  # [vocab, cols]
    bias_ptr,  # [vocab], or None
    target_ptr,  # [rows]
    order_ptr,  # int32 [rows + 1]
    classes_ptr,  # [vocab], or None
    stats_ptr,  # fp32 [splits, STATS, rows]: by a token's number in `order`
    rows,
    cols,
    vocab,
    hidden_stride,
    weight_stride,
    start_col,  # of the whole vocabulary: the first row of weight
    span,  # of the vocabulary, to a split: a multiple of VOCAB
    softcap,
    scale,
    KIND: tl.constexpr,
    ENTROPY: tl.constexpr,
    SPREAD: tl.constexpr,
    ACCURACY: tl.constexpr,
    SPLIT: tl.constexpr,  # multiply bf16 parts of fp32 operands
    ROWS: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,  # of the hidden dimension at a time
    ALIGN: tl.constexpr,  # cols, hidden_stride and weight_stride are multiples of it
    COLS_MASKED: tl.constexpr,  # cols is not a multiple of TILE
    TMA: tl.constexpr,
):
    """Statistics of ROWS tokens over one split of the vocabulary."""
    STATS: tl.constexpr = FEW + ENTROPY + 3 * SPREAD + ACCURACY
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    split = tl.program_id(1).to(tl.int64)
    count = tl.load(order_ptr + rows)
    live = number < count
    row = tl.load(order_ptr + number, mask=live, other=0).to(tl.int64)
    y = _column(tl.load(target_ptr + row, mask=live, other=-1), start_col, vocab)
    hidden_off = tl.multiple_of(row * hidden_stride, ALIGN)
    span = (span // VOCAB) * VOCAB
    first = (split * span).to(tl.int32)
    last = tl.minimum(first + span, vocab)
    last = tl.where(tl.program_id(0) * ROWS < count, last, first)  # nothing to do without a token
    largest = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    picked = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS,), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    there = tl.zeros((ROWS,), tl.float32)
    best = tl.full((ROWS,), -1, tl.int32)  # the first column with the largest z
    for start in range(first, last, VOCAB):
        x = _product(
            hidden_ptr, weight_ptr, hidden_off, live, start, vocab, cols, weight_stride,
            SPLIT, ROWS, VOCAB, TILE, ALIGN, COLS_MASKED, TMA,
        )  # fmt: skip
        col = start + tl.arange(0, VOCAB)  # [VOCAB]
        z, _ = _capped(x, bias_ptr, col, vocab, softcap, scale, KIND)  # [ROWS, VOCAB]
        picked += tl.sum(tl.where(col[None, :] == y[:, None], z, 0.0), axis=1)
        if ACCURACY:
            top = tl.max(z, axis=1)
            at = tl.min(tl.where(z == top[:, None], col[None, :].to(tl.int32), 2147483647), axis=1)
            best = tl.where(top > largest, at, best)
        if SPREAD:
            real = z > -float("inf")
            if classes_ptr is not None:
                w = tl.load(classes_ptr + col, mask=col < vocab, other=0.0).to(tl.float32)[None, :]
                weighted += tl.sum(tl.where(real, w * z, 0.0), axis=1)
                mass += tl.sum(tl.where(real, w, 0.0), axis=1)
            else:
                weighted += tl.sum(tl.where(real, z, 0.0), axis=1)
            there += tl.sum(tl.where(real, 1.0, 0.0), axis=1)
        if ENTROPY:
            largest, total, moment = add_moments(largest, total, moment, z, 1)
        else:
            largest, total = add_exponentials(largest, total, z, 1)
    out_ptr = stats_ptr + split * STATS * rows + number
    tl.store(out_ptr, largest, mask=live)
    tl.store(out_ptr + rows, total, mask=live)
    tl.store(out_ptr + 2 * rows, picked, mask=live)
    if ENTROPY:
        tl.store(out_ptr + FEW * rows, moment, mask=live)
    if SPREAD:
        if classes_ptr is None:
            mass = there
        spread_ptr = out_ptr + (FEW + ENTROPY) * rows
        below = tl.where(there > 0.0, weighted - mass * largest, 0.0)
        tl.store(spread_ptr, below, mask=live)
        tl.store(spread_ptr + rows, mass, mask=live)
        tl.store(spread_ptr + 2 * rows, there, mask=live)
    if ACCURACY:
        best = tl.where(best < 0, best, best + start_col)
        tl.store(out_ptr + (STATS - 1) * rows, best.to(tl.int32).to(tl.float32, bitcast=True), mask=live)


@kernel
def _linear_factors_kernel(
    target_ptr,  # [rows]
    order_ptr,  # int32 [rows + 1]
    largest_ptr,  # fp32 [rows]
    total_ptr,
    entropy_ptr,  # or None
    parts_ptr,  # [2, rows], or None
    dlogprob_ptr,  # [rows], or None, and so the following
    dlse_ptr,
    dentropy_ptr,
    dspread_ptr,
    factors_ptr,  # fp32 [5, rows], by a token's number in `order`
    labels_ptr,  # int32 [rows], so too
    rows,
    vocab,
    start_col,
    dlogprob_stride,
    dlse_stride,
    dentropy_stride,
    dspread_stride,
    ROWS: tl.constexpr,
):
    """What dz of a token is made of: with t = z - largest, it is exp(t) * (factor - bend * t) + at_target * [j = y]
    - part."""
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    live = number < tl.load(order_ptr + rows)
    row = tl.load(order_ptr + number, mask=live, other=0).to(tl.int64)
    largest = tl.load(largest_ptr + row, mask=live, other=0.0)
    total = tl.load(total_ptr + row, mask=live, other=1.0)
    factor = tl.zeros((ROWS,), tl.float32)
    bend = tl.zeros((ROWS,), tl.float32)
    at_target = tl.zeros((ROWS,), tl.float32)
    part = tl.zeros((ROWS,), tl.float32)
    if dlogprob_ptr is not None:
        at_target = tl.load(dlogprob_ptr + row * dlogprob_stride, mask=live, other=0.0).to(tl.float32)
        factor -= at_target
    if dlse_ptr is not None:
        factor += tl.load(dlse_ptr + row * dlse_stride, mask=live, other=0.0).to(tl.float32)
    if dspread_ptr is not None:
        g = tl.load(dspread_ptr + row * dspread_stride, mask=live, other=0.0).to(tl.float32)
        factor += g * tl.load(parts_ptr + row, mask=live, other=0.0)
        part = g * tl.load(parts_ptr + rows + row, mask=live, other=0.0)
    if dentropy_ptr is not None:
        bend = tl.load(dentropy_ptr + row * dentropy_stride, mask=live, other=0.0).to(tl.float32)
        factor -= bend * (tl.load(entropy_ptr + row, mask=live, other=0.0) - tl.log(total))
    exists = number < rows
    tl.store(factors_ptr + number, largest, mask=exists)
    tl.store(factors_ptr + rows + number, factor / total, mask=exists)
    tl.store(factors_ptr + 2 * rows + number, bend / total, mask=exists)
    tl.store(factors_ptr + 3 * rows + number, at_target, mask=exists)
    tl.store(factors_ptr + 4 * rows + number, part, mask=exists)
    y = tl.load(target_ptr + row, mask=live, other=-1)
    tl.store(labels_ptr + number, _column(y, start_col, vocab), mask=exists)


@kernel
def _linear_dlogits_kernel(
    hidden_ptr,  # [rows, cols]
    weight_ptr,  # [vocab, cols]
    bias_ptr,  # [vocab], or None
    order_ptr,  # int32 [rows + 1]
    classes_ptr,  # [vocab], or None
    total_ptr,  # fp32 [rows], or None: what a probability is compared with if tiles are skipped
    factors_ptr,  # fp32 [5, rows]
    labels_ptr,  # int32 [rows]
    kept_ptr,  # int8 [tiles of tokens, tiles of a block], or None
    dlogits_ptr,  # [rows up to a whole tile, block]
    rows,
    cols,
    vocab,
    hidden_stride,
    weight_stride,
    begin,  # where the block of the vocabulary begins
    block,  # how long it is, a multiple of VOCAB
    softcap,
    scale,
    skip_below,
    KIND: tl.constexpr,
    SPREAD: tl.constexpr,
    ENTROPY: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
    TMA: tl.constexpr,
):
    """A tile of the gradient of a block's logits. Tokens past the last one of the tile get zeros."""
    tiles = tl.cdiv(rows, ROWS)
    # Programs of the same vocabulary follow each other: they read the same weight.
    tile = tl.program_id(0) % tiles
    at = (tl.program_id(0) // tiles) * VOCAB  # in the block
    count = tl.load(order_ptr + rows)
    if tile * ROWS < count:
        number = tile * ROWS + tl.arange(0, ROWS)  # [ROWS]
        live = number < count
        row = tl.load(order_ptr + number, mask=live, other=0).to(tl.int64)
        hidden_off = tl.multiple_of(row * hidden_stride, ALIGN)
        x = _product(
            hidden_ptr, weight_ptr, hidden_off, live, begin + at, vocab, cols, weight_stride,
            SPLIT, ROWS, VOCAB, TILE, ALIGN, COLS_MASKED, TMA,
        )  # fmt: skip
        col = begin + at + tl.arange(0, VOCAB)  # [VOCAB]
        z, slope = _capped(x, bias_ptr, col, vocab, softcap, scale, KIND)
        largest = tl.load(factors_ptr + number, mask=live, other=0.0)
        factor = tl.load(factors_ptr + rows + number, mask=live, other=0.0)
        at_target = tl.load(factors_ptr + 3 * rows + number, mask=live, other=0.0)
        y = tl.load(labels_ptr + number, mask=live, other=-1)
        t = z - largest[:, None]
        e = tl.exp(t)
        if ENTROPY:
            bend = tl.load(factors_ptr + 2 * rows + number, mask=live, other=0.0)
            dz = tl.where(e == 0.0, 0.0, e * (factor[:, None] - bend[:, None] * t))
        else:
            dz = e * factor[:, None]
        if SPREAD:
            part = tl.load(factors_ptr + 4 * rows + number, mask=live, other=0.0)[:, None]
            if classes_ptr is not None:
                part = part * tl.load(classes_ptr + col, mask=col < vocab, other=0.0).to(tl.float32)[None, :]
            dz -= tl.where(z > -float("inf"), part, 0.0)
        here = col[None, :] == y[:, None]
        dz = tl.where(here, dz + at_target[:, None], dz)
        if KIND != PLAIN:
            dz = dz * slope
        dz = tl.where(live[:, None] & (col < vocab)[None, :], dz, 0.0)
        if kept_ptr is not None:
            total = tl.load(total_ptr + row, mask=live, other=1.0)
            # NaN is not below anything.
            counts = live[:, None] & ((e < skip_below * total[:, None]) == 0)
            keep = tl.max(tl.max((counts | (here & live[:, None])).to(tl.int32), axis=1), axis=0)
            tl.store(kept_ptr + tile * (block // VOCAB) + at // VOCAB, keep.to(tl.int8))
        out_off = tl.multiple_of(number.to(tl.int64) * ((block // VOCAB) * VOCAB), VOCAB)
        out = (at + tl.arange(0, VOCAB))[None, :]
        tl.store(dlogits_ptr + out_off[:, None] + out, dz.to(dlogits_ptr.dtype.element_ty))


@kernel
def _linear_dweight_kernel(
    hidden_ptr,  # [rows, cols]
    dlogits_ptr,  # [rows up to a whole tile, block]
    order_ptr,  # int32 [rows + 1]
    unit_ptr,  # fp32, a scalar, or None: what results are multiplied by
    kept_ptr,  # int8 [tiles of tokens, tiles of a block], or None
    dweight_ptr,  # [vocab, cols], or None
    dbias_ptr,  # [vocab], or None
    rows,
    cols,
    vocab,
    hidden_stride,
    begin,
    block,
    SPLIT: tl.constexpr,
    VOCAB: tl.constexpr,
    COLS: tl.constexpr,
    TILE: tl.constexpr,  # tokens at a time
    KEPT_ROWS: tl.constexpr,  # the tiles of kept_ptr
    KEPT_VOCAB: tl.constexpr,
    ALIGN: tl.constexpr,  # cols and hidden_stride are multiples of it
    COLS_MASKED: tl.constexpr,  # cols is not a multiple of COLS
    TMA: tl.constexpr,
):
    """A tile of dweight, and of dbias, over all tokens."""
    cols = (cols // ALIGN) * ALIGN
    block = (block // VOCAB) * VOCAB
    tiles = tl.cdiv(cols, COLS) if dweight_ptr is not None else 1
    # Programs of the same vocabulary follow each other: they read the same dlogits.
    at = (tl.program_id(0) // tiles) * VOCAB
    piece = at + tl.arange(0, VOCAB)  # [VOCAB] in the block
    col = tl.multiple_of((tl.program_id(0) % tiles) * COLS, COLS) + tl.arange(0, COLS)  # [COLS]
    count = tl.load(order_ptr + rows)
    if TMA:
        descriptor = tl.make_tensor_descriptor(dlogits_ptr, [rows + TILE, block], [block, 1], [TILE, VOCAB])
    total = tl.zeros((VOCAB, COLS), tl.float32)
    total_bias = tl.zeros((VOCAB,), tl.float32)
    for start in range(0, count, TILE):
        number = start + tl.arange(0, TILE)  # [TILE]
        keep = True
        if kept_ptr is not None:
            place = (start // KEPT_ROWS) * (block // KEPT_VOCAB) + at // KEPT_VOCAB
            keep = tl.load(kept_ptr + place) > 0
        if keep:
            if TMA:
                dlogits = descriptor.load([tl.cast(start, tl.int32), tl.cast(at, tl.int32)])  # [TILE, VOCAB]
            else:
                in_off = tl.multiple_of(number.to(tl.int64) * block, VOCAB)
                dlogits = tl.load(dlogits_ptr + in_off[:, None] + piece[None, :])
            if dbias_ptr is not None:
                total_bias += tl.sum(dlogits.to(tl.float32), axis=0)
            if dweight_ptr is not None:
                live = number < count
                row = tl.load(order_ptr + number, mask=live, other=0).to(tl.int64)
                hidden_off = tl.multiple_of(row * hidden_stride, ALIGN)
                exists = live[:, None] & (col >= 0)[None, :]
                if COLS_MASKED:
                    exists = live[:, None] & (col < cols)[None, :]
                hidden = tl.load(hidden_ptr + hidden_off[:, None] + col[None, :], mask=exists, other=0.0)
                total = _dot(tl.trans(dlogits), hidden, total, SPLIT)
    if unit_ptr is not None:
        unit = tl.load(unit_ptr)
        total *= unit
        total_bias *= unit
    token = begin + piece
    if dweight_ptr is not None:
        exists = (token < vocab)[:, None] & (col >= 0)[None, :]
        if COLS_MASKED:
            exists = exists & (col < cols)[None, :]
        out_off = tl.multiple_of(token.to(tl.int64) * cols, ALIGN)
        out = total.to(dweight_ptr.dtype.element_ty)
        tl.store(dweight_ptr + out_off[:, None] + col[None, :], out, mask=exists)
    if dbias_ptr is not None:
        there = (token < vocab) & (tl.program_id(0) % tiles == 0)
        tl.store(dbias_ptr + token, total_bias.to(dbias_ptr.dtype.element_ty), mask=there)


@kernel
def _linear_dhidden_kernel(
    dlogits_ptr,  # [rows up to a whole tile, block]
    weight_ptr,  # [vocab, cols]
    order_ptr,  # int32 [rows + 1]
    unit_ptr,  # fp32, a scalar, or None
    kept_ptr,  # int8 [tiles of tokens, tiles of a block], or None
    sums_ptr,  # fp32 [rows, cols] by number, or None: of the blocks before this one
    dhidden_ptr,  # [rows, cols], or None if this is not the last block
    rows,
    cols,
    vocab,
    weight_stride,
    begin,
    block,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TILE: tl.constexpr,  # of the vocabulary at a time
    KEPT_ROWS: tl.constexpr,
    KEPT_VOCAB: tl.constexpr,
    FIRST: tl.constexpr,  # nothing was added up before
    ALIGN: tl.constexpr,  # cols and weight_stride are multiples of it
    COLS_MASKED: tl.constexpr,
    TMA: tl.constexpr,
):
    """A tile of dhidden, of one block of the vocabulary, joined to what the others gave."""
    cols = (cols // ALIGN) * ALIGN
    block = (block // TILE) * TILE
    tiles = tl.cdiv(cols, COLS)
    # Programs of the same tokens follow each other: they read the same dlogits.
    tile = tl.program_id(0) // tiles
    number = tile * ROWS + tl.arange(0, ROWS)  # [ROWS]
    left = tl.multiple_of((tl.program_id(0) % tiles) * COLS, COLS)
    col = left + tl.arange(0, COLS)  # [COLS]
    count = tl.load(order_ptr + rows)
    length = tl.where(tile * ROWS < count, tl.minimum(block, vocab - begin), 0)
    in_off = tl.multiple_of(number.to(tl.int64) * block, TILE)
    if TMA:
        gradients = tl.make_tensor_descriptor(dlogits_ptr, [rows + ROWS, block], [block, 1], [ROWS, TILE])
        weights = tl.make_tensor_descriptor(weight_ptr, [vocab, cols], [weight_stride, 1], [TILE, COLS])
    exists = (number < rows)[:, None] & (col >= 0)[None, :]
    if COLS_MASKED:
        exists = exists & (col < cols)[None, :]
    sums_off = tl.multiple_of(number.to(tl.int64) * cols, ALIGN)
    if FIRST:
        total = tl.zeros((ROWS, COLS), tl.float32)
    else:
        total = tl.load(sums_ptr + sums_off[:, None] + col[None, :], mask=exists, other=0.0)
    for start in range(0, length, TILE):
        keep = True
        if kept_ptr is not None:
            place = (tile * ROWS // KEPT_ROWS) * (block // KEPT_VOCAB) + start // KEPT_VOCAB
            keep = tl.load(kept_ptr + place) > 0
        if keep:
            token = begin + start + tl.arange(0, TILE)  # [TILE]
            if TMA:
                at = tl.cast(start, tl.int32)
                dlogits = gradients.load([tl.cast(tile * ROWS, tl.int32), at])  # [ROWS, TILE]
                weight = weights.load(
                    [tl.cast(begin, tl.int32) + at, tl.cast(left, tl.int32)]
                )  # [TILE, COLS]
            else:
                dlogits = tl.load(dlogits_ptr + in_off[:, None] + (start + tl.arange(0, TILE))[None, :])
                there = (token < vocab)[:, None] & (col >= 0)[None, :]
                if COLS_MASKED:
                    there = there & (col < cols)[None, :]
                weight_off = tl.multiple_of(token.to(tl.int64) * weight_stride, ALIGN)
                weight = tl.load(weight_ptr + weight_off[:, None] + col[None, :], mask=there, other=0.0)
            total = _dot(dlogits, weight, total, SPLIT)
    total = tl.where((number < count)[:, None], total, 0.0)
    if dhidden_ptr is not None:
        if unit_ptr is not None:
            total *= tl.load(unit_ptr)
        row = tl.load(order_ptr + number, mask=number < rows, other=0).to(tl.int64)
        out_off = tl.multiple_of(row * cols, ALIGN)
        out = total.to(dhidden_ptr.dtype.element_ty)
        tl.store(dhidden_ptr + out_off[:, None] + col[None, :], out, mask=exists)
    else:
        tl.store(sums_ptr + sums_off[:, None] + col[None, :], total, mask=exists)


# ---- launch ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadConfig:
    """How a product is cut: tiles of `m` x `n`, summed `k` at a time."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int
    split: bool = True  # multiply bf16 parts of fp32 operands

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def choose(
        role: Literal["logits", "dlogits", "dweight", "dhidden"], whole: bool, rich: bool, target: str
    ) -> HeadConfig:
        """For a role and a target. `whole`: both operands are of one 16-bit type, with rows of multiples of 8. `rich`:
        more is done with logits than a plain softmax does, which takes registers."""
        if target == "cpu":
            return HeadConfig(128, 128, 64, 4, 1, split=False)
        if not whole:  # up to six products of parts, or an address for every number
            return HeadConfig(64, 64, 32, 4, 2)
        # Compiled, in registers of a thread: on sm_90 128 x 256 logits take 255, with entropy and smoothing they would
        # spill 1680 bytes, and so would their gradient; on sm_100 sums of dhidden that are read and written spill 456.
        if target in ("sm_90", "sm_100", "sm_103"):
            wide = (
                role == "dweight"
                or (role == "logits" and not rich)
                or (role == "dhidden" and target == "sm_90")
            )
            if role == "logits" and rich and target != "sm_90":
                return HeadConfig(
                    128, 64, 64, 4, 3
                )  # 192 registers with entropy; 8 warps would spill 32 bytes
            return HeadConfig(128, 256 if wide else 128, 64, 8, 3)
        if target.startswith("gfx"):
            return HeadConfig(128, 128, 32, 8, 2)
        return HeadConfig(64 if role == "logits" and rich else 128, 128, 32, 8, 3)


ORDER_TILE = 1024  # tokens that are numbered at a time
# Bytes of the gradient of one block's logits: on a GPU so many that what is added up of dhidden between blocks does not
# count.
CPU_BUDGET, GPU_BUDGET = 64 << 20, 256 << 20


def _operands(hidden: Tensor, weight: Tensor) -> tuple[torch.dtype, bool]:
    """(what dlogits are stored in, whether both operands are of one 16-bit type)."""
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    return dtype, hidden.dtype == weight.dtype and dtype != torch.float32


def _rows_of_weight(weight: Tensor) -> Tensor:
    """With neighbours along H next to each other; what lies otherwise is copied."""
    return weight if weight.shape[1] <= 1 or weight.stride(1) == 1 else weight.contiguous()


def _span(vocab: int, tiles: int, tile: int, target: Capabilities) -> tuple[int, int]:
    """(splits of the vocabulary, columns of each): enough programs to even out."""
    pieces = max(1, -(-vocab // tile))
    splits = min(pieces, max(1, -(-4 * target.multiprocessors // tiles)))
    span = -(-pieces // splits)
    return -(-pieces // span), span * tile


def _align(hidden: Tensor, *sizes: int) -> int:
    return align_of(*sizes, least=4 if hidden.dtype is torch.float32 else 8)


def _allocate_linear_statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, classes: Tensor | None, start: int,
    vocab: int, ignore_index: int, softcap: float | None, scale: float, entropy: bool, spread: bool, accuracy: bool,
) -> list[Tensor]:  # fmt: skip
    shape = count_statistics(entropy, spread, accuracy), target.numel()
    return [torch.empty(shape, dtype=compute_dtype(hidden), device=hidden.device)]


def _launch_linear_statistics(
    outputs: list[Tensor], hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *args: Any
) -> None:
    order = torch.empty((target.numel() + 1,), dtype=torch.int32, device=hidden.device)
    _launch_products(outputs, order, hidden, weight, bias, target, *args)


def _launch_order(order: Tensor, target: Tensor, vocab: int, ignore_index: int) -> None:
    launch = Launch.of(_linear_order_kernel, num_warps=8, TILE=ORDER_TILE)
    launch((1, 1, 1), (target, order), (target.numel(), vocab, ignore_index))


def _launch_products(
    outputs: list[Tensor], order: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    classes: Tensor | None, start: int, vocab: int, ignore_index: int, softcap: float | None, scale: float,
    entropy: bool, spread: bool, accuracy: bool,
) -> None:  # fmt: skip
    """Number the tokens, take the statistics of splits of the vocabulary, and join them into outputs: statistics, or
    results."""
    device = capabilities_of(hidden.device)
    _, whole = _operands(hidden, weight)
    rich = entropy or spread or accuracy or softcap is not None
    hidden, weight, target = flat_rows(hidden), _rows_of_weight(weight), target.contiguous()
    strides = hidden.stride(0), weight.stride(0)
    align = _align(hidden, hidden.shape[1], *strides)
    config = HeadConfig.choose("logits", whole and align > 1, rich, device.target)
    bias = None if bias is None else bias.contiguous()
    classes = None if classes is None else classes.contiguous()
    (rows, cols), columns = hidden.shape, weight.shape[0]
    _launch_order(order, target, vocab, ignore_index)
    tiles = -(-rows // config.m)
    splits, span = _span(columns, tiles, config.n, device)
    stats = torch.empty(
        (splits, count_statistics(entropy, spread, accuracy), rows), dtype=torch.float32, device=hidden.device
    )
    launch = Launch.of(
        _linear_logprobs_kernel, num_warps=config.num_warps, num_stages=config.num_stages,
        KIND=kind_of(softcap, scale), ENTROPY=entropy, SPREAD=spread, ACCURACY=accuracy, SPLIT=config.split,
        ROWS=config.m, VOCAB=config.n, TILE=config.k, ALIGN=align, COLS_MASKED=cols % config.k != 0,
        TMA=_descriptors(device, whole, align, weight),
    )  # fmt: skip
    launch(
        (tiles, splits, 1),
        (hidden, weight, bias, target, order, classes, stats),
        (rows, cols, columns, *strides, start, span),
        (softcap or 0.0, scale),
    )
    launch_join(target, order, stats, outputs, vocab, ignore_index, entropy, spread, accuracy)


def _allocate_linear_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, classes: Tensor | None, stats: Tensor | None,
    start: int, vocab: int, ignore_index: int, softcap: float | None, scale: float, entropy: bool, spread: bool,
    accuracy: bool, skip_below: float | None,
) -> list[Tensor]:  # fmt: skip
    outputs = allocate_joined(target, compute_dtype(hidden), entropy, spread, accuracy)
    return [*outputs, torch.empty((target.numel() + 1,), dtype=torch.int32, device=hidden.device)]


def _launch_linear_logprobs(
    outputs: list[Tensor], hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    classes: Tensor | None, stats: Tensor | None, start: int, vocab: int, ignore_index: int, softcap: float | None,
    scale: float, entropy: bool, spread: bool, accuracy: bool, skip_below: float | None,
) -> None:  # fmt: skip
    *results, order = outputs
    if stats is not None:
        target = target.contiguous()
        _launch_order(order, target, vocab, ignore_index)
        launch_join(target, None, stats.contiguous(), results, vocab, ignore_index, entropy, spread, accuracy)
    else:
        _launch_products(
            results, order, hidden, weight, bias, target, classes, start, vocab, ignore_index, softcap, scale,
            entropy, spread, accuracy,
        )  # fmt: skip


def _descriptors(device: Capabilities, whole: bool, align: int, *tensors: Tensor) -> bool:
    """Whether tiles can be bulk copies: where there are such, of rows that are multiples of 16 bytes."""
    return device.descriptors and whole and align >= 8 and all(t.data_ptr() % 16 == 0 for t in tensors)


def _allocate_linear_logprobs_backward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, classes: Tensor | None, largest: Tensor,
    total: Tensor, entropy: Tensor | None, parts: Tensor | None, order: Tensor, dlogprob: Tensor | None,
    dlse: Tensor | None, dentropy: Tensor | None, dspread: Tensor | None, start: int, vocab: int, ignore_index: int,
    softcap: float | None, scale: float, skip_below: float | None, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    return [
        torch.empty(t.shape, dtype=t.dtype, device=hidden.device)
        for t, need in zip((hidden, weight, bias), needs, strict=True)
        if need and t is not None
    ]


def _launch_linear_logprobs_backward(
    outputs: list[Tensor], hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    classes: Tensor | None, largest: Tensor, total: Tensor, entropy: Tensor | None, parts: Tensor | None,
    order: Tensor, dlogprob: Tensor | None, dlse: Tensor | None, dentropy: Tensor | None, dspread: Tensor | None,
    start: int, vocab: int, ignore_index: int, softcap: float | None, scale: float, skip_below: float | None,
    needs: list[bool],
) -> None:  # fmt: skip
    device = capabilities_of(hidden.device)
    dtype, whole = _operands(hidden, weight)
    results = iter(outputs)
    dhidden, dweight, dbias = (next(results) if need else None for need in needs)
    hidden, weight, target = flat_rows(hidden), _rows_of_weight(weight), target.contiguous()
    bias = None if bias is None else bias.contiguous()
    classes = None if classes is None else classes.contiguous()
    (rows, cols), columns = hidden.shape, weight.shape[0]
    if columns == 0:
        if dhidden is not None:
            dhidden.zero_()
        return

    def empty(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=hidden.device)

    factors, labels = empty((5, rows)), empty((rows,), torch.int32)
    upstream = [None if g is None else g.reshape(-1) for g in (dlogprob, dlse, dentropy, dspread)]
    launch = Launch.of(_linear_factors_kernel, num_warps=4, ROWS=JOIN_ROWS)
    launch(
        (-(-rows // JOIN_ROWS), 1, 1),
        (target, order, largest, total, None if dentropy is None else entropy, None if dspread is None else parts,
         *upstream, factors, labels),
        (rows, columns, start, *(0 if g is None else g.stride(0) for g in upstream)),
    )  # fmt: skip
    unit = None
    if dtype is torch.float16:
        # A power of two that makes the largest factor 1, divided by the logits' scale, which multiplies them too.
        size = (factors[1] * total.new_ones(()) if rows == 0 else factors[1:]).abs().amax().clamp(1e-30, 1e30)
        power = torch.exp2(-torch.ceil(torch.log2(size * scale)))
        factors[1:] *= power
        unit = 1.0 / power

    strides = hidden.stride(0), weight.stride(0)
    rich = dentropy is not None or dspread is not None or softcap is not None
    align = _align(hidden, cols, *strides)
    first = HeadConfig.choose("dlogits", whole and align > 1, rich, device.target)
    tiles = -(-rows // first.m)
    budget = CPU_BUDGET if device.target == "cpu" else GPU_BUDGET
    pieces = -(-columns // first.n)
    held = max(1, budget // (tiles * first.m * dtype.itemsize * first.n))
    held = -(-pieces // -(-pieces // min(held, pieces)))  # as many to each block
    block = held * first.n
    kept = None if skip_below is None else empty((tiles, held), torch.int8)
    dlogits = empty((tiles * first.m, block), dtype)
    sums = None
    if dhidden is not None and block < columns:
        sums = empty((rows, cols))
    kinds = {"ALIGN": align, "SPLIT": first.split}
    launch_dlogits = Launch.of(
        _linear_dlogits_kernel, num_warps=first.num_warps, num_stages=first.num_stages, KIND=kind_of(softcap, scale),
        SPREAD=dspread is not None, ENTROPY=dentropy is not None, ROWS=first.m, VOCAB=first.n, TILE=first.k,
        COLS_MASKED=cols % first.k != 0, TMA=_descriptors(device, whole, align, weight), **kinds,
    )  # fmt: skip
    second = HeadConfig.choose("dweight", whole and align > 1, rich, device.target)
    launch_dweight = Launch.of(
        _linear_dweight_kernel, num_warps=second.num_warps, num_stages=second.num_stages, VOCAB=second.m,
        COLS=second.n, TILE=second.k, KEPT_ROWS=first.m, KEPT_VOCAB=first.n, COLS_MASKED=cols % second.n != 0,
        TMA=_descriptors(device, whole, align, dlogits), **kinds,
    )  # fmt: skip
    third = HeadConfig.choose("dhidden", whole and align > 1, rich, device.target)
    for begin in range(0, columns, block):
        last = begin + block >= columns
        here = min(held, -(-(columns - begin) // first.n))  # tiles of the vocabulary
        launch_dlogits(
            (tiles * here, 1, 1),
            (hidden, weight, bias, order, None if dspread is None else classes, None if kept is None else total,
             factors, labels, kept, dlogits),
            (rows, cols, columns, *strides, begin, block),
            (softcap or 0.0, scale, skip_below or 0.0),
        )  # fmt: skip
        if dweight is not None or dbias is not None:
            across = 1 if dweight is None else -(-cols // second.n)
            launch_dweight(
                (-(-here * first.n // second.m) * across, 1, 1),
                (hidden, dlogits, order, unit, kept, dweight, dbias),
                (rows, cols, columns, strides[0], begin, block),
            )
        if dhidden is not None:
            launch_dhidden = Launch.of(
                _linear_dhidden_kernel, num_warps=third.num_warps, num_stages=third.num_stages, ROWS=third.m,
                COLS=third.n, TILE=third.k, KEPT_ROWS=first.m, KEPT_VOCAB=first.n, FIRST=begin == 0,
                COLS_MASKED=cols % third.n != 0, TMA=_descriptors(device, whole, align, weight, dlogits), **kinds,
            )  # fmt: skip
            launch_dhidden(
                (-(-rows // third.m) * -(-cols // third.n), 1, 1),
                (dlogits, weight, order, unit if last else None, kept, sums, dhidden if last else None),
                (rows, cols, columns, strides[1], begin, block),
            )


# ---- registration ---------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    hidden, weight, bias, target, classes, _, start, vocab, ignore_index, softcap, scale = inputs[:11]
    entropy, spread, accuracy, skip = inputs[11:]
    found, order = Joined.of(output, entropy, spread, accuracy), output[-1]
    kept = (found.largest, found.total, found.entropy, found.shares, order)
    ctx.save_for_backward(hidden, weight, bias, target, classes, *kept)
    ctx.options = (start, vocab, ignore_index, softcap, scale, skip)
    ctx.entropy, ctx.spread, ctx.inputs = entropy, spread, len(inputs)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(order, *found.constants())


def _gradients(ctx: Any, grads: Any) -> Any:
    results = iter(grads)
    dlogprob, dlse = next(results), next(results)
    dentropy = next(results) if ctx.entropy else None
    dspread = next(results) if ctx.spread else None
    needs = list(ctx.needs_input_grad[:3])
    nothing = (None,) * (ctx.inputs - 3)
    upstream = (dlogprob, dlse, dentropy, dspread)
    if not any(needs) or all(g is None for g in upstream):
        return (None, None, None, *nothing)
    rest = iter(linear_logprobs_backward_op(*ctx.saved_tensors, *upstream, *ctx.options, needs))
    return (*(next(rest) if need else None for need in needs), *nothing)


linear_logprobs_backward_op = define_flat_op(
    "linear_logprobs_backward(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? classes, "
    "Tensor largest, Tensor total, Tensor? entropy, Tensor? parts, Tensor order, Tensor? dlogprob, Tensor? dlse, "
    "Tensor? dentropy, Tensor? dspread, int start, int vocab, int ignore_index, float? softcap, float scale, "
    "float? skip_below, bool[] needs) -> Tensor[]",
    allocate=_allocate_linear_logprobs_backward,
    launch=_launch_linear_logprobs_backward,
    reference=linear_logprobs_backward_reference,
    variants=96,
)

linear_statistics_op = define_flat_op(
    "linear_statistics(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? classes, int start, "
    "int vocab, int ignore_index, float? softcap, float scale, bool entropy, bool spread, bool accuracy) -> Tensor[]",
    allocate=_allocate_linear_statistics,
    launch=_launch_linear_statistics,
    reference=linear_statistics_reference,
    variants=32,
)

linear_logprobs_op = define_flat_op(
    "linear_logprobs(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? classes, Tensor? stats, "
    "int start, int vocab, int ignore_index, float? softcap, float scale, bool entropy, bool spread, bool accuracy, "
    "float? skip_below) -> Tensor[]",
    allocate=_allocate_linear_logprobs,
    launch=_launch_linear_logprobs,
    reference=linear_logprobs_reference,
    setup_context=_setup,
    backward=_gradients,
    variants=32,
)


# ---- public functions -----------------------------------------------------------------------------------


class LogProbs(NamedTuple):
    """What `linear_logprobs` returns if more than the log-probabilities are asked for; the rest is None."""

    logprobs: Tensor
    lse: Tensor | None = None
    entropy: Tensor | None = None


def token_results(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, classes: Tensor | None,
    shard: VocabShard | None, *, ignore_index: int, softcap: float | None, temperature: float, entropy: bool,
    spread: bool, accuracy: bool, skip_below: float | None,
) -> Joined:  # fmt: skip
    """All that the loss head knows of a token, of operands that were checked. classes are of the whole vocabulary."""
    options = (ignore_index, check_softcap(softcap), scale_of(temperature), entropy, spread, accuracy)
    start, vocab = (0, weight.shape[0]) if shard is None else (shard.start, shard.size)
    stats = None
    if shard is not None:
        hidden = shard.sum_gradient(hidden)
        if classes is not None:
            classes = classes[start : start + weight.shape[0]]
        with torch.no_grad():
            operands = (hidden, weight, bias, target, classes)
            stats = shard.gather(linear_statistics_op(*operands, start, vocab, *options)[0])
    outputs = linear_logprobs_op(
        hidden, weight, bias, target, classes, stats, start, vocab, *options, skip_below
    )
    return Joined.of(outputs, entropy, spread, accuracy)


def localize_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, **more: Tensor | None
) -> Local:
    """This rank's part of distributed operands."""
    tensors = {"weight": weight, "hidden": hidden, "bias": bias, **more}
    return localize(tensors, target, {"weight": 0, "bias": 0}, "hidden")


def check_operands(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, shard: VocabShard | None,
    skip_below: float | None, ignore_index: int,
) -> None:  # fmt: skip
    check_tensors("hidden weight target", hidden, weight, target)
    check_input("hidden", hidden)
    check_tensor("weight", weight, FLOATS, hidden.device)
    if (
        weight.dim() != 2
        or weight.shape[1] != hidden.shape[-1]
        or (weight.numel() == 0 and shard is None)
        or (target.shape != hidden.shape[:-1] and target.shape == weight.shape[:-1])
    ):
        raise _wrong_head(hidden, weight, target)
    check_shard(shard, weight.shape[0])
    if bias is not None:
        check_tensor("bias", bias, FLOATS, hidden.device, weight.shape[:1])
    check_target(target, hidden, "hidden")
    if skip_below is not None and not 0.0 <= real("skip_below", skip_below) < 1.0:
        raise ValueError(f"skip_below must be a probability below 1; got {skip_below}")
    check_ignore_index(ignore_index)


def _wrong_head(hidden: Tensor, weight: Tensor, target: Tensor) -> ValueError:
    """What to say of hidden states and a weight that do not go together."""
    note = ""
    if hidden.dim() == 2 and weight.shape[-1:] == hidden.shape[-1:] and target.shape == weight.shape[:-1]:
        note = ". The hidden states come first, then the weight"
    elif weight.dim() == 2 and weight.shape[0] == hidden.shape[-1]:
        note = ". Give weight.t(), if its columns are the vocabulary"
    return ValueError(
        "hidden must be [..., H] and weight [V, H] with one H and at least one row, and target one class to each "
        f"row of hidden; got {tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(target.shape)}{note}"
    )


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    return_lse: bool = False,
    return_entropy: bool = False,
    skip_below: float | None = None,
    shard: VocabShard | None = None,
) -> Any:
    """log(softmax(hidden @ weight^T + bias)) of the target of each token, fp32 [...], without logits in memory.

    hidden: [..., H], weight: [V, H] and bias: [V] in bf16, fp16 or fp32, of any strides (a weight whose rows are not
    contiguous is copied). An FP8 `QTensor` as weight is dequantised first, as a whole, and its gradient passes straight
    through to what it was quantised from. target: [...] in int32 or int64. The gradient of each result of each token is
    its own: any loss that is a function of log-probabilities, entropies and lse is autograd's business.

    - `softcap`: logits become softcap * tanh(logits / softcap); then they are divided by `temperature`.
    - `ignore_index`: a token with this target is skipped: its results and its gradient are 0, its hidden state is not
      read. Any other target that is no row of weight makes the token's results NaN and its gradient 0.
    - `return_lse`, `return_entropy`: return these too, as `LogProbs(logprobs, lse, entropy)`: the log of the sum of the
      softmax's exponentials, and its entropy.
    - `skip_below`: backward takes tiles of 64 or 128 tokens x as many columns for zeros if none of their probabilities
      reaches this threshold and none is a target's, and spares their share of two products in three. A token's
      gradient loses less than V * skip_below of its size, and mostly far less. Off by default.
    - `shard`: weight and bias are this rank's shard of the vocabulary; hidden and target are the same on all ranks, and
      so are the results, in every bit. The gradient of hidden is the sum over the ranks.

    Operands may be DTensors: weight and bias replicated or Shard(0), hidden replicated or sharded along tokens. The
    results are DTensors, sharded as the tokens are.

    Extra memory of forward and backward does not grow with V, except for the gradient of weight.

    >>> import torch, weft
    >>> hidden = torch.randn(6, 64, dtype=torch.bfloat16, requires_grad=True)
    >>> weight = torch.randn(1000, 64, dtype=torch.bfloat16, requires_grad=True)
    >>> target = torch.tensor([1, 2, 3, -100, 5, 999])
    >>> logprobs, _, entropy = weft.linear_logprobs(hidden, weight, target, temperature=0.7, return_entropy=True)
    >>> (-logprobs.sum() - 0.01 * entropy.sum()).backward()
    >>> logprobs.dtype, logprobs[3].item(), weight.grad.dtype
    (torch.float32, 0.0, torch.bfloat16)
    """
    if is_distributed(hidden, weight, bias, target):
        local = localize_head(hidden, weight, bias, target)
        return logprobs_over_mesh(
            linear_logprobs, local, softcap=softcap, temperature=temperature, ignore_index=ignore_index,
            return_lse=return_lse, return_entropy=return_entropy, skip_below=skip_below,
        )  # fmt: skip
    check_operands(hidden, weight, bias, target, shard, skip_below, ignore_index)
    results = token_results(
        hidden, weight, bias, target, None, shard, ignore_index=ignore_index, softcap=softcap,
        temperature=temperature, entropy=return_entropy, spread=False, accuracy=False, skip_below=skip_below,
    )  # fmt: skip
    if not (return_lse or return_entropy):
        return results.logprobs
    return LogProbs(results.logprobs, results.lse if return_lse else None, results.entropy)
