"""GPUs that can be emulated: the properties they report to programs, and the limits of a launch.

The limits of a compute capability are from the CUDA programming guide (appendix "Compute Capabilities", tables of
technical specifications), compared on 2026-11-17 with NVIDIA's table in CCCL
(libcudacxx/include/cuda/__device/arch_traits.h): blocks, threads and shared memory of a multiprocessor, and one KiB
that is reserved in each block.

The number of multiprocessors, the clocks and the width of the memory bus are those of one product, from its data sheet
and the output of `deviceQuery` and `nvidia-smi -q -d CLOCK`: kernels size their grids by the first, and nothing here
depends on the others. Twice the memory clock times the bus width is the data sheet's bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True)
class Device:
    """Properties of one GPU. Sizes are in bytes, clocks in MHz."""

    capability: int  # 90 for an sm_90
    product: str
    multiprocessors: int
    shared_per_block: int  # if a kernel opts in to more than 48 KiB
    shared_per_multiprocessor: int
    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int
    clock: int  # of the multiprocessors, at their highest
    memory_clock: int
    memory_bits: int
    registers: int = 65_536  # of a block, and of a multiprocessor

    @property
    def target(self) -> str:
        """Name of its target, as `emulate` takes it."""
        return f"sm_{self.capability}"


def _device(
    capability: int,
    product: str,
    *,
    multiprocessors: int,
    shared: int,  # KiB of a multiprocessor, of which each block gives one to the system
    threads: int,
    blocks: int,
    clock: int,
    memory: tuple[int, int],
) -> Device:
    return Device(
        capability,
        product,
        multiprocessors,
        shared_per_block=(shared - 1) * KIB,
        shared_per_multiprocessor=shared * KIB,
        threads_per_multiprocessor=threads,
        blocks_per_multiprocessor=blocks,
        clock=clock,
        memory_clock=memory[0],
        memory_bits=memory[1],
    )


DEVICES = {
    device.target: device
    for device in (
        _device(80, "A100 SXM 80 GB", multiprocessors=108, shared=164, threads=2048, blocks=32, clock=1410,
                memory=(1593, 5120)),
        _device(86, "RTX A6000", multiprocessors=84, shared=100, threads=1536, blocks=16, clock=1800,
                memory=(8001, 384)),
        _device(89, "L40S", multiprocessors=142, shared=100, threads=1536, blocks=24, clock=2520,
                memory=(9001, 384)),
        _device(90, "H100 SXM 80 GB", multiprocessors=132, shared=228, threads=2048, blocks=32, clock=1980,
                memory=(2619, 5120)),
        _device(100, "B200", multiprocessors=148, shared=228, threads=2048, blocks=32, clock=1965,
                memory=(3996, 8192)),
        _device(120, "RTX 5090", multiprocessors=170, shared=100, threads=1536, blocks=24, clock=2407,
                memory=(14001, 512)),
    )
}  # fmt: skip


def device_of(target: str) -> Device:
    """Return the GPU of a target by its name.

    >>> device_of("sm_90").shared_per_block
    232448
    """
    if target not in DEVICES:
        raise ValueError(f"no {target!r} can be emulated; there are {', '.join(DEVICES)}")
    return DEVICES[target]
