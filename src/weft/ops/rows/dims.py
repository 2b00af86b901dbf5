"""The dimension that a function of rows works along."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.checks import is_tensor, no_tensor


def rows_along(x: Tensor, dim: int) -> Tensor:
    """Return x with its dimension `dim` last."""
    if not is_tensor(x):
        raise no_tensor("x", x)
    if not isinstance(dim, (int, torch.SymInt)):
        raise TypeError(f"dim must be an integer, one dimension; got {dim!r}")
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"x has the shape {tuple(x.shape)}; it has no dimension {dim}")
    return x if dim in (-1, x.dim() - 1) else x.movedim(dim, -1)


def back(rows: Tensor, x: Tensor, dim: int) -> Tensor:
    """Return a result of whole rows with the dimensions where x has them."""
    return rows if dim in (-1, x.dim() - 1) else rows.movedim(-1, dim)
