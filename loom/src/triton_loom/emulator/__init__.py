"""The emulated GPU: executes on the CPU, and checks, the PTX that Triton compiles for NVIDIA GPUs."""
