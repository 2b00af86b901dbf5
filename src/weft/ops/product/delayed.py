"""Delayed scaling of a layer with one scale for a tensor, as TransformerEngine's `DelayedScaling` has it.

    factor = MAX / 2^margin / amax           amax: the largest of the last `history` steps, or that of the last step
    scale = 1 / factor                       codes of the next step round x * (1 / scale), and saturate at ±MAX

x, weight and dy are quantised with scales that are known before the step, so each is read once and not twice. A scale
is as old as the numbers it is made of: what has grown since by more than the margin saturates at ±MAX * scale. A scale
stays as it is while its amax is 0; the first scales are 1. A step whose amax is infinite or NaN, as of gradients that
overflowed, leaves no trace in the history; an Inf or NaN in dy makes dx and dw NaN while amax is noted.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ...quant import Format
from ..common.buffers import KeepsBufferDtypes
from ..common.checks import whole
from .recipes import Recipe

Algorithm = Literal["max", "most_recent"]
_OPERANDS = ("x", "weight", "grad")


class Delayed(NamedTuple):
    """One operand of a layer: the scale that it is quantised with, and where its largest number is noted."""

    scale: Tensor  # fp32, one number
    amax: Tensor | None  # fp32, one number: the largest of this step so far; None if it is not noted

    def note(self, amax: Tensor | None) -> None:
        if self.amax is not None and amax is not None:
            self.amax.copy_(torch.maximum(self.amax, amax))


class DelayedScaling(KeepsBufferDtypes):
    """The state of delayed scaling for one layer: `weft.linear(x, weight, recipe="fp8_tensor", scaling=state)` takes
    its scales, and notes the largest numbers of x, weight and dy; `state.step()` makes the next scales of them. Call it
    once a step, after backward. Until then all calls have the same scales: those of several micro-batches, of a weight
    that several layers share, or of activations that are computed again.

    - `recipe`: of formats with one scale for the tensor and the convention `te` or `torchao`, such as "fp8_tensor".
    - `history`: how many steps the largest number is taken of, with `algorithm="max"`; "most_recent" takes the last.
    - `margin`: scales leave room for numbers 2^margin times as large.

    It is a module: its buffers go where the model goes and are saved with it, in fp32 whatever the model's dtype:
    `amax` [3] of this step, `history` [steps, 3] with the newest first, and the scales of x, weight and dy. After
    `eval()` nothing is noted. Nothing waits for the device. Ranks have scales of their own, unless
    `torch.distributed.all_reduce(state.amax, torch.distributed.ReduceOp.MAX)` comes before `step`.

    >>> import torch, weft
    >>> scaling, w = weft.DelayedScaling(history=16), torch.randn(128, 256, requires_grad=True)
    >>> for x in torch.randn(3, 32, 256):
    ...     weft.linear(x, w, recipe="fp8_tensor", scaling=scaling).sum().backward()
    ...     scaling.step()
    >>> bool(scaling.weight_scale == w.abs().max() / 448)
    True
    """

    amax: Tensor
    history: Tensor
    x_scale: Tensor
    weight_scale: Tensor
    grad_scale: Tensor

    def __init__(
        self,
        recipe: Recipe | str = "fp8_tensor",
        *,
        history: int = 1024,
        margin: int = 0,
        algorithm: Algorithm = "max",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.recipe = Recipe.of(recipe)
        if algorithm not in get_args(Algorithm):
            raise ValueError(f"algorithm must be 'max' or 'most_recent'; got {algorithm!r}")
        if whole("history", history) < 1:
            raise ValueError(f"history has at least one step; got {history}")
        specs = [getattr(self.recipe, name) for name in _OPERANDS]
        formats = [None if spec is None else Format.of(spec) for spec in specs]
        if any(
            f is None or f.block != "tensor" or f.convention not in ("te", "torchao") or f.power_of_two
            for f in formats
        ):
            raise ValueError(
                "delayed scaling is for formats with one scale for the tensor and the convention te or torchao, as the "
                f"recipe 'fp8_tensor' has them; got {specs}"
            )
        self.margin, self.algorithm = whole("margin", margin), algorithm
        # What each of the operands is scaled to.
        self._limits = [f.number.max * 2.0**-margin for f in formats if f is not None]
        options: Any = {"dtype": torch.float32, "device": device}
        self.register_buffer("amax", torch.empty(3, **options))
        self.register_buffer("history", torch.empty(history, 3, **options))
        # Each in memory of its own: kernels take pointers that are multiples of 16 bytes.
        for name in _OPERANDS:
            self.register_buffer(f"{name}_scale", torch.empty((), **options))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As before the first step; for those who make a model on the device "meta" and give it memory later."""
        self.amax.zero_()
        self.history.zero_()
        for name in _OPERANDS:
            getattr(self, f"{name}_scale").fill_(1.0)

    def operand(self, name: str) -> Delayed:
        """That of x, weight or grad."""
        amax = self.amax[_OPERANDS.index(name)] if self.training else None
        return Delayed(getattr(self, f"{name}_scale"), amax)

    @torch.no_grad()
    def step(self) -> None:
        """Make the scales of the next step of the largest numbers of this one and of those before."""
        noted = torch.where(self.amax.isfinite(), self.amax, 0.0)
        self.history.copy_(torch.cat((noted[None], self.history[:-1])))
        largest = self.history.amax(0) if self.algorithm == "max" else noted
        limits = torch.empty_like(largest)  # filled on the device: a copy from the host would wait for it
        for place, limit in zip(limits, self._limits, strict=True):
            place.fill_(limit)
        # A larger factor would be one whose reciprocal has lost digits.
        made = 1.0 / (limits / largest).clamp(max=2.0**126)
        for name, scale, known in zip(_OPERANDS, made, largest > 0, strict=True):
            old = self.operand(name).scale
            old.copy_(torch.where(known, scale, old))
        self.amax.zero_()

    def extra_repr(self) -> str:
        return f"history={len(self.history)}, margin={self.margin}, algorithm={self.algorithm!r}"
