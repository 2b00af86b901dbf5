"""Products of warp groups: every type, both majors, every swizzle, and the order that they need.

Matrices have small integers, so that every sum is exact and a single misplaced element shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from gpu.emulated import kinds, launch, words
from gpu.hopper import BASE, SWIZZLES, Array, aligned_copy, swizzled, words_in
from triton_loom.emulator.machine import CHECKED, Options, Outcome

THREADS = 128
A_AT, B_AT = 0, 32768  # offsets in shared memory
ROOM = 98304
SPAN = {"none": 16, "32": 32, "64": 64, "128": 128}
DESCRIBED = {"none": 0, "128": 1, "64": 2, "32": 3}  # swizzles in a descriptor
BITS = {"bf16": 16, "f16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}


def codes(numbers: Array, type_: str) -> Array:
    """Return the bits of small integers."""
    if type_ in ("s8", "u8"):
        return numbers.astype(np.int16).astype(np.uint8)
    if type_ == "tf32":  # the bits that do not count are set
        return numbers.astype(np.float32).view(np.uint32) | 0x1ABC
    name = {
        "bf16": torch.bfloat16,
        "f16": torch.float16,
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
    }[type_]
    bits = torch.from_numpy(numbers.astype(np.float32)).to(name).view(torch.uint8).numpy()
    return bits.view(np.uint8 if BITS[type_] == 8 else np.uint16)


def numbers(shape: tuple[int, int], type_: str, seed: int) -> Array:
    random = np.random.default_rng(seed)
    low, high = {"e5m2": (-3, 4), "u8": (0, 256), "s8": (-128, 128)}.get(type_, (-8, 9))
    return random.integers(low, high, shape)


# ---- where a matrix lies in shared memory -----------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Layout of rows (of A; columns of B) by k, for a descriptor."""

    swizzle: str = "128"
    mn_major: bool = False
    step: int = 0  # K-major under a swizzle: which 32 bytes of the span are this product's

    def strides(self, rows: int) -> tuple[int, int]:
        """Return the leading and stride offsets in bytes; unusual ones where they matter."""
        span = SPAN[self.swizzle]
        if self.swizzle == "none":
            return (128 + rows * 16, 128) if not self.mn_major else (rows // 8 * 128 + 128, 128)
        if self.mn_major:  # further rows follow after all of k, of which there are 16
            return 2 * 8 * span, 8 * span
        return 16, 8 * span

    def offset(self, row: int, k: int, size: int, rows: int) -> int:
        """Return the offset of an element, in bytes."""
        leading, stride = self.strides(rows)
        span = SPAN[self.swizzle]
        if self.mn_major:
            chunk, inside = divmod(row * size, span)
            if self.swizzle == "none":
                return chunk * stride + k // 8 * leading + k % 8 * 16 + inside
            return chunk * leading + k // 8 * stride + k % 8 * span + inside
        across = k * size
        if self.swizzle == "none":
            return row // 8 * stride + row % 8 * 16 + across // 16 * leading + across % 16
        return row // 8 * stride + row % 8 * span + 32 * self.step + across

    def descriptor(self, at: int, rows: int) -> int:
        start = BASE + at + 32 * self.step
        leading, stride = self.strides(rows)
        return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | DESCRIBED[self.swizzle] << 62

    def write(self, memory: Array, at: int, matrix: Array) -> None:
        rows, size = matrix.shape[0], matrix.itemsize
        for (row, k), code in np.ndenumerate(matrix):
            location = swizzled(at + self.offset(row, k, size, rows), self.swizzle)
            memory[location : location + size] = np.frombuffer(code.tobytes(), np.uint8)


# ---- a product --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """A product D (64 x columns) = A B, or D + A B."""

    result: str = "f32"
    a: str = "bf16"
    b: str = "bf16"
    columns: int = 64
    a_place: Place | None = Place()  # None: in registers
    b_place: Place = Place()
    adds: bool = True
    signs: tuple[int, int] = (1, 1)
    saturates: bool = False

    @property
    def k(self) -> int:
        return 256 // BITS[self.a]

    @property
    def registers(self) -> int:
        return self.columns // (4 if self.result == "f16" else 2)

    @property
    def opcode(self) -> str:
        saturates = ".satfinite" if self.saturates else ""
        shape = f"m64n{self.columns}k{self.k}"
        return f"wgmma.mma_async.sync.aligned.{shape}.{self.result}.{self.a}.{self.b}{saturates}"

    def statement(self, d: int = 64) -> str:
        accumulators = ", ".join(f"%r{d + n}" for n in range(self.registers))
        left = "%rd50" if self.a_place else "{%r40, %r41, %r42, %r43}"
        tail = [*map(str, self.signs)] if self.result != "s32" else []
        if BITS[self.a] == 16:
            tail += [str(int(self.a_place.mn_major))] if self.a_place else []
            tail += [str(int(self.b_place.mn_major))]
        return f"{self.opcode} {{{accumulators}}}, {left}, %rd51, %p5{''.join(f', {t}' for t in tail)};"

    def prepare(self) -> str:
        """Read accumulators (p1) and A (p2), fill shared memory (p3), put the descriptors in %rd50 and %rd51."""
        lines = [
            words_in(ROOM // 4, 0, "%rd3", THREADS),
            f"mul.wide.u32 %rd10, %r0, {4 * self.registers}; add.s64 %rd10, %rd1, %rd10;",
            *(f"ld.global.b32 %r{64 + n}, [%rd10+{4 * n}];" for n in range(self.registers)),
            "mul.wide.u32 %rd10, %r0, 16; add.s64 %rd10, %rd2, %rd10;",
            "ld.global.v4.b32 {%r40, %r41, %r42, %r43}, [%rd10];",
            f"mov.b64 %rd50, {self.a_place.descriptor(A_AT, 64) if self.a_place else 0};",
            f"mov.b64 %rd51, {self.b_place.descriptor(B_AT, self.columns)}; setp.eq.b32 %p5, {int(self.adds)}, 1;",
        ]
        return "\n".join(lines)

    def store(self) -> str:
        lines = [f"mul.wide.u32 %rd10, %r0, {4 * self.registers}; add.s64 %rd10, %rd0, %rd10;"]
        lines += [f"st.global.b32 [%rd10+{4 * n}], %r{64 + n};" for n in range(self.registers)]
        return "\n".join(lines)


FENCE = "fence.proxy.async.shared::cta; bar.sync 0;"
BEGIN, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"


def fragments(matrix: Array, result: str) -> Array:
    """Return a 64 x n matrix as registers of 128 threads, [thread, register]. Thread t of warp w has rows 16 w + t / 4
    and 8 more, and two of each eight columns from 2 (t % 4) on."""
    columns = matrix.shape[1]
    registers = np.zeros((THREADS, columns // 2), matrix.dtype)
    for thread in range(THREADS):
        warp, lane = divmod(thread, 32)
        for n in range(columns // 2):
            row = 16 * warp + lane // 4 + (8 if n % 4 >= 2 else 0)
            registers[thread, n] = matrix[row, n // 4 * 8 + lane % 4 * 2 + n % 2]
    return registers.astype(np.float16 if result == "f16" else np.int32 if result == "s32" else np.float32)


def a_registers(matrix: Array) -> Array:
    """Return A in registers: four words per thread, rows t / 4 and 8 more, then these for the second half of k."""
    registers = np.zeros((THREADS, 4), np.uint32)
    per_word = 4 // matrix.itemsize
    for thread in range(THREADS):
        warp, lane = divmod(thread, 32)
        for n in range(4):
            row, k = 16 * warp + lane // 4 + n % 2 * 8, lane % 4 * per_word + n // 2 * 4 * per_word
            registers[thread, n] = np.ascontiguousarray(matrix[row, k : k + per_word]).view(np.uint32)[0]
    return registers


WHOLE = "{prepare} {fence} {begin} {product} {commit} {wait} {store}"


def run(
    case: Product, body: str = WHOLE, options: Options = CHECKED, **changes: str
) -> tuple[Array, Array, Outcome]:
    """Return a product, its expected value, and the findings; `changes` replace parts of the kernel's text."""
    a, b = numbers((64, case.k), case.a, 1), numbers((case.columns, case.k), case.b, 2)
    start = numbers((64, case.columns), "bf16", 3)
    exact = a @ b.T * case.signs[0] * case.signs[1] + (start if case.adds else 0)
    memory = np.zeros(ROOM, np.uint8)
    if case.a_place:
        case.a_place.write(memory, A_AT, codes(a, case.a))
    case.b_place.write(memory, B_AT, codes(b, case.b))
    in_registers = aligned_copy(a_registers(codes(a, case.a)))
    accumulators = aligned_copy(fragments(start, case.result).view(np.uint32))
    out = words(THREADS * case.registers)
    parts = {"prepare": case.prepare(), "fence": FENCE, "begin": BEGIN, "product": case.statement(), "commit": COMMIT,
             "wait": WAIT, "store": case.store()} | changes  # fmt: skip
    outcome = launch(
        body.format(**parts), out, accumulators, in_registers, aligned_copy(memory.view(np.uint32)), threads=THREADS,
        shared=ROOM, options=options,
    )  # fmt: skip
    expected = fragments(exact, case.result)
    return out.view(expected.dtype).reshape(expected.shape), expected, outcome


# ---- values -----------------------------------------------------------------------------------------------

CASES: dict[str, Product] = {
    "bf16": Product(),
    "f16": Product(a="f16", b="f16"),
    "f16 in f16": Product("f16", "f16", "f16"),
    "tf32": Product(a="tf32", b="tf32"),
    "s8": Product("s32", "s8", "s8"),
    "u8 by s8": Product("s32", "u8", "s8", 24),
    "s8 by u8": Product("s32", "s8", "u8", 8),
    "u8": Product("s32", "u8", "u8", saturates=True),
    **{f"{a} by {b}": Product(a=a, b=b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")},
    "e4m3 in f16": Product("f16", "e4m3", "e5m2", 16),
    **{f"{n} columns": Product(columns=n) for n in (8, 24, 128, 256)},
    "not added": Product(adds=False),
    "A negative": Product(signs=(-1, 1)),
    "both negative": Product(signs=(-1, -1)),
    **{f"A in registers, {t}": Product(a=t, b=t, a_place=None) for t in ("bf16", "f16", "tf32", "e4m3")},
    "A in registers, s8": Product("s32", "s8", "s8", a_place=None),
    "A in registers, B MN-major": Product(a_place=None, b_place=Place(mn_major=True)),
    **{
        f"swizzle {swizzle}, {'MN' if mn else 'K'}-major": Product(
            a_place=Place(swizzle, mn), b_place=Place(swizzle, mn), columns=128
        )
        for swizzle in SWIZZLES
        for mn in (False, True)
    },
    "step 3 of a swizzle of 128 bytes": Product(a_place=Place(step=3), b_place=Place(step=3)),
    "step 1 of a swizzle of 64 bytes": Product(a_place=Place("64", step=1), b_place=Place("64", step=1)),
    "another layout for each": Product(a_place=Place("64", True), b_place=Place("32"), columns=32),
}


@pytest.mark.parametrize("name", CASES)
def test_products(name: str) -> None:
    got, expected, outcome = run(CASES[name])
    assert not outcome.findings
    assert got.tolist() == expected.tolist()


def test_a_sum_that_saturates() -> None:
    case = Product("s32", "u8", "u8", 8, saturates=True)
    near = "\n".join(f"mov.b32 %r{64 + n}, 0x7FFFFFF0;" for n in range(4))
    got, _, _ = run(case, prepare=case.prepare() + near)
    assert (got == 2**31 - 1).all()
    wraps = replace(case, saturates=False)
    got, _, _ = run(wraps, prepare=wraps.prepare() + near)
    assert (got < 0).all()


# ---- order ------------------------------------------------------------------------------------------------

SMALL = Product(columns=8)
STORE_TO_B = f"mov.b32 %r210, smem; mad.lo.s32 %r211, %r0, 16, %r210; st.shared.b32 [%r211+{B_AT}], %r0;"
TOUCH = "add.f32 %r64, %r64, %r64;"
ORDER: dict[str, tuple[str, dict[str, str]]] = {
    "no proxy fence": ("proxy fence missing", {"fence": "bar.sync 0;"}),
    "no barrier after the stores": ("shared memory race", {"fence": "fence.proxy.async;"}),
    "no fence of registers": ("wgmma.fence missing", {"begin": ""}),
    "touched after the fence of registers": ("wgmma.fence missing", {"begin": BEGIN + TOUCH}),
    "no wait": ("product under way", {"wait": ""}),
    "not committed": ("product under way", {"commit": ""}),
    "waits for older groups only": ("product under way", {"wait": "wgmma.wait_group.sync.aligned 1;"}),
    "touched between": ("product under way", {"commit": COMMIT + TOUCH}),
    "A's registers changed between": ("product under way", {"commit": COMMIT + "mov.b32 %r40, 0;"}),
    "B written again before the wait": (
        "shared memory race",
        {"wait": "bar.sync 0;" + STORE_TO_B + WAIT},
    ),
    "B written again by warps that have not heard of the others' wait": (
        "shared memory race",
        {"wait": WAIT + STORE_TO_B},
    ),
    "bits of the descriptor that mean nothing": (
        "unusable matrix descriptor",
        {"begin": "or.b64 %rd51, %rd51, 1125899906842624;" + BEGIN},
    ),
    "past shared memory": ("shared memory out of bounds", {"begin": "add.s64 %rd51, %rd51, 4096;" + BEGIN}),
    "uninitialized": (
        "uninitialized shared memory",
        {"prepare": SMALL.prepare().split("mul.wide.u32 %rd10")[0].split("ld.global")[0] + "mul.wide.u32 %rd10"
         + SMALL.prepare().split("mul.wide.u32 %rd10", 1)[1]},
    ),
    "another descriptor in each warp": (
        "warps disagree",
        {"begin": "shr.u32 %r220, %r0, 5; cvt.u64.u32 %rd60, %r220; shl.b64 %rd60, %rd60, 4;"
         "add.s64 %rd51, %rd51, %rd60;" + BEGIN},
    ),
    "one warp does not come": (
        "warps disagree",
        {"begin": "setp.lt.u32 %p6, %r0, 96; @!%p6 bra SKIP;" + BEGIN, "commit": "SKIP: " + COMMIT},
    ),
    "a part of the warp": (
        "split warp",
        {"begin": "and.b32 %r220, %r0, 31; setp.ne.b32 %p6, %r220, 5;" + BEGIN, "product": "@%p6 " + SMALL.statement()},
    ),
}  # fmt: skip


@pytest.mark.parametrize("delivery", ["late", "early"])
@pytest.mark.parametrize("name", ORDER)
def test_what_a_product_needs(name: str, delivery: str) -> None:
    kind, changes = ORDER[name]
    case = replace(SMALL, a_place=None) if "A's" in name else SMALL
    if case is not SMALL:
        changes = {"product": case.statement()} | changes
    _, _, outcome = run(case, options=Options(delivery=delivery), **changes)  # type: ignore[arg-type]
    assert kind in kinds(outcome)


@pytest.mark.parametrize(
    ("before_the_wait", "after_the_wait", "fine"),
    [("", "", False), ("fence.proxy.async;", "", False), ("", "fence.proxy.async;", True)],
    ids=["no fence", "a fence before the copies have arrived", "a fence after"],
)
def test_data_loaded_by_cp_async(before_the_wait: str, after_the_wait: str, fine: bool) -> None:
    """A copy has written its bytes only when it is waited for: a fence before that is too early."""
    copies = "mov.b32 %r200, smem; mad.lo.s32 %r200, %r0, 16, %r200; mul.wide.u32 %rd110, %r0, 16;"
    copies += "add.s64 %rd110, %rd3, %rd110;"
    for offset in range(0, ROOM, 16 * THREADS):
        copies += f"cp.async.cg.shared.global [%r200+{offset}], [%rd110+{offset}], 16;"
    copies += f"cp.async.commit_group; {before_the_wait} cp.async.wait_group 0; {after_the_wait}"
    prepare = SMALL.prepare().replace(words_in(ROOM // 4, 0, "%rd3", THREADS), copies)
    got, expected, outcome = run(SMALL, prepare=prepare, fence="bar.sync 0;")
    assert kinds(outcome) == ([] if fine else ["proxy fence missing after cp.async"])
    assert got.tolist() == expected.tolist()


def test_products_may_follow_each_other() -> None:
    """Products into the same accumulators need no fence or wait between them."""
    case = replace(SMALL, adds=True)
    got, _, outcome = run(case, product=case.statement() * 3)
    once, _, _ = run(case)
    start = fragments(numbers((64, 8), "bf16", 3), "f32")
    assert not outcome.findings
    assert got.tolist() == (start + 3 * (once - start)).tolist()


def test_a_group_that_is_older_than_those_that_may_be_open() -> None:
    """If two groups have separate accumulators, the first one's results may be used while the second is pending."""
    second = SMALL.statement(d=100)
    more = "\n".join(f"mov.b32 %r{100 + n}, 0;" for n in range(4))
    parts = {
        "prepare": SMALL.prepare() + more,
        "commit": COMMIT + second + COMMIT,
        "wait": "wgmma.wait_group.sync.aligned 1;",
    }
    got, expected, outcome = run(SMALL, **parts)
    assert not outcome.findings
    assert got.tolist() == expected.tolist()
    _, _, outcome = run(SMALL, **(parts | {"wait": parts["wait"] + "add.f32 %r101, %r101, %r101;"}))
    assert kinds(outcome) == ["product under way"]


def test_results_of_a_product_as_the_next_one_s_left_matrix() -> None:
    case = replace(SMALL, a_place=None)
    follower = case.statement(d=100).replace("{%r40, %r41, %r42, %r43}", "{%r64, %r65, %r66, %r67}")
    more = "\n".join(f"mov.b32 %r{100 + n}, 0;" for n in range(4))
    _, _, outcome = run(case, prepare=case.prepare() + more, product=case.statement() + follower)
    assert kinds(outcome) == ["product under way"]
    between = COMMIT + WAIT + BEGIN
    _, _, outcome = run(case, prepare=case.prepare() + more, product=case.statement() + between + follower)
    assert not outcome.findings


def test_in_a_loop() -> None:
    """The path back from a product to its fence has a wait on it, or it does not."""
    body = (
        "{prepare} {fence} mov.b32 %r221, 0; LOOP: {begin} {product} {commit} {wait} add.s32 %r221, %r221, 1;"
    )
    body += "setp.lt.s32 %p7, %r221, 3; @%p7 bra LOOP; {last} {store}"
    _, _, outcome = run(SMALL, body, last="")
    assert not outcome.findings
    _, _, outcome = run(SMALL, body, last=WAIT, wait=TOUCH)
    assert "product under way" in kinds(outcome)
    _, _, outcome = run(SMALL, body, last=WAIT, wait="")
    assert not outcome.findings
