"""Workloads of the router: the projection to logits, and the choice of experts, of mixture-of-experts models."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...ops import route, router_linear
from ...ops.moe.route import Weighing
from ...ops.moe.router_linear import RouterLinearNeeds
from ..problem import Call, Inputs, Size, Workload, run_op

# The hidden state and the number of experts of a model.
HIDDEN: dict[str, tuple[int, int]] = {
    "linghe/router": (2048, 256),
    "qwen3-30b-a3b/router": (2048, 128),
    "deepseek-v3/router": (7168, 256),
    "mixtral-8x7b/router": (4096, 8),
    "gpt-oss-120b/router": (2880, 128),
    "odd/200": (200, 60),
    "odd/33": (33, 7),
}

# weight: its dtype. needs: which gradients of x, weight and bias the backward computes; unread: inputs that it does not
# read for these.
LINEAR_OPTIONS: dict[str, dict[str, Any]] = {
    "bf16-weight": {"weight": torch.bfloat16},
    "fp32-weight": {"weight": torch.float32},
    "bias": {"weight": torch.float32, "bias": True},
    "dgrad": {"weight": torch.bfloat16, "needs": (True, False, False), "unread": ("x",)},
    "wgrad": {"weight": torch.bfloat16, "needs": (False, True, False), "unread": ("weight",)},
}
_FORWARD: dict[str, tuple[str, ...]] = {
    "bf16-weight": ("linghe/router", "deepseek-v3/router", "odd/33"),
    "fp32-weight": (
        "linghe/router",
        "qwen3-30b-a3b/router",
        "deepseek-v3/router",
        "mixtral-8x7b/router",
        "odd/200",
    ),
    "bias": ("gpt-oss-120b/router", "odd/33"),
}
_BACKWARD: dict[str, tuple[str, ...]] = {
    "dgrad": ("linghe/router",),
    "wgrad": ("linghe/router",),
    "fp32-weight": ("linghe/router", "deepseek-v3/router", "odd/200"),
    "bias": ("gpt-oss-120b/router", "odd/33"),
}
_SHARED = "tiles of tokens share the weight and tiles of columns the gradient; partial sums are written and read back"


def _linear_inputs(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> dict[str, Any]:
    settings = dict(workload.settings)
    experts, cols = settings["experts"], shape[-1]
    return {
        "x": inputs.activation(*shape),
        "weight": inputs.normal(experts, cols, std=cols**-0.5, dtype=_as(settings["weight"], inputs)),
        "bias": inputs.normal(experts, std=0.1, dtype=torch.float32) if settings.get("bias") else None,
    }


def _as(dtype: torch.dtype, inputs: Inputs) -> torch.dtype:
    """The dtype of a weight: `dtype`, or float64 if the inputs are."""
    return inputs.dtype if inputs.dtype == torch.float64 else dtype


def _build_linear(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    return Call(router_linear, _linear_inputs(workload, inputs, shape))


def _build_linear_backward(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    settings = dict(workload.settings)
    kwargs = _linear_inputs(workload, inputs, shape)
    kwargs["dy"] = inputs.normal(*shape[:-1], settings["experts"], dtype=_as(torch.float32, inputs))
    needs = settings.get("needs", (True, True, kwargs["bias"] is not None))
    kwargs["needs"] = RouterLinearNeeds(*needs)
    return Call(functools.partial(run_op, "router_linear_backward"), kwargs)


def _linear(used: dict[str, tuple[str, ...]], rows: tuple[int, ...], *tags: str) -> list[Workload]:
    backward = "backward" in tags
    found = []
    for options, names in used.items():
        for name in names:
            cols, experts = HIDDEN[name]
            settings = {"experts": experts, **LINEAR_OPTIONS[options]}
            found += [
                Workload(
                    op="router_linear_backward" if backward else "router_linear",
                    name=name,
                    options=options,
                    shape=("rows", cols),
                    rows=count,
                    build=_build_linear_backward if backward else _build_linear,
                    tags=frozenset(tags),
                    settings=tuple(settings.items()),
                    unread=settings.get("unread", ()),
                    rereads=_SHARED,
                    moves=2.57 if backward else 1.25,
                )
                for count in rows
            ]
    return found


# ---- the choice of experts ------------------------------------------------------------------------------

EXPERTS: dict[str, tuple[Size, ...]] = {
    "linghe/router": ("rows", 256),
    "mixtral-8x7b/router": ("rows", 8),
    "qwen1.5-moe/router": ("rows", 60),
    "qwen3-30b-a3b/router": ("rows", 128),
    "qwen3-next-80b/router": ("rows", 512),
    "deepseek-v3/router": ("rows", 256),
    "kimi-k2/router": ("rows", 384),
    "odd/33": ("rows", 33),
}

# Arguments of `route`; "bias" says that a bias is made.
ROUTE_OPTIONS: dict[str, dict[str, Any]] = {
    "top8": {"k": 8, "balance_coefficient": 1e-3, "z_coefficient": 1e-3},
    "top2": {"k": 2, "balance_coefficient": 1e-2},
    "pre-softmax": {"k": 4, "post_softmax": False},
    "renormalized": {
        "k": 8, "convention": "torchtitan", "renormalize": True, "balance_coefficient": 1e-3, "return_scores": True,
    },
    "groups": {
        "k": 8, "score": "sigmoid", "bias": True, "groups": 8, "group_topk": 4, "scale": 2.5,
        "balance_coefficient": 1e-4,
    },
    "sigmoid": {"k": 8, "score": "sigmoid", "bias": True, "scale": 2.827},
    "sqrtsoftplus": {"k": 6, "score": "sqrtsoftplus", "balance_coefficient": 1e-3, "z_coefficient": 1e-3},
    "vllm-groups": {
        "k": 8, "convention": "vllm", "score": "sigmoid", "bias": True, "groups": 8, "group_topk": 4,
        "renormalize": True, "scale": 2.5,
    },
    "vllm-top10": {"k": 10, "convention": "vllm", "renormalize": True},
}  # fmt: skip
_TRAINED: dict[str, tuple[str, ...]] = {
    "top8": ("linghe/router", "odd/33"),
    "top2": ("mixtral-8x7b/router",),
    "pre-softmax": ("qwen1.5-moe/router",),
    "renormalized": ("qwen3-30b-a3b/router",),
    "groups": ("deepseek-v3/router",),
    "sigmoid": ("kimi-k2/router",),
    "sqrtsoftplus": ("linghe/router", "odd/33"),
}
_SERVED: dict[str, tuple[str, ...]] = {
    "vllm-groups": ("deepseek-v3/router",),
    "vllm-top10": ("qwen3-next-80b/router",),
}


def _route_arguments(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> dict[str, Any]:
    settings = dict(workload.settings)
    experts = shape[-1]
    kwargs: dict[str, Any] = {"logits": inputs.normal(*shape), **settings}
    kwargs["k"] = min(settings["k"], experts)
    if settings.get("bias"):
        kwargs["bias"] = inputs.normal(experts, std=0.1)
    groups = settings.get("groups", 1)
    if experts % groups or experts // groups < 4:  # only in tests with odd numbers of experts
        kwargs.pop("groups", None), kwargs.pop("group_topk", None)
    return kwargs


def _build_route(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    return Call(route, _route_arguments(workload, inputs, shape))


def _build_route_backward(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    """The backward of the same call, which reads logits, indices and the gradients of the results asked for."""
    settings = dict(workload.settings)
    experts = shape[-1]
    k, score = min(settings["k"], experts), settings.get("score", "softmax")
    post = score == "softmax" and settings.get("post_softmax", settings.get("convention") is None)
    logits = inputs.normal(*shape)
    if logits.device.type == "meta":
        indices = torch.empty((*shape[:-1], k), dtype=torch.int32, device="meta")
    else:
        indices = logits.topk(k).indices.int()
    kwargs = {
        "logits": logits,
        "indices": indices,
        "dweights": inputs.normal(*shape[:-1], k),
        "dscores": inputs.normal(*shape) if settings.get("return_scores") else None,
        "dscore_sums": inputs.normal(experts, std=1e-3) if "balance_coefficient" in settings else None,
        "dz": inputs.normal(1, std=1e-3).reshape(()) if "z_coefficient" in settings else None,
        "weighing": Weighing(
            score=score,
            post_softmax=post,
            renormalize=settings.get("renormalize", score != "softmax"),
            eps=1e-20,
            scale=settings.get("scale", 1.0),
        ),
    }
    return Call(functools.partial(run_op, "route_backward"), kwargs)


def _route(used: dict[str, tuple[str, ...]], rows: tuple[int, ...], *tags: str) -> list[Workload]:
    backward = "backward" in tags
    return [
        Workload(
            op="route_backward" if backward else "route",
            name=name,
            options=options,
            shape=EXPERTS[name],
            rows=count,
            build=_build_route_backward if backward else _build_route,
            tags=frozenset(tags),
            dtype=torch.float32,
            settings=tuple(ROUTE_OPTIONS[options].items()),
            moves=1.02 if backward else 1.75 if count > 64 else 2.95,
            rereads=""
            if backward
            else "each program leaves its counts and sums for a second launch to add up",
        )
        for options, names in used.items()
        for name in names
        for count in rows
    ]


WORKLOADS: tuple[Workload, ...] = (
    *_linear(_FORWARD, (8192,), "training"),
    *_linear({"fp32-weight": ("deepseek-v3/router",)}, (1, 64), "inference"),
    *_linear(_BACKWARD, (8192,), "training", "backward"),
    *_route(_TRAINED, (8192,), "training"),
    *_route(_SERVED, (1, 64), "inference"),
    *_route(_TRAINED, (8192,), "training", "backward"),
)


def _flops(workload: Workload) -> int:
    return int(2 * workload.rows * dict(workload.settings)["experts"] * workload.cols)


FLOPS = {"router_linear": _flops, "router_linear_backward": lambda workload: 2 * _flops(workload)}
