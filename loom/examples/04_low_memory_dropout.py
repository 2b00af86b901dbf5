"""Dropout whose mask is a seed instead of a tensor.

    keep_i = random(seed, i) > p        out_i = keep_i ? x_i / (1 - p) : 0

Ordinary dropout stores one flag per element, because the backward pass must drop the same elements again.
Triton's generator (Philox) is a pure function of a seed and a counter: with the element's index as the
counter, the mask can be recomputed whenever it is needed, and only one integer must be stored.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def seeded_dropout_kernel(x_ptr, out_ptr, n_elements, p, seed, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(axis=0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)  # [BLOCK_SIZE]
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    keep = tl.rand(seed, offsets) > p
    tl.store(out_ptr + offsets, tl.where(keep, x / (1 - p), 0.0), mask=mask)


def seeded_dropout(x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    """Drop each element with probability p; equal seeds drop equal elements."""
    if not x.is_contiguous():
        raise ValueError("x must be contiguous: an element's index in memory is its random counter")
    out = torch.empty_like(x)
    n_elements = x.numel()

    def grid(meta):
        return (triton.cdiv(n_elements, meta["BLOCK_SIZE"]),)

    seeded_dropout_kernel[grid](x, out, n_elements, p, seed, BLOCK_SIZE=1024)
    return out


def main() -> None:
    device = triton.runtime.driver.active.get_active_torch_device()
    torch.manual_seed(0)
    x = torch.randn(100_000, device=device)
    p = 0.25
    out = seeded_dropout(x, p, seed=123)
    dropped = out == 0
    share = dropped.float().mean().item()
    error = (out - torch.where(dropped, 0.0, x / (1 - p))).abs().max().item()
    print(f"low-memory dropout: max error {error:.2e}, dropped {share:.2%} for p = {p:.0%}")
    assert error < 1e-6
    # Six standard deviations of the share.
    assert abs(share - p) < 6 * (p * (1 - p) / x.numel()) ** 0.5
    assert torch.equal(out, seeded_dropout(x, p, seed=123))
    assert not torch.equal(out, seeded_dropout(x, p, seed=512))


if __name__ == "__main__":
    main()
