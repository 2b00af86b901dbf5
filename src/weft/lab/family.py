"""Type of the modules in `families`; each of them ends with its `FAMILY`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from .chain import BuildChain
from .problem import Call, Workload
from .symbolic.loaded import Loaded
from .truth import Truth

CountFlops = Callable[[Workload], int]

Compute = Callable[[Call], dict[str, Tensor]]
"""Function that runs a call on the device under test and returns its results by name."""

Encode = Callable[[Call, Compute], dict[str, Tensor]]
"""Function of a call that returns the elements its quantized results encode, by the names of those results."""

NameResults = Callable[[Call], list[str]]
"""Function of a call that returns the names of its results, in order."""


class Moved(NamedTuple):
    """Tensors that a kernel reads and writes in whole tiles, by the names of its parameters."""

    read: Set[str]
    written: Set[str]


class Width(NamedTuple):
    """An access width, in bits, on the targets whose names begin with `target`."""

    target: str
    bits: int


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of ops: its workloads, the results they must have, and the exceptions its kernels need."""

    workloads: tuple[Workload, ...]
    """Problems on which its ops are judged."""

    flops: Mapping[str, CountFlops] = field(default_factory=dict)
    """By op: the FLOPs of a workload's matrix products. An op without products has no entry."""

    truths: Mapping[str, Truth] = field(default_factory=dict)
    """By op: the results and gradients that a call must have, see `weft.lab.truth`. An op without a truth is compared
    with its own reference in float64."""

    encoded: Mapping[str, Encode] = field(default_factory=dict)
    """By op: the elements that a call's quantized results encode. Default: the results of the same call on fp32 inputs
    with nothing quantized."""

    results: Mapping[Callable[..., Any], NameResults] = field(default_factory=dict)
    """By public function: the names of its results, if it returns a plain tuple."""

    chains: Mapping[tuple[str, str], BuildChain] = field(default_factory=dict)
    """By op and name of its set of options: the plain PyTorch that `weft bench` times beside the op. Default: the op's
    reference."""

    # ---- kernels as compiled for GPUs: exceptions to the general expectations

    moved: Mapping[str, Moved] = field(default_factory=dict)
    """By kernel: the tensors that it reads and writes in whole tiles, if its parameters do not have the usual names."""

    widths: Mapping[str, Width] = field(default_factory=dict)
    """By kernel: an access width that it needs besides the usual ones."""

    spills: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """By kernel and target: bytes that it spills although it should spill none. They also hold for relatives of the
    target."""

    loaded: Mapping[tuple[str, str], Loaded] = field(default_factory=dict)
    """By kernel and parameter: its assumptions about the integers in that tensor."""
