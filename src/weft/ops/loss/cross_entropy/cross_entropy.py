"""Cross entropy of logits, which are read once, with the usual terms of language model losses.

    u = softcap * tanh(s x / softcap)          s x itself without a softcap, and where x is minus infinity
    z = u / temperature                        s = logit_scale
    m = max(z)    d = sum(exp(z - m))          lse = m + log(d)      p = exp(z - m) / d
    nll = (m - z_y) + log(d)
    loss = (1 - a) * w_y * nll + a / V * sum_c(w_c * (lse - z_c)) + z_loss * lse^2
    entropy = log(d) - sum(exp(z - m) * (z - m)) / d

a is the label smoothing and w the class weights, all 1 by default. V counts the columns that are not minus infinity, so
columns that only pad the vocabulary get no share of the smoothing. Kernels sum z_c - z_y, so an offset common to all
logits costs no accuracy. A mean is the sum of the losses divided by the sum of w_y over the tokens with a target. Let
g, h and e be the gradients of a token's loss (for a mean, already divided by that sum), its lse and its entropy H:

    dz_j = p_j * (g * (A + 2 * z_loss * lse) + h - e * (log(p_j) + H)) - g * (1 - a) * w_y * [j = y] - g * a / V * w_j
    dx_j = dz_j * s / temperature * (1 - (u_j / softcap)^2)          A = (1 - a) * w_y + a / V * sum_c(w_c)

If the vocabulary is sharded over ranks, a separate op (`statistics`) reads each rank's shard once. The statistics of
all ranks are joined into log-probabilities, from which the loss is computed. Backward runs the unsharded kernel on this
rank's shard.

All arithmetic is fp32. Losses and statistics are stored in fp32, and dx is rounded once, in the target's column as in
all others. Sums over tokens have a fixed order, so every run gives the same bits. Rows without a target are not read;
their results and their gradient are zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, overload

import torch
from torch import Tensor

from ....runtime import Backward, Gradients, Op, Present, is_distributed
from ...common.checks import check_input
from ...common.rows import compute_dtype, row_strides
from ..reduction import CrossEntropy, check_class_weight, check_target, loss_options, reduced_loss
from ..sharding import VocabShard, check_shard, localize
from ..statistics import DIFFERENTIABLE, Statistics, TokenResults, Wanted, check_labels, softmax_of
from .arguments import (
    CrossEntropyArgs,
    CrossEntropyBackwardArgs,
    CrossEntropyOutputs,
    LogitsGradient,
    ShardedArgs,
    StatisticsArgs,
)
from .reference import (
    cross_entropy_backward_reference,
    cross_entropy_reference,
    cross_entropy_statistics_reference,
    sharded_logprobs_reference,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..reduction import LossKeywords


# ---- registration ---------------------------------------------------------------------------------------


class _Saved(NamedTuple):
    args: CrossEntropyBackwardArgs  # its gradients are None until the backward runs
    inplace: bool


_NO_GRADIENTS = (None, None, None, None)  # of loss, lse, entropy and spread


def _dlogits(saved: _Saved, **gradients: Tensor | None) -> Gradients:
    args = saved.args._replace(**gradients)  # type: ignore[arg-type]
    if saved.inplace and not cross_entropy_backward_op.is_traced(args):
        return {"logits": _overwrite(args)}
    return {"logits": cross_entropy_backward_op(args).logits}


def _overwrite(a: CrossEntropyBackwardArgs) -> Tensor:
    """Write the gradient over the logits, and bump their version for autograd. A node that saved the logits for its own
    backward then raises autograd's error about an in-place operation instead of computing wrong gradients."""
    logits = a.logits.detach()
    a = a._replace(logits=logits)
    if cross_entropy_backward_op.serves(logits):
        cross_entropy_backward_op.launch(LogitsGradient(logits), a)
    else:
        logits.copy_(cross_entropy_backward_reference(a).logits)
    torch.autograd.graph.increment_version(logits)
    return logits


class CrossEntropyBackwardOp(
    Op[CrossEntropyBackwardArgs, LogitsGradient], name="cross_entropy_backward", variants=32
):
    def allocate(self, a: CrossEntropyBackwardArgs) -> LogitsGradient:
        return LogitsGradient(torch.empty(a.logits.shape, dtype=a.logits.dtype, device=a.logits.device))

    @cached_property
    def launch(self) -> Callable[[LogitsGradient, CrossEntropyBackwardArgs], None]:
        from .launch import launch_cross_entropy_backward

        return launch_cross_entropy_backward

    def reference(self, a: CrossEntropyBackwardArgs) -> LogitsGradient:
        return cross_entropy_backward_reference(a)


cross_entropy_backward_op = CrossEntropyBackwardOp()


class CrossEntropyOp(
    Op[CrossEntropyArgs, CrossEntropyOutputs],
    name="cross_entropy",
    variants=32,
    differentiable=("loss", "lse", "entropy"),
):
    def validate(self, a: CrossEntropyArgs) -> None:
        return check_labels(a.target, a.softmax)

    def allocate(self, a: CrossEntropyArgs) -> CrossEntropyOutputs:
        shape, rows = a.target.shape, a.target.numel()
        reduced = shape if a.loss.reduction == "none" else ()
        new = functools.partial(torch.empty, dtype=compute_dtype(a.logits), device=a.logits.device)
        return CrossEntropyOutputs(
            new(reduced),
            new(shape),
            new(shape) if a.wanted.entropy else None,
            new(reduced) if a.wanted.accuracy else None,
            new(rows),
            new(rows),
            new(()) if a.loss.reduction == "mean" else None,
            new((2, rows)) if a.wanted.spread else None,
        )

    def present(self, a: CrossEntropyArgs) -> Present:
        wanted, mean = a.wanted, a.loss.reduction == "mean"
        return True, True, wanted.entropy, wanted.accuracy, True, True, mean, wanted.spread

    @cached_property
    def launch(self) -> Callable[[CrossEntropyOutputs, CrossEntropyArgs], None]:
        from .launch import launch_cross_entropy

        return launch_cross_entropy

    def reference(self, a: CrossEntropyArgs) -> CrossEntropyOutputs:
        return cross_entropy_reference(a)

    def keep(self, a: CrossEntropyArgs, o: CrossEntropyOutputs) -> _Saved:
        results = o.largest, o.total, o.inverse, o.smooth, o.entropy
        loss = a.loss.label_smoothing, a.loss.z_loss
        args = CrossEntropyBackwardArgs(
            a.logits, a.target, a.weight, *results, *_NO_GRADIENTS, a.softmax, *loss
        )
        return _Saved(args, a.inplace)

    def backward(self, b: Backward) -> Gradients:
        if not b.needs.logits:
            return {}
        grads = b.grads
        return _dlogits(b.kept, dloss=grads.loss, dlse=grads.lse, dentropy=grads.entropy)


cross_entropy_op = CrossEntropyOp()


class CrossEntropyStatisticsOp(Op[StatisticsArgs, Statistics], name="cross_entropy_statistics", variants=32):
    def validate(self, a: StatisticsArgs) -> None:
        return check_labels(a.target, a.softmax)

    def allocate(self, a: StatisticsArgs) -> Statistics:
        return Statistics.allocate(a.target, compute_dtype(a.logits), a.wanted)

    @cached_property
    def launch(self) -> Callable[[Statistics, StatisticsArgs], None]:
        from .launch import launch_cross_entropy_statistics

        return launch_cross_entropy_statistics

    def reference(self, a: StatisticsArgs) -> Statistics:
        return cross_entropy_statistics_reference(a)


cross_entropy_statistics_op = CrossEntropyStatisticsOp()


class ShardedLogprobsOp(
    Op[ShardedArgs, TokenResults], name="sharded_logprobs", variants=32, differentiable=DIFFERENTIABLE
):
    def validate(self, a: ShardedArgs) -> None:
        return check_labels(a.target, a.softmax)

    def allocate(self, a: ShardedArgs) -> TokenResults:
        return TokenResults.allocate(a.target, compute_dtype(a.logits), a.wanted)

    def present(self, a: ShardedArgs) -> Present:
        return TokenResults.present(a.wanted)

    @cached_property
    def launch(self) -> Callable[[TokenResults, ShardedArgs], None]:
        from .launch import launch_sharded_logprobs

        return launch_sharded_logprobs

    def reference(self, a: ShardedArgs) -> TokenResults:
        return sharded_logprobs_reference(a)

    def keep(self, a: ShardedArgs, o: TokenResults) -> _Saved:
        results = o.largest, o.total, None, o.shares, o.entropy
        args = CrossEntropyBackwardArgs(
            a.logits, a.target, a.weight, *results, *_NO_GRADIENTS, a.softmax, 0.0, 0.0
        )
        return _Saved(args, a.inplace)

    def backward(self, b: Backward) -> Gradients:
        if not b.needs.logits:
            return {}
        grads, saved = b.grads, b.kept
        dloss = None if grads.logprobs is None else -grads.logprobs
        if grads.spread is None:  # class weights and their shares belong to the spread alone
            saved = saved._replace(args=saved.args._replace(weight=None, smooth=None))
        return _dlogits(saved, dloss=dloss, dlse=grads.lse, dentropy=grads.entropy, dspread=grads.spread)


sharded_logprobs_op = ShardedLogprobsOp()


# ---- public function ------------------------------------------------------------------------------------


@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False,
    return_accuracy: Literal[False] = False,
    inplace: bool = False,
    **options: Unpack[LossKeywords],
) -> Tensor: ...


@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_accuracy: bool = False,
    inplace: bool = False,
    **options: Unpack[LossKeywords],
) -> CrossEntropy: ...


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
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
    inplace: bool = False,
    shard: VocabShard | None = None,
) -> Tensor | CrossEntropy:
    """Return the cross entropy of logits and targets.

    logits: [..., V] in bf16, fp16 or fp32, of any strides; target: [...] in int32 or int64. Forward reads the logits
    once; backward reads them once and writes their gradient. Losses are fp32 for any dtype of the logits. Returns the
    loss, or a `CrossEntropy` if more results are requested.

    - `class_weight` [V]: a weight for each class; a mean divides by the sum of the targets' weights. It has no
      gradient.
    - `ignore_index`: a token with this target is left out: its loss, lse, entropy and gradient are 0, and
      its logits are not read. Any other target that is no column is an IndexError on the CPU, as in PyTorch. A GPU is
      never synchronized to check: the token's results are NaN and its gradient is 0, also in replays of
      `weft.capture`. Nothing outside of the row is ever read.
    - `label_smoothing`: the share of the target that is spread evenly over all columns. Columns of minus infinity pad
      the vocabulary and get none of it, where PyTorch's loss would be infinite.
    - `z_loss`: adds `z_loss * lse^2` to each token's loss, with lse = log(sum(exp(z))).
    - `logit_scale`: logits are multiplied by it first. `softcap`: then they become softcap * tanh(logits / softcap).
      Last they are divided by `temperature`.
    - `reduction`: "mean" over the tokens that have a target, "sum", or "none".
    - `all_ignored`: the mean if no token has a target: "zero", with gradients of zero, or "nan" as in PyTorch.
    - `return_lse`, `return_entropy`: lse and the entropy of the softmax for each token, both with gradients, so that
      any loss can be built from them. `return_accuracy`: whether the target has the largest logit (among equal ones,
      the lowest column counts); reduced like the loss, but without class weights.
    - `inplace`: backward may overwrite the logits with their gradient. Autograd raises an error if anything else still
      needs them. A leaf that requires grad, or a view of one, is an error, as for PyTorch's in-place ops. Under
      torch.compile, which plans memory itself, the gradient is a new tensor.
    - `shard`: logits are this rank's columns of a vocabulary that is sharded over ranks; target and class_weight
      refer to the whole vocabulary and are equal on all ranks. So are the results, bit for bit. The cost is one small
      all-gather.

    Logits that are a DTensor may be sharded along tokens, along the vocabulary, or both; the results are DTensors, and
    per-token results are sharded like the tokens.

    >>> import torch, weft
    >>> logits = torch.randn(6, 1000, dtype=torch.bfloat16, requires_grad=True)
    >>> target = torch.tensor([1, 2, 3, -100, 5, 999])
    >>> weft.cross_entropy(logits, target, label_smoothing=0.1).backward()
    >>> loss, lse, _, accuracy = weft.cross_entropy(
    ...     logits, target, reduction="none", return_lse=True, return_accuracy=True
    ... )
    >>> loss.dtype, loss[3], lse.shape
    (torch.float32, tensor(0., grad_fn=<SelectBackward0>), torch.Size([6]))
    """
    if inplace:
        _check_not_a_leaf(logits)
    local = None
    if is_distributed(logits, target, class_weight):
        tensors = {"logits": logits, "class_weight": class_weight}
        local = localize(tensors, target, {"logits": logits.dim() - 1}, "logits")
        logits, class_weight = local.tensor("logits"), local.tensors["class_weight"]
        target, shard = local.target, local.shard
    check_input("logits", logits)
    cols = logits.shape[-1]
    if cols == 0 and shard is None:
        raise ValueError(f"logits must be [..., V] with at least one column; got {tuple(logits.shape)}")
    check_target(target, logits, "logits")
    check_shard(shard, cols)
    if inplace:
        _check_inplace(logits)
    start, vocab = (0, cols) if shard is None else (shard.start, shard.size)
    softmax = softmax_of(start, vocab, ignore_index, logit_scale, softcap, temperature)
    loss = loss_options(label_smoothing, z_loss, reduction, all_ignored)
    weight = check_class_weight(class_weight, vocab, logits.device)
    wanted = Wanted(return_entropy, label_smoothing > 0.0, return_accuracy)
    rank_loss = loss if local is None else loss._replace(reduction="none")
    a = CrossEntropyArgs(logits, target, weight, softmax, rank_loss, wanted, inplace)
    if shard is None:
        o = cross_entropy_op(a)
        result = CrossEntropy(o.loss, o.lse, o.entropy, o.accuracy)
    else:
        result = _sharded(a, shard)
    if local is not None:
        result = local.reduced(result, weight, softmax, loss)
    return result.selected(return_lse, return_entropy, return_accuracy)


def _sharded(a: CrossEntropyArgs, shard: VocabShard) -> CrossEntropy:
    """Return the loss over a sharded vocabulary, given this rank's logits and the weights of all classes."""
    classes = None
    if a.weight is not None and a.wanted.spread:
        classes = a.weight[shard.start : shard.stop]
    with torch.no_grad():
        own = cross_entropy_statistics_op(StatisticsArgs(a.logits, a.target, classes, a.softmax, a.wanted))
        stats = shard.gather(own.stats)
    tokens = sharded_logprobs_op(
        ShardedArgs(stats, a.logits, a.target, classes, a.softmax, a.wanted, a.inplace)
    )
    return reduced_loss(tokens, a.target, a.weight, a.softmax, a.loss)


def _check_not_a_leaf(logits: Tensor) -> None:
    """Raise an error for a leaf: backward may overwrite the output of a layer, but not the user's input."""
    if torch.compiler.is_compiling() or not (logits.requires_grad and torch.is_grad_enabled()):
        return
    base = logits._base
    if logits.is_leaf or (base is not None and base.is_leaf and base.requires_grad):
        raise RuntimeError(
            f"inplace=True would overwrite {'a leaf' if logits.is_leaf else 'a view of a leaf'} that requires grad "
            "with its gradient: pass logits that a layer computed, pass leaf.clone(), or leave inplace=False"
        )


def _check_inplace(logits: Tensor) -> None:
    """Raise an error for logits whose rows overlap in memory, or whose strides the kernel does not support."""
    rows, inner, outer_stride, inner_stride = row_strides(logits)
    disjoint = outer_stride >= (inner - 1) * inner_stride + logits.shape[-1]
    if rows is not logits or not disjoint or (inner > 1 and inner_stride < logits.shape[-1]):
        raise ValueError(
            "inplace=True needs logits whose rows are contiguous and disjoint, at one or two strides; "
            f"got the shape {tuple(logits.shape)} with the strides {logits.stride()}"
        )
