"""Workloads of the gated norm of linear attention's outputs, in groups or by heads."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...ops import gated_norm
from ...ops.norm.gated.arguments import GatedNormGradients
from ..chain import EPS, chain
from ..family import Family
from ..problem import Call, Inputs, Size, Workload, run_op
from ..truth import DENORMAL, EPS32, ROUNDINGS, Near, arguments, straight

# Shapes of x, named by the model they come from. "rows" are tokens of one sequence.
SHAPES: dict[str, tuple[Size, ...]] = {
    "linghe/attention": (2, "rows", 2048),
    "qwen3-next-80b-a3b/heads": ("rows", 32, 128),
    "gla-340m/values": (2, "rows", 1024),
    "odd/200": (2, "rows", 200),
}

# Sets of options: arguments of the function.
_LINGHE: dict[str, Any] = {"groups": 4, "transpose": True}
_ODD: dict[str, Any] = {**_LINGHE, "act": "silu", "weight_offset": 1.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "groups": _LINGHE,
    "silu": {"act": "silu"},
    "qwen3-next": {"act": "silu", "casting": "llama"},
    "groups-silu": _ODD,
    "1x128": {**_LINGHE, "quantize": "1x128"},
    "1x128-both": {**_LINGHE, "quantize": "1x128", "columnwise": True},
    "mx-both": {**_ODD, "quantize": "mx", "columnwise": True},
    "row-fp8": {**_LINGHE, "quantize": "row"},
}

_TRAINED = (
    ("groups", "linghe/attention", 4096),
    ("silu", "qwen3-next-80b-a3b/heads", 1024),
    ("qwen3-next", "qwen3-next-80b-a3b/heads", 1024),
    ("groups-silu", "odd/200", 4096),
    ("1x128-both", "gla-340m/values", 1024),
    ("mx-both", "odd/200", 1024),
)
_SERVED = (("1x128", "linghe/attention", 64), ("row-fp8", "linghe/attention", 8))


def _arguments(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> dict[str, Any]:
    settings = dict(workload.settings)
    first = (shape[1], shape[0], *shape[2:]) if settings.get("transpose") else shape
    tensors = {"x": inputs.activation(*shape), "gate": inputs.normal(*first, std=2.0)}
    tensors["weight"] = inputs.normal(shape[-1], mean=1.0 - settings.get("weight_offset", 0.0), std=0.2)
    groups = settings.get("groups", 1)
    if shape[-1] % groups:  # only in tests with odd sizes
        settings["groups"] = 1
    return {**tensors, **settings}


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    return Call(gated_norm, _arguments(workload, inputs, shape))


def _build_backward(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    """Build the backward of the same call, which reads the inputs, the gradient and the statistics."""
    forward = _arguments(workload, inputs, shape)
    x, gate = forward["x"], forward["gate"]
    groups, transpose = forward.get("groups", 1), forward.get("transpose", False)
    rows = gate.numel() // max(shape[-1], 1) * groups
    if x.device.type == "meta":
        rstd = torch.empty(rows, device="meta")
    else:
        transposed = x.transpose(0, 1) if transpose else x
        rstd = 1.0 / torch.sqrt(transposed.reshape(rows, shape[-1] // groups).float().square().mean(1) + 1e-6)
    kwargs: dict[str, Any] = {
        "x": x,
        "gate": gate,
        "dy": inputs.normal(*gate.shape),
        "weight": forward["weight"],
        "rstd": rstd,
        "groups": groups,
        "act": forward.get("act", "sigmoid"),
        "weight_offset": forward.get("weight_offset", 0.0),
        "casting": forward.get("casting", "fp32"),
        "transpose": transpose,
        "needs": GatedNormGradients(True, True, True),
    }
    return Call(functools.partial(run_op, "gated_norm_backward"), kwargs)


def _rereads(settings: dict[str, Any]) -> dict[str, Any]:
    """Return `moves` and `rereads` of a workload that moves more than the minimum of bytes."""
    moves, why = 1.02, ""
    if settings.get("quantize") == "row":
        moves, why = 2.6, "one scale to several groups: y in fp32 lies between"
    elif settings.get("columnwise"):
        moves, why = 1.67, "the statistics of a group come before the first code of a column"
    return {"rereads": why, "moves": moves}


def _named(used: tuple[tuple[str, str, int], ...], tag: str, backward: bool = False) -> list[Workload]:
    return [
        Workload(
            op="gated_norm_backward" if backward else "gated_norm",
            name=name,
            options=options,
            shape=SHAPES[name],
            rows=rows,
            build=_build_backward if backward else _build,
            tags=frozenset({tag, "backward"} if backward else {tag}),
            settings=tuple(OPTIONS[options].items()),
            **_rereads(OPTIONS[options]),
        )
        for options, name, rows in used
    ]


# A quantizing norm has the backward of the plain norm, so only plain norms are listed.
_BACKWARD = tuple(used for used in _TRAINED if "quantize" not in OPTIONS[used[0]])

WORKLOADS: tuple[Workload, ...] = (
    *_named(_TRAINED, "training"),
    *_named(_SERVED, "inference"),
    *_named(_BACKWARD, "training", backward=True),
)


# ---- truth ----------------------------------------------------------------------------------------------------

FEW = ROUNDINGS * EPS32
TINY = 2.0**-125  # where exp of fp32 ends


def _noise(g: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return the possible fp32 errors of f(g) and f'(g).

    Rounding an exponent z changes the power by |z| roundings. Far from zero the slope of a sigmoid is as small as the
    power, and as precise."""
    s, rest = torch.sigmoid(g), torch.sigmoid(-g)
    steps = FEW * (1 + g.abs())
    if activation == "sigmoid":
        return steps * s + TINY, steps * s * rest + TINY
    return steps * (g * s).abs() + TINY * g.abs(), steps * s * (1 + g.abs() * rest) + TINY * (1 + g.abs())


def _activation(g: Tensor, activation: str) -> Tensor:
    """Compute f(g) such that autograd's slope keeps full precision; PyTorch's own slope contains 1 - sigmoid."""
    e = torch.exp(torch.where(g >= 0, -g, g))
    s = torch.where(g >= 0, 1.0, e) / (1.0 + e)
    return s if activation == "sigmoid" else g * s


def _rounded(value: Tensor, sway: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return value rounded to dtype, and the distance to which value ± sway may round; the gradient passes through."""
    low, high = (value.detach() + side * sway for side in (-1, 1))
    return straight(value, dtype), (high.to(dtype).double() - low.to(dtype).double()).abs()


def gated_norm_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return y, and with an upstream gradient the gradients of x, gate and weight."""
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
    z_cast, weighted = z, z * weight
    flips = weighted_flips = torch.zeros_like(z)  # where fp32 may round to the other side
    if a["casting"] == "llama":
        io = a["x"].dtype
        z_cast, flips = _rounded(z, FEW * z.detach().abs(), io)
        weighted = z_cast * weight
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
    expected: dict[str, Near | Tensor] = {"y": Near(y.detach(), noise_y)}
    if not gradients:
        return expected
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
        terms = (dy * z_cast).abs() * (f_noise + FEW * f.abs()) + speck * (1 + r) + flips * (dy * f).abs()
        noises["weight"] = terms.reshape(-1, terms.shape[-1]).sum(0)
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        expected[f"d{name}"] = Near(leaf.grad, noises[name])
    return expected


def gated_norm_backward_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the gradients of the formula for a call of the op the way autograd does."""
    names = ("x", "gate", "weight", "groups", "act", "weight_offset", "casting", "transpose")
    expected = gated_norm_truth(Call(gated_norm, {name: call[name] for name in names}), {"y": call["dy"]})
    return {"y": expected["dx"], "output1": expected["dgate"], "output2": expected["dweight"]}


# ---- in plain PyTorch -----------------------------------------------------------------------------------------


def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """Compute in the order of x, since Inductor fails on the order of the gate."""
    h = x.float().unflatten(-1, (4, -1))
    y = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS)).flatten(-2) * weight.float()
    gated: Tensor = y * torch.sigmoid(gate.transpose(0, 1).float())
    return gated.to(x.dtype).transpose(0, 1).contiguous()


def _gated_norm_backward(
    x: Tensor, gate: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, ...]:
    """Compute in the order of x, one group at a time, since Inductor fails on other ways to write it."""
    batch, length, _ = x.shape
    statistics = rstd.view(length, batch, 4).transpose(0, 1)
    parts, gates, sums = [], [], []
    for i, (h, g, d, w) in enumerate(
        zip(*(tensor.float().chunk(4, -1) for tensor in (x, gate, dy, weight)), strict=True)
    ):
        r, d, share = statistics[..., i : i + 1], d.transpose(0, 1), torch.sigmoid(g.transpose(0, 1))
        z, t = h * r, d * share * w
        parts.append((r * (t - z * (t * z).mean(-1, keepdim=True))).to(x.dtype))
        gates.append((d * z * w * share * (1 - share)).to(x.dtype))
        sums.append((d * share * z).sum((0, 1)).to(weight.dtype))
    return torch.cat(parts, -1), torch.cat(gates, -1).transpose(0, 1).contiguous(), torch.cat(sums)


FAMILY = Family(
    workloads=WORKLOADS,
    truths={"gated_norm": gated_norm_truth, "gated_norm_backward": gated_norm_backward_truth},
    chains={
        ("gated_norm", "groups"): chain(_gated_norm, "x", "gate", "weight"),
        ("gated_norm_backward", "groups"): chain(_gated_norm_backward, "x", "gate", "dy", "weight", "rstd"),
    },
)
