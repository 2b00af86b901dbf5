"""Memory that was allocated and that nobody has written yet."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_PERIOD = 4096
_LOW, _HIGH = 0x0F0F0F0F0F0F0F0F, 0xA0A0A0A0A0A0A0A0 - (1 << 64)


class FreshMemory:
    """An allocation, filled with the pattern of `poison` in include/witness.h; a bit per byte says what was written."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.freed: Callable[[], bool] = StorageWeakRef(storage).expired  # type: ignore[no-untyped-call]
        self.low = storage.data_ptr()
        self.high = self.low + storage.nbytes()
        data = torch.tensor([], dtype=torch.uint8).set_(storage)
        _fill(data, self.low)
        self._written = bytearray(-(-len(data) // 8))
        self.written_address = ctypes.addressof(ctypes.c_char.from_buffer(self._written))


@functools.cache
def _pattern() -> torch.Tensor:
    """The bytes of `poison`, twice over."""
    words = (
        torch.arange(_PERIOD, dtype=torch.int64)
        .mul_(_GOLDEN)
        .bitwise_right_shift_(4)
        .bitwise_and_(_LOW)
        .bitwise_or_(_HIGH)
    )
    return words.repeat(2).view(torch.uint8)


def _fill(data: torch.Tensor, address: int) -> None:
    period = 8 * _PERIOD
    start = address % period
    pattern = _pattern()[start : start + period]
    whole = len(data) // period * period
    data[:whole].view(-1, period).copy_(pattern)
    data[whole:].copy_(pattern[: len(data) - whole])
