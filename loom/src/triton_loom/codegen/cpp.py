"""C++ for types, numbers and conversions of TTIR."""

from __future__ import annotations

import struct
from math import frexp

from ..ir.ttir import Bits, Number, Opaque, Pointer, Scalar, Type

_C_TYPES = {
    "i1": "bool",
    "i8": "i8",
    "i16": "i16",
    "i32": "i32",
    "i64": "i64",
    "index": "i64",
    "f32": "f32",
    "f64": "f64",
    "f16": "u16",
    "bf16": "u16",
    "f8E4M3FN": "u8",
    "f8E5M2": "u8",
    "f8E4M3FNUZ": "u8",
    "f8E5M2FNUZ": "u8",
}
# The name in casts.h of each format that C++ has no type for.
FORMATS = {
    "f16": "f16",
    "bf16": "bf16",
    "f8E4M3FN": "e4m3",
    "f8E5M2": "e5m2",
    "f8E4M3FNUZ": "e4m3fnuz",
    "f8E5M2FNUZ": "e5m2fnuz",
}
# (exponent bits, mantissa bits, bias) of these formats, to write their literals.
_LAYOUTS = {"f16": (5, 10, 15), "bf16": (8, 7, 127), "f8E4M3FN": (4, 3, 7), "f8E5M2": (5, 2, 15)}
_LAYOUTS |= {"f8E4M3FNUZ": (4, 3, 8), "f8E5M2FNUZ": (5, 2, 16)}

Lanes = int | str  # a number, or "W" inside a template over the number of lanes


def c_type(element: Type, lanes: Lanes = 1) -> str:
    """Return the C++ type of `lanes` lanes of this element. Vector lanes of i1 are masks; those of pointers are i64."""
    if isinstance(element, Pointer):
        return f"{memory_type(element.pointee)} *" if lanes == 1 else vector_of("i64", lanes)
    if isinstance(element, Opaque) or element.name not in _C_TYPES:  # type: ignore[union-attr]
        raise TypeError(f"no C++ type for {element}")
    assert isinstance(element, Scalar)
    if element.name == "i1" and lanes != 1:
        return f"mask_of<{lanes}>" if lanes == "W" else vector_of("i32", lanes)
    return vector_of(_C_TYPES[element.name], lanes)


def vector_of(scalar: str, lanes: Lanes) -> str:
    """Return the C++ type of `lanes` lanes of a C++ scalar type."""
    if lanes == 1:
        return scalar
    return f"vec<{scalar}, {lanes}>" if lanes == "W" else f"{scalar}x{lanes}"


def memory_type(element: Type) -> str:
    """Return the C++ type of one element in memory: i1 is a byte, a pointer is itself."""
    if isinstance(element, Scalar) and element.name == "i1":
        return "i8"
    return c_type(element)


def stored_type(element: Type) -> str:
    """Return the element type of a chunk of memory: `memory_type`, with addresses as integers."""
    return "i64" if isinstance(element, Pointer) else memory_type(element)


def size_of(element: Scalar | Pointer) -> int:
    """Return the bytes of one element in memory."""
    return max(1, element.bits // 8)


def literal(element: Type, value: Number) -> str:
    """Return a C++ literal with exactly this value (a Python number, bool, or Bits)."""
    if isinstance(element, Pointer):
        return f"({c_type(element)}){_int(value)}ll"
    assert isinstance(element, Scalar)
    name = element.name
    if name == "i1":
        return "true" if value else "false"
    if not element.is_float:
        return _int_literal(_int(value), element.bits)
    if name == "f32":
        pattern = value.pattern if isinstance(value, Bits) else _f32_bits(value)
        (number,) = struct.unpack("<f", struct.pack("<I", pattern))
        return _float_literal(number, "f") or f"bits<f32>(0x{pattern:08X}u)"
    if name == "f64":
        raw = struct.pack("<Q", value.pattern) if isinstance(value, Bits) else struct.pack("<d", value)
        (number,), (pattern,) = struct.unpack("<d", raw), struct.unpack("<Q", raw)
        return _float_literal(number, "") or f"bits<f64>(0x{pattern:016X}ull)"
    pattern = value.pattern if isinstance(value, Bits) else encode(name, value)
    return f"({_C_TYPES[name]})0x{pattern:0{element.bits // 4}X}"


def _int(value: Number) -> int:
    return value.pattern if isinstance(value, Bits) else int(value)


def _int_literal(value: int, bits: int) -> str:
    value = (value + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))
    if bits == 64:
        return f"{value}ll" if value != -(1 << 63) else "(-9223372036854775807ll - 1)"
    if bits == 32:
        return f"{value}" if value != -(1 << 31) else "(-2147483647 - 1)"
    return f"(i{bits}){value}"


def _f32_bits(value: float) -> int:
    try:
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    except OverflowError:
        return 0x7F800000 if value > 0 else 0xFF800000


def _float_literal(value: float, suffix: str) -> str:
    if value != value or value in (float("inf"), float("-inf")):
        return ""
    text = repr(value)
    if suffix:  # the shortest decimal that reads back as this f32
        digits = (f"{value:.{d}g}" for d in range(1, 18))
        text = next(text for text in digits if _f32_bits(float(text)) == _f32_bits(value))
    if not any(c in text for c in ".e"):
        text += ".0"
    return text + suffix


def encode(name: str, value: float) -> int:
    """Return the bits of a finite literal that the format holds exactly (MLIR prints only such decimals)."""
    exponent_bits, mantissa_bits, bias = _LAYOUTS[name]
    sign = 1 if struct.pack(">d", value)[0] & 0x80 else 0
    magnitude = abs(value)
    if magnitude == 0:
        return 0 if name.endswith("FNUZ") else sign << (exponent_bits + mantissa_bits)
    exponent = max(frexp(magnitude)[1] - 1, 1 - bias)
    mantissa = round(magnitude * 2.0 ** (mantissa_bits - exponent))
    return (sign << (exponent_bits + mantissa_bits)) | (((exponent + bias - 1) << mantissa_bits) + mantissa)


def widen(name: str, text: str) -> str:
    """Return a float of a format that C++ has no type for as f32; any other value unchanged."""
    return f"f32_from_{FORMATS[name]}({text})" if name in FORMATS else text


def narrow(name: str, text: str) -> str:
    """Return an f32 rounded to a format that C++ has no type for; any other value unchanged."""
    return f"{FORMATS[name]}_from_f32({text})" if name in FORMATS else text


def declare_const(type_: str, name: str, expr: str) -> str:
    """Return the definition of a constant."""
    return f"{type_}const {name} = {expr};" if type_.endswith("*") else f"const {type_} {name} = {expr};"


def c_string(text: str) -> str:
    """Return a text as a C++ literal."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
