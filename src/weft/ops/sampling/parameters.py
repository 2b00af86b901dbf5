"""Parameters of requests: one number for all of them, or a number for each on the device."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.checks import check_tensor, real, whole


class Number(NamedTuple):
    """A number of each request."""

    tensor: Tensor | None  # [requests], or None if all have one number
    value: float

    @staticmethod
    def of(
        name: str, value: float | Tensor, device: torch.device, dtype: torch.dtype, least: float
    ) -> Number:
        """Return an argument that is a number, at least `least` and finite, or a tensor of `dtype`."""
        if isinstance(value, Tensor):
            check_tensor(name, value, (dtype,), device)
            return Number(value, 0.0)
        value = real(name, value)
        if not (least <= value and abs(value) < math.inf):
            bound = "" if least == -math.inf else f"at least {least:g} and "
            raise ValueError(f"{name} must be {bound}finite; got {value}")
        return Number(None, value)

    def is_always(self, value: float) -> bool:
        """Return whether all requests are known to have this number."""
        return self.tensor is None and self.value == value

    def column(self, rows: int, like: Tensor) -> Tensor:
        """Return the number of each of `rows` rows as [rows, 1] in the dtype and on the device of `like`, for a
        reference."""
        return _column(self.tensor, self.value, rows, like.dtype, like.device)


class Integer(NamedTuple):
    """An integer of each request, such as a seed."""

    tensor: Tensor | None  # int64 [requests], or None if all have one integer
    value: int

    @staticmethod
    def of(name: str, value: int | Tensor, device: torch.device) -> Integer:
        """Return an argument that is an integer of 64 bits or an int64 tensor."""
        if isinstance(value, Tensor):
            check_tensor(name, value, (torch.int64,), device)
            return Integer(value, 0)
        value = whole(name, value)
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"{name} must fit in 64 bits; got {value}")
        return Integer(None, value)

    def column(self, rows: int, device: torch.device) -> Tensor:
        """Return the integer of each of `rows` rows as int64 [rows, 1], for a reference."""
        return _column(self.tensor, self.value, rows, torch.int64, device)


def _column(
    tensor: Tensor | None, value: float, rows: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    if tensor is None:
        return torch.full((rows, 1), value, dtype=dtype, device=device)
    return tensor.reshape(-1, 1).to(dtype).repeat_interleave(rows // max(tensor.numel(), 1), 0)
