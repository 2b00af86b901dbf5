"""Device functions that read rows: offsets, masks, and converting loads."""

from __future__ import annotations

from ...language import tl, triton
from ...tiles import decode, decode_e4m3, decode_e8m0, unpack_pairs


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


@triton.jit
def load_decoded(
    codes, global_ptr, row, exist, start, cols, FORMAT: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr,
    COLS_MASKED: tl.constexpr,
):  # fmt: skip
    """Load a tile of a quantized tensor [rows, cols] as fp32 [R, TILE]: q * d, for nvfp4 q * (d * g), and zero in rows
    that do not exist. `codes` has the members of `StridedCodes`; row is int64 [R], exist bool [R]. ALIGN divides cols
    and the stride of a row's elements."""
    PACKED: tl.constexpr = FORMAT.packed
    R: tl.constexpr = row.shape[0]
    byte, width = start, cols
    if PACKED == 2:
        byte, width = start // 2, (cols + 1) // 2
        if ALIGN > 1:  # equal, but in a form that shows the compiler its divisibility
            width = (cols // ALIGN) * (ALIGN // 2)
    byte += tl.arange(0, TILE // PACKED)
    mask = mask_of_rows(exist, byte, width, True, COLS_MASKED)
    data_off = tl.multiple_of(row * codes.stride, ALIGN // PACKED if ALIGN > 1 else 1)
    q = tl.load(codes.data + data_off[:, None] + byte[None, :], mask=mask, other=0).to(tl.uint8, bitcast=True)
    if PACKED == 2:
        q = unpack_pairs(q)
    block = row
    if FORMAT.block_rows == 0:
        block = row * 0
    elif FORMAT.block_rows > 1:
        block = row // FORMAT.block_rows
    scale_off = (block * codes.scale_row_stride)[:, None]
    if FORMAT.group == 0:  # one scale per row or per tensor
        return decode(q, FORMAT) * tl.load(codes.scale + scale_off, mask=exist[:, None], other=0.0)
    else:
        GROUP: tl.constexpr = FORMAT.group
        group = start // GROUP + tl.arange(0, TILE // GROUP)
        inside = exist[:, None] & (group < (cols + GROUP - 1) // GROUP)[None, :]
        group_off = (group.to(tl.int64) * codes.scale_col_stride)[None, :]
        scale = tl.load(codes.scale + scale_off + group_off, mask=inside, other=0)  # [R, TILE // GROUP]
        if FORMAT.block == "mx":
            scale = decode_e8m0(scale)
        elif FORMAT.block == "nvfp4":
            scale = decode_e4m3(scale) * tl.load(global_ptr)
        groups = tl.reshape(decode(q, FORMAT), (R, TILE // GROUP, GROUP))
        return tl.reshape(groups * scale[:, :, None], (R, TILE))
