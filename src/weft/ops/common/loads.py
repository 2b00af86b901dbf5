"""How kernels read rows: offsets, masks, and loads that convert."""

from __future__ import annotations

from ...language import tl, triton


@triton.jit
def row_offset(row, inner, outer_stride, inner_stride, NESTED: tl.constexpr, ALIGN: tl.constexpr):
    if NESTED:
        return tl.multiple_of((row // inner) * outer_stride + (row % inner) * inner_stride, ALIGN)
    else:
        return tl.multiple_of(row * outer_stride, ALIGN)


@triton.jit
def tile_mask(row, col, rows, cols, ROWS_MASKED: tl.constexpr, COLS_MASKED: tl.constexpr):
    """Which elements of a tile exist: row [R] and col [C] -> [R, C], or None when all do."""
    return mask_of_rows(row < rows, col, cols, ROWS_MASKED, COLS_MASKED)


@triton.jit
def mask_of_rows(exist, col, cols, ROWS_MASKED: tl.constexpr, COLS_MASKED: tl.constexpr):
    """Which elements of a tile exist, like `tile_mask`, given which of its rows exist, bool [R]."""
    if ROWS_MASKED and COLS_MASKED:
        return exist[:, None] & (col < cols)[None, :]
    elif ROWS_MASKED:
        return exist[:, None] & (col >= 0)[None, :]
    elif COLS_MASKED:
        return (exist | True)[:, None] & (col < cols)[None, :]
    else:
        return None


@triton.jit
def load_stored(ptr, mask):
    """A tile as it is stored, zero where it does not exist."""
    if mask is None:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=mask, other=0.0)


@triton.jit
def load_tile(ptr, mask):
    """A tile as fp32, zero where it does not exist."""
    return load_stored(ptr, mask).to(tl.float32)


@triton.jit
def round_to_dtype(value, ptr):
    """fp32 numbers, rounded to the dtype that ptr points to."""
    return value.to(ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def round_promoted(value, ptr, other_ptr):
    """fp32 numbers, rounded to the dtype to which PyTorch promotes the two that are pointed to: two different ones to
    fp32. The second pointer may be None."""
    if other_ptr is None or other_ptr.dtype.element_ty == ptr.dtype.element_ty:
        return round_to_dtype(value, ptr)
    else:
        return value


@triton.jit
def load_vector(ptr, col, cols, COLS_MASKED: tl.constexpr):
    """A piece of a vector of length cols as a row [1, C], in fp32."""
    if COLS_MASKED:
        return tl.load(ptr + col[None, :], mask=(col < cols)[None, :], other=0.0).to(tl.float32)
    else:
        return tl.load(ptr + col[None, :]).to(tl.float32)
