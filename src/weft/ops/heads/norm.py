"""Norm of heads, over the elements of each head of q and k."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from ..common.checks import FLOATS, check_tensor, epsilon, is_tensor, no_tensor, nonnegative, real

_VECTORS = ("q_weight", "k_weight", "q_bias", "k_bias")


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """Norm of each head of q and k, before or after the rotation.

    - `kind`: "rms" or "layer".
    - `q_weight`, `k_weight`, `q_bias`, `k_bias`: [head dim], or None.
    - `eps`: None means the machine epsilon of the dtype, as in `torch.nn.RMSNorm`.
    - `weight_offset`: heads are multiplied by `weight + weight_offset` (Gemma, Qwen3-Next: 1).
    - `after_rotation`: normalize after the rotation instead of before it.
    """

    kind: Literal["rms", "layer"] = "rms"
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    eps: float | None = 1e-6
    weight_offset: float = 0.0
    after_rotation: bool = False
    argument: Norm = field(init=False, repr=False)  # this norm as ops take it
    vectors: tuple[Tensor, ...] = field(init=False, repr=False)  # the weights and biases that are not None

    def __post_init__(self) -> None:
        if self.kind not in ("rms", "layer"):
            raise ValueError(f"kind of a HeadNorm must be 'rms' or 'layer'; got {self.kind!r}")
        vectors = {name: getattr(self, name) for name in _VECTORS}
        for name, vector in vectors.items():
            if vector is not None and not is_tensor(vector):
                raise no_tensor(name, vector)
        object.__setattr__(self, "vectors", tuple(v for v in vectors.values() if v is not None))
        norm = Norm(
            kind=self.kind,
            q_weight=self.q_weight,
            k_weight=self.k_weight,
            q_bias=self.q_bias,
            k_bias=self.k_bias,
            eps=None if self.eps is None else nonnegative("eps", self.eps),
            weight_offset=real("weight_offset", self.weight_offset),
            after=self.after_rotation,
        )
        object.__setattr__(self, "argument", norm)


class Norm(NamedTuple):
    """Arguments of a `HeadNorm`, as ops take them."""

    kind: str  # "none", "rms" or "layer"
    q_weight: Tensor | None
    k_weight: Tensor | None
    q_bias: Tensor | None
    k_bias: Tensor | None
    eps: float | None
    weight_offset: float
    after: bool

    def eps_for(self, x: Tensor) -> float:
        return epsilon(None, x) if self.eps is None else self.eps


NO_NORM = Norm("none", None, None, None, None, 0.0, 0.0, False)


def check_norm(norm: HeadNorm | None, x: Tensor, dim: int) -> Norm:
    """Check a norm for heads of x with `dim` elements; return it as ops take it."""
    if norm is None:
        return NO_NORM
    if not isinstance(norm, HeadNorm):
        raise TypeError(f"norm must be a weft.HeadNorm; got {type(norm).__name__}")
    device, shape = x.device, (dim,)
    for vector in norm.vectors:
        if vector.shape != shape or vector.device != device or vector.dtype not in FLOATS:
            for name in _VECTORS:
                if getattr(norm, name) is not None:
                    check_tensor(name, getattr(norm, name), FLOATS, device, shape)
    return norm.argument
