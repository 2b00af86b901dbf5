"""Atomic updates: every kind and type, old values, contention, locks, barriers, reproducible results."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from support import FLOATS, random_values, short
from triton_loom.testing import Guarded, assert_same, words

WIDE_INTEGERS = [torch.int32, torch.int64, torch.uint32, torch.uint64]
THREADS = [1, 2, 4]


@triton.jit
def update_once(x_ptr, target_ptr, old_ptr, n, BLOCK: tl.constexpr):
    """Update the first n lanes of row r of the target by the r-th operation; store the old values."""
    offs = tl.arange(0, BLOCK)
    x, on = tl.load(x_ptr + offs), offs < n
    tl.store(old_ptr + offs, tl.atomic_add(target_ptr + offs, x, on), on)
    tl.store(old_ptr + BLOCK + offs, tl.atomic_max(target_ptr + BLOCK + offs, x, on), on)
    tl.store(old_ptr + 2 * BLOCK + offs, tl.atomic_min(target_ptr + 2 * BLOCK + offs, x, on), on)
    tl.store(old_ptr + 3 * BLOCK + offs, tl.atomic_xchg(target_ptr + 3 * BLOCK + offs, x, on), on)
    tl.store(old_ptr + 4 * BLOCK + offs, tl.atomic_and(target_ptr + 4 * BLOCK + offs, x, on), on)
    tl.store(old_ptr + 5 * BLOCK + offs, tl.atomic_or(target_ptr + 5 * BLOCK + offs, x, on), on)
    tl.store(old_ptr + 6 * BLOCK + offs, tl.atomic_xor(target_ptr + 6 * BLOCK + offs, x, on), on)


@triton.jit
def update_floats_once(x_ptr, target_ptr, old_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x, on = tl.load(x_ptr + offs), offs < n
    tl.store(old_ptr + offs, tl.atomic_add(target_ptr + offs, x, on), on)
    tl.store(old_ptr + BLOCK + offs, tl.atomic_max(target_ptr + BLOCK + offs, x, on), on)
    tl.store(old_ptr + 2 * BLOCK + offs, tl.atomic_min(target_ptr + 2 * BLOCK + offs, x, on), on)
    tl.store(old_ptr + 3 * BLOCK + offs, tl.atomic_xchg(target_ptr + 3 * BLOCK + offs, x, on), on)


@pytest.mark.compat
@pytest.mark.parametrize("dtype", [*WIDE_INTEGERS, torch.float32, torch.float64], ids=short)
def test_update_and_old_value(dtype: torch.dtype) -> None:
    block, n = 64, 49
    floating = dtype.is_floating_point
    x, start = random_values(block, dtype), random_values((4 if floating else 7, block), dtype)
    target, old = Guarded.of(start), Guarded(start.shape, dtype)
    before = old.tensor.clone()
    kernel = update_floats_once if floating else update_once
    kernel[(1,)](x, target.tensor, old.tensor, n, BLOCK=block)
    a, b = start.numpy(), x.numpy()
    with np.errstate(over="ignore"):
        want = [a[0] + b, np.maximum(a[1], b), np.minimum(a[2], b), b]
    if not floating:
        want += [a[4] & b, a[5] | b, a[6] ^ b]
    on = np.arange(block) < n
    assert_same(target.check(), np.where(on, np.stack(want), a))
    got = old.check()
    assert_same(words(got[:, :n]), words(start[:, :n]))
    assert_same(words(got[:, n:]), words(before[:, n:]))


@triton.jit
def add_floats(x_ptr, target_ptr, old_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    old = tl.atomic_add(target_ptr + offs, tl.load(x_ptr + offs), offs % 3 != 0, sem="relaxed", scope="cta")
    tl.store(old_ptr + offs, old, offs % 3 != 0)


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_float_sums_round_once(dtype: torch.dtype) -> None:
    x, start = random_values(128, dtype), random_values(128, dtype)
    target, old = start.clone(), torch.zeros(128, dtype=dtype)
    add_floats[(1,)](x, target, old, BLOCK=128)
    on = torch.arange(128) % 3 != 0
    assert_same(target, torch.where(on, start + x, start))
    assert_same(old, torch.where(on, start, 0))


# ---- contention ------------------------------------------------------------------------------------------


@triton.jit
def contend(x_ptr, sums_ptr, bounds_ptr, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """Make all lanes of all programs contend for a few addresses."""
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + offs)
    tl.atomic_add(sums_ptr + offs % BINS, x)
    tl.atomic_add(sums_ptr + BINS, 1)
    tl.atomic_max(bounds_ptr, tl.max(x, 0))
    one = bounds_ptr + offs * 0
    tl.atomic_min(one + 1, x)
    tl.atomic_xor(one + 2, x)
    tl.atomic_or(one + 3, x)
    tl.atomic_and(one + 4, x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=short)
def test_integer_results_don_t_depend_on_threads(dtype: torch.dtype) -> None:
    block, bins, count = 64, 4, 500
    x = random_values((count, block), dtype)
    a = x.numpy()
    sums = a.reshape(count, -1, bins).sum((0, 1), dtype=a.dtype)
    ufuncs = (np.maximum, np.minimum, np.bitwise_xor, np.bitwise_or, np.bitwise_and)
    bounds = [f.reduce(a, None) for f in ufuncs]
    for threads in THREADS:
        torch.set_num_threads(threads)
        got_sums = torch.zeros(bins + 1, dtype=dtype)
        got_bounds = torch.tensor([torch.iinfo(dtype).min, torch.iinfo(dtype).max, 0, 0, -1], dtype=dtype)
        contend[(count,)](x, got_sums, got_bounds, BLOCK=block, BINS=bins)
        assert_same(got_sums, np.array([*sums, count], a.dtype), f"{threads} threads")
        assert_same(got_bounds, np.array(bounds, a.dtype), f"{threads} threads")


@triton.jit
def accumulate(x_ptr, total_ptr, columns_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, offs < n, 0.0)
    tl.atomic_add(total_ptr, tl.sum(x, 0))
    tl.atomic_add(columns_ptr + offs % 7, x, offs < n)


@pytest.mark.compat
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_float_sums_don_t_depend_on_threads(dtype: torch.dtype) -> None:
    n = 10_007
    x = random_values(n, dtype)
    results = []
    for threads in THREADS * 2:
        torch.set_num_threads(threads)
        total, columns = torch.zeros(1, dtype=dtype), torch.zeros(7, dtype=dtype)
        accumulate[(triton.cdiv(n, 64),)](x, total, columns, n, BLOCK=64)
        results.append((words(total).item(), words(columns).tolist()))
    assert results == [results[0]] * len(results)
    truth = math.fsum(x.double().tolist())
    scale = x.double().norm().item()  # rounding errors of a sum grow with the square root of its length
    assert abs(total.double().item() - truth) <= 8 * torch.finfo(dtype).eps * scale * math.sqrt(n / 64)


# ---- compare and swap, locks, tickets ----------------------------------------------------------------------


@triton.jit
def swap_if_equal(target_ptr, old_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    dtype: tl.constexpr = target_ptr.dtype.element_ty
    old = tl.atomic_cas(target_ptr + offs, (offs % 4).to(dtype), (offs * 10).to(dtype))
    tl.store(old_ptr + offs, old)


@pytest.mark.compat
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.uint32], ids=short)
def test_compare_and_swap_of_tiles(dtype: torch.dtype) -> None:
    offs = torch.arange(64)
    start = torch.randint(0, 4, (64,)).to(dtype)
    target, old = start.clone(), torch.empty_like(start)
    swap_if_equal[(1,)](target, old, BLOCK=64)
    assert_same(old, start)
    assert_same(target, torch.where(start.long() == offs % 4, offs * 10, start.long()).to(dtype))


@triton.jit
def update_under_a_lock(lock_ptr, x_ptr, total_ptr, count_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + offs)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(total_ptr + offs, tl.load(total_ptr + offs) + x)
    tl.store(count_ptr, tl.load(count_ptr) + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


@pytest.mark.compat
@pytest.mark.parametrize("threads", THREADS)
def test_lock(threads: int) -> None:
    torch.set_num_threads(threads)
    x = torch.randint(-99, 99, (300, 64)).float()
    lock, count = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    total = torch.zeros(64)
    update_under_a_lock[(300,)](lock, x, total, count, BLOCK=64)
    assert lock.item() == 0
    assert count.item() == 300
    assert_same(total, x.sum(0))


@triton.jit
def take_tickets(counter_ptr, order_ptr, last_ptr, out_ptr):
    ticket = tl.atomic_add(counter_ptr, 1)
    tl.store(order_ptr + ticket, tl.program_id(0))
    if ticket == tl.num_programs(0) - 1:  # the last one to arrive finishes the work
        tl.atomic_xchg(counter_ptr, 0)
        tl.store(last_ptr, tl.program_id(0))
    else:
        tl.atomic_add(out_ptr, 1)


@pytest.mark.compat
def test_tickets_are_given_out_once() -> None:
    for threads in THREADS:
        torch.set_num_threads(threads)
        counter, last, out = torch.zeros(3, 1, dtype=torch.int32)
        order = torch.full((1000,), -1, dtype=torch.int32)
        take_tickets[(1000,)](counter, order, last, out)
        assert_same(order.sort().values, torch.arange(1000, dtype=torch.int32))
        assert (counter.item(), out.item()) == (0, 999)
        assert last.item() == order[-1].item()


# ---- programs that wait for each other ---------------------------------------------------------------------


@triton.jit
def grid_barrier(arrived_ptr, target):
    tl.atomic_add(arrived_ptr, 1, sem="release")
    while tl.atomic_add(arrived_ptr, 0, sem="acquire") < target:
        pass


@triton.jit
def neighbors(x_ptr, y_ptr, arrived_ptr, rounds, BLOCK: tl.constexpr):
    """Add the right neighbor's tile of the previous round in each round: all programs wait for each other."""
    pid, count = tl.program_id(0), tl.num_programs(0)
    offs = tl.arange(0, BLOCK)
    for i in range(rounds):
        mine = tl.load(x_ptr + pid * BLOCK + offs)
        other = tl.load(x_ptr + (pid + 1) % count * BLOCK + offs)
        tl.store(y_ptr + pid * BLOCK + offs, mine + other)
        grid_barrier(arrived_ptr, (2 * i + 1) * count)
        tl.store(x_ptr + pid * BLOCK + offs, tl.load(y_ptr + pid * BLOCK + offs))
        grid_barrier(arrived_ptr, (2 * i + 2) * count)


@pytest.mark.compat
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_cooperative_grid(count: int, threads: int) -> None:
    torch.set_num_threads(threads)
    x = torch.randint(0, 99, (count, 32), dtype=torch.int32)
    want = x.clone()
    for _ in range(3):
        want = want + want.roll(-1, 0)
    y, arrived = torch.empty_like(x), torch.zeros(1, dtype=torch.int32)
    neighbors[(count,)](x, y, arrived, 3, BLOCK=32, launch_cooperative_grid=True)
    assert_same(x, want)
