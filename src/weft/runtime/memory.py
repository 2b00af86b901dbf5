"""Memory of calls: scratch that a launch needs besides its outputs, and tensors that share memory.

A launch takes all of its scratch from `scratch`. Without a workspace that is PyTorch's allocator. Within
`weft.workspace(buffer)` it is the caller's buffer: pieces follow each other and are all released when the op's kernels
have been launched, so that the next op, which runs later on the same stream, starts at the beginning again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from .remembered import remembered

R = TypeVar("R")

PLAIN = frozenset({Tensor, Parameter})  # not other subclasses

_ALIGNMENT = 64  # bytes: pieces of a workspace start at multiples of it; kernels need 16


class _Local(threading.local):
    current: workspace | None = None  # of the innermost `with` block of this thread
    launching: workspace | None = None  # the same one, while an op launches its kernels


_local = _Local()


class WorkspaceFull(Exception):
    """The launch needs more scratch than the workspace has."""


class workspace:
    """Use the caller's memory for what calls need besides their results, such as partial sums.

    buffer: a contiguous tensor of any dtype that starts at a multiple of 64 bytes, as PyTorch's own do. Calls of this
    thread inside the `with` block take their scratch memory from it. Each call starts at its beginning again, so the
    buffer needs as many bytes as the most demanding call, and belongs to one stream. A call that needs more is refused
    with the number of bytes that it needs, and what it writes is then undefined. Nobody else may use the buffer
    meanwhile: a call that has an argument or a result in it is refused.

    Without a buffer the memory comes from PyTorch, and `nbytes` tells how many bytes a buffer needs for these calls.
    Together with `out=`, a call of Weft's kernels allocates nothing. Scratch of other libraries' engines, of
    references, and of backward passes on other threads comes from PyTorch.

    >>> import torch, weft
    >>> x = torch.randn(64, 256)
    >>> with weft.workspace() as needed:
    ...     q = weft.quantize(x, "tensor")
    >>> needed.nbytes > 0
    True
    >>> buffer = torch.empty(needed.nbytes, dtype=torch.uint8)
    >>> with weft.workspace(buffer):
    ...     q = weft.quantize(x, "tensor", out=q)
    """

    def __init__(self, buffer: Tensor | None = None) -> None:
        if buffer is not None:
            if not isinstance(buffer, Tensor):
                raise TypeError(
                    f"buffer must be a tensor, or None to count bytes; got {type(buffer).__name__}"
                )
            if type(buffer) is not Tensor or not buffer.is_contiguous() or buffer.requires_grad:
                raise ValueError(
                    "buffer must be a plain contiguous tensor that requires no gradient, such as "
                    "torch.empty(nbytes, dtype=torch.uint8, device=...)"
                )
            if buffer.data_ptr() % _ALIGNMENT:
                raise ValueError(
                    f"buffer must start at a multiple of {_ALIGNMENT} bytes; its address is {buffer.data_ptr():#x}. "
                    "PyTorch's own tensors do, slices of them need not"
                )
            buffer = buffer.view(-1).view(torch.uint8)
        self._buffer = buffer
        self._used = 0
        self._outer: list[workspace | None] = []
        self.nbytes = 0

    def __enter__(self) -> workspace:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "torch.compile cannot trace weft.workspace: enter it around the call of the compiled function, whose "
                "ops then use it"
            )
        self._outer.append(_local.current)
        _local.current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _local.current = self._outer.pop()

    @property
    def is_idle(self) -> bool:
        """True while no op of this thread launches."""
        return _local.launching is None

    def check_apart(self, names: Iterable[str], values: Iterable[Any]) -> None:
        """Raise an error if a tensor among these arguments or outputs of a call lies in the buffer."""
        for name, value in zip(names, values, strict=True):
            for tensor in value if isinstance(value, list) else [value]:
                if self._buffer is not None and type(tensor) in PLAIN and overlap(tensor, self._buffer):
                    raise ValueError(
                        f"{name} shares memory with the workspace, which the call uses: give the workspace its own"
                    )

    def too_small(self, call: str, nbytes: int) -> ValueError:
        """Return the error for a call that needs `nbytes`."""
        size = 0 if self._buffer is None else self._buffer.numel()
        return ValueError(
            f"{call} needs {nbytes} bytes of workspace here; the buffer has {size}. Pass a larger one: "
            "`with weft.workspace() as needed:` around the calls counts needed.nbytes"
        )

    def run(self, launch: Callable[[], R]) -> R:
        """Run a function that launches kernels, and release its scratch memory. Raises `WorkspaceFull`."""
        outer, mark = _local.launching, self._used
        _local.launching = self
        try:
            return launch()
        finally:
            _local.launching, self._used = outer, mark

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialized memory that is valid until the kernels of this op have been launched."""
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        self._used = stop = start + math.prod(shape) * dtype.itemsize
        self.nbytes = max(self.nbytes, stop)
        buffer = self._buffer
        if buffer is None:
            return torch.empty(shape, dtype=dtype, device=device)
        if buffer.device != device:
            raise ValueError(
                f"the workspace is on {buffer.device}, but a call needs memory on {device}: give each device its own"
            )
        if stop > buffer.numel():
            raise WorkspaceFull
        return buffer[start:stop].view(dtype).view(shape)


def current_workspace() -> workspace | None:
    """Return the workspace of this thread's innermost `with weft.workspace(...)`, or None."""
    return _local.current


def scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate uninitialized memory that a launch needs besides its outputs, from the caller's workspace if there is
    one. It is valid until the kernels of the op have been launched."""
    space = _local.launching
    return (
        torch.empty(shape, dtype=dtype, device=device) if space is None else space.take(shape, dtype, device)
    )


def scratch_like(x: Tensor, device: torch.device) -> Tensor:
    """Allocate scratch memory for an output that nobody reads. x is like it, and has no memory."""
    if x.dim() and not any(x.stride()):  # the stand-in of a quantized result
        return placeholder(x.shape, x.dtype, device)
    return scratch(x.shape, x.dtype, device)


def placeholder(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor that nobody reads or writes, without allocating."""
    return _element(dtype, device).expand(shape)


@remembered
def _element(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the one element of all placeholders."""
    with torch.inference_mode(False):
        return torch.empty((), dtype=dtype, device=device)


def contiguous_copy(x: Tensor) -> Tensor:
    """Copy x, whether it is contiguous or not; a launch takes the memory from `scratch`."""
    if torch.compiler.is_compiling() or _local.launching is None:
        return x.clone(memory_format=torch.contiguous_format)
    return scratch(x.shape, x.dtype, x.device).copy_(x)


# ---- outputs without memory -----------------------------------------------------------------------------


class _Metadata(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def metadata(value: Any) -> Any:
    """Return an argument of an op as a cache key, with tensors replaced by their shape, strides and dtype."""
    if isinstance(value, list):
        return tuple(map(metadata, value))
    return _Metadata(value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value


def without_memory(key: Any) -> Any:
    """Return the argument of which `metadata` made this key, with tensors on the meta device."""
    if type(key) is tuple:
        return list(map(without_memory, key))
    if type(key) is not _Metadata:
        return key
    return torch.empty_strided(key.shape, key.stride, dtype=key.dtype, device="meta")


# ---- tensors that share memory --------------------------------------------------------------------------


def overlaps_itself(x: Tensor) -> bool:
    """Return whether elements of x may share memory, as those of an expanded tensor do."""
    reach = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return x.numel() > 0
            reach += (size - 1) * stride
    return False


def overlap(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors may share memory. Slices along any dimension of one tensor are told apart, such as
    the heads of q, k and v in a packed projection."""
    if x.device != y.device or not x.numel() or not y.numel():
        return False
    starts = x.data_ptr(), y.data_ptr()
    dims = [
        [(step * t.itemsize, size) for step, size in zip(t.stride(), t.shape, strict=True) if size > 1]
        for t in (x, y)
    ]
    spans = [_reach(each) + t.itemsize for each, t in zip(dims, (x, y), strict=True)]
    if starts[0] + spans[0] <= starts[1] or starts[1] + spans[1] <= starts[0]:
        return False
    # If all longer strides of both are multiples of one, the tensors lie in lanes that repeat at this stride.
    for lane in {step for step, _ in (*dims[0], *dims[1]) if step}:
        if any(step > lane and step % lane for step, _ in (*dims[0], *dims[1])):
            continue
        widths = [
            _reach([each for each in dim if each[0] < lane]) + t.itemsize
            for dim, t in zip(dims, (x, y), strict=True)
        ]
        between = (starts[1] - starts[0]) % lane  # x is in the lane at 0, y at this distance
        if widths[0] <= between and between + widths[1] <= lane:
            return False
    return True


def _reach(dims: list[tuple[int, int]]) -> int:
    """Return the distance from the first to the last element, in bytes, of dimensions given as (stride, size)."""
    return sum((size - 1) * step for step, size in dims)
