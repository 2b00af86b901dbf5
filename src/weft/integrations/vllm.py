"""vLLM: Weft as a provider of the ops in `vllm.ir.ops`.

    vllm serve MODEL --kernel-config '{"ir_op_priority": {"rms_norm": ["weft"], "fused_add_rms_norm": ["weft"]}}'

vLLM loads this module's `register` in each of its processes, through the entry point group `vllm.general_plugins`. That
adds the provider "weft" but selects nothing: without the option above vLLM computes as before. Arguments for which
Weft has no kernel go to the next provider of the list, which ends with vLLM's own.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .. import ops
from .common import needs

VERSIONS = ">=0.26,<0.33"
try:
    from vllm.ir import ops as ir
except ImportError as error:
    raise needs("vllm", VERSIONS, error) from error

NAME = "weft"


def register() -> None:
    """Add the provider "weft" to vLLM's ops. Calling it again changes nothing."""
    if NAME not in ir.rms_norm.impls:
        ir.rms_norm.register_impl(NAME, supports_args=takes_rms_norm)(rms_norm)
    if NAME not in ir.fused_add_rms_norm.impls:
        ir.fused_add_rms_norm.register_impl(NAME, supports_args=takes_fused_add_rms_norm)(fused_add_rms_norm)


# ---- providers, with the signatures and names of vLLM's ops ---------------------------------------------


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    return ops.rms_norm(x, weight, eps=epsilon, casting=_casting(x, weight))


def takes_rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    """Return whether Weft has the norm. It normalizes full rows, and vLLM's result is as narrow as a narrower
    weight."""
    is_float = x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return is_float and variance_size is None and (weight is None or weight.dtype in (x.dtype, torch.float32))


def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    return ops.rms_norm(
        x,
        weight,
        eps=epsilon,
        residual=x_residual,
        unrounded_sum=True,
        casting=_casting(x, weight),
    )


def takes_fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    """Return whether Weft has the norm. Its residual has the promoted dtype of x and x_residual, vLLM's has x's."""
    return x_residual.dtype == x.dtype and takes_rms_norm(x, weight, epsilon, variance_size)


def _casting(x: Tensor, weight: Tensor | None) -> Literal["fp32", "llama"]:
    """Return the casting of vLLM, which rounds normalized values to the weight's dtype before it multiplies."""
    return "fp32" if weight is None or weight.dtype != x.dtype else "llama"
