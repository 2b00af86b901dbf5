"""What the loss must be, in float64 and by autograd, written from the documented formulas alone."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from triton_loom.testing import EPS32

import weft

from ..problem import Call
from ..truth import Near, arguments


def _noise_of_sums(cols: int) -> float:
    """Relative, of a sum of exponentials: each is off by a few roundings, and lanes add up chains of them."""
    return EPS32 * (8 + math.sqrt(cols / 128))


def cross_entropy(a: dict[str, Any], upstream: dict[str, Tensor] | None = None) -> dict[str, Near | Tensor]:
    """loss, lse, entropy and accuracy of the arguments of `weft.cross_entropy`, and with gradients of them dlogits."""
    leaf = a["logits"].detach().double().requires_grad_()
    x = leaf.reshape(-1, leaf.shape[-1])
    rows, cols = x.shape
    y = a["target"].reshape(-1).long()
    ignored = y == a["ignore_index"]
    wrong = ~ignored & ((y < 0) | (y >= cols))
    valid = ~(ignored | wrong)
    y = y.where(valid, 0)
    there = x.detach() > -torch.inf
    u = x if a["softcap"] is None else torch.where(there, a["softcap"] * torch.tanh(x / a["softcap"]), x)
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
        spread = -torch.where(there, weight * log_p.masked_fill(~there, 0.0), 0.0).sum(1)
        loss = loss + alpha / there.sum(1) * spread
    loss = loss + a["z_loss"] * lse**2
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p.masked_fill(~there, 0.0), 0.0).sum(1)
    told = lambda v: torch.where(valid, v, torch.where(wrong, torch.nan, 0.0))  # noqa: E731
    loss, lse, entropy = told(loss), told(lse), told(entropy)
    first = (z.detach().argmax(1) == y) & valid  # of equals the first
    # ---- how far fp32 may be from it
    sums = _noise_of_sums(cols)
    d = lambda v: v.detach().abs()  # noqa: E731
    size = z.detach().masked_fill(~there, 0.0).abs()
    of_z = torch.zeros_like(size) if a["softcap"] is None and scale == 1 else 2 * EPS32 * size
    if a["softcap"] is not None:
        of_z = of_z + 4 * EPS32 * a["softcap"] * scale
    largest = z.detach().amax(1)
    off = sums + of_z.amax(1)  # of log(total)
    t = (z.detach() - largest[:, None]).masked_fill(~there, 0.0).abs()
    log_total = (torch.logsumexp(z, 1) - largest).detach().abs()
    of_nll = off + 2 * EPS32 * (d(picked) + log_total)
    of_lse = off + EPS32 * (d(lse) + log_total + largest.abs())
    of_loss = (1 - alpha) * weight[y] * of_nll + 4 * EPS32 * d(loss)
    if alpha:
        mean_weight = torch.where(there, weight, 0.0).sum(1) / there.sum(1)
        distance = (z.detach() - z.detach().gather(1, y[:, None])).masked_fill(~there, 0.0).abs().amax(1)
        of_loss = of_loss + alpha * mean_weight * (of_nll + 2 * sums * distance)
    of_loss = of_loss + 4 * abs(a["z_loss"]) * d(lse) * of_lse
    moment = (p.detach() * t).sum(1)
    of_entropy = (2 + log_total + 2 * moment) * (off + 8 * EPS32) + (p.detach() * t * of_z).sum(1)
    shape = a["target"].shape
    reduction = a["reduction"]
    values: dict[str, Tensor] = {"lse": lse.view(shape), "entropy": entropy.view(shape)}
    noise = {"lse": of_lse.view(shape), "entropy": of_entropy.view(shape)}
    of_total = (of_loss + EPS32 * rows**0.5 * d(loss)).where(valid, 0.0).sum()
    hits, divisor = first.double(), torch.ones(())
    if reduction == "none":
        values["loss"], noise["loss"], accuracy = loss.view(shape), of_loss.view(shape), hits.view(shape)
    elif reduction == "sum":
        values["loss"], noise["loss"], accuracy = loss.sum(), of_total, hits.sum()
    else:
        divisor = share.sum()
        empty = divisor == 0 and a["all_ignored"] == "zero"
        none = 0.0 if a["all_ignored"] == "zero" else torch.nan
        values["loss"] = loss.sum() * 0 if empty else loss.sum() / divisor
        noise["loss"] = of_total / divisor + 4 * EPS32 * d(values["loss"])
        accuracy = hits.sum() / valid.sum() if valid.any() else torch.tensor(none)
    values["y"], noise["y"] = values["loss"], noise["loss"]
    found: dict[str, Near | Tensor] = {
        name: Near(value.detach(), torch.where(noise[name] == 0, EPS32, noise[name]))
        for name, value in values.items()
    }
    found["accuracy"] = accuracy.to(torch.float32)
    if not upstream:
        return found

    total = torch.zeros((), dtype=torch.float64)
    per_token: dict[str, Tensor] = {}
    for name, gradient in upstream.items():
        g = gradient.detach().double()
        total = total + (values[name].nan_to_num() * g).sum()
        per_token[name] = g.abs().expand(shape if g.dim() == 0 else g.shape).reshape(-1)
    (dlogits,) = torch.autograd.grad(total, leaf)
    g = per_token.get("loss", per_token.get("y", torch.zeros(rows, dtype=torch.float64)))
    g = torch.zeros_like(g) if divisor == 0 else g / divisor
    of_p = (off + 4 * EPS32)[:, None] + EPS32 * t + of_z  # relative
    smooth = alpha / there.sum(1) * (torch.where(there, weight, 0.0).sum(1) if alpha else 0.0)
    factor = g * ((1 - alpha) * weight[y] + smooth + 2 * abs(a["z_loss"]) * d(lse)) + per_token.get(
        "lse", 0.0
    )
    part = 4 * EPS32 * g[:, None] * (alpha / there.sum(1))[:, None] * weight
    size = p.detach() * (factor[:, None] * (of_p + 4 * EPS32) + (g * 2 * abs(a["z_loss"]) * of_lse)[:, None])
    size = size + torch.where(there, part, 0.0) if alpha else size
    size = size.scatter_add(1, y[:, None], (4 * EPS32 * g * (1 - alpha) * weight[y])[:, None])
    if "entropy" in per_token:
        e = per_token["entropy"][:, None]
        logs = log_p.detach().masked_fill(~there, 0.0).abs()
        of_logs = (of_entropy + off)[:, None] + 4 * EPS32 * (logs + largest.abs()[:, None]) + of_z
        size = size + e * p.detach() * ((logs + d(entropy)[:, None]) * of_p + of_logs)
    slope = scale * torch.ones_like(size)
    steep = torch.zeros_like(size)
    if a["softcap"] is not None:
        tanh = torch.tanh(x.detach() / a["softcap"])
        slope = slope * (1 - tanh**2)
        steep = 8 * EPS32 * scale * torch.ones_like(size)  # 1 - tanh^2 is a difference
    # What is multiplied by the slope, for what the slope is off by.
    before = (
        p.detach() * factor[:, None] + torch.where(there, part, 0.0) / (4 * EPS32)
        if alpha
        else p.detach() * factor[:, None]
    )
    before = before.scatter_add(1, y[:, None], (g * (1 - alpha) * weight[y])[:, None])
    if "entropy" in per_token:
        before = before + e * p.detach() * (logs + d(entropy)[:, None])
    of_dx = size * slope + before * steep + EPS32 * d(dlogits).view(size.shape)
    of_dx = of_dx.where(valid[:, None], 0.0) + 2.0**-149
    found["dlogits"] = Near(dlogits, of_dx.view(leaf.shape))
    return found


def _forward(call: Call, upstream: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    return cross_entropy(arguments(call), upstream)


def _backward(call: Call, upstream: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """As the autograd engine calls it."""
    a = arguments(Call(weft.cross_entropy, {"logits": call["logits"], "target": call["target"]}))
    for name in ("ignore_index", "label_smoothing", "z_loss", "softcap"):
        a[name] = call[name]
    a["class_weight"], a["temperature"] = call["weight"], 1 / call["scale"]
    a["reduction"] = "mean" if call["inverse"] is not None else "sum" if call["dloss"].dim() == 0 else "none"
    named = {"loss": call["dloss"], "lse": call["dlse"], "entropy": call["dentropy"]}
    found = cross_entropy(a, {name: g for name, g in named.items() if g is not None})
    return {"y": found["dlogits"]}


TRUTHS = {"cross_entropy": _forward, "cross_entropy_backward": _backward}


# Besides tiles, it reads the logit of each row's target, which has two bytes.
WIDTHS = {"cross_entropy_kernel": ("", 16)}
