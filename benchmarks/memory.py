"""Resident memory of this process, as counted by Linux."""

from __future__ import annotations

from collections.abc import Callable


def extra_memory(run: Callable[[], object]) -> int:
    """Return the peak of resident bytes while `run` ran, minus those before."""
    before = _status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # reset the peak of the resident size
    run()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    """Return the bytes of a line of /proc/self/status."""
    with open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")
