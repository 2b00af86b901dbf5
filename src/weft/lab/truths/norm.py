"""What the norms must compute, in float64 and by autograd, written from their documented formulas alone."""

from __future__ import annotations

import importlib
from unittest.mock import patch

import torch
from torch import Tensor
from triton_loom.testing import EPS32

import weft

from ... import Format
from ..calls import results
from ..problem import Call
from ..truth import DENORMAL, ROUNDINGS, Near, arguments, near, straight


def norm(call: Call, dy: Tensor | None = None, dresidual: Tensor | None = None) -> dict[str, Near]:
    """y and residual (if there is one), and with an upstream gradient that of each input."""
    a = arguments(call)
    io, layer = a["x"].dtype, call.function is weft.layer_norm
    if a["residual"] is not None:
        io = torch.promote_types(io, a["residual"].dtype)
    leaves = {
        name: a[name].detach().double().requires_grad_()
        for name in ("x", "weight", "bias", "residual", "pre_bias", "residual_gate", "modulation")
        if a[name] is not None
    }
    x = leaves["x"]
    rows, cols = x.numel() // x.shape[-1], x.shape[-1]
    h, exact, gate = x, a["x"].detach().float(), torch.ones(1, cols, dtype=torch.float64)
    if "pre_bias" in leaves:
        h, exact = h + leaves["pre_bias"], exact + a["pre_bias"].detach().float()
    gated = h
    if "residual_gate" in leaves:
        gate = leaves["residual_gate"].reshape(-1, cols)
        gate = gate.repeat_interleave(rows // gate.shape[0], 0).view(x.shape)
        h, exact = h * gate, exact * gate.detach().float()
    if "residual" in leaves:
        h, exact = h + leaves["residual"], exact + a["residual"].detach().float()
    # Each step is rounded to fp32, and the last one to the dtype of h.
    rounded, unrounded = (h + (sum.double() - h.detach()) for sum in (exact.to(io), exact))
    h = rounded
    flat = (unrounded if a["unrounded_sum"] else rounded).reshape(rows, cols)
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
    from_residual: Tensor | float = 0.0
    if dresidual is not None:
        from_residual = dresidual.detach().double().abs()
        total = total + (h * dresidual.detach().double()).sum()
    total.backward()
    before, d = d.abs(), d.abs() * slope
    t = d * weight.detach().abs()
    r = rstd.detach()
    dh = r * (t + z_size * (t * z_size).mean(1, keepdim=True) + (t.mean(1, keepdim=True) if layer else 0.0))
    noise = {"residual": few * (dh.view(x.shape) + from_residual)}
    noise |= noise_before(noise["residual"], gate.detach(), gated.detach(), leaves.get("residual_gate"))
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


def noise_before(dh: Tensor, gate: Tensor, v: Tensor, like: Tensor | None) -> dict[str, Tensor]:
    """Noise of the gradients of x, pre_bias and residual_gate, from that of the gradient of h."""
    cols = dh.shape[-1]
    dv = dh * gate.abs()
    noise = {"x": dv, "pre_bias": dv.reshape(-1, cols).sum(0)}
    if like is not None:
        samples = like.numel() // cols
        noise["residual_gate"] = (dh * v.abs()).reshape(samples, -1, cols).sum(1).view(like.shape)
    return noise


def _forward(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    a, dy = arguments(call), gradients.get("y")
    if "plain" in gradients:  # the sum that autograd makes of both results' gradients
        dy = gradients["plain"] if dy is None else dy + gradients["plain"]
    found: dict[str, Near | Tensor] = {**norm(call, dy, gradients.get("residual"))}
    if a["return_plain"]:
        found["plain"] = found["y"]
    cols = a["x"].shape[-1]
    if a["modulation"] is not None and a["modulation"].shape[-1] == 3 * cols:
        found["gate"] = a["modulation"].split(cols, -1)[2]
    if a["return_amax"]:
        y = found["y"]
        assert isinstance(y, Near)
        found["amax"] = Near(y.truth.abs().amax(), y.noise.amax())
    return found


def _backward(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """As the autograd engine calls it, against the gradients of the formula."""
    forward = Call(
        weft.rms_norm if call["mean"] is None else weft.layer_norm,
        {
            "x": call["h"],
            "weight": call["weight"],
            "bias": call["bias"],
            "eps": 1e-5,
            "weight_offset": call["weight_offset"],
            "casting": call["casting"],
            **({"residual": torch.zeros_like(call["h"])} if call["dresidual"] is not None else {}),
        },
    )
    if call["unrounded_sum"]:
        added = {name: call[name] for name in ("x", "pre_bias", "residual_gate")}
        forward = forward.with_(**added, residual=call["h"], unrounded_sum=True)
    h, scale = call["h"], call["scale"]
    if scale is not None:
        lead = h.shape[:-1] if len(scale) == h.numel() // h.shape[-1] else h.shape[:1]
        forward = forward.with_(modulation=torch.cat([scale, torch.zeros_like(scale)], -1).view(*lead, -1))
    expected = norm(forward, call["dy"], call["dresidual"])
    if scale is not None:  # halves of the modulation's
        packed = expected["dmodulation"]
        for index, name in enumerate(("dscale", "dshift")):
            halves = (t.view(scale.shape[0], 2, -1)[:, index] for t in (packed.truth, packed.noise))
            expected[name] = Near(*halves)
    if not call["unrounded_sum"]:
        expected |= _before(call, expected["dx"])
    names = [f"d{name}" for name, need in call["needs"]._asdict().items() if need]
    outputs = ("y", *(f"output{i}" for i in range(1, len(names))))
    return {output: expected[name] for output, name in zip(outputs, names, strict=True)}


def _before(call: Call, dh: Near) -> dict[str, Near]:
    """Gradients of what h is made of."""
    gate, rows, cols = call["residual_gate"], dh.truth.numel() // dh.truth.shape[-1], dh.truth.shape[-1]
    v, by_row = torch.zeros_like(dh.truth), torch.ones(1, cols, dtype=torch.float64)
    if gate is not None:
        by_row = gate.double().repeat_interleave(rows // len(gate), 0).view(dh.truth.shape)
        v = call["x"].double()
    if call["pre_bias"] is not None:
        v = v + call["pre_bias"].double()
    truth = {"x": dh.truth * by_row, "residual": dh.truth}
    truth["pre_bias"] = truth["x"].reshape(rows, cols).sum(0)
    if gate is not None:
        truth["residual_gate"] = (dh.truth * v).reshape(len(gate), -1, cols).sum(1)
    noise = {"residual": dh.noise, **noise_before(dh.noise, by_row, v, gate)}
    return {f"d{name}": Near(value, noise[name]) for name, value in truth.items()}


def _names(call: Call) -> list[str]:
    a = arguments(call)
    gated = a["modulation"] is not None and a["modulation"].shape[-1] == 3 * a["x"].shape[-1]
    there = {"y": True, "plain": a["return_plain"], "residual": a["residual"] is not None, "gate": gated}
    there["amax"] = a["return_amax"]
    return [name for name, is_there in there.items() if is_there]


def own_value(call: Call) -> Tensor:
    """The fp32 y that a quantising norm encodes: that of a plain norm whose rows are added up in the same pieces."""
    dropped = ("quantize", "rowwise", "columnwise", "quant_scale", "return_amax", "return_plain")
    plain = Call(call.function, {k: v for k, v in call.kwargs.items() if k not in dropped})
    launch, group = importlib.import_module("weft.ops.norm.launch"), Format.of(call["quantize"]).group
    choose = launch.row_config
    with patch.object(launch, "row_config", lambda cols, _, target: choose(cols, group, target)):
        value = results(plain.with_(out_dtype=torch.float32))["y"]
    near(value, norm(plain)["y"])
    return value


TRUTHS = {"norm": _forward, "norm_backward": _backward}
ENCODED = {"norm": lambda call: {"y": own_value(call)}}
RESULTS = {weft.rms_norm: _names, weft.layer_norm: _names}
