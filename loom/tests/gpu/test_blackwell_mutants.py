"""Mutants of five kernels for sm_100, each without one synchronization: every mutant is reported, or it is in a table
of redundant operations, with the reason.

Copies and commits arrive late, then early; both must report. Triton 3.7.1 writes no tcgen05.fence:
test_tensor_memory.py leaves those out.
"""

from __future__ import annotations

import pytest
from gpu.blackwell_kernels import scaled_by_tiles, scaled_products
from gpu.hopper_kernels import Case, attend, matmul
from gpu.mutants import DELIVERIES, examine, run, without

KERNELS: dict[str, Case] = {
    "matmul": matmul("host", 128, 128, 320, bm=128, bn=64),
    "warp specialization": matmul("device", 256, 256, 320, specialized=True, programs=1),
    "attention": attend(256, causal=True),
    "scales by copies": scaled_by_tiles("e4m3", m=256, programs=1),
    "scales by stores": scaled_products("e4m3", "e4m3"),
}

# ---- what can be left out, and why ------------------------------------------------------------------------

IN_A_ROW = (
    "several barriers stand in a row, with copies between them that one thread begins: each of the others orders what "
    "stands before and after just as well"
)
EACH_WAITED = (
    "the thread that begins the product has waited for the mbarrier itself before it, and began the copies to tensor "
    "memory itself"
)
AT_THE_END = "nothing follows that uses the memory: the kernel ends"
NO_OTHER_BLOCK = "another block may allocate sooner; nothing of this one depends on it"
LATER_WAIT = "before anybody else touches the cells, the warp waits for its later stores, and so for these"
LATER_COMMIT = (
    "the wait for the product of Q and K of the next turn, which the same thread began later, has told of this "
    "one's end"
)
NEXT_GROUP = "the next commit closes the group with its own, and the wait is for all"
EMPTY_GROUP = "no bulk copy is in the group: tensormap.cp_fenceproxy is none"
ONE_WARP = "the descriptor is made, fenced and used by warp 0 of its partition alone"
SAME_THREAD = (
    "one thread begins the copies and the products, and has waited itself for what frees their buffers"
)
ALREADY_FENCED = "no copy reads what threads have written since the fence before: tiles are written by copies"
AT_ONCE = "the accumulator is free when the kernel begins: the wait is for the phase before the first"
ALL_MEET = "barrier.sync 1, at which all warps meet, follows or comes before"
NOBODY_WAITS = "the last accumulator is released, and no product follows that would wait for it"
NEVER_EXECUTED = "no warp comes there: the partition that it is for does not exist"
WRITTEN_OVER = "scales are written over the mbarrier, and it is made again: nobody looks at it between"

REDUNDANT: dict[str, dict[str, str]] = {
    "matmul": {
        "tcgen05.relinquish_alloc_permit 1": NO_OTHER_BLOCK,
        **{f"bar.sync {n}": IN_A_ROW for n in (2, 3, 4, 5, 6, 7, 8, 17, 18)},
        **{f"bar.sync {n}": SAME_THREAD for n in (10, 11, 12, 13)},
        **{f"bar.sync {n}": EACH_WAITED for n in (9, 14)},
        **{f"mbarrier.inval {n}": AT_THE_END for n in (1, 2, 3, 4, 5)},
    },
    "warp specialization": {
        "tcgen05.relinquish_alloc_permit 1": NO_OTHER_BLOCK,
        **{
            f"cp.async.bulk.{what} {n}": EMPTY_GROUP
            for what in ("commit_group", "wait_group")
            for n in (1, 2, 3)
        },
        **{f"bar.sync {n}": ONE_WARP for n in (3, 4, 5, 6, 7)},
        "mbarrier.try_wait 1": AT_ONCE,
        **{f"bar.sync {n}": ALL_MEET for n in (9, 13, 15, 16)},
        "bar.sync 14": NOBODY_WAITS,
        "mbarrier.arrive 2": NOBODY_WAITS,
        **{f"mbarrier.inval {n}": AT_THE_END for n in range(1, 11)},
        **{f"bar.warp.sync {n}": SAME_THREAD for n in (4, 5, 6, 7)},
        **{f"bar.sync {n}": SAME_THREAD for n in (17, 18, 19)},
        "fence.proxy.async 2": ALREADY_FENCED,
        **{f"barrier.sync {n}": NEVER_EXECUTED for n in (12, 13)},
    },
    "attention": {
        "tcgen05.relinquish_alloc_permit 1": NO_OTHER_BLOCK,
        "mbarrier.inval 1": "nobody uses this mbarrier again; a tile is copied over it",
        **{f"tcgen05.wait::st {n}": LATER_WAIT for n in (1, 2, 4)},
        **{f"bar.sync {n}": IN_A_ROW for n in (5, 10, 17, 22, 23)},
        **{f"bar.sync {n}": SAME_THREAD for n in (8, 9, 13, 14, 15, 16)},
        **{f"bar.sync {n}": EACH_WAITED for n in (7, 12, 19)},
        "fence.proxy.async 1": ALREADY_FENCED,
        "mbarrier.try_wait 7": LATER_COMMIT,
        **{f"mbarrier.inval {n}": AT_THE_END for n in range(2, 10)},
    },
    "scales by copies": {
        "tcgen05.relinquish_alloc_permit 1": NO_OTHER_BLOCK,
        **{f"bar.sync {n}": IN_A_ROW for n in (2, 6, 7, 8, 9, 10, 21, 22)},
        **{f"bar.sync {n}": SAME_THREAD for n in range(12, 20)},
        **{f"bar.sync {n}": EACH_WAITED for n in (11, 20)},
    },
    "scales by stores": {
        "tcgen05.relinquish_alloc_permit 1": NO_OTHER_BLOCK,
        **{f"tcgen05.wait::st {n}": LATER_WAIT for n in (1, 2)},
        **{f"cp.async.commit_group {n}": NEXT_GROUP for n in (1, 3)},
        **{f"bar.sync {n}": IN_A_ROW for n in (2, 3, 10, 11, 12, 21)},
        "mbarrier.inval 1": WRITTEN_OVER,
    },
}

# Any one of these can be left out, but not all of them.
RACE = "tensor memory race"
TOGETHER: list[tuple[str, tuple[str, ...], str]] = [
    ("matmul", tuple(f"bar.sync {n}" for n in range(2, 10)), RACE),
    ("matmul", ("bar.sync 16", "bar.sync 17", "bar.sync 18"), "tensor memory out of bounds"),
    ("warp specialization", ("bar.sync 9", "barrier.sync 1", "barrier.sync 2"), "deadlock"),
    ("attention", ("tcgen05.wait::st 2", "tcgen05.wait::st 3"), RACE),
    ("attention", ("bar.sync 10", "bar.sync 11"), RACE),
    ("attention", ("mbarrier.try_wait 6", "mbarrier.try_wait 7"), RACE),
    ("scales by copies", tuple(f"bar.sync {n}" for n in range(6, 12)), RACE),
    ("scales by stores", tuple(f"tcgen05.wait::st {n}" for n in (1, 2, 3)), RACE),
    ("scales by stores", ("bar.sync 10", "bar.sync 11", "bar.sync 12"), RACE),
]

# ---- running them -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "together", "kind"), TOGETHER)
def test_not_all_of_a_group_can_be_left_out(name: str, together: tuple[str, ...], kind: str) -> None:
    _, _, ptx = run("sm_100", KERNELS[name], "late")
    for delivery in DELIVERIES:
        _, kinds, _ = run("sm_100", KERNELS[name], delivery, without(ptx, together))
        assert kind in kinds


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_every_mutant_is_reported(name: str) -> None:
    seen = examine("sm_100", KERNELS[name], lambda mutant: True)
    assert len(seen) > 30
    unreported = {mutant for mutant, kinds in seen.items() if not kinds}
    assert unreported == set(REDUNDANT[name])


QUICK = {
    "matmul": {
        "tcgen05.wait::st 1": RACE,
        "tcgen05.commit 2": "deadlock",
        "mbarrier.try_wait 4": RACE,
        "bar.sync 15": RACE,
        "tcgen05.wait::ld 1": "load under way",
        "tcgen05.dealloc 1": "tensor memory misuse",
    },
    "scales by stores": {
        "mbarrier.try_wait 1": RACE,
        "tcgen05.wait::st 3": RACE,
        "fence.proxy.async 1": "proxy fence missing after cp.async",
    },
}


@pytest.mark.parametrize("name", QUICK)
def test_a_sample_of_mutants_is_reported(name: str) -> None:
    seen = examine("sm_100", KERNELS[name], QUICK[name].__contains__)
    assert set(seen) == set(QUICK[name])
    for mutant, kinds in seen.items():
        assert QUICK[name][mutant] in kinds
