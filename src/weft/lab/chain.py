"""Chains of plain PyTorch that compute the same as an op: what one writes in its place, where that is faster than
the op's reference.

A reference is written to be read and to be right in float64: it loops over experts or sequences, and torch.compile
gets little out of it. Chains are written for torch.compile, in the order of memory in which it fuses most, and use
PyTorch's own fused functions where there are such. Some assume what holds for their workload alone. They stand in the
modules of `families`; `weft bench` times them.
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


def _whole(result: Any) -> Any:
    return result


@dataclass(frozen=True)
class Chain:
    """A function of tensors that computes the results of a call of Weft, or some of them."""

    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    # The part of Weft's result that is compared, in the chain's form.
    view: Callable[[Any], Any] = _whole
    upstream: Tensor | None = None  # with it, the gradients of the function are timed in its place

    def prepared(self, function: Callable[..., Any]) -> Callable[[], Any]:
        """Return the call of `function`, which is the chain's or a compiled one."""
        if self.upstream is None:
            return lambda: function(*self.inputs)
        inputs = [x.detach().requires_grad_() if x.is_floating_point() else x for x in self.inputs]
        leaves = [x for x in inputs if x.requires_grad]
        with torch.enable_grad():
            result = function(*inputs)
        # The graph of one forward is walked again and again.
        return lambda: torch.autograd.grad(result, leaves, self.upstream, retain_graph=True)

    def wanted(self, truth: Callable[[], Any]) -> Callable[[], Any]:
        """Return the call that computes, from Weft's result, the result that the chain must have."""
        return lambda: self.view(truth())


BuildChain = Callable[[Call], Chain]


def chain(function: Callable[..., Any], *names: str, view: Callable[[Any], Any] = _whole) -> BuildChain:
    """Return the builder of a chain whose inputs are the arguments of a call with these names."""
    return lambda call: Chain(function, tensors_of(call, *names), view)


def codes_and_scales(q: QTensor) -> list[Tensor]:
    """Return codes and scales of each copy of a quantized tensor."""
    return [part for copy in (q.rowwise, q.columnwise) if copy is not None for part in copy[:2]]


def tensors_of(call: Call, *names: str) -> tuple[Tensor, ...]:
    """Return arguments of a call by their names."""
    return tuple(call[name] for name in names)
