"""Accesses to strided views: an element of the storage may lie in a gap of the view."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
import triton
import triton.language as tl
from triton_loom.prove import Buffer, Report, prove, symbol
from triton_loom.prove.views import _reaches

heads, tokens, stride = symbol("heads", 1, 1000), symbol("tokens", 1, 1000), symbol("stride", 1, 1000)


@triton.jit
def by_token(x_ptr, heads, DIM: tl.constexpr):
    row = tl.program_id(0) * heads + tl.program_id(1)
    tl.store(x_ptr + row * DIM + tl.arange(0, DIM), 1.0)


@triton.jit
def every_second(x_ptr):
    tl.store(x_ptr + 2 * tl.program_id(0), 1.0)


@triton.jit
def every(x_ptr):
    tl.store(x_ptr + tl.program_id(0), 1.0)


def stores_by_token(buffer: Buffer) -> Report:
    args = {"x_ptr": buffer, "heads": heads, "DIM": 8}
    return prove(by_token, grid=(tokens, heads), args=args, trials=4)


def test_views_whose_larger_strides_come_last_are_not_refuted() -> None:
    """The first dimension of a transposed tensor has the smaller stride. With one head, both strides are equal."""
    transposed = Buffer.strided("f32", (heads, tokens, 8), (8, 8 * heads, 1))
    assert stores_by_token(transposed).verdict == "proven"


def test_interleaved_strides_are_not_refuted() -> None:
    """4 = 2 * 2 is an element of a view of sizes 2, 3 and strides 3, 2, but its digits would be 1 * 3 + 1."""
    report = prove(every_second, grid=(3,), args={"x_ptr": Buffer.strided("f32", (2, 3), (3, 2))})
    assert report.verdict != "counterexample"


def test_stores_into_gaps_are_refuted() -> None:
    columns = Buffer.strided("f32", (tokens,), (stride,))
    report = prove(every, grid=(tokens,), args={"x_ptr": columns})
    assert report.verdict == "counterexample"


def test_views_that_overlap_in_many_ways_end() -> None:
    """All elements are even; half a billion digits would have to be tried."""
    assert _reaches(10**9 + 1, [(10**9, 2), (10**9, 2)])


@pytest.mark.parametrize("seed", range(20))
def test_an_offset_is_reached_if_some_index_has_it(seed: int) -> None:
    draw = Random(seed)
    dims = [(draw.randint(1, 4), draw.randint(0, 7)) for _ in range(draw.randint(0, 3))]
    offsets = {
        sum(i * stride for i, (_, stride) in zip(index, dims, strict=True))
        for index in product(*(range(size) for size, _ in dims))
    }
    ordered = sorted(dims, key=lambda dim: -dim[1])
    assert [_reaches(offset, ordered) for offset in range(-2, 40)] == [o in offsets for o in range(-2, 40)]
