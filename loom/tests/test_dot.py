"""tl.dot and tl.dot_scaled, every number type, against float64 products of the decoded operands."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton_loom.testing import EPS32, assert_same, check

FP8 = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}


@triton.jit
def dot_kernel(
    a_ptr, b_ptr, c_ptr, out_ptr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, OUT: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    if TRANSPOSED:
        b = tl.trans(tl.load(b_ptr + n[:, None] * K + k[None, :]))
    else:
        b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    c = tl.load(c_ptr + m[:, None] * N + n[None, :])
    tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(a, b, c, out_dtype=OUT))


@triton.jit
def batched_dot_kernel(
    a_ptr, b_ptr, out_ptr, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    b, m, n, k = tl.arange(0, B), tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a_ptr + b[:, None, None] * M * K + m[None, :, None] * K + k[None, None, :])
    right = tl.load(b_ptr + b[:, None, None] * K * N + k[None, :, None] * N + n[None, None, :])
    out = b[:, None, None] * M * N + m[None, :, None] * N + n[None, None, :]
    tl.store(out_ptr + out, tl.dot(left, right))


@triton.jit
def accumulate_kernel(a_ptr, b_ptr, out_ptr, steps, scale, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Rescale the carried tile, then accumulate into it, like attention."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.full((M, N), 1.0, tl.float32)
    old = tl.zeros((M, N), tl.float32)
    for step in range(steps):
        a = tl.load(a_ptr + (step * M + m[:, None]) * K + k[None, :])
        b = tl.load(b_ptr + (step * K + k[:, None]) * N + n[None, :])
        old = total
        total = total * scale
        total = tl.dot(a, b, total)
    tl.store(out_ptr + m[:, None] * N + n[None, :], total - old)


def operand(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, dtype=dtype)
    return torch.randn(shape, dtype=torch.float64).to(torch.float32).to(dtype)


def exact(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32).double() if x.dtype in FP8 else x.double()


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, *sorted(FP8, key=str)]
SHAPES = [(16, 16, 16), (64, 32, 128), (1, 64, 32), (32, 1, 16), (16, 128, 2), (128, 128, 64)]


# By day each dtype and shape meets one of the two layouts of b, in turn.
DOTS = [
    pytest.param(
        dtype,
        shape,
        transposed,
        id=f"{dtype}-{shape}-{'b-transposed' if transposed else 'b'}",
        marks=[] if (i + j) % 2 == transposed else [pytest.mark.slow],
    )
    for i, dtype in enumerate(DTYPES)
    for j, shape in enumerate(SHAPES)
    for transposed in (False, True)
]


@pytest.mark.parametrize(("dtype", "shape", "transposed"), DOTS)
def test_dot(dtype: torch.dtype, shape: tuple[int, int, int], transposed: bool) -> None:
    m, n, k = shape
    accumulator = {torch.float64: torch.float64, torch.int8: torch.int32}.get(dtype, torch.float32)
    out_type = {torch.float64: tl.float64, torch.int32: tl.int32, torch.float32: tl.float32}[accumulator]
    a, b = operand((m, k), dtype), operand((k, n), dtype)
    c = torch.randint(-9, 9, (m, n)).to(accumulator)
    out = torch.empty((m, n), dtype=accumulator)
    stored = b.t().contiguous() if transposed else b
    dot_kernel[(1,)](a, stored, c, out, M=m, N=n, K=k, OUT=out_type, TRANSPOSED=transposed)
    truth = exact(a) @ exact(b) + c.double()
    if accumulator == torch.int32:
        assert torch.equal(out.double(), truth)
        return
    eps = torch.finfo(accumulator).eps
    terms = exact(a).abs() @ exact(b).abs() + c.abs()
    check(out, truth, (k + 1) * eps / 2 * terms)


@pytest.mark.compat
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2], ids=str)
def test_half_accumulator_rounds_once_per_dot(dtype: torch.dtype) -> None:
    a, b = operand((32, 64), dtype), operand((64, 32), dtype)
    c = torch.randn(32, 32).half()
    out = torch.empty((32, 32), dtype=torch.float16)
    dot_kernel[(1,)](a, b, c, out, M=32, N=32, K=64, OUT=tl.float16, TRANSPOSED=False)
    truth = exact(a) @ exact(b) + c.double()
    slack = 65 * EPS32 * (exact(a).abs() @ exact(b).abs() + c.double().abs())
    lowest, highest = (truth - slack).half(), (truth + slack).half()
    assert ((out >= lowest) & (out <= highest)).all()
    assert out.count_nonzero() > 1000


@pytest.mark.compat
def test_batched_dot() -> None:
    a, b = torch.randn(4, 16, 32), torch.randn(4, 32, 64)
    out = torch.empty(4, 16, 64)
    batched_dot_kernel[(1,)](a, b, out, B=4, M=16, N=64, K=32)
    check(out, a.double() @ b.double(), 33 * EPS32 * (a.abs().double() @ b.abs().double()))


@pytest.mark.compat
def test_a_carried_accumulator_is_rescaled_in_place_and_its_old_value_kept() -> None:
    steps, m, n, k = 3, 32, 64, 16
    a, b = torch.randint(-3, 4, (steps, m, k)).float(), torch.randint(-3, 4, (steps, k, n)).float()
    out = torch.empty(m, n)
    accumulate_kernel[(1,)](a, b, out, steps, 2.0, M=m, N=n, K=k)
    total = old = torch.ones(m, n)
    for step in range(steps):
        old, total = total, total * 2 + a[step] @ b[step]
    assert torch.equal(out, total - old)


@triton.jit
def half_loop_kernel(a_ptr, b_ptr, out_ptr, steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((M, N), tl.float16)
    for step in range(steps):
        a = tl.load(a_ptr + (step * M + m[:, None]) * K + k[None, :])
        b = tl.load(b_ptr + (step * K + k[:, None]) * N + n[None, :])
        total = tl.dot(a, b, total, out_dtype=tl.float16)
    tl.store(out_ptr + m[:, None] * N + n[None, :], total)


@pytest.mark.compat
def test_a_carried_half_accumulator_begins_with_what_it_holds() -> None:
    """The sum is computed in fp32, in separate memory: each step must begin with the accumulator, not with the content
    of that memory, where the second launch finds the first one's sum."""
    steps, m, n, k = 3, 32, 32, 16
    a, b = torch.randint(-3, 4, (steps, m, k)).half(), torch.randint(-3, 4, (steps, k, n)).half()
    expected = (a.float() @ b.float()).sum(0).half()  # whole numbers that fp16 has
    for _ in range(2):
        out = torch.empty(m, n, dtype=torch.float16)
        half_loop_kernel[(1,)](a, b, out, steps, M=m, N=n, K=k)
        assert torch.equal(out, expected)


# ---- block-scaled products ---------------------------------------------------------------------------


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@triton.jit
def scaled_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, out_ptr,
    A: tl.constexpr, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    KA: tl.constexpr, KB: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    m, n = tl.arange(0, M), tl.arange(0, N)
    ka, kb, ks = tl.arange(0, KA), tl.arange(0, KB), tl.arange(0, K // GROUP)
    a = tl.load(a_ptr + m[:, None] * KA + ka[None, :])
    b = tl.load(b_ptr + kb[:, None] * N + n[None, :])
    a_scale = None
    b_scale = None
    if a_scale_ptr is not None:
        a_scale = tl.load(a_scale_ptr + m[:, None] * (K // GROUP) + ks[None, :])
    if b_scale_ptr is not None:
        b_scale = tl.load(b_scale_ptr + n[:, None] * (K // GROUP) + ks[None, :])
    acc = tl.dot_scaled(a, a_scale, A, b, b_scale, B)
    tl.store(out_ptr + m[:, None] * N + n[None, :], acc)


def scaled_operand(kind: str, rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a [rows, K] operand as stored (packed along K) and its decoded values."""
    if kind == "e2m1":
        codes = torch.randint(0, 16, (rows, k), dtype=torch.uint8)
        values = torch.from_numpy(E2M1[codes.numpy()])
        return codes[:, ::2] | codes[:, 1::2] << 4, values
    dtype = {
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
    }
    stored = torch.randn(rows, k).to(dtype[kind])
    return stored, exact(stored)


def scales(kind: str, rows: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == "e8m0":
        codes = torch.randint(120, 134, (rows, groups), dtype=torch.uint8)
        return codes, torch.exp2(codes.double() - 127)
    stored = (torch.rand(rows, groups) * 4 + 0.01).to(torch.float8_e4m3fn)
    return stored, exact(stored)


PAIRS = [
    ("e4m3", "e4m3"),
    ("e5m2", "e4m3"),
    ("e2m1", "e2m1"),
    ("e4m3", "e2m1"),
    ("bf16", "e2m1"),
    ("fp16", "e2m1"),
]


@pytest.mark.parametrize(
    ("pair", "scale_kind"),
    [*itertools.product(PAIRS, ["e8m0"]), (("e2m1", "e2m1"), "e4m3")],
    ids=lambda x: "-".join(x) if isinstance(x, tuple) else x,
)
def test_dot_scaled(pair: tuple[str, str], scale_kind: str) -> None:
    m, n, k = 32, 64, 128
    group = 16 if scale_kind == "e4m3" else 32
    left, right = pair
    a, a_values = scaled_operand(left, m, k)
    b, b_values = scaled_operand(right, n, k)
    truth_a, truth_b = a_values, b_values
    a_scale = b_scale = None
    if left not in ("bf16", "fp16"):
        a_scale, factor = scales(scale_kind, m, k // group)
        truth_a = a_values * factor.repeat_interleave(group, 1)
    b_scale, factor = scales(scale_kind, n, k // group)
    truth_b = b_values * factor.repeat_interleave(group, 1)
    out = torch.empty(m, n)
    b = b.view(torch.uint8).t().contiguous().view(b.dtype)
    kernel = scaled_kernel[(1,)]
    ka, kb = a.shape[1], b.shape[0]
    kernel(a, a_scale, b, b_scale, out, A=left, B=right, M=m, N=n, K=k, KA=ka, KB=kb, GROUP=group)
    check(out, truth_a @ truth_b.t(), (k + 1) * EPS32 * (truth_a.abs() @ truth_b.abs().t()))


@triton.jit
def packed_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, out_ptr,
    A: tl.constexpr, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    A_BY_K: tl.constexpr, B_BY_K: tl.constexpr,
):  # fmt: skip
    a = tl.load(a_ptr + tl.arange(0, ROWS)[:, None] * KA + tl.arange(0, KA)[None, :])
    b = tl.load(b_ptr + tl.arange(0, KB)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    m, n, ks = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // GROUP)
    a_scale = tl.load(a_scale_ptr + m[:, None] * (K // GROUP) + ks[None, :])
    b_scale = tl.load(b_scale_ptr + n[:, None] * (K // GROUP) + ks[None, :])
    acc = tl.dot_scaled(a, a_scale, A, b, b_scale, B, lhs_k_pack=A_BY_K, rhs_k_pack=B_BY_K)
    tl.store(out_ptr + m[:, None] * N + n[None, :], acc)


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("shape", [(32, 64, 128), (8, 4, 32), (64, 2, 64), (128, 128, 32)], ids=str)
@pytest.mark.parametrize(
    ("pair", "by_k"),
    [
        (("e2m1", "e2m1"), (True, True)),
        (("e2m1", "e2m1"), (False, True)),
        (("e4m3", "e2m1"), (True, False)),
        (("e2m1", "e5m2"), (False, True)),
        (("e4m3", "e5m2"), (True, True)),
    ],
    ids=str,
)
def test_dot_scaled_is_the_dot_of_the_decoded_operands(
    pair: tuple[str, str], by_k: tuple[bool, bool], shape: tuple[int, int, int], group: int
) -> None:
    """The results agree bit for bit, however 4-bit codes are packed."""
    m, n, k = shape
    stored, wide, factors = [], [], []
    for kind, rows, packed_by_k in zip(pair, (m, n), by_k, strict=True):
        if kind == "e2m1":
            codes = torch.randint(0, 16, (rows, k), dtype=torch.uint8)
            values = torch.from_numpy(E2M1[codes.numpy()]).float()
            codes = codes[:, ::2] | codes[:, 1::2] << 4 if packed_by_k else codes[::2] | codes[1::2] << 4
        else:
            codes, values = scaled_operand(kind, rows, k)
        codes_of_scales, scale = scales("e4m3" if group == 16 else "e8m0", rows, k // group)
        stored.append(codes)
        factors.append(codes_of_scales)
        wide.append(values.float() * scale.float().repeat_interleave(group, 1))
    a, b = stored[0], stored[1].view(torch.uint8).t().contiguous().view(stored[1].dtype)
    out, expected = torch.empty(m, n), torch.empty(m, n)
    packed_kernel[(1,)](
        a, factors[0], b, factors[1], out, A=pair[0], B=pair[1], M=m, N=n, K=k, ROWS=a.shape[0], KA=a.shape[1],
        KB=b.shape[0], COLUMNS=b.shape[1], GROUP=group, A_BY_K=by_k[0], B_BY_K=by_k[1],
    )  # fmt: skip
    zeros = torch.zeros(m, n)
    dot_kernel[(1,)](
        wide[0], wide[1].t().contiguous(), zeros, expected, M=m, N=n, K=k, OUT=tl.float32, TRANSPOSED=False
    )
    assert_same(out, expected)
    assert out.count_nonzero() > m * n / 2


@pytest.mark.compat
def test_smallest_and_largest_scale_codes() -> None:
    """e8m0 0 is 2^-127 (an fp32 denormal), 255 is NaN and poisons its group."""
    m = n = 16
    k = 64
    a = torch.ones(m, k).to(torch.float8_e4m3fn)
    codes = torch.full((m, 2), 127, dtype=torch.uint8)
    codes[1, 0], codes[2, 1] = 0, 255
    out = torch.empty(m, n)
    b_scale = torch.full((n, 2), 127, dtype=torch.uint8)
    kernel = scaled_kernel[(1,)]
    kernel(
        a, codes, a.t().contiguous(), b_scale, out, A="e4m3", B="e4m3", M=m, N=n, K=k, KA=k, KB=k, GROUP=32
    )
    assert out[2].isnan().all()
    assert (out[0] == 64).all()
    assert (out[1].double() == 32 + 32 * 2.0**-127).all() or (out[1] == 32).all()
