"""Mutants of draws from a linear head, in the format of `tests.ops.norm.mutants`."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE = "ops/loss/linear_logprobs/kernels.py"
DRAWS, LIMITS = "ops/loss/linear_logprobs/draws.py", "ops/sampling/limit_kernels.py"
JOIN, LAUNCH, NOISE = "ops/loss/join.py", "ops/loss/linear_logprobs/launch.py", "tiles/noise.py"
T = "ops/sampling/test_linear_sample.py::"
TOP_K, TOP_ALL = (
    f"{T}test_draws_from_the_largest_are_those_of_logits[dtype1-{limits}]" for limits in ("k", "all")
)
EQUAL, ROWS = f"{T}test_the_first_of_equal_largest", f"{T}test_the_largest_for_each_row"
SHARES, STALE = f"{T}test_draws_from_the_largest_have_their_distribution", f"{T}test_lists_may_hold_anything"
LISTS = f"{T}test_shards_list_their_largest[cuts1-k]"

TOKENS, LAYOUTS = f"{T}test_tokens_have_the_highest_scores[dtype0]", f"{T}test_layouts"
FIRST, NUMBERS = f"{T}test_the_first_of_equal_logits", f"{T}test_logits_that_are_no_numbers[0]"
SHARDS, ODD_SHARDS = (f"{T}test_simulated_shards[cuts{n}-0.7]" for n in range(2))
NOBODY, STEPS = f"{T}test_a_token_of_nobody_across_shards", f"{T}test_steps_and_seeds_make_draws"
STRIDE = f"{T}test_bits_do_not_depend_on_the_stride_of_hidden_states"
STATISTICS = "catalogue/test_workloads.py::test_workload[accuracy-linear_sample_statistics:odd/33-shard:everything:300]"

K, J = "linear_logprobs_kernel", f"{JOIN}:_join_statistics_kernel"
LINES: dict[str, list[tuple[Any, ...]]] = {
    K: [
        ("last of equal scores wins", f"{DRAWS}:best_column", "is_better = top > best.score", "is_better = top >= best.score", (FIRST,)),
        ("last of equal columns of a tile wins", f"{DRAWS}:first_largest", "tl.min(tl.where(score == largest[:, None], col[None, :].to(tl.int32), 2147483647), axis=1)", "tl.max(tl.where(score == largest[:, None], col[None, :].to(tl.int32), -1), axis=1)", (FIRST,)),
        ("no noise", f"{DRAWS}:best_column", "score = part + gumbel(bits)", "score = part + 0.0 * gumbel(bits)", (TOKENS,)),
        ("noise of a tile's first columns", f"{DRAWS}:best_column", "start_col + begin, SLICE", "start_col + first, SLICE", (TOKENS,)),
        ("noise of the shard's own columns", f"{DRAWS}:best_column", "noise.step, start_col + begin", "noise.step, begin", (SHARDS,)),
        ("noise of the shard's own columns, unaligned", f"{DRAWS}:best_column", "(start_col + col)[None, :]", "(0 * start_col + col)[None, :]", (ODD_SHARDS,)),
        ("last columns of a tile not drawn", f"{DRAWS}:best_column", "for i in range(z.shape[1] // SLICE)", "for i in range(z.shape[1] // SLICE - 1)", (TOKENS,)),
        ("score picked", f"{DRAWS}:best_column", "tl.where(col[None, :] == argmax[:, None], part, 0.0)", "tl.where(col[None, :] == argmax[:, None], score, 0.0)", (TOKENS,)),
        ("logit of the last best", f"{DRAWS}:best_column", "tl.where(is_better, at_best, best.z)", "at_best", (TOKENS,)),
        ("score of the last slice", f"{DRAWS}:best_column", "tl.where(is_better, top, best.score)", "top", (TOKENS,)),
        ("seed of the first row", K, "seed_ptr + row * seed_stride", "seed_ptr + row * 0", (TOKENS,)),
        ("step of the first row", K, "step_ptr + row * step_stride", "step_ptr + row * 0", (TOKENS,)),
        ("columns counted from the shard", K, "best = tl.where(best < 0, best, best + start_col)", "best = tl.where(best < 0, best, best)", (SHARDS, STATISTICS)),
        ("total stored as the score", K, "stats_stride, drawn.score, mask=live)", "stats_stride, total, mask=live)", (TOKENS,)),
        ("one seed taken for a row of seeds", f"{LAUNCH}:Choice.noise_strides", "t.numel() == 1 else 1", "t.numel() == 0 else 1", (LAYOUTS,)),
        ("hidden states at odd strides kept", f"{LAUNCH}:Operands.__init__", "self.hidden = contiguous_copy(self.hidden)", "self.hidden = self.hidden", (STRIDE,)),
        ("noise of the least", f"{NOISE}:gumbel", "return -_log(", "return _log(", (TOKENS,)),
        ("noise of another token of a block", f"{NOISE}:random_tile", "tl.join(tl.join(a, c), tl.join(b, d))", "tl.join(tl.join(a, b), tl.join(c, d))", (TOKENS,)),
        ("noise of a block for all its tokens", f"{NOISE}:random_tile", "tl.join(tl.join(a, c), tl.join(b, d))", "tl.join(tl.join(a, a), tl.join(a, a))", (TOKENS,)),
        ("upper half of the step ignored", f"{NOISE}:random_tile", "(step >> 32).to(tl.uint32)", "(step * 0).to(tl.uint32)", (STEPS,)),
        ("what is not above counted", f"{DRAWS}:list_largest", "order = above[:, None] + equals", "order = 0 * above[:, None] + equals", (EQUAL, SHARES)),
        ("a threshold of half as many", f"{DRAWS}:list_largest", "reach >= LISTED", "reach >= LISTED // 2", (SHARES,)),
        ("one bit too few listed", f"{DRAWS}:list_largest", "for _ in range(32):", "for _ in range(12):", (TOP_K, TOP_ALL)),
        ("all ties listed", f"{DRAWS}:list_largest", "(order <= LISTED)", "(order > 0)", (EQUAL,)),
        ("the last of equal logits listed", f"{DRAWS}:list_largest", "equals[:, None] + tl.cumsum(equal, axis=1)", "1000 - equals[:, None]", (EQUAL,)),
        ("ties counted anew in each slice", f"{DRAWS}:list_largest", "equals += tl.sum(equal, axis=1)", "equals += 0 * tl.sum(equal, axis=1)", (EQUAL,)),
        ("places counted anew in each slice", f"{DRAWS}:list_largest", "count += tl.sum(taken, axis=1)", "count += 0 * tl.sum(taken, axis=1)", (TOP_K,)),
        ("lists of the first tile", f"{DRAWS}:list_largest", "first // z.shape[1]) * LISTED", "0 * first) * LISTED", (TOP_K,)),
        ("lists of the first row", f"{DRAWS}:list_largest", "(row.to(tl.int64) * tiles +", "(row.to(tl.int64) * 0 +", (TOP_K,)),
        ("columns listed from the shard", f"{DRAWS}:list_largest", "(start_col + first + i * SLICE", "(first + i * SLICE", (LISTS,)),
        ("rest of a list not written", f"{DRAWS}:list_largest", "(slot >= count[:, None]) & (slot < LISTED)", "(slot >= count[:, None]) & (slot < 0)", (STALE,)),
        ("minus infinity listed", f"{DRAWS}:list_largest", "(part == least[:, None]) & (part > -float(\"inf\"))", "(part == least[:, None])", (EQUAL, LISTS)),
    ],
    "choose_listed_kernel": [
        ("one more of k", f"{LIMITS}:choose_listed_kernel", "load_number(requests.top_k, row).to(tl.int64)", "load_number(requests.top_k, row).to(tl.int64) + 1", (TOP_K, EQUAL)),
        ("top_p left out", f"{LIMITS}:choose_listed_kernel", "top_p < 1.0, 0.0", "top_p < 0.0, 0.0", (ROWS, TOP_ALL)),
        ("top_p of the first row", f"{LIMITS}:choose_listed_kernel", "load_number(requests.top_p, row)", "load_number(requests.top_p, row * 0)", (ROWS,)),
        ("min_p left out", f"{LIMITS}:choose_listed_kernel", "load_number(requests.min_p, row)", "0.0 * load_number(requests.min_p, row)", (TOP_ALL,)),
        ("seed of the first row", f"{LIMITS}:choose_listed_kernel", "load_integer(requests.seed, row)", "load_integer(requests.seed, row * 0)", (TOP_K,)),
        ("places for tokens", f"{LIMITS}:choose_listed_kernel", "tl.load(listed_ptr + row * width + place, mask=exists, other=-1)", "place", (TOP_K,)),
        ("lists of the first row read", f"{LIMITS}:choose_listed_kernel", "value_ptr + row * width", "value_ptr + row * 0", (TOP_K,)),
        ("places of the first row read", f"{LIMITS}:choose_listed_kernel", "place_ptr + row * count", "place_ptr + row * 0", (TOP_ALL,)),
        ("statistics of the first row", f"{LIMITS}:choose_listed_kernel", "out_ptr = stats_ptr + row", "out_ptr = stats_ptr", (TOP_K,)),
        ("logit of another token", f"{LIMITS}:choose_listed_kernel", "tl.store(out_ptr + 2 * stride, drawn.z)", "tl.store(out_ptr + 2 * stride, m)", (TOP_K,)),
        ("all parts but the first", f"{LIMITS}:choose_listed_kernel", "(STATS - 2) * stride, drawn.score)", "(STATS - 2) * stride, drawn.score * 0.0 - float(\"inf\"))", (TOP_K,)),
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
