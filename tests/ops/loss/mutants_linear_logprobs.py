"""The ways in which the kernels of the loss head are broken; the lines are those of `mutants`."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE = "ops/linear_logprobs.py"
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
GUARD = "catalogue/test_catalogue.py::test_workload[guard_bands-linear_logprobs:odd/33:everything:300]"
MANY = f"{T}test_more_tokens_than_are_numbered_at_a_time"

LINES: dict[str, list[tuple[Any, ...]]] = {
    "_linear_order_kernel": [
        ("the count of the last tokens", "_linear_order_kernel", "count += tl.sum", "count = tl.sum", (MANY,)),
        ("numbers from 1", "_linear_order_kernel", "tl.where(valid, upto - 1,", "tl.where(valid, upto,", (PLAIN,)),
        ("numbers of each piece from 0", "_linear_order_kernel", "found + tl.cumsum", "0 * found + tl.cumsum", (MANY,)),
        ("the ignored over the others", "_linear_order_kernel", "count + row.to(tl.int32) - upto", "row.to(tl.int32) - upto", (SMOOTH,)),
        ("ignored tokens count", "_linear_order_kernel", "& (y != ignore_index)\n        count", "& (y == y)\n        count", (f"{T}test_an_ignored_column",)),
        ("negative targets count", "_linear_order_kernel", "(y >= 0) & (y < vocab) & (y != ignore_index)\n        upto", "(y < vocab) & (y != ignore_index)\n        upto", (WRONG,)),
        ("targets past the vocabulary count", "_linear_order_kernel", "(y >= 0) & (y < vocab) & (y != ignore_index)\n        count", "(y >= 0) & (y != ignore_index)\n        count", (WRONG,)),
        ("no count", "_linear_order_kernel", "tl.store(order_ptr + rows, count)", "tl.store(order_ptr + rows, count - 1)", (PLAIN,)),
        ("every token the first", "_linear_order_kernel", "tl.store(order_ptr + place, row.to(tl.int32)", "tl.store(order_ptr + place, (row * 0).to(tl.int32)", (PLAIN,)),
        ("without the last token", "_linear_order_kernel", "range(0, rows, TILE):\n        row = tl.cast(start, tl.int64) + piece\n        y = tl.load(target_ptr + row, mask=row < rows, other=-1)\n        valid = (row < rows) & (y >= 0) & (y < vocab) & (y != ignore_index)\n        count", "range(0, rows, TILE):\n        row = tl.cast(start, tl.int64) + piece\n        y = tl.load(target_ptr + row, mask=row < rows, other=-1)\n        valid = (row < rows - 1) & (y >= 0) & (y < vocab) & (y != ignore_index)\n        count", (PLAIN,)),
    ],
    "_linear_logprobs_kernel": [
        ("hidden without its stride", "_linear_logprobs_kernel", "row * hidden_stride", "row * cols", (STRIDES,)),
        ("tokens not by their number", "_linear_logprobs_kernel", "row = tl.load(order_ptr + number, mask=live, other=0).to(tl.int64)", "row = number.to(tl.int64)", (SMOOTH,)),
        ("the last tile of columns alone", "_linear_logprobs_kernel", "largest, total = add_exponentials(largest, total, z, 1)", "largest, total = add_exponentials(largest, total * 0.0, z, 1)", (f"{T}test_numbers_of_tokens[1]", BLOCKS, f"{T}test_splits_of_many_tiles")),
        ("without the last columns", "_linear_logprobs_kernel", "tl.minimum(first + span, vocab)", "tl.minimum(first + span, vocab - 1)", (ODD,)),
        ("the picked of another column", "_linear_logprobs_kernel", "col[None, :] == y[:, None]", "col[None, :] == y[:, None] + 1", (PLAIN,)),
        ("one split alone", "_linear_logprobs_kernel", "first = (split * span)", "first = (split * 0)", (PLAIN,)),
        ("bias left out", f"{FILE}:_capped", "x += tl.load(bias_ptr", "x += 0.0 * tl.load(bias_ptr", (PLAIN,)),
        ("columns past the vocabulary", f"{FILE}:_capped", "tl.where((col < vocab)[None, :], z, -float(\"inf\"))", "tl.where((col < vocab + 1)[None, :], z, -float(\"inf\"))", (ODD,)),
        ("scale left out", f"{FILE}:_capped", "z = z * scale", "z = z * 1.0", (PLAIN,)),
        ("smoothing over padding", "_linear_logprobs_kernel", "tl.where(real, 1.0, 0.0)", "tl.where(real, 1.0, 1.0)", (PADDING,)),
        ("the mass of the last tile", "_linear_logprobs_kernel", "mass += tl.sum", "mass = tl.sum", (f"{T}test_splits_of_many_tiles", EVERYTHING)),
        ("the last of equals", "_linear_logprobs_kernel", "tl.where(top > largest, at, best)", "tl.where(top >= largest, at, best)", (f"{T}test_splits_of_many_tiles", EQUALS)),
        ("half of the products", f"{FILE}:_product", "range(0, cols, TILE)", "range(0, cols - TILE, TILE)", (PLAIN,)),
        ("into the next row", f"{FILE}:_product", "exists = live[:, None] & (col < cols)[None, :]", "exists = live[:, None] & (col < cols + 1)[None, :]", (STRIDES,)),
    ],
    "_linear_factors_kernel": [
        ("one gradient for all", "_linear_factors_kernel", "dlogprob_ptr + row * dlogprob_stride", "dlogprob_ptr + row * 0", (PLAIN,)),
        ("gradients next to each other", "_linear_factors_kernel", "dlogprob_ptr + row * dlogprob_stride", "dlogprob_ptr + row", (CONSTANT, GUARD)),
        ("the gradient of lse left out", "_linear_factors_kernel", "factor += tl.load(dlse_ptr", "factor += 0.0 * tl.load(dlse_ptr", (PLAIN,)),
        ("p of the wrong sign", "_linear_factors_kernel", "factor -= at_target", "factor += at_target", (PLAIN,)),
        ("no bend", "_linear_factors_kernel", "bend / total", "0.0 * bend / total", (PLAIN,)),
        ("entropy without the log", "_linear_factors_kernel", "other=0.0) - tl.log(total))", "other=0.0) - 0.0 * tl.log(total))", (PLAIN,)),
        ("not divided by the total", "_linear_factors_kernel", "factor / total", "factor", (PLAIN,)),
        ("smoothing's mass left out", "_linear_factors_kernel", "factor += g * tl.load(parts_ptr + row", "factor += 0.0 * g * tl.load(parts_ptr + row", (SUM,)),
        ("smoothing's part left out", "_linear_factors_kernel", "part = g * tl.load", "part = 0.0 * g * tl.load", (SUM,)),
        ("statistics by number", "_linear_factors_kernel", "largest_ptr + row, mask=live", "largest_ptr + number, mask=live", (SMOOTH,)),
        ("labels by number", "_linear_factors_kernel", "y = tl.load(target_ptr + row", "y = tl.load(target_ptr + number", (SMOOTH,)),
    ],
    "_linear_dlogits_kernel": [
        ("without the target", "_linear_dlogits_kernel", "tl.where(here, dz + at_target[:, None], dz)", "tl.where(here, dz, dz)", (PLAIN,)),
        ("the target of a rounded p", "_linear_dlogits_kernel", "e = tl.exp(t)", "e = tl.exp(t).to(tl.bfloat16).to(tl.float32)", (SURE,)),
        ("the first block alone", "_linear_dlogits_kernel", "col = begin + at + tl.arange(0, VOCAB)", "col = 0 * begin + at + tl.arange(0, VOCAB)", (BLOCKS,)),
        ("slope left out", "_linear_dlogits_kernel", "dz = dz * slope", "dz = dz * 1.0", (PLAIN,)),
        ("no cap's slope", f"{FILE}:_capped", "slope = scale * bent", "slope = scale * 1.0", (EVERYTHING,)),
        ("tokens not by their number", "_linear_dlogits_kernel", "row = tl.load(order_ptr + number, mask=live, other=0).to(tl.int64)\n        hidden_off", "row = number.to(tl.int64)\n        hidden_off", (SMOOTH,)),
        ("rows past the last token", "_linear_dlogits_kernel", "dz = tl.where(live[:, None] & (col < vocab)[None, :], dz, 0.0)", "dz = tl.where((col < vocab)[None, :], dz + 1.0, 0.0)", (f"{T}test_gradients_of_a_subset[wanted2]", PLAIN)),
        ("smoothing in padding", "_linear_dlogits_kernel", "dz -= tl.where(z > -float(\"inf\"), part, 0.0)", "dz -= part", (PADDING,)),
        ("no smoothing", "_linear_dlogits_kernel", "dz -= tl.where(z", "dz -= 0.0 * tl.where(z", (SUM,)),
        ("all tiles kept", "_linear_dlogits_kernel", "keep.to(tl.int8)", "(keep * 0 + 1).to(tl.int8)", (SKIPPED,)),
        ("tiles of targets not kept", "_linear_dlogits_kernel", "(counts | (here & live[:, None]))", "(counts)", (SKIPPED,)),
        ("bend left out", "_linear_dlogits_kernel", "e * (factor[:, None] - bend[:, None] * t)", "e * (factor[:, None] + bend[:, None] * t)", (PLAIN,)),
    ],
    "_linear_dweight_kernel": [
        ("the last tokens alone", "_linear_dweight_kernel", "total = _dot(tl.trans(dlogits), hidden, total, SPLIT)", "total = _dot(tl.trans(dlogits), hidden, total * 0.0, SPLIT)", (PLAIN,)),
        ("dbias of the last tokens", "_linear_dweight_kernel", "total_bias += tl.sum", "total_bias = tl.sum", (PLAIN,)),
        ("tokens not by their number", "_linear_dweight_kernel", "row = tl.load(order_ptr + number, mask=live, other=0).to(tl.int64)", "row = number.to(tl.int64)", (SMOOTH,)),
        ("dead tokens are read", "_linear_dweight_kernel", "live = number < count", "live = number < count + 1", (f"{T}test_one_live_token", SMOOTH)),
        ("without the last token", "_linear_dweight_kernel", "live = number < count", "live = number < count - 1", (PLAIN,)),
        ("the first block's rows", "_linear_dweight_kernel", "token = begin + piece", "token = 0 * begin + piece", (BLOCKS,)),
        ("the first columns alone", "_linear_dweight_kernel", "(tl.program_id(0) % tiles) * COLS", "(tl.program_id(0) % tiles) * 0", (f"{T}test_wide_hidden_states",)),
        ("the unit left out", "_linear_dweight_kernel", "total *= unit", "total *= 1.0", (HALF,)),
        ("hidden without its stride", "_linear_dweight_kernel", "row * hidden_stride", "row * cols", (STRIDES,)),
        ("dbias by another program", "_linear_dweight_kernel", "tl.program_id(0) % tiles == 0", "tl.program_id(0) % tiles == 1", (PLAIN,)),
        ("rows past the vocabulary", "_linear_dweight_kernel", "exists = (token < vocab)[:, None]", "exists = (token < vocab + 1)[:, None]", (GUARD,)),
    ],
    "_linear_dhidden_kernel": [
        ("the last columns alone", "_linear_dhidden_kernel", "total = _dot(dlogits, weight, total, SPLIT)", "total = _dot(dlogits, weight, total * 0.0, SPLIT)", (PLAIN,)),
        ("the last block alone", "_linear_dhidden_kernel", "total = tl.load(sums_ptr", "total = 0.0 * tl.load(sums_ptr", (BLOCKS,)),
        ("weights of the first block", "_linear_dhidden_kernel", "token = begin + start", "token = 0 * begin + start", (BLOCKS,)),
        ("results by number", "_linear_dhidden_kernel", "out_off = tl.multiple_of(row * cols, ALIGN)", "out_off = tl.multiple_of(number.to(tl.int64) * cols, ALIGN)", (SMOOTH,)),
        ("the ignored not zeroed", "_linear_dhidden_kernel", "tl.where((number < count)[:, None], total, 0.0)", "tl.where((number < count)[:, None], total, 1.0)", (SMOOTH,)),
        ("without the last columns", "_linear_dhidden_kernel", "tl.minimum(block, vocab - begin)", "tl.minimum(block, vocab - begin - TILE)", (ODD,)),
        ("the unit left out", "_linear_dhidden_kernel", "total *= tl.load(unit_ptr)", "total *= 1.0", (HALF,)),
        ("the first columns alone", "_linear_dhidden_kernel", "(tl.program_id(0) % tiles) * COLS", "(tl.program_id(0) % tiles) * 0", (f"{T}test_wide_hidden_states",)),
        ("into the next row", "_linear_dhidden_kernel", "there = there & (col < cols)[None, :]", "there = there & (col < cols - 1)[None, :]", (ODD,)),
        ("the first tokens alone", "_linear_dhidden_kernel", "number = tile * ROWS", "number = 0 * tile * ROWS", (PLAIN,)),
        ("weight without its stride", "_linear_dhidden_kernel", "token.to(tl.int64) * weight_stride", "token.to(tl.int64) * cols", (f"{T}test_a_weight_with_gaps",)),
    ],
}  # fmt: skip
