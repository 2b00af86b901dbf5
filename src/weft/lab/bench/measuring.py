"""Measure a workload: Weft, its contenders, a copy of as many bytes and the device's fastest product, in turn."""

from __future__ import annotations

import copy
import functools
import math
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ..families import Call, Workload, flops_of
from ..families.product import product_workload
from ..model import element_of
from ..traffic import rows_within
from .clocks import Run, Times, clock_of, timed
from .contenders import Lacks, contender, difference

SCHEMA = 2  # of the JSON; incremented when the meaning of a field changes
SIDE = 1024  # of the square matrices whose product is timed along with a workload on a CPU
SIDE_ON_GPU = 8192
BY_ELEMENT = {"bf16": "bf16", "fp8": "fp8-row", "int8": "int8-row", "fp4": "nvfp4"}


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement."""

    device: torch.device
    against: tuple[str, ...]
    rounds: int
    most: float  # shrink workloads that move more MB than this


@dataclass(frozen=True)
class Row:
    """A measured workload."""

    op: str
    workload: str
    rows: int
    bytes: int  # minimum to move
    flops: int | None
    product: str | None  # formats of the product that is timed along with it
    product_flops: int
    times: dict[str, Times]  # of weft, the contenders, a `copy` of as many bytes, and the `product`
    memory: dict[str, int]  # peak bytes that weft and the contenders allocate, counted
    left_out: dict[str, str]  # contenders without a time, and why
    notes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, stored: dict[str, Any]) -> Row:
        """Read a row of a report."""
        times = {name: Times(**values) for name, values in stored["times"].items()}
        return cls(**{**stored, "times": times})

    def ratio(self, other: str) -> float | None:
        """Return the speedup over another contender."""
        if other not in self.times or "weft" not in self.times:
            return None
        return self.times[other].p50 / self.times["weft"].p50

    def bandwidth(self) -> float | None:
        """Return GB/s, counting the minimum of bytes to move."""
        return self.bytes / self.times["weft"].p50 / 1e6 if "weft" in self.times else None

    def tflops(self, of: str = "weft") -> float | None:
        return self.flops / self.times[of].p50 / 1e9 if self.flops and of in self.times else None

    def share_of_product(self) -> float | None:
        """Return the TFLOPS as a share of the best product's."""
        ours = self.tflops()
        return None if ours is None else ours / (self.product_flops / self.times["product"].p50 / 1e9)


@torch.no_grad()
def measure(original: Workload, settings: Settings) -> Row:
    """Measure a workload under its own name, with fewer rows if it would move too many bytes."""
    workload = original
    if math.isfinite(settings.most):
        rows = rows_within(workload, int(settings.most * 1e6))
        # Keep blocks of 128 rows complete, as in the workload itself: plain PyTorch supports no others.
        workload = replace(workload, rows=rows - rows % 128 if 128 < rows < workload.rows else rows)
    device, clock = settings.device, clock_of(settings.device)
    least_bytes, flops = workload.least_bytes(), flops_of(workload)
    first = workload.make().to(device)
    calls = [first, *(copy.deepcopy(first) for _ in range(clock.copies(least_bytes) - 1))]
    runs: dict[str, list[Run]] = {}
    left_out: dict[str, str] = {}
    memory: dict[str, int] = {}
    for name in ("weft", *settings.against):
        try:
            runs[name] = _judged(name, workload, calls)
            memory[name] = clock.extra_memory(runs[name][0])
        except Exception as error:
            left_out[name] = _reason(error)
            runs.pop(name, None)
    timed_runs = dict(runs)
    source = torch.ones(max(least_bytes // 2, 1), dtype=torch.uint8, device=device)
    timed_runs["copy"] = [source.clone] * len(calls)
    pair, side = None, 0
    if flops:
        pair, side, run = best_product(element_of(workload), device)
        timed_runs["product"] = [run] * len(calls)
    times, notes = timed(clock, timed_runs, settings.rounds)
    return Row(
        workload.op,
        str(original),
        workload.rows,
        least_bytes,
        flops,
        pair,
        2 * side**3,
        times,
        memory,
        left_out,
        notes,
    )


def _judged(name: str, workload: Workload, calls: Sequence[Call]) -> list[Run]:
    """Return a contender's runs, one for each copy of the inputs, if its results are right."""
    prepare = contender(name, workload)
    prepared = [prepare(call) for call in calls]
    wrong = difference(prepared[0].run(), prepared[0].truth())
    if wrong is not None:
        raise Lacks(wrong)
    return [one.run for one in prepared]


def _reason(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0][:200]
    return text if isinstance(error, Lacks) else f"{type(error).__name__}: {text}"


# ---- the best product -------------------------------------------------------------------------------------


@functools.lru_cache
def best_product(element: str, device: torch.device) -> tuple[str, int, Run]:
    """Return (formats, the side of the squares, the product) of PyTorch's fastest product with these elements. Wider
    elements count too if they are faster on this device."""
    clock, side = clock_of(device), SIDE_ON_GPU if device.type == "cuda" else SIDE
    runs = {name: [run] for name, run in products_of_torch(element, side, device).items()}
    times, _ = timed(clock, runs, 5)
    best = min(times, key=lambda name: times[name].p50)
    return best, side, runs[best][0]


def products_of_torch(element: str, side: int, device: torch.device) -> dict[str, Run]:
    """Return PyTorch's products of square matrices: with these elements if it supports them, and with wider ones."""
    runs = {}
    for pair in dict.fromkeys((BY_ELEMENT[element], "bf16", "fp32")):
        workload = product_workload(pair, side, side, side)
        name = "eager" if pair in ("bf16", "fp32") else "torch"  # torch.matmul, or the library behind engine=
        with suppress(Lacks):
            runs[pair] = contender(name, workload)(workload.make().to(device)).run
    return runs


# ---- the report -------------------------------------------------------------------------------------------


def report(rows: Sequence[Row], settings: Settings, **more: Any) -> dict[str, Any]:
    """Return a versioned report, with the facts about the machine that a reader needs."""
    return {
        "report": "weft bench",
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "weft": __version__,
        "torch": torch.__version__,
        "triton": version("triton"),
        "device": str(settings.device),
        "machine": machine(settings.device),
        "load": round(os.getloadavg()[0], 2),  # of the machine at the end of the run
        "rounds": settings.rounds,
        "most": settings.most,
        "rows": [asdict(row) for row in rows],
        **more,
    }


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    name, features = platform.processor() or platform.machine(), ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() == "flags":
                extensions = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
                features = ", ".join(extension for extension in extensions if extension in value.split())
    except OSError:
        pass
    return f"{name}, {torch.get_num_threads()} threads" + (f", {features}" if features else "")
