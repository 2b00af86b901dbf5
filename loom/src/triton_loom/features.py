"""What a device may ask of the kernels that it runs, as words of its target: `native+sanitize`."""

SANITIZE = "sanitize"  # check every access to memory
COUNT = "count"  # count them
EXPLAIN = "explain"  # take the time of every loop nest
HARDWARE_DOT = "hardware_dot"  # dots of bf16 are the processor's own
