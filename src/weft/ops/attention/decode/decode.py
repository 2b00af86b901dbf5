"""Attention over caches: queries are the last tokens of sequences whose keys and values are stored in pages.

    token j of sequence s lies in page `page_table[s, j // page_size]`, slot j % page_size
    query t of T sees the keys j <= lengths[s] - T + t, and with a window only the last of these

The formulas are those of `attention`. Scales of the cache are applied in fp32: key scales multiply scores; value scales
multiply the weights of their tokens or, if all tokens share a scale, the result. Codes are multiplied as fp16 or bf16,
which hold them exactly; queries are first scaled close to 1 by a power of two.

A sequence is split into parts of 512 tokens. Parts are computed independently and merged in order:

    m = max lse_i      y = sum exp(lse_i - m) y_i / sum exp(lse_i - m)

so the bits of a sequence depend neither on other sequences nor on which pages it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Literal, overload

import torch
from torch import Tensor

from ....runtime import Op
from ...common.checks import FLOATS, INTEGERS, check_input, check_tensor, is_tensor, real, whole
from ...common.into import results_in, run_into
from ...common.kv_cache import LATENT_ROW, KVCache
from ...common.rows import compute_dtype
from ..attention import Attention
from ..configs import WIDEST
from .arguments import DecodeArgs, DecodeOutputs
from .reference import attention_decode_reference

_LATENT = 576  # elements of a latent row in DeepSeek's models


_MOST_TOKENS = 2**30  # per sequence, so that token indices past the last tile still fit in 32 bits


class AttentionDecodeOp(Op[DecodeArgs, DecodeOutputs], name="attention_decode", variants=20):
    def allocate(self, a: DecodeArgs) -> DecodeOutputs:
        shape, device = a.query.shape[:3], a.query.device
        y = torch.empty((*shape, a.v_dim), dtype=a.query.dtype, device=device)
        return DecodeOutputs(y, torch.empty(shape, dtype=compute_dtype(a.query), device=device))

    @cached_property
    def launch(self) -> Callable[[DecodeOutputs, DecodeArgs], None]:
        from .launch import launch_attention_decode

        return launch_attention_decode

    def reference(self, a: DecodeArgs) -> DecodeOutputs:
        return attention_decode_reference(a)


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
    out: Tensor | Attention | None = ...,
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
    out: Tensor | Attention | None = ...,
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
    out: Tensor | Attention | None = None,
) -> Tensor | Attention:
    """Attend from the last tokens of sequences to a paged cache, as `qkv_prepare(cache=...)` fills it.

    Also known as paged attention, flash decoding.

    query: [sequences, heads, dim], one token of each sequence, or [sequences, queries, heads, dim], its last tokens
    (speculative decoding, a chunk of a prompt), each of which sees the cache up to itself.

    - `cache`: plain in the dtype of query, or FP8 or int8 with scales. Pages are [pages, page_size, heads, dim]; a
      cache [slots, heads, dim] has pages of one token.
    - `page_table` [sequences, pages], int32: the pages of each sequence, in order. Entries past its length or before
      its window may hold anything. A sequence gives NaN if a query sees a key in a page that the cache does not have.
    - `lengths` [sequences], int32 or int64: tokens of each sequence, including those of query. A sequence of length 0
      or less gives zeros; one whose length exceeds the capacity of its pages gives NaN.
    - `window`: how many keys before its own a query sees. `scale`, `softcap`, `sinks`: as in `attention`.
    - `return_lse`: return `Attention(out, lse, None)`; lse is fp32 [sequences, heads] or [sequences, heads, queries].
    - `out`: write the result to this contiguous tensor; not with autograd. With `return_lse`, an `Attention` whose lse
      has the strides of a returned one, or is None for a new one.

    Lengths and pages stay on the device, so one CUDA graph serves all of them. The bits of a sequence depend neither on
    other sequences nor on where its pages lie. Not differentiable.

    >>> import torch, weft
    >>> cache = weft.KVCache(torch.randn(8, 16, 2, 64), torch.randn(8, 16, 2, 64))  # 8 pages of 16 tokens
    >>> table, lengths = torch.tensor([[3, 1], [7, 0]], dtype=torch.int32), torch.tensor([20, 5])
    >>> weft.attention_decode(torch.randn(2, 4, 64), cache, page_table=table, lengths=lengths).shape
    torch.Size([2, 4, 64])
    """
    v = cache.v if isinstance(cache, KVCache) else None
    if isinstance(cache, KVCache) and v is None:
        raise ValueError("the cache has no v. For a cache of latents, call mla_decode")
    v_dim = 0 if v is None else v.shape[-1]
    return _decode(query, cache, page_table, lengths, scale, window, softcap, sinks, return_lse, v_dim, out)


def mla_decode(
    query: Tensor,
    cache: KVCache,
    *,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    return_lse: bool = False,
    out: Tensor | Attention | None = None,
) -> Tensor | Attention:
    """Attend to a cache of latents (DeepSeek): all heads share one row of 576 elements as key, and its first 512 as
    value.

    - `query`: [sequences, heads, 576] or [sequences, queries, heads, 576], the absorbed queries: q_nope W_uk (512
      elements) and q_rope (64), concatenated.
    - `cache`: a `weft.KVCache` that has only k, [pages, page_size, 1, 576], or FlashMLA's rows of bytes in uint8
      [pages, page_size, 1, 656] (512 e4m3 codes, four fp32 scales, 64 bf16 elements), for queries in bf16.
    - `page_table`, `lengths`: as in `attention_decode`.
    - `scale` has no default: it is the scale of the heads before absorption, 192 ** -0.5 times YaRN's factor, not
      576 ** -0.5.
    - `return_lse`: also return the lse of each query and head, as `attention_decode` does.
    - `out`: as in `attention_decode`.

    >>> import torch, weft
    >>> cache = weft.KVCache(torch.randn(4, 64, 1, 576))
    >>> table, lengths = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32), torch.tensor([100, 5])
    >>> weft.mla_decode(torch.randn(2, 16, 576), cache, page_table=table, lengths=lengths, scale=192**-0.5).shape
    torch.Size([2, 16, 512])
    """
    if isinstance(cache, KVCache):
        if cache.v is not None:
            raise ValueError("the cache has a v. For a cache of keys and values, call attention_decode")
        if cache.k.shape[-2:] != (1, _LATENT) and not cache.has_latent_rows:
            raise ValueError(
                f"a cache of latents is [pages, page_size, 1, {_LATENT}], or FlashMLA's rows in uint8 "
                f"[pages, page_size, 1, {LATENT_ROW}]; got {cache.k.dtype} {tuple(cache.k.shape)}"
            )
    return _decode(query, cache, page_table, lengths, scale, None, None, None, return_lse, 512, out)


def _decode(
    query: Tensor, cache: KVCache, page_table: Tensor, lengths: Tensor, scale: float | None, window: int | None,
    softcap: float | None, sinks: Tensor | None, return_lse: bool, v_dim: int, out: Tensor | Attention | None,
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
    cache_dim = _LATENT if cache.has_latent_rows else k.shape[-1]
    if k.device != query.device or cache_dim != dim or heads % k.shape[2]:
        raise ValueError(
            f"query {tuple(query.shape)} on {query.device} does not fit a cache of {k.shape[2]} heads of {cache_dim} "
            f"elements on {k.device}: head dims must be equal, and query heads a multiple of cache heads"
        )
    max_dim = _LATENT if v is None else WIDEST
    if max(dim, v_dim) > max_dim:
        raise ValueError(f"heads must have at most {max_dim} elements; got {max(dim, v_dim)}")
    required = torch.bfloat16 if cache.has_latent_rows else k.dtype
    if cache.scaled == "none" and required != query.dtype:
        raise ValueError(f"query must be {required} for this cache, which has no scales; got {query.dtype}")
    check_tensor("page_table", page_table, (torch.int32,), query.device)
    if page_table.dim() != 2 or page_table.shape[0] != sequences or page_table.stride(1) != 1:
        raise ValueError(
            f"page_table must be [{sequences}, pages] with contiguous rows; got {tuple(page_table.shape)} with "
            f"strides {page_table.stride()}"
        )
    if page_table.shape[1] * k.shape[1] + queries > _MOST_TOKENS:
        raise ValueError(
            f"tokens of a sequence are numbered in 32 bits: its pages and queries may hold at most {_MOST_TOKENS} "
            f"tokens; {page_table.shape[1]} pages of {k.shape[1]} hold more. Pass a narrower page_table"
        )
    check_tensor("lengths", lengths, INTEGERS, query.device, (sequences,))
    if sinks is not None:
        check_tensor("sinks", sinks, FLOATS, query.device, (heads,))
    factor = dim**-0.5 if scale is None else real("scale", scale)
    if not 0.0 < factor < math.inf:
        raise ValueError(
            f"scale must be above 0 and finite; got {factor}. For a negative scale, negate query"
        )
    cap = 0.0 if softcap is None else real("softcap", softcap)
    if softcap is not None and not 0.0 < cap < math.inf:
        raise ValueError(f"softcap must be above 0 and finite, or None; got {cap}")
    left = None if window is None else whole("window", window, 0)
    args = DecodeArgs(
        q, k, v, cache.k_scale, cache.v_scale, page_table, lengths.contiguous(), sinks, factor, cap, left, v_dim
    )  # fmt: skip
    if out is not None:
        return _decode_into(args, out, query.dim() == 3, return_lse)
    y, lse = attention_decode_op(args)
    if query.dim() == 3:
        y, lse = y[:, 0], lse[:, 0]
    elif return_lse:
        lse = lse.transpose(1, 2)
    return Attention(y, lse, None) if return_lse else y


def _decode_into(
    a: DecodeArgs, out: Tensor | Attention, single: bool, return_lse: bool
) -> Tensor | Attention:
    """Decode into the caller's tensors; `single`: they have no dimension of queries."""
    y, lse, largest = results_in(out, *Attention._fields)
    if largest is not None or (lse is not None and not return_lse):
        raise ValueError("out has a result that this call does not return: pass None for it")
    dims = 3 if single else 4
    for name, t, wanted in (("out", y, dims), ("lse of out", lse, dims - 1)):
        if t is not None and (not is_tensor(t) or t.dim() != wanted):
            raise ValueError(
                f"{name} must be a tensor of {wanted} dimensions, like the result; got {t!r:.80}"
            )
    targets = {
        "y": y if y is None or not single else y[:, None],
        "lse": lse if lse is None else lse[:, None] if single else lse.transpose(1, 2),
    }
    names = {"y": "out", "lse": "lse of out"}
    dropped = () if return_lse else ("lse",)
    made = run_into(attention_decode_op, a, targets, names=names, dropped=dropped)
    if y is None:
        y = made.y[:, 0] if single else made.y
    if not return_lse:
        return y
    if lse is None:
        lse = made.lse[:, 0] if single else made.lse.transpose(1, 2)
    return Attention(y, lse, None)
