"""Expected bytes of every quantized format, written from the formulas alone.

This file judges the kernels, so it shares no code with them and uses other methods:

- An element is encoded by looking for the nearest value in the list of all values of its type (`encode`),
  not by adding and shifting bits. Midpoints are float64, hence exact; a tie goes to the even code.
- Powers of two come from `frexp` and `ldexp`, not from masks.
- Scales are numpy float32 arithmetic, where each operation is one IEEE operation: nothing is fused,
  approximated or flushed to zero.

`numpy.maximum`, `minimum`, `clip` and `max` return NaN if an operand is NaN; the formulas rely on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

F32 = np.float32
FLT_MAX = np.finfo(np.float32).max

Array = np.ndarray[Any, Any]


@dataclass
class Quantized:
    data: torch.Tensor  # uint8: [M, K], or [M, ceil(K / 2)] with the even column in the low nibble (PACKED)
    scale: torch.Tensor  # one per block: fp32, or the uint8 codes of e8m0 (mx) and e4m3 (nvfp4)
    global_scale: torch.Tensor | None = None  # 0-d fp32, nvfp4 only


# ------------------------------------------------------------------------------
# Element types
# ------------------------------------------------------------------------------


def _float_values(exponent_bits: int, mantissa_bits: int, bias: int, largest: float) -> Array:
    """Return the finite non-negative values of a small float type; the value at index i has the code i."""
    values = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            if exponent == 0:
                values.append(fraction * 2.0 ** (1 - bias))
            else:
                values.append((1 + fraction) * 2.0 ** (exponent - bias))
    return np.array([v for v in values if v <= largest], dtype=np.float64)


MAX: dict[str, float] = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0, "e2m1": 6.0, "int4": 7.0}
VALUES: dict[str, Array] = {
    "e4m3": _float_values(4, 3, 7, MAX["e4m3"]),
    "e5m2": _float_values(5, 2, 15, MAX["e5m2"]),
    "e2m1": _float_values(2, 1, 1, MAX["e2m1"]),
    "int8": np.arange(128, dtype=np.float64),
    "int4": np.arange(8, dtype=np.float64),
}
# How many codes each two's-complement integer type has.
INTEGERS: dict[str, int] = {"int8": 256, "int4": 16}
PACKED = ("e2m1", "int4")  # two codes in a byte
# The code of NaN. e2m1 and the integers have none: NaN converts to +6 and 0.
NAN_CODE: dict[str, int] = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 0x07, "int8": 0x00, "int4": 0x00}
SIGN_BIT: dict[str, int] = {"e4m3": 0x80, "e5m2": 0x80, "e2m1": 0x08}


def encode(x: Array, element: str) -> Array:
    """Return the uint8 code of the nearest value of the type: ties go to the even code, overflow saturates at +-MAX."""
    values = VALUES[element]
    magnitude = np.abs(np.asarray(x, dtype=np.float64))
    nan = np.isnan(magnitude)
    magnitude = np.where(nan, 0.0, magnitude)
    midpoints = (values[:-1] + values[1:]) / 2  # exact in float64
    # Code i owns the interval between midpoints i - 1 and i, so it is the number of midpoints below.
    code = np.searchsorted(midpoints, magnitude, side="left")
    tie = magnitude == np.append(midpoints, np.nan)[code]
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    negative = np.signbit(x)
    if element in INTEGERS:
        code = np.where(negative, -code % INTEGERS[element], code)
    else:
        code = np.where(negative, code + SIGN_BIT[element], code)
    return np.where(nan, NAN_CODE[element], code).astype(np.uint8)


def decode(code: Array, element: str) -> Array:
    """Return the float64 values of uint8 codes, one code per entry."""
    code = np.asarray(code).astype(np.int64)
    if element in INTEGERS:
        count = INTEGERS[element]
        return np.where(code < count // 2, code, code - count).astype(np.float64)
    sign_bit, values = SIGN_BIT[element], VALUES[element]
    table = np.full(sign_bit, np.nan)
    table[: len(values)] = values
    if element == "e5m2":
        table[0x7C] = np.inf
    decoded: Array = np.where(code >= sign_bit, -1.0, 1.0) * table[code % sign_bit]
    return decoded


def pack(code: Array) -> Array:
    """Pack two 4-bit codes into a byte, the even column in the low nibble; a nibble without a column is 0."""
    if code.shape[1] % 2:
        code = np.pad(code, ((0, 0), (0, 1)))
    packed: Array = code[:, 0::2] + 16 * code[:, 1::2]
    return packed.astype(np.uint8)


def unpack(data: Array, cols: int) -> Array:
    return np.stack((data % 16, data // 16), axis=-1).reshape(data.shape[0], -1)[:, :cols]


# ------------------------------------------------------------------------------
# Powers of two
# ------------------------------------------------------------------------------


def ceil_exponent(v: Array) -> Array:
    """Return the smallest integer n with v <= 2^n, for finite positive v (0 gives a very small n)."""
    fraction, exponent = np.frexp(v.astype(np.float64))  # v = fraction * 2^exponent, 0.5 <= fraction < 1
    exponent = np.where(fraction == 0.5, exponent - 1, exponent)
    return np.where(v == 0, -10000, exponent)


def _power(exponent: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.ldexp(1.0, exponent).astype(F32)


def ceil_power_field(d: Array) -> Array:
    """Return deepgemm's exponent field of the smallest power of two >= d, in 1..254; inf and NaN: 254."""
    finite = np.isfinite(d)
    field = ceil_exponent(np.where(finite, d, F32(1))) + 127
    return np.where(finite, np.clip(field, 1, 254), 254)


def floor_power(s: Array) -> Array:
    """Return the largest power of two <= s; 0, inf and NaN stay as they are."""
    ordinary = np.isfinite(s) & (s > 0)
    _, exponent = np.frexp(np.where(ordinary, s, F32(1)).astype(np.float64))
    return np.where(ordinary, _power(exponent - 1), s).astype(F32)


def e8m0_ceil(v: Array, inf_code: int) -> Array:
    """Return the e8m0 code of the smallest power of two >= v."""
    finite = np.isfinite(v)
    code = np.clip(ceil_exponent(np.where(finite, v, F32(1))) + 127, 0, 254)
    code = np.where(np.isinf(v), inf_code, code)
    return np.where(np.isnan(v), 255, code)


def e8m0_value(code: Array, sign: int = 1) -> Array:
    """Return 2^(code - 127) as fp32, or its reciprocal with sign=-1; NaN for code 255."""
    code = np.asarray(code).astype(np.int64)
    return np.where(code == 255, F32(np.nan), _power(sign * (code - 127))).astype(F32)


# ------------------------------------------------------------------------------
# Blocks
# ------------------------------------------------------------------------------

# Rows and columns that share a scale; None is the whole length.
BLOCKS: dict[str, tuple[int | None, int | None]] = {
    "tensor": (None, None),
    "row": (1, None),
    "1x128": (1, 128),
    "128x128": (128, 128),
    "mx": (1, 32),
    "nvfp4": (1, 16),
    "nvfp4_16x16": (16, 16),
}
NVFP4 = ("nvfp4", "nvfp4_16x16")


def _block_size(shape: tuple[int, int], block: str) -> tuple[int, int]:
    rows, cols = BLOCKS[block]
    return rows or max(shape[0], 1), cols or max(shape[1], 1)


def block_amax(x: Array, block: str) -> Array:
    """Return the largest |x| of each block, NaN if the block contains one."""
    height, width = _block_size(x.shape, block)
    down, across = -(-x.shape[0] // height), -(-x.shape[1] // width)
    padded = np.zeros((down * height, across * width), dtype=F32)  # a zero never raises a maximum of |x|
    padded[: x.shape[0], : x.shape[1]] = np.abs(x)
    largest: Array = padded.reshape(down, height, across, width).max(axis=(1, 3), initial=F32(0))
    return largest


def spread(scale: Array, shape: tuple[int, int], block: str) -> Array:
    """Return the scale of every element, from the scales of the blocks or of the rows of the blocks."""
    height, width = _block_size(shape, block)
    if scale.shape[0] == shape[0]:
        height = 1
    return scale[np.arange(shape[0]) // height][:, np.arange(shape[1]) // width]


# ------------------------------------------------------------------------------
# Scales
# ------------------------------------------------------------------------------

FLOOR: dict[str, np.float32] = {
    "te": F32(0),
    "torchao": F32(1e-12),
    "deepgemm": F32(1e-4),
    "sglang": F32(1e-10),
    "sglang_col_major": F32(1e-10),
    "deepep": F32(1e-4),
    "vllm": F32(1e-10),
}


def te_encode_scale(amax: Array, limit: np.float32, power_of_two: bool, input_max: np.float32) -> Array:
    s = limit / amax
    s = np.where(np.isinf(s), input_max, s)
    s = np.where((amax == 0) | ~np.isfinite(amax), F32(1), s)
    return floor_power(s) if power_of_two else s


def scaled_fp32(
    amax: Array, element: str, convention: str, power_of_two: bool, input_max: np.float32
) -> tuple[Array, str, Array]:
    """Return the stored fp32 scales, then "*" or "/" and the operand that is applied to x."""
    limit = F32(MAX[element])
    amax = np.maximum(amax, FLOOR[convention])

    if convention in ("te", "torchao"):
        if convention == "te":
            s = te_encode_scale(amax, limit, power_of_two, input_max)
        else:
            s = limit / amax
            s = floor_power(s) if power_of_two else s
        return F32(1) / s, "*", s

    by_reciprocal = convention == "vllm" or (convention == "deepep" and power_of_two)
    d = amax * (F32(1) / limit) if by_reciprocal else amax / limit
    if power_of_two:
        d = _power(ceil_power_field(d) - 127)
        return d, "*", F32(1) / d
    if convention == "deepep":
        return d, "*", limit / amax
    if convention in ("vllm", "sglang_col_major"):
        return d, "/", d
    return d, "*", F32(1) / d  # deepgemm, sglang


def scaled_mx(amax: Array, element: str, convention: str) -> tuple[Array, Array]:
    """Return the e8m0 codes and the factor that multiplies x."""
    limit = F32(MAX[element])
    if convention == "deepgemm":
        code = ceil_power_field(np.maximum(amax, FLOOR["deepgemm"]) / limit)
    else:
        code = e8m0_ceil(amax * (F32(1) / limit), {"te": 0xFE, "torchao": 0xFF}[convention])
    return code.astype(np.uint8), e8m0_value(code, -1)


def scaled_nvfp4(amax: Array, tensor_amax: np.float32, convention: str) -> tuple[Array, np.float32, Array]:
    """Return the e4m3 codes of the block scales, the scale of the tensor, and the factor that multiplies x."""
    both_limits = F32(448 * 6)
    if convention == "te":
        s = np.minimum(both_limits / tensor_amax, FLT_MAX)
        if tensor_amax == 0 or s == 0:
            s = F32(1)
        g = F32(1) / s
        code = encode(np.minimum(amax * (s * (F32(1) / F32(6))), FLT_MAX), "e4m3")
        b = decode(code, "e4m3").astype(F32)
        return code, g, np.minimum(F32(1) / (b * g), FLT_MAX)
    g = F32(1) if tensor_amax == 0 else tensor_amax / both_limits
    code = encode(np.clip((amax / F32(6)) / g, F32(2.0**-6), F32(448)), "e4m3")
    b = decode(code, "e4m3").astype(F32)
    return code, g, (F32(1) / g) / b


# ------------------------------------------------------------------------------
# Rotation
# ------------------------------------------------------------------------------

SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], dtype=F32)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Return x [M, K] transposed, zero-padded to M % 16 == 0, and rotated by blocks of 16. The textbook in-place fp32
    transform, its steps going from neighbors to halves. In x's dtype."""
    blocks = -(-x.shape[0] // 16)
    values = np.zeros((x.shape[1], blocks * 16), dtype=F32)
    values[:, : x.shape[0]] = x.detach().to(torch.float32).numpy().T
    v = values.reshape(-1, 16) * SIGNS
    with np.errstate(all="ignore"):
        for half in (1, 2, 4, 8):
            for first in range(16):
                if not first & half:
                    a, b = v[:, first].copy(), v[:, first + half].copy()
                    v[:, first], v[:, first + half] = a + b, a - b
        v = v * F32(0.25)
    return torch.from_numpy(v.reshape(values.shape)).to(x.dtype)


# ------------------------------------------------------------------------------
# The two functions
# ------------------------------------------------------------------------------


def quantize(
    x: torch.Tensor,
    *,
    block: str,
    element: str,
    convention: str,
    power_of_two: bool,
    input_dtype: torch.dtype | None = None,
    transpose: bool = False,
    scale: torch.Tensor | float | None = None,
    amax: torch.Tensor | float | None = None,
) -> Quantized:
    """Return the bytes of x [M, K].

    - `input_dtype`: te uses its largest value where MAX / amax overflows; default x.dtype.
    - `transpose`: make the column-wise copy, which is the row-wise copy of x.t().
    - `scale`: decode scale to use (fp32-scale blocks), of any shape that broadcasts to one per block.
    - `amax`: amax of the tensor to use (block tensor and nvfp4).
    """
    if block not in BLOCKS or element not in MAX or convention not in FLOOR:
        raise ValueError(f"unknown format {block} {element} {convention}")
    if scale is not None and (block in ("mx", *NVFP4) or amax is not None):
        raise ValueError("scale works with fp32-scale blocks only, and cannot be combined with amax")
    if amax is not None and block not in ("tensor", *NVFP4):
        raise ValueError("amax works only with blocks that use the amax of the tensor")
    if F32(2.0**-126) / F32(2) == 0:
        raise RuntimeError("this thread flushes denormals to zero, which makes the oracle wrong")

    with np.errstate(all="ignore"):
        values: Array = x.detach().to(torch.float32).numpy()  # exact
        values = np.ascontiguousarray(values.T if transpose else values)
        shape: tuple[int, int] = values.shape
        blocks = block_amax(values, block)
        global_scale: np.float32 | None = None
        operator = "*"

        if scale is not None:
            stored = np.broadcast_to(_numpy32(scale), blocks.shape).copy()
            divides = convention in ("vllm", "sglang_col_major")
            operator, operand = ("/", stored) if divides else ("*", F32(1) / stored)
        elif block == "mx":
            stored, operand = scaled_mx(blocks, element, convention)
        elif block in NVFP4:
            tensor_amax = F32(np.abs(values).max(initial=0) if amax is None else _numpy32(amax).item())
            stored, global_scale, operand = scaled_nvfp4(blocks, tensor_amax, convention)
        else:
            if amax is not None:
                blocks = np.broadcast_to(_numpy32(amax), blocks.shape)
            input_max = F32(torch.finfo(input_dtype or x.dtype).max)
            stored, operator, operand = scaled_fp32(blocks, element, convention, power_of_two, input_max)

        per_element = spread(operand, shape, block)
        scaled = values / per_element if operator == "/" else values * per_element
        assert scaled.dtype == F32
        code = encode(scaled, element)
        if block == "nvfp4_16x16":  # the scale of a square is stored in each of its rows
            stored = stored[np.arange(shape[0]) // 16]

    assert stored.dtype == (np.uint8 if block in ("mx", *NVFP4) else F32)
    return Quantized(
        torch.from_numpy(pack(code) if element in PACKED else code),
        torch.from_numpy(np.ascontiguousarray(stored)),
        None if global_scale is None else torch.tensor(float(global_scale), dtype=torch.float32),
    )


def dequantize(q: Quantized, *, block: str, element: str, shape: tuple[int, int]) -> torch.Tensor:
    """Return q * d (* g) in float64; `shape` is [rows, columns] of this copy: [K, M] for a column-wise one."""
    data, stored = q.data.view(torch.uint8).numpy(), q.scale
    code = unpack(data, shape[1]) if element in PACKED else data
    if block == "mx":
        scale = e8m0_value(stored.view(torch.uint8).numpy()).astype(np.float64)
    elif block in NVFP4:
        scale = decode(stored.view(torch.uint8).numpy(), "e4m3")
    else:
        scale = stored.numpy().astype(np.float64)
    with np.errstate(all="ignore"):
        result = decode(code, element) * spread(scale, shape, block)
        if q.global_scale is not None:
            result = result * float(q.global_scale)
    return torch.from_numpy(result)


def _numpy32(value: torch.Tensor | float) -> Array:
    return torch.as_tensor(value, dtype=torch.float32).detach().numpy()


# ------------------------------------------------------------------------------
# Adversarial inputs
# ------------------------------------------------------------------------------


def adversarial(rows: int, cols: int, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Return named [rows, cols] inputs of a dtype (bf16, f16 or fp32)."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.finfo(dtype)

    def normal() -> torch.Tensor:
        return torch.randn(rows, cols, generator=generator, dtype=torch.float64)

    def uniform() -> torch.Tensor:
        return torch.rand(rows, cols, generator=generator, dtype=torch.float64)

    def integers(low: int, high: int, shape: Sequence[int]) -> torch.Tensor:
        return torch.randint(low, high + 1, tuple(shape), generator=generator)

    def with_one(value: float) -> torch.Tensor:
        x = normal()
        if x.numel():
            x.view(-1)[int(torch.randint(x.numel(), (1,), generator=generator))] = value
        return x.to(dtype)

    inputs: dict[str, torch.Tensor] = {"normal": normal().to(dtype)}
    outliers = normal()
    outliers[uniform() < 0.01] *= 1000
    inputs["outliers"] = outliers.to(dtype)

    # Every group of 16 has the amax MAX * 2^k + n ulps, so every larger group has one of them. k changes
    # little within 128 columns and much between them, so that large groups see many k too.
    for limit in (448, 57344, 6, 127, 240):
        lowest = int(np.ceil(np.log2(info.tiny) - np.log2(limit))) + 6
        highest = int(np.floor(np.log2(info.max) - np.log2(limit))) - 1
        for name, low, high in (("", lowest, highest), ("_near_one", max(lowest, -14), min(highest, 8))):
            base = integers(low, high, (rows, -(-cols // 128))).repeat_interleave(8, dim=1)
            groups = base - integers(0, 3, base.shape)
            peak = (limit * torch.exp2(groups.double())).to(dtype)
            ulp = torch.nextafter(peak, torch.full_like(peak, float("inf"))).double() - peak.double()
            peak = (peak.double() + integers(-4, 4, peak.shape) * ulp).to(dtype)
            x = (uniform() * 2 - 1) * peak.double().repeat_interleave(16, dim=1)[:, :cols]
            x[:, ::16] = peak.double()[:, : -(-cols // 16)]
            x[:, ::16] *= integers(0, 1, x[:, ::16].shape) * 2 - 1
            inputs[f"boundary_{limit}{name}"] = x.to(dtype)

    inputs["zeros"] = torch.zeros(rows, cols, dtype=dtype)
    inputs["negative_zeros"] = torch.full((rows, cols), -0.0, dtype=dtype)
    x = normal()
    x[uniform() < 0.3] = -0.0
    x[uniform() < 0.3] = 0.0
    inputs["some_zeros"] = x.to(dtype)
    # Zero the first block of every format; on a large enough tensor other blocks remain nonzero.
    x = normal()
    x[: min(128, -(-rows // 2)), : min(128, -(-cols // 2))] = 0
    inputs["zero_block"] = x.to(dtype)
    x = normal()
    x[::3] = 0
    inputs["zero_rows"] = x.to(dtype)

    smallest = info.tiny * info.eps
    inputs["denormals"] = ((uniform() * 2 - 1) * info.tiny).to(dtype)
    inputs["smallest"] = (integers(-2, 2, (rows, cols)) * smallest).to(dtype)
    x = normal()
    x[::2] *= info.tiny / 4
    inputs["denormal_rows"] = x.to(dtype)
    inputs["tiny"] = (normal() * max(1e-30, 4 * smallest)).to(dtype)
    inputs["constant_tiny"] = torch.full((rows, cols), max(1e-30, 4 * smallest), dtype=dtype)
    inputs["small"] = (normal() * 1e-6).to(dtype)
    inputs["huge"] = ((0.5 + uniform() / 2) * info.max * (integers(0, 1, (rows, cols)) * 2 - 1)).to(dtype)
    inputs["largest"] = torch.full((rows, cols), info.max, dtype=dtype)
    # Neighboring blocks differ in magnitude, up to the range of the dtype, and so do neighboring elements.
    exponent = uniform() * (np.log2(info.max) - np.log2(smallest)) + np.log2(smallest)
    inputs["range"] = (normal().sign() * torch.exp2(exponent)).to(dtype)
    exponent = integers(-10, 10, (rows, -(-cols // 16))).repeat_interleave(16, dim=1)[:, :cols]
    inputs["uneven_blocks"] = (normal() * torch.exp2(exponent.double())).to(dtype)

    for name, value in (("inf", float("inf")), ("minus_inf", -float("inf")), ("nan", float("nan"))):
        inputs[f"one_{name}"] = with_one(value)
    # The all-ones NaN: its sign must not survive, and an encoder that adds to its bits wraps around.
    x = inputs["one_nan"].clone()
    x.view(torch.int32 if dtype == torch.float32 else torch.int16)[x.isnan()] = -1
    inputs["one_minus_nan"] = x
    x = normal()
    for value in (float("inf"), -float("inf"), float("nan"), 0.0):
        x[uniform() < 0.01] = value
    inputs["many_specials"] = x.to(dtype)

    # MAX in every group of 16 makes its scale 1; all other elements lie halfway between two values of the type.
    for element, values in VALUES.items():
        midpoints = torch.from_numpy((values[:-1] + values[1:]) / 2)
        x = midpoints[torch.randint(len(midpoints), (rows, cols), generator=generator)]
        x *= integers(0, 1, (rows, cols)) * 2 - 1
        x[:, ::16] = MAX[element]
        inputs[f"ties_{element}"] = x.to(dtype)

    inputs["constant"] = torch.full((rows, cols), 3.14159, dtype=dtype)
    inputs["ones"] = torch.ones(rows, cols, dtype=dtype)
    return inputs
