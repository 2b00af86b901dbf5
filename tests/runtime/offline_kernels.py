"""Kernels for tests of compilation, in a module of their own because the child process must import them."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from weft.runtime import kernel


class Rows(NamedTuple):
    """Rows of a matrix: a struct that a kernel takes."""

    ptr: Tensor | None
    stride: int


class Scaled(NamedTuple):
    """Struct with a nested struct."""

    rows: Rows
    factor: float
    bias: Tensor | None


@kernel
def struct_kernel(x: Rows, count, y: Scaled, offset: float, extra_ptr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute y = x * factor + offset, plus bias and extra if present."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    mask = column < count
    value = tl.load(x.ptr + row * x.stride + column, mask=mask, other=0.0) * y.factor + offset
    if y.bias is not None:
        value += tl.load(y.bias + column, mask=mask, other=0.0)
    if extra_ptr is not None:
        value += tl.load(extra_ptr + column, mask=mask, other=0.0)
    tl.store(y.rows.ptr + row * y.rows.stride + column, value, mask=mask)


@triton.jit
def copy(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, tl.load(x + offsets, mask=offsets < n), mask=offsets < n)


@triton.heuristics({"BLOCK": lambda args: 2048})
@triton.jit
def wrapped_copy(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, tl.load(x + offsets, mask=offsets < n), mask=offsets < n)


@triton.jit
def keep_all(x, y, BLOCK: tl.constexpr):
    """Keep the whole block in registers until its sum is known."""
    offsets = tl.arange(0, BLOCK)
    values = tl.load(x + offsets)
    tl.store(y + offsets, values - tl.sum(values, 0))


@triton.jit
def scale(x, y, factor, BLOCK: tl.constexpr):
    """Scale in the type of the factor, which may be fp64."""
    offsets = tl.arange(0, BLOCK)
    tl.store(y + offsets, tl.load(x + offsets) * factor)


@triton.jit
def inline_ptx(x, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    value = tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=r,r", [tl.load(x + offsets)], tl.float32, is_pure=True, pack=1
    )
    tl.store(x + offsets, value)


@triton.jit
def matmul(a, b, c, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    tile = rows[:, None] * BLOCK + rows[None, :]
    tl.store(c + tile, tl.dot(tl.load(a + tile), tl.load(b + tile)))


@triton.jit
def two_products(
    a_ptr, b_ptr, c_ptr, d_ptr, out_ptr, depth, TILE: tl.constexpr, DEPTH: tl.constexpr, APART: tl.constexpr
):
    """Compute a @ b + c @ d by two dots per iteration, into one shared accumulator or one each."""
    tile = tl.arange(0, TILE)
    k = tl.arange(0, DEPTH)
    total = tl.zeros((TILE, TILE), tl.float32)
    other = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, depth, DEPTH):
        left = tile[:, None] * depth + start + k[None, :]
        right = (start + k[:, None]) * TILE + tile[None, :]
        total = tl.dot(tl.load(a_ptr + left), tl.load(b_ptr + right), total)
        if APART:
            other = tl.dot(tl.load(c_ptr + left), tl.load(d_ptr + right), other)
        else:
            total = tl.dot(tl.load(c_ptr + left), tl.load(d_ptr + right), total)
    tl.store(out_ptr + tile[:, None] * TILE + tile[None, :], total + other if APART else total)


@triton.jit
def tile_copy(x, y, BLOCK: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [BLOCK, BLOCK], [BLOCK, 1], [BLOCK, BLOCK])
    destination = tl.make_tensor_descriptor(y, [BLOCK, BLOCK], [BLOCK, 1], [BLOCK, BLOCK])
    destination.store([0, 0], source.load([0, 0]))


@triton.jit
def endless(x, COUNT: tl.constexpr):
    """Take long to compile: the compiler unrolls COUNT iterations."""
    value = tl.load(x)
    for i in tl.static_range(COUNT):
        value = value * value + i
    tl.store(x, value)


@triton.jit
def inline_gcn(x, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    value = tl.inline_asm_elementwise(
        "v_rcp_f32 $0, $1", "=v,v", [tl.load(x + offsets)], tl.float32, is_pure=True, pack=1
    )
    tl.store(x + offsets, value)


not_a_kernel = 3
