"""Trials of foreign modules: a copy runs on small inputs and leaves no traces."""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class LeftAlone(Exception):
    """Reason a module is not replaced."""


@contextlib.contextmanager
def trial() -> Iterator[None]:
    """Enter a scope for trying modules, without gradients, autocast and warnings; random states are restored
    afterwards."""
    state = random.getstate()
    try:
        with (
            warnings.catch_warnings(),
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            torch.autocast("cpu", enabled=False),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(state)


def probe_of(
    module: nn.Module, training: bool, parameters: dict[str, Tensor], children: dict[str, nn.Module]
) -> nn.Module:
    """Return a copy of a module on the CPU, with the forward of its class, other parameters, and some other children.
    The original, its buffers and its other children are untouched, whatever the forward does."""
    own = {
        name: None if old is None else nn.Parameter(parameters[name], requires_grad=False)
        for name, old in module._parameters.items()
    }
    buffers = {
        name: None if old is None else old.detach().cpu().clone() for name, old in module._buffers.items()
    }
    remaining = {name: child for name, child in module._modules.items() if name not in children}
    # Parameters are shared with the copies: forwards do not write to them, and they may be large.
    shared = {id(p): p for child in remaining.values() if child is not None for p in child.parameters()}
    copies = copy.deepcopy(remaining, shared)
    for module_copy in (inner for child in copies.values() if child is not None for inner in child.modules()):
        for hooks in HOOKS:
            getattr(module_copy, hooks).clear()
    copied = copy.copy(module)
    copied.__dict__ = {
        name: copy.copy(value) if isinstance(value, (list, dict, set)) else value
        for name, value in module.__dict__.items()
        if name != "forward"
    } | {"_parameters": own, "_buffers": buffers, "_modules": copies | children}
    return copied.train(training)


# Attributes of a module with the hooks that run when it is called.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def in_both_modes(run: Callable[[bool], Any]) -> Any:
    """Run a function once in evaluation and twice in training mode, and return the result if it never differs."""
    first, *others = (run(training) for training in (False, True, True))
    for other in others:
        for one, two in zip(_tensors(first), _tensors(other), strict=True):
            if one.dtype != two.dtype or not torch.equal(one.nan_to_num(), two.nan_to_num()):
                raise LeftAlone("it computes something else in training than in evaluation, such as dropout")
    return first


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu", dtype=dtype)


def arguments_of(module: nn.Module) -> list[str]:
    """Return the arguments of a module's forward after the first one."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())
    return [parameter.name for parameter in parameters[2:]]


def check_arguments(module: nn.Module) -> None:
    others = arguments_of(module)
    if others:
        raise LeftAlone(f"its forward takes more than one argument: {', '.join(others)}")


def could_not_be_tried(error: Exception) -> LeftAlone:
    if isinstance(error, LeftAlone):
        return error
    return LeftAlone(f"it could not be tried: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
