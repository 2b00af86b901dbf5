"""Products of sm_100: every kind, both majors, every swizzle, A from tensor memory, scales, copies, and their order.

Matrices have small integers (or halves), so that every sum is exact and a single misplaced element shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from gpu.blackwell import LANES, TILES_AT, Kernel, only, unwritten
from gpu.emulated import kinds
from gpu.hopper import SWIZZLES, Array, swizzled
from gpu.test_wgmma import BITS, SPAN, Place, codes
from gpu.test_wgmma import numbers as integers
from triton_loom.emulator.machine import CHECKED, Options, Outcome

VERSION = 1 << 46
A_AT, B_AT, SCALES_AT, ROOM = TILES_AT, TILES_AT + 16384, 32768, TILES_AT + 34816
A_COLUMN, A_SCALES, B_SCALES = 128, 144, 152  # of tensor memory; D begins at 0
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
KINDS = {"bf16": "f16", "f16": "f16", "tf32": "tf32", "s8": "i8", "u8": "i8"}
# In an instruction descriptor.
TYPES = {"f16": 0, "bf16": 1, "tf32": 2, "u8": 0, "s8": 1, "e4m3": 0, "e5m2": 1, "e2m1": 5}
RESULTS = {"f16": 0, "f32": 1, "s32": 2}


@dataclass(frozen=True)
class TilePlace(Place):
    """Location of a matrix in shared memory, for a step of k, which has more than 16 elements if they are bytes."""

    eights: int = 2  # of k

    def strides(self, rows: int) -> tuple[int, int]:
        leading, stride = super().strides(rows)
        if self.mn_major and self.swizzle != "none":
            leading = self.eights * 8 * SPAN[self.swizzle]
        return leading, stride

    def descriptor(self, at: int, rows: int) -> int:
        bits = super().descriptor(at, rows)
        return bits | VERSION


def of_step(place: Place | None, type_: str) -> TilePlace | None:
    if place is None:
        return None
    return TilePlace(place.swizzle, place.mn_major, place.step, 256 // BITS.get(type_, 8) // 8)


WIDE = Place()


@dataclass(frozen=True)
class Product:
    """A product D = A B, or D + A B, with scales if there are any for a step of k."""

    a: str = "bf16"
    b: str = "bf16"
    result: str = "f32"
    rows: int = 128
    columns: int = 64
    a_place: Place | None = WIDE  # None: in tensor memory
    b_place: Place = WIDE
    adds: bool = True
    signs: tuple[int, int] = (1, 1)
    half: int = 0  # of 64 rows: which sixteen lanes of a quarter
    kind: str = ""
    scales: int = 0
    a_id: int = 0  # the first byte of a cell that is a scale
    b_id: int = 0
    saturates: bool = False

    @property
    def name(self) -> str:
        if not self.kind:
            return KINDS.get(self.a, "f8f6f4")
        return f"{self.kind}.block_scale.scale_vec::{self.scales}X"

    @property
    def packed(self) -> bool:
        return self.kind.startswith("mxf4")

    @property
    def k(self) -> int:
        return 64 if self.packed else 256 // BITS.get(self.a, 8)

    @property
    def instruction(self) -> int:
        """Return the instruction descriptor."""
        types = (1, 1) if self.packed else (TYPES[self.a], TYPES[self.b])
        a_mn, b_mn = bool(self.a_place and self.a_place.mn_major), self.b_place.mn_major
        bits = types[0] << 7 | types[1] << 10 | (self.signs[0] < 0) << 13 | (self.signs[1] < 0) << 14
        bits |= a_mn << 15 | b_mn << 16 | self.columns // 8 << 17 | self.rows // 16 << 24
        if not self.scales:
            return bits | RESULTS[self.result] << 4 | self.saturates << 3
        return bits | self.b_id << 4 | (self.scales != 4) << 23 | self.a_id << 29

    @property
    def opcode(self) -> str:
        return f"tcgen05.mma.cta_group::1.kind::{self.name}"

    def statement(self, adds: bool | None = None) -> str:
        lane = 16 * self.half << 16
        left = f"[%r10 + {lane | A_COLUMN}]" if self.a_place is None else "%rd50"
        scales = "[%r20], [%r21], " if self.scales else ""
        a = of_step(self.a_place, self.a)
        b = of_step(self.b_place, self.b)
        assert b is not None
        return (
            f"mov.b64 %rd50, {a.descriptor(A_AT, self.rows) if a else 0}; mov.b64 %rd51, "
            f"{b.descriptor(B_AT, self.columns)}; mov.b32 %r22, {self.instruction}; "
            f"setp.eq.b32 %p5, {int(self.adds if adds is None else adds)}, 1; add.s32 %r20, %r10, {A_SCALES}; "
            f"add.s32 %r21, %r10, {B_SCALES}; "
            f"{self.opcode} [%r10 + {lane}], {left}, %rd51, %r22, {scales}%p5;"
        )


# ---- numbers and where they lie ------------------------------------------------------------------------------------


def operand(rows: int, type_: str, k: int, seed: int) -> tuple[Array, Array]:
    """Return numbers and their codes."""
    if type_ == "e2m1":
        nibbles = np.random.default_rng(seed).integers(0, 16, (rows, k)).astype(np.uint8)
        return FP4[nibbles & 7] * np.where(nibbles >= 8, -1, 1), nibbles
    numbers = integers((rows, k), type_, seed)
    return numbers.astype(np.float64), codes(numbers, type_)


def as_bytes(elements: Array, type_: str, packed: bool) -> Array:
    """Return a row's elements as bytes; 4-bit elements are packed, or 16 of them fill half of 16 bytes."""
    if type_ != "e2m1":
        return elements
    pairs = elements[:, ::2] | elements[:, 1::2] << 4
    if packed:
        return pairs
    padded = np.zeros((elements.shape[0], elements.shape[1]), np.uint8)
    for chunk in range(elements.shape[1] // 16):
        padded[:, 16 * chunk : 16 * chunk + 8] = pairs[:, 8 * chunk : 8 * chunk + 8]
    return padded


def lanes(case: Product) -> Array:
    """Return the lane of each row of D and A."""
    row = np.arange(case.rows)
    return row if case.rows == 128 else row // 16 * 32 + row % 16 + 16 * case.half


def write_tile(memory: Array, at: int, place: TilePlace, matrix: Array) -> None:
    row, k = np.indices(matrix.shape)
    offset = place.offset(row, k, matrix.itemsize, matrix.shape[0])  # type: ignore[arg-type]
    offsets = np.asarray(swizzled(at + offset, place.swizzle)) - TILES_AT
    content = np.ascontiguousarray(matrix).view(np.uint8).reshape(*matrix.shape, matrix.itemsize)
    memory[offsets[..., None] + np.arange(matrix.itemsize)] = content


def scale_codes(case: Product, rows: int, seed: int) -> tuple[Array, Array]:
    """Return four bytes for each row, and the factors of each element of k."""
    random = np.random.default_rng(seed)
    if case.scales == 4:
        scale_bytes = random.integers(0x30, 0x48, (rows, 4)).astype(np.uint8)  # e4m3 from 1/2 to 4
        factors = (1 + (scale_bytes & 7) / 8) * 2.0 ** ((scale_bytes >> 3).astype(float) - 7)
    else:
        scale_bytes = random.integers(125, 130, (rows, 4)).astype(np.uint8)
        factors = 2.0 ** (scale_bytes.astype(float) - 127)
    return scale_bytes, factors


def put_scales(image: Array, column: int, scale_bytes: Array) -> None:
    for row, four in enumerate(scale_bytes):
        for quarter in range(4):
            image[quarter * 32 + row % 32, column + row // 32] = four.view(np.uint32)[0]


def prepare(case: Product) -> tuple[Array, Array, Array]:
    """Return tensor memory and shared memory before, and D afterward as numbers."""
    a, a_codes = operand(case.rows, case.a, case.k, 1)
    b, b_codes = operand(case.columns, case.b, case.k, 2)
    start = integers((case.rows, case.columns), "bf16", 3)
    image = unwritten()
    at = lanes(case)
    kind = {"f16": np.float16, "f32": np.float32, "s32": np.int32}[case.result]
    bits = start.astype(kind).view(np.uint16 if case.result == "f16" else np.uint32)
    image[at[:, None], np.arange(case.columns)] = bits
    tiles = np.zeros(ROOM - TILES_AT, np.uint8)
    a_place, b_place = of_step(case.a_place, case.a), of_step(case.b_place, case.b)
    a_bytes, b_bytes = as_bytes(a_codes, case.a, case.packed), as_bytes(b_codes, case.b, case.packed)
    if a_place:
        write_tile(tiles, A_AT, a_place, a_bytes)
    else:
        image[at[:, None], A_COLUMN + np.arange(8)] = np.ascontiguousarray(a_bytes).view(np.uint32)
    assert b_place is not None
    write_tile(tiles, B_AT, b_place, b_bytes)
    if case.scales:
        for column, rows, seed, first in (
            (A_SCALES, case.rows, 6, case.a_id),
            (B_SCALES, case.columns, 7, case.b_id),
        ):
            scale_bytes, factors = scale_codes(case, rows, seed)
            put_scales(image, column, scale_bytes)
            part = np.repeat(factors[:, first : first + case.scales], case.k // case.scales, 1)
            if column == A_SCALES:
                a = a * part
            else:
                b = b * part
    exact = a @ b.T * case.signs[0] * case.signs[1] + (start if case.adds else 0)
    return image, tiles, exact


def run(case: Product, options: Options = CHECKED, **changes: str) -> tuple[Array, Array, Outcome]:
    """Return D, its expected value, and the findings."""
    image, tiles, exact = prepare(case)
    got, outcome = Kernel(shared=ROOM).run(
        image, tiles, options, **({"act": only(case.statement())} | changes)
    )
    d = np.ascontiguousarray(got[lanes(case)][:, : case.columns])
    others = got.copy()
    others[lanes(case)[:, None], np.arange(case.columns)] = image[
        lanes(case)[:, None], np.arange(case.columns)
    ]
    assert (others == image).all() or outcome.findings, "cells changed that are not D's"
    if case.result == "f16":
        return d.astype(np.uint16).view(np.float16), exact, outcome
    return d.view(np.int32 if case.result == "s32" else np.float32), exact, outcome


# ---- values -------------------------------------------------------------------------------------------------------

MX8, MX4 = {"kind": "mxf8f6f4", "scales": 1}, {"a": "e2m1", "b": "e2m1", "kind": "mxf4", "scales": 2}
NV4 = {"a": "e2m1", "b": "e2m1", "kind": "mxf4nvf4", "scales": 4}
CASES: dict[str, Product] = {
    "bf16": Product(),
    "f16": Product("f16", "f16"),
    "f16 in f16": Product("f16", "f16", "f16"),
    "tf32": Product("tf32", "tf32"),
    "s8": Product("s8", "s8", "s32"),
    "u8 by s8": Product("u8", "s8", "s32", columns=32),
    "s8 by u8": Product("s8", "u8", "s32", columns=16),
    **{f"{a} by {b}": Product(a, b) for a in ("e4m3", "e5m2", "e2m1") for b in ("e4m3", "e5m2", "e2m1")},
    "e4m3 in f16": Product("e4m3", "e4m3", "f16"),
    **{f"{n} columns": Product(columns=n) for n in (16, 48, 128)},
    "64 rows": Product(rows=64, columns=8),
    "64 rows, second half": Product(rows=64, columns=24, half=1),
    "64 rows, A in tensor memory": Product(rows=64, a_place=None, half=1),
    "not added": Product(adds=False),
    "A negative": Product(signs=(-1, 1)),
    "both negative": Product(signs=(-1, -1)),
    **{f"A in tensor memory, {t}": Product(t, t, a_place=None) for t in ("bf16", "f16", "tf32", "e4m3")},
    "A in tensor memory, s8": Product("s8", "s8", "s32", a_place=None),
    **{
        f"swizzle {swizzle}, {'MN' if mn else 'K'}-major": Product(
            a_place=Place(swizzle, mn), b_place=Place(swizzle, mn), columns=128
        )
        for swizzle in SWIZZLES
        for mn in (False, True)
    },
    **{
        f"bytes, swizzle {swizzle}, MN-major": Product(
            "e4m3", "e5m2", a_place=Place(swizzle, True), b_place=Place(swizzle, True), columns=128
        )
        for swizzle in SWIZZLES
    },
    "step 3 of a swizzle of 128 bytes": Product(a_place=Place(step=3), b_place=Place(step=3)),
    "another layout for each": Product(a_place=Place("64", True), b_place=Place("32"), columns=32),
    **{f"mxf8, scale {n}": Product("e4m3", "e5m2", **MX8, a_id=n, b_id=3 - n) for n in range(4)},
    "mxf8, A in tensor memory": Product("e4m3", "e4m3", a_place=None, **MX8),
    "mxf8 by fp4": Product("e4m3", "e2m1", **MX8, columns=128),
    "mxf4": Product(**MX4),
    "mxf4, second scales": Product(**MX4, a_id=2, b_id=2, columns=128),
    "mxf4, A in tensor memory": Product(**MX4, a_place=None),
    "nvf4": Product(**NV4),
    "nvf4, 128 columns": Product(**NV4, columns=128, a_place=Place("64"), b_place=Place("32")),
    "nvf4 with powers of two": Product(**(NV4 | {"scales": 2})),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_products(name: str) -> None:
    got, expected, outcome = run(CASES[name])
    assert not outcome.findings
    assert got.tolist() == expected.tolist()


def test_a_sum_that_saturates() -> None:
    case = Product("u8", "u8", "s32", columns=16)
    near = "\n".join(f"mov.b32 %r{64 + n}, 0x7FFFFFF0;" for n in range(16))
    listed = "{" + ", ".join(f"%r{64 + n}" for n in range(16)) + "}"
    store = Kernel().standard()["store"] + "tcgen05.wait::st.sync.aligned;" + near
    store += f"tcgen05.st.sync.aligned.32x32b.x16.b32 [%r11], {listed};"
    got, _, outcome = run(
        replace(case, saturates=True), store=store, act=only(replace(case, saturates=True).statement())
    )
    assert not outcome.findings
    assert (got == 2**31 - 1).all()
    got, _, _ = run(case, store=store)
    assert (got < 0).all()


def test_scales_beyond_f32() -> None:
    """448 times 2^127 is too large for f32, but its product with a small value is not."""
    case = Product("e4m3", "e4m3", **MX8, columns=16, adds=False)
    image, tiles, _ = prepare(case)
    for column, code in ((A_SCALES, 0xFE), (B_SCALES, 0x01)):
        image[:, column : column + 4] = code * 0x01010101
    got, outcome = Kernel(shared=ROOM).run(image, tiles, act=only(case.statement()))
    plain, _, _ = run(replace(case, kind="", scales=0))
    d = np.ascontiguousarray(got[:, :16]).view(np.float32)
    assert not outcome.findings
    assert (d == plain * 2.0).all()  # 2^(254 - 127) 2^(1 - 127)


@pytest.mark.parametrize(("scale", "bits"), [(0xFF, 1), (0x00, 0)], ids=["NaN", "2^-127"])
def test_the_ends_of_e8m0(scale: int, bits: int) -> None:
    case = Product("e4m3", "e4m3", **MX8, columns=16, adds=False)
    image, tiles, _ = prepare(case)
    image[:, A_SCALES : A_SCALES + 4] = scale * 0x01010101
    got, outcome = Kernel(shared=ROOM).run(image, tiles, act=only(case.statement()))
    d = np.ascontiguousarray(got[:, :16]).view(np.float32)
    assert not outcome.findings
    assert np.isnan(d).all() == bool(bits)
    assert bits or (np.abs(d) < 1e-30).all()


# ---- copies -------------------------------------------------------------------------------------------------------

# Shape: rows, bytes of each, and the row of a lane.
COPIES = {
    "128x256b": (128, 32, lambda lane: lane),
    "128x128b": (128, 16, lambda lane: lane),
    "64x128b.warpx2::02_13": (64, 16, lambda lane: lane % 64),
    "64x128b.warpx2::01_23": (64, 16, lambda lane: lane // 64 * 32 + lane % 32),
    "32x128b.warpx4": (32, 16, lambda lane: lane % 32),
    "warpx4.32x128b": (32, 16, lambda lane: lane % 32),
}


@pytest.mark.parametrize("swizzle", ["none", "128"])
@pytest.mark.parametrize("shape", COPIES)
def test_copies(shape: str, swizzle: str) -> None:
    rows, size, row_of = COPIES[shape]
    content = np.random.default_rng(1).integers(0, 256, (rows, 32)).astype(np.uint8)
    tiles = np.zeros(ROOM - TILES_AT, np.uint8)
    place_ = TilePlace(swizzle)
    write_tile(tiles, A_AT, place_, content)
    image = unwritten()
    act = (
        f"mov.b64 %rd50, {place_.descriptor(A_AT, rows)}; tcgen05.cp.cta_group::1.{shape} [%r10 + 32], %rd50"
    )
    got, outcome = Kernel(shared=ROOM).run(image, tiles, act=only(act))
    expected = image.copy()
    for lane in range(LANES):
        expected[lane, 32 : 32 + size // 4] = content[row_of(lane), :size].copy().view(np.uint32)
    assert not outcome.findings
    assert (got == expected).all()


def test_a_product_takes_scales_that_a_copy_brings() -> None:
    """No wait is needed between them: the unit performs one thread's operations in order."""
    case = Product("e4m3", "e4m3", **MX8, columns=128)
    image, tiles, exact = prepare(case)
    for column, at in ((A_SCALES, SCALES_AT), (B_SCALES, SCALES_AT + 512)):
        for lane in range(32):
            tiles[at + 16 * lane : at + 16 * lane + 16] = image[lane, column : column + 4].view(np.uint8)
        image[:, column : column + 4] = 0
    copies = "".join(
        f"mov.b64 %rd5{n}, {(1024 + TILES_AT + at) >> 4 | 8 << 32 | VERSION}; "
        f"tcgen05.cp.cta_group::1.32x128b.warpx4 [%r10 + {column}], %rd5{n};"
        for n, (column, at) in enumerate(((A_SCALES, SCALES_AT), (B_SCALES, SCALES_AT + 512)), 4)
    )
    got, outcome = Kernel(shared=ROOM).run(image, tiles, act=only(copies + case.statement()))
    assert not outcome.findings
    assert np.ascontiguousarray(got[:, :128]).view(np.float32).tolist() == exact.tolist()


# ---- order --------------------------------------------------------------------------------------------------------

SMALL = Product(columns=16)
RACE, BOUNDS, DESCRIPTOR = "tensor memory race", "tensor memory out of bounds", "unusable matrix descriptor"
PARTS = Kernel(shared=ROOM).standard()
STORE_TO_B = f"mad.lo.s32 %r30, %r0, 16, %r9; st.shared.b32 [%r30+{B_AT}], %r0;"
STORE_TO_D = (
    "mov.b32 %r64, 0; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r11], {%r64}; tcgen05.wait::st.sync.aligned;"
)
LOAD_D = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r64}, [%r11]; tcgen05.wait::ld.sync.aligned;"


def committed_by(thread: int) -> str:
    return f"setp.eq.b32 %p12, %r0, {thread}; " + PARTS["commit"].replace("%p10", "%p12")


def with_bits(bits: int) -> str:
    return only(SMALL.statement().replace(str(SMALL.instruction), str(SMALL.instruction ^ bits)))


def described(change: str) -> str:
    head, _, tail = SMALL.statement().rpartition("tcgen05.mma")
    return only(f"{head} {change}; tcgen05.mma{tail}")


ORDER: dict[str, tuple[str, dict[str, str]]] = {
    "no wait for the mbarrier": (RACE, {"wait": ""}),
    "nothing committed": ("deadlock", {"commit": ""}),
    "neither": (RACE, {"commit": "", "wait": ""}),
    "committed before the product": (RACE, {"act": PARTS["commit"] + only(SMALL.statement()), "commit": ""}),
    "committed by another thread": (RACE, {"commit": committed_by(1)}),
    "committed by another warp": (RACE, {"commit": committed_by(32)}),
    "nobody waits and nobody looks": ("copy outlives its block", {"wait": "", "load": "", "free": ""}),
    "stores are not waited for": (RACE, {"wait_st": ""}),
    "no barrier after the stores": (RACE, {"meet": ""}),
    "no proxy fence": ("proxy fence missing", {"fence": ""}),
    "B written again before the wait": ("shared memory race", {"wait": STORE_TO_B + PARTS["wait"]}),
    "D written again before the wait": (RACE, {"wait": STORE_TO_D + PARTS["wait"]}),
    "D read before the wait": (RACE, {"wait": LOAD_D + PARTS["wait"]}),
    "the mbarrier is not made": ("no mbarrier", {"init": ""}),
    "past what is allocated": (BOUNDS, {"act": described("add.s32 %r10, %r10, 250")}),
    "in lanes that no product has": (BOUNDS, {"act": described("add.s32 %r10, %r10, 1048576")}),
    "D was never written": ("uninitialized tensor memory", {"store": "", "wait_st": "", "load": ""}),
    "bits that mean nothing": (DESCRIPTOR, {"act": with_bits(1 << 6)}),
    "a sparse matrix": (DESCRIPTOR, {"act": with_bits(1 << 2)}),
    "no rows": (DESCRIPTOR, {"act": with_bits(8 << 24)}),
    "types of another kind": (DESCRIPTOR, {"act": with_bits(3 << 7)}),
    "eight columns for 128 rows": (DESCRIPTOR, {"act": with_bits(3 << 17)}),
    "a matrix descriptor of sm_90": (DESCRIPTOR, {"act": described(f"xor.b64 %rd51, %rd51, {VERSION}")}),
    "a base offset": (DESCRIPTOR, {"act": described(f"or.b64 %rd51, %rd51, {1 << 49}")}),
    "past shared memory": ("shared memory out of bounds", {"act": described("add.s64 %rd51, %rd51, 5000")}),
}  # fmt: skip


@pytest.mark.parametrize("delivery", ["late", "early"])
@pytest.mark.parametrize("name", ORDER)
def test_what_a_product_needs(name: str, delivery: str) -> None:
    kind, changes = ORDER[name]
    _, _, outcome = run(SMALL, Options(delivery=delivery), **changes)  # type: ignore[arg-type]
    assert kind in kinds(outcome)


def test_products_may_follow_each_other() -> None:
    """Products into the same accumulators need no wait between them."""
    got, exact, outcome = run(SMALL, act=only(SMALL.statement() * 3))
    once, _, _ = run(SMALL)
    start = integers((128, 16), "bf16", 3)
    assert not outcome.findings
    assert (once == exact).all()
    assert got.tolist() == (start + 3 * (once - start)).tolist()


def test_results_as_the_next_one_s_left_matrix() -> None:
    """They have to be waited for."""
    follower = replace(SMALL, a="tf32", b="tf32", a_place=None)
    second = (
        follower.statement(adds=False)
        .replace(f"+ {A_COLUMN}", "+ 0")
        .replace("[%r10 + 0],", "[%r10 + 64],", 1)
    )
    _, _, outcome = run(SMALL, act=only(SMALL.statement() + second))
    assert kinds(outcome) == [RACE]
    between = PARTS["commit"] + PARTS["wait"]
    again = PARTS["wait"].replace(", 0;", ", 1;").replace("wait:", "again:").replace("uni wait", "uni again")
    image, tiles, _ = prepare(SMALL)
    act = only(SMALL.statement()) + between + only(second)
    _, outcome = Kernel(shared=ROOM).run(image, tiles, act=act, wait=again)
    assert not outcome.findings


def test_scales_that_differ_between_the_quarters() -> None:
    case = Product("e4m3", "e4m3", **MX8, columns=16)
    image, tiles, _ = prepare(case)
    image[70, A_SCALES] ^= 1
    _, outcome = Kernel(shared=ROOM).run(image, tiles, act=only(case.statement()))
    assert kinds(outcome) == ["tensor memory misuse"]


def test_without_checks() -> None:
    got, expected, outcome = run(SMALL, Options(checks=False))
    assert not outcome.findings
    assert got.tolist() == expected.tolist()
    _, _, outcome = run(SMALL, Options(checks=False), act=ORDER["past what is allocated"][1]["act"])
    assert BOUNDS in kinds(outcome)
