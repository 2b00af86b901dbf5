"""The tables of an emulated GPU's report, for a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..tables import in_units, table
from .counters import CLASSES, Counters, KernelCounters, Memory

WIDTH = 100
LINES_SHOWN = 12


def tables(kernels: Sequence[KernelCounters], *, lines: bool) -> str:
    """The kernels, what they asked of memory if that was counted, and the lines of each if they are asked for."""
    made = [_kernels(kernels), _classes(kernels), _memory(kernels)]
    made += [part for kernel in kernels if lines for part in _lines(kernel)]
    return "\n\n".join("\n".join(part) for part in made if part)


def short(number: int) -> str:
    """In at most nine characters."""
    return f"{number:,}" if number < 10_000_000 else f"{number / 1e6:,.0f} M"


def _kernels(kernels: Sequence[KernelCounters]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("kernel", "launches", "blocks", "warp instructions", "barriers", "tensor flops", "findings")
    ]
    for kernel in kernels:
        total = kernel.total
        did = (total.warp_instructions, total.barriers, total.tensor_flops)
        numbers = (kernel.launches, kernel.blocks, *did, kernel.findings)
        rows.append((kernel.kernel, *(f"{number:,.0f}" for number in numbers)))
    return table(rows, "<>>>>>>")


def _classes(kernels: Sequence[KernelCounters]) -> list[str]:
    mixes = [(kernel.kernel, kernel.total) for kernel in kernels]
    return ["by class of instructions, in percent:", *_mix("kernel", mixes)]


def _mix(title: str, parts: Sequence[tuple[str, Counters]], whole: int = 0) -> list[str]:
    """A row for each part, a column for each class of instructions that is in one of them. A number is a percentage of
    the whole, or else of the part itself."""
    columns = [name for name in CLASSES if any(name in counters.instructions for _, counters in parts)]
    rows = [(title, *columns)]
    for name, counters in parts:
        share = 100 / (whole or counters.warp_instructions)
        did = counters.instructions
        rows.append((name, *(f"{share * did[each]:.1f}" if each in did else "" for each in columns)))
    return table(rows, "<" + ">" * len(columns))


# ---- memory ------------------------------------------------------------------------------------------------------


def _memory(kernels: Sequence[KernelCounters]) -> list[str]:
    rows: list[tuple[str, ...]] = [("kernel", "memory", "requests", "bytes", "moved", "", "least", "")]
    for kernel in kernels:
        name = kernel.kernel
        for row in _directions(kernel.total.counted or Memory()):
            rows.append((name, *row))
            name = ""
    return ["what warps asked of memory:", *table(rows, "<<>>><><")] if len(rows) > 1 else []


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
                times = f"{moved / least:.2f} times the least" if moved != least else ""
                yield name, f"{requests:,}", in_units(bytes_), f"{moved:,}", units, f"{least:,}", times


# ---- lines -------------------------------------------------------------------------------------------------------

_OF_A_LINE = ("instructions", "share", "sectors", "least", "wavefronts", "least", "tensor flops")


def _lines(kernel: KernelCounters) -> Iterator[list[str]]:
    """Those with the most instructions first. Columns in which no line has anything are left out."""
    shown = list(kernel.lines.items())[:LINES_SHOWN]
    files = {line.file for line in kernel.lines}
    in_one_file = f" of {Path(*files).name}" if len(files) == 1 else ""
    names = [str(line.number) if in_one_file else str(line) for line, _ in shown]
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
