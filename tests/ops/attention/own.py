"""Weft's own attention, for tests of its kernels: "auto" would leave calls in bf16 on a CPU to PyTorch."""

from __future__ import annotations

import functools
from typing import Any

import weft


@functools.wraps(weft.attention)
def attend(*args: Any, **kwargs: Any) -> Any:
    return weft.attention(*args, **{"engine": "weft"} | kwargs)
