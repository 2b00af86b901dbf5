"""Features that a device requests of its kernels, and the environment variables that request them.

They are words of the device's target: `native+sanitize`.
"""

from __future__ import annotations

import os

SANITIZE = "sanitize"  # check every memory access
COUNT = "count"  # count the accesses
EXPLAIN = "explain"  # time every loop nest
HARDWARE_DOT = "hardware_dot"  # bf16 dots use the processor's matrix instructions


def switched_on(variable: str) -> bool:
    """Return whether an environment variable is 1, rather than 0 or absent."""
    value = os.environ.get(variable, "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"{variable} must be 0 or 1; got {value!r}")
    return value == "1"


def seconds(variable: str, default: float) -> float:
    """Read a number of seconds from an environment variable."""
    value = os.environ.get(variable) or default
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{variable} must be a number of seconds, 0 for no limit; got {value!r}") from None
