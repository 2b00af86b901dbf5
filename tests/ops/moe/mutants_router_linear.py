"""Mutants of the kernels of the router's projection, in the format of `tests.ops.norm.mutants`."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE = "ops/moe/router_linear/kernels.py"
SPLIT = "tiles/split.py"
R = "ops/moe/test_router_linear.py::"

SMALL, MANY, LONG = (f"{R}test_sizes[{case}]" for case in ("17-33-5", "129-65-257", "65-200-60"))
BF16_WEIGHT = f"{R}test_dtypes_on[dtypes3-cpu]"
SHARED = f"{R}test_dtypes_on[dtypes1-sm_90]"  # columns in splits, a bias
ERROR = f"{R}test_error_is_no_larger_than_that_of_fp32[192-sm_90]"  # rows in splits as well
FAR, PADDED = f"{R}test_offsets_have_64_bits", f"{R}test_layouts[padded]"
GUARD = "catalogue/test_workloads.py::test_workload[guard_bands-router_linear:odd/33:bias:8192]"

CUT = "(({}).to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)"  # to bf16, not rounded

LINES: dict[str, list[tuple[Any, ...]]] = {
    "router_linear_kernel": [
        ("bias omitted", "router_linear_kernel", "total += tl.load(bias_ptr", "total += 0.0 * tl.load(bias_ptr", (SMALL,)),
        ("bias in every split", "router_linear_kernel", "(expert < experts) & (split == 0)", "expert < experts", (SHARED,)),
        ("a bias of 1 in the other splits", "router_linear_kernel", "mask=bias_mask, other=0.0", "mask=bias_mask, other=1.0", (SHARED,)),
        ("partial sums of all splits overlap", "router_linear_kernel", "(split.to(tl.int64) * rows + row)", "(split.to(tl.int64) * 0 + row)", (SHARED,)),
        ("last tile skipped", "router_linear_kernel", "range(first, last, TILE)", "range(first, last - TILE, TILE)", (SMALL,)),
        ("only the last tile", "router_linear_kernel", "total -= dot_fp32(", "total = 0.0 - dot_fp32(", (LONG,)),
        ("only the first program's experts", "router_linear_kernel", "tl.program_id(1) * EXPERTS", "tl.program_id(1) * 0", (MANY,)),
        ("columns of the next row read", "router_linear_kernel", "if COLS_MASKED:", "if not COLS_MASKED:", (SMALL,)),
        ("weight at x's stride", "router_linear_kernel", "expert.to(tl.int64) * cols", "expert.to(tl.int64) * x_stride", (PADDED,)),
        ("32-bit offsets", "router_linear_kernel", "tl.multiple_of(row * x_stride, ALIGN)", "tl.multiple_of((row * x_stride).to(tl.int32), ALIGN)", (FAR,)),
        ("third part of the weight omitted", f"{SPLIT}:dot_fp32", "tl.dot(a, b2, tl.dot(a, b_rest.to(tl.bfloat16)))", "tl.dot(a, b2)", (ERROR,)),
    ],
    "router_linear_dx_kernel": [
        ("only the first program's rows", "router_linear_dx_kernel", "(tl.program_id(0) // tiles).to(tl.int64) * ROWS", "(tl.program_id(0) // tiles).to(tl.int64) * 0", (MANY,)),
        ("only the first columns", "router_linear_dx_kernel", "(tl.program_id(0) % tiles) * COLS, COLS)", "(tl.program_id(0) % tiles) * 0, COLS)", (SHARED,)),
        ("tiles of rows for tiles of columns", "router_linear_dx_kernel", "tiles = tl.cdiv(cols, COLS)", "tiles = tl.cdiv(rows, ROWS)", (SHARED,)),
        ("only the last experts", "router_linear_dx_kernel", "total -= dot_fp32(", "total = 0.0 - dot_fp32(", (MANY,)),
        ("last expert skipped", "router_linear_dx_kernel", "(row < rows)[:, None] & (expert < experts)", "(row < rows)[:, None] & (expert < experts - 1)", (SMALL,)),
        ("the last column zero", "router_linear_dx_kernel", "weight_mask & (col < cols)", "weight_mask & (col < cols - 1)", (SMALL,)),
        ("past the last column", "router_linear_dx_kernel", "mask = mask & (col < cols)[None, :]", "mask = mask & (col <= cols)[None, :]", (GUARD,)),
        ("negated", "router_linear_dx_kernel", "total = 0.0 - total", "total = 0.0 + total", (SMALL,)),
        ("weight at dy's stride", "router_linear_dx_kernel", "expert.to(tl.int64) * cols", "expert.to(tl.int64) * dy_stride", (SMALL,)),
        ("dy without its stride", "router_linear_dx_kernel", "row * dy_stride", "row * experts", (PADDED,)),
        ("third part of dy omitted", f"{SPLIT}:dot_fp32", "total = tl.dot(a_rest.to(tl.bfloat16), b1, total)", "total = total", (ERROR,)),
    ],
    "router_linear_dweight_kernel": [
        ("splits without an end", "router_linear_dweight_kernel", "tl.minimum(first + split_rows, rows)", "tl.minimum(rows + split * 0, rows)", (ERROR,)),
        ("partial sums of all splits overlap", "router_linear_dweight_kernel", "(split * experts + expert)", "(split * 0 + expert)", (ERROR,)),
        ("the last split not launched", "ops/moe/router_linear/launch.py:_launch_dweight", "(tiles, splits, 1)", "(tiles, max(splits - 1, 1), 1)", (ERROR,)),
        ("only the last rows", "router_linear_dweight_kernel", "total -= dot_fp32(", "total = 0.0 - dot_fp32(", (MANY,)),
        ("dbias of the last rows only", "router_linear_dweight_kernel", "total_bias += tl.sum", "total_bias = tl.sum", (MANY,)),
        ("last row of dy skipped", "router_linear_dweight_kernel", "dy_mask = (row < last)", "dy_mask = (row < last - 1)", (SMALL,)),
        ("only the first experts", "router_linear_dweight_kernel", "(tl.program_id(0) % tiles) * EXPERTS", "(tl.program_id(0) % tiles) * 0", (MANY,)),
        ("dbias by the second columns", "router_linear_dweight_kernel", "tl.program_id(0) // tiles == 0", "tl.program_id(0) // tiles == 1", (SMALL,)),
        ("x at dy's stride", "router_linear_dweight_kernel", "row * x_stride", "row * dy_stride", (SMALL,)),
        ("dy without its stride", "router_linear_dweight_kernel", "row * dy_stride", "row * experts", (PADDED,)),
        ("truncated instead of rounded", "router_linear_dweight_kernel", "tl.trans(total).to(", CUT.format("tl.trans(total)") + ".to(", (BF16_WEIGHT,)),
    ],
}  # fmt: skip
