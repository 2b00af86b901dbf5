"""Allocations of PyTorch's CPU allocator, as its own profiler counts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import profile

_PROBE = 7919  # bytes that nobody else allocates


def allocations_of(call: Callable[[], Any]) -> list[int]:
    """Return the bytes of each allocation of a call. The allocator itself reports them, so none goes unseen, whoever
    asks for it."""
    for _ in range(5):
        with profile(profile_memory=True) as profiler:
            call()
            torch.empty(_PROBE, dtype=torch.uint8)
        events = profiler.kineto_results.events()  # type: ignore[union-attr]
        sizes = [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]
        if _PROBE in sizes:
            sizes.remove(_PROBE)
            return sizes
    raise RuntimeError("the profiler does not see a known allocation")  # it may be late on a busy machine
