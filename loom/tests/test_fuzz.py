"""Random programs, compiled and run by Loom, against an evaluation by NumPy.

`programs` generates and compares programs, `reference` defines the operations. A case is one store of one
program by one instance on data of its own: with GRID instances in each of LAUNCHES launches, a program with n
stores makes n * GRID * LAUNCHES cases. LOOM_FUZZ_CASES sets their number for each change (twice as many more
are marked slow), and LOOM_TEST_SEED chooses others. The programs are in the language of Triton 3.7; 3.9 rejects
some of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from programs import GRID, LAUNCHES, Access, Machine, Memory, Mismatch, Program, Step, Var, programs
from reference import BF16, F16, F32, F64, OPERATIONS, Array, DType, Evaluation, Within, cast, sample
from triton_loom.testing.fixtures import SEED

CASES = max(4000, int(os.environ.get("LOOM_FUZZ_CASES", "0")))
SHARDS = 8
QUOTA = -(-CASES // SHARDS)


def each_program(shard: int, do: Callable[[Program], bool], phases: Sequence[Phase] = [*Phase]) -> None:
    """Call `do` on programs, always the same ones for a shard, until it says that it has enough."""
    enough = False

    @seed(SEED * SHARDS + shard)
    @settings(
        max_examples=QUOTA // 10, phases=phases, database=None, deadline=None, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs())
    def draw(program: Program) -> None:
        nonlocal enough
        enough = enough or do(program)

    draw()


def launches(program: Program, directory: Path) -> list[Memory]:
    kernel = program.kernel(directory)
    return [program.launched(kernel, launch) for launch in range(LAUNCHES)]


@pytest.mark.parametrize(
    "shard",
    [*range(3), *(pytest.param(shard, marks=pytest.mark.slow) for shard in range(3, 3 * SHARDS))],
    ids=lambda shard: f"shard{shard}",
)
def test_programs(shard: int, tmp_path: Path) -> None:
    cases = 0

    def check(program: Program) -> bool:
        nonlocal cases
        for launch, observed in enumerate(launches(program, tmp_path)):
            program.check(launch, observed)
        cases += program.stores * GRID * LAUNCHES
        return cases >= QUOTA

    each_program(shard, check)
    assert cases >= QUOTA


# ---- the test can fail -------------------------------------------------------------------------------------

Results = list[tuple[Program, list[Memory]]]


class Drawn:
    """Programs, usually already compiled for their shards, and the memory that their kernels left."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shards: list[Results] = []

    def __iter__(self) -> Iterator[Results]:
        """Yield programs shard by shard. They depend on the constants of all loaded modules, so an operation may be so
        rare that it takes more shards than there are tests of."""
        for shard in range(4 * SHARDS):
            if shard == len(self.shards):
                self.shards.append(self.collected(shard))
            yield self.shards[shard]

    def collected(self, shard: int) -> Results:
        found: Results = []
        cases = 0

        def collect(program: Program) -> bool:
            nonlocal cases
            found.append((program, launches(program, self.directory)))
            cases += program.stores * GRID * LAUNCHES
            return cases >= QUOTA

        each_program(shard, collect, phases=(Phase.generate,))
        return found

    def notices(self, name: str, evaluate: Evaluation, monkeypatch: pytest.MonkeyPatch) -> bool:
        """Return whether any program fails if the operation is evaluated in this way."""
        for shard in self:
            with monkeypatch.context() as patch:
                patch.setitem(OPERATIONS, name, replace(OPERATIONS[name], evaluate=evaluate))
                if any_fails([each for each in shard if name in each[0].operations]):
                    return True
        return False


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    return Drawn(tmp_path_factory.mktemp("programs"))


def any_fails(results: Results) -> bool:
    """Return whether any of the programs fails."""
    for program, memories in results:
        for launch, observed in enumerate(memories):
            try:
                program.check(launch, observed)
            except Mismatch:
                return True
    return False


def with_wrong_bit(evaluate: Evaluation) -> Evaluation:
    """Return the evaluation with the last bit of its result wrong."""

    def wrong(step: Step, *args: Array) -> Array | Within:
        result = evaluate(step, *args)
        if isinstance(result, Within):
            unit = np.where(np.isfinite(result.high), step.target.ulp(result.high), 0)
            return Within(result.high + unit, result.high + 2 * unit, result.open)
        if step.target.kind == "f":
            return step.target.round(np.where(np.isfinite(result), result + step.target.ulp(result), 0))
        return np.asarray(result ^ np.asarray(1, result.dtype))

    return wrong


def test_damage_to_any_operation_is_noticed(drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any_fails(next(iter(drawn)))
    assert [name for name in RIGHT if not drawn.notices(name, with_wrong_bit(RIGHT[name]), monkeypatch)] == []


# ---- and notices what a compiler might get wrong -----------------------------------------------------------

RIGHT = {name: operation.evaluate for name, operation in OPERATIONS.items()}


def rounded_twice(s: Step, a: Array, b: Array, c: Array) -> Array:
    return s.target.apply(np.add, s.target.apply(np.multiply, a, b), c)


def rounded_down_quotient(s: Step, a: Array, b: Array) -> Array:
    return np.where(b == 0, ~np.zeros_like(b), a // b)


def rounded_down_remainder(s: Step, a: Array, b: Array) -> Array:
    return np.where(b == 0, a, np.mod(a, b))


def rounded_down(s: Step, x: Array) -> Array | Within:
    return RIGHT["cast"](s, np.floor(x) if s.source.kind == "f" and s.target.kind in "iu" else x)


def truncated(s: Step, x: Array) -> Array | Within:
    result = np.asarray(RIGHT["cast"](s, x))
    if s.source.kind != "f" or s.target not in (F16, F32):
        return result
    return np.where(np.abs(result) > np.abs(x), np.nextafter(result, np.zeros_like(result)), result)


def shift_filled_with_zeros(s: Step, a: Array, b: Array) -> Array:
    last = b.dtype.type(s.source.bits - 1)
    return np.asarray(a.view(s.source.word) >> (b & last).view(s.source.word)).view(a.dtype)


def without_last_term(s: Step, x: Array) -> Array | Within:
    x = x.copy()
    np.moveaxis(x, -1 if s.axis is None else s.axis, 0)[-1] = 0
    return RIGHT["sum"](s, x)


def last_of_equals(s: Step, x: Array) -> Array:
    before = np.argmax(np.flip(x, s.axis), s.axis, keepdims=s.params["keep"])
    return np.asarray(x.shape[s.axis] - 1 - before, np.int32)


# Rarer ones (which of two zeros is the minimum, quotients of 16-bit floats) are in test_elementwise.py.
MISTAKES: dict[str, tuple[str, Evaluation]] = {
    "addition subtracts": ("add", RIGHT["sub"]),
    "quotients are rounded down": ("quotient", rounded_down_quotient),
    "remainders have the divisor's sign": ("remainder", rounded_down_remainder),
    "shift distances wrap around": ("shl", RIGHT["shl_some"]),
    "right shifts are unsigned": ("shr_some", shift_filled_with_zeros),
    "maximum spreads NaN": ("maximum", lambda s, a, b: s.target.apply(np.maximum, a, b)),
    "maximum drops NaN though told not to": ("most", lambda s, a, b: s.target.apply(np.fmax, a, b)),
    "fma rounds twice": ("fma", rounded_twice),
    "conversion to integers rounds down": ("cast", rounded_down),
    "conversion to narrower floats truncates": ("cast", truncated),
    "less means less or equal": (
        "compare", lambda s, a, b: a <= b if s.params["sign"] == "<" else RIGHT["compare"](s, a, b)
    ),
    "exp is off by two ulps": ("exp", lambda s, x: with_wrong_bit(RIGHT["exp"])(s, x)),
    "sums leave out the last term": ("sum", without_last_term),
    "scans run forward only": (
        "cumsum", lambda s, x: RIGHT["cumsum"](replace(s, params={**s.params, "reverse": False}), x)
    ),
    "argmax takes the last of equals": ("argmax", last_of_equals),
    "gather wraps early": ("gather", lambda s, x, i: RIGHT["gather"](s, x, i & s.params["last"] // 2)),
}  # fmt: skip


@pytest.mark.slow  # the rarest of them take many programs
def test_mistakes_are_noticed(drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [
        description for description, mistake in MISTAKES.items() if not drawn.notices(*mistake, monkeypatch)
    ] == []


def test_accesses_are_checked(drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    def everything(machine: Machine, access: Access) -> Array:
        return np.ones(access.shape, bool)

    def in_row_major_order(machine: Machine, access: Access) -> Array:
        contiguous = tuple(int(np.prod(access.shape[dim + 1 :])) for dim in range(len(access.shape)))
        return addresses(machine, replace(access, strides=contiguous))

    addresses = Machine.addresses
    with monkeypatch.context() as patch:
        patch.setattr(Machine, "touched", everything)
        assert any(any_fails(shard) for shard in drawn)
    with monkeypatch.context() as patch:
        patch.setattr(Machine, "addresses", in_row_major_order)
        assert any(any_fails(shard) for shard in drawn)


# ---- the reference itself ----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [F16, BF16, F32], ids=repr)
@pytest.mark.parametrize("source", [F64, F32], ids=repr)
def test_rounding(source: DType, target: DType) -> None:
    """Rounding agrees with PyTorch's, which takes two steps from f64 to 16 bits; so f64 has f32's precision here."""
    x = sample(source, 20000, np.random.default_rng(SEED))
    if source is F64 and target is not F32:
        x = x.astype(np.float32).astype(np.float64)
    with np.errstate(all="ignore"):
        ours = target.encode(cast(x, source, target))
    theirs = (
        torch.from_numpy(x).to(target.torch).view(torch.uint32 if target is F32 else torch.uint16).numpy()
    )
    np.testing.assert_array_equal(ours[~np.isnan(x)], theirs[~np.isnan(x)])


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=repr)
def test_fma(dtype: DType) -> None:
    """The result is within half an ulp of the exact one, computed with rationals."""
    a, b, c = (sample(dtype, 3000, np.random.default_rng([SEED, i])) for i in range(3))
    var = Var("", (), dtype)
    with np.errstate(all="ignore"):
        c[::3] = dtype.round((a * b)[::3] * 2.0**-12)  # little next to a product
        result = np.asarray(RIGHT["fma"](Step("fma", (var,), (var,)), a, b, c))
        unit = dtype.ulp(result).astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c) & np.isfinite(result)
    assert finite.sum() > 1000
    for x, y, z, r, ulp in zip(*(v[finite].tolist() for v in (a, b, c, result, unit)), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        assert abs(Fraction(r) - exact) <= Fraction(ulp) / 2, (x, y, z, r)
