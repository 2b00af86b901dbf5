"""Loop-carried values, counts and maps: kernels that are proven, and variants with a small mistake that must not be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import triton
import triton.language as tl
import z3
from triton_loom.prove import Buffer, Contract, ContractError, Report, cdiv, prove, symbol

n = symbol("n", 1, 2**30)
rows = symbol("rows", 1, 2**20)


def report_on(
    kernel: Any, grid: tuple[Any, ...], constants: dict[str, Any], *, trials: int = 0, **arguments: Any
) -> Report:
    contract = Contract.of(grid=grid, arguments=arguments, constants=constants)
    return prove(kernel, contract, replay=False, trials=trials)


def unproven_kinds(report: Report) -> set[str]:
    """Return the kinds of obligations that are not proven."""
    return {answer.kind for answer in report.answers if answer.verdict != "proven"}


# ---- counts -----------------------------------------------------------------------------------------------------


@triton.jit
def compact(
    x_ptr,
    y_ptr,
    count_ptr,
    n,
    FIRST: tl.constexpr = 0,  # initial count
    BACK: tl.constexpr = 1,  # subtracted from positions, so that the first is 0
    TIMES: tl.constexpr = 1,  # increment per match
    OTHER: tl.constexpr = 0,  # value loaded past the end
    FOUND_ONLY: tl.constexpr = True,
    ALONG: tl.constexpr = True,  # count the previous tiles too
    REVERSE: tl.constexpr = False,
    TILE: tl.constexpr = 64,
):
    found = tl.zeros((), tl.int32) + FIRST
    for start in range(0, n, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(x_ptr + at, mask=at < n, other=OTHER)
        flag = (x > 0).to(tl.int32)
        place = found + tl.cumsum(flag, axis=0, reverse=REVERSE) - BACK
        if FOUND_ONLY:
            tl.store(y_ptr + place, at, mask=x > 0)
        else:
            tl.store(y_ptr + place, at, mask=at < n)
        if ALONG:
            found += TIMES * tl.sum(flag, axis=0)
        else:
            found = tl.load(count_ptr)
    tl.store(count_ptr, found)


def compacted(room: Any = n, **constants: Any) -> Report:
    buffers = {"x_ptr": Buffer("i32", n), "y_ptr": Buffer("i32", room), "count_ptr": Buffer("i32", 1)}
    return report_on(compact, (1,), constants, **buffers, n=n)


@pytest.mark.parametrize("constants", [{}, {"REVERSE": True}, {"FIRST": 1, "BACK": 2}], ids=str)
def test_running_positions_are_in_bounds(constants: dict[str, Any]) -> None:
    report = compacted(**constants)
    assert report.verdict == "proven", report


@pytest.mark.parametrize(
    "constants",
    [
        {"BACK": 0},  # positions from 1
        {"BACK": 2},  # the first at -1
        {"FIRST": 1},
        {"FIRST": -1},
        {"TIMES": 2},
        {"TIMES": -1},
        {"OTHER": 1},  # elements past the end match
        {"FOUND_ONLY": False},  # the position of a non-match may be -1
        {"ALONG": False},
        {"REVERSE": True, "BACK": 0},
        {"room": n - 1},
    ],
    ids=str,
)
def test_wrong_running_positions_are_not_proven(constants: dict[str, Any]) -> None:
    report = compacted(**constants)
    assert "bounds" in unproven_kinds(report), report
    assert {a.what for a in report.of("bounds") if a.verdict != "proven"} == {"store y_ptr"}


@triton.jit
def remaining(x_ptr, y_ptr, REVERSE: tl.constexpr, FROM: tl.constexpr, TILE: tl.constexpr = 64):
    """Index by the number of ones up to a lane, or from it on."""
    lane = tl.arange(0, TILE)
    flag = (tl.load(x_ptr + lane) > 0).to(tl.int32)
    tl.store(y_ptr + lane + FROM - tl.cumsum(flag, axis=0, reverse=REVERSE), 1)


@pytest.mark.parametrize(
    ("reverse", "first", "room", "verdict"),
    [
        (False, 1, 65, "proven"),
        (False, 1, 64, "unknown"),
        (False, 0, 65, "unknown"),
        (True, 1, 65, "unknown"),  # lane 0 counts 64 ones, including itself
        (True, 64, 128, "proven"),
        (True, 63, 128, "unknown"),
    ],
)
def test_a_running_count_has_a_direction(reverse: bool, first: int, room: int, verdict: str) -> None:
    buffers = {"x_ptr": Buffer("i32", 64), "y_ptr": Buffer("i32", room)}
    report = report_on(remaining, (1,), {"REVERSE": reverse, "FROM": first}, **buffers)
    assert {a.verdict for a in report.of("bounds") if a.what == "store y_ptr"} == {verdict}, report


@triton.jit
def count(x_ptr, y_ptr, n, lead, MASKED: tl.constexpr, TILE: tl.constexpr = 64):
    """Index by the number of matches among `lead` and n more elements."""
    found = tl.zeros((), tl.int64)
    for start in range(lead, lead + n, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(x_ptr + at - lead, mask=at < lead + n, other=1)
        flag = (x > 0) & (at < lead + n) if MASKED else x > 0
        found += tl.sum(flag.to(tl.int64), axis=0)
    tl.store(y_ptr + found, 1)


@pytest.mark.parametrize(
    ("masked", "room", "verdict"),
    [
        (True, n + 1, "proven"),
        (True, n, "unknown"),
        (False, n + 1, "unknown"),
        (False, n + 64, "proven"),  # whole tiles count: up to 63 too many
        (False, n + 63, "unknown"),
    ],
)
def test_a_loop_counts_at_most_its_elements(masked: bool, room: Any, verdict: str) -> None:
    lead = symbol("lead", 0, 1000)
    buffers = {"x_ptr": Buffer("i32", n), "y_ptr": Buffer("i32", room)}
    report = report_on(count, (1,), {"MASKED": masked}, **buffers, n=n, lead=lead)
    assert report.verdict == verdict, report


@triton.jit
def count_rows(x_ptr, y_ptr, m, n, ROWS: tl.constexpr = 16, TILE: tl.constexpr = 32):
    """Index by the largest of the counts of some rows: each row carries its own value."""
    row = tl.arange(0, ROWS)
    found = tl.zeros((ROWS,), tl.int32)
    for start in range(0, n, TILE):
        at = start + tl.arange(0, TILE)
        mask = (row < m)[:, None] & (at < n)[None, :]
        x = tl.load(x_ptr + row[:, None] * n.to(tl.int64) + at[None, :], mask=mask, other=0)
        found += tl.sum((x > 0).to(tl.int32), axis=1)
    tl.store(y_ptr + tl.max(found, axis=0), 1)


@pytest.mark.parametrize(("room", "verdict"), [(n + 1, "proven"), (n, "unknown")])
def test_row_counts_are_at_most_the_columns(room: Any, verdict: str) -> None:
    m = symbol("m", 1, 16)
    buffers = {"x_ptr": Buffer("i32", m * n), "y_ptr": Buffer("i32", room)}
    assert report_on(count_rows, (1,), {}, **buffers, m=m, n=n).verdict == verdict


@triton.jit
def count_again(x_ptr, y_ptr, n, times, TILE: tl.constexpr = 64):
    """Count the same elements several times."""
    found = tl.zeros((), tl.int64)
    for _ in range(times):
        for start in range(0, n, TILE):
            at = start + tl.arange(0, TILE)
            x = tl.load(x_ptr + at, mask=at < n, other=0)
            found += tl.sum((x > 0).to(tl.int64), axis=0)
    tl.store(y_ptr + found, 1)


def test_a_nested_loop_may_count_elements_repeatedly() -> None:
    """The inner loop adds at most n each time it runs."""
    buffers = {"x_ptr": Buffer("i32", n), "y_ptr": Buffer("i32", n + 1)}
    report = report_on(count_again, (1,), {}, **buffers, n=n, times=symbol("times", 1, 100))
    assert "bounds" in unproven_kinds(report)


# ---- values changed by a branch, a minimum or a maximum -----------------------------------------------------------


@triton.jit
def events(x_ptr, y_ptr, n, EARLY: tl.constexpr):
    found = 0
    for i in range(n):
        if EARLY:
            tl.store(y_ptr + found, i)
        if tl.load(x_ptr + i) > 0:
            found += 1
        if not EARLY:
            tl.store(y_ptr + found, i)


@pytest.mark.parametrize(
    ("early", "room", "verdict"),
    [(True, n, "proven"), (True, n - 1, "unknown"), (False, n, "unknown"), (False, n + 1, "proven")],
)
def test_a_conditional_increment_counts_at_most_the_iterations(early: bool, room: Any, verdict: str) -> None:
    buffers = {"x_ptr": Buffer("f32", n), "y_ptr": Buffer("i32", room)}
    report = report_on(events, (1,), {"EARLY": early}, **buffers, n=n)
    assert report.verdict == verdict, report


@triton.jit
def bracket(ends_ptr, y_ptr, z_ptr, groups, rows, row, FIRST: tl.constexpr, CUT: tl.constexpr):
    """Find the last end up to a row, and the first one after it."""
    before = rows * 0 + FIRST
    after = rows
    for first in range(0, groups, 32):
        index = first + tl.arange(0, 32)
        end = tl.load(ends_ptr + index, mask=index < groups, other=0)
        if CUT:
            end = tl.minimum(end, rows)
        before = tl.maximum(before, tl.max(tl.where(end <= row, end, 0), axis=0))
        after = tl.minimum(after, tl.min(tl.where(end > row, end, rows), axis=0))
    tl.store(y_ptr + before, 1)
    tl.store(z_ptr + after, 1)


def bracketed(
    first: int = 0, cut: bool = True, room: Any = rows + 1, min_end: int = 0, min_row: int = 0
) -> Report:
    groups, row = symbol("groups", 1, 1000), symbol("row", min_row)
    buffers = {
        "ends_ptr": Buffer("i32", groups, values=lambda v: v >= min_end),
        "y_ptr": Buffer("i32", room),
        "z_ptr": Buffer("i32", room),
    }
    constants = {"FIRST": first, "CUT": cut}
    return report_on(bracket, (1,), constants, **buffers, groups=groups, rows=rows, row=row)


def test_running_extremes_are_proven() -> None:
    assert bracketed().verdict == "proven"
    assert bracketed(min_end=-1).verdict == "proven"  # -1 is never after a row, and the maximum starts at 0


@pytest.mark.parametrize(
    ("wrong", "unproven_stores"),
    [
        ({"first": -1}, ["store y_ptr"]),
        ({"cut": False}, ["store y_ptr"]),  # an end past the rows, before a row that is further past
        ({"room": rows}, ["store y_ptr", "store z_ptr"]),
        (
            {"min_end": -1, "min_row": -2},
            ["store z_ptr"],
        ),  # the maximum is nonnegative, but the minimum is -1
    ],
    ids=str,
)
def test_wrong_running_extremes_are_not_proven(wrong: dict[str, Any], unproven_stores: list[str]) -> None:
    report = bracketed(**wrong)
    assert {a.what for a in report.of("bounds") if a.verdict != "proven"} >= {*unproven_stores}, report


@triton.jit
def swapped(y_ptr, n, first, second):
    """Swap two values while decrementing one: each shrinks over time."""
    for _ in range(n):
        first, second = second - 1, first
    tl.store(y_ptr + first, 1)


def test_swapped_values_are_not_independent_counters() -> None:
    report = report_on(swapped, (1,), {}, y_ptr=Buffer("i32", 9), n=symbol("n", 1, 100), first=8, second=8)
    assert "bounds" in unproven_kinds(report)


@triton.jit
def added(x_ptr, y_ptr, n):
    """Sum nonnegative integers: the sum is nonnegative, provided that it fits its type."""
    total = 0
    for i in range(n):
        total += tl.load(x_ptr + i)
    tl.store(y_ptr + tl.minimum(total, 7), 1)


def test_an_invariant_does_not_hide_an_overflow() -> None:
    x = Buffer("i32", n, values=lambda v: z3.And(v >= 0, v <= 2**20))
    report = report_on(added, (1,), {}, x_ptr=x, y_ptr=Buffer("i32", 8), n=n)
    assert "proven" in {a.verdict for a in report.of("bounds") if a.what == "store y_ptr"}
    assert unproven_kinds(report) == {"overflow"}, report


def test_a_sum_of_possibly_negative_numbers_is_not_proven_nonnegative() -> None:
    x = Buffer("i32", n, values=lambda v: z3.And(v >= -1, v <= 2**20))
    report = report_on(added, (1,), {}, x_ptr=x, y_ptr=Buffer("i32", 8), n=n)
    assert unproven_kinds(report) == {"overflow", "bounds"}, report


# ---- permutations and maps ------------------------------------------------------------------------------------------


@triton.jit
def scatter(x_ptr, order_ptr, y_ptr, n, cols, BLOCK: tl.constexpr = 16, TILE: tl.constexpr = 32):
    """Move rows by a permutation; one more element of the list is the number of rows."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = number < tl.load(order_ptr + n)
    row = tl.load(order_ptr + number, mask=live, other=0).to(tl.int64)
    for start in range(0, cols, TILE):
        col = start + tl.arange(0, TILE)
        mask = live[:, None] & (col < cols)[None, :]
        x = tl.load(x_ptr + (number * cols)[:, None] + col[None, :], mask=mask)
        tl.store(y_ptr + (row * cols)[:, None] + col[None, :], x, mask=mask)


@pytest.mark.parametrize(
    ("distinct", "verdict"),
    [
        (lambda v, i: i != rows, "proven"),
        (True, "proven"),  # includes the number of rows, which is then not a row's index
        (False, "counterexample"),
        (lambda v, i: i != 0, "counterexample"),
        (lambda v, i: v > 0, "counterexample"),
    ],
)
def test_a_permutation_of_rows_does_not_race(distinct: Any, verdict: str) -> None:
    cols = symbol("cols", 1, 2**20)
    order = Buffer(
        "i32",
        rows + 1,
        values=lambda v, i: z3.And(v >= 0, z3.If(i == rows, v <= rows, v < rows)),
        distinct=distinct,
    )
    buffers = {"x_ptr": Buffer("f32", rows * cols), "order_ptr": order, "y_ptr": Buffer("f32", rows * cols)}
    report = report_on(scatter, (cdiv(rows, 16),), {}, **buffers, n=rows, cols=cols)
    assert {a.verdict for a in report.of("race")} == {verdict}, report
    assert unproven_kinds(report) <= {"race"}, report


@triton.jit
def move(x_ptr, row_ptr, slot_ptr, y_ptr, tokens, slots, rows, token_programs, LESS: tl.constexpr):
    """Move every slot of a token to its row; more programs fill the rows without a slot."""
    if tl.program_id(0) < token_programs:
        token = tl.program_id(0).to(tl.int64) * 16 + tl.arange(0, 16)
        for slot in range(slots):
            row = tl.load(row_ptr + token * slots + slot, mask=token < tokens, other=-1)
            x = tl.load(x_ptr + token, mask=token < tokens)
            tl.store(y_ptr + row, x, mask=row >= 0)
    else:
        pad = (tl.program_id(0) - token_programs).to(tl.int64) * 32 + tl.arange(0, 32)
        whose = tl.load(slot_ptr + pad, mask=pad < rows, other=0)
        tl.store(y_ptr + pad, 0.0, mask=(whose < LESS) & (pad < rows))


def moved(less: int = 0, trials: int = 0, **inverses: str) -> Report:
    tokens, slots = symbol("tokens", 1, 2**20), symbol("slots", 1, 64)
    row = Buffer(
        "i32", tokens * slots, values=lambda v: z3.And(v >= -1, v < rows), inverse=inverses.get("row")
    )
    slot = Buffer(
        "i32", rows, values=lambda v: z3.And(v >= -1, v < tokens * slots), inverse=inverses.get("slot")
    )
    buffers = {"x_ptr": Buffer("f32", tokens), "row_ptr": row, "slot_ptr": slot, "y_ptr": Buffer("f32", rows)}
    sizes = {"tokens": tokens, "slots": slots, "rows": rows, "token_programs": cdiv(tokens, 16)}
    return report_on(
        move, (cdiv(tokens, 16) + cdiv(rows, 32),), {"LESS": less}, trials=trials, **buffers, **sizes
    )


def test_a_map_with_its_inverse_does_not_race() -> None:
    report = moved(trials=6, row="slot_ptr")
    assert report.verdict == "proven", report
    assert "slot_ptr[v] = i for every v >= 0 that is row_ptr[i]" in report.assumed
    assert "random launches agree" in report.certificates[0], "a map and its inverse are drawn together"


@pytest.mark.parametrize("wrong", [{}, {"slot": "row_ptr"}, {"less": 1, "row": "slot_ptr"}], ids=str)
def test_maps_without_an_inverse_may_race(wrong: dict[str, Any]) -> None:
    """Without an inverse, with the rows' inverse only (two slots may share a row), or with slot 0 treated as a pad."""
    report = moved(**wrong)
    assert unproven_kinds(report) == {"race"}, report


def test_an_inverse_must_be_an_argument() -> None:
    with pytest.raises(ContractError, match="the inverse of row_ptr"):
        moved(row="nothing")


@triton.jit
def changed(row_ptr, y_ptr, n):
    """Write the map while it is read, which invalidates the assumptions about it."""
    at = tl.program_id(0)
    row = tl.load(row_ptr + at)
    tl.store(y_ptr + row, at, mask=row >= 0)
    tl.store(row_ptr + at, 0)


def test_a_written_map_is_not_assumed_distinct() -> None:
    choices: list[Callable[..., Any] | bool] = [True, lambda v, i: v >= 0]
    for distinct in choices:
        order = Buffer("i32", n, values=lambda v: z3.And(v >= -1, v < n), distinct=distinct)
        report = report_on(changed, (n,), {}, row_ptr=order, y_ptr=Buffer("i32", n), n=n)
        stores = [a.verdict for a in report.of("race") if a.what == "store y_ptr and store y_ptr"]
        assert stores != ["proven"], report
