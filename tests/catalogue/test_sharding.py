"""Sharding rules of every op with DTensors, on two and four ranks; see `ranks_sharding`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from triton_loom.testing import Results, results_of

import weft

SHARDED = [name for name, op in weft.catalogue.items() if op.shard is not None]

# Refused calls, with what the message advises.
REFUSED = {
    "columns": "norm: x is placed as [Shard(1)]; its dimension 1 cannot be sharded, since the norm is taken over it. "
    "Redistribute it to Replicate() or Shard(0)",
    "partial": "x is placed as [Partial(sum)]; each rank holds terms of a sum. Redistribute it to Replicate() or "
    "Shard(0)",
    "a sharded weight": "weight is placed as [Shard(0)]; its dimension 0 cannot be sharded, since the norm is taken "
    "over it. Redistribute it to Replicate()",
    "another placement": "residual is placed as [Replicate()]; if it were sliced here, its gradient would have to be "
    "gathered. Redistribute it to [Shard(0)]",
    "two placements": "up is placed as [Shard(1)]; that does not match x, which is placed as [Shard(0)]. "
    "Redistribute it to Shard(0)",
    "a plain weight": "Pass a DTensor, distribute_tensor(weight, mesh, [Replicate()])",
    "one scale": "since e4m3:tensor:te has a scale that depends on the largest element of all ranks. Give the scale (a "
    "delayed or static one), quantize each rank's shard by itself with x.to_local(), or redistribute it to Replicate()",
    "nvfp4": "Quantize each rank's shard by itself with x.to_local(), or redistribute it to Replicate()",
    "whole columns": "a column-wise copy of e4m3:row:te has one scale for a column of all ranks",
    "a block on two ranks": "a block of the quantized result has 128 rows, and shards have {rows} at a time. Pad it so "
    "that these are multiples of 128",
    "random": "seed= draws by the number of a row",
    "gate and up": "it holds gate and up. Pass them separately, as glu(gate, up), or redistribute it to Replicate() or "
    "Shard(0)",
    "experts": "Pass x.to_local() and each rank's own ends",
    "q, k and v": "Pass them separately, or with packing='groups', or redistribute it to Replicate() or Shard(0) or "
    "Shard(1)",
    "kv_heads": "cut_kv=1 must be a multiple of the {world} ranks it is sharded over",
    "no rule": "weft::glu_backward takes no DTensors: pass it this rank's tensors, x.to_local()",
    "out": "weft::norm with out= takes no DTensors",
    "rows of a rank": "weft::unpermute takes no DTensors",
}


# By day two ranks; by night four, and the kernels of every workload.
WORLDS = [2, pytest.param(4, marks=pytest.mark.slow)]
SCRIPT = Path(__file__).parent / "ranks_sharding.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of(SCRIPT, tmp_path_factory)


@pytest.fixture(scope="module")
def ranks_with_every_kernel(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of(SCRIPT, tmp_path_factory, every=True)


def compare_shards(op: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        outcomes = {name: error for name, error in rank["ops"].items() if name.startswith(f"{op}:")}
        assert outcomes, f"no workload of {op} can be cut"
        assert not any(outcomes.values()), next(error for error in outcomes.values() if error)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("op", SHARDED)
def test_a_shard_of_a_result_is_the_result_of_shards(op: str, world: int, ranks: Results) -> None:
    compare_shards(op, ranks(world))


@pytest.mark.slow
@pytest.mark.parametrize("op", SHARDED)
def test_every_kernel_computes_shards(op: str, ranks_with_every_kernel: Results) -> None:
    compare_shards(op, ranks_with_every_kernel(2))


def assert_no_errors(outcomes: dict[str, str]) -> None:
    errors = {name: error for name, error in outcomes.items() if error}
    assert outcomes
    assert not errors, "\n".join([*errors, *errors.values()])


@pytest.mark.parametrize("world", WORLDS)
def test_functions_take_distributed_tensors(world: int, ranks: Results) -> None:
    for rank in ranks(world):
        assert_no_errors(rank["calls"])


def test_compiled_functions_take_distributed_tensors(ranks: Results) -> None:
    for rank in ranks(2):
        assert_no_errors(rank["compiled"])


@pytest.mark.slow
def test_further_compiled_functions_take_distributed_tensors(ranks_with_every_kernel: Results) -> None:
    for rank in ranks_with_every_kernel(2):
        assert_no_errors(rank["compiled"])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_shardings_are_refused_with_advice(what: str, world: int, ranks: Results) -> None:
    for rank in ranks(world):
        assert rank["refusals"].keys() == REFUSED.keys()
        message = REFUSED[what].format(world=world, rows=8 // world)
        assert message in rank["refusals"][what], rank["refusals"][what]
