"""Arguments that reach an op, variants that a call launches, and PyTorch's own check of an op."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft.lab.calls import run
from weft.lab.families import Call
from weft.runtime import Kernel, recording
from weft.runtime.ops import Op


def arguments_of(call: Call, op: str, evaluate: Callable[[Call], Any] = run) -> list[Any]:
    """Return the arguments with which a call, or its backward, reaches an op."""
    seen: list[Any] = []
    original = Op.__call__

    def spy(self: Any, a: Any) -> Any:
        if self.name == op:
            seen.append(a)
        return original(self, a)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Op, "__call__", spy)
        evaluate(call)
    return seen


def opcheck(op: str, a: Any, **options: Any) -> None:
    """Run PyTorch's own check of a registered op with these arguments."""
    registered = weft.catalogue[op]
    leaves = registered.arguments.flatten(a)
    if not registered.differentiable:
        leaves = tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    poisoned = torch.empty_strided

    def zeroed(*args: Any, **kwargs: Any) -> Tensor:
        """Return zeros for autograd's never-written stand-in of a quantized result: poison does not equal itself."""
        output = poisoned(*args, **kwargs)
        if type(output) is Tensor and output.device.type == "cpu":
            torch.tensor([], dtype=torch.uint8).set_(output.untyped_storage()).zero_()
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_strided", zeroed)
        torch.library.opcheck(registered.overload, leaves, **options)


def launched(make: Callable[[], Call]) -> set[Any]:
    """Return the variants of a call, without those that make its inputs."""
    with recording("sm_90"):
        call = make()
    with recording("sm_90") as seen:
        call()
    return set(seen)


def compiled_variants() -> int:
    modules = [m for name, m in sys.modules.items() if name.startswith("weft.ops.")]
    kernels = [v for m in modules for v in vars(m).values() if isinstance(v, Kernel)]
    return sum(len(kernel.variants) for kernel in {id(k): k for k in kernels}.values())
