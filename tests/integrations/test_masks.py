"""Masks of `attn_implementation="weft"` compared with those that transformers makes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", reason="needs transformers: pip install 'weft[transformers]'")

from transformers import masking_utils

from weft.integrations.masks import Band, BandMask, attention_mask, band_of, bools, is_edited
from weft.integrations.transformers import attention_forward

CAUSAL = masking_utils.causal_mask_function
FULL = masking_utils.bidirectional_mask_function
FUNCTIONS = {
    "causal": CAUSAL,
    "full": FULL,
    "window": masking_utils.sliding_window_causal_mask_function(4),
    "two-sided window": masking_utils.sliding_window_bidirectional_mask_function(3),
    "left window": masking_utils.sliding_window_overlay(3),
}


def padding(name: str, keys: int) -> Tensor | None:
    """Return a padding mask of two samples, of which the second has padding."""
    mask = torch.ones(2, keys, dtype=torch.bool)
    position = torch.arange(keys)
    mask[1] &= {
        "left": position >= keys // 3,
        "right": position < keys - keys // 3,
        "both": (position >= keys // 4) & (position < keys - keys // 4),
        "hole": (position < keys // 3) | (position > keys // 2),
        "nothing": position < 0,
    }.get(name, position >= 0)
    return None if name == "none" else mask


def cases() -> Iterator[dict[str, Any]]:
    shapes = [
        (7, 7, 0, 0),
        (1, 7, 6, 0),
        (3, 7, 4, 0),
        (3, 9, 2, 0),
        (5, 8, 0, 0),
        (3, 6, 7, 4),
        (1, 4, 9, 6),
        (7, 3, 0, 0),
    ]
    pads = ("none", "all", "left", "right", "both", "hole", "nothing")
    for function, shape, pad in itertools.product(FUNCTIONS, shapes, pads):
        queries, keys, q_offset, kv_offset = shape
        yield {
            "mask_function": FUNCTIONS[function],
            "q_length": queries,
            "kv_length": keys,
            "q_offset": q_offset,
            "kv_offset": kv_offset,
            "attention_mask": padding(pad, keys + kv_offset),
            "batch_size": 2,
        }


def test_every_mask_matches_transformers() -> None:
    """The rule agrees with the dense mask for every query and key, with windows, caches and padding."""
    rules = dense = 0
    for case in cases():
        for offset in (case["q_offset"], torch.tensor(case["q_offset"])):
            wanted = masking_utils.sdpa_mask(**case, allow_is_causal_skip=False)
            mask = attention_mask(**case | {"q_offset": offset})
            assert isinstance(mask, BandMask)
            rules, dense = rules + (mask.visible is not None), dense + (mask.visible is None)
            label = {name: value for name, value in case.items() if name != "mask_function"}
            assert torch.equal(bools(mask), wanted.expand(2, 1, *wanted.shape[2:])), (label, mask)
            eager = masking_utils.eager_mask(**case, dtype=torch.float16)
            assert torch.equal(attention_mask(**case, dtype=torch.float16) + 0.0, eager)
    assert rules >= 334
    assert dense >= 100, "holes, two-sided windows with padding on the left, and the like"


def packed(function: Any, lengths: list[list[int]]) -> tuple[Any, Tensor]:
    """Return a mask function of packed samples, as transformers builds it from positions."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    numbers = masking_utils.find_packed_sequence_indices(positions)
    return masking_utils.packed_sequence_compatibility_function(function, positions, numbers), positions


@pytest.mark.parametrize("name", ["causal", "full", "window"])
def test_packed_masks_become_starts_of_sequences(name: str) -> None:
    function, _ = packed(FUNCTIONS[name], [[3, 6, 1], [10], [4, 6]][0:3])
    sizes = {"batch_size": 3, "q_length": 10, "kv_length": 10, "mask_function": function}
    mask = attention_mask(**sizes)
    assert isinstance(mask, BandMask)
    assert mask.visible is not None
    assert mask.q_starts is not None
    assert mask.q_starts.tolist() == [0, 3, 9, 10, 20, 24, 30]
    assert torch.equal(bools(mask), masking_utils.sdpa_mask(**sizes, allow_is_causal_skip=False))


def test_masks_other_than_bands_have_no_rule() -> None:
    """Such are foreign functions, even one that agrees with a band far from the beginning; sequences that resume after
    another one; and positions that do not count up."""
    prefix = masking_utils.or_masks(CAUSAL, lambda b, h, q, k: (q < 4) & (k < 4))
    chunks = masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int))
    images = masking_utils.blockwise_overlay(torch.zeros(2, 8, dtype=torch.int))
    for function in (
        prefix,
        chunks,
        images,
        masking_utils.and_masks(CAUSAL, prefix),
        lambda b, h, q, k: k <= q,
    ):
        assert band_of(function) is None
    assert band_of(FUNCTIONS["window"]) == Band(left=3, right=0)
    assert band_of(FUNCTIONS["two-sided window"]) == Band(left=3, right=3)
    sizes = {"batch_size": 1, "q_length": 6, "kv_length": 6}
    again = masking_utils.packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1, 0, 0]]))
    jump = masking_utils.packed_sequence_compatibility_function(
        FUNCTIONS["window"], torch.tensor([[0, 1, 2, 0, 2, 4]]), torch.tensor([[0, 0, 0, 1, 1, 1]])
    )
    for function in (prefix, again, jump):
        mask = attention_mask(**sizes, mask_function=function)
        assert isinstance(mask, BandMask)
        assert mask.visible is None
        assert torch.equal(
            bools(mask),
            masking_utils.sdpa_mask(**sizes, mask_function=function, allow_is_causal_skip=False),
        )


def test_a_function_with_another_closure_has_another_rule() -> None:
    """Nothing is cached between closures that share code but have different windows."""
    assert [band_of(masking_utils.sliding_window_overlay(w)) for w in (4, 9, 4)] == [
        Band(left=3),
        Band(left=8),
        Band(left=3),
    ]


class Ops(TorchDispatchMode):
    """Dispatch mode that counts the PyTorch ops that run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


def test_a_mask_of_one_token_runs_no_ops() -> None:
    """Rules are read, not probed: in decoding a sliding-window mask runs nothing on the device."""
    with Ops() as ops:
        mask = attention_mask(
            batch_size=1, q_length=1, kv_length=512, q_offset=511, mask_function=FUNCTIONS["window"]
        )
    assert isinstance(mask, BandMask)
    assert ops.count == 0


def test_a_mask_is_dense_for_code_that_reads_it() -> None:
    sizes = {"batch_size": 2, "q_length": 5, "kv_length": 5}
    mask, wanted = attention_mask(**sizes), masking_utils.eager_mask(**sizes)
    assert isinstance(mask, BandMask)
    # FSDP2 does this with mixed precision, for one.
    for same in (
        mask[:, :, :, :5],
        mask[:, :, :, :9],
        mask.detach(),
        mask.to(torch.bfloat16),
        mask.to("cpu"),
    ):
        assert isinstance(same, BandMask)
        assert same.visible == mask.visible
        assert torch.equal(same + 0.0, masking_utils.eager_mask(**sizes, dtype=same.dtype).expand(2, 1, 5, 5))
    assert type(mask.to("meta")) is Tensor
    assert isinstance(mask, Tensor)
    assert (mask.shape, mask.dtype) == ((2, 1, 5, 5), torch.float32)
    for edit in (
        lambda m: m[:, 0, :, :],
        lambda m: m[:, :, -2:, :],
        lambda m: m[..., :3],
        lambda m: m + torch.ones(2, 4, 5, 5),
        lambda m: m.masked_fill(m == 0, 3.0),
        lambda m: torch.cat([m, m], -1),
        lambda m: m.expand(2, 4, 5, 5),
        lambda m: m.to(torch.int64),
        lambda m: m < 0,
    ):
        edited = edit(mask)
        assert type(edited) is Tensor
        assert torch.equal(edited, edit(wanted.expand(2, 1, 5, 5)))


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m.__setitem__((slice(None), slice(None), slice(None), 0), -7.0),
        lambda m: m.masked_fill_(m < 0, -7.0),
        lambda m: m[:, 0].add_(1.0),
    ],
    ids=["item", "fill", "view"],
)
@pytest.mark.parametrize("mode", ["plain", "inference"])
def test_a_written_mask_stays_dense(edit: Any, mode: str) -> None:
    sizes = {"batch_size": 2, "q_length": 5, "kv_length": 5}
    mask, wanted = attention_mask(**sizes), masking_utils.eager_mask(**sizes).expand(2, 1, 5, 5).clone()
    assert isinstance(mask, BandMask)
    assert mask[:, 0].shape == (2, 5, 5)
    assert not is_edited(mask), "it was only read"
    with torch.no_grad() if mode == "plain" else torch.inference_mode():
        if mode == "inference":
            mask = attention_mask(**sizes)
        edit(mask)
        edit(wanted)
    assert isinstance(mask, BandMask)
    assert is_edited(mask)
    assert torch.equal(mask + 0.0, wanted)
    assert torch.equal(mask[:, :, :, :5] + 0.0, wanted)
    q = torch.randn(2, 2, 5, 8)
    actual, _ = attention_forward(torch.nn.Module(), q, q, q, mask)
    exact = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=wanted)
    torch.testing.assert_close(actual, exact.transpose(1, 2))


def test_compiled_layers_take_a_mask() -> None:
    """Masks made outside the graph, with and without tensors, and one made in the graph."""

    def layer(x: Tensor, mask: Tensor) -> Tensor:
        if isinstance(mask, BandMask) and mask.visible is not None:
            result = x + (mask.visible.left or 0)
            return result if mask.kv_lengths is None else result + mask.kv_lengths.sum()
        return x * mask.to(x.dtype).exp().sum()

    def layer_with_mask(x: Tensor) -> Tensor:
        return layer(x, attention_mask(batch_size=2, q_length=5, kv_length=5, mask_function=CAUSAL))

    window, pads = FUNCTIONS["window"], padding("right", 6)
    sizes = {"batch_size": 2, "q_length": 6, "kv_length": 6, "mask_function": window}
    for mask in (attention_mask(**sizes), attention_mask(**sizes, attention_mask=pads)):
        assert isinstance(mask, BandMask)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        x = torch.ones(3)
        assert torch.equal(compiled(x, mask), layer(x, mask))
    x = torch.ones(3)
    assert torch.equal(torch.compile(layer_with_mask, backend="aot_eager", fullgraph=True)(x), x * 30)
