"""Launches of products: engine dispatch, and one plan for all calls with the same layouts and options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...quant import Codes, Format
from ...runtime import BoundLaunch, Capabilities, Launch, capabilities_of, is_recording, remembered, scratch
from ..common.copies import NO_CODES, cast_mode, copy_arguments
from ..common.results import Result, ResultOptions
from ..common.rows import align_of, contiguous
from ..quantize.launch import quantize_into
from .arguments import GroupedArgs, MatmulArgs, ProductOutputs, WgradArgs
from .checks import has_slots
from .configs import FEW, product_config, spans_of
from .engines import choose_engine, choose_grouped_engine
from .kernels import finish_kernel, matmul_kernel
from .libraries import multiply, multiply_groups
from .operands import INT32_DEPTH, Form, Product

# ---- plans ----------------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """Memory layout of an operand [rows, K] or [batch, rows, K]."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # of the elements, or of the codes
    strides: tuple[int, ...]
    spec: str | None = None
    scale_strides: tuple[int, ...] = (0, 0)
    aligned: bool = False  # the data begin at a multiple of 16 bytes; asked only if descriptors may copy them

    @property
    def along_k(self) -> bool:
        return self.strides[-1] == 1 or self.shape[-1] == 1

    @property
    def integers(self) -> tuple[int, ...]:
        """The integers of the kernel's `Operand`."""
        (*batch, row, k), (*scale_batch, scale_row, scale) = self.strides, self.scale_strides
        batches = (batch[0], scale_batch[0] if scale_batch else 0) if batch else (0, 0)
        return row if self.along_k else k, batches[0], scale_row, scale, batches[1]

    def form(self, p: _Problem) -> Form:
        """Return the operand as the kernel reads it in this product."""
        itemsize = self.dtype.itemsize if self.spec is None else 1
        stride, batch_stride, *_ = self.integers
        length = self.shape[-1 if self.along_k else -2]
        align = align_of(length, stride, batch_stride, least=min(8, 16 // itemsize))
        if p.grouped == "depth" and self.along_k:
            # Groups begin only at multiples of their alignment, so two alignments suffice for any number of rows.
            align = 16 if align % 16 == 0 and p.group_align % 16 == 0 else 1
        # fp32 multiply-adds on tiles from shared memory spill: 876 bytes, compiled for sm_90.
        fits_registers = itemsize < 4 or p.precision in ("tf32", "bf16x3")
        bulk = self.aligned and self.along_k and align * itemsize >= 16 and bool(stride) and fits_registers
        return replace(Form.of(self.dtype, self.spec), along_k=self.along_k, align=align, bulk=bulk)


class _Problem(NamedTuple):
    """Sizes and options of a product."""

    batch: int
    m: int
    n: int
    k: int
    activation: str | None
    gated: bool
    precision: str | None
    residual_strides: tuple[int, int] | None  # between rows and batches; None without a residual
    invariant: bool = False
    grouped: str | None = None  # the kernel's GROUPED
    groups: int = 0
    group_align: int = 1
    scale_slots: bool = False
    gather: tuple[int, int] = (1, 0)  # the integers of the kernel's `Gather`
    gathers: bool = False


class _Plan(NamedTuple):
    """Launches of a product."""

    launch: BoundLaunch
    finish: BoundLaunch | None  # adds the spans, if each is summed by a separate program
    partial: tuple[int, ...]  # shape of the sums of the spans
    sums: torch.dtype
    quantizes: bool  # the kernel quantizes its result itself


@remembered
def _planned(
    left: _Layout, right: _Layout, p: _Problem, dtype: torch.dtype, format: str | None, copy: tuple[int, ...],
    target: Capabilities,
) -> _Plan:  # fmt: skip
    """Plan a product with results of `dtype`. `format` is that of a row-wise copy that is the only result, and `copy`
    the integers of its `StridedCodes`."""
    few = p.m <= {None: FEW, "rows": 16 * p.groups, "depth": 0}[p.grouped]
    a, b = left.form(p), right.form(p)
    if p.grouped == "rows" and not a.along_k:
        # A group may begin at any row, so contiguous rows have no known alignment.
        a = replace(a, align=1)
    if p.gathers:
        a = replace(a, bulk=False)
    product = Product.of(a, b, p.precision, few or p.invariant, target)
    follows = "residual" if p.residual_strides else "nothing" if p.activation is None else "activation"
    odd = min(a.align, b.align) == 1
    config = product_config(
        product.kind, few or p.invariant, p.gated, p.invariant, p.grouped, odd, follows, target
    )
    spans = spans_of(p.n, p.k, config, target) if p.grouped is None and (few or p.invariant) else 1
    if product.sums == "int32" and product.body == "sum" and p.k > INT32_DEPTH:
        product, spans = replace(product, deep=True), -(-p.k // INT32_DEPTH)
    tile = config.tile(p.gated, target).fitting(p.n, p.k, p.gated)
    if p.grouped == "depth":
        tile = tile.along_groups(p.group_align, p.scale_slots)
    tiles_m = -(-p.m // tile.m) + (p.groups if p.grouped == "rows" else 0)
    f = None if format is None else Format.of(format)
    quantizes = f is not None and f.block in ("1x128", "mx") and tile.n % f.group == 0
    constants: dict[str, Any] = {
        "PRODUCT": product,
        "TILE": tile,
        "ACT": p.activation,
        "GATED": p.gated,
        "GROUPED": p.grouped,
        "FORMAT": f if quantizes else None,
        "CAST": cast_mode(target),
        "INPUT_MAX": torch.finfo(dtype).max,
        "ALIGN": align_of(p.n, least=4),
    }
    integers: dict[str, Any] = {
        "a": left.integers,
        "b": right.integers,
        "finish": (right.shape[-2] if p.grouped == "rows" else 0, *(p.residual_strides or (0, 0))),
        "copy": copy if quantizes else NO_CODES[2:],
        "sizes": (p.m, p.n, p.k, INT32_DEPTH // tile.k if product.deep else -(p.k // -tile.k // spans)),
        "groups": (p.groups, p.group_align),
        "gather": p.gather,
    }
    separate_spans = few and spans > 1 and not product.deep
    launch = Launch.of(
        matmul_kernel,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        INVARIANT=spans > 1 and not separate_spans,
        **constants,
    )
    programs = p.batch * tiles_m * -(-p.n // tile.n)
    finish = None
    if separate_spans:
        finish = Launch.of(finish_kernel, num_warps=4, **constants).bind(
            (programs, 1, 1), **integers, spans=spans
        )
    return _Plan(
        launch.bind((programs, spans if separate_spans else 1, 1), **integers),
        finish,
        partial=(spans, 2 if p.gated else 1, p.batch, p.m, p.n),
        sums=torch.int32 if product.sums == "int32" and product.body == "sum" else torch.float32,
        quantizes=quantizes,
    )


# ---- launches -------------------------------------------------------------------------------------------


class _Operand(NamedTuple):
    """Tensors of an operand, and their layout."""

    tensors: tuple[Tensor, Tensor | None, Tensor | None]  # those of the kernel's `Operand`
    layout: _Layout


def _operand(x: Tensor, codes: Codes, descriptors: bool) -> _Operand:
    """Return an operand, x [rows, K] or [batch, rows, K] or its codes. x is copied if neither dimension is
    contiguous."""
    data, scale, global_scale, spec = codes
    if data is None:
        row_stride, k_stride = x.stride()[-2:]
        if k_stride != 1 and row_stride != 1 and x.shape[-1] > 1 and x.shape[-2] > 1:
            x = contiguous(x)
        aligned = descriptors and x.data_ptr() % 16 == 0
        return _Operand((x, None, None), _Layout(x.dtype, x.shape, x.stride(), aligned=aligned))
    aligned = descriptors and data.data_ptr() % 16 == 0
    layout = _Layout(x.dtype, data.shape, data.stride(), spec, scale.stride(), aligned)
    return _Operand((data, scale, global_scale), layout)


def _uses_descriptors(m: int, target: Capabilities) -> bool:
    """Return whether descriptors may copy operands. They pay off on targets that copy by them in hardware, and with
    enough rows to amortize building one."""
    return target.descriptors and m > FEW


def launch_matmul(o: ProductOutputs, a: MatmulArgs) -> None:
    """Fill the outputs of a call with the engine chosen for it."""
    if not o.result.y.numel():
        return
    left, right, target = a.a, a.b, capabilities_of(a.a.device)
    engine = choose_engine(a, target)
    if engine != "weft":
        if not is_recording():  # recording collects kernels, which other engines do not launch
            multiply(engine, o, a, target.target)
        return
    *batch, m, k = left.shape
    if a.a_codes.format is not None:
        k = Format.of(a.a_codes.format).length(k)
    n = right.shape[-1] // (2 if a.gated else 1)
    residual, residual_strides = a.residual, None
    if residual is not None:
        if residual.stride(-1) != 1 and n > 1:
            residual = contiguous(residual)
        residual_strides = residual.stride(-2), residual.stride(0) if residual.dim() == 3 else 0
    bias = contiguous(a.bias)
    descriptors = _uses_descriptors(m, target)
    _launch(
        o.result,
        a.result,
        _operand(left, a.a_codes, descriptors),
        _operand(right.transpose(-1, -2), a.b_codes, descriptors),
        _Problem(
            batch[0] if batch else 1, m, n, k, a.activation, a.gated, a.precision, residual_strides, a.batch_invariant
        ),
        target,
        finish=(bias, residual, a.alpha, a.factor),
    )  # fmt: skip


def launch_grouped(o: ProductOutputs, a: GroupedArgs) -> None:
    """Fill the outputs of a grouped product with the engine chosen for it."""
    target = capabilities_of(a.x.device)
    if not o.result.y.numel() or _ran_elsewhere(o, a, target):
        return
    groups, n, k = a.w.shape
    rows, slot_of_row, gather = a.x.shape[0], a.slot_of_row, (1, 0)
    if slot_of_row is not None:
        rows, slot_of_row, gather = slot_of_row.shape[0], contiguous(slot_of_row), (a.slots, rows)
    descriptors = _uses_descriptors(rows, target)
    _launch(
        o.result,
        a.result,
        _operand(a.x, a.x_codes, descriptors),
        _operand(a.w, a.w_codes, descriptors),
        _Problem(
            1, rows, n // 2 if a.gated else n, k, a.activation, a.gated, a.precision, None, grouped="rows",
            groups=groups, group_align=a.align, gather=gather, gathers=slot_of_row is not None,
        ),
        target,
        finish=(contiguous(a.bias), None, None, 1.0),
        ends=contiguous(a.ends),
        slot_of_row=slot_of_row,
    )  # fmt: skip


def launch_wgrad(o: ProductOutputs, a: WgradArgs) -> None:
    """Fill the groups' weight gradients with the engine chosen for them."""
    target = capabilities_of(a.x.device)
    if not o.result.y.numel() or _ran_elsewhere(o, a, target):
        return
    groups, (rows, n), k = a.ends.shape[0], a.dy.shape, a.x.shape[1]
    addend = contiguous(a.addend)
    slots = any(has_slots(codes, rows, groups) for codes in (a.dy_codes, a.x_codes))
    descriptors = _uses_descriptors(n, target)
    _launch(
        o.result,
        a.result,
        _operand(a.dy.t(), a.dy_codes, descriptors),
        _operand(a.x.t(), a.x_codes, descriptors),
        _Problem(
            groups, n, k, rows, None, False, a.precision, None if addend is None else (k, n * k), grouped="depth",
            groups=groups, group_align=a.align, scale_slots=slots,
        ),
        target,
        finish=(None, addend, None, 1.0),
        ends=contiguous(a.ends),
    )  # fmt: skip


def _ran_elsewhere(o: ProductOutputs, a: GroupedArgs | WgradArgs, target: Capabilities) -> bool:
    """Run a grouped product on another engine if one is chosen; return whether one was."""
    engine = choose_grouped_engine(a, target)
    if engine != "weft" and not is_recording():
        multiply_groups(engine, o, a)
    return engine != "weft"


def _launch(
    result: Result,
    options: ResultOptions,
    a: _Operand,
    b: _Operand,
    p: _Problem,
    target: Capabilities,
    *,
    finish: tuple[Tensor | None, Tensor | None, Tensor | None, float],
    ends: Tensor | None = None,
    slot_of_row: Tensor | None = None,
) -> None:
    y, format, copy = result.y, None, NO_CODES
    if options.format is not None and not (options.columnwise or options.return_amax or options.return_plain):
        format, copy = options.format, copy_arguments(result.copies(options.format)[0])
    plan = _planned(a.layout, b.layout, p, options.dtype, format, copy[2:], target)
    if options.format is not None and not options.return_plain:
        # If the kernel stores the codes itself, only y's dtype is used.
        y = scratch((1,) if plan.quantizes else (p.batch * p.m, p.n), options.dtype, y.device)
    partial = None
    if plan.finish is not None:
        partial = scratch(plan.partial, plan.sums, y.device)
    tensors: dict[str, Any] = {
        "a": a.tensors,
        "b": b.tensors,
        "finish": finish,
        "y_ptr": y,
        "partial_ptr": partial,
        "copy": copy[:2] if plan.quantizes else None,
        "groups": ends,
        "gather": slot_of_row,
    }
    plan.launch(*matmul_kernel.tensors(**tensors))
    if plan.finish is not None:
        plan.finish(*finish_kernel.tensors(**tensors))
    if options.format is not None and not plan.quantizes:
        quantize_into(result, options, y.reshape(-1, p.n))
