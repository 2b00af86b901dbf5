"""What the router must compute, in float64 and by autograd, written from the documented formulas alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from triton_loom.testing import EPS32

from ..symbolic.loaded import Loaded
from ..truth import Near

# A sum of n terms in chains of at most 64, then of the chains: the roundings of a random walk over both, with room.
CHAIN = 64


def _noise(sizes: Tensor, terms: int) -> Tensor:
    """What adding up in fp32 may add to a sum of `terms` numbers whose squares sum up to sizes^2."""
    chains = -(-terms // CHAIN)
    # Partial sums grow like sqrt(i): their roundings add up to some sqrt(n/2) of the last one's.
    steps = math.sqrt(min(terms, CHAIN) / 2 + chains / 2)
    return 4 * EPS32 * (1 + steps) * sizes


def _product(a: Tensor, b: Tensor) -> Near:
    a, b = a.detach().double(), b.detach().double()
    return Near(a @ b, _noise((a.square() @ b.square()).sqrt(), a.shape[-1]))


def router_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor | None = None
) -> dict[str, Near]:
    """y, and with an upstream gradient that of each input."""
    flat = x.detach().reshape(-1, x.shape[-1])
    y = _product(flat, weight.t())
    if bias is not None:
        y = Near(y.truth + bias.detach().double(), y.noise + EPS32 * bias.detach().double().abs())
    shape = (*x.shape[:-1], weight.shape[0])
    found = {"y": Near(y.truth.view(shape), (y.noise + EPS32 * y.truth.abs()).view(shape))}
    if dy is None:
        return found
    d = dy.detach().reshape(-1, weight.shape[0])
    dx = _product(d, weight)
    found["dx"] = Near(dx.truth.view(x.shape), dx.noise.view(x.shape))
    found["dweight"] = _product(d.t(), flat)
    if bias is not None:
        ones = torch.ones(1, len(d), dtype=torch.float64)
        dbias = _product(ones, d)
        found["dbias"] = Near(dbias.truth[0], dbias.noise[0])
    return found


# ---- route ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """The arithmetic of the weights, without the choice."""

    score: str
    post: bool = False
    renormalize: bool = False
    eps: float = 1e-20
    scale: float = 1.0


def scores(x: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return torch.softmax(x, -1)
    if score == "sigmoid":
        return 1 / (1 + torch.exp(-x))
    return (x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))).sqrt()


def route(
    logits: Tensor,
    indices: Tensor,
    counts: Tensor,
    rule: Rule,
    upstream: dict[str, Tensor] | None = None,
    balance: float = 1.0,
    z: float = 1.0,
) -> dict[str, Near]:
    """weights, scores, balance_loss and z_loss of given indices and counts (n of the balance loss), and with upstream
    gradients of some of them dlogits."""
    experts, k = logits.shape[-1], indices.shape[-1]
    leaf = logits.detach().double().reshape(-1, experts).requires_grad_()
    chosen = indices.reshape(-1, k).long()
    tokens = len(leaf)
    s = scores(leaf, rule.score)
    w = torch.softmax(leaf.gather(1, chosen), -1) if rule.post else s.gather(1, chosen)
    if rule.renormalize:
        w = w / (w.sum(-1, keepdim=True) + rule.eps)
    w = w * rule.scale
    share = s if rule.score == "softmax" else s / (s.sum(-1, keepdim=True) + 1e-20)
    factor = balance * experts / (k * tokens * tokens)
    balance_loss = factor * (share.sum(0) * counts.double()).sum()
    lse = torch.logsumexp(leaf, -1)
    z_loss = z * lse.square().mean()
    # exp(x - max) is off by an ulp for every unit of its argument, and sums of some hundred terms by a few more.
    spread = leaf.detach().clamp(-100, 100)
    steps = 16 * EPS32 * (2 + spread.amax(-1, keepdim=True) - spread.amin(-1, keepdim=True))
    shape = (*logits.shape[:-1], k)
    found = {
        "weights": Near(w.detach().view(shape), (steps * w.detach().abs()).view(shape)),
        "scores": Near(s.detach().view(logits.shape), (steps * s.detach()).view(logits.shape)),
        "balance_loss": Near(balance_loss.detach(), steps.max() * balance_loss.detach().abs()),
        "z_loss": Near(z_loss.detach(), 16 * EPS32 * z_loss.detach()),
    }
    if not upstream:
        return found
    values = {"weights": w, "scores": s, "balance_loss": balance_loss, "z_loss": z_loss}
    total = torch.zeros((), dtype=torch.float64)
    size = torch.zeros(tokens, experts, dtype=torch.float64)
    for name, gradient in upstream.items():
        g = gradient.detach().double()
        total = total + (values[name] * g.reshape(values[name].shape)).sum()
    (dlogits,) = torch.autograd.grad(total, leaf)
    # Each term of dx is s times a difference of gradients of s: their sizes, one by one.
    plain = s.detach()
    if "weights" in upstream:
        g = upstream["weights"].detach().double().reshape(w.shape).abs() * abs(rule.scale)
        base = w.detach().abs() / abs(rule.scale)
        parts = base * (g + (g * base).sum(-1, keepdim=True))
        size.scatter_add_(1, chosen, parts)
        if not rule.post:
            size += plain * parts.sum(-1, keepdim=True)
    if "scores" in upstream:  # no slope of a score is larger than the score
        g = upstream["scores"].detach().double().reshape(s.shape).abs()
        size += plain * (g + (plain * g).sum(-1, keepdim=True))
    if "balance_loss" in upstream:
        c = (upstream["balance_loss"].double().abs() * abs(factor) * counts.double())[None]
        size += share.detach() * (c + (share.detach() * c).sum(-1, keepdim=True))
    if "z_loss" in upstream:
        p = torch.softmax(leaf.detach(), -1)
        size += upstream["z_loss"].double().abs() * z * 2 * lse.detach().abs()[:, None] * p / tokens
    found["dlogits"] = Near(dlogits.view(logits.shape), (steps * size).view(logits.shape))
    return found


# Products write another tile than they read.
MOVED: dict[str, tuple[set[str], set[str]]] = {
    "_router_linear_kernel": ({"x_ptr"}, set()),
    "_router_linear_dx_kernel": ({"dy_ptr"}, set()),
    "_router_linear_dweight_kernel": ({"x_ptr", "dy_ptr"}, set()),
}
# A lane of AMD's matrix units holds four neighbours of a result: 64 bits of bf16.
WIDTHS = {"_router_linear_dx_kernel": ("gfx", 64)}

LOADED = {("route_backward_kernel", "indices_ptr"): Loaded(least=0, below="experts")}
