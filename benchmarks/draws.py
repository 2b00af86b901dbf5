"""Time draws from logits beside PyTorch: softmax and multinomial, argmax, or a sort, a cumsum and multinomial.

python benchmarks/draws.py [ROUNDS]         # the table of docs/decoding.md
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import weft

SHAPES = ((1, 128256), (8, 128256), (32, 151936))
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "greedy": {"temperature": 0.0},
    "top_k=50": {"top_k": 50},
    "top_p=0.9": {"top_p": 0.9},
    "flat, top_p=0.95": {"top_p": 0.95},
}


def logits_of(rows: int, cols: int, flat: bool) -> Tensor:
    """Return logits among which 300 stand out, like those of a language model, or none."""
    logits = torch.randn(rows, cols)
    if not flat:
        likely = torch.randint(cols, (rows, 300))
        logits.scatter_add_(1, likely, 8 + 2 * torch.randn(rows, 300))
    return logits.bfloat16()


def drawn_by_torch(logits: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Return tokens as a sampler of plain PyTorch draws them."""
    if temperature == 0.0:
        return logits.argmax(-1)
    z = logits.float() / temperature
    if not top_k and top_p == 1.0:
        return torch.multinomial(z.softmax(-1), 1)[:, 0]
    z, order = z.sort(-1, descending=True)
    if top_k:
        z[:, top_k:] = -torch.inf
    p = z.softmax(-1)
    p[p.cumsum(-1) - p >= top_p] = 0.0
    return order.gather(-1, torch.multinomial(p, 1))[:, 0]


def milliseconds(contenders: list[Callable[[], object]], rounds: int) -> list[float]:
    """Return the medians of interleaved calls."""
    times: list[list[float]] = [[] for _ in contenders]
    for _ in range(rounds + 2):
        for contender, each in zip(contenders, times, strict=True):
            begin = time.perf_counter()
            contender()
            each.append(1e3 * (time.perf_counter() - begin))
    return [statistics.median(each[2:]) for each in times]


def main(rounds: int = 15) -> None:
    print("| logits |", " | ".join(CASES), "|")
    print("|---" * (len(CASES) + 1) + "|")
    for rows, cols in SHAPES:
        cells = []
        seed, step = torch.arange(rows), torch.tensor(1)
        for name, options in CASES.items():
            logits = logits_of(rows, cols, "flat" in name)
            mine, its = milliseconds(
                [
                    partial(weft.sample, logits, seed=seed, step=step, **options),
                    partial(drawn_by_torch, logits, **options),
                ],
                rounds,
            )
            cells.append(f"{mine:.2g} and {its:.3g}")
        print(f"| {rows} x {cols:,} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
