"""Delayed scaling of a layer with per-tensor scales, like TransformerEngine's `DelayedScaling`.

    factor = MAX / 2^margin / amax           amax: the maximum over the last `history` steps, or the last step's
    scale = 1 / factor                       codes of the next step round x * (1 / scale), and saturate at ±MAX

x, weight and dy are quantized with scales known before the step, so each is read once instead of twice. Values that
have outgrown a stale scale by more than the margin saturate at ±MAX * scale. A scale does not change while its amax is
0; the first scales are 1. A step whose amax is infinite or NaN, as after an overflow, is not recorded in the history;
an Inf or NaN in dy makes dx and dw NaN while amax is recorded.
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
    """Scale of one operand of a layer, and the buffer that records its amax."""

    scale: Tensor  # fp32, one element
    amax: Tensor | None  # fp32, one element: this step's maximum so far; None if it is not recorded

    def note(self, amax: Tensor | None) -> None:
        if self.amax is not None and amax is not None:
            self.amax.copy_(torch.maximum(self.amax, amax))


class DelayedScaling(KeepsBufferDtypes):
    """State of delayed scaling for one layer. `weft.linear(x, weight, recipe="fp8_tensor", scaling=state)` reads its
    scales and records the amaxes of x, weight and dy; `state.step()` computes the next scales from them. Call `step`
    once per training step, after backward. Until then all calls use the same scales: several micro-batches, a weight
    shared by several layers, recomputed activations.

    - `recipe`: formats with one scale per tensor and the convention `te` or `torchao`, such as "fp8_tensor".
    - `history`: number of steps over which `algorithm="max"` takes the maximum; "most_recent" uses the last step.
    - `margin`: scales leave headroom for values 2^margin times as large.

    It is a module: its buffers move with the model and are saved with it, in fp32 whatever the model's dtype: `amax`
    [3] of this step, `history` [steps, 3] with the newest first, and the scales of x, weight and dy. After `eval()`
    nothing is recorded. The host never waits for the device. Each rank has its own scales, unless you call
    `torch.distributed.all_reduce(state.amax, torch.distributed.ReduceOp.MAX)` before `step`.

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
            raise ValueError(f"history must be at least 1 step; got {history}")
        specs = [getattr(self.recipe, name) for name in _OPERANDS]
        formats = [None if spec is None else Format.of(spec) for spec in specs]
        if any(
            f is None or f.block != "tensor" or f.convention not in ("te", "torchao") or f.power_of_two
            for f in formats
        ):
            raise ValueError(
                "delayed scaling needs formats with one scale per tensor and the convention te or torchao, as in the "
                f"recipe 'fp8_tensor'; got {specs}"
            )
        self.margin, self.algorithm = whole("margin", margin), algorithm
        # Largest value of each operand after scaling.
        self._limits = [f.number.max * 2.0**-margin for f in formats if f is not None]
        options: Any = {"dtype": torch.float32, "device": device}
        self.register_buffer("amax", torch.empty(3, **options))
        self.register_buffer("history", torch.empty(history, 3, **options))
        # Separate allocations, because kernels expect 16-byte aligned pointers.
        for name in _OPERANDS:
            self.register_buffer(f"{name}_scale", torch.empty((), **options))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset to the state before the first step, for models created on the device "meta" and materialized later."""
        self.amax.zero_()
        self.history.zero_()
        for name in _OPERANDS:
            getattr(self, f"{name}_scale").fill_(1.0)

    def operand(self, name: str) -> Delayed:
        """Return the state of the operand "x", "weight" or "grad"."""
        amax = self.amax[_OPERANDS.index(name)] if self.training else None
        return Delayed(getattr(self, f"{name}_scale"), amax)

    @torch.no_grad()
    def step(self) -> None:
        """Compute the next step's scales from this step's amaxes and the history."""
        recorded = torch.where(self.amax.isfinite(), self.amax, 0.0)
        self.history.copy_(torch.cat((recorded[None], self.history[:-1])))
        largest = self.history.amax(0) if self.algorithm == "max" else recorded
        limits = torch.empty_like(largest)  # filled on the device; a copy from the host would wait
        for element, limit in zip(limits, self._limits, strict=True):
            element.fill_(limit)
        # The reciprocal of a larger factor would be subnormal and lose digits.
        scales = 1.0 / (limits / largest).clamp(max=2.0**126)
        for name, scale, is_nonzero in zip(_OPERANDS, scales, largest > 0, strict=True):
            current = self.operand(name).scale
            current.copy_(torch.where(is_nonzero, scale, current))
        self.amax.zero_()

    def extra_repr(self) -> str:
        return f"history={len(self.history)}, margin={self.margin}, algorithm={self.algorithm!r}"
