"""Launches of quantize and dequantize: the passes over x that a quantization needs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...quant import Codes, Format
from ...runtime import Capabilities, Launch, capabilities_of, choice, scratch
from ..common.copies import (
    StridedCodes,
    StripeConfig,
    cast_mode,
    copy_arguments,
    count_stripes,
    reduce_amax,
    stripe_config,
)
from ..common.passes import make_copies
from ..common.results import Result, ResultOptions
from ..common.rows import STRIPE, align_of, cpu_tile, flat_rows
from .arguments import DequantizeArgs, DequantizeOutputs, QuantizeArgs, QuantizeOutputs
from .kernels import amax_kernel, dequantize_kernel, quantize_rows_kernel, quantize_stripe_kernel


class RowConfig(NamedTuple):
    """Launch choice of the row kernels: `rows` rows per program, `tile` columns at a time."""

    rows: int
    tile: int
    num_warps: int


@choice("quantize", rows=(1, 64), tile=(128, 4096), num_warps=(1, 16))
def row_config(kernel: str, cols: int, target: Capabilities) -> RowConfig:
    """Return 4096 elements per tile for "quantize" along rows and "dequantize"; on a CPU one row."""
    if target.is_cpu:
        return RowConfig(1, cpu_tile(cols, 128), 4)
    tile = min(max(1 << max(cols - 1, 0).bit_length(), 128), 1024)
    return RowConfig(4096 // tile, tile, 4)


class _Quantize:
    """Passes of one quantize call over its input."""

    def __init__(self, a: QuantizeArgs) -> None:
        assert a.result.format is not None
        self.x = x = flat_rows(a.x)
        self.rows, self.cols = x.shape
        self.format = Format.of(a.result.format)
        self.target = target = capabilities_of(x.device)
        self.align = align_of(self.cols, x.stride(0))
        # The seed's halves are passed as their complements, which are negative: a launch would treat a large positive
        # integer as a size that needs 64 bits, and compile another variant.
        self.seeds = (0, 0) if a.seed is None else (~(a.seed & 0x7FFFFFFF), ~(a.seed >> 31 & 0x7FFFFFFF))
        self.constants = {
            "INPUT_MAX": torch.finfo(x.dtype).max,
            "FORMAT": self.format,
            "CAST": cast_mode(target),
            "STATIC": a.result.scale is not None,
            "STOCHASTIC": a.seed is not None,
        }

    def empty(self, *shape: int) -> Tensor:
        return scratch(shape, torch.float32, self.x.device)

    def amax(self, partials: Tensor) -> Tensor:
        """Return the largest of the partials of each row or column."""
        return torch.amax(partials, 0, out=self.empty(partials.shape[1]))

    @property
    def stripes(self) -> int:
        return count_stripes(self.rows, self.cols)

    @property
    def stripe_config(self) -> StripeConfig:
        return stripe_config("quantize", self.format.block, self.align, self.target)

    @property
    def tiles(self) -> int:
        """Number of tiles per stripe."""
        return -(-self.cols // self.stripe_config.tile)

    def rows_pass(
        self, copy: Codes | None, amax_or_scale: Tensor | None, wants_amax: bool, statistics_ready: bool
    ) -> Tensor | None:
        x, cols = self.x, self.cols
        tile_rows, tile, warps = row_config("quantize", cols, self.target)
        row_programs = 1 if self.format.block == "row" or self.target.is_cpu else -(-cols // tile)
        programs = -(-self.rows // tile_rows) * row_programs
        partials = self.empty(programs) if wants_amax else None
        launch = Launch.of(
            quantize_rows_kernel, num_warps=warps, **self.constants, ROWS=tile_rows, TILE=tile, ALIGN=self.align,
            COLS_MASKED=cols % tile != 0,
        )  # fmt: skip
        launch(
            (programs, 1, 1),
            *quantize_rows_kernel.arguments(
                x_ptr=x, given_ptr=amax_or_scale, amax_ptr=partials, rows=self.rows, cols=cols,
                row_programs=row_programs, x_stride=x.stride(0), copy=copy_arguments(copy),
                seed_low=self.seeds[0], seed_high=self.seeds[1],
            ),
        )  # fmt: skip
        return partials

    def stripes_pass(
        self,
        row: Codes | None,
        col: Codes | None,
        amax_or_scale: Tensor | None,
        wants_amax: bool,
        rotated_amax: Tensor | None = None,
        amax_t: Tensor | None = None,
    ) -> Tensor | None:
        """Run the stripe kernel. `rotated_amax` is the amax of the rotated x; `amax_t` receives the partials."""
        x, rows, cols, stripes, tiles = self.x, self.rows, self.cols, self.stripes, self.tiles
        tile, warps = self.stripe_config
        shape = {"ROWS": STRIPE, "TILE": tile, "ALIGN": self.align, "COLS_MASKED": cols % tile != 0}
        row_amax = col_amax = None
        # Codes need the amax of their whole row and column first.
        if self.format.block == "row":
            row_partials = self.empty(tiles, rows) if row else None
            col_partials = self.empty(stripes, cols)
            amax_launch = Launch.of(amax_kernel, num_warps=warps, **shape)
            amax_launch(
                (stripes * tiles, 1, 1),
                *amax_kernel.arguments(
                    x_ptr=x,
                    row_ptr=row_partials,
                    col_ptr=col_partials,
                    rows=rows,
                    cols=cols,
                    x_stride=x.stride(0),
                ),
            )
            row_amax = None if row_partials is None else self.amax(row_partials)
            col_amax = self.amax(col_partials)
        partials = self.empty(stripes * tiles) if wants_amax else None
        launch = Launch.of(quantize_stripe_kernel, num_warps=warps, **self.constants, **shape)
        launch(
            (stripes * tiles, 1, 1),
            *quantize_stripe_kernel.arguments(
                x_ptr=x, given_ptr=amax_or_scale, given_t_ptr=rotated_amax, row_amax_ptr=row_amax,
                col_amax_ptr=col_amax, amax_ptr=partials, amax_t_ptr=amax_t, rows=rows, cols=cols,
                x_stride=x.stride(0), copy=copy_arguments(row), copy_t=copy_arguments(col), seed_low=self.seeds[0],
                seed_high=self.seeds[1],
            ),
        )  # fmt: skip
        return partials

    def rotated(self, result: Result) -> None:
        """Fill a result whose column-wise copy is rotated: read x once for both amaxes and once for the copies."""
        amax_t = self.empty(self.stripes * self.tiles)
        amax = self.stripes_pass(None, None, None, True, amax_t=amax_t)
        assert amax is not None
        tensor_amax, rotated_amax = self.empty() if result.amax is None else result.amax, self.empty()
        for partials, output, scale in (
            (amax, tensor_amax, result.global_scale),
            (amax_t, rotated_amax, result.global_scale_t),
        ):
            scales = [] if scale is None else [scale]
            reduce_amax(partials, self.format, self.x.dtype, amax=output, scales=scales)
        self.stripes_pass(*result.copies(self.format.spec), tensor_amax, False, rotated_amax=rotated_amax)


def launch_quantize(o: QuantizeOutputs, a: QuantizeArgs) -> None:
    call = _Quantize(a)
    if call.format.hadamard is not None and a.result.columnwise:
        call.rotated(o.result)
        return
    make_copies(
        o.result,
        a.result,
        call.rows_pass,
        call.stripes_pass,
        direct=not call.format.square,
        statistics=False,
        input_dtype=a.x.dtype,
    )


def quantize_into(result: Result, options: ResultOptions, x: Tensor) -> None:
    """Launch the kernels that fill `result` with x's codes, for ops that quantize a plain tensor they computed."""
    launch_quantize(QuantizeOutputs(result), QuantizeArgs(x, options, None))


def launch_dequantize(o: DequantizeOutputs, a: DequantizeArgs) -> None:
    f, rows, cols = Format.of(a.format).stored, a.data.shape[0], a.cols
    data = flat_rows(a.data)
    tile_rows, tile, warps = row_config("dequantize", cols, capabilities_of(data.device))
    launch = Launch.of(
        dequantize_kernel,
        num_warps=warps,
        FORMAT=f,
        ROWS=tile_rows,
        TILE=tile,
        ALIGN=align_of(cols, data.stride(0) * f.packed),
        COLS_MASKED=cols % tile != 0,
    )
    launch(
        (-(-rows // tile_rows) * -(-cols // tile), 1, 1),
        *dequantize_kernel.arguments(
            codes=StridedCodes(data, a.scale, data.stride(0), *a.scale.stride()),
            global_ptr=a.global_scale,
            out_ptr=o.values,
            rows=rows,
            cols=cols,
        ),
    )
