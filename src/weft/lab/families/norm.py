"""Workloads of the norms: hidden states, per-head norms, low-rank norms, adaptive norms of diffusion transformers."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...ops import layer_norm, rms_norm
from ...ops.norm.arguments import NormNeeds
from ..problem import Call, Inputs, Size, Workload, run_op

# The shape, by the model it comes from. "rows" are tokens.
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

# The sets of options: arguments of the function, and these settings of a workload:
#   function   rms_norm unless it is layer_norm
#   tensors    which of weight, bias, residual, pre_bias to make
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
    """Trained parameters in the dtype of the activations, or in fp32: both occur, the first more often."""
    offset = settings.get("weight_offset", 0.0)
    made = {}
    if "weight" in settings["tensors"]:
        made["weight"] = inputs.normal(cols, mean=1.0 - offset, std=0.2)
    if "bias" in settings["tensors"]:
        made["bias"] = inputs.normal(cols, std=0.2)
    if "pre_bias" in settings["tensors"]:
        made["pre_bias"] = inputs.normal(cols, std=0.2)
    return made


def _residual(inputs: Inputs, shape: tuple[int, ...], settings: dict[str, Any]) -> Tensor:
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
    """The backward of the same call, which reads h, the gradients and the statistics."""
    settings = dict(workload.settings)
    cols, layer = shape[-1], settings.get("function") is layer_norm
    unrounded, wide = settings.get("unrounded_sum", False), settings.get("wide", False)
    h = _residual(inputs, shape, settings)  # the residual itself, if the sum is added up again
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
        centred = flat if mean is None else flat - mean[:, None]
        rstd = 1.0 / torch.sqrt(centred.square().mean(1) + 1e-5)
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
        "needs": NormNeeds(
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
    """`moves` and `rereads` of a workload that moves more than the least bytes."""
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
    found = []
    for options, names in used.items():
        settings = OPTIONS[options]
        if backward:
            settings = {k: v for k, v in settings.items() if k not in ("quantize", "columnwise", "packed")}
        found += [
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
    return found


# A quantising norm has the backward of the plain one, so only plain ones are listed.
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
