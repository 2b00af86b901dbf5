"""`weft bench`: every op timed beside the same maths in plain PyTorch and in other libraries, on a device of this
machine."""

from __future__ import annotations

import argparse
import importlib.util
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ...runtime import catalogue
from ...workloads import WORKLOADS, Call, Inputs, Workload, for_op
from ...workloads.published import PUBLISHED
from ..screen import complain, progress_bar
from .clocks import kept_pages
from .contenders import DEFAULT, NAMES
from .measuring import Row, Settings, measure, report
from .showing import (
    NoReport,
    compared,
    figures,
    markdown,
    means,
    page,
    plot,
    products_table,
    ratios,
    read,
    reasons,
    table,
    title_of,
)

WHAT = {
    "ops": "a workload of each op (if nothing is said)",
    "rows": "the seventeen rows that linghe has published",
    "mm": "products of matrices in several formats",
    "sol": "the bandwidth of a copy, and the most TFLOPS in each format",
    "show": "FILE: a report as a table",
    "plot": "FILE PICTURE: a report as a picture",
    "compare": "BEFORE AFTER: what became slower or faster",
}


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="time every op beside plain PyTorch and other libraries, on a device",
        description="Time Weft in turn with the same maths in plain PyTorch, eager and by torch.compile, and with\n"
        "other libraries. Results are compared first: a wrong one gets no time.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="what is measured or shown:\n"
        + "\n".join(f"  {name:8} {text}" for name, text in WHAT.items()),
    )
    parser.add_argument("what", nargs="?", choices=WHAT, default="ops", metavar="WHAT", help="see below")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (%(default)s)")
    parser.add_argument(
        "--op", action="append", default=[], metavar="OP", help="only this op; may be repeated"
    )
    parser.add_argument(
        "--workload", default="", help="all whose name has this in it, instead of one for each op"
    )
    parser.add_argument(
        "--against", default=",".join(DEFAULT), help=f"contenders, of {', '.join(NAMES)} (%(default)s)"
    )
    parser.add_argument(
        "--most", type=float, default=64.0, help="MB that a workload may have to move (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=15, help="(%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--plot", type=Path, metavar="PICTURE", help="and as a picture: svg, png, pdf")
    parser.add_argument("--format", choices=("table", "markdown"), default="table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """2 if nothing could be measured or shown; 1 if a comparison finds something slower."""
    problem = _problem(args)
    if problem:
        complain(problem)
        return 2
    try:
        return _COMMANDS[args.what](args)
    except NoReport as error:
        complain(str(error))
        return 2


def _problem(args: argparse.Namespace) -> str:
    """Why nothing is measured, and what to do about it."""
    for given, known, kind in (
        (args.against.split(","), NAMES, "contender"),
        (args.op, list(catalogue), "op"),
    ):
        wrong = [name for name in given if name not in known]
        if wrong:
            return f"there is no {kind} {wrong[0]!r}; there are {', '.join(known)}"
    files = {"show": "FILE", "plot": "FILE PICTURE", "compare": "BEFORE AFTER"}.get(args.what, "")
    if len(args.files) != len(files.split()):
        return f"say `weft bench {args.what} {files}`".rstrip(" `") + "`"
    if (args.plot or args.what == "plot") and importlib.util.find_spec("matplotlib") is None:
        return "a picture needs matplotlib: pip install 'weft[plot]'"
    try:
        device = torch.device(args.device)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    if device.type not in ("cpu", "cuda"):
        return f"Weft has no kernels for {device}: use cpu or cuda"
    if device.type == "cuda" and not torch.cuda.is_available():
        return "PyTorch sees no GPU here; `weft doctor` says what this machine has"
    return ""


def _settings(args: argparse.Namespace) -> Settings:
    return Settings(torch.device(args.device), tuple(args.against.split(",")), args.rounds, args.most)


# ---- measuring --------------------------------------------------------------------------------------------


def _measured(tasks: Sequence[tuple[Workload, Settings]]) -> list[Row]:
    rows = []
    with progress_bar() as bar, kept_pages(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Dynamo detected a call")  # of functions of Weft with a cache
        task = bar.add_task("", total=len(tasks))
        for workload, settings in tasks:
            bar.update(task, description=str(workload))
            rows.append(measure(workload, settings))
            bar.advance(task)
    return rows


def _told(args: argparse.Namespace, rows: list[Row]) -> int:
    """Show rows, and write what is asked for."""
    made = report(rows, _settings(args), geometric_means=means(rows))
    _show(args, {**made, "rows": rows})
    if args.out:
        args.out.write_text(json.dumps(made, indent=1) + "\n")
    if args.plot:
        plot({**made, "rows": rows}, args.plot)
    return 0


def _show(args: argparse.Namespace, shown: dict[str, Any]) -> None:
    rows = shown["rows"]
    if args.format == "markdown":
        print("\n".join(page(shown)))
        return
    Console().print(table(title_of(shown), figures(rows)))
    Console().print(
        table("\nHow many times as fast as others, and the memory that they allocate", ratios(rows))
    )
    for reason in reasons(rows):
        Console().print(reason, style="dim", markup=False, highlight=False)


def _ops(args: argparse.Namespace) -> int:
    ops = args.op or list(catalogue)
    if args.workload:
        chosen = [w for w in WORKLOADS if w.op in ops and args.workload in str(w)]
    else:
        chosen = [for_op(op)[0] for op in ops]
    if not chosen:
        complain("no workload has that name; `weft traffic` lists all of them")
        return 2
    return _told(args, _measured([(workload, _settings(args)) for workload in chosen]))


def _rows(args: argparse.Namespace) -> int:
    chosen = [row.find() for row in PUBLISHED]
    chosen = [
        with_even_experts(w) for w in chosen if args.workload in str(w) and w.op in (args.op or catalogue)
    ]
    return _told(args, _measured([(workload, _settings(args)) for workload in chosen]))


def with_even_experts(workload: Workload) -> Workload:
    """Experts of a multiple of 128 rows each, if there are experts in x: it spares PyTorch a loop over them."""

    def build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
        call = workload_build(workload, inputs, shape)
        if not isinstance(call["ends"], torch.Tensor):
            return call
        experts, rows = len(call["ends"]), len(call["x"])
        ends = torch.arange(1, experts + 1, device=call.device) * (rows // 128) // experts * 128
        return call.with_(ends=ends.to(torch.int32), align=128)

    workload_build = workload.build
    return replace(workload, build=build)


def _mm(args: argparse.Namespace) -> int:
    from .products import products

    rows = _measured(list(products(_settings(args))))
    Console().print(table("Products", products_table(rows)))
    return _told(args, rows)


def _sol(args: argparse.Namespace) -> int:
    from .products import bandwidths, highest

    settings = _settings(args)
    with progress_bar() as bar, kept_pages():
        bar.add_task("copies, then products", total=None)
        copies, rates = list(bandwidths(settings)), list(highest(settings))
    made = report([row for _, row, _ in rates], settings)
    lines = [["", "size", "reached", "p50 ms [p20, p80]", "by"]]
    for megabytes, times in copies:
        spread = f"{times.p50:.3g} [{times.p20:.3g}, {times.p80:.3g}]"
        lines.append(["copy", f"{megabytes} MB", f"{megabytes / times.p50:.1f} GB/s", spread, "torch"])
    for pair, row, name in rates:
        times = row.times[name]
        spread = f"{times.p50:.3g} [{times.p20:.3g}, {times.p80:.3g}]"
        lines.append([pair, row.workload.split(":")[1], f"{row.tflops(name):.3g} TFLOPS", spread, name])
    if args.format == "markdown":
        print("\n".join(markdown(lines)))
    else:
        Console().print(table(title_of(made), lines))
    if args.out:
        args.out.write_text(json.dumps(made, indent=1) + "\n")
    return 0


# ---- showing ----------------------------------------------------------------------------------------------


def _show_file(args: argparse.Namespace) -> int:
    _show(args, read(args.files[0]))
    return 0


def _plot_file(args: argparse.Namespace) -> int:
    plot(read(args.files[0]), args.files[1])
    return 0


def _compare(args: argparse.Namespace) -> int:
    lines = list(compared(*map(read, args.files)))
    if args.format == "markdown":
        print("\n".join(markdown(lines)))
    else:
        Console().print(table("Medians in ms", lines))
    return int(any(line[-1] == "slower" for line in lines))


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "ops": _ops,
    "rows": _rows,
    "mm": _mm,
    "sol": _sol,
    "show": _show_file,
    "plot": _plot_file,
    "compare": _compare,
}
