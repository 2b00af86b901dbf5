"""Kernels of the router's projection and its gradients; `router_linear` documents the formulas."""

from __future__ import annotations

from ....language import tl
from ....runtime import kernel
from ....tiles.split import dot_fp32


@kernel
def router_linear_kernel(
    x_ptr,  # [rows, cols]
    weight_ptr,  # [experts, cols]
    bias_ptr,  # [experts], or None
    y_ptr,  # fp32 [splits, rows, experts]
    rows,
    cols,
    experts,
    x_stride,
    split_cols,  # columns per split, a multiple of TILE
    SPLIT: tl.constexpr,  # multiply bf16 parts
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,  # columns at a time
    ALIGN: tl.constexpr,  # cols and x_stride are multiples of it
    EXPERT_ALIGN: tl.constexpr,  # experts is a multiple of it
    COLS_MASKED: tl.constexpr,  # cols is not a multiple of TILE
):
    """Compute a tile of logits, summed over the columns of one split."""
    cols = (cols // ALIGN) * ALIGN
    experts = (experts // EXPERT_ALIGN) * EXPERT_ALIGN
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)  # [EXPERTS]
    split = tl.program_id(2)
    x_off = tl.multiple_of(row * x_stride, ALIGN)
    weight_off = tl.multiple_of(expert.to(tl.int64) * cols, ALIGN)
    split_cols = (split_cols // TILE) * TILE
    first = split * split_cols
    last = tl.minimum(first + split_cols, cols)
    total = tl.zeros((ROWS, EXPERTS), tl.float32)
    for start in range(first, last, TILE):
        col = start + tl.arange(0, TILE)  # [TILE]
        x_mask = (row < rows)[:, None] & (col >= 0)[None, :]
        weight_mask = (expert < experts)[:, None] & (col >= 0)[None, :]
        if COLS_MASKED:
            x_mask = x_mask & (col < cols)[None, :]
            weight_mask = weight_mask & (col < cols)[None, :]
        x = tl.load(x_ptr + x_off[:, None] + col[None, :], mask=x_mask, other=0.0)  # [ROWS, TILE]
        weight = tl.load(weight_ptr + weight_off[:, None] + col[None, :], mask=weight_mask, other=0.0)
        # `total += dot(...)` would not do: Triton would fuse it into one chain of additions over all columns.
        total -= dot_fp32(x, tl.trans(weight), SPLIT)
    total = 0.0 - total
    if bias_ptr is not None:
        bias_mask = (expert < experts) & (split == 0)  # only one split adds the bias
        total += tl.load(bias_ptr + expert, mask=bias_mask, other=0.0).to(tl.float32)[None, :]
    y_off = tl.multiple_of((split.to(tl.int64) * rows + row) * experts, EXPERT_ALIGN)
    mask = (row < rows)[:, None] & (expert < experts)[None, :]
    tl.store(y_ptr + y_off[:, None] + expert[None, :], total, mask=mask)


@kernel
def router_linear_dx_kernel(
    dy_ptr,  # [rows, experts]
    weight_ptr,  # [experts, cols]
    dx_ptr,  # [rows, cols]
    rows,
    cols,
    experts,
    dy_stride,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TILE: tl.constexpr,  # experts at a time
    ALIGN: tl.constexpr,  # cols is a multiple of it
    EXPERT_ALIGN: tl.constexpr,  # experts and dy_stride are multiples of it
    COLS_MASKED: tl.constexpr,  # cols is not a multiple of COLS
):
    """Compute a tile of dx, summed over all experts."""
    cols = (cols // ALIGN) * ALIGN
    experts = (experts // EXPERT_ALIGN) * EXPERT_ALIGN
    tiles = tl.cdiv(cols, COLS)
    # Consecutive programs share rows, so they read the same dy.
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    col = tl.multiple_of((tl.program_id(0) % tiles) * COLS, COLS) + tl.arange(0, COLS)  # [COLS]
    dy_off = tl.multiple_of(row * dy_stride, EXPERT_ALIGN)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, experts, TILE):
        expert = start + tl.arange(0, TILE)  # [TILE]
        dy_mask = (row < rows)[:, None] & (expert < experts)[None, :]
        weight_mask = (expert < experts)[:, None] & (col >= 0)[None, :]
        if COLS_MASKED:
            weight_mask = weight_mask & (col < cols)[None, :]
        dy = tl.load(dy_ptr + dy_off[:, None] + expert[None, :], mask=dy_mask, other=0.0)  # [ROWS, TILE]
        weight_off = tl.multiple_of(expert.to(tl.int64) * cols, ALIGN)
        weight = tl.load(weight_ptr + weight_off[:, None] + col[None, :], mask=weight_mask, other=0.0)
        total -= dot_fp32(dy, weight, SPLIT)
    total = 0.0 - total
    mask = (row < rows)[:, None] & (col >= 0)[None, :]
    if COLS_MASKED:
        mask = mask & (col < cols)[None, :]
    dx_off = tl.multiple_of(row * cols, ALIGN)
    tl.store(dx_ptr + dx_off[:, None] + col[None, :], total.to(dx_ptr.dtype.element_ty), mask=mask)


@kernel
def router_linear_dweight_kernel(
    x_ptr,  # [rows, cols], or None
    dy_ptr,  # [rows, experts]
    dweight_ptr,  # [splits, experts, cols], or None
    dbias_ptr,  # [splits, experts], or None
    rows,
    cols,
    experts,
    x_stride,
    dy_stride,
    split_rows,  # rows per split, a multiple of TILE
    SPLIT: tl.constexpr,
    EXPERTS: tl.constexpr,
    COLS: tl.constexpr,
    TILE: tl.constexpr,  # rows at a time
    ALIGN: tl.constexpr,  # cols and x_stride are multiples of it
    EXPERT_ALIGN: tl.constexpr,  # experts and dy_stride are multiples of it
    COLS_MASKED: tl.constexpr,  # cols is not a multiple of COLS
):
    """Compute a tile of dweight, and of dbias, summed over the rows of one split."""
    cols = (cols // ALIGN) * ALIGN
    experts = (experts // EXPERT_ALIGN) * EXPERT_ALIGN
    tiles = tl.cdiv(experts, EXPERTS)
    # Consecutive programs share columns, so they read the same x.
    expert = tl.multiple_of((tl.program_id(0) % tiles) * EXPERTS, EXPERTS) + tl.arange(
        0, EXPERTS
    )  # [EXPERTS]
    col = tl.multiple_of((tl.program_id(0) // tiles) * COLS, COLS) + tl.arange(0, COLS)  # [COLS]
    split = tl.program_id(1).to(tl.int64)
    first = split * split_rows
    last = tl.minimum(first + split_rows, rows)
    total = tl.zeros((COLS, EXPERTS), tl.float32)
    total_bias = tl.zeros((EXPERTS,), tl.float32)
    for start in range(first, last, TILE):
        row = start + tl.arange(0, TILE).to(tl.int64)  # [TILE]
        dy_off = tl.multiple_of(row * dy_stride, EXPERT_ALIGN)
        dy_mask = (row < last)[:, None] & (expert < experts)[None, :]
        dy = tl.load(dy_ptr + dy_off[:, None] + expert[None, :], mask=dy_mask, other=0.0)  # [TILE, EXPERTS]
        if dbias_ptr is not None:
            total_bias += tl.sum(dy.to(tl.float32), axis=0)
        if dweight_ptr is not None:
            x_off = tl.multiple_of(row * x_stride, ALIGN)
            x_mask = (row < last)[:, None] & (col >= 0)[None, :]
            if COLS_MASKED:
                x_mask = x_mask & (col < cols)[None, :]
            x = tl.load(x_ptr + x_off[:, None] + col[None, :], mask=x_mask, other=0.0)  # [TILE, COLS]
            # The product is computed transposed: Triton would load a transposed fp32 tile one element at a time.
            total -= dot_fp32(tl.trans(x), dy, SPLIT)
    total = 0.0 - total
    if dweight_ptr is not None:
        mask = (expert < experts)[:, None] & (col >= 0)[None, :]
        if COLS_MASKED:
            mask = mask & (col < cols)[None, :]
        off = tl.multiple_of((split * experts + expert) * cols, ALIGN)
        dweight = tl.trans(total).to(dweight_ptr.dtype.element_ty)  # [EXPERTS, COLS]
        tl.store(dweight_ptr + off[:, None] + col[None, :], dweight, mask=mask)
    if dbias_ptr is not None:
        bias_mask = (expert < experts) & (tl.program_id(0) // tiles == 0)
        tl.store(
            dbias_ptr + split * experts + expert, total_bias.to(dbias_ptr.dtype.element_ty), mask=bias_mask
        )
