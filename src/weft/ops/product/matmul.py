"""Matrix products of plain and quantised operands.

    y = round(act(alpha * (a @ b) + bias) + residual)                    a [..., M, K], b [..., K, N]
    y = round(act(alpha * (a @ gate) + bias_g) * (alpha * (a @ up) + bias_u) + residual)      with b = [gate, up]
    da = round(alpha * dz @ b^T)       db = round(alpha * a^T @ dz)       dbias = round(sum of dz over rows)

where dz is dy, or the gradient of the activation's input z, which the backward computes again in fp32:
dz = round(dy * act'(z)), for a gated unit those of gate and up, in y's dtype.

Products are exact in fp32, sums are fp32, and everything after the sum is fp32 with one rounding to y's dtype. Products
of int8 codes are summed exactly in int32, for up to 130,944 of K at a time, and then in fp32. Scales enter once for
each of their blocks:

- one scale for a row or a tensor multiplies the sum: `sum * scale_a[m] * scale_b[n]`; of two scales of tensors the
  product comes first;
- scales of 128 along K multiply the sum of 128 products: `sum += part * (scale_a[m, k] * scale_b[n, k])` where one of
  them is the same for a whole tile, else `sum += part * scale_a * scale_b`;
- scales of mx and nvfp4 are exact factors of the operands, and nvfp4's scales of both tensors multiply the sum.

A quantised result is made of y rounded to its dtype, so that it has the bytes of `quantize(matmul(...))`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ...quant import PLAIN, Codes, Format, QTensor
from ...quant.qtensor import stand_in
from ...quant.reference import dequantize_copy
from ...quant.straight import stand_in_for
from ...runtime import Backward, Gradients, Op, Present
from ..common.activations import Act, activation_reference
from ..common.checks import FLOATS, check_input, check_tensor, real
from ..common.quantized import register, register_codes
from ..common.results import allocate_result, plain_result, result_into, result_options, result_reference
from ..common.rows import compute_dtype
from ..glu.glu import glu_backward
from ..quantize.quantize import dequantize_codes
from .arguments import MatmulArgs, ProductOutputs, matmul_args
from .checks import formats_multiply, validate_matmul
from .engines import Engine, check_engine
from .operands import Precision, autocasted_pair

# ---- reference ------------------------------------------------------------------------------------------


def reference_numbers(x: Tensor, codes: Codes, dtype: torch.dtype, of_b: bool) -> Tensor:
    """What an operand stands for. Rotated numbers stay so: their products need no undoing."""
    if codes.data is None:
        return x.to(dtype)
    k, rows = x.shape[-2:] if of_b else (x.shape[-1], x.shape[-2])
    values = dequantize_copy(codes, (rows, Format.of(codes.format).length(k)), dtype)
    return values.t() if of_b else values


def finish_reference(z: Tensor, bias: Tensor | None, activation: str | None, gated: bool) -> Tensor:
    """What a bias and an activation make of a product."""
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
    """An operand to be multiplied with a gradient of this dtype: the numbers that its codes stand for."""
    if isinstance(x, QTensor):  # kept by a graph that was traced with it
        found = codes_along_columns(x) if of_b else codes_along_rows(x)
        if found is None:
            return x.dequantize(dtype)
        codes = found
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
        """The definition."""
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
        """What the gradients are made of."""
        return a._replace(residual=None, result=plain_result(a.result.dtype))

    def backward(self, b: Backward) -> Gradients:
        kept: MatmulArgs = b.kept
        dy = b.grads.result.y
        found: Gradients = {}
        # Sums in fp16 are for the forward alone.
        of_products = kept._replace(
            a_codes=PLAIN, b_codes=PLAIN, bias=None, activation=None, gated=False,
            precision=None if kept.precision == "fp16" else kept.precision,
        )  # fmt: skip
        dz = dy
        if kept.activation is not None:
            of_z = of_products._replace(a_codes=kept.a_codes, b_codes=kept.b_codes, bias=kept.bias)
            wide = plain_result(compute_dtype(dy))
            z = matmul_op(of_z._replace(precision=kept.precision, result=wide)).result.y
            layout: Literal["concat", "none"] = "concat" if kept.gated else "none"
            dz = glu_backward(dy, z, act=kept.activation, layout=layout).x.to(dy.dtype)  # type: ignore[arg-type]

        def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
            return matmul_op(of_products._replace(a=left, b=right, result=plain_result(dtype))).result.y

        if b.needs.a:
            values = plain_numbers(kept.b, kept.b_codes, dz.dtype, True)
            found["a"] = product(dz, values.transpose(-1, -2), kept.a.dtype)
        if b.needs.b:
            values = plain_numbers(kept.a, kept.a_codes, dz.dtype, False)
            found["b"] = product(values.transpose(-1, -2), dz, kept.b.dtype)
        if b.needs.bias and kept.bias is not None:
            dims = tuple(range(dz.dim() - 1))
            found["bias"] = dz.sum(dims, dtype=compute_dtype(dz)).to(kept.bias.dtype)
        if b.needs.residual:
            found["residual"] = dy
        return found


matmul_op = MatmulOp()


EITHER_COPY = (
    "tensor",
    "128x128",
)  # blocks whose two copies are transposes of each other: one serves both ways


def codes_along_k(codes: Codes | None, other: Codes | None) -> Codes | None:
    """Return the copy whose scales lie along K; or the other one, transposed, if both have the same codes."""
    if codes is None and other is not None and Format.of(other.format).block in EITHER_COPY:
        return other._replace(data=other.data.t(), scale=other.scale.t())
    return codes


def codes_along_rows(q: QTensor) -> Codes | None:
    """Return the codes of q [rows, K] whose scales lie along K."""
    # A flat view still has the copies of the matrix that it is a view of.
    flat = q.rowwise is not None and q.rowwise.data.shape[0] * q.shape[-1] != q.numel()
    return codes_along_k(None if flat else q.rowwise, q.columnwise)


def codes_along_columns(q: QTensor) -> Codes | None:
    """Return the codes [N, K] of q [K, N] whose scales lie along K."""
    return codes_along_k(q.columnwise, q.rowwise)


register_codes(matmul_op, a=codes_along_rows, b=codes_along_columns)


def _mm(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Any:
    """`torch.mm` of quantized matrices, plus bias. NotImplemented unless both are, in one dtype, each with a copy that
    lies along K, in formats that multiply each other."""
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
    """`torch.addmm` as `torch.nn.functional.linear` calls it."""
    plain = not isinstance(bias, QTensor) and bias.shape == b.shape[1:] and bias.dtype == a.dtype
    return _mm(a, b, bias) if plain and not factors else NotImplemented


register(torch.ops.aten.mm.default, _mm)
register(torch.ops.aten.addmm.default, _addmm)


# ---- public function ------------------------------------------------------------------------------------

_ACTS = get_args(Act)


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
    """`torch.matmul(a, b)` of plain and quantised operands, and what follows it, in one kernel:
    `act(alpha * (a @ b) + bias) + residual`, in fp32 and rounded once.

    a: [..., M, K], b: [..., K, N] in one dtype, bf16, fp16 or fp32, of any strides, with `torch.matmul`'s rules for
    vectors and for leading dimensions. Either may be a `QTensor`; a weight [N, K], quantised or not, goes in as `w.T`.

    | a              | b                              |                                                           |
    |----------------|--------------------------------|-----------------------------------------------------------|
    | plain          | plain, in the same dtype       |                                                           |
    | plain          | any format                     | the codes are decoded on the way: weight-only             |
    | tensor, row    | tensor, row                    | e4m3 and e5m2 in any mix, or int8 with int8               |
    | 1x128          | 128x128, 1x128, tensor, row    | the same elements; also the other way round               |
    | mx             | mx                             | e4m3, e5m2 and e2m1 in any mix                            |
    | nvfp4          | nvfp4, nvfp4_16x16             | also the other way round                                  |

    A quantised a needs its row-wise copy, b its column-wise one: those whose scales lie along K. `w.T` has one if w has
    a row-wise copy. With blocks 128x128 and tensor either copy serves. Two copies that are both rotated along K
    (`Format.hadamard`) are multiplied as they are; one beside one that is not is refused.

    - `bias` [N], `residual` of the result's shape, `alpha` a number or a tensor with one: see above.
    - `activation`: silu, gelu, gelu_tanh, relu, relu2 or sigmoid. `glu`: b has 2N columns, those of a gate and those
      of up, and `y = act(gate) * up`; the bias has 2N numbers too.
    - `out_dtype`: of the result; a's by default.
    - `quantize`, `rowwise`, `columnwise`: the result is a `QTensor` with the bytes of `quantize(matmul(...))`.
    - `out`: write the result into this tensor or `QTensor`, in its dtype; with `accumulate` add it to what `out` has,
      in fp32: the gradients of a weight over several batches. It shares no memory with a and b. Not with autograd.
    - `precision` of fp32 operands: "ieee", the default; "tf32"; "bf16x3", which has the accuracy of fp32 on units that
      multiply bf16. "fp16", for fp16 operands: products are summed in fp16 for up to 128 of K, and then in fp32.
    - `batch_invariant`: the bits of a row do not depend on how many rows there are. Otherwise, up to 64 rows are
      computed in another order.
    - `engine`: who multiplies. "auto" is Weft's kernel, or PyTorch or DeepGEMM where `weft doctor` says so and the call
      has nothing that their products lack; "weft", "torch" and "deep_gemm" insist. `weft.record_engines()` tells what
      ran.

    Gradients flow to a, b, bias and residual; through a quantised operand or result they pass straight. Backward of an
    activation computes its input again. The bits are the same in every run.

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
    left, a_codes = _apart(a_matrix, "a")
    right, b_codes = _apart(b_matrix, "b")
    n = right.shape[-1] // (2 if gated else 1)
    if bias is not None:
        check_tensor("bias", bias, FLOATS, a.device, (right.shape[-1],))
    if out is not None:
        check_tensor("out", out, FLOATS, a.device, shape)
        if not (isinstance(out, QTensor) or out.is_contiguous()):
            raise ValueError(f"out must be contiguous; its strides are {out.stride()}")
    if accumulate:
        if out is None or residual is not None:
            raise ValueError("accumulate=True adds to out=…, in place of a residual")
        if quantize is not None:
            raise ValueError("accumulate=True adds to a plain out; got quantize=")
        residual = out
    if residual is not None:
        check_tensor("residual", residual, FLOATS, a.device, shape)
        residual = residual.reshape(*left.shape[:-1], n)
    factor = 1.0 if alpha is None or isinstance(alpha, Tensor) else real("alpha", alpha)
    scale = alpha if isinstance(alpha, Tensor) else None
    if scale is not None:
        check_tensor("alpha", scale, (torch.float32,), a.device, (), (1,))
        if scale.requires_grad:
            raise ValueError("alpha has no gradient: multiply the result by it instead")
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
    """Return the dtype of a result, which a plain `out` decides; None for the usual one."""
    if out is None or isinstance(out, QTensor):
        return out_dtype
    if out_dtype not in (None, out.dtype):
        raise ValueError(f"out is {out.dtype}, and out_dtype {out_dtype}: leave out_dtype out")
    return out.dtype


def check_activation(activation: str | None, glu: str | None) -> tuple[str | None, bool]:
    """The activation, and whether it is that of a gated unit."""
    if activation is not None and glu is not None:
        raise ValueError("activation= is of the whole result, glu= of the gate: give one of them")
    act = activation if glu is None else glu
    if act is not None and act not in _ACTS:
        raise ValueError(
            f"{'activation' if glu is None else 'glu'} must be one of {', '.join(_ACTS)}; got {act!r}"
        )
    return act, glu is not None


def _matrices(a: Tensor, b: Tensor, gated: bool) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """a as [M, K] or [batch, M, K], b as [K, N] or [batch, K, N], and the shape of the result."""
    k, depth = a.shape[-1], b.shape[-2] if b.dim() > 1 else b.shape[0]
    if k != depth:
        hint = ". A weight [N, K] goes in as w.T" if b.dim() == 2 and b.shape[-1] == k else ""
        raise ValueError(
            f"a {tuple(a.shape)} and b {tuple(b.shape)} cannot be multiplied: {k} and {depth} differ{hint}"
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
            f"a batch of products takes plain tensors; got {a!r} and {b!r}: multiply them one by one, or see "
            "weft.grouped_matmul"
        )
    left = a[None] if a.dim() == 1 else a
    batch = torch.broadcast_shapes(left.shape[:-2], b.shape[:-2])
    count = math.prod(batch)
    left = left.expand(*batch, *left.shape[-2:]).reshape(count, *left.shape[-2:])
    right = b.expand(*batch, *b.shape[-2:]).reshape(count, *b.shape[-2:])
    middle = () if a.dim() == 1 else (a.shape[-2],)
    return left, right, (*batch, *middle, *last)


def _apart(x: Tensor, name: str) -> tuple[Tensor, Codes]:
    """An operand in the form that the op takes."""
    if not isinstance(x, QTensor):
        return x, PLAIN
    # The compiler cannot look inside a QTensor; the dispatcher takes it apart later.
    if torch.compiler.is_compiling():
        return x, PLAIN
    found = (codes_along_rows if name == "a" else codes_along_columns)(x)
    if found is None:
        side, hint = ("row", "") if name == "a" else ("column", "; of a weight [N, K] give w.T")
        raise ValueError(
            f"{name} has no {side}-wise copy, whose scales lie along K: got {x!r}. Quantise it with "
            f"{side}wise=True{hint}"
        )
    return stand_in_for(x), found
