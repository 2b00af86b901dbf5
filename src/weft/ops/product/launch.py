"""How a product is launched: where its operands lie, how it is cut, and who multiplies."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...quant import Format
from ...runtime import Capabilities, Launch, capabilities_of, is_recording
from ..common.copies import NO_CODES, cast_mode, copy_arguments
from ..common.rows import align_of
from ..quantize import quantize_into
from .arguments import MatmulArgs, MatmulOutputs, OperandCodes
from .configs import FEW, ProductConfig, product_config, spans_of
from .engines import choose_engine, multiply_by_torch
from .kernels import Finish, Operand, Sizes, finish_kernel, matmul_kernel
from .operands import Form, Precision, Product


def _of_plain(x: Tensor) -> tuple[Operand, Form]:
    """A plain operand [rows, K] or [batch, rows, K] as the kernel takes it; copied if neither is contiguous."""
    rows, k = x.shape[-2:]
    if 1 not in (x.stride(-1), x.stride(-2)) and k > 1 and rows > 1:
        x = x.contiguous()
    along_k = x.stride(-1) == 1 or k == 1
    stride = x.stride(-2) if along_k else x.stride(-1)
    batch_stride = x.stride(0) if x.dim() == 3 else 0
    align = align_of(k if along_k else rows, stride, batch_stride, least=min(8, 16 // x.itemsize))
    form = replace(Form.of(x.dtype, None), along_k=along_k, align=align)
    return Operand(x, None, None, stride, batch_stride, 0, 0), form


def _of_codes(codes: OperandCodes, dtype: torch.dtype) -> tuple[Operand, Form]:
    form, data, scale = Form.of(dtype, codes.format), codes.data, codes.scale
    assert data is not None
    assert scale is not None
    along_k = data.stride(1) == 1 or data.shape[1] == 1
    stride = data.stride(0 if along_k else 1)
    align = align_of(data.shape[1 if along_k else 0], stride, least=8)
    operand = Operand(data, scale, codes.whole, stride, 0, scale.stride(0), scale.stride(1))
    return operand, replace(form, along_k=along_k, align=align)


def _in_bulk(form: Form, operand: Operand, rows: int, precision: str | None, target: Capabilities) -> Form:
    """Whether the tiles of an operand are copied by descriptors: where the target does that in hardware, where there
    are enough rows to make up for making one, and if its rows lie at multiples of 16 bytes."""
    data = operand.data
    assert data is not None
    lies_well = (
        form.along_k and form.align * data.itemsize >= 16 and operand.stride and data.data_ptr() % 16 == 0
    )
    # Multiply-adds of fp32 tiles that come from shared memory spill: 876 bytes, compiled for sm_90.
    multiplied = data.dtype is not torch.float32 or precision in ("tf32", "bf16x3")
    return replace(form, bulk=bool(target.descriptors and rows > FEW and lies_well and multiplied))


class _Plan(NamedTuple):
    """How a product is computed."""

    product: Product
    config: ProductConfig
    spans: int  # into which K is cut
    apart: bool  # each span by a program of its own


@functools.lru_cache(maxsize=4096)
def _planned(
    a: Form, b: Form, precision: Precision | None, m: int, n: int, k: int, gated: bool, invariant: bool,
    target: Capabilities,
) -> _Plan:  # fmt: skip
    few = m <= FEW
    product = Product.of(a, b, precision, few or invariant, target)
    config = product_config(product.kind, few, gated, target, invariant)
    spans = spans_of(n, k, config, target) if few or invariant else 1
    return _Plan(product, replace(config, tile=config.tile.fitting(n, k, gated)), spans, few and spans > 1)


def launch_matmul(o: MatmulOutputs, a: MatmulArgs) -> None:
    """Fill the outputs of a call, by the engine that is chosen for it."""
    if not o.result.y.numel():
        return
    if choose_engine(a, capabilities_of(a.a.device)) == "weft":
        _launch(o, a)
    elif not is_recording():  # then kernels are wanted, and PyTorch's product is none
        multiply_by_torch(o, a)


def _launch(o: MatmulOutputs, a: MatmulArgs) -> None:
    target, to = capabilities_of(a.a.device), a.result
    left, a_form = _of_codes(a.a_codes, a.a.dtype) if a.a_codes.data is not None else _of_plain(a.a)
    right, b_form = (
        _of_codes(a.b_codes, a.b.dtype) if a.b_codes.data is not None else _of_plain(a.b.transpose(-1, -2))
    )
    m, k, n = a.a.shape[-2], a.a.shape[-1], a.b.shape[-1] // (2 if a.gated else 1)
    if a.a_codes.format is not None:
        k = Format.of(a.a_codes.format).length(k)
    batch = a.a.shape[0] if a.a.dim() == 3 else 1
    a_form, b_form = (
        _in_bulk(form, operand, m, a.precision, target) for form, operand in ((a_form, left), (b_form, right))
    )
    plan = _planned(a_form, b_form, a.precision, m, n, k, a.gated, a.batch_invariant, target)
    tile = plan.config.tile
    f = None if to.format is None else Format.of(to.format)
    within = (
        f is not None
        and f.block in ("1x128", "mx")
        and tile.n % f.group == 0
        and not (to.columnwise or to.return_amax or to.return_plain)
    )
    y = o.result.y
    if f is not None and not to.return_plain:
        # Of a result whose codes the kernel makes itself, y's dtype alone is read.
        y = torch.empty((1,) if within else (batch * m, n), dtype=to.dtype, device=a.a.device)
    constants: dict[str, Any] = {
        "PRODUCT": plan.product,
        "TILE": tile,
        "ACT": a.activation,
        "GATED": a.gated,
        "FORMAT": f if within else None,
        "CAST": cast_mode(target),
        "INPUT_MAX": torch.finfo(to.dtype).max,
        "ALIGN": align_of(n, least=4),
    }
    partial = None
    if plan.apart:
        sums = torch.int32 if plan.product.sums == "int32" and plan.product.body == "sum" else torch.float32
        shape = (plan.spans, 2 if a.gated else 1, batch, m, n)
        partial = torch.empty(shape, dtype=sums, device=a.a.device)
    sizes = Sizes(m, n, k, span=-(-math.ceil(k / tile.k) // plan.spans))
    residual = a.residual
    if residual is not None and residual.stride(-1) != 1 and n > 1:
        residual = residual.contiguous()
    given: dict[str, Any] = {
        "a": left,
        "b": right,
        "finish": Finish(
            None if a.bias is None else a.bias.contiguous(),
            residual,
            a.alpha,
            0 if residual is None else residual.stride(-2),
            residual.stride(0) if residual is not None and residual.dim() == 3 else 0,
            a.factor,
        ),
        "y_ptr": y,
        "partial_ptr": partial,
        "copy": copy_arguments(o.result.rowwise) if within else NO_CODES,
        "sizes": sizes,
    }
    programs = batch * -(-m // tile.m) * -(-n // tile.n)
    launch = Launch.of(
        matmul_kernel,
        num_warps=plan.config.num_warps,
        num_stages=plan.config.num_stages,
        INVARIANT=plan.spans > 1 and not plan.apart,
        **constants,
    )
    launch((programs, plan.spans if plan.apart else 1, 1), *matmul_kernel.arguments(**given))
    if partial is not None:
        finish = Launch.of(finish_kernel, num_warps=4, **constants)
        finish((programs, 1, 1), *finish_kernel.arguments(**given, spans=plan.spans))
    if f is not None and not within:
        quantize_into(o.result, to, y.reshape(-1, n))
