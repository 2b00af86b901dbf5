"""Launches of instrumented kernels, and what is learnt from them.

`watched` describes a launch to include/witness.h, whose structures `abi` mirrors; `launcher` makes it. `scopes` knows
who wants to hear of it: a sanitizer or a counter (`sanitizer`, `counters`); `report` prints what they heard. `fresh` is
memory that nobody has written yet.
"""
