"""Kernels that draw a token from each row of logits; `sample` documents the formulas."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ...language import tl, triton
from ...runtime import kernel
from ...tiles.noise import GUMBEL, gumbel, random_bits, random_tile
from ...tiles.scores import number_of
from ...tiles.select import places, rank_bits, threshold
from .loads import IntegerArgument, NumberArgument, load_integer, load_number

UNIT = tl.constexpr(2.0**40)  # of probability mass: the largest probability of a row is 2^40 units
DIGIT = tl.constexpr(4)  # bits of a threshold that a pass over a row finds


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
    score: Tensor  # of the best token; or the bits of the rank above which every token is a candidate
    z: Tensor | None  # of the best token
    token: Tensor | None  # int32, -1 for none


@triton.jit
def _temperature(requests, row):
    """Return (1 / temperature, whether to draw). At temperature 0 logits are not scaled, and the largest is taken."""
    t = load_number(requests.temperature, row)
    return 1.0 / tl.where(t > 0.0, t, 1.0), t > 0.0


@triton.jit
def _exponentials(z, m):
    """Return exp(z - m) for the maximum m of all z that are numbers: 1 at the maximum even if it is infinite."""
    return tl.where(z == m, 1.0, tl.exp(z - m))


@triton.jit
def _statistics(z, exists):
    """Return (m, total): the maximum, and the sum of exp(z - m), which is NaN if a z is."""
    m = tl.max(tl.where(exists & (z == z), z, -float("inf")), axis=0)
    return m, tl.sum(tl.where(exists, _exponentials(z, m), 0.0), axis=0)


@triton.jit
def _joined(m, total):
    """Return (m, total) of a row from those of its tiles."""
    m_i = tl.max(m, axis=0)
    return m_i, tl.sum(tl.where(m == m_i, total, total * tl.exp(m - m_i)), axis=0)


@triton.jit
def _best(score, z, token, exists):
    """Return (score, z, token) of the best score, with the lowest token among equal ones; token -1 if none exists."""
    best = tl.max(tl.where(exists, score, -float("inf")), axis=0)
    first = tl.min(tl.where(exists & (score == best), token, 2147483647), axis=0)
    z_first = tl.max(tl.where(exists & (token == first), z, -float("inf")), axis=0)
    return best, z_first, tl.where(first == 2147483647, -1, first)


@triton.jit
def _store_drawn(token_ptr, logprob_ptr, lse_ptr, row, token, z, m, total):
    log_l = tl.log(total)
    below = tl.where(z == m, 0.0, z - m)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logprob_ptr + row, tl.where(token < 0, float("nan"), below - log_l))
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
    inverse, draws = _temperature(requests, row)
    z = x.to(tl.float32) * inverse
    m, total = _statistics(z, exists)
    score = z
    if draws:
        seed = load_integer(requests.seed, row) + tl.zeros((1,), tl.int64)
        step = load_integer(requests.step, row) + tl.zeros((1,), tl.int64)
        noise = gumbel(random_tile(seed, step, tile * TILE, TILE, GUMBEL))
        score = z + tl.reshape(noise, (TILE,))
    best, z_best, token = _best(score, z, col.to(tl.int32), exists & (z > -float("inf")))
    at = tl.program_id(0).to(tl.int64)
    tl.store(partial.largest + at, m)
    tl.store(partial.total + at, total)
    tl.store(partial.score + at, best)
    tl.store(partial.z + at, z_best)
    tl.store(partial.token + at, token)


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
    m, total = _joined(
        tl.load(partial.largest + at, mask=exists, other=-float("inf")),
        tl.load(partial.total + at, mask=exists, other=0.0),
    )
    score = tl.load(partial.score + at, mask=exists, other=-float("inf"))
    z = tl.load(partial.z + at, mask=exists, other=-float("inf"))
    token = tl.load(partial.token + at, mask=exists, other=-1)
    _, z, token = _best(score, z, token, token >= 0)
    _store_drawn(token_ptr, logprob_ptr, lse_ptr, row, token, z, m, total)


# ---- draws from a part of the tokens ----------------------------------------------------------------------


@kernel
def candidates_kernel(
    logits_ptr,  # [rows, cols]
    requests: Requests,
    partial: Partial,
    token_ptr,  # int32 [rows, tiles, KEPT]
    value_ptr,  # fp32 [rows, tiles, KEPT]: their logits
    cols,
    stride,
    tiles,
    BITS: tl.constexpr,
    KEPT: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,  # divides cols and the stride
):
    """Write the KEPT largest tokens of a tile in ascending order, -1 after the last."""
    row, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    col = tile * TILE + tl.arange(0, TILE)  # [TILE]
    exists = col < (cols // ALIGN) * ALIGN
    x = tl.load(logits_ptr + tl.multiple_of(row * stride, ALIGN) + col, mask=exists, other=-float("inf"))
    inverse, _ = _temperature(requests, row)
    m, total = _statistics(x.to(tl.float32) * inverse, exists)
    rank = rank_bits(x, exists, BITS)
    t = threshold(rank, exists.to(tl.int32), KEPT, BITS)
    taken, place = places(rank, exists, t, KEPT)
    at = tl.program_id(0).to(tl.int64)
    out = at * KEPT + place
    inside = taken & (place >= 0) & (place < KEPT)
    tl.store(token_ptr + out, col.to(tl.int32), mask=inside)
    tl.store(value_ptr + out, x.to(tl.float32), mask=inside)
    count = tl.sum(taken.to(tl.int32), axis=0)
    slot = tl.arange(0, KEPT)
    tl.store(token_ptr + at * KEPT + slot, slot * 0 - 1, mask=slot >= count)
    tl.store(value_ptr + at * KEPT + slot, slot.to(tl.float32) * 0.0, mask=slot >= count)
    left_out = tl.sum(exists.to(tl.int32), axis=0) > count
    floor = tl.where(left_out, t, tl.zeros((), tl.uint32))
    tl.store(partial.largest + at, m)
    tl.store(partial.total + at, total)
    tl.store(partial.score + at, floor.to(tl.float32, bitcast=True))


class Limits(NamedTuple):
    """What a row keeps: tokens above the rank t, the first `ties` of those at it, and of them those whose exp(z - m) is
    at least `least`."""

    t: Any
    ties: Any
    least: Any


@triton.jit
def _units(e):
    """Return a probability mass, relative to the largest, in whole units: their sums are exact in any order."""
    return (e * UNIT).to(tl.int64)


@triton.jit
def _mass_wanted(top_p, mass, of_all):
    """Return the units that top_p wants: a part of `mass`, in units, or of `of_all`, which counts in 1."""
    part = tl.where(mass < 0, top_p * of_all * UNIT, top_p * mass.to(tl.float32)).to(tl.int64)
    part = tl.where((mass >= 0) & (part > mass), mass, part)
    return tl.maximum(part, 1)


@triton.jit
def _ties_for(wanted, above, unit):
    """Return how many elements of `unit` each bring `above` to `wanted`."""
    return tl.minimum((wanted - above + unit - 1) // tl.maximum(unit, 1), 2147483647).to(tl.int32)


@triton.jit
def _stricter(t, ties, other_t, other_ties):
    """Return the stricter of two thresholds."""
    both = tl.minimum(ties, other_ties)
    return tl.maximum(t, other_t), tl.where(t == other_t, both, tl.where(t > other_t, ties, other_ties))


@triton.jit
def _scan(logits_ptr, cols, inverse, m, t, COUNT: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr):
    """Return (weight above the rank t of a row, elements or mass at it, the mass of one such element)."""
    above, at, unit = tl.zeros((), tl.int64), tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for start in range(0, cols, TILE):
        col = start + tl.arange(0, TILE)
        x = tl.load(logits_ptr + col, mask=col < cols, other=-float("inf"))
        rank = rank_bits(x, col < cols, BITS)
        e = tl.where((col < cols) & (x == x), _exponentials(x.to(tl.float32) * inverse, m), 0.0)
        units = _units(e)
        weight = units
        if COUNT:
            weight = (col < cols).to(tl.int64)
        above += tl.sum(tl.where(rank > t, weight, 0), axis=0)
        at += tl.sum(tl.where(rank == t, weight, 0), axis=0)
        unit = tl.maximum(unit, tl.max(tl.where(rank == t, units, 0), axis=0))
    return above, at, unit


@triton.jit
def _threshold_of_row(
    logits_ptr, cols, inverse, m, least, COUNT: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr
):
    """Return `threshold` of a whole row in memory, for its count or its mass, DIGIT bits with each pass over it."""
    t = tl.zeros((), tl.uint32)
    digit = tl.arange(0, 1 << DIGIT)  # [16]
    shift = tl.cast((BITS - 1) // DIGIT * DIGIT, tl.int32)
    while shift >= 0:
        pivot = t | (digit.to(tl.uint32) << shift.to(tl.uint32))
        weighs = tl.zeros((1 << DIGIT,), tl.int64)
        for start in range(0, cols, TILE):
            col = start + tl.arange(0, TILE)
            x = tl.load(logits_ptr + col, mask=col < cols, other=-float("inf"))
            rank = rank_bits(x, col < cols, BITS)
            if COUNT:
                weight = (col < cols).to(tl.int64)
            else:
                e = tl.where((col < cols) & (x == x), _exponentials(x.to(tl.float32) * inverse, m), 0.0)
                weight = _units(e)
            weighs += tl.sum(tl.where(rank[:, None] >= pivot[None, :], weight[:, None], 0), axis=0)
        found = tl.sum(((digit > 0) & (weighs >= least)).to(tl.int32), axis=0)
        t = t | (found.to(tl.uint32) << shift.to(tl.uint32))
        shift -= DIGIT
    return t


@kernel
def choose_kernel(
    logits_ptr,  # [rows, cols]
    requests: Requests,
    partial: Partial,
    candidate_ptr,  # int32 [rows, count]
    value_ptr,  # fp32 [rows, count]
    token_ptr,  # int64 [rows]
    logprob_ptr,  # fp32 [rows]
    lse_ptr,  # fp32 [rows]
    cols,
    stride,
    tiles,
    count,
    JOINT: tl.constexpr,
    BITS: tl.constexpr,
    TILES: tl.constexpr,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Find the limits of a row, and draw from what they leave. The candidates are all tokens above a rank. Where the
    limits lie below it, the row itself is read."""
    row, tile = tl.program_id(0).to(tl.int64), tl.arange(0, TILES)
    m, total = _joined(
        tl.load(partial.largest + row * tiles + tile, mask=tile < tiles, other=-float("inf")),
        tl.load(partial.total + row * tiles + tile, mask=tile < tiles, other=0.0),
    )
    floors = tl.load(partial.score + row * tiles + tile, mask=tile < tiles, other=0.0)
    floor = tl.max(floors.to(tl.uint32, bitcast=True), axis=0)
    inverse, draws = _temperature(requests, row)
    top_k, top_p = load_number(requests.top_k, row), load_number(requests.top_p, row)
    least = load_number(requests.min_p, row)
    has_k, has_p = (top_k >= 1.0) & (top_k < cols), top_p < 1.0
    k = tl.minimum(tl.maximum(top_k, 1.0), 2147483520.0).to(tl.int64)

    at = tl.arange(0, COUNT)  # [COUNT]
    token = tl.load(candidate_ptr + row * count + at, mask=at < count, other=-1)
    exists = token >= 0
    x = tl.load(value_ptr + row * count + at, mask=at < count, other=0.0)
    rank = rank_bits(x, exists, BITS)
    z = x * inverse
    e = tl.where(exists & (x == x), _exponentials(z, m), 0.0)
    units = _units(e)

    # Of the k largest.
    t_k, ties_k, mass = tl.zeros((), tl.uint32), tl.full((), 2147483647, tl.int32), tl.full((), -1, tl.int64)
    if has_k:
        t_k = threshold(rank, exists.to(tl.int64), k, BITS)
        ties_k = (k - tl.sum((exists & (rank > t_k)).to(tl.int64), axis=0)).to(tl.int32)
        mass = tl.sum(tl.where(rank > t_k, units, 0), axis=0)
        mass += ties_k * tl.max(tl.where(rank == t_k, units, 0), axis=0)
    if JOINT:
        mass = tl.full((), -1, tl.int64)
    # Of the mass.
    t_p, ties_p = tl.zeros((), tl.uint32), tl.full((), 2147483647, tl.int32)
    if has_p:
        wanted = _mass_wanted(top_p, mass, total)
        t_p = threshold(rank, units, wanted, BITS)
        above = tl.sum(tl.where(rank > t_p, units, 0), axis=0)
        ties_p = _ties_for(wanted, above, tl.max(tl.where(rank == t_p, units, 0), axis=0))
    t, ties = _stricter(t_k, ties_k, t_p, ties_p)

    # The largest value of rank `floor`. What min_p drops need not be known.
    bits = ((floor + 1) << (32 - BITS)) - 1
    of_floor = number_of((bits ^ 0x80000000).to(tl.int32, bitcast=True))
    known = (floor == 0) | (t > floor) | (_exponentials(of_floor * inverse, m) < least)
    if not JOINT:
        known = known & ((floor == 0) | (t_k > floor) | (not (has_k & has_p)))
    score = z
    if known:
        if draws:
            seed, step = load_integer(requests.seed, row), load_integer(requests.step, row)
            score = z + gumbel(random_bits(seed, step, token, GUMBEL))
        order = tl.cumsum((exists & (rank == t)).to(tl.int32), axis=0)
        kept = exists & ((rank > t) | ((rank == t) & (order <= ties))) & (e >= least) & (z > -float("inf"))
        _, z_best, best = _best(score, z, token, kept)
        _store_drawn(token_ptr, logprob_ptr, lse_ptr, row, best, z_best, m, total)
    else:
        logits_ptr += row * stride
        t_k, ties_k, mass = (
            tl.zeros((), tl.uint32),
            tl.full((), 2147483647, tl.int32),
            tl.full((), -1, tl.int64),
        )
        if has_k:
            t_k = _threshold_of_row(logits_ptr, cols, inverse, m, k, True, BITS, TILE)
            above, _, _ = _scan(logits_ptr, cols, inverse, m, t_k, True, BITS, TILE)
            ties_k = (k - above).to(tl.int32)
            above, _, unit = _scan(logits_ptr, cols, inverse, m, t_k, False, BITS, TILE)
            mass = above + ties_k * unit
        if JOINT:
            mass = tl.full((), -1, tl.int64)
        t_p, ties_p = tl.zeros((), tl.uint32), tl.full((), 2147483647, tl.int32)
        if has_p:
            wanted = _mass_wanted(top_p, mass, total)
            t_p = _threshold_of_row(logits_ptr, cols, inverse, m, wanted, False, BITS, TILE)
            above, _, unit = _scan(logits_ptr, cols, inverse, m, t_p, False, BITS, TILE)
            ties_p = _ties_for(wanted, above, unit)
        t, ties = _stricter(t_k, ties_k, t_p, ties_p)
        seen = tl.zeros((), tl.int32)
        best_score, best_z = tl.full((), -float("inf"), tl.float32), tl.full((), -float("inf"), tl.float32)
        best = tl.full((), -1, tl.int32)
        seed = load_integer(requests.seed, row) + tl.zeros((1,), tl.int64)
        step = load_integer(requests.step, row) + tl.zeros((1,), tl.int64)
        for start in range(0, cols, TILE):
            col = start + tl.arange(0, TILE)
            x_i = tl.load(logits_ptr + col, mask=col < cols, other=-float("inf"))
            rank_i = rank_bits(x_i, col < cols, BITS)
            z_i = x_i.to(tl.float32) * inverse
            noise = tl.reshape(gumbel(random_tile(seed, step, start, TILE, GUMBEL)), (TILE,))
            score_i = tl.where(draws, z_i + noise, z_i)
            equal = (col < cols) & (rank_i == t)
            order = seen + tl.cumsum(equal.to(tl.int32), axis=0)
            kept = (rank_i > t) | (equal & (order <= ties))
            kept = kept & (_exponentials(z_i, m) >= least) & (z_i > -float("inf"))
            score_t, z_t, token_t = _best(score_i, z_i, col.to(tl.int32), kept)
            better = (token_t >= 0) & ((best < 0) | (score_t > best_score))
            best_score = tl.where(better, score_t, best_score)
            best_z = tl.where(better, z_t, best_z)
            best = tl.where(better, token_t, best)
            seen += tl.sum(equal.to(tl.int32), axis=0)
        _store_drawn(token_ptr, logprob_ptr, lse_ptr, row, best, best_z, m, total)
