"""`sanitize()`: launches inside it are checked, access by access."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

from ..errors import Finding, SanitizerError
from .fresh import FreshMemory
from .scopes import SCOPES
from .watched import PointerArgument, Watched


class Sanitizer:
    """A scope: its findings, and the memory that was allocated in it without being written."""

    def __init__(self, collect: bool, dry: bool) -> None:
        self.collect, self.dry = collect, dry
        self.findings: list[Finding] = []
        self.launches = 0
        self.allowed: dict[str, torch.Tensor] = {}
        self._fresh: dict[int, FreshMemory] = {}
        self._kept = 64  # how many of these were alive when last looked at

    def allow(self, *tensors: torch.Tensor) -> None:
        """Tensors that kernels may reach by addresses they find in memory, until the scope ends."""
        for tensor in tensors:
            self.allowed[f"allowed[{len(self.allowed)}]"] = tensor

    def finish(self, watched: Watched, broken: Sequence[tuple[str, str]]) -> None:
        """Takes a launch's findings down; raises them unless they are collected."""
        found = [*self._promises(watched, broken), *self._records(watched)]
        self.launches += 1
        merged: dict[Any, Finding] = {}
        for finding in found:
            key = (finding.kind, finding.file, finding.line, finding.argument)
            first = merged.get(key, finding)
            merged[key] = first if first is finding else replace(first, count=first.count + finding.count)
        if merged:
            self.findings += merged.values()
            if not self.collect:
                raise SanitizerError(list(merged.values()))

    def _promises(self, watched: Watched, broken: Sequence[tuple[str, str]]) -> Iterator[Finding]:
        for name, detail in broken:
            yield self._finding("broken promise", watched, watched.location, name, detail)

    def _records(self, watched: Watched) -> Iterator[Finding]:
        for kind, site, record in watched.findings():
            argument = watched.arguments[record.argument] if record.argument >= 0 else None
            program = tuple(record.program)
            index = None
            if kind == "offset overflow" and site["what"] == "loop":
                detail = (
                    f"the loop's counter would be {record.value} after this step, which an int32 can't hold: it "
                    "would wrap around and the loop go on"
                )
            elif kind == "offset overflow":
                detail = f"the exact result is {record.value}, which an int32 can't hold"
            elif kind == "broken promise":
                detail = f"the value {record.value} is not what tl.multiple_of, max_contiguous or max_constancy says"
            elif argument is None:
                detail = f"address {record.address:#x} is in none of the tensor arguments"
            else:
                index = argument.index(record.address)
                detail = _detail(kind, site, record, argument, index, watched)
            name = argument.name if argument else None
            if site["called"] != site["location"]:
                detail = f"{detail}; called at {site['called']}"
            yield replace(
                self._finding(kind, watched, site["location"], name, detail),
                program=program,
                index=index,
                count=record.count,
            )

    def _finding(self, kind: Any, watched: Watched, location: str, name: str | None, detail: str) -> Finding:
        file, _, line = location.rpartition(":")
        return Finding(
            kind, watched.kernel, file, int(line or 0), None, name, None, self.launches, caller(), 1, detail
        )

    # -- fresh memory --

    def watch(self, tensor: Any) -> Any:
        """Fills a new tensor's memory with a pattern and remembers it; gives the tensor."""
        if (
            type(tensor) is not torch.Tensor
            or self.dry
            or tensor.device.type != "cpu"
            or tensor.layout != torch.strided
            or not tensor.untyped_storage().nbytes()
        ):
            return tensor
        if len(self._fresh) >= 2 * self._kept:
            self._fresh = {low: memory for low, memory in self._fresh.items() if not memory.freed()}
            self._kept = max(len(self._fresh), 64)
        fresh = FreshMemory(tensor)
        self._fresh[fresh.low] = fresh
        return tensor

    def fresh_memory(self, tensor: torch.Tensor) -> FreshMemory | None:
        """The fresh memory that a tensor lies in, if it does."""
        storage = tensor.untyped_storage()
        fresh = self._fresh.get(storage.data_ptr())
        if fresh is not None and (fresh.freed() or fresh.high - fresh.low != storage.nbytes()):
            del self._fresh[fresh.low]  # freed; somebody else's memory is there now
            return None
        return fresh


def _detail(
    kind: str,
    site: Any,
    record: Any,
    argument: PointerArgument,
    index: tuple[int, ...] | None,
    watched: Watched,
) -> str:
    element = f"element {index} of {argument.describe()}"
    if index is None:
        offset = argument.distance(record.address) / argument.tensor.element_size()
        element = f"element {offset:g} places from the first one of {argument.describe()}"
    if kind == "race":
        did = {"load": "reads", "store": "writes", "atomic": "atomically updates"}[site["what"]]
        other = (
            f"program {watched.program(record.other)} has" if record.other >= 0 else "several programs have"
        )
        return f"{did} {element}, which {other} {'written' if did == 'reads' else 'touched'}; nothing orders the two"
    if kind == "uninitialised read":
        return f"nobody has written {element} since it was allocated"
    return f"there is no {element}"


def caller() -> str:
    """ "file:line" of the innermost frame that is neither Triton's nor Loom's."""
    own = tuple(
        f"{directory}{os.sep}" for directory in (Path(__file__).parents[1], Path(triton.__file__).parent)
    )
    frame = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename.startswith(own) or frame.f_code.co_filename.startswith("<")
    ):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""


# ---- scopes ----------------------------------------------------------------------------------------------

_ALLOCATORS = [
    *[(torch, name) for name in ("empty", "empty_like", "empty_strided", "empty_permuted")],
    *[(torch.Tensor, name) for name in ("new_empty", "new_empty_strided")],
]


def _watched_allocator(allocate: Callable[..., Any], sanitizer: Sanitizer) -> Callable[..., Any]:
    @functools.wraps(allocate)
    def allocate_watched(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return allocate(*args, **kwargs)
        return sanitizer.watch(allocate(*args, **kwargs))

    return allocate_watched


@contextmanager
def _watched_allocations(sanitizer: Sanitizer) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name in _ALLOCATORS:
            patched = _watched_allocator(getattr(owner, name), sanitizer)
            stack.enter_context(mock.patch.object(owner, name, patched))
        yield


@contextmanager
def sanitize(*, collect: bool, dry: bool) -> Iterator[Sanitizer]:
    """A scope for a `with` block. It checks launches on a device that is made inside of it."""
    sanitizer = Sanitizer(collect, dry)
    with SCOPES.opened(SCOPES.sanitizers, sanitizer), _watched_allocations(sanitizer):
        yield sanitizer


@functools.cache
def sanitize_process(collect: bool) -> None:
    """A scope that lasts as long as the process does: TRITON_LOOM_SANITIZE."""
    sanitizer = Sanitizer(collect, dry=False)
    SCOPES.sanitizers.insert(0, sanitizer)
    _watched_allocations(sanitizer).__enter__()
    atexit.register(lambda: print(*sanitizer.findings, sep="\n", file=sys.stderr))
