"""Kernels of functions of rows, written as text.

A program has ROWS rows. A row of up to COLS elements is one tile. A longer one is read once for each level of
reductions: what a reduction needs of earlier ones is there when its own loop begins. For softmax these are the loops of
the maximum, of the sum and of the result. Partial results are kept for every column of a tile, and combined at the end.
If an operand has one value for a channel of a row, tiles are parts of a channel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .lowering import NAMES, Scalar, literal
from .primitives import PRIMITIVES, Row
from .text import Form, Operand, bools, definition, loaded, positions, signature, stored

LONGEST_TILE = 8192  # elements of a row that a program reads at once
LONGEST_ROW = 1 << 30  # elements, whose numbers are int32


def serves_rows(scalar: Scalar, cols: int) -> bool:
    """Return whether a kernel serves rows of so many elements."""
    return cols <= LONGEST_TILE or (cols < LONGEST_ROW and not scans_both_ways(scalar))


def levels(scalar: Scalar) -> dict[int, int]:
    """Return for each node the loop in which its elements are known: one more than that of any reduction it needs. A
    reduction itself is known when its loop ends."""
    level: dict[int, int] = {}
    for index in scalar.order:
        row = row_of(scalar, index)
        highest = max((level[i] for i in scalar.graph.nodes[index].inputs), default=0)
        level[index] = highest + (row is not None and not row.is_scan)
    return level


def row_of(scalar: Scalar, index: int) -> Row | None:
    """Return how a node combines the elements of a row, if it does."""
    name = scalar.graph.nodes[index].name
    return PRIMITIVES[name].row if name in PRIMITIVES else None


def scans_both_ways(scalar: Scalar) -> bool:
    """Return whether one loop would have to run in both directions."""
    level_of = levels(scalar)
    names = {(scalar.graph.nodes[i].name, level_of[i]) for i in scalar.order if row_of(scalar, i)}
    return any(("cumsum", level) in names for name, level in names if name == "cumsum_reversed")


def kernel_text_of_rows(name: str, scalar: Scalar, form: Form) -> str:
    """Return the source of the kernel of a function of rows."""
    return _Text(scalar, form).of(name)


class _Text:
    """Text of a kernel: what is computed in which loop."""

    def __init__(self, scalar: Scalar, form: Form) -> None:
        self.scalar, self.form, self.graph = scalar, form, scalar.graph
        self.kinds = dict(zip(scalar.parameters, form.kinds, strict=True))
        self.types = scalar.types(form.kinds)
        self.expressions, results = scalar.expressions(form.kinds)
        place = f"tl.program_id(0), {'tile, tiles' if form.loops else '0, 1'}"
        self.stores = {
            each: stored(each, text, form.outer, place)
            for each, text in zip(form.outputs, results, strict=True)
        }
        self.results = dict(zip(form.outputs, scalar.results.items(), strict=True))
        self.levels = levels(scalar)
        self.is_split = any(each.along for each in (*form.inputs, *form.outputs))
        self.rows = {i: row for i in scalar.order if (row := row_of(scalar, i))}
        self.reductions = [i for i, row in self.rows.items() if not row.is_scan]

    def of(self, name: str) -> str:
        parameters, floats = signature(self.scalar, self.form)
        body = [
            "cols = (cols // ALIGN) * ALIGN",
            "row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]",
            "exists = (row < rows)[:, None]",
            *positions(self.form.outer),
            *bools(self.kinds),
            *(self._loops() if self.form.loops else self._tile()),
        ]
        return definition(name, [*parameters, *floats], self.form.constants, body)

    # ---- one tile -----------------------------------------------------------------------------------------------

    def _tile(self) -> list[str]:
        operands = [*self.form.inputs, *self.form.outputs]
        lines = ["col = tl.arange(0, COLS)[None, :]  # [1, COLS]", *self._masks(operands)]
        lines += [self._load(each) for each in self.form.inputs]
        for index, text in self.expressions.items():
            value = self._combined(index, self._inside(index, text)) if index in self.rows else text
            lines.append(f"v{index} = {value}")
        return [*lines, *self.stores.values()]

    # ---- loops ----------------------------------------------------------------------------------------------------

    def _loops(self) -> list[str]:
        """Return a loop for each level that has elements to compute, and between them what has one value for a row."""
        wide = {
            operand: self.levels[value.index]
            for operand, (name, value) in self.results.items()
            if name not in self.scalar.narrow
        }
        last = max([self.levels[i] - 1 for i in self.reductions] + [*wide.values()], default=-1)
        last_size = f"inner{self.scalar.dims - 1}"
        lines = ["tiles = tl.cdiv(cols, COLS)"]
        if self.is_split:
            lines = [f"{last_size} = ({last_size} // ALIGN) * ALIGN", f"parts = tl.cdiv({last_size}, COLS)"]
            lines += [f"tiles = cols // {last_size} * parts"]
        lines += [self._load(each) for each in self.form.inputs if not self._varies(each.name)]
        known: set[int] = set()
        for level in range(last + 1):
            lines += self._narrow(level, known)
            lines += self._loop(level, wide)
        lines += self._narrow(last + 1, known)
        return lines + [line for operand, line in self.stores.items() if operand not in wide]

    def _narrow(self, level: int, known: set[int]) -> list[str]:
        """Return what is computed from reductions of earlier loops alone."""
        lines = []
        for index, text in self.expressions.items():
            is_narrow = not self.graph.varies(index) and index not in self.rows
            if is_narrow and self.levels[index] <= level and index not in known:
                known.add(index)
                lines.append(f"v{index} = {text}")
        return lines

    def _loop(self, level: int, wide: dict[Operand, int]) -> list[str]:
        reductions = [i for i in self.reductions if self.levels[i] == level + 1]
        outputs = [operand for operand in wide if wide[operand] == level]
        ends = [i for each in reductions for i in self.graph.nodes[each].inputs]
        ends += [self.results[operand][1].index for operand in outputs]
        needed = self._needed(ends)
        scans = [i for i in needed if i in self.rows]
        names = {self.graph.nodes[i].value for i in needed if self.graph.nodes[i].name == "parameter"}
        backwards = any(self.graph.nodes[i].name == "cumsum_reversed" for i in scans)
        inputs = [each for each in self.form.inputs if each.name in names]
        body = self._columns(backwards, [*inputs, *outputs])
        body += [self._load(each) for each in inputs]
        lines = [f"carry{i} = {self._full(i, '1')}" for i in scans]
        lines += [f"acc{i} = {self._full(i, 'COLS')}" for i in reductions]
        for index in needed:
            text = self.expressions.get(index)
            if text is None:
                continue
            if index in scans:
                inside = self._inside(index, text)
                body += [
                    f"v{index} = {self._combined(index, inside)} + carry{index}",
                    f"carry{index} += tl.sum({inside}, 1, keep_dims=True)",
                ]
            else:
                body.append(f"v{index} = {text}")
        for index in reductions:
            inside = self._inside(index, self.expressions[index])
            body.append(f"acc{index} = {self.rows[index].combine.format(f'acc{index}', inside)}")
        body += [self.stores[operand] for operand in outputs]
        lines += ["for tile in range(0, tiles):", *(f"    {line}" for line in body)]
        return lines + [f"v{i} = {self._combined(i, f'acc{i}')}" for i in reductions]

    def _needed(self, ends: Iterable[int]) -> list[int]:
        """Return the nodes with a value for each element that are computed in a loop, in order."""
        needed: set[int] = set()
        waiting = [*ends]
        while waiting:
            index = waiting.pop()
            if index not in needed and self.graph.varies(index):
                needed.add(index)
                waiting += self.graph.nodes[index].inputs
        return sorted(needed)

    # ---- lines ----------------------------------------------------------------------------------------------------

    def _columns(self, backwards: bool, operands: Sequence[Operand]) -> list[str]:
        """Return the columns of a loop's tile. If the dimensions of a row are not one for some operand, a tile lies in
        one stretch of the last of them, and the positions along the others are scalars."""
        lines = ["tile = tiles - 1 - tile"] if backwards else []
        if not self.is_split:
            return [*lines, "col = tile * COLS + tl.arange(0, COLS)[None, :]  # [1, COLS]", *self._masks([])]
        last = self.scalar.dims - 1
        lines += [
            "sub = (tile % parts) * COLS + tl.arange(0, COLS)[None, :]  # [1, COLS]",
            f"col = tile // parts * inner{last} + sub",
            f"inside = (sub < inner{last}) & (col < cols)",  # the second holds anyway: for the solver
            "mask = exists & inside",
            "rest = tile // parts",
        ]
        for i in reversed(range(1, last)):
            lines += [f"in{i} = rest % inner{i}", f"rest = rest // inner{i}"]
        lines += ["in0 = rest", f"in{last} = sub"]
        return lines + self._offsets([each for each in operands if each.along])

    def _masks(self, operands: Iterable[Operand]) -> list[str]:
        """Return the masks of a tile, and the offsets of operands for which a row's dimensions are not one."""
        lines = ["inside = col < cols", "mask = exists & inside"]
        split = [o for o in operands if o.along]
        needed = {i for each in split for i in each.along}
        if needed:
            lines.append("rest = col")
        for i in reversed(range(1, self.scalar.dims)):
            lines += [f"in{i} = rest % inner{i}"] if i in needed else []
            lines += [f"rest = rest // inner{i}"] if needed and min(needed) < i else []
        lines += ["in0 = rest"] if 0 in needed else []
        return lines + self._offsets(split)

    def _offsets(self, operands: Iterable[Operand]) -> list[str]:
        lines = []
        for each in operands:
            terms = (f"in{i}.to(tl.int64) * {each.name}_step{i}" for i in each.along)
            lines.append(f"{each.name}_off = {' + '.join(terms)}")
        return lines

    def _load(self, operand: Operand) -> str:
        return loaded(operand, self.kinds[operand.name].dtype, self.form.outer)

    def _varies(self, parameter: str) -> bool:
        return self.graph.varies(self.graph.parameters[parameter].index)

    def _identity(self, index: int) -> str:
        return literal(self.rows[index].identity, self.types[index].dtype)

    def _inside(self, index: int, text: str) -> str:
        """Return the elements of a tile, with the identity outside of the row and, of an extremum, for a NaN."""
        inside = "inside"
        if self.graph.nodes[index].name in ("max", "min") and self.types[index].dtype.is_floating_point:
            inside = f"inside & ({text} == {text})"
        return f"tl.where({inside}, {text}, {self._identity(index)})"

    def _combined(self, index: int, text: str) -> str:
        """Return the reduction or scan of a tile."""
        return PRIMITIVES[self.graph.nodes[index].name].triton.format(text)

    def _full(self, index: int, cols: str) -> str:
        return f"tl.full([ROWS, {cols}], {self._identity(index)}, tl.{NAMES[self.types[index].dtype]})"
