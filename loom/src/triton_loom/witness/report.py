"""What the sanitizer and the counters saw, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from .counters import ArgumentCount, Counter, LaunchCount, Traffic
from .sanitizer import Sanitizer


def report(counted: Counter, seen: Sanitizer) -> None:
    """Prints a table of what launches moved, the findings, and what became of each launch."""
    from rich.console import Console

    console = Console()
    launches, findings = counted.launches, seen.findings
    console.print(table(launches))
    for finding in findings:
        console.print(str(finding), style="red", highlight=False, soft_wrap=True)
    programs = sum(x * y * z for x, y, z in (launch.grid for launch in launches))
    console.print(
        f"{len(launches):,} launches, {programs:,} programs, "
        f"{sum(launch.dot_flops for launch in launches):,} flops in dots, {len(findings)} findings"
    )
    console.print(seen.summary, highlight=False, soft_wrap=True)


def table(launches: Iterable[LaunchCount]) -> object:
    """A row for each tensor that a kernel loads or stores; launches of one kernel are added up."""
    from rich.table import Table

    made = Table(
        title="bytes moved", caption="per program, per launch: 32-byte sectors that each touches, added up"
    )
    made.add_column("kernel, tensor", overflow="fold")
    made.add_column("")
    for heading in ("requested", "distinct", "per program", "per launch"):
        made.add_column(heading, justify="right")
    kernels: dict[str, list[LaunchCount]] = {}
    for launch in launches:
        kernels.setdefault(launch.kernel, []).append(launch)
    for kernel, its in kernels.items():
        made.add_row(kernel if len(its) == 1 else f"{kernel} x {len(its):,}", style="bold")
        for name in its[0].arguments:
            counts = [launch.arguments[name] for launch in its if name in launch.arguments]
            for direction, traffic in _directions(counts):
                made.add_row(f"  {name}", direction, *map(in_units, traffic))
        made.add_section()
    return made


def in_units(number: int) -> str:
    """A number of bytes in few characters."""
    for unit in ("B", "kB", "MB"):
        if number < 10_000:
            return f"{number:,.4g} {unit}"
        number /= 1000  # type: ignore[assignment]
    return f"{number:,.4g} GB"


def _directions(counts: list[ArgumentCount]) -> Iterable[tuple[str, Traffic]]:
    for direction in ("loads", "stores"):
        sum_ = Traffic()
        for count_ in counts:
            sum_ = sum_.plus(getattr(count_, direction))
        if sum_.requested:
            yield direction, sum_
