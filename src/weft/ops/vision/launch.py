"""Launches of patches: passes over their rows, or over stripes of 128 of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...quant import Codes, Format
from ...runtime import Launch, capabilities_of
from ..common.copies import cast_mode, copy_arguments, count_stripes, stripe_config
from ..common.destination import Destination
from ..common.passes import make_copies
from ..common.results import Result, ResultOptions
from ..common.rows import STRIPE, align_of
from ..embedding.launch import LONGEST_TILE, gather_config
from ..quantize.launch import quantize_into
from .kernels import Patches, patchify_kernel


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
        self.patches = Patches(*image.stride(), down, across, *patch, c, merge)
        self.rows, self.cols = b * down * across, patch[0] * patch[1] * c
        self.channels_first = channels_first
        self.run_align = contiguous_run(image, patch, channels_first)
        self.format = None if format is None else Format.of(format)
        self.target = capabilities_of(image.device)

    def run(
        self,
        y: Tensor | None,
        dy: Tensor | None = None,
        row: Codes | None = None,
        col: Codes | None = None,
        amax: Tensor | None = None,
        wants_amax: bool = False,
        stripes: bool = False,
    ) -> Tensor | None:
        """Launch a pass; return the amax of each of its programs if wanted."""
        format = self.format if y is None and dy is None else None
        align, by_row = align_of(self.cols), format is not None and format.block == "row"
        rows, tile, warps = gather_config(self.cols, format is not None, by_row, self.target)
        if format is not None and stripes:
            tile, warps = stripe_config("patchify", format.block, align, self.target)
            rows = STRIPE
        blocks = count_stripes(self.rows, self.cols) if stripes else -(-self.rows // rows)
        tiles = -(-self.cols // tile)
        launch = Launch.of(
            patchify_kernel,
            num_warps=warps,
            CHANNELS_FIRST=self.channels_first,
            FORMAT=format,
            CAST=cast_mode(self.target),
            ROWS=rows,
            TILE=tile,
            ALIGN=align,
            RUN=self.run_align,
        )
        partials = None
        if wants_amax:
            partials = torch.empty(blocks * tiles, dtype=torch.float32, device=self.image.device)
        launch(
            (blocks * tiles, 1, 1),
            *patchify_kernel.arguments(
                image_ptr=self.image,
                scale_ptr=self.scale,
                shift_ptr=self.shift,
                y_ptr=y,
                dy_ptr=dy,
                to=Destination(amax, partials, copy_arguments(row), copy_arguments(col)),
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
        return self.run(None, None, copy, None, scale_source, wants_amax)

    def stripes_pass(
        self, row: Codes | None, col: Codes | None, scale_source: Tensor | None, wants_amax: bool
    ) -> Tensor | None:
        return self.run(None, None, row, col, scale_source, wants_amax, stripes=True)

    def fill(self, result: Result, options: ResultOptions) -> None:
        """Compute the patches into a result."""
        if self.format is None:
            self.run(result.y)
        elif self.format.block == "row" and self.cols > LONGEST_TILE:
            y = torch.empty((self.rows, self.cols), dtype=torch.float32, device=self.image.device)
            self.run(y)
            quantize_into(result, options, y)
        else:
            direct = self.format.block != "128x128"
            make_copies(result, options, self.rows_pass, self.stripes_pass, direct=direct, statistics=False)
