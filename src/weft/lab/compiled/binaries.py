"""Checks on every kernel compiled for a GPU. They are: no spills, no float64, shared memory within the target's limit,
waits for the accumulators of dots, and accesses 128 bits wide wherever rows are multiples of 16 elements."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

from ...runtime import Capabilities, Variant, catalogue, recording
from ..families import Workload, moved_of, spills_of, width_of
from ..family import Moved, Width
from . import Binary

BYTES = {"*fp32": 4, "*bf16": 2, "*fp16": 2, "*u8": 1, "*i8": 1}
# The tensors that dominate a kernel's time: a whole tile of them is read or written.
READ = {"x_ptr", "h_ptr", "residual_ptr", "dy_ptr", "dresidual_ptr", "partial_ptr", "gate_ptr"}
READ |= {"logits_ptr", "gate.ptr", "up.ptr", "dy.ptr", "source.x", "source.residual", "added.x"}
READ |= {"upstream.h", "upstream.dy", "upstream.dresidual"}
WRITTEN = {"y_ptr", "residual_out_ptr", "dx_ptr", "data_ptr", "data_t_ptr", "dgate_ptr", "dup_ptr"}
WRITTEN |= {"dlogits_ptr", "copy.data", "copy_t.data", "up_codes.data", "up_codes.data_t"}
WRITTEN |= {"stored.y", "stored.h", "stored.codes.data", "codes_t.data", "gradients.x", "gradients.residual"}
# Vectors over the tile's columns. They are short, and read once for many rows.
VECTORS = {
    "weight_ptr",
    "bias_ptr",
    "dweight_ptr",
    "dbias_ptr",
    "dscale_ptr",
    "dshift_ptr",
    "dscore_sums_ptr",
    "out_ptr",
}
VECTORS |= {"source.pre_bias", "added.pre_bias", "formula.weight", "formula.bias"}
VECTORS |= {f"gradients.{name}" for name in ("weight", "bias", "scale", "shift", "gate", "pre_bias")}
# Bytes per thread, stores plus loads, that may spill for rows of odd length: a few values live across a loop.
ODD_SPILLS = 160


# ---- variants -------------------------------------------------------------------------------------------------


def variants_of(workload: Workload, target: str) -> list[Variant]:
    """Return the variants that a workload launches. In training, ops with a backward also store what it reads."""
    with recording(target):
        call = workload.make("meta")
    if "training" in workload.tags and catalogue[workload.op].backward is not None:
        call = call.requiring_grad()
    with recording(target) as variants:
        call()
    return variants


def collected(workloads: Iterable[Workload], target: str) -> dict[Variant, str]:
    """Return the distinct variants of workloads that run on a target, with the first workload that launches each."""
    first_workloads: dict[Variant, str] = {}
    for workload in (each for each in workloads if each.runs_on(target)):
        for variant in variants_of(workload, target):
            first_workloads.setdefault(variant, str(workload))
    return first_workloads


# ---- faults of a binary ---------------------------------------------------------------------------------------


def faults(variant: Variant, binary: Binary, spills: int = 0) -> list[str]:
    """Return the faults of a variant's binary. It may spill `spills` bytes, or those listed for the kernel on this
    target or its family if more."""
    capabilities = Capabilities.of(binary.target)
    spills = max(spills, *(spills_of(variant.kernel, t) for t in (binary.target, capabilities.family)))
    wide = variant.aligned and dict(variant.constants).get("ALIGN", 16) == 16
    problems = []
    # Without a stack, AMD's "spilled" scalars are in lanes of vector registers.
    if binary.stack and binary.spill_bytes > (spills if wide else ODD_SPILLS):
        problems.append(f"{binary.spill_bytes} bytes spilled at {binary.registers} registers")
    if binary.uses_fp64:
        problems.append("float64 arithmetic")
    if binary.shared > capabilities.shared_bytes:
        problems.append(f"{binary.shared} bytes of shared memory, of {capabilities.shared_bytes}")
    problems += [f"sums not waited for: {access}" for access in binary.early_accesses]
    if not wide or "ALIGN" not in dict(variant.constants):
        return problems
    read, written = moved_of(variant.kernel) or Moved(READ, WRITTEN)
    if not read and not written:
        return problems
    return problems + _narrow(variant, binary, read, "loads") + _narrow(variant, binary, written, "stores")


def _columns(constants: dict[str, Any]) -> int:
    """Return the columns of a tile; of a generated kernel's, COLS."""
    return int(constants["TILE"] if "TILE" in constants else constants["COLS"])


def _narrow(variant: Variant, binary: Binary, names: Set[str], what: str) -> list[str]:
    """Return the faults in the widths of loads or stores of tensors whose rows are multiples of 16 elements.

    Widths other than 128 bits are for elements of which there is one per row, group or tensor (32 bits, or 8 for
    one-byte scales), for vectors too short to fill all threads, and for 4-bit codes.
    """
    constants: dict[str, Any] = dict(variant.constants)
    types = variant.types()
    widths = {"loads": binary.loads, "stores": binary.stores}[what]
    threads = variant.num_warps * Capabilities.of(binary.target).warp_size
    form = constants.get("FORMAT")
    allowed = {32, 128, 256}
    bytes_to_a_group = any("scale" in name and kind == "*u8" for name, kind in types.items())
    if bytes_to_a_group or (form is not None and form.scale_dtype.itemsize == 1):
        allowed.add(8)
    if "*i64" in types.values():  # one target per row
        allowed.add(64)
    prefix, bits = width_of(variant.kernel) or Width("", 32)
    if binary.target.startswith(prefix):
        allowed.add(bits)
    needed = 0  # one access for every 16 bytes of each tensor's tile that a thread handles
    for name, kind in types.items():
        if kind not in BYTES:
            continue
        if name in names:
            packed = (
                name.endswith(("data_ptr", "data_t_ptr", ".data", ".data_t"))
                and form is not None
                and form.packed == 2
            )
            if packed:
                allowed.add(64)
            else:
                elements = constants.get("ROWS", 1) * _columns(constants)
                needed += -(-elements * BYTES[kind] // (16 * threads))
        elif name in VECTORS:
            allowed.add(max(8 * BYTES[kind], 8 * BYTES[kind] * _columns(constants) // threads))
    problems = []
    if widths.get(128, 0) + 2 * widths.get(256, 0) < needed:
        problems.append(f"{what} by bits {widths}, of which at least {needed} should have 128")
    if set(widths) - allowed:
        problems.append(f"{what} by bits {widths}, where {sorted(allowed)} are expected")
    return problems
