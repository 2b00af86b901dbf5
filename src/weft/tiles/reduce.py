"""Reductions over tiles: largest magnitude, and statistics of rows."""

from ..language import tl, triton


@triton.jit
def amax(x, axis: tl.constexpr):
    """Return the largest |x| along an axis, or NaN if there is one.

    The bits of fp32 magnitudes, read as integers, are ordered like the values, and NaN comes last: an integer
    maximum propagates NaN, unlike the floating-point maximum of most targets.
    """
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis=axis).to(tl.float32, bitcast=True)


@triton.jit
def larger(a, b):
    """Return the larger of two amax values, or NaN if one is NaN."""
    return tl.maximum(a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def merge_moments(count, mean, m2, tile_count, tile_mean, tile_m2):
    """Merge the count, mean and sum of squared deviations of two sets (Chan)."""
    total = count + tile_count
    delta = tile_mean - mean
    share = tile_count / total
    return total, mean + delta * share, m2 + tile_m2 + delta * delta * count * share
