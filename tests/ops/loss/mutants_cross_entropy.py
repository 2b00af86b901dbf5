"""The ways in which the kernels of cross entropy are broken; the lines are those of `mutants`."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE = "ops/loss/cross_entropy/kernels.py"
SOFTMAX = "tiles/softmax.py"
T = "ops/loss/test_cross_entropy.py::"

ODD, LONG, SHORT = (f"{T}test_sizes[{case}]" for case in ("3-65", "3-5127", "5-7"))
Z, SCALED, CAPPED, SMOOTHED, ENTROPY, ACCURACY, WEIGHTED, BOTH = (
    f"{T}test_options[{name}]"
    for name in ("z", "scaled", "capped", "smoothed", "entropy", "accuracy", "weighted", "weighted, smoothed")
)
SHIFT, LOW = (
    f"{T}test_a_common_offset_changes_nothing[10000.0]",
    f"{T}test_a_common_offset_changes_nothing[-10000.0]",
)
PADDED, TILES = f"{T}test_padding_of_minus_infinity[smoothed]", f"{T}test_tiles_of_minus_infinity"
IGNORED, OUTSIDE = (
    f"{T}test_ignored_tokens_are_not_read[none]",
    f"{T}test_a_target_outside_of_the_vocabulary[2507]",
)
EQUALS, SUMS, EMPTY = (
    f"{T}test_accuracy_among_equals",
    f"{T}test_sums_over_many_rows[2500]",
    f"{T}test_no_token_has_a_target",
)
TORCH = f"{T}test_pytorch[False-0.0-mean]"
SURE, FAR = f"{T}test_gradient_of_a_sure_target[dtype0-0.999]", f"{T}test_offsets_have_64_bits"
STEPPED, ONE_FOR_ALL = f"{T}test_layout_of_gradients[transposed]", f"{T}test_layout_of_gradients[constant]"
STRIDED, SHIFTED = f"{T}test_in_place_of_strided_rows", f"{T}test_shifted_tokens[1000]"
SPANS, GPU = f"{T}test_spans_change_no_bit", f"{T}test_configuration_of[sm_90-20001]"

LINES: dict[str, list[tuple[Any, ...]]] = {
    "cross_entropy_kernel": [
        ("sums not brought down to a new largest", f"{SOFTMAX}:add_exponentials", "total * tl.exp(largest - joined) + ", "total + ", (LONG, WEIGHTED)),
        ("the last tile's largest alone", f"{SOFTMAX}:add_exponentials", "tl.maximum(largest, tl.max(z, axis=axis))", "tl.max(z, axis=axis) + 0.0 * largest", (LONG, WEIGHTED)),
        ("lanes not brought to one largest", f"{SOFTMAX}:join_exponentials", "total * tl.exp(largest - tl.expand_dims(joined, axis))", "total", (WEIGHTED,)),
        ("a largest from 0", "cross_entropy_kernel", "tl.full((LANES,), LOWEST, tl.float32)", "tl.zeros((LANES,), tl.float32)", (LOW,)),
        ("moments stay at the old largest", f"{SOFTMAX}:add_moments", "moment + down * total, 0.0", "moment, 0.0", (ENTROPY,)),
        ("moments of lanes stay where they are", f"{SOFTMAX}:join_moments", "moment + down * total, 0.0", "moment, 0.0", (ENTROPY,)),
        ("0 times minus infinity", f"{SOFTMAX}:add_moments", "tl.where(e > 0.0, e * t, 0.0)", "e * t", (TILES,)),
        ("the body alone", "cross_entropy_kernel", "range(0, cols - body, LANES)", "range(0, 0, LANES)", (ODD,)),
        ("the last tile of the body left out", "cross_entropy_kernel", "range(0, body, TILE)", "range(0, body - TILE, TILE)", (LONG,)),
        ("body from the row's begin", "cross_entropy_kernel", "logits_ptr + tl.multiple_of(offset + head, 16 // ELEMENT)", "logits_ptr + tl.multiple_of(offset + 0 * head, 1)", (LONG,)),
        ("no scale", "_number", "z = z * scale", "z = z", (SCALED,)),
        ("no softcap", "_number", "z, _ = cap(z, softcap)", "z, _ = (z, 0)", (CAPPED,)),
        ("padding is capped", f"{SOFTMAX}:cap", "tl.where(x == -float(\"inf\"), x, limit * t)", "limit * t", (f"{T}test_padding_of_minus_infinity[all]",)),
        ("no z loss", "cross_entropy_kernel", "loss += z_loss * lse * lse", "loss += 0.0 * z_loss", (Z,)),
        ("the whole loss besides the smoothing", "cross_entropy_kernel", "(1.0 - label_smoothing) * loss", "loss", (SMOOTHED,)),
        ("smoothing over padding", "_smoothed", "there = z > -float(\"inf\")", "there = z == z", (PADDED,)),
        ("smoothing counts padding", "_smoothed", "count += tl.sum(tl.where(there, 1.0, 0.0), axis=0)", "count += tl.sum(tl.where(z == z, 1.0, 0.0), axis=0)", (PADDED,)),
        ("smoothing without class weights", "_smoothed", "tl.where(there, w * (z - origin), 0.0)", "tl.where(there, z - origin, 0.0)", (BOTH,)),
        ("a sum of large numbers", "cross_entropy_kernel", "origin = tl.where(picked > -float(\"inf\"), picked, 0.0)", "origin = picked * 0.0", (SHIFT,)),
        ("no class weight", "cross_entropy_kernel", "share = tl.load(weight_ptr + y, mask=valid, other=0.0).to(tl.float32)", "share = 1.0 + 0.0 * tl.load(weight_ptr + y, mask=valid, other=0.0).to(tl.float32)", (WEIGHTED,)),
        ("equals to the right come first", "cross_entropy_kernel", "(z == picked) & (col < y)", "(z == picked) & (col > y)", (EQUALS,), 1, 2),
        ("equals of the rest are no matter", "cross_entropy_kernel", "exists & ((z > picked) | ((z == picked) & (col < y)))", "exists & (z > picked)", (EQUALS,)),
        ("ignored rows are counted", "cross_entropy_kernel", "tl.store(share_ptr + row, tl.where(valid, share, 0.0))", "tl.store(share_ptr + row, share + tl.where(valid, 0.0, 0.0))", (TORCH,)),
        ("ignored rows are hits", "cross_entropy_kernel", "-1.0 if MARK_MISSING else 0.0", "0.0 if MARK_MISSING else 0.0", (EQUALS,)),
        ("ignored rows are read", "cross_entropy_kernel", "cols = tl.where(valid, cols, 0)", "cols = tl.where(valid, cols, cols)", (SHIFTED,)),
        ("the loss of a wrong target is 0", "cross_entropy_kernel", "nothing = tl.where(wrong, float(\"nan\"), 0.0)", "nothing = tl.where(wrong, 0.0, 0.0)", (OUTSIDE,)),
        ("a target past the end", "_target_of", "(y >= 0) & (y < vocab)", "(y >= 0) & (y < vocab + 100)", (OUTSIDE,)),
        ("targets of 32 bits", "_target_of", "y = tl.load(target_ptr + row)", "y = tl.load(target_ptr + row).to(tl.int32)", (f"{T}test_a_target_outside_of_the_vocabulary[4294967299]",)),
        ("32-bit row offsets", "cross_entropy_kernel", "row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)", (FAR,)),
    ],
    "cross_entropy_totals_kernel": [
        ("losses of the last rows alone", "cross_entropy_totals_kernel", "losses += tl.load(", "losses = tl.load(", (SUMS,)),
        ("shares of the last rows alone", "cross_entropy_totals_kernel", "shares += tl.load(", "shares = tl.load(", (SUMS,)),
        ("the last rows left out", "cross_entropy_totals_kernel", "range(0, rows, TILE)", "range(0, rows - TILE, TILE)", (SUMS,)),
        ("one row too few", "cross_entropy_totals_kernel", "there = row < rows", "there = row < rows - 1", (SUMS,)),
        ("rows past the end are tokens", "cross_entropy_totals_kernel", "mask=there, other=-1.0", "mask=there, other=0.0", (SUMS,)),
        ("ignored tokens are negative hits", "cross_entropy_totals_kernel", "tl.maximum(hit, 0.0)", "hit", (SUMS,)),
        ("a mean over all rows", "cross_entropy_totals_kernel", "mean = loss / share", "mean = loss / rows", (TORCH,)),
        ("gradients of a sum", "cross_entropy_totals_kernel", "inverse = 1.0 / share", "inverse = 1.0 / (0.0 * share + 1.0)", (TORCH,)),
        ("0 / 0", "cross_entropy_totals_kernel", "tl.where((share == 0.0) & (loss == loss), 0.0, mean)", "mean", (EMPTY,)),
        ("accuracy of nothing is NaN", "cross_entropy_totals_kernel", "tl.where(counted == 0.0, 0.0, accuracy)", "accuracy", (EMPTY,)),
        ("infinite gradients of nothing", "cross_entropy_totals_kernel", "tl.where(share == 0.0, 0.0, inverse)", "inverse", (f"{T}test_weights_of_zero",)),
        ("NaN taken for nothing", "cross_entropy_totals_kernel", "(share == 0.0) & (loss == loss)", "(share == 0.0) | (loss != loss)", (OUTSIDE,)),
    ],
    "cross_entropy_backward_kernel": [
        ("the target rounded on its own", "_gradient", "tl.where(col == row.y, dz - row.at_target, dz)", "tl.where(col == row.y, dz.to(tl.bfloat16).to(tl.float32) - row.at_target, dz)", (SURE,)),
        ("the column beside the target", "_gradient", "col == row.y", "col == row.y + 1", (SHORT,)),
        ("no division by the total", "cross_entropy_backward_kernel", "largest, factor / total, bend", "largest, factor / 1.0, bend", (SHORT,)),
        ("no entropy", "_gradient", "e * (row.factor - row.bend * t)", "e * row.factor", (ENTROPY,)),
        ("entropy's gradient at minus infinity", "_gradient", "tl.where(e == 0.0, 0.0, e * (row.factor - row.bend * t))", "e * (row.factor - row.bend * t)", (TILES,)),
        ("lse for log(total) in the entropy's gradient", "cross_entropy_backward_kernel", "(tl.load(entropy_ptr + row) - log_total)", "(tl.load(entropy_ptr + row) - log_total - largest)", (ENTROPY,)),
        ("smoothing of padding", "_gradient", "dz -= tl.where(z > -float(\"inf\"), row.part, 0.0)", "dz -= row.part", (PADDED,)),
        ("smoothing without class weights", "_gradient", "w = row.part * load_tile(weight_ptr + col, mask)", "w = row.part + 0.0 * load_tile(weight_ptr + col, mask)", (BOTH,)),
        ("the target's whole share with smoothing", "cross_entropy_backward_kernel", "at_target = g * (1.0 - label_smoothing)", "at_target = g", (SMOOTHED,)),
        ("the softcap's slope of 1", "_gradient", "slope = slope * bent", "slope = slope + 0.0 * bent", (CAPPED,)),
        ("not divided by the tokens", "cross_entropy_backward_kernel", "g *= tl.load(inverse_ptr)", "g *= 1.0 + 0.0 * tl.load(inverse_ptr)", (TORCH,)),
        ("the first token's gradient for all", "cross_entropy_backward_kernel", "dloss_ptr + row * dloss_stride", "dloss_ptr + row * 0", (SCALED,)),
        ("gradients as if contiguous", "cross_entropy_backward_kernel", "dlse_ptr + row * dlse_stride", "dlse_ptr + row", (ONE_FOR_ALL,)),
        ("ignored rows keep their gradient", "cross_entropy_backward_kernel", "dz = tl.where(valid, dz, 0.0)", "dz = tl.where(valid, dz, 1.0)", (IGNORED,)),
        ("ignored rows are not written", "cross_entropy_backward_kernel", "range(read, last, TILE)", "range(last, last, TILE)", (IGNORED,)),
        ("ignored rows are read", "cross_entropy_backward_kernel", "tl.where(valid, last, first), TILE)", "tl.where(valid, last, last), TILE)", (IGNORED,)),
        ("the last tile left out", "cross_entropy_backward_kernel", "last = tl.minimum(first + span, body)", "last = tl.minimum(first + span, body - TILE)", (LONG,)),
        ("the first span for all", "cross_entropy_backward_kernel", "tl.multiple_of(tl.program_id(1) * span, TILE)", "tl.multiple_of(tl.program_id(1) * 0, TILE)", (GPU, SPANS)),
        ("in place as if contiguous", "cross_entropy_backward_kernel", "out_offset = offset\n", "out_offset = row * cols\n", (STRIDED,)),
        ("32-bit row offsets", "cross_entropy_backward_kernel", "row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)", (FAR,)),
    ],
}  # fmt: skip
