"""Reference of the router's projection in plain PyTorch."""

from __future__ import annotations

from ...common.rows import compute_dtype, count_rows
from .arguments import RouterLinearArgs, RouterLinearBackwardArgs, RouterLinearGradients, RouterLinearOutputs


def router_linear_backward_reference(a: RouterLinearBackwardArgs) -> RouterLinearGradients:
    x, weight, dtype = a.x, a.weight, compute_dtype(a.x)
    rows = count_rows(x)
    flat, d = x.reshape(rows, x.shape[-1]).to(dtype), a.dy.reshape(rows, weight.shape[0]).to(dtype)
    return RouterLinearGradients(
        (d @ weight.to(dtype)).to(x.dtype).view(x.shape) if a.needs.x else None,
        (d.t() @ flat).to(weight.dtype) if a.needs.weight else None,
        d.sum(0).to(a.bias.dtype) if a.needs.bias and a.bias is not None else None,
    )


def router_linear_reference(a: RouterLinearArgs) -> RouterLinearOutputs:
    """Define the output of the op."""
    dtype = compute_dtype(a.x)
    y = a.x.to(dtype) @ a.weight.to(dtype).t()
    return RouterLinearOutputs(y if a.bias is None else y + a.bias.to(dtype))
