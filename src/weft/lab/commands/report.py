"""`weft report`: print tables of evidence (counted bytes, published times), and renew the pages with reports."""

from __future__ import annotations

from typing import Any

from . import evidence, published, traffic


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "report", help="print tables of evidence, and renew the pages that show them"
    )
    reports = parser.add_subparsers(title="reports", metavar="REPORT", required=True)
    for report in (traffic, published, evidence):
        report.add_command(reports)
