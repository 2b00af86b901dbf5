"""Mutants of the kernels that verify drafts; see `tests.ops.norm.mutants` for the format."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE = "ops/sampling/verify/kernels.py"
LAUNCH, OP, LOADS = "ops/sampling/verify/launch.py", "ops/sampling/verify/verify.py", "ops/sampling/loads.py"
A, V = "ops/sampling/test_accept.py::", "ops/sampling/test_verify.py::"
CHAINS, LONG, NO_TOKENS = (
    (f"{A}test_every_pattern_of_right_and_wrong_drafts[3]",),
    (f"{A}test_chains_of_any_length[300]",),
    (f"{A}test_drafts_that_are_no_tokens_are_not_accepted[-1]",),
)
TREES, SHARED, PARENTS, PATH = (
    (f"{A}test_trees[150-False-dtype0]",),
    (f"{A}test_trees[150-True-dtype0]",),
    (f"{A}test_parents_that_are_no_earlier_row",),
    (f"{A}test_the_path_lists_rows_to_gather",),
)
ABOVE = (f"{V}test_a_logit_far_above_the_others",)
ONLY = (f"{A}test_the_only_child_that_was_chosen_may_be_the_last",)
DEPTHS, RELAXED, TEXTS = (
    (f"{A}test_speculation_with_trees_changes_no_token",),
    (f"{A}test_relaxed_acceptance",),
    (f"{A}test_speculation_with_chains_changes_no_token[3-0.6]",),
)
CHAIN, BLOCK = (
    (f"{V}test_results_are_those_of_the_definition[4-{method}]",) for method in ("chain", "block")
)
PARTS, BLOCK_PARTS = ((f"{V}test_rows_of_several_parts[{method}]",) for method in ("chain", "block"))
MUST, GREEDY, GREEDY_BLOCK = (
    (f"{V}test_every_pattern_of_drafts_that_must_and_cannot_pass[3]",),
    (f"{V}test_greedy_requests_among_others[chain]",),
    (f"{V}test_greedy_requests_among_others[block]",),
)
IGNORED, RANGE = (
    (f"{V}test_vllm_40149_draft_probabilities_count",),
    (f"{V}test_flashinfer_3529_tokens_are_in_range[1025]",),
)
ENDS, ENDS_BLOCK = (
    (f"{V}test_drafts_that_are_no_tokens_end_in_a_draw_from_the_target[9-{method}]",)
    for method in ("chain", "block")
)
NO_ROW, NO_ROW_BLOCK = ((f"{V}test_rows_without_a_distribution[{method}]",) for method in ("chain", "block"))
FAR, LAST, STRIDED, ZERO = (
    (f"{V}test_offsets_have_64_bits",),
    (f"{V}test_the_last_of_many_parts",),
    (f"{V}test_strided_arguments",),
    (f"{V}test_draft_probabilities_of_zero_reject",),
)
DIVIDED, SEEDS, SAME = (
    (f"{V}test_temperatures_divide",),
    (f"{V}test_seeds_and_steps_choose_the_numbers",),
    (f"{V}test_texts_are_distributed_as_the_target_s[chain-the same numbers]",),
)

K = "accept_kernel"
_ACCEPT: list[tuple[Any, ...]] = [
    ("drafts of the first request", K, "request * (nodes - 1), request * parents", "request * 0, request * parents", CHAINS),
    ("choices of the first request", K, "off, drafts_off, parents_off = request * nodes", "off, drafts_off, parents_off = request * 0", CHAINS),
    ("parents of the first request", f"{LAUNCH}:launch_accept", "else nodes - 1", "else 0", TREES),
    ("shared parents for each request", f"{LAUNCH}:launch_accept", "parents.dim() == 1", "parents.dim() == 0", SHARED),
    ("the last block's child", K, "child = tl.minimum(child, tl.min(", "child = tl.minimum(nodes, tl.min(", TREES),
    ("the child's own draft as its row", K, "tl.where(follows, draft + 1, nodes)", "tl.where(follows, draft, nodes)", CHAINS),
    ("any parent", K, "exists & (parent == row) & (drafted", "exists & (drafted", TREES),
    ("any draft", K, "(parent == row) & (drafted == token)", "(parent == row)", CHAINS),
    ("only the first block of drafts", K, "nodes - 1, BLOCK):", "tl.minimum(nodes - 1, row + 1), BLOCK):", ONLY),
    ("children before their parent", K, "& (token >= 0), row, nodes)", "& (token >= 0), row * 0, nodes)", PARENTS),
    ("no choice matches no draft", K, "tl.where(inside & (token >= 0), row, nodes)", "tl.where(inside, row, nodes)", NO_TOKENS),
    ("the last draft skipped", K, "exists = (draft >= 0) & (draft < nodes - 1)", "exists = (draft >= 0) & (draft < nodes - 2)", LONG),
    ("one more accepted", K, "request, length - 1)", "request, length)", CHAINS),
    ("path of tokens", K, "path_ptr + off + at, row)", "path_ptr + off + at, token)", PATH),
    ("depths of children that of their parents", f"{OP}:_depths", "(depth > 0).long()", "(depth > 1).long()", DEPTHS),
    ("depths of grandchildren", f"{OP}:_depths", "range((nodes - 1).bit_length())", "range(1)", DEPTHS),
    ("steps not counted", f"{OP}:_depths", "    depth = torch.arange(nodes, device=device)\n    if", "    depth = torch.arange(nodes, device=device) * 0\n    if", TEXTS),
    ("relaxed past the closing token", f"{OP}:_relax", "near & ~closed & inside", "near & inside", RELAXED),
    ("relaxed from the closing token on", f"{OP}:_relax", "closes.cumsum(-1) - closes.long()", "closes.cumsum(-1)", RELAXED),
    ("relaxed outside", f"{OP}:_relax", "& inside[:, None]", "& (inside[:, None] | True)", RELAXED),
    ("equal logits not in front", f"{OP}:_relax", "(z > own) | ((z == own) & (token < drafts[..., None]))", "z > own", RELAXED),
]  # fmt: skip

K = "statistics_kernel"
_STATISTICS: list[tuple[Any, ...]] = [
    ("only the first part", K, "first = part * LENGTH", "first = part * 0", PARTS),
    ("only the first tile", K, "col = first + start + tl", "col = first + start * 0 + tl", PARTS),
    ("last column skipped", K, "col, col < cols, t", "col, col < cols - 1, t", MUST + GREEDY),
    ("columns past a multiple of 16 skipped", K, "cols = (cols // ALIGN) * ALIGN", "cols = (cols // 16) * 16", CHAIN),
    ("sums not rescaled", K, "total * exp_below(m, m_new)", "total", PARTS),
    ("only the last sum", K, "total = total * exp_below(m, m_new) + tl.sum", "total = 0.0 * total * exp_below(m, m_new) + tl.sum", PARTS),
    ("running maximum not kept", K, "m_new = tl.maximum(m, tl.max(z, axis=0))", "m_new = tl.max(z, axis=0)", ABOVE),
    ("only the last largest", K, "top = tl.maximum(top, tl.max(_keys", "top = tl.maximum(tl.cast(NONE, tl.int64), tl.max(_keys", ABOVE),
    ("the last of equal logits", "_keys", "(_MASK - token.to(tl.int64))", "token.to(tl.int64)", GREEDY),
    ("temperature of the first request", K, "row // target.nodes)", "row * 0)", DIVIDED),
    ("temperature of a row", f"{LOADS}:load_number", "number.ptr + row // number.inner", "number.ptr + row * 0", DIVIDED),
    ("temperature left out", "_load_logits", "return z * (1.0 / tl.where(t > 0.0, t, 1.0))", "return z * 1.0", DIVIDED),
    ("infinities without a probability", "tiles/exponentials.py:exp_below", "tl.where(z == m, 1.0, tl.exp(z - m))", "tl.exp(z - m)", NO_ROW),
    ("rows of the logits at their length", "_load_logits", "row * target.stride, ALIGN", "row * (target.stride // 2), ALIGN", CHAIN),
    ("statistics stored at the row", K, "at = row * parts.number + part", "at = row * parts.number", PARTS),
    ("32-bit offsets", K, "row, part = (tl.program_id(0) // parts.number).to(tl.int64)", "row, part = (tl.program_id(0) // parts.number).to(tl.int32)", FAR),
    ("greedy draws of no token", "_token", "tl.where(key == NONE, -1, _MASK - (key & _MASK))", "_MASK - (key & _MASK)", NO_ROW),
]  # fmt: skip

K = "residual_kernel"
_RESIDUAL: list[tuple[Any, ...]] = [
    ("draft probabilities ignored", "_probabilities", "tl.where(t > 0.0, q, 1.0)", "q * 0.0 + 1.0", IGNORED),
    ("draft probabilities of greedy requests", "_probabilities", "tl.where(t > 0.0, q, 1.0)", "q", GREEDY),
    ("residuals of greedy requests", K, "q = tl.where(t > 0.0, q, 1.0)", "q = q * 1.0", GREEDY_BLOCK),
    ("draft probability of the first draft", "_probabilities", "(request * (target.nodes - 1) + at) * drafts.stride", "(request * (target.nodes - 1)) * drafts.stride", CHAIN),
    ("probability of the first row", "_probabilities", "row = request * target.nodes + at", "row = request * target.nodes", CHAIN),
    ("probabilities not normalized", "_probabilities", "tl.div_rn(exp_below(z, m), total)", "exp_below(z, m)", CHAIN),
    ("only the largest part counts", "_statistics", "* exp_below(m_i, m)", "* (m_i == m).to(tl.float32)", PARTS),
    ("sums of parts not rescaled", "_statistics", "* exp_below(m_i, m)", "", PARTS),
    ("parts past the lanes skipped", "_statistics", "range(0, parts.number, LANES)", "range(0, tl.minimum(parts.number, LANES), LANES)", LAST, 1, 2),
    ("later drafts accepted after a rejected one", K, "if at == i:", "if at <= i:", MUST),
    ("every draft accepted", K, "at += is_accepted.to(tl.int32)", "at += 1", MUST),
    ("accepted below the ratio's complement", K, "* q < p))", "* q > p))", CHAIN),
    ("drafts without a probability accepted", K, "is_accepted = (q > 0.0) & (", "is_accepted = (q >= 0.0) & (", ZERO),
    ("numbers of the first step", "_uniform", "random_bits(seed, step + at, token", "random_bits(seed, step, token", CHAIN),
    ("numbers of one token", "_uniform", "step + at, token, ACCEPT", "step + at, token * 0, ACCEPT", CHAIN),
    ("numbers of drafters", "_uniform", "token, ACCEPT", "token, GUMBEL", CHAIN),
    ("residuals drawn with the numbers of drafters", K, "tl.where(drafted, RESIDUAL, GUMBEL)", "tl.where(drafted, GUMBEL, GUMBEL)", CHAIN + SAME),
    ("targets drawn with the numbers of residuals", K, "tl.where(drafted, RESIDUAL, GUMBEL)", "tl.where(drafted, RESIDUAL, RESIDUAL)", ENDS),
    ("draws of the first step", K, "load_integer(target.step, request) + at + tl.zeros", "load_integer(target.step, request) + tl.zeros", CHAIN),
    ("seeds of the first request", f"{LOADS}:load_integer", "row // integer.inner", "row * 0", CHAIN),
    ("drawn from the target", K, "tl.div_rn(exp_below(z, m), total) - q", "tl.div_rn(exp_below(z, m), total) - 0.0 * q", CHAIN),
    ("residual of the first row", K, "row = request * target.nodes + at", "row = request * target.nodes", CHAIN),
    ("draft probabilities of the first draft subtracted", K, "tl.multiple_of((request * (target.nodes - 1) + at) * drafts.stride, ALIGN)", "tl.multiple_of((request * (target.nodes - 1)) * drafts.stride, ALIGN)", CHAIN),
    ("drafts that are no tokens drawn from something", "_load_draft", "real = (token >= 0) & (token < cols)", "real = token >= 0", ENDS),
    ("negative drafts drawn from something", "_load_draft", "real = (token >= 0) & (token < cols)", "real = token < cols", (f"{V}test_drafts_that_are_no_tokens_end_in_a_draw_from_the_target[-1-chain]",)),
    ("residual without a logarithm", K, "tl.log(tl.where(positive, r, 1.0))", "tl.where(positive, r, 1.0)", CHAIN),
    ("nothing left, nothing drawn", K, "tl.log(tl.where(positive, r, 1.0)), z)", "tl.log(tl.where(positive, r, 1.0)), -float(\"inf\"))", RANGE + ENDS),
    ("tokens without a residual drawn", K, "preferred = positive | (drafted == 0)", "preferred = exists", CHAIN),
    ("greedy requests with noise", K, "score = tl.where(t > 0.0, score + noise, z)", "score = score + noise", GREEDY),
    ("weight of a block 1", K, "weight = tl.where(ratio >= 1.0, 1.0, tl.where(ratio > 0.0, ratio, 0.0))", "weight = tl.where(ratio >= 0.0, 1.0, 1.0)", BLOCK),
    ("weight of a block not limited", K, "tl.where(ratio >= 1.0, 1.0, tl.where(ratio > 0.0, ratio, 0.0))", "tl.where(ratio > 0.0, ratio, 0.0)", BLOCK),
    ("weight of the last draft alone", K, "tl.div_rn(weight * p,", "tl.div_rn(p,", BLOCK),
    ("residual of a block without its weight", K, "r = weight * tl.div_rn", "r = tl.div_rn", BLOCK),
    ("mass of the last tile", K, "mass += tl.sum(", "mass = tl.sum(", BLOCK_PARTS),
    ("best of the last tile", K, "best = tl.maximum(best, tl.max(_keys", "best = tl.maximum(tl.cast(NONE, tl.int64), tl.max(_keys", PARTS),
    ("noise of the first tile", K, "random_tile(seed, step, first + start, TILE", "random_tile(seed, step, first, TILE", PARTS),
    ("noise of the first part", K, "random_tile(seed, step, first + start, TILE", "random_tile(seed, step, start, TILE", PARTS),
    ("only the first part", K, "first = part * LENGTH", "first = part * 0", PARTS),
    ("rows of draft probabilities at their length", K, "drafts.stride, ALIGN", "cols, ALIGN", STRIDED),
]  # fmt: skip

K = "verify_kernel"
_VERIFY: list[tuple[Any, ...]] = [
    ("drafts after the accepted ones", K, "exists = (at < accepted) & (at < nodes - 1)", "exists = at < nodes - 1", CHAIN),
    ("the token after the accepted drafts left out", K, "token = tl.where(at == accepted, _token(best), draft)", "token = draft", CHAIN),
    ("the token in the next place", K, "tl.where(at == accepted, _token", "tl.where(at == accepted + 1, _token", CHAIN),
    ("path without the last row", K, "tl.where(at <= accepted, at, -1)", "tl.where(at < accepted, at, -1)", CHAIN),
    ("drafts of the first request", K, "drafts.ptr + request * (nodes - 1) + at, mask=exists", "drafts.ptr + at, mask=exists", CHAIN),
    ("results of the first request", K, "tokens_ptr + request * nodes + at", "tokens_ptr + at", CHAIN),
    ("only the first part drawn", K, "best_ptr + item * parts + part", "best_ptr + item * parts + part * 0", PARTS),
    ("parts past the lanes not drawn", K, "range(0, parts, LANES)", "range(0, tl.minimum(parts, LANES), LANES)", LAST, 2, 2),
    ("draws of the first row of a block", K, "item = request * nodes + accepted", "item = request * nodes", BLOCK),
    ("a block ends at its first failure", K, "accepted = tl.where(passes, length, accepted).to(tl.int64)", "accepted = tl.where(passes & (accepted == length - 1), length, accepted).to(tl.int64)", BLOCK),
    ("the shortest prefix of a block", K, "tl.where(passes, length, accepted)", "tl.where(passes & (accepted == 0), length, accepted)", BLOCK),
    ("prefixes by their weight alone", K, "tl.where(drafted, share, weight)", "weight", BLOCK),
    ("prefixes by their mass alone", K, "mass + (1.0 - weight), 1.0))", "mass + (1.0 - weight), 1.0)) * 0.0 + mass", BLOCK),
    ("the last prefix by its mass", K, "tl.where(drafted, share, weight)", "share * (1.0 - weight)", BLOCK),
    ("only the first mass", K, "mass_ptr + row * parts + part, mask=part < parts", "mass_ptr + row * parts + part, mask=part < 1", BLOCK_PARTS),
    ("numbers of the next draft", K, "_uniform(target, request, length - 1, last)", "_uniform(target, request, length, last)", BLOCK),
    ("weights of the row before", K, "weight = tl.load(weight_ptr + row)", "weight = tl.load(weight_ptr + row - 1)", BLOCK),
    ("chain in place of a block", f"{LAUNCH}:_Call.__init__", "a.joint", "False", BLOCK),
]  # fmt: skip

LINES = {
    "accept_kernel": _ACCEPT,
    "statistics_kernel": _STATISTICS,
    "residual_kernel": _RESIDUAL,
    "verify_kernel": _VERIFY,
}
