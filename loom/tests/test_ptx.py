"""Every family of include/ptx.h's instructions against references that share no code with it.

Integers are Python's, of any size; floats are NumPy's, with a rounding to odd in float64 where a result is still to be
rounded; the small formats are tables in which rounding is a search (`formats.py`). All bits are compared, NaN included.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from formats import BF16, E4M3, E5M2, F16, Format
from triton_loom.codegen import ptx
from triton_loom.codegen.assembly import Instruction, parse
from triton_loom.testing import check

Array = np.ndarray[Any, Any]
Reference = Callable[..., Array]


# ---- running many instructions on the same inputs ----------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A text for {a}, {b}, {c} that leaves `bits` bits in {d}, and what they have to be."""

    text: str
    bits: int
    reference: Reference


@dataclass(frozen=True)
class Batch:
    inputs: tuple[Array, ...]  # of unsigned integers: the bits of registers
    cases: tuple[Case, ...]


@triton.constexpr_function
def unsigned(widths: str) -> tuple[tl.dtype, ...]:
    return tuple({"16": tl.uint16, "32": tl.uint32, "64": tl.uint64}[bits] for bits in widths.split())


@triton.jit
def assemble(
    x, out, n, TEXT: tl.constexpr, CONSTRAINTS: tl.constexpr, WIDTHS: tl.constexpr, BLOCK: tl.constexpr
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x[0] + offs, offs < n, 0)
    b = tl.load(x[1 % len(x)] + offs, offs < n, 0)
    c = tl.load(x[2 % len(x)] + offs, offs < n, 0)
    y = tl.inline_asm_elementwise(TEXT, CONSTRAINTS, [a, b, c], dtype=unsigned(WIDTHS), is_pure=True, pack=1)
    for i in tl.static_range(len(out)):
        tl.store(out[i] + offs, y[i], offs < n)


REGISTERS = {16: ("h", np.uint16), 32: ("r", np.uint32), 64: ("l", np.uint64)}


def execute(batch: Batch) -> list[Array]:
    cases = batch.cases if len(batch.cases) > 1 else batch.cases * 2  # a single result is no tuple
    outputs = [np.zeros(len(batch.inputs[0]), REGISTERS[case.bits][1]) for case in cases]
    inputs = [np.ascontiguousarray(batch.inputs[i % len(batch.inputs)]) for i in range(3)]
    names = {"a": f"${len(cases)}", "b": f"${len(cases) + 1}", "c": f"${len(cases) + 2}"}
    text = " ".join(case.text.format(d=f"${i}", **names) for i, case in enumerate(cases))
    letters = [f"={REGISTERS[case.bits][0]}" for case in cases]
    letters += [REGISTERS[8 * array.dtype.itemsize][0] for array in inputs]
    n = len(inputs[0])
    assemble[(triton.cdiv(n, 1024),)](
        tuple(torch.from_numpy(array) for array in inputs),
        tuple(torch.from_numpy(array) for array in outputs),
        n,
        TEXT=text,
        CONSTRAINTS=",".join(letters),
        WIDTHS=" ".join(str(case.bits) for case in cases),
        BLOCK=1024,
    )
    return outputs[: len(batch.cases)]


RANDOM = np.random.default_rng(20)


def any_bits(bits: int, count: int) -> Array:
    return RANDOM.integers(0, 1 << bits, count, np.uint64, endpoint=False).astype(f"u{bits // 8}") if bits < 64 else (
        RANDOM.integers(0, 1 << 63, count, np.uint64) * np.uint64(2) + RANDOM.integers(0, 2, count, np.uint64)
    )  # fmt: skip


# ---- integers: Python's ---------------------------------------------------------------------------------------


def number(value: int, kind: str) -> int:
    """What the bits of a register are in a type such as s16."""
    bits = int(kind[1:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value


def of_integers(f: Callable[..., int], kinds: str, bits: int) -> Reference:
    """f of Python integers that the registers are in these types, as the low bits of its result."""

    def reference(*arrays: Array) -> Array:
        split = kinds.split()
        rows = zip(*(array.tolist() for array in arrays[: len(split)]), strict=True)
        values = [
            f(*(number(v, k) for v, k in zip(row, split, strict=True))) & ((1 << bits) - 1) for row in rows
        ]
        return np.array(values, np.uint64).astype(f"u{bits // 8}")

    return reference


def integer_inputs(bits: int, count: int = 3) -> tuple[Array, ...]:
    """Any number, small ones, and the ends of the range; all pairs of the latter."""
    ends = [0, 1, 2, 3, (1 << bits) - 1, (1 << bits) - 2, 1 << (bits - 1), (1 << (bits - 1)) - 1]
    pairs = np.array(list(itertools.product(ends, repeat=2)), np.uint64)
    columns = [pairs[:, i % 2] for i in range(count)]
    wide = [any_bits(bits, 400) for _ in range(count)]
    small = [any_bits(8, 200) for _ in range(count)]
    return tuple(
        np.concatenate(parts).astype(f"u{bits // 8}") for parts in zip(columns, wide, small, strict=True)
    )


def quotient(a: int, b: int) -> int:
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def integer_batch(kind: str) -> Batch:
    bits = int(kind[1:])

    def case(text: str, f: Callable[..., int], count: int, to: int = bits) -> Case:
        operands = ", ".join("{" + name + "}" for name in "dabc"[: count + 1])
        return Case(f"{text} {operands};", to, of_integers(f, " ".join([kind] * count), to))

    cases = [
        case(f"add.{kind}", lambda a, b: a + b, 2),
        case(f"sub.{kind}", lambda a, b: a - b, 2),
        case(f"mul.lo.{kind}", lambda a, b: a * b, 2),
        case(f"mul.hi.{kind}", lambda a, b: (a * b) >> bits, 2),
        case(f"mad.lo.{kind}", lambda a, b, c: a * b + c, 3),
        case(f"mad.hi.{kind}", lambda a, b, c: ((a * b) >> bits) + c, 3),
        case(f"div.{kind}", quotient, 2),
        case(f"rem.{kind}", lambda a, b: a if b == 0 else a - quotient(a, b) * b, 2),
        case(f"min.{kind}", min, 2),
        case(f"max.{kind}", max, 2),
        case(f"mov.{kind}", lambda a: a, 1),
    ]
    if bits < 64:
        wide = f"{kind[0]}{2 * bits}"
        cases.append(case(f"mul.wide.{kind}", lambda a, b: a * b, 2, 2 * bits))
        add = f"{{{{ .reg .b{2 * bits} t; cvt.{wide}.{kind} t, {{c}}; mad.wide.{kind} {{d}}, {{a}}, {{b}}, t; }}}}"
        cases.append(
            Case(add, 2 * bits, of_integers(lambda a, b, c: a * b + c, f"{kind} {kind} {kind}", 2 * bits))
        )
    if kind[0] == "s":
        cases += [case(f"neg.{kind}", lambda a: -a, 1), case(f"abs.{kind}", abs, 1)]
    if kind == "s32":
        low, high = -(1 << 31), (1 << 31) - 1
        cases.append(case("add.sat.s32", lambda a, b: max(low, min(a + b, high)), 2))
        cases.append(case("sub.sat.s32", lambda a, b: max(low, min(a - b, high)), 2))
    return Batch(integer_inputs(bits), tuple(cases))


def compare_batch(kind: str) -> Batch:
    bits = int(kind[1:])
    compare: dict[str, Callable[[int, int], bool]] = {
        "eq": int.__eq__, "ne": int.__ne__, "lt": int.__lt__, "le": int.__le__, "gt": int.__gt__, "ge": int.__ge__,
    }  # fmt: skip
    if kind[0] == "u":
        compare |= {
            name: compare[like]
            for name, like in zip(("lo", "ls", "hi", "hs"), ("lt", "le", "gt", "ge"), strict=True)
        }
    if kind[0] == "b":
        compare = {name: compare[name] for name in ("eq", "ne")}
    as_number = kind if kind[0] != "b" else f"u{bits}"
    cases = []
    for name, f in compare.items():
        both = f"{{{{ .reg .pred p, q; setp.{name}.{kind} p|q, {{a}}, {{b}}; selp.{kind} {{d}}, {{a}}, {{c}}, p; "
        both += f"@q add.u{bits} {{d}}, {{d}}, 1; }}}}"
        cases.append(Case(both, bits, of_integers(
            lambda a, b, c, f=f: a if f(a, b) else c + 1, f"{as_number} {as_number} {as_number}", bits)))  # fmt: skip
    joined = (
        f"{{{{ .reg .pred p, q; setp.ne.{kind} p, {{b}}, {{c}}; setp.eq.JOIN.{kind} q, {{a}}, {{b}}, !p; "
    )
    joined += f"@!q mov.b{bits} {{d}}, 5; @q mov.b{bits} {{d}}, 7; }}}}"
    for name, g in {
        "and": lambda p, q: p and q,
        "or": lambda p, q: p or q,
        "xor": lambda p, q: p != q,
    }.items():
        cases.append(
            Case(
                joined.replace("JOIN", name),
                bits,
                of_integers(
                    lambda a, b, c, g=g: 7 if g(a == b, b == c) else 5,
                    f"{as_number} {as_number} {as_number}",
                    bits,
                ),
            )
        )
    a, b, c = integer_inputs(bits)
    b[::3] = a[::3]
    c[::2] = b[::2]
    return Batch((a, b, c), tuple(cases))


def shift_batch(bits: int) -> Batch:
    """The distance is a 32-bit number whatever is shifted."""
    signed, unsigned = f"s{bits}", f"u{bits}"
    cases = [
        Case(
            f"shl.b{bits} {{d}}, {{a}}, {{b}};",
            bits,
            of_integers(lambda a, n: a << min(n, bits), f"{unsigned} u32", bits),
        ),
        Case(
            f"shr.s{bits} {{d}}, {{a}}, {{b}};",
            bits,
            of_integers(lambda a, n: a >> min(n, bits), f"{signed} u32", bits),
        ),
    ]
    cases += [
        Case(
            f"shr.{t}{bits} {{d}}, {{a}}, {{b}};",
            bits,
            of_integers(lambda a, n: a >> min(n, bits), f"{unsigned} u32", bits),
        )
        for t in "bu"
    ]
    distance = np.concatenate([np.arange(0, 80), [255, 256, 65536, 1 << 31, (1 << 32) - 1]] * 8).astype(
        np.uint32
    )
    return Batch((any_bits(bits, len(distance)), distance), tuple(cases))


def logic_batch(bits: int) -> Batch:
    kind, ones = f"u{bits}", (1 << bits) - 1
    two = {"and": int.__and__, "or": int.__or__, "xor": int.__xor__}
    cases = [
        Case(f"{name}.b{bits} {{d}}, {{a}}, {{b}};", bits, of_integers(f, f"{kind} {kind}", bits))
        for name, f in two.items()
    ]
    cases.append(Case(f"not.b{bits} {{d}}, {{a}};", bits, of_integers(lambda a: a ^ ones, kind, bits)))
    if bits > 16:
        cases += [
            Case(
                f"brev.b{bits} {{d}}, {{a}};",
                bits,
                of_integers(lambda a: int(f"{a:0{bits}b}"[::-1], 2), kind, bits),
            ),
            Case(f"popc.b{bits} {{d}}, {{a}};", 32, of_integers(int.bit_count, kind, 32)),
            Case(f"clz.b{bits} {{d}}, {{a}};", 32, of_integers(lambda a: bits - a.bit_length(), kind, 32)),
        ]
    a, b = integer_inputs(bits, 2)
    shrinking = (
        np.full(bits + 1, ones, np.uint64) >> np.minimum(np.arange(bits + 1), 63).astype(np.uint64)
    ).astype(a.dtype)
    return Batch((np.concatenate([a, shrinking]), np.concatenate([b, shrinking])), tuple(cases))


def predicate_batch() -> Batch:
    table = {"and": lambda p, q: p & q, "or": lambda p, q: p | q, "xor": lambda p, q: p ^ q}
    start = "{{ .reg .pred p, q, r; setp.ne.u32 p, {a}, 0; setp.ne.u32 q, {b}, 0; "
    end = " selp.u32 {d}, 1, 0, r; }}"
    cases = [
        Case(f"{start}{name}.pred r, p, q;{end}", 32, of_integers(f, "u32 u32", 32))
        for name, f in table.items()
    ]
    cases.append(Case(f"{start}not.pred r, p;{end}", 32, of_integers(lambda p, q: 1 - p, "u32 u32", 32)))
    cases.append(Case(f"{start}mov.pred r, !q;{end}", 32, of_integers(lambda p, q: 1 - q, "u32 u32", 32)))
    return Batch((np.array([0, 0, 1, 1], np.uint32), np.array([0, 1, 0, 1], np.uint32)), tuple(cases))


def field(a: int, position: int, length: int, bits: int, signed: bool) -> int:
    """bfe as the manual writes it, bit for bit."""
    position, length = position & 255, length & 255
    fill = a >> min(position + length - 1, bits - 1) & 1 if signed and length else 0
    return sum(
        (a >> (position + i) & 1 if i < length and position + i < bits else fill) << i for i in range(bits)
    )


def inserted(a: int, b: int, position: int, length: int, bits: int) -> int:
    position, length = position & 255, length & 255
    for i in range(bits):
        if i < length and position + i < bits:
            b = b & ~(1 << (position + i)) | (a >> i & 1) << (position + i)
    return b


def field_batch(bits: int) -> Batch:
    spans = np.array(
        list(itertools.product([0, 1, 7, bits // 2, bits - 1, bits, bits + 3, 255, 256, 300], repeat=2)),
        np.uint32,
    )
    spans = np.tile(spans, (4, 1))
    a = any_bits(bits, len(spans))
    cases = [
        Case(f"bfe.{t}{bits} {{d}}, {{a}}, {{b}}, {{c}};", bits, of_integers(
            lambda a, p, n, t=t: field(a, p, n, bits, t == "s"), f"u{bits} u32 u32", bits)) for t in "us"
    ]  # fmt: skip
    cases.append(Case(f"bfi.b{bits} {{d}}, {{a}}, 0x1234567, {{b}}, {{c}};", bits, of_integers(
        lambda a, p, n: inserted(a, 0x1234567, p, n, bits), f"u{bits} u32 u32", bits)))  # fmt: skip
    return Batch((a, spans[:, 0].copy(), spans[:, 1].copy()), tuple(cases))


def permuted(a: int, b: int, selector: int, mode: str) -> int:
    """prmt by the manual's tables: per selector, the bytes from the highest to the lowest."""
    tables = {
        "f4e": "3210 4321 5432 6543", "b4e": "5670 6701 7012 0123", "rc8": "0000 1111 2222 3333",
        "ecl": "3210 3211 3222 3333", "ecr": "0000 1110 2210 3210", "rc16": "1010 3232 1010 3232",
    }  # fmt: skip
    data = (a | b << 32).to_bytes(8, "little")
    if mode:
        return int.from_bytes(bytes(data[int(i)] for i in tables[mode].split()[selector & 3]), "big")
    nibbles = [selector >> 4 * k & 15 for k in range(4)]
    chosen = [(0xFF if data[n & 7] & 0x80 else 0) if n & 8 else data[n & 7] for n in nibbles]
    return int.from_bytes(bytes(chosen), "little")


def word_batch() -> Batch:
    """What works on 32 bits alone."""
    u3 = "u32 u32 u32"
    cases = [
        Case(f"prmt.b32{f'.{mode}' if mode else ''} {{d}}, {{a}}, {{b}}, {{c}};", 32, of_integers(
            lambda a, b, c, mode=mode: permuted(a, b, c, mode), u3, 32))
        for mode in ("", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    ]  # fmt: skip
    for side, wrap in itertools.product("lr", (True, False)):

        def funnel(a: int, b: int, c: int, side: str = side, wrap: bool = wrap) -> int:
            n = c % 32 if wrap else min(c, 32)
            return (b << 32 | a) << n >> 32 if side == "l" else (b << 32 | a) >> n

        name = f"shf.{side}.{'wrap' if wrap else 'clamp'}.b32"
        cases.append(Case(f"{name} {{d}}, {{a}}, {{b}}, {{c}};", 32, of_integers(funnel, u3, 32)))
    for x, y in itertools.product("us", repeat=2):

        def dot(a: int, b: int, c: int, x: str = x, y: str = y) -> int:
            return c + sum(number(a >> 8 * k, f"{x}8") * number(b >> 8 * k, f"{y}8") for k in range(4))

        cases.append(Case(f"dp4a.{x}32.{y}32 {{d}}, {{a}}, {{b}}, {{c}};", 32, of_integers(dot, u3, 32)))
        for part, shift in (("lo", 0), ("hi", 16)):

            def dot2(a: int, b: int, c: int, x: str = x, y: str = y, shift: int = shift) -> int:
                return c + sum(
                    number(a >> 16 * k, f"{x}16") * number(b >> (8 * k + shift), f"{y}8") for k in range(2)
                )

            cases.append(
                Case(f"dp2a.{part}.{x}32.{y}32 {{d}}, {{a}}, {{b}}, {{c}};", 32, of_integers(dot2, u3, 32))
            )
    for name, f in {"add": lambda a, b: a + b, "min": min, "max": max}.items():
        for t in "us":

            def both(a: int, b: int, f: Callable[[int, int], int] = f, t: str = t) -> int:
                low, high = (f(number(a >> s, f"{t}16"), number(b >> s, f"{t}16")) & 0xFFFF for s in (0, 16))
                return high << 16 | low

            cases.append(Case(f"{name}.{t}16x2 {{d}}, {{a}}, {{b}};", 32, of_integers(both, "u32 u32", 32)))
    a, b, c = integer_inputs(32)
    return Batch((a, b, np.concatenate([np.arange(70, dtype=np.uint32), c])[: len(a)]), tuple(cases))


def lop3_batch() -> Batch:
    """Every table, on inputs that have every combination of three bits."""

    def reference(table: int) -> Reference:
        return of_integers(
            lambda a, b, c: sum(
                (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(8)
            ),
            "u32 u32 u32",
            32,
        )

    fill = "{{ .reg .b32 t; lop3.b32 t, {a}, {b}, {c}, @; and.b32 {d}, t, 0xff; }}"
    a, b, c = (np.array([value], np.uint32) for value in (0xF0, 0xCC, 0xAA))
    return Batch((a, b, c), tuple(Case(fill.replace("@", hex(t)), 32, reference(t)) for t in range(256)))


# ---- floats: NumPy's -----------------------------------------------------------------------------------------

NAN32, NAN16 = np.uint32(0x7FFFFFFF), np.uint16(0x7FFF)


def f32(bits: Array) -> Array:
    return np.ascontiguousarray(bits, np.uint32).view(np.float32)


def bits32(x: Array, ftz: bool = False, sat: bool = False) -> Array:
    """The bits of f32 results: PTX's NaN, and what .ftz and .sat make of them."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    u = np.where(np.isnan(x), NAN32, u)
    u = flushed32(u) if ftz else u
    if sat:
        u = np.where(np.isnan(x), 0, np.clip(f32(u), 0, 1).view(np.uint32) & 0x7FFFFFFF)
    return u.astype(np.uint32)


def flushed32(bits: Array) -> Array:
    return np.where(bits & 0x7F800000, bits, bits & 0x80000000).astype(np.uint32)


def to_odd(a: Array, b: Array) -> Array:
    """a + b in float64, rounded to odd: whatever rounds it next, to fewer bits, rounds the exact sum."""
    s = a + b
    part = s - a
    error = (a - (s - part)) + (b - part)
    towards = np.nextafter(s, np.where(error > 0, np.inf, -np.inf))
    inexact = np.isfinite(s) & (error != 0)
    odd = s.view(np.int64) % 2 == 1
    return np.where(inexact & ~odd, towards, s)


def f32_inputs(count: int = 3) -> tuple[Array, ...]:
    """Any bits; ordinary numbers; and all pairs of what is special."""
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
        ordinary = RANDOM.normal(0, 2, 2000).astype(np.float32).view(np.uint32)
        columns.append(np.concatenate([pairs[:, i % 2], any_bits(32, 3000), ordinary]))
    return tuple(columns)


def extreme(x: Array, y: Array, name: str, nan_wins: bool, xorsign: bool) -> Array:
    """min or max of float64 numbers, by the order of (number, sign of zero)."""
    if xorsign:
        sign = np.where(np.signbit(x) ^ np.signbit(y), -1.0, 1.0)
        return np.copysign(extreme(np.abs(x), np.abs(y), name, nan_wins, False), sign)
    below = (x < y) | ((x == y) & np.signbit(x) & ~np.signbit(y))
    chosen = np.where(below == (name == "min"), x, y)
    nan_x, nan_y = np.isnan(x), np.isnan(y)
    chosen = np.where(nan_x, x if nan_wins else y, chosen)
    return np.where(nan_y & ~nan_x, y if nan_wins else x, chosen)


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
    tiny = np.finfo(np.float32).smallest_normal
    tests: dict[str, Callable[[Array], Array]] = {
        "finite": np.isfinite, "infinite": np.isinf, "notanumber": np.isnan, "number": lambda x: ~np.isnan(x),
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= tiny), "subnormal": lambda x: (x != 0) & (np.abs(x) < tiny),
    }  # fmt: skip
    for name, test in tests.items():
        text = f"{{{{ .reg .pred p; testp.{name}.f32 p, {{a}}; selp.b32 {{d}}, 1, 0, p; }}}}"
        cases.append(Case(text, 32, lambda a, b, test=test: test(f32(a)).astype(np.uint32)))
    return Batch(f32_inputs(2), tuple(cases))


ORDER: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "ne": lambda x, y: (x < y) | (x > y),
}  # fmt: skip
ORDER |= {f"{name}u": lambda x, y, f=f: f(x, y) | np.isnan(x) | np.isnan(y) for name, f in ORDER.items()}
ORDER |= {"num": lambda x, y: ~(np.isnan(x) | np.isnan(y)), "nan": lambda x, y: np.isnan(x) | np.isnan(y)}


def float_compare(kind: str) -> Batch:
    """Every comparison, and the second predicate where there is one."""
    widen: dict[str, Callable[[Array], Array]] = {
        "f32": f32,
        "f64": lambda u: u.view(np.float64),
        "f16": lambda u: F16.values[u],
        "bf16": lambda u: BF16.values[u],
    }
    bits = {"f32": 32, "f64": 64}.get(kind, 16)
    cases = []
    for name, f in ORDER.items():
        both = (
            f"setp.{name}.{kind} p, {{a}}, {{b}};" if bits == 16 else f"setp.{name}.{kind} p|q, {{a}}, {{b}};"
        )
        two = "" if bits == 16 else " @q add.u32 {d}, {d}, 4;"
        text = f"{{{{ .reg .pred p, q; {both} selp.u32 {{d}}, 2, 1, p;{two} }}}}"
        cases.append(
            Case(
                text,
                32,
                lambda a, b, f=f: np.where(
                    f(widen[kind](a), widen[kind](b)), 2, 1 if bits == 16 else 5
                ).astype(np.uint32),
            )
        )
    if kind == "f32":
        text = "{{ .reg .pred p; setp.eq.ftz.f32 p, {a}, {b}; selp.f32 {d}, 1.0, 2., p; }}"
        cases.append(
            Case(
                text,
                32,
                lambda a, b: np.where(f32(flushed32(a)) == f32(flushed32(b)), 0x3F800000, 0x40000000).astype(
                    np.uint32
                ),
            )
        )
    inputs = {"f32": lambda: f32_inputs(2), "f64": lambda: f64_inputs()[:2]}.get(
        kind, lambda: half_inputs(F16 if kind == "f16" else BF16)[:2]
    )()
    return Batch(inputs, tuple(cases))


def pair_compare(kind: str) -> Batch:
    format_ = F16 if kind == "f16x2" else BF16
    cases = []
    for name, f in ORDER.items():
        text = f"{{{{ .reg .pred p, q; setp.{name}.{kind} p|q, {{a}}, {{b}}; "
        text += "selp.u32 {d}, 1, 0, p; @q add.u32 {d}, {d}, 2; }}"

        def reference(a: Array, b: Array, f: Any = f) -> Array:
            low, high = (f(format_.values[a >> s & 0xFFFF], format_.values[b >> s & 0xFFFF]) for s in (0, 16))
            return low.astype(np.uint32) + 2 * high.astype(np.uint32)

        cases.append(Case(text, 32, reference))
    return Batch(tuple(paired(*half_inputs(format_)[:2])), tuple(cases))


def f64_inputs() -> tuple[Array, ...]:
    columns = []
    for _ in range(3):
        special = np.array([0.0, -0.0, 1, -1, np.inf, -np.inf, 5e-324, 2.0**-1022, 1.5, 1e308])
        numbers = np.concatenate([RANDOM.permutation(np.repeat(special, 20)), RANDOM.normal(0, 3, 500)])
        columns.append(np.concatenate([numbers.view(np.uint64), any_bits(64, 500)]))
    return tuple(columns)


def f64_arithmetic() -> Batch:
    """NaN has no bits of its own here: where the truth is one, zeros are compared."""

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
        case(
            "fma.rn.f64 t, {a}, {b}, {c};",
            lambda a, b, c: np.array([fused(*row) for row in zip(a, b, c, strict=True)]),
        ),
        case("min.f64 t, {a}, {b};", lambda a, b, c: extreme(a, b, "min", False, False)),
        case("max.f64 t, {a}, {b};", lambda a, b, c: extreme(a, b, "max", False, False)),
        case("neg.f64 t, {a};", lambda a, b, c: -a),
        case("abs.f64 t, {a};", lambda a, b, c: np.abs(a)),
        case("copysign.f64 t, {a}, {b};", lambda a, b, c: np.copysign(b, a)),
        case("mov.f64 t, 0d3FF8000000000000;", lambda a, b, c: np.full_like(a, 1.5)),
        case("mov.f64 t, -2.5e3;", lambda a, b, c: np.full_like(a, -2500)),
        case("cvt.rni.f64.f64 t, {a};", lambda a, b, c: np.rint(a)),
    ]
    return Batch(f64_inputs(), tuple(cases))


def fused(a: float, b: float, c: float) -> float:
    """a b + c of float64 with one rounding, by Python's rational numbers."""
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
    """All pairs of 80 codes of every kind, with any third."""
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
    near = RANDOM.normal(0, 1, (3, 3000))
    columns = [pairs[:, 0], pairs[:, 1], any_bits(16, len(pairs))]
    return tuple(np.concatenate([c, format_.encode(x)]) for c, x in zip(columns, near, strict=True))


def paired(*columns: Array) -> list[Array]:
    """Two of 16 bits to a register, the second from another place."""
    return [c.astype(np.uint32) | np.roll(c, 7).astype(np.uint32) << 16 for c in columns]


def in_pairs(f: Reference) -> Reference:
    def reference(*columns: Array) -> Array:
        low, high = (
            f(*((c >> s & 0xFFFF).astype(np.uint16) for c in columns)).astype(np.uint32) for s in (0, 16)
        )
        return (high << 16 | low).astype(np.uint32)

    return reference


def half_bits(format_: Format, x: Array, ftz: bool = False, sat: bool = False, relu: bool = False) -> Array:
    """float64 numbers (to odd, where inexact) as codes: PTX's NaN, and what the modifiers make of them."""
    if sat:
        x = np.where(np.isnan(x), 0, np.clip(x, 0, 1)) + 0.0
    code = np.where(np.isnan(x), NAN16, format_.encode(x))
    if relu:
        code = np.where(~np.isnan(x) & np.signbit(x), 0, code)
    return (flushed16(format_, code) if ftz else code).astype(np.uint16)


def flushed16(format_: Format, code: Array) -> Array:
    return np.where((code & 0x7FFF) < 1 << format_.mantissa, code & 0x8000, code).astype(np.uint16)


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
    columns = half_inputs(format_)
    return Batch(tuple(paired(*columns)) if pairs else columns, tuple(cases))


def f32_pairs() -> Batch:
    """Two of f32 to a 64-bit register."""
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
        for name, f in TWO.items():
            cases.append(
                Case(
                    f"{name}{'.rn' * ftz}{'.ftz' * ftz}.f32x2 {{d}}, {{a}}, {{b}};",
                    64,
                    each(lambda x, y, z, f=f: f(x, y), ftz),
                )
            )
        cases.append(
            Case(f"fma.rn{'.ftz' * ftz}.f32x2 {{d}}, {{a}}, {{b}}, {{c}};", 64, each(multiplied, ftz))
        )
    return Batch(tuple(wide), tuple(cases))


# ---- conversions --------------------------------------------------------------------------------------------

INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")


def holding(kind: str) -> int:
    """The bits of a register that operands of tests have for a type: none has eight."""
    return max(16, int(kind[1:]))


def clamped(value: int, kind: str) -> int:
    bits = int(kind[1:])
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)
    return max(low, min(value, high))


def resize_batch(source: str) -> Batch:
    """From the low bits of a register to a register that is filled up with the sign or with zeros."""
    cases = []
    for to, sat in itertools.product(INTEGERS, (False, True)):
        bits = holding(to)
        cases.append(Case(f"cvt{'.sat' * sat}.{to}.{source} {{d}}, {{a}};", bits, of_integers(
            lambda a, to=to, sat=sat: clamped(a, to) if sat else number(a, to), source, bits)))  # fmt: skip
    return Batch(integer_inputs(holding(source), 1), tuple(cases))


def to_integer_batch(source: str) -> Batch:
    """Float to integer in four roundings: clamped, and NaN as the manual says."""
    whole = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    widen: dict[str, Callable[[Array], Array]] = {
        "f32": lambda u: f32(u).astype(np.float64), "f64": lambda u: u.view(np.float64),
        "f16": lambda u: F16.values[u], "bf16": lambda u: BF16.values[u],
    }  # fmt: skip
    cases = []
    for (name, f), to in itertools.product(whole.items(), INTEGERS):
        bits = holding(to)

        def reference(a: Array, f: Any = f, to: str = to, bits: int = bits) -> Array:
            width = int(to[1:])
            nan = 1 << (width - 1) if width == 64 or source == "f64" else 0
            rounded = f(widen[source](a)).tolist()
            values = [
                nan
                if math.isnan(x)
                else clamped(int(x) if math.isfinite(x) else int(math.copysign(1 << 70, x)), to)
                for x in rounded
            ]
            return np.array([number(v, to) & ((1 << bits) - 1) for v in values], np.uint64).astype(
                f"u{bits // 8}"
            )

        cases.append(Case(f"cvt.{name}.{to}.{source} {{d}}, {{a}};", bits, reference))
    halves = np.arange(-300, 300) / 2
    ends = np.array([2.0**n + d for n in (7, 8, 15, 16, 31, 32, 63, 64) for d in (-1.0, -0.5, 0.0, 0.5, 1.0)])
    numbers = np.concatenate([halves, ends, -ends, [np.inf, -np.inf, np.nan, 1e300, 1e-300]])
    with np.errstate(over="ignore"):
        inputs = {
            "f32": lambda: np.concatenate([numbers.astype(np.float32).view(np.uint32), any_bits(32, 500)]),
            "f64": lambda: np.concatenate([numbers.view(np.uint64), any_bits(64, 500)]),
            "f16": lambda: np.arange(1 << 16, dtype=np.uint16)[::7],
            "bf16": lambda: np.arange(1 << 16, dtype=np.uint16)[::7],
        }[source]()
    return Batch((inputs,), tuple(cases))


def from_integer_batch(source: str) -> Batch:
    """Through NumPy's long double, which holds every integer of 64 bits."""

    def exact(a: Array) -> Array:
        return np.array([number(v, source) for v in a.tolist()], np.longdouble)

    cases = [
        Case(f"cvt.rn.f32.{source} {{d}}, {{a}};", 32, lambda a: exact(a).astype(np.float32).view(np.uint32)),
        Case(f"cvt.rn.f64.{source} {{d}}, {{a}};", 64, lambda a: exact(a).astype(np.float64).view(np.uint64)),
        Case(f"cvt.rn.f16.{source} {{d}}, {{a}};", 16, lambda a: F16.encode(exact(a))),
        Case(f"cvt.rn.bf16.{source} {{d}}, {{a}};", 16, lambda a: BF16.encode(exact(a))),
    ]
    bits = holding(source)
    ties = [
        (1 << n) + (1 << max(n - d, 0)) + e
        for n in range(bits)
        for d in (8, 9, 11, 12, 24, 25, 53, 54)
        for e in (-1, 0, 1)
    ]
    inputs = np.array([t % (1 << bits) for t in ties], np.uint64).astype(f"u{bits // 8}")
    return Batch((np.concatenate([inputs, *integer_inputs(bits, 1)]),), tuple(cases))


def widening_batch(format_: Format, kind: str) -> Batch:
    """Every code of f16 and bf16."""

    def canonical(a: Array) -> Array:
        return bits32(format_.values[a].astype(np.float32))

    cases = [
        Case(f"cvt.f32.{kind} {{d}}, {{a}};", 32, canonical),
        Case(f"cvt.ftz.f32.{kind} {{d}}, {{a}};", 32, lambda a: flushed32(canonical(a))),
        Case(
            f"cvt.f64.{kind} {{d}}, {{a}};",
            64,
            lambda a: np.where(np.isnan(format_.values[a]), np.float32(np.nan), format_.values[a]).view(
                np.uint64
            ),
        ),
    ]
    other, name = (BF16, "bf16") if kind == "f16" else (F16, "f16")
    for mode in ("rn", "rz"):
        cases.append(
            Case(
                f"cvt.{mode}.{name}.{kind} {{d}}, {{a}};",
                16,
                lambda a, mode=mode: np.where(
                    np.isnan(format_.values[a]), NAN16, other.encode(format_.values[a], mode == "rz")
                ).astype(np.uint16),
            )
        )
    codes = np.arange(1 << 16, dtype=np.uint16)
    not_nan = ~np.isnan(format_.values)  # whose bits in f64 are nobody's
    return Batch((codes[not_nan],), tuple(cases))


def narrowing_batch() -> Batch:
    """f32 to f16 and bf16, singly and in pairs, over every boundary of both and any bits."""
    cases = []
    for mode, relu, sat, (format_, kind) in itertools.product(
        ("rn", "rz"), (False, True), (False, True), ((F16, "f16"), (BF16, "bf16"))
    ):

        def code(
            a: Array, mode: str = mode, relu: bool = relu, sat: bool = sat, format_: Format = format_
        ) -> Array:
            x = f32(a).astype(np.float64)
            x = np.where(np.isnan(x), x, np.clip(x, -format_.largest, format_.largest)) if sat else x
            coded = np.where(np.isnan(x), NAN16, format_.encode(x, mode == "rz"))
            return np.where(relu & np.signbit(x) & ~np.isnan(x), 0, coded).astype(np.uint16)

        name = f"cvt.{mode}{'.relu' * relu}{'.satfinite' * sat}.{kind}"
        cases.append(Case(f"{name}.f32 {{d}}, {{a}};", 16, lambda a, b, code=code: code(a)))
        cases.append(
            Case(
                f"{name}x2.f32 {{d}}, {{a}}, {{b}};",
                32,
                lambda a, b, code=code: code(a).astype(np.uint32) << 16 | code(b),
            )
        )
    cases.append(
        Case(
            "cvt.rn.ftz.sat.f16.f32 {d}, {a};",
            16,
            lambda a, b: half_bits(F16, f32(flushed32(a)).astype(np.float64), sat=True),
        )
    )
    whole = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    cases += [
        Case(f"cvt.{n}.f32.f32 {{d}}, {{a}};", 32, lambda a, b, f=f: bits32(f(f32(a))))
        for n, f in whole.items()
    ]
    cases.append(Case("cvt.sat.f32.f32 {d}, {a};", 32, lambda a, b: bits32(f32(a), sat=True)))
    cases.append(
        Case(
            "cvt.f64.f32 {d}, {a};",
            64,
            lambda a, b: np.where(np.isnan(f32(a)), 0, f32(a).astype(np.float64)).view(np.uint64),
        )
    )

    def tf32(a: Array, mode: str) -> Array:
        size, sign = a & np.uint32(0x7FFFFFFF), a & np.uint32(0x80000000)
        low = size & np.uint32(0x1FFF)
        up = {
            "rn": (low > 0x1000) | ((low == 0x1000) & (size >> 13 & 1 == 1)),
            "rna": low >= 0x1000,
            "rz": low < 0,
        }[mode]
        rounded = size - low + np.where(up & (size < 0x7F800000), 0x2000, 0).astype(np.uint32)
        return np.where(size > 0x7F800000, NAN32, rounded | sign).astype(np.uint32)

    cases += [
        Case(f"cvt.{m}.tf32.f32 {{d}}, {{a}};", 32, lambda a, b, m=m: tf32(a, m)) for m in ("rn", "rna", "rz")
    ]
    a = np.concatenate([F16.boundaries()[::11], BF16.boundaries()[::11]]).view(np.uint32)
    a = np.concatenate([a, any_bits(32, 3000), np.arange(0x3F800000, 0x3F808000, 0x800, dtype=np.uint32)])
    a = np.where(np.isnan(f32(a)) & (a != NAN32), np.uint32(0x3F800000), a)  # of NaN, in f64 only its own
    a = np.concatenate([a, np.array([0x7F800001, 0xFFC00000], np.uint32)])
    return Batch((a, np.roll(a, 13)), tuple(case for case in cases if "f64" not in case.text))


def from_f64_batch() -> Batch:
    cases = []
    for mode in ("rn", "rz"):

        def single(a: Array, mode: str = mode) -> Array:
            x = a.view(np.float64)
            with np.errstate(over="ignore"):
                nearest = x.astype(np.float32)
            if mode == "rz":
                beyond = np.isfinite(x) & (np.abs(nearest.astype(np.float64)) > np.abs(x))
                nearest = np.where(beyond, np.nextafter(nearest, np.float32(0)), nearest)
            return bits32(nearest)

        cases.append(Case(f"cvt.{mode}.f32.f64 {{d}}, {{a}};", 32, single))
        for format_, kind in ((F16, "f16"), (BF16, "bf16")):
            cases.append(
                Case(
                    f"cvt.{mode}.{kind}.f64 {{d}}, {{a}};",
                    16,
                    lambda a, f=format_, m=mode: np.where(
                        np.isnan(a.view(np.float64)), NAN16, f.encode(a.view(np.float64), m == "rz")
                    ).astype(np.uint16),
                )
            )
    edges = F16.boundaries()[::7].astype(np.float64)
    near = np.concatenate(
        [edges, np.nextafter(edges, np.inf), np.nextafter(edges, 0), RANDOM.normal(0, 1, 1000)]
    )
    return Batch((near.view(np.uint64),), tuple(cases))


# The formats that no tensor has: without infinities, and NaN becomes the largest number.
E2M1 = Format(torch.uint8, tl.uint8, 2, 1, 1, "fnuz", saturates=True)
E2M3 = Format(torch.uint8, tl.uint8, 2, 3, 1, "fnuz", saturates=True)
E3M2 = Format(torch.uint8, tl.uint8, 3, 2, 3, "fnuz", saturates=True)
SMALL = {"e4m3": E4M3, "e5m2": E5M2, "e2m3": E2M3, "e3m2": E3M2, "e2m1": E2M1}


def small_code(name: str, x: Array) -> Array:
    """The code of numbers in a small format, to nearest: from `magnitudes`, since these formats have a minus zero."""
    format_ = SMALL[name]
    if name in ("e4m3", "e5m2"):
        return format_.encode(x).astype(np.uint32)
    magnitude = np.abs(np.where(np.isnan(x), format_.largest, x))
    code = format_.encode(magnitude).astype(np.uint32)
    return code | np.where(np.signbit(x) & ~np.isnan(x), format_.sign, 0).astype(np.uint32)


def small_values(name: str) -> Array:
    half = (
        SMALL[name].values
        if name in ("e4m3", "e5m2")
        else np.concatenate([SMALL[name].magnitudes, -SMALL[name].magnitudes])
    )
    return np.resize(half, 256) if name != "e2m1" else np.resize(half, 16)


def small_batch(name: str) -> Batch:
    """Two f32 to a small format over every boundary; and back from every pair of codes."""
    width = 4 if name == "e2m1" else 8
    narrow = "{{ .reg .b8 t; @ t, {a}, {b}; cvt.u16.u8 {d}, t; }}" if width == 4 else "@ {d}, {a}, {b};"
    cases = []
    for relu in (False, True):

        def code(a: Array, relu: bool = relu) -> Array:
            x = f32(a).astype(np.float64)
            return np.where(relu & np.signbit(x) & ~np.isnan(x), 0, small_code(name, x))

        for order in [".satfinite.relu", ".relu.satfinite"] if relu else [".satfinite"]:
            cases.append(
                Case(
                    narrow.replace("@", f"cvt.rn{order}.{name}x2.f32"),
                    16,
                    lambda a, b, code=code: (code(a) << width | code(b)).astype(np.uint16),
                )
            )
    edges = np.concatenate(
        [SMALL[name].boundaries(), np.array([0x7F800001, 0xFFC00000], np.uint32).view(np.float32)]
    )
    a = np.concatenate(
        [
            edges.view(np.uint32),
            any_bits(32, 2000),
            RANDOM.normal(0, 2, 2000).astype(np.float32).view(np.uint32),
        ]
    )
    return Batch((a, np.roll(a, 3)), tuple(cases))


def small_from_half_batch(name: str) -> Batch:
    """All f16, or all bf16, in one half of a register."""
    width = 4 if name == "e2m1" else 8
    narrow = "{{ .reg .b8 t; @ t, {a}; cvt.u16.u8 {d}, t; }}" if width == 4 else "@ {d}, {a};"
    cases = []
    for format_, kind in ((F16, "f16"), (BF16, "bf16")):

        def reference(a: Array, format_: Format = format_) -> Array:
            high, low = (small_code(name, format_.values[a >> s & 0xFFFF]) for s in (16, 0))
            return (high << width | low).astype(np.uint16)

        cases.append(Case(narrow.replace("@", f"cvt.rn.satfinite.{name}x2.{kind}x2"), 16, reference))
    codes = np.arange(1 << 16, dtype=np.uint32)
    return Batch((codes | np.roll(codes, 12345) << 16,), tuple(cases))


def small_to_half_batch(name: str) -> Batch:
    """Every pair of codes of 4 bits, and every code of 8 beside another."""
    width = 4 if name == "e2m1" else 8
    wide = "{{ .reg .b8 t; cvt.u8.u16 t, {a}; @ {d}, t; }}" if width == 4 else "@ {d}, {a};"
    cases = []
    for relu in (False, True):

        def reference(a: Array, relu: bool = relu) -> Array:
            halves = []
            for shift in (width, 0):
                x = small_values(name)[
                    a >> shift & ((1 << (4 if width == 4 else SMALL[name].sign.bit_length())) - 1)
                ]
                halves.append(half_bits(F16, x, relu=relu).astype(np.uint32))
            return halves[0] << 16 | halves[1]

        cases.append(Case(wide.replace("@", f"cvt.rn{'.relu' * relu}.f16x2.{name}x2"), 32, reference))
    codes = np.arange(256 if width == 4 else 1 << 16, dtype=np.uint16)
    if name in ("e2m3", "e3m2"):
        codes &= 0x3F3F
    return Batch((codes,), tuple(cases))


def exponent_batch() -> Batch:
    """Powers of two by f32 and pairs of bf16, up and toward zero."""

    def code(x: Array, up: bool, sat: bool) -> Array:
        size = np.abs(x.astype(np.float64))
        with np.errstate(divide="ignore", invalid="ignore"):
            power = np.ceil(np.log2(size)) if up else np.floor(np.log2(size))
        exact = np.where(np.isfinite(power), power + 127, 0)
        limited = np.clip(np.where(np.isinf(size), 255, exact), 0, 254 if sat else 255)
        return np.where(np.isnan(size), 255, limited).astype(np.uint32)

    cases = []
    for up, sat in itertools.product((False, True), repeat=2):
        name = f"cvt.{'rp' if up else 'rz'}{'.satfinite' * sat}.ue8m0x2"
        cases.append(
            Case(
                f"{name}.f32 {{d}}, {{a}}, {{b}};",
                16,
                lambda a, b, u=up, s=sat: (code(f32(a), u, s) << 8 | code(f32(b), u, s)).astype(np.uint16),
            )
        )
        cases.append(
            Case(
                f"{name}.bf16x2 {{d}}, {{a}};",
                16,
                lambda a, b, u=up, s=sat: (
                    code(BF16.values[a >> 16], u, s) << 8 | code(BF16.values[a & 0xFFFF], u, s)
                ).astype(np.uint16),
            )
        )
    powers = (np.arange(0, 256, dtype=np.uint32)[:, None] << 23) + np.array(
        [0, 1, 0x400000, 0x400001, 0x7FFFFF], np.uint32
    )
    a = np.concatenate([powers.ravel(), powers.ravel() | np.uint32(1 << 31), any_bits(32, 2000)])
    return Batch((a, np.roll(a, 1)), tuple(cases))


def from_exponent_batch() -> Batch:
    def value(code: Array) -> Array:
        return np.where(code == 255, NAN16, BF16.encode(np.ldexp(1.0, code.astype(np.int64) - 127))).astype(
            np.uint32
        )

    case = Case("cvt.rn.bf16x2.ue8m0x2 {d}, {a};", 32, lambda a: value(a >> 8) << 16 | value(a & 255))
    return Batch((np.arange(1 << 16, dtype=np.uint16),), (case,))


# ---- stochastic rounding ---------------------------------------------------------------------------------------


def stochastic(grid: Array, x: Array, share: Array, largest: float) -> Array:
    """The place in a table of magnitudes where |x| + share of the distance to the next one lands.

    `share` has as many bits as the hardware adds, below 1; numbers of the table and of float64 are exact."""
    size = np.minimum(np.abs(x), largest)
    low = np.searchsorted(grid, size, side="right") - 1
    high = np.minimum(low + 1, len(grid) - 1)
    gap = np.where(high > low, grid[high] - grid[low], 1)
    up = (size - grid[low]) / gap + share >= 1
    return np.where(up & (high > low), high, low)


def random_lanes(random: Array, width: int) -> list[Array]:
    """The sixteen bits of each of four operands, by the tables of a measurement on the GPU: which bit of the word is
    the highest, and so on down."""
    orders = {
        8: [range(16, 32), range(31, 15, -1), range(16), range(15, -1, -1)],
        4: [
            [*range(8, 16), *range(24, 32)], [*range(31, 23, -1), *range(15, 7, -1)],
            [*range(8), *range(16, 24)], [*range(23, 15, -1), *range(7, -1, -1)],
        ],
    }  # fmt: skip
    return [
        sum((random >> b & 1).astype(np.float64) * 2.0 ** -(k + 1) for k, b in enumerate(o))
        for o in orders[width]
    ]


def stochastic_four_batch(name: str) -> Batch:
    """Four operands of which two are a, and b and -b: signs and magnitudes of either pair."""
    width = 4 if name == "e2m1" else 8
    format_ = SMALL[name]
    quad = f"{{{{ .reg .b32 n; neg.f32 n, {{b}}; cvt.rs.satfinite.{name}x4.f32 {{d}}, "
    quad += "{{ {a}, {b}, n, {a} }}, {c}; }}"

    def code(a: Array, share: Array) -> Array:
        x = f32(a).astype(np.float64)
        magnitude = stochastic(format_.magnitudes, np.where(np.isnan(x), 0, x), share, format_.largest)
        if name == "e5m2":
            magnitude = np.minimum(magnitude, 0x7B)
        signed = magnitude | np.where(np.signbit(x), format_.sign, 0)
        return np.where(np.isnan(x), 0x7F if format_.sign == 128 else format_.sign - 1, signed).astype(
            np.uint32
        )

    def reference(a: Array, b: Array, c: Array) -> Array:
        shares = random_lanes(c, width)
        codes = [code(v, s) for v, s in zip((a, b, b ^ np.uint32(1 << 31), a), shares, strict=True)]
        whole = codes[0] << 3 * width | codes[1] << 2 * width | codes[2] << width | codes[3]
        return whole.astype(np.uint16 if width == 4 else np.uint32)

    def numbers(count: int) -> Array:
        x = RANDOM.normal(0, format_.largest / 3, count).astype(np.float32)
        small = RANDOM.normal(0, float(format_.magnitudes[2]) * 2, count).astype(np.float32)
        special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1, 1.5, 1e9, 1e-9] * 20, np.float32)
        return np.concatenate([x, small, special]).view(np.uint32)

    a, b = numbers(3000), numbers(3000)
    return Batch((a, b, any_bits(32, len(a))), (Case(quad, 16 if width == 4 else 32, reference),))


def stochastic_two_batch() -> Batch:
    cases = []
    for (format_, kind, used), sat in itertools.product(
        ((F16, "f16", 13), (BF16, "bf16", 16)), (False, True)
    ):

        def code(
            a: Array, random: Array, format_: Format = format_, used: int = used, sat: bool = sat
        ) -> Array:
            x = f32(a).astype(np.float64)
            share = (random & ((1 << used) - 1)) / 2.0**used
            finite = np.where(np.isfinite(x), x, 0)
            largest = format_.largest if sat else np.inf
            magnitude = stochastic(format_.magnitudes, finite, share, largest)
            infinite = len(format_.magnitudes) - 1
            magnitude = np.where(np.isinf(x), infinite - sat, np.minimum(magnitude, infinite - sat))
            signed = magnitude | np.where(np.signbit(x), 0x8000, 0)
            return np.where(np.isnan(x), NAN16, signed).astype(np.uint32)

        cases.append(
            Case(
                f"cvt.rs{'.satfinite' * sat}.{kind}x2.f32 {{d}}, {{a}}, {{b}}, {{c}};",
                32,
                lambda a, b, c, code=code: code(a, c >> 16) << 16 | code(b, c & 0xFFFF),
            )
        )
    ordinary = RANDOM.normal(0, 1, 4000).astype(np.float32).view(np.uint32)
    a = np.concatenate([any_bits(32, 4000), ordinary, F16.boundaries()[::60].view(np.uint32)])
    return Batch((a, np.roll(a, 11), any_bits(32, len(a))), tuple(cases))


# ---- the tests --------------------------------------------------------------------------------------------------

BATCHES: dict[str, Callable[[], Batch]] = {
    **{f"integers-{k}": lambda k=k: integer_batch(k) for k in ("u16", "s16", "u32", "s32", "u64", "s64")},
    **{
        f"compare-{k}": lambda k=k: compare_batch(k)
        for k in ("u16", "s32", "u64", "s64", "b16", "b32", "b64")
    },
    **{f"shifts-{n}": lambda n=n: shift_batch(n) for n in (16, 32, 64)},
    **{f"logic-{n}": lambda n=n: logic_batch(n) for n in (16, 32, 64)},
    **{f"fields-{n}": lambda n=n: field_batch(n) for n in (32, 64)},
    "predicates": predicate_batch,
    "words": word_batch,
    "lop3": lop3_batch,
    "f32": f32_arithmetic,
    "f32-signs": f32_signs_and_order,
    **{f"compare-{k}": lambda k=k: float_compare(k) for k in ("f32", "f64", "f16", "bf16")},
    **{f"compare-{k}": lambda k=k: pair_compare(k) for k in ("f16x2", "bf16x2")},
    "f64": f64_arithmetic,
    **{f"{k}{'x2' * p}": lambda k=k, p=p: half_batch(k, p) for k in ("f16", "bf16") for p in (False, True)},
    "f32x2": f32_pairs,
    **{f"resize-{k}": lambda k=k: resize_batch(k) for k in INTEGERS},
    **{f"integer-from-{k}": lambda k=k: to_integer_batch(k) for k in ("f16", "bf16", "f32", "f64")},
    **{f"float-from-{k}": lambda k=k: from_integer_batch(k) for k in INTEGERS},
    "widen-f16": lambda: widening_batch(F16, "f16"),
    "widen-bf16": lambda: widening_batch(BF16, "bf16"),
    "narrow": narrowing_batch,
    "from-f64": from_f64_batch,
    **{f"small-{k}": lambda k=k: small_batch(k) for k in SMALL},
    **{f"small-{k}-from-half": lambda k=k: small_from_half_batch(k) for k in SMALL},
    **{f"half-from-{k}": lambda k=k: small_to_half_batch(k) for k in SMALL},
    "exponents": exponent_batch,
    "from-exponents": from_exponent_batch,
    **{f"stochastic-{k}": lambda k=k: stochastic_four_batch(k) for k in SMALL},
    "stochastic-pairs": stochastic_two_batch,
}
QUICK = ("f32", "small-e2m1", "stochastic-e2m1", "words")  # on other versions of Triton


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.compat if n in QUICK else ()) for n in BATCHES]
)
def test_bits(name: str) -> None:
    batch = BATCHES[name]()
    with np.errstate(all="ignore"):
        for case, got in zip(batch.cases, execute(batch), strict=True):
            wanted = case.reference(*batch.inputs)
            assert wanted.dtype == got.dtype, case.text
            wrong = np.flatnonzero(got != wanted)
            if len(wrong):
                i = wrong[0]
                given = [hex(int(array[i])) for array in batch.inputs]
                raise AssertionError(
                    f"{case.text} of {given}: {int(got[i]):#x}, not {int(wanted[i]):#x}; {len(wrong)} wrong"
                )


APPROXIMATE: dict[str, tuple[Callable[[Array], Array], float]] = {
    # the truth in float64, and the error that ptx.py states, in ulp
    "ex2.approx": (np.exp2, 1),
    "lg2.approx": (np.log2, 1),
    "rsqrt.approx": (lambda x: 1 / np.sqrt(x), 0.501),
    "sin.approx": (np.sin, 1),
    "cos.approx": (np.cos, 1),
    "tanh.approx": (np.tanh, 1),
}


def approximation_inputs() -> Array:
    x = np.concatenate(
        [RANDOM.normal(0, 3, 20000), RANDOM.uniform(-130, 130, 20000), 2.0 ** RANDOM.uniform(-149, 20, 20000)]
    )
    return np.concatenate(
        [x.astype(np.float32), np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-40], np.float32)]
    )


@pytest.mark.parametrize("name", list(APPROXIMATE))
def test_approximations(name: str) -> None:
    """Within the stated error of the truth, with and without .ftz; infinities, NaN and zeros as they are."""
    truth_of, error = APPROXIMATE[name]
    x = approximation_inputs()
    modes = (False,) if name == "tanh.approx" else (False, True)
    cases = tuple(Case(f"{name}{'.ftz' * ftz}.f32 {{d}}, {{a}};", 32, lambda a: a) for ftz in modes)
    for ftz, got in zip(modes, execute(Batch((x.view(np.uint32),), cases)), strict=True):
        with np.errstate(all="ignore"):
            truth = truth_of(
                f32(flushed32(x.view(np.uint32)) if ftz else x.view(np.uint32)).astype(np.float64)
            )
            size = np.abs(truth)
            normal = (size >= np.finfo(np.float32).smallest_normal) & (size < 2.0**128)
            exact = truth.astype(np.float32)
        result = f32(got)
        unit = np.exp2(np.floor(np.log2(size, where=normal, out=np.ones_like(size)))) * 2.0**-23
        check(
            torch.from_numpy(result[normal].copy()),
            torch.from_numpy(truth[normal]),
            torch.from_numpy(error * unit[normal]),
        )
        special = ~normal & ((size == 0) | ~np.isfinite(exact))
        assert np.array_equal(got[special], bits32(exact[special]))
        tiny = ~normal & ~special & ~np.isnan(exact)
        if ftz:
            assert np.array_equal(got[tiny] & 0x7FFFFFFF, np.zeros(tiny.sum(), np.uint32))
        else:
            assert (np.abs(result[tiny] - truth[tiny]) <= 2.0**-149).all()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_approximations_of_halves(kind: str) -> None:
    """Every number of f16 and bf16, singly and in pairs: 0.51 ulp."""
    format_ = F16 if kind == "f16" else BF16
    codes = np.arange(1 << 16, dtype=np.uint16)
    both = codes | np.roll(codes, 999).astype(np.uint32) << 16
    ftz = ".ftz" * (kind == "bf16")
    names = {f"ex2.approx{ftz}": np.exp2, "tanh.approx": np.tanh}
    singles = execute(
        Batch((codes,), tuple(Case(f"{n}.{kind} {{d}}, {{a}};", 16, lambda a: a) for n in names))
    )
    pairs = execute(
        Batch(
            (both.astype(np.uint32),),
            tuple(Case(f"{n}.{kind}x2 {{d}}, {{a}};", 32, lambda a: a) for n in names),
        )
    )
    for (name, f), single, pair in zip(names.items(), singles, pairs, strict=True):
        assert np.array_equal(pair & 0xFFFF, single)
        assert np.array_equal(pair >> 16, np.roll(single, 999))
        x = format_.values[flushed16(format_, codes) if ftz and name != "tanh.approx" else codes]
        with np.errstate(all="ignore"):
            truth = f(x)
        got = format_.values[single]
        assert (single[np.isnan(x)] == NAN16).all()
        smallest = 2.0 ** (1 - format_.bias)
        inside = (np.abs(truth) >= smallest) & (np.abs(truth) <= format_.largest)
        unit = np.exp2(np.floor(np.log2(np.abs(truth[inside])))) * 2.0**-format_.mantissa
        check(torch.from_numpy(got[inside]), torch.from_numpy(truth[inside]), torch.from_numpy(0.51 * unit))
        tiny = np.abs(truth) < smallest
        if ftz and name != "tanh.approx":
            assert (got[tiny] == 0).all()
        else:
            assert (np.abs(got[tiny] - truth[tiny]) <= 0.51 * smallest * 2.0**-format_.mantissa).all()


def test_every_family_is_tested() -> None:
    """Each row of the table matches an instruction of a test here, or does nothing."""
    letters = {"d": "$0", "a": "$1", "b": "$2", "c": "$3"}
    texts = [case.text.format(**letters) for make in BATCHES.values() for case in make().cases]
    texts += [f"{name}{ftz}.f32 $0, $1;" for name in APPROXIMATE for ftz in ("", ".ftz")]
    texts += [f"{name} $0, $1;" for name in ("ex2.approx.f16", "ex2.approx.ftz.bf16x2", "tanh.approx.f16")]
    names = {step.name for text in texts for step in parse(text) if isinstance(step, Instruction)}
    untested = [
        family.pattern
        for family in ptx.FAMILIES
        if family.error != "does nothing" and not any(family.names.fullmatch(name) for name in names)
    ]
    assert not untested
