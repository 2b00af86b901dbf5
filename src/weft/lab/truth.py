"""Building blocks of the truths of all families.

A truth is written in float64 from the documented formula of an op alone. For each result and gradient of a call it
gives either the exact tensor, or its float64 value with the arithmetic error that fp32 may add before the last
rounding: a few roundings of the largest term that is added or subtracted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .problem import Call

EPS32 = torch.finfo(torch.float32).eps
# The longest chain of fp32 roundings on the way to a result: a mean of up to 2^17 squares (in tiles, pairwise),
# rsqrt, three products and two sums. Random walks of that many half-ulp steps stay well below it.
ROUNDINGS = 16
DENORMAL = 2.0**-149  # absolute precision of values below fp32's normal range


@dataclass(frozen=True)
class Near:
    """A result that lies within `noise` of `truth` before it is rounded to its own dtype."""

    truth: Tensor
    noise: Tensor


Truth = Callable[[Call, dict[str, Tensor]], dict[str, "Near | Tensor"]]
"""Function of a call and the upstream gradients of its results that returns, by name, the expected results and
gradients."""


def straight(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to dtype; the gradient passes through."""
    return value + (value.detach().to(dtype).double() - value.detach())


def arguments(call: Call) -> dict[str, Any]:
    """Return all arguments of a call by name, defaults included."""
    bound = inspect.signature(call.function).bind(**call.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def near(got: Tensor, expected: Near) -> None:
    """Assert that a result is the truth, rounded once, and that unless it is tiny, damage to it would be noticed.

    Infinities are exact, and bytes are codes of e4m3."""
    from triton_loom.testing import assert_rounded_once, ulp

    if got.dtype == torch.uint8:
        got = got.view(torch.float8_e4m3fn)
    infinite = expected.truth.isinf()
    if infinite.any():
        assert torch.equal(got[infinite].double(), expected.truth[infinite])
        rest = Near(expected.truth[~infinite], expected.noise[~infinite])
        got, expected = got[~infinite], rest
    budget = expected.noise + ulp(expected.truth, got.dtype) / 2
    if (
        got.numel() > 1
        and got.shape[-1] > 1
        and bool((expected.truth.abs().amax() > 4 * budget.amax()).all())
    ):
        assert_rounded_once(got, expected.truth, expected.noise)
    else:  # one column: every element is ±1, and its gradient a difference of equals
        assert got.shape == expected.truth.shape
        assert ((got.double() - expected.truth).abs() <= budget).all()
