"""Vocabularies sharded over ranks: each rank computes with its own shard.

`VocabShard` is for plain tensors that hold a rank's shard; `statistics` documents what the ranks exchange.

With DTensors each rank computes the losses of its shard, and the results are placed like the tokens. Each dimension of
the mesh shards tokens, shards the vocabulary, or replicates. Sharded tokens need no communication, and a sharded
vocabulary needs the all-gather of `VocabShard`. Gradients need none: along a mesh dimension that shards the vocabulary
the gradient of hidden is `Partial`, and along one that shards tokens so is the gradient of a replicated weight. DTensor
sums them when they are used. Logits are never moved: other placements raise an error instead of being gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .reduction import CrossEntropy, LossOptions, reduced, shares_of
from .statistics import Softmax

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

# ---- a rank's shard -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VocabShard:
    """This rank's part of a vocabulary of `size` columns: those from `start` up to, but not including, `stop`.

    Shards may have any length, including zero. The shards of all ranks of `group`, in rank order, make up the
    vocabulary. Targets and class weights refer to the whole vocabulary and are equal on all ranks.

    >>> import torch, torch.distributed as dist, weft
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> shard = weft.VocabShard.of(dist.group.WORLD, 1000)  # one rank holds all of it
    >>> logits, target = torch.randn(6, 1000), torch.arange(6)
    >>> loss = weft.cross_entropy(logits, target, shard=shard)
    >>> torch.testing.assert_close(loss, weft.cross_entropy(logits, target))
    >>> dist.destroy_process_group()
    """

    group: ProcessGroup
    start: int
    stop: int
    size: int

    @classmethod
    def of(cls, group: ProcessGroup, size: int) -> VocabShard:
        """Return this rank's shard of a vocabulary split as `torch.chunk` and `DTensor` split it: into shards of equal
        length, except that the last ones may be shorter or empty."""
        length = -(-size // group.size())
        start, stop = (min(rank * length, size) for rank in (group.rank(), group.rank() + 1))
        return cls(group, start, stop, size)

    def check(self, length: int) -> None:
        """Raise a ValueError if this shard does not have `length` columns."""
        if not 0 <= self.start <= self.stop <= self.size:
            raise ValueError(
                f"the shard from column {self.start} to {self.stop} is no part of a vocabulary of {self.size} columns"
            )
        if length != self.stop - self.start:
            raise ValueError(
                f"the shard from column {self.start} to {self.stop} has {self.stop - self.start} columns; "
                f"got {length}: pass only this rank's part of the vocabulary"
            )

    def gather(self, stats: Tensor) -> Tensor:
        """Gather the statistics [STATS, T] of all ranks, in rank order, as [ranks, STATS, T]."""
        gathered = stats.new_empty((self.group.size(), *stats.shape))
        collectives = torch.distributed
        if hasattr(collectives, "all_gather_single"):
            collectives.all_gather_single(gathered.flatten(0, 1), stats, group=self.group)
        else:  # its name before PyTorch 2.13
            collectives.all_gather_into_tensor(gathered.flatten(0, 1), stats, group=self.group)
        return gathered

    def sum_gradient(self, x: Tensor) -> Tensor:
        """Return x unchanged; its gradient becomes the sum of the ranks' gradients."""
        return x if not x.requires_grad else _SumGradient.apply(x, self.group)

    def sum_rows(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' x, of which one has a row and the others zeros. All ranks have its gradient."""
        total: Tensor = _SumRows.apply(x, self.group)
        return total


class _SumRows(torch.autograd.Function):
    """Sum over ranks; the gradient of the sum is that of each rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        total = x.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _SumGradient(torch.autograd.Function):
    """Identity whose backward sums the gradients of all ranks, for a tensor that is equal on all ranks and that each
    rank multiplies with its own shard."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = gradient.clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None


def check_shard(shard: VocabShard | None, length: int) -> None:
    """Raise an error unless `shard` is None or a `VocabShard` of `length` columns."""
    if shard is None:
        return
    if not isinstance(shard, VocabShard):
        raise TypeError(
            f"shard must be a weft.VocabShard; got a {type(shard).__name__}. Make one from a process "
            "group with weft.VocabShard.of(group, columns of the whole vocabulary)"
        )
    shard.check(length)


# ---- distributed tensors --------------------------------------------------------------------------------


class _PartialGradients(VocabShard):
    """A shard whose gradients stay partial sums, for DTensor to add up."""

    def sum_gradient(self, x: Tensor) -> Tensor:
        return x


class Local(NamedTuple):
    """One rank's operands: its tensors, its shard of the vocabulary, and the placement of per-token results."""

    tensors: dict[str, Tensor | None]
    target: Tensor
    shard: VocabShard | None
    mesh: DeviceMesh
    tokens: list[Placement]
    shape: torch.Size

    def tensor(self, name: str) -> Tensor:
        """Return a tensor that must not be None."""
        tensor = self.tensors[name]
        assert tensor is not None
        return tensor

    def placed(self, values: Tensor) -> Tensor:
        """Return the values of this rank's tokens as its shard of a DTensor over all tokens."""
        from torch.distributed.tensor import DTensor

        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            values, self.mesh, self.tokens, run_check=False, shape=self.shape, stride=stride
        )

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over the tokens of all ranks, equal on every rank."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        placements = [Replicate() if p.is_replicate() else Partial() for p in self.tokens]
        partial_sum = DTensor.from_local(values.sum(), self.mesh, placements, run_check=False)
        return partial_sum.redistribute(placements=[Replicate()] * self.mesh.ndim)

    def reduced(
        self, local: CrossEntropy, class_weight: Tensor | None, softmax: Softmax, options: LossOptions
    ) -> CrossEntropy:
        """Return the results of this rank's tokens as DTensors, reduced over all tokens according to `options`."""
        share, valid = shares_of(self.target, class_weight, softmax, local.loss.dtype)

        def over_tokens(values: Tensor, weight: Tensor) -> Tensor:
            if options.reduction == "none":
                return self.placed(values)
            return reduced(values, weight, options, self.total)

        return CrossEntropy(
            over_tokens(local.loss, share),
            None if local.lse is None else self.placed(local.lse),
            None if local.entropy is None else self.placed(local.entropy),
            None if local.accuracy is None else over_tokens(local.accuracy, valid.to(local.loss.dtype)),
        )


def _refused(name: str, placements: Any, advice: str) -> ValueError:
    return ValueError(f"{name} is placed as {tuple(placements)}: {advice}")


def localize(
    tensors: dict[str, Tensor | None], target: Tensor, vocab_dims: dict[str, int], token_tensor: str
) -> Local:
    """Return this rank's part of DTensors.

    `vocab_dims` maps each tensor to its vocabulary dimension; the first tensor in it decides how the vocabulary is
    sharded. `token_tensor` names the tensor whose leading dimensions are the tokens. Plain tensors must be equal on
    all ranks.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    present = {name: t for name, t in tensors.items() if t is not None}
    mesh = next(t.device_mesh for t in (*present.values(), target) if isinstance(t, DTensor))

    def distributed(x: Tensor) -> DTensor:
        if not isinstance(x, DTensor):
            return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
        if x.device_mesh != mesh:
            raise ValueError(f"all DTensors must be on one mesh; got {mesh} and {x.device_mesh}")
        return x

    global_tensors = {name: distributed(t) for name, t in present.items()}
    leader = next(iter(vocab_dims))
    columns, rows = global_tensors[leader], global_tensors[token_tensor]
    vocab_dim = vocab_dims[leader]
    shard: VocabShard | None = None
    tokens: list[Placement] = []
    shards_vocab: list[bool] = []  # which dimensions of the mesh shard the vocabulary
    for dim, (column_placement, row_placement) in enumerate(
        zip(columns.placements, rows.placements, strict=True)
    ):
        is_vocab = type(column_placement) is Shard and column_placement.dim % columns.ndim == vocab_dim
        shards_vocab.append(is_vocab)
        if is_vocab:
            if shard is not None:
                raise _refused(
                    leader, columns.placements, "only one dimension of a mesh can shard the vocabulary"
                )
            shard = _PartialGradients.of(mesh.get_group(dim), columns.shape[vocab_dim])
            tokens.append(Replicate())
        elif columns is not rows and not column_placement.is_replicate():
            raise _refused(leader, columns.placements, "redistribute it to Shard(0) or Replicate()")
        elif type(row_placement) is Shard and row_placement.dim % rows.ndim < rows.ndim - 1:
            tokens.append(Shard(row_placement.dim % rows.ndim))
        elif row_placement.is_replicate():
            tokens.append(Replicate())
        else:
            raise _refused(
                token_tensor, rows.placements, "redistribute it to Shard of a token dimension or Replicate()"
            )

    local: dict[str, Tensor | None] = dict(tensors)
    for name, t in global_tensors.items():
        placements: list[Placement] = []
        grad_placements: list[Placement] = []
        for is_vocab, token_placement in zip(shards_vocab, tokens, strict=True):
            if is_vocab:
                placements.append(Shard(vocab_dims[name]) if name in vocab_dims else Replicate())
                grad_placements.append(Shard(vocab_dims[name]) if name in vocab_dims else Partial())
            elif name == token_tensor:
                placements.append(token_placement)
                grad_placements.append(token_placement)
            else:
                placements.append(Replicate())
                grad_placements.append(Partial() if isinstance(token_placement, Shard) else Replicate())
        local[name] = t.redistribute(mesh, placements).to_local(grad_placements=grad_placements)
    shape = target.shape
    target = distributed(target).redistribute(mesh, tokens).to_local()
    return Local(local, target, shard, mesh, tokens, shape)
