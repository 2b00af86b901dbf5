"""Joining attention over parts of the keys: rings, cascades, prefixes that sequences share.

    lse = log(sum_i exp(lse_i))      y = round(sum_i exp(lse_i - lse) * y_i)

In fp32, part after part, with one rounding of y.
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
    """Attention over all keys from attention over parts of them, each with its lse, in the order given.

    outs: results of `attention` in `layout`, packed ones [tokens, heads, dim]; lses: fp32 [batch, heads, queries],
    packed [heads, tokens]. Gradients flow to both. `out_dtype`: that of the first part by default; a ring keeps fp32
    until its last step.

    A part of which a query saw nothing has lse -inf and no weight; a query that saw nothing in any part has the result
    0 and the gradient 0. A part whose sink is +inf has lse +inf and all the weight. Give sinks to one part alone. It is
    plain PyTorch, which `torch.compile` fuses.

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
            f"as many outs as lses are needed, and at least one; got {len(outs)} and {len(lses)}"
        )
    first = outs[0]
    check_input("outs", first)
    given = layout_of(first, layout, 4)
    packed = given == "thd"
    batch, sequence, heads, _ = LAYOUTS[given]
    lead = () if packed else (first.shape[batch],)
    shape = (*lead, first.shape[heads], first.shape[sequence])
    for out, lse in zip(outs, lses, strict=True):
        check_tensor("outs", out, FLOATS, first.device, tuple(first.shape))
        check_tensor("lses", lse, (compute_dtype(out), torch.float32), first.device, shape)
    stacked = torch.stack(lses)
    largest = stacked.detach().amax(0)
    # Differences of infinities are NaN, and so would be their gradients: they are replaced before, not after. Where no
    # part saw anything all weights are 0; where a sink is infinite its part has the weight 1.
    infinite = largest.abs() == math.inf
    total = torch.logsumexp(torch.where(infinite, 0.0, stacked), 0)
    y = None
    for out, lse in zip(outs, lses, strict=True):
        share = torch.exp(torch.where(infinite, 0.0, lse) - total)
        alone = (lse.detach() == math.inf).to(share.dtype)
        weight = _beside(torch.where(infinite, alone, share), layout, packed)
        part = weight * out.to(weight.dtype)
        y = part if y is None else y + part
    assert y is not None
    return Attention(y.to(out_dtype or first.dtype), torch.where(infinite, largest, total), None)


def _beside(weight: Tensor, layout: str, packed: bool) -> Tensor:
    """A number for each query and head, where it stands in the layout of heads."""
    if packed:
        return weight.t()[..., None]
    order = {"bhsd": (0, 1, 2), "bshd": (0, 2, 1), "sbhd": (2, 0, 1)}[layout]
    return weight.permute(order)[..., None]
