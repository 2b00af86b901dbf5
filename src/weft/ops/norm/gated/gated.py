"""Gated RMSNorm of an attention output, over whole rows or groups of their columns, with an optional transpose.

    r = 1 / sqrt(mean(x^2) + eps)              over each of the `groups` equal parts of a row
    z = x * r                                  casting="llama" rounds z to x's dtype, and the next product to that which
    y = z * (weight + weight_offset)           x's and the weight's promote to
    y = y * f(gate)                            f = sigmoid, or silu: f(g) = g * sigmoid(g)
    out = round(y), or its codes and scales

Everything is computed in fp32 and rounded once to each stored tensor; a quantized result is encoded from the fp32 y.
With `transpose`, x and its gradient are [B, L, ...] while gate, y and their gradients are [L, B, ...]: each is read and
written in its own layout. Backward, with dy the gradient of y, d = dy * f(gate) and t = d * (weight + weight_offset):

    dx = r * (t - z * mean(t * z))             the mean over the group
    dgate = dy * z * (weight + weight_offset) * f'(gate)
    dweight = sum over rows of d * z

Sums over rows are fp32 partial sums, one per program, added in a fixed order: deterministic. Gradients pass straight
through roundings: with casting="llama" dgate and dweight use the rounded values that the forward multiplies, and dx
uses the exact z.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypedDict, overload

import torch
from torch import Tensor

from ....quant import Format, QTensor
from ....runtime import LATER, Backward, Gradients, Op, Present, Sharding, later
from ...common.checks import FLOATS, check_input, check_tensor, epsilon, real, whole
from ...common.into import result_into
from ...common.results import allocate_result, result_options
from ...common.rows import count_rows, empty_where
from .arguments import (
    Activation,
    GatedNormArgs,
    GatedNormBackwardArgs,
    GatedNormGradients,
    GatedNormOutputs,
)
from .reference import gated_norm_backward_reference, gated_norm_reference

if TYPE_CHECKING:
    from typing_extensions import Unpack


class GatedNormBackwardOp(
    Op[GatedNormBackwardArgs, GatedNormGradients], name="gated_norm_backward", variants=32
):
    def allocate(self, a: GatedNormBackwardArgs) -> GatedNormGradients:
        return GatedNormGradients(*empty_where(a.needs, (a.x, a.gate, a.weight)))

    @cached_property
    def launch(self) -> Callable[[GatedNormGradients, GatedNormBackwardArgs], None]:
        from .launch import launch_gated_norm_backward

        return launch_gated_norm_backward

    def reference(self, a: GatedNormBackwardArgs) -> GatedNormGradients:
        return gated_norm_backward_reference(a)


gated_norm_backward_op = GatedNormBackwardOp()


class GatedNormOp(Op[GatedNormArgs, GatedNormOutputs], name="gated_norm", variants=72):
    def allocate(self, a: GatedNormArgs) -> GatedNormOutputs:
        rstd = None
        if a.stats:
            rstd = torch.empty(count_rows(a.gate) * a.groups, dtype=torch.float32, device=a.x.device)
        return GatedNormOutputs(allocate_result(a.result, a.gate), rstd)

    def present(self, a: GatedNormArgs) -> Present:
        return a.result.present(), a.stats

    @cached_property
    def launch(self) -> Callable[[GatedNormOutputs, GatedNormArgs], None]:
        from .launch import launch_gated_norm

        return launch_gated_norm

    def reference(self, a: GatedNormArgs) -> GatedNormOutputs:
        return gated_norm_reference(a)

    def keep(self, a: GatedNormArgs, o: GatedNormOutputs) -> GatedNormBackwardArgs:
        assert o.rstd is not None
        return GatedNormBackwardArgs(
            x=a.x,
            gate=a.gate,
            dy=LATER,
            weight=a.weight,
            rstd=o.rstd,
            groups=a.groups,
            act=a.act,
            weight_offset=a.weight_offset,
            casting=a.casting,
            transpose=a.transpose,
            needs=later(GatedNormGradients),
        )

    def backward(self, b: Backward) -> Gradients:
        args: GatedNormBackwardArgs = b.kept
        needs = GatedNormGradients(b.needs.x, b.needs.gate, b.needs.weight)
        return gated_norm_backward_op(args._replace(dy=b.grads.result.y, needs=needs))._asdict()

    def shard(self, a: GatedNormArgs) -> Sharding:
        joint, block = a.result.blocks()
        x_dims = " ".join(["1", "0", *map(str, range(2, a.x.dim() - 1)), "k"]) if a.transpose else "... k"
        return Sharding(
            {"gate": "... k", "x": x_dims, "weight": "k", "result_scale": ""},
            {"result_y": "... k", "result_amax": "max:"},
            {"k": "the norm is taken over it", **joint},
            block,
        )


gated_norm_op = GatedNormOp()


# ---- public function ------------------------------------------------------------------------------------


class GatedNormOptions(TypedDict, total=False):
    """Options of `gated_norm` that do not affect what it returns."""

    groups: int
    act: Activation
    eps: float | None
    weight_offset: float
    casting: Literal["fp32", "llama"]
    transpose: bool
    out_dtype: torch.dtype | None
    rowwise: bool
    columnwise: bool
    quant_scale: Tensor | None
    out: Tensor | tuple[Tensor | None, Tensor | None] | None


@overload
def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None = None, *, quantize: None = None,
    **options: Unpack[GatedNormOptions],
) -> Tensor: ...  # fmt: skip


@overload
def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None = None, *, quantize: Format | str,
    return_amax: Literal[False] = False, **options: Unpack[GatedNormOptions],
) -> QTensor: ...  # fmt: skip


@overload
def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None = None, *, quantize: Format | str,
    return_amax: Literal[True], **options: Unpack[GatedNormOptions],
) -> tuple[QTensor, Tensor]: ...  # fmt: skip


@overload
def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None = None, *, quantize: Format | str | None = None,
    return_amax: bool = False, **options: Unpack[GatedNormOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    *,
    groups: int = 1,
    act: Activation = "sigmoid",
    eps: float | None = 1e-6,
    weight_offset: float = 0.0,
    casting: Literal["fp32", "llama"] = "fp32",
    transpose: bool = False,
    out_dtype: torch.dtype | None = None,
    quantize: Format | str | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    quant_scale: Tensor | None = None,
    return_amax: bool = False,
    out: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Apply RMSNorm to x and multiply by a gate: `y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset) * f(gate)`.

    x: [..., K], or the heads [..., H, d] of an attention with H * d = K; gate: [..., K]; weight: [K]. All in bf16,
    fp16 or fp32, x and gate of any strides. Returns y in the shape of the gate, and with `return_amax` the largest
    |y|.

    - `groups`: normalize each of this many equal parts of the last dimension separately. For heads that share a
      weight [d], pass x and gate as [..., H, d] and leave groups=1.
    - `act`: f, "sigmoid" or "silu".
    - `eps`: as for `weft.rms_norm`.
    - `transpose`: x and its gradient are [B, L, ...], as in attention; gate and y are [L, B, ...], as in the
      surrounding layers.
    - `weight_offset`: 1 for weights stored around zero.
    - `casting`: "fp32" rounds once, at the end; "llama" rounds the normalized x to x's dtype before the weight, and
      their product before the gate, to the dtype to which PyTorch promotes x's and the weight's: HuggingFace's order
      for Qwen3-Next, Qwen3.5 and OLMo Hybrid.
    - `out_dtype`: dtype of y, x's by default.
    - `quantize`, `rowwise`, `columnwise`, `quant_scale`, `return_amax`: as for `weft.rms_norm`; the rows of the
      codes are those of y. A row-wise copy is stored in the same pass if none of its blocks spans two groups.
    - `out`: write y to this contiguous tensor or `QTensor`; not with autograd. With `return_amax` a pair of it and an
      fp32 scalar, each of which may be None for a new one.

    >>> import torch, weft
    >>> x = torch.randn(2, 5, 4, 64, dtype=torch.bfloat16)  # heads of 2 sequences
    >>> gate = torch.randn(5, 2, 256, dtype=torch.bfloat16)
    >>> y = weft.gated_norm(x, gate, torch.ones(256), groups=4, transpose=True)
    >>> y.shape
    torch.Size([5, 2, 256])
    >>> q = weft.gated_norm(x, gate, groups=2, transpose=True, quantize="1x128")
    >>> q.rowwise.data.shape
    torch.Size([10, 256])
    """
    check_input("x", x)
    check_input("gate", gate)
    if x.dim() == gate.dim() + 1 and x.shape[-2] * x.shape[-1] == gate.shape[-1]:
        x = x.flatten(-2)
    shape = x.shape
    if transpose:
        if len(shape) < 3:
            raise ValueError(f"transpose=True is for an x of shape [B, L, ..., K]; got {tuple(shape)}")
        shape = torch.Size((shape[1], shape[0], *shape[2:]))
    check_tensor("gate", gate, FLOATS, x.device, shape)
    cols = shape[-1]
    if whole("groups", groups) < 1 or cols % groups:
        raise ValueError(f"groups must divide the last dimension, {cols}; got {groups}")
    if weight is not None:
        check_tensor("weight", weight, FLOATS, x.device, (cols,))
    if act not in ("sigmoid", "silu"):
        raise ValueError(f"act must be 'sigmoid' or 'silu'; got {act!r}")
    if casting not in ("fp32", "llama"):
        raise ValueError(f"casting must be 'fp32' or 'llama'; got {casting!r}")
    options = result_options(
        x, quantize, rowwise=rowwise, columnwise=columnwise, quant_scale=quant_scale, return_amax=return_amax,
        out_dtype=out_dtype,
    )  # fmt: skip
    stats = torch.is_grad_enabled() and (
        x.requires_grad or gate.requires_grad or (weight is not None and weight.requires_grad)
    )
    offset = real("weight_offset", weight_offset)
    a = GatedNormArgs(
        x, gate, weight, groups, act, epsilon(eps, x), offset, casting, transpose, stats, options
    )
    result = (gated_norm_op(a) if out is None else result_into(gated_norm_op, a, out)).result
    into = out[0] if isinstance(out, tuple) else out
    y = result.value(options) if into is None else into
    return y if result.amax is None else (y, result.amax)
