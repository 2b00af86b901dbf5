"""How a framework with Weft compares to the framework without."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    """What a training step gives: its loss, and the gradients by name."""

    loss: float
    grads: dict[str, Tensor]

    @staticmethod
    def of(loss: Tensor, model: torch.nn.Module) -> Step:
        """Backward from this loss, and what it leaves in the model."""
        loss.backward()
        named = ((name, parameter.grad) for name, parameter in model.named_parameters())
        return Step(loss.item(), {name: grad.double() for name, grad in named if grad is not None})


def apart(found: Step, wanted: Step) -> float:
    """How far the gradients are from those wanted, relative to these, over all parameters together."""
    assert found.grads.keys() == wanted.grads.keys()
    assert wanted.grads
    difference = sum((found.grads[name] - grad).pow(2).sum() for name, grad in wanted.grads.items())
    size = sum(grad.pow(2).sum() for grad in wanted.grads.values())
    return float(torch.as_tensor(difference / size).sqrt())
