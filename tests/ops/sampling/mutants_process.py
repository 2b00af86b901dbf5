"""Mutants of the kernel of processed logits; see `tests.ops.norm.mutants` for the format."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE = "ops/sampling/process/kernels.py"
LAUNCH, LOADS = "ops/sampling/process/launch.py", "ops/sampling/loads.py"
T = "ops/sampling/test_process.py::"
K = "process_kernel"
ALL = (f"{T}test_everything_at_once[dtype0-70]",)
SERVERS, BITS, VALUES = (
    (f"{T}test_penalties_as_servers_define_them",),
    (f"{T}test_the_lowest_bit_is_the_first_token[70-dtype0]",),
    (f"{T}test_values_that_are_no_numbers",),
)
ZERO, PLACE, FAR = (
    (f"{T}test_zero_on_the_device_makes_one_request_greedy",),
    (f"{T}test_in_place_with_one_rounding[dtype1]",),
    (f"{T}test_offsets_have_64_bits",),
)
ROWS, ROW = (
    (f"{T}test_several_rows_of_a_request[request]",),
    (f"{T}test_several_rows_of_a_request[row]",),
)
GPU, LONG = (f"{T}test_tiles_of_gpus[sm_90]",), (f"{T}test_everything_at_once[dtype0-1100]",)

_PROCESS: list[tuple[Any, ...]] = [
    ("only the first tile", K, "(tl.program_id(0) % tiles) * TILE", "(tl.program_id(0) % tiles) * 0", LONG),
    ("columns past a multiple of 16 skipped", K, "cols = (cols // ALIGN) * ALIGN", "cols = (cols // 16) * 16", ALL),
    ("positive logits multiplied", K, "tl.where(z > 0.0, tl.div_rn(z, r), z * r)", "z * r", SERVERS),
    ("negative logits divided", K, "tl.where(z > 0.0, tl.div_rn(z, r), z * r)", "tl.div_rn(z, r)", SERVERS),
    ("unseen tokens penalized", K, "z = tl.where(seen, tl.where", "z = tl.where(seen | (col >= 0), tl.where", SERVERS),
    ("generated tokens not seen", K, "seen = seen | (count > 0)", "seen = seen | (count < 0)", SERVERS),
    ("prompt not seen", K, "ALIGN) != 0)", "ALIGN) > 2)", SERVERS),
    ("presence where nothing was generated", K, "tl.where(count > 0, z - penalty, z)", "z - penalty", SERVERS),
    ("penalties added", K, "z - penalty", "z + penalty", SERVERS),
    ("frequency without counts", K, "count.to(tl.float32), load", "(count > 0).to(tl.float32), load", SERVERS),
    ("penalties of the first request", f"{LOADS}:load_number", "row // number.inner", "row * 0", ALL),
    ("number of a row in place of the request's", f"{LOADS}:NumberArgument.of", "rows // tensor.numel()", "1", ROWS),
    ("counts of a row in place of the request's", f"{LAUNCH}:_of_requests", "rows // len(flat))", "1)", ROWS),
    ("mask of the first row", K, "(row // allowed.inner) * allowed.stride", "(row * 0) * allowed.stride", ROW),
    ("bias left out", K, "z += _load(bias", "z += 0.0 * _load(bias", ALL),
    ("highest bit first", K, "word >> (col % TOKENS)", "word >> (31 - col % TOKENS)", BITS),
    ("only the first word", K, "word_off + col // TOKENS", "word_off + col * 0", BITS),
    ("masked tokens kept", K, "z, -float(\"inf\"))", "z, z)", BITS),
    ("NaN not masked", K, "& 1) == 1, z, -float(\"inf\"))", "& 1) == 1, z, z * 0.0 - float(\"inf\"))", VALUES),
    ("temperature multiplies", K, "tl.div_rn(z, tl.where(t == 0.0, 1.0, t))", "z * t", ALL),
    ("temperature 0 divides", K, "z = tl.where(t == 0.0, z, tl.div_rn(z, tl.where(t == 0.0, 1.0, t)))", "z = tl.div_rn(z, t)", ZERO),
    ("temperature before the bias", K, "z += _load(bias, row, col, exists, ALIGN).to(tl.float32)", "z += _load(bias, row, col, exists, ALIGN).to(tl.float32) * load_number(temperature, row)", ALL),
    ("temperatures left out", f"{LAUNCH}:launch_process", "SCALED=not (", "SCALED=False and not (", ALL),
    ("rows of the result at the logits' stride", K, "row * y_stride, ALIGN", "row * logits_stride, ALIGN", FAR),
    ("rows of the logits at the length of a row", K, "row * logits_stride, ALIGN", "row * cols, ALIGN", PLACE),
    ("rounded before the temperature", K, "t = load_number(temperature, row)", "t = load_number(temperature, row); z = z.to(y_ptr.dtype.element_ty).to(tl.float32)", PLACE),
    ("32-bit offsets", K, "row = (tl.program_id(0) // tiles).to(tl.int64)", "row = (tl.program_id(0) // tiles).to(tl.int32)", FAR),
    ("too few tiles on a GPU", f"{LAUNCH}:launch_process", "tiles = -(-cols // tile)", "tiles = max(cols // tile, 1)", GPU),
    ("last column not stored", K, "mask=exists)", "mask=exists & (col < cols - 1))", ALL),
]  # fmt: skip

LINES = {"process_kernel": _PROCESS}
