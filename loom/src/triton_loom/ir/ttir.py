"""A small typed IR for TTIR modules.

An operation is a name, operands, results, attributes and regions. Later modules (`rewrite`, and those of `codegen`)
define the meaning of each operation; they only ever see the classes of this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

# ---- types -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scalar:
    """Scalar type: `i1`, `i32`, `f32`, `bf16`, `f8E4M3FN`, ..."""

    name: str

    @property
    def is_float(self) -> bool:
        return self.name[0] in "fb"

    @property
    def bits(self) -> int:
        if self.name.startswith("f8"):
            return 8
        return 64 if self.name == "index" else int(self.name.lstrip("ifbu"))

    def __str__(self) -> str:
        return self.name


I1, I8, I32, I64 = Scalar("i1"), Scalar("i8"), Scalar("i32"), Scalar("i64")
BF16, F32, F64 = Scalar("bf16"), Scalar("f32"), Scalar("f64")


@dataclass(frozen=True)
class Pointer:
    """Pointer type: `!tt.ptr<f32>`, ..."""

    pointee: Type

    bits = 64
    is_float = False

    def __str__(self) -> str:
        return f"!tt.ptr<{self.pointee}>"


@dataclass(frozen=True)
class Tensor:
    """Tile type: `tensor<4x8xf32>`, ..."""

    shape: tuple[int, ...]
    element: Scalar | Pointer

    @property
    def size(self) -> int:
        return prod(self.shape)

    def __str__(self) -> str:
        return f"tensor<{''.join(f'{d}x' for d in self.shape)}{self.element}>"


@dataclass(frozen=True)
class Opaque:
    """Type without structure in this IR, kept as text so that errors can name it."""

    text: str

    def __str__(self) -> str:
        return self.text


Type = Scalar | Pointer | Tensor | Opaque


def element_of(type_: Type) -> Scalar | Pointer:
    """Return the scalar type of one lane of a value of this type."""
    if isinstance(type_, Tensor):
        return type_.element
    if isinstance(type_, Opaque):
        raise TypeError(f"type {type_} has no elements")
    return type_


def shape_of(type_: Type) -> tuple[int, ...]:
    """Return the extents of a tile; () for a scalar."""
    return type_.shape if isinstance(type_, Tensor) else ()


# ---- operations --------------------------------------------------------------------------------------


@dataclass(eq=False)
class Value:
    """SSA value. `name` is MLIR's, which keeps the Python variable's name where there was one."""

    name: str
    type: Type
    producer: Op | None = None  # None for arguments of blocks and functions
    owner: Block | None = None  # the block whose argument this is

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"


@dataclass(eq=False)
class Op:
    """Operation."""

    name: str
    operands: list[Value]
    results: list[Value] = field(default_factory=list)
    attrs: dict[str, Any] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)
    successors: list[tuple[Block, list[Value]]] = field(default_factory=list)
    location: str = ""  # the kernel line it comes from
    origin: str = ""  # its own line, which differs in inlined functions
    block: Block | None = None

    @property
    def result(self) -> Value:
        return self.results[0]

    def walk(self) -> Iterator[Op]:
        """Yield this operation and all operations inside its regions, in program order."""
        yield self
        for region in self.regions:
            yield from region.walk()

    def __repr__(self) -> str:
        return f"{self.name}({', '.join('%' + v.name for v in self.operands)})"


@dataclass(eq=False)
class Block:
    """Sequence of operations."""

    args: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    name: str = ""
    region: Region | None = None


@dataclass(eq=False)
class Region:
    """Blocks inside an operation or a function."""

    blocks: list[Block] = field(default_factory=list)
    parent: Op | None = None

    @property
    def block(self) -> Block:
        """The only block of a structured region."""
        if len(self.blocks) != 1:
            raise ValueError("a structured region has exactly one block")
        return self.blocks[0]

    def walk(self) -> Iterator[Op]:
        for block in self.blocks:
            for op in block.ops:
                yield from op.walk()


@dataclass(eq=False)
class Function:
    """`tt.func`: the kernel, or a function that it calls."""

    name: str
    args: list[Value]
    results: list[Type]
    body: Region
    public: bool
    location: str = ""
    arg_attrs: list[dict[str, Any]] = field(default_factory=list)


@dataclass(eq=False)
class Module:
    """A kernel with all functions that it calls."""

    functions: dict[str, Function]

    @property
    def entry(self) -> Function:
        return next(f for f in self.functions.values() if f.public)


# ---- literals ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bits:
    """Float given by its bit pattern (`0x7F800000`)."""

    pattern: int


Number = bool | int | float | Bits


@dataclass(frozen=True)
class Dense:
    """`dense<...>`: a constant tile, or one literal for each dimension."""

    values: Any  # one literal, or a flat list of them
