"""What attention must give, in float64, sequence by sequence and head by head, from the documented formulas."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton_loom.testing import EPS32

import weft

from .. import oracle
from ..problem import Call
from ..truth import Near, arguments

# Where the batch, the tokens and the heads are.
PLACES = {"bhsd": (0, 2, 1), "bshd": (0, 1, 2), "sbhd": (1, 0, 2)}


@dataclass
class Head:
    """One head of one sequence: its numbers, and where they are in tensors [batch, tokens, heads, numbers]."""

    batch: int
    queries: slice
    keys: slice
    head: int
    key_head: int


def spread(x: Tensor, layout: str) -> Tensor:
    """As [batch, tokens, heads, numbers]."""
    if x.dim() == 3:
        return x[None]
    return x.permute(*PLACES[layout], 3)


def gathered(x: Tensor, layout: str, packed: bool) -> Tensor:
    """The way back."""
    if packed:
        return x[0]
    order = [0] * 4
    for new, old in enumerate((*PLACES[layout], 3)):
        order[old] = new
    return x.permute(order)


def _heads(given: dict[str, Any], query: Tensor, key: Tensor) -> Iterator[Head]:
    starts, k_starts, used = given["cu_seqlens"], given.get("cu_seqlens_k"), given["kv_lengths"]
    k_starts = starts if k_starts is None else k_starts
    number = query.shape[0] if starts is None else len(starts) - 1
    group = query.shape[2] // key.shape[2]
    for i in range(number):
        if starts is None:
            queries, keys, batch = slice(0, query.shape[1]), slice(0, key.shape[1]), i
        else:
            queries, keys = (slice(int(s[i]), int(s[i + 1])) for s in (starts, k_starts))
            batch = 0
        if used is not None:
            keys = slice(keys.start, min(keys.stop, keys.start + max(int(used[i]), 0)))
        for head in range(query.shape[2]):
            yield Head(batch, queries, keys, head, head // group)


def sees(queries: int, keys: int, given: dict[str, Any]) -> Tensor:
    """bool [queries, keys]."""
    left, right = given.get("window") or (None, None)
    right = 0 if given.get("is_causal") else right
    return _sees(queries, keys, left, right, given.get("causal_align") == "upper_left")


@cache
def _sees(queries: int, keys: int, left: int | None, right: int | None, upper_left: bool) -> Tensor:
    """One query after another."""
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    for i in range(queries):
        own = i if upper_left else i + keys - queries
        first = 0 if left is None else max(own - left, 0)
        last = keys - 1 if right is None else min(own + right, keys - 1)
        seen[i, first : max(last + 1, first)] = True
    return seen


@dataclass
class Weights:
    """What a head's queries and keys come to, and the relative error that fp32 may make in p."""

    scores: Tensor
    slope: Tensor
    p: Tensor
    lse: Tensor
    error: Tensor  # [queries, 1]


def _weights(q: Tensor, k: Tensor, sink: float, seen: Tensor, given: dict[str, Any]) -> Weights:
    scale = q.shape[-1] ** -0.5 if given["scale"] is None else given["scale"]
    cap = given["softcap"] or 0.0
    s = scale * (q @ k.T)
    size = scale * (q.abs() @ k.abs().T)
    slope = torch.ones_like(s)
    if cap:
        t = torch.tanh(s / cap)
        s, slope = cap * t, 1 - t * t
        size = size.clamp(max=cap) + 8 * cap
    s = s.masked_fill(~seen, -math.inf)
    terms = torch.cat([s, torch.full((len(q), 1), sink, dtype=s.dtype)], 1)
    lse = torch.logsumexp(terms, 1)
    p = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[:, None])
    # Scores in base 2 lose a few roundings of their size, and so does what is subtracted from them.
    largest = torch.where(seen, size, 0.0).amax(1, keepdim=True) if k.numel() else s.new_zeros(len(q), 1)
    largest = largest + torch.where(lse.isfinite(), lse.abs(), 0.0)[:, None]
    error = EPS32 * ((q.shape[-1] / 16 + 8) * largest + len(k) / 16 + 16)
    return Weights(s, slope, p, lse, error)


def _sum_error(terms: int) -> float:
    """Relative to the sum of sizes: of an fp32 sum whose parts are added up 16 or more at a time."""
    return (terms / 16 + 4) * EPS32


def half_step(dtype: torch.dtype) -> float:
    """The largest relative error of a rounding to a dtype."""
    return torch.finfo(dtype).eps / 2


@dataclass
class Made:
    truth: Tensor
    noise: Tensor

    @staticmethod
    def like(*shape: int) -> Made:
        return Made(torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64))

    def near(self) -> Near:
        return Near(self.truth, self.noise)


# Weights below the normal numbers of e4m3 are rounded by as much, relative to the largest of their row.
LEAST_WEIGHT = 2.0**-18


def _numbers(x: Tensor) -> Tensor:
    return x.dequantize(torch.float64) if isinstance(x, weft.QTensor) else x.detach().double()


def _through_codes(value: Tensor) -> Tensor:
    """What the codes in e4m3 of values [keys, numbers] stand for, a scale for each number."""
    made = oracle.quantize(
        value.float(), block="row", element="e4m3", convention="te", power_of_two=False, transpose=True
    )
    return (made.data.view(torch.float8_e4m3fn).double() * made.scale.double().view(-1, 1)).T


def attention(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    return _attention(arguments(call), gradients)


def _attention(given: dict[str, Any], gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    layout, packed = given["layout"], given["cu_seqlens"] is not None
    dtype = given["query"].dtype
    q, k, v = (spread(_numbers(given[name]), layout) for name in ("query", "key", "value"))
    batch, tokens, heads, _ = q.shape
    sinks = given["sinks"]
    y, lse, top = (
        Made.like(batch, tokens, heads, v.shape[-1]),
        Made.like(batch, heads, tokens),
        Made.like(heads),
    )
    lse.truth.fill_(-math.inf)
    top.truth.fill_(-math.inf)
    several = given["return_lse"] or given["return_max"]
    dy = gradients.get("out" if several else "y")
    if dy is not None:
        dy = dy.double()
        if given["quantize"] is not None:
            dy = dy.unflatten(-1, (heads, -1))
            dy = spread(dy, "sbhd" if layout == "sbhd" else "bshd")
        else:
            dy = spread(dy, layout)
    dlse = gradients.get("lse")
    if dlse is not None:
        dlse = (dlse[None] if packed else dlse).double()
    grads = {"query": Made.like(*q.shape), "key": Made.like(*k.shape), "value": Made.like(*v.shape)}
    dsinks = Made.like(heads)
    rounding = half_step(dtype) if dtype != torch.float32 else 0.0
    if given.get("values") is not None:
        rounding = half_step(torch.float8_e4m3fn)
    for at in _heads(given, q, k):
        b, i, j, h, g = at.batch, at.queries, at.keys, at.head, at.key_head
        qh, kh, vh = q[b, i, h], k[b, j, g], v[b, j, g]
        eight_bits = given.get("values") is not None and len(vh) > 0
        if eight_bits:
            seen = sees(len(qh), len(kh), given).any(0)[:, None]
            vh = _through_codes(torch.where(seen, vh, 0.0))
        sink = -math.inf if sinks is None else float(sinks[h].detach())
        w = _weights(qh, kh, sink, sees(len(qh), len(kh), given), given)
        y.truth[b, i, h] = out = w.p @ vh
        y.noise[b, i, h] = noise = (w.error + rounding + _sum_error(len(kh))) * (w.p @ vh.abs())
        if eight_bits:
            y.noise[b, i, h] += LEAST_WEIGHT * w.p.amax(1, keepdim=True) * vh.abs().sum(0)
        lse.truth[b, h, i] = w.lse
        lse.noise[b, h, i] = w.error[:, 0] + 4 * EPS32 * torch.where(w.lse.isfinite(), w.lse.abs(), 0.0)
        if w.scores.numel():
            top.truth[h] = max(top.truth[h], w.scores.amax())
            top.noise[h] = max(top.noise[h], w.error.amax())
        if dy is None and dlse is None:
            continue
        do = torch.zeros_like(out) if dy is None else dy[b, i, h]
        # delta is made of the rounded y.
        delta = (do * out).sum(1, keepdim=True)
        delta_noise = (do.abs() * (noise + (rounding or EPS32) * (out.abs() + noise))).sum(1, keepdim=True)
        delta_noise += _sum_error(v.shape[-1]) * (do * out).abs().sum(1, keepdim=True)
        if dlse is not None:
            delta = delta - dlse[b, h, i][:, None]
            delta_noise += 2 * EPS32 * delta.abs()
        dp, dp_size = do @ vh.T, do.abs() @ vh.abs().T
        ds = w.p * (dp - delta) * w.slope
        size = w.p * (dp_size + delta.abs())
        ds_noise = size * (w.error + _sum_error(v.shape[-1])) + w.p * delta_noise + rounding * ds.abs()
        if given["softcap"]:
            ds_noise = ds_noise + 32 * EPS32 * size
        scale = q.shape[-1] ** -0.5 if given["scale"] is None else given["scale"]
        for name, weights, weights_noise, rows, into in (
            ("query", ds, ds_noise, kh, (b, i, h)),
            ("key", ds.T, ds_noise.T, qh, (b, j, g)),
            ("value", w.p.T, (w.p * (w.error + rounding)).T, do, (b, j, g)),
        ):
            factor = 1.0 if name == "value" else scale
            grads[name].truth[into] += factor * (weights @ rows)
            terms = rows.shape[0] * (heads // k.shape[2])
            step = (weights_noise + _sum_error(terms) * weights.abs()) @ rows.abs()
            grads[name].noise[into] += factor * step
        if sinks is not None and sink > -math.inf:
            share = torch.exp(sink - w.lse)[:, None]
            dsinks.truth[h] -= (share * delta).sum()
            dsinks.noise[h] += (share * (delta_noise + (w.error + 64 * EPS32) * delta.abs())).sum()
    found: dict[str, Near | Tensor] = {
        "out" if several else "y": Near(*(gathered(t, layout, packed) for t in (y.truth, y.noise))),
        "lse": Near(*((t[0] if packed else t) for t in (lse.truth, lse.noise))),
        "max": top.near(),
        "dsinks": dsinks.near(),
    }
    for name, made in grads.items():
        found[f"d{name}"] = Near(*(gathered(t, layout, packed) for t in (made.truth, made.noise)))
    return found


def attention_backward(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Of the forward call that the arguments belong to."""
    given = arguments(call)
    mask, layout = given["mask"], given["layout"]
    packed = given["cu_seqlens"] is not None
    of_forward = {
        **{name: given[name] for name in ("query", "key", "value", "sinks", "cu_seqlens", "kv_lengths")},
        "cu_seqlens_k": None,
        "window": (mask.left, mask.right),
        "is_causal": False,
        "causal_align": "lower_right" if mask.lower_right else "upper_left",
        "scale": None,
        "softcap": given["softcap"],
        "layout": layout,
        "return_lse": True,
        "return_max": False,
        "quantize": None,
    }
    dy = given["dy"]
    upstream = {"out": dy.transpose(1, 2) if layout == "bhsd" else dy}
    if given["dlse"] is not None:
        upstream["lse"] = given["dlse"]
    found = _attention(of_forward, upstream)
    assert packed == (layout == "thd")
    return {name: value for name, value in found.items() if name.startswith("d")}


def attention_decode(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Attention of each sequence with the keys and values that its pages hold."""
    given = arguments(call) | call.kwargs
    query = given["query"]
    four = query if query.dim() == 4 else query[:, None]
    v_dim = 512 if given["v"] is None else given["v"].shape[-1]
    out, lse = Made.like(*four.shape[:3], v_dim), Made.like(four.shape[0], four.shape[2], four.shape[1])
    coded = given["k_scale"] is not None
    for s in range(len(four)):
        length = max(int(given["lengths"][s]), 0)
        k = _from_pages(given["k"], given["k_scale"], given["page_table"][s], length)
        v = k[..., :v_dim] if given["v"] is None else None
        if v is None:
            v = _from_pages(given["v"], given["v_scale"], given["page_table"][s], length)
        own = four[s].double()
        for h in range(four.shape[2]):
            head = h // (four.shape[2] // k.shape[1])
            options = {"scale": given.get("scale"), "softcap": given.get("softcap")}
            window = given.get("window")
            seen = sees(
                len(own), length, {"window": None if window is None else (window, 0), "is_causal": True}
            )
            sink = -math.inf if given.get("sinks") is None else float(given["sinks"][h])
            w = _weights(own[:, h], k[:, head], sink, seen, options)
            # Codes are multiplied in bf16 at the least exact; plain numbers in their own dtype; parts are joined.
            rounding = half_step(torch.bfloat16) if coded else half_step(query.dtype)
            out.truth[s, :, h] = w.p @ v[:, head]
            out.noise[s, :, h] = (w.error + rounding + _sum_error(length)) * (w.p @ v[:, head].abs())
            lse.truth[s, h] = w.lse
            lse.noise[s, h] = w.error[:, 0] + 4 * EPS32 * torch.where(w.lse.isfinite(), w.lse.abs(), 0.0)
    if query.dim() == 3:
        return {
            "out": Near(out.truth[:, 0], out.noise[:, 0]),
            "lse": Near(lse.truth[..., 0], lse.noise[..., 0]),
        }
    return {"out": out.near(), "lse": lse.near()}


def _from_pages(cache: Tensor, scale: Tensor | None, pages: Tensor, length: int) -> Tensor:
    """Heads [tokens, heads, numbers] of a sequence, in float64, one token after another."""
    paged = cache if cache.dim() == 4 else cache[:, None]
    found = torch.zeros(length, *paged.shape[2:], dtype=torch.float64)
    for token in range(length):
        page, place = int(pages[token // paged.shape[1]]), token % paged.shape[1]
        found[token] = paged[page, place].double()
        if scale is not None:
            own = scale
            if scale.dim() > 1:
                own = (scale if cache.dim() == 4 else scale[:, None])[page, place]
            found[token] *= own.double()[..., None] if own.dim() else own.double()
    return found


def encoded(call: Call) -> dict[str, Tensor]:
    """What a quantised result is made of: the plain one, with the heads of a token side by side."""
    plain = {name: value for name, value in call.kwargs.items() if name not in ("quantize", "columnwise")}
    return {"y": call.function(**plain).flatten(-2).flatten(0, -2)}


ENCODED = {"attention": encoded}
TRUTHS = {
    "attention": attention,
    "attention_backward": attention_backward,
    "attention_decode": attention_decode,
}
