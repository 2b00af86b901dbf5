"""Replay of counterexamples: the kernel is launched with their sizes under the sanitizer.

The launch runs the TTIR of the counterexample. Tensors too large to allocate are only declared, and only addresses
are evaluated (`sanitize(dry=True)`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import torch
from triton import CompilationError

from .. import DeviceAssertion, Finding, SpinError, sanitize
from ..compiler import without_descriptors
from ..device.launcher import spin_limit
from ..ir.provenance import MAKES_DESCRIPTOR, root_of
from ..ir.reader import parse
from ..ir.ttir import Function, Pointer, element_of, shape_of
from . import descriptors
from .answers import Answer, Example, Kind
from .contract import ELEMENTS, Buffer, Contract
from .solver import ask, z3

_DTYPES = {element: getattr(torch, name) for name, element in ELEMENTS.items()}
_MAX_BYTES = 2**28
_MAX_PROGRAMS = 2**24
_MAX_WORK = 2**31  # lanes of all tiles of all programs
_MAX_SECONDS = 2  # per `while` loop
_LOADS = ("tt.load", *descriptors.LOADS)
_SHOWN_AS: dict[Kind, tuple[str, ...]] = {
    "bounds": ("out-of-bounds load", "out-of-bounds store"),
    "descriptor": ("broken promise", "out-of-bounds load", "out-of-bounds store"),
    "overflow": ("offset overflow", "out-of-bounds load", "out-of-bounds store"),
    "sign": ("offset overflow", "out-of-bounds load", "out-of-bounds store"),
    "step": ("offset overflow", "out-of-bounds load", "out-of-bounds store"),
    "promise": ("broken promise",),
    "race": ("race",),
    "once": ("race",),
}


class NotReplayed(Exception):
    """Reason that a counterexample cannot be tried."""


class Spins(NotReplayed):
    """A loop of the launch did not end in time."""


class NotCompiled(NotReplayed):
    """Triton does not compile the kernel for these sizes: it specializes on integers that are 1."""


def replayed(ttir: str, contract: Contract, answer: Answer) -> Answer:
    """Add the sanitizer's finding to an answer's example. A confirmed unknown becomes a counterexample."""
    example = answer.example
    if example is None or answer.kind not in _SHOWN_AS:
        return answer
    if answer.what.startswith("argument") and f"%{answer.what.split()[1]}:" not in ttir:
        return replace(answer, example=replace(example, finding="the compiled kernel has no such argument"))
    try:
        findings = launched(ttir, contract, example)
    except NotReplayed as reason:
        return replace(answer, example=replace(example, finding=str(reason)))
    matching = [f for f in findings if f.kind in _SHOWN_AS[answer.kind] and _same_place(f, answer)]
    if matching:
        example = replace(example, confirmed=True, finding=str(matching[0]))
        return replace(answer, verdict="counterexample", why="", example=example)
    seen = "; ".join(map(str, findings)) or "it found nothing"
    # Without a finding, violations that the sanitizer cannot see (overflow of masked lanes, say) stay undecided.
    inconclusive = None if answer.kind in ("overflow", "sign", "once", "descriptor") else False
    return replace(answer, example=replace(example, confirmed=inconclusive, finding=seen))


def _same_place(finding: Finding, answer: Answer) -> bool:
    """Return whether a finding may confirm an answer: arithmetic shows up elsewhere, everything else at its line."""
    if answer.kind in ("overflow", "sign", "step", "race", "once") or answer.what.startswith("argument"):
        return True
    return answer.place.endswith(f":{finding.line}") or not answer.place


def launched(ttir: str, contract: Contract, example: Example) -> list[Finding]:
    """Return the sanitizer's findings in the launch of an example."""
    return Launcher(ttir, contract).launched(example)


class Launcher:
    """Launcher of a kernel with sizes of its contract.

    It launches the `@triton.jit` function as a caller would, so that Triton binds and specializes the arguments, or
    else TTIR, compiled once.
    """

    def __init__(self, ttir: str, contract: Contract, launch: tuple[Any, Contract] | None = None) -> None:
        self.ttir, self.contract, self.launch = ttir, contract, launch
        self.function = parse(ttir).entry
        self.unwritten: dict[
            str, torch.Tensor
        ] = {}  # masks of output elements that the last launch left unwritten
        self._compiled: dict[bool, Any] = {}

    def launched(
        self,
        example: Example,
        *,
        draw: Random | None = None,
        fill: int = 0,
        most_bytes: int = _MAX_BYTES,
        most_work: int = _MAX_WORK,
    ) -> list[Finding]:
        """Launch an example and return the sanitizer's findings.

        With `draw`, memory contents are random, and outputs are filled with the byte `fill`. Tensors are allocated up
        to `most_bytes` in total, else only declared.
        """
        launch = _Launch(self.function, self.contract, example, draw, fill)
        grid = example.grid
        if prod(grid) > _MAX_PROGRAMS:
            raise NotReplayed(f"{prod(grid):,} programs are too many to try")
        dry = launch.bytes > most_bytes or prod(grid) > 2**17
        if dry and draw is not None:
            raise NotReplayed("its tensors are too large to fill")
        if launch.work(min(prod(grid), 4096 if dry else prod(grid))) > most_work:
            raise NotReplayed("its loops take too long to try")
        names = [arg.name for arg in self.function.args]
        kernel, contract = self.launch or (None, self.contract)
        arguments = contract.arguments if kernel else {name: contract.arguments.get(name) for name in names}
        values = launch.values("meta" if launch.bytes > most_bytes else "cpu", arguments)
        ended: DeviceAssertion | None = None
        with sanitize(collect=True, dry=dry) as seen, spin_limit(_MAX_SECONDS):
            try:
                if kernel is None:
                    self._kernel(dry)[grid](*values.values())
                else:
                    kernel[grid](**values, **contract.constants)
            except DeviceAssertion as error:
                ended = error
            except CompilationError as error:
                reason = str(error).strip().splitlines()[-1]
                raise NotCompiled(
                    f"Triton does not compile it for {example.named_sizes}: {reason}"
                ) from error
        if ended and not seen.findings:  # later violations are unknown
            raise (Spins if isinstance(ended, SpinError) else NotReplayed)(f"it ended early: {ended}")
        self.unwritten = {} if dry else {name: _all_bytes(values[name], fill) for name in launch.filled}
        return list(seen.findings)

    def _kernel(self, dry: bool) -> Any:
        import triton

        if dry not in self._compiled:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / f"{self.function.name}.ttir"
                file.write_text(self.ttir)
                if MAKES_DESCRIPTOR in self.ttir:
                    file.write_text(without_descriptors(file))
                target = triton.runtime.driver.active.get_current_target()
                self._compiled[dry] = triton.compile(str(file), target=target)
        return self._compiled[dry]


def _all_bytes(tensor: torch.Tensor, byte: int) -> torch.Tensor:
    """Return a mask of the elements whose bytes all equal `byte`."""
    parts = tensor.contiguous().view(-1, 1).view(torch.uint8)
    return (parts == byte).all(1)


@dataclass
class _Launch:
    function: Function
    contract: Contract
    example: Example
    draw: Random | None = None  # source of memory contents; None: the example's numbers
    fill: int = 0
    _paired: dict[str, torch.Tensor] = field(default_factory=dict)  # drawn maps and inverses, by name

    def number(self, expression: Any) -> int:
        """Evaluate an expression of the contract for the example's sizes."""
        if not z3.is_expr(expression):
            return int(expression)
        pairs = [(size, z3.IntVal(self.example.sizes[size.name])) for size in self.contract.sizes]
        value = z3.simplify(z3.substitute(expression, *pairs))
        return int(z3.is_true(value)) if z3.is_bool(value) else int(value.as_long())

    @property
    def buffers(self) -> dict[str, Buffer]:
        return {n: b for n, b in self.contract.arguments.items() if isinstance(b, Buffer)}

    @cached_property
    def filled(self) -> frozenset[str]:
        """Return the outputs that the kernel does not load and that share no memory."""
        names = [b.storage or n for n, b in self.buffers.items()]
        read = [root_of(op.operands[0]) for op in self.function.body.walk() if op.name in _LOADS]
        if None in read:
            return frozenset()
        loaded = {root.name for root in read if root is not None}
        return frozenset(
            name
            for name in self.contract.outputs
            if name not in loaded and names.count(self.buffers[name].storage or name) == 1
        )

    @property
    def bytes(self) -> int:
        return sum(self.number(b.extent) * b.itemsize for b in self.buffers.values())

    def work(self, programs: int) -> int:
        """Return roughly how many lanes a launch evaluates."""
        tile = max(
            (prod(shape_of(r.type)) for op in self.function.body.walk() for r in op.results), default=1
        )
        return programs * self.example.iterations * tile

    def values(self, device: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the launch arguments for these arguments of the contract."""
        storages: dict[str, torch.Tensor] = {}
        types = {arg.name: element_of(arg.type) for arg in self.function.args}
        result: dict[str, Any] = {}
        for argument, specification in arguments.items():
            kind = types.get(argument)
            if isinstance(specification, Buffer):
                name = specification.storage or argument
                if name not in storages:
                    extent = max(
                        self.number(b.first) + self.number(b.extent)
                        for n, b in self.buffers.items()
                        if (b.storage or n) == name
                    )
                    storages[name] = self._memory(argument, specification, extent, device)
                result[argument] = self._view(storages[name], specification)
            elif isinstance(kind, Pointer):
                raise NotReplayed(f"{argument} has no buffer in the contract")
            elif specification is None and kind is None:
                result[argument] = None
            elif isinstance(specification, float) or (kind is not None and kind.is_float):
                result[argument] = float(specification) if isinstance(specification, int | float) else 1.0
            else:
                result[argument] = self.number(specification)
        return result

    def _memory(self, name: str, buffer: Buffer, extent: int, device: str) -> torch.Tensor:
        dtype = _DTYPES[buffer.element]
        if extent < 0:
            raise NotReplayed(f"{name} would have {extent} elements")
        inverse = buffer.inverse or next((n for n, b in self.buffers.items() if b.inverse == name), None)
        if inverse is not None and self.draw is None:
            raise NotReplayed(f"{name} and its inverse are not made up")
        if device == "meta":
            return torch.empty(extent, dtype=dtype, device="meta")
        first_byte = self.fill if name in self.filled else 0
        memory = torch.full((extent * buffer.itemsize + 128,), first_byte, dtype=torch.uint8)
        # no more aligned than the contract promises
        first = (buffer.align - memory.data_ptr()) % 64 if buffer.align < 64 else -memory.data_ptr() % 64
        memory = memory[first : first + extent * buffer.itemsize]
        tensor = memory.view(dtype)
        if dtype.is_floating_point or dtype == torch.bool or name in self.filled:
            return tensor
        if self.draw is not None:
            drawn = self._drawn(buffer, extent, self.draw) if inverse is None else self._pair(name, inverse)
            tensor.copy_(drawn)
            return tensor
        if buffer.by_place:
            for element in range(min(extent, 2**12)):
                tensor[element] = self._default(buffer, element)
        else:
            tensor.fill_(self._default(buffer, 0))
        if buffer.distinct:
            tensor.copy_(torch.arange(extent).to(dtype))
        for argument, element, value in sorted(self.example.loaded, key=lambda place: place[1]):
            if argument == name and 0 <= element < extent:
                if buffer.distinct and (tensor == value).any():
                    tensor[tensor == value] = tensor[element].clone()
                tensor[element if not buffer.ascending else slice(element, None)] = value
        return tensor

    def _drawn(self, buffer: Buffer, extent: int, draw: Random) -> torch.Tensor:
        """Draw integers that the contract allows."""
        if buffer.by_place and extent > 2**8:
            raise NotReplayed("what is in memory depends on where it is, in too many places")
        sizes = self.example.sizes.values()
        candidates = [
            -2,
            -1,
            0,
            1,
            2,
            3,
            *(n for size in (*sizes, extent) for n in (size // 2, size - 1, size, size + 1)),
        ]
        allowed = [n for n in candidates if self._is_allowed(buffer, n, 0)] or [self._default(buffer, 0)]
        if buffer.distinct:
            return self._drawn_distinct(buffer, extent, draw, min(allowed), max(allowed))
        if buffer.by_place:
            return torch.tensor([self._default(buffer, element) for element in range(extent)])
        generator = torch.Generator().manual_seed(draw.getrandbits(32))
        integers = torch.tensor(allowed)[torch.randint(len(allowed), (extent,), generator=generator)]
        return integers.sort().values if buffer.ascending else integers

    def _drawn_distinct(self, buffer: Buffer, extent: int, draw: Random, low: int, high: int) -> torch.Tensor:
        """Draw distinct integers from low to high; one of them may repeat if the contract allows it."""
        pool = list(range(low, high + 1))
        repeatable = next((n for n in (low, high) if not self._differs(buffer, n, 0)), None)
        if repeatable is not None:
            pool.remove(repeatable)
        count = min(extent, len(pool)) if repeatable is None else draw.randint(0, min(extent, len(pool)))
        drawn = (
            draw.sample(pool, count) + [repeatable] * (extent - count)
            if repeatable is not None
            else draw.sample(pool, count)
        )
        draw.shuffle(drawn)
        sample = draw.sample(range(len(drawn)), min(len(drawn), 64))
        repeats = [element for element in sample if drawn[element] == repeatable]
        if (
            len(drawn) < extent
            or not all(self._is_allowed(buffer, drawn[element], element) for element in sample)
            or any(self._differs(buffer, drawn[element], element) for element in repeats)
        ):
            raise NotReplayed("integers that differ from each other are not made up")
        return torch.tensor(sorted(drawn) if buffer.ascending else drawn, dtype=torch.int64)

    def _pair(self, name: str, inverse: str) -> torch.Tensor:
        """Draw a map and its inverse, both with -1 for unmapped elements, and return the map."""
        assert self.draw is not None
        if name not in self._paired:
            names = (name, inverse)
            extents = [self.number(self.buffers[n].extent) for n in names]
            count = self.draw.randint(0, min(extents))
            places = [torch.tensor(self.draw.sample(range(extent), count)) for extent in extents]
            for argument, extent, source, target in zip(names, extents, places, places[::-1], strict=True):
                drawn = torch.full((extent,), -1)
                drawn[source.long()] = target.long()
                if not all(self._is_allowed(self.buffers[argument], n, 0) for n in set(drawn.tolist())):
                    raise NotReplayed(f"{name} and its inverse are not made up")
                self._paired[argument] = drawn
        return self._paired[name]

    def _is_allowed(self, buffer: Buffer, number: int, element: int) -> bool:
        assumed = buffer.assumed(z3.IntVal(number), z3.IntVal(element))
        return assumed is None or bool(self.number(assumed))

    def _differs(self, buffer: Buffer, number: int, element: int) -> bool:
        """Return whether no other element may have this value."""
        return bool(self.number(buffer.differs(z3.IntVal(number), z3.IntVal(element))))

    def _default(self, buffer: Buffer, element: int) -> int:
        """Return a valid integer for a place of a buffer."""
        value = z3.Int("value")
        assumed = buffer.assumed(value, z3.IntVal(element))
        if assumed is None:
            return 0
        pairs = [(size, z3.IntVal(self.example.sizes[size.name])) for size in self.contract.sizes]
        allowed = z3.substitute(assumed, *pairs)
        if z3.is_true(z3.simplify(z3.substitute(allowed, (value, z3.IntVal(0))))):
            return 0
        solution = ask([allowed], z3.BoolVal(False))
        return solution.value(value) if solution.verdict == "counterexample" else 0

    def _view(self, storage: torch.Tensor, buffer: Buffer) -> torch.Tensor:
        first = self.number(buffer.first)
        if buffer.dims is None:
            return storage[first : first + self.number(buffer.extent)]
        sizes, strides = zip(*((self.number(s), self.number(t)) for s, t in buffer.dims), strict=True)
        if min(strides) < 0:
            raise NotReplayed("a stride is negative")
        return storage.as_strided(sizes, strides, storage.storage_offset() + first)
