"""The resident memory of this process, as Linux counts it."""

from __future__ import annotations

from collections.abc import Callable


def extra_memory(run: Callable[[], object]) -> int:
    """How many bytes more than before were resident at the highest, while `run` ran."""
    before = _status("VmRSS")
    with open("/proc/self/clear_refs", "w") as mark:
        mark.write("5")  # the mark of the highest resident size begins anew
    run()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    """Bytes of a line of /proc/self/status."""
    with open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")
