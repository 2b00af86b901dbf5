"""Cross entropy of hidden states: `linear_logprobs` with the options of `cross_entropy`.

    loss = -(1 - a) * w_y * logprob + a * spread + z_loss * lse^2         fp32, per token

with a the label smoothing, w the class weights (1 if none are given) and logprob, spread, lse as in `linear_logprobs`.
The loss is plain PyTorch on vectors with one element per token, and autograd differentiates it. A mean is the sum of
the losses divided by the sum of w_y over the tokens with a target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor

from .linear_logprobs.linear_logprobs import Head, localize_head
from .reduction import CrossEntropy, check_class_weight, loss_options, reduced_loss
from .sharding import VocabShard
from .statistics import Wanted

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .reduction import LossKeywords


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False,
    return_accuracy: Literal[False] = False,
    skip_below: float | None = None,
    **options: Unpack[LossKeywords],
) -> Tensor: ...


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_accuracy: bool = False,
    skip_below: float | None = None,
    **options: Unpack[LossKeywords],
) -> CrossEntropy: ...


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
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    all_ignored: Literal["zero", "nan"] = "zero",
    return_lse: bool = False,
    return_entropy: bool = False,
    return_accuracy: bool = False,
    skip_below: float | None = None,
    shard: VocabShard | None = None,
) -> Tensor | CrossEntropy:
    """Return the cross entropy of hidden @ weight^T + bias and target, without materializing logits or their gradient.

    Also known as fused linear cross entropy, cut cross entropy.

    hidden: [..., H], weight: [V, H], target: [...] and bias: [V], as in `linear_logprobs`; so is `skip_below`, which
    cannot be combined with label smoothing, whose gradient is not small in any tile. All other options, and the return
    value, are as in `cross_entropy`. With a `shard` of the vocabulary, weight and bias are this rank's, and the
    gradient of hidden is the sum over the ranks. DTensors are supported as in `linear_logprobs`.

    >>> import torch, weft
    >>> hidden = torch.randn(6, 64, dtype=torch.bfloat16, requires_grad=True)
    >>> weight = torch.randn(1000, 64, dtype=torch.bfloat16, requires_grad=True)
    >>> target = torch.tensor([1, 2, 3, -100, 5, 999])
    >>> weft.linear_cross_entropy(hidden, weight, target, label_smoothing=0.1, z_loss=1e-4).backward()
    >>> hidden.grad.shape, hidden.grad[3].count_nonzero().item()
    (torch.Size([6, 64]), 0)
    """
    head = Head(hidden, weight, bias, target, shard)
    local = localize_head(head, class_weight)
    if local is not None:
        head, class_weight = Head.of_mesh(local), local.tensors["class_weight"]
    head.check(skip_below)
    softmax = head.softmax(ignore_index, logit_scale, softcap, temperature)
    loss = loss_options(label_smoothing, z_loss, reduction, all_ignored)
    classes = check_class_weight(class_weight, softmax.vocab, head.hidden.device)
    smooth = label_smoothing > 0.0
    wanted = Wanted(return_entropy, smooth, return_accuracy)
    results = head.results(classes if smooth else None, softmax, wanted, skip_below)
    rank_loss = loss if local is None else loss._replace(reduction="none")
    result = reduced_loss(results, head.target, classes, softmax, rank_loss)
    if local is not None:
        result = local.reduced(result, classes, softmax, loss)
    return result.selected(return_lse, return_entropy, return_accuracy)
