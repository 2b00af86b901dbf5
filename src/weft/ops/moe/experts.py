"""The experts of a mixture-of-experts layer: from tokens and what the router chose for them to the tokens' new values.

    rows of each expert  ->  up and gate of the expert  ->  gated unit, times the router's weight  ->  down  ->  the sum
    over a token's experts, in the order of its slots

Every step is an op of its own, and this file only composes them: `row_map`, `permute`, `linear` by groups, `glu`,
`unpermute`. With a recipe whose blocks lie along rows of x (1x128, mx), `permute` and `glu` quantise what they make, so
that no product reads its operand in more than 8 bits. With any quantised recipe, backward keeps the input of the gated
unit in FP8 as well, as DeepSeek-V3 does: it is the largest tensor of the layer. Nothing waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...quant import Copy, Format
from ..common.activations import Act
from ..common.checks import check_input
from ..common.groups import Groups
from ..common.results import plain_result
from ..glu.arguments import GatedUnit, GluBackwardArgs, GluNeeds
from ..glu.glu import glu, glu_backward_op
from ..product.linear import apply_linear, check_layer, quantised_copies
from ..product.recipes import Recipe
from ..quantize import dequantize_codes
from .permute import permute, unpermute
from .route import Routing
from .row_map import row_map

_KEPT = Format.of("1x128").spec  # in which backward keeps the input of the gated unit


class _KeepingFewBytes(torch.autograd.Function):
    """`glu` for rows in groups, whose backward has its input in FP8."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, probs: Tensor, ends: Tensor, align: int, act: Act, spec: str | None
    ) -> Tensor:
        kept, _ = quantised_copies(z, _KEPT, True, False)
        assert kept is not None
        ctx.save_for_backward(kept.data, kept.scale, probs, ends)
        ctx.act, ctx.align, ctx.z = act, align, (z.shape[1], z.dtype)
        if spec is None:
            return glu(z, act=act, probs=probs, ends=ends, align=align)
        return glu(z, act=act, probs=probs, ends=ends, align=align, quantize=spec, columnwise=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> Any:
        data, scale, probs, ends = ctx.saved_tensors
        z = dequantize_codes(Copy(data, scale), _KEPT, *ctx.z)
        unit, groups = GatedUnit(ctx.act, "concat", None, 1.0, 0.0), Groups(ends, ctx.align)
        needs = GluNeeds(True, False, True, False)
        found = glu_backward_op(
            GluBackwardArgs(z, None, probs, None, dh, groups, unit, plain_result(z.dtype), needs)
        )
        return found.x.y, found.probs, None, None, None, None


def experts(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    routing: Routing,
    *,
    recipe: Recipe | str | None = None,
    act: Act = "silu",
) -> Tensor:
    """What the experts that `route` chose for each token make of it: the sum of `weight * down(act(gate) * value)`.

    - `x`: [..., K] in bf16, fp16 or fp32. `up`: [experts, 2H, K], the rows of the gate first. `down`: [experts, K, H].
    - `routing`: what `weft.route` returned for these tokens. A slot whose expert is no number below `experts` adds
      nothing: another rank has that expert.
    - `recipe`: the numbers of the products, as `weft.linear` takes it.

    The weight of a slot is multiplied in before the second product, in fp32. Returns y [..., K] in x's dtype. Gradients
    flow to x, up, down and the weights; each expert's gradient is summed in fp32 and is zero if it had no tokens.

    >>> import torch, weft
    >>> x, router = torch.randn(16, 128), torch.randn(4, 128)
    >>> up, down = torch.randn(4, 256, 128) / 11, torch.randn(4, 128, 128) / 11
    >>> y = weft.experts(x, up, down, weft.route(x @ router.T, 2), recipe="fp8_block")
    >>> y.shape
    torch.Size([16, 128])
    """
    found = Recipe.of(recipe)
    for name, tensor in (("x", x), ("up", up), ("down", down)):
        check_input(name, tensor)
    k = x.shape[-1]
    if up.dim() != 3 or down.dim() != 3 or up.shape[1] % 2 or up.shape[2] != k:
        raise ValueError(
            f"up must be [experts, 2H, K] and down [experts, K, H] for x [..., {k}]; got {tuple(up.shape)} and "
            f"{tuple(down.shape)}"
        )
    count, width = up.shape[0], up.shape[1] // 2
    if down.shape != (count, k, width):
        raise ValueError(
            f"down must be {(count, k, width)} for up {tuple(up.shape)}; got {tuple(down.shape)}"
        )
    for weight in (up, down):
        check_layer(x, weight, None, found, ())
    # No block of a copy that is quantised along rows may have rows of two experts.
    align = 128 if found.is_quantised else 16
    indices = routing.indices.reshape(-1, routing.indices.shape[-1])
    rows = row_map(indices, count, align=align)
    groups = Groups(rows.ends, align)
    tokens = x if x.dim() == 2 else x.reshape(-1, k)
    probs = routing.weights.reshape(indices.shape)
    spec = found.written
    both = torch.is_grad_enabled()
    if spec is None:
        permuted, weights = permute(tokens, rows, probs)
    else:
        permuted, weights = permute(tokens, rows, probs, quantize=spec, columnwise=both)
    z = apply_linear(permuted, up, None, found, groups)
    if found.is_quantised and z.requires_grad and both:
        h = _KeepingFewBytes.apply(z, weights, groups.ends, align, act, spec)
    elif spec is None:
        h = glu(z, act=act, probs=weights, ends=groups.ends, align=align)
    else:
        h = glu(z, act=act, probs=weights, ends=groups.ends, align=align, quantize=spec)
    y = unpermute(apply_linear(h, down, None, found, groups), rows)
    return y.view(x.shape)
