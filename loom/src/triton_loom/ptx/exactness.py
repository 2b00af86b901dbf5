"""Why a kernel's results may have other bits on another device, as its PTX shows."""

from __future__ import annotations

import re

REASONS = {
    "approximate instructions": re.compile(r"\.approx|\bdiv\.full"),
    "matrix units": re.compile(r"\b(mma|wgmma|tcgen05)\."),
    # Threads exchange numbers, and add some: their order is the layout's.
    "sums over threads": re.compile(
        r"\b(shfl|redux|ld\.shared|ldmatrix)\b.*\b(add|fma)[.\w]*\.f32", re.DOTALL
    ),
}


def reasons(ptx: str) -> frozenset[str]:
    """None: every operation is exactly rounded and in an order that the program gives, so that bits are those of any
    device. Otherwise what they may depend on."""
    return frozenset(reason for reason, shown in REASONS.items() if shown.search(ptx))
