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
    "top-k": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "everything": {"logit_scale": 0.5, "softcap": 20.0, "temperature": 1.25, "biased": True, "per_row": True},
}
_LISTED = "; and so are the lists of the largest logits"
_USED: dict[str, tuple[str, ...]] = {
    "plain": ("cut/head", "odd/200"),
    "greedy": ("odd/33",),
    "top-k": ("cut/head", "odd/33"),
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


def kept_truth(z: Tensor, z_err: Tensor, k: int, top_p: float, min_p: float) -> Tensor:
    """Return the logits z [T, V] that limits keep, minus infinity elsewhere. No limit may lie within an error."""
    value, order = z.sort(dim=-1, descending=True, stable=True)
    error = z_err.gather(-1, order)
    close = "a limit lies too close to a logit to tell whether it is kept: draw others"
    if k < z.shape[1]:
        assert (value[:, k - 1] - error[:, k - 1] > value[:, k] + error[:, k]).all(), close
    p = value[:, :k].softmax(-1)
    before, share = p.cumsum(-1) - p, (value[:, :k] - value[:, :1]).exp()
    slack = 1e-5 + 4 * error.amax(-1, keepdim=True)
    assert ((before - top_p).abs() > slack).all() or top_p == 1, close
    assert ((share / min_p - 1).abs() > slack).all() if min_p else True, close
    kept = ((before < top_p) & (share >= min_p)).nonzero()
    row, column = kept[:, 0], order[kept[:, 0], kept[:, 1]]
    return torch.full_like(z, -torch.inf).index_put((row, column), z[row, column])


def _truth(call: Call, upstream: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the tokens of the highest scores, and their log-probabilities."""
    a = arguments(call)
    noise: tuple[Tensor | None, Tensor | None] = torch.as_tensor(a["seed"]), torch.as_tensor(a["step"])
    if a["temperature"] == 0:
        a, noise = a | {"temperature": 1.0}, (None, None)
    _, z, z_err = head_logits(a, a["hidden"].double().flatten(0, -2))
    if a["top_k"] is not None and noise[0] is not None:
        z = kept_truth(z, z_err, a["top_k"], a["top_p"], a["min_p"])
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
            moves=13.0 if (name, options) == ("odd/33", "top-k") else 3.0,
            rereads=SHARED + _LISTED * (options == "top-k"),
        )
        for options, names in _USED.items()
        for name in names
    ),
    flops={"linear_sample": _flops},
    spills={("linear_logprobs_kernel", "sm_80"): 40},  # of 255 registers, with lists of the largest logits
    truths={"linear_sample": _truth},
)
