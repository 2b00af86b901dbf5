"""`weft report traffic`: the bytes that workloads move, counted at every access, and the minimum that must move."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from ...cli.arguments import add_most, output_file
from ...cli.figures import Figures
from ...cli.needs import require
from ...cli.screen import Refused, Steps
from ...runtime import GPUS
from ..traffic import CACHED, Moved, count_traffic, rows_within
from .chosen import workloads_named


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "traffic", help="count the bytes that every workload moves, and compare them with the minimum"
    )
    parser.add_argument(
        "text", nargs="*", metavar="TEXT", help="only workloads with one of these in their name"
    )
    parser.add_argument(
        "--target",
        default="sm_90",
        choices=GPUS,
        help="count the launches that this target would get (%(default)s)",
    )
    add_most(parser, 512.0)
    parser.add_argument("--format", choices=("table", "json", "markdown"), default="table")
    parser.add_argument(
        "--into",
        type=output_file,
        metavar="PAGE",
        help="add the lines to the table of a Markdown page, replacing its own for the same workloads",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return 1 if a workload moves more than it promises."""
    require("weft report traffic")
    page = read_page(args.into) if args.into else ""
    chosen = [workload for workload in workloads_named(args.text) if workload.runs_on(args.target)]
    if not chosen:
        raise Refused(f"none of these workloads runs on {args.target}")
    moved = []
    with Steps(len(chosen)) as steps:
        for workload in chosen:
            steps.say(str(workload))
            moved.append(count_traffic(workload, rows_within(workload, int(args.most * 1e6)), args.target))
            steps.advance()
    if args.format == "json":
        print(json.dumps([as_row(m) for m in moved], indent=2))
    elif args.format == "markdown":
        print("\n".join(markdown(moved)))
    else:
        Console().print(table(moved, args.target))
    if args.into:
        args.into.write_text(renewed(page, moved))
    return int(not all(m.as_promised for m in moved))


def read_page(path: Path) -> str:
    """Return the text of a page that has a table of traffic, or refuse it."""
    try:
        page = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path} cannot be read: {getattr(error, 'strerror', 'it is not text')}") from None
    if HEADING not in page.splitlines():
        raise Refused(f"{path} has no table of traffic; its first line would be {HEADING}")
    return page


def renewed(page: str, moved: list[Moved]) -> str:
    """Return a page with these lines in its table: replacing a workload's own line, or added at the end."""
    lines = page.splitlines()
    for line in list(markdown(moved))[2:]:
        first = lines.index(HEADING) + 2
        last = next((n for n in range(first, len(lines)) if not lines[n].startswith("|")), len(lines))
        name = line.partition(" | ")[0]
        index = next((n for n in range(first, last) if lines[n].startswith(f"{name} |")), last)
        lines[index : index + (index < last)] = [line]
    return "\n".join(lines) + "\n"


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


def cells_of(moved: Moved) -> list[str]:
    """Return launches, minimum and other bytes in MB, and the ratio."""
    megabytes = [f"{count / 1e6:,.3f}" for count in (moved.least, *moved.total)]
    return [str(moved.launches), *megabytes, f"{moved.ratio:.3f}"]


COUNTS = ("rows", "launches", "least, MB", "requested", "per program", "per launch", "modelled", "ratio")
HEADING = f"| workload | {' | '.join(COUNTS)} | reason |"


def markdown(moved: list[Moved]) -> Iterator[str]:
    """Yield the lines of a table for the docs."""
    yield HEADING
    yield "|---|" + "---:|" * len(COUNTS) + "---|"
    for m in moved:
        cells = (f"`{m.workload}`", str(m.rows), *cells_of(m), m.workload.rereads)
        yield f"| {' | '.join(cells)} |"


def table(moved: list[Moved], target: str) -> Group:
    """Return the figures, followed by the reasons that workloads move more than the minimum."""
    headings = ("launches", "least", "requested", "per program", "per launch", "modelled", "ratio")
    figures = Figures(
        [["workload", *headings], *([str(m.workload), *cells_of(m)] for m in moved)],
        title=f"Bytes moved: counted here with the launches of {target}, in MB",
        caption=f"per program, per launch: 32-byte sectors. modelled: memory traffic with tensors up to {CACHED >> 20} "
        "MiB cached. ratio: modelled / least.",
        styles=["" if m.as_promised else "red" for m in moved],
    )
    reasons = (Text(f"{m.workload}: {m.workload.rereads}") for m in moved if m.workload.rereads)
    return Group(figures, *reasons)
