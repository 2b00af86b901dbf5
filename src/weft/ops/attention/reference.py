"""Reference of attention and its gradients, in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...quant.reference import quantize_copy
from ..common.heads import canonical, laid_out
from ..common.results import result_reference
from ..common.rows import compute_dtype
from .arguments import (
    AttentionArgs,
    AttentionBackwardArgs,
    AttentionGradients,
    AttentionOutputs,
    Mask,
    Packed,
    coded_heads,
    starts_as_read,
    value_format,
)
from .configs import GROUP, VALUE_COLUMNS


class Span(NamedTuple):
    """Location of a sequence in tensors [batch, tokens, heads, dim] and in per-query statistics."""

    batch: int
    q: slice
    k: slice
    sound: bool  # starts and length are in range; otherwise its results are NaN
    prefix: int = 0  # number of first keys whose own queries see them all
    limits: Tensor | None = None  # [queries]: number of first keys that each may see


def _spans(packed: Packed, query: Tensor, key: Tensor) -> Iterator[Span]:
    """Yield the sequences of heads [batch, tokens, heads, dim]."""
    count = len(query) if packed.q_starts is None else len(packed.q_starts) - 1
    used = None if packed.kv_lengths is None else packed.kv_lengths.tolist()
    if packed.q_starts is None or packed.k_starts is None:
        spans = [Span(i, slice(0, query.shape[1]), slice(0, key.shape[1]), True) for i in range(count)]
    else:
        bounds = zip(
            _packed_slices(packed.q_starts, query), _packed_slices(packed.k_starts, key), strict=True
        )
        spans = [Span(0, q, k, q_sound and k_sound) for (q, q_sound), (k, k_sound) in bounds]
    for i, span in enumerate(spans):
        if used is not None and span.sound:
            end = min(span.k.start + max(used[i], 0), span.k.stop)
            enough = used[i] <= span.k.stop - span.k.start
            span = span._replace(k=slice(span.k.start, end), sound=enough)
        if packed.prefix_lengths is not None:
            span = span._replace(prefix=min(int(packed.prefix_lengths[i]), span.k.stop - span.k.start))
        if packed.kv_limits is not None:
            limits = packed.kv_limits if packed.q_starts is None else packed.kv_limits[None]
            span = span._replace(limits=limits[span.batch, span.q])
        yield span


def _packed_slices(starts: Tensor, x: Tensor) -> list[tuple[slice, bool]]:
    """Return the slice of each packed sequence in the tokens of x [1, tokens, heads, dim], and whether its starts are
    in range."""
    raw, clamped = starts.tolist(), starts_as_read(starts, x.shape[1]).tolist()
    return [(slice(*clamped[i : i + 2]), clamped[i : i + 2] == raw[i : i + 2]) for i in range(len(raw) - 1)]


def visible(
    q: int, k: int, mask: Mask, device: torch.device, prefix: int = 0, limits: Tensor | None = None
) -> Tensor:
    """Return which keys each query sees, bool [q, k]."""
    own = torch.arange(q, device=device)[:, None] + (k - q) * mask.lower_right
    key = torch.arange(k, device=device)[None, :]
    seen = torch.ones(q, k, dtype=torch.bool, device=device)
    if mask.right is not None:
        seen &= key <= own + mask.right
    if mask.left is not None:
        seen &= key >= own - mask.left
    seen |= (own >= 0) & (own < prefix) & (key < prefix)
    return seen if limits is None else seen & (key < limits[:, None])


class Weights(NamedTuple):
    """Scores and weights of one sequence, [heads, queries, keys], and its lse, [heads, queries]."""

    scores: Tensor  # minus infinity where a key is not seen
    slope: Tensor | None  # derivative of the softcap
    p: Tensor
    lse: Tensor


def _distances(q: int, k: int, mask: Mask, device: torch.device) -> Tensor:
    """Return how far each key lies after a query's own key, [q, k]."""
    own = torch.arange(q, device=device)[:, None] + (k - q) * mask.lower_right
    return torch.arange(k, device=device)[None, :] - own


def _seen(a: AttentionArgs | AttentionBackwardArgs, q: int, k: int, span: Span) -> Tensor:
    """Return which keys each query of a sequence sees, bool [q, k], or [heads, q, k] with a mask of pairs."""
    seen = visible(q, k, a.mask, a.query.device, span.prefix, span.limits)
    if a.seen is None:
        return seen
    return seen & _pairs(a.seen, span)[..., :k].expand(-1, q, k)


def _pairs(x: Tensor, span: Span) -> Tensor:
    """Return the pairs of one sequence, [heads or 1, queries or 1, keys or 1]."""
    return x[span.batch if x.shape[0] > 1 else 0]


def _weights(a: AttentionArgs | AttentionBackwardArgs, q: Tensor, k: Tensor, span: Span) -> Weights:
    """Compute scores and weights of q [queries, heads, dim] and k [keys, heads, dim]."""
    sinks, softcap = a.sinks, a.softcap
    s = torch.einsum("qhd,khd->hqk", q, k) * a.scale
    slope = None
    if softcap:
        t = torch.tanh(s / softcap)
        s, slope = t * softcap, 1 - t * t
    if a.bias is not None:
        s = s + _pairs(a.bias, span)[..., : len(k)].to(s.dtype)
    if a.alibi is not None:
        distance = _distances(len(q), len(k), a.mask, q.device).to(s.dtype)
        before, after = a.alibi.to(s.dtype)[:, :, None, None].unbind(1)
        s = s + torch.where(distance < 0, distance * before, -distance * after)
    s = s.masked_fill(~_seen(a, len(q), len(k), span), -math.inf)
    lse = torch.logsumexp(s, -1) if len(k) else s.new_full(s.shape[:2], -math.inf)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(s.dtype)[:, None].expand_as(lse))
    p = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return Weights(s, slope, p, lse)


def _used(weights: Weights) -> Tensor:
    """Return which keys some query sees, bool [keys, heads]."""
    return (weights.scores != -math.inf).any(1).t()


def _per_query_head(x: Tensor, heads: int) -> Tensor:
    """Repeat each key head for the query heads that share it."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def _dequantized(x: Tensor, scale: Tensor | None, layout: str, dtype: torch.dtype) -> Tensor:
    dim, x = x.shape[-1], canonical(x, layout).to(dtype)
    if scale is None:
        return x
    if scale.dtype != torch.uint8:
        return x * canonical(scale[..., None], layout).to(dtype)
    groups = canonical(scale, layout).view(torch.float8_e8m0fnu).to(dtype)
    return x * groups.repeat_interleave(GROUP, -1)[..., :dim]


def _fake_quantized_values(value: Tensor, element: str) -> Tensor:
    """Quantize values [keys, heads, dim] and dequantize them: with one scale per element of a head over all keys, in
    int8 over each block of keys."""
    keys = VALUE_COLUMNS["int8"] if element == "int8" else max(len(value), 1)
    decoded = []
    for block in value.split(keys):
        copy = quantize_copy(block.flatten(1).t().float(), value_format(element))
        rows = copy.data.to(value.dtype) * copy.scale.view(-1, 1).to(value.dtype)
        decoded.append(rows.t().view(block.shape))
    return torch.cat(decoded)


def attention_reference(a: AttentionArgs) -> AttentionOutputs:
    """Compute attention, sequence by sequence."""
    dtype = compute_dtype(a.query)
    q, k = (_dequantized(*heads, a.layout, dtype) for heads in coded_heads(a))
    v = canonical(a.value, a.layout).to(dtype)
    batch, tokens, heads, _ = q.shape
    out = q.new_zeros(batch, tokens, heads, v.shape[-1])
    lse = q.new_full((batch, heads, tokens), -math.inf)
    max_score = q.new_full((heads,), -math.inf)
    for span in _spans(a.packed, q, k):
        values = v[span.batch, span.k]
        if a.values is not None:
            queries = span.q.stop - span.q.start
            seen = visible(queries, len(values), a.mask, values.device).any(0)[:, None, None]
            values = _fake_quantized_values(torch.where(seen, values, 0.0), a.values)
        key, value = (_per_query_head(x, heads) for x in (k[span.batch, span.k], values))
        weights = _weights(a, q[span.batch, span.q], key, span)
        if a.seen is not None:  # a weight of 0 does not hide NaN
            value = torch.where(_used(weights)[..., None], value, 0.0)
        pv = torch.einsum("hqk,khd->qhd", weights.p, value)
        # A NaN sink also reaches queries that see no key.
        out[span.batch, span.q] = torch.where(weights.lse.isnan().t()[..., None], math.nan, pv)
        lse[span.batch, :, span.q] = weights.lse
        if weights.scores.numel():
            max_score = torch.maximum(max_score, weights.scores.amax((1, 2)))
        if not span.sound:
            out[span.batch, span.q] = lse[span.batch, :, span.q] = max_score[...] = math.nan
    if a.layout == "thd":
        lse = lse[0]
    shape = result_shape(a)
    y = laid_out(out, memory_layout(a.layout))
    if a.result.format is None:
        y = y.transpose(1, 2) if a.layout == "bhsd" else y
        result = result_reference(a.result, y, tuple(y.shape), a.query)
    else:
        flat = y.reshape(-1, shape[-1]).to(a.result.dtype)
        result = result_reference(a.result, flat, shape, a.query, input_dtype=a.result.dtype)
    return AttentionOutputs(result, lse, max_score if a.return_max else None)


def memory_layout(layout: str) -> str:
    """Return the layout of a result in memory, where the heads of a token are adjacent."""
    return "bshd" if layout == "bhsd" else layout


def result_shape(a: AttentionArgs) -> tuple[int, ...]:
    """Return the shape of a result in memory; a quantized one has all heads of a token in one row."""
    *lead, heads, _ = a.query.shape
    if a.layout == "bhsd":
        lead[1], heads = heads, lead[1]
    v_dim = a.value.shape[-1]
    return (*lead, heads, v_dim) if a.result.format is None else (*lead, heads * v_dim)


def attention_backward_reference(a: AttentionBackwardArgs) -> AttentionGradients:
    """Compute the gradients of attention, sequence by sequence."""
    dtype = compute_dtype(a.query)
    q, k, v = (canonical(x, a.layout).to(dtype) for x in (a.query, a.key, a.value))
    y, dy = (canonical(x, memory_layout(a.layout)).to(dtype) for x in (a.y, a.dy))
    heads = q.shape[2]
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    dsinks = q.new_zeros(heads)
    dalibi = q.new_zeros(heads, 2) if a.needs.alibi and a.alibi is not None else None
    dbias = None
    if a.needs.bias and a.bias is not None:
        dbias = q.new_zeros(len(q), heads, q.shape[1], k.shape[1])
    for span in _spans(a.packed, q, k):
        query, (key, value) = (
            q[span.batch, span.q],
            (_per_query_head(x[span.batch, span.k], heads) for x in (k, v)),
        )
        dout = dy[span.batch, span.q]
        weights = _weights(a, query, key, span)
        if a.seen is not None:  # a gradient of 0 does not hide NaN
            key, value = (torch.where(_used(weights)[..., None], x, 0.0) for x in (key, value))
        delta = (dout * y[span.batch, span.q]).sum(-1).t()  # [heads, queries]
        if a.dlse is not None:
            dlse = a.dlse[None] if a.layout == "thd" else a.dlse
            delta = delta - dlse[span.batch, :, span.q].to(dtype)
        ds = weights.p * (torch.einsum("qhd,khd->hqk", dout, value) - delta[..., None])
        dscores = ds if span.sound else torch.full_like(ds, math.nan)
        if dbias is not None:
            dbias[span.batch, :, :, : ds.shape[-1]] = dscores
        if dalibi is not None:
            distance = _distances(len(query), len(key), a.mask, q.device).to(ds.dtype)
            dalibi[:, 0] += (dscores * distance.clamp(max=0)).sum((1, 2))
            dalibi[:, 1] -= (dscores * distance.clamp(min=0)).sum((1, 2))
        if weights.slope is not None:
            ds = ds * weights.slope
        dq[span.batch, span.q] = torch.einsum("hqk,khd->qhd", ds, key) * a.scale
        for into, per_query_head in (
            (dk, torch.einsum("hqk,qhd->khd", ds, query) * a.scale),
            (dv, torch.einsum("hqk,qhd->khd", weights.p, dout)),
        ):
            into[span.batch, span.k] = per_query_head.unflatten(1, (k.shape[2], -1)).sum(2)
        if a.sinks is not None:
            sink = a.sinks.to(dtype)[:, None]
            share = torch.where(weights.lse == sink, 1.0, torch.exp(sink - weights.lse))
            dsinks -= torch.where((sink != -math.inf) & (weights.lse != -math.inf), share * delta, 0.0).sum(
                -1
            )
        if not span.sound:
            dq[span.batch, span.q] = dk[span.batch, span.k] = dv[span.batch, span.k] = math.nan
            if query.numel() and a.sinks is not None:
                dsinks[a.sinks != -math.inf] = math.nan
    grads = [
        laid_out(grad, a.layout).to(like.dtype) for grad, like in ((dq, a.query), (dk, a.key), (dv, a.value))
    ]
    return AttentionGradients(
        grads[0] if a.needs.query else None,
        grads[1] if a.needs.key else None,
        grads[2] if a.needs.key else None,
        dsinks.to(a.sinks.dtype) if a.needs.sinks and a.sinks is not None else None,
        None if dbias is None or a.bias is None else dbias.sum_to_size(a.bias.shape).to(a.bias.dtype),
        dalibi,
    )
