"""Speed and latency of Triton kernels on the CPU, compared with PyTorch and with their targets.

    python loom/benchmarks/bench.py [--quick] [--only NAME] [--json FILE]

Contenders of a row run in one process, in turn, on all cores. A figure is the median of at least 15 runs
after a warm-up; a ratio above 1 means that the Triton kernel is faster. Results are compared before anything
is timed, and if the other contender is torch.compile, Inductor must really have generated parallel C++.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kernels
import torch
import triton
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

HERE = Path(__file__).parent
WARM_UP = 3

Call = Callable[[], Any]


@dataclass(frozen=True)
class Contest:
    """A Triton kernel against one or more PyTorch implementations."""

    name: str
    ours: Call
    theirs: dict[str, tuple[Call, float]]  # name -> call, ratio to reach
    compare: Callable[[Any, Any], None]


@dataclass(frozen=True)
class Speed:
    name: str
    against: str
    ours_ms: float
    theirs_ms: float
    ratio: float
    target: float


@dataclass(frozen=True)
class Latency:
    name: str
    seconds: float
    target: float | None  # None: for information


def compiled(function: Callable[..., Any], *inputs: torch.Tensor) -> Callable[..., Any]:
    """Return torch.compile's function, checked to be compiled and parallel: an eager fallback would flatter us."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    fast = torch.compile(function, fullgraph=True)
    _, sources = run_and_get_code(fast, *inputs)
    assert any("#pragma omp" in source for source in sources), "Inductor made no parallel C++"
    return fast


def rms_norm_quant() -> Contest:
    x, weight = torch.randn(8192, 2048).bfloat16(), (torch.rand(2048) + 0.5).bfloat16()
    reference = kernels.rms_norm_quant_torch
    fast = compiled(reference, x, weight)

    def compare(ours: Any, theirs: Any) -> None:
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=0)
        # y occasionally differs in its last bit, which sometimes moves a code to its neighbor.
        distance = (ours[0].view(torch.int8).int() - theirs[0].view(torch.int8).int()).abs()
        assert distance.max() <= 1, f"codes differ by up to {distance.max()}"
        assert distance.float().mean() < 1e-3, f"{distance.float().mean():.2%} of the codes differ"

    return Contest(
        "RMSNorm + 1x128 FP8, 8192x2048 bf16",
        lambda: kernels.rms_norm_quant(x, weight),
        {"torch.compile": (lambda: fast(x, weight), 1.5), "eager": (lambda: reference(x, weight), 12.0)},
        compare,
    )


def softmax() -> Contest:
    x = torch.randn(4096, 8192)
    fast = compiled(kernels.softmax_torch, x)
    return Contest(
        "row softmax, 4096x8192 fp32",
        lambda: kernels.softmax(x),
        {"torch.compile": (lambda: fast(x), 1.0)},
        lambda ours, theirs: torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0),
    )


def layer_norm() -> Contest:
    x = torch.randn(4096, 4096).bfloat16().requires_grad_()
    weight, bias = (torch.rand(4096).bfloat16().requires_grad_() for _ in range(2))
    dy = torch.randn(4096, 4096).bfloat16()
    inputs = (x, weight, bias)
    fast = compiled(kernels.layer_norm_torch, *inputs)

    def both_ways(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        y = function(*inputs)
        return y, *torch.autograd.grad(y, inputs, dy)

    def compare(ours: Any, theirs: Any) -> None:
        for mine, other in zip(ours, theirs, strict=True):
            # Two bf16 roundings of nearly the same number, each within half an ulp of it.
            torch.testing.assert_close(
                mine, other, rtol=2**-7, atol=2**-7 * float(other.detach().abs().mean())
            )

    return Contest(
        "layer norm fwd+bwd, 4096x4096 bf16",
        lambda: both_ways(kernels.layer_norm),
        {"torch.compile": (lambda: both_ways(fast), 1.0)},
        compare,
    )


def cross_entropy() -> Contest:
    logits, labels = torch.randn(1024, 157_184).bfloat16(), torch.randint(0, 157_184, (1024,))

    def compare(ours: torch.Tensor, theirs: torch.Tensor) -> None:
        torch.testing.assert_close(
            ours, kernels.cross_entropy_torch(logits.float(), labels), rtol=1e-5, atol=0
        )
        # Eager rounds its losses, around 12, to bf16: first the log-probabilities, then the loss.
        torch.testing.assert_close(ours, theirs.float(), rtol=2**-7, atol=0)

    return Contest(
        "cross entropy fwd, 1024x157184 bf16",
        lambda: kernels.cross_entropy(logits, labels),
        {"eager": (lambda: kernels.cross_entropy_torch(logits, labels), 2.0)},
        compare,
    )


def matmul(dtype: torch.dtype, target: float) -> Contest:
    a, b = torch.randn(1024, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
    # Sums of 1024 products, around 32: float32 noise, and one rounding to the dtype.
    atol = 1e-3 if dtype == torch.float32 else 32 * torch.finfo(dtype).eps
    return Contest(
        f"matmul, 1024x1024x1024 {'fp32' if dtype == torch.float32 else 'bf16'}",
        lambda: kernels.matmul(a, b),
        {"torch.mm": (lambda: torch.mm(a, b), target)},
        lambda ours, theirs: torch.testing.assert_close(ours, theirs, rtol=torch.finfo(dtype).eps, atol=atol),
    )


def matmul_int8(b_is: str) -> Contest:
    """Return the contest with b as [K, N], or as the transpose of [N, K] like weights."""
    a, b = (torch.randint(-128, 128, (1024, 1024), dtype=torch.int8) for _ in range(2))
    b = b if b_is == "[K, N]" else b.t()
    return Contest(
        f"matmul, 1024x1024x1024 int8, b {b_is}",
        lambda: kernels.matmul(a, b),
        {"torch._int_mm": (lambda: torch._int_mm(a, b), 0.7)},
        lambda ours, theirs: torch.testing.assert_close(ours, theirs, rtol=0, atol=0),
    )


def sort() -> Contest:
    x = torch.randn(64, 1024)
    return Contest(
        "sort of rows, one tile of 64x1024 fp32",
        lambda: kernels.sort(x),
        {"torch.sort": (lambda: torch.sort(x).values, 0.6)},
        lambda ours, theirs: torch.testing.assert_close(ours, theirs, rtol=0, atol=0),
    )


def vector_add() -> Contest:
    x, y = torch.randn(2**24), torch.randn(2**24)
    return Contest(
        "vector add, 2^24 fp32",
        lambda: kernels.add(x, y),
        {"torch.add": (lambda: torch.add(x, y), 0.9)},
        lambda ours, theirs: torch.testing.assert_close(ours, theirs, rtol=0, atol=0),
    )


CONTESTS: dict[str, Callable[[], Contest]] = {
    "rms_norm_quant": rms_norm_quant,
    "softmax": softmax,
    "layer_norm": layer_norm,
    "cross_entropy": cross_entropy,
    "matmul_fp32": lambda: matmul(torch.float32, 0.35),
    "matmul_bf16": lambda: matmul(torch.bfloat16, 0.15),
    "matmul_int8": lambda: matmul_int8("[K, N]"),
    "matmul_int8_turned": lambda: matmul_int8("[N, K]^T"),
    "sort": sort,
    "vector_add": vector_add,
}


def milliseconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def run(contest: Contest, rounds: Iterable[int]) -> Iterable[Speed]:
    calls = {"": contest.ours} | {against: call for against, (call, _) in contest.theirs.items()}
    results = {contender: call() for contender, call in calls.items()}
    for against in contest.theirs:
        contest.compare(results[""], results[against])
    del results
    for _ in range(WARM_UP):
        for call in calls.values():
            call()
    times: dict[str, list[float]] = {contender: [] for contender in calls}
    for _ in rounds:
        for contender, call in calls.items():
            times[contender].append(milliseconds(call))
    median = {contender: statistics.median(each) for contender, each in times.items()}
    for against, (_, target) in contest.theirs.items():
        ratio = median[against] / median[""]
        yield Speed(contest.name, against, median[""], median[against], ratio, target)


def first_launch(cache: str) -> dict[str, float]:
    """Return the times of the first launch in a process of its own, with this kernel cache."""
    environment = os.environ | {"TRITON_CACHE_DIR": cache}
    command = [sys.executable, str(HERE / "first_launch.py")]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True)
    if completed.returncode:
        raise RuntimeError(completed.stderr)
    return json.loads(completed.stdout)


def first_launches(rounds: Iterable[int]) -> Iterable[Latency]:
    cold, warm = [], []
    for _ in rounds:
        with tempfile.TemporaryDirectory() as cache:
            cold.append(first_launch(cache))
            warm.append(first_launch(cache))
    median = statistics.median
    yield Latency("cold compile of the RMSNorm kernel", median(each["first_launch"] for each in cold), 0.8)
    sanitized = median(each["first_sanitized_launch"] for each in cold)
    yield Latency("first launch of a small kernel under sanitize()", sanitized, 0.6)
    yield Latency("warm start from the cache", median(each["first_launch"] for each in warm), 0.05)
    for description, key in (
        ("hash of its own sources", "hash_of_triton"),
        ("import of Gluon", "import_of_gluon"),
    ):
        times = [each[key] for each in cold + warm]
        yield Latency(f"Triton's {description}, once a process", median(times), None)


def launches(rounds: Iterable[int]) -> Iterable[Latency]:
    x, out = torch.zeros(1), torch.zeros(1)

    def thousand() -> None:
        for _ in range(1000):
            kernels.one_program_kernel[(1,)](x, out, 5)

    thousand()
    assert out.item() == 5
    per_launch = [milliseconds(thousand) / 1e3 / 1000 for _ in rounds]
    yield Latency("launch of a one-program kernel, host time", statistics.median(per_launch), 25e-6)


LATENCIES: dict[str, Callable[[Iterable[int]], Iterable[Latency]]] = {
    "first_launch": first_launches,
    "launch": launches,
}


def verdict(reached: bool) -> str:
    return "[green]reached[/]" if reached else "[red]missed[/]"


def speed_table(rows: list[Speed]) -> Table:
    table = Table("kernel", "against", title="Speed", title_justify="left")
    for column in ("Triton, ms", "PyTorch, ms", "ratio", "to reach", ""):
        table.add_column(column, justify="right")
    for row in rows:
        figures = (f"{row.ours_ms:.2f}", f"{row.theirs_ms:.2f}", f"{row.ratio:.2f}", f"{row.target:.2f}")
        table.add_row(row.name, row.against, *figures, verdict(row.ratio >= row.target))
    return table


def time_text(seconds: float) -> str:
    if seconds >= 0.1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def latency_table(rows: list[Latency]) -> Table:
    table = Table("what", title="Latency", title_justify="left")
    for column in ("time", "to reach", ""):
        table.add_column(column, justify="right")
    for row in rows:
        if row.target is None:
            table.add_row(row.name, time_text(row.seconds), "", "")
        else:
            figures = (time_text(row.seconds), time_text(row.target))
            table.add_row(row.name, *figures, verdict(row.seconds <= row.target))
    return table


def machine() -> dict[str, Any]:
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": model,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed and latency of Triton kernels on the CPU.")
    parser.add_argument(
        "--quick", action="store_true", help="5 runs instead of 15: for a rough impression only"
    )
    parser.add_argument(
        "--only", metavar="NAME", help=f"rows with this in their name: {', '.join(CONTESTS | LATENCIES)}"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    names = [name for name in [*CONTESTS, *LATENCIES] if (options.only or "") in name]
    if not names:
        parser.error(f"no row has {options.only!r} in its name; there are {', '.join(CONTESTS | LATENCIES)}")
    runs = 5 if options.quick else 15

    console = Console(width=None if sys.stdout.isatty() else 110)
    environment = machine()
    console.print(", ".join(f"{what} {value}" for what, value in environment.items()))
    torch.manual_seed(0)
    speeds: list[Speed] = []
    latencies: list[Latency] = []
    columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for name in names:
            rounds = progress.track(range(runs), description=name)
            if name in CONTESTS:
                speeds += run(CONTESTS[name](), rounds)
            else:
                latencies += LATENCIES[name](rounds)

    if speeds:
        console.print(speed_table(speeds))
    if latencies:
        console.print(latency_table(latencies))
    if options.json:
        figures = {
            "machine": environment,
            "runs": runs,
            "speed": [*map(asdict, speeds)],
            "latency": [*map(asdict, latencies)],
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
