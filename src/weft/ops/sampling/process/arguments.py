"""Arguments and outputs of processed logits."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..parameters import Number

WORD = 32  # tokens of a word of the mask of allowed tokens


class ProcessArgs(NamedTuple):
    """Tensors of fewer rows than logits have a row for each request, of which `rows // theirs` follow each other."""

    logits: Tensor  # [..., V]
    temperature: Number
    repetition: Number
    presence: Number
    frequency: Number
    counts: Tensor | None  # int32 [..., V]
    prompt: Tensor | None  # bool [..., V]
    bias: Tensor | None  # [..., V]
    allowed: Tensor | None  # int32 [..., ceil(V / 32)]


class ProcessOutputs(NamedTuple):
    y: Tensor  # fp32 [..., V]
