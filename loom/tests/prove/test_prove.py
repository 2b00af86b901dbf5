"""Proofs, counterexamples and unknowns."""

from __future__ import annotations

from typing import Any

import pytest
import triton
import triton.language as tl
from triton_loom.prove import Buffer, Contract, ContractError, Report, cdiv, prove, solver, symbol
from triton_loom.prove.answers import from_json
from triton_loom.prove.solver import z3

n = symbol("n", 1, 2**31 - 1)


@triton.jit
def scatter(to_ptr, y_ptr, n, BLOCK: tl.constexpr):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + tl.load(to_ptr + off, mask=off < n, other=0), 1.0, mask=off < n)


@triton.jit
def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr, LAST: tl.constexpr = 0):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + off, 2 * tl.load(x_ptr + off, mask=off < n + LAST), mask=off < n)


def flat(**more: Any) -> Contract:
    arguments = {"x_ptr": Buffer("f32", n), "y_ptr": Buffer("f32", n), "n": n}
    return Contract.of(grid=(cdiv(n, 1024),), arguments=arguments, **more)


def test_a_correct_kernel_is_proven_for_all_sizes() -> None:
    report = prove(double, flat(constants={"BLOCK": 1024}))
    assert report.verdict == "proven"
    assert [answer.what for answer in report.of("bounds")] == ["load x_ptr", "store y_ptr"]
    assert len(report.of("reached")) == 2
    assert len(report.of("overflow")) >= 1


def test_a_wrong_mask_has_the_smallest_counterexample() -> None:
    report = prove(double, flat(constants={"BLOCK": 1024, "LAST": 1}))
    assert report.verdict == "counterexample"
    (answer,) = [answer for answer in report.counterexamples if answer.kind == "bounds"]
    assert answer.what == "load x_ptr"
    assert answer.example is not None
    assert answer.example.sizes == {"n": 1}
    assert answer.example.lane == (1,)
    assert answer.example.detail == "element 1 of 1"
    assert answer.example.confirmed, answer.example.finding


@triton.jit
def by_rows(x_ptr, y_ptr, stride, cols, WIDE: tl.constexpr, BLOCK: tl.constexpr = 64):
    row = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    for start in range(0, cols, BLOCK):
        off = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + off, mask=off < cols)
        tl.store(y_ptr + row.to(tl.int64) * cols + off, x, mask=off < cols)


def rows_of(max_columns: int, wide: bool, element: str = "f32") -> Report:
    m, k, s = symbol("m"), symbol("k", 1, max_columns), symbol("s")
    contract = Contract.of(
        grid=(m,),
        arguments={
            "x_ptr": Buffer.strided(element, (m, k), (s, 1)),
            "y_ptr": Buffer("f32", m * k),
            "stride": s,
            "cols": k,
        },
        assumptions=(s >= k,),
        constants={"WIDE": wide},
    )
    return prove(by_rows, contract, replay=False)


def test_rows_of_any_stride_are_proven() -> None:
    assert rows_of(2**31 - 64, wide=True).verdict == "proven"


def test_an_offset_of_32_bits_overflows() -> None:
    report = rows_of(2**31 - 64, wide=False)
    assert {answer.kind for answer in report.counterexamples} == {"overflow"}
    example = report.counterexamples[0].example
    assert example is not None
    assert example.program[0] * example.sizes["s"] + example.sizes["k"] > 2**31 - 64


def test_the_last_step_of_a_loop_overflows() -> None:
    report = rows_of(2**31 - 1, wide=True)
    assert {answer.kind for answer in report.counterexamples} >= {"step"}
    (step,) = report.of("step")
    assert step.example is not None
    assert step.example.sizes["k"] == 2**31 - 64 + 1


def test_elements_of_another_size_are_unknown() -> None:
    contract = Contract.of(grid=(1,), arguments={"x_ptr": Buffer("i64", 8), "n": 4})
    report = prove(prove_me(), contract)
    assert report.verdict == "unknown"
    assert "elements are i64" in report.unknowns[0].why


def test_a_gap_of_a_view_is_out_of_bounds() -> None:
    m, k = symbol("m", 1, 1000), symbol("k", 1, 1000)
    x = Buffer.strided("f32", (m, k), (k + 8, 1))
    dense = Buffer("f32", m * (k + 8))
    for view, verdict in ((x, "counterexample"), (dense, "proven")):
        contract = Contract.of(
            grid=(cdiv(m * (k + 8) - 8, 1024),),
            arguments={"x_ptr": view, "y_ptr": dense, "n": m * (k + 8) - 8},
            sizes=(m, k),
            constants={"BLOCK": 1024},
        )
        report = prove(double, contract)
        assert report.verdict == verdict, report
        for answer in report.counterexamples:
            assert answer.what == "load x_ptr"
            assert answer.example is not None
            assert answer.example.confirmed, answer.example.finding


def test_an_unreachable_access_is_not_proven() -> None:
    report = prove(double, flat(constants={"BLOCK": 1024}, assumptions=(n < 0,)))
    assert report.verdict == "unknown"
    assert all(answer.verdict == "unknown" for answer in report.of("reached"))


def test_a_report_survives_json() -> None:
    report = prove(double, flat(constants={"BLOCK": 1024, "LAST": 1}))
    assert from_json(report.json()) == report
    assert "counterexample" in str(report)


def test_a_limit_makes_unknowns() -> None:
    report = prove(double, flat(constants={"BLOCK": 1024}), effort=1)
    assert report.verdict == "unknown"
    assert all(answer.query for answer in report.unknowns)


def test_z3_parses_the_queries_of_unknowns() -> None:
    """Questions about two programs too, whose names once had a character that SMT-LIB forbids."""
    to = Buffer("i32", n, values=lambda value, at: (value >= 0) & (value * value < n * n))
    arguments = {"to_ptr": to, "y_ptr": Buffer("f32", n), "n": n}
    contract = Contract.of(grid=(cdiv(n, 1024),), arguments=arguments, constants={"BLOCK": 1024})
    report = prove(scatter, contract, effort=2, replay=False)
    assert "race" in {answer.kind for answer in report.unknowns if answer.query}
    for answer in report.unknowns:
        assert not answer.query or z3.parse_smt2_string(answer.query)


def test_an_undecided_question_is_retried_from_another_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []

    def lucky(facts: Any, goal: Any, effort: int, seed: int = 0) -> solver.Solution:
        seeds.append(seed)
        return solver.Solution("proven" if seed == 1 else "unknown")

    monkeypatch.setattr(solver, "ask", lucky)
    assert solver.persist([], z3.BoolVal(True), {}, 7, (0,)).verdict == "unknown"
    assert solver.persist([], z3.BoolVal(True), {}, 7, solver.SEEDS).verdict == "proven"
    assert seeds == [0, 0, 1]


def test_incomplete_contracts_are_rejected() -> None:
    with pytest.raises(ContractError, match="has no range"):
        Contract.of(grid=(1,), arguments={"x_ptr": Buffer("f32", 2 * n)})
    with pytest.raises(ContractError, match="no value"):
        prove(prove_me(), Contract.of(grid=(1,), arguments={"x_ptr": Buffer("f32", 4)}))
    with pytest.raises(ContractError, match="three axes"):
        Contract({}, (1, 1))  # type: ignore[arg-type]


def prove_me() -> str:
    return """
module {
  tt.func public @copy(%x_ptr: !tt.ptr<f32>, %n: i32) {
    %0 = tt.addptr %x_ptr, %n : !tt.ptr<f32>, i32
    %1 = tt.load %0 : !tt.ptr<f32>
    tt.store %0, %1 : !tt.ptr<f32>
    tt.return
  }
}
"""
