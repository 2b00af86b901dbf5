"""Reference activations in plain PyTorch; kernels use those of `tiles.activations`."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Act = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid"]


def activation_reference(a: Tensor, act: str, alpha: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return (f(a), f'(a)), gelu in fp64 and the others in the order of operations of the kernels."""
    if act in ("silu", "sigmoid"):
        s = torch.sigmoid(alpha * a)
        if act == "silu":
            return a * s, s * (1.0 + alpha * a * (1.0 - s))
        return s, alpha * s * torch.sigmoid(-alpha * a)
    if act == "gelu":
        # In fp32, rounding erfc's argument alone would cause an error of 1e-5 at a = -13.
        wide = a.double()
        cdf = 0.5 * torch.special.erfc(-math.sqrt(0.5) * wide)
        slope = cdf + wide * torch.exp(-0.5 * wide * wide) / math.sqrt(2 * math.pi)
        return (wide * cdf).to(a.dtype), slope.to(a.dtype)
    if act == "gelu_tanh":
        twice = 2 * math.sqrt(2 / math.pi)
        s = torch.sigmoid(twice * a * (1.0 + 0.044715 * a * a))
        steep = s * (1.0 - s)
        bend = twice * a * steep * (1.0 + 3 * 0.044715 * a * a)
        return a * s, s + torch.where(steep == 0, 0.0, bend)
    positive = torch.where(a <= 0, 0.0, a)
    if act == "relu":
        return positive, (a > 0).to(a.dtype)
    return positive * positive, 2.0 * positive
