"""What the gated norm must compute, in float64 and by autograd, written from its documented formula alone.

For y and every gradient the truth, and the arithmetic error that fp32 may add to it before the last rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton_loom.testing import EPS32

import weft

from ..problem import Call
from ..truth import DENORMAL, ROUNDINGS, Near, arguments, straight

FEW = ROUNDINGS * EPS32
TINY = 2.0**-125  # where exp of fp32 ends


def _noise(g: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """What fp32 may add to f(g) and to f'(g): a rounding of an exponent z is one of |z| in the power. Far from zero
    the slope of a sigmoid is as small as the power is, and as precise."""
    s, rest = torch.sigmoid(g), torch.sigmoid(-g)
    steps = FEW * (1 + g.abs())
    if activation == "sigmoid":
        return steps * s + TINY, steps * s * rest + TINY
    return steps * (g * s).abs() + TINY * g.abs(), steps * s * (1 + g.abs() * rest) + TINY * (1 + g.abs())


def _activation(g: Tensor, activation: str) -> Tensor:
    """Written so that autograd finds the slope with all its digits: PyTorch's has 1 - sigmoid in it."""
    e = torch.exp(torch.where(g >= 0, -g, g))
    s = torch.where(g >= 0, 1.0, e) / (1.0 + e)
    return s if activation == "sigmoid" else g * s


def _rounded(value: Tensor, sway: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(value rounded to dtype, how far apart its neighbours may be rounded to): the gradient passes through."""
    low, high = (value.detach() + side * sway for side in (-1, 1))
    return straight(value, dtype), (high.to(dtype).double() - low.to(dtype).double()).abs()


def gated_norm(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """y, and with an upstream gradient those of x, gate and weight."""
    a = arguments(call)
    names = [name for name in ("x", "gate", "weight") if a[name] is not None]
    leaves = {name: a[name].detach().double().requires_grad_() for name in names}
    gate, groups, activation = leaves["gate"], a["groups"], a["act"]
    x = leaves["x"]
    if x.dim() > gate.dim():
        x = x.flatten(-2)
    if a["transpose"]:
        x = x.transpose(0, 1)
    parts = x.unflatten(-1, (groups, x.shape[-1] // groups))
    rstd = 1 / (parts.square().mean(-1, keepdim=True) + a["eps"]).sqrt()
    z = (parts * rstd).flatten(-2)
    weight = leaves["weight"] + a["weight_offset"] if "weight" in leaves else torch.ones(1).double()
    f = _activation(gate, activation)
    seen, weighted = z, z * weight
    flips = weighted_flips = torch.zeros_like(z)  # where fp32 may round to the other side
    if a["casting"] == "llama":
        io = a["x"].dtype
        seen, flips = _rounded(z, FEW * z.detach().abs(), io)
        weighted = seen * weight
        weighted_flips = flips * weight.detach().abs()
        if "weight" in leaves:
            sway = weighted_flips + FEW * weighted.detach().abs()
            weighted, weighted_flips = _rounded(weighted, sway, torch.promote_types(io, a["weight"].dtype))
    y = weighted * f

    with torch.no_grad():
        r = rstd.expand(parts.shape).flatten(-2)
        f_noise, slope_noise = _noise(gate, activation)
        speck = 2 * DENORMAL
        size = (z * weight).abs()
        noise_y = size * f_noise + FEW * (size * f.abs()) + speck * (1 + r * weight.abs() * (1 + f.abs()))
        noise_y = noise_y + weighted_flips * f.abs()
    found: dict[str, Near | Tensor] = {"y": Near(y.detach(), noise_y)}
    if not gradients:
        return found
    dy = gradients["y"].detach().double()
    y.backward(dy)
    with torch.no_grad():
        twin = gate.detach().clone().requires_grad_()
        with torch.enable_grad():
            _activation(twin, activation).sum().backward()
        assert twin.grad is not None
        t_noise = (dy * weight).abs() * (f_noise + FEW * f.abs())
        group = lambda v: v.unflatten(-1, (groups, -1))  # noqa: E731
        dots = group(t_noise * z.abs()).mean(-1, keepdim=True)
        noise = r * (t_noise + (group(z.abs()) * dots).flatten(-2)) + speck * (1 + r)
        if a["transpose"]:
            noise = noise.transpose(0, 1)
        noises = {"x": noise.reshape(leaves["x"].shape)}
        slope = slope_noise + FEW * twin.grad.abs()
        noises["gate"] = (dy * weighted).abs() * slope + speck * (1 + (dy * weight).abs() * (r + 1))
        noises["gate"] += weighted_flips * (dy * twin.grad).abs()
        terms = (dy * seen).abs() * (f_noise + FEW * f.abs()) + speck * (1 + r) + flips * (dy * f).abs()
        noises["weight"] = terms.reshape(-1, terms.shape[-1]).sum(0)
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        found[f"d{name}"] = Near(leaf.grad, noises[name])
    return found


def gated_norm_backward(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """As the autograd engine calls it, against the gradients of the formula."""
    kept = ("x", "gate", "weight", "groups", "act", "weight_offset", "casting", "transpose")
    found = gated_norm(Call(weft.gated_norm, {name: call[name] for name in kept}), {"y": call["dy"]})
    return {"y": found["dx"], "output1": found["dgate"], "output2": found["dweight"]}


TRUTHS = {f.__name__: f for f in (gated_norm, gated_norm_backward)}
