"""Every op of the catalogue, on every workload, through every check. A new op inherits all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton_loom
from triton_loom.testing import words

import weft
from tests.catalogue.calls import differentiable, parts, results, run, small
from tests.catalogue.checks import CHECKS, OF_OPTIONS, accuracy_by_reference
from weft.workloads import WORKLOADS, Workload, distinct, for_op


def telling(whatever_the_sizes: bool, prefix: str = "", *more: Any) -> Iterator[Any]:
    """Of the workloads that run the same compiled code, or have the same options if those alone matter, one; the others
    are slow tests. Long rows are slow tests too, unless nothing else has their options."""
    seen = set()
    for workload in sorted(distinct(), key=is_long):
        cols = workload.cols
        alike: tuple[Any, ...] = (workload.op, workload.options)
        if not whatever_the_sizes:
            alike += (len(workload.shape), cols > 1024, cols % 1024 == 0, cols % 16 == 0)
        slow = alike in seen or (is_long(workload) and not whatever_the_sizes)
        seen.add(alike)
        yield pytest.param(
            workload, *more, marks=[pytest.mark.slow] if slow else [], id=f"{prefix}{workload}"
        )


def is_long(workload: Workload) -> bool:
    return "long" in workload.name


@pytest.mark.parametrize(
    ("workload", "check"),
    [case for check in CHECKS for case in telling(check in OF_OPTIONS, f"{check}-", check)],
)
def test_workload(workload: Workload, check: str) -> None:
    CHECKS[check](workload)


@pytest.mark.parametrize("options", ["plain", "layer"])
def test_accuracy_by_reference(options: str) -> None:
    """What a new op gets, on ops that are known to be right."""
    accuracy_by_reference(next(w for w in for_op("norm", "training") if w.options == options))


@pytest.mark.slow
@pytest.mark.parametrize("workload", distinct(), ids=str)
def test_no_finding_on_the_cpu(workload: Workload) -> None:
    """The CPU's own launches, forward and backward, with few rows."""
    with triton_loom.sanitize() as seen:
        call = small(workload)
        if differentiable(workload):
            run(call)
        else:
            results(call)
    assert seen.launches, "no launch was seen"


def test_every_op_has_workloads_and_every_workload_an_op() -> None:
    assert {w.op for w in WORKLOADS} == set(weft.catalogue)
    assert len({str(w) for w in WORKLOADS}) == len(WORKLOADS)


@pytest.mark.parametrize("op", weft.catalogue)
def test_least_bytes_grow_with_the_rows(op: str) -> None:
    for workload in distinct(for_op(op)):
        one, two, three = (workload.least_bytes(rows) for rows in (128, 256, 384))
        assert 0 < one < two
        assert two - one == three - two


@pytest.mark.parametrize("workload", telling(whatever_the_sizes=True))
def test_no_rows(workload: Workload) -> None:
    call = workload.make(rows=0)
    outputs = parts(results(call))
    with weft.backend("reference"):
        wanted = parts(results(call))
    for name, value in wanted.items():
        assert (outputs[name].shape, outputs[name].dtype) == (value.shape, value.dtype), name
        if name.startswith("y.") or name == "amax":
            assert torch.equal(words(outputs[name]), words(value)), name
    if differentiable(workload):
        for name, gradient in run(call).items():
            if name.startswith("d"):
                assert not gradient.count_nonzero(), name
