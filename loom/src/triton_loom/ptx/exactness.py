"""Reasons, visible in a kernel's PTX, why its results may have different bits on another device."""

from __future__ import annotations

import re

REASONS = {
    "approximate instructions": re.compile(r"\.approx|\bdiv\.full"),
    "matrix units": re.compile(r"\b(mma|wgmma|tcgen05)\."),
    # Threads exchange values and add them, in an order that depends on the layout.
    "sums over threads": re.compile(
        r"\b(shfl|redux|ld\.shared|ldmatrix)\b.*\b(add|fma)[.\w]*\.f32", re.DOTALL
    ),
}


def reasons(ptx: str) -> frozenset[str]:
    """Return what the bits of results may depend on.

    If the set is empty, every operation is exactly rounded and in program order: any device gives the same bits."""
    return frozenset(reason for reason, shown in REASONS.items() if shown.search(ptx))
