"""Mutants of the kernel of patches; see `tests.ops.norm.mutants` for the format."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE = "ops/vision/kernels.py"
LAUNCH = "ops/vision/launch.py"
T = "ops/vision/test.py::"
ANY_ORDER, LONG, ODD = (
    f"{T}test_tokens_are_merged",
    f"{T}test_patches_longer_than_a_tile[700-cpu]",
    f"{T}test_patches_longer_than_a_tile[3-sm_90]",
)
NORMALIZED, STRIDES = (
    f"{T}test_normalization_is_one_product_and_one_sum",
    f"{T}test_views_of_any_strides[nchw]",
)
GRADIENT, FAR = f"{T}test_gradients[nchw-cyx-torch.float32]", f"{T}test_offsets_have_64_bits"
CODES, ROW = (f"{T}test_quantized_patches_are_those_of_the_fp32_result[{spec}]" for spec in ("tensor", "row"))
CONVOLUTION = f"{T}test_convolution_weight_has_the_order_of_patches"
RUNS, KERNEL, PIXELS = f"{LAUNCH}:contiguous_run", "patchify_kernel", "_pixels"

_PATCHIFY: list[tuple[Any, ...]] = [
    ("patches of the first image", PIXELS, "number * p.stride_b", "0 * p.stride_b", (ANY_ORDER,)),
    ("patches in rows, not in blocks", PIXELS, "block // blocks * p.merge + inside // p.merge", "at // p.across", (ANY_ORDER,)),
    ("rows and columns of a block swapped", PIXELS, "block % blocks * p.merge + inside % p.merge", "block % blocks * p.merge + inside // p.merge", (ANY_ORDER,)),
    ("the top of every patch", PIXELS, "dy.to(tl.int64) * p.stride_y", "dy.to(tl.int64) * 0", (NORMALIZED,)),
    ("columns of pixels without their stride", PIXELS, "dx.to(tl.int64) * p.stride_x", "dx.to(tl.int64)", (STRIDES,)),
    ("the first channel alone", PIXELS, "channel.to(tl.int64) * p.stride_c", "channel.to(tl.int64) * 0", (NORMALIZED,)),
    ("height for width", PIXELS, "rest // p.width, rest % p.width", "rest // p.height, rest % p.height", (GRADIENT,)),
    ("always in the order yxc", PIXELS, "if CHANNELS_FIRST:", "if False:", (CONVOLUTION,)),
    ("patches as high as wide", PIXELS, "y * p.height * p.stride_y", "y * p.width * p.stride_y", (GRADIENT,)),
    ("32-bit rows of pixels", PIXELS, "dy.to(tl.int64) * p.stride_y", "(dy * p.stride_y).to(tl.int32)", (FAR,)),
    ("the first tile alone", KERNEL, "col = tile * TILE", "col = tile * 0", (LONG,)),
    ("the first patches alone", KERNEL, "row = block * ROWS", "row = block * 0", (NORMALIZED,)),
    ("cols up to a multiple of 16", KERNEL, "(cols // ALIGN) * ALIGN", "(cols // 16) * 16", (ODD,)),
    ("without the scale", KERNEL, "tl.zeros_like(x) + scale", "tl.zeros_like(x) + 1.0", (NORMALIZED,)),
    ("scales of columns, not of channels", KERNEL, "tl.load(scale_ptr + channel", "tl.load(scale_ptr + col % 3", (GRADIENT,)),
    ("without the shift", KERNEL, "tl.zeros_like(x) + shift", "tl.zeros_like(x)", (NORMALIZED,)),
    ("a gradient without the scale", KERNEL, "x = x * scale", "x = x * 1.0", (GRADIENT,)),
    ("rounded twice", KERNEL, "x.to(y_ptr.dtype", "x.to(tl.float16).to(y_ptr.dtype", (NORMALIZED,)),
    ("a gradient without its last patch", KERNEL, "x.to(image_ptr.dtype.element_ty), mask=mask", "x.to(image_ptr.dtype.element_ty), mask=mask & (row < rows - 1)[:, None]", (GRADIENT,)),
    ("codes of half of the elements", KERNEL, "store_quantized(x, mask", "store_quantized(0.5 * x, mask", (CODES, ROW)),
    ("half of the programs", f"{LAUNCH}:PatchLaunch.run", "programs = -(-self.rows // rows) * tiles", "programs = -(-self.rows // (2 * rows)) * tiles", (NORMALIZED,)),
    ("scales of parts of a patch", f"{LAUNCH}:patch_config", "return PatchConfig(1, whole,", "return PatchConfig(1, whole // 4,", (ROW,)),
    ("runs across strides that are odd", RUNS, "align_of(patch[1] * channels, stride_b, stride_y)", "align_of(patch[1] * channels)", (f"{T}test_runs_end_where_strides_do",)),
    ("runs across pixels that are apart", RUNS, "if stride_x == channels:", "if True:", (f"{T}test_runs_end_where_strides_do",)),
    ("runs across planes", RUNS, "if stride_x == 1 else 1", "if True else 1", (f"{T}test_runs_end_where_strides_do",)),
]  # fmt: skip

LINES = {"patchify_kernel": _PATCHIFY}
