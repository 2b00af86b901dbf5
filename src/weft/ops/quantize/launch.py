"""How many passes over x a quantization takes, and the launches of each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...quant import Codes, Format
from ...runtime import Capabilities, Launch, capabilities_of, choice
from ..common.copies import StripeConfig, cast_mode, copy_arguments, count_stripes, reduce_amax, stripe_config
from ..common.passes import make_copies
from ..common.results import Result, ResultOptions
from ..common.rows import STRIPE, align_of, cpu_tile, flat_rows
from .arguments import DequantizeArgs, DequantizeOutputs, QuantizeArgs, QuantizeOutputs
from .kernels import amax_kernel, dequantize_kernel, quantize_rows_kernel, quantize_stripe_kernel


class RowConfig(NamedTuple):
    """A tile of rows: `rows` of them, `tile` columns at a time."""

    rows: int
    tile: int
    num_warps: int


@choice("quantize", rows=(1, 64), tile=(128, 4096), num_warps=(1, 16))
def row_config(kernel: str, cols: int, target: Capabilities) -> RowConfig:
    """For "quantize" along rows or "dequantize": 4096 numbers, or on a CPU one row."""
    if target.is_cpu:
        return RowConfig(1, cpu_tile(cols, 128), 4)
    tile = min(max(1 << max(cols - 1, 0).bit_length(), 128), 1024)
    return RowConfig(4096 // tile, tile, 4)


class _Quantize:
    """One call: where its tensors lie, and its passes."""

    def __init__(self, a: QuantizeArgs) -> None:
        assert a.result.format is not None
        self.x = x = flat_rows(a.x)
        self.rows, self.cols = x.shape
        self.format = Format.of(a.result.format)
        self.target = target = capabilities_of(x.device)
        self.align = align_of(self.cols, x.stride(0))
        # The halves are passed as their complements, which are negative: a launch takes a large positive integer for a
        # size that needs 64 bits, and would compile another variant.
        self.seeds = (0, 0) if a.seed is None else (~(a.seed & 0x7FFFFFFF), ~(a.seed >> 31 & 0x7FFFFFFF))
        self.constants = {
            "INPUT_MAX": torch.finfo(x.dtype).max,
            "FORMAT": self.format,
            "CAST": cast_mode(target),
            "STATIC": a.result.scale is not None,
            "STOCHASTIC": a.seed is not None,
        }

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.x.device)

    @property
    def stripes(self) -> int:
        return count_stripes(self.rows, self.cols)

    @property
    def stripe_config(self) -> StripeConfig:
        return stripe_config("quantize", self.format.block, self.align, self.target)

    @property
    def tiles(self) -> int:
        """Into which a stripe is cut."""
        return -(-self.cols // self.stripe_config.tile)

    def rows_pass(
        self, copy: Codes | None, given: Tensor | None, wants_amax: bool, known: bool
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
                x_ptr=x, given_ptr=given, amax_ptr=partials, rows=self.rows, cols=cols, row_programs=row_programs,
                x_stride=x.stride(0), copy=copy_arguments(copy), seed_low=self.seeds[0], seed_high=self.seeds[1],
            ),
        )  # fmt: skip
        return partials

    def stripes_pass(
        self,
        row: Codes | None,
        col: Codes | None,
        given: Tensor | None,
        wants_amax: bool,
        given_t: Tensor | None = None,
        amax_t: Tensor | None = None,
    ) -> Tensor | None:
        """`given_t` is the amax of the rotated x, `amax_t` room for that of each program's part of it."""
        x, rows, cols, stripes, tiles = self.x, self.rows, self.cols, self.stripes, self.tiles
        tile, warps = self.stripe_config
        shape = {"ROWS": STRIPE, "TILE": tile, "ALIGN": self.align, "COLS_MASKED": cols % tile != 0}
        largest_of_row = largest_of_col = None
        # No code can be made before the amax of its whole row and column is known.
        if self.format.block == "row":
            of_rows = self.empty(tiles, rows) if row else None
            of_cols = self.empty(stripes, cols)
            find = Launch.of(amax_kernel, num_warps=warps, **shape)
            find(
                (stripes * tiles, 1, 1),
                *amax_kernel.arguments(
                    x_ptr=x, row_ptr=of_rows, col_ptr=of_cols, rows=rows, cols=cols, x_stride=x.stride(0)
                ),
            )
            largest_of_row, largest_of_col = None if of_rows is None else of_rows.amax(0), of_cols.amax(0)
        partials = self.empty(stripes * tiles) if wants_amax else None
        launch = Launch.of(quantize_stripe_kernel, num_warps=warps, **self.constants, **shape)
        launch(
            (stripes * tiles, 1, 1),
            *quantize_stripe_kernel.arguments(
                x_ptr=x, given_ptr=given, given_t_ptr=given_t, row_amax_ptr=largest_of_row,
                col_amax_ptr=largest_of_col, amax_ptr=partials, amax_t_ptr=amax_t, rows=rows, cols=cols,
                x_stride=x.stride(0), copy=copy_arguments(row), copy_t=copy_arguments(col), seed_low=self.seeds[0],
                seed_high=self.seeds[1],
            ),
        )  # fmt: skip
        return partials

    def rotated(self, result: Result) -> None:
        """Fill a result whose column-wise copy is rotated: both amax from one read, and the copies from another."""
        amax_t = self.empty(self.stripes * self.tiles)
        amax = self.stripes_pass(None, None, None, True, amax_t=amax_t)
        assert amax is not None
        given, given_t = self.empty() if result.amax is None else result.amax, self.empty()
        for partials, largest, scale in (
            (amax, given, result.global_scale),
            (amax_t, given_t, result.global_scale_t),
        ):
            scales = [] if scale is None else [scale]
            reduce_amax(partials, self.format, self.x.dtype, amax=largest, scales=scales)
        self.stripes_pass(*result.copies(self.format.spec), given, False, given_t=given_t)


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
    """Fill a result with the codes of x by launching kernels, for ops that compute a plain tensor and then quantise
    it."""
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
            data_ptr=data,
            scale_ptr=a.scale,
            global_ptr=a.global_scale,
            out_ptr=o.values,
            rows=rows,
            cols=cols,
            data_stride=data.stride(0),
            scale_row_stride=a.scale.stride(0),
            scale_col_stride=a.scale.stride(1),
        ),
    )
