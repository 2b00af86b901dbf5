"""Attention over caches: one token or a few per sequence, over every kind of paged cache."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...ops import attention_decode, mla_decode
from ...ops.attention.attention import Attention
from ...ops.common.kv_cache import KVCache
from ..family import Family
from ..problem import Call, Inputs, Workload
from ..truth import EPS32, Near, arguments
from .attention import Buffers, half_step, sees, sum_error, weights_of

# (query heads, query heads per key head, dim, v_dim)
HEADS: dict[str, tuple[int, int, int, int]] = {
    "llama3-8b/decode": (32, 4, 128, 128),
    "gpt-oss-20b/decode": (64, 8, 64, 64),
    "qwen3-next/decode": (16, 8, 256, 256),
    "deepseek-v3/decode": (16, 16, 576, 512),
    "odd/decode": (6, 3, 72, 40),
}

# Further arguments of `attention_decode`, and: tokens of the longest sequence; page: tokens per page; queries per
# sequence; cache: its dtype and the granularity of its scales. Tokens, page and queries become workload settings.
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
    page_table: Tensor, lengths: Tensor, out: Any = None, **options: Any,
) -> Attention:  # fmt: skip
    """Call `attention_decode`, or `mla_decode` without v, with the tensors of the cache as arguments."""
    cache = KVCache(k, v, k_scale, v_scale)
    attend: Any = mla_decode if v is None else attention_decode
    result = attend(query, cache, page_table=page_table, lengths=lengths, return_lse=True, out=out, **options)
    assert isinstance(result, Attention)
    return result


def coded_heads(x: Tensor, dtype: torch.dtype, scaled: str) -> tuple[Tensor, Tensor]:
    """Quantize heads [pages, size, heads, dim]; return codes and scales."""
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
    """Return lengths: of every four sequences two have `tokens`, one is empty, and one has a third."""
    return ([tokens, tokens, 0, tokens // 3] * (rows // 4 + 1))[:rows]


class Decode(Workload):
    """Workload that has to read only the cached tokens that its queries see."""

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
    tensors: dict[str, Any] = {"query": inputs.normal(*query), "k": inputs.normal(*lead, key_heads, dim)}
    tensors["v"] = None if latent else inputs.normal(*lead, key_heads, v_dim)
    if "cache" in options:
        dtype, scaled = options.pop("cache")
        for name in ("k", "v"):
            paged = tensors[name] if page > 1 else tensors[name][:, None]
            codes, scale = coded_heads(paged, dtype, scaled)
            tensors[name] = codes if page > 1 else codes[:, 0]
            tensors[f"{name}_scale"] = scale
    if options.pop("sinks", False):
        tensors["sinks"] = inputs.normal(heads)
    # Pages are allocated from the end.
    on: dict[str, Any] = {"dtype": torch.int32, "device": inputs.device}
    tensors["page_table"] = torch.arange(rows * pages - 1, -1, -1, **on).view(rows, pages)
    kind = torch.arange(rows, **on) % 4  # as in `_lengths`, but for symbolic sizes
    tensors["lengths"] = ((kind < 2) * tokens + (kind == 3) * (tokens // 3)).to(torch.int32)
    if latent:
        options["scale"] = 192**-0.5
    return Call(decode, tensors | options)


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


# ---- truth ----------------------------------------------------------------------------------------------------


def decode_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the attention of each sequence with the keys and values that its pages hold."""
    args = arguments(call) | call.kwargs
    query = args["query"]
    four = query if query.dim() == 4 else query[:, None]
    v_dim = 512 if args["v"] is None else args["v"].shape[-1]
    out, lse = (
        Buffers.zeros(*four.shape[:3], v_dim),
        Buffers.zeros(four.shape[0], four.shape[2], four.shape[1]),
    )
    coded = args["k_scale"] is not None
    for s in range(len(four)):
        length = max(int(args["lengths"][s]), 0)
        k = _from_pages(args["k"], args["k_scale"], args["page_table"][s], length)
        v = k[..., :v_dim] if args["v"] is None else None
        if v is None:
            v = _from_pages(args["v"], args["v_scale"], args["page_table"][s], length)
        own = four[s].double()
        for h in range(four.shape[2]):
            head = h // (four.shape[2] // k.shape[1])
            options = {"scale": args.get("scale"), "softcap": args.get("softcap")}
            window = args.get("window")
            seen = sees(
                len(own), length, {"window": None if window is None else (window, 0), "is_causal": True}
            )
            sink = -math.inf if args.get("sinks") is None else float(args["sinks"][h])
            w = weights_of(own[:, h], k[:, head], sink, seen, options)
            # Codes are multiplied in bf16 at worst, plain elements in their own dtype.
            rounding = half_step(torch.bfloat16) if coded else half_step(query.dtype)
            out.truth[s, :, h] = w.p @ v[:, head]
            out.noise[s, :, h] = (w.error + rounding + sum_error(length)) * (w.p @ v[:, head].abs())
            lse.truth[s, h] = w.lse
            lse.noise[s, h] = w.error[:, 0] + 4 * EPS32 * torch.where(w.lse.isfinite(), w.lse.abs(), 0.0)
    if query.dim() == 3:
        return {
            "out": Near(out.truth[:, 0], out.noise[:, 0]),
            "lse": Near(lse.truth[..., 0], lse.noise[..., 0]),
        }
    return {"out": out.near(), "lse": lse.near()}


def _from_pages(cache: Tensor, scale: Tensor | None, pages: Tensor, length: int) -> Tensor:
    """Decode the heads [tokens, heads, dim] of a sequence to float64, one token after another."""
    paged = cache if cache.dim() == 4 else cache[:, None]
    heads = torch.zeros(length, *paged.shape[2:], dtype=torch.float64)
    for token in range(length):
        page, place = int(pages[token // paged.shape[1]]), token % paged.shape[1]
        heads[token] = paged[page, place].double()
        if scale is not None:
            own = scale
            if scale.dim() > 1:
                own = (scale if cache.dim() == 4 else scale[:, None])[page, place]
            heads[token] *= own.double()[..., None] if own.dim() else own.double()
    return heads


FAMILY = Family(workloads=WORKLOADS, truths={"attention_decode": decode_truth})
