"""SGLang: Weft as the backend "plugin" of norms and gated units.

    SGLANG_FORCE_FUSED_OP_BACKEND=plugin python -m sglang.launch_server --model-path MODEL

An op of SGLang has one method per backend; `forward_plugin` is the one for other libraries. SGLang calls this module's
`register` in each of its processes, through the entry point group `sglang.srt.plugins`. That adds the method to the ops
below but selects nothing: without the variable above, or `backend=KernelBackend.PLUGIN` in a call, SGLang computes as
before. Calls for which Weft has no kernel raise a NotImplementedError, and SGLang falls back to the backend it would
have used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import ops
from .common import needs

VERSIONS = ">=0.5.23,<0.6"
try:
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.activation import GeluAndMul, SiluAndMul
    from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
except ImportError as error:
    raise needs("sglang", VERSIONS, error) from error


def register() -> None:
    """Add Weft's `forward_plugin` to SGLang's ops. An op that already has one, from another plugin, keeps it."""
    methods: dict[type[BaseFusedOp], Any] = {
        RMSNorm: rms_norm,
        GemmaRMSNorm: gemma_rms_norm,
        SiluAndMul: silu_and_mul,
        GeluAndMul: gelu_and_mul,
    }
    for op, method in methods.items():
        if "forward_plugin" not in vars(op):
            op.forward_plugin = method


# ---- methods of SGLang's ops ----------------------------------------------------------------------------


def rms_norm(
    self: RMSNorm,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear: torch.nn.Module | None = None,
) -> Tensor | tuple[Tensor, ...]:
    special = self.variance_size_override is not None or self.override_orig_dtype is not None
    if special or self.fp32_residual or post_residual_addition is not None or quant_linear is not None:
        raise NotImplementedError("Weft normalizes full rows, adds one residual, and returns the dtype of x")
    if self._quant_linear is not None:
        raise NotImplementedError("this norm quantizes for the projection after it")
    if residual is not None and residual.dtype != x.dtype:
        raise NotImplementedError("the residual would have the promoted dtype of itself and x")
    if self.cast_x_before_out_mul and self.weight.dtype != x.dtype:
        raise NotImplementedError("the result would have the dtype of the weight")
    return ops.rms_norm(
        x,
        self.weight,
        eps=self.variance_epsilon,
        residual=residual,
        unrounded_sum=residual is not None,
        casting="llama" if self.cast_x_before_out_mul else "fp32",
    )


def gemma_rms_norm(
    self: GemmaRMSNorm,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    if residual is not None and post_residual_addition is not None:
        residual = residual + post_residual_addition
    return ops.rms_norm(x, self.weight, eps=self.variance_epsilon, residual=residual, weight_offset=1.0)


def silu_and_mul(self: SiluAndMul, x: Tensor) -> Tensor:
    return ops.glu(x, act="silu")


def gelu_and_mul(self: GeluAndMul, x: Tensor) -> Tensor:
    return ops.glu(x, act="gelu_tanh" if self.approximate == "tanh" else "gelu")
