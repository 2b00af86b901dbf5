"""Model how long a kernel would take on a GPU, from counted bytes and compiled code. *Modelled*, never measured.

A launch takes as long as the slowest of its bounds: memory moves its bytes, tensor cores compute its products. Left out
are caches, power, clocks, exposed latencies and the host. `public_timings` compares the model with every timing that
others have published of similar kernels: a large error there is reported, not tuned away.

Products, per SM, in cycles per block of k: the tensor cores take BM * BN * BK / rate; shared memory takes the bytes
that copies write and units read, at 128 a cycle; work that must follow a block before the next begins (sums scaled by
block) is added. Prologue and epilogue of a tile are 3,500 cycles. Tiles run in waves of one per SM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from ..quant import QTensor
from .compiled import Binary
from .families import Workload, flops_of
from .published import PUBLISHED

# Overhead of a launch in seconds, when launches follow each other in a graph.
LAUNCH = 2e-6
PROLOGUE = 3500  # cycles
LATENCY = 7e-7  # seconds of a load from busy memory; 0.6 to 0.8 us are published for A100 and H100


@dataclass(frozen=True)
class Board:
    """A device, with published rates sustained on it with random data instead of data-sheet rates."""

    name: str
    target: str
    multiprocessors: int
    macs: int  # 16-bit multiply-adds per cycle and SM
    bandwidth: float  # bytes per second
    sustained: dict[str, float] = field(hash=False)  # FLOPs per second, by element type
    source: str = ""


_SWEEPS = "gn-kernels README, 2026-08"
BOARDS = {
    board.name: board
    for board in (
        Board("A100", "sm_80", 108, 1024, 1.70e12, {"bf16": 267e12, "int8": 465e12}, _SWEEPS),
        Board("H100", "sm_90", 132, 2048, 3.00e12, {"bf16": 690e12, "fp8": 1085e12, "int8": 1161e12},
              "Triton tutorial 07 (bf16), gn-kernels; copies at 0.9 of 3.35 TB/s"),
        Board("H200", "sm_90", 132, 2048, 4.055e12, {"bf16": 763e12, "fp8": 1085e12, "int8": 1161e12}, _SWEEPS),
        Board("H800", "sm_90", 132, 2048, 3.00e12, {"bf16": 690e12, "fp8": 1085e12}, "as H100"),
        Board("H20", "sm_90", 78, 512, 3.60e12, {"bf16": 147e12, "fp8": 294e12}, "data sheet; 0.9 of 4 TB/s"),
        Board("B200", "sm_100", 148, 4096, 5.982e12,
              {"bf16": 1723e12, "fp8": 2669e12, "int8": 3378e12, "fp4": 6242e12}, _SWEEPS),
        Board("RTX 5090", "sm_120", 170, 256, 1.509e12,
              {"bf16": 230e12, "fp8": 448e12, "int8": 603e12, "fp4": 1165e12}, f"{_SWEEPS}, at 400 W"),
        Board("MI300X", "gfx942", 304, 1024, 4.00e12, {"bf16": 660e12, "fp8": 1197e12, "int8": 888e12},
              f"{_SWEEPS}; copies at 0.75 of 5.3 TB/s"),
    )
}  # fmt: skip
BITS = {"bf16": 16, "fp8": 8, "int8": 8, "fp4": 4}
# The board that represents each target.
USUAL = {"sm_80": "A100", "sm_90": "H100", "sm_100": "B200", "sm_120": "RTX 5090", "gfx942": "MI300X"}


@dataclass(frozen=True)
class Tile:
    """Tile that a block computes at once: m x n of the result, k at a time."""

    m: int
    n: int
    k: int
    groups: int = 1  # warp groups that each read all of B from shared memory
    after: int = 0  # cycles after each block of k, before the next begins


def memory_seconds(board: Board, moved: float, launches: int = 1) -> float:
    """Return the time to move so many bytes in so many launches."""
    return moved / board.bandwidth + launches * LAUNCH


def product_seconds(board: Board, element: str, m: int, n: int, k: int, tile: Tile) -> float:
    """Return the time of an m x n x k matrix product with elements of this type."""
    bits = BITS[element]
    rate = board.macs * 16 // bits
    tensor = tile.m * tile.n * tile.k / rate
    operands = (tile.m + tile.n) * tile.k * bits / 8
    read = (tile.m + tile.n * tile.groups) * tile.k * bits / 8
    block = max(tensor, (operands + read) / 128) + tile.after
    blocks = math.ceil(k / tile.k)
    waves = math.ceil(math.ceil(m / tile.m) * math.ceil(n / tile.n) / board.multiprocessors)
    cycles = waves * (blocks * block + PROLOGUE)
    ideal = m * n * k / rate / board.multiprocessors
    return 2.0 * m * n * k / board.sustained[element] * cycles / ideal


def tile_stretch(board: Board, element: str, tile: Tile) -> float:
    """Return the time of a block of k, shared-memory traffic included, as a multiple of its multiplications' time."""
    bits = BITS[element]
    tensor = tile.m * tile.n * tile.k / (board.macs * 16 // bits)
    shared = ((tile.m + tile.n) + (tile.m + tile.n * tile.groups)) * tile.k * bits / 8 / 128
    return max(1.0, shared / tensor)


def latency_stretch(board: Board, binary: Binary, programs: int, held: int, threads: int) -> float:
    """Return the time of a memory-bound launch as a multiple of what its bytes alone take. Each multiprocessor holds
    `held` programs of `threads` threads at once, each with all loads of its code in flight; if these are fewer bytes
    than the board moves during one load's latency, the launch waits. A partial last wave counts as a full one."""
    resident = held * board.multiprocessors
    waves = programs / resident
    loaded = sum(bits // 8 * count for bits, count in binary.loads.items())
    in_flight = min(programs, resident) * threads * max(loaded, 4)
    waits = max(1.0, board.bandwidth * LATENCY / in_flight)
    return waits * (math.ceil(waves) / waves if waves > 1 else 1.0)


# ---- published timings ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Public:
    """A published timing and the modelled one."""

    what: str
    board: str
    measured: float  # seconds
    modelled: float
    source: str
    note: str = ""

    @property
    def error(self) -> float:
        """Return the model's error relative to the measured time."""
        return self.modelled / self.measured - 1


_HOPPER, _BLACKWELL, _GEFORCE = Tile(128, 256, 64, groups=2), Tile(128, 256, 64), Tile(128, 128, 64)
_BLOCKS = Tile(128, 128, 128, after=250)
_DEPTHS = (512, 1024, 2048, 4096, 8192, 16384)

# Board, element, (m, n, k), tile, TFLOPS as measured by the source, the source and a remark.
_PRODUCTS = [
    *(("H100", "bf16", (8192, 8192, k), _HOPPER, tflops, "Triton, Gluon tutorial 07", "")
      for k, tflops in zip(_DEPTHS, (492, 554, 574, 609, 629, 654), strict=True)),
    *(("B200", "bf16", (8192, 8192, k), _BLACKWELL, tflops, "Triton, Gluon tutorial 07", "")
      for k, tflops in zip(_DEPTHS, (616, 997, 1153, 1164, 1161, 1186), strict=True)),
    ("H20", "fp8", (4096, 24576, 7168), _BLOCKS, 254, "vllm #49932", "Triton, scales by blocks"),
    ("H20", "fp8", (4096, 7168, 16384), _BLOCKS, 243, "vllm #49932", "the same"),
    ("H20", "fp8", (4096, 32768, 512), _BLOCKS, 182, "vllm #49932", "the same"),
    ("H20", "fp8", (1024, 24576, 7168), _BLOCKS, 251, "vllm #49932", "the same"),
    ("H100", "fp8", (16640, 5120, 8192), _BLOCKS, 399, "ao #2784", "its loads were not coalesced (ao #2713)"),
    ("H100", "fp8", (8192, 8192, 8192), Tile(128, 256, 128, groups=2), 1126, "FBGEMM #2546", "scales by rows"),
    ("RTX 5090", "fp8", (4096, 4096, 4096), _GEFORCE, 379, "gn-kernels README", "Triton"),
    ("RTX 5090", "int8", (4096, 4096, 4096), _GEFORCE, 530, "gn-kernels README", "Triton"),
]  # fmt: skip


def public_timings() -> list[Public]:
    """Return every known published timing: products by their rates, memory-bound rows by their times."""
    timings = []
    for name, element, (m, n, k), tile, tflops, source, note in _PRODUCTS:
        modelled = product_seconds(BOARDS[name], element, m, n, k, tile)
        timings.append(
            Public(f"{element} {m} x {n} x {k}", name, 2e-12 * m * n * k / tflops, modelled, source, note)
        )
    for row in PUBLISHED:
        modelled = memory_seconds(BOARDS["H800"], row.megabytes * 1e6)
        note = "impossible at the size published" if row.number == 17 else ""
        timings.append(Public(row.title, "H800", row.microseconds / 1e6, modelled, "linghe README", note))
    return timings


# ---- Weft's workloads -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bounds:
    """Lower bounds on a workload at its real size: the most bytes its op may move, and its products."""

    moved: float  # bytes
    flops: int | None
    element: str  # of the products' operands

    @classmethod
    def of(cls, workload: Workload) -> Bounds:
        flops = flops_of(workload)
        return cls(
            workload.least_bytes() * workload.moves, flops, "bf16" if flops is None else element_of(workload)
        )

    def seconds(self, board: Board, launches: int) -> float:
        """Return the time on a board that moves memory and multiplies at its sustained rates."""
        memory = memory_seconds(board, self.moved, launches)
        if self.flops is None:
            return memory
        return max(memory, self.flops / board.sustained.get(self.element, board.sustained["bf16"]))


def element_of(workload: Workload) -> str:
    """Return the element type that the tensor cores multiply: the wider of the two operands'."""
    arguments = list(workload.make("meta", rows=8).kwargs.values())
    formats = [value.format for value in arguments if isinstance(value, QTensor)]
    plain = any(
        type(value) is Tensor and value.is_floating_point() and value.dim() > 1 for value in arguments
    )
    if not formats or plain:
        return "bf16"
    if all(form.packed == 2 for form in formats):
        return "fp4"
    return "int8" if any(form.element == "int8" for form in formats) else "fp8"
