"""The tiles that products are cut into: declared for each kind of operands and each target, never tuned by a run.

All were compiled; `docs/products.md` has their registers. A tile is chosen by what the operands are, by whether there
are few rows (at most 64, where reading the weights is all the work), and by the target. N and K decide only how many
spans K is cut into where there are few rows, so that a row's bits do not depend on how many rows there are.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from ...runtime import Capabilities

FEW = 64  # rows up to which a product is bound by reading b


@dataclass(frozen=True)
class ProductTile:
    """How a product is cut: tiles of `m` x `n`, `k` at a time. It is a constant of the kernel."""

    m: int
    n: int
    k: int
    k_masked: bool = False  # K is not a multiple of k
    in_squares: bool = True  # no tile of columns has rows of b of two blocks of 128
    start_align: int = 1  # every step begins at a multiple of it
    scale_slots: bool = False  # blocks of scales along K begin with groups; `common.groups` says where
    meets: bool = False  # warps meet between two products from zero: Triton forgets to, on sm_100

    def fitting(self, n: int, k: int, gated: bool) -> ProductTile:
        """The tile for these sizes."""
        # The columns of up begin where those of the gate end.
        return replace(
            self, k_masked=k % self.k != 0, in_squares=not gated or n % 128 == 0, start_align=self.k
        )

    def along_groups(self, align: int, scale_slots: bool) -> ProductTile:
        """The tile where each batch sums a group of K, and groups begin at multiples of `align`."""
        return replace(self, k_masked=True, start_align=math.gcd(align, self.k), scale_slots=scale_slots)


@dataclass(frozen=True)
class ProductConfig:
    tile: ProductTile
    num_warps: int
    num_stages: int


_DECODED = {"cpu": (128, 128, 128, 4, 1), "sm_80": (64, 64, 64, 8, 2), "": (64, 128, 64, 8, 2)}
# Kind of product -> target -> (m, n, k, warps, stages) for many rows.
_MANY: dict[str, dict[str, tuple[int, int, int, int, int]]] = {
    "half": {
        "sm_80": (128, 128, 32, 4, 3),
        "sm_89": (128, 128, 32, 4, 4),
        "sm_90": (128, 256, 64, 8, 3),
        "sm_100": (128, 256, 64, 8, 3),
        "sm_120": (128, 128, 64, 8, 3),
        "gfx942": (256, 256, 32, 8, 2),
        "gfx950": (256, 256, 32, 8, 2),
        "cpu": (128, 128, 128, 4, 1),
    },
    "fp8": {
        "sm_89": (128, 256, 64, 8, 3),
        "sm_90": (128, 128, 128, 8, 4),
        "sm_100": (128, 256, 128, 8, 3),
        "sm_120": (128, 128, 128, 8, 2),
        "gfx942": (128, 128, 64, 8, 2),
        "gfx950": (256, 128, 128, 8, 2),
        "cpu": (128, 128, 128, 4, 1),
    },
    "fp8_blocks": {
        "sm_89": (64, 128, 128, 8, 2),
        "sm_90": (128, 128, 128, 8, 4),
        "sm_100": (128, 128, 128, 8, 4),
        "sm_120": (64, 128, 128, 4, 3),
        "gfx942": (64, 128, 128, 8, 2),
        "gfx950": (128, 128, 128, 8, 2),
        "cpu": (128, 128, 128, 4, 1),
    },
    "fp8_outer": {
        "sm_90": (128, 128, 128, 8, 4),
        "sm_120": (64, 128, 128, 4, 3),
        "gfx942": (64, 64, 128, 4, 2),
        "gfx950": (128, 128, 128, 8, 2),
        "cpu": (128, 128, 128, 4, 1),
        "": (64, 128, 128, 8, 2),
    },
    "int8": {
        "sm_80": (128, 256, 64, 8, 3),
        "sm_89": (128, 128, 64, 8, 3),
        "sm_90": (128, 128, 128, 8, 3),
        "sm_100": (128, 128, 64, 8, 3),
        "sm_120": (128, 128, 128, 8, 2),
        "gfx942": (256, 256, 64, 8, 2),
        "gfx950": (256, 128, 128, 8, 2),
        "cpu": (128, 128, 128, 4, 1),
    },
    "int8_blocks": {
        "sm_80": (128, 128, 128, 8, 2),
        "sm_89": (128, 128, 128, 8, 2),
        "sm_90": (128, 128, 128, 8, 3),
        "sm_100": (128, 128, 128, 8, 2),
        "sm_120": (64, 128, 128, 4, 2),
        "gfx942": (128, 128, 128, 8, 2),
        "gfx950": (128, 128, 128, 8, 2),
        "cpu": (128, 128, 128, 4, 1),
    },
    "mx8": {
        "sm_100": (128, 128, 128, 4, 3),
        "sm_120": (128, 128, 128, 8, 2),
        "gfx950": (128, 128, 256, 8, 2),
        "cpu": (128, 128, 128, 4, 1),
    },
    "mx4": {
        "sm_100": (128, 128, 256, 4, 3),
        "sm_120": (128, 128, 128, 8, 2),
        "gfx950": (128, 128, 256, 8, 2),
        "cpu": (128, 128, 128, 4, 1),
    },
    "int8_outer": {"cpu": (128, 128, 128, 4, 1), "": (64, 128, 128, 8, 2)},
    "half_blocks": {"cpu": (128, 128, 128, 4, 1), "": (128, 128, 64, 8, 2)},
    "decoded": _DECODED,
    "decoded_1x128": _DECODED,
    "fp32": {"cpu": (128, 128, 128, 4, 1), "": (64, 64, 32, 8, 2)},
}


@functools.lru_cache(maxsize=1024)
def product_config(
    kind: str, few: bool, gated: bool, target: Capabilities, invariant: bool, grouped: str | None = None
) -> ProductConfig:
    """The tiles of a product, of few rows or of many. Those of an `invariant` one are the same for both. With groups
    of rows, `few` is about the rows of a group."""
    table = _MANY[kind]
    name = target.target
    decoded = kind.startswith("decoded")
    if few or invariant:
        m, n, k, warps, stages = (64, 128, 128, 4, 1) if target.is_cpu else (16, 64, 128, 4, 3)
        if (decoded or kind in ("fp32", "half_blocks")) and not target.is_cpu:
            k = 64
            if grouped is not None and decoded and name != "sm_80":
                n = 32  # what finds a tile's group takes registers too
        if invariant and not target.is_cpu:
            m = 64  # the same instruction for any number of rows
    else:
        m, n, k, warps, stages = table.get(name) or table.get("") or table["sm_90"]
        if grouped is not None and kind == "half" and not target.is_cpu:
            # Groups have few tiles: smaller ones waste less of the last, and two programs share a multiprocessor.
            m, n, k, warps = min(m, 128), min(n, 128), min(k, 64), 8
        if grouped is not None and decoded and name in ("sm_80", "sm_89"):
            n, warps = 64, 4
        if grouped == "depth" and kind == "mx8" and name == "sm_100":
            warps = 8  # the gradients so far are read into registers beside the sums
        if gated and not target.is_cpu:
            k = min(k, 128)
            # Two sums for each element: in registers, except where the unit keeps them itself.
            in_registers = name in ("sm_80", "sm_89", "sm_120") or kind.endswith(("_blocks", "_outer"))
            m, n, warps = min(m, 64 if in_registers else 128), min(n, 128), 8
            if kind != "half" and name in ("sm_80", "sm_89"):
                n = 64
            if kind.endswith("_blocks") and name in ("sm_89", "gfx942"):
                k = 64
            if kind == "decoded_1x128":
                # The scales of gate and up, and where they lie, take as many registers as the sums.
                n = 64
                if name in ("sm_80", "sm_89", "sm_120"):
                    m, warps = 32, 4
    # Triton 3.7 begins the next product in tensor memory while other warps still load the sums of the last one.
    meets = gated and name in ("sm_100", "sm_103") and m >= 64
    return ProductConfig(ProductTile(m, n, k, meets=meets), warps, stages)


def spans_of(n: int, k: int, config: ProductConfig, target: Capabilities) -> int:
    """Into how many spans K is cut where there are few rows: enough for two programs on each multiprocessor, but none
    shorter than 512, since the sums of each are written and read back. It depends on b and the target alone."""
    tiles = -(-n // config.tile.n)
    wanted = 2 * target.multiprocessors // max(tiles, 1)
    return max(1, min(wanted, k // 512))
