"""Triton kernels for sm_100, with their launches: products with scales, accumulators in tensor memory.

Those of hopper_kernels.py are compiled for sm_100 as well. Scales of 32 elements are powers of two (mxfp8, mxfp4),
those of 16 are e4m3 (nvfp4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from gpu.hopper_kernels import Case, numbers
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def scaled(
    a_ptr, a_scales, b_ptr, b_scales, c_ptr, M, N, K,
    A_TYPE: tl.constexpr, B_TYPE: tl.constexpr, VECTOR: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute C = A B^T with scales, with pointers only."""
    A_BYTES: tl.constexpr = BK // 2 if A_TYPE == "e2m1" else BK
    B_BYTES: tl.constexpr = BK // 2 if B_TYPE == "e2m1" else BK
    columns = tl.cdiv(N, BN)
    rows = tl.program_id(0) // columns * BM + tl.arange(0, BM)
    cols = tl.program_id(0) % columns * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(K // BK):
        a_at = k * A_BYTES + tl.arange(0, A_BYTES)
        b_at = k * B_BYTES + tl.arange(0, B_BYTES)
        scales_at = k * (BK // VECTOR) + tl.arange(0, BK // VECTOR)
        a = tl.load(a_ptr + rows[:, None] * (K // BK * A_BYTES) + a_at[None, :])
        b = tl.load(b_ptr + cols[:, None] * (K // BK * B_BYTES) + b_at[None, :])
        sa = tl.load(a_scales + rows[:, None] * (K // VECTOR) + scales_at[None, :])
        sb = tl.load(b_scales + cols[:, None] * (K // VECTOR) + scales_at[None, :])
        total = tl.dot_scaled(a, sa, A_TYPE, b.T, sb, B_TYPE, total)
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], total)


@triton.jit
def scaled_tiles(
    a, a_scales, b, b_scales, c, N, K,
    TYPE: tl.constexpr, VECTOR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """Compute C = A B^T with scales by descriptors, tile by tile. Scales have tensor memory's layout, 512 bytes for 128
    rows and four scales of each, so they are copied there from shared memory."""
    BYTES: tl.constexpr = BK // 2 if TYPE == "e2m1" else BK
    PARTS: tl.constexpr = BK // VECTOR // 4
    columns = tl.cdiv(N, BN)
    tiles = c.shape[0] // BM * columns
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), warp_specialize=SPECIALIZED):
        row, column = tile // columns * BM, tile % columns * BN
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(K // BK):
            sa = a_scales.load([0, row // 128, k * PARTS, 0, 0])
            sb = b_scales.load([0, column // 128, k * PARTS, 0, 0])
            sa = sa.reshape(BM // 128, PARTS, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(BM, BK // VECTOR)
            sb = sb.reshape(BN // 128, PARTS, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(BN, BK // VECTOR)
            left, right = a.load([row, k * BYTES]), b.load([column, k * BYTES])
            total = tl.dot_scaled(left, sa, TYPE, right.T, sb, TYPE, total)
        c.store([row, column], total)


@triton.jit
def two_products(
    a_ptr, b_ptr, c_ptr, d_ptr, out_ptr, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Compute A B + C D, both added to one accumulator in every iteration."""
    rows, columns, ks = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(a_ptr + rows[:, None] * K + (k + ks)[None, :])
        b = tl.load(b_ptr + (k + ks)[:, None] * BN + columns[None, :])
        c = tl.load(c_ptr + rows[:, None] * K + (k + ks)[None, :])
        d = tl.load(d_ptr + (k + ks)[:, None] * BN + columns[None, :])
        total = tl.dot(a, b, total)
        total = tl.dot(c, d, total)
    tl.store(out_ptr + rows[:, None] * BN + columns[None, :], total)


@triton.jit
def two_fresh_products(
    a, b, c, out_ptr, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, MEETS: tl.constexpr
):
    """Compute (A B^T) (A C^T), elementwise: each iteration computes two products from zero, and sums in registers."""
    rows, columns = tl.arange(0, BM), tl.arange(0, BN)
    total, gate = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = a.load([0, k])
        total += tl.dot(x, b.load([0, k]).T) * 0.5
        if MEETS:
            tl.debug_barrier()
        gate += tl.dot(x, c.load([0, k]).T) * 0.5
    tl.store(out_ptr + rows[:, None] * BN + columns[None, :], total * gate)


# ---- numbers with scales ------------------------------------------------------------------------------------------

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@dataclass(frozen=True)
class Scaled:
    """A scaled matrix: codes (two per byte in e2m1), scales along its rows, and its values."""

    codes: Tensor
    scales: Tensor
    numbers: Tensor

    def in_tiles(self) -> Tensor:
        """Return the scales in the layout of `scaled_tiles`: [1, rows / 128, scales / 4, 2, 256]."""
        rows, count = self.scales.shape
        tiles = self.scales.reshape(rows // 128, 4, 32, count // 4, 4).permute(0, 3, 2, 1, 4)
        return tiles.contiguous().reshape(1, rows // 128, count // 4, 2, 256)


def scaled_numbers(rows: int, k: int, type_: str, vector: int, seed: int) -> Scaled:
    generator = torch.Generator().manual_seed(seed)
    if type_ == "e2m1":
        codes = torch.randint(0, 16, (rows, k), generator=generator, dtype=torch.uint8)
        plain = _FP4[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    else:
        codes = torch.randn(rows, k, generator=generator).to(
            torch.float8_e4m3fn if type_ == "e4m3" else torch.float8_e5m2
        )
        plain = codes.float()
    if vector == 16:
        scales = (torch.rand(rows, k // 16, generator=generator) * 3 + 0.25).to(torch.float8_e4m3fn)
        factors = scales.float()
    else:
        scales = torch.randint(124, 131, (rows, k // 32), generator=generator, dtype=torch.uint8)
        factors = torch.exp2(scales.float() - 127)
    return Scaled(codes, scales, plain.double() * factors.double().repeat_interleave(vector, 1))


def scaled_products(
    a_type: str, b_type: str, vector: int = 32, *, m: int = 128, n: int = 128, k: int = 512, bm: int = 128,
    bn: int = 128, bk: int = 128, **options: Any,
) -> Case:  # fmt: skip
    def make() -> tuple[Tensor, Tensor, Callable[[], Any]]:
        a, b = scaled_numbers(m, k, a_type, vector, 1), scaled_numbers(n, k, b_type, vector, 2)
        c = torch.zeros(m, n)
        sizes = {"BM": bm, "BN": bn, "BK": bk, "num_warps": 4, "num_stages": 2} | options
        types = {"A_TYPE": a_type, "B_TYPE": b_type, "VECTOR": vector}

        def launch() -> Any:
            grid = (m // bm * (n // bn),)
            return scaled[grid](a.codes, a.scales, b.codes, b.scales, c, m, n, k, **types, **sizes)

        return c, a.numbers @ b.numbers.T, launch

    return Case(make, 2**-20)


def scaled_by_tiles(
    type_: str, vector: int = 32, specialized: bool = False, *, m: int = 128, n: int = 128, k: int = 512,
    bm: int = 128, bn: int = 128, bk: int = 128, programs: int = 2, **options: Any,
) -> Case:  # fmt: skip
    def make() -> tuple[Tensor, Tensor, Callable[[], Any]]:
        a, b = scaled_numbers(m, k, type_, vector, 1), scaled_numbers(n, k, type_, vector, 2)
        c = torch.zeros(m, n)
        per_byte = 2 if type_ == "e2m1" else 1
        sizes = {"BM": bm, "BN": bn, "BK": bk, "num_warps": 4, "num_stages": 2} | options

        def launch() -> Any:
            parts = bk // vector // 4
            described = [
                TensorDescriptor.from_tensor(a.codes, [bm, bk // per_byte]),
                TensorDescriptor.from_tensor(a.in_tiles(), [1, bm // 128, parts, 2, 256]),
                TensorDescriptor.from_tensor(b.codes, [bn, bk // per_byte]),
                TensorDescriptor.from_tensor(b.in_tiles(), [1, bn // 128, parts, 2, 256]),
                TensorDescriptor.from_tensor(c, [bm, bn]),
            ]
            return scaled_tiles[(programs,)](
                *described, n, k, TYPE=type_, VECTOR=vector, SPECIALIZED=specialized, **sizes
            )

        return c, a.numbers @ b.numbers.T, launch

    return Case(make, 2**-20)


def twice(k: int = 256, **options: Any) -> Case:
    def make() -> tuple[Tensor, Tensor, Callable[[], Any]]:
        a, c = numbers(2, 128, k).unbind()
        b, d = numbers(2, k, 64).unbind()
        out = torch.zeros(128, 64)

        def launch() -> Any:
            return two_products[(1,)](a, b, c, d, out, k, BM=128, BN=64, BK=64, **options)

        return out, a.double() @ b.double() + c.double() @ d.double(), launch

    return Case(make, 2**-9)


def twice_from_zero(meets: bool, k: int = 256, **options: Any) -> Case:
    def make() -> tuple[Tensor, Tensor, Callable[[], Any]]:
        a, b, c = numbers(128, k), numbers(64, k), numbers(64, k + 1)[:, :k].contiguous()
        out = torch.zeros(128, 64)
        described = [TensorDescriptor.from_tensor(x, [len(x), 64]) for x in (a, b, c)]

        def launch() -> Any:
            return two_fresh_products[(1,)](*described, out, k, BM=128, BN=64, BK=64, MEETS=meets, **options)

        return out, (a.double() @ b.double().T) * (a.double() @ c.double().T) / 4, launch

    return Case(make, 2**-9)
