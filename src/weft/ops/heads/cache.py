"""Caches of k and v: tensors with a slot for each token, in the dtype of the input or in FP8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...quant import Format
from ...quant.reference import encode_reference, quantize_copy
from ..common.checks import INTEGERS, check_tensor, check_tensors
from .arguments import PrepareCached
from .layout import Cut, sizes

# How heads are cached in FP8: with one scale for each, made of its fp32 numbers.
E4M3 = Format("row", "e4m3", "te")


@dataclass(frozen=True, eq=False)
class KVCache:
    """Where k and v of each token are kept. A model makes it once.

    - `k`, `v`: [slots, heads, dim], or paged [pages, page_size, heads, dim], of any strides whose last is 1. v may be
      None: then k alone is kept (the latent of MLA). In the dtype of the input, they get the bits that are returned; in
      float8_e4m3fn, or in uint8 for its bytes, they go with scales.
    - `k_scale`, `v_scale`: fp32. In the shape of the caches without the last dimension they are written too: each token
      and head gets the scale and the codes of `weft.quantize(head, "e4m3:row:te")`, made of the fp32 numbers before
      they are rounded to the dtype of the input. With one number they are read (vLLM's form): the codes are
      `e4m3(x / scale)`, saturated.
    """

    k: Tensor
    v: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def __post_init__(self) -> None:
        check_tensors("k", self.k)
        given = {name: getattr(self, name) for name in ("v", "k_scale", "v_scale")}
        for name, value in given.items():
            if value is not None:
                check_tensors(name, value)
        if (self.k_scale is not None and self.v is not None) != (self.v_scale is not None):
            raise ValueError("the caches of k and of v have a scale each, or neither has one")
        lead = self.k.shape[:-2]
        if len(lead) not in (1, 2):
            raise ValueError(
                f"k of a cache must be [slots, heads, dim] or [pages, page_size, heads, dim]; got {tuple(self.k.shape)}"
            )
        for name, cache, scale in (("k", self.k, self.k_scale), ("v", self.v, self.v_scale)):
            if cache is None:
                continue
            if cache.shape[:-1] != self.k.shape[:-1] or cache.device != self.k.device:
                raise ValueError(
                    f"k and v of a cache must have as many slots and heads, on one device; got {tuple(self.k.shape)} "
                    f"on {self.k.device} and {tuple(cache.shape)} on {cache.device}"
                )
            if cache.dtype != self.k.dtype:
                raise ValueError(
                    f"k and v of a cache must have one dtype; got {self.k.dtype} and {cache.dtype}"
                )
            if cache.stride(-1) != 1 and cache.shape[-1] > 1:
                raise ValueError(f"the last stride of {name} must be 1; its strides are {cache.stride()}")
            if (cache.dtype in (torch.float8_e4m3fn, torch.uint8)) != (scale is not None):
                raise ValueError(
                    f"a cache in float8_e4m3fn (or uint8) goes with scales, and another without them; {name} is "
                    f"{cache.dtype} with{'out' if scale is None else ''} one"
                )
            if scale is None:
                continue
            shapes = (cache.shape[:-1], (), (1,))
            if scale.shape not in shapes or scale.dtype != torch.float32 or scale.device != cache.device:
                raise ValueError(
                    f"{name}_scale must be float32 {tuple(cache.shape[:-1])}, or one number, on {cache.device}; got "
                    f"{scale.dtype} {tuple(scale.shape)} on {scale.device}"
                )
            if (scale.dim() > 1) != (self.scaled == "head"):
                raise ValueError(
                    "k_scale and v_scale must both have one number, or both one for each token and head"
                )

    @property
    def scaled(self) -> str:
        """As `PrepareCached.scaled`."""
        if self.k_scale is None:
            return "none"
        return "head" if self.k_scale.dim() > 1 else "tensor"

    @property
    def written(self) -> list[Tensor]:
        """As `PrepareCached.caches`."""
        scales = (self.k_scale, self.v_scale) if self.scaled == "head" else ()
        return [t for t in (self.k, self.v, *scales) if t is not None]


def check_cache(cache: KVCache, x: Tensor, cut: Cut, has_v: bool) -> None:
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache must be a weft.KVCache; got {type(cache).__name__}")
    if cache.v is not None and not has_v:
        raise ValueError("the cache has a place for v, and v is missing")
    for name, each, dim in (("k", cache.k, cut.dim), ("v", cache.v, cut.v_dim)):
        if each is None:
            continue
        if each.shape[-2:] != (cut.kv, dim) or each.device != x.device:
            raise ValueError(
                f"{name} of the cache must be [slots, {cut.kv}, {dim}] or [pages, page_size, {cut.kv}, {dim}] on "
                f"{x.device}; got {tuple(each.shape)} on {each.device}"
            )
    if cache.k_scale is None and cache.k.dtype != x.dtype:
        raise ValueError(
            f"a cache must be {x.dtype} as the input is, or float8_e4m3fn with scales; it is {cache.k.dtype}"
        )


def check_slots(slots: Tensor | None, x: Tensor, layout: str) -> Tensor:
    if slots is None:
        raise ValueError("a cache is written at slots=: one for each token")
    batch, tokens = sizes(x, layout)
    shapes = [(tokens, batch) if layout == "sbhd" else (batch, tokens)] if layout != "thd" else []
    check_tensor("slots", slots, INTEGERS, x.device, *shapes, (batch * tokens,))
    return slots


def slots_by_token(slots: Tensor, x: Tensor, layout: str) -> Tensor:
    """A view [batch, sequence]."""
    batch, tokens = sizes(x, layout)
    if layout == "sbhd":
        return slots.view(tokens, batch).t() if slots.dim() == 1 else slots.t()
    return slots.view(batch, tokens) if slots.dim() == 1 else slots


# ---- of kernels -----------------------------------------------------------------------------------------


class Slots(NamedTuple):
    """Where each token goes in the caches."""

    ptr: Tensor | None  # [batch, sequence]
    total: int  # slots of the caches
    page_size: int
    batch: int  # strides
    token: int


class Kept(NamedTuple):
    """The cache of k, or that of v: [pages, page_size, heads, numbers] anywhere, in the dtype of k or bytes of e4m3."""

    ptr: Tensor | None
    scale: Tensor | None  # fp32 [pages, page_size, heads] anywhere, or one number
    page: int  # strides
    place: int
    head: int
    scale_page: int
    scale_place: int
    scale_head: int


class Cache(NamedTuple):
    """What a kernel writes to. Without a cache, all of it is absent."""

    slots: Slots
    k: Kept
    v: Kept

    @staticmethod
    def of(a: PrepareCached) -> Cache:
        shape = a.caches[0].shape
        size = 1 if len(shape) == 3 else shape[1]
        by_token = slots_by_token(a.slots, a.x, a.cut.layout)
        slots = Slots(a.slots, shape[0] * size, max(size, 1), *by_token.stride())
        caches, scales = parts_of(a)
        return Cache(slots, *(_kept(cache, scale) for cache, scale in zip(caches, scales, strict=True)))


def parts_of(a: PrepareCached) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor | None, Tensor | None]]:
    """The caches of k and v, and their scales."""
    k, *rest = a.caches
    has_v = len(rest) == (3 if a.scaled == "head" else 1)
    v = rest.pop(0) if has_v else None
    if a.scaled == "head":
        return (k, v), (rest[0], rest[1] if has_v else None)
    return (k, v), (a.k_scale, a.v_scale)


def _kept(cache: Tensor | None, scale: Tensor | None) -> Kept:
    if cache is None:
        return NO_CACHE.v
    own = _page_strides(scale.stride()) if scale is not None and scale.dim() > 1 else (0, 0, 0)
    return Kept(cache, scale, *_page_strides(cache.stride()[:-1]), *own)


def _page_strides(strides: tuple[int, ...]) -> tuple[int, ...]:
    """(page, place, head) of (slot, head) or of (page, place, head)."""
    return strides if len(strides) == 3 else (strides[0], 0, strides[1])


_NOT_KEPT = Kept(None, None, 0, 0, 0, 0, 0, 0)
NO_CACHE = Cache(Slots(None, 0, 0, 0, 0), _NOT_KEPT, _NOT_KEPT)


# ---- reference ------------------------------------------------------------------------------------------


def store_reference(a: PrepareCached, k: Tensor, v: Tensor | None) -> None:
    """k and v [batch, sequence, heads, numbers], not rounded yet, to their slots."""
    slot = slots_by_token(a.slots, a.x, a.cut.layout).long().flatten()
    paged = a.caches[0].dim() == 4
    size = a.caches[0].shape[1] if paged else 1
    inside = (slot >= 0) & (slot < a.caches[0].shape[0] * size)
    slot = slot[inside]
    where = (slot // size, slot % size) if paged else (slot,)
    for value, cache, scale in zip((k, v), *parts_of(a), strict=True):
        if cache is None or value is None:
            continue
        kept = value.flatten(0, 1)[inside]  # [tokens, heads, numbers]
        if a.scaled == "none":
            cache[where] = kept.to(cache.dtype)
            continue
        assert scale is not None
        if a.scaled == "head":
            codes, made, _ = quantize_copy(kept.float().flatten(0, 1), E4M3)
            scale[where] = made.view(kept.shape[:2])
        else:
            codes = encode_reference(kept.float() / scale, E4M3.number)
        cache.view(torch.uint8)[where] = codes.view(torch.uint8).view(kept.shape)
