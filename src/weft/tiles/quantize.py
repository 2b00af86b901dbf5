"""A tile of fp32 numbers to codes and scales, for the row-wise and for the column-wise copy."""

from ..language import tl, triton
from .numbers import encode, encode_stochastic
from .reduce import amax
from .scales import fp32_scale, mx_scale, nvfp4_scale, scaled


@triton.jit
def block_scale(largest, tensor_amax, INPUT_MAX: tl.constexpr, FORMAT: tl.constexpr):
    """(scale as stored, factor) of blocks whose amax is `largest`. Only nvfp4 reads `tensor_amax`, a scalar."""
    if FORMAT.block == "mx":
        return mx_scale(largest, FORMAT)
    elif FORMAT.block == "nvfp4":
        return nvfp4_scale(largest, tensor_amax, FORMAT)
    else:
        return fp32_scale(largest, INPUT_MAX, FORMAT)


@triton.jit
def round_to(x, random, FORMAT: tl.constexpr, CAST: tl.constexpr):
    """Codes of x, rounded to nearest, or stochastically by `random`, a uint32 for each element."""
    if random is None:
        return encode(x, FORMAT, CAST)
    else:
        return encode_stochastic(x, tl.reshape(random, x.shape), FORMAT)


@triton.jit
def quantize_rows(x, random, tensor_amax, INPUT_MAX: tl.constexpr, FORMAT: tl.constexpr, CAST: tl.constexpr):
    """x [R, C] in groups of G along its rows -> codes [R, C], scales [R, C // G]."""
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
    """x [R, C] in groups of G along its columns -> codes [R, C], scales [R // G, C]; not transposed yet."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    G: tl.constexpr = FORMAT.group
    groups = tl.reshape(x, (R // G, G, C))
    scale, factor = block_scale(amax(groups, axis=1), tensor_amax, INPUT_MAX, FORMAT)  # [R // G, C]
    codes = round_to(scaled(groups, factor[:, None, :], FORMAT), random, FORMAT, CAST)
    return tl.reshape(codes, (R, C)), scale


@triton.jit
def quantize_squares(x, random, INPUT_MAX: tl.constexpr, FORMAT: tl.constexpr, CAST: tl.constexpr):
    """x [128, C] in squares of 128 x 128 -> codes [128, C], scales [C // 128]."""
    C: tl.constexpr = x.shape[1]
    largest = amax(tl.reshape(amax(x, axis=0), (C // 128, 128)), axis=1)  # [C // 128]
    scale, factor = fp32_scale(largest, INPUT_MAX, FORMAT)
    groups = tl.reshape(x, (128, C // 128, 128))
    codes = round_to(scaled(groups, factor[None, :, None], FORMAT), random, FORMAT, CAST)
    return tl.reshape(codes, (128, C)), scale
