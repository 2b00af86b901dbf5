"""The arguments and outputs of the router's product and its backward."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RouterLinearArgs(NamedTuple):
    x: Tensor  # [..., H]
    weight: Tensor  # [E, H]
    bias: Tensor | None  # [E]


class RouterLinearOutputs(NamedTuple):
    y: Tensor  # fp32 [..., E]


class RouterLinearNeeds(NamedTuple):
    """Which gradients are wanted."""

    x: bool
    weight: bool
    bias: bool


class RouterLinearGradients(NamedTuple):
    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class RouterLinearBackwardArgs(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dy: Tensor
    needs: RouterLinearNeeds
