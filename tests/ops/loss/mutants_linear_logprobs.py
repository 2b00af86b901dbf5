"""Mutants of the kernels of the loss head, in the format of `tests.ops.norm.mutants`."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE = "ops/loss/linear_logprobs/kernels.py"
T = "ops/loss/test_linear_logprobs.py::"

PLAIN = f"{T}test_logprobs_entropy_and_lse[dtype0]"  # two tiles of tokens, three of columns, a bias, a temperature
SMOOTH, SUM = f"{T}test_smoothing_with_ignored_tokens[none]", f"{T}test_smoothing_with_ignored_tokens[sum]"
EVERYTHING = f"{T}test_class_weights_accuracy_and_everything"
WRONG, IGNORED, PADDING = (
    f"{T}test_invalid_targets",
    f"{T}test_everything_ignored",
    f"{T}test_padding_columns",
)
BLOCKS, SKIPPED, STRIDES = (
    f"{T}test_many_blocks_of_the_vocabulary",
    f"{T}test_skipped_tiles",
    f"{T}test_strides",
)
EQUALS, SURE, HALF = (
    f"{T}test_accuracy_takes_the_first_of_equal_logits",
    f"{T}test_confident_targets[dtype1]",
    f"{T}test_small_gradients_in_fp16",
)
ODD, SHIFT = f"{T}test_odd_sizes[7-129]", f"{T}test_a_common_offset_changes_nothing[-10000.0]"
SUBSET, CONSTANT = (
    f"{T}test_gradients_of_a_subset[wanted3]",
    f"{T}test_more_dimensions_and_constant_gradients",
)
GUARD = "catalogue/test_workloads.py::test_workload[guard_bands-linear_logprobs:odd/33:everything:300]"
SCALED = f"{T}test_all_results_of_scaled_logits[None]"
MANY = f"{T}test_more_tokens_than_one_tile_of_the_order"

LINES: dict[str, list[tuple[Any, ...]]] = {
    "linear_order_kernel": [
        ("count of the last tile only", "linear_order_kernel", "count += tl.sum", "count = tl.sum", (MANY,)),
        ("positions start at 1", "linear_order_kernel", "tl.where(valid, valid_upto - 1,", "tl.where(valid, valid_upto,", (PLAIN,)),
        ("positions restart in every tile", "linear_order_kernel", "valid_before + tl.cumsum", "0 * valid_before + tl.cumsum", (MANY,)),
        ("ignored tokens overwrite the others", "linear_order_kernel", "count + row - valid_upto", "row - valid_upto", (SMOOTH,)),
        ("ignored tokens count", "linear_order_kernel", "& (y != ignore_index)\n        count", "& (y == y)\n        count", (f"{T}test_an_ignored_column",)),
        ("negative targets count", "linear_order_kernel", "(y >= 0) & (y < vocab) & (y != ignore_index)\n        valid_upto", "(y < vocab) & (y != ignore_index)\n        valid_upto", (WRONG,)),
        ("targets past the vocabulary count", "linear_order_kernel", "(y >= 0) & (y < vocab) & (y != ignore_index)\n        count", "(y >= 0) & (y != ignore_index)\n        count", (WRONG,)),
        ("count too small by one", "linear_order_kernel", "tl.store(order_ptr + rows, count)", "tl.store(order_ptr + rows, count - 1)", (PLAIN,)),
        ("row 0 at every position", "linear_order_kernel", "tl.store(order_ptr + position, row.to(tl.int32)", "tl.store(order_ptr + position, (row * 0).to(tl.int32)", (PLAIN,)),
        ("last token skipped", "linear_order_kernel", "range(0, rows, TILE):\n        row = tl.cast(start, tl.int64) + tile_off\n        y = tl.load(target_ptr + row, mask=row < rows, other=-1)\n        valid = (row < rows) & (y >= 0) & (y < vocab) & (y != ignore_index)\n        count", "range(0, rows, TILE):\n        row = tl.cast(start, tl.int64) + tile_off\n        y = tl.load(target_ptr + row, mask=row < rows, other=-1)\n        valid = (row < rows - 1) & (y >= 0) & (y < vocab) & (y != ignore_index)\n        count", (PLAIN,)),
    ],
    "linear_logprobs_kernel": [
        ("hidden without its stride", "linear_logprobs_kernel", "row * hidden_stride", "row * cols", (STRIDES,)),
        ("order ignored", "linear_logprobs_kernel", "row = tl.load(order_ptr + position, mask=live, other=0).to(tl.int64)", "row = position.to(tl.int64)", (SMOOTH,)),
        ("only the last tile of columns", "linear_logprobs_kernel", "largest, total = add_exponentials(largest, total, z, 1)", "largest, total = add_exponentials(largest, total * 0.0, z, 1)", (f"{T}test_token_counts[1]", BLOCKS, f"{T}test_splits_of_many_tiles")),
        ("last columns skipped", "linear_logprobs_kernel", "tl.minimum(first + span, vocab)", "tl.minimum(first + span, vocab - 1)", (ODD,)),
        ("picked from another column", "linear_logprobs_kernel", "col[None, :] == y[:, None]", "col[None, :] == y[:, None] + 1", (PLAIN,)),
        ("every split reads the first", "linear_logprobs_kernel", "first = (split * span)", "first = (split * 0)", (PLAIN,)),
        ("bias omitted", f"{FILE}:_capped", "x += tl.load(bias_ptr", "x += 0.0 * tl.load(bias_ptr", (PLAIN,)),
        ("column past the vocabulary included", f"{FILE}:_capped", "tl.where((col < vocab)[None, :], z, -float(\"inf\"))", "tl.where((col < vocab + 1)[None, :], z, -float(\"inf\"))", (ODD,)),
        ("scale omitted", f"{FILE}:_capped", "z = z * scaling.scale", "z = z * 1.0", (PLAIN,)),
        ("smoothing over padding", "linear_logprobs_kernel", "tl.where(finite, 1.0, 0.0)", "tl.where(finite, 1.0, 1.0)", (PADDING,)),
        ("mass of the last tile only", "linear_logprobs_kernel", "mass += tl.sum", "mass = tl.sum", (f"{T}test_splits_of_many_tiles", EVERYTHING)),
        ("last of equal logits wins", "linear_logprobs_kernel", "tl.where(top > largest, argmax, best)", "tl.where(top >= largest, argmax, best)", (f"{T}test_splits_of_many_tiles", EQUALS)),
        ("squares of the last tile only", "tiles/softmax.py:add_squares", "return squares * tl.exp(2.0 * (m_i - m_new)) +", "return", (f"{T}test_splits_of_many_tiles", SCALED)),
        ("squares not rescaled", "tiles/softmax.py:add_squares", "squares * tl.exp(2.0 * (m_i - m_new))", "squares", (f"{T}test_splits_of_many_tiles", SCALED)),
        ("no squares", "tiles/softmax.py:add_squares", "tl.sum(e * e, axis=axis)", "tl.sum(e, axis=axis)", (SCALED,)),
        ("squares added after the largest was updated", "linear_logprobs_kernel", "squares = add_squares(largest, squares, z, 1)", "squares = add_squares(tl.maximum(largest, tl.max(z, axis=1)), squares, z, 1)", (f"{T}test_splits_of_many_tiles", SCALED)),
        ("total stored as squares", "linear_logprobs_kernel", "tl.store(out_ptr + (FEW + ENTROPY + 3 * SPREAD) * stats_stride, squares, mask=live)", "tl.store(out_ptr + (FEW + ENTROPY + 3 * SPREAD) * stats_stride, total, mask=live)", (SCALED,)),
        ("last tile of the product skipped", f"{FILE}:_product", "range(0, cols, CUT.TILE)", "range(0, cols - CUT.TILE, CUT.TILE)", (PLAIN,)),
        ("into the next row", f"{FILE}:_product", "exists = tokens.live[:, None] & (col < cols)[None, :]", "exists = tokens.live[:, None] & (col < cols + 1)[None, :]", (STRIDES,)),
    ],
    "linear_factors_kernel": [
        ("first upstream gradient for all", "linear_factors_kernel", "dlogprob_ptr + row * dlogprob_stride", "dlogprob_ptr + row * 0", (PLAIN,)),
        ("upstream gradients as if contiguous", "linear_factors_kernel", "dlogprob_ptr + row * dlogprob_stride", "dlogprob_ptr + row", (CONSTANT, GUARD)),
        ("gradient of lse omitted", "linear_factors_kernel", "factor += tl.load(dlse_ptr", "factor += 0.0 * tl.load(dlse_ptr", (PLAIN,)),
        ("p of the wrong sign", "linear_factors_kernel", "factor -= at_target", "factor += at_target", (PLAIN,)),
        ("gradient of the entropy omitted", "linear_factors_kernel", "dentropy / total", "0.0 * dentropy / total", (PLAIN,)),
        ("entropy without the log", "linear_factors_kernel", "other=0.0) - tl.log(total))", "other=0.0) - 0.0 * tl.log(total))", (PLAIN,)),
        ("not divided by the total", "linear_factors_kernel", "factor / total", "factor", (PLAIN,)),
        ("mass of the smoothing omitted", "linear_factors_kernel", "factor += g * tl.load(shares_ptr + row", "factor += 0.0 * g * tl.load(shares_ptr + row", (SUM,)),
        ("part of the smoothing omitted", "linear_factors_kernel", "part = g * tl.load", "part = 0.0 * g * tl.load", (SUM,)),
        ("statistics read by position", "linear_factors_kernel", "largest_ptr + row, mask=live", "largest_ptr + position, mask=live", (SMOOTH,)),
        ("labels read by position", "linear_factors_kernel", "y = tl.load(target_ptr + row", "y = tl.load(target_ptr + position", (SMOOTH,)),
    ],
    "linear_dlogits_kernel": [
        ("target's term omitted", "linear_dlogits_kernel", "tl.where(at_column, dz + at_target[:, None], dz)", "tl.where(at_column, dz, dz)", (PLAIN,)),
        ("p rounded to bf16", "linear_dlogits_kernel", "e = tl.exp(t)", "e = tl.exp(t).to(tl.bfloat16).to(tl.float32)", (SURE,)),
        ("only the first block", "linear_dlogits_kernel", "col = begin + block_col + tl.arange(0, VOCAB)", "col = 0 * begin + block_col + tl.arange(0, VOCAB)", (BLOCKS,)),
        ("slope omitted", "linear_dlogits_kernel", "dz = dz * slope", "dz = dz * 1.0", (PLAIN,)),
        ("slope of the softcap is 1", f"{FILE}:_capped", "slope = scaling.scale * dcap", "slope = scaling.scale * 1.0", (EVERYTHING,)),
        ("order ignored", "linear_dlogits_kernel", "row = tl.load(order_ptr + position, mask=live, other=0).to(tl.int64)\n        hidden_off", "row = position.to(tl.int64)\n        hidden_off", (SMOOTH,)),
        ("rows past the last token not zeroed", "linear_dlogits_kernel", "dz = tl.where(live[:, None] & (col < vocab)[None, :], dz, 0.0)", "dz = tl.where((col < vocab)[None, :], dz + 1.0, 0.0)", (f"{T}test_gradients_of_a_subset[wanted2]", PLAIN)),
        ("smoothing in padding", "linear_dlogits_kernel", "dz -= tl.where(z > -float(\"inf\"), part, 0.0)", "dz -= part", (PADDING,)),
        ("smoothing omitted", "linear_dlogits_kernel", "dz -= tl.where(z", "dz -= 0.0 * tl.where(z", (SUM,)),
        ("all tiles kept", "linear_dlogits_kernel", "keep.to(tl.int8)", "(keep * 0 + 1).to(tl.int8)", (SKIPPED,)),
        ("tiles of targets not kept", "linear_dlogits_kernel", "(significant | (at_column & live[:, None]))", "(significant)", (SKIPPED,)),
        ("gradient of the entropy negated", "linear_dlogits_kernel", "e * (factor[:, None] - dentropy[:, None] * t)", "e * (factor[:, None] + dentropy[:, None] * t)", (PLAIN,)),
    ],
    "linear_dweight_kernel": [
        ("only the last tile of tokens", "linear_dweight_kernel", "total = _dot(tl.trans(dlogits), hidden, total, SPLIT)", "total = _dot(tl.trans(dlogits), hidden, total * 0.0, SPLIT)", (PLAIN,)),
        ("dbias of the last tile only", "linear_dweight_kernel", "total_bias += tl.sum", "total_bias = tl.sum", (PLAIN,)),
        ("order ignored", "linear_dweight_kernel", "row = tl.load(order_ptr + position, mask=live, other=0).to(tl.int64)", "row = position.to(tl.int64)", (SMOOTH,)),
        ("tokens without a target read", "linear_dweight_kernel", "live = position < count", "live = position < count + 1", (f"{T}test_one_live_token", SMOOTH)),
        ("last token skipped", "linear_dweight_kernel", "live = position < count", "live = position < count - 1", (PLAIN,)),
        ("every block writes the first block's rows", "linear_dweight_kernel", "vocab_row = begin + block_row", "vocab_row = 0 * begin + block_row", (BLOCKS,)),
        ("only the first columns", "linear_dweight_kernel", "(tl.program_id(0) % tiles) * COLS", "(tl.program_id(0) % tiles) * 0", (f"{T}test_wide_hidden_states",)),
        ("unit omitted", "linear_dweight_kernel", "total *= unit", "total *= 1.0", (HALF,)),
        ("hidden without its stride", "linear_dweight_kernel", "row * hidden_stride", "row * cols", (STRIDES,)),
        ("dbias by another program", "linear_dweight_kernel", "tl.program_id(0) % tiles == 0", "tl.program_id(0) % tiles == 1", (PLAIN,)),
        ("rows past the vocabulary", "linear_dweight_kernel", "exists = (vocab_row < vocab)[:, None]", "exists = (vocab_row < vocab + 1)[:, None]", (GUARD,)),
    ],
    "linear_dhidden_kernel": [
        ("only the last tile of the product", "linear_dhidden_kernel", "total = _dot(dlogits, weight, total, SPLIT)", "total = _dot(dlogits, weight, total * 0.0, SPLIT)", (PLAIN,)),
        ("only the last block", "linear_dhidden_kernel", "total = tl.load(sums_ptr", "total = 0.0 * tl.load(sums_ptr", (BLOCKS,)),
        ("every block reads the first block's weights", "linear_dhidden_kernel", "vocab_row = begin + start", "vocab_row = 0 * begin + start", (BLOCKS,)),
        ("results stored by position", "linear_dhidden_kernel", "out_off = tl.multiple_of(row * cols, ALIGN)", "out_off = tl.multiple_of(position.to(tl.int64) * cols, ALIGN)", (SMOOTH,)),
        ("ignored tokens not zeroed", "linear_dhidden_kernel", "tl.where((position < count)[:, None], total, 0.0)", "tl.where((position < count)[:, None], total, 1.0)", (SMOOTH,)),
        ("last columns skipped", "linear_dhidden_kernel", "tl.minimum(block, vocab - begin)", "tl.minimum(block, vocab - begin - TILE)", (ODD,)),
        ("unit omitted", "linear_dhidden_kernel", "total *= tl.load(unit_ptr)", "total *= 1.0", (HALF,)),
        ("only the first columns", "linear_dhidden_kernel", "(tl.program_id(0) % tiles) * COLS", "(tl.program_id(0) % tiles) * 0", (f"{T}test_wide_hidden_states",)),
        ("into the next row", "linear_dhidden_kernel", "weight_mask = weight_mask & (col < cols)[None, :]", "weight_mask = weight_mask & (col < cols - 1)[None, :]", (ODD,)),
        ("only the first tile of tokens", "linear_dhidden_kernel", "position = tile * ROWS", "position = 0 * tile * ROWS", (PLAIN,)),
        ("weight without its stride", "linear_dhidden_kernel", "vocab_row.to(tl.int64) * weight_stride", "vocab_row.to(tl.int64) * cols", (f"{T}test_a_weight_with_padded_rows",)),
    ],
}  # fmt: skip
