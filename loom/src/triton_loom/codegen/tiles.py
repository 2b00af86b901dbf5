"""Emission of operations on tiles: each runs its loop nest in place."""

from __future__ import annotations

from math import prod

from ..ir.ttir import BF16, F32, F64, I1, I8, I32, Op, Scalar, Tensor, Value, element_of, shape_of
from .control import ControlFlow
from .cpp import c_string, c_type, literal, narrow, size_of, stored_type, vector_of, widen
from .forms import Form, Index, constant_index
from .nest import Buffer, LoopNest
from .operations import ELEMENTWISE, IGNORED, Unsupported
from .schedule import lane_dimension


class FunctionEmitter(ControlFlow):
    """Emitter of one C++ function, operations on tiles included."""

    # -- memory --

    def on_tt_load(self, op: Op) -> None:
        pointer, mask, other = [*(self.scalar(v) for v in op.operands), None, None][:3]
        assert pointer
        self.let(op.result, self.accesses.load_one(op, pointer, mask, other))

    def on_tt_unsplat(self, op: Op) -> None:
        (value,) = op.operands
        self.prepare([value], None)
        nest = LoopNest(self, ())
        form = nest.eval(value, tuple(constant_index(0) for _ in shape_of(value.type)))
        name = self.variable(op.result)
        nest.do(f"{name} = {form.expr};", 0)
        self.run_nest(nest)

    def on_tt_store(self, op: Op) -> None:
        self.comment(op)
        home = self.plan.nest(op)
        unproven_loads = self.plan.ask.get(home, []) if home else []
        # a value that only one of two branches computes can't be stored for later
        self.prepare(op.operands, None if unproven_loads else home)
        if not unproven_loads:
            self.store_tile(op)
            return
        disjoint = self.unit.unique("apart")
        self.lines += [f"bool {disjoint} = true;", *self.compare_addresses(op, unproven_loads, disjoint)]
        self.lines.append(f"if ({disjoint}) {{")
        self.store_tile(op)
        self.lines.append("} else {  // overlapping views of one tensor: all is loaded before any is stored")
        for value in unproven_loads:
            self.plan.buffered.add(value)
            self.fill(value)
        self.store_tile(op)
        self.lines.append("}")

    def store_tile(self, op: Op) -> None:
        nest = LoopNest(self, shape_of(op.operands[1].type), values=op.operands)
        nest.store(op)
        self.run_nest(nest)

    def compare_addresses(self, store: Op, loads: list[Value], disjoint: str) -> list[str]:
        """Return statements that clear `disjoint` unless each load's tile is identical to the store's or disjoint."""
        shape = shape_of(store.operands[0].type)
        corners: list[Index] = [
            tuple(constant_index(0) for _ in shape),
            tuple(constant_index(extent - 1) for extent in shape),
        ]
        nest = LoopNest(self, ())
        nest.looks_ahead = True

        def addresses(pointer: Value) -> list[str]:
            return [self.accesses.bare(pointer, nest.eval(pointer, corner).expr) for corner in corners]

        store_ends = addresses(store.operands[0])
        for value in loads:
            assert value.producer
            load_ends = addresses(value.producer.operands[0])
            nest.do(f"{disjoint} &= same_or_apart({', '.join(load_ends + store_ends)});", 0)
        return nest.render()

    def on_tt_atomic_rmw(self, op: Op) -> None:
        element = element_of(op.result.type)
        update = _ATOMICS.get(op.attrs["flags"][0])
        if update is None or not isinstance(element, Scalar):
            raise Unsupported(op, f"{op.attrs['flags'][0]} on {element}")
        update_text = widened(element, update)
        change = f"[&]({c_type(element)} old) {{ return {update_text}; }}"
        self.atomic(
            op, f"atomic_update({{0}}, {change.replace('{', '{{').replace('}', '}}')})".replace("@", "{1}")
        )

    def on_tt_atomic_cas(self, op: Op) -> None:
        self.atomic(op, f"atomic_cas<{c_type(element_of(op.result.type))}>({{0}}, {{1}}, {{2}})")

    def atomic(self, op: Op, template: str) -> None:
        """Write one atomic update per element, in order; the result is 0 where the mask is off."""
        self.comment(op)
        self.prepare(op.operands, self.plan.nest(op))
        self.lines += self.accesses.begin_atomic()
        shape = shape_of(op.result.type)
        nest = LoopNest(self, shape, lanes=1, values=op.operands)
        forms = [nest.at_own_index(v).expr for v in op.operands]
        mask = forms[2] if op.name == "tt.atomic_rmw" and len(forms) > 2 else None
        nest.settle(op, mask, nest.index, nest.depth)
        pointer = self.accesses.bare(op.operands[0], forms[0])
        text = self.accesses.atomic(op, forms[0], mask, template.format(pointer, *forms[1:]))
        if not shape:
            nest.do(f"{self.variable(op.result)} = {text};", 0)
        elif op.result in self.plan.uses:
            buffer = self.buffer_for(op.result)
            buffer.filled = True
            nest.do(f"{buffer.name}[{nest.linear(nest.index, shape).expr}] = {text};", nest.depth)
        else:
            nest.do(f"(void)({text});", nest.depth)
        self.run_nest(nest)

    # -- messages --

    def on_tt_assert(self, op: Op) -> None:
        message = op.attrs.get("text") or op.attrs.get("message") or ""
        text = c_string(f"{op.location}: {message}" if op.location else str(message))
        self.prepare(op.operands, self.plan.nest(op))
        nest = LoopNest(self, shape_of(op.operands[0].type), values=op.operands)
        form = nest.at_own_index(op.operands[0])
        nest.do(f"if (!all({nest.vec(form)})) fail(p, {text});", nest.depth)
        self.run_nest(nest)

    def on_loom_undefined(self, op: Op) -> None:
        self.prepare(op.operands, self.plan.nest(op))
        nest = LoopNest(self, shape_of(op.operands[0].type), values=op.operands)
        nest.looks_ahead = True
        form = nest.at_own_index(op.operands[0])
        for statement in self.accesses.undefined(op, nest.vec(form)):
            nest.do(statement, nest.depth)
        self.run_nest(nest)

    def on_tt_print(self, op: Op) -> None:
        prefix = c_string(op.attrs.get("text", ""))
        signed = op.attrs.get("isSigned") or [1] * len(op.operands)
        if not op.operands:
            self.lines.append(f"print_line(p, {prefix});")
        for value, is_signed in zip(op.operands, signed, strict=True):
            self.prepare([value], None)
            nest = LoopNest(self, shape_of(value.type), lanes=1)
            element = element_of(value.type)
            text = nest.at_own_index(value).expr
            if isinstance(element, Scalar):
                text = widen(element.name, text)
                if not element.is_float and not is_signed and element != I1:
                    text = f"(u{element.bits}){text}"
            index = ", ".join([*(i.expr for i in nest.index), "0"])  # C++ has no empty arrays
            hexadecimal = "true" if op.attrs.get("hex") else "false"
            nest.do(f"print_value(p, {prefix}, {{{index}}}, {text}, {hexadecimal});", nest.depth)
            self.run_nest(nest)

    # -- reductions and scans --

    def combiner(self, ops: list[Op]) -> str:
        """Define the combining regions as one C++ struct template, the state of reductions or a scan in W lanes."""
        name = self.unit.unique("combine")
        names: dict[Value, str] = {}
        fields: list[str] = []
        lines: list[str] = []
        results: list[str] = []
        for op in ops:
            block = op.regions[0].block
            half = len(block.args) // 2
            for i, arg in enumerate(block.args[:half], len(fields)):
                names[arg], names[block.args[i - len(fields) + half]] = f"a{i}", f"b.a{i}"
            fields += [
                f"{c_type(element_of(a.type), 'W')} a{len(fields) + i};"
                for i, a in enumerate(block.args[:half])
            ]
            *inner, terminator = block.ops
            for each in inner:
                lines += _lane_code(each, names)
            results += [_lane_value(v, names) for v in terminator.operands]
        if len(results) > 1:  # every result is computed from the old values
            lines += [f"const auto r{i} = {text};" for i, text in enumerate(results)]
            results = [f"r{i}" for i in range(len(results))]
        halves = []
        if ops[0].name == "tt.reduce":
            for side, half_of in (("lower", "low_half"), ("upper", "high_half")):
                values = ", ".join(f"{half_of}(a{i})" for i in range(len(fields)))
                halves.append(f"LOOM_ALWAYS {name}<W / 2> {side}() const {{ return {{{values}}}; }}")
        self.unit.top += [
            f"template <int W> struct {name} {{",
            *fields,
            f"LOOM_ALWAYS void take(const {name} &b) {{",
            *lines,
            *(f"a{i} = {text};" for i, text in enumerate(results)),
            "}",
            *halves,
            "};",
            "",
        ]
        return name

    def on_tt_reduce(self, op: Op) -> None:
        """Combine chunks lane by lane, then the lanes; reductions of one shape share a nest."""
        ops = self.plan.siblings[op]
        if op is not ops[0]:
            return  # done with the first of them
        self.comment(op)
        axis = op.attrs["axis"]
        shape = shape_of(op.operands[0].type)
        operands = [v for each in ops for v in each.operands]
        combine = self.combiner(ops)
        self.prepare(operands, self.plan.nest(op))
        nest = LoopNest(self, shape, innermost=axis, values=operands)
        values = ", ".join(nest.vec(nest.at_own_index(v)) for v in operands)
        along_lanes = nest.lane_dim == axis and nest.lanes > 1
        total = f"reduce<{nest.step_of(axis)}, {shape[axis]}>(chunk)"
        body = [
            f"auto chunk = [&](i32 {nest.variables[axis]}) LOOM_ALWAYS -> {combine}<{nest.lanes}> {{",
            *nest.code[-1],
            f"return {{{values}}};",
            "};",
            f"const auto total = {f'across_lanes({total})' if along_lanes else total};",
        ]
        nest.code[-1] = []
        lanes = nest.lanes
        nest.lanes = 1 if along_lanes else lanes
        index = tuple(form for d, form in enumerate(nest.index) if d != axis)
        for i, result in enumerate(r for each in ops for r in each.results):
            self.keep(nest, index, result, f"total.a{i}")
        nest.lanes = lanes
        body += nest.code[-1]
        nest.code[-1] = []
        self.run_nest(nest, body)

    def keep(self, nest: LoopNest, index: Index, result: Value, text: str) -> None:
        """Write result[index] = text, in the innermost loop."""
        if not isinstance(result.type, Tensor):
            nest.do(f"{self.variable(result)} = {text};", nest.depth)
            return
        buffer = self.buffer_for(result)
        buffer.filled = True
        form = Form("uniform" if nest.lanes == 1 else "vector", buffer.element, text, nest.depth)
        nest.write(buffer, nest.linear(index, buffer.shape), form)

    def on_tt_scan(self, op: Op) -> None:
        self.comment(op)
        axis = op.attrs["axis"]
        shape = shape_of(op.operands[0].type)
        combine = self.combiner([op])
        self.prepare(op.operands, self.plan.nest(op))
        lanes = 1 if lane_dimension(shape) == axis else None
        nest = LoopNest(self, shape, innermost=axis, lanes=lanes, values=op.operands)
        variable = nest.variables[axis]
        if op.attrs.get("reverse"):
            flipped = Form("uniform", I32, f"({shape[axis] - 1} - {variable})", nest.depth)
            nest.index = tuple(flipped if d == axis else form for d, form in enumerate(nest.index))
        values = ", ".join(nest.vec(nest.at_own_index(v)) for v in op.operands)
        nest.do(f"{combine}<{nest.lanes}> running;", nest.depth - 1)
        nest.do(f"const {combine}<{nest.lanes}> next = {{{values}}};", nest.depth)
        nest.do(f"if ({variable} == 0) running = next;", nest.depth)
        nest.do("else running.take(next);", nest.depth)
        for i, result in enumerate(op.results):
            self.keep(nest, nest.index, result, f"running.a{i}")
        self.run_nest(nest)

    # -- matrix products --

    def on_tt_dot(self, op: Op) -> None:
        self.comment(op)
        a, b, _ = op.operands
        element, out = element_of(a.type), element_of(op.result.type)
        if element == I8 and out == I32:
            work, accumulate = I8, I32
        elif element == F64:
            work, accumulate = F64, F64
        elif element.is_float and element_of(b.type).is_float:
            work, accumulate = F32, F32
        else:
            raise Unsupported(op, f"{element} x {element_of(b.type)} -> {out}")
        if self.unit.hardware_dot and _fits_hardware(op):
            work = BF16
        left = self.stored(a, self.plan.nest(op, 0), work)
        transposed = self.stored_transposed(b) if work == BF16 or (work == I8 and _fits_words(b)) else None
        right = transposed or self.stored(b, self.plan.nest(op, 1), work)
        self.multiply(op, left, right, accumulate, transposed is not None)

    def multiply(
        self, op: Op, left: Buffer, right: Buffer, accumulate: Scalar, transposed: bool = False
    ) -> None:
        """Write result = c + left x right, accumulated in place; a narrower result is rounded once, at the end.

        `transposed`: right is [.., N, K].
        """
        c = op.operands[2]
        target, out = self.buffer_for(op.result), element_of(op.result.type)
        acc = target if out == accumulate else self.new_buffer(op.result.name, accumulate, target.shape)
        if acc is not target or self.aliases.get(target, target) is not self.buffers.get(c):
            self.write_to([(acc, c)], self.plan.nest(op, 2))
        *batch, m, n = target.shape
        k = left.shape[-1]
        name = "dot_i8<" if left.element == I8 else "dot_bf16<" if left.element == BF16 else "dot<"
        kernel = (
            name + f"{c_type(accumulate)}, " * (name == "dot<") + f"{m}, {n}, {k}{', true' * transposed}>"
        )
        tiles = [self.processor_tiles()] if name != "dot<" else []
        names = [left.name, right.name, acc.name]
        if batch:
            self.lines.append(f"for (i32 batch = 0; batch < {batch[0]}; ++batch)")
            names = [
                f"{name} + batch * {size}" for name, size in zip(names, (m * k, k * n, m * n), strict=True)
            ]
        self.lines.append(f"{kernel}({', '.join(tiles + names)});")
        self.lines += self.accesses.multiply_adds(prod(batch) * m * n * k)
        if acc is not target:
            assert isinstance(out, Scalar)
            nest = LoopNest(self, target.shape, values=[])
            linear = nest.linear(nest.index, target.shape)
            wide = nest.read(acc, linear, "wide")
            nest.write(target, linear, wide, narrow(out.name, nest.vec(wide)))
            self.run_nest(nest)
        target.filled = True

    def processor_tiles(self) -> str:
        """Return the processor's tile registers, which this function holds from its first dot on them to its end."""
        if (declaration := "Tiles tiles;") not in self.declarations:
            self.declarations.append(declaration)
        return "tiles"

    def on_tt_dot_scaled(self, op: Op) -> None:
        self.comment(op)
        left, right = (
            self.dequantized(op, side, v) for side, v in zip(("lhs", "rhs"), op.operands, strict=False)
        )
        self.multiply(op, left, right, F32)

    def dequantized(self, op: Op, side: str, value: Value) -> Buffer:
        """Return an operand of dot_scaled as fp32: decoded, unpacked, times its scale per group along K.

        lhs is [.., M, K] and rhs [.., K, N]; e2m1 packs two neighbors along K (or, by attribute, along the
        other dimension) into a byte, the first in the low half. Scales are [.., M, K / group] and
        [.., N, K / group].
        """
        kind = op.attrs[side]
        raw = self.stored(value)
        slot = op.attrs[f"{side}_scale"]
        scale = self.stored(op.operands[slot]) if slot is not None else None
        *batch, rows, columns = raw.shape
        k_last = side == "lhs"
        if kind == "e2m1":
            along_row = k_last == (op.attrs.get(f"{side}_k_pack", True) is not False)
            rows, columns = (rows, 2 * columns) if along_row else (2 * rows, columns)
            packing = "BY_COLUMNS" if along_row else "BY_ROWS"
        elif kind in _SCALED_KINDS:
            packing = "PLAIN"
        else:
            raise Unsupported(op, f"operands of kind {kind}")
        wide = self.new_buffer(f"{value.name}_f32", F32, (*batch, rows, columns))
        code = "u16" if kind in ("bf16", "fp16") else "u8"
        pointers = [
            f"{wide.name} + batch * {rows * columns}",
            f"(const {code} *){raw.name} + batch * {prod(raw.shape[-2:])}",
        ]
        conversions = [f"f32_from_{_SCALED_KINDS[kind]}"]
        function, extents = "decode", [rows, columns]
        if scale is not None:
            function = "decode_rows" if k_last else "decode_columns"
            extents.append((columns if k_last else rows) // scale.shape[-1])
            pointers.append(f"(const u8 *){scale.name} + batch * {prod(scale.shape[-2:])}")
            conversions.append(f"f32_from_{'e4m3' if str(scale.element) == 'f8E4M3FN' else 'e8m0'}")
        lambdas = [f"[](auto x) LOOM_LAMBDA {{ return {name}(x); }}" for name in conversions]
        self.lines += [
            f"for (i32 batch = 0; batch < {prod(batch)}; ++batch)",
            f"loom_scaled::{function}<{', '.join(map(str, extents))}, loom_scaled::{packing}>("
            f"{', '.join(pointers + lambdas)});",
        ]
        wide.filled = True
        return wide

    # -- the rest --

    def on_loom_bitonic(self, op: Op) -> None:
        """Copy the operand, and sort the copy in place by include/sort.h."""
        self.comment(op)
        (source,) = op.operands
        target, element = self.buffer_for(op.result), element_of(source.type)
        assert isinstance(element, Scalar)
        self.write_to([(target, source)], self.plan.nest(op))
        steps = self.unit.unique("steps")
        merges = (
            f"{{{m.first}, {m.last}, {m.flip}, {str(m.descending).lower()}}}" for m in op.attrs["merges"]
        )
        type_ = f"u{element.bits}" if op.attrs["unsigned"] else c_type(element)
        key = f"{element.name}_key"
        definition = (
            f"static const auto {key} = [](auto x) LOOM_LAMBDA {{ return {widen(element.name, 'x')}; }};"
        )
        if definition not in self.unit.top:
            self.unit.top.append(definition)
        self.lines += [
            "{",
            f"static const Merge {steps}[] = {{{', '.join(merges)}}};",
            f"sort_network<{target.size}>(({type_} *){target.name}, {steps}, {key});",
            "}",
        ]
        target.filled = True

    def on_tt_histogram(self, op: Op) -> None:
        self.comment(op)
        source = self.stored(op.operands[0])
        mask = self.stored(op.operands[1]) if len(op.operands) > 1 else None
        target = self.buffer_for(op.result)
        self.lines += [
            f"__builtin_memset({target.name}, 0, {target.size * size_of(target.element)});",
            f"for (i32 i = 0; i < {source.size}; ++i) {{",
            f"const u64 bin = (u64)(i64){source.name}[i];",
            f"if ({f'{mask.name}[i] && ' if mask else ''}bin < {target.size}) ++{target.name}[bin];",
            "}",
        ]
        target.filled = True

    def on_tt_join(self, op: Op) -> None:
        self.prepare(op.operands, self.plan.nest(op))
        target = self.buffer_for(op.result)
        nest = LoopNest(self, shape_of(op.operands[0].type), values=op.operands)
        sides = [nest.vec(nest.at_own_index(v)) for v in op.operands]
        stored = stored_type(target.element)
        type_ = vector_of(stored, nest.lanes)
        if target.element == I1:
            sides = [f"convert<{type_}>({x})" if nest.lanes > 1 else f"(i8)-(i8){x}" for x in sides]
        linear = nest.linear(nest.index, nest.shape)
        pointer = f"({stored} *){target.name} + 2 * ({linear.expr})"
        nest.do(f"store_interleaved<{type_}>({pointer}, {', '.join(sides)});", nest.depth)
        self.run_nest(nest)
        target.filled = True

    def on_tt_cat(self, op: Op) -> None:
        target = self.buffer_for(op.result)
        for half, value in enumerate(op.operands):
            pointer = f"({target.name} + {half * target.size // 2})"
            self.write_to(
                [(Buffer(pointer, target.element, shape_of(value.type)), value)], self.plan.nest(op, half)
            )
        target.filled = True

    def on_tt_map_elementwise(self, op: Op) -> None:
        self.comment(op)
        pack = op.attrs.get("pack", 1)
        region = op.regions[0]
        name = self.unit.unique("element")
        self.unit.define(
            name, region.blocks[0].args, [element_of(r.type) for r in op.results for _ in range(pack)], region
        )
        sources = [self.stored(v) for v in op.operands]
        targets = [self.buffer_for(r) for r in op.results]
        passed = [f"{s.name}[i + {j}]" for s in [*sources, *targets] for j in range(pack)]
        self.lines.append(
            f"for (i32 i = 0; i < {targets[0].size}; i += {pack}) {name}(p, {', '.join(passed)});"
        )
        for target in targets:
            target.filled = True

    def on_tt_elementwise_inline_asm(self, op: Op) -> None:
        self.comment(op)
        from . import assembly  # its tables take longer to read than most kernels take to generate

        name = self.unit.unique("assembly")
        self.unit.top += assembly.function(op, name)
        pack = op.attrs.get("packed_element", 1)
        if not isinstance(op.result.type, Tensor):
            if pack > 1:
                raise Unsupported(op, f"a scalar has one element, but pack is {pack}")
            outputs = [f"&{self.variable(result)}" for result in op.results]
            inputs = [self.unit.unique("passed") for _ in op.operands]
            self.lines += [
                "{",
                *(
                    f"const {c_type(v.type)} {i} = {self.scalar(v)};"
                    for i, v in zip(inputs, op.operands, strict=True)
                ),
                f"{name}({', '.join([*(f'&{i}' for i in inputs), *outputs, '1'])});",
                "}",
            ]
            return
        sources = [self.stored(v).name for v in op.operands]
        targets = [self.buffer_for(r) for r in op.results]
        if targets[0].size % pack:
            raise Unsupported(op, f"a tile of {targets[0].size} elements is not a multiple of pack, {pack}")
        passed = [*sources, *(t.name for t in targets), str(targets[0].size)]
        self.lines.append(f"{name}({', '.join(passed)});")
        for target in targets:
            target.filled = True


def _fits_hardware(op: Op) -> bool:
    """Return whether a dot is bf16 x bf16 -> f32 and fills a tile of the processor (see include/dot.h)."""
    elements = tuple(element_of(v.type) for v in (*op.operands[:2], op.result))
    *_, m, n = shape_of(op.result.type)
    return elements == (BF16, BF16, F32) and m >= 16 and n >= 16 and shape_of(op.operands[0].type)[-1] >= 32


def _fits_words(right: Value) -> bool:
    """Return whether an operand of [.., K, N] bytes can be read as [.., N, K], by 16 words of four (include/dot.h)."""
    *_, k, n = shape_of(right.type)
    return n >= 16 and k >= 64


def _lane_value(value: Value, names: dict[Value, str]) -> str:
    """Return an operand inside a combining region, as W lanes."""
    if value in names:
        return names[value]
    op = value.producer
    if op is None or op.name != "arith.constant":
        raise Unsupported(op or Op("tt.reduce", []), "a combining function may only use its arguments")
    element = element_of(value.type)
    type_ = c_type(element, "W")
    if element == I1:
        return f"({type_})({type_}{{}} == {0 if op.attrs['value'] else 1})"
    return f"splat<{type_}>({literal(element, op.attrs['value'])})"


def _lane_code(op: Op, names: dict[Value, str]) -> list[str]:
    if op.name == "arith.constant" or op.name in IGNORED:
        return []
    if op.name not in ELEMENTWISE:
        raise Unsupported(op, "inside a combining function")
    text = ELEMENTWISE[op.name].write(op, [_lane_value(v, names) for v in op.operands], "W")
    names[op.result] = f"v{len(names)}"
    return [f"const {c_type(element_of(op.result.type), 'W')} {names[op.result]} = {text};"]


# dot_scaled's names of element formats, and their names in casts.h.
_SCALED_KINDS = {"e4m3": "e4m3", "e5m2": "e5m2", "e2m1": "e2m1", "bf16": "bf16", "fp16": "f16"}

# The new value of an atomic update, from `old` and the operand `@`; U casts to unsigned.
_ATOMICS = {
    "fadd": "old + @",
    "add": "old + @",
    "and": "old & @",
    "or": "old | @",
    "xor": "old ^ @",
    "max": "old > @ ? old : @",
    "min": "old < @ ? old : @",
    "umax": "(U)old > (U)@ ? old : @",
    "umin": "(U)old < (U)@ ? old : @",
    "exch": "@",
}


def widened(element: Scalar, update: str) -> str:
    """Return an atomic update; on a type that C++ lacks it goes through f32, with one rounding."""
    if element.is_float and update != "@":
        return narrow(
            element.name,
            update.replace("old", widen(element.name, "old")).replace("@", widen(element.name, "@")),
        )
    return f"({c_type(element)})({update.replace('(U)', f'(u{element.bits})')})"
