"""What losses are made of, once log-probabilities are known: plain PyTorch on vectors of one number a token.

    loss = -(1 - a) * w_y * logprob + a * spread + z_loss * lse^2

with a the label smoothing and w the class weights, 1 without. Gradients are autograd's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.checks import FLOATS, INTEGERS, check_tensor, is_tensor, no_tensor, real, whole
from .vocabulary import Joined, VocabShard

REDUCTIONS = ("mean", "sum", "none")
COLDEST, HOTTEST = 2.0**-126, 2.0**126  # temperatures: they and their reciprocals are ordinary fp32 numbers


class CrossEntropy(NamedTuple):
    """What `cross_entropy` returns if more than the loss is asked for; the rest is None.

    - `loss` and `accuracy`: reduced as asked, or [...] for each token.
    - `lse`, `entropy`: [...] for each token, with gradients.
    """

    loss: Tensor
    lse: Tensor | None = None
    entropy: Tensor | None = None
    accuracy: Tensor | None = None


def check_target(target: Tensor, x: Tensor, name: str) -> None:
    """One class to each row of x, which is called `name`."""
    if not is_tensor(target) or target.layout is not torch.strided:
        raise no_tensor("target", target)
    lead = x.shape[:-1]
    if target.dtype not in INTEGERS or target.shape != lead:
        raise _wrong_target(target, x, name)
    if target.device != x.device:
        raise ValueError(f"target must be on {x.device} like {name}; it is on {target.device}")


def _wrong_target(target: Tensor, x: Tensor, name: str) -> ValueError:
    lead, shape = tuple(x.shape[:-1]), tuple(target.shape)
    wanted = f"target must have the shape {lead}, one class to each row of {name}, in int32 or int64; "
    got = f"got {target.dtype} {shape}"
    if len(shape) == x.dim() and shape[:-1] == lead and shape != (*lead, 1):
        return ValueError(
            f"{wanted}{got}. Soft and one-hot targets are not taken: give target.argmax(-1) if each has one class, "
            "else take torch.nn.functional.cross_entropy"
        )
    if name == "logits" and x.dim() > 2 and shape == (x.shape[0], *x.shape[2:]):
        return ValueError(
            f"{wanted}{got}. Classes are the last dimension here, not the second as in torch.nn.functional: give "
            "logits.movedim(1, -1)"
        )
    if shape == lead:
        return ValueError(f"{wanted}{got}: give target.long()")
    if target.numel() == math.prod(lead):
        return ValueError(f"{wanted}{got}: give target.reshape{lead}")
    return ValueError(wanted + got)


def check_shard(shard: VocabShard | None, length: int) -> None:
    """A rank's shard of the vocabulary, whose columns are so many."""
    if shard is None:
        return
    if not isinstance(shard, VocabShard):
        raise TypeError(
            f"shard must be a weft.VocabShard; got a {type(shard).__name__}. Of a process group, "
            "weft.VocabShard.of(group, columns of the whole vocabulary) makes one"
        )
    shard.check(length)


def check_softcap(softcap: float | None) -> float | None:
    """The cap of logits as a float."""
    if softcap is None:
        return None
    softcap = real("softcap", softcap)
    if not 0.0 < softcap < math.inf:
        raise ValueError(f"softcap must be above 0 and finite, or None for none; got {softcap}")
    return softcap


def scale_of(temperature: float) -> float:
    """What logits are multiplied by, once they are capped."""
    temperature = real("temperature", temperature)
    if not COLDEST <= temperature <= HOTTEST:
        raise ValueError(
            f"temperature must be above 0 and finite, from 2^-126 to 2^126: logits are divided by it; got {temperature}"
        )
    return 1.0 / temperature


def check_ignore_index(ignore_index: int) -> None:
    if not -(2**31) <= whole("ignore_index", ignore_index) < 2**31:
        raise ValueError(f"ignore_index must fit 32 bits; got {ignore_index}")


def check_loss(
    class_weight: Tensor | None, vocab: int, like: Tensor, label_smoothing: float, z_loss: float, reduction: str,
    all_ignored: str,
) -> None:  # fmt: skip
    """What the losses take alike."""
    if class_weight is not None:
        check_tensor("class_weight", class_weight, FLOATS, like.device, (vocab,))
    real("z_loss", z_loss)
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}; got {reduction!r}")
    if all_ignored not in ("zero", "nan"):
        raise ValueError(f"all_ignored must be 'zero' or 'nan'; got {all_ignored!r}")
    if not 0.0 <= real("label_smoothing", label_smoothing) <= 1.0:
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
