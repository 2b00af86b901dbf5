"""The passes over an input that fill the copies of a quantized result."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...language import tl
from ...quant import Codes, Format
from .copies import reduce_amax
from .results import Result, ResultOptions

FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


# A pass launches kernels, and returns the amax of each of its programs if it was asked for. A pass over whole rows is
# rows(copy, given, wants_amax, known): `copy` is the row-wise copy to fill or None, `given` the amax of the tensor or
# its scale, and `known` says that an earlier pass over the rows has left their statistics.
RowsPass = Callable[[Codes | None, Tensor | None, bool, bool], Tensor | None]


# A pass over tiles as tall as the longest group is stripes(rowwise, columnwise, given, wants_amax).
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

    - `direct`: a pass over the rows can make the row-wise copy.
    - `statistics`: the stripes read statistics that a pass over the rows leaves.
    - `input_dtype`: of the numbers that are quantised; a convention may look at its largest number.
    """
    assert options.format is not None
    f = Format.of(options.format)
    (row, col), amax, given, known = result.copies(options.format), result.amax, options.scale, False
    scales = [copy.scale for copy in (row, col) if copy is not None]
    if given is not None:
        for scale in scales:
            scale.copy_(given.reshape(scale.shape))
        given = given.reshape(-1).contiguous()
    elif f.needs_tensor_amax:  # no code can be made before the amax of the whole tensor is known
        found = rows(None, None, True, False)
        assert found is not None
        given = amax if amax is not None else torch.empty((), dtype=torch.float32, device=result.y.device)
        if result.global_scale is not None:
            scales = [result.global_scale]
        reduce_amax(found, f, input_dtype, amax=given, scales=scales)
        amax, known = None, True
    by_stripes = col is not None or not direct
    if by_stripes and statistics and not known:
        # The row-wise copy is made by the same pass with or without a column-wise one: what a kernel stores decides the
        # order in which a GPU adds up, and the bits must not depend on which copies are wanted.
        first = row if direct else None
        found = rows(first, given, amax is not None and first is not None, False)
        if found is not None:
            reduce_amax(found, None, input_dtype, amax=amax)
            amax = None
        row = None if direct else row
    wants_amax = amax is not None
    found = stripes(row, col, given, wants_amax) if by_stripes else rows(row, given, wants_amax, known)
    if found is not None:
        reduce_amax(found, None, input_dtype, amax=amax)
