"""Mutants of four kernels with TMA and wgmma, each without one synchronization: every mutant is reported, or it is in a
table of redundant operations, with the reason.

The mutants leave out barriers of the block and of a warp, waits for mbarriers, arrivals and expected bytes, init and
inval, fences, and the commit and wait of groups. Copies arrive late, then early; both must report.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu.hopper_kernels import MATMULS, Case, attend
from gpu.mutants import DELIVERIES, examine, run, without
from triton_loom.emulator import machine
from triton_loom.emulator.machine import Program

KERNELS: dict[str, Case] = {
    name: MATMULS[name]
    for name in ("host-made descriptors", "device-made descriptors", "warp specialization")
} | {"attention": attend(192, causal=True)}

# ---- what can be left out, and why ------------------------------------------------------------------------

IN_A_ROW = (
    "several barriers stand in a row, with copies between them that one thread begins: each of the others orders the "
    "initialized mbarriers, or the buffers that have been read, just as well"
)
SAME_THREAD = (
    "what stands before and after it in this way is done by the same thread; nobody else is concerned"
)
EACH_WAITED = (
    "every thread has waited for the mbarrier itself before it; nothing is handed from one to another"
)
LOOP_HAS_MORE = (
    "the last wait for the mbarriers, and the last use of the buffers that are written next, come before barriers in "
    "the loop's last turn; a warp writes its rows of the result over rows of A that it alone has read"
)
AT_THE_END = "nothing follows that uses the memory: the kernel ends"
EMPTY_GROUP = "no bulk copy is in the group: tensormap.cp_fenceproxy is none"
ONE_WARP = "the descriptor is made, fenced and used by warp 0 of its partition alone"
ALREADY_FENCED = (
    "no copy reads what threads have written since the fence before: they have initialized mbarriers, and tiles are "
    "written by copies"
)
UNUSED = "Triton initializes mbarriers that no thread uses; the memory is used for tiles later"
BEFORE_ALL_MEET = "barrier.sync 1, at which all warps meet, follows before any other warp does anything"
RELEASED_TOGETHER = (
    "the consumer releases A and B after the same wgmma.wait_group; the copy of this tile comes after the producer has "
    "waited for the other release of the same turn"
)
RELEASE_IS_COVERED = (
    "the producer waits for both releases before it copies again; the barrier before the other one of the two stands "
    "between the last read of all warps and it"
)
NEXT_TILE_HAS_MORE = (
    "between the wait for a tile's store and the next tile stand the barriers of its loop over k"
)
NOTHING_BEFORE = "since the barrier at the end of the turn before, threads have only computed addresses"
NEVER_EXECUTED = "no warp comes there: the partition that it is for does not exist"

REDUNDANT: dict[str, dict[str, str]] = {
    "host-made descriptors": {
        **{f"bar.sync {n}": IN_A_ROW for n in (1, 2, 3, 4, 5)},
        "bar.sync 6": EACH_WAITED,
        "bar.sync 8": IN_A_ROW,
        "bar.sync 9": LOOP_HAS_MORE,
        "bar.sync 11": AT_THE_END,
        **{f"mbarrier.inval {n}": AT_THE_END for n in (1, 2, 3)},
    },
    "device-made descriptors": {
        **{
            f"cp.async.bulk.{what} {n}": EMPTY_GROUP
            for what in ("commit_group", "wait_group")
            for n in (1, 2, 3)
        },
        **{f"bar.sync {n}": ONE_WARP for n in (1, 2, 3, 4, 5)},
        "bar.sync 6": LOOP_HAS_MORE,
        "fence.proxy.async 2": ALREADY_FENCED,
        **{f"bar.sync {n}": IN_A_ROW for n in (9, 10, 11, 12, 13, 16)},
        "bar.sync 14": EACH_WAITED,
        "bar.sync 17": AT_THE_END,
    },
    "warp specialization": {
        **{f"mbarrier.init {n}": UNUSED for n in range(10, 33, 2)},
        **{f"bar.sync {n}": BEFORE_ALL_MEET for n in (1, 2, 3, 4)},
        **{
            f"cp.async.bulk.{what} {n}": EMPTY_GROUP
            for what in ("commit_group", "wait_group")
            for n in (1, 2, 3, 5)
        },
        **{f"bar.sync {n}": ONE_WARP for n in (5, 6, 7, 11, 18)},
        **{f"bar.sync {n}": SAME_THREAD for n in (8, 9, 10)},
        **{f"mbarrier.try_wait {n}": RELEASED_TOGETHER for n in (3, 4)},
        **{f"barrier.sync {n}": NEVER_EXECUTED for n in (5, 6)},
        **{f"bar.sync {n}": NEXT_TILE_HAS_MORE for n in (12, 14, 19, 21)},
        **{f"bar.sync {n}": NOTHING_BEFORE for n in (15, 22)},
        **{f"bar.sync {n}": RELEASE_IS_COVERED for n in (17, 24)},
    },
    "attention": {
        "mbarrier.inval 1": "nobody uses this mbarrier again; a tile is copied over it",
        "fence.proxy.async 1": ALREADY_FENCED,
        **{f"bar.sync {n}": IN_A_ROW for n in (3, 4, 5, 6, 7)},
        "bar.sync 8": LOOP_HAS_MORE,
        "bar.sync 10": AT_THE_END,
        **{f"mbarrier.inval {n}": AT_THE_END for n in (2, 3, 4, 5)},
    },
}


def redundant(name: str, ptx: str) -> set[str]:
    """Return the operations that can be left out of this PTX. Triton 3.7.1 writes a consumer's two releases in either
    order, from one process to the next: the barrier before the first is redundant if the producer waits for the second
    release before it waits for the first."""
    expected = set(REDUNDANT[name])
    if name == "warp specialization":
        offsets = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx))
        waits = [offsets.get(r) for r in re.findall(r"mbarrier\.try_wait\S+ complete, \[(%r\d+)\]", ptx)]
        first, second, *_ = (
            offsets[r] for r in re.findall(r"mbarrier\.arrive\.shared\S+ _, \[(%r\d+)\]", ptx)
        )
        if waits.index(second) < waits.index(first):
            expected.add("bar.sync 16")
    return expected


# Any one of these can be left out, but not all of them.
TOGETHER: list[tuple[str, tuple[str, ...], str]] = [
    ("host-made descriptors", tuple(f"bar.sync {n}" for n in (1, 2, 3, 4, 5)), "shared memory race"),
    ("host-made descriptors", tuple(f"bar.sync {n}" for n in (6, 7, 8)), "shared memory race"),
    ("device-made descriptors", tuple(f"bar.sync {n}" for n in (9, 10, 11, 12, 13)), "shared memory race"),
    ("warp specialization", tuple(f"bar.sync {n}" for n in (12, 14, 15, 16, 17)), "shared memory race"),
    ("warp specialization", ("bar.sync 16", "bar.sync 17"), "shared memory race"),
    ("warp specialization", ("mbarrier.try_wait 2", "mbarrier.try_wait 4"), "shared memory race"),
    ("attention", ("bar.sync 3", "bar.sync 4"), "shared memory race"),
    ("attention", ("bar.sync 5", "bar.sync 6", "bar.sync 7"), "shared memory race"),
]

# ---- running them -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "together", "kind"), TOGETHER)
def test_not_all_of_a_group_can_be_left_out(name: str, together: tuple[str, ...], kind: str) -> None:
    _, _, ptx = run("sm_90", KERNELS[name], "late")
    for delivery in DELIVERIES:
        _, kinds, _ = run("sm_90", KERNELS[name], delivery, without(ptx, together))
        assert kind in kinds


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_every_mutant_is_reported(name: str) -> None:
    seen = examine("sm_90", KERNELS[name], lambda mutant: True)
    assert len(seen) > 30
    unreported = {mutant for mutant, kinds in seen.items() if not kinds}
    _, _, ptx = run("sm_90", KERNELS[name], "late")
    assert unreported == redundant(name, ptx)


QUICK = {
    "host-made descriptors": {
        "bar.sync 7": "shared memory race",
        "mbarrier.try_wait 1": "shared memory race",
        "expect_tx 2 halved": "copy outlives its phase",
        "wgmma.wait_group 1": "shared memory race",
        "fence.proxy.async 1": "proxy fence missing",
        "cp.async.bulk.wait_group 1": "copy outlives its block",
    },
    "warp specialization": {
        "mbarrier.try_wait 1": "shared memory race",
        "mbarrier.arrive 1": "deadlock",
        "fence.proxy.tensormap 1": "tensor map not acquired",
        "bar.sync 23": "shared memory race",
    },
}


@pytest.mark.parametrize("name", QUICK)
def test_a_sample_of_mutants_is_reported(name: str) -> None:
    seen = examine("sm_90", KERNELS[name], QUICK[name].__contains__)
    assert set(seen) == set(QUICK[name])
    for mutant, kinds in seen.items():
        assert QUICK[name][mutant] in kinds


# ---- other mistakes of a launch ---------------------------------------------------------------------------


def changed(**changes: Callable[[Any], Any]) -> Callable[..., machine.Outcome]:
    """Return the machine's `run` with changed arguments."""
    original = machine.run

    def run_changed(program: Program, **launch: Any) -> machine.Outcome:
        return original(program, **{k: changes[k](v) if k in changes else v for k, v in launch.items()})

    return run_changed


def with_byte(at: int, value: int) -> Callable[[bytes], bytes]:
    """Return a function that changes a byte of the first tensor map among the parameters."""
    return lambda parameters: parameters[:at] + bytes([value]) + parameters[at + 1 :]


MISTAKES: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "shared memory too small by a byte": (
        "shared_bytes",
        lambda size: size - 1,
        "shared memory out of bounds",
    ),
    "a box with fewer rows": ("parameters", with_byte(90, 32), "deadlock"),
    "a box with more rows": ("parameters", with_byte(90, 128), "shared memory race"),
    "no swizzle": ("parameters", with_byte(10, 0), ""),
    "another swizzle": ("parameters", with_byte(10, 2), "unusable tensor map"),
    "a tensor map of zeros": (
        "parameters",
        lambda parameters: bytes(128) + parameters[128:],
        "unusable tensor map",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_a_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is reported, or (if the reason is empty) the result is wrong."""
    argument, change, kind = MISTAKES[name]
    right, _, _ = run("sm_90", KERNELS["host-made descriptors"], "late")
    monkeypatch.setattr(machine, "run", changed(**{argument: change}))
    result, kinds, _ = run("sm_90", KERNELS["host-made descriptors"], "late")
    if kind:
        assert kind in kinds
    else:
        assert not torch.allclose(result.float(), right.float(), atol=1)
