"""Generalization of recorded launches to contracts: "it worked for these sizes; for which does it not?"

A launch is recorded with its tensors, integers and grid. Every extent of a tensor becomes a size. An integer or an
axis of the grid that equals an extent, a product of two, the number of tiles that cover one, or a constant times
one, becomes the same expression of the sizes. The result is a guess, and printed as such; it is a good one where
the extents of a launch are distinct. Conditions that callers ensure can be added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement
from typing import Any

from .contract import Bool, Buffer, Contract, ContractError, Int, Symbol, cdiv, symbol
from .solver import ask, z3


@dataclass(frozen=True)
class Launch:
    """Recorded launch of a kernel."""

    kernel: Any  # the `@triton.jit` function
    grid: tuple[int, int, int]
    arguments: Mapping[str, Any]  # all of them, by name; tensors with their contents


@contextmanager
def recorded(most: int = 1) -> Iterator[list[Launch]]:
    """Record the launches inside a `with` block, at most `most` of each kernel."""
    from triton.runtime import JITFunction

    launches: list[Launch] = []
    run = JITFunction.run

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not warmup and sum(launch.kernel is self for launch in launches) < most:
            bound = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
            arguments = {p.name: bound.get(p.name, p.default) for p in self.params}
            axes = grid(arguments) if callable(grid) else grid
            x, y, z = (*axes, 1, 1)[:3]
            launches.append(Launch(self, (x, y, z), arguments))
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    JITFunction.run = note
    try:
        yield launches
    finally:
        JITFunction.run = run


@dataclass
class _Sizes:
    """Sizes of a launch, and how other numbers depend on them."""

    symbols: dict[int, Symbol] = field(default_factory=dict)
    tiles: Sequence[int] = ()  # constants that may be tile extents

    def meaning(self, number: int) -> Int:
        """Express a number as a size, a product of sizes, a number of tiles or a constant times a size.

        Constants of the kernel and other numbers stay as they are.
        """
        if number <= 1 or number in self.tiles:
            return number
        if number in self.symbols:
            return self.symbols[number]
        for a, b in combinations_with_replacement(self.symbols, 2):
            if a * b == number:
                return self.symbols[a] * self.symbols[b]
        for value, size in self.symbols.items():
            for tile in self.tiles:
                if tile > 1 and cdiv(value, tile) == number:
                    return cdiv(size, tile)
        for value, size in self.symbols.items():
            for factor in self.tiles:
                if factor * value == number:
                    return factor * size
        for one, size in self.symbols.items():
            for other, second in self.symbols.items():
                for tile in self.tiles:
                    if tile > 1 and cdiv(one, tile) * other == number:
                        return cdiv(size, tile) * second
        return number

    def ensured(self, by_callers: Ensured) -> tuple[Bool, ...]:
        """Return the conditions that callers ensure; they must hold of the recorded launch."""
        conditions = tuple(by_callers({size.name: size for size in self.symbols.values()}))
        numbers = [(size, z3.IntVal(value)) for value, size in self.symbols.items()]
        for condition in conditions:
            if not z3.is_true(z3.simplify(z3.substitute(condition, *numbers))):
                raise ContractError(f"{condition} does not hold of the recorded launch")
        return conditions


Ensured = Callable[[Mapping[str, Symbol]], Sequence[Bool]]  # conditions on sizes, given by name


def generalized(launch: Launch, most: int = 2**31 - 1, ensured: Ensured = lambda sizes: ()) -> Contract:
    """Return a contract of launches like this one with other sizes. `ensured` adds conditions that callers ensure."""
    import torch

    parameters = {p.name: p for p in launch.kernel.params}
    tensors = {n: v for n, v in launch.arguments.items() if isinstance(v, torch.Tensor)}
    constants = {n: v for n, v in launch.arguments.items() if parameters[n].is_constexpr}
    integers = {n: v for n, v in launch.arguments.items() if type(v) is int and n not in constants}
    tiles = sorted({v for v in constants.values() if type(v) is int and v > 1}, reverse=True)
    sizes = _Sizes(tiles=tiles)
    for tensor in tensors.values():
        for extent in tensor.shape:
            if extent > 1 and extent not in sizes.symbols and extent not in tiles:
                sizes.symbols[extent] = _size(extent, integers, constants, most)
    arguments: dict[str, Any] = {}
    for name, value in launch.arguments.items():
        if name in tensors:
            storage, first = _storage(name, tensors)
            arguments[name] = replace(_buffer(value, sizes), storage=storage, first=sizes.meaning(first))
        elif name in integers:
            arguments[name] = sizes.meaning(value)
        elif name not in constants:
            arguments[name] = value if value is None or isinstance(value, bool | float) else None
    grid = tuple(sizes.meaning(axis) for axis in launch.grid)
    return Contract.of(
        grid=grid,
        arguments=arguments,
        constants=constants,
        sizes=tuple(sizes.symbols.values()),
        assumptions=sizes.ensured(ensured),
    )


def _storage(name: str, tensors: Mapping[str, Any]) -> tuple[str | None, int]:
    """Return the storage that a tensor shares with others (or None), and the tensor's offset in it."""
    tensor = tensors[name]
    storage = tensor.untyped_storage().data_ptr()
    sharing = {n: t for n, t in tensors.items() if t.numel() and t.untyped_storage().data_ptr() == storage}
    if name not in sharing or len(sharing) == 1:
        return None, 0
    before = tensor.data_ptr() - min(other.data_ptr() for other in sharing.values())
    if before % tensor.element_size():
        raise ContractError(
            f"{name} begins inside of an element of {next(iter(sharing))}: give a contract by hand"
        )
    return next(iter(sharing)), before // tensor.element_size()


def _size(extent: int, integers: Mapping[str, int], constants: Mapping[str, Any], most: int) -> Symbol:
    """Create a size named after the argument with that value.

    A constant that is the next power of two was derived from the extent: it bounds the size.
    """
    name = next((name for name, value in integers.items() if value == extent), f"size_{extent}")
    power = 1 << (extent - 1).bit_length()
    return symbol(name, 1, power if power in constants.values() else most)


def _buffer(tensor: Any, sizes: _Sizes) -> Buffer:
    import torch

    shape = [sizes.meaning(extent) if extent in sizes.symbols else extent for extent in tensor.shape]
    values = _values(tensor, sizes) if tensor.dtype in (torch.int32, torch.int64) and tensor.numel() else None
    if tensor.is_contiguous():
        extent: Int = 1
        for size in shape:
            extent = extent * size
        return Buffer(tensor.dtype, extent, values=values)
    strides = [sizes.meaning(stride) for stride in tensor.stride()]
    dims = sorted(zip(tensor.stride(), shape, strides, strict=True), key=lambda dim: -dim[0])
    return Buffer.strided(tensor.dtype, [d[1] for d in dims], [d[2] for d in dims], values=values)


def _values(tensor: Any, sizes: _Sizes) -> Callable[[Int], Any]:
    """Generalize the contents of an integer tensor.

    Values range from 0 up to and including a size that equals the maximum, or else below the next larger constant
    or size. Negative values range down to the minimum; a single one is a marker.
    """
    minimum, maximum = int(tensor.min()), int(tensor.max())
    if maximum in sizes.symbols:
        limit = sizes.symbols[maximum] + 1
    else:
        candidates = sizes.symbols if maximum + 1 not in sizes.tiles else {}
        above = min((value for value in candidates if value > maximum), default=None)
        limit = sizes.symbols[above] if above is not None else maximum + 1
    if minimum < 0 and int(tensor[tensor < 0].max()) == minimum:
        return lambda v: z3.Or(v == minimum, z3.And(v >= 0, v < limit))
    return lambda v: z3.And(v >= min(minimum, 0), v < limit)


def fixed(contract: Contract) -> dict[str, Any]:
    """Return integer arguments and constants above 1, and sizes with a single possible value.

    The proof holds only for these.
    """
    arguments = {**contract.arguments, **contract.constants}
    result = {name: value for name, value in arguments.items() if type(value) is int and value > 1}
    solution = ask(contract.facts, z3.BoolVal(False))
    for size in contract.sizes if solution.verdict == "counterexample" else ():
        value = solution.value(size)
        if ask(contract.facts, size == value).verdict == "proven":
            result[size.name] = value
    return result


def described(contract: Contract) -> str:
    """Format a contract in a few lines for a person to check."""

    def text(value: Any) -> str:
        return " ".join(str(value).split())

    lines = [f"sizes: {', '.join(f'{s.low} <= {s.name} <= {s.high}' for s in contract.sizes) or 'none'}"]
    lines += [f"with {text(assumption)}" for assumption in contract.assumptions]
    lines.append(f"grid: ({', '.join(map(text, contract.grid))})")
    for name, value in contract.arguments.items():
        if isinstance(value, Buffer):
            dims = f" as {text(list(value.dims))}" if value.dims else ""
            lines.append(f"{name}: {value.element}[{text(value.extent)}]{dims}")
        elif value is not None and not isinstance(value, float):
            lines.append(f"{name}: {text(value)}")
    return "\n".join(f"  {line}" for line in lines)
