"""The classic kernels of loom/examples/ against PyTorch in float64, and bit for bit across thread counts."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from processes import run_python
from triton_loom.testing import EPS32, assert_rounded_once

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
FLOATS = [FP32, FP16, BF16]

pytestmark = pytest.mark.compat


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


vector_add = load("01_vector_add")
fused_softmax = load("02_fused_softmax")
matmul = load("03_matmul")
dropout = load("04_low_memory_dropout")
layer_norm = load("05_layer_norm")
flash_attention = load("06_flash_attention")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_runs_as_a_script(script: Path) -> None:
    run = run_python(script)
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(r"[^\n]*max error \d\.\d\de[+-]\d\d[^\n]*\n", run.stdout)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_does_not_mention_the_backend(script: Path) -> None:
    assert "loom" not in script.read_text().lower()


@pytest.mark.parametrize(
    ("n", "dtype"),
    [(n, FP32) for n in (1, 1023, 1024, 1025, 98_432)]
    + [(2049, d) for d in (FP16, BF16, torch.float64, torch.int32)],
    ids=str,
)
def test_vector_add(n: int, dtype: torch.dtype) -> None:
    x, y = (torch.randn(2, n) * 100).to(dtype)
    assert torch.equal(vector_add.add(x, y), x + y)


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (65, 781), (200, 256), (7, 4097)], ids=str)
@pytest.mark.parametrize("values", ["normal", "shifted", "masked"])
def test_fused_softmax(shape: tuple[int, int], values: str) -> None:
    x = torch.randn(shape)
    if values == "shifted":
        x = x * 5 + 1e4
    elif values == "masked":
        x[:, 1::3] = -torch.inf
    truth = torch.softmax(x.double(), dim=-1)
    # Relative: rounding of x - max (half an ulp of it), exp and division (2 ulp each), and a sum of
    # n positive terms, whose rounding errors add up like a random walk.
    distance = (x.double().amax(1, keepdim=True) - x.double()).nan_to_num(posinf=0.0)
    relative = EPS32 * (4 + distance + shape[1] ** 0.5 / 4)
    assert_rounded_once(fused_softmax.softmax(x), truth, truth * relative)


def test_fused_softmax_of_strided_rows() -> None:
    x = torch.randn(37, 2, 100)[:, 1]
    assert x.stride(0) == 200
    truth = torch.softmax(x.double(), dim=-1)
    distance = x.double().amax(1, keepdim=True) - x.double()
    assert_rounded_once(fused_softmax.softmax(x), truth, truth * EPS32 * (6.5 + distance))


def assert_matmul(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, activation: str = "") -> None:
    a, b = a.double(), b.double()
    truth = a @ b
    if activation == "leaky_relu":
        truth = torch.where(truth >= 0, truth, 0.01 * truth)
    # K products, added in float32: 4 eps sqrt(K) times the norm of the terms.
    noise = 4 * EPS32 * a.shape[1] ** 0.5 * ((a**2) @ (b**2)).sqrt()
    assert_rounded_once(c, truth, noise)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (33, 17, 65), (300, 200, 112)], ids=str)
def test_matmul(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    M, N, K = shape
    a, b = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype)
    assert_matmul(matmul.matmul(a, b), a, b)


@pytest.mark.parametrize("layout", ["tn", "nt", "tt", "sliced"])
def test_matmul_of_strided_operands(layout: str) -> None:
    M, N, K = 70, 90, 50
    a = torch.randn(K, M).t() if layout[0] == "t" else torch.randn(M, K)
    b = torch.randn(N, K).t() if layout[1] == "t" else torch.randn(K, N)
    if layout == "sliced":
        a, b = torch.randn(2 * M, 3 * K)[::2, ::3], torch.randn(K, N + 5)[:, 5:]
    assert_matmul(matmul.matmul(a, b), a, b)


def test_matmul_with_activation() -> None:
    a, b = torch.randn(65, 40), torch.randn(40, 66)
    assert_matmul(matmul.matmul(a, b, "leaky_relu"), a, b, "leaky_relu")


def philox_uniform(seed: int, n: int) -> np.ndarray:
    """Return the first uniform number of Philox-4x32-10 for the counters 0..n-1, in NumPy."""
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    c = [np.arange(n, dtype=np.uint64)] + [np.zeros(n, dtype=np.uint64)] * 3
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64((seed >> 32) & 0xFFFFFFFF)]
    for _ in range(10):
        a = np.uint64(0xD2511F53) * c[0]
        b = np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> half) ^ c[1] ^ key[0], b & low, (a >> half) ^ c[3] ^ key[1], a & low]
        key = [(key[0] + np.uint64(0x9E3779B9)) & low, (key[1] + np.uint64(0xBB67AE85)) & low]
    bits = c[0].astype(np.uint32).view(np.int32)
    magnitude = np.where(bits < 0, ~bits, bits)
    return magnitude.astype(np.float32) * np.float32(4.6566127342e-10)


@pytest.mark.parametrize("seed", [0, 1, 123, 2**31 - 1, 2**40 + 7])
@pytest.mark.parametrize("n", [1, 1000, 100_003])
def test_low_memory_dropout(n: int, seed: int) -> None:
    p = np.float32(0.3)
    x = torch.randn(n)
    keep = torch.from_numpy(philox_uniform(seed, n) > p)
    assert n < 100 or (keep.any() and not keep.all())
    expected = torch.where(keep, torch.from_numpy(x.numpy() / (np.float32(1) - p)), 0.0)
    assert torch.equal(dropout.seeded_dropout(x, float(p), seed), expected)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 7), FP32), ((300, 781), FP32), ((2, 3, 8192), FP32), ((33, 4097), FP16), ((300, 781), BF16)],
    ids=str,
)
def test_layer_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    N = shape[-1]
    M = int(np.prod(shape[:-1]))
    inputs = [torch.randn(shape) * 0.5 - 2.3, torch.rand(N) + 0.5, torch.randn(N)]
    x, w, b = (tensor.to(dtype).requires_grad_() for tensor in inputs)
    dy = torch.randn(shape).to(dtype)
    y = layer_norm.layer_norm(x, w, b)
    dx, dw, db = torch.autograd.grad(y, (x, w, b), dy)

    x64, w64, b64 = (tensor.detach().double().requires_grad_() for tensor in (x, w, b))
    y64 = torch.nn.functional.layer_norm(x64, (N,), w64, b64, 1e-5)
    dx64, dw64, db64 = torch.autograd.grad(y64, (x64, w64, b64), dy.double())

    # xhat is a difference of two larger numbers: its error follows their size, not its own.
    with torch.no_grad():
        x64, w64, b64, dy64 = x64.detach(), w64.detach(), b64.detach(), dy.double()
        mean = x64.mean(-1, keepdim=True)
        rstd = (x64.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
        xhat = (x64.abs() + mean.abs()) * rstd
        wdy = (w64 * dy64).abs()
        projections = xhat * (xhat * wdy).mean(-1, keepdim=True) + wdy.mean(-1, keepdim=True)
        rows = tuple(range(len(shape) - 1))
        assert_rounded_once(y, y64, 8 * EPS32 * (xhat * w64.abs() + b64.abs()))
        assert_rounded_once(dx, dx64, 8 * EPS32 * rstd * (wdy + projections))
        assert_rounded_once(dw, dw64, 8 * EPS32 * M**0.5 * ((dy64 * xhat) ** 2).sum(rows).sqrt())
        assert_rounded_once(db, db64, 4 * EPS32 * M**0.5 * (dy64**2).sum(rows).sqrt())


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("n_ctx", "head_dim", "dtype"),
    [(1, 16, FP32), (64, 32, FP32), (65, 128, FP32), (300, 64, FP16), (300, 64, BF16)],
    ids=str,
)
def test_flash_attention(n_ctx: int, head_dim: int, causal: bool, dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 2, 3, n_ctx, head_dim).to(dtype).unbind()
    out = flash_attention.attention(q, k, v, causal)

    q64, k64, v64 = q.double(), k.double(), v.double()
    scores = q64 @ k64.transpose(-1, -2) * head_dim**-0.5
    if causal:
        scores.masked_fill_(torch.ones(n_ctx, n_ctx).triu(1).bool(), -torch.inf)
    p = torch.softmax(scores, dim=-1)
    # A score's error enters its weight as a factor; the sums over keys are of the same kind.
    noise = EPS32 * (8 + 4 * head_dim**0.5 + 4 * n_ctx**0.5) * (p @ v64.abs())
    if dtype != torch.float32:
        # The weights are rounded to the dtype of v: half an ulp each, independent, so four sigma of the sum.
        noise += 2 * torch.finfo(dtype).eps * ((p**2) @ (v64**2)).sqrt()
    assert_rounded_once(out, p @ v64, noise)


def run_vector_add() -> list[torch.Tensor]:
    return [vector_add.add(torch.randn(100_003), torch.randn(100_003))]


def run_fused_softmax() -> list[torch.Tensor]:
    return [fused_softmax.softmax(torch.randn(333, 781))]


def run_matmul() -> list[torch.Tensor]:
    return [matmul.matmul(torch.randn(300, 200).to(d), torch.randn(200, 250).to(d)) for d in FLOATS]


def run_dropout() -> list[torch.Tensor]:
    return [dropout.seeded_dropout(torch.randn(100_003), 0.3, 7)]


def run_layer_norm() -> list[torch.Tensor]:
    inputs = [
        tensor.requires_grad_() for tensor in (torch.randn(1000, 300), torch.rand(300), torch.rand(300))
    ]
    y = layer_norm.layer_norm(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, torch.randn(1000, 300))]


def run_flash_attention() -> list[torch.Tensor]:
    q, k, v = torch.randn(3, 2, 2, 300, 64).unbind()
    return [flash_attention.attention(q, k, v, causal) for causal in (False, True)]


@pytest.mark.parametrize(
    "run",
    [run_vector_add, run_fused_softmax, run_matmul, run_dropout, run_layer_norm, run_flash_attention],
    ids=lambda run: run.__name__.removeprefix("run_"),
)
def test_determinism(run: Callable[[], list[torch.Tensor]]) -> None:
    """Results are bitwise equal with 1, 2 and 4 threads, and over ten runs with four."""
    results = []
    for threads in (1, 2, *[4] * 10):
        torch.set_num_threads(threads)
        torch.manual_seed(11)
        results.append(run())
    for other in results[1:]:
        for expected, got in zip(results[0], other, strict=True):
            assert torch.equal(expected, got)
