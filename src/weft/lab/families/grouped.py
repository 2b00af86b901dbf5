"""Workloads of products of groups: the experts of models, forward and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops import grouped_matmul, grouped_wgrad, quantize
from ...ops.common.groups import real_rows_reference
from ..problem import Call, Inputs, Workload

# Experts on one device, rows of a weight and K.
LAYERS: dict[str, tuple[int, int, int]] = {
    "qwen3-30b-a3b/down": (4, 2048, 768),
    "odd/33": (3, 47, 33),
}

# The formats of rows and weights, None for plain numbers, and further arguments.
OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8-blocks": {"x": "1x128", "w": "128x128", "align": 128},
    "glu-1x128": {"x": "1x128", "w": "128x128", "align": 128, "glu": "silu", "quantize": "1x128"},
    "fp8-blocks-wgrad": {"x": "1x128", "dy": "1x128", "align": 128},
}

_USED: dict[str, dict[str, tuple[str, ...]]] = {
    "grouped_matmul": {
        "bf16": ("qwen3-30b-a3b/down", "odd/33"),
        "fp8-blocks": ("qwen3-30b-a3b/down",),
        "glu-1x128": ("qwen3-30b-a3b/down",),
    },
    "grouped_wgrad": {
        "bf16": ("qwen3-30b-a3b/down", "odd/33"),
        "fp8-blocks-wgrad": ("qwen3-30b-a3b/down",),
    },
}
_SHARED = "tiles of rows share the weights of their group, and tiles of columns the rows"


def group_ends(rows: int, groups: int, align: int, device: torch.device) -> Tensor:
    """Where groups end that share this many rows unevenly; each has rows, if there are enough."""
    if device.type == "meta":
        return torch.empty(groups, dtype=torch.int32, device=device)
    ends: list[int] = []
    begin = 0
    for group in range(groups):
        later = groups - 1 - group
        room = rows - begin - later * align
        size = max(room * 3 // 4 if later else room, 1)
        ends.append(min(begin + size, rows))
        begin = min(-(-ends[-1] // align) * align, rows)
    return torch.tensor(ends, dtype=torch.int32, device=device)


def _quantised(x: Tensor, spec: str | None, along_rows: bool = False) -> Tensor:
    return x if spec is None else quantize(x, spec, rowwise=not along_rows, columnwise=along_rows)


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    settings = dict(workload.settings)
    rows, k = shape
    groups, n = settings.pop("groups"), settings.pop("columns")
    align = settings.setdefault("align", 1)
    weight = inputs.normal(groups, n, k, std=k**-0.5)
    kwargs: dict[str, Any] = {
        "x": _quantised(inputs.activation(rows, k), settings.pop("x", None)),
        "w": _quantised(weight, settings.pop("w", None)),
        "ends": group_ends(rows, groups, align, inputs.device),
    }
    return Call(grouped_matmul, kwargs | settings | {"engine": "weft"})


def _build_wgrad(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    settings = dict(workload.settings)
    rows, k = shape
    groups, n = settings.pop("groups"), settings.pop("columns")
    align = settings.setdefault("align", 1)
    ends = group_ends(rows, groups, align, inputs.device)
    operands = {"dy": inputs.normal(rows, n), "x": inputs.activation(rows, k)}
    kwargs: dict[str, Any] = {
        name: _quantised(_without_pads(x, ends, align), settings.pop(name, None), along_rows=True)
        for name, x in operands.items()
    }
    return Call(grouped_wgrad, kwargs | {"ends": ends} | settings | {"engine": "weft"})


def _without_pads(x: Tensor, ends: Tensor, align: int) -> Tensor:
    """x with zeros in the rows of no group."""
    if x.device.type == "meta":
        return x
    return x.masked_fill_(~real_rows_reference(ends, len(x), align)[:, None], 0)


WORKLOADS: tuple[Workload, ...] = tuple(
    Workload(
        op=op,
        name=name,
        options=options,
        shape=("rows", k),
        rows=512,
        build=_build if op == "grouped_matmul" else _build_wgrad,
        tags=frozenset({"training"} if op == "grouped_matmul" else {"training", "backward"}),
        settings=(("groups", groups), ("columns", n), *OPTIONS[options].items()),
        rereads=_SHARED,
        moves=1.5,
    )
    for op, used in _USED.items()
    for options, names in used.items()
    for name in names
    for groups, n, k in (LAYERS[name],)
)


def _flops(workload: Workload) -> int:
    return int(2 * workload.rows * dict(workload.settings)["columns"] * workload.cols)


FLOPS = {"grouped_matmul": _flops, "grouped_wgrad": _flops}
