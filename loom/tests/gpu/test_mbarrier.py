"""mbarriers: completion of phases, the order that a wait gives, and reports of misuse."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from gpu.emulated import kinds, launch, ptx, store_results, words
from triton_loom.emulator.machine import Options, Program

# %r1 is the mbarrier's address; %p1 is true in thread 0.
HEAD = "mov.b32 %r1, smem; setp.eq.b32 %p1, %r0, 0;"


def initialized(count: int) -> str:
    return f"{HEAD} @%p1 mbarrier.init.shared::cta.b64 [%r1], {count};"


def wait(parity: int, scope: str = "", label: str = "wait") -> str:
    """Return the loop that Triton writes around try_wait."""
    return (
        f"{{ .reg .pred done; {label}: mbarrier.try_wait.parity{scope}.shared::cta.b64 done, [%r1], {parity}; "
        f"@!done bra.uni {label}; }}"
    )


ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%r1]"
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1]"

# ---- phases ----------------------------------------------------------------------------------------------

# Steps of one thread, and whether the phases of parity 0 and 1 count as over after them. Before the end of the first
# phase, the phase before it (of parity 1) counts as over.
STATES: list[tuple[int, list[tuple[str, bool, bool]]]] = [
    (1, [("", False, True), (f"{ARRIVE};", True, False), (f"{ARRIVE};", False, True)]),
    (2, [(f"{ARRIVE};", False, True), (f"{ARRIVE};", True, False), (f"{ARRIVE}, 2;", False, True)]),
    (5, [(f"{ARRIVE}, 4;", False, True), (f"{ARRIVE}, 1;", True, False)]),
    (
        1,
        [
            (f"{EXPECT}, 100;", False, True),
            ("mbarrier.complete_tx.shared::cta.b64 [%r1], 60;", False, True),
            ("mbarrier.complete_tx.shared::cta.b64 [%r1], 40;", True, False),
            (f"{ARRIVE};", False, True),
        ],
    ),
    (
        1,  # bytes that come before they are expected count as well
        [
            ("mbarrier.complete_tx.shared::cta.b64 [%r1], 32;", False, True),
            (f"{EXPECT}, 32;", True, False),
        ],
    ),
    (
        2,
        [
            ("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 8;", False, True),
            (f"{ARRIVE}, 2;", False, True),
            ("mbarrier.complete_tx.shared::cta.b64 [%r1], 8;", True, False),
        ],
    ),
    (
        2,  # whoever drops out is not waited for in later phases
        [
            ("mbarrier.arrive_drop.shared::cta.b64 _, [%r1];", False, True),
            (f"{ARRIVE};", True, False),
            (f"{ARRIVE};", False, True),
        ],
    ),
    (
        1,  # made invalid, the place can be used for another one
        [
            (f"{ARRIVE};", True, False),
            ("mbarrier.inval.shared::cta.b64 [%r1]; mbarrier.init.shared::cta.b64 [%r1], 1;", False, True),
        ],
    ),
]


@pytest.mark.parametrize("number", range(len(STATES)))
def test_states(number: int) -> None:
    count, steps = STATES[number]
    body = [f"{HEAD} @!%p1 bra END;", f"mbarrier.init.shared::cta.b64 [%r1], {count};"]
    for k, (operation, _, _) in enumerate(steps):
        body.append(operation)
        for parity in range(2):
            body.append(f"mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r1], {parity};")
            body.append(f"selp.b32 %r2, 1, 0, %p2; st.global.b32 [%rd0+{8 * k + 4 * parity}], %r2;")
    out = words(2 * len(steps))
    outcome = launch("\n".join([*body, "END:"]), out, shared=8)
    assert out.reshape(-1, 2).astype(bool).tolist() == [[first, second] for _, first, second in steps]
    assert not outcome.findings


def test_a_state_names_the_phase_of_its_arrival() -> None:
    body = (
        initialized(64)
        + "bar.sync 0; mbarrier.arrive.shared::cta.b64 %rd1, [%r1];"
        + "{ .reg .pred done; again: mbarrier.try_wait.shared::cta.b64 done, [%r1], %rd1; @!done bra again; }"
        + store_results("%r0")
    )
    out = words(64)
    assert not launch(body, out, threads=64, shared=8).findings
    assert out.tolist() == list(range(64))


# ---- order -----------------------------------------------------------------------------------------------

# Warp 1 stores, all of its threads arrive, warp 0 waits and reads.
HAND_OVER = (
    initialized(32)
    + "bar.sync 0; setp.lt.u32 %p2, %r0, 32; and.b32 %r2, %r0, 31; mad.lo.s32 %r3, %r2, 4, %r1; @%p2 bra READ;"
    + "st.shared.b32 [%r3+16], %r0; mbarrier.arrive.shared::cta.b64 _, [%r1]; bra END; READ: {wait} "
    + "ld.shared.b32 %r4, [%r3+16];"
    + store_results("%r4")
    + "END:"
)
# The same, but one thread of warp 1 arrives for all of them.
ONE_FOR_ALL = (
    (
        initialized(1)
        + "bar.sync 0; setp.lt.u32 %p2, %r0, 32; and.b32 %r2, %r0, 31; mad.lo.s32 %r3, %r2, 4, %r1; @%p2 bra READ;"
        + "{store} {sync} setp.eq.b32 %p3, %r2, {who}; @%p3 mbarrier.arrive.shared::cta.b64 _, [%r1]; bra END; READ: "
        + wait(0)
        + "ld.shared.b32 %r4, [{where}+16];"
        + store_results("%r4")
        + "END:"
    )
    .replace("{ .reg", "{{ .reg")
    .replace("wait; }", "wait; }}")
)


@dataclass(frozen=True)
class Handed:
    """A pair of 64-thread kernels that differ in one thing, without which the kernel is wrong."""

    wrong: str
    right: str


ORDER = {
    "the reader does not wait": Handed(HAND_OVER.format(wait=""), HAND_OVER.format(wait=wait(0))),
    "one arrives, and the others have only just stored": Handed(
        ONE_FOR_ALL.format(store="st.shared.b32 [%r3+16], %r0;", sync="", who=0, where="%r3"),
        ONE_FOR_ALL.format(
            store="st.shared.b32 [%r3+16], %r0;", sync="bar.warp.sync -1;", who=0, where="%r3"
        ),
    ),
    "one arrives, and hands on what it did itself": Handed(
        ONE_FOR_ALL.format(
            store="setp.eq.b32 %p4, %r2, 1; @%p4 st.shared.b32 [%r1+16], %r0;", sync="", who=0, where="%r1"
        ),
        ONE_FOR_ALL.format(
            store="setp.eq.b32 %p4, %r2, 0; @%p4 st.shared.b32 [%r1+16], %r0;", sync="", who=0, where="%r1"
        ),
    ),
}


@pytest.mark.parametrize("name", ORDER)
def test_what_a_wait_orders(name: str) -> None:
    out = words(64)
    assert kinds(launch(ORDER[name].wrong, out, threads=64, shared=256)) == ["shared memory race"]
    outcome = launch(ORDER[name].right, out, threads=64, shared=256)
    assert not outcome.findings
    assert out[0] == 32


def test_a_wait_for_the_phase_before() -> None:
    """The previous phase is over, so the wait orders nothing; or the awaited phase is over as well, and the wait is
    endless."""
    reported = kinds(launch(HAND_OVER.format(wait=wait(1)), words(64), threads=64, shared=256))
    assert reported in (["shared memory race"], ["deadlock"])


# Warp 1 stores and arrives at the barrier of the cluster; warp 0 waits and reads.
CLUSTER = (
    "mov.b32 %r1, smem; setp.lt.u32 %p2, %r0, 32; and.b32 %r2, %r0, 31; mad.lo.s32 %r3, %r2, 4, %r1;"
    "@!%p2 st.shared.b32 [%r3], %r0; barrier.cluster.arrive{how}; barrier.cluster.wait.acquire.aligned; @!%p2 bra END;"
    "ld.shared.b32 %r4, [%r3];" + store_results("%r4") + "END:"
)


def test_the_barrier_of_a_cluster_of_one() -> None:
    out = words(64)
    assert not launch(CLUSTER.format(how=".release.aligned"), out, threads=64, shared=128).findings
    assert out[:32].tolist() == list(range(32, 64))
    unordered = launch(CLUSTER.format(how=".relaxed.aligned"), out, threads=64, shared=128)
    assert kinds(unordered) == ["shared memory race"]
    nobody_came = CLUSTER.replace("barrier.cluster.arrive{how};", "@%p2 barrier.cluster.arrive;")
    assert kinds(launch(nobody_came, out, threads=64, shared=128)) == ["deadlock"]


# ---- misuse ----------------------------------------------------------------------------------------------

ALONE = f"{HEAD} @!%p1 bra END; {{}} END:"
INIT = "mbarrier.init.shared::cta.b64 [%r1], 1;"
MISUSE = {
    "made twice": (f"{INIT} {ARRIVE}; {INIT}", "mbarrier in use"),
    "made twice for another count": (f"{INIT} mbarrier.init.shared::cta.b64 [%r1], 2;", "mbarrier in use"),
    "made for nobody": ("mbarrier.init.shared::cta.b64 [%r1], 0;", "mbarrier overrun"),
    "not made": (f"{ARRIVE};", "no mbarrier"),
    "waited for without being made": (wait(0), "no mbarrier"),
    "used after its end": (f"{INIT} mbarrier.inval.shared::cta.b64 [%r1]; {ARRIVE};", "no mbarrier"),
    "ended twice": (
        f"{INIT} mbarrier.inval.shared::cta.b64 [%r1]; mbarrier.inval.shared::cta.b64 [%r1];",
        "no mbarrier",
    ),
    "written over": (f"{INIT} st.shared.b32 [%r1+4], 5; {ARRIVE};", "no mbarrier"),
    "more arrivals than it waits for": (f"{INIT} {ARRIVE}, 2;", "mbarrier overrun"),
    "more bytes than it can count": (f"{INIT} {EXPECT}, 1048576;", "mbarrier overrun"),
    "at an odd address": ("mbarrier.init.shared::cta.b64 [%r1+4], 1;", "misaligned address"),
    "past shared memory": ("mbarrier.init.shared::cta.b64 [%r1+64], 1;", "shared memory out of bounds"),
    "nobody arrives": (f"{INIT} {wait(0)}", "deadlock"),
    "bytes never come": (f"{INIT} {EXPECT}, 16; {wait(0)}", "deadlock"),
    "waits for the wrong parity": (f"{INIT} {ARRIVE}; {wait(1)}", "deadlock"),
}


@pytest.mark.parametrize("delivery", ["late", "early"])
@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_reported(name: str, delivery: str) -> None:
    body, kind = MISUSE[name]
    outcome = launch(
        ALONE.format(body),
        words(1),
        shared=16,
        options=Options(delivery=delivery),  # type: ignore[arg-type]
    )
    assert kinds(outcome) == [kind]


def test_made_again_in_the_same_way_before_its_use() -> None:
    """Triton's warp specialization does this: it changes nothing."""
    assert not launch(ALONE.format(f"{INIT} {INIT} {ARRIVE};"), words(1), shared=8).findings


def test_used_by_others_before_its_init() -> None:
    body = initialized(64) + "{sync} " + ARRIVE + ";" + wait(0)
    sync = "bar.sync 0;"
    assert not launch(body.replace("{sync}", sync), words(1), threads=64, shared=8).findings
    assert "shared memory race" in kinds(launch(body.replace("{sync}", ""), words(1), threads=64, shared=8))


def test_ended_while_others_still_look() -> None:
    body = (
        initialized(1)
        + f"bar.sync 0; @%p1 {ARRIVE}; {wait(0)} {{sync}} @%p1 mbarrier.inval.shared::cta.b64 [%r1];"
    )
    assert not launch(body.replace("{sync}", "bar.sync 0;"), words(1), threads=64, shared=8).findings
    assert "shared memory race" in kinds(launch(body.replace("{sync}", ""), words(1), threads=64, shared=8))


def test_a_deadlock_names_the_wait() -> None:
    (finding,) = launch(initialized(2) + f"@%p1 {ARRIVE}; bar.sync 0;" + wait(0), words(1), shared=8).findings
    assert finding.kind == "deadlock"
    assert finding.by.instruction.startswith("mbarrier.try_wait.parity")


def test_lanes_may_wait_separately() -> None:
    """Lane 0 waits for the other lanes of its warp, which take another branch."""
    body = (
        initialized(31)
        + "bar.warp.sync -1; @!%p1 bra OTHERS;"
        + wait(0)
        + "ld.shared.b32 %r4, [%r1+16]; st.global.b32 [%rd0], %r4; bra END; OTHERS: st.shared.b32 [%r1+16], 7; "
        + f"{ARRIVE}; END:"
    )
    out = words(1)
    outcome = launch(body, out, shared=32)
    assert out[0] == 7
    assert not outcome.findings


def test_waits_are_executed_once() -> None:
    """A wait counts once, however often it is polled: counts do not depend on the schedule."""
    body = (
        initialized(1)
        + "bar.sync 0; setp.lt.u32 %p2, %r0, 32; @!%p2 bra LATER;"
        + wait(0)
        + "bra END; LATER: "
    )
    body += "mov.b32 %r5, 0; LOOP: add.s32 %r5, %r5, 1; setp.lt.s32 %p3, %r5, 100000; @%p3 bra LOOP;"
    body += f"setp.eq.b32 %p4, %r0, 32; @%p4 {ARRIVE}; END:"
    outcome = launch(body, words(1), threads=64, shared=8)
    assert not outcome.findings
    statements = Program.of(ptx(body, 1, 64)).flat.statements
    (times,) = [n for s, n in zip(statements, outcome.executed, strict=True) if "try_wait" in s.opcode]
    assert times == 1
