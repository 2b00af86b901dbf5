"""`out=` of `quantize` and `dequantize`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_loom.testing import words

import weft
from weft import QTensor
from weft.lab.calls import assert_same
from weft.quant.copies import cut_rows

BF16 = torch.bfloat16


@pytest.mark.parametrize("format", ["1x128", "row", "mx", "nvfp4", "128x128"])
def test_rows_of_a_longer_tensor_are_written_in_place(format: str) -> None:
    """Two calls fill the two halves of one QTensor; with a scale for the whole tensor, that scale is the last one's."""
    x = torch.randn(256, 200 if format not in ("mx", "nvfp4") else 192).to(BF16)
    whole = torch.empty_like(weft.quantize(x, format))
    for start in (0, 128):
        copies = cut_rows((whole.rowwise, None), start, start + 128)
        out = QTensor((128, x.shape[1]), BF16, whole.spec, *copies)
        part = weft.quantize(x[start : start + 128], format)
        assert_same({"y": weft.quantize(x[start : start + 128], format, out=out)}, {"y": part}, "out=")
    if format != "nvfp4":
        assert_same({"y": whole}, {"y": weft.quantize(x, format)}, "both")


def test_a_row_of_wider_codes_is_refused() -> None:
    """The kernel would take the neighbors for padding."""
    x, wide = torch.randn(32, 256), weft.quantize(torch.zeros(32, 512), "row")
    assert wide.rowwise is not None
    codes = wide.rowwise._replace(data=wide.rowwise.data[:, :256])
    with pytest.raises(ValueError, match="the data of out must be contiguous"):
        weft.quantize(x, "row", out=QTensor((32, 256), x.dtype, wide.spec, codes))


def test_padding_without_memory_is_refused() -> None:
    """Rows of a column-wise copy are padded to 16 bytes, also the last one."""
    x = torch.randn(35, 128)
    q = weft.quantize(x, "1x128", columnwise=True)
    assert q.columnwise is not None
    memory = torch.empty(128 * 48 - 13, dtype=torch.uint8).view(torch.float8_e4m3fn)
    short = q.columnwise._replace(data=memory.as_strided((128, 35), (48, 1)))
    with pytest.raises(ValueError, match="the last row of the data_t of out has no memory for its padding"):
        weft.quantize(x, "1x128", columnwise=True, out=QTensor(x.shape, x.dtype, q.spec, q.rowwise, short))
    packed = q.columnwise._replace(data=torch.empty(128, 35, dtype=torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"the data_t of out must have the strides \(48, 1\)"):
        weft.quantize(x, "1x128", columnwise=True, out=QTensor(x.shape, x.dtype, q.spec, q.rowwise, packed))


def test_copies_with_two_global_scales_are_refused() -> None:
    x = torch.randn(32, 64)
    q = weft.quantize(x, "nvfp4", columnwise=True)
    weft.quantize(x * 3, "nvfp4", columnwise=True, out=torch.empty_like(q))
    with pytest.raises(ValueError, match="both copies of out must have the same global_scale"):
        weft.quantize(x, "nvfp4", columnwise=True, out=q.clone())


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (
            torch.empty(8, 256),
            "out of a quantized result must be a QTensor in e4m3:1x128:te:pow2; got Tensor",
        ),
        (
            weft.quantize(torch.zeros(8, 256), "row"),
            "out is a QTensor.*; the result is e4m3:1x128:te:pow2 of shape",
        ),
        (weft.quantize(torch.zeros(9, 256)), r"the result is .* of shape \(8, 256\)"),
        (weft.quantize(torch.zeros(8, 256, dtype=BF16)), "and dtype torch.float32"),
        (weft.quantize(torch.zeros(8, 256), columnwise=True), "with rowwise"),
        ((None, torch.empty(())), "out must be a tuple of 1 results, out; got 2"),
    ],
)
def test_wrong_memory_is_refused(out: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weft.quantize(torch.ones(8, 256), out=out)


def test_overlapping_codes_are_refused() -> None:
    x = torch.randn(8, 256)
    q = weft.quantize(x)
    assert q.rowwise is not None
    data = x.view(torch.float8_e4m3fn)[:, :256]
    with pytest.raises(ValueError, match=r"the data of out (shares memory with x|must be contiguous)"):
        weft.quantize(x, out=QTensor(x.shape, x.dtype, q.spec, q.rowwise._replace(data=data)))
    data = x.view(-1).view(torch.float8_e4m3fn)[: x.numel()].view(x.shape)
    with pytest.raises(ValueError, match="the data of out shares memory with x"):
        weft.quantize(x, out=QTensor(x.shape, x.dtype, q.spec, q.rowwise._replace(data=data)))


@pytest.mark.parametrize("amax", [None, torch.empty(())])
def test_amax(amax: Any) -> None:
    x = torch.randn(8, 256)
    wanted = weft.quantize(x, "tensor", return_amax=True)
    q, largest = weft.quantize(x, "tensor", return_amax=True, out=(torch.empty_like(wanted[0]), amax))
    assert_same({"y": q, "amax": largest}, dict(zip(("y", "amax"), wanted, strict=True)), "out=")
    assert amax is None or largest is amax
    alone = torch.empty_like(wanted[0])
    assert weft.quantize(x, "tensor", return_amax=True, out=alone)[0] is alone  # type: ignore[call-overload]


@pytest.mark.parametrize("format", ["1x128", "nvfp4", "e2m1:nvfp4:te:hadamard-columnwise"])
@pytest.mark.parametrize("sides", [(True, False), (False, True), (True, True)])
def test_dequantize(format: str, sides: tuple[bool, bool]) -> None:
    q = weft.quantize(torch.randn(2, 64, 128), format, rowwise=sides[0], columnwise=sides[1])
    for dtype in (None, BF16):
        out = torch.full(q.shape, torch.nan, dtype=dtype or q.dtype)
        assert weft.dequantize(q, dtype, out=out) is out
        assert torch.equal(words(out), words(weft.dequantize(q, dtype)))
    flat = q.flatten()
    assert torch.equal(weft.dequantize(flat, out=torch.empty(q.numel())), flat.dequantize())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="out must be contiguous"):
        weft.dequantize(q, out=torch.empty(2, 128, 64).mT)
    with pytest.raises(ValueError, match=r"out must have the shape \(2, 64, 128\)"):
        weft.dequantize(q, out=torch.empty(64, 128))
