"""Activations of gated linear units: values and slopes in fp32, on both sides of zero and at its ends."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Literal, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_loom.testing import EPS32, assert_not_worse, check

import weft
from tests.ops.glu.test import call_of, draw
from weft.lab.checks import assert_accurate
from weft.lab.families import Call
from weft.ops.common.activations import ACTIVATIONS as REFERENCES
from weft.ops.common.activations import WITH_ALPHA, Act
from weft.tiles import activate_with_slope

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda a: F.relu(a).square(),
    "sigmoid": torch.sigmoid,
    "quick_gelu": lambda a: a * torch.sigmoid(1.702 * a),
    "elu": F.elu,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "log_sigmoid": F.logsigmoid,
    "mish": F.mish,
}
# Slopes at -inf and inf of the activations that have them; PyTorch multiplies inf by 0.
SLOPES_AT_INFINITY = {
    "relu": (0.0, 1.0), "quick_gelu": (0.0, 1.0), "elu": (0.0, 1.0), "tanh": (0.0, 0.0), "softplus": (0.0, 1.0),
    "log_sigmoid": (1.0, 0.0), "mish": (0.0, 1.0),
}  # fmt: skip


def test_lists_of_activations_agree() -> None:
    chain = re.findall(r'ACT == "(\w+)"', activate_with_slope.src)
    assert chain == [*get_args(Act)] == [*REFERENCES] == [*ACTIVATIONS]
    assert set(WITH_ALPHA) < {*chain}


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_match_pytorch(act: str) -> None:
    """Activations in fp32, where an extra rounding would show, with two tensors and without a gate."""
    gate, up, dy = (draw(7, 96, dtype=torch.float32) for _ in range(3))
    for second in (up, None):
        outcomes = []
        for dtype in (torch.float64, torch.float32):
            leaves = [t.detach().to(dtype).requires_grad_() for t in (gate, up)]
            y = ACTIVATIONS[act](leaves[0]) * (leaves[1] if second is not None else 1.0)
            outcomes.append([y, *torch.autograd.grad(y, leaves[: 1 + (second is not None)], dy.to(dtype))])
        leaves = [gate.detach().requires_grad_(), up.detach().requires_grad_()]
        layout = "concat" if second is not None else "none"
        y = weft.glu(leaves[0], None if second is None else leaves[1], act=act, layout=layout)  # type: ignore[arg-type]
        got = [y, *torch.autograd.grad(y, leaves[: 1 + (second is not None)], dy)]
        for a, truth, eager in zip(got, *outcomes, strict=True):
            assert_not_worse(a, truth, eager)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_activations_keep_their_digits(act: str, backend: Literal["triton", "reference"]) -> None:
    """Values and slopes where they are tiny, and where 1 is subtracted from a power near 1."""
    steps = torch.logspace(-30, 1.9, 960)
    a = torch.cat([torch.linspace(-85, 85, 3 * 960), -steps, steps]).view(-1, 96)
    a = a / 1.702 if act == "quick_gelu" else a  # exp ends at 88
    with weft.backend(backend):
        assert_accurate("glu", Call(weft.glu, {"x": a, "act": act, "layout": "none"}))


@pytest.mark.parametrize("act", SLOPES_AT_INFINITY)
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_infinities_and_nan(act: str, backend: Literal["triton", "reference"]) -> None:
    """Values are PyTorch's, and no slope is infinity times 0. Zeros keep their signs, but for relu."""
    a = torch.tensor(
        [[-math.inf, math.inf, 0.0, -0.0, math.nan, 3e38, -3e38, 100.0, -100.0]], requires_grad=True
    )
    with weft.backend(backend):
        y = weft.glu(a, act=act, layout="none")  # type: ignore[arg-type]
        (slope,) = torch.autograd.grad(y, a, torch.ones_like(y))
    wanted = ACTIVATIONS[act](a)
    assert torch.allclose(y, wanted, rtol=1e-6, equal_nan=True)
    ends = torch.tensor(SLOPES_AT_INFINITY[act])
    assert torch.equal(slope[0, :2], ends)
    assert torch.allclose(slope[0, 5:].view(2, 2), ends.flip(0))
    if act != "relu":
        assert torch.equal(y[0, 2:4].signbit(), wanted[0, 2:4].signbit())
        assert slope[0, 4].isnan()


@pytest.mark.parametrize("act", ["sigmoid", "elu"])
def test_alpha(act: str) -> None:
    assert_accurate("glu", call_of(act=act, alpha=1.7))


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "quick_gelu"])
def test_large_and_small_values(act: str) -> None:
    """Nothing overflows: f(a) of a large a is a or 0, with the slope 1 or 0. NaN has a slope of NaN."""
    a = torch.tensor(
        [3e38, 1e30, 1e20, 1e10, -1e10, -1e20, -1e30, -3e38, 1e-40, -1e-40, 0.0, -0.0, torch.nan]
    )
    leaf = a.view(1, -1).clone().requires_grad_()
    y = weft.glu(leaf, act=act, layout="none")  # type: ignore[arg-type]
    (slope,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    assert torch.equal(y[0, :8], torch.where(a > 0, a, 0.0)[:8])
    assert torch.equal(slope[0, :8], torch.where(a > 0, 1.0, 0.0)[:8])
    assert torch.allclose(slope[0, 8:12], torch.full((4,), 0.5))
    assert y[0, 12:].isnan().all()
    assert slope[0, 12:].isnan().all()


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_gelu_keeps_its_digits_in_the_tail(backend: Literal["triton", "reference"]) -> None:
    """1 + erf(a / sqrt 2) would cancel: it loses one part in 500 where gelu is -2.4e-5, and everything below -5.6. The
    range is from -14.2, where fp32 ends, to 4."""
    a = torch.linspace(-14.2, 4.0, 64 * 512).view(-1, 64)
    leaf = a.clone().requires_grad_()
    with weft.backend(backend):
        y = weft.glu(leaf, act="gelu", layout="none")
        (slope,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    wide = a.double()
    cdf = 0.5 * torch.special.erfc(-math.sqrt(0.5) * wide)
    bend = wide * torch.exp(-wide.square() / 2) / math.sqrt(2 * math.pi)
    # Allow eight roundings of the terms, since the polynomial and the power take half a dozen; below fp32's normal
    # range, one rounding of the cdf, times a.
    budget, denormal = 8 * EPS32, 8 * 2.0**-149
    check(y, wide * cdf, budget * (wide * cdf).abs() + denormal)
    check(slope, cdf + bend, budget * (cdf + bend.abs()) + denormal)
