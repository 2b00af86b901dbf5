"""Merging of attention over parts of the keys, for rings, cascades and prefixes that sequences share.

    lse = log(sum_i exp(lse_i))      y = round(sum_i exp(lse_i - lse) * y_i)

Sums are fp32, part after part, and y is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..common.checks import FLOATS, check_input, check_tensor
from ..common.heads import LAYOUTS, Layout, layout_of
from ..common.rows import compute_dtype
from .attention import Attention


def merge_attention(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    *,
    layout: Layout = "bhsd",
    out_dtype: torch.dtype | None = None,
) -> Attention:
    """Merge attention over parts of the keys, each with its lse, in the order given.

    outs: results of `attention` in `layout`, packed [tokens, heads, dim]; lses: fp32 [batch, heads, queries], packed
    [heads, tokens]. Gradients flow to both. `out_dtype` defaults to the dtype of the first part; a ring keeps fp32
    until its last step.

    A part in which a query sees no key has lse -inf and weight 0; a query that sees no key in any part gets result 0
    and gradient 0. A part whose sink is +inf has lse +inf and takes all the weight. Pass sinks to one part only. The
    function is plain PyTorch, which `torch.compile` fuses.

    >>> import torch, weft
    >>> q, k, v = torch.randn(3, 1, 2, 100, 64)
    >>> parts = [weft.attention(q, k[:, :, at], v[:, :, at], return_lse=True) for at in (slice(40), slice(40, 100))]
    >>> merged = weft.merge_attention([p.out for p in parts], [p.lse for p in parts])
    >>> torch.allclose(merged.out, weft.attention(q, k, v), atol=1e-5)
    True
    """
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"merge_attention needs as many outs as lses, and at least one; got {len(outs)} and {len(lses)}"
        )
    first = outs[0]
    check_input("outs", first)
    heads_layout = layout_of(first, layout, 4)
    packed = heads_layout == "thd"
    batch, sequence, heads, _ = LAYOUTS[heads_layout]
    lead = () if packed else (first.shape[batch],)
    shape = (*lead, first.shape[heads], first.shape[sequence])
    for out, lse in zip(outs, lses, strict=True):
        check_tensor("outs", out, FLOATS, first.device, tuple(first.shape))
        check_tensor("lses", lse, (compute_dtype(out), torch.float32), first.device, shape)
    stacked = torch.stack(lses)
    m = stacked.detach().amax(0)
    # Differences of infinities are NaN, and so are their gradients: replace infinities before subtracting, not after.
    # Where no part saw a key, all weights are 0; where a sink is infinite, its part has weight 1.
    infinite = m.abs() == math.inf
    total = torch.logsumexp(torch.where(infinite, 0.0, stacked), 0)
    y = None
    for out, lse in zip(outs, lses, strict=True):
        share = torch.exp(torch.where(infinite, 0.0, lse) - total)
        has_all = (lse.detach() == math.inf).to(share.dtype)
        weight = _broadcastable(torch.where(infinite, has_all, share), layout, packed)
        part = weight * out.to(weight.dtype)
        y = part if y is None else y + part
    assert y is not None
    return Attention(y.to(out_dtype or first.dtype), torch.where(infinite, m, total), None)


def _broadcastable(weight: Tensor, layout: str, packed: bool) -> Tensor:
    """Permute one weight per query and head so that it broadcasts against heads in `layout`."""
    if packed:
        return weight.t()[..., None]
    order = {"bhsd": (0, 1, 2), "bshd": (0, 2, 1), "sbhd": (2, 0, 1)}[layout]
    return weight.permute(order)[..., None]
