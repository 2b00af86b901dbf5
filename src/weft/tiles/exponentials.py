"""exp(x) - 1 and log(1 + x) without cancellation near 0, which Triton has in libdevice alone (on AMD in float64), and
exp(z - m) at infinity."""

from ..language import tl, triton


@triton.jit
def exp_below(z, m):
    """Return exp(z - m) for a maximum m: 1 at the maximum even if it is infinite."""
    return tl.where(z == m, 1.0, tl.exp(z - m))


@triton.jit
def expm1(x):
    """Return exp(x) - 1: near 0 as x + x^2 q, where the polynomial q is fitted on [-0.5, 0.35] to a relative error of
    the result of 2e-9."""
    q = tl.fma(x, 0.00018614284635987133, 0.0013932217843830585)
    q = tl.fma(q, x, 0.008335636928677559)
    q = tl.fma(q, x, 0.041666463017463684)
    q = tl.fma(q, x, 0.16666656732559204)
    q = tl.fma(q, x, 0.5)
    return tl.where((x > -0.5) & (x < 0.35), x * tl.fma(q, x, 1.0), tl.exp(x) - 1.0)


@triton.jit
def log1p(x):
    """Return log(1 + x). u = 1 + x is rounded; the factor x / (u - 1) compensates for it (Kahan)."""
    u = 1.0 + x
    ratio = tl.where(u - 1.0 == x, 1.0, x / (u - 1.0))  # infinity, too, is equal
    return tl.where(u == 1.0, x, tl.log(u) * ratio)
