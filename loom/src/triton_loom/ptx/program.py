"""Translation of statements into a flat program: numbered registers, resolved branches, reconvergence points."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from . import accumulators, loads, opcodes, scalars
from .operations import Operation, UnknownInstruction, Use
from .text import Kernel, PtxError, Statement

NOWHERE = 0xFFFFFFFF
ALL_LANES = 0xFFFFFFFF
# `Flags` of include/gpu/machine.h.
ATOMIC, UNFENCED, UNIFORM_OPERANDS, FENCES_THREADS, TENSOR_COPY = 1, 2, 4, 8, 16
ACQUIRES, RELEASES, NARROW = 32, 64, 128

SPECIALS = (  # in the order of `SpecialKind` in include/gpu/machine.h
    *(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"),
    "%laneid", "%warpid", "%nwarpid", "parameters", "shared", "%cluster_ctarank", "%cluster_nctarank",
    "%lanemask_lt", "%lanemask_le", "%lanemask_eq", "%lanemask_ge", "%lanemask_gt", "%clock", "%gridid",
    "%smid", "%nsmid",
)  # fmt: skip
_SAME = {f"%cluster_ctaid.{axis}": "%cluster_ctarank" for axis in "xyz"} | {
    f"%cluster_nctaid.{axis}": "%cluster_nctarank" for axis in "xyz"
}


@dataclass(frozen=True)
class Decoded:
    """An instruction in the machine's form."""

    handler: str
    operands: tuple[int, ...]  # byte offsets into the register file; for brx.idx, targets after the first
    immediate: int
    guard: int
    flip: int
    target: int
    reconverge: int
    flags: int
    behind: str = ""  # the handler that `handler` replaces


@dataclass
class Flat:
    """A kernel ready for execution, except for the addresses of its handlers."""

    kernel: Kernel
    instructions: list[Decoded] = field(default_factory=list)
    register_bytes: int = 0
    constants: list[tuple[int, int, int]] = field(default_factory=list)  # offset, bytes per lane, value
    symbols: list[tuple[int, str]] = field(default_factory=list)  # offset, name of initialized global memory
    specials: list[tuple[int, int, int]] = field(default_factory=list)  # offset, kind, addend
    scalars: set[scalars.Scalar] = field(default_factory=set)
    serial: bool = False  # results depend on the order of blocks: they run one after another

    @property
    def statements(self) -> Sequence[Statement]:
        return self.kernel.statements


def flatten(kernel: Kernel) -> Flat:
    """Decode every statement; raise `UnknownInstruction` for the first that is not supported."""
    return _Builder(kernel).build()


def _align(offset: int, multiple: int) -> int:
    return -(-offset // multiple) * multiple


class _Builder:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.flat = Flat(kernel)
        self.fences_threads = False  # by tcgen05.fence
        self.registers: dict[str, int] = {}
        self.preloaded: dict[
            tuple[object, ...], int
        ] = {}  # constants, symbols and specials that have a register
        for name, size in kernel.registers.items():
            self.registers[name] = self._allocate(size)
        # If a target lacks an atomic operation, the PTX loops around compare-and-swap: a load gives the first guess of
        # the old value, and a stale guess does no harm.
        self.swapped = {s.operands[1] for s in kernel.statements if re.match(r"atom\b.*\.cas\.", s.opcode)}

    def _allocate(self, size: int) -> int:
        """Allocate a register of `size` bytes per lane (one bit per lane for a predicate); return its offset."""
        total = 32 * size or 4
        offset = _align(self.flat.register_bytes, 64 if size else 4)
        self.flat.register_bytes = offset + total
        return offset

    def build(self) -> Flat:
        statements = self.kernel.statements
        if not statements or statements[-1].guard or opcodes.decode(statements[-1]).handler != "leave":
            statements.append(Statement("ret", ()))  # what follows the last statement is the end
        operations = [opcodes.decode(statement) for statement in statements]
        numbered = enumerate(zip(operations, statements, strict=True))
        ways = [self._ways(number, *both) for number, both in numbered]
        reconvergence_points = reconvergence(ways)
        doubtful = accumulators.doubtful(operations, ways)
        loading = loads.doubtful(operations, ways)
        self.fences_threads = any(o.handler.startswith("tcgen05.fence::") for o in operations)
        for number, (statement, operation) in enumerate(zip(statements, operations, strict=True)):
            try:
                decoded = self._decode(statement, operation, reconvergence_points[number])
                if number in doubtful.touching:
                    decoded = replace(decoded, handler="wgmma.touched", behind=decoded.handler)
                if number in loading:
                    decoded = replace(decoded, handler="tcgen05.touched", behind=decoded.handler)
                if number in doubtful.unfenced:
                    decoded = replace(decoded, flags=decoded.flags | UNFENCED)
                self.flat.instructions.append(decoded)
            except UnknownInstruction:
                raise
            except (KeyError, ValueError, PtxError) as error:
                raise UnknownInstruction(statement, f"an operand is not supported ({error})") from error
            self.flat.serial |= operation.serial
        return self.flat

    # ---- control flow ------------------------------------------------------------------------------------------

    def _label(self, name: str) -> int:
        if name not in self.kernel.labels:
            raise PtxError(f"there is no label {name}")
        return self.kernel.labels[name]

    def _targets(self, operation: Operation) -> list[int]:
        if operation.handler == "branch.table":
            return [self._label(name) for name in self.kernel.tables[operation.targets[0]]]
        return [self._label(name) for name in operation.targets]

    def _ways(self, number: int, operation: Operation, statement: Statement) -> list[int]:
        """Return the possible successors of an instruction; the number after the last is the end.

        A lane that leaves the kernel before its last statement is not waited for where the other lanes reconverge."""
        following = self._targets(operation)
        if operation.handler == "leave" and number == len(self.kernel.statements) - 1:
            following = [len(self.kernel.statements)]
        if not operation.ends or statement.guard:
            following.append(number + 1)
        return following

    # ---- operands ----------------------------------------------------------------------------------------------

    def _decode(self, statement: Statement, operation: Operation, reconverge: int) -> Decoded:
        uses, immediate, handler = list(operation.uses), operation.immediate, operation.handler
        if (
            handler == "ld.param" and uses[-1].text in self.registers
        ):  # parameter addresses are ordinary memory addresses
            handler, uses[-1] = "ld.global", Use(uses[-1].text, "u64")
            operation = replace(operation, handler=handler, uses=tuple(uses))
        if handler == "ld.param":
            parameter = uses.pop().text
            immediate += self.kernel.parameters[parameter].offset
        offsets = [self._offset(use) for use in uses]
        if handler in ("ld.local", "st.local"):
            if self._size(uses[-1 if handler == "ld.local" else 0]) != 4:
                raise PtxError("an address of local memory has 64 bits")
            offsets += [self._local(), self._constant(self.kernel.local_bytes, 4)]
        sizes = tuple(self._size(use) for use in uses)
        if operation.arithmetic:
            scalar = scalars.Scalar(handler, sizes)
            self.flat.scalars.add(scalar)
            handler = scalar.handler
        elif handler in _BY_SIZE:
            handler = _sized(handler, operation.uses, sizes)
        targets = self._targets(operation)
        if handler == "branch.table":
            offsets += targets
        guard = self.registers[statement.guard] if statement.guard else self._constant(ALL_LANES, 0)
        return Decoded(
            handler=handler,
            operands=tuple(offsets),
            immediate=immediate,
            guard=guard,
            flip=ALL_LANES if statement.negated else 0,
            target=targets[0] if targets else NOWHERE,
            reconverge=reconverge,
            flags=self._flags(statement, handler, uses),
        )

    def _flags(self, statement: Statement, handler: str, uses: Sequence[Use]) -> int:
        if handler.startswith("shfl.") and not {uses[3].text, uses[4].text} & self.registers.keys():
            return UNIFORM_OPERANDS
        if handler.startswith("tcgen05."):
            copies = handler.startswith("tcgen05.cp.")
            return FENCES_THREADS * self.fences_threads | TENSOR_COPY * copies
        if handler == "fence":
            return _ordering(statement)
        strong = {"relaxed", "acquire", "release", "volatile"}.intersection(statement.opcode.split("."))
        if handler.startswith("atom.") or (strong and handler.startswith(("ld.", "st."))):
            return ATOMIC | _ordering(statement)
        reduces = handler == "cp.async.bulk.tensor.store" and statement.opcode.startswith("cp.reduce.")
        guess = handler.startswith("ld.global") and statement.operands[1] in self.swapped
        return ATOMIC if reduces or guess else 0

    def _size(self, use: Use) -> int:
        """Return the bytes per lane of an operand's register."""
        if use.text in self.kernel.registers:
            return self.kernel.registers[use.text]
        return scalars.register_bytes(use.type)

    def _offset(self, use: Use) -> int:
        text, size = use.text, scalars.register_bytes(use.type)
        if text in self.registers:
            register_size = self.kernel.registers[text]
            if (register_size == 0) != (size == 0) or register_size < size:
                raise PtxError(f"{text} is not a register for {use.type}")
            return self.registers[text]
        if text == "_":
            return self._preloaded(("sink", size), size, lambda offset: None)
        special = _SAME.get(text, text)
        if special in SPECIALS:
            return self._special(special, size, 0)
        if text in self.kernel.shared:
            return self._special("shared", size, self.kernel.shared[text])
        if text in self.kernel.local:
            return self._constant(self.kernel.local[text], size)
        if text in self.kernel.parameters:
            return self._special("parameters", size, self.kernel.parameters[text].offset)
        if text in self.kernel.constants:
            key = ("symbol", text)
            return self._preloaded(key, 8, lambda offset: self.flat.symbols.append((offset, text)))
        if text.startswith("%"):
            raise PtxError(f"{text} is not declared, or is a special register that is not emulated")
        return self._constant(number(text, use.type), size)

    def _local(self) -> int:
        """Return the offset of local memory in the register file, which holds one lane's bytes after another's."""
        return self._preloaded(("local",), self.kernel.local_bytes, lambda offset: None)

    def _special(self, name: str, size: int, addend: int) -> int:
        kind = SPECIALS.index(name)
        if (size == 8 and name != "parameters") or size == 0:
            raise PtxError(f"{name} in {8 * size} bits")
        return self._preloaded(
            ("special", kind, addend), size, lambda offset: self.flat.specials.append((offset, kind, addend))
        )

    def _constant(self, value: int, size: int) -> int:
        value &= (1 << (8 * size or 32)) - 1
        return self._preloaded(
            ("constant", size, value), size, lambda offset: self.flat.constants.append((offset, size, value))
        )

    def _preloaded(self, key: tuple[object, ...], size: int, enter: Callable[[int], None]) -> int:
        """Return the register of a value that exists before a block begins; on first use, `enter` it into its list."""
        if key not in self.preloaded:
            self.preloaded[key] = self._allocate(size)
            enter(self.preloaded[key])
        return self.preloaded[key]


def _ordering(statement: Statement) -> int:
    """Return the flags of a strong operation or a fence: its order and its scope.

    A fence without an order acquires and releases; an atomic operation without a scope has the GPU's."""
    name = statement.opcode.split(".")
    is_fence = name[0] in ("fence", "membar")
    both = bool({"acq_rel", "sc"}.intersection(name)) or (
        is_fence and not {"acquire", "release"}.intersection(name)
    )
    narrow = bool({"cta", "cluster"}.intersection(name))
    return ACQUIRES * (both or "acquire" in name) | RELEASES * (both or "release" in name) | NARROW * narrow


_BY_SIZE = ("ld.global", "ld.shared", "ld.local", "ld.param", "st.global", "st.shared", "st.local")


def _sized(handler: str, uses: Sequence[Use], sizes: Sequence[int]) -> str:
    """Return the variant of a load or store for a type and the registers of its values."""
    values = [(use, size) for use, size in zip(uses, sizes, strict=False) if use.type not in ("param",)]
    values = (
        values[1:] if handler.startswith("st") else values[:-1] if not handler.endswith("param") else values
    )
    type_ = values[0][0].type
    registers = {size for _, size in values}
    if len(registers) > 1:
        raise PtxError("registers of different sizes in one vector")
    (size,) = registers
    bits = int(type_[1:])
    signed = type_[0] == "s" and handler.startswith("ld") and bits < 8 * size
    return f"{handler}.{'s' if signed else 'u'}{bits}.{size}"


_INTEGER = re.compile(r"([+-]?)(?:0[xX]([0-9a-fA-F]+)|0[bB]([01]+)|(\d+))U?")
_BITS = re.compile(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})")


def number(text: str, type_: str) -> int:
    """Return the bits of a number in PTX notation."""
    if match := _BITS.fullmatch(text):
        return int(match[1] or match[2], 16)
    if type_ in ("f32", "f64") and re.fullmatch(r"[+-]?\d+\.\d*([eE][+-]?\d+)?", text):
        packed = struct.pack("<f" if type_ == "f32" else "<d", float(text))
        return int.from_bytes(packed, "little")
    match = _INTEGER.fullmatch(text)
    if match is None or type_ in ("f32", "f64"):
        raise PtxError(f"`{text}` is not a register, symbol or number for {type_}")
    sign, hexadecimal, binary, decimal = match.groups()
    if hexadecimal:
        value = int(hexadecimal, 16)
    elif binary:
        value = int(binary, 2)
    else:
        value = int(decimal, 8 if decimal.startswith("0") else 10)  # as in C, 017 is octal
    if type_ == "pred":
        return ALL_LANES if value else 0
    return -value if sign == "-" else value


# ---- reconvergence ---------------------------------------------------------------------------------------


def reconvergence(ways: Sequence[Iterable[int]]) -> list[int]:
    """Return the immediate post-dominator of each branch, and NOWHERE for other instructions; NOWHERE is also the end.

    Instructions between branches are grouped into blocks: a kernel has thousands of instructions and a few dozen
    branches. Paths that never end do not count.
    """
    end = len(ways)
    following = [list(after) for after in ways]
    begins = {0} | {to for number, after in enumerate(following) for to in after if after != [number + 1]}
    begins |= {number + 1 for number, after in enumerate(following) if after != [number + 1]}
    starts = sorted(b for b in begins if b < end)
    block_of = {start: k for k, start in enumerate(starts)}
    lasts = [after - 1 for after in [*starts[1:], end]]
    exit_ = len(starts)
    successors = [[block_of.get(to, exit_) for to in following[last]] for last in lasts]
    post = _immediate_post_dominators(successors, exit_)
    result = [NOWHERE] * end
    for block, last in enumerate(lasts):
        if post[block] != exit_:
            result[last] = starts[post[block]]
    return result


def _immediate_post_dominators(successors: Sequence[Sequence[int]], exit_: int) -> list[int]:
    """Return the immediate post-dominators, by Cooper, Harvey and Kennedy's iteration on the reversed graph."""
    predecessors: list[list[int]] = [[] for _ in range(exit_ + 1)]
    for block, after in enumerate(successors):
        for to in after:
            predecessors[to].append(block)
    order: list[int] = []
    seen = {exit_}
    stack = [(exit_, iter(predecessors[exit_]))]
    while stack:
        block, rest = stack[-1]
        for before in rest:
            if before not in seen:
                seen.add(before)
                stack.append((before, iter(predecessors[before])))
                break
        else:
            order.append(block)
            stack.pop()
    height = {block: k for k, block in enumerate(order)}
    post: list[int | None] = [None] * (exit_ + 1)
    post[exit_] = exit_
    changed = True
    while changed:
        changed = False
        for block in reversed(order[:-1]):
            new: int | None = None
            for to in successors[block]:
                if to not in height or post[to] is None:
                    continue
                new = to if new is None else _meet(new, to, post, height)
            if new != post[block]:
                post[block], changed = new, True
    return [exit_ if dominator is None else dominator for dominator in post[:exit_]]


def _meet(a: int, b: int, post: Sequence[int | None], height: dict[int, int]) -> int:
    while a != b:
        while height[a] < height[b]:
            above = post[a]
            assert above is not None
            a = above
        while height[b] < height[a]:
            above = post[b]
            assert above is not None
            b = above
    return a
