"""Values in int8: integer sums are exact, and results are those of an integer emulation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.ops.attention.own import attend
from tests.ops.attention.test import heads, packed
from tests.ops.attention.test_eight_bits import assert_alone_is_together, error
from weft.lab.families.attention import sees
from weft.language import tl, triton
from weft.ops.attention.configs import VALUE_COLUMNS, Width
from weft.ops.attention.pieces import Pieces, add_coded_product
from weft.runtime import choosing_for

BF16 = torch.bfloat16
BLOCK = VALUE_COLUMNS["int8"]  # keys that share a scale
TILE = 64  # keys of a tile on the CPU
LOG2_127 = torch.tensor(127.0).log2().item()
INT8: dict[str, Any] = {"scores": "int8", "values": "int8"}


# ---- the product of a tile ----------------------------------------------------------------------------------


@triton.jit
def coded_product_kernel(weights_ptr, rows_ptr, scale_ptr, factor_ptr, out_ptr, WIDTH: tl.constexpr):
    """Store the product of weights [64, 64] and rows [64, 32] on a total of zeros."""
    i = tl.arange(0, 64)
    j = tl.arange(0, 32)
    weights = tl.load(weights_ptr + i[:, None] * 64 + i[None, :])
    rows = tl.load(rows_ptr + i[:, None] * 32 + j[None, :])
    factor = tl.load(factor_ptr + i)[:, None]
    total = Pieces(tl.zeros((64, 32), tl.float32), None)
    result = add_coded_product(total, 0.0, weights, factor, Pieces(rows, None), scale_ptr, WIDTH)
    tl.store(out_ptr + i[:, None] * 32 + j[None, :], result.first)


def coded_product(weights: Tensor, rows: Tensor, scale: Tensor, factor: Tensor) -> Tensor:
    out = torch.empty(64, 32)
    coded_product_kernel[(1,)](weights, rows, scale, factor, out, Width.of(32))
    return out


def test_integer_sums_are_exact() -> None:
    """Weights are rounded half to even; those above 127, which only rounding errors make, become 127 and never wrap."""
    generator = torch.Generator().manual_seed(0)
    halves = torch.randint(0, 255, (64, 64), generator=generator) / 2
    large = torch.tensor([127.0, 127.49, 128.0, 200.0, 1e9, math.inf, 0.0, 1e-30]).repeat(8)
    halves[5] = large
    rows = torch.randint(-127, 128, (64, 32), generator=generator).to(torch.int8)
    rows[:, 0], halves[6] = 127, 127.0  # the largest sum
    codes = halves.clamp(max=127).round().long()
    wanted = codes @ rows.long()
    assert wanted.abs().max() == 64 * 127 * 127
    result = coded_product(halves, rows, torch.ones(32), torch.ones(64))
    assert torch.equal(result.long(), wanted)
    scale, factor = (2.0 ** torch.randint(-9, 9, (n,), generator=generator) for n in (32, 64))
    assert torch.equal(coded_product(halves, rows, scale, factor), wanted * scale * factor[:, None])


# ---- attention as integers ----------------------------------------------------------------------------------


class Emulated:
    """Attention of one head over the codes: integer products in int64, everything between them in float64.

    `near_ties` counts weights so close to half a step that fp32 may round them the other way."""

    def __init__(self, q: weft.QTensor, k: weft.QTensor, v: Tensor, seen: Tensor) -> None:
        assert q.rowwise is not None
        assert k.rowwise is not None
        (q8, sq), (k8, sk) = ((x.rowwise.data.long(), x.rowwise.scale.double()) for x in (q, k))  # type: ignore[union-attr]
        s = (q8 @ k8.T) * sq * sk.T * q.shape[-1] ** -0.5
        s = s.masked_fill(~seen, -math.inf)
        top = s.amax(1, keepdim=True)
        self.lse = torch.logsumexp(s, 1)
        self.near_ties = 0
        out = torch.zeros(len(s), v.shape[1], dtype=torch.float64)
        self.size = out.clone()  # sum of p |v|
        for first in range(0, len(v), TILE):
            keys, tile = slice(first, first + TILE), s[:, first : first + TILE]
            block = torch.where(seen.any(0)[keys, None], v[keys].float(), 0.0)
            scale = 1.0 / (127.0 / block.abs().amax(0).clamp(min=1e-12))
            v8 = (block * (127.0 / block.abs().amax(0).clamp(min=1e-12))).round().long()
            tile_top = tile.amax(1, keepdim=True)
            weights = 127 * torch.exp(tile - torch.where(tile_top == -math.inf, 0.0, tile_top))
            self.near_ties += int(((weights - weights.floor() - 0.5).abs() < 2e-4).sum())
            p8 = weights.round().long()
            part = torch.exp(tile_top - top) / 127
            out += (p8 @ v8) * scale.double() * part
            self.size += (p8 @ v8.abs()) * scale.double() * part
        total = torch.exp(self.lse[:, None] - top)
        self.out, self.size = out / total, self.size / total


EMULATED: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"queries": 9, "keys": 64}, {}),
    ({"queries": 9, "keys": 150}, {}),
    ({"queries": 9, "keys": 129, "dim": 80, "v_dim": 80}, {}),
    ({"queries": 12, "keys": 70, "v_dim": 24, "dim": 8}, {"is_causal": True, "causal_align": "lower_right"}),
    (
        {"queries": 10, "keys": 130, "dim": 72, "v_dim": 192},
        {"window": (70, 1), "causal_align": "lower_right"},
    ),
]


@pytest.mark.parametrize(("sizes", "options"), EMULATED, ids=[str(sizes["keys"]) for sizes, _ in EMULATED])
def test_results_equal_an_integer_emulation(sizes: dict[str, int], options: dict[str, Any]) -> None:
    """The inputs leave no weight near half a step: a wrong integer would be off by 100 times what is allowed."""
    for seed in range(20):
        inputs = heads(**sizes, q=1, kv=1, seed=seed)
        q, k = (weft.quantize(inputs[name], "int8:row:torchao") for name in ("query", "key"))
        seen = sees(q.shape[2], k.shape[2], options)
        flat = (x.dequantize().flatten(0, 2) for x in (q, k))
        wanted = Emulated(*(weft.quantize(x, "int8:row:torchao") for x in flat), inputs["value"][0, 0], seen)
        if not wanted.near_ties:
            break
    assert not wanted.near_ties
    result = weft.attention(q, k, inputs["value"], **options, values="int8", return_lse=True)
    assert ((result.out[0, 0].double() - wanted.out).abs() <= 4e-6 * wanted.size).all()
    torch.testing.assert_close(result.lse[0, 0].double(), wanted.lse, rtol=1e-6, atol=2e-6)


def test_large_scores_do_not_wrap() -> None:
    """Scores near 10^6 are rounded to 1/16, so that the largest weight of a row exceeds 127 before it is rounded."""
    inputs = heads(40, 100, dtype=BF16)
    inputs["query"] *= 3e4
    for scores in ("int8", "e4m3"):
        plain = weft.attention(**inputs, scores=scores)
        assert error(weft.attention(**inputs, scores=scores, values="int8"), plain) < 0.03


# ---- sequences and masks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["cpu", "sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("scores", ["int8", "e4m3", "mxfp8"])
def test_masks_and_widths(target: str, scores: Any) -> None:
    for sizes, options in (
        ({"queries": 150, "dim": 128}, {"is_causal": True}),
        (
            {"queries": 37, "keys": 129, "kv": 1, "dim": 192},
            {"window": (40, 3), "causal_align": "lower_right"},
        ),
        ({"queries": 70, "keys": 33, "v_dim": 24}, {"is_causal": True, "causal_align": "lower_right"}),
        ({"queries": 65, "dim": 72, "v_dim": 80}, {"sinks": torch.randn(4)}),
        ({"queries": 40, "keys": 257, "kv": 4}, {"softcap": 5.0}),
    ):
        inputs = heads(**sizes, dtype=BF16)  # type: ignore[arg-type]
        with choosing_for("cpu" if scores != "int8" else target):
            result = weft.attention(**inputs, **options, scores=scores, values="int8", return_lse=True)  # type: ignore[arg-type]
        plain = attend(**inputs, **options, scores=scores, return_lse=True)
        finite = plain.lse.isfinite()
        assert torch.equal(finite, result.lse.isfinite())
        torch.testing.assert_close(result.lse[finite], plain.lse[finite], rtol=1e-5, atol=1e-5)
        assert error(result.out, plain.out) < 0.02
        assert (result.out[plain.out == 0] == 0).all()


def test_sequences_have_the_bits_that_they_have_alone() -> None:
    assert_alone_is_together([0, 70, 33, 128], **INT8)


def test_tokens_outside_all_sequences() -> None:
    """They have no block of codes: NaN in them reaches nobody, and their results are zeros."""
    inputs = packed([40, 0, 90], pads=70, dtype=BF16)
    wanted = weft.attention(**inputs, **INT8)
    for name in ("key", "value"):
        inputs[name][130:] = float("nan")
    result = weft.attention(**inputs, **INT8)
    assert torch.equal(result, wanted)
    assert (result[130:] == 0).all()


def test_a_large_token_changes_only_its_block() -> None:
    """Values have a scale for each block of keys: a token 1000 times as large costs the others of its block bits, and
    no bit of other blocks."""
    inputs = heads(200, dtype=BF16)
    wanted = weft.attention(**inputs, **INT8, is_causal=True)
    inputs["value"][:, :, 150] *= 1000
    result = weft.attention(**inputs, **INT8, is_causal=True)
    assert torch.equal(result[:, :, :128], wanted[:, :, :128])
    assert error(result[:, :, 150:], attend(**inputs, is_causal=True)[:, :, 150:]) < 0.03


def test_special_values() -> None:
    """Zeros stay zeros. A NaN or Inf makes the elements NaN that are NaN without codes."""
    for content in (math.nan, math.inf):
        inputs = heads(100, dtype=BF16)
        inputs["value"][:, 0] = 0.0
        inputs["value"][:, 1, 70, 3] = math.nan
        wrong = attend(**inputs, is_causal=True).isnan()
        inputs["value"][:, 1, 70, 3] = content
        out = weft.attention(**inputs, is_causal=True, **INT8)
        assert (out[:, :2] == 0).all()
        assert wrong[:, 2:, 70:, 3].all()
        assert torch.equal(out.isnan(), wrong)


# ---- calls -------------------------------------------------------------------------------------------------


def test_the_same_bits_in_every_run_and_compiled() -> None:
    def call(*inputs: Tensor) -> Any:
        return weft.attention(*inputs, is_causal=True, **INT8, return_lse=True)[:2]

    torch._dynamo.reset()
    inputs = heads(150, batch=2, dtype=BF16).values()
    wanted = call(*inputs)
    for other in (call(*inputs), torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs)):
        for one, two in zip(other, wanted, strict=True):
            assert torch.equal(one, two)


def test_mistakes_are_named() -> None:
    inputs = heads(20)
    with pytest.raises(ValueError, match="go with scores"):
        weft.attention(**inputs, values="int8")
    with pytest.raises(ValueError, match="values must be 'e4m3', 'int8' or None"):
        weft.attention(**inputs, scores="int8", values="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kv_limits= and prefix_lengths="):
        weft.attention(**inputs, **INT8, kv_limits=torch.full((1, 20), 5))
    inputs["value"].requires_grad_()
    with pytest.raises(ValueError, match="for inference"):
        weft.attention(**inputs, **INT8)
