"""CPU implementation of `triton.language.extra.libdevice`: each function maps to one of `loom_math` in include/math.h.

Signatures match the CUDA library, so a kernel that compiles here compiles there. Letters stand for types: i, l are
int32, int64; I, L their unsigned counterparts; f, d are fp32, fp64; b is int1. `name=symbol` gives a function
another name in C++: a GPU's fast variants map to the exact functions, and TTIR does not record which integers are
unsigned. `name_*` stands for the four rounding modes.
"""

from __future__ import annotations

import re
from typing import Any

from triton.language import core

FUNCTIONS = {
    "f>f d>d": """
        abs floor ceil trunc round rint nearbyint sqrt sqrt_rn=sqrt rsqrt cbrt rcbrt rcp_rn
        exp exp2 exp10 expm1 log log2 log10 log1p logb
        sin cos tan sinpi cospi asin acos atan sinh cosh tanh asinh acosh atanh
        erf erfc erfcx erfinv erfcinv normcdf normcdfinv lgamma tgamma
        j0 j1 y0 y1 cyl_bessel_i0 cyl_bessel_i1""",
    "f>f": """
        saturatef rsqrt_rn=rsqrt fast_sinf=sin fast_cosf=cos fast_tanf=tan fast_tanhf=tanh
        fast_expf=exp fast_exp10f=exp10 fast_logf=log fast_log2f=log2 fast_log10f=log10""",
    "ff>f dd>d": """
        add_rn sub_rn mul_rn div_rn pow atan2 hypot rhypot fmod remainder fdim copysign nextafter""",
    "ff>f": "fast_dividef=div_rn fast_powf=pow",
    "fff>f ddd>d": "fma fma_rn=fma norm3d rnorm3d",
    "ffff>f dddd>d": "norm4d rnorm4d",
    "fi>f di>d": "pow=powi ldexp scalbn=ldexp",
    "if>f id>d": "jn yn",
    "f>b d>b": "isnan isinf",
    "f>b": "finitef=isfinite",
    "d>b": "isfinited=isfinite",
    "f>i d>i": "signbit ilogb",
    "f>l d>l": "llrint llround",
    "f>i": "float_as_int float_as_uint=float_as_int float2int_* float2uint_*",
    "f>l": "float2ll_* float2ull_*",
    "d>i": "double2hiint double2loint double2int_* double2uint_*",
    "i>f": "int_as_float int2float_rn",
    "I>f": "uint_as_float=int_as_float uint2float_rn",
    "l>f": "ll2float_rn",
    "L>f": "ull2float_rn",
    "i>d": "int2double_rn",
    "I>d": "uint2double_rn",
    "l>d": "longlong_as_double ll2double_rn",
    "L>d": "ull2double_rn",
    "ii>d": "hiloint2double",
    "d>l": "double_as_longlong double2ll_* double2ull_*",
    "d>f": "double2float_rn",
    "i>i l>l": "abs brev",
    "i>i l>i": "clz ffs popc",
    "ii>i ll>l": "mulhi",
    "II>I LL>L": "mulhi=umulhi",
    "ii>i": "mul24 hadd rhadd",
    "II>I": "mul24=umul24 hadd=uhadd rhadd=urhadd",
    "iii>i": "byte_perm",
    "iiI>i": "sad",
    "III>I": "sad=usad",
}

TYPES = {
    "b": core.int1,
    "i": core.int32,
    "l": core.int64,
    "I": core.uint32,
    "L": core.uint64,
    "f": core.float32,
    "d": core.float64,
}


Symbols = dict[tuple[Any, ...], tuple[str, Any]]  # types of the arguments: C++ name, type of the result


def _symbols() -> dict[str, Symbols]:
    symbols: dict[str, Symbols] = {}
    for signatures, names in FUNCTIONS.items():
        expanded = re.sub(r"(\w+)_\*", r"\1_rn \1_rz \1_rd \1_ru", names)
        for name, _, symbol in (entry.partition("=") for entry in expanded.split()):
            for parameters, result in (signature.split(">") for signature in signatures.split()):
                types = tuple(TYPES[letter] for letter in parameters)
                symbols.setdefault(name, {})[types] = f"loom_math::{symbol or name}", TYPES[result]
    return symbols


SYMBOLS = _symbols()


def _function(name: str) -> Any:
    def call(*args: Any, _semantic: Any = None) -> Any:
        tensors = [_semantic.to_tensor(arg) for arg in args]
        types = tuple(tensor.dtype for tensor in tensors)
        if types not in SYMBOLS[name]:
            raise TypeError(
                f"libdevice.{name} takes {_format_signatures(SYMBOLS[name])}, not {_format_signatures([types])}"
            )
        return core.extern_elementwise("", "", tensors, SYMBOLS[name], is_pure=True, _semantic=_semantic)

    call.__name__ = call.__qualname__ = name
    return core.extern(call)


def _format_signatures(signatures: Any) -> str:
    return " or ".join(f"({', '.join(map(str, types))})" for types in signatures)


globals().update({name: _function(name) for name in SYMBOLS})


def __getattr__(name: str) -> Any:
    """Make a function without a CPU counterpart fail where a kernel calls it, not where a module imports it."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, _semantic: Any = None) -> Any:
        raise NotImplementedError(
            f"libdevice.{name} does not exist on the CPU"
            + (": arithmetic rounds to nearest there" if name[-3:] in ("_rz", "_rd", "_ru") else "")
        )

    return core.extern(missing)
