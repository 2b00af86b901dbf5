"""The sanitizer: membership of elements in tensors, uninitialized memory, and the order of programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from support import FLOAT8, FLOATS, INTEGERS, drawn, short
from test_counters import histogram
from test_witness import double, kinds, launch_outside
from triton.runtime import driver
from triton_loom import Finding
from triton_loom.testing.fixtures import SEED

# ---- which elements a tensor has ------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["start", "n"])
def copy_at(x_ptr, at_ptr, y_ptr, start, n, STORE: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy x[at] to y, or y to x[at]. The offsets are in memory, or consecutive from `start` on."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    off = tl.load(at_ptr + i, mask=i < n, other=0) if MODE == "gather" else start + i
    if STORE:
        tl.store(x_ptr + off, tl.load(y_ptr + i, mask=i < n), mask=i < n)
    else:
        tl.store(y_ptr + i, tl.load(x_ptr + off, mask=i < n, other=0), mask=i < n)


MARGIN = 64


def check_membership(shape: Sequence[int], strides: Sequence[int]) -> None:
    """Assert that of loads and stores from before a view to after it, only those outside its elements are reported."""
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


@triton.jit(do_not_specialize=["cols"])
def select_and_turn(x_ptr, index_ptr, y_ptr, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Store row index[r] of x as column r of y."""
    row, col = tl.arange(0, ROWS), tl.arange(0, COLS)
    index = tl.load(index_ptr + row)
    x = tl.load(x_ptr + index[:, None] * COLS + col[None, :])
    tl.store(y_ptr + col[:, None] * ROWS + row[None, :], tl.trans(x), (col < cols)[:, None])


def test_rows_by_index_and_transposed_stores() -> None:
    """Every lane outside is counted, and nothing is prefetched beyond the accessed tile."""
    x, y = torch.randint(0, 100, (40, 32), dtype=torch.uint8), torch.empty(32, 64, dtype=torch.uint8)
    index = torch.randint(0, 40, (64,))
    with triton_loom.sanitize(collect=True) as seen:
        select_and_turn[(1,)](x, index, y, 32, ROWS=64, COLS=32)
    assert not seen.findings
    assert torch.equal(y, x[index].T)
    index[[3, 50]] = 40
    with triton_loom.sanitize(collect=True) as seen:
        select_and_turn[(1,)](x, index, y[:30], 32, ROWS=64, COLS=32)
    load, store = seen.findings
    assert (load.kind, load.count, load.index) == ("out-of-bounds load", 2 * 32, (40, 0))
    assert (store.kind, store.count, store.index) == ("out-of-bounds store", 2 * 64, (30, 0))


def test_neighbors_in_one_allocation_are_distinguished() -> None:
    """A row of a matrix has a definite end, although the next one follows."""
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
def test_addresses_between_elements_have_no_index(x: Callable[[], torch.Tensor], at: int) -> None:
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
    """They may point into tensor arguments and allowed tensors, but not past their ends."""
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
    """If named for a launch, they may be reached only in it, and are counted."""
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
    """The loop is reported with the value that does not fit, and left after the right number of steps."""
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
    """The loop takes no step at all, which no access could reveal."""
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
    """Return how many elements of x a launch reads unwritten, without other findings; the scope is open."""
    from triton_loom.witness.scopes import SCOPES

    seen = SCOPES.sanitizers[-1]
    before = len(seen.findings)
    sums[(1,)](x, torch.zeros(1), x.numel() if n is None else n, BLOCK=block)
    findings = seen.findings[before:]
    assert all(finding.kind == "uninitialized read" and finding.argument == "x_ptr" for finding in findings)
    return sum(finding.count for finding in findings)


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
        assert kinds(seen.findings) == ["uninitialized read"] * 2
        assert seen.findings[0].index == (0,)


def test_pytorch_operators_that_are_kernels_themselves() -> None:
    """Some projects replace PyTorch's operators: the sanitizer uses none of these to prepare memory."""
    replaced = torch.library.Library("aten", "IMPL")

    def copy_(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        scratch = torch.empty(to.numel())  # fresh memory of its own, which has to be prepared as well
        to.numpy()[...] = source.numpy() + 0 * len(scratch)
        return to

    replaced.impl("copy_", copy_, "CPU", allow_override=True)
    try:
        with triton_loom.sanitize() as seen:
            x = torch.empty(64)
            x.copy_(torch.ones(64))
            y = torch.empty(1)
            sums[(1,)](x, y, 64, BLOCK=64)
    finally:
        replaced._destroy()
    assert seen.summary == "1 launch: 1 clean"
    assert y.item() == 64


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
    """Launch without the witness inside an open scope."""
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
    """Not even written bytes equal to the pattern of unwritten memory do."""
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
    """Mark the loaded elements, a program per element."""
    i = tl.program_id(0)
    tl.store(y_ptr + i, tl.load(x_ptr + i))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ids=short)
@pytest.mark.parametrize("writer", ["kernel", "torch"])
def test_partly_written_memory(writer: str, dtype: torch.dtype) -> None:
    """The elements reported as unwritten are exactly those that neither a kernel nor torch has stored."""
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


def test_freed_memory_belongs_to_its_new_owner() -> None:
    """The allocator reuses memory; which bytes are written depends only on the new owner."""
    with triton_loom.sanitize(collect=True):
        reused = 0
        for size in (64, 4096, 1 << 20) * 3:
            x = torch.empty(size, dtype=torch.uint8)
            assert unwritten(x, 64)
            address = x.data_ptr()
            del x
            y = torch.zeros(size, dtype=torch.uint8)
            reused += y.data_ptr() == address
            assert not unwritten(y, 64)
            address = y.data_ptr()
            del y
            z = torch.empty(size, dtype=torch.uint8)
            reused += z.data_ptr() == address
            assert unwritten(z, 64)
            del z
            assert not unwritten(torch.ones(size, dtype=torch.uint8), 64)
        assert reused


def test_memory_of_other_scopes() -> None:
    """Memory allocated outside counts as written; stores of an earlier scope's launch count."""
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
    assert (finding.kind, finding.argument, finding.index) == ("uninitialized read", "bins_ptr", (0,))


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
    """Read what the neighbor program wrote before a barrier of the whole grid."""
    pid, count, i = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK)
    tl.store(x_ptr + pid * BLOCK + i, pid + i)
    tl.atomic_add(arrived_ptr, 1, sem=SEM)
    while tl.atomic_add(arrived_ptr, 0, sem=SEM) < count:
        pass
    tl.store(y_ptr + pid * BLOCK + i, tl.load(x_ptr + (pid + 1) % count * BLOCK + i))


@triton.jit
def hand_over(x_ptr, flag_ptr, y_ptr, RELEASE: tl.constexpr, ACQUIRE: tl.constexpr):
    """Pass a number from the first program to the second."""
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


@triton.jit
def add_in_scope(x_ptr, SCOPE: tl.constexpr):
    tl.atomic_add(x_ptr + tl.arange(0, 16), 1, scope=SCOPE)


@pytest.mark.parametrize(
    ("scope", "programs", "races"), [("cta", 4, True), ("cta", 1, False), ("gpu", 4, False)]
)
def test_atomics_of_a_cta_are_atomic_for_one_program(scope: str, programs: int, races: bool) -> None:
    x = torch.zeros(16, dtype=torch.int32)
    with triton_loom.sanitize(collect=True) as seen:
        add_in_scope[(programs,)](x, SCOPE=scope)
    assert [finding.kind for finding in seen.findings] == ["race"] * races
    assert all('scope="cta", which is one program' in finding.detail for finding in seen.findings)
    assert x.tolist() == [programs] * 16


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
    """The programs store at the same moment, on two threads."""
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


def test_a_failed_launch_reports_its_findings() -> None:
    """The load outside returns the zero that fails the assertion."""
    with triton_loom.sanitize(collect=True) as seen, pytest.raises(triton_loom.DeviceAssertion):
        copy_positive[(1,)](torch.ones(8)[:4], torch.zeros(1), 5, debug=True)
    assert kinds(seen.findings) == ["out-of-bounds load"]
    assert seen.launches == 1


# ---- sanitizers in each other -------------------------------------------------------------------------------


def test_nested_sanitizers() -> None:
    """The innermost one gets the findings."""
    with triton_loom.sanitize(collect=True) as outer:
        launch_outside()
        with triton_loom.sanitize(collect=True) as inner:
            launch_outside()
        with pytest.raises(triton_loom.SanitizerError), triton_loom.sanitize():
            launch_outside()
        assert unwritten(torch.empty(4))
    assert kinds(inner.findings) == ["out-of-bounds load"]
    assert kinds(outer.findings) == ["out-of-bounds load", "uninitialized read"]
    assert (inner.launches, outer.launches) == (1, 2)


# ---- names ----------------------------------------------------------------------------------------------------


@triton.jit
def named_like_the_sanitizer(x_ptr, y_ptr, n):
    for i in range(n):
        fits = tl.load(x_ptr + i) + n
        seen_load = fits * fits
        seen_store = seen_load + fits
        keeps_promise = seen_store * seen_load
        tl.store(y_ptr + i, keeps_promise + seen_store + seen_load + fits)


def test_values_may_have_the_names_of_the_sanitizers_functions() -> None:
    x, y = torch.arange(3), torch.empty(3, dtype=torch.int64)
    with triton_loom.sanitize():
        named_like_the_sanitizer[(1,)](x, y, 3)
    fits = x + 3
    squared = fits * fits
    total = squared + fits
    assert y.tolist() == (total * squared + total + squared + fits).tolist()
