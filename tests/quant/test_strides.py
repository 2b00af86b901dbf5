"""Quantization of tensors with any strides: large offsets, padding, empty tensors, repeated runs."""

from __future__ import annotations

import itertools
import mmap

import pytest
import torch

import weft
from tests.quant.checks import BACKENDS, assert_quantized, assert_same, check, decoded, expected, rounded_up
from weft import Format


def views() -> dict[str, torch.Tensor]:
    base = torch.randn(400, 640)
    flat = torch.randn(150 * 37 + 1)
    return {
        "transposed": base[:37, :150].t(),
        "every second row": base[:300:2, :37],
        "every second column": base[:150, :74:2],
        "slice of wider rows": base[:150, 64:101],
        "off by one element": flat[1:].view(150, 37),
        "one row repeated": base[:1, :37].expand(150, 37),
        "one column repeated": base[:150, :1].expand(150, 37),
        "one number": base[:1, :1].expand(150, 37),
        "one row": base[:1, :37],
        "one column": base[:150, 3:4],
        "aligned columns of wider rows": base[:150, 64:96],
    }


@pytest.mark.parametrize("spec", ["e4m3:1x128:te:pow2", "e2m1:nvfp4:te", "e4m3:row:te"])
def test_strided_inputs(spec: str) -> None:
    f = Format.of(spec)
    for name, x in views().items():
        for backend in BACKENDS:
            check(x, f, name, columnwise=True, backend=backend)
        if spec.startswith("e4m3:1x128"):
            check(x, f, name, columnwise=False)


def test_column_wise_is_row_wise_of_the_transpose() -> None:
    for spec in ("e4m3:1x128:te:pow2", "e2m1:nvfp4:te", "e4m3:row:te", "e4m3:mx:te", "e4m3:128x128:te"):
        x = torch.randn(140, 37)
        both = weft.quantize(x, spec, columnwise=True)
        other = weft.quantize(x.t(), spec, columnwise=True)
        for a, b in ((both.columnwise, other.rowwise), (both.rowwise, other.columnwise)):
            assert_same(a.data, b.data, spec)
            assert_same(a.scale, b.scale, spec)


def test_more_and_fewer_dimensions() -> None:
    f = Format("1x128")
    for shape in ((37,), (2, 70, 37), (2, 5, 14, 37)):
        x = torch.randn(shape)
        flat = x.reshape(-1, 37)
        for columnwise, backend in itertools.product((False, True), BACKENDS):
            with weft.backend(backend):
                q = weft.quantize(x, f, columnwise=columnwise)
                values = weft.dequantize(q)
            assert q.shape == x.shape
            assert_quantized(q, flat, f, f"{shape} {backend}", columnwise=columnwise)
            assert_same(values, decoded(expected(flat, f), f, tuple(flat.shape)).view(shape), "values")
    x = torch.randn(37, 2, 70).permute(1, 2, 0)  # no two dimensions merge, and the last is not contiguous
    assert_quantized(weft.quantize(x, f, columnwise=True), x.reshape(-1, 37), f, columnwise=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_no_rows(shape: tuple[int, ...], backend: str) -> None:
    for spec in (
        "e4m3:1x128:te:pow2",
        "e4m3:tensor:te",
        "e4m3:tensor:deepgemm",
        "e2m1:nvfp4:te",
        "e2m1:nvfp4_16x16:te",
        "e4m3:row:deepgemm",
    ):
        f = Format.of(spec)
        with weft.backend(backend):  # type: ignore[arg-type]
            q, amax = weft.quantize(torch.zeros(shape), f, columnwise=True, return_amax=True)
            values = weft.dequantize(q)
        assert values.shape == shape
        assert amax.item() == 0
        for copy, rows, cols in ((q.rowwise, 0, 64), (q.columnwise, 64, 0)):
            assert tuple(copy.data.shape) == f.data_shape(rows, cols)
            assert tuple(copy.scale.shape) == f.scale_shape(rows, cols)
            if copy.scale.numel():  # the scale of an amax of 0
                want = expected(torch.zeros(1, 1), f).scale
                assert_same(copy.scale, want.expand(copy.scale.shape), spec)
            if f.block in ("nvfp4", "nvfp4_16x16"):
                assert copy.global_scale.item() == 1


def virtual(dtype: torch.dtype, rows: int, cols: int, stride: int) -> torch.Tensor:
    """Return [rows, cols] zeros with a stride so large that offsets need 64 bits. Untouched pages take no memory."""
    itemsize = torch.empty(0, dtype=dtype).element_size()
    size = ((rows - 1) * stride + cols) * itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype).as_strided(
        (rows, cols), (stride, 1)
    )


@pytest.mark.parametrize("stride", [2**30 - 16, 2**31 + 16], ids=["offsets", "stride"])
def test_large_strides(stride: int) -> None:
    """Offsets exceed 2^31 through row * stride, or through the stride itself."""
    x = virtual(torch.bfloat16, 4, 64, stride)
    assert (x.shape[0] - 1) * x.stride(0) >= 2**31
    x.copy_(torch.randn(4, 64))
    for spec in ("e4m3:1x128:te:pow2", "e4m3:row:te"):
        f = Format.of(spec)
        for columnwise in (False, True):
            assert_quantized(weft.quantize(x, f, columnwise=columnwise), x, f, columnwise=columnwise)
    f = Format("1x128")
    y = weft.rms_norm(x.contiguous(), out_dtype=torch.float32)
    assert_quantized(weft.rms_norm(x, quantize=f), y, f, input_dtype=torch.float32)

    data = virtual(torch.uint8, 4, 64, stride)
    small = weft.quantize(torch.randn(4, 64), f).rowwise
    data.copy_(small.data.view(torch.uint8))
    q = weft.QTensor((4, 64), torch.float32, f, small._replace(data=data.view(torch.float8_e4m3fn)))
    assert_same(
        weft.dequantize(q), weft.dequantize(weft.QTensor((4, 64), torch.float32, f, small)), "dequantize"
    )


def test_fresh_memory_is_poisoned() -> None:
    assert torch.empty(3, dtype=torch.float32).isnan().all()
    assert (torch.empty(3, 5, dtype=torch.float8_e4m3fn).view(torch.uint8) == 0xFF).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", ["e4m3:1x128:te:pow2", "e4m3:row:te", "e2m1:mx:te", "e4m3:tensor:te"])
def test_strides_and_pads_of_codes(spec: str, backend: str) -> None:
    """Row-wise codes are contiguous. Rows of column-wise codes are padded to 16 bytes with zero codes, never with
    poison, which a GEMM that reads full vectors would see as NaN."""
    f = Format.of(spec)
    for rows in (1, 37, 140):
        for x in (torch.randn(rows, 37), torch.randn(37, rows).t()):
            with weft.backend(backend):  # type: ignore[arg-type]
                q = weft.quantize(x, f, columnwise=True)
            assert_quantized(q, x, f, columnwise=True)
            assert q.rowwise.data.is_contiguous()
            data = q.columnwise.data
            width = rounded_up(data.shape[1], 16)
            assert data.stride() == (width, 1)
            assert data.storage_offset() == 0
            buffer = torch.tensor([], dtype=torch.uint8).set_(data.untyped_storage())
            assert buffer.numel() == 37 * width
            assert (buffer.view(37, width)[:, data.shape[1] :] == 0).all()


def test_results_do_not_depend_on_run_or_position() -> None:
    x = torch.randn(300, 300)
    full = weft.quantize(x, "e4m3:1x128:te").rowwise
    repeated = weft.quantize(x, "e4m3:1x128:te").rowwise
    assert_same(full.data, repeated.data, "again")
    part = weft.quantize(x[200:210], "e4m3:1x128:te").rowwise
    assert_same(full.data[200:210], part.data, "part")
    assert_same(full.scale[200:210], part.scale, "part")
