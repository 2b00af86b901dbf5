"""`weft report evidence`: print the reports of other commands as Markdown, and renew the pages that show them.

A page names a report between two comments that enclose its table:

    <!-- evidence: runs/audit.json -->
    (the table)
    <!-- end of evidence -->

`weft report evidence PAGE.md` rewrites the table from the report; a test of this repository fails where they differ.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ...cli.screen import Refused
from .prove import HEADINGS, summary
from .reports import read_report

_MARKERS = re.compile(r"(<!-- evidence: (?P<report>\S+) -->\n).*?(<!-- end of evidence -->)", re.DOTALL)


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "evidence",
        help="print reports as Markdown tables, and renew the pages that show them",
        description="Print the JSON reports of other commands as Markdown; rewrite the tables of Markdown pages "
        "from the reports that they name.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="reports (.json), or pages (.md)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print or renew the files, or refuse one that is neither a report nor a page."""
    for file in args.files:
        if file.suffix != ".md":
            print(markdown(read(file)))
            continue
        try:
            file.write_text(renewed(file))
        except OSError as error:
            raise Refused(f"{file}: {error.strerror}") from None
    return 0


def read(file: Path) -> dict[str, Any]:
    """Return a report of one of Weft's commands."""
    return read_report(file, TABLES)


def renewed(page: Path) -> str:
    """Return the text of a page with renewed tables; the report paths in it are relative to the page."""

    def table(match: re.Match[str]) -> str:
        return match[1] + "\n" + markdown(read(page.parent / match["report"])) + "\n\n" + match[3]

    return _MARKERS.sub(table, page.read_text())


def markdown(report: dict[str, Any]) -> str:
    return TABLES[report["report"]](report)


# ---- a table for each kind of report ------------------------------------------------------------------------


def _table(headings: Sequence[str], rows: Iterable[Sequence[object]], texts: int = 1) -> str:
    """Return a Markdown table whose first `texts` columns are text and whose others are figures."""
    rule = ["---"] * texts + ["---:"] * (len(headings) - texts)
    lines = [headings, rule, *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _audit(report: dict[str, Any]) -> str:
    """Return a row for each op: the extremes over all targets."""

    def registers(selected: list[dict[str, Any]], vendor: str) -> int | str:
        return max((each["registers"] for each in selected if each["target"].startswith(vendor)), default="-")

    rows = []
    for op in dict.fromkeys(each["op"] for each in report["summary"]):
        selected = [each for each in report["summary"] if each["op"] == op]
        lowest = min(selected, key=lambda each: each["warps"] / each["most_warps"])
        rows.append(
            (
                f"`{op}`",
                sum(each["kernels"] for each in selected),
                registers(selected, "sm_"),
                registers(selected, "gfx"),
                max(each["spilled"] for each in selected),
                f"{max(each['shared'] for each in selected) / 1024:.0f}",
                f"{lowest['warps']}/{lowest['most_warps']} ({lowest['target']}, {lowest['limited_by']})",
                sum(each["faults"] for each in selected),
            )
        )
    targets = list(dict.fromkeys(each["target"] for each in report["summary"]))
    heading = (
        f"{report['date'][:10]}, Weft {report['weft']}, Triton {report['triton']}: {report['kernels_compiled']:,} "
        f"kernels for {', '.join(targets)}, {sum(each['faults'] for each in report['summary'])} with faults."
    )
    headings = (
        "op",
        "kernels",
        "registers",
        "VGPRs",
        "bytes spilled",
        "KiB shared",
        "fewest warps",
        "faults",
    )
    return f"{heading}\n\n{_table(headings, rows)}"


def _verify(report: dict[str, Any]) -> str:
    """Return a row for each op, a column for each check: how many passed."""
    verdicts = report["verdicts"]
    checks = list(dict.fromkeys(v["check"] for v in verdicts if v["outcome"] != "not applicable"))

    def cell(op: str, check: str) -> str:
        outcomes = [v["outcome"] for v in verdicts if (v["op"], v["check"]) == (op, check)]
        failed, passed = outcomes.count("failed"), outcomes.count("passed")
        return f"**{failed} failed**" if failed else str(passed or "-")

    ops = dict.fromkeys(v["op"] for v in verdicts)
    rows = [(f"`{op}`", *(cell(op, check) for check in checks)) for op in ops]
    heading = (
        f"{report['date'][:10]}, on {report['subject']}: {report['passed']} checks passed, {report['failed']} failed, "
        f"{report['seconds']:.0f} s."
    )
    return f"{heading}\n\n{_table(('op', *(check.replace('_', ' ') for check in checks)), rows)}"


def _prove(report: dict[str, Any]) -> str:
    """Return a row for each op; the columns are those that the command shows."""
    rows = summary(report)
    records = report["workloads"]
    regions = sum(each["regions"] for each in records)
    accesses, launches, proven, counterexamples, unknown = (
        sum(row[name] for row in rows)
        for name in ("accesses", "launches", "proven", "counterexample", "unknown")
    )
    heading = (
        f"{report['date'][:10]}, Weft {report['weft']}, kernels as compiled for {report['target']}: {len(records)} "
        f"workloads, {accesses:,} accesses of {launches:,} launches in {regions:,} regions of sizes; {proven:,} "
        f"obligations proven, {counterexamples} with a counterexample, {unknown} unknown."
    )
    cells = [(f"`{row['op']}`", *(row[name] for name in HEADINGS if name != "op")) for row in rows]
    return f"{heading}\n\n{_table(list(HEADINGS.values()), cells)}"


def _cold_start(report: dict[str, Any]) -> str:
    names = ("way", "processes", "first", "median", "last", "compiled", "written_mb")
    headings = ("way", "at once", "first, s", "median, s", "last, s", "compiled", "written, MB")
    return _table(headings, [[row[name] for name in names] for row in report["rows"]])


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "weft audit": _audit,
    "weft verify": _verify,
    "weft prove": _prove,
    "cold start": _cold_start,
}
