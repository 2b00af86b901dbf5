"""Chains of plain PyTorch that compute what an op computes, for ops whose reference is slower than such a chain.

References are written to be readable and right in float64: they loop over experts or sequences, and torch.compile gains
little on them. Chains are written for torch.compile, in the memory order in which it fuses most, and use PyTorch's own
fused functions where they exist. Some assume what holds for their workload alone. They are defined in the modules of
`families`; `weft bench` times them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..quant import QTensor
from .problem import Call

EPS = 1e-6  # of the norms in chains


def _identity(result: Any) -> Any:
    return result


@dataclass(frozen=True)
class Chain:
    """A function of tensors that computes the results of a Weft call, or some of them."""

    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    # Selects the compared part of Weft's result, in the chain's form.
    view: Callable[[Any], Any] = _identity
    upstream: Tensor | None = None  # if set, the function's gradients are timed instead of the function

    def prepared(self, function: Callable[..., Any]) -> Callable[[], Any]:
        """Return a call of `function`, which is the chain's own or its compiled form."""
        if self.upstream is None:
            return lambda: function(*self.inputs)
        inputs = [x.detach().requires_grad_() if x.is_floating_point() else x for x in self.inputs]
        leaves = [x for x in inputs if x.requires_grad]
        with torch.enable_grad():
            result = function(*inputs)
        # Every timed backward walks the graph of this one forward.
        return lambda: torch.autograd.grad(result, leaves, self.upstream, retain_graph=True)

    def wanted(self, truth: Callable[[], Any]) -> Callable[[], Any]:
        """Return a call that computes the result expected of the chain from Weft's `truth`."""
        return lambda: self.view(truth())


BuildChain = Callable[[Call], Chain]


def chain(function: Callable[..., Any], *names: str, view: Callable[[Any], Any] = _identity) -> BuildChain:
    """Return the builder of a chain whose inputs are the named arguments of a call."""
    return lambda call: Chain(function, tensors_of(call, *names), view)


def codes_and_scales(q: QTensor) -> list[Tensor]:
    """Return the codes and scales of each copy of a quantized tensor."""
    return [part for copy in (q.rowwise, q.columnwise) if copy is not None for part in copy[:2]]


def tensors_of(call: Call, *names: str) -> tuple[Tensor, ...]:
    """Return the named arguments of a call."""
    return tuple(call[name] for name in names)
