"""Products compiled for GPUs: no spills, shared memory within the target's limit, and matrix instructions."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch

import weft
from tests.support.binaries import flaws
from weft.lab.compiled import Binary, compile_all
from weft.lab.families.product import PAIRS
from weft.runtime import TARGETS, Variant, recording

# DeepSeek-V3's projection of an expert, in a batch and for a few tokens.
N, K = 4096, 7168
ROWS = (4096, 16)

# Matrix instruction that a binary must contain, by target and pair.
HALF, BYTES, GROUPS = (
    ("bf16",),
    ("fp8-row", "fp8-tensor", "fp8-blocks", "fp8-blocks-wgrad"),
    ("mxfp8", "mxfp4", "nvfp4"),
)
UNITS: dict[tuple[str, str], str] = {
    **{(target, "bf16"): "HMMA" for target in ("sm_80", "sm_89", "sm_120")},
    ("sm_90", "bf16"): "HGMMA",
    ("sm_100", "bf16"): "UTCHMMA",
    **{("sm_89", pair): "QMMA" for pair in BYTES},
    **{("sm_90", pair): "QGMMA" for pair in BYTES},
    **{("sm_100", pair): "UTCQMMA" for pair in BYTES},
    **{("sm_120", pair): "QMMA" for pair in BYTES},
    ("sm_100", "mxfp8"): "UTCQMMA",
    ("sm_100", "mxfp4"): "UTCOMMA",
    ("sm_100", "nvfp4"): "UTCOMMA",
    **dict.fromkeys((("sm_110", pair) for pair in BYTES), "UTCQMMA"),
    ("sm_110", "bf16"): "UTCHMMA",
    ("sm_110", "mxfp8"): "UTCQMMA",
    ("sm_110", "mxfp4"): "UTCOMMA",
    ("sm_110", "nvfp4"): "UTCOMMA",
    ("sm_120", "mxfp8"): "QMMA",
    ("sm_120", "mxfp4"): "OMMA",
    ("sm_120", "nvfp4"): "OMMA",
    **{(target, pair): "v_mfma" for target in ("gfx942", "gfx950") for pair in (*HALF, *BYTES)},
    ("gfx950", "mxfp8"): "v_mfma_scale",
    ("gfx950", "mxfp4"): "v_mfma_scale",
    ("sm_80", "int8-row"): "IMMA",
    ("sm_89", "int8-row"): "IMMA",
    ("sm_90", "int8-row"): "IGMMA",
}


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def variant(pair: str, rows: int, target: str) -> Variant:
    """Return the variant that a product launches on a target."""
    settings = dict(PAIRS[pair])
    dtype = settings.pop("dtype", torch.bfloat16)
    with recording(target):
        operands = [
            x if spec is None else weft.quantize(x, spec)
            for x, spec in (
                (_empty(rows, K, dtype=dtype), settings.pop("a", None)),
                (_empty(N, K, dtype=dtype), settings.pop("b", None)),
            )
        ]
    with recording(target) as variants:
        weft.matmul(operands[0], operands[1].T, engine="weft", **settings)
    return variants[0]


def faults(pair: str, rows: int, target: str, binary: Any) -> list[str]:
    problems = flaws(target, binary)
    if rows > 64 and isinstance(binary, Binary):
        unit = UNITS.get((target, pair))
        if unit is not None and not binary.count(unit):
            problems.append(f"no {unit} among {sorted(binary.opcodes)}")
        if (
            target in ("sm_90", "sm_100", "sm_110")
            and pair in (*HALF, *BYTES)
            and not binary.count("UTMALDG")
        ):
            problems.append("tiles are not copied in bulk")
        if (
            target in ("sm_90", "sm_100", "sm_110", "sm_120")
            and pair in BYTES
            and binary.count("F2FP.*E[45]M")
        ):
            problems.append("codes are converted")
    return problems


def compiled(products: Iterable[tuple[str, str]]) -> dict[tuple[str, str], list[Any]]:
    """Compile products for targets, one binary per number of rows."""
    keys = list(products)
    jobs = [(variant(pair, rows, target), target) for target, pair in keys for rows in ROWS]
    binaries = iter(compile_all(jobs, timeout=300))
    return {key: [next(binaries) for _ in ROWS] for key in keys}


# Products that are compiled in every test run, not only in slow runs.
CHANGED = {
    ("sm_90", "bf16"),
    ("sm_90", "fp8-blocks"),
    ("gfx950", "mxfp8"),
    ("sm_110", "nvfp4"),
}


@cache
def binaries_of(target: str, pair: str) -> list[Any]:
    """Compile a product; `CHANGED` is compiled in one process, whose start takes as long as compiling one product."""
    return (
        _every_time()[target, pair] if (target, pair) in CHANGED else compiled([(target, pair)])[target, pair]
    )


@cache
def _every_time() -> dict[tuple[str, str], list[Any]]:
    return compiled(sorted(CHANGED))


@pytest.mark.parametrize(
    ("target", "pair"),
    [
        pytest.param(target, pair, marks=[] if (target, pair) in CHANGED else pytest.mark.slow)
        for target in (*TARGETS, "sm_110")
        for pair in PAIRS
    ],
)
def test_products_compile(target: str, pair: str) -> None:
    for rows, binary in zip(ROWS, binaries_of(target, pair), strict=True):
        assert not faults(pair, rows, target, binary), f"{rows} rows"


# ---- groups -------------------------------------------------------------------------------------------------

# A layer of experts: rows, experts, N and K; formats of rows, weights and gradients.
GROUPS = (8192, 8, 2048, 1024)
RECIPES = {
    "bf16": (None, None, None),
    "fp8-blocks": ("1x128", "128x128", "1x128"),
    "mxfp8": ("mx", "mx", "mx"),
    "weight-int4": (None, "int4:1x128:te", None),
}
STEPS = ("forward", "few rows", "gated", "gathered", "gradient of rows", "gradient of weights")


def group_variant(recipe: str, step: str, target: str) -> Variant:
    """Return the variant that a step of a layer launches on a target."""
    rows, groups, n, k = GROUPS
    few = step == "few rows"

    def quantized(x: torch.Tensor, spec: str | None) -> torch.Tensor:
        return x if spec is None else weft.quantize(x, spec, columnwise=True)

    def plain(*shape: int) -> torch.Tensor:
        return _empty(*shape, dtype=torch.bfloat16)

    with recording(target):
        x, w, dy = (
            quantized(t, spec)
            for t, spec in zip(
                (plain(64 if few else rows, k), plain(groups, n, k), plain(rows, n)),
                RECIPES[recipe],
                strict=True,
            )
        )
        ends = _empty(groups, dtype=torch.int32)
        gather = weft.row_map(_empty(rows // 2, 2, dtype=torch.int32), groups, align=128)
        tokens = quantized(plain(rows // 2, k), RECIPES[recipe][0])
    main = _empty(groups, n, k, dtype=torch.float32)
    with recording(target) as variants:
        if step == "gradient of weights":
            weft.grouped_wgrad(dy, x, ends, align=128, engine="weft", out=main, accumulate=True)
        elif step == "gradient of rows":
            weft.grouped_matmul(dy, w, ends, align=128, transpose=True, engine="weft")
        elif step == "gathered":
            weft.grouped_matmul(tokens, w, ends, align=128, gather=gather, engine="weft")
        elif step == "gated":
            weft.grouped_matmul(x, w, ends, align=128, glu="silu", quantize="1x128", engine="weft")
        else:
            weft.grouped_matmul(x, w, ends, align=1 if few else 128, engine="weft")
    return variants[0]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_groups_compile(target: str, recipe: str) -> None:
    jobs = [(group_variant(recipe, step, target), target) for step in STEPS]
    for step, binary in zip(STEPS, compile_all(jobs, timeout=300), strict=True):
        assert not faults(recipe, 0, target, binary), step


def test_faults_are_detected() -> None:
    binary, _ = binaries_of("sm_90", "bf16")
    assert not faults("bf16", 4096, "sm_90", binary)
    assert faults("int8-row", 4096, "sm_90", binary)
    assert faults("bf16", 4096, "sm_80", binary)
