"""Where heads lie: how a packed projection is cut into them, and the layouts of tensors of heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from .checks import whole

Layout = Literal["bshd", "sbhd", "bhsd", "thd"]
Packing = Literal["flat", "groups"]

# For each layout, where its dimensions are in (batch, sequence, heads, numbers).
LAYOUTS = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3), "thd": (0, 0, 1, 2)}


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How a packed projection is cut into heads. A module makes it once.

    - `q`, `kv`: the number of query heads, and of heads of k and v (by default as many as q). q is a multiple of kv:
      q / kv query heads share one head of k and v.
    - `dim`: how many numbers a head has; `v_dim`: how many a value head has, if that is another number.
    - `packing`: "flat" is [all q | all k | all v]; "groups" is one [q q q q k v] for each key head, as Megatron has it.
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
        """Columns of the packed projection."""
        return self.q * self.dim * (1 + self.gate) + self.kv * (self.dim + self.v_dim)


class Cut(NamedTuple):
    """How the input of an op is cut into heads, and where the heads lie before and after."""

    q: int
    kv: int
    dim: int
    v_dim: int
    packing: str  # "flat", "groups", or "apart": q, k and v are tensors of their own
    gate: bool
    layout: str
    out_layout: str

    @property
    def q_dim(self) -> int:
        """Numbers of a query head and its gate."""
        return self.dim * (1 + self.gate)

    @property
    def width(self) -> int:
        """Columns of the packed projection."""
        return self.q * self.q_dim + self.kv * (self.dim + self.v_dim)

    @property
    def group(self) -> int:
        """How many query heads follow each other at one stride."""
        return self.q // self.kv if self.packing == "groups" else self.q

    @property
    def group_stride(self) -> int:
        """The stride from one group of a packed projection to the next; 0 if there is only one group."""
        return self.group * self.q_dim + self.dim + self.v_dim if self.packing == "groups" else 0


class Parts(NamedTuple):
    """q, k, v and gate as views [batch, sequence, heads, numbers]; None for those that the input does not have."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    gate: Tensor | None


def split(x: Tensor, k: Tensor | None, v: Tensor | None, cut: Cut) -> Parts:
    """The heads of an input; q of a packed one may be a copy."""
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
    """x as a view [batch, sequence, heads, numbers], or [batch, sequence, columns] if it is packed."""
    if layout == "thd":
        return x[None]
    if layout == "sbhd":
        return x.transpose(0, 1)
    return x.transpose(1, 2) if layout == "bhsd" else x


def laid_out(x: Tensor, layout: str) -> Tensor:
    """x [batch, sequence, heads, numbers] in the given layout, contiguous."""
    if layout == "thd":
        return x.reshape(-1, *x.shape[2:])
    return canonical(x, layout).contiguous()


def sizes(x: Tensor, layout: str) -> tuple[int, int]:
    """(batch, sequence) of a tensor in a layout."""
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
    """The length of the sequences of a result, whose layout may be 'thd', in which batch and sequence are joined."""
    if layout == "thd":
        return result.shape[0] // max(batch, 1)
    return result.shape[LAYOUTS[layout][1]]


def layout_of(x: Tensor, layout: str, dims: int) -> str:
    """The layout of an input of `dims` dimensions; with one dimension less it is 'thd'."""
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
    """Where heads [batch, sequence, heads, numbers] begin, and their strides. The numbers of a head are neighbours."""

    start: int
    batch: int
    token: int
    head: int

    @staticmethod
    def of(strides: tuple[int, ...] | None, layout: str, tokens: int) -> Strides:
        """From the strides of a tensor of heads. `tokens` is the length of the sequences, which 'thd' strides do not
        tell."""
        if strides is None:
            return NO_STRIDES
        if layout == "thd":
            return Strides(0, tokens * strides[0], strides[0], strides[1])
        batch, sequence, heads, _ = LAYOUTS[layout]
        return Strides(0, strides[batch], strides[sequence], strides[heads])


NO_STRIDES = Strides(0, 0, 0, 0)


class Place(NamedTuple):
    """Heads anywhere in memory."""

    ptr: Tensor | None
    at: Strides


class PartStrides(NamedTuple):
    """Where the heads of an input are, or those of its gradient. The gate of a query head follows it."""

    q: Strides
    k: Strides
    v: Strides

    @staticmethod
    def of(strides: tuple[tuple[int, ...] | None, ...], cut: Cut) -> PartStrides:
        """From the strides of x, k and v; k and v are None for a packed x."""
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


def with_neighbours(x: Tensor) -> Tensor:
    """x, or a copy of its distinct numbers, in which the numbers of a head are neighbours."""
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        return x
    once = x
    for dim, stride in enumerate(x.stride()[:-1]):
        if stride == 0 and x.shape[dim] > 1:
            once = once.narrow(dim, 0, 1)
    return once.contiguous().expand(x.shape)
