"""Scores of a router, and choosing the best of them."""

from ..language import tl, triton

# Keys below those of all numbers: NOTHING where there is no candidate, TAKEN for one that was chosen already.
NOTHING = tl.constexpr(-(2**31))
TAKEN = tl.constexpr(-(2**31) + 1)
LEAST = tl.constexpr(-2139095041)  # the key of minus infinity


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow, and with all its digits where it is small."""
    e = tl.exp(-tl.abs(x))  # in [0, 1]
    return tl.where(x >= 0.0, 1.0, e) / (1.0 + e)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), without overflow, and with all its digits where it is small."""
    e = tl.exp(-tl.abs(x))  # in [0, 1]
    u = 1.0 + e
    # u = 1 + e is rounded; the factor e / (u - 1) makes up for it (Kahan).
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + tl.where(x != x, x, log1p)


@triton.jit
def softmax(x):
    """(softmax, log of the sum of exponentials) over the columns of x [R, C]; x is minus infinity past the last
    column."""
    largest = tl.max(x, axis=1)
    e = tl.exp(x - largest[:, None])
    total = tl.sum(e, axis=1)
    return e / total[:, None], largest + tl.log(total)


@triton.jit
def key_of(x):
    """An integer that orders as fp32 numbers do: zeros of both signs are equal, NaN comes above infinity."""
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(x == 0.0, 0, key)
    return tl.where(x != x, 0x7FFFFFFF, key)


@triton.jit
def number_of(key):
    """The number whose key this is."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_of(key, place, axis: tl.constexpr):
    """(key, place) of the largest key along the last axis, and of equal keys the lowest place. `place` has the shape of
    `key`."""
    best = tl.max(key, axis=axis)
    at = tl.min(tl.where(key == tl.expand_dims(best, axis), place, 0x7FFFFFFF), axis=axis)
    return best, at
