"""Options that a kernel is compiled and launched with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class LoomOptions:
    """Launch options. Triton rejects keywords that are not fields here, hence the second half."""

    arch: str = "native"
    witness: tuple[str, ...] = ()  # what an instrumented kernel does at each access: "sanitize", "count"
    explain: bool = False  # time every loop nest
    hardware_dot: bool = False  # bf16 dots by the processor's tiles: faster, in its order of summation
    quick_build: bool = (
        False  # builds in half the time, runs 10 to 30 % slower, bit-identical results: for tests
    )
    spin_limit: float = 120  # seconds that a `while` loop of a program may run; 0: no limit
    backend_name: str = "cpu"
    warp_size: int = 1
    debug: bool = False
    sanitize_overflow: bool = True
    launch_cooperative_grid: bool = False
    ir_override: str | None = None
    instrumentation_mode: str = ""
    supported_fp8_dtypes: tuple[str, ...] = ("fp8e4b8", "fp8e4nv", "fp8e5", "fp8e5b16")
    deprecated_fp8_dot_operand_dtypes: tuple[str, ...] = ()
    default_dot_input_precision: str = "ieee"  # as on any device without TF32 units
    allowed_dot_input_precisions: tuple[str, ...] = ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6")
    max_num_imprecise_acc_default: int = 0

    # GPU launch parameters: accepted from callers that tune for a GPU, without effect here.
    num_warps: int = 4
    num_ctas: int = 1
    num_stages: int = 3
    cluster_dims: tuple[int, ...] = (1, 1, 1)
    enable_fp_fusion: bool = False
    extern_libs: Any = None
    launch_pdl: bool = False
    maxnreg: int | None = None
    ptx_version: int | None = None
    ptx_options: str | None = None
    enable_reflect_ftz: bool = False
    sched4reg: bool = False
    clc: bool = False
    min_shared_mem: int | None = None
    fpsan_homomorphic_casts: bool = False
    waves_per_eu: int = 0
    matrix_instr_nonkdim: int = 0
    kpack: int = 1
    allow_flush_denorm: bool = False
    schedule_hint: str = ""
    llvm_fn_attrs: Any = ""
    wgp_cu_mode: str = ""

    @classmethod
    def of(cls, entries: dict[str, Any]) -> LoomOptions:
        """Build the options from the known, non-None entries of a dictionary; ignore other keys."""
        return cls(**{f.name: entries[f.name] for f in fields(cls) if entries.get(f.name) is not None})

    def hash(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()
