"""Parser of TTIR modules.

The reader knows MLIR's syntax, not Triton's semantics.

    module = parse(text)
    for op in module.entry.body.walk(): print(op.name, [str(r.type) for r in op.results], op.location)
"""

from __future__ import annotations

import re
from typing import Any

from .scanner import BLOCK, NUMBER, STRING, SYMBOL, VALUE, ParseError, Scanner, unescape
from .ttir import (
    I1,
    Bits,
    Block,
    Dense,
    Function,
    Module,
    Op,
    Opaque,
    Pointer,
    Region,
    Scalar,
    Tensor,
    Type,
    Value,
    element_of,
)


def parse(text: str) -> Module:
    """Parse the text of a TTIR module, printed with or without debug locations."""
    return _Reader(text).module()


class _Reader(Scanner):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.scopes: list[dict[str, list[Value]]] = []
        self.labels: dict[str, Block] = {}

    # -- values --

    def define(self, name: str, values: list[Value]) -> None:
        self.scopes[-1][name] = values

    def use(self, match: re.Match[str]) -> Value:
        for scope in reversed(self.scopes):
            if match[1] in scope:
                return scope[match[1]][int(match[2] or 0)]
        raise self.fail(f"a value defined before, not %{match[1]}")

    def value(self) -> Value:
        match = self.match(VALUE)
        if not match:
            raise self.fail("a value")
        return self.use(match)

    def values(self) -> list[Value]:
        """Parse `(%a, %b)`."""
        result: list[Value] = []
        self.need("(")
        while not self.take(")"):
            result.append(self.value())
            self.take(",")
        return result

    def typed_args(self, closing: str) -> tuple[list[Value], list[dict[str, Any]]]:
        """Parse and define `%a: i32 {attrs} loc(..), %b: ...` up to the closing bracket."""
        args: list[Value] = []
        attrs: list[dict[str, Any]] = []
        while not self.take(closing):
            match = self.match(VALUE)
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
        self.move(start.end())
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
        symbol = self.match(SYMBOL)
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
        """Parse the blocks after `{`, up to and including `}`. Labels may be used before their block is read."""
        region = Region()
        self.scopes.append({v.name: [v] for v in entry_args or []})
        labels: dict[str, Block] = {}
        outer, self.labels = self.labels, labels
        self.in_operation = False
        block = Block(list(entry_args or []), region=region)
        region.blocks.append(block)
        while not self.take("}"):
            if match := self.match(BLOCK):
                new_block = labels.setdefault(match[1], Block(name=match[1]))
                if self.take("("):
                    new_block.args, _ = self.typed_args(")")
                self.need(":")
                if block.ops or block.args:
                    region.blocks.append(new_block)
                else:
                    region.blocks[-1] = new_block
                block = new_block
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
        while match := self.match(VALUE):
            count = 1
            if self.take(":"):
                number = self.match(NUMBER)
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
        consumed = 0
        for name, count in names:
            values = op.results[consumed : consumed + count]
            consumed += count
            if len(values) != count:
                raise self.fail(f"{count} results of {op.name}")
            for i, value in enumerate(values):
                value.name = name if count == 1 else f"{name}_{i}"
                value.producer = op
            self.define(name, values)
        self.in_operation = False
        return op

    def generic_operation(self) -> Op:
        """Parse `"tt.reduce"(%x) <{axis = 0 : i32}> ({ region }) : (types) -> types`."""
        match = self.match(STRING)
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
        """Parse `: (types) -> types` and create the results."""
        self.need(":")
        self.types()
        self.need("->")
        op.results = [Value("", t) for t in self.types()]
        return op

    def custom_operation(self, name: str) -> Op:
        return _SPECIAL.get(name, _Reader.plain_operation)(self, name)

    def plain_operation(self, name: str) -> Op:
        """Parse operands, words, `key = value` pairs and attribute dictionaries in any order, then `: types`."""
        op = Op(name, [])
        flags: list[str] = []
        while not self.at_line_end() and not self.peek("loc("):
            first = self.text[self.pos]
            if first == "%":
                op.operands.append(self.value())
            elif first == ":":
                self.take(":")
                self.signature(op)
            elif first in ",()[]":
                self.take(first)
            elif first == "{":
                self.take("{")
                op.attrs.update(self.attributes("}"))
            elif first == "<" and self.take("<{"):
                op.attrs.update(self.attributes("}>"))
            elif first == "-" and self.take("->"):
                op.results = [Value("", t) for t in self.types()]
            elif first == '"' and (match := self.match(STRING)):
                op.attrs["text"] = unescape(match[1])
            elif first in "-0123456789" and self.match(NUMBER):
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
        """Parse the types after `:` and infer the result types."""
        if op.name == "tt.print":  # `: %values : types`
            while match := self.match(VALUE):
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
            return Op(name, [], [Value("", I1)], {"value": value})
        if isinstance(value, Dense):
            self.need(":")
            return Op(name, [], [Value("", self.type())], {"value": value.values})
        if not isinstance(value, int | float | Bits):
            raise self.fail("a number")
        # attribute() has already consumed `: type` of a plain number: parse it again from the text
        end = self.end
        self.move(self.text.rfind(":", 0, end) + 1)
        type_ = self.type()
        assert self.end == end
        return Op(name, [], [Value("", type_)], {"value": value})

    def loop_values(self) -> tuple[list[Value], list[Value]]:
        """Parse `(%arg = %init, ...)`; return the arguments (not yet typed) and their initial values."""
        args: list[Value] = []
        inits: list[Value] = []
        self.need("(")
        while not self.take(")"):
            match = self.match(VALUE)
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
        match = self.match(VALUE)
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
            match = self.match(BLOCK)
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
        symbol = self.match(SYMBOL)
        if not symbol:
            raise self.fail("a function name")
        op = Op(name, self.values(), attrs={"callee": symbol[1] or symbol[2]})
        if self.take("{"):
            op.attrs.update(self.attributes("}"))
        return self.functional_type(op)

    def dot_scaled(self, name: str) -> Op:
        """Parse `%a [scale %sa], %b [scale %sb], %c lhs = e4m3 rhs = e2m1 {..} : types -> type`.

        Operands come out as a, b, c, then the scales that are present; attributes `lhs_scale` and `rhs_scale`
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

    def make_tensor_descriptor(self, name: str) -> Op:
        """Parse `%base, [%shape, ..], [%strides, ..] {..} : <f32>, <tensor<16x16xf32>>`; the types lack their names."""
        op = Op(name, [])
        while not self.take(":"):
            if self.peek("%"):
                op.operands.append(self.value())
            elif self.take("{"):
                op.attrs.update(self.attributes("}"))
            elif not any(self.take(mark) for mark in ",[]"):
                op.attrs[self.word()] = self.attribute() if self.take("=") else True
        texts = []
        for _ in range(2):
            if self.take("!"):
                self.word()
            self.need("<")
            texts.append(self.balanced("<"))
            self.take(",")
        op.results = [Value("", Opaque(f"!tt.tensordesc<{texts[1]}>"))]
        return op


_SPECIAL = {
    "arith.constant": _Reader.constant,
    "scf.for": _Reader.scf_for,
    "scf.if": _Reader.scf_if,
    "scf.while": _Reader.scf_while,
    "cf.br": _Reader.branch,
    "cf.cond_br": _Reader.branch,
    "tt.call": _Reader.call,
    "tt.dot_scaled": _Reader.dot_scaled,
    "tt.make_tensor_descriptor": _Reader.make_tensor_descriptor,
}


def _terminated(region: Region) -> Region:
    """Add the `scf.yield` that MLIR omits where nothing is yielded."""
    block = region.block
    if not block.ops or block.ops[-1].name != "scf.yield":
        block.ops.append(Op("scf.yield", [], block=block))
    return region


_WITHOUT_RESULT = {
    "tt.store",
    "tt.descriptor_store",
    "tt.descriptor_scatter",
    "tt.descriptor_reduce",
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
    if name in ("arith.cmpf", "arith.cmpi"):
        return Tensor(first.shape, I1) if isinstance(first, Tensor) else I1
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
