"""Attention over caches: against float64, and what must not change a bit."""

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
    """Query, caches whose unused places hold NaN, and a table of pages in any order."""
    generator = torch.Generator().manual_seed(seed)
    width = width or max(1, -(-max(lengths) // page))
    count = len(lengths) * width + 2
    table = torch.randperm(count, generator=generator)[: len(lengths) * width].view(len(lengths), width).int()
    made: dict[str, Any] = {
        "query": torch.randn(len(lengths), queries, heads, dim, generator=generator).to(dtype),
        "page_table": table,
        "lengths": torch.tensor(lengths, dtype=torch.int32),
    }
    used = torch.zeros(count, page, dtype=torch.bool)
    for s, length in enumerate(lengths):
        token = torch.arange(length)
        used[table[s, token // page].long(), token % page] = True
        table[s, -(-length // page) :] = -1  # a page that does not exist
    for name, numbers in (("k", dim), ("v", v_dim or dim)):
        x = torch.randn(count, page, kv, numbers, generator=generator)
        if coded is None:
            made[name] = x.masked_fill(~used[..., None, None], math.nan).to(dtype)
            continue
        codes, scale = coded_heads(x, *coded)
        if codes.dtype is torch.float8_e4m3fn:
            codes.view(torch.uint8)[~used] = 0x7F
        if scale.dim() > 1:
            scale[~used] = math.nan
        made[name], made[f"{name}_scale"] = codes, scale
    return made


def judge(given: dict[str, Any], **options: Any) -> None:
    assert_accurate("attention_decode", Call(decode, given | options))


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
    """One part and several, sequences without tokens, and tokens past the length that are NaN: scales ride in the cache
    and are never taken for 1 (sglang #18882, #28144, vllm #42916)."""
    judge(problem([100, 1, 0, 37, 16], coded=coded))
    judge(problem([600, 1100, 0, 37, 512], coded=coded, queries=3), sinks=torch.randn(4))


@pytest.mark.parametrize("window", [0, 1, 70, 300, 5000])
def test_windows(window: int) -> None:
    judge(problem([600, 1100, 3, 37], queries=2), window=window)


def test_sinks_that_are_infinite() -> None:
    sinks = torch.tensor([math.inf, -math.inf, 0.5, 1e4])
    for given in (problem([70, 0]), problem([600, 30])):  # one part, and several
        found, without = decode(**given, sinks=sinks), decode(**given)
        assert not found.out[:, :, 0].count_nonzero()
        assert (found.lse[:, 0] == math.inf).all()
        assert torch.equal(found.out[:, :, 1], without.out[:, :, 1])
        assert found.out.isfinite().all()


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_nan_sink_is_not_swallowed(backend: Any) -> None:
    sinks = torch.tensor([math.nan, 0.5, math.nan, -math.inf])
    for given in (problem([70, 0]), problem([600, 0])):  # one part, and several
        with weft.backend(backend):
            found = decode(**given, sinks=sinks)
            wanted = decode(**given, sinks=torch.tensor([0.5, 0.5, 0.5, -math.inf]))
        assert found.out[:, :, [0, 2]].isnan().all()
        assert found.lse[:, [0, 2]].isnan().all()
        assert torch.equal(found.out[:, :, [1, 3]], wanted.out[:, :, [1, 3]])
        assert torch.equal(found.lse[:, [1, 3]], wanted.lse[:, [1, 3]])


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
    """Those before the first token see nothing."""
    for lengths in ([2, 5], [2, 600]):  # one part, and several
        given = problem(lengths, queries=4)
        judge(given)
        found = decode(**given)
        assert not found.out[0, :2].count_nonzero()
        assert (found.lse[0, :, :2] == -math.inf).all()


def test_latents() -> None:
    for dtype in (FP32, BF16):
        given = problem([600, 0, 70], heads=16, kv=1, dim=576, page=64, dtype=dtype)
        judge(given | {"v": None}, scale=192**-0.5)
    for coded in ((E4M3, "token"), (INT8, "tensor")):
        given = problem([600, 0, 70], heads=16, kv=1, dim=576, page=64, coded=coded)
        judge(
            {name: x for name, x in given.items() if name not in ("v", "v_scale")} | {"v": None},
            scale=192**-0.5,
        )


def latent_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(FlashMLA's rows of latents [..., 576], what they stand for): written byte by byte."""
    groups = x[..., :512].float().unflatten(-1, (4, 128))
    scale = groups.abs().amax(-1) / 448
    codes = (groups / scale[..., None]).to(torch.float8_e4m3fn)
    turned = x[..., 512:].bfloat16()
    rows = torch.cat(
        [
            codes.flatten(-2).view(torch.uint8),
            scale.contiguous().view(torch.uint8),
            turned.contiguous().view(torch.uint8),
        ],
        -1,
    )
    values = (codes.double() * scale.double()[..., None]).flatten(-2).bfloat16()
    return rows, torch.cat([values, turned], -1)


def test_rows_of_flashmla() -> None:
    """They are the latents in bf16 that they stand for, bit for bit, on the tiles of a GPU as well."""
    given = problem([600, 0, 70], heads=16, kv=1, dim=576, page=64, dtype=BF16)
    rows, values = latent_rows(given["k"].nan_to_num(0.0))
    assert rows.shape[-1] == 656
    table = {"page_table": given["page_table"], "lengths": given["lengths"], "scale": 192**-0.5}
    for target in ("cpu", "sm_90"):
        with choosing_for(target):
            found = weft.mla_decode(given["query"], weft.KVCache(rows), **table)
            wanted = weft.mla_decode(given["query"], weft.KVCache(values), **table)
        assert torch.equal(words(found), words(wanted)), target
    with weft.backend("reference"):
        exact = weft.mla_decode(given["query"], weft.KVCache(rows), **table)
    torch.testing.assert_close(found, exact, rtol=2e-2, atol=2e-2)
    with pytest.raises(ValueError, match=r"query must be torch\.bfloat16"):
        weft.mla_decode(given["query"].float(), weft.KVCache(rows), **table)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("coded", [None, (E4M3, "tensor"), (INT8, "token")], ids=["plain", "e4m3", "int8"])
def test_as_launched_on(target: str, coded: Any) -> None:
    with choosing_for(target):
        judge(problem([600, 30, 0], coded=coded, queries=2, dtype=BF16, page=64))


@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_queries_of_any_size(size: float) -> None:
    """With the launches of a GPU, where codes are multiplied in fp16: 1e6 does not fit, and 1e-6 loses digits."""
    given = problem([70], coded=(E4M3, "tensor"), dtype=BF16)
    given["query"] = given["query"] * size
    with choosing_for("sm_90"):
        judge(given, scale=0.125 / size)


# ---- what must not change a bit -----------------------------------------------------------------------------


@pytest.mark.parametrize("coded", [None, (E4M3, "token")], ids=["plain", "e4m3"])
def test_the_batch_and_the_pages_change_no_bit(coded: Any) -> None:
    """A sequence alone, with a wider table, and with its pages elsewhere (FlashMLA #212, flash-attention #1897)."""
    given = problem([600, 1100, 37], coded=coded, queries=2, dtype=BF16)
    sinks = torch.randn(4)
    found = decode(**given, sinks=sinks)
    for s in range(3):
        width = 40 if s == 2 else given["page_table"].shape[1]  # a table of one part, and of more
        alone = given | {
            "query": given["query"][s : s + 1],
            "page_table": given["page_table"][s : s + 1, :width].contiguous(),
            "lengths": given["lengths"][s : s + 1],
        }
        if s == 2:
            alone["page_table"] = alone["page_table"][:, :3].contiguous()
        one = decode(**alone, sinks=sinks)
        assert torch.equal(words(one.out[0]), words(found.out[s]))
        assert torch.equal(words(one.lse[0]), words(found.lse[s]))
    count = len(given["k"])
    to = torch.randperm(count, generator=torch.Generator().manual_seed(4))
    moved = dict(given)
    moved["page_table"] = torch.where(given["page_table"] < 0, -1, to[given["page_table"].long()]).int()
    for name in ("k", "v", "k_scale", "v_scale"):
        if name in given:
            moved[name] = torch.empty_like(given[name])
            raw = moved[name].view(torch.uint8) if moved[name].element_size() == 1 else moved[name]
            raw[to] = given[name].view(torch.uint8) if moved[name].element_size() == 1 else given[name]
    other = decode(**moved, sinks=sinks)
    assert torch.equal(words(other.out), words(found.out))


def test_decoding_is_the_last_row_of_prefill() -> None:
    """To rounding: prefill sums in another order."""
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


def test_what_qkv_prepare_wrote_is_read() -> None:
    """A prompt and a token after it, through the cache in every form, beside attention over the plain heads."""
    heads = weft.Heads(q=4, kv=2, dim=64)
    x = torch.randn(1, 50, heads.width, generator=torch.Generator().manual_seed(0))
    slots = torch.arange(100, 150)
    q, k, v, _ = weft.qkv_prepare(x, heads=heads, rotation=weft.Rotation(1e4))
    wanted = weft.attention(q, k, v, is_causal=True, layout="bshd")[:, -1]
    table = torch.arange(25, 40, dtype=torch.int32)[None]  # 100 is the first token of page 25 of four
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
        found = weft.attention_decode(q[:, -1], cache, page_table=table, lengths=torch.tensor([50]))
        error = (found - wanted).abs().max() / wanted.abs().max()
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
    given = problem([20, 30])
    given["query"] = given["query"][:, 0]
    with pytest.raises((ValueError, TypeError), match=message):
        decode(**given | changed)


def test_more_tokens_than_32_bits_number_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem([20, 30])
    room = given["page_table"].shape[1] * given["k"].shape[1] + given["query"].shape[1]
    module = sys.modules["weft.ops.attention.decode.decode"]
    monkeypatch.setattr(module, "_MOST_TOKENS", room)
    decode(**given)
    monkeypatch.setattr(module, "_MOST_TOKENS", room - 1)
    with pytest.raises(ValueError, match="numbered in 32 bits"):
        decode(**given)


def test_the_right_function_for_the_cache() -> None:
    given = problem([20, 30])
    both, latent = weft.KVCache(given["k"], given["v"]), weft.KVCache(given["k"])
    options = {"page_table": given["page_table"], "lengths": given["lengths"]}
    with pytest.raises(ValueError, match="mla_decode"):
        weft.attention_decode(given["query"], latent, **options)
    with pytest.raises(ValueError, match="attention_decode"):
        weft.mla_decode(given["query"], both, scale=1.0, **options)
    with pytest.raises(ValueError, match="a cache of latents is"):
        weft.mla_decode(given["query"], latent, scale=1.0, **options)
    with pytest.raises(TypeError, match=r"weft\.KVCache"):
        weft.attention_decode(given["query"], given["k"], **options)  # type: ignore[arg-type]
