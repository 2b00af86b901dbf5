"""Vector addition: the smallest Triton program that does something useful.

    out[i] = x[i] + y[i]

The vector is split into blocks of BLOCK_SIZE elements, and one program handles one block. The last block may
extend past the end of the vector: a mask keeps its spare lanes away from memory.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    block = tl.program_id(axis=0)
    offsets = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)  # [BLOCK_SIZE]
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return x + y for two contiguous tensors of one shape and dtype."""
    out = torch.empty_like(x)
    n_elements = out.numel()

    def grid(meta):
        return (triton.cdiv(n_elements, meta["BLOCK_SIZE"]),)

    add_kernel[grid](x, y, out, n_elements, BLOCK_SIZE=1024)
    return out


def main() -> None:
    device = triton.runtime.driver.active.get_active_torch_device()
    torch.manual_seed(0)
    x = torch.randn(98_432, device=device)
    y = torch.randn(98_432, device=device)
    error = (add(x, y) - (x + y)).abs().max().item()
    print(f"vector add: max error {error:.2e}")
    assert error == 0


if __name__ == "__main__":
    main()
