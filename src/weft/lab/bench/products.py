"""Matrix products by themselves: the highest rates of the device, and how much of them each contender reaches.

`weft bench sol` shows the bandwidth of a copy and the highest TFLOPS of each pair of formats, `weft bench mm` a table
of products by PyTorch, torch.compile, DeepGEMM and Weft's own kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..families import Workload
from ..families.product import product_workload
from .clocks import Times, clock_of, timed
from .measuring import Row, Settings, measure

PAIRS = ("fp32", "bf16", "int8-row", "fp8-row", "fp8-blocks", "mxfp8", "nvfp4")

# m, n and k: few rows, as in serving, and many.
SIZES = {"cpu": ((16, 1024, 1024), (512, 1024, 1024)), "cuda": ((16, 4096, 4096), (4096,) * 3, (8192,) * 3)}
SIDES = {"cpu": (512, 1024), "cuda": (4096, 8192, 16384)}
MEGABYTES = {"cpu": (64, 256), "cuda": (256, 1024, 4096)}


def products(settings: Settings) -> Iterator[tuple[Workload, Settings]]:
    """Yield the products that `mm` measures."""
    chosen = replace(settings, against=("eager", "compile", "torch", "deepgemm"), most=float("inf"))
    for m, n, k in SIZES[settings.device.type]:
        for pair in PAIRS:
            yield product_workload(pair, m, n, k), chosen


def bandwidths(settings: Settings) -> Iterator[tuple[int, Times]]:
    """Yield (MB, times) of copies that read half of that and write half."""
    for megabytes in MEGABYTES[settings.device.type]:
        source = torch.ones(megabytes * 500_000, dtype=torch.uint8, device=settings.device)
        times, _ = timed(clock_of(settings.device), {"copy": [source.clone]}, settings.rounds)
        yield megabytes, times["copy"]


def highest(settings: Settings) -> Iterator[tuple[str, Row, str]]:
    """Yield (pair of formats, the row with the highest TFLOPS, its contender)."""
    chosen = replace(settings, against=("eager", "torch", "deepgemm"), most=float("inf"))
    for pair in PAIRS:
        rows = [
            measure(product_workload(pair, side, side, side), chosen) for side in SIDES[settings.device.type]
        ]
        reached = [(row, name) for row in rows for name in row.memory]
        if reached:
            row, name = max(reached, key=lambda one: one[0].tflops(one[1]) or 0.0)
            yield pair, row, name
