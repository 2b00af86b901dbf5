"""Activations in fp32: functions of (a, alpha) that return (f(a), f'(a)) of a tile.

`alpha` is the steepness of the sigmoid in silu and sigmoid, and the height of elu's negative side; the others do not
read it. A kernel that does not use the slope does not compute it.
"""

from ..language import tl, triton
from .exponentials import expm1
from .scores import sigmoid, softplus


@triton.jit
def _sigmoid(z):
    """Return 1 / (1 + exp(-z)); 0 below -88, where `sigmoid` is more than 0 and costs a branch more."""
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def _exp_of_half_square(x):
    """Return exp(-x^2 / 2) for x in [0, 15]. Rounding an exponent of 100 to fp32 would cause a relative error of 4e-6,
    so the rounding error of the exponent is computed and multiplied back as a factor."""
    square = x * x
    square_low = tl.fma(x, x, -square)
    exponent = square * 0.7213475108146667  # log2(e) / 2 in fp32, which is 9.6e-9 too small
    exponent_low = tl.fma(square, 0.7213475108146667, -exponent) + square * 9.629815e-9
    exponent_low += square_low * 0.7213475108146667
    power = tl.exp2(-exponent)
    return tl.fma(power, -0.6931471805599453 * exponent_low, power)


@triton.jit
def _normal_cdf(a):
    """Return (Phi(a), exp(-a^2 / 2)). Phi keeps its relative precision at negative a, unlike (1 + erf) / 2, which in
    fp32 is 0 below -5.6, where a Phi(a) is -6e-8. Triton has no erfc.

    For x >= 0, Phi(-x) = exp(-x^2 / 2) m(x). m falls slowly, from 1/2 towards 0.4 / x; it is t times a polynomial of
    degree 8 in t = 1 / (1 + 0.35 x), fitted on [0, 15] to a relative error of 3.2e-8. The relative error of a Phi(a),
    measured on the CPU down to the smallest normal fp32 number, is below 9e-7, and below 4.5e-7 for a > -10.
    """
    x = tl.minimum(tl.abs(a), 15.0)  # Phi(-15) = 4e-51 is 0 in fp32, and the square of 15 does not overflow
    power = _exp_of_half_square(x)
    t = 1.0 / (1.0 + 0.35 * x)
    m = tl.fma(t, -0.029163815081119537, 0.14406028389930725)
    m = tl.fma(m, t, -0.2559008300304413)
    m = tl.fma(m, t, 0.15939179062843323)
    m = tl.fma(m, t, -0.02326309308409691)
    m = tl.fma(m, t, 0.10557450354099274)
    m = tl.fma(m, t, 0.11981556564569473)
    m = tl.fma(m, t, 0.13986432552337646)
    m = tl.fma(m, t, 0.13962125778198242) * t
    return tl.where(a < 0.0, power * m, 1.0 - power * m), power


@triton.jit
def _positive(a):
    """Return max(a, 0), or NaN for NaN."""
    return tl.where(a <= 0.0, 0.0, a)


@triton.jit
def _times_gate(a, gate, steep):
    """Return a * gate and its slope, from the slope of the gate. Where that is 0, `a` may be infinite."""
    return a * gate, gate + tl.where(steep == 0.0, 0.0, a * steep)


# ---- activations ----------------------------------------------------------------------------------------


@triton.jit
def _silu(a, alpha):
    s = _sigmoid(alpha * a)
    return a * s, s * (1.0 + alpha * a * (1.0 - s))


@triton.jit
def _gelu(a, alpha):
    cdf, power = _normal_cdf(a)
    return a * cdf, cdf + (0.3989422804014327 * a) * power


@triton.jit
def _gelu_tanh(a, alpha):
    s = _sigmoid(1.5957691216057308 * a * (1.0 + 0.044715 * a * a))
    steep = s * (1.0 - s)  # 0 long before a * a overflows
    bend = 1.5957691216057308 * a * steep * (1.0 + 0.134145 * a * a)
    return a * s, s + tl.where(steep == 0.0, 0.0, bend)


@triton.jit
def _relu(a, alpha):
    return _positive(a), tl.where(a > 0.0, 1.0, 0.0)


@triton.jit
def _relu2(a, alpha):
    return _positive(a) * _positive(a), 2.0 * _positive(a)


@triton.jit
def _logistic(a, alpha):
    s = _sigmoid(alpha * a)
    return s, alpha * s * _sigmoid(-alpha * a)  # sigmoid(-z) is 1 - s without cancellation


@triton.jit
def _quick_gelu(a, alpha):
    z = 1.702 * a
    s = sigmoid(z)
    return _times_gate(a, s, 1.702 * s * sigmoid(-z))


@triton.jit
def _elu(a, alpha):
    return tl.where(a > 0.0, a, alpha * expm1(a)), tl.where(a > 0.0, 1.0, alpha * tl.exp(a))


@triton.jit
def _tanh(a, alpha):
    """Unlike `tiles.softmax.tanh`, keep the relative precision of f near 0, and of the slope far from it."""
    z = -2.0 * tl.abs(a)
    e, less = tl.exp(z), expm1(z)  # e - 1
    f = tl.where(a < 0.0, less, -less) / (1.0 + e)
    return tl.where(a == 0.0, a, f), 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _softplus(a, alpha):
    return softplus(a), sigmoid(a)


@triton.jit
def _log_sigmoid(a, alpha):
    return -softplus(-a), sigmoid(-a)


@triton.jit
def _mish(a, alpha):
    """Return a tanh(softplus(a)). The gate is n / (n + 2) with n = exp(a) (exp(a) + 2); for a > 0 both are divided by
    exp(2 a), so that nothing overflows, and no term is subtracted."""
    e = tl.exp(-tl.abs(a))  # in [0, 1]
    n = tl.where(a > 0.0, 1.0 + 2.0 * e, e * (e + 2.0))
    d = n + tl.where(a > 0.0, 2.0 * e * e, 2.0)
    return _times_gate(a, n / d, 4.0 * (1.0 + e) * tl.where(a > 0.0, e * e, e) / (d * d))


@triton.jit
def activate_with_slope(a, alpha, ACT: tl.constexpr):
    """Return (f(a), f'(a)) of a tile. The names are those of `ops.common.activations`; Triton hashes the functions that
    it sees in a kernel's source, so this is a chain and not a table."""
    if ACT == "silu":
        return _silu(a, alpha)
    elif ACT == "gelu":
        return _gelu(a, alpha)
    elif ACT == "gelu_tanh":
        return _gelu_tanh(a, alpha)
    elif ACT == "relu":
        return _relu(a, alpha)
    elif ACT == "relu2":
        return _relu2(a, alpha)
    elif ACT == "sigmoid":
        return _logistic(a, alpha)
    elif ACT == "quick_gelu":
        return _quick_gelu(a, alpha)
    elif ACT == "elu":
        return _elu(a, alpha)
    elif ACT == "tanh":
        return _tanh(a, alpha)
    elif ACT == "softplus":
        return _softplus(a, alpha)
    elif ACT == "log_sigmoid":
        return _log_sigmoid(a, alpha)
    else:
        tl.static_assert(ACT == "mish")
        return _mish(a, alpha)


@triton.jit
def activate(a, alpha, ACT: tl.constexpr):
    """Return f(a) of a tile."""
    f, _ = activate_with_slope(a, alpha, ACT)
    return f
