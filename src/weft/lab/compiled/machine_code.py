"""Read the machine code of compiled kernels: registers, spills, and the count of each instruction.

NVIDIA's binaries are read with NVIDIA's tools, which come with Triton; AMD's compiler writes its assembly as text.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple


class Resources(NamedTuple):
    """Resources of a thread: registers, bytes spilled, and bytes of stack, not all of which are spills."""

    registers: int
    spill_bytes: int
    stack: int


# ---- NVIDIA ----------------------------------------------------------------------------------------------------

_SASS_OPCODE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)")
_SASS_ACCESS = {
    "LDG": "load",
    "LD": "load",
    "LDGSTS": "load",
    "UTMALDG": "load",
    "STG": "store",
    "ST": "store",
    "UTMASTG": "store",
}
_SASS_WIDTH = {"256": 256, "128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}


def resources(cubin: bytes, assembler_log: Callable[[], str]) -> Resources:
    """Return the resources of a binary. If it has a stack, ask for the assembler's log: spills are on the stack, but so
    are other things, and only the assembler tells them apart."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run(knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
    functions = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
    registers = max(int(r) for r, _ in functions)
    stack = max(int(s) for _, s in functions)
    spill_bytes = 0
    if stack:
        spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", assembler_log())
        if not spills:
            raise RuntimeError("the assembler's log says nothing about spills")
        spill_bytes = sum(int(stored) + int(loaded) for stored, loaded in spills)
    return Resources(registers, spill_bytes, stack)


def instructions(cubin: bytes) -> bytes:
    """Return the concatenated sections of an ELF file that hold instructions."""
    sections_at = struct.unpack_from("<Q", cubin, 0x28)[0]
    size, count, names_index = struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<2I4Q", cubin, sections_at + i * size) for i in range(count)]
    names_at = headers[names_index][4]
    return b"".join(
        cubin[at : at + length]
        for name, _, _, _, at, length in headers
        if cubin.startswith(b".text.", names_at + name)
    )


def disassembled(codes: Sequence[bytes], target: str) -> list[Counter[str] | RuntimeError]:
    """Disassemble codes for a target at once, and count each one's instructions or return its error."""
    try:
        return [*_disassembled_together(codes, target)]
    except RuntimeError as error:
        if len(codes) == 1:
            return [error]
        return [disassembled([code], target)[0] for code in codes]


def _disassembled_together(codes: Sequence[bytes], target: str) -> list[Counter[str]]:
    from triton import knobs

    number = target.removeprefix("sm_")
    architecture = f"SM{number}a" if int(number) >= 90 else f"SM{number}"
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(codes))
        file.flush()
        # Data-flow analysis only finds branch targets, and takes longer than everything else.
        text = _run(knobs.nvidia.nvdisasm.path, "--no-dataflow", "--binary", architecture, file.name)
    ends = [*accumulate(map(len, codes))]
    counts: list[Counter[str]] = [Counter() for _ in codes]
    for offset, opcode in _SASS_OPCODE.findall(text):
        if opcode != "NOP":  # padding after the end
            counts[bisect_right(ends, int(offset, 16))][opcode] += 1
    return counts


def classify_nvidia(opcode: str) -> tuple[str, int] | None:
    """Return ("load" or "store", bits) for an instruction that accesses global memory, else None."""
    base, *parts = opcode.split(".")
    if base == "UBLKCP":  # a bulk copy from global to shared memory, or the reverse
        return ("load" if parts[:1] == ["S"] else "store"), 128
    kind = _SASS_ACCESS.get(base)
    if kind is None:
        return None
    if base.startswith("UTMA"):
        return kind, 128
    return kind, next((_SASS_WIDTH[part] for part in parts if part in _SASS_WIDTH), 32)


# ---- AMD -------------------------------------------------------------------------------------------------------

_GCN_OPCODE = re.compile(r"^\t([a-z]\w*)", re.MULTILINE)
_GCN_ACCESS = re.compile(r"(?:global|buffer|flat)_(load|store)_(?:lds_)?(\w+)")
# Names up to gfx9 (dwordx4, sbyte_d16_hi) and from gfx11 on (b128, d16_hi_u8).
_GCN_WIDTHS = (
    (re.compile(r"dword(?:x(\d+))?"), 32),
    (re.compile(r"[us]?short|format_d16_x$"), 16),
    (re.compile(r"[us]?byte"), 8),
)
_GCN_BITS = re.compile(r"(?:^|_)[biu](8|16|32|64|96|128)$")


def read_assembly(assembly: str) -> tuple[Resources, Counter[str]]:
    """Return a thread's resources and the count of each instruction of the assembly."""

    def number(key: str) -> int:
        values = re.findall(rf"^\s*(?:- )?\.{key}:\s+(\d+)$", assembly, re.MULTILINE)
        if not values:
            raise RuntimeError(f"the assembly has no .{key}")
        return max(int(value) for value in values)

    resources = Resources(
        registers=number("vgpr_count"),
        spill_bytes=4 * (number("vgpr_spill_count") + number("sgpr_spill_count")),
        stack=number("private_segment_fixed_size"),
    )
    return resources, Counter(_GCN_OPCODE.findall(assembly))


def classify_amd(opcode: str) -> tuple[str, int] | None:
    """Return ("load" or "store", bits) for an instruction that accesses global memory, else None."""
    match = _GCN_ACCESS.fullmatch(opcode)
    if match is None:
        return None
    kind, rest = match.groups()
    if bits := _GCN_BITS.search(rest):
        return kind, int(bits[1])
    for pattern, width in _GCN_WIDTHS:
        if width_match := pattern.match(rest):
            count = width_match[1] if width_match.re.groups else None
            return kind, width * int(count or 1)
    raise ValueError(f"unknown width of {opcode}")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr[-4000:]}")
    return done.stdout
