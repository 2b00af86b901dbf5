"""Caches of k and v: tensors with one slot per token, in the dtype of the input, in FP8 or in int8."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...quant import Format
from .checks import INTEGERS, check_tensor, check_tensors
from .heads import Cut, Strides, sizes, stride_of

# Formats of heads that are cached as codes with one scale per head, encoded from the fp32 elements of the head.
E4M3 = Format("row", "e4m3", "te")
INT8 = Format("row", "int8", "te")
LATENT_ROW = 656  # bytes of FlashMLA's row: 512 e4m3 codes, four fp32 scales, 64 bf16 elements
_CODES = {torch.float8_e4m3fn: E4M3, torch.uint8: E4M3, torch.int8: INT8}


def format_of(dtype: torch.dtype) -> Format | None:
    """Return the format of the codes of a cache with this dtype, or None if it stores no codes."""
    return _CODES.get(dtype)


@dataclass(frozen=True, eq=False)
class KVCache:
    """Cache for k and v of each token. A model creates it once.

    - `k`, `v`: [slots, heads, dim], or paged [pages, page_size, heads, dim]; the last stride must be 1. If v is None,
      only k is stored (the latent of MLA). Caches in the dtype of the input get the same bits as the results. Caches in
      float8_e4m3fn, in uint8 for the same bytes, or in int8 need scales.
    - `k_scale`, `v_scale`: fp32. In the shape of the caches without the last dimension, they are written: each token
      and head gets the scale and the codes of `weft.quantize(head, "e4m3:row:te")` (or int8), encoded from the fp32
      elements before they are rounded to the dtype of the input. With one scale per head, or a single scale (as in
      vLLM), they are read: the codes are `e4m3(x / scale)`, saturated.
    """

    k: Tensor
    v: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    scaled: str = field(init=False, repr=False)  # unit that has a scale: "none", "token", "head" or "tensor"
    written: tuple[Tensor, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_tensors("k", self.k)
        optional = {name: getattr(self, name) for name in ("v", "k_scale", "v_scale")}
        for name, value in optional.items():
            if value is not None:
                check_tensors(name, value)
        if (self.k_scale is not None and self.v is not None) != (self.v_scale is not None):
            raise ValueError(
                "the caches of k and v have a scale each, or neither: pass both k_scale and v_scale, or none"
            )
        for name in ("k_scale", "v_scale"):  # a single scale has no dimension
            scale = getattr(self, name)
            if scale is not None and scale.numel() == 1 and scale.dim() == 1:
                object.__setattr__(self, name, scale.reshape(()))
        scaled = "none"
        if self.k_scale is not None:
            scaled = ("tensor", "head", "token", "token")[min(self.k_scale.dim(), 3)]
        scales = (self.k_scale, self.v_scale) if scaled == "token" else ()
        object.__setattr__(self, "scaled", scaled)
        object.__setattr__(self, "written", tuple(t for t in (self.k, self.v, *scales) if t is not None))
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
                    f"k and v of a cache must have as many slots and heads and one device; got {tuple(self.k.shape)} "
                    f"on {self.k.device} and {tuple(cache.shape)} on {cache.device}"
                )
            if cache.dtype != self.k.dtype:
                raise ValueError(
                    f"k and v of a cache must have one dtype; got {self.k.dtype} and {cache.dtype}"
                )
            if cache.stride(-1) != 1 and cache.shape[-1] > 1:
                raise ValueError(f"the last stride of {name} must be 1; its strides are {cache.stride()}")
            if self.has_latent_rows and scale is None:
                continue
            if (format_of(cache.dtype) is not None) != (scale is not None):
                raise ValueError(
                    f"a cache in float8_e4m3fn (or uint8) or int8 needs scales, and any other takes none; {name} is "
                    f"{cache.dtype} with{'out' if scale is None else ''} a scale"
                )
            if scale is None:
                continue
            shapes = (cache.shape[:-1], cache.shape[-2:-1], ())
            if scale.shape not in shapes or scale.dtype != torch.float32 or scale.device != cache.device:
                raise ValueError(
                    f"{name}_scale must be float32 {tuple(cache.shape[:-1])}, one scale for each of {cache.shape[-2]} "
                    f"heads, or a single one, on {cache.device}; got {scale.dtype} {tuple(scale.shape)} on "
                    f"{scale.device}"
                )
            if scale.dim() != self.k_scale.dim():  # type: ignore[union-attr]
                raise ValueError(
                    "k_scale and v_scale must both have one scale, both one per head, or both one per token and head"
                )

    @property
    def has_latent_rows(self) -> bool:
        """Return whether the cache holds FlashMLA's byte rows, which contain their scales."""
        rows = self.k.dtype is torch.uint8 and self.k.shape[-2:] == (1, LATENT_ROW)
        return bool(rows and self.v is None and self.k_scale is None)

    def paged(self) -> tuple[Tensor, Tensor | None]:
        """Return (k, v) as [pages, page_size, heads, dim]; a slot counts as a page of one token."""
        if self.k.dim() == 4:
            return self.k, self.v
        return self.k[:, None], None if self.v is None else self.v[:, None]


def check_cache(cache: KVCache, x: Tensor, cut: Cut, has_v: bool) -> None:
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache must be a weft.KVCache; got {type(cache).__name__}")
    if cache.v is not None and not has_v:
        raise ValueError("the cache has a v, but the call has no v: pass v, or a cache without v")
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
            f"a cache must be {x.dtype} like the input, or float8_e4m3fn or int8 with scales; got {cache.k.dtype}"
        )


def check_slots(slots: Tensor | None, x: Tensor, layout: str) -> Tensor:
    if slots is None:
        raise ValueError("a cache needs slots=, the slot of each token in the cache")
    batch, tokens = sizes(x, layout)
    shapes = [(tokens, batch) if layout == "sbhd" else (batch, tokens)] if layout != "thd" else []
    check_tensor("slots", slots, INTEGERS, x.device, *shapes, (batch * tokens,))
    return slots


# ---- kernel arguments -----------------------------------------------------------------------------------


class SlotStrides(NamedTuple):
    """Number of slots of a cache, and the strides of the slots tensor."""

    total: int
    page_size: int
    batch: int
    token: int


class Slots(NamedTuple):
    """Slot of each token in the caches."""

    ptr: Tensor | None  # [batch, sequence]
    at: SlotStrides


class KeptStrides(NamedTuple):
    """Strides of a cache and of its scales."""

    page: int
    place: int
    head: int
    scale_page: int
    scale_place: int
    scale_head: int


class Kept(NamedTuple):
    """Cache of k or of v, [pages, page_size, heads, elements] of any strides, in the dtype of k or as codes."""

    ptr: Tensor | None
    scale: Tensor | None  # fp32 [pages, page_size, heads] of any strides, [heads], or a scalar
    at: KeptStrides


class CacheForms(NamedTuple):
    """Shapes and strides that determine a `CacheStrides`."""

    shape: tuple[int, ...]  # of the cache of k
    slots: tuple[int, ...]  # strides
    k: tuple[int, ...]
    v: tuple[int, ...] | None
    k_scale: tuple[int, ...] | None
    v_scale: tuple[int, ...] | None


class CacheStrides(NamedTuple):
    slots: SlotStrides
    k: KeptStrides
    v: KeptStrides

    @staticmethod
    def of(forms: CacheForms | None, layout: str, batch: int, tokens: int) -> CacheStrides:
        """Return the strides of a cache. Slots are [batch, sequence], for 'sbhd' [sequence, batch], or flat in the same
        order."""
        if forms is None:
            return CacheStrides(SlotStrides(0, 0, 0, 0), NOT_KEPT, NOT_KEPT)
        size = 1 if len(forms.shape) == 3 else forms.shape[1]
        steps = (
            forms.slots
            if len(forms.slots) == 2
            else (forms.slots[0] * (batch if layout == "sbhd" else tokens),)
        )
        outer, inner = (*steps, forms.slots[-1])[:2]
        by_token = (inner, outer) if layout == "sbhd" else (outer, inner)
        slots = SlotStrides(forms.shape[0] * size, max(size, 1), *by_token)
        return CacheStrides(slots, kept_strides(forms.k, forms.k_scale), kept_strides(forms.v, forms.v_scale))


NOT_KEPT = KeptStrides(0, 0, 0, 0, 0, 0)


def kept_strides(cache: tuple[int, ...] | None, scale: tuple[int, ...] | None) -> KeptStrides:
    """Build from the strides of a cache and of its scales, which are per token, per head, or a single one."""
    if cache is None:
        return NOT_KEPT
    scale_strides: tuple[int, ...] = (0, 0, 0)
    if scale is not None and len(scale) > 0:
        scale_strides = (0, 0, scale[0]) if len(scale) == 1 else _page_strides(scale)
    return KeptStrides(*_page_strides(cache[:-1]), *scale_strides)


def _page_strides(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return (page, place, head) strides from (slot, head) or (page, place, head) strides."""
    return strides if len(strides) == 3 else (strides[0], 0, strides[1])


class Cache(NamedTuple):
    """Caches as kernel arguments; without a cache all pointers are None."""

    slots: Tensor | None
    k: Tensor | None
    v: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None

    @property
    def element(self) -> str:
        """Element type of the codes."""
        return "int8" if self.k is not None and self.k.dtype is torch.int8 else "e4m3"

    def forms(self) -> CacheForms | None:
        slots, k, v, k_scale, v_scale = self
        if slots is None or k is None:
            return None
        return CacheForms(
            k.shape, slots.stride(), k.stride(), stride_of(v), stride_of(k_scale), stride_of(v_scale)
        )


NO_CACHE = Cache(None, None, None, None, None)


def coded_strides(codes: tuple[int, ...], scale: tuple[int, ...], layout: str, tokens: int) -> KeptStrides:
    """Return the strides of heads that are written as codes; each sequence of the batch counts as a page."""
    _, *code_strides = Strides.of(codes, layout, tokens)
    _, *scale_strides = Strides.of((*scale, 1), layout, tokens)
    return KeptStrides(*code_strides, *scale_strides)
