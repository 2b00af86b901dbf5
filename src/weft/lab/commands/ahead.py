"""Collect and compile what `weft aot build` needs: the calls of workloads, in child processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...runtime import Variant, recording
from ..compiled import Binary, compile_all
from ..problem import Workload

# Row counts that a workload is called with besides its own: tile sizes depend on them in steps.
ROWS = (1, 16, 64, 512, 4096)


def calls_of(workloads: Iterable[Workload], target: str) -> Iterable[Callable[[], Any]]:
    """Yield calls of workloads with several row counts; training workloads are also called with gradients."""
    for workload in workloads:
        for rows in sorted({*ROWS, workload.rows}):
            try:
                with recording(target):
                    call = workload.make("meta", rows=rows)
                    call()
            except ValueError:  # the target cannot multiply this format
                continue
            yield call
            if "training" in workload.tags:
                yield call.requiring_grad()


def compile_in_children(
    variants: Sequence[Variant], target: str, *, workers: int, progress: Callable[[int], None]
) -> None:
    """Compile variants for a GPU, several at once, into Triton's cache. Raise the first `CompileError`."""
    jobs = [(variant, target) for variant in variants]
    for result in compile_all(jobs, workers=workers, progress=lambda done, total, _: progress(done)):
        if not isinstance(result, Binary):
            raise result
