"""Script of one rank for `test_vocabulary`: `python ranks_vocabulary.py RANK WORLD DIRECTORY` saves its results there.

A case is a call whose inputs every rank draws identically and then reduces to its shard of the vocabulary.
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
    """Call of a loss; `cut` names the rule that splits the vocabulary into shards."""

    function: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    cut: str = "even"
    vocab: int = 301
    dtype: torch.dtype = torch.float32
    sure: float = 0.0  # amount by which every other target's logit is raised
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
        """Draw inputs for the whole vocabulary."""
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
        tensors: dict[str, Tensor] = {"target": target}
        bias = torch.zeros(self.vocab) + self.shift
        bias[self.vocab - self.padded :] = -torch.inf
        if self.function is weft.cross_entropy:
            logits = 3.0 * normal(tokens, self.vocab) + bias
            columns = target.clamp(0, self.vocab - 1)
            logits[::2] = logits[::2].scatter_add(
                1, columns[::2, None], torch.full((len(columns[::2]), 1), self.sure)
            )
            tensors["logits"] = logits.to(self.dtype)
        else:
            tensors["hidden"] = normal(tokens, hidden).to(self.dtype)
            tensors["weight"] = (3.0 * normal(self.vocab, hidden) / hidden**0.5).to(self.dtype)
            if self.padded or self.shift:
                tensors["bias"] = bias.to(self.dtype)
            if self.sure:
                columns = target.clamp(0, self.vocab - 1)
                tensors["hidden"][::2] += self.sure * tensors["weight"][columns[::2]]
        if self.weighted:
            tensors["class_weight"] = torch.rand(self.vocab, generator=generator) + 0.5
        return tensors

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
    """Return the results and gradients of this rank's shard."""
    tensors, shard = part_of(case, rank, world, group)
    assert case.cut != "even" or shard == VocabShard.of(group, case.vocab)
    leaves = {f"d{name}": tensors[name].requires_grad_() for name in case.leaves if name in tensors}
    if case.options.get("inplace"):
        tensors["logits"] = tensors["logits"] * 1.0  # a leaf cannot be written to
    return differentiated(case, named(case.function(**tensors, **case.options, shard=shard)), leaves)


def part_of(case: Case, rank: int, world: int, group: Any) -> tuple[dict[str, Tensor], VocabShard]:
    """Return this rank's inputs and shard."""
    tensors = case.inputs()
    first, last = case.cuts(world)[rank : rank + 2]
    if "logits" in tensors:
        tensors["logits"] = tensors["logits"][:, first:last].clone()
    else:
        tensors |= {name: tensors[name][first:last].clone() for name in ("weight", "bias") if name in tensors}
    shard = VocabShard(group, first, last, case.vocab)
    return tensors, shard


def differentiated(case: Case, outputs: dict[str, Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs, and the gradients of the leaves for random upstream gradients."""
    total = sum((outputs[name].nan_to_num() * g).sum() for name, g in case.upstream(outputs).items())
    gradients = torch.autograd.grad(total, list(leaves.values()))
    return {name: value.detach() for name, value in outputs.items()} | dict(
        zip(leaves, gradients, strict=True)
    )


# ---- distributed tensors and the compiler ---------------------------------------------------------------


def placements_of(world: int) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Return meshes, and what each of their dimensions shards."""
    placements: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "vocabulary": ((world,), ("vocabulary",)),
        "tokens": ((world,), ("tokens",)),
        "nothing": ((world,), ("nothing",)),
    }
    if world == 4:
        placements["both"] = ((2, 2), ("tokens", "vocabulary"))
    return placements


MESH_CASES = ("smooth", "each token", "everything", "logprobs", "linear, everything", "empty shards")


def run_on_mesh(case: Case, mesh: Any, sharded: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the full results and gradients of DTensors."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    tensors = case.inputs()

    def placed(name: str, value: Tensor) -> Tensor:
        vocab_dim = {"logits": 1, "weight": 0, "bias": 0}.get(name)
        token_dim = {"logits": 0, "hidden": 0, "target": 0}.get(name)
        dims = {"vocabulary": vocab_dim, "tokens": token_dim, "nothing": None}
        placements = [Replicate() if dims[dim] is None else Shard(dims[dim]) for dim in sharded]
        return distribute_tensor(value, mesh, placements)

    dtensors = {name: placed(name, value) for name, value in tensors.items()}
    names = [name for name in case.leaves if name in dtensors]
    dtensors |= {name: dtensors[name].detach().requires_grad_() for name in names}
    outputs = named(case.function(**dtensors, **case.options))
    full = {name: value.full_tensor() for name, value in outputs.items()}
    results = differentiated(case, full, {f"d{name}": dtensors[name] for name in names})
    return {name: value.full_tensor() if name[1:] in names else value for name, value in results.items()}


def run_compiled(case: Case, rank: int, world: int, group: Any) -> dict[str, Tensor]:
    """Run under torch.compile without a graph break."""
    tensors, shard = part_of(case, rank, world, group)
    leaves = {f"d{name}": tensors[name].requires_grad_() for name in case.leaves if name in tensors}

    def call(**tensors: Tensor) -> Any:
        return case.function(**tensors, **case.options, shard=shard)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    return differentiated(case, named(compiled(**tensors)), leaves)


def refused(world: int) -> list[str]:
    """Return the errors of unsupported placements."""
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
    """Return this rank's error for a label outside of the whole vocabulary. Columns of other shards are accepted."""
    case = CASES[name]
    tensors, shard = part_of(case, rank, world, group)
    tensors["target"][5] = case.vocab - 1
    case.function(**tensors, **case.options, shard=shard)
    tensors["target"][5] = case.vocab
    try:
        case.function(**tensors, **case.options, shard=shard)
    except IndexError as error:
        return str(error)
    return ""


def main(rank: int, world: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=world)
    group = dist.group.WORLD
    with unread_labels():  # cases have a target that is no column
        results: dict[str, Any] = {name: run(case, rank, world, group) for name, case in CASES.items()}
        results["again"] = run(CASES["linear, everything"], rank, world, group)
        if world in (2, 4):
            from torch.distributed.tensor import init_device_mesh

            for kind, (shape, sharded) in placements_of(world).items():
                mesh = init_device_mesh("cpu", shape)
                for name in MESH_CASES:
                    results[f"{name} on a mesh of {kind}"] = run_on_mesh(CASES[name], mesh, sharded)
            results["refused"] = refused(world)
        if world == 2:
            for name in ("smooth", "linear, everything"):
                results[f"{name}, compiled"] = run_compiled(CASES[name], rank, world, group)
    results["labels"] = [refused_label(name, rank, world, group) for name in ("each token", "logprobs")]
    torch.save(results, directory / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
