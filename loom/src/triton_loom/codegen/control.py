"""Control flow: blocks, loops, branches and calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from ..ir.ttir import Block, Function, Op, Pointer, Region, Tensor, Value, element_of, shape_of
from .accesses import exact_result
from .cpp import c_string, c_type, literal, size_of
from .forms import Index, wide
from .frame import Frame, Target, Unit
from .nest import Buffer, LoopNest
from .operations import ELEMENTWISE, IGNORED, Unsupported
from .schedule import is_virtual, is_write, schedule


class ControlFlow(Frame):
    """Emitter of a function's operations in order; `on_<operation>` writes an operation that is not an expression."""

    def __init__(self, unit: Unit, body: Region) -> None:
        super().__init__(unit, schedule(Function("", [], [], body, False)))
        self.body = body
        self.result_buffers: dict[int, Buffer] = {}
        self.labels: dict[Block, str] = {}
        self.crossing: set[Value] = set()  # buffered values that another block needs

    def run(self) -> list[str]:
        blocks = self.body.blocks
        if len(blocks) == 1:
            self.ops(blocks[0].ops)
        else:
            self.declare_across(blocks)
            for block in blocks:
                self.lines.append("{" if block is blocks[0] else f"{self.labels[block]}: {{")
                self.ops(block.ops)
                self.lines.append("}")
        return self.declarations + self.lines

    def declare_across(self, blocks: list[Block]) -> None:
        """Declare before the first block, because of gotos, the values that one block computes and another may need."""
        for block in blocks:
            self.labels[block] = self.unit.unique("block")
            carried = block.args if block is not blocks[0] else []
            for value in [
                *carried,
                *(r for op in block.ops for r in op.results if op.name != "arith.constant"),
            ]:
                if not isinstance(value.type, Tensor):
                    self.declared.add(value)
                    self.declarations.append(f"{c_type(value.type)} {self.bind(value, value.name)};")
                elif value.producer is None:
                    self.buffer_for(value).filled = True
        home = {op: block for block in blocks for top in block.ops for op in top.walk()}
        for op, block in home.items():
            passed = [v for _, values in op.successors for v in values]
            for value in self.leads_to([*op.operands, *passed]):
                if value.producer in home and home[value.producer] is not block:
                    self.crossing.add(value)

    def ops(self, ops: list[Op]) -> None:
        for op in ops:
            self.op(op)

    def op(self, op: Op) -> None:
        if op.name in IGNORED:
            return
        self.run_op(op)
        if hints := self.accesses.hints(op):
            self.check_hints(op, hints)

    def run_op(self, op: Op) -> None:
        if op.results and isinstance(op.result.type, Tensor) and is_virtual(op.result):
            self.pending += [v for v in op.results if v in self.plan.buffered and not self.is_filled(v)]
            return
        handler = getattr(self, "on_" + re.sub(r"\W", "_", op.name), None)
        if handler is None and op.name in ELEMENTWISE:
            operands = [self.scalar(v) for v in op.operands]
            if integer := self.accesses.watched(op):
                exact = exact_result(op, *(wide(text, integer) for text in operands))
                outside = f"lanes_outside<{integer.bits}, {str(integer.signed).lower()}, 1>({exact}, {exact})"
                self.lines.append(f"if ({outside}) {self.accesses.overflow(op, exact)}")
            self.let(op.result, ELEMENTWISE[op.name].write(op, operands, 1))
            return
        if handler is None:
            raise Unsupported(op)
        if op.name.startswith("scf."):
            used_inside = [v for inner in op.walk() for v in inner.operands]
            self.flush(op, self.leads_to(used_inside))
        elif is_write(op):
            self.flush(op, set())
        elif op.successors:
            for value in list(self.pending):
                if value in self.crossing and value in self.pending:
                    self.fill(value)
            self.prepare([v for _, passed in op.successors for v in passed], None)
        self.lap(op)
        handler(op)

    def check_hints(self, op: Op, hints: dict[str, list[int]]) -> None:
        """Check every element of a value against the promises of `tl.multiple_of` and its like.

        Along a dimension these promise runs of consecutive (or equal) elements, each beginning with a multiple.
        Without a promise about runs, a run is what counts up by one."""
        value, shape = op.result, shape_of(op.result.type)
        self.prepare([value], None)
        nest = LoopNest(self, shape, lanes=1, values=None)
        nest.looks_ahead = True
        element = element_of(value.type)
        size = size_of(element.pointee) if isinstance(element, Pointer) else 1  # type: ignore[arg-type]

        def number(index: Index) -> str:
            return f"(i64){nest.eval(value, index).expr}"

        def moved(dim: int, text: str) -> Index:
            form = nest.index[dim]
            return (*nest.index[:dim], replace(form, expr=text.format(form.expr)), *nest.index[dim + 1 :])

        own = number(nest.index)
        for dim in range(max(1, len(shape))):
            multiple, run, equal = (
                hints.get(name, [1] * 8)[dim] for name in ("divisibility", "contiguity", "constancy")
            )
            at = nest.index[dim].expr if shape else "0"
            conditions = []
            if shape and run > 1:
                first = number(moved(dim, f"({{}} / {run} * {run})"))
                conditions.append(f"{own} - {first} == {at} % {run} * {size}ll")
            if shape and equal > 1:
                conditions.append(f"{own} == {number(moved(dim, f'({{}} / {equal} * {equal})'))}")
            if multiple > 1:
                starts = f"{at} % {run} == 0"
                if shape and run == 1 and equal == 1:
                    starts = f"{at} == 0 || {own} != {number(moved(dim, '({0} ? {0} - 1 : 0)'))} + {size}ll"
                elif equal > 1:
                    starts = f"{at} % {equal} == 0"
                conditions.append(f"!({starts}) || {own} % {multiple} == 0")
            for condition in conditions:
                for statement in self.accesses.promise(op, condition, own):
                    nest.do(statement, nest.depth)
        self.run_nest(nest)

    # -- scalars --

    def on_arith_constant(self, op: Op) -> None:
        pass  # written as a literal where it is used

    def on_ub_poison(self, op: Op) -> None:
        self.let(op.result, literal(op.result.type, 0))

    def on_tt_get_program_id(self, op: Op) -> None:
        self.let(op.result, f"p.id[{'xyz'.index(op.attrs['flags'][0])}]")

    def on_tt_get_num_programs(self, op: Op) -> None:
        self.let(op.result, f"p.grid[{'xyz'.index(op.attrs['flags'][0])}]")

    def on_tt_addptr(self, op: Op) -> None:
        pointer, offset = op.operands
        self.let(op.result, f"{self.scalar(pointer)} + {self.scalar(offset)}")

    # -- functions --

    def on_tt_return(self, op: Op) -> None:
        targets = [
            Target(buffer=self.result_buffers[i])
            if i in self.result_buffers
            else Target(variable=f"result{i}")
            for i in range(len(op.operands))
        ]
        self.assign(targets, op.operands, op)
        self.lines.append("return;")

    on_tt_map_elementwise_return = on_tt_return

    def on_tt_call(self, op: Op) -> None:
        name = self.unit.called(op.attrs["callee"])
        passed = ["p", *(self.scalar(v) for v in op.operands)]
        for result in op.results:
            target = self.target(result)
            passed.append(target.buffer.name if target.buffer else str(target.variable))
        self.lines.append(f"{name}({', '.join(passed)});")

    # -- structured control flow --

    def region(self, block: Block, finish: Callable[[Op], None]) -> None:
        """Write a structured block and, by `finish`, its terminator. Values pending outside stay pending."""
        outer, self.pending = self.pending, []
        *ops, terminator = block.ops
        self.ops(ops)
        finish(terminator)
        self.pending = outer

    def on_scf_for(self, op: Op) -> None:
        lower, upper, step = (self.scalar(v) for v in op.operands[:3])
        body = op.regions[0].block
        targets = [self.target(result) for result in op.results]
        self.assign(targets, op.operands[3:], op, 3)
        for arg, target in zip(body.args[1:], targets, strict=True):
            self.same_storage(arg, target)
        self.share_buffers(body, targets)
        induction = self.bind(body.args[0], body.args[0].name)
        type_ = c_type(body.args[0].type)
        condition = f"{induction} < {upper}"
        if op.attrs.get("unsigned"):
            unsigned = type_.replace("i", "u")
            condition = f"({unsigned}){induction} < ({unsigned}){upper}"
        self.comment(op)
        steps = self.accesses.loop_step(op, induction, step)
        if not op.attrs.get("unsigned"):
            is_endless = (
                f"{lower} < {upper} && {step} <= 0"  # a counter that wraps around is a finding of its own
            )
            is_endless = is_endless if steps else f"never_ends<{type_}>({lower}, {upper}, {step})"
            why = f"{op.location}: the loop would never end, because of its step or because its counter wraps around"
            self.lines.append(f"if ({is_endless}) return fail(p, {c_string(why)});")
        self.lines.append(f"for ({type_} {induction} = {lower}; {condition}; {induction} += {step}) {{")
        self.region(body, lambda end: self.assign(targets, end.operands, end))
        self.lines += [*steps, "}"]

    def share_buffers(self, body: Block, targets: list[Target]) -> None:
        """Compute a value that becomes the next iteration's tile right in that tile's buffer where this is safe: every
        reader of the old tile has read it by then, or reads it element for element in the same nest."""
        terminator = body.ops[-1]
        for slot, (value, target) in enumerate(zip(terminator.operands, targets, strict=True)):
            op = value.producer
            if not target.buffer or op is None or op.block is not body or value in self.buffers:
                continue
            if terminator.operands.count(value) > 1 or element_of(value.type) != target.buffer.element:
                continue
            if value in self.plan.buffered:
                home = self.plan.tee.get(value)
            elif op.name in ("tt.dot", "tt.dot_scaled"):
                home = self.plan.nest(op, 2)  # the nest that writes the accumulator's first value
            else:
                continue
            readers = self.plan.uses.get(body.args[1 + slot], {})
            written_at = home.position if home else self.plan.position[op]
            if home and all(
                n.position < written_at or (n is home and use.direct) for n, use in readers.items()
            ):
                shared = Buffer(target.buffer.name, target.buffer.element, target.buffer.shape)
                self.buffers[value] = shared
                self.aliases[shared] = target.buffer

    def on_scf_if(self, op: Op) -> None:
        targets = [self.target(result) for result in op.results]
        self.comment(op)
        self.lines.append(f"if ({self.scalar(op.operands[0])}) {{")
        for number, region in enumerate(op.regions):
            if number:
                self.lines.append("} else {")
            self.region(region.block, lambda end: self.assign(targets, end.operands, end))
        self.lines.append("}")

    def on_scf_while(self, op: Op) -> None:
        before, after = (region.block for region in op.regions)
        carried = [self.target(arg) for arg in before.args]
        self.assign(carried, op.operands, op)
        results = [self.target(result) for result in op.results]
        for arg, target in zip(after.args, results, strict=True):
            self.same_storage(arg, target)

        def leave_or_go_on(condition: Op) -> None:
            self.assign(results, condition.operands[1:], condition, 1)
            self.lines.append(f"if (!{self.scalar(condition.operands[0])}) break;")

        self.comment(op)
        spin, rounds = self.unit.unique("spin"), self.unit.unique("rounds")
        only_waits = "true" if _only_waits(op) else "false"
        self.lines += [
            f"Spin {spin}(p, {c_string(op.location)}, {only_waits});",
            f"i32 {rounds} = Spin::FIRST;",
            "while (true) {",
            f"if (__builtin_expect(--{rounds} == 0, 0) && !({rounds} = {spin}.go_on())) return;",
        ]
        self.region(before, leave_or_go_on)
        self.region(after, lambda end: self.assign(carried, end.operands, end))
        self.lines.append("}")

    # -- gotos --

    def go(self, op: Op, successor: int) -> None:
        block, passed = op.successors[successor]
        targets = [
            Target(buffer=self.buffers[a]) if isinstance(a.type, Tensor) else Target(variable=self.scalars[a])
            for a in block.args
        ]
        self.assign(targets, passed, op, 1000 * successor)
        self.lines.append(f"goto {self.labels[block]};")

    def on_cf_br(self, op: Op) -> None:
        self.go(op, 0)

    def on_cf_cond_br(self, op: Op) -> None:
        self.lines.append(f"if ({self.scalar(op.operands[0])}) {{")
        self.go(op, 0)
        self.lines.append("} else {")
        self.go(op, 1)
        self.lines.append("}")


def _only_waits(loop: Op) -> bool:
    """Return whether a `while` loop only polls memory: no round stores anything or depends on the round before."""
    inside = {op for op in loop.walk() if op is not loop}
    if not any(op.name.startswith("tt.atomic") or op.name == "tt.load" for op in inside):
        return False
    seen: set[Value] = set()
    todo = list(loop.regions[1].block.ops[-1].operands)
    while todo:
        value = todo.pop()
        if value.owner is not None and value.owner.region in loop.regions:
            return False
        if value not in seen and value.producer in inside:
            seen.add(value)
            todo += [v for op in value.producer.walk() for v in op.operands]
    return not any(op.name == "tt.store" for op in inside)
