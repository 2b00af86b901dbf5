"""Print the time of a kernel's first launch in a fresh process as JSON, for bench.py.

The caller chooses the cache directory (TRITON_CACHE_DIR), and whether it already has the kernel. Triton's work
once per process is reported separately: the hash of its own sources, and the import of Gluon, which it defers
until the first launch; so is the first launch of the smallest kernel under the sanitizer, in the same process.
"""

from __future__ import annotations

import json
import time
from itertools import pairwise

import torch
import triton_loom
from kernels import rms_norm_quant
from smallest import double
from triton.runtime.cache import triton_key


def import_gluon() -> None:
    import triton.experimental.gluon  # noqa: F401


def launch_sanitized() -> None:
    with triton_loom.sanitize():
        double[(1,)](torch.ones(64), torch.zeros(64), 64, BLOCK=64)


def main() -> None:
    x, weight = torch.randn(1, 2048).bfloat16(), torch.rand(2048).bfloat16()
    steps = {
        "hash_of_triton": triton_key,
        "import_of_gluon": import_gluon,
        "first_launch": lambda: rms_norm_quant(x, weight),
        "first_sanitized_launch": launch_sanitized,
    }
    times = [time.perf_counter()]
    for step in steps.values():
        step()
        times.append(time.perf_counter())
    print(json.dumps(dict(zip(steps, (after - before for before, after in pairwise(times)), strict=True))))


if __name__ == "__main__":
    main()
