"""Attention on Weft's own kernels, for tests; "auto" would use PyTorch's for bf16 on a CPU."""

from __future__ import annotations

import functools
from typing import Any

import weft


@functools.wraps(weft.attention)
def attend(*args: Any, **kwargs: Any) -> Any:
    return weft.attention(*args, **{"engine": "weft"} | kwargs)
