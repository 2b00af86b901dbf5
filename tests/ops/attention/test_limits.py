"""Keys that sequences and queries may see: `prefix_lengths` and `kv_limits`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton_loom
from torch import Tensor
from triton_loom.testing import words

import weft
from tests.ops.attention.own import attend
from tests.ops.attention.test import CAUSAL, LOWER, UPPER, heads, judge, packed
from weft.lab.calls import assert_same, run
from weft.lab.families import Call
from weft.lab.families.attention import Head, attention_backward, sees
from weft.ops.attention.arguments import Mask
from weft.runtime import choosing_for

BF16, FP32 = torch.bfloat16, torch.float32
PREFIXES = torch.tensor([0, 1, 70, 65, 1000, -3])
WINDOW = LOWER | {"is_causal": False, "window": (20, 3)}


def limits(queries: int, keys: int, batch: int = 1) -> Tensor:
    """Draw limits below 0, above the keys and between; some tiles of queries see nothing."""
    drawn = torch.randint(-9, keys + 9, (batch, queries), generator=torch.Generator().manual_seed(5))
    drawn[:, 64:130] = -1
    return drawn


# ---- values and gradients against float64 -------------------------------------------------------------------


@pytest.mark.parametrize("mask", [LOWER, UPPER, WINDOW], ids=["lower", "upper", "window"])
@pytest.mark.parametrize(("queries", "keys"), [(150, 150), (37, 129), (129, 37), (1, 70)])
def test_prefixes(queries: int, keys: int, mask: dict[str, Any]) -> None:
    judge(**heads(queries, keys, batch=len(PREFIXES), q=2, kv=1, dim=32), **mask, prefix_lengths=PREFIXES)


@pytest.mark.parametrize(
    "mask", [{"return_lse": True}, LOWER, UPPER, WINDOW], ids=["full", "lower", "upper", "window"]
)
@pytest.mark.parametrize(("queries", "keys"), [(150, 150), (37, 129), (129, 37), (1, 70)])
def test_limits_of_queries(queries: int, keys: int, mask: dict[str, Any]) -> None:
    inputs = heads(queries, keys, batch=2, q=2, kv=1, dim=32)
    judge(**inputs, **mask, kv_limits=limits(queries, keys, 2))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_both_with_sinks_lengths_and_softcap(dtype: torch.dtype, integers: torch.dtype) -> None:
    inputs = heads(90, 140, batch=3, dtype=dtype)
    judge(
        **inputs,
        **LOWER,
        prefix_lengths=torch.tensor([100, 7, 140], dtype=integers),
        kv_limits=limits(90, 140, 3).to(integers),
        kv_lengths=torch.tensor([140, 60, 0]),
        sinks=torch.tensor([0.5, -1.0, 2.0, -math.inf]),
        softcap=5.0,
        return_max=True,
    )


def test_packed_sequences() -> None:
    lengths = [70, 1, 0, 130, 100]
    inputs = packed(lengths, pads=9)
    of_tokens = limits(sum(lengths) + 9, 130)[0]
    judge(**inputs, **CAUSAL, prefix_lengths=torch.tensor([30, 1, 5, 129, -1]), kv_limits=of_tokens)
    judge(**packed([40, 90], [70, 20]), **LOWER, prefix_lengths=torch.tensor([35, 20]))


def test_a_decoder_whose_first_query_sees_the_state_alone() -> None:
    """Pi0: the state of a robot sees itself and the prefix, the actions after it also each other."""
    prefix, actions = 50, 11
    seen = torch.tensor([prefix + 1] + [prefix + actions] * (actions - 1))
    inputs = heads(actions, prefix + actions)
    wanted = F.scaled_dot_product_attention(
        **inputs, attn_mask=torch.arange(prefix + actions) < seen[:, None], enable_gqa=True
    )
    torch.testing.assert_close(attend(**inputs, kv_limits=seen[None]), wanted)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx950"])
def test_tiles_of(target: str) -> None:
    inputs = heads(200, 170, dtype=BF16)
    with choosing_for(target):
        judge(**inputs, **LOWER, prefix_lengths=torch.tensor([99]), kv_limits=limits(200, 170))


# ---- what they cost and change ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"window": (70, 5)}], ids=["full", "causal", "window"]
)
def test_flops_match_the_visible_blocks(options: dict[str, Any]) -> None:
    """As without limits, blocks of 64 x 64 pairs that nobody sees cost nothing."""
    inputs, dim = heads(300, q=2, kv=1), 64
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    prefix = 100 if options else 0
    of_queries = torch.arange(300) % 64 * 2 + torch.arange(300) // 64 * 20
    at = Head(0, slice(0, 300), slice(0, 300), 0, 0, prefix, of_queries)
    seen = F.pad(sees(300, 300, options, at), (0, 20, 0, 20)).view(5, 64, 5, 64)
    pairs = int(seen.any(3).any(1).sum()) * 64 * 64 * 2
    mask = options | ({"prefix_lengths": torch.tensor([prefix])} if prefix else {})
    with triton_loom.count() as forward:
        out = attend(**leaves, **mask, kv_limits=of_queries[None])
    with triton_loom.count() as backward:
        out.sum().backward()
    assert 0 < pairs < 25 * 64 * 64 * 2
    assert sum(launch.dot_flops for launch in forward.launches) == 4 * pairs * dim
    assert sum(launch.dot_flops for launch in backward.launches) == 14 * pairs * dim


def test_bits_depend_on_no_other_sequence() -> None:
    inputs = heads(100, batch=3, dtype=BF16) | {
        "prefix_lengths": torch.tensor([5, 70, 90]),
        "kv_limits": limits(100, 100, 3),
    }
    upstream = {"out": torch.randn(3, 4, 100, 64).to(BF16), "lse": torch.randn(3, 4, 100)}
    result = run(Call(attend, inputs | CAUSAL), upstream)
    alone = {name: x[1:2] for name, x in inputs.items()}
    one = run(Call(attend, alone | CAUSAL), {name: x[1:2] for name, x in upstream.items()})
    assert_same(one, {name: x[1:2] for name, x in result.items()}, "a sequence alone")


def test_limits_that_hide_nothing_change_no_bit() -> None:
    inputs = heads(150, batch=2, dtype=BF16)
    wanted = run(Call(attend, inputs | CAUSAL))
    none = {"prefix_lengths": torch.zeros(2, dtype=torch.int32)}
    all_of_them = {"kv_limits": torch.full((2, 150), 2**40)}
    assert_same(run(Call(attend, inputs | CAUSAL | none | all_of_them)), wanted, "no limits")


def test_scores_in_eight_bits() -> None:
    """Unseen keys change no bit, and the error stays that of eight bits."""
    inputs = heads(80, 150)
    mask = {"kv_limits": limits(80, 120).clamp(max=120)}
    exact, rounded = attend(**inputs, **mask), attend(**inputs, **mask, scores="int8")
    assert (exact - rounded).abs().max() < 0.05
    changed = inputs | {"key": inputs["key"].clone()}
    changed["key"][:, :, 120:] *= 100
    assert torch.equal(words(attend(**changed, **mask, scores="int8")), words(rounded))


def test_compiled() -> None:
    def loss(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, prefix: Tensor) -> Tensor:
        y = attend(query, key, value, is_causal=True, kv_limits=seen, prefix_lengths=prefix)
        return y.square().sum()

    leaves = [x.requires_grad_() for x in heads(60).values()]
    rest = limits(60, 60), torch.tensor([31])
    wanted = torch.autograd.grad(loss(*leaves, *rest), leaves)
    got = torch.autograd.grad(
        torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves, *rest), leaves
    )
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(words(one), words(other))


# ---- mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_lengths": torch.ones(1, dtype=torch.int32)}, "Pass is_causal=True"),
        ({"prefix_lengths": torch.ones(2, dtype=torch.int32), "is_causal": True}, "prefix_lengths must have the shape"),
        ({"prefix_lengths": torch.ones(1), "is_causal": True}, "prefix_lengths must be int32 or int64"),
        ({"kv_limits": torch.ones(20, dtype=torch.int32)}, "kv_limits must have the shape"),
        ({"kv_limits": torch.ones(1, 20, dtype=torch.bool)}, "kv_limits must be int32 or int64"),
        ({"kv_limits": torch.ones(1, 20, dtype=torch.int32), "engine": "torch"}, "kv_limits"),
        (
            {"kv_limits": torch.ones(1, 20, dtype=torch.int32), "scores": "int8", "values": "e4m3"},
            "leave values=None",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    call: Callable[..., Any] = weft.attention
    with pytest.raises((TypeError, ValueError), match=message):
        call(**heads(20), **options)


def test_the_backward_checks_what_it_is_given() -> None:
    """No caller can hand limits of another shape to a kernel, which would read past their end."""
    x = heads(20)
    y, lse, _ = attend(**x, return_lse=True)
    call = {"dy": y.transpose(1, 2), "dlse": None, "y": y.transpose(1, 2), "lse": lse, **x}
    options: dict[str, Any] = {"mask": Mask(None, None, True), "softcap": 0.0, "layout": "bhsd"}
    with pytest.raises(ValueError, match="kv_limits must have the shape"):
        attention_backward(**call, **options, kv_limits=torch.ones(1, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="Pass is_causal=True"):
        attention_backward(**call, **options, prefix_lengths=torch.ones(1, dtype=torch.int32))
