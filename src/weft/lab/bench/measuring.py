"""A workload measured: Weft and its contenders in turn, beside a copy of as many bytes and the best product here."""

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

SCHEMA = 2  # of the JSON; raised when a field changes its meaning
SIDE = 1024  # of the square matrices whose product is timed beside a workload on a CPU
SIDE_ON_GPU = 8192
BY_ELEMENT = {"bf16": "bf16", "fp8": "fp8-row", "int8": "int8-row", "fp4": "nvfp4"}


@dataclass(frozen=True)
class Settings:
    """How workloads are measured."""

    device: torch.device
    against: tuple[str, ...]
    rounds: int
    most: float  # MB that a workload may have to move; larger ones get fewer rows


@dataclass(frozen=True)
class Row:
    """A workload, measured."""

    op: str
    workload: str
    rows: int
    bytes: int  # the least that must move
    flops: int | None
    product: str | None  # what is multiplied in the product that is timed beside it
    product_flops: int
    times: dict[str, Times]  # of weft and the contenders, of a `copy` of as many bytes, and of the `product`
    memory: dict[str, int]  # the most bytes that weft and the contenders allocate, counted
    left_out: dict[str, str]  # contenders without a time, and why
    notes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, stored: dict[str, Any]) -> Row:
        """From a report."""
        times = {name: Times(**values) for name, values in stored["times"].items()}
        return cls(**{**stored, "times": times})

    def ratio(self, other: str) -> float | None:
        """How many times as fast as another contender."""
        if other not in self.times or "weft" not in self.times:
            return None
        return self.times[other].p50 / self.times["weft"].p50

    def bandwidth(self) -> float | None:
        """GB/s, of the least bytes."""
        return self.bytes / self.times["weft"].p50 / 1e6 if "weft" in self.times else None

    def tflops(self, of: str = "weft") -> float | None:
        return self.flops / self.times[of].p50 / 1e9 if self.flops and of in self.times else None

    def share_of_product(self) -> float | None:
        """Of the best product's rate."""
        ours = self.tflops()
        return None if ours is None else ours / (self.product_flops / self.times["product"].p50 / 1e9)


@torch.no_grad()
def measure(named: Workload, settings: Settings) -> Row:
    """A workload by its own name, with fewer rows if it would move too much."""
    workload = named
    if math.isfinite(settings.most):
        rows = rows_within(workload, int(settings.most * 1e6))
        # Blocks of 128 rows are whole, as in the workload itself: plain PyTorch has no other.
        workload = replace(workload, rows=rows - rows % 128 if 128 < rows < workload.rows else rows)
    device, clock = settings.device, clock_of(settings.device)
    least, flops = workload.least_bytes(), flops_of(workload)
    first = workload.make().to(device)
    calls = [first, *(copy.deepcopy(first) for _ in range(clock.copies(least) - 1))]
    runs: dict[str, list[Run]] = {}
    left: dict[str, str] = {}
    memory: dict[str, int] = {}
    for name in ("weft", *settings.against):
        try:
            runs[name] = _judged(name, workload, calls)
            memory[name] = clock.extra_memory(runs[name][0])
        except Exception as error:
            left[name] = _reason(error)
            runs.pop(name, None)
    contest = dict(runs)
    source = torch.ones(max(least // 2, 1), dtype=torch.uint8, device=device)
    contest["copy"] = [source.clone] * len(calls)
    pair, side = None, 0
    if flops:
        pair, side, run = best_product(element_of(workload), device)
        contest["product"] = [run] * len(calls)
    times, notes = timed(clock, contest, settings.rounds)
    return Row(
        workload.op, str(named), workload.rows, least, flops, pair, 2 * side**3, times, memory, left, notes
    )


def _judged(name: str, workload: Workload, calls: Sequence[Call]) -> list[Run]:
    """The runs of a contender, one for each copy of the inputs, if its results are right."""
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
    """(what is multiplied, the side of the squares, the product): the fastest of PyTorch's with these elements, or with
    wider ones if that is faster on this device."""
    clock, side = clock_of(device), SIDE_ON_GPU if device.type == "cuda" else SIDE
    found = {name: [run] for name, run in products_of_torch(element, side, device).items()}
    times, _ = timed(clock, found, 5)
    best = min(times, key=lambda name: times[name].p50)
    return best, side, found[best][0]


def products_of_torch(element: str, side: int, device: torch.device) -> dict[str, Run]:
    """Return PyTorch's products of square matrices: with these elements if it has such, and with wider ones."""
    found = {}
    for pair in dict.fromkeys((BY_ELEMENT[element], "bf16", "fp32")):
        workload = product_workload(pair, side, side, side)
        name = "eager" if pair in ("bf16", "fp32") else "torch"  # torch.matmul, or what is behind engine=
        with suppress(Lacks):
            found[pair] = contender(name, workload)(workload.make().to(device)).run
    return found


# ---- the report -------------------------------------------------------------------------------------------


def report(rows: Sequence[Row], settings: Settings, **more: Any) -> dict[str, Any]:
    """Versioned, with what a reader has to know of the machine."""
    return {
        "report": "weft bench",
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "weft": __version__,
        "torch": torch.__version__,
        "triton": version("triton"),
        "device": str(settings.device),
        "machine": machine(settings.device),
        "load": round(os.getloadavg()[0], 2),  # of the machine, when the run was over
        "rounds": settings.rounds,
        "most": settings.most,
        "rows": [asdict(row) for row in rows],
        **more,
    }


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    name, wide = platform.processor() or platform.machine(), ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() == "flags":
                known = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
                wide = ", ".join(one for one in known if one in value.split())
    except OSError:
        pass
    return f"{name}, {torch.get_num_threads()} threads" + (f", {wide}" if wide else "")
