"""Control flow of warps: branches, divergence and reconvergence, jumps by index, exits; and parsing of PTX."""

from __future__ import annotations

import numpy as np
import pytest
from gpu.emulated import LINE, kinds, launch, ptx, store_results, words
from triton_loom.emulator.machine import Program
from triton_loom.ptx import opcodes, text
from triton_loom.ptx.program import NOWHERE, reconvergence

LANES = np.arange(32, dtype=np.uint32)


def test_a_loop_that_lanes_leave_one_after_another() -> None:
    out = words(32)
    body = """
      mov.b32 %r1, 0;
    again:
      add.s32 %r1, %r1, %r0;
      add.s32 %r2, %r2, 1;
      setp.lt.u32 %p1, %r2, %r0;
      @%p1 bra again;
      add.s32 %r1, %r1, 1000;
    """
    outcome = launch("mov.b32 %r2, 0;" + body + store_results("%r1"), out)
    assert not outcome.findings
    assert out.tolist() == [max(lane, 1) * lane + 1000 for lane in range(32)]


def test_diverged_lanes_reconverge_at_the_post_dominator() -> None:
    """The instruction after an if and its else is executed once by the warp, not once per branch."""
    out = words(64)
    body = f"""
      and.b32 %r1, %r0, 3;
      setp.eq.b32 %p1, %r1, 0;
      @%p1 bra one;
      setp.eq.b32 %p2, %r1, 1;
      @!%p2 bra rest;
      mov.b32 %r2, 11;
      bra.uni inner;
    rest:
      mov.b32 %r2, 12;
    inner:
      add.s32 %r2, %r2, 100;
      bra.uni meet;
    one:
      mov.b32 %r2, 10;
    meet:
      activemask.b32 %r3;
      {store_results("%r2", "%r3")}
    """
    outcome = launch(body, out)
    assert not outcome.findings
    assert out[1::2].tolist() == [0xFFFFFFFF] * 32
    assert out[::2].tolist() == [(10, 111, 112, 112)[lane % 4] for lane in range(32)]


def test_lanes_that_leave_early() -> None:
    out = words(64)
    body = f"""
      setp.lt.u32 %p1, %r0, 5;
      @%p1 ret;
      activemask.b32 %r1;
      setp.gt.u32 %p2, %r0, 20;
      @%p2 bra end;
      mov.b32 %r2, 7;
      {store_results("%r1", "%r2")}
    end:
    """
    assert not launch(body, out).findings
    assert out[::2].tolist() == [0xFFFFFFE0 if 5 <= lane <= 20 else 0 for lane in range(32)]
    assert out[1::2].tolist() == [7 if 5 <= lane <= 20 else 0 for lane in range(32)]


def test_lanes_that_leave_in_one_branch() -> None:
    """They are no longer active at the reconvergence point."""
    out = words(32)
    body = f"""
      setp.lt.u32 %p1, %r0, 12;
      @!%p1 bra meet;
      setp.lt.u32 %p2, %r0, 5;
      @%p2 bra out;
      mov.b32 %r2, 1;
      bra.uni meet;
    out:
      ret;
    meet:
      activemask.b32 %r1;
      {store_results("%r1")}
    """
    assert not launch(body, out).findings
    assert out.tolist() == [0] * 5 + [0xFFFFFFE0] * 27


@pytest.mark.parametrize("choice", ["and.b32 %r1, %r0, 3;", "mov.b32 %r1, 2;"], ids=["parted", "together"])
def test_jump_by_index(choice: str) -> None:
    out = words(32)
    cases = "\n".join(f"case_{k}: mov.b32 %r2, {100 + k}; bra.uni meet;" for k in range(4))
    body = f"""
      {choice}
    table: .branchtargets case_0, case_1, case_2, case_3;
      brx.idx %r1, table;
      {cases}
    meet:
      {store_results("%r2")}
    """
    assert not launch(body, out).findings
    assert out.tolist() == [100 + (lane % 4 if "and" in choice else 2) for lane in range(32)]


def test_names_of_a_scope_are_its_own() -> None:
    """Inline assembly is inserted with the same names many times."""
    loop = "{ .reg .pred done; .reg .b32 t<2>; mov.b32 t1, 0; loop: add.s32 t1, t1, 1; setp.ge.s32 done, t1, %r1; " \
           "@!done bra.uni loop; add.s32 %r2, %r2, t1; }"  # fmt: skip
    out = words(32)
    body = f"mov.b32 %r2, 0; mov.b32 %r1, 3; {loop} mov.b32 %r1, 4;\n{loop}\n{store_results('%r2')}"
    assert not launch(body, out).findings
    assert out.tolist() == [7] * 32


def test_a_guard_keeps_the_register() -> None:
    out = words(32)
    body = f"""
      setp.lt.u32 %p1, %r0, 9;
      mov.b32 %r1, 5;
      @%p1 add.s32 %r1, %r0, 100;
      @!%p1 mov.b32 %r2, 3;
      @%p1 mov.b32 %r2, %laneid;
      add.s32 %r1, %r1, %r2;
      {store_results("%r1")}
    """
    launch(body, out)
    assert out.tolist() == [2 * lane + 100 if lane < 9 else 8 for lane in range(32)]


def test_a_guard_keeps_the_predicate() -> None:
    out = words(96)
    body = f"""
      setp.lt.u32 %p1, %r0, 9; setp.gt.u32 %p2, %r0, 3; mov.pred %p3, %p2; mov.pred %p4, %p2;
      @%p1 setp.eq.b32 %p2, %r0, 5; @!%p1 not.pred %p3, %p3; @%p1 and.pred %p4, %p4, %p2;
      selp.b32 %r1, 1, 0, %p2; selp.b32 %r2, 1, 0, %p3; selp.b32 %r3, 1, 0, %p4;
      {store_results("%r1", "%r2", "%r3")}
    """
    launch(body, out)
    expected = [[lane == 5 or lane >= 9, 3 < lane < 9, lane == 5 or lane >= 9] for lane in range(32)]
    assert out.reshape(32, 3).tolist() == expected


def test_special_registers() -> None:
    out = np.zeros((3, 2, 2, 64, 4), np.uint32)
    body = """
      mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ctaid.z;
      mov.u32 %r4, %nctaid.x; mov.u32 %r5, %nctaid.y;
      mad.lo.s32 %r6, %r3, %r5, %r2; mad.lo.s32 %r6, %r6, %r4, %r1;
      mov.u32 %r7, %ntid.x; mad.lo.s32 %r8, %r6, %r7, %r0;
      mul.wide.u32 %rd1, %r8, 16; add.s64 %rd1, %rd0, %rd1;
      mov.u32 %r9, %laneid; mov.u32 %r10, %warpid; mov.u32 %r11, %lanemask_lt; mov.u32 %r12, %nctaid.z;
      st.global.v4.b32 [%rd1], {%r9, %r10, %r11, %r12};
    """
    assert not launch(body, out, threads=64, grid=(2, 2, 3)).findings
    lane = np.arange(64) % 32
    for column, values in enumerate((lane, np.arange(64) // 32, (1 << lane) - 1, np.full(64, 3))):
        assert (out[..., column] == values).all()


# ---- text and graph --------------------------------------------------------------------------------------


def test_reconvergence() -> None:
    """Reconvergence points are right for a diamond inside a loop, and an exit from within."""
    ways = [[1], [2, 4], [3], [5], [5], [6, 1], [7, 8], [9], [9]]  # 1: if, 5: back to 1, 6: if, 9: the end
    result = reconvergence(ways)
    assert (result[1], result[5], result[6]) == (5, 6, NOWHERE)
    assert reconvergence([[1], [2], [3]])[1] == NOWHERE  # no branch
    assert reconvergence([[1, 1], [2]])[0] == 1  # a branch to where it would go anyway
    assert reconvergence([[1, 2], [3], [2]])[0] == 1  # a way that never ends does not count


def test_parsed_properties_of_a_kernel() -> None:
    module = """
    .version 8.7
    .extern .shared .align 16 .b8 global_smem[];
    .global .align 1 .b8 name[4] = {97, 98, 0};
    .visible .entry k( .param .u64 .ptr .global .align 1 k_0, .param .u8 k_1, .param .u32 k_2,
      .param .align 64 .b8 k_3[128], .param .f32 k_4 )
    .reqntid 128
    {
      .reg .b32 %r<3>; // a comment; with a semicolon
      .loc 1 7 3 // outer.py:7:3
      mov.b32 %r1, 1;
      .loc 2 30 3 // inner.py:30:3 @[ middle.py:3:1 @[ outer.py:9:22 ] ]
      mov.b32 %r2, 1; ret;
    }
    .file 1 "/x/outer.py"
    .file 2 "/x/inner.py"
    """
    kernel = text.read(module)
    assert [(p.offset, p.size) for p in kernel.parameters.values()] == [
        (0, 8),
        (8, 1),
        (12, 4),
        (64, 128),
        (192, 4),
    ]
    assert kernel.threads == 128
    assert kernel.constants == {"name": b"ab\0\0"}
    first, second, _ = kernel.statements
    assert (str(first.place), first.line) == ("/x/outer.py:7", 11)
    assert str(second.place) == "outer.py:9 (in /x/inner.py:30)"


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("frobnicate.b32 %r1, %r2;", "frobnicate.b32"),
        ("add.cc.s16 %r1, %r2, %r3;", "add.cc.s16"),
        ("ld.global.L3::evict.b32 %r1, [%rd0];", "ld.global.L3::evict.b32"),
        ("mma.sync.aligned.m16n8k16.row.row.f32.bf16.bf16.f32 {%r1}, {%r1}, {%r1}, {%r1};", "row.row"),
        ("shfl.bfly.b32 %r1, %r2, 1, 31;", "shfl.bfly.b32"),
        ("add.s32 %r1, %r2;", "number of operands"),
        ("add.s32 %r1, %r2, %r999;", "%r999"),
        ("add.s64 %rd1, %r2, 1;", "%r2"),
        ("bra nowhere;", "nowhere"),
        ("mov.u64 %rd1, %globaltimer;", "%globaltimer"),
        ("call.uni (%r1), vprintf, (%rd1, %rd2);", "`call.uni (%r1), vprintf, (%rd1, %rd2)` (PTX line 16)"),
    ],
)
def test_unknown_instructions_are_named(statement: str, named: str) -> None:
    with pytest.raises((opcodes.UnknownInstruction, text.PtxError)) as caught:
        Program(ptx(statement))
    assert named in str(caught.value)
    if isinstance(caught.value, opcodes.UnknownInstruction):
        assert f"kernel.py:{LINE}" in str(caught.value)
        assert "PTX line 16" in str(caught.value)


def test_the_emulated_gpu_has_one_multiprocessor() -> None:
    out = words(64)
    body = "mov.u32 %r1, %smid; mov.u32 %r2, %nsmid;" + store_results("%r1", "%r2")
    assert not launch(body, out).findings
    assert out.reshape(32, 2).tolist() == [[0, 1]] * 32


def test_a_launch_that_does_not_fit() -> None:
    program = Program(ptx(""))
    from triton_loom.emulator.machine import run

    with pytest.raises(ValueError, match="32 threads per block"):
        run(program, grid=(1, 1, 1), block=64, shared_bytes=0, parameters=bytes(8), memory=[])
    with pytest.raises(ValueError, match="8 bytes of parameters"):
        run(program, grid=(1, 1, 1), block=32, shared_bytes=0, parameters=b"", memory=[])


def test_an_endless_wait_is_reported() -> None:
    """A warp waits for a flag that nobody sets."""
    flag = words(1)
    body = "wait: ld.relaxed.gpu.global.b32 %r1, [%rd0]; setp.eq.b32 %p1, %r1, 0; @%p1 bra wait;"
    assert kinds(launch(body, flag)) == ["deadlock"]
