"""Mutants of the kernels of products, in the format of `ops.norm.mutants`."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE = "ops/product/kernels.py"
R = "ops/product/test.py::"

BF16, ROWS, BLOCKS, OUTER, MX, NVFP4, W8, INT8, MIXED, SQUARES = (
    f"{R}test_some_shapes[{pair}]"
    for pair in (
        "bf16", "fp8-row", "fp8-blocks", "fp8-blocks-wgrad", "mxfp8", "nvfp4", "weight-int8", "int8-row", "row-tensor", "squares-blocks",
    )
)  # fmt: skip
SPANS, WHOLE = (f"{R}test_epilogues[bf16-{case}]" for case in ("spans", "whole"))
SPANS_ROWS = f"{R}test_epilogues[int8-row-spans]"
SPANS_BLOCKS = f"{R}test_epilogues[fp8-blocks-spans]"
GATED_SQUARES = f"{R}test_epilogues[fp8-blocks-whole]"
DECODED = f"{R}test_scaled_dots_equal_dots_of_decoded_values[mxfp4]"
FNUZ = f"{R}test_fnuz_types_give_the_same_products[e4m3]"
FAR = f"{R}test_offsets_have_64_bits"
BATCH = f"{R}test_shapes_match_torch[a6-b6]"
SAME_ROWS = f"{R}test_a_row_does_not_depend_on_the_others[bf16]"
CODES = f"{R}test_quantized_results_match_quantize[130-1x128]"
CODES_OF_SPANS = f"{R}test_quantized_results_match_quantize[5-mx]"
BULK = f"{R}test_as_launched_on[sm_90-bf16]"
BULK_BLOCKS = f"{R}test_as_launched_on[sm_90-fp8-blocks]"
G = "ops/product/test_grouped.py::"
GROUPS, GROUPS_BLOCKS, GROUPS_MX = (
    f"{G}test_some_groups[{pair}]" for pair in ("bf16", "fp8-blocks", "mxfp8")
)
GROUPS_ROWS, ANYWHERE, WHO = (
    f"{G}test_some_groups[fp8-row]",
    f"{G}test_groups_begin_anywhere[8]",
    f"{G}test_distributions_of_rows[ends3]",
)
PAST = f"{G}test_an_empty_group_may_begin_past_the_rows"
GATHERED, FOLLOWS, SLOTS = (
    f"{G}test_gathered_rows_match_permuted_rows[bf16]",
    f"{G}test_epilogues[fp8-blocks]",
    f"{G}test_blocks_that_restart_at_groups[1x128]",
)
GUARD = "catalogue/test_workloads.py::test_workload[guard_bands-matmul:odd/33:bf16:512]"

LINES: dict[str, list[tuple[Any, ...]]] = {
    "matmul_kernel": [
        ("the last step left out", "_sums", "for index in range(begin, end):", "for index in range(begin, end - 1):", (BF16,)),
        ("the last step alone", "_step", "        return _dot(a, b, total, PRODUCT)", "        return _dot(a, b, None, PRODUCT)", (BF16,)),
        ("past K", "_stored", "mask = mask & (k < tl.cdiv(width, ALIGN) * ALIGN)[None, :]", "mask = mask & (k < tl.cdiv(width, ALIGN) * ALIGN + 1)[None, :]", (BF16, GUARD)),
        ("32-bit offsets", "_stored", "tl.multiple_of(rows.row * operand.stride, ALIGN)", "tl.multiple_of((rows.row * operand.stride).to(tl.int32), ALIGN)", (FAR,)),
        ("one batch for all", "_select_batch", "batch * operand.batch_stride", "batch * 0", (BATCH,)),
        ("the scale of the block before", "_block_scales", "(step.scale_start // 128).to(tl.int64)", "tl.maximum(step.scale_start // 128 - 1, 0).to(tl.int64)", (BLOCKS,)),
        ("the first square's scale for all", "_block_scales", "(rows.first // 128).to(tl.int64)", "(rows.first * 0).to(tl.int64)", (f"{R}test_as_launched_on[sm_90-fp8-blocks]",)),
        ("one of two scales", "_step", "return total + part * a_scale * b_scale", "return total + part * a_scale * a_scale", (OUTER,)),
        ("scales added, not multiplied", "_step", "part * (a_scale * b_scale)", "part * (a_scale + b_scale)", (BLOCKS, SQUARES)),
        ("the last block alone", "_step", "return total + part * (a_scale * b_scale)", "return part * (a_scale * b_scale)", (BLOCKS,)),
        ("squares that up shares with the gate", "_block_scales", "else rows.row // 128", "else (rows.row // 128) * 0", (GATED_SQUARES,)),
        ("gate for up", "_sums", "ups = Rows(location.col + n, location.first_col + n", "ups = Rows(location.col, location.first_col", (WHOLE,)),
        ("scales of groups by one", "_group_scales", "step.scale_start // GROUP + tl.arange(0, GROUPS)", "step.scale_start // GROUP + tl.arange(0, GROUPS) * 0", (MX, DECODED)),
        ("e8m0 off by one", "tiles/numbers.py:decode_e8m0", "bits << 23", "(bits + 1) << 23", (DECODED,)),
        ("int4 without signs", "tiles/numbers.py:decode", "(codes.to(tl.int32) ^ 8)", "(codes.to(tl.int32) + 8)", (f"{R}test_one_shape[weight-int4]",)),
        ("one half of a byte for both", "tiles/numbers.py:unpack_pairs", "packed >> 4", "packed & 0xF", (f"{R}test_one_shape[weight-int4]",)),
        ("-0 is NaN", "_fnuz", "== 0x7F, 0x80, tl.where(codes == 0x80, 0, codes))", "== 0x7F, 0x80, tl.where(codes == 0x81, 0, codes))", (FNUZ,)),
        ("NaN is 240", "_fnuz", "tl.where((codes & 0x7F) == 0x7F, 0x80,", "tl.where((codes & 0x7F) == 0x80, 0x80,", (FNUZ,)),
        ("half as large", "_scaled", "value = value * 4.0", "value = value * 2.0", (FNUZ,)),
        ("b's scales for a's", "_scaled", "tl.load(a.scale + row * a.scale_row_stride, mask=row < rows", "tl.load(b.scale + row * 0, mask=row < rows", (ROWS, MIXED)),
        ("without b's scale of rows", "_scaled", "value * tl.load(b.scale + col * b.scale_row_stride", "value + 0.0 * tl.load(b.scale + col * b.scale_row_stride", (ROWS, INT8, W8)),
        ("nvfp4's scale of one tensor", "_scaled", "(tl.load(a.global_scale) * tl.load(b.global_scale))", "(tl.load(a.global_scale) * 1.0)", (NVFP4,)),
        ("bias before alpha", "_epilogue", "value = _scaled(total, a, b, location.a_row, location.a_rows, location.col, cols, PRODUCT) * alpha", "value = _scaled(total, a, b, location.a_row, location.a_rows, location.col, cols, PRODUCT)", (WHOLE,)),
        ("up without its bias", "_epilogue", "up += tl.load(bias + up_col", "up += 0.0 * tl.load(bias + up_col", (WHOLE,)),
        ("no residual", "_epilogue", "value += residual.to(tl.float32)", "value += 0.0 * residual.to(tl.float32)", (WHOLE,)),
        ("codes of what was not rounded", "_store", "tl.where(mask, rounded.to(tl.float32), 0.0)", "tl.where(mask, value, 0.0)", (CODES,)),
        ("the spans of one program overwrite each other", "matmul_kernel", "            total += part.to(total.dtype)\n", "            total = part.to(total.dtype)\n", (SAME_ROWS,)),
        ("partial sums in one place", "matmul_kernel", "plane = tl.program_id(1).to(tl.int64) *", "plane = tl.program_id(1).to(tl.int64) * 0 *", (SPANS,)),
        ("the next rows", "_stored", "return source.load([rows.first, first])", "return source.load([rows.first + 1, first])", (BULK,)),
        ("rows of a batch that another has", "_locate", "written, b_batch = sizes.m, batch", "written, b_batch = sizes.m, batch * 0", (BATCH,)),
        ("the first columns alone", "matmul_kernel", "tile_col = number % (8 * tiles_n) // height", "tile_col = number % (8 * tiles_n) // height * 0", (BULK,)),
        ("pads of groups keep what was there", "_locate", "written, b_batch = first + exist,", "written, b_batch = first + real,", (GROUPS,)),
        ("pads of groups are computed", "_locate", "rows = first + real", "rows = first + exist", (GROUPS,)),
        ("the next group's matrix", "_locate", "tl.minimum(group, groups.number - 1)", "tl.minimum(group + 1, groups.number - 1)", (GROUPS, WHO)),
        ("the first group's scales", "_select_batch", "batch * operand.scale_batch_stride", "batch * 0", (GROUPS_BLOCKS, GROUPS_ROWS)),
        ("bias of the first group", "_epilogue", "location.b_batch * finish.bias_stride", "location.b_batch * 0", (FOLLOWS,)),
        ("bias in pads", "_epilogue", "(location.row < location.rows)[:, None], value, 0.0)", "(location.row >= 0)[:, None], value, 0.0)", (FOLLOWS,)),
        ("slots for tokens", "_locate", "slot // gather.slots", "slot", (GATHERED,)),
        ("the first token for none", "_locate", "tl.where(slot >= 0, slot // gather.slots, gather.tokens)", "tl.where(slot >= 0, slot // gather.slots, 0)", (f"{G}test_gathered_rows_match_permuted_rows[bf16]",)),
        ("too few tiles", "matmul_kernel", "tiles_m += groups.number", "tiles_m += 1", (GROUPS,)),
        ("groups along K begin with the first", "_sums", "depth.origin + index * STEP, START", "index * STEP, START", (GROUPS, WHO)),
        ("the rows of the next group too", "_depth", "tl.maximum(end - origin, 0)", "tl.maximum(end + 1 - origin, 0)", (GROUPS,)),
        ("a group past the rows has the last ones", "_depth", "tl.maximum(end - origin, 0)", "tl.maximum(end - tl.minimum(origin, sizes.k // START * START), 0)", (PAST,)),
        ("scales of the group before", "_sums", "depth.scale_origin + index * STEP", "index * STEP", (GROUPS_BLOCKS, GROUPS_MX)),
        ("blocks that begin where they would without groups", "_depth", "(origin // 128 + location.batch.to(tl.int32)) * 128", "(origin // 128) * 128", (SLOTS,)),
    ],
    "finish_kernel": [
        ("without the last span", "finish_kernel", "for _ in range(spans):", "for _ in range(spans - 1):", (SPANS,)),
        ("the last span alone", "finish_kernel", "        total += tl.load(", "        total = tl.load(", (SPANS,)),
        ("up of the last span alone", "finish_kernel", "            total_up += tl.load(", "            total_up = tl.load(", (SPANS,)),
        ("the first span again and again", "finish_kernel", "plane = batches.to(tl.int64) * sizes.m * sizes.n", "plane = batches.to(tl.int64) * sizes.m * 0", (SPANS,)),
        ("rows of the first tile", "finish_kernel", "number // tiles_n, number % tiles_n", "number // tiles_n * 0, number % tiles_n", (BULK,)),
        ("columns of the first tile", "finish_kernel", "number // tiles_n, number % tiles_n", "number // tiles_n, number % tiles_n * 0", (SPANS,)),
        ("another product's batch", "finish_kernel", "batch = tl.program_id(0) // (tiles_m * tiles_n)", "batch = tl.program_id(0) * 0", (f"{R}test_batches_of_few_rows",)),
        ("no activation", "_epilogue", "value = activate(value, 1.0, ACT)", "value = value", (SPANS,)),
        ("no scales of rows", "_epilogue", "value = _scaled(total, a, b, location.a_row, location.a_rows, location.col, cols, PRODUCT) * alpha", "value = total.to(tl.float32) * alpha", (SPANS_ROWS,)),
        ("nothing beyond the last multiple of 16 columns", "_store", "(location.col < n)[None, :]", "(location.col < n - 1)[None, :]", (SPANS,)),
        ("scales of codes from fp32", "_store", "rounded.to(tl.float32), 0.0)", "value + 0.001, 0.0)", (CODES_OF_SPANS,)),
    ],
}  # fmt: skip
