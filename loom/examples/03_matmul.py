"""Matrix multiplication, tile by tile, with programs ordered for cache reuse.

    c[m, n] = activation(sum_k a[m, k] * b[k, n])

A program computes one BLOCK_SIZE_M x BLOCK_SIZE_N tile of c. It loops over k in steps of BLOCK_SIZE_K, advances
its two blocks of pointers by one step each time, and accumulates in float32.

Ordering: neighboring programs run at about the same time, so they should need the same data. Launched row by
row, a wave of programs reads all of b for one strip of a. Launched in groups of GROUP_SIZE_M tile rows, column
by column inside the group, the same number of programs covers a squarer part of c and reads less:

    row by row   0 1 2 3      grouped by 2   0 2 4 6
                 4 5 6 7                     1 3 5 7

Edges: rows and columns past the end wrap around (`% M`, `% N`), so that their loads need no mask; their
results are never stored. Only k needs a mask, because its tail enters the sum.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def leaky_relu(x):
    return tl.where(x >= 0, x, 0.01 * x)


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
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    pid = tl.program_id(axis=0)
    tiles_m = tl.cdiv(M, BLOCK_SIZE_M)
    tiles_n = tl.cdiv(N, BLOCK_SIZE_N)
    tiles_in_group = GROUP_SIZE_M * tiles_n
    group = pid // tiles_in_group
    first_tile_m = group * GROUP_SIZE_M
    group_rows = min(tiles_m - first_tile_m, GROUP_SIZE_M)
    tile_m = first_tile_m + ((pid % tiles_in_group) % group_rows)
    tile_n = (pid % tiles_in_group) // group_rows

    a_rows = (tile_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)) % M
    b_cols = (tile_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
    ks = tl.arange(0, BLOCK_SIZE_K)
    a_ptrs = a_ptr + (a_rows[:, None] * stride_am + ks[None, :] * stride_ak)  # [M, K] blocks
    b_ptrs = b_ptr + (ks[:, None] * stride_bk + b_cols[None, :] * stride_bn)  # [K, N] blocks

    accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for step in range(tl.cdiv(K, BLOCK_SIZE_K)):
        k_left = K - step * BLOCK_SIZE_K
        a = tl.load(a_ptrs, mask=ks[None, :] < k_left, other=0.0)
        b = tl.load(b_ptrs, mask=ks[:, None] < k_left, other=0.0)
        accumulator = tl.dot(a, b, accumulator)
        a_ptrs += BLOCK_SIZE_K * stride_ak
        b_ptrs += BLOCK_SIZE_K * stride_bk

    if ACTIVATION == "leaky_relu":
        accumulator = leaky_relu(accumulator)
    c = accumulator.to(c_ptr.dtype.element_ty)

    c_rows = tile_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    c_cols = tile_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    c_ptrs = c_ptr + stride_cm * c_rows[:, None] + stride_cn * c_cols[None, :]
    tl.store(c_ptrs, c, mask=(c_rows[:, None] < M) & (c_cols[None, :] < N))


def matmul(a: torch.Tensor, b: torch.Tensor, activation: str = "") -> torch.Tensor:
    """Return activation(a @ b) for matrices of one dtype and any strides; the result has that dtype."""
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"inner sizes differ: {tuple(a.shape)} @ {tuple(b.shape)}")
    M, K = a.shape
    N = b.shape[1]
    c = torch.empty((M, N), device=a.device, dtype=a.dtype)

    def grid(meta):
        return (triton.cdiv(M, meta["BLOCK_SIZE_M"]) * triton.cdiv(N, meta["BLOCK_SIZE_N"]),)

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
        BLOCK_SIZE_M=64,
        BLOCK_SIZE_N=64,
        BLOCK_SIZE_K=32,
        GROUP_SIZE_M=8,
        ACTIVATION=activation,
    )
    return c


def main() -> None:
    device = triton.runtime.driver.active.get_active_torch_device()
    torch.manual_seed(0)
    a = torch.rand((512, 512), device=device, dtype=torch.float16) - 0.5
    b = torch.rand((512, 512), device=device, dtype=torch.float16) - 0.5
    error = (matmul(a, b) - a.float() @ b.float()).abs().max().item()
    print(f"matmul: max error {error:.2e}")
    assert error < 5e-3, "more than the rounding error of results between 8 and 16 in float16, which is 2^-8"


if __name__ == "__main__":
    main()
