"""Tiles of the attention kernels, declared in `choices.json` for each head width and target."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from ...runtime import Capabilities, choice

WIDEST = 256  # elements of a head
GROUP = 32  # elements of a head that share a scale of an mx format
# Codes of values of each sequence start at a multiple of this many columns: in e4m3 the bytes that a thread loads at
# once, in int8 the keys that share a scale. Tiles of keys divide the latter.
VALUE_COLUMNS = {"e4m3": 16, "int8": 64}


@dataclass(frozen=True)
class Width:
    """Head dimension, split into one or two power-of-two pieces; `second` is 0 if there is one."""

    dim: int
    first: int
    second: int

    @staticmethod
    @functools.cache
    def of(dim: int, min_piece: int = 16) -> Width:
        """Split a head dimension into pieces of at least `min_piece` elements.

        >>> Width.of(128), Width.of(192), Width.of(72)  # doctest: +NORMALIZE_WHITESPACE
        (Width(dim=128, first=128, second=0), Width(dim=192, first=128, second=64),
         Width(dim=72, first=64, second=16))
        """
        padded = max(min_piece, 1 << (dim - 1).bit_length())
        if padded <= min_piece or padded == dim:
            return Width(dim, padded, 0)
        rest = max(min_piece, 1 << (dim - padded // 2 - 1).bit_length())
        return Width(dim, padded // 2, rest) if rest < padded // 2 else Width(dim, padded, 0)

    @property
    def groups(self) -> Width:
        """Split of the scales of a head in mx: one for every GROUP elements.

        >>> Width.of(80, 32).groups
        Width(dim=3, first=2, second=1)
        """
        return Width(-(-self.dim // GROUP), self.first // GROUP, self.second // GROUP)


@dataclass(frozen=True)
class PairForm:
    """Layout of a tensor of pairs of queries and keys."""

    step: int  # stride of keys: 1, or 0 if it is the same for all of them
    align: int  # divides the number of keys and all other strides


@dataclass(frozen=True)
class AttentionTile:
    """Compile-time constant of an attention kernel."""

    m: int
    n: int
    qk: Width
    v: Width
    banded: bool  # some queries do not see all keys of their sequence
    capped: bool
    limited: bool  # queries have bounds of their own
    align: int  # divides all widths and strides
    values: str | None = None  # element in which weights and values are multiplied, or None: as they are
    groups: Width | None = None  # scales of a head, if each covers GROUP elements
    mask: PairForm | None = None
    bias: PairForm | None = None
    dbias: PairForm | None = None
    sloped: bool = False  # scores have ALiBi


@dataclass(frozen=True)
class BlocksTile:
    """Compile-time constant of the kernel that lists visited blocks, for a kernel with this tile."""

    m: int
    n: int
    banded: bool
    limited: bool
    mask: PairForm


class AttentionConfig(NamedTuple):
    """Tile of `m` queries by `n` keys, and its launch options."""

    m: int
    n: int
    num_warps: int
    num_stages: int


@choice("attention", m=(16, 256), n=(16, 256), num_warps=(1, 16), num_stages=(1, 5))
def attention_config(kernel: str, qk: int, v: int, itemsize: int, target: Capabilities) -> AttentionConfig:
    """Return the tile of a kernel: "forward", "value" (encodes values), or "delta", "query" and "key" (gradients).
    "forward_int8" multiplies values in int8, "forward_mx" scores in mxfp8; "forward_mx_e4m3" and "forward_mx_int8" also
    multiply values in that element.

    `itemsize` is the queries'. `choices.json` declares all tiles, each up to a widest head."""
    raise LookupError(
        f"choices.json declares no {kernel} tile for heads of {qk} and {v} elements of {itemsize} bytes"
    )
