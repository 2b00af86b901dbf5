"""Launches of patches, and of the gradient of their pixels."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from ...quant import Codes, Format
from ...runtime import Capabilities, Launch, capabilities_of, choice, scratch
from ..common.copies import cast_mode, copy_arguments
from ..common.destination import Destination
from ..common.passes import make_copies
from ..common.results import Result, ResultOptions
from ..common.rows import align_of, cpu_tile, tile_warps
from ..quantize.launch import quantize_into
from .kernels import Patches, patchify_kernel

LONGEST_TILE = 8192  # elements of a patch with one scale that a program reads at once
LONGEST_GROUP = 128  # elements that share a scale


class PatchConfig(NamedTuple):
    """Tiling of patches: `rows` of them per program, `tile` elements at a time."""

    rows: int
    tile: int
    num_warps: int


@choice("patchify", rows=(1, 64), tile=(128, LONGEST_TILE), num_warps=(1, 16))
def patch_config(cols: int, by_row: bool, target: Capabilities) -> PatchConfig:
    """Choose tiles of 1024 elements, 8 per thread: each has an address of its own. On a CPU, tiles are within a patch.
    `by_row`: a result with a scale for each patch needs it whole."""
    whole = max(1 << max(cols - 1, 0).bit_length(), LONGEST_GROUP)
    if by_row:
        return PatchConfig(1, whole, min(2 * tile_warps(whole, target), 16))
    if target.is_cpu:
        return PatchConfig(1, cpu_tile(cols, LONGEST_GROUP), 4)
    tile = min(whole, 1024)
    return PatchConfig(1024 // tile, tile, 128 // target.warp_size)


def contiguous_run(image: Tensor, patch: tuple[int, int], channels_first: bool) -> int:
    """Return the largest of 16, 8 and 1 that divides the runs of a patch which are contiguous in memory, and the
    distances between them."""
    stride_b, stride_y, stride_x, stride_c = image.stride()
    channels = image.shape[3]
    if channels_first:
        return align_of(patch[1], stride_b, stride_y, stride_c) if stride_x == 1 else 1
    if stride_c != 1:
        return 1
    if stride_x == channels:
        return align_of(patch[1] * channels, stride_b, stride_y)
    return align_of(channels, stride_b, stride_y, stride_x)


class PatchLaunch:
    """Passes over the patches of images [B, H, W, C]; in the backward, `image` is the gradient."""

    def __init__(
        self,
        image: Tensor,
        patch: tuple[int, int],
        merge: int,
        channels_first: bool,
        scale: Tensor | None,
        shift: Tensor | None = None,
        format: str | None = None,
    ) -> None:
        b, h, w, c = image.shape
        down, across = h // patch[0], w // patch[1]
        self.image, self.scale, self.shift = image, scale, shift
        stride_b, stride_y, stride_x, stride_c = image.stride()
        self.patches = Patches(stride_b, stride_y, stride_x, stride_c, down, across, *patch, c, merge)
        self.rows, self.cols = b * down * across, patch[0] * patch[1] * c
        self.channels_first = channels_first
        self.run_align = contiguous_run(image, patch, channels_first)
        self.format = None if format is None else Format.of(format)
        self.target = capabilities_of(image.device)
        self.static = False  # the caller passed the scale of the result

    def run(
        self,
        y: Tensor | None,
        dy: Tensor | None = None,
        row: Codes | None = None,
        amax: Tensor | None = None,
        wants_amax: bool = False,
    ) -> Tensor | None:
        """Launch a pass; return the amax of each of its programs if wanted."""
        format = self.format if y is None and dy is None else None
        rows, tile, warps = patch_config(self.cols, format is not None and format.block == "row", self.target)
        tiles = -(-self.cols // tile)
        programs = -(-self.rows // rows) * tiles
        launch = Launch.of(
            patchify_kernel,
            num_warps=warps,
            CHANNELS_FIRST=self.channels_first,
            FORMAT=format,
            CAST=cast_mode(self.target),
            STATIC=self.static and format is not None,
            ROWS=rows,
            TILE=tile,
            ALIGN=align_of(self.cols),
            RUN=self.run_align,
        )
        partials = None
        if wants_amax:
            partials = scratch((programs,), torch.float32, self.image.device)
        launch(
            (programs, 1, 1),
            *patchify_kernel.arguments(
                image_ptr=self.image,
                scale_ptr=self.scale,
                shift_ptr=self.shift,
                y_ptr=y,
                dy_ptr=dy,
                to=Destination(amax, partials, copy_arguments(row), copy_arguments(None)),
                patches=self.patches,
                rows=self.rows,
                cols=self.cols,
                tiles=tiles,
            ),
        )
        return partials

    def rows_pass(
        self, copy: Codes | None, scale_source: Tensor | None, wants_amax: bool, has_stats: bool
    ) -> Tensor | None:
        return self.run(None, None, copy, scale_source, wants_amax)

    def stripes_pass(self, *_: object) -> NoReturn:
        raise AssertionError("column-wise copies and squares go through memory")

    def fill(self, result: Result, options: ResultOptions) -> None:
        """Compute the patches into a result. A tile has whole groups of a row. Other groups go through fp32 memory: a
        tile of 128 patches, each element with an address of its own, would spill registers."""
        self.static = options.scale is not None
        if self.format is None:
            self.run(result.y)
        elif (
            options.columnwise
            or self.format.square
            or (self.format.block == "row" and self.cols > LONGEST_TILE)
        ):
            y = scratch((self.rows, self.cols), torch.float32, self.image.device)
            self.run(y)
            quantize_into(result, options, y)
        else:
            make_copies(result, options, self.rows_pass, self.stripes_pass, direct=True, statistics=False)
