"""Where quantised and plain tensors meet in autograd: rounding counts as the identity."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime import apply
from .formats import Format
from .qtensor import Copy, QTensor, stand_in


class _Wrap(torch.autograd.Function):
    """A QTensor from its parts, with the gradient of `plain`."""

    @staticmethod
    def forward(plain: Tensor, spec: str, *parts: Tensor | None) -> QTensor:
        copies = [None if p[0] is None else Copy(*p) for p in (parts[:3], parts[3:])]  # type: ignore[arg-type]
        return QTensor(plain.shape, plain.dtype, Format.of(spec), *copies)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, *[None] * 7


def wrap(plain: Tensor, format: Format, rowwise: Copy | None, columnwise: Copy | None) -> QTensor:
    """A QTensor whose gradient becomes that of `plain`, a tensor of its shape and dtype that nobody reads."""
    if not (torch.compiler.is_compiling() or plain.requires_grad):
        return QTensor(plain.shape, plain.dtype, format, rowwise, columnwise)
    nothing = (None, None, None)
    return apply(_Wrap, plain, format.spec, *(rowwise or nothing), *(columnwise or nothing))  # type: ignore[no-any-return]


class _StandIn(torch.autograd.Function):
    """What autograd sees of a QTensor: its shape and dtype. The gradient passes through."""

    @staticmethod
    def forward(q: QTensor) -> Tensor:
        return stand_in(q)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to(ctx.dtype)


def standing_in(q: QTensor) -> Tensor:
    """A tensor of q's shape and dtype that nobody reads, and whose gradient becomes that of q: what an op takes along
    with the codes and scales of q. The opposite of `wrap`."""
    if not (torch.compiler.is_compiling() or q.requires_grad):
        return stand_in(q)
    return apply(_StandIn, q)  # type: ignore[no-any-return]
