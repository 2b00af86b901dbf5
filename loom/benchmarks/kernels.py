"""The kernels that bench.py measures, each with its wrapper and the equivalent PyTorch.

They are written as for a GPU: a program per row, per few rows or per tile, with float32 arithmetic inside and
one rounding at the end. Only the block sizes are chosen for a CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

E4M3_MAX = 448.0


# ---- RMSNorm and 1x128 FP8 quantization, one pass ------------------------------------------------------


@triton.jit
def rms_norm_quant_kernel(
    x_ptr, weight_ptr, out_ptr, scale_ptr, eps, COLS: tl.constexpr, GROUP: tl.constexpr
):
    """Store y = x * rsqrt(mean(x^2) + eps) * weight as e4m3 codes of y * (448 / amax), and scales amax / 448;
    amax is the largest |y| of each GROUP neighbors."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, COLS)
    x = tl.load(x_ptr + row * COLS + cols).to(tl.float32)  # [COLS]
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / COLS + eps)
    y = x * rstd * tl.load(weight_ptr + cols).to(tl.float32)
    y = tl.reshape(y, (COLS // GROUP, GROUP))
    amax = tl.max(tl.abs(y), axis=1)  # [COLS // GROUP]
    codes = (y * (448.0 / amax)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * COLS + cols, tl.reshape(codes, (COLS,)))
    groups = tl.arange(0, COLS // GROUP)
    tl.store(scale_ptr + row * (COLS // GROUP) + groups, amax / 448.0)


def rms_norm_quant(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = x.shape
    out = torch.empty((rows, cols), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((rows, cols // 128), dtype=torch.float32, device=x.device)
    rms_norm_quant_kernel[(rows,)](x, weight, out, scale, eps, COLS=cols, GROUP=128)
    return out, scale


def rms_norm_quant_torch(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    x32 = x.float()
    y = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()
    groups = y.unflatten(-1, (-1, 128))
    amax = groups.abs().amax(-1)
    codes = (groups * (E4M3_MAX / amax)[..., None]).flatten(-2).to(torch.float8_e4m3fn)
    return codes, amax / E4M3_MAX


# ---- row softmax ---------------------------------------------------------------------------------------


@triton.jit
def softmax_kernel(x_ptr, out_ptr, n_cols, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * row_stride + cols, mask=mask, other=-float("inf"))  # [BLOCK]
    numerator = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * row_stride + cols, numerator / tl.sum(numerator, axis=0), mask=mask)


def softmax(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    softmax_kernel[(x.shape[0],)](x, out, x.shape[1], x.stride(0), BLOCK=triton.next_power_of_2(x.shape[1]))
    return out


def softmax_torch(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, dim=-1)


# ---- layer norm, forward and backward ------------------------------------------------------------------


@triton.jit
def layer_norm_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, n_cols, eps, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK]
    mean = tl.sum(x, axis=0) / n_cols
    centered = tl.where(mask, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centered * centered, axis=0) / n_cols + eps)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * n_cols + cols, centered * rstd * weight + bias, mask=mask)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def layer_norm_bwd_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dweight_partial_ptr,
    dbias_partial_ptr,
    n_rows,
    n_cols,
    rows_per_program,
    BLOCK: tl.constexpr,
):
    """Compute dx of a few neighboring rows, and their share of dweight and dbias in float32 partials that no
    other program touches, so that the order of the programs does not affect the bits."""
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK]
    dweight = tl.zeros([BLOCK], dtype=tl.float32)
    dbias = tl.zeros([BLOCK], dtype=tl.float32)
    first = program * rows_per_program
    for row in range(first, tl.minimum(first + rows_per_program, n_rows)):
        offsets = row.to(tl.int64) * n_cols + cols
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row)
        rstd = tl.load(rstd_ptr + row)
        xhat = tl.where(mask, (x - mean) * rstd, 0.0)
        wdy = weight * dy
        c1 = tl.sum(xhat * wdy, axis=0) / n_cols
        c2 = tl.sum(wdy, axis=0) / n_cols
        tl.store(dx_ptr + offsets, (wdy - (xhat * c1 + c2)) * rstd, mask=mask)
        dweight += dy * xhat
        dbias += dy
    tl.store(dweight_partial_ptr + program * n_cols + cols, dweight, mask=mask)
    tl.store(dbias_partial_ptr + program * n_cols + cols, dbias, mask=mask)


@triton.jit
def column_sum_kernel(partial_ptr, out_ptr, n_rows, n_cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([ROWS, COLS], dtype=tl.float32)
    for start in range(0, n_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows[:, None] < n_rows) & (cols[None, :] < n_cols)
        total += tl.load(partial_ptr + rows[:, None] * n_cols + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, axis=0), mask=cols < n_cols)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        rows, cols = x.shape
        y = torch.empty_like(x)
        mean = torch.empty(rows, dtype=torch.float32, device=x.device)
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(cols)
        layer_norm_fwd_kernel[(rows,)](x, weight, bias, y, mean, rstd, cols, eps, BLOCK=block)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, mean, rstd = ctx.saved_tensors
        rows, cols = x.shape
        rows_per_program = 64
        programs = triton.cdiv(rows, rows_per_program)
        dx = torch.empty_like(x)
        partials = torch.empty((2, programs, cols), dtype=torch.float32, device=x.device)
        layer_norm_bwd_kernel[(programs,)](
            dy,
            x,
            weight,
            mean,
            rstd,
            dx,
            partials[0],
            partials[1],
            rows,
            cols,
            rows_per_program,
            BLOCK=triton.next_power_of_2(cols),
        )
        gradients = torch.empty((2, cols), dtype=weight.dtype, device=x.device)
        for partial, gradient in zip(partials, gradients, strict=True):
            column_sum_kernel[(triton.cdiv(cols, 256),)](partial, gradient, programs, cols, ROWS=8, COLS=256)
        return dx, gradients[0], gradients[1], None


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return _LayerNorm.apply(x, weight, bias, eps)


def layer_norm_torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


# ---- cross entropy, online -----------------------------------------------------------------------------


@triton.jit
def cross_entropy_kernel(logits_ptr, label_ptr, loss_ptr, n_cols, row_stride, BLOCK: tl.constexpr):
    """Compute the loss in one pass over the vocabulary: the running sum is relative to the running max m."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    m = -float("inf")
    total = 0.0
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)  # [BLOCK]
        m_new = tl.maximum(m, tl.max(x, axis=0))
        total = total * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new), axis=0)
        m = m_new
    label = tl.load(label_ptr + row)
    tl.store(loss_ptr + row, m + tl.log(total) - tl.load(logits_ptr + label).to(tl.float32))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    rows, cols = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    cross_entropy_kernel[(rows,)](logits, labels, loss, cols, logits.stride(0), BLOCK=4096)
    return loss


def cross_entropy_torch(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


# ---- matmul --------------------------------------------------------------------------------------------


@triton.jit
def matmul_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_in_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    first_m = pid // tiles_in_group * GROUP_M
    group_rows = min(tiles_m - first_m, GROUP_M)
    tile_m = first_m + (pid % tiles_in_group) % group_rows
    tile_n = (pid % tiles_in_group) // group_rows

    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + (rows[:, None] % M) * stride_am + ks[None, :] * stride_ak  # [BLOCK_M, BLOCK_K]
    b_ptrs = b_ptr + ks[:, None] * stride_bk + (cols[None, :] % N) * stride_bn  # [BLOCK_K, BLOCK_N]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACCUMULATOR)
    for step in range(tl.cdiv(K, BLOCK_K)):
        k_left = K - step * BLOCK_K
        a = tl.load(a_ptrs, mask=ks[None, :] < k_left, other=0.0)
        b = tl.load(b_ptrs, mask=ks[:, None] < k_left, other=0.0)
        acc = tl.dot(a, b, acc, out_dtype=ACCUMULATOR)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    c_ptrs = c_ptr + rows[:, None] * stride_cm + cols[None, :] * stride_cn
    c = acc.to(c_ptr.dtype.element_ty)
    tl.store(c_ptrs, c, mask=(rows[:, None] < M) & (cols[None, :] < N))


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    M, K = a.shape
    N = b.shape[1]
    integers = a.dtype == torch.int8
    c = torch.empty((M, N), dtype=torch.int32 if integers else a.dtype, device=a.device)
    block_m, block_n, block_k = (128, 128, 128) if integers else (64, 64, 64)
    grid = (triton.cdiv(M, block_m) * triton.cdiv(N, block_n),)
    matmul_kernel[grid](
        a,
        b,
        c,
        M,
        N,
        K,
        *a.stride(),
        *b.stride(),
        *c.stride(),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP_M=8,
        ACCUMULATOR=tl.int32 if integers else tl.float32,
    )
    return c


# ---- sort ----------------------------------------------------------------------------------------------


@triton.jit
def sort_kernel(x_ptr, out_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    offsets = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]  # [ROWS, COLS]
    tl.store(out_ptr + offsets, tl.sort(tl.load(x_ptr + offsets)))


def sort(x: torch.Tensor) -> torch.Tensor:
    """Sort all rows in one program, like a tile of a larger kernel."""
    out = torch.empty_like(x)
    sort_kernel[(1,)](x, out, ROWS=x.shape[0], COLS=x.shape[1])
    return out


# ---- vector add, and a kernel that does almost nothing -------------------------------------------------


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 4096),)](x, y, out, x.numel(), BLOCK=4096)
    return out


@triton.jit
def one_program_kernel(x_ptr, out_ptr, n_elements):
    tl.store(out_ptr, tl.load(x_ptr) + n_elements)
