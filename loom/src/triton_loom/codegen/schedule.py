"""Schedule of tile values: which are recomputed where they are needed, and which get a buffer.

Every operation that consumes tiles (store, reduce, dot operand, scan, loop-carried value, ...) runs one loop
nest. An elementwise value costs nothing until a nest needs it; then it is computed for the current chunk.
It gets a buffer only if it would otherwise be computed more than once and is expensive enough, or if it is a load:
a load is executed exactly once, and not moved past a write to memory. Broadcasts, ranges, splats and address
arithmetic never get a buffer.

The first nest that computes all of a buffered value also writes it ("tee"), so that, say, a row is read from memory,
stored, and summed in one loop. Reductions of one shape share a nest where possible.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ir.ttir import Block, Function, Op, Tensor, Value, element_of, shape_of
from .operations import ELEMENTWISE, IGNORED, SHAPES, predicate

_WRITES = {"tt.store", "tt.atomic_rmw", "tt.atomic_cas", "tt.call"}
# Operations that make offsets and masks of ranges and scalars, which are cheaper to recompute than to read back.
_CHEAP_INDEX = {
    *("tt.make_range", "tt.splat", "arith.constant", "ub.poison"),
    *("tt.expand_dims", "tt.broadcast", "tt.reshape", "tt.trans"),
    *("tt.addptr", "tt.bitcast", "arith.cmpi", "arith.select", "arith.index_cast"),
    *(f"arith.{name}" for name in ("addi", "subi", "muli", "andi", "ori", "xori", "shli", "shrsi", "shrui")),
    *(f"arith.{name}" for name in ("extsi", "extui", "trunci")),
}
# Recomputing a value that costs more than this (in vector adds) loses to a store and a load.
_EXPENSIVE = 6.0
_EVERY_ITERATION = 1000.0
_MANY_ROWS = 32
CHUNK = 16
OWN = -1  # slot of a nest that computes only a value, which gets a buffer


@dataclass(eq=False)
class Nest:
    """A loop nest: the operation that runs it and, if that runs several, the slot."""

    op: Op
    slot: int
    position: int
    block: Block | None

    def __repr__(self) -> str:
        return f"<nest {self.op.name}#{self.slot} @{self.position}>"


@dataclass
class Use:
    """Use of a value by a nest."""

    factor: float = 0.0  # how often each element is computed
    direct: bool = True  # computed at the nest's own index, so that the nest covers the value exactly once


@dataclass
class Plan:
    """The values that get a buffer, and the nest that computes each of them."""

    buffered: set[Value] = field(default_factory=set)
    tee: dict[Value, Nest] = field(default_factory=dict)
    fills: dict[Value, Nest] = field(default_factory=dict)  # that nest, or one that computes only the value
    uses: dict[Value, dict[Nest, Use]] = field(default_factory=dict)
    nests: dict[tuple[Op, int], Nest] = field(default_factory=dict)
    position: dict[Op, int] = field(default_factory=dict)
    siblings: dict[Op, list[Op]] = field(default_factory=dict)  # reductions that share a nest
    # loads that a store fuses if, at run time, their tiles and its own are identical or disjoint
    ask: dict[Nest, list[Value]] = field(default_factory=dict)
    reads_memory: set[Value] = field(default_factory=set)  # virtual values whose computation loads

    def key(self, op: Op, slot: int) -> tuple[Op, int]:
        """Return the key of the nest that consumes an operand; tiles of one shape, assigned together, share a nest."""
        if op.name == "tt.reduce":
            return self.siblings[op][0], 0
        if op.name in ("scf.yield", "scf.condition", "scf.for", "scf.while"):
            shape = shape_of(op.operands[slot].type)
            return op, next(i for i, v in enumerate(op.operands) if shape_of(v.type) == shape)
        return op, slot if op.successors or _nest_per_operand(op) else 0

    def nest(self, op: Op, slot: int = 0) -> Nest | None:
        return self.nests.get(self.key(op, slot))


def schedule(function: Function) -> Plan:
    """Return the plan for one function."""
    return _Scheduler(function).run()


def is_write(op: Op) -> bool:
    """Return whether an operation, or one inside it, may write memory."""
    return any(inner.name in _WRITES for inner in op.walk())


def tile_operands(op: Op) -> list[Value]:
    """Return the operands of an operation that are tiles."""
    return [v for v in op.operands if isinstance(v.type, Tensor)]


def is_virtual(value: Value) -> bool:
    """Return whether a value has no storage unless the plan gives it a buffer."""
    op = value.producer
    return op is not None and (op.name in ELEMENTWISE or op.name in SHAPES or op.name == "tt.load")


class _Scheduler:
    def __init__(self, function: Function) -> None:
        self.plan = Plan()
        self.ops = list(function.body.walk())
        self.plan.position = {op: i for i, op in enumerate(self.ops)}
        self.must: set[Value] = set()
        self.free_memo: dict[Value, bool] = {}
        self.cost_memo: dict[Value, float] = {}
        self.writes: dict[Block | None, list[int]] = {}
        for op in self.ops:
            if is_write(op):
                self.writes.setdefault(op.block, []).append(self.plan.position[op])
            if op.name == "tt.load" or any(v in self.plan.reads_memory for v in op.operands):
                self.plan.reads_memory |= {v for v in op.results if is_virtual(v)}

    def run(self) -> Plan:
        self.group_reductions()
        # Users come after what they use, so one backward walk visits every value after all its uses.
        for op in reversed(self.ops):
            for value in op.results:
                if isinstance(value.type, Tensor):
                    self.decide(value)
            self.record(op)
        return self.plan

    # -- uses --

    def record(self, op: Op) -> None:
        if op.name in IGNORED:
            return
        if op.results and is_virtual(op.result) and isinstance(op.result.type, Tensor):
            self.record_virtual(op)
            return
        for slot, value in enumerate(op.operands):
            if isinstance(value.type, Tensor):
                self.add_use(value, self.new_nest(op, slot), 1.0, True)
        if op.name == "tt.histogram":
            self.must |= {op.operands[0]}
        for index, (_, passed) in enumerate(op.successors):
            for slot, value in enumerate(passed):
                if isinstance(value.type, Tensor):
                    self.add_use(value, self.new_nest(op, 1000 * index + slot), 1.0, True)

    def record_virtual(self, op: Op) -> None:
        if op.name == "tt.split":
            self.must.add(op.operands[0])
        if op.name == "tt.gather":
            self.must.add(op.operands[0])
        if op.name == "tt.trans" and not self.free(op.operands[0]):
            self.must.add(op.operands[0])
        if op.name == "tt.reshape" and not self.free(op.operands[0]) and not _chunk_friendly(op):
            self.must.add(op.operands[0])
        direct = op.name in ELEMENTWISE or op.name in ("tt.load", "tt.addptr", "tt.expand_dims")
        direct = direct or (op.name == "tt.reshape" and _chunk_friendly(op))
        for result in op.results:
            targets = self.plan.uses.get(result, {})
            if result in self.plan.buffered:
                targets = {self.plan.fills[result]: Use(1.0, True)}
            for nest, use in targets.items():
                for value in op.operands:
                    if isinstance(value.type, Tensor):
                        factor = use.factor * _broadcast_factor(op)
                        self.add_use(value, nest, factor, use.direct and direct)

    def add_use(self, value: Value, nest: Nest, factor: float, direct: bool) -> None:
        uses = self.plan.uses.setdefault(value, {})
        if nest in uses:  # the same chunk of the same nest: computed once
            uses[nest].factor = max(uses[nest].factor, factor)
            uses[nest].direct = uses[nest].direct and direct
        else:
            uses[nest] = Use(factor, direct)

    def new_nest(self, op: Op, slot: int) -> Nest:
        key = self.plan.key(op, slot)
        if key not in self.plan.nests:
            leader = key[0]
            self.plan.nests[key] = Nest(leader, key[1], self.plan.position[leader], leader.block)
        return self.plan.nests[key]

    def group_reductions(self) -> None:
        """Group reductions of one shape into one nest if the later ones need nothing that is computed in between."""
        open_: dict[Block | None, Op] = {}
        for op in self.ops:
            if is_write(op) or op.name.startswith(("scf.", "cf.")):
                open_.pop(op.block, None)
            if op.name != "tt.reduce":
                continue
            leader = open_.get(op.block)
            if (
                leader
                and self.same_loops(leader, op)
                and all(self.computable_at(leader, v) for v in op.operands)
            ):
                self.plan.siblings[op] = self.plan.siblings[leader]
                self.plan.siblings[leader].append(op)
            else:
                open_[op.block] = op
                self.plan.siblings[op] = [op]

    def same_loops(self, first: Op, other: Op) -> bool:
        shapes = {shape_of(v.type) for v in (*first.operands, *other.operands)}
        return len(shapes) == 1 and first.attrs["axis"] == other.attrs["axis"]

    def computable_at(self, earlier: Op, value: Value) -> bool:
        """Return whether a tile can be computed at an earlier operation of its block."""
        todo, seen = [value], {value}
        while todo:
            value = todo.pop()
            op = value.producer
            if (
                op is None
                or self.plan.position[op] < self.plan.position[earlier]
                or op.name == "arith.constant"
            ):
                continue
            if not isinstance(value.type, Tensor) or not is_virtual(value):
                return False
            todo += [v for v in op.operands if v not in seen]
            seen |= set(op.operands)
        return True

    # -- decisions --

    def decide(self, value: Value) -> None:
        op = value.producer
        assert op is not None
        uses = self.plan.uses.get(value, {})
        if not uses or not is_virtual(value):
            return
        buffer = value in self.must
        hazard = False
        if not buffer and not self.free(value):
            total = sum(_EVERY_ITERATION if n.block is not op.block else u.factor for n, u in uses.items())
            if op.name == "tt.load":
                buffer = total > 1 or self.crosses_write(op, uses)
            elif op.name in ELEMENTWISE or op.name == "tt.gather":
                buffer = (total - 1) * self.cost(value) >= _EXPENSIVE
            elif op.name == "tt.trans":
                buffer = turns(op) and any(n.op.name in ("tt.store", "tt.reduce") for n in uses)
        if op.name == "tt.load":
            overlaps = {n: _overlap(op, n.op) for n in uses if n.op.name == "tt.store"}
            buffer = buffer or "possibly" in overlaps.values()
            hazard = any(o != "never" for o in overlaps.values())
            if not buffer:
                for nest, overlap in overlaps.items():
                    if overlap == "ask":
                        self.plan.ask.setdefault(nest, []).append(value)
        if not buffer:
            return
        self.plan.buffered.add(value)
        first = min(uses, key=lambda n: (n.position, self.plan.position[n.op]))
        write = self.next_write(op) if value in self.plan.reads_memory else None
        complete = uses[first].direct and uses[first].factor == 1 and not _nests_with_partial_order(first.op)
        complete = complete and op.name != "tt.trans" and not self.jumps_from_row_to_row(value, first)
        in_time = write is None or first.position <= write
        if complete and first.block is op.block and in_time and not hazard:
            self.plan.tee[value] = first
            self.plan.fills[value] = first
        else:
            position = first.position if write is None else min(first.position, write)
            self.plan.fills[value] = Nest(op, OWN, position, op.block)

    def jumps_from_row_to_row(self, value: Value, nest: Nest) -> bool:
        """Return whether a nest would read memory down many rows, a chunk of each, which no processor predicts."""
        if nest.op.name != "tt.reduce" or value not in self.plan.reads_memory:
            return False
        shape, axis = shape_of(nest.op.operands[0].type), nest.op.attrs["axis"]
        return bool(axis != lane_dimension(shape) and shape[axis] >= _MANY_ROWS)

    def next_write(self, op: Op) -> int | None:
        """Return the position of the next operation in the block that may write memory; None if there is none."""
        return next((w for w in self.writes.get(op.block, []) if w > self.plan.position[op]), None)

    def crosses_write(self, load: Op, uses: dict[Nest, Use]) -> bool:
        write = self.next_write(load)
        return write is not None and any(n.position > write for n in uses)

    def free(self, value: Value) -> bool:
        """Return whether a value is index or mask arithmetic on ranges and scalars, cheaper to redo than to read."""
        if not isinstance(value.type, Tensor):
            return True
        if value not in self.free_memo:
            op = value.producer
            if op is None or op.name not in _CHEAP_INDEX:
                self.free_memo[value] = False
            else:
                self.free_memo[value] = all(self.free(v) for v in op.operands)
        return self.free_memo[value]

    def cost(self, value: Value) -> float:
        if value not in self.cost_memo:
            op = value.producer
            if op is None or not is_virtual(value) or self.free(value):
                self.cost_memo[value] = 0.5
            elif op.name == "tt.load":
                self.cost_memo[value] = 2.0
            else:
                own = (
                    ELEMENTWISE[op.name].cost
                    if op.name in ELEMENTWISE
                    else 20.0
                    if op.name == "tt.gather"
                    else 0.0
                )
                wide = 2.0 if element_of(value.type).bits == 64 else 1.0
                self.cost_memo[value] = own * wide + sum(self.cost(v) for v in tile_operands(op))
        return self.cost_memo[value]


def _nest_per_operand(op: Op) -> bool:
    """Return whether each tile operand of the operation is written by a loop nest of its own."""
    return op.name in (
        "tt.dot", "tt.dot_scaled", "tt.cat", "tt.histogram", "scf.for", "scf.while", "scf.yield",
        "scf.condition", "tt.return", "tt.call", "tt.print", "cf.br", "cf.cond_br", "tt.map_elementwise",
        "tt.elementwise_inline_asm",
    )  # fmt: skip


def _nests_with_partial_order(op: Op) -> bool:
    return op.name in ("tt.scan", "tt.map_elementwise", "tt.elementwise_inline_asm", "tt.dot_scaled")


def _chunk_friendly(op: Op) -> bool:
    """Return whether every chunk of a reshape's result lies within one row of its operand."""
    source, result = shape_of(op.operands[0].type), shape_of(op.result.type)
    lanes = min(lane_extent(result), CHUNK)
    return lane_extent(source) >= lanes


def turns(op: Op) -> bool:
    """Return whether a transposition exchanges the last two dimensions and each has room for 16 x 16 blocks."""
    shape, order = shape_of(op.result.type), list(op.attrs["order"])
    rank = len(shape)
    return order == [*range(rank - 2), rank - 1, rank - 2] and min(shape[-2:]) >= CHUNK


def lane_dimension(shape: tuple[int, ...]) -> int:
    """Return the dimension that chunks run along: the last one that has more than one element."""
    return max((d for d, extent in enumerate(shape) if extent > 1), default=len(shape) - 1)


def lane_extent(shape: tuple[int, ...]) -> int:
    """Return the extent of the dimension that chunks run along."""
    return shape[lane_dimension(shape)] if shape else 1


def _broadcast_factor(op: Op) -> float:
    """Return how many times a nest over the result computes one element of the operand.

    A value that does not vary along the inner loops is computed outside them, so a broadcast dimension counts only
    if the operand varies along a dimension inside it.
    """
    if op.name == "tt.broadcast":
        source, result = shape_of(op.operands[0].type), shape_of(op.result.type)
        factor = 1
        for d, (s, r) in enumerate(zip(source, result, strict=True)):
            if s < r and any(extent > 1 for extent in source[d + 1 :]):
                factor *= r
        return float(factor)
    if op.name == "tt.gather":
        return 1.0
    return 1.0


# ---- may a load be fused into a store? -------------------------------------------------------------------

Stride = object  # 0, an int, a hashable description of a runtime stride, or None if the spacing is not equal


def strides(value: Value, memo: dict[Value, tuple[Stride, ...]] | None = None) -> tuple[Stride, ...]:
    """Return, per dimension, the difference of neighboring elements of an integer or pointer tile."""
    memo = {} if memo is None else memo
    if value not in memo:
        memo[value] = _strides(value, memo)
    return memo[value]


def _strides(value: Value, memo: dict[Value, tuple[Stride, ...]]) -> tuple[Stride, ...]:
    shape = shape_of(value.type)
    op = value.producer
    unknown: tuple[Stride, ...] = tuple(0 if extent == 1 else None for extent in shape)
    if op is None:
        return unknown
    if op.name in ("tt.splat", "arith.constant"):
        return (0,) * len(shape)
    if op.name == "tt.make_range":
        return (1,)
    if op.name == "tt.expand_dims":
        inner = list(strides(op.operands[0], memo))
        inner.insert(op.attrs["axis"], 0)
        return tuple(inner)
    if op.name == "tt.broadcast":
        source = shape_of(op.operands[0].type)
        inner = list(strides(op.operands[0], memo))
        return tuple(0 if s == 1 else i for s, i in zip(source, inner, strict=True))
    if op.name == "tt.trans":
        inner = list(strides(op.operands[0], memo))
        return tuple(inner[d] for d in op.attrs["order"])
    if op.name in ("arith.extsi", "arith.trunci", "arith.extui", "tt.bitcast"):
        return strides(op.operands[0], memo)
    if op.name in ("tt.addptr", "arith.addi"):
        left, right = (strides(v, memo) for v in op.operands)
        return tuple(_plus(a, b) for a, b in zip(left, right, strict=True))
    if op.name == "arith.muli":
        for tile, factor in (op.operands, op.operands[::-1]):
            producer = factor.producer
            if producer and producer.name == "tt.splat":
                return tuple(_times(s, producer.operands[0]) for s in strides(tile, memo))
            if producer and producer.name == "arith.constant" and isinstance(producer.attrs["value"], int):
                return tuple(_times(s, producer.attrs["value"]) for s in strides(tile, memo))
    return unknown


def holds_up_to(mask: Value, dim: int) -> bool:
    """Return whether a mask provably holds for a prefix of the elements along a dimension (perhaps all, or none)."""
    op, shape = mask.producer, shape_of(mask.type)
    if op is None or shape[dim] == 1:
        return shape[dim] == 1
    if op.name == "arith.andi":
        return all(holds_up_to(side, dim) for side in op.operands)
    if op.name == "tt.broadcast":
        return holds_up_to(op.operands[0], dim)
    if op.name == "tt.expand_dims":
        return holds_up_to(op.operands[0], dim - (dim > op.attrs["axis"]))
    if op.name == "tt.trans":
        return holds_up_to(op.operands[0], op.attrs["order"][dim])
    if op.name == "arith.cmpi":
        steps = tuple(strides(side)[dim] for side in op.operands)
        rising = {"slt": (1, 0), "sle": (1, 0), "sgt": (0, 1), "sge": (0, 1)}.get(predicate(op))
        return steps in ((0, 0), rising)
    return op.name == "tt.splat"


def contiguous_dim(source: Value, dims: tuple[int | None, ...]) -> int | None:
    """Return, of the dimensions that a load or stored tile is read along, the one that is contiguous in memory."""
    if source.producer and source.producer.name == "tt.load":
        steps = strides(source.producer.operands[0])
        return next((d for d, step in zip(dims, steps, strict=True) if step == 1), None)
    return dims[-1] if dims else None


def _plus(a: Stride, b: Stride) -> Stride:
    if a is None or b is None:
        return None
    if a == 0 or b == 0:
        return b if a == 0 else a
    return a + b if isinstance(a, int) and isinstance(b, int) else ("+", a, b)


def _times(a: Stride, factor: Value | int) -> Stride:
    if a is None or a == 0:
        return a
    if isinstance(a, int) and isinstance(factor, int):
        return a * factor
    return ("*", a, factor)


def _base(value: Value) -> Value | None:
    """Return the scalar pointer that a pointer tile is computed from."""
    while isinstance(value.type, Tensor):
        op = value.producer
        if op is None or op.name not in (
            "tt.addptr",
            "tt.broadcast",
            "tt.splat",
            "tt.expand_dims",
            "tt.trans",
        ):
            return None
        value = op.operands[0]
    while value.producer and value.producer.name in ("tt.addptr", "tt.bitcast"):
        value = value.producer.operands[0]
    return value


def _overlap(load: Op, store: Op) -> str:
    """Classify whether storing one chunk may change what a later chunk of the same nest still has to load.

    "never"      the same addresses: element for element in place
    "ask"        two pointers with equally spaced tiles, which may be views of one tensor: comparing the addresses
                 at run time tells whether they are identical, disjoint, or overlap
    "possibly"   anything else: everything is loaded before anything is stored
    """
    source, target = load.operands[0], store.operands[0]
    if source is target:
        return "never"
    if not isinstance(source.type, Tensor) or not isinstance(target.type, Tensor):
        return "never"
    from_base, to_base = _base(source), _base(target)
    if from_base is None or to_base is None or from_base is to_base or source.type.shape != target.type.shape:
        return "possibly"
    along, across = strides(source), strides(target)
    lane = lane_dimension(source.type.shape)
    if None in along or None in across or along[lane] != across[lane]:
        return "possibly"
    return "ask"
