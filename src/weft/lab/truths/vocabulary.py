"""What the parts of a vocabulary come to, in float64, written from the documented formulas alone."""

from __future__ import annotations

import torch
from torch import Tensor
from triton_loom.testing import EPS32

from ..problem import Call
from ..truth import Near
from .linear_logprobs import FEW, product_of_head

LOWEST = float(torch.finfo(torch.float32).min)


def _capped(call: Call, x: Tensor) -> tuple[Tensor, Tensor]:
    """(z, how far fp32 may be from it)."""
    softcap, scale = call["softcap"], call["scale"]
    u = x if softcap is None else softcap * torch.tanh(x / softcap)
    off = (0.0 if softcap is None and scale == 1 else 4 * EPS32) * (u * scale).detach().abs()
    return u * scale, off if softcap is None else off + 4 * EPS32 * softcap * scale


def _tokens(call: Call, cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """(targets, which there are, which of them are in this shard)."""
    y = call["target"].reshape(-1).long()
    valid = (y != call["ignore_index"]) & (y >= 0) & (y < call["vocab"])
    return y, valid, valid & (y >= call["start"]) & (y < call["start"] + cols)


def _statistics(call: Call, z: Tensor, of_z: Tensor, classes: Tensor | None) -> dict[str, Near | Tensor]:
    cols = z.shape[1]
    y, valid, here = _tokens(call, cols)
    largest = z.amax(1)
    t = z - largest[:, None]
    e = t.exp()
    few = FEW * EPS32
    off = of_z.amax(1, keepdim=True) + few
    found: dict[str, tuple[Tensor, Tensor]] = {
        "largest": (largest, of_z.amax(1) + EPS32 * largest.abs()),
        "total": (e.sum(1), (e * (off + EPS32 * t.abs())).sum(1)),
    }
    at = torch.where(here, y - call["start"], 0)[:, None]
    found["picked"] = (
        torch.where(here, z.gather(1, at)[:, 0], 0.0),
        torch.where(here, of_z.gather(1, at)[:, 0], 0.0),
    )
    if call["entropy"]:
        found["moment"] = ((e * t).sum(1), (e * (1 + t.abs()) * (off + few * (1 + t.abs()))).sum(1))
    if call["spread"]:
        w = torch.ones(cols, dtype=torch.float64) if classes is None else classes.double()
        size = (w * (t.abs() + z.abs() + largest.abs()[:, None])).sum(1)
        found["below"] = ((w * t).sum(1), few * size + (w * off).sum(1))
        found["mass"] = (w.sum().expand(len(z)), few * w.sum().expand(len(z)))
        found["there"] = (torch.full_like(largest, cols), torch.zeros_like(largest))
    if call["squares"]:
        found["squares"] = ((2 * t).exp().sum(1), ((2 * t).exp() * 2 * (off + EPS32 * t.abs())).sum(1))
    empty = {"largest": LOWEST}
    near: dict[str, Near | Tensor] = {
        name: Near(torch.where(valid, value, empty.get(name, 0.0)), torch.where(valid, noise, 0.0))
        for name, (value, noise) in found.items()
    }
    if call["accuracy"]:
        near["best"] = torch.where(valid, z.argmax(1) + call["start"], -1).int()
    return near


def _of_rows(call: Call, upstream: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    x = call["logits"].double()
    return _statistics(call, *_capped(call, x.reshape(-1, x.shape[-1])), call["weight"])


def _of_head(call: Call, upstream: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    hidden = call["hidden"].double().reshape(-1, call["hidden"].shape[-1])
    product = product_of_head(hidden, call["weight"].double().t())
    x, of_x = product.truth, product.noise
    if call["bias"] is not None:
        x = x + call["bias"].double()
        of_x = of_x + EPS32 * x.abs()
    z, off = _capped(call, x)
    return _statistics(call, z, off + call["scale"] * of_x, call["classes"])


def _joined(call: Call, upstream: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """The shard's own statistics are the second of those that are joined: in their place its logits are
    differentiated."""
    leaf = call["logits"].detach().double().requires_grad_()
    cols = leaf.shape[-1]
    z, of_z = _capped(call, leaf.reshape(-1, cols))
    y, valid, here = _tokens(call, cols)
    rows = iter(call["stats"].double().unbind(1))
    largests, totals, picks = next(rows), next(rows), next(rows)
    others = torch.tensor([True, False, *[True] * (len(largests) - 2)])[:, None] & valid
    top = torch.where(others, largests, LOWEST).amax(0).maximum(z.detach().amax(1))
    down = torch.where(others, (largests - top).exp(), 0.0)
    t = z - top[:, None]
    total = (totals * down).sum(0) + t.exp().sum(1)
    lse = top + total.log()
    at = torch.where(here, y - call["start"], 0)[:, None]
    picked = (picks * others).sum(0) + torch.where(here, z.gather(1, at)[:, 0], 0.0)
    few = FEW * EPS32
    size = 1 + lse.detach().abs() + picked.detach().abs() + top.abs()
    values: dict[str, Tensor] = {"logprobs": picked - lse, "lse": lse}
    noise: dict[str, Tensor] = {"logprobs": few * size, "lse": few * size}
    entropy = torch.zeros_like(lse)
    if call["entropy"]:
        moments = torch.where(others, next(rows) + (largests - top) * totals, 0.0)
        moment = (moments * down).sum(0) + (t.exp() * t).sum(1)
        entropy = values["entropy"] = total.log() - moment / total
        noise["entropy"] = few * (size + (moment / total).detach().abs())
    w = torch.ones(cols, dtype=torch.float64) if call["weight"] is None else call["weight"].double()
    mass_share = count_share = torch.zeros_like(lse)
    if call["spread"]:
        below, mass, there = next(rows), next(rows), next(rows)
        count = (there * others).sum(0) + cols
        of_others = torch.where(others, below + mass * (largests - top), 0.0).sum(0)
        all_mass = (mass * others).sum(0) + w.sum()
        values["spread"] = (all_mass * total.log() - of_others - (w * t).sum(1)) / count
        sizes = all_mass * total.log().abs() + of_others.abs() + (w * t.abs()).sum(1)
        noise["spread"] = few * (sizes.detach() / count + size)
        mass_share, count_share = all_mass / count, 1 / count
    found: dict[str, Near | Tensor] = {}
    told = {name: torch.where(valid, value, 0.0) for name, value in values.items()}
    for name, value in told.items():
        found[name] = Near(value.detach(), torch.where(valid, noise[name], 0.0))
    if call["accuracy"]:
        own = torch.where(valid, z.detach().amax(1), LOWEST)
        largest = torch.where(others, largests, LOWEST)
        largest[1] = own
        best = call["stats"][:, -1].contiguous().view(torch.int32)
        first = best.long().gather(0, largest.argmax(0, keepdim=True))[0]
        found["hits"] = (valid & (first == y)).float()
    if not upstream:
        return found
    torch.autograd.backward([(told[name] * g.double()).sum() for name, g in upstream.items()])
    gradient = leaf.grad
    assert gradient is not None

    def of(name: str) -> Tensor:
        return upstream[name].double().abs()[:, None] if name in upstream else torch.zeros(len(z), 1).double()

    p = (t.exp() / total[:, None]).detach()
    logs = (t - total.log()[:, None]).detach().abs()
    per_token = of("logprobs") + of("lse") + of("spread") * mass_share[:, None]
    sizes = p * (per_token + of("entropy") * (logs + entropy.detach()[:, None] + 1))
    sizes = sizes + of("spread") * count_share[:, None] * w
    sizes = sizes.scatter_add(1, at, of("logprobs") * here[:, None])
    slope = torch.full_like(sizes, call["scale"])
    if call["softcap"] is not None:
        tanh = torch.tanh(leaf.detach().reshape(-1, cols) / call["softcap"])
        slope = call["scale"] * (1 - tanh**2) + 1e-6
    off = sizes * slope * (few * (1 + logs) + of_z + of_z.amax(1, keepdim=True))
    found["dlogits"] = Near(gradient, torch.where(valid[:, None], off, 0.0).view(leaf.shape))
    return found


TRUTHS = {"cross_entropy_statistics": _of_rows, "linear_statistics": _of_head, "sharded_logprobs": _joined}
