"""Launches of instrumented kernels, and what they reveal.

`watched` describes a launch to include/witness.h, whose structures `abi` mirrors; `launcher` launches it. `scopes`
holds the open sanitizer and counters (`sanitizer`, `counters`), each with a verdict on every launch (`verdicts`);
`report` prints their results. `findings` puts violations into words, and `reasons` explains them, from the kernel's
source (`expressions`) and from recomputed addresses (`evaluate`). `fresh` is memory that nobody has written yet.
"""
