"""Device functions that read rows: offsets, masks, and converting loads."""

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
    """Return the mask [R, C] of a tile's existing elements, from row [R] and col [C]; None if all exist."""
    return mask_of_rows(row < rows, col, cols, ROWS_MASKED, COLS_MASKED)


@triton.jit
def mask_of_rows(exist, col, cols, ROWS_MASKED: tl.constexpr, COLS_MASKED: tl.constexpr):
    """Return the mask of a tile as in `tile_mask`, from the mask of its rows, bool [R]."""
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
    """Load a tile in its own dtype, zero where it is masked."""
    if mask is None:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=mask, other=0.0)


@triton.jit
def load_tile(ptr, mask):
    """Load a tile as fp32, zero where it is masked."""
    return load_stored(ptr, mask).to(tl.float32)


@triton.jit
def round_to_dtype(value, ptr):
    """Round fp32 values to the dtype that ptr points to; return fp32."""
    return value.to(ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def round_promoted(value, ptr, other_ptr):
    """Round fp32 values to the dtype to which PyTorch promotes those of the two pointers; return fp32. Two different
    dtypes promote to fp32. `other_ptr` may be None."""
    if other_ptr is None or other_ptr.dtype.element_ty == ptr.dtype.element_ty:
        return round_to_dtype(value, ptr)
    else:
        return value


@triton.jit
def load_vector(ptr, col, cols, COLS_MASKED: tl.constexpr):
    """Load the elements `col` of a vector of length cols as a row [1, C] in fp32."""
    if COLS_MASKED:
        return tl.load(ptr + col[None, :], mask=(col < cols)[None, :], other=0.0).to(tl.float32)
    else:
        return tl.load(ptr + col[None, :]).to(tl.float32)
