"""Arguments and outputs of the ops on heads."""

from __future__ import annotations

from typing import Generic

from torch import Tensor
from typing_extensions import NamedTuple

from ...runtime import G, Written
from ..common.heads import Cut
from ..common.kv_cache import Cache
from .angles import Turning
from .norm import Norm


class QKV(NamedTuple):
    """Heads for attention, in the requested layout."""

    q: Tensor
    k: Tensor
    v: Tensor | None  # None if separate q and k came without v
    gate: Tensor | None


class Prepare(NamedTuple):
    """Arguments of `qkv_prepare`."""

    x: Tensor  # the packed projection, or q
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None  # [width] of a packed projection
    norm: Norm
    turning: Turning
    cut: Cut


class PrepareCached(NamedTuple):
    """Arguments of `qkv_prepare` with caches to write to. The results are arguments too, because PyTorch's compiler
    rejects an op that writes to some tensors and returns others."""

    x: Tensor
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None
    norm: Norm
    turning: Turning
    cut: Cut
    slots: Tensor
    k_scale: Tensor | None  # fixed scales: one for all of k, or one per head
    v_scale: Tensor | None
    scaled: str  # "none"; "token": the caches hold a scale per token and head; "head", "tensor": fixed scales
    outputs: Written  # the fields of QKV that are not None
    caches: Written  # k, then v if it is cached, then token scales in the same order

    @property
    def prepare(self) -> Prepare:
        return Prepare(self.x, self.k, self.v, self.bias, self.norm, self.turning, self.cut)

    @property
    def cache(self) -> Cache:
        """Return the caches and their scales by name."""
        k, *rest = self.caches
        if self.scaled != "token":
            return Cache(self.slots, k, rest[0] if rest else None, self.k_scale, self.v_scale)
        if len(rest) == 1:
            return Cache(self.slots, k, None, rest[0], None)
        v, k_scale, v_scale = rest
        return Cache(self.slots, k, v, k_scale, v_scale)


class PrepareQuantized(NamedTuple):
    """Arguments of `qkv_prepare` with quantized queries and keys."""

    x: Tensor
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None
    norm: Norm
    turning: Turning
    cut: Cut
    format: str  # of the codes, with a scale per token and head

    @property
    def prepare(self) -> Prepare:
        return Prepare(self.x, self.k, self.v, self.bias, self.norm, self.turning, self.cut)


class Quantized(NamedTuple):
    """Heads in the requested layout, with queries and keys as codes."""

    q: Tensor
    k: Tensor
    q_scale: Tensor  # fp32, the shape of q without its last dimension
    k_scale: Tensor
    v: Tensor | None
    gate: Tensor | None


class PrepareBackward(NamedTuple):
    """Arguments of the backward: upstream gradients and what the forward saved."""

    dq: Tensor
    dk: Tensor
    dv: Tensor | None
    dgate: Tensor | None
    x: Tensor | None  # input of the norm, if there is one
    k: Tensor | None
    bias: Tensor | None
    norm: Norm
    turning: Turning
    cut: Cut
    batch: int
    needs: PrepareGradients[bool]


class PrepareGradients(NamedTuple, Generic[G]):
    """Gradients of the input (q, k and v if separate), of the norm's vectors and of the bias. If one of separate q, k
    and v is needed, all three are computed. The gradient of a packed projection's bias is a sum of x's gradient, which
    is then computed too."""

    x: G
    k: G
    v: G
    q_weight: G
    k_weight: G
    q_bias: G
    k_bias: G
    bias: G


class Rope(NamedTuple):
    """Arguments of `rope`."""

    x: Tensor
    turning: Turning
    layout: str
    out_layout: str
    inverse: bool


class Rotated(NamedTuple):
    y: Tensor
