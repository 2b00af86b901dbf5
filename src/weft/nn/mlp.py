"""Gated feed-forward layer."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from ..ops import Recipe, glu
from ..ops.common.activations import Act
from .linear import Device, Linear, Numbers, in_numbers, numbers_for


class GLU(nn.Module):
    """`down_proj(act(gate_proj(x)) * up_proj(x))`: SwiGLU with the default `act`, as in Llama, Qwen3 and DeepSeek.

    With a recipe whose blocks lie along rows (fp8_block, mxfp8) or whose scales are frozen (fp8_static), x is quantized
    once for both projections, unless it already is, and the gated unit writes codes for the third.

    >>> import torch, weft.nn
    >>> weft.nn.GLU(128, 256, recipe="fp8_block")(torch.randn(2, 5, 128)).shape
    torch.Size([2, 5, 128])
    """

    act: Act

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        act: Act = "silu",
        bias: bool = False,
        recipe: Recipe | str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.act = act
        layer_options = {"recipe": recipe, "device": device, "dtype": dtype}
        self.gate_proj = Linear(hidden_size, intermediate_size, bias, **layer_options)  # type: ignore[arg-type]
        self.up_proj = Linear(hidden_size, intermediate_size, bias, **layer_options)  # type: ignore[arg-type]
        self.down_proj = Linear(intermediate_size, hidden_size, bias, **layer_options)  # type: ignore[arg-type]

    def input_numbers(self) -> Numbers:
        return numbers_for(self.gate_proj, self.up_proj)

    def forward(self, x: Tensor) -> Tensor:
        x = in_numbers(x, self.input_numbers())
        gate, up = self.gate_proj(x), self.up_proj(x)
        numbers = numbers_for(self.down_proj)
        h = glu(
            gate,
            up,
            act=self.act,
            quantize=numbers.format,
            columnwise=numbers.columnwise,
            quant_scale=numbers.scale,
        )
        return cast(Tensor, self.down_proj(h))

    def extra_repr(self) -> str:
        return "" if self.act == "silu" else f"act={self.act!r}"
