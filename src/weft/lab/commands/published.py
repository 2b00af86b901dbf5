"""`weft report published`: rows with published times, and the bytes and binaries of Weft for each."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from ...cli.arguments import add_most
from ...cli.figures import Figures
from ...cli.names import made_of, public_ops, unknown
from ...cli.needs import require
from ...cli.screen import Steps
from ...runtime import recording
from ..compiled import Binary, compile_all
from ..published import BANDWIDTH, PUBLISHED, Published
from ..traffic import Moved, count_traffic, rows_within

TARGET = "sm_90"
COUNTED = ("rows", "launches", "least, MB", "per program", "per launch", "modelled", "ratio")
COMPILED = ("registers", "spilled, B", "loads, bits", "stores, bits")
TIMES = ("limit, us", "published, us", "times the limit")


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "published",
        help="show rows with published GPU times: bytes counted here, kernels compiled for that GPU",
    )
    parser.add_argument(
        "text", nargs="*", metavar="TEXT", help="only rows with one of these in their title or workload"
    )
    add_most(parser, 6000.0)
    parser.add_argument("--format", choices=("table", "json", "markdown"), default="table")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Row:
    """A published row, the traffic of its workload, and the binaries of its launches."""

    published: Published
    moved: Moved
    binaries: tuple[Binary, ...]

    @property
    def limit(self) -> float:
        """Return the microseconds that the minimum of bytes takes at the memory's bandwidth."""
        return self.moved.workload.least_bytes() / BANDWIDTH * 1e6

    def counted(self) -> tuple[float, ...]:
        total = self.moved.total
        megabytes = (self.moved.least, total.per_program, total.per_launch, total.modelled)
        return (
            self.moved.rows,
            self.moved.launches,
            *(round(count / 1e6, 2) for count in megabytes),
            round(self.moved.ratio, 3),
        )

    def compiled(self) -> tuple[int | str, ...]:
        return (
            max(binary.registers for binary in self.binaries),
            max(binary.spill_bytes for binary in self.binaries),
            widths([binary.loads for binary in self.binaries]),
            widths([binary.stores for binary in self.binaries]),
        )

    def times(self) -> tuple[float, ...]:
        published = self.published.microseconds
        return round(self.limit, 1), published, round(published / self.limit, 2)


def widths(counts: Sequence[dict[int, int]]) -> str:
    """Return how many accesses of each width some binaries have, widest first: `16x128 2x32`."""
    total: dict[int, int] = {}
    for count in counts:
        for width, n in count.items():
            total[width] = total.get(width, 0) + n
    return " ".join(f"{total[width]}x{width}" for width in sorted(total, reverse=True))


def measured_row(published: Published, most: float) -> Row:
    workload = published.find()
    with recording(TARGET):
        call = workload.make("meta")
    with recording(TARGET) as variants:
        call()
    binaries = []
    for result in compile_all([(variant, TARGET) for variant in dict.fromkeys(variants)]):
        if not isinstance(result, Binary):
            raise result
        binaries.append(result)
    return Row(
        published, count_traffic(workload, rows_within(workload, int(most * 1e6)), TARGET), tuple(binaries)
    )


def run(args: argparse.Namespace) -> int:
    """Return 1 if a row moves more than its workload promises."""
    require("weft report published")
    chosen = rows_named(args.text)
    rows = []
    with Steps(len(chosen)) as steps:
        for published in chosen:
            steps.say(published.title)
            rows.append(measured_row(published, args.most))
            steps.advance()
    if args.format == "json":
        print(json.dumps([as_json(row) for row in rows], indent=2))
    elif args.format == "markdown":
        print("\n".join(markdown(rows)))
    else:
        for table in tables(rows):
            Console().print(table)
        Console().print("\n".join(reasons(rows)), markup=False)
    return int(not all(row.moved.as_promised for row in rows))


def rows_named(texts: Sequence[str]) -> list[Published]:
    """Return the rows that any of the texts selects, by title, workload or public function; all if there is no text."""
    chosen: set[int] = set()
    for text in texts:
        ops = made_of(text) if text in public_ops() else ()
        matches = [
            p for p in PUBLISHED if text in p.title or text in p.workload or p.workload.split(":")[0] in ops
        ]
        if not matches:
            raise unknown("published row", text, [p.title for p in PUBLISHED])
        chosen.update(published.number for published in matches)
    return [published for published in PUBLISHED if not texts or published.number in chosen]


def as_json(row: Row) -> dict[str, Any]:
    values = (*row.counted(), *row.compiled(), *row.times())
    return {
        "number": row.published.number,
        "row": row.published.title,
        "workload": row.published.workload,
        **dict(zip((*COUNTED, *COMPILED, *TIMES), values, strict=True)),
        "reason": row.moved.workload.rereads,
        "as_promised": row.moved.as_promised,
    }


def reasons(rows: Sequence[Row]) -> Iterator[str]:
    """Yield why rows move more than the minimum."""
    for row in rows:
        if row.moved.ratio > 1.02:
            yield f"- row {row.published.number}, {row.moved.ratio:.2f}: {row.moved.workload.rereads}"


def cells(row: Row, *values: float | str) -> list[str]:
    shown = (f"{value:,}" if isinstance(value, (int, float)) else value for value in values)
    return [str(row.published.number), row.published.title, *shown]


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    headings = ("#", "row", *COUNTED, *COMPILED, *TIMES)
    yield f"| {' | '.join(headings)} |"
    yield "|---:|---|" + "---:|" * (len(headings) - 2)
    for row in rows:
        yield f"| {' | '.join(cells(row, *row.counted(), *row.compiled(), *row.times()))} |"
    yield ""
    yield from reasons(rows)


def tables(rows: Sequence[Row]) -> Iterator[Figures]:
    """Yield two tables: counted figures and compiled figures."""

    def lines(headings: Sequence[str], values: Callable[[Row], Sequence[float | str]]) -> Iterator[list[str]]:
        yield ["row", *headings]
        for row in rows:
            number, title, *figures = cells(row, *values(row))
            yield [f"{number}. {title}", *figures]

    yield Figures(
        lines(COUNTED, Row.counted),
        title=f"Bytes moved: counted here with the launches of {TARGET}",
        styles=["" if row.moved.as_promised else "red" for row in rows],
    )
    yield Figures(
        lines((*COMPILED, *TIMES), lambda row: (*row.compiled(), *row.times())),
        title=f"\nThe kernels as compiled for {TARGET}, and times on an H800",
        caption=f"limit: minimum bytes at {BANDWIDTH / 1e12:.2f} TB/s, computed. published: measured by its authors. "
        "No time is Weft's: none was measured on a GPU.",
    )
