"""The tiles that products are cut into: declared in `choices.json` for each kind of operands and each target.

A tile is chosen by what the operands are, by whether there are few rows (at most 64, where reading the weights is all
the work), and by the target. N and K decide only how many spans K is cut into where there are few rows, so that a row's
bits do not depend on how many rows there are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...runtime import Capabilities, choice

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


class ProductConfig(NamedTuple):
    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int

    def tile(self, gated: bool, target: Capabilities) -> ProductTile:
        # Triton 3.7 begins the next product in tensor memory while other warps still load the sums of the last one.
        meets = gated and target.target in ("sm_100", "sm_103") and self.m >= 64
        return ProductTile(self.m, self.n, self.k, meets=meets)


LIMITS = {"m": (16, 256), "n": (16, 256), "k": (16, 256), "num_warps": (1, 16), "num_stages": (1, 6)}


@choice("matmul.many", **LIMITS)
def many_config(kind: str, target: Capabilities) -> ProductConfig:
    """The tiles of a plain product of many rows. All are in `choices.json`."""
    raise LookupError(f"no tile of {kind} products is declared for {target.target}")


@choice("matmul", **LIMITS)
def product_config(
    kind: str,
    few: bool,
    gated: bool,
    invariant: bool,
    grouped: str | None,
    odd: bool,
    follows: str,
    target: Capabilities,
) -> ProductConfig:
    """The tiles of a product, of few rows or of many. An `invariant` one has `few`, whatever its rows: its tiles are
    the same for all. With groups of rows, `few` is about the rows of a group. The rows of an `odd` one lie at no
    multiples of 16 bytes. What `follows` the sums is "nothing", an "activation" or a "residual" that is added."""
    name = target.target
    decoded = kind.startswith("decoded")
    if few:
        if target.is_cpu:
            return ProductConfig(64, 128, 128, 4, 1)
        m, n, k, warps, stages = 16, 64, 128, 4, 3
        if decoded or kind in ("fp32", "half_blocks"):
            k = 64
            if grouped is not None and decoded and name != "sm_80":
                n = 32  # what finds a tile's group takes registers too
        if invariant:
            m = 64  # the same instruction for any number of rows
        return ProductConfig(m, n, k, warps, stages)
    m, n, k, warps, stages = many_config(kind, target.untuned)  # what is tuned is the tile that comes of it
    if target.is_cpu:
        return ProductConfig(m, n, k, warps, stages)
    if odd and grouped != "depth":
        # Every number has an address of its own: with the tiles of others, kilobytes are spilled.
        return ProductConfig(64, 64, 64, 8, 2) if kind.startswith("mx") else ProductConfig(64, 64, 32, 4, 2)
    if follows != "nothing" and not gated and grouped is None:
        # What is added, or computed of the sums, needs registers beside them.
        warps = 8
        if follows == "residual":
            n = min(n, 128)
    if grouped is not None and kind == "half":
        # Groups have few tiles: smaller ones waste less of the last, and two programs share a multiprocessor.
        m, n, k, warps = min(m, 128), min(n, 128), min(k, 64), 8
    if grouped is not None and decoded and name in ("sm_80", "sm_89"):
        n, warps = 64, 4
        if grouped == "rows":
            k = 32  # the addresses of rows that are gathered take registers, too
    if grouped == "depth" and kind == "mx8" and name == "sm_100":
        warps = 8  # the gradients so far are read into registers beside the sums
    if gated:
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
    return ProductConfig(m, n, k, warps, stages)


def spans_of(n: int, k: int, config: ProductConfig, target: Capabilities) -> int:
    """Into how many spans K is cut where there are few rows: enough for two programs on each multiprocessor, but none
    shorter than 512, since the sums of each are written and read back. It depends on b and the target alone."""
    tiles = -(-n // config.n)
    wanted = 2 * target.multiprocessors // max(tiles, 1)
    return max(1, min(wanted, k // 512))
