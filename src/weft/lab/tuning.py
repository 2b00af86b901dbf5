"""Other configs of the launch choices that a workload makes: which may be taken, and which a model of a GPU prefers.

A candidate may be taken if the op keeps its promises with it. Bits are promised of whatever is quantised or an integer:
those have to be the default's, at the size that is timed. Other numbers have to be as accurate as the op's truth
demands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..quant import QTensor
from ..runtime import Capabilities, Variant, choosing_for, observing, recording
from ..runtime.capabilities import Fact, Key, Tuned
from ..runtime.choices import Choice, choices
from ..runtime.launch import WIDE
from .calls import assert_same, few_rows, parts, returned, under
from .checks import CHECKS, CPU, NotApplicable, accuracy_by_reference, assert_accurate
from .compiled import Binary, CompileError
from .compiled.binaries import faults
from .compiled.occupancy import occupancy_of
from .families import Call, Workload, flops_of, truth_of
from .model import BOARDS, USUAL, Bounds, Tile, element_of, latency_stretch, tile_stretch
from .problem import moved

MANY = 131  # rows that are more than few, and few enough to be judged


# ---- which choices, and which configs ---------------------------------------------------------------------


class _Asked(Tuned):
    """Nothing tuned, and a list of what was asked for."""

    def find(self, name: str, facts: tuple[Fact, ...]) -> None:
        self.entries[name, facts] = {}


def asked(run: Callable[[], Any], target: Capabilities) -> list[Key]:
    """The choices that a call makes on a target, which it is asked for anew."""
    noting = _Asked()
    with choosing_for(replace(target, tuned=noting)):
        run()
    return list(noting.entries)


@dataclass(frozen=True)
class Candidate:
    """A config for one key, and the target on which it alone is tuned."""

    key: Key
    config: Any
    target: Capabilities

    @classmethod
    def of(cls, key: Key, config: Any, target: Capabilities) -> Candidate:
        tuned = Tuned({key: choices[key[0]].fields_of(config)})
        return cls(key, config, replace(target, tuned=tuned))

    @property
    def choice(self) -> Choice:
        return choices[self.key[0]]

    @property
    def fields(self) -> dict[str, int]:
        return self.choice.fields_of(self.config)

    def running(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """The call with this config."""

        def chosen() -> Any:
            with choosing_for(self.target):
                return run()

        return chosen


def default_of(key: Key, target: Capabilities) -> Candidate:
    """What is chosen where nothing is tuned."""
    name, facts = key
    return Candidate.of(key, choices[name].default(facts, target.untuned), target)


# ---- which may be taken -----------------------------------------------------------------------------------


def promised(results: dict[str, Any]) -> dict[str, Any]:
    """Those results of whose bits something is promised: what is quantised, and what is no floating-point number."""
    return {
        name: value
        for name, value in results.items()
        if isinstance(value, QTensor) or not value.is_floating_point()
    }


def why_not(candidate: Candidate, workload: Workload, call: Call, default: dict[str, Any]) -> str:
    """Why a candidate may not be taken, or "". `default` are the results of the call, on its device, without it."""
    try:
        with choosing_for(candidate.target):
            got = moved(returned(call), CPU)
            _judge_bits(got, default)
            with under(device=call.device):
                _judge_accuracy(candidate, workload)
    except Exception as error:  # whatever a compiler or a launch raises
        said = str(error).strip().splitlines()
        return f"{type(error).__name__}: {said[0] if said else ''}"[:200]
    return ""


def _judge_bits(got: dict[str, Any], default: dict[str, Any]) -> None:
    assert_same(promised(got), promised(default), "bits that are promised")
    others: dict[str, Tensor] = parts(default)
    for name, value in parts(got).items():
        if value.is_floating_point() and value.numel() and value.dtype.itemsize > 1:
            finite = others[name].nan_to_num(0.0, 0.0, 0.0).abs().amax()
            close = torch.isclose(value, others[name], rtol=0.02, atol=1e-2 * float(finite), equal_nan=True)
            assert close.all(), f"{int((~close).sum())} elements of {name} are far from the default's"


def _judge_accuracy(candidate: Candidate, workload: Workload) -> None:
    """Against the truth, with as many rows as it takes to come to this choice."""
    for rows in (few_rows(workload), MANY, workload.rows):
        with recording(candidate.target.target):
            made = workload.make("meta", rows=rows)
            meets = candidate.key in asked(made, candidate.target)
        if meets:
            break
    if truth_of(workload.op) is not None:
        assert_accurate(workload.op, workload.make(rows=rows))
    else:
        accuracy_by_reference(workload)


def failed_check(candidate: Candidate, workload: Workload, device: torch.device) -> str:
    """The first check that fails with a candidate, and what it says; or ""."""
    for name in ("quantized_bytes", "guard_bands", "determinism"):
        try:
            with choosing_for(candidate.target), under(device=device):
                CHECKS[name](workload)
        except NotApplicable:
            continue
        except Exception as error:
            return f"{name}: {error}"
    return ""


# ---- which a model prefers --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """A launch: what is compiled for it, and how many programs it has."""

    variant: Variant
    programs: int


def started(candidate: Candidate, workload: Workload) -> list[Started]:
    """What a workload launches with a candidate on its target."""
    found: list[Started] = []

    def note(launch: Any, grid: Any, pointers: Any, integers: Any, floats: Any) -> None:
        variant = launch.variant(pointers, max(integers) >= WIDE, len(integers))
        found.append(Started(variant, math.prod(grid)))

    with recording(candidate.target.target), choosing_for(candidate.target), observing(note):
        workload.make("meta")()
    return found


def modelled(
    candidate: Candidate, workload: Workload, launches: Sequence[Started],
    binaries: dict[Variant, Binary | CompileError], changed: Iterable[Variant],
) -> tuple[float, str]:  # fmt: skip
    """(seconds, why not): the time of a workload on the usual board of a target, *modelled*. The launches that the
    choice changes take longer than their bound where too few bytes are under way, where the last wave of programs does
    not fill the board, and where tiles of products are read from shared memory for longer than they are multiplied."""
    target = candidate.target.target
    board = BOARDS[USUAL[target]]
    config, stretch = candidate.config, 1.0
    for launch in launches:
        if launch.variant not in changed:
            continue
        binary = binaries[launch.variant]
        if isinstance(binary, CompileError):
            return math.inf, f"does not compile: {binary.reason}"
        wrong = faults(launch.variant, binary)
        if wrong:
            return math.inf, wrong[0]
        warps = launch.variant.num_warps
        held = max(1, occupancy_of(target, warps, binary.registers, binary.shared).warps // warps)
        found = latency_stretch(board, binary, launch.programs, held, warps * candidate.target.warp_size)
        if flops_of(workload) is not None and {"m", "n", "k"} <= set(config._fields):
            waves = launch.programs / board.multiprocessors
            found = math.ceil(waves) / waves * tile_stretch(board, element_of(workload), Tile(*config[:3]))
        stretch = max(stretch, found)
    return Bounds.of(workload).seconds(board, len(launches)) * stretch, ""
