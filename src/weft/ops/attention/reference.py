"""The definition of attention and of its gradients, in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...quant.reference import quantize_copy
from ..common.heads import canonical, laid_out
from ..common.kv_cache import E4M3
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
)


class Span(NamedTuple):
    """A sequence: its place in tensors [batch, tokens, heads, numbers], and in those of numbers of each query."""

    batch: int
    q: slice
    k: slice
    sound: bool  # its starts and its length are in range; otherwise its results are NaN


def _spans(packed: Packed, query: Tensor, key: Tensor) -> Iterator[Span]:
    """The sequences of heads [batch, tokens, heads, numbers]."""
    number = len(query) if packed.q_starts is None else len(packed.q_starts) - 1
    used = None if packed.kv_lengths is None else packed.kv_lengths.tolist()
    if packed.q_starts is None or packed.k_starts is None:
        spans = [Span(i, slice(0, query.shape[1]), slice(0, key.shape[1]), True) for i in range(number)]
    else:
        bounds = zip(_packed(packed.q_starts, query), _packed(packed.k_starts, key), strict=True)
        spans = [Span(0, q, k, q_sound and k_sound) for (q, q_sound), (k, k_sound) in bounds]
    for i, span in enumerate(spans):
        if used is not None and span.sound:
            end = min(span.k.start + max(used[i], 0), span.k.stop)
            enough = used[i] <= span.k.stop - span.k.start
            span = span._replace(k=slice(span.k.start, end), sound=enough)
        yield span


def _packed(starts: Tensor, x: Tensor) -> list[tuple[slice, bool]]:
    """Where packed sequences lie among the tokens of x [1, tokens, heads, numbers], and whether their starts are in
    range."""
    given, read = starts.tolist(), starts_as_read(starts, x.shape[1]).tolist()
    return [(slice(*read[i : i + 2]), read[i : i + 2] == given[i : i + 2]) for i in range(len(given) - 1)]


def visible(q: int, k: int, mask: Mask, device: torch.device) -> Tensor:
    """bool [q, k]: which keys a query sees."""
    own = torch.arange(q, device=device)[:, None] + (k - q) * mask.lower_right
    key = torch.arange(k, device=device)[None, :]
    seen = torch.ones(q, k, dtype=torch.bool, device=device)
    if mask.right is not None:
        seen &= key <= own + mask.right
    if mask.left is not None:
        seen &= key >= own - mask.left
    return seen


class Weights(NamedTuple):
    """What one sequence's queries and keys come to: [heads, queries, keys] and [heads, queries]."""

    scores: Tensor  # minus infinity where a key is not seen
    slope: Tensor | None  # of the cap
    p: Tensor
    lse: Tensor


def _weights(q: Tensor, k: Tensor, sinks: Tensor | None, mask: Mask, scale: float, softcap: float) -> Weights:
    """From heads [queries, heads, numbers] and [keys, heads, numbers], as many of both."""
    s = torch.einsum("qhd,khd->hqk", q, k) * scale
    slope = None
    if softcap:
        t = torch.tanh(s / softcap)
        s, slope = t * softcap, 1 - t * t
    s = s.masked_fill(~visible(len(q), len(k), mask, q.device), -math.inf)
    lse = torch.logsumexp(s, -1) if len(k) else s.new_full(s.shape[:2], -math.inf)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(s.dtype)[:, None].expand_as(lse))
    p = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return Weights(s, slope, p, lse)


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Heads of keys, each as often as heads of queries share it."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def _decoded(x: Tensor, scale: Tensor | None, layout: str, dtype: torch.dtype) -> Tensor:
    x = canonical(x, layout).to(dtype)
    return x if scale is None else x * canonical(scale[..., None], layout).to(dtype)


def _through_codes(value: Tensor) -> Tensor:
    """Values [keys, heads, numbers] as their codes in e4m3 stand for them: a scale for each number of a head."""
    rows = value.flatten(1).t()
    copy = quantize_copy(rows.float(), E4M3)
    return (copy.data.to(value.dtype) * copy.scale.view(-1, 1).to(value.dtype)).t().view(value.shape)


def attention_reference(a: AttentionArgs) -> AttentionOutputs:
    """The definition."""
    dtype = compute_dtype(a.query)
    q, k = (_decoded(*heads, a.layout, dtype) for heads in coded_heads(a))
    v = canonical(a.value, a.layout).to(dtype)
    batch, tokens, heads, _ = q.shape
    out = q.new_zeros(batch, tokens, heads, v.shape[-1])
    lse = q.new_full((batch, heads, tokens), -math.inf)
    largest = q.new_full((heads,), -math.inf)
    for span in _spans(a.packed, q, k):
        own = v[span.batch, span.k]
        if a.values is not None:
            queries = span.q.stop - span.q.start
            seen = visible(queries, len(own), a.mask, own.device).any(0)[:, None, None]
            own = _through_codes(torch.where(seen, own, 0.0))
        key, value = (_repeated(x, heads) for x in (k[span.batch, span.k], own))
        w = _weights(q[span.batch, span.q], key, a.sinks, a.mask, a.scale, a.softcap)
        found = torch.einsum("hqk,khd->qhd", w.p, value)
        # A sink that is NaN reaches queries that see no key, too.
        out[span.batch, span.q] = torch.where(w.lse.isnan().t()[..., None], math.nan, found)
        lse[span.batch, :, span.q] = w.lse
        if w.scores.numel():
            largest = torch.maximum(largest, w.scores.amax((1, 2)))
        if not span.sound:
            out[span.batch, span.q] = lse[span.batch, :, span.q] = largest[...] = math.nan
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
    return AttentionOutputs(result, lse, largest if a.return_max else None)


def memory_layout(layout: str) -> str:
    """The layout in which a result lies in memory: the heads of a token follow each other."""
    return "bshd" if layout == "bhsd" else layout


def result_shape(a: AttentionArgs) -> tuple[int, ...]:
    """The shape in which a result lies in memory; of a quantised one, with the heads of a token in one row."""
    *lead, heads, _ = a.query.shape
    if a.layout == "bhsd":
        lead[1], heads = heads, lead[1]
    v_dim = a.value.shape[-1]
    return (*lead, heads, v_dim) if a.result.format is None else (*lead, heads * v_dim)


def attention_backward_reference(a: AttentionBackwardArgs) -> AttentionGradients:
    """The gradients."""
    dtype = compute_dtype(a.query)
    q, k, v = (canonical(x, a.layout).to(dtype) for x in (a.query, a.key, a.value))
    y, dy = (canonical(x, memory_layout(a.layout)).to(dtype) for x in (a.y, a.dy))
    heads = q.shape[2]
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    dsinks = q.new_zeros(heads)
    for span in _spans(a.packed, q, k):
        query, (key, value) = q[span.batch, span.q], (_repeated(x[span.batch, span.k], heads) for x in (k, v))
        dout = dy[span.batch, span.q]
        w = _weights(query, key, a.sinks, a.mask, a.scale, a.softcap)
        delta = (dout * y[span.batch, span.q]).sum(-1).t()  # [heads, queries]
        if a.dlse is not None:
            dlse = a.dlse[None] if a.layout == "thd" else a.dlse
            delta = delta - dlse[span.batch, :, span.q].to(dtype)
        ds = w.p * (torch.einsum("qhd,khd->hqk", dout, value) - delta[..., None])
        if w.slope is not None:
            ds = ds * w.slope
        dq[span.batch, span.q] = torch.einsum("hqk,khd->qhd", ds, key) * a.scale
        for into, made in (
            (dk, torch.einsum("hqk,qhd->khd", ds, query) * a.scale),
            (dv, torch.einsum("hqk,qhd->khd", w.p, dout)),
        ):
            into[span.batch, span.k] = made.unflatten(1, (k.shape[2], -1)).sum(2)
        if a.sinks is not None:
            sink = a.sinks.to(dtype)[:, None]
            share = torch.where(w.lse == sink, 1.0, torch.exp(sink - w.lse))
            dsinks -= torch.where((sink != -math.inf) & (w.lse != -math.inf), share * delta, 0.0).sum(-1)
        if not span.sound:
            dq[span.batch, span.q] = dk[span.batch, span.k] = dv[span.batch, span.k] = math.nan
            if query.numel() and a.sinks is not None:
                dsinks[a.sinks != -math.inf] = math.nan
    found = [
        laid_out(grad, a.layout).to(like.dtype) for grad, like in ((dq, a.query), (dk, a.key), (dv, a.value))
    ]
    return AttentionGradients(
        found[0] if a.needs.query else None,
        found[1] if a.needs.key else None,
        found[2] if a.needs.key else None,
        dsinks.to(a.sinks.dtype) if a.needs.sinks and a.sinks is not None else None,
    )
