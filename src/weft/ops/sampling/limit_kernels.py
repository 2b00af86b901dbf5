"""Kernels that draw from the tokens that top_k, top_p and min_p keep; `sample` documents the formulas.

Logits that are numbers above minus infinity have ranks, integers in their order, from 1 on. A limit is a rank and a
count of ties: it keeps the elements of higher ranks, and of those at its rank the first.

Each tile passes its largest elements on as candidates. All elements of a row above the rank `floor` are candidates. If
a limit lies lower, the row is read again: each pass counts what 16 pivots leave, which narrows the ranks between which
the limit lies, until few elements lie there. The last pass collects these, and draws from those above.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ...language import tl, triton
from ...runtime import kernel
from ...tiles.exponentials import exp_below
from ...tiles.noise import GUMBEL, gumbel, random_bits, random_tile
from ...tiles.scores import number_of
from ...tiles.select import places, rank_bits, threshold
from .draw_kernels import Drawn, Requests, best_of, joined, statistics, store_drawn, temperature_of
from .loads import load_integer, load_number

UNIT = tl.constexpr(2.0**40)  # of probability mass: the largest probability of a row is 2^40 units
ALL = tl.constexpr(2147483647)
PIVOTS = tl.constexpr(16)
VALUES = tl.constexpr(12)  # pivots that divide a range of values evenly; the others divide the ranks


class Candidates(NamedTuple):
    """What tiles pass on."""

    token: Tensor  # int32 [rows, width]: `kept` of each tile in ascending order, -1 after the last
    value: Tensor  # fp32 [rows, width]: their logits
    width: int
    # [rows, tiles] each
    largest: Tensor
    total: Tensor
    smallest: Tensor  # logit above minus infinity
    floor: Tensor  # int32: rank above which every element is a candidate, 0 if all are


class Collected(NamedTuple):
    """Memory for the elements around the limit of a row."""

    token: Tensor  # int32 [rows, ROOM]
    value: Tensor  # fp32 [rows, ROOM]


@kernel
def candidates_kernel(
    logits_ptr,  # [rows, cols]
    requests: Requests,
    candidates: Candidates,
    cols,
    stride,
    tiles,
    BITS: tl.constexpr,
    KEPT: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,  # divides cols and the stride
):
    """Pass the KEPT largest elements of a tile on."""
    row, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    col = tile * TILE + tl.arange(0, TILE)  # [TILE]
    exists = col < (cols // ALIGN) * ALIGN
    x = tl.load(logits_ptr + tl.multiple_of(row * stride, ALIGN) + col, mask=exists, other=-float("inf"))
    inverse, _ = temperature_of(requests, row)
    m, total = statistics(x.to(tl.float32) * inverse, exists)
    exists = exists & (x > -float("inf"))
    rank = rank_bits(x, exists, BITS)
    t = threshold(rank, exists.to(tl.int32), KEPT, BITS)
    taken, place = places(rank, exists, t, KEPT)
    first = row * candidates.width + tile * KEPT
    inside = taken & (place >= 0) & (place < KEPT)
    tl.store(candidates.token + first + place, col.to(tl.int32), mask=inside)
    tl.store(candidates.value + first + place, x.to(tl.float32), mask=inside)
    count = tl.sum(taken.to(tl.int32), axis=0)
    slot = tl.arange(0, KEPT)
    tl.store(candidates.token + first + slot, slot * 0 - 1, mask=slot >= count)
    tl.store(candidates.value + first + slot, slot.to(tl.float32) * 0.0, mask=slot >= count)
    left_out = tl.sum(exists.to(tl.int32), axis=0) > count
    at = tl.program_id(0).to(tl.int64)
    tl.store(candidates.largest + at, m)
    tl.store(candidates.total + at, total)
    tl.store(candidates.smallest + at, tl.min(tl.where(exists, x.to(tl.float32), float("inf")), axis=0))
    tl.store(candidates.floor + at, tl.where(left_out, t, tl.zeros((), tl.uint32)).to(tl.int32, bitcast=True))


# ---- limits ---------------------------------------------------------------------------------------------


@triton.jit
def _units(x, rank, rule):
    """Return the mass of logits, relative to the largest, in whole units: their sums are exact in any order."""
    e = tl.where(rank > 0, exp_below(x * rule.inverse, rule.m), 0.0)
    return (e * UNIT).to(tl.int64)


@triton.jit
def _value(rank, BITS: tl.constexpr):
    """Return the logit of a rank."""
    below: tl.constexpr = 32 - BITS  # bits that logits of this dtype do not have
    x = number_of(((rank << below) ^ 0x80000000).to(tl.int32, bitcast=True))
    return ((x.to(tl.int32, bitcast=True) >> below) << below).to(tl.float32, bitcast=True)


@triton.jit
def _mass_wanted(top_p, mass, of_all):
    """Return the units that top_p wants: a part of `mass`, in units, or of `of_all`, which counts in 1."""
    part = tl.where(mass < 0, top_p * of_all * UNIT, top_p * mass.to(tl.float32))
    part = tl.where(part == part, part, 0.0).to(tl.int64)
    part = tl.where((mass >= 0) & (part > mass), mass, part)
    return tl.maximum(part, 1)


@triton.jit
def _ties_for(wanted, above, unit):
    """Return how many elements of `unit` each bring `above` to `wanted`."""
    return tl.minimum((wanted - above + unit - 1) // tl.maximum(unit, 1), ALL).to(tl.int32)


@triton.jit
def _limit(rank, weight, wanted, BITS: tl.constexpr):
    """Return the limit (t, ties) that keeps the fewest elements which weigh `wanted`."""
    t = threshold(rank, weight, wanted, BITS)
    above = tl.sum(tl.where(rank > t, weight, 0), axis=0)
    return t, _ties_for(wanted, above, tl.max(tl.where(rank == t, weight, 0), axis=0))


@triton.jit
def _mass_kept(rank, units, t, ties):
    """Return the mass that a limit keeps."""
    above = tl.sum(tl.where(rank > t, units, 0), axis=0)
    return above + ties * tl.max(tl.where(rank == t, units, 0), axis=0)


@triton.jit
def _stricter(t, ties, other_t, other_ties):
    """Return the stricter of two limits."""
    both = tl.minimum(ties, other_ties)
    return tl.maximum(t, other_t), tl.where(t == other_t, both, tl.where(t > other_t, ties, other_ties))


@triton.jit
def _limits(rank, units, k, has_k, top_p, has_p, total, JOINT: tl.constexpr, BITS: tl.constexpr):
    """Return (rank of the limit of top_k, the limit of both)."""
    t_k, ties_k, mass_k = tl.zeros((), tl.uint32), tl.full((), ALL, tl.int32), tl.full((), -1, tl.int64)
    if has_k:
        t_k, ties_k = _limit(rank, (rank > 0).to(tl.int64), k, BITS)
        if not JOINT:
            mass_k = _mass_kept(rank, units, t_k, ties_k)
    t, ties = t_k, ties_k
    if has_p:
        t, ties = _limit(rank, units, _mass_wanted(top_p, mass_k, total), BITS)
        t, ties = _stricter(t, ties, t_k, ties_k)
    return t_k, t, ties


# ---- draws ----------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """How a row draws: from tokens whose exp(z - m) is at least `least`, with noise if `draws`."""

    inverse: Any  # of the temperature
    m: Any
    least: Any
    draws: Any
    seed: Any
    step: Any


@triton.jit
def _draw_candidates(rule, token, x, rank, t, ties):
    """Draw from the elements [COUNT] that a limit keeps."""
    z = x * rule.inverse
    order = tl.cumsum((rank == t).to(tl.int32), axis=0)
    kept = (rank > t) | ((rank == t) & (order <= ties))
    kept = kept & (rank > 0) & (exp_below(z, rule.m) >= rule.least)
    score = z
    if rule.draws:
        score = z + gumbel(random_bits(rule.seed, rule.step, token, GUMBEL))
    return best_of(score, z, token, kept)


@triton.jit
def _better(a, b):
    """Return the better of two tokens."""
    is_better = (b.score > a.score) | ((b.score == a.score) & (b.token < a.token))
    take = (b.token >= 0) & ((a.token < 0) | is_better)
    return Drawn(tl.where(take, b.score, a.score), tl.where(take, b.z, a.z), tl.where(take, b.token, a.token))


# ---- rows that are read again ---------------------------------------------------------------------------


class Row(NamedTuple):
    """Logits of a row, and memory for the elements around a limit."""

    logits: Any
    cols: Any
    token: Any
    value: Any
    smallest: Any  # logit above minus infinity


class Bracket(NamedTuple):
    """Ranks from lo to hi, between which a limit lies, and what lies above them."""

    lo: Any
    hi: Any
    count: Any
    mass: Any  # in units
    upto: Any  # elements from lo on, or more


@triton.jit
def _load(row, start, BITS: tl.constexpr, TILE: tl.constexpr):
    """Return (columns, logits, ranks) of a tile."""
    col = start + tl.arange(0, TILE)
    x = tl.load(row.logits + col, mask=col < row.cols, other=-float("inf"))
    return col.to(tl.int32), x.to(tl.float32), rank_bits(x, x > -float("inf"), BITS)


@triton.jit
def _pivots(row, lo, hi, BITS: tl.constexpr):
    """Return ranks [PIVOTS] above lo, up to hi. Even steps of values suit most rows, even steps of ranks any row."""
    i = tl.arange(0, PIVOTS)
    low = tl.where(lo == 0, row.smallest, tl.maximum(_value(lo, BITS), row.smallest))
    values = low + (_value(hi, BITS) - low) * (i.to(tl.float32) / VALUES)
    even = lo + 1 + (hi - lo - 1) // (PIVOTS - 1 - VALUES) * tl.maximum(i - VALUES, 0).to(tl.uint32)
    rank = tl.where(i < VALUES, rank_bits(values, i >= 0, BITS), even)
    rank = tl.where(i == PIVOTS - 1, hi, rank)
    return tl.minimum(tl.maximum(rank, lo + 1), hi)


@triton.jit
def _narrow(
    row, rule, bracket, wanted, OF_MASS: tl.constexpr, ROOM: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Narrow the bracket of the limit that keeps `wanted` elements, or OF_MASS units, to one rank, or to as many
    elements as there is memory for."""
    STEP: tl.constexpr = TILE // PIVOTS
    lo, hi, count, mass, upto = bracket.lo, bracket.hi, bracket.count, bracket.mass, bracket.upto
    while (lo < hi) & (upto - count > ROOM):
        pivot = _pivots(row, lo, hi, BITS)
        counts, masses = tl.zeros((PIVOTS, STEP), tl.int32), tl.zeros((PIVOTS, STEP), tl.int64)
        for start in range(0, row.cols, STEP):
            _, x, rank = _load(row, start, BITS, STEP)
            reaches = rank[None, :] >= pivot[:, None]  # [PIVOTS, STEP]
            counts += reaches.to(tl.int32)
            masses += tl.where(reaches, _units(x, rank, rule)[None, :], 0)
        counts, masses = tl.sum(counts, axis=1), tl.sum(masses, axis=1)
        if OF_MASS:
            enough = masses >= wanted
        else:
            enough = counts >= wanted
        lo = tl.maximum(lo, tl.max(tl.where(enough, pivot, 0), axis=0))
        hi = tl.minimum(hi, tl.min(tl.where(enough, hi, pivot - 1), axis=0))
        upto = tl.minimum(upto, tl.min(tl.where(enough, counts, ALL), axis=0))
        count = tl.maximum(count, tl.max(tl.where(enough, 0, counts), axis=0))
        mass = tl.maximum(mass, tl.max(tl.where(enough, 0, masses), axis=0))
    return Bracket(lo, hi, count, mass, upto)


@triton.jit
def _collect(
    row, rule, bracket, ties, DRAW: tl.constexpr, ROOM: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Store the elements of a bracket of several ranks, and return their number and, if DRAW, a token. It is drawn from
    the elements above the bracket; of a bracket of one rank, also from the first `ties`."""
    seen = tl.zeros((), tl.int32)
    drawn = Drawn(tl.full((), -float("inf"), tl.float32), tl.zeros((), tl.float32), tl.full((), -1, tl.int32))
    tl.debug_barrier()  # threads write where others have read
    for start in range(0, row.cols, TILE):
        col, x, rank = _load(row, start, BITS, TILE)
        inside = (rank > 0) & (rank >= bracket.lo) & (rank <= bracket.hi)
        order = seen + tl.cumsum(inside.to(tl.int32), axis=0)
        if bracket.lo < bracket.hi:
            fits = inside & (order >= 1) & (order <= ROOM)
            tl.store(row.token + order - 1, col, mask=fits)
            tl.store(row.value + order - 1, x, mask=fits)
        if DRAW:
            z = x * rule.inverse
            kept = (rank > bracket.hi) | (inside & (bracket.lo == bracket.hi) & (order <= ties))
            kept = kept & (exp_below(z, rule.m) >= rule.least)
            if tl.max(kept.to(tl.int32), axis=0) > 0:
                score = z
                if rule.draws:
                    seed, step = rule.seed + tl.zeros((1,), tl.int64), rule.step + tl.zeros((1,), tl.int64)
                    noise = gumbel(random_tile(seed, step, start, TILE, GUMBEL))
                    score = z + tl.reshape(noise, (TILE,))
                drawn = _better(drawn, best_of(score, z, col, kept))
        seen += tl.sum(inside.to(tl.int32), axis=0)
    tl.debug_barrier()  # threads read what others have written
    return seen, drawn


@triton.jit
def _load_collected(row, rule, seen, ROOM: tl.constexpr, BITS: tl.constexpr):
    """Return (token, logit, rank, units) of what was collected, [ROOM] each."""
    slot = tl.arange(0, ROOM)
    token = tl.load(row.token + slot, mask=slot < seen, other=-1)
    x = tl.load(row.value + slot, mask=slot < seen, other=-float("inf"))
    rank = rank_bits(x, slot < seen, BITS)
    return token, x, rank, _units(x, rank, rule)


@triton.jit
def _draw_row(
    row, rule, bracket, top, k, has_k, top_p, has_p, total,
    JOINT: tl.constexpr, ROOM: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Draw from a row whose limits may lie in `bracket`; `top` is its highest rank."""
    t_k, ties_k, mass_k = tl.zeros((), tl.uint32), tl.full((), ALL, tl.int32), tl.full((), -1, tl.int64)
    b = Bracket(t_k, t_k, bracket.count * 0, bracket.mass * 0, ties_k)  # which keeps everything
    ties, wanted = ties_k, k
    if has_k:
        b = _narrow(row, rule, bracket, k, False, ROOM, BITS, TILE)
        t_k, ties_k = b.lo, (k - b.count).to(tl.int32)
        ties = ties_k
        if has_p:
            if b.lo < b.hi:
                seen, _ = _collect(row, rule, b, ties_k, False, ROOM, BITS, TILE)
                _, _, rank, units = _load_collected(row, rule, seen, ROOM, BITS)
                t_k, ties_k = _limit(rank, (rank > 0).to(tl.int64), k - b.count, BITS)
                mass_k = b.mass + _mass_kept(rank, units, t_k, ties_k)
                b = Bracket(b.lo, b.hi, b.count, b.mass, b.count + seen)
            else:
                mass_k = b.mass + ties_k * _units(_value(t_k, BITS), t_k, rule)
            if JOINT:
                mass_k = tl.full((), -1, tl.int64)
    if has_p:
        wanted = _mass_wanted(top_p, mass_k, total)
        if bracket.mass >= wanted:
            # The limit lies above, among the elements that were candidates.
            b = Bracket(bracket.hi + 1, top, bracket.count * 0, bracket.mass * 0, bracket.count)
        else:
            b = Bracket(b.lo, bracket.hi, bracket.count, bracket.mass, b.upto)
        b = _narrow(row, rule, b, wanted, True, ROOM, BITS, TILE)
        ties = _ties_for(wanted, b.mass, _units(_value(b.lo, BITS), b.lo, rule))
        if JOINT:
            is_k = t_k > b.hi
            ties = tl.where(is_k, ties_k, tl.where(t_k == b.lo, tl.minimum(ties, ties_k), ties))
            b = Bracket(tl.where(is_k, t_k, b.lo), tl.where(is_k, t_k, b.hi), b.count, b.mass, b.upto)
    seen, drawn = _collect(row, rule, b, ties, True, ROOM, BITS, TILE)
    if b.lo < b.hi:
        token, x, rank, units = _load_collected(row, rule, seen, ROOM, BITS)
        weight = tl.where(has_p, units, (rank > 0).to(tl.int64))
        t, ties = _limit(rank, weight, wanted - tl.where(has_p, b.mass, b.count.to(tl.int64)), BITS)
        if JOINT:
            t, ties = _stricter(t, ties, t_k, ties_k)
        drawn = _better(drawn, _draw_candidates(rule, token, x, rank, t, ties))
    return drawn


@kernel
def choose_kernel(
    logits_ptr,  # [rows, cols]
    requests: Requests,
    candidates: Candidates,
    collected: Collected,
    token_ptr,  # int64 [rows]
    logprob_ptr,  # fp32 [rows]
    lse_ptr,  # fp32 [rows]
    cols,
    stride,
    tiles,
    JOINT: tl.constexpr,
    BITS: tl.constexpr,
    TILES: tl.constexpr,
    KEPT: tl.constexpr,
    COUNT: tl.constexpr,
    ROOM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Find the limits of a row among its candidates, or else in the row, and draw from what they keep."""
    row, tile = tl.program_id(0).to(tl.int64), tl.arange(0, TILES)
    at, exists = row * tiles + tile, tile < tiles
    m, total = joined(
        tl.load(candidates.largest + at, mask=exists, other=-float("inf")),
        tl.load(candidates.total + at, mask=exists, other=0.0),
    )
    inverse, draws = temperature_of(requests, row)
    seed, step = load_integer(requests.seed, row), load_integer(requests.step, row)
    rule = Rule(inverse, m, load_number(requests.min_p, row), draws, seed, step)
    top_k, top_p = load_number(requests.top_k, row), load_number(requests.top_p, row)
    has_k, has_p = (top_k >= 1.0) & (top_k < cols), top_p < 1.0
    k = tl.minimum(tl.maximum(top_k, 1.0), 2147483520.0).to(tl.int64)

    slot = tl.arange(0, COUNT)  # [COUNT]
    row_off = row * candidates.width
    token = tl.load(candidates.token + row_off + slot, mask=slot < candidates.width, other=-1)
    x = tl.load(candidates.value + row_off + slot, mask=slot < candidates.width, other=0.0)
    rank = rank_bits(x, token >= 0, BITS)
    units = _units(x, rank, rule)
    floors = tl.load(candidates.floor + at, mask=exists, other=0)
    floor = tl.max(floors.to(tl.uint32, bitcast=True), axis=0)

    t_k, t, ties = _limits(rank, units, k, has_k, top_p, has_p, total, JOINT, BITS)
    # The k largest of a row are candidates if a tile passes on as many. What min_p drops need not be known.
    is_complete = has_k & ((k <= KEPT) | (t_k > floor))
    is_above = (t > floor) | (exp_below(_value(floor, BITS) * inverse, m) < rule.least)
    if not JOINT:
        is_above = is_above & (not (has_k & has_p))
    if (floor == 0) | is_complete | is_above:
        drawn = _draw_candidates(rule, token, x, rank, t, ties)
    else:
        above = rank > floor
        count_above = tl.sum(above.to(tl.int32), axis=0)
        mass_above = tl.sum(tl.where(above, units, 0), axis=0)
        smallest = tl.load(candidates.smallest + at, mask=exists, other=float("inf"))
        memory = Row(
            logits_ptr + row * stride, cols, collected.token + row * ROOM, collected.value + row * ROOM,
            tl.min(smallest, axis=0),
        )  # fmt: skip
        bracket = Bracket(tl.zeros((), tl.uint32), floor, count_above, mass_above, tl.full((), ALL, tl.int32))
        top = tl.max(rank, axis=0)
        drawn = _draw_row(memory, rule, bracket, top, k, has_k, top_p, has_p, total, JOINT, ROOM, BITS, TILE)
    store_drawn(token_ptr, logprob_ptr, lse_ptr, row, drawn, m, total)


# ---- lists of the largest -------------------------------------------------------------------------------


@kernel
def choose_listed_kernel(
    stats_ptr,  # fp32 [STATS, rows]: the first statistics of `linear_logprobs`
    place_ptr,  # int32 [rows, count]: places in the lists, -1 for none; or None, if all are read
    value_ptr,  # fp32 [rows, width]: logits divided by the temperature
    listed_ptr,  # int32 [rows, width]: their tokens in ascending order, -1 for none
    requests: Requests,
    rows,
    count,
    width,
    STATS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Draw from the k largest of a list, and let the first statistics draw the same."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, COUNT)
    exists = slot < count
    place = slot
    if place_ptr is not None:
        place = tl.load(place_ptr + row * count + slot, mask=exists, other=-1)
        exists = exists & (place >= 0) & (place < width)
    token = tl.load(listed_ptr + row * width + place, mask=exists, other=-1)
    x = tl.load(value_ptr + row * width + place, mask=exists, other=-float("inf"))
    rank = rank_bits(x, exists & (x > -float("inf")), 32)
    m = tl.max(x, axis=0)
    seed, step = load_integer(requests.seed, row), load_integer(requests.step, row)
    rule = Rule(1.0, m, load_number(requests.min_p, row), True, seed, step)
    k, top_p = load_number(requests.top_k, row).to(tl.int64), load_number(requests.top_p, row)
    units = _units(x, rank, rule)
    _, t, ties = _limits(rank, units, k, True, top_p, top_p < 1.0, 0.0, False, 32)
    drawn = _draw_candidates(rule, token, x, rank, t, ties)
    out_ptr = stats_ptr + row
    stride = rows.to(tl.int64)
    tl.store(out_ptr + 2 * stride, drawn.z)
    tl.store(out_ptr + (STATS - 2) * stride, drawn.score)
    tl.store(out_ptr + (STATS - 1) * stride, drawn.token.to(tl.float32, bitcast=True))
