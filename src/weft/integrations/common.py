"""What several integrations need."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import Recipe, experts
from ..ops.common.activations import Act
from ..ops.moe.route.route import Routing


def needs(package: str, versions: str, error: ImportError) -> ImportError:
    """The error of an integration whose framework is not there, or has other names than the versions it is made for."""
    module = package.replace("-core", "").replace("-", "_")
    return ImportError(
        f"weft.integrations.{module} is made for {package} {versions}, and importing that failed: {error}. "
        f"Install it with: pip install 'weft[{module}]'"
    )


def experts_of_sorted_rows(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    counts: Tensor,
    probs: Tensor | None = None,
    *,
    recipe: Recipe | str | None = None,
    act: Act = "silu",
) -> Tensor:
    """`weft.experts` for rows [rows, K] which a dispatcher has sorted by expert already, `counts` [experts] of them for
    each expert. Rows behind those of the last expert become zeros. `probs` [rows] weighs the rows.

    The dispatcher left no room between experts, and the blocks of a quantised recipe need some: `weft.experts` spreads
    the rows while it quantises them, which is a pass over them that quantising takes anyway.
    """
    ends = counts.to(x.device, torch.int64).cumsum(0)
    expert = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)
    weights = x.new_ones((len(x), 1), dtype=torch.float32) if probs is None else probs.reshape(-1, 1)
    return experts(x, up, down, Routing(weights, expert[:, None], counts), recipe=recipe, act=act)
