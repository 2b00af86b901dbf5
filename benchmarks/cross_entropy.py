"""Cross entropy on this CPU, beside torch.compile, eager PyTorch and a plain copy.

    python benchmarks/cross_entropy.py [--quick] [--only NAME] [--json FILE]

How they are timed is said in `contests.py`. The baselines are F.cross_entropy of
the same logits, compiled and as it is. A backward is timed by itself: the graph of one forward is walked again and
again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from contests import Contest, compiled, main
from torch import Tensor

import weft

ROWS = 1024
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


if __name__ == "__main__":
    main(
        __doc__,
        [
            (f"{make.__name__} · {ROWS}x{cols} ({model})", functools.partial(make, rows=ROWS, cols=cols))
            for model, cols in VOCABULARIES.items()
            for make in (forward, backward)
        ],
    )
