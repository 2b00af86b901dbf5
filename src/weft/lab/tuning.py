"""Alternative configs for the launch choices of a workload: which are valid, and which a model of a GPU prefers.

A candidate is valid if the op keeps its guarantees with it. Quantized and integer results are guaranteed bit for bit:
they must equal the default's, at the size that is timed. Other results must be as accurate as the op's truth
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

MANY = 131  # more than few rows, but few enough to judge


# ---- choices and candidates -------------------------------------------------------------------------------


class _Asked(Tuned):
    """Records what is asked for; nothing is tuned."""

    def find(self, name: str, facts: tuple[Fact, ...]) -> None:
        self.entries[name, facts] = {}


def asked(run: Callable[[], Any], target: Capabilities) -> list[Key]:
    """Return the choices that a call makes on a target, starting from an empty table."""
    recorder = _Asked()
    with choosing_for(replace(target, tuned=recorder)):
        run()
    return list(recorder.entries)


@dataclass(frozen=True)
class Candidate:
    """A config for one key, and a target on which only this key is tuned."""

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
        """Return the call with this config."""

        def run_chosen() -> Any:
            with choosing_for(self.target):
                return run()

        return run_chosen


def default_of(key: Key, target: Capabilities) -> Candidate:
    """Return the candidate that is chosen if nothing is tuned."""
    name, facts = key
    return Candidate.of(key, choices[name].default(facts, target.untuned), target)


# ---- validity ---------------------------------------------------------------------------------------------


def promised(results: dict[str, Any]) -> dict[str, Any]:
    """Return the results that are guaranteed bit for bit: quantized ones, and those that are not floating-point."""
    return {
        name: value
        for name, value in results.items()
        if isinstance(value, QTensor) or not value.is_floating_point()
    }


def why_not(candidate: Candidate, workload: Workload, call: Call, default: dict[str, Any]) -> str:
    """Return why a candidate is invalid, or "". `default` are the results of the call, on its device, without it."""
    try:
        with choosing_for(candidate.target):
            got = moved(returned(call), CPU)
            _judge_bits(got, default)
            with under(device=call.device):
                _judge_accuracy(candidate, workload)
    except Exception as error:  # whatever a compiler or a launch raises
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
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
    """Compare with the truth, with as many rows as it takes to reach this choice."""
    for rows in (few_rows(workload), MANY, workload.rows):
        with recording(candidate.target.target):
            call = workload.make("meta", rows=rows)
            is_reached = candidate.key in asked(call, candidate.target)
        if is_reached:
            break
    if truth_of(workload.op) is not None:
        assert_accurate(workload.op, workload.make(rows=rows))
    else:
        accuracy_by_reference(workload)


def failed_check(candidate: Candidate, workload: Workload, device: torch.device) -> str:
    """Return the first check that fails with a candidate and its message, or ""."""
    for name in ("quantized_bytes", "guard_bands", "determinism"):
        try:
            with choosing_for(candidate.target), under(device=device):
                CHECKS[name](workload)
        except NotApplicable:
            continue
        except Exception as error:
            return f"{name}: {error}"
    return ""


# ---- ranking by a model -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """A launch: the variant compiled for it, and its number of programs."""

    variant: Variant
    programs: int


def started(candidate: Candidate, workload: Workload) -> list[Started]:
    """Return what a workload launches with a candidate on its target."""
    launches: list[Started] = []

    def note(launch: Any, grid: Any, pointers: Any, integers: Any, floats: Any) -> None:
        variant = launch.variant(pointers, max(integers) >= WIDE, len(integers))
        launches.append(Started(variant, math.prod(grid)))

    with recording(candidate.target.target), choosing_for(candidate.target), observing(note):
        workload.make("meta")()
    return launches


def modelled(
    candidate: Candidate, workload: Workload, launches: Sequence[Started],
    binaries: dict[Variant, Binary | CompileError], changed: Iterable[Variant],
) -> tuple[float, str]:  # fmt: skip
    """Return (seconds, why not): the time of a workload on the usual board of a target, *modelled*. Launches that the
    choice changes exceed their bound if too few bytes are in flight, if the last wave of programs does not fill the
    board, or if reading tiles of products from shared memory takes longer than multiplying them."""
    target = candidate.target.target
    board = BOARDS[USUAL[target]]
    config, stretch = candidate.config, 1.0
    for launch in launches:
        if launch.variant not in changed:
            continue
        binary = binaries[launch.variant]
        if isinstance(binary, CompileError):
            return math.inf, f"does not compile: {binary.reason}"
        problems = faults(launch.variant, binary)
        if problems:
            return math.inf, problems[0]
        warps = launch.variant.num_warps
        resident = max(1, occupancy_of(target, warps, binary.registers, binary.shared).warps // warps)
        launch_stretch = latency_stretch(
            board, binary, launch.programs, resident, warps * candidate.target.warp_size
        )
        if flops_of(workload) is not None and {"m", "n", "k"} <= set(config._fields):
            waves = launch.programs / board.multiprocessors
            launch_stretch = (
                math.ceil(waves) / waves * tile_stretch(board, element_of(workload), Tile(*config[:3]))
            )
        stretch = max(stretch, launch_stretch)
    return Bounds.of(workload).seconds(board, len(launches)) * stretch, ""
