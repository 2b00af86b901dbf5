"""The arguments and outputs of attention over a cache of keys and values."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

PART = 512  # tokens


class DecodeArgs(NamedTuple):
    query: Tensor  # [sequences, queries, heads, numbers]
    k: Tensor  # [pages, page size, heads, numbers]
    v: Tensor | None  # None: values are the first `v_dim` numbers of keys
    k_scale: Tensor | None
    v_scale: Tensor | None
    page_table: Tensor  # [sequences, pages]
    lengths: Tensor  # [sequences]
    sinks: Tensor | None  # [heads]
    scale: float
    softcap: float  # 0 for none
    left: int | None  # of the window
    v_dim: int


class DecodeOutputs(NamedTuple):
    y: Tensor  # [sequences, queries, heads, v_dim]
    lse: Tensor  # fp32 [sequences, queries, heads]
