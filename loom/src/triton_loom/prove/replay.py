"""A counterexample put to the test: the kernel is launched with its sizes, and the sanitizer watches.

What is launched is the TTIR that the counterexample is about. Tensors that cannot be allocated are declared only, and
addresses evaluated (`sanitize(dry=True)`).
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
_MOST_BYTES = 2**28
_MOST_PROGRAMS = 2**24
_MOST_WORK = 2**31  # lanes of all tiles of all programs
_MOST_SECONDS = 2  # of a `while` loop
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
    """Why a counterexample cannot be tried."""


class Spins(NotReplayed):
    """A loop of the launch did not end in time."""


class NotCompiled(NotReplayed):
    """Triton does not compile the kernel for these sizes: it makes a constant of an integer that is 1."""


def replayed(ttir: str, contract: Contract, answer: Answer) -> Answer:
    """The answer with what the sanitizer says of its example. An unknown that the sanitizer confirms is one no more."""
    example = answer.example
    if example is None or answer.kind not in _SHOWN_AS:
        return answer
    if answer.what.startswith("argument") and f"%{answer.what.split()[1]}:" not in ttir:
        return replace(answer, example=replace(example, finding="the compiled kernel has no such argument"))
    try:
        findings = launched(ttir, contract, example)
    except NotReplayed as reason:
        return replace(answer, example=replace(example, finding=str(reason)))
    wanted = [f for f in findings if f.kind in _SHOWN_AS[answer.kind] and _same_place(f, answer)]
    if wanted:
        example = replace(example, confirmed=True, finding=str(wanted[0]))
        return replace(answer, verdict="counterexample", why="", example=example)
    told = "; ".join(map(str, findings)) or "it found nothing"
    # What it cannot see (masks that overflow in lanes that are off, say) is not refuted by its silence.
    silent = None if answer.kind in ("overflow", "sign", "once", "descriptor") else False
    return replace(answer, example=replace(example, confirmed=silent, finding=told))


def _same_place(finding: Finding, answer: Answer) -> bool:
    """Consequences of arithmetic show elsewhere; everything else where it is."""
    if answer.kind in ("overflow", "sign", "step", "race", "once") or answer.what.startswith("argument"):
        return True
    return answer.place.endswith(f":{finding.line}") or not answer.place


def launched(ttir: str, contract: Contract, example: Example) -> list[Finding]:
    """What the sanitizer finds in the launch of an example."""
    return Launcher(ttir, contract).launched(example)


class Launcher:
    """Launches a kernel with sizes of its contract: the `@triton.jit` function as a caller would, so that Triton binds
    and specializes the arguments, or TTIR, compiled once."""

    def __init__(self, ttir: str, contract: Contract, launch: tuple[Any, Contract] | None = None) -> None:
        self.ttir, self.contract, self.launch = ttir, contract, launch
        self.function = parse(ttir).entry
        self.unwritten: dict[str, torch.Tensor] = {}  # by the last launch: which elements of outputs
        self._compiled: dict[bool, Any] = {}

    def launched(
        self,
        example: Example,
        *,
        draw: Random | None = None,
        fill: int = 0,
        most_bytes: int = _MOST_BYTES,
        most_work: int = _MOST_WORK,
    ) -> list[Finding]:
        """Launch an example, and return what the sanitizer finds. With `draw`, what is in memory is random; outputs
        begin with this byte everywhere. Tensors are allocated up to `most_bytes` and otherwise only declared."""
        launch = _Launch(self.function, self.contract, example, draw, fill)
        grid = example.grid
        if prod(grid) > _MOST_PROGRAMS:
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
        with sanitize(collect=True, dry=dry) as seen, spin_limit(_MOST_SECONDS):
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
        if ended and not seen.findings:  # what it would have done later is not known
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
    """Of a tensor's elements, those of which all bytes are this one."""
    parts = tensor.contiguous().view(-1, 1).view(torch.uint8)
    return (parts == byte).all(1)


@dataclass
class _Launch:
    function: Function
    contract: Contract
    example: Example
    draw: Random | None = None  # what is in memory, if not the example's numbers alone
    fill: int = 0
    _paired: dict[str, torch.Tensor] = field(default_factory=dict)  # drawn, by name: a map or its inverse

    def number(self, expression: Any) -> int:
        """What an expression of the contract is for the example's sizes."""
        if not z3.is_expr(expression):
            return int(expression)
        pairs = [(size, z3.IntVal(self.example.sizes[size.name])) for size in self.contract.sizes]
        found = z3.simplify(z3.substitute(expression, *pairs))
        return int(z3.is_true(found)) if z3.is_bool(found) else int(found.as_long())

    @property
    def buffers(self) -> dict[str, Buffer]:
        return {n: b for n, b in self.contract.arguments.items() if isinstance(b, Buffer)}

    @cached_property
    def filled(self) -> frozenset[str]:
        """The outputs that the kernel does not load, in memory of their own."""
        names = [b.storage or n for n, b in self.buffers.items()]
        read = [root_of(op.operands[0]) for op in self.function.body.walk() if op.name in _LOADS]
        if None in read:
            return frozenset()
        others = {root.name for root in read if root is not None}
        return frozenset(
            name
            for name in self.contract.outputs
            if name not in others and names.count(self.buffers[name].storage or name) == 1
        )

    @property
    def bytes(self) -> int:
        return sum(self.number(b.extent) * b.itemsize for b in self.buffers.values())

    def work(self, programs: int) -> int:
        """About how many lanes a launch evaluates."""
        tile = max(
            (prod(shape_of(r.type)) for op in self.function.body.walk() for r in op.results), default=1
        )
        return programs * self.example.iterations * tile

    def values(self, device: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What a launch is given for these arguments of the contract."""
        storages: dict[str, torch.Tensor] = {}
        types = {arg.name: element_of(arg.type) for arg in self.function.args}
        found: dict[str, Any] = {}
        for argument, given in arguments.items():
            kind = types.get(argument)
            if isinstance(given, Buffer):
                name = given.storage or argument
                if name not in storages:
                    extent = max(
                        self.number(b.first) + self.number(b.extent)
                        for n, b in self.buffers.items()
                        if (b.storage or n) == name
                    )
                    storages[name] = self._memory(argument, given, extent, device)
                found[argument] = self._view(storages[name], given)
            elif isinstance(kind, Pointer):
                raise NotReplayed(f"{argument} has no buffer in the contract")
            elif given is None and kind is None:
                found[argument] = None
            elif isinstance(given, float) or (kind is not None and kind.is_float):
                found[argument] = float(given) if isinstance(given, int | float) else 1.0
            else:
                found[argument] = self.number(given)
        return found

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
        # at an address that is no more aligned than was promised
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
                tensor[element] = self._usual(buffer, element)
        else:
            tensor.fill_(self._usual(buffer, 0))
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
        near = [
            -2,
            -1,
            0,
            1,
            2,
            3,
            *(n for size in (*sizes, extent) for n in (size // 2, size - 1, size, size + 1)),
        ]
        allowed = [n for n in near if self._is_allowed(buffer, n, 0)] or [self._usual(buffer, 0)]
        if buffer.distinct:
            return self._drawn_once(buffer, extent, draw, min(allowed), max(allowed))
        if buffer.by_place:
            return torch.tensor([self._usual(buffer, element) for element in range(extent)])
        generator = torch.Generator().manual_seed(draw.getrandbits(32))
        found = torch.tensor(allowed)[torch.randint(len(allowed), (extent,), generator=generator)]
        return found.sort().values if buffer.ascending else found

    def _drawn_once(self, buffer: Buffer, extent: int, draw: Random, low: int, high: int) -> torch.Tensor:
        """Draw integers from low to high, each once but for one that may repeat, if there is one."""
        pool = list(range(low, high + 1))
        mark = next((n for n in (low, high) if not self._differs(buffer, n, 0)), None)
        if mark is not None:
            pool.remove(mark)
        count = min(extent, len(pool)) if mark is None else draw.randint(0, min(extent, len(pool)))
        found = (
            draw.sample(pool, count) + [mark] * (extent - count)
            if mark is not None
            else draw.sample(pool, count)
        )
        draw.shuffle(found)
        few = draw.sample(range(len(found)), min(len(found), 64))
        repeats = [element for element in few if found[element] == mark]
        if (
            len(found) < extent
            or not all(self._is_allowed(buffer, found[element], element) for element in few)
            or any(self._differs(buffer, found[element], element) for element in repeats)
        ):
            raise NotReplayed("integers that differ from each other are not made up")
        return torch.tensor(sorted(found) if buffer.ascending else found, dtype=torch.int64)

    def _pair(self, name: str, inverse: str) -> torch.Tensor:
        """Draw a map and its inverse, both with -1 where nothing leads anywhere, and return the map."""
        assert self.draw is not None
        if name not in self._paired:
            names = (name, inverse)
            extents = [self.number(self.buffers[n].extent) for n in names]
            count = self.draw.randint(0, min(extents))
            places = [torch.tensor(self.draw.sample(range(extent), count)) for extent in extents]
            for which, extent, here, there in zip(names, extents, places, places[::-1], strict=True):
                drawn = torch.full((extent,), -1)
                drawn[here.long()] = there.long()
                if not all(self._is_allowed(self.buffers[which], n, 0) for n in set(drawn.tolist())):
                    raise NotReplayed(f"{name} and its inverse are not made up")
                self._paired[which] = drawn
        return self._paired[name]

    def _is_allowed(self, buffer: Buffer, number: int, element: int) -> bool:
        assumed = buffer.assumed(z3.IntVal(number), z3.IntVal(element))
        return assumed is None or bool(self.number(assumed))

    def _differs(self, buffer: Buffer, number: int, element: int) -> bool:
        """Whether no other element may be this number."""
        return bool(self.number(buffer.differs(z3.IntVal(number), z3.IntVal(element))))

    def _usual(self, buffer: Buffer, element: int) -> int:
        """A number that may be at a place of a buffer."""
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
