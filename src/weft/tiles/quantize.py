"""Quantization of a tile of fp32 elements to codes and scales, row-wise and column-wise."""

from ..language import tl, triton
from .numbers import encode, encode_stochastic
from .reduce import amax
from .scales import fp32_scale, mx_scale, nvfp4_scale, scaled


@triton.jit
def block_scale(largest, tensor_amax, INPUT_MAX: tl.constexpr, FORMAT: tl.constexpr):
    """Return (stored scale, factor) of blocks with the amax `largest`. Only nvfp4 reads `tensor_amax`, a scalar."""
    if FORMAT.block == "mx":
        return mx_scale(largest, FORMAT)
    elif FORMAT.stored.block == "nvfp4":
        return nvfp4_scale(largest, tensor_amax, FORMAT)
    else:
        return fp32_scale(largest, INPUT_MAX, FORMAT)


@triton.jit
def round_to(x, random, FORMAT: tl.constexpr, CAST: tl.constexpr):
    """Encode x, rounded to nearest, or stochastically by `random`, one uint32 per element."""
    if random is None:
        return encode(x, FORMAT, CAST)
    else:
        return encode_stochastic(x, tl.reshape(random, x.shape), FORMAT)


@triton.jit
def quantize_rows(x, random, tensor_amax, INPUT_MAX: tl.constexpr, FORMAT: tl.constexpr, CAST: tl.constexpr):
    """Quantize x [R, C] in groups of G along its rows; return codes [R, C] and scales [R, C // G]."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    G: tl.constexpr = FORMAT.group
    groups = tl.reshape(x, (R, C // G, G))
    scale, factor = block_scale(amax(groups, axis=2), tensor_amax, INPUT_MAX, FORMAT)  # [R, C // G]
    codes = round_to(scaled(groups, factor[:, :, None], FORMAT), random, FORMAT, CAST)
    return tl.reshape(codes, (R, C)), scale


@triton.jit
def quantize_columns(
    x, random, tensor_amax, INPUT_MAX: tl.constexpr, FORMAT: tl.constexpr, CAST: tl.constexpr
):
    """Quantize x [R, C] in groups of G along its columns; return codes [R, C], untransposed, and scales [R // G, C]."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    G: tl.constexpr = FORMAT.group
    groups = tl.reshape(x, (R // G, G, C))
    scale, factor = block_scale(amax(groups, axis=1), tensor_amax, INPUT_MAX, FORMAT)  # [R // G, C]
    codes = round_to(scaled(groups, factor[:, None, :], FORMAT), random, FORMAT, CAST)
    return tl.reshape(codes, (R, C)), scale


@triton.jit
def quantize_squares(
    x, random, tensor_amax, INPUT_MAX: tl.constexpr, FORMAT: tl.constexpr, CAST: tl.constexpr
):
    """Quantize x [R, C] in squares of S x S; return codes [R, C] and scales [R // S, C // S]."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    S: tl.constexpr = FORMAT.square
    column_amax = amax(tl.reshape(x, (R // S, S, C)), axis=1)  # [R // S, C]
    largest = amax(tl.reshape(column_amax, (R // S, C // S, S)), axis=2)  # [R // S, C // S]
    scale, factor = block_scale(largest, tensor_amax, INPUT_MAX, FORMAT)
    groups = tl.reshape(x, (R, C // S, S))
    codes = round_to(scaled(groups, repeat_rows(factor, S)[:, :, None], FORMAT), random, FORMAT, CAST)
    return tl.reshape(codes, (R, C)), scale


@triton.jit
def repeat_rows(x, TIMES: tl.constexpr):
    """Repeat each row of [R, C] TIMES times: [R * TIMES, C]."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, None, :], (R, TIMES, C)), (R * TIMES, C))
