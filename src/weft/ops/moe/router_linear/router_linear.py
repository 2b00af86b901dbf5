"""The router's projection: logits in true fp32 from activations that stay in bf16.

    y[t, e] = sum_h x[t, h] * weight[e, h] + bias[e]               fp32, [T, E]
    dx = round(dy @ weight)         dweight = round(dy^T @ x)      dbias = round(sum_t dy)

x is bf16 (or fp16, fp32), weight fp32 or bf16; y and its gradient are fp32. No operand is rounded: matrix units take an
fp32 element as the sum of its three bf16 parts (`tiles.split`), and elsewhere products are fp32 multiply-adds. So each
result is an fp32 sum with a rounding for every addition, and one rounding to its dtype at the end. Sums run over tiles
of columns (of experts, of tokens): each tile is summed from zero and then added to the total, which shortens the
chains of additions. The only fp32 tensors in memory are results and, if several programs share a sum, their partial
sums, which are added in order: every run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ....runtime import Backward, Gradients, Op, Sharding
from ...common.checks import FLOATS, check_input, check_tensor
from .arguments import (
    RouterLinearArgs,
    RouterLinearBackwardArgs,
    RouterLinearGradients,
    RouterLinearOutputs,
)
from .reference import router_linear_backward_reference, router_linear_reference

# ---- registration ---------------------------------------------------------------------------------------


_SHARDING = Sharding(
    {"x": "... h", "weight": "e h", "bias": "e"}, {"y": "... e"}, {"h": "products are summed along it"}
)


class RouterLinearBackwardOp(
    Op[RouterLinearBackwardArgs, RouterLinearGradients], name="router_linear_backward", variants=96
):
    def allocate(self, a: RouterLinearBackwardArgs) -> RouterLinearGradients:
        return RouterLinearGradients(
            *(
                torch.empty(t.shape, dtype=t.dtype, device=a.x.device) if t is not None and needed else None
                for t, needed in zip((a.x, a.weight, a.bias), a.needs, strict=True)
            )
        )

    @cached_property
    def launch(self) -> Callable[[RouterLinearGradients, RouterLinearBackwardArgs], None]:
        from .launch import launch_router_linear_backward

        return launch_router_linear_backward

    def reference(self, a: RouterLinearBackwardArgs) -> RouterLinearGradients:
        return router_linear_backward_reference(a)


router_linear_backward_op = RouterLinearBackwardOp()


class RouterLinearOp(Op[RouterLinearArgs, RouterLinearOutputs], name="router_linear", variants=32):
    def allocate(self, a: RouterLinearArgs) -> RouterLinearOutputs:
        shape = (*a.x.shape[:-1], a.weight.shape[0])
        return RouterLinearOutputs(torch.empty(*shape, dtype=torch.float32, device=a.x.device))

    @cached_property
    def launch(self) -> Callable[[RouterLinearOutputs, RouterLinearArgs], None]:
        from .launch import launch_router_linear

        return launch_router_linear

    def reference(self, a: RouterLinearArgs) -> RouterLinearOutputs:
        return router_linear_reference(a)

    def keep(self, a: RouterLinearArgs, o: RouterLinearOutputs) -> Any:
        return a

    def backward(self, b: Backward) -> Gradients:
        saved: RouterLinearArgs = b.kept
        needs = RouterLinearGradients(*b.needs)
        args = RouterLinearBackwardArgs(saved.x, saved.weight, saved.bias, b.grads.y, needs)
        return router_linear_backward_op(args)._asdict()

    def shard(self, a: RouterLinearArgs) -> Sharding:
        return _SHARDING


router_linear_op = RouterLinearOp()


# ---- public function ------------------------------------------------------------------------------------


def router_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias` in fp32, for any dtypes of x and weight, without a copy of x in fp32.

    x: [..., H] in bf16, fp16 or fp32, of any strides. weight: [E, H], in any of these; bias: [E], likewise. Returns
    fp32 [..., E]. Its only error is that of fp32 summation: no operand is rounded to TF32 or bf16. Gradients have the
    dtypes of their tensors, rounded once from fp32 sums.

    >>> import torch, weft
    >>> x, weight = torch.randn(6, 64, dtype=torch.bfloat16), torch.randn(8, 64)
    >>> logits = weft.router_linear(x, weight)
    >>> logits.dtype, logits.shape
    (torch.float32, torch.Size([6, 8]))
    """
    check_input("x", x)
    check_tensor("weight", weight, FLOATS, x.device)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"x must be [..., H] and weight [E, H] with one H; got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if weight.shape[0] == 0:
        raise ValueError("weight must have a row for each expert and at least one; got none")
    if bias is not None:
        check_tensor("bias", bias, FLOATS, x.device, weight.shape[:1])
    return router_linear_op(RouterLinearArgs(x, weight, bias)).y
