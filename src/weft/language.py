"""Triton as kernels and their launches use it, or stand-ins where it is not installed.

`TRITON` says whether kernels can be launched at all. Triton itself is imported when something of it is first asked for,
by a module of kernels or by the first call. With the stand-ins such a module still imports, so that everything else
(references, formats, layouts) works on any machine that has PyTorch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import triton
    import triton.language as tl
    from triton import knobs
    from triton.runtime import driver

__all__ = ["INTERPRETED", "OLDEST_TORCH", "TRITON", "driver", "knobs", "tl", "triton"]

OLDEST_TORCH = (2, 12)  # its wheels name the oldest Triton whose launchers Weft calls
OLDEST_TRITON = (3, 4)  # whose knobs Weft reads; `weft doctor` names the versions that work


class _Absent:
    """Anything asked of it, called or used as a decorator, gives itself."""

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Absent:
        return self


def _found() -> tuple[bool, bool]:
    """Whether there is a Triton that Weft can call, and whether it interprets kernels."""
    if "triton" in sys.modules:
        knobs = getattr(sys.modules["triton"], "knobs", None)
        return knobs is not None, knobs is not None and bool(knobs.runtime.interpret)
    if importlib.util.find_spec("triton") is None:
        return False, False
    version = tuple(map(int, re.findall(r"\d+", importlib.metadata.version("triton"))[:2]))
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")
    return version >= OLDEST_TRITON, version >= OLDEST_TRITON and interpreted


_CALLABLE, INTERPRETED = _found()
# Weft's launcher compiles kernels; under TRITON_INTERPRET=1 there is nothing to launch.
TRITON = _CALLABLE and not INTERPRETED


def __getattr__(name: str) -> Any:
    if name not in ("driver", "knobs", "tl", "triton"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    global TRITON
    if not _CALLABLE:
        return _Absent()
    try:
        import triton
        import triton.language as tl
        from triton import knobs
        from triton.runtime import driver
    except ImportError:  # it is there, but not whole: `weft doctor` says what is missing
        TRITON = False
        return _Absent()
    globals().update(triton=triton, tl=tl, knobs=knobs, driver=driver)
    return globals()[name]


def usable() -> bool:
    """Import Triton, if it can be, and return whether kernels can be launched."""
    __getattr__("triton")
    return TRITON
