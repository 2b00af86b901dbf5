"""The emulated GPU: executes the PTX that Triton makes for NVIDIA GPUs on this machine's CPU, and checks it meanwhile."""
