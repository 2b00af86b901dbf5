"""Attention over caches: the last tokens of sequences, whose keys and values lie in pages.

    token j of sequence s lies in page `page_table[s, j // page_size]`, at place j % page_size
    query t of T sees the keys j <= lengths[s] - T + t, and with a window only the last of these

The numbers are those of `attention`. Scales of the cache enter in fp32: those of keys multiply scores, those of values
multiply the weights of their tokens, or, being the same for all tokens, the result. Codes are multiplied as fp16 or
bf16, in which they are exact; queries are brought near 1 by a power of two first.

A sequence is cut into parts of 512 tokens, each computed by itself, and joined in order:

    largest = max lse_i      y = sum exp(lse_i - largest) y_i / sum exp(lse_i - largest)

so that the bits of a sequence depend neither on the other sequences nor on which pages it has.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from ...quant import Format
from ...runtime import BoundLaunch, Capabilities, Launch, Op, capabilities_of, choice
from ..common.checks import FLOATS, INTEGERS, check_input, check_tensor, real, whole
from ..common.rows import align_of, compute_dtype, contiguous
from ..heads.cache import E4M3, LATENT_ROW, Kept, KVCache, format_of, kept_strides
from ..heads.layout import Place, Strides, with_neighbours
from .attention import Attention
from .configs import WIDEST, Width
from .decode_kernels import Counts, Pages, decode_kernel, join_kernel

PART = 512  # tokens
_LATENT = 576  # numbers of a row of latents in DeepSeek's models
_MOST_TOKENS = 2**30  # of a sequence, so that 32 bits hold the token after the last tile too


class DecodeArgs(NamedTuple):
    query: Tensor  # [sequences, queries, heads, numbers]
    k: Tensor  # [pages, page size, heads, numbers]
    v: Tensor | None  # None: values are the first `v_dim` numbers of keys
    k_scale: Tensor | None
    v_scale: Tensor | None
    page_table: Tensor  # [sequences, pages]
    lengths: Tensor  # [sequences]
    sinks: Tensor | None  # [heads]
    scale: float
    softcap: float  # 0 for none
    left: int | None  # of the window
    v_dim: int


class DecodeOutputs(NamedTuple):
    y: Tensor  # [sequences, queries, heads, v_dim]
    lse: Tensor  # fp32 [sequences, queries, heads]


# ---- reference ------------------------------------------------------------------------------------------


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


# ---- launch ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeTile:
    """What the code of the kernels is made for. It is a constant of them."""

    m: int  # rows: queries of the heads that share one of keys
    n: int  # tokens at a time
    part: int
    heads: int  # at a time when parts are joined
    qk: Width
    v: Width
    align: int  # widths and strides are multiples of it
    out_align: int
    format: Format | None  # of the cache; None for plain numbers
    keys: str  # the dtype that codes of keys are multiplied in
    values: str
    converts: bool  # codes become fp16 in hardware
    scaled_by_token: bool
    latent: bool  # values are the first numbers of keys
    capped: bool
    whole_pages: bool  # pages have a multiple of n tokens
    row_format: Format | None = None  # of the codes in FlashMLA's rows, if the cache has such
    direct: bool = False  # there is one part


class Form(NamedTuple):
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor | None) -> Form | None:
        return None if x is None else Form(x.shape, x.stride(), x.dtype)


class Forms(NamedTuple):
    """What decides the integers of launches."""

    query: tuple[int, ...]  # shape
    query_strides: tuple[int, ...]
    k: Form
    v: Form | None
    k_scale: Form | None
    v_scale: Form | None
    table: tuple[int, ...]
    table_stride: int
    dtype: torch.dtype
    left: int | None
    capped: bool
    v_dim: int

    @staticmethod
    def of(a: DecodeArgs, query: Tensor) -> Forms:
        return Forms(
            query.shape,
            query.stride(),
            Form(a.k.shape, a.k.stride(), a.k.dtype),
            Form.of(a.v),
            Form.of(a.k_scale),
            Form.of(a.v_scale),
            a.page_table.shape,
            a.page_table.stride(0),
            query.dtype,
            a.left,
            a.softcap != 0,
            a.v_dim,
        )

    @property
    def rows(self) -> bool:
        """Whether the cache has FlashMLA's rows."""
        return self.k.dtype is torch.uint8 and self.k_scale is None

    @property
    def format(self) -> Format | None:
        """The format of the cache's codes; None for plain numbers and for rows, which have several."""
        return None if self.rows else format_of(self.k.dtype)

    def check(self) -> None:
        """Raise unless the cache is one that kernels read as it is meant, whoever calls the op."""
        k, v = self.k, self.v
        caches = ((k, self.k_scale), *(() if v is None else ((v, self.v_scale),)))
        numbers = LATENT_ROW if self.rows else self.query[3]
        fits = k.shape[3] == numbers and self.query[2] % k.shape[2] == 0 and self.table[0] == self.query[0]
        fits &= (
            self.v_dim == v.shape[3] if v is not None else self.v_scale is None and self.v_dim <= k.shape[3]
        )
        for cache, scale in caches:
            fits &= cache.dtype == k.dtype and cache.shape[:3] == k.shape[:3]
            if self.rows:
                fits &= v is None and k.shape[2] == 1 and self.dtype is torch.bfloat16
            elif scale is None:
                fits &= cache.dtype == self.dtype
            else:
                pages, size, heads, _ = cache.shape
                shapes = ((pages, size, heads), (pages * size, heads), (heads,), ())
                fits &= self.format is not None and scale.dtype is torch.float32 and scale.shape in shapes
                fits &= self.k_scale is not None and len(scale.shape) == len(self.k_scale.shape)
        if not fits:
            found = ", ".join(
                f"{name} {'None' if form is None else f'{form.dtype} {tuple(form.shape)}'}"
                for name, form in zip(("k", "v", "k_scale", "v_scale"), self[2:6], strict=True)
            )
            raise ValueError(
                f"the cache does not go with a query {self.dtype} {tuple(self.query)}: {found}. Caches are what "
                "weft.KVCache takes: plain in the dtype of query, codes with fp32 scales, or FlashMLA's rows"
            )


class _Plan(NamedTuple):
    decode: BoundLaunch
    join: BoundLaunch | None
    parts: int


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


class DecodeConfig(NamedTuple):
    """A tile has `m` queries, those of the heads that share a key, and `n` tokens of the cache."""

    m: int
    n: int
    num_warps: int
    num_stages: int


@choice("attention_decode", m=(1, 64), n=(16, 256), num_warps=(1, 16), num_stages=(1, 5))
def decode_config(rows: int, qk: int, v: int, kept: str, latent: bool, target: Capabilities) -> DecodeConfig:
    """For `rows` queries of a key, rounded up to a power of two. `kept` is how a cache is: "plain", "codes" with few
    scales, "tokens" with those of each token, or FlashMLA's "rows"; `latent`: values are part of keys."""
    if target.is_cpu:
        return DecodeConfig(min(rows, 16), 128, 4, 1)
    stages = 1 if target.backend == "hip" else 2
    if latent:
        # Rows of codes are decoded in registers, of which twice as many threads have enough, or half as many rows.
        few = kept == "rows" and target.backend == "hip"
        return DecodeConfig(16, 16 if few else 32, 8 if kept == "rows" and not few else 4, stages)
    m = max(16, min(rows, 64))
    if kept != "plain" and (max(qk, v) > 128 or qk % 16 or v % 16) and target.backend == "cuda":
        return DecodeConfig(m, 64, 8, stages)  # decoded in registers, as above
    # Codes are half as many bytes: twice as many tokens keep as much memory busy.
    return DecodeConfig(m, 128 if kept == "codes" and target.fp8_cast and m == 16 else 64, 4, stages)


@functools.lru_cache(maxsize=4096)
def _planned(forms: Forms, target: Capabilities) -> _Plan:
    forms.check()
    sequences, queries, heads, dim = forms.query
    count, page, key_heads, _ = forms.k.shape
    group, latent = heads // key_heads, forms.v is None
    coded = forms.format is not None
    by_token = forms.k_scale is not None and len(forms.k_scale.shape) > 1
    rows = queries * group
    kept = "rows" if forms.rows else "tokens" if by_token else "codes" if coded else "plain"
    m, n, warps, stages = decode_config(_power(rows), dim, forms.v_dim, kept, latent, target)
    k_at, v_at = (
        kept_strides(None if cache is None else cache.strides, None if scale is None else scale.strides)
        for cache, scale in ((forms.k, forms.k_scale), (forms.v, forms.v_scale))
    )
    at = Strides(0, *forms.query_strides[:3])
    half = "fp32" if target.is_cpu else "fp16"
    # Weights times the scales of tokens may be smaller than fp16 can hold.
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
    pages = Pages(None, None, count, page, forms.table[1], forms.table_stride)
    room = forms.table[1] * page + queries
    counts = Counts(
        sequences, queries, heads, group, parts, room if forms.left is None else min(forms.left, room)
    )
    _, integers, _ = decode_kernel.arguments(
        query=Place(None, at),
        k=Kept(None, None, k_at),
        v=Kept(None, None, v_at),
        y_ptr=None,
        lse_ptr=None,
        sinks_ptr=None,
        pages=pages,
        counts=counts,
        scores=None,
    )
    launch = Launch.of(decode_kernel, num_warps=warps, num_stages=stages, TILE=tile)
    bound = launch.bind((parts * -(-rows // m) * key_heads * sequences, 1, 1), integers)
    join = None
    if parts > 1:
        _, integers, _ = join_kernel.arguments(
            part_ptr=None,
            part_lse_ptr=None,
            y_ptr=None,
            lse_ptr=None,
            sinks_ptr=None,
            pages=pages,
            counts=counts,
        )
        programs = -(-heads // tile.heads) * queries * sequences
        join = Launch.of(join_kernel, num_warps=4, TILE=tile).bind((programs, 1, 1), integers)
    return _Plan(bound, join, parts)


class AttentionDecodeOp(Op[DecodeArgs, DecodeOutputs], name="attention_decode", variants=20):
    def allocate(self, a: DecodeArgs) -> DecodeOutputs:
        shape, device = a.query.shape[:3], a.query.device
        y = torch.empty((*shape, a.v_dim), dtype=a.query.dtype, device=device)
        return DecodeOutputs(y, torch.empty(shape, dtype=compute_dtype(a.query), device=device))

    def launch(self, o: DecodeOutputs, a: DecodeArgs) -> None:
        query, k, v = with_neighbours(a.query), a.k, a.v
        plan = _planned(Forms.of(a, query), capabilities_of(query.device))
        y, lse = o.y, o.lse
        if plan.join is not None:
            y = torch.empty((plan.parts, *o.y.shape), dtype=torch.float32, device=query.device)
            lse = torch.empty((plan.parts, *o.lse.shape), dtype=torch.float32, device=query.device)
        sinks = contiguous(a.sinks)
        caches = (x if x is None or x.dtype in FLOATS else x.view(torch.uint8) for x in (k, v))
        k_bytes, v_bytes = caches
        plan.decode(
            (query, k_bytes, a.k_scale, v_bytes, a.v_scale, y, lse, sinks, a.page_table, a.lengths),
            (a.scale, a.softcap),
        )
        if plan.join is not None:
            plan.join((y, lse, o.y, o.lse, sinks, a.page_table, a.lengths))

    def reference(self, a: DecodeArgs) -> DecodeOutputs:
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
            v = (
                k[..., : a.v_dim]
                if a.v is None
                else _gathered(a.v, a.v_scale, a.page_table[s], length, dtype)
            )
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


attention_decode_op = AttentionDecodeOp()


# ---- public functions -----------------------------------------------------------------------------------


@overload
def attention_decode(
    query: Tensor,
    cache: KVCache,
    *,
    page_table: Tensor,
    lengths: Tensor,
    scale: float | None = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def attention_decode(
    query: Tensor,
    cache: KVCache,
    *,
    page_table: Tensor,
    lengths: Tensor,
    scale: float | None = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: bool = ...,
) -> Tensor | Attention: ...


def attention_decode(
    query: Tensor,
    cache: KVCache,
    *,
    page_table: Tensor,
    lengths: Tensor,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | Attention:
    """Attention of the last tokens of sequences over a paged cache, as `qkv_prepare(cache=...)` fills it.

    query: [sequences, heads, dim], one token of each, or [sequences, queries, heads, dim], its last tokens
    (speculation, a chunk of a prompt), of which each sees the cache up to itself.

    - `cache`: plain in the dtype of query, or FP8 or int8 with scales. Pages are [pages, page_size, heads, dim]; a
      cache [slots, heads, dim] has pages of one token.
    - `page_table` [sequences, pages], int32: the pages of each sequence, in order. Those past its length or before its
      window may hold anything. A sequence gives NaN if a query sees a key in a page that the cache does not have.
    - `lengths` [sequences], int32 or int64: tokens of each sequence, those of query among them. A sequence of length 0
      or less gives zeros, and one whose length exceeds the room of its pages NaN.
    - `window`: how many keys before its own a query sees. `scale`, `softcap`, `sinks`: as in `attention`.
    - `return_lse`: an `Attention(out, lse, None)` with lse fp32 [sequences, heads], or [sequences, heads, queries].

    Lengths and pages stay on the device: one CUDA graph serves all of them. The bits of a sequence do not depend on the
    sequences beside it, nor on where its pages lie. Not differentiable.

    >>> import torch, weft
    >>> cache = weft.KVCache(torch.randn(8, 16, 2, 64), torch.randn(8, 16, 2, 64))  # 8 pages of 16 tokens
    >>> table, lengths = torch.tensor([[3, 1], [7, 0]], dtype=torch.int32), torch.tensor([20, 5])
    >>> weft.attention_decode(torch.randn(2, 4, 64), cache, page_table=table, lengths=lengths).shape
    torch.Size([2, 4, 64])
    """
    v = cache.v if isinstance(cache, KVCache) else None
    if isinstance(cache, KVCache) and v is None:
        raise ValueError("the cache has no v: mla_decode is for caches of latents")
    v_dim = 0 if v is None else v.shape[-1]
    return _decode(query, cache, page_table, lengths, scale, window, softcap, sinks, return_lse, v_dim)


def mla_decode(
    query: Tensor,
    cache: KVCache,
    *,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    return_lse: bool = False,
) -> Tensor | Attention:
    """`attention_decode` over latents (DeepSeek): one row of 576 numbers serves all heads, as key, and its first 512 as
    value.

    query: [sequences, heads, 576] or [sequences, queries, heads, 576], the absorbed queries: q_nope W_uk (512 numbers)
    and q_rope (64) side by side. The cache has k alone, [pages, page_size, 1, 576], or FlashMLA's rows of bytes in
    uint8 [pages, page_size, 1, 656] (512 codes e4m3, four fp32 scales, 64 numbers in bf16), for queries in bf16.
    `scale` has no default: it is that of the heads before absorption, 192 ** -0.5 times YaRN's factor, not 576 ** -0.5.

    >>> import torch, weft
    >>> cache = weft.KVCache(torch.randn(4, 64, 1, 576))
    >>> table, lengths = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32), torch.tensor([100, 5])
    >>> weft.mla_decode(torch.randn(2, 16, 576), cache, page_table=table, lengths=lengths, scale=192**-0.5).shape
    torch.Size([2, 16, 512])
    """
    if isinstance(cache, KVCache):
        if cache.v is not None:
            raise ValueError("the cache has a v: attention_decode is for caches of keys and values")
        if cache.k.shape[-2:] != (1, _LATENT) and not cache.has_latent_rows:
            raise ValueError(
                f"a cache of latents is [pages, page_size, 1, {_LATENT}], or FlashMLA's rows in uint8 "
                f"[pages, page_size, 1, {LATENT_ROW}]; got {cache.k.dtype} {tuple(cache.k.shape)}"
            )
    return _decode(query, cache, page_table, lengths, scale, None, None, None, return_lse, 512)


def _decode(
    query: Tensor, cache: KVCache, page_table: Tensor, lengths: Tensor, scale: float | None, window: int | None,
    softcap: float | None, sinks: Tensor | None, return_lse: bool, v_dim: int,
) -> Tensor | Attention:  # fmt: skip
    check_input("query", query)
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache must be a weft.KVCache; got {type(cache).__name__}")
    k, v = cache.paged()
    if query.dim() not in (3, 4):
        raise ValueError(
            f"query must be [sequences, heads, dim] or [sequences, queries, heads, dim]; got {tuple(query.shape)}"
        )
    q = query if query.dim() == 4 else query[:, None]
    sequences, queries, heads, dim = q.shape
    numbers = _LATENT if cache.has_latent_rows else k.shape[-1]
    if k.device != query.device or numbers != dim or heads % k.shape[2]:
        raise ValueError(
            f"query {tuple(query.shape)} on {query.device} does not fit a cache of {k.shape[2]} heads of {numbers} "
            f"numbers on {k.device}: dims are equal, and heads a multiple"
        )
    widest = _LATENT if v is None else WIDEST
    if max(dim, v_dim) > widest:
        raise ValueError(f"heads must have at most {widest} numbers; got {max(dim, v_dim)}")
    wanted = torch.bfloat16 if cache.has_latent_rows else k.dtype
    if cache.scaled == "none" and wanted != query.dtype:
        raise ValueError(f"query must be {wanted} for this cache, which has no scales; it is {query.dtype}")
    check_tensor("page_table", page_table, (torch.int32,), query.device)
    if page_table.dim() != 2 or page_table.shape[0] != sequences or page_table.stride(1) != 1:
        raise ValueError(
            f"page_table must be [{sequences}, pages] with neighbouring entries; got {tuple(page_table.shape)} with "
            f"strides {page_table.stride()}"
        )
    if page_table.shape[1] * k.shape[1] + queries > _MOST_TOKENS:
        raise ValueError(
            f"tokens of a sequence are numbered in 32 bits: with its queries, its pages may have room for "
            f"{_MOST_TOKENS}; {page_table.shape[1]} pages of {k.shape[1]} have more"
        )
    check_tensor("lengths", lengths, INTEGERS, query.device, (sequences,))
    if sinks is not None:
        check_tensor("sinks", sinks, FLOATS, query.device, (heads,))
    factor = dim**-0.5 if scale is None else real("scale", scale)
    if not 0.0 < factor < math.inf:
        raise ValueError(f"scale must be above 0 and finite; got {factor}. Negate query for a negative one")
    cap = 0.0 if softcap is None else real("softcap", softcap)
    if softcap is not None and not 0.0 < cap < math.inf:
        raise ValueError(f"softcap must be above 0 and finite, or None; got {cap}")
    left = None if window is None else whole("window", window, 0)
    found = attention_decode_op(
        DecodeArgs(
            q, k, v, cache.k_scale, cache.v_scale, page_table, lengths.contiguous(), sinks, factor, cap, left, v_dim
        )
    )  # fmt: skip
    y, lse = found
    if query.dim() == 3:
        y, lse = y[:, 0], lse[:, 0]
    elif return_lse:
        lse = lse.transpose(1, 2)
    return Attention(y, lse, None) if return_lse else y
