"""Long rows, seeds and PyTorch's op checks of the quantizers. `tests/quant` tests their bytes, the catalogue their
workloads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton_loom
from torch import Tensor

import weft
from tests.catalogue.calls import opcheck
from tests.support.covering import covering
from weft.ops.common.results import ResultOptions
from weft.ops.quantize.arguments import DequantizeArgs, QuantizeArgs
from weft.runtime import choosing_for, recording


def meta(*shape: int) -> Tensor:
    """Return a bf16 tensor on the meta device, without memory."""
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


# Lengths around the limits of 32-bit integers: just below 2^30, above it so that twice the length exceeds 31 bits, and
# just below 2^31; each also as a multiple of all tiles, so that no column is masked.
LONG_ROWS = (2**30 - 1, 2**30 - 1024, 1_200_000_001, 1_200_000_000, 2**31 - 1, 2**31 - 1024)


@pytest.mark.parametrize(("rows", "cols"), covering((1, 5), LONG_ROWS, together=1))
def test_programs_that_share_a_long_row(rows: int, cols: int) -> None:
    """Every address of an H100's launches on meta tensors is in bounds, and no loop counter wraps around."""
    op = weft.catalogue["quantize"]
    with triton_loom.sanitize(dry=True) as witness, choosing_for("sm_90"):
        for format, amax in (("e4m3:1x128:te:pow2", True), ("e4m3:mx:te", False), ("e4m3:tensor:te", False)):
            options = ResultOptions(torch.bfloat16, format, True, False, None, amax)
            a = QuantizeArgs(meta(rows, cols), options, None)
            op.launch(op.allocate(a), a)
    assert witness.launches == 6, (
        "expected one kernel each, one more for the first amax and two for the tensor scale"
    )


def test_stripes_of_long_rows() -> None:
    """The offset of a stripe's last row fits in 31 bits for the longest row that has a column-wise copy."""
    op = weft.catalogue["quantize"]
    with triton_loom.sanitize(dry=True) as witness, choosing_for("sm_90"):
        for format in ("e4m3:1x128:te:pow2", "e4m3:mx:te", "e4m3:128x128:te"):
            options = ResultOptions(torch.bfloat16, format, True, True, None, False)
            a = QuantizeArgs(meta(256, 2**24 - 128), options, None)
            op.launch(op.allocate(a), a)
    assert witness.launches == 3


@pytest.mark.parametrize("seed", [0, 2**30, 2**31 - 1, 2**61 + 2**30, 2**62 - 1])
def test_seeds_compile_no_new_variant(seed: int) -> None:
    """A seed of up to 62 bits is passed as 32-bit integers."""
    with recording("sm_90") as variants:
        weft.quantize(meta(4, 256), "1x128", seed=seed)
        weft.quantize(meta(4, 256), "1x128", columnwise=True, seed=seed)
    assert {dict(variant.signature)["seed_high"] for variant in variants} == {"i32"}


@pytest.mark.parametrize("format", ["int8:1x128:te:pow2", "nvfp4"])
def test_opcheck_of_dequantize(format: str) -> None:
    q = weft.quantize(torch.randn(4, 160).bfloat16(), format)
    a = DequantizeArgs(*q.rowwise, 160, torch.bfloat16)
    checks = ("test_faketensor", "test_schema", "test_aot_dispatch_dynamic")
    opcheck("dequantize", a, test_utils=checks[: 1 if format == "nvfp4" else 3])


@pytest.mark.parametrize(
    "call",
    [
        lambda x: weft.rms_norm(x, quantize="nvfp4_16x16"),
        lambda x: weft.gated_norm(x, x, quantize="nvfp4_16x16"),
        lambda x: weft.glu(x, quantize="nvfp4_16x16"),
        lambda x: weft.glu(x, quantize_grad="nvfp4_16x16"),
        lambda x: weft.matmul(x, x.T, quantize="nvfp4_16x16"),
        lambda x: weft.permute(
            x, weft.row_map(torch.zeros(16, 1, dtype=torch.int64), 1), quantize="nvfp4_16x16"
        ),
    ],
    ids=["rms_norm", "gated_norm", "glu", "gradients of glu", "matmul", "permute"],
)
def test_squares_of_nvfp4_are_refused_as_results(call: Callable[[Tensor], object]) -> None:
    with pytest.raises(ValueError, match=r"is for weights, and only weft\.quantize produces it"):
        call(torch.randn(16, 64))


def test_both_copies_of_a_weight_decode_to_the_same_values() -> None:
    """Forward and backward multiply by the same values, even where the last squares are cut off."""
    w, x, dy = torch.randn(40, 72), torch.randn(16, 72), torch.randn(16, 40)
    q = weft.quantize(w, "nvfp4_16x16", columnwise=True)
    assert q.columnwise is not None
    transposed = weft.QTensor((72, 40), w.dtype, q.format, q.columnwise).dequantize()
    assert torch.equal(transposed.t(), q.dequantize())
    # Changing an element changes only the scale of its own square.
    w[17, 3] = w[:16].abs().max()
    changed = weft.quantize(w, "nvfp4_16x16")
    assert q.rowwise is not None
    assert changed.rowwise is not None
    different = changed.rowwise.scale.view(torch.uint8) != q.rowwise.scale.view(torch.uint8)
    assert different.nonzero()[:, 0].unique().tolist() == list(range(16, 32))
    assert different.any(0).tolist() == [True, False, False, False, False]
    forward = weft.matmul(weft.quantize(x, "nvfp4"), q.T)
    backward = weft.matmul(weft.quantize(dy, "nvfp4"), q)
    for got, left, right in ((forward, x, q.dequantize().t()), (backward, dy, q.dequantize())):
        assert torch.allclose(got, weft.quantize(left, "nvfp4").dequantize() @ right, rtol=1e-5, atol=1e-3)
