"""The tiles that attention is cut into: declared for each width of heads and each target, never tuned by a run.

All were compiled; `docs/attention.md` has their registers. A tile has `m` queries and `n` keys.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ...runtime import Capabilities

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


@dataclass(frozen=True)
class AttentionConfig:
    m: int
    n: int
    num_warps: int
    num_stages: int


# Kernel -> widest head that the tiles are for -> target -> (m, n, warps, stages).
_Tiles = dict[str, dict[int, dict[str, tuple[int, int, int, int]]]]

# A warp has 32 rows of a tile of scores or sums on AMD, and most often 16 on sm_80, sm_89 and sm_120. Where there are
# more warps than that, products are computed more than once.
_HALF: _Tiles = {
    "forward": {
        64: {
            "sm_80": (128, 64, 8, 3),
            "sm_90": (128, 128, 8, 2),
            "sm_100": (128, 128, 8, 2),
            "gfx942": (128, 64, 4, 1),
            "gfx950": (128, 64, 4, 1),
            "": (128, 64, 8, 2),
        },
        96: {
            "sm_90": (128, 128, 8, 2),
            "sm_100": (128, 128, 8, 2),
            "gfx942": (128, 64, 8, 1),
            "gfx950": (128, 64, 8, 1),
            "": (128, 64, 8, 1),
        },
        128: {
            "sm_90": (128, 128, 8, 2),
            "sm_100": (128, 128, 8, 2),
            "gfx942": (128, 64, 8, 1),
            "gfx950": (128, 64, 8, 1),
            "": (128, 64, 8, 2),
        },
        192: {
            "sm_90": (128, 64, 8, 2),
            "sm_100": (128, 64, 8, 2),
            "gfx942": (128, 64, 8, 1),
            "gfx950": (128, 64, 8, 1),
            "": (128, 32, 8, 2),
        },
        256: {
            "sm_90": (128, 32, 8, 2),
            "sm_100": (128, 32, 8, 2),
            "gfx942": (128, 32, 4, 1),
            "gfx950": (128, 64, 8, 1),
            "": (64, 32, 8, 2),
        },
    },
    "query": {
        64: {
            "sm_90": (128, 64, 8, 2),
            "sm_100": (128, 64, 8, 2),
            "gfx942": (128, 32, 4, 1),
            "gfx950": (128, 32, 4, 1),
            "": (128, 32, 8, 2),
        },
        96: {
            "sm_90": (128, 64, 8, 2),
            "sm_100": (128, 64, 8, 2),
            "gfx942": (128, 32, 4, 1),
            "gfx950": (128, 32, 4, 1),
            "": (64, 32, 4, 1),
        },
        128: {
            "sm_90": (128, 64, 8, 2),
            "sm_100": (128, 64, 8, 2),
            "gfx942": (128, 32, 4, 1),
            "gfx950": (128, 32, 4, 1),
            "": (64, 64, 8, 2),
        },
        192: {
            "sm_90": (64, 32, 8, 1),
            "sm_100": (64, 32, 8, 1),
            "gfx942": (128, 32, 4, 1),
            "gfx950": (128, 32, 4, 1),
            "": (32, 64, 8, 1),
        },
        256: {
            "sm_90": (64, 32, 8, 1),
            "sm_100": (64, 32, 8, 1),
            "gfx942": (128, 32, 4, 1),
            "gfx950": (128, 32, 4, 1),
            "": (32, 64, 8, 1),
        },
    },
    "key": {
        64: {
            "sm_90": (64, 64, 8, 2),
            "sm_100": (64, 64, 8, 2),
            "gfx942": (32, 128, 4, 1),
            "gfx950": (32, 128, 4, 1),
            "": (32, 128, 8, 2),
        },
        96: {
            "sm_90": (64, 64, 8, 2),
            "sm_100": (64, 64, 8, 2),
            "gfx942": (32, 128, 4, 1),
            "gfx950": (32, 128, 4, 1),
            "": (16, 64, 4, 1),
        },
        128: {
            "sm_89": (64, 64, 8, 1),
            "sm_120": (64, 64, 8, 1),
            "gfx942": (32, 128, 4, 1),
            "gfx950": (32, 128, 4, 1),
            "": (64, 64, 8, 2),
        },
        192: {
            "sm_90": (32, 64, 8, 1),
            "sm_100": (32, 64, 8, 1),
            "gfx942": (32, 128, 4, 1),
            "gfx950": (32, 128, 4, 1),
            "": (16, 32, 4, 1),
        },
        256: {
            "sm_90": (32, 64, 8, 2),
            "sm_100": (32, 64, 8, 1),
            "gfx942": (16, 64, 4, 1),
            "gfx950": (16, 64, 4, 1),
            "": (32, 32, 8, 1),
        },
    },
    "delta": {256: {"": (32, 64, 4, 1)}},  # n is of no account
    "value": {256: {"": (64, 64, 4, 1)}},  # m numbers of n keys
}

# Multiply-adds of fp32 keep both operands in registers; AMD has a matrix unit for them.
_FP32: _Tiles = {
    "forward": {
        192: {"gfx942": (128, 32, 4, 1), "gfx950": (128, 32, 4, 1), "": (32, 32, 8, 1)},
        256: {"gfx942": (64, 16, 4, 1), "gfx950": (64, 16, 4, 1), "": (32, 32, 8, 1)},
    },
    "query": {
        64: {"gfx942": (128, 32, 4, 1), "gfx950": (128, 32, 4, 1), "": (32, 32, 8, 1)},
        128: {
            "sm_90": (32, 32, 4, 1),
            "gfx942": (128, 32, 4, 1),
            "gfx950": (128, 32, 4, 1),
            "": (32, 32, 8, 1),
        },
        192: {"gfx942": (128, 32, 4, 1), "gfx950": (128, 32, 4, 1), "": (32, 32, 8, 1)},
        256: {
            "sm_90": (32, 32, 8, 1),
            "sm_100": (32, 32, 8, 1),
            "gfx942": (64, 16, 4, 1),
            "gfx950": (64, 16, 4, 1),
            "": (32, 16, 8, 1),
        },
    },
    "key": {
        64: {"gfx942": (32, 128, 4, 1), "gfx950": (32, 128, 4, 1), "": (32, 32, 8, 1)},
        128: {
            "sm_100": (16, 32, 8, 1),
            "gfx942": (16, 64, 4, 1),
            "gfx950": (16, 64, 4, 1),
            "": (32, 32, 8, 1),
        },
        192: {
            "sm_80": (32, 32, 4, 1),
            "sm_89": (32, 32, 8, 1),
            "gfx942": (16, 64, 4, 1),
            "gfx950": (16, 64, 4, 1),
            "": (16, 32, 8, 1),
        },
        256: {
            "sm_80": (32, 32, 8, 1),
            "sm_90": (32, 32, 8, 1),
            "sm_100": (32, 32, 8, 1),
            "gfx942": (16, 64, 4, 1),
            "gfx950": (16, 64, 4, 1),
            "": (16, 32, 8, 1),
        },
    },
    "delta": {64: {"": (32, 64, 8, 1)}, 256: {"": (32, 64, 4, 1)}},
}


@functools.lru_cache(maxsize=1024)
def attention_config(kernel: str, qk: int, v: int, itemsize: int, target: Capabilities) -> AttentionConfig:
    """The tile of a kernel: "forward", "value" for codes of values, or "delta", "query" and "key" for the gradients.
    `itemsize` is that of queries."""
    if target.is_cpu:
        return AttentionConfig(64, 64, 4, 1)
    tiles = (_FP32 if itemsize == 4 else _HALF)[kernel]
    table = next(tiles[width] for width in tiles if max(qk, v) <= width)
    config = AttentionConfig(*(table.get(target.target) or table[""]))
    if itemsize == 1 and target.target in ("sm_90", "sm_100", "sm_103") and max(qk, v) > 192:
        return replace(config, m=64)  # sums are added outside of the matrix unit, which takes registers
    if itemsize == 1 and target.target in ("sm_100", "sm_103") and max(qk, v) > 64:
        return replace(config, n=64)  # the scales of codes take registers
    return config
