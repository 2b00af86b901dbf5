"""Cross entropy of logits, read once, with everything that losses of language models add to it.

    u = softcap * tanh(s x / softcap)          s x itself without a softcap, and where x is minus infinity
    z = u / temperature                        s = logit_scale
    m = max(z)    d = sum(exp(z - m))          lse = m + log(d)      p = exp(z - m) / d
    nll = (m - z_y) + log(d)
    loss = (1 - a) * w_y * nll + a / V * sum_c(w_c * (lse - z_c)) + z_loss * lse^2
    entropy = log(d) - sum(exp(z - m) * (z - m)) / d

a is the label smoothing and w the class weights, which are all 1 if none are given. V counts the columns that are not
minus infinity, so that columns which only pad the vocabulary get no share of the smoothing. Kernels sum
z_c - z_y, so that an offset common to all logits does not cost accuracy. A mean is the sum of the losses,
divided by the sum of w_y over the tokens with a target. Let g, h and e be the gradients of a token's loss (for a mean,
already divided by that sum), of its lse and of its entropy H:

    dz_j = p_j * (g * (A + 2 * z_loss * lse) + h - e * (log(p_j) + H)) - g * (1 - a) * w_y * [j = y] - g * a / V * w_j
    dx_j = dz_j * s / temperature * (1 - (u_j / softcap)^2)          A = (1 - a) * w_y + a / V * sum_c(w_c)

If the vocabulary is sharded over ranks, an op of its own (`statistics`) reads each rank's shard once. The statistics of
all ranks are joined into log-probabilities, from which the loss is computed. Backward runs the same kernel as without
shards, on this rank's shard.

All arithmetic is fp32. Losses and statistics are stored in fp32, and dx is rounded once, in the target's column as in
all others. Sums over tokens have a fixed order, so that every run gives the same bits. Rows without a target are not
read; their results and their gradient are zero.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from ...runtime import (
    Backward,
    Capabilities,
    Gradients,
    Launch,
    Op,
    capabilities_of,
    choice,
    is_distributed,
)
from ..common.checks import check_input
from ..common.rows import align_of, compute_dtype, contiguous, count_rows, row_strides, scan_config
from .cross_entropy_kernels import (
    cross_entropy_backward_kernel,
    cross_entropy_kernel,
    cross_entropy_totals_kernel,
)
from .reduction import CrossEntropy, LossOptions, check_class_weight, check_target, loss_options, reduced_loss
from .sharding import VocabShard, check_shard, localize
from .statistics import (
    DIFFERENTIABLE,
    Softmax,
    Statistics,
    Targets,
    TokenResults,
    Wanted,
    capped_reference,
    check_labels,
    joined_reference,
    launch_join,
    softmax_of,
    statistics_reference,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .reduction import LossKeywords

# ---- arguments and outputs ------------------------------------------------------------------------------


class CrossEntropyArgs(NamedTuple):
    logits: Tensor  # [..., V]
    target: Tensor  # [...]
    weight: Tensor | None  # [V], of classes
    softmax: Softmax
    loss: LossOptions
    wanted: Wanted
    inplace: bool  # the backward writes the gradient over the logits


class CrossEntropyOutputs(NamedTuple):
    loss: Tensor  # a scalar, or [...]
    lse: Tensor  # [...]
    entropy: Tensor | None  # [...]
    accuracy: Tensor | None  # like the loss
    largest: Tensor  # [T]; this and all that follow are kept for the backward
    total: Tensor  # [T]
    inverse: Tensor | None  # a scalar, if the reduction is a mean: 1 / sum(w_y)
    smooth: Tensor | None  # [2, T], with label smoothing: a / V * sum(w), and a / V


class StatisticsArgs(NamedTuple):
    logits: Tensor  # [..., columns of this rank's shard]
    target: Tensor  # [...], columns of the whole vocabulary
    weight: Tensor | None  # [columns]
    softmax: Softmax
    wanted: Wanted


class ShardedArgs(NamedTuple):
    stats: Tensor  # [ranks, STATS, T]
    # What the backward reads of this rank's shard.
    logits: Tensor
    target: Tensor
    weight: Tensor | None
    softmax: Softmax
    wanted: Wanted
    inplace: bool


class CrossEntropyBackwardArgs(NamedTuple):
    """The arguments of the backward. A gradient is None if its result was not used.

    With `dspread`, `dloss` is the gradient of the negative log-probability without class weights and smoothing: class
    weights then belong to the spread alone.
    """

    logits: Tensor  # [..., V], or a shard
    target: Tensor
    weight: Tensor | None
    largest: Tensor
    total: Tensor
    inverse: Tensor | None
    smooth: Tensor | None
    entropy: Tensor | None
    dloss: Tensor | None  # a scalar, or [...]
    dlse: Tensor | None  # [...]
    dentropy: Tensor | None
    dspread: Tensor | None
    softmax: Softmax
    label_smoothing: float
    z_loss: float


class LogitsGradient(NamedTuple):
    logits: Tensor


# ---- reference ------------------------------------------------------------------------------------------


def cross_entropy_backward_reference(a: CrossEntropyBackwardArgs) -> LogitsGradient:
    logits, dtype, start = a.logits, compute_dtype(a.logits), a.softmax.start
    rows, cols = count_rows(logits), logits.shape[-1]
    z, slope = capped_reference(logits.reshape(rows, cols).to(dtype), a.softmax)
    targets = Targets.of(a.target, a.softmax)
    weight = None if a.weight is None else a.weight.to(dtype)
    t = z - a.largest.to(dtype)[:, None]
    log_total = torch.log(a.total.to(dtype))
    p = torch.exp(t) / a.total.to(dtype)[:, None]
    factor = torch.zeros_like(log_total)
    dz = torch.zeros_like(z)
    of_spread = None if a.dspread is None else a.dspread.reshape(-1).to(dtype)
    if a.dloss is not None:
        g = a.dloss.reshape(-1).to(dtype).expand(rows) * (1.0 if a.inverse is None else a.inverse.to(dtype))
        at_target = g * (1.0 - a.label_smoothing)
        if of_spread is None:
            of_spread = g
            if weight is not None:
                at_target = at_target * weight[targets.column]
        factor = at_target + g * 2.0 * a.z_loss * (a.largest.to(dtype) + log_total)
        here = torch.arange(start, start + cols, device=z.device) == targets.column[:, None]
        dz = dz - torch.where(here, at_target[:, None], 0.0)
    if a.smooth is not None and of_spread is not None:
        of_mass, of_column = a.smooth.to(dtype).unbind()
        factor = factor + of_spread * of_mass
        part = (of_spread * of_column)[:, None].expand(z.shape)
        part = part if weight is None else part * weight
        dz = dz - torch.where(z > -torch.inf, part, 0.0)
    if a.dlse is not None:
        factor = factor + a.dlse.reshape(-1).to(dtype)
    by_row = factor[:, None]
    if a.dentropy is not None:
        assert a.entropy is not None
        e = a.dentropy.reshape(-1, 1).to(dtype)
        by_row = by_row - e * (t - log_total[:, None] + a.entropy.reshape(-1, 1).to(dtype))
    dz = dz + torch.where(p > 0, p * by_row, p)
    dx = torch.where(targets.valid[:, None], dz * slope, 0.0)
    return LogitsGradient(dx.to(logits.dtype).view(logits.shape))


# ---- launch ---------------------------------------------------------------------------------------------


class RowConfig(NamedTuple):
    """How a row is read: `tile` logits at a time, in `lanes` interleaved parts with statistics of their own."""

    tile: int
    lanes: int
    num_warps: int


@choice("cross_entropy", tile=(64, 16384), lanes=(32, 4096), num_warps=(1, 16))
def row_config(kernel: str, cols: int, element: int, steps: int, target: Capabilities) -> RowConfig:
    """The tile of a kernel ("forward" or "backward") in which each thread has `steps` loads of 128 bits under way
    before it uses the first."""
    if target.is_cpu:
        # Measured at 128 x 157184 in bf16: from 512 to 2048 at a time and from 64 to 256 lanes make no difference.
        long = cols >= 2048
        return RowConfig(1024 if long else 64, 128 if long else 64, 4)
    wave = target.warp_size
    num_warps = (4 if wave == 64 else 8) if cols >= 4096 else 4 if cols >= 1024 else 1
    lanes = num_warps * wave * (16 // element)
    return RowConfig((steps if cols >= 4096 else 1) * lanes, lanes, num_warps)


def _steps(capped: bool, more: bool) -> int:
    """Loads of 128 bits that each thread of the forward has under way.

    Compiled for sm_90, four steps take 64 registers. With `more` to add up they would take over 100, and with a softcap
    two steps already spill. Backward takes half as many steps, since with four it would spill on sm_80.
    """
    return 1 if capped else 2 if more else 4


def _align(element: int, *sizes: int) -> int:
    """What all sizes are multiples of: 16, or as many elements as 16 bytes hold, else 1."""
    return align_of(*sizes, least=16 // element if element >= 4 else 8)


class _RowOutputs(NamedTuple):
    """What the kernel over rows writes, in the order of its parameters: either statistics or results, [T] each."""

    stats: Tensor | None = None
    loss: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    hit: Tensor | None = None
    largest: Tensor | None = None
    total: Tensor | None = None
    share: Tensor | None = None
    smooth: Tensor | None = None


class _RowConstants(NamedTuple):
    """What decides the code of the kernel over rows."""

    config: RowConfig
    kind: int
    wanted: Wanted
    mark_missing: bool
    nested: bool
    align: int


@functools.cache
def _rows_launch(c: _RowConstants) -> Launch:
    return Launch.of(
        cross_entropy_kernel,
        num_warps=c.config.num_warps,
        KIND=c.kind,
        ENTROPY=c.wanted.entropy,
        SPREAD=c.wanted.spread,
        ACCURACY=c.wanted.accuracy,
        MARK_MISSING=c.mark_missing,
        TILE=c.config.tile,
        LANES=c.config.lanes,
        NESTED=c.nested,
        ALIGN=c.align,
    )


@functools.cache
def _totals_launch(zero_if_none: bool, target: Capabilities) -> Launch:
    tile, num_warps = scan_config("totals", target)
    return Launch.of(cross_entropy_totals_kernel, num_warps=num_warps, ZERO_IF_NONE=zero_if_none, TILE=tile)


def _launch_rows(o: _RowOutputs, a: CrossEntropyArgs | StatisticsArgs, loss: LossOptions | None) -> None:
    """Read the logits once, for the losses, or without `loss` options for the statistics of a shard."""
    softmax, wanted, target = a.softmax, a.wanted, a.target.contiguous()
    logits, inner, outer_stride, inner_stride = row_strides(a.logits)
    rows, cols, element = target.numel(), logits.shape[-1], logits.element_size()
    steps = _steps(softmax.softcap is not None, True in wanted)
    config = row_config("forward", cols, element, steps, capabilities_of(logits.device))
    mark_missing = loss is not None and loss.reduction != "none"
    align = _align(element, cols, outer_stride, inner_stride)
    _rows_launch(_RowConstants(config, softmax.kind, wanted, mark_missing, inner > 1, align))(
        (rows, 1, 1),
        (logits, target, contiguous(a.weight), *o),
        (rows, cols, inner, outer_stride, inner_stride, softmax.start, softmax.vocab, softmax.ignore_index),
        (*softmax.floats, 0.0, 0.0) if loss is None else (*softmax.floats, loss.label_smoothing, loss.z_loss),
    )


class _BackwardConstants(NamedTuple):
    """What decides the code of the backward kernel."""

    config: RowConfig
    kind: int
    inplace: bool
    nested: bool
    align: int
    alike: bool


@functools.cache
def _backward_launch(c: _BackwardConstants) -> Launch:
    return Launch.of(
        cross_entropy_backward_kernel,
        num_warps=c.config.num_warps,
        KIND=c.kind,
        INPLACE=c.inplace,
        TILE=c.config.tile,
        LANES=c.config.lanes,
        NESTED=c.nested,
        ALIGN=c.align,
        ALIKE=c.alike,
    )


def _per_row(gradient: Tensor | None) -> tuple[Tensor | None, int]:
    """A gradient as a vector, and its stride. One for all rows has the stride 0."""
    if gradient is None:
        return None, 0
    flat = gradient.reshape(-1)
    return flat, 0 if flat.numel() == 1 else flat.stride(0)


def _launch_backward(o: LogitsGradient, a: CrossEntropyBackwardArgs) -> None:
    """Write the gradient, over the logits if both are the same memory."""
    inplace = o.logits is a.logits
    softmax, capabilities = a.softmax, capabilities_of(a.logits.device)
    target = a.target.contiguous()
    logits, inner, outer_stride, inner_stride = row_strides(a.logits)
    rows, cols, element = target.numel(), logits.shape[-1], logits.element_size()
    upstream, strides = zip(*map(_per_row, (a.dloss, a.dlse, a.dentropy, a.dspread)), strict=True)
    config = row_config("backward", cols, element, 1 if softmax.softcap is not None else 2, capabilities)
    align = _align(element, cols, outer_stride, inner_stride)
    alike = inplace or align > 1 or (inner == 1 and (outer_stride - cols) % (16 // element) == 0)
    tiles = max(1, cols // config.tile)
    spans = 1
    # Programs of a few tiles each, enough of them to keep all multiprocessors busy.
    if not capabilities.is_cpu:
        spans = max(1, min(tiles // 4, 16 * capabilities.multiprocessors // rows))
    span = -(-tiles // spans) * config.tile
    spans = -(-tiles * config.tile // span)
    _backward_launch(_BackwardConstants(config, softmax.kind, inplace, inner > 1, align, alike))(
        (rows, spans, 1),
        (
            logits,
            target,
            contiguous(a.weight),
            a.largest,
            a.total,
            a.inverse,
            a.smooth,
            contiguous(a.entropy),
            *upstream,
            logits if inplace else o.logits,
        ),
        (
            rows,
            cols,
            inner,
            outer_stride,
            inner_stride,
            softmax.start,
            softmax.vocab,
            softmax.ignore_index,
            *strides,
            span,
        ),
        (*softmax.floats, a.label_smoothing, a.z_loss),
    )


# ---- registration ---------------------------------------------------------------------------------------


class _Kept(NamedTuple):
    args: CrossEntropyBackwardArgs  # gradients are still None: they are not known before the backward
    inplace: bool


_NO_GRADIENTS = (None, None, None, None)  # of loss, lse, entropy and spread


def _dlogits(kept: _Kept, **gradients: Tensor | None) -> Gradients:
    args = kept.args._replace(**gradients)  # type: ignore[arg-type]
    if kept.inplace and not cross_entropy_backward_op.is_traced(args):
        return {"logits": _overwrite(args)}
    return {"logits": cross_entropy_backward_op(args).logits}


def _overwrite(a: CrossEntropyBackwardArgs) -> Tensor:
    """Write the gradient over the logits, and mark them as changed for autograd. A node that saved the logits for its
    own backward then raises autograd's error about an in-place operation, rather than compute wrong numbers."""
    logits = a.logits.detach()
    a = a._replace(logits=logits)
    if cross_entropy_backward_op.serves(logits):
        _launch_backward(LogitsGradient(logits), a)
    else:
        logits.copy_(cross_entropy_backward_reference(a).logits)
    torch.autograd.graph.increment_version(logits)
    return logits


class CrossEntropyBackwardOp(
    Op[CrossEntropyBackwardArgs, LogitsGradient], name="cross_entropy_backward", variants=32
):
    def allocate(self, a: CrossEntropyBackwardArgs) -> LogitsGradient:
        return LogitsGradient(torch.empty(a.logits.shape, dtype=a.logits.dtype, device=a.logits.device))

    def launch(self, outputs: LogitsGradient, a: CrossEntropyBackwardArgs) -> None:
        _launch_backward(outputs, a)

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

    def present(self, a: CrossEntropyArgs) -> Any:
        wanted, mean = a.wanted, a.loss.reduction == "mean"
        there = (True, True, wanted.entropy, wanted.accuracy, True, True, mean, wanted.spread)
        return CrossEntropyOutputs(*there)  # type: ignore[arg-type]

    def launch(self, o: CrossEntropyOutputs, a: CrossEntropyArgs) -> None:
        rows, device = a.target.numel(), a.logits.device
        if a.loss.reduction == "none":
            results = _RowOutputs(
                None, o.loss, o.lse, o.entropy, o.accuracy, o.largest, o.total, None, o.smooth
            )
            _launch_rows(results, a, a.loss)
            return
        losses = torch.empty(rows, dtype=torch.float32, device=device)
        hits = shares = None
        if o.accuracy is not None:
            hits = torch.empty_like(losses)
        if o.inverse is not None:
            shares = torch.empty_like(losses)
        results = _RowOutputs(None, losses, o.lse, o.entropy, hits, o.largest, o.total, shares, o.smooth)
        _launch_rows(results, a, a.loss)
        _totals_launch(a.loss.zero_if_none, capabilities_of(device))(
            (1, 1, 1), (losses, shares, hits, o.loss, o.inverse, o.accuracy), (rows,)
        )

    def reference(self, a: CrossEntropyArgs) -> CrossEntropyOutputs:
        """The definition."""
        logits, target, loss_of = a.logits, a.target, a.loss
        rows, cols, dtype = count_rows(logits), logits.shape[-1], compute_dtype(logits)
        z, _ = capped_reference(logits.reshape(rows, cols).to(dtype), a.softmax)
        targets = Targets.of(target, a.softmax)
        y, valid = targets.column, targets.valid
        largest = z.amax(1).clamp(min=torch.finfo(dtype).min)
        t = z - largest[:, None]
        e = torch.exp(t)
        total = e.sum(1)
        log_total = torch.log(total)
        picked = z.gather(1, y[:, None])[:, 0]
        nll = (largest - picked) + log_total
        share = torch.ones_like(nll) if a.weight is None else a.weight.to(dtype)[y]
        lse = largest + log_total
        loss = share * nll
        entropy = accuracy = inverse = smooth = None
        if a.wanted.spread:
            there = z > -torch.inf
            weights = torch.ones_like(z) if a.weight is None else a.weight.to(dtype).expand(z.shape)
            weights = torch.where(there, weights, 0.0)
            part = loss_of.label_smoothing / there.sum(1).to(dtype)
            origin = torch.where(picked > -torch.inf, picked, 0.0)
            below = torch.where(there, weights * (z - origin[:, None]), 0.0).sum(1)
            mass = weights.sum(1)
            spread = mass * ((largest - origin) + log_total) - below
            loss = (1.0 - loss_of.label_smoothing) * loss + part * spread
            smooth = torch.where(valid, torch.stack([part * mass, part]), 0.0)
        loss = targets.masked(loss + loss_of.z_loss * lse.square())
        if a.wanted.entropy:
            moment = torch.where(e > 0, e * t, 0.0).sum(1)
            entropy = targets.masked(log_total - moment / total).view(target.shape)
        if a.wanted.accuracy:
            col = torch.arange(cols, device=z.device)
            before = (z > picked[:, None]) | ((z == picked[:, None]) & (col < y[:, None]))
            accuracy = torch.where(valid, (~before.any(1)).to(dtype), 0.0)
        if loss_of.reduction == "none":
            loss = loss.view(target.shape)
            accuracy = None if accuracy is None else accuracy.view(target.shape)
        else:
            loss = loss.sum()
            accuracy = None if accuracy is None else accuracy.sum()
        if loss_of.reduction == "mean":
            divisor, count = torch.where(valid, share, 0.0).sum(), valid.sum()
            inverse, mean = 1.0 / divisor, loss / divisor
            accuracy = None if accuracy is None else accuracy / count
            if loss_of.zero_if_none:
                inverse = torch.where(divisor == 0, 0.0, inverse)
                mean = torch.where((divisor == 0) & ~loss.isnan(), 0.0, mean)
                accuracy = None if accuracy is None else torch.where(count == 0, 0.0, accuracy)
            loss = mean
        return CrossEntropyOutputs(
            loss,
            targets.masked(lse).view(target.shape),
            entropy,
            accuracy,
            torch.where(valid, largest, 0.0),
            torch.where(valid, total, 1.0),
            inverse,
            smooth,
        )

    def keep(self, a: CrossEntropyArgs, o: CrossEntropyOutputs) -> _Kept:
        results = o.largest, o.total, o.inverse, o.smooth, o.entropy
        loss = a.loss.label_smoothing, a.loss.z_loss
        args = CrossEntropyBackwardArgs(
            a.logits, a.target, a.weight, *results, *_NO_GRADIENTS, a.softmax, *loss
        )
        return _Kept(args, a.inplace)

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

    def launch(self, o: Statistics, a: StatisticsArgs) -> None:
        _launch_rows(_RowOutputs(o.stats), a, None)

    def reference(self, a: StatisticsArgs) -> Statistics:
        z = a.logits.reshape(a.target.numel(), a.logits.shape[-1]).to(compute_dtype(a.logits))
        z, _ = capped_reference(z, a.softmax)
        return Statistics(
            statistics_reference(z, Targets.of(a.target, a.softmax), a.weight, a.softmax.start, a.wanted)
        )


cross_entropy_statistics_op = CrossEntropyStatisticsOp()


class ShardedLogprobsOp(
    Op[ShardedArgs, TokenResults], name="sharded_logprobs", variants=32, differentiable=DIFFERENTIABLE
):
    def validate(self, a: ShardedArgs) -> None:
        return check_labels(a.target, a.softmax)

    def allocate(self, a: ShardedArgs) -> TokenResults:
        return TokenResults.allocate(a.target, compute_dtype(a.logits), a.wanted)

    def present(self, a: ShardedArgs) -> Any:
        return TokenResults.present(a.wanted)

    def launch(self, o: TokenResults, a: ShardedArgs) -> None:
        launch_join(o, a.stats.contiguous(), a.target.contiguous(), None, a.softmax, a.wanted)

    def reference(self, a: ShardedArgs) -> TokenResults:
        """Compute the results of each token from the statistics of all ranks. Gradients are those of `a.logits`, this
        rank's shard."""
        return joined_reference(a.stats, a.target, a.softmax, a.wanted)

    def keep(self, a: ShardedArgs, o: TokenResults) -> _Kept:
        results = o.largest, o.total, None, o.shares, o.entropy
        args = CrossEntropyBackwardArgs(
            a.logits, a.target, a.weight, *results, *_NO_GRADIENTS, a.softmax, 0.0, 0.0
        )
        return _Kept(args, a.inplace)

    def backward(self, b: Backward) -> Gradients:
        if not b.needs.logits:
            return {}
        grads, kept = b.grads, b.kept
        dloss = None if grads.logprobs is None else -grads.logprobs
        if grads.spread is None:  # class weights and their shares belong to the spread alone
            kept = kept._replace(args=kept.args._replace(weight=None, smooth=None))
        return _dlogits(kept, dloss=dloss, dlse=grads.lse, dentropy=grads.entropy, dspread=grads.spread)


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
    """Cross entropy of logits [..., V] in bf16, fp16 or fp32, of any strides, and targets [...] in int32 or int64.

    The logits are read once forward; backward reads them once and writes their gradient. Losses are fp32 whatever the
    logits are. Returns the loss, or a `CrossEntropy` with it if more is asked for.

    - `class_weight` [V]: a weight for each class; a mean divides by the sum of the targets' weights. It has no
      gradient.
    - `ignore_index`: a token with this target is left out: its loss, lse, entropy and gradient are 0, and
      its logits are not read. Any other target that is no column is an IndexError on the CPU, as in PyTorch. On a GPU
      nothing waits to find out: the token's results are NaN and its gradient is 0, as they are in what `weft.capture`
      replays. Nothing outside of the row is ever read.
    - `label_smoothing`: the share of the target that goes to all columns alike. Columns of minus infinity pad the
      vocabulary and get none of it, where PyTorch's loss would be infinite.
    - `z_loss`: each token's loss has `z_loss * lse^2` added, with lse = log(sum(exp(z))).
    - `logit_scale`: logits are multiplied by it first. `softcap`: then they become softcap * tanh(logits / softcap).
      Last they are divided by `temperature`.
    - `reduction`: "mean" over the tokens that have a target, "sum", or "none".
    - `all_ignored`: what the mean is if no token has a target: "zero", with gradients of zero, or "nan" as in PyTorch.
    - `return_lse`, `return_entropy`: lse and the entropy of the softmax for each token, both with gradients, so that
      any loss can be made of them. `return_accuracy`: whether the target has the largest logit (of equal ones, the
      lowest column); reduced like the loss, but without class weights.
    - `inplace`: backward may overwrite the logits with their gradient. Autograd notices if anyone else still needs
      them; a leaf that requires grad, or a view of one, is refused, as PyTorch refuses to change it. Under
      torch.compile, which plans memory itself, the gradient is a new tensor.
    - `shard`: logits are this rank's columns of a vocabulary that is sharded over ranks; target and class_weight are
      of the whole vocabulary and the same on all ranks. The results are the same on all ranks, bit for bit. It takes
      one small all-gather.

    Logits that are a DTensor may be sharded along tokens, along the vocabulary, or both; the results are DTensors,
    those of tokens sharded as the tokens are.

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
        given = {"logits": logits, "class_weight": class_weight}
        local = localize(given, target, {"logits": logits.dim() - 1}, "logits")
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
    of_rank = loss if local is None else loss._replace(reduction="none")
    a = CrossEntropyArgs(logits, target, weight, softmax, of_rank, wanted, inplace)
    if shard is None:
        o = cross_entropy_op(a)
        found = CrossEntropy(o.loss, o.lse, o.entropy, o.accuracy)
    else:
        found = _sharded(a, shard)
    if local is not None:
        found = local.reduced(found, weight, softmax, loss)
    return found.selected(return_lse, return_entropy, return_accuracy)


def _sharded(a: CrossEntropyArgs, shard: VocabShard) -> CrossEntropy:
    """The loss over a sharded vocabulary, from this rank's logits and the weights of all classes."""
    classes = None
    if a.weight is not None and a.wanted.spread:
        classes = a.weight[shard.start : shard.stop]
    with torch.no_grad():
        own = cross_entropy_statistics_op(StatisticsArgs(a.logits, a.target, classes, a.softmax, a.wanted))
        stats = shard.gather(own.stats)
    found = sharded_logprobs_op(
        ShardedArgs(stats, a.logits, a.target, classes, a.softmax, a.wanted, a.inplace)
    )
    return reduced_loss(found, a.target, a.weight, a.softmax, a.loss)


def _check_not_a_leaf(logits: Tensor) -> None:
    """Refuse in-place gradients for a leaf: backward may overwrite what a layer computed, but not the user's input."""
    if torch.compiler.is_compiling() or not (logits.requires_grad and torch.is_grad_enabled()):
        return
    base = logits._base
    if logits.is_leaf or (base is not None and base.is_leaf and base.requires_grad):
        raise RuntimeError(
            f"inplace=True would overwrite {'a leaf' if logits.is_leaf else 'a view of a leaf'} that requires grad "
            "with its gradient: give it logits that a layer computed, or leaf.clone(), or leave inplace=False"
        )


def _check_inplace(logits: Tensor) -> None:
    """Refuse logits that share memory with each other, or have strides that the kernel cannot follow."""
    rows, inner, outer_stride, inner_stride = row_strides(logits)
    apart = outer_stride >= (inner - 1) * inner_stride + logits.shape[-1]
    if rows is not logits or not apart or (inner > 1 and inner_stride < logits.shape[-1]):
        raise ValueError(
            "inplace=True needs logits whose rows are contiguous and do not overlap, at one or two strides; "
            f"got the shape {tuple(logits.shape)} with the strides {logits.stride()}"
        )
