"""The emulated GPU: executes the PTX that Triton makes for NVIDIA GPUs on the CPU, and checks it meanwhile."""
