"""The options a kernel is compiled and launched with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class LoomOptions:
    """The options of a launch. Triton rejects a keyword that is not a field here, hence the second half."""

    arch: str = "native"
    witness: tuple[str, ...] = ()  # what an instrumented kernel does at each access: "sanitize", "count"
    explain: bool = False  # take the time of every loop nest
    hardware_dot: bool = False  # bf16 dots by the processor's tiles: faster, in its order of summation
    quick_build: bool = False  # compiled in half the time, 10 to 30 % slower, the same bits: for tests
    spin_limit: float = 120  # seconds that a `while` loop of a program may last; 0: no limit
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

    # How a GPU shall run the kernel: accepted from callers that tune for one, without effect here.
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
    def of(cls, given: dict[str, Any]) -> LoomOptions:
        """Fields that are given and not None; whatever else a caller passes is not an option."""
        return cls(**{f.name: given[f.name] for f in fields(cls) if given.get(f.name) is not None})

    def hash(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()
