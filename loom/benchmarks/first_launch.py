"""How long the first launch of a kernel takes in a fresh process: printed as JSON, for bench.py.

Which cache directory is used, and whether it already holds the kernel, is the caller's choice
(TRITON_CACHE_DIR). Importing torch and Triton is not part of it, nor is the hash that Triton takes of its own
sources once per process; the latter is reported beside it.
"""

from __future__ import annotations

import json
import time

import torch
from kernels import rms_norm_quant
from triton.runtime.cache import triton_key


def main() -> None:
    x, weight = torch.randn(1, 2048).bfloat16(), torch.rand(2048).bfloat16()
    start = time.perf_counter()
    triton_key()
    hashed = time.perf_counter()
    rms_norm_quant(x, weight)
    launched = time.perf_counter()
    print(json.dumps({"hash_of_triton": hashed - start, "first_launch": launched - hashed}))


if __name__ == "__main__":
    main()
