"""Cross entropy over vocabularies of real models."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops import cross_entropy
from ...ops.loss.cross_entropy.arguments import CrossEntropyArgs
from ...ops.loss.cross_entropy.cross_entropy import cross_entropy_op
from ...ops.loss.reduction import LossOptions
from ...ops.loss.statistics import Softmax, Wanted
from ..chain import Chain, chain, tensors_of
from ..family import Family, Width
from ..problem import Call, Inputs, Workload, run_op
from ..truth import EPS32, Near, arguments

VOCABULARIES: dict[str, int] = {
    "linghe/vocabulary": 157184,
    "qwen3-30b-a3b/vocabulary": 151936,
    "gemma2-9b/long-vocabulary": 256000,
    "gpt2/vocabulary": 50257,
    "odd/1030": 1030,
    "odd/33": 33,
}

# Arguments of `cross_entropy`. "ignored": n leaves every n-th token without a target; "weighted": classes have
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
    """Draw logits like those of a trained model: every other token has a raised target logit."""
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
    """Draw targets, uniform over all columns."""
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
    """Build the backward of the same call, which reads logits, statistics and the gradients of requested results."""
    tensors, options = _arguments(workload, inputs, shape), _options(workload)
    smoothing, z_loss = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
    softcap, scale = options.get("softcap"), 1 / options.get("temperature", 1.0)
    logits, target, weight = tensors["logits"], tensors["target"], tensors.get("class_weight")
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


# ---- truth ----------------------------------------------------------------------------------------------------


def _sum_noise(cols: int) -> float:
    """Return the relative error of a sum of exponentials.

    Each term has a few roundings of error, and lanes add up chains of them."""
    return EPS32 * (8 + math.sqrt(cols / 128))


def cross_entropy_truth(
    a: dict[str, Any], upstream: dict[str, Tensor] | None = None
) -> dict[str, Near | Tensor]:
    """Return loss, lse, entropy and accuracy of arguments of `cross_entropy`; with upstream gradients also dlogits."""
    leaf = a["logits"].detach().double().requires_grad_()
    x = leaf.reshape(-1, leaf.shape[-1])
    rows, cols = x.shape
    y = a["target"].reshape(-1).long()
    ignored = y == a["ignore_index"]
    wrong = ~ignored & ((y < 0) | (y >= cols))
    valid = ~(ignored | wrong)
    y = y.where(valid, 0)
    finite = x.detach() > -torch.inf
    u = x if a["softcap"] is None else torch.where(finite, a["softcap"] * torch.tanh(x / a["softcap"]), x)
    scale = 1 / a["temperature"]
    z = u * scale
    lse = torch.logsumexp(z, 1)
    log_p = z - lse[:, None]
    picked = log_p.gather(1, y[:, None])[:, 0]
    classes = a["class_weight"]
    weight = torch.ones(cols, dtype=torch.float64) if classes is None else classes.detach().double()
    alpha = a["label_smoothing"]
    loss = -(1 - alpha) * weight[y] * picked
    share = weight[y].where(valid, 0.0)
    spread = torch.zeros_like(loss)
    if alpha:
        spread = -torch.where(finite, weight * log_p.masked_fill(~finite, 0.0), 0.0).sum(1)
        loss = loss + alpha / finite.sum(1) * spread
    loss = loss + a["z_loss"] * lse**2
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p.masked_fill(~finite, 0.0), 0.0).sum(1)
    masked = lambda v: torch.where(valid, v, torch.where(wrong, torch.nan, 0.0))  # noqa: E731
    loss, lse, entropy = masked(loss), masked(lse), masked(entropy)
    first = (z.detach().argmax(1) == y) & valid  # the first among equals
    # ---- error allowed to fp32
    sums = _sum_noise(cols)
    d = lambda v: v.detach().abs()  # noqa: E731
    size = z.detach().masked_fill(~finite, 0.0).abs()
    z_err = torch.zeros_like(size) if a["softcap"] is None and scale == 1 else 2 * EPS32 * size
    if a["softcap"] is not None:
        z_err = z_err + 4 * EPS32 * a["softcap"] * scale
    largest = z.detach().amax(1)
    log_total_err = sums + z_err.amax(1)  # error of log(total)
    t = (z.detach() - largest[:, None]).masked_fill(~finite, 0.0).abs()
    log_total = (torch.logsumexp(z, 1) - largest).detach().abs()
    nll_err = log_total_err + 2 * EPS32 * (d(picked) + log_total)
    lse_err = log_total_err + EPS32 * (d(lse) + log_total + largest.abs())
    loss_err = (1 - alpha) * weight[y] * nll_err + 4 * EPS32 * d(loss)
    if alpha:
        mean_weight = torch.where(finite, weight, 0.0).sum(1) / finite.sum(1)
        distance = (z.detach() - z.detach().gather(1, y[:, None])).masked_fill(~finite, 0.0).abs().amax(1)
        loss_err = loss_err + alpha * mean_weight * (nll_err + 2 * sums * distance)
    loss_err = loss_err + 4 * abs(a["z_loss"]) * d(lse) * lse_err
    moment = (p.detach() * t).sum(1)
    entropy_err = (2 + log_total + 2 * moment) * (log_total_err + 8 * EPS32) + (p.detach() * t * z_err).sum(1)
    shape = a["target"].shape
    reduction = a["reduction"]
    values: dict[str, Tensor] = {"lse": lse.view(shape), "entropy": entropy.view(shape)}
    noise = {"lse": lse_err.view(shape), "entropy": entropy_err.view(shape)}
    total_err = (loss_err + EPS32 * rows**0.5 * d(loss)).where(valid, 0.0).sum()
    hits, divisor = first.double(), torch.ones(())
    if reduction == "none":
        values["loss"], noise["loss"], accuracy = loss.view(shape), loss_err.view(shape), hits.view(shape)
    elif reduction == "sum":
        values["loss"], noise["loss"], accuracy = loss.sum(), total_err, hits.sum()
    else:
        divisor = share.sum()
        empty = divisor == 0 and a["all_ignored"] == "zero"
        none = 0.0 if a["all_ignored"] == "zero" else torch.nan
        values["loss"] = loss.sum() * 0 if empty else loss.sum() / divisor
        noise["loss"] = total_err / divisor + 4 * EPS32 * d(values["loss"])
        accuracy = hits.sum() / valid.sum() if valid.any() else torch.tensor(none)
    values["y"], noise["y"] = values["loss"], noise["loss"]
    expected: dict[str, Near | Tensor] = {
        name: Near(value.detach(), torch.where(noise[name] == 0, EPS32, noise[name]))
        for name, value in values.items()
    }
    expected["accuracy"] = accuracy.to(torch.float32)
    if not upstream:
        return expected

    total = torch.zeros((), dtype=torch.float64)
    per_token: dict[str, Tensor] = {}
    for name, gradient in upstream.items():
        g = gradient.detach().double()
        total = total + (values[name].nan_to_num() * g).sum()
        per_token[name] = g.abs().expand(shape if g.dim() == 0 else g.shape).reshape(-1)
    (dlogits,) = torch.autograd.grad(total, leaf)
    g = per_token.get("loss", per_token.get("y", torch.zeros(rows, dtype=torch.float64)))
    g = torch.zeros_like(g) if divisor == 0 else g / divisor
    p_err = (log_total_err + 4 * EPS32)[:, None] + EPS32 * t + z_err  # relative error
    smooth = alpha / finite.sum(1) * (torch.where(finite, weight, 0.0).sum(1) if alpha else 0.0)
    factor = g * ((1 - alpha) * weight[y] + smooth + 2 * abs(a["z_loss"]) * d(lse)) + per_token.get(
        "lse", 0.0
    )
    part = 4 * EPS32 * g[:, None] * (alpha / finite.sum(1))[:, None] * weight
    size = p.detach() * (
        factor[:, None] * (p_err + 4 * EPS32) + (g * 2 * abs(a["z_loss"]) * lse_err)[:, None]
    )
    size = size + torch.where(finite, part, 0.0) if alpha else size
    size = size.scatter_add(1, y[:, None], (4 * EPS32 * g * (1 - alpha) * weight[y])[:, None])
    if "entropy" in per_token:
        e = per_token["entropy"][:, None]
        logs = log_p.detach().masked_fill(~finite, 0.0).abs()
        logs_err = (
            (entropy_err + log_total_err)[:, None] + 4 * EPS32 * (logs + largest.abs()[:, None]) + z_err
        )
        size = size + e * p.detach() * ((logs + d(entropy)[:, None]) * p_err + logs_err)
    slope = scale * torch.ones_like(size)
    slope_err = torch.zeros_like(size)
    if a["softcap"] is not None:
        tanh = torch.tanh(x.detach() / a["softcap"])
        slope = slope * (1 - tanh**2)
        slope_err = 8 * EPS32 * scale * torch.ones_like(size)  # 1 - tanh^2 is a difference
    # The factor of the slope in dx, by which the slope's own error is multiplied.
    slope_factor = (
        p.detach() * factor[:, None] + torch.where(finite, part, 0.0) / (4 * EPS32)
        if alpha
        else p.detach() * factor[:, None]
    )
    slope_factor = slope_factor.scatter_add(1, y[:, None], (g * (1 - alpha) * weight[y])[:, None])
    if "entropy" in per_token:
        slope_factor = slope_factor + e * p.detach() * (logs + d(entropy)[:, None])
    dx_err = size * slope + slope_factor * slope_err + EPS32 * d(dlogits).view(size.shape)
    dx_err = dx_err.where(valid[:, None], 0.0) + 2.0**-149
    expected["dlogits"] = Near(dlogits, dx_err.view(leaf.shape))
    return expected


def _forward_truth(call: Call, upstream: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    return cross_entropy_truth(arguments(call), upstream)


def _backward_truth(call: Call, upstream: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the gradient of the formula for a call of the op the way autograd calls it."""
    a = arguments(Call(cross_entropy, {"logits": call["logits"], "target": call["target"]}))
    for name in ("ignore_index", "label_smoothing", "z_loss", "softcap"):
        a[name] = call[name]
    a["class_weight"], a["temperature"] = call["weight"], 1 / call["scale"]
    a["reduction"] = "mean" if call["inverse"] is not None else "sum" if call["dloss"].dim() == 0 else "none"
    named = {"loss": call["dloss"], "lse": call["dlse"], "entropy": call["dentropy"]}
    expected = cross_entropy_truth(a, {name: g for name, g in named.items() if g is not None})
    return {"y": expected["dlogits"]}


# ---- in plain PyTorch -----------------------------------------------------------------------------------------


def _backward_chain(call: Call) -> Chain:
    """Differentiate PyTorch's own loss."""
    upstream = call["dloss"].to(call["logits"].dtype)
    return Chain(F.cross_entropy, tensors_of(call, "logits", "target"), upstream=upstream)


FAMILY = Family(
    workloads=WORKLOADS,
    truths={"cross_entropy": _forward_truth, "cross_entropy_backward": _backward_truth},
    chains={
        ("cross_entropy", "plain"): chain(F.cross_entropy, "logits", "target"),
        ("cross_entropy_backward", "plain"): _backward_chain,
    },
    # Besides tiles, the kernel reads the logit of each row's target, which has two bytes.
    widths={"cross_entropy_kernel": Width("", 16)},
)
