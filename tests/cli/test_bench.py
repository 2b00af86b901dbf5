"""`weft bench`: wrong contenders get no time, and two reports are compared beside their noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.cli import bench, main
from weft.cli.bench import Times, verdict
from weft.workloads import Call, for_op


def test_a_report_has_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    arguments = ["--op", "rope", "--most", "0.1", "--rounds", "3", "--against", "eager", "--out", str(out)]
    assert main(["bench", *arguments]) == 0
    report = json.loads(out.read_text())
    (row,) = report["rows"]
    assert set(row["times"]) == {"weft", "eager", "copy"}
    for times in row["times"].values():
        assert 0 < times["p20"] <= times["p50"] <= times["p80"]
    wanted = row["times"]["eager"]["p50"] / row["times"]["weft"]["p50"]
    assert report["geometric_means"]["eager"] == pytest.approx(wanted, rel=1e-3)
    assert "geometric mean" in capsys.readouterr().out
    assert main(["bench", "compare", str(out), str(out)]) == 0


def test_a_wrong_contender_gets_no_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def contenders(call: Call, wanted: Any) -> Any:
        def fails() -> None:
            raise ValueError("no such thing")

        return {"weft": call, "eager": lambda: torch.zeros_like(call()), "compile": fails}, {}

    monkeypatch.setattr(bench, "contenders", contenders)
    out = tmp_path / "bench.json"
    assert main(["bench", "--op", "rope", "--most", "0.1", "--rounds", "3", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert set(row["times"]) == {"weft", "copy"}
    assert row["left_out"] == {"eager": "other results", "compile": "ValueError: no such thing"}


def test_a_reference_of_several_ops_is_not_compiled() -> None:
    call = for_op("rope")[0].make(rows=2)
    twice = Call(lambda **kwargs: (call.function(**kwargs), call.function(**kwargs)), call.kwargs)
    functions, left = bench.contenders(twice, ["compile"])
    assert set(functions) == {"weft"}
    assert "2 ops are reached" in left["compile"]


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        (Times(9, 10, 11), Times(9.1, 10.2, 11.2), "same"),  # little
        (Times(5, 10, 20), Times(8, 13, 25), "same"),  # more, within the noise
        (Times(9, 10, 11), Times(12, 13, 14), "slower"),
        (Times(9, 10, 11), Times(6, 7, 8), "faster"),
        (Times(9.99, 10, 10.01), Times(10.1, 10.2, 10.3), "same"),  # apart, and little
    ],
)
def test_verdicts(before: Times, after: Times, wanted: str) -> None:
    assert verdict(before, after) == wanted


def test_what_became_slower_is_an_error(tmp_path: Path) -> None:
    for name, scale in (("before", 1), ("after", 2)):
        row = {"workload": "w", "times": {"weft": {"p20": 9 * scale, "p50": 10 * scale, "p80": 11 * scale}}}
        (tmp_path / name).write_text(json.dumps({"rows": [row]}))
    assert main(["bench", "compare", str(tmp_path / "before"), str(tmp_path / "after")]) == 1
    assert main(["bench", "compare", str(tmp_path / "after"), str(tmp_path / "before")]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--op", "nothing"],
        ["--against", "jax"],
        ["--workload", "nothing"],
        ["compare", "a"],
        ["compare", "a", "b"],
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert capsys.readouterr().err
