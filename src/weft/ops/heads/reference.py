"""Reference of the ops on heads, in plain PyTorch: fp32, and fp64 for fp64 inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...quant import Format
from ...quant.reference import encode_reference, quantize_copy
from ..common.heads import Cut, Parts, canonical, laid_out, sizes, split, tokens_of
from ..common.kv_cache import format_of
from ..common.rows import compute_dtype
from .angles import Turning, reference_angles
from .arguments import (
    QKV,
    Prepare,
    PrepareBackward,
    PrepareCached,
    PrepareGradients,
    PrepareQuantized,
    Quantized,
    Rope,
    Rotated,
)
from .norm import Norm

CosSin = tuple[Tensor, Tensor]


def rotated(x: Tensor, angles: CosSin | None, turning: Turning, inverse: bool = False) -> Tensor:
    """Rotate the pairs of x [batch, sequence, heads, dim] and write them in the output style; with `inverse`, rotate
    back and write them in the input style."""
    if angles is None:
        return x
    cos, sin = angles
    style, out_style = turning.style, turning.out_style
    if inverse:
        sin, style, out_style = -sin, out_style, style
    rest = x.shape[-1] - turning.dim
    start = 0 if turning.first else rest
    before, part, after = x.split((start, turning.dim, rest - start), -1)
    a, b = part.chunk(2, -1) if style == "neox" else (part[..., 0::2], part[..., 1::2])
    pair = [a * cos - b * sin, b * cos + a * sin]
    part = torch.cat(pair, -1) if out_style == "neox" else torch.stack(pair, -1).flatten(-2)
    return torch.cat([before, part, after], -1)


def _normalized(x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Return (z, r): the normalized heads, and 1 / their deviation."""
    centered = x - x.mean(-1, keepdim=True) if norm.kind == "layer" else x
    r = 1.0 / torch.sqrt(centered.square().mean(-1, keepdim=True) + norm.eps_for(x))
    return centered * r, r


# ---- forward --------------------------------------------------------------------------------------------


def _biased(parts: Parts, bias: Tensor | None, cut: Cut, dtype: torch.dtype) -> Parts:
    """Add the bias to the heads of a packed input, in this dtype."""
    if bias is None:
        return parts
    biases = split(bias.to(dtype)[None, None], None, None, cut._replace(layout="bshd"))
    added: Any = (
        None if part is None or more is None else part.to(dtype) + more
        for part, more in zip(parts, biases, strict=True)
    )
    return Parts(*added)


def _prepared(a: Prepare) -> Parts:
    """Return q, k, v and gate [batch, sequence, heads, dim], not rounded yet."""
    dtype = compute_dtype(a.x)
    angles = reference_angles(a.turning, sizes(a.x, a.cut.layout)[1], dtype, a.x.device)
    q, k, v, gate = _biased(split(a.x, a.k, a.v, a.cut), a.bias, a.cut, dtype)
    assert k is not None
    q = _prepared_heads(q.to(dtype), a.norm.q_weight, a.norm.q_bias, angles, a)
    k = _prepared_heads(k.to(dtype), a.norm.k_weight, a.norm.k_bias, angles, a)
    return Parts(q, k, v, gate)


def _prepared_heads(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, angles: CosSin | None, a: Prepare
) -> Tensor:
    if a.norm.after:
        x = rotated(x, angles, a.turning)
    if a.norm.kind != "none":
        x = _normalized(x, a.norm)[0]
        if weight is not None:
            x = x * (weight.to(x.dtype) + a.norm.weight_offset)
        if bias is not None:
            x = x + bias.to(x.dtype)
    return x if a.norm.after else rotated(x, angles, a.turning)


def qkv_prepare_reference(a: Prepare) -> QKV:
    rounded: Any = (
        None if part is None else laid_out(part.to(a.x.dtype), a.cut.out_layout).clone()
        for part in _prepared(a)
    )
    return QKV(*rounded)


def qkv_prepare_cached_reference(a: PrepareCached) -> None:
    parts = _prepared(a.prepare)
    for output, value in zip(a.outputs, (part for part in parts if part is not None), strict=True):
        output.copy_(laid_out(value.to(a.x.dtype), a.cut.out_layout))
    assert parts.k is not None
    _store_reference(a, parts.k, parts.v)


def _store_reference(a: PrepareCached, k: Tensor, v: Tensor | None) -> None:
    """Write k and v [batch, sequence, heads, dim], not rounded yet, to their slots."""
    cache = a.cache
    batch, tokens = sizes(a.x, a.cut.layout)
    slots = a.slots.view(tokens, batch).t() if a.cut.layout == "sbhd" else a.slots
    slot = slots.long().flatten()
    shape = a.caches[0].shape
    size = shape[1] if len(shape) == 4 else 1
    in_cache = (slot >= 0) & (slot < shape[0] * size)
    slot = slot[in_cache]
    index = (slot // size, slot % size) if len(shape) == 4 else (slot,)
    for value, into, scale in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        if into is None or value is None:
            continue
        tokens_in_cache = value.flatten(0, 1)[in_cache]  # [tokens, heads, dim]
        if scale is None:
            into[index] = tokens_in_cache.to(into.dtype)
            continue
        f = format_of(into.dtype)
        assert f is not None
        if a.scaled == "token":
            codes, scales = quantize_copy(tokens_in_cache.float().flatten(0, 1), f)[:2]
            scale[index] = scales.view(tokens_in_cache.shape[:2])
        else:
            divisor = scale if scale.dim() == 0 else scale[:, None]
            codes = encode_reference(tokens_in_cache.float() / divisor, f.number)
        into.view(torch.uint8)[index] = codes.view(torch.uint8).view(tokens_in_cache.shape)


def qkv_prepare_quantized_reference(a: PrepareQuantized) -> Quantized:
    q, k, v, gate = _prepared(a.prepare)
    layout = a.cut.out_layout
    codes, scales = [], []
    for heads in (q, k):
        assert heads is not None
        x = laid_out(heads.float(), layout)
        copy = quantize_copy(x.flatten(0, -2), Format.of(a.format))
        codes.append(copy.data.view(x.shape))
        scales.append(copy.scale.view(x.shape[:-1]))
    rest: Any = (None if x is None else laid_out(x.to(a.x.dtype), layout).clone() for x in (v, gate))
    return Quantized(*codes, *scales, *rest)


def rope_reference(a: Rope) -> Rotated:
    dtype = compute_dtype(a.x)
    angles = reference_angles(a.turning, sizes(a.x, a.layout)[1], dtype, a.x.device)
    y = rotated(canonical(a.x, a.layout).to(dtype), angles, a.turning, a.inverse)
    return Rotated(laid_out(y.to(a.x.dtype), a.out_layout).clone())


# ---- backward -------------------------------------------------------------------------------------------


def qkv_prepare_backward_reference(a: PrepareBackward) -> PrepareGradients:
    dtype, norm = compute_dtype(a.dq), a.norm
    tokens = tokens_of(a.dq, a.cut.out_layout, a.batch)
    angles = reference_angles(a.turning, tokens, dtype, a.dq.device)
    upstream = [
        None if d is None else _by_token(d, a.cut.out_layout, a.batch) for d in (a.dq, a.dk, a.dv, a.dgate)
    ]
    dq, dk, dv, dgate = upstream
    assert dq is not None
    assert dk is not None
    q = k = None
    if a.x is not None:
        q, k, _, _ = _biased(split(a.x, a.k, None, a.cut), a.bias, a.cut, dtype)
    dq, q_weight, q_bias = _heads_backward(dq, q, norm.q_weight, angles, a)
    dk, k_weight, k_bias = _heads_backward(dk, k, norm.k_weight, angles, a)
    packed = _joined(Parts(dq, dk, dv, dgate), a.cut)

    def like(total: Tensor | None, vector: Tensor | None) -> Tensor | None:
        return None if total is None or vector is None else total.to(vector.dtype)

    dbias = packed[0].to(dtype).flatten(0, -2).sum(0) if a.needs.bias else None
    sums = (
        like(q_weight, norm.q_weight),
        like(k_weight, norm.k_weight),
        like(q_bias, norm.q_bias),
        like(k_bias, norm.k_bias),
        like(dbias, a.bias),
    )
    needed = (t if need else None for t, need in zip((*packed, *sums), a.needs, strict=True))
    return PrepareGradients(*needed)


def _by_token(d: Tensor, out_layout: str, batch: int) -> Tensor:
    """Return an upstream gradient as [batch, sequence, heads, dim]."""
    if out_layout == "thd":
        return d.view(batch, tokens_of(d, out_layout, batch), *d.shape[1:])
    return canonical(d, out_layout)


def _heads_backward(
    d: Tensor, x: Tensor | None, weight: Tensor | None, angles: CosSin | None, a: PrepareBackward
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of the heads, their weight and their bias."""
    dtype, norm = compute_dtype(d), a.norm
    rounded, d = d.dtype, d.to(dtype)
    dweight = dbias = None
    if not norm.after:
        d = rotated(d, angles, a.turning, inverse=True)
    if x is not None:
        value = x.to(dtype)
        if norm.after:
            value = rotated(value, angles, a.turning)
        z, r = _normalized(value, norm)
        dweight, dbias = (d * z).sum((0, 1, 2)), d.sum((0, 1, 2))
        if weight is not None:
            d = d * (weight.to(dtype) + norm.weight_offset)
        mean = d.mean(-1, keepdim=True) if norm.kind == "layer" else 0.0
        d = r * (d - z * (d * z).mean(-1, keepdim=True) - mean)
    if norm.after:
        d = rotated(d, angles, a.turning, inverse=True)
    return d.to(rounded), dweight, dbias


def _joined(parts: Parts, cut: Cut) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradient of a packed input, or the gradients of q, k and v."""
    both = parts.q if parts.gate is None else torch.cat([parts.q, parts.gate], -1)
    if cut.packing == "apart":
        dq, dk, dv = (
            None if part is None else laid_out(part, cut.layout).clone() for part in (both, parts.k, parts.v)
        )
        assert dq is not None
        return dq, dk, dv
    assert parts.k is not None
    assert parts.v is not None
    if cut.packing == "flat":
        packed = torch.cat([part.flatten(2) for part in (both, parts.k, parts.v)], -1)
    else:
        groups = both.reshape(*both.shape[:2], cut.kv, cut.group * cut.q_dim)
        packed = torch.cat([groups, parts.k, parts.v], -1).flatten(2)
    dx = packed[0] if cut.layout == "thd" else canonical(packed, cut.layout).contiguous()
    return dx, None, None
