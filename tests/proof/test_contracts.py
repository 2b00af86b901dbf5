"""Contracts derived from host code, and proofs of them."""

from __future__ import annotations

import copy
import importlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Max, Mod

pytest.importorskip("z3", reason="the solver is an extra: weft[prove]")

from triton_loom.prove import Buffer, prove
from triton_loom.prove.coverage import covered
from triton_loom.prove.proving import Prover
from triton_loom.prove.solver import z3

import weft
from weft.cli import main
from weft.lab.assumptions import _check, holding
from weft.lab.commands.prove import lost, prove_workload
from weft.lab.families import FAMILIES, OPS, WORKLOADS, Workload, loaded_of
from weft.lab.symbolic import contracts
from weft.lab.symbolic.contracts import (
    Region,
    Translator,
    contracts_of,
    dense_dims,
    ttir_by_name,
    without_extremes,
)
from weft.lab.symbolic.loaded import Given, Loaded, within
from weft.lab.symbolic.proofs import EFFORT, proven
from weft.lab.symbolic.tracing import Launched, Pointer, Size

TARGET = "sm_90"
COMMITTED = Path(__file__).parents[2] / "docs" / "runs" / "prove.json"
QUICK_SECONDS = 2.5
SHARDED = "sharded_logprobs:qwen3-30b-a3b/vocabulary-shard:plain:8192"


def committed() -> dict[str, Any]:
    """Return the report that the page shows."""
    read: dict[str, Any] = json.loads(COMMITTED.read_text())
    return read


def named(name: str) -> Workload:
    return next(w for w in WORKLOADS if str(w) == name)


# ---- expressions ------------------------------------------------------------------------------------------------


def test_z3_and_sympy_expressions_agree() -> None:
    a, b = (sympy.Symbol(name, positive=True, integer=True) for name in "ab")
    ceiling = -FloorDiv(-a, b)
    cases = [
        FloorDiv(a, b),
        ceiling,
        -16 * FloorDiv(-a, 16),
        FloorDiv(a, ceiling),
        -FloorDiv(-a, ceiling),
        FloorDiv(a, 8 * FloorDiv(-a, 8)),
        FloorDiv(b * FloorDiv(-a, 4), 9),
        -FloorDiv(b * FloorDiv(-a, 4), -FloorDiv(b * FloorDiv(-a, 4), 9)),
        FloorDiv(a - b, FloorDiv(-a - b, 7)),
        FloorDiv(-a, 3) + 1,
        Mod(a * b, 7) ** 2,
        sympy.Max(a, b, 5) - sympy.Min(a, 2 * b),
        sympy.Eq(Mod(a, 4), 0) | (a > b),
        sympy.Ne(a, b) & ~sympy.Le(a, 3),
    ]
    draw = random.Random(0)
    for expression in cases:
        translated = Translator({a: "a", b: "b"})(expression)
        for _ in range(40):
            numbers = {a: draw.randrange(1, 200), b: draw.randrange(1, 40)}
            values = [(z3.Int(str(name)), z3.IntVal(value)) for name, value in numbers.items()]
            result = z3.simplify(z3.substitute(translated, *values))
            wanted = expression.subs(numbers)
            assert str(result) == str(wanted), (expression, numbers)


def test_strides_of_nonempty_tensors_have_no_maximum() -> None:
    """Replace max(1, e) by e only where the region implies that e is positive."""
    a = sympy.Symbol("a", positive=True, integer=True)
    pointer = Pointer(torch.float32, (a, a - 5), (Max(1, a - 5), 1), 0, 1)
    variant: Any = None  # unused
    launched = Launched(variant, (a,), {"x_ptr": pointer}, {"stride": Max(1, a - 5)}, {"a": a})
    for minimum, wanted in ((1, Max(1, a - 5)), (5, Max(1, a - 5)), (6, a - 5)):
        region = Region((z3.Int("a") >= minimum,), {"a": 9})
        result = without_extremes(launched, region, [Size("a", 9)], Translator({a: "a"}))
        assert result.integers["stride"] == result.pointers["x_ptr"].stride[0] == wanted


def test_questions_come_in_the_same_order_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: Python's seed orders sets of expressions, which lost attention's proofs in one run of three."""
    a = sympy.Symbol("a", positive=True, integer=True)
    integers = {f"stride{n}": Max(1, a - n) for n in range(10, 22)}
    asked: list[str] = []
    answer = contracts.ask
    monkeypatch.setattr(contracts, "ask", lambda facts, goal: asked.append(str(goal)) or answer(facts, goal))
    launched = Launched(cast(Any, None), (a,), {}, integers, {"a": a})
    without_extremes(launched, Region((), {"a": 99}), [Size("a", 99)], Translator({a: "a"}))
    assert len(asked) == len(integers)
    assert asked == sorted(asked)


def test_contiguous_dimensions_are_merged() -> None:
    a, b = (sympy.Symbol(name, positive=True, integer=True) for name in "ab")
    values = {a: 6, b: 7}
    dense = Pointer(torch.float32, (3, b, a, 8), (8 * a * b, 8, 8 * b, 1), 0, 1)  # heads before tokens
    assert dense_dims(dense, values) == [(24 * a * b, 1)]
    padded = Pointer(torch.float32, (3, b, a, 8), (8 * a * b, 8, 8 * b + 8, 1), 0, 1)
    assert dense_dims(padded, values) == [(3, 8 * a * b), (a, 8 * b + 8), (8 * b, 1)]


def test_divisors_must_be_positive() -> None:
    a, b = (sympy.Symbol(name, positive=True, integer=True) for name in "ab")
    translate = Translator({a: "a", b: "b"})
    translate(FloorDiv(a, b + 1))
    assert not translate.positive
    translate(FloorDiv(a, b - 1))
    assert len(translate.positive) == 1


# ---- contracts --------------------------------------------------------------------------------------------------


def test_all_sizes_of_a_small_op() -> None:
    """Every path through the host code is found, and every launch proven."""
    result = proven(named(SHARDED), TARGET)
    assert result.contracts.complete
    assert {size.name for size in result.contracts.sizes} == {"rows", "cols"}
    assert result.verdict == "proven"
    assert result.counts()["proven"] > 20


def test_one_size_is_not_all_sizes() -> None:
    """A call that can only be traced at concrete sizes has a contract for these sizes."""
    result = contracts_of(named("multi_tensor_clip:odd/33:clip:4096"), TARGET)
    assert result.cases
    assert not result.sizes
    assert not result.complete
    assert result.fixed["cols"] == 33


def broken(buffer: Buffer) -> Buffer:
    """Return the same tensor without its last element."""
    return replace(buffer, extent=buffer.extent - 1, dims=None)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(SHARDED, marks=pytest.mark.slow),
        pytest.param("norm:odd/200:llama:8192", marks=pytest.mark.slow),
    ],
)
def test_a_contract_that_promises_too_little_is_refuted(name: str) -> None:
    """Each tensor of a launch, shortened by one element, is refuted."""
    (case, *_) = contracts_of(named(name), TARGET, regions=1).cases
    ttir = ttir_by_name(case.variant, TARGET)
    buffers = [each for each, argument in case.contract.arguments.items() if isinstance(argument, Buffer)]
    assert len(buffers) >= 3
    for each in buffers:
        arguments: dict[str, Any] = dict(case.contract.arguments)
        arguments[each] = broken(arguments[each])
        report = prove(ttir, replace(case.contract, arguments=arguments), replay=False, effort=300_000)
        assert any(each in answer.what for answer in report.counterexamples), each


# ---- outputs ----------------------------------------------------------------------------------------------------


def test_outputs_are_written_entirely() -> None:
    """A launch fills what host code allocates, but not with one program less."""
    (case,) = contracts_of(named("norm:odd/1:layer:8192"), TARGET, regions=1).cases
    assert set(case.contract.outputs) == {"statistics.rstd", "statistics.mean", "stored.y"}
    ttir = ttir_by_name(case.variant, TARGET)
    fewer = replace(case.contract, grid=(case.contract.grid[0] - 1, 1, 1))
    for contract, verdict in ((case.contract, "proven"), (fewer, "counterexample")):
        prover = Prover(ttir, contract, EFFORT)
        assert {covered(prover, name).verdict for name in contract.outputs} == {verdict}


def test_a_tensor_written_by_several_launches_is_no_output() -> None:
    """Two launches write statistics to one tensor; only the last launch's result is its own output."""
    result = contracts_of(named("multi_tensor_reduce:odd/33:norm1:4096"), TARGET)
    assert [case.contract.outputs for case in result.cases] == [(), (), ("total_ptr",)]


def test_two_halves_of_one_allocation_are_no_outputs() -> None:
    (case,) = contracts_of(named("glu_backward:odd/1:swiglu:8192"), TARGET, regions=1).cases
    assert len(case.launched.pointers) > len({p.storage for p in case.launched.pointers.values()})
    assert case.contract.outputs == ()


def test_proofs_are_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    workload = named(SHARDED)
    first = proven(workload, TARGET, regions=1)
    monkeypatch.setattr("triton_loom.prove.prove", None)
    again = proven(workload, TARGET, regions=1)
    assert again.proofs
    assert [p.report for p in again.proofs] == [p.report for p in first.proofs]


# ---- assumptions about memory -----------------------------------------------------------------------------------


def assume(monkeypatch: pytest.MonkeyPatch, kernel: str, parameter: str, assumed: Loaded | None) -> None:
    """Let contracts make another assumption about a parameter, or none, than its family declares."""

    def changed(kernel_name: str, parameter_name: str) -> Loaded | None:
        return (
            assumed
            if (kernel_name, parameter_name) == (kernel, parameter)
            else loaded_of(kernel_name, parameter_name)
        )

    monkeypatch.setattr("weft.lab.symbolic.contracts.loaded_of", changed)


@pytest.mark.slow
def test_an_assumption_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = named("permute:odd/33:mx-both:8192")
    (case,) = contracts_of(workload, TARGET, regions=1).cases
    assert case.contract.arguments["slot_of_row_ptr"].values is not None
    assume(monkeypatch, "permute_stripe_kernel", "slot_of_row_ptr", None)
    (bare,) = contracts_of(workload, TARGET, regions=1).cases
    report = prove(ttir_by_name(bare.variant, TARGET), bare.contract, replay=False, effort=300_000)
    assert any("x_ptr" in answer.what for answer in report.counterexamples)


def test_assumptions_name_existing_parameters() -> None:
    import importlib
    import pkgutil

    kernels = {}
    for module in pkgutil.walk_packages(weft.ops.__path__, "weft.ops."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, weft.runtime.Kernel):
                kernels[value.name] = value
    for kernel, parameter in (key for family in FAMILIES for key in family.loaded):
        assert parameter in [leaf.name for leaf in kernels[kernel].layout.leaves], (kernel, parameter)


def test_assumptions_are_checked_where_kernels_run() -> None:
    tokens = torch.randn(4, 32)
    rows = weft.row_map(torch.tensor([[0], [1], [1], [0]]), experts=2, align=1)
    with holding():
        weft.permute(tokens, rows)
    wrong = rows._replace(row_of_slot=rows.row_of_slot + 9)
    with pytest.raises(AssertionError, match="row_of_slot_ptr of permute_kernel has the element"), holding():
        weft.permute(tokens, wrong)


def test_inverse_maps_are_checked_where_kernels_run() -> None:
    tokens = torch.randn(4, 32)
    rows = weft.row_map(torch.tensor([[0], [1], [1], [0]]), experts=2, align=1)
    swapped = rows._replace(row_of_slot=rows.row_of_slot[[1, 0, 2, 3]])
    with (
        pytest.raises(AssertionError, match="row_of_slot_ptr of permute_kernel is not undone by its inverse"),
        holding(),
    ):
        weft.permute(tokens, swapped)
    twice = rows._replace(slot_of_row=rows.slot_of_row[[0, 0, 2, 3]])
    with pytest.raises(AssertionError, match="is not undone by its inverse"), holding():
        weft.permute(tokens, twice)


def test_distinct_elements_are_checked() -> None:
    launch = Given({"rows": 3}, {})
    order = Loaded(least=0, below="rows", distinct=True, apart=("rows", Loaded(least=0, most="rows")))
    _check(order, "order", torch.tensor([2, 0, 1, 2]), launch)
    with pytest.raises(AssertionError, match="order has an element twice"):
        _check(order, "order", torch.tensor([2, 0, 2, 1]), launch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernel", "parameter"),
    [
        ("linear_logprobs:odd/33:everything:300", "_join_statistics_kernel", "order_ptr"),
        ("unpermute_backward:odd/200:probs:8192", "unpermute_backward_kernel", "row_of_slot_ptr"),
    ],
)
def test_races_by_lists_of_rows(name: str, kernel: str, parameter: str, monkeypatch: Any) -> None:
    """No two programs write one row, because of the assumptions about the list of rows."""
    workload = named(name)
    races = [p.races for p in proven(workload, TARGET, regions=1).proofs if p.case.variant.kernel == kernel]
    assert {answer.verdict for answer in races[0]} == {"proven"}
    declared = loaded_of(kernel, parameter)
    assert declared is not None
    assume(monkeypatch, kernel, parameter, replace(declared, distinct=False, inverse=None))
    races = [p.races for p in proven(workload, TARGET, regions=1).proofs if p.case.variant.kernel == kernel]
    assert {answer.verdict for answer in races[0]} - {"proven"}


def test_values_are_checked_against_bounds() -> None:
    launch = Given({"rows": 8}, {"x_ptr": (3, 5, 7)})
    bounds = Loaded(least=-1, below="rows", most=lambda g: g.rows("x_ptr"))
    assert [all(within(bounds, launch, value)) for value in (-2, -1, 7, 8)] == [False, True, True, False]


# ---- the command ------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prove.json"
    assert main(["prove", "--workload", SHARDED, "--out", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["report"] == "weft prove"
    (record,) = report["workloads"]
    assert record["verdict"] == "proven"
    assert record["complete"] is True
    assert all(set(launch["outputs"].values()) == {"proven"} for launch in record["launches"])
    assert "sharded_logprobs" in capsys.readouterr().out
    assert main(["report", "evidence", str(file)]) == 0
    assert "| `sharded_logprobs` | 1 |" in capsys.readouterr().out


def test_the_command_refuses_an_unknown_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "--op", "nothing"]) == 2
    assert "there is no op 'nothing'" in capsys.readouterr().err


def test_the_command_refuses_files_that_are_not_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for content, message in (
        ("", "is no report: it is not JSON"),
        ("[]", "is no report of Weft's"),
        ('{"report": "weft bench", "schema": 1}', "is a report of `weft bench`"),
        (
            '{"report": "weft prove", "schema": 0}',
            "has the schema 0, this Weft reads 1: run `weft prove` again",
        ),
    ):
        (tmp_path / "other.json").write_text(content)
        assert main(["prove", "--against", str(tmp_path / "other.json")]) == 2
        assert message in capsys.readouterr().err


# ---- regressions of proofs --------------------------------------------------------------------------------------


def test_lost_proofs_are_named() -> None:
    def report(
        *launches: tuple[str, list[str]], complete: bool = True, workload: str = "norm"
    ) -> dict[str, Any]:
        def answer(what: str) -> dict[str, str]:
            verdict = "counterexample" if what.endswith("!") else "unknown"
            return {"kind": "bounds", "what": what.removesuffix("!"), "verdict": verdict}

        records = [{"kernel": kernel, "open": [*map(answer, unproven)]} for kernel, unproven in launches]
        workload_record = {"workload": workload, "complete": complete, "launches": records}
        return {"target": TARGET, "regions": 1, "workloads": [workload_record]}

    before = report(("a", ["load x"]), ("b", []))
    assert not list(lost(before, before))
    assert not list(lost(before, report(("a", []), ("b", [])))), "more is proven"
    assert not list(lost(before, report(("a", ["load x"]), ("b", []), ("new", ["load x"]))))
    assert not list(lost(before, report(("a", ["load y"]), workload="another")))
    assert list(lost(before, report(("a", ["load x", "load x"]), ("b", [])))) == ["norm: a: bounds of load x"]
    assert list(lost(before, report(("a", ["load x"])))) == ["norm: b, which has no contract or is not read"]
    assert len(list(lost(before, report(("a", ["load x"]), ("b", []), complete=False)))) == 1
    refuted = "a: bounds of load x has a counterexample"
    assert list(lost(before, report(("a", ["load x!"]), ("b", [])))) == [f"norm: {refuted}"]
    assert list(lost(before, report(("a", ["load x!"]), workload="new"))) == [f"new: {refuted}"]
    assert not list(lost(report(("a", ["load x!"])), report(("a", ["load x!"]))))


def test_an_output_that_is_no_longer_written_entirely_is_named() -> None:
    def report(*outputs: dict[str, str] | None) -> dict[str, Any]:
        launches = [{"kernel": "a", "open": [], **({} if o is None else {"outputs": o})} for o in outputs]
        for launch in launches:
            for name, verdict in launch.get("outputs", {}).items():
                if verdict != "proven":
                    launch["open"].append({"kind": "covered", "what": f"all of {name}", "verdict": verdict})
        workload_record = {"workload": "norm", "complete": True, "launches": launches}
        return {"target": TARGET, "regions": 1, "workloads": [workload_record]}

    proven_output, unknown, hole = ({"y": verdict} for verdict in ("proven", "unknown", "counterexample"))
    lost_output = ["norm: a: that all of y is written"]
    assert not list(lost(report(proven_output), report(proven_output)))
    assert list(lost(report(proven_output), report(unknown))) == lost_output
    assert list(lost(report(proven_output), report(hole))) == lost_output
    assert list(lost(report(proven_output), report({}))) == lost_output, "its obligation is gone"
    assert list(lost(report(proven_output, unknown), report(unknown, unknown))) == lost_output
    assert not list(lost(report(proven_output, unknown), report(unknown)))
    assert not list(lost(report(unknown), report(hole))), "the op may leave it undefined"
    for now in (proven_output, unknown, hole):
        assert not list(lost(report(None), report(now))), "an older report"
    assert not list(lost(report(unknown), report(proven_output)))


def test_seemingly_lost_proofs_are_retried_with_more_effort(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A proof still open after the retry is lost; one that succeeds then counts."""
    module = importlib.import_module("weft.lab.commands.prove")
    names = [each["workload"] for each in committed()["workloads"] if each["launches"]][:2]
    records = {each["workload"]: each for each in committed()["workloads"]}
    asked: list[tuple[str, int]] = []

    def fake_records(names: Sequence[str], args: Any, effort: int) -> Iterator[dict[str, Any]]:
        for name in names:
            asked.append((name, effort))
            record = copy.deepcopy(records[name])
            if effort == 1 or name == names_lost[0]:
                hole = {
                    "kind": "bounds",
                    "what": "load x",
                    "place": "",
                    "verdict": "unknown",
                    "why": "",
                    "example": "",
                }
                record["launches"][0]["open"].append(hole)
            yield record

    monkeypatch.setattr(module, "_records", fake_records)
    command = ["prove", "--regions", "1", "--against", str(COMMITTED), "--out", str(tmp_path / "out.json")]
    for name in names:
        command += ["--workload", name]
    names_lost = [names[0]]
    assert main(command) == 1
    assert sorted(asked) == sorted((name, effort) for name in names for effort in (1, 4))
    names_lost = ["none"]
    assert main(command) == 0


def test_every_op_is_in_the_table() -> None:
    assert {each["op"] for each in committed()["workloads"]} == set(OPS)


def test_the_quickest_of_the_table_is_still_proven(tmp_path: Path) -> None:
    """Proofs that take a second or two are redone with every change."""
    quick = [each["workload"] for each in committed()["workloads"] if each["seconds"] <= QUICK_SECONDS]
    assert len(quick) >= 5
    now = [prove_workload(name, TARGET, committed()["regions"]) for name in quick]
    assert not list(lost(committed(), {**committed(), "workloads": now}))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_the_table_is_still_proven(op: str) -> None:
    regions = str(committed()["regions"])
    assert (
        main(["prove", "--op", op, "--workers", "1", "--regions", regions, "--against", str(COMMITTED)]) == 0
    )
