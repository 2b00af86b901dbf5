"""Softmax of a row that is read tile by tile: statistics of tiles, which are joined to those of rows, shards and ranks.

The statistics of a set of numbers z are (`largest`, `total`) with total = sum(exp(z - largest)), so that
log(sum(exp(z))) = largest + log(total). An empty set, or one of minus infinities alone, has (LOWEST, 0). These need no
case of their own when sets are joined: exp(LOWEST - z) is 0, and so is exp(LOWEST - LOWEST) * 0. For the entropy,
log(total) - moment / total, there is also `moment` = sum(exp(z - largest) * (z - largest)), and for the sum of squared
probabilities, squares / total^2, there is `squares` = sum(exp(z - largest)^2). A NaN makes the total NaN.
"""

from ..language import tl, triton

LOWEST = tl.constexpr(-3.4028234663852886e38)  # of fp32


@triton.jit
def add_exponentials(largest, total, z, axis: tl.constexpr):
    """(largest, total) with the numbers z joined to them; z has one more axis, which is reduced."""
    joined = tl.maximum(largest, tl.max(z, axis=axis))
    e = tl.exp(z - tl.expand_dims(joined, axis))
    return joined, total * tl.exp(largest - joined) + tl.sum(e, axis=axis)


@triton.jit
def add_moments(largest, total, moment, z, axis: tl.constexpr):
    """(largest, total, moment) with z joined to them."""
    joined = tl.maximum(largest, tl.max(z, axis=axis))
    down = largest - joined
    t = z - tl.expand_dims(joined, axis)
    e = tl.exp(t)
    factor = tl.exp(down)
    # With a total of 0, `down` may be minus infinity, and the product would be NaN.
    moved = tl.where(total > 0.0, moment + down * total, 0.0)
    moment = moved * factor + tl.sum(tl.where(e > 0.0, e * t, 0.0), axis=axis)
    return joined, total * factor + tl.sum(e, axis=axis), moment


@triton.jit
def add_squares(largest, squares, z, axis: tl.constexpr):
    """squares with z joined to them; `largest` is that of the numbers before z."""
    joined = tl.maximum(largest, tl.max(z, axis=axis))
    e = tl.exp(z - tl.expand_dims(joined, axis))
    return squares * tl.exp(2.0 * (largest - joined)) + tl.sum(e * e, axis=axis)


@triton.jit
def join_exponentials(largest, total, axis: tl.constexpr):
    """(largest, total) of all sets along an axis."""
    joined = tl.max(largest, axis=axis)
    return joined, tl.sum(total * tl.exp(largest - tl.expand_dims(joined, axis)), axis=axis)


@triton.jit
def join_moments(largest, total, moment, axis: tl.constexpr):
    """(largest, total, moment) of all sets along an axis."""
    joined = tl.max(largest, axis=axis)
    down = largest - tl.expand_dims(joined, axis)
    factor = tl.exp(down)
    moved = tl.where(total > 0.0, moment + down * total, 0.0)
    return joined, tl.sum(total * factor, axis=axis), tl.sum(moved * factor, axis=axis)


@triton.jit
def tanh(x):
    """tanh(x) with an absolute error of about 1e-7."""
    e = tl.exp(-2.0 * tl.abs(x))  # in [0, 1]
    size = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def cap(x, limit):
    """(limit * tanh(x / limit), its slope): x brought between -limit and limit. Minus infinity stays minus infinity,
    since it marks columns that do not count."""
    t = tanh(x / limit)
    return tl.where(x == -float("inf"), x, limit * t), 1.0 - t * t


@triton.jit
def merge_moments(largest, total, moment, largest2, total2, moment2):
    """(largest, total, moment) of two sets joined, element by element."""
    joined = tl.maximum(largest, largest2)
    down, down2 = largest - joined, largest2 - joined
    factor, factor2 = tl.exp(down), tl.exp(down2)
    moved = tl.where(total > 0.0, moment + down * total, 0.0) * factor
    moved2 = tl.where(total2 > 0.0, moment2 + down2 * total2, 0.0) * factor2
    return joined, total * factor + total2 * factor2, moved + moved2


@triton.jit
def merge_squares(largest, squares, largest2, squares2):
    """squares of two sets joined, element by element."""
    joined = tl.maximum(largest, largest2)
    return squares * tl.exp(2.0 * (largest - joined)) + squares2 * tl.exp(2.0 * (largest2 - joined))
