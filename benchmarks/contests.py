"""How contenders are timed here: in one process, in turn, on all cores, beside a plain copy of the least bytes.

A figure is the median of 15 rounds after a warm-up. `of copy` is the share of the machine's copy bandwidth: the time
to copy as many bytes as the op must move, taken in the same rounds, over the op's. Results are compared before
anything is timed, and torch.compile must really have made parallel C++. The C allocator is told to keep its pages, as
the one of a GPU does: otherwise every contender spends most of its time on page faults of its fresh outputs.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

Call = Callable[[], Any]


@dataclass(frozen=True)
class Contest:
    """Two ways to the same results; torch.compile and eager mode run the second."""

    name: str
    ours: Call
    compiled: Call
    eager: Call
    bytes: int
    target: float  # times faster than torch.compile


@dataclass(frozen=True)
class Result:
    name: str
    ours_ms: float
    compiled_ms: float
    eager_ms: float
    copy_ms: float
    target: float

    @property
    def ratio(self) -> float:
        return self.compiled_ms / self.ours_ms


def compiled(function: Callable[..., Any], *inputs: torch.Tensor) -> Callable[..., Any]:
    """torch.compile, with proof that it is compiled and parallel: an eager fallback would flatter us."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    fast = torch.compile(function, fullgraph=True)
    _, sources = run_and_get_code(fast, *inputs)
    assert any("#pragma omp" in source for source in sources), "Inductor made no parallel C++"
    return fast


def contest(
    name: str,
    ours: Call,
    theirs: Callable[..., Any],
    inputs: tuple[torch.Tensor, ...],
    size: int,
    target: float,
) -> Contest:
    fast = compiled(theirs, *inputs)
    mine, expected = ours(), theirs(*inputs)
    mine, expected = (r if isinstance(r, tuple) else (r,) for r in (mine, expected))
    for ours_part, theirs_part in zip(mine, expected, strict=True):
        assert ours_part.shape == theirs_part.shape, (name, ours_part.shape, theirs_part.shape)
        near = torch.isclose(ours_part.float(), theirs_part.float(), rtol=0.13, atol=1e-2).float().mean()
        assert near > 0.999, f"{name}: only {near:.2%} of the results agree"
    return Contest(name, ours, lambda: fast(*inputs), lambda: theirs(*inputs), size, target)


def measure(match: Contest, rounds: int) -> Result:
    source = torch.empty(match.bytes // 2, dtype=torch.uint8).fill_(1)
    calls: list[Call] = [match.ours, match.compiled, match.eager, source.clone]
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds + 3):
        for call, found in zip(calls, times, strict=True):
            if call is match.eager and turn > 5:  # slow, and not what is at stake
                continue
            begin = time.perf_counter()
            call()
            if turn >= 3:
                found.append((time.perf_counter() - begin) * 1e3)
    return Result(match.name, *(statistics.median(found) for found in times), target=match.target)


def keep_pages() -> None:
    """Start again with an allocator that never returns memory to the system."""
    if os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "4294967296") and "WEFT_BENCH" not in os.environ:
        os.environ |= {"MALLOC_TRIM_THRESHOLD_": "17179869184", "MALLOC_ARENA_MAX": "1", "WEFT_BENCH": "1"}
        os.execv(sys.executable, [sys.executable, *sys.argv])


def main(description: str, makers: Sequence[tuple[str, Callable[[str], Contest]]]) -> None:
    """The command line of a benchmark: named contests, each made when it is its turn."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 15")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()
    keep_pages()
    chosen = [functools.partial(make, name) for name, make in makers if options.only in name]
    results = [
        measure(make(), 5 if options.quick else 15)
        for make in track(chosen, description="measuring", transient=True)
    ]
    Console(width=130).print(table(results))
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(r) for r in results], file, indent=2)


def table(results: Sequence[Result]) -> Table:
    shown = Table(
        title=f"{torch.get_num_threads()} threads, torch {torch.__version__}; milliseconds, measured here"
    )
    for title in ("", "weft", "torch.compile", "eager", "vs compile", "to reach", "vs eager", "of copy"):
        shown.add_column(title, justify="left" if not title else "right")
    for r in results:
        colour = "green" if r.ratio >= r.target else "red"
        shown.add_row(
            r.name, f"{r.ours_ms:.2f}", f"{r.compiled_ms:.2f}", f"{r.eager_ms:.1f}", f"[{colour}]{r.ratio:.2f}[/]",
            f"{r.target:.1f}", f"{r.eager_ms / r.ours_ms:.1f}", f"{r.copy_ms / r.ours_ms:.0%}",
        )  # fmt: skip
    if results:
        mean = math.exp(statistics.mean(math.log(r.ratio) for r in results))
        shown.add_section()
        shown.add_row("geometric mean", "", "", "", f"{mean:.2f}", "", "", "")
    return shown
