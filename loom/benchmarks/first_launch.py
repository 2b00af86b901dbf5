"""How long the first launch of a kernel takes in a fresh process: printed as JSON, for bench.py.

Which cache directory is used, and whether it already holds the kernel, is the caller's choice
(TRITON_CACHE_DIR). What Triton does once per process is reported beside it: the hash of its own sources,
and the import of Gluon, which it puts off until the first launch.
"""

from __future__ import annotations

import json
import time
from itertools import pairwise

import torch
from kernels import rms_norm_quant
from triton.runtime.cache import triton_key


def import_gluon() -> None:
    import triton.experimental.gluon  # noqa: F401


def main() -> None:
    x, weight = torch.randn(1, 2048).bfloat16(), torch.rand(2048).bfloat16()
    times = [time.perf_counter()]
    for step in (triton_key, import_gluon, lambda: rms_norm_quant(x, weight)):
        step()
        times.append(time.perf_counter())
    hashing, importing, launching = (after - before for before, after in pairwise(times))
    print(json.dumps({"hash_of_triton": hashing, "import_of_gluon": importing, "first_launch": launching}))


if __name__ == "__main__":
    main()
