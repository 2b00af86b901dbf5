"""Workloads of the loss: vocabularies of real models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops import cross_entropy
from ...ops.loss.cross_entropy import CrossEntropyArgs, cross_entropy_op
from ...ops.loss.reduction import LossOptions
from ...ops.loss.statistics import Softmax, Wanted
from ..problem import Call, Inputs, Workload, run_op

VOCABULARIES: dict[str, int] = {
    "linghe/vocabulary": 157184,
    "qwen3-30b-a3b/vocabulary": 151936,
    "gemma2-9b/long-vocabulary": 256000,
    "gpt2/vocabulary": 50257,
    "odd/1030": 1030,
    "odd/33": 33,
}

# Arguments of `cross_entropy`. "ignored": n means that every n-th token has no target; "weighted": classes have
# weights.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sft": {"ignored": 3, "z_loss": 1e-4, "label_smoothing": 0.1},
    "rl": {"reduction": "none", "temperature": 0.8, "return_lse": True, "return_entropy": True},
    "capped": {"softcap": 30.0, "reduction": "sum", "return_accuracy": True},
    "everything": {
        "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 20.0, "temperature": 1.25, "ignored": 5, "weighted": True,
        "return_lse": True, "return_entropy": True, "return_accuracy": True,
    },
}  # fmt: skip
_USED: dict[str, tuple[str, ...]] = {
    "plain": ("linghe/vocabulary",),
    "sft": ("gpt2/vocabulary",),
    "rl": ("qwen3-30b-a3b/vocabulary",),
    "capped": ("gemma2-9b/long-vocabulary",),
    "everything": ("odd/1030", "odd/33"),
}


def _arguments(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> dict[str, Any]:
    """Inputs with logits as a trained model gives them: for every other token the target's logit is raised."""
    settings = dict(workload.settings)
    *lead, cols = shape
    logits = inputs.normal(*shape, std=2.0)
    target = draw_targets(inputs, lead, cols)
    if logits.device.type != "meta":
        sure = logits[::2].gather(-1, target[::2, None]) + 14.0
        logits[::2].scatter_(-1, target[::2, None], sure)
        if "ignored" in settings:
            target[1 :: settings["ignored"]] = -100
    kwargs = {"logits": logits, "target": target}
    if settings.get("weighted"):
        weight_dtype = torch.float64 if inputs.dtype == torch.float64 else torch.float32
        kwargs["class_weight"] = inputs.normal(cols, dtype=weight_dtype).abs()
    return kwargs


def draw_targets(inputs: Inputs, lead: list[int], cols: int) -> Tensor:
    """Random targets, uniform over all columns."""
    if inputs.device.type == "meta":
        return torch.empty(lead, dtype=torch.int64, device="meta")
    drawn = inputs.normal(*lead, dtype=torch.float64).abs() * 7919.0 % 1.0
    return (drawn * cols).long().clamp(max=cols - 1)


def _options(workload: Workload) -> dict[str, Any]:
    return {k: v for k, v in workload.settings if k not in ("ignored", "weighted")}


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    return Call(cross_entropy, {**_arguments(workload, inputs, shape), **_options(workload)})


def _backward(softcap: float | None, scale: float, ignore_index: int, **kwargs: Any) -> list[Tensor]:
    softmax = Softmax(0, kwargs["logits"].shape[-1], ignore_index, softcap, scale)
    return run_op("cross_entropy_backward", softmax=softmax, **kwargs)


def _build_backward(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    """The backward of the same call, which reads logits, statistics and the gradients of the results asked for."""
    given, options = _arguments(workload, inputs, shape), _options(workload)
    smoothing, z_loss = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
    softcap, scale = options.get("softcap"), 1 / options.get("temperature", 1.0)
    logits, target, weight = given["logits"], given["target"], given.get("class_weight")
    o = cross_entropy_op(
        CrossEntropyArgs(
            logits,
            target,
            weight,
            Softmax(0, logits.shape[-1], -100, softcap, scale),
            LossOptions(smoothing, z_loss, options.get("reduction", "mean"), True),
            Wanted(options.get("return_entropy", False), smoothing > 0, False),
            inplace=False,
        )
    )
    lse = o.lse
    kwargs = {
        "logits": logits,
        "target": target,
        "weight": weight,
        "largest": o.largest,
        "total": o.total,
        "inverse": o.inverse,
        "smooth": o.smooth,
        "entropy": o.entropy,
        "dloss": inputs.normal(*o.loss.shape, dtype=lse.dtype),
        "dlse": inputs.normal(*lse.shape, dtype=lse.dtype) if options.get("return_lse") else None,
        "dentropy": None if o.entropy is None else inputs.normal(*lse.shape, dtype=lse.dtype),
        "dspread": None,
        "ignore_index": -100,
        "label_smoothing": smoothing,
        "z_loss": z_loss,
        "softcap": softcap,
        "scale": scale,
    }
    return Call(_backward, kwargs)


def _more(name: str, op: str) -> dict[str, Any]:
    if VOCABULARIES[name] > 100 or op.endswith("backward"):
        return {}
    return {
        "moves": 1.45,
        "rereads": "what is kept of a token for the mean and the backward is as much as some of its few logits",
    }


WORKLOADS: tuple[Workload, ...] = tuple(
    Workload(
        op=op,
        name=name,
        options=options,
        shape=("rows", VOCABULARIES[name]),
        rows=8192,
        build=build,
        tags=tags,
        settings=tuple(OPTIONS[options].items()),
        **_more(name, op),
    )
    for op, build, tags in (
        ("cross_entropy", _build, frozenset({"training"})),
        ("cross_entropy_backward", _build_backward, frozenset({"training", "backward"})),
    )
    for options, names in _USED.items()
    for name in names
)
