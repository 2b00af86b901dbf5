"""PyTorch reference of quantization and of its random bits."""

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
    """Quantize in plain PyTorch; kernels must match it bit for bit."""
    x, target = a.x, a.result
    assert target.format is not None
    f = Format.of(target.format)
    flat = x.reshape(count_rows(x), x.shape[-1])
    amax = amax_reference(flat)
    options: dict[str, Any] = {"tensor_amax": amax, "scale": target.scale, "input_dtype": x.dtype}
    rotated, options_t, own_global_scales = flat, dict(options), f.hadamard is not None
    if own_global_scales and target.columnwise:
        padded = F.pad(flat, (0, 0, 0, f.length(len(flat), "columnwise") - len(flat)))
        rotated = hadamard_reference(padded.t()).to(x.dtype).t()
        options_t["tensor_amax"] = amax_reference(rotated)
    if a.seed is not None:
        options["random"] = philox_reference(a.seed, flat.shape, 0, x.device)
        options_t["random"] = philox_reference(a.seed, rotated.shape, 0 if _shares_codes(f) else 1, x.device)
    row, _ = quantize_copies(flat, f, rowwise=target.rowwise, columnwise=False, **options)
    _, col = quantize_copies(rotated, f, rowwise=False, columnwise=target.columnwise, **options_t)
    return QuantizeOutputs(
        Result.of(stand_in(x), (row, col), amax if target.return_amax else None, own_global_scales)
    )


def _shares_codes(format: Format) -> bool:
    """Return whether both copies hold the same codes, and therefore round with the same random bits."""
    return format.square > 0 or format.block == "tensor"


def philox_reference(seed: int, shape: Sequence[int], which: int, device: torch.device) -> Tensor:
    """Return the first Philox4x32-10 word of each element of a [rows, cols] tensor, as int64."""
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
    """Return the high and low 32 bits of a product of 32-bit integers held in int64. One factor is split because the
    full product would overflow int64."""
    low = (a & 0xFFFF) * b
    high = (a >> 16) * b + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
