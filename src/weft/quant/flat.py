"""Copies as flat lists, for the ops that still take and give lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .copies import Copies, Copy, allocate_copies
from .formats import Format
from .reference import quantize_copies


def _flat(copies: Copies, last: bool) -> list[Tensor]:
    parts = [part for copy in copies if copy is not None for part in copy[:2]]
    held = copies[0] or copies[1]
    return (
        [*parts, held.global_scale] if last and held is not None and held.global_scale is not None else parts
    )


def allocate_flat(format: Format, rows: int, cols: int, device: Any, **which: bool) -> list[Tensor]:
    return _flat(allocate_copies(format, rows, cols, device, **which), True)


def quantize_flat(x: Tensor, format: Format, **options: Any) -> list[Tensor]:
    return _flat(quantize_copies(x, format, **options), False)


def split_copies(format: Format, tensors: Sequence[Tensor], *, rowwise: bool, columnwise: bool) -> Copies:
    end = 2 * (rowwise + columnwise)
    global_scale = tensors[end] if format.block == "nvfp4" else None
    pairs = [Copy(tensors[i], tensors[i + 1], global_scale) for i in range(0, end, 2)]
    return pairs[0] if rowwise else None, pairs[-1] if columnwise else None


def count_copies(format: Format, *, rowwise: bool, columnwise: bool) -> int:
    return 2 * (rowwise + columnwise) + (format.block == "nvfp4")
