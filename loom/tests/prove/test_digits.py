"""Absence of races proven digit by digit, and wrong kernels for which it is not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import triton
import triton.language as tl
import z3
from triton_loom.prove import Buffer, Contract, cdiv, digits, prove, symbol
from triton_loom.prove.compiling import ttir_of
from triton_loom.prove.lemmas import about_digits, below, natural, ordered, range_of
from triton_loom.prove.linear import Linear
from triton_loom.prove.proving import Prover
from triton_loom.prove.scope import Division, Scope
from triton_loom.prove.solver import QUICK
from triton_loom.prove.sums import is_same, undivided

x, y, s = z3.Ints("x y s")


def same(facts: Any, offsets: Any, programs: Any, twins: Any) -> bool:
    return digits.same(facts, offsets, programs, twins, Linear())


# ---- products as unknowns -------------------------------------------------------------------------------


def test_equal_products_become_one_unknown() -> None:
    assert Linear().follows([], (x + y) * s == s * y + x * s)
    assert Linear().follows([3 * x * y >= 6], y * x >= 2)
    assert Linear().follows([x * x * y <= 4], y * x * x <= 4)
    assert Linear().follows([x * y >= 0], y * x >= 0)  # z3's simplifier would split this into signs


@pytest.mark.parametrize(
    ("facts", "goal"),
    [
        ([], x * y == x * s),
        ([], x * x * y == x * y * y),
        ([x == y], x * s == y * s),  # true, but not if products are opaque
        ([x * y >= 2], x * y >= 3),
        ([x * y / 4 >= 2], x * y >= 9),
        ([z3.Or(x * y > 0, s > 0)], x * y > 0),
        ([x >= 0, y >= 0], x * y >= 0),  # also true, and also unknown here
    ],
)
def test_false_goals_do_not_follow(facts: list[Any], goal: Any) -> None:
    assert not Linear().follows(facts, goal)


def test_only_products_are_replaced() -> None:
    """Substituting the product for its unknown restores the expression."""
    for e in (x * y + 3 * s, (x * y * s + 1) / 8 + x, z3.If(x * y > s, x, y) - 2 * y * y, 5 * x - s):
        products = {str(c): c for c in z3.z3util.get_vars(Linear()(e)) if str(c).startswith("!product!")}
        linear = Linear()(e)
        for values in product((-3, 0, 2, 7), repeat=3):
            numbers = [(c, z3.IntVal(v)) for c, v in zip((x, y, s), values, strict=True)]
            values_of_products = {
                "x * y": values[0] * values[1],
                "x * y * s": values[0] * values[1] * values[2],
                "y * y": values[1] ** 2,
            }
            expected = z3.simplify(z3.substitute(e, *numbers))
            guesses = product(values_of_products.values(), repeat=len(products))
            candidates = (
                z3.simplify(
                    z3.substitute(
                        linear,
                        *numbers,
                        *((c, z3.IntVal(v)) for c, v in zip(products.values(), guess, strict=True)),
                    )
                )
                for guess in guesses
            )
            assert any(expected.eq(candidate) for candidate in candidates)


# ---- lemmas ---------------------------------------------------------------------------------------------


def test_lemmas_are_true_of_integers() -> None:
    a, b, q, r = z3.Ints("a b q r")
    for number, divisor in product(range(-9, 10), range(1, 6)):
        values = [(a, number), (b, divisor), (q, number // divisor), (r, number % divisor)]
        for lemma in range_of(Division(a, b, q, r)):
            assert z3.is_true(z3.simplify(z3.substitute(lemma, *((c, z3.IntVal(v)) for c, v in values))))
    for one, other, factor in product(range(-4, 5), repeat=3):
        for lemma in ordered(z3.IntVal(one), z3.IntVal(other), z3.IntVal(factor)):
            assert z3.is_true(z3.simplify(lemma))


def test_lemmas_about_limits_are_true_of_integers() -> None:
    """A program number is split by the number of parts, then by heads, which are heads * group divided by group."""
    number, rows, heads, parts, group = z3.Ints("number rows heads parts group")
    q1, r1, q2, r2, q3, r3 = z3.Ints("q1 r1 q2 r2 q3 r3")
    divisions = [
        Division(number, parts, q1, r1),
        Division(heads * group, group, q2, r2),
        Division(q1, q2, q3, r3),
    ]
    lemmas = below([(number, rows * heads * parts)], divisions)
    assert len(lemmas) == 3  # one for each division: the heads, and the limits of the other two quotients
    for values in product((-5, 0, 7, 23), (1, 2), (-1, 1, 3), (1, 2), (1, 3)):
        at = dict(zip((number, rows, heads, parts, group), values, strict=True))
        at |= {q1: at[number] // at[parts], r1: at[number] % at[parts]}
        at |= {q2: at[heads], r2: 0}
        at |= {q3: at[q1] // at[q2], r3: at[q1] % at[q2]}
        for lemma in lemmas:
            assert z3.is_true(z3.simplify(z3.substitute(lemma, *((c, z3.IntVal(v)) for c, v in at.items()))))


def test_lemmas_about_products_are_true_of_integers() -> None:
    lemmas = [*about_digits([x % 5 * y, (x % 5) * (y % 2) * s]), *natural([x * y + 3, x * y * s])]
    assert lemmas
    for values in product(range(-6, 7), (-2, 0, 1, 3), (-1, 0, 2)):
        at = [(c, z3.IntVal(v)) for c, v in zip((x, y, s), values, strict=True)]
        assert all(z3.is_true(z3.simplify(z3.substitute(lemma, *at))) for lemma in lemmas)


def test_an_exact_quotient_times_its_divisor_is_the_stride() -> None:
    def shown(known: Any) -> Callable[[Any], bool]:
        return lambda goal: Linear().follows([known], goal)

    assert is_same(undivided(16 * (s / 16) * x + y, shown(s % 16 == 0)), s * x + y)
    assert is_same(undivided(32 * (s / 16) * x, shown(s % 16 == 0)), 2 * s * x)
    for known in (s % 8 == 0, s % 16 == 1, s % 32 >= 0):
        assert not is_same(undivided(16 * (s / 16) * x, shown(known)), s * x)
    assert not is_same(undivided(8 * (s / 16) * x, shown(s % 16 == 0)), s * x)


# ---- digits ---------------------------------------------------------------------------------------------

p, p2, c, c2, n = z3.Ints("p p' c c' n")


def columns(limit: Any, minimum: int = 0) -> list[Any]:
    return [n >= 1, c >= minimum, c2 >= minimum, c < limit, c2 < limit]


def test_equal_offsets_have_equal_rows() -> None:
    twins = [(p, p2), (c, c2)]
    offsets = p * n + c, p2 * n + c2
    assert same(columns(n), offsets, [(p, p2)], twins)
    assert not same(
        columns(n + 1), offsets, [(p, p2)], twins
    )  # the column after the last belongs to the next row
    assert not same(columns(n, minimum=-1), offsets, [(p, p2)], twins)
    assert not same(columns(n), (p * n + 2 * c, p2 * n + 2 * c2), [(p, p2)], twins)
    assert not same(
        columns(n)[1:], offsets, [(p, p2), (s, y)], twins
    )  # nothing is known about constants outside of the offset


def test_offsets_with_two_strides_have_equal_digits() -> None:
    m, d, d2 = z3.Ints("m d d'")
    twins = [(p, p2), (c, c2), (d, d2)]
    offsets = (p * m + d) * n + c, (p2 * m + d2) * n + c2
    inside = [*columns(n), m >= 1, d >= 0, d2 >= 0, d < m, d2 < m]
    assert same(inside, offsets, [(p, p2)], twins)
    assert not same([*columns(n), m >= 1, d >= 0, d2 >= 0, d <= m, d2 <= m], offsets, [(p, p2)], twins)


def test_a_digit_may_be_bounded_by_a_product() -> None:
    """The digit is below m * n, not below m or n."""
    m = z3.Int("m")
    twins = [(p, p2), (c, c2)]
    offsets = p * m * n + c, p2 * m * n + c2
    assert same([*columns(m * n), m >= 1], offsets, [(p, p2)], twins)
    assert not same([*columns(m * n + 1), m >= 1], offsets, [(p, p2)], twins)
    assert not same([*columns(m + n), m >= 1], offsets, [(p, p2)], twins)


@triton.jit
def swizzled(
    y_ptr, M, N, WIDTH: tl.constexpr, ROWS_MASKED: tl.constexpr, TILE: tl.constexpr = 16
):  # groups of WIDTH rows of tiles, column by column
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


def test_swizzled_tiles_do_not_race() -> None:
    def tiles(rows: Any, cols: Any) -> Any:
        return cdiv(rows, 16) * cdiv(cols, 16)

    assert races_of(swizzled, tiles, WIDTH=8, ROWS_MASKED=True) == ["proven"]


def test_overlapping_tiles_are_not_proven_free_of_races() -> None:
    def tiles(rows: Any, cols: Any) -> Any:
        return cdiv(rows, 16) * cdiv(cols, 16)

    assert set(races_of(overlapping, tiles, STEP=16)) == {"proven"}
    assert "proven" not in races_of(overlapping, tiles, STEP=15)
    assert "proven" not in races_of(overlapping, lambda rows, cols: 2 * tiles(rows, cols), STEP=0)


@triton.jit
def strided(y_ptr, M, N: tl.constexpr, LESS: tl.constexpr, TILE: tl.constexpr):
    """Grid-stride loop over rows."""
    lane = tl.arange(0, TILE)
    for row in range(tl.program_id(0), M, tl.num_programs(0) - LESS):
        at = row.to(tl.int64) * N + lane
        tl.store(y_ptr + at, tl.full((TILE,), 1.0, tl.float32), mask=lane < N)


def test_grid_stride_loops_do_not_race() -> None:
    """The program number is a digit of the loop's counter."""
    rows, programs = symbol("M", 1, 2**31 - 1), symbol("programs", 2, 2**20)
    verdicts = {}
    for less in (0, 1):
        report = prove(
            strided,
            grid=(programs,),
            args={"y_ptr": Buffer("f32", rows * 515), "M": rows, "N": 515, "LESS": less, "TILE": 1024},
            replay=False,
        )
        verdicts[less] = {answer.verdict for answer in report.of("race")}
    assert verdicts[0] == {"proven"}
    assert "proven" not in verdicts[1]


@triton.jit
def parted(y_ptr, rows, heads, group, parts, LESS: tl.constexpr, LANES: tl.constexpr = 16):
    """Store parts of heads of rows, on one grid axis, to [parts, rows, heads]."""
    part, row_head = tl.program_id(0) % parts, tl.program_id(0) // parts
    head, row = row_head % (heads // group), row_head // (heads // group)
    lane = tl.arange(0, LANES)
    at = (part * (rows - LESS) + row).to(tl.int64) * heads + head * group + lane
    tl.store(y_ptr + at, tl.full((LANES,), 1.0, tl.float32), mask=lane < group)


@pytest.mark.parametrize(("less", "programs", "right"), [(0, 0, True), (1, 0, False), (0, 1, False)])
def test_a_flattened_grid_is_split_into_its_axes(less: int, programs: int, right: bool) -> None:
    """With too small planes, or a row too many in the grid, the last row of a plane overlaps the next plane."""
    rows, kv, group, parts = sizes = [symbol(name, 2, 2**9) for name in ("rows", "kv", "group", "parts")]
    contract = Contract(
        arguments={
            "y_ptr": Buffer("f32", parts * (rows + 1) * kv * group),
            "rows": rows,
            "heads": kv * group,
            "group": group,
            "parts": parts,
        },
        grid=((rows + programs) * kv * parts, 1, 1),
        sizes=tuple(sizes),
        constants={"LESS": less, "LANES": 16},
    )
    (answer,) = Prover(ttir_of(parted, contract), contract, QUICK).meetings()
    assert (answer.verdict == "proven") == right


# ---- selection of facts for a question --------------------------------------------------------------------


def test_questions_about_a_quotient_include_its_definition() -> None:
    scope = Scope()

    def relevant(expression: Any) -> set[str]:
        return set(map(str, scope.relevant([expression])))

    division = scope.divide(x, y)
    further = scope.divide(division.remainder, s)
    first, second = map(str, scope.facts)
    assert relevant(x) == set()
    assert relevant(division.quotient) == {first}
    assert relevant(further.quotient) == {first, second}


def test_near_facts_mention_only_the_question_s_constants() -> None:
    """Near facts define its quotients or mention only its own constants; they do not link to other constants."""
    scope = Scope()
    one, other = scope.fresh("one"), scope.fresh("other")
    scope.facts += [one >= 3, one + other == 7, other <= 2]
    division = scope.divide(other, y)
    definition = scope.facts[-1]
    assert scope.near([one]) == [scope.facts[0]]
    assert set(map(str, scope.near([division.quotient]))) == {"other!2 <= 2", str(definition)}
    assert len(scope.near([one, division.quotient])) == 4
