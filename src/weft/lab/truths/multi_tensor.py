"""What the statistics of many tensors must be, in float64, and how far fp32 may be from it."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from triton_loom.testing import EPS32

from ..problem import Call
from ..symbolic.loaded import Loaded
from ..truth import Near

# Relative error of a norm: lanes add up to 128 numbers one after another, trees and chunks little more; and the errors
# of thousands of lanes do not all point one way. Measured: below 1 unit.
ERROR = 4 * EPS32

ORDERS = {"norm1": 1.0, "norm2": 2.0, "norminf": math.inf}


def statistic(tensors: list[Tensor], what: str) -> Near | Tensor:
    """Of all numbers, put one after another."""
    numbers = torch.cat([t.detach().flatten().double() for t in tensors])
    if what == "zeros":
        return (numbers == 0).sum()
    if what == "nonfinite":
        return (~numbers.isfinite()).any()
    if not numbers.numel():
        return Near(torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64))
    magnitudes = numbers.abs()
    if what == "norminf":
        return Near(magnitudes.max(), torch.zeros((), dtype=torch.float64))
    norm = magnitudes.sum() if what == "norm1" else magnitudes.square().sum().sqrt()
    return Near(norm, ERROR * norm)


def clipped(tensor: Tensor, norm: Tensor, max_norm: float) -> Near:
    """The coefficient has two roundings, the product one before that to the tensor's dtype."""
    coefficient = (max_norm / (norm.double() + 1e-6)).clamp(max=1.0)
    truth = tensor.double() * coefficient
    return Near(truth, 2 * EPS32 * truth.abs())


def _gradients(call: Call) -> list[Tensor]:
    return [tensor for name, tensor in call.tensors().items() if name.startswith("gradient")]


def multi_tensor_reduce(call: Call, _: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    return {"y": statistic(_gradients(call), call["what"])}


def multi_tensor_clip(call: Call, _: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    found = [clipped(t, call["norm"], call["max_norm"]) for t in _gradients(call)]
    return {"y" if i == 0 else f"output{i}": near for i, near in enumerate(found)}


TRUTHS = {f.__name__: f for f in (multi_tensor_reduce, multi_tensor_clip)}

# Addresses, and how many elements lie there.
LOADED = {
    (kernel, "table_ptr"): Loaded(least=0)
    for kernel in ("multi_tensor_reduce_kernel", "multi_tensor_clip_kernel")
}
