"""The kernels of attention: values as codes, forward, and the gradients of queries and of keys and values.

Heads are [sequence, tokens, heads, numbers] anywhere in memory. Scores are in base 2 inside: their factor is
scale * log2(e).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ...language import tl, triton
from ...runtime import kernel
from ...tiles.numbers import encode
from ...tiles.reduce import amax, larger
from ...tiles.scales import fp32_scale, scaled
from ..common.copies import Codes, Encoding, Tile, store_rows
from ..common.groups import GroupEnds, group_tile
from ..common.results import FP32_MAX
from ..heads.layout import Place
from .configs import VALUE_COLUMNS
from .pieces import (
    LARGEST,
    LN2,
    LOG2E,
    MINUS_INFINITY,
    Scores,
    across,
    add_product,
    capped,
    factor_of,
    load_heads,
    load_turned,
    rounded,
    store_heads,
    times,
    times_columns,
    zeros,
)

COLUMNS = tl.constexpr(VALUE_COLUMNS)

# Weights are at most 1 and multiplied by it before they are rounded to e4m3, whose largest number is 448. The range of
# e4m3 then reaches down to 2^-17 of a row's largest weight.
RAISED = tl.constexpr(256.0)
LOG_RAISED = tl.constexpr(8.0)

# ---- structs --------------------------------------------------------------------------------------------


class Lengths(NamedTuple):
    """How long sequences are. Packed ones follow each other: sequence s begins at token starts[s]."""

    q_starts: Tensor | None  # [number + 1], or None: each sequence has q queries and k keys
    k_starts: Tensor | None
    kv_lengths: Tensor | None  # [number]: how many of its keys each sequence uses, or None: all of them
    number: int  # of sequences
    q: int  # queries of a sequence; of all of them if they are packed
    k: int


class ValueCodes(NamedTuple):
    """Values as codes in e4m3, transposed, with a scale for each sequence, head and number. Absent where values are
    multiplied as they are."""

    ptr: Tensor | None  # bytes [key heads, numbers, columns]
    scale: Tensor | None  # fp32 [sequences, key heads, numbers]
    columns: int  # a multiple of COLUMNS


class Heads(NamedTuple):
    """How many heads there are. `group` heads of queries share one of keys."""

    q: int
    group: int


class Band(NamedTuple):
    """Which keys a query sees: from `left` before its own to `right` after it."""

    left: int
    right: int
    lower: int  # 1: the last query's own key is the last one; 0: the first query's own key is the first one


class Sequence(NamedTuple):
    """A sequence, where it lies, and a tile of its queries or keys."""

    number: Any  # int64
    batch: Any  # the same in tensors that are not packed; else 0
    q_start: Any  # int64, of packed tensors
    k_start: Any
    q: Any  # how many queries there are, int32
    k: Any
    first: Any  # of the tile, counted in the sequence, int32
    exist: Any  # rows of the tile that are in the tensor
    offset: Any  # the own key of query i is i + offset


# ---- where a tile lies ----------------------------------------------------------------------------------


@triton.jit
def _sequence(tile, rest, lengths, band, OF_KEYS: tl.constexpr, ROWS: tl.constexpr):
    """The sequence of a tile, and the tile's first row in it. `rest` is the sequence's number if nothing is packed."""
    starts = lengths.k_starts if OF_KEYS else lengths.q_starts
    size = lengths.k if OF_KEYS else lengths.q
    if starts is None:
        batch = rest.to(tl.int64)
        number = batch
        q_start, k_start = batch * 0, batch * 0
        q, k = lengths.q.to(tl.int32), lengths.k.to(tl.int32)
        first = (tile * ROWS).to(tl.int32)
        exist = tl.minimum(size.to(tl.int32) - first, ROWS)
    else:
        ends = GroupEnds(starts + 1, lengths.number, 1)
        number, row, exist, _ = group_tile(tile.to(tl.int64), ends, size, ROWS)
        # Past the last sequence there may be tokens that belong to none. They have no keys.
        known = number < lengths.number
        number = tl.minimum(number, lengths.number - 1)
        batch = number * 0
        q_start = tl.load(lengths.q_starts + number).to(tl.int64)
        k_start = tl.load(lengths.k_starts + number).to(tl.int64)
        q = (tl.load(lengths.q_starts + number + 1) - q_start).to(tl.int32)
        k = (tl.load(lengths.k_starts + number + 1) - k_start).to(tl.int32)
        q, k = tl.where(known, q, 0), tl.where(known, k, 0)
        if OF_KEYS:
            k_start = tl.where(known, k_start, row)
            first = (row - k_start).to(tl.int32)
        else:
            q_start = tl.where(known, q_start, row)
            first = (row - q_start).to(tl.int32)
        exist = exist.to(tl.int32)
    if lengths.kv_lengths is not None:
        k = tl.maximum(tl.minimum(k, tl.load(lengths.kv_lengths + number).to(tl.int32)), 0)
    return Sequence(number, batch, q_start, k_start, q, k, first, exist, (k - q) * band.lower)


@triton.jit
def _base(place, batch, start, head, ALIGN: tl.constexpr):
    """A pointer to the first token of a sequence in a head."""
    at = place.at
    off = batch * at.batch + start * at.token + head.to(tl.int64) * at.head
    ptr = place.ptr + tl.multiple_of(off, ALIGN)
    if place.ptr.dtype.element_ty == tl.uint8:
        # The pointer is cast, not the values: a cast between a load and a dot would take the way through registers.
        return ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    else:
        return ptr


@triton.jit
def _scales(place, batch, start, head, first, limit, ROWS: tl.constexpr):
    """The scales of a head of tokens from `first` on, 0 from `limit` on."""
    row = first + tl.arange(0, ROWS)
    off = batch * place.at.batch + head.to(tl.int64) * place.at.head + (start + row) * place.at.token
    return tl.load(place.ptr + off, mask=row < limit, other=0.0)


# ---- who sees whom ---------------------------------------------------------------------------------------


@triton.jit
def _sees(query, key, sequence, band, BANDED: tl.constexpr):
    """Which queries see which keys; both are counted in their sequence, and broadcast against each other."""
    seen = key < sequence.k
    if BANDED:
        own = query + sequence.offset
        seen = seen & (key <= own + band.right) & (key >= own - band.left)
    return seen


@triton.jit
def _keys_seen(sequence, band, ROWS: tl.constexpr, BANDED: tl.constexpr):
    """(first key that any query of a tile sees, the key after the last; first key from which on all queries see
    keys, the key after the last that all of them see)."""
    if BANDED:
        first = sequence.first + sequence.offset  # the own key of the first query
        last = tl.minimum(sequence.first + ROWS, sequence.q) - 1 + sequence.offset
        begin = tl.maximum(first - band.left, 0)
        end = tl.minimum(last + band.right + 1, sequence.k)
        return begin, end, last - band.left, tl.minimum(first + band.right + 1, sequence.k)
    else:
        return sequence.first * 0, sequence.k, sequence.first * 0, sequence.k


@triton.jit
def _queries_seeing(sequence, band, ROWS: tl.constexpr, BANDED: tl.constexpr):
    """The same for the queries that see keys of a tile."""
    if BANDED:
        first = sequence.first - sequence.offset  # the query whose own key is the first of the tile
        last = tl.minimum(sequence.first + ROWS, sequence.k) - 1 - sequence.offset
        begin = tl.maximum(first - band.right, 0)
        end = tl.minimum(last + band.left + 1, sequence.q)
        return begin, end, last - band.right, first + band.left + 1
    else:
        return sequence.first * 0, sequence.q, sequence.first * 0, sequence.q


# ---- values as codes ------------------------------------------------------------------------------------


@triton.jit
def _keys(number, lengths):
    """Of a sequence: its place in the batch, or where its packed keys begin, and how many it has."""
    if lengths.k_starts is None:
        batch, start = number, number * 0
        keys = lengths.k.to(tl.int32)
    else:
        batch, start = number * 0, tl.load(lengths.k_starts + number).to(tl.int64)
        keys = (tl.load(lengths.k_starts + number + 1) - start).to(tl.int32)
    if lengths.kv_lengths is not None:
        keys = tl.maximum(tl.minimum(keys, tl.load(lengths.kv_lengths + number).to(tl.int32)), 0)
    return batch, start, keys


@triton.jit
def _stride(n, ALIGN: tl.constexpr):
    return tl.multiple_of(n.to(tl.int64), ALIGN)


@triton.jit
def _turned(codes, key_head, token, number, V: tl.constexpr):
    """A pointer to the codes of a sequence in a head, of which `token` keys and `number` sequences lie before it. Each
    sequence begins at a multiple of COLUMNS: that leaves fewer than COLUMNS columns unused after it."""
    row = key_head.to(tl.int64) * V.numbers * _stride(codes.columns, COLUMNS)
    return codes.ptr + row + (token // COLUMNS + number) * COLUMNS


@kernel
def value_kernel(
    value: Place,
    codes: ValueCodes,
    lengths: Lengths,
    heads: Heads,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,  # of the codes of a number of all keys
    CAST: tl.constexpr,
):
    """TILE.m numbers of the values of a head of a sequence: their largest in TILE.n keys at a time, then their codes,
    with zeros up to a multiple of COLUMNS."""
    N: tl.constexpr = TILE.n
    M: tl.constexpr = TILE.m
    V: tl.constexpr = TILE.v
    ALIGN: tl.constexpr = TILE.align
    parts = tl.cdiv(V.numbers, M)
    part = tl.program_id(0) % parts
    key_heads = heads.q // heads.group
    key_head = tl.program_id(0) // parts % key_heads
    number = (tl.program_id(0) // parts // key_heads).to(tl.int64)
    batch, start, keys = _keys(number, lengths)
    lane = part * M + tl.arange(0, M)  # [M], of a head's numbers
    exists = lane < V.numbers
    step = _stride(value.at.token, ALIGN)
    from_ptr = _base(value, batch, start, key_head, ALIGN) + lane[None, :]
    largest = tl.zeros((M,), tl.float32)
    for first in range(0, keys, N):
        row = first + tl.arange(0, N)
        mask = (row < keys)[:, None] & exists[None, :]
        x = tl.load(from_ptr + row.to(tl.int64)[:, None] * step, mask=mask, other=0.0)  # [N, M]
        largest = larger(largest, amax(x.to(tl.float32), axis=0))
    scale, factor = fp32_scale(largest, FP32_MAX, FORMAT)
    tl.store(codes.scale + (number * key_heads + key_head) * V.numbers + lane, scale, mask=exists)
    to_ptr = _turned(codes, key_head, batch * lengths.k + start, number, V)
    to_ptr = to_ptr + (lane.to(tl.int64) * _stride(codes.columns, COLUMNS))[:, None]
    end = tl.cdiv(keys, COLUMNS) * COLUMNS
    for first in range(0, end, N):
        row = first + tl.arange(0, N)
        mask = (row < keys)[:, None] & exists[None, :]
        x = tl.load(from_ptr + row.to(tl.int64)[:, None] * step, mask=mask, other=0.0).to(tl.float32)
        made = encode(scaled(x, factor[None, :], FORMAT), FORMAT, CAST)
        tl.store(to_ptr + row[None, :], tl.trans(made), mask=exists[:, None] & (row < end)[None, :])


# ---- forward --------------------------------------------------------------------------------------------


@kernel
def attention_kernel(
    query: Place,
    key: Place,
    value: Place,
    query_scale: Place,  # fp32, a number for each query and head, if queries and keys are codes; else absent
    key_scale: Place,
    value_codes: ValueCodes,  # in place of `value`, or absent
    y: Place,  # its dtype alone is read if nothing but a copy is wanted
    copy: Codes,  # the row-wise copy of the result [tokens, heads * numbers], or absent
    lse_ptr,  # fp32 [sequences, heads, queries], of packed sequences [heads, tokens]
    max_ptr,  # fp32 [tiles, heads]: the largest score of each tile; or None
    sinks_ptr,  # [heads], or None
    lengths: Lengths,
    heads: Heads,
    band: Band,
    scores: Scores,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,  # of the copy, or None
    CAST: tl.constexpr,
    INPUT_MAX: tl.constexpr,
):
    """A tile of queries of a head. Tiles at the end of sequences come first: under a causal mask they take longest."""
    M: tl.constexpr = TILE.m
    N: tl.constexpr = TILE.n
    QK: tl.constexpr = TILE.qk
    V: tl.constexpr = TILE.v
    ALIGN: tl.constexpr = TILE.align
    CAPPED: tl.constexpr = TILE.capped
    BANDED: tl.constexpr = TILE.banded
    tiles = tl.cdiv(lengths.q, M)
    if lengths.q_starts is not None:
        tiles += lengths.number
    tile = tiles - 1 - tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % heads.q
    sequence = _sequence(tile, tl.program_id(0) // tiles // heads.q, lengths, band, False, M)
    key_head = head // heads.group
    row = sequence.first + tl.arange(0, M)  # [M]
    limit = sequence.first + sequence.exist
    factor = factor_of(scores, CAPPED)

    q_ptr = _base(query, sequence.batch, sequence.q_start, head, ALIGN)
    k_ptr = _base(key, sequence.batch, sequence.k_start, key_head, ALIGN)
    if value_codes.ptr is None:
        v_ptr = _base(value, sequence.batch, sequence.k_start, key_head, ALIGN)
    else:
        tokens = sequence.batch * lengths.k + sequence.k_start
        v_ptr = _turned(value_codes, key_head, tokens, sequence.number, V)
    q = load_heads(q_ptr, query.at.token, sequence.first, limit, M, QK, ALIGN)
    if query_scale.ptr is not None:
        row_scale = _scales(query_scale, sequence.batch, sequence.q_start, head, sequence.first, limit, M)
    largest = tl.full((M,), MINUS_INFINITY, tl.float32)
    total = tl.zeros((M,), tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        # An infinite sink takes everything; a finite one stands for it, of which a difference can be taken.
        largest = tl.zeros_like(largest) + tl.minimum(sink * LOG2E, LARGEST)
        total += tl.where(sink == MINUS_INFINITY, 0.0, 1.0)
    if value_codes.ptr is not None:
        total *= RAISED
    top = tl.full((M,), MINUS_INFINITY, tl.float32)
    sums = zeros(M, V)
    begin, end, all_begin, all_end = _keys_seen(sequence, band, M, BANDED)
    for start in range(begin // N * N, end, N):
        start = tl.multiple_of(start, N)
        k = load_heads(k_ptr, key.at.token, start, sequence.k, N, QK, ALIGN)
        products = across(q, k)  # [M, N]
        if query_scale.ptr is not None:
            own = _scales(key_scale, sequence.batch, sequence.k_start, key_head, start, sequence.k, N)
            products = products.to(tl.float32) * row_scale[:, None] * own[None, :]
        s, _ = capped(products, scores, CAPPED)
        if (start < all_begin) | (start + N > all_end):
            other = start + tl.arange(0, N)
            s = tl.where(_sees(row[:, None], other[None, :], sequence, band, BANDED), s, MINUS_INFINITY)
        highest = tl.max(s, axis=1) * factor
        if max_ptr is not None:
            top = tl.maximum(top, highest)
        joined = tl.maximum(largest, highest)
        # A row that has seen nothing yet is measured against 0: infinities must not be subtracted from each other.
        reference = tl.where(joined == MINUS_INFINITY, 0.0, joined)
        least = reference if value_codes.ptr is None else reference - LOG_RAISED
        p = tl.exp2(s * factor - least[:, None])
        fade = tl.exp2(largest - reference)
        total = total * fade + tl.sum(p, axis=1)
        if value_codes.ptr is None:
            v = load_heads(v_ptr, value.at.token, start, sequence.k, N, V, ALIGN)
        else:
            v = load_turned(v_ptr, value_codes.columns, start, sequence.k, N, V, COLUMNS)
        sums = add_product(times(sums, fade[:, None]), p.to(v.first.dtype), v)
        largest = joined

    empty = total == 0.0
    out = times(sums, 1.0 / tl.where(empty, 1.0, total)[:, None])
    if value_codes.ptr is not None:
        scale_row = sequence.number * (heads.q // heads.group) + key_head
        out = times_columns(out, value_codes.scale + scale_row * V.numbers, V)
        total *= 1.0 / RAISED
    lse = tl.where(empty, MINUS_INFINITY, (largest + tl.log2(total)) * LN2)
    if sinks_ptr is not None:
        # Tokens that belong to no sequence see nothing, not even the sink.
        lse = tl.where(row < sequence.q, tl.where(sink == float("inf"), sink, lse), MINUS_INFINITY)
    lse_row = (sequence.batch * heads.q + head) * lengths.q + sequence.q_start
    tl.store(lse_ptr + lse_row + row, lse, mask=row < limit)
    if max_ptr is not None:
        seen = tl.where(row < limit, top, MINUS_INFINITY)
        number = sequence.batch * tiles + tile
        tl.store(max_ptr + number * heads.q + head, tl.max(seen, axis=0) * LN2)
    if FORMAT is None:
        y_ptr = _base(y, sequence.batch, sequence.q_start, head, ALIGN)
        store_heads(out, y_ptr, y.at.token, sequence.first, limit, V, ALIGN)
    else:
        # Rows of the copy are tokens in the order of y's memory.
        cols = heads.q * V.numbers
        first = (sequence.batch * y.at.batch + (sequence.q_start + sequence.first) * y.at.token) // cols
        step = y.at.token // cols
        value = rounded(out.first, y.ptr).to(tl.float32)
        store_rows(
            tl.where((row < limit)[:, None], value, 0.0),
            copy,
            Tile(
                first + tl.arange(0, M) * step,
                head * V.numbers,
                first + sequence.exist * step,
                cols,
                ALIGN,
                True,
                False,
            ),
            Encoding(0.0, INPUT_MAX, FORMAT, CAST, False),
        )


# ---- backward -------------------------------------------------------------------------------------------


@kernel
def delta_kernel(
    y: Place,
    dy: Place,
    lse_ptr,  # fp32 [sequences, heads, queries], of packed sequences [heads, tokens]
    dlse_ptr,  # like lse, or None
    delta_ptr,  # like lse
    sinks_ptr,  # [heads], or None
    sink_sums_ptr,  # fp32 [tiles, heads]: the gradients of the sinks, of each tile; or None
    lengths: Lengths,  # as if nothing were packed
    heads: Heads,
    TILE: tl.constexpr,
):
    """delta = sum(dy * y) - dlse of a tile of queries: what dP is measured against in the gradient of the scores."""
    M: tl.constexpr = TILE.m
    V: tl.constexpr = TILE.v
    ALIGN: tl.constexpr = TILE.align
    tiles = tl.cdiv(lengths.q, M)
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % heads.q
    batch = (tl.program_id(0) // tiles // heads.q).to(tl.int64)
    first = tile * M
    row = first + tl.arange(0, M)
    exists = row < lengths.q
    a = load_heads(_base(y, batch, 0, head, ALIGN), y.at.token, first, lengths.q, M, V, ALIGN)
    b = load_heads(_base(dy, batch, 0, head, ALIGN), dy.at.token, first, lengths.q, M, V, ALIGN)
    delta = tl.sum(a.first.to(tl.float32) * b.first.to(tl.float32), axis=1)
    if a.second is not None:
        delta += tl.sum(a.second.to(tl.float32) * b.second.to(tl.float32), axis=1)
    at = (batch * heads.q + head) * lengths.q + row
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + at, mask=exists, other=0.0)
    tl.store(delta_ptr + at, delta, mask=exists)
    if sink_sums_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        lse = tl.load(lse_ptr + at, mask=exists, other=float("inf"))
        # Where the sink is all there is, its share is 1, also if both are infinite.
        share = tl.where(lse == sink, 1.0, tl.exp2((sink - lse) * LOG2E))
        lost = tl.where((lse > MINUS_INFINITY) & (sink > MINUS_INFINITY) & exists, share * delta, 0.0)
        tl.store(sink_sums_ptr + (batch * tiles + tile) * heads.q + head, -tl.sum(lost, axis=0))


@triton.jit
def _base_two(lse):
    """lse in base 2, to subtract from scores; where a row saw nothing, a number that makes no NaN."""
    return tl.where(lse == MINUS_INFINITY, 0.0, lse * LOG2E)


@kernel
def query_gradient_kernel(
    query: Place,
    key: Place,
    value: Place,
    dy: Place,
    dquery: Place,
    lse_ptr,
    delta_ptr,
    lengths: Lengths,
    heads: Heads,
    band: Band,
    scores: Scores,
    TILE: tl.constexpr,
):
    """The gradient of a tile of queries of a head."""
    M: tl.constexpr = TILE.m
    N: tl.constexpr = TILE.n
    QK: tl.constexpr = TILE.qk
    V: tl.constexpr = TILE.v
    ALIGN: tl.constexpr = TILE.align
    CAPPED: tl.constexpr = TILE.capped
    BANDED: tl.constexpr = TILE.banded
    tiles = tl.cdiv(lengths.q, M)
    if lengths.q_starts is not None:
        tiles += lengths.number
    tile = tiles - 1 - tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % heads.q
    sequence = _sequence(tile, tl.program_id(0) // tiles // heads.q, lengths, band, False, M)
    key_head = head // heads.group
    row = sequence.first + tl.arange(0, M)
    limit = sequence.first + sequence.exist
    factor = factor_of(scores, CAPPED)

    q_ptr = _base(query, sequence.batch, sequence.q_start, head, ALIGN)
    k_ptr = _base(key, sequence.batch, sequence.k_start, key_head, ALIGN)
    v_ptr = _base(value, sequence.batch, sequence.k_start, key_head, ALIGN)
    dy_ptr = _base(dy, sequence.batch, sequence.q_start, head, ALIGN)
    at = (sequence.batch * heads.q + head) * lengths.q + sequence.q_start + row
    q = load_heads(q_ptr, query.at.token, sequence.first, limit, M, QK, ALIGN)
    dout = load_heads(dy_ptr, dy.at.token, sequence.first, limit, M, V, ALIGN)
    lse = _base_two(tl.load(lse_ptr + at, mask=row < limit, other=0.0))
    delta = tl.load(delta_ptr + at, mask=row < limit, other=0.0)
    sums = zeros(M, QK)
    begin, end, all_begin, all_end = _keys_seen(sequence, band, M, BANDED)
    for start in range(begin // N * N, end, N):
        start = tl.multiple_of(start, N)
        k = load_heads(k_ptr, key.at.token, start, sequence.k, N, QK, ALIGN)
        v = load_heads(v_ptr, value.at.token, start, sequence.k, N, V, ALIGN)
        s, slope = capped(across(q, k), scores, CAPPED)  # [M, N]
        if (start < all_begin) | (start + N > all_end):
            other = start + tl.arange(0, N)
            s = tl.where(_sees(row[:, None], other[None, :], sequence, band, BANDED), s, MINUS_INFINITY)
        p = tl.exp2(s * factor - lse[:, None])
        ds = p * (across(dout, v) - delta[:, None])
        if CAPPED:
            ds = ds * slope
        sums = add_product(sums, ds.to(k.first.dtype), k)
    dq_ptr = _base(dquery, sequence.batch, sequence.q_start, head, ALIGN)
    store_heads(times(sums, scores.scale), dq_ptr, dquery.at.token, sequence.first, limit, QK, ALIGN)


@kernel
def key_gradient_kernel(
    query: Place,
    key: Place,
    value: Place,
    dy: Place,
    dkey: Place,
    dvalue: Place,
    lse_ptr,
    delta_ptr,
    lengths: Lengths,
    heads: Heads,
    band: Band,
    scores: Scores,
    TILE: tl.constexpr,
):
    """The gradients of a tile of keys and values: over the heads that share them, in order."""
    M: tl.constexpr = TILE.m
    N: tl.constexpr = TILE.n
    QK: tl.constexpr = TILE.qk
    V: tl.constexpr = TILE.v
    ALIGN: tl.constexpr = TILE.align
    CAPPED: tl.constexpr = TILE.capped
    BANDED: tl.constexpr = TILE.banded
    tiles = tl.cdiv(lengths.k, N)
    if lengths.k_starts is not None:
        tiles += lengths.number
    key_heads = heads.q // heads.group
    tile = tl.program_id(0) % tiles
    key_head = tl.program_id(0) // tiles % key_heads
    sequence = _sequence(tile, tl.program_id(0) // tiles // key_heads, lengths, band, True, N)
    other = sequence.first + tl.arange(0, N)
    limit = sequence.first + sequence.exist
    factor = factor_of(scores, CAPPED)

    k_ptr = _base(key, sequence.batch, sequence.k_start, key_head, ALIGN)
    v_ptr = _base(value, sequence.batch, sequence.k_start, key_head, ALIGN)
    k = load_heads(k_ptr, key.at.token, sequence.first, sequence.k, N, QK, ALIGN)
    v = load_heads(v_ptr, value.at.token, sequence.first, sequence.k, N, V, ALIGN)
    dk, dv = zeros(N, QK), zeros(N, V)
    begin, end, all_begin, all_end = _queries_seeing(sequence, band, N, BANDED)
    # A tile whose last keys do not exist has to hide them from every query.
    hidden = sequence.first + N > sequence.k
    begin = begin // M * M
    blocks = tl.maximum(tl.cdiv(end - begin, M), 0)
    # Triton's pipelines divide for the first steps even if there are none.
    per_head = tl.maximum(blocks, 1)
    for step in range(blocks * heads.group):
        head = key_head * heads.group + step // per_head
        start = tl.multiple_of(begin + step % per_head * M, M)
        q_ptr = _base(query, sequence.batch, sequence.q_start, head, ALIGN)
        dy_ptr = _base(dy, sequence.batch, sequence.q_start, head, ALIGN)
        q = load_heads(q_ptr, query.at.token, start, sequence.q, M, QK, ALIGN)
        dout = load_heads(dy_ptr, dy.at.token, start, sequence.q, M, V, ALIGN)
        row = start + tl.arange(0, M)
        at = (sequence.batch * heads.q + head) * lengths.q + sequence.q_start + row
        # Where there is no query, nothing has any weight.
        lse = _base_two(tl.load(lse_ptr + at, mask=row < sequence.q, other=float("inf")))
        delta = tl.load(delta_ptr + at, mask=row < sequence.q, other=0.0)
        s, slope = capped(across(k, q), scores, CAPPED)  # [N, M]
        if (start < all_begin) | (start + M > all_end) | hidden:
            s = tl.where(_sees(row[None, :], other[:, None], sequence, band, BANDED), s, MINUS_INFINITY)
        p = tl.exp2(s * factor - lse[None, :])
        dv = add_product(dv, p.to(dout.first.dtype), dout)
        ds = p * (across(v, dout) - delta[None, :])
        if CAPPED:
            ds = ds * slope
        dk = add_product(dk, ds.to(q.first.dtype), q)
    dk_ptr = _base(dkey, sequence.batch, sequence.k_start, key_head, ALIGN)
    dv_ptr = _base(dvalue, sequence.batch, sequence.k_start, key_head, ALIGN)
    store_heads(times(dk, scores.scale), dk_ptr, dkey.at.token, sequence.first, limit, QK, ALIGN)
    store_heads(dv, dv_ptr, dvalue.at.token, sequence.first, limit, V, ALIGN)
