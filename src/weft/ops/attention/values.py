"""Values as codes: transposed, because products of eight bits read contiguous keys, and quantized along the keys."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...language import tl, triton
from ...runtime import kernel
from ...tiles.numbers import encode
from ...tiles.reduce import amax, larger
from ...tiles.scales import fp32_scale, scaled
from ..common.heads import Place
from ..common.passes import FP32_MAX
from .configs import VALUE_COLUMNS
from .pieces import Heads, first_token
from .sequences import Band, Lengths, keys_seen_by_any, sequence_at, sequence_of

COLUMNS = tl.constexpr(VALUE_COLUMNS["e4m3"])
BLOCK = tl.constexpr(VALUE_COLUMNS["int8"])


class ValueCodes(NamedTuple):
    """Values as transposed codes: e4m3 with one scale per sequence, head and element of the head, or int8 with one per
    BLOCK keys, head and element. Absent if values are not quantized."""

    ptr: Tensor | None  # bytes or int8 [key heads, v_dim, columns]
    scale: Tensor | None  # fp32 [sequences or columns / BLOCK, key heads, v_dim]
    columns: int  # a multiple of COLUMNS or BLOCK


@triton.jit
def _stride(n, ALIGN: tl.constexpr):
    return tl.multiple_of(n.to(tl.int64), ALIGN)


@triton.jit
def codes_ptr(codes, key_head, token, number, V: tl.constexpr, UNIT: tl.constexpr):
    """Return a pointer to the codes of a sequence in a head, after `number` sequences with `token` keys together. Each
    sequence starts at a multiple of UNIT, which leaves fewer than UNIT unused columns after it."""
    row = key_head.to(tl.int64) * V.dim * _stride(codes.columns, UNIT)
    return codes.ptr + row + (token // UNIT + number) * UNIT


@triton.jit
def _in_range(row, begin, end, BANDED: tl.constexpr):
    """Return which rows lie in [begin, end); begin is 0 unless there is a band."""
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
    FORMAT: tl.constexpr,  # of the codes; one scale covers one element of the head over all keys
    CAST: tl.constexpr,
):
    """Encode TILE.m columns of one value head of one sequence: find their amax over TILE.n keys at a time, then store
    the codes, with zeros for keys that no query sees and as padding to a multiple of COLUMNS."""
    N: tl.constexpr = TILE.n
    M: tl.constexpr = TILE.m
    V: tl.constexpr = TILE.v
    ALIGN: tl.constexpr = TILE.align
    parts = tl.cdiv(V.dim, M)
    part = tl.program_id(0) % parts
    key_heads = heads.q // heads.group
    key_head = tl.program_id(0) // parts % key_heads
    number = (tl.program_id(0) // parts // key_heads).to(tl.int64)
    sequence = sequence_of(number, lengths, band)
    batch, start = sequence.batch, sequence.k_start
    seen, seen_end = keys_seen_by_any(sequence, band, TILE.banded)
    lane = part * M + tl.arange(0, M)  # [M], columns of the head
    exists = lane < V.dim
    step = _stride(value.at.token, ALIGN)
    from_ptr = first_token(value, batch, start, key_head, ALIGN) + lane[None, :]
    v_amax = tl.zeros((M,), tl.float32)
    for first in range(seen // N * N, seen_end, N):
        row = first + tl.arange(0, N)
        mask = _in_range(row, seen, seen_end, TILE.banded)[:, None] & exists[None, :]
        x = tl.load(from_ptr + row.to(tl.int64)[:, None] * step, mask=mask, other=0.0)  # [N, M]
        v_amax = larger(v_amax, amax(x.to(tl.float32), axis=0))
    scale, factor = fp32_scale(v_amax, FP32_MAX, FORMAT)
    tl.store(codes.scale + (number * key_heads + key_head) * V.dim + lane, scale, mask=exists)
    token = batch * lengths.k + start
    to_ptr = codes_ptr(codes, key_head, token, number, V, COLUMNS)
    to_ptr = to_ptr + (lane.to(tl.int64) * _stride(codes.columns, COLUMNS))[:, None]
    # All columns fit; the explicit bound is for the prover, which cannot derive that.
    room = _stride(codes.columns, COLUMNS) // COLUMNS - token // COLUMNS - number
    end = tl.maximum(tl.minimum(tl.cdiv(sequence.k, COLUMNS), room), 0).to(tl.int32) * COLUMNS
    for first in range(0, end, N):
        row = first + tl.arange(0, N)
        mask = _in_range(row, seen, seen_end, TILE.banded)[:, None] & exists[None, :]
        x = tl.load(from_ptr + row.to(tl.int64)[:, None] * step, mask=mask, other=0.0).to(tl.float32)
        encoded = encode(scaled(x, factor[None, :], FORMAT), FORMAT, CAST)
        tl.store(to_ptr + row[None, :], tl.trans(encoded), mask=exists[:, None] & (row < end)[None, :])


@kernel
def value_block_kernel(
    value: Place,
    codes: ValueCodes,
    lengths: Lengths,
    heads: Heads,
    band: Band,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,  # of the codes; one scale covers one element of the head over BLOCK keys
    CAST: tl.constexpr,
):
    """Encode TILE.m columns of BLOCK keys of one value head, with zeros for keys that no query sees and after the
    sequence."""
    M: tl.constexpr = TILE.m
    V: tl.constexpr = TILE.v
    ALIGN: tl.constexpr = TILE.align
    tiles = tl.cdiv(lengths.k, BLOCK)
    if lengths.k_starts is not None:
        tiles += lengths.number + 1
    parts = tl.cdiv(V.dim, M)
    key_heads = heads.q // heads.group
    part = tl.program_id(0) % parts
    tile = tl.program_id(0) // parts % tiles
    key_head = tl.program_id(0) // parts // tiles % key_heads
    sequence = sequence_at(tile, tl.program_id(0) // parts // tiles // key_heads, lengths, band, True, BLOCK)
    seen, seen_end = keys_seen_by_any(sequence, band, TILE.banded)
    lane = part * M + tl.arange(0, M)  # [M], columns of the head
    exists = lane < V.dim
    row = sequence.first + tl.arange(0, BLOCK)
    step = _stride(value.at.token, ALIGN)
    from_ptr = first_token(value, sequence.batch, sequence.k_start, key_head, ALIGN) + lane[None, :]
    mask = _in_range(row, seen, seen_end, TILE.banded)[:, None] & exists[None, :]
    x = tl.load(from_ptr + row.to(tl.int64)[:, None] * step, mask=mask, other=0.0)  # [BLOCK, M]
    x = x.to(tl.float32)
    scale, factor = fp32_scale(amax(x, axis=0), FP32_MAX, FORMAT)
    encoded = encode(scaled(x, factor[None, :], FORMAT), FORMAT, CAST)
    token = sequence.batch * lengths.k + sequence.k_start
    block = token // BLOCK + sequence.number + sequence.first // BLOCK
    # Tokens of no sequence have no block, and all others fit; the upper bound is for the prover.
    stored = exists & (sequence.first < sequence.k) & (block < codes.columns // BLOCK)
    tl.store(codes.scale + (block * key_heads + key_head) * V.dim + lane, scale, mask=stored)
    column = tl.multiple_of(sequence.first, BLOCK) + tl.arange(0, BLOCK)
    to_ptr = codes_ptr(codes, key_head, token, sequence.number, V, BLOCK) + column[None, :]
    to_ptr += (lane.to(tl.int64) * _stride(codes.columns, BLOCK))[:, None]
    tl.store(to_ptr, tl.trans(encoded), mask=stored[:, None])
