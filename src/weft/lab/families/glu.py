"""Workloads of the gated linear units: feed-forward layers, shared experts, and experts side by side in one tensor."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...ops import glu, glu_backward
from ..problem import Call, Inputs, Size, Workload

# The shape of y, by the model it comes from. "rows" are tokens, or pairs of a token and an expert.
SHAPES: dict[str, tuple[Size, ...]] = {
    "linghe/shared-expert": ("rows", 512),
    "linghe/experts": ("rows", 1024),
    "llama3-8b/ffn": ("rows", 14336),
    "qwen3-30b-a3b/experts": ("rows", 768),
    "deepseek-v3/experts": ("rows", 2048),
    "gpt-oss-20b/experts": ("rows", 2880),
    "gemma2-9b/ffn": ("rows", 14336),
    "nemotron-4-15b/ffn": ("rows", 24576),
    "odd/1": ("rows", 1),
    "odd/33": ("rows", 33),
    "odd/200": (2, "rows", 200),
}

# The sets of options: arguments of the function, and these settings of a workload:
#   tensors     which of up, probs and bias to make
#   experts     how many there are; their numbers of rows are random, and the last but one has none
OPTIONS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "geglu-tanh": {"act": "gelu_tanh", "tensors": ("up",)},
    "geglu": {"act": "gelu", "tensors": ("up", "probs")},
    "reglu": {"act": "relu"},
    "relu2": {"act": "relu2", "layout": "none"},
    "gpt-oss": {
        "layout": "interleaved", "limit": 7.0, "alpha": 1.702, "up_offset": 1.0, "experts": 32, "align": 1,
    },
    "gpt-oss-bias": {
        "tensors": ("bias",), "layout": "interleaved", "limit": 7.0, "alpha": 1.702, "up_offset": 1.0, "experts": 32,
        "align": 1,
    },
    "mlp-bias": {"act": "gelu_tanh", "layout": "none", "tensors": ("bias",)},
    "experts": {"tensors": ("probs",), "experts": 128, "align": 16},
    "1x128": {"quantize": "1x128"},
    "1x128-both": {"quantize": "1x128", "columnwise": True},
    "1x128-both-experts": {
        "tensors": ("probs",), "experts": 32, "align": 16, "quantize": "1x128", "columnwise": True,
    },
    "1x128-both-bias": {
        "tensors": ("probs", "bias"), "experts": 32, "align": 16, "quantize": "1x128", "columnwise": True,
    },
    "1x128-both-experts-128": {
        "tensors": ("probs",), "experts": 256, "align": 128, "quantize": "1x128", "columnwise": True,
    },
    "mx-both-interleaved": {"layout": "interleaved", "quantize": "mx", "columnwise": True},
    "nvfp4": {"quantize": "nvfp4"},
    "row-fp8": {"quantize": "row"},
    "static-fp8": {"quantize": "tensor", "quant_scale": 0.02},
}  # fmt: skip

_TRAINED: dict[str, tuple[tuple[str, int], ...]] = {
    "swiglu": (("llama3-8b/ffn", 8192), ("odd/33", 8192), ("odd/1", 8192)),
    "geglu-tanh": (("gemma2-9b/ffn", 8192),),
    "geglu": (("odd/200", 8192),),
    "reglu": (("odd/200", 8192),),
    "relu2": (("nemotron-4-15b/ffn", 8192),),
    "gpt-oss": (("gpt-oss-20b/experts", 32768),),
    "gpt-oss-bias": (("gpt-oss-20b/experts", 32768),),
    "mlp-bias": (("odd/200", 8192),),
    "experts": (("qwen3-30b-a3b/experts", 65536), ("odd/33", 8192)),
    "1x128-both": (("linghe/shared-expert", 16384), ("odd/200", 8192)),
    "1x128-both-experts": (("linghe/experts", 131072),),
    "1x128-both-bias": (("linghe/experts", 131072),),
    "1x128-both-experts-128": (("deepseek-v3/experts", 65536),),
    "mx-both-interleaved": (("llama3-8b/ffn", 8192), ("odd/33", 8192)),
}
_SERVED: dict[str, tuple[str, ...]] = {
    "swiglu": ("llama3-8b/ffn",),
    "1x128": ("qwen3-30b-a3b/experts",),
    "nvfp4": ("llama3-8b/ffn", "odd/33"),
    "row-fp8": ("llama3-8b/ffn",),
    "static-fp8": ("llama3-8b/ffn",),
}


def ends_of_experts(inputs: Inputs, rows: int, experts: int, align: int) -> Tensor:
    """The ends of experts that share `rows` rows, or nearly all of them: about the same number each, and one has
    none."""
    if inputs.device.type == "meta":
        return torch.empty(experts, dtype=torch.int32, device="meta")
    share = torch.rand(experts, generator=torch.Generator().manual_seed(experts)) + 0.5
    share[-2 if experts > 1 else 0] = 0
    filled = rows if align == 1 else max(rows - align * experts, -(-rows // 2))
    bounds = (share.cumsum(0) / share.sum() * filled).round().long().tolist()
    ends, start, before = [], 0, 0
    for bound in bounds:
        ends.append(min(start + bound - before, rows))
        start, before = -(-ends[-1] // align) * align, bound
    return torch.tensor(ends, dtype=torch.int32, device=inputs.device)


def _arguments(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> dict[str, Any]:
    settings = dict(workload.settings)
    tensors = settings.pop("tensors", ())
    single = "up" in tensors or settings.get("layout") == "none"
    made: dict[str, Any] = {"x": inputs.normal(*shape[:-1], shape[-1] * (1 if single else 2), std=2.0)}
    if "up" in tensors:
        made["up"] = inputs.normal(*shape)
    if "probs" in tensors:
        made["probs"] = inputs.normal(*shape[:-1], mean=0.3, std=0.1, dtype=torch.float32)
    experts = settings.pop("experts", None)
    if "bias" in tensors:
        made["bias"] = inputs.normal(*([] if experts is None else [experts]), made["x"].shape[-1])
    if experts is not None:
        made["ends"] = ends_of_experts(inputs, math.prod(shape[:-1]), experts, settings["align"])
    if "quant_scale" in settings:
        mean = settings.pop("quant_scale")
        made["quant_scale"] = inputs.normal(1, mean=mean, std=0.0, dtype=torch.float32)
    return {**made, **settings}


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    return Call(glu, _arguments(workload, inputs, shape))


def _build_backward(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    return Call(glu_backward, {"dy": inputs.normal(*shape), **_arguments(workload, inputs, shape)})


def _rereads(op: str, settings: dict[str, Any], hidden: Size) -> dict[str, Any]:
    """`moves` and `rereads` of a workload that moves more than the least bytes."""
    assert isinstance(hidden, int)
    apart = settings.get("layout") or "up" in settings.get("tensors", ())
    moves, why = 1.02, ""
    if settings.get("quantize") == "nvfp4":
        moves, why = (
            1.89 if hidden % 16 == 0 else 2.75,
            "the amax of the whole tensor comes before its first code",
        )
    elif op == "glu_backward" and "quantize" in settings and not apart and hidden % 128:
        why = (
            "a block has the end of the gate's gradient and the beginning of up's: fp32 gradients lie between"
        )
        moves = 2.7
    elif op == "glu_backward" and "bias" in settings.get("tensors", ()):
        moves, why = 1.05, "the sums of stripes of rows, which the gradient of the bias is made of"
    elif hidden % 16 and not apart:
        moves, why = 1.85, "gate and up begin inside sectors, which count for both"
    return {"rereads": why, "moves": moves}


def _named() -> list[Workload]:
    found = []
    for options, shapes in _TRAINED.items():
        for name, rows in shapes:
            for op, build in (("glu", _build), ("glu_backward", _build_backward)):
                tags = frozenset({"training"} if op == "glu" else {"training", "backward"})
                settings = OPTIONS[options]
                found.append(
                    Workload(
                        op, name, options, SHAPES[name], rows, build, tags, settings=tuple(settings.items()),
                        **_rereads(op, settings, SHAPES[name][-1]),
                    )
                )  # fmt: skip
    for options, names in _SERVED.items():
        found += [
            Workload(
                "glu", name, options, SHAPES[name], rows, _build, frozenset({"inference"}),
                settings=tuple(OPTIONS[options].items()),
                **_rereads("glu", OPTIONS[options], SHAPES[name][-1]),
            )
            for name in names
            for rows in (1, 8, 64)
        ]  # fmt: skip
    return found


WORKLOADS: tuple[Workload, ...] = tuple(_named())
