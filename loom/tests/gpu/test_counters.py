"""Counters of an emulated launch: sectors, wavefronts, barriers, products and instructions, by line of Python."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton_loom
from gpu.emulated import LINE, Array, launch, words
from triton_loom.emulator.counters import (
    CLASSES,
    Counters,
    GlobalTraffic,
    InstructionClass,
    KernelCounters,
    Line,
    Memory,
    NotCounted,
    SharedTraffic,
    added,
    by_line,
    class_of,
)
from triton_loom.emulator.machine import Options, Outcome
from triton_loom.emulator.report import tables
from triton_loom.ptx import scalars

COUNTED = Options(counters=True)
UNCHECKED = Options(checks=False, counters=True)  # shared memory may be read before it is written
HERE = LINE + 1  # the line of the instruction that a test is about
AT_LINE = f".loc 1 {HERE} 0\n"
LANES = np.arange(32)


def lines_of(outcome: Outcome, threads: int = 32) -> dict[int, Counters]:
    executed = np.array(outcome.executed, np.uint64)
    lines = by_line(outcome.statements, executed, outcome.counts, threads)
    assert all(line.file == "kernel.py" for line in lines)
    return {line.number: counters for line, counters in lines.items()}


def memory_of(outcome: Outcome) -> Memory:
    return lines_of(outcome)[HERE].memory


def aligned(bytes_: int) -> Array:
    """Return memory aligned to a sector."""
    room = np.zeros(bytes_ + 128, np.uint8)
    return room[-room.ctypes.data % 128 :][:bytes_]


# ---- global memory -------------------------------------------------------------------------------------------------

OPERANDS = {"b8": "%r1", "b16": "%r1", "b32": "%r1", "b64": "%rd30", "v2.b32": "{%r1, %r2}",
            "v4.b32": "{%r1, %r2, %r3, %r4}"}  # fmt: skip
BYTES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "v2.b32": 8, "v4.b32": 16}


@pytest.mark.parametrize(
    ("type_", "stride", "shift", "sectors", "least"),
    [
        ("b32", 4, 0, 4, 4),  # side by side
        ("b32", 8, 0, 8, 4),  # every second
        ("b32", 128, 0, 32, 4),
        ("b32", 4, 4, 5, 4),  # not from the beginning of a sector on
        ("b32", 0, 64, 1, 1),  # all lanes the same
        ("b8", 1, 0, 1, 1),
        ("b8", 1, 31, 2, 1),
        ("b16", 2, 0, 2, 2),
        ("b64", 8, 0, 8, 8),
        ("v2.b32", 8, 0, 8, 8),
        ("v4.b32", 16, 0, 16, 16),
        ("v4.b32", 16, 16, 17, 16),
        ("v4.b32", 32, 0, 32, 16),
    ],
)
def test_sectors(type_: str, stride: int, shift: int, sectors: int, least: int) -> None:
    memory = aligned(8192)
    address = f"mul.wide.u32 %rd20, %r0, {stride}; add.s64 %rd20, %rd20, %rd0;"
    expected = GlobalTraffic(1, 32 * BYTES[type_], sectors, least)
    loaded = launch(
        f"{address} {AT_LINE} ld.global.{type_} {OPERANDS[type_]}, [%rd20+{shift}];", memory, options=COUNTED
    )
    assert memory_of(loaded) == Memory(loads=expected)
    value = "mov.b32 %r1, 0; mov.b32 %r2, 0; mov.b32 %r3, 0; mov.b32 %r4, 0; mov.b64 %rd30, 0;"
    stored = launch(
        f"{address} {value} {AT_LINE} st.global.{type_} [%rd20+{shift}], {OPERANDS[type_]};",
        memory,
        options=COUNTED,
    )
    assert memory_of(stored) == Memory(stores=expected)
    assert not loaded.findings
    assert not stored.findings


@pytest.mark.parametrize(
    ("guard", "lanes", "sectors", "least"),
    [
        ("setp.lt.u32 %p1, %r0, 9;", 9, 2, 2),
        ("and.b32 %r9, %r0, 1; setp.ne.s32 %p1, %r9, 0;", 16, 4, 2),  # every second lane
        ("setp.gt.u32 %p1, %r0, 31;", 0, 0, 0),  # no lane: executed, and no request
    ],
)
def test_some_lanes(guard: str, lanes: int, sectors: int, least: int) -> None:
    body = f"{guard} mul.wide.u32 %rd20, %r0, 4; add.s64 %rd20, %rd20, %rd0; {AT_LINE} @%p1 ld.global.b32 %r1, [%rd20];"
    outcome = launch(body, aligned(128), options=COUNTED)
    assert lines_of(outcome)[HERE].instructions["global"] == 1
    assert memory_of(outcome).loads == GlobalTraffic(int(lanes > 0), 4 * lanes, sectors, least)


def offsets_from_memory(pointer: int) -> str:
    """Return a text that loads the lane's value of p<pointer> to %r9 and %rd9."""
    return (
        f"mul.wide.u32 %rd90, %r0, 4; add.s64 %rd90, %rd90, %rd{pointer}; ld.global.b32 %r9, [%rd90];"
        "cvt.u64.u32 %rd9, %r9;"
    )


@pytest.mark.parametrize("seed", range(12))
def test_sectors_of_any_addresses(seed: int) -> None:
    """The count agrees with a set of bytes."""
    rng = np.random.default_rng(seed)
    type_ = ("b8", "b16", "b32", "v2.b32", "v4.b32", "b64")[seed % 6]
    size = BYTES[type_]
    memory, offsets = (
        aligned(8192),
        (rng.integers(0, 128 if seed < 6 else 8192 // size, 32) * size).astype(np.uint32),
    )
    body = f"{offsets_from_memory(1)} add.s64 %rd20, %rd9, %rd0; {AT_LINE}"
    body += f"ld.global.{type_} {OPERANDS[type_]}, [%rd20];"
    touched = {int(offset) + byte for offset in offsets for byte in range(size)}
    sectors = {byte // 32 for byte in touched}
    traffic = memory_of(launch(body, memory, offsets, options=COUNTED)).loads
    assert traffic == GlobalTraffic(1, 32 * size, len(sectors), -(-len(touched) // 32))


def test_atomics() -> None:
    body = f"{AT_LINE} atom.global.add.u32 %r1, [%rd0], 1; red.global.add.u32 [%rd0+64], 1;"
    assert memory_of(launch(body, aligned(128), options=COUNTED)) == Memory(
        atomics=GlobalTraffic(2, 256, 2, 2)
    )


# ---- shared memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type_", "stride", "wavefronts", "least"),
    [
        ("b32", 4, 1, 1),
        ("b32", 0, 1, 1),  # one word for all
        ("b32", 8, 2, 1),  # every second bank
        ("b32", 128, 32, 1),  # one bank
        ("b32", 132, 1, 1),  # the same with a padding
        ("b8", 1, 1, 1),  # four lanes a word
        ("b16", 2, 1, 1),
        ("b16", 4, 1, 1),
        ("b16", 8, 2, 1),
        ("v2.b32", 8, 2, 2),  # a half of the warp at a time
        ("v2.b32", 16, 4, 2),
        ("v2.b32", 128, 32, 2),
        ("b64", 136, 2, 2),
        ("v4.b32", 16, 4, 4),  # a quarter of the warp at a time
        ("v4.b32", 32, 8, 4),
        ("v4.b32", 128, 32, 4),
        ("v4.b32", 144, 4, 4),
    ],
)
def test_wavefronts(type_: str, stride: int, wavefronts: int, least: int) -> None:
    address = f"mov.b32 %r7, smem; mad.lo.s32 %r8, %r0, {stride}, %r7;"
    value = "mov.b32 %r1, 0; mov.b32 %r2, 0; mov.b32 %r3, 0; mov.b32 %r4, 0; mov.b64 %rd30, 0;"
    expected = SharedTraffic(1, 32 * BYTES[type_], wavefronts, least)
    store = f"st.shared.{type_} [%r8], {OPERANDS[type_]};"
    load = f"ld.shared.{type_} {OPERANDS[type_]}, [%r8];"
    stored = launch(f"{address} {value} {AT_LINE} {store}", words(1), shared=8192, options=COUNTED)
    assert memory_of(stored) == Memory(shared_writes=expected)
    loaded = launch(f"{address} {value} {store} {AT_LINE} {load}", words(1), shared=8192, options=COUNTED)
    assert memory_of(loaded) == Memory(shared_reads=expected)


def wavefronts_by_words(offsets: Array, size: int) -> int:
    """Return the wavefronts: the maximum number of different words of a bank, for each group of lanes that requests 128
    bytes or is the whole warp."""
    together, total = min(32, 128 // size), 0
    for first in range(0, 32, together):
        banks: dict[int, set[int]] = {}
        for offset in offsets[first : first + together]:
            for word in {(int(offset) + byte) // 4 for byte in range(size)}:
                banks.setdefault(word % 32, set()).add(word)
        total += max(map(len, banks.values()))
    return total


@pytest.mark.parametrize("seed", range(12))
def test_wavefronts_of_any_addresses(seed: int) -> None:
    rng = np.random.default_rng(seed)
    type_ = ("b8", "b16", "b32", "v2.b32", "v4.b32", "b64")[seed % 6]
    size = BYTES[type_]
    offsets = (rng.integers(0, 64 if seed < 6 else 8192 // size, 32) * size).astype(np.uint32)
    body = f"{offsets_from_memory(0)} mov.b32 %r7, smem; add.s32 %r8, %r7, %r9; {AT_LINE}"
    body += f"ld.shared.{type_} {OPERANDS[type_]}, [%r8];"
    traffic = memory_of(launch(body, offsets, shared=8192, options=UNCHECKED)).shared_reads
    assert traffic == SharedTraffic(
        1, 32 * size, wavefronts_by_words(offsets, size), -(-32 * size // 128) if size > 4 else 1
    )


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(
    ("rows", "times"),
    [
        (LANES * 128, 8),  # of 64 elements each, as they come: all in the same banks
        (LANES * 128 + (LANES % 8) * 16, 1),  # swizzled: chunk 0 of row r is at 0 ^ r
        (LANES * 144, 1),  # padded
        (LANES * 16, 1),
        (LANES * 32, 2),
        (LANES * 0, 1),
    ],
)
def test_rows_of_matrices(count: int, rows: Array, times: int) -> None:
    """Eight lanes provide the rows of a matrix, which are read together."""
    body = f"{offsets_from_memory(0)} mov.b32 %r7, smem; add.s32 %r8, %r7, %r9; {AT_LINE}"
    registers = ", ".join(f"%r{10 + k}" for k in range(count))
    expected = SharedTraffic(1, 128 * count, times * count, count)
    suffix = f"sync.aligned.m8n8.x{count}.shared.b16"
    read = f"ldmatrix.{suffix} {{{registers}}}, [%r8];"
    write = f"stmatrix.{suffix} [%r8], {{{registers}}};"
    offsets = rows.astype(np.uint32)
    assert memory_of(launch(body + read, offsets, shared=8192, options=UNCHECKED)) == Memory(
        shared_reads=expected
    )
    assert memory_of(launch(body + write, offsets, shared=8192, options=UNCHECKED)) == Memory(
        shared_writes=expected
    )


def test_atomics_of_shared_memory_are_writes() -> None:
    body = f"mov.b32 %r7, smem; {AT_LINE} atom.shared.add.u32 %r1, [%r7], 1;"
    traffic = memory_of(launch(body, words(1), shared=128, options=UNCHECKED))
    assert traffic == Memory(shared_writes=SharedTraffic(1, 128, 1, 1))


@pytest.mark.parametrize(
    ("size", "given", "lanes"), [(4, "4", 32), (8, "8", 32), (16, "16", 32), (16, "%r5", 16)]
)
def test_asynchronous_copies(size: int, given: str, lanes: int) -> None:
    """They load from global memory and write to shared memory, including zeros."""
    way = "cg" if size == 16 else "ca"
    body = f"""
      setp.lt.u32 %p1, %r0, {lanes}; selp.b32 %r5, {size}, 0, %p1;
      mov.b32 %r7, smem; mad.lo.s32 %r8, %r0, {size}, %r7; mul.wide.u32 %rd20, %r0, {size}; add.s64 %rd20, %rd20, %rd0;
      {AT_LINE} cp.async.{way}.shared.global [%r8+0], [%rd20+0], {size}, {given};
      cp.async.commit_group; cp.async.wait_group 0;
    """
    outcome = launch(body, aligned(512), shared=512, options=COUNTED)
    bytes_ = size * lanes
    assert not outcome.findings
    assert lines_of(outcome)[HERE].instructions == {"copy": 3, "control": 1}
    assert memory_of(outcome) == Memory(
        loads=GlobalTraffic(1, bytes_, bytes_ // 32, bytes_ // 32),
        shared_writes=SharedTraffic(1, 32 * size, size // 4, size // 4),
    )


# ---- instructions, barriers, products ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("add.s32", "integer"), ("setp.lt.u32", "integer"), ("and.pred", "integer"), ("lop3.b32", "integer"),
        ("div.u32", "integer"), ("add.f32", "float"), ("fma.rn.bf16x2", "float"), ("setp.gt.f32", "float"),
        ("max.NaN.f16x2", "float"), ("cvt.rn.bf16x2.f32", "cast"), ("cvt.u64.u32", "cast"),
        ("ex2.approx.ftz.f32", "special"), ("div.full.f32", "special"), ("sqrt.rn.f32", "special"),
        ("ld.global.L1::evict_last.v4.b32", "global"), ("red.global.gpu.relaxed.add.f32", "global"),
        ("ld.shared.b32", "shared"), ("st.shared::cta.b32", "shared"), ("atom.shared.add.u32", "shared"),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", "shared"), ("cp.async.cg.shared.global", "copy"),
        ("cp.async.wait_group", "copy"), ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "matrix"),
        ("shfl.sync.bfly.b32", "lanes"), ("bra.uni", "control"), ("ret", "control"), ("bar.sync", "barrier"),
        ("fence.acq_rel.gpu", "barrier"), ("mov.b32", "other"), ("ld.param.b64", "other"),
        ("cvta.to.global.u64", "other"),
    ],
)  # fmt: skip
def test_classes(opcode: str, expected: InstructionClass) -> None:
    assert class_of(opcode) == expected
    assert expected in CLASSES


def test_arithmetic_is_never_other() -> None:
    other = {scalar.name for scalar in scalars.common() if class_of(scalar.name) == "other"}
    assert all(name.startswith("mov.") for name in other)


def test_barriers_and_lines() -> None:
    """There are three blocks of four warps; two of these have a barrier of their own."""
    body = f"""
      mov.b32 %r1, 1; bar.sync 0; add.s32 %r1, %r1, 1; add.f32 %r2, %r1, %r1;
      setp.lt.u32 %p1, %r0, 64; @!%p1 bra over; {AT_LINE} bar.sync 1, 64; bar.sync 1, 64; bar.warp.sync -1;
    over:
      bar.sync 0;
    """
    lines = lines_of(launch(body, words(1), threads=128, grid=(3, 1, 1)), threads=128)
    assert (lines[LINE].barriers, lines[HERE].barriers) == (3, 9)
    warps = 3 * 4
    assert lines[LINE].instructions == {
        "integer": 2 * warps, "float": warps, "control": warps, "barrier": warps, "other": 3 * warps,
    }  # fmt: skip
    assert lines[HERE].instructions == {"barrier": 3 * 3 * 2 + warps, "control": warps}
    assert added(lines.values()).warp_instructions == sum(
        launch(body, words(1), threads=128, grid=(3, 1, 1)).executed
    )


@pytest.mark.parametrize("shape", [(16, 8, 16), (16, 8, 8)])
def test_products(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = ", ".join(f"%r{10 + r}" for r in range(k // 4)), ", ".join(f"%r{20 + r}" for r in range(k // 8))
    product = f"mma.sync.aligned.m{m}n{n}k{k}.row.col.f32.bf16.bf16.f32"
    body = f"{AT_LINE} {product} {{%r1, %r2, %r3, %r4}}, {{{a}}}, {{{b}}}, {{%r1, %r2, %r3, %r4}};"
    outcome = launch(body, words(1), threads=64, grid=(5, 1, 1), options=COUNTED)
    assert lines_of(outcome)[HERE].tensor_flops == 2 * 5 * 2 * m * n * k


def test_counting_changes_nothing() -> None:
    body = f"{AT_LINE} mul.wide.u32 %rd20, %r0, 4; add.s64 %rd20, %rd20, %rd0; st.global.b32 [%rd20+4], %r0;"
    outcomes = []
    for options in (Options(), COUNTED, Options(counters=True, threads=1)):
        memory = aligned(128)
        outcomes.append((launch(body, memory, grid=(7, 1, 1), options=options), memory.tobytes()))
    plain, counted, alone = (outcome for outcome, _ in outcomes)
    assert len({stored for _, stored in outcomes}) == 1
    assert plain.executed == counted.executed
    assert [str(f).split(" at ")[0] for f in plain.findings] == [
        str(f).split(" at ")[0] for f in counted.findings
    ]
    assert memory_of(counted) == memory_of(alone)
    assert memory_of(counted).stores.requests == 7
    with pytest.raises(NotCounted, match="counters=True"):
        memory_of(plain)
    assert lines_of(plain)[HERE].instructions == lines_of(counted)[HERE].instructions


# ---- kernels of Triton ---------------------------------------------------------------------------------------------


@triton.jit
def twice(x):
    return x * 2.5


@triton.jit
def scaled_product(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    a = tl.load(a_ptr + m * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n)
    c = tl.dot(a, b)
    c = twice(c)
    tl.store(c_ptr + m * N + n, c)


def line_with(text: str) -> Line:
    """Return the number of the first line of this file with a text."""
    lines = Path(__file__).read_text().splitlines()
    return Line(__file__, next(number for number, line in enumerate(lines, 1) if text in line))


def test_a_kernel_line_by_line() -> None:
    m, n, k = 32, 64, 128
    a, b, c = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16(), torch.empty(m, n)
    with triton_loom.emulate("sm_80", counters=True) as gpu:
        for _ in range(3):
            scaled_product[(1,)](a, b, c, M=m, N=n, K=k)
    counters = gpu.counters["scaled_product"]
    lines, total = counters.lines, counters.total
    assert (counters.launches, counters.blocks) == (3, 3)
    assert total.tensor_flops == lines[line_with("c = tl.dot")].tensor_flops == 3 * 2 * m * n * k
    assert total.warp_instructions == sum(sum(launch.outcome.executed) for launch in gpu.launches)
    assert lines[line_with("return x * 2.5")].instructions == {"float": 3 * m * n // 32}
    assert lines[line_with("tl.load(a_ptr")].memory.loads.bytes == 3 * 2 * m * k
    assert lines[line_with("tl.load(b_ptr")].memory.loads.bytes == 3 * 2 * k * n
    assert lines[line_with("tl.store(c_ptr")].memory.stores.bytes == 3 * 4 * m * n
    assert total.memory.loads.sectors == total.memory.loads.least_sectors == 3 * 2 * (m * k + k * n) // 32
    assert gpu.launches[1].counters.total.memory.loads.bytes == 2 * (m * k + k * n)
    report = gpu.report(lines=True)
    assert max(map(len, report.splitlines())) <= 100
    assert "by line of test_counters.py" in report
    assert "c = tl.dot(a, b)" in report


def test_tables_fit_a_terminal() -> None:
    """This holds for a kernel with a long name and some of everything; classes without room share a column."""
    traffic = Memory(
        GlobalTraffic(12345, 1234567, 123456, 12345),
        shared_reads=SharedTraffic(12345, 1234567, 123456, 12345),
    )
    did = Counters(
        {name: 1000 - number for number, name in enumerate(CLASSES)}, 12345, 123_456_789_012, traffic
    )
    lines = {Line(f"/somewhere/some_kernels_{k}.py", 100 + k): did for k in range(20)}
    text = tables(
        [KernelCounters("a_kernel_with_a_name_that_is_quite_long", 1234, 123456, 7, lines)], lines=True
    )
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("a_kernel_wit…_quite_long") == 3
    assert "  and 8 more lines" in text
    head, shares = re.findall(r"^  kernel +integer(.*)\n  a_kernel_\S+(.*)$", text, re.M)[0]
    assert head.endswith("rest")
    assert abs(sum(map(float, shares.split())) - 100) < 0.5


@triton.jit
def row_sum(x_ptr, y_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    total = tl.sum(x, 0)
    tl.store(y_ptr, total)


def test_work_of_tritons_library_belongs_to_its_caller() -> None:
    with triton_loom.emulate("sm_80") as gpu:
        row_sum[(1,)](torch.randn(1024), torch.empty(1), N=1024)
    lines = gpu.counters["row_sum"].lines
    assert {line.file for line in lines} == {__file__}
    assert lines[line_with("total = tl.sum")].instructions["lanes"] > 0
    assert "sectors" not in gpu.report(lines=True)


def test_the_transposition_of_the_documentation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = (Path(__file__).parents[2] / "docs" / "emulate.md").read_text()
    (script, printed) = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", document, re.M | re.S)[1]
    file = tmp_path / "transpose.py"
    file.write_text(script)
    ran = runpy.run_path(str(file))
    assert capsys.readouterr().out == printed
    stores = ran["gpu"].counters["by_rows"].total.memory.stores
    assert stores.sectors / stores.least_sectors == 8
