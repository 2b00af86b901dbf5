"""Handlers of plain arithmetic: an instruction's meaning in one lane (codegen/ptx.py) made a function of 32 lanes.

Instructions that are common in Triton's PTX are compiled with the machine. Any other that codegen/ptx.py knows is
compiled when a kernel first has it, so that everything known is supported and the library stays small.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from ..codegen import ptx


class Scalar(NamedTuple):
    """An instruction and its register sizes: bytes per lane of each operand, 0 for a predicate.

    A register may be wider than what the instruction reads or writes of it.
    """

    name: str
    registers: tuple[int, ...]  # of results, then of operands read

    @property
    def handler(self) -> str:
        return f"{self.name}|{''.join(map(str, self.registers))}"


def find(name: str) -> ptx.Row | None:
    """Return the meaning of an instruction with all operands in registers, or None if it is not known."""
    if name == "lop3.b32":  # its truth table is an operand like the others
        return ptx.Row(("b32",), ("b32", "b32", "b32", "u32"), ("gpu::lop3(%0, %1, %2, %3)",))
    if three := _EXTREME_OF_THREE.fullmatch(name):
        return _extreme_of_three(three[1] == "max", ".ftz" in name, ".NaN" in name)
    if directed := _DIRECTED.fullmatch(name):
        return _rounded(**directed.groupdict())
    if carrying := _CARRY.fullmatch(name):
        return _carrying(**carrying.groupdict())
    row = ptx.find(name)
    return replace(row, meaning=(_QUICKER[name],)) if row is not None and name in _QUICKER else row


# `mad.lo.cc.u32` and the like, which `text` splits in two: the value, and the carry.
_CARRY = re.compile(
    r"(?P<name>add|sub|mad\.lo|mad\.hi)\.(?P<output>value|carry)\.(?P<sign>[us])(?P<bits>32|64)"
)


def _carrying(name: str, output: str, sign: str, bits: str) -> ptx.Row:
    """Return an operation with carry. The last operand is the carry in; the carry out is the bit above the value, which
    is the borrow for a difference."""
    type_, unsigned, signed = (
        f"u{bits}",
        *{"32": ("u64", "i64"), "64": ("unsigned __int128", "__int128")}[bits],
    )
    wide = unsigned if sign == "u" else signed
    product = f"({unsigned})(u{bits})((({wide})({sign.replace('s', 'i')}{bits})%0 * ({sign.replace('s', 'i')}{bits})%1)"
    sums = {
        "add": f"({unsigned})%0 + %1 + %2",
        "sub": f"({unsigned})%0 - %1 - %2",
        "mad.lo": f"{product}) + %2 + %3",
        "mad.hi": f"{product} >> {bits}) + %2 + %3",
    }
    reads = (*[type_] * (3 if name.startswith("mad") else 2), "pred")
    if output == "carry":
        return ptx.Row(("pred",), reads, (f"({sums[name]}) >> {bits} & 1",))
    return ptx.Row((type_,), reads, (sums[name],))


# Rounded toward zero, down or up: libdevice uses these in its logarithms.
_DIRECTED = re.compile(r"(?P<name>add|sub|mul|fma)\.(?P<direction>rz|rm|rp)(?P<ftz>\.ftz)?\.f32")


def _rounded(name: str, direction: str, ftz: str | None) -> ptx.Row:
    flush, count = f"ptx::flush<{str(bool(ftz)).lower()}>", 3 if name == "fma" else 2
    a, b, *c = (f"{flush}(%{k})" for k in range(count))
    factors = {"add": f"{a}, 1.f, {b}", "sub": f"{a}, 1.f, -{b}", "fma": f"{a}, {b}, {''.join(c)}"}
    text = (
        f"gpu::directed_product<'{direction[1]}'>({a}, {b})"
        if name == "mul"
        else (f"gpu::directed_sum<'{direction[1]}'>({factors[name]})")
    )
    return ptx.Row(("f32",), ("f32",) * count, (f"ptx::canonical({flush}({text}))",))


# `max.f32 d, a, b, c` (sm_100) is called max3.f32 here, because each name has a fixed number of operands.
_EXTREME_OF_THREE = re.compile(r"(min|max)3(\.ftz)?(\.NaN)?\.f32")


def _extreme_of_three(max_: bool, ftz: bool, nan: bool) -> ptx.Row:
    flags = ", ".join(str(flag).lower() for flag in (max_, nan, False))
    a, b, c = (f"ptx::flush<{str(ftz).lower()}>(%{k})" for k in range(3))
    text = f"ptx::extreme<{flags}>(ptx::extreme<{flags}>({a}, {b}), {c})"
    return ptx.Row(("f32",), ("f32",) * 3, (f"ptx::canonical({text})",))


# Faster code with the same results for operations that bf16 kernels use all the time.
_QUICKER = {
    "cvt.f32.bf16": "gpu::f32_of_bf16(%0)",
    "cvt.rn.bf16.f32": "(u16)gpu::bf16_of_f32(%0)",
    "fma.rn.bf16": "(u16)gpu::fused_bf16(%0, %1, %2)",
    "fma.rn.bf16x2": "gpu::fused_bf16(%0 & 0xFFFF, %1 & 0xFFFF, %2 & 0xFFFF) | "
    "gpu::fused_bf16(%0 >> 16, %1 >> 16, %2 >> 16) << 16",
    "cvt.rn.bf16x2.f32": "gpu::bf16_of_f32(%0) << 16 | gpu::bf16_of_f32(%1)",
}


def register_bytes(type_: str) -> int:
    """Return the bytes per lane of the narrowest register that holds this type."""
    bits = ptx.width(type_)
    return 0 if bits == 1 else 8 if bits == 64 else 4


def plain(name: str) -> Scalar:
    """Return an instruction with registers that fit its types, without its optional results."""
    row = find(name)
    assert row is not None, name
    types = (*row.writes[: least_results(name)], *row.reads)
    return Scalar(name, tuple(map(register_bytes, types)))


def least_results(name: str) -> int:
    """Return the number of results that cannot be left out: setp's second one, the opposite of the first, can."""
    return 2 if name.startswith("setp") and name.endswith("x2") else 1


# ---- C++ -------------------------------------------------------------------------------------------------

_HEAD = '// Made by gpu/scalars.py.\n#include "gpu/scalar.h"\nnamespace gpu {\n\n'
_TAIL = """
}  // namespace gpu

GPU_LIBRARY(GPU_TABLE(gpu::TABLE))
"""


def unit(scalars: Iterable[Scalar]) -> str:
    """Return the C++ text of a library with these handlers."""
    listed = sorted(set(scalars))
    functions = [_function(f"scalar_{number}", scalar) for number, scalar in enumerate(listed)]
    rows = [f'  GPU_HANDLER("{s.handler}", scalar_{number})' for number, s in enumerate(listed)]
    table = "static const Named TABLE[] = {\n" + "\n".join(rows) + "\n};\n"
    return _HEAD + "\n".join(functions) + "\n" + table + _TAIL


def _function(function: str, scalar: Scalar) -> str:
    row = find(scalar.name)
    assert row is not None, scalar.name
    results = len(scalar.registers) - len(row.reads)
    lanes = []
    for number, (type_, size) in enumerate(
        zip((*row.writes[:results], *row.reads), scalar.registers, strict=True)
    ):
        kind = "Flag" if size == 0 else f"Of<u{8 * size}, {ptx.C_TYPES[type_]}>"
        lanes.append(f"{kind}(w, i.operands[{number}])")
    parameters = ", ".join(f"{ptx.C_TYPES[type_]} _{number}" for number, type_ in enumerate(row.reads))
    lambdas = [
        f"[]({parameters}) LOOM_ALWAYS {{ return ({ptx.C_TYPES[type_]})({_named(meaning)}); }}"
        for type_, meaning in zip(row.writes[:results], row.meaning, strict=False)
    ]
    read = ", ".join(lanes[results:])
    body = [f"  expect_divisor(w, i, {lanes[-1]});"] if _divides(scalar.name) else []
    if row.writes[0] == "pred":
        # Compute all results before writing the first: a result may also be an operand.
        body += [
            f"  const u32 bits_{number} = true_lanes({text}, {read});" for number, text in enumerate(lambdas)
        ]
        body += [f"  put_flags(w, i.operands[{number}], bits_{number});" for number in range(results)]
    else:
        to = lanes[0].split("(")[0]
        body.append(f"  for_all_lanes<{to}>(w, i, {lambdas[0]}, {read});")
    return "\n".join([f"static void {function}(Warp &w, const Instruction &i) {{", *body, "}"])


def _named(meaning: str) -> str:
    inlined = re.sub(r"(\[\]\([^()]*\)) \{", r"\1 LOOM_ALWAYS {", meaning)  # the lanes of pairs
    return re.sub(r"%(\d)", r"_\1", inlined)


def _divides(name: str) -> bool:
    return re.fullmatch(r"(div|rem)\.[us]\d+", name) is not None


# ---- common instructions ---------------------------------------------------------------------------------


def _expand(pattern: str) -> list[str]:
    """Return the names that a pattern of alternatives, `(a|b).{.c}d`, stands for."""
    parts = re.split(r"\(([^()]*)\)", re.sub(r"\{([^{}]*)\}", r"(|\1)", pattern))
    choices = [part.split("|") if number % 2 else [part] for number, part in enumerate(parts)]
    return ["".join(selection) for selection in product(*choices)]


_COMMON = (
    "mov.(b16|b32|b64|u16|u32|u64|s32|s64|f32)",
    "selp.(b16|b32|b64|f32|u32|s32|u64|s64|u16|s16)",
    "(add|sub).(s16|s32|s64|u32|u64)",
    "mul.lo.(s16|s32|s64|u32|u64)",
    "mul.hi.(s32|u32|s64|u64)",
    "mul.wide.(s16|u16|s32|u32)",
    "mad.(lo|wide).(s32|u32)",
    "mad.lo.s64",
    "(div|rem).(s32|u32|s64|u64)",
    "(neg|abs).(s32|s64)",
    "(min|max).(s16|u16|s32|u32|s64|u64)",
    "(and|or|xor|not).(b16|b32|b64)",
    "shl.(b16|b32|b64)",
    "shr.(s16|u16|b32|s32|u32|b64|s64|u64)",
    "bfe.(u32|s32|u64)",
    "(prmt|lop3|popc|clz).b32",
    "(add|sub|mul){.rn}.f32",
    "fma.rn{.ftz}.f32",
    "div.(rn|full).f32",
    "(ex2|lg2|rcp|rsqrt|sqrt).approx.ftz.f32",
    "(ex2|lg2|rcp|rsqrt|sqrt).approx.f32",
    "sqrt.rn.f32",
    "(min|max){.NaN}.f32",
    "(neg|abs).f32",
    "setp.(eq|ne).(b16|b32|b64)",
    "setp.(eq|ne|lt|le|gt|ge).(s32|u32|s64|u64|s16|u16)",
    "setp.(eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan).f32",
    "cvt.(u16|s16).(u32|s32|u64|s64|u8|s8)",
    "cvt.(u32|s32).(u16|s16|u64|s64|u8|s8)",
    "cvt.(u64|s64).(u32|s32|u16|s16)",
    "cvt.(u8|s8).(u16|u32|s32)",
    "cvt.rn.f32.(s32|u32|s64)",
    "cvt.rzi.(s32|u32).f32",
    "cvt.f32.(f16|bf16)",
    "cvt.rn.(f16|bf16).f32",
    "cvt.rn.(f16x2|bf16x2).f32",
    "cvt.rn.satfinite.(e4m3x2|e5m2x2).f32",
    "cvt.rn.f16x2.(e4m3x2|e5m2x2)",
    "cvt.rna.tf32.f32",
    "(add|mul|sub).bf16x2",
    "fma.rn.(bf16x2|f16x2|bf16|f16)",
    "(add|sub).rn.f32.bf16",
    "fma.rn.f32.bf16",
    "(min|max)3.f32",
    "(add|sub|mul).f32x2",
    "(add|sub|mul|fma).rn.f32x2",
    "(add|min|max).(s16x2|u16x2)",
)


def common() -> list[Scalar]:
    """Return the instructions that are compiled with the machine."""
    return [plain(name) for pattern in _COMMON for name in _expand(pattern) if find(name) is not None]
