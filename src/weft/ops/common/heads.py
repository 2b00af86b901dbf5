"""Layouts of heads: how a packed projection is split into heads, and tensors of heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from ...runtime import contiguous_copy
from .checks import whole

Layout = Literal["bshd", "sbhd", "bhsd", "thd"]
Packing = Literal["flat", "groups"]

# For each layout, the positions of (batch, sequence, heads, elements).
LAYOUTS = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3), "thd": (0, 0, 1, 2)}


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Split of a packed projection into heads. A module creates it once.

    - `q`, `kv`: the number of query heads, and of heads of k and v (by default as many as q). q is a multiple of kv:
      q / kv query heads share one head of k and v.
    - `dim`: elements of a head; `v_dim`: elements of a value head, if different.
    - `packing`: "flat" is [all q | all k | all v]; "groups" is one [q q q q k v] per key head, as in Megatron.
    - `gate`: every query head is followed by a gate of its size (Qwen3-Next).

    >>> import weft
    >>> weft.Heads(q=32, kv=8, dim=128).width
    6144
    """

    q: int
    dim: int
    kv: int = 0  # 0 becomes q
    v_dim: int = 0  # 0 becomes dim
    packing: Packing = "flat"
    gate: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv", self.kv or self.q)
        object.__setattr__(self, "v_dim", self.v_dim or self.dim)
        for name in ("q", "kv", "dim", "v_dim"):
            whole(name, getattr(self, name), 1)
        if self.packing not in ("flat", "groups"):
            raise ValueError(f"packing must be 'flat' or 'groups'; got {self.packing!r}")
        if self.q % self.kv:
            raise ValueError(
                f"q must be a multiple of kv: q / kv query heads share a head of k and v; got {self.q} and {self.kv}"
            )

    @property
    def width(self) -> int:
        """Number of columns of the packed projection."""
        return self.q * self.dim * (1 + self.gate) + self.kv * (self.dim + self.v_dim)


class Cut(NamedTuple):
    """Split of an op's input into heads, and the layouts before and after."""

    q: int
    kv: int
    dim: int
    v_dim: int
    packing: str  # "flat", "groups", or "apart": q, k and v are separate tensors
    gate: bool
    layout: str
    out_layout: str

    @property
    def q_dim(self) -> int:
        """Elements of a query head and its gate."""
        return self.dim * (1 + self.gate)

    @property
    def width(self) -> int:
        """Number of columns of the packed projection."""
        return self.q * self.q_dim + self.kv * (self.dim + self.v_dim)

    @property
    def group(self) -> int:
        """Number of consecutive query heads at one stride."""
        return self.q // self.kv if self.packing == "groups" else self.q

    @property
    def group_stride(self) -> int:
        """Stride between the groups of a packed projection; 0 if there is only one group."""
        return self.group * self.q_dim + self.dim + self.v_dim if self.packing == "groups" else 0


class Parts(NamedTuple):
    """Views of q, k, v and gate as [batch, sequence, heads, elements]; None for those that the input lacks."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    gate: Tensor | None


def split(x: Tensor, k: Tensor | None, v: Tensor | None, cut: Cut) -> Parts:
    """Split an input into its heads; q of a packed input may be a copy."""
    x = canonical(x, cut.layout)
    if cut.packing == "apart":
        both = x
        k, v = (None if t is None else canonical(t, cut.layout) for t in (k, v))
    elif cut.packing == "flat":
        both, k, v = x.split((cut.q * cut.q_dim, cut.kv * cut.dim, cut.kv * cut.v_dim), -1)
        both = both.unflatten(-1, (cut.q, cut.q_dim))
        k, v = k.unflatten(-1, (cut.kv, cut.dim)), v.unflatten(-1, (cut.kv, cut.v_dim))
    else:
        grouped = x.unflatten(-1, (cut.kv, cut.group_stride))
        both, k, v = grouped.split((cut.group * cut.q_dim, cut.dim, cut.v_dim), -1)
        both = both.reshape(*both.shape[:2], cut.q, cut.q_dim)
    return Parts(both[..., : cut.dim], k, v, both[..., cut.dim :] if cut.gate else None)


def canonical(x: Tensor, layout: str) -> Tensor:
    """View x as [batch, sequence, heads, elements], or as [batch, sequence, columns] if it is packed."""
    if layout == "thd":
        return x[None]
    if layout == "sbhd":
        return x.transpose(0, 1)
    return x.transpose(1, 2) if layout == "bhsd" else x


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return x [batch, sequence, heads, elements] in a layout, contiguous."""
    if layout == "thd":
        return x.reshape(-1, *x.shape[2:])
    return canonical(x, layout).contiguous()


def sizes(x: Tensor, layout: str) -> tuple[int, int]:
    """Return (batch, sequence) of a tensor in a layout."""
    if layout == "thd":
        return 1, x.shape[0]
    batch, sequence = LAYOUTS[layout][:2]
    return x.shape[batch], x.shape[sequence]


def shape_of(layout: str, batch: int, tokens: int, heads: int, dim: int) -> tuple[int, ...]:
    if layout == "thd":
        return batch * tokens, heads, dim
    if layout == "bhsd":
        return batch, heads, tokens, dim
    return (tokens, batch, heads, dim) if layout == "sbhd" else (batch, tokens, heads, dim)


def tokens_of(result: Tensor, layout: str, batch: int) -> int:
    """Return the sequence length of a result; its layout may be 'thd', which merges batch and sequence."""
    if layout == "thd":
        return result.shape[0] // max(batch, 1)
    return result.shape[LAYOUTS[layout][1]]


def layout_of(x: Tensor, layout: str, dims: int) -> str:
    """Return the layout of an input of `dims` dimensions; one dimension less means 'thd'."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")
    if x.dim() == dims - 1:
        return "thd"
    if x.dim() != dims or layout == "thd":
        raise ValueError(
            f"an input in {layout!r} has {dims - (layout == 'thd')} dimensions; got {tuple(x.shape)}"
        )
    return layout


class Strides(NamedTuple):
    """Start and strides of heads [batch, sequence, heads, elements]. The elements of a head are contiguous."""

    start: int
    batch: int
    token: int
    head: int

    @staticmethod
    def of(strides: tuple[int, ...] | None, layout: str, tokens: int) -> Strides:
        """Build from the strides of a tensor of heads. `tokens` is the sequence length, which 'thd' strides do not
        contain."""
        if strides is None:
            return NO_STRIDES
        if layout == "thd":
            return Strides(0, tokens * strides[0], strides[0], strides[1])
        batch, sequence, heads, _ = LAYOUTS[layout]
        return Strides(0, strides[batch], strides[sequence], strides[heads])


NO_STRIDES = Strides(0, 0, 0, 0)


class Place(NamedTuple):
    """Pointer to heads, with their strides."""

    ptr: Tensor | None
    at: Strides


class PartStrides(NamedTuple):
    """Strides of q, k and v of an input or of its gradient. The gate of a query head follows it."""

    q: Strides
    k: Strides
    v: Strides

    @staticmethod
    def of(strides: tuple[tuple[int, ...] | None, ...], cut: Cut) -> PartStrides:
        """Build from the strides of x, k and v; k and v are None for a packed x."""
        if strides[0] is None:
            return PartStrides(NO_STRIDES, NO_STRIDES, NO_STRIDES)
        if cut.packing == "apart":
            return PartStrides(*(Strides.of(each, cut.layout, 0) for each in strides))
        batch, token = (0, strides[0][0]) if cut.layout == "thd" else strides[0][:2]
        if cut.layout == "sbhd":
            batch, token = token, batch
        groups = cut.group_stride
        k_start = cut.group * cut.q_dim
        v_start = k_start + (cut.dim if groups else cut.kv * cut.dim)
        return PartStrides(
            Strides(0, batch, token, cut.q_dim),
            Strides(k_start, batch, token, groups or cut.dim),
            Strides(v_start, batch, token, groups or cut.v_dim),
        )


def stride_of(x: Tensor | None) -> tuple[int, ...] | None:
    return None if x is None else x.stride()


def contiguous_heads(x: Tensor) -> Tensor:
    """Return x, or a copy of its distinct elements in which the elements of each head are contiguous."""
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        return x
    distinct = x
    for dim, stride in enumerate(x.stride()[:-1]):
        if stride == 0 and x.shape[dim] > 1:
            distinct = distinct.narrow(dim, 0, 1)
    return contiguous_copy(distinct).expand(x.shape)
