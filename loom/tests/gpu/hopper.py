"""Tensor maps and swizzled tiles for the tests of sm_90, written from the manual, not from the machine."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

BASE = 1024  # the address of shared memory's first byte
_LAYOUT = struct.Struct("<Q8B5Q4Q5H5BxI20x")  # `TensorMap` of include/gpu/tensor_map.h
assert _LAYOUT.size == 128

# Numbers of element types in a tensor map.
TYPES = {"u8": 0, "u16": 1, "u32": 2, "s32": 3, "u64": 4, "s64": 5, "f16": 6, "f32": 7, "f64": 9, "bf16": 10}
SWIZZLES = {"none": 0, "32": 1, "64": 2, "128": 3}


def aligned(count: int, dtype: Any, alignment: int = 128) -> Array:
    """Return zeros with this alignment."""
    size = np.dtype(dtype).itemsize
    room = np.zeros(count * size + alignment, np.uint8)
    skipped = -room.ctypes.data % alignment
    return room[skipped : skipped + count * size].view(dtype)


def aligned_copy(array: Array) -> Array:
    copy = aligned(array.size, array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def tensor_map(
    array: Array,
    box: Sequence[int],
    *,
    type_: str = "u16",
    swizzle: str = "none",
    fill: int = 0,
    shape: Sequence[int] | None = None,
    given: int = 2**32 - 1,
    interleave: int = 0,
    step: int = 1,
) -> Array:
    """Return the 128 bytes of a map of an array (or of a part from its first element), outermost dimension first."""
    shape = shape or array.shape
    rank = len(shape)

    def inner_first(values: Sequence[int], length: int, other: int = 0) -> list[int]:
        return [*reversed(values), *[other] * (length - len(values))]

    packed = _LAYOUT.pack(
        array.ctypes.data, rank - 1, TYPES[type_], SWIZZLES[swizzle], 0, interleave, fill, 0, 0,
        *inner_first(shape, 5), *inner_first(array.strides[:-1], 4), *inner_first(box, 5),
        *inner_first([step] * rank, 5), given,
    )  # fmt: skip
    room = aligned(128, np.uint8)
    room[:] = np.frombuffer(packed, np.uint8)
    return room


def swizzled(offset: int, swizzle: str) -> int:
    """Return the swizzled offset of a byte of shared memory: bits 4-6 are xor-ed with the number of the 128-byte row,
    of which a swizzle of 64 bytes takes two bits and one of 32 bytes one."""
    address = BASE + offset
    row = address // 128 % {"none": 1, "32": 2, "64": 4, "128": 8}[swizzle]
    return (address ^ row * 16) - BASE


def tile(array: Array, at: Sequence[int], box: Sequence[int], outside: Any = 0) -> Array:
    """Return the elements of a box, with a fill value where it reaches beyond the array."""
    result = np.full(box, outside, array.dtype)
    for index in np.ndindex(*box):
        position = tuple(a + k for a, k in zip(at, index, strict=True))
        if all(0 <= p < n for p, n in zip(position, array.shape, strict=True)):
            result[index] = array[position]
    return result


def in_shared(content: Array, swizzle: str, room: int, offset: int = 0) -> Array:
    """Return the bytes of shared memory with a tile in them."""
    raw = np.ascontiguousarray(content).view(np.uint8).reshape(-1)
    memory = np.zeros(room, np.uint8)
    for k, byte in enumerate(raw):
        memory[swizzled(offset + k, swizzle)] = byte
    return memory


# ---- PTX ---------------------------------------------------------------------------------------------------------


def wait(barrier: str = "%r1", parity: int | str = 0, label: str = "wait") -> str:
    """Return the loop that Triton writes around try_wait."""
    return (
        f"{{ .reg .pred done; {label}: mbarrier.try_wait.parity.shared::cta.b64 done, [{barrier}], {parity}; "
        f"@!done bra.uni {label}; }}"
    )


def words_out(count: int, offset: int, to: str = "%rd0", threads: int = 32) -> str:
    """Return a text that copies words from shared to global memory: thread t copies words t, t + threads, ..."""
    lines = ["mov.b32 %r200, smem; mad.lo.s32 %r200, %r0, 4, %r200; mul.wide.u32 %rd110, %r0, 4;"]
    lines.append(f"add.s64 %rd110, {to}, %rd110;")
    for k in range(0, count, threads):
        lines.append(f"ld.shared.b32 %r201, [%r200+{offset + 4 * k}]; st.global.b32 [%rd110+{4 * k}], %r201;")
    return "\n".join(lines)


def words_in(count: int, offset: int, source: str = "%rd0", threads: int = 32) -> str:
    """Return a text that copies words from global to shared memory: thread t copies words t, t + threads, ..."""
    lines = ["mov.b32 %r200, smem; mad.lo.s32 %r200, %r0, 4, %r200; mul.wide.u32 %rd110, %r0, 4;"]
    lines.append(f"add.s64 %rd110, {source}, %rd110;")
    for k in range(0, count, threads):
        lines.append(f"ld.global.b32 %r201, [%rd110+{4 * k}]; st.shared.b32 [%r200+{offset + 4 * k}], %r201;")
    return "\n".join(lines)


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of a box, outermost first; as text, innermost first like in PTX."""

    at: tuple[int, ...]

    def __str__(self) -> str:
        return f"{{{', '.join(map(str, reversed(self.at)))}}}"
