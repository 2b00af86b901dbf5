"""Workloads of norms: hidden states, per-head norms, low-rank norms, adaptive norms of diffusion transformers."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import Format
from ...ops import layer_norm, rms_norm
from ...ops.norm.arguments import NormGradients
from ..chain import EPS, chain, codes_and_scales
from ..family import Compute, Family
from ..problem import Call, Inputs, Size, Workload, run_op
from ..truth import DENORMAL, EPS32, ROUNDINGS, Near, arguments, near, straight
from .quantize import quantize_both

# Shapes, named by the model they come from. "rows" are tokens.
HIDDEN: dict[str, tuple[Size, ...]] = {
    "linghe/hidden": ("rows", 2048),
    "llama3-8b/hidden": ("rows", 4096),
    "llama3-70b/hidden": ("rows", 8192),
    "qwen3-30b-a3b/hidden": ("rows", 2048),
    "deepseek-v3/hidden": ("rows", 7168),
    "deepseek-v3/q-lora": ("rows", 1536),
    "deepseek-v3/kv-lora": ("rows", 512),
    "gemma-7b/hidden": ("rows", 3072),
    "gemma2-9b/hidden": ("rows", 3584),
    "flux/hidden": (2, "rows", 3072),
    "dit-xl/hidden": (2, "rows", 1152),
    "qwen3-30b-a3b/q-heads": (2, "rows", 32, 128),
    "qwen3-30b-a3b/k-heads": (2, "rows", 4, 128),
    "odd/1": ("rows", 1),
    "odd/33": ("rows", 33),
    "odd/200": ("rows", 200),
    "odd/760": ("rows", 760),
    "odd/1025": ("rows", 1025),
    "long/32768": ("rows", 32768),
    "long/131072": ("rows", 131072),
}

# Sets of options: arguments of the function, and these settings of a workload:
#   function   rms_norm unless it is layer_norm
#   tensors    which of weight, bias, residual, pre_bias to create
#   modulation "sample" or "row": [samples or rows, 3K or 2K] in one tensor
#   residual_gate "sample" or "row": [samples or rows, K]
#   wide       the residual is in fp32
#   packed     x is the first heads of a packed QKV projection
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"tensors": ("weight",)},
    "no-weight": {"tensors": ()},
    "residual": {"tensors": ("weight", "residual")},
    "gemma": {"tensors": ("weight",), "weight_offset": 1.0},
    "llama": {"tensors": ("weight", "residual"), "casting": "llama"},
    "per-head": {"tensors": ("weight",), "packed": True},
    "layer": {"function": layer_norm, "tensors": ("weight", "bias")},
    "layer-residual": {"function": layer_norm, "tensors": ("weight", "bias", "residual")},
    "adaln-sample": {"function": layer_norm, "tensors": (), "modulation": "sample"},
    "adaln-row": {"function": rms_norm, "tensors": ("weight",), "modulation": "row"},
    "pre-bias": {"tensors": ("weight", "pre_bias")},
    "pre-bias-residual": {"function": layer_norm, "tensors": ("weight", "bias", "residual", "pre_bias")},
    "gated-sample": {
        "function": layer_norm,
        "tensors": ("residual", "pre_bias"),
        "modulation": "sample",
        "residual_gate": "sample",
    },
    "gated-row": {"tensors": ("weight", "residual"), "residual_gate": "row"},
    "fp32-residual": {
        "tensors": ("weight", "residual"),
        "wide": True,
        "casting": "llama",
        "out_dtype": "promote",
    },
    "unrounded-sum": {
        "tensors": ("weight", "residual", "pre_bias"),
        "unrounded_sum": True,
        "casting": "llama",
    },
    "1x128": {"tensors": ("weight", "residual"), "quantize": "1x128"},
    "1x128-both": {"tensors": ("weight",), "quantize": "1x128", "columnwise": True},
    "1x128-residual-both": {"tensors": ("weight", "residual"), "quantize": "1x128", "columnwise": True},
    "mx-both": {"tensors": ("weight",), "quantize": "mx", "columnwise": True},
    "nvfp4": {"tensors": ("weight", "residual"), "quantize": "nvfp4"},
    "row-fp8": {"tensors": ("weight", "residual"), "quantize": "row"},
    "static-fp8": {"tensors": ("weight", "residual"), "quantize": "tensor", "quant_scale": 0.02},
    "static-fp8-plain": {
        "tensors": ("weight", "residual"),
        "quantize": "tensor",
        "quant_scale": 0.02,
        "return_plain": True,
    },
    "1x128-both-plain": {
        "function": layer_norm,
        "tensors": ("weight", "bias"),
        "quantize": "1x128",
        "columnwise": True,
        "return_plain": True,
    },
    "pre-bias-1x128-both": {"tensors": ("weight", "pre_bias"), "quantize": "1x128", "columnwise": True},
    "gated-fp8": {
        "tensors": ("residual", "pre_bias"),
        "modulation": "sample",
        "residual_gate": "sample",
        "quantize": "tensor",
        "quant_scale": 0.02,
    },
    "adaln-row-fp8": {
        "function": layer_norm,
        "tensors": (),
        "modulation": "sample",
        "quantize": "row",
    },
}

TRAINING = (8192,)
INFERENCE = (1, 8, 64)

_TRAINED: dict[str, tuple[str, ...]] = {
    "plain": (
        "linghe/hidden",
        "llama3-8b/hidden",
        "llama3-70b/hidden",
        "deepseek-v3/q-lora",
        "deepseek-v3/kv-lora",
        "odd/33",
        "odd/200",
        "odd/1025",
        "long/32768",
        "long/131072",
    ),
    "no-weight": ("deepseek-v3/kv-lora",),
    "residual": ("llama3-8b/hidden", "deepseek-v3/hidden", "odd/760"),
    "gemma": ("gemma-7b/hidden", "gemma2-9b/hidden"),
    "llama": ("llama3-8b/hidden", "odd/200"),
    "per-head": ("qwen3-30b-a3b/q-heads", "qwen3-30b-a3b/k-heads"),
    "layer": ("llama3-8b/hidden", "odd/760", "odd/1", "long/32768"),
    "layer-residual": ("dit-xl/hidden",),
    "adaln-sample": ("flux/hidden", "dit-xl/hidden"),
    "adaln-row": ("flux/hidden", "odd/200"),
    "pre-bias": ("odd/1025",),
    "pre-bias-residual": ("dit-xl/hidden",),
    "gated-sample": ("flux/hidden", "dit-xl/hidden"),
    "gated-row": ("odd/200",),
    "fp32-residual": ("odd/1025",),
    "unrounded-sum": ("odd/1025",),
    "1x128": ("linghe/hidden", "deepseek-v3/hidden"),
    "1x128-both": ("linghe/hidden", "llama3-8b/hidden", "odd/200"),
    "1x128-residual-both": ("qwen3-30b-a3b/hidden", "deepseek-v3/hidden"),
    "mx-both": ("llama3-8b/hidden", "odd/760"),
    "1x128-both-plain": ("odd/200",),
    "pre-bias-1x128-both": ("odd/200",),
}
_SERVED: dict[str, tuple[str, ...]] = {
    "residual": ("llama3-8b/hidden", "llama3-70b/hidden", "qwen3-30b-a3b/hidden"),
    "per-head": ("qwen3-30b-a3b/q-heads",),
    "1x128": ("qwen3-30b-a3b/hidden", "deepseek-v3/hidden"),
    "nvfp4": ("llama3-70b/hidden", "odd/33"),
    "row-fp8": ("llama3-8b/hidden", "odd/1025"),
    "static-fp8": ("llama3-70b/hidden",),
    "static-fp8-plain": ("llama3-8b/hidden",),
    "adaln-row-fp8": ("flux/hidden",),
    "gated-fp8": ("dit-xl/hidden",),
}


def _weights(inputs: Inputs, cols: int, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Draw trained parameters in the dtype of the activations, or in fp32: both occur, the first more often."""
    offset = settings.get("weight_offset", 0.0)
    parameters = {}
    if "weight" in settings["tensors"]:
        parameters["weight"] = inputs.normal(cols, mean=1.0 - offset, std=0.2)
    if "bias" in settings["tensors"]:
        parameters["bias"] = inputs.normal(cols, std=0.2)
    if "pre_bias" in settings["tensors"]:
        parameters["pre_bias"] = inputs.normal(cols, std=0.2)
    return parameters


def _residual(inputs: Inputs, shape: tuple[int, ...], settings: dict[str, Any]) -> Tensor:
    """Draw a residual, in fp32 if it is wide."""
    if settings.get("wide"):
        return inputs.normal(*shape, dtype=torch.promote_types(inputs.dtype, torch.float32))
    return inputs.activation(*shape)


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    settings = dict(workload.settings)
    cols = shape[-1]
    kwargs: dict[str, Any] = {}
    if settings.get("packed"):
        *lead, heads, _ = shape
        packed = inputs.activation(*lead, (heads + 8) * cols)  # the heads of k and v follow those of q
        kwargs["x"] = packed[..., : heads * cols].view(*lead, heads, cols)
    else:
        kwargs["x"] = inputs.activation(*shape)
    kwargs |= _weights(inputs, cols, settings)
    if "residual" in settings["tensors"]:
        kwargs["residual"] = _residual(inputs, shape, settings)
    if settings.get("modulation") == "sample":
        kwargs["modulation"] = inputs.normal(shape[0], 3 * cols, std=0.3)
    elif settings.get("modulation") == "row":
        kwargs["modulation"] = inputs.normal(*shape[:-1], 2 * cols, std=0.3)
    if settings.get("residual_gate") == "sample":
        kwargs["residual_gate"] = inputs.normal(shape[0], cols, std=0.3)
    elif settings.get("residual_gate") == "row":
        kwargs["residual_gate"] = inputs.normal(*shape[:-1], cols, std=0.3)
    for name in (
        "weight_offset", "unrounded_sum", "casting", "out_dtype", "quantize", "columnwise", "return_plain",
    ):  # fmt: skip
        if name in settings:
            kwargs[name] = settings[name]
    if "quant_scale" in settings:
        kwargs["quant_scale"] = inputs.normal(1, mean=settings["quant_scale"], std=0.0, dtype=torch.float32)
    return Call(settings.get("function", rms_norm), kwargs)


def _build_backward(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    """Build the backward of the same call, which reads h, the gradients and the statistics."""
    settings = dict(workload.settings)
    cols, layer = shape[-1], settings.get("function") is layer_norm
    unrounded, wide = settings.get("unrounded_sum", False), settings.get("wide", False)
    h = _residual(inputs, shape, settings)  # the residual itself, if the sum is recomputed
    rows = h.numel() // max(cols, 1)
    weights = _weights(inputs, cols, settings)
    residual = "residual" in settings["tensors"]
    scale, gate = (
        inputs.normal(shape[0] if settings[name] == "sample" else rows, cols, std=0.3)
        if name in settings
        else None
        for name in ("modulation", "residual_gate")
    )
    x = inputs.activation(*shape) if gate is not None or unrounded else None
    if h.device.type == "meta":
        rstd = torch.empty(rows, device="meta")
        mean = torch.empty(rows, device="meta") if layer else None
    else:
        flat = h.reshape(rows, cols).float()
        if unrounded and x is not None:
            v = x.reshape(rows, cols).float() + (
                weights["pre_bias"].float() if "pre_bias" in weights else 0.0
            )
            flat = flat + (
                v if gate is None else v * gate.float().repeat_interleave(rows // max(len(gate), 1), 0)
            )
        mean = flat.mean(1) if layer else None
        centered = flat if mean is None else flat - mean[:, None]
        rstd = 1.0 / torch.sqrt(centered.square().mean(1) + 1e-5)
    kwargs: dict[str, Any] = {
        "h": h,
        "dy": inputs.normal(*shape),
        "dresidual": inputs.normal(*shape, dtype=h.dtype) if residual else None,
        "x": x,
        "pre_bias": weights.get("pre_bias"),
        "residual_gate": gate,
        "weight": weights.get("weight"),
        "bias": weights.get("bias"),
        "scale": scale,
        "rstd": rstd,
        "mean": mean,
        "weight_offset": settings.get("weight_offset", 0.0),
        "casting": settings.get("casting", "fp32"),
        "unrounded_sum": unrounded,
        "x_dtype": inputs.dtype,
        "residual_dtype": h.dtype,
        "needs": NormGradients(
            x=True,
            weight="weight" in weights,
            bias="bias" in weights,
            scale=scale is not None,
            shift=scale is not None,
            residual=gate is not None or wide,
            residual_gate=gate is not None,
            pre_bias="pre_bias" in weights,
        ),
    }
    return Call(functools.partial(run_op, "norm_backward"), kwargs)


def _rereads(shape: tuple[Size, ...], settings: dict[str, Any], backward: bool) -> dict[str, Any]:
    """Return `moves` and `rereads` of a workload that moves more than the minimum of bytes."""
    layer, long = settings.get("function") is layer_norm, shape[-1] > 16384  # type: ignore[operator]
    moves, why = 1.02, ""
    if backward and long:
        moves = 4.4 if layer else 3.05
        why = "a row longer than a program's registers is read twice, and its sums are kept in memory"
    elif backward and (settings["tensors"] or settings.get("modulation") == "sample"):
        several = {"bias", "pre_bias"} & {*settings["tensors"]} or settings.get("residual_gate") == "sample"
        moves = 1.09 if several else 1.05
        why = "partial sums of the parameters' gradients are written and read back"
    elif settings.get("quantize") == "nvfp4":
        moves, why = 1.75, "the amax of the whole tensor comes before its first code"
    elif settings.get("columnwise"):
        moves, why = 1.57, "the statistics of a row come before the first code of a column"
    elif long:
        moves, why = 1.51, "a row longer than a program's registers is read twice"
    return {"rereads": why, "moves": moves}


def _named(
    used: dict[str, tuple[str, ...]], rows: Iterable[int], tag: str, backward: bool = False
) -> list[Workload]:
    workloads = []
    for options, names in used.items():
        settings = OPTIONS[options]
        if backward:
            settings = {k: v for k, v in settings.items() if k not in ("quantize", "columnwise", "packed")}
        workloads += [
            Workload(
                op="norm_backward" if backward else "norm",
                name=name,
                options=options,
                shape=HIDDEN[name],
                rows=count,
                build=_build_backward if backward else _build,
                tags=frozenset({tag, "backward"} if backward else {tag}),
                settings=tuple(settings.items()),
                **_rereads(HIDDEN[name], settings, backward),
            )
            for name in names
            for count in rows
        ]
    return workloads


# A quantizing norm has the backward of the plain norm, so only plain norms are listed.
_BACKWARD = {
    options: names
    for options, names in _TRAINED.items()
    if "quantize" not in OPTIONS[options] and "packed" not in OPTIONS[options]
}

WORKLOADS: tuple[Workload, ...] = (
    *_named(_TRAINED, TRAINING, "training"),
    *_named(_SERVED, INFERENCE, "inference"),
    *_named(_BACKWARD, TRAINING, "training", backward=True),
)


# ---- truth ----------------------------------------------------------------------------------------------------


def norm_truth(call: Call, dy: Tensor | None = None, dresidual: Tensor | None = None) -> dict[str, Near]:
    """Return y and the residual, if any, and with an upstream gradient the gradient of each input."""
    a = arguments(call)
    io, layer = a["x"].dtype, call.function is layer_norm
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
    # Each step is rounded to fp32, and the last step to the dtype of h.
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
    expected = {"y": Near(y.detach().view(x.shape), noise_y.view(x.shape))}
    if "residual" in leaves:
        expected["residual"] = Near(h.detach(), torch.zeros_like(h))
    if dy is None and dresidual is None:
        return expected

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
    noise |= _noise_before(noise["residual"], gate.detach(), gated.detach(), leaves.get("residual_gate"))
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
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        expected[f"d{name}"] = Near(leaf.grad, noise[name])
    return expected


def _noise_before(dh: Tensor, gate: Tensor, v: Tensor, like: Tensor | None) -> dict[str, Tensor]:
    """Return the noise of the gradients of x, pre_bias and residual_gate, from the noise of the gradient of h."""
    cols = dh.shape[-1]
    dv = dh * gate.abs()
    noise = {"x": dv, "pre_bias": dv.reshape(-1, cols).sum(0)}
    if like is not None:
        samples = like.numel() // cols
        noise["residual_gate"] = (dh * v.abs()).reshape(samples, -1, cols).sum(1).view(like.shape)
    return noise


def _forward_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return everything that a call of a norm returns, and the gradients of its inputs."""
    a, dy = arguments(call), gradients.get("y")
    if "plain" in gradients:  # autograd adds the gradients of both results
        dy = gradients["plain"] if dy is None else dy + gradients["plain"]
    expected: dict[str, Near | Tensor] = {**norm_truth(call, dy, gradients.get("residual"))}
    if a["return_plain"]:
        expected["plain"] = expected["y"]
    cols = a["x"].shape[-1]
    if a["modulation"] is not None and a["modulation"].shape[-1] == 3 * cols:
        expected["gate"] = a["modulation"].split(cols, -1)[2]
    if a["return_amax"]:
        y = expected["y"]
        assert isinstance(y, Near)
        expected["amax"] = Near(y.truth.abs().amax(), y.noise.amax())
    return expected


def _backward_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the gradients of the formula for a call of the op the way autograd does."""
    forward = Call(
        rms_norm if call["mean"] is None else layer_norm,
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
    expected = norm_truth(forward, call["dy"], call["dresidual"])
    if scale is not None:  # halves of the modulation's
        packed = expected["dmodulation"]
        for index, name in enumerate(("dscale", "dshift")):
            halves = (t.view(scale.shape[0], 2, -1)[:, index] for t in (packed.truth, packed.noise))
            expected[name] = Near(*halves)
    if not call["unrounded_sum"]:
        expected |= _truth_before(call, expected["dx"])
    names = [f"d{name}" for name, need in call["needs"]._asdict().items() if need]
    outputs = ("y", *(f"output{i}" for i in range(1, len(names))))
    return {output: expected[name] for output, name in zip(outputs, names, strict=True)}


def _truth_before(call: Call, dh: Near) -> dict[str, Near]:
    """Return the gradients of the terms of h."""
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
    noise = {"residual": dh.noise, **_noise_before(dh.noise, by_row, v, gate)}
    return {f"d{name}": Near(value, noise[name]) for name, value in truth.items()}


def _result_names(call: Call) -> list[str]:
    """Return the names of the requested results of a norm."""
    a = arguments(call)
    gated = a["modulation"] is not None and a["modulation"].shape[-1] == 3 * a["x"].shape[-1]
    returned = {"y": True, "plain": a["return_plain"], "residual": a["residual"] is not None, "gate": gated}
    returned["amax"] = a["return_amax"]
    return [name for name, is_returned in returned.items() if is_returned]


def own_value(call: Call, compute: Compute) -> Tensor:
    """Return the fp32 y that a quantizing norm encodes: the y of a plain norm that sums rows in the same chunks."""
    dropped = ("quantize", "rowwise", "columnwise", "quant_scale", "return_amax", "return_plain")
    plain = Call(call.function, {k: v for k, v in call.kwargs.items() if k not in dropped})
    launch, group = importlib.import_module("weft.ops.norm.launch"), Format.of(call["quantize"]).group
    choose = launch.row_config
    with patch.object(launch, "row_config", lambda cols, _, target: choose(cols, group, target)):
        value = compute(plain.with_(out_dtype=torch.float32))["y"]
    near(value, norm_truth(plain)["y"])
    return value


# ---- in plain PyTorch -----------------------------------------------------------------------------------------


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def _rms_norm_both(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    h = x.float()
    return quantize_both(h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * weight.float())


def _rms_norm_backward(x: Tensor, weight: Tensor, rstd: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    h, d = x.float(), dy.float()
    z, t = h * rstd[:, None], d * weight.float()
    dx = rstd[:, None] * (t - z * (t * z).mean(-1, keepdim=True))
    return dx.to(x.dtype), (d * z).sum(0).to(weight.dtype)


FAMILY = Family(
    workloads=WORKLOADS,
    truths={"norm": _forward_truth, "norm_backward": _backward_truth},
    encoded={"norm": lambda call, compute: {"y": own_value(call, compute)}},
    results={rms_norm: _result_names, layer_norm: _result_names},
    chains={
        ("norm", "plain"): chain(_rms_norm, "x", "weight"),
        ("norm", "1x128-both"): chain(_rms_norm_both, "x", "weight", view=codes_and_scales),
        ("norm_backward", "plain"): chain(_rms_norm_backward, "h", "weight", "rstd", "dy"),
    },
    # For sm_110, ptxas allocates at most 168 registers to 128 threads. Modulation per sample takes 186 on sm_100.
    spills={("norm_backward_kernel", "sm_110"): 12},
)
