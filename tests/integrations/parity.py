"""Comparison of a framework with Weft to the framework without."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    """Result of a training step: its loss, and the gradients by name."""

    loss: float
    grads: dict[str, Tensor]

    @staticmethod
    def of(loss: Tensor, model: torch.nn.Module) -> Step:
        """Run backward from this loss and collect what it leaves in the model."""
        loss.backward()
        named = ((name, parameter.grad) for name, parameter in model.named_parameters())
        return Step(loss.item(), {name: grad.double() for name, grad in named if grad is not None})


def gradient_distance(actual: Step, expected: Step) -> float:
    """Return the distance of the gradients from the expected ones, relative to these, over all parameters together."""
    assert actual.grads.keys() == expected.grads.keys()
    assert expected.grads
    difference = sum((actual.grads[name] - grad).pow(2).sum() for name, grad in expected.grads.items())
    size = sum(grad.pow(2).sum() for grad in expected.grads.values())
    return float(torch.as_tensor(difference / size).sqrt())
