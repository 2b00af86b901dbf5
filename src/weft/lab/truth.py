"""What the truths of all families are made of.

A truth is written in float64 from the documented formula of an op alone. For each result and gradient of a call it
gives either the exact tensor, or the number in float64 with the arithmetic error that fp32 may add to it before the
last rounding: a few roundings of the largest term that is added or subtracted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .families import Call

# The longest chain of fp32 roundings on the way to a result: a mean of up to 2^17 squares (in tiles, pairwise),
# rsqrt, three products and two sums. Random walks of that many halves stay well below it.
ROUNDINGS = 16
DENORMAL = 2.0**-149  # numbers below fp32's normal range have this absolute precision


@dataclass(frozen=True)
class Near:
    """A result lies within `noise` of `truth`, before it is rounded to its own dtype."""

    truth: Tensor
    noise: Tensor


Truth = Callable[[Call, dict[str, Tensor]], dict[str, "Near | Tensor"]]
"""Of a call and the upstream gradients of its results: what each result and each gradient must be."""


def straight(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to dtype; the gradient passes through."""
    return value + (value.detach().to(dtype).double() - value.detach())


def arguments(call: Call) -> dict[str, Any]:
    bound = inspect.signature(call.function).bind(**call.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)
