"""Tiles that change shape: views, permutations, joins, sorting, gathering, counting."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl
from support import FLOATS, load_tile, put, random_values, short
from triton_loom.testing import Guarded, assert_same

# Newer releases of Triton advise against reordering.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*can_reorder"),
    pytest.mark.filterwarnings("ignore:view is deprecated"),
]


def run(
    kernel: triton.JITFunction, want: list, dtype: torch.dtype, *arguments: object, **constants: object
) -> None:
    """Launch one program that stores its results one after another, and compare them with `want`."""
    flat = torch.cat([torch.as_tensor(part).reshape(-1).to(dtype) for part in want])
    guarded = Guarded(flat.shape, dtype)
    kernel[(1,)](guarded.tensor, *arguments, **constants)
    out = guarded.check()
    start = 0
    for number, part in enumerate(want):
        end = start + torch.as_tensor(part).numel()
        assert_same(out[start:end], flat[start:end], f"result {number}")
        start = end


# ---- views and permutations ------------------------------------------------------------------------------


@triton.jit
def permute_every_way(out_ptr, x_ptr, SHAPE: tl.constexpr, SIZE: tl.constexpr, ORDERS: tl.constexpr):
    x = load_tile(x_ptr, SHAPE, SIZE)
    for i in tl.static_range(len(ORDERS)):
        out_ptr = put(out_ptr, tl.permute(x, ORDERS[i]))
        # once more as part of arithmetic that is not elementwise in the same index
        out_ptr = put(out_ptr, tl.permute(x * 2 + 1, ORDERS[i]) - 1)


@pytest.mark.parametrize("shape", [(4, 8), (32, 2), (4, 8, 16), (16, 1, 4), (2, 4, 8, 16)], ids=str)
def test_permutations(shape: tuple[int, ...]) -> None:
    x = random_values(shape, torch.int32)
    orders = list(itertools.permutations(range(len(shape))))[1:][:: 3 if len(shape) == 4 else 1]
    permuted = [x.permute(order) for order in orders]
    want = [part for tile in permuted for part in (tile, tile * 2)]
    run(permute_every_way, want, x.dtype, x, SHAPE=shape, SIZE=x.numel(), ORDERS=tuple(orders))


@triton.jit
def change_shape(out_ptr, x_ptr, y_ptr, A: tl.constexpr, B: tl.constexpr):
    x = load_tile(x_ptr, [A, B], A * B)
    y = tl.load(y_ptr + tl.arange(0, B))
    out_ptr = put(out_ptr, tl.reshape(x, [B, A]) + tl.arange(0, A)[None, :])
    out_ptr = put(out_ptr, tl.reshape(x, [2, A // 2, B]) * tl.arange(0, 2)[:, None, None])
    out_ptr = put(out_ptr, tl.reshape(x.T, [A * B]) - tl.arange(0, A * B))
    out_ptr = put(out_ptr, tl.trans(tl.reshape(tl.trans(x), [A, B])))
    out_ptr = put(out_ptr, tl.ravel(x) + 1)
    out_ptr = put(out_ptr, tl.expand_dims(y, 0) + tl.expand_dims(y, 1))
    out_ptr = put(out_ptr, tl.expand_dims(y, [0, 2]) * x[:, :, None])
    out_ptr = put(out_ptr, tl.broadcast_to(y[None, :], [A, B]))
    p, q = tl.broadcast(y[:, None], y[None, :])
    out_ptr = put(out_ptr, p * 3 - q)
    out_ptr = put(out_ptr, tl.sum(tl.reshape(x, [A, 2, B // 2]), 1))
    out_ptr = put(out_ptr, tl.reshape(tl.sum(x, 0), [2, B // 2]))
    out_ptr = put(out_ptr, tl.reshape(tl.trans(tl.reshape(x, [A, 2, B // 2]), 1, 0, 2), [2 * A, B // 2]))
    out_ptr = put(out_ptr, tl.max(x.reshape(1, A * B), 1).reshape([]))
    out_ptr = put(out_ptr, tl.sum(x[None, :, :], 1) + x)
    put(out_ptr, tl.sum(tl.view(x, [A * B]), 0))  # a view may reorder: only its sum is certain


@pytest.mark.compat
@pytest.mark.parametrize("shape", [(4, 16), (32, 8), (2, 2)], ids=str)
def test_views(shape: tuple[int, int]) -> None:
    a, b = shape
    x = random_values(shape, torch.int32)
    y = random_values(b, torch.int32)
    halves = x.view(a, 2, b // 2)
    want = [
        x.reshape(b, a) + torch.arange(a),
        x.reshape(2, a // 2, b) * torch.arange(2)[:, None, None],
        x.T.reshape(-1) - torch.arange(a * b),
        x.T.reshape(a, b).T,
        x + 1,
        y[None, :] + y[:, None],
        y[None, :, None] * x[:, :, None],
        y.expand(a, b),
        y[:, None] * 3 - y[None, :],
        halves.sum(1),
        x.sum(0),
        halves.permute(1, 0, 2),
        x.max(),
        x.sum(0) + x,
        x.sum(),
    ]
    run(change_shape, want, torch.int32, x, y, A=a, B=b)


@triton.jit
def make_constants(out_ptr, value, BLOCK: tl.constexpr):
    out_ptr = put(out_ptr, tl.full([4, BLOCK], 7, tl.int32))
    out_ptr = put(out_ptr, tl.full([BLOCK], value, tl.int32))
    out_ptr = put(out_ptr, tl.zeros([2, BLOCK], tl.int32))
    out_ptr = put(out_ptr, tl.zeros_like(tl.arange(0, BLOCK)))
    out_ptr = put(out_ptr, tl.full((BLOCK,), -2.5, tl.float16))
    out_ptr = put(out_ptr, tl.arange(5, 5 + BLOCK))
    out_ptr = put(out_ptr, tl.full([], 3.5, tl.float32))
    out_ptr = put(out_ptr, tl.arange(0, BLOCK)[:, None] * 100 + tl.arange(BLOCK, 2 * BLOCK)[None, :])
    out_ptr = put(out_ptr, tl.full([BLOCK], float("inf"), tl.float32))
    put(out_ptr, tl.full([BLOCK], True, tl.int1))


@pytest.mark.compat
def test_constants() -> None:
    n = 16
    offs = torch.arange(n)
    want = [
        torch.full((4, n), 7),
        torch.full((n,), -9),
        torch.zeros(2, n),
        torch.zeros(n),
        torch.full((n,), -2.5),
    ]
    want += [offs + 5, 3.5, offs[:, None] * 100 + offs + n, torch.full((n,), torch.inf), torch.ones(n)]
    run(make_constants, want, torch.float64, -9, BLOCK=n)


@triton.jit(do_not_specialize=["rows", "cols"])
def store_transposed(
    x_ptr, y_ptr, z_ptr, sum_ptr, rows, cols, BATCH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Store the transposed matrices of x in y, and of x + x in z; `sum` gets the row sums of y."""
    matrix, row, col = tl.arange(0, BATCH), tl.arange(0, ROWS), tl.arange(0, COLS)
    exists = (row < rows)[None, :, None] & (col < cols)[None, None, :]
    offsets = matrix[:, None, None] * rows * cols + row[None, :, None] * cols + col[None, None, :]
    turned_exists = (row < rows)[None, None, :] & (col < cols)[None, :, None]
    turned_place = matrix[:, None, None] * rows * cols + col[None, :, None] * rows + row[None, None, :]
    x = tl.load(x_ptr + offsets, exists, 0)
    transposed = tl.permute(x, (0, 2, 1))
    tl.store(y_ptr + turned_place, transposed, turned_exists)
    twice = tl.permute(x + x, (0, 2, 1))
    tl.store(z_ptr + turned_place, twice, turned_exists)
    total = tl.sum(transposed.to(tl.float64), axis=1)  # [BATCH, ROWS]
    tl.store(sum_ptr + matrix[:, None] * rows + row[None, :], total, (row < rows)[None, :])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.int64], ids=short)
@pytest.mark.parametrize("shape", [(1, 16, 16), (2, 13, 32), (1, 128, 61), (4, 3, 17), (1, 40, 5)], ids=str)
def test_transposed_tiles_are_stored(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    batch, rows, cols = shape
    x = torch.randint(0, 100, shape).to(dtype)  # sums of whole numbers are exact
    y, z = (Guarded((batch, cols, rows), dtype) for _ in range(2))
    total = Guarded((batch, rows), torch.float64)
    blocks = {"ROWS": triton.next_power_of_2(rows), "COLS": triton.next_power_of_2(cols)}
    store_transposed[(1,)](x, y.tensor, z.tensor, total.tensor, rows, cols, BATCH=batch, **blocks)
    assert_same(y.check(), x.transpose(1, 2).contiguous())
    assert_same(z.check(), (x + x).transpose(1, 2).contiguous())
    assert_same(total.check(), x.double().sum(2))


# ---- joining and splitting -------------------------------------------------------------------------------


@triton.jit
def join_and_split(out_ptr, x_ptr, y_ptr, A: tl.constexpr, B: tl.constexpr):
    x, y = load_tile(x_ptr, [A, B], A * B), load_tile(y_ptr, [A, B], A * B)
    joined = tl.join(x, y)
    out_ptr = put(out_ptr, joined)
    left, right = tl.split(joined * 2)
    out_ptr = put(out_ptr, left - right)
    out_ptr = put(out_ptr, tl.interleave(x, y))
    out_ptr = put(out_ptr, tl.join(x, tl.load(y_ptr)))
    even, odd = tl.split(tl.reshape(x, [A, B // 2, 2]))
    out_ptr = put(out_ptr, even)
    out_ptr = put(out_ptr, odd)
    out_ptr = put(out_ptr, tl.interleave(-odd, even))
    low, high = tl.split(tl.permute(tl.reshape(x, [A, 2, B // 2]), 0, 2, 1))
    out_ptr = put(out_ptr, tl.reshape(tl.permute(tl.join(-high, low), 0, 2, 1), [A, B]))
    out_ptr = put(out_ptr, tl.cat(tl.ravel(x), tl.ravel(y), can_reorder=True))
    ab, cd = tl.split(tl.reshape(x, [A * B // 4, 2, 2]))
    a, c = tl.split(ab)
    b, d = tl.split(cd)
    out_ptr = put(out_ptr, a + 2 * b + 3 * c + 4 * d)
    first, second = tl.split(tl.join(tl.sum(x), tl.sum(y)))
    put(put(out_ptr, first), second)


@triton.jit
def concatenate(out_ptr, x_ptr, y_ptr, A: tl.constexpr, B: tl.constexpr):
    x, y = load_tile(x_ptr, [A, B], A * B), load_tile(y_ptr, [A, B], A * B)
    out_ptr = put(out_ptr, tl.cat(x, y, dim=0))
    out_ptr = put(out_ptr, tl.cat(x, y, dim=1))
    put(out_ptr, tl.cat(x > 0, y > 0, dim=1).to(tl.int32))


@pytest.mark.compat
@pytest.mark.parametrize("shape", [(4, 32), (8, 4), (2, 2)], ids=str)
def test_join_split_interleave_cat(shape: tuple[int, int]) -> None:
    a, b = shape
    x, y = random_values((2, *shape), torch.int32)
    even, odd = x[:, ::2], x[:, 1::2]
    low, high = x[:, : b // 2], x[:, b // 2 :]
    quads = x.view(-1, 2, 2)
    want = [
        torch.stack([x, y], -1),
        x * 2 - y * 2,
        torch.stack([x, y], -1),
        torch.stack([x, y[0, 0].expand(shape)], -1),
        even,
        odd,
        torch.stack([-odd, even], -1),
        torch.cat([-high, low], 1),
        torch.cat([x.flatten(), y.flatten()]),
        quads[:, 0, 0] + 2 * quads[:, 0, 1] + 3 * quads[:, 1, 0] + 4 * quads[:, 1, 1],
        x.sum(),
        y.sum(),
    ]
    run(join_and_split, want, torch.int32, x, y, A=a, B=b)
    want = [torch.cat([x, y]), torch.cat([x, y], 1), torch.cat([x > 0, y > 0], 1)]
    run(concatenate, want, torch.int32, x, y, A=a, B=b)


@triton.jit
def join_in_dtype(out_ptr, x_ptr, y_ptr, BLOCK: tl.constexpr):
    x, y = tl.load(x_ptr + tl.arange(0, BLOCK)), tl.load(y_ptr + tl.arange(0, BLOCK))
    out_ptr = put(out_ptr, tl.interleave(x, y))
    left, right = tl.split(tl.reshape(tl.interleave(y, x), [BLOCK, 2]))
    out_ptr = put(out_ptr, left)
    out_ptr = put(out_ptr, right)
    out_ptr = put(out_ptr, tl.trans(tl.join(x, y)))
    put(out_ptr, tl.flip(x, 0))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int64, torch.bool, *FLOATS], ids=short)
def test_join_in_every_width(dtype: torch.dtype) -> None:
    x, y = random_values((2, 32), dtype)
    want = [torch.stack([x, y], -1), y, x, x, y, x.flip(0)]
    run(join_in_dtype, want, dtype, x, y, BLOCK=32)


# ---- order -----------------------------------------------------------------------------------------------


@triton.jit
def flip_every_axis(out_ptr, x_ptr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    x = load_tile(x_ptr, [A, B, C], A * B * C)
    out_ptr = put(out_ptr, tl.flip(x, 0))
    out_ptr = put(out_ptr, tl.flip(x, 1))
    out_ptr = put(out_ptr, tl.flip(x, 2))
    put(out_ptr, tl.flip(x, -1))


@pytest.mark.compat
def test_flip() -> None:
    x = random_values((4, 8, 16), torch.float32)
    run(flip_every_axis, [x.flip(0), x.flip(1), x.flip(2), x.flip(2)], torch.float32, x, A=4, B=8, C=16)


@triton.jit
def sort_rows(out_ptr, x_ptr, A: tl.constexpr, B: tl.constexpr, K: tl.constexpr):
    x = load_tile(x_ptr, [A, B], A * B)
    out_ptr = put(out_ptr, tl.sort(x))
    out_ptr = put(out_ptr, tl.sort(x, descending=True))
    put(out_ptr, tl.topk(x, K))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.int32, (4, 16)),
        (torch.float32, (2, 128)),
        (torch.float32, (1, 1024)),
        (torch.int64, (8, 4)),
        (torch.uint8, (2, 32)),
        (torch.int16, (1, 64)),
        (torch.float16, (2, 32)),
        (torch.bfloat16, (2, 32)),
        (torch.uint32, (1, 32)),
        (torch.float64, (2, 16)),
    ],
    ids=lambda p: short(p) or str(p),
)
def test_sort_and_topk(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = random_values(shape, dtype)
    if dtype in FLOATS:
        x[0, :2] = torch.tensor([torch.inf, -torch.inf])
        x[x == 0] = 1
    x[:, 2] = x[:, 3]
    k = min(8, shape[1])
    wide = torch.float64 if dtype in FLOATS else torch.int64
    ascending = x.to(wide).sort(1).values
    descending = ascending.flip(1)
    run(sort_rows, [ascending, descending, descending[:, :k]], wide, x, A=shape[0], B=shape[1], K=k)


@triton.jit
def sort_with_index(x_ptr, key_ptr, index_ptr, BLOCK: tl.constexpr):
    """Sort values with their index packed into one 64-bit key, the usual way to argsort."""
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    key = tl.sort((x.to(tl.int64) << 32) | offs.to(tl.int64))
    tl.store(key_ptr + offs, (key >> 32).to(tl.int32))
    tl.store(index_ptr + offs, (key & 0xFFFFFFFF).to(tl.int32))


@pytest.mark.compat
def test_argsort_by_packed_keys() -> None:
    x = torch.randint(-50, 50, (128,), dtype=torch.int32)
    keys, index = torch.empty_like(x), torch.empty_like(x)
    sort_with_index[(1,)](x, keys, index, BLOCK=128)
    want, order = torch.sort(x, stable=True)
    assert_same(keys, want)
    assert_same(index, order.int())


# ---- gather, where, histogram ----------------------------------------------------------------------------


@triton.jit
def gather_along(
    out_ptr,
    x_ptr,
    index_ptr,
    SHAPE: tl.constexpr,
    SIZE: tl.constexpr,
    INDEX_SHAPE: tl.constexpr,
    INDEX_SIZE: tl.constexpr,
    AXIS: tl.constexpr,
):
    x, index = load_tile(x_ptr, SHAPE, SIZE), load_tile(index_ptr, INDEX_SHAPE, INDEX_SIZE)
    out_ptr = put(out_ptr, tl.gather(x, index, AXIS))
    put(out_ptr, tl.gather(x * 3, index, AXIS) + index)


GATHERS = [((64,), 0, 64), ((16,), 0, 128), ((8, 32), 0, 4), ((8, 32), 1, 64), ((8, 4), -1, 2)]
GATHERS += [((4, 8, 16), 0, 8), ((4, 8, 16), 1, 8), ((4, 8, 16), 2, 4)]


@pytest.mark.parametrize(
    ("index_dtype", "shape", "axis", "count"),
    [(torch.int32, *case) for case in GATHERS]
    + [(torch.int64, (8, 16), 1, 8), (torch.uint8, (8, 16), 0, 8), (torch.int16, (64,), 0, 64)],
    ids=lambda p: short(p) or str(p),
)
def test_gather_along_an_axis(
    index_dtype: torch.dtype, shape: tuple[int, ...], axis: int, count: int
) -> None:
    x = random_values(shape, torch.int32)
    index_shape = list(shape)
    index_shape[axis] = count
    index = torch.randint(0, shape[axis], index_shape)
    tile = {"SHAPE": shape, "SIZE": x.numel()}
    tile |= {"INDEX_SHAPE": tuple(index_shape), "INDEX_SIZE": index.numel()}
    want = x.gather(axis, index)
    run(gather_along, [want, want * 3 + index], torch.int32, x, index.to(index_dtype), **tile, AXIS=axis)


@triton.jit
def choose(out_ptr, x_ptr, flag, A: tl.constexpr, B: tl.constexpr):
    rows, cols = tl.arange(0, A), tl.arange(0, B)
    x = load_tile(x_ptr, [A, B], A * B)
    out_ptr = put(out_ptr, tl.where((rows % 2 == 0)[:, None], x, cols[None, :]))
    out_ptr = put(out_ptr, tl.where(cols[None, :] > 3, x, -1))
    out_ptr = put(out_ptr, tl.where(flag > 0, x, x * 2))
    out_ptr = put(out_ptr, tl.where(rows[:, None] >= cols[None, :], 1, 0))
    out_ptr = put(out_ptr, tl.where(x > 0, rows[:, None], cols[None, :]))
    put(out_ptr, tl.where(flag > 0, 11, 22))


@pytest.mark.compat
@pytest.mark.parametrize("flag", [3, 0])
def test_where_broadcasts(flag: int) -> None:
    a, b = 8, 32
    x = random_values((a, b), torch.int32)
    rows, cols = torch.arange(a)[:, None], torch.arange(b)[None, :]
    want = [
        torch.where(rows % 2 == 0, x, cols),
        torch.where(cols > 3, x, -1),
        x if flag > 0 else x * 2,
        rows >= cols,
        torch.where(x > 0, rows, cols),
        11 if flag > 0 else 22,
    ]
    run(choose, want, torch.int32, x, flag, A=a, B=b)


@triton.jit
def count_bins(out_ptr, x_ptr, n, BLOCK: tl.constexpr, BINS: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    out_ptr = put(out_ptr, tl.histogram(x, BINS))
    out_ptr = put(out_ptr, tl.histogram(x, BINS, mask=offs < n))
    out_ptr = put(out_ptr, tl.histogram(x, BINS, mask=x % 2 == 0))
    put(out_ptr, tl.cumsum(tl.histogram(x // 2, BINS), 0))


@pytest.mark.compat
@pytest.mark.parametrize(("block", "bins"), [(512, 64), (32, 128), (1024, 2)], ids=str)
def test_histogram(block: int, bins: int) -> None:
    x = torch.randint(0, bins, (block,), dtype=torch.int32)
    n = block * 2 // 3
    counted = [x, x[:n], x[x % 2 == 0], x // 2]
    want = torch.stack([torch.bincount(values, minlength=bins) for values in counted])
    want[3] = want[3].cumsum(0)
    run(count_bins, list(want), torch.int32, x, n, BLOCK=block, BINS=bins)


# ---- a scalar function for each element ------------------------------------------------------------------


@triton.jit
def collatz(n, limit):
    steps = 0
    while n > 1 and steps < limit:
        if n % 2 == 0:  # noqa: SIM108, a branch is what is tested
            n = n // 2
        else:
            n = 3 * n + 1
        steps += 1
    return steps, n


@triton.jit
def swap_pair(a, b):
    return b, a * 2


@triton.jit
def map_scalars(out_ptr, x_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    steps, last = tl.map_elementwise(collatz, x, tl.full([BLOCK], 50, tl.int32))
    out_ptr = put(out_ptr, steps)
    out_ptr = put(out_ptr, last)
    put(out_ptr, tl.map_elementwise(swap_pair, x, pack=2)[0])


def test_map_elementwise() -> None:
    x = torch.randint(1, 200, (64,), dtype=torch.int32)

    def steps_from(n: int) -> tuple[int, int]:
        steps = 0
        while n > 1 and steps < 50:
            n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
        return steps, n

    steps, last = zip(*(steps_from(n) for n in x.tolist()), strict=True)
    pairs = torch.stack([x[1::2], x[::2] * 2], -1)
    run(map_scalars, [torch.tensor(steps), torch.tensor(last), pairs], torch.int32, x, BLOCK=64)


@triton.jit
def groups_of_a_kept_tile(out_ptr, x_ptr, times, TILE: tl.constexpr, G: tl.constexpr):
    """Keep a tile for the loop, and read it again group by group: as many groups as a vector has lanes."""
    x = tl.load(x_ptr + tl.arange(0, TILE)[None, :]).to(tl.float32)
    groups = tl.reshape(x, (1, TILE // G, G))
    largest = tl.max(groups, axis=2)
    spread = tl.reshape(groups * largest[:, :, None], (1, TILE))
    for i in range(times):
        tl.store(out_ptr + i * TILE + tl.arange(0, TILE)[None, :], spread)
        tl.store(out_ptr + times * TILE + i * (TILE // G) + tl.arange(0, TILE // G)[None, :], largest)


def test_groups_of_a_kept_tile() -> None:
    x = torch.randn(512).bfloat16()
    largest = x.float().view(16, 32).amax(1)
    spread = x.float().view(16, 32) * largest[:, None]
    run(groups_of_a_kept_tile, [spread, spread, largest, largest], torch.float32, x, 2, TILE=512, G=32)
