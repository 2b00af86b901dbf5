"""The activation xIELU, whose two coefficients are trained.

    p = log(1 + exp(alpha_p))        n = log(1 + exp(alpha_n))
    y = p x^2 + beta x                                x > 0
    y = (beta + n) (exp(x) - 1) - n x                 x <= 0

The gradients of alpha_p and alpha_n are sums over all elements. As a function of rows, the op adds a row's terms while
it computes dx, in fp32 and in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...language import traced as tl
from ..common.checks import FLOATS, check_input, check_tensor
from ..generated.rowwise import rowwise


def _softplus(a):
    return tl.maximum(a, 0.0) + tl.log1p(tl.exp(-tl.abs(a)))


def _below(x):
    """Return exp(x) - 1 where x <= 0, else 0: it could be infinite, and its product with a gradient of 0 is NaN."""
    return tl.expm1(tl.where(x > 0, 0.0, x))


def _gradient(x, alpha_p, alpha_n, beta, dout):
    p, n, power = _softplus(alpha_p), _softplus(alpha_n), _below(x)
    dx = dout * (beta + tl.where(x > 0, 2.0 * p * x, (beta + n) * power))
    dp, dn = tl.where(x > 0, dout * x * x, 0.0), tl.where(x > 0, 0.0, dout * (power - x))
    return dx, dp * tl.sigmoid(alpha_p), dn * tl.sigmoid(alpha_n), 0.0


@rowwise(backward=_gradient)
def _xielu(x, alpha_p, alpha_n, beta):
    p, n = _softplus(alpha_p), _softplus(alpha_n)
    return tl.where(x > 0, (p * x + beta) * x, (beta + n) * _below(x) - n * x)


def xielu(
    x: Tensor, alpha_p: Tensor, alpha_n: Tensor, *, beta: float = 0.5, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Activation whose slope grows above zero and falls to a negative constant below it, both by trained coefficients.

    It is that of Apertus, without the eps of its transformers module, which moves results by up to 1e-6.

    - `x`: [..., N], of any strides.
    - `alpha_p`: one element, the parameter as it is trained: the coefficient of x^2 is its softplus.
    - `alpha_n`: one element, as it is trained: far below zero the slope is minus its softplus.
    - `beta`: the slope at zero.
    - `out_dtype`: dtype of the result; x's by default.

    >>> import torch, weft
    >>> alpha_p, alpha_n = torch.zeros(1), torch.zeros(1)
    >>> weft.xielu(torch.tensor([-1.0, 0.0, 1.0]), alpha_p, alpha_n)
    tensor([-0.0611,  0.0000,  1.1931])
    """
    check_input("x", x, FLOATS)
    for name, alpha in (("alpha_p", alpha_p), ("alpha_n", alpha_n)):
        check_tensor(name, alpha, FLOATS, x.device, (), (1,))
    result: Tensor = _xielu(x, alpha_p.reshape(()), alpha_n.reshape(()), beta, out_dtype=out_dtype)
    return result
