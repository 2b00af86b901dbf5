"""What the tests of Loom's semantics share: dtypes, exact comparison, memory that notices stray accesses."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
needs_block_pointers = pytest.mark.skipif(TRITON >= (3, 9), reason="Triton 3.9 has no block pointers")

SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
INTEGERS = SIGNED + UNSIGNED
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


def short(parameter: object) -> str | None:
    """A test id: `bfloat16` rather than `torch.bfloat16`."""
    return str(parameter).removeprefix("torch.") if isinstance(parameter, torch.dtype) else None


def compat(parameters: Sequence[object], *chosen: object) -> list[object]:
    """The same parameters, of which the chosen ones belong to the quick subset."""
    return [pytest.param(p, marks=pytest.mark.compat) if p in chosen else p for p in parameters]


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return np.dtype(short(dtype))


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, as integers of the same size."""
    return tensor.contiguous().view(WORDS[tensor.element_size()])


def is_nan(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.dtype.is_floating_point:
        return torch.zeros(tensor.shape, dtype=torch.bool)
    return tensor.to(torch.float64).isnan()


def assert_same(got: torch.Tensor | np.ndarray, want: torch.Tensor | np.ndarray, what: str = "") -> None:
    """Equal bit for bit (so -0.0 is not 0.0), but any NaN equals any other."""
    got, want = (torch.from_numpy(np.array(t)) if not isinstance(t, torch.Tensor) else t for t in (got, want))
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    differ = (words(got) != words(want)) & ~(is_nan(got) & is_nan(want))
    if differ.any():
        places = differ.nonzero()[:4].tolist()
        pairs = [f"{place}: {got[tuple(place)]} != {want[tuple(place)]}" for place in places]
        raise AssertionError(f"{what}: {int(differ.sum())} of {differ.numel()} differ; {'; '.join(pairs)}")


def random_values(shape: Sequence[int] | int, dtype: torch.dtype) -> torch.Tensor:
    """Any bit pattern of an integer type, any size of a float, true and false alike."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    if dtype.is_floating_point and dtype not in FLOAT8:
        return torch.randn(shape, dtype=torch.float64).mul(4).to(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    noise = np.frombuffer(np.random.bytes(count), np.uint8).copy()
    return torch.from_numpy(noise).view(dtype).reshape(shape)


class Guarded:
    """A tensor in the middle of poisoned memory. `check` finds any byte written outside of its elements."""

    POISON = 0xA5
    MARGIN = 1024

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None
    ) -> None:
        shape = tuple(shape)
        if strides is None:
            strides = [int(np.prod(shape[d + 1 :])) for d in range(len(shape))]
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        size = extent * dtype.itemsize + 2 * self.MARGIN
        self.memory = torch.full((-(-size // 64) * 64,), self.POISON, dtype=torch.uint8)
        self.words = self.memory.view(WORDS[dtype.itemsize])
        self.words = self.words.as_strided(shape, strides, self.MARGIN // dtype.itemsize)
        self.tensor = self.words.view(dtype)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Guarded:
        """A guarded copy with the same strides."""
        guarded = cls(tensor.shape, tensor.dtype, tensor.stride())
        guarded.tensor.copy_(tensor)
        return guarded

    def check(self) -> torch.Tensor:
        """A contiguous copy of the tensor, once all memory around it is found to be as it was."""
        kept = self.words.clone(memory_format=torch.contiguous_format)
        self.words.copy_(
            torch.full((kept.element_size(),), self.POISON, dtype=torch.uint8).view(kept.dtype)[0]
        )
        stray = (self.memory != self.POISON).nonzero().flatten() - self.MARGIN
        assert not len(stray), f"bytes written outside of the tensor, at {stray[:8].tolist()}"
        self.words.copy_(kept)
        return kept.view(self.tensor.dtype)


class Fenced:
    """A page of memory between two that can't be touched: a stray read or write ends the process."""

    PAGE = mmap.PAGESIZE

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 3 * self.PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for fence in (address, address + 2 * self.PAGE):
            assert protect(fence, self.PAGE, 0) == 0, "mprotect failed"

    def last(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The `count` elements before the upper fence."""
        size = count * dtype.itemsize
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=2 * self.PAGE - size)

    def first(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The `count` elements after the lower fence."""
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=self.PAGE)


@triton.jit
def put(out_ptr, value):
    """Stores a tile of any shape (or a scalar) in row-major order, and returns where the next one goes."""
    if isinstance(value, tl.tensor) and value.type.is_block():
        tl.store(out_ptr + tl.arange(0, value.numel), tl.reshape(value, [value.numel]))
        return out_ptr + value.numel
    else:
        tl.store(out_ptr, value)
        return out_ptr + 1


@triton.jit
def load_tile(x_ptr, SHAPE: tl.constexpr, SIZE: tl.constexpr):
    return tl.reshape(tl.load(x_ptr + tl.arange(0, SIZE)), SHAPE)
