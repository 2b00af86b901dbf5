"""Memory that reveals what a kernel left unwritten, and what it accessed outside of its tensors."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .comparison import WORDS

NAN = 0xFF  # this byte repeated is NaN in every float type but the fnuz ones, and -1 in signed integers

# ---- uninitialized memory ---------------------------------------------------------------------------------


def poison(tensor: Tensor) -> Tensor:
    """Fill the memory of a CPU tensor with `NAN`."""
    if type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.layout == torch.strided:
        if tensor.dtype == torch.bool:
            tensor.fill_(True)
        else:
            torch.tensor([], dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage()).fill_(NAN)
    return tensor


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Make `torch.empty` and its relatives return poison, so that an output left unwritten shows."""

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate_poisoned(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            # A tracing compiler cannot access memory; allocations inside its graph do not pass here anyway.
            return tensor if torch.compiler.is_compiling() else poison(tensor)

        return allocate_poisoned

    # PyTorch caches its constructors when a default device is first set: have it cache the originals.
    with torch.device("cpu"):
        torch.empty(0)
    names = {torch: ("empty", "empty_like", "empty_strided"), Tensor: ("new_empty", "new_empty_strided")}
    with _replaced(
        {(owner, name): poisoned(getattr(owner, name)) for owner in names for name in names[owner]}
    ):
        yield


# ---- memory around tensors --------------------------------------------------------------------------------


class Guarded:
    """Tensor surrounded by memory filled with a byte. `check` detects any byte written outside of its elements.

    With `NAN` as the byte, an element read outside of them shows in the results as well.
    """

    MARGIN = 1024

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        strides: Sequence[int] | None = None,
        fill: int = 0xA5,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = tuple(shape)
        if strides is None:
            strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        size = extent * dtype.itemsize + 2 * self.MARGIN
        self.fill = fill
        self.memory = torch.full((-(-size // 64) * 64,), fill, dtype=torch.uint8, device=device)
        self.words = self.memory.view(WORDS[dtype.itemsize])
        self.words = self.words.as_strided(shape, strides, self.MARGIN // dtype.itemsize)
        self.tensor = self.words.view(dtype)

    @classmethod
    def of(cls, tensor: Tensor, fill: int = 0xA5) -> Guarded:
        """Return a guarded copy with the same strides."""
        guarded = cls(tensor.shape, tensor.dtype, tensor.stride(), fill, tensor.device)
        guarded.tensor.copy_(tensor)
        return guarded

    def check(self) -> Tensor:
        """Return a contiguous copy of the tensor, after asserting that the memory around it is unchanged."""
        elements = self.words.clone(memory_format=torch.contiguous_format)
        filler = torch.full((elements.element_size(),), self.fill, dtype=torch.uint8, device=elements.device)
        self.words.copy_(filler.view(elements.dtype)[0])
        stray = (self.memory != self.fill).nonzero().flatten() - self.MARGIN
        assert not len(stray), f"bytes written outside of the tensor, at {stray[:8].tolist()}"
        self.words.copy_(elements)
        return elements.view(self.tensor.dtype)


@contextmanager
def guarded_allocations(fill: int = NAN, device: torch.device | str = "cpu") -> Iterator[list[Guarded]]:
    """Guard the allocations of `torch.empty`, its relatives and `torch.zeros` on a type of device; yield the guards.

    A tensor with a stride of 0 is not guarded: its elements overlap.
    """
    guards: list[Guarded] = []
    zeros, device_type = torch.zeros, torch.device(device).type

    def guarded(value: float | None) -> Callable[..., Tensor]:
        def allocate(*shape: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
            size = tuple(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
            if torch.device(device or "cpu").type != device_type or 0 in size:
                return zeros(size, dtype=dtype, device=device)
            guards.append(Guarded(size or (1,), dtype or torch.float32, fill=fill, device=device or "cpu"))
            tensor = guards[-1].tensor.view(size)
            return tensor if value is None else tensor.fill_(value)

        return allocate

    empty, strided = guarded(None), torch.empty_strided

    def empty_like(x: Tensor, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return empty(tuple(x.shape), dtype=dtype or x.dtype, device=device or x.device)

    def empty_strided(size: Any, stride: Any, **options: Any) -> Tensor:
        if 0 in stride or 0 in size:
            return strided(size, stride, **options)
        length = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        return empty((length,), **options).as_strided(size, stride)

    replacements: dict[str, Callable[..., Tensor]] = {
        "empty": empty,
        "empty_like": empty_like,
        "empty_strided": empty_strided,
        "zeros": guarded(0.0),
    }
    with _replaced({(torch, name): function for name, function in replacements.items()}):
        yield guards


class Fenced:
    """Page of memory between two inaccessible ones: a stray read or write ends the process."""

    PAGE = mmap.PAGESIZE

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 3 * self.PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for fence in (address, address + 2 * self.PAGE):
            assert protect(fence, self.PAGE, 0) == 0, "mprotect failed"

    def last(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return the `count` elements before the upper fence."""
        size = count * dtype.itemsize
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=2 * self.PAGE - size)

    def first(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return the `count` elements after the lower fence."""
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=self.PAGE)


@contextmanager
def _replaced(functions: dict[tuple[Any, str], Callable[..., Any]]) -> Iterator[None]:
    """Replace attributes of modules and classes inside a `with` block."""
    originals = {(owner, name): getattr(owner, name) for owner, name in functions}
    try:
        for (owner, name), function in functions.items():
            setattr(owner, name, function)
        yield
    finally:
        for (owner, name), function in originals.items():
            setattr(owner, name, function)
