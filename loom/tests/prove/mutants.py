"""Correct kernels, and every small mistake in them: in their TTIR, in their grid, in the promises about arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl
import z3
from triton_loom.prove import Answer, Buffer, Contract, cdiv, symbol
from triton_loom.prove.compiling import ttir_of
from triton_loom.prove.coverage import covered
from triton_loom.prove.proving import Prover
from triton_loom.prove.replay import replayed


@triton.jit
def flat(x_ptr, y_ptr, n, BLOCK: tl.constexpr = 64):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + off, 2 * tl.load(x_ptr + off, mask=off < n), mask=off < n)


@triton.jit
def by_rows(x_ptr, y_ptr, stride, cols, BLOCK: tl.constexpr = 32):
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, cols, BLOCK):
        off = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + off, mask=off < cols)
        tl.store(y_ptr + row * cols + off, x, mask=off < cols)


@triton.jit
def by_tiles(x_ptr, y_ptr, M, N, TILE: tl.constexpr = 16):
    tiles = tl.cdiv(N, TILE)
    rows = (tl.program_id(0) // tiles) * TILE + tl.arange(0, TILE)[:, None]
    cols = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)[None, :]
    off = rows.to(tl.int64) * N + cols
    mask = (rows < M) & (cols < N)
    tl.store(y_ptr + off, tl.load(x_ptr + off, mask=mask), mask=mask)


@triton.jit
def gathered(x_ptr, index_ptr, y_ptr, tokens, cols, BLOCK: tl.constexpr = 32):
    token = tl.program_id(0)
    off = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index_ptr + token)
    mask = (off < cols) & (source >= 0)
    x = tl.load(x_ptr + source.to(tl.int64) * cols + off, mask=mask, other=0.0)
    tl.store(y_ptr + token.to(tl.int64) * cols + off, x, mask=off < cols)


@triton.jit
def hinted(x_ptr, y_ptr, n, BLOCK: tl.constexpr = 64):
    start = tl.multiple_of(tl.program_id(0) * BLOCK, 64)
    off = start + tl.max_contiguous(tl.arange(0, BLOCK), BLOCK)
    tl.store(y_ptr + off, tl.load(x_ptr + off))


def kernels() -> Iterator[tuple[Any, Contract]]:
    """Yield kernels, each with a contract under which everything is proven."""
    n, m, k, s = symbol("n", 1, 2**30), symbol("m", 1, 2**20), symbol("k", 1, 2**30), symbol("s", 1, 2**30)
    yield (
        flat,
        Contract.of(
            grid=(cdiv(n, 64),),
            arguments={"x_ptr": Buffer("f32", n), "y_ptr": Buffer("f32", n), "n": n},
            outputs=("y_ptr",),
        ),
    )
    yield (
        by_rows,
        Contract.of(
            grid=(m,),
            arguments={
                "x_ptr": Buffer.strided("f32", (m, k), (s, 1)),
                "y_ptr": Buffer.strided("f32", (m, k), (k, 1)),
                "stride": s,
                "cols": k,
            },
            assumptions=(s >= k,),
            outputs=("y_ptr",),
        ),
    )
    a, b = symbol("a", 1, 2**20), symbol("b", 1, 2**20)
    yield (
        by_tiles,
        Contract.of(
            grid=(cdiv(a, 16) * cdiv(b, 16),),
            arguments={
                "x_ptr": Buffer("f32", a * b),
                "y_ptr": Buffer.strided("f32", (a, b), (b, 1)),
                "M": a,
                "N": b,
            },
            outputs=("y_ptr",),
        ),
    )
    index = Buffer("i32", m, values=lambda v: z3.And(v >= -1, v < a))
    yield (
        gathered,
        Contract.of(
            grid=(m, cdiv(b, 32)),
            arguments={
                "x_ptr": Buffer("f32", a * b),
                "index_ptr": index,
                "y_ptr": Buffer.strided("f32", (m, b), (b, 1)),
                "tokens": m,
                "cols": b,
            },
            sizes=(a, b),
            outputs=("y_ptr",),
        ),
    )
    t = symbol("t", 1, 2**20)
    yield (
        hinted,
        Contract.of(
            grid=(t,),
            arguments={"x_ptr": Buffer("f32", 64 * t), "y_ptr": Buffer("f32", 64 * t), "n": 64 * t},
            sizes=(t,),
            outputs=("y_ptr",),
        ),
    )


@dataclass(frozen=True, eq=False)
class Mutant:
    """Kernel or launch with one mistake."""

    kernel: str
    what: str
    ttir: str
    contract: Contract

    def __str__(self) -> str:
        return f"{self.kernel}: {self.what}"


_LINES: list[tuple[str, str, str]] = [
    ("slt is sle", r"arith\.cmpi slt,", "arith.cmpi sle,"),
    ("sge is sgt", r"arith\.cmpi sge,", "arith.cmpi sgt,"),
    ("no mask", r"(tt\.load %\w+), [^:]*?( (?:cacheModifier|evictionPolicy)[^:]*)? :", r"\1 :"),
    ("no mask", r"(tt\.store %\w+, %\w+), %\w+ :", r"\1 :"),
    ("minus for plus", r"arith\.addi (.*: (?:tensor<\w+xi(?:32|64)>|i32|i64))", r"arith.subi \1"),
    ("left of a sum", r"arith\.addi (%\w+), %\w+", r"arith.minsi \1, \1"),
    ("plus for times", r"arith\.muli ", "arith.addi "),
    ("left of a product", r"arith\.muli (%\w+), %\w+", r"arith.minsi \1, \1"),
    ("no division", r"arith\.divsi (%\w+), %\w+", r"arith.minsi \1, \1"),
    ("no remainder", r"arith\.remsi (%\w+), %\w+", r"arith.minsi \1, \1"),
    ("left of a mask", r"arith\.andi (%\w+), %\w+", r"arith.andi \1, \1"),
    ("right of a mask", r"arith\.andi %\w+, (%\w+)", r"arith.andi \1, \1"),
]


def mutants(kernel: Any, contract: Contract) -> Iterator[Mutant]:
    """Yield all mutants of a kernel."""
    name, ttir = kernel.fn.__name__, ttir_of(kernel, contract)
    lines = ttir.splitlines()
    for number, line in enumerate(lines):
        for what, pattern, replacement in _LINES:
            changed = re.sub(pattern, replacement, line) if pattern else line
            if changed != line:
                yield _edited(name, f"{what} in line {number}", lines, number, changed, contract)
        constant = re.search(r"arith\.constant (?:dense<)?(-?\d+)>? : (?:tensor<[\dx]*)?i(?:32|64)", line)
        if constant:
            for other in (int(constant[1]) + 1, int(constant[1]) - 1):
                changed = line[: constant.start(1)] + str(other) + line[constant.end(1) :]
                yield _edited(
                    name, f"{constant[1]} is {other} in line {number}", lines, number, changed, contract
                )
        hint = re.search(r"tt\.(?:divisibility|contiguity) = dense<(\d+)>", line)
        if hint:
            changed = line[: hint.start(1)] + str(2 * int(hint[1])) + line[hint.end(1) :]
            yield _edited(name, f"twice the promise in line {number}", lines, number, changed, contract)
        if "tt.func" in line:
            for argument in contract.arguments:
                changed = re.sub(
                    rf"(%{argument}: \S+) {{tt.divisibility = 16", r"\1 {tt.divisibility = 32", line
                )
                if changed != line:
                    yield _edited(name, f"{argument} is promised by 32", lines, number, changed, contract)
    x, y, z = contract.grid
    for what, grid in {
        "one program more": (x + 1, y, z),
        "one program less": (x - 1, y, z),
        "twice the programs": (2 * x, y, z),
        "programs along z": (x, y, 2),
    }.items():
        yield Mutant(name, what, ttir, replace(contract, grid=grid))
    for argument, buffer in contract.arguments.items():
        if isinstance(buffer, Buffer):
            less = replace(buffer, align=4)
            yield Mutant(name, f"{argument} less aligned", ttir, _with_argument(contract, argument, less))
            if buffer.dims is None:
                short = replace(buffer, extent=buffer.extent - 1)
                yield Mutant(name, f"{argument} too short", ttir, _with_argument(contract, argument, short))


def _with_argument(contract: Contract, name: str, value: Any) -> Contract:
    return replace(contract, arguments={**contract.arguments, name: value})


def _edited(name: str, what: str, lines: list[str], number: int, line: str, contract: Contract) -> Mutant:
    return Mutant(name, what, "\n".join([*lines[:number], line, *lines[number + 1 :]]), contract)


def verdict(mutant: Mutant, effort: int = 6_000_000) -> tuple[str, Answer | None]:
    """Return what becomes of a mutant, and the answer that shows it."""
    prover = Prover(mutant.ttir, mutant.contract, effort)
    answers = [prover.answer(o) for o in prover.question.obligations]
    for answer in answers:
        if answer.example is not None:
            replay = replayed(mutant.ttir, mutant.contract, answer)
            if replay.example is not None and replay.example.confirmed:
                return "confirmed", replay
    failed = [answer for answer in answers if answer.verdict == "counterexample"]
    answers += prover.meetings()
    failed += [
        answer for answer in answers if answer.kind in ("race", "once") and answer.verdict == "counterexample"
    ]
    for answer in failed:
        if answer.kind in ("race", "once"):
            replay = replayed(mutant.ttir, mutant.contract, answer)
            confirmed = replay.example is not None and replay.example.confirmed
            return ("confirmed" if confirmed else answer.kind), replay
    coverage = [covered(prover, output) for output in mutant.contract.outputs]
    for answer in coverage:
        if answer.verdict == "counterexample":
            return "covered", answer
    if failed:
        return "not confirmed", failed[0]
    unknown = [answer for answer in [*answers, *coverage] if answer.verdict == "unknown"]
    return ("unknown", unknown[0]) if unknown else ("harmless", None)
