"""Types of the norm functions: the result of a call follows from its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, cast, overload

import torch
from torch import Tensor

from ...quant import Format, QTensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

ScaleAndShift = tuple[Tensor | None, Tensor | None]
Modulation = Tensor | ScaleAndShift

# Result of a call whose number of results a type checker cannot tell: a packed modulation may contain a gate.
NormResult = Tensor | tuple[Tensor, ...]


class CommonOptions(TypedDict, total=False):
    """Options that do not affect what a norm returns."""

    eps: float | None
    weight_offset: float
    pre_bias: Tensor | None
    residual_gate: Tensor | None
    unrounded_sum: bool
    casting: Literal["fp32", "llama"]
    out_dtype: torch.dtype | Literal["promote"] | None
    rowwise: bool
    columnwise: bool
    quant_scale: Tensor | None
    out: Tensor | None
    residual_out: Tensor | None


class NormOptions(CommonOptions, total=False):
    """Options including a modulation that does not add a result."""

    modulation: ScaleAndShift | None


class Norm(Protocol):
    """Type of `rms_norm` and `layer_norm`."""

    @overload
    def __call__(
        self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *,
        residual: None = None, quantize: None = None, **options: Unpack[NormOptions],
    ) -> Tensor: ...  # fmt: skip
    @overload
    def __call__(
        self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *,
        residual: Tensor, quantize: None = None, **options: Unpack[NormOptions],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
    @overload
    def __call__(
        self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *,
        residual: None = None, quantize: Format | str, **options: Unpack[NormOptions],
    ) -> QTensor: ...  # fmt: skip
    @overload
    def __call__(
        self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *,
        residual: Tensor, quantize: Format | str, **options: Unpack[NormOptions],
    ) -> tuple[QTensor, Tensor]: ...  # fmt: skip
    @overload
    def __call__(
        self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *,
        residual: None = None, quantize: Format | str, return_amax: Literal[True], **options: Unpack[NormOptions],
    ) -> tuple[QTensor, Tensor]: ...  # fmt: skip
    @overload
    def __call__(
        self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *,
        residual: Tensor, quantize: Format | str, return_amax: Literal[True], **options: Unpack[NormOptions],
    ) -> tuple[QTensor, Tensor, Tensor]: ...  # fmt: skip
    @overload
    def __call__(
        self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *,
        residual: None = None, quantize: Format | str, return_plain: Literal[True], **options: Unpack[NormOptions],
    ) -> tuple[QTensor, Tensor]: ...  # fmt: skip
    @overload
    def __call__(
        self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *,
        residual: Tensor, quantize: Format | str, return_plain: Literal[True], **options: Unpack[NormOptions],
    ) -> tuple[QTensor, Tensor, Tensor]: ...  # fmt: skip
    @overload
    def __call__(
        self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *,
        residual: Tensor | None = None, modulation: Modulation | None = None, quantize: Format | str | None = None,
        return_amax: bool = False, return_plain: bool = False, **options: Unpack[CommonOptions],
    ) -> NormResult: ...  # fmt: skip


def norm_like(shared: Callable[..., NormResult]) -> Callable[[Callable[..., NormResult]], Norm]:
    """Decorate a norm that forwards its `**options` to `shared`, so that `inspect.signature` shows these options with
    their defaults."""
    options = [
        parameter
        for parameter in inspect.signature(shared).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]

    def typed(function: Any) -> Norm:
        own = list(inspect.signature(function).parameters.values())[:-1]
        function.__signature__ = inspect.Signature([*own, *options])
        return cast(Norm, function)

    return typed
