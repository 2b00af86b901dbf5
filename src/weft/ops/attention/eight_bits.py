"""Scores in eight bits: query and key as codes with a scale for each token and head.

Keys are smoothed before they are rounded: the mean of the keys that the queries of a sequence see is subtracted, which
changes all scores of a query alike, and its share is added to lse again. Elements that are not finite do not enter the
mean, so that they reach the queries that see them and no others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...quant import PLAIN, Format, QTensor
from ...quant.straight import take_apart
from ...runtime import capabilities_of
from ..common.heads import LAYOUTS
from ..common.results import plain_result
from ..quantize.quantize import quantize
from .arguments import AttentionArgs, AttentionOutputs, EightBits, Mask, Packed, element_of, starts_as_read

# By the convention of torchao a row with NaN or Inf has a scale that is not finite, so that its scores are NaN, as they
# are without codes; the codes of other rows are those of "te".
_FORMATS = {"int8": Format("row", "int8", "torchao"), "e4m3": Format("row", "e4m3", "torchao")}


def codes_given(query: Tensor, key: Tensor) -> EightBits | None:
    """Return the element of a query and a key that are codes as attention multiplies them, else None."""
    if not (isinstance(query, QTensor) and isinstance(key, QTensor)):
        return None
    element = element_of(query.spec)
    # A compiler cannot look at copies; what the traced op then finds without a row-wise copy is decoded or refused.
    readable = torch.compiler.is_compiling() or None not in (query.rowwise, key.rowwise)
    if element != element_of(key.spec) or not readable:
        return None
    supported = element != "e4m3" or capabilities_of(query.device).fp8_dot
    return element if supported else None


def in_eight_bits(
    a: AttentionArgs, element: str, attend: Callable[[AttentionArgs], AttentionOutputs]
) -> tuple[AttentionArgs, Callable[[], Tensor] | None]:
    """Return the arguments with codes of query and key, and a function for what smoothing took from lse, if it took
    something. `attend` is the op."""
    if element not in _FORMATS:
        raise ValueError(f"scores must be 'int8', 'e4m3' or None; got {element!r}")
    target = capabilities_of(a.query.device)
    if element == "e4m3" and not target.fp8_dot:
        raise ValueError(f"{target.target} multiplies no e4m3: take scores='int8'")
    query, key, shift = a.query, a.key, None
    if not isinstance(key, QTensor):
        if a.sinks is None and not a.softcap:
            mean = _mean_key(a, attend)
            key = key.float() - _by_token(mean, a.packed.k_starts, key, a.layout)

            def shift() -> Tensor:
                at = LAYOUTS[a.layout][2]
                own = _by_token(mean, a.packed.q_starts, a.query, a.layout)
                own = own.repeat_interleave(a.query.shape[at] // a.key.shape[at], at)
                lost = (a.query.float() * own).sum(-1) * a.scale
                order = {"bhsd": (0, 1, 2), "bshd": (0, 2, 1), "sbhd": (1, 2, 0), "thd": (1, 0)}[a.layout]
                return lost.permute(order)

        query, key = (quantize(x, _FORMATS[element]) for x in (query, key))
    (query, query_codes), (key, key_codes) = take_apart(query), take_apart(key)
    return a._replace(query=query, key=key, query_codes=query_codes, key_codes=key_codes), shift


def _mean_key(a: AttentionArgs, attend: Callable[[AttentionArgs], AttentionOutputs]) -> Tensor:
    """Return the mean key of each head and sequence, in fp32, with one token for each sequence.

    It is the attention of one query to which all keys that the sequence's queries see are alike, so that it depends
    neither on other sequences nor on where the keys lie."""
    _, sequence, _, numbers = LAYOUTS[a.layout]
    zeros, shape = a.key.new_zeros(16), list(a.key.shape)  # as many as kernels load at a time
    shape[numbers] = len(zeros)
    alike = zeros.expand(shape)
    packed, mask = a.packed, _of_one_query(a)
    shape[sequence] = 1
    if packed.k_starts is not None:
        shape[sequence] = packed.k_starts.shape[0] - 1
        one_each = torch.arange(shape[sequence] + 1, dtype=packed.k_starts.dtype, device=a.key.device)
        packed = _seen_alone(a)._replace(q_starts=one_each)
    args = AttentionArgs(
        query=zeros.expand(shape),
        key=alike,
        value=a.key.nan_to_num(0.0, 0.0, 0.0),
        query_codes=PLAIN,
        key_codes=PLAIN,
        values=None,
        sinks=None,
        packed=packed,
        mask=mask,
        scale=1.0,
        softcap=0.0,
        layout=a.layout,
        return_max=False,
        engine="weft",
        result=plain_result(torch.float32),
    )
    return attend(args).result.y


def _of_one_query(a: AttentionArgs) -> Mask:
    """Return the mask by which one query sees what all queries of a sequence see. Packed sequences have no mask:
    `_seen_alone` leaves them the keys that are seen."""
    mask, more = a.mask, a.query.shape[LAYOUTS[a.layout][1]] - 1
    if a.packed.q_starts is not None:
        return Mask(None, None, True)
    if mask.lower_right:
        return Mask(None if mask.left is None else mask.left + more, None, True)
    return Mask(None, None if mask.right is None else mask.right + more, False)


def _seen_alone(a: AttentionArgs) -> Packed:
    """Return the keys of packed sequences without those that no query of their sequence sees."""
    (q_starts, k_starts, kv_lengths), mask = a.packed, a.mask
    assert q_starts is not None
    assert k_starts is not None
    if (mask.left if mask.lower_right else mask.right) is None:
        return a.packed
    queries, keys = q_starts.diff(), k_starts.diff()
    if kv_lengths is not None:
        keys = torch.minimum(keys, kv_lengths)
    if not mask.lower_right:
        assert mask.right is not None
        return a.packed._replace(kv_lengths=torch.minimum(keys, queries + mask.right))
    assert mask.left is not None
    hidden = (keys - queries - mask.left).clamp(min=0)
    begins = torch.cat([k_starts[:-1] + hidden, k_starts[-1:]]).to(k_starts.dtype)
    return Packed(q_starts, begins, keys - hidden)


def _by_token(mean: Tensor, starts: Tensor | None, x: Tensor, layout: str) -> Tensor:
    """Return what each sequence has for all its tokens, in a shape that broadcasts against heads x."""
    if starts is None:
        return mean
    tokens = x.shape[LAYOUTS[layout][1]]
    token = torch.arange(tokens, dtype=starts.dtype, device=x.device)
    number = torch.searchsorted(starts_as_read(starts, tokens), token, right=True) - 1
    return mean[number.clamp(0, mean.shape[0] - 1)]
