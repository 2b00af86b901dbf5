"""Every op of the catalogue, with every set of options, through every check, and by night on every workload. New ops
inherit all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import triton_loom
from triton_loom.testing import words

import weft
from tests.catalogue.checks import BY_NIGHT, CHECKS, OF_OPS, enough_rows, witnessed
from tests.support.night import by_family
from weft.lab.calls import differentiable, parts, results, run, small
from weft.lab.checks import NotApplicable, accuracy_by_reference
from weft.lab.families import WORKLOADS, Workload, distinct, for_op
from weft.runtime import recording

OPS = tuple(weft.catalogue)  # without those that tests define


def representative(check: str = "") -> Iterator[Any]:
    """Yield parameters: a workload, and a check if one is named. Of the workloads with the same options (for some
    checks: of the same op) one always runs, unless the check is for the night; the others are slow tests. It has rows
    of odd length if possible, since these have tails, and long rows only if there is no other."""
    seen = set()
    for workload in sorted(distinct(), key=lambda w: ("long" in w.name, w.cols % 16 == 0)):
        group = workload.op, "" if check in OF_OPS else workload.options
        name = f"{check}-{workload}" if check else str(workload)
        marks = [pytest.mark.slow] if group in seen or check in BY_NIGHT else []
        seen.add(group)
        yield pytest.param(workload, *[check] if check else [], marks=marks, id=name)


@pytest.mark.parametrize(("workload", "check"), [case for check in CHECKS for case in representative(check)])
def test_workload(workload: Workload, check: str) -> None:
    with suppress(NotApplicable):
        CHECKS[check](workload)


def fullest(op: str) -> list[Workload]:
    """Return the workloads whose launches have the most tensors. There is one for each set of kernels that an op
    launches on an H100, with a format or without."""
    best: dict[Any, tuple[int, Workload]] = {}
    for workload in distinct(for_op(op)):
        with recording("sm_90"):
            call = workload.make("meta", rows=enough_rows(workload))
        with recording("sm_90") as variants:
            call()
        kernels = frozenset((v.kernel, dict(v.constants).get("FORMAT") is not None) for v in variants)
        tensors = sum(kind.startswith("*") for v in variants for kind in v.types().values())
        if kernels not in best or best[kernels][0] < tensors:
            best[kernels] = tensors, workload
    return [workload for _, workload in best.values()]


@pytest.mark.parametrize("op", list(by_family()))
def test_every_kernel_is_witnessed(op: str) -> None:
    """Instrumented kernels build slowly: other ops and all workloads are checked by night."""
    for workload in fullest(op):
        witnessed(workload)


@pytest.mark.parametrize("options", ["plain", "layer"])
def test_accuracy_by_reference(options: str) -> None:
    """The check that a new op gets, applied to ops that are known to be right."""
    accuracy_by_reference(next(w for w in for_op("norm", "training") if w.options == options))


@pytest.mark.slow
@pytest.mark.parametrize("workload", distinct(), ids=str)
def test_no_finding_on_the_cpu(workload: Workload) -> None:
    """Sanitize the CPU's own launches, forward and backward, with few rows."""
    with triton_loom.sanitize() as seen:
        call = small(workload)
        if differentiable(workload):
            run(call)
        else:
            results(call)
    assert seen.launches, "no launch was seen"


def test_ops_and_workloads_match() -> None:
    assert {w.op for w in WORKLOADS} == set(OPS)
    assert len({str(w) for w in WORKLOADS}) == len(WORKLOADS)


@pytest.mark.parametrize("op", weft.catalogue)
def test_least_bytes_grow_with_the_rows(op: str) -> None:
    for workload in distinct(for_op(op)):
        one, two, three = (workload.least_bytes(rows) for rows in (128, 256, 384))
        assert 0 < one < two
        assert two - one == three - two


@pytest.mark.parametrize("workload", list(representative()))
def test_inputs_may_have_no_rows(workload: Workload) -> None:
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
