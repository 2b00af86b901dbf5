"""Draws from tiles of logits: the column with the best score, or lists of the largest logits, from which another kernel
draws."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ....language import tl, triton
from ....tiles.noise import GUMBEL, gumbel, random_bits, random_tile
from ....tiles.scores import number_of


@triton.jit
def first_largest(score, col):
    """Return (the largest score, its column) of each row [ROWS]; of equal ones, the first column. A NaN is no score."""
    largest = tl.max(score, axis=1)
    column = tl.min(tl.where(score == largest[:, None], col[None, :].to(tl.int32), 2147483647), axis=1)
    return largest, column


# Columns at a time. With the noise of a whole tile, the products of sm_90 would spill 16 KB.
SLICE = tl.constexpr(8)


@triton.jit
def _slices(z):
    """Return logits [ROWS, SLICES, SLICE]."""
    return tl.reshape(z, (z.shape[0], z.shape[1] // SLICE, SLICE))


@triton.jit
def _slice(slices, i):
    """Return columns [ROWS, SLICE] of slices."""
    at = tl.arange(0, slices.shape[1])[None, :, None] == i
    return tl.sum(tl.where(at, slices, 0.0), axis=1)


# ---- the best column --------------------------------------------------------------------------------------


class Noise(NamedTuple):
    """Arguments of the noise of the tokens of a tile."""

    seed: Any  # int64 [ROWS], or None
    step: Any
    ALIGNED: Any  # tokens begin at multiples of 4


class Best(NamedTuple):
    """Best column of each row so far, [ROWS] each."""

    score: Any
    column: Any  # -1 for none
    z: Any


@triton.jit
def best_column(best, z, first, start_col, noise):
    """Return the best of `best` and of the logits z [ROWS, VOCAB] of the columns from `first` on. The score of a logit
    is the logit, with noise if there is a seed."""
    slices = _slices(z)
    for i in range(z.shape[1] // SLICE):
        part = _slice(slices, i)
        begin = first + i * SLICE
        col = begin + tl.arange(0, SLICE)  # [SLICE]
        score = part
        if noise.seed is not None:
            if noise.ALIGNED:
                bits = random_tile(noise.seed, noise.step, start_col + begin, SLICE, GUMBEL)
            else:
                bits = random_bits(
                    noise.seed[:, None], noise.step[:, None], (start_col + col)[None, :], GUMBEL
                )
            score = part + gumbel(bits)
        top, argmax = first_largest(score, col)
        at_best = tl.sum(tl.where(col[None, :] == argmax[:, None], part, 0.0), axis=1)
        is_better = top > best.score
        best = Best(
            tl.where(is_better, top, best.score),
            tl.where(is_better, argmax, best.column),
            tl.where(is_better, at_best, best.z),
        )
    return best


# ---- the largest logits -----------------------------------------------------------------------------------


class Listed(NamedTuple):
    """Largest logits of each tile by ascending token, or None for both."""

    value: Tensor | None  # fp32 [rows, tiles, LISTED]: logits, minus infinity after the last
    token: Tensor | None  # int32 [rows, tiles, LISTED]: -1 after the last


@triton.jit
def _reaching(slices, least):
    """Return how many logits of each row are above a number [ROWS], and how many reach it."""
    above = tl.sum((slices > least[:, None, None]).to(tl.int32), axis=1)
    reach = tl.sum((slices >= least[:, None, None]).to(tl.int32), axis=1)
    return tl.sum(above, axis=1), tl.sum(reach, axis=1)


@triton.jit
def list_largest(listed, z, live, row, tiles, first, start_col, LISTED: tl.constexpr):
    """Write the LISTED largest of the logits z [ROWS, VOCAB] of the columns from `first` on. Of equal ones the first
    are listed; NaN and minus infinity never are."""
    slices = _slices(z)
    t = tl.zeros((z.shape[0],), tl.uint32)  # [ROWS]: the rank that LISTED logits reach, 0 if fewer are finite
    bit = tl.full((), 1 << 31, tl.uint32)
    for _ in range(32):
        higher = t | bit
        _, reach = _reaching(slices, number_of((higher ^ 0x80000000).to(tl.int32, bitcast=True)))
        t = tl.where(reach >= LISTED, higher, t)
        bit = bit >> 1
    least = tl.where(t == 0, -float("inf"), number_of((t ^ 0x80000000).to(tl.int32, bitcast=True)))
    above, _ = _reaching(slices, least)
    off = (row.to(tl.int64) * tiles + first // z.shape[1]) * LISTED  # [ROWS]
    count, equals = tl.zeros((z.shape[0],), tl.int32), tl.zeros((z.shape[0],), tl.int32)
    for i in range(z.shape[1] // SLICE):
        part = _slice(slices, i)  # [ROWS, SLICE]
        token = (start_col + first + i * SLICE + tl.arange(0, SLICE)).to(tl.int32)[None, :]
        equal = ((part == least[:, None]) & (part > -float("inf"))).to(tl.int32)
        order = above[:, None] + equals[:, None] + tl.cumsum(equal, axis=1)
        taken = ((part > least[:, None]) | ((equal == 1) & (order <= LISTED))).to(tl.int32)
        place = count[:, None] + tl.cumsum(taken, axis=1) - 1
        fits = (taken == 1) & live[:, None] & (place >= 0) & (place < LISTED)
        tl.store(listed.value + off[:, None] + place, part, mask=fits)
        tl.store(listed.token + off[:, None] + place, token + place * 0, mask=fits)
        equals += tl.sum(equal, axis=1)
        count += tl.sum(taken, axis=1)
    for i in range(tl.cdiv(LISTED, SLICE)):
        slot = i * SLICE + tl.arange(0, SLICE)[None, :] + 0 * count[:, None]  # [ROWS, SLICE]
        empty = live[:, None] & (slot >= count[:, None]) & (slot < LISTED)
        tl.store(listed.value + off[:, None] + slot, slot.to(tl.float32) * 0.0 - float("inf"), mask=empty)
        tl.store(listed.token + off[:, None] + slot, slot * 0 - 1, mask=empty)
