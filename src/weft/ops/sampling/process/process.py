"""Processed logits: what a request asks for, before a token is drawn.

    seen = prompt | (counts > 0)
    z = logits / repetition if logits > 0, else logits * repetition       where seen; logits elsewhere
    z = z - (frequency * counts + presence)                               where counts > 0
    z = z + bias
    z = -inf                                                              where not allowed
    y = round(z / temperature), or round(z) if the temperature is 0

All of it in one pass in fp32 (the penalty is one fused multiply-add) with one rounding to the dtype of y. NaN stays
NaN, unless its token is not allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ....runtime import Op
from ...common.checks import FLOATS, check_disjoint, check_input, check_tensor
from ...common.rows import compute_dtype, empty_like
from ..parameters import Number
from .arguments import WORD, ProcessArgs, ProcessOutputs
from .reference import process_reference

_DTYPES = {"counts": (torch.int32,), "prompt": (torch.bool,), "bias": FLOATS, "allowed": (torch.int32,)}


class ProcessOp(Op[ProcessArgs, ProcessOutputs], name="process_logits", variants=16):
    def validate(self, a: ProcessArgs) -> None:
        *lead, cols = a.logits.shape
        words = -(-cols // WORD)
        for name in ("temperature", "repetition", "presence", "frequency"):
            tensor = getattr(a, name).tensor
            if tensor is not None:
                _check_lead(name, tensor.shape, lead, "")
        for name, last in (("counts", cols), ("prompt", cols), ("bias", cols), ("allowed", words)):
            x = getattr(a, name)
            if x is None:
                continue
            check_tensor(name, x, _DTYPES[name], a.logits.device)
            if name == "bias" and x.shape == (cols,):
                continue
            if x.dim() == 0 or x.shape[-1] != last:
                raise ValueError(f"{name} must have {last} elements in each row; got {tuple(x.shape)}")
            _check_lead(name, x.shape[:-1], lead, f" rows of {last} elements")

    def allocate(self, a: ProcessArgs) -> ProcessOutputs:
        return ProcessOutputs(empty_like(a.logits, compute_dtype(a.logits)))

    @cached_property
    def launch(self) -> Callable[[ProcessOutputs, ProcessArgs], None]:
        from .launch import launch_process

        return launch_process

    def reference(self, a: ProcessArgs) -> ProcessOutputs:
        return process_reference(a)


process_op = ProcessOp()


def _check_lead(name: str, shape: tuple[int, ...], lead: list[int], what: str) -> None:
    """Raise an error unless a tensor has something for each row of logits [*lead, V], or for each request: each index
    of its first dimension."""
    if list(shape) not in (lead, lead[:1]):
        wanted = tuple(lead) if len(lead) < 2 else f"{tuple(lead[:1])} or {tuple(lead)}"
        raise ValueError(f"{name} must be {wanted}{what} for these logits; got {tuple(shape)}")


def process_logits(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    repetition: float | Tensor = 1.0,
    presence: float | Tensor = 0.0,
    frequency: float | Tensor = 0.0,
    counts: Tensor | None = None,
    prompt: Tensor | None = None,
    bias: Tensor | None = None,
    allowed: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Apply penalties, a bias, a mask of allowed tokens and a temperature to logits, in this order and one pass.

    - `logits`: [..., V]; the first dimension counts requests.
    - `repetition`: logits of tokens that were seen are divided by it if positive, else multiplied by it.
    - `frequency`, `presence`: `frequency * counts + presence` is subtracted where `counts > 0`.
    - `counts`: int32 [B, V], how often each request has generated each token. These tokens were seen.
    - `prompt`: bool [B, V], the tokens of each prompt. They were seen, but do not count.
    - `bias`: [V] or [B, V], added.
    - `allowed`: a bit for each token, in int32 or uint32 words [B, ceil(V / 32)] whose lowest bit is the first token,
      as grammar engines write them. The logits of other tokens become -inf.
    - `temperature`: the last divisor; 0 changes nothing, for a greedy draw.
    - `out`: a tensor for the result, in any dtype and of one stride between rows; it may be `logits`.

    The numbers may be fp32 tensors [B] on the device. With logits [B, ..., V], any tensor may also have a row for each
    row of logits. Returns fp32, rounded once; `out` if it is there. Not differentiable.

    >>> import torch, weft
    >>> counts = torch.tensor([[2, 0, 0]], dtype=torch.int32)
    >>> allowed = torch.tensor([[0b011]], dtype=torch.int32)
    >>> weft.process_logits(torch.ones(1, 3), frequency=0.25, counts=counts, allowed=allowed, temperature=0.5)
    tensor([[1., 2., -inf]])
    """
    check_input("logits", logits)
    device, exact = logits.device, compute_dtype(logits)
    if logits.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "process_logits has no gradient: call it under torch.no_grad(), or on logits.detach()"
        )
    numbers: dict[str, Any] = {
        "temperature": Number.of("temperature", temperature, device, exact, 0.0),
        "repetition": Number.of("repetition", repetition, device, exact, 0.0),
        "presence": Number.of("presence", presence, device, exact, -math.inf),
        "frequency": Number.of("frequency", frequency, device, exact, -math.inf),
    }
    if numbers["repetition"].is_always(0.0):
        raise ValueError("repetition must be above 0; got 0.0. 1.0 changes nothing")
    tensors: dict[str, Any] = {"counts": counts, "prompt": prompt, "bias": bias, "allowed": allowed}
    for name, tensor in tensors.items():
        if tensor is not None:
            dtypes = (torch.int32, torch.uint32) if name == "allowed" else _DTYPES[name]
            check_tensor(name, tensor, dtypes, device)
    if counts is None:
        for name in ("presence", "frequency"):
            if not numbers[name].is_always(0.0):
                raise ValueError(f"{name}= needs counts=, which tells what each request has generated")
        if prompt is None and not numbers["repetition"].is_always(1.0):
            raise ValueError("repetition= needs counts= or prompt=, which tell what each request has seen")
    if allowed is not None and allowed.dtype is torch.uint32:
        tensors["allowed"] = allowed.view(torch.int32)
    args = ProcessArgs(logits, **numbers, **tensors)
    if out is None:
        return process_op(args).y
    check_tensor("out", out, FLOATS, device, tuple(logits.shape))
    has_rows = out.dim() == 2 and out.stride(1) == 1 and out.stride(0) >= out.shape[1]
    if not (has_rows or out.is_contiguous()):
        raise ValueError(
            f"out must be contiguous, or have contiguous rows [B, V]; its strides are {out.stride()}"
        )
    read = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    check_disjoint([("out", out)], read if out is logits else [("logits", logits), *read], ("logits",))
    process_op.into(ProcessOutputs(out), args)
    return out
