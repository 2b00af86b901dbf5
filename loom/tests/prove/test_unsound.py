"""Kernels that are wrong at some sizes of their contract, each in a way that a prover may overlook, are not proven.

Each was once called proven. The sanitizer confirms that they are wrong.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
import z3
from triton_loom.prove import Buffer, Contract, ContractError, Report, cdiv, prove, symbol
from triton_loom.prove.compiling import renamed, variants


def below(limit: Any, minimum: int = 0) -> Any:
    return lambda v: z3.And(v >= minimum, v < limit)


def refuted(report: Report, kind: Any = "bounds") -> bool:
    return "counterexample" in [answer.verdict for answer in report.of(kind)]


@triton.jit
def swapped(x_ptr, n, m, BLOCK: tl.constexpr):
    t = n
    n = m
    m = t
    if tl.program_id(0) > 5:
        n = 1
        m = 1
    off = tl.arange(0, BLOCK)
    tl.store(x_ptr + off, 1.0, mask=off < n)


def test_arguments_are_bound_by_position() -> None:
    """TTIR prints an argument under the Python variable that last held it."""
    n, m = symbol("n", 1, 64), symbol("m", 1, 64)
    report = prove(
        swapped, grid=(1,), args={"x_ptr": Buffer("f32", n), "n": n, "m": m, "BLOCK": 64}, replay=False
    )
    assert refuted(report), report


def test_argument_names_take_precedence_over_other_values() -> None:
    text = "tt.func public @k(%b: i32, %a: i32) {\n %n = arith.addi %a, %b : i32\n}"
    assert renamed(text, ["n", "m"]) == (
        "tt.func public @k(%n: i32, %m: i32) {\n %n$other = arith.addi %m, %n : i32\n}"
    )
    with pytest.raises(ContractError, match="2 arguments in TTIR, and 1 names"):
        renamed(text, ["n"])


@triton.jit
def named_product(i_ptr, x_ptr, n):
    pid = tl.program_id(0)
    product = tl.load(i_ptr)
    tl.store(x_ptr + product, 1.0, mask=pid * n > product)


def test_kernels_cannot_forge_the_prover_s_names() -> None:
    n, m = symbol("n", 1, 1000), symbol("m", 1, 1000)
    args = {"i_ptr": Buffer("i32", 1, values=below(m)), "x_ptr": Buffer("f32", m), "n": n}
    assert refuted(prove(named_product, grid=(100,), args=args, replay=False), "race")
    with pytest.raises(ContractError, match="marks the prover's own"):
        symbol("program!x")


@triton.jit
def not_linear(x_ptr, stride, cols, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(x_ptr + row * stride + col + tl.where(stride > 128, 4096, 0), 1.0, mask=col < cols)


def test_an_offset_nonlinear_in_the_stride_is_refuted() -> None:
    rows, cols, stride = symbol("rows", 1, 1000), symbol("cols", 1, 64), symbol("stride", 1, 1000)
    args = {
        "x_ptr": Buffer.strided("f32", (rows, cols), (stride, 1)),
        "stride": stride,
        "cols": cols,
        "BLOCK": 64,
    }
    assert refuted(prove(not_linear, grid=(rows,), args=args, assumptions=(stride >= cols,), replay=False))


@triton.jit
def unsigned_size(x_ptr, n: tl.uint32, BLOCK: tl.constexpr):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + off, 1.0, mask=off < n - 5)


@triton.jit
def narrow_size(x_ptr, n: tl.int8, BLOCK: tl.constexpr):
    off = tl.arange(0, BLOCK)
    tl.store(x_ptr + off, 1.0, mask=off < n)


def test_annotations_are_the_types_of_arguments() -> None:
    n = symbol("n", 1, 1000)
    args = {"x_ptr": Buffer("f32", n), "n": n, "BLOCK": 64}
    assert refuted(prove(unsigned_size, grid=(cdiv(n, 64),), args=args, replay=False))
    with pytest.raises(ContractError, match="n is annotated as i8, which holds -128 to 127"):
        prove(narrow_size, grid=(1,), args=args)
    few = symbol("n", 1, 64)
    assert (
        prove(narrow_size, grid=(1,), args={"x_ptr": Buffer("f32", few), "n": few, "BLOCK": 64}).verdict
        == "proven"
    )


def test_unsigned_arguments_are_passed_as_their_bits() -> None:
    n = symbol("n", 0, 2**32 - 1)
    contract = Contract.of(grid=(1,), arguments={"x_ptr": Buffer("f32", n), "n": n}, constants={"BLOCK": 64})
    ((_, case, *_),) = variants(unsigned_size, contract)
    passed = case.arguments["n"]
    for argument, wanted in ((0, 0), (2**31 - 1, 2**31 - 1), (2**31, -(2**31)), (2**32 - 1, -1)):
        assert z3.simplify(z3.substitute(passed, (n, z3.IntVal(argument)))).as_long() == wanted


@triton.jit
def stored_index(i_ptr, x_ptr, n):
    pid = tl.program_id(0)
    tl.store(i_ptr + pid, n + 1000)
    at = tl.load(i_ptr + pid)
    tl.store(x_ptr + at, 1.0, mask=pid == 0)


def test_contracts_do_not_describe_memory_that_the_kernel_writes() -> None:
    n = symbol("n", 1, 2**20)
    args = {"i_ptr": Buffer("i32", n, values=below(n)), "x_ptr": Buffer("f32", n), "n": n}
    report = prove(stored_index, grid=(n,), args=args)
    assert refuted(report), report  # the sanitizer confirms what depends on memory
    assert not report.assumed


@triton.jit
def counted_bytes(t_ptr, i_ptr, n, BLOCK: tl.constexpr):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.load(i_ptr + off, mask=off < n, other=0).to(tl.int32)
    tl.atomic_add(t_ptr + i, 1, mask=off < n)


@pytest.mark.parametrize(
    ("bins", "verdict"), [(128, "counterexample"), (199, "counterexample"), (200, "proven")]
)
def test_elements_of_unsigned_tensors_are_unsigned(bins: int, verdict: str) -> None:
    n = symbol("n", 1, 2**20)
    args = {"t_ptr": Buffer("i32", bins), "i_ptr": Buffer("u8", n, values=below(200)), "n": n, "BLOCK": 64}
    assert prove(counted_bytes, grid=(cdiv(n, 64),), args=args, replay=False).verdict == verdict


@triton.jit
def counts_down(x_ptr, n, step):
    s = n + 5
    if step > 0:
        s = 0
        for _ in range(0, n, step):
            s += 1
    tl.store(x_ptr + s, 1.0)


def test_a_fact_of_a_loop_holds_only_where_the_loop_runs() -> None:
    n, step = symbol("n", 1, 1000), symbol("step", -8, 8)
    args = {"x_ptr": Buffer("f32", n + 1), "n": n, "step": step}
    assert refuted(prove(counts_down, grid=(1,), args=args, replay=False))


@triton.jit
def maximum_of_one_branch(x_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    if n < 1000:  # noqa: SIM108 - a branch
        s = tl.max((tl.arange(0, BLOCK) + 2**20) * n, 0) // 2**21
    else:
        s = n + pid
    tl.store(x_ptr + s, 1.0)


def test_a_fact_of_one_branch_does_not_hold_in_the_other() -> None:
    n = symbol("n", 1, 2**20)
    args = {"x_ptr": Buffer("f32", n), "n": n, "BLOCK": 64}
    report = prove(maximum_of_one_branch, grid=(1,), args=args, assumptions=(z3.Or(n < 1000, n > 4096),))
    assert refuted(report), report


@triton.jit
def carried_beyond_its_type(x_ptr, i_ptr, n):
    start = tl.load(i_ptr) + 1
    last = start
    for _ in range(n):
        last = tl.maximum(last, tl.load(i_ptr))
    tl.store(x_ptr + last * 0, 1.0, mask=start > 0)


def test_a_loop_s_initial_value_must_fit_its_type() -> None:
    """A result that fits its type does not imply an initial value that fits."""
    n = symbol("n", 0, 10)
    args = {"x_ptr": Buffer("f32", 1), "i_ptr": Buffer("i32", 1), "n": n}
    assert refuted(prove(carried_beyond_its_type, grid=(1,), args=args, replay=False), "overflow")


@triton.jit
def either_bits(x_ptr, n, m):
    bits = (n * m) | 1
    tl.store(x_ptr + bits * 0, 1.0, mask=bits > 0)


def test_bits_of_an_overflowing_product_are_refuted() -> None:
    n, m = symbol("n", 1, 2**20), symbol("m", 1, 2**20)
    args = {"x_ptr": Buffer("f32", 1), "n": n, "m": m}
    assert refuted(prove(either_bits, grid=(1,), args=args, replay=False), "overflow")


@triton.jit
def by_stride(x_ptr, y_ptr, n, stride, BLOCK: tl.constexpr):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + off, tl.load(x_ptr + off * stride, mask=off < n), mask=off < n)


def test_negative_strides_and_extents_are_reported() -> None:
    n, stride = symbol("n", 1, 2**20), symbol("stride", -8, 8)
    args = {"y_ptr": Buffer("f32", n), "n": n, "stride": stride, "BLOCK": 64}
    strided = prove(
        by_stride,
        grid=(cdiv(n, 64),),
        args={"x_ptr": Buffer.strided("f32", (n,), (stride,)), **args},
        replay=False,
    )
    assert refuted(strided, "contract"), strided
    assert "which no tensor has" in str(strided)


def test_arguments_that_exceed_their_type_are_reported() -> None:
    n = symbol("n", 1, 2**40)
    text = """module {
 tt.func public @kernel(%x_ptr: !tt.ptr<f32>, %n: i32) {
  %c = arith.constant 0 : i32
  %m = arith.cmpi sgt, %n, %c : i32
  %p = tt.addptr %x_ptr, %c : !tt.ptr<f32>, i32
  %v = tt.load %p, %m : !tt.ptr<f32>
  tt.return
 }
}"""
    report = prove(text, Contract.of(grid=(1,), arguments={"x_ptr": Buffer("f32", n), "n": n}))
    assert refuted(report, "contract"), report
    assert "2147483648, which an i32 can't hold" in str(report)


@triton.jit
def swaps_if_five(x_ptr, n):
    tl.atomic_cas(x_ptr + tl.program_id(0), 5, 7)


@triton.jit
def exchanges(x_ptr, n):
    tl.atomic_xchg(x_ptr + tl.program_id(0), 7)


@triton.jit
def adds(x_ptr, n):
    tl.atomic_add(x_ptr + tl.program_id(0), 7)


@pytest.mark.parametrize(
    ("kernel", "verdict"), [(swaps_if_five, "unknown"), (adds, "unknown"), (exchanges, "proven")]
)
def test_only_unconditional_replacement_covers_an_output(kernel: Any, verdict: str) -> None:
    """A failing swap writes nothing, and a sum depends on the old value."""
    n = symbol("n", 1, 100)
    report = prove(
        kernel, grid=(n,), args={"x_ptr": Buffer("i32", n), "n": n}, outputs=("x_ptr",), replay=False
    )
    assert [answer.verdict for answer in report.of("covered")] == [verdict]


@triton.jit
def repeated(y_ptr, n, BLOCK: tl.constexpr):
    off = tl.arange(0, BLOCK)
    i = 0
    while i < n:
        tl.store(y_ptr + off, i)
        i += 1


def test_a_store_repeated_by_a_while_loop_is_not_proven_once() -> None:
    n = symbol("n", 2, 100)
    args = {"y_ptr": Buffer("i32", 64), "n": n, "BLOCK": 64}
    report = prove(repeated, grid=(1,), args=args, outputs=("y_ptr",), replay=False)
    assert [answer.verdict for answer in report.of("once")] == ["unknown"]


@triton.jit
def adds_in_scope(x_ptr, n, BLOCK: tl.constexpr, SCOPE: tl.constexpr):
    off = tl.arange(0, BLOCK)
    tl.atomic_add(x_ptr + off, 1.0, mask=off < n, scope=SCOPE)


@pytest.mark.parametrize(
    ("scope", "verdict"), [("cta", "counterexample"), ("gpu", "proven"), ("sys", "proven")]
)
def test_atomics_of_cta_scope_race_between_programs(scope: str, verdict: str) -> None:
    n, programs = symbol("n", 1, 64), symbol("programs", 1, 100)
    args = {"x_ptr": Buffer("f32", n), "n": n, "BLOCK": 64, "SCOPE": scope}
    report = prove(adds_in_scope, grid=(programs,), args=args, replay=False)
    assert report.verdict == verdict, report


@triton.jit
def described(x_ptr, y_ptr, m, n, BLOCK: tl.constexpr):
    tile = tl.make_tensor_descriptor(x_ptr, [m, n], [n, 1], [BLOCK, BLOCK])
    total = tl.sum(tile.load([tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK]))
    tl.store(y_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), total)


@pytest.mark.parametrize("aligned", [True, False])
def test_descriptors_made_by_kernels_are_checked(aligned: bool) -> None:
    m, n = symbol("m", 1, 2**14), symbol("n", 1, 2**14)
    grid = (cdiv(m, 16), cdiv(n, 16))
    args = {
        "x_ptr": Buffer("f32", m * n),
        "y_ptr": Buffer("f32", grid[0] * grid[1]),
        "m": m,
        "n": n,
        "BLOCK": 16,
    }
    report = prove(described, grid=grid, args=args, assumptions=(n % 4 == 0,) if aligned else ())
    assert refuted(report, "descriptor") is not aligned, report
    assert len(report.of("descriptor")) == 2


# ---- launches as users write them -----------------------------------------------------------------------------------


@triton.jit
def copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + off, tl.load(x_ptr + off, mask=off < n), mask=off < n)


tuned = triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])(copy)
chosen = triton.heuristics({"BLOCK": lambda args: 64})(copy)
by_size = triton.heuristics({"BLOCK": lambda args: args["n"]})(copy)
size = symbol("n")
tensors = {"x_ptr": Buffer(torch.float32, size), "y_ptr": Buffer("f32", size), "n": size}


@pytest.mark.parametrize(
    ("kernel", "grid", "more"),
    [
        (tuned, lambda meta: (cdiv(size, meta["BLOCK"]),), {}),
        (tuned, (cdiv(size, 64),), {"BLOCK": 64}),
        (chosen, (triton.cdiv(size, 64),), {}),
        (copy, ((size + 63) // 64,), {"BLOCK": 64}),
        (copy, (-(-size // 64),), {"BLOCK": 64}),
    ],
)
def test_common_ways_to_write_a_launch_are_accepted(kernel: Any, grid: Any, more: dict[str, Any]) -> None:
    assert prove(kernel, grid=grid, args={**tensors, **more}, replay=False).verdict == "proven"


def test_every_configuration_of_an_autotuner_is_proven() -> None:
    report = prove(tuned, grid=(cdiv(size, 64),), args=tensors, outputs=("y_ptr",), replay=False)
    assert len(report.of("covered")) == 2
    too_few = prove(tuned, grid=(cdiv(size, 128),), args=tensors, outputs=("y_ptr",), replay=False)
    assert [answer.verdict for answer in too_few.of("covered")] == ["counterexample", "proven"]


@pytest.mark.parametrize(
    ("kernel", "args", "message"),
    [
        (
            copy,
            {"x_ptr": tensors["x_ptr"], "n": size, "BLOCK": 64},
            "has a parameter y_ptr, which the contract does",
        ),
        (copy, {**tensors, "BLOCK": 64, "nn": size}, "has no parameter nn"),
        (copy, {**tensors, "BLOCK": symbol("B", 1, 64)}, "BLOCK is a tl.constexpr of copy: give a number"),
        (tuned, {**tensors, "BLOCK": 32}, "no configuration of copy"),
        (by_size, tensors, "the heuristic of BLOCK depends on sizes: give BLOCK"),
    ],
)
def test_mistakes_in_a_contract_are_named(kernel: Any, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        prove(kernel, grid=(1,), args=args)


def test_unknown_dtypes_and_conflicting_ranges_are_rejected() -> None:
    with pytest.raises(ContractError, match="a buffer has elements of fp32: give a dtype"):
        Buffer("fp32", 4)
    with pytest.raises(ContractError, match="n is 1 to 20 in one place, and 1 to 10 in another"):
        Contract.of(grid=(symbol("n", 1, 10),), arguments={"n": symbol("n", 1, 20)})


@pytest.mark.parametrize(
    ("first", "verdict"), [(size, "proven"), (size - 1, "counterexample"), (0, "proven")]
)
def test_overlapping_views_of_one_tensor_race(first: Any, verdict: str) -> None:
    y = Buffer("f32", size, storage="x_ptr", first=first)
    args = {"x_ptr": Buffer("f32", size), "y_ptr": y, "n": size, "BLOCK": 64}
    report = prove(copy, grid=(cdiv(size, 64),), args=args, replay=False)
    assert report.verdict == verdict, report
