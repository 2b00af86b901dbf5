"""Cross entropy of hidden states: `linear_logprobs` with the options of `cross_entropy`.

    loss = -(1 - a) * w_y * logprob + a * spread + z_loss * lse^2         fp32, for each token

with a the label smoothing, w the class weights (1 without) and logprob, spread, lse as in `linear_logprobs`: plain
PyTorch on vectors of one number a token, so that their gradients are autograd's. A mean divides the sum of the losses
by that of w_y over the tokens with a target.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from .cross_entropy import REDUCTIONS, CrossEntropy
from .linear_logprobs import _check, linear_logprobs_op


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    all_ignored: Literal["zero", "nan"] = "zero",
    return_lse: bool = False,
    return_entropy: bool = False,
    return_accuracy: bool = False,
    skip_below: float | None = None,
) -> Any:
    """Cross entropy of hidden @ weight^T + bias and target, without logits in memory, forward or backward.

    hidden: [..., H], weight: [V, H], target: [...] and bias: [V] as for `linear_logprobs`, which has `skip_below` too;
    it does not go together with label smoothing, whose gradient is nowhere small. All other options, and what is
    returned, as for `cross_entropy`; its weights of classes are `class_weight` [V] here.

    >>> import torch, weft
    >>> hidden = torch.randn(6, 64, dtype=torch.bfloat16, requires_grad=True)
    >>> weight = torch.randn(1000, 64, dtype=torch.bfloat16, requires_grad=True)
    >>> target = torch.tensor([1, 2, 3, -100, 5, 999])
    >>> weft.linear_cross_entropy(hidden, weight, target, label_smoothing=0.1, z_loss=1e-4).backward()
    >>> hidden.grad.shape, hidden.grad[3].count_nonzero().item()
    (torch.Size([6, 64]), 0)
    """
    _check(hidden, weight, bias, target, softcap, scale, skip_below, ignore_index)
    vocab = weight.shape[0]
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}; got {reduction!r}")
    if all_ignored not in ("zero", "nan"):
        raise ValueError(f"all_ignored must be 'zero' or 'nan'; got {all_ignored!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be from 0 to 1; got {label_smoothing}")
    if label_smoothing and skip_below is not None:
        raise ValueError("skip_below leaves out what label smoothing adds everywhere: give one of the two")
    if class_weight is not None and (
        class_weight.shape != (vocab,)
        or not class_weight.is_floating_point()
        or class_weight.device != hidden.device
    ):
        raise ValueError(
            f"class_weight must be a float tensor of shape ({vocab},) on {hidden.device}; "
            f"got {class_weight.dtype} {tuple(class_weight.shape)} on {class_weight.device}"
        )
    classes = None if class_weight is None else class_weight.detach()
    smooth = label_smoothing > 0.0
    outputs = iter(
        linear_logprobs_op(
            hidden, weight, bias, target, classes if smooth else None, ignore_index,
            None if softcap is None else float(softcap), float(scale), return_entropy, smooth, return_accuracy,
            skip_below,
        )
    )  # fmt: skip
    logprob, lse = next(outputs), next(outputs)
    entropy = next(outputs) if return_entropy else None
    spread = next(outputs) if smooth else None
    hits = next(outputs) if return_accuracy else None
    valid = (target != ignore_index) & (target >= 0) & (target < vocab)
    loss = -logprob
    share = valid.to(loss.dtype)
    if classes is not None:
        share = torch.where(valid, classes.to(loss.dtype)[torch.where(valid, target, 0)], 0.0)
        loss = loss * torch.where(valid, share, 1.0)
    if spread is not None:
        loss = (1.0 - label_smoothing) * loss + label_smoothing * spread
    if z_loss:
        loss = loss + z_loss * lse.square()
    if reduction != "none":
        loss = _reduced(loss, share, reduction, all_ignored)
        if hits is not None:
            hits = _reduced(hits, valid.to(hits.dtype), reduction, all_ignored)
    if not (return_lse or return_entropy or return_accuracy):
        return loss
    return CrossEntropy(loss, lse if return_lse else None, entropy, hits)


def _reduced(values: Tensor, share: Tensor, reduction: str, all_ignored: str) -> Tensor:
    total = values.sum()
    if reduction == "sum":
        return total
    divisor = share.sum()
    return total / (torch.where(divisor == 0, 1.0, divisor) if all_ignored == "zero" else divisor)
