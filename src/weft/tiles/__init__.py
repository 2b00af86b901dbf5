"""Small `@triton.jit` functions on tiles in registers: no loads, no stores, usable in any kernel."""

from .activations import activate, activate_with_slope
from .hadamard import hadamard_columns
from .numbers import (
    CONVERT,
    CONVERT_CLAMPED,
    INTEGER,
    decode,
    decode_e4m3,
    decode_e8m0,
    encode,
    encode_stochastic,
    pack_pairs,
    unpack_pairs,
)
from .quantize import block_scale, quantize_columns, quantize_rows, quantize_squares, repeat_rows, round_to
from .reduce import amax, larger, merge_moments
from .scales import at_least, at_most, fp32_scale, given_scale, nvfp4_global, reciprocal, scaled

__all__ = [
    "CONVERT",
    "CONVERT_CLAMPED",
    "INTEGER",
    "activate",
    "activate_with_slope",
    "amax",
    "at_least",
    "at_most",
    "block_scale",
    "decode",
    "decode_e4m3",
    "decode_e8m0",
    "encode",
    "encode_stochastic",
    "fp32_scale",
    "given_scale",
    "hadamard_columns",
    "larger",
    "merge_moments",
    "nvfp4_global",
    "pack_pairs",
    "quantize_columns",
    "quantize_rows",
    "quantize_squares",
    "reciprocal",
    "repeat_rows",
    "round_to",
    "scaled",
    "unpack_pairs",
]
