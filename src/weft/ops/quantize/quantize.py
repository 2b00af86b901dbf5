"""Quantization to row-wise, column-wise (transposed) or both copies from one read of the input; dequantization.

    amax  = largest |x| of a block, in fp32; NaN if the block contains one
    scale = the format's convention applied to amax (`weft.quant.formats`)
    code  = x scaled to the element's range, rounded once to nearest even, saturated

A scale that covers the whole tensor (block "tensor", nvfp4's global scale) or a whole column (the column-wise copy of
block "row") is needed before the first code, so the input is read twice unless the caller supplies the scale. A
rotated column-wise copy (`Format.hadamard`) also takes two reads, because its amax is that of the rotated elements.
Gradients pass straight through: d quantize(x) / dx = 1.

Stochastic rounding draws 32 bits for element (r, c) from Philox with key `seed` and counter
(c, r, 0 or 1 for the column-wise copy, 0): equal seeds give equal bytes on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from ...quant import Codes, Format, QTensor
from ...quant.copies import check_codes
from ...quant.reference import dequantize_copy, hadamard_reference
from ...runtime import (
    Backward,
    Gradients,
    Nothing,
    Op,
    Present,
    Sharding,
    is_distributed,
    local_of,
    place_like,
)
from ..common.checks import FLOATS, check_input, check_tensor, whole
from ..common.into import result_into, run_into
from ..common.results import ResultOptions, allocate_result, check_copies
from .arguments import DequantizeArgs, DequantizeOutputs, QuantizeArgs, QuantizeOutputs
from .reference import quantize_reference

if TYPE_CHECKING:
    from typing_extensions import Unpack


# ---- registration ---------------------------------------------------------------------------------------


class QuantizeOp(Op[QuantizeArgs, QuantizeOutputs], name="quantize", variants=32):
    def allocate(self, a: QuantizeArgs) -> QuantizeOutputs:
        return QuantizeOutputs(allocate_result(a.result, a.x))

    def present(self, a: QuantizeArgs) -> Present:
        return (a.result.present(),)

    @cached_property
    def launch(self) -> Callable[[QuantizeOutputs, QuantizeArgs], None]:
        from .launch import launch_quantize

        return launch_quantize

    def reference(self, a: QuantizeArgs) -> QuantizeOutputs:
        return quantize_reference(a)

    def keep(self, a: QuantizeArgs, o: QuantizeOutputs) -> Any:
        return Nothing()

    def backward(self, b: Backward) -> Gradients:
        return {"x": b.grads.result.y}

    def shard(self, a: QuantizeArgs) -> Sharding:
        of_scale, scale = "", a.result.scale
        joint, block = a.result.blocks()
        if a.seed is not None:
            joint["..."] = (
                "seed= draws by the number of a row. Quantize each rank's shard separately with x.to_local()"
            )
        if scale is not None and scale.numel() > 1:
            of_scale = "... _" if scale.dim() == 2 else "..."
            if a.x.dim() > 2:
                joint["..."] = "the scale of each row is [rows, 1]. Reshape x to [rows, K]"
        return Sharding(
            {"x": "... k", "result_scale": of_scale},
            {"result_y": "... k", "result_amax": "max:"},
            {"k": "blocks extend along it", **joint},
            block,
        )


quantize_op = QuantizeOp()


class DequantizeOp(Op[DequantizeArgs, DequantizeOutputs], name="dequantize", variants=16):
    def validate(self, a: DequantizeArgs) -> None:
        check_codes("the tensor", Codes(*a[:4]), a.data.shape[0], a.cols)

    def allocate(self, a: DequantizeArgs) -> DequantizeOutputs:
        return DequantizeOutputs(torch.empty((a.data.shape[0], a.cols), dtype=a.dtype, device=a.data.device))

    @cached_property
    def launch(self) -> Callable[[DequantizeOutputs, DequantizeArgs], None]:
        from .launch import launch_dequantize

        return launch_dequantize

    def reference(self, a: DequantizeArgs) -> DequantizeOutputs:
        return DequantizeOutputs(dequantize_copy(Codes(*a[:4]), (a.data.shape[0], a.cols), a.dtype))


dequantize_op = DequantizeOp()


def dequantize_codes(codes: Codes, cols: int, dtype: torch.dtype) -> Tensor:
    """Decode codes to a [rows, cols] tensor."""
    f = Format.of(codes.format)
    if f.hadamard != "rowwise":
        return dequantize_op(DequantizeArgs(*codes, cols, dtype)).values
    stored = DequantizeArgs(*codes._replace(format=f.stored.spec), f.length(cols), torch.float32)
    return hadamard_reference(dequantize_op(stored).values, inverse=True)[:, :cols].to(dtype)


# ---- public functions -----------------------------------------------------------------------------------


class CopyOptions(TypedDict, total=False):
    """Options of `quantize` that do not affect its return type."""

    rowwise: bool
    columnwise: bool
    scale: Tensor | None
    seed: int | None
    out: QTensor | tuple[QTensor | None, Tensor | None] | None


@overload
def quantize(
    x: Tensor,
    format: Format | str = ...,
    *,
    return_amax: Literal[False] = False,
    **options: Unpack[CopyOptions],
) -> QTensor: ...


@overload
def quantize(
    x: Tensor, format: Format | str = ..., *, return_amax: Literal[True], **options: Unpack[CopyOptions]
) -> tuple[QTensor, Tensor]: ...


@overload
def quantize(
    x: Tensor, format: Format | str = ..., *, return_amax: bool, **options: Unpack[CopyOptions]
) -> QTensor | tuple[QTensor, Tensor]: ...


def quantize(
    x: Tensor,
    format: Format | str = "1x128",
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    scale: Tensor | None = None,
    return_amax: bool = False,
    seed: int | None = None,
    out: QTensor | tuple[QTensor | None, Tensor | None] | None = None,
) -> QTensor | tuple[QTensor, Tensor]:
    """Quantize a tensor to a `QTensor`.

    x: [..., K] in bf16, fp16 or fp32.

    - `format`: a `Format`, a block name or a spec such as "e5m2:1x128:deepgemm". The NVFP4 training recipe uses
      "nvfp4_16x16" for weights and "e2m1:nvfp4:te:hadamard-columnwise" for activations and (with a `seed`) gradients.
    - `rowwise`, `columnwise`: the copies to make, from one read of x. The column-wise copy quantizes the transpose of
      x viewed as [M, K].
    - `scale`: a (decode) scale to use instead of computing one from x: one element for block "tensor", [M, 1] for block
      "row" without a column-wise copy.
    - `return_amax`: also return the largest |x|, an fp32 scalar on the device, for delayed scaling:
      `weft.scale_from_amax` turns it into the next `scale`. It is the amax of x itself even if a copy is rotated.
    - `seed`: round stochastically; equal seeds give equal bytes. Integer elements do not support it.
    - `out`: a QTensor of this format, shape and dtype to write the codes and scales to, such as `torch.empty_like(q)`;
      not with autograd. With `return_amax`, a pair of it and an fp32 scalar, each of which may be None for a new one.

    In the default convention (`te`) a block with an Inf gets scale 1, and the Inf becomes the largest code, ±448 in
    e4m3: the result is finite, but the block's other elements are rounded with an unsuitable scale. NaN stays NaN,
    except in int8 and int4, where it becomes 0. Other conventions turn the whole block into NaN, or the elements beside
    the Inf into zeros; see the table in `weft.quant.formats`. `weft.any_nonfinite(x)` detects such values, and so does
    the amax of `return_amax`.

    >>> import torch, weft
    >>> x = torch.randn(64, 512, dtype=torch.bfloat16)
    >>> q = weft.quantize(x, "1x128", columnwise=True)
    >>> bool((q.dequantize() - x).abs().max() < x.abs().max() / 12)
    True
    """
    f = Format.of(format)
    if f.hadamard == "rowwise":
        raise ValueError(
            "quantize rotates only column-wise copies: use 'hadamard-columnwise', and transpose the result to get a "
            "rotated row-wise copy"
        )
    check_input("x", x, FLOATS[:3])
    check_copies(rowwise, columnwise)
    if scale is not None:
        check_tensor("scale", scale, FLOATS, x.device)
        rows = x.numel() // max(x.shape[-1], 1)
        fits = {"tensor": scale.numel() == 1, "row": scale.numel() == rows and not columnwise}
        if not fits.get(f.block, False):
            raise ValueError(
                f"scale must have one element for block 'tensor', or shape [{rows}, 1] for block 'row' without a "
                f"column-wise copy; got {tuple(scale.shape)} for block {f.block!r}"
            )
        scale = scale.float()
    if seed is not None and (f.number.integer or not 0 <= whole("seed", seed) < 2**62):
        raise ValueError(
            f"seed needs float elements and a value from 0 to 2**62 - 1; got {seed} for {f.element}"
        )
    options = ResultOptions(x.dtype, f.spec, rowwise, columnwise, scale, return_amax)
    args = QuantizeArgs(x, options, seed)
    result = (quantize_op(args) if out is None else result_into(quantize_op, args, out)).result
    into = out[0] if isinstance(out, tuple) else out
    q = result.quantized(f.spec) if into is None else into
    return q if result.amax is None else (q, result.amax)


def dequantize(q: QTensor, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
    """Dequantize a `QTensor`: codes times scales in fp32, rounded once.

    q: a `QTensor`; its row-wise copy is read if there is one. dtype: that of the result, by default q's own. The
    gradient passes straight through. out: a contiguous tensor to write the result to; not with autograd.

    >>> import torch, weft
    >>> weft.dequantize(weft.quantize(torch.ones(2, 128), "row")).sum()
    tensor(256.)
    """
    if out is not None:
        return _dequantize_into(q, dtype, out)
    if is_distributed(q):
        shard = local_of(q)
        return place_like(dequantize(shard, dtype), q)  # type: ignore[arg-type]
    if not isinstance(q, QTensor):
        raise TypeError(f"dequantize takes a QTensor; got {type(q).__name__}")
    return q.dequantize(dtype)


def _dequantize_into(q: QTensor, dtype: torch.dtype | None, out: Tensor) -> Tensor:
    if not isinstance(q, QTensor):
        raise TypeError(f"dequantize with out= takes a QTensor of this rank; got {type(q).__name__}")
    if torch.is_grad_enabled() and q.requires_grad:
        raise ValueError("out= is for inference: call this under torch.no_grad()")
    check_tensor("out", out, (dtype or q.dtype,), q.device, tuple(q.shape))
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous; its strides are {out.stride()}")
    codes = q.rowwise
    if (
        codes is None or q.format.hadamard == "rowwise" or not q.numel()
    ):  # transposed or rotated: decoded in steps
        return out.copy_(q.dequantize(dtype))
    rows = codes.data.shape[0]
    args = DequantizeArgs(*codes, q.numel() // rows, out.dtype)
    run_into(dequantize_op, args, {"values": out.view(rows, -1)}, names={"values": "out"})
    return out
