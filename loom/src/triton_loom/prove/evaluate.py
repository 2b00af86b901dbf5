"""Integers, booleans and pointers of a kernel as expressions of program, lane and iteration.

A value is evaluated at an index: one lane of a tile. Floats are not evaluated. Unsupported operations become
constants of which only the type is known: proofs about them hold whatever their value is.

Arithmetic is mathematical. Where a machine's would differ, an obligation states that it does not (`obligations`),
so each evaluation also records which values it depends on (`Dependency`).
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
    Target,
    advance,
    blocks_inside,
    in_type,
    relations,
    select,
    storage_of,
)


class Evaluator(Shapes):
    """Evaluator of the values of one kernel under a contract."""

    def __init__(self, function: Function, contract: Contract) -> None:
        self.function, self.contract, self.scope = function, contract, Scope()
        self.programs = [z3.Int(f"program!{axis}") for axis in "xyz"]
        self.grid = [self.scope.without_division(integer(size)) for size in contract.grid]
        self.lanes: dict[str, tuple[Any, int]] = {}
        self.stored: set[str | None] = set()  # storages that the kernel writes; None: possibly any
        self.memo: dict[tuple[Any, ...], tuple[Any, Dependencies]] = {}
        self.counters: list[tuple[Int, Int]] = []  # constants that name loop counters, and their definitions
        self._in_progress: set[tuple[Any, ...]] = set()
        self._depth = 0  # of isolated evaluations
        self._seen: list[Dependencies] = [{}]
        self._alive: list[Any] = []
        self.arguments = {arg: self._argument(arg) for arg in function.args}
        self.extents = {
            name: self.scope.without_division(integer(a.extent))
            for name, a in contract.arguments.items()
            if isinstance(a, Buffer)
        }

    def _argument(self, arg: Value) -> Any:
        argument = self.contract.arguments.get(arg.name)
        if isinstance(arg.type, Opaque):
            return None
        element = element_of(arg.type)
        if isinstance(element, Pointer):
            if isinstance(argument, Buffer):
                return (Target(z3.BoolVal(True), arg.name, z3.IntVal(0)),)
            return (
                Target(z3.BoolVal(True), None, z3.IntVal(0), f"{arg.name} has no buffer in the contract"),
            )
        if element.is_float:
            return None
        if argument is None or isinstance(argument, Buffer | float):
            raise ContractError(f"the integer argument {arg.name} has no value in the contract")
        if element == I1:
            return argument if z3.is_bool(argument) else integer(int(argument)) != 0
        return self.scope.without_division(integer(argument))

    # -- facts --

    @property
    def contract_facts(self) -> list[Bool]:
        """Return the contract's conditions on the sizes."""
        return [self.scope.without_division(fact) for fact in self.contract.facts]

    @property
    def facts(self) -> list[Bool]:
        """Return the facts that hold in every program, about sizes, arguments, programs and lanes."""
        facts = self.contract_facts
        for arg, value in self.arguments.items():
            if z3.is_expr(value) and z3.is_int(value):
                facts.append(in_type(value, element_of(arg.type).bits))
        for name, extent in self.extents.items():
            # no tensor exceeds the user address space
            facts += [extent >= 0, extent < 2**47 // self.contract.arguments[name].itemsize]
        for program, size in zip(self.programs, self.grid, strict=True):
            facts += [program >= 0, program < size, size < 2**31]
        return facts + [z3.And(lane >= 0, lane < size) for lane, size in self.lanes.values()]

    def lane_index(self, shape: Sequence[int]) -> Index:
        """Return the index of an arbitrary lane of a tile."""
        return tuple(self.lane(f"lane!{dim}.{size}", size) for dim, size in enumerate(shape))

    def lane(self, name: str, size: int) -> Any:
        if size == 1:
            return z3.IntVal(0)
        if name not in self.lanes:
            self.lanes[name] = z3.Int(name), size
        return self.lanes[name][0]

    # -- evaluation --

    def ev(self, value: Value, index: Index = ()) -> Any:
        """Evaluate one lane: a z3 integer or boolean, a tuple of targets, or None for a float."""
        return self._remembered(
            (value, tuple(i.get_id() for i in index)), lambda: self._value(value, index), index
        )

    def dependencies(self, value: Value, index: Index = ()) -> Dependencies:
        """Return the values on which `ev` of the same value depends."""
        self.ev(value, index)
        return self.memo[value, tuple(i.get_id() for i in index)][1]

    def _remembered(self, key: tuple[Any, ...], compute: Any, *alive: Any) -> Any:
        if key not in self.memo:
            self._alive += alive
            self._seen.append({})
            try:
                result = compute()
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
        """Mark everything that is evaluated inside as required in every lane."""
        self._seen.append({})
        try:
            yield
        finally:
            for dependency in self._seen.pop().values():
                strict = Dependency(dependency.value, dependency.index, True)
                self._seen[-1][strict.key] = strict

    @contextmanager
    def untracked(self) -> Iterator[None]:
        """Record no dependencies for what is evaluated inside."""
        self._seen.append({})
        try:
            yield
        finally:
            self._seen.pop()

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Forget what is evaluated inside: some value is bound differently there."""
        memo, self.memo = self.memo, dict(self.memo)
        self._depth += 1
        try:
            yield
        finally:
            self.memo = memo
            self._depth -= 1

    def opaque(self, value: Value, why: str, home: Block | None = None) -> Any:
        """Return an arbitrary value of a value's type."""
        element = element_of(value.type)
        if isinstance(element, Pointer):
            return (Target(z3.BoolVal(True), None, z3.IntVal(0), why),)
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
        targets, offset = self.ev(op.operands[0], index), self.ev(op.operands[1], index)
        return tuple(Target(p.when, p.argument, p.offset + offset, p.why) for p in targets)

    def _tt_bitcast(self, op: Op, value: Value, index: Index) -> Any:
        before, after = element_of(op.operands[0].type), element_of(value.type)
        if isinstance(before, Pointer) and isinstance(after, Pointer):
            sizes = {max(8, element_of(p.pointee).bits) for p in (before, after)}
            targets = self.ev(op.operands[0], index)
            if len(sizes) == 1:
                return targets
            return tuple(
                Target(p.when, None, p.offset, "a pointer to elements of another size") for p in targets
            )
        same_bits = isinstance(before, Scalar) and not before.is_float and before.bits == after.bits
        if before == after or same_bits:
            return self.ev(op.operands[0], index)
        return self.opaque(value, "the bits of a float")

    _arith_bitcast = _tt_bitcast

    def masked(self, op: Op, index: Index) -> Bool | None:
        """Return the mask of an access; None if it has none."""
        mask = mask_of(op)
        return None if mask is None else self.ev(mask, index if shape_of(mask.type) else ())

    def _tt_load(self, op: Op, value: Value, index: Index) -> Any:
        element = element_of(value.type)
        if isinstance(element, Pointer):
            return self.opaque(value, "an address found in memory")
        with self.untracked():  # the obligations of mask and address belong to the access itself
            mask = self.masked(op, index)
            happens = conjunction([*self.path(op.block), *([] if mask is None else [mask])])
            loaded = self._loaded_integer(op, value, self.ev(op.operands[0], index), happens)
        if mask is None:
            return loaded
        others = [o for o in op.operands[1:] if o is not mask_of(op)]
        if others:
            other = self.ev(others[0], index if shape_of(others[0].type) else ())
        else:
            other = self.opaque(value, "a lane that is off, of a load without `other`", op.block)
        return z3.If(mask, loaded, other)

    def _loaded_integer(self, op: Op, value: Value, targets: Sequence[Target], happens: Bool) -> Any:
        """Return the integer in memory."""
        if any(target.argument is None for target in targets):
            return self.opaque(value, "a value found by an address that is not known")
        element = element_of(value.type)
        constant = self.scope.fresh(value.name, sort=z3.BoolSort() if element == I1 else None, home=op.block)
        buffers = [self.buffers[target.argument or ""] for target in targets]
        # A contract describes the elements of an unsigned tensor as unsigned; TTIR's integers are signed.
        is_unsigned = element != I1 and all(buffer.element.startswith("u") for buffer in buffers)
        if element != I1:
            in_range = (
                z3.And(constant >= 0, constant < 2**element.bits)
                if is_unsigned
                else in_type(constant, element.bits)
            )
            self.scope.know(in_range, because="the range of a type")
        for target, buffer in zip(targets, buffers, strict=True):
            assert target.argument is not None
            inside = z3.And(target.offset >= 0, target.offset < self.extents[target.argument])
            happens_inside = conjunction([happens, target.when, inside])
            # A kernel that writes to a tensor may have changed the elements that the contract describes.
            usable = (
                element != I1
                and self.constant(target.argument)
                and is_unsigned == buffer.element.startswith("u")
            )
            assumed = buffer.assumed(constant, target.offset) if usable else None
            if assumed is not None:
                fact = self.scope.without_division(assumed)
                self.scope.know(
                    fact, because=f"the contract, of elements of {target.argument}", when=[happens_inside]
                )
            loaded = Loaded(constant, target.argument, target.offset, happens_inside)
            if not self.constant(target.argument):
                self.scope.opaque[constant.get_id()] = "what is in memory that the kernel writes to"
            if usable:
                self._relate(loaded)
            self.scope.loaded[constant.get_id()] = loaded
        top = 2 ** (element.bits - 1)
        return z3.If(constant >= top, constant - 2 * top, constant) if is_unsigned else constant

    def _relate(self, loaded: Loaded) -> None:
        """Add the contract's assumptions about two elements of memory that nobody writes meanwhile."""
        buffer: Buffer = self.contract.arguments[loaded.argument]
        related = {buffer.inverse, *(n for n, b in self.buffers.items() if b.inverse == loaded.argument)}
        if buffer.distinct or buffer.ascending or buffer.inverse:
            related.add(loaded.argument)
        if not self.constant(loaded.argument):
            return
        for other in list(self.scope.loaded.values()):
            if other.argument in related and self.constant(other.argument) and not z3.is_bool(other.constant):
                facts = relations(self.contract, loaded, other)
                self.scope.know(*facts, because=f"the contract, of two elements of {loaded.argument}")

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """Return the arguments that are buffers."""
        return {name: b for name, b in self.contract.arguments.items() if isinstance(b, Buffer)}

    def constant(self, argument: str) -> bool:
        """Return whether the memory of an argument is constant while the kernel runs."""
        anywhere = None in self.stored and not self.buffers[argument].unreached
        return not anywhere and storage_of(self.contract, argument) not in self.stored

    def _reduce(self, op: Op, value: Value, index: Index) -> Any:
        result = (
            reduced(self, op, value, index) if op.name == "tt.reduce" else scanned(self, op, value, index)
        )
        return self.opaque(value, op.name) if result is None else result

    _tt_reduce = _tt_scan = _reduce

    # -- control flow --

    def path(self, block: Block | None) -> list[Bool]:
        """Return the conditions for a block to run, in the current program and iterations."""
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
        """Return the condition that some branch to a block is taken. Branches form no cycle; see `obligations`."""
        return self._remembered(("reaches", block), lambda: self._incoming(block))

    def _incoming(self, block: Block) -> Bool:
        branches = []
        assert block.region is not None
        for other in block.region.blocks:
            end = other.ops[-1] if other.ops else None
            for number, (target, _) in enumerate(end.successors if end else ()):
                if target is block and end is not None:
                    branches.append(self._branch(other, end, number))
        return z3.Or(*branches)

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
        """Return a counted loop. Its step is positive, which is an obligation."""
        loop: Loop = self._remembered(("loop", op), lambda: self._loop(op))
        return loop

    def _loop(self, op: Op) -> Loop:
        home = op.regions[0].block
        with self.strictly():
            lower, upper, step = (self.ev(o) for o in op.operands[:3])
        count = self.scope.fresh("iteration", home=home)
        if z3.is_int_value(z3.simplify(step)):
            counter = lower + count * step
        else:  # name the product: most queries only need its range
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
            return self._block_parameter(block, block.args.index(value), index)
        return self.opaque(value, f"a value carried by {op.name if op else 'a branch'}")

    def _block_parameter(self, block: Block, slot: int, index: Index) -> Any:
        """Evaluate an argument of a block that branches lead to."""
        result: Any = None
        incoming = [
            (self._branch(other, other.ops[-1], number), passed[slot])
            for other in (block.region.blocks if block.region else ())
            for number, (target, passed) in enumerate(other.ops[-1].successors if other.ops else ())
            if target is block
        ]
        for condition, passed in incoming:
            value = self.ev(passed, index)
            result = value if result is None else select(condition, value, result)
        return result

    def _scf_if(self, op: Op, value: Value, index: Index) -> Any:
        slot = op.results.index(value)
        with self.strictly():
            condition = self.ev(op.operands[0])
        first, second = (self.ev(region.block.ops[-1].operands[slot], index) for region in op.regions)
        return select(condition, first, second)

    def _scf_for(self, op: Op, value: Value, index: Index) -> Any:
        """Evaluate a loop's result: affine in its iterations, or any value that satisfies its invariants."""
        slot = op.results.index(value)
        start, step = self.ev(op.operands[3 + slot], index), self.increment(op, slot, index)
        invariants = self.invariants(op, slot) if step is None else []
        if step is None and not invariants:
            return self.opaque(value, "a value carried by scf.for")
        loop = self.loop(op)
        times = self._remembered(("times", op), lambda: self._times(op, loop))
        if step is not None:
            return advance(start, times * step)
        result = self.opaque(value, "a value carried by scf.for")
        end = Moment(
            result, start, loop, times, loop.lower + times * loop.step, self._starts(op, slot, index)
        )
        invariant_facts = z3.And(*(invariant(end) for invariant in invariants))
        fact = z3.If(loop.lower < loop.upper, invariant_facts, result == start)
        when = [*self.path(op.block), in_type(start, element_of(value.type).bits)]
        self.scope.know(fact, because="the invariants of a loop", when=when)
        return result

    def _times(self, op: Op, loop: Loop) -> Int:
        times = self.scope.fresh("iterations", home=op.block)
        end = loop.lower + times * loop.step
        counts_iterations = z3.And(times >= 1, end - loop.step < loop.upper, loop.upper <= end)
        fact = z3.If(loop.lower < loop.upper, counts_iterations, times == 0)
        # An obligation refutes a step that is not positive; here it must not cause a contradiction.
        when = [*self.path(op.block), loop.step >= 1]
        self.scope.know(fact, because="the number of iterations", when=when)
        return times

    def _carried(self, op: Op, slot: int, index: Index) -> Any:
        """Evaluate a loop-carried value: affine in the iteration, or the update of the previous iteration."""
        value = op.regions[0].block.args[1 + slot]
        key = value, tuple(i.get_id() for i in index)
        if key in self._in_progress or self._depth > 4:
            return self.opaque(value, "a value carried by scf.for")
        start, step = self.ev(op.operands[3 + slot], index), self.increment(op, slot, index)
        loop = self.loop(op)
        if step is not None:
            self._depends(value, index)
            return advance(start, loop.count * step)
        invariants = self.invariants(op, slot)
        if invariants:
            carried = self.opaque(value, "a value carried by scf.for")
            now = Moment(carried, start, loop, loop.count, loop.counter, self._starts(op, slot, index))
            fact = z3.And(
                *(invariant(now) for invariant in invariants),
                z3.Implies(loop.count == 0, carried == start),
            )
            when = [*self.path(op.regions[0].block), in_type(start, element_of(value.type).bits)]
            self.scope.know(fact, because="the invariants of a loop", when=when)
            return carried
        self._in_progress.add(key)
        try:
            with self.strictly(), self.isolated():
                updated = self.ev(op.regions[0].block.ops[-1].operands[slot], index)
        finally:
            self._in_progress.discard(key)
        if updated is None or isinstance(updated, tuple):
            return self.opaque(value, "a value carried by scf.for")
        own = self.scope.bound([loop.count], list(blocks_inside(op)))
        own.pop(loop.count.get_id(), None)
        (before,) = self.scope.copied([updated], own, [(loop.count, loop.count - 1)], op.regions[0].block)
        return select(loop.count == 0, start, before)

    def invariants(self, op: Op, slot: int) -> list[Invariant]:
        """Return the invariants of a loop-carried integer, in every lane, if its update depends on its old value."""
        key = ("invariants", op, slot)
        if key in self._in_progress or self._depth > 4:
            return []
        self._in_progress.add(key)
        try:
            result: list[Invariant] = self._remembered(key, lambda: self._invariants(op, slot))
            return result
        finally:
            self._in_progress.discard(key)

    def _invariants(self, op: Op, slot: int) -> list[Invariant]:
        body = op.regions[0].block
        value, end = body.args[1 + slot], body.ops[-1].operands[slot]
        element = element_of(value.type)
        if element == I1 or not isinstance(element, Scalar) or element.is_float:
            return []
        index = self.lane_index(shape_of(value.type))
        loop, start = self.loop(op), self.ev(op.operands[3 + slot], index)
        outside, inside = self.path(op.block), self.path(body)
        with self.strictly(), self.isolated():
            before = self.opaque(value, "a value carried by scf.for")
            self.memo[value, tuple(i.get_id() for i in index)] = before, {}
            updated = self.ev(end, index)
        if before.get_id() not in constants_of([updated, *self.scope.relevant([updated])]):
            return []

        def proven(facts: Sequence[Bool], goal: Bool) -> bool:
            premises = [*self.facts, *facts]
            premises += self.scope.relevant([*premises, goal])
            names = constants_of([*premises, goal])
            divisions = [d for d in self.scope.divisions.values() if d.quotient.get_id() in names]
            lemmas: dict[str, Lemmas] = {
                "quotients": lambda: about_quotients([*premises, goal], divisions),
                "products": lambda: about_products([*premises, goal]),
            }
            return decide(premises, goal, lemmas, QUICK).verdict == "proven"

        return inductive(
            Moment(before, start, loop, loop.count, loop.counter, self._starts(op, slot, index)),
            updated,
            lambda goal: proven([*outside, loop.lower < loop.upper], goal),
            lambda facts, goal: proven([*inside, *facts], goal),
        )

    def _starts(self, op: Op, slot: int, index: Index) -> list[Int]:
        """Return the initial values of the other loop-carried integers of the same shape."""
        own = op.operands[3 + slot]
        others = [o for o in op.operands[3:] if o is not own and shape_of(o.type) == shape_of(own.type)]
        with self.untracked():
            values = [self.ev(o, index) for o in others]
        return [start for start in values if z3.is_expr(start) and z3.is_int(start)]

    def increment(self, op: Op, slot: int, index: Index) -> Int | None:
        """Return the amount that each iteration adds to a loop-carried value, if it is loop-invariant."""
        key = ("increment", op, slot, tuple(i.get_id() for i in index))
        return self._remembered(key, lambda: self._increment(op, slot, index), index)

    def _increment(self, op: Op, slot: int, index: Index) -> Int | None:
        body = op.regions[0].block
        value, end = body.args[1 + slot], body.ops[-1].operands[slot]
        element = element_of(value.type)
        if element == I1 or (isinstance(element, Scalar) and element.is_float) or self._depth > 4:
            return None
        loop, placeholder = self.loop(op), self.scope.fresh("carried", home=body)
        key = value, tuple(i.get_id() for i in index)
        start = self.ev(op.operands[3 + slot], index) if isinstance(element, Pointer) else None
        if start is not None and len(start) != 1:
            return None
        with self.isolated():
            stand_in_value = (
                (Target(start[0].when, start[0].argument, placeholder),) if start else placeholder
            )
            self.memo[key] = stand_in_value, {}
            self._seen.append({})
            after = self.ev(end, index)
            seen = self._seen.pop()
        if isinstance(after, tuple):
            if len(after) != 1 or start is None or after[0].argument != start[0].argument:
                return None
            after = after[0].offset
        step = z3.simplify(after - placeholder, som=True)
        own = self.scope.bound([loop.count, loop.counter, placeholder], list(blocks_inside(op)))
        if not own.keys().isdisjoint(constants_of([step])):
            return None
        update = end.producer
        if (
            update is not None
            and update.name in ("arith.addi", "tt.addptr", "arith.subi")
            and value in update.operands
        ):
            # the sum is the value itself, which has to fit wherever it is used
            seen = {k: d for k, d in seen.items() if d.value is not end}
        self._seen[-1].update(seen)
        return step
