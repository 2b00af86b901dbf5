"""Mutants of the routing kernels, in the format of `tests.ops.norm.mutants`."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE = "ops/moe/route/kernels.py"
R = "ops/moe/test_route.py::"

SIZES, SMALL, SIZES_GPU = (
    f"{R}test_sizes[{case}]" for case in ("cpu-300-128-8", "cpu-17-7-3", "sm_90-300-128-8")
)
POST, PRE, DIVIDED, SIGMOID, ROOT = (
    f"{R}test_gradients[{rule}]"
    for rule in ("softmax-post", "softmax-pre", "softmax-renormalized", "sigmoid", "sqrtsoftplus")
)
BIAS, EQUAL = (
    f"{R}test_the_bias_never_affects_the_weights[sigmoid]",
    f"{R}test_every_row_has_k_different_experts[softmax-5]",
)
GROUPED, TWO_BEST = (
    f"{R}test_groups_of_any_size[20-5-2-4]",
    f"{R}test_all_pairs_of_conventions_differ[torchtitan-vllm]",
)
BALANCE = f"{R}test_balance_loss_counts_a_plain_top_k"
PADDED = f"{R}test_layouts[padded]"

LINES: dict[str, list[tuple[Any, ...]]] = {
    "route_kernel": [
        ("the bias in the weights", "route_kernel", "tl.where(hit, value, 0.0)", "tl.where(hit, choice, 0.0)", (BIAS,)),
        ("scores stored only to the first rows", "route_kernel", "tl.multiple_of(row * ((experts // ALIGN) * ALIGN), ALIGN)", "tl.multiple_of((row % ROWS) * ((experts // ALIGN) * ALIGN), ALIGN)", (SIZES,)),
        ("logits for scores", "route_kernel", "expert[None, :], s, mask=mask)", "expert[None, :], x, mask=mask)", (POST,)),
        ("highest index wins among equal scores", "route_kernel", "_, best_at = best_of(key, position[None, :], 1)  # [ROWS]", "_, best_at = best_of(key, -position[None, :], 1); best_at = -best_at  # [ROWS]", (EQUAL,)),
        ("last choice skipped", "route_kernel", "for j in range(k):\n            _, best_at", "for j in range(k - 1):\n            _, best_at", (SIZES,)),
        ("positions stored as experts", "route_kernel", "((best_at // TILE) * group_size + best_at % TILE).to(tl.int32)", "best_at", (GROUPED,)),
        ("not renormalized", "route_kernel", "weights / (tl.sum(weights, axis=1) + eps)[:, None]", "weights / (tl.sum(weights, axis=1) * 0.0 + 1.0)[:, None]", (SIGMOID,)),
        ("scale omitted", "route_kernel", "weights = weights * scale", "weights = weights", (SIGMOID,)),
        ("rows past the end counted", "route_kernel", "chosen = row_mask[:, None] & (key == TAKEN)\n        counts", "chosen = key == TAKEN\n        counts", (SMALL,)),
        ("a group scored by the last of its best", "_in_best_groups", "group_score += number_of(best)", "group_score = number_of(best)", (TWO_BEST,)),
        ("the bias in the counts of the balance loss", "route_kernel", "key_of(value), NOTHING)", "key_of(choice), NOTHING)", (BALANCE,)),
        ("z loss of the logarithm, not its square", "route_kernel", "lse * lse", "lse", (POST,)),
        ("partial sums of all programs overlap", "route_kernel", "total_off = program * experts + expert", "total_off = program * 0 + expert", (SIZES_GPU,)),
    ],
    "route_totals_kernel": [
        ("counts of the last programs only", "route_totals_kernel", "        counts += tl.sum(tl.load(counts_ptr", "        counts = tl.sum(tl.load(counts_ptr", (SIZES_GPU,)),
        ("scores of the last programs only", "route_totals_kernel", "score_sums += tl.sum(tl.load(", "score_sums = tl.sum(tl.load(", (SIZES_GPU,)),
        ("z of the last programs only", "route_totals_kernel", "z_sum += tl.load(", "z_sum = tl.load(", (SIZES_GPU,)),
        ("routed tokens instead of those of a plain top-k", "route_totals_kernel", "tl.load(score_counts_ptr + off", "tl.load(counts_ptr + off", (BALANCE,)),
        ("last program skipped", "route_totals_kernel", "(program < programs)[:, None]", "(program < programs - 1)[:, None]", (SIZES_GPU,)),
        ("z of the last program skipped", "route_totals_kernel", "mask=program < programs, other", "mask=program < programs - 1, other", (SIZES_GPU,)),
        ("last programs skipped", "route_totals_kernel", "range(0, programs, ROWS)", "range(0, programs - ROWS, ROWS)", (SIZES_GPU,)),
        ("previous program", "route_totals_kernel", "(program.to(tl.int64) * experts)", "((program // 2 * 2).to(tl.int64) * experts)", (SIZES_GPU,)),
        ("only the first tile", "route_totals_kernel", "tl.program_id(0) * TILE + tl.arange(0, TILE)", "tl.program_id(0) * 0 + tl.arange(0, TILE)", (SIZES_GPU,)),
        ("the mean over programs, not the sum", "route_totals_kernel", "total_score_sums_ptr + expert, score_sums,", "total_score_sums_ptr + expert, score_sums / programs,", (SIZES_GPU,)),
        ("the largest z, not the sum", "route_totals_kernel", "tl.store(total_z_ptr, tl.sum(z_sum, axis=0))", "tl.store(total_z_ptr, tl.max(z_sum, axis=0))", (SIZES_GPU,)),
    ],
    "route_backward_kernel": [
        ("gradient of the scores lost with softmax", "route_backward_kernel", "                ds += score_grad\n", "                ds += 0.0 * score_grad\n", (PRE,)),
        ("gradient of the scores lost with sigmoid", "route_backward_kernel", "        if dscores_ptr is not None:\n            ds += score_grad\n        if SCORE", "        if dscores_ptr is not None:\n            ds += 0.0 * score_grad\n        if SCORE", (SIGMOID,)),
        ("gradient of the scores read as if contiguous", "route_backward_kernel", "row * dscores_stride", "row * experts", (PADDED,)),
        ("no gradient of the scores alone after a choice", "route_backward_kernel", "dscores_ptr is not None or dscore_sums_ptr is not None", "dscore_sums_ptr is not None", (f"{R}test_gradients_of_some_outputs[softmax-post-names1]",)),
        ("scale omitted", "route_backward_kernel", "gradient[:, None] * scale", "gradient[:, None]", (SIGMOID,)),
        ("last slot skipped", "route_backward_kernel", "for j in range(k):\n            index =", "for j in range(k - 1):\n            index =", (SIGMOID,)),
        ("logits as if contiguous", "route_backward_kernel", "\n    off = tl.multiple_of(row * stride, ALIGN)", "\n    off = tl.multiple_of(row * experts, ALIGN)", (PADDED,)),
        ("a softmax after the choice over all", "route_backward_kernel", "tl.where(chosen != 0, x, -float(\"inf\"))", "tl.where(chosen >= 0, x, -float(\"inf\"))", (POST,)),
        ("weights' gradient overwritten by the balance loss's", "route_backward_kernel", "dx += s * (ds", "dx = s * (ds", (POST,)),
        ("a softmax's sum with the wrong sign", "route_backward_kernel", "(ds - tl.sum(s * ds, axis=1)[:, None])", "(ds + tl.sum(s * ds, axis=1)[:, None])", (PRE,)),
        ("half the gradient of z with softmax", "route_backward_kernel", "2.0 * lse[:, None] * s", "lse[:, None] * s", (POST,)),
        ("shares' sum with the wrong sign", "route_backward_kernel", "(share_grad - tl.sum(", "(share_grad + tl.sum(", (SIGMOID,)),
        ("sigmoid for 1 - sigmoid", "route_backward_kernel", "s * sigmoid(-x)", "s * sigmoid(x)", (SIGMOID,)),
        ("derivative of the root without its 2", "route_backward_kernel", "sigmoid(x) / (2.0 * tl.where(", "sigmoid(x) / (1.0 * tl.where(", (ROOT,)),
        ("sum treated as a constant in the gradient", "_normalization_gradient", "(ds - tl.sum(ds * s, axis=1)[:, None] / total)", "ds", (DIVIDED,)),
    ],
}  # fmt: skip
