"""Shapes and strides of the tensors of a call, which determine what is compiled and launched."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....quant import Format
from ...common.kv_cache import LATENT_ROW, format_of
from .arguments import DecodeArgs


class Form(NamedTuple):
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor | None) -> Form | None:
        return None if x is None else Form(x.shape, x.stride(), x.dtype)


class Forms(NamedTuple):
    """Shapes, strides and options that determine the integers of launches."""

    query: tuple[int, ...]  # shape
    query_strides: tuple[int, ...]
    k: Form
    v: Form | None
    k_scale: Form | None
    v_scale: Form | None
    table: tuple[int, ...]
    table_stride: int
    dtype: torch.dtype
    left: int | None
    capped: bool
    v_dim: int

    @staticmethod
    def of(a: DecodeArgs, query: Tensor) -> Forms:
        return Forms(
            query.shape,
            query.stride(),
            Form(a.k.shape, a.k.stride(), a.k.dtype),
            Form.of(a.v),
            Form.of(a.k_scale),
            Form.of(a.v_scale),
            a.page_table.shape,
            a.page_table.stride(0),
            query.dtype,
            a.left,
            a.softcap != 0,
            a.v_dim,
        )

    @property
    def rows(self) -> bool:
        """True if the cache stores FlashMLA's rows of bytes."""
        return self.k.dtype is torch.uint8 and self.k_scale is None

    @property
    def format(self) -> Format | None:
        """Return the format of the cache's codes; None for a plain cache and for FlashMLA's rows, which mix several."""
        return None if self.rows else format_of(self.k.dtype)

    def check(self) -> None:
        """Raise ValueError if kernels would misread the cache; this also covers direct calls of the op."""
        k, v = self.k, self.v
        caches = ((k, self.k_scale), *(() if v is None else ((v, self.v_scale),)))
        row_size = LATENT_ROW if self.rows else self.query[3]
        fits = k.shape[3] == row_size and self.query[2] % k.shape[2] == 0 and self.table[0] == self.query[0]
        fits &= (
            self.v_dim == v.shape[3] if v is not None else self.v_scale is None and self.v_dim <= k.shape[3]
        )
        for cache, scale in caches:
            fits &= cache.dtype == k.dtype and cache.shape[:3] == k.shape[:3]
            if self.rows:
                fits &= v is None and k.shape[2] == 1 and self.dtype is torch.bfloat16
            elif scale is None:
                fits &= cache.dtype == self.dtype
            else:
                pages, size, heads, _ = cache.shape
                shapes = ((pages, size, heads), (pages * size, heads), (heads,), ())
                fits &= self.format is not None and scale.dtype is torch.float32 and scale.shape in shapes
                fits &= self.k_scale is not None and len(scale.shape) == len(self.k_scale.shape)
        if not fits:
            forms = ", ".join(
                f"{name} {'None' if form is None else f'{form.dtype} {tuple(form.shape)}'}"
                for name, form in zip(("k", "v", "k_scale", "v_scale"), self[2:6], strict=True)
            )
            raise ValueError(
                f"the cache does not match a query {self.dtype} {tuple(self.query)}: {forms}. Pass what "
                "weft.KVCache takes: a plain cache in query's dtype, codes with fp32 scales, or FlashMLA's rows"
            )
