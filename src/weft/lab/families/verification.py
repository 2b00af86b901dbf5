"""Verification of drafts: chosen tokens along chains and trees, and drafts with their distributions."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...ops import verify
from ..family import Family, Width
from ..problem import Call, Inputs, Size, Workload, run_op
from ..truth import Near

SHAPES: dict[str, tuple[Size, ...]] = {
    "deepseek-v3/mtp": ("rows", 4),
    "eagle3/tree": ("rows", 61),
    "odd/77": ("rows", 77),
    "llama3-8b/drafts": ("rows", 4, 128256),
    "qwen3-30b-a3b/drafts": ("rows", 6, 151936),
    "odd/1030-drafts": ("rows", 3, 1030),
}
_ACCEPTED: dict[str, tuple[str, ...]] = {
    "chain": ("deepseek-v3/mtp", "odd/77"),
    "tree": ("eagle3/tree", "odd/77"),
    "trees": ("odd/77",),  # of each request another one
}
_VERIFIED: dict[str, tuple[str, ...]] = {
    "chain": ("llama3-8b/drafts", "odd/1030-drafts"),
    "block": ("qwen3-30b-a3b/drafts", "odd/1030-drafts"),
    "greedy": ("odd/1030-drafts",),
}
_TWICE = "logits are read for the statistics of rows and again for all residuals, which need them"


def _few(inputs: Inputs, *shape: int) -> Tensor:
    """Draw tokens from a few, so that many drafts are chosen; some are negative."""
    return (inputs.normal(*shape, dtype=torch.float32) * 1.2 + 0.6).to(torch.int64)


def _build_accept(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    rows, nodes = shape
    parents = None
    if workload.options != "chain":
        # Three children for each node, from the first on; with other requests, some nodes are nobody's.
        parents = torch.arange(nodes - 1, device=inputs.device) // 3
    if workload.options == "trees":
        assert parents is not None
        parents = (parents - _few(inputs, rows, nodes - 1).clamp(0, 2)).to(torch.int32)
    tensors = {
        "chosen": _few(inputs, rows, nodes),
        "drafts": _few(inputs, rows, nodes - 1),
        "parents": parents,
    }
    return Call(functools.partial(run_op, "accept"), tensors)


def _build_verify(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    rows, nodes, cols = shape
    logits = inputs.normal(*shape, std=2.0)
    other = inputs.normal(rows, nodes - 1, cols, dtype=torch.float32)
    scores = logits[:, :-1].float() + 0.5 * other
    drafts = (scores + 1.3 * inputs.normal(rows, nodes - 1, cols, dtype=torch.float32)).argmax(-1)
    kwargs: dict[str, Any] = {"logits": logits, "drafts": drafts, "draft_probs": scores.softmax(-1)}
    device = inputs.device
    kwargs |= {"seed": torch.arange(rows, device=device) * 2**33, "step": torch.arange(rows, device=device)}
    temperature = inputs.normal(rows, mean=1.0, std=0.1, dtype=torch.float32)
    kwargs["temperature"] = 0.0 if workload.options == "greedy" else temperature
    return Call(verify, {**kwargs, "method": "block" if workload.options == "block" else "chain"})


WORKLOADS: tuple[Workload, ...] = (
    *(
        Workload("accept", name, options, SHAPES[name], 256, _build_accept, frozenset({"inference"}))
        for options, names in _ACCEPTED.items()
        for name in names
    ),
    *(
        Workload(
            "verify",
            name,
            options,
            SHAPES[name],
            64,
            _build_verify,
            frozenset({"inference"}),
            rereads=_TWICE if options == "block" else "",
            moves=1.5 if options == "block" else 1.02,
        )
        for options, names in _VERIFIED.items()
        for name in names
    ),
)


# ---- truth: one request after another -------------------------------------------------------------------------


def accept_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Walk from row to row in Python."""
    chosen, drafts = call["chosen"].tolist(), call["drafts"].tolist()
    nodes = len(chosen[0])
    parents = torch.arange(nodes - 1) if call["parents"] is None else call["parents"]
    parents = parents.expand(len(chosen), -1).tolist()
    tokens, lengths, paths = [], [], []
    for own, drafted, above in zip(chosen, drafts, parents, strict=True):
        path = [0]
        while True:
            row = path[-1]
            children = [
                j + 1
                for j in range(row, nodes - 1)
                if above[j] == row and drafted[j] == own[row] and own[row] >= 0
            ]
            if not children:
                break
            path.append(children[0])
        rest = [-1] * (nodes - len(path))
        tokens.append([own[row] for row in path] + rest)
        lengths.append(len(path) - 1)
        paths.append(path + rest)
    return {"y": torch.tensor(tokens), "output1": torch.tensor(lengths), "output2": torch.tensor(paths)}


FAMILY = Family(
    workloads=WORKLOADS,
    truths={"accept": accept_truth},
    widths={"residual_kernel": Width("", 16)},  # the logit of one draft
)
