"""Quantization and its random bits in plain PyTorch: the definition of right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...quant import Format
from ...quant.qtensor import stand_in
from ...quant.reference import amax_reference, hadamard_reference, quantize_copies
from ..common.results import Result
from ..common.rows import count_rows
from .arguments import QuantizeArgs, QuantizeOutputs


def quantize_reference(a: QuantizeArgs) -> QuantizeOutputs:
    """The definition."""
    x, to = a.x, a.result
    assert to.format is not None
    f = Format.of(to.format)
    flat = x.reshape(count_rows(x), x.shape[-1])
    amax = amax_reference(flat)
    options: dict[str, Any] = {"tensor_amax": amax, "scale": to.scale, "input_dtype": x.dtype}
    turned, options_t, apart = flat, dict(options), f.hadamard is not None
    if apart and to.columnwise:
        padded = F.pad(flat, (0, 0, 0, f.length(len(flat), "columnwise") - len(flat)))
        turned = hadamard_reference(padded.t()).to(x.dtype).t()
        options_t["tensor_amax"] = amax_reference(turned)
    if a.seed is not None:
        options["random"] = philox_reference(a.seed, flat.shape, 0, x.device)
        options_t["random"] = philox_reference(a.seed, turned.shape, 0 if _shares_codes(f) else 1, x.device)
    row, _ = quantize_copies(flat, f, rowwise=to.rowwise, columnwise=False, **options)
    _, col = quantize_copies(turned, f, rowwise=False, columnwise=to.columnwise, **options_t)
    return QuantizeOutputs(Result.of(stand_in(x), (row, col), amax if to.return_amax else None, apart))


def _shares_codes(format: Format) -> bool:
    """Whether both copies hold the same codes, and so round with the same random numbers."""
    return format.square > 0 or format.block == "tensor"


def philox_reference(seed: int, shape: Sequence[int], which: int, device: torch.device) -> Tensor:
    """The first word of Philox4x32-10 for each element of a [rows, cols] tensor, in int64."""
    mask = 0xFFFFFFFF
    rows, cols = shape
    c0 = torch.arange(cols, device=device).expand(rows, cols)
    c1 = torch.arange(rows, device=device)[:, None].expand(rows, cols) & mask
    c2, c3 = torch.full_like(c0, which), torch.zeros_like(c0)
    k0, k1 = seed & 0x7FFFFFFF, seed >> 31 & 0x7FFFFFFF
    for _ in range(10):
        high_a, low_a = _multiply(c0, 0xD2511F53)
        high_b, low_b = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """The high and low 32 bits of a product of 32-bit numbers held in int64. One factor is split, since the
    whole product would overflow int64."""
    low = (a & 0xFFFF) * b
    high = (a >> 16) * b + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
