"""What the loss head must compute, in float64 and by autograd, written from the documented formulas alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton_loom.testing import EPS32

import weft

from ..problem import Call
from ..symbolic.loaded import Loaded
from ..truth import Near, arguments

# Of a token's own sums: exponentials, logarithms, sums over tiles and splits.
FEW = 32
# What a sum of independent roundings stays below, in standard deviations.
SIGMAS = 6.0


def _unit(a: Tensor, b: Tensor) -> float:
    """Half an ulp of 1 of what the gradient of logits is stored in."""
    return torch.finfo(torch.promote_types(a.dtype, b.dtype)).eps / 2


def product_of_head(a: Tensor, b: Tensor) -> Near:
    """a @ b, added up in one chain."""
    sizes = (a.square() @ b.square()).sqrt()
    return Near(a @ b, 4 * EPS32 * (1 + (a.shape[-1] / 2) ** 0.5) * sizes)


def head(a: dict[str, Any], upstream: dict[str, Tensor] | None = None) -> dict[str, Near | Tensor]:
    """loss or logprobs and all other results of the arguments of `linear_cross_entropy` or `linear_logprobs`, and with
    gradients of them those of hidden, weight and bias."""
    names = [name for name in ("hidden", "weight", "bias") if a.get(name) is not None]
    cols, vocab = a["weight"].shape[1], a["weight"].shape[0]
    y = a["target"].reshape(-1).long()
    ignored = y == a["ignore_index"]
    wrong = ~ignored & ((y < 0) | (y >= vocab))
    valid = ~(ignored | wrong)
    y = y.where(valid, 0)
    leaves = {name: a[name].detach().double().requires_grad_() for name in names}
    hidden = leaves["hidden"].reshape(-1, cols).where(valid[:, None], 0.0)
    x = hidden @ leaves["weight"].t()
    of_x = product_of_head(hidden.detach(), leaves["weight"].detach().t()).noise
    if "bias" in leaves:
        x = x + leaves["bias"]
        of_x = of_x + EPS32 * x.detach().nan_to_num(neginf=0.0).abs()
    x.retain_grad()
    there = x.detach() > -torch.inf
    u = x * a["logit_scale"]
    if a["softcap"] is not None:
        u = torch.where(there, a["softcap"] * torch.tanh(u / a["softcap"]), u)
    z = u / a["temperature"]
    scale = a["logit_scale"] / a["temperature"]
    of_z = scale * of_x + 4 * EPS32 * z.detach().masked_fill(~there, 0.0).abs()
    if a["softcap"] is not None:
        of_z = of_z + 4 * EPS32 * a["softcap"] / a["temperature"]
    lse = torch.logsumexp(z, 1)
    log_p = z - lse[:, None]
    p = log_p.exp()
    picked = log_p.gather(1, y[:, None])[:, 0]
    logs = log_p.masked_fill(~there, 0.0)
    entropy = -torch.where(p > 0, p * logs, 0.0).sum(1)
    count = there.sum(1)
    mean = torch.where(there, z, 0.0).sum(1) / count
    squares = torch.logsumexp(2 * z, 1) - 2 * lse
    of_mean = torch.where(there, of_z + EPS32 * z.detach().abs(), 0.0).sum(1) / count
    few = FEW * EPS32
    # Of all logits of a token together, weighted with their probabilities.
    off = (p.detach() * of_z).sum(1)
    noise = {
        "lse": off + few * (1 + lse.detach().abs()),
        "logprobs": off
        + of_z.gather(1, y[:, None])[:, 0]
        + few * (1 + picked.detach().abs() + lse.detach().abs()),
        "entropy": off * (1 + entropy.detach())
        + (p.detach() * logs.detach().abs() * (of_z + few)).sum(1)
        + few * (1 + entropy.detach() + lse.detach().abs()),
        "mean_logits": of_mean + few * (1 + mean.detach().abs() + lse.detach().abs()),
        "log_sum_squares": 2 * off
        + 2 * (torch.softmax(2 * z.detach(), 1) * of_z).sum(1)
        + few * (1 + squares.detach().abs()),
    }
    values: dict[str, Tensor] = {
        "lse": lse,
        "logprobs": picked,
        "entropy": entropy,
        "mean_logits": mean,
        "log_sum_squares": squares.detach(),
    }
    accuracy = (z.detach().argmax(1) == y) & valid
    divisor = torch.ones((), dtype=torch.float64)
    share = valid.double()
    hits = accuracy.double()
    if "reduction" in a:
        alpha = a["label_smoothing"]
        weights = a["class_weight"]
        w = torch.ones(vocab, dtype=torch.float64) if weights is None else weights.detach().double()
        loss = -(1 - alpha) * w[y] * picked + a["z_loss"] * lse**2
        of_loss = (1 - alpha) * w[y] * noise["logprobs"] + 4 * abs(a["z_loss"]) * lse.detach().abs() * noise[
            "lse"
        ]
        if alpha:
            spread = -torch.where(there, w * logs, 0.0).sum(1) / there.sum(1)
            loss = loss + alpha * spread
            sizes = torch.where(
                there, w * (of_z + few * (z.detach().abs() + lse.detach().abs()[:, None])), 0.0
            )
            of_loss = of_loss + alpha * sizes.sum(1) / there.sum(1)
        share = w[y].where(valid, 0.0)
        values["loss"], noise["loss"] = loss, of_loss + few * loss.detach().abs()
    told = {name: torch.where(valid, v, torch.where(wrong, torch.nan, 0.0)) for name, v in values.items()}
    noise = {name: torch.where(valid, v, 0.0) for name, v in noise.items()}
    shape = a["target"].shape
    found: dict[str, Near | Tensor] = {}
    results = {name: told[name].view(shape) for name in told if name != "loss"}
    for name, value in results.items():
        found[name] = Near(value.detach(), noise[name].view(shape))
    if "reduction" in a:
        if a["reduction"] == "none":
            results["loss"], of_loss, reached = (
                told["loss"].view(shape),
                noise["loss"].view(shape),
                hits.view(shape),
            )
        else:
            results["loss"], of_loss, reached = told["loss"].sum(), noise["loss"].sum(), hits.sum()
            if a["reduction"] == "mean":
                divisor = share.sum()
                none = torch.tensor(0.0 if a["all_ignored"] == "zero" else torch.nan, dtype=torch.float64)
                of_loss = of_loss / divisor
                results["loss"] = results["loss"] * 0 + none if divisor == 0 else results["loss"] / divisor
                reached = none if not valid.any() else reached / valid.sum()
        found["loss"] = Near(results["loss"].detach(), of_loss + FEW * EPS32 * results["loss"].detach().abs())
        found["accuracy"] = reached.float()
        results["y"], found["y"] = results["loss"], found["loss"]
    else:
        found["accuracy"] = hits.view(shape).float()
        results["y"], found["y"] = results["logprobs"], found["logprobs"]
    if not upstream:
        return found
    terms = [(results[name].nan_to_num() * g.detach().double()).sum() for name, g in upstream.items()]
    torch.autograd.backward(terms)
    dx = x.grad
    assert dx is not None
    # How far dx may be off in fp32, then its rounding; both nearly independent from element to element.
    spread_z = of_z.amax(1, keepdim=True) + few * (1 + log_p.detach().masked_fill(~there, 0.0).abs())
    sizes = _sizes(a, upstream, divisor, p.detach(), logs.detach(), entropy.detach(), lse.detach(), y, valid)
    slope = scale * torch.ones_like(dx)
    if a["softcap"] is not None:
        slope = slope * (1 - torch.tanh(a["logit_scale"] * x.detach() / a["softcap"]) ** 2) + 1e-6 * scale
    of_dx = sizes * slope * spread_z
    unit = _unit(a["hidden"], a["weight"])
    if unit == 0.5 * torch.finfo(torch.float16).eps:
        of_dx = of_dx + 2.0**-24 * (dx.abs().amax() + sizes.amax())
    of_dx = torch.where(valid[:, None] & there, of_dx, 0.0)
    rounded = unit * dx.abs()
    weight = leaves["weight"].detach()
    plain = hidden.detach()

    def ofproduct_of_head(left: Tensor, right: Tensor) -> Tensor:
        """left [.., K] and right [K, ..]: dx on one side, whose errors are `left` and `rounded` on the same side."""
        return left @ right

    of_dhidden = of_dx @ weight.abs() + SIGMAS * (rounded.square() @ weight.square()).sqrt()
    of_dhidden = of_dhidden + product_of_head(dx, weight).noise
    of_dweight = of_dx.t() @ plain.abs() + SIGMAS * (rounded.square().t() @ plain.square()).sqrt()
    of_dweight = of_dweight + product_of_head(dx.t(), plain).noise
    gradient = leaves["hidden"].grad
    assert gradient is not None
    found["dhidden"] = Near(
        gradient.where(valid.view(shape)[..., None], 0.0),
        of_dhidden.where(valid[:, None], 0.0).view(gradient.shape),
    )
    assert leaves["weight"].grad is not None
    found["dweight"] = Near(leaves["weight"].grad, of_dweight)
    if "bias" in leaves:
        assert leaves["bias"].grad is not None
        noise_bias = of_dx.sum(0) + SIGMAS * rounded.square().sum(0).sqrt() + 16 * EPS32 * dx.abs().sum(0)
        found["dbias"] = Near(leaves["bias"].grad, noise_bias)
    return found


def _sizes(
    a: dict[str, Any], upstream: dict[str, Tensor], divisor: Tensor, p: Tensor, logs: Tensor, entropy: Tensor,
    lse: Tensor, y: Tensor, valid: Tensor,
) -> Tensor:  # fmt: skip
    """The sizes of what is added up to dz, for each element."""
    rows, vocab = p.shape

    def of(name: str) -> Tensor:
        g = upstream.get(name)
        if g is None:
            return torch.zeros(rows, dtype=torch.float64)
        return g.detach().double().abs().expand(a["target"].shape if g.dim() == 0 else g.shape).reshape(-1)

    per_token = of("lse")
    target = torch.zeros(rows, dtype=torch.float64)
    everywhere = torch.zeros(rows, vocab, dtype=torch.float64)
    if "reduction" in a:
        g = (of("loss") + of("y")) / (divisor if divisor else 1.0)
        w = torch.ones(vocab, dtype=torch.float64)
        if a["class_weight"] is not None:
            w = a["class_weight"].detach().double()
        alpha = a["label_smoothing"]
        target = g * (1 - alpha) * w[y]
        mean = w.mean() * alpha * g
        everywhere = (alpha * g / vocab)[:, None] * w
        per_token = per_token + target + mean + 2 * abs(a["z_loss"]) * g * lse.abs()
    else:
        target = of("logprobs") + of("y")
        per_token = per_token + target
    # The mean is the difference of lse and spread, whose gradients cancel each other up to their last column.
    per_token = per_token + 2 * of("mean_logits")
    everywhere = everywhere + (of("mean_logits") / vocab)[:, None]
    bend = of("entropy")[:, None] * (logs.abs() + entropy[:, None] + 1)
    sizes = p * (per_token[:, None] + bend) + everywhere
    return sizes.scatter_add(1, y[:, None], target[:, None] * p.gather(1, y[:, None]).clamp(min=1e-3))


def _forward(call: Call, upstream: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    return head(arguments(call), upstream)


def _backward(call: Call, upstream: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """As the autograd engine calls it. A spread is the loss of everything smoothed."""
    given = {name: call[name] for name in ("hidden", "weight", "target", "bias")}
    a = arguments(Call(weft.linear_logprobs, given)) | {
        "softcap": call["softcap"],
        "temperature": 1 / call["scale"],
    }
    named = {"logprobs": call["dlogprob"], "lse": call["dlse"], "entropy": call["dentropy"]}
    found = head(a, {name: g for name, g in named.items() if g is not None})
    if call["dspread"] is None:
        return found
    b = arguments(Call(weft.linear_cross_entropy, given))
    b |= {"softcap": call["softcap"], "temperature": 1 / call["scale"], "class_weight": call["classes"]}
    more = head(b | {"label_smoothing": 1.0, "reduction": "none"}, {"loss": call["dspread"]})
    both: dict[str, Near | Tensor] = {}
    for name in ("dhidden", "dweight", "dbias"):
        one, two = found[name], more[name]
        assert isinstance(one, Near)
        assert isinstance(two, Near)
        both[name] = Near(one.truth + two.truth, one.noise + two.noise)
    return both


TRUTHS = {"linear_logprobs": _forward, "linear_logprobs_backward": _backward}


# Products write another tile than they read.
MOVED: dict[str, tuple[set[str], set[str]]] = {
    "linear_logprobs_kernel": ({"hidden_ptr"}, set()),
    "linear_dlogits_kernel": ({"hidden_ptr"}, set()),
    "linear_dweight_kernel": ({"hidden_ptr"}, set()),
    "linear_dhidden_kernel": ({"dlogits_ptr"}, set()),
}
# A lane of AMD's matrix units holds four neighbours of a result: 64 bits of bf16.
WIDTHS = dict.fromkeys(
    ("linear_dlogits_kernel", "linear_dweight_kernel", "linear_dhidden_kernel"), ("gfx", 64)
)

# The rows that have a label, then the others; in place `rows` how many have one.
_ORDER = Loaded(least=0, below="rows", distinct=True, apart=("rows", Loaded(least=0, most="rows")))

LOADED = {
    (kernel, "order_ptr"): _ORDER
    for kernel in (
        "linear_logprobs_kernel",
        "linear_factors_kernel",
        "linear_dlogits_kernel",
        "linear_dweight_kernel",
        "linear_dhidden_kernel",
        "_join_statistics_kernel",
    )
}
