"""What the ops of this family take and give."""

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
    """Heads for attention, in the layout that was asked for."""

    q: Tensor
    k: Tensor
    v: Tensor | None  # None where separate q and k came without one
    gate: Tensor | None


class Prepare(NamedTuple):
    """The arguments of `qkv_prepare`."""

    x: Tensor  # the packed projection, or q
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None  # [width] of a packed projection
    norm: Norm
    turning: Turning
    cut: Cut


class PrepareCached(NamedTuple):
    """The arguments of `qkv_prepare` with caches to write to. The results are arguments too, since PyTorch's compiler
    does not take an op that writes to some tensors and returns others."""

    x: Tensor
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None
    norm: Norm
    turning: Turning
    cut: Cut
    slots: Tensor
    k_scale: Tensor | None  # given ones: one number for all of k, or one for each head
    v_scale: Tensor | None
    scaled: str  # "none"; "token": the caches hold a scale for each token and head; "head" and "tensor": given ones
    outputs: Written  # the members of QKV that are not None
    caches: Written  # k, then v if it is cached, then the scales of tokens in the same order

    @property
    def prepare(self) -> Prepare:
        return Prepare(self.x, self.k, self.v, self.bias, self.norm, self.turning, self.cut)

    @property
    def cache(self) -> Cache:
        """The caches and their scales by name."""
        k, *rest = self.caches
        if self.scaled != "token":
            return Cache(self.slots, k, rest[0] if rest else None, self.k_scale, self.v_scale)
        if len(rest) == 1:
            return Cache(self.slots, k, None, rest[0], None)
        v, k_scale, v_scale = rest
        return Cache(self.slots, k, v, k_scale, v_scale)


class PrepareQuantized(NamedTuple):
    """The arguments of `qkv_prepare` whose queries and keys leave as codes."""

    x: Tensor
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None
    norm: Norm
    turning: Turning
    cut: Cut
    format: str  # of the codes, with a scale for each head of a token

    @property
    def prepare(self) -> Prepare:
        return Prepare(self.x, self.k, self.v, self.bias, self.norm, self.turning, self.cut)


class Quantized(NamedTuple):
    """Heads in the layout that was asked for, queries and keys as codes."""

    q: Tensor
    k: Tensor
    q_scale: Tensor  # fp32, the shape of q without the numbers of a head
    k_scale: Tensor
    v: Tensor | None
    gate: Tensor | None


class PrepareBackward(NamedTuple):
    """The arguments of the backward: gradients of what was returned, and what the forward kept."""

    dq: Tensor
    dk: Tensor
    dv: Tensor | None
    dgate: Tensor | None
    x: Tensor | None  # the input of the norm, if there is one
    k: Tensor | None
    bias: Tensor | None
    norm: Norm
    turning: Turning
    cut: Cut
    batch: int
    needs: PrepareGradients[bool]


class PrepareGradients(NamedTuple, Generic[G]):
    """Gradients of the input (of q, k and v if they were apart), of the vectors of the norm and of the bias. Those of
    separate q, k and v are computed all three if one is wanted. That of the bias of a packed projection is made of x's,
    which is then computed too."""

    x: G
    k: G
    v: G
    q_weight: G
    k_weight: G
    q_bias: G
    k_bias: G
    bias: G


class Rope(NamedTuple):
    """The arguments of `rope`."""

    x: Tensor
    turning: Turning
    layout: str
    out_layout: str
    inverse: bool


class Rotated(NamedTuple):
    y: Tensor
