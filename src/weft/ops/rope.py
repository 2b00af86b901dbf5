"""Heads made ready for attention: split, norm, rotation and transposition of queries and keys in one pass.

    q, k, v[, gate] = split(qkv)               "flat" [q.. | k.. | v..], or "groups" of [q q q q k v]
    q = norm(q) * (q_weight + weight_offset) + q_bias              rms or layer, over a head; so k
    (a, b) = (a cos - b sin, b cos + a sin)    of each pair (a, b) of the rotated part of a head
    out = round(·)                             to the dtype of the input, in the layout of the output

Pairs are (i, i + n/2) of the n rotated numbers ("neox") or (2i, 2i + 1) ("interleaved"). The norm comes before the
rotation, or after it. The angle of pair i at position p is given by tables of cosines and sines, or is
p * base^(-2i/n): then 2^64 times the turns per position are rounded to an integer, whose product with p loses nothing
but whole turns, and one rounding makes the rest fp32. The angle is right to fp32 at any position.

All of it in fp32 with one rounding to each stored tensor. Backward turns the gradients back (by -sin) and goes
through the norm, whose statistics are computed again from the input, into one packed gradient:

    z = the normalised head, r = 1 / its deviation, g = gradient of norm's result, t = g * (weight + weight_offset)
    dx = r * (t - z * mean(t * z))             rms; layer: r * (t - mean(t) - z * mean(t * z))
    dweight = sum g * z      dbias = sum g     fp32 partial sums of each program, added up in order

For decoding, k and v are also written to a cache in the same pass, each token to its slot: as they are returned, or as
e4m3 codes with one scale for each token and head, made of the fp32 numbers before their rounding:

    scale = 1 / (448 / amax)      code = e4m3(x * (448 / amax))         `weft.quantize(x, "e4m3:row:te")` of fp32 heads
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..language import tl, triton
from ..quant import Format
from ..quant.reference import quantize_copy
from ..runtime import Launch, Sharding, capabilities_of, define_flat_op, is_readable, kernel
from ..tiles.numbers import encode
from ..tiles.reduce import amax, larger
from ..tiles.rotate import cos_sin, rotate
from ..tiles.scales import fp32_scale, scaled
from .common.checks import FLOATS, INTEGERS, check_input, check_tensor, check_tensors, epsilon, real, whole
from .common.copies import cast_mode
from .common.results import FP32_MAX
from .common.rows import align_of, compute_dtype, contiguous
from .common.sums import _sum_kernel

# ---- where heads lie ------------------------------------------------------------------------------------

# The dimensions of a layout as positions of (batch, sequence, heads, numbers).
LAYOUTS = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3), "thd": (0, 0, 1, 2)}


class Heads(NamedTuple):
    """How a packed projection is cut, and how heads are normed and rotated."""

    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    packing: str  # "flat", "groups", or "apart": q, k and v are tensors of their own
    gate: bool
    layout: str
    out_layout: str
    norm: str  # "none", "rms" or "layer"
    norm_after: bool
    rope_dim: int  # 0: no rotation
    style: str
    rope_first: bool
    sections: tuple[int, ...]

    @property
    def q_dim(self) -> int:
        """Numbers of a query head in the input."""
        return self.head_dim * (1 + self.gate)

    @property
    def width(self) -> int:
        """Of the packed projection."""
        return self.heads * self.q_dim + self.kv_heads * (self.head_dim + self.v_dim)


def _sections(text: str) -> tuple[int, ...]:
    """Those of an op's argument, which is text: PyTorch wants the gradient of a list to be one."""
    return tuple(map(int, text.split()))


def _canonical(x: Tensor, layout: str) -> Tensor:
    """A view [batch, sequence, heads, numbers], or without the heads of a packed one."""
    if layout == "thd":
        return x[None]
    if layout == "sbhd":
        return x.transpose(0, 1)
    return x.transpose(1, 2) if layout == "bhsd" else x


def _laid_out(x: Tensor, layout: str) -> Tensor:
    """[batch, sequence, heads, numbers] as the layout has it, contiguous."""
    if layout == "thd":
        return x.reshape(-1, *x.shape[2:])
    return _canonical(x, layout).contiguous()


def _sizes(x: Tensor, layout: str) -> tuple[int, int]:
    """(batch, sequence) of a tensor in a layout."""
    if layout == "thd":
        return 1, x.shape[0]
    b, s = LAYOUTS[layout][:2]
    return x.shape[b], x.shape[s]


def _shape(layout: str, batch: int, tokens: int, heads: int, dim: int) -> tuple[int, ...]:
    if layout == "thd":
        return batch * tokens, heads, dim
    if layout == "bhsd":
        return batch, heads, tokens, dim
    return (tokens, batch, heads, dim) if layout == "sbhd" else (batch, tokens, heads, dim)


# ---- reference ------------------------------------------------------------------------------------------


def _split(x: Tensor, k: Tensor | None, v: Tensor | None, h: Heads) -> list[Tensor | None]:
    """q, k, v and gate as views [batch, sequence, heads, numbers]; q of a packed input may be a copy."""
    x = _canonical(x, h.layout)
    if h.packing == "apart":
        rest = [None if t is None else _canonical(t, h.layout) for t in (k, v)]
        both = x
    elif h.packing == "flat":
        parts = (h.heads * h.q_dim, h.kv_heads * h.head_dim, h.kv_heads * h.v_dim)
        both, *packed = x.split(parts, -1)
        both = both.unflatten(-1, (h.heads, h.q_dim))
        rest = [t.unflatten(-1, (h.kv_heads, d)) for t, d in zip(packed, (h.head_dim, h.v_dim), strict=True)]
    else:
        each = h.heads // h.kv_heads * h.q_dim
        grouped = x.unflatten(-1, (h.kv_heads, each + h.head_dim + h.v_dim))
        both, *packed = grouped.split((each, h.head_dim, h.v_dim), -1)
        both, rest = both.reshape(*both.shape[:2], h.heads, h.q_dim), list(packed)
    gate = both[..., h.head_dim :] if h.gate else None
    return [both[..., : h.head_dim], *rest, gate]


def _joined(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, h: Heads) -> Tensor:
    """The packed projection of parts [batch, sequence, heads, numbers]."""
    both = q if gate is None else torch.cat([q, gate], -1)
    if h.packing == "flat":
        return torch.cat([t.flatten(2) for t in (both, k, v)], -1)
    groups = both.reshape(*both.shape[:2], h.kv_heads, h.heads // h.kv_heads * h.q_dim)
    return torch.cat([groups, k, v], -1).flatten(2)


def _angles(
    cos: Tensor | None, sin: Tensor | None, positions: Tensor | None, base: float, h: Heads, batch: int,
    tokens: int, dtype: torch.dtype, device: torch.device,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """cos and sin [batch or 1, sequence, 1, pairs]."""
    half = h.rope_dim // 2
    if positions is None:
        where = torch.arange(tokens, device=device)[None, :, None]
    elif h.sections:
        axis = torch.repeat_interleave(
            torch.arange(3, device=device),
            torch.tensor(h.sections, device=device),
            output_size=sum(h.sections),
        )
        shared = positions[:, None] if positions.dim() == 2 else positions
        where = shared[axis].permute(1, 2, 0)  # [batch, sequence, pairs]
    else:
        where = (positions[None] if positions.dim() == 1 else positions)[..., None]
    if cos is None:
        inverse = base ** (-torch.arange(half, dtype=torch.float64, device=device) * 2 / h.rope_dim)
        angle = (where * inverse)[:, :, None, :]
        return torch.cos(angle).to(dtype), torch.sin(angle).to(dtype)
    assert sin is not None
    found = []
    for table in (cos, sin):
        if table.dim() == 3 or positions is None:
            value = (table if table.dim() == 3 else table[None])[:, :tokens]
        else:
            inside = (where >= 0) & (where < table.shape[0])
            rows = where.clamp(0, max(table.shape[0] - 1, 0)).expand(*where.shape[:2], half)
            pair = torch.arange(half, device=device)
            value = torch.where(inside, table[rows, pair], torch.nan)
        found.append(value[:, :, None, :].to(dtype))
    return found[0], found[1]


def _rotated(x: Tensor, angles: tuple[Tensor, Tensor] | None, h: Heads, inverse: bool) -> Tensor:
    """x [batch, sequence, heads, numbers]"""
    if angles is None:
        return x
    cos, sin = angles
    if inverse:
        sin = -sin
    rest = x.shape[-1] - h.rope_dim
    start = 0 if h.rope_first else rest
    before, turned, after = x.split((start, h.rope_dim, rest - start), -1)
    if h.style == "neox":
        a, b = turned.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([before, turned, after], -1)


def _normed(x: Tensor, eps: float, layer: bool) -> tuple[Tensor, Tensor]:
    """(z, r)"""
    centred = x - x.mean(-1, keepdim=True) if layer else x
    r = 1.0 / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred * r, r


def _affine_reference(z: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float) -> Tensor:
    if weight is not None:
        z = z * (weight.to(z.dtype) + offset)
    return z if bias is None else z + bias.to(z.dtype)


def qkv_prepare_reference(
    x: Tensor, k: Tensor | None, v: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None,
    q_bias: Tensor | None, k_bias: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    positions: Tensor | None, base: float, eps: float, weight_offset: float, heads: int, kv_heads: int,
    head_dim: int, v_dim: int, packing: str, gate: bool, layout: str, out_layout: str, norm: str,
    norm_after: bool, rope_dim: int, style: str, rope_first: bool, sections: str,
) -> list[Tensor]:  # fmt: skip
    """The definition: q, k, v and gate, those that there are, in `out_layout`."""
    h = Heads(
        heads, kv_heads, head_dim, v_dim, packing, gate, layout, out_layout, norm, norm_after, rope_dim, style,
        rope_first, _sections(sections),
    )  # fmt: skip
    vectors = (q_weight, k_weight, q_bias, k_bias)
    parts = _prepared(x, k, v, vectors, cos, sin, positions, base, eps, weight_offset, h)
    return [_laid_out(part.to(x.dtype), out_layout).clone() for part in parts if part is not None]


def _prepared(
    x: Tensor, k: Tensor | None, v: Tensor | None, vectors: tuple[Tensor | None, ...], cos: Tensor | None,
    sin: Tensor | None, positions: Tensor | None, base: float, eps: float, weight_offset: float, h: Heads,
) -> list[Tensor | None]:  # fmt: skip
    """q, k, v and gate [batch, sequence, heads, numbers], q and k not rounded yet."""
    dtype = compute_dtype(x)
    batch, tokens = _sizes(x, h.layout)
    angles = None
    if h.rope_dim:
        angles = _angles(cos, sin, positions, base, h, batch, tokens, dtype, x.device)
    parts = _split(x, k, v, h)
    q_weight, k_weight, q_bias, k_bias = vectors
    prepared: list[Tensor | None] = []
    for i, (part, weight, bias) in enumerate(
        zip(parts, (q_weight, k_weight, None, None), (q_bias, k_bias, None, None), strict=True)
    ):
        if part is None or i >= 2:
            prepared.append(part)
            continue
        value = part.to(dtype)
        if h.norm_after:
            value = _rotated(value, angles, h, False)
        if h.norm != "none":
            value = _affine_reference(_normed(value, eps, h.norm == "layer")[0], weight, bias, weight_offset)
        if not h.norm_after:
            value = _rotated(value, angles, h, False)
        prepared.append(value)
    return prepared


def qkv_prepare_cached_reference(
    x: Tensor, k: Tensor | None, v: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None,
    q_bias: Tensor | None, k_bias: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    positions: Tensor | None, base: float, eps: float, weight_offset: float, heads: int, kv_heads: int,
    head_dim: int, v_dim: int, packing: str, gate: bool, layout: str, out_layout: str, norm: str,
    norm_after: bool, rope_dim: int, style: str, rope_first: bool, sections: str, slots: Tensor,
    outputs: list[Tensor], caches: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    """Writes q, k, v and gate to `outputs`, and k and v to their slots of `caches`, the scales' after the numbers'."""
    h = Heads(
        heads, kv_heads, head_dim, v_dim, packing, gate, layout, out_layout, norm, norm_after, rope_dim, style,
        rope_first, _sections(sections),
    )  # fmt: skip
    vectors = (q_weight, k_weight, q_bias, k_bias)
    parts = _prepared(x, k, v, vectors, cos, sin, positions, base, eps, weight_offset, h)
    found = [part for part in parts if part is not None]
    for output, value in zip(outputs, found, strict=True):
        output.copy_(_laid_out(value.to(x.dtype), out_layout))
    slot = _slots(slots, x, layout).long().flatten()
    size = 1 if caches[0].dim() == 3 else caches[0].shape[1]
    inside = (slot >= 0) & (slot < caches[0].shape[0] * size)
    slot = slot[inside]
    for i, value in enumerate(found[1:3]):
        kept = value.flatten(0, 1)[inside]  # [tokens, heads, numbers]
        if len(caches) == 2:
            stored = [kept.to(x.dtype)]
        else:
            data, scale, _ = quantize_copy(kept.float().flatten(0, 1), _E4M3)
            stored = [data.view(torch.uint8).view(kept.shape), scale.view(kept.shape[:2])]
        for cache, values in zip(caches[i::2], stored, strict=True):
            into = cache.view(torch.uint8) if cache.element_size() == 1 else cache
            where = (slot,) if into.dim() == values.dim() else (slot // size, slot % size)
            into[where] = values
    return []


def _slots(slots: Tensor, x: Tensor, layout: str) -> Tensor:
    """A view [batch, sequence]."""
    batch, tokens = _sizes(x, layout)
    if layout == "sbhd":
        return slots.view(tokens, batch).t() if slots.dim() == 1 else slots.t()
    return slots.view(batch, tokens) if slots.dim() == 1 else slots


def qkv_prepare_backward_reference(
    dq: Tensor, dk: Tensor | None, dv: Tensor | None, dgate: Tensor | None, x: Tensor | None, k: Tensor | None,
    q_weight: Tensor | None, k_weight: Tensor | None, q_bias: Tensor | None, k_bias: Tensor | None,
    cos: Tensor | None, sin: Tensor | None, positions: Tensor | None, base: float, eps: float,
    weight_offset: float, heads: int, kv_heads: int, head_dim: int, v_dim: int, packing: str, gate: bool,
    layout: str, out_layout: str, norm: str, norm_after: bool, rope_dim: int, style: str, rope_first: bool,
    sections: str, batch: int, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Of dx (dq, dk and dv apart), dq_weight, dk_weight, dq_bias and dk_bias those that are needed."""
    h = Heads(
        heads, kv_heads, head_dim, v_dim, packing, gate, layout, out_layout, norm, norm_after, rope_dim, style,
        rope_first, _sections(sections),
    )  # fmt: skip
    dtype = compute_dtype(dq)
    tokens = _tokens(dq, out_layout, batch)
    angles = None
    if rope_dim:
        angles = _angles(cos, sin, positions, base, h, batch, tokens, dtype, dq.device)
    need_x, need_weights, need_biases = needs[0], needs[1:3], needs[3:5]
    inputs: list[Tensor | None] = [None, None]
    if norm != "none":
        assert x is not None
        if packing == "apart":
            inputs = [None if t is None else _canonical(t, layout) for t in (x, k)]
        else:
            inputs = _split(x, None, None, h)[:2]
    parts: list[Tensor | None] = []
    sums: list[Tensor | None] = [None, None, None, None]
    for i, gradient in enumerate((dq, dk, dv, dgate)):
        if gradient is None:
            parts.append(None)
            continue
        d = gradient.view(batch, tokens, *gradient.shape[1:]) if out_layout == "thd" else gradient
        d = _canonical(d, "bshd" if out_layout == "thd" else out_layout)
        if i < 2:
            d = d.to(dtype)
            if not norm_after:
                d = _rotated(d, angles, h, True)
            if norm != "none":
                source, weight, bias = inputs[i], (q_weight, k_weight)[i], (q_bias, k_bias)[i]
                assert source is not None
                value = source.to(dtype)
                if norm_after:
                    value = _rotated(value, angles, h, False)
                z, r = _normed(value, eps, norm == "layer")
                if need_weights[i]:
                    assert weight is not None
                    sums[i] = (d * z).sum((0, 1, 2)).to(weight.dtype)
                if need_biases[i]:
                    assert bias is not None
                    sums[2 + i] = d.sum((0, 1, 2)).to(bias.dtype)
                if weight is not None:
                    d = d * (weight.to(dtype) + weight_offset)
                mean = d.mean(-1, keepdim=True) if norm == "layer" else 0.0
                d = r * (d - z * (d * z).mean(-1, keepdim=True) - mean)
            if norm_after:
                d = _rotated(d, angles, h, True)
            d = d.to(dq.dtype)
        parts.append(d)
    results: list[Tensor] = []
    if need_x:
        if packing == "apart":
            *kept, gate_part = parts
            if gate_part is not None:
                assert kept[0] is not None
                kept[0] = torch.cat([kept[0], gate_part], -1)
            results += [_laid_out(part, layout).clone() for part in kept if part is not None]
        else:
            q, k, v, gate_part = parts
            assert q is not None
            assert k is not None
            assert v is not None
            packed = _joined(q, k, v, gate_part, h)
            results.append(packed[0] if layout == "thd" else _canonical(packed, layout).contiguous())
    return results + [t for t in sums if t is not None]


def _tokens(dq: Tensor, out_layout: str, batch: int) -> int:
    """Length of the sequences, from a result."""
    if out_layout == "thd":
        return dq.shape[0] // max(batch, 1)
    return dq.shape[LAYOUTS[out_layout][1]]


def rope_reference(
    x: Tensor, cos: Tensor | None, sin: Tensor | None, positions: Tensor | None, base: float, layout: str,
    out_layout: str, rope_dim: int, style: str, rope_first: bool, sections: str, inverse: bool,
) -> list[Tensor]:  # fmt: skip
    """The definition of the rotation alone."""
    h = _rotation(x, layout, out_layout, rope_dim, style, rope_first, sections)
    dtype = compute_dtype(x)
    batch, tokens = _sizes(x, layout)
    angles = _angles(cos, sin, positions, base, h, batch, tokens, dtype, x.device)
    return [
        _laid_out(
            _rotated(_canonical(x, layout).to(dtype), angles, h, inverse).to(x.dtype), out_layout
        ).clone()
    ]


def _rotation(
    x: Tensor, layout: str, out_layout: str, rope_dim: int, style: str, rope_first: bool, sections: str
) -> Heads:
    dim = x.shape[-1]
    heads = x.shape[LAYOUTS[layout][2]]
    return Heads(
        heads, 0, dim, dim, "apart", False, layout, out_layout, "none", False, rope_dim, style, rope_first,
        _sections(sections),
    )  # fmt: skip


# ---- kernels --------------------------------------------------------------------------------------------

# A head is two tiles of half its numbers, a and b [TOKENS, HEADS, PAIRS]: the first and the second numbers of the
# `half` pairs that are rotated, and after them the halves of the `rest`. Numbers that do not exist are 0.


@triton.jit
def _columns(
    half, rest, PAIRS: tl.constexpr, FIRST: tl.constexpr, MASKED: tl.constexpr, PARTIAL: tl.constexpr
):
    """Where in a head the numbers of a and of b are, and which exist: four of [PAIRS]. Those that are neighbours in
    memory are so here, in pieces that the compiler knows to be aligned if half and rest are."""
    lane = tl.arange(0, PAIRS)
    a_rest = rest - rest // 2
    if PARTIAL:
        if FIRST:
            a = lane + tl.where(lane < half, 0, half)
            b = lane + half + tl.where(lane < half, 0, a_rest)
        else:
            a = lane + tl.where(lane < half, rest, -half)
            b = lane + tl.where(lane < half, rest + half, a_rest - half)
    else:
        a = lane
        b = lane + half
    if MASKED and PARTIAL:
        return a, b, lane < half + a_rest, lane < half + rest // 2
    elif MASKED:
        return a, b, lane < half, lane < half
    else:
        return a, b, lane >= 0, lane >= 0


@triton.jit
def _paired_columns(
    half, rest, PAIRS: tl.constexpr, FIRST: tl.constexpr, MASKED: tl.constexpr, PARTIAL: tl.constexpr
):
    """The same for pairs of neighbours: one column after the other, two of [2 * PAIRS]."""
    lane = tl.arange(0, 2 * PAIRS)
    column = lane
    if PARTIAL and not FIRST:
        column = lane + tl.where(lane < 2 * half, rest, -2 * half)
    if MASKED:
        return column, lane < 2 * half + rest
    else:
        return column, lane >= 0


@triton.jit
def _load_pairs(
    ptr, off, there, half, rest, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, FIRST: tl.constexpr,
    MASKED: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """(a, b) in fp32 of the heads at off [T, H]."""
    if INTERLEAVED:
        T: tl.constexpr = off.shape[0]
        H: tl.constexpr = off.shape[1]
        column, exists = _paired_columns(half, rest, PAIRS, FIRST, MASKED, PARTIAL)
        mask = there[:, :, None] & exists[None, None, :]
        both = tl.load(ptr + off[:, :, None] + column[None, None, :], mask=mask, other=0.0).to(tl.float32)
        return tl.split(tl.reshape(both, (T, H, PAIRS, 2)))
    else:
        a_column, b_column, a_exists, b_exists = _columns(half, rest, PAIRS, FIRST, MASKED, PARTIAL)
        mask = there[:, :, None] & a_exists[None, None, :]
        a = tl.load(ptr + off[:, :, None] + a_column[None, None, :], mask=mask, other=0.0).to(tl.float32)
        mask = there[:, :, None] & b_exists[None, None, :]
        b = tl.load(ptr + off[:, :, None] + b_column[None, None, :], mask=mask, other=0.0).to(tl.float32)
        return a, b


@triton.jit
def _store_pairs(
    ptr, off, there, a, b, half, rest, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, FIRST: tl.constexpr,
    MASKED: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """The one rounding of each head, to the dtype that ptr points to."""
    DTYPE: tl.constexpr = ptr.dtype.element_ty
    if INTERLEAVED:
        column, exists = _paired_columns(half, rest, PAIRS, FIRST, MASKED, PARTIAL)
        mask = there[:, :, None] & exists[None, None, :]
        tl.store(ptr + off[:, :, None] + column[None, None, :], tl.interleave(a, b).to(DTYPE), mask=mask)
    else:
        a_column, b_column, a_exists, b_exists = _columns(half, rest, PAIRS, FIRST, MASKED, PARTIAL)
        mask = there[:, :, None] & a_exists[None, None, :]
        tl.store(ptr + off[:, :, None] + a_column[None, None, :], a.to(DTYPE), mask=mask)
        mask = there[:, :, None] & b_exists[None, None, :]
        tl.store(ptr + off[:, :, None] + b_column[None, None, :], b.to(DTYPE), mask=mask)


@triton.jit
def _load_vector(
    ptr, offset, half, rest, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, FIRST: tl.constexpr,
    MASKED: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """(a, b) of a weight or a bias: tiles [1, 1, PAIRS]."""
    zero = tl.zeros((1, 1), tl.int32)
    a, b = _load_pairs(ptr, zero, zero == 0, half, rest, PAIRS, INTERLEAVED, FIRST, MASKED, PARTIAL)
    return a + offset, b + offset


@triton.jit
def _find_angles(
    cos_ptr, sin_ptr, turns_ptr, positions_ptr, batch, token, tokens, half, table_rows, table_batch_stride,
    table_stride, position_axis_stride, position_batch_stride, position_stride, first_section, second_section,
    SECTIONS: tl.constexpr, INVERSE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """cos and sin [TOKENS, 1, PAIRS] of tokens [TOKENS] of a sequence; of what is not rotated, something finite."""
    pair = tl.arange(0, PAIRS)
    there = (token < tokens)[:, None] & (pair < half)[None, :]
    if positions_ptr is not None:
        place_off = batch * position_batch_stride + token * position_stride
        if SECTIONS:
            axis = tl.where(pair >= second_section, 2, tl.where(pair >= first_section, 1, 0)).to(tl.int64)
            off = place_off[:, None] + (axis * position_axis_stride)[None, :]
            position = tl.load(positions_ptr + off, mask=there, other=0).to(tl.int64)  # [TOKENS, PAIRS]
        else:
            position = tl.load(positions_ptr + place_off, mask=token < tokens, other=0).to(tl.int64)[:, None]
    else:
        position = token[:, None]
    if cos_ptr is not None:
        inside = there & (position >= 0) & (position < table_rows)
        off = batch * table_batch_stride + position * table_stride + pair[None, :]
        cos = tl.load(cos_ptr + off, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + off, mask=inside, other=0.0).to(tl.float32)
        if positions_ptr is not None:  # no row of the table: NaN, which every rotated number is made of
            sin = tl.where(there & (inside == 0), float("nan"), sin)
    else:
        turns = tl.load(turns_ptr + pair, mask=pair < half, other=0)[None, :]
        cos, sin = cos_sin(position * turns)
    if INVERSE:
        sin = -sin
    return cos[:, None, :], sin[:, None, :]


@triton.jit
def _turn(a, b, cos, sin, half, PARTIAL: tl.constexpr):
    """The pairs rotated; what comes after them as it is."""
    turned_a, turned_b = rotate(a, b, cos, sin)
    if PARTIAL:
        turned = (tl.arange(0, a.shape[2]) < half)[None, None, :]
        turned_a, turned_b = tl.where(turned, turned_a, a), tl.where(turned, turned_b, b)
    return turned_a, turned_b


@triton.jit
def _total(x):
    """Sums over heads, [T, H, 1]."""
    return tl.sum(x, axis=2)[:, :, None]


@triton.jit
def _normalize(a, b, half, rest, eps, LAYER: tl.constexpr, MASKED: tl.constexpr):
    """(a, b) normalised, and r [T, H, 1]."""
    dim = (2 * half + rest).to(tl.float32)
    if LAYER:
        mean = _total(a + b) / dim
        a, b = a - mean, b - mean
        if MASKED:  # a lane without a number would add mean^2
            lane = tl.arange(0, a.shape[2])[None, None, :]
            a = tl.where(lane < half + rest - rest // 2, a, 0.0)
            b = tl.where(lane < half + rest // 2, b, 0.0)
    squares = _total(a * a + b * b)
    variance = tl.div_rn(squares, squares * 0.0 + dim)
    r = tl.div_rn(tl.full(squares.shape, 1.0, tl.float32), tl.sqrt_rn(variance + eps))
    return a * r, b * r, r


@triton.jit
def _multiple(n, ALIGN: tl.constexpr):
    """n, of which the compiler learns that it is a multiple of ALIGN."""
    return (n // ALIGN) * ALIGN


@triton.jit
def _head_offset(head, group, group_stride, head_stride):
    """Where heads [H] begin: `group` of them lie at head_stride, groups of them at group_stride."""
    return (head // group).to(tl.int64) * group_stride + (head % group).to(tl.int64) * head_stride


# How heads are cached in FP8: one scale for each, from its fp32 numbers.
_E4M3 = Format("row", "e4m3", "te")
CACHE_FORMAT = tl.constexpr(_E4M3)


@triton.jit
def _store_scales(scale_ptr, largest, off, head, head_stride, kept):
    """The scales [T, H] of heads with this amax, at off [T]; returns the factors that go with them, [T, H, 1]."""
    scale, factor = fp32_scale(largest, FP32_MAX, CACHE_FORMAT)
    off = off[:, None] + (head.to(tl.int64) * head_stride)[None, :]
    tl.store(scale_ptr + off, scale, mask=kept)
    return factor[:, :, None]


@triton.jit
def _prepare_heads(
    x_ptr, y_ptr, weight_ptr, bias_ptr, x_off, y_off, exists, cos, sin, heads, group, x_group_stride,
    x_head_stride, y_head_stride, half, rest, eps, weight_offset, NORM: tl.constexpr, AFTER: tl.constexpr,
    ROTATE: tl.constexpr, INTERLEAVED: tl.constexpr, FIRST: tl.constexpr, HEADS: tl.constexpr,
    PAIRS: tl.constexpr, MASKED: tl.constexpr, PARTIAL: tl.constexpr, CAST: tl.constexpr, cache_ptr, scale_ptr,
    cache_off, scale_off, cached, cache_head_stride, scale_head_stride,
):  # fmt: skip
    """All heads of the tokens at x_off [T]: normed, rotated and stored at y_off [T]. If there is a cache, those of
    tokens that are `cached` [T] at cache_off [T] too."""
    if weight_ptr is not None:
        wa, wb = _load_vector(
            weight_ptr, weight_offset, half, rest, PAIRS, INTERLEAVED, FIRST, MASKED, PARTIAL
        )
    if bias_ptr is not None:
        ba, bb = _load_vector(bias_ptr, 0.0, half, rest, PAIRS, INTERLEAVED, FIRST, MASKED, PARTIAL)
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        there = exists[:, None] & (head < heads)[None, :]  # [T, H]
        off = x_off[:, None] + _head_offset(head, group, x_group_stride, x_head_stride)[None, :]
        a, b = _load_pairs(x_ptr, off, there, half, rest, PAIRS, INTERLEAVED, FIRST, MASKED, PARTIAL)
        if ROTATE and AFTER:
            a, b = _turn(a, b, cos, sin, half, PARTIAL)
        if NORM > 0:
            a, b, _ = _normalize(a, b, half, rest, eps, NORM == 2, MASKED)
            if weight_ptr is not None:
                a, b = a * wa, b * wb
            if bias_ptr is not None:
                a, b = a + ba, b + bb
        if ROTATE and not AFTER:
            a, b = _turn(a, b, cos, sin, half, PARTIAL)
        off = y_off[:, None] + (head.to(tl.int64) * y_head_stride)[None, :]
        _store_pairs(y_ptr, off, there, a, b, half, rest, PAIRS, INTERLEAVED, FIRST, MASKED, PARTIAL)
        if cache_ptr is not None:
            kept = there & cached[:, None]
            if scale_ptr is not None:
                largest = larger(amax(a, axis=2), amax(b, axis=2))
                factor = _store_scales(scale_ptr, largest, scale_off, head, scale_head_stride, kept)
                a = encode(scaled(a, factor, CACHE_FORMAT), CACHE_FORMAT, CAST)
                b = encode(scaled(b, factor, CACHE_FORMAT), CACHE_FORMAT, CAST)
            off = cache_off[:, None] + (head.to(tl.int64) * cache_head_stride)[None, :]
            _store_pairs(cache_ptr, off, kept, a, b, half, rest, PAIRS, INTERLEAVED, FIRST, MASKED, PARTIAL)


@triton.jit
def _copy_heads(
    x_ptr, y_ptr, x_off, y_off, exists, heads, x_group, x_group_stride, x_head_stride, y_group, y_group_stride,
    y_head_stride, dim, HEADS: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr, CAST: tl.constexpr = 0,
    cache_ptr=None, scale_ptr=None, cache_off=None, scale_off=None, cached=None, cache_head_stride=0,
    scale_head_stride=0,
):  # fmt: skip
    """All heads of the tokens as they are; to a cache too if there is one, as `_prepare_heads` does."""
    lane = tl.arange(0, DIM)[None, None, :]
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        mask = (exists[:, None] & (head < heads)[None, :])[:, :, None] & (lane < (dim if MASKED else DIM))
        off = x_off[:, None] + _head_offset(head, x_group, x_group_stride, x_head_stride)[None, :]
        value = tl.load(x_ptr + off[:, :, None] + lane, mask=mask, other=0.0)
        off = y_off[:, None] + _head_offset(head, y_group, y_group_stride, y_head_stride)[None, :]
        tl.store(y_ptr + off[:, :, None] + lane, value, mask=mask)
        if cache_ptr is not None:
            kept = cached[:, None] & exists[:, None] & (head < heads)[None, :]
            if scale_ptr is not None:
                wide = value.to(tl.float32)
                factor = _store_scales(
                    scale_ptr, amax(wide, axis=2), scale_off, head, scale_head_stride, kept
                )
                value = encode(scaled(wide, factor, CACHE_FORMAT), CACHE_FORMAT, CAST)
            off = cache_off[:, None] + (head.to(tl.int64) * cache_head_stride)[None, :]
            tl.store(cache_ptr + off[:, :, None] + lane, value, mask=mask & cached[:, None, None])


@kernel
def _qkv_kernel(
    q_ptr,  # [batch, sequence, heads, dim] anywhere; so k, v and gate, which are None where they are not there
    k_ptr,
    v_ptr,
    gate_ptr,
    q_weight_ptr,  # [dim], or None; so the next three
    k_weight_ptr,
    q_bias_ptr,
    k_bias_ptr,
    cos_ptr,  # [table_rows, half], or None
    sin_ptr,
    turns_ptr,  # int64 [half]: 2^64 times the turns per position, or None
    positions_ptr,  # [batch, sequence], or [3, batch, sequence] with SECTIONS, or None
    q_out_ptr,  # [batch, sequence, heads, dim] anywhere, and so on
    k_out_ptr,
    v_out_ptr,
    gate_out_ptr,
    slots_ptr,  # [batch, sequence]: where each token goes in the caches, or None without them
    k_cache_ptr,  # [pages, page_size, kv_heads, dim] anywhere, in the dtype of k or bytes of e4m3; so v
    v_cache_ptr,
    k_scale_ptr,  # fp32 [pages, page_size, kv_heads] anywhere, or None; so v
    v_scale_ptr,
    batches,
    tokens,  # of a sequence
    heads,
    kv_heads,
    group,  # query heads that lie at one stride
    half,
    rest,
    v_dim,
    q_start,
    q_batch_stride,
    q_stride,
    q_group_stride,
    q_head_stride,
    k_start,
    k_batch_stride,
    k_stride,
    k_head_stride,
    v_start,
    v_batch_stride,
    v_stride,
    v_head_stride,
    q_out_batch_stride,
    q_out_stride,
    q_out_head_stride,
    k_out_batch_stride,
    k_out_stride,
    k_out_head_stride,
    v_out_batch_stride,
    v_out_stride,
    v_out_head_stride,
    table_rows,
    table_batch_stride,
    table_stride,
    position_axis_stride,
    position_batch_stride,
    position_stride,
    first_section,
    second_section,
    slots,  # that the caches have
    page_size,
    slot_batch_stride,
    slot_stride,
    k_page_stride,
    k_place_stride,
    k_cache_head_stride,
    v_page_stride,
    v_place_stride,
    v_cache_head_stride,
    k_scale_page_stride,
    k_scale_place_stride,
    k_scale_head_stride,
    v_scale_page_stride,
    v_scale_place_stride,
    v_scale_head_stride,
    eps,
    weight_offset,
    NORM: tl.constexpr,  # 0, 1: rms, 2: layer
    AFTER: tl.constexpr,  # the norm comes after the rotation
    ROTATE: tl.constexpr,
    INVERSE: tl.constexpr,  # by the negative angles
    INTERLEAVED: tl.constexpr,
    FIRST: tl.constexpr,  # the rotated part comes first
    SECTIONS: tl.constexpr,
    TOKENS: tl.constexpr,  # of a program
    HEADS: tl.constexpr,  # at a time
    PAIRS: tl.constexpr,
    V_DIM: tl.constexpr,
    DIM: tl.constexpr,
    MASKED: tl.constexpr,  # a head, or one of v, is narrower than its tiles
    PARTIAL: tl.constexpr,  # not all of a head is rotated
    ALIGN: tl.constexpr,  # all of them, starts and strides are multiples of it, but not those of slots and scales
    CAST: tl.constexpr,  # how codes are made
):
    """A few tokens of a sequence, all of their heads: angles are found once."""
    half, rest, v_dim = _multiple(half, ALIGN), _multiple(rest, ALIGN), _multiple(v_dim, ALIGN)
    program = tl.program_id(0)
    batch = (program % batches).to(tl.int64)
    token = (program // batches).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)  # [TOKENS]
    exists = token < tokens
    cos = None
    sin = None
    if ROTATE:
        cos, sin = _find_angles(
            cos_ptr, sin_ptr, turns_ptr, positions_ptr, batch, token, tokens, half, table_rows,
            _multiple(table_batch_stride, ALIGN), _multiple(table_stride, ALIGN), position_axis_stride,
            position_batch_stride, position_stride, first_section, second_section, SECTIONS, INVERSE, PAIRS,
        )  # fmt: skip
    q_off = _multiple(q_start, ALIGN) + batch * _multiple(q_batch_stride, ALIGN)
    q_off = q_off + token * _multiple(q_stride, ALIGN)
    q_out_off = batch * _multiple(q_out_batch_stride, ALIGN) + token * _multiple(q_out_stride, ALIGN)
    q_group_stride, q_head_stride = _multiple(q_group_stride, ALIGN), _multiple(q_head_stride, ALIGN)
    q_out_head_stride = _multiple(q_out_head_stride, ALIGN)
    _prepare_heads(
        q_ptr, q_out_ptr, q_weight_ptr, q_bias_ptr, q_off, q_out_off, exists, cos, sin, heads, group,
        q_group_stride, q_head_stride, q_out_head_stride, half, rest, eps, weight_offset, NORM, AFTER, ROTATE,
        INTERLEAVED, FIRST, HEADS, PAIRS, MASKED, PARTIAL, CAST, None, None, None, None, None, 0, 0,
    )  # fmt: skip
    cached = None
    k_cache_off = None
    v_cache_off = None
    k_scale_off = None
    v_scale_off = None
    if slots_ptr is not None:
        slot_off = batch * slot_batch_stride + token * slot_stride
        slot = tl.load(slots_ptr + slot_off, mask=exists, other=-1).to(tl.int64)
        cached = (slot >= 0) & (slot < slots)  # nothing is written for any other
        slot = tl.where(cached, slot, 0)
        page, place = slot // page_size, slot % page_size
        k_cache_off = page * _multiple(k_page_stride, ALIGN) + place * _multiple(k_place_stride, ALIGN)
        v_cache_off = page * _multiple(v_page_stride, ALIGN) + place * _multiple(v_place_stride, ALIGN)
        k_scale_off = page * k_scale_page_stride + place * k_scale_place_stride
        v_scale_off = page * v_scale_page_stride + place * v_scale_place_stride
    if k_ptr is not None:
        k_off = _multiple(k_start, ALIGN) + batch * _multiple(k_batch_stride, ALIGN)
        k_off = k_off + token * _multiple(k_stride, ALIGN)
        k_out_off = batch * _multiple(k_out_batch_stride, ALIGN) + token * _multiple(k_out_stride, ALIGN)
        _prepare_heads(
            k_ptr, k_out_ptr, k_weight_ptr, k_bias_ptr, k_off, k_out_off, exists, cos, sin, kv_heads, kv_heads, 0,
            _multiple(k_head_stride, ALIGN), _multiple(k_out_head_stride, ALIGN), half, rest, eps, weight_offset,
            NORM, AFTER, ROTATE, INTERLEAVED, FIRST, HEADS, PAIRS, MASKED, PARTIAL, CAST, k_cache_ptr, k_scale_ptr,
            k_cache_off, k_scale_off, cached, _multiple(k_cache_head_stride, ALIGN), k_scale_head_stride,
        )  # fmt: skip
    if v_ptr is not None:
        v_off = _multiple(v_start, ALIGN) + batch * _multiple(v_batch_stride, ALIGN)
        v_off = v_off + token * _multiple(v_stride, ALIGN)
        v_out_off = batch * _multiple(v_out_batch_stride, ALIGN) + token * _multiple(v_out_stride, ALIGN)
        _copy_heads(
            v_ptr, v_out_ptr, v_off, v_out_off, exists, kv_heads, kv_heads, 0, _multiple(v_head_stride, ALIGN),
            kv_heads, 0, _multiple(v_out_head_stride, ALIGN), v_dim, HEADS, V_DIM, MASKED, CAST, v_cache_ptr,
            v_scale_ptr, v_cache_off, v_scale_off, cached, _multiple(v_cache_head_stride, ALIGN),
            v_scale_head_stride,
        )  # fmt: skip
    if gate_ptr is not None:
        _copy_heads(
            gate_ptr, gate_out_ptr, q_off + (2 * half + rest), q_out_off, exists, heads, group, q_group_stride,
            q_head_stride, heads, 0, q_out_head_stride, 2 * half + rest, HEADS, DIM, MASKED,
        )  # fmt: skip


@triton.jit
def _backward_heads(
    dy_ptr, x_ptr, dx_ptr, weight_ptr, dy_off, x_off, dx_off, exists, cos, sin, heads, group, dy_head_stride,
    x_group_stride, x_head_stride, dx_group_stride, dx_head_stride, half, rest, eps, weight_offset, da_weight,
    db_weight, da_bias, db_bias, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, NORM: tl.constexpr,
    AFTER: tl.constexpr, ROTATE: tl.constexpr, INTERLEAVED: tl.constexpr, FIRST: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, MASKED: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """The gradients of all heads of some tokens; the sums for weight and bias, with these heads added."""
    dim = (2 * half + rest).to(tl.float32)
    if weight_ptr is not None:
        wa, wb = _load_vector(
            weight_ptr, weight_offset, half, rest, PAIRS, INTERLEAVED, FIRST, MASKED, PARTIAL
        )
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        there = exists[:, None] & (head < heads)[None, :]  # [T, H]
        off = dy_off[:, None] + (head.to(tl.int64) * dy_head_stride)[None, :]
        a, b = _load_pairs(dy_ptr, off, there, half, rest, PAIRS, INTERLEAVED, FIRST, MASKED, PARTIAL)
        if ROTATE and not AFTER:
            a, b = _turn(a, b, cos, -sin, half, PARTIAL)
        if NORM > 0:
            off = x_off[:, None] + _head_offset(head, group, x_group_stride, x_head_stride)[None, :]
            za, zb = _load_pairs(x_ptr, off, there, half, rest, PAIRS, INTERLEAVED, FIRST, MASKED, PARTIAL)
            if ROTATE and AFTER:
                za, zb = _turn(za, zb, cos, sin, half, PARTIAL)
            za, zb, r = _normalize(za, zb, half, rest, eps, NORM == 2, MASKED)
            if DWEIGHT:
                da_weight += a * za
                db_weight += b * zb
            if DBIAS:
                da_bias += a
                db_bias += b
            if weight_ptr is not None:
                a, b = a * wa, b * wb
            tz = _total(a * za + b * zb) / dim
            if NORM == 2:
                t = _total(a + b) / dim
                a, b = a - t, b - t
            a, b = r * (a - za * tz), r * (b - zb * tz)
        if ROTATE and AFTER:
            a, b = _turn(a, b, cos, -sin, half, PARTIAL)
        if dx_ptr is not None:
            off = dx_off[:, None] + _head_offset(head, group, dx_group_stride, dx_head_stride)[None, :]
            _store_pairs(dx_ptr, off, there, a, b, half, rest, PAIRS, INTERLEAVED, FIRST, MASKED, PARTIAL)
    return da_weight, db_weight, da_bias, db_bias


@triton.jit
def _store_sums(
    ptr, program, a, b, half, rest, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, FIRST: tl.constexpr,
    MASKED: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Tiles added up over tokens and heads, to the program's row of partial sums [programs, dim]."""
    a = tl.sum(tl.sum(a, axis=0), axis=0)[None, None, :]
    b = tl.sum(tl.sum(b, axis=0), axis=0)[None, None, :]
    off = tl.zeros((1, 1), tl.int64) + program * (2 * half + rest)
    _store_pairs(ptr, off, off >= 0, a, b, half, rest, PAIRS, INTERLEAVED, FIRST, MASKED, PARTIAL)


@kernel
def _qkv_backward_kernel(
    dq_ptr,  # [batch, sequence, heads, dim] anywhere; so dk, dv and dgate, which are None where they are not there
    dk_ptr,
    dv_ptr,
    dgate_ptr,
    q_ptr,  # the input of the norm, or None without one
    k_ptr,
    q_weight_ptr,  # [dim], or None
    k_weight_ptr,
    cos_ptr,  # as forward
    sin_ptr,
    turns_ptr,
    positions_ptr,
    q_grad_ptr,  # [batch, sequence, heads, dim] anywhere, or None if nobody wants these; so the next two
    k_grad_ptr,
    v_grad_ptr,
    q_weight_sum_ptr,  # fp32 partial sums [programs, dim], or None; so the next three
    k_weight_sum_ptr,
    q_bias_sum_ptr,
    k_bias_sum_ptr,
    batches,
    tokens,
    heads,
    kv_heads,
    group,
    half,
    rest,
    v_dim,
    dq_batch_stride,
    dq_stride,
    dq_head_stride,
    dk_batch_stride,
    dk_stride,
    dk_head_stride,
    dv_batch_stride,
    dv_stride,
    dv_head_stride,
    dgate_batch_stride,
    dgate_stride,
    dgate_head_stride,
    q_start,
    q_batch_stride,
    q_stride,
    q_group_stride,
    q_head_stride,
    k_start,
    k_batch_stride,
    k_stride,
    k_head_stride,
    q_grad_start,
    q_grad_batch_stride,
    q_grad_stride,
    q_grad_group_stride,
    q_grad_head_stride,
    k_grad_start,
    k_grad_batch_stride,
    k_grad_stride,
    k_grad_head_stride,
    v_grad_start,
    v_grad_batch_stride,
    v_grad_stride,
    v_grad_head_stride,
    table_rows,
    table_batch_stride,
    table_stride,
    position_axis_stride,
    position_batch_stride,
    position_stride,
    first_section,
    second_section,
    tiles,  # of TOKENS tokens
    program_tiles,  # of a program
    eps,
    weight_offset,
    NORM: tl.constexpr,
    AFTER: tl.constexpr,
    ROTATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FIRST: tl.constexpr,
    SECTIONS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    V_DIM: tl.constexpr,
    DIM: tl.constexpr,
    MASKED: tl.constexpr,
    PARTIAL: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """A run of tiles of a few tokens: their query heads, then what else they have. Sums stay in registers until the
    last tile of the one, and the other needs none of these registers."""
    half, rest, v_dim = _multiple(half, ALIGN), _multiple(rest, ALIGN), _multiple(v_dim, ALIGN)
    q_group_stride, q_head_stride = _multiple(q_group_stride, ALIGN), _multiple(q_head_stride, ALIGN)
    q_grad_group_stride = _multiple(q_grad_group_stride, ALIGN)
    q_grad_head_stride = _multiple(q_grad_head_stride, ALIGN)
    program = tl.program_id(0).to(tl.int64)
    first = program * program_tiles
    last = tl.minimum(first + program_tiles, tiles)
    da_weight = tl.zeros((TOKENS, HEADS, PAIRS), tl.float32)
    db_weight = tl.zeros((TOKENS, HEADS, PAIRS), tl.float32)
    da_bias = tl.zeros((TOKENS, HEADS, PAIRS), tl.float32)
    db_bias = tl.zeros((TOKENS, HEADS, PAIRS), tl.float32)
    for tile in range(first, last):
        batch = tile % batches
        token = (tile // batches) * TOKENS + tl.arange(0, TOKENS)  # [TOKENS]
        exists = token < tokens
        cos = None
        sin = None
        if ROTATE:
            cos, sin = _find_angles(
                cos_ptr, sin_ptr, turns_ptr, positions_ptr, batch, token, tokens, half, table_rows,
                _multiple(table_batch_stride, ALIGN), _multiple(table_stride, ALIGN), position_axis_stride,
                position_batch_stride, position_stride, first_section, second_section, SECTIONS, False, PAIRS,
            )  # fmt: skip
        dq_off = batch * _multiple(dq_batch_stride, ALIGN) + token * _multiple(dq_stride, ALIGN)
        q_off = _multiple(q_start, ALIGN) + batch * _multiple(q_batch_stride, ALIGN)
        q_off = q_off + token * _multiple(q_stride, ALIGN)
        q_grad_off = _multiple(q_grad_start, ALIGN) + batch * _multiple(q_grad_batch_stride, ALIGN)
        q_grad_off = q_grad_off + token * _multiple(q_grad_stride, ALIGN)
        da_weight, db_weight, da_bias, db_bias = _backward_heads(
            dq_ptr, q_ptr, q_grad_ptr, q_weight_ptr, dq_off, q_off, q_grad_off, exists, cos, sin, heads, group,
            _multiple(dq_head_stride, ALIGN), q_group_stride, q_head_stride, q_grad_group_stride,
            q_grad_head_stride, half, rest, eps, weight_offset, da_weight, db_weight, da_bias, db_bias,
            q_weight_sum_ptr is not None, q_bias_sum_ptr is not None, NORM, AFTER, ROTATE, INTERLEAVED, FIRST,
            HEADS, PAIRS, MASKED, PARTIAL,
        )  # fmt: skip
        if dgate_ptr is not None and q_grad_ptr is not None:
            dgate_off = batch * _multiple(dgate_batch_stride, ALIGN) + token * _multiple(dgate_stride, ALIGN)
            _copy_heads(
                dgate_ptr, q_grad_ptr, dgate_off, q_grad_off + (2 * half + rest), exists, heads, heads, 0,
                _multiple(dgate_head_stride, ALIGN), group, q_grad_group_stride, q_grad_head_stride,
                2 * half + rest, HEADS, DIM, MASKED,
            )  # fmt: skip
    if q_weight_sum_ptr is not None:
        _store_sums(
            q_weight_sum_ptr, program, da_weight, db_weight, half, rest, PAIRS, INTERLEAVED, FIRST,
            MASKED, PARTIAL,
        )  # fmt: skip
    if q_bias_sum_ptr is not None:
        _store_sums(
            q_bias_sum_ptr, program, da_bias, db_bias, half, rest, PAIRS, INTERLEAVED, FIRST, MASKED, PARTIAL
        )  # fmt: skip

    da_weight = tl.zeros((TOKENS, HEADS, PAIRS), tl.float32)
    db_weight = tl.zeros((TOKENS, HEADS, PAIRS), tl.float32)
    da_bias = tl.zeros((TOKENS, HEADS, PAIRS), tl.float32)
    db_bias = tl.zeros((TOKENS, HEADS, PAIRS), tl.float32)
    for tile in range(first, last):
        batch = tile % batches
        token = (tile // batches) * TOKENS + tl.arange(0, TOKENS)
        exists = token < tokens
        cos = None
        sin = None
        if ROTATE:
            cos, sin = _find_angles(
                cos_ptr, sin_ptr, turns_ptr, positions_ptr, batch, token, tokens, half, table_rows,
                _multiple(table_batch_stride, ALIGN), _multiple(table_stride, ALIGN), position_axis_stride,
                position_batch_stride, position_stride, first_section, second_section, SECTIONS, False, PAIRS,
            )  # fmt: skip
        dk_off = batch * _multiple(dk_batch_stride, ALIGN) + token * _multiple(dk_stride, ALIGN)
        k_off = _multiple(k_start, ALIGN) + batch * _multiple(k_batch_stride, ALIGN)
        k_off = k_off + token * _multiple(k_stride, ALIGN)
        k_grad_off = _multiple(k_grad_start, ALIGN) + batch * _multiple(k_grad_batch_stride, ALIGN)
        k_grad_off = k_grad_off + token * _multiple(k_grad_stride, ALIGN)
        da_weight, db_weight, da_bias, db_bias = _backward_heads(
            dk_ptr, k_ptr, k_grad_ptr, k_weight_ptr, dk_off, k_off, k_grad_off, exists, cos, sin, kv_heads,
            kv_heads, _multiple(dk_head_stride, ALIGN), 0, _multiple(k_head_stride, ALIGN), 0,
            _multiple(k_grad_head_stride, ALIGN), half, rest, eps, weight_offset, da_weight, db_weight,
            da_bias, db_bias, k_weight_sum_ptr is not None, k_bias_sum_ptr is not None, NORM, AFTER, ROTATE,
            INTERLEAVED, FIRST, HEADS, PAIRS, MASKED, PARTIAL,
        )  # fmt: skip
        if v_grad_ptr is not None:
            dv_off = batch * _multiple(dv_batch_stride, ALIGN) + token * _multiple(dv_stride, ALIGN)
            v_grad_off = _multiple(v_grad_start, ALIGN) + batch * _multiple(v_grad_batch_stride, ALIGN)
            v_grad_off = v_grad_off + token * _multiple(v_grad_stride, ALIGN)
            _copy_heads(
                dv_ptr, v_grad_ptr, dv_off, v_grad_off, exists, kv_heads, kv_heads, 0,
                _multiple(dv_head_stride, ALIGN), kv_heads, 0, _multiple(v_grad_head_stride, ALIGN), v_dim, HEADS,
                V_DIM, MASKED,
            )  # fmt: skip
    if k_weight_sum_ptr is not None:
        _store_sums(
            k_weight_sum_ptr, program, da_weight, db_weight, half, rest, PAIRS, INTERLEAVED, FIRST,
            MASKED, PARTIAL,
        )  # fmt: skip
    if k_bias_sum_ptr is not None:
        _store_sums(
            k_bias_sum_ptr, program, da_bias, db_bias, half, rest, PAIRS, INTERLEAVED, FIRST, MASKED, PARTIAL
        )  # fmt: skip


# ---- launch ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """How a call is cut: `tokens` to a program, `heads` of them at a time; the widths of their tiles."""

    tokens: int
    heads: int
    pairs: int
    v_dim: int
    dim: int
    masked: bool
    num_warps: int

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def choose(heads: int, dim: int, v_dim: int, gate: bool, interleaved: bool, target: str) -> Config:
        pairs, v_tile, gates = _tile(dim - dim // 2), _tile(v_dim), _tile(dim) if gate else 0
        tiles = (pairs, v_tile, gates, 2 * pairs != dim or v_tile != v_dim)
        if target == "cpu":
            return Config(1, 1, *tiles, 4)
        # 128 threads with 16 bytes of bf16 each in the narrowest tile: every access can have 128 bits.
        narrowest = min(pairs * (1 + interleaved), v_tile or pairs)
        rows = max(1, min(1024 // narrowest, 8192 // (2 * pairs)))
        at_once = min(4, _tile(heads), rows)
        return Config(max(1, rows // at_once), at_once, *tiles, 2 if target.startswith("gfx") else 4)


def _tile(size: int) -> int:
    """The power of two that holds so many; 0 holds none."""
    return 1 << (size - 1).bit_length() if size else 0


@functools.lru_cache(maxsize=64)
def _turns(base: float, rope_dim: int, device: torch.device) -> Tensor:
    """2^64 times the turns per position of each pair, int64: products with positions overflow by whole turns."""
    whole = 1 << 64
    values = [int(base ** (-2 * i / rope_dim) / (2 * math.pi) * whole) % whole for i in range(rope_dim // 2)]
    return torch.tensor(
        [v - whole if v >= whole // 2 else v for v in values], dtype=torch.int64, device=device
    )


def _strides(x: Tensor, layout: str, tokens: int) -> tuple[int, int, int]:
    """(batch, sequence, head) strides of heads in a layout."""
    strides = x.stride()
    if layout == "thd":
        return tokens * strides[0], strides[0], strides[1]
    b, s, heads, _ = LAYOUTS[layout]
    return strides[b], strides[s], strides[heads]


def _unit(x: Tensor) -> Tensor:
    """x, or a copy of its distinct numbers, whose last dimension has stride 1."""
    strides = x.stride()
    if strides[-1] == 1 or x.shape[-1] == 1:
        return x
    once = x
    for dim in range(x.dim() - 1):
        if strides[dim] == 0 and x.shape[dim] > 1:
            once = once.narrow(dim, 0, 1)
    return once.contiguous().expand(x.shape)


class Places(NamedTuple):
    """Where q, k and v of an input begin, and their strides. The gate of a query head follows it."""

    group: int
    q: tuple[int, int, int, int, int]  # start, batch, sequence, group, head
    k: tuple[int, int, int, int]  # start, batch, sequence, head
    v: tuple[int, int, int, int]

    @staticmethod
    def of(x: Tensor, k: Tensor | None, v: Tensor | None, h: Heads) -> Places:
        if h.packing == "apart":
            batch, tokens, head = _strides(x, h.layout, 0)
            rest = [(0, *((0, 0, 0) if t is None else _strides(t, h.layout, 0))) for t in (k, v)]
            return Places(h.heads, (0, batch, tokens, 0, head), *rest)
        strides = x.stride()
        batch, tokens = (
            (0, strides[0])
            if h.layout == "thd"
            else (strides[LAYOUTS[h.layout][0]], strides[LAYOUTS[h.layout][1]])
        )
        if h.packing == "flat":
            k_start = h.heads * h.q_dim
            v_start = k_start + h.kv_heads * h.head_dim
            return Places(
                h.heads,
                (0, batch, tokens, 0, h.q_dim),
                (k_start, batch, tokens, h.head_dim),
                (v_start, batch, tokens, h.v_dim),
            )
        each = h.heads // h.kv_heads
        k_start, whole = each * h.q_dim, each * h.q_dim + h.head_dim + h.v_dim
        return Places(
            each,
            (0, batch, tokens, whole, h.q_dim),
            (k_start, batch, tokens, whole),
            (k_start + h.head_dim, batch, tokens, whole),
        )


class Angles(NamedTuple):
    """What a kernel finds its angles by."""

    cos: Tensor | None
    sin: Tensor | None
    turns: Tensor | None
    positions: Tensor | None
    table_rows: int
    table: tuple[int, int]  # strides: batch, row
    position: tuple[int, int, int]  # strides: axis, batch, sequence
    sections: tuple[int, int]  # where the second and the third begin

    @staticmethod
    def of(
        cos: Tensor | None, sin: Tensor | None, positions: Tensor | None, base: float, h: Heads, device: torch.device
    ) -> Angles:  # fmt: skip
        turns, rows, table, strides, sections = None, 0, (0, 0), (0, 0, 0), (0, 0)
        if h.rope_dim and cos is None:
            turns = _turns(base, h.rope_dim, device)
        elif h.rope_dim:
            assert cos is not None
            assert sin is not None
            if cos.stride() != sin.stride() or cos.stride(-1) != 1:
                cos, sin = cos.contiguous(), sin.contiguous()
            rows = cos.shape[-2]
            table = (cos.stride(0) if cos.dim() == 3 and cos.shape[0] > 1 else 0, cos.stride(-2))
        if positions is not None:
            axis = positions.stride(0) if h.sections else 0
            own = positions.dim() - bool(h.sections) == 2
            strides = (
                axis,
                positions.stride(-2) if own and positions.shape[-2] > 1 else 0,
                positions.stride(-1),
            )
        if h.sections:
            sections = (h.sections[0], h.sections[0] + h.sections[1])
        return Angles(cos, sin, turns, positions, rows, table, strides, sections)

    @property
    def pointers(self) -> tuple[Tensor | None, ...]:
        return self.cos, self.sin, self.turns, self.positions

    @property
    def integers(self) -> tuple[int, ...]:
        return self.table_rows, *self.table, *self.position, *self.sections


class Cache(NamedTuple):
    """Where k and v of each token are kept."""

    pointers: tuple[Tensor | None, ...]  # slots, k, v, and the scales of both
    places: tuple[int, int, int, int]  # slots that there are, those of a page, and the strides of `slots`
    strides: tuple[int, ...]  # page, place, head: of k and of v
    scale_strides: tuple[int, ...]

    @staticmethod
    def of(slots: Tensor, caches: list[Tensor], x: Tensor, layout: str) -> Cache:
        shape = caches[0].shape
        size = 1 if len(shape) == 3 else shape[1]
        view = _slots(slots, x, layout)
        strides = [stride for cache in caches[:2] for stride in _page_strides(cache.stride()[:-1])]
        scale_strides = [stride for scale in caches[2:] for stride in _page_strides(scale.stride())]
        scales = caches[2:] or (None, None)
        return Cache(
            (slots, *caches[:2], *scales),
            (shape[0] * size, max(size, 1), view.stride(0), view.stride(1)),
            tuple(strides),
            tuple(scale_strides) or (0,) * 6,
        )


def _page_strides(strides: tuple[int, ...]) -> tuple[int, ...]:
    """(page, place, head) of (slot, head) or of (page, place, head)."""
    return strides if len(strides) == 3 else (strides[0], 0, strides[1])


_NO_CACHE = Cache((None,) * 5, (0, 0, 0, 0), (0,) * 6, (0,) * 6)
_NORMS = {"none": 0, "rms": 1, "layer": 2}


def _halves(h: Heads) -> tuple[int, int]:
    """(half, rest): without a rotation, the halves of the head and what is odd of it."""
    if h.rope_dim:
        return h.rope_dim // 2, h.head_dim - h.rope_dim
    return h.head_dim // 2, h.head_dim % 2


def _launch_heads(
    outputs: list[Tensor | None], x: Tensor, k: Tensor | None, v: Tensor | None, weights: tuple[Tensor | None, ...],
    angles: Angles, eps: float, weight_offset: float, h: Heads, inverse: bool, cache: Cache = _NO_CACHE,
) -> None:  # fmt: skip
    """outputs: q, k, v and gate."""
    batch, tokens = _sizes(x, h.layout)
    places = Places.of(x, k, v, h)
    apart = h.packing == "apart"
    q_out, k_out, v_out, gate_out = outputs
    half, rest = _halves(h)
    v_dim = h.v_dim if v_out is not None else 0
    target = capabilities_of(x.device)
    config = Config.choose(
        h.kv_heads or h.heads, h.head_dim, v_dim, h.gate, h.style == "interleaved", target.target
    )
    assert q_out is not None
    out_strides = (
        *_strides(q_out, h.out_layout, tokens),
        *((0, 0, 0) if k_out is None else _strides(k_out, h.out_layout, tokens)),
        *((0, 0, 0) if v_out is None else _strides(v_out, h.out_layout, tokens)),
    )
    align = align_of(
        half, rest, rest // 2, v_dim, *places.q, *places.k, *places.v, *out_strides, *angles.table, *cache.strides
    )  # fmt: skip
    launch = Launch.of(
        _qkv_kernel, num_warps=config.num_warps, NORM=_NORMS[h.norm], AFTER=h.norm_after, ROTATE=h.rope_dim > 0,
        INVERSE=inverse, INTERLEAVED=h.style == "interleaved", FIRST=h.rope_first, SECTIONS=bool(h.sections),
        TOKENS=config.tokens, HEADS=config.heads, PAIRS=config.pairs, V_DIM=config.v_dim,
        DIM=config.dim, MASKED=config.masked, PARTIAL=rest > 0, ALIGN=align,
        CAST=0 if cache.pointers[3] is None else cast_mode(target),
    )  # fmt: skip
    launch(
        (-(-tokens // config.tokens) * batch, 1, 1),
        (
            x, k if apart else x, v if apart else x, x if h.gate else None, *weights, *angles.pointers, q_out, k_out,
            v_out, gate_out, *cache.pointers,
        ),
        (
            batch, tokens, h.heads, max(h.kv_heads, 1), places.group, half, rest, v_dim, *places.q, *places.k,
            *places.v, *out_strides, *angles.integers, *cache.places, *cache.strides, *cache.scale_strides,
        ),
        (eps, weight_offset),
    )  # fmt: skip


def _allocate_qkv(
    x: Tensor, k: Tensor | None, v: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None,
    q_bias: Tensor | None, k_bias: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    positions: Tensor | None, base: float, eps: float, weight_offset: float, heads: int, kv_heads: int,
    head_dim: int, v_dim: int, packing: str, gate: bool, layout: str, out_layout: str, norm: str,
    norm_after: bool, rope_dim: int, style: str, rope_first: bool, sections: str,
) -> list[Tensor]:  # fmt: skip
    batch, tokens = _sizes(x, layout)
    widths = [(heads, head_dim), (kv_heads, head_dim)]
    if packing != "apart" or v is not None:
        widths.append((kv_heads, v_dim))
    if gate:
        widths.append((heads, head_dim))
    return [
        torch.empty(_shape(out_layout, batch, tokens, n, d), dtype=x.dtype, device=x.device)
        for n, d in widths
    ]


def _launch_qkv(
    outputs: list[Tensor], x: Tensor, k: Tensor | None, v: Tensor | None, q_weight: Tensor | None,
    k_weight: Tensor | None, q_bias: Tensor | None, k_bias: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    positions: Tensor | None, base: float, eps: float, weight_offset: float, heads: int, kv_heads: int,
    head_dim: int, v_dim: int, packing: str, gate: bool, layout: str, out_layout: str, norm: str,
    norm_after: bool, rope_dim: int, style: str, rope_first: bool, sections: str, slots: Tensor | None = None,
    caches: list[Tensor] | None = None,
) -> None:  # fmt: skip
    h = Heads(
        heads, kv_heads, head_dim, v_dim, packing, gate, layout, out_layout, norm, norm_after, rope_dim, style,
        rope_first, _sections(sections),
    )  # fmt: skip
    cache = _NO_CACHE if slots is None or caches is None else Cache.of(slots, caches, x, layout)
    q_out, k_out, *more = outputs
    gate_out = more.pop() if gate else None
    weights = tuple(map(contiguous, (q_weight, k_weight, q_bias, k_bias)))
    angles = Angles.of(cos, sin, positions, base, h, x.device)
    k, v = None if k is None else _unit(k), None if v is None else _unit(v)
    results = [q_out, k_out, more[0] if more else None, gate_out]
    _launch_heads(results, _unit(x), k, v, weights, angles, eps, weight_offset, h, False, cache)


def _allocate_cached(x: Tensor, *args: Any) -> list[Tensor]:
    return []


def _launch_cached(_: list[Tensor], x: Tensor, *args: Any) -> None:
    *same, slots, outputs, caches = args
    _launch_qkv(outputs, x, *(*same, slots, caches))


def _allocate_qkv_backward(
    dq: Tensor, dk: Tensor | None, dv: Tensor | None, dgate: Tensor | None, x: Tensor | None, k: Tensor | None,
    q_weight: Tensor | None, k_weight: Tensor | None, q_bias: Tensor | None, k_bias: Tensor | None,
    cos: Tensor | None, sin: Tensor | None, positions: Tensor | None, base: float, eps: float,
    weight_offset: float, heads: int, kv_heads: int, head_dim: int, v_dim: int, packing: str, gate: bool,
    layout: str, out_layout: str, norm: str, norm_after: bool, rope_dim: int, style: str, rope_first: bool,
    sections: str, batch: int, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    tokens = _tokens(dq, out_layout, batch)
    shapes: list[tuple[int, ...]] = []
    if needs[0] and packing == "apart":
        shapes += [
            _shape(layout, batch, tokens, heads, head_dim * (1 + gate)),
            _shape(layout, batch, tokens, kv_heads, head_dim),
        ]
        shapes += [] if dv is None else [_shape(layout, batch, tokens, kv_heads, v_dim)]
    elif needs[0]:
        width = heads * head_dim * (1 + gate) + kv_heads * (head_dim + v_dim)
        lead = _shape("bshd" if layout == "thd" else layout, batch, tokens, 1, width)[:2]
        shapes.append((tokens, width) if layout == "thd" else (*lead, width))
    outputs = [torch.empty(shape, dtype=dq.dtype, device=dq.device) for shape in shapes]
    for vector, need in zip((q_weight, k_weight, q_bias, k_bias), needs[1:], strict=True):
        if need and vector is not None:
            outputs.append(torch.empty(head_dim, dtype=vector.dtype, device=dq.device))
    return outputs


def _launch_qkv_backward(
    outputs: list[Tensor], dq: Tensor, dk: Tensor | None, dv: Tensor | None, dgate: Tensor | None, x: Tensor | None,
    k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, q_bias: Tensor | None,
    k_bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, positions: Tensor | None, base: float,
    eps: float, weight_offset: float, heads: int, kv_heads: int, head_dim: int, v_dim: int, packing: str,
    gate: bool, layout: str, out_layout: str, norm: str, norm_after: bool, rope_dim: int, style: str,
    rope_first: bool, sections: str, batch: int, needs: list[bool],
) -> None:  # fmt: skip
    h = Heads(
        heads, kv_heads, head_dim, v_dim, packing, gate, layout, out_layout, norm, norm_after, rope_dim, style,
        rope_first, _sections(sections),
    )  # fmt: skip
    tokens = _tokens(dq, out_layout, batch)
    apart = packing == "apart"
    angles = Angles.of(cos, sin, positions, base, h, dq.device)
    upstream = [None if d is None else _unit(d) for d in (dq, dk, dv, dgate)]
    strides = [(0, 0, 0) if d is None else _strides(d, out_layout, tokens) for d in upstream]
    x, k = None if x is None else _unit(x), None if k is None else _unit(k)
    none = Places(1, (0, 0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0))
    source = none if x is None else Places.of(x, k, None, h)
    grads: list[Tensor | None] = [None, None, None]
    into = none
    rest_of = iter(outputs)
    if needs[0] and apart:
        grads = [next(rest_of) if d is not None else None for d in (dq, dk, dv)]
        assert grads[0] is not None
        into = Places.of(grads[0], grads[1], grads[2], h)
    elif needs[0]:
        packed = next(rest_of)
        grads = [packed, packed, packed]
        into = Places.of(packed, None, None, h)
    half, rest = _halves(h)
    v_dim = v_dim if grads[2] is not None else 0
    target = capabilities_of(dq.device)
    config = Config.choose(kv_heads, head_dim, v_dim, gate, style == "interleaved", target.target)
    tiles = -(-tokens // config.tokens) * batch
    program_tiles = 1
    if any(needs[1:]):
        # Sums over rows: as many programs as run at the same time, each with a row of partial sums.
        program_tiles = -(-tiles // min(tiles, target.multiprocessors * 4))
    programs = -(-tiles // program_tiles)
    vectors = [next(rest_of) if need else None for need in needs[1:]]
    sums = [
        None if vector is None else torch.empty((programs, head_dim), dtype=torch.float32, device=dq.device)
        for vector in vectors
    ]
    align = align_of(
        half, rest, rest // 2, v_dim, *(s for three in strides for s in three), *source.q, *source.k, *into.q,
        *into.k, *into.v, *angles.table,
    )  # fmt: skip
    launch = Launch.of(
        _qkv_backward_kernel, num_warps=config.num_warps, NORM=_NORMS[norm], AFTER=norm_after, ROTATE=rope_dim > 0,
        INTERLEAVED=style == "interleaved", FIRST=rope_first, SECTIONS=bool(sections), TOKENS=config.tokens,
        HEADS=config.heads, PAIRS=config.pairs, V_DIM=config.v_dim, DIM=config.dim,
        MASKED=config.masked, PARTIAL=rest > 0, ALIGN=align,
    )  # fmt: skip
    launch(
        (programs, 1, 1),
        (
            *upstream, x, k if apart or x is None else x, contiguous(q_weight), contiguous(k_weight),
            *angles.pointers, *grads, *sums,
        ),
        (
            batch, tokens, heads, max(kv_heads, 1), into.group if needs[0] else source.group, half, rest, v_dim,
            *strides[0], *strides[1], *strides[2], *strides[3], *source.q, *source.k, *into.q, *into.k, *into.v,
            *angles.integers, tiles, program_tiles,
        ),
        (eps, weight_offset),
    )  # fmt: skip
    for vector, partial in zip(vectors, sums, strict=True):
        if vector is not None:
            piece, tile = (1, 256) if target.target == "cpu" else (32, 64)
            add = Launch.of(_sum_kernel, num_warps=4, ROWS=piece, TILE=tile, ALIGN=align_of(head_dim))
            add((-(-head_dim // tile), 1, 1), (partial, vector), (programs, head_dim))


def _allocate_rope(
    x: Tensor, cos: Tensor | None, sin: Tensor | None, positions: Tensor | None, base: float, layout: str,
    out_layout: str, rope_dim: int, style: str, rope_first: bool, sections: str, inverse: bool,
) -> list[Tensor]:  # fmt: skip
    batch, tokens = _sizes(x, layout)
    shape = _shape(out_layout, batch, tokens, x.shape[LAYOUTS[layout][2]], x.shape[-1])
    return [torch.empty(shape, dtype=x.dtype, device=x.device)]


def _launch_rope(
    outputs: list[Tensor], x: Tensor, cos: Tensor | None, sin: Tensor | None, positions: Tensor | None,
    base: float, layout: str, out_layout: str, rope_dim: int, style: str, rope_first: bool, sections: str,
    inverse: bool,
) -> None:  # fmt: skip
    h = _rotation(x, layout, out_layout, rope_dim, style, rope_first, sections)
    angles = Angles.of(cos, sin, positions, base, h, x.device)
    absent = (None, None, None, None)
    _launch_heads([outputs[0], *absent[1:]], _unit(x), None, None, absent, angles, 0.0, 0.0, h, inverse)


# ---- registration ---------------------------------------------------------------------------------------


def _setup_qkv(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, k, v, q_weight, k_weight, q_bias, k_bias, cos, sin, positions = inputs[:10]
    normed = inputs[21] != "none"
    # A rotation alone needs nothing of its input.
    ctx.save_for_backward(
        x if normed else None, k if normed else None, q_weight, k_weight, q_bias, k_bias, cos, sin, positions
    )
    ctx.options = inputs[10:]
    ctx.apart = inputs[17] == "apart"
    ctx.gated = inputs[18]
    ctx.batch = _sizes(x, inputs[19])[0]
    ctx.shapes = [t.shape for t in output]
    ctx.valued = not ctx.apart or v is not None
    ctx.inputs = len(inputs)
    ctx.set_materialize_grads(False)


def _qkv_gradients(ctx: Any, grads: Any) -> Any:
    x, k, q_weight, k_weight, q_bias, k_bias, cos, sin, positions = ctx.saved_tensors
    nothing = (None,) * ctx.inputs
    some = next((g for g in grads if g is not None), None)
    if some is None:
        return nothing
    given = [
        some.new_zeros(shape[-1]).expand(shape) if g is None else g
        for g, shape in zip(grads, ctx.shapes, strict=True)
    ]
    dgate = given.pop() if ctx.gated else None
    dv = given[2] if ctx.valued else None
    wants = ctx.needs_input_grad
    needs = [any(wants[:3]), *wants[3:7]]
    results = iter(
        qkv_prepare_backward_op(
            given[0], given[1], dv, dgate, x, k, q_weight, k_weight, q_bias, k_bias, cos, sin, positions,
            *ctx.options, ctx.batch, needs,
        )
    )  # fmt: skip
    inputs: list[Tensor | None] = [None, None, None]
    if needs[0] and ctx.apart:
        inputs = [next(results), next(results), next(results) if ctx.valued else None]
        inputs = [grad if want else None for grad, want in zip(inputs, wants, strict=False)]
    elif needs[0]:
        inputs[0] = next(results)
    vectors = [next(results) if need else None for need in needs[1:]]
    return (*inputs, *vectors, *nothing[7:])


_OPTIONS = (
    "float base, float eps, float weight_offset, int heads, int kv_heads, int head_dim, int v_dim, str packing, "
    "bool gate, str layout, str out_layout, str norm, bool norm_after, int rope_dim, str style, bool rope_first, "
    "str sections"
)
_VECTORS = "Tensor? q_weight, Tensor? k_weight, Tensor? q_bias, Tensor? k_bias, Tensor? cos, Tensor? sin, "
_VECTORS += "Tensor? positions"


def _shard_rotation(a: Any) -> tuple[dict[str, str], dict[str, str]]:
    """The dimensions of tables and positions; and what counts from 0 along the sequence, if positions are absent."""
    inputs = {}
    if a.positions is not None:
        lead = ["three"] if a.sections else []
        named = ["b", "s"] if a.positions.dim() - len(lead) == 2 else ["s"]
        if len(named) == 2 and a.positions.shape[-2] == 1:
            named[0] = "_"
        inputs["positions"] = " ".join([*lead, *named])
    if a.cos is not None:
        by_token = a.cos.dim() == 3
        inputs["cos"] = inputs["sin"] = f"{'_' if a.cos.shape[0] == 1 else 'b'} s f" if by_token else "p f"
        if by_token:
            return inputs, {}
    return inputs, {"positions": "s"} if a.rope_dim else {}


def _dims(layout: str) -> str:
    return " ".join(layout.replace("t", "s"))


_WHOLE = {
    "d": "a head is normed and rotated as a whole",
    "f": "the angles of a head go with all of it",
    "p": "positions are looked up in the whole table",
    "three": "a token has three positions",
}


def _shard_rope(a: Any) -> Sharding:
    inputs, counted = _shard_rotation(a)
    return Sharding({"x": _dims(a.layout), **inputs}, {"y": _dims(a.out_layout)}, _WHOLE, counted=counted)


def _shard_qkv(a: Any) -> Sharding:
    inputs, counted = _shard_rotation(a)
    of_x, whole = _dims(a.layout), dict(_WHOLE)
    if a.packing != "apart":
        of_x = of_x.replace("h d", "h" if a.packing == "groups" else "w")
        whole["w"] = "q, k and v follow each other in it. Give them apart, or with packing='groups'"
    if a.layout != "thd" and a.out_layout == "thd":
        whole |= dict.fromkeys("bs", "out_layout='thd' joins batch and sequence")
    outputs = ["q", "k"] + ["v"] * (a.packing != "apart" or a.v is not None) + ["gate"] * a.gate
    return Sharding(
        {
            "x": of_x,
            "k": of_x,
            "v": of_x,
            **dict.fromkeys(("q_weight", "k_weight", "q_bias", "k_bias"), "d"),
            **inputs,
        },
        dict.fromkeys(outputs, _dims(a.out_layout)),
        whole,
        counted=counted,
        sizes={"heads": "h", "kv_heads": "h"},
    )


qkv_prepare_backward_op = define_flat_op(
    f"qkv_prepare_backward(Tensor dq, Tensor? dk, Tensor? dv, Tensor? dgate, Tensor? x, Tensor? k, {_VECTORS}, "
    f"{_OPTIONS}, SymInt batch, bool[] needs) -> Tensor[]",
    allocate=_allocate_qkv_backward,
    launch=_launch_qkv_backward,
    reference=qkv_prepare_backward_reference,
    variants=64,
)

qkv_prepare_op = define_flat_op(
    f"qkv_prepare(Tensor x, Tensor? k, Tensor? v, {_VECTORS}, {_OPTIONS}) -> Tensor[]",
    allocate=_allocate_qkv,
    launch=_launch_qkv,
    reference=qkv_prepare_reference,
    setup_context=_setup_qkv,
    backward=_qkv_gradients,
    sharding=_shard_qkv,
    variants=64,
)

# The results are arguments, as the caches are: PyTorch's compiler takes no op that writes to some and returns a list.
qkv_prepare_cached_op = define_flat_op(
    f"qkv_prepare_cached(Tensor x, Tensor? k, Tensor? v, {_VECTORS}, {_OPTIONS}, Tensor slots, Tensor(a!)[] outputs, "
    "Tensor(b!)[] caches) -> ()",
    allocate=_allocate_cached,
    launch=_launch_cached,
    reference=qkv_prepare_cached_reference,
    variants=64,
)


def _setup_rope(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs[1:4])
    ctx.options = inputs[4:]


def _rope_gradient(ctx: Any, grads: Any) -> Any:
    base, layout, out_layout, *options, inverse = ctx.options
    dy = grads[0]
    (dx,) = rope_op(dy, *ctx.saved_tensors, base, out_layout, layout, *options, not inverse)
    return (dx, *(None,) * (3 + len(ctx.options)))


rope_op = define_flat_op(
    "rope(Tensor x, Tensor? cos, Tensor? sin, Tensor? positions, float base, str layout, str out_layout, int rope_dim, "
    "str style, bool rope_first, str sections, bool inverse) -> Tensor[]",
    allocate=_allocate_rope,
    launch=_launch_rope,
    reference=rope_reference,
    setup_context=_setup_rope,
    backward=_rope_gradient,
    sharding=_shard_rope,
    variants=64,
)


# ---- public functions -----------------------------------------------------------------------------------

Layout = Literal["bshd", "sbhd", "bhsd", "thd"]


def qkv_prepare(
    qkv: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    v_dim: int | None = None,
    packing: Literal["flat", "groups"] = "flat",
    gate: bool = False,
    qk_norm: Literal["rms", "layer"] | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    eps: float | None = 1e-6,
    weight_offset: float = 0.0,
    norm_after: bool = False,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    base: float | None = None,
    rope_dim: int | None = None,
    style: Literal["neox", "interleaved"] = "neox",
    rope_first: bool = True,
    mrope_sections: tuple[int, int, int] | None = None,
    layout: Layout = "bshd",
    out_layout: Layout | None = None,
    cache: Sequence[Tensor] | None = None,
    slots: Tensor | None = None,
    cache_scales: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """q, k and v for attention, and the gate if there is one: split, normed, rotated and transposed in one pass.

    **Input.** One packed projection `qkv`, [batch, sequence, width] with `layout="bshd"`, [sequence, batch, width] with
    "sbhd", or [tokens, width]; then `heads`, `kv_heads` and `head_dim` say how to cut it. Or `qkv` is q, and k and v
    are given: [batch, sequence, heads, head_dim] or as `layout` says, three-dimensional with "thd"; v may be missing.
    bf16, fp16 or fp32, of any strides. heads is a multiple of kv_heads: as many query heads share one of k and v.

    - `packing`: "flat" is [all q | all k | all v]; "groups" is one [q q q q k v] for each key head, as Megatron has it.
    - `gate`: every query head is followed by a gate of its size, which is returned last (Qwen3-Next).
    - `v_dim`: of a value head, `head_dim` by default.

    **Norm** of each head of q and k: `qk_norm` "rms" or "layer", with `q_weight`, `k_weight`, `q_bias`, `k_bias`
    [head_dim]; before the rotation, or after it with `norm_after`. `eps=None` as for `weft.rms_norm`.

    **Rotation**, if there are angles: tables `cos` and `sin` [rows, rope_dim / 2] whose row is the position, or
    [batch, sequence, rope_dim / 2]; or `base`: pair i turns by `position * base^(-2i / rope_dim)`, right to fp32 at any
    position. No gradient goes to tables. With style "neox", tables that end in rope_dim are HuggingFace's, in which the
    angles stand twice, `cat([angles, angles])`: their first half is taken. On a CPU both halves are compared, and other
    tables refused; on a device nothing waits to find out. With "interleaved" such tables are refused, for there are
    two kinds of them.

    - `positions`: int32 or int64 [sequence] or [batch, sequence], for packed sequences and for sequences in parts; 0,
      1, 2… by default. A position that a table has no row for gives NaN.
    - `rope_dim`: so many numbers of a head are rotated, all by default: the first, or the last with
      `rope_first=False`. Give it with tables of a part of a head: it tells which of both kinds they are.
    - `style`: pairs (i, i + rope_dim / 2) for "neox", (2i, 2i + 1) for "interleaved".
    - `mrope_sections`: `positions` is [3, …], and the pairs take theirs from the first, second and third of them, so
      many each.

    **Output** in the dtype of the input: [batch, sequence, heads, head_dim], or as `out_layout` says ("thd" joins batch
    and sequence); that of the input by default. Everything is fp32 until the one rounding of each result.

    **Cache**, for inference: k and v are also written to `cache` = (k_cache, v_cache) in the same launch, and returned
    all the same. A cache is [slots, kv_heads, head_dim], or paged [pages, page_size, kv_heads, head_dim], of any
    strides whose last is 1.

    - `slots`: int32 or int64, one for each token: [batch, sequence], [sequence, batch] with `layout="sbhd"`, or all of
      them in this order in one dimension. In a paged cache it is page * page_size + place. -1 writes nothing, and
      neither does any other number that is no slot of the cache. Two tokens with one slot are a mistake: the slot then
      holds some of each.
    - A cache in the dtype of the input gets the bits that are returned. One in float8_e4m3fn, or in uint8 for its
      bytes, goes with `cache_scales` = (k_scale, v_scale), fp32 of the shape of the caches without the last dimension:
      each token and head gets the scale and codes of `weft.quantize(head, "e4m3:row:te")`, made of the fp32 numbers
      before they are rounded to the dtype of the input.
    - Caches have no gradients, and a call that writes to them gives none: where gradients are on and an input requires
      one, it is refused.

    >>> import torch, weft
    >>> qkv = torch.randn(2, 16, (4 + 2 + 2) * 64).bfloat16()
    >>> weight = torch.ones(64)
    >>> q, k, v = weft.qkv_prepare(
    ...     qkv, heads=4, kv_heads=2, head_dim=64, qk_norm="rms", q_weight=weight, k_weight=weight, base=10000.0
    ... )
    >>> q.shape, k.shape
    (torch.Size([2, 16, 4, 64]), torch.Size([2, 16, 2, 64]))
    >>> weft.qkv_prepare(qkv, heads=4, kv_heads=2, head_dim=64, out_layout="bhsd")[0].shape
    torch.Size([2, 4, 16, 64])
    >>> cache = torch.zeros(2, 8, 16, 2, 64).bfloat16().unbind()  # 8 pages of 16 slots, for k and for v
    >>> token = torch.randn(3, (4 + 2 + 2) * 64).bfloat16()  # one of each of three sequences
    >>> slots = torch.tensor([5 * 16 + 3, 16, -1])
    >>> q, k, v = weft.qkv_prepare(token, heads=4, kv_heads=2, head_dim=64, cache=cache, slots=slots)
    >>> torch.equal(cache[0][5, 3], k[0]), torch.equal(cache[1][1, 0], v[1])
    (True, True)
    """
    if k is None and v is not None:
        raise ValueError("v is given without k: give both, or one packed tensor")
    packed = k is None
    check_input("qkv", qkv)
    for name, size in (("heads", heads), ("kv_heads", kv_heads), ("head_dim", head_dim), ("v_dim", v_dim)):
        if size is not None:
            whole(name, size, 1)
    if packed:
        if heads is None or head_dim is None:
            raise ValueError("a packed qkv is cut by heads=, kv_heads= and head_dim=")
        kv_heads = heads if kv_heads is None else kv_heads
        v_dim = head_dim if v_dim is None else v_dim
        layout = _layout_of(qkv, layout, 3)
        if layout == "bhsd":
            raise ValueError(
                "a packed qkv is [batch, sequence, width] ('bshd') or [sequence, batch, width] ('sbhd')"
            )
        if packing not in ("flat", "groups"):
            raise ValueError(f"packing must be 'flat' or 'groups'; got {packing!r}")
        width = heads * head_dim * (2 if gate else 1) + kv_heads * (head_dim + v_dim)
        if qkv.shape[-1] != width:
            raise ValueError(
                f"{heads} heads and {kv_heads} of k and v take {width} columns; qkv has {qkv.shape[-1]}"
            )
    else:
        assert k is not None
        layout = _layout_of(qkv, layout, 4)
        heads, kv_heads, head_dim, v_dim = _check_apart(
            qkv, k, v, heads, kv_heads, head_dim, v_dim, gate, layout
        )
    if kv_heads and heads % kv_heads:
        raise ValueError(
            f"heads must be a multiple of kv_heads, as many query heads share one of k and v; got {heads}, {kv_heads}"
        )
    if qk_norm not in (None, "rms", "layer"):
        raise ValueError(f"qk_norm must be None, 'rms' or 'layer'; got {qk_norm!r}")
    for name, vector in (
        ("q_weight", q_weight),
        ("k_weight", k_weight),
        ("q_bias", q_bias),
        ("k_bias", k_bias),
    ):
        if vector is None:
            continue
        if qk_norm is None:
            raise ValueError(f"{name} goes with qk_norm='rms' or 'layer'")
        check_tensor(name, vector, FLOATS, qkv.device, (head_dim,))
    batch, tokens = _sizes(qkv, layout)
    cos, sin, rope_dim, sections = _check_rotation(
        cos, sin, positions, base, rope_dim, head_dim, style, mrope_sections, batch, tokens, qkv.device
    )
    out_layout = layout if out_layout is None else out_layout
    if out_layout not in LAYOUTS:
        raise ValueError(f"out_layout must be one of {', '.join(LAYOUTS)}; got {out_layout!r}")
    args = (
        qkv, k, v, q_weight, k_weight, q_bias, k_bias, cos, sin, positions, float(base or 0.0), epsilon(eps, qkv),
        real("weight_offset", weight_offset), heads, kv_heads, head_dim, v_dim, packing if packed else "apart", gate,
        layout, out_layout, qk_norm or "none", norm_after, rope_dim, style, rope_first, sections,
    )  # fmt: skip
    if cache is None:
        if slots is not None or cache_scales is not None:
            raise ValueError("slots and cache_scales go with cache=(k_cache, v_cache)")
        return tuple(qkv_prepare_op(*args))
    if slots is None:
        raise ValueError("a cache is written at slots=: one for each token")
    if not packed and v is None:
        raise ValueError("a cache is for k and v: v is missing")
    caches = _check_cache(cache, cache_scales, qkv, kv_heads, (head_dim, v_dim))
    _check_slots(slots, qkv, layout)
    given = (qkv, k, v, q_weight, k_weight, q_bias, k_bias, *caches)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
        raise ValueError(
            "qkv_prepare with a cache is for inference: a gradient is wanted, which it does not give. Call it under "
            "torch.no_grad(), or without the cache"
        )
    outputs = _allocate_qkv(*args)
    qkv_prepare_cached_op(*args, slots, outputs, caches)
    return tuple(outputs)


def rope(
    x: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    base: float | None = None,
    rope_dim: int | None = None,
    style: Literal["neox", "interleaved"] = "neox",
    rope_first: bool = True,
    mrope_sections: tuple[int, int, int] | None = None,
    layout: Layout = "bshd",
    out_layout: Layout | None = None,
    inverse: bool = False,
) -> Tensor:
    """The rotation of `qkv_prepare` for one tensor of heads: [batch, sequence, heads, dim], or as `layout` says.

    Angles and options are those of `qkv_prepare`; `inverse` turns the other way, as backward does. `out_layout` may
    be another one.

    >>> import torch, weft
    >>> x = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])  # two tokens of one head
    >>> weft.rope(x, base=10000.0)
    tensor([[[1.0000, 0.0000]],
    <BLANKLINE>
            [[0.5403, 0.8415]]])
    """
    check_input("x", x)
    layout = _layout_of(x, layout, 4)
    out_layout = layout if out_layout is None else out_layout
    if out_layout not in LAYOUTS or (layout == "thd") != (out_layout == "thd"):
        raise ValueError(f"out_layout {out_layout!r} does not go with an x in {layout!r}")
    if cos is None and base is None:
        raise ValueError("a rotation needs tables cos and sin, or base")
    batch, tokens = _sizes(x, layout)
    cos, sin, rope_dim, sections = _check_rotation(
        cos, sin, positions, base, rope_dim, x.shape[-1], style, mrope_sections, batch, tokens, x.device
    )
    return rope_op(
        x, cos, sin, positions, float(base or 0.0), layout, out_layout, rope_dim, style, rope_first, sections, inverse
    )[0]  # fmt: skip


def _layout_of(x: Tensor, layout: str, dims: int) -> Layout:
    """The layout of an input; one dimension less is 'thd'."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")
    if x.dim() == dims - 1:
        return "thd"
    if x.dim() != dims or layout == "thd":
        raise ValueError(
            f"an input in {layout!r} has {dims - (layout == 'thd')} dimensions; got {tuple(x.shape)}"
        )
    return layout  # type: ignore[return-value]


def _check_apart(
    q: Tensor, k: Tensor, v: Tensor | None, heads: int | None, kv_heads: int | None, head_dim: int | None,
    v_dim: int | None, gate: bool, layout: str,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Sizes of separate q, k and v."""
    for name, part in (("k", k), ("v", v)):
        if part is not None:
            check_tensor(name, part, (q.dtype,), q.device)
            if part.dim() != q.dim():
                raise ValueError(
                    f"{name} must have the dimensions of q, {tuple(q.shape)}; got {tuple(part.shape)}"
                )
    at = LAYOUTS[layout][2]
    found = (q.shape[at], k.shape[at], k.shape[-1], k.shape[-1] if v is None else v.shape[-1])
    for name, given, size in zip(
        ("heads", "kv_heads", "head_dim", "v_dim"), (heads, kv_heads, head_dim, v_dim), found, strict=True
    ):
        if given is not None and given != size:
            raise ValueError(f"{name}={given}, but the tensors have {size}")
    if q.shape[-1] != found[2] * (1 + gate):
        raise ValueError(f"heads of q have {q.shape[-1]} numbers, and those of k {found[2]}")
    for name, part in (("k", k), ("v", v)):
        if part is not None and (_sizes(part, layout) != _sizes(q, layout) or part.shape[at] != found[1]):
            raise ValueError(
                f"{name} {tuple(part.shape)} does not go with q {tuple(q.shape)} and k {tuple(k.shape)}"
            )
    return found


def _check_cache(
    cache: Sequence[Tensor], scales: Sequence[Tensor] | None, x: Tensor, kv_heads: int, dims: tuple[int, int]
) -> list[Tensor]:  # fmt: skip
    """The tensors that are written to: both caches, and both scales if there are any."""
    if not _is_pair(cache) or not (scales is None or _is_pair(scales)):
        raise ValueError("cache must be (k_cache, v_cache), and cache_scales (k_scale, v_scale)")
    check_tensors("k_cache v_cache k_scale v_scale", *cache, *(scales or ()))
    lead = cache[0].shape[:-2]
    dtypes = (x.dtype,) if scales is None else (torch.float8_e4m3fn, torch.uint8)
    for name, each, dim in zip(("k_cache", "v_cache"), cache, dims, strict=True):
        if len(lead) not in (1, 2) or each.shape != (*lead, kv_heads, dim) or each.device != x.device:
            raise ValueError(
                f"{name} must be [slots, {kv_heads}, {dim}] or [pages, page_size, {kv_heads}, {dim}] on {x.device}, "
                f"and as many slots as the other; got {tuple(each.shape)} on {each.device}"
            )
        if each.dtype not in dtypes or each.dtype != cache[0].dtype:
            raise ValueError(
                f"caches must be {x.dtype} as the input is, or float8_e4m3fn (or uint8) with cache_scales; {name} is "
                f"{each.dtype} with{'out' if scales is None else ''} scales"
            )
        if each.stride(-1) != 1 and dim > 1:
            raise ValueError(f"the last stride of {name} must be 1; its strides are {each.stride()}")
    if scales is None:
        return [*cache]
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        if scale.shape != (*lead, kv_heads) or scale.dtype != torch.float32 or scale.device != x.device:
            raise ValueError(
                f"{name} must be float32 {(*lead, kv_heads)} on {x.device}; got {scale.dtype} {tuple(scale.shape)} on "
                f"{scale.device}"
            )
    return [*cache, *scales]


def _is_pair(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def _check_slots(slots: Tensor, x: Tensor, layout: str) -> None:
    batch, tokens = _sizes(x, layout)
    shapes = [(tokens, batch) if layout == "sbhd" else (batch, tokens)] if layout != "thd" else []
    check_tensor("slots", slots, INTEGERS, x.device, *shapes, (batch * tokens,))


def _check_rotation(
    cos: Tensor | None, sin: Tensor | None, positions: Tensor | None, base: float | None, rope_dim: int | None,
    head_dim: int, style: str, sections: tuple[int, int, int] | None, batch: int, tokens: int,
    device: torch.device,
) -> tuple[Tensor | None, Tensor | None, int, str]:  # fmt: skip
    """(cos, sin, rope_dim, sections) as the ops take them; rope_dim is 0 without a rotation."""
    if (cos is None) != (sin is None) or (cos is not None and base is not None):
        raise ValueError("angles are given by cos and sin together, or by base")
    if style not in ("neox", "interleaved"):
        raise ValueError(f"style must be 'neox' or 'interleaved'; got {style!r}")
    if cos is None and base is None:
        if positions is not None or rope_dim or sections is not None:
            raise ValueError("positions, rope_dim and mrope_sections need tables cos and sin, or base")
        return None, None, 0, ""
    if rope_dim is None:
        rope_dim = head_dim
    if whole("rope_dim", rope_dim) % 2 or not 0 < rope_dim <= head_dim:
        raise ValueError(
            f"rope_dim must be even, and at most the {head_dim} numbers of a head; got {rope_dim}"
        )
    if base is not None and not 0.0 < real("base", base) < math.inf:
        raise ValueError(f"base must be positive and finite; got {base}")
    if cos is not None and sin is not None:
        cos, sin = _check_tables(
            cos, sin, positions is not None, rope_dim, head_dim, style, batch, tokens, device
        )
    if sections is not None and (
        not isinstance(sections, (tuple, list))
        or len(sections) != 3
        or min(whole("mrope_sections", part) for part in sections) < 0
        or sum(sections) != rope_dim // 2
    ):
        raise ValueError(f"mrope_sections must be three parts of {rope_dim // 2} pairs; got {sections!r}")
    if sections is not None and positions is None:
        raise ValueError("mrope_sections goes with positions [3, ...]")
    if positions is not None:
        lead = (3,) if sections is not None else ()
        shapes = [(*lead, tokens), (*lead, batch, tokens), (*lead, 1, tokens)]
        check_tensor("positions", positions, INTEGERS, device, *shapes)
    return cos, sin, rope_dim, "" if sections is None else " ".join(map(str, sections))


def _check_tables(
    cos: Tensor, sin: Tensor, by_position: bool, rope_dim: int, head_dim: int, style: str, batch: int, tokens: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Tables of rope_dim / 2 angles, cut out of those in which each stands twice."""
    check_tensor("cos", cos, FLOATS, device)
    check_tensor("sin", sin, (cos.dtype,), device)
    half, width = rope_dim // 2, cos.shape[-1] if cos.dim() else 0
    lies = (cos.dim() == 2 and (by_position or cos.shape[0] >= tokens)) or (
        cos.dim() == 3 and not by_position and cos.shape[0] in (1, batch) and cos.shape[1] == tokens
    )
    if lies and width in (half, rope_dim) and sin.shape == cos.shape:
        return (cos, sin) if width == half else _first_halves(cos, sin, style)
    note = ""
    if width == head_dim and cos.dim() > 2 and not lies:
        note = ". If it is k: one tensor is rotated in a call; call rope for each, or give both to weft.qkv_prepare"
    elif width not in (half, rope_dim) and width < head_dim:
        note = (
            f". If a part of each head is rotated, say which: rope_dim={2 * width}, or rope_dim={width} for tables in "
            "which each angle stands twice"
        )
    raise ValueError(
        f"cos and sin must be tables [{tokens} or more, {half}], or without positions {(batch, tokens, half)}; got "
        f"{tuple(cos.shape)} and {tuple(sin.shape)}{note}"
    )


def _first_halves(cos: Tensor, sin: Tensor, style: str) -> tuple[Tensor, Tensor]:
    """Of HuggingFace's tables `cat([angles, angles])`."""
    half = cos.shape[-1] // 2
    if style == "interleaved":
        raise ValueError(
            f"cos and sin have {2 * half} columns for {half} angles. With style='interleaved' give each angle once: "
            "cos[..., ::2] where equal ones are neighbours, cos[..., : cos.shape[-1] // 2] where both halves are equal"
        )
    halves = [(table[..., :half], table[..., half:]) for table in (cos, sin)]
    if is_readable(cos) and is_readable(sin) and not all(torch.equal(*pair) for pair in halves):
        raise ValueError(
            f"cos and sin have {2 * half} columns for {half} angles, but their halves are not equal. If neighbours "
            "are, the rotation is style='interleaved', with tables cos[..., ::2] and sin[..., ::2]"
        )
    return halves[0][0], halves[1][0]
