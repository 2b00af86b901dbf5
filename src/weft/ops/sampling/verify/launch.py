"""Launches of the verification of drafts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....runtime import Capabilities, Launch, capabilities_of, choice, scratch
from ...common.rows import align_of, contiguous, flat_rows
from ..loads import IntegerArgument, NumberArgument
from .arguments import PART, AcceptArgs, Verified, VerifyArgs
from .kernels import Drafts, Parts, Target, accept_kernel, residual_kernel, statistics_kernel, verify_kernel

LANES = 64  # parts at a time
BLOCK = 64  # drafts at a time


class AcceptConfig(NamedTuple):
    """Drafts that are compared at a time."""

    block: int
    num_warps: int


@choice("accept", block=(32, 1024), num_warps=(1, 4))
def accept_config(target: Capabilities) -> AcceptConfig:
    return AcceptConfig(64, 1)


class VerifyConfig(NamedTuple):
    """Tokens of a part that are read at a time. It decides in which order sums are added, and so their bits."""

    tile: int
    num_warps: int


@choice("verify", tile=(128, PART), num_warps=(1, 16))
def verify_config(cols: int, target: Capabilities) -> VerifyConfig:
    """Choose 1024 tokens, or all of a shorter row."""
    return VerifyConfig(min(max(1 << max(cols - 1, 0).bit_length(), 128), 1024), 4)


def launch_accept(o: Verified, a: AcceptArgs) -> None:
    requests, nodes = a.chosen.shape
    parents = None if a.parents is None or nodes == 1 else contiguous(a.parents)
    config = accept_config(capabilities_of(a.chosen.device))
    Launch.of(accept_kernel, num_warps=config.num_warps, BLOCK=config.block)(
        (requests, 1, 1),
        *accept_kernel.arguments(
            chosen_ptr=contiguous(a.chosen),
            drafts_ptr=None if nodes == 1 else contiguous(a.drafts),
            parents_ptr=parents,
            tokens_ptr=o.tokens,
            accepted_ptr=o.accepted,
            path_ptr=o.path,
            nodes=nodes,
            parents_stride=0 if parents is None or parents.dim() == 1 else nodes - 1,
        ),
    )


class _Call:
    """Launches of one call."""

    def __init__(self, a: VerifyArgs) -> None:
        self.requests, self.nodes, self.cols = a.logits.shape
        logits, probs = flat_rows(a.logits), flat_rows(a.draft_probs)
        self.number, self.joint = -(-self.cols // PART), a.joint
        self.target = Target(
            logits,
            logits.stride(0),
            self.nodes,
            NumberArgument.of(a.temperature, self.requests),
            IntegerArgument.of(a.seed, self.requests),
            IntegerArgument.of(a.step, self.requests),
        )
        self.drafts = Drafts(contiguous(a.drafts), probs, probs.stride(0))
        self.align = align_of(self.cols, logits.stride(0), probs.stride(0))
        self.tile, self.warps = verify_config(self.cols, capabilities_of(logits.device))

    def empty(self, rows: int, dtype: torch.dtype) -> Tensor:
        return scratch((rows, self.number), dtype, self.target.logits.device)

    def statistics(self) -> Parts:
        rows = self.requests * self.nodes
        largest, total = (self.empty(rows, torch.float32) for _ in range(2))
        parts = Parts(largest, total, self.empty(rows, torch.int64), self.number)
        Launch.of(statistics_kernel, num_warps=self.warps, TILE=self.tile, ALIGN=self.align)(
            (rows * self.number, 1, 1),
            *statistics_kernel.arguments(target=self.target, parts=parts, cols=self.cols),
        )
        return parts

    def run(self, o: Verified) -> None:
        items = self.requests * (self.nodes if self.joint else 1)
        best = self.empty(items, torch.int64)
        weight = mass = None
        if self.joint:
            mass = self.empty(items, torch.float32)
            weight = scratch((items,), torch.float32, mass.device)
        Launch.of(
            residual_kernel,
            num_warps=self.warps,
            JOINT=self.joint,
            TILE=self.tile,
            LANES=LANES,
            ALIGN=self.align,
        )(
            (items * self.number, 1, 1),
            *residual_kernel.arguments(
                target=self.target,
                drafts=self.drafts,
                parts=self.statistics(),
                best_ptr=best,
                accepted_ptr=None if self.joint else o.accepted,
                weight_ptr=weight,
                mass_ptr=mass,
                cols=self.cols,
            ),
        )
        Launch.of(verify_kernel, num_warps=1, JOINT=self.joint, BLOCK=BLOCK, LANES=LANES)(
            (self.requests, 1, 1),
            *verify_kernel.arguments(
                target=self.target,
                drafts=self.drafts,
                best_ptr=best,
                weight_ptr=weight,
                mass_ptr=mass,
                tokens_ptr=o.tokens,
                accepted_ptr=o.accepted,
                path_ptr=o.path,
                cols=self.cols,
                parts=self.number,
            ),
        )


def launch_verify(o: Verified, a: VerifyArgs) -> None:
    _Call(a).run(o)
