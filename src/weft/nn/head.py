"""Language-model head and its loss as one module."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..ops import linear, linear_cross_entropy
from ..ops.common.checks import unexpected
from .linear import Device

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..ops.loss.reduction import LossKeywords


class LinearCrossEntropy(nn.Linear):
    """Head `weight` [vocabulary, hidden] whose `forward(hidden, target)` is the cross entropy, without materializing
    logits; it takes the options of `weft.linear_cross_entropy`. `logits(hidden)` computes logits where they are needed.
    For a head tied to an embedding: `head.weight = embedding.weight`.

    >>> import torch, weft.nn
    >>> head = weft.nn.LinearCrossEntropy(64, 1000, z_loss=1e-4)
    >>> head(torch.randn(2, 5, 64), torch.randint(1000, (2, 5))).shape
    torch.Size([])
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        bias: bool = False,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[LossKeywords],
    ) -> None:
        if not options.keys() <= inspect.signature(linear_cross_entropy).parameters.keys():
            raise unexpected(linear_cross_entropy, options, "LinearCrossEntropy")
        super().__init__(hidden_size, vocab_size, bias, device, dtype)
        self.options = options

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return linear_cross_entropy(hidden, self.weight, target, bias=self.bias, **self.options)

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.weight, self.bias)

    def extra_repr(self) -> str:
        return ", ".join(
            [super().extra_repr(), *(f"{name}={value!r}" for name, value in self.options.items())]
        )
