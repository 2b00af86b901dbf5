"""Kernels of attention over caches: one for parts of sequences, one that merges the parts.

A program handles one key head of one sequence, all query heads that share it, and one part of the keys. Parts have a
fixed number of tokens, so that the bits of a sequence do not depend on the other sequences.

Page numbers and lengths may hold any integers: pages outside the cache are not read, and lengths are clamped to the
capacity of the table. The results of a sequence are NaN if its length exceeds that capacity, or if a query sees a key
in a page that does not exist.
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
    """Page table and lengths of the sequences."""

    table: Tensor | None  # int32 [sequences, pages]
    lengths: Tensor | None  # [sequences]: tokens in the cache, including those of the queries
    number: int  # of pages of the cache
    size: int  # tokens per page
    width: int  # pages per row of the table
    stride: int  # of the table's rows


class Counts(NamedTuple):
    sequences: int
    queries: int  # of each sequence: its last tokens
    heads: int
    group: int  # query heads that share a key head
    parts: int  # of the longest sequence
    left: int  # number of keys before its own that a query sees


class Rows(NamedTuple):
    """Rows of a program: queries of the heads that share a key head."""

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
def _slots(start, first, end, sequence, pages, N: tl.constexpr, WHOLE: tl.constexpr):
    """Return (page, slot in it, whether the page exists) of tokens from `start` on, [N] each. WHOLE: all tokens lie in
    one page, and the last item is a scalar. Tokens before `first`, which no query sees, are replaced by `first`: their
    pages may be gone."""
    row = pages.table + sequence * pages.stride
    token = tl.maximum(start + tl.arange(0, N), first)
    if WHOLE:
        page = tl.load(row + start // pages.size).to(tl.int64)
    else:
        page = tl.load(row + token // pages.size, mask=token < end, other=0).to(tl.int64)
    page_exists = _exists(page, pages)
    page = tl.where(page_exists, page, 0) + tl.zeros((N,), tl.int64)
    return page, (token % pages.size).to(tl.int64), page_exists


@triton.jit
def _cast(x, DTYPE: tl.constexpr):
    if DTYPE == "fp16":
        return x.to(tl.float16)
    elif DTYPE == "bf16":
        return x.to(tl.bfloat16)
    else:
        return x.to(tl.float32)


@triton.jit
def _operand(stored, DTYPE: tl.constexpr, TILE: tl.constexpr):
    """Convert stored elements or codes exactly to the dtype of the dot."""
    if TILE.format is None:
        return stored
    elif TILE.format.element == "e4m3" and TILE.converts:
        return _cast(stored.to(tl.float8e4nv, bitcast=True), DTYPE)
    else:
        return _cast(decode(stored.to(tl.uint8, bitcast=True), TILE.format), DTYPE)


@triton.jit
def _cached(
    cache,
    key_head,
    page,
    slot,
    exists,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Load heads of tokens [N] in the dtype of the dot; zero where there is no token."""
    ALIGN: tl.constexpr = TILE.align
    row = page * cache.at.page + slot * cache.at.place + key_head.to(tl.int64) * cache.at.head
    stored = load_at(cache.ptr, tl.multiple_of(row, ALIGN), exists, WIDTH)
    if stored.second is not None:
        return Pieces(_operand(stored.first, DTYPE, TILE), _operand(stored.second, DTYPE, TILE))
    else:
        return Pieces(_operand(stored.first, DTYPE, TILE), None)


@triton.jit
def _latent_rows(cache, page, slot, exists, TILE: tl.constexpr):
    """Load latents [N, 512] and the rotated part [N, 64] from rows of 656 bytes: 512 e4m3 codes, four fp32 scales of
    128 codes each, and 64 bf16 elements. Latents are rounded to bf16, as in FlashMLA."""
    row = tl.multiple_of(page * cache.at.page + slot * cache.at.place, 16)  # in bytes
    ptr = cache.ptr + row
    number = tl.arange(0, 512)
    codes = tl.load(ptr[:, None] + number[None, :], mask=exists[:, None], other=0)
    group = tl.arange(0, 4)
    scales = (ptr + 512).to(tl.pointer_type(tl.float32), bitcast=True)
    scale = tl.load(scales[:, None] + group[None, :], mask=exists[:, None], other=0.0)
    values = tl.reshape(decode(codes, TILE.row_format), (codes.shape[0], 4, 128)) * scale[:, :, None]
    number = tl.arange(0, 64)
    rope_ptr = (ptr + 528).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    second = tl.load(rope_ptr[:, None] + number[None, :], mask=exists[:, None], other=0.0)
    return Pieces(tl.reshape(values, codes.shape).to(tl.bfloat16), second)


@triton.jit
def _scales(cache, key_head, page, slot, exists):
    """Load the scales of a head for tokens [N]."""
    at = cache.at
    row = page * at.scale_page + slot * at.scale_place + key_head.to(tl.int64) * at.scale_head
    return tl.load(cache.scale + row, mask=exists, other=0.0)


@triton.jit
def _with_sink(out, lse, sink):
    """Add the sink, a score without a value, to (out, lse) of rows [M]."""
    m_new = tl.maximum(lse, tl.minimum(sink, LARGEST))  # finite: an infinite sink takes all the weight
    m_safe = tl.where(m_new == MINUS_INFINITY, 0.0, m_new)
    weight, sink_weight = tl.exp2((lse - m_safe) * LOG2E), tl.exp2((sink - m_safe) * LOG2E)
    total = weight + sink_weight
    share = tl.where(total == 0.0, 0.0, weight / tl.where(total == 0.0, 1.0, total))
    joint_lse = m_new + tl.log2(tl.where(total == 0.0, 1.0, total)) * LN2
    return times(out, share[:, None]), tl.where(sink == float("inf"), sink, joint_lse)


@triton.jit
def _bounds(sequence, pages, counts):
    """Return (own key of the first query, number of tokens, first key that any query sees, whether the pages hold all
    tokens) of a sequence. A cache without pages has capacity 0."""
    room = tl.where(pages.number > 0, (pages.width * pages.size).to(tl.int64), 0)
    stored = tl.load(pages.lengths + sequence).to(tl.int64)
    length = tl.minimum(tl.maximum(stored, 0), room).to(tl.int32)
    own = length - counts.queries.to(tl.int32)
    return own, length, tl.maximum(own - counts.left.to(tl.int32), 0), stored <= room


@triton.jit
def _rows_per_part(counts):
    """Return the number of result rows of one part: all queries and heads of all sequences."""
    return counts.sequences.to(tl.int64) * counts.queries * counts.heads


@kernel
def decode_kernel(
    query: Place,  # [sequences, queries, heads, dim]
    k: Kept,
    v: Kept,  # absent if values are the first elements of keys
    y_ptr,  # result [sequences, queries, heads, v_dim]; with several parts, one fp32 result per part
    lse_ptr,  # fp32 [sequences, queries, heads]; with several parts, one per part
    sinks_ptr,  # [heads], or None
    pages: Pages,
    counts: Counts,
    scores: Scores,
    TILE: tl.constexpr,
):
    """Attend from one tile of rows to one part of a sequence."""
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
            q, q_scale = _scaled_queries(q, TILE)
            if not TILE.scaled_by_token:
                q_scale *= tl.load(k.scale + key_head * k.at.scale_head)
            factor, scale = (factor if TILE.capped else factor * q_scale), scale * q_scale
        m_i = tl.full((M,), MINUS_INFINITY, tl.float32)
        l_i = tl.zeros((M,), tl.float32)
        acc = zeros(M, V)
        # True if a visible key lies in a missing page: in any tile (scalar), or per column of the tiles [N].
        missing = begin < begin if TILE.whole_pages else tl.zeros((N,), tl.int1)
        for start in range(begin, end, N):
            start = tl.multiple_of(start, N)
            token = start + tl.arange(0, N)
            exists = token < end
            page, slot, page_exists = _slots(start, first, end, sequence, pages, N, TILE.whole_pages)
            missing |= (page_exists == 0) if TILE.whole_pages else exists & (page_exists == 0)
            if TILE.row_format is not None:
                keys = _latent_rows(k, page, slot, exists, TILE)
            else:
                keys = _cached(k, key_head, page, slot, exists, QK, TILE.keys, TILE)
            s = across(q, keys)  # [M, N]
            if TILE.scaled_by_token:
                key_scale = _scales(k, key_head, page, slot, exists)
                s *= key_scale[None, :]
            if TILE.capped:
                s, _ = capped(s * scale[:, None], Scores(1.0, scores.softcap), True)
            if (start + N > own + 1) | (start < own + counts.queries - 1 - counts.left):
                seen = (token[None, :] <= own_key[:, None]) & (
                    token[None, :] >= own_key[:, None] - counts.left
                )
                s = tl.where(seen, s, MINUS_INFINITY)
            s *= factor[:, None]
            m_new = tl.maximum(m_i, tl.max(s, axis=1))
            m_safe = tl.where(m_new == MINUS_INFINITY, 0.0, m_new)
            p = tl.exp2(s - m_safe[:, None])
            alpha = tl.exp2(m_i - m_safe)
            l_i = l_i * alpha + tl.sum(p, axis=1)
            if TILE.latent:
                values = Pieces(keys.first, None)
                if TILE.scaled_by_token:
                    p *= key_scale[None, :]
            else:
                values = _cached(v, key_head, page, slot, exists, V, TILE.values, TILE)
                if TILE.scaled_by_token:
                    p *= _scales(v, key_head, page, slot, exists)[None, :]
            acc = add_product(times(acc, alpha[:, None]), p.to(values.first.dtype), values)
            m_i = m_new
        sound &= (missing if TILE.whole_pages else tl.max(missing.to(tl.int32), axis=0)) == 0
        l_i = tl.where(sound, l_i, float("nan"))
        empty = l_i == 0.0
        out = times(acc, (1.0 / tl.where(empty, 1.0, l_i))[:, None])
        if TILE.format is not None and not TILE.scaled_by_token:
            if TILE.latent:
                out = times(out, tl.load(k.scale + key_head * k.at.scale_head))
            else:
                out = times(out, tl.load(v.scale + key_head * v.at.scale_head))
        lse = tl.where(empty, MINUS_INFINITY, (m_i + tl.log2(l_i)) * LN2)
        row = (sequence * counts.queries + rows.query) * counts.heads + rows.head
        if TILE.direct:
            if sinks_ptr is not None:
                sink = tl.load(sinks_ptr + rows.head).to(tl.float32)
                out, lse = _with_sink(out, lse, sink)
        else:
            row += part * _rows_per_part(counts)
        tl.store(lse_ptr + row, lse, mask=rows.exists)
        store_at(out, y_ptr, tl.multiple_of(row * V.dim, OUT_ALIGN), rows.exists, V)


@triton.jit
def _scaled_queries(q, TILE: tl.constexpr):
    """Return (queries in the dtype of the dot, factors [M] to multiply them by). Scaling each row by a power of two
    keeps it in the range of fp16, exactly except for elements that are negligible next to the row's largest."""
    q_max = tl.max(tl.abs(q.first.to(tl.float32)), axis=1)
    if q.second is not None:
        q_max = tl.maximum(q_max, tl.max(tl.abs(q.second.to(tl.float32)), axis=1))
    # Keep only the exponent bits of the largest element; 0 and infinity keep theirs.
    q_scale = (q_max.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    q_scale = tl.where((q_scale > 1e-30) & (q_scale < 1e30), q_scale, 1.0)
    first = _cast(q.first.to(tl.float32) * (1.0 / q_scale)[:, None], TILE.keys)
    if q.second is not None:
        second = _cast(q.second.to(tl.float32) * (1.0 / q_scale)[:, None], TILE.keys)
        return Pieces(first, second), q_scale
    else:
        return Pieces(first, None), q_scale


# ---- merging parts --------------------------------------------------------------------------------------


@kernel
def join_kernel(
    part_ptr,  # fp32 [parts, sequences, queries, heads, v_dim]
    part_lse_ptr,  # fp32 [parts, sequences, queries, heads]
    y_ptr,  # [sequences, queries, heads, v_dim]
    lse_ptr,  # fp32 [sequences, queries, heads]
    sinks_ptr,  # [heads], or None
    pages: Pages,
    counts: Counts,
    TILE: tl.constexpr,
):
    """Merge the parts of a sequence, in order, for some heads of one query."""
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
    part_stride = _rows_per_part(counts)
    m_i = tl.full((M,), MINUS_INFINITY, tl.float32)
    for part in range(first, last):
        lse = tl.load(part_lse_ptr + part * part_stride + row, mask=exists, other=MINUS_INFINITY)
        m_i = tl.maximum(m_i, lse)
    m_safe = tl.where(m_i == MINUS_INFINITY, 0.0, m_i)
    l_i = tl.where(sound, tl.zeros((M,), tl.float32), float("nan"))
    acc = zeros(M, V)
    for part in range(first, last):
        at = part * part_stride + row
        lse = tl.load(part_lse_ptr + at, mask=exists, other=MINUS_INFINITY)
        weight = tl.exp2((lse - m_safe) * LOG2E)
        l_i += weight
        acc = plus(
            acc, times(load_at(part_ptr, tl.multiple_of(at * V.dim, ALIGN), exists, V), weight[:, None])
        )
    empty = l_i == 0.0
    out = times(acc, (1.0 / tl.where(empty, 1.0, l_i))[:, None])
    lse = tl.where(empty, MINUS_INFINITY, m_i + tl.log2(tl.where(empty, 1.0, l_i)) * LN2)
    if sinks_ptr is not None:
        out, lse = _with_sink(out, lse, tl.load(sinks_ptr + head, mask=exists, other=0.0).to(tl.float32))
    tl.store(lse_ptr + row, lse, mask=exists)
    store_at(out, y_ptr, tl.multiple_of(row * V.dim, ALIGN), exists, V)
