"""RMSNorm and LayerNorm, fused with a residual add before, a modulation after, and quantization last.

    v = x + pre_bias
    h = round(residual + v * residual_gate)    to the dtype that x and residual promote to; everything below reads h,
                                               or with unrounded_sum its value before this rounding
    r = 1 / sqrt(mean(h^2) + eps)              rms                       z = h * r
    r = 1 / sqrt(mean((h - m)^2) + eps)        layer, m = mean(h)        z = (h - m) * r
    z = round(z)                               to h's dtype, with casting="llama" only
    y = z * (weight + weight_offset) + bias
    y = y * (1 + scale) + shift                modulation, per row or per sample
    out = round(y), or its codes and scales

Everything is computed in fp32 and rounded once to each stored tensor; a quantized result is encoded from the fp32 y.
Backward, with d the gradient of y (times 1 + scale if modulated) and t = d * (weight + weight_offset):

    dh = r * (t - z * mean(t * z))             rms; layer: r * (t - mean(t) - z * mean(t * z))
    dresidual = dh = dh + dresidual_out        plus the upstream gradient of h itself
    dx = dv = dh * residual_gate               dpre_bias = sum dv         dresidual_gate = sum dh * v
    dweight = sum d * z      dbias = sum d     dscale = sum dy * (z * (weight + offset) + bias)     dshift = sum dy

Sums over rows are fp32 partial sums, one per program, added in a fixed order: deterministic. Gradients pass straight
through roundings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...quant import Format
from ...runtime import Backward, Gradients, Op, Present, Sharding, is_distributed
from ..common.checks import (
    FLOATS,
    check_input,
    check_tensor,
    dtypes_beside,
    epsilon,
    is_tensor,
    real,
    unexpected,
)
from ..common.into import result_into
from ..common.results import allocate_result, result_options
from ..common.rows import count_rows, empty_like, empty_where
from .arguments import NormArgs, NormBackwardArgs, NormGradients, NormOutputs
from .reference import norm_backward_reference, norm_reference
from .signatures import Modulation, NormResult, norm_like

# ---- registration ---------------------------------------------------------------------------------------


class _Saved(NamedTuple):
    """Tensors and options that the backward reads."""

    h: Tensor  # with unrounded_sum the residual, to which x is added again
    x: Tensor | None  # for that sum, and if residual_gate needs a gradient
    pre_bias: Tensor | None
    residual_gate: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    scale: Tensor | None
    shift: Tensor | None  # of a modulation without scale
    rstd: Tensor
    mean: Tensor | None
    weight_offset: float
    casting: str
    unrounded_sum: bool
    x_dtype: torch.dtype
    residual_dtype: torch.dtype


def _sample_dims(part: Tensor | None) -> str:
    """Return the sharding pattern of one row for all samples, or one per sample with x's leading dimensions."""
    if part is None or len(part) == 1:
        return "(_) k"
    return f"({' '.join(map(str, range(part.dim() - 1)))}) k"


class NormBackwardOp(Op[NormBackwardArgs, NormGradients], name="norm_backward", variants=32):
    def allocate(self, a: NormBackwardArgs) -> NormGradients:
        like = (None, a.weight, a.bias, a.scale, a.scale, None, a.residual_gate, a.pre_bias)
        return NormGradients(*empty_where(a.needs, like))._replace(
            x=empty_like(a.h, a.x_dtype) if a.needs.x else None,
            residual=empty_like(a.h, a.residual_dtype) if a.needs.residual else None,
        )

    @cached_property
    def launch(self) -> Callable[[NormGradients, NormBackwardArgs], None]:
        from .launch import launch_norm_backward

        return launch_norm_backward

    def reference(self, a: NormBackwardArgs) -> NormGradients:
        return norm_backward_reference(a)


norm_backward_op = NormBackwardOp()


class NormOp(Op[NormArgs, NormOutputs], name="norm", variants=72, differentiable=("result_y", "residual")):
    def allocate(self, a: NormArgs) -> NormOutputs:
        x = a.x
        residual = rstd = mean = None
        if a.keeps_h:
            residual = empty_like(x, a.h_dtype)
        if a.stats:
            rstd = torch.empty(count_rows(x), dtype=torch.float32, device=x.device)
            mean = torch.empty_like(rstd) if a.kind == "layer" else None
        return NormOutputs(allocate_result(a.result, x), residual, rstd, mean)

    def present(self, a: NormArgs) -> Present:
        return a.result.present(), a.keeps_h, a.stats, a.stats and a.kind == "layer"

    @cached_property
    def launch(self) -> Callable[[NormOutputs, NormArgs], None]:
        from .launch import launch_norm

        return launch_norm

    def reference(self, a: NormArgs) -> NormOutputs:
        return norm_reference(a)

    def keep(self, a: NormArgs, o: NormOutputs) -> _Saved:
        assert o.rstd is not None
        h = a.x if o.residual is None else o.residual
        if a.unrounded_sum and a.residual is not None:
            h = a.residual
        for_gate = a.residual_gate is not None and a.residual_gate.requires_grad
        return _Saved(
            h,
            a.x if a.unrounded_sum or for_gate else None,
            a.pre_bias,
            a.residual_gate,
            a.weight,
            a.bias,
            a.scale,
            a.shift if a.scale is None else None,
            o.rstd,
            o.mean,
            a.weight_offset,
            a.casting,
            a.unrounded_sum,
            a.x.dtype,
            a.x.dtype if a.residual is None else a.residual.dtype,
        )

    def backward(self, b: Backward) -> Gradients:
        saved: _Saved = b.kept
        needs, grads = b.needs, b.grads
        # Without a gate x and the residual share their gradient, unless it is rounded to two dtypes.
        shared = saved.residual_gate is None and saved.x_dtype is saved.residual_dtype
        gradients = norm_backward_op(
            NormBackwardArgs(
                h=saved.h,
                dy=saved.h.new_zeros(1).expand(saved.h.shape) if grads.result.y is None else grads.result.y,
                dresidual=grads.residual,
                x=saved.x,
                pre_bias=saved.pre_bias,
                residual_gate=saved.residual_gate,
                weight=saved.weight,
                bias=saved.bias,
                scale=saved.scale if saved.shift is None else torch.zeros_like(saved.shift),  # times 1
                rstd=saved.rstd,
                mean=saved.mean,
                weight_offset=saved.weight_offset,
                casting=saved.casting,
                unrounded_sum=saved.unrounded_sum,
                x_dtype=saved.x_dtype,
                residual_dtype=saved.residual_dtype,
                needs=NormGradients(
                    needs.x or (needs.residual and shared),
                    needs.weight,
                    needs.bias,
                    needs.scale,
                    needs.shift,
                    needs.residual and not shared,
                    needs.residual_gate,
                    needs.pre_bias,
                ),
            )
        )
        return {
            "x": gradients.x if needs.x else None,
            "residual": (gradients.x if shared else gradients.residual) if needs.residual else None,
            "pre_bias": gradients.pre_bias,
            "residual_gate": gradients.residual_gate,
            "weight": gradients.weight,
            "bias": gradients.bias,
            "scale": gradients.scale,
            "shift": gradients.shift,
        }

    def shard(self, a: NormArgs) -> Sharding:
        rows = "... k"
        joint, block = a.result.blocks()
        return Sharding(
            {
                "x": rows,
                "residual": rows,
                "pre_bias": "k",
                "residual_gate": _sample_dims(a.residual_gate),
                "weight": "k",
                "bias": "k",
                "scale": _sample_dims(a.scale),
                "shift": _sample_dims(a.shift),
                "result_scale": "",
            },
            {"result_y": rows, "result_amax": "max:", "residual": rows},
            {"k": "the norm is taken over it", **joint},
            block,
        )


norm_op = NormOp()


# ---- public functions -----------------------------------------------------------------------------------


def _norm(
    kind: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    pre_bias: Tensor | None = None,
    residual_gate: Tensor | None = None,
    unrounded_sum: bool = False,
    modulation: Modulation | None = None,
    casting: Literal["fp32", "llama"] = "fp32",
    out_dtype: torch.dtype | Literal["promote"] | None = None,
    quantize: Format | str | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    quant_scale: Tensor | None = None,
    return_amax: bool = False,
    return_plain: bool = False,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    **unknown: Any,
) -> NormResult:
    if unknown:
        raise unexpected(rms_norm if kind == "rms" else layer_norm, unknown)
    shape, device = x.shape, x.device
    if weight is not None:
        check_tensor("weight", weight, FLOATS, device, shape[-1:], note=_ORDER)
    if bias is not None:
        check_tensor("bias", bias, FLOATS, device, shape[-1:], note=_ORDER)
    if residual is not None:
        check_tensor("residual", residual, dtypes_beside(x.dtype), device, shape)
        if residual_gate is not None:
            residual_gate = _flat_samples("residual_gate", residual_gate, x)
    elif residual_out is not None or residual_gate is not None or unrounded_sum:
        name = (
            "unrounded_sum" if unrounded_sum else "residual_gate" if residual_out is None else "residual_out"
        )
        raise ValueError(f"{name}= needs residual=")
    if pre_bias is not None:
        check_tensor("pre_bias", pre_bias, FLOATS, device, shape[-1:])
    if casting not in ("fp32", "llama"):
        raise ValueError(f"casting must be 'fp32' or 'llama'; got {casting!r}")
    scale = shift = gate = None
    if modulation is not None:
        scale, shift, gate = _split_modulation(modulation, x)
    if out_dtype == "promote":
        out_dtype = _promoted(x, residual, weight, bias, scale, shift)
    stats = torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
        or (pre_bias is not None and pre_bias.requires_grad)
        or (residual_gate is not None and residual_gate.requires_grad)
        or (scale is not None and scale.requires_grad)
        or (shift is not None and shift.requires_grad)
    )
    options = result_options(
        x,
        quantize,
        rowwise=rowwise,
        columnwise=columnwise,
        quant_scale=quant_scale,
        return_amax=return_amax,
        return_plain=return_plain,
        out_dtype=out_dtype,
    )
    weight_offset = real("weight_offset", weight_offset)
    a = NormArgs(
        x,
        weight,
        bias,
        residual,
        pre_bias,
        residual_gate,
        scale,
        shift,
        eps,
        weight_offset,
        kind,
        casting,
        bool(unrounded_sum),
        stats,
        options,
    )
    if out is None and residual_out is None:
        o = norm_op(a)
    else:
        o = result_into(
            norm_op,
            a,
            out,
            in_place=("x", "residual"),
            names={"residual": "residual_out"},
            residual=residual_out,
        )
    if residual is None and gate is None and options.format is None:
        return o.result.y
    value, plain = o.result.value(options), o.result.y if return_plain else None
    h = None if residual is None else o.residual
    outputs = tuple([t for t in (value, plain, h, gate, o.result.amax) if t is not None])
    return value if len(outputs) == 1 else outputs


@norm_like(_norm)
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float | None = 1e-6,
    **options: Any,
) -> NormResult:
    """Apply RMSNorm over the last dimension: `y = h / sqrt(mean(h^2) + eps) * (weight + weight_offset) + bias`.

    Also known as RMSNorm, rmsnorm, fused add RMSNorm.

    x: [..., K] in bf16, fp16 or fp32, of any strides (heads of a packed QKV included). weight, bias: [K], in any
    of these dtypes. Returns y, or a tuple of y and the following results, if requested, in this order.

    - `return_plain` (with `quantize`): y in `out_dtype` besides the quantized y, rounded from the same fp32 values.
    - `residual` [..., K]: h = x + residual is normalized and also returned; without a residual, h = x. The residual may
      have another dtype, such as fp32 for a bf16 x; h is rounded to the dtype to which PyTorch promotes both.
    - `pre_bias` [K], such as the bias of the preceding projection: x + pre_bias replaces x. It is not rounded before
      the residual is added.
    - `residual_gate` [..., K], per row or per sample like a modulation: h = residual + (x + pre_bias) * residual_gate.
    - `unrounded_sum`: normalize the fp32 sum before it is rounded to h, as vLLM's `fused_add_rms_norm` does; the
      returned h is rounded all the same. The backward keeps x and residual instead of h, and adds them again.
    - `modulation`: `(scale, shift)`, each [..., K] with the leading dimensions of x (per row) or the first few of
      them (per sample): y = y * (1 + scale) + shift. Packed into one tensor [..., 2K], or [..., 3K] whose last
      third, the gate for the next residual add, is returned.
    - `return_amax` (with `quantize`): the largest |y|, an fp32 scalar on the device, for delayed scaling.

    - `eps`: None means the eps of fp32 (of fp64 for an fp64 x), as in `torch.nn.RMSNorm`.
    - `weight_offset`: 1 for weights stored around zero, as in Gemma.
    - `casting`: "fp32" rounds once, at the end; "llama" rounds the normalized h to h's dtype before the weight.
    - `out_dtype`: dtype of y, x's by default. "promote" is the dtype that PyTorch's arithmetic gives y, the promotion
      of x, residual, weight, bias and modulation: HuggingFace's norms return fp32 for a bf16 x and fp32 weights. With
      `return_plain` it is also the nominal dtype of the `QTensor`.
    - `quantize`: a `Format` or its name; y is then a `QTensor` encoded from the fp32 y without another rounding.
      `rowwise` and `columnwise` select its copies; the row-wise copy does not depend on the column-wise one.
      `quant_scale` is a fixed scale (static or delayed) for block "tensor".
    - `out`, `residual_out`: write into these instead of new tensors; not with autograd. `residual_out` may be
      `residual` itself.

    >>> import torch, weft
    >>> x, weight = torch.randn(8, 256, dtype=torch.bfloat16), torch.ones(256)
    >>> y = weft.rms_norm(x, weight)
    >>> q, h = weft.rms_norm(x, weight, residual=x, quantize="1x128", columnwise=True)
    >>> q.rowwise.data.shape, q.columnwise.data.shape
    (torch.Size([8, 256]), torch.Size([256, 8]))
    """
    check_input("x", x)
    return _norm("rms", x, weight, bias, epsilon(eps, x), **options)


@norm_like(_norm)
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5, **options: Any
) -> NormResult:
    """Apply LayerNorm over the last dim: `y = (h - mean(h)) / sqrt(var(h) + eps) * (weight + weight_offset) + bias`.

    Also known as LayerNorm, layernorm.

    Arguments and results are those of `rms_norm`; eps is a number.

    >>> import torch, weft
    >>> x = torch.randn(2, 16, 128)
    >>> modulation = torch.randn(2, 3 * 128)  # scale, shift and gate of each sample
    >>> y, gate = weft.layer_norm(x, modulation=modulation)
    >>> gate.shape
    torch.Size([2, 128])
    """
    check_input("x", x)
    return _norm("layer", x, weight, bias, epsilon(real("eps", eps), x), **options)


def _promoted(*tensors: Tensor | None) -> torch.dtype:
    """Return the PyTorch promotion of the dtypes of all tensors."""
    return functools.reduce(torch.promote_types, {t.dtype for t in tensors if t is not None})


# Advice for callers who use the argument order of another library.
_ORDER = "Arguments are (x, weight, bias), then eps= by keyword; no shape is given: the last dimension is normalized"


def _split_modulation(
    modulation: Modulation, x: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return scale and shift as [samples, K], and the gate as it was packed."""
    cols = x.shape[-1]
    gate = None
    if is_tensor(modulation):
        check_input("modulation", modulation)
        parts = modulation.shape[-1] // max(cols, 1)
        if modulation.shape[-1] != parts * cols or parts not in (2, 3):
            raise ValueError(
                f"a packed modulation ends in {2 * cols} (scale, shift) or {3 * cols} (scale, shift, gate); "
                f"got {modulation.shape[-1]}"
            )
        scale, shift, *rest = modulation.split(cols, dim=-1)
        gate = rest[0] if rest else None
    elif isinstance(modulation, (tuple, list)) and len(modulation) == 2:
        scale, shift = modulation
    else:
        raise TypeError(
            "modulation must be (scale, shift), two tensors, or one tensor that packs them; got "
            f"a {type(modulation).__name__}"
        )
    scale = None if scale is None else _flat_samples("modulation's scale", scale, x)
    shift = None if shift is None else _flat_samples("modulation's shift", shift, x)
    if scale is not None and shift is not None and scale.shape != shift.shape:
        raise ValueError(
            f"scale and shift must have one shape; got {tuple(scale.shape)} and {tuple(shift.shape)}"
        )
    return scale, shift, gate


def _flat_samples(name: str, tensor: Tensor, x: Tensor) -> Tensor:
    """Flatten a tensor with one row per row of x or per sample to [samples, K]."""
    check_tensor(name, tensor, FLOATS, x.device)
    cols = x.shape[-1]
    lead = list(tensor.shape[:-1])
    while lead and lead[-1] == 1 and len(lead) > 1:
        lead.pop()
    per_row = list(x.shape[:-1])
    if tensor.shape[-1:] != x.shape[-1:] or (per_row[: len(lead)] != lead and lead != [1]):
        raise ValueError(
            f"{name} must be [..., {cols}] with leading dimensions {tuple(per_row)} (per row) or the first of them "
            f"(per sample); got {tuple(tensor.shape)}"
        )
    # DTensors keep their dimensions: each rank flattens its own shard.
    return tensor.reshape(*(lead if is_distributed(x, tensor) else [-1]), cols)
