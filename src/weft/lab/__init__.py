"""The laboratory: what judges the library. `weft` never imports it; commands and tests do.

- `families`: the workloads of every op, and what it must compute, in float64, made of `problem` and `truth`.
- `checks`: what results are held to on any device; `calls` runs them. `oracle`, `copies`: bytes of quantized tensors.
- `compiled`: binaries for GPUs, read and judged. `symbolic`: proofs for all sizes. `traffic`, `model`: bytes and times.
- `bench` and `commands`: what a person types.

It needs Loom, whose `triton_loom.testing` it is built on: `pip install -e loom`.
"""
