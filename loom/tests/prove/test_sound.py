"""False claims are not proven: each of these was once proven, or could be, through a bug in the prover."""

from __future__ import annotations

from typing import Any

import pytest
import triton
import triton.language as tl
import z3
from triton_loom.prove import Buffer, Contract, Report, cdiv, prove, symbol

n = symbol("n", 1, 2**20)


def verdicts(report: Report, kind: Any) -> list[str]:
    return [answer.verdict for answer in report.of(kind)]


def ttir(body: str, arguments: str = "%x_ptr: !tt.ptr<f32>, %n: i32") -> str:
    return f"module {{\n tt.func public @kernel({arguments}) {{\n{body}\n tt.return\n }}\n}}"


def loaded_at(offset: str) -> str:
    return f"""{offset}
    %p = tt.addptr %x_ptr, %o : !tt.ptr<f32>, i32
    %v = tt.load %p : !tt.ptr<f32>"""


def of(text: str, extent: Any, **more: Any) -> Report:
    arguments = {"x_ptr": Buffer("f32", extent), "n": n}
    return prove(text, Contract.of(grid=(1,), arguments=arguments, **more), replay=False)


@pytest.mark.parametrize(
    ("offset", "extent"),
    [
        ("%o = arith.subi %n, %n : i32", 1),
        ("%c = arith.constant 7 : i32\n%o = arith.andi %n, %c : i32", 8),
        ("%c = arith.constant -8 : i32\n%o = arith.andi %n, %c : i32", n + 1),
        ("%c = arith.constant 3 : i32\n%o = arith.shrsi %n, %c : i32", n),
        ("%c = arith.constant 10 : i32\n%o = arith.remsi %n, %c : i32", 10),
        ("%c = arith.constant 10 : i32\n%o = arith.minsi %n, %c : i32", 11),
        ("%c = arith.constant 10 : i32\n%o = arith.remui %n, %c : i32", 10),
        ("%c = arith.constant 12 : i32\n%o = arith.ori %n, %c : i32", n + 13),
        ("%b = arith.trunci %n : i32 to i1\n%o = arith.extui %b : i1 to i32", 2),
    ],
)
def test_integer_operations_have_exact_ranges(offset: str, extent: Any) -> None:
    assert of(ttir(loaded_at(offset)), extent).verdict == "proven"
    one_less = of(ttir(loaded_at(offset)), extent - 1)
    assert one_less.verdict in ("counterexample", "unknown")
    assert verdicts(one_less, "bounds") != ["proven"]


@pytest.mark.parametrize(
    "offset",
    [
        "%b = arith.trunci %n : i32 to i1\n%o = arith.extsi %b : i1 to i32",  # -1 for odd n
        "%c = arith.constant -1 : i32\n%o = arith.xori %n, %c : i32",
        "%c = arith.constant 2147483647 : i32\n%o = arith.addi %n, %c : i32",
        "%o = math.popcount %n : i32",
        "%o = tt.unheard_of %n : i32",
        "%c = arith.constant 40 : i32\n%o = arith.shli %n, %c : i32",
    ],
)
def test_offsets_that_may_be_anything(offset: str) -> None:
    report = of(ttir(loaded_at(offset)), n)
    assert report.verdict != "proven"


def test_an_unknown_operation_is_reported() -> None:
    body = f"{loaded_at('%o = arith.subi %n, %n : i32')}\n tt.unheard_of %n : i32"
    report = of(ttir(body), n)
    assert verdicts(report, "modelled") == ["unknown"]


def test_a_call_is_unknown() -> None:
    text = ttir("tt.call @f(%x_ptr) : (!tt.ptr<f32>) -> ()").rstrip("}") + (
        " tt.func private @f(%p: !tt.ptr<f32>) {\n tt.return\n }\n}"
    )
    assert of(text, n).verdict == "unknown"


@triton.jit
def scatter(x_ptr, index_ptr, y_ptr, n, BLOCK: tl.constexpr = 64):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + off, mask=off < n, other=-1)
    tl.store(y_ptr + index, tl.load(x_ptr + off, mask=off < n), mask=index >= 0)


@pytest.mark.parametrize(("distinct", "verdict"), [(True, "proven"), (False, "counterexample")])
def test_loaded_indices_race_unless_they_are_distinct(distinct: bool, verdict: str) -> None:
    rows = symbol("rows", 1, 2**20)
    index = Buffer("i32", n, values=lambda v: z3.And(v >= -1, v < rows), distinct=distinct)
    arguments = {"x_ptr": Buffer("f32", n), "index_ptr": index, "y_ptr": Buffer("f32", rows), "n": n}
    report = prove(scatter, Contract.of(grid=(cdiv(n, 64),), arguments=arguments), replay=False)
    assert verdicts(report, "race") == [verdict], report
    assert verdicts(report, "bounds") == ["proven"] * 3, report


@triton.jit
def in_place(x_ptr, y_ptr, n, BLOCK: tl.constexpr = 64):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + off + 1, mask=off + 1 < n, other=0.0)
    tl.store(y_ptr + off, x, mask=off < n)


@pytest.mark.parametrize(("storage", "verdict"), [(None, "proven"), ("x_ptr", "counterexample")])
def test_arguments_that_share_memory_race(storage: str | None, verdict: str) -> None:
    arguments = {"x_ptr": Buffer("f32", n), "y_ptr": Buffer("f32", n, storage=storage), "n": n}
    report = prove(in_place, Contract.of(grid=(cdiv(n, 64),), arguments=arguments), replay=False)
    assert report.verdict == verdict, report


@triton.jit
def carried(x_ptr, index_ptr, n, steps):
    at = 0
    for _ in range(steps):
        tl.store(x_ptr + at, 1.0)
        at = tl.load(index_ptr + at)


def test_a_loop_may_carry_any_value_from_memory() -> None:
    """Only the buffer's elements are valid indices; whether the previous index was in the buffer is unknown."""
    for allowed, verdict in ((n, "unknown"), (n + 1, "unknown")):
        index = Buffer("i32", n, values=below(allowed))
        arguments = {"x_ptr": Buffer("f32", n), "index_ptr": index, "n": n, "steps": symbol("steps", 1, 100)}
        report = prove(carried, Contract.of(grid=(1,), arguments=arguments), replay=False)
        assert report.verdict == verdict, report


def below(limit: Any) -> Any:
    return lambda v: z3.And(v >= 0, v < limit)


@triton.jit
def halved(x_ptr, n):
    while n > 1:
        n = n // 2
        tl.store(x_ptr + n, 1.0)


def test_values_of_while_loops_are_unknown() -> None:
    """The carried value is unknown, even though n // 2 < n follows from the loop's condition."""
    report = prove(
        halved, Contract.of(grid=(1,), arguments={"x_ptr": Buffer("f32", n), "n": n}), replay=False
    )
    assert report.verdict != "proven"


@triton.jit
def largest(x_ptr, y_ptr, COLS: tl.constexpr):
    index = tl.argmax(tl.load(x_ptr + tl.arange(0, COLS)), axis=0)
    tl.store(y_ptr + index, 1.0)


@pytest.mark.parametrize(("extent", "verdict"), [(64, "proven"), (63, "unknown")])
def test_the_index_of_a_maximum_is_a_lane(extent: int, verdict: str) -> None:
    arguments = {"x_ptr": Buffer("f32", 64), "y_ptr": Buffer("f32", extent)}
    report = prove(largest, Contract.of(grid=(1,), arguments=arguments, constants={"COLS": 64}), replay=False)
    (store,) = [answer for answer in report.of("bounds") if answer.what == "store y_ptr"]
    assert store.verdict == verdict, report


@triton.jit
def summed(x_ptr, n, stride):
    at = 0
    for _ in range(n):
        at += stride
    tl.store(x_ptr + at, 1.0)


@pytest.mark.parametrize(("limit", "verdict"), [(2**10, "proven"), (2**20, "counterexample")])
def test_a_loop_s_sum_must_fit_its_type(limit: int, verdict: str) -> None:
    stride, times = symbol("stride", 1, limit), symbol("times", 1, limit)
    arguments = {"x_ptr": Buffer("f32", stride * times + 1), "n": times, "stride": stride}
    report = prove(summed, Contract.of(grid=(1,), arguments=arguments), replay=False)
    assert report.verdict == verdict, report
    assert verdicts(report, "bounds") == ["proven"]
