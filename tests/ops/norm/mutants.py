"""The ways in which kernels are broken to prove that the tests notice; see `mutation` and `test_mutations`.

A line is (what is wrong, where, old text, new text, tests that should notice[, nth occurrence, of how many]).
Where is "file:function"; of how many: in that function. A replacement keeps the number of lines, so that the
other kernels of the file are found in Triton's cache, whose keys have line numbers in them.
"""

# ruff: noqa: E501

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.mutation import Mutant

NORM, HOST, QUANTIZE, COPIES, ROWS, SUMS = (
    f"ops/{name}.py"
    for name in ("norm/kernels", "norm/norm", "quantize", "common/copies", "common/rows", "common/sums")
)
NUMBERS, TILE, REDUCE, SCALES = (f"tiles/{name}.py" for name in ("numbers", "quantize", "reduce", "scales"))

# ---- tests that catch things quickly ----------------------------------------------------------------------------

B, C, L = "quant/test_bytes.py::", "catalogue/test_workloads.py::", "catalogue/test_layouts.py::"
D, N, G = "ops/norm/test_combinations.py::", "ops/norm/test_inputs.py::", "ops/glu/test.py::"


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
BY_ROW = workload("accuracy", "norm:odd/200:adaln-row:8192")
BOTH = norms("e4m3:1x128:te:pow2-rms_norm-True-True-dtype1")
BOTH_LAYER = norms("e4m3:1x128:deepgemm:pow2-layer_norm-True-True-dtype9")
BOTH_BACKWARD = workload("accuracy", "norm:odd/200:1x128-both:8192")
KNOWN = norms(
    "e2m1:nvfp4:torchao-layer_norm-False-True-dtype19"
)  # rows after a pass that took the statistics
TILES = f"{D}test_amax_of_tiles"
ROW_LOOP = "quant/test_norms.py::test_norms_of_other_lengths[1100-e4m3:row:te]"
SHIFTED = f"{N}test_variance_of_rows_far_from_zero"
FAR = f"{N}test_offsets_have_64_bits"
SHAPES = f"{B}test_shapes"
EVERY = f"{B}test_every_format"
PADS = "quant/test_strides.py::test_strides_and_pads_of_codes"
DRAWS = "quant/test_stochastic.py::test_stochastic_rounding_draws_what_it_says[e4m3]"
DECODE = "quant/test_dequantize.py::test_dequantize"
ANY_TILE = f"{D}test_largest_number_in_any_tile_of_a_row"
ANY_ROW = f"{D}test_largest_number_in_any_of_many_rows[e4m3:tensor:te]"
GPU_ROWS = f"{D}test_quantiser_configured_for[sm_90-e4m3:1x128:te:pow2-rows]"
SAMPLES, SAMPLES_LOOP, SAMPLES_GPU = (
    f"{D}test_gradients_over_samples_of_many_rows[{case}]" for case in ("cpu-200", "cpu-1100", "sm_90-200")
)


# ---- norms --------------------------------------------------------------------------------------------------------

MASKED = ", mask=row < rows)"
DOWN_TO_BF16 = "(({}).to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)"  # cut, not rounded

_NORM: list[tuple[Any, ...]] = [
    ("no eps", "norm_kernel", " + eps)", ")", (f"{N}test_values",)),
    ("eps outside the root", "norm_kernel", ") + eps),", ")) + eps,", (f"{N}test_values", PLAIN_ODD)),
    ("mean over the tiles, not the columns", "norm_kernel", "cols.to(tl.float32)) + eps", "(tl.cdiv(cols, TILE) * TILE).to(tl.float32)) + eps", (PLAIN_ODD,)),
    ("statistics without the last tile", "norm_kernel", "range(0, cols, TILE)", "range(0, cols - TILE, TILE)", (PLAIN_LOOP,), 1, 2),
    ("variance with lanes that have no element", "_statistics", "tl.where(mask, centred, 0.0)", "centred", (f"{SHIFTED}[1025-10000.0]",)),
    ("variance about 0", "_statistics", "centred = h - mean[:, None]", "centred = h", (f"{SHIFTED}[200-10000.0]",)),
    ("last tile counted as full", "norm_kernel", "tl.minimum(cols - start, TILE).to(tl.float32)", "tl.cast(TILE, tl.float32)", (LAYER_LOOP,)),
    ("unrounded h", "_load_h", "h.to(x_ptr.dtype.element_ty).to(tl.float32)", "h", (RESIDUAL,)),
    ("residual subtracted", "_load_h", "h += load_tile", "h -= load_tile", (RESIDUAL,)),
    ("y rounded before it is encoded", "_affine", "return y", "return y.to(DTYPE).to(tl.float32)", ("quant/test_norms.py::test_norm_codes_are_those_of_the_fp32_result",)),
    ("y cut, not rounded", "norm_kernel", "y.to(y_ptr.dtype.element_ty)", DOWN_TO_BF16.format("y") + ".to(y_ptr.dtype.element_ty)", (PLAIN_ODD,)),
    ("weight and bias swapped", "norm_kernel", "value, mean, rstd, weight_ptr, bias_ptr,", "value, mean, rstd, bias_ptr, weight_ptr,", (LAYER,)),
    ("no weight offset", "_affine", "COLS_MASKED) + weight_offset)", "COLS_MASKED))", (workload("accuracy", "norm:gemma-7b/hidden:gemma:8192"),)),
    ("llama without its rounding", "_affine", "y = y.to(DTYPE).to(tl.float32)", "y = y", (workload("accuracy", "norm:odd/200:llama:8192"),)),
    ("scaled by scale, not 1 + scale", "_affine", "y * (1.0 + load_tile(", "y * (load_tile(", (LAYER,)),
    ("every sample modulated like the first", "norm_kernel", "(row // rows_per_sample)", "(row // rows_per_sample * 0)", (BY_SAMPLE,)),
    ("32-bit row offsets", "norm_kernel", "tl.program_id(0).to(tl.int64)", "tl.program_id(0).to(tl.int32)", (f"{FAR}[plain]",)),
    ("variance saved for 1 / rms", "norm_kernel", "tl.store(rstd_ptr + row, rstd,", "tl.store(rstd_ptr + row, rstd * rstd,", (LAYER,)),
    ("mean not saved", "norm_kernel", "tl.store(mean_ptr + row, mean,", "tl.store(mean_ptr + row, mean * 0.0,", (LAYER,)),
    ("residual written at x's stride", "norm_kernel", "y_off = tl.multiple_of(row * cols", "y_off = tl.multiple_of(row * x_outer_stride", (f"{L}test_layout_of_inputs[everything-padded]",)),
    ("row amax without the last tile", "norm_kernel", "range(0, cols, TILE)", "range(0, cols - TILE, TILE)", (f"{ANY_TILE}[e4m3:row:te]",), 2, 2),
    ("row amax of the last tile alone", "norm_kernel", "largest = larger(largest, amax(y, axis=1))", "largest = amax(y, axis=1)", (ROW_LOOP,)),
    ("tensor amax of the last tile alone", "norm_kernel", "program_amax = larger(program_amax, amax(y, axis=1))", "program_amax = amax(y, axis=1)", (workload("quantized_bytes", "norm:llama3-70b/hidden:nvfp4:1"),)),
    ("inner rows at the outer stride", f"{ROWS}:row_offset", "(row % inner) * inner_stride", "(row % inner) * outer_stride", (workload("accuracy", "norm:qwen3-30b-a3b/k-heads:per-head:8192"),)),
    ("rows past the end in a tile of rows", "norm_kernel", "tile_mask(row, piece, rows, cols, ROWS_MASKED, COLS_MASKED)", "tile_mask(row, piece, rows + 1, cols, ROWS_MASKED, COLS_MASKED)", (f"{D}test_nothing_is_written_past_the_end_as_configured_for[sm_90]",)),
    ("given scale taken for an amax", "norm_kernel", "tensor_factor(Encoding(given, FP32_MAX, FORMAT, CAST, STATIC))", "tensor_factor(Encoding(given, FP32_MAX, FORMAT, CAST, False))", ("quant/test_norms.py::test_norms_with_a_given_scale",)),
    ("last rows left out", f"{HOST}:_rows_launch", "(-(-layout.rows // config.rows), 1, 1)", "(-(-(layout.rows - 1) // config.rows), 1, 1)", (PLAIN_ODD,)),
    ("amax pass without the residual", f"{HOST}:_Quantized.rows_pass", "a, operands = self.a, self.operands", "a, operands = self.a, self.operands if copy else self.operands._replace(residual=None)", (workload("quantized_bytes", "norm:odd/33:nvfp4:1"),)),
    ("statistics of the first row for all", "norm_kernel", "rstd = tl.load(rstd_ptr + row,", "rstd = tl.load(rstd_ptr + row * 0,", (KNOWN,)),
    ("mean not read", "norm_kernel", "mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)", "mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0) * 0.0", (KNOWN,)),
    ("residual added twice", f"{HOST}:_Quantized._read_h", "_replace(x=self.o.residual, residual=None)", "_replace(x=self.o.residual)", (KNOWN,)),
    ("statistics of x without the residual", f"{HOST}:_Quantized.rows_pass", "operands._replace(weight=None,", "operands._replace(residual=None, weight=None,", ("ops/norm/test.py::test_columnwise_alone_is_that_of_both",)),
    ("moments merged without the difference of means", f"{REDUCE}:merge_moments", " + delta * delta * count * share", "", (LAYER_LOOP,)),
]  # fmt: skip

_STRIPE: list[tuple[Any, ...]] = [
    ("tiles counted without the last", "norm_stripe_kernel", "tiles = tl.cdiv(cols, TILE)", "tiles = tl.maximum(cols // TILE, 1)", (BOTH,)),
    ("last tile not launched", f"{HOST}:_Quantized.stripes_pass", "(tiles, 1, 1)", "(max(tiles - 1, 1), 1, 1)", (BOTH,)),
    ("every tile the first", "norm_stripe_kernel", "(tl.program_id(0) % tiles) * TILE", "(tl.program_id(0) % tiles) * 0", (BOTH,)),
    ("every stripe the first", "norm_stripe_kernel", "(tl.program_id(0) // tiles)", "(tl.program_id(0) // tiles * 0)", (BOTH,)),
    ("x read in place of h", f"{HOST}:_Quantized._read_h", "_replace(x=self.o.residual, residual=None)", "_replace(residual=None)", (BOTH,)),
    ("h read at x's stride", f"{HOST}:_Layout.of_h", "outer_stride=self.cols", "outer_stride=self.outer_stride", (f"{L}test_layout_of_inputs[both_copies-padded]",)),
    ("1 / rms of the first stripe for all", "norm_stripe_kernel", "rstd_ptr + row,", "rstd_ptr + row % ROWS,", (BOTH,)),
    ("1 / rms of the first row for all", "norm_stripe_kernel", "rstd_ptr + row,", "rstd_ptr + row * 0,", (BOTH,)),
    ("mean not read", "norm_stripe_kernel", "mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)", "mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0) * 0.0", (BOTH_LAYER,)),
    ("weight and bias swapped", "norm_stripe_kernel", "h, mean, rstd, weight_ptr, bias_ptr,", "h, mean, rstd, bias_ptr, weight_ptr,", (BOTH,)),
    ("llama without its rounding", "norm_stripe_kernel", "LAYER, LLAMA, COLS_MASKED,", "LAYER, False, COLS_MASKED,", (f"{D}test_both_copies_with[rms_norm-llama]",)),
    ("no weight offset", "norm_stripe_kernel", "weight_offset, h_ptr.dtype", "0.0, h_ptr.dtype", (f"{D}test_both_copies_with[layer_norm-gemma]",)),
    ("no shift", "norm_stripe_kernel", "scale_ptr, shift_ptr, modulation_off,", "scale_ptr, None, modulation_off,", (f"{D}test_both_copies_with[layer_norm-by sample]",)),
    ("every sample modulated like the first", "norm_stripe_kernel", "(row // rows_per_sample)", "(row // rows_per_sample * 0)", (f"{D}test_both_copies_with[layer_norm-by sample]",)),
    ("nested rows taken for plain ones", "norm_stripe_kernel", "h_inner_stride, NESTED, ALIGN)", "h_inner_stride, False, ALIGN)", (f"{L}test_layout_of_inputs[columns-permuted]",)),
    ("32-bit row offsets", "norm_stripe_kernel", "(tl.program_id(0) // tiles).to(tl.int64)", "(tl.program_id(0) // tiles).to(tl.int32)", (f"{FAR}[1x128-both]",)),
    ("rows past the end read", "norm_stripe_kernel", "mask = tile_mask(row, col, rows, cols, True, COLS_MASKED)", "mask = tile_mask(row, col, rows + 1, cols, True, COLS_MASKED)", (workload("guard_bands", "norm:odd/200:1x128-both:8192"),)),
    ("tensor amax of a tile's first row", "norm_stripe_kernel", "amax(amax(y, axis=1), axis=0)", "amax(tl.where(row == stripe * ROWS, amax(y, axis=1), 0.0), axis=0)", (f"{TILES}[cpu-300]",)),
    ("all tiles of a stripe keep amax in one place", "norm_stripe_kernel", "amax_ptr + tl.program_id(0)", "amax_ptr + tl.program_id(0) // tiles", (f"{TILES}[cpu-300]",)),
    ("transposed copy not transposed", f"{COPIES}:store_transposed", "codes = tl.trans(codes)", "codes = codes", (BOTH,)),
    ("scales of all stripes in the first one's place", f"{COPIES}:store_stripe", "group = stripe.number * (STRIPE // G) + tl.arange", "group = stripe.number * 0 + tl.arange", (BOTH,)),
    ("given scale taken for an amax", "norm_stripe_kernel", "CAST, STATIC)", "CAST, False)", ("quant/test_norms.py::test_norms_with_a_given_scale",)),
]  # fmt: skip

_BACKWARD: list[tuple[Any, ...]] = [
    ("upstream gradient of ones", "_gradient_of_z", "d = dy\n", "d = dy * 0.0 + 1.0\n", (LAYER,)),
    ("upstream gradient read without a mask", "_gradient_of_z", "dy = load_tile(dy_ptr + dy_off[:, None] + col[None, :], mask)", "dy = load_tile(dy_ptr + dy_off[:, None] + col[None, :], None)", (PLAIN_ODD,)),
    ("no residual gradient", "norm_backward_kernel", "dh += load_tile(", "dh += 0.0 * load_tile(", (RESIDUAL,)),
    ("residual gradient added before the norm's", "norm_backward_kernel", """dh = dh * rstd
                if dresidual_ptr is not None:
                    dh += load_tile(dresidual_ptr + dresidual_off[:, None] + col[None, :], mask)
""", """
                if dresidual_ptr is not None:
                    dh += load_tile(dresidual_ptr + dresidual_off[:, None] + col[None, :], mask)
                dh = dh * rstd
""".removeprefix("\n").lstrip(), (RESIDUAL,)),
    ("no weight gradient", "norm_backward_kernel", "sum_weight += tl.sum", "sum_weight += 0.0 * tl.sum", (PLAIN_ODD,)),
    ("weight gradient a mean", "norm_backward_kernel", "sum_weight += tl.sum(d * z, axis=0)", "sum_weight += tl.sum(d * z, axis=0) / (last - first)", (f"{N}test_size_of_a_norm[127-129]",)),
    ("weight gradient of the last row alone", "norm_backward_kernel", "sum_weight += tl.sum", "sum_weight = tl.sum", (LAYER,)),
    ("bias gradient from z", "norm_backward_kernel", "sum_bias += tl.sum(d,", "sum_bias += tl.sum(d * z,", (LAYER,)),
    ("gradient through 1 / rms missing", "norm_backward_kernel", "dh = t - z * (", "dh = t - 0.0 * z * (", (PLAIN_ODD,)),
    ("gradient through the mean missing", "norm_backward_kernel", "dh -= (ts", "dh -= 0.0 * (ts", (LAYER,)),
    ("sums begin with what was in memory", "norm_backward_kernel", "more = begin > first", "more = begin >= first", (PLAIN_LOOP,)),
    ("sums begin anew with each row", "norm_backward_kernel", "more = begin > first", "more = begin < first", (SAMPLES_LOOP,)),
    ("last row of a program skipped", "norm_backward_kernel", "tl.minimum(first + program_rows, sample_rows)", "tl.minimum(first + program_rows, sample_rows) - 1", (PLAIN_ODD,)),
    ("last row of all skipped", "norm_backward_kernel", "tl.minimum(first + program_rows, sample_rows)", "tl.minimum(first + program_rows, sample_rows - 1)", (PLAIN_ODD,)),
    ("all samples read the first one's rows", "norm_backward_kernel", "row = sample * sample_rows + local", "row = sample * 0 + local", (BY_SAMPLE,)),
    ("every sample scaled like the first", "norm_backward_kernel", "row * 0 + sample)", "row * 0)", (BY_SAMPLE,)),
    ("no weight offset", "_gradient_of_z", " + weight_offset)", ")", (workload("accuracy", "norm:gemma-7b/hidden:gemma:8192"),)),
    ("no weight", "_gradient_of_z", "t = t * (", "t = t + 0.0 * (", (PLAIN_ODD,)),
    ("gradient of scale without the bias", "norm_backward_kernel", "y = y + load_vector(bias_ptr", "y = y + 0.0 * load_vector(bias_ptr", (LAYER,)),
    ("llama's weight gradient from the exact z", "norm_backward_kernel", "z = z.to(DTYPE).to(tl.float32)", "z = z", (workload("accuracy", "norm:odd/200:llama:8192"),)),
    ("32-bit row offsets", "norm_backward_kernel", "program = tl.program_id(0).to(tl.int64)", "program = tl.program_id(0).to(tl.int32)", (f"{FAR}[plain]",)),
    ("gradient of scale already scaled", "norm_backward_kernel", "sum_scale += tl.sum(dy * y", "sum_scale += tl.sum(d * y", (SAMPLES,)),
    ("gradient of scale by row already scaled", "norm_backward_kernel", "scale_grad = (dy * y)", "scale_grad = (d * y)", (LAYER,)),
    ("gradient of shift already scaled", "norm_backward_kernel", "shift_grad = dy.to", "shift_grad = d.to", (LAYER,)),
    ("programs of a sample share a partial sum", "norm_backward_kernel", "sums_off = tl.multiple_of(program * cols", "sums_off = tl.multiple_of(sample * cols", (LAYER,)),
    ("mean not subtracted", "_gradient_of_z", "z = z - mean", "z = z", (LAYER,)),
    ("upstream gradient read at h's stride", "norm_backward_kernel", "dy_outer_stride, dy_inner_stride, NESTED", "h_outer_stride, h_inner_stride, NESTED", (f"{L}test_layout_of_gradients[everything-expanded]",)),
    ("dx cut, not rounded", "norm_backward_kernel", "dh.to(DTYPE)", DOWN_TO_BF16.format("dh") + ".to(DTYPE)", (PLAIN_ODD,)),
    ("rows past the end of a tile of rows", "norm_backward_kernel", "tile_mask(local, col, last, cols, ROWS_MASKED, COLS_MASKED)", "tile_mask(local, col, last + 1, cols, ROWS_MASKED, COLS_MASKED)", (f"{D}test_nothing_is_written_past_the_end_as_configured_for[sm_90]",), 2, 2),
    ("sums over the row without the last tile", "norm_backward_kernel", "range(0, cols, TILE)", "range(0, cols - TILE, TILE)", (PLAIN_LOOP,)),
]  # fmt: skip

_SUM: list[tuple[Any, ...]] = [
    ("first partial sum left out", "_sum_kernel", "range(0, count, ROWS)", "range(1, count, ROWS)", (PLAIN_ODD,)),
    ("last partial sum left out", "_sum_kernel", "range(0, count, ROWS)", "range(0, count - 1, ROWS)", (PLAIN_ODD,)),
    ("one partial sum too many", "_sum_kernel", "(row < count)", "(row <= count)", (SAMPLES_GPU,)),
    ("first partial sums alone", "_sum_kernel", "range(0, count, ROWS)", "range(0, tl.minimum(count, ROWS), ROWS)", (PLAIN_ODD,)),
    ("mean instead of sum", "_sum_kernel", "total.to(", "(total / count).to(", (PLAIN_ODD,)),
    ("last partial sum alone", "_sum_kernel", "total += tl.sum", "total = tl.sum", (PLAIN_ODD,)),
    ("partial sums of another sample", "_sum_kernel", "(outer * count + row)", "(outer + row)", (BY_SAMPLE,)),
    ("all samples to the first one's place", "_sum_kernel", "outer * cols, ALIGN) + col", "outer * 0, ALIGN) + col", (BY_SAMPLE,)),
    ("last columns left out", f"{SUMS}:sum_partials", "(-(-cols // width) * (rows // count), 1, 1)", "(max(cols // width, 1) * (rows // count), 1, 1)", (PLAIN_LOOP,)),
    ("every piece the first", "_sum_kernel", "(tl.program_id(0) % tiles) * TILE", "(tl.program_id(0) % tiles) * 0", (PLAIN_LOOP,)),
    ("first sample alone", f"{SUMS}:sum_partials", "(-(-cols // width) * (rows // count), 1, 1)", "(-(-cols // width), 1, 1)", (BY_SAMPLE,)),
    ("weight gradient of the first sample alone", f"{HOST}:_launch_norm_backward", "(o.weight, dweight, programs)", "(o.weight, dweight, sample_programs)", (SAMPLES,)),
    ("summed in the weight's dtype", "_sum_kernel", "total += tl.sum(", "total = total.to(out_ptr.dtype.element_ty).to(tl.float32) + tl.sum(", (LAYER,)),
    ("partial sums in bf16", f"{HOST}:_launch_norm_backward", "dtype=torch.float32", "dtype=torch.bfloat16", (LAYER,)),
    ("last column left out", "_sum_kernel", "exists = col < cols", "exists = col < cols - 1", (PLAIN_ODD,)),
    ("columns past a multiple of 16 left out", "_sum_kernel", "cols = (cols // ALIGN) * ALIGN", "cols = (cols // 16) * 16", (PLAIN_LOOP,)),
    ("sums cut, not rounded", "_sum_kernel", "total.to(", DOWN_TO_BF16.format("total") + ".to(", (PLAIN_ODD,)),
]  # fmt: skip

# ---- quantise -----------------------------------------------------------------------------------------------------

_QROWS: list[tuple[Any, ...]] = [
    ("row amax without the last tile", "_quantize_rows_kernel", "range(0, cols, TILE)", "range(0, cols - TILE, TILE)", (f"{SHAPES}[int8:row:te]",)),
    ("row amax of the last tile alone", "_quantize_rows_kernel", """largest = larger(
                    largest, amax(""", """largest = larger(
                    largest * 0.0, amax(""", (f"{SHAPES}[int8:row:te]",)),
    ("given scale multiplied, not divided by", "_quantize_rows_kernel", "factor = given_scale(row_scale, FORMAT)", "factor = row_scale", ("quant/test_norms.py::test_given_scales_of_rows[e4m3:row:te-auto]",)),
    ("last tile skipped", "_quantize_rows_kernel", "range(first, cols, step)", "range(first, cols - TILE, step)", (f"{SHAPES}[e4m3:1x128:te:pow2]",)),
    ("programs of a row all begin at its first tile", "_quantize_rows_kernel", "(tl.program_id(0) % row_programs) * TILE", "(tl.program_id(0) * 0) * TILE", (GPU_ROWS,)),
    ("every second tile skipped", "_quantize_rows_kernel", "step = row_programs * TILE", "step = 2 * row_programs * TILE", (f"{SHAPES}[e4m3:1x128:te:pow2]",)),
    ("tensor amax of the last tile alone", "_quantize_rows_kernel", "program_amax = larger(program_amax, amax(x, axis=1))", "program_amax = amax(x, axis=1)", (f"{ANY_TILE}[e4m3:tensor:te]",)),
    ("low half of the seed ignored", "_draw", "zero + (~seed_low).to(tl.uint32)", "zero", (DRAWS,)),
    ("high half of the seed ignored", "_draw", "zero + (~seed_high).to(tl.uint32)", "zero", (DRAWS,)),
    ("one draw for all columns", "_draw", "zero = tl.zeros_like(c0)", "zero = tl.zeros_like(c0); c0 = zero", (DRAWS,)),
    ("draws always from stream 0", "_draw", "zero + WHICH", "zero", ("quant/test_stochastic.py::test_stochastic_rounding[e4m3:1x128:te:pow2]",)),
    ("integer encoder cuts", f"{NUMBERS}:_encode_by_integers", "half = (1 << (FORMAT.number.shift - 1)) - 1", "half = 0", (f"{B}test_each_encoder[integers-e4m3]",)),
    ("integer encoder rounds ties up", f"{NUMBERS}:_encode_by_integers", "half + ((clamped >> FORMAT.number.shift) & 1)", "half + 1", (f"{B}test_each_encoder[integers-e4m3]",)),
    ("integer encoder keeps NaN's sign", f"{NUMBERS}:_encode_by_integers", "tl.where(size > 0x7F800000, FORMAT.number.nan, code)", "tl.where(size > 0x7F800000, FORMAT.number.nan | code, code)", (f"{B}test_each_encoder[integers-e4m3]",)),
    ("conversion cuts", f"{NUMBERS}:_convert", "x.to(tl.float8e4nv)", "(x.to(tl.int32, bitcast=True) & -1048576).to(tl.float32, bitcast=True).to(tl.float8e4nv)", (f"{B}test_each_encoder[conversion-e4m3]",)),
    ("int8 cut, not rounded", f"{NUMBERS}:_encode_int8", "((x + 12582912.0) - 12582912.0)", "x", (f"{B}test_int8_and_e2m1_encoders",)),
    ("int8 down to -128", f"{NUMBERS}:_encode_int8", "-127.0", "-128.0", (f"{B}test_int8_and_e2m1_encoders",)),
    ("nibbles swapped", f"{NUMBERS}:pack_pairs", "low | (high << 4)", "high | (low << 4)", (f"{SHAPES}[e2m1:mx:te]",)),
    ("amax drops NaN", f"{REDUCE}:amax", "return tl.max(bits, axis=axis).to(tl.float32, bitcast=True)", "return tl.max(tl.where(bits > 0x7F800000, 0, bits), axis=axis).to(tl.float32, bitcast=True)", (f"{B}test_edge_blocks[deepgemm-auto]",)),
    ("no floor of amax", f"{SCALES}:fp32_scale", "amax = tl.where(amax < FORMAT.rule.amax_floor, FORMAT.rule.amax_floor, amax)", "amax = amax", (f"{B}test_edge_blocks[vllm-auto]",)),
    ("reciprocal off by one ulp", f"{SCALES}:reciprocal", "tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)", "tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x) * 1.00000012", (f"{EVERY}[e4m3:1x128:deepgemm-rows]",)),
    ("amax times 1 / MAX, not over MAX", f"{SCALES}:fp32_scale", "scale = tl.div_rn(amax, tl.full(amax.shape, FORMAT.number.max, tl.float32))", "scale = amax * FORMAT.number.reciprocal", (f"{EVERY}[e4m3:1x128:deepgemm-rows]",)),
    ("powers of two doubled", f"{SCALES}:power_of_two_above", "tl.where((bits & 0x7FFFFF) != 0, 1, 0)", "1", (f"{B}test_powers_of_two_next_to_a_boundary[e5m2:1x128:deepgemm:pow2-fp32]",)),
    ("te's infinite factor kept", f"{SCALES}:fp32_scale", "tl.where(factor == float(\"inf\"), INPUT_MAX, factor)", "factor", (f"{EVERY}[e4m3:1x128:te-rows]",)),
    ("x times MAX / amax where it is x / d", f"{SCALES}:scaled", "tl.div_rn(x, factor)", "x * tl.div_rn(1.0, factor)", (f"{EVERY}[e4m3:1x128:vllm-rows]",)),
    ("mx exponent rounded down", f"{SCALES}:mx_scale", "exponent + tl.where(mantissa != 0, 1, 0)", "exponent", (f"{EVERY}[e4m3:mx:te-rows]",)),
    ("nvfp4 multiplied in another order", f"{SCALES}:nvfp4_scale", "amax * (encode * 0.1666666716337204)", "amax * 0.1666666716337204 * encode", (f"{B}test_nvfp4_scales_next_to_a_boundary[te]",)),
    ("scales of a row all in the first tile's place", f"{COPIES}:store_rows", "group = tile.start // G + tl.arange", "group = tile.start * 0 + tl.arange", (f"{SHAPES}[e4m3:1x128:te:pow2]",)),
    ("scale of the next group", f"{TILE}:quantize_rows", "scaled(groups, factor[:, :, None], FORMAT)", "scaled(groups, tl.flip(factor, 1)[:, :, None], FORMAT)", (f"{SHAPES}[e4m3:1x128:te:pow2]",)),
    ("32-bit row offsets", "_quantize_rows_kernel", "(tl.program_id(0) // row_programs).to(tl.int64)", "(tl.program_id(0) // row_programs).to(tl.int32)", ("quant/test_strides.py::test_large_strides[offsets]",)),
    ("odd rows end in half a code of nothing", f"{COPIES}:store_codes", "[None, :], codes, 0)", "[None, :], codes, 1)", (f"{SHAPES}[e2m1:mx:te]",)),
]  # fmt: skip

_QSTRIPE: list[tuple[Any, ...]] = [
    ("transposed copy not transposed", f"{COPIES}:store_transposed", "codes = tl.trans(codes)", "codes = codes", (f"{SHAPES}[e4m3:1x128:te:pow2]",)),
    ("pads of transposed rows left unwritten", f"{COPIES}:store_transposed", "bound = (((stripe.rows + PACKED - 1) // PACKED + 15) // 16) * 16", "bound = (stripe.rows + PACKED - 1) // PACKED", (f"{PADS}[e4m3:1x128:te:pow2-auto]",)),
    ("transposed rows end in half a code of nothing", f"{COPIES}:store_transposed", "[None, :], codes, 0)", "[None, :], codes, 1)", (f"{SHAPES}[e2m1:mx:te]",)),
    ("transposed bytes counted as codes", f"{COPIES}:store_transposed", "byte = stripe.number * (STRIPE // PACKED)", "byte = stripe.number * STRIPE", (f"{EVERY}[e2m1:mx:te-both]",)),
    ("scales of columns written by the second stripe", "_quantize_stripe_kernel", "(stripe == 0)", "(stripe == 1)", (f"{SHAPES}[int8:row:te]",)),
    ("scales of rows not written", "_quantize_stripe_kernel", "(start == 0)", "(start < 0)", (f"{SHAPES}[int8:row:te]",)),
    ("all columns scaled like the first", "_quantize_stripe_kernel", "col_amax_ptr + col,", "col_amax_ptr + col * 0,", (f"{SHAPES}[int8:row:te]",)),
    ("both copies draw the same", "_quantize_stripe_kernel", "random_t = _draw(seed_low, seed_high, row, col, 1)", "random_t = _draw(seed_low, seed_high, row, col, 0)", ("quant/test_stochastic.py::test_stochastic_rounding[e4m3:1x128:te:pow2]",)),
    ("scales of squares all in the first tile's place", f"{COPIES}:store_stripe", "square = stripe.start // STRIPE + tl.arange", "square = stripe.start * 0 + tl.arange", (f"{SHAPES}[e4m3:128x128:te:pow2]",)),
    ("strides of a square's transposed scale swapped", f"{COPIES}:store_stripe", "square * copy_t.scale_row_stride + stripe.number * copy_t.scale_col_stride", "square * copy_t.scale_col_stride + stripe.number * copy_t.scale_row_stride", (f"{EVERY}[e4m3:128x128:torchao:pow2-both]",)),
    ("strides of transposed scales swapped", f"{COPIES}:store_stripe", "tl.store(copy_t.scale + (group_off[:, None] + col_off[None, :])", "tl.store(copy_t.scale + (group * copy_t.scale_row_stride)[:, None] + (col.to(tl.int64) * copy_t.scale_col_stride)[None, :]", (f"{SHAPES}[e2m1:mx:te]",)),
    ("32-bit row offsets", "_quantize_stripe_kernel", "(tl.program_id(0) // tiles).to(tl.int64)", "(tl.program_id(0) // tiles).to(tl.int32)", ("quant/test_strides.py::test_large_strides[offsets]",)),
    ("tiles counted without the last", "_quantize_stripe_kernel", "tiles = tl.cdiv(cols, TILE)", "tiles = tl.maximum(cols // TILE, 1)", (f"{SHAPES}[e4m3:1x128:te:pow2]",)),
    ("last tile not launched", f"{QUANTIZE}:_Quantize.stripes_pass", "launch(\n            (stripes * tiles, 1, 1),", "launch(\n            (max(stripes * tiles - 1, 1), 1, 1),", (f"{SHAPES}[e4m3:1x128:te:pow2]",)),
    ("amax of the first row of a tile", "_quantize_stripe_kernel", "amax(amax(x, axis=1), axis=0)", "amax(tl.where(row == stripe * ROWS, amax(x, axis=1), 0.0), axis=0)", ("quant/test_norms.py::test_amax[e4m3:1x128:te:pow2]",)),
    ("square's amax of its first column", f"{TILE}:quantize_squares", "amax(tl.reshape(amax(x, axis=0), (C // 128, 128)), axis=1)", "amax(tl.reshape(amax(tl.where(tl.arange(0, C)[None, :] % 128 == 0, x, 0.0), axis=0), (C // 128, 128)), axis=1)", (f"{SHAPES}[e4m3:128x128:te:pow2]",)),
    ("columns scaled by the group above", f"{TILE}:quantize_columns", "scaled(groups, factor[:, None, :], FORMAT)", "scaled(groups, tl.flip(factor, 0)[:, None, :], FORMAT)", (f"{EVERY}[e2m1:mx:te-both]",)),
    ("x read at the wrong stride", "_quantize_stripe_kernel", "row * x_stride", "row * cols", ("quant/test_strides.py::test_strided_inputs[e4m3:1x128:te:pow2]",)),
    ("rows past the end read", "_quantize_stripe_kernel", "mask = tile_mask(row, col, rows, cols, True, COLS_MASKED)", "mask = tile_mask(row, col, rows + 1, cols, True, COLS_MASKED)", (f"{PADS}[e4m3:1x128:te:pow2-auto]", "quant/test_strides.py::test_strided_inputs[e4m3:1x128:te:pow2]")),
    ("columns past the end read", "_quantize_stripe_kernel", "mask = tile_mask(row, col, rows, cols, True, COLS_MASKED)", "mask = tile_mask(row, col, rows, cols + 1, True, COLS_MASKED)", (f"{SHAPES}[e4m3:1x128:te:pow2]",)),
]  # fmt: skip

_AMAX: list[tuple[Any, ...]] = [
    ("pieces of a row all in one place", "_amax_kernel", "tile.to(tl.int64) * rows + row", "tile.to(tl.int64) * 0 + row", (f"{SHAPES}[int8:row:te]",)),
    ("pieces of a column all in one place", "_amax_kernel", "stripe * cols + col", "stripe * 0 + col", (f"{SHAPES}[int8:row:te]",)),
    ("rows and columns swapped", "_amax_kernel", "amax(x, axis=1), mask=row < rows)", "amax(x, axis=0), mask=row < rows)", (f"{SHAPES}[int8:row:te]",)),
    ("amax drops NaN", f"{REDUCE}:amax", "return tl.max(bits, axis=axis).to(tl.float32, bitcast=True)", "return tl.max(tl.where(bits > 0x7F800000, 0, bits), axis=axis).to(tl.float32, bitcast=True)", (f"{EVERY}[e4m3:row:deepep-both]",)),
    ("negative numbers ignored", f"{REDUCE}:amax", "& 0x7FFFFFFF", "", (f"{SHAPES}[int8:row:te]",)),
    ("first piece of all", f"{QUANTIZE}:_Quantize.stripes_pass", "of_cols.amax(0)", "of_cols[0]", (f"{SHAPES}[int8:row:te]",)),
    ("smallest of the pieces", f"{QUANTIZE}:_Quantize.stripes_pass", "of_cols.amax(0)", "of_cols.amin(0)", (f"{SHAPES}[int8:row:te]",)),
    ("x read at the wrong stride", "_amax_kernel", "row * x_stride", "row * cols", ("quant/test_strides.py::test_strided_inputs[e4m3:row:te]",)),
    ("last row left out", "_amax_kernel", "mask=row < rows)", "mask=row < rows - 1)", (f"{SHAPES}[int8:row:te]",)),
    ("last column left out", "_amax_kernel", "mask=col < cols)", "mask=col < cols - 1)", (f"{SHAPES}[int8:row:te]",)),
    ("columns past a multiple of 16 left out", "_amax_kernel", "cols = (cols // ALIGN) * ALIGN", "cols = (cols // 16) * 16", (f"{SHAPES}[int8:row:te]",)),
    ("columns past the end read", "_amax_kernel", "tile_mask(row, col, rows, cols, True, COLS_MASKED)", "tile_mask(row, col, rows, cols + 1, True, COLS_MASKED)", (f"{SHAPES}[int8:row:te]",)),
    ("rows past the end read", "_amax_kernel", "tile_mask(row, col, rows, cols, True, COLS_MASKED)", "tile_mask(row, col, rows + 1, cols, True, COLS_MASKED)", ("quant/test_strides.py::test_strided_inputs[e4m3:row:te]",)),
    ("32-bit row offsets", "_amax_kernel", "(tl.program_id(0) // tiles).to(tl.int64)", "(tl.program_id(0) // tiles).to(tl.int32)", ("quant/test_strides.py::test_large_strides[offsets]",)),
    ("last tile not launched", f"{QUANTIZE}:_Quantize.stripes_pass", "find((stripes * tiles, 1, 1)", "find((max(stripes * tiles - 1, 1), 1, 1)", (f"{SHAPES}[int8:row:te]",)),
    ("every tile the first", "_amax_kernel", "col = tile * TILE + ", "col = tile * 0 + ", (f"{SHAPES}[int8:row:te]",)),
]  # fmt: skip

_DEQUANTIZE: list[tuple[Any, ...]] = [
    ("nibbles swapped", f"{NUMBERS}:unpack_pairs", "tl.interleave(packed & 0xF, packed >> 4)", "tl.interleave(packed >> 4, packed & 0xF)", (f"{DECODE}[e2m1:mx:te-auto]",)),
    ("scales of the first tile for all", "_dequantize_kernel", "group = tile * (TILE // GROUP) + tl.arange", "group = tile * 0 + tl.arange", (workload("accuracy", "dequantize:llama3-8b/hidden:mx-both:8192"),)),
    ("strides of the scales swapped", "_dequantize_kernel", "(row_block * scale_row_stride)[:, None] + (group.to(tl.int64) * scale_col_stride)", "(row_block * scale_col_stride)[:, None] + (group.to(tl.int64) * scale_row_stride)", (f"{DECODE}[e2m1:mx:te-auto]",)),
    ("e8m0 code 0 taken for 0", "_dequantize_kernel", "tl.where(bits == 0, 0x00400000, bits << 23)", "bits << 23", (f"{DECODE}[e4m3:mx:te-auto]", f"{DECODE}[e5m2:mx:te-auto]")),
    ("e8m0 NaN taken for infinity", "_dequantize_kernel", "tl.where(bits == 255, 0x7FC00000, ", "tl.where(bits == 256, 0x7FC00000, ", (f"{DECODE}[e2m1:mx:te-auto]",)),
    ("nvfp4 without the scale of the tensor", "_dequantize_kernel", "decode_e4m3(scale) * tl.load(global_ptr)", "decode_e4m3(scale)", (f"{DECODE}[e2m1:nvfp4:te-auto]",)),
    ("nvfp4 multiplied in another order", "_dequantize_kernel", "values = tl.reshape(groups * scale[:, :, None]", "values = tl.reshape(groups * (scale[:, :, None] / (tl.load(global_ptr) if FORMAT.block == \"nvfp4\" else 1.0)) * (tl.load(global_ptr) if FORMAT.block == \"nvfp4\" else 1.0)", (f"{DECODE}[e2m1:nvfp4:te-auto]",)),
    ("values cut, not rounded", "_dequantize_kernel", "values.to(out_ptr.dtype.element_ty)", DOWN_TO_BF16.format("values") + ".to(out_ptr.dtype.element_ty)", ("quant/test_dequantize.py::test_dequantize_to_sixteen_bits[int8:row:te-dtype1]",)),
    ("no signs", f"{NUMBERS}:_with_sign", " | sign)", ")", ("quant/test_dequantize.py::test_every_code_decodes",)),
    ("e4m3 NaN taken for 480", f"{NUMBERS}:decode", "size == 0x7F", "size == 0x80", ("quant/test_dequantize.py::test_every_code_decodes",)),
    ("e5m2 infinity taken for NaN", f"{NUMBERS}:decode", "tl.where(size == 0x7C, float(\"inf\"), ", "tl.where(size == 0x7C, float(\"nan\"), ", ("quant/test_dequantize.py::test_every_code_decodes",)),
    ("int8 without signs", f"{NUMBERS}:decode", "codes.to(tl.int8, bitcast=True).to(tl.float32)", "codes.to(tl.float32)", ("quant/test_dequantize.py::test_every_code_decodes",)),
    ("all rows scaled like the first", "_dequantize_kernel", "row // FORMAT.block_rows", "row // FORMAT.block_rows * 0", (f"{DECODE}[e4m3:1x128:te:pow2-auto]",)),
    ("squares scaled row by row", "_dequantize_kernel", "row // FORMAT.block_rows", "tl.minimum(row, (rows - 1) // FORMAT.block_rows)", (f"{DECODE}[e4m3:128x128:te-auto]",)),
    ("last tile left out", f"{QUANTIZE}:_launch_dequantize", "-(-cols // tile), 1, 1)", "max(cols // tile, 1), 1, 1)", (workload("accuracy", "dequantize:odd/200:1x128-both:8192"), f"{DECODE}[e4m3:1x128:te:pow2-auto]")),
    ("32-bit row offsets", "_dequantize_kernel", "(tl.program_id(0) // tiles).to(tl.int64)", "(tl.program_id(0) // tiles).to(tl.int32)", ("quant/test_strides.py::test_large_strides[offsets]",)),
    ("last code of an odd row left out", "_dequantize_kernel", "cols + PACKED - 1", "cols", (workload("accuracy", "dequantize:odd/33:nvfp4-both:8192"),)),
    ("results at the codes' stride", "_dequantize_kernel", "out_off = tl.multiple_of(row * cols", "out_off = tl.multiple_of(row * data_stride", (f"{DECODE}[e4m3:1x128:te:pow2-auto]",)),
    ("last column left out", "_dequantize_kernel", "exists = tile_mask(row, col, rows, cols,", "exists = tile_mask(row, col, rows, cols - 1,", (f"{DECODE}[e4m3:1x128:te:pow2-auto]",)),
]  # fmt: skip

_TENSOR: list[tuple[Any, ...]] = [
    ("larger drops NaN", f"{REDUCE}:larger", "return tl.maximum(a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)", "return tl.maximum(a, tl.where(b != b, 0.0, b))", ("quant/test_norms.py::test_amax[e4m3:tensor:te]",)),
    ("first partial amax alone", "_tensor_scale_kernel", "part < count", "part < 1", (f"{SHAPES}[e5m2:tensor:te]",)),
    ("last partial amax left out", "_tensor_scale_kernel", "part < count", "part < count - 1", (f"{SHAPES}[e5m2:tensor:te]",)),
    ("first 1024 partial amax alone", "_tensor_scale_kernel", "range(0, count, TILE)", "range(0, 1, TILE)", (ANY_ROW,)),
    ("last 1024 partial amax alone", "_tensor_scale_kernel", "largest = larger(largest, ", "largest = larger(largest * 0.0, ", (ANY_ROW,)),
    ("amax at least 1", "_tensor_scale_kernel", "other=0.0)", "other=1.0)", (f"{EVERY}[e4m3:tensor:te-rows]",)),
    ("half of the partial amax", f"{COPIES}:reduce_amax", "(partials.numel(),)", "(-(-partials.numel() // 2),)", (f"{SHAPES}[e5m2:tensor:te]",)),
    ("scale returned for amax", "_tensor_scale_kernel", "tl.store(amax_ptr, tensor_amax)", "tl.store(amax_ptr, tensor_amax / 448.0)", ("quant/test_norms.py::test_amax[e4m3:tensor:te]",)),
    ("no scale of the transposed copy", "_tensor_scale_kernel", "tl.store(scale_t_ptr, scale)", "tl.store(scale_t_ptr, scale * 0.0)", (f"{SHAPES}[e5m2:tensor:te]",)),
    ("factor stored for the scale", "_tensor_scale_kernel", "scale, _ = fp32_scale", "_, scale = fp32_scale", (f"{SHAPES}[e5m2:tensor:te]",)),
    ("te's largest number that of fp32", f"{COPIES}:reduce_amax", "torch.finfo(input_dtype).max", "torch.finfo(torch.float32).max", (f"{B}test_sixteen_bit_inputs[float16-e5m2:tensor:te]",)),
    ("te's nvfp4 scale as torchao's", f"{SCALES}:nvfp4_global", "tl.div_rn(1.0, _nvfp4_encode(amax))", "tl.where(amax == 0.0, 1.0, tl.div_rn(amax, 2688.0))", (f"{EVERY}[e2m1:nvfp4:te-rows]",)),
    ("nvfp4 scale of nothing 0", f"{SCALES}:nvfp4_global", "tl.where(amax == 0.0, 1.0, tl.div_rn(amax, 2688.0))", "tl.div_rn(amax, 2688.0)", (f"{EVERY}[e2m1:nvfp4:torchao-rows]",)),
    ("te's nvfp4 factor infinite for small amax", f"{SCALES}:_nvfp4_encode", "at_most(tl.div_rn(2688.0, amax), 3.4028234663852886e38)", "tl.div_rn(2688.0, amax)", (f"{EVERY}[e2m1:nvfp4:te-rows]",)),
    ("te's nvfp4 factor 0 for infinite amax", f"{SCALES}:_nvfp4_encode", "(amax == 0.0) | (scale == 0.0)", "amax == 0.0", (f"{EVERY}[e2m1:nvfp4:te-rows]",)),
    ("scale halved", "_tensor_scale_kernel", "tl.store(scale_ptr, scale)", "tl.store(scale_ptr, scale * 0.5)", (f"{SHAPES}[e5m2:tensor:te]",)),
]  # fmt: skip


def _made(kernel: str, file: str, lines: list[tuple[Any, ...]]) -> list[Mutant]:
    found = []
    for what, where, old, new, tests, *which in lines:
        path, _, inside = where.rpartition(":")
        found.append(Mutant(kernel, what, path or file, inside, old, new, tests, *which))
    return found


# The other families of ops have files of their own.
FILES = sorted(set(Path(__file__).parents[1].glob("*/mutants*.py")) - {Path(__file__)})
FAMILIES = tuple(import_module(f"tests.ops.{path.parent.name}.{path.stem}") for path in FILES)

MUTANTS: tuple[Mutant, ...] = (
    *_made("norm_kernel", NORM, _NORM),
    *_made("norm_stripe_kernel", NORM, _STRIPE),
    *_made("norm_backward_kernel", NORM, _BACKWARD),
    *_made("_sum_kernel", SUMS, _SUM),
    *_made("_quantize_rows_kernel", QUANTIZE, _QROWS),
    *_made("_quantize_stripe_kernel", QUANTIZE, _QSTRIPE),
    *_made("_amax_kernel", QUANTIZE, _AMAX),
    *_made("_dequantize_kernel", QUANTIZE, _DEQUANTIZE),
    *_made("_tensor_scale_kernel", COPIES, _TENSOR),
    *(
        m
        for module in FAMILIES
        for kernel, lines in module.LINES.items()
        for m in _made(kernel, module.FILE, lines)
    ),
)
