"""Helpers of the drivers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from triton_loom.testing import assert_not_worse


def bare_package(name: str, **contents: Any) -> None:
    """Make modules of a package importable without its `__init__`, which needs more than its kernels do.

    `contents` are the names that these modules import from the package.
    """
    directory = Path(*name.split("."))
    module = ModuleType(name)
    module.__path__ = [
        str(Path(entry) / directory) for entry in sys.path if (Path(entry) / directory).is_dir()
    ]
    vars(module).update(contents)
    sys.modules[name] = module


def outputs(result: Any) -> tuple[torch.Tensor, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def exact(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def agrees(operator: Callable[..., Any], reference: Callable[..., Any], *inputs: Any) -> None:
    """Assert that an operator's outputs are no worse than the reference's in the same dtype, both compared with the
    reference in float64, and that integers are equal. Both get copies of the inputs."""

    def copies(change: Callable[[Any], Any] = lambda value: value) -> list[Any]:
        return [change(value.clone()) if isinstance(value, torch.Tensor) else value for value in inputs]

    results = [
        outputs(operator(*copies())),
        outputs(reference(*copies())),
        outputs(reference(*copies(exact))),
    ]
    assert len({len(result) for result in results}) == 1, "the number of outputs differs from the reference's"
    for got, eager, truth in zip(*results, strict=True):
        if got.is_floating_point():
            assert_not_worse(got, truth, eager)
        else:
            assert torch.equal(got, truth.to(got.dtype)), "integers differ"


def gradients(function: Callable[..., Any], count: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return a function that returns another's outputs and the gradients of its first `count` arguments."""

    def both(*inputs: Any) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs[:count]]
        results = outputs(function(*leaves, *inputs[count:]))
        generator = torch.Generator().manual_seed(5)
        # Values that bfloat16 represents, so that every dtype has the same upstream gradients.
        upstream = [torch.randn(y.shape, generator=generator).bfloat16().to(y.dtype) for y in results]
        return (*(y.detach() for y in results), *torch.autograd.grad(results, leaves, upstream))

    return both


def allow(*tensors: torch.Tensor) -> None:
    """Tell an emulated GPU about tensors that a kernel reaches through addresses in memory."""
    from triton_loom.emulator import scope

    if triton.runtime.driver.active.get_current_target().backend == "cuda":
        scope.current().allow(*tensors)
