"""Show measurements: tables for terminals and pages, geometric means, a picture, a comparison of two reports."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...cli.screen import Refused
from ..commands.reports import read_report
from .clocks import Times
from .contenders import NAMES
from .measuring import SCHEMA, Row

NOISE = 0.05  # smaller changes of a median are ignored, whatever the spread


def read(path: Path) -> dict[str, Any]:
    """Return a report, with its rows as `Row`s."""
    report = read_report(path, ("weft bench",), SCHEMA)
    try:
        return {**report, "rows": [Row.of(row) for row in report["rows"]]}
    except (KeyError, TypeError) as error:
        raise Refused(f"{path} is no report of `weft bench`: {type(error).__name__}: {error}") from None


def seen(rows: Sequence[Row]) -> list[str]:
    """Return the contenders that have a time somewhere."""
    return [name for name in NAMES if any(row.ratio(name) is not None for row in rows)]


def geometric_mean(ratios: Iterable[float | None]) -> float | None:
    logs = [math.log(ratio) for ratio in ratios if ratio is not None]
    return round(math.exp(statistics.mean(logs)), 3) if logs else None


def means(rows: Sequence[Row]) -> dict[str, Any]:
    """Return geometric means of the speedup over each contender: over all rows, and by op."""
    contenders = seen(rows)
    ops = dict.fromkeys(row.op for row in rows)
    return {
        "all": {name: geometric_mean(row.ratio(name) for row in rows) for name in contenders},
        "by_op": {
            op: {name: geometric_mean(row.ratio(name) for row in rows if row.op == op) for name in contenders}
            for op in ops
        },
    }


# ---- tables -----------------------------------------------------------------------------------------------


def _three(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.3g}{unit}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _speedup(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


FIGURES = ("ms", "p20, p80", "GB/s", "of copy", "TFLOPS", "of mm", "MB")
"""Weft's median time and percentiles, its rates for the minimum of bytes and for products, also as shares of the rates
of a copy and of the best product in the same rounds, and the peak memory that it allocates."""


def figures(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield headings, and a line for each row about Weft alone."""
    yield ["workload", *FIGURES]
    for row in rows:
        ours, bandwidth = row.times.get("weft"), row.bandwidth()
        yield [
            row.workload,
            "-" if ours is None else f"{ours.p50:.3g}",
            "-" if ours is None else f"{ours.p20:.3g}, {ours.p80:.3g}",
            "-" if bandwidth is None else f"{bandwidth:.1f}",
            _percent(row.ratio("copy")),
            _three(row.tflops()),
            _percent(row.share_of_product()),
            "-" if "weft" not in row.memory else f"{row.memory['weft'] / 1e6:.3g}",
        ]


def ratios(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield headings, a line for each row about Weft against others, and the geometric means."""
    contenders = seen(rows)
    yield ["workload", *(f"x {name}" for name in contenders), *(f"{name}, MB" for name in contenders)]
    for row in rows:
        memory = (f"{row.memory[name] / 1e6:.3g}" if name in row.memory else "-" for name in contenders)
        yield [row.workload, *(_speedup(row.ratio(name)) for name in contenders), *memory]
    over_all = means(rows)["all"]
    yield ["geometric mean", *(_speedup(over_all[name]) for name in contenders), *[""] * len(contenders)]


def joined(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield the lines of both tables joined, for a page."""
    left, right = list(figures(rows)), list(ratios(rows))
    left.append(["geometric mean", *[""] * len(FIGURES)])
    for one, other in zip(left, right, strict=True):
        yield [*one, *other[1 : 1 + len(seen(rows))]]


def markdown(lines: Iterable[Sequence[str]]) -> Iterator[str]:
    headings, *rest = lines
    yield f"| {' | '.join(headings)} |"
    yield "|---|" + "---:|" * (len(headings) - 1)
    for line in rest:
        yield f"| {' | '.join(line)} |"


def worst(rows: Sequence[Row], contender: str, count: int = 3) -> list[Row]:
    """Return the rows in which a contender is fastest relative to Weft, starting with the fastest."""
    matches = [(ratio, row) for row in rows if (ratio := row.ratio(contender)) is not None]
    return [row for _, row in sorted(matches, key=lambda one: one[0])[:count]]


def page(report: dict[str, Any]) -> Iterator[str]:
    """Yield docs/bench.md's section on the committed run, as `weft bench show FILE --format markdown` prints it."""
    rows, over_all = report["rows"], means(report["rows"])["all"]
    yield "<!-- made: weft bench show docs/runs/bench.json --format markdown -->"
    yield f"{report['machine']}; {report['date'][:10]}, torch {report['torch']}, triton {report['triton']}, Weft"
    yield f"{report['weft']}; {report['rounds']} rounds; the machine's load was {report['load']} at the end."
    yield ""
    yield "Geometric means of how many times as fast Weft is:"
    yield ""
    for name, mean in over_all.items():
        *others, largest = sorted((ratio, row.op) for row in rows if (ratio := row.ratio(name)) is not None)
        line = f"- **{mean:.2f}** times `{name}`, over {len(others) + 1} workloads"
        if others:
            without = statistics.geometric_mean(ratio for ratio, _ in others)
            line += f"; {without:.2f} without the largest, `{largest[1]}`"
        yield line
    yield ""
    yield f"Slowest beside `compile`: {', '.join(f'`{row.op}`' for row in worst(rows, 'compile'))}."
    yield ""
    yield from markdown(joined(rows))
    yield "<!-- /made -->"


def reasons(rows: Sequence[Row]) -> Iterator[str]:
    """Yield why contenders have no time, and the notes on rows: each reason once."""
    ops_by_reason: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, reason in (*row.left_out.items(), *row.notes.items()):
            ops_by_reason.setdefault((name, reason), []).append(row.op)
    for (name, reason), ops in ops_by_reason.items():
        where = ops[0] if len(ops) == 1 else f"{len(ops)} workloads"
        yield f"{name}, {where}: {reason}"


def title_of(report: dict[str, Any]) -> str:
    return (
        f"Measured on {report['device']} ({report['machine']}), {report['date'][:10]}, torch {report['torch']}: "
        "medians of rounds in turn"
    )


def products_table(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield the TFLOPS of each contender in products."""
    contenders = ["weft", *seen(rows)]
    yield ["m x n x k", "formats", *(f"{name}, TFLOPS" for name in contenders), "of product"]
    for row in rows:
        _, name, pair, _ = row.workload.split(":")
        rates = (_three(row.tflops(one)) for one in contenders)
        yield [name, pair, *rates, _percent(row.share_of_product())]


# ---- plot -------------------------------------------------------------------------------------------------


def plot(report: dict[str, Any], path: Path) -> None:
    """Plot the speedup over each contender, by op, on a logarithmic axis; needs matplotlib."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "weft"  # equal reports give equal files
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    by_op = means(report["rows"])["by_op"]
    contenders = seen(report["rows"])
    main = "compile" if "compile" in contenders else contenders[0]
    order = sorted(by_op, key=lambda op: (by_op[op][main] is not None, by_op[op][main] or 0.0))
    figure = Figure(figsize=(8, 1.4 + 0.24 * len(order)), layout="constrained")
    axes = figure.add_subplot()
    colors = ("#9aa3ad", "#3f51b5", "#e08214", "#1b7837", "#b2182b", "#762a83", "#35978f")
    for name, color in zip(contenders, colors, strict=False):
        measured = [op for op in order if by_op[op][name] is not None]
        values, positions = [by_op[op][name] for op in measured], [order.index(op) for op in measured]
        axes.scatter(values, positions, s=34, color=color, label=name, zorder=3)
    for position, op in enumerate(order):
        ratios_of = [value for value in by_op[op].values() if value is not None]
        if ratios_of:
            axes.plot(
                [min(ratios_of), max(ratios_of)], [position, position], color="#d5d9de", linewidth=1, zorder=1
            )
    axes.axvline(1.0, color="#333333", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(order)), order)
    axes.set_ylim(-0.7, len(order) - 0.3)
    axes.set_xlabel("times as fast as …: right of 1 Weft is the faster one")
    axes.grid(axis="x", color="#eceff1", zorder=0)
    axes.legend(loc="lower right")
    axes.set_title(f"{report['machine']}, {report['date'][:10]}", fontsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


# ---- two reports ------------------------------------------------------------------------------------------


def verdict(before: Times, after: Times) -> str:
    """Return what the change of a median means in view of the spread of both."""
    change = after.p50 / before.p50 - 1
    disjoint = after.p20 > before.p80 or after.p80 < before.p20
    if abs(change) < NOISE or not disjoint:
        return "same"
    return "slower" if change > 0 else "faster"


def compared(before: dict[str, Any], after: dict[str, Any]) -> Iterator[list[str]]:
    """Yield a line with a verdict for each workload that both reports have."""
    yield ["workload", "before, ms", "after, ms", "change", "verdict"]
    older = {row.workload: row.times["weft"] for row in before["rows"] if "weft" in row.times}
    for row in after["rows"]:
        if row.workload in older and "weft" in row.times:
            old, new = older[row.workload], row.times["weft"]
            change = f"{new.p50 / old.p50 - 1:+.0%}"
            yield [row.workload, f"{old.p50:.3g}", f"{new.p50:.3g}", change, verdict(old, new)]
