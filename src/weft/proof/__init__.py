"""How Weft's results are judged: what each op must compute, to the bit or within an error that is derived, and the
checks that hold every workload to it on any device.

- `truths`, made of what `truth` has: the ops in float64. `oracle` and `copies`: the bytes of quantised tensors.
- `calls`: ops called on the device under test. `checks`: what their results are held to.

`weft verify` and the tests of this repository use it; it needs Loom, whose `triton_loom.testing` it is built on.
"""
