"""Arguments and outputs of the multi-tensor reductions and of clipping."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime import Written

NORMS = {1.0: "norm1", 2.0: "norm2", math.inf: "norminf"}
ORDERS = {what: order for order, what in NORMS.items()}


class ReduceArgs(NamedTuple):
    tensors: list[Tensor]  # on one device; either all or none in float64
    what: str  # norm1, norm2, norminf, zeros or nonfinite


class ReduceOutputs(NamedTuple):
    total: Tensor  # 0-dim: a norm is fp32 or fp64, a count int64, "nonfinite" a bool


class ClipArgs(NamedTuple):
    tensors: Written
    norm: Tensor  # 0-dim
    max_norm: float


def dtype_of_total(tensors: list[Tensor], what: str) -> torch.dtype:
    if what == "zeros":
        return torch.int64
    if what == "nonfinite":
        return torch.bool
    return torch.float64 if tensors and tensors[0].dtype is torch.float64 else torch.float32


def allocate_reduce(a: ReduceArgs) -> ReduceOutputs:
    dtype = dtype_of_total(a.tensors, a.what)
    return ReduceOutputs(torch.empty((), dtype=dtype, device=a.tensors[0].device if a.tensors else None))
