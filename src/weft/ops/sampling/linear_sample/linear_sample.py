"""Draws from a linear head: tokens from hidden states, and their log-probabilities, without logits in memory.

    z = cap(logit_scale * (hidden @ weight^T + bias)) / temperature     as in `linear_logprobs`
    token = argmax(z + gumbel(seed, step, token))                       of equal ones, the lowest
    logprob = (z_token - m) - log(d)                                    as in `linear_logprobs`, with the same bits

The largest of logits with independent Gumbel noise is a draw from their softmax. The noise is a function of seed, step
and token alone, so draws do not depend on the batch, on tiles or on shards.

The kernel of `linear_logprobs` computes both: where no target is given, each program keeps the best score of its split,
its column and its logit, and the kernel that joins the splits takes those of the best split. The sums are those of
`linear_logprobs`, in the same order. If the vocabulary is sharded, a separate op computes the statistics of a shard,
and the same kernel joins the ranks.

With `top_k`, each program lists as many of the largest logits of each of its tiles, and another kernel draws from the
lists, as `sample` does with top_k, top_p and min_p. Ranks exchange the lists of their shards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from ....runtime import Op, autocasted
from ...common.checks import check_tensor, no_tensor, real, whole
from ...common.rows import compute_dtype, count_rows
from ...loss.linear_logprobs.linear_logprobs import check_head
from ...loss.sharding import VocabShard
from ...loss.statistics import LinearSampled, Statistics, softmax_of
from ..parameters import Number
from ..sample import of_part
from .arguments import LONGEST_LIST, STATISTICS, LinearSampleArgs
from .reference import linear_sample_reference, linear_sample_statistics_reference


def _check_limits(a: LinearSampleArgs) -> None:
    """Raise an error for limits of which lists know too little."""
    if not 0 <= a.top_k <= LONGEST_LIST:
        raise ValueError(f"top_k must be from 1 to {LONGEST_LIST}; got {a.top_k}. {_LOGITS}")
    for name, number, off in (("top_p", a.top_p, 1.0), ("min_p", a.min_p, 0.0)):
        if number.tensor is not None:
            check_tensor(name, number.tensor, (torch.float32,), a.hidden.device, a.hidden.shape[:-1], ())
        if a.top_k == 0 and not number.is_always(off):
            raise ValueError(f"{name}= needs top_k=, at most {LONGEST_LIST}. {_LOGITS}")


def _check(a: LinearSampleArgs) -> None:
    """Raise an error for what kernels would misread."""
    _check_limits(a)
    if a.stats is not None:
        rows, dtype = count_rows(a.hidden), compute_dtype(a.hidden)
        check_tensor("stats", a.stats, (dtype,), a.hidden.device)
        if a.stats.dim() != 3 or a.stats.shape[1:] != (STATISTICS + 2 * a.top_k, rows):
            raise ValueError(
                f"stats must be [ranks, {STATISTICS + 2 * a.top_k}, {rows}], as linear_sample_statistics computes "
                f"them; got {tuple(a.stats.shape)}"
            )
    if (a.seed is None) != (a.step is None):
        raise ValueError("a draw takes both a seed and a step; one of them is None")
    for name, value in (("seed", a.seed), ("step", a.step)):
        if value is None:
            continue
        if value.layout is not torch.strided:
            raise no_tensor(name, value)
        if value.dtype is not torch.int64 or value.device != a.hidden.device:
            raise ValueError(
                f"{name} must be int64 on {a.hidden.device} like hidden; got {value.dtype} on {value.device}"
            )
        if value.numel() != 1 and value.shape != a.hidden.shape[:-1]:
            raise ValueError(
                f"{name} must be one number, or one for each row of hidden, {tuple(a.hidden.shape[:-1])}; got the "
                f"shape {tuple(value.shape)}"
            )


_LOGITS = "To draw from more tokens, pass logits to weft.sample"


class LinearSampleStatisticsOp(
    Op[LinearSampleArgs, Statistics], name="linear_sample_statistics", variants=32
):
    def validate(self, a: LinearSampleArgs) -> None:
        _check(a)

    def allocate(self, a: LinearSampleArgs) -> Statistics:
        shape = (STATISTICS + 2 * a.top_k, count_rows(a.hidden))
        return Statistics(torch.empty(shape, dtype=compute_dtype(a.hidden), device=a.hidden.device))

    @cached_property
    def launch(self) -> Callable[[Statistics, LinearSampleArgs], None]:
        from .launch import launch_linear_sample_statistics

        return launch_linear_sample_statistics

    def reference(self, a: LinearSampleArgs) -> Statistics:
        return linear_sample_statistics_reference(a)


linear_sample_statistics_op = LinearSampleStatisticsOp()


class LinearSampleOp(Op[LinearSampleArgs, LinearSampled], name="linear_sample", variants=32):
    def validate(self, a: LinearSampleArgs) -> None:
        _check(a)

    def allocate(self, a: LinearSampleArgs) -> LinearSampled:
        shape, device = a.hidden.shape[:-1], a.hidden.device
        return LinearSampled(
            torch.empty(shape, dtype=torch.int64, device=device),
            torch.empty(shape, dtype=compute_dtype(a.hidden), device=device),
        )

    @cached_property
    def launch(self) -> Callable[[LinearSampled, LinearSampleArgs], None]:
        from .launch import launch_linear_sample

        return launch_linear_sample

    def reference(self, a: LinearSampleArgs) -> LinearSampled:
        return linear_sample_reference(a)


linear_sample_op = LinearSampleOp()


# ---- public function ------------------------------------------------------------------------------------


def _on_device(name: str, value: int | Tensor, hidden: Tensor) -> Tensor:
    """Return a seed or step as a tensor."""
    if isinstance(value, Tensor):
        return value
    if not -(2**63) <= whole(name, value) < 2**63:
        raise ValueError(f"{name} must fit 64 bits; got {value}")
    return torch.full((), value, dtype=torch.int64, device=hidden.device)


@torch.no_grad()
def linear_sample(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    seed: int | Tensor,
    step: int | Tensor,
    shard: VocabShard | None = None,
) -> LinearSampled:
    """Draw a token for each hidden state from softmax(hidden @ weight^T + bias), without materializing logits.

    Return (tokens, logprobs), int64 and fp32 [...]: the tokens, and their log-probabilities with the bits of
    `linear_logprobs`.

    hidden, weight, bias, `logit_scale` and `softcap` are as in `linear_logprobs`. Logits are divided by `temperature`,
    a number; 0 takes the largest logit (of equal ones, the lowest token), with its log-probability at a temperature of
    1. A NaN is never drawn. A row without a logit above minus infinity has the token -1, whose logprob is NaN.

    - `top_k`: draw from the k largest logits, at most 64; of equal ones, from the lowest tokens. The log-probability
      remains that among all tokens.
    - `top_p`, `min_p`: of these k, keep the largest that have this part of their mass, and tokens with at least this
      part of the largest probability. Numbers, or fp32 tensors with one element for each row.
    - `seed`, `step`: integers, or int64 tensors on the device with one element or one for each row. A draw depends on
      them and on the logits of its row alone: it is the same in any batch, position and shard. Rows that share a step
      need different seeds, or they have the same noise. A captured graph repeats integers: pass it a tensor of steps,
      and advance that between replays.
    - `shard`: weight and bias are this rank's shard of the vocabulary; everything else is equal on all ranks. So are
      the results, and the tokens are those that one rank would draw from the whole vocabulary.

    Results have no gradient. Train on `linear_logprobs(hidden, weight, tokens)` with the same options: for the same
    hidden state and weight it has the same bits in any batch, so that the ratio of the policies is exactly 1 before the
    first update.

    >>> import torch, weft
    >>> hidden, weight = torch.randn(6, 64).bfloat16(), torch.randn(1000, 64).bfloat16()
    >>> tokens, logprobs = weft.linear_sample(hidden, weight, temperature=0.7, seed=1, step=0)
    >>> torch.equal(logprobs, weft.linear_logprobs(hidden, weight, tokens, temperature=0.7))
    True
    >>> weft.linear_sample(hidden, weight, temperature=0, seed=1, step=0).tokens.shape
    torch.Size([6])
    """
    check_head(hidden, weight, bias, None, shard)
    is_greedy = real("temperature", temperature) == 0.0
    start, vocab = (0, weight.shape[0]) if shard is None else (shard.start, shard.size)
    softmax = softmax_of(start, vocab, -100, logit_scale, softcap, 1.0 if is_greedy else temperature)
    a = LinearSampleArgs(
        autocasted(hidden),
        autocasted(weight),
        bias,
        None if is_greedy else _on_device("seed", seed, hidden),
        None if is_greedy else _on_device("step", step, hidden),
        None,
        softmax,
        0 if top_k is None else whole("top_k", top_k, 1),
        of_part("top_p", top_p, hidden.device),
        of_part("min_p", min_p, hidden.device),
    )
    _check_limits(a)
    if is_greedy:
        a = a._replace(
            top_k=0, top_p=Number(None, 1.0), min_p=Number(None, 0.0)
        )  # the largest is always kept
    if shard is not None:
        a = a._replace(stats=shard.gather(linear_sample_statistics_op(a).stats))
    return linear_sample_op(a)
