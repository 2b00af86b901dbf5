"""The loss head: log-probabilities of tokens from hidden states, without materializing logits.

    x = hidden @ weight^T + bias               [T, V], fp32 sums, a tile at a time
    z = cap(logit_scale * x) / temperature     cap(x) = softcap * tanh(x / softcap), or x
    m = max(z)    d = sum(exp(z - m))          lse = m + log(d)      p = exp(z - m) / d
    logprob = (z_y - m) - log(d)
    entropy = log(d) - sum(exp(z - m) * (z - m)) / d
    spread = sum_c(w_c * (lse - z_c)) / V      the term of label smoothing, with class weights w (default 1)
    mean_logits = lse - spread                 without class weights
    log_sum_squares = log(sum(p^2))            without a gradient

V counts the columns that are not minus infinity (a bias of minus infinity pads a vocabulary). Kernels take
softcap / logit_scale and scale = logit_scale / temperature, so that z = scale * cap(x). Backward needs m and d of each
token. With a, h, e, s the gradients of a token's logprob, lse, entropy H and spread:

    dz_j = p_j * (h - a + s * sum(w) / V - e * (log(p_j) + H)) + a * [j = y] - s * w_j / V
    dx_j = dz_j * scale * (1 - tanh(logit_scale * x_j / softcap)^2)
    dhidden = dx @ weight        dweight = dx^T @ hidden        dbias = sum_t dx

In the forward, a program multiplies a tile of tokens with the tiles of one split of the vocabulary and accumulates the
statistics of the products; a second kernel joins the splits in order (`statistics`). If the vocabulary is sharded over
ranks, a separate op computes the statistics of a shard, and the same kernel joins the ranks.

Backward processes the vocabulary in blocks. It recomputes a block's logits and writes their gradient dx [T, block]
once, rounded to the dtype of the operands. The product of dx with hidden is the block's rows of dweight, complete and
rounded once; the product with weight is added to dhidden in fp32, which is rounded once after the last block. dbias
sums the rounded dx. So the only memory that grows with V is dweight itself. Sums have a fixed order: every run gives
the same bits.

dx is rounded as in a chain of ops that stores logits in the operands' dtype: in bf16 to 2^-9 of its size. In fp16,
where small elements would underflow, dx is multiplied by a power of two that brings the largest gradient of a token to
about 1, and the products are divided by it.

Tokens without a target are skipped: `order` lists the tokens that have one first, and kernels read tokens in that
order. The others are neither read nor multiplied; their results and their gradient are zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from ....runtime import Backward, Gradients, Op, Present, autocasted, is_distributed, later
from ...common.checks import FLOATS, check_input, check_tensor, check_tensors, real
from ...common.rows import compute_dtype
from ..reduction import check_target
from ..sharding import Local, VocabShard, check_shard, localize
from ..statistics import DIFFERENTIABLE, Softmax, Statistics, TokenResults, Wanted, check_labels, softmax_of
from .arguments import (
    HeadGradients,
    LinearBackwardArgs,
    LinearLogprobsArgs,
    LinearLogprobsOutputs,
    LinearStatisticsArgs,
    order_shape,
)
from .reference import (
    linear_logprobs_backward_reference,
    linear_logprobs_reference,
    linear_statistics_reference,
)


class LinearLogprobsBackwardOp(
    Op[LinearBackwardArgs, HeadGradients], name="linear_logprobs_backward", variants=96
):
    def allocate(self, a: LinearBackwardArgs) -> HeadGradients:
        like = HeadGradients(a.hidden, a.weight, a.bias)
        return HeadGradients(
            *(
                torch.empty(t.shape, dtype=t.dtype, device=a.hidden.device)
                if needed and t is not None
                else None
                for t, needed in zip(like, a.needs, strict=True)
            )
        )

    @cached_property
    def launch(self) -> Callable[[HeadGradients, LinearBackwardArgs], None]:
        from .launch import launch_linear_logprobs_backward

        return launch_linear_logprobs_backward

    def reference(self, a: LinearBackwardArgs) -> HeadGradients:
        return linear_logprobs_backward_reference(a)


linear_logprobs_backward_op = LinearLogprobsBackwardOp()


class LinearStatisticsOp(Op[LinearStatisticsArgs, Statistics], name="linear_statistics", variants=32):
    def validate(self, a: LinearStatisticsArgs) -> None:
        return check_labels(a.target, a.softmax)

    def allocate(self, a: LinearStatisticsArgs) -> Statistics:
        return Statistics.allocate(a.target, compute_dtype(a.hidden), a.wanted)

    @cached_property
    def launch(self) -> Callable[[Statistics, LinearStatisticsArgs], None]:
        from .launch import launch_linear_statistics

        return launch_linear_statistics

    def reference(self, a: LinearStatisticsArgs) -> Statistics:
        return linear_statistics_reference(a)


linear_statistics_op = LinearStatisticsOp()


class LinearLogprobsOp(
    Op[LinearLogprobsArgs, LinearLogprobsOutputs],
    name="linear_logprobs",
    variants=32,
    differentiable=tuple(f"tokens_{name}" for name in DIFFERENTIABLE),
):
    def validate(self, a: LinearLogprobsArgs) -> None:
        return check_labels(a.target, a.softmax)

    def allocate(self, a: LinearLogprobsArgs) -> LinearLogprobsOutputs:
        tokens = TokenResults.allocate(a.target, compute_dtype(a.hidden), a.wanted)
        return LinearLogprobsOutputs(
            tokens, torch.empty(order_shape(a.target), dtype=torch.int32, device=a.target.device)
        )

    def present(self, a: LinearLogprobsArgs) -> Present:
        return TokenResults.present(a.wanted), True

    @cached_property
    def launch(self) -> Callable[[LinearLogprobsOutputs, LinearLogprobsArgs], None]:
        from .launch import launch_linear_logprobs

        return launch_linear_logprobs

    def reference(self, a: LinearLogprobsArgs) -> LinearLogprobsOutputs:
        return linear_logprobs_reference(a)

    def keep(self, a: LinearLogprobsArgs, o: LinearLogprobsOutputs) -> LinearBackwardArgs:
        tokens = o.tokens
        return LinearBackwardArgs(
            hidden=a.hidden,
            weight=a.weight,
            bias=a.bias,
            target=a.target,
            classes=a.classes,
            largest=tokens.largest,
            total=tokens.total,
            entropy=tokens.entropy,
            shares=tokens.shares,
            order=o.order,
            dlogprob=None,
            dlse=None,
            dentropy=None,
            dspread=None,
            softmax=a.softmax,
            skip_below=a.skip_below,
            needs=later(HeadGradients),
        )

    def backward(self, b: Backward) -> Gradients:
        needs = HeadGradients(b.needs.hidden, b.needs.weight, b.needs.bias)
        if True not in needs:
            return {}
        grads: TokenResults = b.grads.tokens
        gradients = linear_logprobs_backward_op(
            b.kept._replace(
                dlogprob=grads.logprobs,
                dlse=grads.lse,
                dentropy=grads.entropy,
                dspread=grads.spread,
                needs=needs,
            )
        )
        return gradients._asdict()


linear_logprobs_op = LinearLogprobsOp()


# ---- public functions -----------------------------------------------------------------------------------


class LogProbs(NamedTuple):
    """Results of `linear_logprobs` when more than the log-probabilities is requested; those not requested are None."""

    logprobs: Tensor
    lse: Tensor | None = None
    entropy: Tensor | None = None
    accuracy: Tensor | None = None
    mean_logits: Tensor | None = None
    log_sum_squares: Tensor | None = None


class Head(NamedTuple):
    """This rank's operands."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    shard: VocabShard | None

    @staticmethod
    def of_mesh(local: Local) -> Head:
        return Head(
            local.tensor("hidden"), local.tensor("weight"), local.tensors["bias"], local.target, local.shard
        )

    def softmax(
        self, ignore_index: int, logit_scale: float, softcap: float | None, temperature: float
    ) -> Softmax:
        shard = self.shard
        start, vocab = (0, self.weight.shape[0]) if shard is None else (shard.start, shard.size)
        return softmax_of(start, vocab, ignore_index, logit_scale, softcap, temperature)

    def results(
        self, classes: Tensor | None, softmax: Softmax, wanted: Wanted, skip_below: float | None
    ) -> TokenResults:
        """Return the results of each token. `classes` weighs the classes of the whole vocabulary."""
        if wanted.spread and skip_below is not None:
            raise ValueError(
                "skip_below cannot be combined with label_smoothing or mean_logits, whose gradients are not small in "
                "any tile: use one of the two"
            )
        hidden, weight, bias, target, shard = self
        hidden, weight = autocasted(hidden), autocasted(weight)
        stats = None
        if shard is not None:
            hidden = shard.sum_gradient(hidden)
            if classes is not None:
                classes = classes[shard.start : shard.stop]
            with torch.no_grad():
                own = linear_statistics_op(
                    LinearStatisticsArgs(hidden, weight, bias, target, classes, softmax, wanted)
                )
                stats = shard.gather(own.stats)
        a = LinearLogprobsArgs(hidden, weight, bias, target, classes, stats, softmax, wanted, skip_below)
        return linear_logprobs_op(a).tokens

    def check(self, skip_below: float | None) -> None:
        hidden, weight, bias, target, shard = self
        check_tensors("hidden weight target", hidden, weight, target)
        check_head(hidden, weight, bias, target, shard)
        check_target(target, hidden, "hidden")
        if skip_below is not None and not 0.0 <= real("skip_below", skip_below) < 1.0:
            raise ValueError(f"skip_below must be a probability below 1; got {skip_below}")


def check_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor | None, shard: VocabShard | None
) -> None:
    """Raise an error unless these are hidden states and a head. A target, if there is one, tells them apart."""
    check_tensors("hidden weight", hidden, weight)
    check_input("hidden", hidden)
    check_tensor("weight", weight, FLOATS, hidden.device)
    if (
        weight.dim() != 2
        or weight.shape[1] != hidden.shape[-1]
        or (weight.numel() == 0 and shard is None)
        or (target is not None and target.shape != hidden.shape[:-1] and target.shape == weight.shape[:-1])
    ):
        raise _wrong_head(hidden, weight, target)
    check_shard(shard, weight.shape[0])
    if bias is not None:
        check_tensor("bias", bias, FLOATS, hidden.device, weight.shape[:1])


def localize_head(head: Head, class_weight: Tensor | None = None) -> Local | None:
    """Return this rank's part of distributed operands, or None if all are plain tensors."""
    hidden, weight, bias, target, _ = head
    if not is_distributed(hidden, weight, bias, target, class_weight):
        return None
    tensors = {"weight": weight, "hidden": hidden, "bias": bias, "class_weight": class_weight}
    return localize(tensors, target, {"weight": 0, "bias": 0}, "hidden")


def _wrong_head(hidden: Tensor, weight: Tensor, target: Tensor | None) -> ValueError:
    """Return the error for hidden states, a weight and targets whose shapes do not match."""
    note = ""
    if target is not None and hidden.dim() == 2 and weight.shape[-1:] == hidden.shape[-1:]:
        note = ". The hidden states come first, then the weight" if target.shape == weight.shape[:-1] else ""
    elif weight.dim() == 2 and weight.shape[0] == hidden.shape[-1]:
        note = ". If the columns of weight are the vocabulary, pass weight.t()"
    *shapes, last = [str(tuple(x.shape)) for x in (hidden, weight, target) if x is not None]
    return ValueError(
        "hidden must be [..., H] and weight [V, H] with one H and at least one row"
        f"{', and target one class per row of hidden' if target is not None else ''}; got "
        f"{', '.join(shapes)} and {last}{note}"
    )


@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False,
    return_accuracy: Literal[False] = False,
    return_mean_logits: Literal[False] = False,
    return_log_sum_squares: Literal[False] = False,
    skip_below: float | None = None,
    shard: VocabShard | None = None,
) -> Tensor: ...


@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_accuracy: bool = False,
    return_mean_logits: bool = False,
    return_log_sum_squares: bool = False,
    skip_below: float | None = None,
    shard: VocabShard | None = None,
) -> LogProbs: ...


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_accuracy: bool = False,
    return_mean_logits: bool = False,
    return_log_sum_squares: bool = False,
    skip_below: float | None = None,
    shard: VocabShard | None = None,
) -> Tensor | LogProbs:
    """Return log(softmax(hidden @ weight^T + bias)) of each token's target, fp32 [...], without materializing logits.

    hidden, weight, bias: [..., H], [V, H] and [V], in bf16, fp16 or fp32, of any strides (a weight whose rows are not
    contiguous is copied). An FP8 `QTensor` as weight is first dequantized as a whole; its gradient passes straight
    through to the tensor it was quantized from. target: [...] in int32 or int64. Each result of each token has its own
    gradient, so any loss can be built from log-probabilities, entropies and lse.

    - `logit_scale`: logits are multiplied by it first (Cohere, Granite, Falcon-H1). `softcap`: then they become
      softcap * tanh(logits / softcap) (Gemma). Last they are divided by `temperature`.
    - `ignore_index`: a token with this target is skipped: its results and its gradient are 0, its hidden state is not
      read. Any other target that is no row of weight is an IndexError on the CPU; on a GPU, which is never synchronized
      to check, it makes the token's results NaN and its gradient 0.
    - `return_lse`, `return_entropy`, `return_accuracy`, `return_mean_logits`, `return_log_sum_squares`: further results
      of each token; the return value is then a `LogProbs`:

      | name              |                                                                                         |
      |-------------------|-----------------------------------------------------------------------------------------|
      | `lse`             | log(sum(exp(logits)))                                                                   |
      | `entropy`         | entropy of the softmax                                                                  |
      | `accuracy`        | 1 if the target has the largest logit (of equal ones, the lowest), else 0; no gradient  |
      | `mean_logits`     | mean over the vocabulary of the logits that the softmax takes                           |
      | `log_sum_squares` | log(sum(p^2)), for weights such as WPO's; no gradient                                   |

    - `skip_below`: backward treats a tile of the gradient of the logits, 64 or 128 tokens by as many columns, as zero
      if all its probabilities are below this threshold and it has no target's column. That saves the tile's share of
      two of the three products. A token's gradient loses less than V * skip_below of its size, usually far less. Off by
      default.
    - `shard`: weight and bias are this rank's shard of the vocabulary; hidden and target are equal on all ranks. So are
      the results, bit for bit. The gradient of hidden is the sum over the ranks.

    Operands may be DTensors: weight and bias replicated or Shard(0), hidden replicated or sharded along tokens. The
    results are DTensors, sharded like the tokens.

    Extra memory of forward and backward does not grow with V, except for the gradient of weight.

    >>> import torch, weft
    >>> hidden = torch.randn(6, 64, dtype=torch.bfloat16, requires_grad=True)
    >>> weight = torch.randn(1000, 64, dtype=torch.bfloat16, requires_grad=True)
    >>> target = torch.tensor([1, 2, 3, -100, 5, 999])
    >>> result = weft.linear_logprobs(hidden, weight, target, temperature=0.7, return_entropy=True)
    >>> (-result.logprobs.sum() - 0.01 * result.entropy.sum()).backward()
    >>> result.logprobs.dtype, result.logprobs[3].item(), weight.grad.dtype
    (torch.float32, 0.0, torch.bfloat16)
    """
    head = Head(hidden, weight, bias, target, shard)
    local = localize_head(head)
    if local is not None:
        head = Head.of_mesh(local)
    head.check(skip_below)
    softmax = head.softmax(ignore_index, logit_scale, softcap, temperature)
    wanted = Wanted(return_entropy, return_mean_logits, return_accuracy, return_log_sum_squares)
    tokens = head.results(None, softmax, wanted, skip_below)
    results = LogProbs(
        logprobs=tokens.logprobs,
        lse=tokens.lse if return_lse else None,
        entropy=tokens.entropy,
        accuracy=tokens.hits,
        mean_logits=None if tokens.spread is None else tokens.lse - tokens.spread,
        log_sum_squares=tokens.log_sum_squares,
    )
    if local is not None:
        results = LogProbs(*(None if value is None else local.placed(value) for value in results))  # type: ignore[arg-type]
    return results if return_lse or True in wanted else results.logprobs
