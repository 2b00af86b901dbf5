"""Layouts: buffers have the shape, strides, dtype and padding that a consumer documents, and round-trip exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from triton_loom import testing

from weft.quant import Codes
from weft.quant.formats import ELEMENTS, Format
from weft.quant.layouts import (
    LAYOUTS,
    ForeignCodes,
    from_layout,
    pack_ue8m0,
    swizzle_32_4_4,
    to_layout,
    unpack_ue8m0,
    unswizzle_32_4_4,
)

# Rows: 0, 1, not a multiple of 4, a multiple of 4 but not of 128, a multiple of 128. Columns: not a multiple of 16, 32
# or 128, and with and without a multiple of 4 groups of 16, 32 and 128.
SHAPES = [(0, 256), (1, 128), (1, 640), (5, 129), (130, 272), (132, 512), (256, 1024), (131, 47), (6, 1)]
FORMATS = [
    "e4m3:tensor:te",
    "e5m2:tensor:te",
    "e4m3:row:torchao",
    "e5m2:row:torchao",
    "e4m3:1x128:te:pow2",
    "e5m2:1x128:te:pow2",
    "e4m3:1x128:deepgemm",
    "e4m3:128x128:te:pow2",
    "e4m3:128x128:deepgemm",
    "e4m3:mx:te",
    "e5m2:mx:te",
    "e2m1:mx:te",
    "e2m1:nvfp4:te",
    "e2m1:nvfp4:torchao",
    "e2m1:nvfp4_16x16:te",
]
PAIRS = [
    (name, spec, operand)
    for name, layout in LAYOUTS.items()
    for spec in FORMATS
    for operand in ("a", "b")
    if layout.supports(spec, operand)  # type: ignore[arg-type]
]
BLOCKWISE = Format("1x128")


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def rup(a: int, b: int) -> int:
    return cdiv(a, b) * b


def mn_major(scale: torch.Tensor) -> torch.Tensor:
    """Return scales in the storage of 1x128 scales: [cdiv(K, 128), rup(M, 4)] row-major, padded with zeros."""
    rows, cols = scale.shape
    buffer = torch.zeros(cols, rup(rows, 4))
    buffer[:, :rows] = scale.t()
    return buffer.t()[:rows]


def make(spec: str | Format, rows: int, cols: int, seed: int = 0) -> Codes:
    """Return codes with random bytes in data and scales; scales are arbitrary unless the format needs powers of two."""
    format = Format.of(spec)
    g = torch.Generator().manual_seed(seed)

    def some_bytes(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)

    data = some_bytes(format.data_shape(rows, cols)).view(format.number.dtype)
    shape = (1, 1) if format.block == "tensor" else format.scale_shape(rows, cols)
    if format.stored.block in ("mx", "nvfp4"):
        scale = some_bytes(shape).view(format.scale_dtype)
    elif format.power_of_two:
        bits = torch.randint(0, 255, shape, generator=g, dtype=torch.int32) << 23
        scale = torch.where(bits == 0, 0x00400000, bits).to(torch.int32).view(torch.float32)
    else:
        scale = torch.randint(0, 2**31 - 1, shape, generator=g, dtype=torch.int32).view(torch.float32)
    if format.block == "1x128":
        scale = mn_major(scale)
    if format.stored.block != "nvfp4":
        return Codes(data, scale, None, format.spec)
    return Codes(data, scale, nvfp4_global(torch.rand((), generator=g) * 10, format), format.spec)


def nvfp4_global(amax: torch.Tensor, format: Format) -> torch.Tensor:
    if format.convention == "torchao":
        return torch.where(amax == 0, 1.0, amax / torch.tensor(2688.0))
    encode = (torch.tensor(2688.0) / amax).clamp(max=torch.finfo(torch.float32).max)
    return 1.0 / torch.where((amax == 0) | (encode == 0), 1.0, encode)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(testing.words(a), testing.words(b))


def assert_same_copy(got: Codes, want: Codes) -> None:
    assert same(got.data, want.data)
    assert same(got.scale, want.scale)
    assert got.data.is_contiguous()
    if want.scale.numel():
        assert got.scale.stride() == want.scale.stride()
    assert Format.of(got.format) == Format.of(want.format).stored
    assert (got.global_scale is None) == (want.global_scale is None)
    if got.global_scale is not None and want.global_scale is not None:
        assert same(got.global_scale, want.global_scale)


def values(copy: Codes, spec: str | Format, cols: int) -> torch.Tensor:
    """Decode a copy to fp32."""
    format = Format.of(spec)
    q = copy.data.float()
    scale = copy.scale.float()
    block_rows = format.block_rows or max(q.shape[0], 1)
    wide = scale.repeat_interleave(block_rows, 0)[: q.shape[0]]
    return q * wide.repeat_interleave(format.group or cols, 1)[:, :cols]


# Round trips


@pytest.mark.parametrize(("name", "spec", "operand"), PAIRS)
def test_round_trip(name: str, spec: str, operand: Any) -> None:
    for shape in SHAPES:
        copy = make(spec, *shape)
        buffers = to_layout(copy, name, operand=operand)
        assert_same_copy(from_layout(buffers, spec, name, shape, operand=operand), copy)


@pytest.mark.parametrize("spec", [s for s in FORMATS if LAYOUTS["te"].supports(s)])
def test_round_trip_of_te_column_copies(spec: str) -> None:
    for shape in SHAPES:
        copy = make(spec, *shape)
        buffers = to_layout(copy, "te", columnwise=True)
        assert_same_copy(from_layout(buffers, spec, "te", shape, columnwise=True), copy)


@pytest.mark.parametrize("seed", range(4))
def test_round_trip_of_row_major_scales(seed: int) -> None:
    """Foreign 1x128 scales may have other strides than ours."""
    ours = make("e4m3:1x128:deepgemm", 7, 300, seed)
    theirs = ours._replace(scale=ours.scale.contiguous())
    for name in ("torch_v1", "torch_v2", "deepgemm_sm90", "te", "deepep"):
        buffers = to_layout(theirs, name)
        want = to_layout(ours, name)
        assert same(buffers.scale, want.scale)
        assert buffers.scale.stride() == want.scale.stride()


# Shapes, strides, dtypes and pads


def expected(name: str, format: Format, operand: str, rows: int, cols: int) -> Any:
    """Return (shape, strides, dtype) of the scale, from the consumers' documentation."""
    k, r = cdiv(cols, format.group or max(cols, 1)), cdiv(rows, 128)
    block = format.stored.block
    f32, e8m0, e4m3 = torch.float32, torch.float8_e8m0fnu, torch.float8_e4m3fn
    if name in ("torch_v1", "torch_v2", "mx_swizzled") and block in ("mx", "nvfp4"):
        return (rup(rows, 128) * rup(k, 4),), (1,), {"mx": e8m0, "nvfp4": e4m3}[block]
    if name in ("torch_v1", "torch_v2") and block == "tensor":
        return (1, 1), (1, 1), f32
    if name in ("torch_v1", "torch_v2") and block == "row":
        return ((rows, 1), (1, 1), f32) if operand == "a" else ((1, rows), (1, 1), f32)
    if name == "torch_v1" and operand == "b":
        return ((k, rows), (rows, 1), f32) if block == "1x128" else ((k, r), (1, k), f32)
    if name == "torch_v1":
        return ((rows, k), (1, rows), f32) if block == "1x128" else ((r, k), (k, 1), f32)
    if name == "torch_v2":
        l4 = rup(k, 4)
        return ((rows, k), (1, rows), f32) if block == "1x128" else ((l4, r), (1, l4), f32)
    if name == "deepgemm_sm90":
        return ((rows, k), (1, rup(rows, 4)), f32) if block == "1x128" else ((r, k), (k, 1), f32)
    if name == "deepgemm_sm100":
        gran = 32 if block == "mx" else 128
        return (rows, cdiv(cols, 4 * gran)), (1, rup(rows, 4)), torch.int32
    if name == "deepep":
        return (rows, k), (k, 1), f32
    assert name == "te"
    return {
        "tensor": ((1,), (1,), f32),
        "1x128": ((k, rup(rows, 4)), (rup(rows, 4), 1), f32),
        "128x128": ((r, rup(k, 4)), (rup(k, 4), 1), f32),
        "mx": ((rup(rows, 128), rup(k, 4)), (rup(k, 4), 1), torch.uint8),
        "nvfp4": ((rup(rows, 128), rup(k, 4)), (rup(k, 4), 1), torch.uint8),
    }[block]


@pytest.mark.parametrize(("name", "spec", "operand"), PAIRS)
def test_scale_shape_strides_and_dtype(name: str, spec: str, operand: Any) -> None:
    format = Format.of(spec)
    for rows, cols in SHAPES:
        copy = make(spec, rows, cols)
        buffers = to_layout(copy, name, operand=operand)
        size, strides, dtype = expected(name, format, operand, rows, cols)
        assert tuple(buffers.scale.shape) == size
        assert buffers.scale.dtype == dtype
        if buffers.scale.numel() > 1:
            assert buffers.scale.stride() == strides

        is_b = operand == "b" and name.startswith("torch")
        data = format.data_shape(rows, cols)
        assert tuple(buffers.data.shape) == (data[::-1] if is_b else data)
        assert buffers.data.data_ptr() == copy.data.data_ptr()
        fp4 = dict.fromkeys(("torch_v1", "torch_v2"), torch.float4_e2m1fn_x2) | {"deepgemm_sm100": torch.int8}
        dtype_of_data = fp4.get(name, torch.uint8) if format.element == "e2m1" else format.number.dtype
        assert buffers.data.dtype == (torch.uint8 if name == "te" else dtype_of_data)


def test_values_and_padding_of_each_fp32_layout() -> None:
    """Scales match element by element, including padding; their values distinguish 1x128 from 128x128."""
    rows, cols = 6, 5 * 128 - 3
    copy = make("e4m3:1x128:deepgemm", rows, cols)
    te = to_layout(copy, "te").scale
    assert same(te[:, :rows].t(), copy.scale)
    assert not testing.words(te[:, rows:]).any()
    assert same(to_layout(copy, "torch_v1", operand="b").scale, copy.scale.t())
    assert same(to_layout(copy, "torch_v2", operand="b").scale, copy.scale)
    sm90 = to_layout(copy, "deepgemm_sm90").scale
    assert not testing.words(sm90.as_strided((5, 8), (8, 1))[:, rows:]).any()
    foreign = to_layout(copy._replace(scale=copy.scale.contiguous()), "te").scale
    assert same(foreign, te)

    copy = make("e4m3:128x128:deepgemm", 300, cols)
    te = to_layout(copy, "te").scale
    assert same(te[:, :5], copy.scale)
    assert not testing.words(te[:, 5:]).any()
    v2 = to_layout(copy, "torch_v2", operand="b").scale
    assert same(v2[:5], copy.scale.t())
    assert not testing.words(v2[5:]).any()
    assert same(to_layout(copy, "torch_v1", operand="b").scale, copy.scale.t())


@pytest.mark.parametrize(("spec", "group"), [("e4m3:mx:te", 32), ("e2m1:nvfp4:te", 16)])
def test_te_pads_block_scales_with_zeros(spec: str, group: int) -> None:
    rows, cols = 130, 6 * group
    copy = make(spec, rows, cols)
    scale = to_layout(copy, "te").scale
    assert scale.shape == (256, 8)
    assert torch.equal(scale[:rows, :6], copy.scale.view(torch.uint8))
    assert not scale[rows:].any()
    assert not scale[:, 6:].any()


def test_column_wise_copies_for_te() -> None:
    """Column-wise copies of an [M, K] tensor are transposed, except for MXFP8."""
    m, k = 160, 384
    mx = make("e4m3:mx:te", k, m)
    buffers = to_layout(mx, "te", columnwise=True)
    assert buffers.data.shape == (m, k)
    assert buffers.data.is_contiguous()
    assert torch.equal(buffers.data, mx.data.view(torch.uint8).t())
    assert buffers.scale.shape == (rup(m // 32, 4), rup(k, 128)) == (8, 384)
    assert buffers.scale.is_contiguous()
    assert torch.equal(buffers.scale[:5], mx.scale.view(torch.uint8).t())
    assert not buffers.scale[5:].any()

    one = to_layout(make(BLOCKWISE, k, m), "te", columnwise=True)
    assert one.data.shape == (k, m)
    assert one.scale.shape == (cdiv(m, 128), rup(k, 4))
    two = to_layout(make("e4m3:128x128:te:pow2", k, m), "te", columnwise=True)
    assert two.data.shape == (k, m)
    assert two.scale.shape == (cdiv(k, 128), rup(cdiv(m, 128), 4))
    four = to_layout(make("e2m1:nvfp4:te", k, m), "te", columnwise=True)
    assert four.data.shape == (k, m // 2)
    assert four.scale.shape == (rup(k, 128), rup(cdiv(m, 16), 4))
    assert four.amax is not None
    assert four.amax.shape == (1,)


# No copies where bytes agree


@pytest.mark.parametrize("cols", [128, 640])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 128, 130])
def test_1x128_scales_are_shared(rows: int, cols: int) -> None:
    copy = make(BLOCKWISE, rows, cols)
    here = copy.scale.data_ptr()
    te = to_layout(copy, "te")
    assert te.scale.data_ptr() == here
    assert te.data.data_ptr() == copy.data.data_ptr()
    assert from_layout(te, BLOCKWISE, "te", (rows, cols)).scale.data_ptr() == here
    for operand in ("a", "b"):
        sm90 = to_layout(copy, "deepgemm_sm90", operand=operand)  # type: ignore[arg-type]
        assert sm90.scale.data_ptr() == here
        for name in ("torch_v1", "torch_v2"):
            scale = to_layout(copy, name, operand=operand).scale  # type: ignore[arg-type]
            assert (scale.data_ptr() == here) == (rows % 4 == 0 or cols == 128)


def test_other_scales_are_shared_if_they_need_no_padding() -> None:
    def shared(spec: str, rows: int, cols: int, name: str, operand: Any = "b") -> bool:
        copy = make(spec, rows, cols)
        return to_layout(copy, name, operand=operand).scale.data_ptr() == copy.scale.data_ptr()

    for name in ("torch_v2", "te"):
        assert shared("e4m3:128x128:te:pow2", 200, 512, name)
        assert not shared("e4m3:128x128:te:pow2", 200, 640, name)
    assert shared("e4m3:128x128:te:pow2", 200, 640, "torch_v1")
    assert shared("e4m3:128x128:te:pow2", 200, 640, "deepgemm_sm90")
    assert shared("e4m3:row:torchao", 5, 40, "torch_v1")
    assert shared("e4m3:row:torchao", 5, 40, "torch_v2")
    for name in ("torch_v1", "torch_v2", "te"):
        assert shared("e4m3:tensor:te", 5, 40, name)
    assert shared("e4m3:mx:te", 256, 256, "te")
    assert shared("e2m1:nvfp4:te", 256, 256, "te")


def test_a_buffer_is_not_extended_beyond_its_storage() -> None:
    """Strides alone do not prove that the last padding is allocated."""
    copy = make(BLOCKWISE, 5, 256)
    bare = torch.empty_strided((5, 2), (1, 8))
    bare.copy_(copy.scale)
    scale = to_layout(copy._replace(scale=bare), "te").scale
    assert same(scale, to_layout(copy, "te").scale)
    assert scale.data_ptr() != bare.data_ptr()


# Swizzle


@pytest.mark.parametrize(
    ("rows", "cols"), [(128, 4), (256, 8), (1, 1), (130, 5), (33, 3), (300, 13), (0, 4), (4, 0)]
)
@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.uint8])
def test_swizzle_offsets(rows: int, cols: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(rows + cols)
    codes = torch.randint(0, 256, (rows, cols), generator=g, dtype=torch.uint8)
    flat = swizzle_32_4_4(codes.view(dtype))
    assert flat.dtype == dtype
    want = [0] * (rup(rows, 128) * rup(cols, 4))
    ncb = cdiv(cols, 4)
    listed = codes.tolist()
    for r in range(rows):
        for c in range(cols):
            at = ((r // 128) * ncb + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
            want[at] = listed[r][c]
    assert flat.view(torch.uint8).tolist() == want
    assert same(unswizzle_32_4_4(flat, rows, cols), codes.view(dtype))


def test_unswizzle_takes_any_shape_of_the_right_size() -> None:
    codes = torch.arange(130 * 5, dtype=torch.int32).to(torch.uint8).reshape(130, 5)
    flat = swizzle_32_4_4(codes)
    assert torch.equal(unswizzle_32_4_4(flat.view(256, 8), 130, 5), codes)
    with pytest.raises(ValueError, match="2048 elements; got 2047"):
        unswizzle_32_4_4(flat[1:], 130, 5)


# UE8M0


def bytes_of(packed: torch.Tensor) -> list[list[int]]:
    """Return the bytes of packed words, row by row."""
    return packed.clone(memory_format=torch.contiguous_format).view(torch.uint8).tolist()


def words(scale: torch.Tensor) -> list[list[int]]:
    return bytes_of(pack_ue8m0(scale))


def test_a_mantissa_does_not_leak_into_a_neighbor() -> None:
    assert words(torch.tensor([[1.0, 1.5, 1.0, 1.0]])) == [[127, 255, 127, 127]]
    assert words(torch.tensor([[1.5, 1.0, 2.0, 1.1]])) == [[255, 127, 128, 255]]
    assert words(torch.full((1, 4), 1.1)) == [[255] * 4]
    assert words(torch.tensor([[-1.0, 1.0, -0.0, 1.0]])) == [[255, 127, 255, 127]]
    data, scale = (
        torch.zeros(1, 512, dtype=torch.float8_e4m3fn),
        mn_major(torch.tensor([[1.0, 1.5, 1.0, 1.0]])),
    )
    for spec in ("e4m3:1x128:deepgemm:pow2", "e4m3:128x128:deepgemm:pow2"):
        copy = Codes(data, scale, None, spec)
        packed = to_layout(copy, "deepgemm_sm100").scale
        assert bytes_of(packed) == [[127, 255, 127, 127]]
        with pytest.raises(ValueError, match="1 of 4 are not"):
            to_layout(copy, "deepgemm_sm100", check=True)


def test_every_exponent_packs_to_itself() -> None:
    codes = torch.arange(256, dtype=torch.int32)
    scale = torch.where(codes == 0, 0x00400000, codes << 23).to(torch.int32).view(torch.float32)
    assert torch.tensor(words(scale[None])).flatten().tolist() == codes.tolist()
    back = unpack_ue8m0(pack_ue8m0(scale[None]), 256)
    assert same(back[0, :255], scale[:255])
    assert back[0, 255].isnan()
    assert back[0, 0] == 2.0**-127
    as_codes = codes.to(torch.uint8)[None]
    for dtype in (torch.uint8, torch.float8_e8m0fnu):
        packed = pack_ue8m0(as_codes.view(dtype))
        assert same(packed, pack_ue8m0(scale[None]))
        assert same(unpack_ue8m0(packed, 256, dtype), as_codes.view(dtype))
    with pytest.raises(ValueError, match="fp32, e8m0 or uint8"):
        pack_ue8m0(scale[None].double())


def test_random_bits_pack_to_their_own_byte() -> None:
    g = torch.Generator().manual_seed(3)
    raw = torch.randint(-(2**31), 2**31 - 1, (64, 7), generator=g, dtype=torch.int64)
    raw[::2] &= 0x7F800000
    got = words(raw.to(torch.int32).view(torch.float32))
    for row, packed_codes in zip(raw.tolist(), got, strict=True):
        for value, code in zip(row, packed_codes, strict=False):
            u = value & 0xFFFFFFFF
            exact = u >> 31 == 0 and u & 0x7FFFFF == 0
            assert code == (u >> 23 if exact else 255)
        assert packed_codes[7:] == [127]


def test_check_raises_for_unrepresentable_scales() -> None:
    tiny = torch.tensor([2.0**-127, 2.0**-126, 1.0, 2.0**127, 0.0])
    assert words(tiny[None]) == [[0, 1, 127, 254, 0, 127, 127, 127]]
    pack_ue8m0(tiny[None], check=True)
    for bad in (1.5, 2.0**-128, 3.0 * 2.0**-128, -2.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="1 of 2 are not"):
            pack_ue8m0(torch.tensor([[1.0, bad]]), check=True)
    with pytest.raises(ValueError, match="powers of two"):
        to_layout(make("e4m3:1x128:deepgemm", 4, 128), "deepgemm_sm100")


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (5, 6), (8, 8), (129, 3)])
def test_packed_words_are_mn_major_and_padded_with_one(rows: int, groups: int) -> None:
    codes = torch.randint(
        0, 256, (rows, groups), generator=torch.Generator().manual_seed(1), dtype=torch.uint8
    )
    packed = pack_ue8m0(codes)
    ld, n = rup(rows, 4), cdiv(groups, 4)
    assert packed.shape == (rows, n)
    assert packed.stride() == (1, ld)
    buffer = packed.as_strided((n, ld), (ld, 1)).contiguous().view(torch.uint8).reshape(n, ld, 4)
    want = torch.full((ld, n * 4), 127, dtype=torch.uint8)
    want[:rows, :groups] = codes
    assert torch.equal(buffer.permute(1, 0, 2).reshape(ld, n * 4), want)


def test_deepgemm_packing_of_each_granularity() -> None:
    """Packing matches the shifts of DeepGEMM's kernel, which are right for powers of two."""

    def reference(bits_of: torch.Tensor) -> torch.Tensor:
        v = F.pad(bits_of.to(torch.int64), (0, -bits_of.shape[1] % 4), value=127 << 23)
        v = v.reshape(v.shape[0], -1, 4)
        word = (v[..., 0] >> 23) | (v[..., 1] >> 15) | (v[..., 2] >> 7) | (v[..., 3] << 1)
        return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)

    copy = make("e4m3:1x128:te:pow2", 9, 640)
    normal = copy.scale.clamp(min=2.0**-126)
    got = to_layout(copy._replace(scale=normal), "deepgemm_sm100").scale
    assert torch.equal(got, reference(testing.words(normal)))
    copy = make("e4m3:128x128:te:pow2", 200, 640)
    normal = copy.scale.clamp(min=2.0**-126)
    got = to_layout(copy._replace(scale=normal), "deepgemm_sm100", operand="b").scale
    assert got.shape == (200, 2)
    assert torch.equal(got, reference(testing.words(normal)[torch.arange(200) // 128]))
    copy = make("e4m3:mx:te", 9, 160)
    got = to_layout(copy, "deepgemm_sm100").scale
    assert torch.equal(got, reference(testing.words(copy.scale).to(torch.int64) << 23))


# NVFP4's global scale


@pytest.mark.parametrize("convention", ["te", "torchao"])
def test_amax_of_te_round_trips(convention: Any) -> None:
    """TE stores the amax and we store the scale computed from it; a bf16 tensor's amax is recovered exactly."""
    format = Format("nvfp4", convention=convention)
    g = torch.Generator().manual_seed(5)
    wide = torch.exp(torch.randn(60, generator=g) * 8)
    some = torch.tensor([2688.0, 1.0, 6.0, 448.0, 1e-36, 2.0**-100, 3e30, 2.0**-133])
    for exact, amax in [(True, wide.bfloat16().float()), (False, wide), (False, some)]:
        for one in amax:
            copy = make(format, 2, 16)._replace(global_scale=nvfp4_global(one, format))
            buffers = to_layout(copy, "te")
            assert buffers.amax is not None
            assert buffers.amax.shape == (1,)
            assert buffers.global_scale is None
            assert torch.equal(buffers.amax[0], one) or not exact
            assert_same_copy(from_layout(buffers, format, "te", (2, 16)), copy)
    for one in (0.0, float("inf")) if convention == "te" else (0.0,):
        assert nvfp4_global(torch.tensor(one), format) == 1
        buffers = to_layout(copy, "te")._replace(amax=torch.tensor([one]))
        assert from_layout(buffers, format, "te", (2, 16)).global_scale == 1


def test_nvfp4_global_scale_is_kept() -> None:
    copy = make("e2m1:nvfp4:te", 4, 64)
    for name in ("torch_v1", "torch_v2", "mx_swizzled"):
        assert to_layout(copy, name).global_scale is copy.global_scale
    with pytest.raises(ValueError, match="nvfp4 codes need a global_scale"):
        to_layout(copy._replace(global_scale=None), "torch_v2")
    with pytest.raises(ValueError, match=r"buffers\.amax"):
        from_layout(ForeignCodes(*to_layout(copy, "te")[:2]), "e2m1:nvfp4:te", "te", (4, 64))


# Products of torch


@pytest.mark.parametrize("spec", ["e4m3:tensor:te", "e4m3:row:torchao"])
@pytest.mark.parametrize("a_element", ["e4m3", "e5m2"])
def test_torch_multiplies_layouts_on_the_cpu(spec: str, a_element: Any) -> None:
    m, n, k = 5, 16, 48
    b_format = Format.of(spec)
    a_format = replace(b_format, element=a_element)

    def small(format: Format, rows: int, seed: int) -> Codes:
        g = torch.Generator().manual_seed(seed)
        q = torch.randint(-4, 5, (rows, k), generator=g).float().to(ELEMENTS[format.element or ""].dtype)
        shape = (1, 1) if format.block == "tensor" else (rows, 1)
        return Codes(q, torch.rand(shape, generator=g) + 0.5, None, format.spec)

    a, b = small(a_format, m, 1), small(b_format, n, 2)
    want = values(a, a_format, k) @ values(b, b_format, k).t()
    for name in ("torch_v1", "torch_v2"):
        left, right = to_layout(a, name), to_layout(b, name, operand="b")
        if name == "torch_v1":
            got = torch._scaled_mm(left.data, right.data, left.scale, right.scale, out_dtype=torch.float32)
        else:
            recipe = {"tensor": F.ScalingType.TensorWise, "row": F.ScalingType.RowWise}[b_format.block]
            got = F.scaled_mm(
                left.data, right.data, left.scale, recipe, right.scale, recipe, output_dtype=torch.float32
            )
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("a_spec", "b_spec"),
    [
        ("e4m3:1x128:te:pow2", "e4m3:128x128:te:pow2"),
        ("e4m3:128x128:te:pow2", "e4m3:1x128:te:pow2"),
        ("e4m3:1x128:te:pow2", "e4m3:1x128:te:pow2"),
        ("e4m3:mx:te", "e4m3:mx:te"),
        ("e2m1:nvfp4:te", "e2m1:nvfp4:te"),
    ],
)
def test_torch_accepts_the_shapes_of_block_scales(a_spec: str, b_spec: str) -> None:
    """torch multiplies these only on a GPU, but its meta functions check shapes, dtypes and most strides."""
    m, n, k = 256, 128, 640
    recipes = {"1x128": "BlockWise1x128", "128x128": "BlockWise128x128", "mx": "BlockWise1x32"}
    sides = []
    for spec, rows, operand in ((a_spec, m, "a"), (b_spec, n, "b")):
        format = Format.of(spec)
        buffers = to_layout(meta(make(spec, rows, k)), "torch_v2", operand=operand)  # type: ignore[arg-type]
        swizzled = format.block in ("mx", "nvfp4")
        swizzle = [F.SwizzleType.SWIZZLE_32_4_4 if swizzled else F.SwizzleType.NO_SWIZZLE]
        if format.block == "nvfp4":
            assert buffers.global_scale is not None
            kinds = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
            sides.append(
                (
                    buffers.data,
                    [buffers.scale, buffers.global_scale],
                    kinds,
                    [*swizzle, swizzle[0].NO_SWIZZLE],
                )
            )
        else:
            kinds = [getattr(F.ScalingType, recipes[format.block])]
            sides.append((buffers.data, [buffers.scale], kinds, swizzle))
    (a, scale_a, kind_a, swizzle_a), (b, scale_b, kind_b, swizzle_b) = sides
    out = F.scaled_mm(
        a, b, scale_a, kind_a, scale_b, kind_b, swizzle_a, swizzle_b, output_dtype=torch.bfloat16
    )
    assert out.shape == (m, n)
    v1 = [
        to_layout(meta(make(spec, rows, k)), "torch_v1", operand=operand)  # type: ignore[arg-type]
        for spec, rows, operand in ((a_spec, m, "a"), (b_spec, n, "b"))
    ]
    out = torch._scaled_mm(v1[0].data, v1[1].data, v1[0].scale, v1[1].scale, out_dtype=torch.bfloat16)
    assert out.shape == (m, n)


# Tracing


def meta(copy: Codes) -> Codes:
    def to_meta(x: torch.Tensor) -> torch.Tensor:
        """Return an equal view of a storage on the meta device."""
        size = x.untyped_storage().nbytes() // x.element_size()
        storage = torch.empty(size, dtype=x.dtype, device="meta")
        return storage.as_strided(x.shape, x.stride(), x.storage_offset())

    return copy.map(to_meta)


@pytest.mark.parametrize(("name", "spec", "operand"), PAIRS)
def test_meta_tensors(name: str, spec: str, operand: Any) -> None:
    shape = (5, 300)
    copy = make(spec, *shape)
    real = to_layout(copy, name, operand=operand)
    traced = to_layout(meta(copy), name, operand=operand)
    for x, y in zip(real, traced, strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            assert y.is_meta
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
    back = from_layout(traced, spec, name, shape, operand=operand)
    assert (back.data.shape, back.scale.shape) == (copy.data.shape, copy.scale.shape)


COMPILED = [
    ("torch_v2", "e4m3:1x128:te:pow2"),
    ("torch_v2", "e4m3:128x128:te:pow2"),
    ("torch_v2", "e4m3:mx:te"),
    ("deepgemm_sm90", "e4m3:1x128:te:pow2"),
    ("deepgemm_sm100", "e4m3:1x128:te:pow2"),
    ("deepgemm_sm100", "e4m3:128x128:te:pow2"),
    ("deepgemm_sm100", "e4m3:mx:te"),
    ("te", "e4m3:1x128:te:pow2"),
    ("te", "e4m3:mx:te"),
    ("te", "e2m1:nvfp4:te"),
    ("deepep", "e4m3:1x128:te:pow2"),
]


@pytest.mark.parametrize(("name", "spec"), COMPILED)
def test_compiles_without_a_graph_break(name: str, spec: str) -> None:
    torch._dynamo.reset()
    format, shape = Format.of(spec), (6, 640)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def there_and_back(copy: Codes) -> tuple[ForeignCodes, Codes]:
        buffers = to_layout(copy, name)
        return buffers, from_layout(buffers, format, name, shape)

    copy = make(spec, *shape)
    got, back = there_and_back(copy)
    want = to_layout(copy, name)
    for x, y in zip(got, want, strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            assert same(x, y)
            assert x.stride() == y.stride()
    assert_same_copy(back, copy)


# Errors


@pytest.mark.parametrize(
    ("name", "spec", "operand", "message"),
    [
        ("torch_v2", "int8:row:te", "a", "takes e4m3 or e5m2"),
        (
            "torch_v2",
            "e5m2:1x128:te:pow2",
            "a",
            "takes e4m3 or e5m2 with tensor or row scales, e4m3 with 1x128",
        ),
        ("torch_v1", "e2m1:mx:te", "a", "takes e4m3 or e5m2"),
        ("deepgemm_sm90", "e4m3:128x128:te:pow2", "a", "1x128 scales for a"),
        ("deepgemm_sm90", "e5m2:1x128:te:pow2", "a", "takes e4m3"),
        ("deepgemm_sm90", "e4m3:mx:te", "b", "takes e4m3 with 1x128"),
        ("deepgemm_sm100", "e4m3:1x128:deepgemm", "a", "powers of two"),
        ("deepgemm_sm100", "e2m1:nvfp4:te", "a", "e2m1 with mx scales"),
        ("te", "e4m3:row:torchao", "a", "TransformerEngine takes"),
        ("te", "e2m1:mx:te", "a", "TransformerEngine takes"),
        ("deepep", "e4m3:128x128:te:pow2", "a", "DeepEP dispatches"),
        ("mx_swizzled", "e4m3:1x128:te:pow2", "a", "for mx and nvfp4"),
        ("nobody", "e4m3:1x128:te:pow2", "a", "must be one of torch_v1"),
        ("te", "e4m3:1x128:te:pow2", "c", "operand must be"),
    ],
)
def test_unsupported_formats_raise(name: str, spec: str, operand: Any, message: str) -> None:
    copy = make(spec, 4, 128)
    with pytest.raises(ValueError, match=message):
        to_layout(copy, name, operand=operand)
    with pytest.raises(ValueError, match=message):
        from_layout(ForeignCodes(copy.data, copy.scale), spec, name, (4, 128), operand=operand)


def test_mismatched_copies_raise() -> None:
    copy = make(BLOCKWISE, 8, 256)
    with pytest.raises(ValueError, match=r"must have shape \(8, 2\); got \(8, 1\)"):
        to_layout(copy._replace(scale=copy.scale[:, :1]), "te")
    with pytest.raises(ValueError, match=r"data must be torch\.float8_e5m2"):
        to_layout(copy._replace(format="e5m2:1x128:te:pow2"), "te")
    with pytest.raises(ValueError, match=r"scale must be torch\.float32"):
        to_layout(copy._replace(scale=copy.scale.double()), "te")
    with pytest.raises(ValueError, match="must be 2-D"):
        to_layout(copy._replace(data=copy.data[None]), "te")


@pytest.mark.parametrize(("name", "spec", "operand"), PAIRS)
def test_refuses_buffers_of_another_shape(name: str, spec: str, operand: Any) -> None:
    buffers = to_layout(make(spec, 140, 640), name, operand=operand)
    with pytest.raises(ValueError, match=r"must have shape|elements; got"):
        from_layout(buffers, spec, name, (300, 1300), operand=operand)
