"""Races that are shown digit by digit, and wrong kernels of which they are not shown."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import triton
import triton.language as tl
import z3
from triton_loom.prove import Buffer, Contract, cdiv, prove, symbol
from triton_loom.prove.digits import same
from triton_loom.prove.lemmas import ordered, range_of
from triton_loom.prove.linear import Linear
from triton_loom.prove.scope import Division, Scope

x, y, s = z3.Ints("x y s")


# ---- products as unknowns -------------------------------------------------------------------------------


def test_one_product_is_one_unknown() -> None:
    assert Linear().follows([], (x + y) * s == s * y + x * s)
    assert Linear().follows([3 * x * y >= 6], y * x >= 2)
    assert Linear().follows([x * x * y <= 4], y * x * x <= 4)


@pytest.mark.parametrize(
    ("facts", "goal"),
    [
        ([], x * y == x * s),
        ([], x * x * y == x * y * y),
        ([x == y], x * s == y * s),  # true, but not without knowing what a product is
        ([x * y >= 2], x * y >= 3),
        ([x * y / 4 >= 2], x * y >= 9),
        ([z3.Or(x * y > 0, s > 0)], x * y > 0),
    ],
)
def test_what_does_not_follow(facts: list[Any], goal: Any) -> None:
    assert not Linear().follows(facts, goal)


def test_nothing_but_products_is_replaced() -> None:
    """With the product back in its place, the expression is the one that it was."""
    for e in (x * y + 3 * s, (x * y * s + 1) / 8 + x, z3.If(x * y > s, x, y) - 2 * y * y, 5 * x - s):
        products = {str(c): c for c in z3.z3util.get_vars(Linear()(e)) if str(c).startswith("product!")}
        linear = Linear()(e)
        for values in product((-3, 0, 2, 7), repeat=3):
            numbers = [(c, z3.IntVal(v)) for c, v in zip((x, y, s), values, strict=True)]
            known = {
                "x * y": values[0] * values[1],
                "x * y * s": values[0] * values[1] * values[2],
                "y * y": values[1] ** 2,
            }
            right = z3.simplify(z3.substitute(e, *numbers))
            guesses = product(known.values(), repeat=len(products))
            given = (
                z3.simplify(
                    z3.substitute(
                        linear,
                        *numbers,
                        *((c, z3.IntVal(v)) for c, v in zip(products.values(), guess, strict=True)),
                    )
                )
                for guess in guesses
            )
            assert any(right.eq(found) for found in given)


# ---- lemmas ---------------------------------------------------------------------------------------------


def test_lemmas_are_true_of_integers() -> None:
    a, b, q, r = z3.Ints("a b q r")
    for number, by in product(range(-9, 10), range(1, 6)):
        values = [(a, number), (b, by), (q, number // by), (r, number % by)]
        for lemma in range_of(Division(a, b, q, r)):
            assert z3.is_true(z3.simplify(z3.substitute(lemma, *((c, z3.IntVal(v)) for c, v in values))))
    for one, other, factor in product(range(-4, 5), repeat=3):
        for lemma in ordered(z3.IntVal(one), z3.IntVal(other), z3.IntVal(factor)):
            assert z3.is_true(z3.simplify(lemma))


# ---- digits ---------------------------------------------------------------------------------------------

p, p2, c, c2, n = z3.Ints("p p' c c' n")


def columns(below: Any, least: int = 0) -> list[Any]:
    return [n >= 1, c >= least, c2 >= least, c < below, c2 < below]


def test_rows_of_columns() -> None:
    twins = [(p, p2), (c, c2)]
    offsets = p * n + c, p2 * n + c2
    assert same(columns(n), offsets, [(p, p2)], twins)
    assert not same(columns(n + 1), offsets, [(p, p2)], twins)  # the column after the last is in the next row
    assert not same(columns(n, least=-1), offsets, [(p, p2)], twins)
    assert not same(columns(n), (p * n + 2 * c, p2 * n + 2 * c2), [(p, p2)], twins)
    assert not same(
        columns(n)[1:], offsets, [(p, p2), (s, y)], twins
    )  # of what is not in the offset nothing is known


def test_digits_of_two_sizes() -> None:
    m, d, d2 = z3.Ints("m d d'")
    twins = [(p, p2), (c, c2), (d, d2)]
    offsets = (p * m + d) * n + c, (p2 * m + d2) * n + c2
    inside = [*columns(n), m >= 1, d >= 0, d2 >= 0, d < m, d2 < m]
    assert same(inside, offsets, [(p, p2)], twins)
    assert not same([*columns(n), m >= 1, d >= 0, d2 >= 0, d <= m, d2 <= m], offsets, [(p, p2)], twins)


@triton.jit
def swizzled(
    y_ptr, M, N, WIDTH: tl.constexpr, ROWS_MASKED: tl.constexpr, TILE: tl.constexpr = 16
):  # tiles of WIDTH rows of tiles, column after column
    tiles_m, tiles_n = tl.cdiv(M, TILE), tl.cdiv(N, TILE)
    group = tl.program_id(0) // (WIDTH * tiles_n)
    inside = tl.program_id(0) % (WIDTH * tiles_n)
    height = tl.minimum(tiles_m - group * WIDTH, WIDTH)
    row = (group * WIDTH + inside % height) * TILE + tl.arange(0, TILE)
    col = inside // height * TILE + tl.arange(0, TILE)
    mask = col[None, :] < N
    if ROWS_MASKED:
        mask = mask & (row[:, None] < M)
    at = row.to(tl.int64)[:, None] * N + col[None, :]
    tl.store(y_ptr + at, tl.full((TILE, TILE), 1.0, tl.float32), mask=mask)


@triton.jit
def overlapping(y_ptr, M, N, STEP: tl.constexpr, TILE: tl.constexpr = 16):
    tiles_n = tl.cdiv(N, TILE)
    row = tl.program_id(0) // tiles_n * STEP + tl.arange(0, TILE)
    col = tl.program_id(0) % tiles_n * TILE + tl.arange(0, TILE)
    mask = (row < M)[:, None] & (col < N)[None, :]
    at = row.to(tl.int64)[:, None] * N + col[None, :]
    tl.store(y_ptr + at, tl.full((TILE, TILE), 1.0, tl.float32), mask=mask)


def races_of(kernel: Any, grid: Any, **constants: Any) -> list[str]:
    sizes = symbol("M", 1, 2**20), symbol("N", 1, 2**20)
    rows, cols = sizes
    contract = Contract(
        arguments={"y_ptr": Buffer("f32", rows * cols), "M": rows, "N": cols},
        grid=(grid(rows, cols), 1, 1),
        sizes=sizes,
        constants={**constants, "TILE": 16},
    )
    return [answer.verdict for answer in prove(kernel, contract, replay=False).of("race")]


def test_swizzled_tiles_do_not_meet() -> None:
    def tiles(rows: Any, cols: Any) -> Any:
        return cdiv(rows, 16) * cdiv(cols, 16)

    assert races_of(swizzled, tiles, WIDTH=8, ROWS_MASKED=True) == ["proven"]


def test_tiles_that_overlap_are_not_proven_apart() -> None:
    def tiles(rows: Any, cols: Any) -> Any:
        return cdiv(rows, 16) * cdiv(cols, 16)

    assert set(races_of(overlapping, tiles, STEP=16)) == {"proven"}
    assert "proven" not in races_of(overlapping, tiles, STEP=15)
    assert "proven" not in races_of(overlapping, lambda rows, cols: 2 * tiles(rows, cols), STEP=0)


# ---- what is left out of a question -----------------------------------------------------------------------


def test_a_quotient_is_asked_about_with_its_definition() -> None:
    scope = Scope()

    def asked(about: Any) -> set[str]:
        return set(map(str, scope.relevant([about])))

    division = scope.divide(x, y)
    further = scope.divide(division.remainder, s)
    first, second = map(str, scope.facts)
    assert asked(x) == set()
    assert asked(division.quotient) == {first}
    assert asked(further.quotient) == {first, second}
