"""What losses are made of, once log-probabilities are known: plain PyTorch on vectors of one number a token.

    loss = -(1 - a) * w_y * logprob + a * spread + z_loss * lse^2

with a the label smoothing and w the class weights, 1 without. Gradients are autograd's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .vocabulary import Joined

REDUCTIONS = ("mean", "sum", "none")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class CrossEntropy(NamedTuple):
    """What `cross_entropy` returns if more than the loss is asked for; the rest is None.

    - `loss` and `accuracy`: reduced as asked, or [...] for each token.
    - `lse`, `entropy`: [...] for each token, with gradients.
    """

    loss: Tensor
    lse: Tensor | None = None
    entropy: Tensor | None = None
    accuracy: Tensor | None = None


def check_loss(
    name: str, weight: Tensor | None, vocab: int, like: Tensor, label_smoothing: float, reduction: str,
    all_ignored: str,
) -> None:  # fmt: skip
    """What the losses take alike: `name` is what the weights of classes are called."""
    if weight is not None and (
        weight.shape != (vocab,) or weight.dtype not in DTYPES or weight.device != like.device
    ):
        raise ValueError(
            f"{name} must be a float tensor of shape ({vocab},) on {like.device}; "
            f"got {weight.dtype} {tuple(weight.shape)} on {weight.device}"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}; got {reduction!r}")
    if all_ignored not in ("zero", "nan"):
        raise ValueError(f"all_ignored must be 'zero' or 'nan'; got {all_ignored!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be from 0 to 1; got {label_smoothing}")


def shares_of(
    target: Tensor, class_weight: Tensor | None, vocab: int, ignore_index: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(what each token counts in a mean, which have a target) [...]."""
    valid = (target != ignore_index) & (target >= 0) & (target < vocab)
    if class_weight is None:
        return valid.to(dtype), valid
    return torch.where(valid, class_weight.to(dtype)[torch.where(valid, target, 0)], 0.0), valid


def reduced(
    values: Tensor,
    share: Tensor,
    reduction: str,
    all_ignored: str,
    total: Callable[[Tensor], Tensor] = torch.sum,
) -> Tensor:
    """The sum of values, or their mean weighted with share; `total` adds up."""
    if reduction == "none":
        return values
    summed = total(values)
    if reduction == "sum":
        return summed
    divisor = total(share)
    return summed / (torch.where(divisor == 0, 1.0, divisor) if all_ignored == "zero" else divisor)


def reduced_loss(
    found: Joined, target: Tensor, weight: Tensor | None, vocab: int, ignore_index: int, label_smoothing: float,
    z_loss: float, reduction: str, all_ignored: str,
) -> CrossEntropy:  # fmt: skip
    """The loss of log-probabilities and all that was found besides; weights of classes are of the whole vocabulary."""
    loss = -found.logprobs
    share, valid = shares_of(target, weight, vocab, ignore_index, loss.dtype)
    if weight is not None:
        loss = loss * torch.where(valid, share, 1.0)
    if found.spread is not None:
        loss = (1.0 - label_smoothing) * loss + label_smoothing * found.spread
    if z_loss:
        loss = loss + z_loss * found.lse.square()
    hits = found.hits
    if hits is not None:
        hits = reduced(hits, valid.to(hits.dtype), reduction, all_ignored)
    return CrossEntropy(reduced(loss, share, reduction, all_ignored), found.lse, found.entropy, hits)


def told(found: CrossEntropy, lse: bool, entropy: bool, accuracy: bool) -> Any:
    """What was asked for: the loss alone, or all of it."""
    if not (lse or entropy or accuracy):
        return found.loss
    return found if lse else found._replace(lse=None)
