"""Quantise and dequantise: row-wise, column-wise (transposed) or both copies, from one read of the input.

    amax  = largest |x| of a block, in fp32, NaN if one is in it
    scale = the format's convention applied to amax (`weft.quant.formats`)
    code  = x brought to the element's range by the scale, rounded once to nearest even, saturated

The scale of a whole tensor (block "tensor", nvfp4's second scale) or of a whole column (the column-wise copy of
block "row") has to be known before the first code: there the input is read twice, unless the scale is given. So is it
for a column-wise copy that is rotated (`Format.hadamard`), whose amax is that of the rotated numbers.
Gradients pass straight through: d quantize(x) / dx = 1.

Stochastic rounding draws 32 bits for element (r, c) from Philox with the key `seed` and the counter
(c, r, 0 or 1 for the column-wise copy, 0): the same seed gives the same bytes on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ..language import tl, triton
from ..quant import Codes, Format, QTensor
from ..quant.copies import check_codes
from ..quant.qtensor import stand_in
from ..quant.reference import amax_reference, dequantize_copy, hadamard_reference, quantize_copies
from ..runtime import (
    Backward,
    Capabilities,
    Gradients,
    Launch,
    Op,
    Sharding,
    capabilities_of,
    choice,
    is_distributed,
    kernel,
    local_of,
    place_like,
)
from ..tiles import (
    amax,
    decode,
    decode_e4m3,
    decode_e8m0,
    fp32_scale,
    given_scale,
    hadamard_columns,
    larger,
    round_to,
    scaled,
    unpack_pairs,
)
from .common.checks import FLOATS, check_input, check_tensor, whole
from .common.copies import (
    STRIPE,
    Encoding,
    StridedCodes,
    Stripe,
    StripeConfig,
    Tile,
    cast_mode,
    copy_arguments,
    count_stripes,
    reduce_amax,
    store_codes,
    store_rows,
    store_stripe,
    store_transposed,
    stripe_config,
    tensor_factor,
)
from .common.results import (
    Result,
    ResultOptions,
    allocate_result,
    check_copies,
    make_copies,
)
from .common.rows import align_of, count_rows, cpu_tile, flat_rows, load_tile, tile_mask

if TYPE_CHECKING:
    from typing_extensions import Unpack

# ---- arguments and outputs ------------------------------------------------------------------------------


class QuantizeArgs(NamedTuple):
    x: Tensor  # [..., K]
    result: ResultOptions
    seed: int | None  # to round stochastically; None rounds to nearest


class QuantizeOutputs(NamedTuple):
    result: Result


class DequantizeArgs(NamedTuple):
    data: Tensor  # the members of `Codes`
    scale: Tensor
    global_scale: Tensor | None
    format: str
    cols: int  # how many numbers a row has
    dtype: torch.dtype


class DequantizeOutputs(NamedTuple):
    values: Tensor  # [rows, cols]


# ---- reference ------------------------------------------------------------------------------------------


def quantize_reference(a: QuantizeArgs) -> QuantizeOutputs:
    """The definition."""
    x, to = a.x, a.result
    assert to.format is not None
    f = Format.of(to.format)
    flat = x.reshape(count_rows(x), x.shape[-1])
    amax = amax_reference(flat)
    options: dict[str, Any] = {"tensor_amax": amax, "scale": to.scale, "input_dtype": x.dtype}
    turned, options_t, apart = flat, dict(options), f.hadamard is not None
    if apart and to.columnwise:
        padded = F.pad(flat, (0, 0, 0, f.length(len(flat), "columnwise") - len(flat)))
        turned = hadamard_reference(padded.t()).to(x.dtype).t()
        options_t["tensor_amax"] = amax_reference(turned)
    if a.seed is not None:
        options["random"] = philox_reference(a.seed, flat.shape, 0, x.device)
        options_t["random"] = philox_reference(a.seed, turned.shape, 0 if _shares_codes(f) else 1, x.device)
    row, _ = quantize_copies(flat, f, rowwise=to.rowwise, columnwise=False, **options)
    _, col = quantize_copies(turned, f, rowwise=False, columnwise=to.columnwise, **options_t)
    return QuantizeOutputs(Result.of(stand_in(x), (row, col), amax if to.return_amax else None, apart))


def _shares_codes(format: Format) -> bool:
    """Whether both copies hold the same codes, and so round with the same random numbers."""
    return format.square > 0 or format.block == "tensor"


def philox_reference(seed: int, shape: Sequence[int], which: int, device: torch.device) -> Tensor:
    """The first word of Philox4x32-10 for each element of a [rows, cols] tensor, in int64."""
    mask = 0xFFFFFFFF
    rows, cols = shape
    c0 = torch.arange(cols, device=device).expand(rows, cols)
    c1 = torch.arange(rows, device=device)[:, None].expand(rows, cols) & mask
    c2, c3 = torch.full_like(c0, which), torch.zeros_like(c0)
    k0, k1 = seed & 0x7FFFFFFF, seed >> 31 & 0x7FFFFFFF
    for _ in range(10):
        high_a, low_a = _multiply(c0, 0xD2511F53)
        high_b, low_b = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """The high and low 32 bits of a product of 32-bit numbers held in int64. One factor is split, since the
    whole product would overflow int64."""
    low = (a & 0xFFFF) * b
    high = (a >> 16) * b + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


# ---- kernels --------------------------------------------------------------------------------------------


@triton.jit
def _draw(seed_low, seed_high, row, col, WHICH: tl.constexpr):
    """32 random bits for each element of a tile; row [R], col [C] -> uint32 [R, C]. The halves of the seed are passed
    as their complements."""
    c0 = tl.broadcast_to(col[None, :].to(tl.uint32), (row.shape[0], col.shape[0]))
    c1 = tl.broadcast_to(row[:, None].to(tl.uint32), (row.shape[0], col.shape[0]))
    zero = tl.zeros_like(c0)
    first, _, _, _ = tl.philox_impl(
        c0, c1, zero + WHICH, zero, zero + (~seed_low).to(tl.uint32), zero + (~seed_high).to(tl.uint32), 10
    )
    return first


@kernel
def _quantize_rows_kernel(
    x_ptr,  # [rows, cols]
    given_ptr,  # the tensor's amax; with STATIC its scale, or scales [rows]; or None
    amax_ptr,  # [programs], or None
    rows,
    cols,
    row_programs,
    x_stride,
    copy: StridedCodes,  # row-wise; absent to find amax alone
    seed_low,
    seed_high,
    INPUT_MAX: tl.constexpr,
    FORMAT: tl.constexpr,
    CAST: tl.constexpr,
    STATIC: tl.constexpr,  # scales are given
    STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """Make the row-wise copy. `row_programs` programs share ROWS rows and take their tiles in turn; one program has
    them all if a scale belongs to the whole row."""
    cols = (cols // ALIGN) * ALIGN
    row = (tl.program_id(0) // row_programs).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    ROWS_MASKED: tl.constexpr = ROWS > 1
    x_off = tl.multiple_of(row * x_stride, ALIGN)
    piece = tl.arange(0, TILE)
    first = (tl.program_id(0) % row_programs) * TILE
    step = row_programs * TILE
    WHOLE: tl.constexpr = FORMAT.block == "row" or FORMAT.block == "tensor"
    if FORMAT.block == "row":
        if not STATIC:
            largest = tl.zeros((ROWS,), tl.float32)
            for start in range(0, cols, TILE):
                col = start + piece
                mask = tile_mask(row, col, rows, cols, ROWS_MASKED, COLS_MASKED)
                largest = larger(
                    largest, amax(load_tile(x_ptr + x_off[:, None] + col[None, :], mask), axis=1)
                )
            row_scale, factor = fp32_scale(largest, INPUT_MAX, FORMAT)
        else:
            row_scale = tl.load(given_ptr + row, mask=row < rows, other=1.0)
            factor = given_scale(row_scale, FORMAT)
        if copy.data is not None:
            tl.store(copy.scale + row, row_scale, mask=row < rows)
        factor = factor[:, None]
        given = 0.0
    elif given_ptr is not None:
        given = tl.load(given_ptr)
    else:
        given = 0.0
    if FORMAT.block == "tensor" and given_ptr is not None:
        factor = tensor_factor(Encoding(given, INPUT_MAX, FORMAT, CAST, STATIC))

    program_amax = tl.zeros((ROWS,), tl.float32)
    for start in range(first, cols, step):
        start = tl.multiple_of(start, TILE)
        col = start + piece
        mask = tile_mask(row, col, rows, cols, ROWS_MASKED, COLS_MASKED)
        x = load_tile(x_ptr + x_off[:, None] + col[None, :], mask)  # [ROWS, TILE]
        if amax_ptr is not None:
            program_amax = larger(program_amax, amax(x, axis=1))
        if copy.data is not None:
            random = _draw(seed_low, seed_high, row, col, 0) if STOCHASTIC else None
            if WHOLE:
                codes = round_to(scaled(x, factor, FORMAT), random, FORMAT, CAST)
                store_codes(
                    codes, copy, Tile(row, start, rows, cols, ALIGN, ROWS_MASKED, COLS_MASKED), FORMAT
                )
            else:
                store_rows(
                    x,
                    copy,
                    Tile(row, start, rows, cols, ALIGN, ROWS_MASKED, COLS_MASKED),
                    Encoding(given, INPUT_MAX, FORMAT, CAST, STATIC),
                    random,
                )
    if amax_ptr is not None:
        tl.store(amax_ptr + tl.program_id(0), amax(program_amax, axis=0))


@kernel
def _quantize_stripe_kernel(
    x_ptr,  # [rows, cols]
    given_ptr,  # the tensor's amax; with STATIC its scale; or None
    given_t_ptr,  # the amax of the rotated tensor, or None
    row_amax_ptr,  # [rows] for block "row", or None
    col_amax_ptr,  # [cols] for block "row", or None
    amax_ptr,  # [programs], or None
    amax_t_ptr,  # [programs]: that of the rotated numbers, or None
    rows,
    cols,
    x_stride,
    copy: StridedCodes,  # row-wise
    copy_t: StridedCodes,  # column-wise
    seed_low,
    seed_high,
    INPUT_MAX: tl.constexpr,
    FORMAT: tl.constexpr,
    CAST: tl.constexpr,
    STATIC: tl.constexpr,  # scales are given
    STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """Make both copies of a tile as tall as the longest group. For block "row" the amax of rows and columns are
    given. Without copies, find the amax alone."""
    cols = (cols // ALIGN) * ALIGN
    tiles = tl.cdiv(cols, TILE)
    stripe = (tl.program_id(0) // tiles).to(tl.int64)
    row = stripe * ROWS + tl.arange(0, ROWS)  # [ROWS]
    start = (tl.program_id(0) % tiles) * TILE
    col = start + tl.arange(0, TILE)  # [TILE]
    mask = tile_mask(row, col, rows, cols, True, COLS_MASKED)
    x_off = tl.multiple_of(row * x_stride, ALIGN)
    x = load_tile(x_ptr + x_off[:, None] + col[None, :], mask)  # [ROWS, TILE]
    if given_ptr is not None:
        given = tl.load(given_ptr)
    else:
        given = 0.0
    random = _draw(seed_low, seed_high, row, col, 0) if STOCHASTIC else None
    random_t = _draw(seed_low, seed_high, row, col, 1) if STOCHASTIC else None
    ROTATED: tl.constexpr = FORMAT.hadamard is not None and (
        copy_t.data is not None or amax_t_ptr is not None
    )
    if FORMAT.block == "row":
        if copy.data is not None:
            largest = tl.load(row_amax_ptr + row, mask=row < rows, other=0.0)
            row_scale, factor = fp32_scale(largest, INPUT_MAX, FORMAT)
            tl.store(copy.scale + row, row_scale, mask=(row < rows) & (start == 0))
            codes = round_to(scaled(x, factor[:, None], FORMAT), random, FORMAT, CAST)
            store_codes(codes, copy, Tile(row, start, rows, cols, ALIGN, True, COLS_MASKED), FORMAT)
        if copy_t.data is not None:
            largest = tl.load(col_amax_ptr + col, mask=col < cols, other=0.0)
            col_scale, factor = fp32_scale(largest, INPUT_MAX, FORMAT)
            tl.store(copy_t.scale + col, col_scale, mask=(col < cols) & (stripe == 0))
            codes = round_to(scaled(x, factor[None, :], FORMAT), random_t, FORMAT, CAST)
            store_transposed(codes, copy_t, Stripe(stripe, start, rows, cols, ALIGN, COLS_MASKED), FORMAT)
    elif ROTATED:
        nothing = StridedCodes(None, None, 0, 0, 0)
        if copy.data is not None:
            store_stripe(
                x,
                copy,
                nothing,
                Stripe(stripe, start, rows, cols, ALIGN, COLS_MASKED),
                Encoding(given, INPUT_MAX, FORMAT, CAST, STATIC),
                random,
            )
        turned = hadamard_columns(x).to(x_ptr.dtype.element_ty).to(tl.float32)
        if copy_t.data is not None:  # also of the zeros that make the last 16 rows whole
            store_stripe(
                turned,
                nothing,
                copy_t,
                Stripe(stripe, start, (rows + 15) // 16 * 16, cols, ALIGN, COLS_MASKED),
                Encoding(tl.load(given_t_ptr), INPUT_MAX, FORMAT, CAST, STATIC),
                None,
                _draw(seed_low, seed_high, row, col, 1) if STOCHASTIC else None,
            )
        if amax_t_ptr is not None:
            tl.store(amax_t_ptr + tl.program_id(0), amax(amax(turned, axis=1), axis=0))
    else:
        store_stripe(
            x,
            copy,
            copy_t,
            Stripe(stripe, start, rows, cols, ALIGN, COLS_MASKED),
            Encoding(given, INPUT_MAX, FORMAT, CAST, STATIC),
            random,
            random_t,
        )
    if amax_ptr is not None:
        tl.store(amax_ptr + tl.program_id(0), amax(amax(x, axis=1), axis=0))


@kernel
def _amax_kernel(
    x_ptr,  # [rows, cols]
    row_ptr,  # fp32 [tiles, rows]: amax of each piece of a row, or None
    col_ptr,  # fp32 [stripes, cols]: amax of each piece of a column
    rows,
    cols,
    x_stride,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """Compute the amax of the rows and of the columns of a tile, from one read."""
    cols = (cols // ALIGN) * ALIGN
    tiles = tl.cdiv(cols, TILE)
    stripe, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    row = stripe * ROWS + tl.arange(0, ROWS)  # [ROWS]
    col = tile * TILE + tl.arange(0, TILE)  # [TILE]
    mask = tile_mask(row, col, rows, cols, True, COLS_MASKED)
    x_off = tl.multiple_of(row * x_stride, ALIGN)
    x = load_tile(x_ptr + x_off[:, None] + col[None, :], mask)
    if row_ptr is not None:
        tl.store(row_ptr + tile.to(tl.int64) * rows + row, amax(x, axis=1), mask=row < rows)
    tl.store(col_ptr + stripe * cols + col, amax(x, axis=0), mask=col < cols)


@kernel
def _dequantize_kernel(
    data_ptr,  # codes [rows, cols], packed
    scale_ptr,
    global_ptr,  # nvfp4's scale of the tensor, or None
    out_ptr,  # [rows, cols]
    rows,
    cols,
    data_stride,
    scale_row_stride,
    scale_col_stride,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):
    """q * d in fp32 (q * (d * g) for nvfp4), rounded once to the result's dtype."""
    PACKED: tl.constexpr = FORMAT.packed
    cols = (cols // ALIGN) * ALIGN
    tiles = tl.cdiv(cols, TILE)
    tile = tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    col = tile * TILE + tl.arange(0, TILE)  # [TILE]
    byte = tile * (TILE // PACKED) + tl.arange(0, TILE // PACKED)
    width = (cols + PACKED - 1) // PACKED
    if ALIGN > 1:  # the same number, in a form from which the compiler sees what it is a multiple of
        width = (cols // ALIGN) * (ALIGN // PACKED)
    mask = tile_mask(row, byte, rows, width, True, COLS_MASKED)
    data_off = tl.multiple_of(row * data_stride, ALIGN // PACKED if ALIGN > 1 else 1)
    if mask is None:
        codes = tl.load(data_ptr + data_off[:, None] + byte[None, :])
    else:
        codes = tl.load(data_ptr + data_off[:, None] + byte[None, :], mask=mask, other=0)
    codes = codes.to(tl.uint8, bitcast=True)
    if PACKED == 2:
        codes = unpack_pairs(codes)
    exists = tile_mask(row, col, rows, cols, True, COLS_MASKED)
    row_block = row * 0 if FORMAT.block_rows == 0 else row // FORMAT.block_rows
    if FORMAT.group == 0:  # one scale for a row, or for the tensor
        scale_off = (row_block * scale_row_stride)[:, None]
        values = decode(codes, FORMAT) * tl.load(scale_ptr + scale_off, mask=(row < rows)[:, None], other=0.0)
    else:
        GROUP: tl.constexpr = FORMAT.group
        group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
        there = (row < rows)[:, None] & (group < (cols + GROUP - 1) // GROUP)[None, :]
        scale_off = (row_block * scale_row_stride)[:, None] + (group.to(tl.int64) * scale_col_stride)[None, :]
        scale = tl.load(scale_ptr + scale_off, mask=there, other=0)  # [ROWS, TILE // GROUP]
        if FORMAT.block == "mx":
            scale = decode_e8m0(scale)
        elif FORMAT.block == "nvfp4":
            scale = decode_e4m3(scale) * tl.load(global_ptr)
        groups = tl.reshape(decode(codes, FORMAT), (ROWS, TILE // GROUP, GROUP))
        values = tl.reshape(groups * scale[:, :, None], (ROWS, TILE))
    out_off = tl.multiple_of(row * cols, ALIGN)
    tl.store(out_ptr + out_off[:, None] + col[None, :], values.to(out_ptr.dtype.element_ty), mask=exists)


# ---- launch ---------------------------------------------------------------------------------------------


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
            _quantize_rows_kernel, num_warps=warps, **self.constants, ROWS=tile_rows, TILE=tile, ALIGN=self.align,
            COLS_MASKED=cols % tile != 0,
        )  # fmt: skip
        launch(
            (programs, 1, 1),
            *_quantize_rows_kernel.arguments(
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
            find = Launch.of(_amax_kernel, num_warps=warps, **shape)
            find((stripes * tiles, 1, 1), (x, of_rows, of_cols), (rows, cols, x.stride(0)))
            largest_of_row, largest_of_col = None if of_rows is None else of_rows.amax(0), of_cols.amax(0)
        partials = self.empty(stripes * tiles) if wants_amax else None
        launch = Launch.of(_quantize_stripe_kernel, num_warps=warps, **self.constants, **shape)
        launch(
            (stripes * tiles, 1, 1),
            *_quantize_stripe_kernel.arguments(
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


def _launch_quantize(o: QuantizeOutputs, a: QuantizeArgs) -> None:
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
    _launch_quantize(QuantizeOutputs(result), QuantizeArgs(x, options, None))


# ---- registration ---------------------------------------------------------------------------------------


class _NothingKept(NamedTuple):
    pass


class QuantizeOp(Op[QuantizeArgs, QuantizeOutputs], name="quantize", variants=32):
    def allocate(self, a: QuantizeArgs) -> QuantizeOutputs:
        return QuantizeOutputs(allocate_result(a.result, a.x))

    def present(self, a: QuantizeArgs) -> Any:
        return QuantizeOutputs(a.result.present())

    def launch(self, outputs: QuantizeOutputs, a: QuantizeArgs) -> None:
        _launch_quantize(outputs, a)

    def reference(self, a: QuantizeArgs) -> QuantizeOutputs:
        return quantize_reference(a)

    def keep(self, a: QuantizeArgs, o: QuantizeOutputs) -> Any:
        return _NothingKept()

    def backward(self, b: Backward) -> Gradients:
        return {"x": b.grads.result.y}

    def shard(self, a: QuantizeArgs) -> Sharding:
        of_scale, scale = "", a.result.scale
        joint, block = a.result.blocks()
        if a.seed is not None:
            joint["..."] = (
                "seed= draws by the number of a row. Quantise each rank's shard by itself with x.to_local()"
            )
        if scale is not None and scale.numel() > 1:
            of_scale = "... _" if scale.dim() == 2 else "..."
            if a.x.dim() > 2:
                joint["..."] = "the scale of each row is [rows, 1]. Give x as [rows, K]"
        return Sharding(
            {"x": "... k", "result_scale": of_scale},
            {"result_y": "... k", "result_amax": "max:"},
            {"k": "blocks reach along it", **joint},
            block,
        )


quantize_op = QuantizeOp()


class DequantizeOp(Op[DequantizeArgs, DequantizeOutputs], name="dequantize", variants=16):
    def validate(self, a: DequantizeArgs) -> None:
        check_codes("the tensor", Codes(*a[:4]), a.data.shape[0], a.cols)

    def allocate(self, a: DequantizeArgs) -> DequantizeOutputs:
        return DequantizeOutputs(torch.empty((a.data.shape[0], a.cols), dtype=a.dtype, device=a.data.device))

    def launch(self, o: DequantizeOutputs, a: DequantizeArgs) -> None:
        f, rows, cols = Format.of(a.format).stored, a.data.shape[0], a.cols
        data = flat_rows(a.data)
        tile_rows, tile, warps = row_config("dequantize", cols, capabilities_of(data.device))
        launch = Launch.of(
            _dequantize_kernel,
            num_warps=warps,
            FORMAT=f,
            ROWS=tile_rows,
            TILE=tile,
            ALIGN=align_of(cols, data.stride(0) * f.packed),
            COLS_MASKED=cols % tile != 0,
        )
        launch(
            (-(-rows // tile_rows) * -(-cols // tile), 1, 1),
            (data, a.scale, a.global_scale, o.values),
            (rows, cols, data.stride(0), a.scale.stride(0), a.scale.stride(1)),
        )

    def reference(self, a: DequantizeArgs) -> DequantizeOutputs:
        return DequantizeOutputs(dequantize_copy(Codes(*a[:4]), (a.data.shape[0], a.cols), a.dtype))


dequantize_op = DequantizeOp()


def dequantize_codes(codes: Codes, cols: int, dtype: torch.dtype) -> Tensor:
    """The numbers [rows, cols] for which codes stand."""
    f = Format.of(codes.format)
    if f.hadamard != "rowwise":
        return dequantize_op(DequantizeArgs(*codes, cols, dtype)).values
    stored = DequantizeArgs(*codes._replace(format=f.stored.spec), f.length(cols), torch.float32)
    return hadamard_reference(dequantize_op(stored).values, inverse=True)[:, :cols].to(dtype)


# ---- public functions -----------------------------------------------------------------------------------


class CopyOptions(TypedDict, total=False):
    """The options of `quantize` that do not decide what it returns."""

    rowwise: bool
    columnwise: bool
    scale: Tensor | None
    seed: int | None


@overload
def quantize(
    x: Tensor,
    format: Format | str = ...,
    *,
    return_amax: Literal[False] = False,
    **options: Unpack[CopyOptions],
) -> QTensor: ...
@overload
def quantize(
    x: Tensor, format: Format | str = ..., *, return_amax: Literal[True], **options: Unpack[CopyOptions]
) -> tuple[QTensor, Tensor]: ...
@overload
def quantize(
    x: Tensor, format: Format | str = ..., *, return_amax: bool, **options: Unpack[CopyOptions]
) -> QTensor | tuple[QTensor, Tensor]: ...
def quantize(
    x: Tensor,
    format: Format | str = "1x128",
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    scale: Tensor | None = None,
    return_amax: bool = False,
    seed: int | None = None,
) -> QTensor | tuple[QTensor, Tensor]:
    """Quantise x [..., K] (bf16, fp16 or fp32) to a `QTensor`.

    - `format`: a `Format`, a block's name or a spec such as "e5m2:1x128:deepgemm"; the recipe of NVFP4 training takes
      "nvfp4_16x16" for weights, and "e2m1:nvfp4:te:hadamard-columnwise" for activations and (with a `seed`) gradients.
    - `rowwise`, `columnwise`: which copies; both come from one read of x. The column-wise copy is that of x viewed
      as [M, K] and transposed.
    - `scale`: a given (decode) scale, one number for block "tensor", [M, 1] for block "row" without a column-wise
      copy. Otherwise scales are made from x.
    - `return_amax`: also return the largest |x|, an fp32 scalar on the device: what delayed scaling keeps, and
      `weft.scale_from_amax` turns into the next `scale`. It is that of x itself also if a copy is rotated.
    - `seed`: round stochastically, the same bytes for the same seed. Not for integers.

    By the default convention (`te`) a block with an Inf gets the scale 1 and the Inf becomes the largest code, ±448 in
    e4m3: the result is finite, but the block's other numbers are rounded with a scale that does not suit them. A NaN
    stays NaN, except in int8 and int4, where it becomes 0. Other conventions make the whole block NaN, or zeros beside
    the Inf: the table in `weft.quant.formats` has them all. `weft.any_nonfinite(x)` finds such numbers, and so does the
    amax of `return_amax`.

    >>> import torch, weft
    >>> x = torch.randn(64, 512, dtype=torch.bfloat16)
    >>> q = weft.quantize(x, "1x128", columnwise=True)
    >>> bool((q.dequantize() - x).abs().max() < x.abs().max() / 12)
    True
    """
    f = Format.of(format)
    if f.hadamard == "rowwise":
        raise ValueError(
            "quantize rotates column-wise copies, 'hadamard-columnwise': a tensor with a rotated row-wise copy is the "
            "transpose of such a one"
        )
    check_input("x", x, FLOATS[:3])
    check_copies(rowwise, columnwise)
    if scale is not None:
        check_tensor("scale", scale, FLOATS, x.device)
        rows = x.numel() // max(x.shape[-1], 1)
        fits = {"tensor": scale.numel() == 1, "row": scale.numel() == rows and not columnwise}
        if not fits.get(f.block, False):
            raise ValueError(
                f"a given scale is one number for block 'tensor', or [{rows}, 1] for block 'row' without a column-wise "
                f"copy; got {tuple(scale.shape)} for block {f.block!r}"
            )
        scale = scale.float()
    if seed is not None and (f.number.integer or not 0 <= whole("seed", seed) < 2**62):
        raise ValueError("seed is for float elements and lies between 0 and 2**62 - 1")
    options = ResultOptions(x.dtype, f.spec, rowwise, columnwise, scale, return_amax)
    result = quantize_op(QuantizeArgs(x, options, seed)).result
    q = result.quantized(f.spec)
    return q if result.amax is None else (q, result.amax)


def dequantize(q: QTensor, dtype: torch.dtype | None = None) -> Tensor:
    """The numbers that a `QTensor` stands for, q * d in fp32 and rounded once to `dtype` (q's own by default). They
    come from the row-wise copy if there is one; the gradient passes straight through.

    >>> import torch, weft
    >>> weft.dequantize(weft.quantize(torch.ones(2, 128), "row")).sum()
    tensor(256.)
    """
    if is_distributed(q):
        shard = local_of(q)
        return place_like(dequantize(shard, dtype), q)  # type: ignore[arg-type]
    if not isinstance(q, QTensor):
        raise TypeError(f"dequantize takes a QTensor; got {type(q).__name__}")
    return q.dequantize(dtype)
