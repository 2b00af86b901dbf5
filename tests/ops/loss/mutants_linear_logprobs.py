"""The ways in which the kernels of the loss head are broken; the lines are those of `mutants`."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE = "ops/loss/linear_logprobs/kernels.py"
T = "ops/loss/test_linear_logprobs.py::"

PLAIN = f"{T}test_logprobs_entropy_and_lse[dtype0]"  # two tiles of tokens, three of columns, a bias, a temperature
SMOOTH, SUM = f"{T}test_smoothing_with_ignored_tokens[none]", f"{T}test_smoothing_with_ignored_tokens[sum]"
EVERYTHING = f"{T}test_class_weights_accuracy_and_everything"
WRONG, IGNORED, PADDING = (
    f"{T}test_targets_that_are_no_columns",
    f"{T}test_everything_ignored",
    f"{T}test_padding_columns",
)
BLOCKS, SKIPPED, STRIDES = (
    f"{T}test_many_blocks_of_the_vocabulary",
    f"{T}test_skipped_tiles",
    f"{T}test_strides",
)
EQUALS, SURE, HALF = (
    f"{T}test_accuracy_takes_the_first_of_equals",
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
MANY = f"{T}test_more_tokens_than_are_numbered_at_a_time"

LINES: dict[str, list[tuple[Any, ...]]] = {
    "linear_order_kernel": [
        ("the count of the last tokens", "linear_order_kernel", "count += tl.sum", "count = tl.sum", (MANY,)),
        ("numbers from 1", "linear_order_kernel", "tl.where(valid, upto - 1,", "tl.where(valid, upto,", (PLAIN,)),
        ("numbers of each piece from 0", "linear_order_kernel", "found + tl.cumsum", "0 * found + tl.cumsum", (MANY,)),
        ("the ignored over the others", "linear_order_kernel", "count + row - upto", "row - upto", (SMOOTH,)),
        ("ignored tokens count", "linear_order_kernel", "& (y != ignore_index)\n        count", "& (y == y)\n        count", (f"{T}test_an_ignored_column",)),
        ("negative targets count", "linear_order_kernel", "(y >= 0) & (y < vocab) & (y != ignore_index)\n        upto", "(y < vocab) & (y != ignore_index)\n        upto", (WRONG,)),
        ("targets past the vocabulary count", "linear_order_kernel", "(y >= 0) & (y < vocab) & (y != ignore_index)\n        count", "(y >= 0) & (y != ignore_index)\n        count", (WRONG,)),
        ("no count", "linear_order_kernel", "tl.store(order_ptr + rows, count)", "tl.store(order_ptr + rows, count - 1)", (PLAIN,)),
        ("every token the first", "linear_order_kernel", "tl.store(order_ptr + place, row.to(tl.int32)", "tl.store(order_ptr + place, (row * 0).to(tl.int32)", (PLAIN,)),
        ("without the last token", "linear_order_kernel", "range(0, rows, TILE):\n        row = tl.cast(start, tl.int64) + piece\n        y = tl.load(target_ptr + row, mask=row < rows, other=-1)\n        valid = (row < rows) & (y >= 0) & (y < vocab) & (y != ignore_index)\n        count", "range(0, rows, TILE):\n        row = tl.cast(start, tl.int64) + piece\n        y = tl.load(target_ptr + row, mask=row < rows, other=-1)\n        valid = (row < rows - 1) & (y >= 0) & (y < vocab) & (y != ignore_index)\n        count", (PLAIN,)),
    ],
    "linear_logprobs_kernel": [
        ("hidden without its stride", "linear_logprobs_kernel", "row * hidden_stride", "row * cols", (STRIDES,)),
        ("tokens not by their number", "linear_logprobs_kernel", "row = tl.load(order_ptr + number, mask=live, other=0).to(tl.int64)", "row = number.to(tl.int64)", (SMOOTH,)),
        ("the last tile of columns alone", "linear_logprobs_kernel", "largest, total = add_exponentials(largest, total, z, 1)", "largest, total = add_exponentials(largest, total * 0.0, z, 1)", (f"{T}test_numbers_of_tokens[1]", BLOCKS, f"{T}test_splits_of_many_tiles")),
        ("without the last columns", "linear_logprobs_kernel", "tl.minimum(first + span, vocab)", "tl.minimum(first + span, vocab - 1)", (ODD,)),
        ("the picked of another column", "linear_logprobs_kernel", "col[None, :] == y[:, None]", "col[None, :] == y[:, None] + 1", (PLAIN,)),
        ("one split alone", "linear_logprobs_kernel", "first = (split * span)", "first = (split * 0)", (PLAIN,)),
        ("bias left out", f"{FILE}:_capped", "x += tl.load(bias_ptr", "x += 0.0 * tl.load(bias_ptr", (PLAIN,)),
        ("columns past the vocabulary", f"{FILE}:_capped", "tl.where((col < vocab)[None, :], z, -float(\"inf\"))", "tl.where((col < vocab + 1)[None, :], z, -float(\"inf\"))", (ODD,)),
        ("scale left out", f"{FILE}:_capped", "z = z * scaling.scale", "z = z * 1.0", (PLAIN,)),
        ("smoothing over padding", "linear_logprobs_kernel", "tl.where(real, 1.0, 0.0)", "tl.where(real, 1.0, 1.0)", (PADDING,)),
        ("the mass of the last tile", "linear_logprobs_kernel", "mass += tl.sum", "mass = tl.sum", (f"{T}test_splits_of_many_tiles", EVERYTHING)),
        ("the last of equals", "linear_logprobs_kernel", "tl.where(top > largest, at, best)", "tl.where(top >= largest, at, best)", (f"{T}test_splits_of_many_tiles", EQUALS)),
        ("squares of the last tile", "tiles/softmax.py:add_squares", "return squares * tl.exp(2.0 * (largest - joined)) +", "return", (f"{T}test_splits_of_many_tiles", SCALED)),
        ("squares not brought down", "tiles/softmax.py:add_squares", "squares * tl.exp(2.0 * (largest - joined))", "squares", (f"{T}test_splits_of_many_tiles", SCALED)),
        ("no squares", "tiles/softmax.py:add_squares", "tl.sum(e * e, axis=axis)", "tl.sum(e, axis=axis)", (SCALED,)),
        ("squares after the largest is known", "linear_logprobs_kernel", "squares = add_squares(largest, squares, z, 1)", "squares = add_squares(tl.maximum(largest, tl.max(z, axis=1)), squares, z, 1)", (f"{T}test_splits_of_many_tiles", SCALED)),
        ("squares in another place", "linear_logprobs_kernel", "tl.store(out_ptr + (FEW + ENTROPY + 3 * SPREAD) * apart, squares, mask=live)", "tl.store(out_ptr + (FEW + ENTROPY + 3 * SPREAD) * apart, total, mask=live)", (SCALED,)),
        ("half of the products", f"{FILE}:_product", "range(0, cols, CUT.TILE)", "range(0, cols - CUT.TILE, CUT.TILE)", (PLAIN,)),
        ("into the next row", f"{FILE}:_product", "exists = tokens.live[:, None] & (col < cols)[None, :]", "exists = tokens.live[:, None] & (col < cols + 1)[None, :]", (STRIDES,)),
    ],
    "linear_factors_kernel": [
        ("one gradient for all", "linear_factors_kernel", "dlogprob_ptr + row * dlogprob_stride", "dlogprob_ptr + row * 0", (PLAIN,)),
        ("gradients next to each other", "linear_factors_kernel", "dlogprob_ptr + row * dlogprob_stride", "dlogprob_ptr + row", (CONSTANT, GUARD)),
        ("the gradient of lse left out", "linear_factors_kernel", "factor += tl.load(dlse_ptr", "factor += 0.0 * tl.load(dlse_ptr", (PLAIN,)),
        ("p of the wrong sign", "linear_factors_kernel", "factor -= at_target", "factor += at_target", (PLAIN,)),
        ("no bend", "linear_factors_kernel", "bend / total", "0.0 * bend / total", (PLAIN,)),
        ("entropy without the log", "linear_factors_kernel", "other=0.0) - tl.log(total))", "other=0.0) - 0.0 * tl.log(total))", (PLAIN,)),
        ("not divided by the total", "linear_factors_kernel", "factor / total", "factor", (PLAIN,)),
        ("smoothing's mass left out", "linear_factors_kernel", "factor += g * tl.load(shares_ptr + row", "factor += 0.0 * g * tl.load(shares_ptr + row", (SUM,)),
        ("smoothing's part left out", "linear_factors_kernel", "part = g * tl.load", "part = 0.0 * g * tl.load", (SUM,)),
        ("statistics by number", "linear_factors_kernel", "largest_ptr + row, mask=live", "largest_ptr + number, mask=live", (SMOOTH,)),
        ("labels by number", "linear_factors_kernel", "y = tl.load(target_ptr + row", "y = tl.load(target_ptr + number", (SMOOTH,)),
    ],
    "linear_dlogits_kernel": [
        ("without the target", "linear_dlogits_kernel", "tl.where(here, dz + at_target[:, None], dz)", "tl.where(here, dz, dz)", (PLAIN,)),
        ("the target of a rounded p", "linear_dlogits_kernel", "e = tl.exp(t)", "e = tl.exp(t).to(tl.bfloat16).to(tl.float32)", (SURE,)),
        ("the first block alone", "linear_dlogits_kernel", "col = begin + at + tl.arange(0, VOCAB)", "col = 0 * begin + at + tl.arange(0, VOCAB)", (BLOCKS,)),
        ("slope left out", "linear_dlogits_kernel", "dz = dz * slope", "dz = dz * 1.0", (PLAIN,)),
        ("no cap's slope", f"{FILE}:_capped", "slope = scaling.scale * bent", "slope = scaling.scale * 1.0", (EVERYTHING,)),
        ("tokens not by their number", "linear_dlogits_kernel", "row = tl.load(order_ptr + number, mask=live, other=0).to(tl.int64)\n        hidden_off", "row = number.to(tl.int64)\n        hidden_off", (SMOOTH,)),
        ("rows past the last token", "linear_dlogits_kernel", "dz = tl.where(live[:, None] & (col < vocab)[None, :], dz, 0.0)", "dz = tl.where((col < vocab)[None, :], dz + 1.0, 0.0)", (f"{T}test_gradients_of_a_subset[wanted2]", PLAIN)),
        ("smoothing in padding", "linear_dlogits_kernel", "dz -= tl.where(z > -float(\"inf\"), part, 0.0)", "dz -= part", (PADDING,)),
        ("no smoothing", "linear_dlogits_kernel", "dz -= tl.where(z", "dz -= 0.0 * tl.where(z", (SUM,)),
        ("all tiles kept", "linear_dlogits_kernel", "keep.to(tl.int8)", "(keep * 0 + 1).to(tl.int8)", (SKIPPED,)),
        ("tiles of targets not kept", "linear_dlogits_kernel", "(counts | (here & live[:, None]))", "(counts)", (SKIPPED,)),
        ("bend left out", "linear_dlogits_kernel", "e * (factor[:, None] - bend[:, None] * t)", "e * (factor[:, None] + bend[:, None] * t)", (PLAIN,)),
    ],
    "linear_dweight_kernel": [
        ("the last tokens alone", "linear_dweight_kernel", "total = _dot(tl.trans(dlogits), hidden, total, SPLIT)", "total = _dot(tl.trans(dlogits), hidden, total * 0.0, SPLIT)", (PLAIN,)),
        ("dbias of the last tokens", "linear_dweight_kernel", "total_bias += tl.sum", "total_bias = tl.sum", (PLAIN,)),
        ("tokens not by their number", "linear_dweight_kernel", "row = tl.load(order_ptr + number, mask=live, other=0).to(tl.int64)", "row = number.to(tl.int64)", (SMOOTH,)),
        ("dead tokens are read", "linear_dweight_kernel", "live = number < count", "live = number < count + 1", (f"{T}test_one_live_token", SMOOTH)),
        ("without the last token", "linear_dweight_kernel", "live = number < count", "live = number < count - 1", (PLAIN,)),
        ("the first block's rows", "linear_dweight_kernel", "token = begin + piece", "token = 0 * begin + piece", (BLOCKS,)),
        ("the first columns alone", "linear_dweight_kernel", "(tl.program_id(0) % tiles) * COLS", "(tl.program_id(0) % tiles) * 0", (f"{T}test_wide_hidden_states",)),
        ("the unit left out", "linear_dweight_kernel", "total *= unit", "total *= 1.0", (HALF,)),
        ("hidden without its stride", "linear_dweight_kernel", "row * hidden_stride", "row * cols", (STRIDES,)),
        ("dbias by another program", "linear_dweight_kernel", "tl.program_id(0) % tiles == 0", "tl.program_id(0) % tiles == 1", (PLAIN,)),
        ("rows past the vocabulary", "linear_dweight_kernel", "exists = (token < vocab)[:, None]", "exists = (token < vocab + 1)[:, None]", (GUARD,)),
    ],
    "linear_dhidden_kernel": [
        ("the last columns alone", "linear_dhidden_kernel", "total = _dot(dlogits, weight, total, SPLIT)", "total = _dot(dlogits, weight, total * 0.0, SPLIT)", (PLAIN,)),
        ("the last block alone", "linear_dhidden_kernel", "total = tl.load(sums_ptr", "total = 0.0 * tl.load(sums_ptr", (BLOCKS,)),
        ("weights of the first block", "linear_dhidden_kernel", "token = begin + start", "token = 0 * begin + start", (BLOCKS,)),
        ("results by number", "linear_dhidden_kernel", "out_off = tl.multiple_of(row * cols, ALIGN)", "out_off = tl.multiple_of(number.to(tl.int64) * cols, ALIGN)", (SMOOTH,)),
        ("the ignored not zeroed", "linear_dhidden_kernel", "tl.where((number < count)[:, None], total, 0.0)", "tl.where((number < count)[:, None], total, 1.0)", (SMOOTH,)),
        ("without the last columns", "linear_dhidden_kernel", "tl.minimum(block, vocab - begin)", "tl.minimum(block, vocab - begin - TILE)", (ODD,)),
        ("the unit left out", "linear_dhidden_kernel", "total *= tl.load(unit_ptr)", "total *= 1.0", (HALF,)),
        ("the first columns alone", "linear_dhidden_kernel", "(tl.program_id(0) % tiles) * COLS", "(tl.program_id(0) % tiles) * 0", (f"{T}test_wide_hidden_states",)),
        ("into the next row", "linear_dhidden_kernel", "there = there & (col < cols)[None, :]", "there = there & (col < cols - 1)[None, :]", (ODD,)),
        ("the first tokens alone", "linear_dhidden_kernel", "number = tile * ROWS", "number = 0 * tile * ROWS", (PLAIN,)),
        ("weight without its stride", "linear_dhidden_kernel", "token.to(tl.int64) * weight_stride", "token.to(tl.int64) * cols", (f"{T}test_a_weight_with_gaps",)),
    ],
}  # fmt: skip
