"""Online softmax: statistics of tiles, merged into those of rows, shards and ranks.

The statistics of a set of logits z are the running max `m_i` and the running sum `l_i` = sum(exp(z - m_i)), so that
log(sum(exp(z))) = m_i + log(l_i). An empty set, or one of minus infinities only, has (LOWEST, 0), which merges without
a special case: exp(LOWEST - z) is 0, and so is exp(LOWEST - LOWEST) * 0. `alpha` rescales sums to a new max. The
entropy, log(l_i) - moment / l_i, also takes `moment` = sum(exp(z - m_i) * (z - m_i)), and the sum of squared
probabilities, squares / l_i^2, takes `squares` = sum(exp(z - m_i)^2). A NaN makes `l_i` NaN.
"""

from ..language import tl, triton

LOWEST = tl.constexpr(-3.4028234663852886e38)  # of fp32


@triton.jit
def add_exponentials(m_i, l_i, z, axis: tl.constexpr):
    """Add logits z to the statistics (m_i, l_i); z has one more axis, which is reduced."""
    m_new = tl.maximum(m_i, tl.max(z, axis=axis))
    e = tl.exp(z - tl.expand_dims(m_new, axis))
    return m_new, l_i * tl.exp(m_i - m_new) + tl.sum(e, axis=axis)


@triton.jit
def add_moments(m_i, l_i, moment, z, axis: tl.constexpr):
    """Add logits z to the statistics (m_i, l_i, moment)."""
    m_new = tl.maximum(m_i, tl.max(z, axis=axis))
    down = m_i - m_new
    t = z - tl.expand_dims(m_new, axis)
    e = tl.exp(t)
    alpha = tl.exp(down)
    # With l_i = 0, `down` may be minus infinity, and the product would be NaN.
    shifted = tl.where(l_i > 0.0, moment + down * l_i, 0.0)
    moment = shifted * alpha + tl.sum(tl.where(e > 0.0, e * t, 0.0), axis=axis)
    return m_new, l_i * alpha + tl.sum(e, axis=axis), moment


@triton.jit
def add_squares(m_i, squares, z, axis: tl.constexpr):
    """Add logits z to `squares`; `m_i` is the max before z."""
    m_new = tl.maximum(m_i, tl.max(z, axis=axis))
    e = tl.exp(z - tl.expand_dims(m_new, axis))
    return squares * tl.exp(2.0 * (m_i - m_new)) + tl.sum(e * e, axis=axis)


@triton.jit
def join_exponentials(m_i, l_i, axis: tl.constexpr):
    """Merge the statistics (m_i, l_i) of all sets along an axis."""
    m_new = tl.max(m_i, axis=axis)
    return m_new, tl.sum(l_i * tl.exp(m_i - tl.expand_dims(m_new, axis)), axis=axis)


@triton.jit
def join_moments(m_i, l_i, moment, axis: tl.constexpr):
    """Merge the statistics (m_i, l_i, moment) of all sets along an axis."""
    m_new = tl.max(m_i, axis=axis)
    down = m_i - tl.expand_dims(m_new, axis)
    alpha = tl.exp(down)
    shifted = tl.where(l_i > 0.0, moment + down * l_i, 0.0)
    return m_new, tl.sum(l_i * alpha, axis=axis), tl.sum(shifted * alpha, axis=axis)


@triton.jit
def tanh(x):
    """Return tanh(x) with an absolute error of about 1e-7."""
    e = tl.exp(-2.0 * tl.abs(x))  # in [0, 1]
    magnitude = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0.0, -magnitude, magnitude)


@triton.jit
def cap(x, limit):
    """Return (limit * tanh(x / limit), its slope), the soft cap of x. Minus infinity is kept, since it marks masked
    columns."""
    t = tanh(x / limit)
    return tl.where(x == -float("inf"), x, limit * t), 1.0 - t * t


@triton.jit
def merge_moments(m_i, l_i, moment, m_j, l_j, moment_j):
    """Merge the statistics (m_i, l_i, moment) of two sets, element by element."""
    m_new = tl.maximum(m_i, m_j)
    down, down_j = m_i - m_new, m_j - m_new
    alpha, alpha_j = tl.exp(down), tl.exp(down_j)
    shifted = tl.where(l_i > 0.0, moment + down * l_i, 0.0) * alpha
    shifted_j = tl.where(l_j > 0.0, moment_j + down_j * l_j, 0.0) * alpha_j
    return m_new, l_i * alpha + l_j * alpha_j, shifted + shifted_j


@triton.jit
def merge_squares(m_i, squares, m_j, squares_j):
    """Merge the squares of two sets, element by element."""
    m_new = tl.maximum(m_i, m_j)
    return squares * tl.exp(2.0 * (m_i - m_new)) + squares_j * tl.exp(2.0 * (m_j - m_new))
