"""Norms and quantisers on this CPU, beside torch.compile, eager PyTorch and a plain copy.

    python benchmarks/norm_and_quantize.py [--quick] [--json FILE]

The contenders of a row run in one process, in turn, on all cores; a figure is the median of 15 rounds after a
warm-up. `of copy` is the share of the machine's copy bandwidth: the time to copy as many bytes as the op must move,
taken in the same rounds, over the op's. Results are compared before anything is timed, and torch.compile must
really have made parallel C++. The C allocator is told to keep its pages, as the one of a GPU does: otherwise every
contender spends most of its time on page faults of its fresh outputs.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import weft

EPS = 1e-6
SHAPES = ((8192, 2048), (4096, 7168))
Call = Callable[[], Any]


@dataclass(frozen=True)
class Contest:
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


# ---- the same results in plain PyTorch -------------------------------------------------------------------


def quantize_rows(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """1x128 e4m3 with TransformerEngine's power-of-two scales."""
    groups = y.float().unflatten(-1, (-1, 128))
    amax = groups.abs().amax(-1)
    factor = torch.where(amax > 0, 448.0 / amax, 1.0)
    factor = (factor.view(torch.int32) & 0x7F800000).view(torch.float32)
    codes = (groups * factor[..., None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).flatten(-2)
    return codes, (1.0 / factor).t().contiguous().t()


def quantize_both(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return *quantize_rows(y), *quantize_rows(y.t())


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    h = x.float()
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * weight.float()


def rms_norm_rows(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return quantize_rows(rms_norm(x, weight))


def rms_norm_both(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return quantize_both(rms_norm(x, weight))


def residual_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    h = x + residual
    return rms_norm(h, weight).to(x.dtype), h


def rms_norm_backward(
    x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    h, d = x.float(), dy.float()
    z = h * rstd[:, None]
    t = d * weight.float()
    dx = rstd[:, None] * (t - z * (t * z).mean(-1, keepdim=True))
    return dx.to(x.dtype), (d * z).sum(0).to(weight.dtype)


# ---- contests --------------------------------------------------------------------------------------------


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


def parts(q: weft.QTensor) -> tuple[torch.Tensor, ...]:
    return tuple(part for copy in (q.rowwise, q.columnwise) if copy is not None for part in copy[:2])


def contests(only: str = "") -> list[Callable[[], Contest]]:
    """Those whose name contains `only`; each is made when it is its turn."""
    named = [
        (f"{name} · {rows}x{cols}", make, rows, cols)
        for rows, cols in SHAPES
        for name, make in CONTESTS.items()
    ]
    return [functools.partial(make, name, rows, cols) for name, make, rows, cols in named if only in name]


def tensors(rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, another one like it, and a weight."""
    torch.manual_seed(0)
    return tuple(torch.randn(shape).bfloat16() for shape in ((rows, cols), (rows, cols), (cols,)))  # type: ignore


def norm_rows(name: str, rows: int, cols: int) -> Contest:
    x, _, weight = tensors(rows, cols)

    def ours() -> Any:
        return parts(weft.rms_norm(x, weight, eps=EPS, quantize="1x128"))

    return contest(name, ours, rms_norm_rows, (x, weight), 3 * x.numel() + x.numel() // 32, 1.5)


def norm_both(name: str, rows: int, cols: int) -> Contest:
    x, _, weight = tensors(rows, cols)

    def ours() -> Any:
        return parts(weft.rms_norm(x, weight, eps=EPS, quantize="1x128", columnwise=True))

    return contest(name, ours, rms_norm_both, (x, weight), 4 * x.numel() + x.numel() // 16, 1.5)


def norm_backward(name: str, rows: int, cols: int) -> Contest:
    x, dy, weight = tensors(rows, cols)
    rstd = torch.rsqrt(x.float().square().mean(-1) + EPS)
    op, needs = weft.catalogue["norm_backward"], [True, True, False, False, False]

    def ours() -> Any:
        return tuple(op(x, dy, None, weight, None, None, rstd, None, 0.0, "fp32", needs))

    return contest(name, ours, rms_norm_backward, (x, weight, rstd, dy), 6 * x.numel(), 1.5)


def residual_norm(name: str, rows: int, cols: int) -> Contest:
    x, residual, weight = tensors(rows, cols)

    def ours() -> Any:
        return weft.rms_norm(x, weight, eps=EPS, residual=residual)

    return contest(name, ours, residual_rms_norm, (x, residual, weight), 8 * x.numel(), 1.2)


def rows_only(name: str, rows: int, cols: int) -> Contest:
    x, _, _ = tensors(rows, cols)

    def ours() -> Any:
        return parts(weft.quantize(x, "1x128"))

    return contest(name, ours, quantize_rows, (x,), 3 * x.numel() + x.numel() // 32, 1.5)


def rows_and_columns(name: str, rows: int, cols: int) -> Contest:
    x, _, _ = tensors(rows, cols)

    def ours() -> Any:
        return parts(weft.quantize(x, "1x128", columnwise=True))

    return contest(name, ours, quantize_both, (x,), 4 * x.numel() + x.numel() // 16, 1.5)


CONTESTS = {
    "rms_norm + 1x128, rows": norm_rows,
    "rms_norm + 1x128, rows and columns": norm_both,
    "rms_norm backward": norm_backward,
    "residual + rms_norm": residual_norm,
    "quantize 1x128, rows": rows_only,
    "quantize 1x128, rows and columns": rows_and_columns,
}


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 15")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()
    keep_pages()
    results = []
    for make in track(contests(options.only), description="measuring", transient=True):
        results.append(measure(make(), 5 if options.quick else 15))
    table = Table(
        title=f"{torch.get_num_threads()} threads, torch {torch.__version__}; milliseconds, measured here"
    )
    for title in ("", "weft", "torch.compile", "eager", "vs compile", "to reach", "vs eager", "of copy"):
        table.add_column(title, justify="left" if not title else "right")
    for r in results:
        ratio = r.compiled_ms / r.ours_ms
        colour = "green" if ratio >= r.target else "red"
        table.add_row(
            r.name, f"{r.ours_ms:.2f}", f"{r.compiled_ms:.2f}", f"{r.eager_ms:.1f}", f"[{colour}]{ratio:.2f}[/]",
            f"{r.target:.1f}", f"{r.eager_ms / r.ours_ms:.1f}", f"{r.copy_ms / r.ours_ms:.0%}",
        )  # fmt: skip
    Console(width=130).print(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(r) for r in results], file, indent=2)


if __name__ == "__main__":
    main()
