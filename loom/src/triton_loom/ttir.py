"""Reads the text of a TTIR module into a small typed IR.

The reader knows MLIR's syntax, not Triton's semantics: an operation is a name, operands, results, attributes
and regions. What each operation means is the business of the modules that come after (`rewrite`, `schedule`,
`emit`), which only ever see the classes of this file.

    module = parse(text)
    for op in module.entry.body.walk(): print(op.name, [str(r.type) for r in op.results], op.location)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

# ---- types -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scalar:
    """`i1`, `i32`, `f32`, `bf16`, `f8E4M3FN`, ..."""

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


@dataclass(frozen=True)
class Pointer:
    pointee: Type

    bits = 64
    is_float = False

    def __str__(self) -> str:
        return f"!tt.ptr<{self.pointee}>"


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...]
    element: Scalar | Pointer

    @property
    def size(self) -> int:
        return prod(self.shape)

    def __str__(self) -> str:
        return f"tensor<{''.join(f'{d}x' for d in self.shape)}{self.element}>"


@dataclass(frozen=True)
class Opaque:
    """A type this IR gives no structure to, kept as text so that an error can name it."""

    text: str

    def __str__(self) -> str:
        return self.text


Type = Scalar | Pointer | Tensor | Opaque


def element_of(type_: Type) -> Scalar | Pointer:
    """The scalar type that one lane of a value of this type has."""
    if isinstance(type_, Tensor):
        return type_.element
    if isinstance(type_, Opaque):
        raise TypeError(f"type {type_} has no elements")
    return type_


def shape_of(type_: Type) -> tuple[int, ...]:
    return type_.shape if isinstance(type_, Tensor) else ()


# ---- operations --------------------------------------------------------------------------------------


@dataclass(eq=False)
class Value:
    """One SSA value. `name` is MLIR's, which keeps the Python variable's name where there was one."""

    name: str
    type: Type
    producer: Op | None = None  # None for arguments of blocks and functions
    owner: Block | None = None  # the block whose argument this is

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"


@dataclass(eq=False)
class Op:
    name: str
    operands: list[Value]
    results: list[Value] = field(default_factory=list)
    attrs: dict[str, Any] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)
    successors: list[tuple[Block, list[Value]]] = field(default_factory=list)
    location: str = ""  # the line of the kernel that it comes from
    origin: str = ""  # its own line, which is another where a function was inlined
    block: Block | None = None

    @property
    def result(self) -> Value:
        return self.results[0]

    def walk(self) -> Iterator[Op]:
        """This operation and all inside its regions, in program order."""
        yield self
        for region in self.regions:
            yield from region.walk()

    def __repr__(self) -> str:
        return f"{self.name}({', '.join('%' + v.name for v in self.operands)})"


@dataclass(eq=False)
class Block:
    args: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    name: str = ""
    region: Region | None = None


@dataclass(eq=False)
class Region:
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
    name: str
    args: list[Value]
    results: list[Type]
    body: Region
    public: bool
    location: str = ""
    arg_attrs: list[dict[str, Any]] = field(default_factory=list)


@dataclass(eq=False)
class Module:
    functions: dict[str, Function]

    @property
    def entry(self) -> Function:
        return next(f for f in self.functions.values() if f.public)


class ParseError(ValueError):
    """The text is not TTIR as this reader knows it."""


# ---- the reader --------------------------------------------------------------------------------------

_SPACE = re.compile(r"(?:\s+|//[^\n]*)*")
_VALUE = re.compile(r"%([\w$.\-]+)(?:#(\d+))?")
_WORD = re.compile(r"[A-Za-z_][\w.$]*")
_NUMBER = re.compile(r"-?(?:0x[0-9A-Fa-f]+|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_SYMBOL = re.compile(r'@(?:"([^"]*)"|([\w.$\-]+))')
_BLOCK = re.compile(r"\^(\w+)")
_TENSOR = re.compile(r"tensor<((?:\d+x)*)")
_LOC_ALIAS = re.compile(r"^#(loc\d*) = loc\((.*)\)$", re.MULTILINE)
_LOC_FILE = re.compile(r'"([^"]+)":(\d+):(\d+)')
_OPEN_CLOSE = {"(": ")", "[": "]", "{": "}", "<": ">"}
_COMPARISONS = ("arith.cmpf", "arith.cmpi")


class _Locations:
    """`#loc12` to "file:line". Where functions were inlined there are two: the line in the kernel, which is that of
    the outermost call, and the line of the operation itself."""

    def __init__(self, text: str) -> None:
        self.aliases = dict(_LOC_ALIAS.findall(text))

    def resolve(self, loc: str, innermost: bool, depth: int = 0) -> str:
        loc = loc.strip()
        if depth > 64:
            return ""
        if loc.startswith("#"):
            return self.resolve(self.aliases.get(loc[1:], ""), innermost, depth + 1)
        if loc.startswith("callsite("):
            inside = loc[len("callsite(") : -1]
            split = next(
                (i for i in _places(inside, " at ") if inside.count("(", 0, i) == inside.count(")", 0, i)), 0
            )
            chosen = inside[:split] if innermost else inside[split + len(" at ") :]
            return self.resolve(chosen, innermost, depth + 1)
        if match := _LOC_FILE.match(loc):
            return f"{match[1]}:{match[2]}"
        if named := re.fullmatch(r'"[^"]*"\((.*)\)', loc):
            return self.resolve(named[1], innermost, depth + 1)
        return ""


def _places(text: str, part: str) -> Iterator[int]:
    return (match.start() for match in re.finditer(re.escape(part), text))


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = 0
        self.locations = _Locations(text)
        self.scopes: list[dict[str, list[Value]]] = []
        self.labels: dict[str, Block] = {}
        self.in_operation = False

    # -- characters --

    def fail(self, expected: str) -> ParseError:
        # an operation ends with its line: what it lacks is missing there, not on the next one
        start = self.pos if self.in_operation and self.at_line_end() else self.after_space()
        line = self.text.count("\n", 0, start) + 1
        rest = self.text[start : start + 60].split("\n")[0].strip()
        return ParseError(f"TTIR line {line}: expected {expected}, found {rest!r}")

    def after_space(self) -> int:
        match = _SPACE.match(self.text, self.pos)
        assert match
        return match.end()

    def peek(self, token: str) -> bool:
        return self.text.startswith(token, self.after_space())

    def take(self, token: str) -> bool:
        start = self.after_space()
        if self.text.startswith(token, start):
            self.pos = start + len(token)
            return True
        return False

    def need(self, token: str) -> None:
        if not self.take(token):
            raise self.fail(repr(token))

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self.text, self.after_space())
        if match:
            self.pos = match.end()
        return match

    def word(self) -> str:
        match = self.match(_WORD)
        if not match:
            raise self.fail("a word")
        return match[0]

    def at_line_end(self) -> bool:
        end = self.text.find("\n", self.pos)
        rest = self.text[self.pos : end if end >= 0 else len(self.text)]
        return not rest.strip() or rest.lstrip().startswith("//")

    def balanced(self, opening: str) -> str:
        """The text between the bracket just taken and its partner, which is taken too."""
        start, depth = self.pos, 1
        while depth:
            char = self.text[self.pos : self.pos + 1]
            if not char:
                self.pos = start
                raise self.fail(f"a closing {_OPEN_CLOSE[opening]!r}")
            if char == '"' and (match := _STRING.match(self.text, self.pos)):
                self.pos = match.end()
                continue
            if char == opening:
                depth += 1
            elif char == _OPEN_CLOSE[opening] and not self.text.startswith("->", self.pos - 1):
                depth -= 1
            self.pos += 1
        return self.text[start : self.pos - 1]

    # -- locations, types, attributes --

    def location(self) -> str:
        return self.both_locations()[0]

    def both_locations(self) -> tuple[str, str]:
        """The line in the kernel, and the line of the operation itself."""
        if not self.take("loc("):
            return "", ""
        text = self.balanced("(")
        return self.locations.resolve(text, innermost=False), self.locations.resolve(text, innermost=True)

    def type(self) -> Type:
        if match := self.match(_TENSOR):
            shape = tuple(int(d) for d in match[1].split("x")[:-1])
            element = self.type()
            while self.take(","):  # an encoding, of no meaning here
                self.attribute()
            self.need(">")
            if not isinstance(element, Scalar | Pointer):
                raise self.fail("a tensor of scalars or pointers")
            return Tensor(shape, element)
        if self.take("!tt.ptr<"):
            pointee = self.type()
            while self.take(","):
                self.match(_NUMBER)
            self.need(">")
            return Pointer(pointee)
        if self.take("!"):
            text = "!" + self.word()
            if self.take("<"):
                text += f"<{self.balanced('<')}>"
            return Opaque(text)
        return Scalar(self.word())

    def types(self) -> list[Type]:
        """`t`, `t, t` or `(t, t)`."""
        if self.take("("):
            found: list[Type] = []
            while not self.take(")"):
                found.append(self.type())
                self.take(",")
            return found
        found = [self.type()]
        while self.take(","):
            found.append(self.type())
        return found

    def attribute(self) -> Any:
        if match := self.match(_STRING):
            return _unescape(match[1])
        if self.take("dense<"):
            return _dense(self.balanced("<"))
        if self.take("["):
            return [part.strip() for part in self.balanced("[").split(",") if part.strip()]
        if self.take("array<"):
            _, _, numbers = self.balanced("<").partition(":")
            return [_number(part.strip()) for part in numbers.split(",") if part.strip()]
        if match := self.match(_NUMBER):
            value = _number(match[0])
            if self.take(":"):
                self.type()
            return value
        if self.take("#"):
            name = self.word()
            return {name: self.balanced("<")} if self.take("<") else name
        if match := self.match(_SYMBOL):
            return match[1] or match[2]
        if self.take("{"):
            return self.attributes("}")
        word = self.word()
        return {"true": True, "false": False}.get(word, word)

    def attributes(self, closing: str) -> dict[str, Any]:
        attrs: dict[str, Any] = {}
        while not self.take(closing):
            match = self.match(_STRING)
            name = match[1] if match else self.word()
            attrs[name] = self.attribute() if self.take("=") else True
            if self.take(":"):
                self.type()
            self.take(",")
        return attrs

    # -- values --

    def define(self, name: str, values: list[Value]) -> None:
        self.scopes[-1][name] = values

    def use(self, match: re.Match[str]) -> Value:
        for scope in reversed(self.scopes):
            if match[1] in scope:
                return scope[match[1]][int(match[2] or 0)]
        raise self.fail(f"a value defined before, not %{match[1]}")

    def value(self) -> Value:
        match = self.match(_VALUE)
        if not match:
            raise self.fail("a value")
        return self.use(match)

    def values(self) -> list[Value]:
        """`(%a, %b)`"""
        found: list[Value] = []
        self.need("(")
        while not self.take(")"):
            found.append(self.value())
            self.take(",")
        return found

    def typed_args(self, closing: str) -> tuple[list[Value], list[dict[str, Any]]]:
        """`%a: i32 {attrs} loc(..), %b: ...` up to the closing bracket; the values are defined."""
        args: list[Value] = []
        attrs: list[dict[str, Any]] = []
        while not self.take(closing):
            match = self.match(_VALUE)
            if not match:
                raise self.fail("an argument")
            self.need(":")
            value = Value(match[1], self.type())
            attrs.append(self.attributes("}") if self.take("{") else {})
            self.location()
            self.define(match[1], [value])
            args.append(value)
            self.take(",")
        return args, attrs

    # -- structure --

    def module(self) -> Module:
        start = re.search(r"^\s*(?:\"?builtin\.)?module\b", self.text, re.MULTILINE)
        if not start:
            raise ParseError("no module in this text")
        self.pos = start.end()
        if self.take("@"):
            self.word()
        if self.take("attributes"):
            self.need("{")
            self.attributes("}")
        self.need("{")
        functions: dict[str, Function] = {}
        while not self.take("}"):
            function = self.function()
            functions[function.name] = function
        return Module(functions)

    def function(self) -> Function:
        self.need("tt.func")
        public = self.take("public")
        if not public:
            self.take("private")
        symbol = self.match(_SYMBOL)
        if not symbol:
            raise self.fail("a function name")
        self.scopes.append({})
        self.need("(")
        args, arg_attrs = self.typed_args(")")
        results: list[Type] = []
        if self.take("->"):
            results = self.types()
        if self.take("attributes"):
            self.need("{")
            self.attributes("}")
        self.need("{")
        body = self.region()
        self.scopes.pop()
        return Function(symbol[1] or symbol[2], args, results, body, public, self.location(), arg_attrs)

    def region(self, entry_args: list[Value] | None = None) -> Region:
        """After `{`: blocks up to and with `}`. Labels may be used before their block is read."""
        region = Region()
        self.scopes.append({v.name: [v] for v in entry_args or []})
        labels: dict[str, Block] = {}
        outer, self.labels = self.labels, labels
        self.in_operation = False
        block = Block(list(entry_args or []), region=region)
        region.blocks.append(block)
        while not self.take("}"):
            if match := self.match(_BLOCK):
                labelled = labels.setdefault(match[1], Block(name=match[1]))
                if self.take("("):
                    labelled.args, _ = self.typed_args(")")
                self.need(":")
                if block.ops or block.args:
                    region.blocks.append(labelled)
                else:
                    region.blocks[-1] = labelled
                block = labelled
                block.region = region
                continue
            op = self.operation()
            op.block = block
            block.ops.append(op)
        for block in region.blocks:
            for arg in block.args:
                arg.owner = block
        self.labels = outer
        self.scopes.pop()
        return region

    def operation(self) -> Op:
        names: list[tuple[str, int]] = []
        while match := self.match(_VALUE):
            count = 1
            if self.take(":"):
                number = self.match(_NUMBER)
                if not number:
                    raise self.fail("a number of results")
                count = int(number[0])
            names.append((match[1], count))
            self.take(",")
        self.in_operation = True
        if names:
            self.need("=")
        op = self.generic_operation() if self.peek('"') else self.custom_operation(self.word())
        op.location, op.origin = self.both_locations()
        for region in op.regions:
            region.parent = op
        taken = 0
        for name, count in names:
            values = op.results[taken : taken + count]
            taken += count
            if len(values) != count:
                raise self.fail(f"{count} results of {op.name}")
            for i, value in enumerate(values):
                value.name = name if count == 1 else f"{name}_{i}"
                value.producer = op
            self.define(name, values)
        self.in_operation = False
        return op

    def generic_operation(self) -> Op:
        """`"tt.reduce"(%x) <{axis = 0 : i32}> ({ region }) : (types) -> types`"""
        match = self.match(_STRING)
        assert match
        op = Op(match[1], self.values())
        if self.take("<{"):
            op.attrs = self.attributes("}>")
        if self.take("("):
            while not self.take(")"):
                self.need("{")
                op.regions.append(self.region())
                self.take(",")
        if self.take("{"):
            op.attrs.update(self.attributes("}"))
        return self.functional_type(op)

    def functional_type(self, op: Op) -> Op:
        """`: (types) -> types`, the latter being those of the results."""
        self.need(":")
        self.types()
        self.need("->")
        op.results = [Value("", t) for t in self.types()]
        return op

    def custom_operation(self, name: str) -> Op:
        special = {
            "arith.constant": self.constant,
            "scf.for": self.scf_for,
            "scf.if": self.scf_if,
            "scf.while": self.scf_while,
            "cf.br": self.branch,
            "cf.cond_br": self.branch,
            "tt.call": self.call,
            "tt.dot_scaled": self.dot_scaled,
        }.get(name)
        return special(name) if special else self.plain_operation(name)

    def plain_operation(self, name: str) -> Op:
        """Operands, words, `key = value` pairs and attribute dictionaries in any order, then `: types`."""
        op = Op(name, [])
        flags: list[str] = []
        while not self.at_line_end() and not self.peek("loc("):
            if match := self.match(_VALUE):
                op.operands.append(self.use(match))
            elif match := self.match(_STRING):
                op.attrs["text"] = _unescape(match[1])
            elif self.take("<{"):
                op.attrs.update(self.attributes("}>"))
            elif self.take("{"):
                op.attrs.update(self.attributes("}"))
            elif self.take("->"):
                op.results = [Value("", t) for t in self.types()]
            elif self.take(":"):
                self.signature(op)
            elif (
                self.take(",")
                or self.take("(")
                or self.take(")")
                or self.take("[")
                or self.take("]")
                or self.match(_NUMBER)
            ):
                continue
            else:
                word = self.word()
                if self.take("="):
                    op.attrs[word] = self.attribute()
                else:
                    flags.append(word)
        if flags:
            op.attrs["flags"] = flags
        return op

    def signature(self, op: Op) -> None:
        """The types after `:`, from which the results' types follow."""
        if op.name == "tt.print":  # `: %values : types`
            while match := self.match(_VALUE):
                op.operands.append(self.use(match))
                self.take(",")
            self.take(":")
        types = self.types()
        while self.take("*") or self.take(","):
            types += self.types()
        if self.take("->") or self.take("to"):
            op.results = [Value("", t) for t in self.types()]
            if op.name == "tt.split":
                op.results.append(Value("", op.results[0].type))
        elif op.name not in _WITHOUT_RESULT:
            op.results = [Value("", _result_type(op.name, types))]

    def constant(self, name: str) -> Op:
        if self.take("{"):
            self.attributes("}")
        value = self.attribute()
        if value is True or value is False:
            return Op(name, [], [Value("", Scalar("i1"))], {"value": value})
        if isinstance(value, Dense):
            self.need(":")
            return Op(name, [], [Value("", self.type())], {"value": value.values})
        if not isinstance(value, int | float | Bits):
            raise self.fail("a number")
        # attribute() has taken `: type` of a plain number already: read it again from the text
        end, self.pos = self.pos, self.text.rfind(":", 0, self.pos) + 1
        type_ = self.type()
        assert self.pos == end
        return Op(name, [], [Value("", type_)], {"value": value})

    def loop_values(self) -> tuple[list[Value], list[Value]]:
        """`(%arg = %init, ...)`: the arguments (not yet typed) and what they start from."""
        args: list[Value] = []
        inits: list[Value] = []
        self.need("(")
        while not self.take(")"):
            match = self.match(_VALUE)
            if not match:
                raise self.fail("a loop value")
            self.need("=")
            init = self.value()
            args.append(Value(match[1], init.type))
            inits.append(init)
            self.take(",")
        return args, inits

    def scf_for(self, name: str) -> Op:
        unsigned = self.take("unsigned")
        match = self.match(_VALUE)
        if not match:
            raise self.fail("an induction variable")
        self.need("=")
        lower = self.value()
        self.need("to")
        upper = self.value()
        self.need("step")
        step = self.value()
        args: list[Value] = []
        inits: list[Value] = []
        if self.take("iter_args"):
            args, inits = self.loop_values()
            self.need("->")
            self.types()
        induction = Value(match[1], lower.type)
        if self.take(":"):
            induction.type = self.type()
        self.need("{")
        body = self.region([induction, *args])
        op = Op(name, [lower, upper, step, *inits], [Value("", a.type) for a in args], {"unsigned": unsigned})
        op.regions = [_terminated(body)]
        if self.take("{"):
            op.attrs.update(self.attributes("}"))
        return op

    def scf_if(self, name: str) -> Op:
        op = Op(name, [self.value()])
        if self.take("->"):
            op.results = [Value("", t) for t in self.types()]
        self.need("{")
        op.regions = [_terminated(self.region())]
        if self.take("else"):
            self.need("{")
            op.regions.append(_terminated(self.region()))
        return op

    def scf_while(self, name: str) -> Op:
        args: list[Value] = []
        inits: list[Value] = []
        if self.peek("("):
            args, inits = self.loop_values()
        self.need(":")
        self.types()
        self.need("->")
        op = Op(name, inits, [Value("", t) for t in self.types()])
        self.need("{")
        before = self.region(args)
        self.need("do")
        self.need("{")
        op.regions = [before, self.region()]
        if self.take("attributes"):
            self.need("{")
            op.attrs = self.attributes("}")
        return op

    def branch(self, name: str) -> Op:
        op = Op(name, [])
        if name == "cf.cond_br":
            op.operands.append(self.value())
            self.need(",")
        while True:
            match = self.match(_BLOCK)
            if not match:
                raise self.fail("a block")
            target = self.labels.setdefault(match[1], Block(name=match[1]))
            passed: list[Value] = []
            if self.take("("):
                while not self.take(":"):
                    passed.append(self.value())
                    self.take(",")
                self.types()
                self.need(")")
            op.successors.append((target, passed))
            if not self.take(","):
                break
        if self.take("{"):
            op.attrs = self.attributes("}")
        return op

    def call(self, name: str) -> Op:
        symbol = self.match(_SYMBOL)
        if not symbol:
            raise self.fail("a function name")
        op = Op(name, self.values(), attrs={"callee": symbol[1] or symbol[2]})
        if self.take("{"):
            op.attrs.update(self.attributes("}"))
        return self.functional_type(op)

    def dot_scaled(self, name: str) -> Op:
        """`%a [scale %sa], %b [scale %sb], %c lhs = e4m3 rhs = e2m1 {..} : types -> type`

        Operands come out as a, b, c, then the scales that are there; attributes `lhs_scale` and `rhs_scale`
        give their operand numbers or None.
        """
        op = Op(name, [])
        scales: list[Value | None] = []
        for _ in range(2):
            op.operands.append(self.value())
            scales.append(self.value() if self.take("scale") else None)
            self.need(",")
        op.operands.append(self.value())
        for key in ("lhs", "rhs"):
            self.need(key)
            self.need("=")
            op.attrs[key] = self.word()
        for key, scale in zip(("lhs_scale", "rhs_scale"), scales, strict=True):
            op.attrs[key] = None
            if scale is not None:
                op.attrs[key] = len(op.operands)
                op.operands.append(scale)
        if self.take("{"):
            op.attrs.update(self.attributes("}"))
        self.need(":")
        self.signature(op)
        return op


def _terminated(region: Region) -> Region:
    """With the `scf.yield` that is not printed where nothing is yielded."""
    block = region.block
    if not block.ops or block.ops[-1].name != "scf.yield":
        block.ops.append(Op("scf.yield", [], block=block))
    return region


_WITHOUT_RESULT = {
    "tt.store",
    "tt.return",
    "tt.assert",
    "tt.print",
    "tt.reduce.return",
    "tt.scan.return",
    "tt.map_elementwise.return",
    "scf.yield",
    "scf.condition",
    "llvm.intr.assume",
}


def _result_type(name: str, types: list[Type]) -> Type:
    first = types[0]
    if name in _COMPARISONS:
        return Tensor(first.shape, Scalar("i1")) if isinstance(first, Tensor) else Scalar("i1")
    if name == "tt.load":
        pointer = element_of(first)
        if isinstance(pointer, Pointer):
            pointee = pointer.pointee
            if isinstance(first, Tensor) and isinstance(pointee, Scalar | Pointer):
                return Tensor(first.shape, pointee)
            return pointee
    if name == "tt.unsplat":
        return element_of(first)
    if name == "arith.select":
        return types[-1]
    return first


# ---- literals ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bits:
    """A float given by its bit pattern (`0x7F800000`)."""

    pattern: int


Number = bool | int | float | Bits


@dataclass(frozen=True)
class Dense:
    """`dense<...>`: a constant tile, or numbers for each dimension of one."""

    values: Any  # one literal, or a flat list of them


def _number(text: str) -> int | float | Bits:
    if text.startswith(("0x", "-0x")):
        return Bits(int(text, 16))
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return float(text)


def _dense(text: str) -> Dense:
    text = text.strip()

    def literal(part: str) -> Any:
        return {"true": True, "false": False}.get(part) if part in ("true", "false") else _number(part)

    if text.startswith('"'):
        raw = bytes.fromhex(text.strip('"').removeprefix("0x"))
        return Dense(raw)
    if text.startswith("["):
        return Dense([literal(part) for part in re.findall(r"[\w.+\-]+", text)])
    return Dense(literal(text))


def _unescape(text: str) -> str:
    """MLIR escapes bytes as two hex digits (`\\0A`) beside the usual `\\n`, `\\"`."""

    def one(match: re.Match[str]) -> str:
        code = match[1]
        named = {"n": "\n", "t": "\t", '"': '"', "\\": "\\"}
        return named[code] if code in named else chr(int(code, 16))

    return re.sub(r'\\([nt"\\]|[0-9A-Fa-f]{2})', one, text)


def parse(text: str) -> Module:
    """The module that this TTIR text (printed with or without debug locations) stands for."""
    return _Reader(text).module()
