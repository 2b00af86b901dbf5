"""Triton as kernels and their launches use it, or stand-ins where it is not installed.

`TRITON` says whether kernels can be launched at all. Triton itself is imported when something of it is first asked for,
by a module of kernels or by the first call. With the stand-ins such a module still imports, so that everything else
(references, formats, layouts) works on any machine that has PyTorch.
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

__all__ = ["INTERPRETED", "OLDEST_TORCH", "TRITON", "driver", "knobs", "tl", "triton"]

OLDEST_TORCH = (2, 12)  # its wheels name the oldest Triton whose launchers Weft calls


class _Absent:
    """Anything asked of it, called or used as a decorator, gives itself."""

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Absent:
        return self


def _interpreted() -> bool:
    """Whether Triton interprets kernels: by its knob where it is imported already, else by its variable."""
    knobs = getattr(sys.modules.get("triton"), "knobs", None)
    if knobs is not None:
        return bool(knobs.runtime.interpret)
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")


# The package may have another name, as ROCm's has, so the module is looked for. Weft's launcher compiles kernels; under
# TRITON_INTERPRET=1 there is nothing to launch.
_THERE = "triton" in sys.modules or importlib.util.find_spec("triton") is not None
INTERPRETED = _THERE and _interpreted()
TRITON = _THERE and not INTERPRETED


def __getattr__(name: str) -> Any:
    if name not in ("driver", "knobs", "tl", "triton"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    global TRITON
    if not _THERE:
        return _Absent()
    try:
        import triton
        import triton.language as tl
        from triton import knobs
        from triton.runtime import driver
    except ImportError:  # it is broken, or older than 3.4 and without knobs: `weft doctor` says so
        TRITON = False
        return _Absent()
    globals().update(triton=triton, tl=tl, knobs=knobs, driver=driver)
    return globals()[name]


def usable() -> bool:
    """Import Triton, if it can be, and return whether kernels can be launched."""
    __getattr__("triton")
    return TRITON
