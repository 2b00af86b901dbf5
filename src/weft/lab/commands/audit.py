"""`weft audit`: compile every kernel of every workload for GPUs that need not be here, and judge the binaries."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.text import Text

from ... import __version__
from ...cli.arguments import add_op, add_workers, add_workload, output_file, picture_file, positive
from ...cli.figures import Figures
from ...cli.needs import PLOT, require
from ...cli.screen import Refused, Steps
from ...runtime import GPUS, TARGETS, Variant
from ..compiled import Binary, CompileError, compile_all
from ..compiled.binaries import collected, faults, variants_of
from ..compiled.occupancy import Occupancy, occupancy_of
from ..families import Workload
from ..model import BOARDS, USUAL, Bounds, Public, public_timings
from .chosen import workloads_named

SCHEMA = 2  # of the JSON; incremented when the meaning of a field changes


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "audit",
        help="compile every kernel for every target and judge the binaries; no GPU is needed",
        description="Compile what every workload launches on every target, and judge the binaries: spills, float64, "
        "shared memory, access widths. The exit code is 0 if nothing is wrong. Figures are compiled or modelled, "
        "none is measured.",
    )
    add_op(parser)
    parser.add_argument("--target", action="append", default=[], choices=GPUS, help="only this target")
    add_workload(parser)
    add_workers(parser, "compilers")
    parser.add_argument(
        "--timeout", type=positive, default=300, help="limit in seconds for one kernel (%(default)s)"
    )
    parser.add_argument("--out", type=output_file, metavar="FILE", help="write all figures as JSON")
    parser.add_argument("--brief", action="store_true", help="leave individual kernels out of that file")
    parser.add_argument(
        "--plot", type=picture_file, metavar="FILE", help="draw the modelled times under the roofline"
    )
    parser.add_argument(
        "--model", action="store_true", help="only compare the time model with published timings"
    )
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Row:
    """A variant of a kernel, compiled for a target."""

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
    """Return 1 if a kernel does not compile or its binary has faults."""
    if args.model:
        Console().print(errors(public_timings()))
        return 0
    require("weft audit")
    if args.plot:
        require(PLOT)
    chosen = workloads_named(args.workload, args.op)
    jobs = {
        (variant, target): name
        for target in args.target or TARGETS
        for variant, name in collected(chosen, target).items()
    }
    if not jobs:
        raise Refused(f"these workloads launch nothing on {', '.join(args.target or TARGETS)}")
    begin = time.perf_counter()
    rows = compiled(jobs, args.workers, args.timeout)
    seconds = time.perf_counter() - begin
    extremes = summary(rows)
    Console().print(rendered(extremes))
    bad = [row for row in rows if row.faults]
    print(f"{len(rows):,} kernels, {len(bad)} with faults, {seconds:.0f} s, {args.workers} at once")
    for row in bad:
        Console().print(
            Text(f"{row.target} {row.variant.kernel} of {row.workload}: {'; '.join(row.faults)}", "red")
        )
    expected = []
    if args.plot or (args.out and not args.brief):
        expected = [*expectations(chosen, args.target or TARGETS)]
    if args.out:
        report = {
            "report": "weft audit",
            "schema": SCHEMA,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "weft": __version__,
            "triton": version("triton"),
            "kernels_compiled": len(rows),
            "seconds": round(seconds),
            "workers": args.workers,
            "summary": [asdict(each) for each in extremes],
        }
        if not args.brief:
            report["kernels"] = [as_json(row) for row in rows]
            report["expected"] = expected
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        draw(expected, args.plot)
    return int(bool(bad))


def compiled(jobs: dict[tuple[Variant, str], str], workers: int, timeout: float) -> list[Row]:
    with Steps(len(jobs), "compiling") as steps:
        results = compile_all(
            list(jobs), workers=workers, timeout=timeout, progress=lambda done, *_: steps.reach(done)
        )
    return [
        Row(target, name.partition(":")[0], name, variant, result)
        for ((variant, target), name), result in zip(jobs.items(), results, strict=True)
    ]


# ---- output -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Extremes:
    """Extremes over the kernels of an op on a target: highest figures, and the fewest resident warps."""

    op: str
    target: str
    kernels: int
    registers: int
    spilled: int  # bytes
    shared: int  # bytes
    warps: int
    most_warps: int  # capacity of a multiprocessor
    limited_by: str
    faults: int  # kernels with faults


def summary(rows: Sequence[Row]) -> list[Extremes]:
    """Return the extremes for each op and target."""
    extremes = []
    for op in dict.fromkeys(row.op for row in rows):
        for target in dict.fromkeys(row.target for row in rows):
            selected = [row for row in rows if (row.op, row.target) == (op, target)]
            binaries = [row.result for row in selected if isinstance(row.result, Binary)]
            if not selected:
                continue
            occupancies = [row.occupancy for row in selected if row.occupancy]
            lowest = min(occupancies, key=lambda o: o.share, default=None)
            extremes.append(
                Extremes(
                    op=op,
                    target=target,
                    kernels=len(selected),
                    registers=max((b.registers for b in binaries), default=0),
                    spilled=max((b.spill_bytes if b.stack else 0 for b in binaries), default=0),
                    shared=max((b.shared for b in binaries), default=0),
                    warps=lowest.warps if lowest else 0,
                    most_warps=lowest.most_warps if lowest else 1,
                    limited_by=lowest.limited_by if lowest else "not compiled",
                    faults=sum(bool(row.faults) for row in selected),
                )
            )
    return extremes


def rendered(extremes: Sequence[Extremes]) -> Figures:
    lines: list[list[str | Text]] = [
        ["op, target", "kernels", "registers", "spills", "shared", "warps", "limit", "faults"]
    ]
    for each in extremes:
        lines.append(
            [
                f"{each.op}, {each.target}",
                str(each.kernels),
                str(each.registers),
                str(each.spilled),
                f"{each.shared / 1024:.0f}",
                f"{each.warps}/{each.most_warps}",
                each.limited_by.removesuffix(" memory"),
                Text(str(each.faults), "red") if each.faults else Text("0", "green"),
            ]
        )
    return Figures(
        lines,
        title="Kernels as compiled, none measured",
        caption="maxima over kernels: registers, bytes spilled, KiB shared; the fewest resident warps, and why",
    )


def tensor_instructions(binary: Binary) -> int:
    """Return how many instructions of matrix units a binary has."""
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
    """Yield the modelled time of each workload on the usual board of each target."""
    for workload in workloads:
        bounds = Bounds.of(workload)
        for target in (target for target in targets if target in USUAL and workload.runs_on(target)):
            board = BOARDS[USUAL[target]]
            launches = len(variants_of(workload, target))
            yield {
                "workload": str(workload),
                "board": board.name,
                "least_bytes": workload.least_bytes(),
                "flops": bounds.flops,
                "modelled_us": round(bounds.seconds(board, launches) * 1e6, 2),
            }


def draw(expected: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw products under the rooflines of the targets' boards: modelled TFLOPS over FLOPs per byte to move."""
    from matplotlib.figure import Figure

    boards = list(dict.fromkeys(each["board"] for each in expected))
    figure = Figure(figsize=(3.6 * max(1, len(boards)), 3.6), layout="constrained")
    for index, name in enumerate(boards):
        axes = figure.add_subplot(1, len(boards), index + 1)
        board = BOARDS[name]
        intensities = [10 ** (exponent / 20) for exponent in range(-10, 91)]
        for element, rate in board.sustained.items():
            roof = [min(rate, board.bandwidth * each) / 1e12 for each in intensities]
            axes.loglog(intensities, roof, linewidth=1, label=element)
        points = [each for each in expected if each["board"] == name and each["flops"]]
        axes.loglog(
            [each["flops"] / each["least_bytes"] for each in points],
            [each["flops"] / each["modelled_us"] / 1e6 for each in points],
            "k.",
            markersize=4,
        )
        axes.set_title(f"{name}, modelled", fontsize=9)
        axes.set_xlabel("operations a byte", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=7, frameon=False, loc="lower right")
        if not index:
            axes.set_ylabel("TFLOPS", fontsize=8)
    figure.savefig(file)


def errors(timings: Sequence[Public]) -> Figures:
    """Return the model compared with published timings."""
    near = f"median error {median(abs(timing.error) for timing in timings):.0%} of {len(timings)} rows"
    lines = [["what, board, source", "measured", "modelled", "error"]]
    for timing in timings:
        times = (f"{seconds * 1e6:,.1f} us" for seconds in (timing.measured, timing.modelled))
        source = f"{timing.source}; {timing.note}" if timing.note else timing.source
        lines.append([f"{timing.what}, {timing.board}, {source}", *times, f"{timing.error:+.0%}"])
    return Figures(
        lines,
        title="The time model beside published timings",
        caption=f"{near}. Measured by the sources, of their kernels; modelled of one that reaches the bound.",
    )
