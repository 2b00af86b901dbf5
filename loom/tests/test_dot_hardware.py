"""TRITON_LOOM_HARDWARE_DOT: bf16 dots by the processor's tiles, and everything that the option must not change."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
import triton_loom
from processes import run_python
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton_loom.compiler import LoomBackend
from triton_loom.device import toolchain
from triton_loom.driver import LoomDriver
from triton_loom.options import LoomOptions
from triton_loom.testing import EPS32, assert_same, check


def has_tiles() -> bool:
    """Return whether the processor has AMX tiles for bf16, the compiler knows them, and Linux grants them."""
    if "amx_bf16" not in toolchain.processor():
        return False
    command = [*toolchain.compiler(), "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    if "__AMX_BF16__" not in subprocess.check_output(command, text=True):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


HAS_TILES = has_tiles()
needs_tiles = pytest.mark.skipif(not HAS_TILES, reason="this machine has no AMX tiles")


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the test's launches those of a process that enables hardware dots."""
    monkeypatch.setenv("TRITON_LOOM_HARDWARE_DOT", "1")
    previous = driver._active
    driver.set_active(LoomDriver())
    yield
    driver.set_active(previous)


# ---- the two orders of summation --------------------------------------------------------------------------
# A product of two bf16 numbers is exact in fp32, so a fused multiply-add is the same as an addition.


def in_order(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return c + a b in the order of a dot without the option."""
    a, b = a.float(), b.float()
    for k in range(a.shape[-1]):
        c = c + a[..., :, k, None] * b[..., k, None, :]
    return c


def by_tiles(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return c + a b, 32 steps at a time: the even and the odd ones separately."""
    a, b = a.float(), b.float()
    pad = -a.shape[-1] % 32
    a, b = torch.nn.functional.pad(a, (0, pad)), torch.nn.functional.pad(b, (0, 0, 0, pad))
    for part in range(0, a.shape[-1], 32):
        sums = [torch.zeros_like(c), torch.zeros_like(c)]
        for k in range(part, part + 32):
            sums[k % 2] = sums[k % 2] + a[..., :, k, None] * b[..., k, None, :]
        c = c + (sums[0] + sums[1])
    return c


promised = by_tiles if HAS_TILES else in_order


def check_dot(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    """Assert that a dot has the bits of the promised order, and the accuracy of that order."""
    assert_same(out, promised(a, b, c))
    k = a.shape[-1]
    roundings = 16 + 1 + k / 32 + 1 if HAS_TILES else k + 1
    truth = a.double() @ b.double() + c.double()
    check(out, truth, roundings * EPS32 / 2 * (a.double().abs() @ b.double().abs() + c.double().abs()))


def numbers(*shape: int) -> torch.Tensor:
    """Return magnitudes over many binades, so that another order of summation rounds differently."""
    return (torch.randn(shape) * 2.0 ** torch.randint(-6, 6, shape)).bfloat16()


# ---- kernels ----------------------------------------------------------------------------------------------


@triton.jit
def dot_kernel(
    a_ptr, b_ptr, c_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, B_IS: tl.constexpr
):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    if B_IS == "plain":
        b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    elif B_IS == "turned":
        b = tl.trans(tl.load(b_ptr + n[:, None] * K + k[None, :]))
    elif B_IS == "strided":
        b = tl.load(b_ptr + n[None, :] * K + k[:, None])
    elif B_IS == "computed":
        b = tl.trans(tl.load(b_ptr + n[:, None] * K + k[None, :]).to(tl.float32) * -1.0).to(tl.bfloat16)
    else:  # two readers
        b = tl.load(b_ptr + n[None, :] * K + k[:, None])
        b = tl.where(tl.max(b.to(tl.float32), 0)[None, :] < 1e30, b, 0.0)
    c = tl.load(c_ptr + m[:, None] * N + n[None, :])
    tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(a, b, c))


@triton.jit
def matmul_kernel(
    x_ptr, w_ptr, out_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TURNED: tl.constexpr
):
    """Multiply x [M, K] by the transpose of w [N, K], every edge masked."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(0, K, BK):
        k = step + tl.arange(0, BK)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        if TURNED:
            w = tl.load(w_ptr + n[:, None] * K + k[None, :], (n[:, None] < N) & (k[None, :] < K), other=0.0)
            total = tl.dot(x, tl.trans(w), total)
        else:
            w = tl.load(w_ptr + n[None, :] * K + k[:, None], (n[None, :] < N) & (k[:, None] < K), other=0.0)
            total = tl.dot(x, w, total)
    tl.store(out_ptr + m[:, None] * N + n[None, :], total, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def batched_kernel(
    a_ptr, b_ptr, out_ptr,
    B: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    b, m, n, k = tl.arange(0, B), tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a_ptr + b[:, None, None] * M * K + m[None, :, None] * K + k[None, None, :])
    if TURNED:
        right = tl.load(b_ptr + b[:, None, None] * K * N + n[None, :, None] * K + k[None, None, :])
        right = tl.trans(right, 0, 2, 1)
    else:
        right = tl.load(b_ptr + b[:, None, None] * K * N + k[None, :, None] * N + n[None, None, :])
    out = b[:, None, None] * M * N + m[None, :, None] * N + n[None, None, :]
    tl.store(out_ptr + out, tl.dot(left, right))


@triton.jit
def chain_kernel(q_ptr, k_ptr, v_ptr, out_ptr, steps, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """Use a dot's rounded result as the next one's operand and rescale the sum, like attention."""
    m, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    q = tl.load(q_ptr + m[:, None] * D + d[None, :])
    total = tl.full((M, D), 1.0, tl.float32)
    for step in range(steps):
        k = tl.load(k_ptr + (step * N + n[:, None]) * D + d[None, :])
        v = tl.load(v_ptr + (step * N + n[:, None]) * D + d[None, :])
        s = tl.dot(q, tl.trans(k))
        total = tl.dot(s.to(tl.bfloat16), v, total * 0.5)
        total = tl.dot(q, tl.trans(tl.trans(k) + tl.trans(k)).trans(), total) if N == D else total
    tl.store(out_ptr + m[:, None] * D + d[None, :], total)


# ---- what a dot computes ------------------------------------------------------------------------------------

SHAPES = [(16, 16, 32), (32, 16, 64), (16, 64, 32), (64, 32, 128), (128, 128, 64), (16, 16, 512)]


FORMS = ["plain", "turned", "strided", "computed", "read twice"]
# By day each shape meets two forms of b, and each form at least two shapes.
DOTS = [
    pytest.param(
        shape, b_is, id=f"{shape}-{b_is}", marks=[] if (i - j) % len(FORMS) < 2 else [pytest.mark.slow]
    )
    for i, shape in enumerate(SHAPES)
    for j, b_is in enumerate(FORMS)
]


@pytest.mark.parametrize(("shape", "b_is"), DOTS)
def test_dot(hardware: None, shape: tuple[int, int, int], b_is: str) -> None:
    m, n, k = shape
    a, b, c = numbers(m, k), numbers(k, n), numbers(m, n).float()
    out = torch.empty(m, n)
    operand = b if b_is == "plain" else b.t().contiguous()
    kernel = dot_kernel[(1,)](a, operand, c, out, M=m, N=n, K=k, B_IS=b_is)
    assert (
        f"dot_bf16<{m}, {n}, {k}{', true' if b_is in ('turned', 'strided', 'computed') else ''}>"
        in (kernel.asm["c"])
    )
    check_dot(out, a, -b if b_is == "computed" else b, c)


@pytest.mark.parametrize("turned", [False, True], ids=["strided", "turned"])
@pytest.mark.parametrize("blocks", [(16, 16, 32), (64, 32, 64), (128, 64, 32)], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (67, 45, 101), (130, 33, 31), (16, 97, 130)], ids=str)
def test_ragged_edges(
    hardware: None, sizes: tuple[int, int, int], blocks: tuple[int, int, int], turned: bool
) -> None:
    m, n, k = sizes
    bm, bn, bk = blocks
    x, w, out = numbers(m, k), numbers(n, k), torch.empty(m, n)
    grid = (triton.cdiv(m, bm), triton.cdiv(n, bn))
    matmul_kernel[grid](x, w, out, m, n, k, BM=bm, BN=bn, BK=bk, TURNED=turned)
    check_dot(out, x, w.t(), torch.zeros(m, n))


@pytest.mark.parametrize("turned", [False, True], ids=["plain", "turned"])
def test_batches(hardware: None, turned: bool) -> None:
    a, b = numbers(4, 16, 64), numbers(4, 64, 32)
    out = torch.empty(4, 16, 32)
    operand = b.transpose(1, 2).contiguous() if turned else b
    kernel = batched_kernel[(1,)](a, operand, out, B=4, M=16, N=32, K=64, TURNED=turned)
    assert "dot_bf16<16, 32, 64" in kernel.asm["c"]
    check_dot(out, a, b, torch.zeros(4, 16, 32))


@pytest.mark.parametrize("d", [32, 64])
def test_chains_of_dots(hardware: None, d: int) -> None:
    m, n, steps = 32, 64, 3
    q, k, v = numbers(m, d), numbers(steps, n, d), numbers(steps, n, d)
    out = torch.empty(m, d)
    chain_kernel[(1,)](q, k, v, out, steps, M=m, N=n, D=d)
    total = torch.ones(m, d)
    for step in range(steps):
        s = promised(q, k[step].t(), torch.zeros(m, n)).bfloat16()
        total = promised(s, v[step], total * 0.5)
        if n == d:
            total = promised(q, (k[step] + k[step]).t(), total)
    assert_same(out, total)


def test_infinities_and_nan(hardware: None) -> None:
    a, b, c = numbers(32, 32), numbers(32, 32), torch.zeros(32, 32)
    a[3, 5], a[4, 6], b[7, 9] = float("inf"), float("nan"), float("-inf")
    out = torch.empty(32, 32)
    dot_kernel[(1,)](a, b.t().contiguous(), c, out, M=32, N=32, K=32, B_IS="turned")
    assert_same(out, promised(a, b, c))


def test_dots_that_do_not_fit_keep_their_bits(hardware: None) -> None:
    """These are tiles smaller than the processor's, and other types."""
    for m, n, k in [(8, 64, 64), (64, 8, 64), (64, 64, 16)]:
        a, b, c = numbers(m, k), numbers(k, n), numbers(m, n).float()
        out = torch.empty(m, n)
        dot_kernel[(1,)](a, b, c, out, M=m, N=n, K=k, B_IS="plain")
        assert_same(out, in_order(a, b, c))
    a, b, c = (numbers(32, 32).float() for _ in range(3))
    out = torch.empty(32, 32)
    dot_kernel[(1,)](a, b, c, out, M=32, N=32, K=32, B_IS="plain")
    assert_same(out, in_order(a, b, c))


def test_a_machine_without_tiles_takes_the_products_in_order() -> None:
    a, b, c = numbers(64, 64), numbers(64, 64), numbers(64, 64).float()
    out = torch.empty(64, 64)
    if os.uname().machine != "x86_64":
        pytest.skip("names an x86 processor")
    for b_is, operand in (("plain", b), ("turned", b.t().contiguous())):
        kernel = dot_kernel[(1,)]
        kernel(a, operand, c, out, M=64, N=64, K=64, B_IS=b_is, hardware_dot=True, arch="x86-64")
        assert_same(out, in_order(a, b, c))


# ---- threads ------------------------------------------------------------------------------------------------


def multiply(m: int = 256, n: int = 192, k: int = 96) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(s, k, generator=generator).bfloat16() for s in (m, n))
    out = torch.empty(m, n)
    matmul_kernel[triton.cdiv(m, 32), triton.cdiv(n, 32)](
        x, w, out, m, n, k, BM=32, BN=32, BK=32, TURNED=True
    )
    return out


def test_bits_do_not_depend_on_threads(hardware: None) -> None:
    results = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        results += [multiply() for _ in range(3)]
    for other in results[1:]:
        assert_same(other, results[0])


def test_torch_uses_the_same_tiles_on_the_same_threads(hardware: None) -> None:
    """PyTorch's bf16 products leave tiles configured; each of the two finds its own configuration again."""
    torch.set_num_threads(2)
    a, b = numbers(256, 200), numbers(200, 144)
    theirs, ours = a @ b, multiply()
    for _ in range(10):
        assert_same(a @ b, theirs)
        assert_same(multiply(), ours)


def test_threads_of_python_launch_at_once(hardware: None) -> None:
    from concurrent.futures import ThreadPoolExecutor

    expected = multiply()
    with ThreadPoolExecutor(4) as pool:
        for out in pool.map(lambda _: multiply(), range(16)):
            assert_same(out, expected)


# ---- the witness ----------------------------------------------------------------------------------------------


def test_dots_are_counted_and_checked(hardware: None) -> None:
    a, b, c, out = numbers(32, 64), numbers(64, 32), torch.zeros(32, 32), torch.empty(32, 32)
    with triton_loom.count() as counted, triton_loom.sanitize():
        kernel = dot_kernel[(1,)](a, b.t().contiguous(), c, out, M=32, N=32, K=64, B_IS="turned")
    assert "dot_bf16<32, 32, 64, true>" in kernel.asm["c"]
    assert [launch.dot_flops for launch in counted.launches] == [2 * 32 * 32 * 64]
    check_dot(out, a, b, c)


def test_a_stray_operand_is_found(hardware: None) -> None:
    a, b, c, out = numbers(32, 63), numbers(64, 32), torch.zeros(32, 32), torch.empty(32, 32)
    with pytest.raises(Exception, match="out-of-bounds load"), triton_loom.sanitize():
        dot_kernel[(1,)](a, b, c, out, M=32, N=32, K=64, B_IS="plain")


# ---- asking for it, and the caches ----------------------------------------------------------------------------


def test_nothing_changes_without_the_option() -> None:
    a, b, c, out = numbers(32, 64), numbers(64, 32), numbers(32, 32).float(), torch.empty(32, 32)
    kernel = dot_kernel[(1,)](a, b.t().contiguous(), c, out, M=32, N=32, K=64, B_IS="turned")
    assert "dot_bf16" not in kernel.asm["c"]
    assert "LOOM_DOT_BF16_HARDWARE" not in kernel.asm["c"]
    assert_same(out, in_order(a, b, c))


def test_a_single_launch_can_enable_it() -> None:
    a, b, c = numbers(32, 64), numbers(64, 32), numbers(32, 32).float()
    out = torch.empty(32, 32)
    for asked in (False, True, False, True):
        dot_kernel[(1,)](a, b, c, out, M=32, N=32, K=64, B_IS="plain", hardware_dot=asked)
        assert_same(out, (promised if asked else in_order)(a, b, c))


def test_the_option_is_in_the_key_within_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = numbers(32, 64), numbers(64, 32), numbers(32, 32).float()
    out = torch.empty(32, 32)
    previous = driver._active
    try:
        for asked in ("1", "0", "1", "0"):
            monkeypatch.setenv("TRITON_LOOM_HARDWARE_DOT", asked)
            driver.set_active(LoomDriver())
            dot_kernel[(1,)](a, b, c, out, M=32, N=32, K=64, B_IS="plain")
            assert_same(out, (promised if asked == "1" else in_order)(a, b, c))
    finally:
        driver.set_active(previous)


def test_the_option_is_in_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    drivers = []
    for asked in ("0", "1"):
        monkeypatch.setenv("TRITON_LOOM_HARDWARE_DOT", asked)
        drivers += [LoomDriver(w) for w in ((), ("sanitize",), ("count",), ("sanitize", "count"))]
    assert len({each.get_current_device() for each in drivers}) == 8
    backends = [LoomBackend(each.get_current_target()) for each in drivers]
    assert len({backend.hash() for backend in backends}) == 8
    options = [backend.parse_options({}) for backend in backends]
    assert [o.hardware_dot for o in options] == [False] * 4 + [True] * 4
    assert [o.witness for o in options[:4]] == [o.witness for o in options[4:]]
    assert len({o.hash() for o in options}) == 8
    assert LoomOptions().hash() != LoomOptions(hardware_dot=True).hash()
    assert not LoomBackend(GPUTarget("cpu", "native", 1)).parse_options({}).hardware_dot


def test_other_values_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_LOOM_HARDWARE_DOT", "yes")
    with pytest.raises(ValueError, match="TRITON_LOOM_HARDWARE_DOT must be 0 or 1; got 'yes'"):
        LoomDriver()


ONE_LAUNCH = """
import torch, triton, triton.language as tl

@triton.jit
def square(x_ptr, S: tl.constexpr):
    i = tl.arange(0, S)
    x = tl.load(x_ptr + i[:, None] * S + i[None, :])
    tl.store(x_ptr + i[:, None] * S + i[None, :], tl.dot(x, x).to(tl.bfloat16))

print("dot_bf16" in square[(1,)](torch.ones(32, 32).bfloat16(), S=32).asm["c"])
"""


@pytest.mark.slow
def test_the_option_is_in_the_key_on_disk(tmp_path: Path) -> None:
    log, program, wrapper = tmp_path / "log", tmp_path / "launch.py", tmp_path / "g++"
    program.write_text(ONE_LAUNCH)
    wrapper.write_text(f'#!/bin/sh\necho run >> {log}\nexec g++ "$@"\n')
    wrapper.chmod(0o755)
    environment = {"CXX": str(wrapper), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    for asked, builds in (("0", 1), ("1", 2), ("0", 2), ("1", 2)):
        run = run_python(program, **environment, TRITON_LOOM_HARDWARE_DOT=asked)
        assert run.stdout.strip() == str(asked == "1"), run.stderr
        assert log.read_text() == "run\n" * builds
