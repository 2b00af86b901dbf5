"""Workloads of patches: images of vision encoders, and tokens that are merged."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...ops import patchify
from ..chain import chain
from ..family import Compute, Family, Moved
from ..problem import Call, Inputs, Size, Workload, run_op
from ..truth import EPS32, Near, arguments

SHAPES: dict[str, tuple[Size, ...]] = {
    "siglip/224-14": ("rows", 224, 224, 3),
    "qwen2-vl/336-14": ("rows", 3, 336, 336),
    "qwen3-vl/tokens": ("rows", 32, 32, 1152),
    "odd/10": ("rows", 6, 15, 10),
}
_HALF = {"mean": 0.5, "std": 0.5}
_CLIP: dict[str, Any] = {
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "uint8": _HALF,
    "planes": {**_CLIP, "layout": "nchw", "order": "cyx", "merge": 2},
    "floats": {"std": 0.25},
    "plain": {},  # copies of elements
    "1x128": {**_HALF, "quantize": "1x128"},
    "static-both": {**_HALF, "quantize": "tensor", "columnwise": True},
    "mx-both": {**_HALF, "quantize": "mx", "columnwise": True},
    "row": {**_CLIP, "quantize": "row"},
}
_USED: tuple[tuple[str, str, int], ...] = (
    ("siglip/224-14", "uint8", 3),
    ("siglip/224-14", "1x128", 3),
    ("siglip/224-14", "static-both", 3),
    ("qwen2-vl/336-14", "planes", 4),
    ("qwen3-vl/tokens", "plain", 4),
    ("odd/10", "floats", 256),
    ("odd/10", "mx-both", 256),
    ("odd/10", "row", 256),
)
_THROUGH = "patches with a column-wise copy are written in fp32, and then quantized"


def _moves(options: str) -> dict[str, Any]:
    return (
        {"moves": {"static-both": 3.8, "mx-both": 3.7}[options], "rereads": _THROUGH}
        if "both" in options
        else {}
    )


_PATCH = {"siglip/224-14": (14, 14), "qwen2-vl/336-14": (14, 14), "qwen3-vl/tokens": (2, 2), "odd/10": (3, 5)}


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    kwargs: dict[str, Any] = dict(OPTIONS[workload.options])
    height, width = _PATCH[workload.name]
    planes = kwargs.get("layout") == "nchw"
    if shape[3] != workload.cols:  # another size than the workload's own
        height, width, kwargs["merge"] = 1, 1, 1
    if isinstance(kwargs.get("mean"), tuple) and shape[1 if planes else 3] != 3:
        kwargs |= _HALF
    if workload.options == "static-both":
        scale = torch.full((), 1 / 448, dtype=torch.float32, device=inputs.device)
        kwargs["quant_scale"] = scale
    x = inputs.normal(*shape, mean=128.0, std=64.0)
    if workload.options not in ("floats", "plain"):
        x = x.clamp(0, 255).to(torch.uint8)
    return Call(patchify, {"x": x, "patch": (height, width), **kwargs})


def _build_backward(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    b, h, w, c = shape
    height, width = _PATCH[workload.name] if c == workload.cols else (1, 1)
    scale = None if workload.options == "plain" else inputs.normal(c, dtype=torch.float32)
    arguments = {
        "dy": inputs.normal(b, h * w // (height * width), height * width * c),
        "scale": scale,
        "shape": list(shape),
        "dtype": inputs.dtype,
        "planes": False,
        "height": height,
        "width": width,
        "merge": 1,
        "channels_first": False,
    }
    return Call(functools.partial(run_op, "patchify_backward"), arguments)


WORKLOADS: tuple[Workload, ...] = (
    *(
        Workload(
            "patchify",
            name,
            options,
            SHAPES[name],
            rows,
            _build,
            frozenset({"training", "inference"}),
            settings=(("columnwise", True),) if "both" in options else (),
            **_moves(options),
        )
        for name, options, rows in _USED
    ),
    *(
        Workload(
            "patchify_backward",
            name,
            options,
            SHAPES[name],
            rows,
            _build_backward,
            frozenset({"training", "backward"}),
        )
        for name, options, rows in _USED
        if options in ("floats", "plain")
    ),
)


def patchify_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return patches, cut one by one, and the gradient of the image."""
    a = arguments(call)
    x = a["x"].detach().double().requires_grad_()
    image = x if a["layout"] == "nhwc" else x.permute(0, 2, 3, 1)
    b, h, w, c = image.shape
    height, width = a["patch"]
    rescale = a["rescale"] or (1 / 255 if a["x"].dtype is torch.uint8 else 1.0)
    std = torch.tensor(a["std"] or 1.0, dtype=torch.float64).expand(c)
    mean = torch.tensor(a["mean"] or 0.0, dtype=torch.float64).expand(c)
    scale, shift = (rescale / std).float().double(), (-mean / std).float().double()
    y, size = image * scale + shift, (image * scale).abs() + shift.abs()
    m = a["merge"]
    places = [
        (top + i * height, left + j * width)
        for top in range(0, h, m * height)
        for left in range(0, w, m * width)
        for i in range(m)
        for j in range(m)
    ]

    def cut(t: Tensor) -> Tensor:
        patches = [t[:, top : top + height, left : left + width] for top, left in places]
        if a["order"] == "cyx":
            patches = [p.permute(0, 3, 1, 2) for p in patches]
        return torch.stack([p.reshape(b, -1) for p in patches], dim=1)

    rounded = a["mean"] is not None or a["std"] is not None
    result = cut(y)
    expected: dict[str, Near | Tensor] = {
        "y": Near(result.detach(), 2 * rounded * EPS32 * cut(size).detach())
    }
    if "y" in gradients:
        (dx,) = torch.autograd.grad(result, x, gradients["y"].double())
        expected["dx"] = Near(dx, 2 * rounded * EPS32 * dx.abs())
    return expected


def _encoded(call: Call, compute: Compute) -> dict[str, Tensor]:
    """Return the patches in fp32."""
    plain = {n: v for n, v in call.kwargs.items() if n not in ("quantize", "columnwise", "quant_scale")}
    return compute(Call(patchify, {**plain, "out_dtype": torch.float32}))


def _patches(x: Tensor) -> Tensor:
    b, h, w, c = x.shape
    x = ((x.float() / 255 - 0.5) / 0.5).bfloat16()
    return x.view(b, h // 14, 14, w // 14, 14, c).transpose(2, 3).reshape(b, -1, 14 * 14 * c)


FAMILY = Family(
    workloads=WORKLOADS,
    truths={"patchify": patchify_truth},
    encoded={"patchify": _encoded},
    chains={("patchify", "uint8"): chain(_patches, "x")},
    moved={"patchify_kernel": Moved({"image_ptr", "dy_ptr"}, {"image_ptr", "y_ptr"})},
)
