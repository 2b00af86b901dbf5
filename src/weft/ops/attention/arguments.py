"""The arguments and outputs of attention."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...quant.qtensor import Codes
from ..common.results import Result, ResultOptions


class Packed(NamedTuple):
    """Where sequences begin and end, on the device."""

    q_starts: Tensor | None  # [sequences + 1], if the tokens of all sequences are packed
    k_starts: Tensor | None
    kv_lengths: Tensor | None  # [sequences]: how many keys each uses


class Mask(NamedTuple):
    """Which keys a query sees: from `left` before its own key to `right` after it; None is without a bound."""

    left: int | None
    right: int | None
    lower_right: bool  # the last query's own key is the last one, else the first query's is the first one

    @property
    def banded(self) -> bool:
        return self.left is not None or self.right is not None


class AttentionArgs(NamedTuple):
    query: Tensor  # heads in `layout`
    key: Tensor
    value: Tensor
    query_codes: (
        Codes  # those of query and key with a scale for each token and head, read in their place; or none
    )
    key_codes: Codes
    values: (
        str | None
    )  # "e4m3" if weights and values are multiplied in it; then there are codes of query and key
    sinks: Tensor | None  # [heads]
    packed: Packed
    mask: Mask
    scale: float
    softcap: float  # 0 for none
    layout: str
    return_max: bool
    engine: str
    result: ResultOptions


class Coded(NamedTuple):
    """Query or key as kernels read it."""

    x: Tensor
    scale: Tensor | None  # fp32, the shape of x without the last dimension, if x is codes

    @staticmethod
    def of(x: Tensor, codes: Codes) -> Coded:
        if codes.data is None or codes.scale is None:
            return Coded(x, None)
        return Coded(codes.data.view(x.shape), codes.scale.view(x.shape[:-1]))


class AttentionOutputs(NamedTuple):
    result: Result  # heads in the layout of the query; quantised, [.., tokens, heads * numbers]
    lse: Tensor  # fp32 [batch, heads, queries], of packed sequences [heads, tokens]
    max: Tensor | None  # fp32 [heads]


class AttentionNeeds(NamedTuple):
    """Which gradients are wanted."""

    query: bool
    key: bool
    sinks: bool


class AttentionBackwardArgs(NamedTuple):
    dy: Tensor  # [batch, queries, heads, numbers], or [tokens, heads, numbers]
    dlse: Tensor | None
    y: Tensor  # as dy
    lse: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    packed: Packed
    mask: Mask
    scale: float
    softcap: float
    layout: str  # of query, key and value, and of their gradients
    engine: str
    needs: AttentionNeeds


class AttentionGradients(NamedTuple):
    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    sinks: Tensor | None
