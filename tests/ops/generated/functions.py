"""Scalar functions that models and their frameworks call, each with its definition in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional as F
from triton.language.extra import libdevice

NAN = tl.PropagateNan.ALL


@dataclass(frozen=True)
class Function:
    """A scalar function, its definition, and where it is smooth.

    `low` and `high` limit the arguments of gradients. `noise` is the error of fp32 arithmetic that the definition
    allows besides eight roundings of the result, in roundings of 1: where terms cancel.
    """

    scalar: Callable[..., Any]
    torch: Callable[..., Any]
    arguments: int = 1
    low: float = -3.0
    high: float = 3.0
    noise: float = 0.0
    differentiable: bool = True


def relu(x):
    return tl.maximum(x, 0, propagate_nan=NAN)


def softplus(x):
    return tl.maximum(x, 0, propagate_nan=NAN) + libdevice.log1p(tl.exp(-tl.abs(x)))


def gelu_tanh(x):
    inner = 0.7978845608028654 * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + libdevice.tanh(inner))


@triton.jit
def clamped(x, low, high):
    return tl.minimum(
        tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL), high, propagate_nan=tl.PropagateNan.ALL
    )


def _logaddexp(x, y):
    high = tl.maximum(x, y, propagate_nan=NAN)
    return tl.where(x == y, x + math.log(2), high + libdevice.log1p(tl.exp(-tl.abs(x - y))))


def _xielu(x):
    """xIELU with alpha_p = 0.8, alpha_n = 1.3, beta = 0.5."""
    return tl.where(x > 0, 0.8 * x * x + 0.5 * x, 1.3 * (libdevice.expm1(x) - x) + 0.5 * x)


def _torch_xielu(x):
    return torch.where(x > 0, 0.8 * x * x + 0.5 * x, 1.3 * (torch.expm1(x) - x) + 0.5 * x)


FUNCTIONS: dict[str, Function] = {
    # Functions of libm.
    "abs": Function(lambda x: tl.abs(x), torch.abs),
    "neg": Function(lambda x: -x, torch.neg),
    "exp": Function(lambda x: tl.exp(x), torch.exp),
    "exp2": Function(lambda x: tl.exp2(x), torch.exp2),
    "expm1": Function(lambda x: libdevice.expm1(x), torch.expm1),
    "log": Function(lambda x: tl.log(x), torch.log, low=0.1),
    "log2": Function(lambda x: tl.log2(x), torch.log2, low=0.1),
    "log10": Function(lambda x: libdevice.log10(x), torch.log10, low=0.1),
    "log1p": Function(lambda x: libdevice.log1p(x), torch.log1p, low=-0.9),
    "sqrt": Function(lambda x: tl.sqrt(x), torch.sqrt, low=0.1),
    "rsqrt": Function(lambda x: tl.rsqrt(x), torch.rsqrt, low=0.1),
    "reciprocal": Function(lambda x: 1.0 / x, torch.reciprocal, low=0.1),
    "square": Function(lambda x: x * x, torch.square),
    "cube": Function(lambda x: x**3, lambda x: x**3),
    "sin": Function(lambda x: tl.sin(x), torch.sin),
    "cos": Function(lambda x: tl.cos(x), torch.cos),
    "tan": Function(lambda x: libdevice.tan(x), torch.tan, low=-1.3, high=1.3),
    "asin": Function(lambda x: libdevice.asin(x), torch.asin, low=-0.9, high=0.9),
    "acos": Function(lambda x: libdevice.acos(x), torch.acos, low=-0.9, high=0.9),
    "atan": Function(lambda x: libdevice.atan(x), torch.atan),
    "sinh": Function(lambda x: libdevice.sinh(x), torch.sinh),
    "cosh": Function(lambda x: libdevice.cosh(x), torch.cosh),
    "tanh": Function(lambda x: libdevice.tanh(x), torch.tanh),
    "asinh": Function(lambda x: libdevice.asinh(x), torch.asinh),
    "acosh": Function(lambda x: libdevice.acosh(x), torch.acosh, low=1.1),
    "atanh": Function(lambda x: libdevice.atanh(x), torch.atanh, low=-0.9, high=0.9),
    "erf": Function(lambda x: tl.erf(x), torch.erf),
    "erfc": Function(lambda x: libdevice.erfc(x), torch.special.erfc),
    "floor": Function(lambda x: tl.floor(x), torch.floor, differentiable=False),
    "ceil": Function(lambda x: tl.ceil(x), torch.ceil, differentiable=False),
    "trunc": Function(lambda x: libdevice.trunc(x), torch.trunc, differentiable=False),
    "round": Function(lambda x: libdevice.rint(x), torch.round, differentiable=False),
    # Activations.
    "sigmoid": Function(lambda x: tl.sigmoid(x), torch.sigmoid),
    "logit": Function(lambda x: tl.log(x / (1 - x)), torch.logit, low=0.1, high=0.9, noise=64),
    "relu": Function(relu, torch.relu),
    "relu6": Function(lambda x: clamped(x, 0, 6), F.relu6),
    "relu_squared": Function(lambda x: relu(x) * relu(x), lambda x: torch.relu(x).square()),
    "leaky_relu": Function(lambda x: tl.where(x > 0, x, 0.01 * x), F.leaky_relu),
    "elu": Function(lambda x: tl.where(x > 0, x, libdevice.expm1(x)), F.elu),
    "selu": Function(
        lambda x: 1.0507009873554805 * tl.where(x > 0, x, 1.6732632423543772 * libdevice.expm1(x)), F.selu
    ),
    "silu": Function(lambda x: x * tl.sigmoid(x), F.silu),
    "quick_gelu": Function(
        lambda x: x * tl.sigmoid(1.702 * x), lambda x: x * torch.sigmoid(1.702 * x), noise=4
    ),
    "gelu": Function(lambda x: 0.5 * x * libdevice.erfc(-0.7071067811865476 * x), F.gelu, noise=4),
    "gelu_tanh": Function(gelu_tanh, lambda x: F.gelu(x, approximate="tanh"), noise=16),
    "softplus": Function(softplus, lambda x: F.softplus(x, threshold=100)),
    "log_sigmoid": Function(lambda x: -softplus(-x), F.logsigmoid),
    "mish": Function(lambda x: x * libdevice.tanh(softplus(x)), F.mish, noise=4),
    "softsign": Function(lambda x: x / (1 + tl.abs(x)), F.softsign),
    "tanhshrink": Function(lambda x: x - libdevice.tanh(x), F.tanhshrink, noise=4),
    "softshrink": Function(
        lambda x: tl.where(x > 0.5, x - 0.5, tl.where(x < -0.5, x + 0.5, 0.0 * x)), F.softshrink
    ),
    "hardshrink": Function(lambda x: tl.where(tl.abs(x) <= 0.5, 0.0, x), F.hardshrink),
    "hardtanh": Function(lambda x: clamped(x, -1, 1), F.hardtanh),
    "hardsigmoid": Function(lambda x: clamped(x + 3, 0, 6) / 6, F.hardsigmoid, noise=4),
    "hardswish": Function(lambda x: x * clamped(x + 3, 0, 6) / 6, F.hardswish, noise=4),
    "xielu": Function(_xielu, _torch_xielu, noise=8),
    # Arithmetic of two and three.
    "add": Function(lambda x, y: x + y, torch.add, 2),
    "sub": Function(lambda x, y: x - y, torch.sub, 2),
    "mul": Function(lambda x, y: x * y, torch.mul, 2),
    "div": Function(lambda x, y: x / y, torch.div, 2, low=0.1),
    "fmod": Function(lambda x, y: x % y, torch.fmod, 2, low=0.1),
    "pow": Function(lambda x, y: x**y, torch.pow, 2, low=0.1),
    "maximum": Function(lambda x, y: tl.maximum(x, y, propagate_nan=NAN), torch.maximum, 2),
    "minimum": Function(lambda x, y: tl.minimum(x, y, propagate_nan=NAN), torch.minimum, 2),
    "fmax": Function(lambda x, y: tl.maximum(x, y), torch.fmax, 2),
    "fmin": Function(lambda x, y: tl.minimum(x, y), torch.fmin, 2),
    "atan2": Function(lambda x, y: libdevice.atan2(x, y), torch.atan2, 2, low=0.1),
    "hypot": Function(lambda x, y: libdevice.hypot(x, y), torch.hypot, 2, low=0.1),
    "copysign": Function(lambda x, y: libdevice.copysign(x, y), torch.copysign, 2, low=0.1),
    "logaddexp": Function(_logaddexp, torch.logaddexp, 2, noise=4),
    "silu_and_mul": Function(lambda x, y: x * tl.sigmoid(x) * y, lambda x, y: F.silu(x) * y, 2),
    "gelu_and_mul": Function(
        lambda x, y: gelu_tanh(x) * y, lambda x, y: F.gelu(x, approximate="tanh") * y, 2, noise=64
    ),
    "tanh_backward": Function(lambda dy, y: dy * (1 - y * y), lambda dy, y: dy * (1 - y * y), 2, noise=512),
    "lerp": Function(
        lambda x, y, weight: x + weight * (y - x), lambda x, y, weight: x + weight * (y - x), 3, noise=64
    ),
    "addcmul": Function(lambda x, y, z: x + y * z, torch.addcmul, 3, noise=32),
    "addcdiv": Function(lambda x, y, z: x + y / z, torch.addcdiv, 3, low=0.1, noise=32),
    "where": Function(lambda x, y, z: tl.where(x > 0, y, z), lambda x, y, z: torch.where(x > 0, y, z), 3),
    "clamp": Function(clamped, lambda x, y, z: torch.minimum(torch.maximum(x, y), z), 3),
    # Comparisons and logic.
    "eq": Function(lambda x, y: x == y, torch.eq, 2, differentiable=False),
    "ne": Function(lambda x, y: x != y, torch.ne, 2, differentiable=False),
    "lt": Function(lambda x, y: x < y, torch.lt, 2, differentiable=False),
    "le": Function(lambda x, y: x <= y, torch.le, 2, differentiable=False),
    "gt": Function(lambda x, y: x > y, torch.gt, 2, differentiable=False),
    "ge": Function(lambda x, y: x >= y, torch.ge, 2, differentiable=False),
    "isnan": Function(lambda x: libdevice.isnan(x), torch.isnan, differentiable=False),
    "isinf": Function(lambda x: libdevice.isinf(x), torch.isinf, differentiable=False),
    "isfinite": Function(lambda x: tl.abs(x) < math.inf, torch.isfinite, differentiable=False),
    "logical_and": Function(lambda x, y: (x != 0) & (y != 0), torch.logical_and, 2, differentiable=False),
    "logical_or": Function(lambda x, y: (x != 0) | (y != 0), torch.logical_or, 2, differentiable=False),
    "logical_xor": Function(lambda x, y: (x != 0) ^ (y != 0), torch.logical_xor, 2, differentiable=False),
    "logical_not": Function(lambda x: x == 0, torch.logical_not, differentiable=False),
}

# Functions of integers, and of bools where `bools`.
INTEGERS: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {
    "add": (lambda x, y: x + y, torch.add, 2),
    "sub": (lambda x, y: x - y, torch.sub, 2),
    "mul": (lambda x, y: x * y, torch.mul, 2),
    "neg": (lambda x: -x, torch.neg, 1),
    "abs": (lambda x: tl.abs(x), torch.abs, 1),
    "floor_divide_toward_zero": (lambda x, y: x // y, lambda x, y: torch.div(x, y, rounding_mode="trunc"), 2),
    "remainder_of_c": (lambda x, y: x % y, torch.fmod, 2),
    "maximum": (lambda x, y: tl.maximum(x, y), torch.maximum, 2),
    "minimum": (lambda x, y: tl.minimum(x, y), torch.minimum, 2),
    "bitwise_and": (lambda x, y: x & y, torch.bitwise_and, 2),
    "bitwise_or": (lambda x, y: x | y, torch.bitwise_or, 2),
    "bitwise_xor": (lambda x, y: x ^ y, torch.bitwise_xor, 2),
    "bitwise_not": (lambda x: ~x, torch.bitwise_not, 1),
    "shift_left": (lambda x, y: x << (y & 3), lambda x, y: x << (y & 3), 2),
    "shift_right": (lambda x, y: x >> (y & 3), lambda x, y: x >> (y & 3), 2),
    "lt": (lambda x, y: x < y, torch.lt, 2),
    "div": (lambda x, y: x / y, torch.div, 2),
    "exp": (lambda x: tl.exp(x), torch.exp, 1),
    "where": (lambda x, y: tl.where(x > y, x, y), lambda x, y: torch.where(x > y, x, y), 2),
}
