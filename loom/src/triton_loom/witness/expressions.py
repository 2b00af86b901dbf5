"""Match the kernel's source with its TTIR: which value belongs to which name of an expression.

An expression is walked together with the operation that it became. Compiler passes in between fold constants, merge
equal values and turn comparisons around, so a name counts only where something else confirms it: it is an argument
of the kernel, a constant of that value, the value's own name, which Triton keeps of assignments, or the value was
computed exactly as the expression assigned to the name.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from ..ir.ttir import Op, Value, shape_of

# ---- source ------------------------------------------------------------------------------------------------------

_ACCESSES = {"load": r"load", "store": r"store", "atomic": r"atomic_\w+"}


@dataclass(frozen=True)
class Access:
    """Call of `tl.load`, `tl.store` or an atomic."""

    address: ast.expr
    mask: ast.expr | None


@dataclass(frozen=True)
class Text:
    """Source of one function of the kernel."""

    function: ast.FunctionDef

    @functools.cached_property
    def assigned(self) -> Counter[str]:
        """Count the assignments to each name, including loop targets and tuple elements."""
        nodes = ast.walk(self.function)
        return Counter(n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))

    @functools.cached_property
    def parameters(self) -> set[str]:
        """Parameters that are never reassigned."""
        args = self.function.args
        return {arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)} - self.assigned.keys()

    @functools.cached_property
    def assignments(self) -> dict[str, ast.expr]:
        """Values of the names that are assigned exactly once."""
        pairs = (pair for node in ast.walk(self.function) for pair in _pairs(node))
        return {
            target.id: value
            for target, value in pairs
            if isinstance(target, ast.Name) and self.assigned[target.id] == 1
        }

    @functools.cached_property
    def definitions(self) -> dict[str, ast.expr]:
        """Assignments whose value consists of other names only."""
        return {
            name: value
            for name, value in self.assignments.items()
            if isinstance(value, ast.BinOp | ast.Compare | ast.BoolOp)
            and not any(isinstance(part, ast.Call) for part in ast.walk(value))
        }

    def at(self, line: int) -> Iterator[ast.expr]:
        """Yield the expressions that overlap this line."""
        for node in ast.walk(self.function):
            if isinstance(node, ast.expr) and node.lineno <= line <= (node.end_lineno or 0):
                yield node

    def function_called(self, node: ast.Call) -> str:
        """Return the name of a module's function; an empty string for methods (a descriptor's `load`)."""
        if isinstance(node.func, ast.Name):
            return node.func.id
        if not isinstance(node.func, ast.Attribute) or not isinstance(node.func.value, ast.Name):
            return ""
        owner = node.func.value.id
        return "" if owner in self.parameters or owner in self.assigned else node.func.attr

    def accesses(self, what: str, line: int) -> Iterator[Access]:
        """Yield the calls that may have accessed memory at this line."""
        for node in self.at(line):
            if not isinstance(node, ast.Call) or any(isinstance(arg, ast.Starred) for arg in node.args):
                continue
            name = self.function_called(node)
            if not re.fullmatch(_ACCESSES[what], name) or any(
                keyword.arg is None for keyword in node.keywords
            ):
                continue
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            positional = dict(enumerate(node.args))
            address = keywords.get("pointer", positional.get(0))
            mask = keywords.get("mask", positional.get(1 if what == "load" else 2))
            if address is not None:
                yield Access(address, None if name == "atomic_cas" else mask)


def _pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets and values of an assignment."""
    for target in node.targets if isinstance(node, ast.Assign) else ():
        value = node.value  # type: ignore[attr-defined]
        if (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Tuple)
            and len(target.elts) == len(value.elts)
        ):
            yield from zip(target.elts, value.elts, strict=True)
        else:
            yield target, value


@functools.lru_cache(maxsize=64)
def text_at(file: str, line: int) -> Text | None:
    """Return the innermost function that contains this line."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return None
    enclosing = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return Text(max(enclosing, key=lambda node: node.lineno)) if enclosing else None


# ---- values -----------------------------------------------------------------------------------------------------


class Location(NamedTuple):
    """Lane of a value."""

    value: Value
    lane: tuple[int, ...]

    def source(self) -> Location | None:
        """Return the lane of another value that this one was copied from; None if it was computed."""
        op = self.value.producer
        if op is None:
            return None
        if op.name == "tt.splat":
            return Location(op.operands[0], ())
        if op.name in ("arith.extsi", "arith.index_cast"):
            return Location(op.operands[0], self.lane)
        if op.name == "tt.broadcast":
            extents = shape_of(op.operands[0].type)
            return Location(
                op.operands[0], tuple(i if n > 1 else 0 for i, n in zip(self.lane, extents, strict=True))
            )
        if op.name == "tt.expand_dims":
            axis = op.attrs["axis"]
            return Location(op.operands[0], self.lane[:axis] + self.lane[axis + 1 :])
        if op.name == "tt.trans":
            order = list(op.attrs["order"])
            return Location(op.operands[0], tuple(self.lane[order.index(d)] for d in range(len(order))))
        if op.name == "tt.reshape" and "allow_reorder" not in op.attrs.get("flags", ()):
            outer, inner = shape_of(op.result.type), shape_of(op.operands[0].type)
            position = sum(i * prod(outer[d + 1 :]) for d, i in enumerate(self.lane))
            lane = tuple(position // prod(inner[d + 1 :]) % extent for d, extent in enumerate(inner))
            return Location(op.operands[0], lane)
        return None

    def sources(self) -> Iterator[Location]:
        """Yield this lane and those that it is a copy of."""
        location: Location | None = self
        while location is not None:
            yield location
            location = location.source()


@dataclass
class Match:
    """Names of an expression, matched with values."""

    certain: bool = True  # no contradiction
    names: dict[str, Location] = field(default_factory=dict)  # confirmed by more than their position
    positions: dict[str, Location] = field(default_factory=dict)  # trusted if all else is certain
    numbers: dict[str, int] = field(default_factory=dict)  # constants, which no operation may hold
    definitions: dict[str, str] = field(default_factory=dict)  # definitions of names in terms of others
    conflicts: set[str] = field(default_factory=set)  # names matched with several values

    def plus(self, other: Match) -> Match:
        """Return the union of two matches."""
        conflicts = self.conflicts | other.conflicts
        for own, others in ((self.names, other.names), (self.positions, other.positions)):
            conflicts |= {name for name in own.keys() & others.keys() if own[name] != others[name]}
        return Match(
            self.certain and other.certain,
            self.names | other.names,
            self.positions | other.positions,
            self.numbers | other.numbers,
            self.definitions | other.definitions,
            conflicts,
        )

    @property
    def rank(self) -> tuple[bool, int]:
        return self.certain, len(self.names) + len(self.positions)


_UNCERTAIN = Match(certain=False)
_BINARY: dict[type[ast.operator], tuple[str, ...]] = {
    ast.Add: ("tt.addptr", "arith.addi"),
    ast.Sub: ("arith.subi",),
    ast.Mult: ("arith.muli",),
    ast.FloorDiv: ("arith.divsi", "arith.divui"),
    ast.Mod: ("arith.remsi", "arith.remui"),
    ast.BitAnd: ("arith.andi",),
    ast.BitOr: ("arith.ori",),
    ast.BitXor: ("arith.xori",),
    ast.LShift: ("arith.shli",),
    ast.RShift: ("arith.shrsi", "arith.shrui"),
}
_COMMUTATIVE = (ast.Add, ast.Mult, ast.BitAnd, ast.BitOr, ast.BitXor)
_NEUTRAL: dict[type[ast.operator], int] = {ast.Add: 0, ast.Sub: 0, ast.Mult: 1, ast.FloorDiv: 1}
_PREDICATES: dict[type[ast.cmpop], str] = {
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Eq: "eq",
    ast.NotEq: "ne",
}
_FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
_CALLS = {"program_id": "tt.get_program_id", "num_programs": "tt.get_num_programs"}
_CALLS |= {"arange": "tt.make_range", "load": "tt.load"}


class Matcher:
    """Finder of the values of a source's names.

    `constants` are the kernel's, by name; in a device function it calls, only positions are known.
    """

    def __init__(self, text: Text, constants: Mapping[str, object] | None, expand: bool = True) -> None:
        self.text, self.expand = text, expand
        self.in_kernel = constants is not None
        self.constants = {n: int(v) for n, v in (constants or {}).items() if isinstance(v, int)}

    def match(self, node: ast.expr, location: Location) -> Match:
        """Match the names of an expression with the value whose lane it is thought to be."""
        constant = self.constant(node)
        if constant is not None:
            return self._match_constant(node, constant, location)
        if isinstance(node, ast.Name):
            return self._match_name(node, location)
        if isinstance(node, ast.BinOp):
            return self._match_binary(node, location)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._match_comparison(node, location)
        if isinstance(node, ast.BoolOp):
            return self._match_logic(node, location)
        if isinstance(node, ast.Subscript) and _only_adds_dimensions(node):
            return self.match(node.value, location)
        if isinstance(node, ast.Call):
            return self._match_call(node, location)
        if isinstance(node, ast.IfExp) and (test := self.constant(node.test)) is not None:
            return self._match_names_of_constants(node.test).plus(
                self.match(node.body if test else node.orelse, location)
            )
        return Match()  # unsupported expression: no names, no contradiction

    def constant(self, node: ast.expr) -> int | None:
        """Evaluate a constant expression; None if it is not one."""
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return int(node.value)
        if isinstance(node, ast.Name) and node.id not in self.text.assigned:
            return self.constants.get(node.id)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
            left, right = self.constant(node.left), self.constant(node.right)
            if left is not None and right is not None:
                sign = -1 if isinstance(node.op, ast.Sub) else 1
                return left * right if isinstance(node.op, ast.Mult) else left + sign * right
        return None

    def _match_names_of_constants(self, node: ast.expr) -> Match:
        """Return the constants in a constant expression."""
        names = (part.id for part in ast.walk(node) if isinstance(part, ast.Name))
        return Match(numbers={name: self.constants[name] for name in names})

    def _match_constant(self, node: ast.expr, number: int, location: Location) -> Match:
        *_, last = location.sources()
        op = last.value.producer
        matches = op is not None and op.name == "arith.constant" and op.attrs["value"] == number
        return self._match_names_of_constants(node) if matches else _UNCERTAIN

    def _match_name(self, node: ast.Name, location: Location) -> Match:
        name = node.id
        is_parameter = name in self.text.parameters
        for source in location.sources():
            value = source.value
            if self.in_kernel and is_parameter and value.producer is None and value.name == name:
                return Match(names={name: source})
            if not is_parameter and re.fullmatch(rf"{name}(_\d+)?", value.name):
                return self._expanded(name, source)
        if name in self.text.assignments:  # tuple assignments record no names, and equal values share one
            assigned = self.match(self.text.assignments[name], location)
            if assigned.certain and assigned.names:
                return self._expanded(name, location)
        if is_parameter and not self.in_kernel:
            *_, last = location.sources()
            is_constant = last.value.producer is not None and last.value.producer.name == "arith.constant"
            return Match() if is_constant else Match(positions={name: last})
        return Match(certain=not is_parameter)

    def _expanded(self, name: str, location: Location) -> Match:
        """Match a name, expanded by its definition where that says more."""
        if self.expand and name in self.text.definitions:
            inner = self.match(self.text.definitions[name], location)
            if inner.certain and (inner.names or inner.positions):
                definition = {name: ast.unparse(self.text.definitions[name])}
                return Match(definitions=definition, names={name: location}).plus(inner)
        return Match(names={name: location})

    def _match_binary(self, node: ast.BinOp, location: Location) -> Match:
        neutral = _NEUTRAL.get(type(node.op))
        if neutral is not None and self.constant(node.right) == neutral:
            return self._match_names_of_constants(node.right).plus(self.match(node.left, location))
        if neutral is not None and isinstance(node.op, _COMMUTATIVE) and self.constant(node.left) == neutral:
            return self._match_names_of_constants(node.left).plus(self.match(node.right, location))
        *_, last = location.sources()
        op = last.value.producer
        if op is None or op.name not in _BINARY.get(type(node.op), ()):
            return _UNCERTAIN
        return self._best(node.left, node.right, op, last.lane, swap=isinstance(node.op, _COMMUTATIVE))

    def _match_comparison(self, node: ast.Compare, location: Location) -> Match:
        *_, last = location.sources()
        op = last.value.producer
        predicate = _PREDICATES.get(type(node.ops[0]))
        if op is None or op.name != "arith.cmpi" or predicate is None:
            return _UNCERTAIN
        actual = (
            op.attrs["flags"][0].lstrip("su")
            if op.attrs["flags"][0] not in ("eq", "ne")
            else op.attrs["flags"][0]
        )
        left, right = node.left, node.comparators[0]
        matches = [Match(certain=False)]
        if actual == predicate:
            matches.append(self._best(left, right, op, last.lane, swap=False))
        if actual == _FLIPPED[predicate]:
            matches.append(self._best(right, left, op, last.lane, swap=False))
        return max(matches, key=lambda match: match.rank)

    def _match_logic(self, node: ast.BoolOp, location: Location) -> Match:
        name = "arith.andi" if isinstance(node.op, ast.And) else "arith.ori"
        *_, last = location.sources()
        op = last.value.producer
        if op is None or op.name != name or len(node.values) != 2:
            return _UNCERTAIN
        left, right = node.values
        return self._best(left, right, op, last.lane, swap=True)

    def _best(self, left: ast.expr, right: ast.expr, op: Op, lane: tuple[int, ...], *, swap: bool) -> Match:
        """Match the operands of an operation in the order that fits better."""
        first, second = (Location(operand, lane) for operand in op.operands)
        match = self.match(left, first).plus(self.match(right, second))
        if swap and not match.certain:
            swapped = self.match(left, second).plus(self.match(right, first))
            match = max(match, swapped, key=lambda m: m.rank)
        return match

    def _match_call(self, node: ast.Call, location: Location) -> Match:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            return self.match(node.func.value, location)
        name = self.text.function_called(node)
        *_, last = location.sources()
        op = last.value.producer
        if name not in _CALLS:
            return Match()
        if op is None or op.name != _CALLS[name] or not self._has_same_constants(node, op):
            return _UNCERTAIN
        return Match(names={ast.unparse(node): last})

    def _has_same_constants(self, node: ast.Call, op: Op) -> bool:
        """Return whether a call may be an operation, judging by its axis or bounds."""
        constants = [
            self.constant(arg) for arg in (*node.args, *(keyword.value for keyword in node.keywords))
        ]
        if op.name in ("tt.get_program_id", "tt.get_num_programs"):
            return constants == ["xyz".index(op.attrs["flags"][0])]
        if op.name == "tt.make_range":
            return constants in ([op.attrs["start"], op.attrs["end"]], [op.attrs["start"], None])
        return True


def _only_adds_dimensions(node: ast.Subscript) -> bool:
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return all(
        (isinstance(part, ast.Constant) and part.value is None)
        or (isinstance(part, ast.Slice) and part.lower is part.upper is part.step is None)
        for part in parts
    )
