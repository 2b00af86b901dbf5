"""Conditions for a kernel to do no harm, as questions for the solver."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..codegen.operations import CONTROL, EFFECTS, ELEMENTWISE, IGNORED, ROOTS, SHAPES
from ..ir.provenance import MAKES_DESCRIPTOR, described, mask_of, root_of
from ..ir.ttir import Block, Dense, Op, Pointer, Tensor, Value, element_of, shape_of
from . import descriptors
from .answers import Kind
from .arithmetic import requirements
from .contract import Bool, Buffer, Int
from .evaluate import Evaluator
from .scope import integer
from .solver import z3
from .values import Dependencies, Dependency, Index, Target, in_type, storage_of
from .views import within_view

ACCESSES = ("tt.load", "tt.store", "tt.atomic_rmw", "tt.atomic_cas")
_KNOWN = {*ELEMENTWISE, *SHAPES, *ROOTS, *EFFECTS, *CONTROL, *IGNORED} - {"tt.call"}
_KNOWN |= {
    "tt.reduce.return",
    "tt.scan.return",
    "tt.map_elementwise.return",
    "tt.ptr_to_int",
    "tt.int_to_ptr",
}
_KNOWN |= {MAKES_DESCRIPTOR, *descriptors.LOADS, *descriptors.STORES}


@dataclass(frozen=True)
class Obligation:
    """Goal that holds under assumptions."""

    kind: Kind
    what: str
    place: str
    assuming: Sequence[Bool]
    goal: Bool
    lane: Index = ()
    stronger: Sequence[Bool] = ()  # goals that imply this one and may be easier
    shows: tuple[str, Sequence[Int]] = ("", ())  # format of a counterexample, and its numbers
    unknown: str = ""  # why it cannot be decided
    within: tuple[Int, Int] | None = None  # if the goal is 0 <= first < second: these two
    view: tuple[Int, Buffer] | None = None  # if the goal is that an offset is an element of a strided view


@dataclass(frozen=True)
class Access:
    """Load, store or atomic in one lane."""

    op: Op
    lane: Index
    targets: Sequence[Target]
    mask: Bool | None
    path: Sequence[Bool]

    @property
    def happens(self) -> list[Bool]:
        """Return the conditions under which it happens."""
        return [*self.path, *([] if self.mask is None else [self.mask])]

    @property
    def writes(self) -> bool:
        return self.op.name != "tt.load"

    @property
    def atomic(self) -> bool:
        return self.op.name.startswith("tt.atomic")

    @property
    def orders_programs(self) -> bool:
        """Return whether it is atomic for other programs too; scope `cta` covers one program."""
        return self.atomic and "cta" not in self.op.attrs.get("flags", ())

    @property
    def replaces(self) -> bool:
        """Return whether the element's new value is independent of the old one."""
        return self.op.name == "tt.store" or (
            self.op.name == "tt.atomic_rmw" and "exch" in self.op.attrs.get("flags", ())
        )

    @property
    def name(self) -> str:
        return "atomic" if self.atomic else self.op.name.removeprefix("tt.")


@dataclass
class Question:
    """Accesses of a kernel under a contract, and the obligations to prove."""

    evaluator: Evaluator
    accesses: list[Access] = field(default_factory=list)
    obligations: list[Obligation] = field(default_factory=list)


def question(evaluator: Evaluator) -> Question:
    """Collect all obligations of a kernel."""
    function = evaluator.function
    result = Question(evaluator)
    if any(_is_cyclic(block) for block in function.body.blocks):
        result.obligations.append(_unknown("modelled", "branches", function.location, "they form a loop"))
        return result
    ops = list(function.body.walk())
    evaluator.stored = set(_stored(evaluator, ops))
    for op in ops:
        result.obligations += _unsupported(op)
        if op.name in ACCESSES:
            lane = evaluator.lane_index(shape_of(op.operands[0].type))
            targets, mask = evaluator.ev(op.operands[0], lane), evaluator.masked(op, lane)
            result.accesses.append(Access(op, lane, targets, mask, evaluator.path(op.block)))
    for access in result.accesses:
        result.obligations += _bounds(evaluator, access)
    for op in ops:
        result.obligations += _descriptors(evaluator, op)
    result.obligations += _promises(evaluator, ops)
    result.obligations += _arithmetic(evaluator, result.accesses, ops)
    for op in ops:
        if op.name == "scf.for":
            result.obligations += _loop(evaluator, op)
    return result


def _unknown(kind: Kind, what: str, place: str, why: str) -> Obligation:
    return Obligation(kind, what, place, (), z3.BoolVal(False), unknown=why)


def _is_cyclic(block: Block, above: tuple[Block, ...] = ()) -> bool:
    if block in above:
        return True
    ends = block.ops[-1].successors if block.ops else []
    return any(_is_cyclic(target, (*above, block)) for target, _ in ends)


def _unsupported(op: Op) -> Iterator[Obligation]:
    """Report an operation whose effects are unsupported."""
    if op.name not in _KNOWN:
        yield _unknown("modelled", op.name, op.location, f"what {op.name} does to memory is not known here")
    elif op.name == "tt.elementwise_inline_asm" and op.attrs.get("pure") is not True:
        yield _unknown("modelled", op.name, op.location, "assembly that is not called pure may do anything")
    elif op.name == "scf.for" and op.attrs.get("unsigned"):
        yield _unknown("modelled", op.name, op.location, "a loop that counts without sign")


def _stored(evaluator: Evaluator, ops: Sequence[Op]) -> Iterator[str | None]:
    """Yield the storages that are written. Pointers are traced through the IR, because nothing is evaluated yet."""
    for op in ops:
        if op.name in ACCESSES and op.name != "tt.load":
            yield _storage_at(evaluator, op.operands[0])
    for pointer in descriptors.stored(ops):
        yield None if pointer is None else _storage_at(evaluator, pointer)


def _storage_at(evaluator: Evaluator, pointer: Value) -> str | None:
    root = root_of(pointer)
    return (
        storage_of(evaluator.contract, root.name)
        if root is not None and root in evaluator.arguments
        else None
    )


# ---- bounds -----------------------------------------------------------------------------------------------------


def _bounds(evaluator: Evaluator, access: Access) -> Iterator[Obligation]:
    op = access.op
    pointer = element_of(op.operands[0].type)
    assert isinstance(pointer, Pointer)
    if isinstance(pointer.pointee, Tensor):
        yield _unknown("bounds", access.name, op.location, "a pointer to a block")
        return
    for target in access.targets:
        if target.argument is None:
            yield _unknown("bounds", access.name, op.origin or op.location, target.why)
            continue
        buffer: Buffer = evaluator.contract.arguments[target.argument]
        what = f"{access.name} {target.argument}"
        if max(1, element_of(pointer.pointee).bits // 8) != buffer.itemsize:
            why = f"it is of {pointer.pointee}, and the contract's elements are {buffer.element}"
            yield _unknown("bounds", what, op.origin or op.location, why)
            continue
        assuming = [*access.happens, target.when]
        extent = evaluator.extents[target.argument]
        flat = z3.And(target.offset >= 0, target.offset < extent)
        stronger: list[Bool] = []
        goal = flat
        if buffer.dims is not None:
            stronger, digits = within_view(evaluator, target.offset, buffer)
            goal = z3.And(flat, digits)
        shows = ("element {} of {}", (target.offset, extent))
        within = (target.offset, extent) if buffer.dims is None else None
        yield Obligation(
            "bounds",
            what,
            op.origin or op.location,
            assuming,
            goal,
            access.lane,
            stronger,
            shows,
            within=within,
            view=(target.offset, buffer) if buffer.dims is not None else None,
        )
        yield Obligation("reached", what, op.origin or op.location, assuming, z3.BoolVal(False), access.lane)


def _descriptors(evaluator: Evaluator, op: Op) -> Iterator[Obligation]:
    place, path = op.origin or op.location, evaluator.path(op.block)
    if op.name == MAKES_DESCRIPTOR:
        for target in evaluator.ev(described(op)[0]):
            if target.argument is None:
                yield _unknown("descriptor", "descriptor", place, target.why)
                continue
            for what, goal in descriptors.truths(evaluator, op, target):
                description, shows = f"{what} of {target.argument}", ("it is not what it says", ())
                yield Obligation("descriptor", description, place, [*path, target.when], goal, shows=shows)
    elif op.name in (*descriptors.LOADS, *descriptors.STORES):
        maker = descriptors.maker_of(op)
        if maker is None:
            yield _unknown("descriptor", op.name, place, "its descriptor was not made in this kernel")
            return
        yield Obligation("reached", op.name.removeprefix("tt."), place, path, z3.BoolVal(False))
        base = evaluator.ev(described(maker)[0])
        storages = {storage_of(evaluator.contract, target.argument) for target in base}
        if op.name in descriptors.STORES or not evaluator.stored.isdisjoint({None, *storages}):
            yield _unknown("race", op.name, place, "tiles that go through descriptors are not compared")


# ---- arithmetic -------------------------------------------------------------------------------------------------


def _arithmetic(evaluator: Evaluator, accesses: Sequence[Access], ops: Sequence[Op]) -> Iterator[Obligation]:
    """Yield the obligations of everything that addresses, masks and control flow depend on.

    Values that only addresses depend on matter only in active lanes.
    """
    done: set[Any] = set()
    everywhere: dict[Any, Dependency] = {}
    conditional: list[tuple[Access, Dependency]] = []

    def note(dependencies: Dependencies) -> None:
        for dependency in dependencies.values():
            everywhere.setdefault((dependency.value, _ids(dependency.index)), dependency)

    for access in accesses:
        mask = mask_of(access.op)
        dependencies_ = dict(evaluator.dependencies(access.op.operands[0], access.lane))
        strict = {key: d for key, d in dependencies_.items() if d.strict or mask is None}
        note(strict)
        conditional += [(access, d) for key, d in dependencies_.items() if key not in strict]
        if access.op.block:
            note(evaluator.memo["path", access.op.block][1])
        if mask is not None:
            note(evaluator.dependencies(mask, access.lane if shape_of(mask.type) else ()))
    for op in ops:
        if op.name == MAKES_DESCRIPTOR:
            for operand in op.operands:
                note(evaluator.dependencies(operand))
        elif op.name == "scf.for":
            evaluator.loop(op)
            note(evaluator.memo["loop", op][1])
        elif op.name == "scf.while":  # its termination may depend on everything it carries
            for region in op.regions:
                for operand in region.block.ops[-1].operands:
                    note(evaluator.dependencies(operand, evaluator.lane_index(shape_of(operand.type))))
    for dependency in everywhere.values():
        yield from _value_obligations(evaluator, dependency, ())
    for access, dependency in conditional:
        key = dependency.value, _ids(dependency.index)
        if key not in everywhere and (key, access.op) not in done:
            done.add((key, access.op))
            yield from _value_obligations(evaluator, dependency, access.happens)


def _ids(index: Index) -> tuple[int, ...]:
    return tuple(i.get_id() for i in index)


def _value_obligations(
    evaluator: Evaluator, dependency: Dependency, conditions: Sequence[Bool]
) -> Iterator[Obligation]:
    value, index = dependency.value, dependency.index
    op = value.producer
    result = evaluator.ev(value, index)
    if op is None:  # loop-carried, with a constant increment
        element = element_of(value.type)
        if isinstance(element, Pointer) or value.owner is None or result is None:
            return
        parent = value.owner.region.parent if value.owner.region else None
        assuming = [*evaluator.path(value.owner), *conditions]
        shows = (f"{{}}, which an {element} can't hold", (result,))
        what, place = f"{value.name} {element}", parent.location if parent else ""
        yield Obligation("overflow", what, place, assuming, in_type(result, element.bits), index, shows=shows)
        return
    if result is None or isinstance(result, tuple):
        return
    operands = []
    if op.name.startswith(("arith.", "math.")) and op.name != "arith.constant":
        operands = [evaluator.ev(o, index if shape_of(o.type) else ()) for o in op.operands]
    element = element_of(value.type)
    required = requirements(op, operands, result)
    if op.name == "scf.for" and z3.is_int(
        result
    ):  # constant increments: values between start and end fit too
        required = [("overflow", in_type(result, element.bits))]
    for kind, goal in required:
        numbers = [result] if kind == "overflow" else operands
        text = f"{{}}, which an {element} can't hold" if kind == "overflow" else "{} / {}"
        what = f"{op.name.rpartition('.')[2]} {element}"
        assuming = [*evaluator.path(op.block), *conditions]
        yield Obligation(
            "overflow" if kind == "overflow" else "sign",
            what, op.origin or op.location, assuming, goal, index, shows=(text, numbers),
        )  # fmt: skip


def _loop(evaluator: Evaluator, op: Op) -> Iterator[Obligation]:
    loop = evaluator.loop(op)
    bits = element_of(op.operands[0].type).bits
    outside = evaluator.path(op.block)
    following = loop.counter + loop.step
    shows = (f"the counter after this step is {{}}, which an i{bits} can't hold", (following,))
    inside = [*outside, *loop.inside]
    yield Obligation("step", f"loop i{bits}", op.location, inside, following < 2 ** (bits - 1), shows=shows)
    if not z3.is_int_value(z3.simplify(loop.step)):
        yield Obligation(
            "sign", "step of a loop", op.location, outside, loop.step >= 1, shows=("{}", (loop.step,))
        )


# ---- promises ---------------------------------------------------------------------------------------------------


def _promises(evaluator: Evaluator, ops: Iterable[Op]) -> Iterator[Obligation]:
    function, contract = evaluator.function, evaluator.contract
    for arg, attrs in zip(function.args, function.arg_attrs, strict=True):
        value, multiple = evaluator.arguments[arg], attrs.get("tt.divisibility", 1)
        argument = contract.arguments.get(arg.name)
        if isinstance(argument, Buffer) and multiple > 1:
            goal = z3.BoolVal(argument.align % multiple == 0)
            shows: tuple[str, Sequence[Int]] = (
                f"it is a multiple of {argument.align} bytes, not of {multiple}",
                (),
            )
            yield Obligation("promise", f"argument {arg.name}", function.location, (), goal, shows=shows)
        elif z3.is_expr(value) and z3.is_int(value):
            bits = element_of(arg.type).bits
            fits, shows = in_type(value, bits), (f"{{}}, which an i{bits} can't hold", (value,))
            yield Obligation("contract", f"argument {arg.name}", function.location, (), fits, shows=shows)
            if multiple > 1:
                divisible, shows = value % multiple == 0, (f"{{}}, not a multiple of {multiple}", (value,))
                yield Obligation(
                    "promise", f"argument {arg.name}", function.location, (), divisible, shows=shows
                )
    for name, buffer in evaluator.buffers.items():
        parts = [("elements", evaluator.extents[name])]
        for size, stride in buffer.dims or ():
            parts += [("elements in a dimension", size), ("stride", stride)]
        for what, part in parts:
            number = evaluator.scope.without_division(integer(part))
            if not z3.is_int_value(number) or number.as_long() < 0:
                shows = (f"{what}: {{}}, which no tensor has", (number,))
                yield Obligation(
                    "contract", f"extent of {name}", function.location, (), number >= 0, shows=shows
                )
    parameters = {arg.name for arg in function.args}
    for name, value in contract.arguments.items():
        if name not in parameters and name in contract.constants:
            same = integer(value) == contract.constants[name]
            what, shows = (
                f"argument {name}",
                (f"{{}}; it is compiled for {contract.constants[name]}", (integer(value),)),
            )
            yield Obligation("promise", what, function.location, (), same, shows=shows)
        elif name not in parameters and z3.is_expr(value):
            yield _unknown(
                "promise", f"argument {name}", function.location, "the compiled kernel has no such argument"
            )
    for op in ops:
        if op.name == "llvm.intr.assume":
            goal = evaluator.ev(op.operands[0])
            yield Obligation("promise", "tl.assume", op.location, evaluator.path(op.block), goal)
        elif op.results:
            yield from _hints(evaluator, op)


def _hints(evaluator: Evaluator, op: Op) -> Iterator[Obligation]:
    """Yield the obligations of `tl.multiple_of` and its like.

    Along a dimension, they promise runs of consecutive (or equal) elements, each beginning with a multiple. Without
    a promise about runs, a run is a maximal sequence that counts up by one. The sanitizer checks the same.
    """
    shape = shape_of(op.result.type)
    hints = {}
    for name in ("divisibility", "contiguity", "constancy"):
        attribute = op.attrs.get(f"tt.{name}")
        if isinstance(attribute, Dense):
            one = isinstance(attribute.values, int)
            hints[name] = [attribute.values] * max(1, len(shape)) if one else attribute.values
    if not hints:
        return
    lane = evaluator.lane_index(shape)
    path = evaluator.path(op.block)

    def number(index: Index) -> Int:
        value = evaluator.ev(op.result, index)
        return value[0].offset if isinstance(value, tuple) and len(value) == 1 else value

    def shifted(dim: int, to: Int) -> Index:
        return (*lane[:dim], z3.simplify(to), *lane[dim + 1 :])

    own = number(lane)
    place = op.origin or op.location
    unit = 1
    if own is None or isinstance(own, tuple) or isinstance(element_of(op.result.type), Pointer):
        yield _unknown("promise", "hint", place, "a hint about pointers")
        return
    for dim in range(max(1, len(shape))):
        multiple, run, equal = (
            hints.get(n, [1] * 8)[dim] for n in ("divisibility", "contiguity", "constancy")
        )
        at = lane[dim] if shape else z3.IntVal(0)
        goals: list[tuple[str, Bool]] = []
        if shape and run > 1:
            first = number(shifted(dim, at / run * run))
            goals.append(("max_contiguous", own - first == at % run * unit))
        if shape and equal > 1:
            goals.append(("max_constancy", own == number(shifted(dim, at / equal * equal))))
        if multiple > 1:
            starts_run: Bool = at % run == 0
            if shape and run == 1 and equal == 1:
                before = number(shifted(dim, z3.If(at > 0, at - 1, 0)))
                starts_run = z3.Or(at == 0, own != before + unit)
            elif equal > 1:
                starts_run = at % equal == 0
            goals.append(("multiple_of", z3.Implies(starts_run, own % multiple == 0)))
        for name, goal in goals:
            yield Obligation(
                "promise", f"tl.{name}", place, path, goal, lane, shows=("the value is {}", (own,))
            )
