"""Test case that calls the quantizer with both copies."""

from __future__ import annotations

import torch

import weft
from weft.lab.families import Call


def quantizer(rows: int = 130, cols: int = 96) -> Call:
    return Call(
        weft.quantize, {"x": torch.randn(2, rows, cols).bfloat16(), "format": "mx", "columnwise": True}
    )


CASES = {"quantizer": quantizer}
