"""Workloads of the loss head: hidden states and vocabularies of real models, and small ones that every test can run."""

from __future__ import annotations

from typing import Any

import torch

from ...ops import linear_cross_entropy, linear_logprobs
from ...ops.loss.linear_logprobs import (
    HeadGradients,
    HeadNeeds,
    LinearBackwardArgs,
    LinearLogprobsArgs,
    linear_logprobs_backward_op,
    linear_logprobs_op,
)
from ...ops.loss.statistics import Softmax, Wanted, softmax_of
from ..problem import Call, Inputs, Workload
from .cross_entropy import draw_targets

# (H, V, tokens). Those tagged "long" take seconds on a CPU.
HEADS: dict[str, tuple[int, int, int]] = {
    "qwen3-0.6b/long-head": (1024, 151936, 4096),
    "cut/head": (256, 1024, 512),
    "odd/200": (200, 1030, 300),
    "odd/33": (33, 77, 300),
}

# Arguments of `linear_cross_entropy`, or with "logprobs" of `linear_logprobs`. "ignored": n means that every n-th token
# has no target; "biased", "weighted": there are a bias and weights of classes.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sft": {"ignored": 3, "z_loss": 1e-4, "label_smoothing": 0.1},
    "rl": {
        "logprobs": True, "temperature": 0.8, "ignored": 2, "return_entropy": True, "return_lse": True,
        "return_accuracy": True, "return_mean_logits": True, "return_log_sum_squares": True,
    },
    "capped": {"softcap": 30.0, "reduction": "sum", "return_accuracy": True},
    "everything": {
        "label_smoothing": 0.1, "z_loss": 1e-3, "logit_scale": 0.5, "softcap": 20.0, "temperature": 1.25, "ignored": 5,
        "weighted": True, "biased": True, "return_lse": True, "return_entropy": True, "return_accuracy": True,
    },
}  # fmt: skip
_USED: dict[str, tuple[str, ...]] = {
    "plain": ("cut/head", "qwen3-0.6b/long-head"),
    "sft": ("odd/200",),
    "rl": ("cut/head",),
    "capped": ("cut/head",),
    "everything": ("odd/33",),
}
_BACKWARD: dict[str, tuple[str, ...]] = {
    "plain": ("cut/head",),
    "everything": ("odd/33",),
}
SHARED = (
    "tiles of tokens share the weight, tiles of the vocabulary the hidden states; statistics of splits and the "
    "gradient of a block's logits are written and read back"
)
_OF_LOGITS: dict[str, Any] = {"logit_scale": 1.0, "softcap": None, "temperature": 1.0}
_CLASSES = ("ignored", "weighted", "biased", "logprobs", "vocab")


def _arguments(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> dict[str, Any]:
    settings = dict(workload.settings)
    *lead, cols = shape
    vocab = settings["vocab"]
    hidden = inputs.normal(*shape)
    weight = inputs.normal(vocab, cols, std=cols**-0.5)
    target = draw_targets(inputs, lead, vocab)
    if hidden.device.type != "meta":
        # As in a trained model, every other token's hidden state points towards its target.
        hidden[::2] += (12.0 * weight[target[::2]].double()).to(hidden.dtype)
        if "ignored" in settings:
            target[1 :: settings["ignored"]] = -100
            hidden[1 :: settings["ignored"]] = torch.nan
    kwargs: dict[str, Any] = {"hidden": hidden, "weight": weight, "target": target}
    if settings.get("biased"):
        kwargs["bias"] = inputs.normal(vocab)
    if settings.get("weighted"):
        exact = torch.float64 if inputs.dtype == torch.float64 else torch.float32
        kwargs["class_weight"] = inputs.normal(vocab, dtype=exact).abs()
    return kwargs


def _options(workload: Workload) -> dict[str, Any]:
    return {k: v for k, v in workload.settings if k not in _CLASSES}


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    function = linear_logprobs if dict(workload.settings).get("logprobs") else linear_cross_entropy
    return Call(function, {**_arguments(workload, inputs, shape), **_options(workload)})


def _backward(softcap: float | None, scale: float, **kwargs: Any) -> HeadGradients:
    softmax = Softmax(0, len(kwargs["weight"]), -100, softcap, scale)
    needs = HeadNeeds(True, True, kwargs["bias"] is not None)
    return linear_logprobs_backward_op(
        LinearBackwardArgs(softmax=softmax, skip_below=None, needs=needs, **kwargs)
    )


def _build_backward(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    """The backward of the same call, which reads statistics and the gradients of the results asked for."""
    given, options = _arguments(workload, inputs, shape), _options(workload)
    wanted = Wanted(options.get("return_entropy", False), "label_smoothing" in options, False)
    hidden, weight, bias, target = given["hidden"], given["weight"], given.get("bias"), given["target"]
    classes = given.get("class_weight") if wanted.spread else None
    of_logits = (options.get(name, default) for name, default in _OF_LOGITS.items())
    softmax = softmax_of(0, len(weight), -100, *of_logits)
    found, order = linear_logprobs_op(
        LinearLogprobsArgs(hidden, weight, bias, target, classes, None, softmax, wanted, None)
    )
    dlogprob, dlse, dentropy, dspread = (
        inputs.normal(*target.shape, dtype=found.lse.dtype) for _ in range(4)
    )
    kwargs = {
        "hidden": hidden,
        "weight": weight,
        "bias": bias,
        "target": target,
        "classes": classes,
        "largest": found.largest,
        "total": found.total,
        "entropy": found.entropy,
        "shares": found.shares,
        "order": order,
        "dlogprob": dlogprob,
        "dlse": dlse if options.get("return_lse") else None,
        "dentropy": dentropy if wanted.entropy else None,
        "dspread": dspread if wanted.spread else None,
        "softcap": softmax.softcap,
        "scale": softmax.scale,
    }
    return Call(_backward, kwargs)


WORKLOADS: tuple[Workload, ...] = tuple(
    Workload(
        op=op,
        name=name,
        options=options,
        shape=("rows", HEADS[name][0]),
        rows=HEADS[name][2],
        build=build,
        tags=tags,
        settings=(*OPTIONS[options].items(), ("vocab", HEADS[name][1])),
        moves=32.0
        if "long" in name
        else moves,  # a weight larger than the cache is read once for each tile of 128 tokens
        rereads=SHARED,
    )
    for op, build, tags, used, moves in (
        ("linear_logprobs", _build, frozenset({"training"}), _USED, 3.0),
        ("linear_logprobs_backward", _build_backward, frozenset({"training", "backward"}), _BACKWARD, 12.0),
    )
    for options, names in used.items()
    for name in names
)


def _flops(workload: Workload) -> int:
    return int(2 * workload.rows * dict(workload.settings)["vocab"] * workload.cols)


# Backward has the logits once more, and two gradients.
FLOPS = {"linear_logprobs": _flops, "linear_logprobs_backward": lambda workload: 3 * _flops(workload)}
