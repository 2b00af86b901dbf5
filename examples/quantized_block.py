"""A norm that passes its FP8 result to a matrix product, as in FP8 training, with gradients.

    q = rms_norm(x, gamma) in 1x128 FP8      one kernel writes both copies
    y = q @ weight^T                         reads the row-wise copy, quantized along K
    dweight = dy^T @ q                       reads the column-wise copy, quantized along M

PyTorch computes the products of dequantized tensors, so the example runs anywhere. On a GPU, `weft.layouts` passes the
same bytes to an FP8 matrix product; the last lines show what it would get.

    python examples/quantized_block.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import weft
from weft import QTensor, layouts


class QuantizedLinear(torch.autograd.Function):
    """Autograd function for x @ weight^T with a quantized x."""

    @staticmethod
    def forward(ctx: Any, q: QTensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(q, weight)
        return q.dequantize() @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        q, weight = ctx.saved_tensors
        along_rows = QTensor(q.shape, q.dtype, q.format, None, q.columnwise)  # only its column-wise copy
        return dy @ weight, dy.t() @ along_rows.dequantize()


def relative_error(got: Tensor, exact: Tensor) -> float:
    got, exact = got.detach().double(), exact.detach().double()
    return float((got - exact).norm() / exact.norm())


def main() -> None:
    torch.manual_seed(0)
    tokens, hidden, features = 256, 512, 384
    x = torch.randn(tokens, hidden, requires_grad=True)
    gamma = torch.ones(hidden, requires_grad=True)
    weight = (torch.randn(features, hidden) / hidden**0.5).requires_grad_()
    dy = torch.randn(tokens, features)

    q = weft.rms_norm(x, gamma, quantize="1x128", columnwise=True)
    y = QuantizedLinear.apply(q, weight)
    gradients = torch.autograd.grad(y, (x, gamma, weight), dy)

    exact_y = torch.nn.functional.rms_norm(x, (hidden,), gamma, 1e-6) @ weight.t()
    exact = torch.autograd.grad(exact_y, (x, gamma, weight), dy)

    print(q)
    print(f"y         {relative_error(y, exact_y):.4f} relative error to fp32")
    for name, got, expected in zip(("dx", "dgamma", "dweight"), gradients, exact, strict=True):
        print(f"{name:<9} {relative_error(got, expected):.4f}")

    a = layouts.to_layout(q.rowwise, "deepgemm_sm90", operand="a")
    print(
        f"for DeepGEMM: data {tuple(a.data.shape)} {a.data.dtype}, scale {tuple(a.scale.shape)} {a.scale.stride()}"
    )

    # e4m3 keeps four significant bits: independent errors of up to 1/16, a third of that on average.
    assert relative_error(y, exact_y) < 0.04
    assert relative_error(gradients[2], exact[2]) < 0.04
    # Backward treats rounding as the identity: these two equal the plain norm's.
    assert relative_error(gradients[0], exact[0]) < 1e-5
    assert relative_error(gradients[1], exact[1]) < 1e-5


if __name__ == "__main__":
    main()
