"""Attention kernels: forward, and the gradients of queries and of keys and values.

Heads are [sequence, tokens, heads, dim] with any strides. Inside the kernels scores are in base 2: their factor is
scale * log2(e).
"""

from __future__ import annotations

from ...language import tl, triton
from ...runtime import kernel
from ..common.copies import Encoding, StridedCodes, Tile, store_rows
from ..common.heads import Place
from .masks import (
    Pairs,
    Terms,
    added,
    distances,
    load_pairs,
    load_used,
    store_pairs,
    visit,
    visits_of,
)
from .pieces import (
    LARGEST,
    LN2,
    LOG2E,
    MINUS_INFINITY,
    Heads,
    Scores,
    across,
    across_groups,
    add_coded_product,
    add_product,
    capped,
    factor_of,
    first_token,
    load_heads,
    load_transposed,
    rounded,
    store_heads,
    times,
    times_columns,
    zeros,
)
from .sequences import (
    Band,
    Lengths,
    bounds_of,
    keys_between,
    keys_seen,
    or_nan,
    queries_between,
    queries_seeing,
    sees,
    sequence_at,
)
from .values import BLOCK, COLUMNS, ValueCodes, codes_ptr

# Weights are at most 1; scaling them before they are rounded to e4m3, whose largest value is 448, extends its range
# down to 2^-17 of a row's largest weight. In int8 the largest weight of a row in a tile becomes 127.
P_SCALE = tl.constexpr(256.0)
LOG2_P_SCALE = tl.constexpr(8.0)
P_SCALE_INT8 = tl.constexpr(127.0)
LOG2_P_SCALE_INT8 = tl.constexpr(6.988684686772166)

# ---- where a tile lies ----------------------------------------------------------------------------------


@triton.jit
def _base(place, batch, start, head, ALIGN: tl.constexpr):
    """Return a pointer to the first token of a sequence in a head; bytes are codes in e4m3."""
    ptr = first_token(place, batch, start, head, ALIGN)
    if place.ptr.dtype.element_ty == tl.uint8:
        # Cast the pointer, not the values: a cast between load and dot would route the operand through registers.
        return ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    else:
        return ptr


@triton.jit
def _scales(place, batch, start, head, first, limit, ROWS: tl.constexpr):
    """Load the scales of a head for ROWS tokens from `first` on; 0 from `limit` on."""
    row = first + tl.arange(0, ROWS)
    off = batch * place.at.batch + head.to(tl.int64) * place.at.head + (start + row) * place.at.token
    return tl.load(place.ptr + off, mask=row < limit, other=0.0)


# ---- forward --------------------------------------------------------------------------------------------


@kernel
def attention_kernel(
    query: Place,
    key: Place,
    value: Place,
    # If queries and keys are codes: fp32, one per query and head, or e8m0, one for every GROUP elements; else absent.
    query_scale: Place,
    key_scale: Place,
    value_codes: ValueCodes,  # in place of `value`, or absent
    y: Place,  # only its dtype is read if the kernel stores nothing but the quantized copy
    copy: StridedCodes,  # rowwise copy of the result [tokens, heads * v_dim], or absent
    lse_ptr,  # fp32 [sequences, heads, queries]; [heads, tokens] for packed sequences
    max_ptr,  # fp32 [tiles, heads]: largest score of each tile; or None
    sinks_ptr,  # [heads], or None
    lengths: Lengths,
    heads: Heads,
    band: Band,
    scores: Scores,
    terms: Terms,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,  # of the copy, or None
    CAST: tl.constexpr,
    INPUT_MAX: tl.constexpr,
):
    """Attend with one tile of queries of one head. The last tiles run first: with a causal mask they take longest."""
    M: tl.constexpr = TILE.m
    N: tl.constexpr = TILE.n
    QK: tl.constexpr = TILE.qk
    V: tl.constexpr = TILE.v
    ALIGN: tl.constexpr = TILE.align
    CAPPED: tl.constexpr = TILE.capped
    BANDED: tl.constexpr = TILE.banded
    LIMITED: tl.constexpr = TILE.limited
    IN_INT8: tl.constexpr = TILE.values == "int8"
    GROUPS: tl.constexpr = TILE.groups
    MASKED: tl.constexpr = TILE.mask is not None
    ADDED: tl.constexpr = TILE.bias is not None or TILE.sloped
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
    unit = 1.0 if ADDED else factor  # terms are added to scores that are in base 2 already

    q_ptr = _base(query, sequence.batch, sequence.q_start, head, ALIGN)
    k_ptr = _base(key, sequence.batch, sequence.k_start, key_head, ALIGN)
    if value_codes.ptr is None:
        v_ptr = _base(value, sequence.batch, sequence.k_start, key_head, ALIGN)
    else:
        UNIT: tl.constexpr = BLOCK if IN_INT8 else COLUMNS
        tokens = sequence.batch * lengths.k + sequence.k_start
        v_ptr = codes_ptr(value_codes, key_head, tokens, sequence.number, V, UNIT)
    q = load_heads(q_ptr, query.at.token, sequence.first, limit, M, QK, ALIGN)
    if GROUPS is not None:
        BYTES: tl.constexpr = GROUPS.dim & -GROUPS.dim  # divides all strides of the scales
        q_scale_ptr = first_token(query_scale, sequence.batch, sequence.q_start, head, BYTES)
        k_scale_ptr = first_token(key_scale, sequence.batch, sequence.k_start, key_head, BYTES)
        q_scale = load_heads(q_scale_ptr, query_scale.at.token, sequence.first, limit, M, GROUPS, BYTES)
    elif query_scale.ptr is not None:
        row_scale = _scales(query_scale, sequence.batch, sequence.q_start, head, sequence.first, limit, M)
    m_i = tl.full((M,), MINUS_INFINITY, tl.float32)
    l_i = or_nan(tl.zeros((M,), tl.float32), sequence, lengths)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        # An infinite sink takes all the weight: clamp the maximum to a finite value so that differences are not NaN.
        m_i = tl.zeros_like(m_i) + tl.minimum(sink * LOG2E, LARGEST)
        # tl.minimum may drop a NaN sink; the sum keeps it.
        weight = tl.where(sink == MINUS_INFINITY, 0.0, tl.where(sink == sink, 1.0, sink))
        l_i += tl.where(row < sequence.q, weight, 0.0)
    if value_codes.ptr is not None:
        l_i *= P_SCALE_INT8 if IN_INT8 else P_SCALE
    tile_max = tl.full((M,), MINUS_INFINITY, tl.float32)
    acc = zeros(M, V)
    if LIMITED:
        row_begin, row_end = bounds_of(row, sequence, lengths, band, BANDED)  # [M]
        begin, end, all_begin, all_end = keys_between(row_begin, row_end, sequence.k)
    else:
        begin, end, all_begin, all_end = keys_seen(sequence, band, M, BANDED)
    if MASKED:
        visits = visits_of(terms.blocks, sequence.batch, head, heads.q, tile, tiles, lengths.k)
        begin, end = visits.count * 0, visits.count
    STEP: tl.constexpr = 1 if MASKED else N
    for start in range(begin // STEP * STEP, end, STEP):
        if MASKED:
            block, hides = visit(visits, start, tl.cdiv(sequence.k, N))
            start = block * N
        start = tl.multiple_of(start, N)
        k = load_heads(k_ptr, key.at.token, start, sequence.k, N, QK, ALIGN)
        if GROUPS is not None:
            k_scale = load_heads(k_scale_ptr, key_scale.at.token, start, sequence.k, N, GROUPS, BYTES)
            qk = across_groups(q, q_scale, k, k_scale, scores.scale * 0.0)  # [M, N]
        else:
            qk = across(q, k)  # [M, N]
        if GROUPS is None and query_scale.ptr is not None:
            col_scale = _scales(key_scale, sequence.batch, sequence.k_start, key_head, start, sequence.k, N)
            qk = qk.to(tl.float32) * row_scale[:, None] * col_scale[None, :]
        s, _ = capped(qk, scores, CAPPED)
        if ADDED:
            col = start + tl.arange(0, N)
            s = added(s * factor, terms, head, row[:, None], col[None, :], sequence, lengths, TILE)
        if not MASKED:
            hides = (start < all_begin) | (start + N > all_end)
        if hides:
            col = start + tl.arange(0, N)
            if LIMITED:
                seen = (col[None, :] >= row_begin[:, None]) & (col[None, :] < row_end[:, None])
            else:
                seen = sees(row[:, None], col[None, :], sequence, band, BANDED)
            if MASKED:
                bits = load_pairs(
                    terms.mask, sequence.batch, head, row[:, None], col[None, :], lengths, TILE.mask
                )
                seen = seen & (bits != 0)
            s = tl.where(seen, s, MINUS_INFINITY)
        row_max = tl.max(s, axis=1) * unit
        if max_ptr is not None:
            tile_max = tl.maximum(tile_max, row_max)
        m_new = tl.maximum(m_i, row_max)
        # While a row has seen no key, m_new is -inf: subtract 0 instead, so that -inf - -inf never becomes NaN.
        m_safe = tl.where(m_new == MINUS_INFINITY, 0.0, m_new)
        alpha = tl.exp2(m_i - m_safe)
        if IN_INT8:
            # Relative to the maximum of its own tile, a weight is rounded to more bits than relative to m_new; the
            # tile's sums take the factor beta instead.
            m_tile = tl.where(row_max == MINUS_INFINITY, 0.0, row_max)
            p = tl.exp2(s * unit - (m_tile - LOG2_P_SCALE_INT8)[:, None])
            beta = tl.exp2(row_max - m_safe)
            l_i = beta * tl.sum(p, axis=1) + alpha * l_i
            v = load_transposed(v_ptr, value_codes.columns, start, sequence.k, N, V, BLOCK)
            block = tokens // BLOCK + sequence.number + start // BLOCK
            v_scale_ptr = value_codes.scale + (block * (heads.q // heads.group) + key_head) * V.dim
            acc = add_coded_product(acc, alpha[:, None], p, beta[:, None], v, v_scale_ptr, V)
        else:
            p_offset = m_safe if value_codes.ptr is None else m_safe - LOG2_P_SCALE
            p = tl.exp2(s * unit - p_offset[:, None])
            l_i = l_i * alpha + tl.sum(p, axis=1)
            if value_codes.ptr is not None:
                v = load_transposed(v_ptr, value_codes.columns, start, sequence.k, N, V, COLUMNS)
            elif MASKED:
                used = load_used(visits, 0, start, sequence.k, N)  # a weight of 0 does not hide NaN
                v = load_heads(v_ptr, value.at.token, start, sequence.k, N, V, ALIGN, used)
            else:
                v = load_heads(v_ptr, value.at.token, start, sequence.k, N, V, ALIGN)
            acc = add_product(times(acc, alpha[:, None]), p.to(v.first.dtype), v)
        m_i = m_new

    empty = l_i == 0.0
    out = times(acc, 1.0 / tl.where(empty, 1.0, l_i)[:, None])
    if IN_INT8:
        l_i *= 1.0 / P_SCALE_INT8
    elif value_codes.ptr is not None:
        scale_row = sequence.number * (heads.q // heads.group) + key_head
        out = times_columns(out, value_codes.scale + scale_row * V.dim, V)
        l_i *= 1.0 / P_SCALE
    lse = tl.where(empty, MINUS_INFINITY, (m_i + tl.log2(l_i)) * LN2)
    if sinks_ptr is not None:
        # Tokens outside all sequences see nothing, not even the sink.
        lse = tl.where((row < sequence.q) & (sink == float("inf")), sink, lse)
    lse_row = (sequence.batch * heads.q + head) * lengths.q + sequence.q_start
    tl.store(lse_ptr + lse_row + row, lse, mask=row < limit)
    if max_ptr is not None:
        seen = tl.where(row < limit, tile_max, MINUS_INFINITY)
        number = sequence.batch * tiles + tile
        row_max = or_nan(tl.max(seen, axis=0) * LN2, sequence, lengths)
        tl.store(max_ptr + number * heads.q + head, row_max)
    if FORMAT is None:
        y_ptr = _base(y, sequence.batch, sequence.q_start, head, ALIGN)
        store_heads(out, y_ptr, y.at.token, sequence.first, limit, V, ALIGN)
    else:
        # The copy has one row per token, in the order of y's memory.
        cols = heads.q * V.dim
        first = (sequence.batch * y.at.batch + (sequence.q_start + sequence.first) * y.at.token) // cols
        step = y.at.token // cols
        value = rounded(out.first, y.ptr).to(tl.float32)
        store_rows(
            tl.where((row < limit)[:, None], value, 0.0),
            copy,
            Tile(
                first + tl.arange(0, M) * step,
                head * V.dim,
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
    lse_ptr,  # fp32 [sequences, heads, queries]; [heads, tokens] for packed sequences
    dlse_ptr,  # like lse, or None
    delta_ptr,  # like lse
    sinks_ptr,  # [heads], or None
    sink_sums_ptr,  # fp32 [tiles, heads]: partial gradients of the sinks, one per tile; or None
    lengths: Lengths,  # unpacked: packed sequences count as one
    heads: Heads,
    TILE: tl.constexpr,
):
    """Compute delta = sum(dy * y) - dlse for a tile of queries; it is subtracted from dP in the score gradient."""
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
        # If lse equals the sink, its share is 1, also if both are infinite.
        share = tl.where(lse == sink, 1.0, tl.exp2((sink - lse) * LOG2E))
        dsink = tl.where((lse != MINUS_INFINITY) & (sink != MINUS_INFINITY) & exists, share * delta, 0.0)
        tl.store(sink_sums_ptr + (batch * tiles + tile) * heads.q + head, -tl.sum(dsink, axis=0))


@triton.jit
def _lse_in_base_2(lse):
    """Convert lse to base 2; replace -inf by 0 so that subtracting it from scores gives no NaN."""
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
    terms: Terms,
    dbias: Pairs,  # gradients of scores, or absent
    slope_sums_ptr,  # fp32 [tiles, heads, 2]: partial gradients of the slopes, two per tile; or None
    TILE: tl.constexpr,
):
    """Compute the gradient of one tile of queries of one head, and its part of the gradients of bias and slopes."""
    M: tl.constexpr = TILE.m
    N: tl.constexpr = TILE.n
    QK: tl.constexpr = TILE.qk
    V: tl.constexpr = TILE.v
    ALIGN: tl.constexpr = TILE.align
    CAPPED: tl.constexpr = TILE.capped
    BANDED: tl.constexpr = TILE.banded
    LIMITED: tl.constexpr = TILE.limited
    MASKED: tl.constexpr = TILE.mask is not None
    ADDED: tl.constexpr = TILE.bias is not None or TILE.sloped
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
    unit = 1.0 if ADDED else factor  # terms are added to scores that are in base 2 already

    q_ptr = _base(query, sequence.batch, sequence.q_start, head, ALIGN)
    k_ptr = _base(key, sequence.batch, sequence.k_start, key_head, ALIGN)
    v_ptr = _base(value, sequence.batch, sequence.k_start, key_head, ALIGN)
    dy_ptr = _base(dy, sequence.batch, sequence.q_start, head, ALIGN)
    at = (sequence.batch * heads.q + head) * lengths.q + sequence.q_start + row
    q = load_heads(q_ptr, query.at.token, sequence.first, limit, M, QK, ALIGN)
    dout = load_heads(dy_ptr, dy.at.token, sequence.first, limit, M, V, ALIGN)
    lse = _lse_in_base_2(tl.load(lse_ptr + at, mask=row < limit, other=0.0))
    delta = tl.load(delta_ptr + at, mask=row < limit, other=0.0)
    acc = zeros(M, QK)
    if ADDED:
        sound = or_nan(1.0, sequence, lengths)
    if slope_sums_ptr is not None:
        dbefore, dafter = tl.zeros((M,), tl.float32), tl.zeros((M,), tl.float32)
    if LIMITED:
        row_begin, row_end = bounds_of(row, sequence, lengths, band, BANDED)  # [M]
        begin, end, all_begin, all_end = keys_between(row_begin, row_end, sequence.k)
    else:
        begin, end, all_begin, all_end = keys_seen(sequence, band, M, BANDED)
    if MASKED:
        visits = visits_of(terms.blocks, sequence.batch, head, heads.q, tile, tiles, lengths.k)
        begin, end = visits.count * 0, visits.count
    STEP: tl.constexpr = 1 if MASKED else N
    for start in range(begin // STEP * STEP, end, STEP):
        if MASKED:
            block, hides = visit(visits, start, tl.cdiv(sequence.k, N))
            start = block * N
        start = tl.multiple_of(start, N)
        if MASKED:
            used = load_used(visits, 0, start, sequence.k, N)  # a gradient of 0 does not hide NaN
            k = load_heads(k_ptr, key.at.token, start, sequence.k, N, QK, ALIGN, used)
        else:
            k = load_heads(k_ptr, key.at.token, start, sequence.k, N, QK, ALIGN)
        v = load_heads(v_ptr, value.at.token, start, sequence.k, N, V, ALIGN)
        s, slope = capped(across(q, k), scores, CAPPED)  # [M, N]
        if ADDED:
            col = start + tl.arange(0, N)
            s = added(s * factor, terms, head, row[:, None], col[None, :], sequence, lengths, TILE)
        if not MASKED:
            hides = (start < all_begin) | (start + N > all_end)
        if hides:
            col = start + tl.arange(0, N)
            if LIMITED:
                seen = (col[None, :] >= row_begin[:, None]) & (col[None, :] < row_end[:, None])
            else:
                seen = sees(row[:, None], col[None, :], sequence, band, BANDED)
            if MASKED:
                bits = load_pairs(
                    terms.mask, sequence.batch, head, row[:, None], col[None, :], lengths, TILE.mask
                )
                seen = seen & (bits != 0)
            s = tl.where(seen, s, MINUS_INFINITY)
        p = tl.exp2(s * unit - lse[:, None])
        ds = p * (across(dout, v) - delta[:, None])
        if MASKED:
            ds = tl.where(p == 0.0, 0.0, ds)
        if dbias.ptr is not None:
            col = start + tl.arange(0, N)
            dterm = ds * sound
            store_pairs(dterm, dbias, sequence.batch, head, row[:, None], col[None, :], lengths, TILE.dbias)
        if slope_sums_ptr is not None:
            distance = distances(row[:, None], start + tl.arange(0, N)[None, :], sequence)
            dbefore += tl.sum(ds * tl.minimum(distance, 0.0), axis=1)
            dafter -= tl.sum(ds * tl.maximum(distance, 0.0), axis=1)
        if CAPPED:
            ds = ds * slope
        acc = add_product(acc, ds.to(k.first.dtype), k)
    dq_ptr = _base(dquery, sequence.batch, sequence.q_start, head, ALIGN)
    dq = times(acc, or_nan(scores.scale, sequence, lengths))
    store_heads(dq, dq_ptr, dquery.at.token, sequence.first, limit, QK, ALIGN)
    if slope_sums_ptr is not None:
        at = ((sequence.batch * tiles + tile) * heads.q + head) * 2
        tl.store(slope_sums_ptr + at, tl.sum(dbefore, axis=0) * sound)
        tl.store(slope_sums_ptr + at + 1, tl.sum(dafter, axis=0) * sound)


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
    terms: Terms,
    TILE: tl.constexpr,
):
    """Compute the gradients of one tile of keys and values, summed in order over the query heads that share it."""
    M: tl.constexpr = TILE.m
    N: tl.constexpr = TILE.n
    QK: tl.constexpr = TILE.qk
    V: tl.constexpr = TILE.v
    ALIGN: tl.constexpr = TILE.align
    CAPPED: tl.constexpr = TILE.capped
    BANDED: tl.constexpr = TILE.banded
    LIMITED: tl.constexpr = TILE.limited
    MASKED: tl.constexpr = TILE.mask is not None
    ADDED: tl.constexpr = TILE.bias is not None or TILE.sloped
    tiles = tl.cdiv(lengths.k, N)
    if lengths.k_starts is not None:
        tiles += lengths.number + 1
    key_heads = heads.q // heads.group
    tile = tl.program_id(0) % tiles
    key_head = tl.program_id(0) // tiles % key_heads
    sequence = sequence_at(tile, tl.program_id(0) // tiles // key_heads, lengths, band, True, N)
    col = sequence.first + tl.arange(0, N)
    limit = sequence.first + sequence.exist
    factor = factor_of(scores, CAPPED)
    unit = 1.0 if ADDED else factor  # terms are added to scores that are in base 2 already

    k_ptr = _base(key, sequence.batch, sequence.k_start, key_head, ALIGN)
    v_ptr = _base(value, sequence.batch, sequence.k_start, key_head, ALIGN)
    k = load_heads(k_ptr, key.at.token, sequence.first, sequence.k, N, QK, ALIGN)
    v = load_heads(v_ptr, value.at.token, sequence.first, sequence.k, N, V, ALIGN)
    dk, dv = zeros(N, QK), zeros(N, V)
    begin, end, all_begin, all_end = queries_seeing(sequence, lengths, band, N, BANDED)
    if LIMITED:
        begin, end = queries_between(begin, end, sequence, lengths, band, N, M, BANDED)
    # A tile that extends past the last key must hide the excess from every query.
    hidden = sequence.first + N > sequence.k
    begin = begin // M * M
    blocks = tl.cdiv(tl.maximum(end - begin, 0), M)
    # Triton's pipeline prologue divides by per_head even if the loop is empty.
    repeats = heads.group
    if MASKED:
        heads_each = 1 + (heads.group - 1) * terms.blocks.per_head  # heads of a list
        visits = visits_of(
            terms.blocks, sequence.batch, key_head, key_heads, tile, tiles, heads_each * lengths.q
        )
        blocks, repeats = visits.count, heads.group // heads_each
        q_blocks = tl.maximum(tl.cdiv(sequence.q, M), 1)
    per_head = tl.maximum(blocks, 1)
    for step in range(blocks * repeats):
        if MASKED:
            block, hides = visit(visits, step % per_head, heads_each * q_blocks)
            each = tl.minimum(block // q_blocks, heads_each - 1)
            head = key_head * heads.group + tl.minimum(step // per_head + each, heads.group - 1)
            start = tl.multiple_of(block % q_blocks * M, M)
        else:
            # The bound always holds; it is written out for the prover.
            head = key_head * heads.group + tl.minimum(step // per_head, heads.group - 1)
            start = tl.multiple_of(begin + step % per_head * M, M)
        q_ptr = _base(query, sequence.batch, sequence.q_start, head, ALIGN)
        dy_ptr = _base(dy, sequence.batch, sequence.q_start, head, ALIGN)
        if MASKED:
            used = load_used(visits, each.to(tl.int64) * lengths.q, start, sequence.q, M)
            q = load_heads(q_ptr, query.at.token, start, sequence.q, M, QK, ALIGN, used)
            dout = load_heads(dy_ptr, dy.at.token, start, sequence.q, M, V, ALIGN, used)
        else:
            q = load_heads(q_ptr, query.at.token, start, sequence.q, M, QK, ALIGN)
            dout = load_heads(dy_ptr, dy.at.token, start, sequence.q, M, V, ALIGN)
        row = start + tl.arange(0, M)
        at = (sequence.batch * heads.q + head) * lengths.q + sequence.q_start + row
        # Rows past the last query get weight 0.
        lse = _lse_in_base_2(tl.load(lse_ptr + at, mask=row < sequence.q, other=float("inf")))
        delta = tl.load(delta_ptr + at, mask=row < sequence.q, other=0.0)
        s, slope = capped(across(k, q), scores, CAPPED)  # [N, M]
        if ADDED:
            s = added(s * factor, terms, head, row[None, :], col[:, None], sequence, lengths, TILE)
        if not MASKED:
            hides = True if LIMITED else (start < all_begin) | (start + M > all_end) | hidden
        if hides:
            if LIMITED:
                row_begin, row_end = bounds_of(row, sequence, lengths, band, BANDED)  # [M]
                seen = (col[:, None] >= row_begin[None, :]) & (col[:, None] < row_end[None, :])
            else:
                seen = sees(row[None, :], col[:, None], sequence, band, BANDED)
            if MASKED:
                bits = load_pairs(
                    terms.mask, sequence.batch, head, row[None, :], col[:, None], lengths, TILE.mask
                )
                seen = seen & (bits != 0)
            s = tl.where(seen, s, MINUS_INFINITY)
        p = tl.exp2(s * unit - lse[None, :])
        dv = add_product(dv, p.to(dout.first.dtype), dout)
        ds = p * (across(v, dout) - delta[None, :])
        if MASKED:
            ds = tl.where(p == 0.0, 0.0, ds)
        if CAPPED:
            ds = ds * slope
        dk = add_product(dk, ds.to(q.first.dtype), q)
    dk_ptr = _base(dkey, sequence.batch, sequence.k_start, key_head, ALIGN)
    dv_ptr = _base(dvalue, sequence.batch, sequence.k_start, key_head, ALIGN)
    dk, dv = times(dk, or_nan(scores.scale, sequence, lengths)), times(dv, or_nan(1.0, sequence, lengths))
    store_heads(dk, dk_ptr, dkey.at.token, sequence.first, limit, QK, ALIGN)
    store_heads(dv, dv_ptr, dvalue.at.token, sequence.first, limit, V, ALIGN)
