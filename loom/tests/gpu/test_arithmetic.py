"""Arithmetic on 32 lanes: the tables of loom/tests/test_ptx_*.py, which hold for one lane, on the machine.

Those tables are written from the ISA's rules (edges of shifts, NaN, saturation, roundings, selectors) and are
exhaustive for conversions of 16 bits. Here they run as PTX: the instructions that are compiled with the machine always,
all others in the slow tests.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import test_ptx_conversions
import test_ptx_floats
import test_ptx_integers
from assembled import Array, Batch, Case, bits32, execute
from gpu.emulated import launch
from triton_loom.gpu import scalars

GROUPS = {
    f"{module.__name__.removeprefix('test_ptx_')} {name}": group
    for module in (test_ptx_integers, test_ptx_conversions, test_ptx_floats)
    for name, group in module.GROUPS.items()
}
COMMON = {scalar.name for scalar in scalars.common()} | {
    f"{op}.pred" for op in ("mov", "and", "or", "xor", "not")
}
REGISTERS = {16: "%rs", 32: "%r", 64: "%rd"}


def opcodes(case: Case) -> list[str]:
    text = re.sub(r"\.reg\s[^;]*;|@!?\S+", "", case.text.replace("{{", " ").replace("}}", " "))
    return [statement.split()[0] for statement in text.split(";") if statement.strip()]


def chosen(batches: Sequence[Batch], everything: bool) -> Iterator[Batch]:
    for batch in batches:
        cases = tuple(case for case in batch.cases if everything or COMMON.issuperset(opcodes(case)))
        if cases:
            yield Batch(batch.inputs, cases)


def executed(batch: Batch) -> list[Array]:
    """The results of all cases, on the machine: each thread takes one element of the inputs."""
    count = len(batch.inputs[0])
    padded = -(-count // 128) * 128
    inputs = [np.concatenate([a, np.resize(a, padded - count)]) for a in batch.inputs]
    outputs = [np.zeros(padded, f"u{case.bits // 8}") for case in batch.cases]
    lines = ["mov.u32 %r1, %ctaid.x;", "mad.lo.s32 %r1, %r1, 128, %r0;"]
    names = []
    for number, array in enumerate(inputs):
        size = array.itemsize
        name = f"{REGISTERS[8 * size]}{60 + number}"
        names.append(name)
        lines += [f"mul.wide.u32 %rd50, %r1, {size};", f"add.s64 %rd50, %rd{number}, %rd50;"]
        lines += [f"ld.global.b{8 * size} {name}, [%rd50];"]
    pointers = {len(inputs) + k: case for k, case in enumerate(batch.cases)}
    for number, case in pointers.items():
        result = f"{REGISTERS[case.bits]}59"
        text = case.text.format(d=result, **dict(zip("abc", names, strict=False)))
        lines += [text, f"ld.param.b64 %rd51, [p{number}];", f"mul.wide.u32 %rd50, %r1, {case.bits // 8};"]
        lines += ["add.s64 %rd50, %rd51, %rd50;", f"st.global.b{case.bits} [%rd50], {result};"]
    body = "\n".join(lines)
    outcome = launch(body, *inputs, *outputs, threads=128, grid=(padded // 128, 1, 1))
    assert {finding.kind for finding in outcome.findings} <= {"division by zero"}
    return [output[:count] for output in outputs]


def verify(batches: Sequence[Batch], everything: bool) -> int:
    cases = 0
    with np.errstate(all="ignore"):
        for batch in chosen(batches, everything):
            for case, got in zip(batch.cases, executed(batch), strict=True):
                wanted = case.reference(*batch.inputs)
                wrong = np.flatnonzero(got != wanted)
                assert not len(wrong), (
                    f"{case.text} of {[hex(int(a[wrong[0]])) for a in batch.inputs]}: "
                    f"{int(got[wrong[0]]):#x}, not {int(wanted[wrong[0]]):#x}"
                )
                cases += 1
    return cases


@pytest.mark.parametrize("group", list(GROUPS))
def test_what_is_compiled_with_the_machine(group: str) -> None:
    verify(GROUPS[group](), everything=False)


def test_approximations_are_those_of_loom() -> None:
    """Their error is known from there: here they have the same bits, 32 at a time."""
    (batch,) = chosen([test_ptx_floats.f32_approximations()], everything=False)
    (wanted,) = execute([batch], quick=True)
    for case, got, want in zip(batch.cases, executed(batch), wanted, strict=True):
        assert (got == want).all(), case.text


@pytest.mark.parametrize("name", ["min", "max"])
def test_extreme_of_three(name: str) -> None:
    """Numbers win over NaN, and -0 is less than 0."""
    values = [0, 0x80000000, 0x3F800000, 0xC0000000, 0x7FC00001, 0x7F800000]
    a, b, c = (
        np.array(column, np.uint32) for column in zip(*itertools.product(values, repeat=3), strict=True)
    )

    def of_two(x: Array, y: Array) -> Array:
        numbers = (x.view(np.float32).astype(np.float64), y.view(np.float32).astype(np.float64))
        return bits32(test_ptx_floats.extreme(*numbers, name, False, False).astype(np.float32))

    batch = Batch((a, b, c), (Case(f"{name}.f32 {{d}}, {{a}}, {{b}}, {{c}};", 32, lambda *_: a),))
    assert (executed(batch)[0] == of_two(of_two(a, b), c)).all()


def test_all_that_is_compiled_with_the_machine_is_tested() -> None:
    batches = [batch for group in GROUPS.values() for batch in group()] + [
        test_ptx_floats.f32_approximations()
    ]
    tested = {name for batch in batches for case in batch.cases for name in opcodes(case)}
    assert COMMON - tested == {"min3.f32", "max3.f32"}


@pytest.mark.slow
@pytest.mark.parametrize("group", list(GROUPS))
def test_every_instruction(group: str) -> None:
    assert verify(GROUPS[group](), everything=True)
