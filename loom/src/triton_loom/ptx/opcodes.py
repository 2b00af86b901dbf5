"""Table of opcodes: maps each PTX instruction, with its modifiers, to a handler of the machine.

Plain arithmetic comes from codegen/ptx.py; instructions that touch memory, other lanes or the order of execution have a
row here. Patterns are written as there: `{.ftz}` is optional, `(u16|u32)` is a choice. A row's function takes the
statement and returns the machine's operation. **An instruction without a row is an error that names it**: no modifier
is ever ignored, except those that a row lists because they are only hints (caches). Orders and scopes of atomics, of
strong loads and stores and of fences become flags of the instruction (ptx/program.py).
"""

from __future__ import annotations

import re
from functools import lru_cache

from . import asynchronous, blackwell, scalars
from .operations import Operation, Row, UnknownInstruction, Use, address, elements, pair, words
from .text import Statement


def decode(statement: Statement) -> Operation:
    """Return the operation of a statement; raise `UnknownInstruction` if it is not supported."""
    row = _row(statement.opcode)
    if row is not None:
        try:
            return row.operation(statement)
        except (IndexError, ValueError) as error:
            if isinstance(error, UnknownInstruction):
                raise
            raise UnknownInstruction(statement, "its operands do not fit this instruction") from error
    name = statement.opcode
    if len(statement.operands) == 4:
        name = re.sub(r"^(min|max)(?=[.\w]*\.f32$)", r"\g<1>3", name)
    scalar = scalars.find(name)
    if scalar is None:
        raise UnknownInstruction(statement)
    return _arithmetic(statement, name, scalar.writes, scalar.reads)


@lru_cache(maxsize=4096)
def _row(opcode: str) -> Row | None:
    return next(
        (row for row in (*ROWS, *asynchronous.ROWS, *blackwell.ROWS) if row.names.fullmatch(opcode)), None
    )


def _arithmetic(
    statement: Statement, name: str, writes: tuple[str, ...], reads: tuple[str, ...]
) -> Operation:
    first, *rest = statement.operands
    read = [text for operand in rest for text in elements(operand)]
    results = list(pair(first)) if "|" in first else [first]
    if len(results) < scalars.least_results(name) or len(results) > len(writes) or len(read) != len(reads):
        raise UnknownInstruction(statement, "it has the wrong number of operands")
    types = (*writes[: len(results)], *reads)
    uses = tuple(Use(text, type_) for text, type_ in zip([*results, *read], types, strict=True))
    return Operation(name, uses, arithmetic=True)


# ---- moves -----------------------------------------------------------------------------------------------


def _move(s: Statement) -> Operation:
    """Decode a move between registers, or between a register and its parts."""
    type_ = words(s)[1]
    to, source = s.operands
    if type_ == "pred":
        return Operation("pred.mov", (Use(to, "pred"), Use(source, "pred")))
    bits = int(type_[1:])
    if to.startswith("{") or source.startswith("{"):
        parts = elements(to if to.startswith("{") else source)
        width = bits // len(parts)
        part_uses = tuple(Use(part, f"b{width}") for part in parts)
        if to.startswith("{"):
            return Operation(f"unpack.{bits}.{width}", (*part_uses, Use(source, type_)))
        return Operation(f"pack.{bits}.{width}", (Use(to, type_), *part_uses))
    return _arithmetic(s, s.opcode, (type_,), (type_,))


def _predicate_logic(s: Statement) -> Operation:
    return Operation(f"pred.{words(s)[0]}", tuple(Use(text, "pred") for text in s.operands))


def _address_space(s: Statement) -> Operation:
    """Decode cvta as a move: global, parameter and generic addresses are the same here."""
    return _arithmetic(s, "mov.u64", ("u64",), ("u64",))


def _policy(s: Statement) -> Operation:
    """Decode a cache policy: its value is 0, since nothing depends on it."""
    return Operation("mov.b64", (Use(s.operands[0], "b64"), Use("0", "b64")), arithmetic=True)


# ---- memory ----------------------------------------------------------------------------------------------


SPACES = ("global", "shared", "local", "param")


def _space(name: list[str]) -> str:
    return next(word.split(":")[0] for word in name if word.split(":")[0] in SPACES)


def _load(s: Statement) -> Operation:
    name = words(s)
    space, type_ = _space(name), name[-1]
    base, offset = address(s.operands[1])
    results = tuple(Use(text, type_) for text in elements(s.operands[0]))
    if space == "param":
        return Operation("ld.param", (*results, Use(base, "param")), offset)
    uses = (*results, Use(base, "u64" if space == "global" else "u32"))
    strong = {"relaxed", "acquire", "volatile"}.intersection(name)
    return Operation(f"ld.{space}", uses, offset, serial=space == "global" and bool(strong))


def _store(s: Statement) -> Operation:
    name = words(s)
    space, type_ = _space(name), name[-1]
    base, offset = address(s.operands[0])
    values = tuple(Use(text, type_) for text in elements(s.operands[1]))
    return Operation(f"st.{space}", (Use(base, "u64" if space == "global" else "u32"), *values), offset)


def _atomic(s: Statement) -> Operation:
    """Decode atom, whose result is the old value, or red, which has no result."""
    name = words(s)
    space = _space(name)
    type_ = name[-1]
    operation = next(word for word in name if word in _ATOMICS)
    operands = list(s.operands)
    results = elements(operands.pop(0)) if name[0] == "atom" else []
    base, offset = address(operands[0])
    values = [text for operand in operands[1:] for text in elements(operand)]
    count = 1 if operation == "cas" else len(elements(operands[1]))
    values = values[: 2 if operation == "cas" else count]  # not the cache policy
    results = results or ["_"] * count
    uses = [Use(text, type_) for text in results]
    uses += [Use(base, "u64" if space == "global" else "u32")]
    uses += [Use(text, type_) for text in values]
    return Operation(f"atom.{space}.{operation}.{type_}", tuple(uses), offset, serial=space == "global")


_ATOMICS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")

# ---- control ---------------------------------------------------------------------------------------------


def _branch(s: Statement) -> Operation:
    return Operation("branch", targets=(s.operands[0],), ends=True)


def _branch_by_index(s: Statement) -> Operation:
    index, table = s.operands
    return Operation("branch.table", (Use(index, "u32"),), targets=(table,), ends=True)


def _leave(s: Statement) -> Operation:
    return Operation("leave", ends=True)


def _fence(s: Statement) -> Operation:
    return Operation("fence")


def _nothing(s: Statement) -> Operation:
    return Operation("nothing")


# ---- lanes and barriers ----------------------------------------------------------------------------------


def _shuffle(s: Statement) -> Operation:
    result, in_range = pair(s.operands[0])
    uses = [Use(result, "b32"), Use(in_range, "pred"), *(Use(text, "b32") for text in s.operands[1:])]
    if len(uses) != 6:
        raise ValueError(s)
    return Operation(f"shfl.{words(s)[2]}", tuple(uses))


def _vote(s: Statement) -> Operation:
    mode = words(s)[2]
    result, predicate, members = s.operands
    type_ = "b32" if mode == "ballot" else "pred"
    return Operation(f"vote.{mode}", (Use(result, type_), Use(predicate, "pred"), Use(members, "b32")))


def _reduce(s: Statement) -> Operation:
    name = words(s)
    result, value, members = s.operands
    return Operation(
        ".".join([name[0], *name[2:]]), (Use(result, "b32"), Use(value, "b32"), Use(members, "b32"))
    )


def _elect(s: Statement) -> Operation:
    leader, is_leader = pair(s.operands[0])
    return Operation("elect", (Use(leader, "b32"), Use(is_leader, "pred"), Use(s.operands[1], "b32")))


def _active_mask(s: Statement) -> Operation:
    return Operation("activemask", (Use(s.operands[0], "b32"),))


def _barrier(s: Statement) -> Operation:
    """Decode a barrier. `bar` is `barrier.cta.aligned`: all threads of a warp arrive together."""
    name = words(s)
    action = "sync" if "sync" in name else "arrive"
    aligned = ".aligned" if name[0] == "bar" or "aligned" in name else ""
    threads = s.operands[1] if len(s.operands) > 1 else "0"
    return Operation(f"barrier.{action}{aligned}", (Use(s.operands[0], "u32"), Use(threads, "u32")))


def _warp_barrier(s: Statement) -> Operation:
    return Operation("bar.warp.sync", (Use(s.operands[0], "b32"),))


# ---- asynchronous copies ---------------------------------------------------------------------------------


def _copy(s: Statement) -> Operation:
    """Decode cp.async. The copy's size is part of the handler's name; an operand may limit the bytes that are read."""
    to, source, size, *rest = s.operands
    (to_base, to_offset), (base, offset) = address(to), address(source)
    has_policy = "L2::cache_hint" in words(s)
    if len(rest) > 1 + has_policy:
        raise ValueError(s)
    amount = rest[0] if len(rest) > has_policy else size
    offsets = (to_offset & 0xFFFFFFFF) | offset << 32
    uses = (Use(to_base, "u32"), Use(base, "u64"), Use(amount, "u32"))
    return Operation(f"cp.async.{int(size, 0)}", uses, offsets)


def _commit(s: Statement) -> Operation:
    return Operation("cp.async.commit_group")


def _wait(s: Statement) -> Operation:
    if s.operands:
        return Operation("cp.async.wait_group", immediate=int(s.operands[0], 0))
    return Operation("cp.async.wait_all")


# ---- matrices --------------------------------------------------------------------------------------------


def _load_matrix(s: Statement) -> Operation:
    count = next(word for word in words(s) if word in ("x1", "x2", "x4"))
    transposed = ".trans" if "trans" in words(s) else ""
    base, offset = address(s.operands[1])
    results = tuple(Use(text, "b32") for text in elements(s.operands[0]))
    return Operation(f"ldmatrix.{count}{transposed}", (*results, Use(base, "u32")), offset)


def _store_matrix(s: Statement) -> Operation:
    count = next(word for word in words(s) if word in ("x1", "x2", "x4"))
    transposed = ".trans" if "trans" in words(s) else ""
    base, offset = address(s.operands[0])
    values = tuple(Use(text, "b32") for text in elements(s.operands[1]))
    return Operation(f"stmatrix.{count}{transposed}", (Use(base, "u32"), *values), offset)


def _product(s: Statement) -> Operation:
    name = [word for word in words(s) if word not in ("sync", "aligned", "row", "col")]
    type_ = "b64" if "f64" in name else "b32"
    uses = tuple(Use(text, type_) for operand in s.operands for text in elements(operand))
    return Operation(".".join(name), uses)


def _scaled_product(s: Statement) -> Operation:
    """Decode a scaled product: besides the matrices, the scales of A and of B, each with its first byte and lane."""
    name = [word for word in words(s) if word not in ("sync", "aligned", "row", "col")]
    *matrices, scales_a, place_a, scales_b, place_b = s.operands
    uses = [Use(text, "b32") for operand in (*matrices, scales_a, scales_b) for text in elements(operand)]
    places = [int(number, 0) for place in (place_a, place_b) for number in elements(place)]
    return Operation(".".join(name), tuple(uses), int.from_bytes(bytes(places), "little"))


# ---- the table -------------------------------------------------------------------------------------------

_ANY = "(b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64)"
_SCOPE = "{.(cta|cluster|gpu|sys)}"
_SPACE = ".(global|shared|shared::cta)"
_PREFETCH = "{.(L2::64B|L2::128B|L2::256B)}"
_CACHE = (
    "{.(ca|cg|cs|lu|cv|wb|wt|nc)}{.(L1::evict_normal|L1::evict_unchanged|L1::evict_first|L1::evict_last|"
    "L1::no_allocate)}{.(L2::evict_last|L2::evict_normal|L2::evict_first)}{.L2::cache_hint}"
    f"{_PREFETCH}"
)
_COUNT = "{.(v2|v4|v8)}"
_ORDER = "{.(relaxed|acquire|release|acq_rel)}"
_ATOMIC = (
    f"(atom|red){_ORDER}{_SCOPE}{_SPACE}{_ORDER}{_SCOPE}{_ORDER}"  # Triton writes these in another order
)

ROWS: tuple[Row, ...] = (
    Row("mov.(pred|b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64)", _move),
    Row("(and|or|xor|not).pred", _predicate_logic),
    Row("cvta{.to}.(global|param).u64", _address_space),
    Row(
        "createpolicy.fractional.(L2::evict_last|L2::evict_first|L2::evict_normal|L2::evict_unchanged){.b64}",
        _policy,
    ),
    # memory
    Row(f"ld.param{_COUNT}.{_ANY}", _load),
    Row(f"ld.local{_COUNT}.{_ANY}", _load),
    Row(f"st.local{_COUNT}.{_ANY}", _store),
    Row(f"ld{{.(weak|volatile)}}{_SPACE}{_CACHE}{_COUNT}.{_ANY}", _load),
    Row(f"ld.volatile{_SPACE}{_COUNT}.{_ANY}", _load),
    Row(f"ld.(relaxed|acquire){_SCOPE}{_SPACE}{_CACHE}{_COUNT}.{_ANY}", _load),
    Row(f"st{{.(weak|volatile)}}{_SPACE}{_CACHE}{_COUNT}.{_ANY}", _store),
    Row(f"st.(relaxed|release){_SCOPE}{_SPACE}{_CACHE}{_COUNT}.{_ANY}", _store),
    Row(f"{_ATOMIC}.add{{.L2::cache_hint}}.(u32|s32|u64|s64|f64)", _atomic),
    Row(f"{_ATOMIC}.add{{.L2::cache_hint}}{{.(v2|v4)}}.f32", _atomic),
    Row(f"{_ATOMIC}.add.noftz{{.L2::cache_hint}}{_COUNT}.(f16|bf16)", _atomic),
    Row(f"{_ATOMIC}.add.noftz{{.L2::cache_hint}}{{.(v2|v4)}}.(f16x2|bf16x2)", _atomic),
    Row(f"{_ATOMIC}.(min|max){{.L2::cache_hint}}.(u32|s32|u64|s64)", _atomic),
    Row(f"{_ATOMIC}.(and|or|xor){{.L2::cache_hint}}.(b32|b64)", _atomic),
    Row(f"{_ATOMIC}.(inc|dec){{.L2::cache_hint}}.u32", _atomic),
    Row(f"{_ATOMIC.replace('(atom|red)', 'atom')}.exch{{.L2::cache_hint}}.(b32|b64)", _atomic),
    Row(f"{_ATOMIC.replace('(atom|red)', 'atom')}.cas{{.L2::cache_hint}}.(b16|b32|b64)", _atomic),
    # control
    Row("bra{.uni}", _branch),
    Row("brx.idx{.uni}", _branch_by_index),
    Row("(ret|exit){.uni}", _leave),
    Row("membar.(cta|gl|sys)", _fence),
    Row("fence{.(sc|acq_rel|acquire|release)}.(cta|cluster|gpu|sys)", _fence),
    Row("nanosleep.u32", _nothing),
    Row("griddepcontrol.(wait|launch_dependents)", _nothing),
    Row("prefetch{.global}.(L1|L2)", _nothing),
    # lanes
    Row("shfl.sync.(bfly|idx|up|down).b32", _shuffle),
    Row("vote.sync.ballot.b32", _vote),
    Row("vote.sync.(all|any|uni).pred", _vote),
    Row("redux.sync.(add|min|max).(s32|u32)", _reduce),
    Row("redux.sync.(and|or|xor).b32", _reduce),
    Row("redux.sync.(min|max){.abs}{.NaN}.f32", _reduce),
    Row("elect.sync", _elect),
    Row("activemask.b32", _active_mask),
    # barriers
    Row("bar{.cta}.(sync|arrive)", _barrier),
    Row("barrier{.cta}.(sync|arrive){.aligned}", _barrier),
    Row("bar.warp.sync", _warp_barrier),
    # asynchronous copies
    Row(f"cp.async.(ca|cg).shared{{::cta}}.global{{.L2::cache_hint}}{_PREFETCH}", _copy),
    Row(
        "cp.async.(commit_group|wait_group|wait_all)",
        lambda s: _commit(s) if "commit" in s.opcode else _wait(s),
    ),
    # matrices
    Row("ldmatrix.sync.aligned.m8n8.(x1|x2|x4){.trans}.shared{::cta}.b16", _load_matrix),
    Row("stmatrix.sync.aligned.m8n8.(x1|x2|x4){.trans}.shared{::cta}.b16", _store_matrix),
    Row("mma.sync.aligned.(m16n8k16|m16n8k8).row.col.f32.(bf16.bf16|f16.f16).f32", _product),
    Row("mma.sync.aligned.(m16n8k16|m16n8k8).row.col.f16.f16.f16.f16", _product),
    Row("mma.sync.aligned.(m16n8k8|m16n8k4).row.col.f32.tf32.tf32.f32", _product),
    Row(
        "mma.sync.aligned.m16n8k32.row.col.(f32.(e4m3|e5m2).(e4m3|e5m2).f32|f16.(e4m3|e5m2).(e4m3|e5m2).f16)",
        _product,
    ),
    Row(
        "mma.sync.aligned.m16n8k16.row.col.(f32.(e4m3.e4m3|e5m2.e5m2).f32|f16.(e4m3.e4m3|e5m2.e5m2).f16)",
        _product,
    ),
    Row("mma.sync.aligned.(m16n8k32|m16n8k16).row.col{.satfinite}.s32.(s8|u8).(s8|u8).s32", _product),
    Row("mma.sync.aligned.(m8n8k4|m16n8k4|m16n8k8|m16n8k16).row.col.f64.f64.f64.f64", _product),
    Row(
        "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X"
        ".f32.(e4m3|e5m2).(e4m3|e5m2).f32.ue8m0",
        _scaled_product,
    ),
    Row(
        "mma.sync.aligned.m16n8k64.row.col.kind::(mxf4|mxf4nvf4).block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0",
        _scaled_product,
    ),
    Row(
        "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3",
        _scaled_product,
    ),
)
