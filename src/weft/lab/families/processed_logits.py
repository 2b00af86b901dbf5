"""Processed logits: temperatures alone, penalties of what was seen, and tokens that a grammar allows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...ops import process_logits
from ..family import Family
from ..problem import Call, Inputs, Size, Workload
from ..truth import EPS32, Near, arguments

SHAPES: dict[str, tuple[Size, ...]] = {
    "llama3-8b/vocabulary": ("rows", 128256),
    "qwen3-30b-a3b/drafts": ("rows", 4, 151936),
    "odd/1030": ("rows", 1030),
}
_USED: dict[str, tuple[str, ...]] = {
    "temperature": ("llama3-8b/vocabulary", "odd/1030"),
    "penalties": ("llama3-8b/vocabulary", "odd/1030"),
    "grammar": ("qwen3-30b-a3b/drafts", "odd/1030"),
    "everything": ("llama3-8b/vocabulary", "odd/1030"),
}


def _penalties(inputs: Inputs, rows: int, cols: int) -> dict[str, Any]:
    """Return penalties, some of them numbers and some of requests; a tenth of the tokens was seen."""
    drawn = inputs.normal(rows, cols, dtype=torch.float32)
    return {
        "repetition": inputs.normal(rows, mean=1.3, std=0.1, dtype=torch.float32),
        "presence": 0.5,
        "frequency": inputs.normal(rows, dtype=torch.float32),
        "counts": (drawn * 3).clamp(3, 7).to(torch.int32) - 3,
        "prompt": drawn < -1.3,
    }


def _allowed(inputs: Inputs, *lead: int, cols: int) -> Tensor:
    """Return words of which most bits are set."""
    drawn = inputs.normal(*lead, -(-cols // 32), dtype=torch.float32) * 2.0**31
    return drawn.clamp(-(2.0**31), 2.0**31 - 256).to(torch.int32)


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    rows, cols = shape[0], shape[-1]
    kwargs: dict[str, Any] = {"logits": inputs.normal(*shape, std=4.0)}
    number: dict[str, Any] = {"dtype": torch.float32}
    if workload.options in ("temperature", "everything"):
        # Of every request another one, and some are greedy.
        kwargs["temperature"] = (inputs.normal(rows, mean=0.7, std=0.6, **number) - 0.3).clamp(min=0.0)
    if workload.options in ("penalties", "everything"):
        kwargs |= _penalties(inputs, rows, cols)
    if workload.options in ("grammar", "everything"):
        kwargs["allowed"] = _allowed(inputs, *shape[:-1], cols=cols)
        kwargs["bias"] = inputs.normal(cols, **number)
    if workload.options == "grammar":
        kwargs["temperature"] = 0.6
    return Call(process_logits, kwargs)


WORKLOADS: tuple[Workload, ...] = tuple(
    Workload("process_logits", name, options, SHAPES[name], 64, _build, frozenset({"inference"}))
    for options, names in _USED.items()
    for name in names
)


# ---- truth: one step after another ----------------------------------------------------------------------------


def _rows(value: Any, logits: Tensor) -> Tensor:
    """Return an argument as something that broadcasts with logits."""
    if not isinstance(value, Tensor):
        return torch.tensor(float(value), dtype=torch.float64)
    if value.dim() == 1 and len(value) == len(logits):
        return value.double().view(-1, *[1] * (logits.dim() - 1))
    return value.double()


def process_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return logits after each step in turn; each rounds the largest of its terms once, the penalty twice."""
    a = arguments(call)
    z = a["logits"].double()
    size = z.abs()
    if a["counts"] is not None or a["prompt"] is not None:
        counts = torch.zeros_like(z) if a["counts"] is None else a["counts"].double()
        prompt = torch.zeros_like(z) if a["prompt"] is None else a["prompt"].double()
        r = _rows(a["repetition"], z)
        factor = torch.where((counts > 0) | (prompt > 0), torch.where(z > 0, 1 / r, r), 1.0)
        penalty = _rows(a["frequency"], z) * counts + _rows(a["presence"], z) * (counts > 0)
        z, size = z * factor - penalty, size * factor + 2 * penalty.abs()
    if a["bias"] is not None:
        z, size = z + a["bias"].double(), size + a["bias"].double().abs()
    if a["allowed"] is not None:
        words = (
            a["allowed"].view(torch.uint8).view(*a["allowed"].shape, 4)
        )  # on machines whose lowest byte is first
        bits = (words[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
        z = torch.where(bits.flatten(-3)[..., : z.shape[-1]] == 1, z, -math.inf)
    t = _rows(a["temperature"], z)
    t = torch.where(t == 0, 1.0, t)
    return {"y": Near(z / t, 3 * EPS32 * size / t)}


FAMILY = Family(workloads=WORKLOADS, truths={"process_logits": process_truth})
