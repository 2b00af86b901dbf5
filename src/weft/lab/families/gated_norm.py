"""Workloads of the gated norm: what linear attention leaves, in groups or by heads."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...ops import gated_norm
from ...ops.norm.gated import GatedNormNeeds
from ..problem import Call, Inputs, Size, Workload, run_op

# The shape of x, by the model it comes from. "rows" are tokens; with several sequences, those of one sequence.
SHAPES: dict[str, tuple[Size, ...]] = {
    "linghe/attention": (2, "rows", 2048),
    "qwen3-next-80b-a3b/heads": ("rows", 32, 128),
    "gla-340m/values": (2, "rows", 1024),
    "odd/200": (2, "rows", 200),
}

# The sets of options: arguments of the function.
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
    made = {"x": inputs.activation(*shape), "gate": inputs.normal(*first, std=2.0)}
    made["weight"] = inputs.normal(shape[-1], mean=1.0 - settings.get("weight_offset", 0.0), std=0.2)
    groups = settings.get("groups", 1)
    if shape[-1] % groups:  # only in tests with odd sizes
        settings["groups"] = 1
    return {**made, **settings}


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    return Call(gated_norm, _arguments(workload, inputs, shape))


def _build_backward(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    """The backward of the same call, which reads the inputs, the gradient and the statistics."""
    made = _arguments(workload, inputs, shape)
    x, gate = made["x"], made["gate"]
    groups, transpose = made.get("groups", 1), made.get("transpose", False)
    rows = gate.numel() // max(shape[-1], 1) * groups
    if x.device.type == "meta":
        rstd = torch.empty(rows, device="meta")
    else:
        rotated = x.transpose(0, 1) if transpose else x
        rstd = 1.0 / torch.sqrt(rotated.reshape(rows, shape[-1] // groups).float().square().mean(1) + 1e-6)
    kwargs: dict[str, Any] = {
        "x": x,
        "gate": gate,
        "dy": inputs.normal(*gate.shape),
        "weight": made["weight"],
        "rstd": rstd,
        "groups": groups,
        "act": made.get("act", "sigmoid"),
        "weight_offset": made.get("weight_offset", 0.0),
        "casting": made.get("casting", "fp32"),
        "transpose": transpose,
        "needs": GatedNormNeeds(True, True, True),
    }
    return Call(functools.partial(run_op, "gated_norm_backward"), kwargs)


def _rereads(settings: dict[str, Any]) -> dict[str, Any]:
    """`moves` and `rereads` of a workload that moves more than the least bytes."""
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


# A quantising norm has the backward of the plain one, so only plain ones are listed.
_BACKWARD = tuple(used for used in _TRAINED if "quantize" not in OPTIONS[used[0]])

WORKLOADS: tuple[Workload, ...] = (
    *_named(_TRAINED, "training"),
    *_named(_SERVED, "inference"),
    *_named(_BACKWARD, "training", backward=True),
)
