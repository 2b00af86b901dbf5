"""Execution of many PTX instructions at a time, without Triton: `codegen.assembly` writes a C++ function for each text,
one library has them all, and every bit of every result is compared with a reference that shares no code with it.

Integers are Python's, of any size; floats are NumPy's, rounded to odd in float64 where a result is rounded again; the
small formats are tables in which rounding is a search (`formats.py`).
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from formats import Format
from triton_loom.codegen import assembly
from triton_loom.device import toolchain
from triton_loom.ir.ttir import Op, Scalar, Value

Array = np.ndarray[Any, Any]
Reference = Callable[..., Array]


@dataclass(frozen=True)
class Case:
    """A text for {a}, {b}, {c} that leaves `bits` bits in {d}, and their expected value."""

    text: str
    bits: int
    reference: Reference

    @property
    def assembly(self) -> str:
        return self.text.format(d="$0", a="$1", b="$2", c="$3")


@dataclass(frozen=True)
class Batch:
    """Cases on the same inputs: unsigned integers, the bits of registers."""

    inputs: tuple[Array, ...]
    cases: tuple[Case, ...]


Group = Callable[[], list[Batch]]  # what is compiled together


# ---- running them -------------------------------------------------------------------------------------------

LETTERS = {16: "h", 32: "r", 64: "l"}


def execute(batches: Sequence[Batch], quick: bool = False) -> list[list[Array]]:
    """Return the results of every case of every batch, compiled together: like any kernel, or with `quick` like kernels
    under `sanitize()`, in half the time."""
    cases = [(batch, case) for batch in batches for case in batch.cases]
    # add.f32 and add.rn.f32 are one function.
    bodies = ["\n".join(assembly.function(operation(batch, case), "NAME")) for batch, case in cases]
    names = {body: f"case_{i}" for i, body in enumerate(bodies)}
    table = ", ".join(f"(void *){names[body]}" for body in bodies)
    source = [
        '#include "simd.h"\n#include "casts.h"\n#include "ptx.h"',
        *(body.replace("NAME", name) for body, name in names.items()),
        f'extern "C" __attribute__((visibility("default"))) void *const cases[] = {{{table}}};\n',
    ]
    library = toolchain.load(toolchain.build("\n".join(source), quick=quick), "assembled")
    functions = iter((ctypes.c_void_p * len(cases)).in_dll(library, "cases"))
    return [[call(next(functions), batch, case) for case in batch.cases] for batch in batches]


def operation(batch: Batch, case: Case) -> Op:
    """Return the operation that stock Triton makes of a text: {d} is $0, and the inputs follow."""
    widths = [8 * array.dtype.itemsize for array in batch.inputs]
    return Op(
        "tt.elementwise_inline_asm",
        [Value(f"x{i}", Scalar(f"i{bits}")) for i, bits in enumerate(widths)],
        [Value("y", Scalar(f"i{case.bits}"))],
        {
            "text": case.assembly,
            "constraints": ",".join([f"={LETTERS[case.bits]}", *(LETTERS[bits] for bits in widths)]),
            "packed_element": 1,
        },
    )


def call(function: int, batch: Batch, case: Case) -> Array:
    inputs = [np.ascontiguousarray(array) for array in batch.inputs]
    output = np.zeros(len(inputs[0]), f"u{case.bits // 8}")
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (len(inputs) + 1), ctypes.c_int32)
    prototype(function)(*(array.ctypes.data for array in [*inputs, output]), len(output))
    return output


def verify(batches: Sequence[Batch], quick: bool = False) -> None:
    """Assert that every bit of every case equals its reference."""
    with np.errstate(all="ignore"):
        for batch, results in zip(batches, execute(batches, quick), strict=True):
            for case, got in zip(batch.cases, results, strict=True):
                expected = case.reference(*batch.inputs)
                assert expected.dtype == got.dtype, case.text
                wrong = np.flatnonzero(got != expected)
                if len(wrong):
                    i = wrong[0]
                    inputs = [hex(int(array[i])) for array in batch.inputs]
                    raise AssertionError(
                        f"{case.text} of {inputs}: {int(got[i]):#x}, not {int(expected[i]):#x}; {len(wrong)} wrong"
                    )


# ---- inputs -------------------------------------------------------------------------------------------------


def any_bits(bits: int, count: int) -> Array:
    return np.frombuffer(np.random.bytes(count * bits // 8), f"u{bits // 8}").copy()


def integer_inputs(bits: int, count: int = 3) -> tuple[Array, ...]:
    """Return random numbers, small ones, and the ends of the range, these in all pairs."""
    ends = [0, 1, 2, 3, (1 << bits) - 1, (1 << bits) - 2, 1 << (bits - 1), (1 << (bits - 1)) - 1]
    pairs = np.array(list(itertools.product(ends, repeat=2)), np.uint64)
    columns = [pairs[:, i % 2] for i in range(count)]
    wide = [any_bits(bits, 400) for _ in range(count)]
    small = [any_bits(8, 200) for _ in range(count)]
    return tuple(
        np.concatenate(parts).astype(f"u{bits // 8}") for parts in zip(columns, wide, small, strict=True)
    )


# ---- references ---------------------------------------------------------------------------------------------


def number(value: int, kind: str) -> int:
    """Return the value of a register's bits in a type such as s16."""
    bits = int(kind[1:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value


def of_integers(f: Callable[..., int], kinds: str, bits: int) -> Reference:
    """Return a function of registers that applies f to their Python integers in these types; low bits of the result."""

    def reference(*arrays: Array) -> Array:
        split = kinds.split()
        rows = zip(*(array.tolist() for array in arrays[: len(split)]), strict=True)
        values = [
            f(*(number(v, k) for v, k in zip(row, split, strict=True))) & ((1 << bits) - 1) for row in rows
        ]
        return np.array(values, np.uint64).astype(f"u{bits // 8}")

    return reference


NAN32, NAN16 = np.uint32(0x7FFFFFFF), np.uint16(0x7FFF)


def f32(bits: Array) -> Array:
    return np.ascontiguousarray(bits, np.uint32).view(np.float32)


def bits32(x: Array, ftz: bool = False, sat: bool = False) -> Array:
    """Return the bits of f32 results, with PTX's NaN and after .ftz and .sat."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    u = np.where(np.isnan(x), NAN32, u)
    u = flushed32(u) if ftz else u
    if sat:
        u = np.where(np.isnan(x), 0, np.clip(f32(u), 0, 1).view(np.uint32) & 0x7FFFFFFF)
    return u.astype(np.uint32)


def flushed32(bits: Array) -> Array:
    return np.where(bits & 0x7F800000, bits, bits & 0x80000000).astype(np.uint32)


def to_odd(a: Array, b: Array) -> Array:
    """Return a + b in float64, rounded to odd, so that rounding it to fewer bits rounds the exact sum."""
    s = a + b
    part = s - a
    error = (a - (s - part)) + (b - part)
    towards = np.nextafter(s, np.where(error > 0, np.inf, -np.inf))
    inexact = np.isfinite(s) & (error != 0)
    odd = s.view(np.int64) % 2 == 1
    return np.where(inexact & ~odd, towards, s)


def half_bits(format_: Format, x: Array, ftz: bool = False, sat: bool = False, relu: bool = False) -> Array:
    """Return codes of float64 numbers (rounded to odd if inexact), with PTX's NaN and after the modifiers."""
    if sat:
        x = np.where(np.isnan(x), 0, np.clip(x, 0, 1)) + 0.0
    code = np.where(np.isnan(x), NAN16, format_.encode(x))
    if relu:
        code = np.where(~np.isnan(x) & np.signbit(x), 0, code)
    return (flushed16(format_, code) if ftz else code).astype(np.uint16)


def flushed16(format_: Format, code: Array) -> Array:
    return np.where((code & 0x7FFF) < 1 << format_.mantissa, code & 0x8000, code).astype(np.uint16)
