"""Arguments and outputs of the router's projection and its backward."""

from __future__ import annotations

from typing import Generic

from torch import Tensor
from typing_extensions import NamedTuple

from ....runtime import G


class RouterLinearArgs(NamedTuple):
    x: Tensor  # [..., H]
    weight: Tensor  # [E, H]
    bias: Tensor | None  # [E]


class RouterLinearOutputs(NamedTuple):
    y: Tensor  # fp32 [..., E]


class RouterLinearGradients(NamedTuple, Generic[G]):
    x: G
    weight: G
    bias: G


class RouterLinearBackwardArgs(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dy: Tensor
    needs: RouterLinearGradients[bool]
