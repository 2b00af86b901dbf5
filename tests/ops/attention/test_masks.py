"""Masks, biases and ALiBi: values and gradients against float64, skipped blocks, and calls that are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton_loom
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from triton_loom.testing import words

import weft
from tests.ops.attention.own import attend
from tests.ops.attention.test import CAUSAL, LOWER, UPPER, heads, judge, packed
from weft.lab.calls import assert_same, run
from weft.lab.families import Call
from weft.lab.families.attention import Head, attention_backward, sees
from weft.ops.attention.arguments import AttentionArgs, Mask, Packed
from weft.ops.common.results import plain_result
from weft.quant import PLAIN
from weft.runtime import choosing_for

BF16, FP32 = torch.bfloat16, torch.float32
WINDOW = LOWER | {"is_causal": False, "window": (20, 3)}
BANDS: dict[str, dict[str, Any]] = {
    "full": {"causal_align": "lower_right", "return_lse": True},
    "lower": LOWER,
    "upper": UPPER,
    "window": WINDOW,
}


def blocky(*shape: int) -> Tensor:
    """Draw a mask with blocks that are full, empty and partial for all tiles, and with rows that see nothing."""
    generator = torch.Generator().manual_seed(7)
    *lead, queries, keys = shape
    kinds = torch.rand(*lead, -(-queries // 64), -(-keys // 64), generator=generator)
    kinds = kinds.repeat_interleave(64, -2)[..., :queries, :].repeat_interleave(64, -1)[..., :keys]
    mask = (kinds < 0.3) | ((kinds < 0.6) & (torch.rand(*shape, generator=generator) < 0.5))
    mask[..., queries // 2, :] = False
    return mask


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(8))


# ---- masks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", BANDS.values(), ids=BANDS)
@pytest.mark.parametrize(("queries", "keys"), [(150, 150), (37, 192), (129, 37), (1, 70)])
def test_masks(queries: int, keys: int, options: dict[str, Any]) -> None:
    judge(**heads(queries, keys, batch=2, dim=32), **options, mask=blocky(2, 4, queries, keys))


SHAPES = {
    "of-pairs": (100, 155),
    "of-heads": (4, 1, 155),
    "of-keys": (2, 1, 1, 155),
    "of-queries": (2, 1, 100, 1),
    "of-keys-alone": (155,),
    "of-sequences": (2, 1, 1, 1),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_masks_and_biases_that_broadcast(shape: tuple[int, ...]) -> None:
    inputs = heads(100, 155, batch=2, dim=32) | {"return_lse": True}
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.6
    judge(**inputs, mask=mask)
    judge(**inputs, bias=random(*shape))


def test_strides_of_masks_and_biases() -> None:
    """Any strides give the same bits: transposed, expanded, sliced, and at odd addresses."""
    inputs, mask, bias = heads(70, 80, batch=2, dim=16), blocky(2, 4, 70, 80), random(2, 4, 70, 80)
    wanted = run(Call(attend, inputs | {"mask": mask, "bias": bias}))

    def padded(x: Tensor) -> Tensor:
        whole = torch.zeros(2, 4, 73, 91, dtype=x.dtype)
        whole[:, :, 1:71, 3:83] = x
        return whole[:, :, 1:71, 3:83]

    def interleaved(x: Tensor) -> Tensor:
        return x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)

    for strided in (lambda x: x.mT.contiguous().mT, interleaved, padded):
        result = run(Call(attend, inputs | {"mask": strided(mask), "bias": strided(bias)}))
        assert_same(result, wanted, "other strides")
    one = {"mask": mask[:1, :1], "bias": bias[:1, :1]}
    expanded = {name: x.expand(2, 4, 70, 80) for name, x in one.items()}
    whole, of_one = run(Call(attend, inputs | expanded)), run(Call(attend, inputs | one))
    torch.testing.assert_close(whole.pop("dbias").sum((0, 1), keepdim=True), of_one.pop("dbias"))
    assert_same(whole, of_one, "expanded pairs")


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_with_all_other_options(dtype: torch.dtype) -> None:
    inputs = heads(90, 140, batch=3, dtype=dtype) | {
        "mask": blocky(1, 4, 90, 140),
        "bias": random(3, 1, 90, 140).to(dtype),
        "alibi": torch.tensor([0.5, 0.1, 0.02, -0.3]),
        "prefix_lengths": torch.tensor([100, 7, 140]),
        "kv_limits": torch.randint(-9, 150, (3, 90), generator=torch.Generator().manual_seed(5)),
        "kv_lengths": torch.tensor([140, 60, 0]),
        "sinks": torch.tensor([0.5, -1.0, 2.0, -math.inf]),
    }
    judge(**inputs, **LOWER, softcap=5.0, return_max=True)


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_layouts(layout: str) -> None:
    order = (0, 2, 1, 3) if layout == "bshd" else (2, 0, 1, 3)
    inputs = {name: x.permute(order) for name, x in heads(70, batch=2, dim=32).items()}
    judge(**inputs, mask=blocky(2, 4, 70, 70), bias=random(4, 70, 70), layout=layout, is_causal=True)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx950"])
def test_tiles_of(target: str) -> None:
    inputs = heads(200, 170, dtype=BF16)
    with choosing_for(target):
        judge(**inputs, mask=blocky(1, 4, 200, 170), bias=random(4, 1, 170), return_lse=True)


def test_rows_that_see_nothing_and_sizes_of_zero() -> None:
    inputs = heads(70, 80, batch=2) | {"return_lse": True}
    result = run(Call(attend, inputs | {"mask": torch.zeros(2, 1, 70, 80, dtype=torch.bool)}))
    assert (result.pop("lse") == -math.inf).all()
    assert not any(x.count_nonzero() for x in result.values())
    result = run(Call(attend, inputs | {"bias": torch.full((70, 80), -math.inf)}))
    assert (result.pop("lse") == -math.inf).all()
    assert not any(x.count_nonzero() for x in result.values())
    empty = run(
        Call(attend, heads(20, 0) | {"mask": torch.ones(20, 0, dtype=torch.bool), "bias": random(20, 1)})
    )
    assert not any(x.count_nonzero() for x in empty.values())
    assert attend(**heads(0, 20), mask=torch.ones(0, 20, dtype=torch.bool)).shape == (1, 4, 0, 64)


def test_keys_and_queries_outside_all_pairs_may_hold_anything() -> None:
    """NaN in a key that no query sees, or in a query that sees none, reaches no other result and no gradient."""
    inputs, mask = heads(100, 140, batch=2), blocky(2, 4, 100, 140)
    mask[0, :, :, 70:75] = mask[1, :, 20:30] = mask[1, :, :, 139] = False
    upstream = {"out": random(2, 4, 100, 64), "lse": random(2, 4, 100)}
    call = {"mask": mask, "return_lse": True}
    wanted = run(Call(attend, inputs | call), upstream)
    inputs = {name: x.clone() for name, x in inputs.items()}
    upstream = {name: x.clone() for name, x in upstream.items()}
    for name in ("key", "value"):
        inputs[name][0, :, 70:75] = inputs[name][1, :, 139] = math.nan
    for x in (inputs["query"], *upstream.values()):
        x[1, :, 20:30] = math.nan
    assert_same(run(Call(attend, inputs | call), upstream), wanted, "NaN outside all pairs")


# ---- what they cost and change ------------------------------------------------------------------------------


def visible_blocks(masks: Tensor, options: dict[str, Any]) -> int:
    """Count the blocks of 64 x 64 pairs of [heads, 300, 300] in which some query sees a key."""
    seen = masks & sees(300, 300, options, Head(0, slice(0, 300), slice(0, 300), 0, 0, 0, None))
    return int(F.pad(seen, (0, 20, 0, 20)).view(-1, 5, 64, 5, 64).any(4).any(2).sum())


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"window": (70, 5)}], ids=["full", "causal", "window"]
)
@pytest.mark.parametrize("of_heads", [1, 4])
def test_flops_match_the_visible_blocks(of_heads: int, options: dict[str, Any]) -> None:
    """Forward and backward skip blocks in which nobody sees anything, under the mask and the band together."""
    inputs, dim = heads(300), 64
    mask = blocky(of_heads, 300, 300)
    mask[0, 64:128, 64:128] = torch.ones(64, 64, dtype=torch.bool).triu(1)  # no more than the band hides
    pairs = visible_blocks(mask.expand(4, 300, 300), options) * 64 * 64
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    with triton_loom.count() as forward:
        out = attend(**leaves, **options, mask=mask)
    with triton_loom.count() as backward:
        out.sum().backward()
    assert 0 < pairs < 4 * 25 * 64 * 64
    assert sum(launch.dot_flops for launch in forward.launches) == 4 * pairs * dim
    assert sum(launch.dot_flops for launch in backward.launches) == 10 * pairs * dim + 4 * pairs * dim


@pytest.mark.parametrize("queries", [256, 200])
def test_full_blocks_read_no_mask(queries: int) -> None:
    """A mask that hides nothing is read to list blocks, and not again by the attention kernel."""
    with triton_loom.count() as counted:
        attend(**heads(queries, 256), mask=torch.ones(queries, 256, dtype=torch.bool))
    lists, attended = counted.launches
    assert lists.loads.requested == queries * 256
    assert attended.arguments["terms.mask.ptr"].loads.requested == 0


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_mask_that_hides_nothing_changes_no_bit(dtype: torch.dtype) -> None:
    inputs = heads(150, batch=2, dtype=dtype) | CAUSAL
    wanted = run(Call(attend, inputs))
    for mask in (torch.ones(150, 150, dtype=torch.bool), torch.ones(150, 150, dtype=torch.bool).tril()):
        assert_same(run(Call(attend, inputs | {"mask": mask})), wanted, "a mask that hides nothing")


def test_a_mask_of_bounds_gives_their_bits() -> None:
    """The blocks in which the last query of a tile sees nothing are visited by neither."""
    inputs, limits = heads(150, batch=2, dtype=BF16), torch.randint(0, 150, (2, 150))
    as_mask = torch.arange(150) < limits[:, None, :, None]
    assert_same(
        run(Call(attend, inputs | {"mask": as_mask})),
        run(Call(attend, inputs | {"kv_limits": limits})),
        "a mask",
    )


def test_bits_depend_on_no_other_sequence() -> None:
    inputs = heads(100, batch=3, dtype=BF16) | {
        "mask": blocky(3, 4, 100, 100),
        "bias": random(3, 4, 100, 100),
    }
    upstream = {"out": torch.randn(3, 4, 100, 64).to(BF16), "lse": torch.randn(3, 4, 100)}
    result = run(Call(attend, inputs | CAUSAL), upstream)
    alone = {name: x[1:2] for name, x in inputs.items()}
    one = run(Call(attend, alone | CAUSAL), {name: x[1:2] for name, x in upstream.items()})
    assert_same(one, {name: x[1:2] for name, x in result.items()}, "a sequence alone")


def test_scores_in_eight_bits() -> None:
    """Hidden keys change no bit, and the error stays that of eight bits."""
    inputs, mask = heads(80, 150), blocky(80, 150)
    mask[:, 120:] = False
    options = {
        "mask": mask,
        "bias": random(4, 80, 150),
        "alibi": torch.rand(4),
        "causal_align": "lower_right",
    }
    exact, rounded = attend(**inputs, **options), attend(**inputs, **options, scores="int8")
    assert (exact - rounded).abs().max() < 0.06
    changed = inputs | {"key": inputs["key"].clone()}
    changed["key"][:, :, 120:] *= 100
    assert torch.equal(words(attend(**changed, **options, scores="int8")), words(rounded))
    options.pop("mask")
    assert (attend(**inputs, **options) - attend(**inputs, **options, scores="int8")).abs().max() < 0.06


# ---- FlexAttention's masks ----------------------------------------------------------------------------------


def every_third(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return ((q - k) % 3 == h % 2) & (k < 100 + b) | (k < 40)


@pytest.mark.filterwarnings("ignore:flex_attention called")
@pytest.mark.parametrize("block", [128, 32, (48, 80), 16])
def test_block_masks(block: Any) -> None:
    """Blocks of any size give the pairs of `mask_mod`, as FlexAttention does."""
    inputs = heads(150, 260, batch=2, dim=32)
    mask = create_block_mask(every_third, 2, 4, 150, 260, device="cpu", BLOCK_SIZE=block)
    q, k = torch.arange(150)[:, None], torch.arange(260)
    dense = torch.stack(
        [every_third(torch.tensor(b), torch.arange(4)[:, None, None], q, k) for b in range(2)]
    )
    result = run(Call(attend, inputs | {"mask": mask}))
    assert_same(result, run(Call(attend, inputs | {"mask": dense})), "a BlockMask")
    wanted = flex_attention(**inputs, block_mask=mask, enable_gqa=True)
    torch.testing.assert_close(result["y"], wanted)


def test_block_masks_are_their_lists() -> None:
    """Blocks that are not listed are hidden, and full ones visible, whatever `mask_mod` says."""
    inputs = heads(128, 192, dim=32)
    number, index = torch.tensor([[[1, 2]]]), torch.tensor([[[[2, 0, 0], [0, 1, 2]]]])
    full = torch.tensor([[[1, 0]]]), torch.tensor([[[[1, 0, 0], [0, 0, 0]]]])
    mask = BlockMask.from_kv_blocks(
        number.int(),
        index.int(),
        full[0].int(),
        full[1].int(),
        BLOCK_SIZE=64,
        mask_mod=every_third,
        seq_lengths=(128, 192),
    )
    q, k = torch.arange(128)[:, None], torch.arange(192)
    dense = every_third(torch.tensor(0), torch.tensor(0), q, k)
    dense[:64, :64], dense[:64, 64:128], dense[64:, 128:] = False, True, False
    assert_same(
        run(Call(attend, inputs | {"mask": mask})),
        run(Call(attend, inputs | {"mask": dense})),
        "lists of blocks",
    )


# ---- biases and ALiBi ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", BANDS.values(), ids=BANDS)
@pytest.mark.parametrize(("queries", "keys"), [(150, 150), (37, 129), (129, 37)])
def test_biases(queries: int, keys: int, options: dict[str, Any]) -> None:
    judge(**heads(queries, keys, batch=2, dim=32), **options, bias=random(2, 4, queries, keys))


@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("options", BANDS.values(), ids=BANDS)
def test_alibi(options: dict[str, Any], sides: int) -> None:
    slopes = torch.tensor([[0.5, 0.2], [0.1, 0.4], [0.02, 0.0], [-0.3, 0.7]])
    judge(**heads(100, 150, batch=2, dim=32), **options, alibi=slopes if sides == 2 else slopes[:, 0].clone())


def test_alibi_of_packed_sequences() -> None:
    slopes = torch.tensor([0.5, 0.1, 0.02, 0.3])
    judge(**packed([70, 1, 0, 130, 100], pads=9), return_lse=True, alibi=slopes)
    judge(**packed([40, 90], [70, 20]), **LOWER, alibi=slopes)


def test_alibi_is_a_bias() -> None:
    inputs, slopes = heads(100), torch.tensor([0.5, 0.1, 0.02, 0.3])
    bias = -slopes[:, None, None] * (torch.arange(100)[:, None] - torch.arange(100)).abs()
    wanted = F.scaled_dot_product_attention(**inputs, attn_mask=bias, enable_gqa=True)
    torch.testing.assert_close(attend(**inputs, alibi=slopes), wanted)
    torch.testing.assert_close(attend(**inputs, bias=bias), wanted)


def test_a_bias_comes_after_the_softcap() -> None:
    inputs, bias = heads(60), 10 * random(60, 60)
    capped = 5 * torch.tanh((inputs["query"] @ inputs["key"].repeat_interleave(2, 1).mT) / 8 / 5) + bias
    wanted = capped.softmax(-1) @ inputs["value"].repeat_interleave(2, 1)
    torch.testing.assert_close(attend(**inputs, bias=bias, softcap=5.0), wanted)


def test_gradients_of_biases_are_deterministic_and_exist_alone() -> None:
    inputs = heads(150, batch=2, dtype=BF16)
    bias, slopes = random(150, 150).requires_grad_(), torch.rand(4).requires_grad_()
    grads = [
        torch.autograd.grad(attend(**inputs, bias=bias, alibi=slopes).float().square().sum(), [bias, slopes])
        for _ in range(2)
    ]
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)
        assert one.count_nonzero()


# ---- compilers ----------------------------------------------------------------------------------------------


def test_compiled() -> None:
    def loss(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, alibi: Tensor, mask: Tensor) -> Tensor:
        return attend(query, key, value, mask=mask, bias=bias, alibi=alibi).square().sum()

    leaves = [x.requires_grad_() for x in (*heads(60).values(), random(4, 1, 60), torch.rand(4, 2))]
    mask = blocky(60, 60)
    wanted = torch.autograd.grad(loss(*leaves, mask), leaves)
    traced = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for one, other in zip(torch.autograd.grad(traced(*leaves, mask), leaves), wanted, strict=True):
        assert torch.equal(words(one), words(other))


def test_opcheck() -> None:
    inputs = {name: x.requires_grad_() for name, x in heads(20, 30, dim=16).items()}
    terms = {
        "bias": random(1, 4, 20, 30).requires_grad_(),
        "alibi": torch.rand(4, 2),
        "seen": blocky(1, 1, 20, 30),
    }
    args = AttentionArgs(
        **inputs, query_codes=PLAIN, key_codes=PLAIN, values=None, sinks=None, packed=Packed(None, None, None),
        mask=Mask(None, None, True), scale=0.25, softcap=0.0, layout="bhsd", return_max=False, engine="weft",
        result=plain_result(FP32), **terms,
    )  # fmt: skip
    op = weft.catalogue["attention"]
    torch.library.opcheck(op.overload, op.arguments.flatten(args))


def test_captured() -> None:
    def step(query: Tensor, key: Tensor, mask: Tensor, bias: Tensor) -> Any:
        return attend(query, key, key, mask=mask, bias=bias)

    query, key, _ = heads(50, batch=2, dim=32).values()
    mask, bias = blocky(50, 50), random(4, 50, 50)
    captured = weft.capture(step, query, key, mask, bias)
    assert torch.equal(captured(query, key, ~mask, 2 * bias), step(query, key, ~mask, 2 * bias))


def test_block_masks_are_compiled() -> None:
    inputs = heads(64, dim=32)
    mask = create_block_mask(every_third, 1, 4, 64, 64, device="cpu", BLOCK_SIZE=32)
    traced = torch.compile(lambda: attend(**inputs, mask=mask), fullgraph=True, backend="aot_eager")
    assert torch.equal(traced(), attend(**inputs, mask=mask))


def test_by_reference() -> None:
    inputs = heads(70, 80, batch=2, dim=16) | LOWER | {
        "mask": blocky(2, 1, 70, 80), "bias": random(4, 70, 80), "alibi": torch.rand(4, 2),
    }  # fmt: skip
    wanted = run(Call(attend, inputs))
    with weft.backend("reference"):
        result = run(Call(attend, inputs))
    for name, x in wanted.items():
        torch.testing.assert_close(result[name], x, atol=2e-5, rtol=2e-5)


# ---- mistakes -----------------------------------------------------------------------------------------------

ALL = torch.ones(1, 1, 20, 20, dtype=torch.bool)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_p": 0.1}, "no dropout"),
        ({"attn_mask": ALL}, "as mask= and one that is added to scores as bias="),
        ({"masks": ALL}, "Did you mean 'mask'"),
        ({"mask": ALL.float()}, "as bias="),
        ({"mask": ALL.int()}, "Pass mask != 0"),
        ({"mask": ALL.expand(1, 3, 20, 20)}, r"keys\] = \[1, 4, 20, 20\]"),
        ({"mask": ALL[None]}, "mask must be broadcastable"),
        ({"mask": "causal"}, "BlockMask"),
        ({"bias": torch.ones(21, 20)}, "bias must be broadcastable"),
        ({"bias": ALL}, "bias must be"),
        ({"alibi": torch.ones(3)}, "alibi must have the shape"),
        ({"alibi": torch.ones(4, 3)}, "alibi must have the shape"),
        ({"alibi": torch.ones(4), "kv_lengths": torch.tensor([20])}, "causal_align="),
        ({"mask": ALL, "engine": "torch"}, "mask"),
        ({"bias": ALL.float(), "engine": "torch"}, "bias"),
        ({"alibi": torch.ones(4), "engine": "torch"}, "alibi"),
        ({"mask": ALL, "scores": "int8", "values": "e4m3"}, "leave values=None"),
        ({"mask": create_block_mask(every_third, 1, 1, 30, 20, device="cpu")}, "30 queries and 20 keys"),
        ({"mask": create_block_mask(every_third, 1, 3, 20, 20, device="cpu")}, "mask must be broadcastable"),
    ],
)  # fmt: skip
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    call: Callable[..., Any] = weft.attention
    with pytest.raises((TypeError, ValueError), match=message):
        call(**heads(20), **options)


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_packed_sequences_are_refused(name: str) -> None:
    pairs = {name: ALL if name == "mask" else ALL.float()}
    with pytest.raises(ValueError, match="kv_limits, prefix_lengths or alibi"):
        attend(**packed([20]), **pairs)


def test_no_library_ignores_them() -> None:
    """ "auto" hands bf16 to PyTorch's kernels on CPUs, which know none of these."""
    inputs = heads(20, dtype=BF16)
    with weft.record_engines() as used, torch.no_grad():
        weft.attention(**inputs, mask=ALL)
        weft.attention(**inputs, bias=ALL.float())
        weft.attention(**inputs, alibi=torch.ones(4))
    assert [each.engine for each in used] == ["weft"] * 3


def test_the_backward_checks_what_it_is_given() -> None:
    x = heads(20)
    y, lse, _ = attend(**x, return_lse=True)
    call = {"dy": y.transpose(1, 2), "dlse": None, "y": y.transpose(1, 2), "lse": lse, **x}
    options: dict[str, Any] = {"mask": Mask(None, None, True), "softcap": 0.0, "layout": "bhsd"}
    for wrong in ({"seen": ALL[0]}, {"bias": ALL.float()[..., :7]}, {"alibi": torch.ones(4)}):
        with pytest.raises(ValueError, match=r"broadcastable|shape"):
            attention_backward(**call, **options, **wrong)
