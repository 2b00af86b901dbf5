"""Triton kernels for sm_90, with their launches: tensor descriptors, wgmma, warp specialization."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Descriptors that a kernel makes are in scratch memory, which the emulated driver provides.


@triton.jit
def host_descriptors(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Compute C = A B^T, one tile per program."""
    columns = tl.cdiv(N, BN)
    row, column = tl.program_id(0) // columns * BM, tl.program_id(0) % columns * BN
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        total = tl.dot(a.load([row, k]), b.load([column, k]).T, total)
    c.store([row, column], total.to(c.dtype))


@triton.jit
def device_descriptors(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPECIALIZED: tl.constexpr,
):
    """Compute C = A B^T, tile by tile in every program, with descriptors that the kernel makes."""
    a = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BM, BK])
    b = tl.make_tensor_descriptor(b_ptr, [N, K], [K, 1], [BN, BK])
    c = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [BM, BN])
    columns = tl.cdiv(N, BN)
    tiles = tl.cdiv(M, BM) * columns
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), warp_specialize=SPECIALIZED):
        row, column = tile // columns * BM, tile % columns * BN
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            total = tl.dot(a.load([row, k]), b.load([column, k]).T, total)
        c.store([row, column], total.to(c_ptr.dtype.element_ty))


@triton.jit
def attention(
    q, k, v, o, rows, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
    SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """Compute softmax(Q K^T) V without storing the scores; a program has BM rows of one head."""
    head = tl.program_id(1) * rows
    first = tl.program_id(0) * BM
    at = first + tl.arange(0, BM)
    query = q.load([head + first, 0])
    most = tl.full((BM,), -float("inf"), tl.float32)
    weight = tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM, D), tl.float32)
    end = first + BM if CAUSAL else rows
    for n in tl.range(0, end, BN, warp_specialize=SPECIALIZED):
        scores = tl.dot(query, k.load([head + n, 0]).T) * (scale * 1.4426950408889634)
        if CAUSAL:
            scores = tl.where(at[:, None] >= n + tl.arange(0, BN)[None, :], scores, -1.0e9)
        new = tl.maximum(most, tl.max(scores, 1))
        factor = tl.exp2(most - new)
        shares = tl.exp2(scores - new[:, None])
        weight = weight * factor + tl.sum(shares, 1)
        total = tl.dot(shares.to(v.dtype), v.load([head + n, 0]), total * factor[:, None])
        most = new
    o.store([head + first, 0], (total / weight[:, None]).to(o.dtype))


@triton.jit
def attention_by_pointers(q, k, v, o, rows, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    """Compute attention without descriptors, not causal: K and V are loaded by cp.async."""
    head = tl.program_id(1) * rows
    at, columns = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    query = tl.load(q + (head + at)[:, None] * D + columns[None, :])
    most = tl.full((BM,), -float("inf"), tl.float32)
    weight = tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM, D), tl.float32)
    for n in range(0, rows, BN):
        others = (head + n + tl.arange(0, BN))[:, None] * D + columns[None, :]
        scores = tl.dot(query, tl.load(k + others).T) * (scale * 1.4426950408889634)
        if n + BN > rows - BN:  # where the last tile may have less: a branch between the two products
            scores = tl.where((n + tl.arange(0, BN) < rows)[None, :], scores, -1.0e9)
        new = tl.maximum(most, tl.max(scores, 1))
        factor = tl.exp2(most - new)
        shares = tl.exp2(scores - new[:, None])
        weight = weight * factor + tl.sum(shares, 1)
        total = tl.dot(shares.to(q.dtype.element_ty), tl.load(v + others), total * factor[:, None])
        most = new
    result = (total / weight[:, None]).to(o.dtype.element_ty)
    tl.store(o + (head + at)[:, None] * D + columns[None, :], result)


@triton.jit
def pointers(
    a_ptr, b_ptr, c_ptr, M, N, K, sam, sak, sbk, sbn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    OUT: tl.constexpr,
):  # fmt: skip
    """Compute C = A B with plain loads, which become cp.async; strides say which operand is transposed."""
    columns = tl.cdiv(N, BN)
    rows = tl.program_id(0) // columns * BM + tl.arange(0, BM)
    cols = tl.program_id(0) % columns * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    total = tl.zeros((BM, BN), OUT)
    for k in range(0, K, BK):
        a = tl.load(
            a_ptr + rows[:, None] * sam + (k + ks)[None, :] * sak, mask=(k + ks)[None, :] < K, other=0.0
        )
        b = tl.load(
            b_ptr + (k + ks)[:, None] * sbk + cols[None, :] * sbn, mask=(k + ks)[:, None] < K, other=0.0
        )
        total = tl.dot(a, b, total, out_dtype=OUT)
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], total.to(c_ptr.dtype.element_ty))


@triton.jit
def reductions(x_ptr, total, least, BM: tl.constexpr, BN: tl.constexpr):
    """Add every program's tile to one tile, and take the minimum with another."""
    at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    x = tl.load(x_ptr + tl.program_id(0) * BM * BN + at)
    total.atomic_add([0, 0], x)
    least.atomic_min([0, 0], x.to(tl.int32))


@triton.jit
def rearrange(x, y, at0, at1, at2, B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr):
    """Copy a three-dimensional box from one place to another."""
    y.store([0, 0, 0], x.load([at0, at1, at2]) + tl.zeros((B0, B1, B2), x.dtype))


@triton.jit
def gather_and_scatter(x, y, rows_ptr, N: tl.constexpr, BN: tl.constexpr):
    """Copy rows of x by index to the rows of y with the same indices."""
    rows = tl.load(rows_ptr + tl.arange(0, N))
    y.scatter(x.gather(rows, 0), rows, 0)


# ---- launches --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A kernel on tensors: `make` returns its output, the expected output in f64, and its launch."""

    make: Callable[[], tuple[Tensor, Tensor, Callable[[], Any]]]
    tolerance: float  # of the largest error, by the largest number


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if dtype == torch.int8:
        return torch.randint(-99, 99, shape, generator=generator, dtype=dtype)
    return torch.randn(*shape, generator=generator).to(dtype)


def matmul(kernel: str, m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, specialized: bool = False, *,
           bm: int = 128, bn: int = 128, bk: int = 64, programs: int = 2, **options: Any) -> Case:  # fmt: skip
    def make() -> tuple[Tensor, Tensor, Callable[[], Any]]:
        a, b = numbers(m, k, dtype=dtype), numbers(n, k, dtype=dtype)
        c = torch.zeros(m, n, dtype=torch.float32 if dtype == torch.float32 else torch.bfloat16)
        tiles = triton.cdiv(m, bm) * triton.cdiv(n, bn)
        sizes = {"BM": bm, "BN": bn, "BK": bk, "num_warps": 4, "num_stages": 3} | options

        def launch() -> Any:
            if kernel == "host":
                described = [
                    TensorDescriptor.from_tensor(x, [p, q])
                    for x, p, q in ((a, bm, bk), (b, bn, bk), (c, bm, bn))
                ]
                return host_descriptors[(tiles,)](*described, m, n, k, **sizes)
            return device_descriptors[(programs,)](a, b, c, m, n, k, SPECIALIZED=specialized, **sizes)

        return c, a.double() @ b.double().T, launch

    return Case(make, 2**-8 if dtype != torch.float32 else 2**-9)


def products(
    a_dtype: torch.dtype, b_dtype: torch.dtype, out: torch.dtype, transposed: str, *, bm: int = 64, bn: int = 64,
    bk: int = 64, m: int = 128, n: int = 128, k: int = 192, **options: Any,
) -> Case:  # fmt: skip
    def make() -> tuple[Tensor, Tensor, Callable[[], Any]]:
        a = numbers(k, m, dtype=a_dtype).T if "a" in transposed else numbers(m, k, dtype=a_dtype)
        b = numbers(n, k, dtype=b_dtype).T if "b" in transposed else numbers(k, n, dtype=b_dtype)
        c = torch.zeros(m, n, dtype=out)
        kind = tl.int32 if out == torch.int32 else tl.float16 if out == torch.float16 else tl.float32
        sizes = {"BM": bm, "BN": bn, "BK": bk, "num_warps": 4, "num_stages": 3} | options

        def launch() -> Any:
            grid = (m // bm * (n // bn),)
            return pointers[grid](a, b, c, m, n, k, *a.stride(), *b.stride(), OUT=kind, **sizes)

        return c, a.double() @ b.double(), launch

    return Case(make, 0 if out == torch.int32 else 2**-7 if out == torch.float16 else 2**-9)


def attend(
    rows: int, causal: bool, dtype: torch.dtype = torch.float16, by_pointers: bool = False, **options: Any
) -> Case:
    def make() -> tuple[Tensor, Tensor, Callable[[], Any]]:
        heads, width = 2, 64
        q, k, v = (
            numbers(heads * rows, width + shift, dtype=dtype)[:, :width].contiguous() for shift in (0, 1, 2)
        )
        o = torch.zeros_like(q)
        split = [x.double().view(heads, rows, width) for x in (q, k, v)]
        expected = torch.nn.functional.scaled_dot_product_attention(*split, is_causal=causal, scale=0.125)

        def launch() -> Any:
            sizes = {"BM": 64, "BN": 64, "D": width, "num_warps": 4, "num_stages": 2} | options
            if by_pointers:
                return attention_by_pointers[(rows // 64, heads)](q, k, v, o, rows, 0.125, **sizes)
            described = [TensorDescriptor.from_tensor(x, [64, width]) for x in (q, k, v, o)]
            sizes = {"SPECIALIZED": False} | sizes
            return attention[(rows // 64, heads)](*described, rows, 0.125, CAUSAL=causal, **sizes)

        return o, expected.reshape(heads * rows, width), launch

    return Case(make, 2**-10 if dtype == torch.float16 else 2**-7)


SMALL = {"bm": 64, "bn": 64, "bk": 64}
MATMULS = {
    "host-made descriptors": matmul("host", 128, 192, 448, **SMALL),
    "device-made descriptors": matmul("device", 192, 128, 448, **SMALL),
    "warp specialization": matmul("device", 256, 256, 448, specialized=True),
    "edges": matmul("host", 100, 72, 200, **SMALL),
}
