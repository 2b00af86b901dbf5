"""The recorded mistakes of loom/tests/mistakes under the sanitizers of Loom and of triton-viz, side by side.

    pip install triton-viz
    python loom/benchmarks/beside_triton_viz.py

Each tool runs in a process of its own, every mistake as it shipped and corrected. A mistake counts as flagged if the
tool reports anything while it runs as it shipped; a flagged correction is a false alarm. Overflow would take gigabytes,
so both tools get tensors of the meta device there. Cases that a tool can't run are counted separately. The first launch
is that of the smallest kernel, after Triton's own preparations and with an empty cache.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SECONDS = 30  # for one run of one case


# ---- a tool, in its own process --------------------------------------------------------------------------


def flags_of_loom() -> Callable[[Callable[[], Any]], int]:
    """Return a function that runs a launch under Loom and returns the number of findings."""
    import triton_loom

    def findings(run: Callable[[], Any]) -> int:
        with triton_loom.sanitize(collect=True) as seen:
            run()
        return len(seen.findings)

    return findings


def flags_of_triton_viz() -> Callable[[Callable[[], Any]], int]:
    """Return a function that runs a launch under triton-viz and returns the number of findings.

    triton-viz wraps kernels when they are defined, as its command does."""
    import triton
    import triton_viz
    from triton_viz.clients import Sanitizer

    jit, clients = triton.jit, []

    def traced(fn: Any = None, **options: Any) -> Any:
        if fn is None:
            return lambda fn: traced(fn, **options)
        clients.append(Sanitizer(abort_on_error=False))
        return triton_viz.trace(client=clients[-1])(jit(fn, **options))

    triton.jit = traced

    def findings(run: Callable[[], Any]) -> int:
        for client in clients:
            client.records.clear()
        run()
        return sum(len(client.records) for client in clients)

    return findings


@contextmanager
def limited() -> Iterator[None]:
    """Raise `TimeoutError` in a `with` block that takes more than SECONDS."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def outcome(findings: Callable[[Callable[[], Any]], int], run: Callable[[], Any]) -> str:
    """Return "flagged", "silent", or the reason why the case could not be run."""
    try:
        with limited():
            return "flagged" if findings(run) else "silent"
    except Exception as error:
        return f"{type(error).__name__}: {error}".split("\n")[0][:120]


def first_launch(findings: Callable[[Callable[[], Any]], int]) -> float:
    """Return the seconds that the first launch takes."""
    import torch
    import triton.experimental.gluon  # noqa: F401
    from smallest import double
    from triton.runtime.cache import triton_key

    triton_key()
    x, y = torch.ones(64), torch.zeros(64)
    start = time.perf_counter()
    findings(lambda: double[(1,)](x, y, 64, BLOCK=64))
    return time.perf_counter() - start


def measure(tool: str) -> None:
    """Print a line of JSON for each mistake, and one for the first launch."""
    findings = {"triton-loom": flags_of_loom, "triton-viz": flags_of_triton_viz}[tool]()
    sys.path += [str(HERE.parent / "tests"), str(HERE)]
    print(json.dumps({"first_launch": first_launch(findings)}), flush=True)
    from mistakes import MISTAKES

    for case in MISTAKES:
        shipped, corrected = (
            outcome(findings, functools.partial(case.run, fixed=fixed, dry=case.dry))
            for fixed in (False, True)
        )
        row = {"case": str(case), "kind": case.kind, "shipped": shipped, "corrected": corrected}
        print(json.dumps(row), flush=True)


# ---- both ----------------------------------------------------------------------------------------------------


def rows_of(tool: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as cache:
        run = subprocess.run(
            [sys.executable, __file__, "--tool", tool],
            capture_output=True,
            text=True,
            env={**os.environ, "TRITON_CACHE_DIR": cache},
        )
    if run.returncode:
        sys.exit(run.stderr)
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    """Print both tools' results by kind of mistake, and the cases that could not be run."""
    packages = ("triton-loom", "triton-viz", "triton", "torch")
    print(date.today().isoformat(), *(f"{name} {version(name)}" for name in packages), sep=", ")
    for tool in packages[:2]:
        first, *rows = rows_of(tool)
        cases = Counter(row["kind"] for row in rows)
        flagged = Counter(row["kind"] for row in rows if row["shipped"] == "flagged")
        alarms = sum(row["corrected"] == "flagged" for row in rows)
        print(f"\n{tool}: {flagged.total()} of {len(rows)} flagged, {alarms} false alarms, ", end="")
        print(f"first launch {first['first_launch']:.2f} s")
        for kind, number in cases.items():
            print(f"  {kind}: {flagged[kind]} of {number}")
        for row in rows:
            for version_run in ("shipped", "corrected"):
                if row[version_run] not in ("flagged", "silent"):
                    print(f"  not run: {row['case']} ({version_run}): {row[version_run]}")


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of this checkout"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", help=argparse.SUPPRESS)
    if tool := parser.parse_args().tool:
        measure(tool)
    else:
        main()
