"""Mutants of the kernels that join the parts of a vocabulary, in the format of `tests.ops.norm.mutants`."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE = "ops/loss/join.py"
L = "ops/loss/test_linear_logprobs.py::"
T = "ops/loss/test_vocabulary.py::"

PLAIN = f"{L}test_logprobs_entropy_and_lse[dtype0]"
SMOOTH, SUM = f"{L}test_smoothing_with_ignored_tokens[none]", f"{L}test_smoothing_with_ignored_tokens[sum]"
EQUALS = f"{L}test_accuracy_takes_the_first_of_equal_logits"
EACH, EMPTY, PADDED, SHIFTED = (
    f"{T}test_simulated_ranks[3-{name}]"
    for name in ("each token", "empty shards", "padding shard", "shifted up")
)
ACROSS = f"{T}test_accuracy_of_equal_logits_across_ranks"
SCALED = f"{L}test_all_results_of_scaled_logits[None]"
STATISTICS = (
    "catalogue/test_workloads.py::test_workload[accuracy-linear_statistics:odd/33-shard:everything:300]"
)

K = "_join_statistics_kernel"
LINES: dict[str, list[tuple[Any, ...]]] = {
    K: [
        ("only the first part", K, "for part in range(parts)", "for part in range(1)", (PLAIN,)),
        ("picked of the last part only", K, "picked += picked2", "picked = picked2", (PLAIN,)),
        ("moments omitted", K, "moment2 = tl.load(in_ptr + FEW * stride", "moment2 = 0.0 * tl.load(in_ptr + FEW * stride", (PLAIN,)),
        ("ignored tokens NaN", K, "tl.where(y == ignore_index, 0.0", "tl.where(y != ignore_index, 0.0", (SMOOTH,)),
        ("results stored by position", K, "tl.store(logprob_ptr + row,", "tl.store(logprob_ptr + position,", (SMOOTH,)),
        ("lse without its total", K, "tl.store(lse_ptr + row, tl.where(live, largest + log_total", "tl.store(lse_ptr + row, tl.where(live, largest", (PLAIN,)),
        ("moment with the wrong sign", K, "log_total - moment / total", "log_total + moment / total", (PLAIN,)),
        ("smoothing of the last part only", K, "below += tl.where(there2", "below = tl.where(there2", (EACH, SUM)),
        ("sums not rescaled", K, "below + mass * (largest - joined), 0.0)", "below, 0.0)", (EACH,)),
        ("sums of a part not rescaled", K, "below2 + mass2 * (largest2 - joined), 0.0)", "below2, 0.0)", (EACH,)),
        ("counts of the last part only", K, "there += there2", "there = there2", (EACH, SUM)),
        ("mass of the last part only", K, "mass += mass2", "mass = mass2", (EACH, SUM)),
        ("last part wins among equal logits", K, "tl.where(largest2 > largest, argmax, best)", "tl.where(largest2 >= largest, argmax, best)", (EQUALS,)),
        ("totals stored by position", K, "tl.store(total_ptr + row,", "tl.store(total_ptr + position,", (SMOOTH,)),
        ("moments not rescaled", "tiles/softmax.py:merge_moments", "moment_j + down_j * l_j", "moment_j", (PLAIN,)),
        ("totals not rescaled", "tiles/softmax.py:merge_moments", "l_i * alpha + l_j * alpha_j", "l_i + l_j", (PLAIN,)),
        ("targets past the vocabulary accepted", K, "(y >= 0) & (y < vocab)", "(y >= 0) & (y < vocab + 9)", (EACH,)),
        ("ignored tokens counted as live", K, "exists & (y != ignore_index) & (y >= 0)", "exists & (y >= -100)", (EACH,)),
        ("statistics stored by position", K, "out_ptr = joined_ptr + row", "out_ptr = joined_ptr + position", (STATISTICS,)),
        ("total stored as picked", K, "tl.store(out_ptr + 2 * stride, picked, mask=exists)", "tl.store(out_ptr + 2 * stride, total, mask=exists)", (STATISTICS,)),
        ("moment not stored", K, "tl.store(out_ptr + FEW * stride, moment, mask=exists)", "tl.store(out_ptr + FEW * stride, 0.0 * moment, mask=exists)", (STATISTICS,)),
        ("wrong best stored", K, "tl.store(out_ptr + (STATS - 1) * stride, best.to(tl.float32, bitcast=True), mask=exists)", "tl.store(out_ptr + (STATS - 1) * stride, (best + 1).to(tl.float32, bitcast=True), mask=exists)", (STATISTICS,)),
        ("squares of the last part only", "tiles/softmax.py:merge_squares", "return squares * tl.exp(2.0 * (m_i - m_new)) +", "return", (SCALED,)),
        ("squares of a part not rescaled", "tiles/softmax.py:merge_squares", "squares_j * tl.exp(2.0 * (m_j - m_new))", "squares_j", (SCALED,)),
        ("squares not rescaled", "tiles/softmax.py:merge_squares", "return squares * tl.exp(2.0 * (m_i - m_new)) +", "return squares +", (SCALED,)),
        ("squares divided by the total only once", K, "tl.log(squares) - 2.0 * log_total", "tl.log(squares) - log_total", (SCALED,)),
        ("squares not stored", K, "tl.store(out_ptr + (FEW + ENTROPY + 3 * SPREAD) * stride, squares, mask=exists)", "tl.store(out_ptr + (FEW + ENTROPY + 3 * SPREAD) * stride, 0.0 * squares, mask=exists)", (STATISTICS,)),
        ("smoothing without the largest", K, "spread = (mass * log_total - below) / there", "spread = (mass * log_total) / there", (EACH,)),
    ],
    "cross_entropy_kernel": [
        ("first column of the shard ignored", "ops/loss/cross_entropy/kernels.py:_load_target", "tl.where(owned, y, start_col) - start_col", "tl.where(owned, y, start_col)", (EACH,)),
        ("targets of later shards accepted", "ops/loss/cross_entropy/kernels.py:_load_target", "(y >= start_col) & (y < start_col + cols)", "(y >= start_col)", (EACH,)),
        ("best without the shard's first column", "ops/loss/cross_entropy/kernels.py:cross_entropy_kernel", "tl.where(argmax == 2147483647, -1, argmax + start_col)", "tl.where(argmax == 2147483647, -1, argmax)", (ACROSS,)),
        ("last of equal logits wins", "ops/loss/cross_entropy/kernels.py:_update_argmax", "tl.minimum(best, argmax)", "tl.maximum(best, argmax)", (ACROSS,)),
        ("best of any lane", "ops/loss/cross_entropy/kernels.py:cross_entropy_kernel", "argmax = tl.min(tl.where(largest == row_largest, best, 2147483647), axis=0)", "argmax = tl.min(best, axis=0)", (ACROSS,)),
        ("sums from another origin", "ops/loss/cross_entropy/kernels.py:cross_entropy_kernel", "row_below + row_mass * (origin - row_largest), 0.0)", "row_below, 0.0)", (EACH,)),
        ("origin 0 for the sum of a shard's smoothing", "ops/loss/cross_entropy/kernels.py:cross_entropy_kernel", "origin = tl.where((y < 0) & (first > -float(\"inf\")), first, origin)", "origin = tl.where(first > -float(\"inf\"), 0.0 * first, origin)", (SHIFTED,)),
        ("moment stored with the wrong sign", "ops/loss/cross_entropy/kernels.py:cross_entropy_kernel", "tl.store(out_ptr + FEW * stats_stride, row_moment)", "tl.store(out_ptr + FEW * stats_stride, -row_moment)", (EACH,)),
    ],
    "cross_entropy_backward_kernel": [
        ("gradient of the spread omitted", "ops/loss/cross_entropy/kernels.py:cross_entropy_backward_kernel", "g = tl.load(dspread_ptr + row * dspread_stride).to(tl.float32)", "g = 0.0 * tl.load(dspread_ptr + row * dspread_stride).to(tl.float32)", (EACH,)),
        ("class weights applied twice", "ops/loss/cross_entropy/kernels.py:cross_entropy_backward_kernel", "if weight_ptr is not None and dspread_ptr is None:", "if weight_ptr is not None:", (f"{T}test_simulated_ranks[3-float32, weighted]",)),
        ("the loss's gradient for the spread's", "ops/loss/cross_entropy/kernels.py:cross_entropy_backward_kernel", "if smooth_ptr is not None and dspread_ptr is None:", "if smooth_ptr is not None:", (EACH,)),
    ],
    "linear_logprobs_kernel": [
        ("first column of the shard ignored", "ops/loss/linear_logprobs/kernels.py:_column", "tl.where(inside, y, start_col) - start_col", "tl.where(inside, y, start_col)", (STATISTICS,)),
        ("targets of later shards accepted", "ops/loss/linear_logprobs/kernels.py:_column", "(y >= start_col) & (y < start_col + vocab)", "(y >= start_col)", (STATISTICS,)),
        ("best without the shard's first column", "ops/loss/linear_logprobs/kernels.py:linear_logprobs_kernel", "tl.where(best < 0, best, best + start_col)", "tl.where(best < 0, best, best)", (STATISTICS,)),
        ("sums without their largest", "ops/loss/linear_logprobs/kernels.py:linear_logprobs_kernel", "weighted - mass * largest, 0.0)", "weighted, 0.0)", (STATISTICS, SUM)),
    ],
    "linear_factors_kernel": [
        ("labels not relative to the shard", "ops/loss/linear_logprobs/kernels.py:linear_factors_kernel", "_column(y, start_col, vocab)", "_column(y, 0 * start_col, vocab)", (f"{T}test_simulated_heads[3]",)),
    ],
}  # fmt: skip
