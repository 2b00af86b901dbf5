"""Kernels of `qkv_prepare` and its backward; `rope` uses the former.

A head is split into two tiles a and b [tokens, heads, pairs]: the first and second elements of the `half` rotated
pairs, followed by the two halves of the unrotated `rest`. Elements past the head are 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ...language import tl, triton
from ...runtime import kernel
from ...tiles.numbers import encode
from ...tiles.reduce import amax, larger
from ...tiles.rotate import cos_sin, rotate
from ...tiles.scales import fp32_scale, scaled
from ..common.heads import Place, Strides
from ..common.kv_cache import E4M3, INT8, Kept, Slots
from ..common.passes import FP32_MAX
from .angles import Angles

E4M3_CACHE = tl.constexpr(E4M3)
INT8_CACHE = tl.constexpr(INT8)


@dataclass(frozen=True)
class Plan:
    """Compile-time constant of a kernel: the operations on heads, and the tiles."""

    tokens: int  # per program
    heads: int  # per step
    pairs: int  # width of the tiles a and b
    v_dim: int  # width of value tiles; `dim` is that of gate tiles
    dim: int
    masked: bool  # heads (or heads of v) are narrower than their tiles
    partial: bool  # only a part of each head is rotated
    norm: str  # "none", "rms" or "layer"
    after: bool  # the norm comes after the rotation
    rotate: bool
    inverse: bool  # rotate by the negative angles
    interleaved: bool  # input pairs are adjacent elements
    out_interleaved: bool  # output pairs are adjacent elements
    first: bool  # the rotated part comes first
    sections: bool
    scaled: str  # granularity of the cache scales: "none", "token", "head" or "tensor"
    element: str  # of the cache's codes
    cast: int  # how codes are converted


class Grouped(NamedTuple):
    """Number of heads, which may be stored in groups of `group` heads; `stride` is that of groups. Inside kernels,
    `group` is None if there is only one."""

    heads: int
    group: int | None
    stride: int


class Sizes(NamedTuple):
    """Sizes of an input and its heads."""

    batches: int
    tokens: int  # per sequence
    q: Grouped
    kv: int  # key and value heads
    half: int  # rotated pairs per head
    rest: int  # elements per head that are not rotated
    v_dim: int


class Source(NamedTuple):
    """Input heads, inside a kernel."""

    ptr: tl.tensor
    at: Strides
    # Bias of a packed projection, with heads at the same offsets as in its rows; or None.
    bias: tl.tensor


class HeadSizes(NamedTuple):
    """Sizes of a head inside a kernel, known to be multiples of ALIGN."""

    half: int
    rest: int


class Affine(NamedTuple):
    """Weight, bias, eps and weight offset of the norm of q or k."""

    weight: Tensor | None  # [dim]
    bias: Tensor | None
    eps: float
    weight_offset: float


class Tokens(NamedTuple):
    """Tokens of a program, inside a kernel."""

    batch: tl.tensor
    token: tl.tensor  # [TOKENS], index in the sequence
    exists: tl.tensor
    cos: tl.tensor  # [TOKENS, 1, pairs], or None
    sin: tl.tensor
    page: tl.tensor  # [TOKENS], cache page of each token, or None
    place: tl.tensor
    cached: tl.tensor


# ---- heads in memory ------------------------------------------------------------------------------------


@triton.jit
def known_multiple(n, ALIGN: tl.constexpr):
    """Return n, marked for the compiler as a multiple of ALIGN."""
    return (n // ALIGN) * ALIGN


@triton.jit
def _columns(size, PLAN: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the columns of a and b in a head and which of them exist: four tensors [pairs]. Columns that are
    contiguous in memory stay contiguous here, in runs that the compiler knows to be aligned if half and rest are. The
    exception are INTERLEAVED pairs in a partially rotated head, whose rest is stored as in the other style."""
    half, rest = size.half, size.rest
    lane = tl.arange(0, PLAN.pairs)
    a_rest = rest - rest // 2
    if INTERLEAVED:
        if PLAN.first:
            a = tl.where(lane < half, 2 * lane, lane + half)
            b = tl.where(lane < half, 2 * lane + 1, lane + half + a_rest)
        else:
            a = tl.where(lane < half, rest + 2 * lane, lane - half)
            b = tl.where(lane < half, rest + 2 * lane + 1, lane + a_rest - half)
    elif PLAN.partial:
        if PLAN.first:
            a = lane + tl.where(lane < half, 0, half)
            b = lane + half + tl.where(lane < half, 0, a_rest)
        else:
            a = lane + tl.where(lane < half, rest, -half)
            b = lane + tl.where(lane < half, rest + half, a_rest - half)
    else:
        a = lane
        b = lane + half
    if PLAN.masked and PLAN.partial:
        return a, b, lane < half + a_rest, lane < half + rest // 2
    elif PLAN.masked:
        return a, b, lane < half, lane < half
    else:
        return a, b, lane >= 0, lane >= 0


@triton.jit
def _paired_columns(size, PLAN: tl.constexpr):
    """Return the columns of interleaved pairs, a and b alternating, and which exist: two tensors [2 * pairs]."""
    lane = tl.arange(0, 2 * PLAN.pairs)
    column = lane
    if PLAN.partial and not PLAN.first:
        column = lane + tl.where(lane < 2 * size.half, size.rest, -2 * size.half)
    if PLAN.masked:
        return column, lane < 2 * size.half + size.rest
    else:
        return column, lane >= 0


@triton.jit
def _load_pairs(ptr, off, valid, size, PLAN: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load the heads at off [T, H] as (a, b) in fp32."""
    # Read the unrotated rest as interleaved pairs only if it is also written that way.
    if INTERLEAVED and not (PLAN.partial and PLAN.interleaved != PLAN.out_interleaved):
        T: tl.constexpr = off.shape[0]
        H: tl.constexpr = off.shape[1]
        column, exists = _paired_columns(size, PLAN)
        mask = valid[:, :, None] & exists[None, None, :]
        both = tl.load(ptr + off[:, :, None] + column[None, None, :], mask=mask, other=0.0).to(tl.float32)
        return tl.split(tl.reshape(both, (T, H, PLAN.pairs, 2)))
    else:
        a_column, b_column, a_exists, b_exists = _columns(size, PLAN, INTERLEAVED)
        mask = valid[:, :, None] & a_exists[None, None, :]
        a = tl.load(ptr + off[:, :, None] + a_column[None, None, :], mask=mask, other=0.0).to(tl.float32)
        mask = valid[:, :, None] & b_exists[None, None, :]
        b = tl.load(ptr + off[:, :, None] + b_column[None, None, :], mask=mask, other=0.0).to(tl.float32)
        return a, b


@triton.jit
def _store_pairs(ptr, off, valid, a, b, size, PLAN: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Round (a, b) to the dtype of ptr and store them: the only rounding of a head."""
    DTYPE: tl.constexpr = ptr.dtype.element_ty
    if INTERLEAVED and not (PLAN.partial and PLAN.interleaved != PLAN.out_interleaved):
        column, exists = _paired_columns(size, PLAN)
        mask = valid[:, :, None] & exists[None, None, :]
        tl.store(ptr + off[:, :, None] + column[None, None, :], tl.interleave(a, b).to(DTYPE), mask=mask)
    else:
        a_column, b_column, a_exists, b_exists = _columns(size, PLAN, INTERLEAVED)
        mask = valid[:, :, None] & a_exists[None, None, :]
        tl.store(ptr + off[:, :, None] + a_column[None, None, :], a.to(DTYPE), mask=mask)
        mask = valid[:, :, None] & b_exists[None, None, :]
        tl.store(ptr + off[:, :, None] + b_column[None, None, :], b.to(DTYPE), mask=mask)


@triton.jit
def _load_vector(ptr, offset, size, PLAN: tl.constexpr):
    """Load a weight or bias of the norm as (a, b): tiles [1, 1, pairs]."""
    zero = tl.zeros((1, 1), tl.int32)
    INTERLEAVED: tl.constexpr = PLAN.out_interleaved if PLAN.after else PLAN.interleaved
    a, b = _load_pairs(ptr, zero, zero == 0, size, PLAN, INTERLEAVED)
    return a + offset, b + offset


@triton.jit
def _bias_offset(x, head, heads, ALIGN: tl.constexpr):
    """Return the offsets of the bias of heads [H] of x, and which heads exist: [1, H] each."""
    off = known_multiple(x.at.start, ALIGN) + _head_offset(x, head, heads, ALIGN)
    return off[None, :], (head < heads.heads)[None, :]


@triton.jit
def _load_heads(x, off, head, heads, valid, size, PLAN: tl.constexpr, ALIGN: tl.constexpr):
    """Load input heads [H] at off [T, H] as (a, b), with their bias added."""
    a, b = _load_pairs(x.ptr, off, valid, size, PLAN, PLAN.interleaved)
    if x.bias is not None:
        bias_off, exist = _bias_offset(x, head, heads, ALIGN)
        bias_a, bias_b = _load_pairs(x.bias, bias_off, exist, size, PLAN, PLAN.interleaved)
        a, b = a + bias_a, b + bias_b
    return a, b


@triton.jit
def _shifted(at, elements):
    """Shift the start of strides by so many elements, as from a query head to its gate."""
    return Strides(at.start + elements, at.batch, at.token, at.head)


@triton.jit
def _token_offset(place, batch, token, ALIGN: tl.constexpr):
    """Return the offsets of tokens [T] of a sequence."""
    start = known_multiple(place.at.start, ALIGN) + batch * known_multiple(place.at.batch, ALIGN)
    return start + token * known_multiple(place.at.token, ALIGN)


@triton.jit
def _head_offset(place, head, heads, ALIGN: tl.constexpr):
    """Return the offsets of heads [H] in a token; without groups, `heads.group` is None."""
    stride = known_multiple(place.at.head, ALIGN)
    if heads.group is None:
        return head.to(tl.int64) * stride
    else:
        groups = (head // heads.group).to(tl.int64) * known_multiple(heads.stride, ALIGN)
        return groups + (head % heads.group).to(tl.int64) * stride


# ---- rotation and norm ----------------------------------------------------------------------------------


@triton.jit
def _find_angles(angles, batch, token, tokens, half, PLAN: tl.constexpr, ALIGN: tl.constexpr):
    """Return cos and sin [TOKENS, 1, pairs] for tokens [TOKENS] of a sequence; finite where nothing is rotated."""
    pair = tl.arange(0, PLAN.pairs)
    valid = (token < tokens)[:, None] & (pair < half)[None, :]
    if angles.positions is not None:
        place_off = batch * angles.at.batch + token * angles.at.token
        if PLAN.sections:
            axis = tl.where(pair >= angles.at.third, 2, tl.where(pair >= angles.at.second, 1, 0)).to(tl.int64)
            off = place_off[:, None] + (axis * angles.at.axis)[None, :]
            position = tl.load(angles.positions + off, mask=valid, other=0).to(tl.int64)  # [TOKENS, pairs]
        else:
            position = tl.load(angles.positions + place_off, mask=token < tokens, other=0)
            position = position.to(tl.int64)[:, None]
    else:
        position = token[:, None]
    if angles.cos is not None:
        in_table = valid & (position >= 0) & (position < angles.at.rows)
        off = batch * known_multiple(angles.at.table_batch, ALIGN) + position * known_multiple(
            angles.at.table_row, ALIGN
        )
        off = off + pair[None, :]
        cos = tl.load(angles.cos + off, mask=in_table, other=0.0).to(tl.float32)
        sin = tl.load(angles.sin + off, mask=in_table, other=0.0).to(tl.float32)
        if angles.positions is not None:  # no row in the table: NaN, which spreads to all rotated elements
            sin = tl.where(valid & (in_table == 0), float("nan"), sin)
    else:
        turns = tl.load(angles.turns + pair, mask=pair < half, other=0)[None, :]
        cos, sin = cos_sin(position * turns)
        cos, sin = cos * angles.magnitude, sin * angles.magnitude
    if PLAN.inverse:
        sin = -sin
    return cos[:, None, :], sin[:, None, :]


@triton.jit
def _rotate_pairs(a, b, cos, sin, half, PLAN: tl.constexpr):
    """Rotate the pairs (a, b) and leave the rest of the head unchanged."""
    rotated_a, rotated_b = rotate(a, b, cos, sin)
    if PLAN.partial:
        is_rotated = (tl.arange(0, PLAN.pairs) < half)[None, None, :]
        rotated_a, rotated_b = tl.where(is_rotated, rotated_a, a), tl.where(is_rotated, rotated_b, b)
    return rotated_a, rotated_b


@triton.jit
def _sum_over_dim(x):
    """Sum over the elements of each head: [T, H, 1]."""
    return tl.sum(x, axis=2)[:, :, None]


@triton.jit
def _normalize(a, b, size, eps, PLAN: tl.constexpr):
    """Return (a, b) normalized, and r = 1 / deviation [T, H, 1]."""
    half, rest = size.half, size.rest
    dim = (2 * half + rest).to(tl.float32)
    if PLAN.norm == "layer":
        mean = _sum_over_dim(a + b) / dim
        a, b = a - mean, b - mean
        if PLAN.masked:  # a lane past the head would add mean^2
            lane = tl.arange(0, PLAN.pairs)[None, None, :]
            a = tl.where(lane < half + rest - rest // 2, a, 0.0)
            b = tl.where(lane < half + rest // 2, b, 0.0)
    squares = _sum_over_dim(a * a + b * b)
    variance = tl.div_rn(squares, squares * 0.0 + dim)
    r = tl.div_rn(tl.full(squares.shape, 1.0, tl.float32), tl.sqrt_rn(variance + eps))
    return a * r, b * r, r


# ---- caches ---------------------------------------------------------------------------------------------


@triton.jit
def _find_slots(slots, batch, token, tokens):
    """Return (page, place in it, whether the token is cached) of tokens [T]; uncached tokens write nothing."""
    off = batch * slots.at.batch + token * slots.at.token
    slot = tl.load(slots.ptr + off, mask=token < tokens, other=-1).to(tl.int64)
    cached = (slot >= 0) & (slot < slots.at.total)
    slot = tl.where(cached, slot, 0)
    return slot // slots.at.page_size, slot % slots.at.page_size, cached


@triton.jit
def _cache_factor(cache, head_amax, at, head, stored, PLAN: tl.constexpr):
    """Return the scaling factors [T, H, 1] of heads: computed from each head's amax, storing its scale, or the fixed
    scale of a head for all tokens."""
    FORMAT: tl.constexpr = INT8_CACHE if PLAN.element == "int8" else E4M3_CACHE
    if PLAN.scaled != "token":
        written = tl.max(stored.to(tl.int32), axis=0) > 0  # [H]
        fixed_scale = tl.load(cache.scale + head.to(tl.int64) * cache.at.scale_head, mask=written, other=1.0)
        return (fixed_scale[None, :] + tl.zeros_like(head_amax))[:, :, None]
    else:
        scale, factor = fp32_scale(head_amax, FP32_MAX, FORMAT)
        off = at.page * cache.at.scale_page + at.place * cache.at.scale_place
        off = off[:, None] + (head.to(tl.int64) * cache.at.scale_head)[None, :]
        tl.store(cache.scale + off, scale, mask=stored)
        return factor[:, :, None]


@triton.jit
def _cache_codes(x, factor, PLAN: tl.constexpr):
    """Encode heads [T, H, ...]: multiply by a factor computed here, or divide by a fixed scale."""
    FORMAT: tl.constexpr = INT8_CACHE if PLAN.element == "int8" else E4M3_CACHE
    if PLAN.scaled != "token":
        x, factor = tl.broadcast(x, factor)
        return encode(tl.div_rn(x, factor), FORMAT, PLAN.cast)
    else:
        return encode(scaled(x, factor, FORMAT), FORMAT, PLAN.cast)


@triton.jit
def _cache_offset(cache, at, head, ALIGN: tl.constexpr):
    """Return the offsets of heads [T, H] in the cache."""
    off = at.page * known_multiple(cache.at.page, ALIGN) + at.place * known_multiple(cache.at.place, ALIGN)
    return off[:, None] + (head.to(tl.int64) * known_multiple(cache.at.head, ALIGN))[None, :]


@triton.jit
def _cache_pairs(cache, at, head, valid, a, b, size, PLAN: tl.constexpr, ALIGN: tl.constexpr):
    """Store heads of k in their slots, if there is a cache."""
    if cache.ptr is not None:
        stored = valid & at.cached[:, None]
        if cache.scale is not None:
            head_amax = larger(amax(a, axis=2), amax(b, axis=2))
            factor = _cache_factor(cache, head_amax, at, head, stored, PLAN)
            a, b = _cache_codes(a, factor, PLAN), _cache_codes(b, factor, PLAN)
        off = _cache_offset(cache, at, head, ALIGN)
        _store_pairs(cache.ptr, off, stored, a, b, size, PLAN, PLAN.out_interleaved)


@triton.jit
def _cache_values(cache, at, head, valid, value, lane, mask, PLAN: tl.constexpr, ALIGN: tl.constexpr):
    """Store heads of v in their slots, if there is a cache of v."""
    if cache.ptr is not None:
        if cache.scale is not None:
            wide = value.to(tl.float32)
            stored = valid & at.cached[:, None]
            factor = _cache_factor(cache, amax(wide, axis=2), at, head, stored, PLAN)
            value = _cache_codes(wide, factor, PLAN)
        else:
            value = value.to(cache.ptr.dtype.element_ty)
        off = _cache_offset(cache, at, head, ALIGN)
        tl.store(cache.ptr + off[:, :, None] + lane, value, mask=mask & at.cached[:, None, None])


# ---- forward --------------------------------------------------------------------------------------------


@triton.jit
def _prepare_heads(x, y, norm, cache, at, heads, size, PLAN: tl.constexpr, ALIGN: tl.constexpr):
    """Prepare all heads of some tokens of x: add the bias, normalize, rotate, store in y unless y is absent, and store
    heads of cached tokens in the cache if there is one."""
    x_off = _token_offset(x, at.batch, at.token, ALIGN)
    y_off = _token_offset(y, at.batch, at.token, ALIGN)
    if norm.weight is not None:
        wa, wb = _load_vector(norm.weight, norm.weight_offset, size, PLAN)
    if norm.bias is not None:
        ba, bb = _load_vector(norm.bias, 0.0, size, PLAN)
    for first in range(0, heads.heads, PLAN.heads):
        head = first + tl.arange(0, PLAN.heads)
        valid = at.exists[:, None] & (head < heads.heads)[None, :]  # [T, H]
        off = x_off[:, None] + _head_offset(x, head, heads, ALIGN)[None, :]
        a, b = _load_heads(x, off, head, heads, valid, size, PLAN, ALIGN)
        if PLAN.rotate and PLAN.after:
            a, b = _rotate_pairs(a, b, at.cos, at.sin, size.half, PLAN)
        if PLAN.norm != "none":
            a, b, _ = _normalize(a, b, size, norm.eps, PLAN)
            if norm.weight is not None:
                a, b = a * wa, b * wb
            if norm.bias is not None:
                a, b = a + ba, b + bb
        if PLAN.rotate and not PLAN.after:
            a, b = _rotate_pairs(a, b, at.cos, at.sin, size.half, PLAN)
        if y.ptr is not None:
            off = y_off[:, None] + _head_offset(y, head, Grouped(heads.heads, None, 0), ALIGN)[None, :]
            _store_pairs(y.ptr, off, valid, a, b, size, PLAN, PLAN.out_interleaved)
        _cache_pairs(cache, at, head, valid, a, b, size, PLAN, ALIGN)


@triton.jit
def _copy_heads(
    x, y, cache, at, x_heads, y_heads, dim, DIM: tl.constexpr, PLAN: tl.constexpr, ALIGN: tl.constexpr
):
    """Copy all heads of some tokens, adding the bias if there is one, to y and to the cache if there is one, as
    `_prepare_heads` does."""
    x_off = _token_offset(x, at.batch, at.token, ALIGN)
    y_off = _token_offset(y, at.batch, at.token, ALIGN)
    lane = tl.arange(0, DIM)[None, None, :]
    for first in range(0, x_heads.heads, PLAN.heads):
        head = first + tl.arange(0, PLAN.heads)
        valid = at.exists[:, None] & (head < x_heads.heads)[None, :]
        exists = lane < (dim if PLAN.masked else DIM)
        mask = valid[:, :, None] & exists
        off = x_off[:, None] + _head_offset(x, head, x_heads, ALIGN)[None, :]
        value = tl.load(x.ptr + off[:, :, None] + lane, mask=mask, other=0.0)
        if x.bias is not None:
            bias_off, exist = _bias_offset(x, head, x_heads, ALIGN)
            bias = tl.load(x.bias + bias_off[:, :, None] + lane, mask=exist[:, :, None] & exists, other=0.0)
            value = value.to(tl.float32) + bias.to(tl.float32)
        off = y_off[:, None] + _head_offset(y, head, y_heads, ALIGN)[None, :]
        tl.store(y.ptr + off[:, :, None] + lane, value.to(y.ptr.dtype.element_ty), mask=mask)
        if cache is not None:
            _cache_values(cache, at, head, valid, value, lane, mask, PLAN, ALIGN)


@kernel
def qkv_kernel(
    q: Place,
    k: Place,  # k, v and gate are absent where there are none
    v: Place,
    bias_ptr,  # [columns of a packed input], or None
    q_out: Place,
    k_out: Place,
    v_out: Place,
    gate_out: Place,  # the gates of the input follow their query heads
    q_norm: Affine,
    k_norm: Affine,
    angles: Angles,
    slots: Slots,
    q_codes: Kept,  # codes of q; if present, q_codes replaces q_out and k_cache replaces k_out
    k_cache: Kept,
    v_cache: Kept,
    sizes: Sizes,
    PLAN: tl.constexpr,
    ALIGN: tl.constexpr,  # divides sizes, starts and strides, except those of slots and scales
):
    """Prepare all heads of a few tokens of a sequence; their angles are computed once."""
    size = HeadSizes(known_multiple(sizes.half, ALIGN), known_multiple(sizes.rest, ALIGN))
    program = tl.program_id(0)
    batch = (program % sizes.batches).to(tl.int64)
    token = (program // sizes.batches).to(tl.int64) * PLAN.tokens + tl.arange(0, PLAN.tokens)  # [TOKENS]
    exists = token < sizes.tokens
    cos, sin, page, place, cached = None, None, None, None, None
    if PLAN.rotate:
        cos, sin = _find_angles(angles, batch, token, sizes.tokens, size.half, PLAN, ALIGN)
    if slots.ptr is not None:
        page, place, cached = _find_slots(slots, batch, token, sizes.tokens)
    elif q_codes.ptr is not None:
        page, place, cached = batch, token, exists
    at = Tokens(batch, token, exists, cos, sin, page, place, cached)
    kv_heads = Grouped(sizes.kv, sizes.kv, 0)
    _prepare_heads(Source(q.ptr, q.at, bias_ptr), q_out, q_norm, q_codes, at, sizes.q, size, PLAN, ALIGN)
    if k.ptr is not None:
        source = Source(k.ptr, k.at, bias_ptr)
        _prepare_heads(source, k_out, k_norm, k_cache, at, kv_heads, size, PLAN, ALIGN)
    if v.ptr is not None:
        v_dim = known_multiple(sizes.v_dim, ALIGN)
        source = Source(v.ptr, v.at, bias_ptr)
        _copy_heads(source, v_out, v_cache, at, kv_heads, kv_heads, v_dim, PLAN.v_dim, PLAN, ALIGN)
    if gate_out.ptr is not None:
        dim = 2 * size.half + size.rest
        _copy_heads(
            Source(q.ptr, _shifted(q.at, dim), bias_ptr),
            gate_out,
            None,
            at,
            sizes.q,
            Grouped(sizes.q.heads, sizes.q.heads, 0),
            dim,
            PLAN.dim,
            PLAN,
            ALIGN,
        )


# ---- backward -------------------------------------------------------------------------------------------


class Sums(NamedTuple):
    """Partial fp32 sums [programs, dim] of the gradients of a weight and a bias; None if not requested."""

    weight: Tensor | None
    bias: Tensor | None


@triton.jit
def _backward_heads(dy, x, dx, norm, totals, sums, at, heads, size, PLAN: tl.constexpr, ALIGN: tl.constexpr):
    """Compute the gradients of all heads of some tokens; return the totals of weight and bias gradients."""
    a_weight, b_weight, a_bias, b_bias = totals
    dim = (2 * size.half + size.rest).to(tl.float32)
    dy_off = _token_offset(dy, at.batch, at.token, ALIGN)
    x_off = _token_offset(x, at.batch, at.token, ALIGN)
    dx_off = _token_offset(dx, at.batch, at.token, ALIGN)
    if norm.weight is not None:
        wa, wb = _load_vector(norm.weight, norm.weight_offset, size, PLAN)
    for first in range(0, heads.heads, PLAN.heads):
        head = first + tl.arange(0, PLAN.heads)
        valid = at.exists[:, None] & (head < heads.heads)[None, :]  # [T, H]
        off = dy_off[:, None] + _head_offset(dy, head, Grouped(heads.heads, None, 0), ALIGN)[None, :]
        a, b = _load_pairs(dy.ptr, off, valid, size, PLAN, PLAN.out_interleaved)
        if PLAN.rotate and not PLAN.after:
            a, b = _rotate_pairs(a, b, at.cos, -at.sin, size.half, PLAN)
        if PLAN.norm != "none":
            off = x_off[:, None] + _head_offset(x, head, heads, ALIGN)[None, :]
            za, zb = _load_heads(x, off, head, heads, valid, size, PLAN, ALIGN)
            if PLAN.rotate and PLAN.after:
                za, zb = _rotate_pairs(za, zb, at.cos, at.sin, size.half, PLAN)
            za, zb, r = _normalize(za, zb, size, norm.eps, PLAN)
            if sums.weight is not None:
                a_weight += a * za
                b_weight += b * zb
            if sums.bias is not None:
                a_bias += a
                b_bias += b
            if norm.weight is not None:
                a, b = a * wa, b * wb
            tz = _sum_over_dim(a * za + b * zb) / dim
            if PLAN.norm == "layer":
                t = _sum_over_dim(a + b) / dim
                a, b = a - t, b - t
            a, b = r * (a - za * tz), r * (b - zb * tz)
        if PLAN.rotate and PLAN.after:
            a, b = _rotate_pairs(a, b, at.cos, -at.sin, size.half, PLAN)
        if dx.ptr is not None:
            off = dx_off[:, None] + _head_offset(dx, head, heads, ALIGN)[None, :]
            _store_pairs(dx.ptr, off, valid, a, b, size, PLAN, PLAN.interleaved)
    return a_weight, b_weight, a_bias, b_bias


@triton.jit
def _store_sums(ptr, program, a, b, size, PLAN: tl.constexpr):
    """Sum tiles over tokens and heads into the program's row of partial sums [programs, dim]."""
    a = tl.sum(tl.sum(a, axis=0), axis=0)[None, None, :]
    b = tl.sum(tl.sum(b, axis=0), axis=0)[None, None, :]
    off = tl.zeros((1, 1), tl.int64) + program * (2 * size.half + size.rest)
    INTERLEAVED: tl.constexpr = PLAN.out_interleaved if PLAN.after else PLAN.interleaved
    _store_pairs(ptr, off, off >= 0, a, b, size, PLAN, INTERLEAVED)


@triton.jit
def _backward_part(
    dy, x, dx, norm, sums, heads, other, other_grad, other_dim, first, last, angles, sizes, size,
    OTHER: tl.constexpr, PLAN: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute the backward of the q heads, or of the k heads, over a run of tiles of a few tokens. The heads that are
    only copied come along: the gates with q, and v with k."""
    TOKENS: tl.constexpr = PLAN.tokens
    HEADS: tl.constexpr = PLAN.heads
    PAIRS: tl.constexpr = PLAN.pairs
    zeros = tl.zeros((TOKENS, HEADS, PAIRS), tl.float32)
    totals = (zeros, zeros, zeros, zeros)
    for tile in range(first, last):
        batch = tile % sizes.batches
        token = (tile // sizes.batches) * PLAN.tokens + tl.arange(0, PLAN.tokens)  # [TOKENS]
        cos, sin = None, None
        if PLAN.rotate:
            cos, sin = _find_angles(angles, batch, token, sizes.tokens, size.half, PLAN, ALIGN)
        at = Tokens(batch, token, token < sizes.tokens, cos, sin, None, None, None)
        totals = _backward_heads(dy, x, dx, norm, totals, sums, at, heads, size, PLAN, ALIGN)
        if other.ptr is not None and other_grad.ptr is not None:
            flat_heads = Grouped(heads.heads, heads.heads, 0)
            upstream = Source(other.ptr, other.at, None)
            _copy_heads(upstream, other_grad, None, at, flat_heads, heads, other_dim, OTHER, PLAN, ALIGN)
    program = tl.program_id(0).to(tl.int64)
    if sums.weight is not None:
        _store_sums(sums.weight, program, totals[0], totals[1], size, PLAN)
    if sums.bias is not None:
        _store_sums(sums.bias, program, totals[2], totals[3], size, PLAN)


@kernel
def qkv_backward_kernel(
    dq: Place,
    dk: Place,
    dv: Place,
    dgate: Place,
    q: Place,  # input of the norm, absent without one
    k: Place,
    bias_ptr,  # bias added to the input of the norm, or None
    q_grad: Place,  # outputs: gradients of the input, each absent if not requested
    k_grad: Place,
    v_grad: Place,
    q_norm: Affine,
    k_norm: Affine,
    q_sums: Sums,
    k_sums: Sums,
    angles: Angles,
    sizes: Sizes,
    tiles,  # number of tiles of a few tokens
    program_tiles,  # tiles per program
    PLAN: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Compute the backward of a run of tiles of a few tokens: first all query heads, then keys and values. The sums for
    q stay in registers until its last tile; those for k reuse the registers."""
    size = HeadSizes(known_multiple(sizes.half, ALIGN), known_multiple(sizes.rest, ALIGN))
    first = tl.program_id(0).to(tl.int64) * program_tiles
    last = tl.minimum(first + program_tiles, tiles)
    dim = 2 * size.half + size.rest
    gate_grad = Place(q_grad.ptr, _shifted(q_grad.at, dim))
    kv_heads = Grouped(sizes.kv, sizes.kv, 0)
    _backward_part(
        dq, Source(q.ptr, q.at, bias_ptr), q_grad, q_norm, q_sums, sizes.q, dgate, gate_grad, dim, first, last, angles,
        sizes, size, PLAN.dim, PLAN, ALIGN,
    )  # fmt: skip
    _backward_part(
        dk, Source(k.ptr, k.at, bias_ptr), k_grad, k_norm, k_sums, kv_heads, dv, v_grad,
        known_multiple(sizes.v_dim, ALIGN), first, last, angles, sizes, size, PLAN.v_dim, PLAN, ALIGN,
    )  # fmt: skip
