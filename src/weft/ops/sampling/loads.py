"""Parameters of requests in kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...language import tl, triton
from .parameters import Integer, Number


class NumberArgument(NamedTuple):
    """A `Number` as kernels read it: row r belongs to request r // inner."""

    ptr: Tensor | None
    inner: int
    value: float

    @staticmethod
    def of(number: Number, rows: int) -> NumberArgument:
        tensor = None if number.tensor is None else number.tensor.contiguous()
        return NumberArgument(tensor, 1 if tensor is None else rows // tensor.numel(), number.value)


class IntegerArgument(NamedTuple):
    """An `Integer` as kernels read it: row r belongs to request r // inner."""

    ptr: Tensor | None
    inner: int
    value: int

    @staticmethod
    def of(integer: Integer, rows: int) -> IntegerArgument:
        tensor = None if integer.tensor is None else integer.tensor.contiguous()
        return IntegerArgument(tensor, 1 if tensor is None else rows // tensor.numel(), integer.value)


@triton.jit
def load_number(number, row):
    """Return the number of a row in fp32."""
    if number.ptr is None:
        return tl.cast(number.value, tl.float32)
    else:
        return tl.load(number.ptr + row // number.inner).to(tl.float32)


@triton.jit
def load_integer(integer, row):
    """Return the integer of a row in int64."""
    if integer.ptr is None:
        return tl.cast(integer.value, tl.int64)
    else:
        return tl.load(integer.ptr + row // integer.inner).to(tl.int64)
