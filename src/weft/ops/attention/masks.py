"""Masks, biases and ALiBi: what pairs of a query and a key add to scores, and which blocks of pairs a tile visits.

Tiles of queries visit blocks of keys, and in the gradient of keys, tiles of keys visit blocks of queries. With a mask,
`blocks_kernel` lists the blocks of each tile in which some query sees a key, under the mask and all bounds of the call;
the kernels of attention visit these alone, and look up pairs only where some pair of the block is hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ...language import tl, triton
from ...runtime import kernel
from .pieces import LOG2E, Heads
from .sequences import Band, Lengths, bounds_of, sees, sequence_at


class Pairs(NamedTuple):
    """Values of pairs [batch, heads, queries, keys]; a stride of 0 broadcasts. A `PairForm` has the stride of keys."""

    ptr: Tensor | None
    batch: int
    head: int
    query: int


class Blocks(NamedTuple):
    """Blocks that tiles visit. Sequences share a list unless `per_batch` is 1, heads unless `per_head` is. A list of a
    tile of keys that is not shared by heads covers all query heads of its key head, one after another."""

    entries: Tensor | None  # int32 [batches, lists, tiles, room]: 2 * block, + 1 if a pair of it is hidden
    counts: Tensor | None  # int32 [batches, lists, tiles]: number of entries
    used: (
        Tensor | None
    )  # uint8 [batches, lists, tiles, heads of a list * tokens]: 1 if in a visible pair of the tile
    per_batch: int
    per_head: int
    room: int


class Terms(NamedTuple):
    """Mask of pairs and terms of scores; each may be absent."""

    mask: Pairs  # uint8, 1 where the query sees the key
    blocks: Blocks  # present with the mask
    bias: Pairs
    slopes: Tensor | None  # fp32 [heads, 2]: of keys before the own key, and after it


class Visits(NamedTuple):
    """List of one tile."""

    entries: Any  # pointer
    count: Any
    used: Any  # pointer


# ---- pairs ----------------------------------------------------------------------------------------------


@triton.jit
def _address(pairs, batch, head, query, key, lengths, FORM: tl.constexpr):
    """Return pointers to pairs and their mask; `query` and `key` broadcast against each other."""
    ALIGN: tl.constexpr = FORM.align
    base = tl.multiple_of(batch.to(tl.int64) * pairs.batch + head.to(tl.int64) * pairs.head, ALIGN)
    at = pairs.ptr + base + query.to(tl.int64) * tl.multiple_of(pairs.query.to(tl.int64), ALIGN)
    if FORM.step:
        # ALIGN divides the number of keys; dividing and multiplying lets a thread access ALIGN of them at once.
        return at + key, (query < lengths.q) & (key < lengths.k // ALIGN * ALIGN)
    else:
        return at, query < lengths.q


@triton.jit
def load_pairs(pairs, batch, head, query, key, lengths, FORM: tl.constexpr):
    """Load pairs, 0 where they do not exist. Pairs that differ by query alone are loaded once per query."""
    at, mask = _address(pairs, batch, head, query, key, lengths, FORM)
    return tl.load(at, mask=mask, other=0)


@triton.jit
def store_pairs(value, pairs, batch, head, query, key, lengths, FORM: tl.constexpr):
    at, mask = _address(pairs, batch, head, query, key, lengths, FORM)
    tl.store(at, value.to(pairs.ptr.dtype.element_ty), mask=mask)


@triton.jit
def distances(query, key, sequence):
    """Return how far keys lie after the queries' own keys, in fp32."""
    return (key - query - sequence.offset).to(tl.float32)


@triton.jit
def added(s, terms, head, query, key, sequence, lengths, TILE: tl.constexpr):
    """Add bias and ALiBi to scores in base 2."""
    if terms.bias.ptr is not None:
        bias = load_pairs(terms.bias, sequence.batch, head, query, key, lengths, TILE.bias)
        s += bias.to(tl.float32) * LOG2E
    if terms.slopes is not None:
        before, after = tl.load(terms.slopes + head * 2) * LOG2E, tl.load(terms.slopes + head * 2 + 1) * LOG2E
        distance = distances(query, key, sequence)
        s += tl.where(distance < 0.0, distance * before, distance * -after)
    return s


# ---- visited blocks -------------------------------------------------------------------------------------


@triton.jit
def visits_of(blocks, batch, head, heads, tile, tiles, tokens):
    """Return the list of a tile in one of `heads` heads. `tokens` are covered for each head of a list."""
    lists = 1 + (heads - 1) * blocks.per_head
    at = (batch.to(tl.int64) * blocks.per_batch * lists + head * blocks.per_head) * tiles + tile
    # The bounds always hold; they are written out for the prover.
    count = tl.minimum(tl.maximum(tl.load(blocks.counts + at), 0), blocks.room).to(tl.int32)
    return Visits(blocks.entries + at * blocks.room, count, blocks.used + at * tokens)


@triton.jit
def visit(visits, step, number):
    """Return (block, whether some of its pairs are hidden) of a step; there are `number` blocks."""
    entry = tl.load(visits.entries + step)
    return tl.maximum(tl.minimum(entry >> 1, number - 1), 0), (entry & 1) != 0


@triton.jit
def load_used(visits, first, start, limit, ROWS: tl.constexpr):
    """Return which of ROWS tokens from `start` on are in a visible pair of the tile, bool [ROWS]; `first` is where the
    tokens of the head begin in the list."""
    token = start + tl.arange(0, ROWS)
    return tl.load(visits.used + first + token, mask=token < limit, other=0) != 0


@kernel
def blocks_kernel(
    mask: Pairs,
    blocks: Blocks,
    lengths: Lengths,
    heads: Heads,
    band: Band,
    TILE: tl.constexpr,
    OF_KEYS: tl.constexpr,
):
    """List the blocks that one tile of queries (of keys if OF_KEYS) visits, in ascending order, and its used tokens."""
    ROWS: tl.constexpr = TILE.n if OF_KEYS else TILE.m
    BLOCK: tl.constexpr = TILE.m if OF_KEYS else TILE.n
    BANDED: tl.constexpr = TILE.banded
    LIMITED: tl.constexpr = TILE.limited
    tokens = lengths.q if OF_KEYS else lengths.k
    tiles = tl.cdiv(lengths.k if OF_KEYS else lengths.q, ROWS)
    tile = tl.program_id(0) % tiles
    lists = 1 + ((heads.q // heads.group if OF_KEYS else heads.q) - 1) * blocks.per_head
    number = tl.program_id(0) // tiles
    heads_each = 1 + (heads.group - 1) * blocks.per_head if OF_KEYS else 1
    sequence = sequence_at(tile, number // lists, lengths, band, OF_KEYS, ROWS)
    row = sequence.first + tl.arange(0, ROWS)
    at = number.to(tl.int64) * tiles + tile
    entries_ptr, used_ptr = blocks.entries + at * blocks.room, blocks.used + at * heads_each * tokens
    per_head = tl.cdiv(tokens, BLOCK)
    count = (tile * 0).to(tl.int32)
    for block in range(heads_each * per_head):
        each = block // per_head
        head = number % lists * heads_each + each
        other = block % per_head * BLOCK + tl.arange(0, BLOCK)
        if OF_KEYS:
            query, key = other, row
            q, k = query[None, :], key[:, None]
        else:
            query, key = row, other
            q, k = query[:, None], key[None, :]
        seen = load_pairs(mask, sequence.batch, head, q, k, lengths, TILE.mask) != 0
        if LIMITED:
            begin, end = bounds_of(query, sequence, lengths, band, BANDED)
            if OF_KEYS:
                begin, end = begin[None, :], end[None, :]
            else:
                begin, end = begin[:, None], end[:, None]
            seen = seen & (k >= begin) & (k < end)
        else:
            seen = seen & sees(q, k, sequence, band, BANDED)
        exists = q < sequence.q
        in_pair = tl.max((seen & exists).to(tl.int32), axis=0)  # [BLOCK]
        hidden = tl.max(tl.max((exists & (seen == 0)).to(tl.int32), axis=0), axis=0)
        tl.store(used_ptr + each.to(tl.int64) * tokens + other, in_pair.to(tl.uint8), mask=other < tokens)
        visited = tl.max(in_pair, axis=0)
        # The bounds always hold; they are written out for the prover.
        place = tl.maximum(tl.minimum(count, block), 0)
        tl.store(entries_ptr + place, block * 2 + hidden, mask=visited != 0)
        count += visited
    tl.store(blocks.counts + at, count)
