"""Tracking of lanes that loads leave undefined: those that their mask turns off where they have no `other`.

    terms        of a value: conditions on its lanes, each meaning "undefined here, because of these loads"
    checks       `loom.undefined`, inserted before an operation that uses such a lane: stores it, accumulates it into
                 something stored, or uses it as an address, a mask or a condition

Most uses are proven correct statically: the store has the load's own mask, or `tl.where` has it. Only the remaining
conditions are computed, tile by tile, beside the values themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from .provenance import mask_of
from .ttir import I1, I32, Block, Function, Module, Op, Region, Tensor, Type, Value, shape_of

UNDEFINED = "loom.undefined"
_VIEWS = {"tt.splat", "tt.expand_dims", "tt.broadcast", "tt.trans", "tt.reshape", "tt.split"}
_MAX_TERMS = 12  # per value; values with more are not tracked


@dataclass(frozen=True)
class Derived:
    """Boolean tile that is not built yet: an operation on other conditions."""

    name: str
    type: Type
    operands: tuple[Condition, ...]
    attrs: tuple[tuple[str, Any], ...] = ()
    slot: int = 0  # index among the operation's results


@dataclass(frozen=True)
class AnyTerm:
    """Boolean tile that is true where any of the terms holds."""

    type: Type
    terms: frozenset[Term]


Condition = Value | Derived | AnyTerm


@dataclass(frozen=True)
class Term:
    """Lanes in which all of these conditions have the stated value."""

    literals: frozenset[tuple[Condition, bool]]
    loads: frozenset[str] = field(default_factory=frozenset)  # "file:line" of the responsible loads

    def restricted_to(self, condition: Condition, holds: bool = True) -> Term:
        return replace(self, literals=self.literals | {(condition, holds)})

    @property
    def possible(self) -> bool:
        """Return False if the conditions are contradictory, so that no such lane exists."""
        true = {atom for condition, holds in self.literals if holds for atom in _atoms(condition)}
        false = [_atoms(condition) for condition, holds in self.literals if not holds]
        return not any(atoms <= true for atoms in false)


Terms = frozenset[Term]
_NONE: Terms = frozenset()


def _atoms(condition: Condition) -> set[Any]:
    """Return the conditions implied by this one, in a canonical, hashable form."""
    if isinstance(condition, Value):
        op = condition.producer
        if op is None:
            return {condition}
        if op.name == "arith.andi":
            return set().union(*map(_atoms, op.operands))
        if op.name == "arith.constant" and op.attrs["value"] is True:
            return set()
        if op.name in _VIEWS:
            return {_view(op, condition, atom) for atom in _atoms(op.operands[0])}
        return {condition}
    if isinstance(condition, Derived) and condition.name in _VIEWS:
        return {
            (condition.name, condition.attrs, condition.type, condition.slot, atom)
            for atom in _atoms(condition.operands[0])
        }
    return {condition}


def _view(op: Op, result: Value, atom: Any) -> Any:
    derived = _derive(op, result, ())
    return derived.name, derived.attrs, derived.type, derived.slot, atom


def _zero_unless(value: Value) -> Condition | None:
    """Return a condition outside of which an integer derived from booleans is zero."""
    op = value.producer
    if op is None:
        return None
    if op.name in ("arith.extui", "arith.extsi"):
        source = op.operands[0]
        return source if source.type == booleans(source.type) else None
    if op.name in _VIEWS and (inner := _zero_unless(op.operands[0])) is not None:
        return _derive(op, value, (inner,))
    return None


def _derive(op: Op, result: Value, operands: tuple[Condition, ...]) -> Derived:
    """Return the boolean result of an operation applied to other operands."""
    attrs = tuple(
        sorted(
            (k, tuple(v) if isinstance(v, list) else v) for k, v in op.attrs.items() if k in ("axis", "order")
        )
    )
    return Derived(op.name, booleans(result.type), operands, attrs, op.results.index(result))


def booleans(type_: Type) -> Type:
    """Return the boolean type with the shape of a type."""
    return Tensor(type_.shape, I1) if isinstance(type_, Tensor) else I1


def mark_undefined(module: Module) -> None:
    """Insert checks into a module, in place."""
    for function in module.functions.values():
        _Marker(function).run()


@dataclass
class _Check:
    op: Op
    use: str
    terms: Terms
    type: Type


class _Marker:
    def __init__(self, function: Function) -> None:
        self.function = function
        self.terms: dict[Value, Terms] = {}
        self.checks: list[_Check] = []
        self.shadows: dict[tuple[Op, int], Value] = {}  # of the results of loops and branches
        self.carried: dict[tuple[Op, int], Value] = {}  # of the loop-carried arguments of loop bodies
        self.blame: dict[tuple[Op, int], frozenset[str]] = {}

    def run(self) -> None:
        if not any(op.name == "tt.load" and len(op.operands) == 2 for op in self.function.body.walk()):
            return
        for block in self.function.body.blocks:
            self.block(block)
        for check in self.checks:
            assert check.op.block
            build = _Builder(check.op.block, check.op)
            condition = build.any(check.terms, check.type)
            build.op(
                UNDEFINED,
                [condition],
                None,
                use=check.use,
                loads=sorted(set().union(*(t.loads for t in check.terms))),
            )
        self.install()

    # -- propagation, in program order --

    def of(self, value: Value) -> Terms:
        return self.terms.get(value, _NONE)

    def put(self, value: Value, terms: Iterable[Term]) -> None:
        remaining = frozenset(term for term in terms if term.possible)
        if remaining and len(remaining) <= _MAX_TERMS:
            self.terms[value] = remaining
        else:
            self.terms.pop(value, None)

    def block(self, block: Block) -> None:
        for op in block.ops:
            self.op(op)

    def op(self, op: Op) -> None:
        if op.name in ("tt.load", "tt.store", "tt.atomic_rmw", "tt.atomic_cas"):
            self.access(op)
        elif op.name == "scf.if":
            self.use(op, op.operands[0], "decides")
            for region in op.regions:
                self.block(region.block)
            for slot, result in enumerate(op.results):
                yielded = [self.of(region.block.ops[-1].operands[slot]) for region in op.regions]
                self.put(result, self.shadow(op, slot, result, yielded))
        elif op.name == "scf.for":
            for bound in op.operands[:3]:
                self.use(op, bound, "decides")
            self.loop(op)
        elif op.name in ("scf.while", "tt.call", "tt.map_elementwise"):
            pass  # their results are assumed to be defined
        elif op.name == "cf.cond_br":
            self.use(op, op.operands[0], "decides")
        elif any(self.of(v) for v in op.operands):
            self.compute(op)

    def shadow(self, op: Op, slot: int, result: Value, sources: list[Terms]) -> Iterable[Term]:
        """Return the terms of a region's result: a shadow that the region returns as well."""
        if not any(sources):
            return _NONE
        shadow = self.shadows.setdefault(
            (op, slot), Value(f"{result.name}_undefined", booleans(result.type), producer=op)
        )
        self.blame[op, slot] = self.blame.get((op, slot), frozenset()).union(
            *(t.loads for s in sources for t in s)
        )
        return [Term(frozenset({(shadow, True)}), self.blame[op, slot])]

    def loop(self, op: Op) -> None:
        body = op.regions[0].block
        checks = len(self.checks)
        while True:
            before = dict(self.blame)
            del self.checks[checks:]
            for slot, result in enumerate(op.results):
                arg = body.args[1 + slot]
                sources = [self.of(op.operands[3 + slot]), self.of(body.ops[-1].operands[slot])]
                self.put(result, self.shadow(op, slot, result, sources))
                if (op, slot) in self.shadows:
                    shadow = Value(f"{arg.name}_undefined", booleans(arg.type), owner=body)
                    shadow = self.carried.setdefault((op, slot), shadow)
                    self.put(arg, [Term(frozenset({(shadow, True)}), self.blame[op, slot])])
            self.block(body)
            for slot, result in enumerate(op.results):
                sources = [self.of(op.operands[3 + slot]), self.of(body.ops[-1].operands[slot])]
                self.put(result, self.shadow(op, slot, result, sources))
            if self.blame == before:
                return

    def access(self, op: Op) -> None:
        mask = mask_of(op)
        if mask is not None:
            self.use(op, mask, "takes for a mask")
        self.use(op, op.operands[0], "takes for an address", mask)
        if op.name == "tt.load":
            other = self.of(op.operands[2]) if len(op.operands) > 2 else None
            if mask is not None and other is None:
                self.put(op.result, [Term(frozenset({(mask, False)}), frozenset({op.origin or op.location}))])
            elif mask is not None and other:
                self.put(op.result, [term.restricted_to(mask, False) for term in other])
            return
        for value in op.operands[1:] if op.name == "tt.atomic_cas" else op.operands[1:2]:
            self.use(op, value, "stores" if op.name == "tt.store" else "updates memory by", mask)

    def use(self, op: Op, value: Value, use: str, mask: Value | None = None) -> None:
        terms = self.of(value)
        if mask is not None:
            terms = frozenset(term.restricted_to(mask) for term in terms)
        terms = frozenset(term for term in terms if term.possible)
        if terms:
            self.checks.append(_Check(op, use, terms, booleans(value.type)))

    def compute(self, op: Op) -> None:
        """Derive the terms of an operation's results from those of its operands."""
        name, result = op.name, op.results[0] if op.results else None
        if result is None:
            return
        union = _NONE.union(*(self.of(v) for v in op.operands))
        if name in _VIEWS:
            for each in op.results:
                self.put(each, [self.viewed(op, each, term) for term in union])
        elif name == "arith.select":
            condition_value, a, b = op.operands
            condition: Condition = condition_value
            if shape_of(condition_value.type) != shape_of(result.type):
                condition = Derived("tt.splat", booleans(result.type), (condition_value,))
            selected = [
                *(t.restricted_to(condition) for t in self.of(a)),
                *(t.restricted_to(condition, False) for t in self.of(b)),
            ]
            self.put(result, [*selected, *self.of(condition_value)])
        elif name in ("arith.andi", "arith.ori") and result.type == booleans(result.type):
            a, b = op.operands  # one side that decides the result makes the other irrelevant
            holds = name == "arith.andi"
            self.put(
                result,
                [
                    *(t.restricted_to(b, holds) for t in self.of(a)),
                    *(t.restricted_to(a, holds) for t in self.of(b)),
                ],
            )
        elif name in ("arith.andi", "arith.muli") and any(map(_zero_unless, op.operands)):
            terms: list[Term] = []
            for value, other in (op.operands, op.operands[::-1]):  # a zero makes the other factor irrelevant
                mask = _zero_unless(other)
                terms += (term if mask is None else term.restricted_to(mask) for term in self.of(value))
            self.put(result, terms)
        elif name in ("tt.reduce", "tt.scan"):
            axis = op.attrs["axis"]
            tile = AnyTerm(booleans(op.operands[0].type), union)
            attrs = (("axis", axis), ("reverse", bool(op.attrs.get("reverse"))))
            for each in op.results:
                derived = Derived(name, booleans(each.type), (tile,), attrs)
                self.put(each, [Term(frozenset({(derived, True)}), _loads(union))])
        elif name == "tt.dot":
            self.put(result, [*self.of(op.operands[2]), *self.products(op, result)])
        elif all(shape_of(v.type) == shape_of(result.type) for v in op.operands) and not op.regions:
            for each in op.results:
                self.put(each, union)

    def viewed(self, op: Op, result: Value, term: Term) -> Term:
        literals = ((_derive(op, result, (condition,)), holds) for condition, holds in term.literals)
        return replace(term, literals=frozenset(literals))

    def products(self, op: Op, result: Value) -> Iterable[Term]:
        """Return the terms of a product.

        An element is undefined if any of its row of the left or its column of the right operand is.
        """
        rank = len(shape_of(result.type))
        for operand, axis in zip(op.operands[:2], (rank - 1, rank - 2), strict=True):
            if terms := self.of(operand):
                shape = shape_of(operand.type)
                lines = Tensor(shape[:axis] + shape[axis + 1 :], I1)
                line = Derived(
                    "tt.reduce",
                    lines,
                    (AnyTerm(booleans(operand.type), terms),),
                    (("axis", axis), ("reverse", False)),
                )
                column = Tensor((*shape[:axis], 1, *shape[axis + 1 :]), I1)
                spread = Derived("tt.expand_dims", column, (line,), (("axis", axis),))
                expanded = Derived("tt.broadcast", booleans(result.type), (spread,))
                yield Term(frozenset({(expanded, True)}), _loads(terms))

    # -- insertion into the module --

    def install(self) -> None:
        """Add shadows to loops and branches."""
        for (op, slot), shadow in self.shadows.items():
            for region in op.regions:
                end = region.block.ops[-1]
                build = _Builder(region.block, end)
                end.operands.append(build.any(self.of(end.operands[slot]), shadow.type))
            if op.name == "scf.for":
                assert op.block
                op.operands.append(_Builder(op.block, op).any(self.of(op.operands[3 + slot]), shadow.type))
                op.regions[0].block.args.append(self.carried[op, slot])
            op.results.append(shadow)


def _loads(terms: Terms) -> frozenset[str]:
    return frozenset().union(*(term.loads for term in terms))


@dataclass
class _Builder:
    """Inserter of operations before another one."""

    block: Block
    before: Op
    derived: dict[Condition, Value] = field(default_factory=dict)

    def op(self, name: str, operands: list[Value], type_: Type | None, **attrs: Any) -> Value:
        before = self.before
        op = Op(name, operands, [], attrs, location=before.location, origin=before.origin, block=self.block)
        value = Value(f"undefined_{name.split('.')[-1]}", type_ or I1, producer=op)
        op.results = [value] if type_ is not None else []
        self.block.ops.insert(self.block.ops.index(before), op)
        return value

    def any(self, terms: Terms, type_: Type) -> Value:
        """Return the lane-wise disjunction of terms."""
        total: Value | None = None
        for term in terms:
            term_value: Value | None = None
            for condition, holds in term.literals:
                value = self.value(condition)
                if not holds:
                    value = self.op("arith.xori", [value, self.constant(True, type_)], type_)
                term_value = (
                    value if term_value is None else self.op("arith.andi", [term_value, value], type_)
                )
            assert term_value is not None
            total = term_value if total is None else self.op("arith.ori", [total, term_value], type_)
        return total if total is not None else self.constant(False, type_)

    def constant(self, value: bool, type_: Type) -> Value:
        return self.op("arith.constant", [], type_, value=value)

    def value(self, condition: Condition) -> Value:
        if isinstance(condition, Value):
            return condition
        if condition not in self.derived:
            self.derived[condition] = self.make(condition)
        return self.derived[condition]

    def make(self, condition: Derived | AnyTerm) -> Value:
        if isinstance(condition, AnyTerm):
            return self.any(condition.terms, condition.type)
        operands = [self.value(operand) for operand in condition.operands]
        attrs = {name: list(v) if isinstance(v, tuple) else v for name, v in condition.attrs}
        if condition.name not in ("tt.reduce", "tt.scan"):
            if condition.name == "tt.split":
                sides = [Value(f"undefined_side{slot}", condition.type) for slot in range(2)]
                self.op("tt.split", operands, None)
                op = self.block.ops[self.block.ops.index(self.before) - 1]
                op.results = sides
                for side in sides:
                    side.producer = op
                return sides[condition.slot]
            return self.op(condition.name, operands, condition.type, **attrs)
        extended = self.op("arith.extui", operands, _integers(operands[0].type))
        folded = self.op(condition.name, [extended], _integers(condition.type), **attrs)
        assert folded.producer
        folded.producer.regions = [_either(condition.name, folded.producer)]
        zero = self.op("arith.constant", [], folded.type, value=0)
        return self.op("arith.cmpi", [folded, zero], condition.type, flags=["ne"])


def _integers(type_: Type) -> Type:
    return Tensor(type_.shape, I32) if isinstance(type_, Tensor) else I32


def _either(name: str, parent: Op) -> Region:
    """Build the region that combines the elements of a reduction or scan by `|`."""
    block = Block()
    block.args = [Value("a", I32, owner=block), Value("b", I32, owner=block)]
    combined = Op("arith.ori", list(block.args), block=block)
    combined.results = [Value("either", I32, producer=combined)]
    block.ops = [combined, Op(f"{name}.return", [combined.result], block=block)]
    block.region = Region([block], parent)
    return block.region
