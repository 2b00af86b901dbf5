"""Integers that wrap around in offsets and masks: findings, and harmless cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton_loom


@triton.jit
def mask_of_sums(out_ptr, first, end, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 1, mask=at + first < end)


@triton.jit
def mask_of_wide_sums(out_ptr, first, end, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 1, mask=(at + first).to(tl.int64) < end)


@triton.jit
def offsets_of_bytes(out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK).to(tl.uint8) * 3
    tl.store(out_ptr + at.to(tl.int32), 1)


@triton.jit
def far_rows(x_ptr, out_ptr, rows, BLOCK: tl.constexpr):
    row, col = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < BLOCK)
    x = tl.load(x_ptr + row * (1 << 28) + col, mask=mask, other=0)
    tl.store(out_ptr + row * (1 << 28) + col, x, mask=mask)


@triton.jit
def far_atomics(out_ptr, rows, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr + row * (1 << 28), 1, mask=row < rows)


@triton.jit
def mask_of_products(out_ptr, rows, end, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    tl.store(out_ptr + row, 1, mask=(row < rows) & (row * (1 << 28) < end))


@triton.jit
def kept_offsets(index_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    far = at * (1 << 28)
    first = tl.min(far, 0)
    tl.store(out_ptr + first + at, tl.load(index_ptr + far, mask=at < 1, other=0))


def numbers(count: int = 32) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


END = 2**31
FOUND: dict[str, tuple[Callable[[], Any], str, int]] = {
    "mask": (lambda: mask_of_sums[(1,)](numbers(), END - 20, 5, 32), "2147483648, which an int32", 12),
    "wide mask": (
        lambda: mask_of_wide_sums[(1,)](numbers(), END - 20, 5, 32),
        "2147483648, which an int32",
        12,
    ),
    "mask, lanes on": (
        lambda: mask_of_products[(1,)](numbers(), 30, END - 1, 32),
        "2147483648, which an int32",
        22,
    ),
    "uint8": (lambda: offsets_of_bytes[(1,)](numbers(512), 128), "258, which a uint8", 42),
    "reduced": (lambda: kept_offsets[(1,)](numbers(), numbers(64), 32), "2147483648, which an int32", 24),
}
HARMLESS: dict[str, Callable[[], Any]] = {
    "rows that are off": lambda: far_rows[(1,)](numbers(), numbers(), 1, 32),
    "atomics that are off": lambda: far_atomics[(1,)](numbers(), 1, 32),
    "a mask that is off anyway": lambda: mask_of_products[(1,)](numbers(), 3, END - 1, 32),
    "bytes that fit": lambda: offsets_of_bytes[(1,)](numbers(512), 64),
}


@pytest.mark.parametrize("name", FOUND)
def test_wraparound_is_found(name: str) -> None:
    launch, detail, count = FOUND[name]
    with triton_loom.sanitize(collect=True) as seen:
        launch()
    overflows = [finding for finding in seen.findings if finding.kind == "offset overflow"]
    assert [finding.count for finding in overflows] == [count]
    assert detail in overflows[0].detail


@pytest.mark.parametrize("name", HARMLESS)
def test_wraparound_in_inactive_lanes_is_not_found(name: str) -> None:
    with triton_loom.sanitize(collect=True) as seen:
        HARMLESS[name]()
    assert not seen.findings, seen.findings[0]


@pytest.mark.parametrize("kernel", [mask_of_sums, mask_of_wide_sums], ids=["int32", "widened"])
@pytest.mark.parametrize("first", [END - 20, END - 1, END - 32, END - 33, END - 64, -5, 0, 3])
def test_a_mask_is_right_or_an_error(kernel: Any, first: int) -> None:
    """Masks agree with 32-bit arithmetic of each lane; a tile in which a chunk of lanes wraps around is refused."""
    out = numbers(64)
    exact = np.arange(64) + first
    if first % 16 and exact[-1] >= END:
        with pytest.raises(triton_loom.DeviceAssertion, match=r"test_wrapping\.py:\d+: .*mask.*wrap around"):
            kernel[(1,)](out, first, 5, 64)
    else:
        kernel[(1,)](out, first, 5, 64)
        assert out.tolist() == (exact.astype(np.int32) < 5).astype(int).tolist()
    if kernel is mask_of_sums:
        with triton_loom.sanitize(collect=True):  # lane by lane
            out.zero_()
            kernel[(1,)](out, first, 5, 64)
        assert out.tolist() == (exact.astype(np.int32) < 5).astype(int).tolist()
