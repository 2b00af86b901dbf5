"""Mutants of the cross entropy kernels, in the format of `tests.ops.norm.mutants`."""

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
    f"{T}test_accuracy_among_equal_logits",
    f"{T}test_sums_over_many_rows[2500]",
    f"{T}test_no_token_has_a_target",
)
TORCH = f"{T}test_equals_pytorch[False-0.0-mean]"
SURE, FAR = f"{T}test_gradient_of_a_confident_target[dtype0-0.999]", f"{T}test_offsets_have_64_bits"
STEPPED, ONE_FOR_ALL = f"{T}test_layout_of_gradients[transposed]", f"{T}test_layout_of_gradients[constant]"
STRIDED, SHIFTED = f"{T}test_in_place_of_strided_rows", f"{T}test_shifted_tokens[1000]"
SPANS, GPU = f"{T}test_splitting_rows_into_spans_changes_no_bit", f"{T}test_configuration_of_gpu[sm_90-20001]"

LINES: dict[str, list[tuple[Any, ...]]] = {
    "cross_entropy_kernel": [
        ("sums not rescaled to a new largest", f"{SOFTMAX}:add_exponentials", "l_i * tl.exp(m_i - m_new) + ", "l_i + ", (LONG, WEIGHTED)),
        ("largest of the last tile only", f"{SOFTMAX}:add_exponentials", "tl.maximum(m_i, tl.max(z, axis=axis))", "tl.max(z, axis=axis) + 0.0 * m_i", (LONG, WEIGHTED)),
        ("lanes not rescaled to a common largest", f"{SOFTMAX}:join_exponentials", "l_i * tl.exp(m_i - tl.expand_dims(m_new, axis))", "l_i", (WEIGHTED,)),
        ("largest starts at 0", "cross_entropy_kernel", "tl.full((LANES,), LOWEST, tl.float32)", "tl.zeros((LANES,), tl.float32)", (LOW,)),
        ("moments not rescaled to a new largest", f"{SOFTMAX}:add_moments", "moment + down * l_i, 0.0", "moment, 0.0", (ENTROPY,)),
        ("moments of lanes not rescaled", f"{SOFTMAX}:join_moments", "moment + down * l_i, 0.0", "moment, 0.0", (ENTROPY,)),
        ("0 times minus infinity", f"{SOFTMAX}:add_moments", "tl.where(e > 0.0, e * t, 0.0)", "e * t", (TILES,)),
        ("only the body", "cross_entropy_kernel", "range(0, cols - body, LANES)", "range(0, 0, LANES)", (ODD,)),
        ("last tile of the body skipped", "cross_entropy_kernel", "range(0, body, TILE)", "range(0, body - TILE, TILE)", (LONG,)),
        ("body starts at the row's first element", "cross_entropy_kernel", "logits_ptr + tl.multiple_of(offset + head, 16 // ELEMENT)", "logits_ptr + tl.multiple_of(offset + 0 * head, 1)", (LONG,)),
        ("no scale", "_scaled_logits", "z = z * scale", "z = z", (SCALED,)),
        ("no softcap", "_scaled_logits", "z, _ = cap(z, softcap)", "z, _ = (z, 0)", (CAPPED,)),
        ("softcap applied to padding", f"{SOFTMAX}:cap", "tl.where(x == -float(\"inf\"), x, limit * t)", "limit * t", (f"{T}test_padding_of_minus_infinity[all]",)),
        ("z loss omitted", "cross_entropy_kernel", "loss += z_loss * lse * lse", "loss += 0.0 * z_loss", (Z,)),
        ("loss not reduced by the smoothing", "cross_entropy_kernel", "(1.0 - label_smoothing) * loss", "loss", (SMOOTHED,)),
        ("smoothing over padding", "_add_spread", "finite = z > -float(\"inf\")", "finite = z == z", (PADDED,)),
        ("smoothing counts padding", "_add_spread", "count += tl.sum(tl.where(finite, 1.0, 0.0), axis=0)", "count += tl.sum(tl.where(z == z, 1.0, 0.0), axis=0)", (PADDED,)),
        ("smoothing without class weights", "_add_spread", "tl.where(finite, w * (z - origin), 0.0)", "tl.where(finite, z - origin, 0.0)", (BOTH,)),
        ("origin 0 for the sum of smoothing", "cross_entropy_kernel", "origin = tl.where(picked > -float(\"inf\"), picked, 0.0)", "origin = picked * 0.0", (SHIFT,)),
        ("class weight ignored", "cross_entropy_kernel", "share = tl.load(weight_ptr + y, mask=valid, other=0.0).to(tl.float32)", "share = 1.0 + 0.0 * tl.load(weight_ptr + y, mask=valid, other=0.0).to(tl.float32)", (WEIGHTED,)),
        ("later equal columns win", "cross_entropy_kernel", "(z == picked) & (col < y)", "(z == picked) & (col > y)", (EQUALS,), 1, 2),
        ("equal columns of the rest ignored", "cross_entropy_kernel", "exists & ((z > picked) | ((z == picked) & (col < y)))", "exists & (z > picked)", (EQUALS,)),
        ("ignored rows are counted", "cross_entropy_kernel", "tl.store(share_ptr + row, tl.where(valid, share, 0.0))", "tl.store(share_ptr + row, share + tl.where(valid, 0.0, 0.0))", (TORCH,)),
        ("ignored rows are hits", "cross_entropy_kernel", "-1.0 if MARK_MISSING else 0.0", "0.0 if MARK_MISSING else 0.0", (EQUALS,)),
        ("ignored rows are read", "cross_entropy_kernel", "cols = tl.where(valid, cols, 0)", "cols = tl.where(valid, cols, cols)", (SHIFTED,)),
        ("loss of an invalid target is 0", "cross_entropy_kernel", "missing = tl.where(wrong, float(\"nan\"), 0.0)", "missing = tl.where(wrong, 0.0, 0.0)", (OUTSIDE,)),
        ("target past the vocabulary accepted", "_load_target", "(y >= 0) & (y < vocab)", "(y >= 0) & (y < vocab + 100)", (OUTSIDE,)),
        ("targets truncated to 32 bits", "_load_target", "y = tl.load(target_ptr + row)", "y = tl.load(target_ptr + row).to(tl.int32)", (f"{T}test_a_target_outside_of_the_vocabulary[4294967299]",)),
        ("32-bit row offsets", "cross_entropy_kernel", "row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)", (FAR,)),
    ],
    "cross_entropy_totals_kernel": [
        ("losses of the last tile only", "cross_entropy_totals_kernel", "losses += tl.load(", "losses = tl.load(", (SUMS,)),
        ("shares of the last tile only", "cross_entropy_totals_kernel", "shares += tl.load(", "shares = tl.load(", (SUMS,)),
        ("last tile of rows skipped", "cross_entropy_totals_kernel", "range(0, rows, TILE)", "range(0, rows - TILE, TILE)", (SUMS,)),
        ("last row skipped", "cross_entropy_totals_kernel", "exists = row < rows", "exists = row < rows - 1", (SUMS,)),
        ("rows past the end counted as tokens", "cross_entropy_totals_kernel", "mask=exists, other=-1.0", "mask=exists, other=0.0", (SUMS,)),
        ("ignored tokens counted as negative hits", "cross_entropy_totals_kernel", "tl.maximum(hit, 0.0)", "hit", (SUMS,)),
        ("a mean over all rows", "cross_entropy_totals_kernel", "mean = loss / share", "mean = loss / rows", (TORCH,)),
        ("gradients of a sum, not of a mean", "cross_entropy_totals_kernel", "inverse = 1.0 / share", "inverse = 1.0 / (0.0 * share + 1.0)", (TORCH,)),
        ("0 / 0", "cross_entropy_totals_kernel", "tl.where((share == 0.0) & (loss == loss), 0.0, mean)", "mean", (EMPTY,)),
        ("accuracy without tokens is NaN", "cross_entropy_totals_kernel", "tl.where(counted == 0.0, 0.0, accuracy)", "accuracy", (EMPTY,)),
        ("infinite gradients without tokens", "cross_entropy_totals_kernel", "tl.where(share == 0.0, 0.0, inverse)", "inverse", (f"{T}test_weights_of_zero",)),
        ("NaN loss treated as no tokens", "cross_entropy_totals_kernel", "(share == 0.0) & (loss == loss)", "(share == 0.0) | (loss != loss)", (OUTSIDE,)),
    ],
    "cross_entropy_backward_kernel": [
        ("target's gradient rounded twice", "_logits_gradient", "tl.where(col == row.y, dz - row.at_target, dz)", "tl.where(col == row.y, dz.to(tl.bfloat16).to(tl.float32) - row.at_target, dz)", (SURE,)),
        ("column after the target", "_logits_gradient", "col == row.y", "col == row.y + 1", (SHORT,)),
        ("no division by the total", "cross_entropy_backward_kernel", "largest, factor / total, dentropy", "largest, factor / 1.0, dentropy", (SHORT,)),
        ("entropy's gradient omitted", "_logits_gradient", "e * (row.factor - row.dentropy * t)", "e * row.factor", (ENTROPY,)),
        ("entropy's gradient is NaN at minus infinity", "_logits_gradient", "tl.where(e == 0.0, 0.0, e * (row.factor - row.dentropy * t))", "e * (row.factor - row.dentropy * t)", (TILES,)),
        ("lse for log(total) in the entropy's gradient", "cross_entropy_backward_kernel", "(tl.load(entropy_ptr + row) - log_total)", "(tl.load(entropy_ptr + row) - log_total - largest)", (ENTROPY,)),
        ("smoothing applied to padding", "_logits_gradient", "dz -= tl.where(z > -float(\"inf\"), row.part, 0.0)", "dz -= row.part", (PADDED,)),
        ("smoothing without class weights", "_logits_gradient", "w = row.part * load_tile(weight_ptr + col, mask)", "w = row.part + 0.0 * load_tile(weight_ptr + col, mask)", (BOTH,)),
        ("target's share not reduced by smoothing", "cross_entropy_backward_kernel", "at_target = g * (1.0 - label_smoothing)", "at_target = g", (SMOOTHED,)),
        ("slope of the softcap is 1", "_logits_gradient", "slope = slope * dcap", "slope = slope + 0.0 * dcap", (CAPPED,)),
        ("not divided by the tokens", "cross_entropy_backward_kernel", "g *= tl.load(inverse_ptr)", "g *= 1.0 + 0.0 * tl.load(inverse_ptr)", (TORCH,)),
        ("first token's upstream gradient for all", "cross_entropy_backward_kernel", "dloss_ptr + row * dloss_stride", "dloss_ptr + row * 0", (SCALED,)),
        ("gradients as if contiguous", "cross_entropy_backward_kernel", "dlse_ptr + row * dlse_stride", "dlse_ptr + row", (ONE_FOR_ALL,)),
        ("ignored rows keep their gradient", "cross_entropy_backward_kernel", "dz = tl.where(valid, dz, 0.0)", "dz = tl.where(valid, dz, 1.0)", (IGNORED,)),
        ("ignored rows are not written", "cross_entropy_backward_kernel", "range(read, last, TILE)", "range(last, last, TILE)", (IGNORED,)),
        ("ignored rows are read", "cross_entropy_backward_kernel", "tl.where(valid, last, first), TILE)", "tl.where(valid, last, last), TILE)", (IGNORED,)),
        ("last tile skipped", "cross_entropy_backward_kernel", "last = tl.minimum(first + span, body)", "last = tl.minimum(first + span, body - TILE)", (LONG,)),
        ("every program writes the first span", "cross_entropy_backward_kernel", "tl.multiple_of(tl.program_id(1) * span, TILE)", "tl.multiple_of(tl.program_id(1) * 0, TILE)", (GPU, SPANS)),
        ("in place as if contiguous", "cross_entropy_backward_kernel", "out_offset = offset\n", "out_offset = row * cols\n", (STRIDED,)),
        ("32-bit row offsets", "cross_entropy_backward_kernel", "row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)", (FAR,)),
    ],
}  # fmt: skip
