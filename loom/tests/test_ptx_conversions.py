"""PTX conversions: between integers and floats of any size, to and from the small formats, to powers of two, and with
stochastic rounding."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from assembled import (
    NAN16,
    NAN32,
    Array,
    Batch,
    Case,
    Group,
    any_bits,
    bits32,
    f32,
    flushed32,
    half_bits,
    integer_inputs,
    number,
    of_integers,
    verify,
)
from formats import BF16, F16, SMALL, Format, small_code, small_values

INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")


WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def holding(kind: str) -> int:
    """Return the register width for a type in tests: no register has eight bits."""
    return max(16, int(kind[1:]))


def clamped(value: int, kind: str) -> int:
    bits = int(kind[1:])
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)
    return max(low, min(value, high))


def resize_batch(source: str) -> Batch:
    """Return conversions from the low bits of a register to a sign- or zero-extended register."""
    cases = []
    for to, sat in itertools.product(INTEGERS, (False, True)):
        bits = holding(to)
        cases.append(Case(f"cvt{'.sat' * sat}.{to}.{source} {{d}}, {{a}};", bits, of_integers(
            lambda a, to=to, sat=sat: clamped(a, to) if sat else number(a, to), source, bits)))  # fmt: skip
    return Batch(integer_inputs(holding(source), 1), tuple(cases))


def to_integer_batch(source: str) -> Batch:
    """Return float-to-integer conversions in four roundings: clamped, and NaN according to the manual."""
    widen: dict[str, Callable[[Array], Array]] = {
        "f32": lambda u: f32(u).astype(np.float64), "f64": lambda u: u.view(np.float64),
        "f16": lambda u: F16.values[u], "bf16": lambda u: BF16.values[u],
    }  # fmt: skip
    modifiers = {"f32": ("", ".sat", ".ftz", ".ftz.sat"), "bf16": ("",)}.get(source, ("", ".sat"))
    cases = []
    for (name, f), to, modifier in itertools.product(WHOLE.items(), INTEGERS, modifiers):
        bits = holding(to)

        def reference(
            a: Array, f: Any = f, to: str = to, bits: int = bits, ftz: bool = "ftz" in modifier
        ) -> Array:
            width = int(to[1:])
            nan = 1 << (width - 1) if width == 64 or source == "f64" else 0
            x = f(widen[source](flushed32(a) if ftz else a))
            low, high = (
                float(clamped(end, to)) for end in (-(1 << 70), 1 << 70)
            )  # high may round up to 2^64
            inside = (x > low) & (x < high)
            integral = (
                np.where(inside, x, 0).astype(np.int64 if to[0] == "s" else np.uint64).astype(np.uint64)
            )
            ends = [np.uint64(clamped(end, to) % (1 << 64)) for end in (-(1 << 70), 1 << 70)]
            integral = np.where(x <= low, ends[0], np.where(x >= high, ends[1], integral))
            integral = np.where(np.isnan(x), np.uint64(number(nan, to) % (1 << 64)), integral)
            return integral.astype(f"u{bits // 8}")

        cases.append(Case(f"cvt.{name}{modifier}.{to}.{source} {{d}}, {{a}};", bits, reference))
    halves = np.arange(-300, 300) / 2
    ends = np.array([2.0**n + d for n in (7, 8, 15, 16, 31, 32, 63, 64) for d in (-1.0, -0.5, 0.0, 0.5, 1.0)])
    numbers = np.concatenate([halves, ends, -ends, [np.inf, -np.inf, np.nan, 1e300, 1e-300]])
    with np.errstate(over="ignore"):
        inputs = {
            "f32": lambda: np.concatenate([numbers.astype(np.float32).view(np.uint32), any_bits(32, 500)]),
            "f64": lambda: np.concatenate([numbers.view(np.uint64), any_bits(64, 500)]),
            "f16": lambda: np.arange(1 << 16, dtype=np.uint16),
            "bf16": lambda: np.arange(1 << 16, dtype=np.uint16),
        }[source]()
    return Batch((inputs,), tuple(cases))


def from_integer_batch(source: str) -> Batch:
    """Return integer-to-float conversions, with NumPy's long double, which represents every 64-bit integer."""

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
    """Return widening conversions of every code of f16 and bf16."""

    cases = [
        Case(
            f"cvt{'.ftz' * ftz}{'.sat' * sat}.f32.{kind} {{d}}, {{a}};",
            32,
            lambda a, ftz=ftz, sat=sat: bits32(format_.values[a].astype(np.float32), ftz, sat),
        )
        for ftz, sat in itertools.product((False, True), repeat=2)
    ]
    cases.append(Case(f"cvt.f64.{kind} {{d}}, {{a}};", 64, lambda a: format_.values[a].view(np.uint64)))
    other, name = (BF16, "bf16") if kind == "f16" else (F16, "f16")
    for mode in (".rn", ".rz", *([""] if kind == "f16" else [])):
        cases.append(
            Case(
                f"cvt{mode}.{name}.{kind} {{d}}, {{a}};",
                16,
                lambda a, mode=mode: np.where(
                    np.isnan(format_.values[a]), NAN16, other.encode(format_.values[a], mode == ".rz")
                ).astype(np.uint16),
            )
        )
    codes = np.arange(1 << 16, dtype=np.uint16)
    not_nan = ~np.isnan(format_.values)  # whose bits in f64 are nobody's
    return Batch((codes[not_nan],), tuple(cases))


def narrowing_batch() -> Batch:
    """Return conversions of f32 to f16 and bf16, singly and in pairs, over every boundary and random bits."""
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
    for ftz, sat in itertools.product((False, True), repeat=2):

        def read(a: Array, ftz: bool = ftz) -> Array:
            return f32(flushed32(a) if ftz else a)

        modifiers = ".ftz" * ftz + ".sat" * sat
        if modifiers:
            cases.append(
                Case(
                    f"cvt.rn{modifiers}.f16.f32 {{d}}, {{a}};",
                    16,
                    lambda a, b, r=read, sat=sat: half_bits(F16, r(a).astype(np.float64), sat=sat),
                )
            )
        for name, f in {"": lambda x: x, **{f".{name}": f for name, f in WHOLE.items()}}.items():
            cases.append(
                Case(
                    f"cvt{name}{modifiers}.f32.f32 {{d}}, {{a}};",
                    32,
                    lambda a, b, r=read, f=f, ftz=ftz, sat=sat: bits32(f(r(a)), ftz, sat),
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
    a = np.concatenate([a, np.array([0x7F800001, 0xFFC00000], np.uint32)])
    return Batch((a, np.roll(a, 13)), tuple(cases))


def from_f64_batch() -> Batch:
    cases = []
    for mode, ftz, sat in itertools.product(("rn", "rz"), (False, True), (False, True)):

        def single(a: Array, mode: str = mode, ftz: bool = ftz, sat: bool = sat) -> Array:
            x = a.view(np.float64)
            nearest = x.astype(np.float32)
            if mode == "rz":
                beyond = np.isfinite(x) & (np.abs(nearest.astype(np.float64)) > np.abs(x))
                nearest = np.where(beyond, np.nextafter(nearest, np.float32(0)), nearest)
            return bits32(nearest, ftz, sat)

        cases.append(Case(f"cvt.{mode}{'.ftz' * ftz}{'.sat' * sat}.f32.f64 {{d}}, {{a}};", 32, single))
    for mode, (format_, kind) in itertools.product(("rn", "rz"), ((F16, "f16"), (BF16, "bf16"))):
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
        [edges, np.nextafter(edges, np.inf), np.nextafter(edges, 0), np.random.normal(0, 1, 1000)]
    )
    return Batch((np.concatenate([near, near * 2.0**-118]).view(np.uint64),), tuple(cases))


def to_f64_batches() -> list[Batch]:
    """Return conversions to f64, without NaN, whose bits are unspecified."""
    single = np.concatenate([F16.boundaries()[::11], f32(any_bits(32, 3000))])
    double = np.concatenate([np.arange(-300, 300) / 4, any_bits(64, 1000).view(np.float64), [2.0**52 + 0.5]])
    return [
        Batch(
            (single[~np.isnan(single)].view(np.uint32),),
            (Case("cvt.f64.f32 {d}, {a};", 64, lambda a: f32(a).astype(np.float64).view(np.uint64)),),
        ),
        Batch(
            (double[~np.isnan(double)].view(np.uint64),),
            tuple(
                Case(
                    f"cvt.{name}.f64.f64 {{d}}, {{a}};",
                    64,
                    lambda a, f=f: f(a.view(np.float64)).view(np.uint64),
                )
                for name, f in WHOLE.items()
            ),
        ),
    ]


def small_batch(name: str) -> Batch:
    """Return conversions of two f32 to a small format over every boundary, and back from every pair of codes."""
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
            np.random.normal(0, 2, 2000).astype(np.float32).view(np.uint32),
        ]
    )
    return Batch((a, np.roll(a, 3)), tuple(cases))


def small_from_half_batch(name: str) -> Batch:
    """Return conversions of all f16, or all bf16, in one half of a register."""
    width = 4 if name == "e2m1" else 8
    narrow = "{{ .reg .b8 t; @ t, {a}; cvt.u16.u8 {d}, t; }}" if width == 4 else "@ {d}, {a};"
    cases = []
    for (format_, kind), relu in itertools.product(((F16, "f16"), (BF16, "bf16")), (False, True)):

        def reference(a: Array, format_: Format = format_, relu: bool = relu) -> Array:
            codes = []
            for shift in (16, 0):
                x = format_.values[a >> shift & 0xFFFF]
                codes.append(np.where(relu & np.signbit(x) & ~np.isnan(x), 0, small_code(name, x)))
            return (codes[0] << width | codes[1]).astype(np.uint16)

        for order in [".satfinite.relu", ".relu.satfinite"] if relu else [".satfinite"]:
            cases.append(Case(narrow.replace("@", f"cvt.rn{order}.{name}x2.{kind}x2"), 16, reference))
    codes = np.arange(1 << 16, dtype=np.uint32)
    return Batch((codes | np.roll(codes, 12345) << 16,), tuple(cases))


def small_to_half_batch(name: str) -> Batch:
    """Return conversions of every pair of 4-bit codes, and of every 8-bit code beside another."""
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
    """Return conversions of f32 and of bf16 pairs to powers of two, up and toward zero."""

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
    """Return the index in a table of magnitudes where |x| + share * (distance to the next one) lands.

    `share` has as many bits as the hardware adds, below 1; numbers of the table and of float64 are exact."""
    size = np.minimum(np.abs(x), largest)
    low = np.searchsorted(grid, size, side="right") - 1
    high = np.minimum(low + 1, len(grid) - 1)
    gap = np.where(high > low, grid[high] - grid[low], 1)
    up = (size - grid[low]) / gap + share >= 1
    return np.where(up & (high > low), high, low)


def random_lanes(random: Array, width: int) -> list[Array]:
    """Return the sixteen random bits of each of four operands, by the tables of others' measurement (docs/assembly.md):
    which bit of the word is the highest, and so on down."""
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
    """Return conversions of four operands, a twice, b and -b: signs and magnitudes of either pair."""
    width = 4 if name == "e2m1" else 8
    format_ = SMALL[name]
    cases = []
    for relu in (False, True):

        def code(a: Array, share: Array, relu: bool = relu) -> Array:
            x = f32(a).astype(np.float64)
            magnitude = stochastic(format_.magnitudes, np.where(np.isnan(x), 0, x), share, format_.largest)
            if name == "e5m2":
                magnitude = np.minimum(magnitude, 0x7B)
            signed = magnitude | np.where(np.signbit(x), format_.sign, 0)
            signed = np.where(relu & np.signbit(x), 0, signed)
            return np.where(np.isnan(x), 0x7F if format_.sign == 128 else format_.sign - 1, signed).astype(
                np.uint32
            )

        def reference(a: Array, b: Array, c: Array, code: Any = code) -> Array:
            shares = random_lanes(c, width)
            codes = [code(v, s) for v, s in zip((a, b, b ^ np.uint32(1 << 31), a), shares, strict=True)]
            word = codes[0] << 3 * width | codes[1] << 2 * width | codes[2] << width | codes[3]
            return word.astype(np.uint16 if width == 4 else np.uint32)

        quad = f"{{{{ .reg .b32 n; neg.f32 n, {{b}}; cvt.rs{'.relu' * relu}.satfinite.{name}x4.f32 {{d}}, "
        quad += "{{ {a}, {b}, n, {a} }}, {c}; }}"
        cases.append(Case(quad, 16 if width == 4 else 32, reference))

    def numbers(count: int) -> Array:
        x = np.random.normal(0, format_.largest / 3, count).astype(np.float32)
        small = np.random.normal(0, float(format_.magnitudes[2]) * 2, count).astype(np.float32)
        special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1, 1.5, 1e9, 1e-9] * 20, np.float32)
        return np.concatenate([x, small, special]).view(np.uint32)

    a, b = numbers(3000), numbers(3000)
    return Batch((a, b, any_bits(32, len(a))), tuple(cases))


def stochastic_two_batch() -> Batch:
    cases = []
    for (format_, kind, used), sat, relu in itertools.product(
        ((F16, "f16", 13), (BF16, "bf16", 16)), (False, True), (False, True)
    ):

        def code(
            a: Array,
            random: Array,
            format_: Format = format_,
            used: int = used,
            sat: bool = sat,
            relu: bool = relu,
        ) -> Array:
            x = f32(a).astype(np.float64)
            share = (random & ((1 << used) - 1)) / 2.0**used
            finite = np.where(np.isfinite(x), x, 0)
            largest = format_.largest if sat else np.inf
            magnitude = stochastic(format_.magnitudes, finite, share, largest)
            infinite = len(format_.magnitudes) - 1
            magnitude = np.where(np.isinf(x), infinite - sat, np.minimum(magnitude, infinite - sat))
            signed = magnitude | np.where(np.signbit(x), 0x8000, 0)
            signed = np.where(relu & np.signbit(x), 0, signed)
            return np.where(np.isnan(x), NAN16, signed).astype(np.uint32)

        cases.append(
            Case(
                f"cvt.rs{'.relu' * relu}{'.satfinite' * sat}.{kind}x2.f32 {{d}}, {{a}}, {{b}}, {{c}};",
                32,
                lambda a, b, c, code=code: code(a, c >> 16) << 16 | code(b, c & 0xFFFF),
            )
        )
    ordinary = np.random.normal(0, 1, 4000).astype(np.float32).view(np.uint32)
    a = np.concatenate([any_bits(32, 4000), ordinary, F16.boundaries()[::60].view(np.uint32)])
    return Batch((a, np.roll(a, 11), any_bits(32, len(a))), tuple(cases))


GROUPS: dict[str, Group] = {
    "integers": lambda: [resize_batch(kind) for kind in INTEGERS],
    "to integers": lambda: [to_integer_batch(kind) for kind in ("f16", "bf16", "f32", "f64")],
    "from integers": lambda: [from_integer_batch(kind) for kind in INTEGERS],
    "floats": lambda: [
        widening_batch(F16, "f16"),
        widening_batch(BF16, "bf16"),
        narrowing_batch(),
        from_f64_batch(),
        *to_f64_batches(),
    ],
    "to small": lambda: [make(kind) for kind in SMALL for make in (small_batch, small_from_half_batch)],
    "from small": lambda: [small_to_half_batch(kind) for kind in SMALL],
    "exponents": lambda: [exponent_batch(), from_exponent_batch()],
    "stochastic": lambda: [stochastic_two_batch(), *(stochastic_four_batch(kind) for kind in SMALL)],
}


@pytest.mark.parametrize("group", list(GROUPS))
def test_bits(group: str) -> None:
    verify(GROUPS[group]())
