"""What the ops must compute, in float64 and by autograd, written from their documented formulas alone.

`expected(call, upstream)` gives for every float result and every gradient the truth and the arithmetic error that
fp32 may add to it before the last rounding: a few roundings of the largest term that is added or subtracted.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from accuracy import EPS32
from torch import Tensor

import weft
from weft.workloads import Call

# The longest chain of fp32 roundings on the way to a result: a mean of up to 2^17 squares (in tiles, pairwise),
# rsqrt, three products and two sums. Random walks of that many halves stay well below it.
ROUNDINGS = 16
DENORMAL = 2.0**-149  # numbers below fp32's normal range have this absolute precision


@dataclass(frozen=True)
class Near:
    truth: Tensor
    noise: Tensor


def straight(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to dtype; the gradient passes through."""
    return value + (value.detach().to(dtype).double() - value.detach())


def arguments(call: Call) -> dict[str, Any]:
    bound = inspect.signature(call.function).bind(**call.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def norm(call: Call, dy: Tensor | None = None, dresidual: Tensor | None = None) -> dict[str, Near]:
    """y and residual (if there is one), and with an upstream gradient that of each input."""
    a = arguments(call)
    io, layer = a["x"].dtype, call.function is weft.layer_norm
    leaves = {
        name: a[name].detach().double().requires_grad_()
        for name in ("x", "weight", "bias", "residual", "modulation")
        if a[name] is not None
    }
    x = leaves["x"]
    rows, cols = x.numel() // x.shape[-1], x.shape[-1]
    h = x
    if "residual" in leaves:
        h = x + leaves["residual"]
        exact = (a["x"].float() + a["residual"].float()).to(io).detach().double()
        h = h + (exact - h.detach())
    flat = h.reshape(rows, cols)
    mean = flat.mean(1, keepdim=True) if layer else torch.zeros(rows, 1, dtype=torch.float64)
    rstd = 1 / (flat - mean).square().mean(1, keepdim=True).add(a["eps"]).sqrt()
    z = (flat - mean) * rstd
    flips = torch.zeros_like(z)  # where fp32 may round z to the other side
    if a["casting"] == "llama":
        sway = z.detach().abs() * ROUNDINGS * EPS32
        flips = ((z.detach() + sway).to(io).double() - (z.detach() - sway).to(io).double()).abs()
        z = straight(z, io)
    weight = leaves["weight"] + a["weight_offset"] if "weight" in leaves else torch.ones(cols).double()
    y = z * weight
    if "bias" in leaves:
        y = y + leaves["bias"]
    scale = shift = torch.zeros(1, cols, dtype=torch.float64)
    samples = 1
    if "modulation" in leaves:
        packed = leaves["modulation"]
        packed = packed.reshape(-1, packed.shape[-1])
        samples = packed.shape[0]
        scale, shift = (part.repeat_interleave(rows // samples, 0) for part in packed.split(cols, -1)[:2])
    plain = y
    y = y * (1 + scale) + shift

    z_size = ((flat.abs() + mean.abs()) * rstd).detach()
    plain_size = z_size * weight.detach().abs()
    if "bias" in leaves:
        plain_size = plain_size + leaves["bias"].detach().abs()
    slope = (1 + scale.detach()).abs()
    few = ROUNDINGS * EPS32
    factor = (weight.detach() * slope).abs()
    noise_y = few * (plain_size * slope + shift.detach().abs()) + flips * factor
    noise_y = noise_y + 2 * DENORMAL * (rstd.detach() * factor + 1)
    found = {"y": Near(y.detach().view(x.shape), noise_y.view(x.shape))}
    if "residual" in leaves:
        found["residual"] = Near(h.detach(), torch.zeros_like(h))
    if dy is None and dresidual is None:
        return found

    d = (
        torch.zeros(rows, cols, dtype=torch.float64)
        if dy is None
        else dy.detach().double().reshape(rows, cols)
    )
    total = (y * d).sum()
    from_residual = 0.0
    if dresidual is not None:
        from_residual = dresidual.detach().double().abs()
        total = total + (h * dresidual.detach().double()).sum()
    total.backward()
    before, d = d.abs(), d.abs() * slope
    t = d * weight.detach().abs()
    r = rstd.detach()
    dh = r * (t + z_size * (t * z_size).mean(1, keepdim=True) + (t.mean(1, keepdim=True) if layer else 0.0))
    noise = {"x": few * (dh.view(x.shape) + from_residual)}
    noise["residual"] = noise["x"]
    noise["weight"] = (d * (few * z_size + flips)).sum(0)
    noise["bias"] = few * d.sum(0)
    if "modulation" in leaves:
        per_sample = lambda v: v.reshape(samples, rows // samples, cols).sum(1)  # noqa: E731
        parts = [per_sample(before * (few * plain_size + flips * weight.detach().abs()))]
        parts.append(few * per_sample(before))
        gradient = leaves["modulation"].grad
        assert gradient is not None
        packed_noise = torch.zeros_like(gradient).reshape(samples, -1)
        packed_noise[:, : 2 * cols] = torch.cat(parts, 1)
        noise["modulation"] = packed_noise.view(gradient.shape)
    assert plain.shape == y.shape
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        found[f"d{name}"] = Near(leaf.grad, noise[name])
    return found
