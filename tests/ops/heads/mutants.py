"""The ways in which the kernels of the rotations are broken; the lines are those of `mutants`."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE = "ops/rope.py"
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
SPECIAL = f"{R}test_a_special_value_stays_where_it_is[neox-inf]"
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

LINES: dict[str, list[tuple[Any, ...]]] = {
    "_qkv_kernel": [
        ("the second numbers beside the first", "_columns", "        b = lane + half\n", "        b = lane + 1\n", (PLAIN,)),
        ("the rest of b is the rest of a", "_columns", "tl.where(lane < half, rest + half, a_rest - half)", "tl.where(lane < half, rest + half, -half)", (LAYER_AFTER,)),
        ("one number too many of an odd rest", "_columns", "lane < half + rest // 2\n", "lane < half + a_rest\n", (ODD,)),
        ("all of a head is rotated", "_turn", "    if PARTIAL:", "    if False:", (GROUPS, SPECIAL)),
        ("lanes past a head have a mean", "_normalize", "        if MASKED:  # a lane", "        if False:  # a lane", (PAIRED,)),
        ("eps outside of the root", "_normalize", "tl.sqrt_rn(variance + eps)", "(tl.sqrt_rn(variance) + eps)", (f"{R}test_eps[0.3]",)),
        ("mean over half a head", "_normalize", "dim = (2 * half + rest).to(tl.float32)", "dim = half.to(tl.float32)", (GROUPS,)),
        ("norm before the rotation in any case", "_prepare_heads", "if ROTATE and AFTER:", "if ROTATE and AFTER and False:", (LAYER_AFTER, RMS_AFTER)),
        ("no bias", "_prepare_heads", "a, b = a + ba, b + bb", "a, b = a + ba, b", (LAYER_AFTER,)),
        ("groups at the stride of heads", "_head_offset", "(head // group).to(tl.int64) * group_stride", "(head // group).to(tl.int64) * head_stride", (GROUPS,)),
        ("the last heads left out", "_prepare_heads", "range(0, heads, HEADS)", "range(0, heads - HEADS, HEADS)", (PLAIN,)),
        ("the position of the first axis for all", "_find_angles", "(axis * position_axis_stride)[None, :]", "(axis * 0)[None, :]", (AXES,)),
        ("tables of the first sample", "_find_angles", "batch * table_batch_stride + position * table_stride", "position * table_stride", (SAMPLES,)),
        ("a table without an end", "_find_angles", "& (position < table_rows)", "& (position < table_rows + 1)", (OUTSIDE,)),
        ("zero for a row that is not there", "_find_angles", "sin = tl.where(there & (inside == 0), float(\"nan\"), sin)", "sin = tl.where(there & (inside == 0), 0.0, sin)", (OUTSIDE,)),
        ("tokens of another batch", "_qkv_kernel", "batch = (program % batches).to(tl.int64)", "batch = (program % batches * 0).to(tl.int64)", (PLAIN,)),
        ("tokens past the end", "_qkv_kernel", "exists = token < tokens", "exists = token < tokens + 1", (GPU,)),
        ("the gate is the query", "_qkv_kernel", "gate_ptr, gate_out_ptr, q_off + (2 * half + rest),", "gate_ptr, gate_out_ptr, q_off + 0,", (GATE,)),
        ("values where keys are", "_qkv_kernel", "v_off = _multiple(v_start, ALIGN)", "v_off = _multiple(k_start, ALIGN)", (PLAIN,)),
        ("angles are never turned back", "_find_angles", "        sin = -sin\n", "        sin = sin\n", (f"{R}test_rotations_keep_lengths_and_can_be_undone",)),
        ("slots without an end", "_qkv_kernel", "& (slot < slots)", "& (slot < slots + 1)", (CACHE_GPU,)),
        ("a slot of -1 is the first", "_qkv_kernel", "cached = (slot >= 0) &", "cached = (slot >= -1) &", (CACHE_GPU,)),
        ("slots of the first sequence", "_qkv_kernel", "batch * slot_batch_stride + token * slot_stride", "token * slot_stride", (CACHE,)),
        ("slots of 32 bits", "_qkv_kernel", "slot = tl.load(slots_ptr + slot_off, mask=exists, other=-1).to(tl.int64)", "slot = tl.load(slots_ptr + slot_off, mask=exists, other=-1).to(tl.int32)", (CACHE, f"{R}test_offsets_in_a_cache_have_64_bits")),
        ("all slots in the first page", "_qkv_kernel", "page, place = slot // page_size,", "page, place = slot // page_size * 0,", (CACHE,)),
        ("places of scales for those of k", "_qkv_kernel", "place * _multiple(k_place_stride, ALIGN)", "place * _multiple(k_scale_place_stride, ALIGN)", (CACHE,)),
        ("pages of scales at the stride of places", "_qkv_kernel", "v_scale_off = page * v_scale_page_stride", "v_scale_off = page * v_scale_place_stride", (FP8_STRIDED,)),
        ("every token is cached", "_prepare_heads", "kept = there & cached[:, None]", "kept = there", (CACHE,)),
        ("heads past the last are cached", "_prepare_heads", "kept = there & cached[:, None]", "kept = (there | True) & cached[:, None]", (CACHE_GPU,)),
        ("amax of the first numbers of pairs", "_prepare_heads", "larger(amax(a, axis=2), amax(b, axis=2))", "larger(amax(a, axis=2), amax(a, axis=2))", (FP8,)),
        ("codes by another factor", "_prepare_heads", "b = encode(scaled(b, factor, CACHE_FORMAT)", "b = encode(scaled(b, factor * 0.99, CACHE_FORMAT)", (FP8,)),
        ("codes of rounded keys", "_prepare_heads", "a = encode(scaled(a, factor, CACHE_FORMAT)", "a = encode(scaled(a.to(tl.bfloat16).to(tl.float32), factor, CACHE_FORMAT)", (FP8,)),
        ("heads of a cache at another stride", "_prepare_heads", "(head.to(tl.int64) * cache_head_stride)", "(head.to(tl.int64) * y_head_stride)", (CACHE_STRIDED,)),
        ("every value is cached", "_copy_heads", "value, mask=mask & cached[:, None, None])", "value, mask=mask)", (CACHE,)),
        ("scales of values where none are kept", "_copy_heads", "kept = cached[:, None] & exists[:, None] &", "kept = exists[:, None] &", (FP8,)),
        ("the factor for the scale", "_store_scales", "tl.store(scale_ptr + off, scale, mask=kept)", "tl.store(scale_ptr + off, factor, mask=kept)", (FP8,)),
        ("one scale for all heads", "_store_scales", "(head.to(tl.int64) * head_stride)[None, :]", "(head.to(tl.int64) * 0)[None, :]", (FP8,)),
        ("a factor past fp32", "_store_scales", "fp32_scale(largest, FP32_MAX, CACHE_FORMAT)", "fp32_scale(largest, 1.0, CACHE_FORMAT)", (f"{R}test_cached_values[1e-42]",)),
    ],
    "_qkv_backward_kernel": [
        ("turned on, not back", "_backward_heads", "if ROTATE and not AFTER:\n            a, b = _turn(a, b, cos, -sin,", "if ROTATE and not AFTER:\n            a, b = _turn(a, b, cos, sin,", (PLAIN,)),
        ("not turned back after the norm", "_backward_heads", "if ROTATE and AFTER:\n            a, b = _turn(a, b, cos, -sin,", "if ROTATE and AFTER:\n            a, b = _turn(a, b, cos, sin,", (LAYER_AFTER,)),
        ("statistics before the rotation", "_backward_heads", "za, zb = _turn(za, zb, cos, sin, half, PARTIAL)", "za, zb = za, zb", (LAYER_AFTER,)),
        ("the mean over heads forgotten", "_backward_heads", "a, b = r * (a - za * tz), r * (b - zb * tz)", "a, b = r * a, r * b", (GROUPS,)),
        ("a layer norm's mean forgotten", "_backward_heads", "a, b = a - t, b - t", "a, b = a, b", (LAYER_AFTER,)),
        ("no weight in the gradient", "_backward_heads", "                a, b = a * wa, b * wb", "                a, b = a, b", (GROUPS,)),
        ("the weight in the sums", "_backward_heads", "da_weight += a * za", "da_weight += a * za * 1.01", (GROUPS,)),
        ("sums of the last heads alone", "_backward_heads", "db_weight += b * zb", "db_weight = b * zb", (GROUPS,)),
        ("a bias of the last heads alone", "_backward_heads", "da_bias += a\n", "da_bias = a\n", (LAYER_AFTER,)),
        ("partial sums of all programs in one place", "_store_sums", "program * (2 * half + rest)", "program * 0", (GROUPS,)),
        ("the last tile left out", "_qkv_backward_kernel", "last = tl.minimum(first + program_tiles, tiles)", "last = tl.minimum(first + program_tiles, tiles - 1)", (GROUPS,)),
        ("gates where queries are", "_qkv_backward_kernel", "dgate_ptr, q_grad_ptr, dgate_off, q_grad_off + (2 * half + rest),", "dgate_ptr, q_grad_ptr, dgate_off, q_grad_off + 0,", (GATE,)),
        ("strides of k for v", "_qkv_backward_kernel", "dv_off = batch * _multiple(dv_batch_stride, ALIGN)", "dv_off = batch * _multiple(dk_batch_stride, ALIGN)", (GATE,)),
    ],
}  # fmt: skip
