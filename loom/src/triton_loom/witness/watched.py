"""Launch of an instrumented kernel: the bounds that its accesses are checked against, and the results.

`Watched` describes the launch's arguments to include/witness.h, reads its findings and counts back, and passes them
to the open scopes.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..device.arguments import Field
from ..errors import FindingKind
from ..features import COUNT
from . import abi

if TYPE_CHECKING:  # importing it would import torch while a device is being created
    from .fresh import FreshMemory


@dataclass(frozen=True)
class BrokenPromise:
    """Promise that a launch violated, about an argument or about a value that one program computes."""

    argument: str | None
    detail: str
    location: str = ""  # "file:line", if not the kernel's own
    program: tuple[int, int, int] | None = None


class Listener(Protocol):
    """Scope, as a launch sees it."""

    def finish(self, watched: Watched, broken_promises: Sequence[BrokenPromise]) -> None:
        """Receive a finished launch, and the promises that it violated."""

    def miss(self, kernel: str, reason: str) -> None:
        """Receive a launch that could not be observed."""


class Checker(Listener, Protocol):
    """Scope that decides what a launch may access."""

    dry: bool  # addresses are evaluated, but memory is not accessed
    allowed: dict[str, Any]  # tensors that may be accessed through addresses read from memory

    def fresh_memory(self, tensor: Any) -> FreshMemory | None:
        """Return the memory that a tensor lies in, if it was allocated in the scope."""


class Arena:
    """Memory that launches reuse one after another.

    It is zero at first and never cleared (`Witness::base` explains why).
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # one watched launch at a time
        self.base = 0  # highest number assigned to a program so far
        self._areas: dict[str, mmap.mmap] = {}

    def area(self, name: str, size: int) -> int:
        """Return the address of at least `size` bytes."""
        if name not in self._areas or size > len(self._areas[name]):
            self._areas[name] = mmap.mmap(-1, size + size // 2 + mmap.PAGESIZE)
        return ctypes.addressof(ctypes.c_char.from_buffer(self._areas[name]))

    def numbers(self, programs: int) -> int:
        """Reserve numbers for the programs of a launch; return the one before the first."""
        if self.base + programs >= 2**31 - 2:
            self.base = 0
            self._areas.pop("cells", None)
        base, self.base = self.base, self.base + programs
        return base


ARENA = Arena()


# ---- arguments -------------------------------------------------------------------------------------------------


@dataclass
class Memory:
    """Elements of a tensor argument, in bytes: contiguous runs that repeat along dimensions."""

    low: int
    run: int
    dims: list[tuple[int, int]]  # (extent, stride), the largest stride first

    @property
    def high(self) -> int:
        return self.low + sum((extent - 1) * stride for extent, stride in self.dims) + self.run

    @classmethod
    def of(cls, tensor: Any, address: int) -> Memory:
        size = tensor.element_size()
        extents, strides = tuple(tensor.shape), tuple(tensor.stride())
        if 0 in extents:
            return cls(address, 0, [])
        dims = sorted(
            ((s * size, e) for e, s in zip(extents, strides, strict=True) if e > 1 and s != 0), reverse=True
        )
        run = size
        merged: list[tuple[int, int]] = []
        for stride, extent in reversed(dims):
            if not merged and stride == run:
                run *= extent
            elif merged and stride == merged[-1][0] * merged[-1][1]:
                merged[-1] = merged[-1][0] * extent, merged[-1][1]
            else:
                merged.append((extent, stride))
        return cls(address, run, merged[::-1])

    @classmethod
    def unknown(cls) -> Memory:
        """Return unlimited memory: nothing is known of a bare address, so every access is allowed."""
        return cls(0, 2**63 - 1, [])


@dataclass
class PointerArgument:
    """Pointer of a launch: the tensor it came from (None for a bare address), and how the kernel accesses it."""

    name: str
    tensor: Any
    address: int
    memory: Memory
    accesses: set[str] = field(default_factory=set)  # of "load", "store", "atomic"
    size: int = 8  # bytes of the smallest access

    @classmethod
    def of(cls, name: str, tensor: Any, address: int) -> PointerArgument:
        return cls(
            name, tensor, address, Memory.of(tensor, address) if tensor is not None else Memory.unknown()
        )

    @property
    def loaded(self) -> bool:
        return not self.accesses.isdisjoint(("load", "atomic"))

    @property
    def stored(self) -> bool:
        return not self.accesses.isdisjoint(("store", "atomic"))

    @property
    def has_tensor(self) -> bool:
        return self.tensor is not None

    @property
    def is_meta(self) -> bool:
        return self.has_tensor and bool(self.tensor.is_meta)

    def distance(self, address: int) -> int:
        """Return the bytes from the first element, as a wrapped 64-bit difference."""
        return ctypes.c_int64(address - self.address).value

    def index(self, address: int) -> tuple[int, ...] | None:
        """Return the index that an address would have by the tensor's strides; it may lie outside of the shape.
        Addresses between elements have none."""
        if not self.has_tensor:
            return None
        rest, part = divmod(self.distance(address), self.tensor.element_size())
        strides = list(self.tensor.stride())
        indices = [0] * len(strides)
        for dim in sorted(range(len(strides)), key=lambda d: -strides[d]):
            if strides[dim] and self.tensor.shape[dim] > 1:
                indices[dim], rest = divmod(rest, strides[dim])
        return None if rest or part else tuple(indices)

    def describe(self) -> str:
        tensor = self.tensor
        kind = str(tensor.dtype).removeprefix("torch.")
        text = f"{self.name}: {kind}{list(tensor.shape)}"
        return text if tensor.is_contiguous() else f"{text} with strides {tuple(tensor.stride())}"


def tensor_and_address(argument: Any, fake: int = 0) -> tuple[Any, int]:
    """Return the tensor of a pointer argument, None for a bare address, and its address; `fake` for a meta tensor."""
    import torch

    base = getattr(argument, "base", None)
    if not isinstance(argument, torch.Tensor) and isinstance(base, torch.Tensor):
        argument = base  # triton.reinterpret
    if isinstance(argument, torch.Tensor):
        return argument, fake if argument.is_meta else argument.data_ptr()
    return None, argument if isinstance(argument, int) else argument.data_ptr() if argument is not None else 0


# ---- a launch ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """Instrumented kernel, as its launches see it."""

    name: str
    modes: tuple[str, ...]  # what it does at each access, whether or not a scope is open
    metadata: dict[str, Any]  # from the compiler (`Witnessed.metadata`)
    location: str  # its current "file:line"
    sites: list[dict[str, Any]]  # source locations that can be reported
    fields: list[Field]  # its arguments in TTIR
    constants: dict[str, Any]  # arguments that it was specialized for, by name
    ttir: Callable[[], str | None]  # returns its text, if still available


class Watched:
    """Launch to be, described for witness.h."""

    def __init__(
        self,
        kernel: Kernel,
        values: Sequence[Any],
        *,
        grid: tuple[int, int, int],
        reached: Sequence[Any] = (),
        sanitizer: Checker | None = None,
        counters: Sequence[Listener] = (),
    ) -> None:
        """`values` are the values of the kernel's fields."""
        self.kernel, self.values, self.grid, self.sites = kernel, values, grid, kernel.sites
        self.sanitizer, self.counters = sanitizer, tuple(counters)
        self.ended_early = ""  # the reason, if it was
        self.arguments: list[PointerArgument] = []
        for field_, value in zip(kernel.fields, values, strict=True):
            if field_.code == "P":
                tensor, address = tensor_and_address(value, (len(self.arguments) + 1) << 44)
                self.arguments.append(PointerArgument.of(field_.name, tensor, address))
        if any(site["argument"] < 0 for site in self.sites):
            reachable = {f"reached[{number}]": tensor for number, tensor in enumerate(reached)}
            if self.sanitizer is not None:
                reachable |= self.sanitizer.allowed
            self.arguments += (PointerArgument.of(n, t, t.data_ptr()) for n, t in reachable.items())
        declared_only = any(a.is_meta for a in self.arguments)
        self.dry = declared_only or (self.sanitizer is not None and self.sanitizer.dry)
        for site in self.sites:
            self._note(site)
        self.witness = abi.Witness(dry=self.dry, ordered=kernel.metadata["ordered"])
        self._findings = (abi.Finding * (len(self.sites) * len(abi.KINDS) + 1))()
        self._regions = self._make_regions()
        self._shadows = (abi.Shadow * 0)()
        self._c_arguments = (abi.Argument * len(self.arguments))(*map(self._c_argument, self.arguments))
        if self.sanitizer is not None and not self.dry:
            self._shadows = self._find_shadows(self.sanitizer)
        for name in ("arguments", "regions", "shadows", "findings"):
            array = self._c_arguments if name == "arguments" else getattr(self, f"_{name}")
            setattr(self.witness, name, ctypes.addressof(array))
            if name != "findings":
                setattr(self.witness, f"{name[:-1]}_count", len(array))

    def _note(self, site: dict[str, Any]) -> None:
        """Record an access with its argument, or with all arguments if the argument is only known at run time."""
        what, which = site["what"], site["argument"]
        if what not in ("load", "store", "atomic"):
            return
        for argument in self.arguments if which < 0 else [self.arguments[which]]:
            argument.accesses.add(what)
            argument.size = min(argument.size, site["size"])

    @property
    def address(self) -> int:
        return ctypes.addressof(self.witness)

    def _c_argument(self, argument: PointerArgument) -> abi.Argument:
        memory = argument.memory
        result = abi.Argument(
            low=memory.low,
            high=memory.high,
            run=memory.run,
            rank=len(memory.dims),
            region=next(
                (
                    i
                    for i, r in enumerate(self._regions)
                    if argument.has_tensor and r.low <= memory.low < r.high
                ),
                -1,
            ),
            shadow=-1,
            loaded=argument.has_tensor and argument.loaded,
            stored=argument.has_tensor and argument.stored,
        )
        reach = memory.run
        result.reach[len(memory.dims)] = reach
        for d, (extent, stride) in reversed(list(enumerate(memory.dims))):
            result.extent[d], result.stride[d] = extent, stride
            reach += (extent - 1) * stride
            result.reach[d] = reach
        return result

    def _make_regions(self) -> Any:
        """Return the memory that is written, as regions of overlapping arguments."""
        groups: list[list[PointerArgument]] = []
        end = -1
        for argument in sorted((a for a in self.arguments if a.has_tensor), key=lambda a: a.memory.low):
            if argument.memory.low >= argument.memory.high:
                continue
            if argument.memory.low < end:
                groups[-1].append(argument)
            else:
                groups.append([argument])
            end = max(end, argument.memory.high)
        regions = []
        for group in groups if self.sanitizer else []:
            if not any(a.stored for a in group):
                continue
            low, high = group[0].memory.low, max(a.memory.high for a in group)
            shift = min(a.size for a in group).bit_length() - 1
            steps = [a.memory.low - low for a in group] + [s for a in group for _, s in a.memory.dims]
            while any(step % (1 << shift) for step in steps):
                shift -= 1
            loaded, updated = (any(what in a.accesses for a in group) for what in ("load", "atomic"))
            regions.append(abi.Region(low, high, shift, loaded, updated))
        return (abi.Region * len(regions))(*regions)

    def _find_shadows(self, sanitizer: Checker) -> Any:
        shadows: dict[int, abi.Shadow] = {}
        for argument, c_argument in zip(self.arguments, self._c_arguments, strict=True):
            fresh = sanitizer.fresh_memory(argument.tensor) if argument.has_tensor else None
            if fresh is None:
                continue
            if fresh.low not in shadows:
                shadows[fresh.low] = abi.Shadow(fresh.low, fresh.high, fresh.written_address, 0, 4)
            shadows[fresh.low].loaded |= argument.loaded
            if argument.tensor.element_size() < 4:
                shadows[fresh.low].grain = 8
            c_argument.shadow = list(shadows).index(fresh.low)
        return (abi.Shadow * len(shadows))(*shadows.values())

    def prepare(self, threads: int) -> None:
        """Allocate the launch's memory: cells for what is written and each thread's sectors, bits for touched bytes."""
        cells = bits = 0
        if self.sanitizer is not None and not self.dry:
            cells += sum(
                (1 + r.loaded + r.updated) * (4 * ((r.high - r.low) >> r.shift) + 128) for r in self._regions
            )
        if COUNT in self.kernel.modes and not self.dry:
            for argument in (a for a in self._c_arguments if a.loaded or a.stored):
                size = (argument.high - argument.low) // 8 + 192
                bits += 2 * size
                cells += 2 * size * threads
        x, y, z = self.grid
        self.witness.base = ARENA.numbers(x * y * z)
        self.witness.cells = ARENA.area("cells", cells)
        self.witness.bits = ARENA.area("bits", bits)

    # -- after the launch --

    def done(self) -> None:
        """Retire the numbers that the launch used, however it ended."""
        ARENA.base = max(ARENA.base, self.witness.number)

    def report(self, broken_promises: Sequence[BrokenPromise]) -> None:
        """Report to the scopes; the sanitizer last, because it may raise."""
        for counter in self.counters:
            counter.finish(self, broken_promises)
        if self.sanitizer is not None:
            self.sanitizer.finish(self, broken_promises)

    def violations(self) -> Iterator[Violation]:
        """Yield all violations."""
        for number in range(len(self.sites)):
            for k, kind in enumerate(abi.KINDS):
                record = self._findings[number * len(abi.KINDS) + k]
                if record.count:
                    yield Violation(self, kind, number, record)

    @property
    def left_out(self) -> str:
        """Return what could not be checked although the launch was watched."""
        bare = [a.name for a in self.arguments if a.accesses and not a.has_tensor]
        dry = "dry: bounds and overflow only, in a sample of the programs" if self.dry else ""
        unknown = f"accesses through {', '.join(bare)}, which came as a bare address" if bare else ""
        return "; ".join(filter(None, (dry, unknown and f"without {unknown}")))

    def traffic(self, argument: int, direction: int) -> tuple[int, int, int, int]:
        total = self._c_arguments[argument].direction[direction].total
        return total.requested, total.distinct, total.program_sectors, total.launch_sectors

    def program(self, position: int) -> tuple[int, int, int]:
        """Return the program at a position in the grid."""
        x, y, _ = self.grid
        return position % x, position // x % y, position // x // y


@dataclass(frozen=True)
class Violation:
    """Violation at one site of a launch: its count, and its first occurrence in full."""

    watched: Watched
    kind: FindingKind
    number: int  # index of the site
    record: abi.Finding

    @property
    def site(self) -> dict[str, Any]:
        return self.watched.sites[self.number]

    @property
    def program(self) -> tuple[int, int, int]:
        x, y, z = self.record.program
        return x, y, z

    @property
    def argument(self) -> PointerArgument | None:
        return self.watched.arguments[self.record.argument] if self.record.argument >= 0 else None
