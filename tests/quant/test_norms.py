"""Codes and scales of norms, caller-supplied scales and returned amaxes, against the oracle."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import weft
from tests.quant.checks import (
    BACKENDS,
    INF,
    NAN,
    NORM,
    adversarial,
    assert_quantized,
    assert_same,
    ordinary,
    stacked,
)
from weft import Format


def exact_sums(rows: int, cols: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return rows 2^k * (c + v), where c + v are small integers with mean c over any even number of columns. Sums and
    sums of squares are exact, so kernels that add in different orders compute equal means and variances."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.randint(1, 9, (rows, -(-cols // 2)), generator=generator).float()
    x = torch.stack([v, -v], -1).view(rows, -1)[:, :cols]
    if cols % 2:
        x[:, -1] = 0
    x += torch.randint(-4, 5, (rows, 1), generator=generator)
    return (x * torch.exp2(torch.randint(-9, 10, (rows, 1), generator=generator).float())).to(dtype)


def norm_inputs(rows: int, cols: int, dtype: torch.dtype, specials: bool) -> dict[str, torch.Tensor]:
    x = exact_sums(rows, cols, dtype, 7)
    generator = torch.Generator().manual_seed(8)
    weight = torch.randn(cols, generator=generator) * torch.exp2(
        torch.randint(-12, 13, (cols,), generator=generator).float()
    )
    weight[16:32] = 0
    if specials:  # at the end, so that the first stripe has ordinary groups
        x[-1] = 0
        x[-2, min(3, cols - 1)] = INF
        x[-3, cols // 2] = NAN
        x[-4] *= 2.0**-20 if dtype == torch.float16 else 2.0**-100
    return {"x": x, "weight": weight}


def check_norm(
    norm: Callable[..., Any], f: Format, rows: int, cols: int, *, columnwise: bool, dtype: torch.dtype = torch.bfloat16,
    specials: bool = True, residual: bool = False, **more: Any,
) -> None:  # fmt: skip
    arguments = {**norm_inputs(rows, cols, dtype, specials), **more}
    if residual:
        # x and the residual are nonzero and add to the same h.
        other = torch.where(arguments["x"].isfinite(), arguments["x"] * 3, 0)
        arguments |= {"x": arguments["x"] - other, "residual": other}
    plain = norm(**arguments, out_dtype=torch.float32)
    fused = norm(**arguments, quantize=f, columnwise=columnwise, return_amax=True)
    y = plain[0] if residual else plain
    assert y.dtype == torch.float32
    if residual:
        assert_same(fused[1].float(), plain[1].float(), "residual")
    what = f"{norm.__name__} {rows}x{cols}"
    assert_quantized(fused[0], y, f, what, columnwise=columnwise, input_dtype=torch.float32)
    assert fused[0].dtype == dtype
    assert_same(fused[-1].reshape(1), y.abs().amax().reshape(1), f"{what}: amax")


# (format, norm, both copies, with a residual, dtype)
NORMS = [
    ("e4m3:1x128:te:pow2", "rms_norm", False, True, torch.bfloat16),
    ("e4m3:1x128:te:pow2", "rms_norm", True, True, torch.bfloat16),
    ("e4m3:1x128:te", "rms_norm", False, False, torch.float16),
    ("e4m3:1x128:torchao", "rms_norm", False, False, torch.bfloat16),
    ("e4m3:1x128:deepgemm", "rms_norm", True, False, torch.bfloat16),
    ("e5m2:1x128:sglang", "rms_norm", False, False, torch.bfloat16),
    ("e4m3:1x128:sglang_col_major", "layer_norm", False, False, torch.bfloat16),
    ("e4m3:1x128:deepep", "rms_norm", False, False, torch.bfloat16),
    ("int8:1x128:vllm", "rms_norm", False, False, torch.float32),
    ("e4m3:1x128:deepgemm:pow2", "layer_norm", True, True, torch.float32),
    ("e4m3:row:te", "rms_norm", False, False, torch.bfloat16),
    ("int8:row:torchao", "layer_norm", False, True, torch.bfloat16),
    ("e4m3:tensor:te", "rms_norm", False, False, torch.bfloat16),
    ("e5m2:tensor:deepgemm", "layer_norm", True, False, torch.bfloat16),
    ("e4m3:128x128:te:pow2", "rms_norm", True, False, torch.bfloat16),
    ("e4m3:128x128:vllm", "layer_norm", False, False, torch.bfloat16),
    ("e4m3:mx:te", "rms_norm", True, False, torch.bfloat16),
    ("e2m1:mx:deepgemm", "layer_norm", False, False, torch.bfloat16),
    ("e2m1:nvfp4:te", "rms_norm", True, False, torch.bfloat16),
    ("e2m1:nvfp4:torchao", "layer_norm", False, True, torch.bfloat16),
]


@pytest.mark.parametrize(("spec", "norm", "columnwise", "residual", "dtype"), NORMS)
def test_norms(spec: str, norm: str, columnwise: bool, residual: bool, dtype: torch.dtype) -> None:
    """Codes are computed from the fp32 y that the same call returns without `quantize`."""
    f = Format.of(spec)
    function = getattr(weft, norm)
    tail = 137 if columnwise or f.block == "128x128" else 9
    for specials in (False, True):
        check_norm(
            function, f, tail, 300, columnwise=columnwise, specials=specials, residual=residual, dtype=dtype
        )
    with weft.backend("reference"):
        check_norm(function, f, 9, 300, columnwise=columnwise, residual=residual, dtype=dtype)


@pytest.mark.parametrize("spec", ["e4m3:1x128:te:pow2", "e4m3:row:te"])
@pytest.mark.parametrize("cols", [1, 37, 1100])
def test_norms_of_other_lengths(spec: str, cols: int) -> None:
    """Rows of a single column, shorter than a group, and long enough to be read in a loop."""
    check_norm(weft.rms_norm, Format.of(spec), 5, cols, columnwise=False, residual=cols == 1100)
    if cols != 37 and spec.startswith("e4m3:1x128"):
        check_norm(weft.rms_norm, Format.of(spec), 130, cols, columnwise=True)


def test_norm_codes_are_those_of_the_fp32_result() -> None:
    """y is not rounded to bf16 in between: tested on ordinary data, whose sums are not exact, with every option of a
    norm."""
    f = Format.of("e4m3:1x128:te:pow2")
    x, weight, bias = ordinary(9, 300), torch.randn(300), torch.randn(300)
    modulation = torch.randn(9, 600)
    arguments: dict[str, Any] = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "modulation": modulation,
        "weight_offset": 1.0,
    }
    y = weft.rms_norm(**arguments, out_dtype=torch.float32)
    q = weft.rms_norm(**arguments, quantize=f)
    assert_quantized(q, y, f)
    with pytest.raises(AssertionError, match="codes"):
        assert_quantized(q, y.bfloat16(), f)


@pytest.mark.parametrize("mode", [0, 2], ids=["integers", "clamped"])
def test_norms_with_each_encoder(mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NORM, "cast_mode", lambda capabilities: mode)
    check_norm(weft.rms_norm, Format.of("e4m3:1x128:te:pow2"), 9, 300, columnwise=False)
    check_norm(weft.rms_norm, Format.of("e5m2:1x128:te:pow2"), 137, 300, columnwise=True)


def test_norms_with_a_given_scale() -> None:
    f = Format.of("e4m3:tensor:te")
    x = exact_sums(140, 300, torch.bfloat16, 1)
    y = weft.rms_norm(x, out_dtype=torch.float32)
    scale = torch.tensor(0.0037)
    for columnwise, backend in itertools.product((False, True), BACKENDS):
        with weft.backend(backend):  # type: ignore[arg-type]
            q, amax = weft.rms_norm(x, quantize=f, quant_scale=scale, columnwise=columnwise, return_amax=True)
            if backend == "reference":
                y = weft.rms_norm(x, out_dtype=torch.float32)
        assert_quantized(q, y, f, backend, columnwise=columnwise, scale=scale)
        assert_same(amax.reshape(1), y.abs().amax().reshape(1), "amax")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", ["e4m3:tensor:te", "e5m2:tensor:vllm", "int8:tensor:deepgemm"])
def test_given_scale_of_a_tensor(spec: str, backend: str) -> None:
    f = Format.of(spec)
    x = adversarial(10, 150, torch.float32)
    for scale, name in itertools.product(
        (1.0, 0.013, 2.0**-130, 3e38), ("normal", "range", "many_specials", "outliers")
    ):
        for columnwise in (False, True):
            with weft.backend(backend):  # type: ignore[arg-type]
                q = weft.quantize(x[name], f, scale=torch.tensor(scale), columnwise=columnwise)
            assert_quantized(q, x[name], f, f"{name} {scale}", columnwise=columnwise, scale=scale)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", ["e4m3:row:te", "int8:row:sglang_col_major"])
def test_given_scales_of_rows(spec: str, backend: str) -> None:
    f = Format.of(spec)
    x = stacked(4, 300, torch.float32)
    scale = torch.exp(torch.randn(len(x), 1))
    with weft.backend(backend):  # type: ignore[arg-type]
        q, amax = weft.quantize(x, f, scale=scale, return_amax=True)
        strided = weft.quantize(x, f, scale=scale.expand(-1, 2)[:, :1])
    assert_quantized(q, x, f, scale=scale)
    assert_quantized(strided, x, f, scale=scale)
    assert amax.isnan()
    with pytest.raises(AssertionError):
        assert_quantized(q, x, f, scale=scale * 1.1)


@pytest.mark.parametrize("spec", ["e4m3:1x128:te:pow2", "e4m3:tensor:te", "e4m3:row:te", "e2m1:nvfp4:te"])
def test_amax(spec: str) -> None:
    f = Format.of(spec)
    for backend, columnwise in itertools.product(BACKENDS, (False, True)):
        for name, x in adversarial(140, 37, torch.float32).items():
            if name not in (
                "normal",
                "range",
                "one_nan",
                "one_minus_nan",
                "one_minus_inf",
                "zeros",
                "smallest",
            ):
                continue
            with weft.backend(backend):
                q, amax = weft.quantize(x, f, columnwise=columnwise, return_amax=True)
            assert amax.dim() == 0
            assert amax.dtype == torch.float32
            want = torch.tensor(np.abs(x.numpy()).max())
            assert_same(amax.reshape(1), want.reshape(1), f"{f} {name} {backend}")
            if name in ("normal", "one_nan"):
                assert_quantized(q, x, f, name, columnwise=columnwise)


def test_delayed_scaling() -> None:
    """Each step is quantized with the previous step's amax; values that exceed it saturate."""
    f = Format.of("e4m3:tensor:te")
    amax = torch.tensor(1.0)
    saturated = 0
    for step in range(6):
        x = torch.randn(20, 150) * 3.0**step
        scale = (amax / 448).reshape(1)
        q, current_amax = weft.quantize(x, f, scale=scale, return_amax=True)
        assert_quantized(q, x, f, scale=scale)
        assert_same(current_amax.reshape(1), x.abs().amax().reshape(1), "amax")
        saturated += int((q.rowwise.data.float().abs() == 448).sum())
        amax = current_amax
    assert saturated > 0
