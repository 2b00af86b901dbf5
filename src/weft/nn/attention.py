"""Attention with its projections: with grouped heads, and with latents."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..ops import HeadNorm, KVCache, Recipe, Rotation, attention, attention_decode, qkv_prepare, rope
from .linear import PLAIN, Device, Linear, Numbers, in_numbers, numbers_for
from .norm import RMSNorm

# ---- rotation -------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """Rotation of queries and keys by their positions. It has no parameters, and all layers can share one.

    `Rotary(base)` rotates pairs by `position * base^(-2i / dim)`; `Rotary.of(config.rope_parameters)` reads a
    transformers configuration (the kinds default, linear, llama3 and yarn). `dim`, `style` and `first` have the meaning
    they have in `weft.Rotation`, for models that rotate a part of each head.

    `forward(x, positions)` rotates heads [batch, tokens, heads, dim]. `Attention` fuses the rotation with the norm of
    the heads.

    >>> import torch, weft.nn
    >>> rotary = weft.nn.Rotary.of({"rope_type": "default", "rope_theta": 500000.0})
    >>> rotary(torch.randn(2, 5, 4, 64)).shape
    torch.Size([2, 5, 4, 64])
    """

    rotation: Rotation
    score_factor: float  # YaRN's factor on DeepSeek's attention scores

    def __init__(
        self,
        base: float = 10000.0,
        *,
        dim: int | None = None,
        style: Literal["neox", "interleaved"] = "neox",
        first: bool = True,
    ) -> None:
        super().__init__()
        self.rotation = Rotation(base, dim=dim, style=style, first=first)
        self.score_factor = 1.0

    @staticmethod
    def of(
        parameters: Mapping[str, Any],
        *,
        dim: int | None = None,
        style: Literal["neox", "interleaved"] = "neox",
        first: bool = True,
    ) -> Rotary:
        """Build the rotation from the `rope_parameters` of a configuration."""
        kind = parameters.get("rope_type", "default")
        rotary = Rotary(float(parameters["rope_theta"]), dim=dim, style=style, first=first)
        if parameters.get("partial_rotary_factor", 1.0) != 1.0 and dim is None:
            raise ValueError(
                "partial_rotary_factor rotates a part of each head: pass dim=, the even size of that part"
            )
        if kind == "default":
            return rotary
        factor = float(parameters["factor"])
        if kind == "linear":
            rotary.rotation = rotary.rotation.linear(factor)
        elif kind == "llama3":
            rotary.rotation = rotary.rotation.llama3(
                factor,
                parameters["original_max_position_embeddings"],
                low=parameters["low_freq_factor"],
                high=parameters["high_freq_factor"],
            )
        elif kind == "yarn" and parameters.get("truncate", True):
            rotary.rotation = rotary.rotation.yarn(
                factor,
                parameters["original_max_position_embeddings"],
                beta_fast=parameters.get("beta_fast") or 32.0,
                beta_slow=parameters.get("beta_slow") or 1.0,
                magnitude=_yarn_magnitude(parameters, factor),
            )
            rotary.score_factor = _yarn_growth(factor, parameters.get("mscale_all_dim") or 0.0) ** 2
        else:
            raise ValueError(
                f"rope_type must be default, linear, llama3, or yarn with truncate=True; got {dict(parameters)}"
            )
        return rotary

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        return rope(x, self.rotation, positions=positions)

    def extra_repr(self) -> str:
        r = self.rotation
        parts = [
            f"base={r.base}",
            *(f"{name}={getattr(r, name)!r}" for name in ("dim", "scaling") if getattr(r, name)),
        ]
        return ", ".join([*parts, *(["style='interleaved'"] if r.style == "interleaved" else [])])


def _yarn_growth(factor: float, slope: float = 1.0) -> float:
    return 0.1 * slope * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _yarn_magnitude(parameters: Mapping[str, Any], factor: float) -> float:
    """Return the factor by which rotated heads are multiplied."""
    factor_override = parameters.get("attention_factor")
    if factor_override is not None:
        return float(factor_override)
    slopes = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if all(slopes):
        return _yarn_growth(factor, slopes[0]) / _yarn_growth(factor, slopes[1])  # type: ignore[arg-type]
    return _yarn_growth(factor)


# ---- slots in a paged cache -----------------------------------------------------------------------------


class Pages(NamedTuple):
    """Slots that the tokens of a call take in paged caches, and the tokens they see there. All layers share it.

    `Pages.of(table, lengths, tokens=…, page_size=…)` builds it on the device, for calls with `tokens` new tokens per
    sequence.
    """

    table: Tensor  # int32 [sequences, pages], the pages of each sequence in order
    lengths: Tensor  # [sequences], tokens of each sequence including this call's
    positions: Tensor  # int32 [sequences, tokens], of this call's tokens
    slots: Tensor  # [sequences, tokens], where the tokens are written; -1 for none

    @staticmethod
    def of(table: Tensor, lengths: Tensor, *, tokens: int, page_size: int) -> Pages:
        """Build from `lengths` [sequences], which include the new tokens. A sequence with fewer tokens than the call
        starts with padding, for which the model's output is meaningless.

        >>> import torch, weft.nn
        >>> pages = weft.nn.Pages.of(torch.tensor([[3, 1]]), torch.tensor([18]), tokens=3, page_size=16)
        >>> pages.positions, pages.slots
        (tensor([[15, 16, 17]], dtype=torch.int32), tensor([[63, 16, 17]]))
        """
        new = torch.arange(tokens, device=table.device)
        positions = lengths[:, None] - tokens + new
        real = positions.clamp(min=0)
        page = table.long().gather(1, real // page_size)
        slots = torch.where(positions < 0, -1, page * page_size + real % page_size)
        return Pages(table.int(), lengths, real.int(), slots)


# ---- attention ------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention with projections: `q_proj`, `k_proj`, `v_proj`, `o_proj`.

    - `num_key_value_heads`: neighboring heads share keys and values; by default none do.
    - `rotary`: a `Rotary`, or None.
    - `qk_norm`: the eps of a per-head `RMSNorm`, `q_norm` and `k_norm` (Qwen3).
    - `sliding_window`: the number of tokens a token sees, including itself, as transformers configurations count.
    - `sinks`: a learned score per head that has no value (gpt-oss).
    - `bias`: whether all four projections have one.

    `forward(x)` takes [batch, tokens, hidden], or packed sequences [tokens, hidden] with `cu_seqlens`. Given `cache`, a
    `weft.KVCache` of this layer, and `pages`, it writes the tokens of x to the cache and attends to what is there: for
    inference, under `torch.no_grad()`.

    >>> import torch, weft.nn
    >>> layer = weft.nn.Attention(128, 4, 2, rotary=weft.nn.Rotary(10000.0), qk_norm=1e-6)
    >>> layer(torch.randn(2, 10, 128)).shape
    torch.Size([2, 10, 128])
    """

    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    sinks: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        num_key_value_heads: int | None = None,
        *,
        head_dim: int | None = None,
        rotary: Rotary | None = None,
        qk_norm: float | None = None,
        sliding_window: int | None = None,
        sinks: bool = False,
        bias: bool = False,
        recipe: Recipe | str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        heads, kv_heads = num_attention_heads, num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // heads
        self.sliding_window = sliding_window
        self.rotary_emb = rotary
        factory_kwargs: Any = {"device": device, "dtype": dtype}
        self.q_proj = Linear(hidden_size, heads * self.head_dim, bias, recipe=recipe, **factory_kwargs)
        self.k_proj = Linear(hidden_size, kv_heads * self.head_dim, bias, recipe=recipe, **factory_kwargs)
        self.v_proj = Linear(hidden_size, kv_heads * self.head_dim, bias, recipe=recipe, **factory_kwargs)
        self.o_proj = Linear(heads * self.head_dim, hidden_size, bias, recipe=recipe, **factory_kwargs)
        self.q_norm = None if qk_norm is None else RMSNorm(self.head_dim, qk_norm, **factory_kwargs)
        self.k_norm = None if qk_norm is None else RMSNorm(self.head_dim, qk_norm, **factory_kwargs)
        sink_parameter = nn.Parameter(torch.zeros(heads, **factory_kwargs)) if sinks else None
        self.register_parameter("sinks", sink_parameter)

    def reset_parameters(self) -> None:
        """Reset the sinks; projections and norms reset their own parameters."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def input_numbers(self) -> Numbers:
        return numbers_for(self.q_proj, self.k_proj, self.v_proj)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: KVCache | None = None,
        pages: Pages | None = None,
    ) -> Tensor:
        if (cache is None) != (pages is None):
            raise ValueError("cache= and pages= go together: this layer's cache, and the pages of its tokens")
        x = in_numbers(x, self.input_numbers())
        heads = (
            layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        norm = None
        if self.q_norm is not None and self.k_norm is not None:
            norm = HeadNorm("rms", self.q_norm.weight, self.k_norm.weight, eps=self.q_norm.eps)
        q, k, v, _ = qkv_prepare(
            *heads,
            norm=norm,
            rotation=None if self.rotary_emb is None else self.rotary_emb.rotation,
            positions=positions if pages is None or self.rotary_emb is None else pages.positions,
            cache=cache,
            slots=None if pages is None else pages.slots,
            layout="thd" if x.dim() == 2 else "bshd",
        )
        before = None if self.sliding_window is None else self.sliding_window - 1
        if cache is not None and pages is not None:
            y = attention_decode(
                q, cache, page_table=pages.table, lengths=pages.lengths, window=before, sinks=self.sinks
            ).flatten(-2)
        else:
            assert v is not None
            y = attend(q, k, v, self.o_proj, window=before, sinks=self.sinks, cu_seqlens=cu_seqlens)
        return cast(Tensor, self.o_proj(y))

    def extra_repr(self) -> str:
        return "" if self.sliding_window is None else f"sliding_window={self.sliding_window}"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o_proj: nn.Module,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute causal attention over [batch, tokens, heads, dim] or packed sequences, in the format that `o_proj` takes,
    with the heads of a token concatenated. `window`: how many keys before its own a query sees."""
    numbers = numbers_for(o_proj)
    if numbers.scale is not None:  # attention takes no scale; the layer quantizes its result
        numbers = PLAIN
    y = attention(
        q,
        k,
        v,
        is_causal=window is None,
        window=None if window is None else (window, 0),
        sinks=sinks,
        scale=scale,
        cu_seqlens=cu_seqlens,
        layout="bshd",
        quantize=numbers.format,
        columnwise=numbers.columnwise,
    )
    return y if numbers.format is not None else y.flatten(-2)


class LatentAttention(nn.Module):
    """Causal self-attention whose keys and values come from a per-token latent (MLA), as in DeepSeek-V2 and -V3.

    Sizes and projections have the names of transformers: `q_proj`, or with `q_lora_rank` `q_a_proj`, `q_a_layernorm`
    and `q_b_proj`; `kv_a_proj_with_mqa`, `kv_a_layernorm`, `kv_b_proj`, `o_proj`. `rotary` rotates the last
    `qk_rope_head_dim` elements of queries and the key that all heads share: build it by
    `Rotary.of(config.rope_parameters, dim=config.qk_rope_head_dim, style="interleaved", first=False)`.

    For training and whole prompts. To decode over a cache of latents use `weft.mla_decode`, with `kv_b_proj` absorbed
    into the queries; this module does not do that.

    >>> import torch, weft.nn
    >>> rotary = weft.nn.Rotary(10000.0, dim=16, style="interleaved", first=False)
    >>> layer = weft.nn.LatentAttention(
    ...     128, 4, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
    ...     rotary=rotary,
    ... )
    >>> layer(torch.randn(2, 10, 128)).shape
    torch.Size([2, 10, 128])
    """

    q_proj: Linear | None
    q_a_proj: Linear | None
    q_a_layernorm: RMSNorm | None
    q_b_proj: Linear | None

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        *,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        rotary: Rotary,
        eps: float = 1e-6,
        bias: bool = False,
        recipe: Recipe | str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        heads, dim = num_attention_heads, qk_nope_head_dim + qk_rope_head_dim
        self.head_dim, self.kv_lora_rank = dim, kv_lora_rank
        self.widths = (
            qk_nope_head_dim,
            v_head_dim,
        )  # sizes of a head's key without its rotated part, and of its value
        self.rotary_emb = rotary
        self.scaling = dim**-0.5 * rotary.score_factor
        factory_kwargs: Any = {"device": device, "dtype": dtype}
        if q_lora_rank is None:
            self.q_proj = Linear(hidden_size, heads * dim, False, recipe=recipe, **factory_kwargs)
            self.q_a_proj = self.q_a_layernorm = self.q_b_proj = None
        else:
            self.q_proj = None
            self.q_a_proj = Linear(hidden_size, q_lora_rank, bias, recipe=recipe, **factory_kwargs)
            self.q_a_layernorm = RMSNorm(q_lora_rank, eps, **factory_kwargs)
            self.q_b_proj = Linear(q_lora_rank, heads * dim, False, recipe=recipe, **factory_kwargs)
        self.kv_a_proj_with_mqa = Linear(
            hidden_size, kv_lora_rank + qk_rope_head_dim, bias, recipe=recipe, **factory_kwargs
        )
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, eps, **factory_kwargs)
        self.kv_b_proj = Linear(
            kv_lora_rank, heads * sum(self.widths), False, recipe=recipe, **factory_kwargs
        )
        self.o_proj = Linear(heads * v_head_dim, hidden_size, bias, recipe=recipe, **factory_kwargs)

    def input_numbers(self) -> Numbers:
        first = self.q_a_proj if self.q_proj is None else self.q_proj
        assert first is not None
        return numbers_for(first, self.kv_a_proj_with_mqa)

    def forward(
        self, x: Tensor, *, positions: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        x = in_numbers(x, self.input_numbers())
        q = self.rotary_emb(self.queries(x), positions)
        latent, shared = self.kv_a_proj_with_mqa(x).tensor_split([self.kv_lora_rank], -1)
        latent = self.kv_a_layernorm(latent, numbers=numbers_for(self.kv_b_proj))
        k, v = self.kv_b_proj(latent).unflatten(-1, (-1, sum(self.widths))).split(self.widths, -1)
        shared = self.rotary_emb(shared.unsqueeze(-2), positions)  # one head
        k = torch.cat([k, shared.expand(*k.shape[:-1], -1)], -1)
        y = attend(q, k, v, self.o_proj, scale=self.scaling, cu_seqlens=cu_seqlens)
        return cast(Tensor, self.o_proj(y))

    def queries(self, x: Tensor) -> Tensor:
        """Return queries [..., heads, head_dim], not rotated yet."""
        if self.q_a_proj is None or self.q_a_layernorm is None or self.q_b_proj is None:
            assert self.q_proj is not None
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x), numbers=numbers_for(self.q_b_proj)))
        return cast(Tensor, q.unflatten(-1, (-1, self.head_dim)))
