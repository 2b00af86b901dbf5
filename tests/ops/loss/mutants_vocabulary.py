"""The ways in which the joining of a vocabulary's parts is broken; the lines are those of `mutants`."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE = "ops/loss/join.py"
L = "ops/loss/test_linear_logprobs.py::"
T = "ops/loss/test_vocabulary.py::"

PLAIN = f"{L}test_logprobs_entropy_and_lse[dtype0]"
SMOOTH, SUM = f"{L}test_smoothing_with_ignored_tokens[none]", f"{L}test_smoothing_with_ignored_tokens[sum]"
EQUALS = f"{L}test_accuracy_takes_the_first_of_equals"
EACH, EMPTY, PADDED, SHIFTED = (
    f"{T}test_pretended_ranks[3-{name}]"
    for name in ("each token", "empty shards", "padding shard", "shifted up")
)
ACROSS = f"{T}test_equals_across_ranks_and_in_one"
SCALED = f"{L}test_all_results_of_scaled_logits[None]"
STATISTICS = (
    "catalogue/test_workloads.py::test_workload[accuracy-linear_statistics:odd/33-shard:everything:300]"
)

K = "_join_statistics_kernel"
LINES: dict[str, list[tuple[Any, ...]]] = {
    K: [
        ("one part alone", K, "for part in range(parts)", "for part in range(1)", (PLAIN,)),
        ("picked of the last part", K, "picked += tl.load", "picked = tl.load", (PLAIN,)),
        ("no moments", K, "moment2 = tl.load(in_ptr + FEW * apart", "moment2 = 0.0 * tl.load(in_ptr + FEW * apart", (PLAIN,)),
        ("ignored tokens NaN", K, "tl.where(y == ignore_index, 0.0", "tl.where(y != ignore_index, 0.0", (SMOOTH,)),
        ("results by number", K, "tl.store(logprob_ptr + row,", "tl.store(logprob_ptr + number,", (SMOOTH,)),
        ("lse without its total", K, "tl.store(lse_ptr + row, tl.where(live, largest + log_total", "tl.store(lse_ptr + row, tl.where(live, largest", (PLAIN,)),
        ("entropy of another sign", K, "log_total - moment / total", "log_total + moment / total", (PLAIN,)),
        ("smoothing of the last part", K, "below += tl.where(there2", "below = tl.where(there2", (EACH, SUM)),
        ("sums not brought down", K, "below + mass * (largest - joined), 0.0)", "below, 0.0)", (EACH,)),
        ("a part's sums not brought down", K, "below2 + mass2 * (largest2 - joined), 0.0)", "below2, 0.0)", (EACH,)),
        ("counts of the last part", K, "there += there2", "there = there2", (EACH, SUM)),
        ("the mass of the last part", K, "mass += mass2", "mass = mass2", (EACH, SUM)),
        ("the last part's best", K, "tl.where(largest2 > largest, at, best)", "tl.where(largest2 >= largest, at, best)", (EQUALS,)),
        ("totals by number", K, "tl.store(total_ptr + row,", "tl.store(total_ptr + number,", (SMOOTH,)),
        ("moments not moved", "tiles/softmax.py:merge_moments", "moment2 + down2 * total2", "moment2", (PLAIN,)),
        ("totals not scaled", "tiles/softmax.py:merge_moments", "total * factor + total2 * factor2", "total + total2", (PLAIN,)),
        ("targets past the vocabulary", K, "(y >= 0) & (y < vocab)\n    largest", "(y >= 0) & (y < vocab + 9)\n    largest", (EACH,)),
        ("ignored tokens live", K, "exists & (y != ignore_index) & (y >= 0)", "exists & (y >= -100)", (EACH,)),
        ("statistics by number", K, "out_ptr = joined_ptr + row", "out_ptr = joined_ptr + number", (STATISTICS,)),
        ("statistics in another order", K, "tl.store(out_ptr + 2 * apart, picked, mask=exists)", "tl.store(out_ptr + 2 * apart, total, mask=exists)", (STATISTICS,)),
        ("no moment is handed on", K, "tl.store(out_ptr + FEW * apart, moment, mask=exists)", "tl.store(out_ptr + FEW * apart, 0.0 * moment, mask=exists)", (STATISTICS,)),
        ("no best is handed on", K, "tl.store(out_ptr + (STATS - 1) * apart, best.to(tl.float32, bitcast=True), mask=exists)", "tl.store(out_ptr + (STATS - 1) * apart, (best + 1).to(tl.float32, bitcast=True), mask=exists)", (STATISTICS,)),
        ("squares of the last part", "tiles/softmax.py:merge_squares", "return squares * tl.exp(2.0 * (largest - joined)) +", "return", (SCALED,)),
        ("a part's squares not brought down", "tiles/softmax.py:merge_squares", "squares2 * tl.exp(2.0 * (largest2 - joined))", "squares2", (SCALED,)),
        ("squares not brought down", "tiles/softmax.py:merge_squares", "return squares * tl.exp(2.0 * (largest - joined)) +", "return squares +", (SCALED,)),
        ("squares of numbers that add up to more", K, "tl.log(squares) - 2.0 * log_total", "tl.log(squares) - log_total", (SCALED,)),
        ("no squares are handed on", K, "tl.store(out_ptr + (FEW + ENTROPY + 3 * SPREAD) * apart, squares, mask=exists)", "tl.store(out_ptr + (FEW + ENTROPY + 3 * SPREAD) * apart, 0.0 * squares, mask=exists)", (STATISTICS,)),
        ("smoothing without the largest", K, "spread = (mass * log_total - below) / there", "spread = (mass * log_total) / there", (EACH,)),
    ],
    "cross_entropy_kernel": [
        ("every shard the first", "ops/loss/cross_entropy/kernels.py:_target_of", "tl.where(here, y, start_col) - start_col", "tl.where(here, y, start_col)", (EACH,)),
        ("targets of other shards", "ops/loss/cross_entropy/kernels.py:_target_of", "(y >= start_col) & (y < start_col + cols)", "(y >= start_col)", (EACH,)),
        ("best without the shard's begin", "ops/loss/cross_entropy/kernels.py:cross_entropy_kernel", "tl.where(at == 2147483647, -1, at + start_col)", "tl.where(at == 2147483647, -1, at)", (ACROSS,)),
        ("the last of equals", "ops/loss/cross_entropy/kernels.py:_first_largest", "tl.minimum(best, at)", "tl.maximum(best, at)", (ACROSS,)),
        ("the last lane's best", "ops/loss/cross_entropy/kernels.py:cross_entropy_kernel", "at = tl.min(tl.where(largest == row_largest, best, 2147483647), axis=0)", "at = tl.min(best, axis=0)", (ACROSS,)),
        ("sums from another origin", "ops/loss/cross_entropy/kernels.py:cross_entropy_kernel", "row_below + row_mass * (origin - row_largest), 0.0)", "row_below, 0.0)", (EACH,)),
        ("sums of large numbers", "ops/loss/cross_entropy/kernels.py:cross_entropy_kernel", "origin = tl.where((y < 0) & (first > -float(\"inf\")), first, origin)", "origin = tl.where(first > -float(\"inf\"), 0.0 * first, origin)", (SHIFTED,)),
        ("a moment is an entropy", "ops/loss/cross_entropy/kernels.py:cross_entropy_kernel", "tl.store(out_ptr + FEW * apart, row_moment)", "tl.store(out_ptr + FEW * apart, -row_moment)", (EACH,)),
    ],
    "cross_entropy_backward_kernel": [
        ("no gradient of the spread", "ops/loss/cross_entropy/kernels.py:cross_entropy_backward_kernel", "g = tl.load(dspread_ptr + row * dspread_stride).to(tl.float32)", "g = 0.0 * tl.load(dspread_ptr + row * dspread_stride).to(tl.float32)", (EACH,)),
        ("class weights twice", "ops/loss/cross_entropy/kernels.py:cross_entropy_backward_kernel", "if weight_ptr is not None and dspread_ptr is None:", "if weight_ptr is not None:", (f"{T}test_pretended_ranks[3-float32, weighted]",)),
        ("the loss's gradient for the spread's", "ops/loss/cross_entropy/kernels.py:cross_entropy_backward_kernel", "if smooth_ptr is not None and dspread_ptr is None:", "if smooth_ptr is not None:", (EACH,)),
    ],
    "linear_logprobs_kernel": [
        ("every shard the first", "ops/loss/linear_logprobs/kernels.py:_column", "tl.where(inside, y, start_col) - start_col", "tl.where(inside, y, start_col)", (STATISTICS,)),
        ("targets of the next shard", "ops/loss/linear_logprobs/kernels.py:_column", "(y >= start_col) & (y < start_col + vocab)", "(y >= start_col)", (STATISTICS,)),
        ("best without the shard's begin", "ops/loss/linear_logprobs/kernels.py:linear_logprobs_kernel", "tl.where(best < 0, best, best + start_col)", "tl.where(best < 0, best, best)", (STATISTICS,)),
        ("sums without their largest", "ops/loss/linear_logprobs/kernels.py:linear_logprobs_kernel", "weighted - mass * largest, 0.0)", "weighted, 0.0)", (STATISTICS, SUM)),
    ],
    "linear_factors_kernel": [
        ("labels of the whole vocabulary", "ops/loss/linear_logprobs/kernels.py:linear_factors_kernel", "_column(y, start_col, vocab)", "_column(y, 0 * start_col, vocab)", (f"{T}test_pretended_heads[3]",)),
    ],
}  # fmt: skip
