"""Small kernels in PTX for the tests of the emulated GPU: written as a body, run on NumPy arrays."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from triton_loom.emulator.machine import CHECKED, MemoryRange, Options, Outcome, Program, run

Array = np.ndarray[Any, Any]

HEAD = """\
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry kernel({parameters})
.reqntid {threads}
{{
  .reg .pred %p<64>;
  .reg .b16 %rs<64>;
  .reg .b32 %r<256>;
  .reg .b64 %rd<128>;
  .loc 1 {line} 0
"""
LINE = 40  # of Python, that all of a body comes from


def ptx(body: str, arrays: int = 1, threads: int = 32) -> str:
    """Return a module in which %rd0, ..., %rd15 are the addresses of the first arrays, and %r0 the thread's number."""
    parameters = ", ".join(f".param .u64 p{k}" for k in range(arrays))
    loads = [f"ld.param.b64 %rd{k}, [p{k}];" for k in range(min(arrays, 16))] + ["mov.u32 %r0, %tid.x;"]
    lines = [HEAD.format(parameters=parameters, threads=threads, line=LINE), *loads, body, "ret;", "}"]
    return "\n".join([*lines, '.file 1 "kernel.py"'])


def launch(
    body: str,
    *arrays: Array,
    threads: int = 32,
    grid: tuple[int, int, int] = (1, 1, 1),
    shared: int = 0,
    options: Options = CHECKED,
    readable: tuple[int, ...] = (),
    cooperative: bool = False,
) -> Outcome:
    """Run a body on arrays, which it may write unless their numbers are in `readable`."""
    memory = [
        MemoryRange(a.ctypes.data, a.ctypes.data + a.nbytes, number not in readable, f"p{number}")
        for number, a in enumerate(arrays)
    ]
    return run(
        Program.of(ptx(body, len(arrays), threads)),
        grid=grid,
        block=threads,
        shared_bytes=shared,
        parameters=struct.pack(f"<{len(arrays)}Q", *(a.ctypes.data for a in arrays)),
        memory=memory,
        cooperative=cooperative,
        options=options,
    )


def aligned(array: Array) -> Array:
    """Return a copy aligned to 64 bytes, like tensors."""
    room = np.zeros(array.nbytes + 64, np.uint8)
    begin = -room.ctypes.data % 64
    copy = room[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def words(count: int) -> Array:
    """Return an array for results."""
    return np.zeros(count, np.uint32)


def store_results(*registers: str) -> str:
    """Return a text in which thread t of block 0 writes its 32-bit registers to p0[t * n], p0[t * n + 1], ..."""
    lines = [f"mul.wide.u32 %rd100, %r0, {4 * len(registers)};", "add.s64 %rd100, %rd0, %rd100;"]
    lines += [f"st.global.b32 [%rd100+{4 * k}], {name};" for k, name in enumerate(registers)]
    return "\n".join(lines)


def kinds(outcome: Outcome) -> list[str]:
    """Return the kinds of findings, each once."""
    return sorted({finding.kind for finding in outcome.findings})
