"""Gated linear units: the activation of a gate times a value, weighted by the router, quantised, forward and backward.

    gate, up = split(x + bias)                                            the bias of a row is that of its expert
    a = min(gate, limit)          b = clamp(up, -limit, limit)            without a limit: gate and up themselves
    y = f(a) * (b + up_offset) * probs                                    out = round(y), or its codes and scales

    silu       f = a * s(alpha a)      s(z) = 1 / (1 + exp(-z))              f' = s (1 + alpha a (1 - s))
    gelu       f = a * Phi(a)          Phi(a) = erfc(-a / sqrt 2) / 2        f' = Phi + a exp(-a^2 / 2) / sqrt(2 pi)
    gelu_tanh  f = a * s(2 u)          u = sqrt(2 / pi) (a + 0.044715 a^3)   f' = s + 2 a u' s (1 - s)
    relu       f = max(a, 0)           sigmoid  f = s(alpha a)               relu2  f = max(a, 0)^2

All of it in fp32 with one rounding to each stored tensor; a quantised result is made from the fp32 y. Backward, with
dy the gradient of y:

    dgate = dy * probs * (b + up_offset) * f'(a), 0 where gate > limit
    dup = dy * probs * f(a), 0 where |up| > limit
    dprobs = sum over the row of dy * f(a) * (b + up_offset)
    dbias = sum over the rows, or over those of each expert, of dgate and dup

The quantised gradient is made from the fp32 dgate and dup as well, and so is dbias. For it a program goes through a
stripe of 128 rows of one expert and leaves their sum in fp32, and a second kernel adds up the sums of each expert in
order. That moves 8 bytes of every column for 128 rows, 1.3 % of what the gradient itself takes in bf16. A sum of the
gradient after it would read all of it again, 40 % more, and there is nothing to read if it is quantised.

Everything is computed again from the inputs: they alone are kept for the backward. Rows that belong to no group
(`weft.ops.common.groups`) are never read; their results, gradients and codes are zero. Sums over a row are added up in
a fixed order: the same bits every run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args, overload

import torch
from torch import Tensor

from ...quant import Format, QTensor
from ...runtime import LATER, Backward, Gradients, Op, Present, Sharding, is_distributed, later
from ..common.activations import Act
from ..common.checks import FLOATS, INTEGERS, check_input, check_tensor, dtypes_beside, real, whole
from ..common.groups import NO_GROUPS, Groups
from ..common.results import (
    Result,
    ResultOptions,
    allocate_result,
    check_copies,
    check_made_here,
    plain_result,
    result_into,
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
    """A gradient as the caller gets it."""
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
        needs, there, none = a.needs, a.gradient.present(), (False,) * len(NO_RESULT)
        return (
            there if needs.x else none,
            there if needs.up and a.up is not None else none,
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
        kept: GluBackwardArgs = b.kept
        needs = GluBackwardOutputs(b.needs.x, b.needs.up, b.needs.probs, b.needs.bias)
        found = glu_backward_op(kept._replace(dy=b.grads.result.y, needs=needs))
        dx, dup = _gradient(found.x, kept.gradient, kept.x), _gradient(found.up, kept.gradient, kept.up)
        if type(kept.x) not in (Tensor, torch.nn.Parameter):
            # A graph that is being traced has plain tensors for the gradients of its inputs, which are leaves to it.
            of_x, *of_others = b.node.next_functions
            dx = _dequantized_leaf(dx, of_x)
            dup = dup if dup is None else _dequantized_leaf(dup, of_others[0])
        return {"x": dx, "up": dup, "probs": found.probs, "bias": found.bias}

    def shard(self, a: GluArgs) -> Sharding:
        whole, block = a.result.blocks()
        of_gradient, rows = a.gradient.blocks()
        whole |= of_gradient
        if a.groups.ends is not None:
            whole["..."] = "ends= counts the rows of all experts. Give x.to_local() and each rank's own ends"
            whole["e"] = "ends= is needed for every expert"
        of_x = "... h"
        if a.unit.layout in ("concat", "interleaved"):
            of_x, whole["c"] = "... c", "gate and up lie in it. Give them apart, as glu(gate, up)"
        elif a.result.format is not None or a.gradient.format is not None:
            whole["h"] = "a block of the quantised result may reach over it"
        of_bias = of_x.split()[-1] if a.groups.ends is None else f"e {of_x.split()[-1]}"
        return Sharding(
            {
                "x": of_x,
                "up": "... h",
                "probs": "(...)",
                "bias": of_bias,
                "groups_ends": "e",
                "result_scale": "",
            },
            {"result_y": "... h", "result_amax": "max:"},
            whole,
            max(block, rows),
        )


glu_op = GluOp()


# ---- public functions -----------------------------------------------------------------------------------

Layout = Literal["concat", "interleaved", "none"]


class GluGradients(NamedTuple):
    """What `glu_backward` returns: the gradients of x, up, probs and bias, None for what the call does not have."""

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
    """A gated linear unit: `y = f(gate) * up * probs`, in fp32 and rounded once.

    x: [..., 2H] with gate and up in it, or the gate [..., H] beside `up` [..., H]; bf16, fp16 or fp32, of any
    strides. Returns y [..., H], and the largest |y| with `return_amax`.

    - `act`: f. "silu" makes it SwiGLU, "gelu" (by erf) and "gelu_tanh" GeGLU, "relu" ReGLU; "relu2" is ReLU squared.
    - `layout` of x: "concat" has all of the gate first, "interleaved" gate and up in turn. "none": nothing is gated,
      x is [..., H] and y = f(x).
    - `probs` [...] or [..., 1]: a weight for each row, such as the router's probability. It has a gradient.
    - `bias` [last dimension of x], with `ends` one for each expert, [experts, last dimension of x]: that of the
      projection which makes x, added to it in fp32; bf16, fp16 or fp32. Its gradient is a sum over rows in fp32, in a
      fixed order. It does not go with `up`, where each of two projections adds its own.
    - `limit`: gate counts as at most the limit, up as within ±limit; their gradients are 0 beyond it. `alpha`: the
      steepness of the sigmoid in silu. `up_offset` is added to up. gpt-oss has limit 7, alpha 1.702, up_offset 1.
    - `ends` [experts], int32 or int64 on the device: where the rows of each expert end, the `ends` of a `RowMap`. An
      expert begins where the one before it ends, rounded up to a multiple of `align`. Rows of no expert are not read;
      their results and gradients are zero. Without experts there is one group of all rows. What the numbers are is
      known on the device alone: `RowMap.offsets` in their place, where an expert's pads count as its rows, is not
      noticed.
    - `out_dtype`: of y; by default x's, or that to which PyTorch promotes x's and up's.
    - `quantize`, `rowwise`, `columnwise`, `quant_scale`, `return_amax`: as for `weft.rms_norm`. No block of a
      column-wise copy mixes experts. If `align` is a multiple of 128 its blocks lie as without experts. Otherwise
      `align` is a multiple of 16 (32 for 4-bit codes), and the scales of an expert that begins with row s and has
      e experts before it begin with block s // 128 + e of 128 rows; blocks without rows have the scale zero.
    - `quantize_grad`, `grad_rowwise`, `grad_columnwise`: the gradient of x (and of up) is a `QTensor` of this format,
      made from fp32. Blocks 1x128, 128x128 and mx come from one read of x and of y's gradient, unless one of them
      would reach from the gate into up; those and the other blocks take an fp32 gradient in memory. What leaves a
      graph of `torch.compile` as the gradient of one of its inputs is dequantised. Gradients that autograd adds up
      are dequantised and added in x's dtype.
    - `out`: write y into this tensor, or into this `QTensor`, instead of a new one; not with autograd.

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
    """The gradients of `glu`, for those who write their backward themselves: dy [..., H] is the gradient of y, the
    other arguments are those of `glu`. With `quantize` the gradients of x and up are `QTensor`s.

    >>> import torch, weft
    >>> x, dy = torch.randn(48, 512, dtype=torch.bfloat16), torch.randn(48, 256, dtype=torch.bfloat16)
    >>> found = weft.glu_backward(dy, x, probs=torch.rand(48), quantize="1x128", columnwise=True)
    >>> found.x.rowwise.data.shape, found.x.columnwise.data.shape, found.probs.shape
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
        raise ValueError("columnwise goes with quantize=…")
    needs = GluBackwardOutputs(True, up is not None, probs is not None, bias is not None)
    found = glu_backward_op(GluBackwardArgs(x, up, flat_probs, bias, dy, groups, unit, gradient, needs))
    dx, dup, dprobs = _gradient(found.x, gradient, x), _gradient(found.up, gradient, up), found.probs
    assert dx is not None
    if dprobs is not None and probs is not None:
        dprobs = dprobs.view(probs.shape)
    return GluGradients(dx, dup, dprobs, found.bias)


_ACTS = get_args(Act)
_PLAIN_GRADIENTS = {dtype: plain_result(dtype) for dtype in FLOATS}


def _checked_unit(
    x: Tensor, up: Tensor | None, act: str, layout: str, limit: float | None, alpha: float, up_offset: float
) -> GatedUnit:
    check_input("x", x)
    if act not in _ACTS:
        raise ValueError(f"act must be one of {', '.join(_ACTS)}; got {act!r}")
    if layout not in ("concat", "interleaved", "none"):
        raise ValueError(f"layout must be 'concat', 'interleaved' or 'none'; got {layout!r}")
    if up is not None:
        if layout != "concat":
            raise ValueError(f"with up= there is no layout of gate and up in x; got layout={layout!r}")
        check_tensor("up", up, dtypes_beside(x.dtype), x.device, x.shape)
        layout = "pair"
    elif layout != "none" and x.shape[-1] % 2:
        raise ValueError(f"x holds gate and up, [..., 2H]; its last dimension is {x.shape[-1]}, which is odd")
    if limit is not None:
        limit = real("limit", limit)
        if not limit > 0:
            raise ValueError(f"limit must be positive, or None for no limit; got {limit}")
    alpha = real("alpha", alpha)
    if alpha != 1.0 and act not in ("silu", "sigmoid"):
        raise ValueError(
            f"alpha is the steepness of a sigmoid, for silu and sigmoid; got {alpha} for {act!r}"
        )
    return GatedUnit(act, layout, limit, alpha, real("up_offset", up_offset))


def _checked_rows(
    x: Tensor, probs: Tensor | None, ends: Tensor | None, align: int
) -> tuple[Tensor | None, Groups]:
    """What the rows of x have: their weights [M], and their experts."""
    if probs is not None:
        lead = x.shape[:-1]
        check_tensor("probs", probs, FLOATS, x.device, lead, (*lead, 1))
        if not is_distributed(x, probs):
            probs = probs.reshape(-1)
        elif probs.dim() == x.dim():
            probs = probs.squeeze(-1)  # the shards are joined into rows, by each rank its own
    if whole("align", align) < 1 or (ends is None and align != 1):
        raise ValueError(f"align is a positive number that goes with ends=…; got {align}")
    if ends is None:
        return probs, NO_GROUPS
    check_tensor("ends", ends, INTEGERS, x.device)
    if ends.dim() != 1:
        raise ValueError(f"ends must be [experts], where the rows of each end; got {tuple(ends.shape)}")
    return probs, Groups(ends, align)


def _check_bias(bias: Tensor, x: Tensor, unit: GatedUnit, groups: Groups) -> None:
    if unit.layout == "pair":
        raise ValueError(
            "bias= is that of one projection; gate and up are given apart: add each bias in its own"
        )
    width = x.shape[-1]
    shape = (width,) if groups.ends is None else (groups.ends.numel(), width)
    check_tensor("bias", bias, FLOATS, x.device, shape)


def _gradient_options(
    x: Tensor, unit: GatedUnit, groups: Groups, quantize: Format | str, rowwise: bool, columnwise: bool
) -> ResultOptions:
    """How the gradients of x and up are quantised, checked."""
    format = Format.of(quantize)
    check_copies(rowwise, columnwise)
    check_made_here(format)
    options = ResultOptions(x.dtype, format.spec, bool(rowwise), bool(columnwise), None, False)
    _, one_pass = in_one_pass(format, unit.layout, hidden_of(x, unit.layout))
    _check_groups(options, groups, one_pass)
    return options


def _check_groups(options: ResultOptions, groups: Groups, one_pass: bool) -> None:
    """Complain about copies that cannot be made of experts that begin anywhere."""
    if groups.ends is None or options.format is None:
        return
    format, columnwise, align = Format.of(options.format), options.columnwise, groups.align
    if columnwise and format.block == "row":
        raise ValueError("block 'row' has one scale to a whole column, which would mix experts: take 1x128")
    if not groups.begin_anew() or format.block == "tensor":
        return
    if format.block == "128x128":
        raise ValueError(f"128x128 blocks would mix experts: pad them to align=128; got align={align}")
    if columnwise and not options.rowwise:
        raise ValueError(
            "column-wise blocks that begin anew with every expert need the row-wise copy beside them: "
            f"pad the experts to align=128, or leave rowwise=True; got align={align}"
        )
    if columnwise and align % (16 * format.packed):
        raise ValueError(
            f"a column-wise copy needs experts that begin at multiples of {16 * format.packed}: got align={align}"
        )
    if columnwise and not one_pass:
        raise ValueError(
            f"{format.spec} takes the whole gradient before its first code; its column-wise copy would mix experts: "
            f"pad them to align=128; got align={align}"
        )
