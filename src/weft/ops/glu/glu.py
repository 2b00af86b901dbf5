"""Gated linear units: the activation of a gate times a value, weighted by the router, quantised, forward and backward.

    a = min(gate, limit)          b = clamp(up, -limit, limit)            without a limit: gate and up themselves
    y = f(a) * (b + up_offset) * prob                                     out = round(y), or its codes and scales

    silu       f = a * s(alpha a)      s(z) = 1 / (1 + exp(-z))              f' = s (1 + alpha a (1 - s))
    gelu       f = a * Phi(a)          Phi(a) = erfc(-a / sqrt 2) / 2        f' = Phi + a exp(-a^2 / 2) / sqrt(2 pi)
    gelu_tanh  f = a * s(2 u)          u = sqrt(2 / pi) (a + 0.044715 a^3)   f' = s + 2 a u' s (1 - s)
    relu       f = max(a, 0)           sigmoid  f = s(alpha a)               relu2  f = max(a, 0)^2

All of it in fp32 with one rounding to each stored tensor; a quantised result is made from the fp32 y. Backward, with
dy the gradient of y:

    dgate = dy * prob * (b + up_offset) * f'(a), 0 where gate > limit
    dup = dy * prob * f(a), 0 where |up| > limit
    dprob = sum over the row of dy * f(a) * (b + up_offset)

The quantised gradient is made from the fp32 dgate and dup as well. Everything is computed again from the inputs: they
alone are kept for the backward. Rows that belong to no group (`weft.ops.groups`) are never read; their results,
gradients and codes are zero. Sums over a row are added up in a fixed order: the same bits every run.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ...quant import Copy, Format, QTensor
from ...quant.copies import empty_scale
from ...quant.flat import allocate_flat, count_copies, quantize_flat, split_copies
from ...quant.qtensor import stand_in
from ...quant.reference import amax_reference, nvfp4_global_reference
from ...quant.straight import wrap
from ...runtime import Launch, Sharding, capabilities_of, define_flat_op, is_distributed
from ..common.checks import FLOATS, INTEGERS, check_input, check_tensor, real, whole
from ..common.copies import (
    STRIPE,
    Codes,
    blocks_over_rows,
    cast_mode,
    check_quantize,
    copies_and_amax,
    copy_arguments,
    count_stripes,
    reduce_amax,
)
from ..common.groups import GroupEnds, count_slots, real_rows_reference, slot_rows_reference
from ..common.results import Result, ResultOptions
from ..common.rows import (
    align_of,
    compute_dtype,
    count_rows,
    cpu_tile,
    row_strides,
)
from ..quantize import quantize_into
from .kernels import Rows, UpCodes, glu_backward_kernel, glu_kernel

Act = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid"]

# ---- reference ------------------------------------------------------------------------------------------


def _hidden(x: Tensor, layout: str) -> int:
    """Columns of y."""
    cols = x.shape[-1]
    return cols // 2 if layout in ("concat", "interleaved") else cols


def _parts(x: Tensor, up: Tensor | None, layout: str, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """gate and up as [M, H] in dtype; no up if nothing is gated."""
    flat = x.reshape(count_rows(x), x.shape[-1]).to(dtype)
    if layout == "concat":
        hidden = flat.shape[1] // 2
        return flat[:, :hidden], flat[:, hidden:]
    if layout == "interleaved":
        return flat[:, 0::2], flat[:, 1::2]
    return flat, None if up is None else up.reshape(flat.shape).to(dtype)


def _activated(a: Tensor, act: str, alpha: float) -> tuple[Tensor, Tensor]:
    """(f(a), f'(a)); gelu in fp64, the others in the order of operations that the kernels have."""
    if act in ("silu", "sigmoid"):
        s = torch.sigmoid(alpha * a)
        if act == "silu":
            return a * s, s * (1.0 + alpha * a * (1.0 - s))
        return s, alpha * s * torch.sigmoid(-alpha * a)
    if act == "gelu":
        # In fp32 the rounding of erfc's argument alone would be an error of 1e-5 at a = -13.
        wide = a.double()
        cdf = 0.5 * torch.special.erfc(-math.sqrt(0.5) * wide)
        slope = cdf + wide * torch.exp(-0.5 * wide * wide) / math.sqrt(2 * math.pi)
        return (wide * cdf).to(a.dtype), slope.to(a.dtype)
    if act == "gelu_tanh":
        twice = 2 * math.sqrt(2 / math.pi)
        s = torch.sigmoid(twice * a * (1.0 + 0.044715 * a * a))
        steep = s * (1.0 - s)
        bend = twice * a * steep * (1.0 + 3 * 0.044715 * a * a)
        return a * s, s + torch.where(steep == 0, 0.0, bend)
    positive = torch.where(a <= 0, 0.0, a)
    if act == "relu":
        return positive, (a > 0).to(a.dtype)
    return positive * positive, 2.0 * positive


def glu_reference(
    x: Tensor, up: Tensor | None, prob: Tensor | None, ends: Tensor | None, act: str, layout: str,
    limit: float | None, alpha: float, up_offset: float, align: int, out_dtype: torch.dtype, format: str | None,
    rowwise: bool, columnwise: bool, quant_scale: Tensor | None, return_amax: bool, grad_format: str | None,
    grad_rowwise: bool, grad_columnwise: bool,
) -> list[Tensor]:  # fmt: skip
    """The definition. x [..., 2H], or x and up [..., H]; prob [M]; ends [groups]."""
    gate, value = _parts(x, up, layout, compute_dtype(x))
    if limit is not None:
        gate = torch.where(gate > limit, limit, gate)
        value = value if value is None else torch.where(value.abs() > limit, value.sign() * limit, value)
    y, _ = _activated(gate, act, alpha)
    if value is not None:
        y = y * (value + up_offset)
    if prob is not None:
        y = y * prob.to(y.dtype)[:, None]
    if ends is not None:
        y = torch.where(real_rows_reference(ends, len(y), align)[:, None], y, 0.0)
    shape = (*x.shape[:-1], y.shape[1])
    if format is None:
        return [y.to(out_dtype).view(shape)]
    f = Format.of(format)
    largest = amax_reference(y) if f.needs_tensor_amax or return_amax else None
    outputs = [stand_in(x[..., : shape[-1]])]
    outputs += _copies_reference(
        y.float(), f, rowwise, columnwise, ends, align, tensor_amax=largest, scale=quant_scale
    )
    if f.block == "nvfp4":
        assert largest is not None
        outputs.append(nvfp4_global_reference(largest, f))
    if return_amax:
        assert largest is not None
        outputs.append(largest)
    return outputs


def _copies_reference(
    y: Tensor,
    format: Format,
    rowwise: bool,
    columnwise: bool,
    ends: Tensor | None,
    align: int,
    **options: Any,
) -> list[Tensor]:
    """The copies of y [M, K]; blocks along M never mix groups."""
    options["input_dtype"] = torch.float32
    if not (columnwise and _begins_anew(ends, align)):
        return quantize_flat(y, format, rowwise=rowwise, columnwise=columnwise, **options)
    assert ends is not None
    rows, cols = y.shape
    slot = slot_rows_reference(ends, rows, align, STRIPE)
    spread = y.new_zeros(count_slots(rows, ends.numel(), STRIPE) * STRIPE, cols)
    used = torch.zeros(len(spread), dtype=torch.bool, device=y.device)
    spread[slot], used[slot] = y, True
    parts = quantize_flat(y, format, rowwise=rowwise, columnwise=True, **options)
    data, scale = quantize_flat(spread, format, rowwise=False, columnwise=True, **options)
    codes = data.view(torch.uint8)
    if format.packed == 2:
        codes = torch.stack([codes & 0xF, codes >> 4], -1).flatten(1)
    codes = codes[:, slot]
    if format.packed == 2:
        codes = torch.nn.functional.pad(codes, (0, rows % 2))
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    parts[-2].view(torch.uint8).copy_(codes)
    # Blocks without rows have the scale zero.
    empty = ~used.view(-1, format.group).any(1)
    (scale if scale.element_size() > 1 else scale.view(torch.uint8))[:, empty] = 0
    parts[-1] = scale
    return parts


def glu_backward_reference(
    x: Tensor, up: Tensor | None, prob: Tensor | None, ends: Tensor | None, dy: Tensor, act: str, layout: str,
    limit: float | None, alpha: float, up_offset: float, align: int, needs: list[bool], format: str | None,
    rowwise: bool, columnwise: bool,
) -> list[Tensor]:  # fmt: skip
    """Of dx, dup and dprob those that are needed; dx and dup as their copies if there is a format."""
    gate, value = _parts(x, up, layout, compute_dtype(x))
    d = dy.reshape(gate.shape).to(gate.dtype)
    if ends is not None:
        real = real_rows_reference(ends, len(gate), align)[:, None]
        gate, d = torch.where(real, gate, 0.0), torch.where(real, d, 0.0)
        value = value if value is None else torch.where(real, value, 0.0)
        prob = prob if prob is None else torch.where(real[:, 0], prob, 0.0)
    a, b = gate, value
    if limit is not None:
        a = torch.where(a > limit, limit, a)
        b = b if b is None else torch.where(b.abs() > limit, b.sign() * limit, b)
    f, slope = _activated(a, act, alpha)
    g = torch.ones_like(f) if b is None else b + up_offset
    w = d if prob is None else d * prob.to(d.dtype)[:, None]
    dgate, dvalue = w * g * slope, w * f
    if limit is not None:
        dgate = torch.where(gate > limit, 0.0, dgate)
        dvalue = dvalue if value is None else torch.where(value.abs() > limit, 0.0, dvalue)
    if ends is not None:
        dgate, dvalue = torch.where(real, dgate, 0.0), torch.where(real, dvalue, 0.0)
    if layout == "concat":
        gradients = [torch.cat([dgate, dvalue], 1)]
    elif layout == "interleaved":
        gradients = [torch.stack([dgate, dvalue], -1).flatten(1)]
    else:
        gradients = [dgate, dvalue]
    outputs: list[Tensor] = []
    for like, gradient, need in zip((x, up), gradients, needs, strict=False):
        if need and like is not None:
            if format is None:
                outputs.append(gradient.to(like.dtype).view(like.shape))
            else:
                outputs += _quantized_reference(gradient.float(), format, rowwise, columnwise, ends, align)
    if needs[2]:
        assert prob is not None
        outputs.append((d * (f * g)).sum(1).to(prob.dtype))
    return outputs


def _quantized_reference(
    y: Tensor, format: str, rowwise: bool, columnwise: bool, ends: Tensor | None, align: int
) -> list[Tensor]:
    f = Format.of(format)
    largest = amax_reference(y)
    parts = _copies_reference(y, f, rowwise, columnwise, ends, align, tensor_amax=largest)
    return [*parts, nvfp4_global_reference(largest, f)] if f.block == "nvfp4" else parts


# ---- launch ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GluConfig:
    """How a tensor is cut: `rows` rows and `tile` columns of y at a time."""

    rows: int
    tile: int
    num_warps: int

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def choose(cols: int, smallest_tile: int, backward: bool, align: int, target: str) -> GluConfig:
        if target == "cpu":
            return GluConfig(1, cpu_tile(cols, max(smallest_tile, 64)), 4)
        tile = min(max(1 << max(cols - 1, 0).bit_length(), 128), 1024)
        # Where an access has one element, its address is longer than it.
        numbers = 4096 // (2 if backward else 1) // (4 if align == 1 else 1)
        return GluConfig(max(1, numbers // tile), tile, 4)

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def choose_stripe(
        block: str, rowwise: bool, backward: bool, interleaved: bool, align: int, target: str
    ) -> GluConfig:
        narrow = block in ("mx", "nvfp4", "tensor") or (block == "1x128" and not rowwise)
        tile = 64 if narrow else 128
        warps = 16
        if target == "cpu":
            tile = 128
        elif target.startswith("gfx"):
            warps = tile * STRIPE // 16 // 64
        elif (backward and tile == 128) or align == 1:
            # Compiled for both copies of a gradient at 1x128: 255 registers, none spilled on sm_90 (with 16 warps 128
            # and 376 to 612 bytes), up to 24 bytes on sm_100 and sm_120, and 312 on sm_80 and sm_89, which encode by
            # integers.
            warps = 8
        # Interleaved gradients are twice as wide as gate or up.
        return GluConfig(STRIPE, tile // 2 if backward and interleaved else tile, warps)


def _begins_anew(ends: Tensor | None, align: int) -> bool:
    """Whether blocks of rows begin anew with every group, rather than where they would without groups."""
    return ends is not None and align % STRIPE != 0


def _places(ends: Tensor | None, align: int, format: Format | None, stripes: bool) -> str:
    if not stripes or ends is None or format is None:
        return "rows"
    if not _begins_anew(ends, align):
        return "stripes"
    return "slots" if format.group else "rows"


def _allocate_copies(
    format: Format, rows: int, cols: int, device: torch.device, rowwise: bool, columnwise: bool, ends: Tensor | None,
    align: int,
) -> list[Tensor]:  # fmt: skip
    outputs = allocate_flat(format, rows, cols, device, rowwise=rowwise, columnwise=columnwise)
    if columnwise and format.group and _begins_anew(ends, align):
        assert ends is not None
        slots = count_slots(rows, ends.numel(), STRIPE)
        scale = empty_scale(format, cols, slots * STRIPE, device)
        (scale if scale.element_size() > 1 else scale.view(torch.uint8)).zero_()
        outputs[2 * (rowwise + columnwise) - 1] = scale
    return outputs


def _allocate_glu(
    x: Tensor, up: Tensor | None, prob: Tensor | None, ends: Tensor | None, act: str, layout: str,
    limit: float | None, alpha: float, up_offset: float, align: int, out_dtype: torch.dtype, format: str | None,
    rowwise: bool, columnwise: bool, quant_scale: Tensor | None, return_amax: bool, grad_format: str | None,
    grad_rowwise: bool, grad_columnwise: bool,
) -> list[Tensor]:  # fmt: skip
    hidden = _hidden(x, layout)
    if format is None:
        return [torch.empty((*x.shape[:-1], hidden), dtype=out_dtype, device=x.device)]
    outputs = [stand_in(x[..., :hidden])]
    outputs += _allocate_copies(
        Format.of(format), count_rows(x), hidden, x.device, rowwise, columnwise, ends, align
    )
    if return_amax:
        outputs.append(torch.empty((), dtype=torch.float32, device=x.device))
    return outputs


def _inputs(
    x: Tensor, up: Tensor | None, layout: str, hidden: int
) -> tuple[Tensor, Tensor | None, tuple[int, int, int, int, int, int]]:
    """gate and up as kernels take them, and (up_shift, inner, strides of gate, strides of up)."""
    x, inner, outer_stride, inner_stride = row_strides(x)
    if layout == "concat":
        return x, x, (hidden, inner, outer_stride, inner_stride, outer_stride, inner_stride)
    if up is None:
        return x, None, (0, inner, outer_stride, inner_stride, 0, 0)
    up, up_inner, up_outer_stride, up_inner_stride = row_strides(up)
    if inner != up_inner:  # two ways to nest rows: both are straightened
        x, inner, outer_stride, inner_stride = row_strides(x.contiguous())
        up, _, up_outer_stride, up_inner_stride = row_strides(up.contiguous())
    return x, up, (0, inner, outer_stride, inner_stride, up_outer_stride, up_inner_stride)


def _launch_glu(
    outputs: list[Tensor], x: Tensor, up: Tensor | None, prob: Tensor | None, ends: Tensor | None, act: str,
    layout: str, limit: float | None, alpha: float, up_offset: float, align: int, out_dtype: torch.dtype,
    format: str | None, rowwise: bool, columnwise: bool, quant_scale: Tensor | None, return_amax: bool,
    grad_format: str | None, grad_rowwise: bool, grad_columnwise: bool,
) -> None:  # fmt: skip
    hidden = _hidden(x, layout)
    rows = x.numel() // x.shape[-1]
    target = capabilities_of(x.device)
    gate, up, places = _inputs(x, up, layout, hidden)
    prob_stride = 0 if prob is None else prob.stride(0)
    groups = 0
    if ends is not None:
        ends, groups = ends.contiguous(), ends.numel()
    strides = (*places[2:], hidden, places[0])
    multiple = align_of(*strides)
    floats = (alpha, 0.0 if limit is None else limit, up_offset)

    def run(
        config: GluConfig, f: Format | None, stripes: bool, row_programs: int, given: Tensor | None,
        pointers: tuple[Tensor | None, ...], more: tuple[int, ...],
    ) -> None:  # fmt: skip
        once = target.target != "cpu" and (f is None or f.block != "row")
        where = _places(ends, align, f, stripes)
        _glu_launch(
            act, layout == "interleaved", limit is not None, f, cast_mode(target), quant_scale is not None, stripes,
            where, config, once, places[1] > 1, multiple, hidden % config.tile != 0,
        )(
            (_blocks(rows, hidden, groups, config, stripes, where) * row_programs, 1, 1),
            *glu_kernel.arguments(
                rows=rows,
                cols=hidden,
                up_shift=places[0],
                inner=places[1],
                gate=Rows(gate, *places[2:4]),
                up=Rows(up, *places[4:6]),
                prob_ptr=prob,
                prob_stride=prob_stride,
                groups=GroupEnds(ends, groups, align),
                given_ptr=given,
                y_ptr=pointers[0],
                amax_ptr=pointers[1],
                row_programs=row_programs,
                copy=Codes(*pointers[2:4], *more[:3]),
                copy_t=Codes(*pointers[4:6], *more[3:]),
                alpha=floats[0],
                limit=floats[1],
                up_offset=floats[2],
            ),
        )  # fmt: skip

    no_copies = (None, None, None, None)
    no_strides = (0, 0, 0, 0, 0, 0)
    if format is None:
        config = GluConfig.choose(hidden, 1, False, multiple, target.target)
        parts = 1 if target.target == "cpu" else -(-hidden // config.tile)
        run(config, None, False, parts, None, (outputs[0], None, *no_copies), no_strides)
        return

    f = Format.of(format)
    row_copy, col_copy = split_copies(f, outputs[1:], rowwise=rowwise, columnwise=columnwise)
    count = count_copies(f, rowwise=rowwise, columnwise=columnwise)
    amax_out = outputs[1 + count] if return_amax else None
    given = quant_scale
    scales = [copy.scale for copy in (row_copy, col_copy) if copy is not None]
    if quant_scale is not None:
        for copied in scales:
            copied.copy_(quant_scale.reshape(1, 1))
    elif f.needs_tensor_amax:  # the whole tensor's amax comes first: a pass that stores nothing else
        config = GluConfig.choose(hidden, 1, False, multiple, target.target)
        parts = 1 if target.target == "cpu" else -(-hidden // config.tile)
        found = torch.empty(-(-rows // config.rows) * parts, dtype=torch.float32, device=x.device)
        run(config, None, False, parts, None, (None, found, *no_copies), no_strides)
        given = amax_out if amax_out is not None else torch.empty((), dtype=torch.float32, device=x.device)
        amax_out = None
        reduce_amax(
            found, f, torch.float32, amax=given, scales=[outputs[count]] if f.block == "nvfp4" else scales
        )

    stripes = columnwise or f.block == "128x128"
    if stripes:
        config = GluConfig.choose_stripe(f.block, rowwise, False, False, multiple, target.target)
    else:
        config = GluConfig.choose(hidden, f.group, False, multiple, target.target)
    parts = 1 if f.block == "row" or target.target == "cpu" else -(-hidden // config.tile)
    partials = None
    if amax_out is not None:
        programs = _blocks(rows, hidden, groups, config, stripes, _places(ends, align, f, stripes)) * parts
        partials = torch.empty(programs, dtype=torch.float32, device=x.device)
    data, data_scale, *strides_of_data = copy_arguments(row_copy)
    data_t, data_t_scale, *strides_of_data_t = copy_arguments(col_copy)
    run(
        config, f, stripes, parts, given, (None, partials, data, data_scale, data_t, data_t_scale),
        (*strides_of_data, *strides_of_data_t),
    )  # fmt: skip
    if partials is not None:
        reduce_amax(partials, None, torch.float32, amax=amax_out)


def _blocks(rows: int, cols: int, groups: int, config: GluConfig, stripes: bool, places: str) -> int:
    """Blocks of rows: those of a tensor, or as many as groups can need."""
    if not stripes:
        return -(-rows // config.rows)
    dense = count_stripes(rows, cols)
    return count_slots(rows, groups, STRIPE) if places == "slots" else dense


@functools.cache
def _glu_launch(
    act: str, interleaved: bool, limited: bool, format: Format | None, cast: int, static: bool, stripes: bool,
    places: str, config: GluConfig, once: bool, nested: bool, align: int, masked: bool,
) -> Launch:  # fmt: skip
    return Launch.of(
        glu_kernel, num_warps=config.num_warps, ACT=act, INTERLEAVED=interleaved, LIMITED=limited, FORMAT=format,
        CAST=cast, STATIC=static, STRIPES=stripes, PLACES=places, ROWS=config.rows, TILE=config.tile, ONCE=once,
        NESTED=nested, ALIGN=align, COLS_MASKED=masked,
    )  # fmt: skip


def _in_one_pass(format: Format, layout: str, hidden: int) -> tuple[bool, bool]:
    """Whether the row-wise and the column-wise copies of a gradient come from the tiles of dgate and dup: their scales
    are known within a tile, and none belongs to the end of dgate and the beginning of dup."""
    if format.block not in ("1x128", "128x128", "mx"):
        return False, False
    crossing = layout == "concat" and hidden % format.group != 0
    return not crossing, not (crossing and format.block == "128x128")


def _allocate_glu_backward(
    x: Tensor, up: Tensor | None, prob: Tensor | None, ends: Tensor | None, dy: Tensor, act: str, layout: str,
    limit: float | None, alpha: float, up_offset: float, align: int, needs: list[bool], format: str | None,
    rowwise: bool, columnwise: bool,
) -> list[Tensor]:  # fmt: skip
    outputs: list[Tensor] = []
    for like, need in zip((x, up), needs, strict=False):
        if need and like is not None:
            if format is None:
                outputs.append(torch.empty(like.shape, dtype=like.dtype, device=like.device))
            else:
                outputs += _allocate_copies(
                    Format.of(format), count_rows(like), like.shape[-1], like.device, rowwise, columnwise, ends, align
                )  # fmt: skip
    if needs[2]:
        assert prob is not None
        outputs.append(torch.empty(prob.shape, dtype=prob.dtype, device=prob.device))
    return outputs


def _launch_glu_backward(
    outputs: list[Tensor], x: Tensor, up: Tensor | None, prob: Tensor | None, ends: Tensor | None, dy: Tensor,
    act: str, layout: str, limit: float | None, alpha: float, up_offset: float, align: int, needs: list[bool],
    format: str | None, rowwise: bool, columnwise: bool,
) -> None:  # fmt: skip
    hidden = _hidden(x, layout)
    rows = x.numel() // x.shape[-1]
    target = capabilities_of(x.device)
    f = None if format is None else Format.of(format)
    likes = (x, up)
    gate, up, places = _inputs(x, up, layout, hidden)
    dy, dy_inner, *dy_strides = row_strides(dy)
    if dy_inner != places[1]:
        second = likes[1]
        gate, up, places = _inputs(
            x.contiguous(), second if second is None else second.contiguous(), layout, hidden
        )
        dy, _, *dy_strides = row_strides(dy.contiguous())
    prob_stride = 0 if prob is None else prob.stride(0)
    groups = 0
    if ends is not None:
        ends, groups = ends.contiguous(), ends.numel()
    multiple = align_of(*places[2:], *dy_strides, hidden, places[0])

    direct = (False, False) if f is None else _in_one_pass(f, layout, hidden)
    direct = direct[0] and rowwise, direct[1] and columnwise
    plain: list[Tensor | None] = [None, None]
    copies: list[tuple[Copy | None, Copy | None]] = [(None, None), (None, None)]
    later: list[tuple[list[Tensor], Tensor]] = []  # copies that are made from an fp32 gradient
    rest = iter(outputs)
    for i, (like, need) in enumerate(zip(likes, needs, strict=False)):
        if not need or like is None:
            continue
        if f is None:
            plain[i] = next(rest)
            continue
        parts = [next(rest) for _ in range(count_copies(f, rowwise=rowwise, columnwise=columnwise))]
        row_copy, col_copy = split_copies(f, parts, rowwise=rowwise, columnwise=columnwise)
        copies[i] = row_copy if direct[0] else None, col_copy if direct[1] else None
        if direct != (rowwise, columnwise):
            gradient = torch.empty(like.shape, dtype=torch.float32, device=x.device)
            plain[i] = gradient
            later.append((parts[: 2 if direct[1] else None], gradient))
    if layout == "concat":
        plain[1], copies[1] = plain[0], copies[0]
    dprob = next(rest) if needs[2] else None

    quantized = f if any(direct) else None
    stripes = quantized is not None and (direct[1] or quantized.block == "128x128")
    interleaved = layout == "interleaved"
    if stripes:
        assert quantized is not None
        config = GluConfig.choose_stripe(
            quantized.block, direct[0], True, interleaved, multiple, target.target
        )
    else:
        config = GluConfig.choose(
            hidden, 1 if quantized is None else quantized.group, True, multiple, target.target
        )
    where = _places(ends, align, quantized, stripes)
    blocks = _blocks(rows, hidden, groups, config, stripes, where)
    row_programs, once = _row_programs(hidden, config, stripes, dprob is not None, target.target)
    sums = dprob
    if dprob is not None and row_programs > 1:
        sums = torch.empty((row_programs, rows), dtype=torch.float32, device=x.device)

    row_copy, col_copy = (
        next((pair[side] for pair in copies if pair[side] is not None), None) for side in (0, 1)
    )
    pointers: list[Tensor | None] = [gate, up, prob, ends, dy, *plain, sums]
    for pair in copies:
        for copy in pair:
            pointers += copy_arguments(copy)[:2]
    launch = Launch.of(
        glu_backward_kernel, num_warps=config.num_warps, ACT=act, INTERLEAVED=interleaved,
        LIMITED=limit is not None, FORMAT=quantized, CAST=cast_mode(target), STRIPES=stripes, PLACES=where,
        ROWS=config.rows, TILE=config.tile, ONCE=once, NESTED=places[1] > 1, ALIGN=multiple,
        COLS_MASKED=hidden % config.tile != 0,
    )  # fmt: skip
    launch(
        (blocks * row_programs, 1, 1),
        *glu_backward_kernel.arguments(
            rows=rows,
            cols=hidden,
            up_shift=places[0],
            inner=places[1],
            gate=Rows(gate, *places[2:4]),
            up=Rows(up, *places[4:6]),
            dy=Rows(dy, *dy_strides),
            prob_ptr=prob,
            prob_stride=prob_stride,
            groups=GroupEnds(ends, groups, align),
            dgate_ptr=plain[0],
            dup_ptr=plain[1],
            dprob_ptr=sums,
            row_programs=row_programs,
            stride=likes[0].shape[-1],
            copy=copy_arguments(row_copy)._replace(data=pointers[-8], scale=pointers[-7]),
            copy_t=copy_arguments(col_copy)._replace(data=pointers[-6], scale=pointers[-5]),
            up_codes=UpCodes(*pointers[-4:]),
            alpha=alpha,
            limit=0.0 if limit is None else limit,
            up_offset=up_offset,
        ),
    )
    if dprob is not None and sums is not dprob:
        assert sums is not None
        dprob.copy_(sums.sum(0))
    for parts, gradient in later:
        assert format is not None
        with_columns = columnwise and not direct[1]
        copies_later = split_copies(Format.of(format), parts, rowwise=rowwise, columnwise=with_columns)
        quantize_into(
            Result.of(gradient, copies_later, None),
            ResultOptions(gradient.dtype, format, rowwise, with_columns, None, False),
            gradient,
        )


def _row_programs(cols: int, config: GluConfig, stripes: bool, sums: bool, target: str) -> tuple[int, bool]:
    """Programs that share rows, and whether each has one tile of them. A sum over the row belongs to one program,
    unless its tiles are stripes: in a loop over those, too much is held in registers."""
    if target == "cpu" or (sums and not stripes):
        return 1, False
    return -(-cols // config.tile), True


# ---- registration ---------------------------------------------------------------------------------------


def _setup_glu(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:10]
    ctx.format, ctx.rowwise, ctx.columnwise = inputs[16:]
    ctx.inputs = len(inputs)
    ctx.mark_non_differentiable(*output[1:])


def _glu_gradients(ctx: Any, grads: Any) -> Any:
    x, up, prob, ends = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    found = glu_backward_op(
        x, up, prob, ends, grads[0], *ctx.options, needs, ctx.format, ctx.rowwise, ctx.columnwise
    )
    gradients = _gradients(found, x, up, needs, ctx.format, ctx.rowwise, ctx.columnwise)
    if ctx.format is not None and type(x) not in (Tensor, torch.nn.Parameter):
        # A graph that is being traced has plain tensors for the gradients of its inputs, which are leaves to it.
        for i, (node, _) in enumerate(ctx.next_functions[:2]):
            gradient = gradients[i]
            if isinstance(gradient, QTensor) and node is not None and not node.next_functions:
                gradients[i] = gradient.dequantize()
    return *gradients, *[None] * (ctx.inputs - 3)


def _gradients(
    found: list[Tensor], x: Tensor, up: Tensor | None, needs: list[bool], format: str | None, rowwise: bool,
    columnwise: bool,
) -> list[Tensor | None]:  # fmt: skip
    """dx, dup and dprob, quantised if there is a format, from what the op returns."""
    rest = iter(found)
    gradients: list[Tensor | None] = [None, None, None]
    for i, like in enumerate((x, up)):
        if needs[i] and like is not None:
            if format is None:
                gradients[i] = next(rest)
            else:
                f = Format.of(format)
                parts = [next(rest) for _ in range(count_copies(f, rowwise=rowwise, columnwise=columnwise))]
                copies = split_copies(f, parts, rowwise=rowwise, columnwise=columnwise)
                gradients[i] = QTensor(like.shape, like.dtype, f, *copies)
    gradients[2] = next(rest) if needs[2] else None
    return gradients


def _shard_glu(a: Any) -> Sharding:
    joint, block = blocks_over_rows(a.format, a.rowwise, a.columnwise, a.quant_scale is not None)
    if a.grad_format is not None:
        of_gradient, rows = blocks_over_rows(a.grad_format, a.grad_rowwise, a.grad_columnwise, False)
        joint, block = joint | of_gradient, max(block, rows)
    if a.ends is not None:
        joint["..."] = (
            "offsets= counts the rows of all experts. Give x.to_local() and each rank's own offsets"
        )
        joint["e"] = "offsets= says where every expert ends"
    if a.layout in ("concat", "interleaved"):
        of_x, joint["c"] = "... c", "gate and up lie in it. Give them apart, as glu(gate, up)"
    else:
        of_x = "... h"
        if a.format is not None or a.grad_format is not None:
            joint["h"] = "a block of the quantised result may reach over it"
    return Sharding(
        {"x": of_x, "up": "... h", "prob": "(...)", "ends": "e", "quant_scale": ""},
        {"y": "... h", **copies_and_amax(a.format, a.rowwise, a.columnwise, a.return_amax)},
        joint,
        block,
    )


glu_backward_op = define_flat_op(
    "glu_backward(Tensor x, Tensor? up, Tensor? prob, Tensor? ends, Tensor dy, str act, str layout, float? limit, "
    "float alpha, float up_offset, int align, bool[] needs, str? format, bool rowwise, bool columnwise) -> Tensor[]",
    allocate=_allocate_glu_backward,
    launch=_launch_glu_backward,
    reference=glu_backward_reference,
    variants=32,
)

glu_op = define_flat_op(
    "glu(Tensor x, Tensor? up, Tensor? prob, Tensor? ends, str act, str layout, float? limit, float alpha, "
    "float up_offset, int align, ScalarType out_dtype, str? format, bool rowwise, bool columnwise, "
    "Tensor? quant_scale, bool return_amax, str? grad_format, bool grad_rowwise, bool grad_columnwise) -> Tensor[]",
    allocate=_allocate_glu,
    launch=_launch_glu,
    reference=glu_reference,
    setup_context=_setup_glu,
    backward=_glu_gradients,
    sharding=_shard_glu,
    variants=48,
)


# ---- public functions -----------------------------------------------------------------------------------


class GluGradients(NamedTuple):
    """What `glu_backward` returns: the gradients of x, up and prob, None for what the call does not have."""

    x: Tensor
    up: Tensor | None
    prob: Tensor | None


def glu(
    x: Tensor,
    up: Tensor | None = None,
    *,
    act: Act = "silu",
    layout: Literal["concat", "interleaved", "none"] = "concat",
    prob: Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    offsets: Tensor | None = None,
    align: int = 1,
    out_dtype: torch.dtype | None = None,
    quantize: Format | str | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    quant_scale: Tensor | None = None,
    return_amax: bool = False,
    quantize_grad: Format | str | None = None,
    grad_rowwise: bool = True,
    grad_columnwise: bool = True,
) -> Any:
    """A gated linear unit: `y = f(gate) * up * prob`, in fp32 and rounded once.

    x: [..., 2H] with gate and up in it, or the gate [..., H] beside `up` [..., H]; bf16, fp16 or fp32, of any
    strides. Returns y [..., H], and the largest |y| with `return_amax`.

    - `act`: f. "silu" makes it SwiGLU, "gelu" (by erf) and "gelu_tanh" GeGLU, "relu" ReGLU; "relu2" is ReLU squared.
    - `layout` of x: "concat" has all of the gate first, "interleaved" gate and up in turn. "none": nothing is gated,
      x is [..., H] and y = f(x).
    - `prob` [...] or [..., 1]: a weight for each row, such as the router's probability. It has a gradient.
    - `limit`: gate counts as at most the limit, up as within ±limit; their gradients are 0 beyond it. `alpha`: the
      steepness of the sigmoid in silu. `up_offset` is added to up. gpt-oss has limit 7, alpha 1.702, up_offset 1.
    - `offsets` [groups], int32 or int64 on the device: where the rows of each expert end. An expert begins where the
      one before it ends, rounded up to a multiple of `align`. Rows of no expert are not read; their results and
      gradients are zero. Without experts there is one group of all rows.
    - `out_dtype`: of y, x's by default.
    - `quantize`, `rowwise`, `columnwise`, `quant_scale`, `return_amax`: as for `weft.rms_norm`. No block of a
      column-wise copy mixes experts. If `align` is a multiple of 128 its blocks lie as without experts. Otherwise
      `align` is a multiple of 16 (32 for 4-bit codes), and the scales of an expert that begins with row s and has
      e experts before it begin with block s // 128 + e of 128 rows; blocks without rows have the scale zero.
    - `quantize_grad`, `grad_rowwise`, `grad_columnwise`: the gradient of x (and of up) is a `QTensor` of this format,
      made from fp32. Blocks 1x128, 128x128 and mx come from one read of x and of y's gradient, unless one of them
      would reach from the gate into up; those and the other blocks take an fp32 gradient in memory. What leaves a
      graph of `torch.compile` as the gradient of one of its inputs is dequantised. Gradients that autograd adds up
      are dequantised and added in x's dtype.

    >>> import torch, weft
    >>> x = torch.randn(48, 2 * 256, dtype=torch.bfloat16)
    >>> weft.glu(x).shape
    torch.Size([48, 256])
    >>> offsets = torch.tensor([5, 32, 40])  # rows 0-4, 16-31, 32-39; the others are padding
    >>> y = weft.glu(x, prob=torch.rand(48), offsets=offsets, align=16)
    >>> y[5:16].count_nonzero(), y[40:].count_nonzero()
    (tensor(0), tensor(0))
    >>> q = weft.glu(x, quantize="1x128", columnwise=True)
    >>> q.rowwise.data.shape, q.columnwise.data.shape
    (torch.Size([48, 256]), torch.Size([256, 48]))
    """
    kind = _check_inputs(x, up, act, layout, prob, limit, alpha, up_offset, offsets, align)
    hidden = _hidden(x, kind)
    grad_format = None
    format = check_quantize(quantize, rowwise, columnwise, quant_scale, return_amax, out_dtype, x.device)
    if format is not None:
        _check_format(format, rowwise, columnwise, offsets, align, True)
    if quantize_grad is not None:
        grad_format = Format.of(quantize_grad)
        _, one_pass = _in_one_pass(grad_format, kind, hidden)
        _check_format(grad_format, grad_rowwise, grad_columnwise, offsets, align, one_pass)
    outputs = glu_op(
        x, up, _flat_prob(prob, x), offsets, act, kind,
        None if limit is None else float(limit), float(alpha), float(up_offset), align, out_dtype or x.dtype,
        None if format is None else format.spec, rowwise, columnwise, quant_scale, return_amax,
        None if grad_format is None else grad_format.spec, grad_rowwise, grad_columnwise,
    )  # fmt: skip
    if format is None:
        return outputs[0]
    q = wrap(outputs[0], format, *split_copies(format, outputs[1:], rowwise=rowwise, columnwise=columnwise))
    return (q, outputs[-1]) if return_amax else q


def _flat_prob(prob: Tensor | None, x: Tensor) -> Tensor | None:
    """[rows]. Of DTensors the shards are joined into rows, each rank its own."""
    if prob is None or not is_distributed(x, prob):
        return None if prob is None else prob.reshape(-1)
    return prob if prob.dim() < x.dim() else prob.squeeze(-1)


def glu_backward(
    dy: Tensor,
    x: Tensor,
    up: Tensor | None = None,
    *,
    act: Act = "silu",
    layout: Literal["concat", "interleaved", "none"] = "concat",
    prob: Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    offsets: Tensor | None = None,
    align: int = 1,
    quantize: Format | str | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
) -> GluGradients:
    """The gradients of `glu`, for those who write their backward themselves: dy [..., H] is the gradient of y, the
    other arguments are those of `glu`. With `quantize` the gradients of x and up are `QTensor`s.

    >>> import torch, weft
    >>> x, dy = torch.randn(48, 512, dtype=torch.bfloat16), torch.randn(48, 256, dtype=torch.bfloat16)
    >>> dx, _, dprob = weft.glu_backward(dy, x, prob=torch.rand(48), quantize="1x128", columnwise=True)
    >>> dx.rowwise.data.shape, dx.columnwise.data.shape, dprob.shape
    (torch.Size([48, 512]), torch.Size([512, 48]), torch.Size([48]))
    """
    kind = _check_inputs(x, up, act, layout, prob, limit, alpha, up_offset, offsets, align)
    hidden = _hidden(x, kind)
    check_tensor("dy", dy, FLOATS, x.device, (*x.shape[:-1], hidden))
    spec = None
    if quantize is not None:
        format = Format.of(quantize)
        _, one_pass = _in_one_pass(format, kind, hidden)
        _check_format(format, rowwise, columnwise, offsets, align, one_pass)
        spec = format.spec
    elif columnwise:
        raise ValueError("columnwise goes with quantize=…")
    needs = [True, up is not None, prob is not None]
    found = glu_backward_op(
        x, up, None if prob is None else prob.reshape(-1), offsets, dy, act, kind,
        None if limit is None else float(limit), float(alpha), float(up_offset), align, needs, spec, rowwise,
        columnwise,
    )  # fmt: skip
    dx, dup, dprob = _gradients(found, x, up, needs, spec, rowwise, columnwise)
    assert dx is not None
    if dprob is not None and prob is not None:
        dprob = dprob.view(prob.shape)
    return GluGradients(dx, dup, dprob)


def _check_inputs(
    x: Tensor, up: Tensor | None, act: str, layout: str, prob: Tensor | None, limit: float | None, alpha: float,
    up_offset: float, offsets: Tensor | None, align: int,
) -> str:  # fmt: skip
    """Complain about inputs that do not fit; the layout as the op takes it."""
    check_input("x", x)
    if act not in _ACTS:
        raise ValueError(f"act must be one of {', '.join(_ACTS)}; got {act!r}")
    if layout not in ("concat", "interleaved", "none"):
        raise ValueError(f"layout must be 'concat', 'interleaved' or 'none'; got {layout!r}")
    if up is not None:
        if layout != "concat":
            raise ValueError(f"with up= there is no layout of gate and up in x; got layout={layout!r}")
        check_tensor("up", up, (x.dtype,), x.device, x.shape)
        layout = "pair"
    elif layout != "none" and x.shape[-1] % 2:
        raise ValueError(f"x holds gate and up, [..., 2H]; its last dimension is {x.shape[-1]}, which is odd")
    if prob is not None:
        lead = x.shape[:-1]
        check_tensor("prob", prob, FLOATS, x.device, lead, (*lead, 1))
    if limit is not None and not real("limit", limit) > 0:
        raise ValueError(f"limit must be positive, or None for no limit; got {limit}")
    real("up_offset", up_offset)
    if real("alpha", alpha) != 1.0 and act not in ("silu", "sigmoid"):
        raise ValueError(
            f"alpha is the steepness of a sigmoid, for silu and sigmoid; got {alpha} for {act!r}"
        )
    if whole("align", align) < 1 or (offsets is None and align != 1):
        raise ValueError(f"align is a positive number that goes with offsets=…; got {align}")
    if offsets is not None:
        check_tensor("offsets", offsets, INTEGERS, x.device)
        if offsets.dim() != 1:
            raise ValueError(
                f"offsets must be [groups], where the rows of each end; got {tuple(offsets.shape)}"
            )
    return layout


_ACTS = get_args(Act)


def _check_format(
    format: Format, rowwise: bool, columnwise: bool, offsets: Tensor | None, align: int, one_pass: bool
) -> None:
    """Complain about copies that cannot be made of experts that begin anywhere."""
    if not (rowwise or columnwise):
        raise ValueError("rowwise=False needs columnwise=True: a QTensor has at least one copy")
    if columnwise and format.block == "row" and offsets is not None:
        raise ValueError("block 'row' has one scale to a whole column, which would mix experts: take 1x128")
    if not _begins_anew(offsets, align) or format.block == "tensor":
        return
    if format.block == "128x128":
        raise ValueError(f"128x128 blocks would mix experts: pad them to align=128; got align={align}")
    if columnwise and not rowwise:
        raise ValueError(
            "column-wise blocks that begin anew with every expert need the row-wise copy beside them: "
            f"pad the experts to align=128, or leave rowwise=True; got align={align}"
        )
    if columnwise and align % (16 * format.packed):
        raise ValueError(
            f"a column-wise copy needs experts that begin at multiples of {16 * format.packed}: got align={align}"
        )
    if columnwise and not one_pass:
        raise ValueError(
            f"{format.spec} takes the whole gradient before its first code; its column-wise copy would mix experts: "
            f"pad them to align=128; got align={align}"
        )
