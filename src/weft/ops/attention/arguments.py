"""Arguments and outputs of attention."""

from __future__ import annotations

import math
from typing import Generic, Literal

import torch
from torch import Tensor
from typing_extensions import NamedTuple

from ...quant import Codes, Format
from ...runtime import Capabilities, G
from ..common.kv_cache import E4M3
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
    values: str | None  # "e4m3" or "int8": multiply weights and values in it; requires codes of query and key
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


EightBits = Literal["int8", "e4m3", "mxfp8"]
ValueElement = Literal["e4m3", "int8"]

_SCORES: dict[tuple[str, str], EightBits] = {
    ("row", "int8"): "int8",  # one scale per token and head
    ("row", "e4m3"): "e4m3",
    ("mx", "e4m3"): "mxfp8",
}
# In torchao's convention a block with NaN or Inf gets a non-finite scale, so that the results are NaN.
_VALUES = {"e4m3": E4M3, "int8": Format("row", "int8", "torchao")}


def value_format(values: str) -> Format:
    """Return the format of values, as columns of keys."""
    if values not in _VALUES:
        raise ValueError(f"values must be 'e4m3', 'int8' or None; got {values!r}")
    return _VALUES[values]


def element_of(spec: str | None) -> EightBits | None:
    """Return the `scores` that attention can compute from codes in a format, or None."""
    f = None if spec is None else Format.of(spec)
    return None if f is None else _SCORES.get((f.block, str(f.element)))


def unsupported_scores(scores: EightBits, target: Capabilities) -> str | None:
    """Return why a target cannot multiply codes for these scores, or None."""
    if scores == "mxfp8" and not target.mx_dot:
        instead = "e4m3" if target.fp8_dot else "int8"
        return f"{target.target} cannot multiply e4m3 with scales of 32 elements: pass scores={instead!r}"
    if scores == "e4m3" and not target.fp8_dot:
        return f"{target.target} cannot multiply e4m3: pass scores='int8'"
    return None


def unsupported_values(values: str, target: Capabilities) -> str | None:
    """Return why a target cannot multiply weights and values in this element, or None."""
    if value_format(values) is E4M3 and not target.fp8_dot:
        return f"{target.target} cannot multiply e4m3: pass values='int8' or None"
    return None


def coded_heads(a: AttentionArgs) -> list[tuple[Tensor, Tensor | None]]:
    """Return query and key as kernels read them: (x, None), or (codes in the shape of x, scales). Those are fp32 in the
    shape without its last dimension, or e8m0 as uint8 in a shape whose last dimension counts groups of 32 elements.

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
            "attention multiplies codes of query and key in one format, e4m3:row, int8:row or e4m3:mx; got "
            f"{a.query_codes.format} and {a.key_codes.format}. Pass plain tensors: QTensor.dequantize()"
        )
    return [_checked(*each) for each in operands]


def _checked(name: str, x: Tensor, codes: Codes) -> tuple[Tensor, Tensor]:
    f = Format.of(codes.format)
    if codes.global_scale is not None:
        raise ValueError(f"{name} in {codes.format} has no global_scale; got one")
    scale_shape = (*x.shape[:-1], f.scale_shape(1, x.shape[-1])[1])
    for part, tensor, dtype, count in (
        ("codes", codes.data, f.number.dtype, x.numel()),
        ("scales", codes.scale, f.scale_dtype, math.prod(scale_shape)),
    ):
        if tensor is None or tensor.dtype != dtype or tensor.numel() != count:
            received = "none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(
                f"{name} {tuple(x.shape)} in {codes.format} needs {count} {part} in {dtype}; got {received}"
            )
    data, scale = codes.data.view(x.shape), codes.scale.view(scale_shape)
    # e8m0 scales as bytes, which every target can load
    return data, scale.squeeze(-1) if f.block == "row" else scale.view(torch.uint8)


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
