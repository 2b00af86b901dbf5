"""Attention over caches: accuracy against float64, and bitwise invariance."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_loom.testing import words

import weft
from weft.lab.checks import assert_accurate
from weft.lab.families import Call
from weft.lab.families.decode import coded_heads, decode
from weft.runtime import choosing_for

BF16, FP32 = torch.bfloat16, torch.float32
PAGE = 16


def problem(
    lengths: list[int], *, queries: int = 1, heads: int = 4, kv: int = 2, dim: int = 64, v_dim: int | None = None,
    page: int = PAGE, coded: Any = None, dtype: torch.dtype = FP32, width: int | None = None, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Draw a query, caches whose unused slots hold NaN, and a table of shuffled pages."""
    generator = torch.Generator().manual_seed(seed)
    width = width or max(1, -(-max(lengths) // page))
    count = len(lengths) * width + 2
    table = torch.randperm(count, generator=generator)[: len(lengths) * width].view(len(lengths), width).int()
    tensors: dict[str, Any] = {
        "query": torch.randn(len(lengths), queries, heads, dim, generator=generator).to(dtype),
        "page_table": table,
        "lengths": torch.tensor(lengths, dtype=torch.int32),
    }
    used = torch.zeros(count, page, dtype=torch.bool)
    for s, length in enumerate(lengths):
        token = torch.arange(length)
        used[table[s, token // page].long(), token % page] = True
        table[s, -(-length // page) :] = -1  # a page that does not exist
    for name, width_of_head in (("k", dim), ("v", v_dim or dim)):
        x = torch.randn(count, page, kv, width_of_head, generator=generator)
        if coded is None:
            tensors[name] = x.masked_fill(~used[..., None, None], math.nan).to(dtype)
            continue
        codes, scale = coded_heads(x, *coded)
        if codes.dtype is torch.float8_e4m3fn:
            codes.view(torch.uint8)[~used] = 0x7F
        if scale.dim() > 1:
            scale[~used] = math.nan
        tensors[name], tensors[f"{name}_scale"] = codes, scale
    return tensors


def judge(inputs: dict[str, Any], **options: Any) -> None:
    assert_accurate("attention_decode", Call(decode, inputs | options))


E4M3, INT8 = torch.float8_e4m3fn, torch.int8
CODED: dict[str, Any] = {
    "plain": None,
    **{
        f"{name}-{scaled}": (dtype, scaled)
        for name, dtype in (("e4m3", E4M3), ("int8", INT8))
        for scaled in ("token", "head", "tensor")
    },
}


@pytest.mark.parametrize("coded", CODED.values(), ids=CODED)
def test_caches(coded: Any) -> None:
    """Covers one part and several, empty sequences, and NaN past the length. Scales come from the cache and are never
    taken to be 1 (sglang #18882, #28144, vllm #42916)."""
    judge(problem([100, 1, 0, 37, 16], coded=coded))
    judge(problem([600, 1100, 0, 37, 512], coded=coded, queries=3), sinks=torch.randn(4))


@pytest.mark.parametrize("window", [0, 1, 70, 300, 5000])
def test_windows(window: int) -> None:
    judge(problem([600, 1100, 3, 37], queries=2), window=window)


def test_sinks_that_are_infinite() -> None:
    sinks = torch.tensor([math.inf, -math.inf, 0.5, 1e4])
    for inputs in (problem([70, 0]), problem([600, 30])):  # one part, and several
        result, without = decode(**inputs, sinks=sinks), decode(**inputs)
        assert not result.out[:, :, 0].count_nonzero()
        assert (result.lse[:, 0] == math.inf).all()
        assert torch.equal(result.out[:, :, 1], without.out[:, :, 1])
        assert result.out.isfinite().all()


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_nan_sink_is_not_swallowed(backend: Any) -> None:
    sinks = torch.tensor([math.nan, 0.5, math.nan, -math.inf])
    for inputs in (problem([70, 0]), problem([600, 0])):  # one part, and several
        with weft.backend(backend):
            result = decode(**inputs, sinks=sinks)
            wanted = decode(**inputs, sinks=torch.tensor([0.5, 0.5, 0.5, -math.inf]))
        assert result.out[:, :, [0, 2]].isnan().all()
        assert result.lse[:, [0, 2]].isnan().all()
        assert torch.equal(result.out[:, :, [1, 3]], wanted.out[:, :, [1, 3]])
        assert torch.equal(result.lse[:, [1, 3]], wanted.lse[:, [1, 3]])


def test_softcap_and_scale() -> None:
    judge(problem([600, 30], coded=(E4M3, "token")), softcap=5.0, scale=1.0)


@pytest.mark.parametrize("page", [1, 24, 128, 256])
def test_pages_of_any_size(page: int) -> None:
    judge(problem([600, 30, 1], page=page))


@pytest.mark.parametrize(("dim", "v_dim"), [(72, 40), (192, 128), (256, 256)])
def test_widths_of_heads(dim: int, v_dim: int) -> None:
    judge(problem([600, 30], dim=dim, v_dim=v_dim, dtype=BF16))


@pytest.mark.parametrize(("heads", "kv", "queries"), [(40, 1, 2), (3, 3, 1), (8, 1, 7)])
def test_groups_of_heads(heads: int, kv: int, queries: int) -> None:
    judge(problem([70, 30], heads=heads, kv=kv, queries=queries))


def test_more_queries_than_tokens() -> None:
    """Queries before the first token see nothing."""
    for lengths in ([2, 5], [2, 600]):  # one part, and several
        inputs = problem(lengths, queries=4)
        judge(inputs)
        result = decode(**inputs)
        assert not result.out[0, :2].count_nonzero()
        assert (result.lse[0, :, :2] == -math.inf).all()


def test_latents() -> None:
    for dtype in (FP32, BF16):
        inputs = problem([600, 0, 70], heads=16, kv=1, dim=576, page=64, dtype=dtype)
        judge(inputs | {"v": None}, scale=192**-0.5)
    for coded in ((E4M3, "token"), (INT8, "tensor")):
        inputs = problem([600, 0, 70], heads=16, kv=1, dim=576, page=64, coded=coded)
        judge(
            {name: x for name, x in inputs.items() if name not in ("v", "v_scale")} | {"v": None},
            scale=192**-0.5,
        )


def latent_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode latents [..., 576] as FlashMLA's rows byte by byte; return (rows, values that they represent)."""
    groups = x[..., :512].float().unflatten(-1, (4, 128))
    scale = groups.abs().amax(-1) / 448
    codes = (groups / scale[..., None]).to(torch.float8_e4m3fn)
    rope_part = x[..., 512:].bfloat16()
    rows = torch.cat(
        [
            codes.flatten(-2).view(torch.uint8),
            scale.contiguous().view(torch.uint8),
            rope_part.contiguous().view(torch.uint8),
        ],
        -1,
    )
    values = (codes.double() * scale.double()[..., None]).flatten(-2).bfloat16()
    return rows, torch.cat([values, rope_part], -1)


def test_rows_of_flashmla() -> None:
    """FlashMLA's rows give the bits of the bf16 latents that they represent, also with the tiles of a GPU."""
    inputs = problem([600, 0, 70], heads=16, kv=1, dim=576, page=64, dtype=BF16)
    rows, values = latent_rows(inputs["k"].nan_to_num(0.0))
    assert rows.shape[-1] == 656
    table = {"page_table": inputs["page_table"], "lengths": inputs["lengths"], "scale": 192**-0.5}
    for target in ("cpu", "sm_90"):
        with choosing_for(target):
            result = weft.mla_decode(inputs["query"], weft.KVCache(rows), **table)
            wanted = weft.mla_decode(inputs["query"], weft.KVCache(values), **table)
        assert torch.equal(words(result), words(wanted)), target
    with weft.backend("reference"):
        exact = weft.mla_decode(inputs["query"], weft.KVCache(rows), **table)
    torch.testing.assert_close(result, exact, rtol=2e-2, atol=2e-2)
    with pytest.raises(ValueError, match=r"query must be torch\.bfloat16"):
        weft.mla_decode(inputs["query"].float(), weft.KVCache(rows), **table)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("coded", [None, (E4M3, "tensor"), (INT8, "token")], ids=["plain", "e4m3", "int8"])
def test_tiles_of(target: str, coded: Any) -> None:
    with choosing_for(target):
        judge(problem([600, 30, 0], coded=coded, queries=2, dtype=BF16, page=64))


@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_queries_of_any_size(size: float) -> None:
    """GPU launches multiply codes in fp16, where 1e6 does not fit and 1e-6 loses digits."""
    inputs = problem([70], coded=(E4M3, "tensor"), dtype=BF16)
    inputs["query"] = inputs["query"] * size
    with choosing_for("sm_90"):
        judge(inputs, scale=0.125 / size)


# ---- bitwise invariance -------------------------------------------------------------------------------------


@pytest.mark.parametrize("coded", [None, (E4M3, "token")], ids=["plain", "e4m3"])
def test_batch_and_page_placement_change_no_bit(coded: Any) -> None:
    """A sequence has the same bits alone, with a wider table, and with its pages elsewhere (FlashMLA #212,
    flash-attention #1897)."""
    inputs = problem([600, 1100, 37], coded=coded, queries=2, dtype=BF16)
    sinks = torch.randn(4)
    result = decode(**inputs, sinks=sinks)
    for s in range(3):
        width = 40 if s == 2 else inputs["page_table"].shape[1]  # a table of one part, and of more
        alone = inputs | {
            "query": inputs["query"][s : s + 1],
            "page_table": inputs["page_table"][s : s + 1, :width].contiguous(),
            "lengths": inputs["lengths"][s : s + 1],
        }
        if s == 2:
            alone["page_table"] = alone["page_table"][:, :3].contiguous()
        one = decode(**alone, sinks=sinks)
        assert torch.equal(words(one.out[0]), words(result.out[s]))
        assert torch.equal(words(one.lse[0]), words(result.lse[s]))
    count = len(inputs["k"])
    to = torch.randperm(count, generator=torch.Generator().manual_seed(4))
    moved = dict(inputs)
    moved["page_table"] = torch.where(inputs["page_table"] < 0, -1, to[inputs["page_table"].long()]).int()
    for name in ("k", "v", "k_scale", "v_scale"):
        if name in inputs:
            moved[name] = torch.empty_like(inputs[name])
            raw = moved[name].view(torch.uint8) if moved[name].element_size() == 1 else moved[name]
            raw[to] = inputs[name].view(torch.uint8) if moved[name].element_size() == 1 else inputs[name]
    other = decode(**moved, sinks=sinks)
    assert torch.equal(words(other.out), words(result.out))


def test_decoding_is_the_last_row_of_prefill() -> None:
    """Decoding equals prefill up to rounding, since prefill sums in another order."""
    length, heads = 300, 4
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, length, 64, generator=generator) for n in (heads, 2, 2))
    whole = weft.attention(q, k, v, is_causal=True)
    pages = [x[0].transpose(0, 1).view(-1, 20, 2, 64) for x in (k, v)]
    table = torch.arange(15, dtype=torch.int32)[None]
    last = weft.attention_decode(
        q[0, :, -3:].transpose(0, 1)[None],
        weft.KVCache(*pages),
        page_table=table,
        lengths=torch.tensor([length]),
    )
    torch.testing.assert_close(last[0].transpose(0, 1), whole[0, :, -3:], rtol=1e-5, atol=1e-6)


def test_decode_reads_what_qkv_prepare_wrote() -> None:
    """The last token of a prompt attends through every kind of cache as over plain heads."""
    heads = weft.Heads(q=4, kv=2, dim=64)
    x = torch.randn(1, 50, heads.width, generator=torch.Generator().manual_seed(0))
    slots = torch.arange(100, 150)
    q, k, v, _ = weft.qkv_prepare(x, heads=heads, rotation=weft.Rotation(1e4))
    wanted = weft.attention(q, k, v, is_causal=True, layout="bshd")[:, -1]
    table = torch.arange(25, 40, dtype=torch.int32)[None]  # slot 100 starts page 25, at four tokens per page
    for dtype, scaled in ((FP32, None), (E4M3, "token"), (INT8, "token"), (INT8, "head"), (E4M3, "tensor")):
        caches = [torch.zeros(60, 4, 2, 64, dtype=FP32).to(dtype) for _ in range(2)]
        shapes = {"token": (60, 4, 2), "head": (2,), "tensor": ()}
        steps = 127.0 if dtype is INT8 else 448.0
        scales: list[Tensor] = []
        if scaled is not None:
            scales = [torch.full(shapes[scaled], each.abs().max().item() / steps) for each in (k, v)]
        cache = weft.KVCache(*caches, *scales)
        with torch.no_grad():
            weft.qkv_prepare(x, heads=heads, rotation=weft.Rotation(1e4), cache=cache, slots=slots)
        result = weft.attention_decode(q[:, -1], cache, page_table=table, lengths=torch.tensor([50]))
        error = (result - wanted).abs().max() / wanted.abs().max()
        assert error < (1e-5 if scaled is None else 0.03 if dtype is INT8 else 0.08), (dtype, scaled)


# ---- mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": torch.randn(2, 4, 32)}, "does not fit"),
        ({"query": torch.randn(2, 3, 64)}, "does not fit"),
        ({"query": torch.randn(2, 64)}, r"query must be \[sequences.*got \(2, 64\)"),
        ({"query": torch.randn(2, 4, 64).half()}, "query must be torch.float32"),
        ({"page_table": torch.zeros(2, 4)}, "page_table must be int32"),
        ({"page_table": torch.zeros(3, 4, dtype=torch.int32)}, r"page_table must be \[2, pages\]"),
        ({"lengths": torch.tensor([3, 4, 5])}, "lengths must have the shape"),
        ({"window": -1}, "at least 0"),
        ({"scale": 0.0}, "scale must be above 0"),
        ({"softcap": -3.0}, "softcap must be above 0"),
    ],
)
def test_mistakes_are_named(changed: dict[str, Any], message: str) -> None:
    inputs = problem([20, 30])
    inputs["query"] = inputs["query"][:, 0]
    with pytest.raises((ValueError, TypeError), match=message):
        decode(**inputs | changed)


def test_more_tokens_than_32_bits_can_index_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = problem([20, 30])
    room = inputs["page_table"].shape[1] * inputs["k"].shape[1] + inputs["query"].shape[1]
    module = sys.modules["weft.ops.attention.decode.decode"]
    monkeypatch.setattr(module, "_MOST_TOKENS", room)
    decode(**inputs)
    monkeypatch.setattr(module, "_MOST_TOKENS", room - 1)
    with pytest.raises(ValueError, match="numbered in 32 bits"):
        decode(**inputs)


def test_each_kind_of_cache_has_its_function() -> None:
    inputs = problem([20, 30])
    both, latent = weft.KVCache(inputs["k"], inputs["v"]), weft.KVCache(inputs["k"])
    options = {"page_table": inputs["page_table"], "lengths": inputs["lengths"]}
    with pytest.raises(ValueError, match="mla_decode"):
        weft.attention_decode(inputs["query"], latent, **options)
    with pytest.raises(ValueError, match="attention_decode"):
        weft.mla_decode(inputs["query"], both, scale=1.0, **options)
    with pytest.raises(ValueError, match="a cache of latents is"):
        weft.mla_decode(inputs["query"], latent, scale=1.0, **options)
    with pytest.raises(TypeError, match=r"weft\.KVCache"):
        weft.attention_decode(inputs["query"], inputs["k"], **options)  # type: ignore[arg-type]
