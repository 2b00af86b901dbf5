"""Attention without the attention matrix (the forward pass of FlashAttention-2).

    out_i = sum_j softmax_j(scale * q_i . k_j) v_j

A program holds one block of queries and loops over blocks of keys and values. Softmax needs the maximum and
the sum of a whole row, so it is computed online: the running max m, the running sum l and the accumulator acc
are all relative to the maximum so far, and are rescaled by alpha = 2^(m - m') when a larger one appears.

    m' = max(m, max_j s_j)    p_j = 2^(s_j - m')    l' = l * 2^(m - m') + sum_j p_j
    acc' = acc * 2^(m - m') + sum_j p_j v_j

exp2 is what the hardware has, so scores carry a factor log2(e) from the start: s = q . k * scale * log2(e).

With a causal mask, query i sees keys 0..i. Blocks of keys left of the diagonal need no mask, the blocks on it
do, and those right of it are never visited: hence two calls of one inner loop, with MASKED off and on.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def attention_inner(
    acc,
    l_i,
    m_i,
    q,
    k_ptrs,
    v_ptrs,
    stride_kn,
    stride_vn,
    q_rows,
    start,
    stop,
    n_ctx,
    qk_scale,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    for start_n in range(start, stop, BLOCK_N):
        keys = start_n + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        if MASKED:
            in_range = keys < n_ctx
            k = tl.load(k_ptrs + start_n * stride_kn, mask=in_range[None, :], other=0.0)
            v = tl.load(v_ptrs + start_n * stride_vn, mask=in_range[:, None], other=0.0)
        else:
            k = tl.load(k_ptrs + start_n * stride_kn)  # [HEAD_DIM, BLOCK_N]
            v = tl.load(v_ptrs + start_n * stride_vn)  # [BLOCK_N, HEAD_DIM]

        qk = tl.dot(q, k) * qk_scale  # [BLOCK_M, BLOCK_N]
        if MASKED:
            # Each row sees at least the first key of the first block, so m_new is finite from then on.
            visible = in_range[None, :]
            if CAUSAL:
                visible = visible & (q_rows[:, None] >= keys[None, :])
            qk = tl.where(visible, qk, -float("inf"))
        m_new = tl.maximum(m_i, tl.max(qk, 1))
        p = tl.math.exp2(qk - m_new[:, None])
        alpha = tl.math.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc)
        m_i = m_new
    return acc, l_i, m_i


@triton.jit
def attention_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    sm_scale,
    stride_qh,
    stride_qm,
    stride_kh,
    stride_kn,
    stride_vh,
    stride_vn,
    stride_oh,
    stride_om,
    n_ctx,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    tl.static_assert(BLOCK_M % BLOCK_N == 0)
    start_m = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)  # over batch x heads
    rows = start_m + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    columns = tl.arange(0, BLOCK_N)
    q_ptrs = q_ptr + head * stride_qh + rows[:, None] * stride_qm + dims[None, :]
    k_ptrs = k_ptr + head * stride_kh + columns[None, :] * stride_kn + dims[:, None]  # k transposed
    v_ptrs = v_ptr + head * stride_vh + columns[:, None] * stride_vn + dims[None, :]

    m_i = tl.zeros([BLOCK_M], dtype=tl.float32) - float("inf")
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    qk_scale = sm_scale * 1.44269504  # log2(e)
    q = tl.load(q_ptrs, mask=rows[:, None] < n_ctx, other=0.0)

    if CAUSAL:
        unmasked_end = start_m
        end = tl.minimum(start_m + BLOCK_M, n_ctx)
    else:
        unmasked_end = n_ctx // BLOCK_N * BLOCK_N
        end = n_ctx
    acc, l_i, m_i = attention_inner(
        acc, l_i, m_i, q, k_ptrs, v_ptrs, stride_kn, stride_vn, rows, 0, unmasked_end, n_ctx, qk_scale,
        BLOCK_N, MASKED=False, CAUSAL=False,
    )  # fmt: skip
    acc, l_i, m_i = attention_inner(
        acc, l_i, m_i, q, k_ptrs, v_ptrs, stride_kn, stride_vn, rows, unmasked_end, end, n_ctx, qk_scale,
        BLOCK_N, MASKED=True, CAUSAL=CAUSAL,
    )  # fmt: skip

    tl.store(lse_ptr + head * n_ctx + rows, m_i + tl.math.log2(l_i), mask=rows < n_ctx)
    out_ptrs = out_ptr + head * stride_oh + rows[:, None] * stride_om + dims[None, :]
    out = acc / l_i[:, None]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=rows[:, None] < n_ctx)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, sm_scale: float | None = None
) -> torch.Tensor:
    """Return attention over contiguous q, k, v of shape [batch, heads, sequence, head_dim].

    head_dim is 16, 32, 64, 128 or 256, the sequence has any length, sm_scale is 1/sqrt(head_dim) by default.
    """
    batch, heads, n_ctx, head_dim = q.shape
    if head_dim not in (16, 32, 64, 128, 256):
        raise ValueError(f"head_dim must be 16, 32, 64, 128 or 256, not {head_dim}")
    if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
        raise ValueError("q, k and v must be contiguous: batch and head are one grid axis with one stride")
    out = torch.empty_like(q)
    lse = torch.empty((batch, heads, n_ctx), device=q.device, dtype=torch.float32)

    def grid(meta):
        return triton.cdiv(n_ctx, meta["BLOCK_M"]), batch * heads

    attention_fwd_kernel[grid](
        q,
        k,
        v,
        out,
        lse,
        head_dim**-0.5 if sm_scale is None else sm_scale,
        *q.stride()[1:3],
        *k.stride()[1:3],
        *v.stride()[1:3],
        *out.stride()[1:3],
        n_ctx,
        HEAD_DIM=head_dim,
        BLOCK_M=64,
        BLOCK_N=32,
        CAUSAL=causal,
    )
    return out


def main() -> None:
    device = triton.runtime.driver.active.get_active_torch_device()
    torch.manual_seed(0)
    q, k, v = torch.randn((3, 2, 4, 300, 64), device=device, dtype=torch.float16).unbind()
    error = 0.0
    for causal in (False, True):
        expected = torch.nn.functional.scaled_dot_product_attention(
            q.float(), k.float(), v.float(), is_causal=causal
        )
        error = max(error, (attention(q, k, v, causal) - expected).abs().max().item())
    print(f"flash attention: max error {error:.2e}")
    assert error < 4e-3


if __name__ == "__main__":
    main()
