"""Mutants of the kernels on heads, in the format of `tests.ops.norm.mutants`."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE = "ops/heads/kernels.py"
R = "ops/heads/test.py::"

PLAIN, GROUPS, LAYER_AFTER, PAIRED, RMS_AFTER, NO_ROPE, GATE = (
    f"{R}test_options[{case}]"
    for case in (
        "plain",
        "groups-rms-sbhd-bshd-12",
        "layer-True-16-False-bhsd",
        "layer-interleaved-8-thd",
        "rms-True-interleaved-False-12-10000.0",
        "True-groups-10-rms-0-1.0",
        "True-40-500.0-sbhd",
    )
)
GPU = f"{R}test_configuration_of[sm_90-groups-rms-sbhd-bshd-12]"
FAR = f"{R}test_angles_are_those_of_fp64[1048512-10000.0]"
OUTSIDE, SAMPLES = f"{R}test_a_position_without_a_row_is_nan", f"{R}test_tables_of_every_sample"
AXES = f"{R}test_three_axes[cpu-base]"
SPECIAL = f"{R}test_a_special_value_stays_in_its_pair[neox-inf]"
ODD = f"{R}test_sizes[cpu-{{'dim': 7, 'rope_dim': 6}}]"
CACHE, CACHE_STRIDED = (
    f"{R}test_cache[rms-10000.0-bhsd-same-paged]",
    f"{R}test_cache[rms-10000.0-bhsd-same-strided]",
)
FP8, FP8_STRIDED = (
    f"{R}test_cache[rms-10000.0-bhsd-fp8-paged]",
    f"{R}test_cache[rms-10000.0-bhsd-fp8-strided]",
)
CACHE_GPU = f"{R}test_cache_of_an_h100[same]"

ONE_SCALE = f"{R}test_cache_with_one_scale[cpu-0.02]"
YARN = f"{R}test_scaled_rotations[yarn]"
BIAS, BIAS_GROUPS, BIAS_GATE = (
    f"ops/heads/test_bias.py::test_options[{case}]"
    for case in ("plain", "groups-rms-sbhd-bshd-12", "True-groups-10-rms-0-1.0")
)
S = "ops/heads/test_styles.py::"
CROSSED = f"{S}test_one_tensor"
CROSSED_BACK = f"{CROSSED}[{{'rope_dim': 10, 'rope_first': False, 'inverse': True}}]"
CROSSED_AFTER = f"{S}test_norm_weights_follow_the_order_of_their_input[cpu-{{'qk_norm': 'rms', 'norm_after': True, 'base': 10000.0}}]"
BIAS_FP8 = "ops/heads/test_bias.py::test_cache[fp8-cpu]"

CODES = "ops/heads/test_quantized.py::test_codes_are_those_of_quantize[rms]"

LINES: dict[str, list[tuple[Any, ...]]] = {
    "qkv_kernel": [
        ("the first element of an interleaved pair twice", "_columns", "tl.where(lane < half, 2 * lane + 1, lane + half + a_rest)", "tl.where(lane < half, 2 * lane, lane + half + a_rest)", (f"{CROSSED}[{{'rope_dim': 8}}]",)),
        ("interleaved pairs before a rest that comes first", "_columns", "tl.where(lane < half, rest + 2 * lane, lane - half)", "tl.where(lane < half, 2 * lane, lane - half)", (CROSSED_BACK,)),
        ("a rest read in pairs and written in halves", "_load_pairs", " and not (PLAN.partial and PLAN.interleaved != PLAN.out_interleaved)", "", (f"{CROSSED}[{{'rope_dim': 8}}]",)),
        ("a rest read in halves and written in pairs", "_store_pairs", " and not (PLAN.partial and PLAN.interleaved != PLAN.out_interleaved)", "", (CROSSED_BACK,)),
        ("written where it was read", "_prepare_heads", "PLAN.out_interleaved)", "PLAN.interleaved)", (f"{S}test_deepseek_of_hugging_face",)),
        ("cached where it was read", "_cache_pairs", "PLAN.out_interleaved)", "PLAN.interleaved)", (f"{S}test_cache",)),
        ("a norm after the rotation in the order before it", "_load_vector", "PLAN.out_interleaved if PLAN.after else PLAN.interleaved", "PLAN.interleaved", (CROSSED_AFTER,)),
        ("an inverse that writes as the rotation does", "ops/heads/launch.py:_code", "reversed(styles) if inverse else styles", "styles", (f"{S}test_deepseek_of_hugging_face",)),
        ("codes of the first sequence", "qkv_kernel", "page, place, cached = batch, token, exists", "page, place, cached = batch * 0, token, exists", (CODES,)),
        ("codes of all tokens in one place", "qkv_kernel", "page, place, cached = batch, token, exists", "page, place, cached = batch, token * 0, exists", (CODES,)),
        ("codes of queries at the strides of keys", "ops/heads/launch.py:_forward", "q_codes=q_codes", "q_codes=cache.k", (CODES,)),
        ("scales at the strides of codes", "ops/common/kv_cache.py:coded_strides", "KeptStrides(*code_strides, *scale_strides)", "KeptStrides(*code_strides, *code_strides)", (CODES,)),
        ("the second elements right after the first", "_columns", "        b = lane + half\n", "        b = lane + 1\n", (PLAIN,)),
        ("the rest of b is the rest of a", "_columns", "tl.where(lane < half, rest + half, a_rest - half)", "tl.where(lane < half, rest + half, -half)", (LAYER_AFTER,)),
        ("one number too many of an odd rest", "_columns", "lane < half + rest // 2\n", "lane < half + a_rest\n", (ODD,)),
        ("all of a head is rotated", "_rotate_pairs", "    if PLAN.partial:", "    if False:", (GROUPS, SPECIAL)),
        ("lanes past a head have a mean", "_normalize", "        if PLAN.masked:  # a lane", "        if False:  # a lane", (PAIRED,)),
        ("eps outside of the root", "_normalize", "tl.sqrt_rn(variance + eps)", "(tl.sqrt_rn(variance) + eps)", (f"{R}test_eps[0.3]",)),
        ("mean over half a head", "_normalize", "dim = (2 * half + rest).to(tl.float32)", "dim = half.to(tl.float32)", (GROUPS,)),
        ("norm before the rotation in any case", "_prepare_heads", "if PLAN.rotate and PLAN.after:", "if PLAN.rotate and PLAN.after and False:", (LAYER_AFTER, RMS_AFTER)),
        ("no bias", "_prepare_heads", "a, b = a + ba, b + bb", "a, b = a + ba, b", (LAYER_AFTER,)),
        ("groups at the stride of heads", "_head_offset", "known_multiple(heads.stride, ALIGN)", "stride", (GROUPS,)),
        ("the last heads left out", "_prepare_heads", "range(0, heads.heads, PLAN.heads)", "range(0, heads.heads - PLAN.heads, PLAN.heads)", (PLAIN,)),
        ("the position of the first axis for all", "_find_angles", "(axis * angles.at.axis)[None, :]", "(axis * 0)[None, :]", (AXES,)),
        ("tables of the first sample", "_find_angles", "batch * known_multiple(angles.at.table_batch, ALIGN)", "0 * known_multiple(angles.at.table_batch, ALIGN)", (SAMPLES,)),
        ("a table without an end", "_find_angles", "& (position < angles.at.rows)", "& (position < angles.at.rows + 1)", (OUTSIDE,)),
        ("zero for a row that is not there", "_find_angles", "sin = tl.where(valid & (in_table == 0), float(\"nan\"), sin)", "sin = tl.where(valid & (in_table == 0), 0.0, sin)", (OUTSIDE,)),
        ("the magnitude of a cosine alone", "_find_angles", "cos * angles.magnitude, sin * angles.magnitude", "cos * angles.magnitude, sin", (YARN,)),
        ("tokens of another batch", "qkv_kernel", "batch = (program % sizes.batches).to(tl.int64)", "batch = (program % sizes.batches * 0).to(tl.int64)", (PLAIN,)),
        ("tokens past the end", "qkv_kernel", "exists = token < sizes.tokens", "exists = token < sizes.tokens + 1", (GPU,)),
        ("the gate is the query", "qkv_kernel", "_shifted(q.at, dim)", "_shifted(q.at, 0)", (GATE,)),
        ("values where keys are", "qkv_kernel", "Source(v.ptr, v.at, bias_ptr)", "Source(k.ptr, k.at, bias_ptr)", (PLAIN,)),
        ("all heads begin where queries do", "_token_offset", "start = known_multiple(place.at.start, ALIGN) +", "start = 0 * known_multiple(place.at.start, ALIGN) +", (PLAIN,)),
        ("inverse rotates forward", "_find_angles", "        sin = -sin\n", "        sin = sin\n", (f"{R}test_rotations_preserve_norms_and_invert",)),
        ("slots without an end", "_find_slots", "& (slot < slots.at.total)", "& (slot < slots.at.total + 1)", (CACHE_GPU,)),
        ("a slot of -1 is the first", "_find_slots", "cached = (slot >= 0) &", "cached = (slot >= -1) &", (CACHE_GPU,)),
        ("slots of the first sequence", "_find_slots", "batch * slots.at.batch + token * slots.at.token", "token * slots.at.token", (CACHE,)),
        ("slots of 32 bits", "_find_slots", "other=-1).to(tl.int64)", "other=-1).to(tl.int32)", (CACHE, f"{R}test_offsets_in_a_cache_have_64_bits")),
        ("all slots in the first page", "_find_slots", "return slot // slots.at.page_size,", "return slot // slots.at.page_size * 0,", (CACHE,)),
        ("places of scales for those of heads", "_cache_offset", "known_multiple(cache.at.place, ALIGN)", "known_multiple(cache.at.scale_place, ALIGN)", (CACHE,)),
        ("pages of scales at the stride of places", "_cache_factor", "at.page * cache.at.scale_page", "at.page * cache.at.scale_place", (FP8_STRIDED,)),
        ("every token is cached", "_cache_pairs", "stored = valid & at.cached[:, None]", "stored = valid", (CACHE,)),
        ("heads past the last are cached", "_cache_pairs", "stored = valid & at.cached[:, None]", "stored = (valid | True) & at.cached[:, None]", (CACHE_GPU,)),
        ("amax of the first elements of pairs", "_cache_pairs", "larger(amax(a, axis=2), amax(b, axis=2))", "larger(amax(a, axis=2), amax(a, axis=2))", (FP8,)),
        ("codes by another factor", "_cache_pairs", "_cache_codes(b, factor, PLAN)", "_cache_codes(b, factor * 0.99, PLAN)", (FP8,)),
        ("codes of rounded keys", "_cache_pairs", "_cache_codes(a, factor, PLAN)", "_cache_codes(a.to(tl.bfloat16).to(tl.float32), factor, PLAN)", (FP8,)),
        ("heads of a cache at another stride", "_cache_offset", "known_multiple(cache.at.head, ALIGN)", "known_multiple(cache.at.place, ALIGN)", (CACHE_STRIDED,)),
        ("every value is cached", "_cache_values", "value, mask=mask & at.cached[:, None, None])", "value, mask=mask)", (CACHE,)),
        ("scales of values where none are kept", "_cache_values", "stored = valid & at.cached[:, None]", "stored = valid", (FP8,)),
        ("the factor for the scale", "_cache_factor", "tl.store(cache.scale + off, scale, mask=stored)", "tl.store(cache.scale + off, factor, mask=stored)", (FP8,)),
        ("one scale for all heads", "_cache_factor", "(head.to(tl.int64) * cache.at.scale_head)[None, :]", "(head.to(tl.int64) * 0)[None, :]", (FP8,)),
        ("a factor past fp32", "_cache_factor", "fp32_scale(head_amax, FP32_MAX, FORMAT)", "fp32_scale(head_amax, 1.0, FORMAT)", (f"{R}test_cached_values[1e-42]",)),
        ("a given scale multiplies", "_cache_codes", "encode(tl.div_rn(x, factor), FORMAT", "encode(x * factor, FORMAT", (ONE_SCALE,)),
        ("a bias of the first halves alone", "_load_heads", "a + bias_a, b + bias_b", "a + bias_a, b", (BIAS,)),
        ("keys with the bias of queries", "_bias_offset", "off = known_multiple(x.at.start, ALIGN) +", "off = 0 * known_multiple(x.at.start, ALIGN) +", (BIAS,)),
        ("one bias for all heads", "_bias_offset", "_head_offset(x, head, heads, ALIGN)", "_head_offset(x, head * 0, heads, ALIGN)", (BIAS_GROUPS,)),
        ("values without a bias", "_copy_heads", "value.to(tl.float32) + bias.to(tl.float32)", "value.to(tl.float32)", (BIAS, BIAS_GATE)),
        ("codes of rounded values", "_copy_heads", "value.to(tl.float32) + bias.to(tl.float32)", "(value.to(tl.float32) + bias.to(tl.float32)).to(y.ptr.dtype.element_ty)", (BIAS_FP8,)),
    ],
    "qkv_backward_kernel": [
        ("gradients read where heads were read", "_backward_heads", "_load_pairs(dy.ptr, off, valid, size, PLAN, PLAN.out_interleaved)", "_load_pairs(dy.ptr, off, valid, size, PLAN, PLAN.interleaved)", (CROSSED_AFTER,)),
        ("gradients written where heads were written", "_backward_heads", "a, b, size, PLAN, PLAN.interleaved)", "a, b, size, PLAN, PLAN.out_interleaved)", (CROSSED_AFTER,)),
        ("sums of a norm after the rotation in the order before it", "_store_sums", "PLAN.out_interleaved if PLAN.after else PLAN.interleaved", "PLAN.interleaved", (CROSSED_AFTER,)),
        ("statistics without the bias", "_backward_heads", "za, zb = _load_heads(x, off, head, heads, valid, size, PLAN, ALIGN)", "za, zb = _load_pairs(x.ptr, off, valid, size, PLAN, PLAN.interleaved)", (BIAS_GROUPS,)),
        ("rotated forward, not back", "_backward_heads", "if PLAN.rotate and not PLAN.after:\n            a, b = _rotate_pairs(a, b, at.cos, -at.sin,", "if PLAN.rotate and not PLAN.after:\n            a, b = _rotate_pairs(a, b, at.cos, at.sin,", (PLAIN,)),
        ("not rotated back after the norm", "_backward_heads", "if PLAN.rotate and PLAN.after:\n            a, b = _rotate_pairs(a, b, at.cos, -at.sin,", "if PLAN.rotate and PLAN.after:\n            a, b = _rotate_pairs(a, b, at.cos, at.sin,", (LAYER_AFTER,)),
        ("statistics before the rotation", "_backward_heads", "za, zb = _rotate_pairs(za, zb, at.cos, at.sin, size.half, PLAN)", "za, zb = za, zb", (LAYER_AFTER,)),
        ("the mean over heads forgotten", "_backward_heads", "a, b = r * (a - za * tz), r * (b - zb * tz)", "a, b = r * a, r * b", (GROUPS,)),
        ("a layer norm's mean forgotten", "_backward_heads", "a, b = a - t, b - t", "a, b = a, b", (LAYER_AFTER,)),
        ("no weight in the gradient", "_backward_heads", "                a, b = a * wa, b * wb", "                a, b = a, b", (GROUPS,)),
        ("the weight in the sums", "_backward_heads", "a_weight += a * za", "a_weight += a * za * 1.01", (GROUPS,)),
        ("sums of the last heads alone", "_backward_heads", "b_weight += b * zb", "b_weight = b * zb", (GROUPS,)),
        ("a bias of the last heads alone", "_backward_heads", "a_bias += a\n", "a_bias = a\n", (LAYER_AFTER,)),
        ("partial sums of all programs in one place", "_store_sums", "program * (2 * size.half + size.rest)", "program * 0", (GROUPS,)),
        ("the last tile left out", "qkv_backward_kernel", "last = tl.minimum(first + program_tiles, tiles)", "last = tl.minimum(first + program_tiles, tiles - 1)", (GROUPS,)),
        ("gates where queries are", "qkv_backward_kernel", "_shifted(q_grad.at, dim)", "_shifted(q_grad.at, 0)", (GATE,)),
        ("keys for values", "qkv_backward_kernel", "k_sums, kv_heads, dv,", "k_sums, kv_heads, dk,", (GATE,)),
        ("the bias of the second half of heads", "_backward_part", "totals[2], totals[3]", "totals[3], totals[3]", (LAYER_AFTER,)),
    ],
}  # fmt: skip
