"""A vocabulary over ranks: each rank computes with its shard of it.

`VocabShard` is for plain tensors that hold a rank's shard; `statistics` says which numbers the ranks exchange.

With DTensors each rank computes the losses of its shard, and the results are placed as the tokens are. Each dimension
of the mesh shards tokens, shards the vocabulary, or replicates. Sharded tokens need no communication, and a sharded
vocabulary takes the all-gather of `VocabShard`. Gradients take none: along a mesh dimension that shards the vocabulary
the gradient of hidden is `Partial`, and along one that shards tokens so is the gradient of a replicated weight. DTensor
adds them up when they are used. Logits are never moved: other placements are refused rather than gathered.
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
    """The part of a vocabulary of `size` columns that this rank holds: from column `start` up to, not including,
    `stop`.

    Shards may be of any lengths, also empty. Those of all ranks of `group`, in the order of the ranks, make up the
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
        """This rank's shard of a vocabulary that is cut as `torch.chunk` and `DTensor` do it: into shards of one
        length, of which the last ones may be shorter or empty."""
        length = -(-size // group.size())
        start, stop = (min(rank * length, size) for rank in (group.rank(), group.rank() + 1))
        return cls(group, start, stop, size)

    def check(self, length: int) -> None:
        """Raise a ValueError if this shard is not one of `length` columns."""
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
        """The statistics [STATS, T] of all ranks, in the order of the ranks: [ranks, STATS, T]."""
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
    """The identity for a tensor that is the same on all ranks and that each rank multiplies with its shard. Its
    gradient is therefore the sum of the gradients of all ranks."""

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
            f"shard must be a weft.VocabShard; got a {type(shard).__name__}. Of a process group, "
            "weft.VocabShard.of(group, columns of the whole vocabulary) makes one"
        )
    shard.check(length)


# ---- distributed tensors --------------------------------------------------------------------------------


class _PartialGradients(VocabShard):
    """A shard whose gradients stay partial sums, for DTensor to add up."""

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
        """A tensor that is known not to be None."""
        found = self.tensors[name]
        assert found is not None
        return found

    def placed(self, values: Tensor) -> Tensor:
        """Values of this rank's tokens as a shard of the DTensor of all tokens."""
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
        """The results of this rank's tokens as DTensors, reduced over all tokens as the options say."""
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

    `vocab_dims` says which dimension of each tensor is the vocabulary; the first tensor in it decides how the
    vocabulary is sharded. `token_tensor` names the tensor whose leading dimensions are the tokens. Tensors that are not
    DTensors are taken to be the same on all ranks.
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
