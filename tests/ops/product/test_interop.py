"""Products with other libraries' signatures, which have the bits of Weft's own."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType as S
from torch.nn.functional import SwizzleType

import weft
from weft.interop import scaled_mm

PAIRS = {
    "tensor": ("tensor", "tensor", S.TensorWise, S.TensorWise),
    "row": ("row", "e5m2:row:te", S.RowWise, S.RowWise),
    "blocks": ("1x128", "128x128", S.BlockWise1x128, S.BlockWise128x128),
    "wgrad": ("1x128", "1x128", S.BlockWise1x128, S.BlockWise1x128),
    "mx": ("mx", "mx", S.BlockWise1x32, S.BlockWise1x32),
}


def test_signature_matches_torch() -> None:
    mine, its = (inspect.signature(f).parameters for f in (scaled_mm, F.scaled_mm))
    assert list(mine) == list(its)
    assert [p.default for p in mine.values()] == [p.default for p in its.values()]


@pytest.mark.parametrize("pair", PAIRS)
def test_bits_match_matmul(pair: str) -> None:
    a_spec, b_spec, *recipes = PAIRS[pair]
    a, b = weft.quantize(torch.randn(40, 384), a_spec), weft.quantize(torch.randn(256, 384), b_spec)
    left, right = a.to_layout("torch_v2"), b.to_layout("torch_v2", operand="b")
    swizzle = SwizzleType.SWIZZLE_32_4_4 if pair == "mx" else None
    bias = torch.randn(256)
    got = scaled_mm(
        left.data,
        right.data,
        left.scale,
        recipes[0],
        right.scale,
        recipes[1],
        swizzle,
        swizzle,
        bias,
        torch.float32,
    )
    assert torch.equal(got, weft.matmul(a, b.T, bias=bias, out_dtype=torch.float32))


@pytest.mark.parametrize("swizzled", [True, False])
def test_nvfp4_takes_lists(swizzled: bool) -> None:
    a, b = (weft.quantize(torch.randn(rows, 256), "nvfp4") for rows in (40, 64))
    left, right = a.to_layout("torch_v2"), b.to_layout("torch_v2", operand="b")
    assert a.rowwise
    assert b.rowwise
    scales = (left.scale, right.scale) if swizzled else (a.rowwise.scale, b.rowwise.scale)
    swizzle = [SwizzleType.SWIZZLE_32_4_4 if swizzled else SwizzleType.NO_SWIZZLE]
    recipe = [S.BlockWise1x16, S.TensorWise]
    got = scaled_mm(
        left.data, right.data, [scales[0], a.rowwise.global_scale], recipe,
        [scales[1], b.rowwise.global_scale], recipe, swizzle, swizzle,
    )  # fmt: skip
    assert torch.equal(got, weft.matmul(a, b.T, out_dtype=torch.bfloat16))


def test_mistakes_raise_clear_errors() -> None:
    a, b = weft.quantize(torch.randn(8, 64), "row"), weft.quantize(torch.randn(16, 64), "row")
    left, right = a.to_layout("torch_v2"), b.to_layout("torch_v2", operand="b")
    scales = (left.scale, S.RowWise, right.scale, S.RowWise)
    with pytest.raises(ValueError, match="contraction_dim"):
        scaled_mm(left.data, right.data, *scales, contraction_dim=(0, 1))
    with pytest.raises(ValueError, match="codes"):
        scaled_mm(left.data.float(), right.data, *scales)
    with pytest.raises(ValueError, match="must be one of"):
        scaled_mm(left.data, right.data, left.scale, S.BlockWise1x16, right.scale, S.RowWise)
    with pytest.raises(ValueError, match="swizzled"):
        scaled_mm(left.data, right.data, left.scale, S.BlockWise1x32, right.scale, S.RowWise)
