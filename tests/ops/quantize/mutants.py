"""Mutants of the kernels of quantize and dequantize, in the format of `ops.norm.mutants`."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE, LAUNCH, COPIES = "ops/quantize/kernels.py", "ops/quantize/launch.py", "ops/common/copies.py"
NUMBERS, TILE, REDUCE, SCALES = (f"tiles/{name}.py" for name in ("numbers", "quantize", "reduce", "scales"))
DOWN_TO_BF16 = (
    "(({}).to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)"  # truncated, not rounded
)
B, D = "quant/test_bytes.py::", "ops/norm/test_combinations.py::"


def workload(check: str, name: str) -> str:
    return f"catalogue/test_workloads.py::test_workload[{check}-{name}]"


SHAPES = f"{B}test_shapes"
ROTATED = f"{SHAPES}[e2m1:nvfp4:te:hadamard-columnwise]"
HADAMARD = "tiles/hadamard.py"
EVERY = f"{B}test_every_format"
PADS = "quant/test_strides.py::test_strides_and_pads_of_codes"
DRAWS = "quant/test_stochastic.py::test_stochastic_rounding_draws_what_it_says[e4m3]"
DECODE = "quant/test_dequantize.py::test_dequantize"
ANY_TILE = f"{D}test_largest_element_in_any_tile_of_a_row"
ANY_ROW = f"{D}test_largest_element_in_any_of_many_rows[e4m3:tensor:te]"
GPU_ROWS = f"{D}test_quantizer_configured_for[sm_90-e4m3:1x128:te:pow2-rows]"

_ROWS: list[tuple[Any, ...]] = [
    ("row amax without the last tile", "quantize_rows_kernel", "range(0, cols, TILE)", "range(0, cols - TILE, TILE)", (f"{SHAPES}[int8:row:te]",)),
    ("row amax of the last tile alone", "quantize_rows_kernel", """largest = larger(
                    largest, amax(""", """largest = larger(
                    largest * 0.0, amax(""", (f"{SHAPES}[int8:row:te]",)),
    ("given scale multiplied, not divided by", "quantize_rows_kernel", "factor = given_scale(row_scale, FORMAT)", "factor = row_scale", ("quant/test_norms.py::test_given_scales_of_rows[e4m3:row:te-auto]",)),
    ("last tile skipped", "quantize_rows_kernel", "range(first, cols, step)", "range(first, cols - TILE, step)", (f"{SHAPES}[e4m3:1x128:te:pow2]",)),
    ("programs of a row all begin at its first tile", "quantize_rows_kernel", "(tl.program_id(0) % row_programs) * TILE", "(tl.program_id(0) * 0) * TILE", (GPU_ROWS,)),
    ("every second tile skipped", "quantize_rows_kernel", "step = row_programs * TILE", "step = 2 * row_programs * TILE", (f"{SHAPES}[e4m3:1x128:te:pow2]",)),
    ("tensor amax of the last tile alone", "quantize_rows_kernel", "program_amax = larger(program_amax, amax(x, axis=1))", "program_amax = amax(x, axis=1)", (f"{ANY_TILE}[e4m3:tensor:te]",)),
    ("low half of the seed ignored", "_draw", "zero + (~seed_low).to(tl.uint32)", "zero", (DRAWS,)),
    ("high half of the seed ignored", "_draw", "zero + (~seed_high).to(tl.uint32)", "zero", (DRAWS,)),
    ("one draw for all columns", "_draw", "zero = tl.zeros_like(c0)", "zero = tl.zeros_like(c0); c0 = zero", (DRAWS,)),
    ("draws always from stream 0", "_draw", "zero + WHICH", "zero", ("quant/test_stochastic.py::test_stochastic_rounding[e4m3:1x128:te:pow2]",)),
    ("integer encoder cuts", f"{NUMBERS}:_encode_by_integers", "half = (1 << (FORMAT.number.shift - 1)) - 1", "half = 0", (f"{B}test_each_encoder[integers-e4m3]",)),
    ("integer encoder rounds ties up", f"{NUMBERS}:_encode_by_integers", "half + ((clamped >> FORMAT.number.shift) & 1)", "half + 1", (f"{B}test_each_encoder[integers-e4m3]",)),
    ("integer encoder keeps NaN's sign", f"{NUMBERS}:_encode_by_integers", "tl.where(size > 0x7F800000, FORMAT.number.nan, code)", "tl.where(size > 0x7F800000, FORMAT.number.nan | code, code)", (f"{B}test_each_encoder[integers-e4m3]",)),
    ("conversion cuts", f"{NUMBERS}:_convert", "x.to(tl.float8e4nv)", "(x.to(tl.int32, bitcast=True) & -1048576).to(tl.float32, bitcast=True).to(tl.float8e4nv)", (f"{B}test_each_encoder[conversion-e4m3]",)),
    ("integers cut, not rounded", f"{NUMBERS}:_encode_integer", "((x + 12582912.0) - 12582912.0)", "x", (f"{B}test_integer_and_e2m1_encoders",)),
    ("integers down to -128 and -8", f"{NUMBERS}:_encode_integer", "-FORMAT.number.max)", "-FORMAT.number.max - 1.0)", (f"{B}test_integer_and_e2m1_encoders",)),
    ("int4 spills into its neighbor", f"{NUMBERS}:_encode_integer", "code & 0xF if", "code if", (f"{B}test_integer_and_e2m1_encoders",)),
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
    ("32-bit row offsets", "quantize_rows_kernel", "(tl.program_id(0) // row_programs).to(tl.int64)", "(tl.program_id(0) // row_programs).to(tl.int32)", ("quant/test_strides.py::test_large_strides[offsets]",)),
    ("odd rows end in half a code of nothing", f"{COPIES}:store_codes", "[None, :], codes, 0)", "[None, :], codes, 1)", (f"{SHAPES}[e2m1:mx:te]",)),
]  # fmt: skip

_STRIPE: list[tuple[Any, ...]] = [
    ("transposed copy not transposed", f"{COPIES}:store_transposed", "codes = tl.trans(codes)", "codes = codes", (f"{SHAPES}[e4m3:1x128:te:pow2]",)),
    ("pads of transposed rows left unwritten", f"{COPIES}:store_transposed", "bound = (((stripe.rows + PACKED - 1) // PACKED + 15) // 16) * 16", "bound = (stripe.rows + PACKED - 1) // PACKED", (f"{PADS}[e4m3:1x128:te:pow2-auto]",)),
    ("transposed rows end in half a code of nothing", f"{COPIES}:store_transposed", "[None, :], codes, 0)", "[None, :], codes, 1)", (f"{SHAPES}[e2m1:mx:te]",)),
    ("transposed bytes counted as codes", f"{COPIES}:store_transposed", "byte = stripe.number * (STRIPE // PACKED)", "byte = stripe.number * STRIPE", (f"{EVERY}[e2m1:mx:te-both]",)),
    ("scales of columns written by the second stripe", "quantize_stripe_kernel", "(stripe == 0)", "(stripe == 1)", (f"{SHAPES}[int8:row:te]",)),
    ("scales of rows not written", "quantize_stripe_kernel", "(start == 0)", "(start < 0)", (f"{SHAPES}[int8:row:te]",)),
    ("all columns scaled like the first", "quantize_stripe_kernel", "col_amax_ptr + col,", "col_amax_ptr + col * 0,", (f"{SHAPES}[int8:row:te]",)),
    ("both copies draw the same", "quantize_stripe_kernel", "random_t = _draw(seed_low, seed_high, row, col, 1)", "random_t = _draw(seed_low, seed_high, row, col, 0)", ("quant/test_stochastic.py::test_stochastic_rounding[e4m3:1x128:te:pow2]",)),
    ("scales of squares all in the first tile's place", f"{COPIES}:store_squares", "squares.across.to(tl.int64) + tl.arange", "squares.across.to(tl.int64) * 0 + tl.arange", (f"{SHAPES}[e4m3:128x128:te:pow2]",)),
    ("a square's scale in its first row alone", f"{COPIES}:store_squares", "(row < height)[:, None]", "((row < height) & (row % REPEATED == 0))[:, None]", (f"{SHAPES}[e2m1:nvfp4_16x16:te]",)),
    ("scales of squares in the place of those of the first stripe", f"{COPIES}:store_squares", "squares.down.to(tl.int64) * REPEATED", "squares.down.to(tl.int64) * 0", (f"{EVERY}[e4m3:128x128:torchao:pow2-both]",)),
    ("scales of squares not transposed", f"{COPIES}:store_stripe", "store_squares(tl.trans(scale), copy_t", "store_squares(tl.reshape(scale, (scale.shape[1], scale.shape[0])), copy_t", (f"{SHAPES}[e2m1:nvfp4_16x16:te]",)),
    ("strides of a square's scale swapped", f"{COPIES}:store_squares", "row * copy.scale_row_stride, col * copy.scale_col_stride", "row * copy.scale_col_stride, col * copy.scale_row_stride", (f"{EVERY}[e4m3:128x128:torchao:pow2-both]",)),
    ("strides of transposed scales swapped", f"{COPIES}:store_stripe", "tl.store(copy_t.scale + (group_off[:, None] + col_off[None, :])", "tl.store(copy_t.scale + (group * copy_t.scale_row_stride)[:, None] + (col.to(tl.int64) * copy_t.scale_col_stride)[None, :]", (f"{SHAPES}[e2m1:mx:te]",)),
    ("32-bit row offsets", "quantize_stripe_kernel", "(tl.program_id(0) // tiles).to(tl.int64)", "(tl.program_id(0) // tiles).to(tl.int32)", ("quant/test_strides.py::test_large_strides[offsets]",)),
    ("tiles counted without the last", "quantize_stripe_kernel", "tiles = tl.cdiv(cols, TILE)", "tiles = tl.maximum(cols // TILE, 1)", (f"{SHAPES}[e4m3:1x128:te:pow2]",)),
    ("last tile not launched", f"{LAUNCH}:_Quantize.stripes_pass", "launch(\n            (stripes * tiles, 1, 1),", "launch(\n            (max(stripes * tiles - 1, 1), 1, 1),", (f"{SHAPES}[e4m3:1x128:te:pow2]",)),
    ("amax of the first row of a tile", "quantize_stripe_kernel", "amax(amax(x, axis=1), axis=0)", "amax(tl.where(row == stripe * ROWS, amax(x, axis=1), 0.0), axis=0)", ("quant/test_norms.py::test_amax[e4m3:1x128:te:pow2]",)),
    ("square's amax of its first column", f"{TILE}:quantize_squares", "amax(tl.reshape(column_amax, (R // S, C // S, S)), axis=2)", "amax(tl.reshape(tl.where(tl.arange(0, C)[None, :] % S == 0, column_amax, 0.0), (R // S, C // S, S)), axis=2)", (f"{SHAPES}[e4m3:128x128:te:pow2]",)),
    ("squares scaled by those above", f"{TILE}:quantize_squares", "repeat_rows(factor, S)", "tl.flip(repeat_rows(factor, S), 0)", (f"{SHAPES}[e2m1:nvfp4_16x16:te]",)),
    ("rotated without signs", f"{HADAMARD}:hadamard_columns", "-1.0, 1.0)", "1.0, 1.0)", (ROTATED,)),
    ("sums and differences swapped", f"{HADAMARD}:hadamard_columns", "tl.join(even + odd, even - odd)", "tl.join(even - odd, even + odd)", (ROTATED,)),
    ("rotated in three steps", f"{HADAMARD}:hadamard_columns", "tl.static_range(4)", "tl.static_range(3)", (ROTATED,)),
    ("rotated numbers twice as large", f"{HADAMARD}:hadamard_columns", "* 0.25", "* 0.5", (ROTATED,)),
    ("rotated numbers not rounded", "quantize_stripe_kernel", "hadamard_columns(x).to(x_ptr.dtype.element_ty).to(tl.float32)", "hadamard_columns(x)", (f"{B}test_rotated_copies[bf16]",)),
    ("rotated copy scaled by the amax of x", f"{LAUNCH}:_Quantize.rotated", "False, rotated_amax=rotated_amax", "False, rotated_amax=tensor_amax", (ROTATED,)),
    ("amax of the rotated copy that of x", "quantize_stripe_kernel", "amax(amax(rotated, axis=1), axis=0)", "amax(amax(x, axis=0), axis=0)", (ROTATED,)),
    ("rotated rows cut off with x", "quantize_stripe_kernel", "(rows + 15) // 16 * 16", "rows", (ROTATED,)),
    ("row-wise copy rotated as well", "quantize_stripe_kernel", "            store_stripe(\n                x,\n                copy,\n                nothing,", "            store_stripe(\n                hadamard_columns(x),\n                copy,\n                nothing,", (ROTATED,)),
    ("columns scaled by the group above", f"{TILE}:quantize_columns", "scaled(groups, factor[:, None, :], FORMAT)", "scaled(groups, tl.flip(factor, 0)[:, None, :], FORMAT)", (f"{EVERY}[e2m1:mx:te-both]",)),
    ("x read at the wrong stride", "quantize_stripe_kernel", "row * x_stride", "row * cols", ("quant/test_strides.py::test_strided_inputs[e4m3:1x128:te:pow2]",)),
    ("rows past the end read", "quantize_stripe_kernel", "mask = tile_mask(row, col, rows, cols, True, COLS_MASKED)", "mask = tile_mask(row, col, rows + 1, cols, True, COLS_MASKED)", (f"{PADS}[e4m3:1x128:te:pow2-auto]", "quant/test_strides.py::test_strided_inputs[e4m3:1x128:te:pow2]")),
    ("columns past the end read", "quantize_stripe_kernel", "mask = tile_mask(row, col, rows, cols, True, COLS_MASKED)", "mask = tile_mask(row, col, rows, cols + 1, True, COLS_MASKED)", (f"{SHAPES}[e4m3:1x128:te:pow2]",)),
]  # fmt: skip

_AMAX: list[tuple[Any, ...]] = [
    ("pieces of a row all in one place", "amax_kernel", "tile.to(tl.int64) * rows + row", "tile.to(tl.int64) * 0 + row", (f"{SHAPES}[int8:row:te]",)),
    ("pieces of a column all in one place", "amax_kernel", "stripe * cols + col", "stripe * 0 + col", (f"{SHAPES}[int8:row:te]",)),
    ("rows and columns swapped", "amax_kernel", "amax(x, axis=1), mask=row < rows)", "amax(x, axis=0), mask=row < rows)", (f"{SHAPES}[int8:row:te]",)),
    ("amax drops NaN", f"{REDUCE}:amax", "return tl.max(bits, axis=axis).to(tl.float32, bitcast=True)", "return tl.max(tl.where(bits > 0x7F800000, 0, bits), axis=axis).to(tl.float32, bitcast=True)", (f"{EVERY}[e4m3:row:deepep-both]",)),
    ("negative numbers ignored", f"{REDUCE}:amax", "& 0x7FFFFFFF", "", (f"{SHAPES}[int8:row:te]",)),
    ("first piece of all", f"{LAUNCH}:_Quantize.stripes_pass", "col_amax = self.amax(col_partials)", "col_amax = col_partials[0]", (f"{SHAPES}[int8:row:te]",)),
    ("smallest of the pieces", f"{LAUNCH}:_Quantize.amax", "torch.amax(partials, 0,", "torch.amin(partials, 0,", (f"{SHAPES}[int8:row:te]",)),
    ("x read at the wrong stride", "amax_kernel", "row * x_stride", "row * cols", ("quant/test_strides.py::test_strided_inputs[e4m3:row:te]",)),
    ("last row left out", "amax_kernel", "mask=row < rows)", "mask=row < rows - 1)", (f"{SHAPES}[int8:row:te]",)),
    ("last column left out", "amax_kernel", "mask=col < cols)", "mask=col < cols - 1)", (f"{SHAPES}[int8:row:te]",)),
    ("columns past a multiple of 16 left out", "amax_kernel", "cols = (cols // ALIGN) * ALIGN", "cols = (cols // 16) * 16", (f"{SHAPES}[int8:row:te]",)),
    ("columns past the end read", "amax_kernel", "tile_mask(row, col, rows, cols, True, COLS_MASKED)", "tile_mask(row, col, rows, cols + 1, True, COLS_MASKED)", (f"{SHAPES}[int8:row:te]",)),
    ("rows past the end read", "amax_kernel", "tile_mask(row, col, rows, cols, True, COLS_MASKED)", "tile_mask(row, col, rows + 1, cols, True, COLS_MASKED)", ("quant/test_strides.py::test_strided_inputs[e4m3:row:te]",)),
    ("32-bit row offsets", "amax_kernel", "(tl.program_id(0) // tiles).to(tl.int64)", "(tl.program_id(0) // tiles).to(tl.int32)", ("quant/test_strides.py::test_large_strides[offsets]",)),
    ("last tile not launched", f"{LAUNCH}:_Quantize.stripes_pass", "(stripes * tiles, 1, 1),\n                *amax", "(max(stripes * tiles - 1, 1), 1, 1),\n                *amax", (f"{SHAPES}[int8:row:te]",)),
    ("every tile the first", "amax_kernel", "col = tile * TILE + ", "col = tile * 0 + ", (f"{SHAPES}[int8:row:te]",)),
]  # fmt: skip

_DEQUANTIZE: list[tuple[Any, ...]] = [
    ("nibbles swapped", f"{NUMBERS}:unpack_pairs", "tl.interleave(packed & 0xF, packed >> 4)", "tl.interleave(packed >> 4, packed & 0xF)", (f"{DECODE}[e2m1:mx:te-auto]",)),
    ("scales of the first tile for all", "ops/common/loads.py:load_decoded", "group = start // GROUP + tl.arange", "group = start * 0 + tl.arange", (workload("accuracy", "dequantize:llama3-8b/hidden:mx-both:8192"),)),
    ("strides of the scales swapped", "ops/common/loads.py:load_decoded", "(group.to(tl.int64) * codes.scale_col_stride)", "(group.to(tl.int64) * codes.scale_row_stride)", (f"{DECODE}[e2m1:mx:te-auto]",)),
    ("e8m0 code 0 taken for 0", "tiles/numbers.py:decode_e8m0", "tl.where(bits == 0, 0x00400000, bits << 23)", "bits << 23", (f"{DECODE}[e4m3:mx:te-auto]", f"{DECODE}[e5m2:mx:te-auto]")),
    ("e8m0 NaN taken for infinity", "tiles/numbers.py:decode_e8m0", "tl.where(bits == 255, 0x7FC00000, ", "tl.where(bits == 256, 0x7FC00000, ", (f"{DECODE}[e2m1:mx:te-auto]",)),
    ("nvfp4 without the scale of the tensor", "ops/common/loads.py:load_decoded", "decode_e4m3(scale) * tl.load(global_ptr)", "decode_e4m3(scale)", (f"{DECODE}[e2m1:nvfp4:te-auto]",)),
    ("nvfp4 multiplied in another order", "ops/common/loads.py:load_decoded", "return tl.reshape(groups * scale[:, :, None]", "return tl.reshape(groups * (scale[:, :, None] / (tl.load(global_ptr) if FORMAT.block == \"nvfp4\" else 1.0)) * (tl.load(global_ptr) if FORMAT.block == \"nvfp4\" else 1.0)", (f"{DECODE}[e2m1:nvfp4:te-auto]",)),
    ("values cut, not rounded", "dequantize_kernel", "values.to(out_ptr.dtype.element_ty)", DOWN_TO_BF16.format("values") + ".to(out_ptr.dtype.element_ty)", ("quant/test_dequantize.py::test_dequantize_to_sixteen_bits[int8:row:te-dtype1]",)),
    ("no signs", f"{NUMBERS}:_with_sign", " | sign)", ")", ("quant/test_dequantize.py::test_every_code_decodes",)),
    ("e4m3 NaN taken for 480", f"{NUMBERS}:decode", "size == 0x7F", "size == 0x80", ("quant/test_dequantize.py::test_every_code_decodes",)),
    ("e5m2 infinity taken for NaN", f"{NUMBERS}:decode", "tl.where(size == 0x7C, float(\"inf\"), ", "tl.where(size == 0x7C, float(\"nan\"), ", ("quant/test_dequantize.py::test_every_code_decodes",)),
    ("int8 without signs", f"{NUMBERS}:decode", "codes.to(tl.int8, bitcast=True).to(tl.float32)", "codes.to(tl.float32)", ("quant/test_dequantize.py::test_every_code_decodes",)),
    ("int4 without signs", f"{NUMBERS}:decode", "(codes.to(tl.int32) ^ 8)", "(codes.to(tl.int32) + 8)", ("quant/test_dequantize.py::test_every_byte_of_int4_decodes",)),
    ("int4 off by one", f"{NUMBERS}:decode", "8388616.0", "8388615.0", ("quant/test_dequantize.py::test_every_byte_of_int4_decodes",)),
    ("all rows scaled like the first", "ops/common/loads.py:load_decoded", "block * codes.scale_row_stride", "block * 0", (f"{DECODE}[e4m3:1x128:te:pow2-auto]",)),
    ("squares scaled row by row", "ops/common/loads.py:load_decoded", "block = row // FORMAT.block_rows", "block = tl.minimum(row, 1)", (f"{DECODE}[e4m3:128x128:te-auto]",)),
    ("last tile left out", f"{LAUNCH}:launch_dequantize", "-(-cols // tile), 1, 1)", "max(cols // tile, 1), 1, 1)", (f"{DECODE}[e4m3:1x128:te:pow2-auto]",)),
    ("32-bit row offsets", "dequantize_kernel", "(tl.program_id(0) // tiles).to(tl.int64)", "(tl.program_id(0) // tiles).to(tl.int32)", ("quant/test_strides.py::test_large_strides[offsets]",)),
    ("last code of an odd row left out", "ops/common/loads.py:load_decoded", "(cols + 1) // 2", "cols // 2", (workload("accuracy", "dequantize:odd/33:nvfp4-both:8192"),)),
    ("results at the codes' stride", "dequantize_kernel", "out_off = tl.multiple_of(row * cols", "out_off = tl.multiple_of(row * codes.stride", (f"{DECODE}[e4m3:1x128:te:pow2-auto]",)),
    ("last column left out", "dequantize_kernel", "tile_mask(row, col, rows, cols, True", "tile_mask(row, col, rows, cols - 1, True", (f"{DECODE}[e4m3:1x128:te:pow2-auto]",)),
]  # fmt: skip

_TENSOR: list[tuple[Any, ...]] = [
    ("larger drops NaN", f"{REDUCE}:larger", "return tl.maximum(a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)", "return tl.maximum(a, tl.where(b != b, 0.0, b))", ("quant/test_norms.py::test_amax[e4m3:tensor:te]",)),
    ("first partial amax alone", f"{COPIES}:_tensor_scale_kernel", "part < count", "part < 1", (f"{SHAPES}[e5m2:tensor:te]",)),
    ("last partial amax left out", f"{COPIES}:_tensor_scale_kernel", "part < count", "part < count - 1", (f"{SHAPES}[e5m2:tensor:te]",)),
    ("first 1024 partial amax alone", f"{COPIES}:_tensor_scale_kernel", "range(0, count, TILE)", "range(0, 1, TILE)", (ANY_ROW,)),
    ("last 1024 partial amax alone", f"{COPIES}:_tensor_scale_kernel", "largest = larger(largest, ", "largest = larger(largest * 0.0, ", (ANY_ROW,)),
    ("amax at least 1", f"{COPIES}:_tensor_scale_kernel", "other=0.0)", "other=1.0)", (f"{EVERY}[e4m3:tensor:te-rows]",)),
    ("half of the partial amax", f"{COPIES}:reduce_amax", "count=partials.numel()", "count=-(-partials.numel() // 2)", (f"{SHAPES}[e5m2:tensor:te]",)),
    ("scale returned for amax", f"{COPIES}:_tensor_scale_kernel", "tl.store(amax_ptr, tensor_amax)", "tl.store(amax_ptr, tensor_amax / 448.0)", ("quant/test_norms.py::test_amax[e4m3:tensor:te]",)),
    ("no scale of the transposed copy", f"{COPIES}:_tensor_scale_kernel", "tl.store(scale_t_ptr, scale)", "tl.store(scale_t_ptr, scale * 0.0)", (f"{SHAPES}[e5m2:tensor:te]",)),
    ("factor stored for the scale", f"{COPIES}:_tensor_scale_kernel", "scale, _ = fp32_scale", "_, scale = fp32_scale", (f"{SHAPES}[e5m2:tensor:te]",)),
    ("te's largest number that of fp32", f"{COPIES}:reduce_amax", "torch.finfo(input_dtype).max", "torch.finfo(torch.float32).max", (f"{B}test_sixteen_bit_inputs[bfloat16-e5m2:tensor:te]",)),
    ("te's nvfp4 scale as torchao's", f"{SCALES}:nvfp4_global", "tl.div_rn(1.0, _nvfp4_encode(amax))", "tl.where(amax == 0.0, 1.0, tl.div_rn(amax, 2688.0))", (f"{EVERY}[e2m1:nvfp4:te-rows]",)),
    ("nvfp4 scale of nothing 0", f"{SCALES}:nvfp4_global", "tl.where(amax == 0.0, 1.0, tl.div_rn(amax, 2688.0))", "tl.div_rn(amax, 2688.0)", (f"{EVERY}[e2m1:nvfp4:torchao-rows]",)),
    ("te's nvfp4 factor infinite for small amax", f"{SCALES}:_nvfp4_encode", "at_most(tl.div_rn(2688.0, amax), 3.4028234663852886e38)", "tl.div_rn(2688.0, amax)", (f"{EVERY}[e2m1:nvfp4:te-rows]",)),
    ("te's nvfp4 factor 0 for infinite amax", f"{SCALES}:_nvfp4_encode", "(amax == 0.0) | (scale == 0.0)", "amax == 0.0", (f"{EVERY}[e2m1:nvfp4:te-rows]",)),
    ("scale halved", f"{COPIES}:_tensor_scale_kernel", "tl.store(scale_ptr, scale)", "tl.store(scale_ptr, scale * 0.5)", (f"{SHAPES}[e5m2:tensor:te]",)),
]  # fmt: skip

LINES: dict[str, list[tuple[Any, ...]]] = {
    "quantize_rows_kernel": _ROWS,
    "quantize_stripe_kernel": _STRIPE,
    "amax_kernel": _AMAX,
    "dequantize_kernel": _DEQUANTIZE,
    "_tensor_scale_kernel": _TENSOR,
}
