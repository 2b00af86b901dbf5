"""Workloads of selections and draws: rows of logits, of an indexer's scores, and short ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops import sample, top_k
from ...ops.sampling.noise import gumbel
from ..chain import Chain
from ..family import Family, Moved
from ..problem import Call, Inputs, Size, Workload
from ..symbolic.loaded import Loaded
from ..truth import EPS32, Near, arguments

SHAPES: dict[str, tuple[Size, ...]] = {
    "llama3-8b/logits": ("rows", 128256),
    "deepseek-v3.2/scores": ("rows", 16384),
    "odd/33": ("rows", 33),
}
_SELECTED: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "argmax": (("llama3-8b/logits", {"k": 1}), ("odd/33", {"k": 1})),
    "k50": (("llama3-8b/logits", {"k": 50}), ("odd/33", {"k": 50})),
    "k512-spans": (("deepseek-v3.2/scores", {"k": 512, "spans": True}),),
    "k7-spans": (("odd/33", {"k": 7, "spans": True}),),
}
_DRAWN: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "full": (("llama3-8b/logits", "odd/33"), {"temperature": 0.7}),
    "greedy": (("llama3-8b/logits",), {"temperature": 0.0}),
    "k-p": (("llama3-8b/logits", "odd/33"), {"top_k": 20, "top_p": 0.8}),
    "joint": (("odd/33",), {"top_k": 20, "top_p": 0.6, "order": "joint"}),
    "min-p": (("odd/33",), {"min_p": 0.05}),
    "requests": (("llama3-8b/logits", "odd/33"), {"requests": True}),
}
_MOVED = {"odd/33": 9.0, "deepseek-v3.2/scores": 2.2, "k50": 1.15, "k-p": 1.07, "requests": 1.7}
_AGAIN = "what tiles pass on is read again, as much as a short row; so are rows whose limits lie below it"


def _moves(name: str, options: str) -> dict[str, Any]:
    moves = _MOVED.get(name, _MOVED.get(options))
    return {} if moves is None else {"moves": moves, "rereads": _AGAIN}


def _build_top_k(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    settings = dict(workload.settings)
    kwargs: dict[str, Any] = {"x": inputs.normal(*shape), "k": settings["k"]}
    if settings.get("spans"):
        row = torch.arange(shape[0], device=inputs.device)
        kwargs |= {"starts": row % 5, "ends": shape[1] - row % 7}
    return Call(top_k, kwargs)


def _build_sample(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    settings = dict(workload.settings)
    row = torch.arange(shape[0], device=inputs.device)
    kwargs: dict[str, Any] = {"logits": inputs.normal(*shape), "seed": row + 5, "step": row * 3}
    if settings.pop("requests", False):
        part = (row % 4).float() / 4
        kwargs |= {"temperature": part, "top_k": row % 3 * 9, "top_p": 1 - part / 2, "min_p": part / 100}
    return Call(sample, kwargs | settings)


WORKLOADS: tuple[Workload, ...] = (
    *(
        Workload(
            "top_k", name, options, SHAPES[name], 64, _build_top_k, frozenset({"inference"}), torch.float32,
            settings=tuple(settings.items()),
            **_moves(name, options),
        )
        for options, uses in _SELECTED.items()
        for name, settings in uses
    ),
    *(
        Workload(
            "sample", name, options, SHAPES[name], 64, _build_sample, frozenset({"inference"}), torch.float32,
            settings=tuple(settings.items()), **_moves(name, options),
        )
        for options, (names, settings) in _DRAWN.items()
        for name in names
    ),
)  # fmt: skip


# ---- truth: whole rows, sorted --------------------------------------------------------------------------------


def in_order(x: Tensor, start: int, end: int) -> list[int]:
    """Return the columns of a row in order."""
    values = x.tolist()
    columns = range(max(start, 0), min(end, len(values)))
    return sorted(
        columns, key=lambda c: (values[c] != values[c], 0.0 if values[c] != values[c] else -values[c], c)
    )


def top_k_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the largest elements, and the gradient of each row."""
    a = arguments(call)
    x, k = a["x"].detach(), a["k"]
    spans = [
        torch.full((len(x),), n) if t is None else t for t, n in ((a["starts"], 0), (a["ends"], x.shape[1]))
    ]
    indices = torch.full((len(x), k), -1)
    for row, (start, end) in enumerate(zip(*(t.tolist() for t in spans), strict=True)):
        order = torch.tensor(in_order(x[row], start, end)[:k], dtype=torch.int64)
        indices[row, : len(order)] = order
    values = x.gather(-1, indices.clamp(min=0)).masked_fill(indices < 0, -torch.inf)
    expected: dict[str, Near | Tensor] = {"values": values, "indices": indices}
    if "values" in gradients:
        dx = torch.zeros(len(x), x.shape[1] + 1, dtype=x.dtype)
        dx.scatter_(-1, torch.where(indices < 0, x.shape[1], indices), gradients["values"].to(x.dtype))
        expected["dx"] = dx[:, :-1]
    return expected


def sample_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the token of each row, its log-probability, and the row's log-sum-exp."""
    a = arguments(call)
    tokens, rows = [], []

    def setting(name: str, row: int, off: float) -> float:
        value = a[name]
        return off if value is None else float(value[row]) if isinstance(value, Tensor) else value

    for row, x in enumerate(a["logits"].detach().double()):
        t = setting("temperature", row, 1.0)
        z = x / (t or 1.0)
        p = z.softmax(-1)
        order = torch.tensor(in_order(x, 0, len(x)))
        k, top_p = int(setting("top_k", row, 0)), setting("top_p", row, 1.0)
        mass = p[order]
        among = torch.arange(len(x)) < (k if k >= 1 else len(x))
        if top_p < 1:
            whole = 1.0 if a["order"] == "joint" else mass[among].sum()
            among &= mass.cumsum(0) - mass < top_p * whole
            among[0] = True
        kept = order[among]
        kept = kept[p[kept] >= setting("min_p", row, 0.0) * p.max()]
        noise = gumbel(a["seed"][row], a["step"][row], kept).double()
        score = z[kept] + (noise if t else 0.0)
        token = int(kept[score == score.max()].min())
        tokens.append(token)
        rows.append(torch.stack([p[token].log(), z.logsumexp(-1)]))
    logprobs, lse = torch.stack(rows).unbind(-1)
    return {
        "tokens": torch.tensor(tokens),
        "logprobs": Near(logprobs, 16 * EPS32 * (1 + lse.abs() + logprobs.abs())),
        "lse": Near(lse, 16 * EPS32 * (1 + lse.abs())),
    }


# ---- in plain PyTorch -----------------------------------------------------------------------------------------


def _topk_chain(call: Call) -> Chain:
    return Chain(lambda x: torch.topk(x, call["k"]), (call["x"],))


FAMILY = Family(
    workloads=WORKLOADS,
    truths={"top_k": top_k_truth, "sample": sample_truth},
    chains={("top_k", "k50"): _topk_chain},
    moved={
        "select_kernel": Moved({"x_ptr"}, set()),
        "sort_kernel": Moved(set(), set()),
        "draw_kernel": Moved({"logits_ptr"}, set()),
        "candidates_kernel": Moved({"logits_ptr"}, set()),
    },
    loaded={
        ("select_kernel", "list_ptr"): Loaded(least=-1, below="cols"),
        ("sort_kernel", "chosen_ptr"): Loaded(least=-1, below="cols"),
    },
)
