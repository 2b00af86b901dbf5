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

WEIGHTS = 2 * 2 * 256 * 256  # elements of a block that a recipe rounds: up and down
EXPERTS = 2 * 3 * 256 * 256
BIAS = 2 * 256


RANKS = Path(__file__).with_name("ranks_gather.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each of two ranks."""
    return results_of(RANKS, tmp_path_factory)(2)


@pytest.fixture(scope="module")
def slow_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of(RANKS, tmp_path_factory, slow=True)(2)


def assert_one(ranks: list[dict[str, Any]], name: str) -> None:
    """Assert that results and weights of two steps equal those of one process bit for bit, whatever was gathered."""
    alone = ranks[0]["alone"][name]
    for rank, results in enumerate(ranks):
        for step in ("y0", "y1"):
            assert torch.equal(results[name][step], alone[step][rank])
        assert results[name]["weights"].keys() == alone["weights"].keys()
        for key, weight in results[name]["weights"].items():
            assert torch.equal(weight, alone["weights"][key]), key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "codes", "codes, checkpointed", "ddp", "plain, reused"])
def test_two_ranks_compute_what_one_process_computes(name: str, ranks: list[dict[str, Any]]) -> None:
    assert_one(ranks, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "codes", "mxfp8"])
def test_two_ranks_with_experts_compute_what_one_process_computes(
    name: str, slow_ranks: list[dict[str, Any]]
) -> None:
    assert_one(slow_ranks, name)


@pytest.mark.slow
def test_codes_of_fp32_weights_serve_bf16(slow_ranks: list[dict[str, Any]]) -> None:
    """Mixed precision quantizes weights from fp32 instead of bf16: nearly equal, not bit for bit."""
    for results in slow_ranks:
        codes, plain = results["codes for bf16"], results["plain in bf16"]
        assert codes["y0"].dtype == torch.bfloat16
        error = (codes["y0"] - plain["y0"]).float().norm() / plain["y0"].float().norm()
        assert error < 0.02


@pytest.mark.slow
def test_bytes_of_an_all_gather(ranks: list[dict[str, Any]]) -> None:
    """An all-gather of a block moves one byte per weight, and a scale per 128 x 128 of them."""
    plain, codes = 4 * (WEIGHTS + BIAS), WEIGHTS + 4 * WEIGHTS // 128**2 + 4 * BIAS
    for results in ranks:
        assert set(results["plain"]["moved"]) == {plain}
        assert set(results["codes"]["moved"]) == set(results["codes, checkpointed"]["moved"]) == {codes}
    assert plain / codes > 3.97


@pytest.mark.slow
def test_bytes_of_an_all_gather_with_experts_and_other_formats(slow_ranks: list[dict[str, Any]]) -> None:
    weights = WEIGHTS + EXPERTS
    for results in slow_ranks:
        assert set(results["plain"]["moved"]) == {4 * (weights + BIAS)}
        assert set(results["codes"]["moved"]) == {weights + 4 * weights // 128**2 + 4 * BIAS}
        assert set(results["plain in bf16"]["moved"]) == {2 * (weights + BIAS)}
        assert set(results["codes for bf16"]["moved"]) == {weights + 4 * weights // 128**2 + 2 * BIAS}
        # Rowwise and columnwise copies.
        assert set(results["mxfp8"]["moved"]) == {2 * (weights + weights // 32) + 4 * BIAS}


@pytest.mark.slow
def test_blocks_that_span_ranks_are_refused(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert "FSDP would split blocks of 128 rows" in results["refused"]
        assert "gather_quantized(model, filter=...)" in results["refused"]


def test_a_gathered_weight_behaves_like_a_plain_weight() -> None:
    """Without FSDP it computes, trains, moves, and is copied and saved like the plain one."""
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


def test_weights_gathered_plain_are_reported_with_a_reason() -> None:
    rows, tied = weft.nn.Linear(128, 128, recipe="fp8_row"), weft.nn.Linear(128, 128, recipe="fp8_block")
    model = nn.ModuleDict({"rows": rows, "tied": tied, "embedding": nn.Embedding(128, 128)})
    model["embedding"].weight = tied.weight
    model["plain"], model["out"] = weft.nn.Linear(128, 128), weft.nn.Linear(128, 128, recipe="fp8_block")
    twins = [weft.nn.Linear(128, 128, recipe="fp8_block") for _ in range(2)]
    twins[1].weight = twins[0].weight
    model.update({"one": twins[0], "two": twins[1]})
    report = weft.nn.gather_quantized(model, filter=lambda name, module: name != "out")
    assert report.left == {
        "rows.weight": f"{weft.Recipe.of('fp8_row').weight} has scales that span ranks",
        "tied.weight": "it is shared with modules that use another format",
        "plain.weight": "its recipe does not quantize it",
        "out.weight": "left out by the filter",
    }
    assert report.changed == ["one.weight", "two.weight"]
    assert twins[0].weight is twins[1].weight
