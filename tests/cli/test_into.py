"""`--into`: evidence for a new op is merged into the recorded evidence, and existing evidence stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft import __version__
from weft.cli import main
from weft.lab.commands.prove import merged
from weft.lab.commands.traffic import HEADING, markdown
from weft.lab.families import for_op
from weft.lab.traffic import count_traffic


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(argv) == 2
    return " ".join(capsys.readouterr().err.split())


def test_traffic_replaces_its_line_or_extends_the_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    name = "row_map:linghe/routing:plain:8192"
    rule = "|---|" + "---:|" * 8 + "---|"
    other_line = "| `other:x/y:plain:1` | 1 |"
    page.write_text(
        f"# Page\n\n{HEADING}\n{rule}\n| `{name}` | old |\n{other_line}\n\nAfter.\n\n| `{name}` | no |\n"
    )
    assert main(["report", "traffic", name, "--into", str(page)]) == 0
    line = list(markdown([count_traffic(for_op("row_map")[0], 8192, "sm_90")]))[2]
    assert line.startswith(f"| `{name}` |")
    after = f"{other_line}\n\nAfter.\n\n| `{name}` | no |\n"
    assert page.read_text() == f"# Page\n\n{HEADING}\n{rule}\n{line}\n{after}"
    page.write_text(f"{HEADING}\n{rule}\n{after}")
    assert main(["report", "traffic", name, "--into", str(page)]) == 0
    assert page.read_text() == f"{HEADING}\n{rule}\n" + after.replace(other_line, f"{other_line}\n{line}", 1)


def test_traffic_refuses_a_page_without_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    argv = ["report", "traffic", "row_map", "--into", str(page)]
    assert "cannot be read: No such file or directory" in refused(argv, capsys)
    page.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read: it is not text" in refused(argv, capsys)
    page.write_text("# Page\n")
    assert "has no table of traffic" in refused(argv, capsys)
    assert page.read_text() == "# Page\n"


def report(**changes: Any) -> dict[str, Any]:
    answers = [{"workload": name, "seconds": 1.5, "verdict": "proven"} for name in ("a", "b")]
    facts = {"weft": __version__, "target": "sm_90", "regions": 1, "seconds": 3.0, "date": "old"}
    return {"report": "weft prove", "schema": 1, **facts, "workloads": answers, **changes}


def test_answers_replace_those_for_the_same_workloads() -> None:
    newer = [{"workload": name, "seconds": 2.0, "verdict": "unknown"} for name in ("b", "c")]
    result = merged(report(), report(workloads=newer, seconds=9.0, date="new"))
    assert [(each["workload"], each["verdict"]) for each in result["workloads"]] == [
        ("a", "proven"),
        ("b", "unknown"),
        ("c", "unknown"),
    ]
    assert (result["seconds"], result["date"]) == (5.5, "new")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weft": "0.0.1"}, f"has weft 0.0.1, this run has {__version__}"),
        ({"target": "gfx942"}, "has target gfx942, this run has sm_90"),
        ({"regions": 64}, "has regions 64, this run has 1"),
    ],
)
def test_prove_refuses_a_report_of_another_kind(
    changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A merged report would attribute old answers to this version, target and number of regions."""
    pytest.importorskip("z3")
    file = tmp_path / "prove.json"
    file.write_text(json.dumps(report(**changes)))
    before = file.read_text()
    assert said in refused(["prove", "--op", "row_map", "--regions", "1", "--into", str(file)], capsys)
    assert file.read_text() == before
