"""Timing in `weft bench`: contenders in turn, and on a GPU (a stand-in here) graphs, copies of the inputs, a cold cache
and a backlog."""

from __future__ import annotations

import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.lab.bench import clocks
from weft.lab.bench.clocks import CpuClock, GpuClock, Ready, Times, timed

DEVICE = torch.device("cpu")


class Cuda:
    """Stand-in for `torch.cuda` that logs what is queued. A graph records once, and its replays take 1 ms per run."""

    def __init__(self, l2: int = 1000) -> None:
        self.l2, self.log, self.recording = l2, [], None
        self.now = 0.0

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(L2_cache_size=self.l2)

    def _sleep(self, cycles: int) -> None:
        self.log.append("spin")

    def synchronize(self, device: torch.device) -> None:
        self.log.append("synchronize")

    def Stream(self, device: torch.device) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None)

    current_stream = Stream

    @contextmanager
    def stream(self, aside: Any) -> Any:
        yield

    def CUDAGraph(self) -> Any:
        graph = SimpleNamespace(runs=0)
        graph.replay = lambda: self.work(graph.runs, "replay")
        return graph

    @contextmanager
    def graph(self, graph: Any) -> Any:
        self.recording = graph
        yield
        self.recording = None

    def work(self, runs: int, what: str) -> None:
        self.log.append(what)
        self.now += 1e-3 * runs

    def run(self) -> None:
        """Do the work of a contender."""
        if self.recording is not None:
            self.recording.runs += 1
        else:
            self.work(1, "run")

    def Event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(at=None)

        def record() -> None:
            self.log.append("event")
            event.at = self.now

        event.record = record
        event.elapsed_time = lambda end: 1e3 * (end.at - event.at)
        return event


def gpu(cuda: Cuda) -> GpuClock:
    clock = GpuClock(DEVICE, cuda)
    zero = clock.other_data.zero_

    def flush() -> Any:
        cuda.log.append("flush")
        return zero()

    clock.other_data = SimpleNamespace(zero_=flush)  # type: ignore[assignment]
    return clock


def test_a_gpu_replays_graphs_behind_a_backlog_with_a_cold_cache() -> None:
    cuda = Cuda()
    clock = gpu(cuda)
    ready = {name: clock.ready([cuda.run, cuda.run]).run for name in ("weft", "eager")}
    cuda.log.clear()
    spans = clock.round(ready)
    one = ["spin", "flush", "event", "replay", "event"]
    assert cuda.log == [*one, *one, "synchronize"]  # nothing waits before all is queued
    assert spans == pytest.approx({"weft": 2e-3, "eager": 2e-3})


def test_times_are_per_copy_of_the_inputs() -> None:
    cuda = Cuda()
    times, notes = timed(gpu(cuda), {"weft": [cuda.run] * 4}, 3)
    assert times["weft"].p50 == pytest.approx(1.0)
    assert not notes


def test_copies_are_larger_than_the_cache() -> None:
    clock = gpu(Cuda(l2=1000))
    assert clock.copies(100) == 20
    assert clock.copies(5000) == 1
    assert clock.copies(0) == clock.MOST


def test_calls_that_no_graph_takes_run_directly_with_a_note() -> None:
    cuda = Cuda()

    @contextmanager
    def refuses(graph: Any) -> Any:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")
        yield

    cuda.graph = refuses  # type: ignore[method-assign]
    ready = gpu(cuda).ready([cuda.run, cuda.run])
    assert ready.note == "without a graph: operation not permitted"
    cuda.log.clear()
    ready.run()
    assert cuda.log == ["run", "run"]


def test_memory_of_a_gpu_is_the_peak_above_the_start() -> None:
    cuda = Cuda()
    held = {"now": 100, "most": 900}
    cuda.memory_allocated = lambda device: held["now"]  # type: ignore[attr-defined]
    cuda.max_memory_allocated = lambda device: held["most"]  # type: ignore[attr-defined]
    cuda.reset_peak_memory_stats = lambda device: held.update(most=held["now"])  # type: ignore[attr-defined]
    assert gpu(cuda).extra_memory(lambda: held.update(most=350)) == 250


# ---- on a CPU ---------------------------------------------------------------------------------------------


def test_memory_of_a_cpu_is_the_peak() -> None:
    x = torch.ones(1000, 1000)

    def run() -> torch.Tensor:
        y = x + 1
        z = y * 2
        del y
        return z.sum(0)

    counted = CpuClock().extra_memory(run)
    assert 8e6 <= counted < 8.1e6
    assert CpuClock().extra_memory(lambda: x.add_(1)) < 1000


def test_contenders_take_turns() -> None:
    seen: list[str] = []
    runs = {name: [lambda name=name: seen.append(name)] for name in "ab"}
    timed(CpuClock(), runs, 3)  # type: ignore[arg-type]
    assert "".join(seen) == "ab" * (3 + clocks.WARM_UP)


def test_a_slow_contender_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "PATIENCE", 0.005)
    calls = {"slow": 0, "quick": 0}

    def run(name: str) -> None:
        calls[name] += 1
        if name == "slow":
            time.sleep(0.002)

    timed(CpuClock(), {name: [lambda name=name: run(name)] for name in calls}, 20)  # type: ignore[misc]
    assert calls == {"slow": clocks.FEWEST + clocks.WARM_UP, "quick": 20 + clocks.WARM_UP}


def test_times_are_percentiles() -> None:
    assert Times.of([i / 1e3 for i in range(11)]) == Times(2.0, 5.0, 8.0)


def test_pages_are_retained_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda what, value: options.append((what, value)))
    monkeypatch.setattr(clocks.ctypes, "CDLL", lambda name: library)
    with clocks.kept_pages():
        assert options == [(-4, 0), (-1, -1)]
    assert options[2:] == [(-4, 65536), (-1, 128 << 10)]


def test_ready_has_no_note_by_default() -> None:
    assert CpuClock().ready([int]) == Ready(int)
