"""A vocabulary over ranks: each rank computes with its shard of it.

`VocabShard` is for plain tensors, of which a rank holds its shard; what ranks tell each other is in `statistics`.

Of distributed tensors, each rank computes its shard's losses, and the results are distributed as the tokens are. A
dimension of the mesh shards either tokens or the vocabulary, or replicates; sharded tokens need no communication, a
sharded vocabulary that of `VocabShard`. Gradients are placed without any: along a mesh dimension that shards the
vocabulary, the gradient of hidden is partial; along one that shards tokens, that of a replicated weight is. DTensor
sums them up when they are wanted. No logits are ever moved: what is placed otherwise is refused, not gathered.
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
    """The part of a vocabulary that this rank holds: columns `start` to `stop`, without that, of `size`.

    Shards may be of any lengths, empty ones too; over all ranks of `group`, in the order of the ranks, they are the
    vocabulary. Targets and weights of classes are those of the whole vocabulary, the same on every rank.

    >>> import torch, torch.distributed as dist, weft
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> shard = weft.VocabShard.of(dist.group.WORLD, 1000)  # of one rank: all of it
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
        """This rank's shard if the vocabulary is cut as `torch.chunk` and `DTensor` do: all shards of the same length,
        but for the last ones, which may be shorter or empty."""
        length = -(-size // group.size())
        start, stop = (min(rank * length, size) for rank in (group.rank(), group.rank() + 1))
        return cls(group, start, stop, size)

    def check(self, length: int) -> None:
        """Whether `length` columns can be this shard's."""
        if not 0 <= self.start <= self.stop <= self.size:
            raise ValueError(
                f"a shard from column {self.start} to {self.stop} is no part of a vocabulary of {self.size} columns"
            )
        if length != self.stop - self.start:
            raise ValueError(
                f"the shard from column {self.start} to {self.stop} has {self.stop - self.start} columns; "
                f"got {length}: give this rank's part of the vocabulary alone"
            )

    def gather(self, stats: Tensor) -> Tensor:
        """[STATS, T] of every rank, in order: [ranks, STATS, T]."""
        gathered = stats.new_empty((self.group.size(), *stats.shape))
        collectives = torch.distributed
        if hasattr(collectives, "all_gather_single"):
            collectives.all_gather_single(gathered.flatten(0, 1), stats, group=self.group)
        else:  # its name before PyTorch 2.13
            collectives.all_gather_into_tensor(gathered.flatten(0, 1), stats, group=self.group)
        return gathered

    def sum_gradient(self, x: Tensor) -> Tensor:
        """x itself, whose gradient is the sum of the ranks' gradients."""
        return x if not x.requires_grad else _SumGradient.apply(x, self.group)


class _SumGradient(torch.autograd.Function):
    """What every rank has the same of, used by each for its shard."""

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
    """A rank's shard of the vocabulary, whose columns are so many."""
    if shard is None:
        return
    if not isinstance(shard, VocabShard):
        raise TypeError(
            f"shard must be a weft.VocabShard; got a {type(shard).__name__}. Of a process group, "
            "weft.VocabShard.of(group, columns of the whole vocabulary) makes one"
        )
    shard.check(length)


# ---- distributed tensors --------------------------------------------------------------------------------


class _PartialGradients(VocabShard):
    """A shard for which DTensor sums gradients up."""

    def sum_gradient(self, x: Tensor) -> Tensor:
        return x


class Local(NamedTuple):
    """What a rank computes with: its tensors, its shard of the vocabulary, and how results of tokens are placed."""

    tensors: dict[str, Tensor | None]
    target: Tensor
    shard: VocabShard | None
    mesh: DeviceMesh
    tokens: list[Placement]
    shape: torch.Size

    def tensor(self, name: str) -> Tensor:
        """One that is never None."""
        found = self.tensors[name]
        assert found is not None
        return found

    def placed(self, values: Tensor) -> Tensor:
        """Numbers of this rank's tokens, as a DTensor of those of all."""
        from torch.distributed.tensor import DTensor

        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            values, self.mesh, self.tokens, run_check=False, shape=self.shape, stride=stride
        )

    def total(self, values: Tensor) -> Tensor:
        """The sum over the tokens of all ranks, the same on every rank."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        parts = [Replicate() if p.is_replicate() else Partial() for p in self.tokens]
        summed = DTensor.from_local(values.sum(), self.mesh, parts, run_check=False)
        return summed.redistribute(placements=[Replicate()] * self.mesh.ndim)

    def reduced(
        self, found: CrossEntropy, class_weight: Tensor | None, softmax: Softmax, options: LossOptions
    ) -> CrossEntropy:
        """What was found of each of this rank's tokens, as DTensors: reduced over all tokens as the options say."""
        share, valid = shares_of(self.target, class_weight, softmax, found.loss.dtype)

        def over_tokens(values: Tensor, counted: Tensor) -> Tensor:
            if options.reduction == "none":
                return self.placed(values)
            return reduced(values, counted, options, self.total)

        return CrossEntropy(
            over_tokens(found.loss, share),
            None if found.lse is None else self.placed(found.lse),
            None if found.entropy is None else self.placed(found.entropy),
            None if found.accuracy is None else over_tokens(found.accuracy, valid.to(found.loss.dtype)),
        )


def _refused(name: str, placements: Any, why: str) -> ValueError:
    return ValueError(f"{name} is placed as {tuple(placements)}: {why}")


def localize(
    tensors: dict[str, Tensor | None], target: Tensor, vocab_dims: dict[str, int], token_tensor: str
) -> Local:
    """This rank's part of DTensors.

    `vocab_dims` says which dimension of a tensor is the vocabulary; the first of them decides how it is sharded.
    `token_tensor` is the one whose leading dimensions are the tokens. Tensors that are no DTensors are the same on all
    ranks.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    given = {name: t for name, t in tensors.items() if t is not None}
    mesh = next(t.device_mesh for t in (*given.values(), target) if isinstance(t, DTensor))

    def distributed(x: Tensor) -> DTensor:
        if not isinstance(x, DTensor):
            return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
        if x.device_mesh != mesh:
            raise ValueError(f"all DTensors must be on one mesh; got {mesh} and {x.device_mesh}")
        return x

    whole = {name: distributed(t) for name, t in given.items()}
    leader = next(iter(vocab_dims))
    columns, rows = whole[leader], whole[token_tensor]
    vocab_dim = vocab_dims[leader]
    shard: VocabShard | None = None
    tokens: list[Placement] = []
    along: list[bool] = []  # the mesh's dimensions that shard the vocabulary
    for dim, (of_columns, of_rows) in enumerate(zip(columns.placements, rows.placements, strict=True)):
        sharded = type(of_columns) is Shard and of_columns.dim % columns.ndim == vocab_dim
        along.append(sharded)
        if sharded:
            if shard is not None:
                raise _refused(leader, columns.placements, "one dimension of a mesh can shard the vocabulary")
            shard = _PartialGradients.of(mesh.get_group(dim), columns.shape[vocab_dim])
            tokens.append(Replicate())
        elif columns is not rows and not of_columns.is_replicate():
            raise _refused(leader, columns.placements, "redistribute it to Shard(0) or Replicate()")
        elif type(of_rows) is Shard and of_rows.dim % rows.ndim < rows.ndim - 1:
            tokens.append(Shard(of_rows.dim % rows.ndim))
        elif of_rows.is_replicate():
            tokens.append(Replicate())
        else:
            raise _refused(
                token_tensor, rows.placements, "redistribute it to Shard of a token dimension or Replicate()"
            )

    local: dict[str, Tensor | None] = dict(tensors)
    for name, t in whole.items():
        wanted: list[Placement] = []
        gradients: list[Placement] = []
        for sharded, of_tokens in zip(along, tokens, strict=True):
            if sharded:
                wanted.append(Shard(vocab_dims[name]) if name in vocab_dims else Replicate())
                gradients.append(Shard(vocab_dims[name]) if name in vocab_dims else Partial())
            elif name == token_tensor:
                wanted.append(of_tokens)
                gradients.append(of_tokens)
            else:
                wanted.append(Replicate())
                gradients.append(Partial() if isinstance(of_tokens, Shard) else Replicate())
        local[name] = t.redistribute(mesh, wanted).to_local(grad_placements=gradients)
    shape = target.shape
    target = distributed(target).redistribute(mesh, tokens).to_local()
    return Local(local, target, shard, mesh, tokens, shape)
