"""Workloads of permute and unpermute: the tokens of MoE layers on their way to the experts and back."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops import RowMap, permute, quantize, row_map, unpermute
from ...ops.moe.permute import UnpermuteNeeds
from ...quant import PLAIN
from ...quant.straight import take_apart
from ..problem import Call, Inputs, Size, Workload, run_op


class Layer(NamedTuple):
    """An MoE layer as one rank sees it."""

    hidden: int
    experts: int
    slots: int  # how many experts a token has


LAYERS: dict[str, Layer] = {
    "linghe/hidden": Layer(2048, 256, 8),
    "qwen3-30b-a3b/hidden": Layer(2048, 128, 8),
    "deepseek-v3/hidden": Layer(7168, 256, 8),
    "mixtral-8x7b/hidden": Layer(4096, 8, 2),
    "odd/33": Layer(33, 5, 3),
    "odd/200": Layer(200, 7, 3),
}

# The sets of options: arguments of the function, and these settings of a workload:
#   align    the experts' regions are multiples of it
#   probs    there are probabilities, which permute moves and by which unpermute multiplies
#   carried  unpermute moves a number for each row back
#   mask     routing and probabilities are [tokens, experts]
#   payload  the rows come quantised in this format
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"align": 16},
    "probs": {"align": 16, "probs": True},
    "carried": {"align": 16, "carried": True},
    "mask": {"align": 16, "probs": True, "mask": True},
    "1x128": {"align": 16, "probs": True, "quantize": "1x128"},
    "row-fp8": {"align": 16, "probs": True, "quantize": "row"},
    "1x128-both": {"align": 128, "probs": True, "quantize": "1x128", "columnwise": True},
    "mx-both": {"align": 32, "probs": True, "quantize": "mx", "columnwise": True},
    "1x128-payload": {"align": 16, "probs": True, "payload": "1x128"},
    "mx-payload": {"align": 32, "probs": True, "payload": "mx"},
}

_USED: dict[str, dict[str, tuple[str, ...]]] = {
    "permute": {
        "plain": ("deepseek-v3/hidden",),
        "probs": ("linghe/hidden", "odd/33"),
        "mask": ("qwen3-30b-a3b/hidden", "odd/200"),
        "1x128": ("qwen3-30b-a3b/hidden", "odd/200"),
        "row-fp8": ("qwen3-30b-a3b/hidden", "odd/200"),
        "1x128-both": ("mixtral-8x7b/hidden", "odd/200"),
        "mx-both": ("mixtral-8x7b/hidden", "odd/33"),
        "1x128-payload": ("deepseek-v3/hidden",),
        "mx-payload": ("odd/200",),
    },
    "unpermute": {
        "plain": ("deepseek-v3/hidden",),
        "carried": ("linghe/hidden", "odd/33"),
        "probs": ("qwen3-30b-a3b/hidden", "odd/200"),
        "mask": ("odd/200",),
        "1x128-payload": ("deepseek-v3/hidden",),
        "mx-payload": ("odd/200",),
    },
    "unpermute_backward": {
        "probs": ("qwen3-30b-a3b/hidden", "odd/200"),
        "mask": ("odd/200",),
        "1x128-payload": ("deepseek-v3/hidden",),
    },
}


def _routing(inputs: Inputs, tokens: int, layer: Layer, mask: bool) -> Tensor:
    """The best experts of every token, from random scores."""
    scores = inputs.normal(tokens, layer.experts, dtype=torch.float32)
    chosen = scores.topk(layer.slots).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True) if mask else chosen


def rows_of(name: str, tokens: int, layer: Layer, align: int) -> int | None:
    """Room for the rows. For linghe's layer, pads of half of `align` for each expert, as in the published row, which is
    enough for its tokens; else None, the worst case."""
    enough = name.startswith("linghe") and tokens >= 4096
    return tokens * layer.slots + layer.experts * align // 2 if enough else None


def _rows(workload: Workload, inputs: Inputs, tokens: int) -> RowMap:
    settings = dict(workload.settings)
    layer = LAYERS[workload.name]._replace(experts=settings["experts"], slots=settings["slots"])
    mask = settings.get("mask", False)
    return row_map(
        _routing(inputs, tokens, layer, mask),
        layer.experts,
        slots=layer.slots if mask else None,
        align=settings["align"],
        rows=rows_of(workload.name, tokens, layer, settings["align"]),
    )


def _probs(inputs: Inputs, rows: RowMap) -> Tensor:
    last = rows.row_of_slot.shape[-1] if rows.experts is None else rows.counts.shape[0]
    return inputs.normal(*rows.row_of_slot.shape[:-1], last, mean=0.3, std=0.1, dtype=torch.float32)


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    settings = dict(workload.settings)
    rows = _rows(workload, inputs, shape[0])
    back = workload.op == "unpermute"
    numbers: Tensor = inputs.activation(rows.slot_of_row.shape[0] if back else shape[0], shape[-1])
    if "payload" in settings:
        numbers = quantize(numbers, settings["payload"])
    kwargs: dict[str, Any] = {"y" if back else "x": numbers, "rows": rows}
    if settings.get("probs"):
        kwargs["probs"] = _probs(inputs, rows)
    if settings.get("carried"):
        kwargs["carried"] = inputs.normal(rows.slot_of_row.shape[0], dtype=torch.float32)
    for name in ("quantize", "columnwise"):
        if name in settings:
            kwargs[name] = settings[name]
    return Call(unpermute if back else permute, kwargs)


def _build_backward(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    """The backward of an unpermute with probabilities."""
    settings = dict(workload.settings)
    rows = _rows(workload, inputs, shape[0])
    values = inputs.activation(rows.slot_of_row.shape[0], shape[-1])
    codes = PLAIN
    if "payload" in settings:
        _, codes = take_apart(quantize(values, settings["payload"]))
    kwargs: dict[str, Any] = {
        "dy": inputs.normal(*shape),
        "rows": values if codes is PLAIN else None,
        "codes": codes,
        "probs": _probs(inputs, rows),
        "map": rows,
        "needs": UnpermuteNeeds(True, True),
    }
    return Call(functools.partial(run_op, "unpermute_backward"), kwargs)


def _build_map(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    settings = dict(workload.settings)
    tokens, last = shape
    layer = LAYERS[workload.name.replace("routing", "hidden")]
    if settings.get("mask"):
        layer = layer._replace(experts=last, slots=min(layer.slots, last))
    else:
        layer = layer._replace(experts=max(layer.experts, last), slots=last)
    kwargs = {
        "routing": _routing(inputs, tokens, layer, settings.get("mask", False)),
        "experts": layer.experts,
        "align": settings["align"],
        "rows": rows_of(workload.name, tokens, layer, settings["align"]),
    }
    return Call(row_map, {**kwargs, "slots": layer.slots} if settings.get("mask") else kwargs)


def _map_shape(name: str, options: str) -> tuple[Size, ...]:
    layer = LAYERS[name.replace("routing", "hidden")]
    return ("rows", layer.experts if options == "mask" else layer.slots)


_GATHERED = (
    "a group along the rows has rows of many tokens, so a token's row is read once for each of its slots"
)

_LANES = "a scale is asked for by each number of its group, and those of a row lie far apart"


def _rereads(op: str, options: str) -> dict[str, Any]:
    """`moves` and `rereads` of a workload that moves more than the least bytes."""
    if OPTIONS[options].get("columnwise"):
        return {"moves": 1.33, "rereads": _GATHERED}
    if options == "row-fp8":
        return {
            "moves": 1.2,
            "rereads": "the amax of a row comes before its first code: the row is read twice",
        }
    if op.startswith("unpermute") and options == "1x128-payload":
        return {"moves": 3.9, "rereads": _LANES}
    return {}


WORKLOADS: tuple[Workload, ...] = (
    *(
        Workload(
            op=op,
            name=name,
            options=options,
            shape=("rows", LAYERS[name].hidden),
            rows=8192,
            build=_build_backward if op == "unpermute_backward" else _build,
            tags=frozenset({"training", "backward"} if op == "unpermute_backward" else {"training"}),
            settings=(
                *(("experts", LAYERS[name].experts), ("slots", LAYERS[name].slots)),
                *OPTIONS[options].items(),
            ),
            **_rereads(op, options),
        )
        for op, used in _USED.items()
        for options, names in used.items()
        for name in names
    ),
    *(
        Workload(
            op="row_map",
            name=name,
            options=options,
            shape=_map_shape(name, options),
            rows=8192,
            build=_build_map,
            settings=tuple(OPTIONS[options].items()),
            rereads="a token's place follows from the counts of all blocks before it, which are written and read back",
            moves=2.3,
        )
        for name, options in (
            ("linghe/routing", "plain"),
            ("qwen3-30b-a3b/routing", "mask"),
            ("odd/33", "plain"),
        )
    ),
)
