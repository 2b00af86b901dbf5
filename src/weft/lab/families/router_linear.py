"""The router's projection in mixture-of-experts models."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops import router_linear
from ...ops.moe.router_linear.arguments import RouterLinearGradients
from ..chain import chain
from ..family import Family, Moved, Width
from ..problem import Call, Inputs, Workload, run_op
from ..truth import EPS32, Near

# (hidden size, number of experts) of a model.
HIDDEN: dict[str, tuple[int, int]] = {
    "linghe/router": (2048, 256),
    "qwen3-30b-a3b/router": (2048, 128),
    "deepseek-v3/router": (7168, 256),
    "mixtral-8x7b/router": (4096, 8),
    "gpt-oss-120b/router": (2880, 128),
    "odd/200": (200, 60),
    "odd/33": (33, 7),
}

# weight: its dtype. needs: the gradients of x, weight and bias that the backward computes; unread: inputs that it then
# does not read.
OPTIONS: dict[str, dict[str, Any]] = {
    "bf16-weight": {"weight": torch.bfloat16},
    "fp32-weight": {"weight": torch.float32},
    "bias": {"weight": torch.float32, "bias": True},
    "dgrad": {"weight": torch.bfloat16, "needs": (True, False, False), "unread": ("x",)},
    "wgrad": {"weight": torch.bfloat16, "needs": (False, True, False), "unread": ("weight",)},
}
_FORWARD: dict[str, tuple[str, ...]] = {
    "bf16-weight": ("linghe/router", "deepseek-v3/router", "odd/33"),
    "fp32-weight": (
        "linghe/router",
        "qwen3-30b-a3b/router",
        "deepseek-v3/router",
        "mixtral-8x7b/router",
        "odd/200",
    ),
    "bias": ("gpt-oss-120b/router", "odd/33"),
}
_BACKWARD: dict[str, tuple[str, ...]] = {
    "dgrad": ("linghe/router",),
    "wgrad": ("linghe/router",),
    "fp32-weight": ("linghe/router", "deepseek-v3/router", "odd/200"),
    "bias": ("gpt-oss-120b/router", "odd/33"),
}
_SHARED = "tiles of tokens share the weight and tiles of columns the gradient; partial sums are written and read back"


def _tensors(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> dict[str, Any]:
    settings = dict(workload.settings)
    experts, cols = settings["experts"], shape[-1]
    return {
        "x": inputs.activation(*shape),
        "weight": inputs.normal(experts, cols, std=cols**-0.5, dtype=_as(settings["weight"], inputs)),
        "bias": inputs.normal(experts, std=0.1, dtype=torch.float32) if settings.get("bias") else None,
    }


def _as(dtype: torch.dtype, inputs: Inputs) -> torch.dtype:
    """Return the dtype of a weight: `dtype`, or float64 if the inputs have it."""
    return inputs.dtype if inputs.dtype == torch.float64 else dtype


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    return Call(router_linear, _tensors(workload, inputs, shape))


def _build_backward(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    settings = dict(workload.settings)
    kwargs = _tensors(workload, inputs, shape)
    kwargs["dy"] = inputs.normal(*shape[:-1], settings["experts"], dtype=_as(torch.float32, inputs))
    needs = settings.get("needs", (True, True, kwargs["bias"] is not None))
    kwargs["needs"] = RouterLinearGradients(*needs)
    return Call(functools.partial(run_op, "router_linear_backward"), kwargs)


def _workloads(used: dict[str, tuple[str, ...]], rows: tuple[int, ...], *tags: str) -> list[Workload]:
    backward = "backward" in tags
    workloads = []
    for options, names in used.items():
        for name in names:
            cols, experts = HIDDEN[name]
            settings = {"experts": experts, **OPTIONS[options]}
            workloads += [
                Workload(
                    op="router_linear_backward" if backward else "router_linear",
                    name=name,
                    options=options,
                    shape=("rows", cols),
                    rows=count,
                    build=_build_backward if backward else _build,
                    tags=frozenset(tags),
                    settings=tuple(settings.items()),
                    unread=settings.get("unread", ()),
                    rereads=_SHARED,
                    moves=2.57 if backward else 1.25,
                )
                for count in rows
            ]
    return workloads


WORKLOADS: tuple[Workload, ...] = (
    *_workloads(_FORWARD, (8192,), "training"),
    *_workloads({"fp32-weight": ("deepseek-v3/router",)}, (1, 64), "inference"),
    *_workloads(_BACKWARD, (8192,), "training", "backward"),
)


def _flops(workload: Workload) -> int:
    return int(2 * workload.rows * dict(workload.settings)["experts"] * workload.cols)


# ---- truth, used by the tests of the op; the catalogue's check uses the reference -----------------------------

# Sums run in chains of at most 64 terms, then over the chains; roundings are a random walk over both, with a margin.
CHAIN = 64


def _noise(sizes: Tensor, terms: int) -> Tensor:
    """Return the error of an fp32 sum of `terms` elements whose squares sum to sizes^2."""
    chains = -(-terms // CHAIN)
    # Partial sums grow like sqrt(i), so their roundings add up to about sqrt(n/2) times that of the last one.
    steps = math.sqrt(min(terms, CHAIN) / 2 + chains / 2)
    return 4 * EPS32 * (1 + steps) * sizes


def _product(a: Tensor, b: Tensor) -> Near:
    a, b = a.detach().double(), b.detach().double()
    return Near(a @ b, _noise((a.square() @ b.square()).sqrt(), a.shape[-1]))


def router_linear_truth(
    x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor | None = None
) -> dict[str, Near]:
    """Return y, and with an upstream gradient also the gradient of each input."""
    flat = x.detach().reshape(-1, x.shape[-1])
    y = _product(flat, weight.t())
    if bias is not None:
        y = Near(y.truth + bias.detach().double(), y.noise + EPS32 * bias.detach().double().abs())
    shape = (*x.shape[:-1], weight.shape[0])
    expected = {"y": Near(y.truth.view(shape), (y.noise + EPS32 * y.truth.abs()).view(shape))}
    if dy is None:
        return expected
    d = dy.detach().reshape(-1, weight.shape[0])
    dx = _product(d, weight)
    expected["dx"] = Near(dx.truth.view(x.shape), dx.noise.view(x.shape))
    expected["dweight"] = _product(d.t(), flat)
    if bias is not None:
        ones = torch.ones(1, len(d), dtype=torch.float64)
        dbias = _product(ones, d)
        expected["dbias"] = Near(dbias.truth[0], dbias.noise[0])
    return expected


# ---- in plain PyTorch -----------------------------------------------------------------------------------------


def _router_linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.float(), weight.float())


def _router_linear_dgrad(dy: Tensor, weight: Tensor) -> Tensor:
    return (dy @ weight.float()).to(torch.bfloat16)


FAMILY = Family(
    workloads=WORKLOADS,
    flops={"router_linear": _flops, "router_linear_backward": lambda workload: 2 * _flops(workload)},
    chains={
        ("router_linear", "bf16-weight"): chain(_router_linear, "x", "weight"),
        ("router_linear_backward", "dgrad"): chain(_router_linear_dgrad, "dy", "weight"),
    },
    # Products write other tiles than they read.
    moved={
        "router_linear_kernel": Moved({"x_ptr"}, set()),
        "router_linear_dx_kernel": Moved({"dy_ptr"}, set()),
        "router_linear_dweight_kernel": Moved({"x_ptr", "dy_ptr"}, set()),
    },
    # A lane of AMD's matrix units holds four neighbors of a result: 64 bits of bf16.
    widths={"router_linear_dx_kernel": Width("gfx", 64)},
    # With fp32 weights; ptxas allocates at most 168 registers to 128 threads there.
    spills={("router_linear_dx_kernel", "sm_110"): 36},
)
