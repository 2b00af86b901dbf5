"""PyTorch reference of the multi-tensor ops."""

from __future__ import annotations

import torch

from ...runtime import Nothing
from .arguments import ORDERS, ClipArgs, ReduceArgs, ReduceOutputs, allocate_reduce
from .gradients import check_strided
from .table import check_writable, is_dense


def multi_tensor_reduce_reference(a: ReduceArgs) -> ReduceOutputs:
    """Reduce in float64 what the kernels reduce in fp32."""
    check_strided(a.tensors)
    total = allocate_reduce(a).total
    parts = [t for t in a.tensors if t.numel()]
    if not parts:
        return ReduceOutputs(total.zero_())
    if a.what == "zeros":
        return ReduceOutputs(torch.stack([t.numel() - t.count_nonzero() for t in parts]).sum())
    if a.what == "nonfinite":
        return ReduceOutputs(torch.stack([~t.isfinite().all() for t in parts]).any())
    order = ORDERS[a.what]
    norms = [torch.linalg.vector_norm(t, order, dtype=torch.float64) for t in parts]
    return ReduceOutputs(torch.linalg.vector_norm(torch.stack(norms), order).to(total.dtype))


def multi_tensor_clip_reference(a: ClipArgs) -> Nothing:
    """Clip in place; a coefficient of 1 changes nothing."""
    check_writable(a.tensors)
    coefficient = torch.full_like(a.norm, a.max_norm).div(a.norm + 1e-6).clamp(max=1.0)
    # All are read before any is written, so that elements shared by slices are scaled once.
    sources = [t if is_dense(t) else t.contiguous() for t in a.tensors]
    for t, source in zip(a.tensors, sources, strict=True):
        t.copy_(source.to(torch.promote_types(t.dtype, a.norm.dtype)) * coefficient)
    return Nothing()
