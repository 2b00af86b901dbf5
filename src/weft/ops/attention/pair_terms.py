"""Host side of masks, biases and ALiBi: their layouts, the lists of visited blocks, and the gradient of a bias."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime import scratch
from ..common.heads import LAYOUTS, contiguous_heads
from ..common.rows import align_of
from ..common.sums import sum_partials
from .arguments import AttentionArgs, AttentionBackwardArgs, Packed
from .configs import AttentionConfig, PairForm
from .pieces import Heads

Sizes = tuple[int, ...]


def pair_form(strides: Sizes, keys: int, itemsize: int) -> PairForm:
    """Return the layout of pairs with these strides [batch, heads, queries, keys]."""
    if strides[3] != 1:
        return PairForm(0, 1)
    return PairForm(1, align_of(keys, *strides[:3], least=16 // itemsize))


class TermTensors(NamedTuple):
    """Mask, bias and slopes as kernels read them: [batch, heads, queries, keys], with stride 0 or 1 along keys."""

    mask: Tensor | None  # uint8
    bias: Tensor | None
    slopes: Tensor | None

    @staticmethod
    def of(a: AttentionArgs | AttentionBackwardArgs) -> TermTensors:
        batch, sequence, heads, _ = LAYOUTS[a.layout]
        query, keys = a.query.shape, a.key.shape[sequence]
        shape = (query[batch], query[heads], query[sequence], keys)

        def as_read(x: Tensor) -> Tensor:
            return (x if x.stride(-1) == 0 else contiguous_heads(x)).expand(shape)

        seen = None if a.seen is None else as_read(a.seen.view(torch.uint8))
        bias = None if a.bias is None else as_read(a.bias)
        return TermTensors(seen, bias, None if a.alibi is None else a.alibi.contiguous())


class TermForms(NamedTuple):
    """Properties of the mask and the terms of scores that a launch depends on."""

    mask: Sizes | None = None  # strides
    bias: Sizes | None = None
    bias_itemsize: int = 0
    sloped: bool = False
    own_bounds: bool = False  # sequences or queries have bounds besides the band

    @staticmethod
    def of(t: TermTensors, packed: Packed) -> TermForms:
        return TermForms(
            None if t.mask is None else t.mask.stride(),
            None if t.bias is None else t.bias.stride(),
            0 if t.bias is None else t.bias.itemsize,
            t.slopes is not None,
            packed.limited or packed.kv_lengths is not None,
        )

    def in_tile(self, keys: int) -> dict[str, Any]:
        """Return the members of `AttentionTile` for calls with this number of keys."""
        return {
            "mask": None if self.mask is None else pair_form(self.mask, keys, 1),
            "bias": None if self.bias is None else pair_form(self.bias, keys, self.bias_itemsize),
            "sloped": self.sloped,
        }

    def integers(self, lists: Lists) -> tuple[Sizes, Sizes, Sizes]:
        """Return the integers of `Terms`."""
        mask, bias = ((0, 0, 0) if strides is None else strides[:3] for strides in (self.mask, self.bias))
        return mask, lists.integers(), bias


class Lists(NamedTuple):
    """Sizes of the lists of visited blocks."""

    per_batch: int  # 1 if each sequence has lists of its own, else 0
    per_head: int  # 1 if heads have lists of their own, else 0
    room: int  # entries of a list
    tiles: int  # number of lists
    tokens: int  # tokens that a list covers

    @staticmethod
    def of(
        of_keys: bool,
        terms: TermForms,
        batch: int,
        queries: int,
        keys: int,
        heads: Heads,
        config: AttentionConfig,
    ) -> Lists:
        """Return the sizes of lists for tiles of keys or of queries."""
        assert terms.mask is not None
        per_batch, per_head = int(terms.mask[0] != 0 or terms.own_bounds), int(terms.mask[1] != 0)
        if of_keys:
            rows, row, tokens, block, number = keys, config.n, queries, config.m, heads.q // heads.group
        else:
            rows, row, tokens, block, number = queries, config.m, keys, config.n, heads.q
        each = heads.group if of_keys and per_head else 1
        tiles = (batch if per_batch else 1) * (number if per_head else 1) * -(-rows // row)
        return Lists(per_batch, per_head, each * -(-tokens // block), tiles, each * tokens)

    def integers(self) -> tuple[int, int, int]:
        """Return the integers of `Blocks`."""
        return self[:3]

    def allocate(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tensors of `Blocks`, uninitialized."""
        entries = scratch((self.tiles * self.room,), torch.int32, device)
        counts = scratch((self.tiles,), torch.int32, device)
        used = scratch((self.tiles * self.tokens,), torch.uint8, device)
        return entries, counts, used


NO_LISTS = Lists(0, 0, 0, 0, 0)


# ---- the gradient of a bias -----------------------------------------------------------------------------


def score_gradients(dbias: Tensor, shape: Sizes, all_visited: bool) -> Tensor:
    """Return a tensor of all pairs for gradients of scores: the gradient of the bias itself if it has an element for
    each pair, else one in fp32, to be summed. It holds zeros unless kernels visit all pairs."""
    if dbias.shape == shape:
        pairs = dbias
    else:
        pairs = scratch(shape, torch.float32, dbias.device)
    return pairs if all_visited else pairs.zero_()


def sum_pairs(pairs: Tensor, dbias: Tensor) -> None:
    """Sum the gradients of scores over each dimension in which the bias broadcasts, in order, and round once."""
    if not pairs.numel():
        dbias.zero_()
        return
    summed = [dim for dim in range(4) if pairs.shape[dim] != dbias.shape[dim]]
    shape = list(pairs.shape)
    for dim in summed:
        last = dim == summed[-1]
        count, shape[dim] = shape[dim], 1
        out = dbias if last else scratch(tuple(shape), torch.float32, pairs.device)
        sum_partials(pairs.view(-1, count, math.prod(shape[dim + 1 :])), out, count)
        pairs = out
