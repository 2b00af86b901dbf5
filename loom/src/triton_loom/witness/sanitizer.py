"""`sanitize()`: check every access of the launches inside it."""

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
from .watched import BrokenPromise, Watched


class Sanitizer(Judged):
    """Scope with findings and verdicts, and the memory allocated in it that has not been written yet."""

    def __init__(self, collect: bool, dry: bool) -> None:
        super().__init__()
        self.collect, self.dry = collect, dry
        self.findings: list[Finding] = []
        self.launches = 0  # checked launches
        self._lock = threading.Lock()
        self.allowed: dict[str, torch.Tensor] = {}
        self._fresh: dict[int, FreshMemory] = {}
        self._live = 64  # how many of these were alive at the last cleanup

    def allow(self, *tensors: torch.Tensor) -> None:
        """Allow kernels to access these tensors through addresses read from memory, until the scope ends."""
        for tensor in tensors:
            self.allowed[f"allowed[{len(self.allowed)}]"] = tensor

    def finish(self, watched: Watched, broken_promises: Sequence[BrokenPromise]) -> None:
        """Record the findings of a launch; raise them unless they are collected."""
        with self._lock:  # other threads may report launches at the same time
            launch, self.launches = self.launches, self.launches + 1
        findings = findings_of(watched, broken_promises, launch)
        self.findings += findings
        if findings:
            self.verdicts.append(Verdict(watched.kernel.name, "findings", watched.left_out))
        elif watched.ended_early:
            self.miss(watched.kernel.name, watched.ended_early)
        else:
            self.verdicts.append(Verdict(watched.kernel.name, "clean", watched.left_out))
        if findings and not self.collect:
            raise SanitizerError(findings)

    def miss(self, kernel: str, reason: str) -> None:
        """Record that a launch was not checked."""
        self.verdicts.append(Verdict(kernel, "not checked", reason))

    # -- fresh memory --

    def watch(self, tensor: Any) -> Any:
        """Fill a new tensor's memory with a pattern and track it; return the tensor."""
        if (
            type(tensor) is not torch.Tensor
            or self.dry
            or tensor.device.type != "cpu"
            or tensor.layout != torch.strided
            or not tensor.untyped_storage().nbytes()
        ):
            return tensor
        if len(self._fresh) >= 2 * self._live:
            self._fresh = {low: memory for low, memory in self._fresh.items() if not memory.freed()}
            self._live = max(len(self._fresh), 64)
        fresh = FreshMemory(tensor)
        self._fresh[fresh.low] = fresh
        return tensor

    def fresh_memory(self, tensor: torch.Tensor) -> FreshMemory | None:
        """Return the fresh memory that a tensor lies in; None if there is none."""
        storage = tensor.untyped_storage()
        fresh = self._fresh.get(storage.data_ptr())
        if fresh is not None and (fresh.freed() or fresh.high - fresh.low != storage.nbytes()):
            del self._fresh[fresh.low]  # freed and reused since
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
    """Open a scope for a `with` block. It checks launches on a device created inside of it."""
    sanitizer = Sanitizer(collect, dry)
    with SCOPES.opened(SCOPES.sanitizers, sanitizer), _watched_allocations(sanitizer):
        yield sanitizer


@functools.cache
def sanitize_process(collect: bool) -> None:
    """Open a scope that lasts as long as the process: TRITON_LOOM_SANITIZE."""
    sanitizer = Sanitizer(collect, dry=False)
    SCOPES.open(SCOPES.sanitizers, sanitizer, outermost=True)
    _watched_allocations(sanitizer).__enter__()

    def print_findings() -> None:
        print(*sanitizer.findings, f"TRITON_LOOM_SANITIZE: {sanitizer.summary}", sep="\n", file=sys.stderr)

    atexit.register(print_findings)
