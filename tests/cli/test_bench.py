"""`weft bench`: wrong results get no time, shares and means describe what was measured, and reports are compared
relative to their noise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.cli import main
from weft.lab.bench import measuring, products, showing, with_even_experts
from weft.lab.bench.clocks import Times
from weft.lab.bench.contenders import Contender, Lacks
from weft.lab.bench.measuring import Row, Settings, measure
from weft.lab.bench.showing import geometric_mean, joined, markdown, means, verdict
from weft.lab.families import WORKLOADS, for_op
from weft.lab.published import PUBLISHED

QUICK = ["--most", "0.1", "--rounds", "3"]


def row(op: str = "norm", **changed: Any) -> Row:
    """Return a row: Weft in 10 ms, plain PyTorch in 20, a copy in 5; 10 GB/s and 2 TFLOPS, half of the best
    product's."""
    times = {name: Times(ms * 0.9, ms, ms * 1.1) for name, ms in (("weft", 10), ("eager", 20), ("copy", 5))}
    default = Row(op, f"{op}:a:b:8", 8, 10**8, None, None, 0, times, {"weft": 10**6, "eager": 10**7}, {})
    return replace(default, **changed)


def settings(*against: str) -> Settings:
    return Settings(torch.device("cpu"), against, 3, 0.1)


@pytest.fixture(autouse=True)
def small_best_product(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(measuring, "SIDE", 64)
    measuring.best_product.cache_clear()
    yield
    measuring.best_product.cache_clear()


# ---- measuring --------------------------------------------------------------------------------------------


def test_a_report_contains_the_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    assert main(["bench", "--op", "rope", *QUICK, "--against", "eager,fa", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    (measured,) = report["rows"]
    assert set(measured["times"]) == {"weft", "eager", "copy"}
    for times in measured["times"].values():
        assert 0 < times["p20"] <= times["p50"] <= times["p80"]
    assert 0 < measured["memory"]["weft"] < measured["memory"]["eager"]
    assert measured["left_out"] == {"fa": "FlashAttention is not an engine of rope"}
    wanted = measured["times"]["eager"]["p50"] / measured["times"]["weft"]["p50"]
    assert report["geometric_means"]["all"]["eager"] == pytest.approx(wanted, abs=1e-3)
    assert report["machine"]
    assert "geometric mean" in capsys.readouterr().out
    assert main(["bench", "compare", str(out), str(out)]) == 0
    assert main(["bench", "show", str(out)]) == 0
    assert "fa, rope: FlashAttention" in capsys.readouterr().out


def test_products_have_a_rate_and_a_share_of_the_best() -> None:
    measured = measure(products.product_workload("fp32", 64, 32, 128), settings("eager"))
    assert measured.flops == 2 * 64 * 32 * 128
    assert measured.product in ("bf16", "fp32")
    rate = measured.flops / measured.times["weft"].p50 / 1e9
    assert measured.tflops() == pytest.approx(rate)
    best = measured.product_flops / measured.times["product"].p50 / 1e9
    assert measured.share_of_product() == pytest.approx(rate / best)


def test_flops_count_the_measured_rows() -> None:
    workload = for_op("matmul")[0]
    measured = measure(workload, replace(settings(), most=10.0))
    assert measured.rows == workload.rows
    fewer = measure(replace(workload, rows=10**6), replace(settings(), most=8.0))
    assert measured.flops is not None
    assert fewer.rows < 10**4
    assert fewer.flops == measured.flops * fewer.rows // measured.rows


@pytest.mark.parametrize("wrong", ["weft", "eager"])
def test_a_wrong_result_gets_no_time(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    original = measuring.contender

    def contender(name: str, workload: Any) -> Any:
        prepare = original(name, workload)

        def damaged(call: Any) -> Contender:
            run, truth = prepare(call)
            return Contender(lambda: run() * 1.1, truth)

        return damaged if name == wrong else prepare

    monkeypatch.setattr(measuring, "contender", contender)
    measured = measure(for_op("rope")[0], settings("eager"))
    assert set(measured.times) == {"weft", "eager", "copy"} - {wrong}
    assert measured.left_out[wrong].startswith("other results: ")
    assert wrong not in measured.memory
    assert measured.ratio("eager") is None


def test_failing_contenders_are_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    original = measuring.contender

    def contender(name: str, workload: Any) -> Any:
        if name == "eager":
            raise ValueError("no such thing\nand more")
        if name == "te":
            raise Lacks("an installation")
        return original(name, workload)

    monkeypatch.setattr(measuring, "contender", contender)
    measured = measure(for_op("rope")[0], settings("eager", "te"))
    assert measured.left_out == {"eager": "ValueError: no such thing", "te": "an installation"}


def test_published_rows_give_experts_full_blocks() -> None:
    (workload,) = (w for w in WORKLOADS if str(w) == PUBLISHED[7].workload)
    call = with_even_experts(workload).make(rows=32 * 128 * 3 + 128)
    assert call["align"] == 128
    assert (call["ends"] % 128 == 0).all()
    assert call["ends"][-1] == len(call["x"])
    plain = with_even_experts(for_op("norm")[0]).make(rows=2)
    assert "align" not in plain.kwargs


# ---- the tables of products -------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "PAIRS", ("fp32", "fp8-row"))
    monkeypatch.setitem(products.SIZES, "cpu", ((32, 64, 128),))
    monkeypatch.setitem(products.SIDES, "cpu", (64, 128))
    monkeypatch.setitem(products.MEGABYTES, "cpu", (1, 2))
    monkeypatch.setattr(products, "products", lambda s: _without_compile(original(s)))


original = products.products


def _without_compile(tasks: Iterator[tuple[Any, Settings]]) -> Iterator[tuple[Any, Settings]]:
    """Leave out "compile": compilation takes seconds, and it is measured in the same way."""
    for workload, chosen in tasks:
        yield workload, replace(chosen, against=tuple(name for name in chosen.against if name != "compile"))


@pytest.mark.usefixtures("small")
def test_mm_prints_rates_of_products(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "mm.json"
    assert main(["bench", "mm", "--rounds", "3", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("32x64x128") >= 2
    assert "weft, TFLOPS" in printed
    assert [one["op"] for one in json.loads(out.read_text())["rows"]] == ["matmul"] * 2


@pytest.mark.usefixtures("small")
def test_sol_prints_the_highest_rates_reached(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sol", "--rounds", "3", "--format", "markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| copy", "| copy", "| fp32", "| fp8-row"]
    assert all("GB/s" in line or "TFLOPS" in line for line in lines[2:])


# ---- showing ----------------------------------------------------------------------------------------------


def test_figures_come_from_the_row() -> None:
    product = {"flops": 2 * 10**10, "product": "bf16", "product_flops": 8 * 10**10}
    times = {**row().times, "product": Times(19, 20, 21)}
    _, _, line, mean = markdown(joined([row(**product, times=times)]))
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "norm:a:b:8", "10", "9, 11", "10.0", "50%", "2", "50%", "1", "2.00",
    ]  # fmt: skip
    assert mean.endswith("| 2.00 |")


def test_means_are_geometric() -> None:
    half = {**row().times, "eager": Times(4, 5, 6)}
    rows = [row(), row(times=half), row("glu")]
    result = means(rows)
    assert result["by_op"] == {"norm": {"eager": 1.0}, "glu": {"eager": 2.0}}
    assert result["all"]["eager"] == pytest.approx(2 ** (1 / 3), abs=1e-3)
    assert geometric_mean([None]) is None


def test_a_picture_shows_every_op(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown = {"rows": [row(), row("glu")], "machine": "a machine", "date": "2026-11-17"}
    showing.plot(shown, tmp_path / "a.svg")
    showing.plot(shown, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.svg").read_text()
    text = (tmp_path / "a.svg").read_text()
    assert all(f"<!-- {word} -->" in text for word in ("norm", "glu", "eager"))


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        (Times(9, 10, 11), Times(9.1, 10.2, 11.2), "same"),  # a small change
        (Times(5, 10, 20), Times(8, 13, 25), "same"),  # a larger change within the noise
        (Times(9, 10, 11), Times(12, 13, 14), "slower"),
        (Times(9, 10, 11), Times(6, 7, 8), "faster"),
        (Times(9.99, 10, 10.01), Times(10.1, 10.2, 10.3), "same"),  # beyond the noise, but small
    ],
)
def test_verdicts_need_a_change_beyond_size_and_noise(before: Times, after: Times, wanted: str) -> None:
    assert verdict(before, after) == wanted


def test_a_slowdown_is_an_error(tmp_path: Path) -> None:
    slow = {**row().times, "weft": Times(18, 20, 22)}
    for name, one in (("before", row()), ("after", row(times=slow))):
        report = measuring.report([one], settings())
        (tmp_path / name).write_text(json.dumps(report))
    assert main(["bench", "compare", str(tmp_path / "before"), str(tmp_path / "after")]) == 1
    assert main(["bench", "compare", str(tmp_path / "after"), str(tmp_path / "before")]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--op", "nothing"],
        ["--against", "jax"],
        ["--workload", "nothing"],
        ["--device", "meta"],
        ["--device", "cuda"],
        ["compare", "a"],
        ["compare", "a", "b"],
        ["show", "a"],
        ["sol", "a"],
    ],
)
def test_arguments_that_cannot_be_measured_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[-1] == "cuda" and torch.cuda.is_available():
        pytest.skip("CUDA is available")
    assert main(["bench", *arguments]) == 2
    assert capsys.readouterr().err


def test_a_report_of_another_schema_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = measuring.report([row()], settings())
    (tmp_path / "old").write_text(json.dumps({**report, "schema": 1}))
    assert main(["bench", "show", str(tmp_path / "old")]) == 2
    assert "run `weft bench` again" in capsys.readouterr().err


def test_missing_measurements_are_not_shown() -> None:
    """A row without a product has no share of one, and a row without a time of Weft shows nothing."""
    assert row().tflops() is None
    assert row().share_of_product() is None
    _, missing, _ = joined([row(times={})])
    assert set(missing[1:7]) == {"-"}
