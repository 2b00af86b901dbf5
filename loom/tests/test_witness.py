"""The witness itself: counts and findings against brute force over addresses, and no finding where nothing is wrong."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_examples
import torch
import triton
import triton.language as tl
import triton_loom
import triton_loom.driver
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from support import FLOAT8, FLOATS, INTEGERS, short
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor
from triton_loom.counters import Traffic
from triton_loom.sanitizer import Finding
from triton_loom.testing.fixtures import SEED

drawn = settings(
    max_examples=60, deadline=None, database=None, derandomize=False, suppress_health_check=list(HealthCheck)
)


def kinds(findings: Sequence[Finding]) -> list[str]:
    return [finding.kind for finding in findings]


# ---- counters ----------------------------------------------------------------------------------------------
# A kernel's launch comes with the byte addresses that it is known to touch: (program, addresses) for each access.

Touched = list[tuple[int, np.ndarray]]


def traffic(touched: Touched, size: int) -> Traffic:
    """What a counter has to say of accesses to elements of `size` bytes, byte by byte."""
    requested = size * sum(addresses.size for _, addresses in touched)
    per_program = {
        (program, sector)
        for program, addresses in touched
        for byte in range(size)
        for sector in np.unique((addresses + byte) // 32).tolist()
    }
    every = np.unique(np.concatenate([a.ravel() + b for _, a in touched for b in range(size)] or [[]]))
    return Traffic(requested, len(every), 32 * len(per_program), 32 * len(np.unique(every // 32)))


def addresses(tensor: torch.Tensor, offsets: Any) -> np.ndarray:
    """Where the elements at some offsets from the first one are, in bytes."""
    return tensor.data_ptr() + tensor.element_size() * np.asarray(offsets, dtype=np.int64)


@dataclass
class Expected:
    """A launch, to be made any number of times, and the tensors it touches: argument -> loads, stores."""

    launch: Callable[[], Any]
    touched: dict[str, tuple[torch.Tensor, Touched, Touched]]
    dot_flops: int = 0

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor, _, _ in self.touched.values()]

    def check(self) -> None:
        """The counts of the launch are exact, with one thread and with two, and counting changes no result."""
        before = [tensor.clone() for tensor in self.tensors]
        self.launch()
        want = [tensor.clone() for tensor in self.tensors]
        for threads in (1, 2):
            for tensor, old in zip(self.tensors, before, strict=True):
                tensor.copy_(old)
            torch.set_num_threads(threads)
            with triton_loom.count() as counted:
                self.launch()
            (launch,) = counted.launches
            for name, (tensor, loads, stores) in self.touched.items():
                size = tensor.element_size()
                got = launch.arguments[name]
                assert got.loads == traffic(loads, size), f"loads of {name}, {threads} threads"
                assert got.stores == traffic(stores, size), f"stores of {name}, {threads} threads"
                assert got.shape == tensor.shape
                assert got.dtype == short(tensor.dtype)
            assert launch.dot_flops == self.dot_flops
            assert launch.arguments.keys() == self.touched.keys()
            for tensor, expected in zip(self.tensors, want, strict=True):
                assert torch.equal(tensor, expected), "counting changes the result"


@triton.jit
def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(y_ptr + i, 2 * tl.load(x_ptr + i, mask=i < n), mask=i < n)


def contiguous(dtype: torch.dtype, n: int, start: int) -> Expected:
    """From any position in a sector, with a masked tail."""
    x, y = torch.ones(n + start, dtype=dtype)[start:], torch.zeros(n + start, dtype=dtype)[start:]
    programs = triton.cdiv(n, 64)
    at = [np.arange(64 * p, min(n, 64 * p + 64)) for p in range(programs)]
    return Expected(
        lambda: double[(programs,)](x, y, n, BLOCK=64),
        {
            "x_ptr": (x, [(p, addresses(x, i)) for p, i in enumerate(at)], []),
            "y_ptr": (y, [], [(p, addresses(y, i)) for p, i in enumerate(at)]),
        },
    )


@triton.jit
def sum_columns(x_ptr, y_ptr, row_stride, rows, ROWS: tl.constexpr):
    col, row = tl.program_id(0), tl.arange(0, ROWS)  # [ROWS]
    x = tl.load(x_ptr + row * row_stride + col, mask=row < rows, other=0)
    tl.store(y_ptr + col, tl.sum(x, 0))


def strided_columns() -> Expected:
    """Every program touches one sector for each row, and shares it with others."""
    x, y = torch.randn(23, 19)[:, 2:15], torch.zeros(13)
    down = np.arange(23) * 19
    return Expected(
        lambda: sum_columns[(13,)](x, y, 19, 23, ROWS=32),
        {
            "x_ptr": (x, [(p, addresses(x, down + p)) for p in range(13)], []),
            "y_ptr": (y, [], [(p, addresses(y, [p])) for p in range(13)]),
        },
    )


@triton.jit
def gather_rows(x_ptr, from_ptr, y_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    place = tl.load(from_ptr + rows)  # [ROWS]
    x = tl.load(x_ptr + place[:, None] * COLS + cols[None, :])  # [ROWS, COLS]
    tl.store(y_ptr + rows[:, None] * COLS + cols[None, :], x)


def gather_of_repeated_rows() -> Expected:
    x, y = torch.randn(40, 8), torch.zeros(12, 8)
    place = torch.tensor([3, 3, 3, 3, 7, 0, 7, 3, 39, 1, 1, 2])
    cols = np.arange(8)
    loads = [(p, addresses(x, place[4 * p : 4 * p + 4, None].numpy() * 8 + cols)) for p in range(3)]
    return Expected(
        lambda: gather_rows[(3,)](x, place, y, ROWS=4, COLS=8),
        {
            "x_ptr": (x, loads, []),
            "from_ptr": (place, [(p, addresses(place, np.arange(4 * p, 4 * p + 4))) for p in range(3)], []),
            "y_ptr": (y, [], [(p, addresses(y, np.arange(32 * p, 32 * p + 32))) for p in range(3)]),
        },
    )


@triton.jit
def transpose(x_ptr, y_ptr, M, N, TILE: tl.constexpr):
    i, j = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1) * TILE + tl.arange(0, TILE)
    on = (i[:, None] < M) & (j[None, :] < N)  # [TILE, TILE]
    tl.store(y_ptr + j[None, :] * M + i[:, None], tl.load(x_ptr + i[:, None] * N + j[None, :], mask=on), on)


def transposed_store() -> Expected:
    M, N = 21, 37
    x, y = torch.randn(M, N).half(), torch.zeros(N, M, dtype=torch.half)
    loads: Touched = []
    stores: Touched = []
    for pj in range(3):
        for pi in range(2):
            i, j = np.meshgrid(np.arange(16 * pi, 16 * pi + 16), np.arange(16 * pj, 16 * pj + 16))
            i, j = i[(i < M) & (j < N)], j[(i < M) & (j < N)]
            loads.append((len(loads), addresses(x, i * N + j)))
            stores.append((len(stores), addresses(y, j * M + i)))
    return Expected(
        lambda: transpose[(2, 3)](x, y, M, N, TILE=16), {"x_ptr": (x, loads, []), "y_ptr": (y, [], stores)}
    )


@triton.jit
def add_scalars(x_ptr, y_ptr, step, n):
    sum_ = 0.0
    for k in range(n):
        sum_ += tl.load(x_ptr + (tl.program_id(0) + k) * step)
    tl.store(y_ptr + tl.program_id(0), sum_, mask=tl.program_id(0) % 2 == 0)


def scalars_in_a_loop() -> Expected:
    """Programs read windows that overlap, one element at a time; every other one stores nothing."""
    x, y = torch.randn(100), torch.zeros(6)
    return Expected(
        lambda: add_scalars[(6,)](x, y, 5, 9),
        {
            "x_ptr": (x, [(p, addresses(x, 5 * (p + np.arange(9)))) for p in range(6)], []),
            "y_ptr": (y, [], [(p, addresses(y, [p])) for p in range(0, 6, 2)]),
        },
    )


@triton.jit
def histogram(x_ptr, bins_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    tl.atomic_add(bins_ptr + tl.load(x_ptr + i, mask=i < n), 1, mask=i < n)


def atomics() -> Expected:
    """An update is a load and a store."""
    x, bins = torch.randint(0, 30, (150,)), torch.zeros(30, dtype=torch.int32)
    at = [np.arange(64 * p, min(150, 64 * p + 64)) for p in range(3)]
    updates = [(p, addresses(bins, x.numpy()[i])) for p, i in enumerate(at)]
    return Expected(
        lambda: histogram[(3,)](x, bins, 150, BLOCK=64),
        {
            "x_ptr": (x, [(p, addresses(x, i)) for p, i in enumerate(at)], []),
            "bins_ptr": (bins, updates, updates),
        },
    )


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, N, K, TILE: tl.constexpr):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    sum_ = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, K, TILE):
        down, right = start + tl.arange(0, TILE)[:, None], start + tl.arange(0, TILE)[None, :]
        sum_ = tl.dot(tl.load(a_ptr + rows * K + right), tl.load(b_ptr + down * N + cols), sum_)
    tl.store(c_ptr + rows * N + cols, sum_)


def dot_in_a_loop() -> Expected:
    M, N, K = 48, 32, 64
    a, b, c = torch.randn(M, K).bfloat16(), torch.randn(K, N).bfloat16(), torch.zeros(M, N)
    down, across = np.arange(16)[:, None], np.arange(16)
    loads: dict[str, Touched] = {"a": [], "b": []}
    stores: Touched = []
    for j in range(N // 16):
        for i in range(M // 16):
            program = i + j * (M // 16)
            for k in range(K // 16):
                loads["a"].append((program, addresses(a, (16 * i + down) * K + 16 * k + across)))
                loads["b"].append((program, addresses(b, (16 * k + down) * N + 16 * j + across)))
            stores.append((program, addresses(c, (16 * i + down) * N + 16 * j + across)))
    return Expected(
        lambda: matmul[(M // 16, N // 16)](a, b, c, N, K, TILE=16),
        {"a_ptr": (a, loads["a"], []), "b_ptr": (b, loads["b"], []), "c_ptr": (c, [], stores)},
        dot_flops=2 * M * N * K,
    )


@triton.jit
def double_by_descriptor(x, y_ptr, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    i, j = tl.program_id(0) * ROWS, tl.program_id(1) * COLS
    y = tl.make_tensor_descriptor(y_ptr, [30, N], [N, 1], [ROWS, COLS])
    y.store([i, j], 2 * x.load([i, j]))


def descriptors() -> Expected:
    """One made by the host and one by the kernel; what lies outside of their shapes is not touched."""
    x, y = torch.randn(30, 40), torch.zeros(30, 40)
    loads: Touched = []
    stores: Touched = []
    for pj in range(2):
        for pi in range(2):
            i, j = (
                np.arange(16 * pi, min(30, 16 * pi + 16))[:, None],
                np.arange(32 * pj, min(40, 32 * pj + 32)),
            )
            loads.append((len(loads), addresses(x, 40 * i + j)))
            stores.append((len(stores), addresses(y, 40 * i + j)))
    return Expected(
        lambda: double_by_descriptor[(2, 2)](
            TensorDescriptor.from_tensor(x, [16, 32]), y, 40, ROWS=16, COLS=32
        ),
        {"x": (x, loads, []), "y_ptr": (y, [], stores)},
    )


@pytest.mark.parametrize(
    "make",
    [
        *[lambda s=s: contiguous(torch.float32, 200, s) for s in (0, 3)],
        lambda: contiguous(torch.int8, 131, 5),
        lambda: contiguous(torch.float64, 64, 1),
        strided_columns,
        gather_of_repeated_rows,
        transposed_store,
        scalars_in_a_loop,
        atomics,
        dot_in_a_loop,
        descriptors,
    ],
    ids=[
        *("contiguous", "unaligned", "bytes", "doubles", "columns", "gather"),
        *("transposed", "scalars", "atomics", "dot", "descriptors"),
    ],
)
def test_counts(make: Callable[[], Expected]) -> None:
    make().check()


@triton.jit(do_not_specialize=["start", "per_program", "per_row", "per_col", "rows", "cols"])
def copy_tiles(
    x_ptr, y_ptr, start, per_program, per_row, per_col, rows, cols, UNIT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    pid, i, j = tl.program_id(0), tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    off = start + pid * per_program + i * per_row + (j if UNIT else j * per_col)  # [TILE, TILE]
    x = tl.load(x_ptr + off, mask=(i < rows) & (j < cols), other=0)
    tl.store(y_ptr + (pid * TILE + i) * TILE + j, x, mask=(i + j) % 3 != 0)


@seed(SEED)
@drawn
@given(
    dtype=st.sampled_from([torch.int8, torch.float32]),
    start=st.integers(0, 40),
    strides=st.tuples(st.integers(0, 70), st.integers(0, 40), st.one_of(st.just(1), st.integers(0, 9))),
    kept=st.tuples(st.integers(0, 16), st.integers(0, 16)),
    programs=st.integers(1, 5),
)
def test_counts_of_any_tile(
    dtype: torch.dtype, start: int, strides: tuple[int, int, int], kept: tuple[int, int], programs: int
) -> None:
    per_program, per_row, per_col = strides
    reach = start + (programs - 1) * per_program + 15 * (per_row + per_col) + 1
    x, y = torch.ones(reach, dtype=dtype), torch.zeros(programs, 16, 16, dtype=dtype)
    i, j = np.arange(kept[0])[:, None], np.arange(kept[1])
    loads = [(p, addresses(x, start + p * per_program + i * per_row + j * per_col)) for p in range(programs)]
    at = np.flatnonzero(np.add.outer(np.arange(16), np.arange(16)) % 3)
    stores = [(p, addresses(y, 256 * p + at)) for p in range(programs)]
    Expected(
        lambda: copy_tiles[(programs,)](x, y, start, *strides, *kept, UNIT=per_col == 1, TILE=16),
        {"x_ptr": (x, loads, []), "y_ptr": (y, [], stores)},
    ).check()


def test_totals_of_launches_and_scopes() -> None:
    case = contiguous(torch.float32, 200, 0)
    with triton_loom.count() as counted:
        case.launch()
        case.launch()
    first, second = counted.launches
    assert first == second
    assert (first.kernel, first.grid) == ("double", (4, 1, 1))
    assert first.loads == first.arguments["x_ptr"].loads
    assert counted.loads == first.loads.plus(first.loads)
    assert counted.stores.requested == 2 * 800


def test_counts_of_an_empty_grid_are_zero() -> None:
    x, y = torch.ones(8), torch.zeros(8)
    with triton_loom.count() as counted:
        double[(0,)](x, y, 8, BLOCK=64)
    assert counted.launches[0].loads == counted.launches[0].stores == Traffic()


# ---- which elements a tensor has ------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["start", "n"])
def copy_at(x_ptr, at_ptr, y_ptr, start, n, STORE: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr):
    """x[at] to y, or y to x[at]. The places are in memory, or follow one another from `start` on."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    off = tl.load(at_ptr + i, mask=i < n, other=0) if MODE == "gather" else start + i
    if STORE:
        tl.store(x_ptr + off, tl.load(y_ptr + i, mask=i < n), mask=i < n)
    else:
        tl.store(y_ptr + i, tl.load(x_ptr + off, mask=i < n, other=0), mask=i < n)


MARGIN = 64


def check_membership(shape: Sequence[int], strides: Sequence[int]) -> None:
    """Loads and stores from before a view to behind it: those of its elements happen, all others are reported."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = torch.arange(1, reach + 2 * MARGIN + 1, dtype=torch.int32)
    x = memory.as_strided(shape, strides, MARGIN)
    member = np.zeros(len(memory), dtype=bool)
    member[x.numpy().ravel() - 1] = True
    places = torch.arange(len(memory)) - MARGIN
    n, outside = len(memory), int((~member).sum())
    for mode in ("gather", "in order"):
        before, got = memory.clone(), torch.full((n,), -1, dtype=torch.int32)
        with triton_loom.sanitize(collect=True) as seen:
            copy_at[(triton.cdiv(n, 64),)](x, places, got, -MARGIN, n, STORE=False, MODE=mode, BLOCK=64)
        check_outside(seen.findings, "out-of-bounds load", outside)
        assert np.array_equal(got.numpy(), np.where(member, before.numpy(), 0)), f"{mode}: loaded"

        values = -torch.arange(1, n + 1, dtype=torch.int32)
        with triton_loom.sanitize(collect=True) as seen:
            copy_at[(triton.cdiv(n, 64),)](x, places, values, -MARGIN, n, STORE=True, MODE=mode, BLOCK=64)
        check_outside(seen.findings, "out-of-bounds store", outside)
        assert np.array_equal(memory.numpy(), np.where(member, values.numpy(), before.numpy())), (
            f"{mode}: stored"
        )
        memory.copy_(before)


def check_outside(findings: list[Finding], kind: str, count: int) -> None:
    (finding,) = findings
    assert (finding.kind, finding.count, finding.argument) == (kind, count, "x_ptr")


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((40,), (1,)),
        ((9,), (3,)),
        ((7, 5), (9, 1)),
        ((5, 7), (1, 9)),
        ((4, 6), (2, 1)),  # windows that overlap
        ((5, 3), (3, 2)),
        ((3, 4, 5), (40, 11, 2)),
        ((6, 5), (0, 1)),
        ((6, 5), (4, 0)),
        ((3,), (0,)),
        ((1, 1), (7, 7)),
        ((2, 1, 3), (20, 1, 1)),
        ((), ()),
        ((0,), (1,)),  # nothing, at address 0
        ((3, 0, 2), (8, 4, 1)),
    ],
    ids=str,
)
def test_elements_of_views(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    check_membership(shape, strides)


@seed(SEED)
@drawn
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 30)), min_size=0, max_size=4))
def test_elements_of_any_view(dims: list[tuple[int, int]]) -> None:
    check_membership([size for size, _ in dims], [stride for _, stride in dims])


def test_elements_of_many_dimensions() -> None:
    check_membership((2,) * 9, [2 * 3**d for d in range(9)])


def test_neighbours_in_one_allocation_are_told_apart() -> None:
    """A row of a matrix ends where it ends, although the next one follows."""
    memory = torch.zeros(4, 16)
    with triton_loom.sanitize(collect=True) as seen:
        double[(1,)](memory[1], memory[3], 17, BLOCK=64)
    assert sorted(kinds(seen.findings)) == ["out-of-bounds load", "out-of-bounds store"]
    assert [finding.index for finding in seen.findings] == [(16,), (16,)]


@triton.jit
def load_one(x_ptr, y_ptr, at):
    tl.store(y_ptr, tl.load(x_ptr + at))


@pytest.mark.parametrize(
    ("x", "at"),
    [
        pytest.param(lambda: torch.ones(8, 2)[:, 0], 1, id="between"),
        pytest.param(lambda: torch.ones(8, 2)[2:, 0], -1, id="before"),
        pytest.param(lambda: torch.ones(4, 3)[1, 1], 1, id="0-d"),
    ],
)
def test_what_is_no_element_has_no_elements_index(x: Callable[[], torch.Tensor], at: int) -> None:
    tensor = x()
    with triton_loom.sanitize(collect=True) as seen:
        load_one[(1,)](tensor, torch.zeros(1), at)
    (finding,) = seen.findings
    check_outside([finding], "out-of-bounds load", 1)
    if finding.index is not None:
        inside = all(0 <= i < size for i, size in zip(finding.index, tensor.shape, strict=True))
        assert not inside, f"there is an element {finding.index}: {finding}"


@triton.jit
def follow(table_ptr, y_ptr, BLOCK: tl.constexpr):
    pid, i = tl.program_id(0), tl.arange(0, BLOCK)  # [BLOCK]
    x_ptr = tl.load(table_ptr + pid).to(tl.pointer_type(tl.float32))
    tl.store(y_ptr + pid * BLOCK + i, tl.load(x_ptr + i))


def test_addresses_found_in_memory() -> None:
    """They lead to tensor arguments and to tensors that are allowed, and not past their ends."""
    tensors = [torch.randn(16), torch.randn(40)[:16], torch.randn(40)[20:36]]
    table, y = torch.tensor([x.data_ptr() for x in tensors]), torch.zeros(3, 16)
    with triton_loom.sanitize(collect=True) as seen:
        follow[(3,)](table, y, BLOCK=16)
        (finding,) = seen.findings
        assert (finding.kind, finding.argument, finding.count) == ("out-of-bounds load", None, 48)
        assert not y.any()
        seen.allow(*tensors)
        follow[(3,)](table, y, BLOCK=16)
        assert len(seen.findings) == 1
        assert torch.equal(y, torch.stack(tensors))
        table[1] += 4
        follow[(3,)](table, y, BLOCK=16)
    assert (seen.findings[1].count, seen.findings[1].program) == (1, (1, 0, 0))
    assert y[1, 15] == 0


def test_tensors_that_one_launch_reaches() -> None:
    """Named for a launch, they may be reached in it alone, and are counted."""
    from triton.runtime import driver

    tensors = [torch.randn(16), torch.randn(40)[:16], torch.randn(40)[20:36]]
    table, y = torch.tensor([x.data_ptr() for x in tensors]), torch.zeros(3, 16)
    with triton_loom.sanitize(collect=True) as seen, triton_loom.count() as counted:
        compiled = follow[(3,)](table, y, BLOCK=16)
        assert len(seen.findings) == 1
        launch = compiled.run.reaching(tensors)
        stream = driver.active.get_current_stream(None)
        launch(3, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, table, y, 16)
        assert len(seen.findings) == 1
        assert torch.equal(y, torch.stack(tensors))
        follow[(3,)](table, y, BLOCK=16)
        assert len(seen.findings) == 2
    reached = [counted.launches[1].arguments[f"reached[{number}]"] for number in range(3)]
    assert [argument.loads.requested for argument in reached] == [64] * 3
    assert "reached[0]" not in counted.launches[2].arguments


# ---- counters of loops -----------------------------------------------------------------------------------------


@triton.jit
def count_steps(steps_ptr, first, last, step):
    steps = 0
    for _ in range(first, last, step):
        steps += 1
    tl.store(steps_ptr, steps)


@pytest.mark.parametrize(
    ("first", "last", "step", "wrapped"),
    [
        (2**31 - 100, 2**31 - 10, 10, None),
        (2**31 - 100, 2**31 - 5, 10, 2**31),
        (5, 2**30 + 5, 2**30, None),
        (3, 2**30 + 4, 2**30, 2**31 + 3),
        (-(2**31), 2**31 - 1, 2**30, 2**31),
        (-(2**31), -5, 2**30, None),
        (2**31 + 5, 2**31 + 500, 10, None),  # in 64 bits
    ],
)
def test_a_loop_whose_counter_wraps_around(first: int, last: int, step: int, wrapped: int | None) -> None:
    """It is reported with the value that does not fit, and left, so that it took the steps that it should."""
    steps = torch.zeros(1, dtype=torch.int32)
    with triton_loom.sanitize(collect=True) as seen:
        count_steps[(1,)](steps, first, last, step)
    assert kinds(seen.findings) == ["offset overflow"] * (wrapped is not None)
    assert wrapped is None or f"counter would be {wrapped} after this step" in seen.findings[0].detail
    assert steps.item() == len(range(first, last, step))


@triton.jit
def count_tiles(tiles_ptr, cols, TILE: tl.constexpr):
    tiles = 0
    for _ in range(tl.cdiv(cols, TILE)):
        tiles += 1
    tl.store(tiles_ptr, tiles)


def test_a_loop_whose_end_wraps_around() -> None:
    """It takes no step at all, which no access could tell."""
    tiles = torch.zeros(1, dtype=torch.int32)
    with triton_loom.sanitize(collect=True) as seen:
        count_tiles[(1,)](tiles, 2**31 - 2**20, TILE=2**20)
        assert not seen.findings
        count_tiles[(1,)](tiles, 2**31 - 2**20 + 1, TILE=2**20)
    assert kinds(seen.findings) == ["offset overflow"]
    assert f"the exact result is {2**31}," in seen.findings[0].detail


# ---- memory that nobody has written ----------------------------------------------------------------------------


@triton.jit
def sums(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)  # [BLOCK]
    x = tl.load(x_ptr + i, mask=i < n, other=0)
    tl.store(y_ptr, tl.sum(x.to(tl.float32), 0))


def unwritten(x: torch.Tensor, n: int | None = None, block: int = 64) -> int:
    """How many elements of x a launch reads that count as unwritten, and none of the others; the scope is open."""
    from triton_loom.witness import SCOPES

    seen = SCOPES.sanitizers[-1]
    before = len(seen.findings)
    sums[(1,)](x, torch.zeros(1), x.numel() if n is None else n, BLOCK=block)
    found = seen.findings[before:]
    assert all(finding.kind == "uninitialised read" and finding.argument == "x_ptr" for finding in found)
    return sum(finding.count for finding in found)


ALLOCATORS: dict[str, Callable[[], torch.Tensor]] = {
    "empty": lambda: torch.empty(20),
    "empty_like": lambda: torch.empty_like(torch.zeros(20)),
    "empty_strided": lambda: torch.empty_strided((20,), (1,)),
    "empty_permuted": lambda: torch.empty_permuted((20,), (0,)),
    "new_empty": lambda: torch.zeros(1).new_empty(20),
    "new_empty_strided": lambda: torch.zeros(1).new_empty_strided((20,), (1,)),
}


@pytest.mark.parametrize("allocate", ALLOCATORS.values(), ids=ALLOCATORS)
def test_new_memory_is_unwritten(allocate: Callable[[], torch.Tensor]) -> None:
    with triton_loom.sanitize(collect=True) as seen:
        assert unwritten(allocate())
        assert unwritten(allocate()[5:9])
        assert not unwritten(allocate(), n=0)
        assert not unwritten(allocate().zero_())
        assert kinds(seen.findings) == ["uninitialised read"] * 2
        assert seen.findings[0].index == (0,)


@torch.library.custom_op("loom_test::put", mutates_args={"x"})
def put(x: torch.Tensor, value: float) -> None:
    x.mul_(0).add_(value)


def by_out(x: torch.Tensor) -> None:
    torch.add(torch.ones(x.shape), 1, out=x)


def by_halves(x: torch.Tensor) -> None:
    x[: len(x) // 2] = 1
    x[len(x) // 2 :].copy_(torch.ones(len(x) - len(x) // 2))


def by_numpy(x: torch.Tensor) -> None:
    x.numpy()[...] = np.arange(len(x))


def by_columns(x: torch.Tensor) -> None:
    for column in x.view(-1, 4).unbind(1):
        column.fill_(3)


WRITERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "fill_": lambda x: x.fill_(1.5),
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: x.copy_(torch.arange(len(x))),
    "out": by_out,
    "halves": by_halves,
    "columns": by_columns,
    "numpy": by_numpy,
    "custom op": lambda x: torch.ops.loom_test.put(x, 2.0),
    "index_copy_": lambda x: x.index_copy_(0, torch.randperm(len(x)), torch.ones(len(x))),
    "uniform_": lambda x: x.uniform_(),
    "native launch": lambda x: natively(lambda: double[(1,)](torch.ones(64), x, len(x), BLOCK=64)),
    "launch": lambda x: double[(1,)](torch.ones(64), x, len(x), BLOCK=64),
}


def natively(launch: Callable[[], Any]) -> None:
    """Launches without the witness, although a scope is open."""
    watching = driver.active
    driver.set_active(triton_loom.driver.LoomDriver(()))
    try:
        launch()
    finally:
        driver.set_active(watching)


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_memory_that_was_written(write: Callable[[torch.Tensor], Any]) -> None:
    with triton_loom.sanitize() as seen:
        x = torch.empty(36)
        write(x)
        assert not unwritten(x)
        assert seen.launches >= 1


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, *FLOAT8, torch.bool], ids=short)
def test_no_value_looks_unwritten(dtype: torch.dtype) -> None:
    """Not even the bytes that stand for unwritten memory, where they are somebody's."""
    size = dtype.itemsize
    patterns = [0, 1, 0xFF, 0x7F, 0x80, *range(0xA0, 0xB0)] if dtype != torch.bool else [0, 1]
    with triton_loom.sanitize() as seen:
        x = torch.empty(1000, dtype=dtype)
        for pattern in patterns:
            x.view(torch.uint8).fill_(pattern)
            double_bytes[(1,)](
                x.view(torch.uint8), torch.zeros(1, dtype=torch.int32), 1000 * size, BLOCK=8192
            )
        if dtype not in (*FLOAT8, torch.bool):
            for value in (0, 1, -1, 255):
                y = torch.empty(9, dtype=dtype).fill_(value if dtype.is_floating_point else value % 128)
                double_bytes[(1,)](
                    y.view(torch.uint8), torch.zeros(1, dtype=torch.int32), 9 * size, BLOCK=8192
                )
    assert not seen.findings


@triton.jit
def double_bytes(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(y_ptr, tl.sum(tl.load(x_ptr + i, mask=i < n, other=0).to(tl.int32), 0))


@pytest.mark.parametrize("size", range(1, 10))
def test_few_bytes(size: int) -> None:
    with triton_loom.sanitize(collect=True):
        for _ in range(3):
            x = torch.empty(size, dtype=torch.uint8)
            assert unwritten(x) == size
            x.fill_(7)
            assert not unwritten(x)
            x = torch.empty(size, dtype=torch.uint8)
            x[size - 1] = 0
            assert not unwritten(x[size - 1 :])


@triton.jit
def store_where(y_ptr, on_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(y_ptr + i, i, mask=(i < n) & (tl.load(on_ptr + i, mask=i < n, other=0) != 0))


@triton.jit
def mark_loaded(x_ptr, y_ptr, n):
    """A program per element."""
    i = tl.program_id(0)
    tl.store(y_ptr + i, tl.load(x_ptr + i))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ids=short)
@pytest.mark.parametrize("writer", ["kernel", "torch"])
def test_partly_written_memory(writer: str, dtype: torch.dtype) -> None:
    """Which elements are read unwritten is exact: those that neither a kernel nor torch has stored."""
    n = 61
    on = torch.rand(n) < 0.5
    if writer == "torch" and dtype.itemsize < 4:  # which of these torch has written shows by the 8 bytes
        on = on.repeat_interleave(8 // dtype.itemsize)[:n]
    with triton_loom.sanitize(collect=True) as seen:
        x = torch.empty(n, dtype=dtype)
        if writer == "kernel":
            store_where[(1,)](x, on, n, BLOCK=64)
        else:
            x[on] = torch.arange(n, dtype=dtype)[on]
        assert not seen.findings
        for i in range(n):
            assert unwritten(x[i : i + 1], block=16) == (not on[i]), f"element {i}"


def test_freed_memory_is_somebody_elses() -> None:
    """The allocator gives the same memory out again; what the new owner's is depends on the new owner."""
    with triton_loom.sanitize(collect=True):
        reused = 0
        for size in (64, 4096, 1 << 20) * 3:
            x = torch.empty(size, dtype=torch.uint8)
            assert unwritten(x, 64)
            where = x.data_ptr()
            del x
            y = torch.zeros(size, dtype=torch.uint8)
            reused += y.data_ptr() == where
            assert not unwritten(y, 64)
            where = y.data_ptr()
            del y
            z = torch.empty(size, dtype=torch.uint8)
            reused += z.data_ptr() == where
            assert unwritten(z, 64)
            del z
            assert not unwritten(torch.ones(size, dtype=torch.uint8), 64)
        assert reused


def test_memory_of_other_scopes() -> None:
    """What was allocated outside counts as written; what an earlier scope's launch stored is stored."""
    x = torch.empty(36)
    with triton_loom.sanitize():
        assert not unwritten(x)
        y = torch.empty(36)
    double[(1,)](x, y, 36, BLOCK=64)
    with triton_loom.sanitize():
        assert not unwritten(y)
    with triton_loom.sanitize():
        z = torch.empty(36)
        with triton_loom.sanitize():
            double[(1,)](x, z, 36, BLOCK=64)
        assert not unwritten(z)


def test_an_update_of_unwritten_memory_reads_it() -> None:
    x, bins = torch.zeros(10, dtype=torch.int64), 4
    with triton_loom.sanitize(collect=True) as seen:
        histogram[(1,)](x, torch.empty(bins, dtype=torch.int32), 10, BLOCK=64)
    (finding,) = seen.findings
    assert (finding.kind, finding.argument, finding.index) == ("uninitialised read", "bins_ptr", (0,))


# ---- order ---------------------------------------------------------------------------------------------------


@triton.jit
def add_under_a_lock(lock_ptr, x_ptr, SEM: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)  # [BLOCK]
    while tl.atomic_cas(lock_ptr, 0, 1, sem=SEM) == 1:
        pass
    tl.store(x_ptr + i, tl.load(x_ptr + i) + 1)
    tl.atomic_xchg(lock_ptr, 0, sem=SEM)


@triton.jit
def last_adds_up(
    x_ptr, parts_ptr, ticket_ptr, y_ptr, SEM: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr
):
    pid, count = tl.program_id(0), tl.num_programs(0)
    tl.store(parts_ptr + pid, tl.sum(tl.load(x_ptr + pid * BLOCK + tl.arange(0, BLOCK)), 0))
    if tl.atomic_add(ticket_ptr, 1, sem=SEM) == count - 1:
        i = tl.arange(0, MOST)
        tl.store(y_ptr, tl.sum(tl.load(parts_ptr + i, mask=i < count, other=0), 0))


@triton.jit
def pass_on(x_ptr, arrived_ptr, y_ptr, SEM: tl.constexpr, BLOCK: tl.constexpr):
    """Every program reads what its neighbour has written before a barrier of the whole grid."""
    pid, count, i = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK)
    tl.store(x_ptr + pid * BLOCK + i, pid + i)
    tl.atomic_add(arrived_ptr, 1, sem=SEM)
    while tl.atomic_add(arrived_ptr, 0, sem=SEM) < count:
        pass
    tl.store(y_ptr + pid * BLOCK + i, tl.load(x_ptr + (pid + 1) % count * BLOCK + i))


@triton.jit
def hand_over(x_ptr, flag_ptr, y_ptr, RELEASE: tl.constexpr, ACQUIRE: tl.constexpr):
    """The first program hands a number to the second."""
    if tl.program_id(0) == 0:
        tl.store(x_ptr, 42)
        tl.atomic_xchg(flag_ptr, 1, sem=RELEASE)
    else:
        while tl.atomic_add(flag_ptr, 0, sem=ACQUIRE) == 0:
            pass
        tl.store(y_ptr, tl.load(x_ptr))


@triton.jit(noinline=True)
def take_lock(lock_ptr):
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass


@triton.jit(noinline=True)
def leave_lock(lock_ptr):
    tl.atomic_xchg(lock_ptr, 0)


@triton.jit
def add_under_a_called_lock(lock_ptr, x_ptr):
    take_lock(lock_ptr)
    tl.store(x_ptr, tl.load(x_ptr) + 1)
    leave_lock(lock_ptr)


def test_atomics_of_called_functions_order_programs() -> None:
    lock, x = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with triton_loom.sanitize():
        add_under_a_called_lock[(9,)](lock, x)
    assert x == 9


def locked(sem: str) -> bool:
    x = torch.zeros(16, dtype=torch.int32)
    add_under_a_lock[(20,)](torch.zeros(1, dtype=torch.int32), x, SEM=sem, BLOCK=16)
    return bool((x == 20).all())


def ticketed(sem: str) -> bool:
    x, parts, y = (
        torch.randint(9, (20, 16), dtype=torch.int32),
        torch.empty(20, dtype=torch.int32),
        torch.zeros(1),
    )
    last_adds_up[(20,)](x, parts, torch.zeros(1, dtype=torch.int32), y, SEM=sem, BLOCK=16, MOST=32)
    return bool(y == x.sum())


def cooperative(sem: str) -> bool:
    x, y = torch.empty(5, 16, dtype=torch.int32), torch.empty(5, 16, dtype=torch.int32)
    arrived = torch.zeros(1, dtype=torch.int32)
    pass_on[(5,)](x, arrived, y, SEM=sem, BLOCK=16, launch_cooperative_grid=True)
    return torch.equal(y, (torch.arange(5).roll(-1)[:, None] + torch.arange(16)).int())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("run", [locked, ticketed, cooperative])
def test_order_by_atomics(run: Callable[[str], bool], threads: int) -> None:
    torch.set_num_threads(threads)
    with triton_loom.sanitize(collect=True) as seen:
        assert run("acq_rel")
    assert not seen.findings, "\n".join(map(str, seen.findings))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("run", [locked, ticketed, cooperative])
def test_relaxed_atomics_order_nothing(run: Callable[[str], bool], threads: int) -> None:
    torch.set_num_threads(threads)
    with triton_loom.sanitize(collect=True) as seen:
        run("relaxed")
    assert set(kinds(seen.findings)) == {"race"}
    for finding in seen.findings:
        assert finding.argument in ("x_ptr", "parts_ptr"), "atomics themselves don't race"


@pytest.mark.parametrize(
    ("release", "acquire", "ordered"),
    [
        ("release", "acquire", True),
        ("acq_rel", "acq_rel", True),
        ("relaxed", "acquire", False),
        ("release", "relaxed", False),
        ("acquire", "release", False),
    ],
)
def test_both_sides_must_take_part(release: str, acquire: str, ordered: bool) -> None:
    x, flag, y = (torch.zeros(1, dtype=torch.int32) for _ in range(3))
    with triton_loom.sanitize(collect=True) as seen:
        hand_over[(2,)](x, flag, y, RELEASE=release, ACQUIRE=acquire, launch_cooperative_grid=True)
    assert y.item() == 42
    assert kinds(seen.findings) == ([] if ordered else ["race"])


@triton.jit
def store_at(y_ptr, at_ptr):
    tl.store(y_ptr + tl.load(at_ptr + tl.program_id(0)), tl.program_id(0))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32], ids=short)
def test_only_the_same_bytes_race(dtype: torch.dtype) -> None:
    y = torch.zeros(64, dtype=dtype)
    with triton_loom.sanitize(collect=True) as seen:
        store_at[(64,)](y, torch.randperm(64))
        assert not seen.findings
        torch.set_num_threads(1)
        store_at[(64,)](y, torch.arange(64).clamp(max=60))
    (finding,) = seen.findings
    assert (finding.kind, finding.count, finding.index, finding.launch) == ("race", 3, (60,), 1)
    assert finding.program == (61, 0, 0)
    assert "program (60, 0, 0)" in finding.detail


def test_no_race_goes_unnoticed_between_threads() -> None:
    """Programs that store at the same moment, on two threads."""
    torch.set_num_threads(2)
    y, at = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    with triton_loom.sanitize(collect=True) as seen:
        for _ in range(400):
            store_at[(2,)](y, at)
    assert seen.launches == 400
    assert 400 - len(seen.findings) == 0, "launches that race and were not reported"


@triton.jit
def store_and_count(x_ptr, ticket_ptr, most):
    tl.store(x_ptr + tl.program_id(0), 1.0)
    tl.device_assert(tl.atomic_add(ticket_ptr, 1) < most, "stop")


def test_a_failed_launch_leaves_nothing_behind() -> None:
    torch.set_num_threads(1)
    x, ticket = torch.zeros(66), torch.zeros(1, dtype=torch.int32)
    with triton_loom.sanitize(collect=True) as seen:
        with pytest.raises(triton_loom.DeviceAssertion):
            store_and_count[(66,)](x, ticket, 65, debug=True)
        ticket.zero_()
        store_and_count[(66,)](x, ticket, 1000, debug=True)
    assert not seen.findings, "\n".join(map(str, seen.findings))


@triton.jit
def copy_positive(x_ptr, y_ptr, at):
    x = tl.load(x_ptr + at)
    tl.device_assert(x > 0, "positive")
    tl.store(y_ptr, x)


def test_a_failed_launch_tells_what_it_found() -> None:
    """The load outside gives the zero that the assertion stumbles over."""
    with triton_loom.sanitize(collect=True) as seen, pytest.raises(triton_loom.DeviceAssertion):
        copy_positive[(1,)](torch.ones(8)[:4], torch.zeros(1), 5, debug=True)
    assert kinds(seen.findings) == ["out-of-bounds load"]
    assert seen.launches == 1


# ---- scopes --------------------------------------------------------------------------------------------------

ALLOCATING = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")]


def state() -> list[Any]:
    """What a scope changes, and has to put back."""
    return [
        driver._active,
        *(getattr(owner, name) for owner, name in ALLOCATING),
        "new_full" in vars(torch.Tensor),
    ]


def launch_outside() -> None:
    """Reads one element too many."""
    x = torch.zeros(64)
    double[(1,)](x[:20], x[32:60], 21, BLOCK=64)


@pytest.mark.parametrize("dry", [False, True])
def test_scopes_put_everything_back(dry: bool) -> None:
    before = state()
    with triton_loom.sanitize(dry=dry), triton_loom.count():
        assert state() != before
    assert state() == before
    with pytest.raises(ZeroDivisionError), triton_loom.count(), triton_loom.sanitize(dry=dry):
        raise ZeroDivisionError
    assert state() == before
    with pytest.raises(triton_loom.SanitizerError) as raised, triton_loom.sanitize(dry=dry):
        launch_outside()
    assert state() == before
    assert kinds(raised.value.findings) == ["out-of-bounds load"]
    launch_outside()  # nobody looks any more


def test_nested_counts() -> None:
    x, y = torch.ones(64), torch.zeros(64)
    with triton_loom.count() as outer:
        with triton_loom.count() as inner:
            double[(1,)](x, y, 64, BLOCK=64)
        double[(1,)](x, y, 20, BLOCK=64)
    assert [launch.loads.requested for launch in outer.launches] == [256, 80]
    assert [launch.loads.requested for launch in inner.launches] == [256]
    assert outer.launches[0].grid == (1, 1, 1)


def test_nested_sanitizers() -> None:
    """The innermost one is told."""
    with triton_loom.sanitize(collect=True) as outer:
        launch_outside()
        with triton_loom.sanitize(collect=True) as inner:
            launch_outside()
        with pytest.raises(triton_loom.SanitizerError), triton_loom.sanitize():
            launch_outside()
        assert unwritten(torch.empty(4))
    assert kinds(inner.findings) == ["out-of-bounds load"]
    assert kinds(outer.findings) == ["out-of-bounds load", "uninitialised read"]
    assert (inner.launches, outer.launches) == (1, 2)


@pytest.mark.parametrize("order", ["count inside", "sanitize inside"])
def test_counts_of_a_sanitized_launch(order: str) -> None:
    case = gather_of_repeated_rows()
    with triton_loom.count() as alone:
        case.launch()
    if order == "count inside":
        with triton_loom.sanitize() as seen, triton_loom.count() as counted:
            case.launch()
    else:
        with triton_loom.count() as counted, triton_loom.sanitize() as seen:
            case.launch()
    assert seen.launches == 1
    assert counted.launches == alone.launches


def test_choosing_the_cpu_inside_a_scope() -> None:
    with triton_loom.sanitize(collect=True) as seen, triton_loom.count() as counted, triton_loom.active():
        launch_outside()
    assert (len(seen.findings), len(counted.launches)) == (1, 1)


def test_launches_of_two_threads() -> None:
    """Each launch is told by itself, whoever else launches."""
    rounds = 25
    errors: list[BaseException] = []

    def launch(n: int) -> None:
        try:
            x, y = torch.arange(512.0), torch.zeros(512)
            for _ in range(rounds):
                double[(triton.cdiv(n, 64),)](x, y[: n - 1], n, BLOCK=64)
                assert torch.equal(y[: n - 1], 2 * x[: n - 1])
                assert not y[n - 1 :].any()
        except BaseException as error:
            errors.append(error)

    with triton_loom.sanitize(collect=True) as seen, triton_loom.count() as counted:
        threads = [threading.Thread(target=launch, args=(n,)) for n in (100, 500)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors
    assert seen.launches == len(counted.launches) == 2 * rounds
    assert sorted(finding.launch for finding in seen.findings) == list(range(2 * rounds))
    assert {finding.index for finding in seen.findings} == {(99,), (499,)}
    assert sorted(launch.loads.requested for launch in counted.launches) == [400] * rounds + [2000] * rounds


def test_a_finding_says_it_all() -> None:
    source = Path(__file__).read_text().splitlines()
    with triton_loom.sanitize(collect=True) as seen:
        double[(2,)](torch.ones(128), torch.zeros(128), 128, BLOCK=64)
        launch_outside()
    (finding,) = seen.findings
    assert source[finding.line - 1].strip().startswith("tl.store(y_ptr + i, 2 * tl.load")
    launched = finding.launched_from.rsplit(":", 1)
    assert launched[0] == finding.file == __file__
    assert source[int(launched[1]) - 1].strip().startswith("double[(1,)](x[:20]")
    assert (finding.launch, finding.program, finding.index, finding.count) == (1, (0, 0, 0), (20,), 1)
    for part in (
        f"{__file__}:{finding.line}",
        "double",
        "(0, 0, 0)",
        "x_ptr",
        "(20,)",
        "launch 1",
        finding.launched_from,
    ):
        assert part in str(finding)
    assert "\n" not in str(finding)


def test_a_finding_names_the_file_that_was_run(tmp_path: Path) -> None:
    """Although Triton's cache takes the same kernel in another directory for the same kernel."""
    for place in ("here", "there"):
        path = tmp_path / place / "module.py"
        path.parent.mkdir()
        path.write_text(KERNEL.replace("wrong line", "wrong line of a module"))
        spec = importlib.util.spec_from_file_location(place, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        with triton_loom.sanitize(collect=True) as seen:
            module.double[(1,)](torch.ones(40)[:20], torch.zeros(40), 21, BLOCK=64)
        assert [finding.file for finding in seen.findings] == [str(path)]


def test_meta_tensors() -> None:
    x, y = torch.empty(1 << 40, device="meta"), torch.empty(1 << 40, device="meta")
    with triton_loom.sanitize(collect=True, dry=True) as seen:
        double[(3,)](x, y, 190, BLOCK=64)
        assert not seen.findings
        double[(3,)](x[:100], y, 101, BLOCK=64)
    (finding,) = seen.findings
    assert (finding.kind, finding.index, finding.program) == ("out-of-bounds load", (100,), (1, 0, 0))


@triton.jit
def copy_in_tuples(pair, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(pair[1] + i, tl.load(pair[0] + i, mask=i < n), mask=i < n)


def test_meta_tensors_in_tuples() -> None:
    x, y = torch.empty(1 << 40, device="meta"), torch.empty(1 << 40, device="meta")
    with triton_loom.sanitize(collect=True) as seen:
        copy_in_tuples[(3,)]((x[:100], y), 101, BLOCK=64)
    (finding,) = seen.findings
    assert (finding.kind, finding.argument, finding.index) == ("out-of-bounds load", "pair[0]", (100,))


def test_dry_launches_store_nothing() -> None:
    x, y = torch.ones(64), torch.zeros(64)
    with triton_loom.sanitize(dry=True) as seen:
        double[(1,)](x, y, 64, BLOCK=64)
    assert seen.launches == 1
    assert not y.any()


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "200", **environment},
    )


KERNEL = """
import sys
import torch, triton, triton.language as tl, triton_loom

@triton.jit
def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)  # wrong line
    tl.store(y_ptr + i, 2 * x, mask=i < n)
"""
WRONG = KERNEL + "\ndouble[(1,)](torch.ones(40)[:20], torch.zeros(40), 21, BLOCK=64)\nprint('went on')\n"
WRONG_LINE = 1 + next(i for i, line in enumerate(WRONG.splitlines()) if "wrong line" in line)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str, name: str = "script.py") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_dry_launches_touch_no_memory(script: Callable[[str], str]) -> None:
    """Tensors of 8 GB each; the process grows by less than 100 MB. (Allocations of the tests themselves are filled.)"""
    path = script(
        KERNEL
        + """
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

n = 1 << 32
with triton_loom.sanitize(collect=True, dry=True) as seen:
    double[(1,)](torch.ones(64), torch.ones(64), 64, BLOCK=1024)
    before = resident()
    x, y = torch.empty(n, dtype=torch.int16), torch.empty(n, dtype=torch.int16)
    double[(triton.cdiv(n, 1024),)](x, y, n, BLOCK=1024)
    assert not seen.findings, seen.findings
    double[(triton.cdiv(n, 1024),)](x, y[:-3], n, BLOCK=1024)
print(resident() - before, *[(f.kind, f.count, f.index) for f in seen.findings])
"""
    )
    run = run_python(path)
    assert run.returncode == 0, run.stderr
    grown, finding = run.stdout.split(" ", 1)
    assert ast.literal_eval(finding) == ("out-of-bounds store", 3, ((1 << 32) - 3,))
    assert int(grown) < 100


@pytest.mark.parametrize("value", ["1", "collect"])
def test_asking_by_environment(value: str, script: Callable[[str], str]) -> None:
    path = script(WRONG)
    run = run_python(path, TRITON_LOOM_SANITIZE=value)
    assert run.returncode == (1 if value == "1" else 0), f"exit code {run.returncode}\n{run.stderr[-2000:]}"
    assert run.stdout == ("" if value == "1" else "went on\n")
    assert ("SanitizerError" in run.stderr) == (value == "1")
    assert f"{Path(path).name}:{WRONG_LINE}: out-of-bounds load in double" in run.stderr


def test_asking_for_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_LOOM_SANITIZE", "yes")
    with pytest.raises(ValueError, match="'yes'"):
        triton_loom.driver.LoomDriver()


def test_pytest_option_and_fixture(script: Callable[..., str], tmp_path: Path) -> None:
    text = (
        KERNEL
        + """
def launch(n):
    double[(1,)](torch.ones(40)[:20], torch.zeros(40), n, BLOCK=64)

def test_right():
    launch(20)

def test_wrong():
    launch(21)

def test_right_with_fixture(loom_sanitizer):
    launch(20)
    assert loom_sanitizer.launches == 1

def test_wrong_with_fixture(loom_sanitizer):
    launch(21)
"""
    )
    path = script(text.replace("wrong line", "wrong line of a test"), "test_script.py")
    flags = ["-m", "pytest", path, "-q", "-rA", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull]
    run = run_python(*flags, "--loom-sanitize")
    assert run.returncode == 1, run.stdout
    assert {*re.findall(r"^(\w+) \S*::(\w+)", run.stdout, re.M)} == {
        ("PASSED", "test_right"),
        ("FAILED", "test_wrong"),
        ("PASSED", "test_right_with_fixture"),
        ("FAILED", "test_wrong_with_fixture"),
    }
    assert f"test_script.py:{WRONG_LINE}: out-of-bounds load" in run.stdout
    run = run_python(*flags, "-k", "wrong")
    assert {*re.findall(r"^(\w+) \S*::(\w+)", run.stdout, re.M)} == {
        ("PASSED", "test_wrong"),
        ("FAILED", "test_wrong_with_fixture"),
    }


def test_report_of_an_example() -> None:
    run = run_python("-m", "triton_loom", "report", str(test_examples.EXAMPLES / "01_vector_add.py"))
    assert run.returncode == 0, run.stdout + run.stderr
    assert "max error" in run.stdout
    assert "bytes moved" in run.stdout
    for row in (r"add_kernel", r"x_ptr\W+loads\W+\d", r"out_ptr\W+stores\W+\d"):
        assert re.search(row, run.stdout), row
    assert "0 findings" in run.stdout


def test_report_of_a_mistake(script: Callable[[str], str]) -> None:
    path = script(WRONG)
    run = run_python("-m", "triton_loom", "report", path)
    assert run.returncode == 1, run.stdout + run.stderr
    assert run.stdout.startswith("went on\n")
    assert f"{Path(path).name}:{WRONG_LINE}: out-of-bounds load in double" in run.stdout
    assert re.search(r"x_ptr\W+loads\W+80\b", run.stdout)
    assert "1 findings" in run.stdout


# ---- kernels in which nothing is wrong ---------------------------------------------------------------------------

EXAMPLES: dict[str, Callable[[], Any]] = {
    "vector_add": lambda: test_examples.run_vector_add(),
    "fused_softmax": lambda: test_examples.run_fused_softmax(),
    "matmul": lambda: test_examples.matmul.matmul(torch.randn(100, 70), torch.randn(70, 90), "leaky_relu"),
    "dropout": lambda: test_examples.run_dropout(),
    "layer_norm": lambda: test_examples.run_layer_norm(),
    "flash_attention": lambda: [
        test_examples.flash_attention.attention(*torch.randn(3, 2, 2, 100, 64).unbind(), causal)
        for causal in (False, True)
    ],
}


@pytest.mark.parametrize("run", EXAMPLES.values(), ids=EXAMPLES)
def test_examples_are_clean(run: Callable[[], Any]) -> None:
    with triton_loom.sanitize(collect=True) as seen:
        run()
    assert seen.launches
    assert not seen.findings, "\n".join(map(str, seen.findings))


def liger_findings(monkeypatch: pytest.MonkeyPatch, chosen: Callable[[Any], bool]) -> list[str]:
    """Liger's ops of test_liger, forward and backward; Liger is let through and its tuning cut short as there."""
    pytest.importorskip("liger_kernel")
    import test_liger
    from liger_kernel.ops import dyt

    monkeypatch.setattr(dyt, "infer_device", lambda: "npu")
    for kernel in (dyt._dyt_fwd_kernel, dyt._dyt_bwd_kernel):
        monkeypatch.setattr(kernel, "configs", kernel.configs[::9])
    findings = []
    for case in filter(chosen, test_liger.CASES):
        for dtype in case.dtypes:
            inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in case.inputs())
            with triton_loom.sanitize(collect=True) as seen:
                test_liger.outputs_and_gradients(case.liger, inputs, case.wrt, dtype)
            assert seen.launches, case.name
            findings += [f"{case.name} {short(dtype)}: {finding}" for finding in seen.findings]
    return findings


def test_some_of_liger_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not liger_findings(monkeypatch, lambda case: case.name in ("rms_norm", "cross_entropy", "swiglu"))


@pytest.mark.slow
def test_liger_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not liger_findings(monkeypatch, lambda case: True)


# ---- what it costs -----------------------------------------------------------------------------------------------

COST = """
import statistics, time
from contextlib import nullcontext
import torch, triton_loom, weft

x, w = torch.randn(8192, 2048).bfloat16(), torch.rand(2048).bfloat16()
scopes = [nullcontext, triton_loom.count, triton_loom.sanitize]

def seconds(scope):
    with torch.no_grad(), scope():
        start = time.perf_counter()
        weft.rms_norm(x, w, quantize="1x128")
        return time.perf_counter() - start

for scope in scopes:
    seconds(scope)
for _ in range(3):
    rounds = [[seconds(scope) for scope in scopes] for _ in range(5)]
    print(*(statistics.median(times) for times in zip(*rounds)))
"""


def test_cost(script: Callable[[str], str]) -> None:
    """A fused norm of 8192x2048, natively, counted and sanitized in turn: medians of five, the best of three rounds.

    In a process of its own, where nothing else fills allocations."""
    pytest.importorskip("weft")
    run = run_python(script(COST))
    assert run.returncode == 0, run.stderr
    rounds = [[float(part) for part in line.split()] for line in run.stdout.splitlines()]
    assert len(rounds) == 3
    counted = min(count / native for native, count, _ in rounds)
    sanitized = min(sanitize / native for native, _, sanitize in rounds)
    assert counted <= 6, f"counted: {counted:.1f}x"
    assert sanitized <= 12, f"sanitized: {sanitized:.1f}x"
