"""Layer normalization with its backward pass.

Forward, for each row of N features:

    mean = sum(x) / N        var = sum((x - mean)^2) / N        rstd = 1 / sqrt(var + eps)
    xhat = (x - mean) * rstd        y = xhat * w + b

Backward. Every feature of x also affects its row's mean and variance, hence the two projections c1 and c2;
w and b are shared by all rows, hence the sums:

    c1 = sum(xhat * w * dy) / N        c2 = sum(w * dy) / N
    dx = (w * dy - xhat * c1 - c2) * rstd        dw = sum_rows(dy * xhat)        db = sum_rows(dy)

The sums over rows take two steps. Row r adds its contribution to buffer r % GROUP_SIZE_M of a few partial
sums; a lock per buffer (acquired by compare-and-swap, released by exchange) lets one program at a time read,
add and write. A second kernel adds the buffers. The programs of a group may arrive in any order, so the last
bits of dw and db depend on that order if programs really run in parallel.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def layer_norm_fwd_kernel(
    x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, row_stride, N, eps, BLOCK_SIZE: tl.constexpr
):
    row = tl.program_id(0)
    x_ptr += row * row_stride
    y_ptr += row * row_stride

    total = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for start in range(0, N, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        total += tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / N

    squares = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for start in range(0, N, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        # The spare lanes would each add mean^2.
        centered = tl.where(cols < N, x - mean, 0.0)
        squares += centered * centered
    rstd = 1 / tl.sqrt(tl.sum(squares, axis=0) / N + eps)

    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, N, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        mask = cols < N
        w = tl.load(w_ptr + cols, mask=mask)
        b = tl.load(b_ptr + cols, mask=mask)
        x = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + cols, (x - mean) * rstd * w + b, mask=mask)


@triton.jit
def layer_norm_bwd_dx_kernel(
    dx_ptr,
    dy_ptr,
    dw_partial_ptr,
    db_partial_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    lock_ptr,
    row_stride,
    N,
    GROUP_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_SIZE_N)  # [BLOCK_SIZE_N], the whole row
    mask = cols < N
    x_ptr += row * row_stride
    dy_ptr += row * row_stride
    dx_ptr += row * row_stride
    x = tl.load(x_ptr + cols, mask=mask, other=0).to(tl.float32)
    dy = tl.load(dy_ptr + cols, mask=mask, other=0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=mask).to(tl.float32)
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)

    xhat = tl.where(mask, (x - mean) * rstd, 0.0)
    wdy = tl.where(mask, w * dy, 0.0)
    c1 = tl.sum(xhat * wdy, axis=0) / N
    c2 = tl.sum(wdy, axis=0) / N
    tl.store(dx_ptr + cols, (wdy - (xhat * c1 + c2)) * rstd, mask=mask)

    group = row % GROUP_SIZE_M
    lock_ptr += group
    filled_ptr = lock_ptr + GROUP_SIZE_M
    dw_partial_ptr += group * N + cols
    db_partial_ptr += group * N + cols
    dw = dy * xhat
    db = dy
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    # The first to arrive writes, the others add: the buffers need no zeroing beforehand.
    if tl.load(filled_ptr) == 0:
        tl.atomic_xchg(filled_ptr, 1)
    else:
        dw += tl.load(dw_partial_ptr, mask=mask)
        db += tl.load(db_partial_ptr, mask=mask)
    tl.store(dw_partial_ptr, dw, mask=mask)
    tl.store(db_partial_ptr, db, mask=mask)
    # All lanes must have stored before the next program may read.
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


@triton.jit
def layer_norm_bwd_dwdb_kernel(
    dw_partial_ptr,
    db_partial_ptr,
    dw_ptr,
    db_ptr,
    n_partials,
    N,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
):
    cols = tl.program_id(0) * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    dw = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    db = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for start in range(0, n_partials, BLOCK_SIZE_M):
        rows = start + tl.arange(0, BLOCK_SIZE_M)
        mask = (rows[:, None] < n_partials) & (cols[None, :] < N)
        offsets = rows[:, None] * N + cols[None, :]
        dw += tl.load(dw_partial_ptr + offsets, mask=mask, other=0.0)
        db += tl.load(db_partial_ptr + offsets, mask=mask, other=0.0)
    tl.store(dw_ptr + cols, tl.sum(dw, axis=0), mask=cols < N)
    tl.store(db_ptr + cols, tl.sum(db, axis=0), mask=cols < N)


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        rows = x.reshape(-1, x.shape[-1])
        M, N = rows.shape
        y = torch.empty_like(x)
        mean = torch.empty(M, dtype=torch.float32, device=x.device)
        rstd = torch.empty(M, dtype=torch.float32, device=x.device)
        block_size = min(1024, triton.next_power_of_2(N))
        layer_norm_fwd_kernel[(M,)](
            rows, y, weight, bias, mean, rstd, rows.stride(0), N, eps, BLOCK_SIZE=block_size
        )
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, mean, rstd = ctx.saved_tensors
        dy = dy.contiguous()
        rows = x.reshape(-1, x.shape[-1])
        M, N = rows.shape
        group_size = 256 if N <= 1024 else 128 if N <= 4096 else 96 if N <= 8192 else 64
        group_size = min(group_size, triton.next_power_of_2(M))
        locks = torch.zeros(2 * group_size, dtype=torch.int32, device=x.device)
        dw_partial = torch.empty((group_size, N), dtype=torch.float32, device=x.device)
        db_partial = torch.empty((group_size, N), dtype=torch.float32, device=x.device)
        dx = torch.empty_like(dy)
        dw = torch.empty_like(weight)
        db = torch.empty_like(weight)
        layer_norm_bwd_dx_kernel[(M,)](
            dx,
            dy,
            dw_partial,
            db_partial,
            rows,
            weight,
            mean,
            rstd,
            locks,
            rows.stride(0),
            N,
            GROUP_SIZE_M=group_size,
            BLOCK_SIZE_N=triton.next_power_of_2(N),
        )

        def grid(meta):
            return (triton.cdiv(N, meta["BLOCK_SIZE_N"]),)

        layer_norm_bwd_dwdb_kernel[grid](
            dw_partial, db_partial, dw, db, min(group_size, M), N, BLOCK_SIZE_M=32, BLOCK_SIZE_N=128
        )
        return dx, dw, db, None


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Return the layer normalization over the last dimension of a contiguous x; differentiable."""
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    return LayerNorm.apply(x, weight, bias, eps)


def main() -> None:
    device = triton.runtime.driver.active.get_active_torch_device()
    torch.manual_seed(0)
    x = (torch.randn(1151, 1000, device=device) * 0.5 - 2.3).requires_grad_()
    weight = torch.rand(1000, device=device).requires_grad_()
    bias = torch.rand(1000, device=device).requires_grad_()
    dy = 0.1 * torch.randn(1151, 1000, device=device)
    inputs = (x, weight, bias)

    y = layer_norm(*inputs)
    y_torch = torch.nn.functional.layer_norm(x, (1000,), weight, bias, 1e-5)
    pairs = [(y, y_torch)]
    pairs += zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(y_torch, inputs, dy), strict=True)
    error = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    print(f"layer norm, forward and backward: max error {error:.2e}")
    assert error < 1e-4


if __name__ == "__main__":
    main()
