"""Converted models on two ranks: DDP, FSDP2, and FSDP2 that gathers codes instead of weights."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from triton_loom.testing import results_of

import weft.nn
from weft.nn.gather import GatheredWeight

WEIGHTS = 2 * 2 * 256 * 256  # numbers of a block that a recipe rounds: up and down
EXPERTS = 2 * 3 * 256 * 256
BIAS = 2 * 256


RANKS = Path(__file__).with_name("ranks_gather.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return results_of(RANKS, tmp_path_factory)(2)


@pytest.fixture(scope="module")
def slow_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of(RANKS, tmp_path_factory, slow=True)(2)


def assert_one(ranks: list[dict[str, Any]], name: str) -> None:
    """Results and weights of two steps are those of one process bit for bit, whatever was gathered."""
    alone = ranks[0]["alone"][name]
    for rank, found in enumerate(ranks):
        for step in ("y0", "y1"):
            assert torch.equal(found[name][step], alone[step][rank])
        assert found[name]["weights"].keys() == alone["weights"].keys()
        for key, weight in found[name]["weights"].items():
            assert torch.equal(weight, alone["weights"][key]), key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "codes", "codes, checkpointed", "ddp", "plain, reused"])
def test_two_ranks_are_one(name: str, ranks: list[dict[str, Any]]) -> None:
    assert_one(ranks, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "codes", "mxfp8"])
def test_two_ranks_with_experts_are_one(name: str, slow_ranks: list[dict[str, Any]]) -> None:
    assert_one(slow_ranks, name)


@pytest.mark.slow
def test_codes_of_fp32_weights_serve_bf16(slow_ranks: list[dict[str, Any]]) -> None:
    """With mixed precision weights are quantised from fp32 instead of bf16: nearly the same, not equal."""
    for found in slow_ranks:
        codes, plain = found["codes for bf16"], found["plain in bf16"]
        assert codes["y0"].dtype == torch.bfloat16
        error = (codes["y0"] - plain["y0"]).float().norm() / plain["y0"].float().norm()
        assert error < 0.02


@pytest.mark.slow
def test_bytes_that_travel(ranks: list[dict[str, Any]]) -> None:
    """An all-gather of a block has one byte for a weight, and a scale for 128 x 128 of them."""
    plain, codes = 4 * (WEIGHTS + BIAS), WEIGHTS + 4 * WEIGHTS // 128**2 + 4 * BIAS
    for found in ranks:
        assert set(found["plain"]["moved"]) == {plain}
        assert set(found["codes"]["moved"]) == set(found["codes, checkpointed"]["moved"]) == {codes}
    assert plain / codes > 3.97


@pytest.mark.slow
def test_other_bytes_that_travel(slow_ranks: list[dict[str, Any]]) -> None:
    weights = WEIGHTS + EXPERTS
    for found in slow_ranks:
        assert set(found["plain"]["moved"]) == {4 * (weights + BIAS)}
        assert set(found["codes"]["moved"]) == {weights + 4 * weights // 128**2 + 4 * BIAS}
        assert set(found["plain in bf16"]["moved"]) == {2 * (weights + BIAS)}
        assert set(found["codes for bf16"]["moved"]) == {weights + 4 * weights // 128**2 + 2 * BIAS}
        # Copies along rows and along columns.
        assert set(found["mxfp8"]["moved"]) == {2 * (weights + weights // 32) + 4 * BIAS}


@pytest.mark.slow
def test_blocks_of_two_ranks_are_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "FSDP would cut blocks of 128 rows" in found["refused"]
        assert "gather_quantized(model, filter=...)" in found["refused"]


def test_a_gathered_weight_is_a_weight() -> None:
    """Without FSDP it computes, trains, moves, and is copied and saved as the plain one."""
    torch.manual_seed(0)
    plain = weft.nn.Linear(128, 256, recipe="fp8_block")
    layer = copy.deepcopy(plain)
    assert weft.nn.gather_quantized(layer).changed == ["weight"]
    assert isinstance(layer.weight, GatheredWeight)
    for module in (plain, layer):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(torch.ones(3, 128)).square().sum().backward()
        optimizer.step()
    for other in (layer, copy.deepcopy(layer)):
        assert isinstance(other.weight, nn.Parameter)
        assert isinstance(other.weight, GatheredWeight)
        assert torch.equal(other.weight.plain, plain.weight)
    saved = io.BytesIO()
    torch.save(layer.state_dict(), saved)
    saved.seek(0)
    plain.load_state_dict(torch.load(saved), strict=True)
    with pytest.raises(ValueError, match=r"before weft\.nn\.gather_quantized"):
        weft.nn.convert(layer, "fp8_row")
    assert not weft.nn.convert(layer, None).changed
    assert layer.to(torch.bfloat16).weight.plain.dtype == torch.bfloat16
    assert torch.equal(layer.weight.plain, plain.weight.bfloat16())


def test_what_is_gathered_plain() -> None:
    rows, tied = weft.nn.Linear(128, 128, recipe="fp8_row"), weft.nn.Linear(128, 128, recipe="fp8_block")
    model = nn.ModuleDict({"rows": rows, "tied": tied, "embedding": nn.Embedding(128, 128)})
    model["embedding"].weight = tied.weight
    model["plain"], model["out"] = weft.nn.Linear(128, 128), weft.nn.Linear(128, 128, recipe="fp8_block")
    twins = [weft.nn.Linear(128, 128, recipe="fp8_block") for _ in range(2)]
    twins[1].weight = twins[0].weight
    model.update({"one": twins[0], "two": twins[1]})
    report = weft.nn.gather_quantized(model, filter=lambda name, module: name != "out")
    assert report.left == {
        "rows.weight": f"{weft.Recipe.of('fp8_row').weight} has scales of rows on all ranks",
        "tied.weight": "modules that take it otherwise have it as well",
        "plain.weight": "its recipe has plain numbers",
        "out.weight": "left out by the filter",
    }
    assert report.changed == ["one.weight", "two.weight"]
    assert twins[0].weight is twins[1].weight
