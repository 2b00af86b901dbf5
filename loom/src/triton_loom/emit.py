"""Turns a TTIR module into C++: control flow, the operations that run loop nests, and the kernel's frame.

    generated = generate(ttir_text, options)
    generated.source      the C++ text, one function per kernel program, readable from top to bottom

Scalars become C++ variables where they are computed. Tiles are evaluated inside loop nests (`nest`), as the plan of
`schedule` says; the few that are kept live in a scratch area that each thread gets from the launcher.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from .nest import I1, I32, Form, LoopNest, declare_const
from .ops import (
    CONTROL,
    EFFECTS,
    ELEMENTWISE,
    IGNORED,
    ROOTS,
    SHAPES,
    Lanes,
    Unsupported,
    c_type,
    literal,
    memory_type,
    narrow,
    size_of,
    vector_of,
    widen,
)
from .rewrite import rewrite
from .schedule import CHUNK, Nest, is_virtual, is_write, lane_dimension, schedule
from .ttir import Block, Function, Module, Op, Pointer, Region, Scalar, Tensor, Value, element_of, parse, shape_of

F32, F64, I8 = Scalar("f32"), Scalar("f64"), Scalar("i8")
# Each header with a sign that the text needs it; what every kernel needs has none.
_HEADERS = {
    "simd.h": "",
    "tile.h": "",
    "casts.h": "_from_",
    "math.h": r"loom_math::|\b(shl|shr|sar|div[su]|rem[su]|mulhi_\w+)\(",
    "dot.h": r"\bdot(_i8)?<",
    "launch.h": "",
    "print.h": "print_",
}
_RESERVED = set(
    """alignas alignof and asm auto bool break case catch char class const constexpr continue decltype default delete
    do double else enum explicit export extern false float for friend goto if inline int long mutable namespace new
    not nullptr operator or private protected public register return short signed sizeof static struct switch template
    this throw true try typedef typeid typename union unsigned using virtual void volatile while xor
    args p program scratch load store mask select invert bits convert splat ramp iota lower upper half vec lane like all
    any least gather scatter dot shl shr sar divs rems divu remu main Args Program Status printf W
    i8 i16 i32 i64 u8 u16 u32 u64 f32 f64""".split()
)


@dataclass(frozen=True)
class Generated:
    source: str
    name: str
    scratch_bytes: int
    serial: bool  # programs must run one after another for the result not to depend on threads


@dataclass(eq=False)
class Buffer:
    """A tile in scratch memory, row-major."""

    name: str
    element: Scalar | Pointer
    shape: tuple[int, ...]
    filled: bool = False

    @property
    def size(self) -> int:
        size = 1
        for extent in self.shape:
            size *= extent
        return size


def generate(text: str, options: object = None) -> Generated:
    module = rewrite(parse(text))
    return _ModuleEmitter(module).run()


def _depends_on_order(module: Module) -> bool:
    """Whether some atomic's outcome depends on which program comes first.

    Integer sums, maxima and bit operations come out the same in any order as long as nobody looks at the old value;
    float sums, exchanges, locks and tickets do not.
    """
    for function in module.functions.values():
        used = {v for op in function.body.walk() for v in op.operands}
        for op in function.body.walk():
            if op.name == "tt.atomic_cas":
                return True
            if op.name == "tt.atomic_rmw":
                kind = op.attrs["flags"][0]
                if kind in ("fadd", "exch") or any(v in used for v in op.results):
                    return True
    return False


class _ModuleEmitter:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.top: list[str] = []  # what stands before the program: tables, combiners, called functions
        self.scratch = 0
        self.counter = 0
        self.emitted: dict[str, str] = {}

    def unique(self, stem: str) -> str:
        self.counter += 1
        return f"{stem}_{self.counter}"

    def run(self) -> Generated:
        entry = self.module.entry
        name = re.sub(r"\W", "_", entry.name)
        emitter = FunctionEmitter(self, entry.body)
        fields = []
        for arg in entry.args:
            emitter.bind(arg, arg.name)
            fields.append(f"{memory_type(arg.type)} {emitter.scalars[arg]};")
        body = [
            declare_const(c_type(a.type), name, f"args.{name}{' != 0' if a.type == I1 else ''}")
            for a, name in emitter.scalars.items()
        ]
        body += emitter.run()
        where = f"  // {entry.location}" if entry.location else ""
        lines = [
            *self.top,
            "struct Args {",
            *fields,
            "};",
            "",
            f"static void program(const Args &args, const Program &p) {{{where}",
            *body,
            "}",
            "",
        ]
        scratch = -(-self.scratch // 64) * 64
        lines.append(f"LOOM_KERNEL({name}, Args, program, {scratch})")
        text = _indent(lines)
        includes = [f'#include "{header}"\n' for header, sign in _HEADERS.items() if re.search(sign, text)]
        return Generated("".join(includes) + "\n" + text, entry.name, scratch, _depends_on_order(self.module))

    def allocate(self, size: int) -> int:
        offset = self.scratch
        self.scratch += -(-size // 64) * 64
        return offset

    def function(self, name: str) -> str:
        """The C++ name of a called function, which is emitted once."""
        if name not in self.emitted:
            self.emitted[name] = re.sub(r"\W", "_", name)
            callee = self.module.functions[name]
            self.emit_function(self.emitted[name], callee.args, callee.results, callee.body, callee.location)
        return self.emitted[name]

    def emit_function(
        self, name: str, args: list[Value], results: list, body: Region, location: str = ""
    ) -> None:
        emitter = FunctionEmitter(self, body)
        parameters = ["const Program &p"]
        for arg in args:
            emitter.bind(arg, arg.name)
            parameters.append(f"{c_type(arg.type)} {emitter.scalars[arg]}")
        for i, type_ in enumerate(results):
            if isinstance(type_, Tensor):
                parameters.append(f"{memory_type(type_.element)} *result{i}")
                emitter.result_buffers[i] = Buffer(f"result{i}", type_.element, type_.shape)
            else:
                parameters.append(f"{c_type(type_)} &result{i}")
        lines = emitter.run()
        where = f"  // {location}" if location else ""
        self.top += [f"static void {name}({', '.join(parameters)}) {{{where}", *lines, "}", ""]


@dataclass
class _Target:
    """Where an assignment goes: a C++ variable or a buffer."""

    variable: str | None = None
    buffer: Buffer | None = None


class FunctionEmitter:
    def __init__(self, module: _ModuleEmitter, body: Region) -> None:
        self.module = module
        self.body = body
        self.plan = schedule(Function("", [], [], body, False))
        self.lines: list[str] = []
        self.scalars: dict[Value, str] = {}
        self.scalar_names: set[str] = set()
        self.buffers: dict[Value, Buffer] = {}
        self.result_buffers: dict[int, Buffer] = {}
        self.pending: list[Value] = []  # buffered values met but not computed yet
        self.declared_on_top: set[Value] = set()
        self.labels: dict[Block, str] = {}
        self.declarations: list[str] = []
        self.aliases: dict[Buffer, Buffer] = {}  # a buffer that is another one under the name of a new value

    # -- names --

    def identifier(self, name: str) -> str:
        name = re.sub(r"\W", "_", name)
        if name[0].isdigit():
            name = f"v{name}"
        return f"{name}_" if name in _RESERVED or re.fullmatch(r"i\d+|result\d+", name) else name

    def bind(self, value: Value, name: str) -> str:
        name = self.identifier(name)
        while name in self.scalar_names:
            name = self.module.unique(name)
        self.scalar_names.add(name)
        self.scalars[value] = name
        return name

    def scalar(self, value: Value) -> str:
        if value not in self.scalars and value.producer and value.producer.name == "arith.constant":
            return literal(value.type, value.producer.attrs["value"])
        return self.scalars[value]

    def let(self, value: Value, expr: str) -> None:
        if value in self.declared_on_top:
            self.lines.append(f"{self.scalars[value]} = {expr};")
        else:
            self.lines.append(declare_const(c_type(value.type), self.bind(value, value.name), expr))

    def comment(self, op: Op) -> None:
        if op.location:
            self.lines.append(f"// {op.location.rsplit('/', 1)[-1]}")

    # -- buffers --

    def new_buffer(self, name: str, element: Scalar | Pointer, shape: tuple[int, ...]) -> Buffer:
        buffer = Buffer(self.module.unique(self.identifier(name)), element, shape)
        offset = self.module.allocate(buffer.size * size_of(element))
        self.scalar_names.add(buffer.name)
        type_ = memory_type(element)
        self.declarations.append(
            f"{type_} *const {buffer.name} = ({type_} *)(p.scratch + {offset});"
            f"  // {'x'.join(map(str, shape))} {element}"
        )
        return buffer

    def buffer_for(self, value: Value) -> Buffer:
        if value not in self.buffers:
            self.buffers[value] = self.new_buffer(value.name, element_of(value.type), shape_of(value.type))
        return self.buffers[value]

    def table(self, op: Op) -> Buffer:
        """A constant tile whose elements differ: a static array."""
        value = op.result
        if value not in self.buffers:
            element, shape = element_of(value.type), shape_of(value.type)
            name = self.module.unique("table")
            numbers = op.attrs["value"]
            if isinstance(numbers, bytes):
                raise Unsupported(op, "a constant tile printed as raw bytes")
            items = ", ".join("-1" if n is True else literal(element, n) for n in numbers)
            self.module.top.append(f"static const {memory_type(element)} {name}[] = {{{items}}};")
            self.buffers[value] = Buffer(name, element, shape, filled=True)
        return self.buffers[value]

    def reachable(self, value: Value, found: dict[Value, bool], direct: bool = True) -> None:
        """Stored values that evaluating `value` reads; True where only at the nest's own index."""
        if not isinstance(value.type, Tensor):
            return
        buffer = self.buffers.get(value)
        if (buffer is not None and buffer.filled) or not is_virtual(value):
            found[value] = found.get(value, True) and direct
            return
        op = value.producer
        assert op is not None
        direct = direct and (op.name in ELEMENTWISE or op.name in ("tt.load", "tt.addptr"))
        for operand in op.operands:
            self.reachable(operand, found, direct)

    def prepare(self, values: list[Value], nest: Nest | None) -> None:
        """Fills every buffered value that evaluating these needs, except those that this nest tees itself."""
        seen: set[Value] = set()

        def visit(value: Value) -> None:
            if value in seen or not isinstance(value.type, Tensor) or not is_virtual(value):
                return
            seen.add(value)
            buffer = self.buffers.get(value)
            if buffer is not None and buffer.filled:
                return
            if value in self.plan.buffered and (nest is None or self.plan.tee.get(value) is not nest):
                self.fill(value)
                return
            assert value.producer
            for operand in value.producer.operands:
                visit(operand)

        for value in values:
            visit(value)

    def finish(self, nest: LoopNest) -> None:
        for value in nest.teed:
            self.buffers[value].filled = True
            if value in self.pending:
                self.pending.remove(value)

    def fill(self, value: Value) -> None:
        """Computes a buffered value in a nest of its own."""
        buffer = self.buffer_for(value)
        assert value.producer
        self.prepare(value.producer.operands, None)
        loops = LoopNest(self, buffer.shape)
        form = loops.define(value.producer, value, loops.index)
        loops.write(buffer, loops.linear(loops.index, buffer.shape), form)
        self.comment(value.producer)
        self.lines += loops.render()
        self.finish(loops)
        buffer.filled = True
        if value in self.pending:
            self.pending.remove(value)

    def write_to(self, buffer: Buffer, value: Value, nest: Nest | None = None) -> None:
        """buffer = value, converted to the buffer's element type where that is wider (dot operands)."""
        self.prepare([value], nest)
        loops = LoopNest(self, buffer.shape)
        form = loops.at_own_index(value)
        text = loops.vec(form)
        source = element_of(value.type)
        if source != buffer.element and isinstance(source, Scalar):
            text = widen(source.name, text)
            if buffer.element == F64:
                text = f"convert<{vector_of('f64', loops.lanes)}>({text})"
        loops.write(buffer, loops.linear(loops.index, buffer.shape), form, text)
        self.lines += loops.render()
        self.finish(loops)

    def stored(self, value: Value, nest: Nest | None = None, element: Scalar | None = None) -> Buffer:
        """A buffer that holds the value (as `element`, if given), made if there is none."""
        wanted = element or element_of(value.type)
        buffer = self.buffers.get(value)
        if buffer is None and value in self.plan.buffered:
            self.prepare([value], None)
            buffer = self.buffers[value]
        if buffer is not None and buffer.filled and buffer.element == wanted:
            return buffer
        copy = self.new_buffer(value.name, wanted, shape_of(value.type))
        self.write_to(copy, value, nest)
        copy.filled = True
        return copy

    def flush(self, op: Op, region_uses: set[Value] | None = None) -> None:
        """Before an operation that writes memory or may run its body many times: computes what must not wait."""
        writes = is_write(op)
        for value in list(self.pending):
            if value not in self.pending:
                continue
            here = self.plan.tee.get(value)
            if here is not None and here.op is op and not op.regions:
                continue
            inside = region_uses is not None and value in region_uses
            if inside or (writes and value in self.plan.reads_memory):
                self.fill(value)

    # -- blocks and control flow --

    def run(self) -> list[str]:
        blocks = self.body.blocks
        if len(blocks) > 1:
            self.declare_across(blocks)
        for block in blocks:
            if len(blocks) > 1:
                label = self.labels[block]
                self.lines += [f"{label}: {{"] if block is not blocks[0] else ["{"]
            self.block(block)
            if len(blocks) > 1:
                self.lines.append("}")
        return self.declarations + self.lines

    def declare_across(self, blocks: list[Block]) -> None:
        """With gotos, what one block computes and another needs is declared before the first."""
        for i, block in enumerate(blocks):
            self.labels[block] = self.module.unique("block")
            for arg in block.args if i else []:
                if isinstance(arg.type, Tensor):
                    self.buffer_for(arg).filled = True
                else:
                    self.declare(arg)
            for op in block.ops:
                for value in op.results:
                    if not isinstance(value.type, Tensor) and op.name != "arith.constant":
                        self.declare(value)
        home = {op: block for block in blocks for top in block.ops for op in top.walk()}
        self.crossing = {
            v
            for op, block in home.items()
            for v in self.virtual_leaves(op)
            if v.producer in home and home[v.producer] is not block
        }

    crossing: set[Value] = set()

    def virtual_leaves(self, op: Op) -> set[Value]:
        """Buffered values that an operation's operands lead to through virtual ones."""
        found: set[Value] = set()
        seen: set[Value] = set()

        def visit(value: Value) -> None:
            if value in seen or not isinstance(value.type, Tensor) or not is_virtual(value):
                return
            seen.add(value)
            if value in self.plan.buffered:
                found.add(value)
            assert value.producer
            for operand in value.producer.operands:
                visit(operand)

        for value in [*op.operands, *(v for _, vs in op.successors for v in vs)]:
            visit(value)
        return found

    def declare(self, value: Value) -> None:
        name = self.bind(value, value.name)
        self.declared_on_top.add(value)
        self.declarations.append(f"{c_type(value.type)} {name};")

    def block(self, block: Block) -> None:
        for op in block.ops:
            self.op(op)

    def op(self, op: Op) -> None:
        name = op.name
        if name in IGNORED:
            return
        if op.results and isinstance(op.result.type, Tensor) and is_virtual(op.result):
            self.pending += [v for v in op.results if v in self.plan.buffered]
            return
        handler = getattr(self, "on_" + re.sub(r"\W", "_", name), None)
        if handler:
            if op.name.startswith("scf."):
                self.flush(op, {v for inner in op.walk() for v in self.virtual_leaves(inner)})
            elif is_write(op):
                self.flush(op)
            elif op.successors:
                for value in list(self.pending):
                    if value in self.crossing and value in self.pending:
                        self.fill(value)
                self.prepare([v for _, passed in op.successors for v in passed], None)
            handler(op)
        elif name in ELEMENTWISE:
            text = ELEMENTWISE[name].write(op, [self.scalar(v) for v in op.operands], 1)
            self.let(op.result, text)
        else:
            raise Unsupported(op)

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

    def on_tt_unsplat(self, op: Op) -> None:
        source = self.stored(op.operands[0])
        self.let(op.result, f"{source.name}[0]{' != 0' if source.element == I1 else ''}")

    def on_tt_return(self, op: Op) -> None:
        self.assign([self.result_target(i) for i in range(len(op.operands))], op.operands, op)
        self.lines.append("return;")

    on_tt_map_elementwise_return = on_tt_return

    def result_target(self, index: int) -> _Target:
        buffer = self.result_buffers.get(index)
        return _Target(buffer=buffer) if buffer else _Target(variable=f"result{index}")

    def on_tt_call(self, op: Op) -> None:
        name = self.module.function(op.attrs["callee"])
        passed = ["p", *(self.scalar(v) for v in op.operands)]
        for result in op.results:
            if isinstance(result.type, Tensor):
                buffer = self.buffer_for(result)
                buffer.filled = True
                passed.append(buffer.name)
            else:
                if result not in self.declared_on_top:
                    self.lines.append(f"{c_type(result.type)} {self.bind(result, result.name)};")
                passed.append(self.scalars[result])
        self.lines.append(f"{name}({', '.join(passed)});")

    def target(self, value: Value) -> _Target:
        """Storage for a value that control flow assigns to."""
        if isinstance(value.type, Tensor):
            buffer = self.buffer_for(value)
            buffer.filled = True
            return _Target(buffer=buffer)
        if value not in self.declared_on_top:
            name = self.bind(value, value.name)
            self.lines.append(f"{c_type(value.type)} {name};")
        return _Target(variable=self.scalars[value])

    def assign(self, targets: list[_Target], values: list[Value], op: Op, first_slot: int = 0) -> None:
        """All targets take their values at once: none of them sees another's new value."""
        mine = {t.buffer for t in targets if t.buffer}
        tiles: list[tuple[Buffer, Value | Buffer, Nest | None]] = []
        for slot, (target, value) in enumerate(zip(targets, values, strict=True)):
            if not target.buffer:
                continue
            nest = self.plan.nests.get((op, first_slot + slot))
            self.prepare([value], nest)
            here = self.buffers.get(value)
            if here is not None and self.aliases.get(here, here) is target.buffer:
                continue
            found: dict[Value, bool] = {}
            self.reachable(value, found)
            sources = {(self.buffers.get(v), direct) for v, direct in found.items()}
            if any(b in mine and not (b is target.buffer and direct) for b, direct in sources):
                copy = self.new_buffer("next", target.buffer.element, target.buffer.shape)
                self.write_to(copy, value, nest)
                tiles.append((target.buffer, copy, nest))
            else:
                tiles.append((target.buffer, value, nest))
        for buffer, source, nest in tiles:
            if isinstance(source, Buffer):
                size = buffer.size * size_of(buffer.element)
                self.lines.append(f"__builtin_memcpy({buffer.name}, {source.name}, {size});")
            else:
                self.write_to(buffer, source, nest)
        # scalars last: tiles may still be computed from the old ones
        variables = {t.variable for t in targets if t.variable}
        moves = []
        for target, value in zip(targets, values, strict=True):
            if target.variable and target.variable != self.scalars.get(value):
                text = self.scalar(value)
                if text in variables:
                    copy_name = self.module.unique("next")
                    self.lines.append(declare_const(c_type(value.type), copy_name, text))
                    text = copy_name
                moves.append(f"{target.variable} = {text};")
        self.lines += moves

    def region(self, block: Block, finish: Callable[[Op], None]) -> None:
        """A structured block and, by `finish`, its terminator. What is pending outside stays so."""
        outer, self.pending = self.pending, []
        *ops, terminator = block.ops
        for op in ops:
            self.op(op)
        finish(terminator)
        self.pending = outer

    def on_scf_for(self, op: Op) -> None:
        lower, upper, step = (self.scalar(v) for v in op.operands[:3])
        body = op.regions[0].block
        targets = [self.target(result) for result in op.results]
        self.assign(targets, op.operands[3:], op, 3)
        for arg, target in zip(body.args[1:], targets, strict=True):
            if target.buffer:
                self.buffers[arg] = target.buffer
            else:
                assert target.variable
                self.scalars[arg] = target.variable
        self.share_buffers(body, targets)
        induction = self.bind(body.args[0], body.args[0].name)
        type_ = c_type(body.args[0].type)
        compare = f"({type_.replace('i', 'u', 1)}){induction} < ({type_.replace('i', 'u', 1)}){upper}"
        compare = compare if op.attrs.get("unsigned") else f"{induction} < {upper}"
        self.comment(op)
        self.lines.append(f"for ({type_} {induction} = {lower}; {compare}; {induction} += {step}) {{")
        self.region(body, lambda end: self.assign(targets, end.operands, end))
        self.lines.append("}")

    def share_buffers(self, body: Block, targets: list[_Target]) -> None:
        """A value that becomes the next iteration's tile is computed right into that tile's buffer, if every
        reader of the old one has read it by then (or reads it element for element in the same nest)."""
        terminator = body.ops[-1]
        for slot, (value, target) in enumerate(zip(terminator.operands, targets, strict=True)):
            if not target.buffer or value.producer is None or value.producer.block is not body:
                continue
            if terminator.operands.count(value) > 1 or value in self.buffers:
                continue
            stored = value in self.plan.buffered or value.producer.name in ("tt.dot", "tt.dot_scaled")
            if not stored or element_of(value.type) != target.buffer.element:
                continue
            made = self.plan.position[value.producer]
            home = self.plan.tee.get(value)
            readers = self.plan.uses.get(body.args[1 + slot], {})
            if value in self.plan.buffered:
                done = [n for n in readers if n is home and readers[n].direct]
                safe = all(n in done or n.position < made for n in readers) and home is not None
            else:
                accumulator = self.plan.nests.get((value.producer, 2))
                safe = all(n.position < made or (n is accumulator and u.direct) for n, u in readers.items())
            if safe:
                self.buffers[value] = Buffer(target.buffer.name, target.buffer.element, target.buffer.shape)
                self.aliases[self.buffers[value]] = target.buffer

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
            if target.buffer:
                self.buffers[arg] = target.buffer
            else:
                assert target.variable
                self.scalars[arg] = target.variable
        self.comment(op)
        self.lines.append("while (true) {")

        def leave_or_go_on(condition: Op) -> None:
            self.assign(results, condition.operands[1:], condition, 1)
            self.lines.append(f"if (!{self.scalar(condition.operands[0])}) break;")

        self.region(before, leave_or_go_on)
        self.region(after, lambda end: self.assign(carried, end.operands, end))
        self.lines.append("}")

    def branch_to(self, op: Op, index: int) -> list[str]:
        block, passed = op.successors[index]
        kept, self.lines = self.lines, []
        targets = [
            _Target(buffer=self.buffers[a]) if isinstance(a.type, Tensor) else _Target(variable=self.scalars[a])
            for a in block.args
        ]
        self.assign(targets, passed, op, 1000 * index)
        lines, self.lines = [*self.lines, f"goto {self.labels[block]};"], kept
        return lines

    def on_cf_br(self, op: Op) -> None:
        self.lines += self.branch_to(op, 0)

    def on_cf_cond_br(self, op: Op) -> None:
        self.lines.append(f"if ({self.scalar(op.operands[0])}) {{")
        self.lines += self.branch_to(op, 0)
        self.lines.append("} else {")
        self.lines += self.branch_to(op, 1)
        self.lines.append("}")

    # -- memory and messages --

    def nest_of(self, op: Op, values: list[Value]) -> Nest | None:
        nest = self.plan.nests.get((op, 0))
        self.prepare(values, nest)
        return nest

    def on_tt_load(self, op: Op) -> None:
        pointer, *masked = (self.scalar(v) for v in op.operands)
        text = f"*{pointer}{' != 0' if op.result.type == I1 else ''}"
        if masked:
            rest = masked[1] if len(masked) > 1 else literal(op.result.type, 0)
            text = f"{masked[0]} ? {text} : {rest}"
        self.let(op.result, text)

    def on_tt_store(self, op: Op) -> None:
        self.comment(op)
        self.nest_of(op, op.operands)
        loops = LoopNest(self, shape_of(op.operands[1].type))
        loops.store(op)
        self.lines += loops.render() if loops.shape else loops.code[0]
        self.finish(loops)

    def on_tt_atomic_rmw(self, op: Op) -> None:
        self.atomic(op, op.operands[2] if len(op.operands) > 2 else None)

    def on_tt_atomic_cas(self, op: Op) -> None:
        self.atomic(op, None)

    def atomic(self, op: Op, mask: Value | None) -> None:
        """One lane after another: an indivisible update each; lanes that are off return 0."""
        self.comment(op)
        self.nest_of(op, op.operands)
        shape = shape_of(op.result.type)
        element = element_of(op.result.type)
        loops = LoopNest(self, shape, lanes=1)
        forms = [loops.at_own_index(v) for v in op.operands]
        pointer, new = forms[0], forms[1]
        type_ = c_type(element)
        if op.name == "tt.atomic_cas":
            text = f"atomic_cas<{type_}>({pointer.expr}, {forms[1].expr}, {forms[2].expr})"
        else:
            update = _ATOMICS.get(op.attrs["flags"][0])
            if update is None or not isinstance(element, Scalar):
                raise Unsupported(op, str(op.attrs["flags"]))
            text = f"atomic_update({pointer.expr}, [&]({type_} old) {{ return {update(element, 'old', new.expr)}; }})"
            if mask is not None:
                text = f"{loops.at_own_index(mask).expr} ? {text} : {literal(element, 0)}"
        if not shape:
            self.lines += loops.code[0]
            self.let(op.result, text)
            return
        if op.result in self.plan.uses:
            buffer = self.buffer_for(op.result)
            loops.do(f"{buffer.name}[{loops.linear(loops.index, shape).expr}] = {text};", loops.depth)
            buffer.filled = True
        else:
            loops.do(f"{text};" if mask is None else f"(void)({text});", loops.depth)
        self.lines += loops.render()
        self.finish(loops)

    def on_tt_assert(self, op: Op) -> None:
        message = op.attrs.get("text") or op.attrs.get("message") or ""
        text = _c_string(f"{op.location}: {message}" if op.location else str(message))
        self.nest_of(op, op.operands)
        loops = LoopNest(self, shape_of(op.operands[0].type))
        form = loops.at_own_index(op.operands[0])
        loops.do(f"if (!all({loops.vec(form)})) fail(p, {text});", loops.depth)
        self.lines += loops.render()
        self.finish(loops)

    def on_tt_print(self, op: Op) -> None:
        prefix = op.attrs.get("text", "")
        signed = op.attrs.get("isSigned") or [1] * len(op.operands)
        if not op.operands:
            self.lines.append(f"print_line(p, {_c_string(prefix)});")
        for value, is_signed in zip(op.operands, signed, strict=True):
            self.prepare([value], None)
            loops = LoopNest(self, shape_of(value.type), lanes=1)
            form = loops.at_own_index(value)
            element = element_of(value.type)
            text = widen(element.name, form.expr) if isinstance(element, Scalar) else form.expr
            if isinstance(element, Scalar) and not element.is_float and not is_signed and element != I1:
                text = f"(u{element.bits}){text}"
            place = ", ".join([*(i.expr for i in loops.index), "0"])  # C++ has no empty arrays
            hexadecimal = "true" if op.attrs.get("hex") else "false"
            loops.do(f"print_value(p, {_c_string(prefix)}, {{{place}}}, {text}, {hexadecimal});", loops.depth)
            self.lines += loops.render()
            self.finish(loops)

    # -- reductions and scans --

    def combiner(self, op: Op) -> str:
        """The combining region as a template over the number of lanes: `combine<W>(a..., b...)` updates a."""
        block = op.regions[0].block
        name = self.module.unique("combine")
        half = len(block.args) // 2
        region = _RegionEmitter(self, "W")
        parameters = []
        for i, arg in enumerate(block.args):
            variable = f"{'a' if i < half else 'b'}{i % half}"
            region.names[arg] = variable
            parameters.append(f"{c_type(arg.type, 'W')} {'&' if i < half else ''}{variable}")
        *ops, terminator = block.ops
        for inner in ops:
            region.op(inner)
        updates = [f"const auto r{i} = {region.use(v)};" for i, v in enumerate(terminator.operands)]
        updates += [f"a{i} = r{i};" for i in range(half)]
        self.module.top += [
            f"template <int W> LOOM_INLINE void {name}({', '.join(parameters)}) {{",
            *region.lines,
            *updates,
            "}",
        ]
        types = [element_of(a.type) for a in block.args[:half]]
        if op.name == "tt.reduce":
            folds = [f"{c_type(t, 'W')} a{i}" for i, t in enumerate(types)]
            outs = [f"{c_type(t)} &r{i}" for i, t in enumerate(types)]
            low_names = ", ".join(f"l{i}" for i in range(half))
            typed = "".join(f"{c_type(t, 'W').replace('W', 'W / 2')} l{i} = lower(a{i}); " for i, t in enumerate(types))
            self.module.top += [
                f"template <int W> LOOM_INLINE void {name}_lanes({', '.join(folds + outs)}) {{",
                f"if constexpr (W == 1) {{ {' '.join(f'r{i} = a{i};' for i in range(half))} }}",
                "else {",
                typed,
                f"{name}<W / 2>({low_names}, {', '.join(f'upper(a{i})' for i in range(half))});",
                f"{name}_lanes<W / 2>({low_names}, {', '.join(f'r{i}' for i in range(half))});",
                "}",
                "}",
            ]
        self.module.top.append("")
        return name

    def on_tt_reduce(self, op: Op) -> None:
        self.comment(op)
        axis = op.attrs["axis"]
        shape = shape_of(op.operands[0].type)
        combine = self.combiner(op)
        self.nest_of(op, op.operands)
        loops = LoopNest(self, shape, innermost=axis)
        forms = [loops.at_own_index(v) for v in op.operands]
        lanes = loops.lanes
        elements = [element_of(v.type) for v in op.operands]
        types = [c_type(e, lanes) for e in elements]
        count = len(types)
        step = loops.step_of(axis)
        trips = shape[axis] // step
        ways = min(4, trips)
        variable = loops.variables[axis]
        along_lanes = loops.lane_dim == axis and lanes > 1

        outs = [f"x{i}" for i in range(count)]
        body = [f"auto chunk = [&](i32 {variable}, {', '.join(f'{t} &{o}' for t, o in zip(types, outs, strict=True))}) LOOM_ALWAYS {{"]
        body += loops.code[-1]
        body += [f"{o} = {loops.vec(f)};" for o, f in zip(outs, forms, strict=True)]
        body.append("};")
        accumulators = [[f"a{i}_{w}" for i in range(count)] for w in range(ways)]
        for w, names in enumerate(accumulators):
            body += [f"{t} {n};" for t, n in zip(types, names, strict=True)]
            body.append(f"chunk({w * step}, {', '.join(names)});")
        if trips > ways:
            body.append(f"for (i32 i = {ways * step}; i < {shape[axis]}; i += {ways * step}) {{")
            for w, names in enumerate(accumulators):
                body += [f"{t} b{i}_{w};" for i, t in enumerate(types)]
                fresh = ", ".join(f"b{i}_{w}" for i in range(count))
                body.append(f"chunk(i{f' + {w * step}' if w else ''}, {fresh});")
                body.append(f"{combine}<{lanes}>({', '.join(names)}, {fresh});")
            body.append("}")
        width = ways
        while width > 1:
            for w in range(width // 2):
                left, right = accumulators[w], accumulators[w + width // 2]
                body.append(f"{combine}<{lanes}>({', '.join(left + right)});")
            width //= 2
        finals = accumulators[0]
        if along_lanes:
            body += [f"{c_type(e)} r{i};" for i, e in enumerate(elements)]
            body.append(f"{combine}_lanes<{lanes}>({', '.join(finals + [f'r{i}' for i in range(count)])});")
            finals = [f"r{i}" for i in range(count)]

        result_index = tuple(f for d, f in enumerate(loops.index) if d != axis)
        result_shape = tuple(e for d, e in enumerate(shape) if d != axis)
        loops.code[-1] = []
        for result, final in zip(op.results, finals, strict=True):
            if not isinstance(result.type, Tensor):
                if result not in self.declared_on_top:
                    self.lines.append(f"{c_type(result.type)} {self.bind(result, result.name)};")
                body.append(f"{self.scalars[result]} = {final};")
                continue
            buffer = self.buffer_for(result)
            linear = loops.linear(result_index, result_shape)
            single = along_lanes or lanes == 1
            kept, loops.lanes = loops.lanes, 1 if single else lanes
            form = Form("uniform" if single else "vector", element_of(result.type), final, loops.depth)
            loops.write(buffer, linear, form)
            loops.lanes = kept
        body += loops.code[-1]
        loops.code[-1] = []
        self.lines += loops.render(body)
        self.finish(loops)
        for result in op.results:
            if result in self.buffers:
                self.buffers[result].filled = True

    def on_tt_scan(self, op: Op) -> None:
        self.comment(op)
        axis, reverse = op.attrs["axis"], op.attrs.get("reverse", False)
        shape = shape_of(op.operands[0].type)
        combine = self.combiner(op)
        self.nest_of(op, op.operands)
        loops = LoopNest(self, shape, innermost=axis, lanes=1 if lane_dimension(shape) == axis else None)
        if reverse:
            flipped = Form("uniform", I32, f"({shape[axis] - 1} - {loops.variables[axis]})", loops.depth)
            loops.index = tuple(flipped if d == axis else f for d, f in enumerate(loops.index))
        forms = [loops.at_own_index(v) for v in op.operands]
        types = [c_type(element_of(v.type), loops.lanes) for v in op.operands]
        count = len(types)
        variable = loops.variables[axis]
        running, fresh = [f"a{i}" for i in range(count)], [f"x{i}" for i in range(count)]
        moves = [f"const {t} {x} = {loops.vec(f)};" for t, x, f in zip(types, fresh, forms, strict=True)]
        code, loops.code[-1] = loops.code[-1] + moves, []
        for result, value in zip(op.results, running, strict=True):
            buffer = self.buffer_for(result)
            form = Form("uniform" if loops.lanes == 1 else "vector", buffer.element, value, loops.depth)
            loops.write(buffer, loops.linear(loops.index, shape), form)
        body = [f"{t} {a};" for t, a in zip(types, running, strict=True)]
        body.append(f"for (i32 {variable} = 0; {variable} < {shape[axis]}; ++{variable}) {{")
        body += code
        body.append(f"if ({variable} == 0) {{ {' '.join(f'{a} = {x};' for a, x in zip(running, fresh, strict=True))} }}")
        body.append(f"else {combine}<{loops.lanes}>({', '.join(running + fresh)});")
        body += loops.code[-1]
        body.append("}")
        loops.code[-1] = []
        self.lines += loops.render(body)
        self.finish(loops)
        for result in op.results:
            self.buffers[result].filled = True

    # -- matrix products --

    def on_tt_dot(self, op: Op) -> None:
        self.comment(op)
        a, b, c = op.operands
        element, out = element_of(a.type), element_of(op.result.type)
        assert isinstance(element, Scalar) and isinstance(out, Scalar)
        if element == I8 and out == I32:
            work, accumulate = I8, I32
        elif element == F64:
            work, accumulate = F64, F64
        elif element.is_float:
            work, accumulate = F32, F32
        else:
            raise Unsupported(op, f"{element} x {element_of(b.type)} -> {out}")
        left = self.stored(a, self.plan.nests.get((op, 0)), work)
        right = self.stored(b, self.plan.nests.get((op, 1)), work)
        self.multiply(op, left, right, c, accumulate)

    def multiply(self, op: Op, left: Buffer, right: Buffer, c: Value, accumulate: Scalar) -> None:
        """result = c + left x right, accumulated in place; narrower results are rounded once, at the end."""
        out = element_of(op.result.type)
        target = self.buffer_for(op.result)
        into = target if out == accumulate else self.new_buffer(op.result.name, accumulate, target.shape)
        if self.aliases.get(target, target) is not self.buffers.get(c):
            self.write_to(into, c, self.plan.nests.get((op, 2)))
        *batch, m, n = target.shape
        k = left.shape[-1]
        kernel = f"dot_i8<{m}, {n}, {k}>" if left.element == I8 else f"dot<{c_type(accumulate)}, {m}, {n}, {k}>"
        if batch:
            (count,) = batch
            self.lines.append(f"for (i32 batch = 0; batch < {count}; ++batch)")
            self.lines.append(
                f"{kernel}({left.name} + batch * {m * k}, {right.name} + batch * {k * n}, {into.name} + batch * {m * n});"
            )
        else:
            self.lines.append(f"{kernel}({left.name}, {right.name}, {into.name});")
        if into is not target:
            assert isinstance(out, Scalar)
            loops = LoopNest(self, target.shape)
            linear = loops.linear(loops.index, target.shape)
            form = loops.read(into, linear, "wide")
            loops.write(target, linear, form, narrow(out.name, loops.vec(form)))
            self.lines += loops.render()
        target.filled = True

    def on_tt_dot_scaled(self, op: Op) -> None:
        self.comment(op)
        c = op.operands[2]
        sides = []
        *batch, m, n = shape_of(op.result.type)
        if batch:
            raise Unsupported(op, "batched")
        for side, value in (("lhs", op.operands[0]), ("rhs", op.operands[1])):
            sides.append(self.dequantized(op, side, value))
        self.multiply(op, sides[0], sides[1], c, F32)

    def dequantized(self, op: Op, side: str, value: Value) -> Buffer:
        """An operand of dot_scaled as fp32: decoded, unpacked along K, times its scale per group along K."""
        kind = op.attrs[side]
        raw = self.stored(value)
        scale_slot = op.attrs[f"{side}_scale"]
        scale = self.stored(op.operands[scale_slot]) if scale_slot is not None else None
        rows, columns = raw.shape
        k_axis = 1 if side == "lhs" else 0
        packed = kind == "e2m1" and op.attrs.get(f"{side}_k_pack", True) is not False
        packs_other = kind == "e2m1" and not packed
        if packed:
            rows, columns = (rows, columns * 2) if k_axis == 1 else (rows * 2, columns)
        elif packs_other:
            rows, columns = (rows * 2, columns) if k_axis == 1 else (rows, columns * 2)
        wide = self.new_buffer(f"{value.name}_f32", F32, (rows, columns))
        k = columns if k_axis == 1 else rows
        pack_axis = k_axis if packed else 1 - k_axis
        if kind == "e2m1":
            source = f"{raw.name}[r * {raw.shape[1]} + c / 2] >> (c % 2 * 4) & 15" if pack_axis == 1 else (
                f"{raw.name}[r / 2 * {raw.shape[1]} + c] >> (r % 2 * 4) & 15"
            )
            decode = f"f32_from_e2m1((u8)({source}))"
        else:
            source = f"{raw.name}[r * {raw.shape[1]} + c]"
            reader = {"e4m3": "f32_from_e4m3", "e5m2": "f32_from_e5m2", "bf16": "f32_from_bf16", "fp16": "f32_from_f16"}
            if kind not in reader:
                raise Unsupported(op, f"operands of kind {kind}")
            unsigned = "u8" if kind in ("e4m3", "e5m2") else "u16"
            decode = f"{reader[kind]}(({unsigned}){source})"
        if scale is not None:
            group = k // scale.shape[-1]
            row, position = ("r", "c") if k_axis == 1 else ("c", "r")
            is_e4m3 = isinstance(scale.element, Scalar) and scale.element.name == "f8E4M3FN"
            read = f"(u8){scale.name}[{row} * {scale.shape[-1]} + {position} / {group}]"
            decode += f" * {'f32_from_e4m3' if is_e4m3 else 'f32_from_e8m0'}({read})"
        self.lines += [
            f"for (i32 r = 0; r < {rows}; ++r)",
            f"for (i32 c = 0; c < {columns}; ++c) {wide.name}[r * {columns} + c] = {decode};",
        ]
        wide.filled = True
        return wide

    # -- the remaining tile operations --

    def on_tt_histogram(self, op: Op) -> None:
        self.comment(op)
        source = self.stored(op.operands[0])
        mask = self.stored(op.operands[1]) if len(op.operands) > 1 else None
        target = self.buffer_for(op.result)
        bins = target.size
        self.lines += [
            f"__builtin_memset({target.name}, 0, {bins * size_of(target.element)});",
            f"for (i32 i = 0; i < {source.size}; ++i) {{",
            f"const u64 bin = (u64)(i64){source.name}[i];",
            f"if ({f'{mask.name}[i] && ' if mask else ''}bin < {bins}) ++{target.name}[bin];",
            "}",
        ]
        target.filled = True

    def on_tt_join(self, op: Op) -> None:
        self.nest_of(op, op.operands)
        target = self.buffer_for(op.result)
        loops = LoopNest(self, shape_of(op.operands[0].type))
        left, right = (loops.vec(loops.at_own_index(v)) for v in op.operands)
        is_bit = target.element == I1
        stored = "i8" if is_bit else "i64" if isinstance(target.element, Pointer) else memory_type(target.element)
        type_ = vector_of(stored, loops.lanes)
        if is_bit:
            left, right = (f"convert<{type_}>({x})" if loops.lanes > 1 else f"(i8)-(i8){x}" for x in (left, right))
        linear = loops.linear(loops.index, loops.shape)
        place = f"({stored} *){target.name} + 2 * ({linear.expr})"
        loops.do(f"store_interleaved<{type_}>({place}, {left}, {right});", loops.depth)
        self.lines += loops.render()
        self.finish(loops)
        target.filled = True

    def on_tt_cat(self, op: Op) -> None:
        target = self.buffer_for(op.result)
        part = target.size // 2
        for half, value in enumerate(op.operands):
            piece = Buffer(f"({target.name} + {half * part})", target.element, shape_of(value.type))
            self.write_to(piece, value, self.plan.nests.get((op, half)))
        target.filled = True

    def on_tt_map_elementwise(self, op: Op) -> None:
        self.comment(op)
        pack = op.attrs.get("pack", 1)
        region = op.regions[0]
        args = region.blocks[0].args
        name = self.module.unique("element")
        results = [element_of(r.type) for r in op.results for _ in range(pack)]
        self.module.emit_function(name, args, results, region)
        sources = [self.stored(v) for v in op.operands]
        targets = [self.buffer_for(r) for r in op.results]
        size = targets[0].size
        passed = ["p"] + [f"{s.name}[i + {j}]" for s in sources for j in range(pack)]
        passed += [f"{t.name}[i + {j}]" for t in targets for j in range(pack)]
        self.lines.append(f"for (i32 i = 0; i < {size}; i += {pack}) {name}({', '.join(passed)});")
        for target in targets:
            target.filled = True


class _RegionEmitter:
    """Straight-line code of a combining region, on W lanes."""

    def __init__(self, function: FunctionEmitter, lanes: Lanes) -> None:
        self.function = function
        self.lanes = lanes
        self.names: dict[Value, str] = {}
        self.lines: list[str] = []

    def use(self, value: Value) -> str:
        if value in self.names:
            return self.names[value]
        op = value.producer
        if op is None or op.name != "arith.constant":
            raise Unsupported(op or Op("tt.reduce", []), "a combining function may only use its arguments")
        element = element_of(value.type)
        text = literal(element, op.attrs["value"])
        if element == I1:
            return f"({c_type(element, self.lanes)})({c_type(element, self.lanes)}{{}} == {'0' if text == 'true' else '1'})"
        return f"splat<{c_type(element, self.lanes)}>({text})"

    def op(self, op: Op) -> None:
        if op.name in ("arith.constant", *IGNORED):
            return
        if op.name not in ELEMENTWISE:
            raise Unsupported(op, "inside a combining function")
        text = ELEMENTWISE[op.name].write(op, [self.use(v) for v in op.operands], self.lanes)
        name = f"v{len(self.names)}"
        self.names[op.result] = name
        self.lines.append(f"const {c_type(element_of(op.result.type), self.lanes)} {name} = {text};")


def _float_sum(element: Scalar, old: str, new: str) -> str:
    return narrow(element.name, f"{widen(element.name, old)} + {widen(element.name, new)}")


_ATOMICS = {
    "fadd": _float_sum,
    "add": lambda e, old, new: f"({c_type(e)})({old} + {new})",
    "and": lambda e, old, new: f"({c_type(e)})({old} & {new})",
    "or": lambda e, old, new: f"({c_type(e)})({old} | {new})",
    "xor": lambda e, old, new: f"({c_type(e)})({old} ^ {new})",
    "max": lambda e, old, new: f"{old} > {new} ? {old} : {new}",
    "min": lambda e, old, new: f"{old} < {new} ? {old} : {new}",
    "umax": lambda e, old, new: f"(u{e.bits}){old} > (u{e.bits}){new} ? {old} : {new}",
    "umin": lambda e, old, new: f"(u{e.bits}){old} < (u{e.bits}){new} ? {old} : {new}",
    "exch": lambda e, old, new: new,
}


def _c_string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _indent(lines: list[str]) -> str:
    out, depth = [], 0
    for line in lines:
        code = line.split("//")[0]
        out.append("  " * (depth - code.startswith("}")) + line if line else "")
        depth += code.count("{") - code.count("}")
    return "\n".join(out) + "\n"
