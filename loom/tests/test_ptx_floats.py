"""PTX on floats: arithmetic, extremes, signs and comparisons of f32, f64, f16 and bf16, singly and in pairs; and the
approximations within the error that the table states."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from assembled import (
    NAN16,
    Array,
    Batch,
    Case,
    Group,
    Reference,
    any_bits,
    bits32,
    execute,
    f32,
    flushed16,
    flushed32,
    half_bits,
    to_odd,
    verify,
)
from formats import BF16, F16, Format
from triton_loom.testing import check


def f32_inputs(count: int = 3) -> tuple[Array, ...]:
    """Return random bits, ordinary numbers, and all pairs of special values."""
    special = [
        0,
        1,
        0x7FFFFF,
        0x800000,
        0x3F7FFFFF,
        0x3F800000,
        0x40000000,
        0x7F7FFFFF,
        0x7F800000,
        0x7FC00000,
        0x7F800001,
    ]
    special += [s | 0x80000000 for s in special]
    pairs = np.array(list(itertools.product(special, repeat=2)), np.uint32)
    columns = []
    for i in range(count):
        ordinary = np.random.normal(0, 2, 2000).astype(np.float32).view(np.uint32)
        columns.append(np.concatenate([pairs[:, i % 2], any_bits(32, 3000), ordinary]))
    return tuple(columns)


def extreme(x: Array, y: Array, name: str, nan_wins: bool, xorsign: bool) -> Array:
    """Return min or max of float64 numbers, in the order of (number, sign of zero)."""
    if xorsign:
        sign = np.where(np.signbit(x) ^ np.signbit(y), -1.0, 1.0)
        return np.copysign(extreme(np.abs(x), np.abs(y), name, nan_wins, False), sign)
    below = (x < y) | ((x == y) & np.signbit(x) & ~np.signbit(y))
    chosen = np.where(below == (name == "min"), x, y)
    nan_x, nan_y = np.isnan(x), np.isnan(y)
    chosen = np.where(nan_x, x if nan_wins else y, chosen)
    return np.where(nan_y & ~nan_x, y if nan_wins else x, chosen)


TESTS: dict[str, Callable[[Array], Array]] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "notanumber": np.isnan,
    "number": lambda x: ~np.isnan(x),
    "normal": lambda x: np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).smallest_normal),
    "subnormal": lambda x: (x != 0) & (np.abs(x) < np.finfo(x.dtype).smallest_normal),
}
TWO: dict[str, Callable[[Array, Array], Array]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
}  # fmt: skip


def f32_arithmetic() -> Batch:
    cases = []
    for ftz, sat in itertools.product((False, True), repeat=2):
        suffix = ".ftz" * ftz + ".sat" * sat + ".f32"

        def inputs(arrays: tuple[Array, ...], ftz: bool = ftz) -> list[Array]:
            return [f32(flushed32(a) if ftz else a) for a in arrays]

        for name, f in TWO.items():
            for rn in ("", ".rn"):
                cases.append(
                    Case(
                        f"{name}{rn}{suffix} {{d}}, {{a}}, {{b}};",
                        32,
                        lambda a, b, c, f=f, ftz=ftz, sat=sat, i=inputs: bits32(f(*i((a, b))), ftz, sat),
                    )
                )

        def fused(a: Array, b: Array, c: Array, ftz: bool = ftz, sat: bool = sat, i: Any = inputs) -> Array:
            x, y, z = (v.astype(np.float64) for v in i((a, b, c)))
            return bits32(to_odd(x * y, z).astype(np.float32), ftz, sat)

        for name in ("fma", "mad"):
            cases.append(Case(f"{name}.rn{suffix} {{d}}, {{a}}, {{b}}, {{c}};", 32, fused))
        if not sat:
            for kind in ("rn", "full"):
                cases.append(
                    Case(
                        f"div.{kind}{suffix} {{d}}, {{a}}, {{b}};",
                        32,
                        lambda a, b, c, ftz=ftz, i=inputs: bits32(np.divide(*i((a, b))), ftz),
                    )
                )
            for kind in ("rn", "approx"):
                cases.append(
                    Case(
                        f"rcp.{kind}{suffix} {{d}}, {{a}};",
                        32,
                        lambda a, b, c, ftz=ftz, i=inputs: bits32(np.float32(1) / i((a,))[0], ftz),
                    )
                )
                cases.append(
                    Case(
                        f"sqrt.{kind}{suffix} {{d}}, {{a}};",
                        32,
                        lambda a, b, c, ftz=ftz, i=inputs: bits32(np.sqrt(i((a,))[0]), ftz),
                    )
                )

            def divided(a: Array, b: Array, c: Array, ftz: bool = ftz, i: Any = inputs) -> Array:
                x, y = i((a, b))
                large = (np.abs(y) > 2.0**126) & np.isfinite(y)
                zero = np.copysign(np.float32(0), x) * np.sign(y)
                return bits32(np.where(large, np.where(np.isinf(x) | np.isnan(x), np.nan, zero), x / y), ftz)

            cases.append(Case(f"div.approx{suffix} {{d}}, {{a}}, {{b}};", 32, divided))
    return Batch(f32_inputs(), tuple(cases))


def f32_signs_and_order() -> Batch:
    cases = []
    for name, ftz, nan, xorsign in itertools.product(("min", "max"), *[(False, True)] * 3):

        def chosen(
            a: Array, b: Array, name: str = name, ftz: bool = ftz, nan: bool = nan, xorsign: bool = xorsign
        ) -> Array:
            x, y = (f32(flushed32(v) if ftz else v).astype(np.float64) for v in (a, b))
            return bits32(extreme(x, y, name, nan, xorsign).astype(np.float32))

        text = f"{name}{'.ftz' * ftz}{'.NaN' * nan}{'.xorsign.abs' * xorsign}.f32 {{d}}, {{a}}, {{b}};"
        cases.append(Case(text, 32, chosen))
    cases += [
        Case("neg.f32 {d}, {a};", 32, lambda a, b: a ^ np.uint32(1 << 31)),
        Case("abs.f32 {d}, {a};", 32, lambda a, b: a & np.uint32(0x7FFFFFFF)),
        Case("neg.ftz.f32 {d}, {a};", 32, lambda a, b: flushed32(a) ^ np.uint32(1 << 31)),
        Case("abs.ftz.f32 {d}, {a};", 32, lambda a, b: flushed32(a) & np.uint32(0x7FFFFFFF)),
        Case("copysign.f32 {d}, {a}, {b};", 32, lambda a, b: np.copysign(f32(b), f32(a)).view(np.uint32)),
        Case("mov.f32 {d}, {a};", 32, lambda a, b: a),
        Case("mov.f32 {d}, 1.4426950408889634;", 32, lambda a, b: np.full_like(a, 0x3FB8AA3B)),
        Case("mov.f32 {d}, 0f3F800001;", 32, lambda a, b: np.full_like(a, 0x3F800001)),
        Case("mov.b32 {d}, -2;", 32, lambda a, b: np.full_like(a, 0xFFFFFFFE)),
        Case("mov.u32 {d}, 0xDEADBEEFU;", 32, lambda a, b: np.full_like(a, 0xDEADBEEF)),
    ]
    for name, test in TESTS.items():
        text = f"{{{{ .reg .pred p; testp.{name}.f32 p, {{a}}; selp.f32 {{d}}, 0f00000001, 0.0, p; }}}}"
        cases.append(Case(text, 32, lambda a, b, test=test: test(f32(a)).astype(np.uint32)))
    return Batch(f32_inputs(2), tuple(cases))


ORDER: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "ne": lambda x, y: (x < y) | (x > y),
}  # fmt: skip
ORDER |= {f"{name}u": lambda x, y, f=f: f(x, y) | np.isnan(x) | np.isnan(y) for name, f in ORDER.items()}
ORDER |= {"num": lambda x, y: ~(np.isnan(x) | np.isnan(y)), "nan": lambda x, y: np.isnan(x) | np.isnan(y)}


JOINED: dict[str, Callable[[Array, Array], Array]] = {
    "": lambda found, known: found,
    ".and": np.logical_and,
    ".or": np.logical_or,
    ".xor": np.logical_xor,
}


def float_compare(kind: str) -> Batch:
    """Return every comparison, with every way of joining a predicate, and the second predicate if there is one. With
    .ftz, which is the same on other numbers, only plain comparisons."""
    widen: dict[str, Callable[[Array], Array]] = {
        "f32": f32,
        "f64": lambda u: u.view(np.float64),
        "f16": lambda u: F16.values[u],
        "bf16": lambda u: BF16.values[u],
    }
    flush: dict[str, Callable[[Array], Array]] = {"f32": flushed32, "f16": lambda u: flushed16(F16, u)}
    bits = {"f32": 32, "f64": 64}.get(kind, 16)
    second = bits > 16
    cases = []
    for (name, f), ftz in itertools.product(ORDER.items(), (False, True) if kind in flush else (False,)):
        text = f"{{{{ .reg .pred p, q, known; setp.eq.b{bits} known, {{b}}, {{c}}; mov.b32 {{d}}, 0;"
        for k, join in enumerate(JOINED if not ftz else [""]):
            known = ", known" if join else ""
            text += (
                f" setp.{name}{join}{'.ftz' * ftz}.{kind} {'p|q' if second else 'p'}, {{a}}, {{b}}{known};"
            )
            text += f" @p or.b32 {{d}}, {{d}}, {1 << k};"
            text += f" @q or.b32 {{d}}, {{d}}, {16 << k};" if second else ""

        def reference(a: Array, b: Array, c: Array, f: Any = f, ftz: bool = ftz) -> Array:
            x, y = (widen[kind](flush[kind](u) if ftz else u) for u in (a, b))
            mask = np.zeros(len(a), np.uint32)
            for k, join in enumerate(JOINED.values() if not ftz else [JOINED[""]]):
                mask |= join(f(x, y), b == c).astype(np.uint32) << k
                mask |= join(~f(x, y), b == c).astype(np.uint32) << (4 + k) if second else np.uint32(0)
            return mask

        cases.append(Case(text + " }}", 32, reference))
    a, b, c = {"f32": f32_inputs, "f64": f64_inputs}.get(
        kind, lambda: half_inputs(F16 if kind == "f16" else BF16)
    )()
    c[::2] = b[::2]
    return Batch((a, b, c), tuple(cases))


def pair_compare(kind: str) -> Batch:
    """Return comparisons of packed pairs: a predicate for the low lane and one for the high lane."""
    format_ = F16 if kind == "f16x2" else BF16
    cases = []
    for (name, f), ftz in itertools.product(ORDER.items(), (False, True) if kind == "f16x2" else (False,)):
        text = "{{ .reg .pred p, q, known; setp.eq.b32 known, {b}, {c}; mov.b32 {d}, 0;"
        for k, join in enumerate(JOINED if not ftz else [""]):
            known = ", known" if join else ""
            text += f" setp.{name}{join}{'.ftz' * ftz}.{kind} p|q, {{a}}, {{b}}{known};"
            text += f" @p or.b32 {{d}}, {{d}}, {1 << k}; @q or.b32 {{d}}, {{d}}, {16 << k};"

        def reference(a: Array, b: Array, c: Array, f: Any = f, ftz: bool = ftz) -> Array:
            mask = np.zeros(len(a), np.uint32)
            for half in (0, 1):
                codes = ((u >> 16 * half & 0xFFFF).astype(np.uint16) for u in (a, b))
                x, y = (format_.values[flushed16(format_, u) if ftz else u] for u in codes)
                for k, join in enumerate(JOINED.values() if not ftz else [JOINED[""]]):
                    mask |= join(f(x, y), b == c).astype(np.uint32) << (4 * half + k)
            return mask

        cases.append(Case(text + " }}", 32, reference))
    a, b, c = paired(*half_inputs(format_))
    c[::2] = b[::2]
    return Batch((a, b, c), tuple(cases))


def f64_inputs() -> tuple[Array, ...]:
    columns = []
    for _ in range(3):
        special = np.array([0.0, -0.0, 1, -1, np.inf, -np.inf, 5e-324, 2.0**-1022, 1.5, 1e308])
        numbers = np.concatenate([np.random.permutation(np.repeat(special, 20)), np.random.normal(0, 3, 500)])
        columns.append(np.concatenate([numbers.view(np.uint64), any_bits(64, 500)]))
    return tuple(columns)


def f64_arithmetic() -> Batch:
    """Return f64 arithmetic. NaN has no defined bits here: where the truth is NaN, zeros are compared."""

    def hidden(x: Array) -> Array:
        return np.where(np.isnan(x), 0, np.ascontiguousarray(x).view(np.uint64))

    def case(text: str, f: Callable[..., Array]) -> Case:
        quiet = f"{{{{ .reg .b64 t; .reg .pred p; {text} testp.number.f64 p, t; selp.b64 {{d}}, t, 0, p; }}}}"
        return Case(quiet, 64, lambda *x: hidden(f(*(v.view(np.float64) for v in x))))

    cases = [
        case(f"{name}{rn}.f64 t, {{a}}, {{b}};", lambda a, b, c, f=f: f(a, b))
        for name, f in TWO.items()
        for rn in ("", ".rn")
    ]
    cases += [
        case("div.rn.f64 t, {a}, {b};", lambda a, b, c: a / b),
        case("rcp.rn.f64 t, {a};", lambda a, b, c: 1 / a),
        case("sqrt.rn.f64 t, {a};", lambda a, b, c: np.sqrt(a)),
        *(
            case(
                f"{name}.rn.f64 t, {{a}}, {{b}}, {{c}};",
                lambda a, b, c: np.array([fused(*row) for row in zip(a, b, c, strict=True)]),
            )
            for name in ("fma", "mad")
        ),
        case("min.f64 t, {a}, {b};", lambda a, b, c: extreme(a, b, "min", False, False)),
        case("max.f64 t, {a}, {b};", lambda a, b, c: extreme(a, b, "max", False, False)),
        case("neg.f64 t, {a};", lambda a, b, c: -a),
        case("abs.f64 t, {a};", lambda a, b, c: np.abs(a)),
        case("copysign.f64 t, {a}, {b};", lambda a, b, c: np.copysign(b, a)),
        case("mov.f64 t, 0d3FF8000000000000;", lambda a, b, c: np.full_like(a, 1.5)),
        case("mov.f64 t, -2.5e3;", lambda a, b, c: np.full_like(a, -2500)),
        case("selp.f64 t, {a}, {b}, 1;", lambda a, b, c: a),
    ]
    for name, test in TESTS.items():
        text = f"{{{{ .reg .pred p; testp.{name}.f64 p, {{a}}; selp.b64 {{d}}, 1, 0, p; }}}}"
        cases.append(Case(text, 64, lambda a, b, c, test=test: test(a.view(np.float64)).astype(np.uint64)))
    return Batch(f64_inputs(), tuple(cases))


def fused(a: float, b: float, c: float) -> float:
    """Return a b + c of float64 with one rounding, by Python's rational numbers."""
    from fractions import Fraction

    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c if not (math.isfinite(a) and math.isfinite(b)) else 0.0 + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c
    try:
        return float(exact) if float(exact) else 0.0 if exact > 0 else -0.0
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


# ---- f16 and bf16: tables ---------------------------------------------------------------------------------


def half_inputs(format_: Format) -> tuple[Array, ...]:
    """Return all pairs of 80 codes of every kind, with a random third."""
    ends = [
        0,
        1,
        2,
        (1 << format_.mantissa) - 1,
        1 << format_.mantissa,
        0x7FFF,
        0x7E00,
        0x3C00,
        0x3F80,
        0x7F80,
        0x7F7F,
        0x7BFF,
        0x7C00,
    ]
    codes = np.unique(np.concatenate([ends, np.array(ends) + 0x8000, any_bits(16, 50)]).astype(np.uint16))
    pairs = np.array(list(itertools.product(codes, repeat=2)), np.uint16)
    near = np.random.normal(0, 1, (3, 3000))
    columns = [pairs[:, 0], pairs[:, 1], any_bits(16, len(pairs))]
    return tuple(np.concatenate([c, format_.encode(x)]) for c, x in zip(columns, near, strict=True))


def paired(*columns: Array) -> list[Array]:
    """Return registers with two 16-bit values, the second from another position."""
    return [c.astype(np.uint32) | np.roll(c, 7).astype(np.uint32) << 16 for c in columns]


def in_pairs(f: Reference) -> Reference:
    def reference(*columns: Array) -> Array:
        low, high = (
            f(*((c >> s & 0xFFFF).astype(np.uint16) for c in columns)).astype(np.uint32) for s in (0, 16)
        )
        return (high << 16 | low).astype(np.uint32)

    return reference


def half_batch(kind: str, pairs: bool) -> Batch:
    format_ = F16 if kind == "f16" else BF16
    type_, bits = (f"{kind}x2", 32) if pairs else (kind, 16)
    cases: list[Case] = []

    def add(text: str, f: Reference) -> None:
        cases.append(Case(text, bits, in_pairs(f) if pairs else f))

    for ftz, end in itertools.product((False, True) if kind == "f16" else (False,), ("", ".sat", ".relu")):
        if kind == "bf16" and end == ".sat":
            continue
        options = {"ftz": ftz, "sat": end == ".sat", "relu": end == ".relu"}

        def wide(*codes: Array, ftz: bool = ftz) -> list[Array]:
            return [format_.values[flushed16(format_, c) if ftz else c] for c in codes]

        suffix = ".ftz" * ftz + end + f".{type_}"
        if end != ".relu":
            for name, f in {
                "add": to_odd,
                "sub": lambda x, y: to_odd(x, -y),
                "mul": lambda x, y: x * y,
            }.items():
                add(
                    f"{name}{suffix} {{d}}, {{a}}, {{b}};",
                    lambda a, b, c, f=f, o=options, w=wide: half_bits(format_, f(*w(a, b)), **o),
                )
                add(
                    f"{name}.rn{suffix} {{d}}, {{a}}, {{b}};",
                    lambda a, b, c, f=f, o=options, w=wide: half_bits(format_, f(*w(a, b)), **o),
                )

        def multiplied(a: Array, b: Array, c: Array, o: Any = options, w: Any = wide) -> Array:
            x, y, z = w(a, b, c)
            return half_bits(format_, to_odd(x * y, z), **o)

        add(f"fma.rn{suffix} {{d}}, {{a}}, {{b}}, {{c}};", multiplied)
    for name, ftz, nan, xorsign in itertools.product(
        ("min", "max"), (False, True) if kind == "f16" else (False,), *[(False, True)] * 2
    ):

        def chosen(
            a: Array,
            b: Array,
            c: Array,
            name: str = name,
            ftz: bool = ftz,
            nan: bool = nan,
            xorsign: bool = xorsign,
        ) -> Array:
            x, y = (format_.values[flushed16(format_, v) if ftz else v] for v in (a, b))
            return half_bits(format_, extreme(x, y, name, nan, xorsign))

        add(
            f"{name}{'.ftz' * ftz}{'.NaN' * nan}{'.xorsign.abs' * xorsign}.{type_} {{d}}, {{a}}, {{b}};",
            chosen,
        )
    add(f"neg.{type_} {{d}}, {{a}};", lambda a, b, c: a ^ np.uint16(0x8000))
    add(f"abs.{type_} {{d}}, {{a}};", lambda a, b, c: a & np.uint16(0x7FFF))
    if kind == "f16":
        add(f"neg.ftz.{type_} {{d}}, {{a}};", lambda a, b, c: flushed16(format_, a) ^ np.uint16(0x8000))
        add(f"abs.ftz.{type_} {{d}}, {{a}};", lambda a, b, c: flushed16(format_, a) & np.uint16(0x7FFF))
    columns = half_inputs(format_)
    return Batch(tuple(paired(*columns)) if pairs else columns, tuple(cases))


def f32_pairs() -> Batch:
    """Return arithmetic on two f32 in a 64-bit register."""
    a, b, c = f32_inputs()
    wide = [x.astype(np.uint64) | np.roll(x, 5).astype(np.uint64) << np.uint64(32) for x in (a, b, c)]

    def each(f: Callable[..., Array], ftz: bool) -> Reference:
        def reference(*columns: Array) -> Array:
            halves = []
            for shift in (0, 32):
                lanes = [(x >> np.uint64(shift)).astype(np.uint32) for x in columns]
                halves.append(
                    bits32(f(*(f32(flushed32(x) if ftz else x) for x in lanes)), ftz).astype(np.uint64)
                )
            return halves[1] << np.uint64(32) | halves[0]

        return reference

    def multiplied(x: Array, y: Array, z: Array) -> Array:
        x, y, z = (v.astype(np.float64) for v in (x, y, z))
        return to_odd(x * y, z).astype(np.float32)

    cases = []
    for ftz in (False, True):
        for (name, f), rn in itertools.product(TWO.items(), ("", ".rn")):
            text = f"{name}{rn}{'.ftz' * ftz}.f32x2 {{d}}, {{a}}, {{b}};"
            cases.append(Case(text, 64, each(lambda x, y, z, f=f: f(x, y), ftz)))
        cases.append(
            Case(f"fma.rn{'.ftz' * ftz}.f32x2 {{d}}, {{a}}, {{b}}, {{c}};", 64, each(multiplied, ftz))
        )
    return Batch(tuple(wide), tuple(cases))


def mixed_batch(kind: str) -> Batch:
    """Return f32 arithmetic with 16-bit operands, except the addend."""
    format_ = F16 if kind == "f16" else BF16

    def sums(sign: int, sat: bool) -> Reference:
        return lambda a, b, c: bits32(
            format_.values[a].astype(np.float32) + np.float32(sign) * f32(c), sat=sat
        )

    def fused(sat: bool) -> Reference:
        def reference(a: Array, b: Array, c: Array) -> Array:
            exact = to_odd(format_.values[a] * format_.values[b], f32(c).astype(np.float64))
            return bits32(exact.astype(np.float32), sat=sat)

        return reference

    cases = []
    for sat in (False, True):
        suffix = f"{'.sat' * sat}.f32.{kind}"
        cases.append(Case(f"fma.rn{suffix} {{d}}, {{a}}, {{b}}, {{c}};", 32, fused(sat)))
        for (name, sign), rn in itertools.product({"add": 1, "sub": -1}.items(), ("", ".rn")):
            cases.append(Case(f"{name}{rn}{suffix} {{d}}, {{a}}, {{c}};", 32, sums(sign, sat)))
    a, b, _ = half_inputs(format_)
    return Batch((a, b, np.resize(f32_inputs()[0], len(a))), tuple(cases))


GROUPS: dict[str, Group] = {
    "f32": lambda: [f32_arithmetic(), f32_signs_and_order(), f32_pairs()],
    "mixed": lambda: [mixed_batch("f16"), mixed_batch("bf16")],
    "f64": lambda: [f64_arithmetic()],
    "f16": lambda: [half_batch("f16", False), half_batch("f16", True)],
    "bf16": lambda: [half_batch("bf16", False), half_batch("bf16", True)],
    "comparisons": lambda: [
        *(float_compare(kind) for kind in ("f32", "f64", "f16", "bf16")),
        *(pair_compare(kind) for kind in ("f16x2", "bf16x2")),
    ],
}


@pytest.mark.parametrize("group", list(GROUPS))
def test_bits(group: str) -> None:
    verify(GROUPS[group](), quick=group == "comparisons")


# ---- approximations -------------------------------------------------------------------------------------------

APPROXIMATE: dict[str, tuple[Callable[[Array], Array], float]] = {
    # the truth in float64, and the error stated by ptx.py, in ulp
    "ex2.approx": (np.exp2, 1),
    "lg2.approx": (np.log2, 1),
    "rsqrt.approx": (lambda x: 1 / np.sqrt(x), 0.501),
    "sin.approx": (np.sin, 1),
    "cos.approx": (np.cos, 1),
    "tanh.approx": (np.tanh, 1),
}
OF_F32 = [name + ftz for name in APPROXIMATE for ftz in ("", ".ftz") if name + ftz != "tanh.approx.ftz"]
OF_HALVES = ("ex2.approx.f16", "ex2.approx.ftz.bf16", "tanh.approx.f16", "tanh.approx.bf16")


def f32_approximations() -> Batch:
    random = np.random
    x = [random.normal(0, 3, 20000), random.uniform(-130, 130, 20000), 2.0 ** random.uniform(-149, 20, 20000)]
    special = [0, -0.0, np.inf, -np.inf, np.nan, 1e-40]
    cases = tuple(Case(f"{name}.f32 {{d}}, {{a}};", 32, no_bits) for name in OF_F32)
    return Batch((np.concatenate([*x, special]).astype(np.float32).view(np.uint32),), cases)


def half_approximations() -> list[Batch]:
    """Return approximations of every f16 and bf16 number, singly and in pairs."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    pairs = codes.astype(np.uint32) | np.roll(codes, 999).astype(np.uint32) << 16
    return [
        Batch((codes,), tuple(Case(f"{name} {{d}}, {{a}};", 16, no_bits) for name in OF_HALVES)),
        Batch((pairs,), tuple(Case(f"{name}x2 {{d}}, {{a}};", 32, no_bits) for name in OF_HALVES)),
    ]


def no_bits(*_: Array) -> Array:
    raise AssertionError("an approximation is compared with the truth, within an error")


@functools.lru_cache
def approximated() -> tuple[Array, dict[str, Array], dict[str, tuple[Array, Array]]]:
    """Return the inputs in f32 and the results, all compiled together."""
    batch = f32_approximations()
    single, *halves = execute([batch, *half_approximations()])
    names = dict(zip(OF_HALVES, zip(*halves, strict=True), strict=True))
    return batch.inputs[0], dict(zip(OF_F32, single, strict=True)), names


@pytest.mark.parametrize("name", OF_F32)
def test_approximations(name: str) -> None:
    """Results are within the stated error of the truth; infinities, NaN and zeros are exact."""
    truth_of, error = APPROXIMATE[name.removesuffix(".ftz")]
    ftz = name.endswith(".ftz")
    x, results, _ = approximated()
    got = results[name]
    with np.errstate(all="ignore"):
        truth = truth_of(f32(flushed32(x) if ftz else x).astype(np.float64))
        exact = truth.astype(np.float32)
    size = np.abs(truth)
    normal = (size >= np.finfo(np.float32).smallest_normal) & (size < 2.0**128)
    unit = np.exp2(np.floor(np.log2(size, where=normal, out=np.ones_like(size)))) * 2.0**-23
    check(
        torch.from_numpy(f32(got)[normal].copy()),
        torch.from_numpy(truth[normal]),
        torch.from_numpy(error * unit[normal]),
    )
    special = ~normal & ((size == 0) | ~np.isfinite(exact))
    assert np.array_equal(got[special], bits32(exact[special]))
    tiny = ~normal & ~special & ~np.isnan(exact)
    if ftz:
        assert np.array_equal(got[tiny] & 0x7FFFFFFF, np.zeros(tiny.sum(), np.uint32))
    else:
        assert (np.abs(f32(got)[tiny] - truth[tiny]) <= 2.0**-149).all()


@pytest.mark.parametrize("name", OF_HALVES)
def test_approximations_of_halves(name: str) -> None:
    """The error is below 0.51 ulp, singly and in pairs."""
    format_ = BF16 if name.endswith("bf16") else F16
    ftz = ".ftz" in name
    single, pair = approximated()[2][name]
    assert np.array_equal(pair & 0xFFFF, single)
    assert np.array_equal(pair >> 16, np.roll(single, 999))
    codes = np.arange(1 << 16, dtype=np.uint16)
    x = format_.values[flushed16(format_, codes) if ftz else codes]
    with np.errstate(all="ignore"):
        truth = (np.exp2 if name.startswith("ex2") else np.tanh)(x)
    got = format_.values[single]
    assert (single[np.isnan(x)] == NAN16).all()
    smallest = 2.0 ** (1 - format_.bias)
    inside = (np.abs(truth) >= smallest) & (np.abs(truth) <= format_.largest)
    unit = np.exp2(np.floor(np.log2(np.abs(truth[inside])))) * 2.0**-format_.mantissa
    check(torch.from_numpy(got[inside]), torch.from_numpy(truth[inside]), torch.from_numpy(0.51 * unit))
    tiny = np.abs(truth) < smallest
    if ftz:
        assert (got[tiny] == 0).all()
    else:
        assert (np.abs(got[tiny] - truth[tiny]) <= 0.51 * smallest * 2.0**-format_.mantissa).all()
