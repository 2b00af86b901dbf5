"""Kernels that draw a token from each row of logits; `sample` documents the formulas."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ...language import tl, triton
from ...runtime import kernel
from ...tiles.exponentials import exp_below
from ...tiles.noise import GUMBEL, gumbel, random_tile
from .loads import IntegerArgument, NumberArgument, load_integer, load_number


class Requests(NamedTuple):
    """Parameters of requests."""

    temperature: NumberArgument
    top_k: NumberArgument
    top_p: NumberArgument
    min_p: NumberArgument
    seed: IntegerArgument
    step: IntegerArgument


class Partial(NamedTuple):
    """Results of tiles, [rows, tiles] each."""

    largest: Tensor
    total: Tensor
    score: Tensor  # of the best token
    z: Tensor  # of the best token
    token: Tensor  # int32, -1 for none


@triton.jit
def temperature_of(requests, row):
    """Return (1 / temperature, whether to draw). At temperature 0 logits are not scaled, and the largest is taken."""
    t = load_number(requests.temperature, row)
    return 1.0 / tl.where(t > 0.0, t, 1.0), t > 0.0


@triton.jit
def statistics(z, exists):
    """Return (m, total): the maximum, and the sum of exp(z - m), which is NaN if a z is."""
    m = tl.max(tl.where(exists & (z == z), z, -float("inf")), axis=0)
    return m, tl.sum(tl.where(exists, exp_below(z, m), 0.0), axis=0)


@triton.jit
def joined(m, total):
    """Return (m, total) of a row from those of its tiles."""
    m_i = tl.max(m, axis=0)
    return m_i, tl.sum(tl.where(m == m_i, total, total * tl.exp(m - m_i)), axis=0)


class Drawn(NamedTuple):
    """Token with the best score so far; -1 for none."""

    score: Any
    z: Any
    token: Any


@triton.jit
def best_of(score, z, token, exists):
    """Return the token with the best score, and of equal ones the lowest."""
    best = tl.max(tl.where(exists, score, -float("inf")), axis=0)
    first = tl.min(tl.where(exists & (score == best), token, 2147483647), axis=0)
    z_first = tl.max(tl.where(exists & (token == first), z, -float("inf")), axis=0)
    return Drawn(best, z_first, tl.where(first == 2147483647, -1, first))


@triton.jit
def store_drawn(token_ptr, logprob_ptr, lse_ptr, row, drawn, m, total):
    """Store the results of a row from its token and its statistics."""
    log_l = tl.log(total)
    below = tl.where(drawn.z == m, 0.0, drawn.z - m)
    tl.store(token_ptr + row, drawn.token.to(tl.int64))
    tl.store(logprob_ptr + row, tl.where(drawn.token < 0, float("nan"), below - log_l))
    tl.store(lse_ptr + row, m + log_l)


@kernel
def draw_kernel(
    logits_ptr,  # [rows, cols]
    requests: Requests,
    partial: Partial,
    cols,
    stride,
    tiles,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,  # divides cols and the stride
):
    """Draw a token from a tile of a row."""
    row, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    col = tile * TILE + tl.arange(0, TILE)  # [TILE]
    exists = col < (cols // ALIGN) * ALIGN
    x = tl.load(logits_ptr + tl.multiple_of(row * stride, ALIGN) + col, mask=exists, other=-float("inf"))
    inverse, draws = temperature_of(requests, row)
    z = x.to(tl.float32) * inverse
    m, total = statistics(z, exists)
    score = z
    if draws:
        seed = load_integer(requests.seed, row) + tl.zeros((1,), tl.int64)
        step = load_integer(requests.step, row) + tl.zeros((1,), tl.int64)
        noise = gumbel(random_tile(seed, step, tile * TILE, TILE, GUMBEL))
        score = z + tl.reshape(noise, (TILE,))
    drawn = best_of(score, z, col.to(tl.int32), exists & (z > -float("inf")))
    at = tl.program_id(0).to(tl.int64)
    tl.store(partial.largest + at, m)
    tl.store(partial.total + at, total)
    tl.store(partial.score + at, drawn.score)
    tl.store(partial.z + at, drawn.z)
    tl.store(partial.token + at, drawn.token)


@kernel
def join_draws_kernel(
    partial: Partial,
    token_ptr,  # int64 [rows]
    logprob_ptr,  # fp32 [rows]
    lse_ptr,  # fp32 [rows]
    tiles,
    TILES: tl.constexpr,
):
    """Choose the best token of a row's tiles."""
    row, tile = tl.program_id(0).to(tl.int64), tl.arange(0, TILES)
    at, exists = row * tiles + tile, tile < tiles
    m, total = joined(
        tl.load(partial.largest + at, mask=exists, other=-float("inf")),
        tl.load(partial.total + at, mask=exists, other=0.0),
    )
    score = tl.load(partial.score + at, mask=exists, other=-float("inf"))
    z = tl.load(partial.z + at, mask=exists, other=-float("inf"))
    token = tl.load(partial.token + at, mask=exists, other=-1)
    drawn = best_of(score, z, token, token >= 0)
    store_drawn(token_ptr, logprob_ptr, lse_ptr, row, drawn, m, total)
