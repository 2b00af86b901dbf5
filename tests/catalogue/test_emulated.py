"""Emulation of every op on a GPU: stock Triton's PTX and launcher, executed in software.

Every access to shared and global memory is checked, and a launch with a hazard raises an error.

By day, one workload of each family is emulated on sm_80; by night, all ops, all sets of options, sm_90 and sm_100:
`pytest -m slow tests/catalogue/test_emulated.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton_loom
from triton_loom.testing import words

import weft
from tests.support.night import by_family
from weft.lab.calls import parts, results, small
from weft.lab.checks import accuracy
from weft.lab.families import Workload
from weft.lab.selection import KNOWN, by_kernels, by_options
from weft.runtime.launch import choosing_for

TARGETS = ("sm_80", "sm_90", "sm_100")


def emulated(workload: Workload, target: str) -> dict[str, float]:
    """Emulate a workload, check it against float64 and Loom, and return the share of bits that differ from Loom's."""
    call = small(workload)
    with choosing_for(target):
        wanted = parts(results(call))
    with triton_loom.emulate(target, ignore=KNOWN) as gpu:
        emulated_results = parts(results(call))
        assert gpu.launches, "no launch was emulated"
        excuses = {reason for launch in gpu.launches for reason in launch.inexact}
        accuracy(workload)
    differ = {
        name: float((words(emulated_results[name]) != words(value)).float().mean())
        for name, value in wanted.items()
        if value.numel()
    }
    assert excuses or not any(differ.values()), differ
    return differ


def every_kernel() -> Iterator[Any]:
    """Yield parameters for the workloads that launch each kernel; the first of each family's last op runs by day."""
    for op in by_family():
        for turn, workload in enumerate(by_kernels(*op.values, "sm_80")):
            yield pytest.param(workload, marks=[pytest.mark.slow] if turn else op.marks, id=str(workload))


@pytest.mark.parametrize("workload", every_kernel())
def test_every_kernel(workload: Workload) -> None:
    emulated(workload, "sm_80")


@pytest.mark.slow
@pytest.mark.parametrize(
    "workload", [w for op in ("matmul", "grouped_matmul", "grouped_wgrad") for w in by_options(op)], ids=str
)
def test_products_in_tensor_memory(workload: Workload) -> None:
    """Products with so many rows that sm_100 uses tcgen05, which it does not for few rows."""
    call = workload.make(rows=130)
    with choosing_for("sm_100"):
        wanted = parts(results(call))
    with triton_loom.emulate("sm_100", ignore=KNOWN) as gpu:
        emulated_results = parts(results(call))
    assert gpu.launches, "no launch was emulated"
    for name in wanted:
        torch.testing.assert_close(
            emulated_results[name].float(), wanted[name].float(), rtol=2**-7, atol=2**-7
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "target"),
    [(w, target) for op in weft.catalogue for w in by_options(op) for target in TARGETS if w.runs_on(target)],
    ids=str,
)
def test_every_set_of_options(workload: Workload, target: str) -> None:
    emulated(workload, target)
