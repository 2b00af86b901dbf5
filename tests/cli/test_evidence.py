"""`weft report evidence`: reports as Markdown, and pages that agree with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.cli import main
from weft.lab.commands.evidence import TABLES, read, renewed

DOCS = Path(__file__).parents[2] / "docs"
COLD = {
    "report": "cold start",
    "rows": [
        {
            "way": "bundle",
            "processes": 8,
            "first": 1.5,
            "median": 2.0,
            "last": 2.5,
            "compiled": 0,
            "written_mb": 1.5,
        }
    ],
}
PAGE = "before\n\n<!-- evidence: cold.json -->\n\nan old table\n\n<!-- end of evidence -->\n\nafter\n"


def saved(folder: Path, report: Any) -> Path:
    file = folder / "cold.json"
    file.write_text(json.dumps(report))
    return file


def test_a_report_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "evidence", str(saved(tmp_path, COLD))]) == 0
    assert "| bundle | 8 | 1.5 | 2.0 | 2.5 | 0 | 1.5 |" in capsys.readouterr().out


def test_a_page_is_updated_once(tmp_path: Path) -> None:
    saved(tmp_path, COLD)
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert main(["report", "evidence", str(page)]) == 0
    text = page.read_text()
    assert "| bundle | 8 |" in text
    assert "an old table" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert renewed(page) == text


@pytest.mark.parametrize("report", [[], {"report": "of nobody"}, {}])
def test_files_that_are_not_reports_are_refused(
    report: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "evidence", str(saved(tmp_path, report))]) == 2
    wanted = "a report of `of nobody`, which is not read here" if report else "no report of Weft's"
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_pages_agree_with_their_reports(page: Path) -> None:
    assert renewed(page) == page.read_text(), f"weft report evidence {page.relative_to(DOCS.parent)} fixes it"


def test_every_report_is_shown() -> None:
    """A report that no page names would be evidence of nothing."""
    pages = "".join(page.read_text() for page in DOCS.rglob("*.md"))
    for file in (DOCS / "runs").glob("*.json"):
        report = json.loads(file.read_text())
        if isinstance(report, dict) and report.get("report") in TABLES:
            assert f"<!-- evidence: runs/{file.name} -->" in pages, file
            read(file)
