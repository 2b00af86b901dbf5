"""Router scores, and selection of the best ones."""

from ..language import tl, triton
from .exponentials import log1p

# Keys below those of all values: NOTHING where there is no candidate, TAKEN for a candidate already chosen.
NOTHING = tl.constexpr(-(2**31))
TAKEN = tl.constexpr(-(2**31) + 1)
LEAST = tl.constexpr(-2139095041)  # the key of minus infinity


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) without overflow, and with full relative precision where it is small."""
    e = tl.exp(-tl.abs(x))  # in [0, 1]
    return tl.where(x >= 0.0, 1.0, e) / (1.0 + e)


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)) without overflow, and with full relative precision where it is small."""
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def softmax(x):
    """Return (softmax, log-sum-exp) over the columns of x [R, C]; x must be minus infinity past the last
    column."""
    m_i = tl.max(x, axis=1)
    e = tl.exp(x - m_i[:, None])
    l_i = tl.sum(e, axis=1)
    return e / l_i[:, None], m_i + tl.log(l_i)


@triton.jit
def key_of(x):
    """Map fp32 to integers of the same order: zeros of both signs are equal, NaN comes above infinity."""
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(x == 0.0, 0, key)
    return tl.where(x != x, 0x7FFFFFFF, key)


@triton.jit
def number_of(key):
    """Return the fp32 value of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_of(key, index, axis: tl.constexpr):
    """Return (key, index) of the largest key along the last axis, with the lowest index among equal keys. `index` has
    the shape of `key`."""
    best = tl.max(key, axis=axis)
    at = tl.min(tl.where(key == tl.expand_dims(best, axis), index, 0x7FFFFFFF), axis=axis)
    return best, at
