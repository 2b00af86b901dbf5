"""Hazards: each kind is found in a kernel that has it, and not in the corrected version of the kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from gpu.emulated import LINE, kinds, launch, store_results, words
from triton_loom.emulator.machine import Options

SHARED = (
    "mov.b32 %r1, smem; mad.lo.s32 %r2, %r0, 4, %r1; xor.b32 %r3, %r0, {other}; mad.lo.s32 %r4, %r3, 4, %r1;"
)
EXCHANGE = (
    SHARED
    + "st.shared.b32 [%r2], 99; bar.sync 0; st.shared.b32 [%r2], %r0; {sync} ld.shared.b32 %r5, [%r4];"
    + store_results("%r5")
)
OVERWRITE = (
    SHARED
    + "st.shared.b32 [%r2], %r0; bar.sync 0; ld.shared.b32 %r5, [%r4]; {sync} add.s32 %r6, %r0, 1; "
    + "st.shared.b32 [%r2], %r6;"
    + store_results("%r5")
)
ONE_PLACE = (
    "mov.b32 %r1, smem; {value} {guard} st.shared.b32 [%r1], %r2; bar.sync 0; ld.shared.b32 %r3, [%r1];"
    + store_results("%r3")
)


IN_GLOBAL_MEMORY = """
  xor.b32 %r1, %r0, 32; mul.wide.u32 %rd5, %r0, 4; add.s64 %rd5, %rd5, %rd0;
  mul.wide.u32 %rd6, %r1, 4; add.s64 %rd6, %rd6, %rd0; add.s32 %r2, %r0, 5;
  st.global.b32 [%rd5], %r2; {sync} ld.global.b32 %r3, [%rd6];
"""


@dataclass(frozen=True)
class Hazard:
    """A body with its mistake and its correction."""

    kind: str
    wrong: str
    right: str
    threads: int = 64
    shared: int = 256
    grid: tuple[int, int, int] = (1, 1, 1)


# The first eight lanes of a warp (%p2) have 16 bytes each, at %rd5; %rd6 is in the bytes of a lane of the other warp.
LINES = """
  and.b32 %r4, %r0, 31; setp.lt.u32 %p2, %r4, 8; @!%p2 mov.b32 %r4, 0; setp.ge.u32 %p1, %r0, 32;
  selp.b32 %r5, 128, 0, %p1; mad.lo.s32 %r5, %r4, 16, %r5; xor.b32 %r6, %r5, 132;
  cvt.u64.u32 %rd5, %r5; add.s64 %rd5, %rd5, %rd0;
  cvt.u64.u32 %rd6, %r6; add.s64 %rd6, %rd6, %rd0; and.b64 %rd7, %rd6, -16;
  add.s32 %r7, %r0, 9; add.s32 %r12, %r0, 10;
  @%p2 {first} {sync} @%p2 {second}
"""
WHOLE, PART = "st.global.v4.b32 [%rd5], {%r7, %r7, %r7, %r7};", "st.global.b32 [%rd5+4], %r7;"
THEN = {
    "read": "ld.global.b32 %r8, [%rd6];",
    "write": "st.global.b32 [%rd6], %r12;",
    "read all": "ld.global.v4.b32 {%r8, %r9, %r10, %r11}, [%rd7];",
    "write all": "st.global.v4.b32 [%rd7], {%r12, %r12, %r12, %r12};",
}


def in_lines(first: str, second: str) -> Hazard:
    both = {"first": first, "second": second}
    return Hazard(
        "global memory race", LINES.format(**both, sync=""), LINES.format(**both, sync="bar.sync 0;")
    )


# A word per block.
OWN_WORD = "mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd5, %r1, 4; add.s64 %rd5, %rd5, %rd0;"

# Each of two blocks reads its half of a word (%rd5) and stores to that or to the other half (%rd6).
HALVES = """
  mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd5, %r1, 2; add.s64 %rd5, %rd5, %rd0; xor.b64 %rd6, %rd5, 2;
  setp.ne.b32 %p1, %r0, 0; @%p1 bra end; mov.b16 %rs2, 9; ld.global.b16 %rs1, [%rd5]; st.global.b16 [{stored}], %rs2;
end:
"""


# Block 0 writes a word and then a flag, block 1 waits for the flag and reads the word.
FLAG = """
  mov.u32 %r1, %ctaid.x; setp.eq.b32 %p1, %r1, 0; setp.ne.b32 %p2, %r0, 0; @%p2 bra end; @!%p1 bra wait;
  st.global.b32 [%rd0+4], 7; {store}.global.b32 [%rd0], 1; bra end;
wait:
  {load}.global.b32 %r2, [%rd0]; setp.eq.b32 %p3, %r2, 0; @%p3 bra wait;
  ld.global.b32 %r3, [%rd0+4]; st.global.b32 [%rd0+8], %r3;
end:
"""


HAZARDS = {
    "read of what another warp writes": Hazard(
        "shared memory race",
        EXCHANGE.format(other=32, sync=""),
        EXCHANGE.format(other=32, sync="bar.sync 0;"),
    ),
    "read of what another lane writes": Hazard(
        "shared memory race",
        EXCHANGE.format(other=1, sync=""),
        EXCHANGE.format(other=1, sync="bar.warp.sync -1;"),
    ),
    "a warp's own barrier is not enough between warps": Hazard(
        "shared memory race",
        EXCHANGE.format(other=32, sync="bar.warp.sync -1;"),
        EXCHANGE.format(other=32, sync="barrier.sync 3;"),
    ),
    "overwritten before it was read": Hazard(
        "shared memory race", OVERWRITE.format(other=32, sync=""), OVERWRITE.format(other=32, sync="bar.sync 0;")
    ),
    "overwritten by another lane before it was read": Hazard(
        "shared memory race", OVERWRITE.format(other=1, sync=""), OVERWRITE.format(other=1, sync="bar.warp.sync -1;")
    ),
    "two warps write different values": Hazard(
        "shared memory race",
        ONE_PLACE.format(value="shr.u32 %r2, %r0, 5;", guard=""),
        ONE_PLACE.format(value="mov.b32 %r2, 7;", guard=""),
    ),
    "two lanes write different values": Hazard(
        "lanes disagree",
        ONE_PLACE.format(value="mov.b32 %r2, %r0; setp.lt.u32 %p1, %r0, 2;", guard="@%p1"),
        ONE_PLACE.format(value="mov.b32 %r2, %r0; setp.lt.u32 %p1, %r0, 1;", guard="@%p1"),
    ),
    "a byte of somebody else's word": Hazard(
        "shared memory race",
        SHARED.format(other=32)
        + "st.shared.b32 [%r2], %r0; bar.sync 0; mov.b16 %rs1, 9; st.shared.b8 [%r4+1], %rs1; ld.shared.b32 %r5, [%r2];"
        + store_results("%r5"),
        SHARED.format(other=32)
        + "st.shared.b32 [%r2], %r0; bar.sync 0; mov.b16 %rs1, 9; st.shared.b8 [%r4+1], %rs1; ld.shared.b8 %r5, [%r2];"
        + store_results("%r5"),
    ),
    "atomic and plain": Hazard(
        "shared memory race",
        "mov.b32 %r1, smem; setp.eq.b32 %p1, %r0, 0; @%p1 st.shared.b32 [%r1], 0; bar.sync 0; "
        "atom.shared.add.u32 %r2, [%r1], 1; ld.shared.b32 %r3, [%r1];" + store_results("%r3"),
        "mov.b32 %r1, smem; setp.eq.b32 %p1, %r0, 0; @%p1 st.shared.b32 [%r1], 0; bar.sync 0; "
        "atom.shared.add.u32 %r2, [%r1], 1; bar.sync 0; ld.shared.b32 %r3, [%r1];" + store_results("%r3"),
    ),
    "never written": Hazard(
        "uninitialized shared memory",
        SHARED.format(other=0) + "st.shared.b8 [%r2], 0; st.shared.b16 [%r2+2], 0; ld.shared.b32 %r5, [%r2];",
        SHARED.format(other=0) + "st.shared.b16 [%r2], 0; st.shared.b16 [%r2+2], 0; ld.shared.b32 %r5, [%r2];",
    ),
    "past shared memory": Hazard(
        "shared memory out of bounds",
        SHARED.format(other=0) + "st.shared.b32 [%r2+4], 0;",
        SHARED.format(other=0) + "st.shared.b32 [%r2], 0;",
    ),
    "before shared memory": Hazard(
        "shared memory out of bounds",
        SHARED.format(other=0) + "setp.eq.b32 %p1, %r0, 0; @%p1 ld.shared.b32 %r5, [%r2+-4];",
        SHARED.format(other=0)
        + "setp.eq.b32 %p1, %r0, 1; st.shared.b32 [%r2], 0; bar.sync 0; @%p1 ld.shared.b32 %r5, [%r2+-4];",
    ),
    "wild address": Hazard(
        "global memory out of bounds",
        "mov.b64 %rd5, 0; ld.global.b32 %r1, [%rd5];",
        "ld.global.b32 %r1, [%rd0];",
    ),
    "past an array": Hazard(
        "global memory out of bounds",
        "mul.wide.u32 %rd5, %r0, 4; add.s64 %rd5, %rd5, %rd0; st.global.b32 [%rd5+4], %r0;",
        "mul.wide.u32 %rd5, %r0, 4; add.s64 %rd5, %rd5, %rd0; st.global.b32 [%rd5], %r0;",
    ),
    "misaligned": Hazard(
        "misaligned address", "ld.global.b32 %r1, [%rd0+2];", "ld.global.b16 %rs1, [%rd0+2];"
    ),
    "misaligned vector": Hazard(
        "misaligned address",
        "mov.b32 %r1, smem; mov.b32 %r2, 0; st.shared.v4.b32 [%r1+8], {%r2, %r2, %r2, %r2};",
        "mov.b32 %r1, smem; mov.b32 %r2, 0; st.shared.v2.b32 [%r1+8], {%r2, %r2};",
    ),
    "threads of a block in global memory": Hazard(
        "global memory race", IN_GLOBAL_MEMORY.format(sync=""), IN_GLOBAL_MEMORY.format(sync="bar.sync 0;")
    ),
    **{f"a whole line, then {name}": in_lines(WHOLE, then) for name, then in THEN.items()},
    **{f"a part of a line, then {name}": in_lines(PART, then) for name, then in THEN.items()},
    "a line that was read, then write": in_lines("ld.global.v4.b32 {%r8, %r9, %r10, %r11}, [%rd5];", THEN["write"]),
    "lanes in global memory": Hazard(
        "global memory race",
        "st.global.b32 [%rd0], %r0;",
        "mov.b32 %r1, 3; st.global.b32 [%rd0], %r1;",
        threads=32,
    ),
    "blocks write different values": Hazard(
        "global memory race",
        "mov.u32 %r1, %ctaid.x; st.global.b32 [%rd0], %r1;",
        OWN_WORD + "st.global.b32 [%rd5], %r1;",
        threads=32,
        grid=(6, 1, 1),
    ),
    "blocks write the same value": Hazard(
        "global memory race",
        "mov.u32 %r1, %nctaid.x; st.global.b32 [%rd0], %r1;",
        OWN_WORD + "mov.u32 %r1, %nctaid.x; st.global.b32 [%rd5], %r1;",
        threads=32,
        grid=(6, 1, 1),
    ),
    "a block writes what another one has read, without changing it": Hazard(
        "global memory race",
        "ld.global.b32 %r1, [%rd0]; bar.sync 0; st.global.b32 [%rd0], 0;",
        OWN_WORD + "ld.global.b32 %r1, [%rd5]; bar.sync 0; st.global.b32 [%rd5], 0;",
        threads=32,
        grid=(2, 1, 1),
    ),
    "a block reads what another one writes": Hazard(
        "global memory race",
        "mov.u32 %r1, %ctaid.x; setp.eq.b32 %p1, %r1, 0; ld.global.b32 %r2, [%rd0]; @%p1 st.global.b32 [%rd0], 5;",
        "mov.u32 %r1, %ctaid.x; setp.eq.b32 %p1, %r1, 0; ld.global.b32 %r2, [%rd0]; @%p1 st.global.b32 [%rd0+4], 5;",
        threads=32,
        grid=(4, 1, 1),
    ),
    "halves of a word that belong to two blocks": Hazard(
        "global memory race", HALVES.format(stored="%rd6"), HALVES.format(stored="%rd5"), threads=32, grid=(2, 1, 1)
    ),
    "blocks that atomics order": Hazard(
        "global memory race",
        "mov.u32 %r1, %ctaid.x; ld.global.b32 %r3, [%rd0+4]; add.s32 %r3, %r3, %r1; st.global.b32 [%rd0+4], %r3; "
        "atom.global.gpu.acq_rel.add.u32 %r2, [%rd0], 1;",
        "mov.u32 %r1, %ctaid.x; setp.eq.b32 %p1, %r0, 0; @!%p1 bra end; "
        "atom.global.gpu.acq_rel.add.u32 %r2, [%rd0], 1; "
        "ld.global.b32 %r3, [%rd0+4]; add.s32 %r3, %r3, %r1; st.global.b32 [%rd0+4], %r3; "
        "atom.global.gpu.acq_rel.add.u32 %r2, [%rd0], 1; end:",
        threads=32,
        grid=(4, 1, 1),
    ),
    "a flag that is no atomic": Hazard(
        "global memory race",
        FLAG.format(store="st", load="ld"),
        FLAG.format(store="st.release.gpu", load="ld.acquire.gpu"),
        threads=32,
        grid=(2, 1, 1),
    ),
    "a barrier in one half of a warp": Hazard(
        "split warp",
        "setp.lt.u32 %p1, %r0, 16; @%p1 bra a; bar.sync 0; bra end; a: bar.sync 0; end:",
        "setp.lt.u32 %p1, %r0, 16; @%p1 bra a; barrier.sync 0; bra end; a: barrier.sync 0; end:",
        threads=32,
    ),
    "ldmatrix in one half of a warp": Hazard(
        "split warp",
        SHARED.format(other=0) + "st.shared.b32 [%r2], 0; bar.sync 0; setp.lt.u32 %p1, %r0, 16; @%p1 bra end; "
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r6}, [%r1]; end:",
        SHARED.format(other=0) + "st.shared.b32 [%r2], 0; bar.sync 0; "
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r6}, [%r1];",
        threads=32,
    ),
    "some have left": Hazard(
        "barrier not reached",
        "setp.lt.u32 %p1, %r0, 32; @%p1 ret; bar.sync 0;",
        "bar.sync 0; setp.lt.u32 %p1, %r0, 32; @%p1 ret; bar.sync 1, 32;",
    ),
    "each waits at another barrier": Hazard(
        "deadlock",
        "shr.u32 %r1, %r0, 5; add.s32 %r1, %r1, 1; barrier.sync %r1, 64;",
        "shr.u32 %r1, %r0, 5; add.s32 %r1, %r1, 1; barrier.sync %r1, 32;",
    ),
    "no such barrier": Hazard("barrier misuse", "bar.sync 16;", "bar.sync 15;"),
    "a barrier for two numbers of threads": Hazard(
        "barrier misuse",
        "setp.lt.u32 %p1, %r0, 32; @%p1 bra a; bar.sync 1, 32; bra end; a: bar.sync 1, 64; end:",
        "setp.lt.u32 %p1, %r0, 32; @%p1 bra a; bar.sync 1, 64; bra end; a: bar.sync 1, 64; end:",
    ),
    "division": Hazard("division by zero", "div.s32 %r1, 7, %r0;", "add.s32 %r2, %r0, 1; div.s32 %r1, 7, %r2;"),
    "remainder": Hazard(
        "division by zero",
        "cvt.u64.u32 %rd1, %r0; rem.u64 %rd2, 7, %rd1;",
        "setp.ne.b32 %p1, %r0, 0; cvt.u64.u32 %rd1, %r0; @%p1 rem.u64 %rd2, 7, %rd1;",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(HAZARDS))
def test_hazards_are_found_only_in_the_wrong_version(name: str) -> None:
    hazard = HAZARDS[name]

    def found(body: str, **options: int) -> list[str]:
        out = words(hazard.threads)
        outcome = launch(
            body,
            out,
            threads=hazard.threads,
            shared=hazard.shared,
            grid=hazard.grid,
            options=Options(**options),
        )
        return kinds(outcome)

    for threads in (1, 2):
        assert found(hazard.wrong, threads=threads) == [hazard.kind]
        assert found(hazard.right, threads=threads) == []


def test_a_finding_names_threads_and_lines() -> None:
    hazard = HAZARDS["overwritten before it was read"]
    outcome = launch(hazard.wrong, words(64), threads=64, shared=256)
    (finding,) = outcome.findings
    assert finding.kind == "shared memory race"
    assert finding.kernel == "kernel"
    assert finding.other is not None
    assert {finding.by.thread // 32, finding.other.thread // 32} == {0, 1}  # type: ignore[operator]
    assert {finding.by.instruction, finding.other.instruction} == {
        "ld.shared.b32 %r5, [%r4]",
        "st.shared.b32 [%r2], %r6",
    }
    assert (finding.by.place.file, finding.by.place.line) == ("kernel.py", LINE)
    assert finding.by.block == (0, 0, 0)
    assert finding.count == 64
    assert "nothing orders them" in str(finding)


def test_findings_do_not_depend_on_the_number_of_threads() -> None:
    hazard = HAZARDS["blocks write different values"]
    findings = []
    for threads in (1, 2, 2, 2):
        outcome = launch(hazard.wrong, words(1), grid=(50, 1, 1), options=Options(threads=threads))
        (finding,) = outcome.findings
        findings.append((finding.kind, finding.by.block, finding.other and finding.other.block))
    assert set(findings) == {("global memory race", (1, 0, 0), (0, 0, 0))}


def test_memory_that_may_not_be_written() -> None:
    data = words(4)
    assert kinds(launch("st.global.b32 [%rd0], 5;", data, readable=(0,))) == ["store to read-only memory"]
    assert not data.any()


def test_named_barriers_order_their_participants() -> None:
    """A producer arrives without waiting, a consumer waits; only two warps of four participate."""
    body = """
      mov.b32 %r1, smem; shr.u32 %r2, %r0, 5;
      setp.eq.b32 %p1, %r2, 0; setp.eq.b32 %p2, %r2, 1;
      and.b32 %r3, %r0, 31; mad.lo.s32 %r4, %r3, 4, %r1;
      @%p1 bra producer; @%p2 bra consumer; bra end;
    producer:
      st.shared.b32 [%r4], %r0; {arrive} bra end;
    consumer:
      barrier.sync 4, 64; ld.shared.b32 %r5, [%r4]; mul.wide.u32 %rd5, %r3, 4; add.s64 %rd5, %rd5, %rd0;
      st.global.b32 [%rd5], %r5;
    end:
    """
    out = words(32)
    assert kinds(launch(body.format(arrive="barrier.arrive 4, 64;"), out, threads=128, shared=128)) == []
    assert out.tolist() == list(range(32))
    late = body.replace(
        "st.shared.b32 [%r4], %r0; {arrive}", "barrier.arrive 4, 64; st.shared.b32 [%r4], %r0;"
    )
    assert kinds(launch(late, out, threads=128, shared=128)) == ["shared memory race"]
    assert kinds(launch(body.format(arrive=""), out, threads=128, shared=128)) == ["deadlock"]


def test_a_store_after_the_barrier_is_not_known() -> None:
    """An arrival publishes earlier accesses only, not later ones: the race is found with any schedule."""
    body = """
      mov.b32 %r1, smem; shr.u32 %r2, %r0, 5; setp.{which}.b32 %p1, %r2, 0;
      @%p1 st.shared.b32 [%r1], 1; bar.sync 0;
      @!%p1 ld.shared.b32 %r3, [%r1];
      @%p1 st.shared.b32 [%r1], 2;
    """
    for which in ("eq", "ne"):  # the warp that runs first writes, or reads
        outcome = launch(body.format(which=which), words(64), threads=64, shared=4)
        assert kinds(outcome) == ["shared memory race"]


@pytest.mark.parametrize("checks", [True, False])
def test_addresses_are_checked_with_and_without_checks(checks: bool) -> None:
    body = "mov.b64 %rd5, 0; st.global.b32 [%rd5], %r0; atom.global.add.u32 %r1, [%rd5], 1; ld.shared.b32 %r2, [%r0];"
    reported = kinds(launch(body, words(1), options=Options(checks=checks)))
    assert reported == ["global memory out of bounds", "misaligned address", "shared memory out of bounds"]


def test_shared_memory_is_new_in_each_block() -> None:
    """A block may not read what an earlier block left there."""
    body = "mov.b32 %r1, smem; mov.u32 %r2, %ctaid.x; setp.eq.b32 %p1, %r2, 0; @%p1 st.shared.b32 [%r1], 1;"
    body += "bar.sync 0; ld.shared.b32 %r3, [%r1];"
    outcome = launch(body, words(1), shared=4, grid=(3, 1, 1), options=Options(threads=1))
    (finding,) = outcome.findings
    assert (finding.kind, finding.by.block) == ("uninitialized shared memory", (1, 0, 0))


def test_results_are_the_same_with_checks() -> None:
    rng = np.random.default_rng(3)
    data = rng.integers(0, 1 << 32, 256).astype(np.uint32)
    results = []
    for checks in (True, False):
        out = words(256)
        body = EXCHANGE.format(other=33, sync="bar.sync 0;").replace("%r0;", "%r9;", 1)
        body = "mul.wide.u32 %rd9, %r0, 4; add.s64 %rd9, %rd9, %rd1; ld.global.b32 %r9, [%rd9];" + body
        launch(body, out, data, threads=256, shared=1024, options=Options(checks=checks))
        results.append(out)
    assert (results[0] == results[1]).all()
