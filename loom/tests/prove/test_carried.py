"""What loops carry, counts and maps: kernels that are proven, and beside each the same kernel with a small mistake,
which must not be."""

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


def asked(
    kernel: Any, grid: tuple[Any, ...], constants: dict[str, Any], *, trials: int = 0, **arguments: Any
) -> Report:
    contract = Contract.of(grid=grid, arguments=arguments, constants=constants)
    return prove(kernel, contract, replay=False, trials=trials)


def open_kinds(report: Report) -> set[str]:
    """Of what is not proven."""
    return {answer.kind for answer in report.answers if answer.verdict != "proven"}


# ---- counts -----------------------------------------------------------------------------------------------------


@triton.jit
def compact(
    x_ptr,
    y_ptr,
    count_ptr,
    n,
    FIRST: tl.constexpr = 0,  # what counting begins with
    BACK: tl.constexpr = 1,  # of places, so that the first is 0
    TIMES: tl.constexpr = 1,  # what one that was found counts
    OTHER: tl.constexpr = 0,  # what is found past the end
    FOUND_ONLY: tl.constexpr = True,
    ALONG: tl.constexpr = True,  # the tiles before are counted
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
    return asked(compact, (1,), constants, **buffers, n=n)


@pytest.mark.parametrize("constants", [{}, {"REVERSE": True}, {"FIRST": 1, "BACK": 2}], ids=str)
def test_places_counted_along_a_row(constants: dict[str, Any]) -> None:
    report = compacted(**constants)
    assert report.verdict == "proven", report


@pytest.mark.parametrize(
    "constants",
    [
        {"BACK": 0},  # places from 1
        {"BACK": 2},  # the first at -1
        {"FIRST": 1},
        {"FIRST": -1},
        {"TIMES": 2},
        {"TIMES": -1},
        {"OTHER": 1},  # what is past the end is found
        {"FOUND_ONLY": False},  # the place of one that is not found may be -1
        {"ALONG": False},
        {"REVERSE": True, "BACK": 0},
        {"room": n - 1},
    ],
    ids=str,
)
def test_places_counted_wrongly(constants: dict[str, Any]) -> None:
    report = compacted(**constants)
    assert "bounds" in open_kinds(report), report
    assert {a.what for a in report.of("bounds") if a.verdict != "proven"} == {"store y_ptr"}


@triton.jit
def remaining(x_ptr, y_ptr, REVERSE: tl.constexpr, FROM: tl.constexpr, TILE: tl.constexpr = 64):
    """As many places before a lane as there are ones up to it, or from it on."""
    lane = tl.arange(0, TILE)
    flag = (tl.load(x_ptr + lane) > 0).to(tl.int32)
    tl.store(y_ptr + lane + FROM - tl.cumsum(flag, axis=0, reverse=REVERSE), 1)


@pytest.mark.parametrize(
    ("reverse", "first", "room", "verdict"),
    [
        (False, 1, 65, "proven"),
        (False, 1, 64, "unknown"),
        (False, 0, 65, "unknown"),
        (True, 1, 65, "unknown"),  # lane 0 has 64 of them, itself among them
        (True, 64, 128, "proven"),
        (True, 63, 128, "unknown"),
    ],
)
def test_a_running_count_has_a_direction(reverse: bool, first: int, room: int, verdict: str) -> None:
    buffers = {"x_ptr": Buffer("i32", 64), "y_ptr": Buffer("i32", room)}
    report = asked(remaining, (1,), {"REVERSE": reverse, "FROM": first}, **buffers)
    assert {a.verdict for a in report.of("bounds") if a.what == "store y_ptr"} == {verdict}, report


@triton.jit
def count(x_ptr, y_ptr, n, lead, MASKED: tl.constexpr, TILE: tl.constexpr = 64):
    """The number that is found among `lead` and n more, as an index."""
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
        (False, n + 64, "proven"),  # whole tiles count, and none has more
        (False, n + 63, "unknown"),
    ],
)
def test_a_count_of_a_loop(masked: bool, room: Any, verdict: str) -> None:
    lead = symbol("lead", 0, 1000)
    buffers = {"x_ptr": Buffer("i32", n), "y_ptr": Buffer("i32", room)}
    report = asked(count, (1,), {"MASKED": masked}, **buffers, n=n, lead=lead)
    assert report.verdict == verdict, report


@triton.jit
def count_rows(x_ptr, y_ptr, m, n, ROWS: tl.constexpr = 16, TILE: tl.constexpr = 32):
    """The largest of the counts of some rows, as an index: a value is carried for each of them."""
    row = tl.arange(0, ROWS)
    found = tl.zeros((ROWS,), tl.int32)
    for start in range(0, n, TILE):
        at = start + tl.arange(0, TILE)
        mask = (row < m)[:, None] & (at < n)[None, :]
        x = tl.load(x_ptr + row[:, None] * n.to(tl.int64) + at[None, :], mask=mask, other=0)
        found += tl.sum((x > 0).to(tl.int32), axis=1)
    tl.store(y_ptr + tl.max(found, axis=0), 1)


@pytest.mark.parametrize(("room", "verdict"), [(n + 1, "proven"), (n, "unknown")])
def test_counts_of_rows(room: Any, verdict: str) -> None:
    m = symbol("m", 1, 16)
    buffers = {"x_ptr": Buffer("i32", m * n), "y_ptr": Buffer("i32", room)}
    assert asked(count_rows, (1,), {}, **buffers, m=m, n=n).verdict == verdict


@triton.jit
def count_again(x_ptr, y_ptr, n, times, TILE: tl.constexpr = 64):
    """The same numbers are counted several times over."""
    found = tl.zeros((), tl.int64)
    for _ in range(times):
        for start in range(0, n, TILE):
            at = start + tl.arange(0, TILE)
            x = tl.load(x_ptr + at, mask=at < n, other=0)
            found += tl.sum((x > 0).to(tl.int64), axis=0)
    tl.store(y_ptr + found, 1)


def test_a_count_of_a_loop_in_a_loop() -> None:
    """The inner loop adds n at most, each time that it runs."""
    buffers = {"x_ptr": Buffer("i32", n), "y_ptr": Buffer("i32", n + 1)}
    report = asked(count_again, (1,), {}, **buffers, n=n, times=symbol("times", 1, 100))
    assert "bounds" in open_kinds(report)


# ---- values that a branch, a minimum or a maximum changes ---------------------------------------------------------


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
def test_events_are_counted_one_by_one(early: bool, room: Any, verdict: str) -> None:
    buffers = {"x_ptr": Buffer("f32", n), "y_ptr": Buffer("i32", room)}
    report = asked(events, (1,), {"EARLY": early}, **buffers, n=n)
    assert report.verdict == verdict, report


@triton.jit
def bracket(ends_ptr, y_ptr, z_ptr, groups, rows, row, FIRST: tl.constexpr, CUT: tl.constexpr):
    """The last end up to a row, and the first one after it."""
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
    first: int = 0, cut: bool = True, room: Any = rows + 1, least: int = 0, lowest: int = 0
) -> Report:
    groups, row = symbol("groups", 1, 1000), symbol("row", lowest)
    buffers = {
        "ends_ptr": Buffer("i32", groups, values=lambda v: v >= least),
        "y_ptr": Buffer("i32", room),
        "z_ptr": Buffer("i32", room),
    }
    constants = {"FIRST": first, "CUT": cut}
    return asked(bracket, (1,), constants, **buffers, groups=groups, rows=rows, row=row)


def test_a_running_minimum_and_maximum() -> None:
    assert bracketed().verdict == "proven"
    assert bracketed(least=-1).verdict == "proven"  # such an end is not after any row, and 0 is more than it


@pytest.mark.parametrize(
    ("wrong", "stores"),
    [
        ({"first": -1}, ["store y_ptr"]),
        ({"cut": False}, ["store y_ptr"]),  # an end past the rows, below a row past them
        ({"room": rows}, ["store y_ptr", "store z_ptr"]),
        ({"least": -1, "lowest": -2}, ["store z_ptr"]),  # the maximum is not less than 0, but the minimum is
    ],
    ids=str,
)
def test_a_running_minimum_and_maximum_of_the_wrong_numbers(wrong: dict[str, Any], stores: list[str]) -> None:
    report = bracketed(**wrong)
    assert {a.what for a in report.of("bounds") if a.verdict != "proven"} >= {*stores}, report


@triton.jit
def swapped(y_ptr, n, first, second):
    """Each of the two becomes the other, which is less each time."""
    for _ in range(n):
        first, second = second - 1, first
    tl.store(y_ptr + first, 1)


def test_values_that_become_each_other() -> None:
    report = asked(swapped, (1,), {}, y_ptr=Buffer("i32", 9), n=symbol("n", 1, 100), first=8, second=8)
    assert "bounds" in open_kinds(report)


@triton.jit
def added(x_ptr, y_ptr, n):
    """That a sum of natural numbers is not less than 0 holds of the machine's if it fits."""
    total = 0
    for i in range(n):
        total += tl.load(x_ptr + i)
    tl.store(y_ptr + tl.minimum(total, 7), 1)


def test_an_invariant_does_not_hide_an_overflow() -> None:
    x = Buffer("i32", n, values=lambda v: z3.And(v >= 0, v <= 2**20))
    report = asked(added, (1,), {}, x_ptr=x, y_ptr=Buffer("i32", 8), n=n)
    assert "proven" in {a.verdict for a in report.of("bounds") if a.what == "store y_ptr"}
    assert open_kinds(report) == {"overflow"}, report


def test_the_sum_is_of_natural_numbers() -> None:
    x = Buffer("i32", n, values=lambda v: z3.And(v >= -1, v <= 2**20))
    report = asked(added, (1,), {}, x_ptr=x, y_ptr=Buffer("i32", 8), n=n)
    assert open_kinds(report) == {"overflow", "bounds"}, report


# ---- permutations and maps ------------------------------------------------------------------------------------------


@triton.jit
def scatter(x_ptr, order_ptr, y_ptr, n, cols, BLOCK: tl.constexpr = 16, TILE: tl.constexpr = 32):
    """Rows to their places; one more element of the list is the number of rows."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = number < tl.load(order_ptr + n)
    row = tl.load(order_ptr + number, mask=live, other=0).to(tl.int64)
    for start in range(0, cols, TILE):
        col = start + tl.arange(0, TILE)
        mask = live[:, None] & (col < cols)[None, :]
        x = tl.load(x_ptr + (number * cols)[:, None] + col[None, :], mask=mask)
        tl.store(y_ptr + (row * cols)[:, None] + col[None, :], x, mask=mask)


@pytest.mark.parametrize(
    ("which", "verdict"),
    [
        (lambda v, i: i != rows, "proven"),
        (True, "proven"),  # with the number of rows, which is then no row
        (False, "counterexample"),
        (lambda v, i: i != 0, "counterexample"),
        (lambda v, i: v > 0, "counterexample"),
    ],
)
def test_rows_by_a_permutation(which: Any, verdict: str) -> None:
    cols = symbol("cols", 1, 2**20)
    order = Buffer(
        "i32",
        rows + 1,
        values=lambda v, i: z3.And(v >= 0, z3.If(i == rows, v <= rows, v < rows)),
        distinct=which,
    )
    buffers = {"x_ptr": Buffer("f32", rows * cols), "order_ptr": order, "y_ptr": Buffer("f32", rows * cols)}
    report = asked(scatter, (cdiv(rows, 16),), {}, **buffers, n=rows, cols=cols)
    assert {a.verdict for a in report.of("race")} == {verdict}, report
    assert open_kinds(report) <= {"race"}, report


@triton.jit
def move(x_ptr, row_ptr, slot_ptr, y_ptr, tokens, slots, rows, token_programs, LESS: tl.constexpr):
    """Every slot of a token to its row; further programs fill the rows that no slot has."""
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
    return asked(
        move, (cdiv(tokens, 16) + cdiv(rows, 32),), {"LESS": less}, trials=trials, **buffers, **sizes
    )


def test_rows_by_a_map_and_its_inverse() -> None:
    report = moved(trials=6, row="slot_ptr")
    assert report.verdict == "proven", report
    assert "slot_ptr[v] = i for every v >= 0 that is row_ptr[i]" in report.assumed
    assert "random launches agree" in report.certificates[0], "a map and its inverse are drawn together"


@pytest.mark.parametrize("wrong", [{}, {"slot": "row_ptr"}, {"less": 1, "row": "slot_ptr"}], ids=str)
def test_rows_by_maps_that_do_not_lead_back(wrong: dict[str, Any]) -> None:
    """Without the way back, with that of the rows alone (two slots may have one row), or where slot 0 is none."""
    report = moved(**wrong)
    assert open_kinds(report) == {"race"}, report


def test_a_way_back_is_an_argument() -> None:
    with pytest.raises(ContractError, match="leads back from"):
        moved(row="nothing")


@triton.jit
def changed(row_ptr, y_ptr, n):
    """The map is written while it is read: what was known of it before does not hold any more."""
    at = tl.program_id(0)
    row = tl.load(row_ptr + at)
    tl.store(y_ptr + row, at, mask=row >= 0)
    tl.store(row_ptr + at, 0)


def test_a_map_that_is_written_is_not_distinct() -> None:
    choices: list[Callable[..., Any] | bool] = [True, lambda v, i: v >= 0]
    for distinct in choices:
        order = Buffer("i32", n, values=lambda v: z3.And(v >= -1, v < n), distinct=distinct)
        report = asked(changed, (n,), {}, row_ptr=order, y_ptr=Buffer("i32", n), n=n)
        stores = [a.verdict for a in report.of("race") if a.what == "store y_ptr and store y_ptr"]
        assert stores != ["proven"], report
