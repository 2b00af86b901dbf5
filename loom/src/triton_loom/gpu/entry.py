"""The declaration of a kernel in PTX text: what a driver needs to know of it to launch it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

_BYTES = {f"{kind}{bits}": bits // 8 for kind in "busf" for bits in (8, 16, 32, 64)}
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{]*)\{", re.S)


class Parameter(NamedTuple):
    """A parameter in the .param space."""

    offset: int
    bytes: int


@dataclass(frozen=True)
class Entry:
    """A kernel's declaration."""

    name: str
    parameters: tuple[Parameter, ...]
    capability: int  # 90 for `.target sm_90a`,
    for_no_other: bool  # whose suffix says that no other GPU runs it
    threads: tuple[int, int, int] | None  # of a block
    registers: int | None  # the most that a thread may use
    static_shared: int  # bytes


def entries(ptx: str) -> dict[str, Entry]:
    """The kernels of a module by name."""
    text = re.sub(r"//[^\n]*", "", ptx)
    target = re.search(r"\.target\s+sm_(\d+)([af]?)", text)
    if target is None:
        raise ValueError("the module's text has no .target: it is not PTX")
    shared = re.findall(r"\.shared\s+\.align\s+\d+\s+\.b8\s+[\w$]+\[(\d+)\]", text)
    found = {}
    for name, declared, directives in _ENTRY.findall(text):
        found[name] = Entry(
            name,
            tuple(_parameters(declared)),
            int(target[1]),
            bool(target[2]),
            _threads(directives),
            int(most[1]) if (most := re.search(r"\.maxnreg\s+(\d+)", directives)) else None,
            sum(map(int, shared)),
        )
    return found


def _threads(directives: str) -> tuple[int, int, int] | None:
    required = re.search(r"\.reqntid\s+([\d, \t]+)", directives)
    if required is None:
        return None
    x, y, z = (*map(int, required[1].split(",")), 1, 1)[:3]
    return x, y, z


def _parameters(declared: str) -> list[Parameter]:
    """`.param .u32 n, .param .align 64 .b8 map[128]`: each at the next multiple of its alignment."""
    found, offset = [], 0
    for text in declared.split(","):
        if not text.strip():
            continue
        kind = re.search(r"\.([busf]\d+)\b", text)
        if kind is None or kind[1] not in _BYTES:
            raise ValueError(f"the parameter `{text.strip()}` has no type that is known")
        count = re.search(r"\[(\d+)\]", text)
        # `.ptr .align 16` promises something about what is pointed to.
        alignment = re.match(r"\s*\.param\s+\.align\s+(\d+)", text)
        multiple = int(alignment[1]) if alignment else _BYTES[kind[1]]
        offset = -(-offset // multiple) * multiple
        found.append(Parameter(offset, _BYTES[kind[1]] * int(count[1] if count else 1)))
        offset += found[-1].bytes
    return found
