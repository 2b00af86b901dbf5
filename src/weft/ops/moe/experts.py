"""The experts of a mixture-of-experts layer, applied to tokens that a router has assigned.

    rows of each expert  ->  its up and gate projections  ->  gated unit, times the router's weight  ->  its down
    projection  ->  sum over each token's experts, in the order of its slots

Every step is a separate op, and this file only composes them: `row_map`, `permute`, grouped `linear`, `glu`,
`unpermute`. With a recipe whose blocks lie along rows of x (1x128, mx), `permute` and `glu` quantize their outputs, so
no product reads an operand wider than 8 bits. With any quantized recipe, backward also saves the input of the gated
unit in FP8, as DeepSeek-V3 does: it is the largest tensor of the layer. Nothing synchronizes with the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...quant import Codes, Format, QTensor
from ...quant.formats import read_alike
from ...runtime import autocasted
from ..common.activations import Act
from ..common.checks import check_input
from ..common.groups import Groups
from ..common.results import plain_result
from ..glu.arguments import GatedUnit, GluBackwardArgs, GluBackwardOutputs
from ..glu.glu import Layout, glu, glu_backward_op
from ..product.linear import apply_linear, quantized_copies
from ..product.recipes import Recipe
from ..quantize.quantize import dequantize_codes
from .permute.permute import permute, unpermute
from .route.route import Routing
from .row_map.row_map import row_map

_SAVED_SPEC = Format.of("1x128").spec  # format in which the input of the gated unit is saved for backward


class _GluSavingFp8(torch.autograd.Function):
    """Grouped `glu` whose input is saved in FP8 for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        probs: Tensor | None,
        groups: Groups,
        unit: GatedUnit,
        spec: str | None,
        columnwise: bool,
    ) -> Tensor:
        saved, _ = quantized_copies(z, _SAVED_SPEC, True, False)
        assert saved is not None
        ctx.save_for_backward(saved.data, saved.scale, probs, groups.ends)
        ctx.unit, ctx.align, ctx.z = unit, groups.align, (z.shape[1], z.dtype)
        return _gated(z, probs, groups, unit, spec, columnwise)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> Any:
        data, scale, probs, ends = ctx.saved_tensors
        z = dequantize_codes(Codes(data, scale, format=_SAVED_SPEC), *ctx.z)
        groups = Groups(ends, ctx.align)
        needs = GluBackwardOutputs(True, False, probs is not None, False)
        gradients = glu_backward_op(
            GluBackwardArgs(z, None, probs, None, dh, groups, ctx.unit, plain_result(z.dtype), needs)
        )
        return gradients.x.y, gradients.probs, None, None, None, None


def _gated(
    z: Tensor, probs: Tensor | None, groups: Groups, unit: GatedUnit, spec: str | None, columnwise: bool
) -> Tensor:
    options: dict[str, Any] = unit._asdict() | {"ends": groups.ends, "align": groups.align}
    if spec is not None:
        options |= {"quantize": spec, "columnwise": columnwise}
    return glu(z, probs=probs, **options)  # type: ignore[no-any-return]


def experts(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    routing: Routing | tuple[Tensor, Tensor],
    *,
    recipe: Recipe | str | None = None,
    act: Act = "silu",
    layout: Layout = "concat",
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Apply the experts that `route` chose for each token: the sum of `weight * down(act(gate) * value)`.

    Also known as mixture of experts, MoE layer, fused MoE.

    - `x`: [..., K] in bf16, fp16 or fp32, or a `QTensor`: without gradients, codes that the recipe's products can read
      are moved unchanged; otherwise x is dequantized first. `up`: [experts, 2H, K], the rows of the gate first. `down`:
      [experts, K, H].
    - `routing`: the result of `weft.route` for these tokens, or the weights [..., k] and the experts [..., k] of
      another router. A slot whose expert is not from 0 to `len(up) - 1` adds nothing: another rank has that expert.
    - `recipe`: the precision of the products, as in `weft.linear`.
    - `act`, `layout`, `limit`, `alpha`, `up_offset`: the gated unit, as in `weft.glu`. With the layout "none"
      nothing is gated, and `up` is [experts, H, K].
    - `up_bias` [experts, 2H], `down_bias` [experts, K]: added to the products.

    The weight of a slot is applied in fp32 before the second product, or after it if that has a bias. Returns
    y [..., K] in x's dtype. Gradients flow to x, up, down, the biases and the weights; each expert's gradient is summed
    in fp32 and is zero if the expert had no tokens.

    >>> import torch, weft
    >>> x, router = torch.randn(16, 128), torch.randn(4, 128)
    >>> up, down = torch.randn(4, 256, 128) / 11, torch.randn(4, 128, 128) / 11
    >>> y = weft.experts(x, up, down, weft.route(x @ router.T, 2), recipe="fp8_block")
    >>> y.shape
    torch.Size([16, 128])
    """
    parsed = Recipe.of(recipe)
    for name, tensor in (("x", x), ("up", up), ("down", down)):
        check_input(name, tensor)
    x = autocasted(x)  # the weights follow x
    k = x.shape[-1]
    halves = 1 if layout == "none" else 2
    if up.dim() != 3 or down.dim() != 3 or up.shape[1] % halves or up.shape[2] != k:
        raise ValueError(
            f"up must be [experts, {'H' if halves == 1 else '2H'}, K] and down [experts, K, H] for x [..., {k}]; got "
            f"{tuple(up.shape)} and {tuple(down.shape)}"
        )
    count, width = up.shape[0], up.shape[1] // halves
    if down.shape != (count, k, width):
        raise ValueError(
            f"down must be {(count, k, width)} for up {tuple(up.shape)}; got {tuple(down.shape)}"
        )
    # A block of a columnwise copy must not contain rows of two experts.
    align = 128 if parsed.is_quantized else 16
    weights, chosen = _weights_and_indices(routing)
    indices = chosen.reshape(-1, chosen.shape[-1])
    rows = row_map(indices, count, align=align)
    groups = Groups(rows.ends, align)
    probs = weights.reshape(indices.shape)
    spec, shape = parsed.written, x.shape
    grads = torch.is_grad_enabled()
    copies: dict[str, Any] = (
        {} if spec is None else {"quantize": spec, "columnwise": grads and up.requires_grad}
    )
    if isinstance(x, QTensor):
        if _carries(x, spec) and not (grads and (x.requires_grad or up.requires_grad)):
            copies = {}  # its rows are moved unchanged
        else:
            x = x.dequantize()
    tokens = x if x.dim() == 2 else x.reshape(-1, k)
    if down_bias is None:
        permuted, row_probs = permute(tokens, rows, probs, **copies)
    else:
        permuted, row_probs = permute(tokens, rows, **copies), None
    z = apply_linear(permuted, up, up_bias, parsed, groups, name="up")
    unit, both = GatedUnit(act, layout, limit, alpha, up_offset), grads and down.requires_grad
    if parsed.is_quantized and z.requires_grad:
        h = _GluSavingFp8.apply(z, row_probs, groups, unit, spec, both)
    else:
        h = _gated(z, row_probs, groups, unit, spec, columnwise=both)
    y = apply_linear(h, down, down_bias, parsed, groups, name="down")
    return unpermute(y, rows, None if down_bias is None else probs).view(shape)


def _carries(x: QTensor, spec: str | None) -> bool:
    """Return whether `permute` can move the codes of x and the products can read the result."""
    return spec is not None and x.rowwise is not None and read_alike(x.spec, spec)


def _weights_and_indices(routing: Routing | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the weights and the experts of a routing, which must have equal shapes."""
    weights, indices = routing[:2]
    if isinstance(weights, Tensor) and isinstance(indices, Tensor) and weights.shape == indices.shape:
        return weights, indices
    got = " and ".join(
        str(tuple(t.shape)) if isinstance(t, Tensor) else type(t).__name__ for t in (weights, indices)
    )
    raise ValueError(
        f"routing must be the weights and the experts of each token, both [..., k]; got {got}. Pass the result of "
        "weft.route"
    )
