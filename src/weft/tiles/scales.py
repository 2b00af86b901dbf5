"""Scales of blocks from their amax, in the exact arithmetic of each convention.

Every operation is one IEEE fp32 operation (`div_rn`: Triton's `/` is an approximation on NVIDIA). The conventions
are those of the table in `weft.quant.formats`.
"""

from ..language import tl, triton
from .numbers import decode_e4m3, encode_e4m3


@triton.jit
def fp32_scale(amax, INPUT_MAX: tl.constexpr, FORMAT: tl.constexpr):
    """Return (scale d, factor), fp32 [...], from amax fp32 [...]; `scaled(x, factor)` is then rounded to a code."""
    amax = tl.where(amax < FORMAT.rule.amax_floor, FORMAT.rule.amax_floor, amax)
    if FORMAT.rule.scale == "1 / (max / amax)":
        factor = tl.div_rn(tl.full(amax.shape, FORMAT.number.max, tl.float32), amax)
        if FORMAT.rule.name == "te":
            regular = (amax > 0.0) & (amax < float("inf"))
            factor = tl.where(factor == float("inf"), INPUT_MAX, factor)
            factor = tl.where(regular, factor, 1.0)
        if FORMAT.power_of_two:
            factor = power_of_two_below(factor)
        return reciprocal(factor), factor
    else:
        if FORMAT.rule.scale == "amax / max" and not (FORMAT.power_of_two and FORMAT.rule.name == "deepep"):
            scale = tl.div_rn(amax, tl.full(amax.shape, FORMAT.number.max, tl.float32))
        else:
            scale = amax * FORMAT.number.reciprocal
        if FORMAT.power_of_two:
            scale = power_of_two_above(scale)
        if FORMAT.rule.data == "x / d":
            return scale, scale
        elif FORMAT.rule.data == "x * (1 / d)" or FORMAT.power_of_two:
            return scale, reciprocal(scale)
        else:
            return scale, tl.div_rn(tl.full(amax.shape, FORMAT.number.max, tl.float32), amax)


@triton.jit
def given_scale(scale, FORMAT: tl.constexpr):
    """Return the factor for a stored scale that the caller passed."""
    if FORMAT.rule.data == "x / d":
        return scale
    else:
        return reciprocal(scale)


@triton.jit
def scaled(x, factor, FORMAT: tl.constexpr):
    """Scale x to the range of the codes. `factor` broadcasts."""
    if FORMAT.rule.data == "x / d":
        x, factor = tl.broadcast(x, factor)
        return tl.div_rn(x, factor)
    else:
        return x * factor


@triton.jit
def mx_scale(amax, FORMAT: tl.constexpr):
    """Return (e8m0 code uint8, factor fp32) from amax fp32 [...]."""
    if FORMAT.rule.name == "deepgemm":
        amax = tl.where(amax < FORMAT.rule.amax_floor, FORMAT.rule.amax_floor, amax)
        scale = power_of_two_above(tl.div_rn(amax, tl.full(amax.shape, FORMAT.number.max, tl.float32)))
        return (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), reciprocal(scale)
    else:
        bits = (amax * FORMAT.number.reciprocal).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        subnormal = tl.where(mantissa > 0x400000, 1, 0)  # 2^-127 itself has the mantissa 0x400000
        code = tl.where(exponent == 0, subnormal, exponent + tl.where(mantissa != 0, 1, 0))
        infinite = 255 if FORMAT.rule.name == "torchao" else 254
        code = tl.where(bits < 0x7F800000, tl.minimum(code, 254), tl.where(bits == 0x7F800000, infinite, 255))
        inverse = tl.where(code == 254, 0x00400000, (254 - code) << 23)
        inverse = tl.where(code == 255, 0x7FC00000, inverse)
        return code.to(tl.uint8), inverse.to(tl.float32, bitcast=True)


@triton.jit
def nvfp4_global(amax, FORMAT: tl.constexpr):
    """Return the stored decode scale g from the tensor's amax, a scalar."""
    if FORMAT.rule.name == "te":
        return tl.div_rn(1.0, _nvfp4_encode(amax))
    else:
        return tl.where(amax == 0.0, 1.0, tl.div_rn(amax, 2688.0))


@triton.jit
def _nvfp4_encode(amax):
    """Return TransformerEngine's S: 2688 = 448 * 6 over the tensor's amax, or 1 if amax is 0 or infinite."""
    scale = at_most(tl.div_rn(2688.0, amax), 3.4028234663852886e38)
    return tl.where((amax == 0.0) | (scale == 0.0), 1.0, scale)


@triton.jit
def nvfp4_scale(amax, tensor_amax, FORMAT: tl.constexpr):
    """Return (e4m3 code uint8 [...], factor fp32 [...]) from the amax of blocks and of the tensor."""
    LARGEST: tl.constexpr = 3.4028234663852886e38
    if FORMAT.rule.name == "te":
        encode = _nvfp4_encode(tensor_amax)
        code = encode_e4m3(at_most(amax * (encode * 0.1666666716337204), LARGEST))  # fp32(1 / 6)
        factor = at_most(reciprocal(decode_e4m3(code) * tl.div_rn(1.0, encode)), LARGEST)
        return code, factor
    else:
        decode = nvfp4_global(tensor_amax, FORMAT)
        sixth = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32))
        scale = tl.div_rn(sixth, tl.zeros_like(sixth) + decode)
        code = encode_e4m3(tl.where(scale < 0.015625, 0.015625, scale))  # saturates at 448
        return code, tl.div_rn(tl.zeros_like(sixth) + tl.div_rn(1.0, decode), decode_e4m3(code))


@triton.jit
def at_least(x, limit):
    """Return max(x, limit), or NaN for NaN."""
    return tl.where(x < limit, limit, x)


@triton.jit
def at_most(x, limit):
    """Return min(x, limit), or NaN for NaN."""
    return tl.where(x > limit, limit, x)


@triton.jit
def reciprocal(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def power_of_two_above(x):
    """Return the smallest power of two >= x > 0, from x's exponent bits, clamped to 2^-126 ... 2^127; inf and NaN give
    2^127."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) & 0xFF) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
    return (tl.minimum(tl.maximum(exponent, 1), 254) << 23).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two_below(x):
    """Return the largest power of two <= x >= 0 by clearing the mantissa. Keeps 0, inf and NaN."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x != x, bits, bits & 0x7F800000)
    return bits.to(tl.float32, bitcast=True)
