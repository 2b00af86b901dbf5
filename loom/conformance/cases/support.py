"""What the drivers share."""

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
    """Lets modules of a package be imported without the package's own `__init__`, which wants more than its kernels do.

    What else these modules import from there is given as `contents`.
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
    """The outputs of an operator are no worse than those of the reference in the same dtype, by the reference in
    float64; integers are the same. Both get copies of the inputs."""

    def copies(change: Callable[[Any], Any] = lambda value: value) -> list[Any]:
        return [change(value.clone()) if isinstance(value, torch.Tensor) else value for value in inputs]

    results = [
        outputs(operator(*copies())),
        outputs(reference(*copies())),
        outputs(reference(*copies(exact))),
    ]
    assert len({len(result) for result in results}) == 1, "not as many outputs as the reference has"
    for got, eager, truth in zip(*results, strict=True):
        if got.is_floating_point():
            assert_not_worse(got, truth, eager)
        else:
            assert torch.equal(got, truth.to(got.dtype)), "integers differ"


def gradients(function: Callable[..., Any], count: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A function that gives the outputs of another and the gradients of its first `count` arguments."""

    def both(*inputs: Any) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs[:count]]
        results = outputs(function(*leaves, *inputs[count:]))
        generator = torch.Generator().manual_seed(5)
        # bfloat16 numbers, so that every dtype starts from the same ones.
        upstream = [torch.randn(y.shape, generator=generator).bfloat16().to(y.dtype) for y in results]
        return (*(y.detach() for y in results), *torch.autograd.grad(results, leaves, upstream))

    return both


def allow(*tensors: torch.Tensor) -> None:
    """Tensors that a kernel reaches by addresses that it finds in memory: an emulated GPU has to be told of them."""
    from triton_loom.emulator import scope

    if triton.runtime.driver.active.get_current_target().backend == "cuda":
        scope.current().allow(*tensors)
