"""Triton's two names as kernels use them, or stand-ins where Triton is not installed.

`TRITON` says whether kernels can be launched at all. With the stand-ins a module full of kernels still imports, so
that everything else (references, formats, layouts) works on any machine that has PyTorch.
"""

from __future__ import annotations

from typing import Any

__all__ = ["INTERPRETED", "OLDEST_TORCH", "TRITON", "tl", "triton"]

OLDEST_TORCH = (2, 12)  # its wheels name the oldest Triton whose launchers Weft calls


class _Absent:
    """Anything asked of it, called or used as a decorator, gives itself."""

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Absent:
        return self


try:
    import triton
    import triton.language as tl

    INTERPRETED = bool(triton.knobs.runtime.interpret)
    # Weft's launcher compiles kernels; under TRITON_INTERPRET=1 there is nothing to launch.
    TRITON = not INTERPRETED
except (
    ImportError,
    AttributeError,
):  # a Triton before 3.4 has no knobs; `weft doctor` names the versions that work
    triton = tl = _Absent()
    TRITON = INTERPRETED = False
