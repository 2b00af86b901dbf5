"""Norms that add the residual first and write the format that the next layer takes."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor, nn

from ..ops import layer_norm, rms_norm
from ..ops.common.checks import whole
from .linear import PLAIN, Device, Numbers


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last dimension by `weft.rms_norm`: fp32 inside, rounded once.

    `forward(x)` returns y. `forward(x, residual)` normalizes the sum h = x + residual, rounded to x's dtype, and
    returns (y, h). With `numbers`, y is a `QTensor`.

    >>> import torch, weft.nn
    >>> norm, x = weft.nn.RMSNorm(64), torch.randn(2, 3, 64)
    >>> y, h = norm(x, x)
    >>> torch.equal(h, x + x)
    True
    """

    def __init__(
        self, hidden_size: int, eps: float | None = 1e-6, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:  # fmt: skip
        super().__init__(whole("hidden_size", hidden_size, 1), eps=eps, device=device, dtype=dtype)

    @overload
    def forward(self, x: Tensor, residual: None = None, *, numbers: Numbers = ...) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor, *, numbers: Numbers = ...) -> tuple[Tensor, Tensor]: ...

    def forward(
        self, x: Tensor, residual: Tensor | None = None, *, numbers: Numbers = PLAIN
    ) -> Tensor | tuple[Tensor, Tensor]:
        return rms_norm(
            x,
            self.weight,
            eps=self.eps,
            residual=residual,
            quantize=numbers.format,
            columnwise=numbers.columnwise,
            quant_scale=numbers.scale,
        )


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` over the last dimension by `weft.layer_norm`. `forward` takes the arguments of `RMSNorm`'s.

    >>> import torch, weft.nn
    >>> weft.nn.LayerNorm(64, bias=False)(torch.randn(3, 64)).shape
    torch.Size([3, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(whole("hidden_size", hidden_size, 1), eps, bias=bias, device=device, dtype=dtype)

    @overload
    def forward(self, input: Tensor, residual: None = None, *, numbers: Numbers = ...) -> Tensor: ...

    @overload
    def forward(
        self, input: Tensor, residual: Tensor, *, numbers: Numbers = ...
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self, input: Tensor, residual: Tensor | None = None, *, numbers: Numbers = PLAIN
    ) -> Tensor | tuple[Tensor, Tensor]:
        return layer_norm(
            input,
            self.weight,
            self.bias,
            eps=self.eps,
            residual=residual,
            quantize=numbers.format,
            columnwise=numbers.columnwise,
            quant_scale=numbers.scale,
        )
