"""Reference of permute and unpermute in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ....quant import Codes, Format
from ....quant.copies import scale_room
from ....quant.qtensor import stand_in
from ....quant.reference import dequantize_copy
from ...common.results import Result
from ...common.rows import compute_dtype
from ...quantize.arguments import QuantizeArgs
from ...quantize.reference import quantize_reference
from ..row_map.arguments import RowMap
from .arguments import (
    PermuteArgs,
    PermuteOutputs,
    UnpermuteArgs,
    UnpermuteBackwardArgs,
    UnpermuteGradients,
    UnpermuteOutputs,
)


def _gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Return rows[index] along the first dimension, zero where the index is negative."""
    if rows.shape[0] == 0:
        return rows.new_zeros((*index.shape, *rows.shape[1:]))
    gathered = rows[index.clamp(min=0)]
    missing = (index < 0).view(*index.shape, *[1] * (rows.dim() - 1))
    return gathered.masked_fill(missing, 0)


def _slot_probs(probs: Tensor, map: RowMap) -> Tensor:
    """Return the probability of each slot, [tokens * slots]; undefined for a slot without an expert."""
    if map.experts is None:
        return probs.flatten()
    experts = _by_token(map.experts).long().clamp(min=0)
    return probs.reshape(len(experts), probs.shape[-1]).gather(1, experts).flatten()


def _by_token(per_slot: Tensor) -> Tensor:
    """Reshape to [tokens, slots]."""
    slots = per_slot.shape[-1]
    return per_slot.reshape(per_slot.numel() // slots, slots)


def to_rows(probs: Tensor, map: RowMap) -> Tensor:
    """Return the probability of each row's slot, 0 in pads."""
    return _gather_rows(_slot_probs(probs, map), map.slot_of_row.long())


def to_slots(carried: Tensor, map: RowMap) -> Tensor:
    """Return values of rows [rows] as values of their slots, in the shape of probs."""
    return _to_experts(_gather_rows(carried, map.row_of_slot.long()), map)


def _to_experts(per_slot: Tensor, map: RowMap) -> Tensor:
    """Scatter values of slots [..., slots] to experts [..., experts] if the routing was a mask, else return them."""
    if map.experts is None:
        return per_slot
    # An extra column collects the slots without a row.
    experts = map.counts.shape[0]
    dense = per_slot.new_zeros((*per_slot.shape[:-1], experts + 1))
    where = torch.where(map.row_of_slot < 0, experts, map.experts).long()
    return dense.scatter_(-1, where, per_slot)[..., :experts].contiguous()


def _token_of_row(map: RowMap) -> Tensor:
    slot = map.slot_of_row.long()
    return torch.where(slot < 0, -1, slot // map.row_of_slot.shape[-1])


def _moved_codes(codes: Codes, token: Tensor, cols: int) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of each row; a pad has codes 0 and scales 1."""
    data = _gather_rows(codes.data.view(torch.uint8), token).view(codes.data.dtype)
    scale = scale_room(Format.of(codes.format), len(token), cols).allocate(data.device)
    kind, one = (torch.uint8, 127) if scale.element_size() == 1 else (torch.float32, 1.0)
    scale.view(kind).copy_(_gather_rows(codes.scale.view(kind), token).masked_fill((token < 0)[:, None], one))
    return data, scale


def _values(rows: Tensor | None, codes: Codes, cols: int, dtype: torch.dtype) -> Tensor:
    """Return the elements of the rows, dequantized if the rows are codes."""
    if codes.data is None:
        assert rows is not None
        return rows.to(dtype)
    return dequantize_copy(codes, (codes.data.shape[0], cols), torch.float32).to(dtype)


def unpermute_backward_reference(a: UnpermuteBackwardArgs) -> UnpermuteGradients:
    cols, dtype = a.dy.shape[-1], compute_dtype(a.dy)
    index = _by_token(a.map.row_of_slot).long()
    dy = a.dy.reshape(len(index), cols).to(dtype)
    drows = dprobs = None
    if a.needs.rows:
        token = _token_of_row(a.map)
        weight = to_rows(a.probs, a.map).to(dtype)
        drows = _gather_rows(dy, token) * weight[:, None]
        drows = drows.masked_fill((token < 0)[:, None], 0).to(a.dy.dtype)
    if a.needs.probs:
        values = _values(a.rows, a.codes, cols, dtype)
        dots = torch.stack(
            [(_gather_rows(values, index[:, j]) * dy).sum(1) for j in range(index.shape[1])], 1
        )
        dots = dots.masked_fill(index < 0, 0).to(a.probs.dtype).view(a.map.row_of_slot.shape)
        dprobs = _to_experts(dots, a.map)
    return UnpermuteGradients(drows, dprobs)


def permute_reference(a: PermuteArgs) -> PermuteOutputs:
    """Define the outputs of permute."""
    token, cols = _token_of_row(a.map), a.x.shape[-1]
    if a.codes.data is not None:
        result = Result(stand_in(a.x, (len(token), cols)), *_moved_codes(a.codes, token, cols))
    else:
        y = _gather_rows(a.x.reshape(len(_by_token(a.map.row_of_slot)), cols), token)
        plain = a.result.format is None
        result = Result(y) if plain else quantize_reference(QuantizeArgs(y, a.result, None)).result
    return PermuteOutputs(result, None if a.probs is None else to_rows(a.probs, a.map))


def unpermute_reference(a: UnpermuteArgs) -> UnpermuteOutputs:
    """Define the outputs of unpermute."""
    cols, dtype = a.rows.shape[-1], compute_dtype(a.rows)
    values = _values(a.rows, a.codes, cols, dtype)
    index = _by_token(a.map.row_of_slot).long()
    weights = None if a.probs is None else _slot_probs(a.probs, a.map).view(index.shape).to(dtype)
    y = torch.zeros((len(index), cols), dtype=dtype, device=a.rows.device)
    for j in range(index.shape[1]):
        term = _gather_rows(values, index[:, j])
        if weights is not None:
            term = torch.where((index[:, j] < 0)[:, None], term, term * weights[:, j, None])
        y = y + term
    return UnpermuteOutputs(
        y.to(a.rows.dtype).view(*a.map.row_of_slot.shape[:-1], cols),
        None if a.carried is None else to_slots(a.carried, a.map),
    )
