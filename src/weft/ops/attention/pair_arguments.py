"""Arguments of attention that concern pairs of a query and a key: masks, biases and slopes of ALiBi."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from ..common.checks import FLOATS, check_tensor, dtypes_beside, no_tensor
from ..common.heads import LAYOUTS
from ..common.rows import compute_dtype
from .arguments import AttentionArgs, AttentionBackwardArgs

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

PairMask: TypeAlias = "Tensor | BlockMask"


def check_terms(a: AttentionArgs | AttentionBackwardArgs) -> None:
    """Check the mask, the bias and the slopes, which kernels read by pairs and by heads."""
    batch, sequence, heads, _ = LAYOUTS[a.layout]
    shape, device, dtype = a.query.shape, a.query.device, a.query.dtype
    for name, x, dtypes in (("mask", a.seen, (torch.bool,)), ("bias", a.bias, dtypes_beside(dtype))):
        if x is None:
            continue
        check_tensor(name, x, dtypes, device)
        if a.layout == "thd":
            raise ValueError(
                f"{name} is for sequences in a batch, and cu_seqlens packs them. Pass kv_limits, prefix_lengths or "
                "alibi, which packed sequences may have, or a batch with kv_lengths"
            )
        pairs = shape[batch], shape[heads], shape[sequence], a.key.shape[sequence]
        sizes = tuple(x.shape)
        if len(sizes) != 4 or any(size not in (1, all_) for size, all_ in zip(sizes, pairs, strict=True)):
            raise ValueError(
                f"{name} must be broadcastable to [batch, heads, queries, keys] = {list(pairs)}; got {list(sizes)}"
            )
    if a.alibi is not None:
        check_tensor("alibi", a.alibi, (compute_dtype(a.query),), device, (shape[heads], 2))


def _with_all_dims(x: Tensor) -> Tensor:
    """Return x with leading dimensions of size 1, four in all."""
    return x[(None,) * max(4 - x.dim(), 0)]


def seen_pairs(mask: PairMask, query: Tensor, key: Tensor, layout: str) -> Tensor:
    """Return a mask as a boolean tensor of four dimensions."""
    if isinstance(mask, Tensor):
        if mask.is_floating_point():
            raise ValueError(
                f"mask must be bool, True where a query sees a key; got {mask.dtype}. Pass numbers that are added to "
                "scores as bias="
            )
        if mask.dtype != torch.bool:
            raise ValueError(
                f"mask must be bool, True where a query sees a key; got {mask.dtype}. Pass mask != 0"
            )
        check_tensor("mask", mask, (torch.bool,), query.device)
        return _with_all_dims(mask)
    if not hasattr(mask, "kv_num_blocks"):
        raise no_tensor(
            "mask", mask, "Pass a bool tensor, or a BlockMask of torch.nn.attention.flex_attention"
        )
    return _seen_in(mask, query, key, layout)


def bias_of(bias: Tensor, query: Tensor) -> Tensor:
    """Return a bias as a tensor of four dimensions."""
    check_tensor("bias", bias, dtypes_beside(query.dtype), query.device)
    return _with_all_dims(bias)


def slopes_of(alibi: Tensor, query: Tensor) -> Tensor:
    """Return slopes as [heads, 2]: for keys before a query's own key, and for keys after it."""
    check_tensor("alibi", alibi, FLOATS, query.device)
    if alibi.dim() == 1:
        alibi = alibi[:, None].expand(-1, 2)
    return alibi.to(compute_dtype(query))


# ---- FlexAttention's masks --------------------------------------------------------------------------------


def _seen_in(mask: BlockMask, query: Tensor, key: Tensor, layout: str) -> Tensor:
    """Return which pairs a `BlockMask` shows: all pairs of its full blocks, and those pairs of its partial blocks that
    its `mask_mod` shows. Evaluates `mask_mod` for all pairs."""
    from torch.nn.attention.flex_attention import create_mask

    sequence = LAYOUTS[layout][1]
    queries, keys = query.shape[sequence], key.shape[sequence]
    if tuple(mask.seq_lengths) != (queries, keys):
        raise ValueError(
            f"mask is a BlockMask for {mask.seq_lengths[0]} queries and {mask.seq_lengths[1]} keys; the call has "
            f"{queries} and {keys}. Create one for these, or slice it with BlockMask._adjust"
        )
    number, index = mask.kv_num_blocks, mask.kv_indices
    if number.device != query.device:
        raise ValueError(f"mask must be on {query.device} like the other tensors; it is on {number.device}")
    number, index = number[(None,) * (3 - number.dim())], index[(None,) * (4 - index.dim())]
    batch, heads, rows = number.shape
    q_block, k_block = mask.BLOCK_SIZE
    if rows * q_block < queries:
        raise ValueError(
            f"mask is a BlockMask with {rows} rows of {q_block} queries; the call has {queries}. Create one for these"
        )
    columns = -(-keys // k_block)

    def listed(number: Tensor, index: Tensor) -> Tensor:
        """Return the pairs of listed blocks, bool [batch, heads, queries, keys]."""
        exists = torch.arange(index.shape[-1], device=index.device) < number[..., None]
        column = torch.where(exists, index, columns).clamp(0, columns).long()
        blocks = torch.zeros(batch, heads, rows, columns + 1, dtype=torch.bool, device=index.device)
        blocks = blocks.scatter(-1, column, True)[..., :columns]
        blocks = blocks.repeat_interleave(q_block, 2)[:, :, :queries]
        return blocks.repeat_interleave(k_block, 3)[..., :keys]

    shown = create_mask(mask.mask_mod, batch, heads, queries, keys, query.device)
    seen = listed(number, index) & shown
    full, full_index = mask.full_kv_num_blocks, mask.full_kv_indices
    if full is not None and full_index is not None:
        seen = seen | listed(full[(None,) * (3 - full.dim())], full_index[(None,) * (4 - full_index.dim())])
    return seen
