"""Grouped products: each group of rows is multiplied with its own matrix, as in a mixture of experts.

    y[r] = round(act(x[r] @ w[e]^T + bias[e]))                          for the rows r of group e, w [groups, N, K]
    y[r] = round(act(x[r] @ gate[e]^T + b_g[e]) * (x[r] @ up[e]^T + b_u[e]))            with w[e] = [gate[e], up[e]]
    dx[r] = round(dz[r] @ w[e])            dw[e] = round(sum over the rows r of group e of dz[r]^T x[r])

`ends`, on the device, holds the end of each group; see `common.groups` for the rules. Rows of no group are zero in y
and dx, and the gradient of an empty group is zero. Arithmetic and roundings are those of `matmul`; the bits of a row
depend only on the row and its group's matrix. Programs find their tiles in `ends` themselves, so the grid does not
depend on where groups end, and the host never waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cached_property
from typing import Literal, cast

import torch
from torch import Tensor

from ...quant import PLAIN, Codes, Format, QTensor
from ...quant.copies import Copies
from ...quant.qtensor import stand_in
from ...quant.reference import dequantize_copy
from ...quant.straight import stand_in_for
from ...runtime import Backward, Gradients, Op, Present
from ..common.activations import Act
from ..common.checks import FLOATS, INTEGERS, check_input, check_tensor, dtypes_beside, whole
from ..common.groups import Groups, group_spans
from ..common.into import result_into
from ..common.quantized import register_codes
from ..common.results import allocate_result, plain_result, result_options, result_reference
from ..common.rows import compute_dtype
from ..glu.glu import glu_backward
from ..moe.row_map.arguments import RowMap
from .arguments import GroupedArgs, ProductOutputs, WgradArgs, wgrad_args
from .checks import has_slots, validate_grouped, validate_wgrad
from .engines import Engine, check_grouped_engine
from .matmul import (
    check_activation,
    codes_along_columns,
    codes_along_k,
    codes_along_rows,
    dtype_of_out,
    finish_reference,
    plain_numbers,
    reference_numbers,
)
from .operands import Precision, autocasted_pair

# ---- reference ------------------------------------------------------------------------------------------


def _group_codes(codes: Codes, group: int) -> Codes:
    """Return the codes of one group's matrix."""
    if codes.data is None:
        return codes
    return codes._replace(data=codes.data[group], scale=codes.scale[group])


def _gather(x: Tensor, a: GroupedArgs) -> Tensor:
    """Return the rows to multiply, gathered by `slot_of_row` if given."""
    if a.slot_of_row is None:
        return x
    slot = a.slot_of_row.long()
    return torch.where((slot >= 0)[:, None], x[slot.clamp(min=0) // a.slots], 0)


def _group_rows(x: Tensor, codes: Codes, span: tuple[int, int, int], groups: int) -> Tensor:
    """Return the rows of a group, transposed: [width, rows of the group]."""
    group, begin, end = span
    dtype = compute_dtype(x)
    if codes.data is None:
        return x[begin:end].to(dtype).t()
    f, scale = Format.of(codes.format), codes.scale
    if f.group:
        first = begin // f.group
        if has_slots(codes, len(x), groups):
            first = (begin // 128 + group) * 128 // f.group
        scale = scale[:, first : first - (begin - end) // f.group]
    data = codes.data[:, begin // f.packed : -(-end // f.packed)]
    # Rotations cancel in the product, so they are not undone.
    return dequantize_copy(codes._replace(data=data, scale=scale), (x.shape[1], end - begin), dtype)


# ---- registration ---------------------------------------------------------------------------------------


def sums_of_groups(x: Tensor, groups: Groups, dtype: torch.dtype, precision: str | None = None) -> Tensor:
    """Sum the rows of each group of x [rows, N] in fp32; return [groups, N] rounded to dtype."""
    ones = torch.ones(len(x), 1, dtype=x.dtype, device=x.device)
    args = wgrad_args(x, ones, groups, plain_result(dtype))
    return grouped_wgrad_op(args._replace(precision=precision)).result.y.squeeze(-1)


def _gradient_precision(precision: str | None) -> str | None:
    """Return the precision of backward products: fp16 sums are for the forward only."""
    return None if precision == "fp16" else precision


def _plain_weights(saved: GroupedArgs, dtype: torch.dtype) -> Tensor:
    """Return the dequantized matrices of all groups, [groups, N, K]."""
    w, codes = saved.w, saved.w_codes
    if isinstance(w, QTensor):  # saved by a graph that was traced with a QTensor
        weight_codes_ = _codes_of_weights(w)
        if weight_codes_ is None:
            return w.dequantize(dtype)
        w, codes = stand_in(w), weight_codes_
    if codes.data is None:
        return w.to(dtype)
    matrices = [
        plain_numbers(matrix, _group_codes(codes, group), dtype, False) for group, matrix in enumerate(w)
    ]
    return torch.stack(matrices) if matrices else saved.w.new_zeros(saved.w.shape, dtype=dtype)


def _scatter_add(dx: Tensor, saved: GroupedArgs) -> Tensor:
    """Add the rows' gradients to their tokens' gradients, in the order of the slots."""
    if saved.slot_of_row is None:
        return dx
    slot, tokens = saved.slot_of_row.long(), len(saved.x)
    count = tokens * saved.slots
    # Padding rows write past the end. All other slots are distinct, so the order of writes does not matter.
    row_of_slot = slot.new_full((count + 1,), -1)
    row_of_slot.scatter_(0, torch.where(slot >= 0, slot, count), torch.arange(len(slot), device=slot.device))
    rows = row_of_slot[:count].view(tokens, saved.slots)
    total = torch.zeros(tokens, dx.shape[1], dtype=compute_dtype(dx), device=dx.device)
    for row in rows.unbind(1):
        total += torch.where((row >= 0)[:, None], dx[row.clamp(min=0)], 0)
    return total.to(dx.dtype)


class GroupedMatmulOp(Op[GroupedArgs, ProductOutputs], name="grouped_matmul", variants=64):
    def validate(self, a: GroupedArgs) -> None:
        validate_grouped(a)

    def allocate(self, a: GroupedArgs) -> ProductOutputs:
        rows = a.x if a.slot_of_row is None else a.slot_of_row
        return ProductOutputs(
            allocate_result(a.result, a.x, (rows.shape[0], a.w.shape[1] // (2 if a.gated else 1)))
        )

    def present(self, a: GroupedArgs) -> Present:
        return (a.result.present(),)

    @cached_property
    def launch(self) -> Callable[[ProductOutputs, GroupedArgs], None]:
        from .launch import launch_grouped

        return launch_grouped

    def reference(self, a: GroupedArgs) -> ProductOutputs:
        """Compute the grouped product in plain PyTorch."""
        dtype = compute_dtype(a.x)
        x = _gather(reference_numbers(a.x, a.x_codes, dtype, False), a)
        y = x.new_zeros(len(x), a.w.shape[1] // (2 if a.gated else 1))
        for group, begin, end in group_spans(a.ends, len(x), a.align):
            weight = reference_numbers(a.w[group], _group_codes(a.w_codes, group), dtype, False)
            bias = None if a.bias is None else a.bias[group]
            y[begin:end] = finish_reference(x[begin:end] @ weight.t(), bias, a.activation, a.gated)
        rounded = y if a.result.format is None else y.to(a.result.dtype)
        return ProductOutputs(
            result_reference(a.result, rounded, tuple(y.shape), a.x, input_dtype=a.result.dtype)
        )

    def keep(self, a: GroupedArgs, o: ProductOutputs) -> GroupedArgs:
        """Save what backward reads."""
        return a._replace(result=plain_result(a.result.dtype))

    def backward(self, b: Backward) -> Gradients:
        saved: GroupedArgs = b.kept
        dz = b.grads.result.y
        gradients: Gradients = {}
        product_args = saved._replace(
            activation=None, gated=False, precision=_gradient_precision(saved.precision)
        )
        if saved.activation is not None:
            z_args = product_args._replace(precision=saved.precision, result=plain_result(compute_dtype(dz)))
            z = grouped_matmul_op(z_args).result.y
            layout: Literal["concat", "none"] = "concat" if saved.gated else "none"
            dz = glu_backward(dz, z, act=cast(Act, saved.activation), layout=layout).x.to(dz.dtype)
        if b.needs.x:
            weights = _plain_weights(saved, dz.dtype).mT
            dx_args = product_args._replace(
                x=dz, w=weights, x_codes=PLAIN, w_codes=PLAIN, bias=None, slot_of_row=None,
                result=plain_result(saved.x.dtype),
            )  # fmt: skip
            gradients["x"] = _scatter_add(grouped_matmul_op(dx_args).result.y, saved)
        groups = Groups(saved.ends, saved.align)
        if b.needs.w:
            rows = _gather(plain_numbers(saved.x, saved.x_codes, dz.dtype, False), saved)
            dw_args = wgrad_args(dz, rows, groups, plain_result(saved.w.dtype))
            dw_args = dw_args._replace(precision=product_args.precision, engine=saved.engine)
            gradients["w"] = grouped_wgrad_op(dw_args).result.y
        if b.needs.bias and saved.bias is not None:
            gradients["bias"] = sums_of_groups(dz, groups, saved.bias.dtype, product_args.precision)
        return gradients


grouped_matmul_op = GroupedMatmulOp()


class GroupedWgradOp(Op[WgradArgs, ProductOutputs], name="grouped_wgrad", variants=64):
    def validate(self, a: WgradArgs) -> None:
        validate_wgrad(a)

    def allocate(self, a: WgradArgs) -> ProductOutputs:
        return ProductOutputs(allocate_result(a.result, a.dy, (a.ends.shape[0], a.dy.shape[1], a.x.shape[1])))

    def present(self, a: WgradArgs) -> Present:
        return (a.result.present(),)

    @cached_property
    def launch(self) -> Callable[[ProductOutputs, WgradArgs], None]:
        from .launch import launch_wgrad

        return launch_wgrad

    def reference(self, a: WgradArgs) -> ProductOutputs:
        """Compute the groups' weight gradients in plain PyTorch."""
        groups = len(a.ends)
        y = torch.zeros(groups, a.dy.shape[1], a.x.shape[1], dtype=compute_dtype(a.dy), device=a.dy.device)
        for span in group_spans(a.ends, len(a.dy), a.align):
            y[span[0]] = (
                _group_rows(a.dy, a.dy_codes, span, groups) @ _group_rows(a.x, a.x_codes, span, groups).t()
            )
        if a.addend is not None:
            y = y + a.addend.to(y.dtype)
        return ProductOutputs(result_reference(a.result, y.flatten(0, 1), tuple(y.shape), a.dy))


grouped_wgrad_op = GroupedWgradOp()


def weight_codes(copies: Copies, groups: int, transpose: bool) -> Codes | None:
    """Return views of the weights' codes [groups, N, K] with scales along K: the row-wise copy, or the column-wise copy
    to multiply with the transposes [groups, K, N]."""
    codes = codes_along_k(*(reversed(copies) if transpose else copies))
    if codes is None:
        return None
    side = 1 if transpose else 0  # dimension along which groups are concatenated
    block, scale = Format.of(codes.format).block, codes.scale
    data = codes.data.unflatten(side, (groups, -1)).movedim(side, 0)
    if block == "tensor" or (block == "row" and transpose):  # one scale for all groups
        return codes._replace(data=data, scale=scale.expand(groups, *scale.shape))
    return codes._replace(data=data, scale=scale.unflatten(side, (groups, -1)).movedim(side, 0))


def _codes_of_weights(q: QTensor, transpose: bool = False) -> Codes | None:
    if q.shape[1] % _block_height(q.spec, transpose):
        return None  # a block spans two groups
    return weight_codes((q.rowwise, q.columnwise), q.shape[0], transpose)


register_codes(grouped_matmul_op, x=codes_along_rows, w=_codes_of_weights)
register_codes(grouped_wgrad_op, dy=codes_along_columns, x=codes_along_columns)


# ---- public functions -----------------------------------------------------------------------------------


def grouped_matmul(
    x: Tensor,
    w: Tensor,
    ends: Tensor,
    *,
    align: int = 1,
    transpose: bool = False,
    gather: RowMap | None = None,
    bias: Tensor | None = None,
    activation: Act | None = None,
    glu: Act | None = None,
    out_dtype: torch.dtype | None = None,
    quantize: Format | str | None = None,
    out: Tensor | None = None,
    precision: Precision | None = None,
    engine: Engine = "auto",
) -> Tensor:
    """Multiply each row with its group's matrix and apply the epilogue in one kernel: for the rows of group e
    `torch.nn.functional.linear(x, w[e], bias[e])`. Rows of no group are zero. The host never waits for the device.

    Also known as grouped GEMM, m-grouped GEMM.

    - `x`: [rows, K], sorted by group. `w`: [groups, N, K], one matrix per group. Plain or quantized, in any pair of
      formats that `matmul` takes and with its arithmetic. Quantize weights with `quantize(w)`; with blocks of 128 rows
      (128x128) N must be a multiple of 128.
    - `ends`: [groups], int32 or int64 on the device: the end of each group's rows. A group begins at the end of the
      previous one, rounded up to a multiple of `align`: pass `ends=rows.ends, align=rows.align` of a `row_map`.
    - `transpose`: multiply with the transposes, `x @ w[e]`, as the gradient of x does. Quantized weights need their
      column-wise copy for that, except in blocks 128x128 and tensor.
    - `gather`: a `row_map`; row r reads token `gather.slot_of_row[r] // slots`. x is then [tokens, K], and is not
      permuted in memory.
    - `bias`: [groups, N]. `activation`, `glu`, `out_dtype`, `precision` and `engine` are those of `matmul`; with `glu`
      w has 2N rows, the gate's first.
    - `quantize`: return a `QTensor` with a row-wise copy. `out`: write into this tensor or `QTensor`, in its dtype; it
      must not share memory with x and w.

    Gradients flow to x, w and bias; they pass straight through quantized operands. Runs are bitwise reproducible, and
    the bits of a row depend only on the row and its group's matrix, as long as rows / groups stays on one side of 16.

    >>> import torch, weft
    >>> x, w = torch.randn(6, 64), torch.randn(3, 32, 64)
    >>> y = weft.grouped_matmul(x, w, torch.tensor([2, 2, 5]))
    >>> torch.allclose(y[:2], x[:2] @ w[0].T, atol=1e-4), torch.allclose(y[2:5], x[2:5] @ w[2].T, atol=1e-4)
    (True, True)
    >>> y[5].count_nonzero()
    tensor(0)
    """
    check_input("x", x)
    check_input("w", w)
    x, w = autocasted_pair(x, w, precision, out)
    act, gated = check_activation(activation, glu)
    _check_groups(ends, align, x)
    if x.dim() != 2 or w.dim() != 3:
        raise ValueError(
            f"x must be [rows, K] and w [groups, N, K]; got {tuple(x.shape)} and {tuple(w.shape)}"
        )
    if w.device != x.device:
        raise ValueError(f"w must be on {x.device} like x; it is on {w.device}")
    n, k = (w.shape[2], w.shape[1]) if transpose else (w.shape[1], w.shape[2])
    if k != x.shape[1] or w.shape[0] != ends.shape[0]:
        layout = "[groups, K, N]" if transpose else "[groups, N, K]"
        raise ValueError(
            f"x {tuple(x.shape)}, w {tuple(w.shape)} as {layout} and {ends.shape[0]} ends do not fit together: K and "
            "the number of groups must agree"
        )
    if gated and n % 2:
        raise ValueError(f"glu= takes the gate's rows and up's from w, [groups, 2N, K]; got {tuple(w.shape)}")
    slots = 1
    if gather is not None:
        slots = gather.row_of_slot.shape[-1]
        if gather.row_of_slot.numel() != x.shape[0] * slots:
            raise ValueError(
                f"gather= has {gather.row_of_slot.numel() // max(slots, 1)} tokens, but x has {x.shape[0]} rows: pass "
                "x [tokens, K], not permuted"
            )
    if bias is not None:
        check_tensor("bias", bias, FLOATS, x.device, (w.shape[0], n))
    left, x_codes = _operand_of(x, "x", "row", codes_along_rows)
    right, w_codes = _weights_of(w, transpose)
    options = result_options(x, quantize, out_dtype=dtype_of_out(out, out_dtype))
    args = GroupedArgs(
        left, right, x_codes, w_codes, ends, align, None if gather is None else gather.slot_of_row, slots, bias, act,
        gated, precision, engine, options,
    )  # fmt: skip
    check_grouped_engine(args)
    if out is None:
        return grouped_matmul_op(args).result.value(options)
    check_tensor("out", out, FLOATS, x.device)
    result_into(grouped_matmul_op, args, out)
    return out


def grouped_wgrad(
    dy: Tensor,
    x: Tensor,
    ends: Tensor,
    *,
    align: int = 1,
    out: Tensor | None = None,
    accumulate: bool = False,
    out_dtype: torch.dtype | None = None,
    precision: Precision | None = None,
    engine: Engine = "auto",
) -> Tensor:
    """Compute the groups' weight gradients [groups, N, K]: `dy[rows of e].T @ x[rows of e]` for each group e, zeros for
    an empty group. The host never waits for the device.

    - `dy`: [rows, N], `x`: [rows, K], in one dtype or both quantized. A `QTensor` needs its column-wise copy, without
      blocks that span two groups: as `permute` and `glu` return it, or `quantize` if `align` is a multiple of 128.
      Quantized operands must be zero in padding rows.
    - `ends`, `align`: see `grouped_matmul`.
    - `out`: write into this tensor, in its dtype, for instance a weight's fp32 `main_grad`; with `accumulate` add to
      it, in fp32. It must not share memory with dy and x.
    - `out_dtype`: dtype of the result, by default dy's.

    >>> import torch, weft
    >>> dw = weft.grouped_wgrad(torch.ones(6, 32), torch.ones(6, 64), torch.tensor([2, 2, 5]))
    >>> dw.shape, dw[:, 0, 0].tolist()
    (torch.Size([3, 32, 64]), [2.0, 0.0, 3.0])
    """
    check_input("dy", dy)
    check_input("x", x)
    _check_groups(ends, align, dy)
    if dy.dim() != 2 or x.dim() != 2 or dy.shape[0] != x.shape[0] or dy.device != x.device:
        raise ValueError(
            f"dy must be [rows, N] and x [rows, K] on one device; got {tuple(dy.shape)} on {dy.device} and "
            f"{tuple(x.shape)} on {x.device}"
        )
    left, dy_codes = _operand_of(dy, "dy", "column", codes_along_columns)
    right, x_codes = _operand_of(x, "x", "column", codes_along_columns)
    groups = ends.shape[0]
    shape = (groups, dy.shape[1], x.shape[1])
    if out is not None:
        check_tensor("out", out, dtypes_beside(dy.dtype) if accumulate else FLOATS, dy.device, shape)
    elif accumulate:
        raise ValueError("accumulate=True adds to out=…: pass out=")
    args = WgradArgs(
        left, right, dy_codes, x_codes, ends, align, out if accumulate else None, precision, engine,
        result_options(dy, None, out_dtype=dtype_of_out(out, out_dtype)),
    )  # fmt: skip
    check_grouped_engine(args)
    if out is None:
        return grouped_wgrad_op(args).result.y
    result_into(grouped_wgrad_op, args, out, in_place=("addend",))
    return out


def _check_groups(ends: Tensor, align: int, x: Tensor) -> None:
    check_tensor("ends", ends, INTEGERS, x.device)
    if ends.dim() != 1:
        raise ValueError(f"ends must have one element per group, [groups]; got shape {tuple(ends.shape)}")
    if whole("align", align) < 1:
        raise ValueError(f"align must be at least 1; got {align}")
    if x.shape[0] >= 2**31 - 128:
        raise ValueError(f"grouped products support at most 2^31 - 129 rows; got {x.shape[0]}")


def _operand_of(
    x: Tensor, name: str, side: str, select_codes: Callable[[QTensor], Codes | None]
) -> tuple[Tensor, Codes]:
    """Return (tensor, codes) of an operand, as the op takes it."""
    # The compiler cannot trace into a QTensor; the dispatcher takes it apart later.
    if not isinstance(x, QTensor) or torch.compiler.is_compiling():
        return x, PLAIN
    codes = select_codes(x)
    if codes is None:
        raise ValueError(f"{name} has no {side}-wise copy; got {x!r}: quantize it with {side}wise=True")
    return stand_in_for(x), codes


def _weights_of(w: Tensor, transpose: bool) -> tuple[Tensor, Codes]:
    """Return (tensor, codes) of the weights [groups, N, K], as the op takes them."""
    if isinstance(w, QTensor):
        check_weight_blocks(w.spec, w.shape[1], transpose)
        if not (transpose and torch.compiler.is_compiling()):
            select_codes = functools.partial(_codes_of_weights, transpose=transpose)
            left, codes = _operand_of(w, "w", "column" if transpose else "row", select_codes)
            return (left.mT if transpose else left), codes
    return (w.mT if transpose else w), PLAIN


def check_weight_blocks(spec: str, rows: int, transpose: bool) -> None:
    """Raise ValueError if a block of quantized weights with `rows` rows each would span two groups."""
    block = _block_height(spec, transpose)
    if rows % block:
        raise ValueError(
            f"blocks of {block} rows do not divide the {rows} rows of each group's weights, so some would span two "
            "groups: use another format, or pad the weights"
        )


def _block_height(spec: str, transpose: bool) -> int:
    """Return the number of a weight's rows that share a block, in the copy read for it or for its transpose."""
    f = Format.of(spec)
    return max(f.block_rows, f.square, f.group if transpose else 1, 1)
