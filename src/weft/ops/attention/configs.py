"""The tiles that attention is cut into: declared in `choices.json` for each width of heads and each target."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from ...runtime import Capabilities, choice

WIDEST = 256  # numbers of a head
VALUE_COLUMNS = (
    16  # the codes of a sequence's values begin at a multiple, so that threads load as many bytes at once
)


@dataclass(frozen=True)
class Width:
    """The numbers of a head, in one or two pieces that are powers of two; `second` is 0 if there is one."""

    numbers: int
    first: int
    second: int

    @staticmethod
    @functools.cache
    def of(numbers: int, least: int = 16) -> Width:
        """No piece is below `least`.

        >>> Width.of(128), Width.of(192), Width.of(72)  # doctest: +NORMALIZE_WHITESPACE
        (Width(numbers=128, first=128, second=0), Width(numbers=192, first=128, second=64),
         Width(numbers=72, first=64, second=16))
        """
        whole = max(least, 1 << (numbers - 1).bit_length())
        if whole <= least or whole == numbers:
            return Width(numbers, whole, 0)
        rest = max(least, 1 << (numbers - whole // 2 - 1).bit_length())
        return Width(numbers, whole // 2, rest) if rest < whole // 2 else Width(numbers, whole, 0)


@dataclass(frozen=True)
class AttentionTile:
    """What the code of a kernel is made for. It is a constant of the kernel."""

    m: int
    n: int
    qk: Width
    v: Width
    banded: bool  # queries do not see all keys of their sequence
    capped: bool
    align: int  # widths and strides are multiples of it


class AttentionConfig(NamedTuple):
    """A tile has `m` queries and `n` keys."""

    m: int
    n: int
    num_warps: int
    num_stages: int


@choice("attention", m=(16, 256), n=(16, 256), num_warps=(1, 16), num_stages=(1, 5))
def attention_config(kernel: str, qk: int, v: int, itemsize: int, target: Capabilities) -> AttentionConfig:
    """The tile of a kernel: "forward", "value" for codes of values, or "delta", "query" and "key" for the gradients.
    `itemsize` is that of queries. All are in `choices.json`, by the widest head that they are for."""
    raise LookupError(
        f"no tile of {kernel} is declared for heads of {qk} and {v} numbers of {itemsize} bytes"
    )
