"""The kernel that encodes with a scale of the caller's stores it too: no launch, and no copy of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft.runtime import observing
from weft.runtime.ops import seen_through

CALLS: dict[str, Callable[..., Any]] = {
    "quantize": lambda x, scale, **copies: weft.quantize(x, "tensor", scale=scale, **copies),
    "rms_norm": lambda x, scale, **copies: weft.rms_norm(x, quantize="tensor", quant_scale=scale, **copies),
    "layer_norm": lambda x, scale, **copies: weft.layer_norm(
        x, residual=x, quantize="tensor", quant_scale=scale, **copies
    )[0],
    "glu": lambda x, scale, **copies: weft.glu(x, quantize="tensor", quant_scale=scale, **copies),
    "patchify": lambda x, scale, **copies: patches(x, quantize="tensor", quant_scale=scale, **copies),
    "gated_norm": lambda x, scale, **copies: weft.gated_norm(
        x, x, quantize="tensor", quant_scale=scale, **copies
    ),
}


class Operations(TorchDispatchMode):
    """Names of PyTorch's operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


def patches(x: Tensor, **options: Any) -> Any:
    """Cut each head into one patch."""
    return weft.patchify(x.view(-1, 4, 8, 3), (4, 8), **options)


def heads(rows: int) -> Tensor:
    return torch.randn(rows, 2, 96)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 130])
@pytest.mark.parametrize("name", CALLS)
def test_both_copies_have_the_scale(name: str, rows: int, dtype: torch.dtype) -> None:
    scale = torch.tensor([0.013], dtype=dtype)
    for copies in ({}, {"columnwise": True}, {"columnwise": True, "rowwise": False}):
        q = CALLS[name](heads(rows), scale, **copies)
        for copy in (q.rowwise, q.columnwise):
            if copy is not None:
                assert copy.scale.dtype is torch.float32
                assert copy.scale.item() == scale.float().item()


@pytest.mark.parametrize("rows", [0, 1, 70])
def test_scales_of_rows(rows: int) -> None:
    scale = torch.rand(rows, 1) + 0.01
    assert torch.equal(weft.quantize(torch.randn(rows, 96), "row", scale=scale).rowwise.scale, scale)


@pytest.mark.parametrize("name", CALLS)
def test_a_frozen_scale_costs_no_launch(name: str) -> None:
    launches: list[object] = []
    count = observing(lambda launch, *_: launches.append(launch))
    with torch.no_grad(), seen_through(), count, Operations() as operations:
        CALLS[name](heads(40), torch.tensor(0.02))
    assert len(launches) == 1
    assert not [name for name in operations.names if "copy" in name]


def test_codes_of_patches_are_those_of_quantize() -> None:
    x, scale = heads(40), torch.tensor(0.02)
    wanted = weft.quantize(patches(x), "tensor", scale=scale)
    actual = CALLS["patchify"](x, scale)
    assert torch.equal(actual.rowwise.data.view(torch.uint8), wanted.rowwise.data.view(torch.uint8))


def test_a_scale_that_changes_later_leaves_the_codes_alone() -> None:
    scale = torch.tensor(0.02)
    q = CALLS["rms_norm"](heads(9), scale)
    before = q.dequantize()
    scale.fill_(1.0)
    assert torch.equal(q.dequantize(), before)
