"""Triton as the kernels and launchers use it, with stand-ins where it is not installed.

`TRITON` says whether kernels can be launched at all. Triton itself is imported on first use, by a module of kernels or
by the first call. Kernel modules also import with the stand-ins, so that everything else (references, formats,
layouts) works on any machine with PyTorch.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import triton
    import triton.language as tl
    from triton import knobs
    from triton.runtime import driver

__all__ = ["INTERPRETED", "OLDEST_TORCH", "TRITON", "driver", "knobs", "tl", "traced", "triton"]

OLDEST_TORCH = (2, 12)  # its wheels require the oldest Triton whose launchers Weft can call


class _Absent:
    """Stand-in that returns itself when called, used as a decorator or asked for any attribute."""

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Absent:
        return self


# `tl` in functions that are traced, which recognize it: Triton need not be imported.
traced: Any = _Absent()


def _interpreted() -> bool:
    """Return whether Triton interprets kernels: by its knob if it is already imported, else by its variable."""
    knobs = getattr(sys.modules.get("triton"), "knobs", None)
    if knobs is not None:
        return bool(knobs.runtime.interpret)
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")


# Distributions have other names (ROCm's, for one), so look for the module. Weft's launcher compiles kernels; under
# TRITON_INTERPRET=1 there is nothing to launch.
_INSTALLED = "triton" in sys.modules or importlib.util.find_spec("triton") is not None
INTERPRETED = _INSTALLED and _interpreted()
TRITON = _INSTALLED and not INTERPRETED


def __getattr__(name: str) -> Any:
    if name not in ("driver", "knobs", "tl", "triton"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    global TRITON
    if not _INSTALLED:
        return _Absent()
    try:
        import triton
        import triton.language as tl
        from triton import knobs
        from triton.runtime import driver
    except ImportError:  # broken, or older than 3.4 and without knobs: `weft doctor` says so
        TRITON = False
        return _Absent()
    globals().update(triton=triton, tl=tl, knobs=knobs, driver=driver)
    return globals()[name]


def usable() -> bool:
    """Import Triton if possible and return whether kernels can be launched."""
    __getattr__("triton")
    return TRITON
