"""Sharded vocabularies: the ops on one rank's shard."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.loss.statistics import NamedStatistics, Softmax, Wanted
from ...ops.sampling.noise import gumbel
from ...runtime import Op, catalogue
from ..family import Family
from ..problem import Call, Inputs, Workload
from ..truth import EPS32, Near
from .cross_entropy import draw_targets
from .linear_logprobs import FEW, SHARED, product_of_head

RANKS = 4
# (columns of the whole vocabulary, first column of the shard, columns of the shard)
SHARDS: dict[str, tuple[int, int, int]] = {
    "qwen3-30b-a3b/vocabulary-shard": (151936, 37984, 37984),
    "gpt2/last-vocabulary-shard": (50257, 37695, 12562),
    "odd/1030-shard": (1030, 259, 251),
}
# (H, tokens) and a shard
HEADS: dict[str, tuple[int, int, tuple[int, int, int]]] = {
    "cut/head-shard": (256, 512, (1024, 256, 256)),
    "odd/33-shard": (33, 300, (77, 20, 19)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"softcap": None, "scale": 1.0, "entropy": False, "spread": False, "accuracy": False},
    "smooth": {"softcap": None, "scale": 1.0, "entropy": False, "spread": True, "accuracy": False, "ignored": 3},
    "everything": {
        "softcap": 20.0, "scale": 0.8, "entropy": True, "spread": True, "accuracy": True, "ignored": 5,
        "weighted": True,
    },
}  # fmt: skip
HEAD_OPTIONS = {"plain": OPTIONS["plain"], "everything": OPTIONS["everything"] | {"squares": True}}
_USED = {
    "plain": ("qwen3-30b-a3b/vocabulary-shard",),
    "smooth": ("gpt2/last-vocabulary-shard",),
    "everything": ("odd/1030-shard",),
}
_USED_HEADS = {"plain": ("cut/head-shard",), "everything": ("odd/33-shard",)}


_OPTIONS = (*Softmax._fields, *Wanted._fields)


def _run(op: Op[Any, Any], kwargs: dict[str, Any]) -> Any:
    """Call an op with keyword arguments, in which the fields of `softmax` and `wanted` are flattened."""
    tensors = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
    tensors["softmax"] = Softmax(*(kwargs[name] for name in Softmax._fields))
    if "wanted" in op.arguments.cls._fields:
        tensors["wanted"] = _wanted(kwargs)
    return op(op.arguments.cls(**tensors))


def _wanted(kwargs: dict[str, Any]) -> Wanted:
    return Wanted(*(kwargs[name] for name in Wanted._fields))


def cross_entropy_statistics(**kwargs: Any) -> NamedStatistics:
    """Call the op `cross_entropy_statistics`."""
    stats = _run(catalogue["cross_entropy_statistics"], kwargs).stats
    return NamedStatistics.of(stats, _wanted(kwargs))


def linear_statistics(**kwargs: Any) -> NamedStatistics:
    """Call the op `linear_statistics`."""
    return NamedStatistics.of(_run(catalogue["linear_statistics"], kwargs).stats, _wanted(kwargs))


class DrawnStatistics(NamedTuple):
    """Statistics of drawn targets by name, [T] each."""

    largest: Tensor
    total: Tensor
    picked: Tensor
    highest: Tensor
    best: Tensor  # a column, as an integer


def linear_sample_statistics(**kwargs: Any) -> DrawnStatistics:
    """Call the op `linear_sample_statistics`."""
    largest, total, picked, highest, bits = _run(catalogue["linear_sample_statistics"], kwargs).stats.unbind()
    best = bits.view(torch.int64 if bits.dtype is torch.float64 else torch.int32)
    return DrawnStatistics(largest, total, picked, highest, best)


class Results(NamedTuple):
    """Results of `sharded_logprobs`."""

    logprobs: Tensor
    lse: Tensor
    entropy: Tensor | None
    spread: Tensor | None
    hits: Tensor | None


def sharded_logprobs(**kwargs: Any) -> Results:
    """Call the op `sharded_logprobs`, leaving out the outputs that only its backward reads."""
    outputs = _run(catalogue["sharded_logprobs"], kwargs)
    return Results(outputs.logprobs, outputs.lse, outputs.entropy, outputs.spread, outputs.hits)


def _kind(workload: Workload) -> dict[str, Any]:
    options = dict(workload.settings)
    vocab, start, _ = options["shard"]
    common = {name: options[name] for name in ("softcap", "scale", "entropy", "spread", "accuracy")}
    squares = options.get("squares", False)
    return {"start": start, "vocab": vocab, "ignore_index": -100, **common, "squares": squares}


def _targets(inputs: Inputs, options: dict[str, Any], lead: list[int]) -> Tensor:
    """Draw targets in the whole vocabulary, every other one in the shard."""
    vocab, start, length = options["shard"]
    target = draw_targets(inputs, lead, vocab)
    if target.device.type != "meta":
        target[::2] = start + target[::2] % length
        if "ignored" in options:
            target[1 :: options["ignored"]] = -100
    return target


def _weights(inputs: Inputs, options: dict[str, Any], cols: int) -> Tensor | None:
    if not options.get("weighted"):
        return None
    exact = torch.float64 if inputs.dtype == torch.float64 else torch.float32
    return inputs.normal(cols, dtype=exact).abs()


def _build_rows(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    options = dict(workload.settings)
    tensors = {
        "logits": inputs.normal(*shape, std=2.0),
        "target": _targets(inputs, options, list(shape[:-1])),
        "weight": _weights(inputs, options, shape[-1]),
    }
    return Call(cross_entropy_statistics, tensors | _kind(workload))


def _build_join(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    """Build the join of RANKS ranks: the shard is the second rank's; the statistics of the others are random."""
    call = _build_rows(workload, inputs, shape)
    kind = _kind(workload)
    wanted = _wanted(kind)
    exact = torch.float64 if inputs.dtype == torch.float64 else torch.float32
    tokens = call["target"].numel()
    stats = inputs.normal(RANKS, wanted.statistics, tokens, dtype=exact)
    if stats.device.type != "meta":
        start, length = kind["start"], shape[-1]
        y = call["target"].reshape(-1)
        for rank in range(RANKS):
            rows = NamedStatistics.of(stats[rank], wanted)
            rows.largest.abs_().add_(6.0 + rank / 8)
            rows.total.abs_().add_(1.0)
            rows.picked.copy_(torch.where((y < start) & (y >= 0) & torch.tensor(rank == 0), 3.0, 0.0))
            rows.picked.add_(torch.where((y >= start + length) & torch.tensor(rank == 2), 2.0, 0.0))
            if rows.moment is not None:
                rows.moment.abs_().neg_()
            if rows.below is not None and rows.mass is not None and rows.there is not None:
                rows.there.fill_(length)
                rows.mass.abs_().add_(length)
                rows.below.abs_().mul_(-length)
            if rows.best is not None:
                rows.best.fill_(start + (rank - 1) * length + 1)
        stats[1] = _run(catalogue["cross_entropy_statistics"], call.kwargs).stats
    kwargs = {name: call[name] for name in ("logits", "target", "weight")}
    return Call(sharded_logprobs, {"stats": stats, **kwargs, **kind, "inplace": False})


def _build_head(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    options = dict(workload.settings)
    *lead, cols = shape
    length = options["shard"][2]
    tensors = {
        "hidden": inputs.normal(*shape),
        "weight": inputs.normal(length, cols, std=2.0 * cols**-0.5),
        "bias": inputs.normal(length) if options.get("weighted") else None,
        "target": _targets(inputs, options, lead),
        "classes": _weights(inputs, options, length),
    }
    return Call(linear_statistics, tensors | _kind(workload))


def draw_noise(inputs: Inputs, rows: int | None) -> dict[str, Tensor]:
    """Return a seed and a step for each of the rows, or one of each for all rows."""
    shape = () if rows is None else (rows,)
    seed, step = (inputs.normal(*shape, std=2.0**40, dtype=torch.float32).long() for _ in range(2))
    return {"seed": seed, "step": step}


def _build_drawn(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    """Build the draws of a shard: of each row by its own noise, or by one seed and step for all."""
    call = _build_head(workload, inputs, shape)
    tensors = {name: call[name] for name in ("hidden", "weight", "bias")}
    options = {name: call[name] for name in Softmax._fields}
    noise = draw_noise(inputs, shape[0] if workload.options == "everything" else None)
    return Call(linear_sample_statistics, {**tensors, **noise, "stats": None, **options})


def _more(op: str, name: str) -> dict[str, Any]:
    if op in ("linear_statistics", "linear_sample_statistics"):
        return {"moves": 3.0, "rereads": SHARED}
    if op == "sharded_logprobs":
        return {
            "unread": ("logits", "weight"),
            "moves": 1.15,
            "rereads": "what is kept of a token for the backward is as much as some of its results",
        }
    return {}


WORKLOADS: tuple[Workload, ...] = tuple(
    Workload(
        op=op,
        name=name,
        options=options,
        shape=("rows", HEADS[name][0] if name in HEADS else SHARDS[name][2]),
        rows=HEADS[name][1] if name in HEADS else 8192,
        build=build,
        settings=(*settings[options].items(), ("shard", HEADS[name][2] if name in HEADS else SHARDS[name])),
        **_more(op, name),
    )
    for op, build, used, settings in (
        ("cross_entropy_statistics", _build_rows, _USED, OPTIONS),
        ("sharded_logprobs", _build_join, _USED, OPTIONS),
        ("linear_statistics", _build_head, _USED_HEADS, HEAD_OPTIONS),
        ("linear_sample_statistics", _build_drawn, _USED_HEADS, HEAD_OPTIONS),
    )
    for options, names in used.items()
    for name in names
)


# ---- truth ----------------------------------------------------------------------------------------------------

LOWEST = float(torch.finfo(torch.float32).min)


def _capped(call: Call, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (z, error allowed to fp32)."""
    softcap, scale = call["softcap"], call["scale"]
    u = x if softcap is None else softcap * torch.tanh(x / softcap)
    z_err = (0.0 if softcap is None and scale == 1 else 4 * EPS32) * (u * scale).detach().abs()
    return u * scale, z_err if softcap is None else z_err + 4 * EPS32 * softcap * scale


def _tokens_of(call: Call, cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (targets, which are valid, which are in this shard)."""
    y = call["target"].reshape(-1).long()
    valid = (y != call["ignore_index"]) & (y >= 0) & (y < call["vocab"])
    return y, valid, valid & (y >= call["start"]) & (y < call["start"] + cols)


def _statistics_truth(
    call: Call, z: Tensor, z_err: Tensor, classes: Tensor | None
) -> dict[str, Near | Tensor]:
    cols = z.shape[1]
    y, valid, here = _tokens_of(call, cols)
    largest = z.amax(1)
    t = z - largest[:, None]
    e = t.exp()
    few = FEW * EPS32
    exp_err = z_err.amax(1, keepdim=True) + few
    expected: dict[str, tuple[Tensor, Tensor]] = {
        "largest": (largest, z_err.amax(1) + EPS32 * largest.abs()),
        "total": (e.sum(1), (e * (exp_err + EPS32 * t.abs())).sum(1)),
    }
    column = torch.where(here, y - call["start"], 0)[:, None]
    expected["picked"] = (
        torch.where(here, z.gather(1, column)[:, 0], 0.0),
        torch.where(here, z_err.gather(1, column)[:, 0], 0.0),
    )
    if call["entropy"]:
        expected["moment"] = ((e * t).sum(1), (e * (1 + t.abs()) * (exp_err + few * (1 + t.abs()))).sum(1))
    if call["spread"]:
        w = torch.ones(cols, dtype=torch.float64) if classes is None else classes.double()
        size = (w * (t.abs() + z.abs() + largest.abs()[:, None])).sum(1)
        expected["below"] = ((w * t).sum(1), few * size + (w * exp_err).sum(1))
        expected["mass"] = (w.sum().expand(len(z)), few * w.sum().expand(len(z)))
        expected["there"] = (torch.full_like(largest, cols), torch.zeros_like(largest))
    if call["squares"]:
        expected["squares"] = ((2 * t).exp().sum(1), ((2 * t).exp() * 2 * (exp_err + EPS32 * t.abs())).sum(1))
    empty = {"largest": LOWEST}
    near: dict[str, Near | Tensor] = {
        name: Near(torch.where(valid, value, empty.get(name, 0.0)), torch.where(valid, noise, 0.0))
        for name, (value, noise) in expected.items()
    }
    if call["accuracy"]:
        near["best"] = torch.where(valid, z.argmax(1) + call["start"], -1).int()
    return near


def _rows_truth(call: Call, upstream: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    x = call["logits"].double()
    return _statistics_truth(call, *_capped(call, x.reshape(-1, x.shape[-1])), call["weight"])


def _logits_of_head(call: Call) -> tuple[Tensor, Tensor]:
    """Return (z, error allowed to fp32) of a head."""
    hidden = call["hidden"].double().reshape(-1, call["hidden"].shape[-1])
    product = product_of_head(hidden, call["weight"].double().t())
    x, x_err = product.truth, product.noise
    if call["bias"] is not None:
        x = x + call["bias"].double()
        x_err = x_err + EPS32 * x.abs()
    z, z_err = _capped(call, x)
    return z, z_err + call["scale"] * x_err


def _head_truth(call: Call, upstream: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    return _statistics_truth(call, *_logits_of_head(call), call["classes"])


def drawn_truth(
    z: Tensor, z_err: Tensor, seed: Tensor | None, step: Tensor | None, start: int
) -> tuple[Tensor, Near]:
    """Return the columns of the highest scores, which must be so by more than the error, and these scores."""
    score, error = z, z_err
    if seed is not None and step is not None:
        tokens = torch.arange(start, start + z.shape[1])
        score = z + gumbel(seed.reshape(-1, 1), step.reshape(-1, 1), tokens).double()
        error = error + EPS32 * score.abs()
    error = error.masked_fill(score == -torch.inf, 0.0)
    highest, best = score.max(1)
    own = error.gather(1, best[:, None])
    rivals = (score + error + own).scatter(1, best[:, None], -torch.inf)
    assert (rivals.amax(1) < highest).all(), "two scores are too close to tell which is higher: draw others"
    return best + start, Near(highest, own[:, 0])


def _drawn_statistics_truth(call: Call, upstream: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    z, z_err = _logits_of_head(call)
    best, highest = drawn_truth(z, z_err, call["seed"], call["step"], call["start"])
    plain = dict.fromkeys(Wanted._fields, False)
    stats = _statistics_truth(call.with_(target=best, **plain), z, z_err, None)
    return stats | {"highest": highest, "best": best.int()}


def _joined_truth(call: Call, upstream: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the joint results of all shards, and the gradient of the shard's logits.

    The shard's own statistics are the second of those joined; here they are replaced by its logits, which are
    differentiated."""
    leaf = call["logits"].detach().double().requires_grad_()
    cols = leaf.shape[-1]
    z, z_err = _capped(call, leaf.reshape(-1, cols))
    y, valid, here = _tokens_of(call, cols)
    rows = iter(call["stats"].double().unbind(1))
    largests, totals, picked_parts = next(rows), next(rows), next(rows)
    others = torch.tensor([True, False, *[True] * (len(largests) - 2)])[:, None] & valid
    top = torch.where(others, largests, LOWEST).amax(0).maximum(z.detach().amax(1))
    alpha = torch.where(others, (largests - top).exp(), 0.0)
    t = z - top[:, None]
    total = (totals * alpha).sum(0) + t.exp().sum(1)
    lse = top + total.log()
    column = torch.where(here, y - call["start"], 0)[:, None]
    picked = (picked_parts * others).sum(0) + torch.where(here, z.gather(1, column)[:, 0], 0.0)
    few = FEW * EPS32
    size = 1 + lse.detach().abs() + picked.detach().abs() + top.abs()
    values: dict[str, Tensor] = {"logprobs": picked - lse, "lse": lse}
    noise: dict[str, Tensor] = {"logprobs": few * size, "lse": few * size}
    entropy = torch.zeros_like(lse)
    if call["entropy"]:
        moments = torch.where(others, next(rows) + (largests - top) * totals, 0.0)
        moment = (moments * alpha).sum(0) + (t.exp() * t).sum(1)
        entropy = values["entropy"] = total.log() - moment / total
        noise["entropy"] = few * (size + (moment / total).detach().abs())
    w = torch.ones(cols, dtype=torch.float64) if call["weight"] is None else call["weight"].double()
    mass_share = count_share = torch.zeros_like(lse)
    if call["spread"]:
        below, mass, there = next(rows), next(rows), next(rows)
        count = (there * others).sum(0) + cols
        others_below = torch.where(others, below + mass * (largests - top), 0.0).sum(0)
        all_mass = (mass * others).sum(0) + w.sum()
        values["spread"] = (all_mass * total.log() - others_below - (w * t).sum(1)) / count
        sizes = all_mass * total.log().abs() + others_below.abs() + (w * t.abs()).sum(1)
        noise["spread"] = few * (sizes.detach() / count + size)
        mass_share, count_share = all_mass / count, 1 / count
    expected: dict[str, Near | Tensor] = {}
    masked = {name: torch.where(valid, value, 0.0) for name, value in values.items()}
    for name, value in masked.items():
        expected[name] = Near(value.detach(), torch.where(valid, noise[name], 0.0))
    if call["accuracy"]:
        own = torch.where(valid, z.detach().amax(1), LOWEST)
        largest = torch.where(others, largests, LOWEST)
        largest[1] = own
        best = call["stats"][:, -1].contiguous().view(torch.int32)
        first = best.long().gather(0, largest.argmax(0, keepdim=True))[0]
        expected["hits"] = (valid & (first == y)).float()
    if not upstream:
        return expected
    torch.autograd.backward([(masked[name] * g.double()).sum() for name, g in upstream.items()])
    gradient = leaf.grad
    assert gradient is not None

    def of(name: str) -> Tensor:
        return upstream[name].double().abs()[:, None] if name in upstream else torch.zeros(len(z), 1).double()

    p = (t.exp() / total[:, None]).detach()
    logs = (t - total.log()[:, None]).detach().abs()
    per_token = of("logprobs") + of("lse") + of("spread") * mass_share[:, None]
    sizes = p * (per_token + of("entropy") * (logs + entropy.detach()[:, None] + 1))
    sizes = sizes + of("spread") * count_share[:, None] * w
    sizes = sizes.scatter_add(1, column, of("logprobs") * here[:, None])
    slope = torch.full_like(sizes, call["scale"])
    if call["softcap"] is not None:
        tanh = torch.tanh(leaf.detach().reshape(-1, cols) / call["softcap"])
        slope = call["scale"] * (1 - tanh**2) + 1e-6
    dx_err = sizes * slope * (few * (1 + logs) + z_err + z_err.amax(1, keepdim=True))
    expected["dlogits"] = Near(gradient, torch.where(valid[:, None], dx_err, 0.0).view(leaf.shape))
    return expected


FAMILY = Family(
    workloads=WORKLOADS,
    truths={
        "cross_entropy_statistics": _rows_truth,
        "linear_statistics": _head_truth,
        "linear_sample_statistics": _drawn_statistics_truth,
        "sharded_logprobs": _joined_truth,
    },
)
