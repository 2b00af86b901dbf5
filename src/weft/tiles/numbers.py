"""Encoding and decoding of low-bit elements in registers: e4m3, e5m2, e2m1, int8 and int4.

Codes are uint8, the same on every target: one rounding to nearest even, saturation at the largest value, and one
code for NaN (0x7F for the 8-bit floats, +6 for e2m1, 0 for integers). `FORMAT` is a `weft.quant.Format`.
"""

from ..language import tl, triton

# How a target encodes the 8-bit floats.
INTEGER = tl.constexpr(0)  # by integer arithmetic, for lack of a usable conversion in hardware
CONVERT = tl.constexpr(1)  # by a conversion that rounds once, saturates and has one NaN
CONVERT_CLAMPED = tl.constexpr(2)  # by a conversion that rounds once; saturation and NaN take extra code


@triton.jit
def encode(x, FORMAT: tl.constexpr, CAST: tl.constexpr):
    """Encode fp32 [...] as uint8 codes [...]; 4-bit codes are not packed yet."""
    if FORMAT.number.integer:
        return _encode_integer(x, FORMAT)
    elif CAST == 0 or FORMAT.element == "e2m1":
        return _encode_by_integers(x, FORMAT)
    elif CAST == 2:
        clamped = tl.clamp(x, -FORMAT.number.max, FORMAT.number.max)
        codes = _convert(clamped, FORMAT)
        return tl.where(x != x, 0x7F, codes).to(tl.uint8)
    else:
        return _convert(x, FORMAT)


@triton.jit
def _convert(x, FORMAT: tl.constexpr):
    if FORMAT.element == "e4m3":
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)


@triton.jit
def _encode_by_integers(x, FORMAT: tl.constexpr):
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    clamped = tl.minimum(size, FORMAT.number.max_bits)
    # normal: round to nearest even on the dropped bits, then move the exponent
    half = (1 << (FORMAT.number.shift - 1)) - 1
    normal = (
        (clamped + half + ((clamped >> FORMAT.number.shift) & 1)) >> FORMAT.number.shift
    ) - FORMAT.number.rebias
    # subnormal: the addition rounds to a multiple of the smallest subnormal
    shifted = clamped.to(tl.float32, bitcast=True) + FORMAT.number.magic
    subnormal = shifted.to(tl.int32, bitcast=True) - FORMAT.number.magic_bits
    code = tl.where(clamped < FORMAT.number.min_normal_bits, subnormal, normal)
    code = code | ((bits >> FORMAT.number.sign_shift) & FORMAT.number.sign)
    return tl.where(size > 0x7F800000, FORMAT.number.nan, code).to(tl.uint8)


@triton.jit
def _encode_integer(x, FORMAT: tl.constexpr):
    # Adding 1.5 * 2^23 rounds to the nearest even integer. The clamp before it keeps a compiler from contracting the
    # caller's product and this sum into one rounding.
    x = tl.where(x != x, 0.0, tl.minimum(tl.maximum(x, -FORMAT.number.max), FORMAT.number.max))
    code = ((x + 12582912.0) - 12582912.0).to(tl.int32).to(tl.uint8)
    return code & 0xF if FORMAT.number.bits == 4 else code


@triton.jit
def encode_stochastic(x, random, FORMAT: tl.constexpr):
    """Encode fp32 [...] with uniform random uint32 [...]: round up with a probability equal to the discarded part (to
    2^-`shift` of a step). Not for integers."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, FORMAT.number.max_bits)
    min_exponent = FORMAT.number.min_normal_bits >> 23
    exponent = tl.maximum(size >> 23, min_exponent)
    # Magnitude in units of 2^-shift of a step between codes. A subnormal fp32 number is zero in any format.
    mantissa = tl.where(size >= 0x00800000, (size & 0x7FFFFF) | 0x800000, 0)
    units = mantissa >> tl.minimum(exponent - (size >> 23), 31)
    noise = (random & ((1 << FORMAT.number.shift) - 1)).to(tl.int32)
    steps = (units + noise) >> FORMAT.number.shift
    code = ((exponent - min_exponent) << (23 - FORMAT.number.shift)) + steps
    code = tl.minimum(code, FORMAT.number.max_code)
    code = code | ((bits >> FORMAT.number.sign_shift) & FORMAT.number.sign)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, FORMAT.number.nan, code).to(tl.uint8)


@triton.jit
def decode(codes, FORMAT: tl.constexpr):
    """Decode uint8 codes [...] to fp32 [...], exactly."""
    if FORMAT.element == "int8":
        return codes.to(tl.int8, bitcast=True).to(tl.float32)
    elif FORMAT.element == "int4":
        # Build 2^23 + 8 + value by its bits and subtract 2^23 + 8: GPUs add much faster than they convert integers.
        biased = (codes.to(tl.int32) ^ 8) | 0x4B000000
        return biased.to(tl.float32, bitcast=True) - 8388616.0
    else:
        code = codes.to(tl.int32)
        size = code & (FORMAT.number.sign - 1)
        # As fp32 bits the magnitude is right except for the exponent's bias; the product that corrects it is exact for
        # normal and subnormal numbers.
        value = (size << FORMAT.number.shift).to(tl.float32, bitcast=True) * FORMAT.number.unbias
        if FORMAT.element == "e4m3":
            value = tl.where(size == 0x7F, float("nan"), value)
        if FORMAT.element == "e5m2":
            value = tl.where(size == 0x7C, float("inf"), tl.where(size > 0x7C, float("nan"), value))
        return _with_sign(value, (code & FORMAT.number.sign) << FORMAT.number.sign_shift)


@triton.jit
def decode_e4m3(codes):
    """Decode block scales of nvfp4, uint8 [...] -> fp32 [...]."""
    size = (codes & 0x7F).to(tl.int32)
    value = (size << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    value = tl.where(size == 0x7F, float("nan"), value)
    return _with_sign(value, (codes & 0x80).to(tl.int32) << 24)


@triton.jit
def decode_e8m0(codes):
    """Decode block scales of mx, uint8 [...] -> fp32 [...]: powers of two, the smallest of them subnormal in fp32."""
    bits = codes.to(tl.int32)
    bits = tl.where(bits == 255, 0x7FC00000, tl.where(bits == 0, 0x00400000, bits << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _with_sign(x, sign):
    """Set the sign bit of x >= 0; `-x` would be 0 - x, which has no negative zero."""
    return (x.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def encode_e4m3(x):
    """Encode block scales of nvfp4, fp32 [...] >= 0 -> uint8 [...], by integer arithmetic on every target."""
    size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    clamped = tl.minimum(size, 0x43E00000)
    normal = ((clamped + 0x7FFFF + ((clamped >> 20) & 1)) >> 20) - 960
    subnormal = (clamped.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(clamped < 0x3C800000, subnormal, normal)
    return tl.where(size > 0x7F800000, 0x7F, code).to(tl.uint8)


@triton.jit
def pack_pairs(codes):
    """Pack 4-bit codes [R, C] into bytes [R, C // 2], the even column in the low nibble."""
    low, high = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2)))
    return low | (high << 4)


@triton.jit
def unpack_pairs(packed):
    """Unpack bytes [R, C] into 4-bit codes [R, 2 * C]."""
    return tl.interleave(packed & 0xF, packed >> 4)
