"""Launches of instrumented kernels, and what is learnt from them.

`watched` describes a launch to include/witness.h, whose structures `abi` mirrors; `launcher` makes it. `scopes` knows
who wants to hear of it: a sanitizer or a counter (`sanitizer`, `counters`), each with a verdict on every launch
(`verdicts`); `report` prints what they heard. `findings` puts what went wrong into words, and `reasons` says why, from
the kernel's text (`expressions`) and from addresses that are worked out once more (`evaluate`). `fresh` is memory that
nobody has written yet.
"""
