"""Decoder layer."""

from __future__ import annotations

from typing import Any, Literal, cast, overload

import torch
from torch import Tensor, nn

from ..ops import Routing
from .linear import PLAIN, Device, Numbers
from .moe import MoE
from .norm import RMSNorm


class DecoderLayer(nn.Module):
    """Attention and a feed-forward layer, each after a norm and added to the residual stream: `input_layernorm`,
    `self_attn`, `post_attention_layernorm`, `mlp`.

    - `self_attn`: an `Attention` or a `LatentAttention`. `mlp`: a `GLU` or an `MoE`.
    - `eps`, `device`, `dtype`: options of both norms.

    Each norm writes the format that the layer after it takes, FP8 codes for `recipe="fp8_block"`, and the second one
    adds attention's result to the residual in the same kernel. `forward(x, **options)` passes the options to
    `self_attn`: positions, cu_seqlens, cache, pages. With `return_routing=True` it returns (x, the `weft.Routing` of
    its `MoE`).

    >>> import torch, weft.nn
    >>> recipe, rotary = "fp8_block", weft.nn.Rotary(10000.0)
    >>> attention = weft.nn.Attention(256, 4, 2, rotary=rotary, recipe=recipe)
    >>> layer = weft.nn.DecoderLayer(attention, weft.nn.GLU(256, 512, recipe=recipe))
    >>> layer(torch.randn(2, 10, 256)).shape
    torch.Size([2, 10, 256])
    """

    def __init__(
        self,
        self_attn: nn.Module,
        mlp: nn.Module,
        *,
        eps: float = 1e-6,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden_size = cast(nn.Linear, self_attn.o_proj).out_features
        self.self_attn, self.mlp = self_attn, mlp
        self.input_layernorm = RMSNorm(hidden_size, eps, device=device, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, device=device, dtype=dtype)

    @overload
    def forward(self, x: Tensor, *, return_routing: Literal[False] = False, **options: Any) -> Tensor: ...

    @overload
    def forward(
        self, x: Tensor, *, return_routing: bool, **options: Any
    ) -> Tensor | tuple[Tensor, Routing]: ...

    def forward(
        self, x: Tensor, *, return_routing: bool = False, **options: Any
    ) -> Tensor | tuple[Tensor, Routing]:
        h = self.input_layernorm(x, numbers=_input_format(self.self_attn))
        h = self.self_attn(h, **options)
        h, x = self.post_attention_layernorm(h, x, numbers=_input_format(self.mlp))
        if not return_routing:
            return x + cast(Tensor, self.mlp(h))
        if not isinstance(self.mlp, MoE):
            raise ValueError(
                f"return_routing=True needs a layer with a weft.nn.MoE; its mlp is a {type(self.mlp)}"
            )
        y, routing = self.mlp(h, return_routing=True)
        return x + y, routing


def _input_format(module: nn.Module) -> Numbers:
    """Return the input format of a module; plain if it does not declare one."""
    if not hasattr(module, "input_numbers"):
        return PLAIN
    return cast(Numbers, module.input_numbers())  # type: ignore[operator]
