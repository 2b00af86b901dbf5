"""Outputs that are written completely: kernels for which that is proven, and variants with a mistake."""

from __future__ import annotations

from typing import Any

import pytest
import triton
import triton.language as tl
from triton_loom.prove import Answer, Buffer, Contract, cdiv, symbol
from triton_loom.prove.compiling import ttir_of
from triton_loom.prove.coverage import covered
from triton_loom.prove.proving import Prover
from triton_loom.prove.solver import QUICK

m, n, k = symbol("m", 1, 2**20), symbol("n", 1, 2**20), symbol("k", 1, 2**20)


def coverage_of(kernel: Any, grid: tuple[Any, ...], output: Buffer, **more: Any) -> Answer:
    """Answer whether `y_ptr` is written completely; arguments in capitals are constants."""
    constants = {name: value for name, value in more.items() if name.isupper()}
    arguments = {name: value for name, value in more.items() if not name.isupper()}
    contract = Contract.of(
        grid=grid,
        arguments={"y_ptr": output, **arguments},
        constants=constants,
        sizes=(m, n, k),
        outputs=("y_ptr",),
    )
    return covered(Prover(ttir_of(kernel, contract), contract, 2 * QUICK), "y_ptr")


def dense(*shape: Any) -> Buffer:
    extent: Any = 1
    for size in shape:
        extent = extent * size
    return Buffer("f32", extent, shape=shape)


@triton.jit
def tiles(y_ptr, rows, cols, LESS: tl.constexpr = 0, STEP: tl.constexpr = 16):
    across = tl.cdiv(cols, 32)
    row = (tl.program_id(0) // across) * STEP + tl.arange(0, 16)[:, None]
    col = (tl.program_id(0) % across) * 32 + tl.arange(0, 32)[None, :]
    off = row.to(tl.int64) * cols + col
    tl.store(y_ptr + off, 1.0, mask=(row < rows) & (col < cols - LESS))


@pytest.mark.parametrize("flat", [False, True])
def test_tiles_on_one_grid_axis_cover_the_output(flat: bool) -> None:
    """The index in each dimension need not be given: quotients of the linear offset are found as well."""
    grid, y = cdiv(m, 16) * cdiv(n, 32), Buffer("f32", m * n) if flat else dense(m, n)
    assert coverage_of(tiles, (grid,), y, rows=m, cols=n).verdict == "proven"
    assert coverage_of(tiles, (grid - 1,), y, rows=m, cols=n).verdict == "counterexample"
    assert coverage_of(tiles, (grid,), y, rows=m, cols=n, LESS=1).verdict == "counterexample"
    assert coverage_of(tiles, (grid,), y, rows=m, cols=n, STEP=17).verdict == "counterexample"


@triton.jit
def rows_and_columns(y_ptr, rows, cols, FIRST: tl.constexpr = 0, STEP: tl.constexpr = 64):
    row = tl.program_id(0).to(tl.int64) * 4 + tl.arange(0, 4)[:, None]
    for start in range(FIRST, cols, STEP):
        col = start + tl.arange(0, 64)[None, :]
        tl.store(y_ptr + row * cols + col, 1.0, mask=(row < rows) & (col < cols))


def test_rows_with_a_column_loop_cover_the_output() -> None:
    y = dense(m, n, k)  # the kernel flattens two dimensions of the tensor into rows
    sizes = {"rows": m * n, "cols": k}
    assert coverage_of(rows_and_columns, (cdiv(m * n, 4),), y, **sizes).verdict == "proven"
    assert coverage_of(rows_and_columns, (m * n / 4,), y, **sizes).verdict == "counterexample"
    assert coverage_of(rows_and_columns, (cdiv(m * n, 4),), y, **sizes, FIRST=1).verdict == "counterexample"
    assert coverage_of(rows_and_columns, (cdiv(m * n, 4),), y, **sizes, STEP=65).verdict != "proven"


@triton.jit
def shares(y_ptr, rows, each, LESS: tl.constexpr = 0):
    first = tl.program_id(0) * each
    for row in range(first, tl.minimum(first + each - LESS, rows)):
        tl.store(y_ptr + row, 1.0)


def test_contiguous_shares_of_programs_cover_the_output() -> None:
    each = cdiv(m, 264)
    assert coverage_of(shares, (cdiv(m, each),), dense(m), rows=m, each=each).verdict == "proven"
    assert coverage_of(shares, (cdiv(m, each) - 1,), dense(m), rows=m, each=each).verdict != "proven"
    assert coverage_of(shares, (cdiv(m, each),), dense(m), rows=m, each=each, LESS=1).verdict != "proven"


@triton.jit
def in_turns(y_ptr, rows):
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        tl.store(y_ptr + row, 1.0)


def test_grid_stride_loops_cover_the_output() -> None:
    assert coverage_of(in_turns, (132,), dense(m), rows=m).verdict == "proven"
    assert coverage_of(in_turns, (132,), dense(m + 1), rows=m).verdict == "counterexample"


@triton.jit
def statistics(y_ptr, rows, LAST: tl.constexpr = 3):
    row = tl.program_id(0) * 32 + tl.arange(0, 32)
    for number in tl.static_range(LAST):
        tl.store(y_ptr + number * rows.to(tl.int64) + row, 1.0, mask=row < rows)


def test_several_stores_cover_the_output_together() -> None:
    """Each store writes a part of the elements."""
    assert coverage_of(statistics, (cdiv(m, 32),), dense(3, m), rows=m).verdict == "proven"
    assert coverage_of(statistics, (cdiv(m, 32),), dense(3, m), rows=m, LAST=2).verdict == "counterexample"
    assert coverage_of(statistics, (cdiv(m, 32) - 1,), dense(3, m), rows=m).verdict != "proven"


@triton.jit
def halves(y_ptr, half, GAP: tl.constexpr = 0):
    lane = tl.arange(0, 64)
    row = tl.program_id(0).to(tl.int64) * (2 * half)
    tl.store(y_ptr + row + lane, 1.0, mask=lane < half)
    tl.store(y_ptr + row + half + lane, 2.0, mask=lane < half - GAP)


def test_two_halves_cover_a_row() -> None:
    half = symbol("half", 1, 64)
    y = dense(m, 2 * half)
    assert coverage_of(halves, (m,), y, half=half).verdict == "proven"
    assert coverage_of(halves, (m,), y, half=half, GAP=1).verdict == "counterexample"


@triton.jit
def by_flags(flag_ptr, y_ptr, BACK: tl.constexpr = 0):
    """If a flag is set, store; else store BACK elements earlier."""
    at = tl.program_id(0)
    flag = tl.load(flag_ptr + at)
    if flag > 0:
        tl.store(y_ptr + at, 1.0, mask=at < tl.num_programs(0) - BACK)
    else:
        tl.store(y_ptr + at - BACK, 2.0, mask=at >= BACK)


def test_loaded_flags_differ_between_programs() -> None:
    """BACK = 1: element i is written by program i if its flag is set, and by program i + 1 if its own is not."""
    flags = Buffer("i32", m + 1)
    assert coverage_of(by_flags, (m,), dense(m), flag_ptr=flags).verdict == "proven"
    assert coverage_of(by_flags, (m + 1,), dense(m), flag_ptr=flags, BACK=1).verdict != "proven"


@triton.jit
def where_flagged(flag_ptr, y_ptr):
    at = tl.program_id(0)
    tl.store(y_ptr + at, 1.0, mask=tl.load(flag_ptr + at) > 0)


def test_a_store_masked_by_memory_needs_an_assumption() -> None:
    for values, verdict in ((None, "unknown"), (lambda v: v >= 1, "proven")):
        flags = Buffer("i32", m, values=values)
        assert coverage_of(where_flagged, (m,), dense(m), flag_ptr=flags).verdict == verdict


@triton.jit
def after_others(y_ptr, rows, others):
    at = tl.program_id(0) - others
    if at >= 0:
        row = at * 32 + tl.arange(0, 32)
        tl.store(y_ptr + row, 1.0, mask=row < rows)


def test_later_programs_of_a_grid_cover_the_output() -> None:
    sizes = {"rows": m, "others": n}
    assert coverage_of(after_others, (n + cdiv(m, 32),), dense(m), **sizes).verdict == "proven"
    assert coverage_of(after_others, (n + cdiv(m, 32) - 1,), dense(m), **sizes).verdict != "proven"


def test_a_shape_with_too_few_elements_is_ignored() -> None:
    y = Buffer("f32", m * n + 1, shape=(m, n))
    assert coverage_of(tiles, (cdiv(m, 16) * cdiv(n, 32),), y, rows=m, cols=n).verdict != "proven"
