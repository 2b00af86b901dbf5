"""vLLM: Weft as a provider of the ops in `vllm.ir.ops`.

    vllm serve MODEL --kernel-config '{"ir_op_priority": {"rms_norm": ["weft"], "fused_add_rms_norm": ["weft"]}}'

vLLM loads this module's `register` in each of its processes, by the entry point group `vllm.general_plugins`. That adds
the provider "weft" and chooses nothing: without the option above vLLM computes as before. Arguments that Weft has no
kernel for go to the next provider of the list, which vLLM ends with its own.
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


# ---- providers, with the signatures and the names of vLLM's ops -----------------------------------------


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    return ops.rms_norm(x, weight, eps=epsilon, casting=_casting(x, weight))


def takes_rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    """Weft normalises whole rows. Where the weight is narrower than x, vLLM's result is as narrow."""
    known = x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return known and variance_size is None and (weight is None or weight.dtype in (x.dtype, torch.float32))


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
    """Weft returns a residual of the dtype that x and x_residual promote to, and vLLM one of x's."""
    return x_residual.dtype == x.dtype and takes_rms_norm(x, weight, epsilon, variance_size)


def _casting(x: Tensor, weight: Tensor | None) -> Literal["fp32", "llama"]:
    """vLLM rounds what it normalised to the dtype of the weight, and then multiplies."""
    return "fp32" if weight is None or weight.dtype != x.dtype else "llama"
