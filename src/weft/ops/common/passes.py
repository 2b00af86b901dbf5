"""Passes over an input that fill the copies of a quantized result."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...language import tl
from ...quant import Codes, Format
from ...runtime import scratch
from .copies import reduce_amax
from .results import Result, ResultOptions

FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


# A pass launches kernels and returns the amax of each of its programs if asked to. A pass over whole rows is called as
# rows(copy, scale_source, wants_amax, has_stats): `copy` is the row-wise copy to fill or None, `scale_source` the
# tensor's amax or its scale, and `has_stats` says that an earlier pass has stored the statistics of the rows.
RowsPass = Callable[[Codes | None, Tensor | None, bool, bool], Tensor | None]


# A pass over tiles as tall as the longest group is called as stripes(rowwise, columnwise, scale_source, wants_amax).
StripesPass = Callable[[Codes | None, Codes | None, Tensor | None, bool], Tensor | None]


def make_copies(
    result: Result,
    options: ResultOptions,
    rows: RowsPass,
    stripes: StripesPass,
    *,
    direct: bool,
    statistics: bool,
    input_dtype: torch.dtype = torch.float32,
) -> None:
    """Fill the copies of a result and its amax, in as few passes as its format allows.

    - `direct`: a pass over the rows can fill the row-wise copy.
    - `statistics`: the stripes pass reads statistics that a pass over the rows stores.
    - `input_dtype`: dtype of the quantized elements; a convention may use its largest value.
    """
    assert options.format is not None
    f = Format.of(options.format)
    (row, col), amax, scale_source, has_stats = (
        result.copies(options.format),
        result.amax,
        options.scale,
        False,
    )
    scales = [copy.scale for copy in (row, col) if copy is not None]
    if scale_source is not None:
        if result.y.numel() == 0:  # otherwise the kernels store it
            for scale in scales:
                scale.copy_(scale_source.reshape(scale.shape))
        scale_source = scale_source.reshape(-1).contiguous()
    elif f.needs_tensor_amax:  # codes need the amax of the whole tensor first
        partials = rows(None, None, True, False)
        assert partials is not None
        scale_source = amax if amax is not None else scratch((), torch.float32, result.y.device)
        if result.global_scale is not None:
            scales = [result.global_scale]
        reduce_amax(partials, f, input_dtype, amax=scale_source, scales=scales)
        amax, has_stats = None, True
    by_stripes = col is not None or not direct
    if by_stripes and statistics and not has_stats:
        # The same pass fills the row-wise copy with or without a column-wise one: what a kernel stores affects the
        # order in which a GPU adds, and the bits must not depend on which copies are wanted.
        first = row if direct else None
        partials = rows(first, scale_source, amax is not None and first is not None, False)
        if partials is not None:
            reduce_amax(partials, None, input_dtype, amax=amax)
            amax = None
        row = None if direct else row
    wants_amax = amax is not None
    partials = (
        stripes(row, col, scale_source, wants_amax)
        if by_stripes
        else rows(row, scale_source, wants_amax, has_stats)
    )
    if partials is not None:
        reduce_amax(partials, None, input_dtype, amax=amax)
