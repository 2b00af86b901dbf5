"""Attention: softmax of scores times values, without storing the score matrix.

    s_ij = scale * (q_i . k_j)                               fp32 sums of exact products
    s_ij = softcap * tanh(s_ij / softcap)                    if there is a softcap
    s_ij = s_ij + bias_ij                                    also -slope * (distance from i's own key to j): ALiBi
    s_ij = -inf                                              where query i does not see key j
    lse_i = log(exp(sink) + sum_j exp(s_ij))                 the head's sink counts here and has no value
    p_ij = exp(s_ij - lse_i)                                 rounded to the dtype of v for the product, not for lse
    y_i = round(sum_j p_ij v_j)                              0 for a query that sees nothing, whose lse is -inf

    delta_i = sum(dy_i * y_i) - dlse_i                       fp32, from the rounded y
    ds_ij = p_ij * (dy_i . v_j - delta_i)                    times the slope of the softcap; rounded for the products
    dq_i = round(scale * sum_j ds_ij k_j)      dk_j = round(scale * sum_i ds_ij q_i)      dv_j = round(sum_i p_ij dy_i)
    dsink = -sum_i exp(sink - lse_i) * delta_i
    dbias_ij = ds_ij without the slope, before it is rounded; summed in order over the dimensions that bias broadcasts;
    dslope = -sum_ij ds_ij * distance_ij                     as dbias

One program sums over all query heads that share a key head, in order, so the bits are the same in every run. Backward
recomputes p, once for the gradient of queries and once for the gradients of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from ...quant import PLAIN, Format, QTensor
from ...runtime import Backward, Gradients, Op, Present, autocasted, capabilities_of
from ..common.checks import FLOATS, INTEGERS, check_input, check_tensor, checked_once, real, unexpected, whole
from ..common.heads import LAYOUTS, Layout
from ..common.into import result_into, results_in
from ..common.quantized import register_codes, rowwise_codes
from ..common.results import Result, allocate_result, plain_result, result_options
from ..common.rows import compute_dtype
from .arguments import (
    AttentionArgs,
    AttentionBackwardArgs,
    AttentionGradients,
    AttentionOutputs,
    EightBits,
    Mask,
    Packed,
    ValueElement,
    element_of,
    unsupported_scores,
    unsupported_values,
)
from .configs import WIDEST
from .eight_bits import common_element, in_eight_bits
from .engines import Engine, check_engine
from .pair_arguments import PairMask, bias_of, check_terms, seen_pairs, slopes_of
from .reference import attention_backward_reference, attention_reference, result_shape

# ---- registration ---------------------------------------------------------------------------------------


class _Saved(NamedTuple):
    args: AttentionArgs
    y: Tensor
    lse: Tensor


class AttentionBackwardOp(
    Op[AttentionBackwardArgs, AttentionGradients], name="attention_backward", variants=20
):
    def validate(self, a: AttentionBackwardArgs) -> None:
        _check_limits(a)
        check_terms(a)

    def allocate(self, a: AttentionBackwardArgs) -> AttentionGradients:
        def like(x: Tensor | None, needed: bool) -> Tensor | None:
            return (
                torch.empty_like(x, memory_format=torch.contiguous_format)
                if needed and x is not None
                else None
            )

        return AttentionGradients(*map(like, (a.query, a.key, a.value, a.sinks, a.bias, a.alibi), a.needs))

    @cached_property
    def launch(self) -> Callable[[AttentionGradients, AttentionBackwardArgs], None]:
        from .launch import launch_attention_backward

        return launch_attention_backward

    def reference(self, a: AttentionBackwardArgs) -> AttentionGradients:
        return attention_backward_reference(a)


attention_backward_op = AttentionBackwardOp()


class AttentionOp(
    Op[AttentionArgs, AttentionOutputs], name="attention", variants=20, differentiable=("result_y", "lse")
):
    def allocate(self, a: AttentionArgs) -> AttentionOutputs:
        shape = result_shape(a)
        if a.result.format is None and a.layout == "bhsd":
            batches, tokens, count, dim = shape
            y = torch.empty_strided(
                (batches, count, tokens, dim),
                (tokens * count * dim, dim, count * dim, 1),
                dtype=a.result.dtype,
                device=a.query.device,
            )
            result = Result(y)
        else:
            result = allocate_result(a.result, a.query, shape)
        batch, sequence, heads, _ = LAYOUTS[a.layout]
        count = a.query.shape[heads]
        lead = () if a.layout == "thd" else (a.query.shape[batch],)
        shape = (*lead, count, a.query.shape[sequence])
        dtype, device = compute_dtype(a.value), a.query.device
        lse = torch.empty(shape, dtype=dtype, device=device)
        max_score = torch.empty((count,), dtype=dtype, device=device) if a.return_max else None
        return AttentionOutputs(result, lse, max_score)

    def present(self, a: AttentionArgs) -> Present:
        return a.result.present(), True, a.return_max

    def validate(self, a: AttentionArgs) -> None:
        _check_limits(a)
        _check_target(a)
        check_terms(a)
        if a.values is not None and (a.packed.limited or a.seen is not None):
            raise ValueError(
                "values in eight bits have scales for the keys that a sequence's queries see, which mask=, kv_limits= "
                "and prefix_lengths= change: leave values=None"
            )

    @cached_property
    def launch(self) -> Callable[[AttentionOutputs, AttentionArgs], None]:
        from .launch import launch_attention

        return launch_attention

    def reference(self, a: AttentionArgs) -> AttentionOutputs:
        return attention_reference(a)

    def keep(self, a: AttentionArgs, o: AttentionOutputs) -> _Saved:
        if a.query_codes.format is not None or a.key_codes.format is not None:
            raise ValueError("scores in eight bits are for inference: call attention under torch.no_grad()")
        return _Saved(a._replace(result=plain_result(a.result.dtype)), o.result.y, o.lse)

    def backward(self, b: Backward) -> Gradients:
        saved: _Saved = b.kept
        a = saved.args
        y, dy, dlse = saved.y, b.grads.result.y, b.grads.lse
        if dy is None:
            dy = y.new_zeros(y.shape[-1]).expand(y.shape)
        v_dim = a.value.shape[-1]
        if y.dim() < a.query.dim():  # a quantized result stores all heads of a token in one row
            y, dy = (x.unflatten(-1, (-1, v_dim)) for x in (y, dy))
        elif a.layout == "bhsd":
            y, dy = y.transpose(1, 2), dy.transpose(1, 2)
        needs_kv = b.needs.key or b.needs.value
        needs = AttentionGradients(
            b.needs.query, needs_kv, needs_kv, *(b.needs.sinks, b.needs.bias, b.needs.alibi)
        )
        grads = attention_backward_op(
            AttentionBackwardArgs(
                dy, dlse, y, saved.lse, a.query, a.key, a.value, a.sinks, a.packed, a.mask, a.scale, a.softcap,
                a.layout, a.engine, needs, a.seen, a.bias, a.alibi,
            )
        )  # fmt: skip
        return {
            "query": grads.query,
            "key": grads.key if b.needs.key else None,
            "value": grads.value if b.needs.value else None,
            "sinks": grads.sinks,
            "bias": grads.bias,
            "alibi": grads.alibi,
        }


attention_op = AttentionOp()


register_codes(attention_op, query=rowwise_codes, key=rowwise_codes)


# ---- public function ------------------------------------------------------------------------------------

Align = Literal["lower_right", "upper_left"]
Window = tuple[int | None, int | None]


class Attention(NamedTuple):
    """Result of `attention` with lse and the largest score."""

    out: Tensor
    lse: Tensor  # fp32 [batch, heads, queries]; [heads, tokens] for packed sequences
    max: Tensor | None  # fp32 [heads], or None


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = ...,
    scale: float | None = ...,
    window: Window | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    kv_lengths: Tensor | None = ...,
    prefix_lengths: Tensor | None = ...,
    kv_limits: Tensor | None = ...,
    mask: PairMask | None = ...,
    bias: Tensor | None = ...,
    alibi: Tensor | None = ...,
    causal_align: Align | None = ...,
    layout: Layout = ...,
    return_lse: Literal[False] = ...,
    return_max: Literal[False] = ...,
    quantize: Format | str | None = ...,
    columnwise: bool = ...,
    scores: EightBits | None = ...,
    values: ValueElement | None = ...,
    engine: Engine = ...,
    out: Tensor | Attention | None = ...,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = ...,
    scale: float | None = ...,
    window: Window | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    kv_lengths: Tensor | None = ...,
    prefix_lengths: Tensor | None = ...,
    kv_limits: Tensor | None = ...,
    mask: PairMask | None = ...,
    bias: Tensor | None = ...,
    alibi: Tensor | None = ...,
    causal_align: Align | None = ...,
    layout: Layout = ...,
    return_lse: bool = ...,
    return_max: bool = ...,
    quantize: Format | str | None = ...,
    columnwise: bool = ...,
    scores: EightBits | None = ...,
    values: ValueElement | None = ...,
    engine: Engine = ...,
    out: Tensor | Attention | None = ...,
) -> Tensor | Attention: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    kv_limits: Tensor | None = None,
    mask: PairMask | None = None,
    bias: Tensor | None = None,
    alibi: Tensor | None = None,
    causal_align: Align | None = None,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    return_max: bool = False,
    quantize: Format | str | None = None,
    columnwise: bool = False,
    scores: EightBits | None = None,
    values: ValueElement | None = None,
    engine: Engine = "auto",
    out: Tensor | Attention | None = None,
    **unsupported: Any,
) -> Tensor | Attention:
    """Compute `softmax(scale * query @ key^T) @ value` in one kernel, with a backward.

    Also known as flash attention, FlashAttention, SDPA.

    query: [batch, heads, queries, dim] as in `F.scaled_dot_product_attention`, or in `layout`; key: [batch, key heads,
    keys, dim]; value: [batch, key heads, keys, v_dim]; bf16, fp16 or fp32, any strides, dims up to 256. The number of
    heads is a multiple of the number of key heads; neighboring heads share a key head.

    - `is_causal`: a query sees the keys up to its own.
    - `window`: (left, right); a query sees `left` keys before its own and `right` after it, None for all. Hugging
      Face's `sliding_window=w` is `window=(w - 1, 0)`.
    - `causal_align` is required if the numbers of keys and queries may differ under a mask. It says which key is a
      query's own: "lower_right" aligns the last query with the last key (FlashAttention, decoding); "upper_left" aligns
      the first query with the first key (`F.scaled_dot_product_attention`).
    - `scale`: dim ** -0.5 by default. `softcap`: scores become `softcap * tanh(score / softcap)` (Gemma 2).
    - `sinks` [heads]: a score without a value that every query of the head sees (gpt-oss). A sink of +inf takes all the
      weight, one of -inf none, and NaN makes the head NaN.
    - `cu_seqlens`, `cu_seqlens_k` [sequences + 1], int32 or int64 on the device: bounds of packed sequences in query
      [tokens, heads, dim] and in key and value; `cu_seqlens_k` defaults to `cu_seqlens`. Sequences may be empty. Tokens
      before the first sequence and after the last get zeros.
    - `kv_lengths` [batch]: how many of its keys each sequence uses; below 0 it uses none. A sequence gives NaN if its
      length exceeds its keys, or if its starts descend or leave the tokens; no value of these reads other memory.
    - `prefix_lengths` [batch]: how many first keys of each sequence are a prefix. Under `is_causal` or `window`, a
      query whose own key is among them also sees all of them (PaliGemma, prefix LM).
    - `kv_limits` [batch, queries], packed [tokens]: how many of the sequence's first keys each query may see, less by
      the other masks; below 1 none. Both take int32 or int64 on the device, and numbers above the keys mean all.
    - `mask`: bool, broadcastable to [batch, heads, queries, keys], any strides, True where a query sees a key (the
      `attn_mask` of `F.scaled_dot_product_attention`); or a `BlockMask` of FlexAttention. Blocks of pairs that it hides
      are skipped. Keys that no query sees may hold anything.
    - `bias`: broadcastable in the same way, fp32, bf16 or fp16; added to the scores after the softcap. It has a
      gradient.
    - `alibi` [heads] or [heads, 2]: slopes; a score loses slope * distance between the query's own key and the key.
      [heads, 2] has one slope for keys before the own key and one for keys after it.
    - `layout`: bhsd, bshd, sbhd; packed sequences are thd.
    - `return_lse`: also return log(sum(exp(scores))), fp32 [batch, heads, queries], packed [heads, tokens]. Gradients
      flow through it. `return_max`: also return the largest score of each head, fp32 [heads]. With either, the result
      is an `Attention(out, lse, max)`.
    - `scores`: "int8" or "e4m3" quantizes query and key with one scale per token and head and multiplies them in eight
      bits, for inference; "mxfp8" is e4m3 with one scale per 32 elements of a head. Without sinks, softcap, `mask`,
      `prefix_lengths` and `kv_limits`, keys are smoothed first: subtracting the mean of the keys that the sequence's
      queries see shifts all scores of a query alike. `return_max` refers to the smoothed scores. Query and key that are
      `QTensor`s in "int8:row" or "e4m3:row", as `qkv_prepare(quantize=)` makes them, or in "e4m3:mx" are multiplied as
      they are unless a gradient is needed. Other `QTensor`s are dequantized.
    - `values`: "e4m3" or "int8", with `scores`: also multiply weights and values in that element. Values get one scale
      per sequence, head and element of the head in e4m3, and per 64 keys, head and element in int8, over the keys that
      the sequence's queries see.
    - `quantize`, `columnwise`: out is a `QTensor` [batch, queries, heads * v_dim], ready for the output projection,
      with the bytes of `quantize(attention(...))`.
    - `engine`: which kernels run. "auto" is Weft's kernel, or the library that `weft doctor` names if it is installed
      and supports the whole call; "weft", "torch" (the kernels of `F.scaled_dot_product_attention`), "fa2", "fa3",
      "fa4" (FlashAttention) and "aiter" require that engine. Backward uses the same one if it supports that call, too,
      else Weft's kernels. `weft.record_engines()` reports what ran.
    - `out`: write the result here instead of to a new tensor; not with autograd. A plain one may be a slice of a longer
      sequence, or any other view whose last dimension is contiguous. With `return_lse` or `return_max`, an `Attention`
      of contiguous tensors for lse and max, or None for a new one.

    Gradients flow to query, key, value, sinks, bias and alibi. The result stores the heads of a token side by side,
    also for bhsd, where `out.transpose(1, 2).flatten(2)` is a view.

    >>> import torch, weft
    >>> q, k = torch.randn(2, 8, 100, 64), torch.randn(2, 2, 100, 64)
    >>> weft.attention(q, k, k, is_causal=True).shape
    torch.Size([2, 8, 100, 64])
    """
    if unsupported:
        raise _unexpected(unsupported)
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_input(name, x)
    query, key, value = autocasted(query), autocasted(key), autocasted(value)
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype or x.device != query.device:
            raise ValueError(
                "query, key and value must have one dtype and one device; query is "
                f"{query.dtype} on {query.device} and {name} {x.dtype} on {x.device}"
            )
    heads_layout, packed = _sequences(query, key, value, layout, cu_seqlens, cu_seqlens_k, kv_lengths)
    heads = _check_shapes(query, key, value, heads_layout)
    lengths_agree = _lengths_agree(query, key, heads_layout, packed)
    band = _mask(bool(is_causal), _pair(window), causal_align, lengths_agree)
    if alibi is not None and causal_align is None and not lengths_agree:
        raise ValueError(
            "alibi counts from a query's own key and needs causal_align= if the numbers of keys and queries may "
            "differ: 'lower_right' aligns the last query with the last key, 'upper_left' the first with the first"
        )
    packed = packed._replace(prefix_lengths=prefix_lengths, kv_limits=kv_limits)
    if sinks is not None:
        check_tensor("sinks", sinks, FLOATS, query.device, (heads,))
    factor = query.shape[-1] ** -0.5 if scale is None else real("scale", scale)
    if not 0.0 < factor < float("inf"):
        raise ValueError(
            f"scale must be above 0 and finite; got {factor}. For a negative scale, negate query"
        )
    cap = 0.0 if softcap is None else real("softcap", softcap)
    if softcap is not None and not 0.0 < cap < float("inf"):
        raise ValueError(f"softcap must be above 0 and finite, or None; got {cap}")
    options = result_options(query, quantize, columnwise=columnwise)
    wants_gradients = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (query, key, value, sinks, bias, alibi)
    )
    if options.format is not None and wants_gradients:
        options = options._replace(return_plain=True)  # backward needs it
    if wants_gradients and scores is not None:
        raise ValueError("scores in eight bits are for inference: call attention under torch.no_grad()")
    element = None if wants_gradients else common_element(query, key)
    if scores is None:
        scores = element
    if element is None or scores != element:
        query, key = _plain(query), _plain(key)
    value, sinks = _plain(value), None if sinks is None else _plain(sinks)
    args = AttentionArgs(
        query=query,
        key=key,
        value=value,
        query_codes=PLAIN,
        key_codes=PLAIN,
        values=values,
        sinks=sinks,
        packed=packed,
        mask=band,
        scale=factor,
        softcap=cap,
        layout=heads_layout,
        return_max=bool(return_max),
        engine=engine,
        result=options,
        seen=None if mask is None else seen_pairs(mask, query, key, heads_layout),
        bias=None if bias is None else bias_of(_plain(bias), query),
        alibi=None if alibi is None else slopes_of(alibi, query),
    )
    if values is not None:
        _check_values(args, scores)
    shift = None
    if scores is not None:
        args, shift = in_eight_bits(args, scores, attention_op)
    check_engine(args)
    if out is None:
        outputs = attention_op(args)
        y = outputs.result.value(options)
    else:
        into, lse, largest = results_in(out, *Attention._fields)
        dropped = () if return_lse or return_max else ("lse",)
        outputs = result_into(attention_op, args, into, strided=True, dropped=dropped, lse=lse, max=largest)
        y = outputs.result.value(options) if into is None else into
    if not (return_lse or return_max):
        return y
    lse = outputs.lse
    if shift is not None and return_lse:
        lse = lse + shift() if out is None else lse.add_(shift())
    return Attention(y, lse, outputs.max)


def _unexpected(keywords: dict[str, Any]) -> TypeError:
    """Return the error for keywords that attention does not take."""
    if "dropout_p" in keywords:
        return TypeError(
            "attention() has no dropout. Leave dropout_p out, or call F.scaled_dot_product_attention with it"
        )
    if "attn_mask" in keywords:
        return TypeError(
            "attention() takes a bool attn_mask as mask= and one that is added to scores as bias="
        )
    return unexpected(attention, keywords)


def _check_values(a: AttentionArgs, scores: str | None) -> None:
    _check_target(a)
    if scores is None:
        raise ValueError(
            "values in eight bits go with scores in eight bits: pass scores='int8', 'e4m3' or 'mxfp8'"
        )


def _check_target(a: AttentionArgs) -> None:
    """Check that the target multiplies the elements of scores and values."""
    scores, problem = element_of(a.query_codes.format), None
    if scores is not None:
        problem = unsupported_scores(scores, capabilities_of(a.query.device))
    if problem is None and a.values is not None:
        problem = unsupported_values(a.values, capabilities_of(a.query.device))
    if problem is not None:
        raise ValueError(problem)


def _plain(x: Tensor) -> Tensor:
    """Return x dequantized. Gradients pass straight through."""
    return x.dequantize() if isinstance(x, QTensor) else x


def _sequences(
    query: Tensor, key: Tensor, value: Tensor, layout: str, q_starts: Tensor | None, k_starts: Tensor | None,
    kv_lengths: Tensor | None,
) -> tuple[str, Packed]:  # fmt: skip
    """Return the layout and the checked bounds of sequences."""
    device = query.device
    if q_starts is None:
        if k_starts is not None:
            raise ValueError("cu_seqlens_k is for packed sequences, whose queries need cu_seqlens: pass both")
        if layout not in LAYOUTS or layout == "thd":
            hint = ": packed sequences (thd) need cu_seqlens" if layout == "thd" else ""
            raise ValueError(f"layout must be bhsd, bshd or sbhd; got {layout!r}{hint}")
        batch = query.shape[LAYOUTS[layout][0]] if query.dim() == 4 else 0
        used = (batch,)
    else:
        layout = "thd"
        check_tensor("cu_seqlens", q_starts, INTEGERS, device)
        k_starts = q_starts if k_starts is None else k_starts
        check_tensor("cu_seqlens_k", k_starts, (q_starts.dtype,), device)
        min_starts = 2 if query.shape[0] else 1
        if q_starts.dim() != 1 or q_starts.shape[0] < min_starts or k_starts.shape != q_starts.shape:
            raise ValueError(
                "cu_seqlens and cu_seqlens_k must have the same shape [sequences + 1], with at least one sequence if "
                f"there are tokens; got {tuple(q_starts.shape)} and {tuple(k_starts.shape)}"
            )
        used = (q_starts.shape[0] - 1,)
    if kv_lengths is not None:
        check_tensor("kv_lengths", kv_lengths, INTEGERS, device, used)
    return layout, Packed(q_starts, k_starts, kv_lengths)


def _check_limits(a: AttentionArgs | AttentionBackwardArgs) -> None:
    """Check the keys of prefixes and queries, which kernels read by sequence and by query."""
    (starts, *_), (batch, sequence, _, _) = a.packed, LAYOUTS[a.layout]
    shape, device = a.query.shape, a.query.device
    if a.packed.prefix_lengths is not None:
        number = shape[batch] if starts is None else starts.shape[0] - 1
        check_tensor("prefix_lengths", a.packed.prefix_lengths, INTEGERS, device, (number,))
        if not a.mask.banded:
            raise ValueError(
                "prefix_lengths lets a prefix see itself under a causal mask or a window; without one, every query "
                "sees all keys. Pass is_causal=True, or leave prefix_lengths out"
            )
    if a.packed.kv_limits is not None:
        lead = () if a.layout == "thd" else (shape[batch],)
        check_tensor("kv_limits", a.packed.kv_limits, INTEGERS, device, (*lead, shape[sequence]))


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, layout: str) -> int:
    """Check the shapes of the operands; return the number of query heads."""
    dims = 3 if layout == "thd" else 4
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not query.dim() == key.dim() == value.dim() == dims:
        raise ValueError(f"query, key and value in {layout!r} must have {dims} dimensions each; got {shapes}")
    batch, _, head_axis, _ = LAYOUTS[layout]
    heads, key_heads = query.shape[head_axis], key.shape[head_axis]
    if key.shape[:-1] != value.shape[:-1] or (dims == 4 and key.shape[batch] != query.shape[batch]):
        raise ValueError(f"key and value must have as many tokens and heads, and query's batch; got {shapes}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have heads of one dim; got {shapes}")
    if key_heads == 0 or heads % key_heads:
        raise ValueError(
            f"the heads of query must be a multiple of those of key; got {heads} and {key_heads}"
        )
    for name, x in (("query", query), ("value", value)):
        if not 1 <= x.shape[-1] <= WIDEST:
            raise ValueError(f"heads of {name} must have 1 to {WIDEST} elements; got {x.shape[-1]}")
    return heads


def _lengths_agree(query: Tensor, key: Tensor, layout: str, packed: Packed) -> bool:
    """Return whether each sequence is known to have as many keys as queries."""
    if packed.kv_lengths is not None:
        return False
    if packed.q_starts is not None:
        return packed.k_starts is packed.q_starts
    sequence = LAYOUTS[layout][1]
    return bool(query.shape[sequence] == key.shape[sequence])


def _pair(window: Window | None) -> Window | None:
    if window is None or type(window) is tuple:
        return window
    if isinstance(window, (list, torch.Size)) and len(window) == 2:
        return window[0], window[1]
    raise TypeError(
        f"window must be (left, right): how many keys before and after its own a query sees; got {window!r}. For a "
        "sliding window of w keys that ends at the query's own, pass (w - 1, 0)"
    )


@checked_once
def _mask(is_causal: bool, window: Window | None, align: str | None, same: bool) -> Mask:
    left, right = window or (None, None)
    left, right = (
        bound if bound is None else whole(f"{name} of window", bound, 0)
        for name, bound in (("left", left), ("right", right))
    )
    if is_causal:
        if right not in (None, 0):
            raise ValueError(
                f"is_causal=True lets a query see no later keys, but window has {right} to the right. Pass (left, 0)"
            )
        right = 0
    if align not in (None, "lower_right", "upper_left"):
        raise ValueError(f"causal_align must be 'lower_right' or 'upper_left'; got {align!r}")
    if align is None and not same and (left is not None or right is not None):
        raise ValueError(
            "a mask needs causal_align= if the numbers of keys and queries may differ: 'lower_right' aligns the last "
            "query with the last key, as in FlashAttention and in decoding; 'upper_left' aligns the first query with "
            "the first key, as in F.scaled_dot_product_attention"
        )
    return Mask(left, right, align != "upper_left")
