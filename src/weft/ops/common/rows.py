"""How ops read tensors row by row: where the rows lie, and tiles of them.

A tensor of shape [..., K] is taken as rows of K numbers. If they do not lie at one stride (the heads of a slice of
packed QKV) there are two: row r lies at (r // inner) * outer_stride + (r % inner) * inner_stride.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime import Capabilities, choice

STRIPE = 128  # rows of a program that writes column-wise copies: the longest group along M


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a reference computes in: fp32, or fp64 for inputs in fp64, by which tests judge results."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def count_rows(x: Tensor) -> int:
    """Number of rows, also of rows without columns."""
    return math.prod(x.shape[:-1])


def row_strides(x: Tensor) -> tuple[Tensor, int, int, int]:
    """(rows, inner, outer_stride, inner_stride): x, or a copy if two strides cannot describe it, and where its rows
    lie."""
    cols = x.shape[-1]
    if x.is_contiguous():
        return x, 1, cols, 0
    if x.stride(-1) == 1 or cols == 1:
        merged: list[tuple[int, int]] = []
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
            if size == 1:
                continue
            if merged and merged[-1][1] == size * stride:
                merged[-1] = (merged[-1][0] * size, stride)
            else:
                merged.append((size, stride))
        if len(merged) <= 1:
            return x, 1, merged[0][1] if merged else cols, 0
        if len(merged) == 2:
            return x, merged[1][0], merged[0][1], merged[1][1]
    return x.contiguous(), 1, cols, 0


def one_stride(x: Tensor | None) -> tuple[Tensor | None, int]:
    """(x, stride): x or a copy of it, whose rows lie at one stride."""
    if x is None:
        return None, 0
    flat = flat_rows(x)
    return flat, flat.stride(0)


def align_of(*sizes: int, least: int = 8) -> int:
    """The first of 16, 8 and 4 that divides all sizes, but none below `least`; else 1. Kernels take it as a constant,
    so that accesses can be 128 bits wide: of one-byte elements that takes multiples of 16, of two-byte elements 8, and
    of four-byte elements 4."""
    combined = 0
    for size in sizes:
        combined |= size
    if combined % 16 == 0:
        return 16
    if combined % 8 == 0:
        return 8
    return least if combined % least == 0 else 1


def flat_rows(x: Tensor) -> Tensor:
    """x as [M, K] with the stride 1 along K, copied if need be."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.shape[-1] <= 1 or flat.stride(1) == 1 else flat.contiguous()


def contiguous(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.is_contiguous() else x.contiguous()


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Room for a contiguous tensor of x's shape. `torch.empty(x.shape)` would take twice as long."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def empty_where(needs: Iterable[bool], like: Iterable[Tensor | None]) -> Iterator[Tensor | None]:
    """Room for the gradient of each tensor in `like`, or None where it is not needed."""
    for needed, tensor in zip(needs, like, strict=True):
        yield empty_like(tensor) if needed and tensor is not None else None


def cpu_tile(cols: int, smallest: int = 64, largest: int = 1024) -> int:
    """Columns at a time on a CPU, where a row is read in pieces that stay in the first-level cache: the largest
    piece that divides the row, or 1024 with a masked rest. A piece costs some 0.1 us beside its elements."""
    tile = largest
    while tile >= 512:
        if cols % tile == 0 and cols:
            return tile
        tile //= 2
    return min(max(1 << max(cols - 1, 0).bit_length(), smallest, 64), 1024)


def tile_warps(numbers: int, target: Capabilities) -> int:
    """Warps for a tile of `numbers` numbers: each thread has 16, which are 16 bytes of codes or two loads of bf16; but
    at least 128 threads."""
    lanes = target.warp_size
    return min(16, max(128 // lanes, numbers // (16 * lanes)))


class ScanConfig(NamedTuple):
    """How the only program of a launch reads all there is: `tile` numbers at a time."""

    tile: int
    num_warps: int


@choice("scans", tile=(64, 8192), num_warps=(1, 16))
def scan_config(kernel: str, target: Capabilities) -> ScanConfig:
    return ScanConfig(1024, 4 if kernel == "amax" else 8)
