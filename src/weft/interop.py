"""Weft's products by the argument lists of other libraries, for those who come with codes and scales of their own."""

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
    """`torch.nn.functional.scaled_mm` by Weft's kernel: the same arguments, on every device that Weft serves.

    mat_a [M, K] and mat_b [K, N] are codes, e4m3, e5m2, int8, or e2m1 two to a byte along K (mat_b is then the
    transpose of [N, K / 2]). Scales lie as torch has them: see `weft.layouts`, "torch_v2". Those of mx and nvfp4 may
    also lie plain, [rows, K / 32] and [rows, K / 16], without a swizzle. NVFP4 takes lists: the scales of blocks, then
    that of the tensor. Sums are always promoted to fp32, so `use_fast_accum` changes nothing.

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
    a = _quantised("mat_a", mat_a, scale_a, scale_recipe_a, swizzle_a, "a")
    b = _quantised("mat_b", mat_b, scale_b, scale_recipe_b, swizzle_b, "b")
    return matmul(a, b.T, bias=bias, out_dtype=output_dtype or torch.bfloat16)


def _listed(given: T | Sequence[T] | None) -> list[T]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]  # type: ignore[list-item]


def _quantised(
    name: str,
    codes: Tensor,
    scale: Tensor | Sequence[Tensor],
    recipe: ScalingType | Sequence[ScalingType],
    swizzle: SwizzleType | Sequence[SwizzleType] | None,
    operand: Literal["a", "b"],
) -> QTensor:
    """An operand [rows, K] from torch's buffers."""
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
        wanted = format.scale_shape(*shape)
        if tuple(scales[0].shape) != wanted:
            raise ValueError(
                f"the scale of {name} must be swizzled 32x4x4, or of shape {wanted}; got {tuple(scales[0].shape)}"
            )
        data = codes if operand == "a" else codes.t()
        found = Codes(data.view(format.number.dtype), scales[0].view(format.scale_dtype), global_scale)
    else:
        buffers = ForeignCodes(codes, scales[0], global_scale)
        found = from_layout(buffers, format, "torch_v2", shape, operand=operand)
    return QTensor(shape, torch.bfloat16, format, found)
