"""include/casts.h, math.h and convert<> of simd.h against references that share no code with them.

Formats are defined here by their value tables and rounding by search in these, functions by libm and mpmath
in more precision than they are tested to. Each function must also give the same bits at every vector width.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import operator
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray

Array = NDArray[Any]

INCLUDE = Path(__file__).parents[1] / "src" / "triton_loom" / "include"
FLAGS = """
    -std=c++17 -O2 -fPIC -shared -fwrapv -fno-strict-aliasing -ffp-contract=off -fno-math-errno
    -fno-trapping-math -fno-exceptions -fno-rtti -Wall -Wextra -Werror -Wno-psabi -Wno-unused-function
""".split()
COMPILERS = [name for name in ("g++", "clang++-16") if shutil.which(name)]
WIDTHS = (1, 4, 8, 16)

# ---- the functions, by signature -----------------------------------------------------------------------

FAST = "exp exp2 log log2 sin cos tanh erf"
LIBM = """
    tan asin acos atan sinh cosh asinh acosh atanh sinpi cospi log10 log1p expm1 exp10 cbrt rcbrt erfc erfcx
    erfinv erfcinv normcdf normcdfinv tgamma lgamma j0 j1 y0 y1 cyl_bessel_i0 cyl_bessel_i1
"""
EXACT = "sqrt rint nearbyint floor ceil trunc round abs rcp_rn logb"
BINARY = "add_rn sub_rn mul_rn div_rn pow atan2 hypot rhypot fmod remainder fdim copysign nextafter"
EXTREME = "maxnum minnum maximum minimum"
INTEGER = "divs divu rems remu shl shr sar"

CASTS = {
    "f32>u16": "bf16_from_f32 bf16_from_f32_rtz f16_from_f32 f16_from_f32_rtz",
    "f32>u8": " ".join(f"{f}_from_f32 {f}_from_f32_rtz" for f in "e4m3 e5m2 e4m3fnuz e5m2fnuz".split()),
    "u16>f32": "f32_from_bf16 f32_from_f16",
    "u8>f32": "f32_from_e4m3 f32_from_e5m2 f32_from_e4m3fnuz f32_from_e5m2fnuz f32_from_e2m1 f32_from_e8m0",
    "f64>f32": "f32_odd_from_f64",
    "f32>i32": "i32_from_f32",
    "f32>u32": "u32_from_f32",
    "f32>i64": "i64_from_f32",
    "f32>u64": "u64_from_f32",
    "f64>i32": "i32_from_f64",
    "f64>u32": "u32_from_f64",
    "f64>i64": "i64_from_f64",
    "f64>u64": "u64_from_f64",
}
MATHS = {
    "f32>f32 f64>f64": f"{FAST} {LIBM} {EXACT} rsqrt",
    "f32>f32": "saturatef",
    "f32,f32>f32 f64,f64>f64": f"{BINARY} {EXTREME}",
    "f32,f32,f32>f32 f64,f64,f64>f64": "fma norm3d rnorm3d",
    "f32,f32,f32,f32>f32 f64,f64,f64,f64>f64": "norm4d rnorm4d",
    "f32,i32>f32 f64,i32>f64": "powi ldexp",
    "i32,f32>f32 i32,f64>f64": "jn yn",
    "f32>i32 f64>i32": "isnan isinf isfinite signbit ilogb",
    "f32>i64 f64>i64": "llrint llround",
    "f32>i32": "float_as_int float2int_* float2uint_*",
    "f32>i64": "float2ll_* float2ull_*",
    "f64>i32": "double2int_* double2uint_* double2hiint double2loint",
    "f64>i64": "double2ll_* double2ull_* double_as_longlong",
    "f64>f32": "double2float_rn",
    "i32>f32": "int2float_rn uint2float_rn int_as_float",
    "i64>f32": "ll2float_rn ull2float_rn",
    "i32>f64": "int2double_rn uint2double_rn",
    "i64>f64": "ll2double_rn ull2double_rn longlong_as_double",
    "i32,i32>f64": "hiloint2double",
    "i32>i32 i64>i64": "abs brev",
    "i32>i32 i64>i32": "popc clz ffs",
    "i32,i32>i32 i64,i64>i64": "mulhi umulhi",
    "i32,i32>i32": "mul24 umul24 hadd rhadd uhadd urhadd",
    "i32,i32,i32>i32": "sad usad byte_perm",
}
INTEGERS = {
    "i8,i8>i8 i16,i16>i16 i32,i32>i32 i64,i64>i64 u32,u32>u32": INTEGER,
    "u32,u32>u32": "mulhi_u32",
    "i32,i32>i32": "mulhi_i32 mulhi_u32",
    "u64,u64>u64": "mulhi_u64",
    "i64,i64>i64": "mulhi_i64 mulhi_u64",
}
TYPES = "i8 u8 i16 u16 i32 u32 i64 u64 f32 f64".split()


@dataclass(frozen=True)
class Function:
    name: str
    inputs: tuple[str, ...]
    output: str
    namespace: str = ""

    @property
    def symbol(self) -> str:
        return "_".join((self.name, *self.inputs))

    def source(self, width: int) -> str:
        parameters = "".join(f"const {t} *a{i}, " for i, t in enumerate(self.inputs))
        loads = ", ".join(f"load<vec<{t}, {width}>>(a{i} + n)" for i, t in enumerate(self.inputs))
        return (
            f'extern "C" void {self.symbol}_{width}({parameters}{self.output} *r, i64 count) {{\n'
            f"  for (i64 n = 0; n < count; n += {width}) store(r + n, {self.namespace}{self.name}({loads}));\n}}"
        )


def functions(table: dict[str, str], namespace: str = "") -> list[Function]:
    found = []
    for signatures, names in table.items():
        expanded = re.sub(r"(\w+)_\*", r"\1_rn \1_rz \1_rd \1_ru", names)
        for name, signature in itertools.product(expanded.split(), signatures.split()):
            inputs, output = signature.split(">")
            found.append(Function(name, tuple(inputs.split(",")), output, namespace))
    return found


ALL = functions(CASTS) + functions(MATHS, "loom_math::") + functions(INTEGERS)
