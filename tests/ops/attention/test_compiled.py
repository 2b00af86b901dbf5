"""Attention kernels compiled for GPUs: no spills, shared memory within the target's limit, its matrix instructions,
and no more exponentials than scores."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

import weft
from tests.support.binaries import flaws
from weft.lab.compiled import Binary, compile_all
from weft.lab.families import spills_of
from weft.ops.attention.configs import attention_config
from weft.runtime import TARGETS, Capabilities, Variant, recording

KERNELS = ("attention_kernel", "delta_kernel", "query_gradient_kernel", "key_gradient_kernel")


class Case(NamedTuple):
    dtype: torch.dtype
    dim: int
    v_dim: int
    packed: bool = False


CASES = {
    "bf16-64": Case(torch.bfloat16, 64, 64),
    "bf16-96": Case(torch.bfloat16, 96, 96),
    "bf16-128": Case(torch.bfloat16, 128, 128),
    "bf16-192": Case(torch.bfloat16, 192, 128),
    "bf16-256": Case(torch.bfloat16, 256, 256),
    "bf16-packed": Case(torch.bfloat16, 128, 128, packed=True),
    "fp16-128": Case(torch.float16, 128, 128),
    "fp32-64": Case(torch.float32, 64, 64),
    "fp32-128": Case(torch.float32, 128, 128),
    "fp32-192": Case(torch.float32, 192, 128),
    "fp32-256": Case(torch.float32, 256, 256),
}
HEADS, KEY_HEADS, TOKENS = 32, 8, 4096
RESCALES = 4  # exponentials per step that rescale the rows of a lane

# Matrix instruction for 16-bit operands; every binary contains at least one.
UNITS = {
    **dict.fromkeys(("sm_80", "sm_89", "sm_120"), "HMMA"),
    "sm_90": "HGMMA",
    "sm_100": "UTCHMMA",
    **dict.fromkeys(("gfx942", "gfx950"), "v_mfma"),
}


# Kernels whose warps repeat products on sm_80, sm_89 and sm_120, in the tiles in which they do not spill.
REDUNDANCY = {("bf16-192", "key_gradient_kernel"): 1.5, ("bf16-256", "key_gradient_kernel"): 1.25}


def multiplications_per_pair(kernel: str, tile: Any) -> int:
    """Return the multiplications per pair of a query and a key."""
    qk, v = (width.first + width.second for width in (tile.qk, tile.v))
    return {
        "attention_kernel": qk + v,
        "query_gradient_kernel": 2 * qk + v,
        "key_gradient_kernel": 2 * (qk + v),
    }[kernel]


@cache
def variants(case: str, target: str) -> dict[str, Variant]:
    """Return the variants that causal attention and its gradients launch on a target, by kernel."""
    dtype, dim, v_dim, packed = CASES[case]
    shapes = ((HEADS, dim), (KEY_HEADS, dim), (KEY_HEADS, v_dim))
    leaves = [
        torch.empty(
            (TOKENS, heads, width) if packed else (1, heads, TOKENS, width), dtype=dtype, device="meta"
        ).requires_grad_()
        for heads, width in shapes
    ]
    starts = torch.empty(9, dtype=torch.int32, device="meta") if packed else None
    with recording(target) as recorded:
        y = weft.attention(*leaves, is_causal=True, cu_seqlens=starts)
        torch.autograd.grad(y, leaves, torch.empty_like(y))
    assert [variant.kernel for variant in recorded] == list(KERNELS)
    return dict(zip(KERNELS, recorded, strict=True))


def faults(case: str, target: str, kernel: str, binary: Any) -> list[str]:
    messages = flaws(target, binary)
    if not isinstance(binary, Binary) or kernel == "delta_kernel":
        return messages
    amd, fp32 = target.startswith("gfx"), CASES[case].dtype == torch.float32
    unit = "FFMA" if fp32 and not amd else UNITS[target]
    if not binary.count(unit):
        messages.append(f"no {unit} among {sorted(binary.opcodes)}")
    if fp32 and not amd and binary.count(UNITS[target]):
        messages.append("fp32 is rounded for a matrix unit")
    variant = variants(case, target)[kernel]
    tile = dict(variant.constants)["TILE"]
    if unit == "HMMA":
        multiplications = binary.count(unit) * variant.num_warps * 16 * 8 * 16
        necessary = tile.m * tile.n * multiplications_per_pair(kernel, tile)
        if multiplications > necessary * REDUNDANCY.get((case, kernel), 1):
            messages.append(f"{multiplications / necessary:.2f} times the multiplications")
    lanes = variant.num_warps * (64 if amd else 32)
    allowed = tile.m * tile.n // lanes  # one for each score of a step
    if kernel == "attention_kernel":
        allowed += RESCALES
    if (case, kernel) == ("bf16-192", "key_gradient_kernel") and unit == "HMMA":
        allowed *= 2
    if target == "sm_100":
        allowed *= 2  # pipelining products duplicates the code after the first one behind the loop
    exponentials = binary.count("MUFU.EX2") + binary.count("v_exp")
    if exponentials > allowed:
        messages.append(f"{exponentials} exponentials where {allowed} are enough")
    return messages


def compiled(jobs: list[tuple[str, str, str]]) -> dict[tuple[str, str, str], Any]:
    """Compile the binaries of (target, case, kernel) in one process."""
    binaries = compile_all(
        [(variants(case, target)[kernel], target) for target, case, kernel in jobs], timeout=300
    )
    return dict(zip(jobs, binaries, strict=True))


# Compiled in every run; the rest are slow tests.
COMMON = [
    ("sm_90", "bf16-128", "attention_kernel"),
    ("sm_100", "bf16-128", "key_gradient_kernel"),
]


@cache
def _common_binaries() -> dict[tuple[str, str, str], Any]:
    return compiled(COMMON)


@pytest.mark.parametrize(("target", "case", "kernel"), COMMON)
def test_some_kernels_compile(target: str, case: str, kernel: str) -> None:
    assert not faults(case, target, kernel, _common_binaries()[target, case, kernel])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile(target: str, case: str) -> None:
    for (_, _, kernel), binary in compiled([(target, case, kernel) for kernel in KERNELS]).items():
        assert not faults(case, target, kernel, binary), kernel


def test_faults_are_reported() -> None:
    binary = _common_binaries()["sm_90", "bf16-128", "attention_kernel"]
    assert not faults("bf16-128", "sm_90", "attention_kernel", binary)
    assert faults("bf16-128", "sm_80", "attention_kernel", binary)  # no HMMA, and too much shared memory
    assert faults("fp32-128", "sm_90", "attention_kernel", binary)
    assert faults("bf16-256", "sm_90", "attention_kernel", binary)  # fewer scores in a tile


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("kernel", ["forward", "query", "key"])
def test_loops_are_not_pipelined_on_amd(kernel: str, target: str) -> None:
    """Pipelined attention loops are miscompiled on AMD (aiter #4163), and two warps are not deterministic
    (ROCm/triton #953)."""
    for dim in (64, 96, 128, 192, 256):
        for itemsize in (2, 4):
            config = attention_config(kernel, dim, dim, itemsize, Capabilities.of(target))
            assert config.num_stages == 1
            assert config.num_warps >= 4


def test_no_kernel_overlaps_its_predecessor() -> None:
    """The backward reads what the preceding kernel has just written (flash-attention #2481)."""
    assert not any(
        "launch_pdl" in dict(variant.options) for variant in variants("bf16-128", "sm_90").values()
    )


# ---- in eight bits ---------------------------------------------------------------------------------------------


def eight_bits(target: str, scores: Any, values: Any, dim: int) -> list[Variant]:
    """Return the variants that attention in eight bits launches on a target, without the quantize kernels."""
    v_dim = 128 if dim == 192 else dim  # DeepSeek's heads
    shapes = ((1, HEADS, TOKENS, dim), (1, KEY_HEADS, TOKENS, dim), (1, KEY_HEADS, TOKENS, v_dim))
    heads = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    with recording(target) as recorded, torch.no_grad():
        weft.attention(*heads, is_causal=True, scores=scores, values=values)
    kernels = ("attention_kernel", "value_kernel", "value_block_kernel")
    return [variant for variant in recorded if variant.kernel in kernels]


@pytest.mark.parametrize("scores", ["int8", "mxfp8"])
@pytest.mark.parametrize("dim", [8, 64, 72, 80, 192])
def test_pieces_of_codes_have_at_least_32_elements(dim: int, scores: str) -> None:
    """8-bit dots take 32 elements at a time and do not compile with fewer."""
    # The first variant computes the mean key.
    tile = dict(eight_bits("sm_120", scores, None, dim)[-1].constants)["TILE"]
    assert tile.qk.first >= 32
    assert tile.qk.second == 0 or tile.qk.second >= 32
    assert dim <= tile.qk.first + tile.qk.second <= max(32, dim + 31)
    if scores == "mxfp8":
        assert 32 * (tile.groups.first + tile.groups.second) == tile.qk.first + tile.qk.second
        assert tile.groups.dim == -(-dim // 32)


# Matrix instruction of scores and, if they are in that element, of values. sm_100 has no int8 in tensor memory; Triton
# multiplies int8 there as on sm_80.
IN_EIGHT_BITS = {
    **dict.fromkeys(((target, "int8") for target in ("sm_80", "sm_89", "sm_100", "sm_120")), "IMMA"),
    ("sm_90", "int8"): "IGMMA",
    **dict.fromkeys(((target, "int8") for target in ("gfx942", "gfx950")), "v_mfma_i32"),
    **dict.fromkeys(((target, "e4m3") for target in ("sm_89", "sm_120")), "QMMA"),
    ("sm_90", "e4m3"): "QGMMA",
    ("sm_100", "e4m3"): "UTCQMMA",
    ("gfx950", "e4m3"): "v_mfma",
    ("sm_100", "mxfp8"): "UTCQMMA",
    ("sm_120", "mxfp8"): r"QMMA\.SF",
    ("gfx950", "mxfp8"): "v_mfma_scale",
}


def faults_in_eight_bits(target: str, scores: str, values: str | None, dim: int, binary: Any) -> list[str]:
    """Return the flaws of a forward kernel, and the matrix instructions that it lacks."""
    messages = flaws(target, binary)
    # See choices.json: here scores are multiplied in bf16.
    decoded = target == "sm_100" and dim > 192 and scores == "mxfp8" and values is not None
    for element in {values, None if decoded else scores} - {None}:
        if not binary.count(IN_EIGHT_BITS[target, element]):
            messages.append(f"no {IN_EIGHT_BITS[target, element]} among {sorted(binary.opcodes)}")
    if values is not None and not decoded and binary.count(UNITS[target]) and UNITS[target] != "v_mfma":
        messages.append(f"codes are multiplied by {UNITS[target]}")
    return messages


def elements_on(target: str) -> list[tuple[str, str | None]]:
    """Return the pairs of scores and values that a target multiplies in eight bits."""
    values = [None, *(v for v in ("e4m3", "int8") if (target, v) in IN_EIGHT_BITS)]
    scores = [s for s in ("int8", "e4m3", "mxfp8") if (target, s) in IN_EIGHT_BITS]
    return [(s, v) for s in scores for v in values]


def test_targets_have_the_instructions_that_their_capabilities_name() -> None:
    for target in TARGETS:
        facts = Capabilities.of(target)
        assert ((target, "e4m3") in IN_EIGHT_BITS) == facts.fp8_dot
        assert ((target, "mxfp8") in IN_EIGHT_BITS) == facts.mx_dot
        assert (target, "int8") in IN_EIGHT_BITS


# Compiled in every run.
EIGHT_BITS = [
    ("sm_80", "int8", "int8"),
    ("gfx942", "int8", "int8"),
    ("sm_100", "mxfp8", None),
    ("sm_120", "mxfp8", "e4m3"),
]


def test_some_forms_in_eight_bits_compile() -> None:
    jobs = [(eight_bits(target, scores, values, 128)[-1], target) for target, scores, values in EIGHT_BITS]
    for case, binary in zip(EIGHT_BITS, compile_all(jobs, timeout=300), strict=True):
        assert not faults_in_eight_bits(*case, 128, binary), case
        wrong = {"int8": "mxfp8", "mxfp8": "int8"}[case[1]]
        if (case[0], wrong) in IN_EIGHT_BITS:
            assert faults_in_eight_bits(case[0], wrong, case[2], 128, binary), case


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("target", TARGETS)
def test_attention_in_eight_bits_compiles(target: str, dim: int) -> None:
    cases = [
        (case, variant) for case in elements_on(target) for variant in eight_bits(target, *case, dim)[1:]
    ]
    binaries = compile_all([(variant, target) for _, variant in cases], timeout=500)
    for (case, variant), binary in zip(cases, binaries, strict=True):
        if variant.kernel == "attention_kernel":
            assert not faults_in_eight_bits(target, *case, dim, binary), (case, variant)
        else:
            assert not flaws(target, binary), (case, variant)


# ---- masks, biases and ALiBi ------------------------------------------------------------------------------------


def of_pairs(target: str, dim: int) -> list[Variant]:
    """Return the variants of attention with a mask, with a bias in fp32 and with slopes, and of their gradients."""
    leaves = [
        torch.empty((1, heads, TOKENS, dim), dtype=torch.bfloat16, device="meta").requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    pairs = (1, HEADS, TOKENS, TOKENS)
    mask = torch.empty(pairs, dtype=torch.bool, device="meta")
    bias = torch.empty(pairs, device="meta").requires_grad_()
    alibi = torch.empty((HEADS, 2), device="meta").requires_grad_()
    with recording(target) as recorded:
        masked = weft.attention(*leaves, mask=mask)
        torch.autograd.grad(masked, leaves, torch.empty_like(masked))
        biased = weft.attention(*leaves, bias=bias)
        torch.autograd.grad(biased, [*leaves, bias], torch.empty_like(biased))
        sloped = weft.attention(*leaves, alibi=alibi, is_causal=True)
        torch.autograd.grad(sloped, [*leaves, alibi], torch.empty_like(sloped))
    kernels = (*KERNELS, "blocks_kernel")
    assert {variant.kernel for variant in recorded} >= set(kernels)
    return list(dict.fromkeys(v for v in recorded if v.kernel in kernels and v.kernel != "delta_kernel"))


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("target", TARGETS)
def test_masks_and_biases_compile(target: str, dim: int) -> None:
    """The forward with a mask spills on three targets: its tile is that without a mask, for the same bits."""
    jobs = [(variant, target) for variant in of_pairs(target, dim)]
    for (variant, _), binary in zip(jobs, compile_all(jobs, timeout=500), strict=True):
        tile, known = dict(variant.constants)["TILE"], spills_of(variant.kernel, target)
        is_known = (
            isinstance(binary, Binary) and binary.spill_bytes <= known and not getattr(tile, "bias", None)
        )
        assert not [flaw for flaw in flaws(target, binary) if not (is_known and "spilled" in flaw)], variant
