"""Search TTGIR for premature accesses to tensor memory, a mistake of Triton itself.

On sm_100, sm_103 and sm_110, the accumulators of a dot are in tensor memory. An MMA adds to a tile of it while the
program goes on; once it and every MMA before it are done, it arrives at a barrier. To read the tile, a program must
first wait there. Triton 3.6 to 3.8 get this wrong where two dots of a pipelined loop add to one accumulator: the wait
for the second is for that of the iteration before, its accumulator is read before it is written, and half of the result
is missing, without an error. The TTGIR shows it, without a GPU: `early_accesses` follows its control flow, with the
MMAs that may still be running.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

# Iteration counts to follow each loop for: a wait for an older iteration shows in the second or third.
_TRIPS = range(4)

_VALUE = re.compile(r"%[\w#]+")
_OPERATION = re.compile(r'(?:(?P<results>%.*?) = )?"?(?P<name>[a-z][\w.]*)"?(?P<rest>.*)')
_LOCATION = re.compile(r" loc\((#\w+|unknown)\)$")
# a, b, accumulator[token], ..., barrier[predicate], ...
_MMA = re.compile(r" %[\w#]+, %[\w#]+, (%[\w#]+)(?:\[[^\]]*\])?,(.*?) : ")
_EVENTS = ("ttng.tc_gen5_", "ttng.wait_barrier", "ttng.tmem_load", "ttng.tmem_store")
# Views of memory, or of a part of it.
_VIEWS = {
    "ttng.tmem_subslice",
    "ttg.memdesc_subslice",
    "ttg.memdesc_reinterpret",
    "ttg.memdesc_reshape",
    "ttg.memdesc_trans",
}
# Unsupported control flow.
_UNKNOWN = re.compile(r"^ *(?:%.* = )?(scf\.while|cf\.\w+|tt\.call|ttg\.warp_specialize)\b", re.MULTILINE)


def early_accesses(ttgir: str) -> list[str]:
    """Return loads and stores of tiles of tensor memory to which an MMA may still be adding, with their source lines.

    Conditions are not evaluated. The predicates of MMAs, waits, loads and stores count as true; of an `if`, each branch
    with one of these is taken; all loops of the kernel run equally often. So a wait under the wrong condition goes
    unnoticed, but one for the wrong MMA is found. Unsupported control flow is reported too.
    """
    if "ttng.tmem_load" not in ttgir:
        return []
    if unknown := _UNKNOWN.search(ttgir):
        return [f"not checked: {unknown[1]} cannot be followed"]
    kernel = _parse(ttgir)
    early: dict[_Operation, None] = {}
    for trips, otherwise in product(_TRIPS, (False, True)):
        run = _Run(trips, otherwise)
        run.region(kernel)
        early |= run.early
    return list(dict.fromkeys(f"{o.name} at {_source(ttgir, o.location)}" for o in early))


# ---- parsing --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Operation:
    results: tuple[str, ...]
    name: str
    rest: str  # operands, attributes and types
    location: str
    regions: list[list[_Operation]] = field(default_factory=list)

    def operands(self) -> list[str]:
        return _VALUE.findall(self.rest.split(" : ")[0])

    def matters(self) -> bool:
        """Return whether it, or an operation inside it, concerns tensor memory."""
        return self.name.startswith(_EVENTS) or any(o.matters() for region in self.regions for o in region)


def _parse(ttgir: str) -> list[_Operation]:
    """Return the module's operations, each of which is on a line of its own, with nested regions inside them."""
    top: list[_Operation] = []
    open_regions = [top]
    for line in ttgir.splitlines():
        line, location = line.strip(), ""
        if match := _LOCATION.search(line):
            line, location = line[: match.start()], match[1]
        if line.startswith("}"):
            open_regions.pop()
        elif match := _OPERATION.match(line):
            results = tuple(_results(match["results"] or ""))
            open_regions[-1].append(_Operation(results, match["name"], match["rest"], location))
        if line.endswith("{"):
            region: list[_Operation] = []
            open_regions[-1][-1].regions.append(region)
            open_regions.append(region)
    return top


def _results(text: str) -> Iterator[str]:
    """Yield the names in "%a, %b:2": %a, %b#0, %b#1."""
    for name in filter(None, text.split(", ")):
        base, _, count = name.partition(":")
        yield from [f"{base}#{i}" for i in range(int(count))] if count else [base]


def _source(ttgir: str, location: str) -> str:
    """Return the file and line of a location: for an inlined call, the line inside the called function."""
    while match := re.search(rf"^{location} = loc\((.*)\)$", ttgir, re.MULTILINE):
        if line := re.search(r'([^/"]*)":(\d+):', match[1]):
            return f"{line[1]}:{line[2]}"
        location = re.findall(r"#\w+", match[1])[0]
    return "an unknown line"


# ---- abstract execution ---------------------------------------------------------------------------------------

# Value of a name: a new object each time its operation is executed, which distinguishes barriers of different
# iterations; an element of an array of barriers or tiles is the pair of the array and its index.
_Value = object


class _Issued(NamedTuple):
    """An MMA, or a commit, which arrives at its barriers when all MMAs before it are done."""

    tile: _Value
    barriers: list[_Value]


class _Run:
    """A path through a kernel: the number of loop iterations, and the branches taken."""

    def __init__(self, trips: int, otherwise: bool) -> None:
        self.trips = trips
        self.otherwise = otherwise
        self.values: dict[str, _Value] = {}
        self.running: list[_Issued] = []  # in order of issue, in which they also finish
        self.early: dict[_Operation, None] = {}

    def region(self, operations: list[_Operation]) -> list[_Value]:
        """Execute a region and return the values that it yields."""
        for operation in operations:
            if operation.name == "scf.yield":
                return [self.value(name) for name in operation.operands()]
            results = self.execute(operation) or [object() for _ in operation.results]
            self.values.update(zip(operation.results, results, strict=True))
        return []

    def value(self, name: str) -> _Value:
        return self.values.setdefault(name, object())  # no operation defines the kernel's arguments

    def execute(self, operation: _Operation) -> list[_Value]:
        """Execute an operation and return its results, or nothing if they do not matter."""
        name, operands = operation.name, operation.operands()
        if name == "scf.for":
            return self.loop(operation)
        if name == "scf.if":
            return self.branch(operation)
        if name == "ttg.memdesc_index":
            return [(self.value(operands[0]), self.value(operands[1]))]
        if name in _VIEWS:
            return [self.value(operands[0])]
        if name.startswith("ttng.tc_gen5_mma"):
            self.issue(operation)
        elif name == "ttng.tc_gen5_commit":
            self.running.append(_Issued(None, [self.value(operands[0])]))
        elif name == "ttng.wait_barrier":
            self.wait(self.value(operands[0]))
        elif name == "ttng.tmem_load":
            self.access(operation, self.value(operands[0]))
        elif name == "ttng.tmem_store":
            self.access(operation, self.value(operands[1]))
        else:
            for region in operation.regions:
                self.region(region)
        return []

    def branch(self, operation: _Operation) -> list[_Value]:
        branches = [region for region in operation.regions if any(o.matters() for o in region)]
        return self.region((branches or operation.regions)[-1 if self.otherwise else 0])

    def loop(self, operation: _Operation) -> list[_Value]:
        carried = re.search(r"iter_args\((.*?)\) ->", operation.rest)
        names = _VALUE.findall(carried[1]) if carried else []
        values = [self.value(name) for name in names[1::2]]
        for _ in range(self.trips):
            self.values[operation.operands()[0]] = object()  # the counter
            self.values.update(zip(names[::2], values, strict=True))
            values = self.region(operation.regions[0])
        return values

    def issue(self, operation: _Operation) -> None:
        operands = _MMA.match(operation.rest)
        if operands is None:
            raise ValueError(f"an MMA in an unknown notation: {operation.rest}")
        if "is_async" in operation.rest:  # otherwise the program waits for it
            barriers = re.findall(r"(%[\w#]+)\[", operands[2])
            self.running.append(_Issued(self.value(operands[1]), [self.value(name) for name in barriers]))

    def access(self, operation: _Operation, tile: _Value) -> None:
        if any(issued.tile == tile for issued in self.running):
            self.early[operation] = None

    def wait(self, barrier: _Value) -> None:
        """Retire the oldest issued operation that arrives at the barrier, and all before it."""
        for index, issued in enumerate(self.running):
            if barrier in issued.barriers:
                del self.running[: index + 1]
                return
