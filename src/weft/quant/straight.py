"""Straight-through gradients between plain tensors and QTensors: rounding counts as the identity."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime import apply, is_distributed, is_observed, local_of, place_like, placeholder
from .copies import PLAIN, Codes
from .qtensor import QTensor, stand_in


class _Wrap(torch.autograd.Function):
    """Assemble a QTensor from its parts; its gradient flows to `plain`."""

    @staticmethod
    def forward(plain: Tensor, spec: str, *parts: Any) -> QTensor:
        copies = (None if codes[0] is None else Codes(*codes) for codes in (parts[:4], parts[4:]))
        return QTensor(plain.shape, plain.dtype, spec, *copies)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, *[None] * 9


def wrap(plain: Tensor, spec: str, rowwise: Codes | None, columnwise: Codes | None) -> QTensor:
    """Return a QTensor of the format `spec` whose gradient flows to `plain`, a tensor of its shape and dtype that is
    never read. If `plain` is a DTensor, the copies are this rank's, and the result is a DTensor of QTensor shards."""
    if is_distributed(plain):
        return place_like(wrap(local_of(plain), spec, rowwise, columnwise), plain)  # type: ignore[return-value]
    if not (torch.compiler.is_compiling() or plain.requires_grad):
        return QTensor(plain.shape, plain.dtype, spec, rowwise, columnwise)
    return apply(_Wrap, plain, spec, *(rowwise or PLAIN), *(columnwise or PLAIN))  # type: ignore[no-any-return]


class _StandIn(torch.autograd.Function):
    """Replace a QTensor by a plain tensor of its shape and dtype that passes the gradient through."""

    @staticmethod
    def forward(q: QTensor) -> Tensor:
        return stand_in(q)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to(ctx.dtype)


def take_apart(x: Tensor) -> tuple[Tensor, Codes]:
    """Return (tensor, codes) for ops that read codes: (x, `PLAIN`) for a plain x; for a QTensor a stand-in that is
    never read and passes its gradient to x, and the row-wise codes. The inverse of `wrap`."""
    if not isinstance(x, QTensor):
        return x, PLAIN
    # The compiler cannot trace into a QTensor; the dispatcher takes it apart later.
    if torch.compiler.is_compiling():
        return x, PLAIN._replace(format=x.spec)
    if x.rowwise is None:
        raise ValueError(f"{x!r} has no row-wise copy, which this op reads: quantize it with rowwise=True")
    return stand_in_for(x), x.rowwise


def stand_in_for(x: QTensor) -> Tensor:
    """Return a tensor of x's shape and dtype that is never read and whose gradient flows to x."""
    if x.requires_grad:
        return apply(_StandIn, x)  # type: ignore[no-any-return]
    return stand_in(x) if is_observed() else placeholder(x.shape, x.dtype, x.device)
