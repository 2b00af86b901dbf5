"""The arguments and outputs of attention."""

from __future__ import annotations

from typing import Generic, Literal

import torch
from torch import Tensor
from typing_extensions import NamedTuple

from ...quant import Codes, Format
from ...runtime import G
from ..common.results import Result, ResultOptions


class Packed(NamedTuple):
    """Where sequences begin and end, on the device."""

    q_starts: Tensor | None  # [sequences + 1], if the tokens of all sequences are packed
    k_starts: Tensor | None
    kv_lengths: Tensor | None  # [sequences]: how many keys each uses


def starts_as_read(starts: Tensor, tokens: int) -> Tensor:
    """Return where packed sequences begin for kernels: the running maximum of starts, clamped to the tokens."""
    return starts.clamp(0, tokens).cummax(0).values


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
    query_codes: Codes  # read in place of query, as those of key are; or none of both: see `coded_heads`
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


EightBits = Literal["int8", "e4m3"]


def element_of(spec: str | None) -> EightBits | None:
    """Return the element of a format whose codes attention multiplies, else None: a scale for each token and head."""
    f = None if spec is None else Format.of(spec)
    if f is None or f.block != "row":
        return None
    return f.element if f.element == "int8" or f.element == "e4m3" else None


def coded_heads(a: AttentionArgs) -> list[tuple[Tensor, Tensor | None]]:
    """Return query and key as kernels read them, each as (x, None), or as its codes in the shape of x and their scales,
    fp32 and of that shape without the last dimension.

    Raise an error if codes are not what their formats say. Whoever calls the op, codes come with their format, for
    query and key alike."""
    given = (("query", a.query, a.query_codes), ("key", a.key, a.key_codes))
    if all(part is None for _, _, codes in given for part in codes):
        if a.values is not None:
            raise ValueError("values in eight bits go with codes of query and key; got none")
        return [(a.query, None), (a.key, None)]
    elements = [element_of(codes.format) for _, _, codes in given]
    if None in elements or elements[0] != elements[1]:
        raise ValueError(
            "attention multiplies codes of query and key in one format, e4m3:row or int8:row; got "
            f"{a.query_codes.format} and {a.key_codes.format}. Give plain tensors: QTensor.dequantize()"
        )
    return [_checked(*each) for each in given]


def _checked(name: str, x: Tensor, codes: Codes) -> tuple[Tensor, Tensor]:
    number = Format.of(codes.format).number
    if codes.global_scale is not None:
        raise ValueError(
            f"{name} in {codes.format} has a scale for each token and head alone; got a global_scale"
        )
    for part, tensor, dtype, count in (
        ("codes", codes.data, number.dtype, x.numel()),
        ("scales", codes.scale, torch.float32, x.numel() // x.shape[-1]),
    ):
        if tensor is None or tensor.dtype != dtype or tensor.numel() != count:
            found = "none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(
                f"{name} {tuple(x.shape)} in {codes.format} has {count} {part} in {dtype}; got {found}"
            )
    return codes.data.view(x.shape), codes.scale.view(x.shape[:-1])


class AttentionOutputs(NamedTuple):
    result: Result  # heads in the layout of the query; quantised, [.., tokens, heads * numbers]
    lse: Tensor  # fp32 [batch, heads, queries], of packed sequences [heads, tokens]
    max: Tensor | None  # fp32 [heads]


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
    needs: AttentionGradients[bool]


class AttentionGradients(NamedTuple, Generic[G]):
    query: G
    key: G  # wanted with that of value
    value: G
    sinks: G
