"""Gated linear units: activation of a gate times a value, with router weights and quantization, forward and backward.

    gate, up = split(x + bias)                                            with experts, the bias of the row's expert
    a = min(gate, limit)          b = clamp(up, -limit, limit)            without a limit, a = gate and b = up
    y = f(a) * (b + up_offset) * probs                                    out = round(y), or its codes and scales

    silu       f = a * s(alpha a)      s(z) = 1 / (1 + exp(-z))              f' = s (1 + alpha a (1 - s))
    gelu       f = a * Phi(a)          Phi(a) = erfc(-a / sqrt 2) / 2        f' = Phi + a exp(-a^2 / 2) / sqrt(2 pi)
    gelu_tanh  f = a * s(2 u)          u = sqrt(2 / pi) (a + 0.044715 a^3)   f' = s + 2 a u' s (1 - s)
    relu       f = max(a, 0)           sigmoid  f = s(alpha a)               relu2  f = max(a, 0)^2
    tanh       f = tanh(a)             quick_gelu  f = a * s(1.702 a)        mish  f = a * tanh(log(1 + exp(a)))
    softplus   f = log(1 + exp(a))     log_sigmoid  f = log(s(a))            elu  f = a > 0 ? a : alpha (exp(a) - 1)

Everything is computed in fp32 and rounded once to each stored tensor; a quantized result is encoded from the fp32 y.
Backward, with dy the gradient of y:

    dgate = dy * probs * (b + up_offset) * f'(a), 0 where gate > limit
    dup = dy * probs * f(a), 0 where |up| > limit
    dprobs = sum over the row of dy * f(a) * (b + up_offset)
    dbias = sum over all rows, or over the rows of each expert, of dgate and dup

The quantized gradient and dbias are also computed from the fp32 dgate and dup. For dbias a program sums a stripe of 128
rows of one expert in fp32, and a second kernel adds the sums of each expert in order. That moves 8 bytes per column and
128 rows, 1.3 % of the traffic of the gradient in bf16. Summing the stored gradient instead would read it again, 40 %
more, and would be impossible if it is quantized.

The backward recomputes everything from the inputs, which are all that is saved. Rows that belong to no group
(`weft.ops.common.groups`) are never read; their results, gradients and codes are zero. Sums over a row are added in a
fixed order: deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from ...quant import Format, QTensor
from ...runtime import LATER, Backward, Gradients, Op, Present, Sharding, is_distributed, later
from ..common.activations import ACTIVATIONS, WITH_ALPHA, Act
from ..common.checks import FLOATS, INTEGERS, check_input, check_tensor, dtypes_beside, real, whole
from ..common.groups import NO_GROUPS, Groups
from ..common.into import result_into
from ..common.results import (
    Result,
    ResultOptions,
    allocate_result,
    check_copies,
    check_fused_format,
    plain_result,
    result_options,
)
from ..common.rows import empty_like
from .arguments import (
    NO_RESULT,
    GatedUnit,
    GluArgs,
    GluBackwardArgs,
    GluBackwardOutputs,
    GluOutputs,
    hidden_of,
    in_one_pass,
)
from .reference import glu_backward_reference, glu_reference

# ---- registration ---------------------------------------------------------------------------------------


def _gradient(result: Result, options: ResultOptions, like: Tensor | None) -> Tensor | None:
    """Return a gradient as the caller gets it: a tensor or a `QTensor`."""
    if result.y is None or like is None or options.format is None:
        return result.y
    return QTensor(like.shape, like.dtype, options.format, *result.copies(options.format))


def _dequantized_leaf(gradient: Tensor | None, edge: tuple[Any, int]) -> Tensor | None:
    node, _ = edge
    if isinstance(gradient, QTensor) and node is not None and not node.next_functions:
        return gradient.dequantize()
    return gradient


class GluBackwardOp(Op[GluBackwardArgs, GluBackwardOutputs], name="glu_backward", variants=32):
    def allocate(self, a: GluBackwardArgs) -> GluBackwardOutputs:
        x, up, probs, bias, needs = a.x, a.up, a.probs, a.bias, a.needs
        return GluBackwardOutputs(
            allocate_result(a.gradient, x, groups=a.groups) if needs.x else NO_RESULT,
            allocate_result(a.up_gradient, up, groups=a.groups) if up is not None and needs.up else NO_RESULT,
            torch.empty(probs.shape, dtype=probs.dtype, device=probs.device)
            if probs is not None and needs.probs
            else None,
            empty_like(bias) if bias is not None and needs.bias else None,
        )

    def present(self, a: GluBackwardArgs) -> Present:
        needs, stored, none = a.needs, a.gradient.present(), (False,) * len(NO_RESULT)
        return (
            stored if needs.x else none,
            stored if needs.up and a.up is not None else none,
            needs.probs and a.probs is not None,
            needs.bias and a.bias is not None,
        )

    @cached_property
    def launch(self) -> Callable[[GluBackwardOutputs, GluBackwardArgs], None]:
        from .launch import launch_glu_backward

        return launch_glu_backward

    def reference(self, a: GluBackwardArgs) -> GluBackwardOutputs:
        return glu_backward_reference(a)


glu_backward_op = GluBackwardOp()


class GluOp(Op[GluArgs, GluOutputs], name="glu", variants=48):
    def allocate(self, a: GluArgs) -> GluOutputs:
        shape = (*a.x.shape[:-1], hidden_of(a.x, a.unit.layout))
        return GluOutputs(allocate_result(a.result, a.x, shape, a.groups))

    def present(self, a: GluArgs) -> Present:
        return (a.result.present(),)

    @cached_property
    def launch(self) -> Callable[[GluOutputs, GluArgs], None]:
        from .launch import launch_glu

        return launch_glu

    def reference(self, a: GluArgs) -> GluOutputs:
        return glu_reference(a)

    def keep(self, a: GluArgs, o: GluOutputs) -> GluBackwardArgs:
        needs = later(GluBackwardOutputs)
        return GluBackwardArgs(a.x, a.up, a.probs, a.bias, LATER, a.groups, a.unit, a.gradient, needs)

    def backward(self, b: Backward) -> Gradients:
        args: GluBackwardArgs = b.kept
        needs = GluBackwardOutputs(b.needs.x, b.needs.up, b.needs.probs, b.needs.bias)
        gradients = glu_backward_op(args._replace(dy=b.grads.result.y, needs=needs))
        dx, dup = (
            _gradient(gradients.x, args.gradient, args.x),
            _gradient(gradients.up, args.gradient, args.up),
        )
        if type(args.x) not in (Tensor, torch.nn.Parameter):
            # A graph being traced has plain tensors for the gradients of its inputs, which are its leaves.
            x_edge, *other_edges = b.node.next_functions
            dx = _dequantized_leaf(dx, x_edge)
            dup = dup if dup is None else _dequantized_leaf(dup, other_edges[0])
        return {"x": dx, "up": dup, "probs": gradients.probs, "bias": gradients.bias}

    def shard(self, a: GluArgs) -> Sharding:
        reasons, block = a.result.blocks()
        gradient_reasons, rows = a.gradient.blocks()
        reasons |= gradient_reasons
        if a.groups.ends is not None:
            reasons["..."] = (
                "ends= counts the rows of all experts. Pass x.to_local() and each rank's own ends"
            )
            reasons["e"] = "ends= is needed for every expert"
        x_dims = "... h"
        if a.unit.layout in ("concat", "interleaved"):
            x_dims, reasons["c"] = "... c", "it holds gate and up. Pass them separately, as glu(gate, up)"
        elif a.result.format is not None or a.gradient.format is not None:
            reasons["h"] = "a block of the quantized result may span it"
        bias_dims = x_dims.split()[-1] if a.groups.ends is None else f"e {x_dims.split()[-1]}"
        return Sharding(
            {
                "x": x_dims,
                "up": "... h",
                "probs": "(...)",
                "bias": bias_dims,
                "groups_ends": "e",
                "result_scale": "",
            },
            {"result_y": "... h", "result_amax": "max:"},
            reasons,
            max(block, rows),
        )


glu_op = GluOp()


# ---- public functions -----------------------------------------------------------------------------------

Layout = Literal["concat", "interleaved", "none"]


class GluGradients(NamedTuple):
    """Gradients of x, up, probs and bias from `glu_backward`; None for arguments that the call does not have."""

    x: Tensor
    up: Tensor | None
    probs: Tensor | None
    bias: Tensor | None


@overload
def glu(
    x: Tensor,
    up: Tensor | None = None,
    *,
    act: Act = "silu",
    layout: Layout = "concat",
    probs: Tensor | None = None,
    bias: Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    ends: Tensor | None = None,
    align: int = 1,
    out_dtype: torch.dtype | None = None,
    quantize: Format | str | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    quant_scale: Tensor | None = None,
    return_amax: Literal[False] = False,
    quantize_grad: Format | str | None = None,
    grad_rowwise: bool = True,
    grad_columnwise: bool = True,
    out: Tensor | None = None,
) -> Tensor: ...


@overload
def glu(
    x: Tensor,
    up: Tensor | None = None,
    *,
    act: Act = "silu",
    layout: Layout = "concat",
    probs: Tensor | None = None,
    bias: Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    ends: Tensor | None = None,
    align: int = 1,
    out_dtype: torch.dtype | None = None,
    quantize: Format | str | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    quant_scale: Tensor | None = None,
    return_amax: Literal[True],
    quantize_grad: Format | str | None = None,
    grad_rowwise: bool = True,
    grad_columnwise: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...


def glu(
    x: Tensor,
    up: Tensor | None = None,
    *,
    act: Act = "silu",
    layout: Layout = "concat",
    probs: Tensor | None = None,
    bias: Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    ends: Tensor | None = None,
    align: int = 1,
    out_dtype: torch.dtype | None = None,
    quantize: Format | str | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    quant_scale: Tensor | None = None,
    return_amax: bool = False,
    quantize_grad: Format | str | None = None,
    grad_rowwise: bool = True,
    grad_columnwise: bool = True,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute a gated linear unit, `y = f(gate) * up * probs`, in fp32 and rounded once.

    Also known as SwiGLU, GeGLU, silu_and_mul.

    x: [..., 2H] with both gate and up, or the gate [..., H] with `up` [..., H]; bf16, fp16 or fp32, of any strides.
    Returns y [..., H], and with `return_amax` the largest |y|.

    - `act`: f. "silu" makes it SwiGLU, "gelu" (by erf) and "gelu_tanh" GeGLU, "relu" ReGLU; "relu2" is ReLU squared.
      Also "sigmoid", "quick_gelu", "elu", "tanh", "softplus", "log_sigmoid" and "mish", as in PyTorch.
    - `layout` of x: "concat" is [gate | up], "interleaved" alternates gate and up. "none" has no gate: x is [..., H]
      and y = f(x).
    - `probs` [...] or [..., 1]: a weight for each row, such as the router's probability. It has a gradient.
    - `bias` [last dimension of x], with `ends` one per expert, [experts, last dimension of x]: the bias of the
      projection that produces x, added to it in fp32; bf16, fp16 or fp32. Its gradient is a sum over rows in fp32, in a
      fixed order. It cannot be combined with `up`, where each of the two projections adds its own.
    - `limit`: clamp gate to at most the limit, and up to ±limit; their gradients are 0 beyond it. `alpha`: the
      steepness of the sigmoid in silu and sigmoid; elu tends to -alpha. `up_offset` is added to up. gpt-oss has limit
      7, alpha 1.702, up_offset 1.
    - `ends` [experts], int32 or int64 on the device: where the rows of each expert end, the `ends` of a `RowMap`. An
      expert begins where the one before it ends, rounded up to a multiple of `align`. Rows of no expert are not read;
      their results and gradients are zero. Without `ends` all rows form one group. The values are known only on the
      device, so passing `RowMap.offsets` instead, which counts an expert's padding as its rows, goes undetected.
    - `out_dtype`: dtype of y; by default x's, or the PyTorch promotion of x's and up's.
    - `quantize`, `rowwise`, `columnwise`, `quant_scale`, `return_amax`: as for `weft.rms_norm`. No block of a
      column-wise copy mixes experts. If `align` is a multiple of 128, blocks lie as without experts. Otherwise
      `align` must be a multiple of 16 (32 for 4-bit codes), and the scales of an expert that begins at row s and has
      e experts before it start at block s // 128 + e of 128 rows; blocks without rows have the scale zero.
    - `quantize_grad`, `grad_rowwise`, `grad_columnwise`: the gradient of x (and of up) is a `QTensor` of this format,
      encoded from fp32. Blocks 1x128, 128x128 and mx take one read of x and of y's gradient, unless a block would
      span gate and up; that case and the other blocks go through an fp32 gradient in memory. The gradient of an input
      of a `torch.compile` graph is dequantized when it leaves the graph. Gradients that autograd accumulates are
      dequantized and added in x's dtype.
    - `out`: write y into this tensor or `QTensor` instead of a new one; not with autograd.

    >>> import torch, weft
    >>> x = torch.randn(48, 2 * 256, dtype=torch.bfloat16)
    >>> weft.glu(x).shape
    torch.Size([48, 256])
    >>> ends = torch.tensor([5, 32, 40])  # rows 0-4, 16-31, 32-39; the others are padding
    >>> y = weft.glu(x, probs=torch.rand(48), ends=ends, align=16)
    >>> y[5:16].count_nonzero(), y[40:].count_nonzero()
    (tensor(0), tensor(0))
    >>> q = weft.glu(x, quantize="1x128", columnwise=True)
    >>> q.rowwise.data.shape, q.columnwise.data.shape
    (torch.Size([48, 256]), torch.Size([256, 48]))
    """
    unit = _checked_unit(x, up, act, layout, limit, alpha, up_offset)
    probs, groups = _checked_rows(x, probs, ends, align)
    if bias is not None:
        _check_bias(bias, x, unit, groups)
    options = result_options(
        x, quantize, rowwise=rowwise, columnwise=columnwise, quant_scale=quant_scale, return_amax=return_amax,
        out_dtype=out_dtype,
        dtype=None if up is None or up.dtype is x.dtype else torch.promote_types(x.dtype, up.dtype),
    )  # fmt: skip
    gradient = _PLAIN_GRADIENTS[x.dtype]
    if options.format is not None:
        _check_groups(options, groups, True)
    if quantize_grad is not None:
        gradient = _gradient_options(x, unit, groups, quantize_grad, grad_rowwise, grad_columnwise)
    a = GluArgs(x, up, probs, bias, groups, unit, options, gradient)
    result = (glu_op(a) if out is None else result_into(glu_op, a, out)).result
    if options.format is None:
        return result.y
    q = result.value(options)
    return q if result.amax is None else (q, result.amax)


def glu_backward(
    dy: Tensor,
    x: Tensor,
    up: Tensor | None = None,
    *,
    act: Act = "silu",
    layout: Layout = "concat",
    probs: Tensor | None = None,
    bias: Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    ends: Tensor | None = None,
    align: int = 1,
    quantize: Format | str | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
) -> GluGradients:
    """Compute the gradients of `glu`, for hand-written backwards.

    dy: [..., H], the gradient of y. The other arguments are those of `glu`. With `quantize` the gradients of x and up
    are `QTensor`s.

    >>> import torch, weft
    >>> x, dy = torch.randn(48, 512, dtype=torch.bfloat16), torch.randn(48, 256, dtype=torch.bfloat16)
    >>> grads = weft.glu_backward(dy, x, probs=torch.rand(48), quantize="1x128", columnwise=True)
    >>> grads.x.rowwise.data.shape, grads.x.columnwise.data.shape, grads.probs.shape
    (torch.Size([48, 512]), torch.Size([512, 48]), torch.Size([48]))
    """
    unit = _checked_unit(x, up, act, layout, limit, alpha, up_offset)
    flat_probs, groups = _checked_rows(x, probs, ends, align)
    if bias is not None:
        _check_bias(bias, x, unit, groups)
    check_tensor("dy", dy, FLOATS, x.device, (*x.shape[:-1], hidden_of(x, unit.layout)))
    gradient = _PLAIN_GRADIENTS[x.dtype]
    if quantize is not None:
        gradient = _gradient_options(x, unit, groups, quantize, rowwise, columnwise)
    elif columnwise:
        raise ValueError("columnwise goes with quantize=…; pass a format")
    needs = GluBackwardOutputs(True, up is not None, probs is not None, bias is not None)
    gradients = glu_backward_op(GluBackwardArgs(x, up, flat_probs, bias, dy, groups, unit, gradient, needs))
    dx, dup, dprobs = (
        _gradient(gradients.x, gradient, x),
        _gradient(gradients.up, gradient, up),
        gradients.probs,
    )
    assert dx is not None
    if dprobs is not None and probs is not None:
        dprobs = dprobs.view(probs.shape)
    return GluGradients(dx, dup, dprobs, gradients.bias)


_PLAIN_GRADIENTS = {dtype: plain_result(dtype) for dtype in FLOATS}


def _checked_unit(
    x: Tensor, up: Tensor | None, act: str, layout: str, limit: float | None, alpha: float, up_offset: float
) -> GatedUnit:
    check_input("x", x)
    if act not in ACTIVATIONS:
        raise ValueError(f"act must be one of {', '.join(ACTIVATIONS)}; got {act!r}")
    if layout not in ("concat", "interleaved", "none"):
        raise ValueError(f"layout must be 'concat', 'interleaved' or 'none'; got {layout!r}")
    if up is not None:
        if layout != "concat":
            raise ValueError(
                f"with up=, x has no layout of gate and up; got layout={layout!r}. Leave out layout="
            )
        check_tensor("up", up, dtypes_beside(x.dtype), x.device, x.shape)
        layout = "pair"
    elif layout != "none" and x.shape[-1] % 2:
        raise ValueError(f"x holds gate and up, [..., 2H]; its last dimension is {x.shape[-1]}, which is odd")
    if limit is not None:
        limit = real("limit", limit)
        if not limit > 0:
            raise ValueError(f"limit must be positive, or None for no limit; got {limit}")
    alpha = real("alpha", alpha)
    if alpha != 1.0 and act not in WITH_ALPHA:
        raise ValueError(
            f"alpha is for {', '.join(WITH_ALPHA)}; got alpha={alpha} for act={act!r}. Leave it out"
        )
    return GatedUnit(act, layout, limit, alpha, real("up_offset", up_offset))


def _checked_rows(
    x: Tensor, probs: Tensor | None, ends: Tensor | None, align: int
) -> tuple[Tensor | None, Groups]:
    """Check and return the weights [M] of x's rows, and their experts."""
    if probs is not None:
        lead = x.shape[:-1]
        check_tensor("probs", probs, FLOATS, x.device, lead, (*lead, 1))
        if not is_distributed(x, probs):
            probs = probs.reshape(-1)
        elif probs.dim() == x.dim():
            probs = probs.squeeze(-1)  # each rank flattens its own shard
    if whole("align", align) < 1 or (ends is None and align != 1):
        raise ValueError(f"align must be at least 1, and goes with ends=…; got {align}")
    if ends is None:
        return probs, NO_GROUPS
    check_tensor("ends", ends, INTEGERS, x.device)
    if ends.dim() != 1:
        raise ValueError(f"ends must be [experts], the end of each expert's rows; got {tuple(ends.shape)}")
    return probs, Groups(ends, align)


def _check_bias(bias: Tensor, x: Tensor, unit: GatedUnit, groups: Groups) -> None:
    if unit.layout == "pair":
        raise ValueError(
            "bias= belongs to one projection, but gate and up are separate: add each bias in its own projection"
        )
    width = x.shape[-1]
    shape = (width,) if groups.ends is None else (groups.ends.numel(), width)
    check_tensor("bias", bias, FLOATS, x.device, shape)


def _gradient_options(
    x: Tensor, unit: GatedUnit, groups: Groups, quantize: Format | str, rowwise: bool, columnwise: bool
) -> ResultOptions:
    """Check and return the options of quantized gradients of x and up."""
    format = Format.of(quantize)
    check_copies(rowwise, columnwise)
    check_fused_format(format)
    options = ResultOptions(x.dtype, format.spec, bool(rowwise), bool(columnwise), None, False)
    _, one_pass = in_one_pass(format, unit.layout, hidden_of(x, unit.layout))
    _check_groups(options, groups, one_pass)
    return options


def _check_groups(options: ResultOptions, groups: Groups, one_pass: bool) -> None:
    """Raise an error for copies that are impossible if experts may begin at any row."""
    if groups.ends is None or options.format is None:
        return
    format, columnwise, align = Format.of(options.format), options.columnwise, groups.align
    if columnwise and format.block == "row":
        raise ValueError("block 'row' has one scale per whole column, which would mix experts: use 1x128")
    if not groups.blocks_restart() or format.block == "tensor":
        return
    if format.block == "128x128":
        raise ValueError(f"128x128 blocks would mix experts: pad them to align=128; got align={align}")
    if columnwise and not options.rowwise:
        raise ValueError(
            "column-wise blocks that restart at every expert need the row-wise copy too: "
            f"pad the experts to align=128, or leave rowwise=True; got align={align}"
        )
    if columnwise and align % (16 * format.packed):
        raise ValueError(
            f"a column-wise copy needs experts that begin at multiples of {16 * format.packed}; got align={align}"
        )
    if columnwise and not one_pass:
        raise ValueError(
            f"{format.spec} needs the whole gradient before its first code; its column-wise copy would mix experts: "
            f"pad them to align=128; got align={align}"
        )
