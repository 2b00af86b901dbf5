"""Select representative workloads: one per set of options, or as few as launch every kernel of an op."""

from __future__ import annotations

from collections.abc import Iterator

from ..runtime import recording
from .calls import few_rows
from .families import Workload, distinct, for_op

# Findings on emulated GPUs that are Triton's own: data copied by cp.async is fenced for matrix units before it has
# arrived (loom/docs/hopper.md).
KNOWN = ("proxy fence missing after cp.async",)


def by_options(op: str) -> Iterator[Workload]:
    """Yield a workload for each set of options of an op, preferring rows of odd length, then short rows."""
    seen = set()
    for workload in sorted(distinct(for_op(op)), key=lambda w: ("long" in w.name, w.cols % 16 == 0, w.cols)):
        if workload.options not in seen:
            seen.add(workload.options)
            yield workload


def by_kernels(op: str, target: str) -> Iterator[Workload]:
    """Yield workloads of an op that together launch all of its kernels on a target, short rows first."""
    seen: set[str] = set()
    for workload in sorted(distinct(for_op(op)), key=lambda w: w.cols):
        try:
            with recording(target) as variants:
                workload.make("meta", rows=few_rows(workload))()
        except ValueError:  # the target cannot multiply this format
            continue
        launched = {variant.kernel for variant in variants}
        if launched - seen:
            seen |= launched
            yield workload
