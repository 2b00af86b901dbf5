"""A vocabulary sharded over ranks: losses and gradients of 1 to 4 ranks on Gloo against float64 and against each other,
distributed tensors, and shards in a single process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from triton_loom.testing import Results, results_of

import weft
from tests.ops.loss import ranks_vocabulary as ranks
from tests.ops.loss.ranks_vocabulary import CASES, MESH_CASES, Case, placements_of, unread_labels
from weft import VocabShard
from weft.lab.calls import assert_same, small
from weft.lab.families import Call, for_op
from weft.lab.families.cross_entropy import cross_entropy_truth
from weft.lab.families.linear_logprobs import head_truth
from weft.lab.truth import Near, arguments, near

# Two ranks always, other group sizes in the slow tests; three ranks are also simulated in one process.
WORLDS = (2, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 3, 4)))


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of(Path(ranks.__file__), tmp_path_factory)


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    """Disable the check of labels, since cases have a target that is no column."""
    with unread_labels():
        yield


def expected(case: Case) -> dict[str, Near | Tensor]:
    """Return the float64 results over the whole vocabulary."""
    options = {
        name: value for name, value in case.options.items() if name != "inplace"
    }  # the call has leaves
    call = Call(case.function, {**case.inputs(), **options})
    outputs = ranks.named(call.requiring_grad()())
    head = cross_entropy_truth if case.function is weft.cross_entropy else head_truth
    return head(arguments(call), case.upstream(outputs))


def combined(case: Case, ranks_results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the results of the first rank, and the concatenated gradients of all shards."""
    joined = dict(ranks_results[0])
    for name, dim in (("dlogits", 1), ("dweight", 0), ("dbias", 0)):
        if name in joined:
            joined[name] = torch.cat([rank[name] for rank in ranks_results], dim)
    return joined


def compare(case: Case, got: dict[str, Tensor], world: int) -> None:
    wanted = expected(case)
    for name, value in got.items():
        truth = wanted[name]
        if isinstance(truth, Tensor):
            assert torch.equal(value.double(), truth.double()), name
        else:
            if name == "dhidden":
                truth = Near(truth.truth, truth.noise + partial_sum_error(case, world))
            assert torch.equal(value.isnan(), truth.truth.isnan()), name
            near(value.nan_to_num(), Near(truth.truth.nan_to_num(), truth.noise.nan_to_num()))


def partial_sum_error(case: Case, world: int) -> Tensor:
    """Return the error of rounding each rank's part of the gradient of hidden and each partial sum by half an ulp."""
    inputs = case.inputs()
    cuts = case.cuts(world)
    parts = [inputs["hidden"].double().requires_grad_() for _ in range(world)]
    weight, bias = inputs["weight"].double(), inputs.get("bias")
    logits = torch.cat([h @ weight[a:b].t() for h, a, b in zip(parts, cuts, cuts[1:], strict=False)], 1)
    if bias is not None:
        logits = logits + bias.double()
    options = {name: value for name, value in case.options.items() if name not in ranks.MORE}
    if case.function is weft.linear_logprobs:
        options["reduction"] = "none"
    outputs = ranks.named(
        weft.cross_entropy(logits, inputs["target"], class_weight=inputs.get("class_weight"), **options)
    )
    upstream = case.upstream(outputs)
    total = sum((outputs[name].nan_to_num() * g.double()).sum() for name, g in upstream.items())
    sizes = sum(g.abs() for g in torch.autograd.grad(total, parts))
    assert isinstance(sizes, Tensor)
    return 2 * world * torch.finfo(case.dtype).eps * sizes


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", WORLDS)
def test_equals_float64_of_the_whole_vocabulary(world: int, name: str, results: Any) -> None:
    """Smoothing counts the whole vocabulary, a shard may be empty or all padding, and the target's gradient is right
    even if logits are overwritten."""
    rank_results = [rank[name] for rank in results(world)]
    compare(CASES[name], combined(CASES[name], rank_results), world)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", WORLDS[1:])
def test_ranks_agree_in_every_bit(world: int, name: str, results: Any) -> None:
    """All ranks have the same results, bit for bit."""
    shared = [
        {key: value for key, value in rank[name].items() if key not in ("dlogits", "dweight", "dbias")}
        for rank in results(world)
    ]
    for other in shared[1:]:
        assert_same(other, shared[0], name)


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_rejects_labels_outside_of_all_shards(world: int, results: Any) -> None:
    """All ranks raise, so none waits for another."""
    for rank in results(world):
        for message in rank["labels"]:
            assert re.match(r"target\[5\] is (\d+); there are \1 classes", message), message


@pytest.mark.parametrize("world", WORLDS)
def test_same_bits_in_every_run(world: int, results: Any) -> None:
    for rank in results(world):
        assert_same(rank["again"], rank["linear, everything"], "again")


@pytest.mark.parametrize("name", MESH_CASES)
@pytest.mark.parametrize(
    ("world", "kind"),
    [
        pytest.param(world, kind, marks=marks)
        for world, marks in ((2, ()), (4, pytest.mark.slow))
        for kind in placements_of(world)
    ],
)
def test_distributed_tensors(world: int, kind: str, name: str, results: Any) -> None:
    """DTensors with sharded tokens, a sharded vocabulary, or both match float64, also if shards are uneven."""
    case = CASES[name]
    vocab_sharded = kind in ("vocabulary", "both")
    even = Case(**{**vars(case), "cut": "even"})
    for rank in results(world):
        compare(even, rank[f"{name} on a mesh of {kind}"], world if vocab_sharded else 1)


def test_unsupported_placements_raise(results: Any) -> None:
    messages = results(2)[0]["refused"]
    assert [message.split(" is placed")[0] for message in messages] == ["weight", "hidden", "hidden"]
    assert all("redistribute it to" in message for message in messages)


@pytest.mark.parametrize("name", ["smooth", "linear, everything"])
def test_compiled_without_a_graph_break(name: str, results: Any) -> None:
    rank_results = [rank[f"{name}, compiled"] for rank in results(2)]
    compare(CASES[name], combined(CASES[name], rank_results), 2)


# ---- one process ----------------------------------------------------------------------------------------


class SimulatedShard(VocabShard):
    """A shard whose ranks are calls of one process: a first pass collects the statistics, a second gathers them.
    Gradients are not summed."""

    collected: ClassVar[list[Tensor]] = []

    def gather(self, stats: Tensor) -> Tensor:
        if self.group is None:
            self.collected.append(stats)
            return stats[None]
        return torch.stack(self.collected)

    def sum_gradient(self, x: Tensor) -> Tensor:
        return x


def simulate(case: Case, world: int) -> dict[str, Tensor]:
    """Return the `combined` results of ranks simulated one after the other."""
    SimulatedShard.collected.clear()
    rank_results: list[dict[str, Tensor]] = []
    for group in (None, "all of them"):
        for rank in range(world):
            inputs, real = ranks.part_of(case, rank, world, group)
            shard = SimulatedShard(group, real.start, real.stop, real.size)  # type: ignore[arg-type]
            leaves = {f"d{name}": inputs[name].requires_grad_() for name in case.leaves if name in inputs}
            outputs = ranks.named(case.function(**inputs, **case.options, shard=shard))
            if group is not None:
                rank_results.append(ranks.differentiated(case, outputs, leaves))
    return combined(case, rank_results)


OF_LOGITS = [
    name
    for name, case in CASES.items()
    if case.function is weft.cross_entropy and not case.options.get("inplace")
]


@pytest.mark.parametrize("name", OF_LOGITS)
@pytest.mark.parametrize("world", [3])
def test_simulated_ranks(world: int, name: str) -> None:
    compare(CASES[name], simulate(CASES[name], world), world)


@pytest.mark.parametrize("world", [3])
def test_simulated_heads(world: int) -> None:
    """Statistics and gradients match, except for the gradient of hidden, which is not summed here."""
    case = Case(weft.linear_cross_entropy, {"label_smoothing": 0.1, "reduction": "none"}, "uneven")
    got = simulate(case, world)
    del got["dhidden"]
    compare(case, got, world)


def test_accuracy_of_equal_logits_across_ranks() -> None:
    """The target is a hit if no earlier column is as large, on any rank."""
    logits = torch.zeros(6, 300)
    target = torch.tensor([0, 1, 150, 299, 100, 7])
    logits[2, 150] = logits[3, 299] = 1.0  # the largest
    logits[4, 100] = logits[4, 200] = 1.0  # as large on the next rank
    logits[5, 7] = logits[5, 3] = 2.0  # as large before it
    case = Case(weft.cross_entropy, {"reduction": "none", "return_accuracy": True}, vocab=300)
    cuts = case.cuts(3)
    SimulatedShard.collected.clear()
    for group in (None, "all of them"):
        for rank in range(3):
            shard: Any = SimulatedShard(group, cuts[rank], cuts[rank + 1], 300)  # type: ignore[arg-type]
            part = logits[:, cuts[rank] : cuts[rank + 1]]
            result = weft.cross_entropy(part, target, shard=shard, **case.options)
    assert result.accuracy.tolist() == [1.0, 0.0, 1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("start", "stop", "length", "message"),
    [
        (-1, 4, 5, "no part of a vocabulary of 10 columns"),
        (6, 11, 5, "no part of a vocabulary of 10 columns"),
        (5, 4, 1, "no part of a vocabulary of 10 columns"),
        (0, 5, 10, "has 5 columns; got 10: pass only this rank's part"),
        (5, 10, 10, "has 5 columns; got 10: pass only this rank's part"),
    ],
)
def test_invalid_shards_raise(start: int, stop: int, length: int, message: str) -> None:
    """Logits of the whole vocabulary are not accepted as a shard, on any rank."""
    shard: Any = SimulatedShard(None, start, stop, 10)  # type: ignore[arg-type]
    target = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        weft.cross_entropy(torch.randn(2, length), target, shard=shard)
    with pytest.raises(ValueError, match=message):
        weft.linear_logprobs(torch.randn(2, 8), torch.randn(length, 8), target, shard=shard)


def test_shards_match_torch_chunk() -> None:
    class Group:
        def __init__(self, rank: int) -> None:
            self.index = rank

        def rank(self) -> int:
            return self.index

        def size(self) -> int:
            return 4

    for size in (1, 3, 4, 5, 10, 301):
        shards = [VocabShard.of(Group(rank), size) for rank in range(4)]  # type: ignore[arg-type]
        chunks = [len(chunk) for chunk in torch.arange(size).chunk(4)]
        assert [shard.start for shard in shards] == [sum(chunks[:rank]) for rank in range(4)]
        assert [shard.stop for shard in shards] == [sum(chunks[: rank + 1]) for rank in range(4)]


def test_class_weights_belong_to_the_spread_alone() -> None:
    """If the spread is unused, backward has the gradient of the log-probability alone, without class weights."""
    workload = next(w for w in for_op("sharded_logprobs") if "everything" in str(w))
    call = small(workload, dtype=torch.float32)
    gradients = []
    for changed in ({}, {"spread": False, "weight": None, "stats": _without_spread(call["stats"])}):
        logits = call["logits"].clone().requires_grad_()
        tokens = call.with_(logits=logits, **changed)()
        gradients += torch.autograd.grad(tokens.logprobs.sum(), logits)
    assert gradients[1].abs().max() > 0
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-7)


def _without_spread(stats: Tensor) -> Tensor:
    """Return statistics [ranks, STATS, T] without the three of the spread, which precede that of the accuracy."""
    return torch.cat([stats[:, :-4], stats[:, -1:]], 1)
