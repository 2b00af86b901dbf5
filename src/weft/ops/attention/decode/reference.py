"""Attention over a cache in plain PyTorch: the definition of right."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...common.rows import compute_dtype
from .arguments import DecodeArgs, DecodeOutputs
from .forms import Forms


def _gathered(cache: Tensor, scale: Tensor | None, pages: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The heads [tokens, heads, numbers] of a sequence."""
    size = cache.shape[1]
    token = torch.arange(length, device=cache.device)
    where = pages[token // size].long().clamp(0, len(cache) - 1), token % size
    if scale is None and cache.dtype is torch.uint8:
        return latent_rows_reference(cache[where]).to(dtype)
    if scale is None:
        return cache[where].to(dtype)
    codes = cache.view(torch.int8 if cache.dtype is torch.int8 else torch.float8_e4m3fn)
    found = codes.view(torch.uint8)[where].view(codes.dtype).to(dtype)
    own = scale[where] if scale.dim() == 3 else scale.expand(found.shape[1])
    return found * own.to(dtype)[..., None]


def latent_rows_reference(rows: Tensor) -> Tensor:
    """The 576 numbers of FlashMLA's rows of bytes [..., 656], in bf16: 512 codes e4m3 with a scale for each 128 of
    them, then 64 numbers as they are."""
    rows = rows.contiguous()
    codes = rows[..., :512].contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
    scales = rows[..., 512:528].contiguous().view(torch.float32)
    turned = rows[..., 528:].contiguous().view(torch.bfloat16)
    return torch.cat([(codes * scales[..., None]).flatten(-2).bfloat16(), turned], -1)


def attention_decode_reference(a: DecodeArgs) -> DecodeOutputs:
    """The definition."""
    Forms.of(a, a.query).check()
    dtype = compute_dtype(a.query)
    sequences, queries, heads, _ = a.query.shape
    room = a.page_table.shape[1] * a.k.shape[1]
    y = a.query.new_zeros(sequences, queries, heads, a.v_dim, dtype=dtype)
    lse = a.query.new_full((sequences, queries, heads), -math.inf, dtype=dtype)
    for s, given in enumerate(a.lengths.tolist()):
        length = max(min(given, room), 0)
        first = 0 if a.left is None else max(length - queries - a.left, 0)
        seen_pages = a.page_table[s, first // a.k.shape[1] : -(-length // a.k.shape[1])]
        if given > room or ((seen_pages < 0) | (seen_pages >= len(a.k))).any():
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
        found = torch.logsumexp(scores, -1) if length else scores.new_full(scores.shape[:2], -math.inf)
        if a.sinks is not None:
            found = torch.logaddexp(found, a.sinks.to(dtype)[:, None].expand_as(found))
        p = torch.exp(scores - torch.where(found == -math.inf, 0.0, found)[..., None])
        # A sink that is NaN reaches queries that see no key, too.
        y[s] = torch.where(found.isnan().t()[..., None], math.nan, torch.einsum("hqk,khd->qhd", p, v))
        lse[s] = found.t()
    return DecodeOutputs(y.to(a.query.dtype), lse)
