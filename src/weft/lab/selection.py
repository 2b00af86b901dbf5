"""Which workloads stand for the others: one for each set of options, or as few as launch every kernel of an op."""

from __future__ import annotations

from collections.abc import Iterator

from ..runtime import recording
from .calls import few_rows
from .families import Workload, distinct, for_op

# What is found on emulated GPUs and is Triton's own: what cp.async brings is fenced for matrix units before it has
# arrived (loom/docs/hopper.md).
KNOWN = ("proxy fence missing after cp.async",)


def by_options(op: str) -> Iterator[Workload]:
    """A workload for each set of options of an op: with rows of odd length if there are such, and short ones."""
    seen = set()
    for workload in sorted(distinct(for_op(op)), key=lambda w: ("long" in w.name, w.cols % 16 == 0, w.cols)):
        if workload.options not in seen:
            seen.add(workload.options)
            yield workload


def by_kernels(op: str, target: str) -> Iterator[Workload]:
    """Workloads of an op that together launch each of its kernels on a target, those with short rows first."""
    seen: set[str] = set()
    for workload in sorted(distinct(for_op(op)), key=lambda w: w.cols):
        try:
            with recording(target) as variants:
                workload.make("meta", rows=few_rows(workload))()
        except ValueError:  # a format that the target does not multiply
            continue
        launched = {variant.kernel for variant in variants}
        if launched - seen:
            seen |= launched
            yield workload
