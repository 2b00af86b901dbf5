"""tl.sort, tl.topk and tl.bitonic_merge as their networks, bit for bit, NaN and signed zeros included.

The truth is Triton's definition of a compare-and-swap, `where((x > y) != (flip ^ is_right), y, x)`, applied element by
element by `exchange`. It differs from a sort where numbers can't be compared: a pair with a NaN becomes two copies of
one of them.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import compilers
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton_loom
from compilers import COMPILERS, TARGETS
from numpy.typing import NDArray
from support import FLOATS, INTEGERS, compat, load_tile, put, random_values, short
from triton_loom.ir.sorting import Merge
from triton_loom.testing import Guarded, assert_same

Array = NDArray[Any]

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SPECIAL = [0.0, -0.0, float("nan"), 1.0, -1.0, float("inf"), -float("inf"), 5e-8]


def exchange(order: Array, keys: Array, merge: Merge) -> Array:
    """Return the order of elements after the compare-and-swaps of a merge; keys[order] are the keys before."""
    positions = np.arange(order.size)
    distance = merge.first
    while distance >= merge.last:
        other = positions ^ distance
        larger = ((positions & distance) != 0) ^ ((positions & merge.flip) != 0) ^ merge.descending
        swap = (keys[order] > keys[order[other]]) != larger
        order = np.where(swap, order[other], order)
        distance //= 2
    return order


def sorting(length: int, descending: bool) -> list[Merge]:
    """Return the merges that sort runs of `length` elements: each doubles the runs, and reverses every other one."""
    lengths = [2**i for i in range(1, length.bit_length())]
    return [Merge(n // 2, 1, n if n < length else 0, descending and n == length) for n in lengths]


def network(x: torch.Tensor, merges: list[Merge]) -> torch.Tensor:
    keys = (x.float() if x.dtype in (torch.float16, torch.bfloat16) else x).numpy().reshape(-1)
    order = np.arange(keys.size)
    for merge in merges:
        order = exchange(order, keys, merge)
    return x.view(BITS[x.itemsize]).reshape(-1)[torch.from_numpy(order)].reshape(x.shape)


def mixed_values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return random numbers, a third of them from a few that are equal or not comparable."""
    x = random_values(shape, dtype)
    candidates = torch.tensor(SPECIAL).to(dtype) if dtype in FLOATS else random_values(3, dtype)
    bits, candidates = x.view(BITS[x.itemsize]), candidates.view(BITS[x.itemsize])
    chosen = candidates[torch.randint(len(candidates), shape)]
    return torch.where(torch.rand(shape) < 0.33, chosen, bits).view(dtype)


# ---- tl.sort ---------------------------------------------------------------------------------------------


@triton.jit
def sort_both_ways(out_ptr, x_ptr, SHAPE: tl.constexpr, SIZE: tl.constexpr):
    x = load_tile(x_ptr, SHAPE, SIZE)
    out_ptr = put(out_ptr, tl.sort(x))
    put(out_ptr, tl.sort(x, descending=True))


def run_both_ways(x: torch.Tensor) -> Any:
    """Sort the rows, compare, and return the compiled kernel."""
    out = Guarded((2, *x.shape), x.dtype)
    kernel = sort_both_ways[(1,)](out.tensor, x, SHAPE=tuple(x.shape), SIZE=x.numel())
    for descending, got in enumerate(out.check()):
        want = network(x, sorting(x.shape[-1], bool(descending)))
        assert_same(got.view(want.dtype), want, f"descending: {bool(descending)}")
    return kernel


@pytest.mark.parametrize("dtype", compat([*INTEGERS, *FLOATS], torch.float32, torch.uint16), ids=short)
def test_every_type(dtype: torch.dtype) -> None:
    kernel = run_both_ways(mixed_values((2, 256), dtype))
    assert (
        kernel.asm["c"].count("sort_network<") == 3
    )  # the last merge, one way and the other, and what comes before
    assert "reduce<" not in kernel.asm["c"]


SHAPES = [(2,), (4, 1), (16, 2), (2, 4), (8,), (2, 2, 16), (1, 1024)]


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16], ids=short)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    run_both_ways(mixed_values(shape, dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64], ids=short)
def test_under_the_witness(dtype: torch.dtype) -> None:
    x = mixed_values((4, 32), dtype)
    with triton_loom.sanitize() as seen, triton_loom.count() as counted:
        run_both_ways(x)
    assert seen.findings == []
    (launch,) = counted.launches
    assert launch.loads.distinct == x.nbytes
    assert launch.stores.distinct == 2 * x.nbytes


@triton.jit
def sort_in_a_loop(out_ptr, x_ptr, times, SHAPE: tl.constexpr, SIZE: tl.constexpr):
    x = load_tile(x_ptr, SHAPE, SIZE)
    for _ in range(times):
        x = tl.sort(x) ^ 0x55
    once = tl.sort(x)
    out_ptr = put(out_ptr, once)
    put(out_ptr, tl.sort(once, descending=True))  # of a tile that is needed as it was, too


def test_a_sorted_tile_is_sorted_again() -> None:
    x = random_values((4, 64), torch.int32)
    out = Guarded((2, 4, 64), torch.int32)
    sort_in_a_loop[(1,)](out.tensor, x, 3, SHAPE=(4, 64), SIZE=256)
    for _ in range(3):
        x = x.sort().values ^ 0x55
    assert_same(out.check(), torch.stack([x.sort().values, x.sort(descending=True).values]))


@triton.jit
def merge_and_topk(out_ptr, x_ptr, A: tl.constexpr, B: tl.constexpr, K: tl.constexpr):
    x = load_tile(x_ptr, [A, B], A * B)
    out_ptr = put(out_ptr, tl.bitonic_merge(x))
    out_ptr = put(out_ptr, tl.bitonic_merge(x, descending=True))
    put(out_ptr, tl.topk(x, K))


@pytest.mark.compat
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16], ids=short)
def test_merge_and_topk(dtype: torch.dtype) -> None:
    x = random_values((4, 64), dtype)
    x[x == 0] = 1  # tl.topk uses tl.max, which may choose between zeros
    out = Guarded((2 * 256 + 4 * 16,), dtype)
    kernel = merge_and_topk[(1,)](out.tensor, x, A=4, B=64, K=16)
    merged = [network(x, [Merge(32, 1, 0, descending)]).view(dtype) for descending in (False, True)]
    parts = [*merged, x.sort(descending=True).values[:, :16].contiguous()]
    assert_same(out.check(), torch.cat([part.reshape(-1) for part in parts]))
    assert kernel.asm["c"].count("sort_network<") == 2 + 3  # once before each halving, and at the end


@pytest.mark.compat
def test_a_sort_is_a_small_kernel() -> None:
    """Text and scratch are small: written one by one, 55 compare-and-swaps would take 110 kB and 36 MB."""
    constants = {"SHAPE": (64, 1024), "SIZE": 65536, "grid": (1,)}
    kernel = sort_both_ways.warmup(torch.float32, torch.float32, **constants)
    assert len(kernel.asm["c"]) < 5000
    assert kernel.metadata.scratch_bytes == 3 * 65536 * 4


# ---- what is recognized, and what is not -----------------------------------------------------------------


@triton.jit
def place_bit(DIM: tl.constexpr):
    """Return the index along dimension DIM of four, with extent two."""
    bit = tl.arange(0, 2)
    for d in tl.static_range(4):
        bit = bit if d == DIM else tl.expand_dims(bit, d if d < DIM else -1)
    return bit


@triton.jit
def exchange_once(out_ptr, x_ptr, FORM: tl.constexpr):
    """Exchange pairs at distance four, of sixteen elements."""
    x = load_tile(x_ptr, [2, 2, 2, 2], 16)
    y = x ^ tl.xor_sum(x, 1, True)
    bit = place_bit(1)
    if FORM == "plain":
        out_ptr = put(out_ptr, tl.where((x > y) != (bit == 1), y, x))
    elif FORM == "flipped":
        out_ptr = put(out_ptr, tl.where((x > y) != ((bit ^ place_bit(0)) == 1), y, x))
    elif FORM == "descending":
        out_ptr = put(out_ptr, tl.where((x > y) != ((bit ^ 1) == 1), y, x))
    elif FORM == "not less":
        out_ptr = put(out_ptr, tl.where((x >= y) != (bit == 1), y, x))
    elif FORM == "other way round":
        out_ptr = put(out_ptr, tl.where((y > x) != (bit == 1), y, x))
    elif FORM == "everywhere":
        out_ptr = put(out_ptr, tl.where((x > y) != (place_bit(0) == 1), y, x))
    elif FORM == "inner flip":
        out_ptr = put(out_ptr, tl.where((x > y) != ((bit ^ place_bit(3)) == 1), y, x))
    elif FORM == "unequal":
        out_ptr = put(out_ptr, tl.where((x > y) == (bit == 1), y, x))
    else:
        tl.static_assert(FORM == "another tile")
        z = x ^ tl.xor_sum(x + 1, 1, True)
        out_ptr = put(out_ptr, tl.where((x > z) != (bit == 1), z, x))
    put(out_ptr, y)  # an intermediate value of the network may be needed separately


def exchanged_once(x: Array, form: str) -> Array:
    positions = np.arange(16)
    bit, outer, inner = (positions >> 2 & 1 == 1), (positions >> 3 & 1 == 1), (positions & 1 == 1)
    y = x[positions ^ 4]
    z = x ^ ((x + 1) ^ (y + 1))
    take, other = {
        "plain": ((x > y) != bit, y),
        "flipped": ((x > y) != (bit ^ outer), y),
        "descending": ((x > y) == bit, y),
        "not less": ((x >= y) != bit, y),
        "other way round": ((y > x) != bit, y),
        "everywhere": ((x > y) != outer, y),
        "inner flip": ((x > y) != (bit ^ inner), y),
        "unequal": ((x > y) == bit, y),
        "another tile": ((x > z) != bit, z),
    }[form]
    return np.concatenate([np.where(take, other, x), y])


FORMS = {"plain": True, "flipped": True, "descending": True}
FORMS |= dict.fromkeys(
    ("not less", "other way round", "everywhere", "inner flip", "unequal", "another tile"), False
)


@pytest.mark.compat
@pytest.mark.parametrize(("form", "recognized"), FORMS.items())
def test_one_exchange(form: str, recognized: bool) -> None:
    x = torch.randint(0, 4, (16,), dtype=torch.int32)
    out = Guarded((32,), torch.int32)
    kernel = exchange_once[(1,)](out.tensor, x, FORM=form)
    assert_same(out.check(), torch.from_numpy(exchanged_once(x.numpy(), form)))
    assert ("sort_network<" in kernel.asm["c"]) == recognized


# ---- include/sort.h, per compiler and instruction set ----------------------------------------------------

TYPES = {
    **{f"{kind}{bits}": np.dtype(f"{kind}{bits // 8}") for kind in "iu" for bits in (8, 16, 32, 64)},
    "f32": np.dtype("f4"),
    "f64": np.dtype("f8"),
}
# A complete sort; and distances that end above a register, begin below one, and are left out.
NETWORKS = [
    sorting(128, True),
    [Merge(64, 64, 128, False), Merge(64, 16, 0, True), Merge(8, 2, 32, False), Merge(4, 1, 8, True)],
    sorting(2, False),
]
KEYS = dict.fromkeys(TYPES, "x") | {"bf16": "f32_from_bf16(x)"}
# Small tiles, which do not fill a register, for three types only.
CASES = [
    (name, number, size)
    for name in KEYS
    for number, merges in enumerate(NETWORKS)
    for size in ([2, 8, 256] if name in ("i8", "f32", "bf16") else [256])
    if size >= 2 * max(merge.first for merge in merges)
]


def source() -> str:
    lines = ['#include "casts.h"', '#include "sort.h"']
    for number, merges in enumerate(NETWORKS):
        rows = (f"{{{m.first}, {m.last}, {m.flip}, {str(m.descending).lower()}}}" for m in merges)
        lines.append(f"static const Merge network{number}[] = {{{', '.join(rows)}}};")
    for name, key in KEYS.items():
        lines.append(f"static const auto {name}_key = [](auto x) LOOM_LAMBDA {{ return {key}; }};")
    for name, number, size in CASES:
        lines += [
            f'extern "C" void {name}_{number}_{size}({"u16" if name == "bf16" else name} *tile) {{',
            f"  sort_network<{size}>(tile, network{number}, {name}_key);",
            "}",
        ]
    return "\n".join(lines)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_header(compiler: str, target: str) -> None:
    if target == "x86-64-v3" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this machine has no AVX2")
    library = compilers.library(source(), compiler, f"-march={target}")
    dtypes = {name: torch.from_numpy(np.zeros(1, t)).dtype for name, t in TYPES.items()}
    for name, number, size in CASES:
        x = mixed_values((size,), dtypes.get(name, torch.bfloat16))
        want = network(x, NETWORKS[number])
        got = x.clone()
        library[f"{name}_{number}_{size}"](ctypes.c_void_p(got.data_ptr()))
        assert_same(got.view(want.dtype), want, f"{name}, network {number}, {size} elements")
