"""`weft bench`: time every op on a local device against the same maths in plain PyTorch and in other libraries."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ...cli.arguments import (
    add_most,
    add_op,
    add_workload,
    at_least,
    output_file,
    picture_file,
    usable_device,
)
from ...cli.figures import Figures
from ...cli.names import check_names, public_ops, unknown
from ...cli.needs import PLOT, require, require_cache
from ...cli.screen import Refused, Steps
from ...runtime import catalogue
from ..commands.chosen import INSTEAD, one_each, workloads_named
from ..families import Call, Inputs, Workload
from ..published import PUBLISHED
from .clocks import kept_pages
from .contenders import DEFAULT, NAMES
from .measuring import Row, Settings, measure, report
from .showing import (
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
    title_of,
)

WHAT = {
    "ops": "one workload of each op (the default)",
    "rows": "the seventeen timings that linghe has published",
    "mm": "matrix products in several formats",
    "sol": "the bandwidth of a copy, and the highest TFLOPS in each format",
    "show": "FILE: show a report as a table",
    "plot": "FILE PICTURE: draw a report as a picture",
    "compare": "BEFORE AFTER: show what became slower or faster",
}


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="time every op against plain PyTorch and other libraries, on a device",
        description="Time Weft in turn with the same maths in plain PyTorch, eager and compiled by torch.compile, and\n"
        "with other libraries. Results are compared first: a contender with wrong results gets no time.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="what to measure or show:\n" + "\n".join(f"  {name:8} {text}" for name, text in WHAT.items()),
    )
    parser.add_argument("what", nargs="?", type=_what, default="ops", metavar="WHAT", help="see below")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (%(default)s)")
    add_op(parser)
    add_workload(parser, INSTEAD)
    parser.add_argument(
        "--against", default=",".join(DEFAULT), help=f"contenders, among {', '.join(NAMES)} (%(default)s)"
    )
    add_most(parser, 64.0)
    parser.add_argument("--rounds", type=at_least(2), default=15, help="timed rounds (%(default)s)")
    parser.add_argument("--out", type=output_file, metavar="FILE", help="write the figures as JSON")
    parser.add_argument(
        "--plot", type=picture_file, metavar="PICTURE", help="also draw them as a picture: svg, png, pdf"
    )
    parser.add_argument("--format", choices=("table", "markdown"), default="table")
    parser.set_defaults(run=run)


def _what(name: str) -> str:
    """Return what is to be measured or shown, or refuse it; the name of an op is an easy mistake."""
    if name not in WHAT:
        if name in public_ops() or name in catalogue:
            raise Refused(f"`weft bench` measures ops by option: weft bench --op {name}")
        raise unknown("measurement", name, list(WHAT))
    return name


def run(args: argparse.Namespace) -> int:
    """Return 1 if Weft has no time for a workload, or a comparison finds something slower."""
    check_names("contender", args.against.split(","), NAMES)
    files = {"show": "FILE", "plot": "FILE PICTURE", "compare": "BEFORE AFTER"}.get(args.what, "")
    if len(args.files) != len(files.split()):
        raise Refused(f"run `weft bench {args.what} {files}".rstrip() + "`")
    if (args.op or args.workload) and args.what not in ("ops", "rows"):
        raise Refused(f"--op and --workload select among ops; `weft bench {args.what}` has none")
    if args.plot or args.what == "plot":
        require(PLOT)
    if not files:
        usable_device(args.device)
        require_cache()
    return _COMMANDS[args.what](args)


def _settings(args: argparse.Namespace) -> Settings:
    return Settings(torch.device(args.device), tuple(args.against.split(",")), args.rounds, args.most)


# ---- measuring --------------------------------------------------------------------------------------------


def _measured(tasks: Sequence[tuple[Workload, Settings]]) -> list[Row]:
    rows = []
    with Steps(len(tasks)) as steps, kept_pages(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Dynamo detected a call")  # to functions of Weft that have a cache
        for workload, settings in tasks:
            steps.say(str(workload))
            rows.append(measure(workload, settings))
            steps.advance()
    return rows


def _finish(args: argparse.Namespace, rows: list[Row]) -> int:
    """Show rows, and write the requested files."""
    document = report(rows, _settings(args), geometric_means=means(rows))
    _show(args, {**document, "rows": rows})
    if args.out:
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    if args.plot:
        plot({**document, "rows": rows}, args.plot)
    return int(any("weft" not in row.times for row in rows))


def _show(args: argparse.Namespace, shown: dict[str, Any]) -> None:
    rows = shown["rows"]
    if args.format == "markdown":
        print("\n".join(page(shown)))
        return
    Console().print(Figures(figures(rows), title=title_of(shown)))
    heading = "\nSpeedup over the others, and the memory that they allocate"
    Console().print(Figures(ratios(rows), title=heading))
    for reason in reasons(rows):
        Console().print(reason, style="dim", markup=False, highlight=False)


def _ops(args: argparse.Namespace) -> int:
    return _finish(args, _measured([(workload, _settings(args)) for workload in one_each(args)]))


def _rows(args: argparse.Namespace) -> int:
    selected = set(map(str, workloads_named(args.workload, args.op)))
    chosen = [with_even_experts(w) for row in PUBLISHED if str(w := row.find()) in selected]
    if not chosen:
        raise Refused("no published row has such a workload; `weft report published` lists them")
    return _finish(args, _measured([(workload, _settings(args)) for workload in chosen]))


def with_even_experts(workload: Workload) -> Workload:
    """Return the workload with 128 * n rows per expert, if x has experts: it spares PyTorch a loop over them."""

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
    Console().print(Figures(products_table(rows), title="Products"))
    return _finish(args, rows)


def _sol(args: argparse.Namespace) -> int:
    from .products import bandwidths, highest

    settings = _settings(args)
    with Steps(None, "copies, then products"), kept_pages():
        copies, rates = list(bandwidths(settings)), list(highest(settings))
    document = report([row for _, row, _ in rates], settings)
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
        Console().print(Figures(lines, title=title_of(document)))
    if args.out:
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


# ---- showing ----------------------------------------------------------------------------------------------


def _show_file(args: argparse.Namespace) -> int:
    _show(args, read(args.files[0]))
    return 0


def _plot_file(args: argparse.Namespace) -> int:
    try:
        path = picture_file(str(args.files[1]))
    except argparse.ArgumentTypeError as error:
        raise Refused(str(error)) from None
    plot(read(args.files[0]), path)
    return 0


def _compare(args: argparse.Namespace) -> int:
    lines = list(compared(*map(read, args.files)))
    if args.format == "markdown":
        print("\n".join(markdown(lines)))
    else:
        Console().print(Figures(lines, title="Medians in ms"))
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
