"""`weft traffic`: the bytes that workloads move, counted at every access, beside the least that must move."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..workloads import WORKLOADS
from ..workloads.traffic import CACHED, Moved, count_traffic, rows_within


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "traffic", help="bytes moved by every workload, counted, beside the least possible"
    )
    parser.add_argument("filter", nargs="?", default="", help="only workloads whose name has this in it")
    parser.add_argument(
        "--target", default="sm_90", help="count what would be launched on this target (%(default)s)"
    )
    parser.add_argument(
        "--most",
        type=float,
        default=512.0,
        help="MB that a workload may have to move; larger ones get fewer rows",
    )
    parser.add_argument("--format", choices=("table", "json", "markdown"), default="table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """1 if a workload moves more than it says."""
    chosen = [w for w in WORKLOADS if args.filter in str(w) and w.runs_on(args.target)]
    moved = [
        count_traffic(w, rows_within(w, int(args.most * 1e6)), args.target)
        for w in track(chosen, "counting", transient=True, console=Console(stderr=True))
    ]
    if args.format == "json":
        print(json.dumps([as_row(m) for m in moved], indent=2))
    elif args.format == "markdown":
        print("\n".join(markdown(moved)))
    else:
        Console().print(table(moved, args.target))
    return int(not all(m.as_promised for m in moved))


def as_row(moved: Moved) -> dict[str, Any]:
    return {
        "workload": str(moved.workload),
        "rows": moved.rows,
        "launches": moved.launches,
        "least": moved.least,
        **moved.total._asdict(),
        "ratio": round(moved.ratio, 4),
        "limit": moved.workload.moves,
        "reason": moved.workload.rereads,
        "as_promised": moved.as_promised,
    }


def numbers(moved: Moved) -> list[str]:
    """Launches, least and other bytes in MB, ratio."""
    megabytes = [f"{count / 1e6:,.3f}" for count in (moved.least, *moved.total)]
    return [str(moved.launches), *megabytes, f"{moved.ratio:.3f}"]


def markdown(moved: list[Moved]) -> Iterator[str]:
    """The lines of a table for the docs."""
    headings = ("least, MB", "requested", "per program", "per launch", "modelled", "ratio", "reason")
    yield f"| workload | rows | launches | {' | '.join(headings)} |"
    yield "|---|" + "---:|" * 8 + "---|"
    for m in moved:
        cells = (f"`{m.workload}`", str(m.rows), *numbers(m), m.workload.rereads)
        yield f"| {' | '.join(cells)} |"


def table(moved: list[Moved], target: str) -> Table:
    made = Table(
        title=f"Bytes moved: counted here with the launches of {target}, in MB",
        caption=f"per program, per launch: 32-byte sectors. modelled: memory traffic with tensors up to {CACHED >> 20} "
        "MiB cached. ratio: modelled / least.",
    )
    made.add_column("workload", overflow="fold")
    for heading in ("launches", "least", "requested", "per program", "per launch", "modelled", "ratio"):
        made.add_column(heading, justify="right")
    made.add_column("reason", overflow="fold")
    for m in moved:
        made.add_row(str(m.workload), *numbers(m), m.workload.rereads, style="" if m.as_promised else "red")
    return made
