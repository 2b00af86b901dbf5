"""Permute and unpermute: move the rows of tokens to their experts and back, by the indices of a `RowMap`.

    permute:    y[r] = x[token of slot_of_row[r]], 0 in pads          row_probs[r] = probs[slot_of_row[r]]
    unpermute:  y[t] = round(sum over j = 0, 1, ... of probs[t, j] * rows[row_of_slot[t, j]])

Each is the backward of the other. With probs, the gradients of unpermute are

    drows[r] = round(probs[s] * dy[t])     dprobs[t, j] = round(sum over columns of dy[t] * rows[row_of_slot[t, j]])

permute copies bits. unpermute sums in fp32, with one fused multiply-add per slot in the order of the slots, and rounds
the sum once to the dtype of the result. drows is the fp32 product, rounded once. A quantized result has the bytes that
`quantize` produces for the permuted rows, including pads. If x is quantized, codes and scales are moved unchanged, and
pads get the code 0 with the scale 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from ....quant import PLAIN, Codes, Format, QTensor
from ....quant.copies import check_codes
from ....quant.straight import take_apart
from ....runtime import LATER, Backward, Gradients, Op, Present, later, local_rows
from ...common.checks import FLOATS, check_input, check_tensor
from ...common.into import result_into, results_in, run_into
from ...common.quantized import register_codes, rowwise_codes
from ...common.results import ResultOptions, allocate_result, plain_result, result_options
from ..row_map.arguments import RowMap
from .arguments import (
    PermuteArgs,
    PermuteOutputs,
    UnpermuteArgs,
    UnpermuteBackwardArgs,
    UnpermuteGradients,
    UnpermuteOutputs,
)
from .reference import permute_reference, to_rows, to_slots, unpermute_backward_reference, unpermute_reference

# ---- registration ---------------------------------------------------------------------------------------

BLOCKS = ("1x128", "mx", "row")  # blocks that lie within one row


def _validate_codes(codes: Codes, rows: int, cols: int, *, moved: bool = False) -> None:
    """Raise an error for codes that the kernels would misread. `moved`: they are moved, not decoded."""
    check_codes("the tensor", codes, rows, cols)
    if codes.data is not None and not _readable(Format.of(codes.format), moved=moved):
        raise ValueError(
            f"rows in {codes.format} cannot be {'moved' if moved else 'summed'}: dequantize them"
        )


def _readable(f: Format, *, moved: bool) -> bool:
    """Return whether kernels can move (`moved`) or decode rows of a format: its blocks must lie within a row."""
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
            dprobs = torch.empty(probs.shape, dtype=probs.dtype, device=dy.device)
        return UnpermuteGradients(drows, dprobs)

    @cached_property
    def launch(self) -> Callable[[UnpermuteGradients, UnpermuteBackwardArgs], None]:
        from .launch import launch_unpermute_backward

        return launch_unpermute_backward

    def reference(self, a: UnpermuteBackwardArgs) -> UnpermuteGradients:
        return unpermute_backward_reference(a)


unpermute_backward_op = UnpermuteBackwardOp()


class PermuteOp(
    Op[PermuteArgs, PermuteOutputs], name="permute", variants=24, differentiable=("result_y", "row_probs")
):
    def validate(self, a: PermuteArgs) -> None:
        cols = a.x.shape[-1]
        _validate_codes(a.codes, a.x.numel() // cols if cols else 0, cols, moved=True)
        if a.codes.data is not None and a.result.format != a.codes.format:
            raise ValueError(
                f"rows in {a.codes.format} are moved unchanged: dequantize them for another result"
            )

    def allocate(self, a: PermuteArgs) -> PermuteOutputs:
        rows, probs = a.map.slot_of_row.shape[0], a.probs
        row_probs = None if probs is None else torch.empty(rows, dtype=probs.dtype, device=a.x.device)
        return PermuteOutputs(allocate_result(a.result, a.x, (rows, a.x.shape[-1])), row_probs)

    def present(self, a: PermuteArgs) -> Present:
        return a.result.present(), a.probs is not None

    @cached_property
    def launch(self) -> Callable[[PermuteOutputs, PermuteArgs], None]:
        from .launch import launch_permute

        return launch_permute

    def reference(self, a: PermuteArgs) -> PermuteOutputs:
        return permute_reference(a)

    def keep(self, a: PermuteArgs, o: PermuteOutputs) -> Any:
        return a.map

    def backward(self, b: Backward) -> Gradients:
        map: RowMap = b.kept
        drows = b.grads.result.y if b.needs.x else None
        dprobs = b.grads.row_probs if b.needs.probs else None
        if drows is not None:
            o = unpermute_op(UnpermuteArgs(drows, PLAIN, None, dprobs, map))
            return {"x": o.y, "probs": o.carried}
        return {"probs": None if dprobs is None else to_slots(dprobs, map)}


permute_op = PermuteOp()


class UnpermuteOp(
    Op[UnpermuteArgs, UnpermuteOutputs], name="unpermute", variants=24, differentiable=("y", "carried")
):
    def validate(self, a: UnpermuteArgs) -> None:
        return _validate_codes(a.codes, a.rows.shape[0], a.rows.shape[-1])

    def allocate(self, a: UnpermuteArgs) -> UnpermuteOutputs:
        lead, device, carried = a.map.row_of_slot.shape[:-1], a.rows.device, None
        if a.carried is not None:
            shape = a.map.row_of_slot.shape if a.map.experts is None else (*lead, a.map.counts.shape[0])
            carried = torch.empty(shape, dtype=a.carried.dtype, device=device)
        return UnpermuteOutputs(
            torch.empty(*lead, a.rows.shape[-1], dtype=a.rows.dtype, device=device), carried
        )

    def present(self, a: UnpermuteArgs) -> Present:
        return True, a.carried is not None

    @cached_property
    def launch(self) -> Callable[[UnpermuteOutputs, UnpermuteArgs], None]:
        from .launch import launch_unpermute

        return launch_unpermute

    def reference(self, a: UnpermuteArgs) -> UnpermuteOutputs:
        return unpermute_reference(a)

    def keep(self, a: UnpermuteArgs, o: UnpermuteOutputs) -> UnpermuteBackwardArgs:
        if a.probs is not None and a.probs.requires_grad:
            rows, codes = (a.rows if a.codes.data is None else None), a.codes
        else:
            rows, codes = None, PLAIN
        return UnpermuteBackwardArgs(LATER, rows, codes, a.probs, a.map, later(UnpermuteGradients))  # type: ignore[arg-type]

    def backward(self, b: Backward) -> Gradients:
        saved: UnpermuteBackwardArgs = b.kept
        dy, dcarried = b.grads.y, b.grads.carried if b.needs.carried else None
        needs = UnpermuteGradients(b.needs.rows, b.needs.probs)
        gradients: Gradients = {}
        if dy is not None and saved.probs is not None and any(needs):
            gradients = unpermute_backward_op(saved._replace(dy=dy, needs=needs))._asdict()
        elif dy is not None and needs.rows:
            o = permute_op(PermuteArgs(dy, PLAIN, dcarried, saved.map, plain_result(dy.dtype)))
            return {"rows": o.result.y, "carried": o.row_probs}
        if dcarried is not None:
            gradients["carried"] = to_rows(dcarried, saved.map)
        return gradients


unpermute_op = UnpermuteOp()


def _movable_codes(q: QTensor) -> Codes:
    """Return the codes of rows to move unchanged: decoding them would lead to a second quantization."""
    codes = rowwise_codes(q) if _readable(q.format, moved=True) else None
    if codes is None:
        raise ValueError(
            f"permute moves rowwise codes with blocks {', '.join(BLOCKS)}; got {q!r}: dequantize it"
        )
    return codes


def _decodable_codes(q: QTensor) -> Codes | None:
    return rowwise_codes(q) if _readable(q.format, moved=False) else None


register_codes(permute_op, x=_movable_codes)


register_codes(unpermute_op, rows=_decodable_codes)


register_codes(unpermute_backward_op, rows=_decodable_codes)


# ---- public functions -----------------------------------------------------------------------------------

Rows = TypeVar("Rows", Tensor, QTensor)


def _check(x: Tensor, rows: RowMap, name: str, leading: torch.Size) -> None:
    check_input(name, x)
    if x.shape[:-1] != leading:
        raise ValueError(
            f"{name} must be [{', '.join(map(str, leading))}, K] for these rows; got {tuple(x.shape)}"
        )
    if x.device != rows.slot_of_row.device:
        raise ValueError(f"{name} is on {x.device}, the row map on {rows.slot_of_row.device}")


def _check_rows(rows: RowMap) -> None:
    if not isinstance(rows, RowMap):
        raise TypeError(
            f"rows must be a weft.RowMap; got a {type(rows).__name__}. Make one from the experts' indices: "
            "weft.row_map(indices, experts)"
        )


def _check_probs(probs: Tensor | None, rows: RowMap) -> None:
    if probs is None:
        return
    shape = rows.row_of_slot.shape
    if rows.experts is not None:
        shape = torch.Size([*shape[:-1], rows.counts.shape[0]])
    check_tensor("probs", probs, FLOATS, rows.slot_of_row.device, shape)


def _split_codes(x: Tensor) -> tuple[Tensor, Codes]:
    plain, codes = take_apart(x)
    if codes.format is not None and Format.of(codes.format).block not in BLOCKS:
        raise ValueError(
            f"a quantized tensor needs a rowwise copy with blocks {', '.join(BLOCKS)}; got {codes.format}"
        )
    return plain, codes


@overload
def permute(
    x: Rows, rows: RowMap, probs: None = None, *, quantize: None = None, out: Rows | None = None
) -> Rows: ...


@overload
def permute(
    x: Rows,
    rows: RowMap,
    probs: Tensor,
    *,
    quantize: None = None,
    out: tuple[Rows | None, Tensor | None] | None = None,
) -> tuple[Rows, Tensor]: ...


@overload
def permute(
    x: Tensor,
    rows: RowMap,
    probs: None = None,
    *,
    quantize: Format | str,
    rowwise: bool = True,
    columnwise: bool = False,
    out: QTensor | None = None,
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
    out: tuple[QTensor | None, Tensor | None] | None = None,
) -> tuple[QTensor, Tensor]: ...


def permute(
    x: Tensor,
    rows: RowMap,
    probs: Tensor | None = None,
    *,
    quantize: Format | str | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    out: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Copy each token's row once per expert of the token, sorted by expert: `y[r] = x[token of row r]`.

    Also known as MoE permute, token dispatch.

    x: [..., K] in bf16, fp16 or fp32, or a `QTensor` with blocks 1x128, mx or row, whose codes and scales are moved
    unchanged. `rows` comes from `row_map`. Pads are zeros. Returns y [rows, K], and with `probs` also the probability
    of each row, 0 in pads. For DTensors sharded along tokens, y is a plain tensor of this rank's tokens.

    - `probs`: [..., slots], or [..., experts] if the rows came from a mask; any float dtype, which is preserved.
    - `quantize`: a format with blocks 1x128, mx or row; y is then a `QTensor` with the bytes of `quantize(y)`.
      `rowwise` and `columnwise` select its copies. `columnwise` is for 1x128 and mx, and needs an `align` that is a
      multiple of the block's length, so that no block has rows of two experts.
    - `out`: write y to this contiguous tensor or `QTensor`; not with autograd. With `probs` a pair of y and the
      probabilities, each of which may be None for a new one.

    >>> import torch, weft
    >>> x, experts = torch.randn(4, 256), torch.tensor([[0, 2], [1, 2], [0, 1], [2, 0]])
    >>> rows = weft.row_map(experts, 3, align=32)
    >>> y, p = weft.permute(x, rows, torch.rand(4, 2), quantize="mx", columnwise=True)
    >>> y.shape, p.shape, rows.offsets.tolist()
    (torch.Size([96, 256]), torch.Size([96]), [32, 64, 96])
    """
    _check_rows(rows)
    x, probs = local_rows("permute", x=x, probs=probs)
    plain, codes = _split_codes(x)
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
            "x is already quantized: leave out quantize= to permute it unchanged, or dequantize it first"
        )
    else:
        options = ResultOptions(plain.dtype, codes.format, True, False, None, False)
    args = PermuteArgs(plain, codes, probs, rows, options)
    into, row_probs = None, None
    if out is None:
        o = permute_op(args)
    else:
        into, *more = results_in(out, "y", *["row_probs"] * (probs is not None))
        row_probs = more[0] if more else None
        o = result_into(permute_op, args, into, row_probs=row_probs)
    y = o.result.value(options) if into is None else into
    return y if o.row_probs is None else (y, o.row_probs)


def _check_format(f: Format, columnwise: bool, align: int) -> None:
    """Raise an error if permute cannot quantize to this format."""
    if f.block not in BLOCKS:
        raise ValueError(
            f"permute quantizes to blocks {', '.join(BLOCKS)}; got {f.block!r}: use weft.quantize on its result"
        )
    if columnwise and align % f.group:
        raise ValueError(
            f"a columnwise copy has blocks of {f.group} rows, and with align={align} some would have rows of two "
            f"experts: make the row map with align={f.group}"
        )


@overload
def unpermute(
    y: Tensor, rows: RowMap, probs: Tensor | None = None, *, carried: None = None, out: Tensor | None = None
) -> Tensor: ...


@overload
def unpermute(
    y: Tensor,
    rows: RowMap,
    probs: Tensor | None = None,
    *,
    carried: Tensor,
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]: ...


def unpermute(
    y: Tensor,
    rows: RowMap,
    probs: Tensor | None = None,
    *,
    carried: Tensor | None = None,
    out: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sum the rows of each token's experts: `x[t] = sum over j of probs[t, j] * y[row of slot j of t]`.

    Also known as MoE combine.

    y: [rows, K] in bf16, fp16 or fp32, or a `QTensor` with blocks 1x128, mx or row. rows: the map of `row_map` that
    `permute` used. Without `probs` all are 1. The sum is in fp32, in the order of the slots, rounded once to y's
    dtype: the same bits every run. Returns x [..., K], and with `carried` [rows] also its value for each slot, in the
    shape of probs. out: a contiguous tensor to write x to, or with `carried` a pair, each of which
    may be None for a new one; not with autograd.

    >>> import torch, weft
    >>> x, experts = torch.randn(4, 256), torch.tensor([[0, 2], [1, 2], [0, 1], [2, 0]])
    >>> rows = weft.row_map(experts, 3, align=16)
    >>> probs = torch.tensor([0.75, 0.25]).expand(4, 2)
    >>> torch.equal(weft.unpermute(weft.permute(x, rows), rows, probs), x)
    True
    """
    _check_rows(rows)
    (probs,) = local_rows("unpermute", probs=probs)
    plain, codes = _split_codes(y)
    if codes.format is not None and Format.of(codes.format).packed == 2:
        raise ValueError(f"unpermute sums rows of 8-bit codes; dequantize {codes.format} first")
    _check(plain, rows, "y", rows.slot_of_row.shape)
    _check_probs(probs, rows)
    if carried is not None:
        check_tensor("carried", carried, FLOATS, rows.slot_of_row.device, rows.slot_of_row.shape)
    args = UnpermuteArgs(plain, codes, probs, carried, rows)
    if out is None:
        o = unpermute_op(args)
    else:
        targets = dict(
            zip(("y", "carried"), results_in(out, "x", *["carried"] * (carried is not None)), strict=False)
        )
        o = run_into(unpermute_op, args, targets)
    return o.y if o.carried is None else (o.y, o.carried)
