"""The table of sm_100's asynchronous units: each row leads to a handler, and each handler has a row."""

from __future__ import annotations

import re

import pytest
from gpu.emulated import ptx
from gpu.test_opcodes import names_of, vector
from triton_loom.emulator.machine import libraries
from triton_loom.ptx import blackwell, loads, opcodes, text
from triton_loom.ptx.operations import Operation, UnknownInstruction, Use
from triton_loom.ptx.program import FENCES_THREADS, flatten


def operands_of(name: str) -> str:
    """Return valid operands of an instruction."""
    words = name.split(".")
    match words[1]:
        case "alloc":
            return "[%r1], 128"
        case "dealloc":
            return "%r1, 128"
        case "ld" | "st":
            shape, count = words[4], int(words[5][1:])
            registers = vector("%r", count * {"16x128b": 2, "16x256b": 4}.get(shape, 1))
            split = ", 16" if shape == "16x32bx2" else ""
            return f"{registers}, [%r1+4]{split}" if words[1] == "ld" else f"[%r1 + 4]{split}, {registers}"
        case "mma":
            scales = "[%r4], [%r5], " if "block_scale" in words else ""
            return f"[%r1 + 0], %rd1, %rd2, %r3, {scales}%p1"
        case "cp":
            return "[%r1], %rd1"
        case "commit":
            return "[%r1]"
    return ""


def test_rows_and_handlers_agree() -> None:
    statements = []
    for row in blackwell.ROWS:
        for name in sorted(names_of(row.pattern)):
            assert row.names.fullmatch(name), (row.pattern, name)
            statements.append(f"{name} {operands_of(name)};")
            if ".mma." in name:
                statements.append(f"{name} {operands_of(name).replace('%rd1', '[%r2 + 0]')};")
    decoded = flatten(text.read(ptx("\n".join(statements)))).instructions
    named = {name for i in decoded for name in (i.handler, i.behind) if name}
    library = libraries()["blackwell"]
    handlers, number = set(), 0
    while name_of := library.gpu_handler_name(number):
        handlers.add(name_of.decode())
        number += 1
    elsewhere = {
        "leave",
        "ld.param.u64.8",
        "mov.u32|44",
        "tcgen05.commit",
    }  # the first three are the test's own
    assert named - handlers <= elsewhere, "named by a row, and the machine has none"
    assert handlers <= named, "in the machine, and no row leads to it"


@pytest.mark.parametrize(
    "statement",
    [
        "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1], 128",
        "tcgen05.mma.cta_group::2.kind::f16 [%r1], %rd1, %rd2, %r3, %p1",
        "tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd2, [%r2], %r3, %p1",
        "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, %p1",
        "tcgen05.mma.cta_group::1.kind::f16.ashift [%r1], [%r2], %rd2, %r3, %p1",
        "tcgen05.mma.cta_group::1.kind::f16.collector::a::fill [%r1], %rd1, %rd2, %r3, %p1",
        "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, {%r4, %r5, %r6, %r7}, %p1",
        "tcgen05.mma.cta_group::1.kind::tf32 [%r1], %rd1, %rd2, %r3, %p1, 3",
        "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.scale_vec::4X [%r1], %rd1, %rd2, %r3, [%r4], [%r5], %p1",
        "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r1], %rd1, %rd2, %r3, %p1",
        "tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r1, %r2}, [%r3]",
        "tcgen05.ld.sync.aligned.16x32bx2.x2.b32 {%r1, %r2}, [%r3]",
        "tcgen05.ld.sync.aligned.16x256b.x64.b32 {%r1}, [%r3]",
        "tcgen05.ld.red.sync.aligned.32x32b.x2.max.f32 {%r1, %r2}, {%r4}, [%r3]",
        "tcgen05.cp.cta_group::1.4x256b [%r1], %rd1",
        "tcgen05.cp.cta_group::1.128x128b.b8x16.b4x16_p64 [%r1], %rd1",
        "tcgen05.shift.cta_group::1.down [%r1]",
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r1], %rs1",
        "tcgen05.wait::st",
    ],
)  # fmt: skip
def test_unknown_instructions_are_named(statement: str) -> None:
    with pytest.raises(UnknownInstruction, match=re.escape(statement.split()[0])):
        flatten(text.read(ptx(statement + ";")))


def test_vectors_of_scales_by_their_other_names() -> None:
    operands = ("[%r1]", "%rd1", "%rd2", "%r3", "[%r4]", "[%r5]", "%p1")
    for kind, block, handler in (
        ("mxf8f6f4", ".block32", "mxf8f6f4.1X"),
        ("mxf4", ".block32", "mxf4.2X"),
        ("mxf4", "", "mxf4.2X"),
        ("mxf4nvf4", ".block32", "mxf4nvf4.2X"),
        ("mxf4nvf4", ".block16", "mxf4nvf4.4X"),
    ):
        opcode = f"tcgen05.mma.cta_group::1.kind::{kind}.block_scale{block}"
        assert opcodes.decode(text.Statement(opcode, operands)).handler == f"tcgen05.mma.{handler}.shared"


def test_one_fence_holds_the_kernel_to_all() -> None:
    wait = "tcgen05.wait::ld.sync.aligned;"
    for more, flag in (("", 0), ("tcgen05.fence::after_thread_sync;", FENCES_THREADS)):
        decoded = flatten(text.read(ptx(wait + more))).instructions
        assert {i.flags for i in decoded if i.handler.startswith("tcgen05")} == {flag}


def test_results_of_loads_are_followed_through_moves_and_loops() -> None:
    load = Operation("tcgen05.ld.32x32b", (Use("a", "b32"), Use("address", "u32")))
    pack = Operation("pack.64.32", (Use("pair", "b64"), Use("a", "b32"), Use("b", "b32")))
    use = Operation("add.f32x2", (Use("sum", "b64"), Use("pair", "b64"), Use("pair", "b64")), arithmetic=True)
    wait, back = Operation("tcgen05.wait::ld"), Operation("branch", targets=("top",), ends=True)
    assert loads.doubtful([load, pack, use, wait], [[1], [2], [3], [4]]) == {2}
    assert loads.doubtful([load, pack, wait, use], [[1], [2], [3], [4]]) == frozenset()
    # The second iteration of a loop uses the results of the first one's load.
    assert loads.doubtful([use, load, pack, back], [[1], [2], [3], [0, 4]]) == {0}
    assert loads.doubtful([use, back], [[1], [0, 2]]) == frozenset()
