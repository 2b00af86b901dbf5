"""`out=` of `qkv_prepare` and `rope`: slices of longer sequences, packed heads, codes, and rotation in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton_loom.testing import words

import weft
from weft import QKV, HeadNorm, Heads, KVCache, Rotation
from weft.lab.calls import assert_same
from weft.ops.common.heads import LAYOUTS, shape_of

BF16 = torch.bfloat16
HEADS = Heads(q=4, kv=2, dim=24, v_dim=16)
ROTATION = Rotation(1e4)
NORM = HeadNorm("rms", torch.linspace(0.5, 1.5, 24), torch.linspace(1.5, 0.5, 24))
GROUPS = {"q": (4, 24), "k": (2, 24), "v": (2, 16)}


def nan(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


@pytest.mark.parametrize("out_layout", LAYOUTS)
@pytest.mark.parametrize("start", [0, 5])
def test_streams_write_to_one_sequence(out_layout: Any, start: int) -> None:
    """Text and images go to slices of one sequence, which equals the concatenation, and nothing else is written."""
    batch = 1 if out_layout == "thd" else 2
    text, image = torch.randn(batch, 3, HEADS.width).to(BF16), torch.randn(batch, 7, HEADS.width).to(BF16)
    options: Any = {"heads": HEADS, "norm": NORM, "rotation": ROTATION, "out_layout": out_layout}
    parts = [weft.qkv_prepare(x, **options) for x in (text, image)]
    axis = 0 if out_layout == "thd" else LAYOUTS[out_layout][1]
    joint = {name: nan(*shape_of(out_layout, batch, 16, *size)) for name, size in GROUPS.items()}
    for x, first in ((text, start), (image, start + 3)):
        slices = [t.narrow(axis, first, x.shape[1]) for t in joint.values()]
        got = weft.qkv_prepare(x, **options, out=slices)
        assert all(result is each for result, each in zip(got, slices, strict=False))
    for name, whole in joint.items():
        wanted = torch.cat([getattr(part, name) for part in parts], axis)
        assert torch.equal(whole.narrow(axis, start, 10), wanted)
        assert whole.isnan().sum() == whole.numel() - wanted.numel()


def test_results_may_share_a_packed_tensor() -> None:
    x, heads = torch.randn(2, 5, 3 * 4 * 24), Heads(q=4, kv=4, dim=24)
    packed = nan(2, 5, 12, 24, dtype=torch.float32)
    q, k, v = packed.split(4, 2)
    weft.qkv_prepare(x, heads=heads, rotation=ROTATION, out=(q, k, v))
    wanted = weft.qkv_prepare(x, heads=heads, rotation=ROTATION)
    assert torch.equal(packed, torch.cat(wanted[:3], 2))
    with pytest.raises(ValueError, match="k of out shares memory with v of out"):
        weft.qkv_prepare(x, heads=heads, out=(q, packed[:, :, 5:9], v))
    with pytest.raises(ValueError, match="q of out shares memory with x"):
        weft.qkv_prepare(x, heads=heads, out=(x.view(2, 5, 12, 24)[:, :, :4], k, v))


def test_some_results_are_new() -> None:
    heads = Heads(q=4, kv=2, dim=24, v_dim=16, gate=True)
    x = torch.randn(3, heads.width).to(BF16)
    wanted = weft.qkv_prepare(x, heads=heads)
    gate = torch.empty_like(wanted.gate)  # type: ignore[arg-type]
    got = weft.qkv_prepare(x, heads=heads, out=(None, None, None, gate))
    assert got.gate is gate
    assert_same(got._asdict(), wanted._asdict(), "out=")


def test_results_beside_a_cache() -> None:
    x, slots = torch.randn(5, HEADS.width).to(BF16), torch.tensor([3, -1, 0, 7, 2])
    caches = [KVCache(torch.zeros(8, 2, 24, dtype=BF16), torch.zeros(8, 2, 16, dtype=BF16)) for _ in range(2)]
    out = QKV(nan(9, 4, 24)[2:7], nan(5, 2, 24), nan(5, 2, 16), None)
    wanted = weft.qkv_prepare(x, heads=HEADS, cache=caches[0], slots=slots)
    got = weft.qkv_prepare(x, heads=HEADS, cache=caches[1], slots=slots, out=out)
    assert got.q is out.q
    assert_same(got._asdict(), wanted._asdict(), "out=")
    assert torch.equal(caches[0].k, caches[1].k)
    with pytest.raises(ValueError, match="k of out shares memory with cache"):
        weft.qkv_prepare(x, heads=HEADS, cache=caches[1], slots=slots, out=out._replace(k=caches[1].k[:5]))
    partly = weft.qkv_prepare(x, heads=HEADS, cache=caches[1], slots=slots, out=out._replace(k=None))
    assert_same(partly._asdict(), wanted._asdict(), "out= with None")


@pytest.mark.parametrize("format", ["e4m3:row", "int8:row"])
def test_codes_are_written_in_place(format: str) -> None:
    x = torch.randn(2, 5, HEADS.width).to(BF16)
    wanted = weft.qkv_prepare(x, heads=HEADS, quantize=format)
    q, k, v = torch.empty_like(wanted.q), torch.empty_like(wanted.k), nan(2, 9, 2, 16)[:, 1:6]
    got = weft.qkv_prepare(x, heads=HEADS, quantize=format, out=(q, k, v))
    assert (got.q is q, got.k is k, got.v is v) == (True, True, True)
    assert_same(got._asdict(), wanted._asdict(), "out=")
    got = weft.qkv_prepare(x, heads=HEADS, quantize=format, out=(None, k, None))
    assert_same(got._asdict(), wanted._asdict(), "out= with None")
    with pytest.raises(ValueError, match=f"q of out must be a QTensor in {format}"):
        weft.qkv_prepare(x, heads=HEADS, quantize=format, out=(torch.empty(2, 5, 4, 24), k, v))
    with pytest.raises(ValueError, match=r"q of out is a QTensor.*; this result is plain"):
        weft.qkv_prepare(x, heads=HEADS, out=(q, k, v))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("style", ["neox", "interleaved"])
def test_rotation_in_place(layout: Any, style: Any) -> None:
    """The slice of a packed projection that holds the queries is rotated where it lies."""
    rotation = Rotation(1e4, dim=16, style=style)
    packed = torch.randn(shape_of(layout, 2, 5, 7, 24)).to(BF16)
    before, axis = packed.clone(), LAYOUTS[layout][2]
    x = packed.narrow(axis, 1, 4)
    wanted = weft.rope(x, rotation, layout=layout)
    assert weft.rope(x, rotation, layout=layout, out=x) is x
    assert torch.equal(x, wanted)
    for start, count in ((0, 1), (5, 2)):
        assert torch.equal(packed.narrow(axis, start, count), before.narrow(axis, start, count))
    weft.rope(x, rotation, layout=layout, inverse=True, out=packed.narrow(axis, 1, 4))
    assert torch.allclose(x.float(), before.narrow(axis, 1, 4).float(), atol=0.05)


def test_rotation_that_moves_elements_is_refused_in_place() -> None:
    x = torch.randn(2, 5, 5, 24)
    moved = Rotation(1e4, style="neox", out_style="interleaved")
    for rotation, out_layout in ((moved, None), (ROTATION, "bhsd")):
        with pytest.raises(ValueError, match="out shares memory with x"):
            weft.rope(x, rotation, out_layout=out_layout, out=x)  # type: ignore[arg-type]


@pytest.mark.parametrize("start", [0, 1, 3, 8])
def test_slices_that_begin_anywhere(start: int) -> None:
    """Heads that begin at any byte, between elements that stay."""
    x, memory = torch.randn(2, 5, 4, 24).to(BF16), nan(2 * 5 * 4 * 24 + 16)
    out = memory[start : start + x.numel()].view(x.shape)
    assert torch.equal(weft.rope(x, ROTATION, out=out), weft.rope(x, ROTATION))
    assert memory.isnan().sum() == 16
    assert (words(memory[:start]) == words(nan(1))).all()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.empty(2, 5, 4, 24, dtype=torch.float16), "out must be bfloat16 like the other tensors"),
        (torch.empty(2, 5, 4, 23, dtype=BF16), r"out must have the shape \(2, 5, 4, 24\)"),
        (torch.empty(2, 5, 4, 24, dtype=BF16, device="meta"), "out must be on cpu"),
        (torch.empty(2, 5, 4, 48, dtype=BF16)[..., ::2], "the last dimension of out must be contiguous"),
        (torch.empty(2, 5, 1, 24, dtype=BF16).expand(2, 5, 4, 24), "elements of out share memory"),
        ("y", "out must be a tensor; got the str 'y'"),
    ],
)
def test_wrong_memory_is_refused(out: Any, message: str) -> None:
    x = torch.randn(2, 5, 4, 24).to(BF16)
    with pytest.raises((ValueError, TypeError), match=message):
        weft.rope(x, ROTATION, out=out)


def test_wrong_numbers_of_results_are_refused() -> None:
    x = torch.randn(2, 5, HEADS.width).to(BF16)
    with pytest.raises(ValueError, match="out must be a tuple of 4 results, q, k, v, gate; got 2"):
        weft.qkv_prepare(x, heads=HEADS, out=(None, None))
    with pytest.raises(ValueError, match="gate of out is given, but this call has no such result"):
        weft.qkv_prepare(x, heads=HEADS, out=(None, None, None, x))
    with pytest.raises(TypeError, match="out must be a tensor or a tuple of q, k, v, gate; got int"):
        weft.qkv_prepare(x, heads=HEADS, out=3)  # type: ignore[arg-type]
