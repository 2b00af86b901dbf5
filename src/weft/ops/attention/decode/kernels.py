"""The kernels of attention over caches: parts of sequences, and what joins them.

A program has one head of keys of one sequence, all query heads that share it, and one part of the keys. Parts have a
fixed number of tokens, so that the bits of a sequence do not depend on the sequences beside it.

Page numbers and lengths may hold any integers: pages outside of the cache are not read, and lengths are clamped to the
room of the table. The results of a sequence are NaN if its length exceeds that room, or if a query sees a key in a
page that does not exist.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ....language import tl, triton
from ....runtime import kernel
from ....tiles import decode
from ...common.heads import Place
from ...common.kv_cache import Kept
from ..pieces import (
    LARGEST,
    LN2,
    LOG2E,
    MINUS_INFINITY,
    Pieces,
    Scores,
    across,
    add_product,
    capped,
    factor_of,
    load_at,
    plus,
    store_at,
    times,
    zeros,
)

# ---- structs --------------------------------------------------------------------------------------------


class Pages(NamedTuple):
    """Which pages of a cache the sequences have."""

    table: Tensor | None  # int32 [sequences, pages]
    lengths: Tensor | None  # [sequences]: tokens in the cache, those of the queries among them
    number: int  # of pages of the cache
    size: int  # tokens of a page
    width: int  # pages of a row of the table
    stride: int  # of the table, from row to row


class Counts(NamedTuple):
    sequences: int
    queries: int  # of each sequence: its last tokens
    heads: int
    group: int  # heads that share one of keys
    parts: int  # of the longest sequence
    left: int  # how many keys before its own a query sees


class Rows(NamedTuple):
    """The rows of a program: queries of the heads that share one of keys."""

    sequence: Any  # int64
    head: Any  # [M]
    query: Any  # [M]
    exists: Any  # [M]


# ---- a part ---------------------------------------------------------------------------------------------


@triton.jit
def _rows(number, sequence, key_head, counts, M: tl.constexpr):
    row = number * M + tl.arange(0, M)
    query = row // counts.group
    exists = query < counts.queries
    return Rows(sequence, key_head * counts.group + row % counts.group, tl.where(exists, query, 0), exists)


@triton.jit
def _exists(page, pages):
    return (page >= 0) & (page < pages.number)


@triton.jit
def _places(start, first, end, sequence, pages, N: tl.constexpr, WHOLE: tl.constexpr):
    """(page, place in it, whether that page exists) of tokens from `start` on, [N] each. WHOLE: all of them are in one
    page, for which the last answer is. In place of tokens before `first`, which no query sees, that one is read: their
    pages may be gone."""
    row = pages.table + sequence * pages.stride
    token = tl.maximum(start + tl.arange(0, N), first)
    if WHOLE:
        page = tl.load(row + start // pages.size).to(tl.int64)
    else:
        page = tl.load(row + token // pages.size, mask=token < end, other=0).to(tl.int64)
    there = _exists(page, pages)
    page = tl.where(there, page, 0) + tl.zeros((N,), tl.int64)
    return page, (token % pages.size).to(tl.int64), there


@triton.jit
def _as(x, DTYPE: tl.constexpr):
    if DTYPE == "fp16":
        return x.to(tl.float16)
    elif DTYPE == "bf16":
        return x.to(tl.bfloat16)
    else:
        return x.to(tl.float32)


@triton.jit
def _numbers(stored, DTYPE: tl.constexpr, TILE: tl.constexpr):
    """Codes or numbers of a cache as they are multiplied, exactly."""
    if TILE.format is None:
        return stored
    elif TILE.format.element == "e4m3" and TILE.converts:
        return _as(stored.to(tl.float8e4nv, bitcast=True), DTYPE)
    else:
        return _as(decode(stored.to(tl.uint8, bitcast=True), TILE.format), DTYPE)


@triton.jit
def _cached(
    cache,
    key_head,
    page,
    place,
    exists,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Heads of tokens [N] in the dtype that they are multiplied in, zero where there is none."""
    ALIGN: tl.constexpr = TILE.align
    row = page * cache.at.page + place * cache.at.place + key_head.to(tl.int64) * cache.at.head
    stored = load_at(cache.ptr, tl.multiple_of(row, ALIGN), exists, WIDTH)
    if stored.second is not None:
        return Pieces(_numbers(stored.first, DTYPE, TILE), _numbers(stored.second, DTYPE, TILE))
    else:
        return Pieces(_numbers(stored.first, DTYPE, TILE), None)


@triton.jit
def _latent_rows(cache, page, place, exists, TILE: tl.constexpr):
    """Latents [N, 512] and what is rotated [N, 64] of rows of 656 bytes: 512 codes e4m3, four fp32 scales of 128 codes
    each, and 64 numbers in bf16. The latents are rounded to bf16, as FlashMLA does."""
    row = tl.multiple_of(page * cache.at.page + place * cache.at.place, 16)  # in bytes
    ptr = cache.ptr + row
    number = tl.arange(0, 512)
    codes = tl.load(ptr[:, None] + number[None, :], mask=exists[:, None], other=0)
    group = tl.arange(0, 4)
    scales = (ptr + 512).to(tl.pointer_type(tl.float32), bitcast=True)
    scale = tl.load(scales[:, None] + group[None, :], mask=exists[:, None], other=0.0)
    values = tl.reshape(decode(codes, TILE.row_format), (codes.shape[0], 4, 128)) * scale[:, :, None]
    number = tl.arange(0, 64)
    turned = (ptr + 528).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    second = tl.load(turned[:, None] + number[None, :], mask=exists[:, None], other=0.0)
    return Pieces(tl.reshape(values, codes.shape).to(tl.bfloat16), second)


@triton.jit
def _scales(cache, key_head, page, place, exists):
    """The scales of a head of tokens [N]."""
    at = cache.at
    row = page * at.scale_page + place * at.scale_place + key_head.to(tl.int64) * at.scale_head
    return tl.load(cache.scale + row, mask=exists, other=0.0)


@triton.jit
def _with_sink(out, lse, sink):
    """(out, lse) of rows [M] with a score that has no value."""
    joined = tl.maximum(lse, tl.minimum(sink, LARGEST))  # finite: a sink that is infinite has all the share
    least = tl.where(joined == MINUS_INFINITY, 0.0, joined)
    own, others = tl.exp2((lse - least) * LOG2E), tl.exp2((sink - least) * LOG2E)
    total = own + others
    share = tl.where(total == 0.0, 0.0, own / tl.where(total == 0.0, 1.0, total))
    whole = joined + tl.log2(tl.where(total == 0.0, 1.0, total)) * LN2
    return times(out, share[:, None]), tl.where(sink == float("inf"), sink, whole)


@triton.jit
def _bounds(sequence, pages, counts):
    """(own key of the first query, tokens, first key that any query sees, whether there is room for all tokens), of a
    sequence. A cache without pages has no room."""
    room = tl.where(pages.number > 0, (pages.width * pages.size).to(tl.int64), 0)
    given = tl.load(pages.lengths + sequence).to(tl.int64)
    length = tl.minimum(tl.maximum(given, 0), room).to(tl.int32)
    own = length - counts.queries.to(tl.int32)
    return own, length, tl.maximum(own - counts.left.to(tl.int32), 0), given <= room


@triton.jit
def _plane(counts):
    """How many rows all sequences have."""
    return counts.sequences.to(tl.int64) * counts.queries * counts.heads


@kernel
def decode_kernel(
    query: Place,  # [sequences, queries, heads, numbers]
    k: Kept,
    v: Kept,  # absent if values are the first numbers of keys
    y_ptr,  # the result [sequences, queries, heads, numbers]; fp32 of each part if there are parts
    lse_ptr,  # fp32 [sequences, queries, heads]; of each part if there are parts
    sinks_ptr,  # [heads], or None
    pages: Pages,
    counts: Counts,
    scores: Scores,
    TILE: tl.constexpr,
):
    """A part of a sequence."""
    M: tl.constexpr = TILE.m
    N: tl.constexpr = TILE.n
    PART: tl.constexpr = TILE.part
    QK: tl.constexpr = TILE.qk
    V: tl.constexpr = TILE.v
    ALIGN: tl.constexpr = TILE.align
    OUT_ALIGN: tl.constexpr = TILE.out_align
    key_heads = counts.heads // counts.group
    tiles = tl.cdiv(counts.queries * counts.group, M)
    part = tl.program_id(0) % counts.parts
    tile = tl.program_id(0) // counts.parts % tiles
    key_head = tl.program_id(0) // counts.parts // tiles % key_heads
    sequence = (tl.program_id(0) // counts.parts // tiles // key_heads).to(tl.int64)
    rows = _rows(tile, sequence, key_head, counts, M)
    own, length, first, sound = _bounds(sequence, pages, counts)
    begin = tl.maximum(part * PART, first // N * N)
    end = tl.minimum(part * PART + PART, length)
    if TILE.direct or begin < end:
        own_key = own + rows.query  # [M]
        at = query.at
        row = sequence * at.batch + rows.query.to(tl.int64) * at.token + rows.head.to(tl.int64) * at.head
        q = load_at(query.ptr, tl.multiple_of(row, ALIGN), rows.exists, QK)
        factor = factor_of(scores, TILE.capped) + tl.zeros((M,), tl.float32)
        scale = scores.scale + tl.zeros((M,), tl.float32)
        if TILE.format is not None:
            q, size = _brought_near_one(q, TILE)
            if not TILE.scaled_by_token:
                size *= tl.load(k.scale + key_head * k.at.scale_head)
            factor, scale = (factor if TILE.capped else factor * size), scale * size
        largest = tl.full((M,), MINUS_INFINITY, tl.float32)
        total = tl.zeros((M,), tl.float32)
        sums = zeros(M, V)
        # Whether some key that a query sees lies in a page that does not exist, in any tile or at each place of tiles.
        missing = begin < begin if TILE.whole_pages else tl.zeros((N,), tl.int1)
        for start in range(begin, end, N):
            start = tl.multiple_of(start, N)
            token = start + tl.arange(0, N)
            exists = token < end
            page, place, there = _places(start, first, end, sequence, pages, N, TILE.whole_pages)
            missing |= (there == 0) if TILE.whole_pages else exists & (there == 0)
            if TILE.row_format is not None:
                keys = _latent_rows(k, page, place, exists, TILE)
            else:
                keys = _cached(k, key_head, page, place, exists, QK, TILE.keys, TILE)
            s = across(q, keys)  # [M, N]
            if TILE.scaled_by_token:
                key_scale = _scales(k, key_head, page, place, exists)
                s *= key_scale[None, :]
            if TILE.capped:
                s, _ = capped(s * scale[:, None], Scores(1.0, scores.softcap), True)
            if (start + N > own + 1) | (start < own + counts.queries - 1 - counts.left):
                seen = (token[None, :] <= own_key[:, None]) & (
                    token[None, :] >= own_key[:, None] - counts.left
                )
                s = tl.where(seen, s, MINUS_INFINITY)
            s *= factor[:, None]
            joined = tl.maximum(largest, tl.max(s, axis=1))
            least = tl.where(joined == MINUS_INFINITY, 0.0, joined)
            p = tl.exp2(s - least[:, None])
            fade = tl.exp2(largest - least)
            total = total * fade + tl.sum(p, axis=1)
            if TILE.latent:
                values = Pieces(keys.first, None)
                if TILE.scaled_by_token:
                    p *= key_scale[None, :]
            else:
                values = _cached(v, key_head, page, place, exists, V, TILE.values, TILE)
                if TILE.scaled_by_token:
                    p *= _scales(v, key_head, page, place, exists)[None, :]
            sums = add_product(times(sums, fade[:, None]), p.to(values.first.dtype), values)
            largest = joined
        sound &= (missing if TILE.whole_pages else tl.max(missing.to(tl.int32), axis=0)) == 0
        total = tl.where(sound, total, float("nan"))
        empty = total == 0.0
        out = times(sums, (1.0 / tl.where(empty, 1.0, total))[:, None])
        if TILE.format is not None and not TILE.scaled_by_token:
            if TILE.latent:
                out = times(out, tl.load(k.scale + key_head * k.at.scale_head))
            else:
                out = times(out, tl.load(v.scale + key_head * v.at.scale_head))
        lse = tl.where(empty, MINUS_INFINITY, (largest + tl.log2(total)) * LN2)
        row = (sequence * counts.queries + rows.query) * counts.heads + rows.head
        if TILE.direct:
            if sinks_ptr is not None:
                sink = tl.load(sinks_ptr + rows.head).to(tl.float32)
                out, lse = _with_sink(out, lse, sink)
        else:
            row += part * _plane(counts)
        tl.store(lse_ptr + row, lse, mask=rows.exists)
        store_at(out, y_ptr, tl.multiple_of(row * V.numbers, OUT_ALIGN), rows.exists, V)


@triton.jit
def _brought_near_one(q, TILE: tl.constexpr):
    """(queries in the dtype that codes are multiplied in, what they have to be multiplied by [M]). A power of two for
    each row keeps them in the range of fp16, exactly but for numbers that are nothing beside the row's largest."""
    largest = tl.max(tl.abs(q.first.to(tl.float32)), axis=1)
    if q.second is not None:
        largest = tl.maximum(largest, tl.max(tl.abs(q.second.to(tl.float32)), axis=1))
    # The exponent of the largest number alone; that of 0 and of infinity as it is.
    size = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    size = tl.where((size > 1e-30) & (size < 1e30), size, 1.0)
    first = _as(q.first.to(tl.float32) * (1.0 / size)[:, None], TILE.keys)
    if q.second is not None:
        second = _as(q.second.to(tl.float32) * (1.0 / size)[:, None], TILE.keys)
        return Pieces(first, second), size
    else:
        return Pieces(first, None), size


# ---- joining parts --------------------------------------------------------------------------------------


@kernel
def join_kernel(
    part_ptr,  # fp32 [parts, sequences, queries, heads, numbers]
    part_lse_ptr,  # fp32 [parts, sequences, queries, heads]
    y_ptr,  # [sequences, queries, heads, numbers]
    lse_ptr,  # fp32 [sequences, queries, heads]
    sinks_ptr,  # [heads], or None
    pages: Pages,
    counts: Counts,
    TILE: tl.constexpr,
):
    """Some heads of a query, from the parts of its sequence, in order."""
    M: tl.constexpr = TILE.heads
    PART: tl.constexpr = TILE.part
    N: tl.constexpr = TILE.n
    V: tl.constexpr = TILE.v
    ALIGN: tl.constexpr = TILE.out_align
    tiles = tl.cdiv(counts.heads, M)
    head = tl.program_id(0) % tiles * M + tl.arange(0, M)
    query = (tl.program_id(0) // tiles).to(tl.int64)  # of all sequences
    sequence = query // counts.queries
    exists = head < counts.heads
    _, length, begin, sound = _bounds(sequence, pages, counts)
    first, last = begin // N * N // PART, tl.cdiv(length, PART)
    row = query * counts.heads + head
    plane = _plane(counts)
    largest = tl.full((M,), MINUS_INFINITY, tl.float32)
    for part in range(first, last):
        lse = tl.load(part_lse_ptr + part * plane + row, mask=exists, other=MINUS_INFINITY)
        largest = tl.maximum(largest, lse)
    least = tl.where(largest == MINUS_INFINITY, 0.0, largest)
    total = tl.where(sound, tl.zeros((M,), tl.float32), float("nan"))
    sums = zeros(M, V)
    for part in range(first, last):
        at = part * plane + row
        lse = tl.load(part_lse_ptr + at, mask=exists, other=MINUS_INFINITY)
        weight = tl.exp2((lse - least) * LOG2E)
        total += weight
        sums = plus(
            sums, times(load_at(part_ptr, tl.multiple_of(at * V.numbers, ALIGN), exists, V), weight[:, None])
        )
    empty = total == 0.0
    out = times(sums, (1.0 / tl.where(empty, 1.0, total))[:, None])
    lse = tl.where(empty, MINUS_INFINITY, largest + tl.log2(tl.where(empty, 1.0, total)) * LN2)
    if sinks_ptr is not None:
        out, lse = _with_sink(out, lse, tl.load(sinks_ptr + head, mask=exists, other=0.0).to(tl.float32))
    tl.store(lse_ptr + row, lse, mask=exists)
    store_at(out, y_ptr, tl.multiple_of(row * V.numbers, ALIGN), exists, V)
