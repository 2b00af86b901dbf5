"""Flaws that no kernel binary may have, whatever it computes."""

from __future__ import annotations

from typing import Any

from weft.lab.compiled import Binary
from weft.runtime import Capabilities


def flaws(target: str, binary: Any) -> list[str]:
    """Return spills, excess shared memory and accumulators read too early, or why there is no binary."""
    if not isinstance(binary, Binary):
        return [str(binary)]
    problems = []
    if binary.stack and binary.spill_bytes:
        problems.append(f"{binary.spill_bytes} bytes spilled at {binary.registers} registers")
    if binary.shared > Capabilities.of(target).shared_bytes:
        problems.append(f"{binary.shared} bytes of shared memory")
    return problems + [f"sums not waited for: {access}" for access in binary.early_accesses]
