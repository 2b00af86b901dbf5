"""Scores in eight bits: query and key are quantized with one scale per token and head, or per 32 elements of them.

Keys are smoothed before rounding: subtracting the mean of the keys that a sequence's queries see shifts all scores of
a query by the same amount, which is added back to lse. Non-finite elements are left out of the mean, so that they
reach only the queries that see them.
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
from .arguments import (
    AttentionArgs,
    AttentionOutputs,
    EightBits,
    Mask,
    Packed,
    element_of,
    starts_as_read,
    unsupported_scores,
)

# In torchao's convention a block with NaN or Inf gets a non-finite scale, so that the scores of its token are NaN, as
# they are without codes; all other blocks have the same codes as in "te".
_FORMATS: dict[EightBits, Format] = {
    "int8": Format("row", "int8", "torchao"),
    "e4m3": Format("row", "e4m3", "torchao"),
    "mxfp8": Format("mx", "e4m3", "torchao"),
}


def common_element(query: Tensor, key: Tensor) -> EightBits | None:
    """Return the element of query and key if both are QTensors whose codes attention can multiply, else None."""
    if not (isinstance(query, QTensor) and isinstance(key, QTensor)):
        return None
    element = element_of(query.spec)
    # A compiler cannot inspect copies; the traced op decodes or refuses operands without a rowwise copy.
    readable = torch.compiler.is_compiling() or None not in (query.rowwise, key.rowwise)
    if element is None or element != element_of(key.spec) or not readable:
        return None
    return element if unsupported_scores(element, capabilities_of(query.device)) is None else None


def in_eight_bits(
    a: AttentionArgs, element: EightBits, attend: Callable[[AttentionArgs], AttentionOutputs]
) -> tuple[AttentionArgs, Callable[[], Tensor] | None]:
    """Return the arguments with query and key quantized, and a function that computes what smoothing subtracted from
    lse (None without smoothing). `attend` is the op."""
    if element not in _FORMATS:
        raise ValueError(f"scores must be 'int8', 'e4m3', 'mxfp8' or None; got {element!r}")
    if problem := unsupported_scores(element, capabilities_of(a.query.device)):
        raise ValueError(problem)
    query, key, shift = a.query, a.key, None
    if not isinstance(key, QTensor):
        if a.sinks is None and not a.softcap and not a.packed.limited and a.seen is None:
            mean = _mean_key(a, attend)
            key = key.float() - _per_token(mean, a.packed.k_starts, key, a.layout)

            def shift() -> Tensor:
                at = LAYOUTS[a.layout][2]
                mean_of_query = _per_token(mean, a.packed.q_starts, a.query, a.layout)
                mean_of_query = mean_of_query.repeat_interleave(a.query.shape[at] // a.key.shape[at], at)
                removed = (a.query.float() * mean_of_query).sum(-1) * a.scale
                order = {"bhsd": (0, 1, 2), "bshd": (0, 2, 1), "sbhd": (1, 2, 0), "thd": (1, 0)}[a.layout]
                return removed.permute(order)

        query, key = (quantize(x, _FORMATS[element]) for x in (query, key))
    (query, query_codes), (key, key_codes) = take_apart(query), take_apart(key)
    return a._replace(query=query, key=key, query_codes=query_codes, key_codes=key_codes), shift


def _mean_key(a: AttentionArgs, attend: Callable[[AttentionArgs], AttentionOutputs]) -> Tensor:
    """Return the mean key of each head and sequence in fp32, one token per sequence.

    It is computed as attention of one query with equal scores for all keys that the sequence's queries see, so it
    depends neither on other sequences nor on where the keys lie."""
    _, sequence, _, dim_axis = LAYOUTS[a.layout]
    zeros, shape = a.key.new_zeros(16), list(a.key.shape)  # as many elements as kernels load at once
    shape[dim_axis] = len(zeros)
    equal_keys = zeros.expand(shape)
    packed, mask = a.packed, _single_query_mask(a)
    shape[sequence] = 1
    if packed.k_starts is not None:
        shape[sequence] = packed.k_starts.shape[0] - 1
        one_each = torch.arange(shape[sequence] + 1, dtype=packed.k_starts.dtype, device=a.key.device)
        packed = _visible_keys(a)._replace(q_starts=one_each)
    args = AttentionArgs(
        query=zeros.expand(shape),
        key=equal_keys,
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


def _single_query_mask(a: AttentionArgs) -> Mask:
    """Return the mask with which a single query sees every key that any query of the sequence sees. Packed sequences
    need no mask: `_visible_keys` keeps only their visible keys."""
    mask, extra = a.mask, a.query.shape[LAYOUTS[a.layout][1]] - 1
    if a.packed.q_starts is not None:
        return Mask(None, None, True)
    if mask.lower_right:
        return Mask(None if mask.left is None else mask.left + extra, None, True)
    return Mask(None, None if mask.right is None else mask.right + extra, False)


def _visible_keys(a: AttentionArgs) -> Packed:
    """Return the bounds of packed sequences, narrowed to the keys that some query of the sequence sees."""
    q_starts, k_starts, kv_lengths = a.packed[:3]
    mask = a.mask
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
    first_seen = torch.cat([k_starts[:-1] + hidden, k_starts[-1:]]).to(k_starts.dtype)
    return Packed(q_starts, first_seen, keys - hidden)


def _per_token(mean: Tensor, starts: Tensor | None, x: Tensor, layout: str) -> Tensor:
    """Gather a per-sequence mean for each token, in a shape that broadcasts against heads x."""
    if starts is None:
        return mean
    tokens = x.shape[LAYOUTS[layout][1]]
    token = torch.arange(tokens, dtype=starts.dtype, device=x.device)
    index = torch.searchsorted(starts_as_read(starts, tokens), token, right=True) - 1
    return mean[index.clamp(0, mean.shape[0] - 1)]
