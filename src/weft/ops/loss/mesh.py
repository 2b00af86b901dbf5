"""Losses of distributed tensors: each rank computes its shard's, and the results are distributed as the tokens are.

A dimension of the mesh shards either tokens or the vocabulary, or replicates; sharded tokens need no communication, a
sharded vocabulary that of `VocabShard`. Gradients are placed without any: along a mesh dimension that shards the
vocabulary, the gradient of hidden is partial; along one that shards tokens, that of a replicated weight is. DTensor
sums them up when they are wanted. No logits are ever moved: what is placed otherwise is refused, not gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .losses import reduced, shares_of
from .vocabulary import VocabShard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


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


def _refuse(name: str, placements: Any, why: str) -> ValueError:
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
                raise _refuse(leader, columns.placements, "one dimension of a mesh can shard the vocabulary")
            shard = _PartialGradients.of(mesh.get_group(dim), columns.shape[vocab_dim])
            tokens.append(Replicate())
        elif columns is not rows and not of_columns.is_replicate():
            raise _refuse(leader, columns.placements, "redistribute it to Shard(0) or Replicate()")
        elif type(of_rows) is Shard and of_rows.dim % rows.ndim < rows.ndim - 1:
            tokens.append(Shard(of_rows.dim % rows.ndim))
        elif of_rows.is_replicate():
            tokens.append(Replicate())
        else:
            raise _refuse(
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


def logprobs_over_mesh(function: Callable[..., Any], local: Local, **options: Any) -> Any:
    """`linear_logprobs` of this rank's part, its results as DTensors."""
    found = function(**local.tensors, target=local.target, shard=local.shard, **options)
    if isinstance(found, Tensor):
        return local.placed(found)
    return type(found)(*(None if value is None else local.placed(value) for value in found))


def loss_over_mesh(
    function: Callable[..., Any], local: Local, vocab: int, ignore_index: int, reduction: str, all_ignored: str,
    **options: Any,
) -> Any:  # fmt: skip
    """`cross_entropy` or `linear_cross_entropy` of this rank's part, its results as DTensors."""
    found = function(
        **local.tensors, target=local.target, shard=local.shard, ignore_index=ignore_index, reduction="none", **options
    )  # fmt: skip
    loss = found if isinstance(found, Tensor) else found.loss
    share, valid = shares_of(local.target, local.tensors["class_weight"], vocab, ignore_index, loss.dtype)

    def over_tokens(values: Tensor, counted: Tensor) -> Tensor:
        if reduction == "none":
            return local.placed(values)
        return reduced(values, counted, reduction, all_ignored, local.total)

    loss = over_tokens(loss, share)
    if isinstance(found, Tensor):
        return loss
    return found._replace(
        loss=loss,
        lse=None if found.lse is None else local.placed(found.lse),
        entropy=None if found.entropy is None else local.placed(found.entropy),
        accuracy=None if found.accuracy is None else over_tokens(found.accuracy, valid.to(loss.dtype)),
    )
