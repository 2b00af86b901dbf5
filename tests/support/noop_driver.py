"""Time calls on the host: kernels are compiled for an sm_90 and nothing is launched.

python tests/support/noop_driver.py        prints the measured ratios as JSON
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton_loom.testing import NoopDriver


def install() -> None:
    triton.runtime.driver.set_active(NoopDriver())


@triton.jit
def twenty_seven(
    p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10, f0, f1,
    C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr, C3: tl.constexpr, C4: tl.constexpr, C5: tl.constexpr,
    C6: tl.constexpr, C7: tl.constexpr, C8: tl.constexpr, C9: tl.constexpr, C10: tl.constexpr,
):  # fmt: skip
    """Take as many arguments as the kernel of a norm."""
    tl.store(p7 + tl.arange(0, 16), tl.load(p0 + tl.arange(0, 16)))


def best(functions: dict[str, Callable[[], Any]], rounds: int = 40, calls: int = 100) -> dict[str, float]:
    """Return microseconds per call: interleaved rounds, and the median of the faster half of them."""
    for function in functions.values():
        for _ in range(50):
            function()
    gc.disable()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(calls):
                function()
            times[name].append((time.perf_counter() - start) / calls * 1e6)
    gc.enable()
    return {name: statistics.median(sorted(t)[: rounds // 2]) for name, t in times.items()}


def measure() -> dict[str, float]:
    install()
    import weft

    x = torch.randn(8, 4096, dtype=torch.bfloat16)
    weight = torch.ones(4096, dtype=torch.bfloat16)
    residual = torch.randn_like(x)
    sequences, gates = x.view(2, 4, 4096), residual.view(4, 2, 4096)
    dy = torch.randn(8, 2048, dtype=torch.bfloat16)
    expert_indices = torch.arange(8).expand(8, 8)
    with weft.backend("reference"):
        rows = weft.row_map(expert_indices, 8, align=16)
    probs, permuted = torch.rand(8, 8), torch.empty(len(rows.slot_of_row), 4096, dtype=torch.bfloat16)
    gradients = [torch.ones(64) for _ in range(32)]
    norm = torch.tensor(2.0)
    target = torch.arange(8)
    heads = weft.Heads(q=16, kv=8, dim=128)
    head_norm = weft.HeadNorm("rms", *torch.ones(2, 128, dtype=torch.bfloat16))
    rotation = weft.Rotation(None, *torch.ones(2, 8, 64))
    cache = weft.KVCache(*torch.zeros(2, 8, 8, 128, dtype=torch.uint8), *torch.zeros(2, 8, 8))
    vocabulary, labels = torch.randn(64, 4096, dtype=torch.bfloat16), torch.arange(8)
    scores = torch.randn(8, 64)
    slots = torch.arange(8)
    tokens, ends = torch.randn(128, 4096, dtype=torch.bfloat16), torch.tensor([10, 128])
    matrices = torch.randn(2, 64, 4096, dtype=torch.bfloat16)
    codes, square = weft.quantize(tokens, "1x128"), weft.quantize(vocabulary, "128x128").T
    queries, keys = (torch.randn(1, n, 64, 128, dtype=torch.bfloat16) for n in (8, 2))
    paged = weft.KVCache(*torch.zeros(2, 16, 16, 2, 128, dtype=torch.bfloat16))
    pages = {
        "page_table": torch.zeros(4, 20, dtype=torch.int32),
        "lengths": torch.zeros(4, dtype=torch.int32),
    }
    newest = torch.randn(4, 8, 128, dtype=torch.bfloat16)
    leaf, leaf_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()

    def plain() -> Any:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        twenty_seven[(8, 1, 1)](
            x, None, weight, None, None, None, None, y, None, None, None, None, None, None,
            8, 4096, 1, 4096, 0, 0, 0, 1, 0, 0, 0, 1e-6, 0.0,
            C0=False, C1=False, C2=None, C3=0, C4=False, C5=1, C6=4096, C7=False, C8=False, C9=16, C10=False,
        )  # fmt: skip
        return y

    def plain_with_residual() -> Any:
        y, h = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        twenty_seven[(8, 1, 1)](
            x, residual, weight, None, None, None, None, y, h, None, None, None, None, None,
            8, 4096, 1, 4096, 0, 4096, 0, 1, 0, 0, 0, 1e-6, 0.0,
            C0=False, C1=False, C2=None, C3=0, C4=False, C5=1, C6=4096, C7=False, C8=False, C9=16, C10=False,
        )  # fmt: skip
        return y, h

    return best(
        {
            "plain": plain,
            "rms_norm": lambda: weft.rms_norm(x, weight),
            "rms_norm with autograd": lambda: weft.rms_norm(leaf, leaf_weight),
            "plain with residual": plain_with_residual,
            "rms_norm with residual": lambda: weft.rms_norm(x, weight, residual=residual),
            "rms_norm with residual and 1x128": lambda: weft.rms_norm(
                x, weight, residual=residual, quantize="1x128"
            ),
            "quantize": lambda: weft.quantize(x, "1x128"),
            "glu": lambda: weft.glu(x),
            "glu_backward": lambda: weft.glu_backward(dy, x),
            "row_map": lambda: weft.row_map(expert_indices, 8, align=16),
            "permute": lambda: weft.permute(x, rows, probs),
            "permute with 1x128": lambda: weft.permute(x, rows, probs, quantize="1x128"),
            "unpermute": lambda: weft.unpermute(permuted, rows, probs),
            "gated_norm": lambda: weft.gated_norm(sequences, gates, weight, groups=4, transpose=True),
            "grad_norm of 32": lambda: weft.grad_norm(gradients),
            "clip_grads_ of 32": lambda: weft.clip_grads_(gradients, 1.0, norm=norm),
            "cross_entropy": lambda: weft.cross_entropy(x, target),
            "cross_entropy of each token": lambda: weft.cross_entropy(x, target, reduction="none"),
            "qkv_prepare": lambda: weft.qkv_prepare(x, heads=heads, norm=head_norm, rotation=rotation),
            "qkv_prepare with a cache": lambda: weft.qkv_prepare(
                x, heads=heads, norm=head_norm, rotation=rotation, cache=cache, slots=slots
            ),
            "rope": lambda: weft.rope(x.view(8, 32, 128), rotation),
            "router_linear": lambda: weft.router_linear(x, vocabulary),
            "route": lambda: weft.route(scores, 8),
            "linear_logprobs": lambda: weft.linear_logprobs(x, vocabulary, labels),
            "linear_sample": lambda: weft.linear_sample(x, vocabulary, seed=labels, step=labels),
            "matmul": lambda: weft.matmul(tokens, vocabulary.T, engine="weft"),
            "matmul of FP8": lambda: weft.matmul(codes, square),
            "attention": lambda: weft.attention(queries, keys, keys, is_causal=True, engine="weft"),
            "attention_decode": lambda: weft.attention_decode(newest, paged, **pages),
            "grouped_matmul": lambda: weft.grouped_matmul(tokens, matrices, ends, engine="weft"),
        }
    )


if __name__ == "__main__":
    print(json.dumps(measure()))
