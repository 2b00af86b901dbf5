"""`weft audit`: the jobs it compiles, the faults it reports, and the model of time."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.cli import main
from weft.lab.commands import audit
from weft.lab.compiled import Binary, CompileError
from weft.lab.compiled.occupancy import occupancy_of
from weft.lab.families import WORKLOADS, flops_of, for_op
from weft.lab.model import BOARDS, USUAL, Bounds, memory_seconds, public_timings
from weft.runtime import TARGETS

GOOD = Binary("sm_90", 40, 0, 0, 0, {128: 64}, {128: 64}, False, (), 0.1, Counter({"LDG.E.128": 64}))


def compiling(monkeypatch: pytest.MonkeyPatch, change: Any) -> list[str]:
    """Replace compilation by `GOOD`, changed by a function of (variant, binary); return the targets of the jobs."""
    targets: list[str] = []

    def compile_all(jobs: list[Any], progress: Any, **options: Any) -> list[Any]:
        targets.extend(target for _, target in jobs)
        for done in range(len(jobs)):
            progress(done, len(jobs), GOOD)
        return [change(variant, replace(GOOD, target=target)) for variant, target in jobs]

    monkeypatch.setattr(audit, "compile_all", compile_all)
    return targets


def test_all_workloads_and_targets_are_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = compiling(monkeypatch, lambda variant, good: good)
    main(["audit"])
    assert set(targets) == set(TARGETS)
    assert len(targets) > 3000
    assert "none measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda v, good: CompileError(good.target, v.kernel, "no result after 300 s", ""),
            "does not compile",
        ),
        (lambda v, good: replace(good, spill_bytes=512, stack=512), "512 bytes spilled"),
        (lambda v, good: replace(good, uses_fp64=True), "float64"),
        (lambda v, good: replace(good, shared=1 << 20), "bytes of shared memory"),
        (lambda v, good: replace(good, loads={32: 64}), "loads by bits"),
    ],
)
def test_a_fault_is_named(
    change: Any,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    compiling(monkeypatch, change)
    out = tmp_path / "audit.json"
    assert main(["audit", "--op", "glu", "--target", "sm_90", "--out", str(out)]) == 1
    printed = capsys.readouterr().out.replace("\n", " ")
    assert said in printed
    assert "glu_kernel" in printed
    assert len(json.loads(out.read_text())["kernels"]) > 5
    assert main(["report", "evidence", str(out)]) == 0
    assert re.search(r"\| `glu` \| \d+ \| \S+ \| - \|.* \| [1-9]\d* \|", capsys.readouterr().out)


@pytest.mark.slow
def test_a_kernel_is_compiled_and_its_figures_written(tmp_path: Path) -> None:
    out = tmp_path / "audit.json"
    name = str(for_op("dequantize")[0])
    assert main(["audit", "--workload", name, "--target", "sm_90", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    (kernel,) = report["kernels"]
    assert kernel["faults"] == []
    assert kernel["registers"] > 16
    assert kernel["loads"]
    (expected,) = report["expected"]
    assert expected["board"] == "H100"
    assert expected["modelled_us"] > 2


@pytest.mark.parametrize("arguments", [["--op", "rmsnorm"], ["--workload", "no such model"]])
def test_unknown_ops_and_workloads_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", *arguments]) == 2
    assert "no" in capsys.readouterr().err


# ---- occupancy, by CUDA's rules -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "warps", "registers", "shared", "wanted"),
    [
        ("sm_90", 4, 32, 0, (64, "warps")),
        ("sm_90", 4, 128, 0, (16, "registers")),
        ("sm_90", 4, 255, 0, (8, "registers")),
        ("sm_90", 8, 168, 200 << 10, (8, "registers")),
        ("sm_90", 4, 64, 100 << 10, (8, "shared memory")),
        ("sm_90", 1, 16, 0, (32, "blocks")),
        ("sm_80", 4, 64, 82 << 10, (4, "shared memory")),  # a block reserves a KiB
        ("gfx942", 4, 128, 0, (16, "registers")),
        ("gfx942", 4, 40, 0, (32, "warps")),
    ],
)
def test_occupancy_follows_the_rules_of_cuda(
    target: str, warps: int, registers: int, shared: int, wanted: tuple[int, str]
) -> None:
    occupancy = occupancy_of(target, warps, registers, shared)
    assert (occupancy.warps, occupancy.limited_by) == wanted


# ---- the model ----------------------------------------------------------------------------------------------


def test_the_model_is_close_to_published_timings() -> None:
    timings = public_timings()
    assert len(timings) >= 30
    products = [t for t in timings if " x " in t.what and "coalesced" not in t.note]
    assert max(abs(t.error) for t in products) < 0.18
    near_the_bound = [t for t in timings if t.what in ("cross entropy", "norm of gradients")]
    assert max(abs(t.error) for t in near_the_bound) < 0.08


def test_modelled_times_are_at_least_the_time_of_the_bytes() -> None:
    for workload in WORKLOADS[::7]:
        for board in (BOARDS[USUAL[target]] for target in USUAL if workload.runs_on(target)):
            assert Bounds.of(workload).seconds(board, 1) >= memory_seconds(board, workload.least_bytes())


def test_products_have_flops() -> None:
    assert flops_of(for_op("norm")[0]) is None
    for op in (
        "matmul",
        "grouped_matmul",
        "grouped_wgrad",
        "attention",
        "attention_backward",
        "router_linear",
    ):
        assert all(flops_of(workload) for workload in for_op(op)), op
