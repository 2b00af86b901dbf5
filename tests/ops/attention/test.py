"""Attention against float64: lengths, masks, head widths, memory layouts, and bitwise invariance."""

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
    """Draw query, key and value [batch, heads, tokens, dim]."""
    generator = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys
    shapes = ((batch, q, queries, dim), (batch, kv, keys, dim), (batch, kv, keys, v_dim or dim))
    tensors = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return dict(zip(("query", "key", "value"), tensors, strict=True))


def packed(q: list[int], k: list[int] | None = None, pads: int = 0, **options: Any) -> dict[str, Any]:
    """Draw packed heads of sequences with these lengths, followed by `pads` tokens outside all sequences."""
    tensors = heads(sum(q) + pads, None if k is None else sum(k) + pads, **options)
    tensors = {name: x[0].transpose(0, 1).contiguous() for name, x in tensors.items()}
    starts = {"cu_seqlens": q} if k is None else {"cu_seqlens": q, "cu_seqlens_k": k}
    for name, lengths in starts.items():
        tensors[name] = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return tensors


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
    """SDPA aligns causal masks to the upper left, FlashAttention to the lower right (mlx #2835, cudnn-frontend #493,
    onnxruntime #27992); where lengths differ, the masks differ. Sequences may be shorter than a tile (pytorch
    #136232)."""
    judge(**heads(queries, keys), is_causal=True, causal_align=align, return_lse=True)


def test_causal_align_is_required_where_lengths_differ() -> None:
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
    # FlashAttention's -1 means "all"; others read it as a bound (TransformerEngine #3528).
    with pytest.raises(ValueError, match="at least 0"):
        attend(**heads(90), window=(-1, 0))


def test_sequences_without_queries_or_keys() -> None:
    """Empty sequences once gave NaN (flash-attention #2421), a fault (#2562) and a hang (#2568) elsewhere."""
    inputs = packed([5, 0, 65, 130, 0, 1], [0, 50, 10, 20, 3, 121], pads=9)
    judge(**inputs, **LOWER, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))
    judge(**packed([0, 0]), return_lse=True)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_packed_sequences_match_separate_ones(dtype: torch.dtype) -> None:
    """Each packed sequence has the bits that it has alone."""
    lengths = [70, 1, 0, 64, 100]
    inputs = packed(lengths, pads=3, dtype=dtype)
    upstream = {
        "out": torch.randn(sum(lengths) + 3, 4, 64).to(dtype),
        "lse": torch.randn(4, sum(lengths) + 3),
    }
    result = run(Call(attend, inputs | CAUSAL), upstream)
    begin = 0
    for length in lengths:
        own = slice(begin, begin + length)
        begin += length
        if not length:
            continue

        def of_one(name: str, x: Tensor, own: slice = own) -> Tensor:
            return x[:, own][None] if name == "lse" else x[own].transpose(0, 1)[None]

        alone = {name: of_one(name, inputs[name]) for name in ("query", "key", "value")}
        one = run(Call(attend, alone | CAUSAL), {name: of_one(name, x) for name, x in upstream.items()})
        assert_same(one, {name: of_one(name, x) for name, x in result.items()}, f"tokens from {own.start} on")
    for name in ("out", "dquery", "dkey", "dvalue"):
        assert not result[name][begin:].count_nonzero(), name
    assert (result["lse"][:, begin:] == -math.inf).all()


def test_padding_tokens_influence_nothing() -> None:
    """NaN in the padding of queries, keys and upstream gradients reaches no sequence (tilelang #2461)."""
    inputs = packed([40, 90], pads=7)
    clean = run(Call(attend, inputs | CAUSAL))
    for name in ("query", "key", "value"):
        inputs[name][130:] = math.nan
    upstream = {"out": clean["out"].new_ones(137, 4, 64), "lse": clean["lse"].new_ones(4, 137)}
    wanted = run(Call(attend, inputs | CAUSAL), upstream)
    upstream["out"][130:] = math.nan
    upstream["lse"][:, 130:] = math.nan
    result = run(Call(attend, inputs | CAUSAL), upstream)
    assert_same(result, wanted, "NaN in pads")
    assert torch.equal(result["out"], clean["out"])
    assert all(value.isfinite().all() for name, value in result.items() if name != "lse")


@pytest.mark.parametrize("options", [{}, LOWER])
def test_kv_lengths_hide_keys(options: dict[str, Any]) -> None:
    """NaN in keys and values past the length of a sequence reaches no result, and their gradients are 0."""
    inputs, lengths = heads(100, 140, batch=3), torch.tensor([0, 77, 140])
    judge(**inputs, kv_lengths=lengths, **options)
    wanted = run(Call(attend, inputs | options | {"kv_lengths": lengths}))
    for i, length in enumerate(lengths.tolist()):
        for name in ("key", "value"):
            inputs[name][i, :, length:] = math.nan
    result = run(Call(attend, inputs | options | {"kv_lengths": lengths}))
    assert_same(result, wanted, "NaN in keys that are not used")


def test_no_keys() -> None:
    result = run(Call(attend, heads(20, 0) | LOWER | {"return_max": True}))
    assert not result["out"].count_nonzero()
    assert not result["dquery"].count_nonzero()
    assert (result["lse"] == -math.inf).all()
    assert (result["max"] == -math.inf).all()
    judge(**heads(20, 0), **LOWER, sinks=torch.randn(4))


def test_rows_without_keys_give_zeros() -> None:
    """Rows that see no key have lse -inf, not a value near -50000 (flashinfer #4452), and no gradient is NaN
    (flash-attention #443)."""
    result = run(Call(attend, heads(100, 30) | LOWER))
    assert (result["lse"][:, :, :70] == -math.inf).all()
    assert not result["out"][:, :, :70].count_nonzero()
    assert not result["dquery"][:, :, :70].count_nonzero()
    assert all(result[name].isfinite().all() for name in ("dquery", "dkey", "dvalue"))


# ---- scores -------------------------------------------------------------------------------------------------


def test_sinks_that_are_infinite() -> None:
    sinks = torch.tensor([math.inf, -math.inf, 0.5, 1e4])
    inputs = heads(70) | {"return_lse": True, "is_causal": True}
    result = run(Call(attend, inputs | {"sinks": sinks}))
    without = run(Call(attend, inputs))
    assert torch.equal(result["out"][:, 1], without["out"][:, 1])
    assert not result["out"][:, 0].count_nonzero()
    assert (result["lse"][:, 0] == math.inf).all()
    assert result["dsinks"][1] == 0
    assert all(result[name].isfinite().all() for name in ("out", "dquery", "dkey", "dvalue", "dsinks"))
    judge(**heads(70), sinks=sinks[2:].repeat(2), is_causal=True, return_lse=True)


def test_pads_see_no_sink() -> None:
    result = attend(**packed([30, 40], pads=9), sinks=torch.full((4,), math.inf), return_lse=True)
    assert (result.lse[:, :70] == math.inf).all()
    assert (result.lse[:, 70:] == -math.inf).all()


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_nan_sink_is_not_swallowed(backend: Any) -> None:
    """A NaN sink makes result, lse and gradients of its head NaN, also for queries that see no key, as a softmax over
    scores and sink would; other heads keep their bits."""
    sinks = torch.tensor([0.5, math.nan, 0.5, math.nan])
    clean = torch.full((4,), 0.5)
    for inputs, rows in (
        (heads(70, 30, kv=4) | LOWER, slice(None)),
        (heads(70, 0, kv=4) | LOWER, slice(None)),
        (packed([40, 0, 20], [0, 30, 30], pads=9, kv=4) | LOWER, slice(60)),
    ):
        with weft.backend(backend):
            result, wanted = (run(Call(attend, inputs | {"sinks": each})) for each in (sinks, clean))
        for name in ("out", "lse", "dquery", "dkey", "dvalue"):
            one, other = (
                x if name == "lse" and "cu_seqlens" in inputs else x.movedim(1, 0)
                for x in (result[name], wanted[name])
            )
            assert torch.equal(one[[0, 2]], other[[0, 2]]), name
            if name in ("out", "lse"):
                seen = one if "cu_seqlens" not in inputs else one[:, rows]
                assert seen[[1, 3]].isnan().all(), name
        if "cu_seqlens" in inputs:  # tokens of no sequence see no sink
            assert not result["out"][60:].count_nonzero()
            assert (result["lse"][:, 60:] == -math.inf).all()
        assert result["dsinks"][[1, 3]].isnan().all()
        assert torch.equal(result["dsinks"][[0, 2]], wanted["dsinks"][[0, 2]])
        if inputs["key"].numel():
            own = result["dkey"][:, [1, 3]]
            assert own.isnan().any()


@pytest.mark.parametrize("size", [1e4, 1e-4])
def test_large_and_small_scores(size: float) -> None:
    judge(**heads(90), scale=size / 8, is_causal=True, return_lse=True, return_max=True)


def test_softcap() -> None:
    judge(**heads(100), softcap=3.0, scale=0.7, window=(30, 10), return_lse=True, return_max=True)


def test_a_nan_reaches_only_queries_that_see_it() -> None:
    inputs = heads(100)
    inputs["key"][0, 0, 37] = math.nan
    out = attend(**inputs, window=(20, 0))
    bad = out.isnan().all(-1)[0]  # [heads, queries]
    assert bad[:2, 37:58].all()
    assert bad.sum() == 2 * 21


def test_return_max() -> None:
    inputs = heads(90, 70, batch=2)
    # All scores are below 0.
    inputs["query"], inputs["key"] = inputs["query"].abs(), -inputs["key"].abs()
    result = attend(**inputs, **LOWER, return_max=True)
    repeated = inputs["key"].repeat_interleave(2, 1)
    scores = (inputs["query"] @ repeated.mT) / 8
    scores = scores.masked_fill(~sees(90, 70, LOWER), -math.inf)
    torch.testing.assert_close(result.max, scores.amax((0, 2, 3)))


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
def test_error_is_close_to_that_of_torch(dtype: torch.dtype) -> None:
    """The error is at most 1.25 times that of `F.scaled_dot_product_attention` on the same inputs."""
    inputs = heads(300, q=8, kv=2, dim=128, dtype=dtype)
    upstream = torch.randn(1, 8, 300, 128, generator=torch.Generator().manual_seed(5)).to(dtype)

    def errors(attend: Any) -> list[float]:
        leaves = [inputs[name].clone().requires_grad_() for name in ("query", "key", "value")]
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
    inputs = heads(70)
    wanted = run(Call(attend, inputs | {"is_causal": True}))
    qkv = torch.cat([x[0].transpose(0, 1).flatten(1) for x in inputs.values()], 1)  # a packed projection
    parts = [part.unflatten(1, (-1, 64)).transpose(0, 1)[None] for part in qkv.split((256, 128, 128), 1)]
    strided = dict(zip(inputs, parts, strict=True))
    assert_same(run(Call(attend, strided | {"is_causal": True})), wanted, "slices")
    transposed = {name: x.mT.contiguous().mT for name, x in inputs.items()}  # heads are not contiguous
    assert_same(run(Call(attend, transposed | {"is_causal": True})), wanted, "transposed")


def test_expanded_keys_and_gradients() -> None:
    inputs = heads(40, batch=3)
    for name in ("key", "value"):
        inputs[name] = inputs[name][:1].expand(3, -1, -1, -1)
    dense = {name: x.contiguous() for name, x in inputs.items()}
    upstream = {"y": torch.randn(64).expand(3, 4, 40, 64)}
    result, wanted = (run(Call(attend, each), upstream) for each in (inputs, dense))
    assert_same(result, wanted, "expanded")
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
    inputs = heads(45, batch=2)
    wanted = run(Call(attend, inputs | CAUSAL))
    for layout, order in (("bshd", (0, 2, 1, 3)), ("sbhd", (2, 0, 1, 3))):
        permuted = {name: x.permute(order) for name, x in inputs.items()}
        upstream = {
            "out": torch.randn(wanted["out"].shape, generator=torch.Generator().manual_seed(1)).permute(
                order
            ),
            "lse": torch.randn(wanted["lse"].shape, generator=torch.Generator().manual_seed(1)),
        }
        first = run(
            Call(attend, inputs | CAUSAL),
            {"out": upstream["out"].permute([order.index(i) for i in range(4)]), "lse": upstream["lse"]},
        )
        result = run(Call(attend, permuted | CAUSAL | {"layout": layout}), upstream)
        for name, value in first.items():
            other = value if name == "lse" else value.permute(order)
            assert torch.equal(words(result[name]), words(other)), (layout, name)


@pytest.mark.parametrize("spec", ["1x128", "mx", "row", "tensor"])
@pytest.mark.parametrize("dim", [128, 64])
def test_quantized_results_equal_quantize(spec: str, dim: int) -> None:
    inputs = heads(40, dim=dim, batch=2, dtype=BF16)
    plain = attend(**inputs, is_causal=True).transpose(1, 2).flatten(2)
    result = attend(**inputs, is_causal=True, quantize=spec)
    wanted = weft.quantize(plain, spec)
    assert result.shape == (2, 40, 4 * dim)
    for one, other in zip(result.rowwise[:3], wanted.rowwise[:3], strict=True):  # type: ignore[attr-defined, index]
        assert (one is None) == (other is None)
        if one is not None:
            assert torch.equal(words(one), words(other))


def test_gradients_flow_through_a_quantized_result() -> None:
    inputs = heads(40, dtype=BF16, batch=2)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    upstream = torch.randn(2, 40, 256).to(BF16)
    out = attend(**leaves, is_causal=True, quantize="1x128", columnwise=True)
    result = torch.autograd.grad(out.dequantize(), list(leaves.values()), upstream)  # type: ignore[operator]
    plain = attend(**leaves, is_causal=True).transpose(1, 2).flatten(2)
    for one, other in zip(result, torch.autograd.grad(plain, list(leaves.values()), upstream), strict=True):
        assert torch.equal(words(one), words(other))


# ---- bitwise invariance -------------------------------------------------------------------------------------


def test_batch_heads_and_masked_keys_change_no_bit() -> None:
    inputs = heads(100, batch=3, dtype=BF16)
    result = run(Call(attend, inputs | CAUSAL), upstream := _upstream(inputs))
    alone = {name: x[1:2] for name, x in inputs.items()}
    one = run(Call(attend, alone | CAUSAL), {name: x[1:2] for name, x in upstream.items()})
    assert_same(one, {name: x[1:2] for name, x in result.items()}, "a sequence alone")

    def swapped(tensors: dict[str, Any]) -> dict[str, Any]:
        """Swap the two groups of heads."""
        return {name: x.roll(x.shape[1] // 2, 1) for name, x in tensors.items()}

    other = run(Call(attend, swapped(inputs) | CAUSAL), swapped(upstream))
    assert_same(swapped(other), result, "groups of heads in another order")
    more = {name: torch.cat([x, x[:, :, :77]], 2) if name != "query" else x for name, x in inputs.items()}
    longer = attend(**more, **UPPER)
    assert torch.equal(words(longer.out), words(result["out"]))
    assert torch.equal(words(longer.lse), words(result["lse"]))


def _upstream(inputs: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    query = inputs["query"]
    return {
        "out": torch.randn(query.shape, generator=generator).to(query.dtype),
        "lse": torch.randn(query.shape[:3], generator=generator),
    }


@pytest.mark.parametrize(
    "mask", [{}, {"is_causal": True}, {"window": (70, 5)}], ids=["full", "causal", "window"]
)
def test_flops_match_the_visible_blocks(mask: dict[str, Any]) -> None:
    """Forward takes 4 * pairs * dim operations, backward 14, over the 64 x 64 blocks with a visible pair."""
    inputs, dim = heads(300, q=2, kv=1), 64
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    seen = F.pad(sees(300, 300, mask), (0, 20, 0, 20)).view(5, 64, 5, 64)
    pairs = int(seen.any(3).any(1).sum()) * 64 * 64 * 2
    with triton_loom.count() as forward:
        out = attend(**leaves, **mask)
    with triton_loom.count() as backward:
        out.sum().backward()
    assert sum(launch.dot_flops for launch in forward.launches) == 4 * pairs * dim
    assert sum(launch.dot_flops for launch in backward.launches) == 14 * pairs * dim


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx950"])
def test_tiles_of(target: str) -> None:
    """Results are accurate with the tiles of GPUs."""
    with choosing_for(target):
        if target == "sm_90":  # its tiles are square
            judge(**heads(200, 170, dtype=BF16), **LOWER, sinks=torch.randn(4))
        else:
            judge(**packed([130, 0, 70], dtype=BF16), window=(50, 7), return_lse=True)


def test_compiled() -> None:
    """torch.compile captures one graph and gives the bits of the eager op."""

    def loss(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        out, lse, _ = attend(query, key, value, sinks=sinks, **CAUSAL)
        return out.float().square().sum() + lse.sum()

    inputs = [*heads(60, dtype=BF16).values(), torch.randn(4)]
    leaves = [x.clone().requires_grad_() for x in inputs]
    wanted = loss(*leaves)
    grads = torch.autograd.grad(wanted, leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    result = compiled(*leaves)
    assert torch.equal(result, wanted)
    for one, other in zip(torch.autograd.grad(result, leaves), grads, strict=True):
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
