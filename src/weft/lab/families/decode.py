"""Workloads of attention over caches: one token or a few of each sequence, over pages in every form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops import attention_decode, mla_decode
from ...ops.attention.attention import Attention
from ...ops.heads.cache import KVCache
from ..problem import Call, Inputs, Workload

# Query heads, how many of them share one of keys, and the numbers of heads of queries and of values.
HEADS: dict[str, tuple[int, int, int, int]] = {
    "llama3-8b/decode": (32, 4, 128, 128),
    "gpt-oss-20b/decode": (64, 8, 64, 64),
    "qwen3-next/decode": (16, 8, 256, 256),
    "deepseek-v3/decode": (16, 16, 576, 512),
    "odd/decode": (6, 3, 72, 40),
}

# Further arguments of `attention_decode`, and: tokens, of the longest sequence; page, tokens of one; queries, of each
# sequence; cache: its dtype, and what has a scale. Tokens, page and queries become settings of the workloads.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"tokens": 130, "page": 16},
    "window-sinks": {"tokens": 700, "page": 32, "window": 127, "sinks": True},
    "fp8-token": {"tokens": 200, "page": 64, "cache": (torch.float8_e4m3fn, "token")},
    "fp8-tensor": {"tokens": 600, "page": 64, "cache": (torch.float8_e4m3fn, "tensor"), "queries": 3},
    "int8-head": {"tokens": 150, "page": 1, "cache": (torch.int8, "head"), "softcap": 30.0},
    "latent": {"tokens": 600, "page": 64},
}
_USED: dict[str, tuple[str, ...]] = {
    "plain": ("llama3-8b/decode",),
    "window-sinks": ("gpt-oss-20b/decode",),
    "fp8-token": ("llama3-8b/decode",),
    "fp8-tensor": ("qwen3-next/decode",),
    "int8-head": ("odd/decode",),
    "latent": ("deepseek-v3/decode",),
}
_PARTS = "results of parts are written and read back; sectors of short rows of scales count for each program"


def decode(
    query: Tensor, k: Tensor, v: Tensor | None, k_scale: Tensor | None = None, v_scale: Tensor | None = None, *,
    page_table: Tensor, lengths: Tensor, **options: Any,
) -> Attention:  # fmt: skip
    """`attention_decode`, or `mla_decode` without v, with the tensors of the cache as arguments."""
    cache = KVCache(k, v, k_scale, v_scale)
    attend: Any = mla_decode if v is None else attention_decode
    found = attend(query, cache, page_table=page_table, lengths=lengths, return_lse=True, **options)
    assert isinstance(found, Attention)
    return found


def coded_heads(x: Tensor, dtype: torch.dtype, scaled: str) -> tuple[Tensor, Tensor]:
    """Codes of heads [pages, size, heads, dim], and their scales."""
    dims = {"token": (3,), "head": (0, 1, 3), "tensor": (0, 1, 2, 3)}[scaled]
    largest = 127.0 if dtype is torch.int8 else 448.0
    x = x.float()
    if not x.numel():
        return x.to(dtype), x.new_ones({"token": x.shape[:3], "head": x.shape[2:3], "tensor": ()}[scaled])
    scale = (x.abs().amax(dims, keepdim=True) / largest).clamp(min=1e-12)
    codes = (x / scale).clamp(-largest, largest)
    codes = codes.round() if dtype is torch.int8 else codes
    return codes.to(dtype), scale.squeeze(dims)


def _lengths(rows: int, tokens: int) -> list[int]:
    """Of four sequences two are as long as can be, one is empty, and one has a third."""
    return ([tokens, tokens, 0, tokens // 3] * (rows // 4 + 1))[:rows]


class Decode(Workload):
    """One of whose cache only the tokens that queries see have to be read."""

    def least_bytes(self, rows: int | None = None, dtype: torch.dtype | None = None) -> int:
        call, options = self.make("meta", dtype, rows), OPTIONS[self.options]
        lengths = _lengths(len(call["lengths"]), options["tokens"])
        reach = (
            options["tokens"] if "window" not in options else options["window"] + options.get("queries", 1)
        )
        unused = sum(
            -(-options["tokens"] // options["page"]) * options["page"] - min(n, reach) for n in lengths
        )
        paged = [
            x for name in ("k", "v", "k_scale", "v_scale") if (x := call[name]) is not None and x.dim() > 1
        ]
        per_token: int = sum(x[0].numel() * x.element_size() // options["page"] for x in paged)
        return int(super().least_bytes(rows, dtype) - unused * per_token)


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    (rows, width), options = shape, dict(OPTIONS[workload.options])
    settings = dict(workload.settings)
    group, dim, v_dim = settings["group"], settings["dim"], settings["v_dim"]
    key_heads = max(1, width // (dim * group)) if v_dim <= dim and dim < 512 else 1
    heads = key_heads * group
    tokens, page, queries = (settings[name] for name in ("tokens", "page", "queries"))
    options = {name: value for name, value in options.items() if name not in ("tokens", "page", "queries")}
    pages = -(-tokens // page)
    latent = workload.options == "latent"
    query = (rows, heads, dim) if queries == 1 else (rows, queries, heads, dim)
    lead = (rows * pages,) if page == 1 else (rows * pages, page)
    made: dict[str, Any] = {"query": inputs.normal(*query), "k": inputs.normal(*lead, key_heads, dim)}
    made["v"] = None if latent else inputs.normal(*lead, key_heads, v_dim)
    if "cache" in options:
        dtype, scaled = options.pop("cache")
        for name in ("k", "v"):
            paged = made[name] if page > 1 else made[name][:, None]
            codes, scale = coded_heads(paged, dtype, scaled)
            made[name] = codes if page > 1 else codes[:, 0]
            made[f"{name}_scale"] = scale
    if options.pop("sinks", False):
        made["sinks"] = inputs.normal(heads)
    # Pages are handed out from the end.
    on: dict[str, Any] = {"dtype": torch.int32, "device": inputs.device}
    made["page_table"] = torch.arange(rows * pages - 1, -1, -1, **on).view(rows, pages)
    kind = torch.arange(rows, **on) % 4  # as in `_lengths`, of sizes that may be symbols
    made["lengths"] = ((kind < 2) * tokens + (kind == 3) * (tokens // 3)).to(torch.int32)
    if latent:
        options["scale"] = 192**-0.5
    return Call(decode, made | options)


WORKLOADS: tuple[Workload, ...] = tuple(
    Decode(
        op="attention_decode",
        name=name,
        options=options,
        shape=("rows", heads * dim),
        rows=32,
        build=_build,
        tags=frozenset({"inference"}),
        settings=(
            *(("group", group), ("dim", dim), ("v_dim", v_dim)),
            *((name, OPTIONS[options].get(name, 1)) for name in ("tokens", "page", "queries")),
        ),
        rereads=_PARTS,
        moves=1.5,
    )
    for options, names in _USED.items()
    for name in names
    for heads, group, dim, v_dim in (HEADS[name],)
)
