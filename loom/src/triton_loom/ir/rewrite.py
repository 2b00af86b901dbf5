"""Rewrites of the IR before scheduling.

A tile of offsets or pointers that a loop advances (`ptrs += BLOCK * stride`) is replaced by its initial tile plus a
scalar displacement. Pointer tiles then never live in memory, and the address of a chunk stays an affine
expression that a vector load can use. `sorting` recognizes sorting networks.
"""

from __future__ import annotations

from dataclasses import dataclass

from .sorting import recognize_sorting
from .ttir import I1, I64, Block, Function, Module, Op, Pointer, Scalar, Tensor, Value, element_of


def rewrite(module: Module) -> Module:
    """Apply all rewrites in place."""
    for function in module.functions.values():
        recognize_sorting(function)
        for op in list(function.body.walk()):
            if op.name == "scf.for":
                _scalarize_moving_tiles(op, function)
    return module


@dataclass
class _Step:
    """Increment of one iteration: a scalar added to every element, or a loop-invariant tile."""

    scalar: Value | None = None  # a scalar value, or
    literal: int | None = None  # a constant, or
    tile: Value | None = None  # a loop-invariant tile


def _scalarize_moving_tiles(loop: Op, function: Function) -> None:
    body = loop.regions[0].block
    terminator = body.ops[-1]
    for index in reversed(range(len(loop.results))):
        arg, init, result = body.args[1 + index], loop.operands[3 + index], loop.results[index]
        if not isinstance(arg.type, Tensor) or arg.type.element == I1 or arg.type.element.is_float:
            continue
        steps = _steps(terminator.operands[index], arg, loop)
        if steps is None:
            continue
        element = arg.type.element
        counter_type = I64 if isinstance(element, Pointer) or any(s.tile for s in steps) else element
        zero = _constant(0, counter_type, loop)
        displacement = Value(f"{arg.name}_moved", counter_type, owner=body)
        final = Value(f"{result.name}_moved", counter_type, producer=loop)
        loop.operands[3 + index] = zero
        body.args[1 + index] = displacement
        loop.results[index] = final

        invariant = next((s.tile for s in steps if s.tile), None)
        inside = _Builder(body, 0, loop.location)
        _replace(function, arg, inside.displaced(init, displacement, invariant))
        assert loop.block
        after = _Builder(loop.block, loop.block.ops.index(loop) + 1, loop.location)
        _replace(function, result, after.displaced(init, final, invariant))

        end = _Builder(body, len(body.ops) - 1, loop.location)
        value = displacement
        for step in steps:
            value = end.add(value, step, counter_type)
        terminator.operands[index] = value


def _steps(value: Value, arg: Value, loop: Op) -> list[_Step] | None:
    """Express `value` as `arg` plus steps; None if it is anything else. Scalar and tile steps do not mix."""
    steps: list[_Step] = []
    while value is not arg:
        op = value.producer
        if op is None or op.name not in ("tt.addptr", "arith.addi"):
            return None
        base, step = op.operands
        if op.name == "arith.addi" and _leads_to(step, arg):
            base, step = step, base
        steps.append(_step(step, loop))
        value = base
    if not steps or any(s.scalar is None and s.literal is None and s.tile is None for s in steps):
        return None
    tiles = [s for s in steps if s.tile]
    if tiles and (len(steps) > 1):
        return None
    return steps


def _leads_to(value: Value, arg: Value) -> bool:
    while value is not arg:
        op = value.producer
        if op is None or op.name not in ("tt.addptr", "arith.addi"):
            return False
        value = op.operands[0]
    return True


def _step(value: Value, loop: Op) -> _Step:
    op = value.producer
    if op and op.name == "tt.splat":
        return _Step(scalar=op.operands[0])
    if op and op.name == "arith.constant" and isinstance(op.attrs["value"], int):
        return _Step(literal=op.attrs["value"])
    if not _defined_inside(value, loop):
        return _Step(tile=value)
    return _Step()


def _defined_inside(value: Value, loop: Op) -> bool:
    block: Block | None = value.producer.block if value.producer else value.owner
    while block is not None:
        if block in loop.regions[0].blocks:
            return True
        parent = block.region.parent if block.region else None
        block = parent.block if parent else None
    return False


def _constant(number: int, type_: Scalar | Pointer, before: Op) -> Value:
    assert before.block
    return _Builder(before.block, before.block.ops.index(before), before.location).constant(number, type_)


@dataclass
class _Builder:
    """Inserter of operations into a block, from a position on."""

    block: Block
    position: int
    location: str

    def op(self, name: str, operands: list[Value], type_: object, **attrs: object) -> Value:
        result = Value(f"{operands[0].name if operands else 'c'}_{name.split('.')[-1]}", type_)  # type: ignore[arg-type]
        op = Op(
            name,
            operands,
            [result],
            dict(attrs),
            location=self.location,
            origin=self.location,
            block=self.block,
        )
        result.producer = op
        self.block.ops.insert(self.position, op)
        self.position += 1
        return result

    def constant(self, number: int, type_: Scalar | Pointer) -> Value:
        return self.op("arith.constant", [], type_, value=number)

    def displaced(self, init: Value, distance: Value, invariant: Value | None) -> Value:
        """Return init + distance, or init + distance * invariant."""
        assert isinstance(init.type, Tensor)
        element = init.type.element
        if invariant is None:
            step_type = Tensor(init.type.shape, element_of(distance.type))
            step = self.op("tt.splat", [distance], step_type)
        else:
            assert isinstance(invariant.type, Tensor)
            int64_type = Tensor(init.type.shape, I64)
            if invariant.type.element != I64:
                invariant = self.op("arith.extsi", [invariant], int64_type)
            step = self.op("arith.muli", [self.op("tt.splat", [distance], int64_type), invariant], int64_type)
            if isinstance(element, Scalar) and element != I64:
                step = self.op("arith.trunci", [step], init.type)
        return self.op("tt.addptr" if isinstance(element, Pointer) else "arith.addi", [init, step], init.type)

    def add(self, value: Value, step: _Step, type_: Scalar | Pointer) -> Value:
        if step.tile is not None:
            addend = self.constant(1, type_)
        elif step.scalar is not None:
            addend = step.scalar
            if addend.type != type_:
                addend = self.op("arith.extsi", [addend], type_)
        else:
            assert step.literal is not None
            addend = self.constant(step.literal, type_)
        return self.op("arith.addi", [value, addend], type_)


def _replace(function: Function, old: Value, new: Value) -> None:
    for op in function.body.walk():
        if op is new.producer:
            continue
        op.operands = [new if v is old else v for v in op.operands]
        op.successors = [(b, [new if v is old else v for v in vs]) for b, vs in op.successors]
