"""Reference of processed logits in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...common.rows import compute_dtype, count_rows
from .arguments import WORD, ProcessArgs, ProcessOutputs


def _of_rows(x: Tensor, rows: int) -> Tensor:
    """Return a tensor of requests [..., C] with a row for each row of the logits."""
    flat = x.reshape(-1, x.shape[-1])
    return flat.repeat_interleave(rows // max(len(flat), 1), 0)


def allowed_tokens(words: Tensor, cols: int) -> Tensor:
    """Return which of `cols` tokens have their bit set in words [rows, ceil(cols / 32)], bool [rows, cols]."""
    token = torch.arange(cols, device=words.device)
    return (words[:, token // WORD] >> (token % WORD).to(torch.int32)) & 1 == 1


def process_reference(a: ProcessArgs) -> ProcessOutputs:
    """Define the output of the op."""
    rows, cols = count_rows(a.logits), a.logits.shape[-1]
    z = a.logits.reshape(rows, cols).to(compute_dtype(a.logits))
    counts = None if a.counts is None else _of_rows(a.counts, rows)
    seen = torch.zeros_like(z, dtype=torch.bool)
    if counts is not None:
        seen |= counts > 0
    if a.prompt is not None:
        seen |= _of_rows(a.prompt, rows)
    r = a.repetition.column(rows, z)
    z = torch.where(seen, torch.where(z > 0, z / r, z * r), z)
    if counts is not None:
        penalty = a.frequency.column(rows, z) * counts + a.presence.column(rows, z)
        z = torch.where(counts > 0, z - penalty, z)
    if a.bias is not None:
        z = z + _of_rows(a.bias, rows)
    if a.allowed is not None:
        z = torch.where(allowed_tokens(_of_rows(a.allowed, rows), cols), z, -math.inf)
    t = a.temperature.column(rows, z)
    return ProcessOutputs(torch.where(t == 0, z, z / t).reshape(a.logits.shape))
