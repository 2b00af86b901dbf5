"""Mutants of the multi-tensor kernels, in the format of `ops.norm.mutants`."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE = "ops/multi_tensor/kernels.py"
M = "ops/multi_tensor/test.py::"

MIXED = {
    what: f"{M}test_mixed_lists[{what}-cpu]" for what in ("norm1", "norm2", "norminf", "zeros", "nonfinite")
}
EVERY = {what: f"{M}test_every_element_counts[{what}-torch.float32]" for what in MIXED}
HALVES = f"{M}test_every_element_counts[norm2-torch.float16]"
MAGNITUDES = f"{M}test_no_square_overflows_or_vanishes[torch.float32]"
SPECIAL = {what: f"{M}test_infinite_and_nan[{what}]" for what in ("norm1", "norm2", "norminf")}
LARGEST, ERRORS = f"{M}test_norms_above_the_largest_value_are_infinite", f"{M}test_errors_do_not_add_up"
ZEROS, NONFINITE = (f"{M}{test}[torch.bfloat16]" for test in ("test_zeros", "test_nonfinite"))
CLIP, ONCE, TORCH = f"{M}test_clip[cpu]", f"{M}test_clip_rounds_once", f"{M}test_clip_matches_torch[2]"
NOTHING = f"{M}test_nothing_to_clip_changes_nothing[0.5]"
NAN, EDGE = (f"{M}test_special_norms_match_torch[{case}]" for case in ("1.0-nan", "1.0-1.000001"))
GAPS, SHARED = f"{M}test_layouts[padded]", f"{M}test_clip_raises_for_shared_memory"
WITNESS = f"{M}test_the_witness_knows_the_tensors_of_a_table[cpu]"
ONE_TABLE, MOVED = f"{M}test_a_table_is_built_once", f"{M}test_a_moved_tensor_gets_a_new_table"

LINES: dict[str, list[tuple[Any, ...]]] = {
    "multi_tensor_reduce_kernel": [
        ("chunks of the first dtype for all", "_chunk", "tl.program_id(0).to(tl.int64) + first", "tl.program_id(0).to(tl.int64) + first * 0", (MIXED["norm2"],)),
        ("the last tile left out", "_over_chunk", "    if full < count:", "    if full < count - TILE:", (EVERY["norm1"],)),
        ("the last number left out", "_over_chunk", "mask=full + lane < count", "mask=full + lane < count - 1", (EVERY["norm1"],)),
        ("a tile too many", "_over_chunk", "mask=full + lane < count", "mask=full + lane < count + 1", (WITNESS, EVERY["zeros"])),
        ("the first tile again and again", "_over_chunk", "start_ptr + begin, 16", "start_ptr + begin * 0, 16", (EVERY["norm1"],)),
        ("the first tile left out", "_over_chunk", "range(0, full, TILE)", "range(TILE, full, TILE)", (EVERY["norm1"],)),
        ("what is not there is zero", "_over_chunk", '1 if WHAT == "zeros" or', '1 if WHAT == "one" or', (EVERY["zeros"],)),
        ("signed sums", "_add", "tl.abs(x.to(tl.float32))", "x.to(tl.float32)", (MIXED["norm1"],)),
        ("signed largest", "_add", "x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF", "x.to(tl.float32).to(tl.int32, bitcast=True)", (EVERY["norminf"],)),
        ("-0.0 is no zero", "_add", "(x << 1) == 0", "x == 0", (ZEROS,)),
        ("NaN is finite", "_add", "(x & EXPONENT) == EXPONENT", "(x | EXPONENT) == EXPONENT", (NONFINITE,)),
        ("the last tile's word on finite", "_add", "sums |= ((x", "sums = ((x", (EVERY["nonfinite"],)),
        ("small squares vanish", "multi_tensor_reduce_kernel", "small = squares < 8.271806125530277e-25", "small = squares < 0.0", (MAGNITUDES,)),
        ("large squares overflow", "multi_tensor_reduce_kernel", "(squares > 8.507059173023462e37)", "(squares < 0.0)", (MAGNITUDES,)),
        ("not scaled back", "multi_tensor_reduce_kernel", "tl.sqrt_rn(tl.sum(rescaled, axis=0)) * up", "tl.sqrt_rn(tl.sum(rescaled, axis=0))", (MAGNITUDES,)),
        ("scaled the other way", "multi_tensor_reduce_kernel", "tl.where(small, 1.2379400392853803e27, 8.271806125530277e-25)", "tl.where(small, 8.271806125530277e-25, 1.2379400392853803e27)", (MAGNITUDES,)),
        ("zeros are read again", "multi_tensor_reduce_kernel", "(tl.max(bits & 0x7FFFFFFF, axis=0) != 0)", "(tl.max(bits & 0x7FFFFFFF, axis=0) >= 0)", (f"{M}test_zeros_are_read_once",)),
        ("squares of fp16 for their root", "multi_tensor_reduce_kernel", "partial = tl.sqrt_rn(squares)", "partial = tl.sqrt_rn(squares) if EXPONENT != 0x7C00 else squares", (HALVES,)),
        ("partials of all dtypes in one place", "multi_tensor_reduce_kernel", "tl.store(partial_ptr + chunk", "tl.store(partial_ptr + tl.program_id(0)", (MIXED["norm2"],)),
        ("every dtype as fp32", "ops/multi_tensor/launch.py:_reduce_launch", 'f"int{8 * dtype.itemsize}"', '"int32"', (EVERY["zeros"].replace("32", "16"),)),
        ("no elements before a multiple of 16 bytes", "ops/multi_tensor/table.py:_build", "torch.tensor([[address, before]], device", "torch.tensor([[address, 0]], device", (EVERY["norm1"],)),
        ("a dtype's table for another's", "ops/multi_tensor/table.py:table_of", "tuple([t.dtype for t in tensors])", "tuple([torch.float32 for t in tensors])", ("ops/multi_tensor/test.py::test_mixed_lists[norm2-cpu]",)),
        ("the table of other sizes", "ops/multi_tensor/table.py:table_of", "            tuple(map(Tensor.data_ptr, tensors)),\n            tuple(map(Tensor.numel, tensors)),", "            tuple(map(Tensor.data_ptr, tensors)),\n            tuple(64 for t in tensors),", (ONE_TABLE,)),
    ],
    "multi_tensor_total_kernel": [
        ("zeros of the last partials alone", "multi_tensor_total_kernel", "zeros += tl.load(", "zeros = zeros * 0 + tl.load(", (f"{M}test_many_chunks",)),
        ("zeros of one partial too few", "multi_tensor_total_kernel", "mask=begin + lane < count, other=0)", "mask=begin + lane < count - 1, other=0)", (EVERY["zeros"],), 1, 2),
        ("zeros of the fullest lane alone", "multi_tensor_total_kernel", "tl.sum(zeros, axis=0)", "tl.max(zeros, axis=0)", (f"{M}test_many_chunks",)),
        ("the largest of one partial too few", "multi_tensor_total_kernel", "mask=begin + lane < count, other=0)", "mask=begin + lane < count - 1, other=0)", (EVERY["norminf"],), 2, 2),
        ("a NaN with a sign is small", "multi_tensor_total_kernel", "partial.to(tl.int32, bitcast=True) & 0x7FFFFFFF", "partial.to(tl.int32, bitcast=True)", (SPECIAL["norm2"],)),
        ("finite for the opposite", "multi_tensor_total_kernel", "bits != 0", "bits == 0", (NONFINITE,)),
        ("infinite partials added up", "multi_tensor_total_kernel", "if bits < 0x7F800000:", "if bits <= 0x7F800000:", (SPECIAL["norm2"],)),
        ("terms of one partial too few", "_norm_of_norms", "mask=begin + lane < count", "mask=begin + lane < count - 1", (EVERY["norm2"],)),
        ("terms of the last partials alone", "_norm_of_norms", "        sums = sum_", "        sums = term", (f"{M}test_many_chunks",)),
        ("norms added, not their squares", "_norm_of_norms", "            term = term * term", "            term = term", (MIXED["norm2"],)),
        ("a square for the norm", "_norm_of_norms", "        total = tl.sqrt_rn(total)", "        total = total", (MIXED["norm2"],)),
        ("not scaled back", "_norm_of_norms", "return total * up", "return total", (MIXED["norm2"],)),
        ("sums overflow", "_norm_of_norms", "tl.minimum(tl.maximum(bits >> 23, 1), 253)", "tl.minimum(tl.maximum(bits >> 23, 1), 127)", (LARGEST,)),
        ("subnormal norms are lost", "_norm_of_norms", "tl.maximum(bits >> 23, 1)", "tl.maximum(bits >> 23, 90)", (MAGNITUDES,)),
        ("rounding errors with the wrong sign", "_norm_of_norms", "+ tl.sum(error, axis=0)", "- tl.sum(error, axis=0)", (ERRORS,)),
        ("the last errors alone", "_norm_of_norms", "error += (sums", "error = (sums", (ERRORS,)),
    ],
    "multi_tensor_clip_kernel": [
        ("chunks of the first dtype for all", "_chunk", "tl.program_id(0).to(tl.int64) + first", "tl.program_id(0).to(tl.int64) + first * 0", (CLIP,)),
        ("not the sum with 1e-6", "multi_tensor_clip_kernel", "tl.load(norm_ptr) + 1e-6", "tl.load(norm_ptr)", (f"{M}test_clip_of_a_small_norm",)),
        ("norm by max_norm", "multi_tensor_clip_kernel", "tl.div_rn(max_norm, tl.load(norm_ptr) + 1e-6)", "tl.div_rn(tl.load(norm_ptr) + 1e-6, max_norm)", (ONCE,)),
        ("small tensors made larger", "multi_tensor_clip_kernel", "if not (coefficient >= 1.0):", "if coefficient != 1.0:", (NOTHING,)),
        ("NaN changes nothing", "multi_tensor_clip_kernel", "if not (coefficient >= 1.0):", "if coefficient < 1.0:", (NAN,)),
        ("the last number left out", "multi_tensor_clip_kernel", "full + lane < count", "full + lane < count - 1", (ONCE,)),
        ("a number too many", "multi_tensor_clip_kernel", "full + lane < count", "full + lane < count + 1", (WITNESS,)),
        ("the last tile left out", "multi_tensor_clip_kernel", "        if full < count:", "        if full < count - TILE:", (ONCE,)),
        ("the first tile again and again", "multi_tensor_clip_kernel", "start_ptr + begin, 16", "start_ptr + begin * 0, 16", (ONCE,)),
        ("the first tile left out", "multi_tensor_clip_kernel", "range(0, full, TILE)", "range(TILE, full, TILE)", (ONCE,)),
        ("a coefficient rounded to the dtype", "multi_tensor_clip_kernel", "tl.load(tile_ptr).to(tl.float32) * coefficient", "tl.load(tile_ptr).to(tl.float32) * coefficient.to(ELEMENT).to(tl.float32)", (ONCE,)),
        ("the coefficient's square in the last tile", "multi_tensor_clip_kernel", "(x * coefficient)", "(x * coefficient * coefficient)", (ONCE,)),
        ("copies not copied back", "ops/multi_tensor/launch.py:launch_multi_tensor_clip", "if dense is not t:", "if dense is None:", (GAPS,)),
        ("numbers scaled twice", "ops/multi_tensor/table.py:_do_overlap", "any(address < end for", "any(address < 0 for", (SHARED,)),
    ],
}  # fmt: skip
