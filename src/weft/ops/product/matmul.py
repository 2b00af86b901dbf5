"""Matrix products of plain and quantized operands.

    y = round(act(alpha * (a @ b) + bias) + residual)                    a [..., M, K], b [..., K, N]
    y = round(act(alpha * (a @ gate) + bias_g) * (alpha * (a @ up) + bias_u) + residual)      with b = [gate, up]
    da = round(alpha * dz @ b^T)       db = round(alpha * a^T @ dz)       dbias = round(sum of dz over rows)

where dz is dy, or with an activation the gradient of its input z, which the backward recomputes in fp32:
dz = round(dy * act'(z)), for a gated unit the gradients of gate and up, in y's dtype.

Products are exact in fp32, sums are fp32, and everything after the sum is fp32 with one rounding to y's dtype. Products
of int8 codes are summed exactly in int32, up to 130,944 of K at a time, and then in fp32. Scales are applied once per
block:

- row and tensor scales multiply the sum: `sum * scale_a[m] * scale_b[n]`; two tensor scales are multiplied with each
  other first;
- scales of 128 along K multiply the sum of 128 products: `sum += part * (scale_a[m, k] * scale_b[n, k])` if one of
  them is constant over a tile, else `sum += part * scale_a * scale_b`;
- mx and nvfp4 scales are exact factors of the operands, and nvfp4's two global scales multiply the sum.

A quantized result is computed from y rounded to its dtype, so it has the bytes of `quantize(matmul(...))`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from ...quant import PLAIN, Codes, Format, QTensor
from ...quant.qtensor import stand_in
from ...quant.reference import dequantize_copy
from ...quant.straight import stand_in_for
from ...runtime import Backward, Gradients, Op, Present
from ..common.activations import ACTIVATIONS, Act, activation_reference
from ..common.checks import FLOATS, check_input, check_tensor, dtypes_beside, real
from ..common.into import result_into
from ..common.quantized import register, register_codes
from ..common.results import allocate_result, plain_result, result_options, result_reference
from ..common.rows import compute_dtype
from ..glu.glu import glu_backward
from ..quantize.quantize import dequantize_codes
from .arguments import MatmulArgs, ProductOutputs, matmul_args
from .checks import formats_multiply, validate_matmul
from .engines import Engine, check_engine
from .operands import Precision, autocasted_pair

# ---- reference ------------------------------------------------------------------------------------------


def reference_numbers(x: Tensor, codes: Codes, dtype: torch.dtype, of_b: bool) -> Tensor:
    """Return an operand's values. Rotated values stay rotated, because rotations cancel in the product."""
    if codes.data is None:
        return x.to(dtype)
    k, rows = x.shape[-2:] if of_b else (x.shape[-1], x.shape[-2])
    values = dequantize_copy(codes, (rows, Format.of(codes.format).length(k)), dtype)
    return values.t() if of_b else values


def finish_reference(z: Tensor, bias: Tensor | None, activation: str | None, gated: bool) -> Tensor:
    """Apply bias, activation and gate to a product."""
    if bias is not None:
        z = z + bias.to(z.dtype)
    up = None
    if gated:
        z, up = z.chunk(2, -1)
    if activation is not None:
        z, _ = activation_reference(z, activation)
    return z if up is None else z * up


# ---- registration ---------------------------------------------------------------------------------------


def plain_numbers(x: Tensor, codes: Codes, dtype: torch.dtype, of_b: bool) -> Tensor:
    """Return an operand dequantized to `dtype`, to be multiplied with a gradient of that dtype."""
    if isinstance(x, QTensor):  # saved by a graph that was traced with a QTensor
        q_codes = codes_along_columns(x) if of_b else codes_along_rows(x)
        if q_codes is None:
            return x.dequantize(dtype)
        codes = q_codes
    if codes.data is None:
        return x.to(dtype)
    values = dequantize_codes(codes, x.shape[-2 if of_b else -1], dtype)
    return values.t() if of_b else values


class MatmulOp(Op[MatmulArgs, ProductOutputs], name="matmul", variants=64):
    def validate(self, a: MatmulArgs) -> None:
        validate_matmul(a)

    def allocate(self, a: MatmulArgs) -> ProductOutputs:
        n = a.b.shape[-1] // (2 if a.gated else 1)
        return ProductOutputs(allocate_result(a.result, a.a, (*a.a.shape[:-1], n)))

    def present(self, a: MatmulArgs) -> Present:
        return (a.result.present(),)

    @cached_property
    def launch(self) -> Callable[[ProductOutputs, MatmulArgs], None]:
        from .launch import launch_matmul

        return launch_matmul

    def reference(self, a: MatmulArgs) -> ProductOutputs:
        """Compute the product in plain PyTorch."""
        dtype = compute_dtype(a.a)
        y = reference_numbers(a.a, a.a_codes, dtype, False) @ reference_numbers(a.b, a.b_codes, dtype, True)
        if a.factor != 1.0:
            y = y * a.factor
        if a.alpha is not None:
            y = y * a.alpha.to(dtype)
        y = finish_reference(y, a.bias, a.activation, a.gated)
        if a.residual is not None:
            y = y + a.residual.to(dtype)
        shape = tuple(y.shape)
        rounded = y if a.result.format is None else y.to(a.result.dtype)
        flat = rounded.reshape(math.prod(shape[:-1]), shape[-1])
        return ProductOutputs(result_reference(a.result, flat, shape, a.a, input_dtype=a.result.dtype))

    def keep(self, a: MatmulArgs, o: ProductOutputs) -> MatmulArgs:
        """Save what backward reads."""
        return a._replace(residual=None, result=plain_result(a.result.dtype))

    def backward(self, b: Backward) -> Gradients:
        saved: MatmulArgs = b.kept
        dy = b.grads.result.y
        gradients: Gradients = {}
        # fp16 sums are for the forward only.
        product_args = saved._replace(
            a_codes=PLAIN, b_codes=PLAIN, bias=None, activation=None, gated=False,
            precision=None if saved.precision == "fp16" else saved.precision,
        )  # fmt: skip
        dz = dy
        if saved.activation is not None:
            z_args = product_args._replace(a_codes=saved.a_codes, b_codes=saved.b_codes, bias=saved.bias)
            z_options = plain_result(compute_dtype(dy))
            z = matmul_op(z_args._replace(precision=saved.precision, result=z_options)).result.y
            layout: Literal["concat", "none"] = "concat" if saved.gated else "none"
            dz = glu_backward(dy, z, act=saved.activation, layout=layout).x.to(dy.dtype)  # type: ignore[arg-type]

        def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
            return matmul_op(product_args._replace(a=left, b=right, result=plain_result(dtype))).result.y

        if b.needs.a:
            values = plain_numbers(saved.b, saved.b_codes, dz.dtype, True)
            gradients["a"] = product(dz, values.transpose(-1, -2), saved.a.dtype)
        if b.needs.b:
            values = plain_numbers(saved.a, saved.a_codes, dz.dtype, False)
            gradients["b"] = product(values.transpose(-1, -2), dz, saved.b.dtype)
        if b.needs.bias and saved.bias is not None:
            dims = tuple(range(dz.dim() - 1))
            gradients["bias"] = dz.sum(dims, dtype=compute_dtype(dz)).to(saved.bias.dtype)
        if b.needs.residual:
            gradients["residual"] = dy
        return gradients


matmul_op = MatmulOp()


EITHER_COPY = (
    "tensor",
    "128x128",
)  # blocks whose copies are transposes of each other, so that one serves both ways


def codes_along_k(codes: Codes | None, other: Codes | None) -> Codes | None:
    """Return the copy whose scales lie along K, or the other copy transposed if both hold the same codes."""
    if codes is None and other is not None and Format.of(other.format).block in EITHER_COPY:
        return other._replace(data=other.data.t(), scale=other.scale.t())
    return codes


def codes_along_rows(q: QTensor) -> Codes | None:
    """Return the codes of q [rows, K] whose scales lie along K."""
    # A flat view still holds the copies of the matrix it views.
    flat = q.rowwise is not None and q.rowwise.data.shape[0] * q.shape[-1] != q.numel()
    return codes_along_k(None if flat else q.rowwise, q.columnwise)


def codes_along_columns(q: QTensor) -> Codes | None:
    """Return the codes [N, K] of q [K, N] whose scales lie along K."""
    return codes_along_k(q.columnwise, q.rowwise)


register_codes(matmul_op, a=codes_along_rows, b=codes_along_columns)


def _mm(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Any:
    """Run `torch.mm` plus bias on codes. Return NotImplemented unless both matrices are quantized, in one dtype, with
    copies along K whose formats a product supports."""
    if not (isinstance(a, QTensor) and isinstance(b, QTensor)) or a.dtype != b.dtype:
        return NotImplemented
    left, right = codes_along_rows(a), codes_along_columns(b)
    if left is None or right is None or a.dtype not in FLOATS[:3]:
        return NotImplemented
    if not formats_multiply(a.dtype, left.format, b.dtype, right.format):
        return NotImplemented
    args = matmul_args(
        stand_in(a), stand_in(b), plain_result(a.dtype), a_codes=left, b_codes=right, bias=bias
    )
    return matmul_op(args).result.y


def _addmm(bias: Tensor, a: Tensor, b: Tensor, **factors: Any) -> Any:
    """Run `torch.addmm` on codes, as `torch.nn.functional.linear` calls it."""
    plain = not isinstance(bias, QTensor) and bias.shape == b.shape[1:] and bias.dtype == a.dtype
    return _mm(a, b, bias) if plain and not factors else NotImplemented


register(torch.ops.aten.mm.default, _mm)
register(torch.ops.aten.addmm.default, _addmm)


# ---- public function ------------------------------------------------------------------------------------


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: Act | None = None,
    glu: Act | None = None,
    residual: Tensor | None = None,
    alpha: float | Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    quantize: Format | str | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    out: Tensor | None = None,
    accumulate: bool = False,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    engine: Engine = "auto",
) -> Tensor:
    """Multiply plain or quantized operands like `torch.matmul(a, b)` and apply the epilogue in one kernel:
    `act(alpha * (a @ b) + bias) + residual`, in fp32 and rounded once.

    Also known as FP8 GEMM, blockwise GEMM, scaled_mm.

    a, b: [..., M, K] and [..., K, N] in one dtype, bf16, fp16 or fp32, with any strides and `torch.matmul`'s rules for
    vectors and leading dimensions. Either may be a `QTensor`; pass a weight [N, K], quantized or not, as `w.T`.

    | a              | b                              |                                                           |
    |----------------|--------------------------------|-----------------------------------------------------------|
    | plain          | plain, in the same dtype       |                                                           |
    | plain          | any format                     | codes are decoded in the kernel: weight-only              |
    | tensor, row    | tensor, row                    | any mix of e4m3 and e5m2, or int8 with int8               |
    | 1x128          | 128x128, 1x128, tensor, row    | as above; operands may be swapped                         |
    | mx             | mx                             | any mix of e4m3, e5m2 and e2m1                            |
    | nvfp4          | nvfp4, nvfp4_16x16             | operands may be swapped                                   |

    A quantized a needs its row-wise copy and b its column-wise copy, whose scales lie along K. `w.T` has one if w has a
    row-wise copy. In blocks 128x128 and tensor either copy works. If one operand is rotated along K
    (`Format.hadamard`), both must be; they are multiplied without undoing the rotation.

    - `bias` [N], `residual` of the result's shape, `alpha` a number or a tensor with one element: see above.
    - `activation`: an `act` of `weft.glu`. `glu`: another; b has 2N columns, the gate's first, then up's, and
      `y = act(gate) * up`; the bias has 2N elements too.
    - `out_dtype`: dtype of the result; a's by default.
    - `quantize`, `rowwise`, `columnwise`: return a `QTensor` with the bytes of `quantize(matmul(...))`.
    - `out`: write the result into this tensor or `QTensor`, in its dtype; with `accumulate` add it to `out` in fp32, as
      for weight gradients over several batches. It must not share memory with a and b. Not differentiable.
    - `precision` of fp32 operands: "ieee", the default; "tf32"; "bf16x3", which reaches fp32 accuracy on bf16 units.
      "fp16", for fp16 operands: products are summed in fp16 for up to 128 of K, and then in fp32.
    - `batch_invariant`: the bits of a row do not depend on the number of rows. Otherwise, products of up to 64 rows sum
      in another order.
    - `engine`: "auto" runs Weft's kernel, or PyTorch or DeepGEMM where `weft doctor` says so and they support the call;
      "weft", "torch" and "deep_gemm" force one. `weft.record_engines()` records what ran.

    Gradients flow to a, b, bias and residual; they pass straight through a quantized operand or result. Backward of an
    activation recomputes its input. Runs are bitwise reproducible.

    >>> import torch, weft
    >>> x, w = torch.randn(8, 256, dtype=torch.bfloat16), torch.randn(512, 256, dtype=torch.bfloat16)
    >>> weft.matmul(x, w.T, activation="silu").shape
    torch.Size([8, 512])
    >>> xq, wq = weft.quantize(x, "1x128"), weft.quantize(w, "128x128")
    >>> y = weft.matmul(xq, wq.T)
    >>> y.shape, y.dtype
    (torch.Size([8, 512]), torch.bfloat16)
    """
    for name, x in (("a", a), ("b", b)):
        check_input(name, x)
    a, b = autocasted_pair(a, b, precision, out)
    if b.device != a.device:
        raise ValueError(f"b must be on {a.device} like a; it is on {b.device}")
    act, gated = check_activation(activation, glu)
    a_matrix, b_matrix, shape = _matrices(a, b, gated)
    left, a_codes = _tensor_and_codes(a_matrix, "a")
    right, b_codes = _tensor_and_codes(b_matrix, "b")
    n = right.shape[-1] // (2 if gated else 1)
    if bias is not None:
        check_tensor("bias", bias, FLOATS, a.device, (right.shape[-1],))
    if out is not None:
        check_tensor("out", out, FLOATS, a.device, shape)
        if not (isinstance(out, QTensor) or out.is_contiguous()):
            raise ValueError(f"out must be contiguous; its strides are {out.stride()}")
    if accumulate:
        if out is None or residual is not None:
            raise ValueError(
                "accumulate=True adds to out=… and cannot be combined with residual=: pass out= alone"
            )
        if quantize is not None:
            raise ValueError("accumulate=True needs an unquantized out: leave out quantize=")
        residual = out
    if residual is not None:
        check_tensor(
            "out" if accumulate else "residual", residual, dtypes_beside(left.dtype), a.device, shape
        )
        residual = residual.reshape(*left.shape[:-1], n)
    factor = 1.0 if alpha is None or isinstance(alpha, Tensor) else real("alpha", alpha)
    scale = alpha if isinstance(alpha, Tensor) else None
    if scale is not None:
        check_tensor("alpha", scale, (torch.float32,), a.device, (), (1,))
        if scale.requires_grad:
            raise ValueError("alpha is not differentiable: multiply the result by it instead")
    options = result_options(
        left, quantize, rowwise=rowwise, columnwise=columnwise, out_dtype=dtype_of_out(out, out_dtype)
    )
    args = MatmulArgs(
        left, right, a_codes, b_codes, bias, residual, scale, factor, act, gated, precision,
        bool(batch_invariant), engine, options,
    )  # fmt: skip
    check_engine(args)
    if out is None:
        result = matmul_op(args).result
        y = result.value(options)
        return y if y.shape == shape else y.view(shape)
    flat = out if out.shape == (*left.shape[:-1], n) else out.view(*left.shape[:-1], n)
    result_into(matmul_op, args, flat, in_place=("residual",))
    return out


def dtype_of_out(out: Tensor | None, out_dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the result's dtype, set by a plain `out` or by `out_dtype`; None for the default."""
    if out is None or isinstance(out, QTensor):
        return out_dtype
    if out_dtype not in (None, out.dtype):
        raise ValueError(f"out is {out.dtype}, but out_dtype is {out_dtype}: leave out_dtype out")
    return out.dtype


def check_activation(activation: str | None, glu: str | None) -> tuple[str | None, bool]:
    """Return the activation, and whether it belongs to a gated unit."""
    if activation is not None and glu is not None:
        raise ValueError("activation= applies to the whole result, glu= to the gate: give one of them")
    act = activation if glu is None else glu
    if act is not None and act not in ACTIVATIONS:
        raise ValueError(
            f"{'activation' if glu is None else 'glu'} must be one of {', '.join(ACTIVATIONS)}; got {act!r}"
        )
    return act, glu is not None


def _matrices(a: Tensor, b: Tensor, gated: bool) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Return a as [M, K] or [batch, M, K], b as [K, N] or [batch, K, N], and the shape of the result."""
    k, depth = a.shape[-1], b.shape[-2] if b.dim() > 1 else b.shape[0]
    if k != depth:
        hint = ". Pass a weight [N, K] as w.T" if b.dim() == 2 and b.shape[-1] == k else ""
        raise ValueError(
            f"a {tuple(a.shape)} and b {tuple(b.shape)} cannot be multiplied: K is {k} in a and {depth} in b{hint}"
        )
    columns = b.shape[-1] if b.dim() > 1 else 1
    if gated and (columns % 2 or b.dim() < 2):
        raise ValueError(f"glu= takes the gate's columns and up's from b, [..., K, 2N]; got {tuple(b.shape)}")
    n = columns // 2 if gated else columns
    last = () if b.dim() == 1 else (n,)
    if b.dim() <= 2:
        right = b[:, None] if b.dim() == 1 else b
        left = a if a.dim() == 2 else a.reshape(math.prod(a.shape[:-1]), k)
        return left, right, (*a.shape[:-1], *last)
    if isinstance(a, QTensor) or isinstance(b, QTensor):
        raise ValueError(
            f"batched products do not take QTensors; got {a!r} and {b!r}: multiply the matrices one by one, or use "
            "weft.grouped_matmul"
        )
    left = a[None] if a.dim() == 1 else a
    batch = torch.broadcast_shapes(left.shape[:-2], b.shape[:-2])
    count = math.prod(batch)
    left = left.expand(*batch, *left.shape[-2:]).reshape(count, *left.shape[-2:])
    right = b.expand(*batch, *b.shape[-2:]).reshape(count, *b.shape[-2:])
    middle = () if a.dim() == 1 else (a.shape[-2],)
    return left, right, (*batch, *middle, *last)


def _tensor_and_codes(x: Tensor, name: str) -> tuple[Tensor, Codes]:
    """Return (tensor, codes) of an operand, as the op takes it."""
    if not isinstance(x, QTensor):
        return x, PLAIN
    # The compiler cannot trace into a QTensor; the dispatcher takes it apart later.
    if torch.compiler.is_compiling():
        return x, PLAIN
    codes = (codes_along_rows if name == "a" else codes_along_columns)(x)
    if codes is None:
        side, hint = ("row", "") if name == "a" else ("column", "; pass a weight [N, K] as w.T")
        raise ValueError(
            f"{name} has no {side}-wise copy, whose scales lie along K; got {x!r}: quantize it with {side}wise=True"
            f"{hint}"
        )
    return stand_in_for(x), codes
