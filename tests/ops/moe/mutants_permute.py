"""The ways in which the kernels of permute and unpermute are broken; the lines are those of `mutants`."""

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
QUANTISED, MOVED, MOVED_MX = (
    f"{P}test_quantised_on_the_way[1x128-301]",
    f"{P}test_quantised_rows_are_moved[96-1x128]",
    f"{P}test_quantised_rows_are_moved[96-mx]",
)
BOTH_MX, BY_ROW = (f"{P}test_quantised_on_the_way[{case}]" for case in ("mx-301", "row-1030"))
CARRIED, WEIGHTED, WEIGHTED_DENSE = (
    accuracy("unpermute:odd/33:carried"),
    accuracy("unpermute:odd/200:probs"),
    accuracy("unpermute:odd/200:mask"),
)
SUMMED, SUMMED_MX, SUMMED_ROW = (
    f"{P}test_quantised_rows_are_added_up[True-{format}]" for format in ("1x128", "mx", "row")
)
UNPERMUTE_LONG = accuracy("unpermute:deepseek-v3/hidden:plain")
BACK, BACK_DENSE = accuracy("unpermute_backward:odd/200:probs"), accuracy("unpermute_backward:odd/200:mask")
BACK_LONG = accuracy("unpermute_backward:qwen3-30b-a3b/hidden:probs")
FAR, ORDER = f"{P}test_offsets_have_64_bits", f"{P}test_sums_are_in_the_order_of_the_slots"
GONE = f"{P}test_a_token_without_rows_is_zero_though_others_are_not_finite"
WRITTEN, WRITTEN_MASK = (f"{P}test_every_index_is_written[{dense}]" for dense in (False, True))
DROPPED = f"{P}test_rows_that_do_not_fit_are_dropped"

LINES: dict[str, list[tuple[Any, ...]]] = {
    "compact_kernel": [
        ("experts from 1", f"{MAP}:compact_kernel", "tl.broadcast_to(expert[None, :]", "tl.broadcast_to(expert[None, :] + 1", (MASK,)),
        ("slots from the last tile alone", f"{MAP}:compact_kernel", "found += tl.sum(chosen, axis=1)", "found = tl.sum(chosen, axis=1)", (MASK_TILES,)),
        ("slots counted without the tiles before", f"{MAP}:compact_kernel", "found[:, None] + tl.cumsum", "tl.cumsum", (MASK_TILES,)),
        ("the first tile alone", f"{MAP}:compact_kernel", "range(0, experts, TILE)", "range(0, TILE, TILE)", (MASK_TILES,)),
        ("slots without an expert not marked", f"{MAP}:compact_kernel", "tl.full((ROWS, TILE), -1, tl.int32)", "tl.full((ROWS, TILE), 0, tl.int32)", (MASK_SLOTS,)),
        ("one slot too few", f"{MAP}:compact_kernel", "(slot < slots)\n", "(slot < slots - 1)\n", (MASK,)),
        ("one mark too few", f"{MAP}:compact_kernel", "(slot < slots)[None, :]", "(slot < slots - 1)[None, :]", (WRITTEN_MASK,)),
        ("marks over experts", f"{MAP}:compact_kernel", "slot[None, :] >= found[:, None]", "slot[None, :] + 1 >= found[:, None]", (MASK,)),
        ("the wrong token's mask", f"{MAP}:compact_kernel", "mask_ptr + (token * experts)", "mask_ptr + (token // 2 * experts)", (MASK,)),
        ("without the last expert", f"{MAP}:compact_kernel", "(expert < experts)", "(expert < experts - 1)", (MASK,)),
        ("descending", f"{MAP}:compact_kernel", "chosen = (chosen != 0).to(tl.int32)", "chosen = (chosen == 0).to(tl.int32)", (MASK,)),
        ("tokens of the first program alone", f"{MAP}:compact_kernel", "tl.program_id(0).to(tl.int64) * ROWS", "tl.program_id(0).to(tl.int64) * 0", (MASK,)),
    ],
    "count_kernel": [
        ("counts of the last block alone", f"{MAP}:count_kernel", "counts += tl.histogram", "counts = tl.histogram", (f"{P}test_linghe_rows_are_enough",)),
        ("slots without an expert counted", f"{MAP}:count_kernel", "BINS, mask=inside)", "BINS, mask=expert < start + BINS)", (ODD,)),
        ("the first bins alone", f"{MAP}:count_kernel", "range(0, experts, BINS)", "range(0, BINS, BINS)", (EXPERTS,)),
        ("bins not shifted", f"{MAP}:count_kernel", "expert - start, 0)", "tl.minimum(expert, BINS - 1), 0)", (EXPERTS,)),
        ("rows of slot 0, not pads", f"{MAP}:count_kernel", "tl.full((BLOCK,), -1, tl.int32)", "tl.full((BLOCK,), 0, tl.int32)", (ODD,)),
        ("a program's last row not a pad", f"{MAP}:count_kernel", "(lane < program_rows)", "(lane < program_rows - 1)", (WRITTEN,)),
        ("the last row not a pad", f"{MAP}:count_kernel", "(row < rows)", "(row < rows - 1)", (WRITTEN,)),
        ("rows of the first program alone", f"{MAP}:count_kernel", "program.to(tl.int64) * program_rows", "program.to(tl.int64) * 0", (WRITTEN,)),
        ("slots of the first program alone", f"{MAP}:count_kernel", "program.to(tl.int64) * program_slots", "program.to(tl.int64) * 0", (FIRST, MANY)),
        ("the last expert not counted", f"{MAP}:count_kernel", "mask=bin < experts", "mask=bin < experts - 1", (MANY,)),
        ("a slot too few", f"{MAP}:count_kernel", "lane < program_slots, count, 0)", "lane < program_slots - 1, count, 0)", (FIRST,)),
        ("any number an expert", f"{MAP}:_expert_of", "(expert >= 0) & (expert < experts)", "(expert >= 0)", (ODD,)),
        ("experts from their low 32 bits", f"{MAP}:_expert_of", "tl.where((expert >= 0) & (expert < experts), expert, -1).to(tl.int32)", "tl.where((expert.to(tl.int32) >= 0) & (expert.to(tl.int32) < experts), expert.to(tl.int32), -1)", (ODD,)),
    ],
    "place_kernel": [
        ("no pads", f"{MAP}:place_kernel", "(total + align - 1) // align * align", "total", (MANY,)),
        ("a pad too many where none is needed", f"{MAP}:place_kernel", "(total + align - 1)", "(total + align)", (f"{P}test_row_map[last]", MANY)),
        ("not after the programs before", f"{MAP}:place_kernel", "end - padded + before", "end - padded", (FIRST,)),
        ("from the end of the region", f"{MAP}:place_kernel", "end - padded + before", "end - total + before", (MANY,)),
        ("regions of the bins before forgotten", f"{MAP}:place_kernel", "begin + tl.cumsum", "tl.cumsum", (EXPERTS,)),
        ("unstable within a block", f"{MAP}:place_kernel", "lane[None, :] < lane[:, None], 1", "lane[None, :] > lane[:, None], 1", (ODD,)),
        ("counts of the first programs alone", f"{MAP}:place_kernel", "total += tl.sum", "total = tl.sum", (f"{P}test_linghe_rows_are_enough_on_a_gpu",)),
        ("own counts among those before", f"{MAP}:place_kernel", "(other < program)", "(other <= program)", (MANY,)),
        ("rows past the end", f"{MAP}:place_kernel", "(expert >= 0) & (row < rows)", "(expert >= 0) & (row < rows - 1)", (NESTED, DROPPED)),
        ("regions past the end", f"{MAP}:place_kernel", "tl.minimum(end, rows)", "end", (NESTED, DROPPED)),
        ("beginnings for ends", f"{MAP}:place_kernel", "tl.minimum(end, rows)", "tl.minimum(end - padded, rows)", (MANY,)),
        ("padded counts", f"{MAP}:place_kernel", "tl.store(total_ptr + bin, total", "tl.store(total_ptr + bin, padded", (MANY,)),
        ("the next row not kept", f"{MAP}:place_kernel", "row + 1, mask=", "row, mask=", (FIRST,)),
        ("the next row by any slot of the expert", f"{MAP}:place_kernel", "(same < 65536)", "(same >= 0) & ((same & 0xFFFF) == 0)", (FIRST,)),
        ("a slot without a row at row 0", f"{MAP}:place_kernel", "tl.where(fits, row, -1)", "tl.where(fits, row, 0)", (ODD,)),
        ("slots within the block", f"{MAP}:place_kernel", "slot.to(tl.int32)", "(first + lane).to(tl.int32)", (FIRST,)),
    ],
    "permute_kernel": [
        ("the last slot not written", "_store_to_slots", "for slot in range(tokens.slots):", "for slot in range(tokens.slots - 1):", (PERMUTE,)),
        ("probabilities of the last slot not written", "permute_kernel", "for slot in range(slots):", "for slot in range(slots - 1):", (PERMUTE,)),
        ("the slot before's row", "_store_to_slots", "row_ptr + slot + 1, mask", "row_ptr + slot, mask", (PERMUTE,)),
        ("the token before", "permute_kernel", "tl.multiple_of(token * x_stride, ALIGN)", "tl.multiple_of(token // 2 * 2 * x_stride, ALIGN)", (PERMUTE,)),
        ("32-bit offsets", "permute_kernel", "tl.multiple_of(token * x_stride, ALIGN)", "tl.multiple_of((token * x_stride).to(tl.int32), ALIGN)", (FAR,)),
        ("the first tile alone", "permute_kernel", "start = tile * TILE", "start = tile * 0", (LONG,)),
        ("every slot the first one's probability", "permute_kernel", "_load_probs(probs, token, slot, row >= 0)", "_load_probs(probs, token, slot * 0, row >= 0)", (PERMUTE,)),
        ("probabilities by slot, not expert", "_load_probs", "column = tl.load(probs.experts_ptr + token * probs.slots + slot, mask=mask, other=-1)", "column = slot", (DENSE,)),
        ("every token the first one's probabilities", "_load_probs", "token * probs.stride", "token * 0", (PERMUTE,)),
        ("pads not zero", "_write_pads", "tl.zeros((PADS, PIECE), y.data.dtype.element_ty)", "tl.full((PADS, PIECE), 1, y.data.dtype.element_ty)", (PERMUTE,)),
        ("pads without their last columns", "_write_pads", "range(0, pads.cols, PIECE)", "range(0, pads.cols - PIECE, PIECE)", (PERMUTE,)),
        ("probabilities of pads not written", "_write_pads", "row, none, mask=pad)", "row, none, mask=row < 0)", (PERMUTE,)),
        ("scale 2 in pads", "_write_pads", "1.0 if tl.float32 == KIND else 127", "2.0 if tl.float32 == KIND else 128", (MOVED,)),
        ("e8m0's 2^-127 in pads", "_write_pads", "else 127", "else 0", (MOVED_MX,)),
        ("the scales of the token before", "permute_kernel", "(token * x_scale_row_stride)", "(token // 2 * 2 * x_scale_row_stride)", (MOVED,)),
        ("the first scale for all", "permute_kernel", "(group_off * x_scale_col_stride)", "(group_off * 0)", (f"{P}test_quantised_rows_are_moved[96-mx]",)),
        ("scales one row off", "_store", "tl.store(y.scale + scale_off, scale", "tl.store(y.scale + scale_off, scale * 2", (QUANTISED,)),
        ("without the last group", "_store", "rows, groups, True", "rows, groups - 1, True", (QUANTISED,)),
        ("a row's scale from its last tile", "permute_kernel", "largest = larger(largest, amax(x, axis=1))", "largest = amax(x, axis=1)", (BY_ROW,)),
        ("a row's last tile alone", "permute_kernel", "start = tl.multiple_of(start, TILE)", "start = tl.multiple_of(start * 0, TILE)", (BY_ROW,)),
        ("a row's scale twice as large", "permute_kernel", "y_scale_row_stride, scale, mask=row >= 0)", "y_scale_row_stride, scale * 2, mask=row >= 0)", (BY_ROW,)),
        ("a pad's scale not written", "_write_pads", "scale, mask=pad)", "scale, mask=row < 0)", (BY_ROW,)),
    ],
    "permute_stripe_kernel": [
        ("the token before", "permute_stripe_kernel", "tl.multiple_of(token * x_stride, ALIGN)", "tl.multiple_of(token // 2 * 2 * x_stride, ALIGN)", (QUANTISED,)),
        ("32-bit offsets", "permute_stripe_kernel", "tl.multiple_of(token * x_stride, ALIGN)", "tl.multiple_of((token * x_stride).to(tl.int32), ALIGN)", (FAR,)),
        ("slots for tokens", "permute_stripe_kernel", "(tl.where(taken, slot, 0) // slots)", "(tl.where(taken, slot, 0) % 37)", (QUANTISED,)),
        ("pads of token 0", "permute_stripe_kernel", "mask = taken[:, None]", "mask = (row < rows)[:, None]", (QUANTISED,)),
        ("the last row a pad", "permute_stripe_kernel", "slot >= 0", "slot > 0", (QUANTISED,)),
        ("without the last column", "permute_stripe_kernel", "(col < cols)[None, :]", "(col < cols - 1)[None, :]", (QUANTISED,)),
        ("the first tile alone", "permute_stripe_kernel", "col = start + tl.arange(0, TILE)", "col = tl.arange(0, TILE)", (QUANTISED,)),
        ("the first stripe alone", "permute_stripe_kernel", "row = stripe * ROWS", "row = stripe * 0", (QUANTISED,)),
        ("probabilities of the first slot", "permute_stripe_kernel", "token, own, taken", "token, own * 0, taken", (QUANTISED,)),
        ("probabilities of pads not written", "permute_stripe_kernel", "prob, mask=row < rows)", "prob, mask=taken)", (QUANTISED,)),
        ("row-wise and column-wise swapped", "permute_stripe_kernel", "store_stripe(\n        x,", "store_stripe(\n        -x,", (QUANTISED,)),
        ("numbers twice as large", "permute_stripe_kernel", "store_stripe(\n        x,", "store_stripe(\n        x * 2,", (BOTH_MX,)),
    ],
    "unpermute_kernel": [
        ("the last slot left out", "unpermute_kernel", "(token < tokens) & (slot < slots)", "(token < tokens) & (slot < slots - 1)", (CARRIED,)),
        ("the last slots left out", "unpermute_kernel", "range(0, slots, AT_ONCE)", "range(0, slots - AT_ONCE, AT_ONCE)", (CARRIED,), 1, 2),
        ("nothing brought back", "unpermute_kernel", "range(0, slots, AT_ONCE)", "range(0, slots - AT_ONCE, AT_ONCE)", (CARRIED,), 2, 2),
        ("in the opposite order", "unpermute_kernel", "slot = first + j", "slot = slots - 1 - first - j", (ORDER,)),
        ("rounded at each step", "unpermute_kernel", "total += value", "total = (total + value).to(tl.bfloat16).to(tl.float32)", (CARRIED,)),
        ("cut, not rounded", "unpermute_kernel", "total.to(y_ptr.dtype.element_ty)", "((total).to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True).to(y_ptr.dtype.element_ty)", (CARRIED,)),
        ("no weights", "unpermute_kernel", "tl.fma(value, weight, total)", "value + total", (WEIGHTED,)),
        ("the first slot's weight", "unpermute_kernel", "_load_probs(probs, token, slot, taken)", "_load_probs(probs, token, slot * 0, taken)", (WEIGHTED,)),
        ("weights by slot, not expert", "_load_probs", "column = tl.load(probs.experts_ptr + token * probs.slots + slot, mask=mask, other=-1)", "column = slot", (WEIGHTED_DENSE,)),
        ("a weight where there is no row", "_load_probs", "+ column, mask=mask, other=0.0)", "+ column, mask=slot < probs.slots, other=0.0)", (GONE,)),
        ("the row before", "_load_values", "row_off = tl.multiple_of(row * source.stride, tile.ALIGN)", "row_off = tl.multiple_of(row // 2 * 2 * source.stride, tile.ALIGN)", (CARRIED,)),
        ("32-bit offsets", "_load_values", "row_off = tl.multiple_of(row * source.stride, tile.ALIGN)", "row_off = tl.multiple_of((row * source.stride).to(tl.int32), tile.ALIGN)", (FAR,)),
        ("the first tile alone", "unpermute_kernel", "Tile(row.to(tl.int64), start,", "Tile(row.to(tl.int64), start * 0,", (UNPERMUTE_LONG,)),
        ("the first group's scale", "_load_values", "(group.to(tl.int64) * source.scale_col_stride)", "(group.to(tl.int64) * 0)", (SUMMED,)),
        ("e8m0 twice as large", "tiles/numbers.py:decode_e8m0", "bits << 23))", "(bits + 1) << 23))", (SUMMED_MX,)),
        ("the first row's scale", "_load_values", "source.scale + row * source.scale_row_stride", "source.scale + row * 0", (SUMMED_ROW,)),
        ("brought back to the first expert", "unpermute_kernel", "[:, None] + expert, carried", "[:, None] + expert * 0, carried", (accuracy("permute:odd/200:mask"),)),
    ],
    "unpermute_backward_kernel": [
        ("drows without the weight", "unpermute_backward_kernel", "(weight * dy)", "(weight * 0.0 + dy)", (BACK,)),
        ("dprobs of the last tile alone", "unpermute_backward_kernel", "dots += tl.sum", "dots = tl.sum", (BACK_LONG,)),
        ("dprobs times the weight", "unpermute_backward_kernel", "tl.sum(value * dy, axis=1)", "tl.sum(value * dy * weight, axis=1)", (BACK,)),
        ("the last columns left out", "unpermute_backward_kernel", "range(0, cols, TILE)", "range(0, cols - TILE, TILE)", (BACK_LONG,)),
        ("the last slots left out", "unpermute_backward_kernel", "range(0, slots, AT_ONCE)", "range(0, slots - AT_ONCE, AT_ONCE)", (BACK,)),
        ("the last slot left out", "unpermute_backward_kernel", "mask=slot < slots, other=-1)", "mask=slot < slots - 1, other=-1)", (BACK,)),
        ("the token before", "unpermute_backward_kernel", "tl.multiple_of(token * dy_stride, ALIGN)", "tl.multiple_of(token // 2 * 2 * dy_stride, ALIGN)", (BACK,)),
        ("32-bit offsets", "unpermute_backward_kernel", "tl.multiple_of(token * dy_stride, ALIGN)", "tl.multiple_of((token * dy_stride).to(tl.int32) // 2, ALIGN)", (FAR, BACK)),
        ("dprobs by slot, not expert", "unpermute_backward_kernel", "dprobs_stride + expert, dots", "dprobs_stride + slot, dots", (BACK_DENSE,)),
        ("dprobs where there is no row not written", "unpermute_backward_kernel", "dots, mask=slot < slots)", "dots, mask=taken)", (f"{P}test_dtypes[probs_dtype0-dtype0]", f"{P}test_dtypes")),
        ("pads not written", "unpermute_backward_kernel", "block = tl.program_id(0) - tokens", "block = tl.program_id(0) - tokens + 1", (BACK,)),
        ("pads not zero", "_write_pads", "tl.zeros((PADS, PIECE), y.data.dtype.element_ty)", "tl.full((PADS, PIECE), 1, y.data.dtype.element_ty)", (BACK,)),
        ("drows cut, not rounded", "unpermute_backward_kernel", "(weight * dy).to(", "((weight * dy).to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True).to(", (BACK,)),
    ],
}  # fmt: skip
