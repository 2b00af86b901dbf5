"""Tensors laid out in memory in every way that strides allow."""

from __future__ import annotations

import torch
from torch import Tensor


def transposed(t: Tensor) -> Tensor:
    return t.transpose(0, -1).contiguous().transpose(0, -1)


def stepped(t: Tensor) -> Tensor:
    return torch.stack([t, torch.full_like(t, torch.nan)], -1).flatten(-2)[..., ::2]


def padded(t: Tensor) -> Tensor:
    return torch.cat([t, t.new_full((*t.shape[:-1], 16), torch.nan)], -1)[..., : t.shape[-1]]


def padded_oddly(t: Tensor) -> Tensor:
    return torch.cat([t, t.new_full((*t.shape[:-1], 3), torch.nan)], -1)[..., : t.shape[-1]]


def off_by_one(t: Tensor) -> Tensor:
    """Return a copy that does not begin at a multiple of 16 bytes."""
    return torch.cat([t.new_full((1,), torch.nan), t.flatten()])[1:].view(t.shape)


def expanded(t: Tensor) -> Tensor:
    """Return the first row expanded to every row."""
    return t[:1].expand(t.shape)


def constant(t: Tensor) -> Tensor:
    """Return one element expanded to all, like the gradient of sum().backward()."""
    return t.flatten()[:1].view([1] * t.dim()).expand(t.shape)


def permuted(t: Tensor) -> Tensor:
    """Return a copy with the middle dimensions in another order in memory."""
    return t if t.dim() < 3 else t.transpose(0, 1).contiguous().transpose(0, 1)


def odd_strides_of_one(t: Tensor) -> Tensor:
    """Return a view whose dimensions of size 1 have an arbitrary stride."""
    strides = [977 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True)]
    return t.as_strided(t.shape, strides)


def negated(t: Tensor) -> Tensor:
    """Return a view that stands for the negative of its memory, as `z.conj().imag` does."""
    return t if t.dtype is torch.bool or t.is_complex() else torch._neg_view(t.neg())


LAYOUTS = (
    transposed,
    stepped,
    padded,
    padded_oddly,
    off_by_one,
    expanded,
    constant,
    permuted,
    odd_strides_of_one,
    negated,
)


def far_apart(rows: int, cols: int, stride: int = 2**30 - 64) -> Tensor:
    """Return rows so far apart that offsets need more than 32 bits, though the stride fits into 32. The memory between
    them is never touched."""
    storage = torch.UntypedStorage(2 * (stride * (rows - 1) + cols))
    x = torch.tensor([], dtype=torch.bfloat16).set_(storage, 0, (rows, cols), (stride, 1))
    return x.copy_(torch.randn(rows, cols))
