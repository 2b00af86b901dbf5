"""Cross entropy of hidden states: `linear_logprobs` with the options of `cross_entropy`.

    loss = -(1 - a) * w_y * logprob + a * spread + z_loss * lse^2         fp32, for each token

with a the label smoothing, w the class weights (1 without) and logprob, spread, lse as in `linear_logprobs`: plain
PyTorch on vectors of one number a token, so that their gradients are autograd's. A mean divides the sum of the losses
by that of w_y over the tokens with a target.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from ...runtime import is_distributed
from .linear_logprobs import check_operands, localize_head, token_results
from .losses import check_loss, reduced_loss, told
from .mesh import loss_over_mesh
from .vocabulary import VocabShard


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
    temperature: float = 1.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    all_ignored: Literal["zero", "nan"] = "zero",
    return_lse: bool = False,
    return_entropy: bool = False,
    return_accuracy: bool = False,
    skip_below: float | None = None,
    shard: VocabShard | None = None,
) -> Any:
    """Cross entropy of hidden @ weight^T + bias and target, without logits in memory, forward or backward.

    hidden: [..., H], weight: [V, H], target: [...] and bias: [V] as for `linear_logprobs`, which has `skip_below` too;
    it does not go together with label smoothing, whose gradient is nowhere small. All other options, and what is
    returned, as for `cross_entropy`. With a `shard` of the vocabulary weight and bias are this rank's, and the gradient
    of hidden is the sum over the ranks; DTensors as for `linear_logprobs`.

    >>> import torch, weft
    >>> hidden = torch.randn(6, 64, dtype=torch.bfloat16, requires_grad=True)
    >>> weight = torch.randn(1000, 64, dtype=torch.bfloat16, requires_grad=True)
    >>> target = torch.tensor([1, 2, 3, -100, 5, 999])
    >>> weft.linear_cross_entropy(hidden, weight, target, label_smoothing=0.1, z_loss=1e-4).backward()
    >>> hidden.grad.shape, hidden.grad[3].count_nonzero().item()
    (torch.Size([6, 64]), 0)
    """
    if is_distributed(hidden, weight, bias, target, class_weight):
        return loss_over_mesh(
            linear_cross_entropy, localize_head(hidden, weight, bias, target, class_weight=class_weight),
            weight.shape[0], ignore_index, reduction, all_ignored, label_smoothing=label_smoothing, z_loss=z_loss,
            softcap=softcap, temperature=temperature, return_lse=return_lse, return_entropy=return_entropy,
            return_accuracy=return_accuracy, skip_below=skip_below,
        )  # fmt: skip
    check_operands(hidden, weight, bias, target, shard, skip_below, ignore_index)
    vocab = weight.shape[0] if shard is None else shard.size
    check_loss(class_weight, vocab, hidden, label_smoothing, z_loss, reduction, all_ignored)
    if label_smoothing and skip_below is not None:
        raise ValueError("skip_below leaves out what label smoothing adds everywhere: give one of the two")
    classes = None if class_weight is None else class_weight.detach()
    smooth = label_smoothing > 0.0
    results = token_results(
        hidden, weight, bias, target, classes if smooth else None, shard, ignore_index=ignore_index, softcap=softcap,
        temperature=temperature, entropy=return_entropy, spread=smooth, accuracy=return_accuracy,
        skip_below=skip_below,
    )  # fmt: skip
    found = reduced_loss(
        results, target, classes, vocab, ignore_index, label_smoothing, z_loss, reduction, all_ignored
    )
    return told(found, return_lse, return_entropy, return_accuracy)
