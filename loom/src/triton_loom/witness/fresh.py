"""Allocated memory that nobody has written yet."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_GOLDEN = 0x9E3779B97F4A7C15
_PERIOD = 4096
_LOW, _HIGH = 0x0F0F0F0F0F0F0F0F, 0xA0A0A0A0A0A0A0A0


class FreshMemory:
    """Allocation filled with the pattern of `poison` in include/witness.h; a bit per byte records what was written."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.freed: Callable[[], bool] = StorageWeakRef(storage).expired
        self.low = storage.data_ptr()
        self.high = self.low + storage.nbytes()
        _fill(self.low, storage.nbytes())
        self._written = bytearray(-(-storage.nbytes() // 8))
        self.written_address = ctypes.addressof(ctypes.c_char.from_buffer(self._written))


@functools.cache
def _pattern() -> bytes:
    """Return the bytes of `poison`, twice."""
    words = ((index * _GOLDEN % 2**64 >> 4) & _LOW | _HIGH for index in range(_PERIOD))
    return 2 * b"".join(word.to_bytes(8, "little") for word in words)


def _fill(address: int, size: int) -> None:
    """Write the pattern without PyTorch: one of its operators may be a kernel that is being checked."""
    period = 8 * _PERIOD
    done = min(size, period)
    start = address % period
    ctypes.memmove(address, _pattern()[start : start + done], done)
    while done < size:  # copy what is filled so far: a multiple of the period
        more = min(done, size - done)
        ctypes.memmove(address + done, address, more)
        done += more
