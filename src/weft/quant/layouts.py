"""Conversions between quantized tensors and the buffers that other libraries' matrix products take.

    buffers = to_layout(codes, "deepgemm_sm90", operand="a")
    codes = from_layout(buffers, format, "deepgemm_sm90", (rows, cols), operand="a")

`Codes` are the row-wise copy of a [rows, cols] matrix; a column-wise copy is the row-wise copy of the
transpose, so (rows, cols) below is (M, K) for a row-wise and (K, M) for a column-wise copy. Elements are never
decoded or rounded again: data and scales only change order, strides, padding and the dtype that labels their
bytes. Where our bytes already match the consumer's layout, the buffers are views of the codes.

| layout           | block          | scale                                                                |
|------------------|----------------|----------------------------------------------------------------------|
| `torch_v1`       | tensor         | fp32, one element                                                    |
| (`_scaled_mm`)   | row            | fp32, A [rows, 1], B [1, rows]                                       |
|                  | 1x128          | fp32, A [rows, k] strides (1, rows), B its transpose                 |
|                  | 128x128        | fp32, A [r, k] row-major, B its transpose                            |
|                  | mx, nvfp4      | e8m0 or e4m3, flat, swizzled 32x4x4                                  |
| `torch_v2`       | tensor, row    | as `torch_v1`                                                        |
| (`F.scaled_mm`)  | 1x128          | fp32, A and B [rows, k] strides (1, rows)                            |
|                  | 128x128        | fp32, A and B [rup(k, 4), r] strides (1, rup(k, 4))                  |
|                  | mx, nvfp4      | as `torch_v1`                                                        |
| `deepgemm_sm90`  | 1x128          | fp32 [rows, k] strides (1, rup(rows, 4))                             |
|                  | 128x128, B     | fp32 [r, k] row-major                                                |
| `deepgemm_sm100` | 1x128, 128x128 | int32 of four exponents [rows, cdiv(k, 4)] strides (1, rup(rows, 4)) |
|                  | mx             | the same; e2m1 data is int8                                          |
| `te`             | tensor         | `Float8Tensor`: fp32 [1]                                             |
| (data is uint8)  | 1x128          | `Float8BlockwiseQTensor`: fp32 [k, rup(rows, 4)]                     |
|                  | 128x128        | `Float8BlockwiseQTensor`: fp32 [r, rup(k, 4)]                        |
|                  | mx             | `MXFP8Tensor`: uint8 [rup(rows, 128), rup(k, 4)]; for a column-wise  |
|                  |                | copy data and scale are transposed, so data is [M, K] again          |
|                  | nvfp4          | `NVFP4Tensor`: uint8 [rup(rows, 128), rup(k, 4)], tensor amax [1]    |
| `deepep`         | 1x128          | fp32 [rows, k] row-major                                             |
| `mx_swizzled`    | mx, nvfp4      | e8m0 or e4m3, flat, swizzled 32x4x4                                  |

k is the number of scales along a row, r the number along a column; rup rounds up to a multiple. Torch's B is the
transposed view of our data; all other consumers take both operands unchanged. Padding is zero, except in the
exponents of `deepgemm_sm100`, where it is 1.0. A consumer may also require sizes that are multiples of 16 or
128; that is not checked here.

Only `check=True` waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .copies import Codes
from .formats import Format

Operand = Literal["a", "b"]

_NAN_CODE = 255  # e8m0
_PAD_CODE = 127  # 1.0 in e8m0
_PAD_WORD = _PAD_CODE * 0x01010101
_TINY_BITS = 0x00400000  # 2^-127: code 0 in e8m0, a subnormal in fp32
_NVFP4_MAX = 2688.0  # 448 * 6


class ForeignCodes(NamedTuple):
    """Codes and scales in a consumer's layout; no Weft op reads them. NVFP4 adds `global_scale` (0-d), or `amax` ([1])
    for TE."""

    data: Tensor
    scale: Tensor
    global_scale: Tensor | None = None
    amax: Tensor | None = None


class _Case(NamedTuple):
    format: Format
    rows: int
    cols: int
    operand: Operand
    columnwise: bool
    check: bool

    @property
    def scale_rows(self) -> int:
        return self.format.scale_shape(self.rows, self.cols)[0]

    @property
    def scale_cols(self) -> int:
        return self.format.scale_shape(self.rows, self.cols)[1]


@dataclass(frozen=True)
class Layout:
    """Operand layout of one consumer; `accepts` lists (block, elements, operands)."""

    name: str
    takes: str
    accepts: tuple[tuple[str, tuple[str, ...], str], ...]
    to: Callable[[Codes, _Case], ForeignCodes]
    back: Callable[[ForeignCodes, _Case], Codes]

    def supports(self, format: Format | str, operand: Operand = "a") -> bool:
        format = Format.of(format).stored
        if self.name == "deepgemm_sm100" and not format.power_of_two:
            return False
        return any(
            format.block == block and format.element in elements and operand in operands
            for block, elements, operands in self.accepts
        )


def to_layout(
    codes: Codes, name: str, *, operand: Operand = "a", columnwise: bool = False, check: bool = False
) -> ForeignCodes:
    """Return the buffers that consumer `name` takes for these codes.

    - `operand`: the side of the product a [M, K] @ b [N, K]^T. It matters only to torch and DeepGEMM on SM90.
    - `columnwise`: the codes are a column-wise copy. It matters only to TE's MXFP8.
    - `check`: wait for the device and raise ValueError if `deepgemm_sm100` cannot pack a scale. Without it such a
      scale becomes NaN; see `pack_ue8m0`.
    """
    format = Format.of(codes.format).stored
    layout = _layout(name, format, operand)
    if codes.data.dim() != 2:
        raise ValueError(f"data must be 2-D; got {tuple(codes.data.shape)}")
    rows, cols = codes.data.shape[0], codes.data.shape[1] * format.packed
    shape = format.scale_shape(rows, cols)
    # A tensor without elements may still come with a scale.
    allowed = {"tensor": (1, 1), "row": (rows, 1)}.get(format.block, shape)
    if tuple(codes.scale.shape) not in (shape, allowed):
        raise ValueError(
            f"scale of {format} data {tuple(codes.data.shape)} must have shape {shape}; "
            f"got {tuple(codes.scale.shape)}"
        )
    _dtype("data", codes.data, format.number.dtype)
    _dtype("scale", codes.scale, format.scale_dtype)
    if (format.block == "nvfp4") != (codes.global_scale is not None):
        raise ValueError(f"nvfp4 codes need a global_scale, and other formats take none; got {format} codes")
    return layout.to(codes, _Case(format, rows, cols, operand, columnwise, check))


def from_layout(
    buffers: ForeignCodes,
    format: Format | str,
    name: str,
    shape: tuple[int, int],
    *,
    operand: Operand = "a",
    columnwise: bool = False,
) -> Codes:
    """Return the codes held by a consumer's buffers; the inverse of `to_layout`.

    `shape` is (rows, cols) of the codes: (K, M) for a column-wise copy of an [M, K] tensor.
    """
    format = Format.of(format).stored
    layout = _layout(name, format, operand)
    codes = layout.back(buffers, _Case(format, shape[0], shape[1], operand, columnwise, False))
    _shape("data", codes.data, format.data_shape(*shape))
    return codes._replace(format=format.spec)


# Bytes


def swizzle_32_4_4(scale: Tensor) -> Tensor:
    """Return [rows, cols] block scales in the tensor cores' order: flat, padded to 128 rows and 4 columns.

    Entry (r, c) moves to
    ((r // 128) * cdiv(cols, 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4.
    """
    tiles_r, tiles_c = _cdiv(scale.shape[0], 128), _cdiv(scale.shape[1], 4)
    padded = _padded(_bytes(scale), tiles_r * 128, tiles_c * 4)
    tiles = padded.reshape(tiles_r, 4, 32, tiles_c, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(tiles_r * tiles_c * 512).view(scale.dtype)


def unswizzle_32_4_4(flat: Tensor, rows: int, cols: int) -> Tensor:
    """Undo `swizzle_32_4_4`; `flat` may have any shape with the right number of elements."""
    tiles_r, tiles_c = _cdiv(rows, 128), _cdiv(cols, 4)
    if flat.numel() != tiles_r * tiles_c * 512:
        raise ValueError(
            f"swizzled scales of [{rows}, {cols}] have {tiles_r * tiles_c * 512} elements; got {flat.numel()}"
        )
    tiles = _bytes(flat).reshape(tiles_r, tiles_c, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return _row_major(tiles.reshape(tiles_r * 128, tiles_c * 4)[:rows, :cols]).view(flat.dtype)


def pack_ue8m0(scale: Tensor, *, check: bool = False) -> Tensor:
    """Pack power-of-two scales [rows, cols] into int32 words of four exponents, low byte first.

    The result is [rows, cdiv(cols, 4)] with strides (1, rup(rows, 4)); padding exponents encode 1.0.
    The scales are fp32, e8m0, or e8m0 codes as uint8. An fp32 scale that is not a power of two from 2^-127 to
    2^127 becomes the NaN code in its own byte and leaves the neighboring bytes alone; 0.0 becomes 2^-127, the
    smallest scale. `check=True` waits for the device and raises ValueError instead of writing NaN.
    """
    return _mn_major(_words(scale, check), _rup(scale.shape[0], 4), _PAD_WORD)


def unpack_ue8m0(packed: Tensor, cols: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Undo `pack_ue8m0`: return row-major [rows, cols] scales in fp32, e8m0 or uint8."""
    _shape("packed scales", packed, (packed.shape[0], _cdiv(cols, 4)))
    _dtype("packed scales", packed, torch.int32)
    parts = torch.stack([(packed >> shift) & 255 for shift in (0, 8, 16, 24)], dim=-1)
    codes = parts.reshape(packed.shape[0], _cdiv(cols, 4) * 4)[:, :cols]
    if dtype != torch.float32:
        return _row_major(codes.to(torch.uint8)).view(dtype)
    bits = torch.where(codes == 0, _TINY_BITS, codes << 23)
    return _row_major(torch.where(codes == _NAN_CODE, 0x7FC00000, bits).to(torch.int32)).view(torch.float32)


def _words(scale: Tensor, check: bool) -> Tensor:
    """Return the words of `pack_ue8m0` in row-major order."""
    if scale.dtype == torch.float32:
        bits = scale.view(torch.int32)
        exponent = (bits >> 23) & 255
        exact = ((bits >= 0) & ((bits & 0x7FFFFF) == 0)) | (bits == _TINY_BITS)
        codes = torch.where(exact, exponent, _NAN_CODE)
    elif scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        codes = _bytes(scale).to(torch.int32)
    else:
        raise ValueError(f"scales to pack must be fp32, e8m0 or uint8; got {scale.dtype}")
    if check and bool((codes == _NAN_CODE).any()):
        raise ValueError(
            "scales to pack as UE8M0 must be powers of two from 2^-127 to 2^127; "
            f"{int((codes == _NAN_CODE).sum())} of {codes.numel()} are not. Quantize with power_of_two=True; "
            "rounding the scales of quantized data would change its values"
        )
    rows, words = scale.shape[0], _cdiv(scale.shape[1], 4)
    c = _padded(codes, rows, words * 4, _PAD_CODE).reshape(rows, words, 4)
    return c[..., 0] | (c[..., 1] << 8) | (c[..., 2] << 16) | (c[..., 3] << 24)


# Strides


def _mn_buffer(scale: Tensor, ld: int, value: int = 0) -> Tensor:
    """Copy [rows, cols] transposed into a new buffer [cols, ld]."""
    rows = scale.shape[0]
    if ld > rows:
        return pad(scale.t(), (0, ld - rows), value=value)
    return scale.t().clone(memory_format=torch.contiguous_format)


def _mn_major(scale: Tensor, ld: int, value: int = 0) -> Tensor:
    """Return [rows, cols] with strides (1, ld). No copy is made if the strides match already or if there is a single
    column, whose stride does not matter."""
    rows, cols = scale.shape
    if scale.stride() == (1, ld):
        return scale
    if cols == 1 and ld == rows and scale.stride(0) == 1:
        return scale.select(1, 0).unsqueeze(0).t()
    return _mn_buffer(scale, ld, value).t()[:rows]


def _backing_buffer(scale: Tensor, ld: int) -> Tensor:
    """Return the buffer [cols, ld] that backs `scale` if `scale` is a transposed view of one, else a new buffer."""
    rows, cols = scale.shape
    if scale.stride() != (1, ld) or not scale.numel():
        return _mn_buffer(scale, ld)
    if rows == ld:
        return scale.t()
    if torch.compiler.is_compiling():  # a traced tensor has no storage to inspect
        return _mn_buffer(scale, ld)
    end = (scale.storage_offset() + cols * ld) * scale.element_size()
    # The strides do not guarantee that memory for the last padding exists.
    if scale.untyped_storage().nbytes() < end:
        return _mn_buffer(scale, ld)
    return scale.as_strided((cols, ld), (ld, 1))


def _padded(x: Tensor, rows: int, cols: int, value: int = 0) -> Tensor:
    """Return x row-major, padded to [rows, cols]."""
    more_rows, more_cols = rows - x.shape[0], cols - x.shape[1]
    if more_rows or more_cols:
        return pad(x, (0, more_cols, 0, more_rows), value=value)
    return _row_major(x)


def _row_major(x: Tensor) -> Tensor:
    """Return x with strides (cols, 1), even in a dimension of size 1, whose stride torch checks too."""
    x = x.contiguous()
    return x if x.stride() == (x.shape[1], 1) else x.view(-1).view(x.shape)


def _bytes(x: Tensor) -> Tensor:
    """Return one-byte elements as uint8, because most operations lack the float8 dtypes."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _float4() -> torch.dtype:
    dtype = getattr(torch, "float4_e2m1fn_x2", None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            "torch takes e2m1 data as torch.float4_e2m1fn_x2, which this version of torch lacks; upgrade torch"
        )
    return dtype


# Torch


def _torch_data(codes: Codes, case: _Case) -> Tensor:
    data = codes.data.view(_float4()) if case.format.element == "e2m1" else codes.data
    return data if case.operand == "a" else data.t()


def _torch_back(buffers: ForeignCodes, case: _Case, scale: Tensor) -> Codes:
    data = buffers.data if case.operand == "a" else buffers.data.t()
    return Codes(data.view(case.format.number.dtype), scale, buffers.global_scale)


def _to_torch_v1(codes: Codes, case: _Case) -> ForeignCodes:
    block, scale = case.format.block, codes.scale
    if block in ("mx", "nvfp4"):
        scale = swizzle_32_4_4(scale)
    elif block == "1x128":
        scale = _mn_major(scale, case.rows)
    elif block in ("row", "128x128"):
        scale = _row_major(scale)
    if block in ("row", "1x128", "128x128") and case.operand == "b":
        scale = scale.t()
    return ForeignCodes(_torch_data(codes, case), scale, codes.global_scale)


def _from_torch_v1(buffers: ForeignCodes, case: _Case) -> Codes:
    block, scale = case.format.block, buffers.scale
    if block in ("row", "1x128", "128x128") and case.operand == "b":
        scale = scale.t()
    return _torch_back(buffers, case, _from_torch_scale(scale, case))


def _to_torch_v2(codes: Codes, case: _Case) -> ForeignCodes:
    if case.format.block == "1x128":
        scale = _mn_major(codes.scale, case.rows)
    elif case.format.block == "128x128":
        scale = _padded(codes.scale, case.scale_rows, _rup(case.scale_cols, 4)).t()
    else:
        return _to_torch_v1(codes, case)
    return ForeignCodes(_torch_data(codes, case), scale)


def _from_torch_v2(buffers: ForeignCodes, case: _Case) -> Codes:
    scale = buffers.scale
    if case.format.block == "128x128":
        _shape("scale", scale, (_rup(case.scale_cols, 4), case.scale_rows))
        scale = scale.t()[:, : case.scale_cols]
    elif case.format.block != "1x128":
        return _from_torch_v1(buffers, case)
    return _torch_back(buffers, case, _from_torch_scale(scale, case))


def _from_torch_scale(scale: Tensor, case: _Case) -> Tensor:
    if case.format.block in ("mx", "nvfp4"):
        return unswizzle_32_4_4(scale, case.scale_rows, case.scale_cols)
    if case.format.block == "tensor":
        return scale.reshape(-1, 1)
    return _stored(scale, case)


def _stored(scale: Tensor, case: _Case) -> Tensor:
    """Return a scale of the right shape with the strides that `Codes` use."""
    if not (case.format.block == "row" and tuple(scale.shape) == (case.rows, 1)):
        _shape("scale", scale, (case.scale_rows, case.scale_cols))
    return _mn_major(scale, _rup(case.rows, 4)) if case.format.block == "1x128" else _row_major(scale)


# DeepGEMM and DeepEP


def _to_deepgemm_sm90(codes: Codes, case: _Case) -> ForeignCodes:
    return ForeignCodes(codes.data, _stored(codes.scale, case))


def _from_rows(buffers: ForeignCodes, case: _Case) -> Codes:
    return Codes(buffers.data, _stored(buffers.scale, case))


def _to_deepgemm_sm100(codes: Codes, case: _Case) -> ForeignCodes:
    words = _words(codes.scale, case.check)
    if case.format.block == "128x128":
        rows, cols = words.shape
        words = words.unsqueeze(1).expand(rows, 128, cols).reshape(rows * 128, cols)[: case.rows]
    data = codes.data.view(torch.int8) if case.format.element == "e2m1" else codes.data
    return ForeignCodes(data, _mn_major(words, _rup(case.rows, 4), _PAD_WORD))


def _from_deepgemm_sm100(buffers: ForeignCodes, case: _Case) -> Codes:
    packed = buffers.scale
    _shape("scale", packed, (case.rows, _cdiv(case.scale_cols, 4)))
    if case.format.block == "128x128":
        packed = packed[::128]
    scale = unpack_ue8m0(packed, case.scale_cols, case.format.scale_dtype)
    return Codes(buffers.data.view(case.format.number.dtype), _stored(scale, case))


def _to_deepep(codes: Codes, case: _Case) -> ForeignCodes:
    return ForeignCodes(codes.data, _row_major(codes.scale))


# TransformerEngine


def _to_te(codes: Codes, case: _Case) -> ForeignCodes:
    block, data = case.format.block, _bytes(codes.data)
    if block == "tensor":
        return ForeignCodes(data, codes.scale.reshape(-1))
    if block == "1x128":
        return ForeignCodes(data, _backing_buffer(codes.scale, _rup(case.rows, 4)))
    if block == "128x128":
        return ForeignCodes(data, _padded(codes.scale, case.scale_rows, _rup(case.scale_cols, 4)))
    scale = _bytes(codes.scale)
    rows, cols = _rup(case.rows, 128), _rup(case.scale_cols, 4)
    if block == "mx" and case.columnwise:
        return ForeignCodes(data.t().contiguous(), _padded(scale.t(), cols, rows))
    amax = None if codes.global_scale is None else _amax_of(codes.global_scale, case.format)
    return ForeignCodes(data, _padded(scale, rows, cols), None, amax)


def _from_te(buffers: ForeignCodes, case: _Case) -> Codes:
    format, data, scale = case.format, buffers.data, buffers.scale
    _dtype("data", data, torch.uint8)
    if format.block == "tensor":
        return Codes(data.view(case.format.number.dtype), scale.reshape(-1, 1))
    if format.block == "1x128":
        _shape("scale", scale, (case.scale_cols, _rup(case.rows, 4)))
        return Codes(data.view(case.format.number.dtype), _stored(scale.t()[: case.rows], case))
    rows = case.scale_rows if format.block == "128x128" else _rup(case.rows, 128)
    cols = _rup(case.scale_cols, 4)
    if format.block == "mx" and case.columnwise:
        _shape("scale", scale, (cols, rows))
        data, scale = data.t().contiguous(), scale.t()
    _shape("scale", scale, (rows, cols))
    scale = _row_major(scale[: case.scale_rows, : case.scale_cols]).view(case.format.scale_dtype)
    if format.block != "nvfp4":
        return Codes(data.view(case.format.number.dtype), scale)
    if buffers.amax is None:
        raise ValueError("buffers.amax is missing: pass the amax that TE's NVFP4Tensor stores")
    return Codes(data, scale, _global_of(buffers.amax, format).reshape(()))


def _global_of(amax: Tensor, format: Format) -> Tensor:
    # Dividing in fp64 and rounding once gives the exact fp32 quotient even if a compiler divides approximately.
    # Both sides are tensors: torch turns number / x into a reciprocal and a product, which rounds twice.
    amax64 = amax.double()
    largest = torch.full_like(amax64, _NVFP4_MAX)
    if format.convention == "torchao":
        return torch.where(amax == 0, 1.0, (amax64 / largest).float())
    encode = (largest / amax64).float().clamp(max=torch.finfo(torch.float32).max)
    encode = torch.where((amax == 0) | (encode == 0), 1.0, encode)
    return (1.0 / encode.double()).float()


def _amax_of(global_scale: Tensor, format: Format) -> Tensor:
    """Return an amax [1] from which `_global_of` makes exactly this scale.

    Rounding lets a few neighboring values make the same scale. If one of them is a bf16 value, it must be the amax
    of a bf16 tensor; otherwise the nearest is as good as any. Scale 1 gives 2688, even if the amax was 0.
    """
    middle = (global_scale.double() * _NVFP4_MAX).float().reshape(1).view(torch.int32)
    candidates = torch.cat([middle + step for step in (0, 1, -1, 2, -2, 3, -3, 4, -4)])
    makes_it = _global_of(candidates.view(torch.float32), format) == global_scale
    score = makes_it.to(torch.int32) * (1 + ((candidates & 0xFFFF) == 0).to(torch.int32))
    return candidates.index_select(0, score.argmax(0, keepdim=True)).view(torch.float32)


# Swizzled block scales only


def _to_swizzled(codes: Codes, case: _Case) -> ForeignCodes:
    return ForeignCodes(codes.data, swizzle_32_4_4(codes.scale), codes.global_scale)


def _from_swizzled(buffers: ForeignCodes, case: _Case) -> Codes:
    return Codes(buffers.data, _from_torch_scale(buffers.scale, case), buffers.global_scale)


_FP8 = ("e4m3", "e5m2")

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout(
            "torch_v1",
            "torch._scaled_mm takes e4m3 or e5m2 with tensor, row, 1x128, 128x128 or mx scales, and nvfp4",
            (
                ("tensor", _FP8, "ab"),
                ("row", _FP8, "ab"),
                ("1x128", _FP8, "ab"),
                ("128x128", _FP8, "ab"),
                ("mx", _FP8, "ab"),
                ("nvfp4", ("e2m1",), "ab"),
            ),
            _to_torch_v1,
            _from_torch_v1,
        ),
        Layout(
            "torch_v2",
            "torch.nn.functional.scaled_mm takes e4m3 or e5m2 with tensor or row scales, e4m3 with 1x128, "
            "128x128 or mx scales, e2m1 with mx scales, and nvfp4",
            (
                ("tensor", _FP8, "ab"),
                ("row", _FP8, "ab"),
                ("1x128", ("e4m3",), "ab"),
                ("128x128", ("e4m3",), "ab"),
                ("mx", ("e4m3", "e2m1"), "ab"),
                ("nvfp4", ("e2m1",), "ab"),
            ),
            _to_torch_v2,
            _from_torch_v2,
        ),
        Layout(
            "deepgemm_sm90",
            "DeepGEMM on SM90 takes e4m3 with 1x128 scales for a, and with 1x128 or 128x128 scales for b",
            (("1x128", ("e4m3",), "ab"), ("128x128", ("e4m3",), "b")),
            _to_deepgemm_sm90,
            _from_rows,
        ),
        Layout(
            "deepgemm_sm100",
            "DeepGEMM on SM100 takes e4m3 with 1x128, 128x128 or mx scales that are powers of two, and e2m1 "
            "with mx scales",
            (("1x128", ("e4m3",), "ab"), ("128x128", ("e4m3",), "ab"), ("mx", ("e4m3", "e2m1"), "ab")),
            _to_deepgemm_sm100,
            _from_deepgemm_sm100,
        ),
        Layout(
            "te",
            "TransformerEngine takes e4m3 or e5m2 with tensor, 1x128, 128x128 or mx scales, and nvfp4",
            (
                ("tensor", _FP8, "ab"),
                ("1x128", _FP8, "ab"),
                ("128x128", _FP8, "ab"),
                ("mx", _FP8, "ab"),
                ("nvfp4", ("e2m1",), "ab"),
            ),
            _to_te,
            _from_te,
        ),
        Layout(
            "deepep",
            "DeepEP dispatches e4m3 with 1x128 fp32 scales",
            (("1x128", ("e4m3",), "ab"),),
            _to_deepep,
            _from_rows,
        ),
        Layout(
            "mx_swizzled",
            "the 32x4x4 swizzle is for mx and nvfp4 scales",
            (("mx", (*_FP8, "e2m1"), "ab"), ("nvfp4", ("e2m1",), "ab")),
            _to_swizzled,
            _from_swizzled,
        ),
    )
}


def _layout(name: str, format: Format, operand: Operand) -> Layout:
    if name not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {name!r}")
    if operand not in ("a", "b"):
        raise ValueError(f"operand must be 'a' or 'b'; got {operand!r}")
    layout = LAYOUTS[name]
    if not layout.supports(format, operand):
        raise ValueError(f"{layout.takes}; got {format} for {operand}")
    return layout


def _shape(what: str, x: Tensor, shape: tuple[int, int]) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{what} must have shape {shape}; got {tuple(x.shape)}")


def _dtype(what: str, x: Tensor, dtype: torch.dtype) -> None:
    if x.dtype != dtype:
        raise ValueError(f"{what} must be {dtype}; got {x.dtype}")


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _rup(a: int, b: int) -> int:
    return _cdiv(a, b) * b
