"""Launches of attention over a cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ....quant import Format
from ....runtime import BoundLaunch, Capabilities, Launch, capabilities_of, choice, remembered, scratch
from ...common.checks import FLOATS
from ...common.heads import Strides, contiguous_heads
from ...common.kv_cache import E4M3, kept_strides
from ...common.rows import align_of, contiguous
from ..configs import WIDEST, Width
from .arguments import PART, DecodeArgs, DecodeOutputs
from .forms import Forms
from .kernels import Counts, decode_kernel, join_kernel


@dataclass(frozen=True)
class DecodeTile:
    """Compile-time constant of the decode kernels."""

    m: int  # rows: queries of the heads that share a key head
    n: int  # tokens per step
    part: int
    heads: int  # per program of the merge
    qk: Width
    v: Width
    align: int  # divides all widths and strides
    out_align: int
    format: Format | None  # of the cache; None for a plain cache
    keys: str  # dtype that key codes are multiplied in
    values: str
    converts: bool  # the hardware converts codes to fp16
    scaled_by_token: bool
    latent: bool  # values are the first elements of keys
    capped: bool
    whole_pages: bool  # the page size is a multiple of n
    row_format: Format | None = None  # of the codes in FlashMLA's rows, if the cache has them
    direct: bool = False  # there is one part


class _Plan(NamedTuple):
    decode: BoundLaunch
    join: BoundLaunch | None
    parts: int


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


class DecodeConfig(NamedTuple):
    """Tile of `m` queries, of the heads that share a key head, by `n` cached tokens, and its launch options."""

    m: int
    n: int
    num_warps: int
    num_stages: int


@choice("attention_decode", m=(1, 64), n=(16, 256), num_warps=(1, 16), num_stages=(1, 5))
def decode_config(rows: int, qk: int, v: int, kept: str, latent: bool, target: Capabilities) -> DecodeConfig:
    """Return the tile for `rows` queries per key head, rounded up to a power of two. `kept` is the kind of cache:
    "plain", "codes" with few scales, "tokens" with scales per token, or FlashMLA's "rows"; `latent`: values are part
    of keys."""
    if target.is_cpu:
        return DecodeConfig(min(rows, 16), 128, 4, 1)
    stages = 1 if target.backend == "hip" else 2
    if latent:
        # Codes in rows are decoded in registers: that takes twice as many threads, or half as many rows.
        few = kept == "rows" and target.backend == "hip"
        return DecodeConfig(16, 16 if few else 32, 8 if kept == "rows" and not few else 4, stages)
    m = max(16, min(rows, 64))
    if kept != "plain" and (max(qk, v) > 128 or qk % 16 or v % 16) and target.backend == "cuda":
        return DecodeConfig(m, 64, 8, stages)  # decoded in registers, as above
    # Codes are half as many bytes: twice as many tokens keep the same number of bytes in flight.
    return DecodeConfig(m, 128 if kept == "codes" and target.fp8_cast and m == 16 else 64, 4, stages)


@remembered
def _planned(forms: Forms, target: Capabilities) -> _Plan:
    forms.check()
    sequences, queries, heads, dim = forms.query
    count, page, key_heads, _ = forms.k.shape
    group, latent = heads // key_heads, forms.v is None
    coded = forms.format is not None
    by_token = forms.k_scale is not None and len(forms.k_scale.shape) > 1
    rows = queries * group
    kind = "rows" if forms.rows else "tokens" if by_token else "codes" if coded else "plain"
    m, n, warps, stages = decode_config(_power(rows), dim, forms.v_dim, kind, latent, target)
    k_at, v_at = (
        kept_strides(None if cache is None else cache.strides, None if scale is None else scale.strides)
        for cache, scale in ((forms.k, forms.k_scale), (forms.v, forms.v_scale))
    )
    at = Strides(0, *forms.query_strides[:3])
    half = "fp32" if target.is_cpu else "fp16"
    # Weights times token scales may underflow in fp16.
    values = "bf16" if by_token and not target.is_cpu else half
    tile = DecodeTile(
        m=m,
        n=n,
        part=PART,
        heads=4 if forms.v_dim <= WIDEST else 2,
        qk=Width.of(dim),
        v=Width.of(forms.v_dim),
        align=align_of(dim, *([] if latent else [forms.v_dim]), *at, *k_at[:3], *v_at[:3], least=4),
        out_align=align_of(forms.v_dim, least=4),
        format=forms.format,
        keys=values if latent else half,
        values=values,
        converts=target.fp8_cast or target.fp8_dot,
        scaled_by_token=by_token,
        latent=latent,
        capped=forms.capped,
        whole_pages=page % n == 0,
        row_format=E4M3 if forms.rows else None,
    )
    parts = max(1, -(-forms.table[1] * page // PART))
    tile = replace(tile, direct=parts == 1)
    pages = count, page, forms.table[1], forms.table_stride
    room = forms.table[1] * page + queries
    counts = Counts(
        sequences, queries, heads, group, parts, room if forms.left is None else min(forms.left, room)
    )
    decode = Launch.of(decode_kernel, num_warps=warps, num_stages=stages, TILE=tile).bind(
        (parts * -(-rows // m) * key_heads * sequences, 1, 1),
        query=at,
        k=k_at,
        v=v_at,
        pages=pages,
        counts=counts,
    )
    join = None
    if parts > 1:
        programs = -(-heads // tile.heads) * queries * sequences
        launch = Launch.of(join_kernel, num_warps=4, TILE=tile)
        join = launch.bind((programs, 1, 1), pages=pages, counts=counts)
    return _Plan(decode, join, parts)


def launch_attention_decode(o: DecodeOutputs, a: DecodeArgs) -> None:
    query, k, v = contiguous_heads(a.query), a.k, a.v
    plan = _planned(Forms.of(a, query), capabilities_of(query.device))
    y, lse = o.y, o.lse
    if plan.join is not None:
        y = scratch((plan.parts, *o.y.shape), torch.float32, query.device)
        lse = scratch((plan.parts, *o.lse.shape), torch.float32, query.device)
    sinks = contiguous(a.sinks)
    caches = (x if x is None or x.dtype in FLOATS else x.view(torch.uint8) for x in (k, v))
    k_bytes, v_bytes = caches
    pages = a.page_table, a.lengths
    plan.decode(
        *decode_kernel.tensors(
            query=query,
            k=(k_bytes, a.k_scale),
            v=(v_bytes, a.v_scale),
            y_ptr=y,
            lse_ptr=lse,
            sinks_ptr=sinks,
            pages=pages,
            scores=(a.scale, a.softcap),
        )
    )
    if plan.join is not None:
        plan.join(
            *join_kernel.tensors(
                part_ptr=y, part_lse_ptr=lse, y_ptr=o.y, lse_ptr=o.lse, sinks_ptr=sinks, pages=pages
            )
        )
