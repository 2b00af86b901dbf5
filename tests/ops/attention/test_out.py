"""`out=` of `attention`, `attention_decode` and `mla_decode`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.support.allocations import allocations_of
from weft import Attention, KVCache
from weft.lab.calls import assert_same
from weft.ops.common.heads import LAYOUTS, shape_of

BF16 = torch.bfloat16


def heads(layout: str, tokens: int, count: int, dim: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape_of(layout, 1 if layout == "thd" else 2, tokens, count, dim)).to(dtype)


def nan_like(x: Tensor) -> Tensor:
    return torch.full_like(x, torch.nan)


def call(layout: str, **options: Any) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    packed = {"cu_seqlens": torch.tensor([0, 5, 5, 11])} if layout == "thd" else {"layout": layout}
    q, k, v = (heads(layout, 11, count, dim) for count, dim in ((4, 24), (2, 24), (2, 40)))
    return (q, k, v), {"is_causal": True, **packed, **options}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("engine", ["weft", "torch"])
def test_a_slice_of_a_longer_sequence(layout: str, engine: Any) -> None:
    """Only the slice is written, along tokens and along heads."""
    (q, k, v), options = call(layout)
    v = v[..., :24].contiguous() if engine == "torch" else v
    if engine == "torch" and layout == "thd":
        return  # it needs heads apart
    wanted = weft.attention(q, k, v, **options, engine=engine)
    for axis in LAYOUTS[layout][1:3]:
        shape = list(wanted.shape)
        shape[axis] += 5
        whole = torch.full(shape, torch.nan, dtype=BF16)
        out = whole.narrow(axis, 2, wanted.shape[axis])
        assert weft.attention(q, k, v, **options, engine=engine, out=out) is out
        assert torch.equal(out, wanted)
        assert whole.isnan().sum() == whole.numel() - wanted.numel()


@pytest.mark.parametrize("layout", ["bhsd", "thd"])
def test_lse_and_max(layout: str) -> None:
    (q, k, v), options = call(layout, return_lse=True, return_max=True)
    wanted = weft.attention(q, k, v, **options)
    out = Attention(*map(nan_like, wanted))
    got = weft.attention(q, k, v, **options, out=out)
    assert all(result is each for result, each in zip(got, out, strict=True))
    assert_same(got._asdict(), wanted._asdict(), "out=")  # type: ignore[union-attr]
    for part in ({"lse": None}, {"out": None}, {"max": None}):
        got = weft.attention(q, k, v, **options, out=out._replace(**part))  # type: ignore[arg-type]
        assert_same(got._asdict(), wanted._asdict(), f"out= with {part}")  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="max of out is given, but this call has no such result"):
        weft.attention(q, k, v, **{**options, "return_max": False}, out=out)
    with pytest.raises(ValueError, match="lse of out must be contiguous"):
        weft.attention(q, k, v, **options, out=out._replace(lse=torch.empty(*out.lse.shape, 2)[..., 0]))


@pytest.mark.parametrize("scores", ["int8", "e4m3"])
def test_eight_bits(scores: Any) -> None:
    (q, k, v), options = call("bshd", scores=scores, return_lse=True)
    wanted = weft.attention(q, k, v, **options)
    out = Attention(nan_like(wanted.out), nan_like(wanted.lse), None)  # type: ignore[union-attr]
    got = weft.attention(q, k, v, **options, out=out)
    assert_same({"out": got.out, "lse": out.lse}, {"out": wanted.out, "lse": wanted.lse}, "out=")  # type: ignore[union-attr]


@pytest.mark.parametrize("dim", [24, 128])
def test_codes(dim: int) -> None:
    """A result quantized by the kernel itself, and by a pass after it."""
    q, k = (heads("bshd", 11, count, dim) for count in (4, 2))
    wanted = weft.attention(q, k, k, layout="bshd", quantize="1x128")
    out = torch.empty_like(wanted)
    assert weft.attention(q, k, k, layout="bshd", quantize="1x128", out=out) is out
    assert_same({"out": out}, {"out": wanted}, "out=")


def test_shared_memory_is_refused() -> None:
    (q, k, v), options = call("bshd")
    v = v[..., :24].contiguous()
    with pytest.raises(ValueError, match="out shares memory with query"):
        weft.attention(q, k, v, **options, out=q)
    joint = torch.randn(2, 11, 8, 24).to(BF16)
    q, out, k = joint.split((2, 2, 4), 2)
    wanted = weft.attention(q.clone(), k[:, :, :2], k[:, :, 2:], **options)
    assert torch.equal(weft.attention(q, k[:, :, :2], k[:, :, 2:], **options, out=out), wanted)
    lse, x = torch.empty(2, 2, 11), torch.randn(2, 11, 2, 2).to(BF16)
    y = lse.view(-1).view(BF16).view(2, 11, 2, 2)
    with pytest.raises(ValueError, match="lse of out shares memory with out"):
        weft.attention(x, x, x, **options, return_lse=True, out=Attention(y, lse, None))


# ---- caches ---------------------------------------------------------------------------------------------


def decode(shape: tuple[int, ...], pages: int, **options: Any) -> tuple[Tensor, KVCache, dict[str, Any]]:
    cache = KVCache(*torch.randn(2, 4 * pages, 16, 2, 24).to(BF16).unbind())
    table = torch.randperm(4 * pages)[: 3 * pages].view(3, pages).int()
    lengths = torch.tensor([16 * pages, 0, 17])
    return torch.randn(shape).to(BF16), cache, {"page_table": table, "lengths": lengths, **options}


@pytest.mark.parametrize("shape", [(3, 4, 24), (3, 2, 4, 24)])
@pytest.mark.parametrize("pages", [2, 70])
def test_decode(shape: tuple[int, ...], pages: int) -> None:
    """One part, and several that a workspace holds."""
    query, cache, options = decode(shape, pages)
    wanted = weft.attention_decode(query, cache, **options, return_lse=True)
    out = torch.empty_like(query)
    with weft.workspace() as needed:
        weft.attention_decode(query, cache, **options, out=out)
    workspace = torch.empty(needed.nbytes, dtype=torch.uint8)
    with weft.workspace(workspace):
        assert allocations_of(lambda: weft.attention_decode(query, cache, **options, out=out)) == []
    assert torch.equal(out, wanted.out)  # type: ignore[union-attr]
    both = Attention(nan_like(out), nan_like(wanted.lse), None)  # type: ignore[union-attr]
    got = weft.attention_decode(query, cache, **options, return_lse=True, out=both)
    assert_same({"out": both.out, "lse": both.lse}, {"out": wanted.out, "lse": wanted.lse}, "out=")  # type: ignore[union-attr]
    assert (got.out is both.out, got.lse is both.lse) == (True, True)  # type: ignore[union-attr]
    for part in ({"out": None}, {"lse": None}):
        got = weft.attention_decode(query, cache, **options, return_lse=True, out=both._replace(**part))  # type: ignore[arg-type]
        assert_same({"out": got.out, "lse": got.lse}, {"out": wanted.out, "lse": wanted.lse}, f"{part}")  # type: ignore[union-attr]


def test_mla_decode() -> None:
    cache = KVCache(torch.randn(80, 16, 1, 576).to(BF16))
    table, lengths = torch.arange(80, dtype=torch.int32).view(2, 40), torch.tensor([600, 3])
    query, options = torch.randn(2, 4, 576).to(BF16), {"page_table": table, "lengths": lengths, "scale": 0.1}
    out = torch.empty(2, 4, 512, dtype=BF16)
    assert weft.mla_decode(query, cache, **options, out=out) is out  # type: ignore[arg-type]
    assert torch.equal(out, weft.mla_decode(query, cache, **options))  # type: ignore[arg-type]


def test_wrong_memory_of_decode_is_refused() -> None:
    query, cache, options = decode((3, 4, 24), 2)
    lse = torch.empty(3, 4)
    for out, message in (
        (torch.empty(3, 4, 24), "out must be bfloat16"),
        (torch.empty(3, 1, 4, 24, dtype=BF16), "out must be a tensor of 3 dimensions"),
        (torch.empty(3, 4, 48, dtype=BF16)[..., :24], "out must be contiguous"),
        (query, "out shares memory with query"),
        (cache.k.view(-1)[: 3 * 4 * 24].view(3, 4, 24), "out shares memory with k"),
        (Attention(torch.empty_like(query), lse, None), "out has a result that this call does not return"),
        ((query, None), "out must be a tuple of 3 results, out, lse, max; got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            weft.attention_decode(query, cache, **options, out=out)  # type: ignore[arg-type]
    query, cache, options = decode((3, 2, 4, 24), 2)
    both = Attention(torch.empty_like(query), torch.empty(3, 4, 2), None)
    with pytest.raises(ValueError, match="lse of out must"):
        weft.attention_decode(query, cache, **options, return_lse=True, out=both)
