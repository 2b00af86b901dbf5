"""Offsets that are inside of a tensor digit by digit, and some that are not."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import triton
import triton.language as tl
import z3
from triton_loom.prove import Buffer, Contract, cdiv, prove, symbol
from triton_loom.prove.nested import inside
from triton_loom.prove.solver import ask
from triton_loom.prove.sums import is_same, sum_of, terms_of

b, h, t, d = z3.Ints("b h t d")
B, H, T = z3.Ints("B H T")
INDICES = [b >= 0, b < B, h >= 0, h < H, t >= 0, t < T, d >= 0, d < 24, B >= 1, H >= 1, T >= 1]


def shown(facts: list[Any]) -> Any:
    """Return a prover of facts about single indices."""
    return lambda goal: ask(facts, goal, 300_000).verdict == "proven"


@pytest.mark.parametrize(
    "offset",
    [
        ((b * H + h) * T + t) * 24 + d,
        ((b * T + t) * H + h) * 24 + d,
        (b * H * T + h * T + (T - 1 - t)) * 24 + (23 - d),  # from the end
        ((b * H + h) * T + t) * 24 + d % 8 * 3 + d % 3,
    ],
)
def test_indices_within_their_sizes_are_inside(offset: Any) -> None:
    assert inside(offset, B * H * T * 24, shown(INDICES))
    assert not inside(offset + 1, B * H * T * 24, shown(INDICES))
    assert not inside(offset - 1, B * H * T * 24, shown(INDICES))
    assert not inside(offset, (B * H * T - 1) * 24, shown(INDICES))


@pytest.mark.parametrize("missing", range(8))
def test_every_bound_is_needed(missing: int) -> None:
    facts = [fact for number, fact in enumerate(INDICES) if number != missing]
    assert not inside(((b * H + h) * T + t) * 24 + d, B * H * T * 24, shown(facts))


def test_offsets_declared_inside_are_inside() -> None:
    """Check with numbers that every offset declared inside is."""
    values = range(-1, 4)
    for sizes in product((1, 3), repeat=2):
        for one, other in product(values, repeat=2):
            facts = [b == one, h == other, sizes[0] == B, sizes[1] == H]
            for offset, number in (
                (b * H + h, one * sizes[1] + other),
                (b * H + H - 1 - h, one * sizes[1] + sizes[1] - 1 - other),
            ):
                if inside(offset, B * H, shown(facts)):
                    assert 0 <= number < sizes[0] * sizes[1]


def test_sums_are_compared_by_terms() -> None:
    e = z3.simplify((b + 2 * h) * (T - 3) + 5, som=True)
    assert is_same(sum_of(terms_of(e)), e)
    assert is_same(80 * d * (T + T % 2), 80 * (T * d) + (T % 2) * d * 80)
    assert not is_same(80 * d * (T + T % 2), 80 * T * d + 80 * (T % 2))
    assert not is_same(b * h, b * h + 1)
    assert is_same(sum_of([]), z3.IntVal(0))


@triton.jit
def heads(
    x_ptr, HEADS, GROUP, TOKENS, ONE_MORE: tl.constexpr, TILE: tl.constexpr = 16, DIM: tl.constexpr = 24
):
    """Load tokens from the end, of the key head that a query head shares."""
    tiles = tl.cdiv(TOKENS, TILE)
    tile = tiles - 1 - tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % HEADS
    batch = (tl.program_id(0) // tiles // HEADS).to(tl.int64)
    token = tile * TILE + tl.arange(0, TILE)
    lane = tl.arange(0, 32)
    row = (batch * (HEADS // GROUP) + head // GROUP) * TOKENS + token
    mask = (token < TOKENS + ONE_MORE)[:, None] & (lane < DIM)[None, :]
    x = tl.load(x_ptr + row[:, None] * DIM + lane[None, :], mask=mask, other=0.0)
    tl.device_print("sum", tl.sum(x))


@pytest.mark.parametrize("more", [0, 1])
def test_shared_key_heads_are_in_bounds(more: int) -> None:
    batch, keys, group, tokens = (
        symbol(name, 1, most)
        for name, most in (("batch", 2**12), ("keys", 64), ("group", 64), ("tokens", 2**20))
    )
    contract = Contract(
        arguments={
            "x_ptr": Buffer("f32", batch * keys * tokens * 24),
            "HEADS": keys * group,
            "GROUP": group,
            "TOKENS": tokens,
        },
        grid=(cdiv(tokens, 16) * keys * group * batch, 1, 1),
        sizes=(batch, keys, group, tokens),
        constants={"ONE_MORE": more, "TILE": 16, "DIM": 24},
    )
    bounds = [
        answer.verdict for answer in prove(heads, contract, effort=3_000_000, replay=False).of("bounds")
    ]
    assert (bounds == ["proven"]) == (more == 0)


@triton.jit
def gathered(x_ptr, index_ptr, rows, cols, PAST: tl.constexpr, BLOCK: tl.constexpr = 32):
    """Gather rows by a list with one entry per program, or read past its end."""
    row = tl.load(index_ptr + tl.program_id(0) + PAST).to(tl.int64)
    col = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + col, mask=col < cols, other=0.0)
    tl.device_print("sum", tl.sum(x))


@pytest.mark.parametrize("past", [0, 1])
def test_values_loaded_out_of_bounds_are_arbitrary(past: int) -> None:
    """Assumptions about the elements of a list hold only inside the list."""
    rows, cols, programs = symbol("rows", 1, 2**20), symbol("cols", 1, 2**20), symbol("programs", 1, 2**20)
    contract = Contract(
        arguments={
            "x_ptr": Buffer("f32", rows * cols),
            "index_ptr": Buffer("i32", programs, values=lambda v: z3.And(v >= 0, v < rows)),
            "rows": rows,
            "cols": cols,
        },
        grid=(programs, 1, 1),
        sizes=(rows, cols, programs),
        constants={"PAST": past, "BLOCK": 32},
    )
    answers = prove(gathered, contract, effort=3_000_000, replay=False).of("bounds")
    proven = {answer.what: answer.verdict == "proven" for answer in answers}
    assert proven == {"load index_ptr": past == 0, "load x_ptr": past == 0}
