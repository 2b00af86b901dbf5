"""Multi-tensor reductions and clipping, on the gradients of a model or of one layer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...ops import any_nonfinite, clip_grads_, count_zeros, grad_norm
from ..chain import Chain
from ..family import Family
from ..problem import Call, Inputs, Size, Workload
from ..symbolic.loaded import Loaded
from ..truth import EPS32, Near

STATISTICS: dict[str, Any] = {
    "norm1": lambda tensors: grad_norm(tensors, 1.0),
    "norm2": grad_norm,
    "norminf": lambda tensors: grad_norm(tensors, math.inf),
    "zeros": count_zeros,
    "nonfinite": any_nonfinite,
}


def reduce_all(what: str, **gradients: Tensor) -> Tensor:
    """Compute one statistic of tensors, passed by name so that checks can change the layout of each."""
    result: Tensor = STATISTICS[what](list(gradients.values()))
    return result


def clip_copies(norm: Tensor, max_norm: float, **gradients: Tensor) -> list[Tensor]:
    """Clip copies of the gradients, because a workload must not change its inputs."""
    copies = [torch.empty(g.shape, dtype=g.dtype, device=g.device).copy_(g) for g in gradients.values()]
    clip_grads_(copies, max_norm, norm=norm)
    return copies


def _draw_gradients(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Draw matrices of one shape and dtype; if mixed, also fp32 vectors and an empty tensor.

    A tenth of the elements are zero."""
    settings = dict(workload.settings)
    gradients = [inputs.normal(*shape) for _ in range(settings["tensors"])]
    if settings.get("mixed"):
        gradients[1:1] = [inputs.normal(0, shape[-1]), inputs.normal(shape[-1], dtype=torch.float32)]
        gradients.append(inputs.normal(*shape[:-1], dtype=torch.float32))
    if inputs.device.type != "meta":
        for gradient in gradients:
            gradient.flatten()[::10] = 0.0
    return {f"gradient{number}": gradient for number, gradient in enumerate(gradients)}


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    gradients = _draw_gradients(workload, inputs, shape)
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


# ---- truth ----------------------------------------------------------------------------------------------------

# Relative error of a norm: each lane adds up to 128 elements in sequence, trees and chunks add little, and the errors
# of thousands of lanes partly cancel. Observed: below 1 unit.
ERROR = 4 * EPS32


def statistic(tensors: list[Tensor], what: str) -> Near | Tensor:
    """Return a statistic of all elements of the concatenated tensors."""
    elements = torch.cat([t.detach().flatten().double() for t in tensors])
    if what == "zeros":
        return (elements == 0).sum()
    if what == "nonfinite":
        return (~elements.isfinite()).any()
    if not elements.numel():
        return Near(torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64))
    magnitudes = elements.abs()
    if what == "norminf":
        return Near(magnitudes.max(), torch.zeros((), dtype=torch.float64))
    norm = magnitudes.sum() if what == "norm1" else magnitudes.square().sum().sqrt()
    return Near(norm, ERROR * norm)


def clipped(tensor: Tensor, norm: Tensor, max_norm: float) -> Near:
    """Return a clipped tensor. The coefficient is rounded twice, the product once before the tensor's dtype."""
    coefficient = (max_norm / (norm.double() + 1e-6)).clamp(max=1.0)
    truth = tensor.double() * coefficient
    return Near(truth, 2 * EPS32 * truth.abs())


def _gradients_of(call: Call) -> list[Tensor]:
    return [tensor for name, tensor in call.tensors().items() if name.startswith("gradient")]


def reduce_truth(call: Call, _: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the statistic that a call requests."""
    return {"y": statistic(_gradients_of(call), call["what"])}


def clip_truth(call: Call, _: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return all gradients, clipped."""
    expected = [clipped(t, call["norm"], call["max_norm"]) for t in _gradients_of(call)]
    return {"y" if i == 0 else f"output{i}": near for i, near in enumerate(expected)}


# ---- in plain PyTorch -----------------------------------------------------------------------------------------


def _norm_of_all(*tensors: Tensor) -> Tensor:
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt()


def _zeros_of_all(*tensors: Tensor) -> Tensor:
    return torch.stack([(tensor == 0).sum() for tensor in tensors]).sum()


FAMILY = Family(
    workloads=WORKLOADS,
    truths={"multi_tensor_reduce": reduce_truth, "multi_tensor_clip": clip_truth},
    chains={
        ("multi_tensor_reduce", "norm2"): lambda call: Chain(_norm_of_all, tuple(_gradients_of(call))),
        ("multi_tensor_reduce", "zeros"): lambda call: Chain(_zeros_of_all, tuple(_gradients_of(call))),
    },
    # Addresses and element counts.
    loaded={
        (kernel, "table_ptr"): Loaded(least=0)
        for kernel in ("multi_tensor_reduce_kernel", "multi_tensor_clip_kernel")
    },
)
