"""Combinations that no workload covers: every option with both copies, programs that share rows, sums over many
programs, the largest element at any position. No other test catches some of the mutants (`mutants`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton_loom.testing import Guarded, assert_rounded_once

import weft
from weft import Format
from weft.lab.copies import assert_copies
from weft.lab.families import Call
from weft.lab.families.norm import norm_truth
from weft.ops.common.results import ResultOptions
from weft.ops.norm.arguments import NormArgs, NormBackwardArgs, NormGradients
from weft.ops.quantize.arguments import DequantizeArgs, QuantizeArgs
from weft.runtime import choosing_for

# ---- every option with both copies --------------------------------------------------------------------------


def exact_sums(*shape: int) -> Tensor:
    """Draw rows of c + v and c - v with small integers: sums and sums of squares are exact in any order, so that norms
    with different tiles have the same statistics to the bit."""
    v = torch.randint(1, 9, (*shape[:-1], shape[-1] // 2)).float()
    x = torch.stack([v, -v], -1).flatten(-2) + torch.randint(-4, 5, (*shape[:-1], 1))
    return (x * torch.exp2(torch.randint(-3, 4, (*shape[:-1], 1)).float())).bfloat16()


OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"casting": "llama"},
    "gemma": {"weight_offset": 1.0},
    "by sample": {"bias": (300,), "modulation": (2, 600)},
    "by row": {"bias": (300,), "modulation": (2, 70, 600), "casting": "llama", "weight_offset": 1.0},
}


@pytest.mark.parametrize(
    ("norm", "options"),
    [
        (weft.rms_norm, "llama"),
        (weft.rms_norm, "by row"),
        (weft.layer_norm, "gemma"),
        (weft.layer_norm, "by sample"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_both_copies_with(norm: Any, options: str) -> None:
    """Codes encode the fp32 y of the same call without `quantize`, and gradients equal its gradients."""
    drawn = {k: torch.randn(v) if isinstance(v, tuple) else v for k, v in OPTIONS[options].items()}
    residual = exact_sums(2, 70, 300)
    kwargs = {"x": residual * -0.5, "residual": residual, "weight": torch.randn(300), **drawn}
    leaves = {k: v.requires_grad_() for k, v in kwargs.items() if isinstance(v, Tensor)}
    kwargs |= leaves
    y, _ = norm(**kwargs, out_dtype=torch.float32)
    q, _, amax = norm(**kwargs, quantize="1x128", columnwise=True, return_amax=True)
    assert_copies(q, y.detach())
    assert torch.equal(amax, y.detach().abs().max())
    upstream = torch.randn(2, 70, 300).bfloat16()
    plain = norm(**kwargs)[0]
    wanted = torch.autograd.grad(plain, list(leaves.values()), upstream)
    got = torch.autograd.grad(q.dequantize(), list(leaves.values()), upstream)
    for name, a, b in zip(leaves, got, wanted, strict=True):
        assert torch.equal(a, b), f"gradient of {name}"
        assert a.count_nonzero()


# ---- as configured for GPUs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cols", [300, 1100])
@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_amax_of_tiles(target: str, cols: int) -> None:
    """Without a row-wise copy, or with square blocks, every tile stores its own partial amax."""
    x = exact_sums(140, cols)
    for col in (0, 150, cols - 1):
        weight = torch.ones(cols)
        weight[col] = 16.0
        y = weft.rms_norm(x, weight, out_dtype=torch.float32)
        for spec, rowwise in (("1x128", True), ("1x128", False), ("128x128", True)):
            with choosing_for(target):
                q, amax = weft.rms_norm(
                    x, weight, quantize=spec, rowwise=rowwise, columnwise=True, return_amax=True
                )
            assert torch.equal(amax, y.abs().max())
            assert_copies(q, y)


@pytest.mark.parametrize("columnwise", [False, True], ids=["rows", "both"])
@pytest.mark.parametrize(
    ("target", "spec"),
    [
        ("sm_90", "e4m3:1x128:te:pow2"),
        ("sm_80", "e4m3:tensor:te"),
        ("sm_90", "int8:row:te"),
        ("gfx942", "e2m1:nvfp4:te"),
    ],
)
def test_quantizer_configured_for(target: str, spec: str, columnwise: bool) -> None:
    """Bytes do not depend on the tiling: several rows per tile, or several programs per row."""
    x = torch.randn(133, 2100)
    x[:, 2050] *= 3  # the largest elements are in the last of three tiles
    with choosing_for(target):
        q, amax = weft.quantize(x, spec, columnwise=columnwise, return_amax=True)
        values = weft.dequantize(q)
    assert torch.equal(amax, x.abs().max())
    assert_copies(q, x)
    assert torch.equal(values, weft.dequantize(q))


@pytest.mark.parametrize("target", ["sm_90", pytest.param("gfx942", marks=pytest.mark.slow)])
def test_nothing_is_written_past_the_end_as_configured_for(target: str) -> None:
    """Rows of the last program past the end are masked; on a CPU a program has only one row."""
    x, weight, bias = torch.randn(21, 200).bfloat16(), torch.randn(200), torch.randn(200)
    scale, rstd, mean = torch.randn(21, 200), torch.rand(21), torch.randn(21)
    copy = weft.quantize(x, "1x128").rowwise
    assert copy is not None
    calls: list[tuple[str, Any]] = []
    for format in (None, "1x128", "row", "nvfp4"):
        options = ResultOptions(torch.bfloat16, format, True, False, None, format is not None)
        sources = (x, weight, bias, x, bias, scale, scale, scale)
        for unrounded in (False, True):
            calls.append(("norm", NormArgs(*sources, 1e-5, 0.0, "layer", "fp32", unrounded, True, options)))
    needs = NormGradients(*[True] * len(NormGradients._fields))
    read = (x, x, x, x, bias, scale, weight, bias, scale, rstd, mean)
    for unrounded in (False, True):
        rest = (0.0, "fp32", unrounded, x.dtype, x.dtype, needs)
        calls.append(("norm_backward", NormBackwardArgs(*read, *rest)))
    for format in ("1x128", "row"):
        options = ResultOptions(torch.bfloat16, format, True, False, None, True)
        calls.append(("quantize", QuantizeArgs(x, options, None)))
    calls.append(("dequantize", DequantizeArgs(*copy, 200, torch.bfloat16)))
    for name, a in calls:
        op = weft.catalogue[name]
        guards = []
        guarded: list[Tensor | None] = []
        for t in op.outputs.flatten(op.allocate(a)):
            # skip scalars and the stand-in for a quantized result
            if t is not None and t.dim() and 0 not in t.stride():
                guards.append(Guarded.of(t))
                t = guards[-1].tensor
            guarded.append(t)
        with choosing_for(target):
            op.launch(op.outputs.build(*guarded), a)
        assert guards
        for guard in guards:
            guard.check()


# ---- the largest element at any position ------------------------------------------------------------------------

PLACES = (0, 1023, 1024, 2047, 2048, 2099)


@pytest.mark.parametrize("spec", ["e4m3:row:te", "e4m3:tensor:te", "e2m1:nvfp4:torchao"])
def test_largest_element_in_any_tile_of_a_row(spec: str) -> None:
    f = Format.of(spec)
    rows = torch.randn(len(PLACES), 2100)
    for row, col in zip(rows, PLACES, strict=True):
        row[col] = 9.0
    for x in [rows] if f.block == "row" else rows.split(1):
        assert_copies(weft.quantize(x, f), x)
        y = weft.rms_norm(x, out_dtype=torch.float32)
        q, amax = weft.rms_norm(x, quantize=f, return_amax=True)
        assert_copies(q, y)
        assert torch.equal(amax, y.abs().max())


@pytest.mark.parametrize("spec", ["e4m3:tensor:te", "e4m3:1x128:te:pow2"])
def test_largest_element_in_any_of_many_rows(spec: str) -> None:
    """On a CPU each row is a program: the amax of more than 1024 rows is reduced in several steps."""
    for row in PLACES:
        x = torch.randn(2100, 16)
        x[row, 5] = -9.0
        q, amax = weft.quantize(x, spec, return_amax=True)
        assert amax == 9.0, row
        assert_copies(q, x)


# ---- sums -----------------------------------------------------------------------------------------------------


def check_gradients_over_samples(
    target: str, cols: int, modulated: tuple[int, ...], gated: tuple[int, ...]
) -> None:
    draw = lambda *shape: torch.randn(shape).bfloat16()  # noqa: E731
    call = Call(
        weft.layer_norm,
        {
            "x": draw(2, 5, 14, cols),
            "weight": draw(cols),
            "bias": draw(cols),
            "residual": draw(2, 5, 14, cols),
            "pre_bias": draw(cols),
            "residual_gate": draw(*gated, cols),
            "modulation": draw(*modulated, 2 * cols),
        },
    ).requiring_grad()
    leaves = call.tensors()
    dy, dh = draw(2, 5, 14, cols), draw(2, 5, 14, cols)
    expected = norm_truth(call, dy, dh)
    with choosing_for(target):
        gradients = torch.autograd.grad(call(), list(leaves.values()), (dy, dh))
    for name, got in zip(leaves, gradients, strict=True):
        assert_rounded_once(got, expected[f"d{name}"].truth, expected[f"d{name}"].noise)


@pytest.mark.parametrize(("target", "cols"), [("cpu", 200), ("cpu", 1100), ("sm_90", 200)])
def test_gradients_over_samples_of_many_rows(target: str, cols: int) -> None:
    """Covers parameters, per-sample modulation and gate, several rows per program, and rows longer than a tile."""
    check_gradients_over_samples(target, cols, (2,), (2,))


@pytest.mark.parametrize(
    ("modulated", "gated"),
    [((2,), (2, 5)), ((2, 5), (2,)), ((2, 5, 14), (2, 5)), ((2,), (2, 5, 14))],
    ids=["finer gate", "coarser gate", "modulation by row", "gate by row"],
)
def test_gradients_over_samples_of_two_sizes(modulated: tuple[int, ...], gated: tuple[int, ...]) -> None:
    check_gradients_over_samples("cpu", 200, modulated, gated)
