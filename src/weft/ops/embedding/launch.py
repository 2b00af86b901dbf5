"""Launches of gathered rows and of their sums."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...quant import PLAIN, Codes, Format
from ...runtime import Capabilities, Launch, capabilities_of, choice, scratch
from ..common.copies import StridedCodes, cast_mode, copy_arguments, count_stripes, stripe_config
from ..common.destination import Destination
from ..common.passes import make_copies
from ..common.rows import STRIPE, align_of, contiguous, cpu_tile, flat_rows, tile_warps
from ..moe.row_map.arguments import RowMapArgs, RowMapOutputs
from ..moe.row_map.launch import MapConfig, launch_row_map
from ..quantize.launch import quantize_into
from .arguments import PART, GatherArgs, GatherOutputs, SumRowsArgs, SumRowsOutputs
from .kernels import (
    Sums,
    digit_kernel,
    gather_kernel,
    join_parts_kernel,
    parts_kernel,
    sum_parts_kernel,
)
from .reference import moved_scales

LONGEST_TILE = 16384  # elements of a row with one scale that a program reads at once
DIGIT_BITS = 10  # at most, of a digit by which ids are sorted: a program counts each of its values


class GatherConfig(NamedTuple):
    """Tiling of gathered rows: `rows` per program, `tile` columns at a time."""

    rows: int
    tile: int
    num_warps: int


@choice("gather", rows=(1, 64), tile=(64, LONGEST_TILE), num_warps=(1, 16))
def gather_config(cols: int, coded: bool, by_row: bool, target: Capabilities) -> GatherConfig:
    """Choose tiles of 2048 elements, 16 per thread, along one row if it is long enough; on a CPU within one row.
    `by_row`: a result with a scale for each row needs it whole."""
    smallest = 128 if coded else 64
    whole = max(1 << max(cols - 1, 0).bit_length(), smallest)
    if by_row:
        return GatherConfig(1, whole, tile_warps(whole, target))
    if target.is_cpu:
        return GatherConfig(1, cpu_tile(cols, smallest), 4)
    tile = min(whole, 2048)
    return GatherConfig(2048 // tile, tile, 128 // target.warp_size)


class SumConfig(NamedTuple):
    """Tiling of sums of rows: `tile` columns per program, `at_once` rows loaded before the first is added."""

    tile: int
    at_once: int
    num_warps: int


@choice("sum_rows", tile=(64, 8192), at_once=(1, 16), num_warps=(1, 16))
def sum_config(cols: int, target: Capabilities) -> SumConfig:
    if target.is_cpu:
        return SumConfig(cpu_tile(cols), 1, 1)
    tile = min(max(1 << max(cols - 1, 0).bit_length(), 128), 1024)
    return SumConfig(tile, 4, max(tile // (8 * target.warp_size), 1))


@choice("sort_ids", block=(64, 4096), num_warps=(1, 16))
def sort_config(target: Capabilities) -> MapConfig:
    return MapConfig(512, 4)


# ---- gathered rows --------------------------------------------------------------------------------------


class _Gather:
    """Passes of one call over the rows of its table."""

    def __init__(self, a: GatherArgs) -> None:
        self.args, self.ids = a, contiguous(a.ids)
        self.rows, self.cols = a.table.shape
        self.target = capabilities_of(a.table.device)
        self.format = None if a.codes.data is None else Format.of(a.codes.format).stored
        self.table, self.stride = self._table(a)

    def _table(self, a: GatherArgs) -> tuple[StridedCodes, int]:
        """Return the table as a kernel reads it, and the stride of its rows in elements."""
        if self.format is None:
            table = flat_rows(a.table)
            return StridedCodes(table, None, table.stride(0), 0, 0), table.stride(0)
        data, scale = flat_rows(a.codes.data), a.codes.scale
        codes = StridedCodes(data, scale, data.stride(0), scale.stride(0), scale.stride(1))
        return codes, data.stride(0) * self.format.packed

    def run(
        self,
        y: Tensor | None,
        row: Codes | None = None,
        col: Codes | None = None,
        amax: Tensor | None = None,
        wants_amax: bool = False,
        stripes: bool = False,
    ) -> Tensor | None:
        """Launch a pass; return the amax of each of its programs if wanted."""
        a, count, cols = self.args, self.ids.numel(), self.cols
        format = Format.of(a.result.format) if y is None and a.result.format is not None else None
        align = align_of(cols, self.stride)
        coded, by_row = (self.format or format) is not None, format is not None and format.block == "row"
        rows, tile, warps = gather_config(cols, coded, by_row, self.target)
        if format is not None and stripes:
            tile, warps = stripe_config("gather", format.block, align, self.target)
            rows = STRIPE
        blocks = count_stripes(count, cols) if stripes else -(-count // rows)
        tiles = -(-cols // tile)
        programs = blocks * tiles
        launch = Launch.of(
            gather_kernel,
            num_warps=warps,
            TABLE=self.format,
            SAME=y is not None and self.format is None and a.scale == 1.0 and y.dtype is a.table.dtype,
            FORMAT=format,
            CAST=cast_mode(self.target),
            ROWS=rows,
            TILE=tile,
            ALIGN=align,
            COLS_MASKED=cols % tile != 0,
        )
        partials = None
        if wants_amax:
            partials = scratch((programs,), torch.float32, self.ids.device)
        launch(
            (programs, 1, 1),
            *gather_kernel.arguments(
                ids_ptr=self.ids,
                table=self.table,
                global_ptr=a.codes.global_scale,
                y_ptr=y,
                to=Destination(amax, partials, copy_arguments(row), copy_arguments(col)),
                count=count,
                rows=self.rows,
                cols=cols,
                first=a.first,
                size=a.size,
                tiles=tiles,
                scale=a.scale,
                outside=a.outside,
            ),
        )
        return partials

    def rows_pass(
        self, copy: Codes | None, scale_source: Tensor | None, wants_amax: bool, has_stats: bool
    ) -> Tensor | None:
        return self.run(None, copy, None, scale_source, wants_amax)

    def stripes_pass(
        self, row: Codes | None, col: Codes | None, scale_source: Tensor | None, wants_amax: bool
    ) -> Tensor | None:
        return self.run(None, row, col, scale_source, wants_amax, stripes=True)


def _move(o: GatherOutputs, a: GatherArgs) -> None:
    """Move codes and scales unchanged: codes as rows of bytes."""
    data, moved = a.codes.data, o.result.scale
    assert moved is not None
    assert o.result.data is not None
    as_bytes = a._replace(table=data.view(torch.uint8), codes=PLAIN, scale=1.0, outside=0.0)
    _Gather(as_bytes).run(o.result.data.view(torch.uint8))
    if o.result.global_scale is not None and a.codes.global_scale is not None:
        o.result.global_scale.copy_(a.codes.global_scale)
    moved.copy_(moved_scales(a))


def launch_gather(o: GatherOutputs, a: GatherArgs) -> None:
    if a.moved:
        _move(o, a)
    elif a.result.format is None:
        _Gather(a).run(o.result.y)
    else:
        call, block = _Gather(a), Format.of(a.result.format).block
        if block == "row" and call.cols > LONGEST_TILE:
            y = scratch((call.ids.numel(), call.cols), torch.float32, call.ids.device)
            call.run(y)
            return quantize_into(o.result, a.result, y)
        make_copies(
            o.result, a.result, call.rows_pass, call.stripes_pass, direct=block != "128x128", statistics=False
        )


# ---- sums -----------------------------------------------------------------------------------------------


class _Sorted(NamedTuple):
    """Ids in ascending order."""

    order: Tensor | None  # int32 [count]: their places, or None if the ids were sorted
    row: Tensor  # int32 [count]: their rows


def _digits(rows: int) -> list[tuple[int, int]]:
    """Return (divisor, values) of the digits of a row's number, the lowest first."""
    bits = max((rows - 1).bit_length(), 1)
    step = -(-bits // -(-bits // DIGIT_BITS))
    return [(1 << low, 1 << min(step, bits - low)) for low in range(0, bits, step)]


class _Sorting:
    """Kernels that bring the rows of one call in order."""

    def __init__(self, a: SumRowsArgs) -> None:
        self.args, self.ids = a, contiguous(a.ids)
        self.count = self.ids.numel()
        self.target = capabilities_of(a.x.device)
        self.block, self.warps = sort_config(self.target)
        self.grid = (-(-self.count // self.block), 1, 1)

    def empty(self, count: int) -> Tensor:
        return scratch((count,), torch.int32, self.ids.device)

    def sorted(self) -> _Sorted:
        """Sort the ids by their rows, digit by digit. Equal ids keep their order."""
        rows, is_sorted, early, late = self.args.rows, self.args.is_sorted, None, None
        for divisor, values in [] if is_sorted else _digits(rows):
            early, keys = self.in_order(early, late, divisor, values, -1)
            late = self.places(keys, values)
        return _Sorted(*self.in_order(early, late, 1, rows, rows))

    def in_order(
        self, early: Tensor | None, late: Tensor | None, divisor: int, digits: int, missing: int
    ) -> tuple[Tensor | None, Tensor]:
        """Return the order that `late` makes of the order `early`, and a digit of the rows in it."""
        order, digit = None if late is None else self.empty(self.count), self.empty(self.count)
        Launch.of(digit_kernel, num_warps=self.warps, BLOCK=self.block)(
            self.grid,
            *digit_kernel.arguments(
                ids_ptr=self.ids,
                early_ptr=early,
                late_ptr=late,
                order_ptr=order,
                digit_ptr=digit,
                count=self.count,
                rows=self.args.rows,
                first=self.args.first,
                skipped=self.args.skipped,
                divisor=divisor,
                digits=digits,
                missing=missing,
            ),
        )
        return order, digit

    def places(self, keys: Tensor, values: int) -> Tensor:
        """Return the places of keys in ascending order, as those of tokens sorted by expert; -1 after the last."""
        places = self.empty(self.count)
        unused = self.empty(self.count), places, self.empty(values), self.empty(values)
        launch_row_map(RowMapOutputs(*unused, None), RowMapArgs(keys.unsqueeze(1), values, 1, 1, self.count))
        return places

    def parts(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lengths of the parts that begin at each place, and where their sums go."""
        part = self.empty(self.count)
        target = scratch((self.count,), torch.int64, row.device)
        Launch.of(parts_kernel, num_warps=self.warps, BLOCK=self.block)(
            self.grid,
            *parts_kernel.arguments(
                row_ptr=row, part_ptr=part, target_ptr=target, count=self.count, rows=self.args.rows
            ),
        )
        return part, target


def launch_sum_rows(o: SumRowsOutputs, a: SumRowsArgs) -> None:
    if a.onto is None:
        o.y.zero_()
    elif a.onto is not o.y:
        o.y.copy_(a.onto)
    call, x = _Sorting(a), flat_rows(a.x)
    cols, count = x.shape[1], call.count
    order, row = call.sorted()
    part, target = call.parts(row)
    tile, at_once, warps = sum_config(cols, call.target)
    tiles, parts = -(-cols // tile), -(-count // PART)
    partial = scratch((2 * parts, cols), torch.float32, x.device)
    align = align_of(cols, x.stride(0))
    y = Sums(o.y, None if a.onto is None else o.y, a.rows)
    Launch.of(sum_parts_kernel, num_warps=warps, AT_ONCE=at_once, TILE=tile, ALIGN=align)(
        (count * tiles, 1, 1),
        *sum_parts_kernel.arguments(
            x_ptr=x,
            order_ptr=order,
            part_ptr=part,
            target_ptr=target,
            partial_ptr=partial,
            y=y,
            count=count,
            cols=cols,
            tiles=tiles,
            x_stride=x.stride(0),
            scale=a.scale,
        ),
    )
    if parts > 1:  # else no row has several parts
        Launch.of(join_parts_kernel, num_warps=warps, TILE=tile, ALIGN=align)(
            (parts * tiles, 1, 1),
            *join_parts_kernel.arguments(
                row_ptr=row,
                target_ptr=target,
                partial_ptr=partial,
                y=y,
                count=count,
                cols=cols,
                tiles=tiles,
                scale=a.scale,
            ),
        )
