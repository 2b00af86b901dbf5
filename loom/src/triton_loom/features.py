"""What a device may ask of the kernels that it runs, as words of its target: `native+sanitize`; and what a process may
ask of its devices, as environment variables."""

from __future__ import annotations

import os

SANITIZE = "sanitize"  # check every access to memory
COUNT = "count"  # count them
EXPLAIN = "explain"  # take the time of every loop nest
HARDWARE_DOT = "hardware_dot"  # dots of bf16 are the processor's own


def switched_on(variable: str) -> bool:
    """Whether an environment variable is 1 rather than 0 or absent."""
    asked = os.environ.get(variable, "0")
    if asked not in ("", "0", "1"):
        raise ValueError(f"{variable} is 0 or 1; got {asked!r}")
    return asked == "1"


def seconds(variable: str, default: float) -> float:
    """Read a number of seconds from an environment variable."""
    asked = os.environ.get(variable) or default
    try:
        return float(asked)
    except ValueError:
        raise ValueError(f"{variable} is a number of seconds, 0 for no limit; got {asked!r}") from None
