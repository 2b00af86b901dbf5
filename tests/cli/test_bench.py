"""`weft bench`: wrong results get no time, shares and means are of what was measured, and two reports are compared
beside their noise."""

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
    """Weft in 10 ms, plain PyTorch in 20, a copy in 5; 10 GB/s and 2 TFLOPS, half of the best product's."""
    times = {name: Times(ms * 0.9, ms, ms * 1.1) for name, ms in (("weft", 10), ("eager", 20), ("copy", 5))}
    made = Row(op, f"{op}:a:b:8", 8, 10**8, None, None, 0, times, {"weft": 10**6, "eager": 10**7}, {})
    return replace(made, **changed)


def settings(*against: str) -> Settings:
    return Settings(torch.device("cpu"), against, 3, 0.1)


@pytest.fixture(autouse=True)
def small_best_product(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(measuring, "SIDE", 64)
    measuring.best_product.cache_clear()
    yield
    measuring.best_product.cache_clear()


# ---- measuring --------------------------------------------------------------------------------------------


def test_a_report_has_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    assert main(["bench", "--op", "rope", *QUICK, "--against", "eager,fa", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    (found,) = report["rows"]
    assert set(found["times"]) == {"weft", "eager", "copy"}
    for times in found["times"].values():
        assert 0 < times["p20"] <= times["p50"] <= times["p80"]
    assert 0 < found["memory"]["weft"] < found["memory"]["eager"]
    assert found["left_out"] == {"fa": "FlashAttention is not behind engine= of rope"}
    wanted = found["times"]["eager"]["p50"] / found["times"]["weft"]["p50"]
    assert report["geometric_means"]["all"]["eager"] == pytest.approx(wanted, abs=1e-3)
    assert report["machine"]
    assert "geometric mean" in capsys.readouterr().out
    assert main(["bench", "compare", str(out), str(out)]) == 0
    assert main(["bench", "show", str(out)]) == 0
    assert "fa, rope: FlashAttention" in capsys.readouterr().out


def test_products_have_a_rate_and_a_share_of_the_best() -> None:
    found = measure(products.product_workload("fp32", 64, 32, 128), settings("eager"))
    assert found.flops == 2 * 64 * 32 * 128
    assert found.product in ("bf16", "fp32")
    rate = found.flops / found.times["weft"].p50 / 1e9
    assert found.tflops() == pytest.approx(rate)
    best = found.product_flops / found.times["product"].p50 / 1e9
    assert found.share_of_product() == pytest.approx(rate / best)


def test_flops_are_of_the_rows_that_were_measured() -> None:
    workload = for_op("matmul")[0]
    found = measure(workload, replace(settings(), most=10.0))
    assert found.rows == workload.rows
    fewer = measure(replace(workload, rows=10**6), replace(settings(), most=8.0))
    assert found.flops is not None
    assert fewer.rows < 10**4
    assert fewer.flops == found.flops * fewer.rows // found.rows


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
    found = measure(for_op("rope")[0], settings("eager"))
    assert set(found.times) == {"weft", "eager", "copy"} - {wrong}
    assert found.left_out[wrong].startswith("other results: ")
    assert wrong not in found.memory
    assert found.ratio("eager") is None


def test_what_fails_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    original = measuring.contender

    def contender(name: str, workload: Any) -> Any:
        if name == "eager":
            raise ValueError("no such thing\nand more")
        if name == "te":
            raise Lacks("an installation")
        return original(name, workload)

    monkeypatch.setattr(measuring, "contender", contender)
    found = measure(for_op("rope")[0], settings("eager", "te"))
    assert found.left_out == {"eager": "ValueError: no such thing", "te": "an installation"}


def test_published_rows_have_experts_of_whole_blocks() -> None:
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
    """Compiling takes seconds, and is measured in the same way."""
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
def test_sol_prints_the_most_that_was_reached(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sol", "--rounds", "3", "--format", "markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| copy", "| copy", "| fp32", "| fp8-row"]
    assert all("GB/s" in line or "TFLOPS" in line for line in lines[2:])


# ---- showing ----------------------------------------------------------------------------------------------


def test_figures_are_those_of_the_row() -> None:
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
    found = means(rows)
    assert found["by_op"] == {"norm": {"eager": 1.0}, "glu": {"eager": 2.0}}
    assert found["all"]["eager"] == pytest.approx(2 ** (1 / 3), abs=1e-3)
    assert geometric_mean([None]) is None


def test_a_picture_has_every_op(tmp_path: Path) -> None:
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
    slow = {**row().times, "weft": Times(18, 20, 22)}
    for name, one in (("before", row()), ("after", row(times=slow))):
        made = measuring.report([one], settings())
        (tmp_path / name).write_text(json.dumps(made))
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
def test_what_cannot_be_measured_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if arguments[-1] == "cuda" and torch.cuda.is_available():
        pytest.skip("it can be")
    assert main(["bench", *arguments]) == 2
    assert capsys.readouterr().err


def test_a_report_of_another_schema_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = measuring.report([row()], settings())
    (tmp_path / "old").write_text(json.dumps({**made, "schema": 1}))
    assert main(["bench", "show", str(tmp_path / "old")]) == 2
    assert "run `weft bench` again" in capsys.readouterr().err


def test_what_was_not_measured_is_not_shown() -> None:
    """A row without a product has no share of one, and one without a time of Weft nothing at all."""
    assert row().tflops() is None
    assert row().share_of_product() is None
    _, missing, _ = joined([row(times={})])
    assert set(missing[1:7]) == {"-"}
