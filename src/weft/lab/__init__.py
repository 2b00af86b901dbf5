"""The laboratory judges the library. Commands and tests import it; `weft` itself never does.

- `families`: a file for each family of ops, with its workloads, their float64 truths and the plain PyTorch that they
  are timed against. `family` is the type of these files; `problem`, `truth` and `chain` are their building blocks.
- `checks`: properties that results must have on any device; `calls` runs the ops. `oracle`, `copies`: expected bytes of
  quantized tensors.
- `compiled`: GPU binaries, read and judged. `symbolic`: proofs for all sizes. `traffic`, `model`: bytes and times.
- `bench` and `commands`: the command line.

It requires Loom, since it builds on `triton_loom.testing`: `pip install -e loom`. `families`, `bench` and the builder
of GPU bundles work without it.
"""

from ..ops import import_kernels

import_kernels()
