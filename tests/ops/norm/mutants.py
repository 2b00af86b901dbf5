"""Mutants of kernels, which prove that the tests can fail; see `mutation` and `test_mutations`.

A line is (what is wrong, "file:function", old text, new text, tests that should notice[, nth occurrence, count]), where
count is the number of occurrences in that function. A replacement keeps the number of lines, so that the other kernels
of the file are found in Triton's cache, whose keys contain line numbers.
"""

# ruff: noqa: E501

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.mutation import Mutant

NORM, LAUNCH, OP, COPIES, ROWS, SUMS = (
    f"ops/{name}.py"
    for name in ("norm/kernels", "norm/launch", "norm/norm", "common/copies", "common/loads", "common/sums")
)
REDUCE = "tiles/reduce.py"

# ---- quick tests ------------------------------------------------------------------------------------------------

C, L = "catalogue/test_workloads.py::", "catalogue/test_layouts.py::"
D, N = "ops/norm/test_combinations.py::", "ops/norm/test_inputs.py::"


def workload(check: str, name: str) -> str:
    return f"{C}test_workload[{check}-{name}]"


def norms(case: str) -> str:
    return f"quant/test_norms.py::test_norms[{case}]"


LAYER = f"{N}test_size_of_a_norm[127-129]"  # layer norm, every input, modulated by row, no loop in backward
LAYER_LOOP = f"{N}test_size_of_a_norm[17-2049]"
RESIDUAL = workload("accuracy", "norm:odd/760:residual:8192")
PLAIN_ODD = workload("accuracy", "norm:odd/33:plain:8192")
PLAIN_LOOP = workload("accuracy", "norm:odd/1025:plain:8192")
BY_SAMPLE = workload("accuracy", "norm:dit-xl/hidden:adaln-sample:8192")
BOTH = norms("e4m3:1x128:te:pow2-rms_norm-True-True-dtype1")
BOTH_LAYER = norms("e4m3:1x128:deepgemm:pow2-layer_norm-True-True-dtype9")
KNOWN = norms(
    "e2m1:nvfp4:torchao-layer_norm-False-True-dtype19"
)  # rows after a pass that took the statistics
TILES = f"{D}test_amax_of_tiles"
ROW_LOOP = "quant/test_norms.py::test_norms_of_other_lengths[1100-e4m3:row:te]"
SHIFTED = f"{N}test_variance_of_rows_far_from_zero"
FAR = f"{N}test_offsets_have_64_bits"
ANY_TILE = f"{D}test_largest_element_in_any_tile_of_a_row"
PRE_BIAS = workload("accuracy", "norm:odd/1025:pre-bias:8192")
GATED = workload("accuracy", "norm:dit-xl/hidden:gated-sample:8192")
GATED_SUM = "ops/norm/test.py::test_residual_gate_per_row_and_per_sample"
UNROUNDED = workload("accuracy", "norm:odd/1025:unrounded-sum:8192")
WIDE = workload("accuracy", "norm:odd/1025:fp32-residual:8192")
VLLM = "ops/norm/test.py::test_unrounded_sum_matches_vllm"
UNROUNDED_CODES = "ops/norm/test.py::test_quantized_unrounded_sum"
PRE_BIAS_ALONE = "ops/norm/test.py::test_pre_bias_without_a_residual"
QUANTIZED_SUM = "ops/norm/test.py::test_quantized_norm_of_all_terms"
TWO_SIZES = f"{D}test_gradients_over_samples_of_two_sizes"
SAMPLES, SAMPLES_LOOP, SAMPLES_GPU = (
    f"{D}test_gradients_over_samples_of_many_rows[{case}]" for case in ("cpu-200", "cpu-1100", "sm_90-200")
)


# ---- norms --------------------------------------------------------------------------------------------------------

DOWN_TO_BF16 = (
    "(({}).to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)"  # truncated, not rounded
)

_NORM: list[tuple[Any, ...]] = [
    ("no eps", "norm_kernel", " + eps)", ")", (f"{N}test_values",)),
    ("eps outside the root", "norm_kernel", ") + eps),", ")) + eps,", (f"{N}test_values", PLAIN_ODD)),
    ("mean over the tiles, not the columns", "norm_kernel", "cols.to(tl.float32)) + eps", "(tl.cdiv(cols, TILE) * TILE).to(tl.float32)) + eps", (PLAIN_ODD,)),
    ("statistics without the last tile", "norm_kernel", "range(0, cols, TILE)", "range(0, cols - TILE, TILE)", (PLAIN_LOOP,), 1, 2),
    ("variance with lanes that have no element", "_statistics", "tl.where(mask, centered, 0.0)", "centered", (f"{SHIFTED}[1025-10000.0]",)),
    ("variance about 0", "_statistics", "centered = h - mean[:, None]", "centered = h", (f"{SHIFTED}[200-10000.0]",)),
    ("last tile counted as full", "norm_kernel", "tl.minimum(cols - start, TILE).to(tl.float32)", "tl.cast(TILE, tl.float32)", (LAYER_LOOP,)),
    ("unrounded h", "_load_h", "round_promoted(h, source.x, source.residual)", "h", (RESIDUAL,)),
    ("unrounded sum rounded", "_load_h", " and not UNROUNDED", "", (UNROUNDED,)),
    ("unrounded sum read where it is rounded", "_load_again", " and not UNROUNDED", "", (UNROUNDED,)),
    ("h stored over a term that is added again", "norm_kernel", "LATE: tl.constexpr = UNROUNDED and NEEDS_Y", "LATE: tl.constexpr = False", (f"{VLLM}[1100]",)),
    ("h of an unrounded sum not stored", "norm_kernel", "stored.h is not None and LATE", "stored.y is None and LATE", (f"{VLLM}[1100]",)),
    ("h of a first pass stored over an input of the second", f"{LAUNCH}:_Quantized.run", "if several and self.a.unrounded_sum", "if several and False", (f"{UNROUNDED_CODES}[nvfp4-residual]",)),
    ("second pass reads the rounded h", f"{LAUNCH}:_Quantized._read_h", " and not self.a.unrounded_sum", "", (f"{UNROUNDED_CODES}[nvfp4-None]",)),
    ("sum of two dtypes rounded to x's", f"{ROWS}:round_promoted", "return value", "return round_to_dtype(value, ptr)", (WIDE,)),
    ("residual subtracted", "_load_h", "h += load_tile", "h -= load_tile", (RESIDUAL,)),
    ("no pre_bias", "_load_h", "h += _load_vector(", "h += 0.0 * _load_vector(", (PRE_BIAS,)),
    ("pre_bias added after the gate", "_load_h", """    if source.pre_bias is not None:
        h += _load_vector(source.pre_bias, tile)
    if source.gate is not None:
        h *= load_tile(source.gate + at.gate[:, None] + tile.col[None, :], tile.mask)
""", """    if source.gate is not None:
        h *= load_tile(source.gate + at.gate[:, None] + tile.col[None, :], tile.mask)
    if source.pre_bias is not None:
        h += _load_vector(source.pre_bias, tile)
""", (GATED,)),
    ("h without a residual not rounded", "_load_h", "(source.residual is not None or source.pre_bias is not None)", "source.residual is not None", (PRE_BIAS,)),
    ("gate not applied", "_load_h", "h *= load_tile(", "h *= 1.0 + 0.0 * load_tile(", (GATED,)),
    ("residual gated as well", "_load_h", "h += load_tile(source.residual", "h = h + load_tile(source.gate + at.gate[:, None] + tile.col[None, :], tile.mask) * load_tile(source.residual", (f"{GATED_SUM}[rms_norm-lead0]",)),
    ("every sample gated like the first", "norm_kernel", "_sample_offset(row, source.gated,", "_sample_offset(row * 0, source.gated,", (GATED,)),
    ("gate read at the modulation's stride", "norm_kernel", "_sample_offset(row, source.gated,", "_sample_offset(row, formula.modulated,", (GATED,)),
    ("h of a pre_bias without a residual not saved", f"{OP}:NormOp.keep", "a.x if o.residual is None else o.residual", "o.residual if a.residual is not None and o.residual is not None else a.x", (f"{PRE_BIAS_ALONE}[rms_norm]",)),
    ("pre_bias added twice", f"{LAUNCH}:_Quantized._read_h", "pre_bias=None, ", "", (f"{QUANTIZED_SUM}[128x128-rows]",)),
    ("h gated twice", f"{LAUNCH}:_Quantized._read_h", ", gate=None", "", (f"{QUANTIZED_SUM}[nvfp4-rows]",)),
    ("y rounded before it is encoded", "_affine", "return y", "return round_promoted(y, source.x, None)", ("quant/test_norms.py::test_norm_codes_are_those_of_the_fp32_result",)),
    ("y truncated, not rounded", "norm_kernel", "col[None, :], y, exists)", f"col[None, :], {DOWN_TO_BF16.format('y')}, exists)", (PLAIN_ODD,)),
    ("weight and bias swapped", "norm_kernel", "_affine(value, moments, formula,", "_affine(value, moments, Formula(formula.bias, formula.weight, formula.scale, formula.shift, formula.modulated, formula.weight_offset),", (LAYER,)),
    ("no weight offset", "_affine", "tile) + formula.weight_offset)", "tile))", (workload("accuracy", "norm:gemma-7b/hidden:gemma:8192"),)),
    ("llama without its rounding", "_affine", "y = round_promoted(y, source.x, source.residual)", "y = y", (workload("accuracy", "norm:odd/200:llama:8192"),)),
    ("scaled by scale, not 1 + scale", "_affine", "y * (1.0 + load_tile(", "y * (load_tile(", (LAYER,)),
    ("every sample modulated like the first", "norm_kernel", "_sample_offset(row, formula.modulated,", "_sample_offset(row * 0, formula.modulated,", (BY_SAMPLE,)),
    ("32-bit row offsets", "norm_kernel", "tl.program_id(0).to(tl.int64)", "tl.program_id(0).to(tl.int32)", (f"{FAR}[plain]",)),
    ("variance saved for 1 / rms", "norm_kernel", "tl.store(statistics.rstd + row, rstd,", "tl.store(statistics.rstd + row, rstd * rstd,", (LAYER,)),
    ("mean not saved", "norm_kernel", "tl.store(statistics.mean + row, mean,", "tl.store(statistics.mean + row, mean * 0.0,", (LAYER,)),
    ("residual written at x's stride", "norm_kernel", "tl.multiple_of(row * cols", "tl.multiple_of(row * source.outer_stride", (f"{L}test_layout_of_inputs[everything-padded]",)),
    ("row amax without the last tile", "norm_kernel", "range(0, cols, TILE)", "range(0, cols - TILE, TILE)", (f"{ANY_TILE}[e4m3:row:te]",), 2, 2),
    ("row amax of only the last tile", "norm_kernel", "largest = larger(largest, amax(y, axis=1))", "largest = amax(y, axis=1)", (ROW_LOOP,)),
    ("tensor amax of only the last tile", "norm_kernel", "program_amax = larger(program_amax, amax(y, axis=1))", "program_amax = amax(y, axis=1)", (workload("quantized_bytes", "norm:llama3-70b/hidden:nvfp4:1"),)),
    ("inner rows at the outer stride", f"{ROWS}:row_offset", "(row % inner) * inner_stride", "(row % inner) * outer_stride", (workload("accuracy", "norm:qwen3-30b-a3b/k-heads:per-head:8192"),)),
    ("rows past the end in a tile of rows", "norm_kernel", "tile_mask(row, lane, rows, cols, ROWS_MASKED, COLS_MASKED)", "tile_mask(row, lane, rows + 1, cols, ROWS_MASKED, COLS_MASKED)", (f"{D}test_nothing_is_written_past_the_end_as_configured_for[sm_90]",)),
    ("passed scale read as an amax", "norm_kernel", "tensor_factor(Encoding(scale_source, FP32_MAX, FORMAT, CAST, STATIC))", "tensor_factor(Encoding(scale_source, FP32_MAX, FORMAT, CAST, False))", ("quant/test_norms.py::test_norms_with_a_given_scale",)),
    ("last rows skipped", f"{LAUNCH}:_rows_launch", "(-(-layout.rows // config.rows), 1, 1)", "(-(-(layout.rows - 1) // config.rows), 1, 1)", (PLAIN_ODD,)),
    ("amax pass without the residual", f"{LAUNCH}:_Quantized.rows_pass", "**operands.members(", "**(operands if copy else operands._replace(residual=None)).members(", (workload("quantized_bytes", "norm:odd/33:nvfp4:1"),)),
    ("statistics of the first row for all", "norm_kernel", "rstd = tl.load(statistics.rstd + row,", "rstd = tl.load(statistics.rstd + row * 0,", (KNOWN,)),
    ("mean not read", "norm_kernel", "mean = tl.load(statistics.mean + row, mask=row < rows, other=0.0)", "mean = tl.load(statistics.mean + row, mask=row < rows, other=0.0) * 0.0", (KNOWN,)),
    ("residual added twice", f"{LAUNCH}:_Quantized._read_h", "residual=None, ", "", (KNOWN,)),
    ("statistics of x without the residual", f"{LAUNCH}:_Quantized.rows_pass", "_replace(weight=None,", "_replace(residual=None, weight=None,", ("ops/norm/test.py::test_columnwise_copy_does_not_depend_on_the_rowwise_one",)),
    ("moments merged without the difference of means", f"{REDUCE}:merge_moments", " + delta * delta * count * share", "", (LAYER_LOOP,)),
]  # fmt: skip

_STRIPE: list[tuple[Any, ...]] = [
    ("tiles counted without the last", "norm_stripe_kernel", "tiles = tl.cdiv(cols, TILE)", "tiles = tl.maximum(cols // TILE, 1)", (BOTH,)),
    ("last tile not launched", f"{LAUNCH}:_Quantized.stripes_pass", "(tiles, 1, 1)", "(max(tiles - 1, 1), 1, 1)", (BOTH,)),
    ("every program computes the first tile", "norm_stripe_kernel", "(tl.program_id(0) % tiles) * TILE", "(tl.program_id(0) % tiles) * 0", (BOTH,)),
    ("every program computes the first stripe", "norm_stripe_kernel", "(tl.program_id(0) // tiles)", "(tl.program_id(0) // tiles * 0)", (BOTH,)),
    ("x read in place of h", f"{LAUNCH}:_Quantized._read_h", "x=self.o.residual, ", "", (BOTH,)),
    ("h read at x's stride", f"{LAUNCH}:_Layout.of_h", "inner=1, outer_stride=self.cols, ", "inner=1, ", (f"{L}test_layout_of_inputs[both_copies-padded]",)),
    ("1 / rms of the first stripe for all", "norm_stripe_kernel", "statistics.rstd + row,", "statistics.rstd + row % ROWS,", (BOTH,)),
    ("1 / rms of the first row for all", "norm_stripe_kernel", "statistics.rstd + row,", "statistics.rstd + row * 0,", (BOTH,)),
    ("mean not read", "norm_stripe_kernel", "mean = tl.load(statistics.mean + row, mask=row < rows, other=0.0)", "mean = tl.load(statistics.mean + row, mask=row < rows, other=0.0) * 0.0", (BOTH_LAYER,)),
    ("weight and bias swapped", "norm_stripe_kernel", "rstd), formula,", "rstd), Formula(formula.bias, formula.weight, formula.scale, formula.shift, formula.modulated, formula.weight_offset),", (BOTH,)),
    ("llama without its rounding", "norm_stripe_kernel", "source, LLAMA)", "source, False)", (f"{D}test_both_copies_with[rms_norm-llama]",)),
    ("no weight offset", "norm_stripe_kernel", "rstd), formula,", "rstd), Formula(formula.weight, formula.bias, formula.scale, formula.shift, formula.modulated, 0.0),", (f"{D}test_both_copies_with[layer_norm-gemma]",)),
    ("no shift", "norm_stripe_kernel", "rstd), formula,", "rstd), Formula(formula.weight, formula.bias, formula.scale, None, formula.modulated, formula.weight_offset),", (f"{D}test_both_copies_with[layer_norm-by sample]",)),
    ("every sample modulated like the first", "norm_stripe_kernel", "_sample_offset(row, formula.modulated,", "_sample_offset(row * 0, formula.modulated,", (f"{D}test_both_copies_with[layer_norm-by sample]",)),
    ("nested rows read as plain rows", "norm_stripe_kernel", "source.inner_stride, NESTED, ALIGN)", "source.inner_stride, False, ALIGN)", (f"{L}test_layout_of_inputs[columns-permuted]",)),
    ("32-bit row offsets", "norm_stripe_kernel", "(tl.program_id(0) // tiles).to(tl.int64)", "(tl.program_id(0) // tiles).to(tl.int32)", (f"{FAR}[1x128-both]",)),
    ("rows past the end read", "norm_stripe_kernel", "mask = tile_mask(row, col, rows, cols, True, COLS_MASKED)", "mask = tile_mask(row, col, rows + 1, cols, True, COLS_MASKED)", (workload("guard_bands", "norm:odd/200:1x128-both:8192"),)),
    ("tensor amax of a tile's first row", "norm_stripe_kernel", "amax(amax(y, axis=1), axis=0)", "amax(tl.where(row == stripe * ROWS, amax(y, axis=1), 0.0), axis=0)", (f"{TILES}[cpu-300]",)),
    ("all tiles of a stripe store amax at one position", "norm_stripe_kernel", "stored.amax + tl.program_id(0)", "stored.amax + tl.program_id(0) // tiles", (f"{TILES}[cpu-300]",)),
    ("no pre_bias", "_load_h", "h += _load_vector(", "h += 0.0 * _load_vector(", (f"{QUANTIZED_SUM}[1x128-both]",)),
    ("unrounded sum rounded", "norm_stripe_kernel", "_load_h(source, at, tile, UNROUNDED)", "_load_h(source, at, tile, False)", (f"{UNROUNDED_CODES}[128x128-None]",)),
    ("residual of the first row for all", "norm_stripe_kernel", "row * source.residual_stride", "row * 0 * source.residual_stride", (f"{UNROUNDED_CODES}[128x128-None]",)),
    ("transposed copy not transposed", f"{COPIES}:store_transposed", "codes = tl.trans(codes)", "codes = codes", (BOTH,)),
    ("scales of all stripes at the position of the first", f"{COPIES}:store_stripe", "group = stripe.number * (STRIPE // G) + tl.arange", "group = stripe.number * 0 + tl.arange", (BOTH,)),
    ("passed scale read as an amax", "norm_stripe_kernel", "CAST, STATIC)", "CAST, False)", ("quant/test_norms.py::test_norms_with_a_given_scale",)),
]  # fmt: skip

_BACKWARD: list[tuple[Any, ...]] = [
    ("sum not recomputed", "_gradient_of_z", "z += v", "z += 0.0 * v", (UNROUNDED,)),
    ("sum recomputed without the gate", "_gradient_of_z", "v *= load_tile(", "v *= 1.0 + 0.0 * load_tile(", (f"{N}test_size_of_an_unrounded_sum[5-1100]",)),
    ("gradient of the residual in x's dtype", "ops/norm/norm.py:NormBackwardOp.allocate", "empty_like(a.h, a.residual_dtype)", "empty_like(a.h, a.x_dtype)", (WIDE,)),
    ("one gradient for two dtypes", f"{OP}:NormOp.backward", " and saved.x_dtype is saved.residual_dtype", "", (WIDE,)),
    ("upstream gradient of ones", "_gradient_of_z", "d = dy\n", "d = dy * 0.0 + 1.0\n", (LAYER,)),
    ("upstream gradient read without a mask", "_gradient_of_z", "dy = load_tile(upstream.dy + at.dy[:, None] + tile.col[None, :], tile.mask)", "dy = load_tile(upstream.dy + at.dy[:, None] + tile.col[None, :], None)", (BY_SAMPLE,)),
    ("no residual gradient", "norm_backward_kernel", "dh += load_tile(", "dh += 0.0 * load_tile(", (RESIDUAL,)),
    ("residual gradient added before the norm's", "norm_backward_kernel", """dh = dh * rstd[:, None]
            if upstream.dresidual is not None:
                dh += load_tile(upstream.dresidual + at.dresidual[:, None] + col[None, :], mask)
""", """
            if upstream.dresidual is not None:
                dh += load_tile(upstream.dresidual + at.dresidual[:, None] + col[None, :], mask)
            dh = dh * rstd[:, None]
""".removeprefix("\n").lstrip(), (RESIDUAL,)),
    ("no weight gradient", "norm_backward_kernel", "_add_rows(sum_weight, d * z,", "_add_rows(sum_weight, d * z * 0.0,", (PLAIN_ODD,)),
    ("weight gradient a mean", "norm_backward_kernel", "_add_rows(sum_weight, d * z,", "_add_rows(sum_weight, d * z / (last - first),", (f"{N}test_size_of_a_norm[127-129]",)),
    ("weight gradient of only the last row", "norm_backward_kernel", "_add_rows(sum_weight, d", "_add_rows(sum_weight * 0.0, d", (LAYER,)),
    ("bias gradient from z", "norm_backward_kernel", "_add_rows(sum_bias, d,", "_add_rows(sum_bias, d * z,", (LAYER,)),
    ("gradient through 1 / rms missing", "norm_backward_kernel", "dh = t - z * (", "dh = t - 0.0 * z * (", (PLAIN_ODD,)),
    ("gradient through the mean missing", "norm_backward_kernel", "dh -= (ts", "dh -= 0.0 * (ts", (LAYER,)),
    ("sums begin with what was in memory", "norm_backward_kernel", "begin > first,", "begin >= first,", (PLAIN_LOOP,)),
    ("sums restart at each row", "norm_backward_kernel", "begin > first,", "begin < first,", (SAMPLES_LOOP,)),
    ("last row of a program skipped", "norm_backward_kernel", "tl.minimum(first + programs.program_rows, programs.sample_rows)", "tl.minimum(first + programs.program_rows, programs.sample_rows) - 1", (PLAIN_ODD,)),
    ("last row of all skipped", "norm_backward_kernel", "tl.minimum(first + programs.program_rows, programs.sample_rows)", "tl.minimum(first + programs.program_rows, programs.sample_rows - 1)", (PLAIN_ODD,)),
    ("all samples read the first one's rows", "norm_backward_kernel", "row = sample_begin + local_row", "row = sample_begin * 0 + local_row", (BY_SAMPLE,)),
    ("every sample scaled like the first", "norm_backward_kernel", "row * 0 + modulation_row)", "row * 0)", (BY_SAMPLE,)),
    ("no weight offset", "_gradient_of_z", " + formula.weight_offset)", ")", (workload("accuracy", "norm:gemma-7b/hidden:gemma:8192"),)),
    ("no weight", "_gradient_of_z", "t = t * (", "t = t + 0.0 * (", (PLAIN_ODD,)),
    ("gradient of scale without the bias", "norm_backward_kernel", "y = y + _load_vector(", "y = y + 0.0 * _load_vector(", (LAYER,)),
    ("llama's weight gradient from the exact z", "norm_backward_kernel", "z = round_promoted(z, upstream.h, added.x)", "z = z", (workload("accuracy", "norm:odd/200:llama:8192"),)),
    ("32-bit row offsets", "norm_backward_kernel", "program = tl.program_id(0).to(tl.int64)", "program = tl.program_id(0).to(tl.int32)", (f"{FAR}[plain]",)),
    ("gradient of scale already scaled", "norm_backward_kernel", "_add_or_store(sum_scale, dy * y,", "_add_or_store(sum_scale, d * y,", (SAMPLES,)),
    ("gradient of scale by row already scaled", "norm_backward_kernel", "_add_or_store(sum_scale, dy * y,", "_add_or_store(sum_scale, d * y,", (LAYER,)),
    ("gradient of shift already scaled", "norm_backward_kernel", "_add_or_store(sum_shift, dy,", "_add_or_store(sum_shift, d,", (LAYER,)),
    ("programs of a sample share a partial sum", "norm_backward_kernel", "sums_off = tl.multiple_of(program * cols", "sums_off = tl.multiple_of(sample * cols", (LAYER,)),
    ("mean not subtracted", "_gradient_of_z", "z = z - moments.mean[:, None]", "z = z", (LAYER,)),
    ("upstream gradient read at h's stride", "norm_backward_kernel", "upstream.dy_outer_stride, upstream.dy_inner_stride, NESTED", "upstream.h_outer_stride, upstream.h_inner_stride, NESTED", (f"{L}test_layout_of_gradients[everything-expanded]",)),
    ("dx truncated, not rounded", "norm_backward_kernel", "dx_off, dv, mask)", f"dx_off, {DOWN_TO_BF16.format('dv')}, mask)", (PLAIN_ODD,)),
    ("rows past the end of a tile of rows", "norm_backward_kernel", "tile_mask(local_row, col, last, cols, ROWS_MASKED, COLS_MASKED)", "tile_mask(local_row, col, last + 1, cols, ROWS_MASKED, COLS_MASKED)", (f"{D}test_nothing_is_written_past_the_end_as_configured_for[sm_90]",), 2, 2),
    ("gate not applied", "norm_backward_kernel", "dv = dh * load_tile(", "dv = dh + 0.0 * load_tile(", (GATED,)),
    ("residual's gradient gated", "norm_backward_kernel", "_store_tile(gradients.residual + dx_off, dh, mask)", "_store_tile(gradients.residual + dx_off, dh * load_tile(added.gate + at.gate[:, None] + col[None, :], mask), mask)", (GATED,)),
    ("gradient of the gate gated", "norm_backward_kernel", "_add_or_store(sum_gate, dh * v,", "_add_or_store(sum_gate, dh * v * load_tile(added.gate + at.gate[:, None] + col[None, :], mask),", (GATED,)),
    ("gradient of the gate without the norm's", "norm_backward_kernel", "_add_or_store(sum_gate, dh * v,", "_add_or_store(sum_gate, (dh - (t - z * (tz / count)[:, None]) * rstd[:, None]) * v,", (GATED,)),
    ("gradient of the gate without pre_bias", "_load_added", "v += _load_vector(added.pre_bias, tile)", "v += 0.0 * _load_vector(added.pre_bias, tile)", (GATED,)),
    ("gradient of the gate from h", "norm_backward_kernel", "v = _load_added(added, at, tile)", "v = load_tile(upstream.h + at.h[:, None] + col[None, :], mask)", (GATED,)),
    ("gradient of the gate of only the last row", "norm_backward_kernel", "_add_or_store(sum_gate, dh", "_add_or_store(sum_gate * 0.0, dh", (SAMPLES,)),
    ("gradient of the gate at h's stride", "norm_backward_kernel", "row * added.x_stride", "row * upstream.h_outer_stride", (f"{L}test_layout_of_inputs[everything-padded]",)),
    ("every sample gated like the first", "norm_backward_kernel", "row * 0 + gate_row)", "row * 0)", (GATED,)),
    ("gate of the modulation's sample", "norm_backward_kernel", "sample_begin // added.gated.rows", "sample_begin // formula.modulated.rows", (f"{TWO_SIZES}[finer gate]",)),
    ("modulation of the gate's sample", "norm_backward_kernel", "sample_begin // formula.modulated.rows", "sample_begin // added.gated.rows", (f"{TWO_SIZES}[finer gate]",)),
    ("gradient of pre_bias without the gate", "norm_backward_kernel", "_add_rows(sum_pre_bias, dv,", "_add_rows(sum_pre_bias, dh,", (GATED,)),
    ("gradient of pre_bias of only the last row", "norm_backward_kernel", "_add_rows(sum_pre_bias, dv", "_add_rows(sum_pre_bias * 0.0, dv", (SAMPLES,)),
    ("samples of the larger size", f"{LAUNCH}:_backward_launch", "sample_rows = min(", "sample_rows = max(", (f"{TWO_SIZES}[finer gate]",)),
    ("gradient of a row's gate summed", f"{LAUNCH}:_backward_launch", "GATE_PER_ROW=layout.rows_per_gate == 1", "GATE_PER_ROW=False", (f"{TWO_SIZES}[gate by row]",)),
    ("sums over the row without the last tile", "norm_backward_kernel", "range(0, cols, TILE)", "range(0, cols - TILE, TILE)", (PLAIN_LOOP,)),
]  # fmt: skip

_SUM: list[tuple[Any, ...]] = [
    ("first partial sum skipped", "_sum_kernel", "range(0, count, ROWS)", "range(1, count, ROWS)", (PLAIN_ODD,)),
    ("last partial sum skipped", "_sum_kernel", "range(0, count, ROWS)", "range(0, count - 1, ROWS)", (PLAIN_ODD,)),
    ("one partial sum too many", "_sum_kernel", "(row < count)", "(row <= count)", (SAMPLES_GPU,)),
    ("only the first partial sums", "_sum_kernel", "range(0, count, ROWS)", "range(0, tl.minimum(count, ROWS), ROWS)", (PLAIN_ODD,)),
    ("mean instead of sum", "_sum_kernel", "total.to(", "(total / count).to(", (PLAIN_ODD,)),
    ("only the last partial sum", "_sum_kernel", "total += tl.sum", "total = tl.sum", (PLAIN_ODD,)),
    ("partial sums of another sample", "_sum_kernel", "(outer * count + row)", "(outer + row)", (BY_SAMPLE,)),
    ("all samples stored at the position of the first", "_sum_kernel", "outer * cols, ALIGN) + col", "outer * 0, ALIGN) + col", (BY_SAMPLE,)),
    ("last columns skipped", "sum_partials", "(-(-cols // width) * (rows // count), 1, 1)", "(max(cols // width, 1) * (rows // count), 1, 1)", (PLAIN_LOOP,)),
    ("every program reads the first tile", "_sum_kernel", "(tl.program_id(0) % tiles) * TILE", "(tl.program_id(0) % tiles) * 0", (PLAIN_LOOP,)),
    ("only the first sample", "sum_partials", "(-(-cols // width) * (rows // count), 1, 1)", "(-(-cols // width), 1, 1)", (BY_SAMPLE,)),
    ("weight gradient of only the first sample", f"{LAUNCH}:launch_norm_backward", "sum_partials(partials, grad, count // (grad.numel() // cols))", "sum_partials(partials[: count // 2] if grad is o.weight else partials, grad, count // 2 if grad is o.weight else count // (grad.numel() // cols))", (SAMPLES,)),
    ("summed in the weight's dtype", "_sum_kernel", "total += tl.sum(", "total = total.to(out_ptr.dtype.element_ty).to(tl.float32) + tl.sum(", (LAYER,)),
    ("partial sums in bf16", f"{LAUNCH}:launch_norm_backward", "scratch((count, cols), torch.float32,", "scratch((count, cols), torch.bfloat16,", (LAYER,)),
    ("last column skipped", "_sum_kernel", "exists = col < cols", "exists = col < cols - 1", (PLAIN_ODD,)),
    ("columns past a multiple of 16 skipped", "_sum_kernel", "cols = (cols // ALIGN) * ALIGN", "cols = (cols // 16) * 16", (PLAIN_LOOP,)),
    ("sums truncated, not rounded", "_sum_kernel", "total.to(", DOWN_TO_BF16.format("total") + ".to(", (PLAIN_ODD,)),
]  # fmt: skip


def _mutants(kernel: str, file: str, lines: list[tuple[Any, ...]]) -> list[Mutant]:
    mutants = []
    for what, where, old, new, tests, *which in lines:
        path, _, inside = where.rpartition(":")
        mutants.append(Mutant(kernel, what, path or file, inside, old, new, tests, *which))
    return mutants


# The other families of ops have files of their own.
FILES = sorted(set(Path(__file__).parents[1].glob("*/mutants*.py")) - {Path(__file__)})
FAMILIES = tuple(import_module(f"tests.ops.{path.parent.name}.{path.stem}") for path in FILES)

MUTANTS: tuple[Mutant, ...] = (
    *_mutants("norm_kernel", NORM, _NORM),
    *_mutants("norm_stripe_kernel", NORM, _STRIPE),
    *_mutants("norm_backward_kernel", NORM, _BACKWARD),
    *_mutants("_sum_kernel", SUMS, _SUM),
    *(
        m
        for module in FAMILIES
        for kernel, lines in module.LINES.items()
        for m in _mutants(kernel, module.FILE, lines)
    ),
)
