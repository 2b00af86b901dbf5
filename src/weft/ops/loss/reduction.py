"""Losses from log-probabilities: plain PyTorch on vectors with one element per token.

    loss = -(1 - a) * w_y * logprob + a * spread + z_loss * lse^2

with a the label smoothing and w the class weights, 1 if none are given. Autograd differentiates it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from ..common.checks import FLOATS, INTEGERS, check_tensor, checked_once, is_tensor, no_tensor, real
from .statistics import Softmax, TokenResults

if TYPE_CHECKING:
    from .sharding import VocabShard

REDUCTIONS = ("mean", "sum", "none")


class LossKeywords(TypedDict, total=False):
    """Arguments that all losses take and that do not change their return type."""

    class_weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    logit_scale: float
    softcap: float | None
    temperature: float
    reduction: Literal["mean", "sum", "none"]
    all_ignored: Literal["zero", "nan"]
    shard: VocabShard | None


class LossOptions(NamedTuple):
    """Options by which a loss is computed from log-probabilities and reduced."""

    label_smoothing: float
    z_loss: float
    reduction: str
    zero_if_none: bool  # a mean over no tokens is 0, not NaN


@checked_once
def loss_options(label_smoothing: float, z_loss: float, reduction: str, all_ignored: str) -> LossOptions:
    """Check the options of a loss and return them."""
    label_smoothing, z_loss = real("label_smoothing", label_smoothing), real("z_loss", z_loss)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be from 0 to 1; got {label_smoothing}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}; got {reduction!r}")
    if all_ignored not in ("zero", "nan"):
        raise ValueError(f"all_ignored must be 'zero' or 'nan'; got {all_ignored!r}")
    return LossOptions(label_smoothing, z_loss, reduction, all_ignored == "zero")


class CrossEntropy(NamedTuple):
    """Results of `cross_entropy` when more than the loss is requested; those not requested are None.

    - `loss` and `accuracy`: reduced by `reduction`, or [...] per token.
    - `lse`, `entropy`: [...] per token, with gradients.
    """

    loss: Tensor
    lse: Tensor | None = None
    entropy: Tensor | None = None
    accuracy: Tensor | None = None

    def selected(self, lse: bool, entropy: bool, accuracy: bool) -> Tensor | CrossEntropy:
        """Return the loss alone, or the tuple if any other result was requested."""
        if not (lse or entropy or accuracy):
            return self.loss
        return self if lse else self._replace(lse=None)


def check_target(target: Tensor, x: Tensor, name: str) -> None:
    """Raise an error unless `target` has one class per row of x; `name` is what the error calls x."""
    if not is_tensor(target) or target.layout is not torch.strided:
        raise no_tensor("target", target)
    lead = x.shape[:-1]
    if target.dtype not in INTEGERS or target.shape != lead:
        raise _wrong_target(target, x, name)
    if target.device != x.device:
        raise ValueError(f"target must be on {x.device} like {name}; it is on {target.device}")


def _wrong_target(target: Tensor, x: Tensor, name: str) -> ValueError:
    lead, shape = tuple(x.shape[:-1]), tuple(target.shape)
    requirement = f"target must have the shape {lead}, one class per row of {name}, in int32 or int64; "
    got = f"got {target.dtype} {shape}"
    if len(shape) == x.dim() and shape[:-1] == lead and shape != (*lead, 1):
        return ValueError(
            f"{requirement}{got}. Soft and one-hot targets are unsupported: pass target.argmax(-1) if each row has "
            "one class, else use torch.nn.functional.cross_entropy"
        )
    if name == "logits" and x.dim() > 2 and shape == (x.shape[0], *x.shape[2:]):
        return ValueError(
            f"{requirement}{got}. Classes are the last dimension here, not the second as in torch.nn.functional: "
            "pass logits.movedim(1, -1)"
        )
    if shape == lead:
        return ValueError(f"{requirement}{got}: pass target.long()")
    if target.numel() == math.prod(lead):
        return ValueError(f"{requirement}{got}: pass target.reshape{lead}")
    return ValueError(requirement + got)


def check_class_weight(class_weight: Tensor | None, vocab: int, device: torch.device) -> Tensor | None:
    """Check the weights of all classes and return them detached, since they have no gradient."""
    if class_weight is None:
        return None
    check_tensor("class_weight", class_weight, FLOATS, device, (vocab,))
    return class_weight.detach()


def shares_of(
    target: Tensor, class_weight: Tensor | None, softmax: Softmax, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return (share, valid), [...] each: the weight of each token in a mean, and whether it has a target."""
    valid = (target != softmax.ignore_index) & (target >= 0) & (target < softmax.vocab)
    if class_weight is None:
        return valid.to(dtype), valid
    return torch.where(valid, class_weight.to(dtype)[torch.where(valid, target, 0)], 0.0), valid


def reduced(
    values: Tensor, share: Tensor, loss: LossOptions, total: Callable[[Tensor], Tensor] = torch.sum
) -> Tensor:
    """Return the sum of values, or their mean weighted by `share`; `total` sums a tensor, over all ranks if needed."""
    if loss.reduction == "none":
        return values
    numerator = total(values)
    if loss.reduction == "sum":
        return numerator
    divisor = total(share)
    return numerator / (torch.where(divisor == 0, 1.0, divisor) if loss.zero_if_none else divisor)


def reduced_loss(
    tokens: TokenResults, target: Tensor, class_weight: Tensor | None, softmax: Softmax, options: LossOptions
) -> CrossEntropy:
    """Return the reduced loss of each token's results, together with the other results. `class_weight` [V] covers the
    whole vocabulary."""
    loss = -tokens.logprobs
    share, valid = shares_of(target, class_weight, softmax, loss.dtype)
    if class_weight is not None:
        loss = loss * torch.where(valid, share, 1.0)
    if tokens.spread is not None:
        loss = (1.0 - options.label_smoothing) * loss + options.label_smoothing * tokens.spread
    if options.z_loss:
        loss = loss + options.z_loss * tokens.lse.square()
    hits = tokens.hits
    if hits is not None:
        hits = reduced(hits, valid.to(hits.dtype), options)
    return CrossEntropy(reduced(loss, share, options), tokens.lse, tokens.entropy, hits)
