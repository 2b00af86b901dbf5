"""Calls of other libraries' products; each function fills the result of a product that `engines` has accepted.

A library's result is copied once more if the library cannot write into existing memory, or leaves rows of no group
unwritten. The host never waits for the device.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from ...quant import Format
from ...quant.layouts import to_layout
from ..common.groups import group_of_reference, group_spans, real_rows_reference
from .arguments import GroupedArgs, MatmulArgs, ProductOutputs, WgradArgs

# Engine -> True if its library can be imported.
INSTALLED = {"weft": True, "torch": True, "deep_gemm": importlib.util.find_spec("deep_gemm") is not None}


def multiply(engine: str, o: ProductOutputs, a: MatmulArgs, target: str) -> None:
    """Fill the result of a product with the engine chosen for it on a target."""
    y = o.result.y
    if engine == "deep_gemm":
        _dense_by_deep_gemm(y, a, target)
        return
    if a.a_codes.format is None or a.b_codes.format is None:
        (torch.mm if a.a.dim() == 2 else torch.bmm)(a.a, a.b, out=y)
        return
    f = Format.of(a.a_codes.format).stored
    if f.element == "int8":
        _int8_by_torch(y, a, f.block)
    elif f.block == "nvfp4":
        _nvfp4_by_torch(y, a)
    else:
        torch._scaled_mm(*scaled_operands(a), out_dtype=y.dtype, out=y)


def multiply_groups(engine: str, o: ProductOutputs, a: GroupedArgs | WgradArgs) -> None:
    """Fill the result of a grouped product with the engine chosen for it."""
    y = o.result.y
    if engine == "deep_gemm":
        assert isinstance(a, GroupedArgs)
        _groups_by_deep_gemm(y, a)
    elif y.device.type == "cpu":
        _groups_one_by_one(y, a)
    else:
        assert isinstance(a, GroupedArgs)
        groups_by_torch(y, a)


# ---- PyTorch --------------------------------------------------------------------------------------------


def scaled_operands(a: MatmulArgs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the codes of a and b, then their scales, in the layouts of `torch._scaled_mm`."""
    left, right = to_layout(a.a_codes, "torch_v1"), to_layout(a.b_codes, "torch_v1", operand="b")
    return left.data, right.data, left.scale, right.scale


def nvfp4_operands(a: MatmulArgs) -> dict[str, Any]:
    """Return the arguments of `torch.nn.functional.scaled_mm`: codes and scales of a and b."""
    arguments: dict[str, Any] = {}
    buffers_a, buffers_b = to_layout(a.a_codes, "torch_v2"), to_layout(a.b_codes, "torch_v2", operand="b")
    for side, buffers in (("a", buffers_a), ("b", buffers_b)):
        arguments[f"mat_{side}"] = buffers.data
        arguments[f"scale_{side}"] = [buffers.scale, buffers.global_scale]
        arguments[f"scale_recipe_{side}"] = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        arguments[f"swizzle_{side}"] = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    return arguments


def _nvfp4_by_torch(y: Tensor, a: MatmulArgs) -> None:
    y.copy_(F.scaled_mm(**nvfp4_operands(a), output_dtype=y.dtype))


def _int8_by_torch(y: Tensor, a: MatmulArgs, block: str) -> None:
    """Multiply exact sums by the scales in the order of Weft's kernel, which gives its bits."""
    left, right = a.a_codes, a.b_codes
    sums = torch._int_mm(left.data, right.data.t())
    if block == "tensor":
        torch.mul(sums, left.scale * right.scale, out=y)
    else:
        torch.mul(sums * left.scale, right.scale.t(), out=y)


def groups_by_torch(y: Tensor, a: GroupedArgs) -> None:
    """Run PyTorch's grouped product, which knows no padding: it multiplies padding rows like the rows of the next
    group, and they are zeroed afterwards."""
    rows = len(a.x)
    ends = a.ends.clamp(max=rows).to(torch.int32)
    product = F.grouped_mm(a.x, a.w.mT, offs=ends)
    real = real_rows_reference(a.ends, rows, a.align)
    torch.where(real[:, None], product, product.new_zeros(()), out=y)


def _groups_one_by_one(y: Tensor, a: GroupedArgs | WgradArgs) -> None:
    """Run one PyTorch product per group, on a CPU, where `ends` can be read without waiting."""
    rows, written = len(a.x), 0
    for group, begin, end in group_spans(a.ends, rows, a.align):
        if isinstance(a, GroupedArgs):
            y[written:begin] = 0  # padding of the previous group
            torch.mm(a.x[begin:end], a.w[group].t(), out=y[begin:end])
            written = end
        else:
            y[written:group] = 0  # groups without rows
            torch.mm(a.dy[begin:end].t(), a.x[begin:end], out=y[group])
            written = group + 1
    y[written:] = 0


# ---- DeepGEMM -------------------------------------------------------------------------------------------


def _dense_by_deep_gemm(y: Tensor, a: MatmulArgs, target: str) -> None:
    layout = "deepgemm_sm90" if target == "sm_90" else "deepgemm_sm100"
    left, right = to_layout(a.a_codes, layout), to_layout(a.b_codes, layout, operand="b")
    importlib.import_module("deep_gemm").fp8_gemm_nt((left.data, left.scale), (right.data, right.scale), y)


def _groups_by_deep_gemm(y: Tensor, a: GroupedArgs) -> None:
    """Run DeepGEMM's grouped product. It takes the group of every row, -1 for padding, and leaves padding unwritten."""
    left, rows = to_layout(a.x_codes, "deepgemm_sm90"), len(y)
    real = real_rows_reference(a.ends, rows, a.align)
    group = torch.where(real, group_of_reference(a.ends, rows), -1).to(torch.int32)
    right = a.w_codes.data, a.w_codes.scale.contiguous()
    library = importlib.import_module("deep_gemm")
    library.m_grouped_fp8_gemm_nt_contiguous((left.data, left.scale), right, y, group)
    y.masked_fill_(~real[:, None], 0)
