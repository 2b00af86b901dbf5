"""What the quantisers must compute: codes and scales are the oracle's (see `ENCODED`), and gradients pass unchanged."""

from __future__ import annotations

import torch
from torch import Tensor
from triton_loom.testing import EPS32

import weft

from .. import oracle
from ..problem import Call
from ..truth import Near


def quantize(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """The amax, and the gradient of y as that of x."""
    exact: dict[str, Near | Tensor] = {"amax": call["x"].detach().abs().amax().float()}
    return exact | {f"d{name}": gradients["y"] for name in ("x",) if "y" in gradients}


def dequantize(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    q = call["q"]
    copy = oracle.Quantized(q.rowwise.data.view(torch.uint8), q.rowwise.scale, q.rowwise.global_scale)
    flat = (q.numel() // q.shape[-1], q.shape[-1])
    exact = oracle.dequantize(copy, block=q.format.block, element=q.format.element, shape=flat).view(q.shape)
    return {"y": Near(exact, 2 * EPS32 * exact.abs())}


def y_and_amax(call: Call) -> list[str]:
    return ["y", "amax"] if call["return_amax"] else ["y"]


TRUTHS = {"quantize": quantize, "dequantize": dequantize}
ENCODED = {"quantize": lambda call: {"y": call["x"]}}
RESULTS = {weft.quantize: y_and_amax}


MOVED = {"_dequantize_kernel": ({"data_ptr"}, {"out_ptr"})}
