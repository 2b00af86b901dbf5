"""Reductions over tiles: the largest magnitude, and the statistics of rows."""

from ..language import tl, triton


@triton.jit
def amax(x, axis: tl.constexpr):
    """Largest |x| along an axis, NaN if there is one.

    As integers the magnitudes of fp32 numbers are ordered as the numbers are, and NaN comes last: an integer
    maximum propagates it, which the float one of most targets does not.
    """
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis=axis).to(tl.float32, bitcast=True)


@triton.jit
def larger(a, b):
    """max(a, b) of two amax, NaN if one is."""
    return tl.maximum(a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def merge_moments(count, mean, m2, tile_count, tile_mean, tile_m2):
    """Mean and sum of squared deviations of two sets joined (Chan), from those of each."""
    total = count + tile_count
    delta = tile_mean - mean
    share = tile_count / total
    return total, mean + delta * share, m2 + tile_m2 + delta * delta * count * share
