"""Decode kernels compiled for GPUs: no spills, and shared memory within the target's limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.support.binaries import flaws
from weft.lab.compiled import compile_all
from weft.runtime import TARGETS, Variant, recording

KINDS = ("bf16", "e4m3:tensor", "e4m3:token", "int8:token", "latents", "rows of FlashMLA")
QUERIES = (1, 8)
# Compiled in every run; the rest are slow tests.
COMMON = {("sm_90", "e4m3:tensor")}


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def variants(kind: str, queries: int, target: str) -> list[Variant]:
    """Return the variants that decoding launches on a target, for Llama-3's heads or DeepSeek-V3's latents."""
    table, lengths = _empty(8, 64, dtype=torch.int32), _empty(8, dtype=torch.int32)
    places: dict[str, Any] = {"page_table": table, "lengths": lengths}
    with recording(target) as recorded:
        if kind in ("latents", "rows of FlashMLA"):
            rows = (
                _empty(512, 64, 1, 576) if kind == "latents" else _empty(512, 64, 1, 656, dtype=torch.uint8)
            )
            weft.mla_decode(_empty(8, queries, 128, 576), weft.KVCache(rows), scale=192**-0.5, **places)
            return recorded
        shape, scales = (512, 64, 8, 128), []
        dtype = torch.bfloat16
        if kind != "bf16":
            element, scaled = kind.split(":")
            dtype = torch.int8 if element == "int8" else torch.float8_e4m3fn
            scales = [
                _empty(*(shape[:3] if scaled == "token" else ()), dtype=torch.float32) for _ in range(2)
            ]
        cache = weft.KVCache(_empty(*shape, dtype=dtype), _empty(*shape, dtype=dtype), *scales)
        weft.attention_decode(_empty(8, queries, 32, 128), cache, **places)
    return recorded


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        pytest.param(target, kind, marks=[] if (target, kind) in COMMON else pytest.mark.slow)
        for target in TARGETS
        for kind in KINDS
    ],
)
def test_decoding_compiles(target: str, kind: str) -> None:
    jobs = [(variant, target) for queries in QUERIES for variant in variants(kind, queries, target)]
    for (variant, _), binary in zip(jobs, compile_all(jobs, timeout=300), strict=True):
        assert not flaws(target, binary), variant
