"""ldmatrix, stmatrix and mma.sync: layouts of elements in lanes; sums with one rounding per term, in the order of k."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from assembled import to_odd
from formats import BF16, F16, Format, small_values
from gpu.emulated import Array, kinds, launch, words
from triton_loom.emulator.machine import Options

LANES = range(32)


def load_words(first: str, pointer: int, count: int) -> str:
    """Return a text that loads registers first0, first1, ... from p<pointer>[lane][count]."""
    lines = [f"mul.wide.u32 %rd90, %r0, {4 * count}; add.s64 %rd90, %rd90, %rd{pointer};"]
    return "\n".join([*lines, *(f"ld.global.b32 {first}{k}, [%rd90+{4 * k}];" for k in range(count))])


def store_words(first: str, pointer: int, count: int) -> str:
    lines = [f"mul.wide.u32 %rd90, %r0, {4 * count}; add.s64 %rd90, %rd90, %rd{pointer};"]
    return "\n".join([*lines, *(f"st.global.b32 [%rd90+{4 * k}], {first}{k};" for k in range(count))])


def listed(first: str, count: int) -> str:
    return "{" + ", ".join(f"{first}{k}" for k in range(count)) + "}"


# ---- to and from shared memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_of_shared_memory(count: int, transposed: bool) -> None:
    """Rows are anywhere; lane l gets elements 2 (l % 4) and the next one of row l / 4, or of that column."""
    rng = np.random.default_rng(count)
    data = np.arange(2048, dtype=np.uint16)  # every element is its index
    rows = rng.permutation(256)[:32].astype(np.uint32) * 16
    got, copy = words(32 * count), np.zeros(2048, np.uint16)
    suffix = ".trans" if transposed else ""
    body = f"""
      mov.b32 %r1, smem; {load_words("%r2", 1, 1).replace("%r20", "%r2")}
      mad.lo.s32 %r3, %r0, 16, %r1; mul.wide.u32 %rd5, %r0, 16; add.s64 %rd6, %rd5, %rd2;
      mov.b32 %r4, 0;
    fill:
      ld.global.v4.b32 {{%r5, %r6, %r7, %r8}}, [%rd6]; st.shared.v4.b32 [%r3], {{%r5, %r6, %r7, %r8}};
      add.s64 %rd6, %rd6, 512; add.s32 %r3, %r3, 512; add.s32 %r4, %r4, 1; setp.lt.s32 %p1, %r4, 8; @%p1 bra fill;
      bar.sync 0; add.s32 %r2, %r2, %r1;
      ldmatrix.sync.aligned.m8n8.x{count}{suffix}.shared.b16 {listed("%r1", count).replace("%r1", "%r10")}, [%r2];
      {store_words("%r10", 0, count)}
      bar.sync 0; add.s32 %r2, %r2, 4096;
      stmatrix.sync.aligned.m8n8.x{count}{suffix}.shared::cta.b16 [%r2], {listed("%r1", count).replace("%r1", "%r10")};
    """
    outcome = launch(body, got, rows, data, copy, shared=8192)
    assert not outcome.findings
    matrices = [data.reshape(-1, 8)[rows[8 * m : 8 * m + 8] // 16] for m in range(count)]
    for lane in LANES:
        for m in range(count):
            matrix = matrices[m].T if transposed else matrices[m]
            low, high = (int(matrix[lane // 4, lane % 4 * 2 + k]) for k in (0, 1))
            assert got.reshape(32, count)[lane, m] == low | high << 16
    # Reading stmatrix's output row by row gives the matrices again.
    read = body + f"bar.sync 0; {{ .reg .pred q; setp.lt.u32 q, %r0, {8 * count}; @!q bra end;" \
        "ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r2]; mul.wide.u32 %rd5, %r0, 16; add.s64 %rd5, %rd5, %rd3;" \
        "st.global.v4.b32 [%rd5], {%r5, %r6, %r7, %r8}; end: }"  # fmt: skip
    assert not launch(read, got, rows, data, copy, shared=8192).findings
    assert (copy[: 64 * count].reshape(count, 8, 8) == np.array(matrices)).all()


# ---- products --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Element:
    """An element type: bits, and the value of each code."""

    bits: int
    numbers: Callable[[Array], Array]

    def codes(self, shape: tuple[int, int], rng: np.random.Generator) -> Array:
        """Return numbers of ordinary size, as codes."""
        raw = rng.integers(0, 1 << self.bits, (4096,), dtype=np.uint64).astype(np.uint32)
        with np.errstate(invalid="ignore"):
            numbers = self.numbers(raw)
            raw = raw[(np.abs(numbers) < 300) & (np.abs(numbers) > 1e-3)]
        return np.resize(raw, shape)


def _small(name: str) -> Callable[[Array], Array]:
    return lambda codes: small_values(name)[codes]


def _half(format_: Format) -> Callable[[Array], Array]:
    return lambda codes: format_.values[codes]


ELEMENTS = {
    "bf16": Element(16, _half(BF16)),
    "f16": Element(16, _half(F16)),
    "tf32": Element(32, lambda codes: (codes & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)),
    "s8": Element(8, lambda codes: codes.astype(np.uint8).view(np.int8).astype(np.float64)),
    "u8": Element(8, lambda codes: codes.astype(np.float64)),
    "e4m3": Element(8, _small("e4m3")),
    "e5m2": Element(8, _small("e5m2")),
    "e2m1": Element(4, _small("e2m1")),
}


def a_place(bits: int, i: int, lane: int) -> tuple[int, int]:
    """Return row and column of a_i in the ISA's figures: k = 8 (tf32), 16 (16 bits), 32 (8 bits), 64 (4 bits)."""
    g, t = lane // 4, lane % 4
    if bits == 32:
        return g + 8 * (i % 2), t + 4 * (i // 2)
    if bits == 16:
        return (g if i in (0, 1, 4, 5) else g + 8), t * 2 + (i & 1) + (8 if i >= 4 else 0)
    if bits == 8:
        return (g if i < 4 or 8 <= i < 12 else g + 8), t * 4 + (i & 3) + (16 if i >= 8 else 0)
    return (g if i < 8 or 16 <= i < 24 else g + 8), t * 8 + (i & 7) + (32 if i >= 16 else 0)


def b_place(bits: int, i: int, lane: int) -> tuple[int, int]:
    g, t = lane // 4, lane % 4
    if bits == 32:
        return t + 4 * i, g
    if bits == 16:
        return t * 2 + (i & 1) + (8 if i >= 2 else 0), g
    if bits == 8:
        return t * 4 + (i & 3) + (16 if i >= 4 else 0), g
    return t * 8 + (i & 7) + (32 if i >= 8 else 0), g


def c_place(i: int, lane: int) -> tuple[int, int]:
    return lane // 4 + (8 if i >= 2 else 0), lane % 4 * 2 + (i & 1)


def packed(
    matrix: Array, bits: int, place: Callable[[int, int, int], tuple[int, int]], registers: int
) -> Array:
    """Return the registers of all lanes with a matrix of codes in them."""
    per_register = 32 // bits
    out = np.zeros((32, registers), np.uint32)
    for lane in LANES:
        for i in range(registers * per_register):
            code = int(matrix[place(bits, i, lane)]) & ((1 << bits) - 1)
            out[lane, i // per_register] |= np.uint32(code << bits * (i % per_register))
    return out


def chain(a: Array, b: Array, c: Array) -> Array:
    """Return c plus the products one by one in f32, each rounded once; products of short numbers are exact in f64."""
    total = c.astype(np.float32)
    for k in range(a.shape[1]):
        exact = to_odd(np.multiply.outer(a[:, k], b[k]).ravel(), total.astype(np.float64).ravel())
        total = exact.reshape(total.shape).astype(np.float32)
    return total


SHAPES = [
    ("m16n8k16", "f32", "bf16", "bf16"), ("m16n8k8", "f32", "bf16", "bf16"),
    ("m16n8k16", "f32", "f16", "f16"), ("m16n8k8", "f32", "f16", "f16"), ("m16n8k16", "f16", "f16", "f16"),
    ("m16n8k8", "f32", "tf32", "tf32"), ("m16n8k4", "f32", "tf32", "tf32"),
    *(("m16n8k32", d, a, b) for d in ("f32", "f16") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
    *((f"m16n8k{k}", "s32", a, b) for k in (16, 32) for a in ("s8", "u8") for b in ("s8", "u8")),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "to", "of_a", "of_b"), SHAPES)
def test_product(shape: str, to: str, of_a: str, of_b: str) -> None:
    rng = np.random.default_rng(7)
    depth = int(shape.split("k")[1])
    a_type, b_type = ELEMENTS[of_a], ELEMENTS[of_b]
    a, b = a_type.codes((16, depth), rng), b_type.codes((depth, 8), rng)
    rng.shuffle(a.ravel())
    rng.shuffle(b.ravel())
    bits = a_type.bits
    a_words = packed(a, bits, a_place, depth * bits // 64)
    b_words = packed(b, bits, b_place, depth * bits // 128)
    if to == "s32":
        c = rng.integers(-(1 << 20), 1 << 20, (16, 8)).astype(np.int32)
    else:
        c = rng.normal(0, 4, (16, 8)).astype(np.float32)
    if to == "f16":
        codes = c.astype(np.float16).view(np.uint16)
        c_words = packed(codes, 16, lambda _, i, lane: c_place(i, lane), 2)
        start = codes.view(np.float16).astype(np.float32)
    else:
        c_words = packed(c.view(np.uint32), 32, lambda _, i, lane: c_place(i, lane), 4)
        start = c
    got = np.zeros_like(c_words)
    sizes = [c_words.shape[1], a_words.shape[1], b_words.shape[1]]
    body = f"""
      {load_words("%r20", 1, sizes[1])} {load_words("%r30", 2, sizes[2])} {load_words("%r40", 3, sizes[0])}
      mma.sync.aligned.{shape}.row.col.{to}.{of_a}.{of_b}.{to} {listed("%r50", sizes[0])}, {listed("%r20", sizes[1])},
        {listed("%r30", sizes[2])}, {listed("%r40", sizes[0])};
      {store_words("%r50", 0, sizes[0])}
    """
    for name in ("%r20", "%r30", "%r40", "%r50"):
        for k in reversed(range(8)):
            body = body.replace(f"{name}{k}", f"%r{int(name[2:]) * 2 + k}")
    assert not launch(body, got, a_words, b_words, c_words).findings
    with np.errstate(invalid="ignore"):
        numbers_a, numbers_b = a_type.numbers(a), b_type.numbers(b)
    if to == "s32":
        expected = (numbers_a @ numbers_b).astype(np.int64) + start
        result = expected.astype(np.int32).view(np.uint32)
        assert (got == packed(result, 32, lambda _, i, lane: c_place(i, lane), 4)).all()
    elif to == "f16":
        with np.errstate(over="ignore"):
            result = chain(numbers_a, numbers_b, start).astype(np.float16).view(np.uint16)
        assert (got == packed(result, 16, lambda _, i, lane: c_place(i, lane), 2)).all()
    else:
        result = chain(numbers_a, numbers_b, start).view(np.uint32)
        assert (got == packed(result, 32, lambda _, i, lane: c_place(i, lane), 4)).all()


SCALED = [
    ("m16n8k32", "mxf8f6f4", 1, "e4m3", "e5m2", "ue8m0"),
    ("m16n8k32", "mxf8f6f4", 1, "e5m2", "e4m3", "ue8m0"),
    ("m16n8k64", "mxf4", 2, "e2m1", "e2m1", "ue8m0"),
    ("m16n8k64", "mxf4nvf4", 2, "e2m1", "e2m1", "ue8m0"),
    ("m16n8k64", "mxf4nvf4", 4, "e2m1", "e2m1", "ue4m3"),
]


@pytest.mark.parametrize(("shape", "kind", "vector", "of_a", "of_b", "scale"), SCALED)
@pytest.mark.parametrize("last", [False, True])
def test_product_with_scales(
    shape: str, kind: str, vector: int, of_a: str, of_b: str, scale: str, last: bool
) -> None:
    """Two lanes of a quad have the scales of its two rows of A, one has those of its column of B; the instruction
    selects the lanes and the first byte. All other bytes are values that must not be read."""
    rng = np.random.default_rng(3)
    depth = int(shape.split("k")[1])
    a_type, b_type = ELEMENTS[of_a], ELEMENTS[of_b]
    a, b = a_type.codes((16, depth), rng), b_type.codes((depth, 8), rng)
    rng.shuffle(a.ravel())
    rng.shuffle(b.ravel())
    codes = (120, 134) if scale == "ue8m0" else (40, 80)
    scales_a, scales_b = (rng.integers(*codes, (size, vector)) for size in (16, 8))
    byte, thread_a, thread_b = (4 - vector, 1, 3) if last else (0, 0, 0)
    words_a, words_b = np.full((32, 4), 0xFF, np.uint8), np.full((32, 4), 0xFF, np.uint8)
    for lane in LANES:
        if lane % 4 // 2 == thread_a:
            words_a[lane, byte : byte + vector] = scales_a[lane // 4 + 8 * (lane % 2)]
        if lane % 4 == thread_b:
            words_b[lane, byte : byte + vector] = scales_b[lane // 4]
    bits = a_type.bits
    a_words, b_words = packed(a, bits, a_place, 4), packed(b, bits, b_place, 2)
    c = rng.normal(0, 4, (16, 8)).astype(np.float32)
    c_words = packed(c.view(np.uint32), 32, lambda _, i, lane: c_place(i, lane), 4)
    got = np.zeros_like(c_words)
    body = f"""
      {load_words("%r2", 1, 4)} {load_words("%r3", 2, 2)} {load_words("%r4", 3, 4)}
      {load_words("%r5", 4, 1)} {load_words("%r6", 5, 1)}
      mma.sync.aligned.{shape}.row.col.kind::{kind}.block_scale.scale_vec::{vector}X.f32.{of_a}.{of_b}.f32.{scale}
        {listed("%r7", 4)}, {listed("%r2", 4)}, {listed("%r3", 2)}, {listed("%r4", 4)},
        %r50, {{{byte}, {thread_a}}}, %r60, {{{byte}, {thread_b}}};
      {store_words("%r7", 0, 4)}
    """
    assert not launch(body, got, a_words, b_words, c_words, words_a, words_b).findings

    def scaled(numbers: Array, scales: Array) -> Array:
        values = 2.0 ** (scales - 127.0) if scale == "ue8m0" else small_values("e4m3")[scales]
        return numbers * np.repeat(values, depth // vector, 1)

    result = chain(scaled(a_type.numbers(a), scales_a), scaled(b_type.numbers(b).T, scales_b).T, c)
    assert (got == packed(result.view(np.uint32), 32, lambda _, i, lane: c_place(i, lane), 4)).all()


def test_integers_that_do_not_fit() -> None:
    """They wrap, or saturate with .satfinite."""
    a, b = np.full((32, 4), 0x7F7F7F7F, np.uint32), np.full((32, 2), 0x7F7F7F7F, np.uint32)
    c = np.full((32, 4), 0x7FFFFFF0, np.uint32)
    for modifier, want in (("", (0x7FFFFFF0 + 32 * 127 * 127) & 0xFFFFFFFF), (".satfinite", 0x7FFFFFFF)):
        got = np.zeros_like(c)
        body = f"""
          {load_words("%r2", 1, 4)} {load_words("%r3", 2, 2)} {load_words("%r4", 3, 4)}
          mma.sync.aligned.m16n8k32.row.col{modifier}.s32.s8.s8.s32 {listed("%r5", 4)}, {listed("%r2", 4)},
            {listed("%r3", 2)}, {listed("%r4", 4)};
          {store_words("%r5", 0, 4)}
        """
        launch(body, got, a, b, c)
        assert (got == want).all()


@pytest.mark.parametrize(("rows", "k"), [(8, 4), (16, 4), (16, 8), (16, 16)])
def test_product_of_doubles(rows: int, k: int) -> None:
    """A lane has elements of every eighth row and every fourth column of A, then of B and, in pairs, of C."""
    rng = np.random.default_rng(0)
    a, b, c = rng.normal(size=(rows, k)), rng.normal(size=(k, 8)), rng.normal(size=(rows, 8))
    group, member = np.arange(32) // 4, np.arange(32) % 4
    parts = range(rows // 8)
    a_lanes = np.stack([a[group + 8 * r, member + q] for q in range(0, k, 4) for r in parts], 1)
    b_lanes = np.stack([b[member + q, group] for q in range(0, k, 4)], 1)

    def pairs(matrix: Array) -> Array:
        return np.stack([matrix[group + 8 * r, member * 2 + h] for r in parts for h in range(2)], 1)

    operands = [a_lanes, b_lanes, pairs(c)]
    got = np.zeros_like(operands[2])
    lines, names, register = [], [], 20
    for number, operand in enumerate(operands, 1):
        count = operand.shape[1]
        lines.append(f"mul.wide.u32 %rd17, %r0, {8 * count}; add.s64 %rd17, %rd17, %rd{number};")
        names.append([f"%rd{register + n}" for n in range(count)])
        lines += [f"ld.global.b64 {name}, [%rd17+{8 * n}];" for n, name in enumerate(names[-1])]
        register += count
    result = [f"%rd{register + n}" for n in range(got.shape[1])]
    vectors = ", ".join("{" + ", ".join(each) + "}" for each in (result, *names))
    lines.append(f"mma.sync.aligned.m{rows}n8k{k}.row.col.f64.f64.f64.f64 {vectors};")
    lines.append(f"mul.wide.u32 %rd17, %r0, {8 * len(result)}; add.s64 %rd17, %rd17, %rd0;")
    lines += [f"st.global.b64 [%rd17+{8 * n}], {name};" for n, name in enumerate(result)]
    assert not launch("\n".join(lines), got, *map(np.ascontiguousarray, operands)).findings
    np.testing.assert_allclose(got, pairs(a @ b + c), rtol=1e-13, atol=1e-13)


def test_a_product_by_a_part_of_the_warp() -> None:
    product = (
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r2, %r3, %r4, %r5}, {%r2, %r3, %r4, %r5}, {%r2, %r3}, "
        "{%r2, %r3, %r4, %r5};"
    )
    zero = "mov.b32 %r2, 0; mov.b32 %r3, 0; mov.b32 %r4, 0; mov.b32 %r5, 0; setp.lt.u32 %p1, %r0, 3;"
    out = words(1)
    assert kinds(launch(f"{zero} {product}", out, options=Options())) == []
    assert kinds(launch(f"{zero} @%p1 bra end; {product} end:", out)) == ["split warp"]
