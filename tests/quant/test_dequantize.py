"""Decoded values of codes in every format and dtype."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.quant.checks import BACKENDS, adversarial, assert_same, decoded, expected, spread_scale, stacked
from weft import Format
from weft.lab import oracle

DECODED = [
    "e4m3:tensor:te", "int8:tensor:te", "e5m2:row:te", "int8:row:deepgemm", "e4m3:1x128:te:pow2", "e5m2:1x128:vllm",
    "int8:1x128:te", "e4m3:128x128:te", "e4m3:mx:te", "e5m2:mx:te", "e2m1:mx:te", "e2m1:nvfp4:te", "e2m1:nvfp4:torchao",
    "e2m1:nvfp4_16x16:te", "int4:1x128:te",
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", DECODED)
def test_dequantize(spec: str, backend: str) -> None:
    f = Format.of(spec)
    columnwise = f.block in ("128x128", "1x128", *oracle.NVFP4)
    if f.block in ("tensor", *oracle.NVFP4):
        samples = [
            adversarial(10, 150, torch.float32)[name]
            for name in ("normal", "range", "one_nan", "denormals", "huge")
        ]
    else:
        # 191 rows, so that rows of column-wise codes are padded, and more columns than a tile has.
        samples = [stacked(4, 300, torch.float32)[1:], torch.randn(3, 1100)]
    for x in samples:
        rows, cols = x.shape
        q = weft.quantize(x, f)
        with weft.backend(backend):  # type: ignore[arg-type]
            values = weft.dequantize(q)
        want = decoded(expected(x, f), f, (rows, cols))
        assert_same(values, want, f"{spec} {backend}")
        if f.block in oracle.NVFP4 and not x.isnan().any() and x.abs().max() < 1e30:
            exact = oracle.dequantize(
                expected(x, f), block=f.block, element=f.element or "", shape=(rows, cols)
            )
            tiny = torch.finfo(torch.float32).tiny
            assert ((values - exact).abs() <= exact.abs() * 2.0**-22 + tiny * 2.0**-22).all()
        if columnwise:
            q = weft.quantize(x, f, rowwise=False, columnwise=True)
            with weft.backend(backend):  # type: ignore[arg-type]
                values = weft.dequantize(q)
            want = decoded(expected(x, f, transpose=True), f, (cols, rows)).t()
            assert_same(values, want, f"{spec} {backend} column-wise")


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        ("e4m3:1x128:te:pow2", torch.float16),
        ("int8:row:te", torch.bfloat16),
        ("e2m1:nvfp4:te", torch.bfloat16),
    ],
)
def test_dequantize_to_sixteen_bits(spec: str, dtype: torch.dtype) -> None:
    f = Format.of(spec)
    x = (torch.randn(10, 300) * torch.exp2(torch.randint(-12, 12, (10, 1)).float())).to(dtype)
    want = decoded(expected(x, f), f, (10, 300)).to(dtype)
    for backend in BACKENDS:
        with weft.backend(backend):
            values = weft.dequantize(weft.quantize(x, f))
        assert values.dtype == dtype
        assert_same(values, want, backend)


def test_every_code_decodes() -> None:
    for element in ("e4m3", "e5m2", "int8"):
        codes = torch.arange(256).to(torch.uint8).view(1, 256)
        f = Format.of(f"{element}:tensor:te")
        copy = weft.quantize(torch.ones(1, 256), f).rowwise
        copy.data.view(torch.uint8).copy_(codes)
        copy.scale.fill_(1.0)
        q = weft.QTensor((1, 256), torch.float32, f, copy)
        want = torch.from_numpy(oracle.decode(codes.numpy(), element)).float()
        for backend in BACKENDS:
            with weft.backend(backend):
                assert_same(weft.dequantize(q), want, f"{element} {backend}")


def test_every_byte_of_int4_decodes() -> None:
    codes = torch.arange(256).to(torch.uint8).view(2, 128)
    copy = weft.quantize(torch.ones(2, 256), "int4:1x128").rowwise
    copy.data.copy_(codes)
    copy.scale.fill_(1.0)
    q = weft.QTensor((2, 256), torch.float32, "int4:1x128:te", copy)
    want = torch.from_numpy(oracle.decode(oracle.unpack(codes.numpy(), 256), "int4")).float()
    assert len(want.unique()) == 16
    for backend in BACKENDS:
        with weft.backend(backend):
            assert_same(weft.dequantize(q), want, backend)


@pytest.mark.parametrize(
    "spec",
    ["e4m3:1x128:te:pow2", "e5m2:1x128:vllm", "int8:1x128:te", "int4:1x128:te", "e2m1:mx:te", "e4m3:row:te"],
)
def test_decode_error_is_half_a_step(spec: str) -> None:
    f = Format.of(spec)
    x = torch.randn(40, 300) * torch.exp2(torch.randint(-9, 10, (40, 1)).float())
    q = weft.quantize(x, f)
    want = expected(x, f)
    scale = spread_scale(want, f, (40, 300))
    grid = torch.from_numpy(oracle.VALUES[f.element or ""])
    scaled = (x.double() / scale).abs()
    above = torch.searchsorted(grid, scaled).clamp(1, len(grid) - 1)
    step = (grid[above] - grid[above - 1]) * scale
    error = (weft.dequantize(q).double() - x.double()).abs()
    assert (error <= step * 0.5 * (1 + 1e-6)).all()
    assert (error > step * 0.49).any()
    assert (weft.dequantize(q) - x).abs().max() > 0
