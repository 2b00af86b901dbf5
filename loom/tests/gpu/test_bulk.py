"""Bulk copies of tiles: the location of each byte, counted bytes, and reports of misuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from gpu.emulated import kinds, launch, words
from gpu.hopper import (
    Array,
    Coordinates,
    aligned,
    aligned_copy,
    in_shared,
    tensor_map,
    tile,
    wait,
    words_in,
    words_out,
)
from triton_loom.emulator.machine import Options, Outcome

TILE = 1024  # the offset of the tile in shared memory; the mbarrier is at 0
HEAD = "mov.b32 %r1, smem; add.s32 %r2, %r1, 1024; setp.eq.b32 %p1, %r0, 0;"
FENCE_INIT = "fence.mbarrier_init.release.cluster;"
INIT = f"@%p1 mbarrier.init.shared::cta.b64 [%r1], 1; {FENCE_INIT}"
BOTH = pytest.mark.parametrize("delivery", ["late", "early"])


def options(delivery: str) -> Options:
    return Options(delivery=delivery)  # type: ignore[arg-type]


# ---- loads -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """A load of a box of an array at some coordinates."""

    shape: tuple[int, ...]
    box: tuple[int, ...]
    at: tuple[int, ...]
    type_: str = "u16"
    swizzle: str = "none"
    fill: int = 0


LOADS = {
    "1d": Load((200,), (64,), (100,)),
    "1d, the end is outside": Load((200,), (64,), (160,)),
    "1d of bytes": Load((208,), (32,), (16,), "u8"),
    "2d": Load((16, 40), (8, 8), (3, 8)),
    "2d, swizzle of 32 bytes": Load((32, 64), (32, 16), (0, 24), swizzle="32"),
    "2d, swizzle of 64 bytes": Load((32, 64), (32, 32), (0, 8), swizzle="64"),
    "2d, swizzle of 128 bytes": Load((32, 80), (32, 64), (0, 8), swizzle="128"),
    "2d, rows shorter than the swizzle": Load((32, 80), (32, 32), (0, 8), swizzle="128"),
    "2d of f32, swizzle of 128 bytes": Load((20, 48), (16, 32), (4, 4), "f32", "128"),
    "2d of bytes, swizzle of 128 bytes": Load((20, 256), (16, 128), (4, 112), "u8", "128"),
    "2d, before the first row and column": Load((16, 40), (8, 16), (-3, -5)),
    "2d, beyond the last row and column": Load((10, 40), (8, 16), (5, 30), swizzle="32"),
    "2d, wholly outside": Load((10, 40), (8, 16), (10, 0)),
    "2d, NaN outside, bf16": Load((10, 40), (8, 16), (5, 30), "bf16", fill=1),
    "2d, NaN outside, f16": Load((10, 40), (8, 16), (-2, 30), "f16", fill=1),
    "2d, NaN outside, f32": Load((10, 40), (8, 8), (-2, 36), "f32", fill=1),
    "3d": Load((4, 6, 24), (2, 3, 8), (1, 2, 8)),
    "3d, outside along the middle": Load((4, 6, 24), (2, 4, 8), (1, 4, 8)),
    "4d": Load((3, 4, 3, 16), (2, 2, 2, 8), (1, 1, 1, 4)),
    "5d, swizzle of 32 bytes": Load((3, 2, 3, 2, 24), (2, 2, 2, 2, 16), (1, 0, 1, 0, 2), swizzle="32"),
}
NAN = {
    "bf16": 0x7FFF,
    "f16": np.uint16(0x7FFF).view(np.float16),
    "f32": np.uint32(0x7FFFFFFF).view(np.float32),
}


def contents(shape: tuple[int, ...], type_: str) -> Array:
    """Return an array whose elements are all different, as far as the type allows."""
    dtype = {"u8": np.uint8, "f32": np.float32, "f16": np.float16}.get(type_, np.uint16)
    return aligned_copy(
        (np.arange(np.prod(shape)) * 7 % (251 if type_ in ("u8", "f16") else 65521)).astype(dtype)
    ).reshape(shape)


def load(case: Load, delivery: str, array: Array, map_: Array, expected_bytes: int) -> tuple[Array, Outcome]:
    count = -(-expected_bytes // 128) * 32
    rank = len(case.box)
    body = (
        f"{HEAD} {INIT} bar.sync 0; @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], {expected_bytes};"
        f"@%p1 cp.async.bulk.tensor.{rank}d.shared::cta.global.mbarrier::complete_tx::bytes "
        f"[%r2], [%rd1, {Coordinates(case.at)}], [%r1];" + wait()
    )
    # Bytes after the tile in its last 128 bytes were not written, so they are not read either.
    out = words(count)
    body += (
        words_out(expected_bytes // 4, TILE)
        if expected_bytes % 128 == 0
        else (f"setp.lt.u32 %p3, %r0, {expected_bytes // 4}; @!%p3 bra END;" + words_out(32, TILE) + "END:")
    )
    outcome = launch(body, out, map_, array, shared=TILE + count * 4, options=options(delivery))
    return out, outcome


@BOTH
@pytest.mark.parametrize("name", LOADS)
def test_loads(name: str, delivery: str) -> None:
    case = LOADS[name]
    array = contents(case.shape, case.type_)
    expected = tile(array, case.at, case.box, NAN[case.type_] if case.fill else 0)
    map_ = tensor_map(array, case.box, type_=case.type_, swizzle=case.swizzle, fill=case.fill)
    out, outcome = load(case, delivery, array, map_, expected.nbytes)
    memory = in_shared(expected, case.swizzle, out.nbytes, TILE % 1024)
    assert not outcome.findings
    assert out.view(np.uint8)[: expected.nbytes].tolist() == memory[: expected.nbytes].tolist()


def test_a_part_of_an_array() -> None:
    """Columns that the map leaves out count as outside, although there is memory."""
    array = contents((16, 40), "u16")
    case = Load((16, 20), (8, 16), (12, 8))
    map_ = tensor_map(array, case.box, shape=case.shape)
    expected = tile(array[:, :20], case.at, case.box)
    out, outcome = load(case, "late", array, map_, expected.nbytes)
    assert not outcome.findings
    assert out.view(np.uint16).reshape(8, 16).tolist() == expected.tolist()


def test_gather_of_four_rows() -> None:
    array = contents((40, 64), "u16")
    map_ = tensor_map(array, (1, 64), swizzle="128")
    rows = [7, 33, -1, 2]  # one of them outside
    body = (
        f"{HEAD} {INIT} bar.sync 0; @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 512;"
        "@%p1 cp.async.bulk.tensor.2d.tile::gather4.shared::cta.global.mbarrier::complete_tx::bytes "
        f"[%r2], [%rd1, {{0, {', '.join(map(str, rows))}}}], [%r1];" + wait() + words_out(128, TILE)
    )
    out = words(128)
    assert not launch(body, out, map_, array, shared=TILE + 512).findings
    expected = np.stack([array[row] if row >= 0 else np.zeros(64, np.uint16) for row in rows])
    assert out.view(np.uint8).tolist() == in_shared(expected, "128", 512).tolist()


# ---- stores ----------------------------------------------------------------------------------------------

STORE = (
    f"{HEAD} {{fill}} fence.proxy.async.shared::cta; bar.sync 0;"
    "@%p1 {operation}.bulk_group [%rd1, {at}], [%r2];"
    "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;"
)


def store(
    content: Array,
    array: Array,
    at: tuple[int, ...],
    box: tuple[int, ...],
    delivery: str,
    type_: str,
    swizzle: str,
    how: str = "",
) -> Outcome:
    memory = aligned_copy(in_shared(content, swizzle, content.nbytes).view(np.uint32))
    map_ = tensor_map(array, box, type_=type_, swizzle=swizzle)
    rank = len(box)
    operation = (
        f"cp.{'reduce.' if how else ''}async.bulk.tensor.{rank}d.global.shared::cta{'.' if how else ''}{how}"
    )
    body = STORE.format(fill=words_in(memory.size, TILE), operation=operation, at=Coordinates(at))
    return launch(body, memory, map_, array, shared=TILE + content.nbytes, options=options(delivery))


@BOTH
@pytest.mark.parametrize("swizzle", ["none", "32", "64", "128"])
def test_stores(swizzle: str, delivery: str) -> None:
    columns = {"none": 16, "32": 16, "64": 32, "128": 64}[swizzle]
    content = contents((16, columns), "u16")
    array = aligned_copy(np.full((20, 80), 9, np.uint16))
    expected = array.copy()
    at = (12, 50)
    for (row, column), value in np.ndenumerate(content):
        if at[0] + row < 20 and at[1] + column < 80:
            expected[at[0] + row, at[1] + column] = value
    assert not store(content, array, at, (16, columns), delivery, "u16", swizzle).findings
    assert array.tolist() == expected.tolist()


def bf16(x: Array) -> Array:
    """Round to nearest, ties to even; without NaN."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(x: Array) -> Array:
    return (x.astype(np.uint32) << 16).view(np.float32)


REDUCTIONS: list[tuple[str, str, Any]] = [
    ("add", "u32", np.add), ("add", "s32", np.add), ("add", "u64", np.add), ("add", "f32", np.add),
    ("add", "f16", np.add), ("add", "bf16", lambda a, b: bf16(from_bf16(a) + from_bf16(b))),
    ("min", "s32", np.minimum), ("min", "u32", np.minimum), ("max", "s64", np.maximum), ("min", "f16", np.minimum),
    ("max", "bf16", lambda a, b: bf16(np.maximum(from_bf16(a), from_bf16(b)))),
    ("inc", "u32", lambda a, b: np.where(a >= b, 0, a + 1)),
    ("dec", "u32", lambda a, b: np.where((a == 0) | (a > b), b, a - 1)),
    ("and", "u32", np.bitwise_and), ("or", "u32", np.bitwise_or), ("xor", "u64", np.bitwise_xor),
]  # fmt: skip


@pytest.mark.parametrize(
    ("how", "type_", "function"), REDUCTIONS, ids=[f"{how}-{t}" for how, t, _ in REDUCTIONS]
)
def test_reductions(how: str, type_: str, function: Any) -> None:
    random = np.random.default_rng(0)
    dtype = {"bf16": np.uint16, "f16": np.float16, "f32": np.float32, "s32": np.int32, "s64": np.int64,
             "u64": np.uint64}.get(type_, np.uint32)  # fmt: skip

    def numbers(count: int) -> Array:
        if type_ == "bf16":
            return bf16(random.normal(size=count))
        if type_ in ("f16", "f32"):
            return random.normal(size=count).astype(dtype)
        return random.integers(0 if type_[0] == "u" else -9, 9, count).astype(dtype)

    content, array = aligned_copy(numbers(128).reshape(8, 16)), aligned_copy(numbers(160).reshape(10, 16))
    expected = array.copy()
    expected[4:10] = function(array[4:10], content[:6]).astype(dtype)
    assert not store(content, array, (4, 0), (8, 16), "late", type_, "none", how).findings
    assert array.tolist() == expected.tolist()


def test_scatter_of_four_rows() -> None:
    content, array = contents((4, 64), "u16"), aligned_copy(np.zeros((10, 64), np.uint16))
    memory, map_ = aligned_copy(content.reshape(-1).view(np.uint32)), tensor_map(array, (1, 64))
    body = STORE.format(
        fill=words_in(128, TILE),
        operation="cp.async.bulk.tensor.2d.tile::scatter4.global.shared::cta",
        at="{0, 9, 3, 12, 0}",
    )
    assert not launch(body, memory, map_, array, shared=TILE + 512).findings
    expected = np.zeros((10, 64), np.uint16)
    expected[[9, 3, 0]] = content[[0, 1, 3]]
    assert array.tolist() == expected.tolist()


# ---- maps that a kernel makes ----------------------------------------------------------------------------

MAKE = """
  mov.b32 %r1, smem; setp.eq.b32 %p1, %r0, 0; mad.lo.s32 %r3, %r0, 4, %r1; add.s32 %r2, %r1, 1024;
  {clear} bar.warp.sync -1;
  cvt.u64.u32 %rd10, %r1; mov.b64 %rd12, {stride}; mov.b32 %r5, {columns}; mov.b32 %r6, {rows}; mov.b32 %r7, 1;
  @%p1 tensormap.replace.tile.global_address.shared::cta.b1024.b64 [ %rd10 + 0 ], %rd2;
  @%p1 tensormap.replace.tile.rank.shared::cta.b1024.b32 [ %rd10 + 0 ], 0x1;
  @%p1 tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [ %rd10 + 0 ], 0x0, 16;
  @%p1 tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [ %rd10 + 0 ], 0x1, 8;
  @%p1 tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [ %rd10 + 0 ], 0x0, %r5;
  @%p1 tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [ %rd10 + 0 ], 0x1, %r6;
  @%p1 tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [ %rd10 + 0 ], 0x0, %rd12;
  @%p1 tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [ %rd10 + 0 ], 0x0, %r7;
  @%p1 tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [ %rd10 + 0 ], 0x1, %r7;
  @%p1 tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [ %rd10 + 0 ], 0x1;
  @%p1 tensormap.replace.tile.interleave_layout.shared::cta.b1024.b32 [ %rd10 + 0 ], 0x0;
  @%p1 tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [ %rd10 + 0 ], 0x1;
  {fill}
  tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [ %rd1 + 0 ], [%rd10], 0x80;
  {acquire}
  add.s32 %r1, %r1, 256; @%p1 mbarrier.init.shared::cta.b64 [%r1], 1; {fence_init}
  bar.sync 0; @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 256;
  @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%rd1, {{4, 5}}], [%r1];
"""
CLEAR = "st.shared.b32 [%r3], 0;"
FILL = "@%p1 tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [ %rd10 + 0 ], 0x0;"
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [ %rd1 + 0 ], 0x80;"
MADE = {
    "clear": CLEAR,
    "fill": FILL,
    "acquire": ACQUIRE,
    "stride": 80,
    "columns": 40,
    "rows": 10,
    "fence_init": FENCE_INIT,
}


def make(**changes: Any) -> tuple[Array, Array, Outcome]:
    array = contents((10, 40), "u16")
    out, map_ = words(64), aligned(128, np.uint8)
    body = MAKE.format(**(MADE | changes)) + wait() + words_out(64, TILE)
    return out, array, launch(body, out, map_, array, shared=TILE + 256)


def test_a_fence_of_the_asynchronous_proxy_shows_copies_an_mbarrier() -> None:
    assert not make(fence_init="fence.proxy.async.shared::cta;")[2].findings


def test_a_map_that_the_kernel_makes() -> None:
    out, array, outcome = make()
    assert not outcome.findings
    expected = tile(array, (5, 4), (8, 16))
    assert out.view(np.uint8).tolist() == in_shared(expected, "32", 256).tolist()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"acquire": ""}, "tensor map not acquired"),
        ({"fill": ""}, "unusable tensor map"),  # a field is missing
        ({"stride": 72}, "unusable tensor map"),  # no multiple of 16 bytes
        ({"clear": ""}, "uninitialized shared memory"),
        ({"rows": 11}, "global memory out of bounds"),  # more than there are
        ({"fence_init": ""}, "mbarrier fence missing"),
        (
            {"fence_init": "@!%p1 fence.mbarrier_init.release.cluster;"},
            "mbarrier fence missing",
        ),  # by other threads
        ({"fence_init": "fence.acq_rel.cta;"}, "mbarrier fence missing"),  # of no proxy
    ],
)
def test_a_map_that_the_kernel_makes_wrong(change: dict[str, Any], kind: str) -> None:
    _, _, outcome = make(**change)
    assert kind in kinds(outcome)


@pytest.mark.parametrize(("sync", "found"), [("bar.sync 0;", []), ("", ["tensor map not acquired"])])
def test_a_map_that_another_warp_has_made(sync: str, found: list[str]) -> None:
    """A fence acquires only what its warp knows of. (Without the barrier the map may not exist yet.)"""
    making, using = MAKE.format(**(MADE | {"acquire": "USE:"})).split("USE:")
    body = (
        f"setp.lt.u32 %p9, %r0, 32; @!%p9 bra USE; {making} USE: mov.b32 %r1, smem; add.s32 %r2, %r1, 1024;"
    )
    using = using.replace("bar.sync 0;", "bar.warp.sync -1;")
    body += f"{sync} @%p9 bra END; setp.eq.b32 %p1, %r0, 32; {ACQUIRE} {using} {wait()} END:"
    array, map_ = contents((10, 40), "u16"), aligned(128, np.uint8)
    outcome = launch(body, words(64), map_, array, threads=64, shared=TILE + 256)
    assert [kind for kind in kinds(outcome) if "acquired" in kind] == found


# ---- misuse ----------------------------------------------------------------------------------------------

COPY = (
    f"{HEAD} {{init}} {{before}} @%p1 mbarrier.arrive{{expect}} _, [%r1]{{amount}}; @%p1 "
    "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r2+{offset}], [%rd1, {{0, 0}}], [%r1];"
    "{wait}"
)


@dataclass(frozen=True)
class Misuse:
    """A mistake in a load of 8 x 64 16-bit elements by thread 0."""

    kind: str
    init: str = INIT
    before: str = "bar.sync 0;"
    expect: str = ".expect_tx.shared::cta.b64"
    amount: str = ", 1024"
    offset: int = 0
    wait: str = wait() + words_out(256, TILE)
    shared: int = TILE + 1024
    early: str | None = None  # if it shows as something else when copies arrive at once


FINE = Misuse("")
MISUSE = {
    "nobody waits": Misuse("copy outlives its block", wait=""),
    "read before it has come": Misuse("shared memory race", wait=words_out(256, TILE) + wait()),
    "no bytes expected": Misuse(
        "copy outlives its block", expect=".shared::cta.b64", amount="", early="shared memory race"
    ),
    "too few bytes expected": Misuse("deadlock", amount=", 512"),
    "too many bytes expected": Misuse("deadlock", amount=", 2048"),
    "no mbarrier": Misuse("no mbarrier", init=""),
    "a place that is no multiple of 128 bytes": Misuse("misaligned address", offset=16, shared=TILE + 1040),
    "a place past shared memory": Misuse("shared memory out of bounds", shared=TILE + 1008),
    "over bytes that another thread may still write": Misuse(
        "shared memory race",
        before="bar.sync 0; setp.eq.b32 %p2, %r0, 3; @%p2 st.shared.b32 [%r2], 1;",
    ),
}


def misuse(case: Misuse, delivery: str, **map_changes: Any) -> Outcome:
    array = contents((8, 64), "u16")
    map_ = tensor_map(array, (8, 64), **map_changes)
    fields = {name: getattr(case, name) for name in ("init", "before", "expect", "amount", "offset", "wait")}
    return launch(
        COPY.format(**fields), words(256), map_, array, shared=case.shared, options=options(delivery)
    )


@BOTH
def test_no_misuse(delivery: str) -> None:
    assert not misuse(FINE, delivery).findings


@BOTH
@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_reported(name: str, delivery: str) -> None:
    case = MISUSE[name]
    assert (case.early if case.early and delivery == "early" else case.kind) in kinds(misuse(case, delivery))


@pytest.mark.parametrize(
    "change",
    [{"given": 2**32 - 1 - (1 << 4)}, {"interleave": 1}, {"step": 2}, {"swizzle": "64"}],
    ids=["a field is missing", "interleaved", "steps between elements", "rows longer than the swizzle"],
)
def test_unusable_maps(change: dict[str, Any]) -> None:
    assert "unusable tensor map" in kinds(misuse(FINE, "late", **change))


def test_a_map_of_another_rank() -> None:
    array = contents((512,), "u16")
    out = launch(COPY.format(**{k: getattr(FINE, k) for k in ("init", "before", "expect", "amount", "offset", "wait")}),
                 words(256), tensor_map(array, (64,)), array, shared=FINE.shared)  # fmt: skip
    assert "unusable tensor map" in kinds(out)


def test_a_map_that_reaches_beyond_the_tensor() -> None:
    array = contents((8, 64), "u16")
    map_ = tensor_map(array, (8, 64), shape=(9, 64))
    body = COPY.format(
        **{k: getattr(FINE, k) for k in ("init", "before", "expect", "amount", "offset", "wait")}
    ).replace("{0, 0}", "{0, 1}")
    assert "global memory out of bounds" in kinds(launch(body, words(256), map_, array, shared=FINE.shared))


# A store of the threads' writes, and the following steps.
STORED = (
    f"{HEAD} {words_in(256, TILE)} {{fence}} {{sync}}"
    "@%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {{0, 0}}], [%r2];"
    "{commit} {wait} {after} mad.lo.s32 %r3, %r0, 4, %r2; st.shared.b32 [%r3], 77;"
)
STORES = {
    "": {},
    "proxy fence missing": {"fence": ""},
    "shared memory race": {"sync": ""},
    "copy outlives its block": {"commit": ""},
}


@BOTH
@pytest.mark.parametrize("kind", STORES)
def test_what_a_store_needs(kind: str, delivery: str) -> None:
    parts = {
        "fence": "fence.proxy.async.shared::cta;",
        "sync": "bar.sync 0;",
        "commit": "cp.async.bulk.commit_group;",
        "wait": "cp.async.bulk.wait_group.read 0;",
        "after": "bar.sync 0;",
    } | STORES[kind]
    memory, array = (
        aligned_copy(contents((512,), "u16").view(np.uint32)),
        aligned_copy(np.zeros((8, 64), np.uint16)),
    )
    outcome = launch(
        STORED.format(**parts),
        memory,
        tensor_map(array, (8, 64)),
        array,
        shared=TILE + 1024,
        options=options(delivery),
    )
    assert (kind in kinds(outcome)) if kind else not outcome.findings
    if not kind:
        assert array.reshape(-1).tolist() == memory.view(np.uint16).tolist()


@BOTH
@pytest.mark.parametrize("missing", ["wait", "after"])
def test_overwritten_before_it_is_stored(missing: str, delivery: str) -> None:
    """Another warp overwrites it: the issuing thread must wait for the read, and the others must learn of that."""
    parts = {
        "fence": "fence.proxy.async.shared::cta;",
        "sync": "bar.sync 0;",
        "commit": "cp.async.bulk.commit_group;",
        "wait": "cp.async.bulk.wait_group.read 0;",
        "after": "bar.sync 0;",
    } | {missing: ""}
    body = STORED.replace(words_in(256, TILE), words_in(256, TILE, threads=64)).format(**parts)
    memory, array = (
        aligned_copy(contents((512,), "u16").view(np.uint32)),
        aligned_copy(np.zeros((8, 64), np.uint16)),
    )
    map_ = tensor_map(array, (8, 64))
    outcome = launch(body, memory, map_, array, threads=64, shared=TILE + 1024, options=options(delivery))
    assert "shared memory race" in kinds(outcome)


def test_a_fence_may_stand_after_the_barrier() -> None:
    """The fence may stand anywhere between the write and the copy, if the fencing thread knows of the write."""
    parts = {"fence": "", "sync": "bar.sync 0; fence.proxy.async;", "commit": "cp.async.bulk.commit_group;",
             "wait": "cp.async.bulk.wait_group 0;", "after": "bar.sync 0;"}  # fmt: skip
    memory, array = (
        aligned_copy(contents((512,), "u16").view(np.uint32)),
        aligned_copy(np.zeros((8, 64), np.uint16)),
    )
    assert not launch(
        STORED.format(**parts), memory, tensor_map(array, (8, 64)), array, shared=TILE + 1024
    ).findings


def test_only_older_groups_are_waited_for() -> None:
    """After waiting for the first of two stores, its bytes may be overwritten, but not yet those of the second."""
    body = (
        f"{HEAD} {words_in(512, TILE)} fence.proxy.async.shared::cta; bar.sync 0; add.s32 %r3, %r2, 1024;"
        "@%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {0, 0}], [%r2]; cp.async.bulk.commit_group;"
        "@%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {0, 8}], [%r3]; cp.async.bulk.commit_group;"
        "cp.async.bulk.wait_group.read 1; bar.sync 0; @%p1 st.shared.b32 [{where}], 5; cp.async.bulk.wait_group 0;"
    )
    memory, array = (
        aligned_copy(contents((1024,), "u16").view(np.uint32)),
        aligned_copy(np.zeros((16, 64), np.uint16)),
    )
    map_ = tensor_map(array, (8, 64))
    for address, expected in (("%r2", []), ("%r3", ["shared memory race"])):
        array[...] = 0
        outcome = launch(body.replace("{where}", address), memory, map_, array, shared=TILE + 2048)
        assert kinds(outcome) == expected
    assert array.reshape(-1)[:512].tolist() == memory.view(np.uint16)[:512].tolist()
