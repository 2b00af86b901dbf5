"""Row-by-row access to tensors: offsets of the rows, and tiles of them.

A tensor [..., K] is read as rows of K elements. Rows without a single stride (the heads of a slice of packed QKV) have
two strides: row r lies at (r // inner) * outer_stride + (r % inner) * inner_stride.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ...runtime import Capabilities, choice, contiguous_copy, current_workspace

MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)

STRIPE = 128  # rows per program when column-wise copies are written: the longest group along M


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a reference computes in: fp32, or fp64 for fp64 inputs, which tests use as ground truth."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def count_rows(x: Tensor) -> int:
    """Return the number of rows, even if they have no columns."""
    return math.prod(x.shape[:-1])


def row_strides(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Return (rows, inner, outer_stride, inner_stride): x and the strides of its rows, or a contiguous copy if two
    strides cannot describe x."""
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
    return contiguous_copy(x), 1, cols, 0


def one_stride(x: Tensor | None) -> tuple[Tensor | None, int]:
    """Return (x, row stride); x is copied if its rows have no single stride."""
    if x is None:
        return None, 0
    flat = flat_rows(x)
    return flat, flat.stride(0)


def align_of(*sizes: int, least: int = 8) -> int:
    """Return the largest of 16, 8 and 4 that divides all sizes and is at least `least`, else 1. Kernels take it as a
    constant, to access 128 bits at a time: one-byte elements need multiples of 16, two-byte elements 8, and four-byte
    elements 4."""
    combined = 0
    for size in sizes:
        combined |= size
    if combined % 16 == 0:
        return 16
    if combined % 8 == 0:
        return 8
    return least if combined % least == 0 else 1


def flat_rows(x: Tensor) -> Tensor:
    """Return x as [M, K] with stride 1 along K, copied if necessary."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1]) if current_workspace() is None else _joined(x)
    return x if x.shape[-1] <= 1 or x.stride(1) == 1 else contiguous_copy(x)


def _joined(x: Tensor) -> Tensor:
    """Reshape x to [M, K]; a copy is in the workspace."""
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError:
        return contiguous_copy(x).view(-1, x.shape[-1])


def contiguous(x: MaybeTensor) -> MaybeTensor:
    """Return x, or a contiguous copy of it; a launch takes the copy's memory from `scratch`."""
    return x if x is None or x.is_contiguous() else contiguous_copy(x)


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a contiguous tensor of x's shape. `torch.empty(x.shape)` would take twice as long."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def empty_where(needs: Iterable[bool], like: Iterable[Tensor | None]) -> Iterator[Tensor | None]:
    """Allocate the gradient of each tensor in `like`, or yield None where it is not needed."""
    for needed, tensor in zip(needs, like, strict=True):
        yield empty_like(tensor) if needed and tensor is not None else None


def cpu_tile(cols: int, smallest: int = 64, largest: int = 1024) -> int:
    """Return how many columns to read at a time on a CPU, so that a chunk of a row stays in the L1 cache: the largest
    chunk that divides the row, or 1024 with a masked rest. A chunk costs some 0.1 us on top of its elements."""
    tile = largest
    while tile >= 512:
        if cols % tile == 0 and cols:
            return tile
        tile //= 2
    return min(max(1 << max(cols - 1, 0).bit_length(), smallest, 64), 1024)


def tile_warps(numbers: int, target: Capabilities) -> int:
    """Return the warps for a tile of `numbers` elements: 16 per thread, which are 16 bytes of codes or two loads of
    bf16; but at least 128 threads."""
    lanes = target.warp_size
    return min(16, max(128 // lanes, numbers // (16 * lanes)))


class ScanConfig(NamedTuple):
    """Tiling of a launch with a single program: it reads `tile` elements at a time."""

    tile: int
    num_warps: int


@choice("scans", tile=(64, 8192), num_warps=(1, 16))
def scan_config(kernel: str, target: Capabilities) -> ScanConfig:
    return ScanConfig(1024, 4 if kernel == "amax" else 8)
