"""Attention: heads of real models over many short sequences, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.attention.arguments import AttentionBackwardArgs, AttentionGradients, Mask, Packed
from ...ops.attention.attention import attention
from ...ops.quantize.quantize import quantize
from ...quant import QTensor
from ...runtime import catalogue, recording
from ..chain import Chain, chain, tensors_of
from ..family import Compute, Family
from ..problem import Call, Inputs, Workload
from ..truth import EPS32, Near, arguments

# (query heads, query heads per key head, dim, v_dim). Two groups of each model's heads suffice, since all groups are
# alike: few heads of many sequences move as many bytes.
HEADS: dict[str, tuple[int, int, int, int]] = {
    "qwen3-30b-a3b/heads": (16, 8, 128, 128),
    "llama3-8b/heads": (8, 4, 128, 128),
    "gpt-oss-20b/heads": (16, 8, 64, 64),
    "gemma2-9b/heads": (4, 2, 256, 256),
    "deepseek-v3/heads": (4, 1, 192, 128),
    "odd/heads": (10, 5, 72, 24),
}

# Further arguments of `attention`, and: tokens, the queries per sequence; keys, its keys if not as many; sinks,
# packed, kv_lengths, prefix_lengths, kv_limits and alibi: create these tensors; mask and bias: create them with these
# sizes of [batch, heads, queries, keys], where "all" is the size of the call; codes: the format of queries and keys.
# Tokens and keys become settings of the workloads, which may vary like the sizes of its shape.
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"tokens": 100, "is_causal": True},
    "packed": {"tokens": 90, "packed": True, "is_causal": True, "return_lse": True},
    "window-sinks": {"tokens": 130, "window": (40, 0), "sinks": True, "layout": "bshd", "return_lse": True},
    "softcap": {"tokens": 70, "is_causal": True, "softcap": 50.0, "layout": "sbhd"},
    "cross": {"tokens": 33, "keys": 75, "kv_lengths": True, "return_max": True},
    "prefix": {"tokens": 90, "is_causal": True, "prefix_lengths": True, "return_lse": True},
    "limits": {"tokens": 70, "packed": True, "kv_limits": True, "window": (30, 5), "return_lse": True},
    "mask": {"tokens": 130, "keys": 150, "mask": ("all", 1, "all", "all"), "return_lse": True},
    "mask-of-heads": {"tokens": 70, "mask": (1, "all", "all", "all"), "window": (30, 9)},
    "bias": {"tokens": 90, "bias": (1, "all", "all", "all"), "return_lse": True},
    "alibi": {"tokens": 90, "packed": True, "is_causal": True, "alibi": True},
    "1x128": {"tokens": 70, "is_causal": True, "layout": "bshd", "quantize": "1x128"},
    "eight-bits": {
        "tokens": 100,
        "is_causal": True,
        "codes": "e4m3:row",
        "values": "e4m3",
        "return_lse": True,
    },
    "packed-eight-bits": {"tokens": 60, "packed": True, "codes": "e4m3:row", "values": "e4m3"},
    "int8": {"tokens": 100, "is_causal": True, "codes": "int8:row", "values": "int8", "return_lse": True},
    "packed-int8": {"tokens": 90, "packed": True, "window": (40, 3), "codes": "int8:row", "values": "int8"},
    "mxfp8": {"tokens": 100, "is_causal": True, "codes": "e4m3:mx", "return_lse": True},
    "both-copies": {"tokens": 40, "packed": True, "is_causal": True, "quantize": "mx", "columnwise": True},
}

_FORWARD: dict[str, tuple[str, ...]] = {
    "causal": ("llama3-8b/heads", "deepseek-v3/heads"),
    "packed": ("qwen3-30b-a3b/heads",),
    "window-sinks": ("gpt-oss-20b/heads",),
    "softcap": ("gemma2-9b/heads",),
    "cross": ("odd/heads",),
    "prefix": ("gemma2-9b/heads",),
    "limits": ("odd/heads",),
    "mask": ("llama3-8b/heads",),
    "mask-of-heads": ("odd/heads",),
    "bias": ("llama3-8b/heads",),
    "alibi": ("odd/heads",),
    "1x128": ("llama3-8b/heads",),
    "both-copies": ("odd/heads",),
}
_EIGHT_BITS: dict[str, tuple[str, ...]] = {
    "eight-bits": ("llama3-8b/heads",),
    "packed-eight-bits": ("odd/heads",),
    "int8": ("llama3-8b/heads",),
    "packed-int8": ("odd/heads",),
    "mxfp8": ("deepseek-v3/heads",),
}
_BACKWARD: dict[str, tuple[str, ...]] = {
    "causal": ("llama3-8b/heads",),
    "packed": ("qwen3-30b-a3b/heads",),
    "window-sinks": ("gpt-oss-20b/heads",),
    "softcap": ("gemma2-9b/heads",),
    "cross": ("odd/heads",),
    "prefix": ("gemma2-9b/heads",),
    "limits": ("odd/heads",),
    "mask": ("llama3-8b/heads",),
    "mask-of-heads": ("odd/heads",),
    "bias": ("llama3-8b/heads",),
    "alibi": ("odd/heads",),
}
_TILES = "keys and values are read once for each tile of queries and each head, and the other way round in backward"


def _starts(rows: int, tokens: int, device: torch.device) -> tuple[Tensor, int]:
    """Return the starts of sequences, and how many tokens they have together.

    Of four sequences, one has all tokens, one none, one a single token, and one half of them. The sum is computed from
    the sizes, which may be symbols, and not read from the tensor."""
    kind = torch.arange(rows, device=device) % 4
    lengths = (kind == 0) * tokens + (kind == 2) * 1 + (kind == 3) * (tokens // 2)
    first = torch.zeros(1, dtype=torch.long, device=device)
    starts = torch.cat([first, lengths.cumsum(0)]).to(torch.int32)
    return starts, tokens * ((rows + 3) // 4) + (rows + 1) // 4 + tokens // 2 * (rows // 4)


def _blocks_of(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Create a mask with full, empty and partial blocks of 32 pairs and more; some queries see nothing."""
    b, h, q, k = (
        torch.arange(size, device=device).view([-1 if i == at else 1 for i in range(4)])
        for at, size in enumerate(sizes)
    )
    kind = (q // 64 + k // 32 + b + h) % 4
    return ((kind == 0) | ((kind == 1) & ((q + k) % 3 > 0))) & (q % 50 != 49)


def _shaped(layout: str, rows: int, tokens: int, heads: int, dim: int) -> tuple[int, ...]:
    shapes = {
        "bhsd": (rows, heads, tokens, dim),
        "bshd": (rows, tokens, heads, dim),
        "sbhd": (tokens, rows, heads, dim),
    }
    return shapes[layout]


def _heads(workload: Workload, width: int) -> tuple[int, int, int, int]:
    """Return (heads, key heads, dim, v_dim) of a token whose query heads have that many elements."""
    settings = dict(workload.settings)
    group, dim = settings["group"], settings["dim"]
    key_heads = max(1, width // (dim * group))
    return key_heads * group, key_heads, dim, settings["v_dim"]


def _tensors(
    workload: Workload, inputs: Inputs, shape: tuple[int, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw the tensors; return them by name, and the further arguments."""
    (rows, width), options = shape, dict(OPTIONS[workload.options])
    heads, key_heads, dim, v_dim = _heads(workload, width)
    settings, device = dict(workload.settings), inputs.device
    tokens = settings["tokens"]
    keys = settings.get("keys", tokens)
    options = {name: value for name, value in options.items() if name not in ("tokens", "keys")}
    tensors: dict[str, Any] = {}
    if options.pop("packed", False):
        tensors["cu_seqlens"], total = _starts(rows, tokens, device)
        shapes: list[tuple[int, ...]] = [
            (total, heads, dim),
            (total, key_heads, dim),
            (total, key_heads, v_dim),
        ]
    else:
        layout = options.get("layout", "bhsd")
        shapes = [
            _shaped(layout, rows, tokens, heads, dim),
            _shaped(layout, rows, keys, key_heads, dim),
            _shaped(layout, rows, keys, key_heads, v_dim),
        ]
    if options.pop("sinks", False):
        tensors["sinks"] = inputs.normal(heads)
    if options.pop("kv_lengths", False):
        tensors["kv_lengths"] = torch.arange(rows, dtype=torch.int32, device=device) * 23 % (keys + 1)
    if options.pop("prefix_lengths", False):
        tensors["prefix_lengths"] = torch.arange(rows, dtype=torch.int32, device=device) * 37 % (keys + 9)
    if options.pop("kv_limits", False):
        queries = shapes[0][0]
        tensors["kv_limits"] = torch.arange(queries, device=device) * 31 % (keys + 9) - 4
    for name in ("mask", "bias"):
        if name in options:
            sizes = tuple(
                all_ if size == "all" else 1
                for size, all_ in zip(options.pop(name), (rows, heads, tokens, keys), strict=True)
            )
            tensors[name] = _blocks_of(sizes, device) if name == "mask" else inputs.normal(*sizes)
    if options.pop("alibi", False):
        tensors["alibi"] = inputs.normal(heads, 2, dtype=torch.float32).abs() / 8
    codes = options.pop("codes", None)
    for name, size in zip(("query", "key", "value"), shapes, strict=True):
        drawn = inputs.normal(*size)
        tensors[name] = drawn if codes is None or name == "value" else quantize(drawn, codes)
    return tensors, options


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    tensors, options = _tensors(workload, inputs, shape)
    return Call(attention, tensors | options | {"engine": "weft"})


def attention_backward(
    dy: Tensor, dlse: Tensor | None, y: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor,
    sinks: Tensor | None = None, cu_seqlens: Tensor | None = None, kv_lengths: Tensor | None = None,
    prefix_lengths: Tensor | None = None, kv_limits: Tensor | None = None, seen: Tensor | None = None,
    bias: Tensor | None = None, alibi: Tensor | None = None, *, mask: Mask, softcap: float, layout: str,
) -> Any:  # fmt: skip
    """Call the backward op, with its tensors as arguments."""
    needs = AttentionGradients(True, True, True, *(x is not None for x in (sinks, bias, alibi)))
    packed = Packed(cu_seqlens, cu_seqlens, kv_lengths, prefix_lengths, kv_limits)
    scale = query.shape[-1] ** -0.5
    return catalogue["attention_backward"](
        AttentionBackwardArgs(
            dy, dlse, y, lse, query, key, value, sinks, packed, mask, scale, softcap, layout, "weft",
            needs, seen, bias, alibi,
        )
    )  # fmt: skip


def _build_backward(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    """Build the backward of the same call, on results of the forward."""
    tensors, options = _tensors(workload, inputs, shape)
    layout = "thd" if "cu_seqlens" in tensors else options.get("layout", "bhsd")
    on_meta = inputs.device.type == "meta"
    with torch.no_grad(), recording("sm_90") if on_meta else nullcontext():
        forward = attention(**tensors, **options | {"return_lse": True, "engine": "weft"})
    y, lse = forward.out, forward.lse
    y = y.transpose(1, 2) if layout == "bhsd" else y
    left, right = options.get("window", (None, None))
    return Call(
        attention_backward,
        {
            "dy": inputs.normal(*y.shape),
            "dlse": inputs.normal(*lse.shape, dtype=lse.dtype) if options.get("return_lse") else None,
            "y": y,
            "lse": lse,
            **{"seen" if name == "mask" else name: tensor for name, tensor in tensors.items()},
            "mask": Mask(left, 0 if options.get("is_causal") else right, True),
            "softcap": options.get("softcap", 0.0),
            "layout": layout,
        },
    )


def _workloads(op: str, used: dict[str, tuple[str, ...]], build: Any, *tags: str) -> list[Workload]:
    return [
        Workload(
            op=op,
            name=name,
            options=options,
            shape=("rows", heads * dim),
            rows=256,
            build=build,
            tags=frozenset(tags),
            settings=(
                *(("group", group), ("dim", dim), ("v_dim", v_dim)),
                *((name, OPTIONS[options][name]) for name in ("tokens", "keys") if name in OPTIONS[options]),
            ),
            fp8_dot=OPTIONS[options].get("values") == "e4m3",
            rereads=_TILES,
            moves=3.0 if options == "bias" else 2.7,  # gradients of scores are written before they are summed
        )
        for options, names in used.items()
        for name in names
        for heads, group, dim, v_dim in (HEADS[name],)
    ]


WORKLOADS: tuple[Workload, ...] = (
    *_workloads("attention", _FORWARD, _build, "training"),
    *_workloads("attention", _EIGHT_BITS, _build, "inference"),
    *_workloads("attention_backward", _BACKWARD, _build_backward, "training", "backward"),
)


def _flops(workload: Workload) -> int:
    """Count two products, with half of the pairs if later keys are not seen; windows and lengths are left out."""
    options = OPTIONS[workload.options]
    heads, _, dim, v_dim = _heads(workload, workload.cols)
    pairs = workload.rows * heads * options["tokens"] * options.get("keys", options["tokens"])
    return int(2 * pairs * (dim + v_dim) // (2 if options.get("is_causal") else 1))


# ---- truth: sequence by sequence and head by head -------------------------------------------------------------

# Axes of batch, tokens and heads.
PLACES = {"bhsd": (0, 2, 1), "bshd": (0, 1, 2), "sbhd": (1, 0, 2)}


@dataclass
class Head:
    """Location of one head of one sequence in tensors [batch, tokens, heads, dim]."""

    batch: int
    queries: slice
    keys: slice
    head: int
    key_head: int
    prefix: int
    limits: Tensor | None  # [queries]
    seen: Tensor | None = None  # [queries, keys]
    bias: Tensor | None = None
    slopes: tuple[float, float] | None = None


def spread(x: Tensor, layout: str) -> Tensor:
    """Permute to [batch, tokens, heads, dim]."""
    if x.dim() == 3:
        return x[None]
    return x.permute(*PLACES[layout], 3)


def gathered(x: Tensor, layout: str, packed: bool) -> Tensor:
    """Undo `spread`."""
    if packed:
        return x[0]
    order = [0] * 4
    for new, old in enumerate((*PLACES[layout], 3)):
        order[old] = new
    return x.permute(order)


def _each_head(args: dict[str, Any], query: Tensor, key: Tensor) -> Iterator[Head]:
    """Yield the heads of all sequences."""
    starts, k_starts, used = args["cu_seqlens"], args.get("cu_seqlens_k"), args["kv_lengths"]
    k_starts = starts if k_starts is None else k_starts
    number = query.shape[0] if starts is None else len(starts) - 1
    group = query.shape[2] // key.shape[2]
    for i in range(number):
        if starts is None:
            queries, keys, batch = slice(0, query.shape[1]), slice(0, key.shape[1]), i
        else:
            queries, keys = (slice(int(s[i]), int(s[i + 1])) for s in (starts, k_starts))
            batch = 0
        if used is not None:
            keys = slice(keys.start, min(keys.stop, keys.start + max(int(used[i]), 0)))
        prefixes, limits = args.get("prefix_lengths"), args.get("kv_limits")
        prefix = 0 if prefixes is None else min(int(prefixes[i]), keys.stop - keys.start)
        if limits is not None:
            limits = limits[queries] if starts is not None else limits[batch]
        for head in range(query.shape[2]):
            seen, bias = (
                None if pairs is None else _pairs_of(pairs, batch, head, query.shape[1], key.shape[1])
                for pairs in (args["mask"], args["bias"])
            )
            slopes = None if args["alibi"] is None else _slopes_of(args["alibi"], head)
            yield Head(batch, queries, keys, head, head // group, prefix, limits, seen, bias, slopes)


def _pairs_of(x: Tensor, batch: int, head: int, queries: int, keys: int) -> Tensor:
    """Return the pairs of one head, [queries, keys]."""
    x = x.detach()
    x = x[(None,) * (4 - x.dim())]
    x = x.expand(x.shape[0], x.shape[1], queries, keys)
    return x[batch if x.shape[0] > 1 else 0, head if x.shape[1] > 1 else 0]


def _slopes_of(alibi: Tensor, head: int) -> tuple[float, float]:
    """Return the slopes of a head for keys before the own key, and after it."""
    slopes = alibi[head].detach().reshape(-1)
    return float(slopes[0]), float(slopes[-1])


def _distances(queries: int, keys: int, options: dict[str, Any]) -> Tensor:
    """Return how far each key lies after each query's own key, in float64."""
    own = torch.arange(queries) + (0 if options.get("causal_align") == "upper_left" else keys - queries)
    return (torch.arange(keys)[None, :] - own[:, None]).double()


def _added(at: Head, queries: int, keys: int, options: dict[str, Any]) -> Tensor:
    """Return what bias and ALiBi add to scores, [queries, keys]."""
    total = torch.zeros(queries, keys, dtype=torch.float64)
    if at.bias is not None:
        total = total + at.bias[:, :keys].double()
    if at.slopes is not None:
        distance = _distances(queries, keys, options)
        total = total + torch.where(distance < 0, distance * at.slopes[0], -distance * at.slopes[1])
    return total


def sees(queries: int, keys: int, options: dict[str, Any], at: Head | None = None) -> Tensor:
    """Return which queries see which keys, as bool [queries, keys]."""
    left, right = options.get("window") or (None, None)
    right = 0 if options.get("is_causal") else right
    upper_left = options.get("causal_align") == "upper_left"
    seen = _mask(queries, keys, left, right, upper_left)
    if at is not None and at.prefix > 0:
        seen, before = seen.clone(), 0 if upper_left else max(queries - keys, 0)
        own = slice(before, max(at.prefix + (0 if upper_left else queries - keys), 0))
        seen[own, : at.prefix] = True
    if at is not None and at.limits is not None:
        seen = seen & (torch.arange(keys) < at.limits[:, None])
    if at is not None and at.seen is not None:
        seen = seen & at.seen[:, :keys]
    return seen


@cache
def _mask(queries: int, keys: int, left: int | None, right: int | None, upper_left: bool) -> Tensor:
    """Return the mask, one query after another."""
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    for i in range(queries):
        own = i if upper_left else i + keys - queries
        first = 0 if left is None else max(own - left, 0)
        last = keys - 1 if right is None else min(own + right, keys - 1)
        seen[i, first : max(last + 1, first)] = True
    return seen


@dataclass
class Weights:
    """Scores and probabilities of a head, and the relative error of p that fp32 may cause."""

    scores: Tensor
    slope: Tensor
    p: Tensor
    lse: Tensor
    error: Tensor  # [queries, 1]


def weights_of(
    q: Tensor, k: Tensor, sink: float, seen: Tensor, args: dict[str, Any], added: Tensor | None = None
) -> Weights:
    """Compute scores, probabilities and lse of a head, and their error bound for fp32. `added` are terms of scores."""
    scale = q.shape[-1] ** -0.5 if args["scale"] is None else args["scale"]
    cap = args["softcap"] or 0.0
    s = scale * (q @ k.T)
    size = scale * (q.abs() @ k.abs().T)
    slope = torch.ones_like(s)
    if cap:
        t = torch.tanh(s / cap)
        s, slope = cap * t, 1 - t * t
        size = size.clamp(max=cap) + 8 * cap
    if added is not None:
        s, size = s + added, size + added.abs().nan_to_num(posinf=0.0)
    s = s.masked_fill(~seen, -math.inf)
    terms = torch.cat([s, torch.full((len(q), 1), sink, dtype=s.dtype)], 1)
    lse = torch.logsumexp(terms, 1)
    p = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[:, None])
    # Scores in base 2, and what is subtracted from them, are off by a few roundings of their size.
    largest = torch.where(seen, size, 0.0).amax(1, keepdim=True) if k.numel() else s.new_zeros(len(q), 1)
    largest = largest + torch.where(lse.isfinite(), lse.abs(), 0.0)[:, None]
    error = EPS32 * ((q.shape[-1] / 16 + 8) * largest + len(k) / 16 + 16)
    return Weights(s, slope, p, lse, error)


def sum_error(terms: int) -> float:
    """Return the error of an fp32 sum, relative to the sum of sizes; terms are added up 16 or more at a time."""
    return (terms / 16 + 4) * EPS32


def half_step(dtype: torch.dtype) -> float:
    """Return the largest relative error of a rounding to a dtype."""
    return torch.finfo(dtype).eps / 2


@dataclass
class Buffers:
    """Truth and noise of a result or gradient, filled head by head."""

    truth: Tensor
    noise: Tensor

    @staticmethod
    def zeros(*shape: int) -> Buffers:
        return Buffers(torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64))

    def near(self) -> Near:
        return Near(self.truth, self.noise)


# Rounding error of weights below e4m3's normal range, relative to the largest weight of the row.
LEAST_WEIGHT = 2.0**-18
# Of weights in int8: relative to the row's largest weight in a tile of keys, which divides a block of values.
STEP = 0.5 / 127
BLOCK = 64


def _decoded(x: Tensor) -> Tensor:
    """Decode to float64."""
    return x.dequantize(torch.float64) if isinstance(x, QTensor) else x.detach().double()


def _through_codes(value: Tensor, element: str) -> Tensor:
    """Round values [keys, dim] to codes, with a scale for each column, in int8 for each column of a block."""
    from .. import oracle

    blocks, in_int8 = value.split(BLOCK) if element == "int8" else (value,), element == "int8"
    decoded = []
    for block in blocks:
        result = oracle.quantize(
            block.float(), block="row", element=element, convention="torchao" if in_int8 else "te",
            power_of_two=False, transpose=True,
        )  # fmt: skip
        data = result.data.view(torch.int8 if in_int8 else torch.float8_e4m3fn)
        decoded.append((data.double() * result.scale.double().view(-1, 1)).T)
    return torch.cat(decoded)


def _weight_noise(p: Tensor, value: Tensor, element: str) -> Tensor:
    """Return the error of results [queries, dim] that rounding small weights to an element may cause."""
    if element != "int8":
        return LEAST_WEIGHT * p.amax(1, keepdim=True) * value.abs().sum(0)
    noise = torch.zeros(len(p), value.shape[1], dtype=p.dtype)
    for weights, rows in zip(p.split(BLOCK, 1), value.split(BLOCK), strict=True):
        noise += STEP * weights.amax(1, keepdim=True) * rows.abs().sum(0)
    return noise


def attention_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the results of a call, and the gradients of its inputs."""
    return _truth_of(arguments(call), gradients)


def _truth_of(args: dict[str, Any], gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the results for arguments by name, and the gradients, sequence by sequence and head by head."""
    layout, packed = args["layout"], args["cu_seqlens"] is not None
    dtype = args["query"].dtype
    q, k, v = (spread(_decoded(args[name]), layout) for name in ("query", "key", "value"))
    batch, tokens, heads, _ = q.shape
    sinks = args["sinks"]
    y, lse, top = (
        Buffers.zeros(batch, tokens, heads, v.shape[-1]),
        Buffers.zeros(batch, heads, tokens),
        Buffers.zeros(heads),
    )
    lse.truth.fill_(-math.inf)
    top.truth.fill_(-math.inf)
    several = args["return_lse"] or args["return_max"]
    dy = gradients.get("out" if several else "y")
    if dy is not None:
        dy = dy.double()
        if args["quantize"] is not None:
            dy = dy.unflatten(-1, (heads, -1))
            dy = spread(dy, "sbhd" if layout == "sbhd" else "bshd")
        else:
            dy = spread(dy, layout)
    dlse = gradients.get("lse")
    if dlse is not None:
        dlse = (dlse[None] if packed else dlse).double()
    grads = {
        "query": Buffers.zeros(*q.shape),
        "key": Buffers.zeros(*k.shape),
        "value": Buffers.zeros(*v.shape),
    }
    dsinks, dalibi, dbias = Buffers.zeros(heads), Buffers.zeros(heads, 2), None
    if args["bias"] is not None:
        dbias = Buffers.zeros(batch, heads, tokens, k.shape[1])
    rounding = half_step(dtype) if dtype != torch.float32 else 0.0
    if args.get("values") is not None:
        rounding = 0.0 if args["values"] == "int8" else half_step(torch.float8_e4m3fn)
    for at in _each_head(args, q, k):
        b, i, j, h, g = at.batch, at.queries, at.keys, at.head, at.key_head
        qh, kh, vh = q[b, i, h], k[b, j, g], v[b, j, g]
        eight_bits = args.get("values") is not None and len(vh) > 0
        if eight_bits:
            seen = sees(len(qh), len(kh), args, at).any(0)[:, None]
            vh = _through_codes(torch.where(seen, vh, 0.0), args["values"])
        sink = -math.inf if sinks is None else float(sinks[h].detach())
        added = _added(at, len(qh), len(kh), args)
        w = weights_of(qh, kh, sink, sees(len(qh), len(kh), args, at), args, added)
        y.truth[b, i, h] = out = w.p @ vh
        y.noise[b, i, h] = noise = (w.error + rounding + sum_error(len(kh))) * (w.p @ vh.abs())
        if eight_bits:
            y.noise[b, i, h] += _weight_noise(w.p, vh, args["values"])
        lse.truth[b, h, i] = w.lse
        lse.noise[b, h, i] = w.error[:, 0] + 4 * EPS32 * torch.where(w.lse.isfinite(), w.lse.abs(), 0.0)
        if w.scores.numel():
            top.truth[h] = max(top.truth[h], w.scores.amax())
            top.noise[h] = max(top.noise[h], w.error.amax())
        if dy is None and dlse is None:
            continue
        do = torch.zeros_like(out) if dy is None else dy[b, i, h]
        # The kernels compute delta from the rounded y.
        delta = (do * out).sum(1, keepdim=True)
        delta_noise = (do.abs() * (noise + (rounding or EPS32) * (out.abs() + noise))).sum(1, keepdim=True)
        delta_noise += sum_error(v.shape[-1]) * (do * out).abs().sum(1, keepdim=True)
        if dlse is not None:
            delta = delta - dlse[b, h, i][:, None]
            delta_noise += 2 * EPS32 * delta.abs()
        dp, dp_size = do @ vh.T, do.abs() @ vh.abs().T
        dterm = w.p * (dp - delta)
        ds = dterm * w.slope
        size = w.p * (dp_size + delta.abs())
        ds_noise = size * (w.error + sum_error(v.shape[-1])) + w.p * delta_noise
        if dbias is not None:
            dbias.truth[b, h, :, : len(kh)], dbias.noise[b, h, :, : len(kh)] = dterm, ds_noise
        if at.slopes is not None:
            distance = _distances(len(qh), len(kh), args)
            for side, far in enumerate((distance.clamp(max=0), -distance.clamp(min=0))):
                dalibi.truth[h, side] += (dterm * far).sum()
                noise = (ds_noise + sum_error(dterm.numel()) * dterm.abs()) * far.abs()
                dalibi.noise[h, side] += noise.sum()
        ds_noise = ds_noise + rounding * ds.abs()
        if args["softcap"]:
            ds_noise = ds_noise + 32 * EPS32 * size
        scale = q.shape[-1] ** -0.5 if args["scale"] is None else args["scale"]
        for name, weights, weights_noise, rows, into in (
            ("query", ds, ds_noise, kh, (b, i, h)),
            ("key", ds.T, ds_noise.T, qh, (b, j, g)),
            ("value", w.p.T, (w.p * (w.error + rounding)).T, do, (b, j, g)),
        ):
            factor = 1.0 if name == "value" else scale
            grads[name].truth[into] += factor * (weights @ rows)
            terms = rows.shape[0] * (heads // k.shape[2])
            step = (weights_noise + sum_error(terms) * weights.abs()) @ rows.abs()
            grads[name].noise[into] += factor * step
        if sinks is not None and sink > -math.inf:
            share = torch.exp(sink - w.lse)[:, None]
            dsinks.truth[h] -= (share * delta).sum()
            dsinks.noise[h] += (share * (delta_noise + (w.error + 64 * EPS32) * delta.abs())).sum()
    expected: dict[str, Near | Tensor] = {
        "out" if several else "y": Near(*(gathered(t, layout, packed) for t in (y.truth, y.noise))),
        "lse": Near(*((t[0] if packed else t) for t in (lse.truth, lse.noise))),
        "max": top.near(),
        "dsinks": dsinks.near(),
    }
    if dbias is not None:
        shape = args["bias"].shape
        summed = dbias.truth.numel() // max(math.prod(shape), 1)
        noise = dbias.noise + (sum_error(summed) if summed > 1 else 0.0) * dbias.truth.abs()
        expected["dbias"] = Near(dbias.truth.sum_to_size(shape), noise.sum_to_size(shape))
    if args["alibi"] is not None:
        one = args["alibi"].dim() == 1
        expected["dalibi"] = Near(*(x.sum(1) if one else x for x in (dalibi.truth, dalibi.noise)))
    for name, buffers in grads.items():
        expected[f"d{name}"] = Near(*(gathered(t, layout, packed) for t in (buffers.truth, buffers.noise)))
    return expected


def attention_backward_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the gradients of the forward call that the arguments belong to."""
    args = arguments(call)
    mask, layout = args["mask"], args["layout"]
    packed = args["cu_seqlens"] is not None
    of_forward = {
        **{name: args[name] for name in ("query", "key", "value", "sinks", "cu_seqlens", "kv_lengths")},
        **{name: args[name] for name in ("prefix_lengths", "kv_limits", "bias", "alibi")},
        "mask": args["seen"],
        "cu_seqlens_k": None,
        "window": (mask.left, mask.right),
        "is_causal": False,
        "causal_align": "lower_right" if mask.lower_right else "upper_left",
        "scale": None,
        "softcap": args["softcap"],
        "layout": layout,
        "return_lse": True,
        "return_max": False,
        "quantize": None,
    }
    dy = args["dy"]
    upstream = {"out": dy.transpose(1, 2) if layout == "bhsd" else dy}
    if args["dlse"] is not None:
        upstream["lse"] = args["dlse"]
    expected = _truth_of(of_forward, upstream)
    assert packed == (layout == "thd")
    return {name: value for name, value in expected.items() if name.startswith("d")}


def _encoded(call: Call, compute: Compute) -> dict[str, Tensor]:
    """Return the plain result, with the heads of a token side by side."""
    plain = {name: value for name, value in call.kwargs.items() if name not in ("quantize", "columnwise")}
    return {"y": call.function(**plain).flatten(-2).flatten(0, -2)}


# Bytes that the forward with a mask spills: its tile is that without a mask, for the same bits.
_SPILLS = {"sm_89": 60, "sm_100": 692, "sm_120": 88}


# ---- in plain PyTorch -----------------------------------------------------------------------------------------


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _causal_backward(call: Call) -> Chain:
    """Walk back through PyTorch's own attention."""
    inputs, upstream = tensors_of(call, "query", "key", "value"), call["dy"].transpose(1, 2)
    return Chain(_causal, inputs, lambda result: tuple(result)[:3], upstream)


FAMILY = Family(
    workloads=WORKLOADS,
    # Backward recomputes scores in both kernels: seven products, where forward has two.
    flops={"attention": _flops, "attention_backward": lambda workload: _flops(workload) * 7 // 2},
    truths={"attention": attention_truth, "attention_backward": attention_backward_truth},
    encoded={"attention": _encoded},
    chains={
        ("attention", "causal"): chain(_causal, "query", "key", "value"),
        ("attention_backward", "causal"): _causal_backward,
    },
    spills={
        **{("attention_kernel", target): spilled for target, spilled in _SPILLS.items()},
        ("query_gradient_kernel", "sm_100"): 24,  # with the gradient of slopes
    },
)
