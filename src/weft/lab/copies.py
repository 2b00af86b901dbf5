"""Compare quantized results with the oracle: codes, scales and global scales of each copy, expert by expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import QTensor
from ..quant import Codes
from . import oracle


def regions(rows: int, ends: Tensor | None, align: int) -> list[tuple[int, int, int]]:
    """Return (first row, end of the rows, end of the padding) of every expert, and of the rows after the last."""
    if ends is None:
        return [(0, rows, rows)]
    spans, start = [], 0
    for end in ends.tolist():
        padded_end = min(-(-end // align) * align, rows)
        spans.append((start, max(end, start), max(padded_end, start)))
        start = max(padded_end, start)
    return [*spans, (start, start, rows)]


def assert_copies(
    q: QTensor, value: Tensor, ends: Tensor | None = None, align: int = 1, scale: Tensor | None = None
) -> None:
    """Raise unless q's copies are the oracle's of the fp32 `value`, and no column-wise block spans two experts."""
    f = q.format
    value = value.reshape(-1, value.shape[-1])
    options: dict[str, Any] = {
        "block": f.block,
        "element": f.element,
        "convention": f.convention,
        "power_of_two": bool(f.power_of_two),
        "scale": scale,
    }
    if q.rowwise is not None:
        _assert_copy(q.rowwise, oracle.quantize(value, **options), "row-wise")
    if q.columnwise is None:
        return
    if f.hadamard:
        _assert_copy(q.columnwise, oracle.quantize(oracle.rotated(value), **options), "rotated")
        return
    if ends is None or align % 128 == 0 or not f.group:
        _assert_copy(q.columnwise, oracle.quantize(value, transpose=True, **options), "column-wise")
        return
    if f.block == "nvfp4":
        options["amax"] = value.abs().max()
    used = torch.zeros(q.columnwise.scale.shape[1], dtype=torch.bool)
    for expert, (start, _, end) in enumerate(regions(len(value), ends, align)):
        if start == end:
            continue
        wanted = oracle.quantize(value[start:end], transpose=True, **options)
        codes = slice(start // f.packed, -(-end // f.packed))
        _same(q.columnwise.data[:, codes], wanted.data, f"column-wise codes of expert {expert}")
        first = (start // 128 + expert) * (128 // f.group)
        blocks = slice(first, first + wanted.scale.shape[1])
        assert not used[blocks].any(), "two experts share a block"
        used[blocks] = True
        _same(q.columnwise.scale[:, blocks], wanted.scale, f"column-wise scales of expert {expert}")
    assert (~used).any() or len(value) % 128, "nothing was left unused"
    rest = (
        q.columnwise.scale.float()
        if q.columnwise.scale.element_size() > 1
        else q.columnwise.scale.view(torch.uint8)
    )
    assert not rest[:, ~used].count_nonzero(), "scales of blocks without rows"


def _assert_copy(codes: Codes, wanted: oracle.Quantized, side: str) -> None:
    _same(codes.data, wanted.data, f"{side} codes")
    _same(codes.scale, wanted.scale.reshape(codes.scale.shape), f"{side} scales")
    assert (codes.global_scale is None) == (wanted.global_scale is None), f"{side} global scale"
    if codes.global_scale is not None and wanted.global_scale is not None:
        assert torch.equal(codes.global_scale, wanted.global_scale), f"{side} global scale"


def _same(got: Tensor, wanted: Tensor, what: str) -> None:
    kind = torch.uint8 if got.element_size() == 1 else torch.int32
    different = got.contiguous().view(kind) != wanted.contiguous().view(kind)
    assert not different.any(), f"{int(different.sum())} of {different.numel()} {what} differ"
