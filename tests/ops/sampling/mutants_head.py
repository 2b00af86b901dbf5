"""Mutants of draws from a linear head, in the format of `tests.ops.norm.mutants`."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE = "ops/loss/linear_logprobs/kernels.py"
JOIN, LAUNCH, NOISE = "ops/loss/join.py", "ops/loss/linear_logprobs/launch.py", "tiles/noise.py"
T = "ops/sampling/test_linear_sample.py::"

TOKENS, LAYOUTS = f"{T}test_tokens_have_the_highest_scores[dtype0]", f"{T}test_layouts"
FIRST, NUMBERS = f"{T}test_the_first_of_equal_logits", f"{T}test_logits_that_are_no_numbers[0]"
SHARDS, ODD_SHARDS = (f"{T}test_simulated_shards[cuts{n}-0.7]" for n in range(2))
NOBODY, STEPS = f"{T}test_a_token_of_nobody_across_shards", f"{T}test_steps_and_seeds_make_draws"
STRIDE = f"{T}test_bits_do_not_depend_on_the_stride_of_hidden_states"
STATISTICS = "catalogue/test_workloads.py::test_workload[accuracy-linear_sample_statistics:odd/33-shard:everything:300]"

K, J = "linear_logprobs_kernel", f"{JOIN}:_join_statistics_kernel"
LINES: dict[str, list[tuple[Any, ...]]] = {
    K: [
        ("last of equal scores wins", "_drawn", "is_better = top > drawn.score", "is_better = top >= drawn.score", (FIRST,)),
        ("last of equal columns of a tile wins", "_first_largest", "tl.min(tl.where(score == largest[:, None], col[None, :].to(tl.int32), 2147483647), axis=1)", "tl.max(tl.where(score == largest[:, None], col[None, :].to(tl.int32), -1), axis=1)", (FIRST,)),
        ("no noise", "_drawn", "score = part + gumbel(bits)", "score = part + 0.0 * gumbel(bits)", (TOKENS,)),
        ("noise of a tile's first columns", "_drawn", "start_col + begin, SLICE", "start_col + first, SLICE", (TOKENS,)),
        ("noise of the shard's own columns", "_drawn", "noise.step, start_col + begin", "noise.step, begin", (SHARDS,)),
        ("noise of the shard's own columns, unaligned", "_drawn", "(start_col + col)[None, :]", "(0 * start_col + col)[None, :]", (ODD_SHARDS,)),
        ("last columns of a tile not drawn", "_drawn", "for i in range(SLICES)", "for i in range(SLICES - 1)", (TOKENS,)),
        ("score picked", "_drawn", "tl.where(col[None, :] == argmax[:, None], part, 0.0)", "tl.where(col[None, :] == argmax[:, None], score, 0.0)", (TOKENS,)),
        ("logit of the last best", "_drawn", "tl.where(is_better, at_best, drawn.z)", "at_best", (TOKENS,)),
        ("score of the last slice", "_drawn", "tl.where(is_better, top, drawn.score)", "top", (TOKENS,)),
        ("seed of the first row", K, "seed_ptr + row * seed_stride", "seed_ptr + row * 0", (TOKENS,)),
        ("step of the first row", K, "step_ptr + row * step_stride", "step_ptr + row * 0", (TOKENS,)),
        ("columns counted from the shard", K, "best = tl.where(best < 0, best, best + start_col)", "best = tl.where(best < 0, best, best)", (SHARDS, STATISTICS)),
        ("total stored as the score", K, "stats_stride, drawn.score, mask=live)", "stats_stride, total, mask=live)", (TOKENS,)),
        ("one seed taken for a row of seeds", f"{LAUNCH}:Choice.noise_strides", "t.numel() == 1 else 1", "t.numel() == 0 else 1", (LAYOUTS,)),
        ("hidden states at odd strides kept", f"{LAUNCH}:Operands.__init__", "self.hidden = self.hidden.clone(memory_format=torch.contiguous_format)", "self.hidden = self.hidden", (STRIDE,)),
        ("noise of the least", f"{NOISE}:gumbel", "return -_log(", "return _log(", (TOKENS,)),
        ("noise of another token of a block", f"{NOISE}:random_tile", "tl.join(tl.join(a, c), tl.join(b, d))", "tl.join(tl.join(a, b), tl.join(c, d))", (TOKENS,)),
        ("noise of a block for all its tokens", f"{NOISE}:random_tile", "tl.join(tl.join(a, c), tl.join(b, d))", "tl.join(tl.join(a, a), tl.join(a, a))", (TOKENS,)),
        ("upper half of the step ignored", f"{NOISE}:random_tile", "(step >> 32).to(tl.uint32)", "(step * 0).to(tl.uint32)", (STEPS,)),
    ],
    "_join_statistics_kernel": [
        ("last of equal scores of parts wins", J, "best = tl.where(highest2 > highest, argmax, best)", "best = tl.where(highest2 >= highest, argmax, best)", (FIRST,)),
        ("logit of the last part", J, "picked = tl.where(highest2 > highest, picked2, picked)", "picked = picked2", (TOKENS,)),
        ("score of the last part", J, "highest = tl.maximum(highest, highest2)", "highest = highest2", (TOKENS,)),
        ("a log-probability without a token", J, "live = best >= 0", "live = best >= -1", (NOBODY, NUMBERS)),
        ("score of a shard not stored", J, "tl.store(out_ptr + (STATS - 2) * stride, highest, mask=exists)", "tl.store(out_ptr + (STATS - 2) * stride, 0.0 * highest, mask=exists)", (SHARDS,)),
        ("token of the first row", J, "tl.store(token_ptr + row,", "tl.store(token_ptr + row * 0,", (TOKENS,)),
    ],
}  # fmt: skip
