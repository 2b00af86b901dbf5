"""Mutants of kernels without one synchronization, for sm_90 and sm_100: tests of the emulator's checks.

The mutants leave out barriers of the block and of a warp, waits for mbarriers, arrivals and expected bytes, init and
inval, fences, commits and waits of groups, of products and of tensor memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import pytest
import torch
import triton_loom
from gpu.hopper_kernels import Case
from triton_loom.emulator.machine import Program

DELIVERIES: tuple[Literal["late", "early"], ...] = ("late", "early")
OPERATIONS = (
    "bar.sync", "barrier.sync", "bar.warp.sync", "mbarrier.try_wait", "mbarrier.arrive", "mbarrier.init",
    "mbarrier.inval", "wgmma.wait_group", "wgmma.fence", "wgmma.commit_group", "fence.proxy.async",
    "fence.proxy.tensormap", "cp.async.bulk.wait_group", "cp.async.bulk.commit_group", "cp.async.wait_group",
    "cp.async.commit_group", "tcgen05.commit", "tcgen05.wait::ld", "tcgen05.wait::st", "tcgen05.fence",
    "tcgen05.dealloc", "tcgen05.relinquish_alloc_permit",
)  # fmt: skip
_OPERATION = re.compile(rf"\s*(?:@!?%\w+ )?({'|'.join(map(re.escape, OPERATIONS))})")


def mutants(ptx: str) -> Iterator[tuple[str, str]]:
    """Yield a name and the text without one of the operations: `bar.sync 3` is the third one."""
    lines = ptx.splitlines()
    seen: dict[str, int] = {}
    for number, line in enumerate(lines):
        match = _OPERATION.match(line)
        if not match:
            continue
        operation = "expect_tx" if "expect_tx" in line else match[1]
        seen[operation] = seen.get(operation, 0) + 1
        name = f"{operation} {seen[operation]}"
        loop = operation == "mbarrier.try_wait"  # the branch back follows it
        yield name, "\n".join([*lines[:number], *lines[number + 1 + loop :]])
        if operation == "expect_tx":
            halved = re.sub(r"(\d+);", lambda bytes_: f"{int(bytes_[1]) // 2};", line)
            arrival = re.sub(r"\.expect_tx(.*), \d+;", r"\1;", line)
            for change, replacement in (("halved", halved), ("without bytes", arrival)):
                yield f"{name} {change}", "\n".join([*lines[:number], replacement, *lines[number + 1 :]])


@contextmanager
def executing(ptx: str | None) -> Iterator[None]:
    """Execute a changed PTX in place of Triton's inside a `with` block."""
    with pytest.MonkeyPatch.context() as patch:
        if ptx is not None:
            patch.setattr(Program, "of", lambda _: Program(ptx))
        yield


def run(
    target: str, case: Case, delivery: Literal["late", "early"], ptx: str | None = None
) -> tuple[torch.Tensor, set[str], str]:
    """Return the result, the kinds of findings, and Triton's PTX."""
    result, _, launch = case.make()
    with triton_loom.emulate(target, raises=False, delivery=delivery) as gpu, executing(ptx):
        kernel = launch()
    return result, {finding.kind for finding in gpu.findings}, kernel.asm["ptx"]


def examine(target: str, case: Case, selected: Callable[[str], bool]) -> dict[str, set[str]]:
    """Return the findings of each selected mutant. A mutant that is not reported must not change the result."""
    expected, findings, ptx = run(target, case, "late")
    assert not findings
    seen: dict[str, set[str]] = {}
    for mutant, text in mutants(ptx):
        if not selected(mutant):
            continue
        results = [run(target, case, delivery, text)[:2] for delivery in DELIVERIES]
        reported = [kinds for _, kinds in results]
        assert all(reported) or not any(reported), f"{mutant} depends on when copies arrive: {reported}"
        if not any(reported):
            assert all(torch.equal(result, expected) for result, _ in results), f"{mutant} changes the result"
        seen[mutant] = set.union(*reported)
    return seen


def without(ptx: str, names: tuple[str, ...]) -> str:
    """Return the text without several operations, removed last to first so that the others keep their numbers."""
    for name in reversed(names):
        ptx = dict(mutants(ptx))[name]
    return ptx
