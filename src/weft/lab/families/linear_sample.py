"""Draws from a linear head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops import linear_sample
from ..family import Family
from ..problem import Call, Inputs, Workload
from ..truth import Near, arguments
from .linear_logprobs import HEADS, SHARED, head_logits, head_truth
from .vocabulary import draw_noise, drawn_truth

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "everything": {"logit_scale": 0.5, "softcap": 20.0, "temperature": 1.25, "biased": True, "per_row": True},
}
_USED: dict[str, tuple[str, ...]] = {
    "plain": ("cut/head", "odd/200"),
    "greedy": ("odd/33",),
    "everything": ("odd/33",),
}


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    settings = dict(workload.settings)
    vocab = settings.pop("vocab")
    kwargs: dict[str, Any] = {
        "hidden": inputs.normal(*shape),
        "weight": inputs.normal(vocab, shape[-1], std=2.0 * shape[-1] ** -0.5),
        "bias": inputs.normal(vocab) if settings.pop("biased", False) else None,
    }
    noise = draw_noise(inputs, shape[0] if settings.pop("per_row", False) else None)
    return Call(linear_sample, kwargs | noise | settings)


def _flops(workload: Workload) -> int:
    return int(2 * workload.rows * dict(workload.settings)["vocab"] * workload.cols)


def _truth(call: Call, upstream: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the tokens of the highest scores, and their log-probabilities."""
    a = arguments(call)
    noise: tuple[Tensor | None, Tensor | None] = torch.as_tensor(a["seed"]), torch.as_tensor(a["step"])
    if a["temperature"] == 0:
        a, noise = a | {"temperature": 1.0}, (None, None)
    _, z, z_err = head_logits(a, a["hidden"].double().flatten(0, -2))
    tokens, _ = drawn_truth(z, z_err, *noise, 0)
    tokens = tokens.view(a["hidden"].shape[:-1])
    expected = head_truth(a | {"target": tokens, "ignore_index": -100})
    return {"tokens": tokens, "logprobs": expected["logprobs"]}


FAMILY = Family(
    workloads=tuple(
        Workload(
            op="linear_sample",
            name=name,
            options=options,
            shape=("rows", HEADS[name][0]),
            rows=HEADS[name][2],
            build=_build,
            tags=frozenset({"inference"}),
            settings=(*OPTIONS[options].items(), ("vocab", HEADS[name][1])),
            moves=3.0,
            rereads=SHARED,
        )
        for options, names in _USED.items()
        for name in names
    ),
    flops={"linear_sample": _flops},
    truths={"linear_sample": _truth},
)
