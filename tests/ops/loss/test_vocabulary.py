"""A vocabulary that is sharded over ranks: losses and gradients of 1 to 4 ranks on Gloo against float64, ranks against
each other, distributed tensors, and one process alone."""

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

# Two ranks with every change, the other groups for the night; three ranks are also pretended, in one process.
WORLDS = (2, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 3, 4)))


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of(Path(ranks.__file__), tmp_path_factory)


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    """Cases have a target that is none of the columns."""
    with unread_labels():
        yield


def expected(case: Case) -> dict[str, Near | Tensor]:
    """In float64, of the whole vocabulary."""
    options = {name: value for name, value in case.options.items() if name != "inplace"}  # it has leaves
    call = Call(case.function, {**case.inputs(), **options})
    outputs = ranks.named(call.requiring_grad()())
    head = cross_entropy_truth if case.function is weft.cross_entropy else head_truth
    return head(arguments(call), case.upstream(outputs))


def whole(case: Case, found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The results of the first rank, and the gradients of all shards side by side."""
    joined = dict(found[0])
    for name, dim in (("dlogits", 1), ("dweight", 0), ("dbias", 0)):
        if name in joined:
            joined[name] = torch.cat([rank[name] for rank in found], dim)
    return joined


def compare(case: Case, got: dict[str, Tensor], world: int) -> None:
    wanted = expected(case)
    for name, value in got.items():
        truth = wanted[name]
        if isinstance(truth, Tensor):
            assert torch.equal(value.double(), truth.double()), name
        else:
            if name == "dhidden":
                truth = Near(truth.truth, truth.noise + of_partial_sums(case, world))
            assert torch.equal(value.isnan(), truth.truth.isnan()), name
            near(value.nan_to_num(), Near(truth.truth.nan_to_num(), truth.noise.nan_to_num()))


def of_partial_sums(case: Case, world: int) -> Tensor:
    """What rounding each rank's part of the gradient of hidden before they are added up may change: of each part and
    of each sum half an ulp."""
    given = case.inputs()
    cuts = case.cuts(world)
    parts = [given["hidden"].double().requires_grad_() for _ in range(world)]
    weight, bias = given["weight"].double(), given.get("bias")
    logits = torch.cat([h @ weight[a:b].t() for h, a, b in zip(parts, cuts, cuts[1:], strict=False)], 1)
    if bias is not None:
        logits = logits + bias.double()
    options = {name: value for name, value in case.options.items() if name not in ranks.MORE}
    if case.function is weft.linear_logprobs:
        options["reduction"] = "none"
    outputs = ranks.named(
        weft.cross_entropy(logits, given["target"], class_weight=given.get("class_weight"), **options)
    )
    upstream = case.upstream(outputs)
    total = sum((outputs[name].nan_to_num() * g.double()).sum() for name, g in upstream.items())
    sizes = sum(g.abs() for g in torch.autograd.grad(total, parts))
    assert isinstance(sizes, Tensor)
    return 2 * world * torch.finfo(case.dtype).eps * sizes


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", WORLDS)
def test_float64_of_the_whole_vocabulary(world: int, name: str, results: Any) -> None:
    """Bugs I1, I2, D3: smoothing counts the whole vocabulary, a shard may be empty or all padding, and the target's
    gradient is right where logits are overwritten."""
    found = [rank[name] for rank in results(world)]
    compare(CASES[name], whole(CASES[name], found), world)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", WORLDS[1:])
def test_ranks_agree_in_every_bit(world: int, name: str, results: Any) -> None:
    """Bug I2."""
    shared = [
        {key: value for key, value in rank[name].items() if key not in ("dlogits", "dweight", "dbias")}
        for rank in results(world)
    ]
    for other in shared[1:]:
        assert_same(other, shared[0], name)


@pytest.mark.parametrize("world", WORLDS)
def test_a_label_of_another_shard_is_taken_and_one_of_none_is_refused_by_every_rank(
    world: int, results: Any
) -> None:
    """No rank waits for one that was refused."""
    for rank in results(world):
        for said in rank["labels"]:
            assert re.match(r"target\[5\] is (\d+); there are \1 classes", said), said


@pytest.mark.parametrize("world", WORLDS)
def test_same_bits_every_run(world: int, results: Any) -> None:
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
    """Bug I8: sharded tokens, a sharded vocabulary, both; uneven ones too."""
    case = CASES[name]
    vocab_sharded = kind in ("vocabulary", "both")
    even = Case(**{**vars(case), "cut": "even"})
    for rank in results(world):
        compare(even, rank[f"{name} on a mesh of {kind}"], world if vocab_sharded else 1)


def test_placements_that_are_refused(results: Any) -> None:
    messages = results(2)[0]["refused"]
    assert [message.split(" is placed")[0] for message in messages] == ["weight", "hidden", "hidden"]
    assert all("redistribute it to" in message for message in messages)


@pytest.mark.parametrize("name", ["smooth", "linear, everything"])
def test_compiled_without_a_break(name: str, results: Any) -> None:
    found = [rank[f"{name}, compiled"] for rank in results(2)]
    compare(CASES[name], whole(CASES[name], found), 2)


# ---- one process ----------------------------------------------------------------------------------------


class Pretended(VocabShard):
    """A shard whose ranks are calls of one process: first each leaves its statistics, then each gets those of all. No
    gradients are added up."""

    left: ClassVar[list[Tensor]] = []

    def gather(self, stats: Tensor) -> Tensor:
        if self.group is None:
            self.left.append(stats)
            return stats[None]
        return torch.stack(self.left)

    def sum_gradient(self, x: Tensor) -> Tensor:
        return x


def pretend(case: Case, world: int) -> dict[str, Tensor]:
    """`whole` results of ranks that run one after the other."""
    Pretended.left.clear()
    found: list[dict[str, Tensor]] = []
    for group in (None, "all of them"):
        for rank in range(world):
            given, real = ranks.part_of(case, rank, world, group)
            shard = Pretended(group, real.start, real.stop, real.size)  # type: ignore[arg-type]
            leaves = {f"d{name}": given[name].requires_grad_() for name in case.leaves if name in given}
            outputs = ranks.named(case.function(**given, **case.options, shard=shard))
            if group is not None:
                found.append(ranks.differentiated(case, outputs, leaves))
    return whole(case, found)


OF_LOGITS = [
    name
    for name, case in CASES.items()
    if case.function is weft.cross_entropy and not case.options.get("inplace")
]


@pytest.mark.parametrize("name", OF_LOGITS)
@pytest.mark.parametrize("world", [3])
def test_pretended_ranks(world: int, name: str) -> None:
    compare(CASES[name], pretend(CASES[name], world), world)


@pytest.mark.parametrize("world", [3])
def test_pretended_heads(world: int) -> None:
    """The gradient of hidden is this rank's alone."""
    case = Case(weft.linear_cross_entropy, {"label_smoothing": 0.1, "reduction": "none"}, "uneven")
    found = pretend(case, world)
    del found["dhidden"]
    compare(case, found, world)


def test_equals_across_ranks_and_in_one() -> None:
    """The target is right if no column before it is as large, on whichever rank."""
    logits = torch.zeros(6, 300)
    target = torch.tensor([0, 1, 150, 299, 100, 7])
    logits[2, 150] = logits[3, 299] = 1.0  # the largest
    logits[4, 100] = logits[4, 200] = 1.0  # as large on the next rank
    logits[5, 7] = logits[5, 3] = 2.0  # as large before it
    case = Case(weft.cross_entropy, {"reduction": "none", "return_accuracy": True}, vocab=300)
    cuts = case.cuts(3)
    Pretended.left.clear()
    for group in (None, "all of them"):
        for rank in range(3):
            shard: Any = Pretended(group, cuts[rank], cuts[rank + 1], 300)  # type: ignore[arg-type]
            part = logits[:, cuts[rank] : cuts[rank + 1]]
            found = weft.cross_entropy(part, target, shard=shard, **case.options)
    assert found.accuracy.tolist() == [1.0, 0.0, 1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("start", "stop", "length", "message"),
    [
        (-1, 4, 5, "no part of a vocabulary of 10 columns"),
        (6, 11, 5, "no part of a vocabulary of 10 columns"),
        (5, 4, 1, "no part of a vocabulary of 10 columns"),
        (0, 5, 10, "has 5 columns; got 10: give this rank's part"),
        (5, 10, 10, "has 5 columns; got 10: give this rank's part"),
    ],
)
def test_a_shard_that_is_none(start: int, stop: int, length: int, message: str) -> None:
    """Bug I3: logits of the whole vocabulary are no shard, on whichever rank."""
    shard: Any = Pretended(None, start, stop, 10)  # type: ignore[arg-type]
    target = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        weft.cross_entropy(torch.randn(2, length), target, shard=shard)
    with pytest.raises(ValueError, match=message):
        weft.linear_logprobs(torch.randn(2, 8), torch.randn(length, 8), target, shard=shard)


def test_how_a_vocabulary_is_cut() -> None:
    class Group:
        def __init__(self, rank: int) -> None:
            self.at = rank

        def rank(self) -> int:
            return self.at

        def size(self) -> int:
            return 4

    for size in (1, 3, 4, 5, 10, 301):
        shards = [VocabShard.of(Group(rank), size) for rank in range(4)]  # type: ignore[arg-type]
        chunks = [len(chunk) for chunk in torch.arange(size).chunk(4)]
        assert [shard.start for shard in shards] == [sum(chunks[:rank]) for rank in range(4)]
        assert [shard.stop for shard in shards] == [sum(chunks[: rank + 1]) for rank in range(4)]


def test_class_weights_belong_to_the_spread_alone() -> None:
    """A backward in which nobody used the spread has the gradient of the log-probability, without weights."""
    workload = next(w for w in for_op("sharded_logprobs") if "everything" in str(w))
    call = small(workload, dtype=torch.float32)
    found = []
    for changed in ({}, {"spread": False, "weight": None, "stats": _without_spread(call["stats"])}):
        logits = call["logits"].clone().requires_grad_()
        tokens = call.with_(logits=logits, **changed)()
        found += torch.autograd.grad(tokens.logprobs.sum(), logits)
    assert found[1].abs().max() > 0
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-7)


def _without_spread(stats: Tensor) -> Tensor:
    """Statistics [ranks, STATS, T] without the three of the spread, which stand before that of the accuracy."""
    return torch.cat([stats[:, :-4], stats[:, -1:]], 1)
