"""Tables of an emulated GPU's report, for a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..tables import in_units, table
from .counters import CLASSES, Counters, InstructionClass, KernelCounters, Memory, added

WIDTH = 100
LINES_SHOWN = 12


def tables(kernels: Sequence[KernelCounters], *, lines: bool) -> str:
    """Return the tables of kernels, of memory traffic if that was counted, and of each kernel's lines if requested."""
    sections = [_kernels(kernels), _classes(kernels), _memory(kernels)]
    sections += [part for kernel in kernels if lines for part in _lines(kernel)]
    return "\n\n".join("\n".join(part) for part in sections if part)


def short(number: float) -> str:
    """Format a number in at most seven characters: exactly below a million, else with four digits."""
    if number < 1_000_000:
        return f"{number:,.0f}"
    for unit in ("k", "M", "G"):
        number /= 1000
        if number < 10_000:
            return f"{number:,.4g} {unit}"
    return f"{number / 1000:,.4g} T"


def fitting(name: str) -> str:
    """Shorten a kernel's name to at most 24 characters by cutting out its middle."""
    return name if len(name) <= 24 else f"{name[:12]}…{name[-11:]}"


def _kernels(kernels: Sequence[KernelCounters]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("kernel", "launches", "blocks", "warp instructions", "barriers", "tensor flops", "findings")
    ]
    for kernel in kernels:
        total = kernel.total
        totals = (total.warp_instructions, total.barriers, total.tensor_flops)
        numbers = (kernel.launches, kernel.blocks, *totals, kernel.findings)
        rows.append((fitting(kernel.kernel), *(short(number) for number in numbers)))
    return table(rows, "<>>>>>>")


def _classes(kernels: Sequence[KernelCounters]) -> list[str]:
    parts = [(fitting(kernel.kernel), kernel.total) for kernel in kernels]
    return ["by class of instructions, in percent:", *_mix("kernel", parts)]


def _mix(title: str, parts: Sequence[tuple[str, Counters]], reference: int = 0) -> list[str]:
    """Return a table with a row for each part and a column for each class of instructions that occurs.

    If there are too many columns, the rarest share one. Numbers are percentages of the whole, or of the part itself."""
    total = added(counters for _, counters in parts).instructions
    columns = [name for name in CLASSES if name in total]
    rare: list[InstructionClass] = []
    while True:
        groups = [(name, [name]) for name in columns] + ([("rest", rare)] if rare else [])
        rows = [(title, *(name for name, _ in groups))]
        for part, counters in parts:
            share = 100 / (reference or counters.warp_instructions)
            counts = [sum(counters.instructions.get(name, 0) for name in names) for _, names in groups]
            rows.append((part, *(f"{share * number:.1f}" if number else "" for number in counts)))
        result = table(rows, "<" + ">" * len(groups))
        if max(map(len, result)) <= WIDTH or not columns:
            return result
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
        for name, (requests, bytes_, moved, minimum) in traffic.items():
            if requests:
                times = f"{moved / minimum:.2f}" if moved != minimum else ""
                yield name, short(requests), in_units(bytes_), short(moved), units, short(minimum), times


# ---- lines -------------------------------------------------------------------------------------------------------

_OF_A_LINE = ("instructions", "share", "sectors", "least", "wavefronts", "least", "tensor flops")


def _lines(kernel: KernelCounters) -> Iterator[list[str]]:
    """Yield the tables of a kernel's lines, most instructions first, without empty columns."""
    shown = list(kernel.lines.items())[:LINES_SHOWN]
    files = {line.file for line in kernel.lines}
    in_one_file = f" of {Path(*files).name}" if len(files) == 1 else ""
    names = [str(line.number) if in_one_file and line.number else str(line) for line, _ in shown]
    instructions = kernel.total.warp_instructions
    numbers = [_OF_A_LINE, *(_numbers(counters, instructions) for _, counters in shown)]
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
    yield [f"{title} and class, in percent of its instructions:", *_mix("line", parts, instructions)]


def _numbers(counters: Counters, total: int) -> tuple[str, ...]:
    instructions = counters.warp_instructions
    memory = counters.counted or Memory()
    of_global, of_shared = memory.all_global, memory.all_shared
    traffic = (of_global.sectors, of_global.least_sectors, of_shared.wavefronts, of_shared.least_wavefronts)
    others = (short(number) if number else "" for number in (*traffic, counters.tensor_flops))
    return f"{instructions:,}", f"{100 * instructions / total:.1f} %", *others
