"""References of gathered rows and of their sums in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...quant.copies import scale_room
from ...quant.formats import Format
from ...quant.qtensor import stand_in
from ...quant.reference import dequantize_copy
from ..common.results import Result, result_reference
from ..common.rows import compute_dtype
from .arguments import GatherArgs, GatherOutputs, SumRowsArgs, SumRowsOutputs


def _picked(table: Tensor, row: Tensor, other: float) -> Tensor:
    """Return rows [N, D] of a table, and `other` where the number of the row is negative."""
    if table.shape[0] == 0:
        return table.new_full((*row.shape, *table.shape[1:]), other)
    return table[row.clamp(min=0)].masked_fill((row < 0)[:, None], other)


def _row_of(a: GatherArgs) -> Tensor:
    """Return the row of each id, [N]; -1 where the table has none."""
    row = a.ids.flatten().long() - a.first
    return torch.where((row >= 0) & (row < a.table.shape[0]), row, -1)


def moved_scales(a: GatherArgs) -> Tensor:
    """Return the scales [N, ...] of rows of codes; 1 where the table has no row."""
    scale, row = a.codes.scale, _row_of(a)
    bits = scale.view(torch.int32 if scale.element_size() == 4 else torch.uint8)
    one = torch.ones(1, dtype=torch.float32, device=scale.device).to(scale.dtype).view(bits.dtype)
    return torch.where((row >= 0)[:, None], _picked(bits, row, 0), one).view(scale.dtype)


def gather_reference(a: GatherArgs) -> GatherOutputs:
    """Define the outputs of the op."""
    ids, row, (rows, cols) = a.ids.flatten().long(), _row_of(a), a.table.shape
    shape = (*a.ids.shape, cols)
    if a.moved:
        scale = scale_room(Format.of(a.codes.format), len(row), cols).allocate(row.device)
        codes = a.codes._replace(
            data=_picked(a.codes.data.view(torch.uint8), row, 0).view(a.codes.data.dtype),
            scale=scale.copy_(moved_scales(a)),
            global_scale=None if a.codes.global_scale is None else a.codes.global_scale.clone(),
        )
        return GatherOutputs(Result.of(stand_in(a.table, shape, a.result.dtype), (codes, None), None))
    dtype = compute_dtype(a.table)
    table = a.table if a.codes.data is None else dequantize_copy(a.codes, (rows, cols), dtype)
    y = _picked(table, row, 0).to(dtype) * a.scale
    y = y.masked_fill(((ids < 0) | (ids >= a.size))[:, None], a.outside)
    return GatherOutputs(result_reference(a.result, y, shape, a.table))


def sum_rows_reference(a: SumRowsArgs) -> SumRowsOutputs:
    """Define the output of the op, but for the order in which fp32 sums are added."""
    cols, dtype = a.x.shape[-1], compute_dtype(a.x)
    ids = a.ids.flatten().long()
    row = torch.where(ids == a.skipped, -1, ids - a.first)
    row = torch.where((row >= 0) & (row < a.rows), row, a.rows)
    sums = torch.zeros(a.rows + 1, cols, dtype=dtype, device=a.x.device)
    y = sums.index_add_(0, row, a.x.reshape(len(row), cols).to(dtype))[:-1] * a.scale
    return SumRowsOutputs((y if a.onto is None else a.onto + y).to(a.dtype))
