"""Launches of products: operand layouts, tile choice, and engine dispatch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...quant import Codes, Format
from ...runtime import Capabilities, Launch, capabilities_of, is_recording, remembered
from ..common.copies import NO_CODES, cast_mode, copy_arguments
from ..common.groups import NO_ENDS, GroupEnds
from ..common.results import Result, ResultOptions
from ..common.rows import align_of
from ..quantize.launch import quantize_into
from .arguments import GroupedArgs, MatmulArgs, ProductOutputs, WgradArgs
from .checks import has_slots
from .configs import FEW, product_config, spans_of
from .engines import choose_engine, choose_grouped_engine
from .kernels import Finish, Gather, Operand, Sizes, finish_kernel, matmul_kernel
from .libraries import multiply, multiply_groups
from .operands import INT32_DEPTH, Form, Product

NO_GATHER = Gather(None, 1, 0)


class _Layout(NamedTuple):
    """Memory layout of an operand, a cheap cache key from which its `Form` is built."""

    dtype: torch.dtype
    spec: str | None
    along_k: bool
    align: int
    bulk: bool = False

    def form(self) -> Form:
        form = Form.of(self.dtype, self.spec)
        return replace(form, along_k=self.along_k, align=self.align, bulk=self.bulk)


def _plain_operand(x: Tensor) -> tuple[Operand, _Layout]:
    """Return an unquantized operand [rows, K] or [batch, rows, K]; copied if neither dimension is contiguous."""
    *batch, rows, k = x.shape
    *strides, row_stride, k_stride = x.stride()
    if k_stride != 1 and row_stride != 1 and k > 1 and rows > 1:
        x = x.contiguous()
        *strides, row_stride, k_stride = x.stride()
    along_k = k_stride == 1 or k == 1
    stride = row_stride if along_k else k_stride
    batch_stride = strides[0] if batch else 0
    align = align_of(k if along_k else rows, stride, batch_stride, least=min(8, 16 // x.itemsize))
    return Operand(x, None, None, stride, batch_stride, 0, 0, 0), _Layout(x.dtype, None, along_k, align)


def _quantized_operand(codes: Codes, dtype: torch.dtype) -> tuple[Operand, _Layout]:
    data, scale, global_scale, spec = codes
    *batch, rows, k = data.shape
    *strides, row_stride, k_stride = data.stride()
    *scale_strides, scale_row_stride, scale_stride = scale.stride()
    along_k = k_stride == 1 or k == 1
    stride = row_stride if along_k else k_stride
    batch_stride, scale_batch_stride = (strides[0], scale_strides[0]) if batch else (0, 0)
    align = align_of(k if along_k else rows, stride, batch_stride, least=8)
    operand = Operand(
        data, scale, global_scale, stride, batch_stride, scale_row_stride, scale_stride, scale_batch_stride
    )
    return operand, _Layout(dtype, spec, along_k, align)


def _operand(x: Tensor, codes: Codes) -> tuple[Operand, _Layout]:
    return _plain_operand(x) if codes.data is None else _quantized_operand(codes, x.dtype)


def _allows_descriptors(layout: _Layout, operand: Operand, precision: str | None) -> bool:
    """Return whether descriptors can copy an operand's tiles, which takes 16-byte aligned rows."""
    data = operand.data
    assert data is not None
    aligned = layout.along_k and layout.align * data.itemsize >= 16 and operand.stride
    # fp32 multiply-adds on tiles from shared memory spill: 876 bytes, compiled for sm_90.
    fits_registers = data.dtype is not torch.float32 or precision in ("tf32", "bf16x3")
    return bool(aligned and fits_registers and data.data_ptr() % 16 == 0)


class _ResultKey(NamedTuple):
    """Properties of the result that decide how the kernel stores it."""

    dtype: torch.dtype
    format: str | None
    rowwise_only: bool  # only the row-wise copy is requested


class _Shape(NamedTuple):
    """Sizes of a product, and everything its tile depends on besides operands and target."""

    batch: int
    m: int
    n: int
    k: int
    gated: bool = False
    invariant: bool = False
    grouped: str | None = None  # the kernel's GROUPED
    groups: int = 0
    align: int = 1
    scale_slots: bool = False
    adds: bool = False  # a residual is added


class _Plan(NamedTuple):
    """Launches of a product, shared by all calls with the same operand layouts."""

    launch: Launch
    finish: Launch | None  # adds the spans, if each is summed by a separate program
    programs: int
    spans: int  # number of spans of K
    span: int  # steps per span
    sums: torch.dtype
    quantizes: bool  # the kernel quantizes its result itself


@remembered
def _planned(
    a: _Layout, b: _Layout, shape: _Shape, activation: str | None, precision: str | None, result: _ResultKey,
    target: Capabilities,
) -> _Plan:  # fmt: skip
    batch, m, n, k, gated, invariant, grouped, *_ = shape
    few = m <= {None: FEW, "rows": 16 * shape.groups, "depth": 0}[grouped]
    product = Product.of(a.form(), b.form(), precision, few or invariant, target)
    follows = "residual" if shape.adds else "nothing" if activation is None else "activation"
    odd = min(a.align, b.align) == 1
    config = product_config(product.kind, few or invariant, gated, invariant, grouped, odd, follows, target)
    spans = spans_of(n, k, config, target) if grouped is None and (few or invariant) else 1
    if product.sums == "int32" and product.body == "sum" and k > INT32_DEPTH:
        product, spans = replace(product, deep=True), -(-k // INT32_DEPTH)
    tile = config.tile(gated, target).fitting(n, k, gated)
    if grouped == "depth":
        tile = tile.along_groups(shape.align, shape.scale_slots)
    tiles_m = -(-m // tile.m) + (shape.groups if grouped == "rows" else 0)
    f = None if result.format is None else Format.of(result.format)
    quantizes = f is not None and result.rowwise_only and f.block in ("1x128", "mx") and tile.n % f.group == 0
    constants: dict[str, Any] = {
        "PRODUCT": product,
        "TILE": tile,
        "ACT": activation,
        "GATED": gated,
        "GROUPED": grouped,
        "FORMAT": f if quantizes else None,
        "CAST": cast_mode(target),
        "INPUT_MAX": torch.finfo(result.dtype).max,
        "ALIGN": align_of(n, least=4),
    }
    separate_spans = few and spans > 1 and not product.deep
    launch = Launch.of(
        matmul_kernel,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        INVARIANT=spans > 1 and not separate_spans,
        **constants,
    )
    return _Plan(
        launch,
        Launch.of(finish_kernel, num_warps=4, **constants) if separate_spans else None,
        programs=batch * tiles_m * -(-n // tile.n),
        spans=spans,
        span=INT32_DEPTH // tile.k if product.deep else -(k // -tile.k // spans),
        sums=torch.int32 if product.sums == "int32" and product.body == "sum" else torch.float32,
        quantizes=quantizes,
    )


class _Call(NamedTuple):
    """Arguments of one launch."""

    a: tuple[Operand, _Layout]
    b: tuple[Operand, _Layout]
    shape: _Shape
    finish: Finish
    activation: str | None
    precision: str | None
    result: ResultOptions
    groups: GroupEnds = NO_ENDS
    gather: Gather = NO_GATHER


def launch_matmul(o: ProductOutputs, a: MatmulArgs) -> None:
    """Fill the outputs of a call with the engine chosen for it."""
    if not o.result.y.numel():
        return
    target = capabilities_of(a.a.device)
    engine = choose_engine(a, target)
    if engine != "weft":
        if not is_recording():  # recording collects kernels, which other engines do not launch
            multiply(engine, o, a, target.target)
        return
    k = a.a.shape[-1]
    if a.a_codes.format is not None:
        k = Format.of(a.a_codes.format).length(k)
    batch = a.a.shape[0] if a.a.dim() == 3 else 1
    n = a.b.shape[-1] // (2 if a.gated else 1)
    residual = a.residual
    if residual is not None and residual.stride(-1) != 1 and n > 1:
        residual = residual.contiguous()
    finish = Finish(
        None if a.bias is None else a.bias.contiguous(),
        residual,
        a.alpha,
        0,
        0 if residual is None else residual.stride(-2),
        residual.stride(0) if residual is not None and residual.dim() == 3 else 0,
        a.factor,
    )
    _launch(
        o.result,
        _Call(
            _operand(a.a, a.a_codes),
            _operand(a.b.transpose(-1, -2), a.b_codes),
            _Shape(batch, a.a.shape[-2], n, k, a.gated, a.batch_invariant, adds=residual is not None),
            finish,
            a.activation,
            a.precision,
            a.result,
        ),
    )


def launch_grouped(o: ProductOutputs, a: GroupedArgs) -> None:
    """Fill the outputs of a grouped product with the engine chosen for it."""
    if not o.result.y.numel() or _ran_elsewhere(o, a):
        return
    groups, n, k = a.w.shape
    n //= 2 if a.gated else 1
    rows = a.x.shape[0] if a.slot_of_row is None else a.slot_of_row.shape[0]
    left, layout = _operand(a.x, a.x_codes)
    if not layout.along_k:
        # A group may begin at any row, so contiguous rows have no known alignment.
        layout = layout._replace(align=1)
    gather = NO_GATHER
    if a.slot_of_row is not None:
        gather = Gather(a.slot_of_row.contiguous(), a.slots, a.x.shape[0])
    bias = None if a.bias is None else a.bias.contiguous()
    finish = Finish(bias, None, None, a.w.shape[1], 0, 0, 1.0)
    _launch(
        o.result,
        _Call(
            (left, layout),
            _operand(a.w, a.w_codes),
            _Shape(1, rows, n, k, a.gated, grouped="rows", groups=groups, align=a.align),
            finish,
            a.activation,
            a.precision,
            a.result,
            GroupEnds(a.ends.contiguous(), groups, a.align),
            gather,
        ),
    )


def launch_wgrad(o: ProductOutputs, a: WgradArgs) -> None:
    """Fill the groups' weight gradients with the engine chosen for them."""
    if not o.result.y.numel() or _ran_elsewhere(o, a):
        return
    groups, (rows, n), k = a.ends.shape[0], a.dy.shape, a.x.shape[1]
    operands = [_operand(a.dy.t(), a.dy_codes), _operand(a.x.t(), a.x_codes)]
    for i, (operand, layout) in enumerate(operands):
        if layout.along_k:
            # Groups begin only at multiples of `align`, so two alignments suffice for any number of rows.
            aligned = layout.align % 16 == 0 and a.align % 16 == 0
            operands[i] = operand, layout._replace(align=16 if aligned else 1)
    addend = None if a.addend is None else a.addend.contiguous()
    finish = Finish(None, addend, None, 0, 0 if addend is None else k, 0 if addend is None else n * k, 1.0)
    slots = any(has_slots(codes, rows, groups) for codes in (a.dy_codes, a.x_codes))
    _launch(
        o.result,
        _Call(
            operands[0],
            operands[1],
            _Shape(groups, n, k, rows, grouped="depth", groups=groups, align=a.align, scale_slots=slots),
            finish,
            None,
            a.precision,
            a.result,
            GroupEnds(a.ends.contiguous(), groups, a.align),
        ),
    )


def _ran_elsewhere(o: ProductOutputs, a: GroupedArgs | WgradArgs) -> bool:
    """Run a grouped product on another engine if one is chosen; return whether one was."""
    engine = choose_grouped_engine(a, capabilities_of(o.result.y.device))
    if engine != "weft" and not is_recording():
        multiply_groups(engine, o, a)
    return engine != "weft"


def _launch(result: Result, call: _Call) -> None:
    (left, a), (right, b), shape, options = call.a, call.b, call.shape, call.result
    y, device = result.y, result.y.device
    target = capabilities_of(device)
    batch, m, n, k = shape[:4]
    # Descriptors pay off on targets that copy by them in hardware, and with enough rows to amortize building one.
    if target.descriptors and m > FEW:
        b = b._replace(bulk=_allows_descriptors(b, right, call.precision))
        if call.gather.slot_of_row is None:
            a = a._replace(bulk=_allows_descriptors(a, left, call.precision))
    rowwise_only = not (options.columnwise or options.return_amax or options.return_plain)
    result_key = _ResultKey(options.dtype, options.format, rowwise_only)
    plan = _planned(a, b, shape, call.activation, call.precision, result_key, target)
    if options.format is not None and not options.return_plain:
        # If the kernel stores the codes itself, only y's dtype is used.
        y = torch.empty((1,) if plan.quantizes else (batch * m, n), dtype=options.dtype, device=device)
    partial = None
    if plan.finish is not None:
        partial_shape = (plan.spans, 2 if shape.gated else 1, batch, m, n)
        partial = torch.empty(partial_shape, dtype=plan.sums, device=device)
    arguments: dict[str, Any] = {
        "a": left,
        "b": right,
        "finish": call.finish,
        "y_ptr": y,
        "partial_ptr": partial,
        "copy": copy_arguments(result.copies(options.format)[0]) if plan.quantizes else NO_CODES,
        "sizes": Sizes(m, n, k, plan.span),
        "groups": call.groups,
        "gather": call.gather,
    }
    spans = 1 if plan.finish is None else plan.spans
    plan.launch((plan.programs, spans, 1), *matmul_kernel.arguments(**arguments))
    if plan.finish is not None:
        plan.finish((plan.programs, 1, 1), *finish_kernel.arguments(**arguments, spans=plan.spans))
    if options.format is not None and not plan.quantizes:
        quantize_into(result, options, y.reshape(-1, n))
