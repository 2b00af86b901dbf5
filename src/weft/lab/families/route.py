"""Routing of tokens to experts in mixture-of-experts models."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ops import route
from ...ops.moe.route.arguments import Weighing
from ..family import Family
from ..problem import Call, Inputs, Size, Workload, run_op
from ..symbolic.loaded import Loaded
from ..truth import EPS32, Near

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

# Arguments of `route`; "bias" draws a bias.
OPTIONS: dict[str, dict[str, Any]] = {
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


def _arguments(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> dict[str, Any]:
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


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    return Call(route, _arguments(workload, inputs, shape))


def _build_backward(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    """Build the backward of the same call, which reads logits, indices and the gradients of requested results."""
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


def _workloads(used: dict[str, tuple[str, ...]], rows: tuple[int, ...], *tags: str) -> list[Workload]:
    backward = "backward" in tags
    return [
        Workload(
            op="route_backward" if backward else "route",
            name=name,
            options=options,
            shape=EXPERTS[name],
            rows=count,
            build=_build_backward if backward else _build,
            tags=frozenset(tags),
            dtype=torch.float32,
            settings=tuple(OPTIONS[options].items()),
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
    *_workloads(_TRAINED, (8192,), "training"),
    *_workloads(_SERVED, (1, 64), "inference"),
    *_workloads(_TRAINED, (8192,), "training", "backward"),
)


# ---- truth, used by the tests of the op; the catalogue's check uses the reference -----------------------------


@dataclass(frozen=True)
class Rule:
    """Rule that computes the weights of chosen experts."""

    score: str
    post: bool = False
    renormalize: bool = False
    eps: float = 1e-20
    scale: float = 1.0


def scores_truth(x: Tensor, score: str) -> Tensor:
    """Return the scores of all experts."""
    if score == "softmax":
        return torch.softmax(x, -1)
    if score == "sigmoid":
        return 1 / (1 + torch.exp(-x))
    return (x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))).sqrt()


def route_truth(
    logits: Tensor,
    indices: Tensor,
    counts: Tensor,
    rule: Rule,
    upstream: dict[str, Tensor] | None = None,
    balance: float = 1.0,
    z: float = 1.0,
) -> dict[str, Near]:
    """Return weights, scores, balance_loss and z_loss; with upstream gradients of some of them also dlogits.

    The choice is not checked: `indices` and `counts` (the n of the balance loss) are the op's own."""
    experts, k = logits.shape[-1], indices.shape[-1]
    leaf = logits.detach().double().reshape(-1, experts).requires_grad_()
    chosen = indices.reshape(-1, k).long()
    tokens = len(leaf)
    s = scores_truth(leaf, rule.score)
    w = torch.softmax(leaf.gather(1, chosen), -1) if rule.post else s.gather(1, chosen)
    if rule.renormalize:
        w = w / (w.sum(-1, keepdim=True) + rule.eps)
    w = w * rule.scale
    share = s if rule.score == "softmax" else s / (s.sum(-1, keepdim=True) + 1e-20)
    factor = balance * experts / (k * tokens * tokens)
    balance_loss = factor * (share.sum(0) * counts.double()).sum()
    lse = torch.logsumexp(leaf, -1)
    z_loss = z * lse.square().mean()
    # The error of exp(x - max) is an ulp per unit of its argument; sums of some hundred terms add a few more.
    spread = leaf.detach().clamp(-100, 100)
    steps = 16 * EPS32 * (2 + spread.amax(-1, keepdim=True) - spread.amin(-1, keepdim=True))
    shape = (*logits.shape[:-1], k)
    expected = {
        "weights": Near(w.detach().view(shape), (steps * w.detach().abs()).view(shape)),
        "scores": Near(s.detach().view(logits.shape), (steps * s.detach()).view(logits.shape)),
        "balance_loss": Near(balance_loss.detach(), steps.max() * balance_loss.detach().abs()),
        "z_loss": Near(z_loss.detach(), 16 * EPS32 * z_loss.detach()),
    }
    if not upstream:
        return expected
    values = {"weights": w, "scores": s, "balance_loss": balance_loss, "z_loss": z_loss}
    total = torch.zeros((), dtype=torch.float64)
    size = torch.zeros(tokens, experts, dtype=torch.float64)
    for name, gradient in upstream.items():
        g = gradient.detach().double()
        total = total + (values[name] * g.reshape(values[name].shape)).sum()
    (dlogits,) = torch.autograd.grad(total, leaf)
    # Each term of dx is s times a difference of gradients of s; add up the magnitudes of the terms.
    plain = s.detach()
    if "weights" in upstream:
        g = upstream["weights"].detach().double().reshape(w.shape).abs() * abs(rule.scale)
        base = w.detach().abs() / abs(rule.scale)
        parts = base * (g + (g * base).sum(-1, keepdim=True))
        size.scatter_add_(1, chosen, parts)
        if not rule.post:
            size += plain * parts.sum(-1, keepdim=True)
    if "scores" in upstream:  # the slope of a score never exceeds the score
        g = upstream["scores"].detach().double().reshape(s.shape).abs()
        size += plain * (g + (plain * g).sum(-1, keepdim=True))
    if "balance_loss" in upstream:
        c = (upstream["balance_loss"].double().abs() * abs(factor) * counts.double())[None]
        size += share.detach() * (c + (share.detach() * c).sum(-1, keepdim=True))
    if "z_loss" in upstream:
        p = torch.softmax(leaf.detach(), -1)
        size += upstream["z_loss"].double().abs() * z * 2 * lse.detach().abs()[:, None] * p / tokens
    expected["dlogits"] = Near(dlogits.view(logits.shape), (steps * size).view(logits.shape))
    return expected


FAMILY = Family(
    workloads=WORKLOADS,
    loaded={("route_backward_kernel", "indices_ptr"): Loaded(least=0, below="experts")},
)
