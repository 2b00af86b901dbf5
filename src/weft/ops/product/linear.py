"""Linear layers whose three products run in the formats of a recipe, for all rows or for rows in groups.

    y = round(x w^T + bias)       dx = round(dy w)       dw = round(dy^T x)       dbias = round(sum of dy over rows)

x, w and dy here mean their quantized values, rounded once each. For rows in groups, each group has its own w; see
`grouped`. Backward keeps, instead of x, its copy quantized along the rows, in 8 or 4 bits, and the weight's copy
quantized along its own rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes

from ...quant import PLAIN, Codes, Format, QTensor
from ...quant.copies import Copies, in_slots
from ...quant.formats import read_alike
from ...quant.qtensor import stand_in
from ...quant.straight import stand_in_for
from ...runtime import autocasted, is_distributed, is_transformed, plain_gradient
from ..common.checks import FLOATS, check_input, check_tensor, main_grad_of
from ..common.groups import NO_GROUPS, Groups
from ..common.into import result_into
from ..common.results import ResultOptions, plain_result
from ..common.rows import compute_dtype
from ..quantize.arguments import QuantizeArgs
from ..quantize.quantize import quantize_op
from .arguments import grouped_args, matmul_args, wgrad_args
from .delayed import Delayed, DelayedScaling
from .grouped import (
    check_weight_blocks,
    grouped_matmul,
    grouped_matmul_op,
    grouped_wgrad_op,
    sums_of_groups,
    weight_codes,
)
from .matmul import EITHER_COPY, codes_along_k, matmul, matmul_op
from .recipes import Recipe

# ---- operands -------------------------------------------------------------------------------------------


class LayerOperand(NamedTuple):
    """Operand of a layer's products in a recipe's format: one matrix, or one per group."""

    plain: Tensor  # [..., rows, width]; a stand-in if there are codes
    row: Codes = PLAIN  # scales along the width
    col: Codes = PLAIN  # transposed, scales along the rows


def _layer_operand(x: Tensor, copies: Copies) -> LayerOperand:
    row, col = copies
    return LayerOperand(stand_in(x), codes_along_k(row, col) or PLAIN, codes_along_k(col, row) or PLAIN)


def quantized_copies(
    x: Tensor,
    spec: str,
    rowwise: bool,
    columnwise: bool,
    seed: int | None = None,
    *,
    delayed: Delayed | None = None,
    keep_nonfinite: bool = False,
) -> Copies:
    """Return the requested copies of x, row-wise and column-wise. `keep_nonfinite`: an Inf or NaN in x makes a
    per-tensor scale NaN; for other scales the gradient formats in `recipes` ensure it."""
    f = Format.of(spec)
    if columnwise and f.block in EITHER_COPY:
        rowwise, columnwise = True, False
    scale = None if delayed is None else delayed.scale
    records_amax = delayed is not None and delayed.amax is not None
    keep_nonfinite = keep_nonfinite and (f.stored.block == "nvfp4" or scale is not None)
    options = ResultOptions(
        x.dtype, spec, rowwise, columnwise, scale, return_amax=records_amax or keep_nonfinite
    )
    result = quantize_op(QuantizeArgs(x, options, seed)).result
    if delayed is not None:
        delayed.note(result.amax)
    row, col = result.copies(spec)
    if not keep_nonfinite or result.amax is None:
        return row, col
    finite = result.amax.isfinite()
    return _poisoned(row, finite), _poisoned(col, finite)


def _poisoned(codes: Codes | None, finite: Tensor) -> Codes | None:
    """Return codes whose per-tensor scale is NaN unless `finite`, a boolean on the device."""
    if codes is None:
        return None
    if codes.global_scale is not None:
        return codes._replace(global_scale=torch.where(finite, codes.global_scale, torch.nan))
    return codes._replace(scale=torch.where(finite, codes.scale, torch.nan))


def _activations(x: Tensor, s: Settings, columnwise: bool) -> LayerOperand:
    """Quantize x [rows, K], unless it is quantized already, along K and, with `columnwise`, along the rows."""
    spec = s.recipe.x
    if spec is None:
        return LayerOperand(x.to(s.recipe.dtype or s.dtype))
    if not isinstance(x, QTensor):
        return _layer_operand(x, quantized_copies(x, spec, True, columnwise, delayed=s.delayed("x")))
    if torch.compiler.is_compiling():  # the dispatcher takes the QTensor apart
        return LayerOperand(x)
    return _layer_operand(x, (x.rowwise, x.columnwise))


def _weights(w: Tensor, s: Settings, transposed: bool) -> LayerOperand:
    """Quantize a weight [N, K] or weights [groups, N, K]; `transposed`: also the copy that dx reads."""
    spec = s.recipe.weight
    if spec is None:
        return LayerOperand(w.to(s.recipe.dtype or s.dtype))
    if isinstance(w, QTensor):
        copies = w.rowwise, w.columnwise
    else:
        copies = quantized_copies(w, spec, True, transposed, delayed=s.delayed("weight"))
    if s.groups.ends is None:
        return _layer_operand(w, copies)
    row, col = (weight_codes(copies, w.shape[0], transpose) or PLAIN for transpose in (False, True))
    return LayerOperand(stand_in(w), row, col)


# ---- weights that are quantized once --------------------------------------------------------------------

_Reused = dict[tuple[Any, ...], tuple[Tensor, int, LayerOperand]]
_reused: ContextVar[_Reused | None] = ContextVar("weights that are quantized once", default=None)


@contextmanager
def reuse_weights() -> Iterator[None]:
    """Quantize each weight once inside the block, for several micro-batches of a step or for inference.

    A weight is quantized again after it changes in place, and all weights are after any `torch.optim.Optimizer` step,
    because fused optimizers and FSDP2 change weights without incrementing PyTorch's version counters. Leave the block
    before any other uncounted change, such as `weight.data.copy_`. The block affects only the current thread.

    >>> import torch, weft
    >>> w = torch.randn(128, 128)
    >>> with weft.reuse_weights():
    ...     for x in torch.randn(4, 16, 128):
    ...         y = weft.linear(x, w, recipe="fp8_block")
    """
    if _reused.get() is not None:
        yield
        return
    cache: _Reused = {}
    token = _reused.set(cache)
    step_hook = register_optimizer_step_post_hook(lambda *_: cache.clear())
    try:
        yield
    finally:
        step_hook.remove()
        _reused.reset(token)


def _reused_weights(w: Tensor, s: Settings, transposed: bool) -> LayerOperand:
    cache = None if torch.compiler.is_compiling() or w.is_inference() else _reused.get()
    if cache is None:
        return _weights(w, s, transposed)
    key = (id(w), s.recipe.weight, s.recipe.dtype or s.dtype, s.scaling, transposed)
    cached = cache.get(key)
    if cached is not None and cached[1] == w._version:
        return cached[2]
    operand = _weights(w, s, transposed)
    cache[key] = (w, w._version, operand)  # caching w keeps its id unique
    return operand


# ---- products -------------------------------------------------------------------------------------------


class Settings(NamedTuple):
    """Settings shared by a layer's three products."""

    recipe: Recipe
    groups: Groups
    dtype: torch.dtype  # of y and dx
    weight_dtype: torch.dtype
    scaling: DelayedScaling | None = None

    def delayed(self, name: str) -> Delayed | None:
        """Return the delayed scale of "x", "weight" or "grad", or None without delayed scaling."""
        return None if self.scaling is None else self.scaling.operand(name)


def rows_times(
    x: LayerOperand, w: LayerOperand, bias: Tensor | None, s: Settings, transpose: bool = False
) -> Tensor:
    """Compute x w^T, or x w with `transpose`."""
    codes, result = w.col if transpose else w.row, plain_result(s.dtype)
    if s.groups.ends is None:
        right = w.plain if transpose else w.plain.t()
        dense = matmul_args(x.plain, right, result, a_codes=x.row, b_codes=codes, bias=bias)
        return matmul_op(dense).result.y
    right = w.plain.mT if transpose else w.plain
    grouped = grouped_args(x.plain, right, s.groups, result, x_codes=x.row, w_codes=codes, bias=bias)
    return grouped_matmul_op(grouped).result.y


def outer(dy: LayerOperand, x: LayerOperand, s: Settings, main: Tensor | None) -> Tensor | None:
    """Return dy^T x in the weight's dtype, or add it to `main` and return None."""
    result = plain_result(s.weight_dtype if main is None else main.dtype)
    if s.groups.ends is None:
        args: Any = matmul_args(dy.plain.t(), x.plain, result, a_codes=dy.col, b_codes=x.col, residual=main)
        op: Any = matmul_op
    else:
        args = wgrad_args(dy.plain, x.plain, s.groups, result, dy_codes=dy.col, x_codes=x.col, addend=main)
        op = grouped_wgrad_op
    if main is None:
        return op(args).result.y  # type: ignore[no-any-return]
    if torch.compiler.is_compiling():
        main.copy_(op(args).result.y)
        return None
    result_into(op, args, main, in_place=("residual", "addend"))
    return None


class _Linear(torch.autograd.Function):
    """Autograd function of the layer. `x` is plain, a QTensor (while compiling), or a stand-in for `quantized_x`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        quantized_x: QTensor | None,
        s: Settings,
        seed: int | None,
    ) -> Tensor:
        needs_x, needs_w = ctx.needs_input_grad[:2]
        left = _activations(x if quantized_x is None else quantized_x, s, needs_w)
        right = _reused_weights(w, s, needs_x)
        y = rows_times(left, right, bias, s)
        ctx.settings, ctx.seed, ctx.shape = s, seed, (x.shape, w.shape)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.main = main_grad_of(w) if needs_w else None
        saved = [s.groups.ends, None if s.scaling is None else s.scaling.grad_scale]
        for operand, needed in ((left, needs_w), (right, needs_x)):
            plain = operand.plain if s.recipe.x is None or isinstance(operand.plain, QTensor) else None
            saved += [plain, *operand.col[:3]] if needed else [None] * 4
        ctx.save_for_backward(*saved)
        ctx.specs = left.col.format, right.col.format
        ctx.dtypes = x.dtype, w.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        s: Settings = ctx.settings
        ends, _, *saved = ctx.saved_tensors  # unpacking fails if the saved scale was modified since forward
        s = s._replace(groups=s.groups._replace(ends=ends))
        operands = []
        for i, (shape, dtype, spec) in enumerate(zip(ctx.shape, ctx.dtypes, ctx.specs, strict=True)):
            plain, data, scale, global_scale = saved[4 * i : 4 * i + 4]
            if plain is None:
                plain = stand_in(dy, shape, dtype)
            operands.append(LayerOperand(plain, PLAIN, Codes(data, scale, global_scale, spec)))
        x, w = operands
        grad = _gradient(dy, s, ctx.seed, needs_x, needs_w)
        dx = rows_times(grad, w, None, s, transpose=True) if needs_x else None
        dw = outer(grad, x, s, ctx.main) if needs_w else None
        dbias = _bias_gradient(dy, s, ctx.bias_dtype) if needs_bias else None
        return dx, dw, dbias, None, None, None


def _gradient(dy: Tensor, s: Settings, seed: int | None, needs_x: bool, needs_w: bool) -> LayerOperand:
    """Quantize dy in the recipe's format, along N for dx and along the rows for dw."""
    spec = s.recipe.grad
    if spec is None:
        return LayerOperand(plain_gradient(dy).to(s.recipe.dtype or s.dtype))
    if isinstance(dy, QTensor) and not torch.compiler.is_compiling():
        row, col = dy.rowwise, dy.columnwise
        complete = (row is not None or not needs_x) and (col is not None or not needs_w)
        if complete and read_alike(dy.spec, spec) and not in_slots(col, len(dy)):
            return _layer_operand(dy, (row, col))
    dy = plain_gradient(dy)
    copies = quantized_copies(
        dy, spec, needs_x, needs_w, seed, delayed=s.delayed("grad"), keep_nonfinite=True
    )
    return _layer_operand(dy, copies)


def _bias_gradient(dy: Tensor, s: Settings, dtype: torch.dtype) -> Tensor:
    """Sum dy over all rows, or over the rows of each group."""
    dy = plain_gradient(dy)
    if s.groups.ends is None:
        return dy.sum(0, dtype=compute_dtype(dy)).to(dtype)
    return sums_of_groups(dy, s.groups, dtype)


def _plain_times(
    x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups, dtype: torch.dtype
) -> Tensor:
    """Compute y from plain rows and a plain or frozen quantized weight, with the gradients of the products."""
    if not isinstance(weight, QTensor):
        weight = weight.to(x.dtype)
    if groups.ends is None:
        return matmul(x, weight.t(), bias=bias, out_dtype=dtype)
    return grouped_matmul(x, weight, groups.ends, align=groups.align, bias=bias, out_dtype=dtype)


def apply_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    groups: Groups,
    scaling: DelayedScaling | None = None,
    name: str = "weight",
) -> Tensor:
    """Compute y [rows, N] from x [rows, K]. Error messages call the weight `name`."""
    if is_distributed(x, weight):
        raise ValueError(
            "linear does not take DTensors: pass x.to_local(), or use FSDP, which gives the layer full weights"
        )
    _check_layer(x, weight, bias, recipe, name)
    if recipe.is_quantized and is_transformed():
        raise NotImplementedError(
            "torch.func cannot differentiate a layer with a quantized recipe, because forward decides what to save for "
            "backward: call backward() or torch.autograd.grad, or use recipe=None or 'bf16'"
        )
    if not recipe.is_quantized and (isinstance(weight, QTensor) or is_transformed()):
        return _plain_times(x.to(recipe.dtype or x.dtype), weight, bias, groups, x.dtype)
    quantized_x = None
    compiling = torch.compiler.is_compiling()
    if isinstance(x, QTensor) and not compiling:
        x, quantized_x = stand_in_for(x), x
    seed = None
    if recipe.stochastic and torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        if compiling:
            raise RuntimeError(
                "a recipe with stochastic rounding draws a new seed in every call, which a compiled graph cannot do: "
                "exclude this layer with torch.compiler.disable, or use stochastic=False"
            )
        seed = _draw_seed()
    settings = Settings(recipe, groups, x.dtype, weight.dtype, scaling)
    return _Linear.apply(x, weight, bias, quantized_x, settings, seed)  # type: ignore[no-any-return]


def _draw_seed() -> int:
    """Draw from PyTorch's default generator on the host, without waiting for a device, hidden from dispatch modes."""
    with _disable_current_modes():
        return int(torch.randint(2**62, (), device="cpu"))


# ---- public function ------------------------------------------------------------------------------------


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe | str | None = None,
    scaling: DelayedScaling | None = None,
) -> Tensor:
    """Compute `torch.nn.functional.linear(x, weight, bias)`, with forward and backward products in a recipe's formats.

    - `x`: [..., K] in bf16, fp16 or fp32, or a `QTensor` in the recipe's format, as `rms_norm`, `glu` and `permute`
      return it; the weight gradient needs its column-wise copy.
    - `weight`: [N, K] in any float dtype; its gradient has that dtype, rounded once from fp32 sums. If it has an fp32
      attribute `main_grad`, the gradient is added to that instead, and `weight.grad` is unchanged. A `QTensor` is
      already quantized: in the recipe's format, with a straight-through gradient, as FSDP needs for a gathered weight;
      or, if the recipe does not quantize, in any format that `matmul` supports next to an unquantized operand, such as
      "int4:1x128", and then it must be frozen.
    - `recipe`: "bf16", "fp8_block", "fp8_row", "fp8_tensor", "mxfp8", "nvfp4", "int8_row", or a `weft.Recipe`. None
      computes in x's dtype.
    - `scaling`: a `weft.DelayedScaling` of this recipe, whose scales from earlier steps quantize plain operands.

    Returns y [..., N] in x's dtype. Gradients pass straight through rounding. Backward keeps x in 8 or 4 bits,
    quantized along rows, and the weight's codes. Every call quantizes the weight, except inside
    `weft.reuse_weights()`.

    >>> import torch, weft
    >>> x, w = torch.randn(32, 256, dtype=torch.bfloat16), torch.randn(128, 256, requires_grad=True)
    >>> y = weft.linear(x, w, recipe="fp8_block")
    >>> y.sum().backward()
    >>> y.dtype, w.grad.dtype
    (torch.bfloat16, torch.float32)
    """
    resolved = Recipe.of(recipe)
    check_input("x", x)
    check_input("weight", weight)
    x = autocasted(x)  # the weight is converted to x's dtype later
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x [..., K] and weight [N, K] must have one K; got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if scaling is not None:
        _check_scaling(scaling, resolved, x.device)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    y = apply_linear(rows, weight, bias, resolved, NO_GROUPS, scaling)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def _check_scaling(scaling: DelayedScaling, recipe: Recipe, device: torch.device) -> None:
    if not isinstance(scaling, DelayedScaling):
        raise TypeError(f"scaling must be a weft.DelayedScaling; got {type(scaling).__name__}")
    if scaling.recipe != recipe:
        raise ValueError(
            f"scaling= has {scaling.recipe}, but the layer has {recipe}: give both the same recipe"
        )
    if scaling.amax.device != device:
        raise ValueError(f"scaling= must be on {device} like x: move it with .to({str(device)!r})")


def _check_layer(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, name: str) -> None:
    """Raise ValueError unless a layer supports these operands."""
    if weight.device != x.device:
        raise ValueError(f"{name} must be on {x.device} like x; it is on {weight.device}")
    if bias is not None:
        check_tensor("bias", bias, FLOATS, x.device, tuple(weight.shape[:-1]))
    if recipe.is_quantized and torch.float64 in (x.dtype, weight.dtype):
        raise ValueError(
            f"recipes only round bf16, fp16 and fp32; got x in {x.dtype} and {name} in {weight.dtype}: convert them"
        )
    if isinstance(weight, QTensor) and weight.requires_grad and not recipe.is_quantized:
        raise ValueError(
            f"{name} is quantized but the recipe is not, so it must be frozen: train an unquantized {name}, or call "
            f"{name}.requires_grad_(False)"
        )
    grads = torch.is_grad_enabled()
    needs = {"x": (True, grads and weight.requires_grad), name: (True, grads and x.requires_grad)}
    for title, tensor, spec in (("x", x, recipe.x), (name, weight, recipe.weight)):
        if not isinstance(tensor, QTensor) or (title == name and spec is None):
            continue  # the product itself checks a weight next to an unquantized x
        if spec is None or not read_alike(tensor.spec, spec):
            raise ValueError(
                f"{title} is quantized as {tensor.spec}, but the recipe takes {spec or 'unquantized tensors'}: "
                "quantize it like that, or dequantize it"
            )
        if torch.compiler.is_compiling() or tensor.format.block in EITHER_COPY:
            continue
        for side, copy, needed in zip(
            ("row", "column"), (tensor.rowwise, tensor.columnwise), needs[title], strict=True
        ):
            if needed and copy is None:
                raise ValueError(
                    f"{title} has no {side}-wise copy, which {'y' if side == 'row' else 'a gradient'} needs; got "
                    f"{tensor!r}: quantize it with {side}wise=True"
                )
    if recipe.weight is not None and weight.dim() == 3:
        check_weight_blocks(recipe.weight, weight.shape[1], transpose=grads and x.requires_grad)
