"""Arguments and outputs of attention."""

from __future__ import annotations

from typing import Generic, Literal

import torch
from torch import Tensor
from typing_extensions import NamedTuple

from ...quant import Codes, Format
from ...runtime import G
from ..common.results import Result, ResultOptions


class Packed(NamedTuple):
    """Bounds of packed sequences, and of the keys that sequences and queries see, on the device."""

    q_starts: Tensor | None  # [sequences + 1], if the tokens of all sequences are packed
    k_starts: Tensor | None
    kv_lengths: Tensor | None  # [sequences]: number of keys that each uses
    prefix_lengths: Tensor | None = None  # [sequences]: number of first tokens that see each other
    kv_limits: Tensor | None = (
        None  # [batch, queries] or [tokens]: number of first keys that each query may see
    )

    @property
    def limited(self) -> bool:
        """Whether the keys that a query sees are not only those of a band."""
        return self.prefix_lengths is not None or self.kv_limits is not None


def starts_as_read(starts: Tensor, tokens: int) -> Tensor:
    """Return the starts of packed sequences as kernels read them: their running maximum, clamped to the tokens."""
    return starts.clamp(0, tokens).cummax(0).values


class Mask(NamedTuple):
    """Band of keys that a query sees, from `left` before its own key to `right` after it; None means no bound."""

    left: int | None
    right: int | None
    lower_right: bool  # align the last query with the last key, else the first query with the first key

    @property
    def banded(self) -> bool:
        return self.left is not None or self.right is not None


class AttentionArgs(NamedTuple):
    query: Tensor  # heads in `layout`
    key: Tensor
    value: Tensor
    query_codes: Codes  # replaces query; present for both query and key or neither, see `coded_heads`
    key_codes: Codes
    values: str | None  # "e4m3": multiply weights and values in it, which requires codes of query and key
    sinks: Tensor | None  # [heads]
    packed: Packed
    mask: Mask
    scale: float
    softcap: float  # 0 for none
    layout: str
    return_max: bool
    engine: str
    result: ResultOptions
    # Of pairs [batch, heads, queries, keys]; each size may also be 1.
    seen: Tensor | None = None  # bool: whether the query sees the key
    bias: Tensor | None = None  # added to the score
    alibi: Tensor | None = (
        None  # fp32 [heads, 2]: slopes for keys before a query's own key, and for keys after it
    )


EightBits = Literal["int8", "e4m3"]


def element_of(spec: str | None) -> EightBits | None:
    """Return the format's element if attention can multiply its codes (one scale per token and head), else None."""
    f = None if spec is None else Format.of(spec)
    if f is None or f.block != "row":
        return None
    return f.element if f.element == "int8" or f.element == "e4m3" else None


def coded_heads(a: AttentionArgs) -> list[tuple[Tensor, Tensor | None]]:
    """Return query and key as kernels read them: (x, None), or (codes in the shape of x, fp32 scales of the shape
    without its last dimension).

    Raise ValueError if codes do not match their formats, or if query and key are not coded in the same format. This
    also covers direct calls of the op."""
    operands = (("query", a.query, a.query_codes), ("key", a.key, a.key_codes))
    if all(part is None for _, _, codes in operands for part in codes):
        if a.values is not None:
            raise ValueError("values in eight bits go with codes of query and key; got none. Quantize both")
        return [(a.query, None), (a.key, None)]
    elements = [element_of(codes.format) for _, _, codes in operands]
    if None in elements or elements[0] != elements[1]:
        raise ValueError(
            "attention multiplies codes of query and key in one format, e4m3:row or int8:row; got "
            f"{a.query_codes.format} and {a.key_codes.format}. Pass plain tensors: QTensor.dequantize()"
        )
    return [_checked(*each) for each in operands]


def _checked(name: str, x: Tensor, codes: Codes) -> tuple[Tensor, Tensor]:
    number = Format.of(codes.format).number
    if codes.global_scale is not None:
        raise ValueError(
            f"{name} in {codes.format} takes one scale per token and head only; got a global_scale"
        )
    for part, tensor, dtype, count in (
        ("codes", codes.data, number.dtype, x.numel()),
        ("scales", codes.scale, torch.float32, x.numel() // x.shape[-1]),
    ):
        if tensor is None or tensor.dtype != dtype or tensor.numel() != count:
            received = "none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(
                f"{name} {tuple(x.shape)} in {codes.format} needs {count} {part} in {dtype}; got {received}"
            )
    return codes.data.view(x.shape), codes.scale.view(x.shape[:-1])


class AttentionOutputs(NamedTuple):
    result: Result  # heads in the layout of the query; [.., tokens, heads * v_dim] if quantized
    lse: Tensor  # fp32 [batch, heads, queries]; [heads, tokens] for packed sequences
    max: Tensor | None  # fp32 [heads]


class AttentionBackwardArgs(NamedTuple):
    dy: Tensor  # [batch, queries, heads, v_dim], or [tokens, heads, v_dim]
    dlse: Tensor | None
    y: Tensor  # shaped like dy
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
    seen: Tensor | None = None
    bias: Tensor | None = None
    alibi: Tensor | None = None


class AttentionGradients(NamedTuple, Generic[G]):
    query: G
    key: G  # requested together with value
    value: G
    sinks: G
    bias: G
    alibi: G
