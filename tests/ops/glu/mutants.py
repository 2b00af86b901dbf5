"""Mutants of the kernels of the gated linear units; see `tests.ops.norm.mutants` for the format."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE = "ops/glu/kernels.py"
GLU, GROUPS = "ops/glu/launch.py", "ops/common/spans.py"
ACTIVATIONS, EXPONENTIALS, SCALES = (f"tiles/{name}.py" for name in ("activations", "exponentials", "scales"))
G, A = "ops/glu/test.py::", "ops/glu/test_activations.py::"
DOWN_TO_BF16 = (
    "(({}).to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)"  # truncated, not rounded
)


def workload(check: str, name: str) -> str:
    return f"catalogue/test_workloads.py::test_workload[{check}-{name}]"


SILU, RELU2, GELU, TANH, SIGMOID = (
    f"{A}test_activations_match_pytorch[{act}]" for act in ("silu", "relu2", "gelu", "gelu_tanh", "sigmoid")
)


def digits(act: str) -> str:
    return f"{A}test_activations_keep_their_digits[triton-{act}]"


GELU_TAIL = f"{A}test_gelu_keeps_its_digits_in_the_tail[triton]"
ONE_BY_ONE = f"{G}test_experts_one_by_one[1-dtype0]"
PADDED = f"{G}test_experts_one_by_one[16-dtype1]"
SLOTS = f"{G}test_blocks_never_mix_experts[cpu-16-1x128]"
STRIPES_OF = f"{G}test_blocks_never_mix_experts[cpu-256-1x128]"
SLOTS_GPU = f"{G}test_blocks_never_mix_experts[sm_90-16-1x128]"
MANY = f"{G}test_many_experts_in_slots"
GPT = f"{G}test_matches_gpt_oss"
LIMITS = f"{G}test_limits_include_their_ends[concat]"
PROB = f"{G}test_probabilities"
B = "ops/glu/test_bias.py::"
BIAS, BIAS_IN_TURN, BIAS_OF, BIAS_PADDED, BIAS_WIDE = (
    f"{B}test_bias[cpu-{options}]" for options in ("concat", "interleaved", "1", "16", "256")
)
BIAS_GPU = f"{B}test_bias[sm_90-concat]"
GLU_SIZES = f"{G}test_sizes[3-1025]"

_GLU: list[tuple[Any, ...]] = [
    ("up and gate swapped", "_value", "y = activate(gate, unit.alpha, unit.ACT)", "gate, up = up, gate; y = activate(gate, unit.alpha, unit.ACT)", (GPT,)),
    ("no limit of the gate", "_value", "gate = at_most(gate, unit.limit)", "gate = gate", (GPT, LIMITS)),
    ("up limited on one side", "_value", "at_least(at_most(up, unit.limit), -unit.limit)", "at_most(up, unit.limit)", (GPT, LIMITS)),
    ("limit swallows NaN", f"{SCALES}:at_most", "tl.where(x > limit, limit, x)", "tl.minimum(x, limit)", (LIMITS,)),
    ("no alpha", f"{ACTIVATIONS}:_silu", "_sigmoid(alpha * a)", "_sigmoid(a)", (GPT,)),
    ("no up_offset", "_value", "y * (up + unit.up_offset)", "y * up", (GPT,)),
    ("not weighted", "_value", "y = y * inputs.prob[:, None]", "y = y", (PROB,)),
    ("every row weighted like the first", "_load_prob", "prob_ptr + row * prob_stride", "prob_ptr + row * 0 * prob_stride", (PROB,)),
    ("y truncated, not rounded", "_store", "y.to(to.plain.dtype.element_ty)", DOWN_TO_BF16.format("y") + ".to(to.plain.dtype.element_ty)", (f"{G}test_swiglu_in_bf16_is_rounded_once",)),
    ("pairs split at the wrong place", "_load_parts", "pair = 2 * start + ", "pair = start + ", (workload("accuracy", "glu:gpt-oss-20b/experts:gpt-oss:32768"),)),
    ("tiles after the first skipped", "glu_kernel", "tl.cdiv(tl.cdiv(cols, TILE) - part, row_programs)", "1", (GLU_SIZES,)),
    ("row amax of only the last tile", "glu_kernel", "largest = larger(largest, amax(y, axis=1))", "largest = amax(y, axis=1)", (workload("quantized_bytes", "glu:llama3-8b/ffn:row-fp8:1"),)),
    ("tensor amax of only the last tile", "glu_kernel", "program_amax = larger(program_amax, amax(y, axis=1))", "program_amax = amax(y, axis=1)", (workload("quantized_bytes", "glu:llama3-8b/ffn:nvfp4:1"),)),
    ("up before the gate's end", "glu_kernel", "up_off + up_shift", "up_off", (f"{G}test_layouts_give_equal_results",)),
    ("32-bit row offsets", "glu_kernel", "(tl.program_id(0) // row_programs).to(tl.int64)", "(tl.program_id(0) // row_programs).to(tl.int32)", (f"{G}test_offsets_have_64_bits[False]",)),
    ("padding is read", "_rows_of_block", "read = written & real_rows(row, groups)", "read = written", (ONE_BY_ONE,)),
    ("padding begins with the next expert", f"{GROUPS}:real_rows", "start = _begin_after(before, groups.align)", "start = before", (PADDED,)),
    ("rows after the last expert are real", f"{GROUPS}:real_rows", " & (row < last)", "", (ONE_BY_ONE,)),
    ("one chunk of experts", f"{GROUPS}:real_rows", "range(0, groups.number, CHUNK)", "range(0, 1, CHUNK)", (f"{G}test_experts_of_any_number_and_size",)),
    ("slots of the wrong expert", f"{GROUPS}:group_tile", "tl.maximum(passed - 1, 0)", "passed", (SLOTS,)),
    ("experts share a slot", f"{GROUPS}:group_tile", "(start // ROWS + group <= number)", "(start // ROWS <= number)", (SLOTS,)),
    ("one chunk of slots", f"{GROUPS}:group_tile", "range(0, groups.number + 1, CHUNK)", "range(0, 1, CHUNK)", (MANY,)),
    ("stripes of padding are real", f"{GROUPS}:group_stripe", "tl.where(begun, tl.minimum(after - first_row, exist), 0)", "tl.minimum(after - first_row, exist)", (STRIPES_OF,)),
    ("experts begin in padding", f"{GROUPS}:group_stripe", "_begin_after(before, groups.align) <= first_row", "before <= first_row", (STRIPES_OF,)),
    ("scales of all slots at one position", "_from_slot", "copy_t.scale + slot * ", "copy_t.scale + 0 * slot * ", (SLOTS,)),
    ("codes of all slots at one position", "_from_slot", "copy_t.data + first // FORMAT.packed", "copy_t.data + 0 * first // FORMAT.packed", (SLOTS,)),
    ("padding of a slot is another expert's", "glu_kernel", "bound = exist", "bound = rows.to(tl.int64)", (SLOTS,)),
    ("no bias of up", "_load_biased", "gate + gate_bias, up + up_bias", "gate + gate_bias, up", (BIAS,)),
    ("up has the gate's bias", "_bias_of", "tl.multiple_of(off + up_shift, ALIGN), None, has_bias)", "off, None, has_bias)", (BIAS,)),
    ("all experts have the bias of the first", "_bias_of", "off = tl.multiple_of(group * width, ALIGN)", "off = tl.multiple_of(group * 0, ALIGN)", (BIAS_OF,)),
    ("interleaved biases at the width of one", "_bias_of", "2 * cols if INTERLEAVED else cols + up_shift", "cols + up_shift", (BIAS_PADDED,)),
    ("biases change a row late", f"{GROUPS}:group_of", "(end[None, :] <= row[:, None])", "(end[None, :] < row[:, None])", (BIAS_OF,)),
    ("biases of one chunk of experts", f"{GROUPS}:group_of", "range(0, groups.number, CHUNK)", "range(0, 1, CHUNK)", (f"{B}test_experts_of_any_number_and_size[{[*range(1, 301)]}]",)),
    ("passed scale read as an amax", "glu_kernel", "tensor_factor(Encoding(scale_source, FP32_MAX, FORMAT, CAST, STATIC))", "tensor_factor(Encoding(scale_source, FP32_MAX, FORMAT, CAST, False))", (f"{G}test_amax_is_the_largest_y[tensor]", workload("quantized_bytes", "glu:llama3-8b/ffn:static-fp8:1"))),
    ("last rows skipped", f"{GLU}:_cut", "blocks = -(-layout.rows // height)", "blocks = -(-(layout.rows - 1) // height)", (GLU_SIZES,)),
]  # fmt: skip

_GLU_BACKWARD: list[tuple[Any, ...]] = [
    ("upstream gradient of ones", "_gradients_of", "w = dy\n", "w = dy * 0.0 + 1.0\n", (SILU,)),
    ("slope of the unlimited gate", "_gradients_of", "activate_with_slope(a, unit.alpha, unit.ACT)", "activate_with_slope(gate, unit.alpha, unit.ACT)", (GPT,)),
    ("gradient of a limited gate", "_gradients_of", "dgate = tl.where(gate > unit.limit, 0.0, dgate)", "dgate = dgate", (LIMITS,)),
    ("no gradient at the limit", "_gradients_of", "tl.where(gate > unit.limit, 0.0, dgate)", "tl.where(gate >= unit.limit, 0.0, dgate)", (LIMITS,)),
    ("no gradient of up at the limit", "_gradients_of", "tl.where(tl.abs(up) > unit.limit, 0.0, dup)", "tl.where(tl.abs(up) >= unit.limit, 0.0, dup)", (LIMITS,)),
    ("gradient of a limited up", "_gradients_of", "tl.where(tl.abs(up) > unit.limit, 0.0, dup)", "tl.where(up > unit.limit, 0.0, dup)", (LIMITS,)),
    ("gradient not weighted", "_gradients_of", "w = dy * prob[:, None]", "w = dy", (PROB,)),
    ("dprob weighted", "_gradients_of", "dy * (f * g)", "w * (f * g)", (PROB,)),
    ("dprob of one tile", "glu_backward_kernel", "dprob += tl.sum(terms, axis=1)", "dprob = tl.sum(terms, axis=1)", (GLU_SIZES,)),
    ("no up_offset", "_gradients_of", "g = g + unit.up_offset", "g = g", (GPT,)),
    ("silu's slope is a sigmoid", f"{ACTIVATIONS}:_silu", "s * (1.0 + alpha * a * (1.0 - s))", "s", (SILU,)),
    ("silu's slope without alpha", f"{ACTIVATIONS}:_silu", "s * (1.0 + alpha * a * (1.0 - s))", "s * (1.0 + a * (1.0 - s))", (GPT,)),
    ("sigmoid's slope without alpha", f"{ACTIVATIONS}:_logistic", "return s, alpha * s * _sigmoid(-alpha * a)", "return s, s * _sigmoid(-alpha * a)", (f"{A}test_alpha[sigmoid]",)),
    ("gelu's slope is its cdf", f"{ACTIVATIONS}:_gelu", "cdf + (0.3989422804014327 * a) * power", "cdf", (GELU,)),
    ("gelu's exponent rounded", f"{ACTIVATIONS}:_exp_of_half_square", "tl.fma(power, -0.6931471805599453 * exponent_low, power)", "power", (GELU_TAIL,)),
    ("gelu's square rounded", f"{ACTIVATIONS}:_exp_of_half_square", "exponent_low += square_low * 0.7213475108146667", "", (GELU_TAIL,)),
    ("gelu by erf", f"{ACTIVATIONS}:_normal_cdf", "tl.where(a < 0.0, power * m, 1.0 - power * m)", "0.5 * (1.0 + tl.erf(a * 0.7071067811865476))", (GELU_TAIL,)),
    ("tanh gelu's slope without its bend", f"{ACTIVATIONS}:_gelu_tanh", "s + tl.where(steep == 0.0, 0.0, bend)", "s", (TANH,)),
    ("tanh gelu overflows", f"{ACTIVATIONS}:_gelu_tanh", "tl.where(steep == 0.0, 0.0, bend)", "bend", (f"{A}test_large_and_small_values[gelu_tanh]",)),
    ("quick gelu as steep as silu", f"{ACTIVATIONS}:_quick_gelu", "z = 1.702 * a", "z = a", (digits("quick_gelu"),)),
    ("quick gelu's slope without its steepness", f"{ACTIVATIONS}:_quick_gelu", "1.702 * s * sigmoid(-z)", "s * sigmoid(-z)", (digits("quick_gelu"),)),
    ("a gate's slope is infinity times 0", f"{ACTIVATIONS}:_times_gate", "tl.where(steep == 0.0, 0.0, a * steep)", "a * steep", (f"{A}test_infinities_and_nan[triton-mish]",)),
    ("elu's power cancels", f"{EXPONENTIALS}:expm1", "(x > -0.5)", "(x > 0.0)", (digits("elu"),)),
    ("elu's polynomial two terms short", f"{EXPONENTIALS}:expm1", "tl.fma(x, 0.00018614284635987133, 0.0013932217843830585)", "0.0", (digits("elu"),)),
    ("elu without alpha", f"{ACTIVATIONS}:_elu", "alpha * expm1(a)", "expm1(a)", (f"{A}test_alpha[elu]",)),
    ("elu's slope without alpha", f"{ACTIVATIONS}:_elu", "alpha * tl.exp(a)", "tl.exp(a)", (f"{A}test_alpha[elu]",)),
    ("tanh without its sign", f"{ACTIVATIONS}:_tanh", "tl.where(a < 0.0, less, -less)", "-less", (digits("tanh"),)),
    ("tanh's power cancels", f"{ACTIVATIONS}:_tanh", "e, less = tl.exp(z), expm1(z)", "e, less = tl.exp(z), tl.exp(z) - 1.0", (digits("tanh"),)),
    ("tanh's zeros have one sign", f"{ACTIVATIONS}:_tanh", "tl.where(a == 0.0, a, f)", "f", (f"{A}test_infinities_and_nan[triton-tanh]",)),
    ("softplus falls", f"{ACTIVATIONS}:_softplus", "sigmoid(a)", "sigmoid(-a)", (digits("softplus"),)),
    ("softplus's logarithm rounded", f"{EXPONENTIALS}:log1p", "tl.log(u) * ratio", "tl.log(u)", (digits("softplus"),)),
    ("log sigmoid is a softplus", f"{ACTIVATIONS}:_log_sigmoid", "-softplus(-a)", "softplus(-a)", (digits("log_sigmoid"),)),
    ("log sigmoid's slope is a sigmoid", f"{ACTIVATIONS}:_log_sigmoid", "sigmoid(-a)", "sigmoid(a)", (digits("log_sigmoid"),)),
    ("mish's gate of large numbers", f"{ACTIVATIONS}:_mish", "2.0 * e * e, 2.0", "2.0 * e, 2.0", (digits("mish"),)),
    ("mish's slope on one side", f"{ACTIVATIONS}:_mish", "tl.where(a > 0.0, e * e, e)", "e", (digits("mish"),)),
    ("relu2's slope halved", f"{ACTIVATIONS}:_relu2", "2.0 * _positive(a)", "_positive(a)", (RELU2,)),
    ("dup in dgate's position", "glu_backward_kernel", "shift = (up_shift // ALIGN) * ALIGN", "shift = up_shift * 0", (f"{G}test_layouts_give_equal_results",)),
    ("interleaved dup and dgate swapped", "glu_backward_kernel", "tl.interleave(dgate, dup)", "tl.interleave(dup, dgate)", (GPT,)),
    ("gradient's rows at dy's stride", "_store", "dest.row * to.stride", "dest.row * (cols if ROWS_MASKED else to.stride - 1)", (GLU_SIZES,)),
    ("dy read without a mask", "glu_backward_kernel", "load_stored(dy.ptr + dy_off[:, None] + col[None, :], mask)", "load_stored(dy.ptr + dy_off[:, None] + col[None, :], None)", (workload("guard_bands", "glu:odd/33:swiglu:8192"), PADDED)),
    ("32-bit row offsets", "glu_backward_kernel", "(tl.program_id(0) // row_programs).to(tl.int64)", "(tl.program_id(0) // row_programs).to(tl.int32)", (f"{G}test_offsets_have_64_bits[False]",)),
    ("partial sums of dprob at one position", "glu_backward_kernel", "part.to(tl.int64) * rows + row", "part.to(tl.int64) * 0 * rows + row", (f"{G}test_configuration_of[sm_90-256-options3]",)),
    ("dbias of only the last rows", "glu_backward_kernel", "gate_sum += tl.sum(dgate, axis=0)", "gate_sum = tl.sum(dgate, axis=0)", (BIAS,)),
    ("dbias of up of only the last rows", "glu_backward_kernel", "up_sum += tl.sum(dup, axis=0)", "up_sum = tl.sum(dup, axis=0)", (BIAS,)),
    ("sums of all stripes at one position", "glu_backward_kernel", "tl.multiple_of(block * stride, ALIGN)", "tl.multiple_of(block * 0, ALIGN)", (BIAS,)),
    ("up's sums in the gate's position", "glu_backward_kernel", "_store_sums(sums_ptr + shift, up_sum, part * TILE, cols)", "_store_sums(sums_ptr, up_sum, part * TILE, cols)", (BIAS,)),
    ("up's sums in the gate's position, of stripes", "glu_backward_kernel", "_store_sums(sums_ptr + shift, up_sum, start, cols)", "_store_sums(sums_ptr, up_sum, start, cols)", (f"{B}test_quantized[cpu-16-1x128]",)),
    ("sums of the first tile's columns", "glu_backward_kernel", "_store_sums(sums_ptr, gate_sum, part * WIDTH,", "_store_sums(sums_ptr, gate_sum, part * 0,", (f"{B}test_sizes",)),
    ("a stripe as short as a chunk", "glu_backward_kernel", "STRIPE_ROWS if CHUNKS else ROWS, PLACES", "ROWS, PLACES", (BIAS,)),
    ("rows of the next stripe", "glu_backward_kernel", "exist = tl.minimum(exist, STRIPE_ROWS)", "exist = tl.minimum(exist, STRIPE_ROWS + ROWS)", (BIAS,)),
    ("chunks reach into the next expert", "glu_backward_kernel", "rows_end = first + exist", "rows_end = rows", (f"{B}test_quantized_a_few_rows_at_a_time",)),
    ("bias of rows past the end", "_gradients_of", "if GROUPED or (BIASED and mask is not None):", "if GROUPED:", (f"{B}test_rows_past_the_end_do_not_enter_sums",)),
    ("the bias of padding in dprob", "_gradients_of", "terms = tl.where(mask, terms, 0.0)", "terms = terms", (f"{B}test_experts_one_by_one[cpu-16]",)),
    ("gradient without the bias", "glu_backward_kernel", "_load_biased(\n                inputs, bias,", "_load_biased(\n                inputs, None,", (BIAS,)),
    ("codes of all slots at one position", "glu_backward_kernel", "copy_t = _from_slot(copy_t, first, ", "copy_t = _from_slot(copy_t, 0 * first, ", (SLOTS,)),
    ("dup's scales of all slots at one position", "glu_backward_kernel", "_from_slot(up_copy_t, first, block, ", "_from_slot(up_copy_t, first, 0 * block, ", (SLOTS,)),
    ("row-wise copy where blocks meet", "ops/glu/arguments.py:in_one_pass", "return not crossing,", "return True,", (f"{G}test_quantized_gradients[1x128]",)),
]  # fmt: skip

SUMS = "ops/common/sums.py"
QKV = "ops/heads/test_bias.py::test_configuration_of[sm_90]"

_SUM_RUNS: list[tuple[Any, ...]] = [
    ("first row of a run skipped", f"{SUMS}:_sum_runs_kernel", "range(begin, end, ROWS)", "range(begin + 1, end, ROWS)", (BIAS_OF,)),
    ("last row of a run skipped", f"{SUMS}:_sum_runs_kernel", "range(begin, end, ROWS)", "range(begin, end - 1, ROWS)", (BIAS_OF,)),
    ("only the last rows of a run", f"{SUMS}:_sum_runs_kernel", "total += tl.sum", "total = tl.sum", (QKV,)),
    ("the first row of the next run", f"{SUMS}:_sum_runs_kernel", "(row < end)[:, None]", "(row <= end)[:, None]", (f"{B}test_bias[sm_90-1]",)),
    ("every program sums the first run", f"{SUMS}:_sum_runs_kernel", "begin = run * run_rows", "begin = run * 0", (QKV,)),
    ("the last run as long as the others", f"{SUMS}:_sum_runs_kernel", "tl.minimum(begin + run_rows, rows)", "begin + run_rows", (QKV,)),
    ("all runs stored at one position", f"{SUMS}:_sum_runs_kernel", "tl.multiple_of(run * cols, ALIGN)", "tl.multiple_of(run * 0, ALIGN)", (BIAS_OF,)),
    ("every program reads the first tile", f"{SUMS}:_sum_runs_kernel", "(tl.program_id(0) % tiles) * TILE", "(tl.program_id(0) % tiles) * 0", (QKV,)),
    ("last columns skipped", f"{SUMS}:_sum_runs", "(-(-cols // width) * runs, 1, 1)", "(max(cols // width, 1) * runs, 1, 1)", (QKV, f"{B}test_bias[sm_90-16]")),
    ("last column skipped", f"{SUMS}:_sum_runs_kernel", "exists = col < cols", "exists = col < cols - 1", (BIAS_OF,)),
    ("sums truncated to bf16", f"{SUMS}:_sum_runs_kernel", "values.to(tl.float32)", DOWN_TO_BF16.format("values"), (f"{B}test_experts_one_by_one[cpu-16]",)),
    ("stripes counted without groups", f"{GROUPS}:stripes_of_group", "first += group", "first += 0", (BIAS_OF,)),
    ("experts begin in padding", f"{GROUPS}:group_rows", "return _begin_after(before, groups.align), end", "return before, end", (BIAS_WIDE,)),
    ("only whole stripes counted", f"{GROUPS}:stripes_of_group", "(tl.maximum(end - start, 0) + stripe_rows - 1)", "tl.maximum(end - start, 0)", (BIAS_OF,)),
]  # fmt: skip

LINES: dict[str, list[tuple[Any, ...]]] = {
    "glu_kernel": _GLU,
    "glu_backward_kernel": _GLU_BACKWARD,
    "_sum_runs_kernel": _SUM_RUNS,
}
