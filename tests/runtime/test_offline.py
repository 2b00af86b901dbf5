"""Compilation for absent GPUs, and facts read from the binaries."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from triton import knobs

from tests.runtime.offline_kernels import Rows, Scaled, struct_kernel
from weft.lab.compiled import machine_code, offline
from weft.lab.compiled.offline import Binary, CompileError, compile_all
from weft.runtime import Launch, recording
from weft.runtime.variant import TARGETS, Variant, build_variant, triton_target


def variant(kernel: str, types: str, *constants: object, warps: int = 4) -> Variant:
    """Build a variant from `types` such as "x:*bf16 n:i32 BLOCK": a parameter without a type is a constexpr."""
    pairs = [part.partition(":") for part in types.split()]
    signature = tuple((name, kind or "constexpr") for name, _, kind in pairs)
    names = [name for name, kind in signature if kind == "constexpr"]
    return Variant(
        "tests.runtime.offline_kernels",
        kernel,
        signature,
        tuple(zip(names, constants, strict=True)),
        True,
        warps,
        3,
    )


COPY = replace(variant("copy", "x:*bf16 y:*bf16 n:i32 BLOCK", 2048), divisible=("n",))
WRAPPED = replace(COPY, kernel="wrapped_copy")
UNKNOWN_BOUND = replace(COPY, divisible=())
UNALIGNED = replace(COPY, aligned=False)
SMALL = replace(COPY, small=True)
FP32 = variant("scale", "x:*fp32 y:*fp32 factor:fp32 BLOCK", 1024)
FP64 = variant("scale", "x:*fp32 y:*fp32 factor:fp64 BLOCK", 1024)
FP64_MOVED = variant("copy", "x:*fp64 y:*fp64 n:i32 BLOCK", 1024)
MATMUL = variant("matmul", "a:*bf16 b:*bf16 c:*fp32 BLOCK", 64)
POINTERS = "a_ptr:*bf16 b_ptr:*bf16 c_ptr:*bf16 d_ptr:*bf16 out_ptr:*fp32"
TWO_PRODUCTS = replace(
    variant("two_products", f"{POINTERS} depth:i32 TILE DEPTH APART", 128, 64, False), divisible=("depth",)
)
TILE = variant("tile_copy", "x:*bf16 y:*bf16 BLOCK", 64)
# More values than the 128 registers that a thread has in a block of 512 threads (NVIDIA) or 1024 (AMD).
SPILL_NVIDIA = variant("keep_all", "x:*fp32 y:*fp32 BLOCK", 512 * 256, warps=16)
SPILL_AMD = variant("keep_all", "x:*fp32 y:*fp32 BLOCK", 1024 * 256, warps=16)

JOBS = [
    *((COPY, target) for target in TARGETS),
    *((v, t) for v in (UNKNOWN_BOUND, UNALIGNED, FP64) for t in ("sm_90", "gfx942")),
    *((v, "sm_90") for v in (FP32, FP64_MOVED, MATMUL, TILE, SPILL_NVIDIA)),
    *((v, "sm_100") for v in (MATMUL, TWO_PRODUCTS)),
    *((v, "gfx942") for v in (FP32, FP64_MOVED, WRAPPED, SMALL, MATMUL, SPILL_AMD)),
]


@pytest.fixture(scope="module")
def binaries() -> dict[tuple[Variant, str], Binary]:
    compiled = {}
    for job, result in zip(JOBS, compile_all(JOBS), strict=True):
        assert isinstance(result, Binary), result
        compiled[job] = result
    return compiled


Binaries = dict[tuple[Variant, str], Binary]


@pytest.mark.parametrize("target", TARGETS)
def test_known_alignment_gives_128_bit_accesses(binaries: Binaries, target: str) -> None:
    binary = binaries[COPY, target]
    assert binary.target == target
    # 2048 bf16 are 4096 bytes: 32 per thread of 4 NVIDIA warps, 16 per lane of 4 AMD waves.
    count = 2 if target.startswith("sm_") else 1
    assert binary.loads == {128: count}
    assert binary.stores == {128: count}
    assert 0 < binary.registers < 32
    assert (binary.spill_bytes, binary.stack, binary.shared) == (0, 0, 0)
    assert not binary.uses_fp64
    assert binary.seconds > 0


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("narrow", [UNKNOWN_BOUND, UNALIGNED], ids=["bound", "pointers"])
def test_unknown_alignment_gives_narrow_accesses(binaries: Binaries, narrow: Variant, target: str) -> None:
    count = 16 if target.startswith("sm_") else 8
    assert binaries[narrow, target].loads == {16: count}
    assert binaries[narrow, target].stores == {16: count}


@pytest.mark.parametrize(("job", "bound"), [((SPILL_NVIDIA, "sm_90"), 255), ((SPILL_AMD, "gfx942"), 512)])
def test_register_pressure_spills(binaries: Binaries, job: tuple[Variant, str], bound: int) -> None:
    binary = binaries[job]
    # Each thread holds 256 values and has 128 registers: at least 128 values of 4 bytes must be spilled.
    assert binary.spill_bytes >= 512
    assert binary.stack >= 512
    assert 0 < binary.registers <= bound
    assert binary.shared > 0  # the sum crosses warps
    assert binary.loads == {128: 64}  # spilled values are not global loads


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_fp64_arithmetic_is_distinguished_from_moves(binaries: Binaries, target: str) -> None:
    assert binaries[FP64, target].uses_fp64
    assert not binaries[FP32, target].uses_fp64
    assert not binaries[FP64_MOVED, target].uses_fp64


def test_opcodes_are_counted(binaries: Binaries) -> None:
    assert binaries[MATMUL, "sm_90"].count("HGMMA") > 0
    assert binaries[MATMUL, "gfx942"].count("v_mfma") > 0
    assert binaries[COPY, "sm_90"].count("HGMMA") == 0
    assert binaries[COPY, "sm_90"].opcodes["LDG.E.128"] == 2


def test_missing_waits_for_sums_are_detected(binaries: Binaries) -> None:
    assert not binaries[MATMUL, "sm_100"].early_accesses
    wrong = triton.__version__.startswith(("3.7.", "3.8."))
    assert bool(binaries[TWO_PRODUCTS, "sm_100"].early_accesses) == wrong


def test_tma_counts_as_128_bits(binaries: Binaries) -> None:
    binary = binaries[TILE, "sm_90"]
    assert (binary.count("UTMALDG"), binary.count("UTMASTG")) == (1, 1)
    assert (binary.loads[128], binary.stores[128]) == (1, 1)


def test_a_kernel_inside_heuristics_is_found(binaries: Binaries) -> None:
    assert binaries[WRAPPED, "gfx942"].opcodes == binaries[COPY, "gfx942"].opcodes


def test_small_tensors_allow_buffer_instructions(binaries: Binaries) -> None:
    assert binaries[COPY, "gfx942"].opcodes["global_load_dwordx4"] == 1
    assert binaries[SMALL, "gfx942"].opcodes["buffer_load_dwordx4"] == 1
    assert binaries[SMALL, "gfx942"].loads == {128: 1}


@pytest.mark.usefixtures("binaries")  # so that recompilations come from the cache
def test_failures_affect_only_their_own_variant() -> None:
    e4m3 = variant("copy", "x:*fp8e4nv y:*fp8e4nv n:i32 BLOCK", 2048)
    ptx = variant("inline_ptx", "x:*fp32 BLOCK", 128)
    gcn = variant("inline_gcn", "x:*fp32 BLOCK", 128)
    jobs = [
        (e4m3, "sm_80"),
        (COPY, "sm_80"),
        (ptx, "gfx942"),
        (gcn, "sm_90"),  # ends the process
        (COPY, "gfx942"),
        (replace(COPY, kernel="not_a_kernel"), "sm_90"),
        (replace(COPY, module="no_such_module"), "sm_90"),
        (replace(COPY, constants=()), "sm_90"),
        (replace(COPY, signature=COPY.signature[1:]), "sm_90"),
        (COPY, "sm_90"),
    ]
    seen: list[tuple[int, int, object]] = []
    results = compile_all(jobs, progress=lambda *what: seen.append(what))
    assert [(done, all_of_them) for done, all_of_them, _ in seen] == [
        (i + 1, len(jobs)) for i in range(len(jobs))
    ]
    assert {id(result) for *_, result in seen} == set(map(id, results))
    expected = {
        0: "fp8e4nv not supported",
        2: "invalid instruction",
        3: "the compiler died (exit status 1)",
        5: "AttributeError",
        6: "no_such_module",
        7: "needed for ['BLOCK']",
        8: "the kernel has ['x', 'y', 'n', 'BLOCK']",
    }
    for index, ((tried, target), result) in enumerate(zip(jobs, results, strict=True)):
        if index not in expected:
            assert isinstance(result, Binary), result
            assert result.loads.keys() == {128}
            continue
        assert isinstance(result, CompileError)
        assert (result.target, result.kernel) == (target, f"{tried.module}.{tried.kernel}")
        assert expected[index] in result.reason
        assert result.stderr
        assert result.stderr in str(result)
        assert str(pickle.loads(pickle.dumps(result))) == str(result)


@pytest.mark.usefixtures("binaries")
def test_an_endless_compilation_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    class Noted(offline._Worker):
        def __init__(self, timeout: float) -> None:
            super().__init__(timeout)
            started.append(self.process.pid)

    monkeypatch.setattr(offline, "_Worker", Noted)
    monkeypatch.setattr(offline, "_figures_file", lambda variant, target: None)
    endless = variant("endless", "x:*fp32 COUNT", 10**7)
    begin = time.monotonic()
    stopped, after = compile_all([(endless, "gfx942"), (COPY, "gfx942")], timeout=3)
    assert time.monotonic() - begin < 40
    assert isinstance(stopped, CompileError)
    assert "no result after 3 s" in stopped.reason
    assert isinstance(after, Binary), after
    assert len(started) == 2
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.usefixtures("binaries")
def test_results_are_in_order_with_several_workers(binaries: Binaries) -> None:
    jobs = [(COPY, target) for target in reversed(TARGETS)]
    results = compile_all(jobs, workers=2)
    assert [result.target for result in results] == list(reversed(TARGETS))
    for job, result in zip(jobs, results, strict=True):
        assert isinstance(result, Binary)
        assert replace(result, seconds=0.0) == replace(binaries[job], seconds=0.0)


def test_no_jobs_and_wrong_arguments() -> None:
    assert compile_all([]) == []
    with pytest.raises(ValueError, match="sm_75"):
        compile_all([(COPY, "sm_75")])
    with pytest.raises(ValueError, match="workers"):
        compile_all([(COPY, "sm_90")], workers=0)


@pytest.mark.parametrize(
    ("opcode", "access"),
    [
        ("LDG.E", ("load", 32)),
        ("LDG.E.CONSTANT", ("load", 32)),
        ("LDG.E.64.CONSTANT", ("load", 64)),
        ("LDG.E.LTC128B.64", ("load", 64)),
        ("LDG.E.U8.STRONG.GPU", ("load", 8)),
        ("LDG.E.S16", ("load", 16)),
        ("LDG.E.ENL2.256", ("load", 256)),
        ("LDGSTS.E.BYPASS.LTC128B.128", ("load", 128)),
        ("LDGSTS.E", ("load", 32)),
        ("LD.E.U16", ("load", 16)),
        ("UTMALDG.2D", ("load", 128)),
        ("UBLKCP.S.G", ("load", 128)),
        ("UBLKCP.G.S", ("store", 128)),
        ("STG.E.EF.128", ("store", 128)),
        ("STG.E.U8", ("store", 8)),
        ("ST.E.64", ("store", 64)),
        ("LDL.64", None),
        ("STL", None),
        ("LDS.128", None),
        ("LDC.64", None),
        ("LDSM.16.M88.4", None),
        ("REDG.E.ADD.F32.FTZ.RN.STRONG.GPU", None),
        ("STS.128", None),
    ],
)
def test_widths_of_nvidia(opcode: str, access: tuple[str, int] | None) -> None:
    assert machine_code.classify_nvidia(opcode) == access


@pytest.mark.parametrize(
    ("opcode", "access"),
    [
        ("global_load_dword", ("load", 32)),
        ("global_load_dwordx2", ("load", 64)),
        ("global_load_dwordx3", ("load", 96)),
        ("buffer_load_dwordx4", ("load", 128)),
        ("global_load_lds_dwordx4", ("load", 128)),
        ("flat_load_dwordx4", ("load", 128)),
        ("global_load_ushort", ("load", 16)),
        ("global_load_sshort", ("load", 16)),
        ("global_load_short_d16_hi", ("load", 16)),
        ("buffer_load_ubyte_d16", ("load", 8)),
        ("global_load_sbyte", ("load", 8)),
        ("global_load_b128", ("load", 128)),
        ("global_load_d16_hi_u8", ("load", 8)),
        ("global_load_i16", ("load", 16)),
        ("global_store_short_d16_hi", ("store", 16)),
        ("buffer_store_byte", ("store", 8)),
        ("global_store_dwordx4", ("store", 128)),
        ("scratch_load_dwordx4", None),
        ("s_load_dwordx8", None),
        ("ds_read_b128", None),
        ("global_atomic_add_f32", None),
    ],
)
def test_widths_of_amd(opcode: str, access: tuple[str, int] | None) -> None:
    assert machine_code.classify_amd(opcode) == access


def test_codes_are_disassembled_together_as_if_alone(tmp_path: Path) -> None:
    """Bytes that are not code of the target are reported apart from their neighbors."""
    binary = build_variant(COPY, triton_target("sm_90")).asm["cubin"]
    code = machine_code.instructions(binary)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(binary)
    tool = [knobs.nvidia.nvdisasm.path, "-c", str(path)]
    text = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    alone = Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@\S+ )?([A-Z][\w.]*)", text, re.MULTILINE))
    del alone["NOP"]
    assert machine_code.disassembled([code, code[:160], code], "sm_90")[::2] == [alone, alone]
    first, second, third = machine_code.disassembled([code, bytes(range(128)), code], "sm_90")
    assert (first, third) == (alone, alone)
    assert isinstance(second, RuntimeError)


@pytest.mark.parametrize(
    ("line", "arithmetic"),
    [
        ("\tmul.rn.f64 \t%fd3, %fd1, %fd2;", True),
        ("\tcvt.f64.f32 \t%fd1, %f1;", True),
        ("\t@%p1 cvt.rn.f32.f64 \t%f1, %fd1;", True),
        ("\tsetp.lt.f64 \t%p1, %fd1, %fd2;", True),
        ("\tatom.global.gpu.relaxed.add.f64 \t%fd1, [%rd1], %fd2;", True),
        ("\tred.relaxed.gpu.global::cta.add.f64 \t[%rd1], %fd2;", True),
        ("\tld.global.f64 \t%fd1, [%rd1];", False),
        ("\tst.global.v2.f64 \t[%rd1], {%fd1, %fd2};", False),
        ("\tmov.f64 \t%fd1, 0d0000000000000000;", False),
        ("\t.reg .f64 \t%fd<9>;", False),
        ("\t.param .f64 x_param_0,", False),
        ("\tmul.f32 \t%f3, %f1, %f2;", False),
    ],
)
def test_fp64_in_ptx(line: str, arithmetic: bool) -> None:
    assert (offline._PTX_FP64.search(line) is not None) == arithmetic


def test_structs_are_compiled() -> None:
    """A variant with absent members and known alignment goes to the child and returns as a binary."""
    x = torch.empty(4, 1024, dtype=torch.float32, device="meta")
    arguments = struct_kernel.arguments(
        x=Rows(x, 1024), count=1024, y=Scaled(Rows(x, 1024), 2.0, None), offset=1.0, extra_ptr=None
    )
    with recording("sm_90") as variants:
        Launch.of(struct_kernel, TILE=1024)((4, 1, 1), *arguments)
    variant = replace(variants[0], divisible=("x.stride", "y.rows.stride", "count"))
    unknown = replace(variant, divisible=("x.strides",))
    *binaries, refused = compile_all([(variant, "sm_90"), (variant, "gfx950"), (unknown, "sm_90")])
    for binary in binaries:
        assert isinstance(binary, Binary), binary
        assert set(binary.loads) == set(binary.stores) == {128}
    assert "no integer parameters ['x.strides']" in str(refused)
