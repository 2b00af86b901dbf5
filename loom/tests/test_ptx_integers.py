"""PTX on integers and bits: arithmetic, comparisons, shifts, fields, permutations, every table of lop3."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from assembled import Batch, Case, Group, Reference, any_bits, integer_inputs, number, of_integers, verify


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
        cases.append(case("min.relu.s32", lambda a, b: max(min(a, b), 0), 2))
        cases.append(case("max.relu.s32", lambda a, b: max(a, b, 0), 2))
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
    join: dict[str, Callable[[bool, bool], bool]] = {
        "": lambda found, known: found,
        ".and": lambda found, known: found and known,
        ".or": lambda found, known: found or known,
        ".xor": lambda found, known: found != known,
    }
    cases = []
    for name, f in compare.items():
        text = f"{{{{ .reg .pred p, q, known; setp.eq.b{bits} known, {{b}}, {{c}}; mov.b{bits} {{d}}, 0;"
        for k, joined in enumerate(join):
            known = ", !known" if joined else ""
            text += f" setp.{name}{joined}.{kind} p|q, {{a}}, {{b}}{known};"
            text += f" @p or.b{bits} {{d}}, {{d}}, {1 << k}; @!q or.b{bits} {{d}}, {{d}}, {16 << k};"

        def both(a: int, b: int, c: int, f: Callable[[int, int], bool] = f) -> int:
            p = [g(f(a, b), b != c) for g in join.values()]
            q = [g(not f(a, b), b != c) for g in join.values()]
            return sum(
                found << k | (not other) << (4 + k) for k, (found, other) in enumerate(zip(p, q, strict=True))
            )

        cases.append(
            Case(text + " }}", bits, of_integers(both, f"{as_number} {as_number} {as_number}", bits))
        )
    chosen = f"{{{{ .reg .pred p; setp.lt.u{bits} p, {{a}}, {{b}}; selp.{kind} {{d}}, {{a}}, {{c}}, p; }}}}"
    cases.append(
        Case(chosen, bits, of_integers(lambda a, b, c: a if a < b else c, f"u{bits} u{bits} u{bits}", bits))
    )
    a, b, c = integer_inputs(bits)
    b[::3] = a[::3]
    c[::2] = b[::2]
    return Batch((a, b, c), tuple(cases))


def shift_batch(bits: int) -> Batch:
    """Return shifts; the distance is a 32-bit number for every type."""
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
    """Return bfe by the manual's definition, bit by bit."""
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
    """Return prmt by the manual's tables: per selector, the bytes from the highest to the lowest."""
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
    """Return the instructions that exist for 32 bits only."""
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

            def without_negatives(a: int, b: int, both: Callable[[int, int], int] = both) -> int:
                halves = [max(number(both(a, b) >> s, "s16"), 0) for s in (0, 16)]
                return halves[1] << 16 | halves[0]

            if t == "s" and name != "add":
                of_pairs = of_integers(without_negatives, "u32 u32", 32)
                cases.append(Case(f"{name}.relu.s16x2 {{d}}, {{a}}, {{b}};", 32, of_pairs))
    a, b, c = integer_inputs(32)
    return Batch((a, b, np.concatenate([np.arange(70, dtype=np.uint32), c])[: len(a)]), tuple(cases))


def lop3_batch() -> Batch:
    """Return every table of lop3, four per result, on inputs with every combination of three bits."""

    def reference(tables: range) -> Reference:
        def bytes_of(a: int, b: int, c: int) -> int:
            rows = [(a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1 for i in range(8)]
            results = [sum((table >> row & 1) << i for i, row in enumerate(rows)) for table in tables]
            return int.from_bytes(results, "little")

        return of_integers(bytes_of, "u32 u32 u32", 32)

    cases = []
    for first in range(0, 256, 4):
        tables = range(first, first + 4)
        text = " ".join(f"lop3.b32 t{k}, {{a}}, {{b}}, {{c}}, {table:#x};" for k, table in enumerate(tables))
        text += " prmt.b32 t0, t0, t1, 0x0040; prmt.b32 t2, t2, t3, 0x0040; prmt.b32 {d}, t0, t2, 0x5410;"
        cases.append(Case(f"{{{{ .reg .b32 t<4>; {text} }}}}", 32, reference(tables)))
    a, b, c = (np.array([value], np.uint32) for value in (0xF0, 0xCC, 0xAA))
    return Batch((a, b, c), tuple(cases))


KINDS = ("u16", "s16", "u32", "s32", "u64", "s64")
GROUPS: dict[str, Group] = {
    "arithmetic": lambda: [integer_batch(kind) for kind in KINDS],
    "comparisons": lambda: [compare_batch(kind) for kind in (*KINDS, "b16", "b32", "b64")],
    "shifts": lambda: [shift_batch(bits) for bits in (16, 32, 64)],
    "logic": lambda: [predicate_batch(), *(logic_batch(bits) for bits in (16, 32, 64))],
    "fields": lambda: [word_batch(), *(field_batch(bits) for bits in (32, 64))],
    "lop3": lambda: [lop3_batch()],
}


@pytest.mark.parametrize("group", list(GROUPS))
def test_bits(group: str) -> None:
    verify(GROUPS[group](), quick=group == "comparisons")
