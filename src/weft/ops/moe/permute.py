"""Permute and unpermute: the rows of tokens to their experts and back, by the indices of a `RowMap`.

    permute:    y[r] = x[token of slot_of_row[r]], 0 in pads          row_probs[r] = probs[slot_of_row[r]]
    unpermute:  y[t] = round(sum over j = 0, 1, ... of probs[t, j] * rows[row_of_slot[t, j]])

Each is the gradient of the other. With probs, unpermute's gradient is

    drows[r] = round(probs[s] * dy[t])     dprobs[t, j] = round(sum over columns of dy[t] * rows[row_of_slot[t, j]])

permute copies bits. unpermute adds up in fp32, with one fused multiply-add for each slot in the order of the slots, and
rounds the sum once to the dtype of the result. drows is the fp32 product, rounded once. A quantised result has the
bytes that `quantize` would give for the permuted rows, pads included. If x comes quantised, codes and scales are moved
as they are, and pads get the code 0 with the scale 1.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor

from ...quant import PLAIN, Codes, Format, QTensor
from ...quant.copies import check_codes, scale_room
from ...quant.qtensor import stand_in
from ...quant.reference import dequantize_copy
from ...quant.straight import take_apart
from ...runtime import (
    Backward,
    BoundLaunch,
    Capabilities,
    Gradients,
    Launch,
    Op,
    capabilities_of,
    choice,
    local_rows,
)
from ..common.checks import FLOATS, check_input, check_tensor
from ..common.copies import STRIPE, cast_mode, copy_arguments, count_stripes, stripe_config
from ..common.quantized import register_codes, rowwise_codes
from ..common.results import Result, ResultOptions, allocate_result, plain_result, result_options
from ..common.rows import align_of, compute_dtype, contiguous, cpu_tile, flat_rows
from ..quantize import QuantizeArgs, quantize_reference
from .permute_kernels import (
    PADS,
    permute_kernel,
    permute_stripe_kernel,
    unpermute_backward_kernel,
    unpermute_kernel,
)
from .row_map import RowMap

# ---- arguments and outputs ------------------------------------------------------------------------------


class PermuteArgs(NamedTuple):
    x: Tensor  # [..., K]; not read if there are codes
    codes: Codes  # those of a quantised x, which are moved as they are
    probs: Tensor | None  # [..., slots], or [..., experts] if the routing was a mask
    map: RowMap
    result: ResultOptions


class PermuteOutputs(NamedTuple):
    result: Result  # [rows, K]
    row_probs: Tensor | None  # [rows]


class UnpermuteArgs(NamedTuple):
    rows: Tensor  # [rows, K]; not read if there are codes
    codes: Codes
    probs: Tensor | None
    carried: Tensor | None  # [rows]
    map: RowMap


class UnpermuteOutputs(NamedTuple):
    y: Tensor  # [..., K]
    carried: Tensor | None  # in the shape of probs


class UnpermuteNeeds(NamedTuple):
    """Which gradients are wanted."""

    rows: bool
    probs: bool


class UnpermuteGradients(NamedTuple):
    rows: Tensor | None
    probs: Tensor | None


class UnpermuteBackwardArgs(NamedTuple):
    dy: Tensor  # [..., K]
    rows: Tensor | None  # for the gradient of probs; None if it is not wanted or the rows are given as codes
    codes: Codes
    probs: Tensor
    map: RowMap
    needs: UnpermuteNeeds


# ---- reference ------------------------------------------------------------------------------------------


def _pick(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index] along the first dimension, zero where the index is negative."""
    if rows.shape[0] == 0:
        return rows.new_zeros((*index.shape, *rows.shape[1:]))
    found = rows[index.clamp(min=0)]
    gone = (index < 0).view(*index.shape, *[1] * (rows.dim() - 1))
    return found.masked_fill(gone, 0)


def _of_slots(probs: Tensor, map: RowMap) -> Tensor:
    """The probability of each slot, [tokens * slots]. For a slot without an expert it is undefined."""
    if map.experts is None:
        return probs.flatten()
    experts = _by_token(map.experts).long().clamp(min=0)
    return probs.reshape(len(experts), probs.shape[-1]).gather(1, experts).flatten()


def _by_token(per_slot: Tensor) -> Tensor:
    """[tokens, slots]."""
    slots = per_slot.shape[-1]
    return per_slot.reshape(per_slot.numel() // slots, slots)


def _to_rows(probs: Tensor, map: RowMap) -> Tensor:
    """Probabilities to the rows of their slots, 0 in pads."""
    return _pick(_of_slots(probs, map), map.slot_of_row.long())


def _to_slots(carried: Tensor, map: RowMap) -> Tensor:
    """Values of rows, [rows], as values of their slots in the shape of probs."""
    return _to_experts(_pick(carried, map.row_of_slot.long()), map)


def _to_experts(per_slot: Tensor, map: RowMap) -> Tensor:
    """Values of slots [..., slots] as values of experts [..., experts] if the routing was a mask, else unchanged."""
    if map.experts is None:
        return per_slot
    # One more column takes the slots without a row.
    experts = map.counts.shape[0]
    dense = per_slot.new_zeros((*per_slot.shape[:-1], experts + 1))
    where = torch.where(map.row_of_slot < 0, experts, map.experts).long()
    return dense.scatter_(-1, where, per_slot)[..., :experts].contiguous()


def _token_of_row(map: RowMap) -> Tensor:
    slot = map.slot_of_row.long()
    return torch.where(slot < 0, -1, slot // map.row_of_slot.shape[-1])


def _moved(codes: Codes, token: Tensor, cols: int) -> tuple[Tensor, Tensor]:
    """The codes and scales of each row; a pad has codes 0 and scales 1."""
    data = _pick(codes.data.view(torch.uint8), token).view(codes.data.dtype)
    scale = scale_room(Format.of(codes.format), len(token), cols).allocate(data.device)
    kind, one = (torch.uint8, 127) if scale.element_size() == 1 else (torch.float32, 1.0)
    scale.view(kind).copy_(_pick(codes.scale.view(kind), token).masked_fill((token < 0)[:, None], one))
    return data, scale


def _values(rows: Tensor | None, codes: Codes, cols: int, dtype: torch.dtype) -> Tensor:
    """The numbers of rows, dequantised if the rows are given as codes."""
    if codes.data is None:
        assert rows is not None
        return rows.to(dtype)
    return dequantize_copy(codes, (codes.data.shape[0], cols), torch.float32).to(dtype)


# ---- launch ---------------------------------------------------------------------------------------------


class MoveConfig(NamedTuple):
    """How rows are cut: `rows` of them to a program, `tile` columns at a time."""

    rows: int
    tile: int
    num_warps: int


@choice("permute", rows=(1, 64), tile=(64, 8192), num_warps=(1, 16))
def move_config(kernel: str, cols: int, coded: bool, target: Capabilities) -> MoveConfig:
    """For "permute", whose result is `coded`, or "unpermute", whose input is. Tiles of 2048 numbers for 128 threads, or
    of 1024 where they are sums of several rows; on a CPU, pieces of one row."""
    smallest = 128 if coded else 1
    if target.is_cpu:
        return MoveConfig(1, cpu_tile(cols, smallest), 4)
    numbers = 2048 if kernel == "permute" or coded else 1024
    tile = min(max(1 << max(cols - 1, 0).bit_length(), smallest, 64), numbers)
    return MoveConfig(numbers // tile, tile, 128 // target.warp_size)


@choice("unpermute_backward", tile=(128, 4096), num_warps=(1, 16))
def dots_config(cols: int, target: Capabilities) -> MoveConfig:
    """For the gradients of `unpermute`, a row to a program."""
    if target.is_cpu:
        return MoveConfig(1, cpu_tile(cols, 128), 4)
    # Each thread has 64 numbers of the slots' rows and 16 bytes of dy.
    return MoveConfig(1, min(max(1 << max(cols - 1, 0).bit_length(), 128), 1024), 128 // target.warp_size)


Strides = tuple[int, int, int]  # of rows, of the scales of a row, and of the scales within it


class _Layout(NamedTuple):
    """Sizes of a permutation, and where what it reads and writes lies."""

    tokens: int
    rows: int
    cols: int
    slots: int  # of a token
    x: Strides
    x_scales: int  # of a row
    probs_stride: int
    y: Strides


@functools.lru_cache(maxsize=4096)
def _permute_launch(
    layout: _Layout, made: str | None, dtype: torch.dtype, cast: int, target: Capabilities
) -> BoundLaunch:
    """A permutation that makes codes in the format `made` of numbers of this dtype, or
    moves what there is."""
    tokens, rows, cols, slots, x, x_scales, probs_stride, y = layout
    config = move_config("permute", cols, made is not None, target)
    format = None if made is None else Format.of(made)
    launch = Launch.of(
        permute_kernel,
        num_warps=config.num_warps,
        INPUT_MAX=1.0 if made is None else torch.finfo(dtype).max,
        FORMAT=format,
        CAST=cast,
        ROWS=config.rows,
        TILE=config.tile,
        ALIGN=align_of(cols, x[0], y[0]),
        COLS_MASKED=cols % config.tile != 0,
    )
    whole = format is not None and format.block == "row"  # rows are not cut
    token_programs = -(-tokens // config.rows) * (1 if whole else -(-cols // config.tile))
    grid = (token_programs - (-rows // PADS.value), 1, 1)
    return launch.bind(grid, (tokens, rows, cols, slots, token_programs, x_scales, *x, probs_stride, *y))


@functools.cache
def _unpermute_launch(
    format: str | None, at_once: int, config: MoveConfig, align: int, masked: bool
) -> Launch:
    return Launch.of(
        unpermute_kernel,
        num_warps=config.num_warps,
        FORMAT=None if format is None else Format.of(format),
        AT_ONCE=at_once,
        ROWS=config.rows,
        TILE=config.tile,
        ALIGN=align,
        COLS_MASKED=masked,
    )


def _at_once(slots: int) -> int:
    """How many slots are loaded together: up to eight, since a thread has registers for eight loads of 16 bytes."""
    return 1 if slots == 1 else 2 if slots == 2 else 4 if slots <= 4 else 8


def _sizes(map: RowMap) -> tuple[int, int, int]:
    """Tokens, rows, and slots of a token."""
    slots = map.row_of_slot.shape[-1]
    return map.row_of_slot.numel() // slots, map.slot_of_row.shape[0], slots


def _strides(data: Tensor, scale: Tensor | None) -> Strides:
    if scale is None:
        return data.stride(0), 0, 0
    scale_row, scale_col = scale.stride()
    return data.stride(0), scale_row, scale_col


def _source(rows: Tensor | None, codes: Codes) -> tuple[Tensor, Tensor | None, Strides]:
    """(data, scales, strides): numbers or codes [M, K] as kernels read them, with the scales of codes."""
    data = flat_rows(rows if codes.data is None else codes.data)
    return data, codes.scale, _strides(data, codes.scale)


def _last(x: Tensor | None) -> int:
    """The row stride of a contiguous tensor."""
    return 0 if x is None else x.shape[-1]


def _permute_by_tokens(o: PermuteOutputs, a: PermuteArgs) -> None:
    """Make a row-wise result: plain numbers, numbers quantised on the way, or codes moved as they are."""
    tokens, rows, slots = _sizes(a.map)
    target = capabilities_of(a.x.device)
    x, x_scale, x_strides = _source(a.x, a.codes)
    probs = contiguous(a.probs)
    y, y_scale = o.result.data, o.result.scale
    if y is None:
        y = o.result.y
    layout = _Layout(
        tokens, rows, x.shape[1], slots, x_strides, _last(x_scale), _last(probs), _strides(y, y_scale)
    )
    made = a.result.format if a.codes.data is None else None
    cast = 0 if made is None else cast_mode(target)
    _permute_launch(layout, made, x.dtype, cast, target)(
        (x, x_scale, probs, a.map.experts, a.map.row_of_slot, a.map.slot_of_row, y, y_scale, o.row_probs)
    )


def _permute_by_stripes(o: PermuteOutputs, a: PermuteArgs) -> None:
    """Make the column-wise copy, and the row-wise one if it is wanted."""
    assert a.result.format is not None
    _, rows, slots = _sizes(a.map)
    f, target = Format.of(a.result.format), capabilities_of(a.x.device)
    x, probs = flat_rows(a.x), contiguous(a.probs)
    cols = x.shape[1]
    align = align_of(cols, x.stride(0))
    tile, num_warps = stripe_config("permute", f.block, align, target)
    row, col = map(copy_arguments, o.result.copies(a.result.format))
    launch = Launch.of(
        permute_stripe_kernel,
        num_warps=num_warps,
        INPUT_MAX=torch.finfo(x.dtype).max,
        FORMAT=f,
        CAST=cast_mode(target),
        ROWS=STRIPE,
        TILE=tile,
        ALIGN=align,
        COLS_MASKED=cols % tile != 0,
    )
    launch(
        (count_stripes(rows, cols) * -(-cols // tile), 1, 1),
        (x, probs, a.map.experts, a.map.slot_of_row, o.row_probs, *row[:2], *col[:2]),
        (rows, cols, slots, x.stride(0), _last(probs), *row[2:], *col[2:]),
    )


# ---- registration ---------------------------------------------------------------------------------------

BLOCKS = ("1x128", "mx", "row")  # the formats' blocks that lie within one row


def _validate_codes(codes: Codes, rows: int, cols: int, *, moved: bool = False) -> None:
    """Raise an error for codes that the kernels would misread. `moved`: they are moved, and not decoded."""
    check_codes("the tensor", codes, rows, cols)
    if codes.data is not None and not _readable(Format.of(codes.format), moved=moved):
        raise ValueError(
            f"rows in {codes.format} cannot be {'moved' if moved else 'added up'}: dequantize them"
        )


def _readable(f: Format, *, moved: bool) -> bool:
    """Return whether kernels move rows of a format as they are, or decode them: blocks lie within a row."""
    return f.block in BLOCKS and (moved or f.packed == 1)


class UnpermuteBackwardOp(
    Op[UnpermuteBackwardArgs, UnpermuteGradients], name="unpermute_backward", variants=24
):
    def validate(self, a: UnpermuteBackwardArgs) -> None:
        return _validate_codes(a.codes, a.map.slot_of_row.shape[0], a.dy.shape[-1])

    def allocate(self, a: UnpermuteBackwardArgs) -> UnpermuteGradients:
        dy, probs = a.dy, a.probs
        drows = dprobs = None
        if a.needs.rows:
            drows = torch.empty(a.map.slot_of_row.shape[0], dy.shape[-1], dtype=dy.dtype, device=dy.device)
        if a.needs.probs:
            make = torch.empty if a.map.experts is None else torch.zeros
            dprobs = make(probs.shape, dtype=probs.dtype, device=dy.device)
        return UnpermuteGradients(drows, dprobs)

    def present(self, a: UnpermuteBackwardArgs) -> Any:
        return a.needs

    def launch(self, o: UnpermuteGradients, a: UnpermuteBackwardArgs) -> None:
        tokens, row_count, slots = _sizes(a.map)
        dy, probs = flat_rows(a.dy), a.probs.contiguous()
        cols, rows, scale, strides = dy.shape[1], None, None, (0, 0, 0)
        if o.probs is not None:
            rows, scale, strides = _source(a.rows, a.codes)
        _, tile, num_warps = dots_config(cols, capabilities_of(a.dy.device))
        launch = Launch.of(
            unpermute_backward_kernel,
            num_warps=num_warps,
            FORMAT=None if scale is None or a.codes.format is None else Format.of(a.codes.format),
            AT_ONCE=_at_once(slots),
            TILE=tile,
            ALIGN=align_of(cols, dy.stride(0), strides[0]),
            COLS_MASKED=cols % tile != 0,
        )
        launch(
            (tokens - (0 if o.rows is None else -row_count // PADS.value), 1, 1),
            (dy, rows, scale, probs, a.map.experts, a.map.row_of_slot, a.map.slot_of_row, o.rows, o.probs),
            (tokens, row_count, cols, slots, dy.stride(0), *strides, _last(probs), _last(probs)),
        )

    def reference(self, a: UnpermuteBackwardArgs) -> UnpermuteGradients:
        cols, dtype = a.dy.shape[-1], compute_dtype(a.dy)
        index = _by_token(a.map.row_of_slot).long()
        dy = a.dy.reshape(len(index), cols).to(dtype)
        drows = dprobs = None
        if a.needs.rows:
            token = _token_of_row(a.map)
            weight = _to_rows(a.probs, a.map).to(dtype)
            drows = _pick(dy, token) * weight[:, None]
            drows = drows.masked_fill((token < 0)[:, None], 0).to(a.dy.dtype)
        if a.needs.probs:
            values = _values(a.rows, a.codes, cols, dtype)
            dots = torch.stack([(_pick(values, index[:, j]) * dy).sum(1) for j in range(index.shape[1])], 1)
            dots = dots.masked_fill(index < 0, 0).to(a.probs.dtype).view(a.map.row_of_slot.shape)
            dprobs = _to_experts(dots, a.map)
        return UnpermuteGradients(drows, dprobs)


unpermute_backward_op = UnpermuteBackwardOp()


class PermuteOp(
    Op[PermuteArgs, PermuteOutputs], name="permute", variants=24, differentiable=("result_y", "row_probs")
):
    def validate(self, a: PermuteArgs) -> None:
        cols = a.x.shape[-1]
        _validate_codes(a.codes, a.x.numel() // cols if cols else 0, cols, moved=True)
        if a.codes.data is not None and a.result.format != a.codes.format:
            raise ValueError(
                f"rows in {a.codes.format} are moved as they are: dequantize them for another result"
            )

    def allocate(self, a: PermuteArgs) -> PermuteOutputs:
        rows, probs = a.map.slot_of_row.shape[0], a.probs
        row_probs = None if probs is None else torch.empty(rows, dtype=probs.dtype, device=a.x.device)
        return PermuteOutputs(allocate_result(a.result, a.x, (rows, a.x.shape[-1])), row_probs)

    def present(self, a: PermuteArgs) -> Any:
        return PermuteOutputs(a.result.present(), a.probs is not None)  # type: ignore[arg-type]

    def launch(self, o: PermuteOutputs, a: PermuteArgs) -> None:
        if a.map.slot_of_row.shape[0] == 0:
            return
        if a.result.columnwise:
            _permute_by_stripes(o, a)
        else:
            _permute_by_tokens(o, a)

    def reference(self, a: PermuteArgs) -> PermuteOutputs:
        """The definition."""
        token, cols = _token_of_row(a.map), a.x.shape[-1]
        if a.codes.data is not None:
            result = Result(stand_in(a.x, (len(token), cols)), *_moved(a.codes, token, cols))
        else:
            y = _pick(a.x.reshape(len(_by_token(a.map.row_of_slot)), cols), token)
            plain = a.result.format is None
            result = Result(y) if plain else quantize_reference(QuantizeArgs(y, a.result, None)).result
        return PermuteOutputs(result, None if a.probs is None else _to_rows(a.probs, a.map))

    def keep(self, a: PermuteArgs, o: PermuteOutputs) -> Any:
        return a.map

    def backward(self, b: Backward) -> Gradients:
        map: RowMap = b.kept
        drows = b.grads.result.y if b.needs.x else None
        dprobs = b.grads.row_probs if b.needs.probs else None
        if drows is not None:
            o = unpermute_op(UnpermuteArgs(drows, PLAIN, None, dprobs, map))
            return {"x": o.y, "probs": o.carried}
        return {"probs": None if dprobs is None else _to_slots(dprobs, map)}


permute_op = PermuteOp()


class UnpermuteOp(
    Op[UnpermuteArgs, UnpermuteOutputs], name="unpermute", variants=24, differentiable=("y", "carried")
):
    def validate(self, a: UnpermuteArgs) -> None:
        return _validate_codes(a.codes, a.rows.shape[0], a.rows.shape[-1])

    def allocate(self, a: UnpermuteArgs) -> UnpermuteOutputs:
        lead, device, carried = a.map.row_of_slot.shape[:-1], a.rows.device, None
        if a.carried is not None:
            if a.map.experts is None:
                carried = torch.empty(a.map.row_of_slot.shape, dtype=a.carried.dtype, device=device)
            else:
                shape = (*lead, a.map.counts.shape[0])
                carried = torch.zeros(shape, dtype=a.carried.dtype, device=device)
        return UnpermuteOutputs(
            torch.empty(*lead, a.rows.shape[-1], dtype=a.rows.dtype, device=device), carried
        )

    def present(self, a: UnpermuteArgs) -> Any:
        return UnpermuteOutputs(True, a.carried is not None)  # type: ignore[arg-type]

    def launch(self, o: UnpermuteOutputs, a: UnpermuteArgs) -> None:
        tokens, _, slots = _sizes(a.map)
        if tokens == 0:
            return
        rows, scale, strides = _source(a.rows, a.codes)
        cols, probs = rows.shape[1], contiguous(a.probs)
        target = capabilities_of(rows.device)
        plain = a.codes.data is None
        config = move_config("unpermute", cols, not plain, target)
        align, masked = align_of(cols, strides[0]), cols % config.tile != 0
        format = None if plain else a.codes.format
        _unpermute_launch(format, _at_once(slots), config, align, masked)(
            (-(-tokens // config.rows) * -(-cols // config.tile), 1, 1),
            (rows, scale, probs, a.map.experts, contiguous(a.carried), a.map.row_of_slot, o.y, o.carried),
            (tokens, cols, slots, *strides, _last(probs), _last(o.carried)),
        )

    def reference(self, a: UnpermuteArgs) -> UnpermuteOutputs:
        """The definition."""
        cols, dtype = a.rows.shape[-1], compute_dtype(a.rows)
        values = _values(a.rows, a.codes, cols, dtype)
        index = _by_token(a.map.row_of_slot).long()
        weights = None if a.probs is None else _of_slots(a.probs, a.map).view(index.shape).to(dtype)
        y = torch.zeros((len(index), cols), dtype=dtype, device=a.rows.device)
        for j in range(index.shape[1]):
            term = _pick(values, index[:, j])
            if weights is not None:
                term = torch.where((index[:, j] < 0)[:, None], term, term * weights[:, j, None])
            y = y + term
        return UnpermuteOutputs(
            y.to(a.rows.dtype).view(*a.map.row_of_slot.shape[:-1], cols),
            None if a.carried is None else _to_slots(a.carried, a.map),
        )

    def keep(self, a: UnpermuteArgs, o: UnpermuteOutputs) -> UnpermuteBackwardArgs:
        unknown: Any = None
        if a.probs is not None and a.probs.requires_grad:
            rows, codes = (a.rows if a.codes.data is None else None), a.codes
        else:
            rows, codes = None, PLAIN
        return UnpermuteBackwardArgs(unknown, rows, codes, a.probs, a.map, UnpermuteNeeds(False, False))  # type: ignore[arg-type]

    def backward(self, b: Backward) -> Gradients:
        kept: UnpermuteBackwardArgs = b.kept
        dy, dcarried = b.grads.y, b.grads.carried if b.needs.carried else None
        needs = UnpermuteNeeds(b.needs.rows, b.needs.probs)
        found: Gradients = {}
        if dy is not None and kept.probs is not None and any(needs):
            found = unpermute_backward_op(kept._replace(dy=dy, needs=needs))._asdict()
        elif dy is not None and needs.rows:
            o = permute_op(PermuteArgs(dy, PLAIN, dcarried, kept.map, plain_result(dy.dtype)))
            return {"rows": o.result.y, "carried": o.row_probs}
        if dcarried is not None:
            found["carried"] = _to_rows(dcarried, kept.map)
        return found


unpermute_op = UnpermuteOp()


def _rows_to_move(q: QTensor) -> Codes:
    """Return the codes of rows that are moved as they are: decoded, they would be quantized a second time."""
    codes = rowwise_codes(q) if _readable(q.format, moved=True) else None
    if codes is None:
        raise ValueError(
            f"permute moves row-wise codes with blocks {', '.join(BLOCKS)}; got {q!r}: dequantize it"
        )
    return codes


def _rows_to_add(q: QTensor) -> Codes | None:
    return rowwise_codes(q) if _readable(q.format, moved=False) else None


register_codes(permute_op, x=_rows_to_move)
register_codes(unpermute_op, rows=_rows_to_add)
register_codes(unpermute_backward_op, rows=_rows_to_add)


# ---- public functions -----------------------------------------------------------------------------------

Rows = TypeVar("Rows", Tensor, QTensor)


def _check(x: Tensor, rows: RowMap, what: str, leading: torch.Size) -> None:
    check_input(what, x)
    if x.shape[:-1] != leading:
        raise ValueError(
            f"{what} must be [{', '.join(map(str, leading))}, K] for these rows; got {tuple(x.shape)}"
        )
    if x.device != rows.slot_of_row.device:
        raise ValueError(f"{what} is on {x.device}, the row map on {rows.slot_of_row.device}")


def _check_rows(rows: RowMap) -> None:
    if not isinstance(rows, RowMap):
        raise TypeError(
            f"rows must be a weft.RowMap; got a {type(rows).__name__}. Make one of the experts' indices first: "
            "weft.row_map(indices, experts)"
        )


def _check_probs(probs: Tensor | None, rows: RowMap) -> None:
    if probs is None:
        return
    shape = rows.row_of_slot.shape
    if rows.experts is not None:
        shape = torch.Size([*shape[:-1], rows.counts.shape[0]])
    check_tensor("probs", probs, FLOATS, rows.slot_of_row.device, shape)


def _take_apart(x: Tensor) -> tuple[Tensor, Codes]:
    plain, codes = take_apart(x)
    if codes.format is not None and Format.of(codes.format).block not in BLOCKS:
        raise ValueError(
            f"a quantised tensor needs its row-wise copy with blocks {', '.join(BLOCKS)}; got {codes.format}"
        )
    return plain, codes


@overload
def permute(x: Rows, rows: RowMap, probs: None = None, *, quantize: None = None) -> Rows: ...
@overload
def permute(x: Rows, rows: RowMap, probs: Tensor, *, quantize: None = None) -> tuple[Rows, Tensor]: ...
@overload
def permute(
    x: Tensor,
    rows: RowMap,
    probs: None = None,
    *,
    quantize: Format | str,
    rowwise: bool = True,
    columnwise: bool = False,
) -> QTensor: ...
@overload
def permute(
    x: Tensor,
    rows: RowMap,
    probs: Tensor,
    *,
    quantize: Format | str,
    rowwise: bool = True,
    columnwise: bool = False,
) -> tuple[QTensor, Tensor]: ...
def permute(
    x: Tensor,
    rows: RowMap,
    probs: Tensor | None = None,
    *,
    quantize: Format | str | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The row of each token, once for each of its experts, in the order of the experts: `y[r] = x[token of row r]`.

    x: [..., K] in bf16, fp16 or fp32, or a `QTensor` with blocks 1x128, mx or row, whose codes and scales are moved as
    they are. `rows` comes from `row_map`. Pads are zeros. Returns y [rows, K]; with `probs` also the probability of
    each row, 0 in pads. From DTensors that are sharded along tokens it takes this rank's tokens; y is a plain tensor.

    - `probs`: [..., slots], or [..., experts] if the rows came from a mask; any float dtype, which is kept.
    - `quantize`: a format with blocks 1x128, mx or row; y is then a `QTensor` with the bytes of `quantize(y)`.
      `rowwise` and `columnwise` choose its copies. `columnwise` is for 1x128 and mx, and wants `align` to be a
      multiple of the block's length, so that no group has rows of two experts.

    >>> import torch, weft
    >>> x, experts = torch.randn(4, 256), torch.tensor([[0, 2], [1, 2], [0, 1], [2, 0]])
    >>> rows = weft.row_map(experts, 3, align=32)
    >>> y, p = weft.permute(x, rows, torch.rand(4, 2), quantize="mx", columnwise=True)
    >>> y.shape, p.shape, rows.offsets.tolist()
    (torch.Size([96, 256]), torch.Size([96]), [32, 64, 96])
    """
    _check_rows(rows)
    x, probs = local_rows("permute", x=x, probs=probs)
    plain, codes = _take_apart(x)
    _check(plain, rows, "x", rows.row_of_slot.shape[:-1])
    _check_probs(probs, rows)
    if codes.format is None:
        options = result_options(plain, quantize, rowwise=rowwise, columnwise=columnwise)
        if options.format is not None:
            _check_format(Format.of(options.format), columnwise, rows.align)
        elif not rowwise:
            raise ValueError("rowwise and columnwise go with quantize=…")
    elif quantize is not None:
        raise ValueError(
            "x is quantised already: leave out quantize= to permute it as it is, or dequantise it first"
        )
    else:
        options = ResultOptions(plain.dtype, codes.format, True, False, None, False)
    o = permute_op(PermuteArgs(plain, codes, probs, rows, options))
    y = o.result.value(options)
    return y if o.row_probs is None else (y, o.row_probs)


def _check_format(f: Format, columnwise: bool, align: int) -> None:
    """Raise an error if permute cannot quantise to this format."""
    if f.block not in BLOCKS:
        raise ValueError(
            f"permute quantises to blocks {', '.join(BLOCKS)}; got {f.block!r}: use weft.quantize on its result"
        )
    if columnwise and align % f.group:
        raise ValueError(
            f"a column-wise copy has groups of {f.group} rows, and with align={align} some would have rows of two "
            f"experts: make the row map with align={f.group}"
        )


@overload
def unpermute(y: Tensor, rows: RowMap, probs: Tensor | None = None, *, carried: None = None) -> Tensor: ...
@overload
def unpermute(
    y: Tensor, rows: RowMap, probs: Tensor | None = None, *, carried: Tensor
) -> tuple[Tensor, Tensor]: ...
def unpermute(
    y: Tensor, rows: RowMap, probs: Tensor | None = None, *, carried: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """The rows of each token's experts, added up: `x[t] = sum over j of probs[t, j] * y[row of slot j of t]`.

    y: [rows, K] in bf16, fp16 or fp32, or a `QTensor` with blocks 1x128, mx or row. Without `probs` all are 1. The sum
    is in fp32, in the order of the slots, rounded once to y's dtype: the same bits every run.
    Returns x [..., K]; with `carried` [rows] also what it holds for each slot, in the shape of probs.

    >>> import torch, weft
    >>> x, experts = torch.randn(4, 256), torch.tensor([[0, 2], [1, 2], [0, 1], [2, 0]])
    >>> rows = weft.row_map(experts, 3, align=16)
    >>> probs = torch.tensor([0.75, 0.25]).expand(4, 2)
    >>> torch.equal(weft.unpermute(weft.permute(x, rows), rows, probs), x)
    True
    """
    _check_rows(rows)
    (probs,) = local_rows("unpermute", probs=probs)
    plain, codes = _take_apart(y)
    if codes.format is not None and Format.of(codes.format).packed == 2:
        raise ValueError(f"unpermute adds up rows of 8-bit codes; dequantise {codes.format} first")
    _check(plain, rows, "y", rows.slot_of_row.shape)
    _check_probs(probs, rows)
    if carried is not None:
        check_tensor("carried", carried, FLOATS, rows.slot_of_row.device, rows.slot_of_row.shape)
    o = unpermute_op(UnpermuteArgs(plain, codes, probs, carried, rows))
    return o.y if o.carried is None else (o.y, o.carried)
