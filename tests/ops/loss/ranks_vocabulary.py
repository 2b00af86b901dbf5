"""What each rank runs for `test_vocabulary`: `python ranks_vocabulary.py RANK WORLD DIRECTORY` saves its results there.

A case is a call with inputs that every rank draws alike, of which it takes its shard of the vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import weft
from weft import VocabShard
from weft.ops.loss import statistics

ALL = {"return_lse": True, "return_entropy": True, "return_accuracy": True}
MORE = {"return_mean_logits": True, "return_log_sum_squares": True}  # of `linear_logprobs` alone


@dataclass(frozen=True)
class Case:
    """`cut`: where the shards begin, for a number of ranks and a vocabulary."""

    function: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    cut: str = "even"
    vocab: int = 301
    dtype: torch.dtype = torch.float32
    sure: float = 0.0  # what makes every other target stand out
    padded: int = 0  # columns at the end that are minus infinity
    ignored: bool = True
    weighted: bool = False
    shift: float = 0.0

    def cuts(self, world: int) -> list[int]:
        if self.cut == "even":  # as torch.chunk does, so that the last ones may be empty
            length = -(-self.vocab // world)
            return [min(rank * length, self.vocab) for rank in range(world + 1)]
        if self.cut == "uneven":
            return [0, *(self.vocab * (rank + 1) ** 2 // world**2 for rank in range(world - 1)), self.vocab]
        assert self.cut == "first empty"
        return [0, *(self.vocab * rank // max(world - 1, 1) for rank in range(world - 1)), self.vocab]

    def inputs(self) -> dict[str, Tensor]:
        """Of the whole vocabulary."""
        generator = torch.Generator().manual_seed(5)
        tokens, hidden = 29, 40

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        target = torch.randint(0, self.vocab - self.padded, (tokens,), generator=generator)
        target[0], target[1] = 0, self.vocab - self.padded - 1
        if self.ignored:
            target[4::7] = -100
            if self.options.get("reduction") == "none" or self.function is weft.linear_logprobs:
                target[5] = self.vocab + 3  # none of the columns
        given: dict[str, Tensor] = {"target": target}
        bias = torch.zeros(self.vocab) + self.shift
        bias[self.vocab - self.padded :] = -torch.inf
        if self.function is weft.cross_entropy:
            logits = 3.0 * normal(tokens, self.vocab) + bias
            at = target.clamp(0, self.vocab - 1)
            logits[::2] = logits[::2].scatter_add(1, at[::2, None], torch.full((len(at[::2]), 1), self.sure))
            given["logits"] = logits.to(self.dtype)
        else:
            given["hidden"] = normal(tokens, hidden).to(self.dtype)
            given["weight"] = (3.0 * normal(self.vocab, hidden) / hidden**0.5).to(self.dtype)
            if self.padded or self.shift:
                given["bias"] = bias.to(self.dtype)
            if self.sure:
                at = target.clamp(0, self.vocab - 1)
                given["hidden"][::2] += self.sure * given["weight"][at[::2]]
        if self.weighted:
            given["class_weight"] = torch.rand(self.vocab, generator=generator) + 0.5
        return given

    @property
    def leaves(self) -> tuple[str, ...]:
        return ("logits",) if self.function is weft.cross_entropy else ("hidden", "weight", "bias")

    def upstream(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(6)
        return {
            name: torch.randn(value.shape, generator=generator)
            for name, value in outputs.items()
            if value.requires_grad
        }


EVERYTHING = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 20.0, "temperature": 1.25, **ALL}
CASES: dict[str, Case] = {
    "plain": Case(weft.cross_entropy),
    "smooth": Case(weft.cross_entropy, {"label_smoothing": 0.1, "z_loss": 1e-2}, "uneven"),
    "each token": Case(weft.cross_entropy, {"reduction": "none", "label_smoothing": 0.3, **ALL}, "uneven"),
    "everything": Case(weft.cross_entropy, EVERYTHING, "uneven", weighted=True, dtype=torch.bfloat16, vocab=5003),
    "empty shards": Case(weft.cross_entropy, {"reduction": "none", "label_smoothing": 0.1, **ALL}, vocab=5),
    "first empty": Case(weft.cross_entropy, {"reduction": "sum", "label_smoothing": 0.1, **ALL}, "first empty"),
    "padding shard": Case(
        weft.cross_entropy, {"reduction": "none", "label_smoothing": 0.1, **ALL}, vocab=400, padded=180
    ),
    "sure": Case(weft.cross_entropy, {"reduction": "none"}, "uneven", sure=14.0, dtype=torch.bfloat16),
    "in place": Case(weft.cross_entropy, {"inplace": True, "label_smoothing": 0.1}, sure=12.0),
    "shifted up": Case(
        weft.cross_entropy, {"label_smoothing": 0.1, "reduction": "none", **ALL}, "uneven", shift=1e4
    ),
    "float32, weighted": Case(weft.cross_entropy, EVERYTHING, "uneven", weighted=True),
    "float64": Case(weft.cross_entropy, EVERYTHING, "uneven", dtype=torch.float64, weighted=True),
    "logprobs": Case(weft.linear_logprobs, {"temperature": 0.7, **ALL, **MORE}, "uneven"),
    "logprobs of bf16": Case(weft.linear_logprobs, {}, "uneven", dtype=torch.bfloat16, sure=2.0),
    "linear": Case(weft.linear_cross_entropy, {"label_smoothing": 0.1, "z_loss": 1e-2}, "uneven"),
    "linear, everything": Case(weft.linear_cross_entropy, EVERYTHING, "uneven", weighted=True, shift=2.0),
    "linear, empty shards": Case(
        weft.linear_cross_entropy, {"reduction": "none", "label_smoothing": 0.1, **ALL}, vocab=5
    ),
    "linear, padding shard": Case(
        weft.linear_cross_entropy, {"reduction": "none", "label_smoothing": 0.1, **ALL}, vocab=400, padded=180
    ),
    "linear, float64": Case(
        weft.linear_cross_entropy, EVERYTHING, "uneven", dtype=torch.float64, weighted=True, shift=2.0
    ),
}  # fmt: skip


@contextmanager
def unread_labels() -> Iterator[None]:
    """Run losses as on a GPU: no op reads labels, and one that is no class makes a token's results NaN."""
    real, statistics.is_readable = statistics.is_readable, lambda x: False
    try:
        yield
    finally:
        statistics.is_readable = real


def named(result: Any) -> dict[str, Tensor]:
    if isinstance(result, Tensor):
        return {"y": result}
    return {name: value for name, value in result._asdict().items() if value is not None}


def run(case: Case, rank: int, world: int, group: Any) -> dict[str, Tensor]:
    """Results and gradients of this rank's shard."""
    given, shard = part_of(case, rank, world, group)
    assert case.cut != "even" or shard == VocabShard.of(group, case.vocab)
    leaves = {f"d{name}": given[name].requires_grad_() for name in case.leaves if name in given}
    if case.options.get("inplace"):
        given["logits"] = given["logits"] * 1.0  # a leaf cannot be written to
    return differentiated(case, named(case.function(**given, **case.options, shard=shard)), leaves)


def part_of(case: Case, rank: int, world: int, group: Any) -> tuple[dict[str, Tensor], VocabShard]:
    """This rank's inputs."""
    given = case.inputs()
    first, last = case.cuts(world)[rank : rank + 2]
    if "logits" in given:
        given["logits"] = given["logits"][:, first:last].clone()
    else:
        given |= {name: given[name][first:last].clone() for name in ("weight", "bias") if name in given}
    shard = VocabShard(group, first, last, case.vocab)
    return given, shard


def differentiated(case: Case, outputs: dict[str, Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs with random gradients, and what the leaves get of them."""
    total = sum((outputs[name].nan_to_num() * g).sum() for name, g in case.upstream(outputs).items())
    gradients = torch.autograd.grad(total, list(leaves.values()))
    return {name: value.detach() for name, value in outputs.items()} | dict(
        zip(leaves, gradients, strict=True)
    )


# ---- distributed tensors and the compiler ---------------------------------------------------------------


def placements_of(world: int) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Meshes and what each of their dimensions shards."""
    found: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "vocabulary": ((world,), ("vocabulary",)),
        "tokens": ((world,), ("tokens",)),
        "nothing": ((world,), ("nothing",)),
    }
    if world == 4:
        found["both"] = ((2, 2), ("tokens", "vocabulary"))
    return found


MESH_CASES = ("smooth", "each token", "everything", "logprobs", "linear, everything", "empty shards")


def run_on_mesh(case: Case, mesh: Any, sharded: tuple[str, ...]) -> dict[str, Tensor]:
    """The whole results and gradients, of DTensors."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    given = case.inputs()

    def placed(name: str, value: Tensor) -> Tensor:
        vocab_dim = {"logits": 1, "weight": 0, "bias": 0}.get(name)
        token_dim = {"logits": 0, "hidden": 0, "target": 0}.get(name)
        dims = {"vocabulary": vocab_dim, "tokens": token_dim, "nothing": None}
        placements = [Replicate() if dims[what] is None else Shard(dims[what]) for what in sharded]
        return distribute_tensor(value, mesh, placements)

    whole = {name: placed(name, value) for name, value in given.items()}
    names = [name for name in case.leaves if name in whole]
    whole |= {name: whole[name].detach().requires_grad_() for name in names}
    outputs = named(case.function(**whole, **case.options))
    full = {name: value.full_tensor() for name, value in outputs.items()}
    found = differentiated(case, full, {f"d{name}": whole[name] for name in names})
    return {name: value.full_tensor() if name[1:] in names else value for name, value in found.items()}


def run_compiled(case: Case, rank: int, world: int, group: Any) -> dict[str, Tensor]:
    """Under torch.compile without a break."""
    given, shard = part_of(case, rank, world, group)
    leaves = {f"d{name}": given[name].requires_grad_() for name in case.leaves if name in given}

    def call(**tensors: Tensor) -> Any:
        return case.function(**tensors, **case.options, shard=shard)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    return differentiated(case, named(compiled(**given)), leaves)


def refused(world: int) -> list[str]:
    """Messages about placements that make no sense."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    hidden, weight = torch.randn(4, 8), torch.randn(10, 8)
    target = torch.zeros(4, dtype=torch.int64)
    messages = []
    for h, w in ((Replicate(), Shard(1)), (Partial(), Replicate()), (Shard(1), Replicate())):
        operands = (DTensor.from_local(t, mesh, [p]) for t, p in ((hidden, h), (weight, w)))
        try:
            weft.linear_logprobs(*operands, target)
        except ValueError as error:
            messages.append(str(error))
    return messages


def refused_label(name: str, rank: int, world: int, group: Any) -> str:
    """What this rank says to a label that is no column of the whole vocabulary. Columns of other shards are taken."""
    case = CASES[name]
    given, shard = part_of(case, rank, world, group)
    given["target"][5] = case.vocab - 1
    case.function(**given, **case.options, shard=shard)
    given["target"][5] = case.vocab
    try:
        case.function(**given, **case.options, shard=shard)
    except IndexError as error:
        return str(error)
    return ""


def main(rank: int, world: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=world)
    group = dist.group.WORLD
    with unread_labels():  # cases have a target that is none of the columns
        found: dict[str, Any] = {name: run(case, rank, world, group) for name, case in CASES.items()}
        found["again"] = run(CASES["linear, everything"], rank, world, group)
        if world in (2, 4):
            from torch.distributed.tensor import init_device_mesh

            for kind, (shape, sharded) in placements_of(world).items():
                mesh = init_device_mesh("cpu", shape)
                for name in MESH_CASES:
                    found[f"{name} on a mesh of {kind}"] = run_on_mesh(CASES[name], mesh, sharded)
            found["refused"] = refused(world)
        if world == 2:
            for name in ("smooth", "linear, everything"):
                found[f"{name}, compiled"] = run_compiled(CASES[name], rank, world, group)
    found["labels"] = [refused_label(name, rank, world, group) for name in ("each token", "logprobs")]
    torch.save(found, directory / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
