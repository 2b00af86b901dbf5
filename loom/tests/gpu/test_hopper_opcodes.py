"""The table of sm_90's asynchronous units: each row leads to a handler, and each handler has a row."""

from __future__ import annotations

import re

import pytest
from gpu.emulated import ptx
from gpu.test_opcodes import names_of, vector
from triton_loom.emulator.machine import libraries
from triton_loom.ptx import asynchronous, opcodes, text
from triton_loom.ptx.asynchronous import REDUCTIONS
from triton_loom.ptx.operations import UnknownInstruction
from triton_loom.ptx.program import flatten


def operands_of(name: str) -> str:
    """Return valid operands of an instruction."""
    words = name.split(".")
    policy = ", %rd9" if "L2::cache_hint" in words else ""
    match words[0], words[1]:
        case "mbarrier", "init" | "expect_tx" | "complete_tx":
            return "[%r1], 16"
        case "mbarrier", "inval":
            return "[%r1]"
        case "mbarrier", "arrive" | "arrive_drop":
            return "_, [%r1], 16" if "expect_tx" in words else "%rd1, [%r1]"
        case "mbarrier", "try_wait" | "test_wait":
            return "%p1, [%r1], " + ("%r2" if "parity" in words else "%rd2")
        case "fence", "proxy":
            return "[%rd1], 128" if "acquire" in words else ""
        case "prefetch", _:
            return "[%rd1]"
        case "tensormap", "replace":
            ordinal = (
                "1, " if words[3] in ("box_dim", "global_dim", "global_stride", "element_stride") else ""
            )
            return f"[%rd1], {ordinal}" + ("%rd2" if words[-1] == "b64" else "%r2")
        case "tensormap", _:
            return "[%rd1], [%rd2], 128"
        case "wgmma", "mma_async":
            columns = int(re.search(r"n(\d+)k", name)[1])  # type: ignore[index]
            result, left = words[5], words[6]
            d = vector("%r", columns // (4 if result == "f16" else 2))
            signs = "" if result == "s32" else ", 1, -1"
            return f"{d}, %rd1, %rd2, %p1{signs}{', 0, 1' if left in ('f16', 'bf16') else ''}"
        case "wgmma" | "cp", _ if "wait_group" in words:
            return "0"
        case "setmaxnreg", _:
            return "128"
    if "tensor" in words:
        rank = int(re.search(r"(\d)d", name)[1])  # type: ignore[index]
        tile = f"[%rd1, {vector('%r', 5 if 'tile::' in name else rank)}]"
        return f"[%r1], {tile}, [%r2]{policy}" if "complete_tx" in name else f"{tile}, [%r1]{policy}"
    return ""


def test_rows_and_handlers_agree() -> None:
    statements = []
    for row in asynchronous.ROWS:
        for name in sorted(names_of(row.pattern)):
            assert row.names.fullmatch(name), (row.pattern, name)
            statements.append(f"{name} {operands_of(name)};")
    named = {i.handler for i in flatten(text.read(ptx("\n".join(statements)))).instructions}
    library = libraries()["hopper"]
    handlers, number = set(), 0
    while name_of := library.gpu_handler_name(number):
        handlers.add(name_of.decode())
        number += 1
    common = {"nothing", "leave", "ld.param.u64.8", "mov.u32|44"}  # the last three are the test's own
    assert named - handlers == common, "named by a row, and the machine has none"
    # The first replaces others; the second is sm_100's, in the header of mbarriers.
    assert handlers - named == {"wgmma.touched", "tcgen05.commit"}, "in the machine, and no row leads to it"


@pytest.mark.parametrize(
    "statement",
    [
        "mbarrier.arrive.noComplete.shared::cta.b64 _, [%r1], 1",
        "mbarrier.init.shared::cta.b64 [%r1]",
        "mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 %p1, [%r1], 0",
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 16, [%r2]",
        "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r3}], [%r2]",
        "cp.async.bulk.tensor.3d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r1], [%rd1, {0}], [%r2]",
        "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%r1], [%rd1], [%r2]",
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1]",
        "wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16 {%r1, %r2}, %rd1, %rd2, %p1, 1, 1, 0, 0",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1, %r2, %r3}, %rd1, %rd2, %p1, 1, 1, 0, 0",
        "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.bf16.bf16 {%r1}, %rd1, %rd2, %r5, 0, %p1, 1, 1, 0, 0",
        "fence.proxy.alias",
        "tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%rd1], 4, %rd2",
    ],
)  # fmt: skip
def test_unknown_instructions_are_named(statement: str) -> None:
    with pytest.raises(UnknownInstruction, match=re.escape(statement.split()[0])):
        flatten(text.read(ptx(statement + ";")))


def test_reductions_are_those_of_the_machine() -> None:
    assert len(REDUCTIONS) == 8
    assert opcodes.decode(
        text.Statement(
            "cp.reduce.async.bulk.tensor.1d.global.shared::cta.xor.bulk_group", ("[%rd1, {%r1}]", "[%r2]")
        )
    ).immediate >> 48 == 1 + REDUCTIONS.index("xor")
