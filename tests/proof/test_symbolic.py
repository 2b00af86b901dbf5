"""Host code run with symbols launches what it launches with integers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft.lab.families import OPS, WORKLOADS, Workload
from weft.lab.selection import by_kernels
from weft.lab.symbolic.tracing import (
    Launched,
    Pointer,
    Size,
    Trace,
    _Allocations,
    _pointer,
    candidates,
    variable,
    with_sizes,
    without_numbers,
)
from weft.ops.heads import launch as heads
from weft.ops.heads.angles import turns
from weft.runtime import Launch, Op

TARGET = "sm_90"
BY_DAY = ("norm", "glu", "matmul")


def named(name: str) -> Workload:
    return next(w for w in WORKLOADS if str(w) == name)


def numbers_of(launched: Launched, values: Mapping[str, int]) -> tuple[Any, ...]:
    """Return a launch with its symbols replaced by integers."""
    substitutions = {
        launched.symbols[name]: value for name, value in values.items() if name in launched.symbols
    }

    def number(e: Any) -> int:
        return int(sympy.sympify(e).subs(substitutions))

    def concrete(pointer: Pointer) -> tuple[Any, ...]:
        sizes = tuple(map(number, pointer.shape))
        strides = [number(stride) for size, stride in zip(sizes, pointer.stride, strict=True) if size != 1]
        return pointer.dtype, sizes, tuple(strides), number(pointer.offset)

    integers = {name: number(value) for name, value in launched.integers.items()}
    pointers = {name: concrete(pointer) for name, pointer in launched.pointers.items()}
    return launched.variant, tuple(map(number, launched.grid)), integers, pointers


def holds(trace: Trace, values: Mapping[str, int]) -> bool:
    substitutions = {trace.sizes[name]: value for name, value in values.items()}
    return all(bool(guard.subs(substitutions)) for guard in trace.guards if not isinstance(guard, bool))


def assert_same_launches(workload: Workload, sizes: list[Size], values: dict[str, int]) -> None:
    """Raise unless a trace at these sizes agrees with the launches at them."""
    trace = Trace.of(workload, TARGET, sizes, values)
    assert holds(trace, values), "the guards do not hold where they were recorded"
    concrete = with_sizes(workload, values)
    plain = Trace.of(Workload(**{**vars(concrete), "rows": values.get("rows", workload.rows)}), TARGET, [])
    assert trace.failure is None
    assert (trace.refused is None) == (plain.refused is None), (trace.refused, plain.refused)
    if trace.refused is None:
        assert [numbers_of(each, values) for each in trace.launches] == [
            numbers_of(each, {}) for each in plain.launches
        ]


def workloads_of(op: str) -> list[Workload]:
    return list(by_kernels(op, TARGET))


@pytest.mark.parametrize(
    "op", [pytest.param(op, marks=[] if op in BY_DAY else pytest.mark.slow) for op in OPS]
)
def test_symbols_and_integers_launch_the_same(op: str) -> None:
    draw = random.Random(op)
    for workload in workloads_of(op)[: 1 if op in BY_DAY else None]:
        sizes = variable(workload, TARGET)
        for _ in range(3):
            values = {size.name: draw.choice((1, 16, draw.randrange(1, 5000), size.usual)) for size in sizes}
            assert_same_launches(workload, sizes, values)


def test_a_trace_stands_for_its_region() -> None:
    """Elsewhere in the region, the expressions of one trace describe the launches."""
    workload = named("norm:odd/200:llama:8192")
    sizes = variable(workload, TARGET)
    assert [size.name for size in sizes] == ["rows", "cols"]
    trace = Trace.of(workload, TARGET, sizes, {"rows": 300, "cols": 200})
    draw, seen = random.Random(0), 0
    for _ in range(60):
        values = {"rows": draw.randrange(1, 10000), "cols": 8 * draw.randrange(1, 40)}
        if not holds(trace, values):
            continue
        seen += 1
        other = Trace.of(workload, TARGET, sizes, values)
        assert [numbers_of(e, values) for e in trace.launches] == [
            numbers_of(e, values) for e in other.launches
        ]
    assert seen > 3


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_traces_stand_for_their_regions(op: str) -> None:
    """Every op: sizes near a trace's that satisfy its guards launch what its expressions say."""
    draw = random.Random(op)
    for workload in workloads_of(op):
        sizes = variable(workload, TARGET)
        trace = Trace.of(workload, TARGET, sizes)
        for _ in range(20):
            values = {
                size.name: draw.choice((size.usual, draw.randrange(1, 2 * size.usual + 1))) for size in sizes
            }
            if trace.launches and holds(trace, values):
                other = Trace.of(workload, TARGET, sizes, values)
                assert [numbers_of(e, values) for e in trace.launches] == [
                    numbers_of(e, values) for e in other.launches
                ]


def test_branches_of_host_code_are_guards() -> None:
    """Sizes that violate a guard launch another variant."""
    workload = named("norm:odd/200:llama:8192")
    sizes = variable(workload, TARGET)
    short, long = (Trace.of(workload, TARGET, sizes, {"rows": 300, "cols": cols}) for cols in (200, 40001))
    assert dict(short.launches[0].variant.constants)["LOOP"] is False
    assert dict(long.launches[0].variant.constants)["LOOP"] is True
    assert not holds(short, {"rows": 300, "cols": 40001})


@pytest.mark.slow
def test_sizes_that_decide_the_code_are_fixed() -> None:
    workload = named("attention:gpt-oss-20b/heads:window-sinks:256")
    assert {size.name for size in candidates(workload)} - {
        size.name for size in variable(workload, TARGET)
    } == {
        "dim",
        "v_dim",
    }


def test_tables_of_angles_have_the_right_size() -> None:
    """The patched table has the metadata of the real one."""
    device = torch.device("cpu")
    for dim in (2, 64, 126):
        table = turns(10000.0, dim, "", device)
        with without_numbers():
            patched = heads.turns(10000.0, dim, "", device)
        assert (patched.shape, patched.dtype, patched.stride()) == (table.shape, table.dtype, table.stride())
    assert heads.turns is turns


def test_uninitialized_allocations_are_recorded() -> None:
    """Pointers to a complete tensor of `torch.empty` or its like that nothing else writes are recorded."""
    source = torch.empty(6, device="meta")
    with _Allocations() as allocations:
        empty = torch.empty(4, 6, device="meta")
        like = torch.empty_like(empty)
        new = empty.new_empty((5,))
        strided = torch.empty_strided((3, 4), (8, 1), device="meta")
        part = torch.empty(8, device="meta")
        filled = torch.empty(7, device="meta")
        filled[3:].zero_()
        target = torch.empty(6, device="meta")
        torch.add(source, 1, out=target)
        halves = torch.empty(2, 9, device="meta")
        others = {"zeros": torch.zeros(6, device="meta"), "sum": source + 1, "given": source}
    tensors = {
        "empty": empty,
        "like": like.view(24),
        "new": new,
        "strided": strided,
        "part": part[:7],
        "filled": filled,
        "target": target,
        "first": halves[0],
        "second": halves[1],
        **others,
    }
    pointers = {name: _pointer(tensor) for name, tensor in tensors.items()}
    assert allocations.uninitialized(pointers) == {"empty", "like", "new", "strided"}


def test_refusals_and_failures_are_distinguished() -> None:
    """The op's own error is a refusal; any other error is a failure."""
    refused = replace(named("glu:odd/33:swiglu:8192"), settings=(("act", "nothing"),))
    trace = Trace.of(refused, TARGET, [Size("cols", 33)])
    assert trace.refused is not None
    assert trace.failure is None
    broken = named("rope:odd/heads:three-axes:1000")
    trace = Trace.of(broken, TARGET, [Size("cols", 66)])
    assert trace.refused is None
    assert trace.failure is not None


def test_patches_are_undone() -> None:
    """Symbols are unhashable again, ops go through the dispatcher, and fake tensors have no addresses."""
    owners = [(torch.SymInt, "__hash__"), (torch.SymInt, "bit_length"), (torch.SymBool, "__eq__")]
    owners += [(Op, "dispatch"), (Op, "is_traced"), (Launch, "of"), (FakeTensor, "data_ptr")]
    before = [vars(owner).get(name) for owner, name in owners]
    with without_numbers():
        assert all(
            vars(owner).get(name) is not old for (owner, name), old in zip(owners, before, strict=True)
        )
    assert [vars(owner).get(name) for owner, name in owners] == before
