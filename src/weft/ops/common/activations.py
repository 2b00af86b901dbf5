"""Reference activations in plain PyTorch; kernels use those of `tiles.activations`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Act = Literal[
    "silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid",
    "quick_gelu", "elu", "tanh", "softplus", "log_sigmoid", "mish",
]  # fmt: skip
WITH_ALPHA = ("silu", "sigmoid", "elu")  # the others do not read it


def activation_reference(a: Tensor, act: str, alpha: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return (f(a), f'(a)), gelu in fp64 and the others in the order of operations of the kernels."""
    return ACTIVATIONS[act](a, alpha)


def _times_gate(a: Tensor, gate: Tensor, steep: Tensor) -> tuple[Tensor, Tensor]:
    return a * gate, gate + torch.where(steep == 0, 0.0, a * steep)


def _silu(a: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(alpha * a)
    return a * s, s * (1.0 + alpha * a * (1.0 - s))


def _gelu(a: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    # In fp32, rounding erfc's argument alone would cause an error of 1e-5 at a = -13.
    wide = a.double()
    cdf = 0.5 * torch.special.erfc(-math.sqrt(0.5) * wide)
    slope = cdf + wide * torch.exp(-0.5 * wide * wide) / math.sqrt(2 * math.pi)
    return (wide * cdf).to(a.dtype), slope.to(a.dtype)


def _gelu_tanh(a: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    twice = 2 * math.sqrt(2 / math.pi)
    s = torch.sigmoid(twice * a * (1.0 + 0.044715 * a * a))
    steep = s * (1.0 - s)
    bend = twice * a * steep * (1.0 + 3 * 0.044715 * a * a)
    return a * s, s + torch.where(steep == 0, 0.0, bend)


def _relu(a: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    return torch.where(a <= 0, 0.0, a), (a > 0).to(a.dtype)


def _relu2(a: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    positive, _ = _relu(a, alpha)
    return positive * positive, 2.0 * positive


def _sigmoid(a: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(alpha * a)
    return s, alpha * s * torch.sigmoid(-alpha * a)


def _quick_gelu(a: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    z = 1.702 * a
    s = torch.sigmoid(z)
    return _times_gate(a, s, 1.702 * s * torch.sigmoid(-z))


def _elu(a: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    return torch.where(a > 0, a, alpha * torch.expm1(a)), torch.where(a > 0, 1.0, alpha * torch.exp(a))


def _tanh(a: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    e = torch.exp(-2.0 * a.abs())
    return torch.tanh(a), 4.0 * e / ((1.0 + e) * (1.0 + e))


def _softplus(a: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    return F.softplus(a), torch.sigmoid(a)


def _log_sigmoid(a: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    return F.logsigmoid(a), torch.sigmoid(-a)


def _mish(a: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    e, positive = torch.exp(-a.abs()), a > 0
    n = torch.where(positive, 1.0 + 2.0 * e, e * (e + 2.0))
    d = n + torch.where(positive, 2.0 * e * e, 2.0)
    return _times_gate(a, n / d, 4.0 * (1.0 + e) * torch.where(positive, e * e, e) / (d * d))


ACTIVATIONS: dict[str, Callable[[Tensor, float], tuple[Tensor, Tensor]]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "relu2": _relu2,
    "sigmoid": _sigmoid,
    "quick_gelu": _quick_gelu,
    "elu": _elu,
    "tanh": _tanh,
    "softplus": _softplus,
    "log_sigmoid": _log_sigmoid,
    "mish": _mish,
}
