"""Mixture of experts."""

from __future__ import annotations

from typing import Literal, cast, overload

import torch
from torch import Tensor, nn

from ..ops import Recipe, Routing, experts, route, router_linear
from ..ops.common.activations import Act
from ..ops.common.buffers import KeepsBufferDtypes
from .linear import Device, recipe_repr, reset_matrices


class Router(KeepsBufferDtypes):
    """Router, which assigns experts and their weights to each token: `weight` [experts, hidden]. `forward(x)` returns a
    `weft.Routing`.

    - `convention`: the model's way to route, "qwen3", "deepseek_v3", "mixtral", "gpt_oss" and so on; see `weft.route`.
    - `correction_bias`: whether there is a buffer `e_score_correction_bias` [experts], added to the scores for the
      selection. It stays fp32 when the model is converted to bf16.
    - `groups`, `group_topk`, `renormalize`, `scale`, `balance_coefficient`: as in `weft.route`.

    The product is in fp32 whatever the dtypes are: rounding would change the routing.

    >>> import torch, weft.nn
    >>> router = weft.nn.Router(64, 8, 2, convention="deepseek_v3", correction_bias=True, scale=2.5)
    >>> router(torch.randn(5, 64)).indices.shape
    torch.Size([5, 2])
    """

    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        convention: str = "qwen3",
        correction_bias: bool = False,
        groups: int = 1,
        group_topk: int | None = None,
        renormalize: bool | None = None,
        scale: float = 1.0,
        balance_coefficient: float | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.top_k, self.convention = top_k, convention
        self.groups, self.group_topk = groups, group_topk
        self.renormalize, self.scale, self.balance_coefficient = renormalize, scale, balance_coefficient
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        bias = torch.empty(num_experts, device=device, dtype=torch.float32) if correction_bias else None
        self.register_buffer("e_score_correction_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_matrices(self.weight)
        if self.e_score_correction_bias is not None:
            nn.init.zeros_(self.e_score_correction_bias)

    def forward(self, x: Tensor) -> Routing:
        return route(
            router_linear(x, self.weight),
            self.top_k,
            convention=self.convention,
            bias=self.e_score_correction_bias,
            groups=self.groups,
            group_topk=self.group_topk,
            renormalize=self.renormalize,
            scale=self.scale,
            balance_coefficient=self.balance_coefficient,
        )

    def extra_repr(self) -> str:
        experts, hidden = self.weight.shape
        text = f"{hidden}, {experts}, top_k={self.top_k}, convention={self.convention!r}"
        return text + (f", groups={self.groups}, group_topk={self.group_topk}" if self.groups > 1 else "")


class Experts(nn.Module):
    """Weights of gated experts: `gate_up_proj` [experts, 2 * intermediate, hidden], the gate's rows first, and
    `down_proj` [experts, hidden, intermediate]. `forward(x, routing)` is `weft.experts`.

    >>> import torch, weft.nn
    >>> router, x = weft.nn.Router(128, 4, 2), torch.randn(10, 128)
    >>> weft.nn.Experts(4, 128, 256, recipe="fp8_block")(x, router(x)).shape
    torch.Size([10, 128])
    """

    recipe: Recipe | str | None
    act: Act
    quantized_parameters = ("gate_up_proj", "down_proj")  # the parameters that the recipe rounds

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        act: Act = "silu",
        recipe: Recipe | str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        Recipe.of(recipe)
        self.recipe, self.act = recipe, act
        up, down = (
            (num_experts, 2 * intermediate_size, hidden_size),
            (num_experts, hidden_size, intermediate_size),
        )
        self.gate_up_proj = nn.Parameter(torch.empty(up, device=device, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(down, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_matrices(self.gate_up_proj)
        reset_matrices(self.down_proj)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        return experts(x, self.gate_up_proj, self.down_proj, routing, recipe=self.recipe, act=self.act)

    def extra_repr(self) -> str:
        num_experts, hidden, intermediate = self.down_proj.shape
        return f"{num_experts}, {hidden}, {intermediate}, act={self.act!r}{recipe_repr(self.recipe)}"


class MoE(nn.Module):
    """Mixture of experts with three parts: `gate`, a `Router`; `experts`; and optionally `shared_experts`, a `GLU` for
    all tokens.

    `forward(x)` returns y; `forward(x, return_routing=True)` also returns the `weft.Routing`, with the counts that
    drive the correction bias and the load-balancing loss.

    >>> import torch, weft.nn
    >>> moe = weft.nn.MoE(weft.nn.Router(128, 8, 2), weft.nn.Experts(8, 128, 64))
    >>> y, routing = moe(torch.randn(2, 5, 128), return_routing=True)
    >>> y.shape, int(routing.counts.sum())
    (torch.Size([2, 5, 128]), 20)
    """

    def __init__(
        self, gate: nn.Module, experts: nn.Module, *, shared_experts: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.gate, self.experts, self.shared_experts = gate, experts, shared_experts

    @overload
    def forward(self, x: Tensor, *, return_routing: Literal[False] = False) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, *, return_routing: bool) -> Tensor | tuple[Tensor, Routing]: ...

    def forward(self, x: Tensor, *, return_routing: bool = False) -> Tensor | tuple[Tensor, Routing]:
        routing = self.gate(x)
        y = self.experts(x, routing)
        if self.shared_experts is not None:
            y = y + self.shared_experts(x)
        return (y, routing) if return_routing else cast(Tensor, y)
