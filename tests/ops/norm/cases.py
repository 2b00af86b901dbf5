"""Norm calls with combinations of options that no workload has."""

from __future__ import annotations

import torch

import weft
from weft.lab.families import Call


def everything(rows: int = 6, cols: int = 96, dtype: torch.dtype = torch.bfloat16) -> Call:
    """Build a norm with every input."""
    normal = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=normal).to(dtype)  # noqa: E731
    return Call(
        weft.layer_norm,
        {
            "x": draw(rows, 1, cols),
            "weight": draw(cols),
            "bias": draw(cols),
            "residual": draw(rows, 1, cols),
            "pre_bias": draw(cols),
            "residual_gate": draw(1, cols),  # one for all rows
            "modulation": draw(rows, 1, 2 * cols),
        },
    )


def heads(rows: int = 3, cols: int = 96) -> Call:
    return Call(weft.rms_norm, {"x": torch.randn(2, rows, 5, cols).bfloat16(), "weight": torch.randn(cols)})


def both_copies(rows: int = 130, cols: int = 96) -> Call:
    x = torch.randn(2, rows, cols).bfloat16()
    return Call(weft.rms_norm, {"x": x, "residual": x * 0.5, "quantize": "1x128", "columnwise": True})


def columns(rows: int = 130, cols: int = 96) -> Call:
    """Build a norm without a residual: both passes read x in place."""
    x = torch.randn(2, rows, cols).bfloat16()
    return Call(weft.layer_norm, {"x": x, "quantize": "mx", "columnwise": True})


CASES = {make.__name__: make for make in (everything, heads, both_copies, columns)}
