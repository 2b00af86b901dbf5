"""Tensor memory: layouts, allocation, and the order that loads and stores need."""

from __future__ import annotations

import numpy as np
import pytest
from gpu.blackwell import LANES, Kernel, only, unwritten
from gpu.emulated import kinds
from triton_loom.emulator.machine import Options

NOTHING = np.zeros(0, np.uint8)
NO_BARRIER = {"init": "", "commit": "", "wait": ""}  # where no product is made


def test_loads_return_what_was_stored() -> None:
    image = unwritten()
    got, outcome = Kernel().run(image, NOTHING, **NO_BARRIER)
    assert not outcome.findings
    assert (got == image).all()


# ---- shapes -------------------------------------------------------------------------------------------------------

# Lane and column of thread t and register r.
SHAPES = {
    "32x32b": lambda t, r: (t, r),
    "16x64b": lambda t, r: (t // 4 + 8 * (t % 2), 2 * r + t // 2 % 2),
    "16x128b": lambda t, r: (t // 4 + 8 * (r % 2), 4 * (r // 2) + t % 4),
    "16x256b": lambda t, r: (t // 4 + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * (t % 4) + r % 2),
    "16x32bx2": lambda t, r: (t % 16, r + 40 * (t // 16)),
}
REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}


def moved(shape: str, count: int, packed: bool, half: int, column: int, loads: bool) -> str:
    """Return a load or a store of `count` repetitions, offset by sixteen lanes if `half`."""
    names = ", ".join(f"%r{64 + n}" for n in range(count * REGISTERS[shape]))
    modifier = (".pack::16b" if loads else ".unpack::16b") if packed else ""
    split = ", 40" if shape == "16x32bx2" else ""
    address = f"[%r11 + {half * 16 << 16 | column}]"
    opcode = f"tcgen05.{'ld' if loads else 'st'}.sync.aligned.{shape}.x{count}{modifier}.b32"
    return f"{opcode} {{{names}}}, {address}{split};" if loads else f"{opcode} {address}{split}, {{{names}}};"


def cells(
    shape: str, registers: int, packed: bool, half: int, column: int
) -> list[list[list[tuple[int, int]]]]:
    """Return the cells of each register of each thread of a warp, in the warp's quarter."""
    result = []
    for thread in range(32):
        of_thread = []
        for r in range(registers):
            lane, at = SHAPES[shape](thread, r)
            lane += 16 * half
            if packed and shape == "16x32bx2":
                at = 2 * (at - 40 * (thread // 16)) + 40 * (thread // 16)
            elif packed:
                at *= 2
            of_thread.append([(lane, column + at + k) for k in range(2 if packed else 1)])
        result.append(of_thread)
    return result


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str, packed: bool) -> None:
    """A load reads the cells of its shape; a store of the result elsewhere has the same layout."""
    count, half = 4, 0 if shape == "32x32b" else 1
    image = unwritten()
    parts = {
        "act": moved(shape, count, packed, half, 8, True) + "tcgen05.wait::ld.sync.aligned;"
        + moved(shape, count, packed, half, 128, False) + "tcgen05.wait::st.sync.aligned; bar.sync 0;",
    }  # fmt: skip
    got, outcome = Kernel().run(image, NOTHING, **NO_BARRIER, **parts)
    assert not outcome.findings
    expected = image.copy()
    registers = count * REGISTERS[shape]
    sources, targets = (cells(shape, registers, packed, half, column) for column in (8, 128))
    for quarter in range(4):
        for thread in range(32):
            for r in range(registers):
                for (lane, column), (to_lane, to_column) in zip(
                    sources[thread][r], targets[thread][r], strict=True
                ):
                    value = image[32 * quarter + lane, column]
                    expected[32 * quarter + to_lane, to_column] = value & 0xFFFF if packed else value
    assert (got == expected).all()


# ---- allocation ---------------------------------------------------------------------------------------------------

ALLOC = "@%p11 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r9], {};"
FREE = "@%p11 tcgen05.dealloc.cta_group::1.sync.aligned.b32 {}, {};"
RELINQUISH = "@%p11 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
MISUSE, BOUNDS, RACE = "tensor memory misuse", "tensor memory out of bounds", "tensor memory race"

WRONG: dict[str, tuple[str, dict[str, str]]] = {
    "never freed": (MISUSE, {"free": ""}),
    "freed by halves": (MISUSE, {"free": FREE.format("%r10", 128)}),
    "freed twice": (MISUSE, {"free": FREE.format("%r10", 256) * 2}),
    "freed at another address": (MISUSE, {"free": "add.s32 %r14, %r10, 32;" + FREE.format("%r14", 256)}),
    "48 columns": (MISUSE, {"alloc": ALLOC.format(48) + ALLOC.format(256)}),
    "16 columns": (MISUSE, {"alloc": ALLOC.format(16) + ALLOC.format(256)}),
    "more than there are": (MISUSE, {"alloc": ALLOC.format(512) + ALLOC.format(256)}),
    "allocated after the permit is given up": (MISUSE, {"alloc": RELINQUISH + ALLOC.format(256)}),
    "columns that are not allocated": (BOUNDS, {"alloc": ALLOC.format(128), "free": FREE.format("%r10", 128)}),
    "taken for the first columns": (BOUNDS, {"share": "", "begin": Kernel().standard()["begin"] + "mov.b32 %r10, 0;"
        "shr.u32 %r13, %r0, 5; shl.b32 %r13, %r13, 21; mov.b32 %r11, %r13;"}),
    "the next warp's lanes": (BOUNDS, {"meet": "add.s32 %r11, %r11, 2097152; bar.sync 0;"}),
    "lanes that no shape begins at": (BOUNDS, {"meet": "add.s32 %r11, %r11, 524288; bar.sync 0;"}),
    "used after it is freed": (BOUNDS, {"meet": "bar.sync 0;" + FREE.format("%r10", 256) + "bar.sync 0;", "free": ""}),
    "another address in each thread": (MISUSE, {"meet": "bar.sync 0; and.b32 %r14, %r0, 1; add.s32 %r11, %r11, %r14;"}),
    "a part of the warp": ("split warp", {"meet": "bar.sync 0; and.b32 %r14, %r0, 31; setp.ne.b32 %p12, %r14, 5;",
        "load": "@%p12 tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r64}, [%r11]; {wait_ld}"}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_uses(name: str) -> None:
    kind, changes = WRONG[name]
    _, outcome = Kernel().run(unwritten(), NOTHING, **(NO_BARRIER | changes))
    assert kind in kinds(outcome)


def test_two_allocations_are_disjoint() -> None:
    parts = {
        "alloc": ALLOC.format(256) + ALLOC.replace("[%r9]", "[%r9+4]").format(128),
        "act": "ld.shared.b32 %r15, [%r9+4]; add.s32 %r16, %r15, %r13; mov.b32 %r64, 7;"
        "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r16], {%r64}; tcgen05.wait::st.sync.aligned;",
        "free": FREE.format("%r10", 256) + FREE.format("%r15", 128),
    }
    image = unwritten()
    got, outcome = Kernel().run(image, NOTHING, **NO_BARRIER, **parts)
    assert not outcome.findings
    assert (got == image).all()


# ---- order --------------------------------------------------------------------------------------------------------

STORE_AGAIN = "mov.b32 %r80, 1; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r11], {%r80};"
LOAD_ONE = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r64}, [%r11];"
WAIT_ST, WAIT_LD = "tcgen05.wait::st.sync.aligned;", "tcgen05.wait::ld.sync.aligned;"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"wait_st": ""}, [RACE]),
        ({"wait_st": "", "act": WAIT_ST}, []),
        ({"wait_ld": ""}, ["load under way", RACE]),
        ({"load": LOAD_ONE}, [RACE]),  # the columns are freed while the loads go on
        ({"act": STORE_AGAIN}, [RACE]),
        ({"act": STORE_AGAIN + WAIT_ST}, []),
        ({"act": LOAD_ONE + STORE_AGAIN + WAIT_ST + WAIT_LD}, [RACE]),
        ({"act": LOAD_ONE + WAIT_LD + STORE_AGAIN + WAIT_ST}, []),
        ({"act": LOAD_ONE + "mov.b32 %r65, %r64;" + WAIT_LD + "add.s32 %r66, %r65, 1;"}, []),
        ({"act": LOAD_ONE + "mov.b32 %r65, %r64; add.s32 %r66, %r65, 1;" + WAIT_LD}, ["load under way"]),
        ({"end": ""}, [RACE]),  # the first warp frees what others may still load
    ],
)
@pytest.mark.parametrize("delivery", ["late", "early"])
def test_order(changes: dict[str, str], found: list[str], delivery: str) -> None:
    options = Options(delivery=delivery)  # type: ignore[arg-type]
    _, outcome = Kernel().run(unwritten(), NOTHING, options, **(NO_BARRIER | changes))
    assert kinds(outcome) == found


BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [("", "", []), (BEFORE, AFTER, []), (BEFORE, "", ["tcgen05.fence missing"]), ("", AFTER, [RACE])],
    ids=["no fences at all", "both", "none after", "none before"],
)
def test_fences(before: str, after: str, found: list[str]) -> None:
    """A kernel with one fence of threads must have all that it needs: here the first thread's copy overwrites other
    warps' stores."""
    fences = {"wait_st": WAIT_ST + before, "meet": "bar.sync 0;" + after}
    copy = only(f"mov.b64 %rd50, {descriptor()}; tcgen05.cp.cta_group::1.128x128b [%r10], %rd50")
    parts = {"act": copy, "wait": Kernel().standard()["wait"] + after, "end": before + "bar.sync 0;" + after}
    parts["wait_ld"] = WAIT_LD
    _, outcome = Kernel(shared=4096).run(unwritten(), NOTHING, **fences, **parts)
    assert kinds(outcome) == found


def descriptor() -> int:
    """Return a descriptor of 128 contiguous 16-byte rows from the first tile on, without a swizzle."""
    return (1024 + 1024) >> 4 | 8 << 32 | 1 << 46


def test_unwritten_cells() -> None:
    """Unwritten cells are NaN in every format. If a loop has no iterations, Triton's pipelines load sums that were
    never computed and drop them, so a load is not a finding. A product that adds to them is (test_tcgen05.py)."""
    for _ in range(2):
        got, outcome = Kernel().run(unwritten(), NOTHING, **(NO_BARRIER | {"store": ""}))
        assert not outcome.findings
        for dtype in (np.float32, np.float16):
            assert np.isnan(got.view(dtype)).all()
    assert got.shape == (LANES, 256)
