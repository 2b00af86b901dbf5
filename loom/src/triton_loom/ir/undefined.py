"""Follows what loads leave undefined: lanes that their mask turns off where they have no `other`.

    terms        of a value: conditions on its lanes, of which each means "undefined here, because of these loads"
    checks       `loom.undefined`, put before an operation that uses such a lane: stores it, adds it up into something
                 that is stored, takes it for an address, a mask or a condition

Most uses are seen to be right without running anything: the store has the load's own mask, or `tl.where` has. Only what
is left is computed, tile by tile, beside the values themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from .provenance import mask_of
from .ttir import I1, I32, Block, Function, Module, Op, Region, Tensor, Type, Value, shape_of

UNDEFINED = "loom.undefined"
_VIEWS = {"tt.splat", "tt.expand_dims", "tt.broadcast", "tt.trans", "tt.reshape", "tt.split"}
_MOST_TERMS = 12  # of one value; what has more is left alone


@dataclass(frozen=True)
class Made:
    """A tile of booleans that is not there yet: an operation on others."""

    name: str
    type: Type
    operands: tuple[Condition, ...]
    attrs: tuple[tuple[str, Any], ...] = ()
    slot: int = 0  # among the operation's results


@dataclass(frozen=True)
class Any_:
    """A tile of booleans: whether any of the terms holds."""

    type: Type
    terms: frozenset[Term]


Condition = Value | Made | Any_


@dataclass(frozen=True)
class Term:
    """The lanes in which all of these conditions are as given."""

    literals: frozenset[tuple[Condition, bool]]
    loads: frozenset[str] = field(default_factory=frozenset)  # "file:line" of those to blame

    def also(self, condition: Condition, holds: bool = True) -> Term:
        return replace(self, literals=self.literals | {(condition, holds)})

    @property
    def possible(self) -> bool:
        """Whether nothing shows that there is no such lane."""
        true = {atom for condition, holds in self.literals if holds for atom in _atoms(condition)}
        false = [_atoms(condition) for condition, holds in self.literals if not holds]
        return not any(atoms <= true for atoms in false)


Terms = frozenset[Term]
_NONE: Terms = frozenset()


def _atoms(condition: Condition) -> set[Any]:
    """Conditions that hold together if this one does, in a form in which equal ones are equal."""
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
    if isinstance(condition, Made) and condition.name in _VIEWS:
        return {
            (condition.name, condition.attrs, condition.type, condition.slot, atom)
            for atom in _atoms(condition.operands[0])
        }
    return {condition}


def _view(op: Op, result: Value, atom: Any) -> Any:
    made = _made(op, result, ())
    return made.name, made.attrs, made.type, made.slot, atom


def _zero_unless(value: Value) -> Condition | None:
    """The lanes outside of which an integer is zero, if it is made of booleans."""
    op = value.producer
    if op is None:
        return None
    if op.name in ("arith.extui", "arith.extsi"):
        source = op.operands[0]
        return source if source.type == booleans(source.type) else None
    if op.name in _VIEWS and (inner := _zero_unless(op.operands[0])) is not None:
        return _made(op, value, (inner,))
    return None


def _made(op: Op, result: Value, operands: tuple[Condition, ...]) -> Made:
    """What an operation gives for other operands, as booleans."""
    attrs = tuple(
        sorted(
            (k, tuple(v) if isinstance(v, list) else v) for k, v in op.attrs.items() if k in ("axis", "order")
        )
    )
    return Made(op.name, booleans(result.type), operands, attrs, op.results.index(result))


def booleans(type_: Type) -> Type:
    """The type of a boolean for each lane."""
    return Tensor(type_.shape, I1) if isinstance(type_, Tensor) else I1


def mark_undefined(module: Module) -> None:
    """Put checks into a module, in place."""
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
        self.shadows: dict[tuple[Op, int], Value] = {}  # of what a loop or a branch results in,
        self.carried: dict[tuple[Op, int], Value] = {}  # and of what a loop's body begins with
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

    # -- what is undefined, in the order of the program --

    def of(self, value: Value) -> Terms:
        return self.terms.get(value, _NONE)

    def put(self, value: Value, terms: Iterable[Term]) -> None:
        kept = frozenset(term for term in terms if term.possible)
        if kept and len(kept) <= _MOST_TERMS:
            self.terms[value] = kept
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
            pass  # what these give is taken to be defined
        elif op.name == "cf.cond_br":
            self.use(op, op.operands[0], "decides")
        elif any(self.of(v) for v in op.operands):
            self.compute(op)

    def shadow(self, op: Op, slot: int, result: Value, sources: list[Terms]) -> Iterable[Term]:
        """The terms of what a region results in: a shadow that the region results in as well."""
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
                self.put(op.result, [term.also(mask, False) for term in other])
            return
        for value in op.operands[1:] if op.name == "tt.atomic_cas" else op.operands[1:2]:
            self.use(op, value, "stores" if op.name == "tt.store" else "updates memory by", mask)

    def use(self, op: Op, value: Value, use: str, mask: Value | None = None) -> None:
        terms = self.of(value)
        if mask is not None:
            terms = frozenset(term.also(mask) for term in terms)
        terms = frozenset(term for term in terms if term.possible)
        if terms:
            self.checks.append(_Check(op, use, terms, booleans(value.type)))

    def compute(self, op: Op) -> None:
        """The terms of what an operation gives, from those of its operands."""
        name, result = op.name, op.results[0] if op.results else None
        if result is None:
            return
        union = _NONE.union(*(self.of(v) for v in op.operands))
        if name in _VIEWS:
            for each in op.results:
                self.put(each, [self.viewed(op, each, term) for term in union])
        elif name == "arith.select":
            chooser, a, b = op.operands
            condition: Condition = chooser
            if shape_of(chooser.type) != shape_of(result.type):
                condition = Made("tt.splat", booleans(result.type), (chooser,))
            chosen = [
                *(t.also(condition) for t in self.of(a)),
                *(t.also(condition, False) for t in self.of(b)),
            ]
            self.put(result, [*chosen, *self.of(chooser)])
        elif name in ("arith.andi", "arith.ori") and result.type == booleans(result.type):
            a, b = op.operands  # a side that decides alone makes up for the other
            holds = name == "arith.andi"
            self.put(
                result, [*(t.also(b, holds) for t in self.of(a)), *(t.also(a, holds) for t in self.of(b))]
            )
        elif name in ("arith.andi", "arith.muli") and any(map(_zero_unless, op.operands)):
            terms: list[Term] = []
            for value, other in (op.operands, op.operands[::-1]):  # a zero makes up for the other factor
                mask = _zero_unless(other)
                terms += (term if mask is None else term.also(mask) for term in self.of(value))
            self.put(result, terms)
        elif name in ("tt.reduce", "tt.scan"):
            axis = op.attrs["axis"]
            tile = Any_(booleans(op.operands[0].type), union)
            attrs = (("axis", axis), ("reverse", bool(op.attrs.get("reverse"))))
            for each in op.results:
                made = Made(name, booleans(each.type), (tile,), attrs)
                self.put(each, [Term(frozenset({(made, True)}), _loads(union))])
        elif name == "tt.dot":
            self.put(result, [*self.of(op.operands[2]), *self.products(op, result)])
        elif all(shape_of(v.type) == shape_of(result.type) for v in op.operands) and not op.regions:
            for each in op.results:
                self.put(each, union)

    def viewed(self, op: Op, result: Value, term: Term) -> Term:
        literals = ((_made(op, result, (condition,)), holds) for condition, holds in term.literals)
        return replace(term, literals=frozenset(literals))

    def products(self, op: Op, result: Value) -> Iterable[Term]:
        """A product's element is undefined if any of its row of the left or of its column of the right operand is."""
        rank = len(shape_of(result.type))
        for operand, axis in zip(op.operands[:2], (rank - 1, rank - 2), strict=True):
            if terms := self.of(operand):
                shape = shape_of(operand.type)
                lines = Tensor(shape[:axis] + shape[axis + 1 :], I1)
                line = Made(
                    "tt.reduce",
                    lines,
                    (Any_(booleans(operand.type), terms),),
                    (("axis", axis), ("reverse", False)),
                )
                column = Tensor((*shape[:axis], 1, *shape[axis + 1 :]), I1)
                spread = Made("tt.expand_dims", column, (line,), (("axis", axis),))
                whole = Made("tt.broadcast", booleans(result.type), (spread,))
                yield Term(frozenset({(whole, True)}), _loads(terms))

    # -- into the module --

    def install(self) -> None:
        """Give loops and branches their shadows."""
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
    """Inserts operations before another."""

    block: Block
    before: Op
    made: dict[Condition, Value] = field(default_factory=dict)

    def op(self, name: str, operands: list[Value], type_: Type | None, **attrs: Any) -> Value:
        before = self.before
        op = Op(name, operands, [], attrs, location=before.location, origin=before.origin, block=self.block)
        value = Value(f"undefined_{name.split('.')[-1]}", type_ or I1, producer=op)
        op.results = [value] if type_ is not None else []
        self.block.ops.insert(self.block.ops.index(before), op)
        return value

    def any(self, terms: Terms, type_: Type) -> Value:
        """Whether a term holds, lane by lane."""
        total: Value | None = None
        for term in terms:
            whole: Value | None = None
            for condition, holds in term.literals:
                value = self.value(condition)
                if not holds:
                    value = self.op("arith.xori", [value, self.constant(True, type_)], type_)
                whole = value if whole is None else self.op("arith.andi", [whole, value], type_)
            assert whole is not None
            total = whole if total is None else self.op("arith.ori", [total, whole], type_)
        return total if total is not None else self.constant(False, type_)

    def constant(self, value: bool, type_: Type) -> Value:
        return self.op("arith.constant", [], type_, value=value)

    def value(self, condition: Condition) -> Value:
        if isinstance(condition, Value):
            return condition
        if condition not in self.made:
            self.made[condition] = self.make(condition)
        return self.made[condition]

    def make(self, condition: Made | Any_) -> Value:
        if isinstance(condition, Any_):
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
        wide = self.op("arith.extui", operands, _integers(operands[0].type))
        folded = self.op(condition.name, [wide], _integers(condition.type), **attrs)
        assert folded.producer
        folded.producer.regions = [_either(condition.name, folded.producer)]
        zero = self.op("arith.constant", [], folded.type, value=0)
        return self.op("arith.cmpi", [folded, zero], condition.type, flags=["ne"])


def _integers(type_: Type) -> Type:
    return Tensor(type_.shape, I32) if isinstance(type_, Tensor) else I32


def _either(name: str, parent: Op) -> Region:
    """The combining region of a reduction or a scan by `|`."""
    block = Block()
    block.args = [Value("a", I32, owner=block), Value("b", I32, owner=block)]
    either = Op("arith.ori", list(block.args), block=block)
    either.results = [Value("either", I32, producer=either)]
    block.ops = [either, Op(f"{name}.return", [either.result], block=block)]
    block.region = Region([block], parent)
    return block.region
