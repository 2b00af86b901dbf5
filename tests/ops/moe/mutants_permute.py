"""Mutants of the kernels of permute, unpermute and the row map, in the format of `tests.ops.norm.mutants`."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE, MAP = "ops/moe/permute/kernels.py", "ops/moe/row_map/kernels.py"
P, C = "ops/moe/test_permute.py::", "catalogue/test_workloads.py::"


def accuracy(name: str) -> str:
    return f"{C}test_workload[accuracy-{name}:8192]"


ODD, MANY, EXPERTS, FIRST, NESTED = (
    f"{P}test_row_map[{case}]" for case in ("odd", "many", "experts", "first", "nested")
)
MASK, MASK_TILES, MASK_SLOTS = (
    f"{P}test_row_map_of_a_mask[{case}]" for case in ("70-9-4-None", "33-300-None-None", "600-5-7-None")
)
PERMUTE, DENSE = accuracy("permute:odd/33:probs"), accuracy("permute:odd/200:mask")
LONG = accuracy("permute:deepseek-v3/hidden:plain")
QUANTIZED, MOVED, MOVED_MX = (
    f"{P}test_quantized_while_permuting[1x128-301]",
    f"{P}test_quantized_rows_are_moved[96-1x128]",
    f"{P}test_quantized_rows_are_moved[96-mx]",
)
BOTH_MX, BY_ROW = (f"{P}test_quantized_while_permuting[{case}]" for case in ("mx-301", "row-1030"))
CARRIED, WEIGHTED, WEIGHTED_DENSE = (
    accuracy("unpermute:odd/33:carried"),
    accuracy("unpermute:odd/200:probs"),
    accuracy("unpermute:odd/200:mask"),
)
SUMMED, SUMMED_MX, SUMMED_ROW = (
    f"{P}test_quantized_rows_are_summed[True-{format}]" for format in ("1x128", "mx", "row")
)
UNPERMUTE_LONG = accuracy("unpermute:deepseek-v3/hidden:plain")
BACK, BACK_DENSE = accuracy("unpermute_backward:odd/200:probs"), accuracy("unpermute_backward:odd/200:mask")
BACK_LONG = accuracy("unpermute_backward:qwen3-30b-a3b/hidden:probs")
FAR, ORDER = f"{P}test_offsets_have_64_bits", f"{P}test_sums_are_in_the_order_of_the_slots"
GONE = f"{P}test_a_token_without_rows_is_zero_even_if_others_are_not_finite"
WRITTEN, WRITTEN_MASK = (f"{P}test_every_index_is_written[{dense}]" for dense in (False, True))
DROPPED = f"{P}test_rows_that_do_not_fit_are_dropped"

LINES: dict[str, list[tuple[Any, ...]]] = {
    "compact_kernel": [
        ("experts numbered from 1", f"{MAP}:compact_kernel", "tl.broadcast_to(expert[None, :]", "tl.broadcast_to(expert[None, :] + 1", (MASK,)),
        ("slots of the last tile only", f"{MAP}:compact_kernel", "slots_before += tl.sum(chosen, axis=1)", "slots_before = tl.sum(chosen, axis=1)", (MASK_TILES,)),
        ("slots counted without the tiles before", f"{MAP}:compact_kernel", "slots_before[:, None] + tl.cumsum", "tl.cumsum", (MASK_TILES,)),
        ("only the first tile", f"{MAP}:compact_kernel", "range(0, experts, TILE)", "range(0, TILE, TILE)", (MASK_TILES,)),
        ("unused slots not marked", f"{MAP}:compact_kernel", "tl.full((ROWS, TILE), -1, tl.int32)", "tl.full((ROWS, TILE), 0, tl.int32)", (MASK_SLOTS,)),
        ("last slot skipped", f"{MAP}:compact_kernel", "(slot < slots)\n", "(slot < slots - 1)\n", (MASK,)),
        ("last mark skipped", f"{MAP}:compact_kernel", "(slot < slots)[None, :]", "(slot < slots - 1)[None, :]", (WRITTEN_MASK,)),
        ("marks overwrite experts", f"{MAP}:compact_kernel", "slot[None, :] >= slots_before[:, None]", "slot[None, :] + 1 >= slots_before[:, None]", (MASK,)),
        ("the wrong token's mask", f"{MAP}:compact_kernel", "mask_ptr + (token * experts)", "mask_ptr + (token // 2 * experts)", (MASK,)),
        ("last expert skipped", f"{MAP}:compact_kernel", "(expert < experts)", "(expert < experts - 1)", (MASK,)),
        ("descending", f"{MAP}:compact_kernel", "chosen = (chosen != 0).to(tl.int32)", "chosen = (chosen == 0).to(tl.int32)", (MASK,)),
        ("only the first program's tokens", f"{MAP}:compact_kernel", "tl.program_id(0).to(tl.int64) * ROWS", "tl.program_id(0).to(tl.int64) * 0", (MASK,)),
    ],
    "count_kernel": [
        ("counts of the last block only", f"{MAP}:count_kernel", "counts += tl.histogram", "counts = tl.histogram", (f"{P}test_linghe_rows_suffice",)),
        ("slots without an expert counted", f"{MAP}:count_kernel", "BINS, mask=inside)", "BINS, mask=expert < start + BINS)", (ODD,)),
        ("only the first bins", f"{MAP}:count_kernel", "range(0, experts, BINS)", "range(0, BINS, BINS)", (EXPERTS,)),
        ("bins not shifted", f"{MAP}:count_kernel", "expert - start, 0)", "tl.minimum(expert, BINS - 1), 0)", (EXPERTS,)),
        ("pads marked with slot 0", f"{MAP}:count_kernel", "tl.full((BLOCK,), -1, tl.int32)", "tl.full((BLOCK,), 0, tl.int32)", (ODD,)),
        ("a program's last row not a pad", f"{MAP}:count_kernel", "(lane < program_rows)", "(lane < program_rows - 1)", (WRITTEN,)),
        ("the last row not a pad", f"{MAP}:count_kernel", "(row < rows)", "(row < rows - 1)", (WRITTEN,)),
        ("only the first program's rows", f"{MAP}:count_kernel", "program.to(tl.int64) * program_rows", "program.to(tl.int64) * 0", (WRITTEN,)),
        ("only the first program's slots", f"{MAP}:count_kernel", "program.to(tl.int64) * program_slots", "program.to(tl.int64) * 0", (FIRST, MANY)),
        ("the last expert not counted", f"{MAP}:count_kernel", "mask=bin < experts", "mask=bin < experts - 1", (MANY,)),
        ("last slot skipped", f"{MAP}:count_kernel", "lane < program_slots, count, 0)", "lane < program_slots - 1, count, 0)", (FIRST,)),
        ("invalid experts accepted", f"{MAP}:_expert_of", "(expert >= 0) & (expert < experts)", "(expert >= 0)", (ODD,)),
        ("experts from their low 32 bits", f"{MAP}:_expert_of", "tl.where((expert >= 0) & (expert < experts), expert, -1).to(tl.int32)", "tl.where((expert.to(tl.int32) >= 0) & (expert.to(tl.int32) < experts), expert.to(tl.int32), -1)", (ODD,)),
    ],
    "place_kernel": [
        ("no pads", f"{MAP}:place_kernel", "(total + align - 1) // align * align", "total", (MANY,)),
        ("pads added to aligned regions", f"{MAP}:place_kernel", "(total + align - 1)", "(total + align)", (f"{P}test_row_map[last]", MANY)),
        ("earlier programs ignored", f"{MAP}:place_kernel", "end - padded + before", "end - padded", (FIRST,)),
        ("rows placed at the end of the region", f"{MAP}:place_kernel", "end - padded + before", "end - total + before", (MANY,)),
        ("regions of earlier bins ignored", f"{MAP}:place_kernel", "begin + tl.cumsum", "tl.cumsum", (EXPERTS,)),
        ("unstable within a block", f"{MAP}:place_kernel", "lane[None, :] < lane[:, None], 1", "lane[None, :] > lane[:, None], 1", (ODD,)),
        ("counts of the last programs only", f"{MAP}:place_kernel", "total += tl.sum", "total = tl.sum", (f"{P}test_linghe_rows_suffice_on_a_gpu",)),
        ("own counts included in earlier ones", f"{MAP}:place_kernel", "(other < program)", "(other <= program)", (MANY,)),
        ("last row dropped", f"{MAP}:place_kernel", "(expert >= 0) & (row < rows)", "(expert >= 0) & (row < rows - 1)", (NESTED, DROPPED)),
        ("regions exceed the rows", f"{MAP}:place_kernel", "tl.minimum(end, rows)", "end", (NESTED, DROPPED)),
        ("starts stored as ends", f"{MAP}:place_kernel", "tl.minimum(end, rows)", "tl.minimum(end - padded, rows)", (MANY,)),
        ("padded counts", f"{MAP}:place_kernel", "tl.store(total_ptr + bin, total", "tl.store(total_ptr + bin, padded", (MANY,)),
        ("next row not advanced", f"{MAP}:place_kernel", "row + 1, mask=", "row, mask=", (FIRST,)),
        ("next row stored by any slot of the expert", f"{MAP}:place_kernel", "(same < 65536)", "(same >= 0) & ((same & 0xFFFF) == 0)", (FIRST,)),
        ("a slot without a row gets row 0", f"{MAP}:place_kernel", "tl.where(fits, row, -1)", "tl.where(fits, row, 0)", (ODD,)),
        ("slots within the block", f"{MAP}:place_kernel", "slot.to(tl.int32)", "(first + lane).to(tl.int32)", (FIRST,)),
    ],
    "permute_kernel": [
        ("last slot not written", "_store_to_slots", "for slot in range(tokens.slots):", "for slot in range(tokens.slots - 1):", (PERMUTE,)),
        ("probabilities of the last slot not written", "permute_kernel", "for slot in range(slots):", "for slot in range(slots - 1):", (PERMUTE,)),
        ("previous slot's row", "_store_to_slots", "row_ptr + slot + 1, mask", "row_ptr + slot, mask", (PERMUTE,)),
        ("previous token", "permute_kernel", "tl.multiple_of(token * x_stride, ALIGN)", "tl.multiple_of(token // 2 * 2 * x_stride, ALIGN)", (PERMUTE,)),
        ("32-bit offsets", "permute_kernel", "tl.multiple_of(token * x_stride, ALIGN)", "tl.multiple_of((token * x_stride).to(tl.int32), ALIGN)", (FAR,)),
        ("only the first tile", "permute_kernel", "start = tile * TILE", "start = tile * 0", (LONG,)),
        ("first slot's probability for all", "permute_kernel", "_load_probs(probs, token, slot, row >= 0)", "_load_probs(probs, token, slot * 0, row >= 0)", (PERMUTE,)),
        ("probabilities by slot, not expert", "_load_probs", "column = tl.load(probs.experts_ptr + token * probs.slots + slot, mask=mask, other=-1)", "column = slot", (DENSE,)),
        ("first token's probabilities for all", "_load_probs", "token * probs.stride", "token * 0", (PERMUTE,)),
        ("pads not zero", "_write_pads", "tl.zeros((PADS, PIECE), y.data.dtype.element_ty)", "tl.full((PADS, PIECE), 1, y.data.dtype.element_ty)", (PERMUTE,)),
        ("pads without their last columns", "_write_pads", "range(0, pads.cols, PIECE)", "range(0, pads.cols - PIECE, PIECE)", (PERMUTE,)),
        ("probabilities of pads not written", "_write_pads", "row, zero_probs, mask=pad)", "row, zero_probs, mask=row < 0)", (PERMUTE,)),
        ("scale 2 in pads", "_write_pads", "1.0 if tl.float32 == KIND else 127", "2.0 if tl.float32 == KIND else 128", (MOVED,)),
        ("e8m0's 2^-127 in pads", "_write_pads", "else 127", "else 0", (MOVED_MX,)),
        ("scales of the previous token", "permute_kernel", "(token * x_scale_row_stride)", "(token // 2 * 2 * x_scale_row_stride)", (MOVED,)),
        ("first scale for all groups", "permute_kernel", "(group_off * x_scale_col_stride)", "(group_off * 0)", (f"{P}test_quantized_rows_are_moved[96-mx]",)),
        ("scales one row off", "_store", "tl.store(y.scale + scale_off, scale", "tl.store(y.scale + scale_off, scale * 2", (QUANTIZED,)),
        ("last group skipped", "_store", "rows, groups, True", "rows, groups - 1, True", (QUANTIZED,)),
        ("a row's scale from its last tile only", "permute_kernel", "largest = larger(largest, amax(x, axis=1))", "largest = amax(x, axis=1)", (BY_ROW,)),
        ("every tile reads the first", "permute_kernel", "start = tl.multiple_of(start, TILE)", "start = tl.multiple_of(start * 0, TILE)", (BY_ROW,)),
        ("a row's scale twice as large", "permute_kernel", "y_scale_row_stride, scale, mask=row >= 0)", "y_scale_row_stride, scale * 2, mask=row >= 0)", (BY_ROW,)),
        ("a pad's scale not written", "_write_pads", "scale, mask=pad)", "scale, mask=row < 0)", (BY_ROW,)),
    ],
    "permute_stripe_kernel": [
        ("previous token", "permute_stripe_kernel", "tl.multiple_of(token * x_stride, ALIGN)", "tl.multiple_of(token // 2 * 2 * x_stride, ALIGN)", (QUANTIZED,)),
        ("32-bit offsets", "permute_stripe_kernel", "tl.multiple_of(token * x_stride, ALIGN)", "tl.multiple_of((token * x_stride).to(tl.int32), ALIGN)", (FAR,)),
        ("wrong token of a slot", "permute_stripe_kernel", "(tl.where(has_slot, slot, 0) // slots)", "(tl.where(has_slot, slot, 0) % 37)", (QUANTIZED,)),
        ("pads of token 0", "permute_stripe_kernel", "mask = has_slot[:, None]", "mask = (row < rows)[:, None]", (QUANTIZED,)),
        ("slot 0 treated as a pad", "permute_stripe_kernel", "slot >= 0", "slot > 0", (QUANTIZED,)),
        ("last column skipped", "permute_stripe_kernel", "(col < cols)[None, :]", "(col < cols - 1)[None, :]", (QUANTIZED,)),
        ("only the first tile", "permute_stripe_kernel", "col = start + tl.arange(0, TILE)", "col = tl.arange(0, TILE)", (QUANTIZED,)),
        ("only the first stripe", "permute_stripe_kernel", "row = stripe * ROWS", "row = stripe * 0", (QUANTIZED,)),
        ("probabilities of the first slot for all", "permute_stripe_kernel", "token, slot_in_token, has_slot", "token, slot_in_token * 0, has_slot", (QUANTIZED,)),
        ("probabilities of pads not written", "permute_stripe_kernel", "prob, mask=row < rows)", "prob, mask=has_slot)", (QUANTIZED,)),
        ("codes negated", "permute_stripe_kernel", "store_stripe(\n        x,", "store_stripe(\n        -x,", (QUANTIZED,)),
        ("elements doubled", "permute_stripe_kernel", "store_stripe(\n        x,", "store_stripe(\n        x * 2,", (BOTH_MX,)),
    ],
    "unpermute_kernel": [
        ("last slot skipped", "unpermute_kernel", "(token < tokens) & (slot < slots)", "(token < tokens) & (slot < slots - 1)", (CARRIED,)),
        ("last slots skipped", "unpermute_kernel", "range(0, slots, AT_ONCE)", "range(0, slots - AT_ONCE, AT_ONCE)", (CARRIED,), 1, 2),
        ("carried values of the last slots skipped", "unpermute_kernel", "range(0, slots, AT_ONCE)", "range(0, slots - AT_ONCE, AT_ONCE)", (CARRIED,), 2, 2),
        ("in the opposite order", "unpermute_kernel", "slot = first + j", "slot = slots - 1 - first - j", (ORDER,)),
        ("rounded at each step", "unpermute_kernel", "total += value", "total = (total + value).to(tl.bfloat16).to(tl.float32)", (CARRIED,)),
        ("truncated instead of rounded", "unpermute_kernel", "total.to(y_ptr.dtype.element_ty)", "((total).to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True).to(y_ptr.dtype.element_ty)", (CARRIED,)),
        ("weights ignored", "unpermute_kernel", "tl.fma(value, weight, total)", "value + total", (WEIGHTED,)),
        ("first slot's weight for all", "unpermute_kernel", "_load_probs(probs, token, slot, has_row)", "_load_probs(probs, token, slot * 0, has_row)", (WEIGHTED,)),
        ("weights by slot, not expert", "_load_probs", "column = tl.load(probs.experts_ptr + token * probs.slots + slot, mask=mask, other=-1)", "column = slot", (WEIGHTED_DENSE,)),
        ("a weight where there is no row", "_load_probs", "+ column, mask=mask, other=0.0)", "+ column, mask=slot < probs.slots, other=0.0)", (GONE,)),
        ("previous row", "_load_values", "row_off = tl.multiple_of(tile.row * source.stride, tile.ALIGN)", "row_off = tl.multiple_of(tile.row // 2 * 2 * source.stride, tile.ALIGN)", (CARRIED,)),
        ("32-bit offsets", "_load_values", "row_off = tl.multiple_of(tile.row * source.stride, tile.ALIGN)", "row_off = tl.multiple_of((tile.row * source.stride).to(tl.int32), tile.ALIGN)", (FAR,)),
        ("only the first tile", "unpermute_kernel", "Tile(row.to(tl.int64), start,", "Tile(row.to(tl.int64), start * 0,", (UNPERMUTE_LONG,)),
        ("first group's scale for all", "ops/common/loads.py:load_decoded", "(group.to(tl.int64) * codes.scale_col_stride)", "(group.to(tl.int64) * 0)", (SUMMED,)),
        ("e8m0 twice as large", "tiles/numbers.py:decode_e8m0", "bits << 23))", "(bits + 1) << 23))", (SUMMED_MX,)),
        ("first row's scale for all", "ops/common/loads.py:load_decoded", "block * codes.scale_row_stride", "block * 0", (SUMMED_ROW,)),
        ("carried values stored at the first expert", "unpermute_kernel", "[:, None] + expert, carried", "[:, None] + expert * 0, carried", (accuracy("permute:odd/200:mask"),)),
    ],
    "unpermute_backward_kernel": [
        ("drows without the weight", "unpermute_backward_kernel", "(weight * dy)", "(weight * 0.0 + dy)", (BACK,)),
        ("dprobs of the last tile only", "unpermute_backward_kernel", "dots += tl.sum", "dots = tl.sum", (BACK_LONG,)),
        ("dprobs times the weight", "unpermute_backward_kernel", "tl.sum(value * dy, axis=1)", "tl.sum(value * dy * weight, axis=1)", (BACK,)),
        ("last columns skipped", "unpermute_backward_kernel", "range(0, cols, TILE)", "range(0, cols - TILE, TILE)", (BACK_LONG,)),
        ("last slots skipped", "unpermute_backward_kernel", "range(0, slots, AT_ONCE)", "range(0, slots - AT_ONCE, AT_ONCE)", (BACK,)),
        ("last slot skipped", "unpermute_backward_kernel", "mask=slot < slots, other=-1)", "mask=slot < slots - 1, other=-1)", (BACK,)),
        ("previous token", "unpermute_backward_kernel", "tl.multiple_of(token * dy_stride, ALIGN)", "tl.multiple_of(token // 2 * 2 * dy_stride, ALIGN)", (BACK,)),
        ("32-bit offsets", "unpermute_backward_kernel", "tl.multiple_of(token * dy_stride, ALIGN)", "tl.multiple_of((token * dy_stride).to(tl.int32) // 2, ALIGN)", (FAR, BACK)),
        ("dprobs by slot, not expert", "unpermute_backward_kernel", "dprobs_stride + expert, dots", "dprobs_stride + slot, dots", (BACK_DENSE,)),
        ("dprobs where there is no row not written", "unpermute_backward_kernel", "dots, mask=slot < slots)", "dots, mask=has_row)", (f"{P}test_dtypes[probs_dtype0-dtype0]", f"{P}test_dtypes")),
        ("pads not written", "unpermute_backward_kernel", "block = tl.program_id(0) - tokens", "block = tl.program_id(0) - tokens + 1", (BACK,)),
        ("pads not zero", "_write_pads", "tl.zeros((PADS, PIECE), y.data.dtype.element_ty)", "tl.full((PADS, PIECE), 1, y.data.dtype.element_ty)", (BACK,)),
        ("drows truncated instead of rounded", "unpermute_backward_kernel", "(weight * dy).to(", "((weight * dy).to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True).to(", (BACK,)),
    ],
}  # fmt: skip
