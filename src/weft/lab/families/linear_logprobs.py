"""The loss head, with hidden states and vocabularies of real models and small ones that every test can run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops import linear_cross_entropy, linear_logprobs
from ...ops.loss.linear_logprobs.arguments import (
    HeadGradients,
    LinearBackwardArgs,
    LinearLogprobsArgs,
)
from ...ops.loss.linear_logprobs.linear_logprobs import linear_logprobs_backward_op, linear_logprobs_op
from ...ops.loss.statistics import Softmax, Wanted, softmax_of
from ..family import Family, Moved, Width
from ..problem import Call, Inputs, Workload
from ..symbolic.loaded import Loaded
from ..truth import EPS32, Near, arguments
from .cross_entropy import draw_targets

# (H, V, tokens). Names with "long" take seconds on a CPU.
HEADS: dict[str, tuple[int, int, int]] = {
    "qwen3-0.6b/long-head": (1024, 151936, 4096),
    "cut/head": (256, 1024, 512),
    "odd/200": (200, 1030, 300),
    "odd/33": (33, 77, 300),
}

# Arguments of `linear_cross_entropy`, or with "logprobs" of `linear_logprobs`. "ignored": n leaves every n-th token
# without a target; "biased", "weighted": the head has a bias, and classes have weights.
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
_LOGIT_OPTIONS: dict[str, Any] = {"logit_scale": 1.0, "softcap": None, "temperature": 1.0}
_SETTINGS = ("ignored", "weighted", "biased", "logprobs", "vocab")


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
    return {k: v for k, v in workload.settings if k not in _SETTINGS}


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    function = linear_logprobs if dict(workload.settings).get("logprobs") else linear_cross_entropy
    return Call(function, {**_arguments(workload, inputs, shape), **_options(workload)})


def _backward(softcap: float | None, scale: float, **kwargs: Any) -> HeadGradients:
    softmax = Softmax(0, len(kwargs["weight"]), -100, softcap, scale)
    needs = HeadGradients(True, True, kwargs["bias"] is not None)
    return linear_logprobs_backward_op(
        LinearBackwardArgs(softmax=softmax, skip_below=None, needs=needs, **kwargs)
    )


def _build_backward(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    """Build the backward of the same call, which reads statistics and the gradients of requested results."""
    tensors, options = _arguments(workload, inputs, shape), _options(workload)
    wanted = Wanted(options.get("return_entropy", False), "label_smoothing" in options, False)
    hidden, weight, bias, target = (
        tensors["hidden"],
        tensors["weight"],
        tensors.get("bias"),
        tensors["target"],
    )
    classes = tensors.get("class_weight") if wanted.spread else None
    logit_options = (options.get(name, default) for name, default in _LOGIT_OPTIONS.items())
    softmax = softmax_of(0, len(weight), -100, *logit_options)
    outputs, order = linear_logprobs_op(
        LinearLogprobsArgs(hidden, weight, bias, target, classes, None, softmax, wanted, None)
    )
    dlogprob, dlse, dentropy, dspread = (
        inputs.normal(*target.shape, dtype=outputs.lse.dtype) for _ in range(4)
    )
    kwargs = {
        "hidden": hidden,
        "weight": weight,
        "bias": bias,
        "target": target,
        "classes": classes,
        "largest": outputs.largest,
        "total": outputs.total,
        "entropy": outputs.entropy,
        "shares": outputs.shares,
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


# ---- truth ----------------------------------------------------------------------------------------------------

# Roundings of one token's sums: exponentials, logarithms, sums over tiles and splits.
FEW = 32
# Bound on a sum of independent roundings, in standard deviations.
SIGMAS = 6.0


def _unit(a: Tensor, b: Tensor) -> float:
    """Return half an ulp of 1 in the dtype of the stored gradient of logits."""
    return torch.finfo(torch.promote_types(a.dtype, b.dtype)).eps / 2


def product_of_head(a: Tensor, b: Tensor) -> Near:
    """Return a @ b and the noise of summing it in one chain."""
    sizes = (a.square() @ b.square()).sqrt()
    return Near(a @ b, 4 * EPS32 * (1 + (a.shape[-1] / 2) ** 0.5) * sizes)


def head_logits(a: dict[str, Any], hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (products, logits, error allowed to fp32 logits) of hidden states [T, H] in float64, for arguments of
    `linear_logprobs`."""
    weight = a["weight"].double()
    x = hidden @ weight.t()
    x_err = product_of_head(hidden.detach(), weight.detach().t()).noise
    if a.get("bias") is not None:
        x = x + a["bias"].double()
        x_err = x_err + EPS32 * x.detach().nan_to_num(neginf=0.0).abs()
    finite = x.detach() > -torch.inf
    u = x * a["logit_scale"]
    if a["softcap"] is not None:
        u = torch.where(finite, a["softcap"] * torch.tanh(u / a["softcap"]), u)
    z = u / a["temperature"]
    scale = a["logit_scale"] / a["temperature"]
    z_err = scale * x_err + 4 * EPS32 * z.detach().masked_fill(~finite, 0.0).abs()
    if a["softcap"] is not None:
        z_err = z_err + 4 * EPS32 * a["softcap"] / a["temperature"]
    return x, z, z_err


def head_truth(a: dict[str, Any], upstream: dict[str, Tensor] | None = None) -> dict[str, Near | Tensor]:
    """Return the loss or logprobs and all other results for arguments of `linear_cross_entropy` or `linear_logprobs`.

    With upstream gradients, also return the gradients of hidden, weight and bias."""
    names = [name for name in ("hidden", "weight", "bias") if a.get(name) is not None]
    cols, vocab = a["weight"].shape[1], a["weight"].shape[0]
    y = a["target"].reshape(-1).long()
    ignored = y == a["ignore_index"]
    wrong = ~ignored & ((y < 0) | (y >= vocab))
    valid = ~(ignored | wrong)
    y = y.where(valid, 0)
    leaves = {name: a[name].detach().double().requires_grad_() for name in names}
    hidden = leaves["hidden"].reshape(-1, cols).where(valid[:, None], 0.0)
    x, z, z_err = head_logits(a | leaves, hidden)
    x.retain_grad()
    finite = x.detach() > -torch.inf
    scale = a["logit_scale"] / a["temperature"]
    lse = torch.logsumexp(z, 1)
    log_p = z - lse[:, None]
    p = log_p.exp()
    picked = log_p.gather(1, y[:, None])[:, 0]
    logs = log_p.masked_fill(~finite, 0.0)
    entropy = -torch.where(p > 0, p * logs, 0.0).sum(1)
    count = finite.sum(1)
    mean = torch.where(finite, z, 0.0).sum(1) / count
    squares = torch.logsumexp(2 * z, 1) - 2 * lse
    mean_err = torch.where(finite, z_err + EPS32 * z.detach().abs(), 0.0).sum(1) / count
    few = FEW * EPS32
    # Error of a token's logits, weighted by their probabilities.
    logits_err = (p.detach() * z_err).sum(1)
    noise = {
        "lse": logits_err + few * (1 + lse.detach().abs()),
        "logprobs": logits_err
        + z_err.gather(1, y[:, None])[:, 0]
        + few * (1 + picked.detach().abs() + lse.detach().abs()),
        "entropy": logits_err * (1 + entropy.detach())
        + (p.detach() * logs.detach().abs() * (z_err + few)).sum(1)
        + few * (1 + entropy.detach() + lse.detach().abs()),
        "mean_logits": mean_err + few * (1 + mean.detach().abs() + lse.detach().abs()),
        "log_sum_squares": 2 * logits_err
        + 2 * (torch.softmax(2 * z.detach(), 1) * z_err).sum(1)
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
        loss_err = (1 - alpha) * w[y] * noise["logprobs"] + 4 * abs(a["z_loss"]) * lse.detach().abs() * noise[
            "lse"
        ]
        if alpha:
            spread = -torch.where(finite, w * logs, 0.0).sum(1) / finite.sum(1)
            loss = loss + alpha * spread
            sizes = torch.where(
                finite, w * (z_err + few * (z.detach().abs() + lse.detach().abs()[:, None])), 0.0
            )
            loss_err = loss_err + alpha * sizes.sum(1) / finite.sum(1)
        share = w[y].where(valid, 0.0)
        values["loss"], noise["loss"] = loss, loss_err + few * loss.detach().abs()
    masked = {name: torch.where(valid, v, torch.where(wrong, torch.nan, 0.0)) for name, v in values.items()}
    noise = {name: torch.where(valid, v, 0.0) for name, v in noise.items()}
    shape = a["target"].shape
    expected: dict[str, Near | Tensor] = {}
    results = {name: masked[name].view(shape) for name in masked if name != "loss"}
    for name, value in results.items():
        expected[name] = Near(value.detach(), noise[name].view(shape))
    if "reduction" in a:
        if a["reduction"] == "none":
            results["loss"], loss_err, correct = (
                masked["loss"].view(shape),
                noise["loss"].view(shape),
                hits.view(shape),
            )
        else:
            results["loss"], loss_err, correct = masked["loss"].sum(), noise["loss"].sum(), hits.sum()
            if a["reduction"] == "mean":
                divisor = share.sum()
                none = torch.tensor(0.0 if a["all_ignored"] == "zero" else torch.nan, dtype=torch.float64)
                loss_err = loss_err / divisor
                results["loss"] = results["loss"] * 0 + none if divisor == 0 else results["loss"] / divisor
                correct = none if not valid.any() else correct / valid.sum()
        expected["loss"] = Near(
            results["loss"].detach(), loss_err + FEW * EPS32 * results["loss"].detach().abs()
        )
        expected["accuracy"] = correct.float()
        results["y"], expected["y"] = results["loss"], expected["loss"]
    else:
        expected["accuracy"] = hits.view(shape).float()
        results["y"], expected["y"] = results["logprobs"], expected["logprobs"]
    if not upstream:
        return expected
    terms = [(results[name].nan_to_num() * g.detach().double()).sum() for name, g in upstream.items()]
    torch.autograd.backward(terms)
    dx = x.grad
    assert dx is not None
    # Error of dx in fp32, then its rounding; both are nearly independent between elements.
    p_err = z_err.amax(1, keepdim=True) + few * (1 + log_p.detach().masked_fill(~finite, 0.0).abs())
    sizes = _sizes(a, upstream, divisor, p.detach(), logs.detach(), entropy.detach(), lse.detach(), y, valid)
    slope = scale * torch.ones_like(dx)
    if a["softcap"] is not None:
        slope = slope * (1 - torch.tanh(a["logit_scale"] * x.detach() / a["softcap"]) ** 2) + 1e-6 * scale
    dx_err = sizes * slope * p_err
    unit = _unit(a["hidden"], a["weight"])
    if unit == 0.5 * torch.finfo(torch.float16).eps:
        dx_err = dx_err + 2.0**-24 * (dx.abs().amax() + sizes.amax())
    dx_err = torch.where(valid[:, None] & finite, dx_err, 0.0)
    rounded = unit * dx.abs()
    weight = leaves["weight"].detach()
    plain = hidden.detach()

    dhidden_err = dx_err @ weight.abs() + SIGMAS * (rounded.square() @ weight.square()).sqrt()
    dhidden_err = dhidden_err + product_of_head(dx, weight).noise
    dweight_err = dx_err.t() @ plain.abs() + SIGMAS * (rounded.square().t() @ plain.square()).sqrt()
    dweight_err = dweight_err + product_of_head(dx.t(), plain).noise
    gradient = leaves["hidden"].grad
    assert gradient is not None
    expected["dhidden"] = Near(
        gradient.where(valid.view(shape)[..., None], 0.0),
        dhidden_err.where(valid[:, None], 0.0).view(gradient.shape),
    )
    assert leaves["weight"].grad is not None
    expected["dweight"] = Near(leaves["weight"].grad, dweight_err)
    if "bias" in leaves:
        assert leaves["bias"].grad is not None
        noise_bias = dx_err.sum(0) + SIGMAS * rounded.square().sum(0).sqrt() + 16 * EPS32 * dx.abs().sum(0)
        expected["dbias"] = Near(leaves["bias"].grad, noise_bias)
    return expected


def _sizes(
    a: dict[str, Any], upstream: dict[str, Tensor], divisor: Tensor, p: Tensor, logs: Tensor, entropy: Tensor,
    lse: Tensor, y: Tensor, valid: Tensor,
) -> Tensor:  # fmt: skip
    """Return the magnitude of the terms of dz, per element."""
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
    # The mean is lse - spread, whose gradients cancel each other except for rounding.
    per_token = per_token + 2 * of("mean_logits")
    everywhere = everywhere + (of("mean_logits") / vocab)[:, None]
    dentropy = of("entropy")[:, None] * (logs.abs() + entropy[:, None] + 1)
    sizes = p * (per_token[:, None] + dentropy) + everywhere
    return sizes.scatter_add(1, y[:, None], target[:, None] * p.gather(1, y[:, None]).clamp(min=1e-3))


def _forward_truth(call: Call, upstream: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    return head_truth(arguments(call), upstream)


def _backward_truth(call: Call, upstream: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the gradients of the formula for a call of the op the way autograd calls it.

    A spread is the loss with label_smoothing=1."""
    tensors = {name: call[name] for name in ("hidden", "weight", "target", "bias")}
    a = arguments(Call(linear_logprobs, tensors)) | {
        "softcap": call["softcap"],
        "temperature": 1 / call["scale"],
    }
    named = {"logprobs": call["dlogprob"], "lse": call["dlse"], "entropy": call["dentropy"]}
    expected = head_truth(a, {name: g for name, g in named.items() if g is not None})
    if call["dspread"] is None:
        return expected
    b = arguments(Call(linear_cross_entropy, tensors))
    b |= {"softcap": call["softcap"], "temperature": 1 / call["scale"], "class_weight": call["classes"]}
    more = head_truth(b | {"label_smoothing": 1.0, "reduction": "none"}, {"loss": call["dspread"]})
    both: dict[str, Near | Tensor] = {}
    for name in ("dhidden", "dweight", "dbias"):
        one, two = expected[name], more[name]
        assert isinstance(one, Near)
        assert isinstance(two, Near)
        both[name] = Near(one.truth + two.truth, one.noise + two.noise)
    return both


# ---- kernels --------------------------------------------------------------------------------------------------

# Rows with a label, then the others; element `rows` is the number of rows with a label.
_ORDER = Loaded(least=0, below="rows", distinct=True, apart=("rows", Loaded(least=0, most="rows")))

FAMILY = Family(
    workloads=WORKLOADS,
    # Backward recomputes the logits and computes two gradients.
    flops={"linear_logprobs": _flops, "linear_logprobs_backward": lambda workload: 3 * _flops(workload)},
    truths={"linear_logprobs": _forward_truth, "linear_logprobs_backward": _backward_truth},
    # Products write other tiles than they read.
    moved={
        "linear_logprobs_kernel": Moved({"hidden_ptr"}, set()),
        "linear_dlogits_kernel": Moved({"hidden_ptr"}, set()),
        "linear_dweight_kernel": Moved({"hidden_ptr"}, set()),
        "linear_dhidden_kernel": Moved({"dlogits_ptr"}, set()),
    },
    # A lane of AMD's matrix units holds four neighbors of a result: 64 bits of bf16.
    widths=dict.fromkeys(
        ("linear_dlogits_kernel", "linear_dweight_kernel", "linear_dhidden_kernel"), Width("gfx", 64)
    ),
    loaded={
        (kernel, "order_ptr"): _ORDER
        for kernel in (
            "linear_logprobs_kernel",
            "linear_factors_kernel",
            "linear_dlogits_kernel",
            "linear_dweight_kernel",
            "linear_dhidden_kernel",
            "_join_statistics_kernel",
        )
    },
)
