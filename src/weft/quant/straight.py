"""Where quantised and plain tensors meet in autograd: rounding counts as the identity."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .formats import Format
from .qtensor import Copy, QTensor


class _Wrap(torch.autograd.Function):
    """A QTensor from its parts, with the gradient of `stand_in`."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, spec: str, *parts: Tensor | None) -> QTensor:
        copies = [None if p[0] is None else Copy(*p) for p in (parts[:3], parts[3:])]  # type: ignore[arg-type]
        return QTensor(stand_in.shape, stand_in.dtype, Format.of(spec), *copies)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, *[None] * 7


def wrap(stand_in: Tensor, format: Format, rowwise: Copy | None, columnwise: Copy | None) -> QTensor:
    """A QTensor whose gradient becomes that of `stand_in`, a tensor of its shape and dtype that nobody reads."""
    if not (torch.compiler.is_compiling() or stand_in.requires_grad):
        return QTensor(stand_in.shape, stand_in.dtype, format, rowwise, columnwise)
    nothing = (None, None, None)
    return _Wrap.apply(stand_in, format.spec, *(rowwise or nothing), *(columnwise or nothing))  # type: ignore


class _StandIn(torch.autograd.Function):
    """What autograd sees of a QTensor: its shape and dtype. The gradient passes through."""

    @staticmethod
    def forward(ctx: Any, q: QTensor) -> Tensor:
        ctx.dtype = q.dtype
        return _empty_like(q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to(ctx.dtype)


def _empty_like(q: QTensor) -> Tensor:
    return torch.empty_strided(q.shape, (0,) * q.dim(), dtype=q.dtype, device=q.device)


def standing_in(q: QTensor) -> Tensor:
    """A tensor of q's shape and dtype that nobody reads, and whose gradient becomes that of q: what an op takes along
    with the codes and scales of q. The opposite of `wrap`."""
    if not (torch.compiler.is_compiling() or q.requires_grad):
        return _empty_like(q)
    return _StandIn.apply(q)  # type: ignore[no-any-return, no-untyped-call]
