"""What no binary of a kernel may have, whatever it computes."""

from __future__ import annotations

from typing import Any

from weft.lab.compiled import Binary
from weft.runtime import Capabilities


def flaws(target: str, binary: Any) -> list[str]:
    """Spills, more shared memory than the target has, and sums read too early; or why there is no binary."""
    if not isinstance(binary, Binary):
        return [str(binary)]
    found = []
    if binary.stack and binary.spill_bytes:
        found.append(f"{binary.spill_bytes} bytes spilled at {binary.registers} registers")
    if binary.shared > Capabilities.of(target).shared_bytes:
        found.append(f"{binary.shared} bytes of shared memory")
    return found + [f"sums not waited for: {access}" for access in binary.early_accesses]
