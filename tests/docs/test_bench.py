"""docs/bench.md says what the committed run has, and explains its slowest rows."""

from __future__ import annotations

import re
from pathlib import Path

from weft.cli.bench.showing import page, read, worst
from weft.workloads import WORKLOADS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/bench.md").read_text()
RUN = read(ROOT / "docs/runs/bench.json")


def test_the_page_has_the_committed_run() -> None:
    assert "\n".join(page(RUN)) in PAGE


def test_the_slowest_rows_are_explained() -> None:
    explained = PAGE[PAGE.index("### The slowest rows, explained") :]
    named = [line for line in explained.splitlines() if line.startswith("- **")]
    for row, line in zip(worst(RUN["rows"], "compile"), named, strict=True):
        assert line.startswith(f"- **`{row.op}`**")


def test_the_run_is_of_workloads_that_exist() -> None:
    known = {str(workload) for workload in WORKLOADS}
    assert {row.workload for row in RUN["rows"]} <= known
    assert all("weft" in row.times for row in RUN["rows"])


def test_the_picture_is_of_the_same_run() -> None:
    text = (ROOT / "docs/bench.svg").read_text()
    assert {row.op for row in RUN["rows"]} <= set(re.findall(r"<!-- (\w+) -->", text))
    assert RUN["date"][:10] in text
