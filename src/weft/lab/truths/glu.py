"""What the gated linear units must compute, in float64 and by autograd, written from PyTorch's own activations.

`glu` gives for y and every gradient the truth and the arithmetic error that fp32 may add to it before the last
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton_loom.testing import EPS32

import weft

from ..copies import regions
from ..problem import Call
from ..symbolic.loaded import Loaded
from ..truth import ROUNDINGS, Near, arguments
from ..families.quantize import y_and_amax

FEW = ROUNDINGS * EPS32
EPS64 = torch.finfo(torch.float64).eps
TINY = 2.0**-125  # where exp of fp32 ends


def activation(act: str, alpha: float = 1.0) -> Callable[[Tensor], Tensor]:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": lambda a: a * torch.sigmoid(alpha * a),
        "sigmoid": lambda a: torch.sigmoid(alpha * a),
        "gelu": lambda a: (
            0.5 * a * torch.special.erfc(-math.sqrt(0.5) * a)
        ),  # F.gelu's 1 + erf forgets digits
        "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
        "relu": F.relu,
        "relu2": lambda a: F.relu(a).square(),
    }
    return functions[act]


def _noise(a: Tensor, act: str, alpha: float) -> tuple[Tensor, Tensor]:
    """What fp32 may add to f(a) and to f'(a). A rounding of an exponent z is one of |z| in the power, and what is
    subtracted from 1 has the precision of 1."""
    if act in ("silu", "sigmoid"):
        z = alpha * a
        s = torch.sigmoid(z)
        steps = FEW * (1 + z.abs())
        if act == "silu":
            return steps * (a * s).abs() + TINY * a.abs(), steps * s * (1 + z.abs()) + TINY
        return steps * s + TINY, steps * alpha * s + TINY
    if act == "gelu":
        cdf = 0.5 * torch.special.erfc(-math.sqrt(0.5) * a)
        bend = a.abs() * torch.exp(-a.square() / 2) / math.sqrt(2 * math.pi)
        return FEW * (a * cdf).abs() + TINY, FEW * (cdf + bend) + TINY
    if act == "gelu_tanh":
        z = 2 * math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)
        s = torch.sigmoid(z)
        steps = FEW * (1 + z.abs())
        bend = 1 + 2 * a.abs() * (1 + 0.134145 * a**2)
        # PyTorch's 1 + tanh(u) of float64 forgets what s still knows.
        return steps * (a * s).abs() + EPS64 * a.abs(), (steps * s + EPS64) * bend
    return FEW * F.relu(a).maximum(F.relu(a).square()), FEW * F.relu(a)


def glu(call: Call, dy: Tensor | None = None) -> dict[str, Near]:
    """y, and with an upstream gradient those of x, up, probs and bias."""
    a: dict[str, Any] = arguments(call)
    leaves = {
        name: a[name].detach().double().requires_grad_()
        for name in ("x", "up", "probs", "bias")
        if a[name] is not None
    }
    x = leaves["x"]
    owner = torch.full(
        (math.prod(x.shape[:-1]),), -1
    )  # the expert of each row; without experts it is the first
    for expert, (start, end, _) in enumerate(regions(len(owner), a["ends"], a["align"])):
        owner[start:end] = expert
    if "bias" in leaves:
        x = x + leaves["bias"].view(-1, x.shape[-1])[owner.clamp(min=0)].view(x.shape)
    if a["layout"] == "none":
        gate, up = x, None
    elif "up" in leaves:
        gate, up = x, leaves["up"]
    elif a["layout"] == "concat":
        gate, up = x.chunk(2, -1)
    else:
        gate, up = x[..., 0::2], x[..., 1::2]
    lead = gate.shape[:-1]
    real = (owner >= 0).view(*lead, 1)
    gate = torch.where(real, gate, 0.0)  # nobody reads the padding
    up = up if up is None else torch.where(real, up, 0.0)
    inside, value = gate, up
    if a["limit"] is not None:
        inside = gate.clamp(max=a["limit"])
        value = None if up is None else up.clamp(-a["limit"], a["limit"])
    alpha = float(a["alpha"])
    factor = torch.ones_like(inside) if value is None else value + a["up_offset"]
    probs = torch.ones(*lead, 1, dtype=torch.float64)
    if "probs" in leaves:
        probs = torch.where(real, leaves["probs"].view(*lead, 1), 0.0)
    active = activation(a["act"], alpha)(inside)
    y = torch.where(real, active * factor * probs, 0.0)
    with torch.no_grad():
        f_noise, slope_noise = _noise(inside.detach(), a["act"], alpha)
        # f' itself: what one would get from a gradient of ones through f alone
        twin = inside.detach().clone().requires_grad_()
        with torch.enable_grad():
            activation(a["act"], alpha)(twin).sum().backward()
        assert twin.grad is not None
        slope = twin.grad.abs()
        if "bias" in leaves:  # gate and up are sums in fp32; no f'' is larger than 2, for alpha up to 2
            rounding = EPS32 * inside.detach().abs()
            f_noise, slope_noise = f_noise + slope * rounding, slope_noise + 2 * rounding
        noise = torch.where(real, f_noise * (factor * probs).abs() + FEW * y.abs(), 0.0)
    found = {"y": Near(y.detach(), noise)}
    if dy is None:
        return found
    d = torch.where(real, dy.detach().double(), 0.0)
    y.backward(d)
    with torch.no_grad():
        dgate = (d * probs * factor).abs() * (slope_noise + FEW * slope)
        dup = (d * probs).abs() * (f_noise + FEW * active.abs())
        noises = {"x": dgate, "up": dup}
        if up is not None and "up" not in leaves:
            noises["x"] = (
                torch.cat([dgate, dup], -1)
                if a["layout"] == "concat"
                else torch.stack([dgate, dup], -1).flatten(-2)
            )
        if "probs" in leaves:
            terms = (d * factor).abs() * (f_noise + FEW * active.abs())
            noises["probs"] = terms.sum(-1).view(leaves["probs"].shape)
        if "bias" in leaves:
            assert leaves["x"].grad is not None
            terms = (noises["x"] + FEW * leaves["x"].grad.abs()).view(len(owner), -1)
            sums = torch.zeros_like(leaves["bias"]).view(-1, terms.shape[1])
            noises["bias"] = sums.index_add(0, owner.clamp(min=0), terms).view_as(leaves["bias"])
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        found[f"d{name}"] = Near(leaf.grad, noises[name])
    return found


def _forward(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    found: dict[str, Near | Tensor] = {**glu(call, gradients.get("y"))}
    y = found["y"]
    assert isinstance(y, Near)
    return {**found, "amax": Near(y.truth.abs().amax(), y.noise.amax())}


def _backward(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """As the autograd engine calls it, against the gradients of the formula."""
    forward = {k: v for k, v in call.kwargs.items() if k not in ("dy", "quantize", "columnwise")}
    return {**glu(Call(weft.glu, forward), call["dy"])}


TRUTHS = {"glu": _forward, "glu_backward": _backward}
RESULTS = {weft.glu: y_and_amax}


# Both copies of a gradient of gate and up at 1x128 take 255 registers of 256 threads. On sm_80 and sm_89 codes are made
# by integer arithmetic, which takes more.
SPILLS = {
    ("glu_backward_kernel", "sm_80"): 320,
    ("glu_backward_kernel", "sm_89"): 320,
    ("glu_backward_kernel", "sm_100"): 32,
    ("glu_backward_kernel", "sm_120"): 32,
}

# Where the rows of groups end.
_ENDS = Loaded(least=0, most="rows", ascending=True)

LOADED = {
    (kernel, "groups.ends"): _ENDS for kernel in ("glu_kernel", "glu_backward_kernel", "_sum_runs_kernel")
}
