"""Time products on this machine's CPU, against PyTorch on the same values.

    python benchmarks/products.py                    all rows
    python benchmarks/products.py fp8                rows with this in their name

Contenders take turns in one process; a row shows the median of their times and the ratio of the medians. "decode + mm"
multiplies the result of `weft.dequantize` in fp32, "eager decode + mm" decodes codes and scales with plain PyTorch.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable

import torch

import weft

Contenders = dict[str, Callable[[], object]]


def eager(q: weft.QTensor) -> torch.Tensor:
    """Multiply codes and scales as one writes it in PyTorch."""
    assert q.rowwise is not None
    data, scale = q.rowwise.data.float(), q.rowwise.scale
    rows, cols = data.shape
    tall, wide = q.format.block_rows or rows, q.format.group or cols
    return data * scale.repeat_interleave(tall, 0)[:rows].repeat_interleave(wide, 1)[:, :cols]


def quantized(m: int, n: int, k: int, a: str, b: str) -> Contenders:
    x, w = weft.quantize(torch.randn(m, k), a), weft.quantize(torch.randn(n, k), b)
    contenders: Contenders = {
        "weft": lambda: weft.matmul(x, w.T, engine="weft"),
        "decode + mm": lambda: x.dequantize() @ w.dequantize().T,
    }
    if x.format.scale_dtype is torch.float32:
        contenders["eager decode + mm"] = lambda: eager(x) @ eager(w).T
    return contenders


def plain(m: int, n: int, k: int, dtype: torch.dtype) -> Contenders:
    x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    return {"weft": lambda: weft.matmul(x, w.T, engine="weft"), "torch.mm": lambda: torch.mm(x, w.T)}


def integers(m: int, n: int, k: int) -> Contenders:
    x, w = weft.quantize(torch.randn(m, k), "int8:row:te"), weft.quantize(torch.randn(n, k), "int8:row:te")
    assert x.rowwise is not None
    assert w.rowwise is not None
    codes, weight = x.rowwise.data, w.rowwise.data
    return {
        "weft": lambda: weft.matmul(x, w.T, engine="weft"),
        "torch._int_mm": lambda: torch._int_mm(codes, weight.T),
    }


def experts(count: int, tokens: int, n: int, k: int) -> Contenders:
    """Send each token to one expert, chosen at random."""
    rows = weft.row_map(torch.randint(count, (tokens, 1)), count)
    x, w = torch.randn(tokens, k).bfloat16(), torch.randn(count, n, k).bfloat16()
    ends = rows.ends
    starts = [0, *ends.tolist()]

    def loop() -> torch.Tensor:
        y = torch.empty(tokens, n, dtype=torch.bfloat16)
        for expert, (begin, end) in enumerate(itertools.pairwise(starts)):
            torch.mm(x[begin:end], w[expert].T, out=y[begin:end])
        return y

    return {
        "weft": lambda: weft.grouped_matmul(x, w, ends),
        "a loop of torch.mm": loop,
        "weft's kernel": lambda: weft.grouped_matmul(x, w, ends, engine="weft"),
    }


ROWS: dict[str, Callable[[], Contenders]] = {
    "fp8 1x128 x 128x128, 1024x2048x2048": lambda: quantized(1024, 2048, 2048, "1x128", "128x128"),
    "fp8 row x row, 1024x2048x2048": lambda: quantized(1024, 2048, 2048, "row", "row"),
    "mxfp8, 1024x2048x2048": lambda: quantized(1024, 2048, 2048, "mx", "mx"),
    "nvfp4, 1024x2048x2048": lambda: quantized(1024, 2048, 2048, "nvfp4", "nvfp4"),
    "fp8 1x128 x 128x128, 16x2048x2048": lambda: quantized(16, 2048, 2048, "1x128", "128x128"),
    "fp32, 1024x1024x1024": lambda: plain(1024, 1024, 1024, torch.float32),
    "bf16, 1024x1024x1024": lambda: plain(1024, 1024, 1024, torch.bfloat16),
    "bf16, 64 experts, 4096 tokens, 1024x512": lambda: experts(64, 4096, 1024, 512),
    "int8 row x row, 1024x1024x1024": lambda: integers(1024, 1024, 1024),
}


def main() -> None:
    pattern = sys.argv[1] if len(sys.argv) > 1 else ""
    print(
        f"{torch.get_num_threads()} threads; milliseconds, and Weft's speedup over the others in parentheses"
    )
    for name, make in ROWS.items():
        if pattern not in name:
            continue
        contenders = make()
        times: dict[str, list[float]] = {contender: [] for contender in contenders}
        for contender in contenders:
            contenders[contender]()
        for _ in range(9):
            for contender, run in contenders.items():
                begin = time.perf_counter()
                run()
                times[contender].append(time.perf_counter() - begin)
        medians = {contender: 1e3 * statistics.median(values) for contender, values in times.items()}
        print(
            f"{name:38}",
            *(f"{contender} {ms:8.2f} ({ms / medians['weft']:.2f})" for contender, ms in medians.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
