"""The laboratory: what judges the library. `weft` never imports it; commands and tests do.

- `families`: a file for each family of ops, with its workloads, what they must compute in float64, and the plain
  PyTorch they are timed beside. `family` is their type; `problem`, `truth` and `chain` are their building blocks.
- `checks`: what results are held to on any device; `calls` runs them. `oracle`, `copies`: bytes of quantized tensors.
- `compiled`: binaries for GPUs, read and judged. `symbolic`: proofs for all sizes. `traffic`, `model`: bytes and times.
- `bench` and `commands`: what a person types.

It needs Loom, whose `triton_loom.testing` it is built on: `pip install -e loom`. `families`, `bench` and the builder of
bundles for GPUs do without.
"""

from ..ops import import_kernels

import_kernels()
