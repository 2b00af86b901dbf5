"""Attention against float64: lengths, masks, widths of heads, memory, and what must not change a bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton_loom
from torch import Tensor
from triton_loom.testing import words

import weft
from tests.ops.attention.own import attend
from weft.lab.calls import assert_same, run
from weft.lab.checks import assert_accurate
from weft.lab.families import Call
from weft.lab.families.attention import sees
from weft.runtime import choosing_for

BF16, FP32 = torch.bfloat16, torch.float32


def heads(
    queries: int, keys: int | None = None, *, batch: int = 1, q: int = 4, kv: int = 2, dim: int = 64,
    v_dim: int | None = None, dtype: torch.dtype = FP32, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Query, key and value [batch, heads, tokens, dim]."""
    generator = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys
    shapes = ((batch, q, queries, dim), (batch, kv, keys, dim), (batch, kv, keys, v_dim or dim))
    made = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return dict(zip(("query", "key", "value"), made, strict=True))


def packed(q: list[int], k: list[int] | None = None, pads: int = 0, **options: Any) -> dict[str, Any]:
    """The same packed, sequences of these lengths one after another, and tokens that belong to none."""
    made = heads(sum(q) + pads, None if k is None else sum(k) + pads, **options)
    made = {name: x[0].transpose(0, 1).contiguous() for name, x in made.items()}
    starts = {"cu_seqlens": q} if k is None else {"cu_seqlens": q, "cu_seqlens_k": k}
    for name, lengths in starts.items():
        made[name] = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return made


def judge(**kwargs: Any) -> None:
    assert_accurate("attention", Call(attend, kwargs))


CAUSAL = {"is_causal": True, "return_lse": True}
LOWER = CAUSAL | {"causal_align": "lower_right"}
UPPER = CAUSAL | {"causal_align": "upper_left"}


# ---- lengths and masks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("align", ["lower_right", "upper_left"])
@pytest.mark.parametrize(
    ("queries", "keys"), [(100, 100), (37, 129), (129, 37), (1, 70), (70, 1), (65, 64), (64, 128)]
)
def test_lengths_and_alignments(queries: int, keys: int, align: Any) -> None:
    """SDPA aligns a causal mask to the upper left, FlashAttention to the lower right (mlx #2835, cudnn-frontend #493,
    onnxruntime #27992): where lengths differ, they are different masks. And sequences may be shorter than a block
    (pytorch #136232)."""
    judge(**heads(queries, keys), is_causal=True, causal_align=align, return_lse=True)


def test_an_alignment_that_matters_has_to_be_said() -> None:
    with pytest.raises(ValueError, match="causal_align"):
        attend(**heads(5, 7), is_causal=True)
    with pytest.raises(ValueError, match="causal_align"):
        attend(**heads(5), is_causal=True, kv_lengths=torch.tensor([3]))
    lower, upper = (attend(**heads(5, 7), **mask).out for mask in (LOWER, UPPER))
    assert not torch.equal(lower, upper)
    assert attend(**heads(5, 7)).shape == (1, 4, 5, 64)


@pytest.mark.parametrize(
    "window", [(0, 0), (1, 0), (16, 3), (None, 5), (7, None), (63, 0), (64, 0), (500, 500), (0, 200)]
)
def test_windows(window: Any) -> None:
    judge(**heads(150), window=window, return_lse=True)


def test_a_window_with_a_causal_mask_ends_at_the_own_key() -> None:
    both = attend(**heads(90), window=(16, None), is_causal=True)
    assert torch.equal(both, attend(**heads(90), window=(16, 0)))
    with pytest.raises(ValueError, match="no later keys"):
        attend(**heads(90), window=(16, 3), is_causal=True)
    # FlashAttention's -1 for "all", which others read as a number (TransformerEngine #3528)
    with pytest.raises(ValueError, match="at least 0"):
        attend(**heads(90), window=(-1, 0))


def test_sequences_without_queries_or_keys() -> None:
    """Sequences of length zero gave NaN (flash-attention #2421), a fault (#2562) and a hang (#2568)."""
    given = packed([5, 0, 65, 130, 0, 1], [0, 50, 10, 20, 3, 121], pads=9)
    judge(**given, **LOWER, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))
    judge(**packed([0, 0]), return_lse=True)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_packed_sequences_are_sequences(dtype: torch.dtype) -> None:
    """Bit for bit what each of them gives alone."""
    lengths = [70, 1, 0, 64, 100]
    given = packed(lengths, pads=3, dtype=dtype)
    upstream = {
        "out": torch.randn(sum(lengths) + 3, 4, 64).to(dtype),
        "lse": torch.randn(4, sum(lengths) + 3),
    }
    found = run(Call(attend, given | CAUSAL), upstream)
    begin = 0
    for length in lengths:
        own = slice(begin, begin + length)
        begin += length
        if not length:
            continue

        def of_one(name: str, x: Tensor, own: slice = own) -> Tensor:
            return x[:, own][None] if name == "lse" else x[own].transpose(0, 1)[None]

        alone = {name: of_one(name, given[name]) for name in ("query", "key", "value")}
        one = run(Call(attend, alone | CAUSAL), {name: of_one(name, x) for name, x in upstream.items()})
        assert_same(one, {name: of_one(name, x) for name, x in found.items()}, f"tokens from {own.start} on")
    for name in ("out", "dquery", "dkey", "dvalue"):
        assert not found[name][begin:].count_nonzero(), name
    assert (found["lse"][:, begin:] == -math.inf).all()


def test_tokens_of_no_sequence_have_no_say() -> None:
    """NaN in pads of queries, their gradients and keys reaches nobody (tilelang #2461)."""
    given = packed([40, 90], pads=7)
    clean = run(Call(attend, given | CAUSAL))
    for name in ("query", "key", "value"):
        given[name][130:] = math.nan
    upstream = {"out": clean["out"].new_ones(137, 4, 64), "lse": clean["lse"].new_ones(4, 137)}
    wanted = run(Call(attend, given | CAUSAL), upstream)
    upstream["out"][130:] = math.nan
    upstream["lse"][:, 130:] = math.nan
    found = run(Call(attend, given | CAUSAL), upstream)
    assert_same(found, wanted, "NaN in pads")
    assert torch.equal(found["out"], clean["out"])
    assert all(value.isfinite().all() for name, value in found.items() if name != "lse")


@pytest.mark.parametrize("options", [{}, LOWER])
def test_kv_lengths_hide_keys(options: dict[str, Any]) -> None:
    """NaN in keys and values past the length of a sequence reaches nobody, and their gradients are 0."""
    given, lengths = heads(100, 140, batch=3), torch.tensor([0, 77, 140])
    judge(**given, kv_lengths=lengths, **options)
    wanted = run(Call(attend, given | options | {"kv_lengths": lengths}))
    for i, length in enumerate(lengths.tolist()):
        for name in ("key", "value"):
            given[name][i, :, length:] = math.nan
    found = run(Call(attend, given | options | {"kv_lengths": lengths}))
    assert_same(found, wanted, "NaN in keys that are not used")


def test_no_keys() -> None:
    found = run(Call(attend, heads(20, 0) | LOWER | {"return_max": True}))
    assert not found["out"].count_nonzero()
    assert not found["dquery"].count_nonzero()
    assert (found["lse"] == -math.inf).all()
    assert (found["max"] == -math.inf).all()
    judge(**heads(20, 0), **LOWER, sinks=torch.randn(4))


def test_rows_that_see_nothing() -> None:
    """Their lse is minus infinity, not a number near -50000 (flashinfer #4452), and no gradient is NaN
    (flash-attention #443)."""
    found = run(Call(attend, heads(100, 30) | LOWER))
    assert (found["lse"][:, :, :70] == -math.inf).all()
    assert not found["out"][:, :, :70].count_nonzero()
    assert not found["dquery"][:, :, :70].count_nonzero()
    assert all(found[name].isfinite().all() for name in ("dquery", "dkey", "dvalue"))


# ---- scores -------------------------------------------------------------------------------------------------


def test_sinks_that_are_infinite() -> None:
    sinks = torch.tensor([math.inf, -math.inf, 0.5, 1e4])
    given = heads(70) | {"return_lse": True, "is_causal": True}
    found = run(Call(attend, given | {"sinks": sinks}))
    without = run(Call(attend, given))
    assert torch.equal(found["out"][:, 1], without["out"][:, 1])
    assert not found["out"][:, 0].count_nonzero()
    assert (found["lse"][:, 0] == math.inf).all()
    assert found["dsinks"][1] == 0
    assert all(found[name].isfinite().all() for name in ("out", "dquery", "dkey", "dvalue", "dsinks"))
    judge(**heads(70), sinks=sinks[2:].repeat(2), is_causal=True, return_lse=True)


def test_pads_see_no_sink() -> None:
    found = attend(**packed([30, 40], pads=9), sinks=torch.full((4,), math.inf), return_lse=True)
    assert (found.lse[:, :70] == math.inf).all()
    assert (found.lse[:, 70:] == -math.inf).all()


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_nan_sink_is_not_swallowed(backend: Any) -> None:
    """As in a softmax over the scores and the sink: result, lse and gradients of its head are NaN, also of queries that
    see no key, and of no other head."""
    sinks = torch.tensor([0.5, math.nan, 0.5, math.nan])
    clean = torch.full((4,), 0.5)
    for given, rows in (
        (heads(70, 30, kv=4) | LOWER, slice(None)),
        (heads(70, 0, kv=4) | LOWER, slice(None)),
        (packed([40, 0, 20], [0, 30, 30], pads=9, kv=4) | LOWER, slice(60)),
    ):
        with weft.backend(backend):
            found, wanted = (run(Call(attend, given | {"sinks": each})) for each in (sinks, clean))
        for name in ("out", "lse", "dquery", "dkey", "dvalue"):
            one, other = (
                x if name == "lse" and "cu_seqlens" in given else x.movedim(1, 0)
                for x in (found[name], wanted[name])
            )
            assert torch.equal(one[[0, 2]], other[[0, 2]]), name
            if name in ("out", "lse"):
                seen = one if "cu_seqlens" not in given else one[:, rows]
                assert seen[[1, 3]].isnan().all(), name
        if "cu_seqlens" in given:  # tokens of no sequence see no sink
            assert not found["out"][60:].count_nonzero()
            assert (found["lse"][:, 60:] == -math.inf).all()
        assert found["dsinks"][[1, 3]].isnan().all()
        assert torch.equal(found["dsinks"][[0, 2]], wanted["dsinks"][[0, 2]])
        if given["key"].numel():
            own = found["dkey"][:, [1, 3]]
            assert own.isnan().any()


@pytest.mark.parametrize("size", [1e4, 1e-4])
def test_large_and_small_scores(size: float) -> None:
    judge(**heads(90), scale=size / 8, is_causal=True, return_lse=True, return_max=True)


def test_softcap() -> None:
    judge(**heads(100), softcap=3.0, scale=0.7, window=(30, 10), return_lse=True, return_max=True)


def test_a_nan_reaches_those_who_see_it() -> None:
    given = heads(100)
    given["key"][0, 0, 37] = math.nan
    out = attend(**given, window=(20, 0))
    bad = out.isnan().all(-1)[0]  # [heads, queries]
    assert bad[:2, 37:58].all()
    assert bad.sum() == 2 * 21


def test_the_largest_score() -> None:
    given = heads(90, 70, batch=2)
    given["query"], given["key"] = given["query"].abs(), -given["key"].abs()  # 0 is larger than all scores
    found = attend(**given, **LOWER, return_max=True)
    repeated = given["key"].repeat_interleave(2, 1)
    scores = (given["query"] @ repeated.mT) / 8
    scores = scores.masked_fill(~sees(90, 70, LOWER), -math.inf)
    torch.testing.assert_close(found.max, scores.amax((0, 2, 3)))


# ---- heads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dim", "v_dim"),
    [(8, 8), (64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (33, 17), (64, 192)],
)
def test_widths_of_heads(dim: int, v_dim: int) -> None:
    judge(**heads(70, dim=dim, v_dim=v_dim, dtype=BF16), is_causal=True)


@pytest.mark.parametrize("group", [1, 5, 16])
def test_groups_of_heads(group: int) -> None:
    judge(**heads(70, q=2 * group, dtype=BF16), is_causal=True, return_lse=True)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_error_is_that_of_torch(dtype: torch.dtype) -> None:
    """At most 1.25 times the error that `F.scaled_dot_product_attention` makes with the same numbers."""
    given = heads(300, q=8, kv=2, dim=128, dtype=dtype)
    upstream = torch.randn(1, 8, 300, 128, generator=torch.Generator().manual_seed(5)).to(dtype)

    def errors(attend: Any) -> list[float]:
        leaves = [given[name].clone().requires_grad_() for name in ("query", "key", "value")]
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        got = attend(*leaves)
        want = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
        pairs = [(got, want)]
        pairs += zip(
            torch.autograd.grad(got, leaves, upstream),
            torch.autograd.grad(want, exact, upstream.double()),
            strict=True,
        )
        return [(a.double() - b).square().mean().sqrt().item() for a, b in pairs]

    ours = errors(lambda q, k, v: attend(q, k, v, is_causal=True))
    theirs = errors(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    for own, other in zip(ours, theirs, strict=True):
        assert own <= 1.25 * other


# ---- memory -------------------------------------------------------------------------------------------------


def test_any_strides() -> None:
    given = heads(70)
    wanted = run(Call(attend, given | {"is_causal": True}))
    qkv = torch.cat([x[0].transpose(0, 1).flatten(1) for x in given.values()], 1)  # a packed projection
    cut = [part.unflatten(1, (-1, 64)).transpose(0, 1)[None] for part in qkv.split((256, 128, 128), 1)]
    strided = dict(zip(given, cut, strict=True))
    assert_same(run(Call(attend, strided | {"is_causal": True})), wanted, "slices")
    turned = {name: x.mT.contiguous().mT for name, x in given.items()}  # numbers of a head are not neighbours
    assert_same(run(Call(attend, turned | {"is_causal": True})), wanted, "transposed")


def test_expanded_keys_and_gradients() -> None:
    given = heads(40, batch=3)
    for name in ("key", "value"):
        given[name] = given[name][:1].expand(3, -1, -1, -1)
    dense = {name: x.contiguous() for name, x in given.items()}
    upstream = {"y": torch.randn(64).expand(3, 4, 40, 64)}
    found, wanted = (run(Call(attend, each), upstream) for each in (given, dense))
    assert_same(found, wanted, "expanded")
    ones = {"y": torch.ones(()).expand(3, 4, 40, 64)}
    assert_same(
        run(Call(attend, dense), ones),
        run(Call(attend, dense), {"y": ones["y"].clone()}),
        "one",
    )


def test_the_result_has_the_heads_of_a_token_side_by_side() -> None:
    out = attend(**heads(10))
    assert out.shape == (1, 4, 10, 64)
    assert out.transpose(1, 2).is_contiguous()


def test_layouts_are_views_of_each_other() -> None:
    given = heads(45, batch=2)
    wanted = run(Call(attend, given | CAUSAL))
    for layout, order in (("bshd", (0, 2, 1, 3)), ("sbhd", (2, 0, 1, 3))):
        turned = {name: x.permute(order) for name, x in given.items()}
        upstream = {
            "out": torch.randn(wanted["out"].shape, generator=torch.Generator().manual_seed(1)).permute(
                order
            ),
            "lse": torch.randn(wanted["lse"].shape, generator=torch.Generator().manual_seed(1)),
        }
        first = run(
            Call(attend, given | CAUSAL),
            {"out": upstream["out"].permute([order.index(i) for i in range(4)]), "lse": upstream["lse"]},
        )
        found = run(Call(attend, turned | CAUSAL | {"layout": layout}), upstream)
        for name, value in first.items():
            other = value if name == "lse" else value.permute(order)
            assert torch.equal(words(found[name]), words(other)), (layout, name)


@pytest.mark.parametrize("spec", ["1x128", "mx", "row", "tensor"])
@pytest.mark.parametrize("dim", [128, 64])
def test_quantised_results_are_those_of_quantize(spec: str, dim: int) -> None:
    given = heads(40, dim=dim, batch=2, dtype=BF16)
    plain = attend(**given, is_causal=True).transpose(1, 2).flatten(2)
    found = attend(**given, is_causal=True, quantize=spec)
    wanted = weft.quantize(plain, spec)
    assert found.shape == (2, 40, 4 * dim)
    for one, other in zip(found.rowwise[:3], wanted.rowwise[:3], strict=True):  # type: ignore[attr-defined, index]
        assert (one is None) == (other is None)
        if one is not None:
            assert torch.equal(words(one), words(other))


def test_gradients_pass_a_quantised_result() -> None:
    given = heads(40, dtype=BF16, batch=2)
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    upstream = torch.randn(2, 40, 256).to(BF16)
    out = attend(**leaves, is_causal=True, quantize="1x128", columnwise=True)
    found = torch.autograd.grad(out.dequantize(), list(leaves.values()), upstream)  # type: ignore[operator]
    plain = attend(**leaves, is_causal=True).transpose(1, 2).flatten(2)
    for one, other in zip(found, torch.autograd.grad(plain, list(leaves.values()), upstream), strict=True):
        assert torch.equal(words(one), words(other))


# ---- what must not change a bit -----------------------------------------------------------------------------


def test_batch_heads_and_masked_keys_change_no_bit() -> None:
    given = heads(100, batch=3, dtype=BF16)
    found = run(Call(attend, given | CAUSAL), upstream := _upstream(given))
    alone = {name: x[1:2] for name, x in given.items()}
    one = run(Call(attend, alone | CAUSAL), {name: x[1:2] for name, x in upstream.items()})
    assert_same(one, {name: x[1:2] for name, x in found.items()}, "a sequence alone")

    def swapped(tensors: dict[str, Any]) -> dict[str, Any]:
        """The two groups of heads in the other order."""
        return {name: x.roll(x.shape[1] // 2, 1) for name, x in tensors.items()}

    other = run(Call(attend, swapped(given) | CAUSAL), swapped(upstream))
    assert_same(swapped(other), found, "groups of heads in another order")
    more = {name: torch.cat([x, x[:, :, :77]], 2) if name != "query" else x for name, x in given.items()}
    longer = attend(**more, **UPPER)
    assert torch.equal(words(longer.out), words(found["out"]))
    assert torch.equal(words(longer.lse), words(found["lse"]))


def _upstream(given: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    query = given["query"]
    return {
        "out": torch.randn(query.shape, generator=generator).to(query.dtype),
        "lse": torch.randn(query.shape[:3], generator=generator),
    }


@pytest.mark.parametrize(
    "mask", [{}, {"is_causal": True}, {"window": (70, 5)}], ids=["full", "causal", "window"]
)
def test_no_work_is_done_twice_or_in_vain(mask: dict[str, Any]) -> None:
    """4 * pairs * dim operations forward and 14 backward, over the blocks of 64 x 64 that have a pair to compute."""
    given, dim = heads(300, q=2, kv=1), 64
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    seen = F.pad(sees(300, 300, mask), (0, 20, 0, 20)).view(5, 64, 5, 64)
    pairs = int(seen.any(3).any(1).sum()) * 64 * 64 * 2
    with triton_loom.count() as forward:
        out = attend(**leaves, **mask)
    with triton_loom.count() as backward:
        out.sum().backward()
    assert sum(launch.dot_flops for launch in forward.launches) == 4 * pairs * dim
    assert sum(launch.dot_flops for launch in backward.launches) == 14 * pairs * dim


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx950"])
def test_as_launched_on(target: str) -> None:
    """With the tiles of GPUs."""
    with choosing_for(target):
        if target == "sm_90":  # its tiles of queries and keys are as long as each other
            judge(**heads(200, 170, dtype=BF16), **LOWER, sinks=torch.randn(4))
        else:
            judge(**packed([130, 0, 70], dtype=BF16), window=(50, 7), return_lse=True)


def test_compiled() -> None:
    """torch.compile sees one graph, with the bits of the op."""

    def loss(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        out, lse, _ = attend(query, key, value, sinks=sinks, **CAUSAL)
        return out.float().square().sum() + lse.sum()

    given = [*heads(60, dtype=BF16).values(), torch.randn(4)]
    leaves = [x.clone().requires_grad_() for x in given]
    wanted = loss(*leaves)
    grads = torch.autograd.grad(wanted, leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = compiled(*leaves)
    assert torch.equal(found, wanted)
    for one, other in zip(torch.autograd.grad(found, leaves), grads, strict=True):
        assert torch.equal(words(one), words(other))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"key": torch.randn(1, 3, 20, 64)}, "as many tokens and heads"),
        ({"query": torch.randn(1, 3, 20, 64)}, "multiple of those of key"),
        ({"query": torch.randn(1, 4, 20, 32)}, "heads of one dim"),
        ({"query": torch.randn(4, 20, 64)}, "4 dimensions"),
        ({"query": torch.randn(1, 4, 20, 64).half()}, "one dtype"),
        ({"layout": "bsnd"}, "layout must be"),
        ({"layout": "thd"}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 20])}, "3 dimensions"),
        ({"cu_seqlens_k": torch.tensor([0, 20])}, "need cu_seqlens"),
        ({"kv_lengths": torch.tensor([20, 20])}, "kv_lengths must have the shape"),
        ({"kv_lengths": torch.tensor([20.0])}, "kv_lengths must be int32 or int64"),
        ({"scale": -1.0}, "scale must be above 0"),
        ({"window": 128}, r"window must be \(left, right\)"),
        ({"softcap": 0.0}, "softcap must be above 0"),
        ({"sinks": torch.randn(2)}, "sinks must have the shape"),
        ({"causal_align": "lower"}, "causal_align must be"),
        ({"columnwise": True}, "go with quantize"),
    ],
)  # fmt: skip
def test_mistakes_are_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        attend(**heads(20) | changed)


def test_heads_that_are_too_wide_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 256"):
        attend(**heads(20, dim=257))
