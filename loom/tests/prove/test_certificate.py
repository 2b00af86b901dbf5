"""Bugs in the prover are caught by the launches that follow its proofs, or by its facts at random sizes."""

from __future__ import annotations

import inspect
import textwrap
import time
from collections.abc import Callable
from typing import Any

import pytest
import triton
import triton.language as tl
import z3
from prove import test_unsound as wrong
from prove.test_sound import scatter
from triton_loom.prove import (
    Buffer,
    Contract,
    Report,
    UnsoundProof,
    cdiv,
    certificate,
    compiling,
    coverage,
    obligations,
    prove,
    symbol,
)
from triton_loom.prove.evaluate import Evaluator
from triton_loom.prove.linear import Linear
from triton_loom.prove.obligations import Access
from triton_loom.prove.proving import Prover
from triton_loom.prove.scope import Scope
from triton_loom.prove.solver import solve

n, m = symbol("n", 1, 1000), symbol("m", 1, 1000)
Mistake = Callable[[pytest.MonkeyPatch], None]


def unguarded(reason: str) -> Mistake:
    """Make facts hold everywhere, even where the path that implies them is not taken."""
    know = Scope.know

    def always(self: Scope, *facts: Any, because: str, when: Any = ()) -> None:
        know(self, *facts, because=because, when=() if because == reason else when)

    return lambda patch: patch.setattr(Scope, "know", always)


def by_printed_names(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compiling, "renamed", lambda ttir, names: ttir)


def with_forgeable_names(patch: pytest.MonkeyPatch) -> None:
    def unknown(self: Linear, factors: Any) -> Any:
        self._alive += factors
        key = tuple(sorted(factor.get_id() for factor in factors))
        return self._products.setdefault(key, z3.Int(f"product!{1 + len(self._products)}"))

    patch.setattr(Linear, "_unknown", unknown)


def without_annotations(patch: pytest.MonkeyPatch) -> None:
    signature = compiling._signature

    def plain(*launch: Any) -> Any:
        types, *more = signature(*launch)
        return {name: kind.replace("u", "i") for name, kind in types.items()}, *more

    patch.setattr(compiling, "_signature", plain)


def linear_by_two_points(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(obligations, "is_same", lambda one, other: True)


def memory_as_it_was(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Evaluator, "constant", lambda self, argument: True)


def with_signs(patch: pytest.MonkeyPatch) -> None:
    text = textwrap.dedent(inspect.getsource(Evaluator._loaded_integer))
    for old, new in (
        ("is_unsigned = element != I1 and", "is_unsigned = False and"),
        ('is_unsigned == buffer.element.startswith("u")', "True"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    scope: dict[str, Any] = {}
    exec(text, Evaluator._loaded_integer.__globals__, scope)
    patch.setattr(Evaluator, "_loaded_integer", scope["_loaded_integer"])


def by_failing_swaps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Access, "replaces", property(lambda self: self.writes))


def with_narrow_atomics(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Access, "orders_programs", Access.atomic)


def without_descriptors(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(obligations, "_descriptors", lambda evaluator, op: ())


def without_contracts(patch: pytest.MonkeyPatch) -> None:
    promises = obligations._promises
    patch.setattr(obligations, "_promises", lambda *of: (o for o in promises(*of) if o.kind != "contract"))


def swapped() -> Report:
    a, b = symbol("n", 1, 64), symbol("m", 1, 64)
    return prove(wrong.swapped, grid=(1,), args={"x_ptr": Buffer("f32", a), "n": a, "m": b, "BLOCK": 64})


def named_product() -> Report:
    args = {"i_ptr": Buffer("i32", 1, values=wrong.below(m)), "x_ptr": Buffer("f32", m), "n": n}
    return prove(wrong.named_product, grid=(100,), args=args)


def not_linear() -> Report:
    rows, cols, stride = symbol("rows", 1, 1000), symbol("cols", 1, 64), symbol("stride", 1, 1000)
    x = Buffer.strided("f32", (rows, cols), (stride, 1))
    args = {"x_ptr": x, "stride": stride, "cols": cols, "BLOCK": 64}
    return prove(wrong.not_linear, grid=(rows,), args=args, assumptions=(stride >= cols,))


def unsigned_size() -> Report:
    return prove(
        wrong.unsigned_size, grid=(cdiv(n, 64),), args={"x_ptr": Buffer("f32", n), "n": n, "BLOCK": 64}
    )


def stored_index() -> Report:
    args = {"i_ptr": Buffer("i32", n, values=wrong.below(n)), "x_ptr": Buffer("f32", n), "n": n}
    return prove(wrong.stored_index, grid=(n,), args=args)


def counts_down() -> Report:
    args = {"x_ptr": Buffer("f32", n + 1), "n": n, "step": symbol("step", -8, 8)}
    return prove(wrong.counts_down, grid=(1,), args=args)


def maximum_of_one_branch() -> Report:
    size = symbol("n", 1, 2**20)
    args = {"x_ptr": Buffer("f32", size), "n": size, "BLOCK": 64}
    return prove(
        wrong.maximum_of_one_branch, grid=(1,), args=args, assumptions=(z3.Or(size < 1000, size > 4096),)
    )


def either_bits() -> Report:
    a, b = symbol("n", 1, 2**20), symbol("m", 1, 2**20)
    return prove(wrong.either_bits, grid=(1,), args={"x_ptr": Buffer("f32", 1), "n": a, "m": b})


def counted_bytes() -> Report:
    values = Buffer("u8", n, values=wrong.below(200))
    args = {"t_ptr": Buffer("i32", 128), "i_ptr": values, "n": n, "BLOCK": 64}
    return prove(wrong.counted_bytes, grid=(cdiv(n, 64),), args=args)


def swaps_if_five() -> Report:
    args = {"x_ptr": Buffer("i32", n), "n": n}
    return prove(wrong.swaps_if_five, grid=(n,), args=args, outputs=("x_ptr",))


def adds_in_scope() -> Report:
    args = {"x_ptr": Buffer("f32", n), "n": n, "BLOCK": 64, "SCOPE": "cta"}
    return prove(wrong.adds_in_scope, grid=(m,), args=args)


def described_by_any_stride() -> Report:
    args = {"x_ptr": Buffer("f32", n * m), "y_ptr": Buffer("f32", n * m), "m": m, "n": n, "BLOCK": 16}
    return prove(wrong.described, grid=(cdiv(m, 16), cdiv(n, 16)), args=args)


def by_stride() -> Report:
    stride = symbol("stride", -8, 8)
    x = Buffer.strided("f32", (n,), (stride,))
    args = {"x_ptr": x, "y_ptr": Buffer("f32", n), "n": n, "stride": stride, "BLOCK": 64}
    return prove(wrong.by_stride, grid=(cdiv(n, 64),), args=args)


MISTAKES: list[tuple[Mistake, Callable[[], Report]]] = [
    (by_printed_names, swapped),
    (with_forgeable_names, named_product),
    (linear_by_two_points, not_linear),
    (without_annotations, unsigned_size),
    (memory_as_it_was, stored_index),
    (unguarded("the number of iterations"), counts_down),
    (unguarded("the element that a reduction chooses"), maximum_of_one_branch),
    (unguarded("the bits of one operand"), either_bits),
    (with_signs, counted_bytes),
    (by_failing_swaps, swaps_if_five),
    (with_narrow_atomics, adds_in_scope),
    (without_descriptors, described_by_any_stride),
    (without_contracts, by_stride),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "report_of"), MISTAKES, ids=[report_of.__name__ for _, report_of in MISTAKES]
)
def test_a_mistake_in_the_prover_is_caught(
    mistake: Mistake, report_of: Callable[[], Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert report_of().verdict != "proven"
    mistake(monkeypatch)
    with pytest.raises(UnsoundProof, match="the prover is wrong, please report it"):
        report_of()


@triton.jit
def copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + off, tl.load(x_ptr + off, mask=off < n), mask=off < n)


def test_proofs_are_confirmed_by_launches() -> None:
    args = {"x_ptr": Buffer("f32", n), "y_ptr": Buffer("f32", n), "n": n, "BLOCK": 64}
    report = prove(copy, grid=(cdiv(n, 64),), args=args)
    assert report.verdict == "proven"
    assert report.certificates == ("20 random launches agree",)
    assert prove(copy, grid=(cdiv(n, 64),), args=args, trials=0).certificates == (
        "not launched: not asked for",
    )


def test_a_disagreeing_launch_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every access is declared in bounds by the patched prover."""
    monkeypatch.setattr(Prover, "nearly", lambda self, assuming, goal: True)
    args = {"x_ptr": Buffer("f32", n), "y_ptr": Buffer("f32", n - 1), "n": n, "BLOCK": 64}
    with pytest.raises(UnsoundProof, match=r"a launch refutes for n = .*out-of-bounds store"):
        prove(copy, grid=(cdiv(n, 64),), args=args)


@triton.jit
def described(x_ptr, y_ptr, m, n, BLOCK: tl.constexpr):
    tile = tl.make_tensor_descriptor(x_ptr, [m, n], [n, 1], [BLOCK, BLOCK])
    tl.store(y_ptr + tl.program_id(0), tl.sum(tile.load([tl.program_id(0) * BLOCK, 0])))


def test_proofs_of_ttir_with_descriptors_are_launched() -> None:
    m = symbol("m", 1, 2**14)
    rows = cdiv(m, 16)
    arguments = {"x_ptr": Buffer("f32", m * 32), "y_ptr": Buffer("f32", rows), "m": m, "n": 32}
    contract = Contract.of(grid=(rows,), arguments=arguments, constants={"BLOCK": 16})
    (compiled,) = compiling.variants(described, contract)
    report = prove(compiled.with_descriptors, compiled.contract)
    assert report.of("descriptor")
    assert report.verdict == "proven"
    assert report.certificates == ("20 random launches agree",)


@triton.jit
def counts_before_it_stores(x_ptr, n, m):
    last, turns = m, 0
    while turns < last:  # both grow, so the loop ends when `last` wraps
        last += 1
        turns += 1
    tl.store(x_ptr + tl.program_id(0), turns)


def test_integers_of_while_loops_must_fit_to_be_proven() -> None:
    """The sanitizer sees the last sum wrap.

    Integers must not count as proven to fit because no obligation covers them.
    """
    m = symbol("m", 1, 8)
    report = prove(counts_before_it_stores, grid=(n,), args={"x_ptr": Buffer("f32", n), "n": n, "m": m})
    assert [answer.verdict for answer in report.of("bounds")] == ["proven"]
    assert "unknown" in {answer.verdict for answer in report.of("overflow")}
    assert report.verdict == "unknown"


@triton.jit
def waits_for_a_flag(flag_ptr, x_ptr, n):
    while tl.atomic_add(flag_ptr, 0) != 123456789:
        pass
    tl.store(x_ptr + tl.program_id(0), 1.0)


def test_a_launch_that_never_ends_is_no_certificate() -> None:
    args = {"flag_ptr": Buffer("i32", 1), "x_ptr": Buffer("f32", n), "n": n}
    start = time.monotonic()
    report = prove(waits_for_a_flag, grid=(n,), args=args)
    assert report.verdict == "proven", report
    assert report.certificates[0].startswith("not launched: it ended early: ")
    assert time.monotonic() - start < 60


@triton.jit
def writes_the_first_half(x_ptr, n, BLOCK: tl.constexpr):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + off, 1, mask=off < n // 2)


@pytest.mark.parametrize("element", ["f32", "i8"])
def test_outputs_proven_complete_are_compared(element: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage._Search, "proven", lambda self: True)
    args = {"x_ptr": Buffer(element, n), "n": n, "BLOCK": 64}
    with pytest.raises(UnsoundProof, match="elements of x_ptr are not written"):
        prove(writes_the_first_half, grid=(cdiv(n, 64),), args=args, outputs=("x_ptr",))


def test_a_kernel_may_write_the_fill_value() -> None:
    """Some launches fill their outputs with the byte that the kernel writes."""
    args = {"x_ptr": Buffer("i8", n), "y_ptr": Buffer("i8", n), "n": n, "BLOCK": 64}
    report = prove(copy, grid=(cdiv(n, 64),), args=args, outputs=("y_ptr",), trials=200)
    assert report.verdict == "proven", report


@triton.jit
def below_a_difference(x_ptr, n, k, BLOCK: tl.constexpr):
    off = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.uint32)
    tl.store(x_ptr + off, 1.0, mask=off < (n - k).to(tl.uint32))


def test_sizes_outside_of_the_contract_are_no_contradiction(monkeypatch: pytest.MonkeyPatch) -> None:
    """z3 gave `cols = 128, group = 1` as a solution of `(group * (cols / (64 * group))) % 16 == 0`."""
    monkeypatch.setattr(certificate, "_corners", lambda contract, launches: [solve([n == 17])])
    args = {"x_ptr": Buffer("i8", n), "y_ptr": Buffer("i8", n), "n": n, "BLOCK": 64}
    assert prove(copy, grid=(cdiv(n, 64),), args=args, assumptions=(n % 16 == 0,)).verdict == "proven"


@triton.jit
def stores_at_an_index(x_ptr, i_ptr):
    tl.store(x_ptr + (tl.load(i_ptr) & 127), 1.0)


def test_sizes_that_leave_no_value_are_no_contradiction() -> None:
    """No launch has n = 0: its only index would have to be at least 0 and below 0. Random kernels found it."""
    size = symbol("n", 0, 100)
    index = Buffer("i32", 1, values=lambda v: z3.And(v >= 0, v < size))
    report = prove(
        stores_at_an_index, grid=(1,), args={"x_ptr": Buffer("f32", 128), "i_ptr": index}, sizes=(size,)
    )
    assert report.verdict == "proven", report


def test_sizes_that_triton_does_not_compile_are_named() -> None:
    """Triton makes constants of n and k if both are 1, and their difference is a Python integer."""
    k = symbol("k", 1, 3)
    args = {"x_ptr": Buffer("f32", n), "n": n, "k": k, "BLOCK": 64}
    report = prove(below_a_difference, grid=(cdiv(n, 64),), args=args, assumptions=(k <= n,))
    assert report.verdict == "proven", report
    assert "random launches agree; Triton does not compile it for n = 1, k = 1: " in report.certificates[0]
    assert "has no attribute 'to'" in report.certificates[0]


@triton.jit
def shifts(x_ptr, n):
    tl.store(x_ptr + ((n << 40) & 1), 1.0)


def test_an_overflow_without_an_obligation_is_no_disagreement() -> None:
    """Shifts by more bits than the type has may give anything, so the bounds are unknown."""
    report = prove(shifts, grid=(1,), args={"x_ptr": Buffer("f32", n), "n": n})
    assert report.verdict == "unknown", report


@pytest.mark.parametrize("room", [0, 1])
def test_distinct_integers_are_drawn_as_the_contract_requires(room: int) -> None:
    """Draw rows from -1 on, all distinct except possibly -1; n of them only fit if -1 may repeat."""
    rows = symbol("rows", 1, 1000)
    index = Buffer(
        "i32",
        n,
        values=lambda v: z3.And(v >= -1, v < rows),
        distinct=(lambda v, i: v != -1) if room else True,
    )
    arguments = {"x_ptr": Buffer("f32", n), "index_ptr": index, "y_ptr": Buffer("f32", rows), "n": n}
    report = prove(scatter, Contract.of(grid=(cdiv(n, 64),), arguments=arguments))
    assert report.verdict == "proven", report
    agree = int(report.certificates[0].split()[0])
    assert agree == 20 if room else 1 <= agree < 20
