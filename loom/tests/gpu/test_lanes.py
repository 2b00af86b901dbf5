"""Instructions across lanes, against the rules of the ISA in Python."""

from __future__ import annotations

import numpy as np
import pytest
from gpu.emulated import Array, kinds, launch, store_results, words

FULL = 0xFFFFFFFF


def from_other_lane(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """Return a shfl's result by the pseudo code of the ISA."""
    b, clamp, segments = b & 31, c & 31, c >> 8 & 31
    last = (lane & segments) | (clamp & ~segments & 31)
    first = lane & segments
    if mode == "up":
        other, fine = lane - b, lane - b >= last
    elif mode == "down":
        other, fine = lane + b, lane + b <= last
    elif mode == "bfly":
        other, fine = lane ^ b, lane ^ b <= last
    else:
        other = first | (b & ~segments & 31)
        fine = other <= last
    return (other, True) if fine else (lane, False)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffle(mode: str) -> None:
    rng = np.random.default_rng(0)
    for c in (31, 0, 0x1F | 16 << 8, 0x1C00 | 0x1F, 0x1803, 0x1000):
        distance = rng.integers(0, 40, 32).astype(np.uint32)
        value = rng.integers(0, 1 << 32, 32).astype(np.uint32)
        out = words(64)
        body = f"""
          mul.wide.u32 %rd10, %r0, 4;
          add.s64 %rd11, %rd1, %rd10; ld.global.b32 %r1, [%rd11];
          add.s64 %rd12, %rd2, %rd10; ld.global.b32 %r2, [%rd12];
          shfl.sync.{mode}.b32 %r3|%p1, %r1, %r2, {c}, -1;
          selp.b32 %r4, 1, 0, %p1;
          {store_results("%r3", "%r4")}
        """
        assert not launch(body, out, value, distance).findings
        for lane in range(32):
            other, fine = from_other_lane(mode, lane, int(distance[lane]), c)
            assert (int(out[2 * lane]), bool(out[2 * lane + 1])) == (int(value[other]), fine)


def of_lanes(instruction: str, value: Array, result: str = "%r3") -> Array:
    out = words(32)
    body = f"""
      mul.wide.u32 %rd10, %r0, 4;
      add.s64 %rd11, %rd1, %rd10; ld.global.b32 %r1, [%rd11];
      setp.ne.b32 %p1, %r1, 0;
      {instruction}
      {store_results(result)}
    """
    assert not launch(body, out, value.view(np.uint32)).findings
    return out


VALUES = np.array([*range(-16, 14), -(1 << 31), (1 << 31) - 1], np.int32)


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_reductions_of_integers(kind: str) -> None:
    values = VALUES if kind == "s32" else VALUES.view(np.uint32)
    for name, f in (("add", np.sum), ("min", np.min), ("max", np.max)):
        got = of_lanes(f"redux.sync.{name}.{kind} %r3, %r1, -1;", values)
        assert set(got.tolist()) == {int(f(values.astype(np.int64))) & FULL}


def test_reductions_of_bits() -> None:
    for name, f in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        got = of_lanes(f"redux.sync.{name}.b32 %r3, %r1, -1;", VALUES)
        assert set(got.tolist()) == {int(f.reduce(VALUES.view(np.uint32)))}


def test_reductions_of_floats() -> None:
    values = np.array([3.5, -7.25, *[0.0] * 28, np.nan, -0.0], np.float32)
    for modifiers, want in (
        ("min", -7.25), ("max", 3.5), ("min.abs", 0.0), ("max.abs", 7.25), ("max.NaN", np.nan), ("min.abs.NaN", np.nan)
    ):  # fmt: skip
        got = of_lanes(f"redux.sync.{modifiers}.f32 %r3, %r1, -1;", values)
        expected = 0x7FFFFFFF if np.isnan(want) else int(np.float32(want).view(np.uint32))
        assert set(got.tolist()) == {expected}, modifiers


@pytest.mark.parametrize("chosen", [(), (0,), (3, 31), tuple(range(32))])
def test_votes(chosen: tuple[int, ...]) -> None:
    values = np.array([lane in chosen for lane in range(32)], np.uint32)
    ballot = sum(1 << lane for lane in chosen)
    assert set(of_lanes("vote.sync.ballot.b32 %r3, %p1, -1;", values).tolist()) == {ballot}
    for mode, want in (("all", len(chosen) == 32), ("any", bool(chosen)), ("uni", len(chosen) in (0, 32))):
        got = of_lanes(f"vote.sync.{mode}.pred %p2, %p1, -1; selp.b32 %r3, 1, 0, %p2;", values)
        assert set(got.tolist()) == {int(want)}, mode


def test_election() -> None:
    out = words(96)
    body = f"""
      setp.ge.u32 %p1, %r0, 6; mov.b32 %r1, 99; mov.b32 %r2, 99; mov.b32 %r3, 0;
      @!%p1 bra end;
      elect.sync %r1|%p2, 0xffffffc0;
      selp.b32 %r2, 1, 0, %p2;
    end:
      elect.sync _|%p3, -1;
      selp.b32 %r3, 1, 0, %p3;
      {store_results("%r1", "%r2", "%r3")}
    """
    assert not launch(body, out).findings
    assert out.reshape(32, 3)[:, 0].tolist() == [99] * 6 + [6] * 26
    assert out.reshape(32, 3)[:, 1].tolist() == [99] * 6 + [1] + [0] * 25
    assert out.reshape(32, 3)[:, 2].tolist() == [1] + [0] * 31


@pytest.mark.parametrize(
    "instruction",
    [
        "shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;",
        "redux.sync.add.s32 %r1, %r0, -1;",
        "vote.sync.ballot.b32 %r1, %p1, -1;",
        "elect.sync %r1|%p1, -1;",
        "bar.warp.sync -1;",
        "bar.sync 0;",
    ],
)
def test_missing_members_are_reported(instruction: str) -> None:
    out = words(32)
    split = f"setp.lt.u32 %p1, %r0, 7; @%p1 bra end;\n{instruction}\nend:"
    outcome = launch(split, out)
    assert "split warp" in kinds(outcome)
    assert outcome.findings[0].by.thread == 7
    assert kinds(launch(f"setp.lt.u32 %p1, %r0, 7; @%p1 bra end;\nend: {instruction}", out)) == []


def test_a_value_of_a_diverged_lane() -> None:
    out = words(32)
    body = "setp.lt.u32 %p1, %r0, 16; @%p1 bra end; shfl.sync.bfly.b32 %r1, %r0, 16, 31, 0xffff0000; end:"
    assert kinds(launch(body, out)) == ["lane not there"]
    assert kinds(launch(body.replace("%r0, 16, 31", "%r0, 8, 31"), out)) == []
