"""Cross entropy on this CPU, beside torch.compile, eager PyTorch and a plain copy.

    python benchmarks/cross_entropy.py [--quick] [--rows N] [--json FILE]

How it is measured, and what the columns mean, stands in `norm_and_quantize.py`. The baselines are F.cross_entropy of
the same logits, compiled and as it is. A backward is timed by itself: the graph of one forward is walked again and
again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from norm_and_quantize import Contest, compiled, keep_pages, measure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import weft

VOCABULARIES = {"linghe": 157184, "gpt2": 50257}
Loss = Callable[[Tensor, Tensor], Tensor]


def tensors(rows: int, cols: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, cols, generator=generator).bfloat16()
    return logits, torch.randint(0, cols, (rows,), generator=generator)


def near(ours: Tensor, theirs: Tensor, what: str) -> None:
    """PyTorch rounds its loss to bf16, as the logits are."""
    ours, theirs = ours.float(), theirs.float()
    off = (ours - theirs).abs().max() / theirs.abs().max()
    assert off < 1e-2, f"{what}: off by {off:.1e} of the largest"


def forward(name: str, rows: int, cols: int) -> Contest:
    logits, target = tensors(rows, cols)
    fast = compiled(F.cross_entropy, logits, target)
    near(weft.cross_entropy(logits, target), F.cross_entropy(logits.float(), target), name)
    return Contest(
        name,
        lambda: weft.cross_entropy(logits, target),
        lambda: fast(logits, target),
        lambda: F.cross_entropy(logits, target),
        2 * logits.numel(),
        1.5,
    )


def backward(name: str, rows: int, cols: int) -> Contest:
    logits, target = tensors(rows, cols)
    torch._dynamo.reset()
    losses: tuple[Loss, ...] = (
        weft.cross_entropy,
        torch.compile(F.cross_entropy, fullgraph=True),
        F.cross_entropy,
    )
    calls = []
    for loss in losses:
        leaf = logits.detach().requires_grad_()
        calls.append(_walk(loss(leaf, target), leaf))
    near(calls[0](), calls[2](), name)
    return Contest(name, *calls, 4 * logits.numel(), 1.5)


def _walk(loss: Tensor, leaf: Tensor) -> Callable[[], Tensor]:
    return lambda: torch.autograd.grad(loss, leaf, retain_graph=True)[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 15")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()
    keep_pages()
    makers: list[Any] = [
        (make, f"{make.__name__} · {options.rows}x{cols} ({model})", cols)
        for model, cols in VOCABULARIES.items()
        for make in (forward, backward)
    ]
    results = []
    for make, name, cols in track(makers, description="measuring", transient=True):
        results.append(measure(make(name, options.rows, cols), 5 if options.quick else 15))
    table = Table(
        title=f"{torch.get_num_threads()} threads, torch {torch.__version__}; milliseconds, measured here"
    )
    for title in ("", "weft", "torch.compile", "eager", "vs compile", "to reach", "vs eager", "of copy"):
        table.add_column(title, justify="left" if not title else "right")
    for r in results:
        ratio = r.compiled_ms / r.ours_ms
        colour = "green" if ratio >= r.target else "red"
        table.add_row(
            r.name, f"{r.ours_ms:.1f}", f"{r.compiled_ms:.1f}", f"{r.eager_ms:.1f}", f"[{colour}]{ratio:.2f}[/]",
            f"{r.target:.1f}", f"{r.eager_ms / r.ours_ms:.1f}", f"{r.copy_ms / r.ours_ms:.0%}",
        )  # fmt: skip
    Console(width=130).print(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(r) for r in results], file, indent=2)


if __name__ == "__main__":
    main()
