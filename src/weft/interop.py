"""Weft's products with the argument lists of other libraries, for callers with their own codes and scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from .ops import matmul
from .quant import Codes, Format, QTensor
from .quant.layouts import ForeignCodes, from_layout

T = TypeVar("T")

_BLOCKS: dict[tuple[str, ...], str] = {
    ("TensorWise",): "tensor",
    ("RowWise",): "row",
    ("BlockWise1x128",): "1x128",
    ("BlockWise128x128",): "128x128",
    ("BlockWise1x32",): "mx",
    ("BlockWise1x16", "TensorWise"): "nvfp4",
}
_ELEMENTS: dict[torch.dtype, Any] = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int8: "int8",
    torch.uint8: "e2m1",
    getattr(torch, "float4_e2m1fn_x2", torch.uint8): "e2m1",
}


def scaled_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor | Sequence[Tensor],
    scale_recipe_a: ScalingType | Sequence[ScalingType],
    scale_b: Tensor | Sequence[Tensor],
    scale_recipe_b: ScalingType | Sequence[ScalingType],
    swizzle_a: SwizzleType | Sequence[SwizzleType] | None = None,
    swizzle_b: SwizzleType | Sequence[SwizzleType] | None = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """Compute `torch.nn.functional.scaled_mm` by Weft's kernel: same arguments, on every device that Weft serves.

    mat_a [M, K] and mat_b [K, N] are codes: e4m3, e5m2, int8, or e2m1 packed two per byte along K (mat_b is then the
    transpose of [N, K / 2]). Scales have torch's layout: see `weft.layouts`, "torch_v2". mx and nvfp4 scales may also
    be plain, [rows, K / 32] and [rows, K / 16], without a swizzle. NVFP4 takes lists: the block scales, then the tensor
    scale. Sums are always accumulated in fp32, so `use_fast_accum` changes nothing.

    >>> import torch, weft
    >>> from torch.nn.functional import ScalingType
    >>> a, b = weft.quantize(torch.randn(32, 64), "row"), weft.quantize(torch.randn(16, 64), "row")
    >>> left, right = a.to_layout("torch_v2"), b.to_layout("torch_v2", operand="b")
    >>> y = weft.interop.scaled_mm(
    ...     left.data, right.data, left.scale, ScalingType.RowWise, right.scale, ScalingType.RowWise
    ... )
    >>> torch.equal(y, weft.matmul(a, b.T, out_dtype=torch.bfloat16))
    True
    """
    if tuple(contraction_dim) not in ((), (-1, -2), (1, 0)):
        raise ValueError(
            f"scaled_mm sums over the last dimension of mat_a and the first of mat_b; got contraction_dim "
            f"{tuple(contraction_dim)}"
        )
    a = _quantized("mat_a", mat_a, scale_a, scale_recipe_a, swizzle_a, "a")
    b = _quantized("mat_b", mat_b, scale_b, scale_recipe_b, swizzle_b, "b")
    return matmul(a, b.T, bias=bias, out_dtype=output_dtype or torch.bfloat16)


def _listed(value: T | Sequence[T] | None) -> list[T]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]  # type: ignore[list-item]


def _quantized(
    name: str,
    codes: Tensor,
    scale: Tensor | Sequence[Tensor],
    recipe: ScalingType | Sequence[ScalingType],
    swizzle: SwizzleType | Sequence[SwizzleType] | None,
    operand: Literal["a", "b"],
) -> QTensor:
    """Build an operand [rows, K] from torch's buffers."""
    block = _BLOCKS.get(tuple(one.name for one in _listed(recipe)))
    if block is None:
        raise ValueError(
            f"the scales of {name} must be one of {', '.join(' and '.join(names) for names in _BLOCKS)}; got {recipe}"
        )
    if codes.dtype not in _ELEMENTS or codes.dim() != 2:
        raise ValueError(
            f"{name} must be a matrix of 8- or 4-bit codes; got {codes.dtype} of {tuple(codes.shape)}"
        )
    format = Format(block, _ELEMENTS[codes.dtype])  # type: ignore[arg-type]
    rows, width = codes.shape if operand == "a" else (codes.shape[1], codes.shape[0])
    shape = (rows, width * format.packed)
    scales = _listed(scale)
    global_scale = scales[1].reshape(()) if block == "nvfp4" else None
    swizzled = any(one.name == "SWIZZLE_32_4_4" for one in _listed(swizzle))
    if block in ("mx", "nvfp4") and not swizzled:
        plain_shape = format.scale_shape(*shape)
        if tuple(scales[0].shape) != plain_shape:
            raise ValueError(
                f"the scale of {name} must be swizzled 32x4x4, or of shape {plain_shape}; got {tuple(scales[0].shape)}"
            )
        data = codes if operand == "a" else codes.t()
        codes_and_scales = Codes(
            data.view(format.number.dtype), scales[0].view(format.scale_dtype), global_scale
        )
    else:
        buffers = ForeignCodes(codes, scales[0], global_scale)
        codes_and_scales = from_layout(buffers, format, "torch_v2", shape, operand=operand)
    return QTensor(shape, torch.bfloat16, format, codes_and_scales)
