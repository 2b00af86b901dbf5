"""Table of the PTX instructions that Loom executes: for each, the types of its operands and its meaning in C++.

This table is the single list of them; docs/assembly.md is printed from it (`python -m triton_loom.codegen.ptx`). To add
an instruction, give its family a row here and, if C++ has no operator for it, a function in include/ptx.h.

A family is written as in NVIDIA's manual: `{.ftz}` is optional, `(u16|u32)` is a choice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

# The C++ type in which an instruction reads and writes an operand; packed floats and those that C++ lacks are raw bits.
C_TYPES = (
    {"pred": "bool", "f32": "f32", "f64": "f64"}
    | {f"{kind}{bits}": f"u{bits}" for bits in (8, 16, 32, 64) for kind in "bu"}
    | {f"s{bits}": f"i{bits}" for bits in (8, 16, 32, 64)}
    | {"f16": "u16", "bf16": "u16", "f16x2": "u32", "bf16x2": "u32", "f32x2": "u64", "tf32": "u32"}
    | {"u16x2": "u32", "s16x2": "u32", "e2m1x2": "u8", "e2m1x4": "u16", "ue8m0x2": "u16"}
    | {f"{kind}x2": "u16" for kind in ("e4m3", "e5m2", "e2m3", "e3m2")}
    | {f"{kind}x4": "u32" for kind in ("e4m3", "e5m2", "e2m3", "e3m2")}
)
FLOATS = ("f16", "bf16", "f32", "f64")
EXACT = "exact"


def width(type_: str) -> int:
    """Return the bits of an operand of this type; 1 for a predicate."""
    c_type = C_TYPES[type_]
    return 1 if c_type == "bool" else int(c_type[1:])


@dataclass(frozen=True)
class Row:
    """An instruction: `writes` and `reads` are types, `meaning` has an expression per result, in which %0, %1, ... are
    the operands read. A trailing result may be left out."""

    writes: tuple[str, ...]
    reads: tuple[str, ...]
    meaning: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """Instructions that differ only in modifiers: a pattern of names, the error of their results, and a function from
    the modifiers to a row."""

    pattern: str
    error: str
    row: Callable[[list[str]], Row]

    @cached_property
    def names(self) -> re.Pattern[str]:
        text = self.pattern.replace(".", r"\.").replace("{", "(?:").replace("}", ")?")
        return re.compile(text)


def find(name: str) -> Row | None:
    """Return the instruction of this name, or None if Loom does not know it."""
    for family in FAMILIES:
        if family.names.fullmatch(name):
            return family.row(name.split("."))
    return None


def _one(write: str, reads: Sequence[str], meaning: str) -> Row:
    return Row((write,), tuple(reads), (meaning,))


def _flag(words: list[str], word: str) -> str:
    return "true" if word in words else "false"


# ---- integers and bits -----------------------------------------------------------------------------------


def _integer(template: str, count: int = 2) -> Callable[[list[str]], Row]:
    """Return arithmetic in T, the type that the name ends with."""

    def row(words: list[str]) -> Row:
        text = template.replace("T", C_TYPES[words[-1]])
        return _one(words[-1], [words[-1]] * count, f"({C_TYPES[words[-1]]})({text})")

    return row


def _logic(words: list[str]) -> Row:
    sign = {"and": "&", "or": "|", "xor": "^"}[words[0]]
    return _one(words[-1], [words[-1]] * 2, f"({C_TYPES[words[-1]]})(%0 {sign} %1)")


def _not(words: list[str]) -> Row:
    sign = "!" if words[-1] == "pred" else "~"
    return _one(words[-1], [words[-1]], f"({C_TYPES[words[-1]]}){sign}%0")


def _extreme_integer(words: list[str]) -> Row:
    type_, sign = words[-1], "<" if words[0] == "min" else ">"
    if not type_.endswith("x2"):
        return _one(type_, [type_] * 2, f"%0 {sign} %1 ? %0 : %1")
    lane = C_TYPES[type_.removesuffix("x2")]
    choice = f"[]({lane} a, {lane} b) {{ return a {sign} b ? a : b; }}"
    return _one(type_, [type_] * 2, f"ptx::pairs<{lane}>({choice}, %0, %1)")


def _extreme_relu(words: list[str]) -> Row:
    """Return min or max, clamped at zero from below."""
    sign = "<" if words[0] == "min" else ">"
    choice = f"a {sign} b ? (a > 0 ? a : 0) : (b > 0 ? b : 0)"
    if words[-1] == "s32":
        return _one("s32", ["s32"] * 2, f"[](i32 a, i32 b) {{ return {choice}; }}(%0, %1)")
    return _one(
        "s16x2", ["s16x2"] * 2, f"ptx::pairs<i16>([](i16 a, i16 b) {{ return (i16)({choice}); }}, %0, %1)"
    )


def _add_pairs(words: list[str]) -> Row:
    add = "[](u16 a, u16 b) { return (u16)(a + b); }"
    return _one(words[-1], [words[-1]] * 2, f"ptx::pairs<u16>({add}, %0, %1)")


def _product(words: list[str]) -> Row:
    """Return mul or mad, which keep a part of the full product."""
    kind, half, type_ = words
    c_type = C_TYPES[type_]
    write = f"{type_[0]}{2 * width(type_)}" if half == "wide" else type_
    text = {
        "lo": f"({c_type})(%0 * %1)",
        "hi": f"ptx::high_product<{c_type}>(%0, %1)",
        "wide": f"({C_TYPES[write]})%0 * %1" if half == "wide" else "",
    }[half]
    if kind == "mul":
        return _one(write, [type_] * 2, text)
    return _one(write, [type_, type_, write], f"({C_TYPES[write]})({text} + %2)")


def _shift(words: list[str]) -> Row:
    side = "left" if words[0] == "shl" else "right"
    return _one(words[-1], [words[-1], "u32"], f"ptx::{side}<{C_TYPES[words[-1]]}>(%0, %1)")


def _funnel(words: list[str]) -> Row:
    left, wrap = ("true" if is_set else "false" for is_set in (words[1] == "l", words[2] == "wrap"))
    return _one("b32", ["b32", "b32", "u32"], f"ptx::funnel<{left}, {wrap}>(%0, %1, %2)")


def _extract(words: list[str]) -> Row:
    return _one(words[1], [words[1], "u32", "u32"], f"ptx::extract<{C_TYPES[words[1]]}>(%0, %1, %2)")


def _insert(words: list[str]) -> Row:
    return _one(
        words[1], [words[1], words[1], "u32", "u32"], f"ptx::insert<{C_TYPES[words[1]]}>(%0, %1, %2, %3)"
    )


def _permute(words: list[str]) -> Row:
    mode = words[2].upper() if len(words) > 2 else "BY_NIBBLES"
    return _one("b32", ["b32", "b32", "b32"], f"ptx::prmt<ptx::{mode}>(%0, %1, %2)")


def _count(words: list[str]) -> Row:
    builtin = {
        "popc": "__builtin_popcountll(%0)",
        "clz": f"(%0 ? __builtin_clzll(%0) - {64 - width(words[1])}",
    }
    text = builtin[words[0]] + (f" : {width(words[1])})" if words[0] == "clz" else "")
    return _one("u32", [words[1]], f"(u32){text}")


def _dot_bytes(words: list[str]) -> Row:
    *_, a, b = words
    total = "u32" if (a, b) == ("u32", "u32") else "s32"
    if words[0] == "dp4a":
        lanes = ", ".join(f"{'u' if t == 'u32' else 'i'}8" for t in (a, b))
        return _one(total, ["b32", "b32", total], f"ptx::dp4a<{lanes}>(%0, %1, %2)")
    lanes = f"{'u' if a == 'u32' else 'i'}16, {'u' if b == 'u32' else 'i'}8"
    high = "true" if words[1] == "hi" else "false"
    return _one(total, ["b32", "b32", total], f"ptx::dp2a<{lanes}, {high}>(%0, %1, %2)")


# ---- floats -------------------------------------------------------------------------------------------------


def _float(template: str, count: int) -> Callable[[list[str]], Row]:
    """Return arithmetic on {a}, {b}, {c} in the type that the name ends with: f32 and f64 natively, f16 and bf16 in
    f32 and rounded once, pairs lane by lane."""

    def row(words: list[str]) -> Row:
        type_ = words[-1]
        lane = type_.removesuffix("x2")
        ftz, sat, relu = (_flag(words, word) for word in ("ftz", "sat", "relu"))
        inner, outer = {
            "f32": (f"ptx::flush<{ftz}>(@)", f"ptx::result<{ftz}, {sat}>(@)"),
            "f64": ("@", "@"),
        }.get(
            lane, (f"ptx::open<ptx::{lane}, {ftz}>(@)", f"ptx::close<ptx::{lane}, {ftz}, {sat}, {relu}>(@)")
        )
        names = "abc"[:count] if lane != type_ else [f"%{k}" for k in range(count)]
        operands = {key: inner.replace("@", name) for key, name in zip("abc", names, strict=False)}
        text = outer.replace("@", template.format(**operands))
        if lane != type_:
            lane_type = C_TYPES[lane]
            parameters = ", ".join(f"{lane_type} {name}" for name in names)
            passed = ", ".join(f"%{k}" for k in range(count))
            text = f"ptx::pairs<{lane_type}>([]({parameters}) {{ return {text}; }}, {passed})"
        return _one(type_, [type_] * count, text)

    return row


def _mixed(words: list[str]) -> Row:
    """Return f32 arithmetic on f16 or bf16 operands, except the last, an f32 that is added."""
    sat, half = _flag(words, "sat"), words[-1]
    factors = 2 if words[0] == "fma" else 1
    opened = [f"ptx::open<ptx::{half}, false>(%{k})" for k in range(factors)]
    sign = {"add": "+", "sub": "-"}.get(words[0])
    text = f"{opened[0]} {sign} %1" if sign else f"loom_math::fma({', '.join(opened)}, %2)"
    return _one("f32", [*[half] * factors, "f32"], f"ptx::result<false, {sat}>({text})")


def _extreme(words: list[str]) -> Row:
    flags = ("true" if words[0] == "max" else "false", _flag(words, "NaN"), _flag(words, "xorsign"))
    return _float(f"ptx::extreme<{', '.join(flags)}>({{a}}, {{b}})", 2)(words)


def _sign(words: list[str]) -> Row:
    """Return neg or abs: they change only the sign, even of a NaN; .ftz flushes the operand first."""
    type_, ftz = words[-1], _flag(words, "ftz")
    lane = type_.removesuffix("x2")
    bits = width(lane)
    mask = f"(u{bits})1 << {bits - 1}"
    text = f"(u{bits})(@ ^ {mask})" if words[0] == "neg" else f"(u{bits})(@ & ~({mask}))"
    if lane == "f32":
        text = f"bits<f32>({text.replace('@', f'bits<u32>(ptx::flush<{ftz}>(@))')})"
    elif lane == "f64":
        text = f"bits<f64>({text.replace('@', 'bits<u64>(@)')})"
    else:
        text = text.replace("@", f"ptx::flush16<ptx::{lane}, {ftz}>(@)")
    if lane == type_:
        return _one(type_, [type_], text.replace("@", "%0"))
    return _one(type_, [type_], f"ptx::pairs<u16>([](u16 a) {{ return {text.replace('@', 'a')}; }}, %0)")


_TESTS = {
    "finite": "(%0 - %0 == 0)",
    "infinite": "(%0 == %0 && %0 - %0 != 0)",
    "number": "(%0 == %0)",
    "notanumber": "(%0 != %0)",
    "normal": "__builtin_isnormal(%0)",
    "subnormal": "(%0 != 0 && %0 == %0 && %0 - %0 == 0 && !__builtin_isnormal(%0))",
}


def _test(words: list[str]) -> Row:
    return _one("pred", [words[2]], f"(bool){_TESTS[words[1]]}")


# ---- comparison and choice -----------------------------------------------------------------------------------

_ORDERED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}


def _compared(comparison: str, a: str, b: str, is_float: bool) -> str:
    """Return a comparison. On floats, `ne` and its like are false if either is NaN; `neu` and its like are true."""
    if comparison in _UNSIGNED:
        return f"({a} {_UNSIGNED[comparison]} {b})"
    if comparison in ("num", "nan"):
        text = f"({a} == {a} && {b} == {b})"
        return text if comparison == "num" else f"!{text}"
    if comparison not in _ORDERED:
        return f"({a} != {a} || {b} != {b} || {a} {_ORDERED[comparison[:2]]} {b})"
    if comparison == "ne" and is_float:
        return f"({a} < {b} || {a} > {b})"
    return f"({a} {_ORDERED[comparison]} {b})"


def _set_predicate(words: list[str]) -> Row:
    """Return setp: two predicates, the second the opposite; for a packed pair, one for the low and one for the high
    lane. A single f16 or bf16 has only the first."""
    comparison, type_, ftz = words[1], words[-1], _flag(words, "ftz")
    lane = type_.removesuffix("x2")
    joined = {"and": "&&", "or": "||", "xor": "!="}.get(words[2])
    reads = [type_, type_, *(["pred"] if joined else [])]
    if lane in ("f16", "bf16"):
        opened = f"ptx::open<ptx::{lane}, {ftz}>((u16)(@))"
    else:
        opened = f"ptx::flush<{ftz}>(@)" if lane == "f32" else "@"
    texts = []
    for half in range(2 if type_ != lane else 1):
        a, b = (opened.replace("@", f"%{k}{f' >> {16 * half}' if half else ''}") for k in range(2))
        texts.append(_compared(comparison, a, b, lane in FLOATS))
    if type_ == lane and lane not in ("f16", "bf16"):
        texts.append(f"!{texts[0]}")
    if joined:
        texts = [f"({text} {joined} %2)" for text in texts]
    return Row(("pred",) * len(texts), tuple(reads), tuple(texts))


def _select(words: list[str]) -> Row:
    return _one(words[1], [words[1], words[1], "pred"], "%2 ? %0 : %1")


def _move(words: list[str]) -> Row:
    return _one(words[1], [words[1]], "%0")


def _nothing(words: list[str]) -> Row:
    return Row((), ("u32",) if words[0] == "nanosleep" else (), ())


# ---- conversions ---------------------------------------------------------------------------------------------

_WHOLE = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
_MODES = {"rn": "ptx::NEAREST", "rz": "ptx::TOWARD_ZERO"}


def _widened(type_: str, ftz: str = "false") -> str:
    """Return %0 as f32, or unchanged if it is f64."""
    if type_ in ("f16", "bf16"):
        return f"ptx::open<ptx::{type_}, false>(%0)"
    return f"ptx::flush<{ftz}>(%0)" if type_ == "f32" else "%0"


def _resize(words: list[str]) -> Row:
    to, source = words[-2:]
    text = f"ptx::clamp_to<{C_TYPES[to]}>(%0)" if "sat" in words else f"({C_TYPES[to]})%0"
    return _one(to, [source], text)


def _to_integer(words: list[str]) -> Row:
    to, source = words[-2:]
    rounded = f"loom_math::{_WHOLE[words[1]]}((f64){_widened(source, _flag(words, 'ftz'))})"
    wide = "true" if source == "f64" else "false"
    return _one(to, [source], f"ptx::whole<{C_TYPES[to]}, {wide}>({rounded})")


def _from_integer(words: list[str]) -> Row:
    to, source = words[-2:]
    if to in ("f32", "f64"):
        return _one(to, [source], f"({to})%0")
    return _one(to, [source], f"ptx::close<ptx::{to}, false, false, false>(ptx::odd_from(%0))")


def _to_float(words: list[str]) -> Row:
    """Return a conversion between f16, bf16, f32 and f64, with at most one rounding, or to an integral value."""
    to, source = words[-2:]
    ftz, sat = _flag(words, "ftz"), _flag(words, "sat")
    text = _widened(source, ftz)
    if words[1] in _WHOLE:
        text = f"loom_math::{_WHOLE[words[1]]}({text})"
    if to == "f64":
        return _one(to, [source], f"(f64){text}")
    if to == "f32":
        if source == "f64":
            text = f"f32_from_f64_rtz({text})" if "rz" in words else f"(f32){text}"
        return _one(to, [source], f"ptx::result<{ftz}, {sat}>({text})")
    if source == "f64":
        text = f"f32_odd_from_f64({text})"
    if "sat" in words:
        text = f"ptx::to_unit_interval({text})"
    options = (
        f"{_MODES['rz' if 'rz' in words else 'rn']}, {_flag(words, 'satfinite')}, {_flag(words, 'relu')}"
    )
    return _one(to, [source], f"(u16)ptx::encode<ptx::{to}, {options}>({text})")


def _to_pair(words: list[str]) -> Row:
    """Return two small floats from two f32, or from a pair of f16 or bf16; the first is the high one."""
    to, source = words[-2:]
    format_, c_type = f"ptx::{to.removesuffix('x2')}", C_TYPES[to]
    if words[1] == "rs":
        options = f"{format_}, {_flag(words, 'satfinite')}, {_flag(words, 'relu')}"
        return _one(to, ["f32", "f32", "b32"], f"ptx::encode_two<{options}>(%0, %1, %2)")
    options = f"{format_}, {_MODES[words[1]]}, {_flag(words, 'satfinite')}, {_flag(words, 'relu')}"
    lanes, reads = ("%0", "%1"), ["f32", "f32"]
    if source != "f32":
        pair = f"ptx::{source.removesuffix('x2')}"
        lanes, reads = (f"ptx::high_of<{pair}>(%0)", f"ptx::low_of<{pair}>(%0)"), [source]
    high, low = (f"ptx::encode<{options}>({lane})" for lane in lanes)
    return _one(to, reads, f"({c_type})ptx::two<{format_}>({high}, {low})")


def _to_four(words: list[str]) -> Row:
    to = words[-2]
    options = f"ptx::{to.removesuffix('x4')}, {_flag(words, 'relu')}"
    text = f"({C_TYPES[to]})ptx::encode_four<{options}>(%0, %1, %2, %3, %4)"
    return _one(to, ["f32"] * 4 + ["b32"], text)


def _from_pair(words: list[str]) -> Row:
    format_ = f"ptx::{words[-1].removesuffix('x2')}"
    encode = f"ptx::encode<ptx::f16, ptx::NEAREST, false, {_flag(words, 'relu')}>"
    high, low = (f"{encode}(ptx::{half}_of<{format_}>(%0))" for half in ("high", "low"))
    return _one("f16x2", [words[-1]], f"ptx::two<ptx::f16>({high}, {low})")


def _to_exponents(words: list[str]) -> Row:
    up, source = "true" if words[1] == "rp" else "false", words[-1]
    encode = f"ptx::ue8m0<{up}, {_flag(words, 'satfinite')}>"
    if source == "f32":
        return _one("ue8m0x2", ["f32", "f32"], f"(u16)({encode}(%0) << 8 | {encode}(%1))")
    high, low = (f"{encode}(ptx::{half}_of<ptx::bf16>(%0))" for half in ("high", "low"))
    return _one("ue8m0x2", ["bf16x2"], f"(u16)({high} << 8 | {low})")


def _from_exponents(words: list[str]) -> Row:
    return _one("bf16x2", ["ue8m0x2"], "ptx::bf16_from_ue8m0(%0 >> 8) << 16 | ptx::bf16_from_ue8m0(%0 & 255)")


def _to_tf32(words: list[str]) -> Row:
    return _one("tf32", ["f32"], f"ptx::tf32<{('rn', 'rna', 'rz').index(words[1])}>(%0)")


# ---- the table -----------------------------------------------------------------------------------------------

_I = "(u16|s16|u32|s32|u64|s64)"
_ANY_I = "(u8|s8|u16|s16|u32|s32|u64|s64)"
_BITS = "(b16|b32|b64)"
_TO_WHOLE = "(rni|rzi|rmi|rpi)"
_F_COMPARE = "(eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan)"
_JOIN = "{.(and|or|xor)}"
_ULP = "below 1 ulp"
_SIXTEEN = "below 0.51 ulp"

FAMILIES = (
    # moves
    Family(f"mov.(pred|b16|b32|b64|{_I[1:-1]}|f32|f64)", EXACT, _move),
    Family(f"selp.(b16|b32|b64|{_I[1:-1]}|f32|f64)", EXACT, _select),
    # integers
    Family(f"add.{_I}", EXACT, _integer("%0 + %1")),
    Family(f"sub.{_I}", EXACT, _integer("%0 - %1")),
    Family("add.(u16x2|s16x2)", EXACT, _add_pairs),
    Family("(add|sub).sat.s32", EXACT, lambda w: _one(
        "s32", ["s32", "s32"], f"ptx::clamp_to<i32>((i64)%0 {'+' if w[0] == 'add' else '-'} %1)")),
    Family(f"(mul|mad).(lo|hi).{_I}", EXACT, _product),
    Family("(mul|mad).wide.(u16|s16|u32|s32)", EXACT, _product),
    Family(f"div.{_I}", "exact; x / 0 is all ones", lambda w: _integer(f"div{w[1][0]}<T>(%0, %1)")(w)),
    Family(f"rem.{_I}", "exact; x % 0 is x", lambda w: _integer(f"rem{w[1][0]}<T>(%0, %1)")(w)),
    Family("neg.(s16|s32|s64)", EXACT, _integer("-%0", 1)),
    Family("abs.(s16|s32|s64)", EXACT, _integer("%0 < 0 ? -%0 : %0", 1)),
    Family("(min|max).(u16|s16|u32|s32|u64|s64|u16x2|s16x2)", EXACT, _extreme_integer),
    Family("(min|max).relu.(s32|s16x2)", EXACT, _extreme_relu),
    Family("(dp4a|dp2a.lo|dp2a.hi).(u32|s32).(u32|s32)", EXACT, _dot_bytes),
    # bits
    Family("(and|or|xor).(pred|b16|b32|b64)", EXACT, _logic),
    Family("not.(pred|b16|b32|b64)", EXACT, _not),
    Family(f"shl.{_BITS}", EXACT, _shift),
    Family("shr.(b16|b32|b64|u16|s16|u32|s32|u64|s64)", EXACT, _shift),
    Family("shf.(l|r).(wrap|clamp).b32", EXACT, _funnel),
    Family("bfe.(u32|s32|u64|s64)", EXACT, _extract),
    Family("bfi.(b32|b64)", EXACT, _insert),
    Family("prmt.b32{.(f4e|b4e|rc8|ecl|ecr|rc16)}", EXACT, _permute),
    Family("lop3.b32", EXACT, lambda w: _one("b32", ["b32", "b32", "b32", "#"], "ptx::lop3<%3>(%0, %1, %2)")),
    Family("(popc|clz).(b32|b64)", EXACT, _count),
    Family("brev.(b32|b64)", EXACT, _integer("loom_math::brev(%0)", 1)),
    # floats
    Family("add{.rn}{.ftz}{.sat}.f32", EXACT, _float("{a} + {b}", 2)),
    Family("sub{.rn}{.ftz}{.sat}.f32", EXACT, _float("{a} - {b}", 2)),
    Family("mul{.rn}{.ftz}{.sat}.f32", EXACT, _float("{a} * {b}", 2)),
    Family("(fma|mad).rn{.ftz}{.sat}.f32", EXACT, _float("loom_math::fma({a}, {b}, {c})", 3)),
    Family("(add|sub){.rn}{.sat}.f32.(f16|bf16)", EXACT, _mixed),
    Family("fma.rn{.sat}.f32.(f16|bf16)", EXACT, _mixed),
    Family("add{.rn}{.ftz}.f32x2", EXACT, _float("{a} + {b}", 2)),
    Family("sub{.rn}{.ftz}.f32x2", EXACT, _float("{a} - {b}", 2)),
    Family("mul{.rn}{.ftz}.f32x2", EXACT, _float("{a} * {b}", 2)),
    Family("fma.rn{.ftz}.f32x2", EXACT, _float("loom_math::fma({a}, {b}, {c})", 3)),
    Family("add{.rn}.f64", EXACT, _float("{a} + {b}", 2)),
    Family("sub{.rn}.f64", EXACT, _float("{a} - {b}", 2)),
    Family("mul{.rn}.f64", EXACT, _float("{a} * {b}", 2)),
    Family("(fma|mad).rn.f64", EXACT, _float("loom_math::fma({a}, {b}, {c})", 3)),
    Family("add{.rn}{.ftz}{.sat}.(f16|f16x2)", EXACT, _float("{a} + {b}", 2)),
    Family("sub{.rn}{.ftz}{.sat}.(f16|f16x2)", EXACT, _float("{a} - {b}", 2)),
    Family("mul{.rn}{.ftz}{.sat}.(f16|f16x2)", EXACT, _float("{a} * {b}", 2)),
    Family("fma.rn{.ftz}{.(sat|relu)}.(f16|f16x2)", EXACT, _float("ptx::fused16({a}, {b}, {c})", 3)),
    Family("add{.rn}.(bf16|bf16x2)", EXACT, _float("{a} + {b}", 2)),
    Family("sub{.rn}.(bf16|bf16x2)", EXACT, _float("{a} - {b}", 2)),
    Family("mul{.rn}.(bf16|bf16x2)", EXACT, _float("{a} * {b}", 2)),
    Family("fma.rn{.relu}.(bf16|bf16x2)", EXACT, _float("ptx::fused16({a}, {b}, {c})", 3)),
    Family("div.(rn|full){.ftz}.f32", EXACT, _float("{a} / {b}", 2)),
    Family("div.approx{.ftz}.f32", "exact; 0 where 2^126 < divisor", _float("ptx::div_approx({a}, {b})", 2)),
    Family("div.rn.f64", EXACT, _float("{a} / {b}", 2)),
    Family("sqrt.(rn|approx){.ftz}.f32", EXACT, _float("loom_math::sqrt({a})", 1)),
    Family("sqrt.rn.f64", EXACT, _float("loom_math::sqrt({a})", 1)),
    Family("rcp.(rn|approx){.ftz}.f32", EXACT, _float("1 / {a}", 1)),
    Family("rcp.rn.f64", EXACT, _float("1 / {a}", 1)),
    Family("rsqrt.approx{.ftz}.f32", "below 0.501 ulp", _float("ptx::rsqrt_approx({a})", 1)),
    Family("ex2.approx{.ftz}.f32", _ULP, _float("loom_math::exp2({a})", 1)),
    Family("lg2.approx{.ftz}.f32", _ULP, _float("loom_math::log2({a})", 1)),
    Family("sin.approx{.ftz}.f32", _ULP, _float("loom_math::sin({a})", 1)),
    Family("cos.approx{.ftz}.f32", _ULP, _float("loom_math::cos({a})", 1)),
    Family("tanh.approx.f32", _ULP, _float("loom_math::tanh({a})", 1)),
    Family("ex2.approx.(f16|f16x2|ftz.bf16|ftz.bf16x2)", _SIXTEEN, _float("loom_math::exp2({a})", 1)),
    Family("tanh.approx.(f16|f16x2|bf16|bf16x2)", _SIXTEEN, _float("loom_math::tanh({a})", 1)),
    Family("(min|max){.ftz}{.NaN}{.xorsign.abs}.(f32|f16|f16x2)", EXACT, _extreme),
    Family("(min|max){.NaN}{.xorsign.abs}.(bf16|bf16x2)", EXACT, _extreme),
    Family("(min|max).f64", EXACT, _extreme),
    Family("(neg|abs){.ftz}.(f32|f16|f16x2)", EXACT, _sign),
    Family("(neg|abs).(f64|bf16|bf16x2)", EXACT, _sign),
    Family("copysign.(f32|f64)", EXACT, lambda w: _one(w[1], [w[1], w[1]], "ptx::copysign(%0, %1)")),
    Family("testp.(finite|infinite|number|notanumber|normal|subnormal).(f32|f64)", EXACT, _test),
    # comparisons
    Family(f"setp.(eq|ne){_JOIN}.{_BITS}", EXACT, _set_predicate),
    Family(f"setp.(eq|ne|lt|le|gt|ge){_JOIN}.{_I}", EXACT, _set_predicate),
    Family(f"setp.(lo|ls|hi|hs){_JOIN}.(u16|u32|u64)", EXACT, _set_predicate),
    Family(f"setp.{_F_COMPARE}{_JOIN}{{.ftz}}.(f32|f16|f16x2)", EXACT, _set_predicate),
    Family(f"setp.{_F_COMPARE}{_JOIN}.(f64|bf16|bf16x2)", EXACT, _set_predicate),
    # conversions
    Family(f"cvt{{.sat}}.{_ANY_I}.{_ANY_I}", EXACT, _resize),
    Family(f"cvt.{_TO_WHOLE}{{.ftz}}{{.sat}}.{_ANY_I}.f32", EXACT, _to_integer),
    Family(f"cvt.{_TO_WHOLE}{{.sat}}.{_ANY_I}.(f16|f64)", EXACT, _to_integer),
    Family(f"cvt.{_TO_WHOLE}.{_ANY_I}.bf16", EXACT, _to_integer),
    Family(f"cvt.rn.(f16|bf16|f32|f64).{_ANY_I}", EXACT, _from_integer),
    Family("cvt{.ftz}{.sat}.f32.(f16|bf16|f32)", EXACT, _to_float),
    Family(f"cvt.{_TO_WHOLE}{{.ftz}}{{.sat}}.f32.f32", EXACT, _to_float),
    Family(f"cvt.{_TO_WHOLE}.f64.f64", EXACT, _to_float),
    Family("cvt.(rn|rz){.ftz}{.sat}.f32.f64", EXACT, _to_float),
    Family("cvt.f64.(f16|bf16|f32)", EXACT, _to_float),
    Family("cvt.(rn|rz){.relu}{.satfinite}.(f16|bf16).f32", EXACT, _to_float),
    Family("cvt.rn{.ftz}{.sat}.f16.f32", EXACT, _to_float),
    Family("cvt.(rn|rz).(f16|bf16).f64", EXACT, _to_float),
    Family("cvt.(rn|rz).(f16.bf16|bf16.f16)", EXACT, _to_float),
    Family("cvt.bf16.f16", "exact, to nearest", _to_float),
    Family("cvt.(rna|rn|rz).tf32.f32", EXACT, _to_tf32),
    Family("cvt.(rn|rz|rs){.relu}{.satfinite}.(f16x2|bf16x2).f32", EXACT, _to_pair),
    Family("cvt.rn.satfinite{.relu}.(e4m3x2|e5m2x2|e2m3x2|e3m2x2|e2m1x2).(f32|f16x2|bf16x2)", EXACT, _to_pair),
    Family("cvt.rn.relu.satfinite.(e4m3x2|e5m2x2|e2m3x2|e3m2x2|e2m1x2).(f32|f16x2|bf16x2)", EXACT, _to_pair),
    Family("cvt.rn{.relu}.f16x2.(e4m3x2|e5m2x2|e2m3x2|e3m2x2|e2m1x2)", EXACT, _from_pair),
    Family("cvt.rs{.relu}.satfinite.(e4m3x4|e5m2x4|e2m3x4|e3m2x4|e2m1x4).f32", EXACT, _to_four),
    Family("cvt.(rz|rp){.satfinite}.ue8m0x2.(f32|bf16x2)", EXACT, _to_exponents),
    Family("cvt.rn.bf16x2.ue8m0x2", EXACT, _from_exponents),
    # waits that a program on a CPU does not need
    Family("griddepcontrol.(wait|launch_dependents)", "does nothing", _nothing),
    Family("nanosleep.u32", "does nothing", _nothing),
)  # fmt: skip


def support_table() -> str:
    """Return the Markdown table of the instructions and the error of their results."""
    rows = [f"| `{family.pattern}` | {family.error} |".replace("|", "\\|") for family in FAMILIES]
    rows = [re.sub(r"^\\\||(?<=`) \\\||\\\|$", lambda m: m[0].replace("\\", ""), row) for row in rows]
    return "\n".join(["| instruction | error |", "|---|---|", *rows])


if __name__ == "__main__":
    print(support_table())
