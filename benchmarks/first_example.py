"""Time README's example (residual, RMSNorm and FP8) in Weft, in eager PyTorch and under torch.compile.

`python benchmarks/first_example.py`: contenders take turns; medians of 60 rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import weft

ROUNDS = 60
(x, residual), weight = torch.randn(2, 512, 4096).bfloat16(), torch.ones(4096)


def eager() -> tuple[torch.Tensor, ...]:
    h = x + residual
    y = torch.nn.functional.rms_norm(h.float(), (4096,), weight, eps=1e-6).view(512, 32, 128)
    scale = y.abs().amax(-1, keepdim=True) / 448
    return (y / scale).to(torch.float8_e4m3fn).view(512, 4096), scale, h


def fused() -> object:
    return weft.rms_norm(x, weight, residual=residual, quantize="e4m3:1x128:vllm")


def main() -> None:
    contenders: dict[str, Callable[[], object]] = {
        "eager": eager,
        "compile": torch.compile(eager),
        "weft": fused,
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(5 + ROUNDS):
        for name, run in contenders.items():
            begin = time.perf_counter()
            run()
            if round_ >= 5:
                times[name].append(1e3 * (time.perf_counter() - begin))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, ms in medians.items():
        print(f"{name:8} {ms:6.2f} ms, {ms / medians['weft']:.1f} times Weft's time")


if __name__ == "__main__":
    main()
