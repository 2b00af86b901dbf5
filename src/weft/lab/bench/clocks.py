"""Time calls and count their memory: contenders in turn, round after round, on the clock of the device.

On a CPU, a round calls each contender once, on the host's clock; caches are as the previous contender left them, and
the C allocator keeps its pages, as a GPU's does. On a GPU, a contender is recorded in a CUDA graph that calls it once
on each of several copies of its inputs, together larger than the L2 cache. Before each replay the cache is filled with
other data, behind a spinning kernel that lets the host get ahead, so that only device work lies between two events. The
GPU path was tested with stand-ins and never run on a GPU.
"""

from __future__ import annotations

import ctypes
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

Run = Callable[[], Any]

WARM_UP = 2  # rounds whose times are discarded
PATIENCE = 2.0  # seconds after which a slow contender takes no further turn, once it had `FEWEST`
FEWEST = 5


@dataclass(frozen=True)
class Times:
    """Percentiles of one contender's times, in milliseconds."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        cuts = statistics.quantiles(seconds, n=10, method="inclusive")
        return cls(*(round(1e3 * cut, 5) for cut in (cuts[1], statistics.median(seconds), cuts[7])))


class Ready(NamedTuple):
    """A contender's call in every round."""

    run: Run
    note: str = ""  # what a reader of its times must know


class Clock(Protocol):
    """A device's way to time calls."""

    def copies(self, size: int) -> int:
        """Return on how many copies of inputs of so many bytes a contender is called in turn."""

    def ready(self, runs: Sequence[Run]) -> Ready:
        """Combine all runs of a contender into one, each on its own copy of the inputs."""

    def round(self, contenders: Mapping[str, Run]) -> dict[str, float]:
        """Call each contender in turn and return the seconds it took."""

    def extra_memory(self, run: Run) -> int:
        """Return the peak of bytes allocated by a run beyond those before it. Results are included."""


def clock_of(device: torch.device) -> Clock:
    return GpuClock(device) if device.type == "cuda" else CpuClock()


def timed(
    clock: Clock, contenders: Mapping[str, Sequence[Run]], rounds: int
) -> tuple[dict[str, Times], dict[str, str]]:
    """Return (times, notes) of all contenders, in turn. They have several runs where the clock needs copies of the
    inputs."""
    ready = {name: clock.ready(runs) for name, runs in contenders.items()}
    waiting = {name: one.run for name, one in ready.items()}
    spans: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + WARM_UP):
        for name, seconds in clock.round(waiting).items():
            if turn >= WARM_UP:
                spans[name].append(seconds / len(contenders[name]))
                if len(spans[name]) >= FEWEST and sum(spans[name]) > PATIENCE:
                    del waiting[name]
    notes = {name: one.note for name, one in ready.items() if one.note}
    return {name: Times.of(seconds) for name, seconds in spans.items()}, notes


# ---- on a CPU ---------------------------------------------------------------------------------------------


class CpuClock:
    """The host's clock. PyTorch's profiler counts memory at every allocation of PyTorch's allocator; memory that a
    library takes from the system directly is not seen."""

    def copies(self, size: int) -> int:
        return 1

    def ready(self, runs: Sequence[Run]) -> Ready:
        (run,) = runs
        return Ready(run)

    def round(self, contenders: Mapping[str, Run]) -> dict[str, float]:
        spans = {}
        for name, run in contenders.items():
            begin = time.perf_counter()
            run()
            spans[name] = time.perf_counter() - begin
        return spans

    def extra_memory(self, run: Run) -> int:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it writes to stderr when it begins and ends
        with torch.autograd.profiler.profile(profile_memory=True) as profiled:
            result = run()
        del result
        assert profiled.kineto_results is not None
        current = peak = 0
        for event in profiled.kineto_results.events():
            if event.name() == "[memory]":
                current += event.nbytes()
                peak = max(peak, current)
        return peak


# Two parameters of glibc's mallopt, as malloc.h numbers them, and the default of the first.
_MMAP_MAX, _TRIM_THRESHOLD, _MMAPS = -4, -1, 65536


@contextmanager
def kept_pages() -> Iterator[None]:
    """Let the C allocator keep freed memory, so that results cost no page faults. Those take longer than many kernels,
    for every contender alike. Allocators other than glibc's are left alone."""
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is None:
        yield
        return
    tune(_MMAP_MAX, 0)
    tune(_TRIM_THRESHOLD, -1)
    try:
        yield
    finally:
        tune(_MMAP_MAX, _MMAPS)
        tune(_TRIM_THRESHOLD, 128 << 10)


# ---- on a GPU ---------------------------------------------------------------------------------------------


class GpuClock:
    """Events around replays of CUDA graphs. `cuda` is `torch.cuda`, or a stand-in in tests."""

    SPIN = 1_000_000  # cycles that keep the device busy while the host queues the rest: half a millisecond
    MOST = 64  # copies of small inputs

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self.device, self.cuda = device, cuda
        self.cache = int(cuda.get_device_properties(device).L2_cache_size)
        self.other_data = torch.empty(2 * self.cache, dtype=torch.uint8, device=device)

    def copies(self, size: int) -> int:
        return min(self.MOST, max(1, math.ceil(2 * self.cache / max(size, 1))))

    def ready(self, runs: Sequence[Run]) -> Ready:
        """Record a graph of all runs. Calls that cannot be recorded (they synchronize with the device) are made anew
        each time, and their times include the host's."""

        def run_all() -> None:
            for run in runs:
                run()

        # Recording requires that libraries warm up on another stream.
        side_stream = self.cuda.Stream(self.device)
        side_stream.wait_stream(self.cuda.current_stream(self.device))
        with self.cuda.stream(side_stream):
            run_all()
        self.cuda.current_stream(self.device).wait_stream(side_stream)
        graph = self.cuda.CUDAGraph()
        try:
            with self.cuda.graph(graph):
                run_all()
        except RuntimeError as error:
            self.cuda.synchronize(self.device)
            return Ready(run_all, f"without a graph: {str(error).splitlines()[0]}")
        return Ready(graph.replay)

    def round(self, contenders: Mapping[str, Run]) -> dict[str, float]:
        events = {}
        for name, run in contenders.items():
            begin, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
            self.cuda._sleep(self.SPIN)
            self.other_data.zero_()
            begin.record()
            run()
            end.record()
            events[name] = begin, end
        self.cuda.synchronize(self.device)
        return {name: begin.elapsed_time(end) / 1e3 for name, (begin, end) in events.items()}

    def extra_memory(self, run: Run) -> int:
        self.cuda.synchronize(self.device)
        before = self.cuda.memory_allocated(self.device)
        self.cuda.reset_peak_memory_stats(self.device)
        result = run()
        self.cuda.synchronize(self.device)
        del result
        return int(self.cuda.max_memory_allocated(self.device)) - int(before)
