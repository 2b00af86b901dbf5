"""Counters of the memory traffic of launches, against brute force over addresses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton_loom
import triton_loom.driver
from hypothesis import given, seed
from hypothesis import strategies as st
from support import drawn, short
from test_witness import double
from triton.tools.tensor_descriptor import TensorDescriptor
from triton_loom.testing.fixtures import SEED
from triton_loom.witness.counters import Traffic

# The byte addresses that a launch is known to touch: (program, addresses) for each access.

Touched = list[tuple[int, np.ndarray]]


def traffic(touched: Touched, size: int) -> Traffic:
    """Return the expected counters of accesses to elements of `size` bytes, counted byte by byte."""
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
    """Return the byte addresses of elements at some offsets from the first one."""
    return tensor.data_ptr() + tensor.element_size() * np.asarray(offsets, dtype=np.int64)


@dataclass
class Expected:
    """A repeatable launch, and the accesses to its tensors: argument -> loads, stores."""

    launch: Callable[[], Any]
    touched: dict[str, tuple[torch.Tensor, Touched, Touched]]
    dot_flops: int = 0

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor, _, _ in self.touched.values()]

    def check(self) -> None:
        """Assert that counts of the launch are exact with one and two threads, and that counting changes nothing."""
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


def contiguous(dtype: torch.dtype, n: int, start: int) -> Expected:
    """Return a contiguous access from any position in a sector, with a masked tail."""
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
    """Return strided accesses: every program touches a sector for each row, and shares it with others."""
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
    index = tl.load(from_ptr + rows)  # [ROWS]
    x = tl.load(x_ptr + index[:, None] * COLS + cols[None, :])  # [ROWS, COLS]
    tl.store(y_ptr + rows[:, None] * COLS + cols[None, :], x)


def gather_of_repeated_rows() -> Expected:
    x, y = torch.randn(40, 8), torch.zeros(12, 8)
    index = torch.tensor([3, 3, 3, 3, 7, 0, 7, 3, 39, 1, 1, 2])
    cols = np.arange(8)
    loads = [(p, addresses(x, index[4 * p : 4 * p + 4, None].numpy() * 8 + cols)) for p in range(3)]
    return Expected(
        lambda: gather_rows[(3,)](x, index, y, ROWS=4, COLS=8),
        {
            "x_ptr": (x, loads, []),
            "from_ptr": (index, [(p, addresses(index, np.arange(4 * p, 4 * p + 4))) for p in range(3)], []),
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
    """Return scalar accesses: programs read overlapping windows element by element; every other one stores nothing."""
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
    """Return atomic updates, each of which counts as a load and a store."""
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
    """Return accesses by a host's and a kernel's descriptor, which touch nothing outside their shapes."""
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


def test_a_kernel_that_counts_may_be_launched_after_its_scope() -> None:
    """A caller may keep a compiled kernel. It still records each byte that it touches, in memory that exists for it."""
    size = 1 << 22
    x, y = torch.ones(size), torch.zeros(size)
    with triton_loom.count() as counted:
        compiled = double[(1,)](x, y, 64, BLOCK=64)
    compiled[(size // 64, 1, 1)](x, y, size, 64)
    assert torch.equal(y, torch.full_like(y, 2))
    assert len(counted.launches) == 1


@triton.jit
def weigh(x_ptr, out_ptr, n, STEP: tl.constexpr):
    pivot = tl.arange(0, 16)
    counts, masses = tl.zeros((16, STEP), tl.int32), tl.zeros((16, STEP), tl.int64)
    for start in range(0, n, STEP):
        x = tl.load(x_ptr + start + tl.arange(0, STEP))
        rank = (tl.sqrt(x * x + 1.0) * 8).to(tl.int32)
        reaches = rank[None, :] >= pivot[:, None]  # [16, STEP]
        mass = tl.where(rank > 0, tl.exp(x) * 1024, 0.0).to(tl.int64)
        counts += reaches.to(tl.int32)
        masses += tl.where(reaches, mass[None, :], 0)
    tl.store(out_ptr + tl.arange(0, 16), tl.sum(counts, axis=1) + tl.sum(masses, axis=1))


def test_a_load_of_which_two_tiles_are_kept_is_executed_once() -> None:
    x, out = torch.randn(1024), torch.empty(16, dtype=torch.int64)
    with triton_loom.count() as counted:
        weigh[(1,)](x, out, len(x), STEP=128)
    assert counted.launches[0].arguments["x_ptr"].loads.requested == 4 * len(x)
    reaches = ((x * x + 1).sqrt() * 8).int()[None] >= torch.arange(16)[:, None]
    expected = (reaches * (1 + (x.exp() * 1024).long())).sum(1)
    assert (out - expected).abs().max() <= len(x)  # the two exponentials may differ in the last bit


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
