"""Workloads of functions of rows: softmax over experts and keys, sums, norms of groups and of vectors."""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops import cumsum, group_norm, l2_normalize, log_softmax, logsumexp, softmax, xielu
from ...runtime import catalogue
from ..chain import chain
from ..family import Family, Width
from ..problem import Call, Inputs, Size, Workload, run_op

SHAPES: dict[str, tuple[Size, ...]] = {
    "qwen3-30b-a3b/experts": ("rows", 128),
    "deepseek-v3/experts": ("rows", 256),
    "llama3-8b/keys": ("rows", 8192),
    "llama3-8b/vocabulary": ("rows", 128256),
    "dinov2/embedding": ("rows", 1024),
    "apertus-8b/ffn": ("rows", 21504),
    "odd/33": ("rows", 33),
    "stable-diffusion/block": ("rows", 320, 32, 32),
    "odd/groups": ("rows", 64, 5, 3),
}
FUNCTIONS: dict[str, Any] = {
    "softmax": softmax,
    "log_softmax": log_softmax,
    "logsumexp": logsumexp,
    "cumsum": cumsum,
    "cumsum_reversed": functools.partial(cumsum, reverse=True),
    "l2_normalize": l2_normalize,
    "xielu": xielu,
}
# Shapes and rows of each op and its backward.
_USED: dict[str, tuple[tuple[str, int], ...]] = {
    "softmax": (("qwen3-30b-a3b/experts", 8192), ("llama3-8b/keys", 1024), ("odd/33", 1024)),
    "log_softmax": (("deepseek-v3/experts", 8192), ("odd/33", 1024)),
    "logsumexp": (("llama3-8b/keys", 1024), ("odd/33", 1024)),
    "cumsum": (("deepseek-v3/experts", 8192), ("odd/33", 1024)),
    "cumsum_reversed": (("deepseek-v3/experts", 8192), ("odd/33", 1024)),
    "l2_normalize": (("dinov2/embedding", 8192), ("odd/33", 1024)),
    "xielu": (("apertus-8b/ffn", 4096), ("odd/33", 1024)),
}
_REREADS = "a row that is longer than a tile is read once for each reduction and once for the result"
_SUMS: dict[str, Any] = {
    "rereads": "sums of a row's terms, which the gradients of its parameters are made of", "moves": 1.09,
}  # fmt: skip
_NUMBERS = {"l2_normalize_backward": {"eps_number": 1e-12}, "xielu_backward": {"beta_number": 0.5}}
GROUPS = {"stable-diffusion/block": 32, "odd/groups": 8}


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    return Call(FUNCTIONS[workload.op], {"x": inputs.normal(*shape), **_parameters(workload, inputs)})


def _parameters(workload: Workload, inputs: Inputs) -> dict[str, Tensor]:
    return {n: inputs.normal() for n in ("alpha_p", "alpha_n")} if "xielu" in workload.op else {}


def _build_backward(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    narrow = workload.op == "logsumexp_backward"
    tensors = {"x": inputs.normal(*shape), "dout": inputs.normal(*shape[:-1] if narrow else shape)}
    tensors |= _parameters(workload, inputs)
    return _backward_call(workload.op, tensors, _NUMBERS.get(workload.op, {}))


def _backward_call(name: str, tensors: dict[str, Any], numbers: dict[str, Any]) -> Call:
    """Return the call of a backward op in which tensors that are parameters get a gradient."""
    arguments = catalogue[name].arguments.cls
    needed = typing.get_type_hints(arguments)["needs"]
    absent = dict.fromkeys((n for n in arguments._fields if n != "needs"), None)
    needs = needed(*(name in tensors for name in needed._fields))
    return Call(functools.partial(run_op, name), {**absent, **tensors, **numbers, "needs": needs})


def _build_groups(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    kwargs = {"x": inputs.normal(*shape), "groups": GROUPS[workload.name]}
    kwargs |= {"weight": inputs.normal(shape[1], mean=1.0), "bias": inputs.normal(shape[1])}
    return Call(group_norm, kwargs)


def _build_groups_backward(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    samples, channels, *rest = shape
    groups = GROUPS[workload.name]
    positions = math.prod(rest)
    tensors = {
        "x": inputs.normal(samples, groups, channels // groups, positions),
        "dout": inputs.normal(samples, groups, channels // groups, positions),
        "weight": inputs.normal(groups, channels // groups, 1),
        "bias": inputs.normal(groups, channels // groups, 1),
    }
    return _backward_call(workload.op, tensors, {"eps_number": 1e-5})


def _workloads() -> Iterator[Workload]:
    for op, used in _USED.items():
        for name, rows in used:
            yield Workload(op, name, "plain", SHAPES[name], rows, _build)
            yield Workload(
                f"{op}_backward", name, "plain", SHAPES[name], rows, _build_backward,
                frozenset({"training", "backward"}), unread=("x",) if "cumsum" in op else (),
                **_SUMS if (op, name) == ("xielu", "odd/33") else {},
            )  # fmt: skip
    for name, rows, long in (("stable-diffusion/block", 16, True), ("odd/groups", 64, False)):
        yield Workload(
            "group_norm", name, "plain", SHAPES[name], rows, _build_groups,
            rereads=_REREADS if long else "", moves=2.05 if long else 1.02,
        )  # fmt: skip
        yield Workload(
            "group_norm_backward", name, "plain", SHAPES[name], rows, _build_groups_backward,
            frozenset({"training", "backward"}), moves=5.4,
            rereads="gradients of weight and bias are written in fp32 for every element, and then summed",
        )  # fmt: skip


def _long() -> Iterator[Workload]:
    name = "llama3-8b/vocabulary"
    for op in ("softmax", "log_softmax", "logsumexp"):
        yield Workload(op, name, "plain", SHAPES[name], 64, _build, rereads=_REREADS, moves=2.05)


WORKLOADS: tuple[Workload, ...] = (*_workloads(), *_long())


def _group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, groups, weight, bias)


def _l2_normalize(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def _xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    p, n = F.softplus(alpha_p), 0.5 + F.softplus(alpha_n)
    return torch.where(x > 0, p * x * x + 0.5 * x, (torch.expm1(x.clamp(max=-1e-6)) - x) * n + 0.5 * x)


FAMILY = Family(
    workloads=WORKLOADS,
    chains={
        ("softmax", "plain"): chain(lambda x: x.softmax(-1), "x"),
        ("log_softmax", "plain"): chain(lambda x: x.log_softmax(-1), "x"),
        ("logsumexp", "plain"): chain(lambda x: x.logsumexp(-1), "x"),
        ("cumsum", "plain"): chain(lambda x: x.cumsum(-1), "x"),
        ("group_norm", "plain"): chain(_group_norm, "x", "groups", "weight", "bias"),
        ("l2_normalize", "plain"): chain(_l2_normalize, "x"),
        ("xielu", "plain"): chain(_xielu, "x", "alpha_p", "alpha_n"),
    },
    # One bf16 element for each row, for each channel of a row, and for all rows.
    widths={
        "logsumexp": Width("", 16),
        "group_norm": Width("", 16),
        "xielu": Width("", 16),
        "xielu_backward": Width("", 16),
    },
)
