"""The tables of an emulated GPU's report, for a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..tables import in_units, table
from .counters import CLASSES, Counters, InstructionClass, KernelCounters, Memory, added

WIDTH = 100
LINES_SHOWN = 12


def tables(kernels: Sequence[KernelCounters], *, lines: bool) -> str:
    """The kernels, what they asked of memory if that was counted, and the lines of each if they are asked for."""
    made = [_kernels(kernels), _classes(kernels), _memory(kernels)]
    made += [part for kernel in kernels if lines for part in _lines(kernel)]
    return "\n\n".join("\n".join(part) for part in made if part)


def short(number: float) -> str:
    """In at most seven characters: below a million exactly, else with four digits."""
    if number < 1_000_000:
        return f"{number:,.0f}"
    for unit in ("k", "M", "G"):
        number /= 1000
        if number < 10_000:
            return f"{number:,.4g} {unit}"
    return f"{number / 1000:,.4g} T"


def fitting(name: str) -> str:
    """A kernel's name in at most 24 characters, without its middle if it has more."""
    return name if len(name) <= 24 else f"{name[:12]}…{name[-11:]}"


def _kernels(kernels: Sequence[KernelCounters]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("kernel", "launches", "blocks", "warp instructions", "barriers", "tensor flops", "findings")
    ]
    for kernel in kernels:
        total = kernel.total
        did = (total.warp_instructions, total.barriers, total.tensor_flops)
        numbers = (kernel.launches, kernel.blocks, *did, kernel.findings)
        rows.append((fitting(kernel.kernel), *(short(number) for number in numbers)))
    return table(rows, "<>>>>>>")


def _classes(kernels: Sequence[KernelCounters]) -> list[str]:
    parts = [(fitting(kernel.kernel), kernel.total) for kernel in kernels]
    return ["by class of instructions, in percent:", *_mix("kernel", parts)]


def _mix(title: str, parts: Sequence[tuple[str, Counters]], whole: int = 0) -> list[str]:
    """A row for each part, a column for each class of instructions that is in one of them; if those are too many, the
    rarest are one column together. A number is a percentage of the whole, or else of the part itself."""
    total = added(counters for _, counters in parts).instructions
    columns = [name for name in CLASSES if name in total]
    rare: list[InstructionClass] = []
    while True:
        groups = [(name, [name]) for name in columns] + ([("rest", rare)] if rare else [])
        rows = [(title, *(name for name, _ in groups))]
        for part, counters in parts:
            share = 100 / (whole or counters.warp_instructions)
            did = [sum(counters.instructions.get(name, 0) for name in names) for _, names in groups]
            rows.append((part, *(f"{share * number:.1f}" if number else "" for number in did)))
        made = table(rows, "<" + ">" * len(groups))
        if max(map(len, made)) <= WIDTH or not columns:
            return made
        rare.append(min(columns, key=lambda name: total[name]))
        columns.remove(rare[-1])


# ---- memory ------------------------------------------------------------------------------------------------------


def _memory(kernels: Sequence[KernelCounters]) -> list[str]:
    rows: list[tuple[str, ...]] = [("kernel", "memory", "requests", "bytes", "moved", "", "least", "times")]
    for kernel in kernels:
        name = fitting(kernel.kernel)
        for row in _directions(kernel.total.counted or Memory()):
            rows.append((name, *row))
            name = ""
    return ["what warps asked of memory:", *table(rows, "<<>>><>>")] if len(rows) > 1 else []


def _directions(memory: Memory) -> Iterator[tuple[str, ...]]:
    of_global = {
        "global loads": memory.loads,
        "global stores": memory.stores,
        "global atomics": memory.atomics,
    }
    of_shared = {"shared reads": memory.shared_reads, "shared writes": memory.shared_writes}
    for units, traffic in (("sectors", of_global), ("wavefronts", of_shared)):
        for name, (requests, bytes_, moved, least) in traffic.items():
            if requests:
                times = f"{moved / least:.2f}" if moved != least else ""
                yield name, short(requests), in_units(bytes_), short(moved), units, short(least), times


# ---- lines -------------------------------------------------------------------------------------------------------

_OF_A_LINE = ("instructions", "share", "sectors", "least", "wavefronts", "least", "tensor flops")


def _lines(kernel: KernelCounters) -> Iterator[list[str]]:
    """Those with the most instructions first. Columns in which no line has anything are left out."""
    shown = list(kernel.lines.items())[:LINES_SHOWN]
    files = {line.file for line in kernel.lines}
    in_one_file = f" of {Path(*files).name}" if len(files) == 1 else ""
    names = [str(line.number) if in_one_file and line.number else str(line) for line, _ in shown]
    whole = kernel.total.warp_instructions
    numbers = [_OF_A_LINE, *(_numbers(counters, whole) for _, counters in shown)]
    used = [column for column in zip(*numbers, strict=True) if any(column[1:])]
    columns = [("line", *names), *used, ("", *(line.text for line, _ in shown))]
    rows = list(zip(*columns, strict=True))
    parts = [(name, counters) for name, (_, counters) in zip(names, shown, strict=True)]
    title = f"{kernel.kernel}, by line{in_one_file}"
    left_out = len(kernel.lines) - len(shown)
    yield [
        f"{title}:",
        *(text[:WIDTH].rstrip() for text in table(rows, "<" + ">" * len(used) + "<")),
        *([f"  and {left_out} more lines"] if left_out else []),
    ]
    yield [f"{title} and class, in percent of its instructions:", *_mix("line", parts, whole)]


def _numbers(counters: Counters, whole: int) -> tuple[str, ...]:
    did = counters.warp_instructions
    memory = counters.counted or Memory()
    of_global, of_shared = memory.all_global, memory.all_shared
    asked = (of_global.sectors, of_global.least_sectors, of_shared.wavefronts, of_shared.least_wavefronts)
    others = (short(number) if number else "" for number in (*asked, counters.tensor_flops))
    return f"{did:,}", f"{100 * did / whole:.1f} %", *others
