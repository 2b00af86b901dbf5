"""`sanitize()`: launches inside it are checked, access by access."""

from __future__ import annotations

import atexit
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from ..errors import Finding, SanitizerError
from .findings import findings_of
from .fresh import FreshMemory
from .scopes import SCOPES
from .verdicts import Judged, Verdict
from .watched import Broken, Watched


class Sanitizer(Judged):
    """A scope: its findings and verdicts, and the memory that was allocated in it without being written."""

    def __init__(self, collect: bool, dry: bool) -> None:
        super().__init__()
        self.collect, self.dry = collect, dry
        self.findings: list[Finding] = []
        self.launches = 0  # that were checked
        self._lock = threading.Lock()
        self.allowed: dict[str, torch.Tensor] = {}
        self._fresh: dict[int, FreshMemory] = {}
        self._kept = 64  # how many of these were alive when last looked at

    def allow(self, *tensors: torch.Tensor) -> None:
        """Tensors that kernels may reach by addresses they find in memory, until the scope ends."""
        for tensor in tensors:
            self.allowed[f"allowed[{len(self.allowed)}]"] = tensor

    def finish(self, watched: Watched, broken: Sequence[Broken]) -> None:
        """Takes a launch's findings down; raises them unless they are collected."""
        with self._lock:  # launches of other threads are told at the same time
            launch, self.launches = self.launches, self.launches + 1
        found = findings_of(watched, broken, launch)
        self.findings += found
        if found:
            self.verdicts.append(Verdict(watched.kernel.name, "findings", watched.left_out))
        elif watched.ended_early:
            self.miss(watched.kernel.name, watched.ended_early)
        else:
            self.verdicts.append(Verdict(watched.kernel.name, "clean", watched.left_out))
        if found and not self.collect:
            raise SanitizerError(found)

    def miss(self, kernel: str, reason: str) -> None:
        """Takes down that nobody checked a launch."""
        self.verdicts.append(Verdict(kernel, "not checked", reason))

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
    SCOPES.open(SCOPES.sanitizers, sanitizer, outermost=True)
    _watched_allocations(sanitizer).__enter__()

    def tell() -> None:
        print(*sanitizer.findings, f"TRITON_LOOM_SANITIZE: {sanitizer.summary}", sep="\n", file=sys.stderr)

    atexit.register(tell)
