"""`weft audit`: every kernel of every workload compiled for GPUs that need not be here, and what its binary holds."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..proof.binaries import collected, faults
from ..proof.model import BOARDS, USUAL, Public, expected_seconds, public_timings
from ..runtime import TARGETS, Binary, CompileError, Variant, catalogue, compile_all
from ..runtime.occupancy import Occupancy, occupancy_of
from ..workloads import WORKLOADS, Workload
from .screen import complain, plain_table, progress_bar

SCHEMA = 1  # of the JSON; raised when a field changes its meaning


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "audit",
        help="compile every kernel for every target and judge the binaries; no GPU is needed",
        description="Compile what every workload launches on every target, and judge the binaries: spills, float64, "
        "shared memory, widths of accesses. The exit code is 0 if nothing is wrong. Figures are compiled or modelled, "
        "none is measured.",
    )
    parser.add_argument(
        "--op", action="append", default=[], metavar="OP", help="only this op; may be repeated"
    )
    parser.add_argument("--target", action="append", default=[], choices=TARGETS, help="only this target")
    parser.add_argument("--workload", default="", help="only workloads whose name has this in it")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="compilers at once (%(default)s)"
    )
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one kernel (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all figures as JSON")
    parser.add_argument(
        "--model", action="store_true", help="the time model beside published timings, and nothing else"
    )
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Row:
    """One variant of a kernel, compiled for a target."""

    target: str
    op: str
    workload: str  # the first that launches it
    variant: Variant
    result: Binary | CompileError

    @property
    def faults(self) -> list[str]:
        if isinstance(self.result, CompileError):
            return [f"does not compile: {self.result}"]
        return faults(self.variant, self.result)

    @property
    def occupancy(self) -> Occupancy | None:
        if isinstance(self.result, CompileError):
            return None
        return occupancy_of(self.target, self.variant.num_warps, self.result.registers, self.result.shared)


def run(args: argparse.Namespace) -> int:
    """1 if a kernel does not compile or its binary holds what it should not, 2 if there is nothing to compile."""
    if args.model:
        Console().print(errors(public_timings()))
        return 0
    wrong = [op for op in args.op if op not in catalogue]
    if wrong:
        complain(f"there is no op {wrong[0]!r}; there are {', '.join(catalogue)}")
        return 2
    chosen = [w for w in WORKLOADS if (not args.op or w.op in args.op) and args.workload in str(w)]
    jobs = {
        (variant, target): name
        for target in args.target or TARGETS
        for variant, name in collected(chosen, target).items()
    }
    if not jobs:
        complain("no workload has that name; `weft traffic` lists all of them")
        return 2
    rows = compiled(jobs, args.workers, args.timeout)
    Console().print(summary(rows))
    bad = [row for row in rows if row.faults]
    for row in bad:
        Console().print(
            Text(f"{row.target} {row.variant.kernel} of {row.workload}: {'; '.join(row.faults)}", "red")
        )
    if args.out:
        report = {
            "report": "weft audit",
            "schema": SCHEMA,
            "kernels": [as_json(row) for row in rows],
            "expected": [*expectations(chosen, args.target or TARGETS)],
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(bool(bad))


def compiled(jobs: dict[tuple[Variant, str], str], workers: int, timeout: float) -> list[Row]:
    with progress_bar() as progress:
        bar = progress.add_task("compiling", total=len(jobs))
        results = compile_all(
            list(jobs), workers=workers, timeout=timeout, progress=lambda *_: progress.advance(bar)
        )
    return [
        Row(target, name.partition(":")[0], name, variant, result)
        for ((variant, target), name), result in zip(jobs.items(), results, strict=True)
    ]


# ---- what is shown ----------------------------------------------------------------------------------------


def summary(rows: Sequence[Row]) -> Table:
    """A row for each op and target: the extremes of its kernels."""
    table = plain_table("Kernels as compiled, none measured")
    for heading in ("op", "target"):
        table.add_column(heading, overflow="fold")
    for heading in ("kernels", "registers", "spills", "shared", "warps", "limit", "faults"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.caption = (
        "the most of a kernel: registers, bytes spilled, KiB shared; the fewest warps at once, and why"
    )
    for op in dict.fromkeys(row.op for row in rows):
        for target in dict.fromkeys(row.target for row in rows):
            found = [row for row in rows if (row.op, row.target) == (op, target)]
            binaries = [row.result for row in found if isinstance(row.result, Binary)]
            if not binaries:
                continue
            least = min((row.occupancy for row in found if row.occupancy), key=lambda o: o.share)
            bad = sum(bool(row.faults) for row in found)
            table.add_row(
                op,
                target,
                str(len(found)),
                str(max(b.registers for b in binaries)),
                str(max(b.spill_bytes if b.stack else 0 for b in binaries)),
                f"{max(b.shared for b in binaries) / 1024:.0f}",
                f"{least.warps}/{least.most_warps}",
                least.limited_by.removesuffix(" memory"),
                Text(str(bad), "red") if bad else Text("0", "green"),
            )
    return table


def tensor_instructions(binary: Binary) -> int:
    """Instructions of matrix units in a binary."""
    return binary.count(r"HMMA|IMMA|QMMA|OMMA|[HQI]GMMA|UTC\w*MMA|v_mfma|v_wmma")


def as_json(row: Row) -> dict[str, Any]:
    common = {"target": row.target, "op": row.op, "workload": row.workload, "kernel": row.variant.kernel}
    if isinstance(row.result, CompileError):
        return common | {"error": str(row.result)}
    binary, occupancy = row.result, row.occupancy
    assert occupancy is not None
    return common | {
        "num_warps": row.variant.num_warps,
        "num_stages": row.variant.num_stages,
        "registers": binary.registers,
        "spill_bytes": binary.spill_bytes if binary.stack else 0,
        "shared": binary.shared,
        "warps_per_multiprocessor": occupancy.warps,
        "limited_by": occupancy.limited_by,
        "loads": binary.loads,
        "stores": binary.stores,
        "tensor_instructions": tensor_instructions(binary),
        "instructions": sum(binary.opcodes.values()),
        "faults": row.faults,
    }


def expectations(workloads: Sequence[Workload], targets: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The time of each workload on the usual board of each target, modelled."""
    for target in (target for target in targets if target in USUAL):
        board = BOARDS[USUAL[target]]
        for workload in (workload for workload in workloads if workload.runs_on(target)):
            launches = len(collected([workload], target))
            yield {
                "workload": str(workload),
                "board": board.name,
                "least_bytes": workload.least_bytes(),
                "modelled_us": round(expected_seconds(workload, board, launches) * 1e6, 2),
            }


def errors(timings: Sequence[Public]) -> Table:
    """The model beside what others have measured."""
    table = plain_table("The time model beside published timings")
    near = f"median error {median(abs(timing.error) for timing in timings):.0%} of {len(timings)} rows"
    table.caption = (
        f"{near}. Measured by the sources, of their kernels; modelled of one that reaches the bound."
    )
    for heading in ("what", "board", "source"):
        table.add_column(heading, overflow="fold")
    for heading in ("measured", "modelled", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for timing in timings:
        times = (f"{seconds * 1e6:,.1f} us" for seconds in (timing.measured, timing.modelled))
        source = f"{timing.source}; {timing.note}" if timing.note else timing.source
        table.add_row(timing.what, timing.board, source, *times, f"{timing.error:+.0%}")
    return table
