"""`weft.capture`: a function of tensors, recorded once and replayed without its Python.

On a GPU the recording is a CUDA graph. On the CPU it is a tape of what the function did to memory: launches of kernels
with their pointers, and PyTorch's operations. Replaying either runs the same work on the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from .runtime import Launch, observing
from .runtime.ops import seen_through

R = TypeVar("R")


def capture(fn: Callable[..., R], *examples: Tensor, sizes: Sequence[int] = ()) -> Captured[R]:
    """Record `fn(*examples)` and return a function that replays it on other numbers.

    `fn` takes tensors and returns tensors; whatever may vary from call to call is in tensors on the device. The result
    of a replay is valid until the next one. Nothing is allocated by a replay on a GPU. Gradients are not recorded.

    With `sizes`, one recording for each: inputs whose first dimension is that of the first example may have any number
    of rows up to the largest size. They are put into the smallest recording that has room for them, and results are cut
    to as many rows. The rows beyond hold numbers of earlier calls, so rows of `fn` must not depend on each other.

    >>> import torch, weft
    >>> step = weft.capture(lambda x: weft.rms_norm(x), torch.randn(4, 64), sizes=(4, 16))
    >>> tuple(step(torch.randn(9, 64)).shape)
    (9, 64)
    """
    if not examples:
        raise TypeError("weft.capture needs an example of each input: weft.capture(fn, x, ...)")
    for number, example in enumerate(examples):
        if not isinstance(example, Tensor):
            kind = type(example).__name__
            raise TypeError(
                f"input {number} is a {kind}; what may vary must be a tensor, the rest belongs into fn"
            )
    devices = {example.device for example in examples}
    if len(devices) > 1:
        raise ValueError(f"the inputs are on several devices: {', '.join(sorted(map(str, devices)))}")
    if sizes and examples[0].dim() == 0:
        raise ValueError("sizes are numbers of rows, and the first example has none")
    return Captured(fn, examples, tuple(sorted(set(sizes))))


class Captured(Generic[R]):
    """A function that replays recordings; `weft.capture` makes it."""

    def __init__(self, fn: Callable[..., R], examples: tuple[Tensor, ...], sizes: tuple[int, ...]) -> None:
        self.examples = tuple(example.detach() for example in examples)
        self.rows = len(examples[0]) if sizes else None
        self.recordings = {size: _Recording(fn, self._inputs(size)) for size in sizes or (None,)}

    def _inputs(self, size: int | None) -> list[Tensor]:
        """Memory for inputs with so many rows, which begins with the examples' numbers over and over."""
        made = []
        for example in self.examples:
            if size is not None and self._varies(example):
                repeats = (-(-size // max(1, len(example))),) + (1,) * (example.dim() - 1)
                made.append(example.repeat(repeats)[:size].clone())
            else:
                made.append(example.clone(memory_format=torch.preserve_format))
        return made

    def _varies(self, example: Tensor) -> bool:
        return self.rows is not None and example.dim() > 0 and len(example) == self.rows

    def __call__(self, *inputs: Tensor) -> R:
        rows = self._check(inputs)
        size = next(
            (size for size in self.recordings if size is not None and rows is not None and size >= rows), None
        )
        recording = self.recordings[size]
        with torch.no_grad():
            for held, given, example in zip(recording.inputs, inputs, self.examples, strict=True):
                (held[:rows] if self._varies(example) else held).copy_(given)
        recording.replay()
        if rows is None:
            whole: R = recording.result
            return whole
        cut: R = tree_map(
            lambda t: t[:rows] if isinstance(t, Tensor) and t.dim() and len(t) == size else t,
            recording.result,
        )
        return cut

    def _check(self, inputs: Sequence[Tensor]) -> int | None:
        """The number of rows of the inputs, which must be like the examples in all else."""
        if len(inputs) != len(self.examples):
            raise TypeError(f"{len(self.examples)} inputs were captured, {len(inputs)} are given")
        rows = len(inputs[0]) if self.rows is not None and isinstance(inputs[0], Tensor) else None
        for number, (given, example) in enumerate(zip(inputs, self.examples, strict=True)):
            wanted = tuple(example.shape)
            if rows is not None and self._varies(example):
                wanted = (rows, *wanted[1:])
            for what, has, must in (
                ("shape", tuple(given.shape), wanted),
                ("dtype", given.dtype, example.dtype),
                ("device", given.device, example.device),
            ):
                if has != must:
                    raise ValueError(
                        f"input {number} has {what} {has}, captured was {must}: capture it again"
                    )
        if rows is not None and rows > max(size for size in self.recordings if size is not None):
            raise ValueError(f"{rows} rows are more than the largest of sizes={tuple(self.recordings)}")
        return rows


class _Recording:
    """One recording and the memory that it reads and writes."""

    def __init__(self, fn: Callable[..., Any], inputs: list[Tensor]) -> None:
        self.inputs = inputs
        if inputs[0].device.type == "cuda":
            self.result, self.replay = _record_graph(fn, inputs)
        else:
            self.result, self.replay = _record_tape(fn, inputs)
        for leaf in tree_flatten(self.result)[0]:
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"the captured function returns a {type(leaf).__name__}; it must return tensors"
                )


def _record_graph(fn: Callable[..., Any], inputs: list[Tensor]) -> tuple[Any, Callable[[], None]]:
    device = inputs[0].device
    aside = torch.cuda.Stream(
        device
    )  # kernels are compiled and libraries made ready before, apart from other work
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.no_grad(), torch.cuda.stream(aside):
        fn(*inputs)
    torch.cuda.current_stream(device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        result = fn(*inputs)
    return result, graph.replay


# ---- on the CPU -------------------------------------------------------------------------------------------

# What makes memory or another view of it: the tape keeps what they made.
_MAKING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
# What would have the host wait for a GPU, which a CUDA graph refuses.
_WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "unique_dim",
    "_unique2",
)


class _Tape(TorchDispatchMode):
    """Notes what is done to memory, in order, while it is done."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], object]] = []
        self.kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _WAITING:
            raise RuntimeError(
                f"{func} reads numbers on the host, so that a GPU would be waited for: it can't be captured"
            )
        result = func(*args, **kwargs)
        self.kept.append((args, kwargs, result))
        if name in _MAKING or func.is_view:
            return result
        if func._schema.is_mutable:
            self.steps.append(lambda: func(*args, **kwargs))
        else:
            self.steps.append(lambda: _put(func(*args, **kwargs), result))
        return result

    def note_launch(self, launch: Launch, grid: Any, pointers: Any, integers: Any, floats: Any) -> None:
        self.kept.append(pointers)
        self.steps.append(lambda: launch(grid, pointers, integers, floats))


def _put(made: Any, into: Any) -> None:
    for new, old in zip(tree_flatten(made)[0], tree_flatten(into)[0], strict=True):
        if isinstance(old, Tensor):
            old.copy_(new)


@contextmanager
def _taping() -> Iterator[_Tape]:
    tape = _Tape()
    with seen_through(), observing(tape.note_launch), tape:
        yield tape


def _record_tape(fn: Callable[..., Any], inputs: list[Tensor]) -> tuple[Any, Callable[[], None]]:
    with torch.no_grad(), _taping() as tape:
        result = fn(*inputs)

    def replay() -> None:
        with torch.no_grad():
            for step in tape.steps:
                step()

    return result, replay
