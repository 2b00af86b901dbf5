"""Inline assembly: the text of `tl.inline_asm_elementwise` as a C++ function.

    text         "{ .reg .b16 h; cvt.rn.f16.f32 h, $1; mov.b32 $0, {h, h}; }"
    program      a list of steps: scopes, declared registers, instructions with their operands
    function     a loop over the elements of the tiles, `pack` at a time, one statement an instruction

Operands are numbered as in Triton's own lowering to LLVM: outputs first, then inputs. One execution takes `pack`
neighboring elements of each tile; elements narrower than 32 bits share registers, the first in the low bits. A register
that was never written holds all ones, and so do the bits above a narrow result.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ..ir.ttir import Op, Scalar, Type, Value, element_of
from .cpp import memory_type
from .operations import Unsupported
from .ptx import C_TYPES, find, width

TABLE = "src/triton_loom/codegen/ptx.py"
_CONSTRAINTS = {"c": 16, "h": 16, "r": 32, "f": 32, "l": 64, "d": 64}

# Types for which a conversion reads the low bits of a wider register, and extends its result to the whole register.
_SINGLE = {f"{kind}{bits}" for kind in "us" for bits in (8, 16, 32, 64)} | {"f16", "f32", "f64"}

# Why an instruction is not in the table and never will be, by the beginning of its name.
_MEMORY = "it touches memory; use tl.load, tl.store or tl.atomic_*"
_THREADS = "it deals with the threads of a GPU, and a program on a CPU has none"
_BRANCH = "it branches; use a condition before the instruction (`@p`), selp or tl.where"
_REFUSED = {
    "ld ldu st atom red cp prefetch prefetchu multimem tensormap cvta isspacep": _MEMORY,
    "bar barrier membar fence mbarrier shfl vote match redux elect activemask": _THREADS,
    "mma wmma wgmma tcgen05 ldmatrix stmatrix movmatrix setmaxnreg": _THREADS,
    "bra brx call ret exit trap": _BRANCH,
}


class Refused(Exception):
    """Assembly that Loom does not execute, and why."""


def _why_not(name: str) -> str:
    """Return the reason why the instruction of this name is not executed."""
    for names, why in _REFUSED.items():
        if name.split(".")[0] in names.split():
            return f"`{name}`: {why}"
    return f"`{name}` is not in the table of {TABLE}, where it can be added"


# ---- the text ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """`form`: one register or number, a "vector" `{a, b}`, or a "pair" `p|q`."""

    form: str
    items: tuple[str, ...]


@dataclass(frozen=True)
class Instruction:
    """A statement of the text: the instruction's name, with its modifiers, and its operands."""

    name: str
    operands: tuple[Operand, ...]
    guard: str = ""  # a predicate that has to hold, or with "!" not to hold


@dataclass(frozen=True)
class Declaration:
    """Registers that the text declares with `.reg`."""

    type: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Brace:
    """The beginning or the end of a scope."""

    text: str


Step = Instruction | Declaration | Brace

_TOKEN = re.compile(
    r"""\$\d+ | \$\{\d+\} | 0[fF][0-9a-fA-F]{8}\b | 0[dD][0-9a-fA-F]{16}\b | 0[xX][0-9a-fA-F]+U?
    | \d+\.\d*(?:[eE][-+]?\d+)? | \d+[eE][-+]?\d+ | \d+U?
    | [.%]?[A-Za-z_][\w$]*(?:(?:\.|::)[\w$]+)* | [-+{}(),;:@!|<>\[\]]""",
    re.VERBOSE,
)


def parse(text: str) -> list[Step]:
    """Return the steps of an assembly text."""
    return _Parser(text).steps()


class _Parser:
    def __init__(self, text: str) -> None:
        text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
        self.tokens = [re.sub(r"[{}]", "", t) if t.startswith("$") else t for t in _TOKEN.findall(text)]
        rest = _TOKEN.sub("", text).split()
        if rest:
            raise Refused(f"`{rest[0]}` is not PTX that Loom supports")
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def next(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def expect(self, token: str) -> None:
        if (actual := self.next()) != token:
            raise Refused(f"`{token}` expected, not `{actual or 'the end of the text'}`")

    def steps(self) -> list[Step]:
        steps: list[Step] = []
        while token := self.peek():
            if token in "{}":
                steps.append(Brace(self.next()))
            elif token == ";":
                self.next()
            elif token.startswith("."):
                steps.append(self.declaration())
            else:
                steps.append(self.instruction())
        depth = 0
        for step in steps:
            depth += {"{": 1, "}": -1}[step.text] if isinstance(step, Brace) else 0
            if depth < 0:
                break
        if depth:
            raise Refused("its braces are unbalanced")
        return steps

    def declaration(self) -> Declaration:
        words = self.next().split(".")[1:]
        while self.peek().startswith("."):
            words += self.next().split(".")[1:]
        if len(words) != 2 or words[0] != "reg" or words[1] not in C_TYPES:
            raise Refused(f"`.{' .'.join(words)}`: the only supported directive is `.reg` with one type")
        names: list[str] = []
        while True:
            name = self.next()
            if self.peek() == "<":
                self.next()
                names += [f"{name}{i}" for i in range(int(self.next()))]
                self.expect(">")
            else:
                names.append(name)
            if self.next() != ",":
                break
        self.at -= 1
        self.expect(";")
        return Declaration(words[1], tuple(names))

    def instruction(self) -> Instruction:
        guard = ""
        if self.peek() == "@":
            self.next()
            guard = self.next()
            guard += self.next() if guard == "!" else ""
        name = self.next()
        if self.peek() == ":":
            raise Refused(f"the label `{name}`: {_BRANCH}")
        operands = []
        while self.peek() not in (";", "", "}"):
            operands.append(self.operand(name))
            if self.peek() != ",":
                break
            self.next()
        if self.peek() != "}":
            self.expect(";") if self.peek() else None
        return Instruction(name, tuple(operands), guard)

    def operand(self, name: str) -> Operand:
        if self.peek() == "[":
            raise Refused(_why_not(name))
        if self.peek() != "{":
            items = [self.item()]
            while self.peek() == "|":
                self.next()
                items.append(self.item())
            return Operand("pair" if len(items) > 1 else "one", tuple(items))
        self.next()
        items = [self.item()]
        while self.peek() == ",":
            self.next()
            items.append(self.item())
        self.expect("}")
        return Operand("vector", tuple(items))

    def item(self) -> str:
        token = self.next()
        return token + self.next() if token in ("-", "!") else token


# ---- the C++ function -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Register:
    """A register of the text, as a variable of the C++ function."""

    name: str  # in C++
    bits: int

    @property
    def c_type(self) -> str:
        return "bool" if self.bits == 1 else f"u{self.bits}"


@dataclass(frozen=True)
class Packed:
    """A register that holds `count` elements of a tile, starting at element `first` of each pack."""

    register: Register
    tile: int
    first: int
    count: int
    size: int  # bytes of an element


def function(op: Op, name: str) -> list[str]:
    """Return a C++ function `name(inputs..., outputs..., count)` for an operation, on pointers to its elements."""
    try:
        return _Function(op).lines(name)
    except Refused as why:
        raise Unsupported(op, f"{why}. In the assembly `{' '.join(op.attrs['text'].split())}`") from None


@dataclass
class _Function:
    op: Op
    registers: list[dict[str, Register]] = field(default_factory=lambda: [{}])
    code: list[str] = field(default_factory=list)
    declared: int = 0

    def lines(self, name: str) -> list[str]:
        pack = self.op.attrs.get("packed_element", 1)
        outputs, inputs = self.places(pack)
        for step in parse(self.op.attrs["text"]):
            self.step(step)
        parameters = [
            *(f"const {memory_type(element_of(v.type))} *in{i}" for i, v in enumerate(self.op.operands)),
            *(f"{memory_type(element_of(v.type))} *out{i}" for i, v in enumerate(self.op.results)),
        ]
        loads, declared = [], set()
        for packed in inputs:
            r = packed.register
            declared.add(r.name)
            value = (
                f"ptx::take<{r.c_type}, {packed.count * packed.size}>(in{packed.tile} + i + {packed.first})"
            )
            loads.append(f"{r.c_type} {r.name} = {value};")
        for packed in outputs:
            r = packed.register
            if r.name not in declared:
                loads.append(f"{r.c_type} {r.name} = ({r.c_type})-1;")
        stores = [
            f"ptx::give<{p.count * p.size}>(out{p.tile} + i + {p.first}, {p.register.name});" for p in outputs
        ]
        return [
            f"static void {name}({', '.join([*parameters, 'i32 count'])}) {{",
            f"for (i32 i = 0; i < count; i += {pack}) {{",
            *loads,
            *self.code,
            *stores,
            "}",
            "}",
            "",
        ]

    # -- registers --

    def places(self, pack: int) -> tuple[list[Packed], list[Packed]]:
        """Return the registers of the outputs and of the inputs, from the constraints."""
        parts = [c.strip().lstrip("&") for c in self.op.attrs["constraints"].split(",") if c.strip()]
        parts = [c for c in parts if not c.startswith("~")]
        sides = [c[1:].lstrip("&") for c in parts if c.startswith("=")], [c for c in parts if c[0] != "="]
        if any(c in ("v", "s", "a", "VGPR", "SGPR") for side in sides for c in side):
            raise Refused("this is assembly for AMD GPUs; Loom executes PTX")
        outputs = self.assign("outputs", sides[0], self.op.results, pack, 0)
        inputs = self.assign("inputs", sides[1], self.op.operands, pack, len(sides[0]))
        return outputs, inputs

    def assign(self, side: str, kinds: list[str], values: list[Value], pack: int, start: int) -> list[Packed]:
        expected = [
            (tile, first, count, element)
            for tile, value in enumerate(values)
            for element in [_element(value.type)]
            for count in [min(max(32 // element.bits, 1), pack)]
            for first in range(0, pack, count)
        ]
        if len(expected) != len(kinds):
            raise Refused(
                f"its constraints name {len(kinds)} {side}, but {len(expected)} registers hold them"
            )
        places = []
        for number, (kind, (tile, first, count, element)) in enumerate(
            zip(kinds, expected, strict=True), start
        ):
            if kind.isdigit():  # the register of an output
                register = self.registers[0][f"${kind}"]
            elif kind in _CONSTRAINTS:
                register = Register(f"s{number}", _CONSTRAINTS[kind])
            else:
                raise Refused(f"the constraint `{kind}` is not known")
            if count * element.bits > register.bits:
                raise Refused(f"{count} x {element} does not fit the {register.bits} bits of `{kind}`")
            self.registers[0][f"${number}"] = register
            places.append(Packed(register, tile, first, count, element.bits // 8))
        return places

    def register(self, name: str) -> Register:
        for scope in reversed(self.registers):
            if name in scope:
                return scope[name]
        if name.startswith("%"):
            raise Refused(f"`{name}` is a register of the GPU, which a program on a CPU does not have")
        raise Refused(f"`{name}` is not a register that the text declares")

    # -- steps --

    def step(self, step: Step) -> None:
        if isinstance(step, Brace):
            self.code.append(step.text)
            if step.text == "{":
                self.registers.append({})
            else:
                self.registers.pop()
        elif isinstance(step, Declaration):
            for name in step.names:
                self.declared += 1
                readable = re.sub(r"\W", "_", name)
                register = Register(f"r{self.declared}_{readable}", width(step.type))
                self.registers[-1][name] = register
                self.code.append(f"{register.c_type} {register.name} = ({register.c_type})-1;")
        else:
            self.instruction(step)

    def instruction(self, step: Instruction) -> None:
        statements = self.packing(step) if self.packs(step) else self.execution(step)
        if step.guard:
            guard = self.register(step.guard.removeprefix("!"))
            if guard.bits != 1:
                raise Refused(f"`@{step.guard}`: {step.guard.removeprefix('!')} is no predicate")
            sign = "!" if step.guard.startswith("!") else ""
            statements = [f"if ({sign}{guard.name}) {{", *statements, "}"]
        self.code += statements

    def packs(self, step: Instruction) -> bool:
        return step.name.startswith("mov.b") and any(o.form == "vector" for o in step.operands)

    def packing(self, step: Instruction) -> list[str]:
        """Return C++ for a mov between a register and a vector of smaller ones, the low bits first."""
        bits = int(step.name.removeprefix("mov.b"))
        if len(step.operands) != 2 or all(o.form == "vector" for o in step.operands):
            raise Refused(f"`{step.name}` takes a register and a vector")
        to, source = step.operands
        vector, wide = (to, source) if to.form == "vector" else (source, to)
        part = bits // len(vector.items)
        if part not in (8, 16, 32) or part * len(vector.items) != bits:
            raise Refused(f"`{step.name}`: {len(vector.items)} registers do not make {bits} bits")
        for item, required in [(wide.items[0], bits), *((item, part) for item in vector.items)]:
            if item != "_" and not _is_number(item):
                self.check_width(step, item, f"b{required}")
        if vector is source:
            terms = [
                f"({C_TYPES[f'b{bits}']}){self.value(item, f'b{part}')} << {k * part}"
                for k, item in enumerate(vector.items)
            ]
            return [f"{self.register(wide.items[0]).name} = {' | '.join(terms)};"]
        value = self.value(wide.items[0], f"b{bits}")
        lines = [f"const {C_TYPES[f'b{bits}']} whole = {value};"]
        lines += [
            f"{self.register(item).name} = (u{part})(whole >> {k * part});"
            for k, item in enumerate(vector.items)
            if item != "_"
        ]
        return ["{", *lines, "}"]

    def execution(self, step: Instruction) -> list[str]:
        row = find(step.name)
        if row is None:
            raise Refused(_why_not(step.name))
        operands = list(step.operands)
        results = list(operands.pop(0).items) if row.writes and operands else []
        passed = [item for operand in operands for item in operand.items]
        if len(passed) != len(row.reads) or not bool(row.writes) <= len(results) <= len(row.writes):
            raise Refused(
                f"`{step.name}` has {len(row.writes)} results at most and reads {len(row.reads)} operands"
            )
        sources, lines = [], []
        for k, (item, type_) in enumerate(zip(passed, row.reads, strict=True)):
            if type_ == "#":
                sources.append(f"0x{_integer(item):X}u")
                continue
            if not _is_number(item):
                self.check_width(step, item.removeprefix("!"), type_)
            lines.append(f"const {C_TYPES[type_]} x{k} = {self.value(item, type_)};")
            sources.append(f"x{k}")
        for result, type_, meaning in zip(results, row.writes, row.meaning, strict=False):
            if result == "_":
                continue
            self.check_width(step, result, type_)
            register = self.register(result)
            text = re.sub(r"%(\d)", lambda m: sources[int(m[1])], meaning)
            lines.append(f"{register.name} = ptx::raw<{register.c_type}>(({C_TYPES[type_]})({text}));")
        return ["{", *lines, "}"] if lines else []

    def check_width(self, step: Instruction, item: str, type_: str) -> None:
        """Raise `Refused` unless the register is as wide as its value; in conversions it may be wider than a scalar."""
        bits, required = self.register(item).bits, width(type_)
        wider = step.name.startswith("cvt.") and type_ in _SINGLE and bits > required
        if bits != required and not wider:
            raise Refused(f"`{step.name}`: `{item}` has {bits} bits, but {required} are read or written")

    def value(self, item: str, type_: str) -> str:
        """Return C++ for a register or a number as an operand of this type."""
        if _is_number(item):
            return _literal(item, type_)
        negated = "!" if item.startswith("!") else ""
        return f"{negated}ptx::as<{C_TYPES[type_]}>({self.register(item.removeprefix('!')).name})"


def _element(type_: Type) -> Scalar:
    element = element_of(type_)
    if not isinstance(element, Scalar):
        raise Refused("pointers cannot be passed to assembly; use tl.load and tl.store")
    if element.bits < 8:
        raise Refused(f"{element} cannot be passed to assembly; use tl.int8 or wider")
    return element


def _is_number(item: str) -> bool:
    return item.lstrip("-")[:1].isdigit()


def _integer(item: str) -> int:
    try:
        return int(item.removesuffix("U"), 0)
    except ValueError:
        raise Refused(f"`{item}` is not an integer") from None


def _literal(item: str, type_: str) -> str:
    """Return C++ for a number of the text: a decimal or its bits (`0f`, `0d`) for f32 and f64, else an integer."""
    c_type, bits = C_TYPES[type_], width(type_)
    if type_ in ("f32", "f64"):
        if item[:2].lower() == ("0f" if bits == 32 else "0d"):
            return f"bits<{c_type}>((u{bits})0x{item[2:]}ull)"
        if re.fullmatch(r"-?\d+(\.\d*([eE][-+]?\d+)?|[eE][-+]?\d+)", item):
            return f"({c_type}){float(item)!r}"
    elif "f" not in type_ and not re.match(r"-?0[fFdD][0-9a-fA-F]{8}|.*[.]", item):
        number = _integer(item)
        return f"{number != 0}".lower() if type_ == "pred" else f"({c_type})0x{number % (1 << bits):X}ull"
    raise Refused(f"`{item}` is no number of `{type_}`")
