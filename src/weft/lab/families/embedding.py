"""Workloads of rows by index: embeddings, their gradient, and sums of segments."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops import embedding, quantize, segment_sum
from ...ops.embedding.arguments import PART
from ...quant import QTensor
from ..chain import Chain
from ..family import Family, Moved
from ..problem import Call, Inputs, Size, Workload, run_op
from ..symbolic.loaded import Loaded
from ..truth import EPS32, Near, arguments
from .permute import values_of

SHAPES: dict[str, tuple[Size, ...]] = {
    "qwen3-30b-a3b/embedding": ("rows", 2048),
    "gemma3-27b/embedding": ("rows", 5376),
    "odd/33": ("rows", 33),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},  # of each row of the table once, in any order
    "zipf": {"zipf": True},
    "scaled": {"zipf": True, "scale": 5376**0.5, "padding_idx": 0},
    "from-row-fp8": {"table": "row"},
    "from-nvfp4": {"table": "nvfp4"},
    "1x128": {"quantize": "1x128"},
    "mx-both": {"quantize": "mx", "columnwise": True},
    "nvfp4": {"quantize": "nvfp4"},
}
_USED: dict[str, tuple[str, ...]] = {
    "plain": ("qwen3-30b-a3b/embedding",),
    "zipf": ("qwen3-30b-a3b/embedding", "odd/33"),
    "scaled": ("gemma3-27b/embedding", "odd/33"),
    "from-row-fp8": ("qwen3-30b-a3b/embedding",),
    "from-nvfp4": ("odd/33",),
    "1x128": ("qwen3-30b-a3b/embedding",),
    "mx-both": ("odd/33",),
    "nvfp4": ("qwen3-30b-a3b/embedding",),
}
_AGAIN = "a row is read once for each of its ids"
_SORTED = "ids are sorted digit by digit, which for short rows is as much as the rows"


def _ids(inputs: Inputs, tokens: int, zipf: bool) -> tuple[Tensor, int]:
    """Return ids and the number of rows of the table: each row once, or some of them often."""
    drawn = inputs.normal(tokens, dtype=torch.float32)
    if not zipf:
        return drawn.argsort(), tokens
    rows = max(tokens // 2, 3)
    return (drawn.abs().mul(-2).exp() * rows).long().clamp(max=rows - 1), rows


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    settings = dict(workload.settings)
    ids, rows = _ids(inputs, shape[0], settings.pop("zipf", False))
    weight: Tensor = inputs.normal(rows, shape[1])
    if "table" in settings:
        weight = quantize(weight, settings.pop("table"))
    return Call(embedding, {"ids": ids, "weight": weight, **settings})


def _build_sums(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    zipf = dict(workload.settings).get("zipf", False)
    ids, rows = _ids(inputs, shape[0], zipf)
    x = inputs.normal(*shape)
    if workload.options == "segments":
        ends = torch.full((rows,), shape[0] // rows, device=ids.device).cumsum(0)
        return Call(segment_sum, {"x": x, "ends": ends})
    settings = {"rows": rows, "first": 0, "skipped": -1, "scale": 1.0, "is_sorted": False, "dtype": x.dtype}
    return Call(functools.partial(run_op, "sum_rows"), {"x": x, "ids": ids, **settings, "onto": None})


def _sums(options: str, name: str, **more: Any) -> Workload:
    tags = frozenset({"training"} if options == "segments" else {"training", "backward"})
    return Workload("sum_rows", name, options, SHAPES[name], 8192, _build_sums, tags, **more)


def _rereads(options: str) -> dict[str, Any]:
    if options in ("zipf", "scaled"):
        return {"moves": 1.35, "rereads": _AGAIN}
    if options == "nvfp4":
        return {
            "moves": 1.9,
            "rereads": "the amax of the result comes before its first code: rows are read twice",
        }
    return {}


WORKLOADS: tuple[Workload, ...] = (
    *(
        Workload(
            "gather",
            name,
            options,
            SHAPES[name],
            8192,
            _build,
            settings=tuple(OPTIONS[options].items()),
            **_rereads(options),
        )
        for options, names in _USED.items()
        for name in names
    ),
    _sums("plain", "qwen3-30b-a3b/embedding"),
    _sums("zipf", "qwen3-30b-a3b/embedding", settings=(("zipf", True),)),
    _sums("zipf", "odd/33", settings=(("zipf", True),), moves=2.4, rereads=_SORTED),
    _sums("segments", "qwen3-30b-a3b/embedding", settings=(("zipf", True),)),
)


# ---- truth: one row at a time ---------------------------------------------------------------------------------


def _summed(x: Tensor, ids: Tensor, rows: int, skipped: int, scale: float) -> Near:
    """Return sums of rows in float64. Each addition in fp32 rounds, and so does the factor."""
    y, size = torch.zeros(2, rows, x.shape[1], dtype=torch.float64)
    count = torch.zeros(rows, 1)
    for row, id in zip(x.double(), ids.tolist(), strict=True):
        if 0 <= id < rows and id != skipped:
            y[id] += row
            size[id] += row.abs()
            count[id] += 1
    return Near(y * scale, abs(scale) * (count + 1).sqrt() * 2 * EPS32 * size)


def gather_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the rows of the ids, and the gradient of the table."""
    a = arguments(call)
    ids, table = a["ids"].flatten(), values_of(a["weight"])
    y = table[ids] * a["scale"]
    rounds = a["scale"] != 1.0 or isinstance(a["weight"], QTensor)
    y = y.view(*a["ids"].shape, -1)
    expected: dict[str, Near | Tensor] = {"y": Near(y, 2 * EPS32 * y.abs() * rounds)}
    if "y" in gradients:
        dy = gradients["y"].reshape(len(ids), -1)
        skipped = -1 if a["padding_idx"] is None else a["padding_idx"]
        expected["dweight"] = _summed(dy, ids, len(table), skipped, a["scale"])
    return expected


def sum_rows_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return sums of rows, and the gradient of the rows."""
    x, ids, rows = call["x"].detach(), call["ids"], call["rows"]
    if ids is None:
        rows = len(call["ends"])
        ids = torch.repeat_interleave(
            torch.arange(rows), call["ends"].diff(prepend=torch.zeros(1, dtype=torch.int64))
        )
    expected: dict[str, Near | Tensor] = {"y": _summed(x[: len(ids)], ids, rows, -1, 1.0)}
    if "y" in gradients:
        dx = torch.zeros_like(x, dtype=torch.float64)
        dx[: len(ids)] = gradients["y"].double()[ids]
        expected["dx"] = Near(dx, torch.zeros_like(dx))
    return expected


# ---- in plain PyTorch -----------------------------------------------------------------------------------------


def _embedding_chain(call: Call) -> Chain:
    return Chain(lambda ids, weight: F.embedding(ids, weight), (call["ids"], call["weight"]))


_LENGTHS = Loaded(least=0, most=PART)
_TARGETS = Loaded(
    least=-1, below=lambda launch: launch["y.rows"] + launch.rows("partial_ptr"), distinct=True, shared=-1
)
_PLACES = Loaded(least=-1, below="count")
FAMILY = Family(
    workloads=WORKLOADS,
    truths={"gather": gather_truth, "sum_rows": sum_rows_truth},
    chains={("gather", "plain"): _embedding_chain, ("gather", "zipf"): _embedding_chain},
    moved={
        "gather_kernel": Moved({"table.data"}, {"y_ptr", "to.copy.data"}),
        "sum_parts_kernel": Moved({"x_ptr"}, {"y.ptr"}),
        "join_parts_kernel": Moved({"partial_ptr"}, {"y.ptr"}),
    },
    loaded={
        ("digit_kernel", "early_ptr"): _PLACES,
        ("digit_kernel", "late_ptr"): _PLACES,
        ("parts_kernel", "row_ptr"): Loaded(least=0, most="rows", ascending=True),
        ("sum_parts_kernel", "order_ptr"): _PLACES,
        ("sum_parts_kernel", "part_ptr"): _LENGTHS,
        ("sum_parts_kernel", "target_ptr"): _TARGETS,
        ("join_parts_kernel", "target_ptr"): _TARGETS,
        ("join_parts_kernel", "row_ptr"): Loaded(least=0, most="y.rows", ascending=True),
    },
)
