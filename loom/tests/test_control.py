"""Control flow, functions, arguments and grids, and messages from a kernel to its caller."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton_loom import DeviceAssertion
from triton_loom.testing import Guarded, assert_same

# ---- loops -----------------------------------------------------------------------------------------------


@triton.jit
def count_trips(out_ptr, start, stop, step):
    up = 0
    for i in range(start, stop, step):
        up = up * 3 + i
    tl.store(out_ptr, up)
    hinted = 0
    for i in tl.range(start, stop, step, num_stages=2, loop_unroll_factor=2):
        hinted = hinted * 3 + i
    tl.store(out_ptr + 1, hinted)
    down = 0
    for i in range(stop, start, -2):
        down = down * 3 + i
    tl.store(out_ptr + 2, down)
    unrolled = 0
    for i in tl.static_range(1, 9, 3):
        unrolled = unrolled * 3 + i
    tl.store(out_ptr + 3, unrolled)
    wide = tl.full([], 0, tl.int64)
    for i in range(start.to(tl.int64), stop, step):
        wide += i * 1_000_000_000
    tl.store(out_ptr + 4, wide)
    i = start
    while i < stop and i < 12:
        i += step
    tl.store(out_ptr + 5, i)


@pytest.mark.compat
@pytest.mark.parametrize(
    ("start", "stop", "step"), [(0, 10, 1), (3, 3, 2), (7, 2, 3), (-5, 14, 4), (2, 3, 100)]
)
def test_loop_bounds(start: int, stop: int, step: int) -> None:
    def rolled(numbers: range) -> int:
        total = 0
        for i in numbers:
            total = total * 3 + i
        return total

    trips = range(start, stop, step)
    leave = start
    while leave < stop and leave < 12:
        leave += step
    want = [rolled(trips), rolled(trips), rolled(range(stop, start, -2)), rolled(range(1, 9, 3))]
    want += [sum(trips) * 1_000_000_000, leave]
    out = torch.empty(6, dtype=torch.int64)
    count_trips[(1,)](out, start, stop, step)
    assert out.tolist() == want


@triton.jit
def carry_tiles(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    a, b, c = offs, offs * 10, tl.load(x_ptr + offs)
    for i in range(n):
        a, b, c = b, c + i, a
    tl.store(out_ptr + offs, a)
    tl.store(out_ptr + BLOCK + offs, b)
    tl.store(out_ptr + 2 * BLOCK + offs, c)
    p, q = tl.load(x_ptr + offs), tl.load(x_ptr + BLOCK + offs)
    for _ in range(n):
        p, q = q, p
    tl.store(out_ptr + 3 * BLOCK + offs, p - q * 2)
    total, last = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for i in range(n):
        for j in range(i):
            x = tl.load(x_ptr + (i + j) % 2 * BLOCK + offs)
            total += x * j
            last = tl.where(x > total, x, last + 1)
        total -= last
    tl.store(out_ptr + 4 * BLOCK + offs, total)
    tl.store(out_ptr + 5 * BLOCK + offs, last)


@pytest.mark.compat
@pytest.mark.parametrize("n", [0, 1, 2, 5, 8])
def test_tiles_carried_by_loops(n: int) -> None:
    block = 64
    x = torch.randint(-1000, 1000, (2, block), dtype=torch.int32)
    offs = torch.arange(block, dtype=torch.int32)
    a, b, c = offs, offs * 10, x[0]
    p, q = x
    for i in range(n):
        a, b, c = b, c + i, a
        p, q = q, p
    total, last = torch.zeros_like(offs), torch.zeros_like(offs)
    for i in range(n):
        for j in range(i):
            total = total + x[(i + j) % 2] * j
            last = torch.where(x[(i + j) % 2] > total, x[(i + j) % 2], last + 1)
        total = total - last
    out = torch.empty(6, block, dtype=torch.int32)
    carry_tiles[(1,)](x, out, n, BLOCK=block)
    assert_same(out, torch.stack([a, b, c, p - q * 2, total, last]))


@triton.jit
def carry_squares(x_ptr, out_ptr, n, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + i * N + j)
    y = x * 0 + 1
    row = tl.sum(x, 1)
    for step in range(n):
        x, y = tl.trans(x) + y, tl.trans(y) - x
        x += row[None, :] * step
        row = tl.sum(x, 0) - row
    tl.store(out_ptr + i * N + j, x)
    tl.store(out_ptr + N * N + i * N + j, y)
    tl.store(out_ptr + 2 * N * N + tl.arange(0, N), row)


@pytest.mark.parametrize("n", [0, 1, 4])
@pytest.mark.parametrize("size", [4, 32])
def test_transposed_tiles_carried_by_loops(size: int, n: int) -> None:
    x = torch.randint(-9, 9, (size, size), dtype=torch.int32)
    out = torch.empty(2 * size * size + size, dtype=torch.int32)
    carry_squares[(1,)](x, out, n, N=size)
    y, row = torch.ones_like(x), x.sum(1)
    for step in range(n):
        x, y = x.T + y, y.T - x
        x = x + row[None, :] * step
        row = x.sum(0) - row
    assert_same(out, torch.cat([x.flatten(), y.flatten(), row]).int())


@triton.jit
def repeat_while(x_ptr, out_ptr, limit, BLOCK: tl.constexpr):
    """Halve a tile until its maximum is small; the number of rounds depends on the data."""
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + offs)
    previous = offs
    rounds = 0
    while tl.max(x, 0) > limit:
        previous, x = x, x // 2 + (offs % 3 == rounds % 3).to(tl.int32)
        inner = tl.sum(x, 0)
        while inner > 100_000:
            inner = inner // 3
            x -= 1
        rounds += 1
    out_ptr += tl.program_id(0) * (2 * BLOCK + 1)
    tl.store(out_ptr + offs, x)
    tl.store(out_ptr + BLOCK + offs, previous)
    tl.store(out_ptr + 2 * BLOCK, rounds)


@pytest.mark.compat
def test_while_loops_with_tiles() -> None:
    block, limit = 32, 20
    starts = torch.randint(0, 1 << 20, (6, block), dtype=torch.int32) >> torch.arange(0, 18, 3)[:, None]
    starts = starts.int()
    starts[-1] = 3  # not a single round
    offs = np.arange(block)
    want = []
    for x in starts.numpy().astype(np.int64):
        previous, rounds = offs, 0
        while x.max() > limit:
            previous, x = x, x // 2 + (offs % 3 == rounds % 3)
            inner = x.sum()
            while inner > 100_000:
                inner //= 3
                x = x - 1
            rounds += 1
        want.append(np.concatenate([x, previous, [rounds]]))
    out = torch.empty(6, 2 * block + 1, dtype=torch.int32)
    repeat_while[(6,)](starts, out, limit, BLOCK=block)
    assert_same(out, np.stack(want).astype(np.int32))


# ---- branches --------------------------------------------------------------------------------------------


@triton.jit
def branch(x_ptr, out_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + pid * BLOCK + offs)
    first = tl.load(x_ptr + pid * BLOCK)
    scale, y = 1, x
    if first > 10:
        y = x * 2 + offs
        scale = 3
        if first > 50:
            y, x = x, y
    elif first > 0:
        y = -x
        scale += pid
    else:
        x = tl.sum(x, 0) + offs
    if pid % 2 == 1:
        x += scale
    carried = x if first % 2 == 0 else y
    out_ptr += pid * 3 * BLOCK
    tl.store(out_ptr + offs, x)
    tl.store(out_ptr + BLOCK + offs, y * scale)
    tl.store(out_ptr + 2 * BLOCK + offs, carried)


@pytest.mark.compat
def test_branches_that_yield_tiles() -> None:
    block, count = 32, 16
    x = torch.randint(-100, 100, (count, block), dtype=torch.int32)
    x[:4, 0] = torch.tensor([90, 20, 5, -5])
    offs = torch.arange(block)
    want = []
    for pid, tile in enumerate(x.long()):
        first = int(tile[0])
        scale, y = 1, tile
        if first > 10:
            y, scale = tile * 2 + offs, 3
            if first > 50:
                y, tile = tile, y
        elif first > 0:
            y, scale = -tile, 1 + pid
        else:
            tile = tile.sum() + offs
        if pid % 2 == 1:
            tile = tile + scale
        want.append(torch.stack([tile, y * scale, tile if first % 2 == 0 else y]))
    out = torch.empty(count, 3, block, dtype=torch.int32)
    branch[(count,)](x, out, BLOCK=block)
    assert_same(out, torch.stack(want).int())


@triton.jit
def return_early(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    if pid >= n:
        return
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + pid * BLOCK + offs)
    total = tl.sum(x, 0)
    if total < 0:
        tl.store(out_ptr + pid * BLOCK + offs, -x)
        return
    if total % 2 == 0:
        x = x * 3
        if total % 4 == 0:
            tl.store(out_ptr + pid * BLOCK + offs, x + 1)
            return
    tl.store(out_ptr + pid * BLOCK + offs, x)


@triton.jit
def absolute(x):
    if x < 0:
        return -x
    return x


@triton.jit
def return_from_functions(out_ptr):
    pid = tl.program_id(0) - 4
    if absolute(pid) > 2:
        tl.store(out_ptr + pid + 4, absolute(pid) * 10)
        return
    tl.store(out_ptr + pid + 4, absolute(pid * 2))


@pytest.mark.compat
def test_early_returns() -> None:
    block, count, n = 16, 24, 20
    x = torch.randint(-20, 25, (count, block), dtype=torch.int32)
    out = Guarded((count, block), torch.int32)
    want = out.tensor.clone()
    for pid in range(n):
        total = int(x[pid].sum())
        want[pid] = -x[pid] if total < 0 else x[pid] if total % 2 else x[pid] * 3 + (total % 4 == 0)
    return_early[(count,)](x, out.tensor, n, BLOCK=block)
    assert_same(out.check(), want)
    out = torch.empty(9, dtype=torch.int32)
    return_from_functions[(9,)](out)
    assert out.tolist() == [40, 30, 4, 2, 0, 2, 4, 30, 40]


# ---- functions -------------------------------------------------------------------------------------------


@triton.jit
def add_and_subtract(x, y):
    return x + y, x - y


@triton.jit(noinline=True)
def sum_of_squares(x_ptr, n, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK), tl.arange(0, BLOCK) < n, 0)
    return tl.sum(x * x, 0)


@triton.jit(noinline=True)
def scale_in_place(x_ptr, factor, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, tl.load(x_ptr + offs) * factor)


@triton.jit(noinline=True)
def two_values(x, y):
    if x > y:
        return x - y, x * 2
    return y - x, y * 3


@triton.jit(noinline=True)
def nested_call(x, y):
    low, high = two_values(x, y)
    return low + high + 1


@triton.jit
def call_functions(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    x_ptr += pid * BLOCK
    out_ptr += pid * (BLOCK + 6)
    offs = tl.arange(0, BLOCK)
    plus, minus = add_and_subtract(tl.load(x_ptr + offs), offs)
    before = sum_of_squares(x_ptr, n, BLOCK)
    scale_in_place(x_ptr, 3, BLOCK)
    after = sum_of_squares(x_ptr, n, BLOCK)
    a, b = two_values(before, after + pid)
    tl.store(out_ptr + offs, plus * minus)
    tl.store(out_ptr + BLOCK, before)
    tl.store(out_ptr + BLOCK + 1, after)
    tl.store(out_ptr + BLOCK + 2, a)
    tl.store(out_ptr + BLOCK + 3, b)
    tl.store(out_ptr + BLOCK + 4, nested_call(pid, 2))
    tl.store(out_ptr + BLOCK + 5, nested_call(2, pid))


@pytest.mark.compat
def test_inlined_and_called_functions() -> None:
    block, count, n = 32, 5, 27
    x = torch.randint(-50, 50, (count, block), dtype=torch.int32)

    def two(a: int, b: int) -> tuple[int, int]:
        return (a - b, a * 2) if a > b else (b - a, b * 3)

    offs = torch.arange(block)
    want = []
    for pid, row in enumerate(x.long()):
        before = int((row[:n] ** 2).sum())
        numbers = [
            before,
            9 * before,
            *two(before, 9 * before + pid),
            sum(two(pid, 2)) + 1,
            sum(two(2, pid)) + 1,
        ]
        want.append(torch.cat([row * row - offs * offs, torch.tensor(numbers)]))
    scaled, out = x.clone(), torch.empty(count, block + 6, dtype=torch.int32)
    call_functions[(count,)](scaled, out, n, BLOCK=block)
    assert_same(out, torch.stack(want).int())
    assert_same(scaled, x * 3)


@triton.jit(noinline=True)
def tile_function(x_ptr, factor, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    return x * factor + tl.sum(x, 0), tl.max(x, 0), x > 0


@triton.jit
def call_for_tiles(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for i in range(n):
        tile, high, positive = tile_function(x_ptr + i * BLOCK, i + 2, BLOCK)
        other, _, _ = tile_function(x_ptr, 5, BLOCK)
        total += tl.where(positive, tile, high) - other
    tl.store(out_ptr + offs, total)


def test_called_functions_return_tiles() -> None:
    block, n = 64, 3
    x = torch.randint(-99, 99, (n, block))
    total = torch.zeros(block, dtype=torch.int64)
    for i, row in enumerate(x):
        total += torch.where(row > 0, row * (i + 2) + row.sum(), row.max()) - (x[0] * 5 + x[0].sum())
    out = torch.empty(block, dtype=torch.int32)
    call_for_tiles[(1,)](x.int(), out, n, BLOCK=block)
    assert_same(out, total.int())


# ---- arguments -------------------------------------------------------------------------------------------


class Window(NamedTuple):
    start: object
    size: object


class Job(NamedTuple):
    source: object
    window: object
    bias: object


@triton.jit
def run_job(job, pair, out_ptr, extra, nothing, BLOCK: tl.constexpr, SHAPE: tl.constexpr, NAME: tl.constexpr):
    tl.static_assert(nothing is None)
    tl.static_assert(NAME == "loom")
    offs = tl.arange(0, BLOCK)
    x = tl.load(job.source + job.window.start + offs, offs < job.window.size, 0)
    if job.bias is not None:
        x += tl.load(job.bias + offs, offs < job.window.size, 0)
    if extra[0] is None:
        x *= 2
    left, right = pair
    tl.store(out_ptr + offs, x * left + right + extra[1][0] - extra[1][1] + SHAPE[1])


@pytest.mark.compat
@pytest.mark.parametrize("with_bias", [True, False])
def test_tuples_named_tuples_and_none(with_bias: bool) -> None:
    x, bias = torch.randint(0, 99, (100,), dtype=torch.int32), torch.randint(0, 99, (32,), dtype=torch.int32)
    out = torch.empty(32, dtype=torch.int32)
    job = Job(x, Window(40, 20), bias if with_bias else None)
    extra = (None if with_bias else x, (1, 16))
    run_job[(1,)](job, (3, -4), out, extra, None, BLOCK=32, SHAPE=(2, 7), NAME="loom")
    want = torch.zeros(32, dtype=torch.int32)
    want[:20] = x[40:60] + (bias[:20] if with_bias else 0)
    assert_same(out, want * (2 if with_bias else 1) * 3 - 4 + 1 - 16 + 7)


@triton.jit
def store_arguments(int_ptr, float_ptr, small, big, huge, negative, flag, one, fraction, infinite, absent):
    tl.store(int_ptr, small)
    tl.store(int_ptr + 1, big)
    tl.store(int_ptr + 2, huge.to(tl.int64, bitcast=True))
    tl.store(int_ptr + 3, negative)
    tl.store(int_ptr + 4, flag)
    tl.store(int_ptr + 5, one)
    tl.store(float_ptr, fraction)
    tl.store(float_ptr + 1, infinite)
    tl.store(float_ptr + 2, fraction * small)


@pytest.mark.compat
def test_numbers_as_arguments() -> None:
    for flag in (True, False):
        ints, floats = torch.empty(6, dtype=torch.int64), torch.empty(3, dtype=torch.float64)
        numbers = (7, 2**40 + 1, 2**63 + 5, -(2**31) - 1, flag, 1, 0.1, -float("inf"), None)
        store_arguments[(1,)](ints, floats, *numbers)
        assert ints.tolist() == [7, 2**40 + 1, 5 - 2**63, -(2**31) - 1, int(flag), 1]
        tenth = np.float32(0.1)
        assert floats.tolist() == [tenth, -np.inf, tenth * np.float32(7)]


@triton.jit
def start_of(x_ptr, out_ptr):
    tl.store(out_ptr, tl.load(x_ptr))


def test_views_as_arguments() -> None:
    x, out = torch.arange(24.0).view(4, 6), torch.empty(1)
    for view in (x, x[2], x[1:, 3:], x.T[2], x[:, 5:6]):
        start_of[(1,)](view, out)
        assert out.item() == view.flatten()[0]


@triton.jit
def constants(
    out_ptr, A: tl.constexpr, B: tl.constexpr, F: tl.constexpr, DTYPE: tl.constexpr, FUNCTION: tl.constexpr
):
    value = tl.full([4], A * B + len(F), DTYPE)
    tl.store(out_ptr + tl.arange(0, 4), FUNCTION(value, F[1])[1])


@pytest.mark.parametrize("dtype", [tl.int16, tl.float32])
def test_constants_as_arguments(dtype: tl.dtype) -> None:
    out = torch.empty(4, dtype=torch.float64)
    constants[(1,)](out, A=6, B=7, F=(1, 5, 9), DTYPE=dtype, FUNCTION=add_and_subtract)
    assert out.tolist() == [40.0] * 4


# ---- grids -----------------------------------------------------------------------------------------------


@triton.jit
def mark_programs(out_ptr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    nx, ny, nz = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    at = (z * ny + y) * nx + x
    tl.atomic_add(out_ptr + at, x + 1000 * y + 1000_000 * z + nx * ny * nz)


@pytest.mark.compat
@pytest.mark.parametrize("grid", [(1,), (5,), (3, 4), (7, 5, 3), (1, 1, 9), (2, 300, 2)], ids=str)
def test_every_program_runs_once(grid: tuple[int, ...]) -> None:
    shape = [*grid, 1, 1][:3]
    nx, ny, nz = shape
    out = Guarded((nz, ny, nx), torch.int32)
    out.tensor.zero_()
    mark_programs[grid](out.tensor)
    z, y, x = torch.meshgrid(*(torch.arange(n) for n in reversed(shape)), indexing="ij")
    assert_same(out.check(), (x + 1000 * y + 1000_000 * z + nx * ny * nz).int())


@triton.jit
def mark_large(out_ptr):
    index = tl.program_id(0) + tl.program_id(1) + tl.program_id(2)
    tl.store(out_ptr + index, (index % 251).to(tl.uint8))


@pytest.mark.compat
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_more_programs_than_a_gpu_allows_along_an_axis(axis: int) -> None:
    count = 65_536 + 4_001
    grid = [1, 1, 1]
    grid[axis] = count
    out = torch.full((count,), 255, dtype=torch.uint8)
    mark_large[tuple(grid)](out)
    assert_same(out, (torch.arange(count) % 251).byte())


@pytest.mark.compat
@pytest.mark.parametrize("grid", [(0,), (3, 0), (0, 0, 0), (5, 2, 0)], ids=str)
def test_empty_grids_run_nothing(grid: tuple[int, ...]) -> None:
    out = torch.zeros(64, dtype=torch.int32)
    mark_programs[grid](out)
    assert not out.any()


def test_grid_from_a_function() -> None:
    out = torch.zeros(12, dtype=torch.int32)
    mark_programs[lambda meta: (triton.cdiv(45, 4),)](out)
    assert_same(out, (torch.arange(12) + 12).int())


@triton.jit
def do_nothing(x_ptr, n):
    pass


@triton.jit
def only_scalars(out_ptr, n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    tl.store(out_ptr + tl.program_id(0), a + tl.program_id(0))


@pytest.mark.compat
def test_kernels_without_tiles() -> None:
    out = torch.empty(3, dtype=torch.int32)
    do_nothing[(10,)](out, 3)
    only_scalars[(3,)](out, 30)
    assert out.tolist() == [832040, 832041, 832042]


# ---- what a kernel tells its caller ----------------------------------------------------------------------


@triton.jit
def show(x_ptr, f_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    tl.device_print("hello")
    tl.device_print("pid", pid)
    tl.device_print("tile", tl.load(x_ptr + tl.arange(0, BLOCK)))
    tl.device_print("hex", pid + 250, hex=True)
    print("float", tl.load(f_ptr + tl.arange(0, 2)[:, None] + tl.arange(0, 2)[None, :]))
    tl.device_print("two", pid, pid * 2)
    tl.device_print("bool", pid == 1)


@pytest.mark.compat
def test_device_print(capfd: pytest.CaptureFixture[str]) -> None:
    x, floats = torch.arange(-2, 2, dtype=torch.int8), torch.tensor([1.5, -2.25, 1e10])
    show[(3, 2)](x, floats, BLOCK=4)
    text = capfd.readouterr().out  # there as soon as the launch returns, in whole lines
    line = r"pid \((\d+), (\d+), 0\) idx \(([\d, ]*)\) (\w+):?(?: \(operand \d\))? ?(.*)"
    lines = [re.fullmatch(line, printed) for printed in text.splitlines()]
    assert len(lines) == 6 * 14, text
    assert all(lines), text
    for px in range(3):
        for py in range(2):
            mine = [m.groups()[2:] for m in lines if m and m.groups()[:2] == (str(px), str(py))]
            shown = {name: [(at, value) for at, n, value in mine if n == name] for _, name, _ in mine}
            assert shown["hello"] == [("", "")]
            assert shown["pid"] == [("", str(px))]
            assert shown["tile"] == [(str(i), str(i - 2)) for i in range(4)]
            assert [int(value, 16) for _, value in shown["hex"]] == [px + 250]
            assert [at for at, _ in shown["float"]] == ["0, 0", "0, 1", "1, 0", "1, 1"]
            assert [float(value) for _, value in shown["float"]] == [1.5, -2.25, -2.25, 1e10]
            assert [int(value) for _, value in shown["two"]] == [px, 2 * px]
            assert [int(value) for _, value in shown["bool"]] == [px == 1]


@triton.jit
def check_values(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + pid * BLOCK + offs)
    tl.device_assert(x >= 0, "a negative value")
    tl.device_assert(x < 1000, "a large value", mask=offs < n)
    assert pid < 100, "too many programs"
    tl.store(out_ptr + pid * BLOCK + offs, x)


def line_of(kernel: triton.JITFunction, text: str) -> int:
    source = kernel.raw_src if hasattr(kernel, "raw_src") else kernel.src.splitlines(keepends=True)
    return kernel.starting_line_number + next(i for i, line in enumerate(source) if text in line)


@pytest.mark.compat
def test_device_assert_raises_after_the_launch() -> None:
    block, count = 32, 4
    x = torch.randint(0, 999, (count, block), dtype=torch.int32)
    out = torch.empty_like(x)
    check_values[(count,)](x, out, block, BLOCK=block, debug=True)
    assert_same(out, x)

    x[2, 17] = -1
    location = rf"test_control\.py:{line_of(check_values, 'negative value')}\b"
    with pytest.raises(DeviceAssertion, match=rf"(?s){location}.*a negative value.*\(2, 0, 0\)"):
        check_values[(count,)](x, out, block, BLOCK=block, debug=True)
    check_values[(count,)](x, out, block, BLOCK=block)  # without debug there is nothing to check
    assert_same(out, x)

    x[2, 17] = 5
    x[3, 30] = 5000
    check_values[(count,)](x, out, 30, BLOCK=block, debug=True)  # masked off
    with pytest.raises(DeviceAssertion, match="a large value"):
        check_values[(count,)](x, out, 31, BLOCK=block, debug=True)
    many = torch.zeros(2, 101, block, dtype=torch.int32)
    with pytest.raises(DeviceAssertion, match="too many programs"):
        check_values[(101,)](*many, 0, BLOCK=block, debug=True)
    x[3, 30] = 0
    check_values[(count,)](x, out, block, BLOCK=block, debug=True)  # and the next launch is clean again
    x[0, 0] = -5
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.debug = True  # what TRITON_DEBUG=1 sets
        with pytest.raises(DeviceAssertion, match="a negative value"):
            check_values[(count,)](x, out, block, BLOCK=block)


@triton.jit
def add_one(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) + 1)


def test_debug_builds_find_integer_overflow() -> None:
    x = torch.tensor([2**31 - 1], dtype=torch.int32)
    line = line_of(add_one, "tl.store")
    with pytest.raises(DeviceAssertion, match=rf"test_control\.py:{line}.*overflow"):
        add_one[(1,)](x, debug=True)
    x[0] = 2**31 - 1
    add_one[(1,)](x, debug=True, sanitize_overflow=False)
    assert x.item() == -(2**31)


@triton.jit
def refuse(x_ptr, SIZE: tl.constexpr):
    tl.static_assert(SIZE > 4, "SIZE is too small")
    tl.static_print("SIZE is", SIZE)
    tl.store(x_ptr, SIZE)


def test_static_assert_and_print(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(triton.compiler.errors.CompileTimeAssertionFailure, match="SIZE is too small"):
        refuse[(1,)](x, SIZE=4)
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        refuse[(1,)](x, SIZE=5)
    assert "SIZE is 5" in re.sub(r"constexpr\[(\d+)\]", r"\1", capsys.readouterr().out)
    assert x.item() == 5


@triton.jit
def hint(x_ptr, out_ptr, n, stride, BLOCK: tl.constexpr):
    tl.assume(n > 0)
    tl.assume(stride % 4 == 0)
    row = tl.multiple_of(tl.program_id(0) * stride, 4)
    offs = tl.max_contiguous(tl.multiple_of(tl.arange(0, BLOCK), BLOCK), BLOCK)
    x = tl.load(x_ptr + row + offs, offs < n, 0)
    tl.debug_barrier()
    tl.store(out_ptr + row + tl.max_constancy(offs, 1), x * 2, offs < n)
    tl.debug_barrier()


@pytest.mark.compat
def test_hints_and_barriers_change_nothing() -> None:
    x = torch.arange(60, dtype=torch.int32).view(3, 20)
    out = Guarded((3, 17), torch.int32, (20, 1))
    hint[(3,)](x, out.tensor, 17, 20, BLOCK=32)
    assert_same(out.check(), x[:, :17] * 2)


@triton.jit
def wait_for_threads(x_ptr):
    x = tl.load(x_ptr)
    tl.inline_asm_elementwise("bar.sync 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(x_ptr, x)


@pytest.mark.compat
def test_what_a_cpu_lacks_is_refused_by_name_and_line() -> None:
    line = line_of(wait_for_threads, "inline_asm_elementwise")
    with pytest.raises(Exception, match=rf"tt\.elementwise_inline_asm.*test_control\.py:{line}\b"):
        wait_for_threads[(1,)](torch.zeros(1))
