"""Activations of gated layers and their slopes, in fp32. `ACT` names one: silu, sigmoid, gelu, gelu_tanh, relu, relu2.

`alpha` is the steepness of the sigmoid in silu and sigmoid; the others do not read it.
"""

from ..language import tl, triton


@triton.jit
def _sigmoid(z):
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def _normal_cdf(a):
    return 0.5 * (1.0 + tl.erf(a * 0.7071067811865476))


@triton.jit
def _tanh_gate(a):
    """(1 + tanh(u)) / 2 with u = sqrt(2 / pi) (a + 0.044715 a^3), which is sigmoid(2u)."""
    return _sigmoid(1.5957691216057308 * a * (1.0 + 0.044715 * a * a))


@triton.jit
def _positive(a):
    """max(a, 0) that keeps NaN."""
    return tl.where(a <= 0.0, 0.0, a)


@triton.jit
def activate(a, alpha, ACT: tl.constexpr):
    """f(a) of a tile."""
    if ACT == "silu":
        return a * _sigmoid(alpha * a)
    elif ACT == "sigmoid":
        return _sigmoid(alpha * a)
    elif ACT == "gelu":
        return a * _normal_cdf(a)
    elif ACT == "gelu_tanh":
        return a * _tanh_gate(a)
    elif ACT == "relu":
        return _positive(a)
    else:
        tl.static_assert(ACT == "relu2")
        return _positive(a) * _positive(a)


@triton.jit
def activate_with_slope(a, alpha, ACT: tl.constexpr):
    """(f(a), f'(a)) of a tile."""
    if ACT == "silu":
        s = _sigmoid(alpha * a)
        return a * s, s * (1.0 + alpha * a * (1.0 - s))
    elif ACT == "sigmoid":
        s = _sigmoid(alpha * a)
        return s, alpha * s * _sigmoid(-alpha * a)  # 1 - s, with all its digits
    elif ACT == "gelu":
        cdf = _normal_cdf(a)
        return a * cdf, cdf + a * (0.3989422804014327 * tl.exp(-0.5 * a * a))
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
