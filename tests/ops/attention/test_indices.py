"""Arbitrary starts, lengths and page numbers: no address leaves a tensor, and no wrong result looks right.

A sequence whose starts or length are out of range gives NaN; its neighbors keep their results.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import triton_loom
from torch import Tensor

import weft
from tests.ops.attention.own import attend
from tests.ops.attention.test import heads, packed
from tests.ops.attention.test_decode import E4M3, PAGE, latent_rows, problem
from tests.support.covering import covering
from weft.lab.families.decode import decode
from weft.runtime import choosing_for

BF16 = torch.bfloat16
MANY, FEW = 2**31 - 1, -(2**31)
NAMES = ("out", "lse", "max", "dquery", "dkey", "dvalue", "dsinks")


def results(inputs: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """Compute results and gradients of attention with lower-right alignment and sinks."""
    leaves = [inputs[name].clone().requires_grad_() for name in ("query", "key", "value")]
    sinks = torch.tensor([0.3, -0.2, 1.0, -1.0]).requires_grad_()
    rest = {name: x for name, x in inputs.items() if name not in ("query", "key", "value")}
    options = {"causal_align": "lower_right", "return_lse": True, "return_max": True} | options
    outputs = attend(*leaves, sinks=sinks, **rest, **options)
    upstream = torch.randn(outputs.out.shape, generator=torch.Generator().manual_seed(3)).to(
        outputs.out.dtype
    )
    grads = torch.autograd.grad(outputs.out, [*leaves, sinks], upstream)
    return dict(zip(NAMES, (*(x.detach() for x in outputs), *grads), strict=True))


def assert_alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, x in one.items():
        assert torch.equal(x.isnan(), other[name].isnan()), name
        torch.testing.assert_close(x.nan_to_num(0.0), other[name].nan_to_num(0.0), rtol=1e-4, atol=3e-5)


# ---- starts -------------------------------------------------------------------------------------------------

STARTS = [
    [0, 70, 150], [5, 12, 150], [0, 120, 50, 150], [0, 12, 10**6], [-100, 12, 20], [150, 0, 150], [200, 300, 400],
    [-5, -3, -1], [0, 40, 30, 60, 50, 150], [MANY, 0, FEW], [0, MANY, MANY, 150], [FEW, FEW, FEW, FEW],
]  # fmt: skip
PAIRS = [(q, k) for q, k in itertools.product(STARTS, STARTS) if len(q) == len(k)]


@pytest.mark.parametrize(
    "number", [pytest.param(i, marks=[] if i % 4 == 0 else [pytest.mark.slow]) for i in range(len(PAIRS))]
)
def test_starts_of_any_content(number: int) -> None:
    """The kernels agree with the reference, whose Python slices cannot leave a tensor."""
    dtype = torch.int64 if number // 4 % 2 else torch.int32
    q, k = (torch.tensor(starts, dtype=dtype) for starts in PAIRS[number])
    inputs = packed([150]) | {"cu_seqlens": q, "cu_seqlens_k": k}
    if number // 8 % 2:
        inputs["kv_lengths"] = torch.tensor([1000, -5, 3, 7, 2][: len(q) - 1])
    for causal in (False, True):
        kernels = results(inputs, is_causal=causal)
        with weft.backend("reference"):
            assert_alike(kernels, results(inputs, is_causal=causal))


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_starts_lead_to_no_other_memory(target: str) -> None:
    """The sanitizer reports no access outside a tensor, with the tiles of a CPU and of a GPU."""
    for starts in ([0, 120, 50, 150], [MANY, 0, 10**6, FEW], [-100, 5000, 20, 140]):
        inputs = packed([150]) | {"cu_seqlens": torch.tensor(starts, dtype=torch.int32)}
        inputs["kv_lengths"] = torch.tensor([MANY, -7, 5])
        with choosing_for(target), triton_loom.sanitize() as seen:
            results(inputs, is_causal=True)
        assert seen.launches


def test_starts_lead_to_no_other_codes_of_values() -> None:
    """Without clamping, overlapping sequences would write to each other's codes."""
    for starts in ([0, 120, 0, 140], [0, 5000, 20, 140], [3, MANY, 10**6, FEW]):
        inputs = packed([150], dtype=BF16) | {"cu_seqlens": torch.tensor(starts, dtype=torch.int32)}
        with triton_loom.sanitize():
            out = attend(**inputs, scores="e4m3", values="e4m3")
        assert out.isnan().any()
    alone = packed([150], dtype=BF16) | {"cu_seqlens": torch.tensor([0, 120, 120, 150], dtype=torch.int32)}
    broken = alone | {"cu_seqlens": torch.tensor([0, 120, 0, 150], dtype=torch.int32)}
    one, other = (attend(**each, scores="e4m3", values="e4m3") for each in (alone, broken))
    assert torch.equal(one[:120], other[:120])
    assert other[120:].isnan().all()


@pytest.mark.parametrize(("last", "causal"), covering([MANY, 151, 60, -1], [False, True], together=1))
def test_a_sequence_out_of_range_is_nan_and_its_neighbors_are_not(last: int, causal: bool) -> None:
    """Cases: a last start beyond the tokens, and one before the sequence begins."""
    inputs = packed([70, 80])
    inputs["cu_seqlens"] = torch.tensor([0, 70, last, last], dtype=torch.int32)
    sound = packed([70, 80]) | {"cu_seqlens": torch.tensor([0, 70], dtype=torch.int32)}
    broken, alone = results(inputs, is_causal=causal), results(sound, is_causal=causal)
    assert torch.equal(broken["out"][:70], alone["out"][:70])
    assert torch.equal(broken["dquery"][:70], alone["dquery"][:70])
    assert torch.equal(broken["dkey"][:70], alone["dkey"][:70])
    if last > 150:
        assert broken["out"][70:].isnan().all()
        assert broken["lse"][:, 70:].isnan().all()
        assert all(broken[name][70:].isnan().all() for name in ("dquery", "dkey", "dvalue"))
        assert broken["dsinks"].isnan().all()
    else:  # the sequence has no tokens
        assert not broken["out"][70:].count_nonzero()
    assert broken["max"].isnan().all()


@pytest.mark.parametrize("causal", [False, True])
def test_tokens_before_the_first_sequence_belong_to_none(causal: bool) -> None:
    """Without a causal mask, the first sequence used to attend to them."""
    inputs = packed([5, 60, 70], pads=15)
    late = inputs | {"cu_seqlens": torch.tensor([5, 65, 135], dtype=torch.int32)}
    for name in ("query", "key", "value"):
        late[name] = late[name].clone()
        late[name][:5] = late[name][135:] = math.nan
    wanted, got = results(inputs, is_causal=causal), results(late, is_causal=causal)
    for name in ("out", "dquery", "dkey", "dvalue"):
        assert torch.equal(got[name][5:135], wanted[name][5:135]), name
        assert not got[name][:5].count_nonzero(), name
        assert not got[name][135:].count_nonzero(), name
    assert (got["lse"][:, :5] == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_kv_lengths_out_of_range(dtype: torch.dtype) -> None:
    """A negative length uses no keys; one above the number of keys gives NaN, also where 32 bits would wrap."""
    lengths = torch.tensor(
        [-(2**31), 30, 31, 2**31 - 1] if dtype is torch.int32 else [-(2**40), 30, 31, 2**32 + 5]
    )
    inputs = heads(20, 30, batch=4) | {"kv_lengths": lengths.to(dtype)}
    got = results(inputs)
    with weft.backend("reference"):
        assert_alike(got, results(inputs))
    assert not got["out"][0].count_nonzero()
    assert torch.equal(got["out"][1], results(heads(20, 30, batch=4))["out"][1])
    for name in ("out", "lse", "dquery", "dkey", "dvalue"):
        assert got[name][2:].isnan().all(), name
        assert got[name][:2].isnan().sum() == 0, name


# ---- pages and lengths --------------------------------------------------------------------------------------


def decoded(inputs: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    outputs = decode(**inputs, **options)
    return {"out": outputs.out, "lse": outputs.lse}


CODED: dict[str, Any] = {"plain": None, "token": (E4M3, "token"), "tensor": (torch.int8, "tensor")}


@pytest.mark.parametrize(
    ("coded", "page_and_lengths"),
    covering(
        list(CODED), [(PAGE, [40, 30, 33]), (PAGE, [600, 30, 1100]), (128, [300, 30, 1100])], together=1
    ),
)
def test_pages_that_do_not_exist(coded: str, page_and_lengths: tuple[int, list[int]]) -> None:
    """A sequence with a missing page gives NaN, and its neighbors keep their bits: with one part and several, with
    pages smaller than a tile and pages of whole tiles."""
    page, lengths = page_and_lengths
    inputs = problem(lengths, page=page, coded=CODED[coded], queries=2)
    for name in inputs.keys() - {"query", "page_table", "lengths"}:  # otherwise page 0 would look right
        if inputs[name].dim():
            inputs[name] = torch.cat([torch.zeros_like(inputs[name][:1]), inputs[name]])
    inputs["page_table"] += inputs["page_table"] >= 0
    wanted = decoded(inputs)
    for number in (len(inputs["k"]), MANY, -1, FEW):
        table = inputs["page_table"].clone()
        table[1, 0] = number
        with triton_loom.sanitize():
            got = decoded(inputs | {"page_table": table})
        with weft.backend("reference"):
            assert_alike(decoded(inputs | {"page_table": table}), got)
        for name, x in got.items():
            assert x[1].isnan().all()
            assert torch.equal(x[[0, 2]], wanted[name][[0, 2]])


@pytest.mark.parametrize(("length", "page"), [(30, PAGE), (1100, PAGE), (1100, 128)])
def test_pages_before_the_window_may_be_gone(length: int, page: int) -> None:
    """Servers free such pages and leave any number in the table, also pages of other sequences. Page 0 holds NaN."""
    inputs = problem([length], page=page, queries=2)
    for name in ("k", "v"):
        inputs[name] = torch.cat([torch.full_like(inputs[name][:1], math.nan), inputs[name]])
    inputs["page_table"] += 1
    wanted = decoded(inputs, window=9)
    assert wanted["out"].isfinite().all()
    first = (length - 2 - 9) // page  # the page of the first key that a query sees
    for number in (-1, 0, MANY):
        table = inputs["page_table"].clone()
        table[:, :first] = number
        got = decoded(inputs | {"page_table": table}, window=9)
        assert all(torch.equal(x, wanted[name]) for name, x in got.items())
        table[:, first] = number
        assert decoded(inputs | {"page_table": table}, window=9)["out"].isnan().all()


@pytest.mark.parametrize(("width", "dtype"), covering([3, 40], [torch.int32, torch.int64], together=1))
def test_lengths_out_of_range(width: int, dtype: torch.dtype) -> None:
    """A length below 0 means no tokens; one above the table's capacity gives NaN, also where 32 bits would wrap."""
    room = width * PAGE
    large = [MANY, MANY - 1] if dtype is torch.int32 else [2**32 + 5, 2**62]
    inputs = problem([room, room, room, 20, room], width=width)
    inputs["page_table"] = inputs["page_table"].clamp(min=0)
    wanted = decoded(inputs)
    # No page follows those of the last sequence.
    inputs["lengths"] = torch.tensor([FEW, *large, 20, room + 1], dtype=dtype)
    with triton_loom.sanitize():
        got = decoded(inputs)
    with weft.backend("reference"):
        assert_alike(decoded(inputs), got)
    assert not got["out"][0].count_nonzero()
    assert (got["lse"][0] == -math.inf).all()
    for name, x in got.items():
        assert x[[1, 2, 4]].isnan().all()
        assert torch.equal(x[3], wanted[name][3])


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_pages_of_latents_that_do_not_exist(target: str) -> None:
    inputs = problem([70, 70], heads=16, kv=1, dim=576, page=64, dtype=BF16)
    rows, _ = latent_rows(inputs["k"].nan_to_num(0.0))
    for cache in (weft.KVCache(inputs["k"]), weft.KVCache(rows)):
        for number in (len(inputs["k"]), MANY, -1):
            inputs["page_table"][1, 0] = number
            with choosing_for(target), triton_loom.sanitize():
                out = weft.mla_decode(
                    inputs["query"],
                    cache,
                    page_table=inputs["page_table"],
                    lengths=inputs["lengths"],
                    scale=0.05,
                )
            assert out[1].isnan().all()  # type: ignore[union-attr, index]
            assert out[0].isfinite().all()  # type: ignore[union-attr, index]


@pytest.mark.parametrize("width", [3, 40])  # one part, and several
def test_a_cache_without_pages(width: int) -> None:
    cache = weft.KVCache(torch.empty(0, PAGE, 2, 64), torch.empty(0, PAGE, 2, 64))
    table = torch.zeros(2, width, dtype=torch.int32)
    options: Any = {"page_table": table, "lengths": torch.tensor([0, 5]), "return_lse": True}
    for backend in ("auto", "reference"):
        with weft.backend(backend), triton_loom.sanitize():  # type: ignore[arg-type]
            out, lse, _ = weft.attention_decode(torch.randn(2, 4, 64), cache, **options)
        assert not out[0].count_nonzero()
        assert out[1].isnan().all()
        assert lse[1].isnan().all()
