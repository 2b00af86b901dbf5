"""The kernel that joins the statistics of vocabulary splits, and constants that the loss kernels share."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ...language import tl
from ...runtime import BoundLaunch, Capabilities, Launch, capabilities_of, choice, kernel, remembered
from ...tiles.softmax import LOWEST, merge_moments, merge_squares
from .statistics import LinearSampled, Softmax, Statistics, TokenResults, Wanted

# Transformation of the logits before the softmax.
PLAIN = tl.constexpr(0)
SCALED = tl.constexpr(1)
CAPPED = tl.constexpr(2)

FEW = tl.constexpr(3)  # statistics that are always computed: largest, total, picked
DRAWN = tl.constexpr(2)  # those of drawn targets besides: highest, best


class JoinConfig(NamedTuple):
    """Launch configuration of kernels over token statistics: each program handles `rows` tokens."""

    rows: int
    num_warps: int


@choice("statistics", rows=(32, 1024), num_warps=(1, 16))
def join_config(kernel: str, target: Capabilities) -> JoinConfig:
    """Return the configuration of the kernel "join" (statistics of splits) or "factors" (gradient of logits)."""
    return JoinConfig(128, 4)


class Scaling(NamedTuple):
    """Softcap and scale that a kernel applies to logits before the softmax."""

    softcap: Any
    scale: Any
    KIND: Any  # PLAIN, SCALED or CAPPED


@kernel
def _join_statistics_kernel(
    stats_ptr,  # fp32 [parts, STATS, rows]
    target_ptr,  # [rows], or None if the parts drew targets
    order_ptr,  # int32 [rows + 1], the order of the tokens in stats; None if stats has them in their own order
    joined_ptr,  # fp32 [STATS, rows], output for joined statistics; None to write results instead
    token_ptr,  # int64 [rows], output for the drawn targets, or None
    # Results, fp32 [rows] each, or None
    logprob_ptr,
    lse_ptr,
    entropy_ptr,
    spread_ptr,
    hit_ptr,
    log_sum_squares_ptr,
    largest_ptr,
    total_ptr,
    shares_ptr,  # [2, rows]: sum(w) / V and 1 / V
    rows,
    parts,
    vocab,
    ignore_index,
    ENTROPY: tl.constexpr,
    SPREAD: tl.constexpr,
    ACCURACY: tl.constexpr,
    SQUARES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Join the statistics of all parts in order, and store either them or the results computed from them."""
    IS_DRAWN: tl.constexpr = target_ptr is None
    STATS: tl.constexpr = FEW + ENTROPY + 3 * SPREAD + SQUARES + ACCURACY + DRAWN * IS_DRAWN
    position = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    stride = rows.to(tl.int64)  # int64: multiples of it may exceed 32 bits
    exists = position < rows
    row = position
    if order_ptr is not None:
        row = tl.load(order_ptr + position, mask=exists, other=0).to(tl.int64)
    live = exists
    if not IS_DRAWN:
        y = tl.load(target_ptr + row, mask=exists, other=0)
        if order_ptr is not None:
            live = position < tl.load(order_ptr + rows)
        else:
            live = exists & (y != ignore_index) & (y >= 0) & (y < vocab)
    largest = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    picked = tl.zeros((ROWS,), tl.float32)
    below = tl.zeros((ROWS,), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    there = tl.zeros((ROWS,), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    best = tl.full((ROWS,), -1, tl.int32)
    for part in range(parts):
        in_ptr = stats_ptr + tl.cast(part, tl.int64) * STATS * stride + position
        largest2 = tl.load(in_ptr, mask=live, other=LOWEST)
        total2 = tl.load(in_ptr + stride, mask=live, other=0.0)
        picked2 = tl.load(in_ptr + 2 * stride, mask=live, other=0.0)
        moment2 = tl.zeros((ROWS,), tl.float32)
        if ENTROPY:
            moment2 = tl.load(in_ptr + FEW * stride, mask=live, other=0.0)
        if SPREAD:
            more_ptr = in_ptr + (FEW + ENTROPY) * stride
            below2 = tl.load(more_ptr, mask=live, other=0.0)
            mass2 = tl.load(more_ptr + stride, mask=live, other=0.0)
            there2 = tl.load(more_ptr + 2 * stride, mask=live, other=0.0)
            joined = tl.maximum(largest, largest2)
            # Without columns mass is 0 and the difference may be minus infinity, so their product would be NaN.
            below = tl.where(there > 0.0, below + mass * (largest - joined), 0.0)
            below += tl.where(there2 > 0.0, below2 + mass2 * (largest2 - joined), 0.0)
            mass += mass2
            there += there2
        if SQUARES:
            squares2 = tl.load(in_ptr + (FEW + ENTROPY + 3 * SPREAD) * stride, mask=live, other=0.0)
            squares = merge_squares(largest, squares, largest2, squares2)
        if ACCURACY or IS_DRAWN:
            argmax = tl.load(in_ptr + (STATS - 1) * stride, mask=live, other=0.0).to(tl.int32, bitcast=True)
        if IS_DRAWN:
            highest2 = tl.load(in_ptr + (STATS - 2) * stride, mask=live, other=-float("inf"))
            picked = tl.where(highest2 > highest, picked2, picked)
            best = tl.where(highest2 > highest, argmax, best)
            highest = tl.maximum(highest, highest2)
        else:
            picked += picked2
        if ACCURACY:
            best = tl.where(largest2 > largest, argmax, best)
        largest, total, moment = merge_moments(largest, total, moment, largest2, total2, moment2)
    if joined_ptr is not None:
        out_ptr = joined_ptr + row
        tl.store(out_ptr, largest, mask=exists)
        tl.store(out_ptr + stride, total, mask=exists)
        tl.store(out_ptr + 2 * stride, picked, mask=exists)
        if ENTROPY:
            tl.store(out_ptr + FEW * stride, moment, mask=exists)
        if SPREAD:
            tl.store(out_ptr + (FEW + ENTROPY) * stride, below, mask=exists)
            tl.store(out_ptr + (FEW + ENTROPY + 1) * stride, mass, mask=exists)
            tl.store(out_ptr + (FEW + ENTROPY + 2) * stride, there, mask=exists)
        if SQUARES:
            tl.store(out_ptr + (FEW + ENTROPY + 3 * SPREAD) * stride, squares, mask=exists)
        if IS_DRAWN:
            tl.store(out_ptr + (STATS - 2) * stride, highest, mask=exists)
        if ACCURACY or IS_DRAWN:
            tl.store(out_ptr + (STATS - 1) * stride, best.to(tl.float32, bitcast=True), mask=exists)
    else:
        log_total = tl.log(total)
        if IS_DRAWN:
            live = best >= 0
            missing = float("nan")
            tl.store(token_ptr + row, best.to(tl.int64), mask=exists)
        else:
            missing = tl.where(y == ignore_index, 0.0, float("nan"))
            tl.store(lse_ptr + row, tl.where(live, largest + log_total, missing), mask=exists)
            tl.store(largest_ptr + row, tl.where(live, largest, 0.0), mask=exists)
            tl.store(total_ptr + row, tl.where(live, total, 1.0), mask=exists)
        tl.store(logprob_ptr + row, tl.where(live, (picked - largest) - log_total, missing), mask=exists)
        if ENTROPY:
            tl.store(entropy_ptr + row, tl.where(live, log_total - moment / total, missing), mask=exists)
        if SPREAD:
            spread = (mass * log_total - below) / there
            tl.store(spread_ptr + row, tl.where(live, spread, missing), mask=exists)
            tl.store(shares_ptr + row, tl.where(live, mass / there, 0.0), mask=exists)
            tl.store(shares_ptr + rows + row, tl.where(live, 1.0 / there, 0.0), mask=exists)
        if SQUARES:
            log_sum_squares = tl.log(squares) - 2.0 * log_total
            tl.store(log_sum_squares_ptr + row, tl.where(live, log_sum_squares, missing), mask=exists)
        if ACCURACY:
            tl.store(hit_ptr + row, tl.where(live & (best == y.to(tl.int32)), 1.0, 0.0), mask=exists)


@remembered
def _join_launch(
    rows: int, parts: int, vocab: int, ignore_index: int, wanted: Wanted, target: Capabilities
) -> BoundLaunch:
    config = join_config("join", target)
    launch = Launch.of(
        _join_statistics_kernel,
        num_warps=config.num_warps,
        ENTROPY=wanted.entropy,
        SPREAD=wanted.spread,
        ACCURACY=wanted.accuracy,
        SQUARES=wanted.squares,
        ROWS=config.rows,
    )
    return launch.bind(
        (-(-rows // config.rows), 1, 1), rows=rows, parts=parts, vocab=vocab, ignore_index=ignore_index
    )


def launch_join(
    o: TokenResults | Statistics | LinearSampled,
    stats: Tensor,
    target: Tensor | None,
    order: Tensor | None,
    softmax: Softmax,
    wanted: Wanted,
) -> None:
    """Join stats [parts, STATS, T] into statistics or results; `order`, if not None, is the order of their tokens.
    Without a target, the parts drew one."""
    outputs: dict[str, Tensor | None]
    if isinstance(o, Statistics):
        outputs = {"joined_ptr": o.stats}
    elif isinstance(o, LinearSampled):
        outputs = {"token_ptr": o.tokens, "logprob_ptr": o.logprobs}
    else:
        outputs = {
            "logprob_ptr": o.logprobs,
            "lse_ptr": o.lse,
            "entropy_ptr": o.entropy,
            "spread_ptr": o.spread,
            "hit_ptr": o.hits,
            "log_sum_squares_ptr": o.log_sum_squares,
            "largest_ptr": o.largest,
            "total_ptr": o.total,
            "shares_ptr": o.shares,
        }
    device, (parts, _, rows) = capabilities_of(stats.device), stats.shape
    _join_launch(rows, parts, softmax.vocab, softmax.ignore_index, wanted, device)(
        *_join_statistics_kernel.tensors(stats_ptr=stats, target_ptr=target, order_ptr=order, **outputs)
    )
