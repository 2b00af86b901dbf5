"""Tile choices of products, declared in `choices.json` for each kind of operands and each target.

The choice depends on the kinds of operands, on whether there are few rows (at most 64, where reading the weights
dominates), and on the target. N and K only decide into how many spans K is cut for few rows, so that a row's bits do
not depend on the number of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...runtime import Capabilities, choice

FEW = 64  # maximum number of rows at which reading b is the bottleneck


@dataclass(frozen=True)
class ProductTile:
    """Tile of a product, `m` x `n` and `k` at a time; a constant of the kernel."""

    m: int
    n: int
    k: int
    k_masked: bool = False  # K is not a multiple of k
    in_squares: bool = True  # no tile of columns spans two 128-row blocks of b
    start_align: int = 1  # every step along K begins at a multiple of it
    scale_slots: bool = False  # scale blocks along K restart at groups; see `common.groups`
    meets: bool = False  # barrier between two products from zero, which Triton omits on sm_100

    def fitting(self, n: int, k: int, gated: bool) -> ProductTile:
        """Return the tile for these sizes."""
        # up's columns follow the gate's, so they start at multiples of 128 only if n is one.
        return replace(
            self, k_masked=k % self.k != 0, in_squares=not gated or n % 128 == 0, start_align=self.k
        )

    def along_groups(self, align: int, scale_slots: bool) -> ProductTile:
        """Return the tile for batches that each sum one group of K, with groups at multiples of `align`."""
        return replace(self, k_masked=True, start_align=math.gcd(align, self.k), scale_slots=scale_slots)


class ProductConfig(NamedTuple):
    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int

    def tile(self, gated: bool, target: Capabilities) -> ProductTile:
        # Triton 3.7 starts the next product in tensor memory while other warps still load the previous sums.
        meets = gated and target.family == "sm_100" and self.m >= 64
        return ProductTile(self.m, self.n, self.k, meets=meets)


LIMITS = {"m": (16, 256), "n": (16, 256), "k": (16, 256), "num_warps": (1, 16), "num_stages": (1, 6)}


@choice("matmul.many", **LIMITS)
def many_config(kind: str, target: Capabilities) -> ProductConfig:
    """Look up the tile of a plain product of many rows; all are declared in `choices.json`."""
    raise LookupError(f"no tile for {kind} products on {target.target}: declare one in choices.json")


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
    """Choose the tile of a product. `few`: few rows, per group if grouped; always set if `invariant`, so that the tile
    does not depend on the number of rows. `odd`: rows are not 16-byte aligned. `follows`: the epilogue, "nothing", an
    "activation" or a "residual"."""
    name = target.family
    decoded = kind.startswith("decoded")
    if few:
        if target.is_cpu:
            return ProductConfig(64, 128, 128, 4, 1)
        m, n, k, warps, stages = 16, 64, 128, 4, 3
        if decoded or kind in ("fp32", "half_blocks"):
            k = 64
            if grouped is not None and decoded and name != "sm_80":
                n = 32  # finding a tile's group takes registers too
        if kind == "half" and target.target == "sm_110":
            k = 64  # its kernels get fewer registers than those of sm_100, and 128 would spill 40 bytes
        if invariant:
            m = 64  # one instruction shape for any number of rows
        return ProductConfig(m, n, k, warps, stages)
    m, n, k, warps, stages = many_config(kind, target.untuned)  # tuning applies to the tile derived from it
    if target.is_cpu:
        return ProductConfig(m, n, k, warps, stages)
    if odd and grouped != "depth":
        # Every element has its own address; the usual tiles would spill kilobytes.
        return ProductConfig(64, 64, 64, 8, 2) if kind.startswith("mx") else ProductConfig(64, 64, 32, 4, 2)
    if follows != "nothing" and not gated and grouped is None:
        # The epilogue's operands need registers beside the sums.
        warps = 8
        if follows == "residual":
            n = min(n, 128)
    if grouped is not None and kind == "half":
        # Groups have few tiles: smaller ones waste less in the last tile, and two programs share a multiprocessor.
        m, n, k, warps = min(m, 128), min(n, 128), min(k, 64), 8
    if grouped is not None and decoded and name in ("sm_80", "sm_89"):
        n, warps = 64, 4
        if grouped == "rows":
            k = 32  # addresses of gathered rows take registers too
    if grouped == "depth" and kind == "mx8" and name == "sm_100":
        warps = 8  # accumulated gradients occupy registers beside the sums
    if gated:
        k = min(k, 128)
        # Two sums per element, in registers unless the matrix unit stores them itself.
        in_registers = name in ("sm_80", "sm_89", "sm_120") or kind.endswith(("_blocks", "_outer"))
        m, n, warps = min(m, 64 if in_registers else 128), min(n, 128), 8
        if kind != "half" and name in ("sm_80", "sm_89"):
            n = 64
        if kind.endswith("_blocks") and name in ("sm_89", "gfx942"):
            k = 64
        if kind == "decoded_1x128":
            # The scales of gate and up, with their addresses, take as many registers as the sums.
            n = 64
            if name in ("sm_80", "sm_89", "sm_120"):
                m, warps = 32, 4
    return ProductConfig(m, n, k, warps, stages)


def spans_of(n: int, k: int, config: ProductConfig, target: Capabilities) -> int:
    """Return the number of spans of K for few rows: enough for two programs per multiprocessor, but at least 512 long,
    since each span's sums are written and read back. It depends only on b and the target."""
    tiles = -(-n // config.n)
    target_spans = 2 * target.multiprocessors // max(tiles, 1)
    return max(1, min(target_spans, k // 512))
