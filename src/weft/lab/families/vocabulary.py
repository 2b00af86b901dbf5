"""Workloads of a sharded vocabulary: the part that one rank of several holds."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.loss.statistics import NamedStatistics, Softmax, Wanted
from ...runtime import Op, catalogue
from ..problem import Call, Inputs, Workload
from .cross_entropy import draw_targets
from .linear_logprobs import SHARED

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
    """Call an op with arguments by name, among which the members of `softmax` and `wanted` stand one by one."""
    tensors = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
    softmax = Softmax(*(kwargs[name] for name in Softmax._fields))
    return op(op.arguments.cls(**tensors, softmax=softmax, wanted=_wanted(kwargs)))


def _wanted(kwargs: dict[str, Any]) -> Wanted:
    return Wanted(*(kwargs[name] for name in Wanted._fields))


def cross_entropy_statistics(**kwargs: Any) -> NamedStatistics:
    stats = _run(catalogue["cross_entropy_statistics"], kwargs).stats
    return NamedStatistics.of(stats, _wanted(kwargs))


def linear_statistics(**kwargs: Any) -> NamedStatistics:
    return NamedStatistics.of(_run(catalogue["linear_statistics"], kwargs).stats, _wanted(kwargs))


class Results(NamedTuple):
    logprobs: Tensor
    lse: Tensor
    entropy: Tensor | None
    spread: Tensor | None
    hits: Tensor | None


def sharded_logprobs(**kwargs: Any) -> Results:
    """The op of the same name, without the outputs that only its backward reads."""
    found = _run(catalogue["sharded_logprobs"], kwargs)
    return Results(found.logprobs, found.lse, found.entropy, found.spread, found.hits)


def _kind(workload: Workload) -> dict[str, Any]:
    options = dict(workload.settings)
    vocab, start, _ = options["shard"]
    asked = {name: options[name] for name in ("softcap", "scale", "entropy", "spread", "accuracy")}
    squares = options.get("squares", False)
    return {"start": start, "vocab": vocab, "ignore_index": -100, **asked, "squares": squares}


def _targets(inputs: Inputs, options: dict[str, Any], lead: list[int]) -> Tensor:
    """Targets in the whole vocabulary, every other one of them in the shard."""
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
    given = {
        "logits": inputs.normal(*shape, std=2.0),
        "target": _targets(inputs, options, list(shape[:-1])),
        "weight": _weights(inputs, options, shape[-1]),
    }
    return Call(cross_entropy_statistics, given | _kind(workload))


def _build_join(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    """The shard is that of the second of RANKS ranks; the statistics of the others are random."""
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
    given = {
        "hidden": inputs.normal(*shape),
        "weight": inputs.normal(length, cols, std=2.0 * cols**-0.5),
        "bias": inputs.normal(length) if options.get("weighted") else None,
        "target": _targets(inputs, options, lead),
        "classes": _weights(inputs, options, length),
    }
    return Call(linear_statistics, given | _kind(workload))


def _more(op: str, name: str) -> dict[str, Any]:
    if op == "linear_statistics":
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
    )
    for options, names in used.items()
    for name in names
)
