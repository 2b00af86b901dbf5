"""The kernels of attention: values as codes, forward, and the gradients of queries and of keys and values.

Heads are [sequence, tokens, heads, numbers] anywhere in memory. Scores are in base 2 inside: their factor is
scale * log2(e).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...language import tl, triton
from ...runtime import kernel
from ...tiles.numbers import encode
from ...tiles.reduce import amax, larger
from ...tiles.scales import fp32_scale, scaled
from ..common.copies import Encoding, StridedCodes, Tile, store_rows
from ..common.heads import Place
from ..common.passes import FP32_MAX
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
from .sequences import Band, Lengths, keys_seen, or_nan, queries_seeing, sees, sequence_at, sequence_of

COLUMNS = tl.constexpr(VALUE_COLUMNS)

# Weights are at most 1 and multiplied by it before they are rounded to e4m3, whose largest number is 448. The range of
# e4m3 then reaches down to 2^-17 of a row's largest weight.
RAISED = tl.constexpr(256.0)
LOG_RAISED = tl.constexpr(8.0)

# ---- structs --------------------------------------------------------------------------------------------


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


# ---- where a tile lies ----------------------------------------------------------------------------------


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


# ---- values as codes ------------------------------------------------------------------------------------


@triton.jit
def _stride(n, ALIGN: tl.constexpr):
    return tl.multiple_of(n.to(tl.int64), ALIGN)


@triton.jit
def _turned(codes, key_head, token, number, V: tl.constexpr):
    """A pointer to the codes of a sequence in a head, of which `token` keys and `number` sequences lie before it. Each
    sequence begins at a multiple of COLUMNS: that leaves fewer than COLUMNS columns unused after it."""
    row = key_head.to(tl.int64) * V.numbers * _stride(codes.columns, COLUMNS)
    return codes.ptr + row + (token // COLUMNS + number) * COLUMNS


@triton.jit
def _within(row, begin, end, BANDED: tl.constexpr):
    """Which rows are from `begin`, which is 0 unless queries have a band, to before `end`."""
    if BANDED:
        return (row >= begin) & (row < end)
    else:
        return row < end


@kernel
def value_kernel(
    value: Place,
    codes: ValueCodes,
    lengths: Lengths,
    heads: Heads,
    band: Band,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,  # of the codes of a number of all keys
    CAST: tl.constexpr,
):
    """TILE.m numbers of the values of a head of a sequence: their largest in TILE.n keys at a time, then their codes,
    with zeros for keys that no query sees, and up to a multiple of COLUMNS."""
    N: tl.constexpr = TILE.n
    M: tl.constexpr = TILE.m
    V: tl.constexpr = TILE.v
    ALIGN: tl.constexpr = TILE.align
    parts = tl.cdiv(V.numbers, M)
    part = tl.program_id(0) % parts
    key_heads = heads.q // heads.group
    key_head = tl.program_id(0) // parts % key_heads
    number = (tl.program_id(0) // parts // key_heads).to(tl.int64)
    sequence = sequence_of(number, lengths, band)
    batch, start = sequence.batch, sequence.k_start
    seen, seen_end, _, _ = keys_seen(sequence, band, sequence.q, TILE.banded)
    lane = part * M + tl.arange(0, M)  # [M], of a head's numbers
    exists = lane < V.numbers
    step = _stride(value.at.token, ALIGN)
    from_ptr = _base(value, batch, start, key_head, ALIGN) + lane[None, :]
    largest = tl.zeros((M,), tl.float32)
    for first in range(seen // N * N, seen_end, N):
        row = first + tl.arange(0, N)
        mask = _within(row, seen, seen_end, TILE.banded)[:, None] & exists[None, :]
        x = tl.load(from_ptr + row.to(tl.int64)[:, None] * step, mask=mask, other=0.0)  # [N, M]
        largest = larger(largest, amax(x.to(tl.float32), axis=0))
    scale, factor = fp32_scale(largest, FP32_MAX, FORMAT)
    tl.store(codes.scale + (number * key_heads + key_head) * V.numbers + lane, scale, mask=exists)
    token = batch * lengths.k + start
    to_ptr = _turned(codes, key_head, token, number, V)
    to_ptr = to_ptr + (lane.to(tl.int64) * _stride(codes.columns, COLUMNS))[:, None]
    # There is room for all of them: the bound is for proofs, which do not find that out.
    room = _stride(codes.columns, COLUMNS) // COLUMNS - token // COLUMNS - number
    end = tl.maximum(tl.minimum(tl.cdiv(sequence.k, COLUMNS), room), 0).to(tl.int32) * COLUMNS
    for first in range(0, end, N):
        row = first + tl.arange(0, N)
        mask = _within(row, seen, seen_end, TILE.banded)[:, None] & exists[None, :]
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
    copy: StridedCodes,  # the row-wise copy of the result [tokens, heads * numbers], or absent
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
        tiles += lengths.number + 1
    tile = tiles - 1 - tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % heads.q
    sequence = sequence_at(tile, tl.program_id(0) // tiles // heads.q, lengths, band, False, M)
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
    total = or_nan(tl.zeros((M,), tl.float32), sequence, lengths)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        # An infinite sink takes everything: its maximum is replaced by a finite one, so that differences are not NaN.
        largest = tl.zeros_like(largest) + tl.minimum(sink * LOG2E, LARGEST)
        # Where the maximum would lose a NaN, the sum has it.
        weight = tl.where(sink == MINUS_INFINITY, 0.0, tl.where(sink == sink, 1.0, sink))
        total += tl.where(row < sequence.q, weight, 0.0)
    if value_codes.ptr is not None:
        total *= RAISED
    top = tl.full((M,), MINUS_INFINITY, tl.float32)
    sums = zeros(M, V)
    begin, end, all_begin, all_end = keys_seen(sequence, band, M, BANDED)
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
            s = tl.where(sees(row[:, None], other[None, :], sequence, band, BANDED), s, MINUS_INFINITY)
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
        lse = tl.where((row < sequence.q) & (sink == float("inf")), sink, lse)
    lse_row = (sequence.batch * heads.q + head) * lengths.q + sequence.q_start
    tl.store(lse_ptr + lse_row + row, lse, mask=row < limit)
    if max_ptr is not None:
        seen = tl.where(row < limit, top, MINUS_INFINITY)
        number = sequence.batch * tiles + tile
        highest = or_nan(tl.max(seen, axis=0) * LN2, sequence, lengths)
        tl.store(max_ptr + number * heads.q + head, highest)
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
        lost = tl.where((lse != MINUS_INFINITY) & (sink != MINUS_INFINITY) & exists, share * delta, 0.0)
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
        tiles += lengths.number + 1
    tile = tiles - 1 - tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % heads.q
    sequence = sequence_at(tile, tl.program_id(0) // tiles // heads.q, lengths, band, False, M)
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
    begin, end, all_begin, all_end = keys_seen(sequence, band, M, BANDED)
    for start in range(begin // N * N, end, N):
        start = tl.multiple_of(start, N)
        k = load_heads(k_ptr, key.at.token, start, sequence.k, N, QK, ALIGN)
        v = load_heads(v_ptr, value.at.token, start, sequence.k, N, V, ALIGN)
        s, slope = capped(across(q, k), scores, CAPPED)  # [M, N]
        if (start < all_begin) | (start + N > all_end):
            other = start + tl.arange(0, N)
            s = tl.where(sees(row[:, None], other[None, :], sequence, band, BANDED), s, MINUS_INFINITY)
        p = tl.exp2(s * factor - lse[:, None])
        ds = p * (across(dout, v) - delta[:, None])
        if CAPPED:
            ds = ds * slope
        sums = add_product(sums, ds.to(k.first.dtype), k)
    dq_ptr = _base(dquery, sequence.batch, sequence.q_start, head, ALIGN)
    dq = times(sums, or_nan(scores.scale, sequence, lengths))
    store_heads(dq, dq_ptr, dquery.at.token, sequence.first, limit, QK, ALIGN)


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
        tiles += lengths.number + 1
    key_heads = heads.q // heads.group
    tile = tl.program_id(0) % tiles
    key_head = tl.program_id(0) // tiles % key_heads
    sequence = sequence_at(tile, tl.program_id(0) // tiles // key_heads, lengths, band, True, N)
    other = sequence.first + tl.arange(0, N)
    limit = sequence.first + sequence.exist
    factor = factor_of(scores, CAPPED)

    k_ptr = _base(key, sequence.batch, sequence.k_start, key_head, ALIGN)
    v_ptr = _base(value, sequence.batch, sequence.k_start, key_head, ALIGN)
    k = load_heads(k_ptr, key.at.token, sequence.first, sequence.k, N, QK, ALIGN)
    v = load_heads(v_ptr, value.at.token, sequence.first, sequence.k, N, V, ALIGN)
    dk, dv = zeros(N, QK), zeros(N, V)
    begin, end, all_begin, all_end = queries_seeing(sequence, band, N, BANDED)
    # A tile whose last keys do not exist has to hide them from every query.
    hidden = sequence.first + N > sequence.k
    begin = begin // M * M
    blocks = tl.cdiv(tl.maximum(end - begin, 0), M)
    # Triton's pipelines divide for the first steps even if there are none.
    per_head = tl.maximum(blocks, 1)
    for step in range(blocks * heads.group):
        # The bound always holds, which a proof does not find out.
        head = key_head * heads.group + tl.minimum(step // per_head, heads.group - 1)
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
            s = tl.where(sees(row[None, :], other[:, None], sequence, band, BANDED), s, MINUS_INFINITY)
        p = tl.exp2(s * factor - lse[None, :])
        dv = add_product(dv, p.to(dout.first.dtype), dout)
        ds = p * (across(v, dout) - delta[None, :])
        if CAPPED:
            ds = ds * slope
        dk = add_product(dk, ds.to(q.first.dtype), q)
    dk_ptr = _base(dkey, sequence.batch, sequence.k_start, key_head, ALIGN)
    dv_ptr = _base(dvalue, sequence.batch, sequence.k_start, key_head, ALIGN)
    dk, dv = times(dk, or_nan(scores.scale, sequence, lengths)), times(dv, or_nan(1.0, sequence, lengths))
    store_heads(dk, dk_ptr, dkey.at.token, sequence.first, limit, QK, ALIGN)
    store_heads(dv, dv_ptr, dvalue.at.token, sequence.first, limit, V, ALIGN)
