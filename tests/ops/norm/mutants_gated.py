"""Mutants of the kernels of the gated norm; see `mutants` for the format."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE, LAUNCH = "ops/norm/gated/kernels.py", "ops/norm/gated/launch.py"
G = "ops/norm/test_gated.py::"

SMALL, ODD, ODD_GPU, PIECES, WIDE_GPU, PIECES_GPU = (
    f"{G}test_sizes[{case}]"
    for case in ("cpu-2-12-64-4", "cpu-3-13-200-4", "sm_90-3-13-200-4", "cpu-2-20-10002-2", "sm_90-2-17-2048-4", "sm_90-2-20-10002-2")
)  # fmt: skip
ROWS, HEADS = f"{G}test_every_row_of_every_batch[15]", f"{G}test_layouts_of_heads"
FAR, OPEN, DTYPES = (
    f"{G}test_offsets_have_64_bits",
    f"{G}test_one_group_and_an_open_gate_is_rms_norm",
    f"{G}test_dtypes",
)
ONE_PASS, MX, ROW, STATIC, STRADDLING, COLUMNS, NVFP4 = (
    f"{G}test_quantized[{case}]"
    for case in (
        "1x128-512-4-options0", "mx-192-3-options1", "row-96-1-options2", "tensor-96-4-options5",
        "1x128-200-4-options6", "1x128-96-2-options7", "nvfp4-96-2-options9",
    )
)  # fmt: skip
HALVES, ON_A_GPU = (
    f"{G}test_quantized[e2m1:mx:te-33-1-options4]",
    f"{G}test_quantized_as_launched_on[sm_90-1x128-512-4]",
)
SPECIAL = f"{G}test_a_special_value_stays_in_its_group[nan]"
QWEN3_NEXT = (
    "catalogue/test_workloads.py::test_workload[accuracy-gated_norm:qwen3-next-80b-a3b/heads:qwen3-next:1024]"
)
LLAMA_CODES = f"{G}test_codes_of_llama_casting[True]"
GATES, SILU = f"{G}test_gates_from_zero_to_extreme[sigmoid]", f"{G}test_gates_from_zero_to_extreme[silu]"

LINES: dict[str, list[tuple[Any, ...]]] = {
    "gated_norm_kernel": [
        ("dimensions of rows swapped", "_row_offset", "(rest // second).to(tl.int64) * first_stride + (rest % second)", "(rest % second).to(tl.int64) * first_stride + (rest // second)", (ODD,)),
        ("inner stride ignored", "_row_offset", "(row % third).to(tl.int64) * third_stride", "(row % third).to(tl.int64) * 0", (ODD,)),
        ("x where the gate lies", "gated_norm_kernel", "x_first_stride, x_second_stride, x_third_stride, ALIGN", "gate_first_stride, gate_second_stride, gate_third_stride, ALIGN", (ODD,)),
        ("gate where x lies", "gated_norm_kernel", "row, second, third, gate_first_stride, gate_second_stride", "row, second, third, x_first_stride, x_second_stride", (ODD,)),
        ("one weight for all groups", "gated_norm_kernel", "(row % groups) * cols", "(row % 1) * cols", (ODD,)),
        ("weights of tokens, not of groups", "gated_norm_kernel", "(row % groups) * cols", "(row // groups % groups) * cols", (ODD,)),
        ("z not rounded", "_gated", "y = round_to_dtype(y, x_ptr)", "y = y", (QWEN3_NEXT,)),
        ("product with the weight not rounded", "_gated", "y = round_promoted(y, x_ptr, weight.ptr)", "y = y", (QWEN3_NEXT,)),
        ("product with an fp32 weight rounded", "_gated", "y = round_promoted(y, x_ptr, weight.ptr)", "y = round_to_dtype(y, x_ptr)", (f"{G}test_llama_casting_matches_qwen3_next[weight_dtype1]",)),
        ("no weight offset", "_gated", "+ weight.offset)", ")", (ODD,)),
        ("weight after its offset twice", "_gated", "+ weight.offset)", "+ 2.0 * weight.offset)", (ODD,)),
        ("a gate that is not activated", "_gated", "activate(load_tile(gate.ptr + gate.off[:, None] + col[None, :], mask), 1.0, ACT)", "load_tile(gate.ptr + gate.off[:, None] + col[None, :], mask)", (ODD,)),
        ("sum for mean", "gated_norm_kernel", "tl.div_rn(squares, count)", "squares", (ODD,)),
        ("mean over the tile", "gated_norm_kernel", "+ cols.to(tl.float32)", "+ TILE", (ODD,)),
        ("no eps", "gated_norm_kernel", "tl.div_rn(squares, count) + eps", "tl.div_rn(squares, count) + 0.0 * eps", (OPEN,)),
        ("squares of only the last chunk", "gated_norm_kernel", "squares += tl.sum", "squares = tl.sum", (PIECES,)),
        ("last chunk skipped", "gated_norm_kernel", "squares = tl.zeros((ROWS,), tl.float32)\n            for start in range(0, cols, TILE)", "squares = tl.zeros((ROWS,), tl.float32)\n            for start in range(0, cols - TILE, TILE)", (PIECES,)),
        ("rows of two programs overlap", "gated_norm_kernel", ".to(bound.dtype) * ROWS + tl.arange", ".to(bound.dtype) * (ROWS // 2 + 1) + tl.arange", (ODD_GPU,)),
        ("rows skipped at the end", f"{LAUNCH}:_groups_launch", "programs = -(-rows // config.rows)", "programs = max(1, rows // config.rows)", (ODD_GPU, ROWS)),
        ("32-bit offsets", "_row_offset", "(rest // second).to(tl.int64) * first_stride + (rest % second).to(tl.int64) * second_stride", "((rest // second) * first_stride + (rest % second) * second_stride).to(tl.int64)", (FAR,)),
        ("32-bit offsets of the last dimension", "_row_offset", "(row % third).to(tl.int64) * third_stride", "(row % third) * third_stride", (FAR,)),
        ("groups of another token", f"{LAUNCH}:_levels", "before == size * step", "before >= size * step", (HEADS, FAR)),
        ("scales of groups at one position", "gated_norm_kernel", "((row % groups) * blocks)", "((row % 1) * blocks)", (ONE_PASS,)),
        ("scales of tokens at groups' stride", "gated_norm_kernel", "(row // groups).to(tl.int64)[:, None]", "row.to(tl.int64)[:, None]", (ONE_PASS,)),
        ("a row's scale from the first chunk", "gated_norm_kernel", "largest = amax(y, axis=1)", "largest = amax(y, axis=1) * 0.5", (ROW,)),
        ("blocks of two groups", f"{LAUNCH}:_within_groups", 'format.block != "row" and cols % max(format.group, format.packed) == 0', 'format.block != "row"', (STRADDLING,)),
        ("amax of the first row", "gated_norm_kernel", "program_amax = larger(program_amax, amax(y, axis=1))", "program_amax = larger(program_amax, amax(y, axis=1) * 0.75)", (ONE_PASS,)),
        ("a passed scale read as an amax", f"{LAUNCH}:_GatedNorm.groups_pass", "options.scale is not None", "False", (STATIC,)),
        ("the stride of even codes", "gated_norm_kernel", "(cols + FORMAT.packed - 1) // FORMAT.packed", "cols // FORMAT.packed", (HALVES,)),
    ],
    "gated_norm_stripe_kernel": [
        ("z not rounded", "gated_norm_stripe_kernel", "y = round_to_dtype(y, x_ptr)", "y = y", (LLAMA_CODES,)),
        ("product with the weight not rounded", "gated_norm_stripe_kernel", "y = round_promoted(y, x_ptr, weight_ptr)", "y = y", (LLAMA_CODES,)),
        ("statistics of the first group", "gated_norm_stripe_kernel", "(col // (cols // groups))[None, :]", "(col // cols)[None, :]", (STRADDLING,)),
        ("statistics of the tile's first group", "gated_norm_stripe_kernel", "(row + start // (cols // groups))", "(row + start // cols)", (f"{G}test_rowwise_copy_is_the_same_with_a_columnwise_one", ON_A_GPU)),
        ("every tile in one group", f"{LAUNCH}:_GatedNorm.stripes_pass", "WITHIN=cols % tile == 0", "WITHIN=True", (STRADDLING,)),
        ("tokens counted as groups", "gated_norm_stripe_kernel", "row = token * groups", "row = token * 1", (COLUMNS,)),
        ("no weight", "gated_norm_stripe_kernel", "y = y * (load_vector(weight_ptr, col, cols, COLS_MASKED) + weight_offset)", "y = y + 0.0 * weight_offset", (COLUMNS,)),
        ("a gate that is not activated", "gated_norm_stripe_kernel", "activate(load_tile(gate_ptr + gate_off[:, None] + col[None, :], mask), 1.0, ACT)", "load_tile(gate_ptr + gate_off[:, None] + col[None, :], mask)", (COLUMNS,)),
        ("the other activation", f"{LAUNCH}:_GatedNorm.stripes_pass", "ACT=self.a.act", 'ACT="sigmoid"', (COLUMNS,)),
        ("gate where x lies", "gated_norm_stripe_kernel", "row, second, third, gate_first_stride, gate_second_stride", "row, second, third, x_first_stride, x_second_stride", (COLUMNS,)),
        ("x where the gate lies", "gated_norm_stripe_kernel", "x_off = _row_offset(row, second, third, x_first_stride, x_second_stride", "x_off = _row_offset(row, second, third, gate_first_stride, gate_second_stride", (COLUMNS,)),
        ("every program computes the first tile", "gated_norm_stripe_kernel", "start = (tl.program_id(0) % tiles) * TILE", "start = (tl.program_id(0) % tiles) * 0", (STRADDLING,)),
        ("every program computes the first stripe", "gated_norm_stripe_kernel", "stripe.to(bound.dtype) * ROWS", "stripe.to(bound.dtype) * 0", (COLUMNS,)),
        ("last stripe skipped", f"{LAUNCH}:_GatedNorm.stripes_pass", "tiles = stripes * -(-width // tile)", "tiles = max(1, stripes - 1) * -(-width // tile)", (COLUMNS,)),
        ("amax of half", "gated_norm_stripe_kernel", "amax(amax(y, axis=1), axis=0)", "amax(amax(y, axis=1), axis=0) * 0.5", (COLUMNS,)),
        ("a passed scale read as an amax", f"{LAUNCH}:_GatedNorm.stripes_pass", "STATIC=self.a.result.scale is not None", "STATIC=False", (f"{G}test_quantized[tensor-96-4-options13]",)),
    ],
    "gated_norm_backward_kernel": [
        ("dweight of the exact z", "_gradient_of_y", "z_cast = round_to_dtype(z, a.x.ptr)", "z_cast = z", (QWEN3_NEXT,)),
        ("dgate of a product that is not rounded", "_gradient_of_y", "round_promoted(z_cast * w, a.x.ptr, weight.ptr)", "(z_cast * w)", (QWEN3_NEXT,)),
        ("dx without the gate", "_gradient_of_y", "d = dy * f", "d = dy * 1.0", (ODD,)),
        ("dx without the weight", "_gradient_of_y", "t = t * w", "t = t * 1.0", (ODD,)),
        ("dgate without the weight", "_gradient_of_y", "dgate = dgate * w * z", "dgate = dgate * z", (ODD,)),
        ("no weight offset", "_gradient_of_y", "load_vector(weight.ptr, col, cols, COLS_MASKED) + weight.offset", "load_vector(weight.ptr, col, cols, COLS_MASKED)", (ODD,)),
        ("the activation for its slope", "_gradient_of_y", "dgate = dy * slope", "dgate = dy * f", (ODD,)),
        ("1 - s with cancellation", "tiles/activations.py:_logistic", "return s, alpha * s * _sigmoid(-alpha * a)", "return s, alpha * s * (1.0 - s)", (GATES,)),
        ("a sum added, not subtracted", "gated_norm_backward_kernel", "(t - z * (tz / count)[:, None]) * rstd", "(t + z * (tz / count)[:, None]) * rstd", (ODD,)),
        ("sum for mean", "gated_norm_backward_kernel", "(tz / count)", "tz", (ODD,)),
        ("dx without rstd", "gated_norm_backward_kernel", "(t - z * (tz / count)[:, None]) * rstd", "(t - z * (tz / count)[:, None])", (ODD,)),
        ("dgate of x, not of z", "_gradient_of_y", "col[None, :], mask) * a.rstd", "col[None, :], mask) * (a.rstd * 0.0 + 1.0)", (ODD,)),
        ("dweight with the weight in it", "gated_norm_backward_kernel", "sums += d * z_cast", "sums += t * z_cast", (ODD,)),
        ("dweight of the last rows", "gated_norm_backward_kernel", "sums += d * z_cast", "sums = d * z_cast", (ODD,)),
        ("dweight of long rows from only the last row", "gated_norm_backward_kernel", "begin > first, col, cols", "begin < first, col, cols", (f"{G}test_long_groups[sm_80-2-3-20000-1]", PIECES)),
        ("sums of all programs at one position", "gated_norm_backward_kernel", "program.to(tl.int64) * cols, ALIGN)  # [parts", "(program % groups).to(tl.int64) * cols, ALIGN)  # [parts", (ODD, ODD_GPU)),
        ("wrong group", "gated_norm_backward_kernel", "row = token * groups + group", "row = token * groups + (group + 1) % groups", (ODD,)),
        ("one weight for all groups", "gated_norm_backward_kernel", "group.to(tl.int64) * cols", "group.to(tl.int64) * 0", (ODD,)),
        ("dx in the order of y", "gated_norm_backward_kernel", "dx_off = _row_offset(row, second, third, dx_first_stride, dx_second_stride", "dx_off = _row_offset(row, second, third, dy_first_stride, dy_second_stride", (ODD,)),
        ("dy where the gate lies", "gated_norm_backward_kernel", "dy_off = _row_offset(row, second, third, dy_first_stride, dy_second_stride, dy_third_stride", "dy_off = _row_offset(row, second, third, gate_first_stride, gate_second_stride, gate_third_stride", (FAR, f"{G}test_layouts")),
        ("tokens of the next program", "gated_norm_backward_kernel", "last = tl.minimum(first + program_tokens, tokens)", "last = tl.minimum(first + program_tokens + 1, tokens)", (ODD_GPU, ODD)),
        ("t * z of only the last chunk", "gated_norm_backward_kernel", "tz += tl.sum", "tz = tl.sum", (PIECES,)),
        ("last tile of tokens skipped", f"{LAUNCH}:launch_gated_norm_backward", "parts = -(-tokens // program_tokens)", "parts = max(1, tokens // program_tokens)", (ODD_GPU, ROWS)),
    ],
}  # fmt: skip
