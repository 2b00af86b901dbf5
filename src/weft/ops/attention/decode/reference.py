"""Reference of attention over a cache, in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...common.rows import compute_dtype
from .arguments import DecodeArgs, DecodeOutputs
from .forms import Forms


def _gathered(cache: Tensor, scale: Tensor | None, pages: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Gather the heads [tokens, heads, dim] of a sequence from its pages, dequantized."""
    size = cache.shape[1]
    token = torch.arange(length, device=cache.device)
    where = pages[token // size].long().clamp(0, len(cache) - 1), token % size
    if scale is None and cache.dtype is torch.uint8:
        return latent_rows_reference(cache[where]).to(dtype)
    if scale is None:
        return cache[where].to(dtype)
    codes = cache.view(torch.int8 if cache.dtype is torch.int8 else torch.float8_e4m3fn)
    codes_at = codes.view(torch.uint8)[where].view(codes.dtype).to(dtype)
    scale_at = scale[where] if scale.dim() == 3 else scale.expand(codes_at.shape[1])
    return codes_at * scale_at.to(dtype)[..., None]


def latent_rows_reference(rows: Tensor) -> Tensor:
    """Decode FlashMLA's rows of bytes [..., 656] to bf16 [..., 576]: 512 e4m3 codes with one scale per 128 of them,
    then 64 plain elements."""
    rows = rows.contiguous()
    codes = rows[..., :512].contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
    scales = rows[..., 512:528].contiguous().view(torch.float32)
    rope_part = rows[..., 528:].contiguous().view(torch.bfloat16)
    return torch.cat([(codes * scales[..., None]).flatten(-2).bfloat16(), rope_part], -1)


def attention_decode_reference(a: DecodeArgs) -> DecodeOutputs:
    """Compute attention over a cache, sequence by sequence."""
    Forms.of(a, a.query).check()
    dtype = compute_dtype(a.query)
    sequences, queries, heads, _ = a.query.shape
    room = a.page_table.shape[1] * a.k.shape[1]
    y = a.query.new_zeros(sequences, queries, heads, a.v_dim, dtype=dtype)
    lse = a.query.new_full((sequences, queries, heads), -math.inf, dtype=dtype)
    for s, requested in enumerate(a.lengths.tolist()):
        length = max(min(requested, room), 0)
        first = 0 if a.left is None else max(length - queries - a.left, 0)
        seen_pages = a.page_table[s, first // a.k.shape[1] : -(-length // a.k.shape[1])]
        if requested > room or ((seen_pages < 0) | (seen_pages >= len(a.k))).any():
            y[s], lse[s] = math.nan, math.nan
            continue
        k = _gathered(a.k, a.k_scale, a.page_table[s], length, dtype)
        v = k[..., : a.v_dim] if a.v is None else _gathered(a.v, a.v_scale, a.page_table[s], length, dtype)
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", a.query[s].to(dtype), k) * a.scale
        if a.softcap:
            scores = a.softcap * torch.tanh(scores / a.softcap)
        own = torch.arange(queries, device=k.device)[:, None] + length - queries
        key = torch.arange(length, device=k.device)[None, :]
        seen = key <= own
        if a.left is not None:
            seen &= key >= own - a.left
        scores = scores.masked_fill(~seen, -math.inf)
        logsumexp = torch.logsumexp(scores, -1) if length else scores.new_full(scores.shape[:2], -math.inf)
        if a.sinks is not None:
            logsumexp = torch.logaddexp(logsumexp, a.sinks.to(dtype)[:, None].expand_as(logsumexp))
        p = torch.exp(scores - torch.where(logsumexp == -math.inf, 0.0, logsumexp)[..., None])
        # A NaN sink also reaches queries that see no key.
        y[s] = torch.where(logsumexp.isnan().t()[..., None], math.nan, torch.einsum("hqk,khd->qhd", p, v))
        lse[s] = logsumexp.t()
    return DecodeOutputs(y.to(a.query.dtype), lse)
