"""Workloads of the statistics of many tensors: the gradients of a model, or of a layer of it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...ops import any_nonfinite, clip_grads_, count_zeros, grad_norm
from ..problem import Call, Inputs, Size, Workload

STATISTICS: dict[str, Any] = {
    "norm1": lambda tensors: grad_norm(tensors, 1.0),
    "norm2": grad_norm,
    "norminf": lambda tensors: grad_norm(tensors, math.inf),
    "zeros": count_zeros,
    "nonfinite": any_nonfinite,
}


def reduce_all(what: str, **gradients: Tensor) -> Tensor:
    """One statistic of tensors, which are arguments by name so that checks can change the layout of each."""
    result: Tensor = STATISTICS[what](list(gradients.values()))
    return result


def clip_copies(norm: Tensor, max_norm: float, **gradients: Tensor) -> list[Tensor]:
    """Clip copies of the gradients, since a call of a workload must not change its inputs."""
    copies = [torch.empty(g.shape, dtype=g.dtype, device=g.device).copy_(g) for g in gradients.values()]
    clip_grads_(copies, max_norm, norm=norm)
    return copies


def _gradients(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Matrices of one shape and dtype; if mixed, also vectors in fp32 and a tensor without elements. A tenth of the
    numbers are zero."""
    settings = dict(workload.settings)
    made = [inputs.normal(*shape) for _ in range(settings["tensors"])]
    if settings.get("mixed"):
        made[1:1] = [inputs.normal(0, shape[-1]), inputs.normal(shape[-1], dtype=torch.float32)]
        made.append(inputs.normal(*shape[:-1], dtype=torch.float32))
    if inputs.device.type != "meta":
        for gradient in made:
            gradient.flatten()[::10] = 0.0
    return {f"gradient{number}": gradient for number, gradient in enumerate(made)}


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    gradients = _gradients(workload, inputs, shape)
    if workload.op == "multi_tensor_reduce":
        return Call(reduce_all, {"what": dict(workload.settings)["what"], **gradients})
    norm = inputs.normal(1, mean=5.0, std=0.1, dtype=torch.float32)
    return Call(clip_copies, {"norm": norm, "max_norm": 1.0, **gradients})


# Shape, rows, dtype, tensors, mixed.
_LISTS: dict[str, tuple[tuple[Size, ...], int, torch.dtype, int, bool]] = {
    "linghe/gradients": (("rows", 8192), 4096, torch.float32, 32, False),
    "llama3-8b/attention": (("rows", 4096), 4096, torch.bfloat16, 4, True),
    "odd/33": (("rows", 33), 4096, torch.bfloat16, 3, True),
}

_USED = {
    "linghe/gradients": ("norm2", "zeros"),
    "llama3-8b/attention": ("clip",),
    "odd/33": ("norm1", "norminf", "nonfinite", "clip"),
}

WORKLOADS: tuple[Workload, ...] = tuple(
    Workload(
        op="multi_tensor_clip" if what == "clip" else "multi_tensor_reduce",
        name=name,
        options=what,
        shape=shape,
        rows=rows,
        build=_build,
        dtype=dtype,
        settings=(("tensors", tensors), ("mixed", mixed), ("what", what)),
    )
    for name, (shape, rows, dtype, tensors, mixed) in _LISTS.items()
    for what in _USED[name]
)
