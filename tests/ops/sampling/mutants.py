"""Mutants of the kernels that select and draw; see `tests.ops.norm.mutants` for the format."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE = "ops/sampling/draw_kernels.py"
SELECT, LAUNCH, TILES = "ops/sampling/select_kernels.py", "ops/sampling/launch.py", "tiles/select.py"
LIMITS = "ops/sampling/limit_kernels.py"
T, S = "ops/sampling/test_select.py::", "ops/sampling/test_sample.py::"
TIES, EQUAL, NANS, ZEROS, HALF = (
    f"{T}test_ties_and_odd_values[{case}]"
    for case in ("grid-dtype0", "equal-dtype0", "nan-dtype0", "zeros-dtype0", "plain-dtype2")
)
LONG, FEW, TINY = (f"{T}test_lengths[{case}]" for case in ("5000-2048", "33-40", "1-3"))
SPANS, FAR, LAYOUTS, NO_NUMBER = (
    f"{T}{name}"
    for name in (
        "test_spans", "test_offsets_have_64_bits", "test_layouts",
        "test_the_largest_of_a_row_with_nan_is_a_number",
    )
)  # fmt: skip
NEIGHBORS = f"{T}test_ties_and_odd_values[neighbors-dtype0]"
STALE = f"{T}test_scratch_may_hold_columns_of_other_calls[zeros]"
BF16_P, BF16_K = (
    f"{S}test_draws_are_those_of_sorted_rows[dtype1-{limits}]" for limits in ("p near 1", "large k")
)
FLAT_MIN_P = f"{S}test_draws_are_those_of_sorted_rows[dtype0-min p of flat rows]"
FULL, GREEDY, HOT, K, LARGE_K, P, NO_P, NEAR_1, KP, LARGE_KP, JOINT, MIN_P = (
    f"{S}test_draws_are_those_of_sorted_rows[dtype0-{limits}]"
    for limits in (
        "full", "greedy", "hot", "k", "large k", "p", "p of 0", "p near 1", "k, then p", "large k, then p", "joint",
        "min p",
    )
)  # fmt: skip
EACH, KEPT_TIES, FAR_ROWS = (
    f"{S}{name}"
    for name in ("test_of_each_request", "test_ties_are_kept_by_the_lowest_tokens", "test_layouts")
)
BELOW, LARGE_TIES = (
    f"{S}test_limits_below_what_one_tile_passes_on",
    f"{S}test_ties_around_limits_of_long_rows",
)
LONG_JOINT = f"{S}test_limits_far_below_candidates"
ODD_FULL, ODD_K, ODD_P, ODD_ALL, ODD_GREEDY = (
    f"{S}test_odd_rows[{limits}]" for limits in ("full", "k", "p", "all", "greedy")
)

_SELECT: list[tuple[Any, ...]] = [
    ("columns before the span", f"{SELECT}:select_kernel", "(col >= start) & (col < end)", "(col < end)", (SPANS,)),
    ("columns after the span", f"{SELECT}:select_kernel", "(col >= start) & (col < end)", "(col >= start)", (SPANS,)),
    ("the last of equal ones", f"{SELECT}:select_kernel", "first = tl.min(tl.where(exists & (rank == top), col, 2147483647), axis=0)", "first = tl.max(tl.where(exists & (rank == top), col, -1), axis=0)", (EQUAL,)),
    ("NaN is the largest", f"{TILES}:rank_bits", "exists & (x == x), rank,", "exists, rank,", (NANS, NO_NUMBER)),
    ("what does not exist is 0.0", f"{TILES}:rank_bits", "exists & (x == x), rank,", "x == x, rank,", (SPANS, TIES)),
    ("half as many bits", f"{TILES}:rank_bits", ">> (32 - BITS)", ">> (48 - BITS)", (TIES, HALF)),
    ("all rows read from the first", f"{SELECT}:select_kernel", "tl.multiple_of(row * x_stride, ALIGN) + col", "tl.multiple_of(row * 0, ALIGN) + col", (TIES,)),
    ("32-bit offsets", f"{SELECT}:select_kernel", "(tl.program_id(0) // tiles).to(tl.int64)", "(tl.program_id(0) // tiles)", (FAR,)),
    ("only the first tile", f"{SELECT}:select_kernel", "at = tile * TILE", "at = tile * 0", (TIES,)),
    ("one bit too few", f"{TILES}:threshold", "while bit != 0:", "while bit > 1:", (NEIGHBORS,)),
    ("threshold of more than k", f"{TILES}:threshold", "t = tl.where(weighs >= least,", "t = tl.where(weighs > least,", (TIES, LONG)),
    ("all ties taken", f"{TILES}:places", "above | (equal & (equals <= wanted))", "above | equal", (EQUAL,)),
    ("ties in no order", f"{TILES}:places", "wanted = k - tl.sum(above.to(tl.int32), axis=0)", "wanted = k", (TIES,)),
    ("unused slots not written", f"{SELECT}:select_kernel", "(slot >= tl.sum(taken.to(tl.int32), axis=0)) & (slot < k)", "(slot < 0)", (STALE,)),
    ("columns of another row's list", f"{SELECT}:select_kernel", "list_ptr + row * count + at", "list_ptr + at", (f"{T}test_lengths[70001-600]",)),
]  # fmt: skip

_SORT: list[tuple[Any, ...]] = [
    ("ascending", f"{SELECT}:sort_kernel", "tl.sort((key.to(tl.int64) << 31) | low, descending=True)", "tl.sort((key.to(tl.int64) << 31) | low)", (TIES,)),
    ("not sorted", f"{SELECT}:sort_kernel", "tl.sort((key.to(tl.int64) << 31) | low, descending=True)", "(key.to(tl.int64) << 31) | low", (TIES,)),
    ("the last of equal ones first", f"{SELECT}:sort_kernel", "low = tl.where(exists, 2147483647 - col, 0)", "low = tl.where(exists, col, 0)", (TIES,)),
    ("negative above positive", f"{SELECT}:sort_kernel", "key = (rank ^ 0x80000000).to(tl.int32, bitcast=True)", "key = rank.to(tl.int32, bitcast=True)", (TIES,)),
    ("all rows read from the first", f"{SELECT}:sort_kernel", "x_ptr += row * x_stride", "x_ptr += row * 0", (TIES,)),
    ("columns of the first row", f"{SELECT}:sort_kernel", "chosen_ptr + row * count + slot", "chosen_ptr + slot", (TIES,)),
    ("values of the first row overwritten", f"{SELECT}:sort_kernel", "value_ptr + row * k + slot", "value_ptr + slot", (TIES,)),
    ("columns of the first row overwritten", f"{SELECT}:sort_kernel", "index_ptr + row * k + slot", "index_ptr + slot", (TIES,)),
    ("columns that are none are 0", f"{SELECT}:sort_kernel", "tl.where(exists, col, -1)", "tl.where(exists, col, 0)", (FEW, TINY)),
    ("values that are none are 0", f"{SELECT}:sort_kernel", "tl.load(x_ptr + col, mask=exists, other=-float(\"inf\"))", "tl.load(x_ptr + col, mask=exists, other=0.0)", (FEW, TINY)),
    ("32-bit offsets", f"{SELECT}:sort_kernel", "tl.program_id(0).to(tl.int64)", "tl.program_id(0)", (FAR,)),
    ("the last slot left", f"{SELECT}:sort_kernel", "tl.where(exists, col, -1).to(tl.int64), mask=slot < k)", "tl.where(exists, col, -1).to(tl.int64), mask=slot < k - 1)", (TIES,)),
]  # fmt: skip

_DRAW: list[tuple[Any, ...]] = [
    ("no noise", "draw_kernel", "score = z + tl.reshape(noise, (TILE,))", "score = z", (FULL,)),
    ("noise of the first tile", "draw_kernel", "random_tile(seed, step, tile * TILE,", "random_tile(seed, step, tile * 0,", (FULL,)),
    ("steps of the first row", "draw_kernel", "load_integer(requests.step, row)", "load_integer(requests.step, row * 0)", (FULL,)),
    ("seeds of the first row", "draw_kernel", "load_integer(requests.seed, row)", "load_integer(requests.seed, row * 0)", (EACH.replace("test_of_each_request", "test_a_draw_depends_on_its_row_alone[full]"),)),
    ("noise at temperature 0", "temperature_of", "tl.where(t > 0.0, t, 1.0), t > 0.0", "tl.where(t > 0.0, t, 1.0), t >= 0.0", (GREEDY,)),
    ("not scaled", "draw_kernel", "x.to(tl.float32) * inverse", "x.to(tl.float32)", (HOT,)),
    ("minus infinity drawn", "draw_kernel", "exists & (z > -float(\"inf\"))", "exists & (z == z)", (ODD_FULL,)),
    ("NaN left out of the sum", "tiles/exponentials.py:exp_below", "tl.where(z == m, 1.0, tl.exp(z - m))", "tl.where(z == m, 1.0, tl.where(z == z, tl.exp(z - m), 0.0))", (ODD_FULL,)),
    ("an infinite maximum", "tiles/exponentials.py:exp_below", "tl.where(z == m, 1.0, tl.exp(z - m))", "tl.exp(z - m)", (ODD_FULL,)),
    ("noise of another stream", "draw_kernel", "tile * TILE, TILE, GUMBEL)", "tile * TILE, TILE, 1)", (FULL,)),
    ("the last of equal scores", "best_of", "first = tl.min(tl.where(exists & (score == best), token, 2147483647), axis=0)", "first = tl.max(tl.where(exists & (score == best), token, -1), axis=0)", (GREEDY,)),
    ("32-bit offsets", "draw_kernel", "(tl.program_id(0) // tiles).to(tl.int64)", "(tl.program_id(0) // tiles)", (FAR_ROWS,)),
]  # fmt: skip

_JOIN: list[tuple[Any, ...]] = [
    ("tiles of the first row", "join_draws_kernel", "row * tiles + tile, tile < tiles", "tile, tile < tiles", (FULL,)),
    ("the last tile left out", "join_draws_kernel", "row * tiles + tile, tile < tiles", "row * tiles + tile, tile < tiles - 1", (FULL,)),
    ("sums not scaled to the maximum", "joined", "tl.where(m == m_i, total, total * tl.exp(m - m_i))", "total", (FULL,)),
    ("only the tile of the maximum", "joined", "total * tl.exp(m - m_i)", "0.0", (FULL,)),
    ("an infinite maximum of two tiles", "joined", "tl.where(m == m_i, total, total * tl.exp(m - m_i))", "total * tl.exp(m - m_i)", (ODD_FULL,)),
    ("log-probability without its sum", "store_drawn", "below - log_l", "below", (FULL,)),
    ("log-probability of the largest", "store_drawn", "tl.where(drawn.z == m, 0.0, drawn.z - m)", "0.0 * (drawn.z - m)", (FULL,)),
    ("an infinite logit minus itself", "store_drawn", "tl.where(drawn.z == m, 0.0, drawn.z - m)", "drawn.z - m", (ODD_FULL,)),
    ("log-probability of no token", "store_drawn", "tl.where(drawn.token < 0, float(\"nan\"), below - log_l)", "below", (ODD_FULL,)),
    ("lse without its sum", "store_drawn", "m + log_l", "m", (FULL,)),
    ("tokens of the first row overwritten", "store_drawn", "token_ptr + row,", "token_ptr + row * 0,", (FULL,)),
    ("z of another token", "best_of", "exists & (token == first), z", "exists, z", (HOT,)),
]  # fmt: skip

_CANDIDATES: list[tuple[Any, ...]] = [
    ("all rows read from the first", f"{LIMITS}:candidates_kernel", "tl.multiple_of(row * stride, ALIGN) + col", "tl.multiple_of(row * 0, ALIGN) + col", (K,)),
    ("32-bit offsets", f"{LIMITS}:candidates_kernel", "(tl.program_id(0) // tiles).to(tl.int64)", "(tl.program_id(0) // tiles)", (FAR_ROWS,)),
    ("only the first tile", f"{LIMITS}:candidates_kernel", "col = tile * TILE", "col = tile * 0", (K,)),
    ("fewer candidates than said", f"{LIMITS}:candidates_kernel", "(place >= 0) & (place < KEPT)", "(place >= 0) & (place < 3)", (K,)),
    ("unused slots not written", f"{LIMITS}:candidates_kernel", "slot * 0 - 1, mask=slot >= count", "slot * 0 - 1, mask=slot < 0", (STALE,)),
    ("nothing said to be left out", f"{LIMITS}:candidates_kernel", "tl.where(left_out, t, tl.zeros((), tl.uint32))", "tl.zeros((), tl.uint32)", (NEAR_1, LARGE_K)),
    ("left out by half", f"{LIMITS}:candidates_kernel", "tl.where(left_out, t, tl.zeros", "tl.where(left_out, t >> 1, tl.zeros", (BELOW,)),
    ("largest for smallest", f"{LIMITS}:candidates_kernel", "tl.min(tl.where(exists, x.to(tl.float32), float(\"inf\")), axis=0)", "m", (f"{S}test_a_row_is_read_few_times[flat]",)),
    ("maximum not scaled", f"{LIMITS}:candidates_kernel", "statistics(x.to(tl.float32) * inverse, exists)", "statistics(x.to(tl.float32), exists)", (f"{S}test_log_probabilities_and_the_largest",)),
    ("statistics of the first tile", f"{LIMITS}:candidates_kernel", "candidates.total + at", "candidates.total + at * 0", (K,)),
    ("logits of the first tile", f"{LIMITS}:candidates_kernel", "candidates.value + first + place", "candidates.value + place", (K,)),
    ("tokens of the first tile", f"{LIMITS}:candidates_kernel", "candidates.token + first + place", "candidates.token + place", (K,)),
    ("rows without their width", f"{LIMITS}:candidates_kernel", "row * candidates.width + tile * KEPT", "row * KEPT + tile * KEPT", (K,)),
]  # fmt: skip

_CHOOSE: list[tuple[Any, ...]] = [
    ("one more of k", f"{LIMITS}:choose_kernel", "k = tl.minimum(tl.maximum(top_k, 1.0), 2147483520.0).to(tl.int64)", "k = tl.minimum(tl.maximum(top_k, 1.0), 2147483520.0).to(tl.int64) + 1", (K, KEPT_TIES)),
    ("all ties", f"{LIMITS}:_limit", "return t, _ties_for(wanted, above, tl.max(tl.where(rank == t, weight, 0), axis=0))", "return t, _ties_for(wanted, above, tl.max(tl.where(rank == t, weight, 0), axis=0)) + ALL // 2", (KEPT_TIES,)),
    ("limit without what is above", f"{LIMITS}:_limit", "above = tl.sum(tl.where(rank > t, weight, 0), axis=0)", "above = 0 * tl.sum(tl.where(rank > t, weight, 0), axis=0)", (KEPT_TIES,)),
    ("top_p of all after top_k", f"{LIMITS}:_limits", "mass_k = _mass_kept(rank, units, t_k, ties_k)", "mass_k = mass_k", (KP,)),
    ("mass without the ties of k", f"{LIMITS}:_mass_kept", "above + ties * tl.max(", "above + 0 * tl.max(", (KP, KEPT_TIES)),
    ("joint as k, then p", f"{LAUNCH}:launch_sample", "JOINT=a.joint", "JOINT=False", (JOINT,)),
    ("no token at p of 0", f"{LIMITS}:_mass_wanted", "tl.maximum(part, 1)", "part", (NO_P,)),
    ("one tie less of p", f"{LIMITS}:_ties_for", "wanted - above + unit - 1", "wanted - above", (KEPT_TIES,)),
    ("the looser of two", f"{LIMITS}:_stricter", "tl.where(t > other_t, ties, other_ties)", "tl.where(t > other_t, other_ties, ties)", (KP, LARGE_KP)),
    ("candidates always enough", f"{LIMITS}:choose_kernel", "if (floor == 0) | is_complete", "if (floor >= 0) | is_complete", (NEAR_1, LARGE_K)),
    ("more than a tile passes on taken for complete", f"{LIMITS}:choose_kernel", "(k <= KEPT) | (t_k > floor)", "(k <= 2 * KEPT) | (t_k > floor)", (BELOW,)),
    ("limits at the floor taken for known", f"{LIMITS}:choose_kernel", "(k <= KEPT) | (t_k > floor)", "(k <= KEPT) | (t_k >= floor)", (KEPT_TIES,)),
    ("a mass of unknown elements", f"{LIMITS}:choose_kernel", "is_above = is_above & (not (has_k & has_p))", "is_above = is_above & (not (has_k & False))", (LARGE_KP,)),
    ("min_p left out", f"{LIMITS}:_draw_candidates", "(exp_below(z, rule.m) >= rule.least)", "(exp_below(z, rule.m) >= 0.0)", (MIN_P,)),
    ("min_p left out of long rows", f"{LIMITS}:_collect", "(exp_below(z, rule.m) >= rule.least)", "(exp_below(z, rule.m) >= 0.0)", (FLAT_MIN_P,)),
    ("no noise", f"{LIMITS}:_draw_candidates", "score = z + gumbel(", "score = z + 0.0 * gumbel(", (K,)),
    ("no noise in long rows", f"{LIMITS}:_collect", "score = z + tl.reshape(noise", "score = z + 0.0 * tl.reshape(noise", (NEAR_1,)),
    ("noise of the first tile in long rows", f"{LIMITS}:_collect", "random_tile(seed, step, start, TILE, GUMBEL)", "random_tile(seed, step, start * 0, TILE, GUMBEL)", (NEAR_1,)),
    ("ties counted anew in each tile", f"{LIMITS}:_collect", "seen += tl.sum(inside.to(tl.int32), axis=0)", "seen += 0 * tl.sum(inside.to(tl.int32), axis=0)", (LARGE_K, KEPT_TIES)),
    ("ties of long rows not limited", f"{LIMITS}:_collect", "(bracket.lo == bracket.hi) & (order <= ties)", "(bracket.lo == bracket.hi) & (order <= ALL)", (LARGE_TIES,)),
    ("nothing drawn above a bracket", f"{LIMITS}:_collect", "kept = (rank > bracket.hi) |", "kept = (rank > ALL) |", (NEAR_1,)),
    ("the last of equal scores in long rows", f"{LIMITS}:_better", "((b.score == a.score) & (b.token < a.token))", "((b.score == a.score) & (b.token > a.token))", (KEPT_TIES,)),
    ("worse tokens", f"{LIMITS}:_better", "(b.score > a.score)", "(b.score < a.score)", (NEAR_1,)),
    ("rows of the first", f"{LIMITS}:choose_kernel", "logits_ptr + row * stride", "logits_ptr + row * 0", (NEAR_1,)),
    ("candidates of the first row", f"{LIMITS}:choose_kernel", "candidates.token + row_off + slot", "candidates.token + slot", (K,)),
    ("pivots above the limit kept", f"{LIMITS}:_narrow", "tl.where(enough, hi, pivot - 1)", "tl.where(enough, hi, pivot)", (NEAR_1, LARGE_TIES)),
    ("count above a bracket forgotten", f"{LIMITS}:_narrow", "count = tl.maximum(count,", "count = tl.minimum(count,", (f"{S}test_limits_far_below_candidates",)),
    ("mass above a bracket forgotten", f"{LIMITS}:_narrow", "mass = tl.maximum(mass,", "mass = tl.minimum(mass,", (f"{S}test_limits_far_below_candidates", NEAR_1)),
    ("mass of the first column of a step", f"{LIMITS}:_narrow", "_units(x, rank, rule)[None, :], 0)", "_units(x, rank, rule)[None, :] * 0, 0)", (NEAR_1, f"{S}test_limits_far_below_candidates")),
    ("wanted from all though some lie above", f"{LIMITS}:_draw_row", "wanted - tl.where(has_p, b.mass, b.count.to(tl.int64))", "wanted", (NEAR_1, LARGE_K)),
    ("elements weighed by mass for k", f"{LIMITS}:_draw_row", "weight = tl.where(has_p, units, (rank > 0).to(tl.int64))", "weight = units", (LARGE_K,)),
    ("k forgotten where p lies lower", f"{LIMITS}:_draw_row", "is_k = t_k > b.hi", "is_k = t_k > top", (LONG_JOINT,)),
    ("collected elements not merged", f"{LIMITS}:_draw_row", "drawn = _better(drawn, _draw_candidates(rule, token, x, rank, t, ties))", "drawn = _better(drawn, drawn)", (NEAR_1, LARGE_K)),
    ("value of a rank without its low bits", f"{LIMITS}:_value", "(x.to(tl.int32, bitcast=True) >> below) << below", "(x.to(tl.int32, bitcast=True) >> below) << 0", (BF16_P, f"{S}test_limits_far_below_candidates")),
]  # fmt: skip

LINES: dict[str, list[tuple[Any, ...]]] = {
    "select_kernel": _SELECT,
    "sort_kernel": _SORT,
    "draw_kernel": _DRAW,
    "join_draws_kernel": _JOIN,
    "candidates_kernel": _CANDIDATES,
    "choose_kernel": _CHOOSE,
}
