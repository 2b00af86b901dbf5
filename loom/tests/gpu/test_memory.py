"""Loads, stores, atomic operations and asynchronous copies."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from gpu.emulated import Array, aligned, kinds, launch, store_results, words
from triton_loom.emulator.machine import Options

RNG = np.random.default_rng(1)


@pytest.mark.parametrize(
    ("size", "count"), [(s, n) for s, n in itertools.product((1, 2, 4, 8), (1, 2, 4, 8)) if s * n <= 32]
)
@pytest.mark.parametrize("space", ["global", "shared", "local"])
def test_every_width_there_and_back(size: int, count: int, space: str) -> None:
    data = aligned(RNG.integers(0, 256, 64 * size * count).astype(np.uint8))
    out = aligned(np.zeros_like(data))
    kind = {1: "%rs", 2: "%rs", 4: "%r", 8: "%rd"}[size]
    registers = "{" + ", ".join(f"{kind}{20 + k}" for k in range(count)) + "}"
    vector = f".v{count}" if count > 1 else ""
    access = f"{vector}.b{8 * size}"
    through = {
        "global": "",
        "shared": f"st.shared{access} [%r2], {registers}; bar.sync 0; ld.shared{access} {registers}, [%r2];",
        "local": f".local .align 8 .b8 other[5]; .local .align 32 .b8 mine[{size * count + 8}]; mov.b64 %rd13, mine; "
        f"cvt.u32.u64 %r3, %rd13; st.local{access} [%r3+8], {registers}; ld.local{access} {registers}, [mine+8];",
    }[space]
    body = f"""
      mul.wide.u32 %rd10, %r0, {size * count};
      add.s64 %rd11, %rd1, %rd10; add.s64 %rd12, %rd0, %rd10;
      mov.b32 %r1, smem; mad.lo.s32 %r2, %r0, {size * count}, %r1;
      ld.global{access} {registers}, [%rd11];
      {through}
      st.global{access} [%rd12], {registers};
    """
    assert not launch(body, out, data, threads=64, shared=64 * size * count).findings
    assert (out == data).all()


@pytest.mark.parametrize(("address", "found"), [("%r0", []), ("%r1", ["local memory out of bounds"])])
def test_local_memory_is_bounded(address: str, found: list[str]) -> None:
    """Thread t has 34 bytes, and writes those at t, or at t + 1."""
    out = words(32)
    body = f".local .align 4 .b8 mine[34]; add.s32 %r1, %r0, 1; st.local.b8 [{address}+2], %rs1;"
    assert kinds(launch(body, out)) == found


@pytest.mark.parametrize("type_", ["s8", "u8", "s16", "u16", "s32", "u32"])
def test_a_narrow_number_fills_its_register(type_: str) -> None:
    numbers = np.array([-1, 5, -(1 << 31), 1 << 30], np.int32)
    dtype = np.dtype(f"{'i' if type_[0] == 's' else 'u'}{int(type_[1:]) // 8}")
    data = np.resize(numbers.astype(dtype), 32)
    out = np.zeros(32, np.int64)
    body = f"""
      mul.wide.u32 %rd10, %r0, {dtype.itemsize}; add.s64 %rd11, %rd1, %rd10;
      ld.global.{type_} %rd12, [%rd11];
      mul.wide.u32 %rd10, %r0, 8; add.s64 %rd11, %rd0, %rd10; st.global.b64 [%rd11], %rd12;
    """
    launch(body, out, data)
    assert out.tolist() == data.astype(np.int64).tolist()


def test_sinks_and_offsets() -> None:
    data, out = RNG.integers(0, 1 << 32, 8).astype(np.uint32), words(64)
    body = f"ld.global.v4.b32 {{_, %r1, _, %r2}}, [%rd1+16]; {store_results('%r1', '%r2')}"
    assert not launch(body, out, data).findings
    assert out.tolist() == [data[5], data[7]] * 32


# ---- atomic operations -----------------------------------------------------------------------------------

BITS = {"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64, "b32": np.uint32, "b64": np.uint64,
        "f32": np.float32, "f64": np.float64}  # fmt: skip
OPERATIONS = {
    "add": lambda old, x: old + x,
    "min": min,
    "max": max,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "exch": lambda old, x: x,
    "inc": lambda old, x: old.dtype.type(0) if old >= x else old + old.dtype.type(1),
    "dec": lambda old, x: x if old == 0 or old > x else old - old.dtype.type(1),
}
ATOMICS = [
    *itertools.product(["add"], ["u32", "s32", "u64", "s64", "f32", "f64"]),
    *itertools.product(["min", "max"], ["u32", "s32", "u64", "s64"]),
    *itertools.product(["and", "or", "xor", "exch"], ["b32", "b64"]),
    *itertools.product(["inc", "dec"], ["u32"]),
]


@pytest.mark.parametrize(("operation", "type_"), ATOMICS)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics(operation: str, type_: str, space: str) -> None:
    """Lanes are executed in order; each reads its predecessor's value."""
    dtype = np.dtype(BITS[type_])
    values = (
        RNG.integers(-50, 50, 32).astype(dtype)
        if dtype.kind != "u"
        else RNG.integers(0, 99, 32).astype(dtype)
    )
    memory, old = np.array([7, 0], dtype), np.zeros(32, dtype)
    size = dtype.itemsize
    at = "[%rd1]" if space == "global" else "[%r5]"
    kind = "%r" if size == 4 else "%rd"
    begin = f"mov.b32 %r5, smem; ld.global.b{8 * size} {kind}40, [%rd1]; setp.eq.b32 %p1, %r0, 0; " \
            f"@%p1 st.shared.b{8 * size} [%r5], {kind}40; bar.sync 0;"  # fmt: skip
    end = f"bar.sync 0; ld.shared.b{8 * size} {kind}40, [%r5]; @%p1 st.global.b{8 * size} [%rd1], {kind}40;"
    body = f"""
      {begin if space == "shared" else ""}
      mul.wide.u32 %rd10, %r0, {size}; add.s64 %rd11, %rd2, %rd10; ld.global.b{8 * size} {kind}41, [%rd11];
      atom.{space}.{"gpu.acq_rel." if space == "global" else ""}{operation}.{type_} {kind}42, {at}, {kind}41;
      add.s64 %rd11, %rd0, %rd10; st.global.b{8 * size} [%rd11], {kind}42;
      {end if space == "shared" else ""}
    """
    outcome = launch(body, old, memory, values, shared=8)
    assert not outcome.findings
    now = np.array([7], dtype)[0]
    for lane in range(32):
        assert old[lane] == now, lane
        with np.errstate(over="ignore"):
            now = dtype.type(OPERATIONS[operation](now, values[lane]))
    assert memory[0] == now


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_compare_and_swap(bits: int) -> None:
    memory, out = np.zeros(1, f"u{bits // 8}"), np.zeros(32, f"u{bits // 8}")
    kind = {16: "%rs", 32: "%r", 64: "%rd"}[bits]
    body = f"""
      cvt.u{bits}.u32 {kind}40, %r0; add.s{bits} {kind}41, {kind}40, 1;
      atom.global.acquire.gpu.cas.b{bits} {kind}42, [%rd1], {kind}40, {kind}41;
      mul.wide.u32 %rd10, %r0, {bits // 8}; add.s64 %rd11, %rd0, %rd10; st.global.b{bits} [%rd11], {kind}42;
    """.replace("cvt.u32.u32", "mov.u32")
    assert not launch(body, out, memory).findings
    assert (memory[0], out.tolist()) == (32, list(range(32)))


@pytest.mark.parametrize("name", ["f16x2", "bf16x2"])
def test_atomic_sums_of_halves(name: str) -> None:
    """Both halves are summed, each rounded to its type: 32 times 0.25 and 1."""
    one, quarter = (0x3C00, 0x3400) if name == "f16x2" else (0x3F80, 0x3E80)
    sums = (0x5000, 0x4800) if name == "f16x2" else (0x4200, 0x4100)
    memory, out = words(1), words(1)
    body = f"mov.b32 %r1, {one << 16 | quarter}; red.global.gpu.relaxed.add.noftz.{name} [%rd1], %r1;"
    assert not launch(body, out, memory).findings
    assert memory[0] == sums[0] << 16 | sums[1]


def test_atomic_sums_of_many_blocks() -> None:
    memory, out = words(4), words(1)
    body = (
        "mov.b32 %r1, 1; mov.b32 %r2, 2; atom.global.gpu.acq_rel.add.v2.f32 {%r3, %r4}, [%rd1], {%r1, %r2};"
    )
    body = body.replace("mov.b32 %r1, 1", "mov.b32 %r1, 0f3F800000").replace(
        "mov.b32 %r2, 2", "mov.b32 %r2, 0f40000000"
    )
    assert not launch(body, out, memory, grid=(10, 2, 1), threads=64).findings
    assert memory.view(np.float32).tolist() == [1280, 2560, 0, 0]


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("operation", ["atom.{}.add.f32 %r3, {}, %r1;", "red.{}.add.f32 {}, %r1;"])
def test_atomic_sums_of_subnormal_numbers(space: str, operation: str) -> None:
    """Global memory flushes subnormal operands and results to zero; shared memory keeps them (PTX ISA, atom)."""
    tiny = 2.0**-126
    cases = [
        (0.0, tiny / 2),
        (tiny / 2, 0.0),
        (-tiny / 4, -0.0),
        (1.5 * tiny, -tiny),
        (tiny, tiny),
    ]
    for before, added in cases:
        memory = np.array([before], np.float32)
        code = np.array([added], np.float32).view(np.uint32)[0]
        at = "[%rd0]" if space == "global" else "[%r7]"
        update = operation.format(space, at)
        body = f"mov.b32 %r1, {code}; mov.b32 %r7, smem; setp.ne.b32 %p1, %r0, 0; @%p1 bra end;"
        if space == "shared":
            body += f"ld.global.b32 %r2, [%rd0]; st.shared.b32 [%r7], %r2; {update} ld.shared.b32 %r4, [%r7];"
            body += "st.global.b32 [%rd0], %r4; end:"
        else:
            body += f"{update} end:"
        assert not launch(body, memory, shared=4).findings
        terms = [np.float32(x) if space == "shared" or abs(x) >= tiny else 0.0 for x in (before, added)]
        total = float(np.float32(terms[0]) + np.float32(terms[1]))
        assert memory[0] == (total if space == "shared" or abs(total) >= tiny else 0.0)


def test_a_parameter_by_its_address() -> None:
    """Triton chooses between two pointers by the addresses of the parameters."""
    out = words(2)
    body = """
      mov.b64 %rd20, p1; mov.b64 %rd21, p2; setp.eq.b32 %p1, %r0, 0; selp.b64 %rd22, %rd20, %rd21, %p1;
      ld.param.b64 %rd23, [%rd22]; ld.global.b32 %r2, [%rd23]; setp.gt.u32 %p2, %r0, 1; @%p2 bra end;
    """ + store_results("%r2")
    assert not launch(f"{body} end:", out, words(1) + 5, words(1) + 6).findings
    assert out.tolist() == [5, 6]


# ---- asynchronous copies ---------------------------------------------------------------------------------

COPY = """
  mov.b32 %r1, smem; mad.lo.s32 %r2, %r0, 16, %r1;
  mul.wide.u32 %rd10, %r0, 16; add.s64 %rd11, %rd1, %rd10; add.s64 %rd12, %rd0, %rd10;
  sub.s32 %r3, 16, %r0; max.s32 %r3, %r3, 0;
  cp.async.cg.shared.global [%r2], [%rd11], 16, %r3;
  cp.async.commit_group;
  cp.async.ca.shared.global [%r2+512], [%rd11+512], 4;
  cp.async.commit_group;
  {wait}
  {sync}
  xor.b32 %r2, %r2, {across};
  ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r2];
  st.global.v4.b32 [%rd12], {{%r4, %r5, %r6, %r7}};
"""


def copied(delivery: str, wait: str, sync: str, across: int = 0) -> tuple[Array, Array, list[str]]:
    data, out = RNG.integers(0, 256, 1024).astype(np.uint8), np.zeros(512, np.uint8)
    body = COPY.format(wait=wait, sync=sync, across=across)
    outcome = launch(body, out, data, shared=1024, options=Options(delivery=delivery))  # type: ignore[arg-type]
    rows = data[:512].reshape(32, 16).copy()
    for lane in range(32):
        rows[lane, max(16 - lane, 0) :] = 0
    return out.reshape(32, 16), rows, kinds(outcome)


@pytest.mark.parametrize("delivery", ["late", "early"])
@pytest.mark.parametrize("wait", ["cp.async.wait_group 1;", "cp.async.wait_group 0;", "cp.async.wait_all;"])
def test_a_copy_is_there_after_its_wait(delivery: str, wait: str) -> None:
    out, rows, reported = copied(delivery, wait, "")
    assert (out == rows).all()
    assert not reported
    out, rows, reported = copied(delivery, wait, "bar.warp.sync -1;", across=16)
    assert (out == rows[np.arange(32) ^ 1]).all()
    assert not reported


@pytest.mark.parametrize("delivery", ["late", "early"])
def test_a_copy_that_is_not_waited_for(delivery: str) -> None:
    """The race is found either way; with late delivery, the bytes are wrong as well."""
    for wait in ("", "cp.async.wait_group 2;"):
        out, rows, reported = copied(delivery, wait, "bar.sync 0;")
        assert reported == ["shared memory race"]
        assert (out == rows).all() == (delivery == "early")


def test_the_copy_of_another_lane_needs_more_than_a_wait() -> None:
    assert copied("late", "cp.async.wait_all;", "", across=16)[2] == ["shared memory race"]


@pytest.mark.parametrize(
    ("waits", "found"),
    [
        ("cp.async.commit_group; cp.async.wait_group 0;", []),
        ("cp.async.commit_group; cp.async.wait_group 1;", ["shared memory race"]),
        ("cp.async.wait_group 0;", ["shared memory race"]),  # it is in no group yet
        ("cp.async.wait_all;", []),
    ],
)
def test_a_wait_counts_groups(waits: str, found: list[str]) -> None:
    data, out = RNG.integers(0, 1 << 32, 64).astype(np.uint32), words(32)
    body = f"""
      mov.b32 %r1, smem; mad.lo.s32 %r2, %r0, 4, %r1; mul.wide.u32 %rd10, %r0, 4; add.s64 %rd11, %rd1, %rd10;
      cp.async.ca.shared.global [%r2+128], [%rd11+128], 4; cp.async.commit_group;
      cp.async.ca.shared.global [%r2], [%rd11], 4; {waits}
      ld.shared.b32 %r3, [%r2]; {store_results("%r3")}
    """
    assert kinds(launch(body, out, data, shared=256)) == found
    assert (out == data[:32]).all() == (not found)


def test_a_copy_of_no_bytes_reads_nothing() -> None:
    out = words(32)
    body = f"""
      mov.b32 %r1, smem; mad.lo.s32 %r2, %r0, 4, %r1; mov.b64 %rd5, 64;
      cp.async.ca.shared.global [%r2], [%rd5], 4, 0; cp.async.wait_all; ld.shared.b32 %r3, [%r2];
      {store_results("%r3")}
    """
    out[:] = 5
    assert not launch(body, out, shared=128).findings
    assert not out.any()
    assert kinds(launch(body.replace("4, 0;", "4, 4;"), out, shared=128))[0] == "global memory out of bounds"
