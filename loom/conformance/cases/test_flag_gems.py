"""Operators of FlagGems against PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flag_gems
import pytest
import torch
import torch.nn.functional as F

from conformance.cases.support import agrees


def matrix() -> torch.Tensor:
    return torch.randn(13, 70)


def positive() -> torch.Tensor:
    return torch.rand(13, 70) + 0.1


def near_one() -> torch.Tensor:
    return 1 + torch.randn(13, 70) / 100


ONE = {
    torch.abs: matrix,
    torch.argmax: matrix,
    torch.argmin: matrix,
    torch.cos: matrix,
    torch.erf: matrix,
    torch.exp: matrix,
    torch.isnan: matrix,
    torch.log: positive,
    torch.mean: matrix,
    torch.neg: matrix,
    torch.prod: near_one,
    torch.reciprocal: positive,
    torch.rsqrt: positive,
    torch.sigmoid: matrix,
    torch.sin: matrix,
    torch.sum: matrix,
    torch.tanh: matrix,
    torch.triu: matrix,
    F.gelu: matrix,
    F.relu: matrix,
    F.silu: matrix,
}
TWO = (torch.add, torch.div, torch.eq, torch.ge, torch.gt, torch.le, torch.lt, torch.mul, torch.ne, torch.sub)
OTHERS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "addmm": (torch.addmm, lambda: (torch.randn(13, 40), matrix(), torch.randn(70, 40))),
    "amax": (lambda x: torch.amax(x, 1), lambda: (matrix(),)),
    "bmm": (torch.bmm, lambda: (torch.randn(3, 20, 33), torch.randn(3, 33, 17))),
    "clamp": (lambda x: torch.clamp(x, -0.5, 0.5), lambda: (matrix(),)),
    "cumsum": (lambda x: torch.cumsum(x, 1), lambda: (matrix(),)),
    "gather": (lambda x, i: torch.gather(x, 1, i), lambda: (matrix(), torch.randint(0, 70, (13, 20)))),
    "index_select": (
        lambda x, i: torch.index_select(x, 0, i),
        lambda: (matrix(), torch.randint(0, 13, (20,))),
    ),
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, (70,), w, b),
        lambda: (matrix(), torch.randn(70), torch.randn(70)),
    ),
    "log_softmax": (lambda x: torch.log_softmax(x, 1), lambda: (matrix(),)),
    "mm": (torch.mm, lambda: (matrix(), torch.randn(70, 40))),
    "mv": (torch.mv, lambda: (matrix(), torch.randn(70))),
    "softmax": (lambda x: torch.softmax(x, 1), lambda: (matrix(),)),
    "var_mean": (lambda x: torch.var_mean(x, 1), lambda: (matrix(),)),
}
CASES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    **{function.__name__: (function, lambda make=make: (make(),)) for function, make in ONE.items()},  # type: ignore[misc]
    **{function.__name__: (function, lambda: (matrix(), matrix())) for function in TWO},
    **OTHERS,
}


@pytest.mark.parametrize("name", CASES)
def test_flag_gems(name: str) -> None:
    function, inputs = CASES[name]

    def gems(*args: Any) -> Any:
        with flag_gems.use_gems():
            return function(*args)

    agrees(gems, function, *inputs())
