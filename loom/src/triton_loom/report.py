"""`python -m triton_loom report script.py`: a script under the sanitizer and the counters, and what they saw."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterable

from . import count, sanitize
from .counters import ArgumentCount, LaunchCount, Traffic


def report(script: str, args: list[str]) -> int:
    """Runs the script as if by itself; the number of findings."""
    from rich.console import Console

    sys.argv = [script, *args]
    with sanitize(collect=True) as seen, count() as counted:
        runpy.run_path(script, run_name="__main__")
    console = Console()
    console.print(table(counted.launches))
    for finding in seen.findings:
        console.print(str(finding), style="red", highlight=False, soft_wrap=True)
    programs = sum(x * y * z for x, y, z in (launch.grid for launch in counted.launches))
    console.print(
        f"{len(counted.launches):,} launches, {programs:,} programs, "
        f"{sum(launch.dot_flops for launch in counted.launches):,} flops in dots, {len(seen.findings)} findings"
    )
    return len(seen.findings)


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
