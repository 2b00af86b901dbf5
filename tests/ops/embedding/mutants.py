"""Mutants of the kernels of rows by index; see `tests.ops.norm.mutants` for the format."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE = "ops/embedding/kernels.py"
LAUNCH, OP, LOADS = "ops/embedding/launch.py", "ops/embedding/embedding.py", "ops/common/loads.py"
T = "ops/embedding/test.py::"
SUMS, OUTSIDE = (f"{T}test_gradients_are_sums_of_rows[{of}-dtype0]" for of in ("zipf", "outside"))
RUNS, ALIGNED_RUNS = (f"{T}test_runs_of_any_length[{case}]" for case in ("1-773", "256-768"))
LONG_TABLE, LONGER_TABLE = (f"{T}test_tables_of_any_length[{rows}]" for rows in (70_000, 1_100_000))
IN_ORDER, SCALED, ODD = (
    f"{T}test_rows_are_added_in_order",
    f"{T}test_scale_and_padding",
    f"{T}test_odd_ids[ids2]",
)
MAIN, SEGMENTS, FAR = (
    f"{T}test_main_grad[argument]",
    f"{T}test_sums_of_segments[dtype1]",
    f"{T}test_offsets_have_64_bits",
)
LAYOUT, GPU, SHARDS = (
    f"{T}test_layouts_of_gradients[every other row]",
    f"{T}test_tiles_of_gpus[sm_90]",
    f"{T}test_shards_of_the_vocabulary[cuts0]",
)
GATHERED, ADDED = f"{T}test_gathered_rows[shape1]", f"{T}test_rows_added_in_place[dtype0]"
ROW_TABLE, NVFP4_TABLE, INT4_TABLE = (
    f"{T}test_tables_in_codes[256-{format}]" for format in ("row", "nvfp4", "int4:1x128")
)
TO_ROW, TO_NVFP4, TO_TENSOR = (
    f"{T}test_quantized_results[cpu-{format}]" for format in ("row", "nvfp4", "tensor")
)

_GATHER: list[tuple[Any, ...]] = [
    ("row not scaled", "gather_kernel", "x.to(tl.float32) * scale", "x.to(tl.float32)", (SCALED, ROW_TABLE)),
    ("ids counted from the first of the vocabulary", "gather_kernel", "row = id - first", "row = id", (SHARDS,)),
    ("row before the first read", "gather_kernel", "(at < count) & (row >= 0) & (row < rows)", "(at < count) & (row < rows)", (SHARDS,)),
    ("row after the last read", "gather_kernel", "(row >= 0) & (row < rows)", "(row >= 0)", (SHARDS,)),
    ("negative ids are another rank's", "gather_kernel", "((id < 0) | (id >= size))", "(id >= size)", (ODD,)),
    ("ids past the vocabulary are another rank's", "gather_kernel", "((id < 0) | (id >= size))", "(id < 0)", (ODD,)),
    ("rows copied from the first", "gather_kernel", "table_off = tl.multiple_of(row * table.stride, ALIGN)", "table_off = tl.multiple_of(row * 0, ALIGN)", (GATHERED,)),
    ("all rows stored at the first", "gather_kernel", "y_off = tl.multiple_of(at * cols, ALIGN)", "y_off = tl.multiple_of(at * 0, ALIGN)", (GATHERED,)),
    ("32-bit row offsets", "gather_kernel", "row = id - first", "row = (id - first).to(tl.int32)", (FAR,)),
    ("only the first tile", "gather_kernel", "col = tile * TILE", "col = tile * 0", (GPU,)),
    ("scale of half a row", f"{LAUNCH}:gather_config", "return GatherConfig(1, whole,", "return GatherConfig(1, whole // 2,", (TO_ROW,)),
    ("scales of rows at the first", "ops/common/destination.py:store_quantized", "tl.store(to.copy.scale + row, scale", "tl.store(to.copy.scale + row * 0, scale", (TO_ROW,)),
    ("amax of one tile", "ops/common/destination.py:store_quantized", "to.amax + block * tiles + tile", "to.amax + block * tiles", (TO_NVFP4, TO_TENSOR)),
    ("foreign ids keep their rows", "gather_kernel", "tl.where(foreign[:, None], tl.cast(outside, x.dtype), x)", "x", (ODD,)),
    ("scale of nvfp4's table left out", f"{LOADS}:load_decoded", "decode_e4m3(scale) * tl.load(global_ptr)", "decode_e4m3(scale)", (NVFP4_TABLE,)),
    ("scales of the first row", f"{LOADS}:load_decoded", "(block * codes.scale_row_stride)[:, None]", "(block * 0)[:, None]", (ROW_TABLE, INT4_TABLE)),
    ("codes of the first row", f"{LOADS}:load_decoded", "tl.multiple_of(row * codes.stride,", "tl.multiple_of(row * 0,", (ROW_TABLE,)),
    ("scale of the first group", f"{LOADS}:load_decoded", "(group.to(tl.int64) * codes.scale_col_stride)", "(group.to(tl.int64) * 0)", (INT4_TABLE,)),
]  # fmt: skip

_DIGIT: list[tuple[Any, ...]] = [
    ("rows counted from the first of the vocabulary", "digit_kernel", "row = id - first", "row = id", (SHARDS,)),
    ("ids before the first row sorted", "digit_kernel", "(place >= 0) & (row >= 0) & (row < rows)", "(place >= 0) & (row < rows)", (OUTSIDE,)),
    ("ids after the last row sorted", "digit_kernel", "(row >= 0) & (row < rows)", "(row >= 0)", (OUTSIDE,)),
    ("padding summed", "digit_kernel", " & (id != skipped)", "", (SCALED,)),
    ("dropped ids sorted", "digit_kernel", "exists = (place >= 0) & ", "exists = ", (OUTSIDE,)),
    ("only the lowest digit", "digit_kernel", "row // divisor % digits", "row % digits", (LONG_TABLE,)),
    ("digits not apart", "digit_kernel", "row // divisor % digits", "row // divisor", (LONG_TABLE,)),
    ("early order ignored", "digit_kernel", "place = tl.load(early_ptr + place,", "place += 0 * tl.load(early_ptr + place,", (LONG_TABLE,)),
    ("late order ignored", "digit_kernel", "place = tl.load(late_ptr + at,", "place += 0 * tl.load(late_ptr + at,", (SUMS,)),
    ("order of a block", "digit_kernel", "tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)", "tl.arange(0, BLOCK).to(tl.int64)", (SUMS,)),
    ("order without the last", "digit_kernel", "place.to(tl.int32), mask=at < count", "place.to(tl.int32), mask=at < count - 1", (SUMS,)),
    ("two digits of three", f"{LAUNCH}:_digits", "range(0, bits, step)", "range(0, min(bits, 14), step)", (LONGER_TABLE,)),
    ("one digit too short", f"{LAUNCH}:_digits", "1 << min(step, bits - low)", "1 << min(step, bits - low) - 1", (LONG_TABLE,)),
]  # fmt: skip

_PARTS: list[tuple[Any, ...]] = [
    ("parts not joined", "parts_kernel", "tl.where(end - begin > PART_ROWS, rows + slot, row)", "row", (SEGMENTS,)),
    ("every row joined", "parts_kernel", "end - begin > PART_ROWS, rows", "end > begin, rows", (SUMS,)),
    ("first and continued parts at one place", "parts_kernel", "PART_ROWS * 2 + (at == begin).to(tl.int64)", "PART_ROWS * 2 + 1", (RUNS,)),
    ("one part for each row", "parts_kernel", "tl.minimum(end - at, PART_ROWS)", "tl.minimum(end - at, 1)", (SUMS,)),
    ("parts from a block's start", "parts_kernel", "(at - begin) % PART_ROWS == 0", "at % PART_ROWS == 0", (SUMS,)),
    ("parts after the first lost", "parts_kernel", "(at - begin) % PART_ROWS == 0", "at == begin", (RUNS,)),
    ("search for the begin too short", "parts_kernel", "in range(31):", "in range(27):", (SUMS, RUNS)),
    ("begin of another row", "parts_kernel", "other=0) < row)", "other=0) <= row)", (SUMS,)),
    ("end within the row", "parts_kernel", "other=0) <= row)", "other=0) < row)", (SUMS,)),
    ("last place skipped", "parts_kernel", "(place < count)", "(place < count - 1)", (SEGMENTS, RUNS, ALIGNED_RUNS), 2, 2),
    ("lengths of the first block", "parts_kernel", "tl.store(target_ptr + at,", "tl.store(target_ptr + at % BLOCK,", (SUMS,)),
]  # fmt: skip

_SUM: list[tuple[Any, ...]] = [
    ("order ignored", "sum_parts_kernel", "place = tl.load(order_ptr + place,", "place += 0 * tl.load(order_ptr + place,", (SUMS,)),
    ("last row of a part skipped", "sum_parts_kernel", "range(0, length, AT_ONCE)", "range(0, length - 1, AT_ONCE)", (SUMS,)),
    ("only the first rows", "sum_parts_kernel", "range(0, length, AT_ONCE)", "range(0, tl.minimum(length, AT_ONCE), AT_ONCE)", (SUMS,)),
    ("rows past the part on a GPU", "sum_parts_kernel", "exists = (begin + step < length) & ", "exists = ", (GPU,)),
    ("only the last row", "sum_parts_kernel", "acc += tl.load(x_ptr", "acc = tl.load(x_ptr", (SUMS,)),
    ("rows at the columns' stride", "sum_parts_kernel", "place * x_stride, ALIGN)", "place * cols, ALIGN)", (FAR,)),
    ("32-bit offsets", "sum_parts_kernel", "tl.multiple_of(place * x_stride, ALIGN)", "tl.multiple_of((place * x_stride).to(tl.int32), ALIGN)", (FAR,)),
    ("only the first tile", "sum_parts_kernel", "(tl.program_id(0) % tiles) * TILE", "(tl.program_id(0) % tiles) * 0", (GPU,)),
    ("sum not scaled", "_store_sum", "acc = acc * scale", "acc = acc", (SCALED,)),
    ("main gradient overwritten", "_store_sum", "acc += tl.load(y.onto", "acc += 0 * tl.load(y.onto", (MAIN,)),
    ("sums scaled with what they are added to", "_store_sum", "acc = acc * scale", "acc = acc; scale = scale", (MAIN, ADDED)),
    ("all sums in the first row", "_store_sum", "row.to(tl.int64) * cols, ALIGN", "row.to(tl.int64) * 0, ALIGN", (SUMS,)),
    ("gradient not zeroed", f"{LAUNCH}:launch_sum_rows", "o.y.zero_()", "o.y", (SUMS,)),
    ("gradient of a table in place of sums", f"{OP}:_IntoMainGrad.backward", "onto=ctx.main", "onto=None", (MAIN,)),
]  # fmt: skip

_JOIN: list[tuple[Any, ...]] = [
    ("first part twice", "join_parts_kernel", "off = tl.multiple_of(slot * cols, ALIGN)", "off = tl.multiple_of((block * 2 + 1) * cols, ALIGN)", (RUNS,)),
    ("continued parts begin again", "join_parts_kernel", "target == y.rows + slot, place", "target >= y.rows, place", (ALIGNED_RUNS, IN_ORDER)),
    ("short rows begin", "join_parts_kernel", "target == y.rows + slot, place", "target >= 0, place", (RUNS,)),
    ("row of the block's start", "join_parts_kernel", "row = tl.load(row_ptr + at,", "row = tl.load(row_ptr + block * PART_ROWS,", (RUNS,)),
    ("slots one after another", "join_parts_kernel", "slot = at // PART_ROWS * 2", "slot = at // PART_ROWS", (RUNS,), 2, 2),
    ("only the first part", "join_parts_kernel", "acc += tl.load(partial_ptr", "acc += 0 * tl.load(partial_ptr", (RUNS,)),
    ("only the last part", "join_parts_kernel", "acc += tl.load(partial_ptr", "acc = tl.load(partial_ptr", (RUNS,)),
    ("two parts at most", "join_parts_kernel", "at += PART_ROWS", "at += 2 * PART_ROWS", (RUNS,), 2, 2),
    ("begins in the next part", "join_parts_kernel", "at += PART_ROWS", "at += PART_ROWS + 1", (RUNS,), 1, 2),
    ("blocks after the first skipped", "join_parts_kernel", "block = (tl.program_id(0) // tiles).to(tl.int64)", "block = (tl.program_id(0) // tiles).to(tl.int64) * 0", (RUNS,)),
    ("only the first tile", "join_parts_kernel", "(tl.program_id(0) % tiles) * TILE", "(tl.program_id(0) % tiles) * 0", (GPU,)),
]  # fmt: skip

LINES = {
    "gather_kernel": _GATHER,
    "digit_kernel": _DIGIT,
    "parts_kernel": _PARTS,
    "sum_parts_kernel": _SUM,
    "join_parts_kernel": _JOIN,
}
