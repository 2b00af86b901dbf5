"""Rows by index, and sums of rows by index: each is the backward of the other.

    gather:    y[t] = scale * table[ids[t]]                            out = round(y), or its codes and scales
    sum_rows:  y[v] = round(scale * sum over t with ids[t] = v of x[t] + onto[v])

Everything is computed in fp32. Of a quantized table, the codes of the rows that are needed are decoded: q * d.

The rows of one id are added in ascending order of t, in parts of 256 rows whose sums are then added in order. So the
bits depend on these rows alone: not on other ids, on the number of threads or on the run. For that the ids are sorted
stably, digit by digit, each digit as `row_map` sorts tokens by expert. Without atomics, each row of the result is
written once, and rows that no id names are not touched if the sums are added onto a tensor in place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from ...quant import PLAIN, Codes, Format, QTensor
from ...quant.copies import check_codes
from ...runtime import LATER, Backward, Gradients, Op, Present, Sharding
from ..common.checks import INTEGERS, check_tensor
from ..common.quantized import register_codes
from ..common.results import allocate_result, plain_result
from .arguments import GatherArgs, GatherOutputs, SumRowsArgs, SumRowsOutputs
from .reference import gather_reference, sum_rows_reference


def _check_ids(ids: Tensor, rows: int) -> None:
    """Raise an error unless ids can be sorted by row: places and rows are int32."""
    if ids.dtype not in INTEGERS:
        raise ValueError(f"ids must be int32 or int64; got {ids.dtype}")
    if max(ids.numel(), rows) >= 2**31:
        raise ValueError(f"at most 2**31 - 1 ids and rows are served; got {ids.numel()} ids, {rows} rows")


class SumRowsOp(Op[SumRowsArgs, SumRowsOutputs], name="sum_rows", variants=32):
    def validate(self, a: SumRowsArgs) -> None:
        _check_ids(a.ids, a.rows)
        if a.ids.shape != a.x.shape[:-1]:
            raise ValueError(
                f"each row of x has an id: {tuple(a.x.shape[:-1])} of them; got {tuple(a.ids.shape)}"
            )
        if a.onto is not None:
            check_tensor("onto", a.onto, (a.dtype,), a.x.device, (a.rows, a.x.shape[-1]))

    def allocate(self, a: SumRowsArgs) -> SumRowsOutputs:
        return SumRowsOutputs(torch.empty(a.rows, a.x.shape[-1], dtype=a.dtype, device=a.x.device))

    def serves_call(self, a: SumRowsArgs) -> bool:
        return self.serves(a.x) and a.rows > 0 and a.dtype is not torch.float64  # kernels add in fp32

    @cached_property
    def launch(self) -> Callable[[SumRowsOutputs, SumRowsArgs], None]:
        from .launch import launch_sum_rows

        return launch_sum_rows

    def reference(self, a: SumRowsArgs) -> SumRowsOutputs:
        return sum_rows_reference(a)

    def keep(self, a: SumRowsArgs, o: SumRowsOutputs) -> GatherArgs:
        ids = a.ids if a.skipped < 0 else a.ids.masked_fill(a.ids == a.skipped, -1)
        options = plain_result(a.x.dtype)
        size = a.first + a.rows
        return GatherArgs(LATER, PLAIN, ids, a.first, size, 0.0, a.scale, -1, False, options)

    def backward(self, b: Backward) -> Gradients:
        kept: GatherArgs = b.kept
        dx = gather_op(kept._replace(table=b.grads.y)).result.y if b.needs.x else None
        return {"x": dx, "onto": b.grads.y if b.needs.onto else None}

    def shard(self, a: SumRowsArgs) -> Sharding:
        reasons = {} if a.onto is None else {"...": "sums of all ranks are added to onto"}
        return Sharding(
            {"x": "... d", "ids": "...", "onto": "v d"},
            {"y": "sum:v d"},
            {"v": "ids count from its first row", **reasons},
        )


sum_rows_op = SumRowsOp()


class GatherOp(Op[GatherArgs, GatherOutputs], name="gather", variants=48):
    def validate(self, a: GatherArgs) -> None:
        if a.table.dim() != 2:
            raise ValueError(f"the table must be [rows, D]; got {tuple(a.table.shape)}")
        rows, cols = a.table.shape
        _check_ids(a.ids, rows)
        check_codes("the table", a.codes, rows, cols)
        if a.moved and (a.codes.data is None or a.result.format != a.codes.format):
            raise ValueError("moved rows are codes of the result's format")

    def allocate(self, a: GatherArgs) -> GatherOutputs:
        return GatherOutputs(allocate_result(a.result, a.table, (*a.ids.shape, a.table.shape[1])))

    def present(self, a: GatherArgs) -> Present:
        return (a.result.present(),)

    def serves_call(self, a: GatherArgs) -> bool:
        return self.serves(a.table) and a.ids.numel() != 0

    @cached_property
    def launch(self) -> Callable[[GatherOutputs, GatherArgs], None]:
        from .launch import launch_gather

        return launch_gather

    def reference(self, a: GatherArgs) -> GatherOutputs:
        return gather_reference(a)

    def keep(self, a: GatherArgs, o: GatherOutputs) -> SumRowsArgs:
        return SumRowsArgs(
            LATER, a.ids, a.table.shape[0], a.first, a.skipped, a.scale, False, a.table.dtype, None
        )

    def backward(self, b: Backward) -> Gradients:
        kept: SumRowsArgs = b.kept
        return {"table": sum_rows_op(kept._replace(x=b.grads.result.y)).y}

    def shard(self, a: GatherArgs) -> Sharding:
        reasons, block = a.result.blocks()
        reasons["v"] = "ids count from its first row. Pass each rank's shard, with shard=weft.VocabShard(...)"
        if a.result.format is not None or a.codes.data is not None:
            reasons["d"] = "blocks extend along it"
        return Sharding({"ids": "...", "table": "v d"}, {"result_y": "... d"}, reasons, block)


gather_op = GatherOp()


def table_codes(q: QTensor) -> Codes:
    """Return the row-wise codes of a quantized table."""
    if q.rowwise is None or q.dim() != 2 or Format.of(q.rowwise.format).hadamard is not None:
        raise ValueError(
            f"rows of {q!r} cannot be read one by one: quantize it with rowwise=True, or dequantize it"
        )
    return q.rowwise


register_codes(gather_op, table=table_codes)
