"""tl.dot of int8: exact sums that wrap, for every instruction and every memory layout of the operands."""

from __future__ import annotations

import platform

import pytest
import torch
import triton
import triton.language as tl
import triton_loom

Sizes = tuple[int, int, int]


@triton.jit(do_not_specialize=["M", "N", "K"])  # a size of 1 would be a kernel of its own, and so would 16
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, out_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, B_IS: tl.constexpr,
):  # fmt: skip
    """Compute c + a b, with a [M, K]; b is [K, N] if plain, else [N, K]."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = (m[:, None] < M) & (n[None, :] < N)
    total = tl.load(c_ptr + m[:, None] * N + n[None, :], mask=inside, other=0)
    for step in range(0, K, BK):
        k = step + tl.arange(0, BK)
        a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0)
        if B_IS == "plain":
            b = tl.load(b_ptr + k[:, None] * N + n[None, :], (k[:, None] < K) & (n[None, :] < N), other=0)
        elif B_IS == "wrapped":
            b = tl.load(b_ptr + (n[None, :] % N) * K + k[:, None], k[:, None] < K, other=0)
        elif B_IS == "turned":
            b = tl.trans(
                tl.load(b_ptr + n[:, None] * K + k[None, :], (n[:, None] < N) & (k[None, :] < K), other=0)
            )
        elif B_IS == "computed":
            b = tl.load(b_ptr + n[None, :] * K + k[:, None], (n[None, :] < N) & (k[:, None] < K), other=0)
            b = (b.to(tl.int32) * 3).to(tl.int8)
        else:  # strided
            b = tl.load(b_ptr + n[None, :] * K + k[:, None], (n[None, :] < N) & (k[:, None] < K), other=0)
        total = tl.dot(a, b, total, out_dtype=tl.int32)
    tl.store(out_ptr + m[:, None] * N + n[None, :], total, mask=inside)


def whole_range(*shape: int) -> torch.Tensor:
    """Return random int8, with rows that are all minimum or all maximum."""
    numbers = torch.randint(-128, 128, shape, dtype=torch.int8)
    numbers[::5], numbers[2::7] = -128, 127
    return numbers


def sums(*shape: int) -> torch.Tensor:
    """Return random int32, so that most sums wrap around."""
    numbers = torch.randint(-(2**31), 2**31, shape).int()
    numbers[::2, ::3], numbers[1::2, ::3] = -(2**31), 2**31 - 1
    return numbers


def exact(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return ((a.long() @ b.long() + c.long() + 2**31) % 2**32 - 2**31).int()


def multiply(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, blocks: Sizes, b_is: str, **options: object
) -> tuple[torch.Tensor, str]:
    (m, k), n = a.shape, b.shape[1]
    bm, bn, bk = blocks
    operand = b if b_is == "plain" else b.t().contiguous()
    out = torch.empty_like(c)
    kernel = matmul_kernel[triton.cdiv(m, bm), triton.cdiv(n, bn)](
        a, operand, c, out, m, n, k, BM=bm, BN=bn, BK=bk, B_IS=b_is, **options
    )
    return out, kernel.asm["c"]


LAYOUTS = ["plain", "strided", "wrapped", "turned", "computed"]
BLOCKS = [(16, 16, 32), (64, 32, 64), (128, 64, 128), (32, 128, 16), (2, 16, 64), (64, 8, 64), (16, 256, 256)]


@pytest.mark.parametrize("b_is", LAYOUTS)
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_exact_at_every_edge(blocks: Sizes, b_is: str) -> None:
    for m, n, k in [(1, 1, 1), (67, 45, 101), (130, 33, 31), (16, 97, 257)]:
        a, b, c = whole_range(m, k), whole_range(k, n), sums(m, n)
        out, source = multiply(a, b, c, blocks, b_is)
        b = (b.int() * 3).to(torch.int8) if b_is == "computed" else b
        assert torch.equal(out, exact(a, b, c)), (m, n, k)
    if blocks[2] >= 64:
        assert "load_first<i8x64>" in source  # a register full of A at a time
    transposed = b_is != "plain" and blocks[1] >= 16 and blocks[2] >= 64
    assert f"dot_i8<{', '.join(map(str, blocks))}{', true' * transposed}>(tiles, " in source


@pytest.mark.parametrize("left", [-128, 127])
@pytest.mark.parametrize("right", [-128, 127])
def test_sums_at_the_ends_of_the_range(left: int, right: int) -> None:
    """Four products of -128 and -128 exceed 16 bits; they are added to sums at the ends of int32."""
    a, b = torch.full((64, 256), left, dtype=torch.int8), torch.full((256, 64), right, dtype=torch.int8)
    for begin in (-(2**31), 0, 2**31 - 1):
        c = torch.full((64, 64), begin).int()
        for b_is in ("plain", "strided"):
            assert torch.equal(multiply(a, b, c, (64, 64, 64), b_is)[0], exact(a, b, c))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 processors")
@pytest.mark.parametrize("arch", ["x86-64", "x86-64-v3"])
@pytest.mark.parametrize("b_is", ["plain", "turned"])
def test_other_instructions_give_the_same_sums(arch: str, b_is: str) -> None:
    a, b, c = whole_range(80, 200), whole_range(200, 70), sums(80, 70)
    assert torch.equal(multiply(a, b, c, (32, 32, 64), b_is, arch=arch)[0], exact(a, b, c))


@triton.jit
def two_depths_kernel(a_ptr, b_ptr, out_ptr, S: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr):
    """Configure the processor's tiles for one depth, then for another, then for the first again."""
    i, short, long = tl.arange(0, S), tl.arange(0, SHORT), tl.arange(0, LONG)
    total = tl.zeros((S, S), tl.int32)
    for _ in range(2):
        a = tl.load(a_ptr + i[:, None] * LONG + short[None, :])
        b = tl.load(b_ptr + short[:, None] * S + i[None, :])
        total = tl.dot(a, b, total, out_dtype=tl.int32)
        a = tl.load(a_ptr + i[:, None] * LONG + long[None, :])
        b = tl.load(b_ptr + long[:, None] * S + i[None, :])
        total = tl.dot(a, b, total, out_dtype=tl.int32)
    tl.store(out_ptr + i[:, None] * S + i[None, :], total)


def test_dots_of_two_depths_in_one_kernel() -> None:
    a, b, out = whole_range(32, 128), whole_range(128, 32), torch.empty(32, 32, dtype=torch.int32)
    two_depths_kernel[(1,)](a, b, out, S=32, SHORT=32, LONG=128)
    zeros = torch.zeros(32, 32, dtype=torch.int32)
    assert torch.equal(out, 2 * (exact(a[:, :32], b[:32], zeros) + exact(a, b, zeros)))


@triton.jit
def banded_kernel(a_ptr, b_ptr, out_ptr, low, high, S: tl.constexpr):
    """Multiply with masks that do not begin with the first element."""
    i = tl.arange(0, S)
    band = (i >= low) & (i < high)
    a = tl.load(a_ptr + i[:, None] * S + i[None, :], mask=band[None, :], other=1)
    b = tl.load(b_ptr + i[None, :] * S + i[:, None], mask=band[:, None] & (i[None, :] % 3 != 0), other=2)
    tl.store(out_ptr + i[:, None] * S + i[None, :], tl.dot(a, b))


def test_masks_of_any_kind() -> None:
    a, b, out = whole_range(64, 64), whole_range(64, 64), torch.empty(64, 64, dtype=torch.int32)
    kernel = banded_kernel[(1,)](a, b.t().contiguous(), out, 5, 50, S=64)
    assert "i8x64" not in kernel.asm["c"]  # GCC 12 compares vectors wider than a register lane by lane
    i = torch.arange(64)
    band = (i >= 5) & (i < 50)
    a = torch.where(band[None, :], a, 1)
    b = torch.where(band[:, None] & (i[None, :] % 3 != 0), b, 2)
    assert torch.equal(out, exact(a, b, torch.zeros_like(out)))


@triton.jit
def batched_kernel(
    a_ptr, b_ptr, out_ptr, B: tl.constexpr, S: tl.constexpr, K: tl.constexpr, TURNED: tl.constexpr
):
    b, i, k = tl.arange(0, B), tl.arange(0, S), tl.arange(0, K)
    left = tl.load(a_ptr + (b[:, None, None] * S + i[None, :, None]) * K + k[None, None, :])
    if TURNED:
        right = tl.trans(
            tl.load(b_ptr + (b[:, None, None] * S + i[None, :, None]) * K + k[None, None, :]), 0, 2, 1
        )
    else:
        right = tl.load(b_ptr + (b[:, None, None] * K + k[None, :, None]) * S + i[None, None, :])
    tl.store(out_ptr + (b[:, None, None] * S + i[None, :, None]) * S + i[None, None, :], tl.dot(left, right))


@pytest.mark.parametrize("turned", [False, True], ids=["plain", "turned"])
def test_batches(turned: bool) -> None:
    a, b = whole_range(4, 32, 64), whole_range(4, 64, 32)
    out = torch.empty(4, 32, 32, dtype=torch.int32)
    batched_kernel[(1,)](
        a, b.transpose(1, 2).contiguous() if turned else b, out, B=4, S=32, K=64, TURNED=turned
    )
    assert torch.equal(out, exact(a, b, torch.zeros_like(out)))


def test_torch_uses_the_same_tiles_on_the_same_threads() -> None:
    """PyTorch's products leave the processor's tiles configured; each of the two finds its own configuration again."""
    torch.set_num_threads(2)
    a, b, c = whole_range(256, 192), whole_range(192, 160), sums(256, 160)
    expected, product = exact(a, b, c), exact(a, b, torch.zeros_like(c))
    x, y = torch.randn(256, 200).bfloat16(), torch.randn(200, 144).bfloat16()
    theirs = x @ y
    for _ in range(10):
        assert torch.equal(torch._int_mm(a, b), product)
        assert torch.equal(multiply(a, b, c, (32, 32, 32), "plain")[0], expected)
        assert torch.equal(x @ y, theirs)
        assert torch.equal(multiply(a, b, c, (32, 32, 32), "turned")[0], expected)


@pytest.mark.parametrize("b_is", ["plain", "turned"])
def test_dots_are_counted_and_checked(b_is: str) -> None:
    a, b, c = whole_range(64, 128), whole_range(128, 32), sums(64, 32)
    with triton_loom.count() as counted, triton_loom.sanitize():
        out, _ = multiply(a, b, c, (32, 32, 64), b_is)
    assert torch.equal(out, exact(a, b, c))
    assert [launch.dot_flops for launch in counted.launches] == [2 * 64 * 32 * 128]


@pytest.mark.parametrize("turned", [False, True], ids=["plain", "turned"])
def test_a_stray_operand_is_found(turned: bool) -> None:
    a, b, out = whole_range(1, 32, 64), whole_range(32 * 64 - 1), torch.empty(1, 32, 32, dtype=torch.int32)
    with pytest.raises(triton_loom.SanitizerError, match="out-of-bounds load"), triton_loom.sanitize():
        batched_kernel[(1,)](a, b, out, B=1, S=32, K=64, TURNED=turned)
