"""Arguments and outputs of attention over a key-value cache."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

PART = 512  # tokens


class DecodeArgs(NamedTuple):
    query: Tensor  # [sequences, queries, heads, dim]
    k: Tensor  # [pages, page size, heads, dim]
    v: Tensor | None  # None: values are the first `v_dim` elements of keys
    k_scale: Tensor | None
    v_scale: Tensor | None
    page_table: Tensor  # [sequences, pages]
    lengths: Tensor  # [sequences]
    sinks: Tensor | None  # [heads]
    scale: float
    softcap: float  # 0 for none
    left: int | None  # keys before its own that a query sees; None for all
    v_dim: int


class DecodeOutputs(NamedTuple):
    y: Tensor  # [sequences, queries, heads, v_dim]
    lse: Tensor  # fp32 [sequences, queries, heads]
