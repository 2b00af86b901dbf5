"""`weft bench`: every op timed beside the same maths in plain PyTorch, eager and compiled, on this machine's device."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .. import __version__, backend
from ..quant import QTensor
from ..runtime import catalogue
from ..runtime.ops import Op
from ..workloads import WORKLOADS, Call, Workload, flops_of, for_op
from ..workloads.traffic import rows_within
from .screen import complain, plain_table, progress_bar

SCHEMA = 1  # of the JSON; raised when a field changes its meaning
CONTENDERS = ("eager", "compile")
NOISE = 0.05  # below this change of a median nothing is concluded, whatever the spread


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="time every op beside plain PyTorch, on a device",
        description="Time workloads in turn with the same maths in plain PyTorch (the op's reference), eager and by "
        "torch.compile. Results are compared first: a wrong one gets no time. `weft bench compare A B` compares two "
        "reports.",
    )
    parser.add_argument("compare", nargs="*", metavar="compare A B", help="compare two reports instead")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (%(default)s)")
    parser.add_argument(
        "--op", action="append", default=[], metavar="OP", help="only this op; may be repeated"
    )
    parser.add_argument(
        "--workload", default="", help="all whose name has this in it, instead of one for each op"
    )
    parser.add_argument(
        "--against", default=",".join(CONTENDERS), help="contenders, of eager and compile (%(default)s)"
    )
    parser.add_argument(
        "--most", type=float, default=64.0, help="MB that a workload may have to move (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=15, help="(%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Times:
    """Of one contender, in milliseconds."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        cuts = statistics.quantiles(seconds, n=10, method="inclusive")
        return cls(*(round(1e3 * cut, 5) for cut in (cuts[1], statistics.median(seconds), cuts[7])))


@dataclass(frozen=True)
class Row:
    """A workload, measured."""

    op: str
    workload: str
    rows: int
    bytes: int  # the least that must move
    flops: int | None
    times: dict[str, Times]  # of weft, of the contenders, and of a plain copy of as many bytes
    left_out: dict[str, str]  # contenders without a time, and why

    def ratio(self, other: str) -> float | None:
        """How many times as fast as another contender."""
        return self.times[other].p50 / self.times["weft"].p50 if other in self.times else None


# ---- contenders -------------------------------------------------------------------------------------------


def reached(call: Call) -> list[tuple[Op[Any, Any], Any]]:
    """The ops that a call reaches, each with its arguments."""
    seen: list[tuple[Op[Any, Any], Any]] = []
    original = Op.__call__

    def spy(self: Op[Any, Any], a: Any) -> Any:
        seen.append((self, a))
        return original(self, a)

    with patch.object(Op, "__call__", spy):
        call()
    return seen


def contenders(call: Call, wanted: Sequence[str]) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """(functions by name, why others are left out)."""
    found: dict[str, Callable[[], Any]] = {"weft": call}
    left: dict[str, str] = {}

    def eager() -> Any:
        with backend("reference"):
            return call()

    if "eager" in wanted:
        found["eager"] = eager
    if "compile" in wanted:
        ops = reached(call)
        if len(ops) != 1:
            left["compile"] = f"{len(ops)} ops are reached, whose references are not one graph"
        else:
            op, arguments = ops[0]
            torch._dynamo.reset()
            compiled = torch.compile(op.reference, dynamic=False)
            found["compile"] = lambda: compiled(arguments)
    return found, left


def numbers(result: Any) -> Iterator[Tensor]:
    """The tensors of a result as numbers."""
    if isinstance(result, QTensor):
        yield result.dequantize().float()
    elif isinstance(result, Tensor):
        yield result.float()
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from numbers(part)


def agree(ours: Any, theirs: Any) -> bool:
    """Whether results are the same but for roundings: of bf16, and one code of FP8 in a thousand. Those of an op whose
    outputs are not what its function returns are compared as far as they correspond."""
    for mine, other in zip(numbers(ours), numbers(theirs), strict=False):
        if mine.shape == other.shape:
            size = float(other.nan_to_num(0.0, 0.0, 0.0).abs().amax()) if other.numel() else 0.0
            near = torch.isclose(mine, other, rtol=0.13, atol=1e-2 * size, equal_nan=True)
            if other.numel() and near.float().mean() < 0.999:
                return False
    return True


# ---- measuring --------------------------------------------------------------------------------------------


def measure(workload: Workload, args: argparse.Namespace) -> Row:
    rows = rows_within(workload, int(args.most * 1e6))
    device = torch.device(args.device)
    call = workload.make(rows=rows).to(device)
    least = workload.least_bytes(rows)
    functions, left = contenders(call, args.against.split(","))
    ours = call()
    for name in [name for name in functions if name != "weft"]:
        try:
            if not agree(ours, functions[name]()):
                left[name] = "other results"
        except Exception as error:
            left[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
        if name in left:
            del functions[name]
    source = torch.ones(max(least // 2, 1), dtype=torch.uint8, device=device)
    functions["copy"] = source.clone
    times = timed(functions, args.rounds, device)
    return Row(workload.op, str(workload), rows, least, flops_of(workload), times, left)


def timed(functions: dict[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict[str, Times]:
    """All in turn, after a warm-up; on a GPU between events, with a cache that other data fills before each call."""
    spans: dict[str, list[float]] = {name: [] for name in functions}
    clock = _on_gpu(device) if device.type == "cuda" else _on_cpu
    for turn in range(rounds + 3):
        for name, function in functions.items():
            seconds = clock(function)
            if turn >= 3:
                spans[name].append(seconds)
    return {name: Times.of(seconds) for name, seconds in spans.items()}


def _on_cpu(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _on_gpu(device: torch.device) -> Callable[[Callable[[], Any]], float]:
    flushed = torch.empty(256 << 20, dtype=torch.uint8, device=device)

    def clock(function: Callable[[], Any]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flushed.zero_()  # and while that runs, the host gets ahead of the device
        begin.record()
        function()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return clock


# ---- the command ------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    if args.compare:
        return compare(args.compare)
    wrong = [name for name in args.against.split(",") if name not in CONTENDERS]
    if wrong:
        complain(f"there is no contender {wrong[0]!r}; there are {', '.join(CONTENDERS)}")
        return 2
    unknown = [op for op in args.op if op not in catalogue]
    if unknown:
        complain(f"there is no op {unknown[0]!r}; there are {', '.join(catalogue)}")
        return 2
    ops = args.op or list(catalogue)
    if args.workload:
        chosen = [w for w in WORKLOADS if w.op in ops and args.workload in str(w)]
    else:
        chosen = [for_op(op)[0] for op in ops]
    if not chosen:
        complain("no workload has that name; `weft traffic` lists all of them")
        return 2
    rows = []
    with progress_bar() as bar:
        task = bar.add_task("", total=len(chosen))
        for workload in chosen:
            bar.update(task, description=workload.op)
            rows.append(measure(workload, args))
            bar.advance(task)
    Console().print(table(rows, args.device))
    if args.out:
        args.out.write_text(json.dumps(report(rows, args.device), indent=1) + "\n")
    return 0


def report(rows: Sequence[Row], device: str) -> dict[str, Any]:
    where = torch.device(device)
    hardware = (
        torch.cuda.get_device_name(where) if where.type == "cuda" else f"{torch.get_num_threads()} threads"
    )
    return {
        "report": "weft bench",
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "weft": __version__,
        "torch": torch.__version__,
        "device": f"{device}, {hardware}",
        "rows": [asdict(row) for row in rows],
        "geometric_means": {name: geometric_mean(rows, name) for name in CONTENDERS},
    }


def geometric_mean(rows: Sequence[Row], contender: str) -> float | None:
    """Of how many times as fast as a contender."""
    ratios = [ratio for row in rows if (ratio := row.ratio(contender)) is not None]
    return round(math.exp(statistics.mean(map(math.log, ratios))), 3) if ratios else None


def table(rows: Sequence[Row], device: str) -> Table:
    made = plain_table(f"Measured on {device}: medians in ms, how many times as fast as PyTorch")
    made.add_column("workload", overflow="fold")
    for heading in ("weft", "p20-p80", "GB/s", "of copy", *(f"x {name}" for name in CONTENDERS)):
        made.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        ours, copy = row.times["weft"], row.times["copy"]
        ratios = (row.ratio(name) for name in CONTENDERS)
        made.add_row(
            row.workload,
            f"{ours.p50:.3g}",
            f"{ours.p20:.3g}-{ours.p80:.3g}",
            f"{row.bytes / ours.p50 / 1e6:.1f}",
            f"{copy.p50 / ours.p50:.0%}",
            *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        )
    means = (geometric_mean(rows, name) for name in CONTENDERS)
    made.add_row(
        "geometric mean", "", "", "", "", *("-" if mean is None else f"{mean:.2f}" for mean in means)
    )
    return made


# ---- two reports ------------------------------------------------------------------------------------------


def verdict(before: Times, after: Times) -> str:
    """What the change of a median means beside the spread of both."""
    change = after.p50 / before.p50 - 1
    apart = after.p20 > before.p80 or after.p80 < before.p20
    if abs(change) < NOISE or not apart:
        return "same"
    return "slower" if change > 0 else "faster"


def compare(words: Sequence[str]) -> int:
    """1 if something has become slower."""
    if len(words) != 3 or words[0] != "compare":
        complain("say `weft bench compare BEFORE.json AFTER.json`, or options alone")
        return 2
    reports = []
    for name in words[1:]:
        try:
            found = json.loads(Path(name).read_text())
            reports.append({row["workload"]: Times(**row["times"]["weft"]) for row in found["rows"]})
        except (OSError, ValueError, KeyError, TypeError) as error:
            complain(f"{name} is no report of `weft bench`: {error}")
            return 2
    before, after = reports
    made = plain_table("Medians in ms")
    made.add_column("workload", overflow="fold")
    for heading in ("before", "after", "change", "verdict"):
        made.add_column(heading, justify="right")
    verdicts = []
    for workload in (workload for workload in before if workload in after):
        old, new = before[workload], after[workload]
        verdicts.append(verdict(old, new))
        made.add_row(
            workload, f"{old.p50:.3g}", f"{new.p50:.3g}", f"{new.p50 / old.p50 - 1:+.0%}", verdicts[-1]
        )
    Console().print(made)
    return int("slower" in verdicts)
