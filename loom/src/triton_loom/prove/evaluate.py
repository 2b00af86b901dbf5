"""The integers, booleans and pointers of a kernel as expressions of program, lane and iteration.

A value is evaluated at an index: one lane of a tile. Floats are not evaluated. What is not understood becomes a
constant of which nothing is known but its type: proofs about it hold whatever it is.

Arithmetic is that of mathematics. Where a machine's would differ, there is an obligation that it does not
(`obligations`), so each evaluation also tells which values it was made from (`Dependency`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from ..ir.provenance import mask_of
from ..ir.ttir import I1, Block, Function, Op, Opaque, Pointer, Scalar, Value, element_of, shape_of
from .arithmetic import ARITHMETIC
from .contract import Bool, Buffer, Contract, ContractError, Int, constants_of
from .invariants import Invariant, Moment, inductive
from .lemmas import about_products, about_quotients
from .reductions import reduced, scanned
from .scope import Loaded, Scope, conjunction, integer
from .shapes import Shapes
from .solver import QUICK, Lemmas, decide, z3
from .values import (
    Dependencies,
    Dependency,
    Index,
    Loop,
    Place,
    blocks_inside,
    chosen,
    in_type,
    moved,
    relations,
    storage_of,
)


class Evaluator(Shapes):
    """Evaluates the values of one kernel under a contract."""

    def __init__(self, function: Function, contract: Contract) -> None:
        self.function, self.contract, self.scope = function, contract, Scope()
        self.programs = [z3.Int(f"program!{axis}") for axis in "xyz"]
        self.grid = [self.scope.without_division(integer(size)) for size in contract.grid]
        self.lanes: dict[str, tuple[Any, int]] = {}
        self.stored: set[str | None] = set()  # storages that the kernel writes; None: it may be any
        self.memo: dict[tuple[Any, ...], tuple[Any, Dependencies]] = {}
        self.counters: list[tuple[Int, Int]] = []  # names of counters of loops, and what they are
        self._doing: set[tuple[Any, ...]] = set()
        self._depth = 0  # of evaluations apart
        self._seen: list[Dependencies] = [{}]
        self._kept: list[Any] = []
        self.arguments = {arg: self._argument(arg) for arg in function.args}
        self.extents = {
            name: self.scope.without_division(integer(a.extent))
            for name, a in contract.arguments.items()
            if isinstance(a, Buffer)
        }

    def _argument(self, arg: Value) -> Any:
        given = self.contract.arguments.get(arg.name)
        if isinstance(arg.type, Opaque):
            return None
        kind = element_of(arg.type)
        if isinstance(kind, Pointer):
            if isinstance(given, Buffer):
                return (Place(z3.BoolVal(True), arg.name, z3.IntVal(0)),)
            return (Place(z3.BoolVal(True), None, z3.IntVal(0), f"{arg.name} has no buffer in the contract"),)
        if kind.is_float:
            return None
        if given is None or isinstance(given, Buffer | float):
            raise ContractError(f"the integer argument {arg.name} has no value in the contract")
        if kind == I1:
            return given if z3.is_bool(given) else integer(int(given)) != 0
        return self.scope.without_division(integer(given))

    # -- facts --

    @property
    def contract_facts(self) -> list[Bool]:
        """What the contract says of the sizes."""
        return [self.scope.without_division(fact) for fact in self.contract.facts]

    @property
    def facts(self) -> list[Bool]:
        """What holds in every program: of the sizes, of the arguments, of programs and lanes."""
        facts = self.contract_facts
        for arg, value in self.arguments.items():
            if z3.is_expr(value) and z3.is_int(value):
                facts.append(in_type(value, element_of(arg.type).bits))
        for name, extent in self.extents.items():
            # no tensor is larger than the part of the address space that programs have
            facts += [extent >= 0, extent < 2**47 // self.contract.arguments[name].itemsize]
        for program, size in zip(self.programs, self.grid, strict=True):
            facts += [program >= 0, program < size, size < 2**31]
        return facts + [z3.And(lane >= 0, lane < size) for lane, size in self.lanes.values()]

    def lane_index(self, shape: Sequence[int]) -> Index:
        """Any lane of a tile."""
        return tuple(self.lane(f"lane!{dim}.{size}", size) for dim, size in enumerate(shape))

    def lane(self, name: str, size: int) -> Any:
        if size == 1:
            return z3.IntVal(0)
        if name not in self.lanes:
            self.lanes[name] = z3.Int(name), size
        return self.lanes[name][0]

    # -- evaluation --

    def ev(self, value: Value, index: Index = ()) -> Any:
        """The value of one lane: an integer or boolean of z3's, a tuple of places, or None for a float."""
        return self._remembered(
            (value, tuple(i.get_id() for i in index)), lambda: self._value(value, index), index
        )

    def dependencies(self, value: Value, index: Index = ()) -> Dependencies:
        """What `ev` of the same was made from."""
        self.ev(value, index)
        return self.memo[value, tuple(i.get_id() for i in index)][1]

    def _remembered(self, key: tuple[Any, ...], make: Any, *keep: Any) -> Any:
        if key not in self.memo:
            self._kept += keep
            self._seen.append({})
            try:
                result = make()
            finally:
                seen = self._seen.pop()
            self.memo[key] = result, seen
        result, seen = self.memo[key]
        self._seen[-1].update(seen)
        return result

    def _depends(self, value: Value, index: Index) -> None:
        dependency = Dependency(value, index, False)
        self._seen[-1][dependency.key] = dependency

    @contextmanager
    def strictly(self) -> Iterator[None]:
        """All that is evaluated inside matters in every lane."""
        self._seen.append({})
        try:
            yield
        finally:
            for dependency in self._seen.pop().values():
                strict = Dependency(dependency.value, dependency.index, True)
                self._seen[-1][strict.key] = strict

    @contextmanager
    def unnoticed(self) -> Iterator[None]:
        """What is evaluated inside depends on nothing."""
        self._seen.append({})
        try:
            yield
        finally:
            self._seen.pop()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is evaluated inside is forgotten: something is not what it is elsewhere."""
        memo, self.memo = self.memo, dict(self.memo)
        self._depth += 1
        try:
            yield
        finally:
            self.memo = memo
            self._depth -= 1

    def opaque(self, value: Value, why: str, home: Block | None = None) -> Any:
        """Anything that the type of a value can hold."""
        element = element_of(value.type)
        if isinstance(element, Pointer):
            return (Place(z3.BoolVal(True), None, z3.IntVal(0), why),)
        if element.is_float:
            return None
        home = home or (value.producer.block if value.producer else value.owner)
        sort = z3.BoolSort() if element == I1 else z3.IntSort()
        constant = self.scope.fresh(value.name, sort=sort, home=home)
        self.scope.opaque[constant.get_id()] = why
        if element != I1:
            self.scope.know(in_type(constant, element.bits), because="the range of a type")
        return constant

    def _value(self, value: Value, index: Index) -> Any:
        if value in self.arguments:
            return self.arguments[value]
        if isinstance(value.type, Opaque):
            return None
        op = value.producer
        if op is None:
            return self._block_argument(value, index)
        element = element_of(value.type)
        if isinstance(element, Scalar) and element.is_float:
            return None
        self._depends(value, index)
        handler = getattr(self, f"_{op.name.replace('.', '_')}", None)
        if handler is not None:
            return handler(op, value, index)
        if op.name in ARITHMETIC and isinstance(element, Scalar):
            operands = [self.ev(o, index) for o in op.operands]
            if all(operand is not None and not isinstance(operand, tuple) for operand in operands):
                result = ARITHMETIC[op.name](self.scope, op, operands)
                if result is not None:
                    return result
        return self.opaque(value, op.name)

    # -- pointers and memory --

    def _tt_addptr(self, op: Op, value: Value, index: Index) -> Any:
        places, offset = self.ev(op.operands[0], index), self.ev(op.operands[1], index)
        return tuple(Place(p.when, p.argument, p.offset + offset, p.why) for p in places)

    def _tt_bitcast(self, op: Op, value: Value, index: Index) -> Any:
        before, after = element_of(op.operands[0].type), element_of(value.type)
        if isinstance(before, Pointer) and isinstance(after, Pointer):
            sizes = {max(8, element_of(p.pointee).bits) for p in (before, after)}
            places = self.ev(op.operands[0], index)
            if len(sizes) == 1:
                return places
            return tuple(
                Place(p.when, None, p.offset, "a pointer to elements of another size") for p in places
            )
        whole = isinstance(before, Scalar) and not before.is_float and before.bits == after.bits
        if before == after or whole:
            return self.ev(op.operands[0], index)
        return self.opaque(value, "the bits of a float")

    _arith_bitcast = _tt_bitcast

    def masked(self, op: Op, index: Index) -> Bool | None:
        """The mask of an access; None if it has none."""
        mask = mask_of(op)
        return None if mask is None else self.ev(mask, index if shape_of(mask.type) else ())

    def _tt_load(self, op: Op, value: Value, index: Index) -> Any:
        element = element_of(value.type)
        if isinstance(element, Pointer):
            return self.opaque(value, "an address found in memory")
        with self.unnoticed():  # whether mask and address are right is asked where the load is looked at
            mask = self.masked(op, index)
            happens = conjunction([*self.path(op.block), *([] if mask is None else [mask])])
            found = self._found(op, value, self.ev(op.operands[0], index), happens)
        if mask is None:
            return found
        others = [o for o in op.operands[1:] if o is not mask_of(op)]
        if others:
            other = self.ev(others[0], index if shape_of(others[0].type) else ())
        else:
            other = self.opaque(value, "a lane that is off, of a load without `other`", op.block)
        return z3.If(mask, found, other)

    def _found(self, op: Op, value: Value, places: Sequence[Place], happens: Bool) -> Any:
        """What is in memory."""
        if any(place.argument is None for place in places):
            return self.opaque(value, "a value found by an address that is not known")
        element = element_of(value.type)
        constant = self.scope.fresh(value.name, sort=z3.BoolSort() if element == I1 else None, home=op.block)
        buffers = [self.buffers[place.argument or ""] for place in places]
        # A contract speaks of an unsigned tensor's elements as they are read there; TTIR's integers have a sign.
        natural = element != I1 and all(buffer.element.startswith("u") for buffer in buffers)
        if element != I1:
            fits = (
                z3.And(constant >= 0, constant < 2**element.bits)
                if natural
                else in_type(constant, element.bits)
            )
            self.scope.know(fits, because="the range of a type")
        for place, buffer in zip(places, buffers, strict=True):
            assert place.argument is not None
            inside = z3.And(place.offset >= 0, place.offset < self.extents[place.argument])
            here = conjunction([happens, place.when, inside])
            # A kernel that writes to a tensor may have replaced what the contract says of its elements.
            known = (
                element != I1 and self.constant(place.argument) and natural == buffer.element.startswith("u")
            )
            assumed = buffer.assumed(constant, place.offset) if known else None
            if assumed is not None:
                said = self.scope.without_division(assumed)
                self.scope.know(said, because=f"the contract, of elements of {place.argument}", when=[here])
            loaded = Loaded(constant, place.argument, place.offset, here)
            if not self.constant(place.argument):
                self.scope.opaque[constant.get_id()] = "what is in memory that the kernel writes to"
            if known:
                self._related(loaded)
            self.scope.loaded[constant.get_id()] = loaded
        top = 2 ** (element.bits - 1)
        return z3.If(constant >= top, constant - 2 * top, constant) if natural else constant

    def _related(self, loaded: Loaded) -> None:
        """What is assumed of two elements of memory that nobody writes meanwhile."""
        buffer: Buffer = self.contract.arguments[loaded.argument]
        alike = {buffer.inverse, *(n for n, b in self.buffers.items() if b.inverse == loaded.argument)}
        if buffer.distinct or buffer.ascending or buffer.inverse:
            alike.add(loaded.argument)
        if not self.constant(loaded.argument):
            return
        for other in list(self.scope.loaded.values()):
            if other.argument in alike and self.constant(other.argument) and not z3.is_bool(other.constant):
                between = relations(self.contract, loaded, other)
                self.scope.know(*between, because=f"the contract, of two elements of {loaded.argument}")

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """The arguments that are one."""
        return {name: b for name, b in self.contract.arguments.items() if isinstance(b, Buffer)}

    def constant(self, argument: str) -> bool:
        """Whether nobody writes the memory of an argument while the kernel runs."""
        anywhere = None in self.stored and not self.buffers[argument].unreached
        return not anywhere and storage_of(self.contract, argument) not in self.stored

    def _reduce(self, op: Op, value: Value, index: Index) -> Any:
        found = reduced(self, op, value, index) if op.name == "tt.reduce" else scanned(self, op, value, index)
        return self.opaque(value, op.name) if found is None else found

    _tt_reduce = _tt_scan = _reduce

    # -- control flow --

    def path(self, block: Block | None) -> list[Bool]:
        """What has to hold for a block to run, in the current program and iterations."""
        if block is None or block.region is None:
            return []
        return list(self._remembered(("path", block), lambda: self._path(block)))

    def _path(self, block: Block) -> list[Bool]:
        assert block.region is not None
        conditions = []
        with self.strictly():
            if block is not block.region.blocks[0]:
                conditions.append(self._reaches(block))
            op = block.region.parent
            if op is None:
                return conditions
            if op.name == "scf.for":
                conditions += self.loop(op).inside
            elif op.name == "scf.if":
                condition = self.ev(op.operands[0])
                conditions.append(condition if op.regions[0] is block.region else z3.Not(condition))
            elif op.name == "scf.while" and op.regions[1] is block.region:
                conditions.append(self.ev(op.regions[0].block.ops[-1].operands[0]))
            return [*self.path(op.block), *conditions]

    def _reaches(self, block: Block) -> Bool:
        """Some branch to a block is taken. Branches form no circle; see `obligations`."""
        return self._remembered(("reaches", block), lambda: self._ways(block))

    def _ways(self, block: Block) -> Bool:
        ways = []
        assert block.region is not None
        for other in block.region.blocks:
            end = other.ops[-1] if other.ops else None
            for number, (target, _) in enumerate(end.successors if end else ()):
                if target is block and end is not None:
                    ways.append(self._branch(other, end, number))
        return z3.Or(*ways)

    def _branch(self, block: Block, end: Op, number: int) -> Bool:
        conditions: list[Bool] = []
        assert block.region is not None
        if block is not block.region.blocks[0]:
            conditions.append(self._reaches(block))
        if end.name == "cf.cond_br":
            with self.strictly():
                condition = self.ev(end.operands[0])
            conditions.append(condition if number == 0 else z3.Not(condition))
        return conjunction(conditions)

    def loop(self, op: Op) -> Loop:
        """A counted loop. Its step is positive, which is an obligation."""
        found: Loop = self._remembered(("loop", op), lambda: self._loop(op))
        return found

    def _loop(self, op: Op) -> Loop:
        home = op.regions[0].block
        with self.strictly():
            lower, upper, step = (self.ev(o) for o in op.operands[:3])
        count = self.scope.fresh("iteration", home=home)
        if z3.is_int_value(z3.simplify(step)):
            counter = lower + count * step
        else:  # a product has a name of its own, of which most queries need no more than its range
            counter = self.scope.fresh("counter", home=home)
            self.scope.know(counter == lower + count * step, because="the counter of a loop")
            self.counters.append((counter, lower + count * step))
        return Loop(op, count, counter, lower, upper, step)

    def _block_argument(self, value: Value, index: Index) -> Any:
        block = value.owner
        op = block.region.parent if block is not None and block.region is not None else None
        assert block is not None
        if op is not None and op.name == "scf.for":
            if block.args[0] is value:
                return self.loop(op).counter
            return self._carried(op, block.args.index(value) - 1, index)
        if op is not None and op.name == "scf.while" and op.regions[1].block is block:
            return self.ev(op.regions[0].block.ops[-1].operands[1 + block.args.index(value)], index)
        if op is None and block.region is not None and block is not block.region.blocks[0]:
            return self._merged(block, block.args.index(value), index)
        return self.opaque(value, f"a value carried by {op.name if op else 'a branch'}")

    def _merged(self, block: Block, slot: int, index: Index) -> Any:
        """An argument of a block that branches lead to."""
        result: Any = None
        ways = [
            (self._branch(other, other.ops[-1], number), passed[slot])
            for other in (block.region.blocks if block.region else ())
            for number, (target, passed) in enumerate(other.ops[-1].successors if other.ops else ())
            if target is block
        ]
        for condition, passed in ways:
            value = self.ev(passed, index)
            result = value if result is None else chosen(condition, value, result)
        return result

    def _scf_if(self, op: Op, value: Value, index: Index) -> Any:
        slot = op.results.index(value)
        with self.strictly():
            condition = self.ev(op.operands[0])
        first, second = (self.ev(region.block.ops[-1].operands[slot], index) for region in op.regions)
        return chosen(condition, first, second)

    def _scf_for(self, op: Op, value: Value, index: Index) -> Any:
        """What a loop leaves: affine in the number of its iterations, or anything of which its invariants hold."""
        slot = op.results.index(value)
        start, step = self.ev(op.operands[3 + slot], index), self.increment(op, slot, index)
        invariants = self.invariants(op, slot) if step is None else []
        if step is None and not invariants:
            return self.opaque(value, "a value carried by scf.for")
        loop = self.loop(op)
        times = self._remembered(("times", op), lambda: self._times(op, loop))
        if step is not None:
            return moved(start, times * step)
        result = self.opaque(value, "a value carried by scf.for")
        end = Moment(
            result, start, loop, times, loop.lower + times * loop.step, self._starts(op, slot, index)
        )
        some = z3.And(*(invariant(end) for invariant in invariants))
        left = z3.If(loop.lower < loop.upper, some, result == start)
        when = [*self.path(op.block), in_type(start, element_of(value.type).bits)]
        self.scope.know(left, because="the invariants of a loop", when=when)
        return result

    def _times(self, op: Op, loop: Loop) -> Int:
        times = self.scope.fresh("iterations", home=op.block)
        end = loop.lower + times * loop.step
        some = z3.And(times >= 1, end - loop.step < loop.upper, loop.upper <= end)
        counted = z3.If(loop.lower < loop.upper, some, times == 0)
        # A step that is not positive is refuted by an obligation; here it must not contradict anything.
        when = [*self.path(op.block), loop.step >= 1]
        self.scope.know(counted, because="the number of iterations", when=when)
        return times

    def _carried(self, op: Op, slot: int, index: Index) -> Any:
        """A value that a loop carries: affine in the iteration, or what the iteration before has left."""
        value = op.regions[0].block.args[1 + slot]
        key = value, tuple(i.get_id() for i in index)
        if key in self._doing or self._depth > 4:
            return self.opaque(value, "a value carried by scf.for")
        start, step = self.ev(op.operands[3 + slot], index), self.increment(op, slot, index)
        loop = self.loop(op)
        if step is not None:
            self._depends(value, index)
            return moved(start, loop.count * step)
        invariants = self.invariants(op, slot)
        if invariants:
            carried = self.opaque(value, "a value carried by scf.for")
            now = Moment(carried, start, loop, loop.count, loop.counter, self._starts(op, slot, index))
            some = z3.And(
                *(invariant(now) for invariant in invariants),
                z3.Implies(loop.count == 0, carried == start),
            )
            when = [*self.path(op.regions[0].block), in_type(start, element_of(value.type).bits)]
            self.scope.know(some, because="the invariants of a loop", when=when)
            return carried
        self._doing.add(key)
        try:
            with self.strictly(), self.apart():
                left = self.ev(op.regions[0].block.ops[-1].operands[slot], index)
        finally:
            self._doing.discard(key)
        if left is None or isinstance(left, tuple):
            return self.opaque(value, "a value carried by scf.for")
        own = self.scope.bound([loop.count], list(blocks_inside(op)))
        own.pop(loop.count.get_id(), None)
        (before,) = self.scope.copied([left], own, [(loop.count, loop.count - 1)], op.regions[0].block)
        return chosen(loop.count == 0, start, before)

    def invariants(self, op: Op, slot: int) -> list[Invariant]:
        """What always holds of an integer that a loop carries, in every lane, if it is made from what it was before."""
        key = ("invariants", op, slot)
        if key in self._doing or self._depth > 4:
            return []
        self._doing.add(key)
        try:
            found: list[Invariant] = self._remembered(key, lambda: self._invariants(op, slot))
            return found
        finally:
            self._doing.discard(key)

    def _invariants(self, op: Op, slot: int) -> list[Invariant]:
        body = op.regions[0].block
        value, end = body.args[1 + slot], body.ops[-1].operands[slot]
        element = element_of(value.type)
        if element == I1 or not isinstance(element, Scalar) or element.is_float:
            return []
        index = self.lane_index(shape_of(value.type))
        loop, start = self.loop(op), self.ev(op.operands[3 + slot], index)
        outside, inside = self.path(op.block), self.path(body)
        with self.strictly(), self.apart():
            before = self.opaque(value, "a value carried by scf.for")
            self.memo[value, tuple(i.get_id() for i in index)] = before, {}
            left = self.ev(end, index)
        if before.get_id() not in constants_of([left, *self.scope.relevant([left])]):
            return []

        def proven(facts: Sequence[Bool], goal: Bool) -> bool:
            known = [*self.facts, *facts]
            known += self.scope.relevant([*known, goal])
            names = constants_of([*known, goal])
            divisions = [d for d in self.scope.divisions.values() if d.quotient.get_id() in names]
            lemmas: dict[str, Lemmas] = {
                "quotients": lambda: about_quotients([*known, goal], divisions),
                "products": lambda: about_products([*known, goal]),
            }
            return decide(known, goal, lemmas, QUICK).verdict == "proven"

        return inductive(
            Moment(before, start, loop, loop.count, loop.counter, self._starts(op, slot, index)),
            left,
            lambda goal: proven([*outside, loop.lower < loop.upper], goal),
            lambda facts, goal: proven([*inside, *facts], goal),
        )

    def _starts(self, op: Op, slot: int, index: Index) -> list[Int]:
        """What the other integers of the same shape that a loop carries are before its first iteration."""
        own = op.operands[3 + slot]
        others = [o for o in op.operands[3:] if o is not own and shape_of(o.type) == shape_of(own.type)]
        with self.unnoticed():
            found = [self.ev(o, index) for o in others]
        return [start for start in found if z3.is_expr(start) and z3.is_int(start)]

    def increment(self, op: Op, slot: int, index: Index) -> Int | None:
        """What each iteration adds to a value that a loop carries, if that is always the same."""
        key = ("increment", op, slot, tuple(i.get_id() for i in index))
        return self._remembered(key, lambda: self._increment(op, slot, index), index)

    def _increment(self, op: Op, slot: int, index: Index) -> Int | None:
        body = op.regions[0].block
        value, end = body.args[1 + slot], body.ops[-1].operands[slot]
        element = element_of(value.type)
        if element == I1 or (isinstance(element, Scalar) and element.is_float) or self._depth > 4:
            return None
        loop, stand_in = self.loop(op), self.scope.fresh("carried", home=body)
        key = value, tuple(i.get_id() for i in index)
        start = self.ev(op.operands[3 + slot], index) if isinstance(element, Pointer) else None
        if start is not None and len(start) != 1:
            return None
        with self.apart():
            bound = (Place(start[0].when, start[0].argument, stand_in),) if start else stand_in
            self.memo[key] = bound, {}
            self._seen.append({})
            after = self.ev(end, index)
            seen = self._seen.pop()
        if isinstance(after, tuple):
            if len(after) != 1 or start is None or after[0].argument != start[0].argument:
                return None
            after = after[0].offset
        step = z3.simplify(after - stand_in, som=True)
        own = self.scope.bound([loop.count, loop.counter, stand_in], list(blocks_inside(op)))
        if not own.keys().isdisjoint(constants_of([step])):
            return None
        sum_ = end.producer
        if (
            sum_ is not None
            and sum_.name in ("arith.addi", "tt.addptr", "arith.subi")
            and value in sum_.operands
        ):
            # the sums are those of the value itself, which has to fit wherever it is used
            seen = {k: d for k, d in seen.items() if d.value is not end}
        self._seen[-1].update(seen)
        return step
