"""Activations and their slopes in fp32. `ACT` names one: silu, sigmoid, gelu, gelu_tanh, relu, relu2.

`alpha` is the steepness of the sigmoid in silu and sigmoid; the others do not read it.
"""

from ..language import tl, triton


@triton.jit
def _sigmoid(z):
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
def _tanh_gate(a):
    """Return (1 + tanh(u)) / 2 = sigmoid(2u) with u = sqrt(2 / pi) (a + 0.044715 a^3)."""
    return _sigmoid(1.5957691216057308 * a * (1.0 + 0.044715 * a * a))


@triton.jit
def _positive(a):
    """Return max(a, 0), or NaN for NaN."""
    return tl.where(a <= 0.0, 0.0, a)


@triton.jit
def activate(a, alpha, ACT: tl.constexpr):
    """Return f(a) of a tile."""
    if ACT == "silu":
        return a * _sigmoid(alpha * a)
    elif ACT == "sigmoid":
        return _sigmoid(alpha * a)
    elif ACT == "gelu":
        cdf, _ = _normal_cdf(a)
        return a * cdf
    elif ACT == "gelu_tanh":
        return a * _tanh_gate(a)
    elif ACT == "relu":
        return _positive(a)
    else:
        tl.static_assert(ACT == "relu2")
        return _positive(a) * _positive(a)


@triton.jit
def activate_with_slope(a, alpha, ACT: tl.constexpr):
    """Return (f(a), f'(a)) of a tile."""
    if ACT == "silu":
        s = _sigmoid(alpha * a)
        return a * s, s * (1.0 + alpha * a * (1.0 - s))
    elif ACT == "sigmoid":
        s = _sigmoid(alpha * a)
        return s, alpha * s * _sigmoid(-alpha * a)  # sigmoid(-z) is 1 - s without cancellation
    elif ACT == "gelu":
        cdf, power = _normal_cdf(a)
        return a * cdf, cdf + (0.3989422804014327 * a) * power
    elif ACT == "gelu_tanh":
        s = _tanh_gate(a)
        steep = s * (1.0 - s)  # 0 long before a * a overflows
        bend = 1.5957691216057308 * a * steep * (1.0 + 0.134145 * a * a)
        return a * s, s + tl.where(steep == 0.0, 0.0, bend)
    elif ACT == "relu":
        return _positive(a), tl.where(a > 0.0, 1.0, 0.0)
    else:
        tl.static_assert(ACT == "relu2")
        return _positive(a) * _positive(a), 2.0 * _positive(a)
