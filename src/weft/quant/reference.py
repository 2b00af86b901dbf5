"""Reference quantizer in plain PyTorch: tests compare the kernels' bytes with it, and it runs without Triton.

All functions take a 2-D tensor; the column-wise copy is the row-wise copy of the transpose.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .copies import Codes, Copies
from .formats import ElementType, Format

_LARGEST = torch.finfo(torch.float32).max


def quantize_copy(
    x: Tensor,
    format: Format,
    *,
    tensor_amax: Tensor | None = None,
    scale: Tensor | None = None,
    input_dtype: torch.dtype | None = None,
    random: Tensor | None = None,
) -> Codes:
    """Return the row-wise copy of x [M, K]. `scale` overrides the scale; `random` is int64 [M, K] of 32-bit draws."""
    rows, cols = x.shape
    input_max = torch.finfo(input_dtype or x.dtype).max
    x = x.float()
    block_rows, group = format.square or format.block_rows or max(rows, 1), format.group or max(cols, 1)
    # The scale of a whole tensor or row exists even if there are no elements.
    fill_cols = -cols % group if format.group or cols else 1
    fill_rows = -rows % block_rows if format.block_rows or rows else 1
    padded = F.pad(x, (0, fill_cols, 0, fill_rows))
    blocks = padded.reshape(padded.shape[0] // block_rows, block_rows, padded.shape[1] // group, group)
    blocks = blocks.transpose(1, 2)  # [row blocks, column blocks, block_rows, group]
    global_scale = None
    divides = format.rule.data == "x / d"
    if scale is not None:
        stored = scale.float().expand(blocks.shape[:2])
        factor = stored if divides else 1.0 / stored
    else:
        amax = amax_reference(blocks, (2, 3))
        if format.stored.block == "nvfp4":
            assert tensor_amax is not None
            stored, factor, global_scale = _nvfp4_scale(amax, tensor_amax.reshape(()).float(), format)
        elif format.block == "mx":
            stored, factor = _mx_scale(amax, format)
        else:
            if format.block == "tensor" and tensor_amax is not None:
                amax = tensor_amax.reshape(1, 1).float()
            stored, factor = _fp32_scale(amax, input_max, format)
    factor = factor[..., None, None]
    scaled = blocks / factor if divides else blocks * factor
    scaled = scaled.transpose(1, 2).reshape(padded.shape)[:rows, :cols]
    codes = encode_reference(scaled, format.number, random)
    if format.packed == 2:
        codes = F.pad(codes, (0, cols % 2))
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    if format.block_rows < format.square:  # each row of a square stores its scale
        stored = stored.repeat_interleave(format.square, 0)[:rows]
    data = codes.contiguous().view(format.number.dtype)
    return Codes(data, _laid_out(stored, format), global_scale, format.spec)


def scale_from_amax(
    amax: Tensor, format: Format | str = "tensor", dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return the scale that a format's convention computes from an amax, on amax's device. Delayed scaling applies it
    to the largest amax of the last steps. `dtype` is the dtype of the tensors to be quantized.

    >>> import torch, weft
    >>> history = torch.zeros(16)
    >>> for step in range(3):
    ...     x = torch.randn(8, 256)
    ...     scale = weft.scale_from_amax(history.max(), "tensor", x.dtype)
    ...     q, history[step] = weft.quantize(x, "tensor", scale=scale, return_amax=True)
    """
    format = Format.of(format)
    if not isinstance(amax, Tensor) or not amax.is_floating_point():
        raise TypeError(
            f"amax must be a tensor of floats on the device where the scale is needed; got {amax!r}"
        )
    if format.scale_dtype is not torch.float32:
        raise ValueError(
            f"block {format.block!r} does not have fp32 scales, so an amax does not determine them: use one that does"
        )
    return _fp32_scale(amax.float(), torch.finfo(dtype).max, format)[0]


def quantize_copies(x: Tensor, format: Format, *, rowwise: bool, columnwise: bool, **options: Any) -> Copies:
    """Return the requested copies of x [M, K] in the kernels' memory layout. `options` go to `quantize_copy`; `scale`
    and `random` have x's orientation."""
    row = quantize_copy(x, format, **options) if rowwise else None
    if not columnwise:
        return row, None
    if options.get("random") is not None:
        options["random"] = options["random"].t()
    col = quantize_copy(x.t(), format, **options)
    data = col.data.view(torch.uint8)
    data = F.pad(data, (0, -data.shape[1] % 16)).contiguous()[:, : data.shape[1]]
    return row, col._replace(data=data.view(col.data.dtype), format=format.transposed.spec)


def dequantize_copy(codes: Codes, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the values of a copy of an [M, K] tensor: q * d in fp32 (q * (d * g) for nvfp4), rounded once. A rotated
    copy stays rotated."""
    (rows, cols), format = shape, Format.of(codes.format)
    data = codes.data.view(torch.uint8)
    if format.packed == 2:
        data = torch.stack((data & 0xF, data >> 4), -1).flatten(1)[:, :cols]
        values = (_INT4 if format.number.integer else _E2M1).to(data.device)[data.long()]
    else:
        values = codes.data.float()
    scale = codes.scale.float()
    if codes.global_scale is not None:
        scale = scale * codes.global_scale
    block_rows, group = format.block_rows or max(rows, 1), format.group or max(cols, 1)
    scale = scale.repeat_interleave(block_rows, 0)[:rows].repeat_interleave(group, 1)[:, :cols]
    return (values * scale).to(dtype)


# TransformerEngine's signs of the 16 elements that are rotated together.
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def hadamard_reference(x: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the rows of x [M, K] as `Format.hadamard` says, or undo that, in fp32. K is a multiple of 16. Every 16
    elements are multiplied by diag(signs) H / 4, or by its inverse H diag(signs) / 4; H is symmetric."""
    signs = torch.tensor(SIGNS, dtype=torch.float32, device=x.device)
    y = x.float().reshape(-1, 16)
    y = y if inverse else y * signs
    for _ in range(4):  # in each step, sums become the first half and differences the second
        even, odd = y[:, 0::2], y[:, 1::2]
        y = torch.cat((even + odd, even - odd), 1)
    y = y * signs * 0.25 if inverse else y * 0.25
    return y.reshape(x.shape)


def amax_reference(x: Tensor, dims: tuple[int, ...] | None = None) -> Tensor:
    """Return the largest |x|: NaN if x contains one, 0 if x is empty."""
    dims = tuple(range(x.dim())) if dims is None else dims
    if any(x.shape[d] == 0 for d in dims):
        return x.new_zeros([n for d, n in enumerate(x.shape) if d not in dims], dtype=torch.float32)
    return x.float().abs().amax(dims)


def _laid_out(stored: Tensor, format: Format) -> Tensor:
    if format.scale_dtype is not torch.float32:
        return stored.contiguous().view(format.scale_dtype)
    if format.block != "1x128":
        return stored.contiguous()
    return F.pad(stored.t(), (0, -stored.shape[0] % 4)).contiguous().t()[: stored.shape[0]]


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _over(number: float, x: Tensor) -> Tensor:
    """Return number / x with one rounding; PyTorch itself multiplies by the reciprocal."""
    return torch.full_like(x, number) / x


def _fp32_scale(amax: Tensor, input_max: float, format: Format) -> tuple[Tensor, Tensor]:
    """Return (stored scale, factor) by the table in `formats`."""
    rule, number = format.rule, format.number
    amax = torch.where(amax < rule.amax_floor, torch.full_like(amax, rule.amax_floor), amax)
    if rule.scale == "1 / (max / amax)":
        factor = _over(number.max, amax)
        if rule.name == "te":
            finite = (amax > 0) & (amax < torch.inf)
            factor = torch.where(factor.isinf(), input_max, factor)
            factor = torch.where(finite, factor, 1.0)
        if format.power_of_two:
            factor = torch.where(factor.isnan(), factor, (_bits(factor) & 0x7F800000).view(torch.float32))
        return 1.0 / factor, factor
    if rule.scale == "amax * (1 / max)" or (format.power_of_two and rule.name == "deepep"):
        scale = amax * number.reciprocal
    else:
        scale = amax / number.max
    if format.power_of_two:
        scale = _power_of_two_above(scale)
        return scale, scale if rule.data == "x / d" else 1.0 / scale
    factor = {"x * (1 / d)": 1.0 / scale, "x * (max / amax)": _over(number.max, amax), "x / d": scale}[
        rule.data
    ]
    return scale, factor


def _power_of_two_above(x: Tensor) -> Tensor:
    bits = _bits(x)
    exponent = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).int()
    return (exponent.clamp(1, 254) << 23).view(torch.float32)


def _mx_scale(amax: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    if format.rule.name == "deepgemm":
        scale = _power_of_two_above(amax.clamp(min=format.rule.amax_floor) / format.number.max)
        return (_bits(scale) >> 23).to(torch.uint8), 1.0 / scale
    bits = _bits(amax * format.number.reciprocal) & 0x7FFFFFFF
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    code = torch.where(exponent == 0, (mantissa > 0x400000).int(), exponent + (mantissa != 0).int()).clamp(
        max=254
    )
    code = torch.where(bits == 0x7F800000, 255 if format.rule.name == "torchao" else 254, code)
    code = torch.where(bits > 0x7F800000, 255, code)
    inverse = torch.where(code == 254, 0x00400000, (254 - code) << 23)
    inverse = torch.where(code == 255, 0x7FC00000, inverse)
    return code.to(torch.uint8), inverse.int().view(torch.float32)


def nvfp4_global_reference(tensor_amax: Tensor, format: Format) -> Tensor:
    if format.rule.name == "te":
        return 1.0 / _nvfp4_encode(tensor_amax)
    return torch.where(tensor_amax == 0, 1.0, tensor_amax / 2688.0)


def _nvfp4_encode(tensor_amax: Tensor) -> Tensor:
    encode = _over(2688.0, tensor_amax).clamp(max=_LARGEST)
    return torch.where((tensor_amax == 0) | (encode == 0), 1.0, encode)


def _nvfp4_scale(amax: Tensor, tensor_amax: Tensor, format: Format) -> tuple[Tensor, Tensor, Tensor]:
    from .formats import ELEMENTS

    decode = nvfp4_global_reference(tensor_amax, format)
    if format.rule.name == "te":
        encode = _nvfp4_encode(tensor_amax)
        code = encode_reference(
            (amax * (encode * ELEMENTS["e2m1"].reciprocal)).clamp(max=_LARGEST), ELEMENTS["e4m3"]
        )
        factor = (1.0 / (code.view(torch.float8_e4m3fn).float() * (1.0 / encode))).clamp(max=_LARGEST)
    else:
        code = encode_reference(((amax / 6.0) / decode).clamp(2.0**-6, 448.0), ELEMENTS["e4m3"])
        factor = (1.0 / decode) / code.view(torch.float8_e4m3fn).float()
    return code, factor, decode


# Device and dtype are explicit because the defaults may differ when this module is imported.
_E2M1 = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0],
    dtype=torch.float32,
    device="cpu",
)
_INT4 = torch.tensor([*range(8), *range(-8, 0)], dtype=torch.float32, device="cpu")


def encode_reference(x: Tensor, number: ElementType, random: Tensor | None = None) -> Tensor:
    """Encode fp32 as uint8 codes, saturating: round to nearest even, or stochastically with 32 random bits each."""
    if number.integer:
        if random is not None:
            raise ValueError(f"stochastic rounding needs float elements; got {number.name}")
        codes = x.nan_to_num(nan=0.0).clamp(-number.max, number.max).round().to(torch.int8)
        return codes.view(torch.uint8).bitwise_and(2**number.bits - 1)
    bits = _bits(x).long()
    size = bits & 0x7FFFFFFF
    clamped = size.clamp(max=number.max_bits)
    shift = number.shift
    min_exponent = number.min_normal_bits >> 23
    exponent = (clamped >> 23).clamp(min=min_exponent)
    if random is None:
        half = (1 << (shift - 1)) - 1
        normal = ((clamped + half + ((clamped >> shift) & 1)) >> shift) - number.rebias
        subnormal = _bits(clamped.int().view(torch.float32) + number.magic).long() - number.magic_bits
        code = torch.where(clamped < number.min_normal_bits, subnormal, normal)
    else:
        mantissa = torch.where(clamped >= 0x00800000, (clamped & 0x7FFFFF) | 0x800000, 0)
        units = mantissa >> (exponent - (clamped >> 23)).clamp(max=31)
        steps = (units + (random & ((1 << shift) - 1))) >> shift
        code = (((exponent - min_exponent) << (23 - shift)) + steps).clamp(max=number.max_code)
    code = torch.where(bits < 0, code | number.sign, code)
    return torch.where(size > 0x7F800000, number.nan, code).to(torch.uint8)
