"""Arithmetic on 32 lanes: the single-lane tables of loom/tests/test_ptx_*.py, on the machine.

The tables follow the ISA's rules (edges of shifts, NaN, saturation, roundings, selectors) and are exhaustive for
conversions of 16 bits. Here they run as PTX: instructions that are compiled with the machine always, all others in the
slow tests.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
import pytest
import test_ptx_conversions
import test_ptx_floats
import test_ptx_integers
from assembled import Array, Batch, Case, bits32, execute
from gpu.emulated import launch
from triton_loom.ptx import scalars

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
    """Return the results of all cases on the machine: each thread takes one element of the inputs."""
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
                expected = case.reference(*batch.inputs)
                wrong = np.flatnonzero(got != expected)
                assert not len(wrong), (
                    f"{case.text} of {[hex(int(a[wrong[0]])) for a in batch.inputs]}: "
                    f"{int(got[wrong[0]]):#x}, not {int(expected[wrong[0]]):#x}"
                )
                cases += 1
    return cases


@pytest.mark.parametrize("group", list(GROUPS))
def test_instructions_compiled_with_the_machine(group: str) -> None:
    verify(GROUPS[group](), everything=False)


def test_approximations_agree_with_looms() -> None:
    """Their error is known from Loom's tests: here they have the same bits, 32 at a time."""
    (batch,) = chosen([test_ptx_floats.f32_approximations()], everything=False)
    (expected,) = execute([batch], quick=True)
    for case, got, want in zip(batch.cases, executed(batch), expected, strict=True):
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


def test_directed_roundings() -> None:
    """The result is on the right side of the exact one, with no number between."""
    rng = np.random.default_rng(5)
    a, b, c = (rng.standard_normal(1024) * 2.0 ** rng.integers(-60, 60, 1024) for _ in range(3))
    b[::5], c[::7], c[::11] = a[::5], -a[::7], a[::11] * 2.0**-40
    a[::13], b[::17] = 3e38, 2e38
    numbers = [x.astype(np.float32) for x in (a, b, c)]
    instructions = [(name, way) for name in ("add", "sub", "mul", "fma") for way in ("rz", "rm", "rp")]
    out = np.zeros((len(instructions), 1024), np.float32)
    loads = [
        f"add.s64 %rd{20 + k}, %rd{k + 1}, %rd10; ld.global.b32 %r{20 + k}, [%rd{20 + k}];" for k in range(3)
    ]
    body = ["mov.u32 %r1, %ctaid.x; mad.lo.s32 %r1, %r1, 32, %r0; mul.wide.u32 %rd10, %r1, 4;", *loads]
    body.append("add.s64 %rd11, %rd0, %rd10;")
    for number, (name, way) in enumerate(instructions):
        read = "%r20, %r21, %r22" if name == "fma" else "%r20, %r21"
        body.append(f"{name}.{way}.f32 %r30, {read}; st.global.b32 [%rd11+{4096 * number}], %r30;")
    launch("\n".join(body), out, *numbers, grid=(32, 1, 1))
    for (name, way), results in zip(instructions, out, strict=True):
        for got, *operands in zip(results, *numbers, strict=True):
            p, q, r = map(Fraction, map(float, operands))
            exact = {"add": p + q, "sub": p - q, "mul": p * q, "fma": p * q + r}[name]
            if not np.isfinite(got):  # only away from zero
                assert abs(exact) > np.finfo(np.float32).max
                assert way != "rz"
                continue
            error = Fraction(float(got)) - exact
            side = {"rz": -1 if exact > 0 else 1, "rm": -1, "rp": 1}[way]
            assert error * side >= 0
            with np.errstate(over="ignore"):
                further = np.nextafter(got, np.float32(-side * np.inf))
            assert error == 0 or not np.isfinite(further) or (Fraction(float(further)) - exact) * side < 0


@pytest.mark.parametrize("bits", [32, 64])
def test_carries(bits: int) -> None:
    """Numbers of three words are added, subtracted, and multiplied by a word."""
    numbers = np.random.default_rng(3).integers(0, 1 << 64, (2, 3, 32), np.uint64)
    numbers[:, :, ::3] = numbers[:, :, ::3] >> 63  # many zeros and ones,
    numbers[:, :, 1::3] = ~numbers[:, :, ::3][:, :, : numbers[:, :, 1::3].shape[2]]  # and what is all ones
    dtype = np.dtype(f"u{bits // 8}")
    a, b = numbers.astype(dtype)
    kind = {32: "%r", 64: "%rd"}[bits]
    registers = [f"{kind}{20 + k}" for k in range(11)]
    x, y, z = registers[:3], registers[3:6], registers[6:]
    # Each result is written to a register that is read.
    operations = {
        "sum": [f"add.cc.u{bits} {x[0]}, {x[0]}, {y[0]}", f"addc.cc.u{bits} {x[1]}, {x[1]}, {y[1]}",
                f"addc.u{bits} {x[2]}, {x[2]}, {y[2]}"],
        "difference": [f"sub.cc.u{bits} {x[0]}, {x[0]}, {y[0]}", f"subc.cc.u{bits} {x[1]}, {x[1]}, {y[1]}",
                       f"subc.u{bits} {x[2]}, {x[2]}, {y[2]}"],
        "product": [f"mov.b{bits} {z[0]}, 0", f"mad.lo.cc.u{bits} {z[1]}, {x[0]}, {y[0]}, {z[0]}",
                    f"madc.hi.u{bits} {z[2]}, {x[0]}, {y[0]}, 0", f"mad.lo.cc.u{bits} {z[2]}, {x[1]}, {y[0]}, {z[2]}",
                    f"madc.hi.cc.u{bits} {z[3]}, {x[1]}, {y[0]}, 0", f"madc.lo.u{bits} {x[2]}, {x[2]}, {y[0]}, {z[3]}",
                    f"mov.b{bits} {x[0]}, {z[1]}", f"mov.b{bits} {x[1]}, {z[2]}"],
    }  # fmt: skip

    def joined_words(words: Sequence[np.ndarray], lane: int) -> int:
        return sum(int(word[lane]) << bits * k for k, word in enumerate(words))

    expected = {"sum": lambda p, q: p + q, "difference": lambda p, q: p - q}
    for name, statements in operations.items():
        out = np.zeros((3, 32), dtype)
        loads = [
            f"add.s64 %rd11, %rd{array}, %rd10; ld.global.b{bits} {register}, [%rd11+{32 * bits // 8 * k}];"
            for array, row in ((1, x), (2, y))
            for k, register in enumerate(row)
        ]
        stores = [f"st.global.b{bits} [%rd12+{32 * bits // 8 * k}], {x[k]};" for k in range(3)]
        lines = [f"mul.wide.u32 %rd10, %r0, {bits // 8}; add.s64 %rd12, %rd0, %rd10;", *loads]
        launch(
            "\n".join([*lines, *(f"{statement};" for statement in statements), *stores]),
            out,
            a.copy(),
            b.copy(),
        )
        for lane in range(32):
            p, q = joined_words(a, lane), joined_words(b, lane)
            value = expected[name](p, q) if name in expected else p * int(b[0][lane])
            assert joined_words(out, lane) == value % (1 << 3 * bits), (name, lane)


def test_every_instruction_compiled_with_the_machine_is_tested() -> None:
    batches = [batch for group in GROUPS.values() for batch in group()] + [
        test_ptx_floats.f32_approximations()
    ]
    tested = {name for batch in batches for case in batch.cases for name in opcodes(case)}
    assert COMMON - tested == {"min3.f32", "max3.f32"}


@pytest.mark.slow
@pytest.mark.parametrize("group", list(GROUPS))
def test_every_instruction(group: str) -> None:
    assert verify(GROUPS[group](), everything=True)
