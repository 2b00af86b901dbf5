"""Kernel of processed logits; `process` documents the formulas."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ....language import tl, triton
from ....runtime import kernel
from ..loads import NumberArgument, load_number
from .arguments import WORD

TOKENS = tl.constexpr(WORD)


class OfRequests(NamedTuple):
    """Rows of requests: row r of the logits reads row r // inner."""

    ptr: Tensor | None
    stride: int
    inner: int


@triton.jit
def _load(of, row, col, exists, ALIGN: tl.constexpr):
    """Load this row's elements `col` of a tensor of requests, zero where they do not exist."""
    off = tl.multiple_of((row // of.inner) * of.stride, ALIGN)
    return tl.load(of.ptr + off + col, mask=exists, other=0)


@kernel
def process_kernel(
    logits_ptr,  # [rows, cols]
    y_ptr,  # [rows, cols]
    temperature: NumberArgument,
    repetition: NumberArgument,
    presence: NumberArgument,
    frequency: NumberArgument,
    counts: OfRequests,  # int32 [requests, cols]
    prompt: OfRequests,  # bool [requests, cols]
    bias: OfRequests,  # [requests, cols]
    allowed: OfRequests,  # int32 [requests, words]
    cols,
    tiles,  # of a row
    logits_stride,
    y_stride,
    REPEATS: tl.constexpr,  # seen tokens are penalized
    SCALED: tl.constexpr,  # logits are divided by temperatures
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,  # divides cols and the strides of rows
):
    """Compute a tile of a row."""
    cols = (cols // ALIGN) * ALIGN
    row = (tl.program_id(0) // tiles).to(tl.int64)
    col = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)  # [TILE]
    exists = col < cols
    logits_off = tl.multiple_of(row * logits_stride, ALIGN)
    z = tl.load(logits_ptr + logits_off + col, mask=exists, other=0.0).to(tl.float32)
    if counts.ptr is not None:
        count = _load(counts, row, col, exists, ALIGN)
    if REPEATS:
        seen = col < 0
        if counts.ptr is not None:
            seen = seen | (count > 0)
        if prompt.ptr is not None:
            seen = seen | (_load(prompt, row, col, exists, ALIGN) != 0)
        r = load_number(repetition, row)
        z = tl.where(seen, tl.where(z > 0.0, tl.div_rn(z, r), z * r), z)
    if counts.ptr is not None:
        penalty = tl.fma(load_number(frequency, row), count.to(tl.float32), load_number(presence, row))
        z = tl.where(count > 0, z - penalty, z)
    if bias.ptr is not None:
        z += _load(bias, row, col, exists, ALIGN).to(tl.float32)
    if allowed.ptr is not None:
        word_off = (row // allowed.inner) * allowed.stride
        word = tl.load(allowed.ptr + word_off + col // TOKENS, mask=exists, other=0)
        z = tl.where(((word >> (col % TOKENS).to(tl.int32)) & 1) == 1, z, -float("inf"))
    if SCALED:
        t = load_number(temperature, row)
        z = tl.where(t == 0.0, z, tl.div_rn(z, tl.where(t == 0.0, 1.0, t)))
    y_off = tl.multiple_of(row * y_stride, ALIGN)
    tl.store(y_ptr + y_off + col, z.to(y_ptr.dtype.element_ty), mask=exists)
