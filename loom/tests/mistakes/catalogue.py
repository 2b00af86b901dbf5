"""Format of recorded mistakes: a kernel, its launch with the mistake and corrected, and the expected report.

A case is a function of `fixed`. It launches the kernel as it shipped or as it should have been, and returns the results
of the kernel and of PyTorch. A comment marks the lines of the kernel where the mistake shows:

    tl.store(y_ptr + off, x, mask=mask)  # <- caught
    a = tl.load(a_ptr + off, mask=mask)  # <- caught: a_ptr     only in the cases about this argument
    tl.store(y_ptr + off, x)             # <- follows           a consequence, of a kind that the case lists in `also`

A race is reported at whichever of the two accesses came second, so both are marked.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.runtime import JITFunction

Outcome = tuple[torch.Tensor, torch.Tensor]  # computed by the kernel, by PyTorch

ORIGINS = {
    "A1": "Liger #803, #1335, unsloth #3614: int32 row * stride wraps past 2^31 elements",
    "A2": "Liger #1483: 64-bit offsets one way, 32-bit ones the other way",
    "A3": "FLA #1080, #803: silent corruption past 2^31 elements",
    "A4": "FlagGems #4153, #6083: offset overflow across many ops",
    "A5": "linghe norm, silu, rope: int32 offsets throughout",
    "A6": "linghe gather: 2^20 means 'no destination', and is a row of its own once there are that many",
    "A7": "linghe rope: a buffer of B positions can't hold B + 1 offsets",
    "A9": "TE #3484: a buffer longer than its contents is read as if it were full",
    "A11": "FLA #795: out of bounds when there are more programs than rows",
    "A12": "Weft quantize: past 2^30 columns the counter of a loop over every n-th tile wraps, and the loop goes on",
    "B1": "linghe add, scatter: rows and columns swapped in a mask; atomics without one",
    "B2": "linghe block quantizer: floor(M / 128) scales, ceil(M / 128) programs",
    "B3": "linghe group quantizer: an unmasked step of 1024 over a row of 1536",
    "B4": "linghe fp32 GEMM: no masks",
    "B5": "FlagGems, linghe cross entropy: the ignored label -100 and labels past the vocabulary as an index",
    "B7": "Liger rms_norm, attorch: lanes beyond the row feed a reduction",
    "B8": "Liger #1451: partial rotary dimensions read past the head",
    "B9": "unsloth #1867: layer norm wrong when columns are not a power of two",
    "C1": "pytorch #154557: a grouped GEMM leaves the rows past the last group unwritten",
    "C2": "pytorch #172439: an empty group gets what is not its own",
    "C3": "torch 2.13 _scaled_mm: K = 0 returns uninitialized memory",
    "C4": "linghe norm: 16 // W rows per step is none for a narrow row",
    "C5": "linghe gate: floored grids drop tail rows; L % 8 != 0 writes the rows of another batch",
    "C6": "linghe mla: the backward reads a maximum that the forward never wrote",
    "C7": "FLA #967, #1070: output partly unwritten",
    "C8": "Liger #1338: an early return for ignored rows leaves the loss unwritten",
    "C9": "Megatron #3626: a rank without tokens",
    "C11": "marin #8793: groups padded to 8 rows under tiles of 256",
    "D2": "Liger #370: the backward of a norm overwrites the gradient that it reads",
    "D3": "linghe loss: in-place cross entropy re-reads logits that are gradients by now",
    "D6": "FlagGems rotary_embedding: in place, while others still read the half that is overwritten",
    "D7": "linghe facade: in place, though the kernel was written for two tensors",
    "D13": "linghe emb: gradients of one row accumulated by a plain store",
    "E2": "QuACK #88: a stride of 0 misread as dense",
    "E3": "TE #2734: a gradient with padded rows passes the check of its last stride",
    "E4": "FLA #871, unsloth #10675: views read as if they were dense",
    "F14": "flash-attention #2481: two parties update one value without an order",
    "G2": "linghe topk: equal logits give one expert twice",
    "H11": "linghe smooth: a row stride without its factor",
    "H12": "linghe channel quantizer: the pointer to the scales misses its program",
    "J4": "FlagGems #3353: a cached launch with arguments that it was not compiled for",
    "J5": "FlagGems libentry: one compiled kernel shared by launches that differ",
}


@dataclass(frozen=True)
class Mistake:
    row: str  # of ORIGINS
    kernel: JITFunction[Any]
    kind: str
    argument: str | None
    launch: Callable[..., Outcome]
    also: Mapping[str, str] = field(default_factory=dict)  # kinds that follow from the mistake, and why
    helper: JITFunction[Any] | None = None  # the function called by the kernel in which the mistake shows
    sizes: tuple[int, int] | None = None  # large enough to go wrong, small enough to run

    def __str__(self) -> str:
        return f"{self.row}-{self.launch.__name__}"

    @property
    def dry(self) -> bool:
        """True if the case is too large to run: only addresses are evaluated, on tensors without memory."""
        return self.sizes is not None

    def run(self, *, fixed: bool, dry: bool = False) -> Outcome:
        if self.sizes is None:
            return self.launch(fixed)
        large, small = self.sizes
        return self.launch(fixed, large, "meta") if dry else self.launch(fixed, small, "cpu")

    def lines(self, mark: str = "caught") -> set[int]:
        """Return the lines of the kernel's file that have the mark."""
        source, first = inspect.getsourcelines((self.helper or self.kernel).fn)
        marked = re.compile(rf"# <- {mark}(?:: (?P<argument>\w+))?$")
        marks = {number: marked.search(line.rstrip()) for number, line in enumerate(source, first)}
        return {number for number, m in marks.items() if m and m["argument"] in (None, self.argument)}


MISTAKES: list[Mistake] = []


def mistake(
    row: str, kernel: JITFunction[Any], kind: str, argument: str | None = None, **more: Any
) -> Callable[[Callable[..., Outcome]], Callable[..., Outcome]]:
    """Record the decorated function as a launch of the kernel that must be reported."""

    def record(launch: Callable[..., Outcome]) -> Callable[..., Outcome]:
        MISTAKES.append(Mistake(row, kernel, kind, argument, launch, **more))
        return launch

    return record
