"""Helpers that several integrations share."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import Recipe, experts
from ..ops.common.activations import Act
from ..ops.moe.route.route import Routing


def needs(package: str, versions: str, error: ImportError) -> ImportError:
    """Return the error of an integration whose framework is missing or has an incompatible version."""
    module = package.replace("-core", "").replace("-", "_")
    return ImportError(
        f"weft.integrations.{module} supports {package} {versions}, but importing it failed: {error}. "
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
    """Apply `weft.experts` to rows [rows, K] that a dispatcher has already sorted by expert, `counts` [experts] rows
    each. Rows beyond the last expert's become zeros. `probs` [rows] weights the rows.

    The dispatcher leaves no padding between experts, and the blocks of a quantized recipe need some: `weft.experts`
    spreads the rows while it quantizes them, in a pass that quantization takes anyway.
    """
    ends = counts.to(x.device, torch.int64).cumsum(0)
    expert = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)
    weights = x.new_ones((len(x), 1), dtype=torch.float32) if probs is None else probs.reshape(-1, 1)
    return experts(x, up, down, Routing(weights, expert[:, None], counts), recipe=recipe, act=act)
